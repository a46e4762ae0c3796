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

static int take_size(const struct parsing *parsing, const char *key, const char *value,
		     uint64_t most, uint64_t *bytes)
{
	if (base_parse_bytes(value, bytes) || !*bytes || *bytes > most || *bytes % SIZE_UNIT)
		return base_refuse(parsing->error, -EINVAL,
				   "the layout \"%s\" has %s=%s" BASE_REMEDY
				   "sizes are multiples of 64K%s",
				   parsing->all, key, value, most == UINT32_MAX ? " below 4G" : "");
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
		return base_refuse(parsing->error, -EINVAL,
				   "the layout \"%s\" has stripe_count=%s" BASE_REMEDY
				   "it takes 1 to %u, or all",
				   parsing->all, value, MOST_STRIPES);
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
		return base_refuse(parsing->error, -EINVAL,
				   "the layout \"%s\" has pool=%s" BASE_REMEDY
				   "names of pools are 1 to %d letters, digits, and any of _.-",
				   parsing->all, value, FS_TARGET_POOL_BYTES - 1);
	memcpy(pool, value, length + 1);
	return 0;
}

static int take_pair(const struct parsing *parsing, char *pair, bool seen[KEYS],
		     struct fs_part *part)
{
	char *equals = strchr(pair, '='), *name, *value;
	int key;

	if (!equals)
		return base_refuse(
			parsing->error, -EINVAL,
			"the layout \"%s\" is not understood at \"%s\"" BASE_REMEDY TAKES,
			parsing->all, pair);
	*equals = 0;
	name = trim(pair);
	value = trim(equals + 1);
	for (key = 0; key < KEYS && strcmp(name, key_names[key]) != 0; key++)
		;
	if (key == KEYS)
		return base_refuse(parsing->error, -EINVAL,
				   "the layout \"%s\" has \"%s\", which is not known" BASE_REMEDY
				   "there are to, stripe_count, stripe_size and pool",
				   parsing->all, name);
	if (seen[key])
		return base_refuse(parsing->error, -EINVAL,
				   "the layout \"%s\" has %s twice in one component", parsing->all,
				   name);
	seen[key] = true;
	switch ((enum key)key) {
	case KEY_TO:
		return take_size(parsing, name, value, UINT64_MAX, &part->end);
	case KEY_COUNT:
		return take_count(parsing, value, &part->stripe_count);
	case KEY_SIZE:
		return take_size(parsing, name, value, UINT32_MAX, &part->stripe_bytes);
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
		return base_refuse(parsing->error, -EINVAL,
				   "the layout \"%s\" has more than %d components", parsing->all,
				   FS_MOST_PARTS);
	part->begin = layout->count ? part[-1].end : 0;
	part->end = UINT64_MAX;
	while ((pair = next_piece(&rest, ','))) {
		ret = take_pair(parsing, pair, seen, part);
		if (ret)
			return ret;
	}
	/* What lies behind the last component could not be written. */
	if (last == seen[KEY_TO])
		return base_refuse(
			parsing->error, -EINVAL,
			last ? "the last component of the layout \"%s\" has a to=" BASE_REMEDY
			       "leave it out, because files may be longer" :
			       "a component of the layout \"%s\" has no to=" BASE_REMEDY
			       "only the last one may leave it out",
			parsing->all);
	if (part->end <= part->begin)
		return base_refuse(parsing->error, -EINVAL,
				   "the components of the layout \"%s\" do not rise: each to= must "
				   "be above the one before",
				   parsing->all);
	if (!last && part->stripe_bytes && part->end % part->stripe_bytes)
		return base_refuse(parsing->error, -EINVAL,
				   "a component of the layout \"%s\" does not end with a whole "
				   "stripe" BASE_REMEDY
				   "make its to= a multiple of its stripe_size",
				   parsing->all);
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
