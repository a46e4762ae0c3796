/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The setting "layout": the layout that a user requests. Its grammar, blanks around each word left
 * out:
 *
 *   request    auto | directory | components
 *   components component { ";" component }     each but the last one has a "to"
 *   component  pair { "," pair }
 *   pair       to=SIZE | stripe_count=N | stripe_count=all | stripe_size=SIZE | pool=NAME
 */
#include "fs/fs.h"

#include <ctype.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>

/* What Lustre asks of sizes and counts; the others take less, and say so when they are asked. */
#define SIZE_UNIT (64 * KIB)
#define MOST_STRIPES 2000u

/* Longer than any request that makes sense: what is cut off would be in a message. */
#define MOST_TEXT 1024

#define TAKES                                                                                      \
	"it takes auto, directory, or such as stripe_count=8,stripe_size=4M,pool=flash, or "       \
	"components such as to=100M,stripe_count=1; stripe_count=8"

enum key { KEY_TO, KEY_COUNT, KEY_SIZE, KEY_POOL, KEYS };

static const char *const key_names[KEYS] = { "to", "stripe_count", "stripe_size", "pool" };

struct parsing {
	const char *all; /* for messages */
	struct fs_layout *layout;
	struct base_error *error;
};

/* Cuts blanks off both ends, in place. */
static char *trim(char *text)
{
	size_t length;

	text += strspn(text, " \t\n");
	length = strlen(text);
	while (length && strchr(" \t\n", text[length - 1]))
		text[--length] = 0;
	return text;
}

/* The piece of *rest up to the separator; NULL if nothing is left. */
static char *next_piece(char **rest, char separator)
{
	char *piece = *rest, *end;

	if (!piece)
		return NULL;
	end = strchr(piece, separator);
	*rest = end ? end + 1 : NULL;
	if (end)
		*end = 0;
	return trim(piece);
}

/* `what`, a piece of the text, is wrong in this way. */
static int refuse(const struct parsing *parsing, const char *what, const char *why,
		  const char *remedy)
{
	return base_refuse(parsing->error, -EINVAL,
			   "cannot use the layout \"%s\": \"%s\" %s" BASE_REMEDY "%s", parsing->all,
			   what, why, remedy);
}

static int take_size(const struct parsing *parsing, const char *value, uint64_t most,
		     uint64_t *bytes)
{
	if (base_parse_bytes(value, bytes) || !*bytes || *bytes > most || *bytes % SIZE_UNIT)
		return refuse(parsing, value, "is no size of a stripe or component",
			      "give a multiple of 64K; stripes are smaller than 4G");
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
		return refuse(parsing, value, "is no stripe_count", "give 1 to 2000, or all");
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
		return refuse(parsing, value, "is no name of a pool",
			      "give 1 to 15 letters, digits, and any of _.-");
	memcpy(pool, value, length + 1);
	return 0;
}

static int take_pair(const struct parsing *parsing, char *pair, bool seen[KEYS],
		     struct fs_part *part)
{
	char *equals = strchr(pair, '='), *name, *value;
	int key;

	if (!equals)
		return refuse(parsing, pair, "is not understood", TAKES);
	*equals = 0;
	name = trim(pair);
	value = trim(equals + 1);
	for (key = 0; key < KEYS && strcmp(name, key_names[key]) != 0; key++)
		;
	if (key == KEYS)
		return refuse(parsing, name, "is not known",
			      "use to, stripe_count, stripe_size and pool");
	if (seen[key])
		return refuse(parsing, name, "occurs twice in a component", "give it once");
	seen[key] = true;
	switch ((enum key)key) {
	case KEY_TO:
		return take_size(parsing, value, UINT64_MAX, &part->end);
	case KEY_COUNT:
		return take_count(parsing, value, &part->stripe_count);
	case KEY_SIZE:
		return take_size(parsing, value, UINT32_MAX, &part->stripe_bytes);
	default:
		return take_pool(parsing, value, part->pool);
	}
}

static int take_component(const struct parsing *parsing, char *component, bool last)
{
	struct fs_layout *layout = parsing->layout;
	struct fs_part *part = &layout->parts[layout->count];
	bool seen[KEYS] = { false };
	char *rest = component, *pair;
	int ret;

	if (layout->count == FS_MOST_PARTS)
		return refuse(parsing, component, "is one component too many", "give at most 8");
	part->begin = layout->count ? part[-1].end : 0;
	part->end = UINT64_MAX;
	while ((pair = next_piece(&rest, ','))) {
		ret = take_pair(parsing, pair, seen, part);
		if (ret)
			return ret;
	}
	/* What lies behind the last component could not be written. */
	if (last && seen[KEY_TO])
		return refuse(parsing, "to", "is given for the last component",
			      "leave it out, because files may be longer");
	if (!last && !seen[KEY_TO])
		return refuse(parsing, "to", "is missing in a component",
			      "only the last one may leave it out");
	if (part->end <= part->begin)
		return refuse(parsing, "to", "is not above that of the component before",
			      "let the components rise");
	if (!last && part->stripe_bytes && part->end % part->stripe_bytes)
		return refuse(parsing, "to", "is not at the end of a stripe",
			      "give a multiple of the component's stripe_size");
	layout->count++;
	return 0;
}

static int take_components(const struct parsing *parsing, char *text)
{
	char *rest = text, *component;
	int ret = 0;

	while (!ret && (component = next_piece(&rest, ';')))
		ret = take_component(parsing, component, !rest);
	return ret;
}

int fs_layout_request_parse(const char *text, struct fs_layout_request *request,
			    struct base_error *error)
{
	struct parsing parsing = { text, &request->layout, error };
	char copy[MOST_TEXT], *words;

	memset(request, 0, sizeof(*request));
	if (strlen(text) >= sizeof(copy))
		return base_refuse(error, -EINVAL,
				   "a layout of %zu characters is too long" BASE_REMEDY TAKES,
				   strlen(text));
	strcpy(copy, text);
	words = trim(copy);
	if (!strcmp(words, "auto"))
		return 0;
	request->kind = FS_REQUEST_DIRECTORY;
	if (!strcmp(words, "directory"))
		return 0;
	request->kind = FS_REQUEST_LAYOUT;
	request->layout.mirrors = 1;
	return take_components(&parsing, words);
}
