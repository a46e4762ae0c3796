/* SPDX-License-Identifier: Apache-2.0 */
/*
 * New files with a layout. It is fixed when a file is created, servers may cut it, ignore it or
 * refuse it, and some report success when it was not applied. So it is read back. Where a file
 * cannot get the layout it gets the directory's, because a save matters more than its stripes.
 */
#define _GNU_SOURCE
#include "fs/ask.h"
#include "fs/family.h"
#include "fs/text.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/stat.h>
#include <sys/xattr.h>
#include <unistd.h>

/* ---- Lustre ---------------------------------------------------------------------------------- */

/*
 * Lustre creates the file without objects (O_LOV_DELAY_CREATE), and then takes its layout. Without
 * a layout the file cannot be written, and the caller removes it.
 */

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
	/* A composite layout gets the objects of its later components when they are written. */
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

/*
 * Creates a file (O_EXCL). `answer` says whether it has the layout. Returns a descriptor or a
 * negative errno. After an error no file is left, except with -EEXIST: that file is not ours.
 */
static int ask_lustre(int directory_fd, const char *name, mode_t mode, const struct fs_layout *ask,
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
	/* Composite layouts are set by this attribute, which older clients support, too. */
	ret = ask->count > 1 ? fsetxattr(fd, LUSTRE_LAYOUT, blob, bytes, 0) :
			       ioctl(fd, LUSTRE_SETSTRIPE, blob);
	if (ret)
		fs_refused(answer, "setstripe");
	/* The client may report success without setting the layout, or EEXIST after setting it. So
	 * read the layout back. */
	read_back(fd, answer);
	return fd;
}

/* ---- BeeGFS ---------------------------------------------------------------------------------- */

/* BeeGFS creates such a file through an ioctl on its directory. */

#define BEEGFS_MKFILE_STRIPEHINTS 0x4018661bu
#define BEEGFS_MOST_TARGETS 0xffffu

/* Part of its client's ABI, on hosts with pointers of 64 bits. */
struct beegfs_hints {
	const char *name;
	uint32_t mode;
	uint32_t targets; /* 0: as the directory */
	uint32_t chunk;
};

static bool is_ours_and_new(int fd)
{
	struct stat status;

	return !fstat(fd, &status) && S_ISREG(status.st_mode) && !status.st_size &&
	       status.st_nlink == 1 && base_is_own_user(status.st_uid);
}

static int ask_beegfs(int directory_fd, const char *name, mode_t mode, const struct fs_layout *ask,
		      struct fs_answer *answer)
{
	const struct fs_part *part = &ask->parts[0];
	struct beegfs_hints hints;
	int fd, code;

	memset(&hints, 0, sizeof(hints)); /* what lies between its fields, too */
	hints.name = name;
	hints.mode = mode;
	hints.targets = MIN(part->stripe_count, BEEGFS_MOST_TARGETS);
	hints.chunk = (uint32_t)part->stripe_bytes;
	if (sizeof(hints) != 24 || ask->count != 1) {
		errno = EOPNOTSUPP;
		fs_refused(answer, "a file with hints");
		return -EOPNOTSUPP;
	}
	/* By name, under the directory, and only if there is none. */
	if (ioctl(directory_fd, BEEGFS_MKFILE_STRIPEHINTS, &hints)) {
		code = -errno;
		fs_refused(answer, "a file with hints");
		return code;
	}
	fd = base_above_streams(
		openat(directory_fd, name, O_RDWR | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC));
	if (fd < 0 || !is_ours_and_new(fd)) {
		code = fd < 0 ? -errno : -EBUSY;
		errno = -code;
		fs_refused(answer, "opening a file with hints");
		unlinkat(directory_fd, name, 0);
		if (fd >= 0)
			close(fd);
		return code;
	}
	/* O_NONBLOCK was for the case that another kind of file had this name. */
	fcntl(fd, F_SETFL, fcntl(fd, F_GETFL) & ~O_NONBLOCK);
	/* The file can be written with any stripes. */
	answer->plain = true;
	fs_ask_for_layout(fd, FS_BEEGFS, false, &answer->got);
	return fd;
}

/* ---- CephFS ---------------------------------------------------------------------------------- */

/* CephFS takes a layout as long as the file is empty. */

#define CEPH_LAYOUT "ceph.file.layout"
#define CEPH_TEXT_BYTES 256

/* A number above 0. */
static bool find_number(const char *text, size_t bytes, const char *name, uint64_t *number)
{
	return fs_find_number(text, bytes, ' ', name, number) && *number && *number <= UINT32_MAX;
}

int fs_ceph_ask(const struct fs_layout *ask, const char *now, size_t now_bytes, char *text,
		size_t text_bytes)
{
	const struct fs_part *part = &ask->parts[0];
	uint64_t unit, count, object;
	int length;

	if (!find_number(now, now_bytes, "stripe_unit", &unit) ||
	    !find_number(now, now_bytes, "stripe_count", &count) ||
	    !find_number(now, now_bytes, "object_size", &object) || ask->count != 1)
		return -EINVAL;
	if (part->stripe_bytes)
		unit = part->stripe_bytes;
	/* Clients do not know how many targets there are. */
	if (part->stripe_count && part->stripe_count != FS_ALL_TARGETS)
		count = part->stripe_count;
	/* An object holds whole stripe units. */
	object = (MAX(object, unit) + unit - 1) / unit * unit;
	/* Set all values at once: one by one, some intermediate combination is invalid. */
	length = snprintf(text, text_bytes,
			  "stripe_unit=%llu stripe_count=%llu object_size=%llu%s%s",
			  (unsigned long long)unit, (unsigned long long)count,
			  (unsigned long long)object, *part->pool ? " pool=" : "", part->pool);
	return length < 0 || (size_t)length >= text_bytes ? -EINVAL : 0;
}

static void set_ceph_layout(int fd, const struct fs_layout *ask, struct fs_answer *answer)
{
	char now[CEPH_TEXT_BYTES], text[CEPH_TEXT_BYTES];
	ssize_t bytes = fgetxattr(fd, CEPH_LAYOUT, now, sizeof(now));

	if (bytes < 0) {
		fs_refused(answer, "reading " CEPH_LAYOUT);
	} else if (fs_ceph_ask(ask, now, (size_t)bytes, text, sizeof(text))) {
		errno = EINVAL;
		fs_refused(answer, CEPH_LAYOUT " is not understood");
	} else if (fsetxattr(fd, CEPH_LAYOUT, text, strlen(text), 0)) {
		fs_refused(answer, "setting " CEPH_LAYOUT);
	}
}

static int ask_ceph(int directory_fd, const char *name, mode_t mode, const struct fs_layout *ask,
		    struct fs_answer *answer)
{
	int fd = fs_create_plainly(directory_fd, name, mode, 0);

	if (fd < 0)
		return fd;
	answer->plain = true;
	set_ceph_layout(fd, ask, answer);
	fs_ask_for_layout(fd, FS_CEPH, false, &answer->got);
	return fd;
}

/* ---- Any of them ----------------------------------------------------------------------------- */

#define TEXT_BYTES 64

/* ---- What was given ---------------------------------------------------------------------------
 */

static bool part_is_another(const struct fs_part *ask, const struct fs_part *got)
{
	if (ask->begin != got->begin || ask->end != got->end || got->on_metadata)
		return true;
	if (ask->stripe_bytes && ask->stripe_bytes != got->stripe_bytes)
		return true;
	if (*ask->pool && strcmp(ask->pool, got->pool) != 0)
		return true;
	return ask->stripe_count && ask->stripe_count < got->stripe_count;
}

int fs_differs(const struct fs_layout *ask, const struct fs_layout *got, char *text,
	       size_t text_bytes)
{
	char asked[TEXT_BYTES], given[TEXT_BYTES];
	bool fewer = false, another = ask->count != got->count;

	for (uint32_t i = 0; !another && i < ask->count; i++) {
		const struct fs_part *a = &ask->parts[i], *g = &got->parts[i];

		another = part_is_another(a, g);
		fewer = fewer ||
			(a->stripe_count != FS_ALL_TARGETS && g->stripe_count < a->stripe_count);
	}
	if (text_bytes)
		*text = 0;
	if (!another && !fewer)
		return 0;
	fs_layout_text(ask, asked, sizeof(asked));
	fs_layout_text(got, given, sizeof(given));
	snprintf(text, text_bytes, "layout %s was asked for, %s was given", asked,
		 got->count ? given : "none");
	return another ? 2 : 1;
}

/* ---- Any --------------------------------------------------------------------------------------
 */

static int ask_for(int directory_fd, const char *name, mode_t mode, enum fs_family family,
		   const struct fs_layout *ask, struct fs_answer *answer)
{
	switch (family) {
	case FS_LUSTRE:
		return ask_lustre(directory_fd, name, mode, ask, answer);
	case FS_BEEGFS:
		return ask_beegfs(directory_fd, name, mode, ask, answer);
	case FS_CEPH:
		return ask_ceph(directory_fd, name, mode, ask, answer);
	default:
		snprintf(answer->why, sizeof(answer->why), "%s takes no layouts",
			 fs_family_name(family));
		return -EOPNOTSUPP;
	}
}

int fs_create_with_layout(int directory_fd, const char *name, mode_t mode, enum fs_family family,
			  const struct fs_layout *ask, char *note, size_t note_bytes)
{
	struct fs_answer answer = { 0 };
	char asked[TEXT_BYTES], given[TEXT_BYTES];
	int fd, differs;

	if (note_bytes)
		*note = 0;
	fd = ask_for(directory_fd, name, mode, family, ask, &answer);
	if (fd == -EEXIST)
		return fd;
	if (fd >= 0) {
		differs = fs_differs(ask, &answer.got, note, note_bytes);
		if (differs < 2 || (answer.plain && !*answer.why))
			return fd;
		if (!answer.plain) {
			unlinkat(directory_fd, name, 0);
			close(fd);
			fd = -1;
		}
	}
	/* A save matters more than its stripes. */
	fs_layout_text(ask, asked, sizeof(asked));
	fs_layout_text(&answer.got, given, sizeof(given));
	if (!*answer.why)
		snprintf(answer.why, sizeof(answer.why), "%s was given",
			 answer.got.count ? given : "none");
	snprintf(note, note_bytes,
		 "the file could not get the layout %s and has the directory's: %s", asked,
		 answer.why);
	return fd >= 0 ? fd : fs_create_plainly(directory_fd, name, mode, 0);
}
