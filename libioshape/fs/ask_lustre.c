/* SPDX-License-Identifier: Apache-2.0 */
/*
 * New files with a layout on Lustre. The file is created without objects (O_LOV_DELAY_CREATE), and
 * then told how it shall lie. If that does not come to pass, such a file cannot be written: who
 * asked removes it.
 */
#define _GNU_SOURCE
#include "fs/ask.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/xattr.h>
#include <unistd.h>

#define LUSTRE_SETSTRIPE 0x4008669au
#define LUSTRE_DELAY_CREATE 0x2100
#define LUSTRE_LAYOUT "lustre.lov"
#define MOST_LAYOUT_BYTES 65536

#define MAGIC_V1 0x0BD10BD0u
#define MAGIC_V3 0x0BD30BD0u
#define MAGIC_SPECIFIC 0x0BD50BD0u
#define MAGIC_COMPOSITE 0x0BD60BD0u
#define PATTERN_RAID0 1u
#define PATTERN_OVERSTRIPED 0x200u
#define ANY_TARGET 0xffffu
#define ALL_TARGETS 0xffffu

#define V1_BYTES 32u
#define V3_BYTES 48u
#define OBJECT_BYTES 24u
#define OBJECT_TARGET_AT 20u
#define COMPOSITE_BYTES 32u
#define ENTRY_BYTES 48u

static void put16(uint8_t *to, size_t at, uint16_t value)
{
	memcpy(to + at, &value, sizeof(value));
}

static void put32(uint8_t *to, size_t at, uint32_t value)
{
	memcpy(to + at, &value, sizeof(value));
}

static void put64(uint8_t *to, size_t at, uint64_t value)
{
	memcpy(to + at, &value, sizeof(value));
}

/* One way to stripe: v3 if it names a pool, v1 otherwise. */
static size_t put_part(uint8_t *to, const struct fs_part *part)
{
	const bool pool = *part->pool;

	put32(to, 0, pool ? MAGIC_V3 : MAGIC_V1);
	put32(to, 4, PATTERN_RAID0 | (part->overstriped ? PATTERN_OVERSTRIPED : 0));
	put32(to, 24, (uint32_t)part->stripe_bytes);
	put16(to, 28, (uint16_t)MIN(part->stripe_count, ALL_TARGETS));
	put16(to, 30, ANY_TARGET);
	if (pool)
		memcpy(to + V1_BYTES, part->pool, FS_TARGET_POOL_BYTES);
	return pool ? V3_BYTES : V1_BYTES;
}

/* Version 3, whether it names a pool or not, with the targets behind it, of which one is first. */
static size_t put_chosen(uint8_t *to, const struct fs_layout *ask)
{
	_Static_assert(V3_BYTES + FS_MOST_TARGETS * OBJECT_BYTES <= FS_LUSTRE_ASK_BYTES,
		       "all targets fit");
	put_part(to, &ask->parts[0]);
	put32(to, 0, MAGIC_SPECIFIC);
	put16(to, 30, ask->target[0]);
	for (uint32_t i = 0; i < ask->chosen; i++)
		put32(to, V3_BYTES + i * OBJECT_BYTES + OBJECT_TARGET_AT, ask->target[i]);
	return V3_BYTES + ask->chosen * OBJECT_BYTES;
}

size_t fs_lustre_ask(const struct fs_layout *ask, uint8_t blob[FS_LUSTRE_ASK_BYTES])
{
	const uint32_t count = MIN(ask->count, FS_MOST_PARTS);
	size_t end = COMPOSITE_BYTES + count * ENTRY_BYTES, bytes;

	_Static_assert(COMPOSITE_BYTES + FS_MOST_PARTS * (ENTRY_BYTES + V3_BYTES) <=
			       FS_LUSTRE_ASK_BYTES,
		       "all parts fit");
	memset(blob, 0, FS_LUSTRE_ASK_BYTES);
	if (ask->chosen)
		return put_chosen(blob, ask);
	if (count == 1)
		return put_part(blob, &ask->parts[0]);
	for (uint32_t i = 0; i < count; i++) {
		const struct fs_part *part = &ask->parts[i];
		uint8_t *entry = blob + COMPOSITE_BYTES + i * ENTRY_BYTES;

		bytes = put_part(blob + end, part);
		put64(entry, 8, part->begin);
		put64(entry, 16, part->end);
		put32(entry, 24, (uint32_t)end);
		put32(entry, 28, (uint32_t)bytes);
		end += bytes;
	}
	put32(blob, 0, MAGIC_COMPOSITE);
	put32(blob, 4, (uint32_t)end);
	put16(blob, 14, (uint16_t)count);
	return end;
}

/* A layout that is only a default, not this file's, comes without objects. */
static bool has_objects(const uint8_t *blob, size_t bytes)
{
	uint32_t magic;
	uint16_t count;

	if (bytes < V1_BYTES)
		return false;
	memcpy(&magic, blob, sizeof(magic));
	memcpy(&count, blob + 28, sizeof(count));
	if (magic == __builtin_bswap32(MAGIC_V1) || magic == __builtin_bswap32(MAGIC_V3)) {
		magic = __builtin_bswap32(magic);
		count = __builtin_bswap16(count);
	}
	if (magic == MAGIC_V1)
		return count && bytes >= V1_BYTES + (size_t)count * OBJECT_BYTES;
	if (magic == MAGIC_V3)
		return count && bytes >= V3_BYTES + (size_t)count * OBJECT_BYTES;
	/* Of a composite one the objects of later parts come when they are written. */
	return true;
}

static void read_back(int fd, struct fs_answer *answer)
{
	uint8_t *blob = malloc(MOST_LAYOUT_BYTES);
	ssize_t bytes;

	if (!blob)
		return;
	bytes = fgetxattr(fd, LUSTRE_LAYOUT, blob, MOST_LAYOUT_BYTES);
	if (bytes > 0 && has_objects(blob, (size_t)bytes) &&
	    fs_lustre_layout(blob, (size_t)bytes, &answer->got))
		answer->got.count = 0;
	free(blob);
}

int fs_ask_lustre(int directory_fd, const char *name, mode_t mode, const struct fs_layout *ask,
		  struct fs_answer *answer)
{
	/* Written to, too: it answers in the same place. */
	uint8_t blob[FS_LUSTRE_ASK_BYTES];
	size_t bytes = fs_lustre_ask(ask, blob);
	int fd = fs_create_plainly(directory_fd, name, mode, LUSTRE_DELAY_CREATE), ret;

	if (fd < 0) {
		if (fd != -EEXIST)
			fs_refused(answer, "creating it without objects");
		return fd;
	}
	/* Of several parts clients are told by this attribute, which older ones know as well. */
	ret = ask->count > 1 ? fsetxattr(fd, LUSTRE_LAYOUT, blob, bytes, 0) :
			       ioctl(fd, LUSTRE_SETSTRIPE, blob);
	if (ret)
		fs_refused(answer, "setstripe");
	/* It may say 0 and have done nothing, or EEXIST and nobody hears: what it has is what
	 * counts. */
	read_back(fd, answer);
	return fd;
}
