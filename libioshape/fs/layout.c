/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Layouts: their texts, the setting "layout", the rule by size, and the creation of files. Pure
 * except for the last part. docs/filesystems.md explains the rule.
 */
#define _GNU_SOURCE
#include "fs/fs.h"

#include <ctype.h>
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/*
 * Limits of sizes and counts on Lustre. Other filesystems allow less, and then refuse the request.
 */
#define SIZE_UNIT (64 * KIB)
#define MOST_STRIPES 2000u

const struct fs_component *fs_layout_at(const struct fs_layout *layout, uint64_t offset)
{
	for (uint32_t i = 0; i < layout->count && i < FS_MOST_COMPONENTS; i++) {
		const struct fs_component *component = &layout->components[i];

		if (offset >= component->begin &&
		    (offset < component->end || component->end == UINT64_MAX))
			return component;
	}
	return NULL;
}

const struct fs_component *fs_layout_main(const struct fs_layout *layout, uint64_t file_bytes)
{
	const struct fs_component *most = NULL;
	uint64_t most_bytes = 0;

	if (!file_bytes)
		file_bytes = UINT64_MAX;
	for (uint32_t i = 0; i < layout->count && i < FS_MOST_COMPONENTS; i++) {
		const struct fs_component *component = &layout->components[i];
		uint64_t end = MIN(component->end, file_bytes);

		if (end > component->begin && end - component->begin > most_bytes) {
			most_bytes = end - component->begin;
			most = component;
		}
	}
	return most;
}

/* ---- Layouts as text ------------------------------------------------------------------------- */

/* A text of at most `bytes`; say() appends to it and cuts what does not fit. */
struct text {
	char *begin;
	size_t bytes, used;
};

__attribute__((format(printf, 2, 3))) static void say(struct text *text, const char *format, ...)
{
	va_list arguments;

	va_start(arguments, format);
	vsnprintf(text->begin + text->used, text->bytes - text->used, format, arguments);
	va_end(arguments);
	text->used += strlen(text->begin + text->used);
}

static void say_bytes(struct text *text, uint64_t bytes)
{
	static const char suffixes[] = "KMGTPE";
	size_t suffix = 0;

	if (bytes % 1024 || !bytes) {
		say(text, "%llu", (unsigned long long)bytes);
		return;
	}
	for (bytes /= 1024; bytes % 1024 == 0; suffix++)
		bytes /= 1024;
	say(text, "%llu%c", (unsigned long long)bytes, suffixes[suffix]);
}

static void say_component(struct text *text, const struct fs_component *component)
{
	if (component->on_metadata) {
		say(text, "on metadata");
		return;
	}
	if (component->stripe_count == FS_ALL_TARGETS)
		say(text, "all");
	else if (component->stripe_count)
		say(text, "%u", component->stripe_count);
	else
		say(text, "default");
	say(text, " x ");
	if (component->stripe_bytes)
		say_bytes(text, component->stripe_bytes);
	else
		say(text, "default");
	if (component->overstriped)
		say(text, " overstriped");
	if (*component->pool)
		say(text, ", pool %s", component->pool);
}

void fs_layout_text(const struct fs_layout *layout, char *text, size_t text_bytes)
{
	struct text out = { .begin = text, .bytes = text_bytes };

	if (!text_bytes)
		return;
	*text = 0;
	for (uint32_t i = 0; i < layout->count && i < FS_MOST_COMPONENTS; i++) {
		const struct fs_component *component = &layout->components[i];

		say(&out, "%s", i ? "; " : "");
		if (component->end != UINT64_MAX) {
			say(&out, "to ");
			say_bytes(&out, component->end);
			say(&out, ": ");
		}
		say_component(&out, component);
	}
	if (layout->count && layout->mirrors > 1)
		say(&out, ", %u copies", layout->mirrors);
	if (out.used + 1 == text_bytes && text_bytes > 3)
		memcpy(text + text_bytes - 4, "...", 4);
}

/* ---- The setting "layout" -------------------------------------------------------------------- */

/*
 * The grammar of "layout". Blanks around words are ignored.
 *
 *     request    auto | directory | pair { "," pair }
 *     pair       stripe_count=N | stripe_count=all | stripe_size=SIZE | pool=NAME
 */

/* Longer than any useful request. Longer texts are refused, since messages would cut them. */
#define MOST_TEXT 1024

#define TAKES "use auto, directory, or a layout such as stripe_count=8,stripe_size=4M,pool=flash"

enum key { KEY_COUNT, KEY_SIZE, KEY_POOL, KEYS };

static const char *const key_names[KEYS] = { "stripe_count", "stripe_size", "pool" };

struct parsing {
	const char *all; /* whole text, for messages */
	struct base_error *error;
};

/* Removes blanks from both ends, in place. */
static char *trim(char *text)
{
	size_t length;

	text += strspn(text, " \t\n");
	length = strlen(text);
	while (length && strchr(" \t\n", text[length - 1]))
		text[--length] = 0;
	return text;
}

/* Returns the pair before the next comma of *rest, trimmed; NULL if nothing is left. */
static char *next_pair(char **rest)
{
	char *pair = *rest, *end;

	if (!pair)
		return NULL;
	end = strchr(pair, ',');
	*rest = end ? end + 1 : NULL;
	if (end)
		*end = 0;
	return trim(pair);
}

/* Fails because `what`, a piece of the text, is not valid. */
static int refuse(const struct parsing *parsing, const char *what, const char *why,
		  const char *remedy)
{
	return base_fail_reason_with(parsing->error, -EINVAL, remedy,
				     "cannot use the layout \"%s\": \"%s\" %s", parsing->all, what,
				     why);
}

static int take_size(const struct parsing *parsing, const char *value, uint64_t *bytes)
{
	if (base_parse_bytes(value, bytes) || !*bytes || *bytes > UINT32_MAX || *bytes % SIZE_UNIT)
		return refuse(parsing, value, "is not a valid stripe_size",
			      "give a multiple of 64K below 4G");
	return 0;
}

static int take_count(const struct parsing *parsing, const char *value, uint32_t *count)
{
	unsigned long number;
	char *end;

	if (!strcmp(value, "all")) {
		*count = FS_ALL_TARGETS;
		return 0;
	}
	errno = 0;
	number = strtoul(value, &end, 10);
	if (!isdigit((unsigned char)*value) || *end || errno || !number || number > MOST_STRIPES)
		return refuse(parsing, value, "is not a valid stripe_count",
			      "give 1 to 2000, or all");
	*count = (uint32_t)number;
	return 0;
}

static int take_pool(const struct parsing *parsing, const char *value,
		     char pool[FS_TARGET_POOL_BYTES])
{
	static const char allowed[] = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
				      "0123456789_.-";
	const size_t length = strlen(value);

	if (!length || length >= FS_TARGET_POOL_BYTES || strspn(value, allowed) != length)
		return refuse(parsing, value, "is not a valid pool name",
			      "use 1 to 15 letters, digits and the characters _.-");
	memcpy(pool, value, length + 1);
	return 0;
}

static int take_pair(const struct parsing *parsing, char *pair, bool seen[KEYS],
		     struct fs_component *component)
{
	char *equals = strchr(pair, '='), *name, *value;
	int key;

	if (!equals)
		return refuse(parsing, pair, "is not a pair NAME=VALUE", TAKES);
	*equals = 0;
	name = trim(pair);
	value = trim(equals + 1);
	for (key = 0; key < KEYS && strcmp(name, key_names[key]) != 0; key++)
		;
	if (key == KEYS)
		return refuse(parsing, name, "is not a known key",
			      "use stripe_count, stripe_size and pool");
	if (seen[key])
		return refuse(parsing, name, "occurs twice", "give it once");
	seen[key] = true;
	switch ((enum key)key) {
	case KEY_COUNT:
		return take_count(parsing, value, &component->stripe_count);
	case KEY_SIZE:
		return take_size(parsing, value, &component->stripe_bytes);
	default:
		return take_pool(parsing, value, component->pool);
	}
}

static int take_pairs(const struct parsing *parsing, char *text, struct fs_component *component)
{
	bool seen[KEYS] = { false };
	char *rest = text, *pair;
	int ret = 0;

	if (strchr(text, ';'))
		return refuse(parsing, text, "has several components",
			      "set them on the directory: lfs setstripe -E");
	component->end = UINT64_MAX;
	while (!ret && (pair = next_pair(&rest)))
		ret = take_pair(parsing, pair, seen, component);
	return ret;
}

int fs_layout_request_parse(const char *text, struct fs_layout_request *request,
			    struct base_error *error)
{
	const struct parsing parsing = { text, error };
	char copy[MOST_TEXT], *words;

	memset(request, 0, sizeof(*request));
	if (strlen(text) >= sizeof(copy))
		return base_fail_reason_with(error, -EINVAL, TAKES,
					     "the layout has %zu characters, which is too long",
					     strlen(text));
	strcpy(copy, text);
	words = trim(copy);
	if (!strcmp(words, "auto"))
		return 0;
	request->kind = FS_REQUEST_DIRECTORY;
	if (!strcmp(words, "directory"))
		return 0;
	request->kind = FS_REQUEST_LAYOUT;
	return take_pairs(&parsing, words, &request->component);
}

/* ---- The rule by size ------------------------------------------------------------------------ */

/* Stripes for files up to a size: the rule of the default layout of FSx for Lustre. */
static const struct step {
	uint64_t bytes;
	uint32_t stripes;
} steps[] = {
	{ FS_ONE_STRIPE_BYTES, 1 },
	{ 10 * GIB, 8 },
	{ 100 * GIB, 16 },
	{ UINT64_MAX, 32 },
};

/*
 * With stripes below the first, a block would be cut into many small requests. The second replaces
 * such stripes: it is Lustre's initial default, and the most that its clients send in one request.
 */
#define LEAST_STRIPE_BYTES (1 * MIB)
#define GOOD_STRIPE_BYTES (4 * MIB)

/* Most files written at the same time: enough for any filesystem, and too few for a storm. */
#define MOST_CAPACITY 64u

#define LUSTRE_DEFAULT_STRIPES 1u
#define BEEGFS_DEFAULT_STRIPES 4u

bool fs_takes_layouts(enum fs_family family)
{
	return family == FS_LUSTRE || family == FS_BEEGFS;
}

static uint32_t stripes_by_size(const struct fs_facts *facts)
{
	const uint32_t writers = MAX(facts->writers, 1);
	const struct step *step = steps;
	uint32_t stripes;

	while (facts->file_bytes > step->bytes)
		step++;
	stripes = step->stripes;
	/* Leave each target to one file. */
	if (facts->targets)
		stripes = MIN(stripes, MAX(facts->targets / writers, 1));
	return stripes;
}

static int choose_by_size(const struct fs_facts *facts, struct fs_layout *ask, char *why,
			  size_t why_bytes)
{
	const struct fs_layout *own = &facts->directory;
	const struct fs_component *component = own->count ? &own->components[0] : NULL;
	const uint32_t wanted = stripes_by_size(facts);
	/*
	 * BeeGFS does not tell the layout of directories. On Lustre, no layout means that none was
	 * set.
	 */
	const uint32_t had = component && component->stripe_count ? component->stripe_count :
			     facts->family == FS_BEEGFS           ? BEEGFS_DEFAULT_STRIPES :
								    LUSTRE_DEFAULT_STRIPES;

	if (!facts->file_bytes) {
		snprintf(why, why_bytes, "the directory's layout: the file's size is not known");
		return 0;
	}
	if (own->count > 1 || own->mirrors > 1 || (component && component->on_metadata)) {
		snprintf(why, why_bytes, "the directory's layout: it is %s",
			 own->mirrors > 1 ? "mirrored" : "progressive");
		return 0;
	}
	if (had >= wanted) {
		snprintf(why, why_bytes, "the directory's layout: the file needs only %u stripe%s",
			 wanted, wanted == 1 ? "" : "s");
		return 0;
	}
	ask->count = ask->mirrors = 1;
	ask->components[0] = (struct fs_component){ .end = UINT64_MAX, .stripe_count = wanted };
	if (component) {
		ask->components[0].stripe_bytes = component->stripe_bytes;
		memcpy(ask->components[0].pool, component->pool, sizeof(component->pool));
		if (component->stripe_bytes && component->stripe_bytes < LEAST_STRIPE_BYTES)
			ask->components[0].stripe_bytes = GOOD_STRIPE_BYTES;
	}
	snprintf(why, why_bytes, "%u stripes for this file size: the directory gives %s%u", wanted,
		 component && component->stripe_count ? "" : "probably ", had);
	return 1;
}

/*
 * Fills in what the user left out with the directory's values. The server would use the defaults of
 * the whole filesystem.
 */
static void fill_in(struct fs_component *component, const struct fs_facts *facts)
{
	const struct fs_component *own = fs_layout_main(&facts->directory, facts->file_bytes);

	if (!own || own->on_metadata)
		return;
	if (!component->stripe_count)
		component->stripe_count = own->stripe_count;
	if (!component->stripe_bytes)
		component->stripe_bytes = own->stripe_bytes;
	if (!*component->pool)
		memcpy(component->pool, own->pool, sizeof(own->pool));
}

/* Returns whether the directory gives each file this layout. */
static bool is_given(const struct fs_layout *directory, const struct fs_component *component)
{
	const struct fs_component *own = &directory->components[0];

	return directory->count == 1 && directory->mirrors == 1 && own->end == UINT64_MAX &&
	       own->stripe_bytes == component->stripe_bytes &&
	       own->stripe_count == component->stripe_count && !own->on_metadata &&
	       !own->overstriped && !strcmp(own->pool, component->pool);
}

static int choose_wished(const struct fs_layout_request *request, const struct fs_facts *facts,
			 struct fs_layout *ask, char *why, size_t why_bytes)
{
	*ask = (struct fs_layout){ .count = 1, .mirrors = 1, .components = { request->component } };
	fill_in(&ask->components[0], facts);
	if (is_given(&facts->directory, &ask->components[0])) {
		snprintf(why, why_bytes, "as requested, which is the directory's layout");
		return 0;
	}
	snprintf(why, why_bytes, "as requested");
	return 1;
}

int fs_choose_layout(const struct fs_layout_request *request, const struct fs_facts *facts,
		     struct fs_layout *ask, char *why, size_t why_bytes)
{
	memset(ask, 0, sizeof(*ask));
	if (why_bytes)
		*why = 0;
	if (!fs_takes_layouts(facts->family)) {
		snprintf(why, why_bytes, "no support for layouts on %s",
			 fs_family_name(facts->family));
		return 0;
	}
	switch (request->kind) {
	case FS_REQUEST_AUTO:
		return choose_by_size(facts, ask, why, why_bytes);
	case FS_REQUEST_LAYOUT:
		return choose_wished(request, facts, ask, why, why_bytes);
	default:
		snprintf(why, why_bytes, "the directory's layout, as requested");
		return 0;
	}
}

int fs_take_target_group(const struct fs_facts *facts, const struct fs_even_targets *targets,
			 uint32_t group, uint32_t groups, struct fs_layout *ask)
{
	const struct fs_layout *layout = ask->count ? ask : &facts->directory;
	const uint32_t stripes = layout->count ? MAX(layout->components[0].stripe_count, 1u) :
						 LUSTRE_DEFAULT_STRIPES;
	struct fs_component component = layout->count ? layout->components[0] :
							(struct fs_component){ 0 };

	if (facts->family != FS_LUSTRE || layout->count > 1 || layout->mirrors > 1 ||
	    layout->chosen || component.on_metadata || component.overstriped || component.pool[0] ||
	    targets->count != facts->targets || groups < 2 || group > groups ||
	    stripes > targets->count / groups)
		return 0;
	component.end = UINT64_MAX;
	component.stripe_count = stripes;
	*ask = (struct fs_layout){ .count = 1, .mirrors = 1, .components = { component } };
	for (uint32_t i = 0; i < stripes; i++)
		ask->target[ask->chosen++] = targets->number[(group - 1) * stripes + i];
	return 1;
}

uint32_t fs_capacity(uint32_t targets, const struct fs_layout *layout, uint64_t file_bytes)
{
	const struct fs_component *component = fs_layout_main(layout, file_bytes);

	if (!targets || !component || !component->stripe_count)
		return 0;
	return MIN(MAX(targets / component->stripe_count, 1), MOST_CAPACITY);
}

/* ---- Creating files -------------------------------------------------------------------------- */

int fs_create_plainly(int directory_fd, const char *name, mode_t mode, int more_flags)
{
	const int flags = O_RDWR | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC | more_flags;
	int fd = openat(directory_fd, name, flags, mode), code;

	if (fd < 0)
		return -errno;
	fd = base_above_streams(fd);
	if (fd >= 0)
		return fd;
	code = -errno;
	unlinkat(directory_fd, name, 0);
	return code;
}

void fs_refused(struct fs_answer *answer, const char *what)
{
	if (!*answer->why)
		snprintf(answer->why, sizeof(answer->why), "%s: %s", what,
			 ioshape_strerror(-errno));
}
