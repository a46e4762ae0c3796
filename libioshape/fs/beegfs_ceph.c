/* SPDX-License-Identifier: Apache-2.0 */
/*
 * BeeGFS and CephFS: reads the layouts of files. Layouts can be requested on BeeGFS; CephFS
 * distributes each file by itself. Numbers and attribute names are part of their
 * ABIs, so none of their headers is needed.
 */
#define _GNU_SOURCE
#include "fs/fs.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/stat.h>
#include <sys/xattr.h>
#include <unistd.h>

/* Stripes on both filesystems are a multiple of this. */
#define STRIPE_UNIT (64 * KIB)

/* ---- Lists of NAME=VALUE --------------------------------------------------------------------- */

/*
 * Finds the value of "NAME=VALUE" in a list whose members are separated by `separator`. Returns
 * false if it is missing. Neither the list nor *value ends in a 0.
 */
static bool find_value(const char *list, size_t bytes, char separator, const char *name,
		       const char **value, size_t *value_bytes)
{
	const size_t name_bytes = strlen(name);
	const char *end = list + bytes, *next;

	for (; list < end; list = next + 1) {
		next = memchr(list, separator, (size_t)(end - list));
		if (!next)
			next = end;
		if ((size_t)(next - list) > name_bytes && !memcmp(list, name, name_bytes) &&
		    list[name_bytes] == '=') {
			*value = list + name_bytes + 1;
			*value_bytes = (size_t)(next - *value);
			return true;
		}
	}
	return false;
}

/* ---- BeeGFS: layouts ------------------------------------------------------------------------- */

#define BEEGFS_GET_STRIPES 0x800c6619UL
#define BEEGFS_TEST 0x80066616UL
#define BEEGFS_TEXT "_FhGFS"

static bool answers_as_beegfs(int fd)
{
	/* Larger than the ioctl's number says: the client copies eight bytes. */
	char text[64] = "";

	return !ioctl(fd, BEEGFS_TEST, text) && !memcmp(text, BEEGFS_TEXT, strlen(BEEGFS_TEXT));
}

enum { BEEGFS_RAID0 = 1, BEEGFS_RAID10 = 2, BEEGFS_BUDDY_MIRROR = 3 };

/*
 * Makes a layout of BeeGFS's values. Returns -EINVAL if they are not valid, -ENOTSUP if the pattern
 * is not known. Pure.
 */
static int make_beegfs_layout(uint32_t pattern, uint32_t chunk_bytes, uint16_t targets,
			      struct fs_layout *layout)
{
	memset(layout, 0, sizeof(*layout));
	if (pattern < BEEGFS_RAID0 || pattern > BEEGFS_BUDDY_MIRROR)
		return -ENOTSUP;
	if (chunk_bytes < STRIPE_UNIT || (chunk_bytes & (chunk_bytes - 1)) || !targets)
		return -EINVAL;
	layout->count = 1;
	layout->mirrors = pattern == BEEGFS_RAID0 ? 1 : 2;
	layout->components[0] = (struct fs_component){ .end = UINT64_MAX,
						       .stripe_bytes = chunk_bytes,
						       .stripe_count = targets };
	return 0;
}

static int read_beegfs_layout(int fd, bool directory, struct fs_layout *layout)
{
	struct {
		uint32_t pattern;
		uint32_t chunk_bytes;
		uint16_t targets;
	} stripes = { 0 };

	/* BeeGFS does not tell the layout of directories. */
	if (directory)
		return -ENOTSUP;
	if (ioctl(fd, BEEGFS_GET_STRIPES, &stripes))
		return -errno;
	return make_beegfs_layout(stripes.pattern, stripes.chunk_bytes, stripes.targets, layout);
}

/* BeeGFS creates a file with a layout by an ioctl on the directory. */

#define BEEGFS_MKFILE_STRIPEHINTS 0x4018661bu
#define BEEGFS_MOST_TARGETS 0xffffu

/* The ioctl's argument, part of the client's ABI on 64-bit hosts. */
struct beegfs_hints {
	const char *name;
	uint32_t mode;
	uint32_t targets; /* 0: the directory's value */
	uint32_t chunk;
};

static bool is_ours_and_new(int fd)
{
	struct stat status;

	return !fstat(fd, &status) && S_ISREG(status.st_mode) && !status.st_size &&
	       status.st_nlink == 1 && base_is_own_user(status.st_uid);
}

static int create_on_beegfs(int directory_fd, const char *name, mode_t mode,
			    const struct fs_layout *ask, struct fs_answer *answer)
{
	const struct fs_component *component = &ask->components[0];
	struct beegfs_hints hints;
	int fd, code;

	memset(&hints, 0, sizeof(hints)); /* also the padding between fields */
	hints.name = name;
	hints.mode = mode;
	hints.targets = MIN(component->stripe_count, BEEGFS_MOST_TARGETS);
	hints.chunk = (uint32_t)component->stripe_bytes;
	if (sizeof(hints) != 24) {
		errno = EOPNOTSUPP;
		fs_refused(answer, "creating a file with stripe hints");
		return -EOPNOTSUPP;
	}
	/* Creates the name in the directory; fails if it exists. */
	if (ioctl(directory_fd, BEEGFS_MKFILE_STRIPEHINTS, &hints)) {
		code = -errno;
		fs_refused(answer, "creating a file with stripe hints");
		return code;
	}
	fd = base_above_streams(
		openat(directory_fd, name, O_RDWR | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC));
	if (fd < 0 || !is_ours_and_new(fd)) {
		code = fd < 0 ? -errno : -EBUSY;
		errno = -code;
		fs_refused(answer, "opening a file with stripe hints");
		unlinkat(directory_fd, name, 0);
		if (fd >= 0)
			close(fd);
		return code;
	}
	/* O_NONBLOCK was needed in case the name is another kind of file. */
	fcntl(fd, F_SETFL, fcntl(fd, F_GETFL) & ~O_NONBLOCK);
	/* The file can be written whatever its stripes are. */
	answer->plain = true;
	if (read_beegfs_layout(fd, false, &answer->got))
		answer->got.count = 0;
	return fd;
}

const struct fs_product fs_beegfs = {
	.family = FS_BEEGFS,
	.answers = answers_as_beegfs,
	.read_layout = read_beegfs_layout,
	.create = create_on_beegfs,
};

/* ---- CephFS: layouts ------------------------------------------------------------------------- */

#define CEPH_FILE_XATTR "ceph.file.layout"
#define CEPH_DIRECTORY_XATTR "ceph.dir.layout"
#define CEPH_TEXT_BYTES 512
#define CEPH_MOST_STRIPES 65535

static bool find_number(const char *text, size_t bytes, const char *name, uint64_t *number)
{
	const char *value;
	size_t value_bytes;

	return find_value(text, bytes, ' ', name, &value, &value_bytes) &&
	       fs_whole_number(value, value_bytes, number) && *number && *number <= UINT32_MAX;
}

/*
 * Reads the pool's name. A name that is too long is left out, since a cut name would be another
 * pool's.
 */
static void ceph_pool(const char *text, size_t bytes, struct fs_component *component)
{
	const char *value;
	size_t value_bytes;

	if (!find_value(text, bytes, ' ', "pool", &value, &value_bytes) ||
	    value_bytes >= sizeof(component->pool))
		return;
	for (size_t i = 0; i < value_bytes; i++) {
		if (value[i] <= ' ' || value[i] >= 0x7f)
			return;
	}
	memcpy(component->pool, value, value_bytes);
}

/*
 * Parses "stripe_unit=4194304 stripe_count=1 object_size=4194304 pool=data". The text is not
 * trusted. Returns -EINVAL if it is not a layout. Pure.
 */
static int parse_ceph_layout(const char *text, size_t bytes, struct fs_layout *layout)
{
	struct fs_component component = { .end = UINT64_MAX };
	uint64_t unit, count, object;

	memset(layout, 0, sizeof(*layout));
	if (!find_number(text, bytes, "stripe_unit", &unit) ||
	    !find_number(text, bytes, "stripe_count", &count) ||
	    !find_number(text, bytes, "object_size", &object))
		return -EINVAL;
	if (unit % STRIPE_UNIT || count > CEPH_MOST_STRIPES || object < unit || object % unit)
		return -EINVAL;
	component.stripe_bytes = unit;
	component.stripe_count = (uint32_t)count;
	ceph_pool(text, bytes, &component);
	layout->count = 1;
	layout->mirrors = 1;
	layout->components[0] = component;
	return 0;
}

static int read_attribute(int fd, const char *attribute, struct fs_layout *layout)
{
	char text[CEPH_TEXT_BYTES];
	ssize_t got = fgetxattr(fd, attribute, text, sizeof(text));

	return got < 0 ? -errno : parse_ceph_layout(text, (size_t)got, layout);
}

static int read_ceph_layout(int fd, bool directory, struct fs_layout *layout)
{
	return read_attribute(fd, directory ? CEPH_DIRECTORY_XATTR : CEPH_FILE_XATTR, layout);
}

static bool answers_as_ceph(int fd)
{
	struct fs_layout layout;

	return !read_ceph_layout(fd, false, &layout) || !read_ceph_layout(fd, true, &layout);
}

const struct fs_product fs_ceph = {
	.family = FS_CEPH,
	.answers = answers_as_ceph,
	.read_layout = read_ceph_layout,
};
