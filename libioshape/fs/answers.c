/* SPDX-License-Identifier: Apache-2.0 */
/* What a filesystem answers about an open file. All numbers are part of its ABI: no header of its
 * is needed. */
#define _GNU_SOURCE
#include "fs/family.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/xattr.h>
#include <unistd.h>

#define LUSTRE_XATTR "lustre.lov"
#define CEPH_FILE_XATTR "ceph.file.layout"
#define CEPH_DIRECTORY_XATTR "ceph.dir.layout"
/* Where the bricks are; with "trusted." before it only root may ask. */
#define GLUSTER_XATTR "glusterfs.pathinfo"

#define LUSTRE_COUNT_TARGETS 0x800866a8UL
#define BEEGFS_GET_STRIPES 0x800c6619UL
#define BEEGFS_TEST 0x80066616UL
#define BEEGFS_TEXT "_FhGFS"

/* Lustre's layouts of some dozen stripes fit; the longest that there is needs the second. */
#define SMALL_BYTES 2048
#define LARGE_BYTES 65536

/* How far a directory is followed upwards. */
#define MOST_LEVELS 32

/* Numbers beyond it are no answer of a filesystem that works. */
#define MOST_TARGETS 65536

/* `answered`, if the bytes are a layout of its, understood or not. */
static int read_lustre_layout(int fd, struct fs_layout *layout, bool *answered)
{
	uint8_t small[SMALL_BYTES], *large = NULL;
	ssize_t got = fgetxattr(fd, LUSTRE_XATTR, small, sizeof(small));
	int ret;

	*answered = false;
	if (got < 0 && errno == ERANGE) {
		large = malloc(LARGE_BYTES);
		if (!large)
			return -ENOMEM;
		got = fgetxattr(fd, LUSTRE_XATTR, large, LARGE_BYTES);
	}
	if (got < 0) {
		ret = -errno;
	} else {
		ret = fs_lustre_layout(large ? large : small, (size_t)got, layout);
		*answered = ret != -EINVAL;
	}
	free(large);
	return ret;
}

static int read_ceph_layout(int fd, const char *attribute, struct fs_layout *layout)
{
	char text[512];
	ssize_t got = fgetxattr(fd, attribute, text, sizeof(text));

	return got < 0 ? -errno : fs_ceph_layout(text, (size_t)got, layout);
}

/* A directory without a layout has that of the next one above it that has one. */
static int inherit_ceph_layout(int fd, struct fs_layout *layout)
{
	int ret = read_ceph_layout(fd, CEPH_DIRECTORY_XATTR, layout), at = fd, above;

	for (int level = 0; ret == -ENODATA && level < MOST_LEVELS; level++) {
		above = base_above_streams(openat(at, "..", O_RDONLY | O_DIRECTORY | O_CLOEXEC));
		if (at != fd)
			close(at);
		at = above;
		if (above < 0)
			return -errno;
		/* Another filesystem does not have such an attribute. */
		ret = read_ceph_layout(above, CEPH_DIRECTORY_XATTR, layout);
	}
	if (at != fd)
		close(at);
	return ret;
}

static int read_beegfs_layout(int fd, struct fs_layout *layout)
{
	struct {
		uint32_t pattern;
		uint32_t chunk_bytes;
		uint16_t targets;
	} stripes = { 0 };

	if (ioctl(fd, BEEGFS_GET_STRIPES, &stripes))
		return -errno;
	return fs_beegfs_layout(stripes.pattern, stripes.chunk_bytes, stripes.targets, layout);
}

bool fs_ask_for_layout(int fd, enum fs_family family, bool directory, struct fs_layout *layout)
{
	bool answered;
	int ret = -ENOTSUP;

	memset(layout, 0, sizeof(*layout));
	if (family == FS_LUSTRE)
		ret = read_lustre_layout(fd, layout, &answered);
	else if (family == FS_CEPH && directory)
		ret = inherit_ceph_layout(fd, layout);
	else if (family == FS_CEPH)
		ret = read_ceph_layout(fd, CEPH_FILE_XATTR, layout);
	else if (family == FS_BEEGFS && !directory)
		ret = read_beegfs_layout(fd, layout);
	/* The first parts of a long one are better than nothing. */
	if (ret && ret != -E2BIG)
		memset(layout, 0, sizeof(*layout));
	return layout->count > 0;
}

static uint32_t count_lustre_targets(int directory_fd)
{
	/* It reads and writes an int; its number says that it is a long. 0 asks for those that hold
	 * data. */
	union {
		int count;
		uint64_t room;
	} argument = { .room = 0 };

	if (ioctl(directory_fd, LUSTRE_COUNT_TARGETS, &argument) || argument.count <= 0 ||
	    argument.count > MOST_TARGETS)
		return 0;
	return (uint32_t)argument.count;
}

uint32_t fs_count_targets(int directory_fd, enum fs_family family)
{
	return family == FS_LUSTRE ? count_lustre_targets(directory_fd) : 0;
}

static bool is_beegfs(int fd)
{
	/* Longer than the number says: it copies a text of eight. */
	char text[64] = "";

	return !ioctl(fd, BEEGFS_TEST, text) && !memcmp(text, BEEGFS_TEXT, strlen(BEEGFS_TEXT));
}

enum fs_family fs_family_behind_fuse(int fd)
{
	struct fs_layout layout;
	bool answered;

	read_lustre_layout(fd, &layout, &answered);
	/* A directory without a layout of its own may have none to tell. */
	if (answered || count_lustre_targets(fd))
		return FS_LUSTRE;
	if (!read_ceph_layout(fd, CEPH_FILE_XATTR, &layout) ||
	    !read_ceph_layout(fd, CEPH_DIRECTORY_XATTR, &layout))
		return FS_CEPH;
	if (is_beegfs(fd))
		return FS_BEEGFS;
	if (fgetxattr(fd, GLUSTER_XATTR, NULL, 0) > 0)
		return FS_GLUSTER;
	return FS_FUSE;
}

enum fs_family fs_family_of_open(int fd, const char *type, uint64_t magic)
{
	enum fs_family family = fs_family_of(type, magic);

	return family == FS_FUSE ? fs_family_behind_fuse(fd) : family;
}
