/* SPDX-License-Identifier: Apache-2.0 */
/* Layouts: those that are told in words or numbers, and what to do with one. Pure. */
#include "fs/fs.h"
#include "fs/text.h"

#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

/* Both filesystems cut files in units that are a multiple of this. */
#define STRIPE_UNIT (64 * KIB)
#define MOST_STRIPES 65535

/* ---- Ceph ------------------------------------------------------------------------------------ */

/* A name that has no room is left out: cut, it would be another one. */
static void ceph_pool(const char *text, size_t bytes, struct fs_part *part)
{
	const char *value;
	size_t value_bytes;

	if (!fs_find_value(text, bytes, ' ', "pool", &value, &value_bytes) ||
	    value_bytes >= sizeof(part->pool))
		return;
	for (size_t i = 0; i < value_bytes; i++) {
		if (value[i] <= ' ' || value[i] >= 0x7f)
			return;
	}
	memcpy(part->pool, value, value_bytes);
}

int fs_ceph_layout(const char *text, size_t bytes, struct fs_layout *layout)
{
	struct fs_part part = { .end = UINT64_MAX };
	uint64_t unit, count, object;

	memset(layout, 0, sizeof(*layout));
	if (!fs_find_number(text, bytes, ' ', "stripe_unit", &unit) ||
	    !fs_find_number(text, bytes, ' ', "stripe_count", &count) ||
	    !fs_find_number(text, bytes, ' ', "object_size", &object))
		return -EINVAL;
	if (!unit || unit > UINT32_MAX || object > UINT32_MAX || unit % STRIPE_UNIT || !count ||
	    count > MOST_STRIPES || object < unit || object % unit)
		return -EINVAL;
	part.stripe_bytes = unit;
	part.stripe_count = (uint32_t)count;
	ceph_pool(text, bytes, &part);
	layout->count = 1;
	layout->mirrors = 1;
	layout->parts[0] = part;
	return 0;
}

/* ---- BeeGFS ---------------------------------------------------------------------------------- */

enum { BEEGFS_RAID0 = 1, BEEGFS_RAID10 = 2, BEEGFS_BUDDY_MIRROR = 3 };

int fs_beegfs_layout(uint32_t pattern, uint32_t chunk_bytes, uint16_t targets,
		     struct fs_layout *layout)
{
	memset(layout, 0, sizeof(*layout));
	if (pattern < BEEGFS_RAID0 || pattern > BEEGFS_BUDDY_MIRROR)
		return -ENOTSUP;
	if (chunk_bytes < STRIPE_UNIT || (chunk_bytes & (chunk_bytes - 1)) || !targets)
		return -EINVAL;
	layout->count = 1;
	layout->mirrors = pattern == BEEGFS_RAID0 ? 1 : 2;
	layout->parts[0] = (struct fs_part){ .end = UINT64_MAX,
					     .stripe_bytes = chunk_bytes,
					     .stripe_count = targets };
	return 0;
}

/* ---- Any ------------------------------------------------------------------------------------- */

const struct fs_part *fs_layout_at(const struct fs_layout *layout, uint64_t offset)
{
	for (uint32_t i = 0; i < layout->count && i < FS_MOST_PARTS; i++) {
		const struct fs_part *part = &layout->parts[i];

		if (offset >= part->begin && (offset < part->end || part->end == UINT64_MAX))
			return part;
	}
	return NULL;
}

const struct fs_part *fs_layout_main(const struct fs_layout *layout, uint64_t file_bytes)
{
	const struct fs_part *most = NULL;
	uint64_t most_bytes = 0;

	if (!file_bytes)
		file_bytes = UINT64_MAX;
	for (uint32_t i = 0; i < layout->count && i < FS_MOST_PARTS; i++) {
		const struct fs_part *part = &layout->parts[i];
		uint64_t end = MIN(part->end, file_bytes);

		if (end > part->begin && end - part->begin > most_bytes) {
			most_bytes = end - part->begin;
			most = part;
		}
	}
	return most;
}

/* ---- In words -------------------------------------------------------------------------------- */

/* Appends to a text of `bytes`; what has no room is cut off. */
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

static void say_part(struct text *text, const struct fs_part *part)
{
	if (part->on_metadata) {
		say(text, "on metadata");
		return;
	}
	if (part->stripe_count == FS_ALL_TARGETS)
		say(text, "all");
	else if (part->stripe_count)
		say(text, "%u", part->stripe_count);
	else
		say(text, "default");
	say(text, " x ");
	if (part->stripe_bytes)
		say_bytes(text, part->stripe_bytes);
	else
		say(text, "default");
	if (part->overstriped)
		say(text, " overstriped");
	if (*part->pool)
		say(text, ", pool %s", part->pool);
}

void fs_layout_text(const struct fs_layout *layout, char *text, size_t text_bytes)
{
	struct text out = { .begin = text, .bytes = text_bytes };

	if (!text_bytes)
		return;
	*text = 0;
	for (uint32_t i = 0; i < layout->count && i < FS_MOST_PARTS; i++) {
		const struct fs_part *part = &layout->parts[i];

		say(&out, "%s", i ? "; " : "");
		if (part->end != UINT64_MAX) {
			say(&out, "to ");
			say_bytes(&out, part->end);
			say(&out, ": ");
		}
		say_part(&out, part);
	}
	if (layout->count && layout->mirrors > 1)
		say(&out, ", %u copies", layout->mirrors);
	if (out.used + 1 == text_bytes && text_bytes > 3)
		memcpy(text + text_bytes - 4, "...", 4);
}
