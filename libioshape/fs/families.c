/* SPDX-License-Identifier: Apache-2.0 */
/* Families of filesystems by their types. Also readers of the small texts in /proc and /sys. */
#define _GNU_SOURCE
#include "fs/fs.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

/* ---- Numbers --------------------------------------------------------------------------------- */

bool fs_whole_number(const char *text, size_t bytes, uint64_t *number)
{
	uint64_t value = 0;

	if (!bytes)
		return false;
	for (size_t i = 0; i < bytes; i++) {
		unsigned digit = (unsigned)(unsigned char)text[i] - '0';

		if (digit > 9 || value > (UINT64_MAX - digit) / 10)
			return false;
		value = value * 10 + digit;
	}
	*number = value;
	return true;
}

/* ---- Small texts ----------------------------------------------------------------------------- */

#define PATH_BYTES 1024

static int open_below(const char *root, const char *path)
{
	char whole[PATH_BYTES];
	int fd;

	if ((size_t)snprintf(whole, sizeof(whole), "%s%s", root, path) >= sizeof(whole))
		return -ENAMETOOLONG;
	fd = base_above_streams(open(whole, O_RDONLY | O_CLOEXEC | O_NONBLOCK));
	return fd < 0 ? -errno : fd;
}

int fs_read_whole(const char *root, const char *path, size_t most, struct base_buffer *text)
{
	int fd = open_below(root, path), ret;
	ssize_t got;

	if (fd < 0)
		return fd;
	do {
		ret = base_buffer_reserve(text, 16 * KIB);
		if (ret)
			break;
		got = read(fd, text->data + text->bytes, text->allocated - text->bytes - 1);
		if (got > 0)
			text->bytes += (size_t)got;
		else if (got < 0 && !text->bytes)
			ret = -errno;
	} while (got > 0 && text->bytes < most);
	if (text->data)
		text->data[text->bytes] = 0;
	close(fd);
	return ret;
}

int fs_read_line(const char *root, const char *path, char *line, size_t line_bytes)
{
	int fd = open_below(root, path), ret = 0;
	ssize_t got;

	if (fd < 0)
		return fd;
	got = read(fd, line, line_bytes);
	if (got < 0)
		ret = -errno;
	else if (memchr(line, '\n', (size_t)got))
		*(char *)memchr(line, '\n', (size_t)got) = 0;
	else if ((size_t)got < line_bytes)
		line[got] = 0;
	else
		ret = -E2BIG;
	close(fd);
	return ret;
}

int fs_read_number(const char *root, const char *path, uint64_t *number)
{
	char line[32];
	int ret = fs_read_line(root, path, line, sizeof(line));

	if (ret)
		return ret;
	return fs_whole_number(line, strlen(line), number) ? 0 : -EINVAL;
}

/* ---- Families -------------------------------------------------------------------------------- */

static const char *const names[FS_FAMILIES] = {
	[FS_OTHER] = "other",     [FS_LUSTRE] = "lustre",   [FS_BEEGFS] = "beegfs",
	[FS_GPFS] = "gpfs",       [FS_CEPH] = "ceph",       [FS_NFS] = "nfs",
	[FS_WEKA] = "weka",       [FS_DAOS] = "daos",       [FS_JUICEFS] = "juicefs",
	[FS_ALLUXIO] = "alluxio", [FS_GLUSTER] = "gluster", [FS_FUSE] = "fuse",
	[FS_XFS] = "xfs",         [FS_EXT] = "ext",         [FS_BTRFS] = "btrfs",
	[FS_ZFS] = "zfs",         [FS_TMPFS] = "tmpfs",     [FS_OVERLAY] = "overlay",
};

const char *fs_family_name(enum fs_family family)
{
	return (unsigned)family < FS_FAMILIES ? names[family] : names[FS_OTHER];
}

/* Types in the mount table. The daemon chooses NAME in "fuse.NAME". */
static const struct {
	const char *type;
	enum fs_family family;
} types[] = {
	{ "lustre", FS_LUSTRE },
	{ "beegfs", FS_BEEGFS },
	{ "fhgfs", FS_BEEGFS },
	{ "gpfs", FS_GPFS },
	{ "ceph", FS_CEPH },
	{ "fuse.ceph", FS_CEPH },
	{ "fuse.ceph-fuse", FS_CEPH },
	{ "nfs", FS_NFS },
	{ "nfs4", FS_NFS },
	{ "wekafs", FS_WEKA },
	{ "fuse.daos", FS_DAOS },
	{ "fuse.dfuse", FS_DAOS },
	{ "dfuse", FS_DAOS },
	{ "fuse.juicefs", FS_JUICEFS },
	{ "juicefs", FS_JUICEFS },
	{ "JuiceFS", FS_JUICEFS },
	{ "fuse.alluxio", FS_ALLUXIO },
	{ "fuse.alluxio-fuse", FS_ALLUXIO },
	{ "alluxio-fuse", FS_ALLUXIO },
	{ "glusterfs", FS_GLUSTER },
	{ "fuse.glusterfs", FS_GLUSTER },
	{ "xfs", FS_XFS },
	{ "ext2", FS_EXT },
	{ "ext3", FS_EXT },
	{ "ext4", FS_EXT },
	{ "btrfs", FS_BTRFS },
	{ "zfs", FS_ZFS },
	{ "tmpfs", FS_TMPFS },
	{ "ramfs", FS_TMPFS },
	{ "overlay", FS_OVERLAY },
	{ "fuse.fuse-overlayfs", FS_OVERLAY },
	{ "fuse", FS_FUSE },
	{ "fuseblk", FS_FUSE },
};

static const struct {
	uint64_t magic;
	enum fs_family family;
	const char *name; /* name of the type; NULL: the family's name */
} magics[] = {
	{ 0x0bd00bd0, FS_LUSTRE, NULL },  { 0x19830326, FS_BEEGFS, NULL },
	{ 0x47504653, FS_GPFS, NULL },    { 0x00c36400, FS_CEPH, NULL },
	{ 0x00006969, FS_NFS, NULL },     { 0x58465342, FS_XFS, NULL },
	{ 0x0000ef53, FS_EXT, "ext4" },   { 0x9123683e, FS_BTRFS, NULL },
	{ 0x2fc12fc1, FS_ZFS, NULL },     { 0x01021994, FS_TMPFS, NULL },
	{ 0x794c7630, FS_OVERLAY, NULL }, { FS_FUSE_MAGIC, FS_FUSE, NULL },
};

void fs_magic_name(uint64_t magic, char *type, size_t type_bytes)
{
	for (size_t i = 0; i < ARRAY_LENGTH(magics); i++) {
		if (magics[i].magic == magic) {
			snprintf(type, type_bytes, "%s",
				 magics[i].name ? magics[i].name : names[magics[i].family]);
			return;
		}
	}
	snprintf(type, type_bytes, "0x%llx", (unsigned long long)magic);
}

bool fs_is_local(enum fs_family family)
{
	switch (family) {
	case FS_OTHER:
	case FS_XFS:
	case FS_EXT:
	case FS_BTRFS:
	case FS_ZFS:
	case FS_TMPFS:
	case FS_OVERLAY:
		return true;
	default:
		return false;
	}
}

bool fs_cuts_requests(enum fs_family family)
{
	return family == FS_NFS || family == FS_JUICEFS || family == FS_ALLUXIO ||
	       family == FS_GLUSTER || family == FS_FUSE;
}

bool fs_writes_cached(enum fs_family family, uint64_t magic)
{
	return magic == FS_FUSE_MAGIC && family != FS_LUSTRE && family != FS_BEEGFS;
}

enum fs_family fs_family_of(const char *type, uint64_t magic)
{
	for (size_t i = 0; i < ARRAY_LENGTH(types); i++) {
		if (!strcmp(types[i].type, type))
			return types[i].family;
	}
	if (!strncmp(type, "fuse.", 5))
		return FS_FUSE;
	for (size_t i = 0; i < ARRAY_LENGTH(magics); i++) {
		if (magics[i].magic == magic)
			return magics[i].family;
	}
	return FS_OTHER;
}

bool fs_type_is_shared(const char *type)
{
	static const char *const shared[] = {
		"9p",        "afs",   "beegfs", "ceph", "cifs",   "fuse",
		"glusterfs", "gpfs",  "lustre", "nfs",  "nfs4",   "ocfs2",
		"orangefs",  "panfs", "pvfs2",  "smb3", "wekafs",
	};

	if (!strncmp(type, "fuse.", 5))
		return true;
	for (size_t i = 0; i < ARRAY_LENGTH(shared); i++) {
		if (!strcmp(type, shared[i]))
			return true;
	}
	return false;
}
