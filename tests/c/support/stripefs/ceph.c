/* SPDX-License-Identifier: Apache-2.0 */
/* CephFS's layouts: text in extended attributes, the whole layout or one field. */
#include "play.h"

#include <errno.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

static const char fields[][16] = { "stripe_unit", "stripe_count", "object_size", "pool" };
static const char data_pool[] = "cephfs_data";

/*
 * Returns the name of the field that this attribute holds, such as "stripe_unit" for
 * "ceph.file.layout.stripe_unit"; "" for the whole layout; NULL if the attribute describes no
 * layout.
 */
static const char *field_of(const struct node *node, const char *name)
{
	const char *prefix = S_ISDIR(node->stat.st_mode) ? "ceph.dir.layout" : "ceph.file.layout";
	const size_t length = strlen(prefix);

	if (strncmp(name, prefix, length) != 0)
		return NULL;
	if (!name[length])
		return "";
	return name[length] == '.' ? name + length + 1 : NULL;
}

static const char *pool_of(const struct component *component)
{
	return component->pool[0] ? component->pool : data_pool;
}

static int tell(const struct component *component, const char *field, char *text)
{
	if (!*field)
		return snprintf(text, MOST_LAYOUT_BYTES,
				"stripe_unit=%" PRIu64 " stripe_count=%u object_size=%" PRIu64
				" pool=%s",
				component->stripe_size, component->count, component->object_size,
				pool_of(component));
	if (strcmp(field, fields[0]) == 0)
		return snprintf(text, MOST_LAYOUT_BYTES, "%" PRIu64, component->stripe_size);
	if (strcmp(field, fields[1]) == 0)
		return snprintf(text, MOST_LAYOUT_BYTES, "%u", component->count);
	if (strcmp(field, fields[2]) == 0)
		return snprintf(text, MOST_LAYOUT_BYTES, "%" PRIu64, component->object_size);
	if (strcmp(field, fields[3]) == 0)
		return snprintf(text, MOST_LAYOUT_BYTES, "%s", pool_of(component));
	return -ENODATA;
}

ssize_t ceph_get(const struct node *node, const char *name, char *text)
{
	const char *field = field_of(node, name);

	/* A directory without a layout of its own does not report its parent's. */
	if (!field || !node->layout || !node->layout->count || options.traps & TRAP_NO_LAYOUT)
		return -ENODATA;
	return tell(&node->layout->components[0], field, text);
}

static int set_field(struct component *component, const char *field, const char *value)
{
	char *end;
	const uint64_t number = strtoull(value, &end, 10);

	if (strcmp(field, fields[3]) == 0) {
		if (strcmp(value, data_pool) == 0) {
			component->pool[0] = '\0';
			return 0;
		}
		if (!pool_find(value))
			return -ENOENT;
		memcpy(component->pool, value, strlen(value) + 1);
		return 0;
	}
	if (end == value || *end)
		return -EINVAL;
	if (strcmp(field, fields[0]) == 0)
		component->stripe_size = number;
	else if (strcmp(field, fields[1]) == 0)
		component->count = number > UINT16_MAX ? 0 : (uint16_t)number;
	else if (strcmp(field, fields[2]) == 0)
		component->object_size = number;
	else
		return -EINVAL;
	return 0;
}

static int set_fields(struct component *component, char *text)
{
	char *save = NULL;
	int result = 0;

	for (char *word = strtok_r(text, " ", &save); word && !result;
	     word = strtok_r(NULL, " ", &save)) {
		char *value = strchr(word, '=');

		if (!value)
			return -EINVAL;
		*value++ = '\0';
		result = set_field(component, word, value);
	}
	return result;
}

/*
 * Returns whether the layout obeys the rules of CephFS and those of stripefs. Both need units that
 * are multiples of 64 KiB.
 */
static bool makes_sense(const struct component *component)
{
	return component->stripe_size && component->stripe_size % CHUNK_BYTES == 0 &&
	       component->object_size && component->object_size % component->stripe_size == 0 &&
	       component->count && component->count <= MAX_TARGETS;
}

int ceph_set(struct node *node, const char *name, const char *value, size_t bytes)
{
	const char *field = field_of(node, name);
	struct layout wish;
	struct component *component = &wish.components[0];
	char text[512];
	int result;

	if (!field || bytes >= sizeof(text))
		return -EINVAL;
	if (S_ISREG(node->stat.st_mode) && node->stat.st_size)
		return -ENOTEMPTY;
	memcpy(text, value, bytes);
	text[bytes] = '\0';
	if (node->layout)
		wish = *node->layout;
	else
		layout_default(&wish);
	result = *field ? set_field(component, field, text) : set_fields(component, text);
	if (!result && !makes_sense(component))
		result = -EINVAL;
	if (result || options.traps & TRAP_SETXATTR_IGNORED)
		return result;
	if (!node->layout)
		node->layout = malloc(sizeof(*node->layout));
	if (!node->layout)
		abort();
	if (S_ISREG(node->stat.st_mode))
		return layout_create(node->layout, &wish);
	*node->layout = wish;
	return 0;
}
