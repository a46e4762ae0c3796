/* SPDX-License-Identifier: Apache-2.0 */
/* Which kind of filesystem something is on, and what the kernel and the filesystem tell of it. */
#define _GNU_SOURCE
#include "fs/fs.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/statfs.h>
#include <sys/sysmacros.h>
#include <sys/xattr.h>

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

/* Types of the mount table; "fuse.NAME" is what a daemon calls itself. */
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
	const char *name; /* as types are called; NULL: as its family */
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

/* ---- What a filesystem answers --------------------------------------------------------------- */

/* Where the bricks are; with "trusted." before it only root may ask. Part of GlusterFS's ABI. */
#define GLUSTER_XATTR "glusterfs.pathinfo"

bool fs_ask_for_layout(int fd, enum fs_family family, bool directory, struct fs_layout *layout)
{
	bool answered;
	int ret = -ENOTSUP;

	memset(layout, 0, sizeof(*layout));
	if (family == FS_LUSTRE)
		ret = fs_read_lustre_layout(fd, layout, &answered);
	else if (family == FS_CEPH)
		ret = fs_read_ceph_layout(fd, directory, layout);
	else if (family == FS_BEEGFS && !directory)
		ret = fs_read_beegfs_layout(fd, layout);
	/* The first parts of a long one are better than nothing. */
	if (ret && ret != -E2BIG)
		memset(layout, 0, sizeof(*layout));
	return layout->count > 0;
}

static enum fs_family family_behind_fuse(int fd)
{
	struct fs_layout layout;
	bool answered;

	fs_read_lustre_layout(fd, &layout, &answered);
	/* A directory without a layout of its own may have none to tell. */
	if (answered || fs_count_targets(fd, FS_LUSTRE))
		return FS_LUSTRE;
	if (fs_answers_as_ceph(fd))
		return FS_CEPH;
	if (fs_is_beegfs(fd))
		return FS_BEEGFS;
	if (fgetxattr(fd, GLUSTER_XATTR, NULL, 0) > 0)
		return FS_GLUSTER;
	return FS_FUSE;
}

enum fs_family fs_family_of_open(int fd, const char *type, uint64_t magic)
{
	enum fs_family family = fs_family_of(type, magic);

	return family == FS_FUSE ? family_behind_fuse(fd) : family;
}

uint64_t fs_magic(const struct statfs *system)
{
	return (uint64_t)(unsigned long)system->f_type & 0xffffffff;
}

/* ---- Files and directories ------------------------------------------------------------------- */

/* Linux 6.1; older headers call the bytes of its two fields spare. */
#ifndef STATX_DIOALIGN
#define STATX_DIOALIGN 0x2000U
#endif

/* Offsets of stx_dio_mem_align and stx_dio_offset_align in struct statx, part of the kernel's ABI.
 */
#define DIO_MEM_ALIGN_AT 0x98
#define DIO_OFFSET_ALIGN_AT 0x9c

static void read_alignment(struct fs_info *info, const struct statx *status)
{
	if (!(status->stx_mask & STATX_DIOALIGN))
		return;
	memcpy(&info->memory_alignment, (const char *)status + DIO_MEM_ALIGN_AT, 4);
	memcpy(&info->offset_alignment, (const char *)status + DIO_OFFSET_ALIGN_AT, 4);
	info->direct_known = true;
	info->direct_works = info->offset_alignment != 0;
}

/* By the mount table, or where that fails by the filesystem's number. */
static void find_type(int fd, struct fs_info *info, unsigned device_major, unsigned device_minor)
{
	struct fs_mount mount;

	if (fs_find_mount("", 0, device_major, device_minor, &mount))
		fs_magic_name(info->magic, info->type, sizeof(info->type));
	else
		memcpy(info->type, mount.type, sizeof(info->type));
	info->family = fs_family_of_open(fd, info->type, info->magic);
}

static void remember(struct fs_memory *memory, const struct fs_info *info,
		     const struct statx *status)
{
	memcpy(memory->type, info->type, sizeof(memory->type));
	memory->family = info->family;
	memory->magic = info->magic;
	memory->counted_targets = 0;
	memory->directory = 0;
	memory->device_major = status->stx_dev_major;
	memory->device_minor = status->stx_dev_minor;
}

/*
 * The kernel gives the number of a device that is gone to another one: at once, if it is a made-up
 * one of FUSE or NFS. Such a device on another mount than before may be another filesystem.
 */
static bool is_same_device(const struct fs_memory *memory, const struct fs_info *info,
			   const struct statx *status)
{
	return *memory->type && (status->stx_dev_major || !memory->mount) &&
	       memory->device_major == status->stx_dev_major &&
	       memory->device_minor == status->stx_dev_minor && memory->magic == info->magic;
}

/* What is the same for all files of a mount. */
static int find_mount(int fd, const char *path, struct fs_info *info, struct fs_memory *memory,
		      const struct statx *status, struct base_error *error)
{
	const uint64_t mount = fs_unique_mount_number(status);
	struct statfs system;

	if (memory && mount && memory->mount == mount) {
		info->magic = memory->magic;
	} else {
		if (fstatfs(fd, &system))
			return base_fail(error, -errno,
					 "cannot look at the filesystem of \"%s\" (statfs)", path);
		info->magic = fs_magic(&system);
		if (!memory || !is_same_device(memory, info, status)) {
			find_type(fd, info, status->stx_dev_major, status->stx_dev_minor);
			if (memory)
				remember(memory, info, status);
		}
	}
	if (!memory)
		return 0;
	if (memory->mount != mount)
		memory->directory = 0;
	memory->mount = mount;
	memcpy(info->type, memory->type, sizeof(info->type));
	info->family = memory->family;
	return 0;
}

/* Everything but the layout. */
static int describe(int fd, const char *path, struct fs_memory *memory, struct fs_info *info,
		    bool *is_directory, struct base_error *error)
{
	/* Not how long it is or when it changed, which a client might have to ask for. */
	const unsigned wanted = STATX_TYPE | STATX_DIOALIGN | FS_STATX_UNIQUE_MOUNT;
	struct statx status;
	int ret;

	memset(info, 0, sizeof(*info));
	if (statx(fd, "", AT_EMPTY_PATH, wanted, &status))
		return base_fail(error, -errno, "cannot look at \"%s\" (statx)", path);
	ret = find_mount(fd, path, info, memory, &status, error);
	if (ret)
		return ret;
	info->block_bytes = status.stx_blksize;
	read_alignment(info, &status);
	*is_directory = S_ISDIR(status.stx_mode);
	return 0;
}

int fs_describe(int fd, const char *path, struct fs_memory *memory, struct fs_info *info,
		struct base_error *error)
{
	bool is_directory;
	int ret = describe(fd, path, memory, info, &is_directory, error);

	if (!ret)
		fs_ask_for_layout(fd, info->family, is_directory, &info->layout);
	return ret;
}

/* A directory's layout that somebody changes applies to our new files within an hour. */
#define ASK_AGAIN_NS 3600000000000ull

int fs_describe_new(int fd, int directory_fd, bool inherits, const char *path,
		    struct fs_memory *memory, struct fs_info *info, struct base_error *error)
{
	const int flags = AT_STATX_DONT_SYNC | (inherits ? 0 : AT_EMPTY_PATH);
	const uint64_t now_ns = base_now_ns();
	struct statx above;
	bool is_directory;
	int ret = describe(fd, path, memory, info, &is_directory, error);

	if (ret)
		return ret;
	/* Without a number of the mount a directory's number may mean another one later. */
	if (!memory->mount || statx(directory_fd, inherits ? ".." : "", flags, STATX_INO, &above))
		above.stx_ino = 0;
	if (above.stx_ino && memory->directory == above.stx_ino &&
	    now_ns - memory->asked_ns < ASK_AGAIN_NS) {
		info->layout = memory->layout;
		return 0;
	}
	fs_ask_for_layout(fd, info->family, is_directory, &info->layout);
	memory->directory = above.stx_ino;
	memory->asked_ns = now_ns;
	memory->layout = info->layout;
	return 0;
}

uint32_t fs_remembered_targets(int directory_fd, struct fs_memory *memory)
{
	if (!memory->counted_targets)
		memory->counted_targets = fs_count_targets(directory_fd, memory->family) + 1ull;
	return (uint32_t)(memory->counted_targets - 1);
}

/* ---- Reading ahead --------------------------------------------------------------------------- */

uint64_t fs_read_ahead_of(int fd)
{
	/* By the number of a mount's device; of a disk's partition by the disk. */
	static const struct {
		const char *before, *behind;
	} files[] = {
		{ "/sys/class/bdi/", "/read_ahead_kb" },
		{ "/sys/dev/block/", "/../queue/read_ahead_kb" },
	};
	struct stat status;
	uint64_t kib = 0;
	char path[96];

	if (fstat(fd, &status))
		return 0;
	for (size_t i = 0; i < ARRAY_LENGTH(files); i++) {
		snprintf(path, sizeof(path), "%s%u:%u%s", files[i].before, major(status.st_dev),
			 minor(status.st_dev), files[i].behind);
		if (!fs_read_number("", path, &kib))
			return kib * KIB;
	}
	return 0;
}

/* ---- Mounts ---------------------------------------------------------------------------------- */

static void read_mount(const char *root, const struct statx *status, struct fs_mount *mount)
{
	const unsigned device_major = status->stx_dev_major, device_minor = status->stx_dev_minor;
	const uint64_t number = fs_mount_number(status);
	struct fs_mount found;

	/* Its number is not in the table of another namespace; its device may be. */
	if (!fs_find_mount(root, number, device_major, device_minor, &found) ||
	    (number && !fs_find_mount(root, 0, device_major, device_minor, &found)))
		*mount = found;
}

static bool is_remote(const struct fs_storage *storage)
{
	/* "fuseblk" is none: a block device behind FUSE is this host's. */
	if (storage->family == FS_OTHER || storage->family == FS_FUSE)
		return fs_type_is_shared(storage->mount.type);
	return !fs_is_local(storage->family);
}

/* Disks have it beside themselves; partitions, in the folder above. */
static bool read_rotational(const char *root, unsigned device_major, unsigned device_minor,
			    bool *rotational)
{
	static const char *const above[] = { "", "/.." };
	uint64_t number;
	char path[96];

	for (size_t i = 0; i < ARRAY_LENGTH(above); i++) {
		snprintf(path, sizeof(path), "/sys/dev/block/%u:%u%s/queue/rotational",
			 device_major, device_minor, above[i]);
		if (!fs_read_number(root, path, &number)) {
			*rotational = number;
			return true;
		}
	}
	return false;
}

static void look_at_disk(const char *root, const struct statx *status, struct fs_storage *storage)
{
	unsigned device_major = status->stx_dev_major, device_minor = status->stx_dev_minor;
	struct stat source;

	/* btrfs makes up numbers of devices; the mount table names one of its own. */
	if (!device_major) {
		if (strncmp(storage->mount.source, "/dev/", 5) ||
		    stat(storage->mount.source, &source) || !S_ISBLK(source.st_mode))
			return;
		device_major = major(source.st_rdev);
		device_minor = minor(source.st_rdev);
	}
	storage->rotational_known =
		read_rotational(root, device_major, device_minor, &storage->rotational);
}

int fs_look_at_storage(int directory_fd, const char *path, const char *root,
		       struct fs_storage *storage, struct base_error *error)
{
	struct statx status;
	struct statfs system;
	uint64_t magic;

	memset(storage, 0, sizeof(*storage));
	if (statx(directory_fd, "", AT_EMPTY_PATH, STATX_BASIC_STATS | FS_STATX_MOUNT, &status))
		return base_fail(error, -errno, "cannot look at \"%s\" (statx)", path);
	if (fstatfs(directory_fd, &system))
		return base_fail(error, -errno, "cannot look at the filesystem of \"%s\" (statfs)",
				 path);
	magic = fs_magic(&system);
	storage->total_bytes = (uint64_t)system.f_blocks * (uint64_t)system.f_frsize;
	storage->free_bytes = (uint64_t)system.f_bavail * (uint64_t)system.f_frsize;
	fs_magic_name(magic, storage->mount.type, sizeof(storage->mount.type));
	read_mount(root, &status, &storage->mount);
	storage->family = fs_family_of_open(directory_fd, storage->mount.type, magic);
	storage->remote = is_remote(storage);
	storage->targets = fs_count_targets(directory_fd, storage->family);
	fs_ask_for_layout(directory_fd, storage->family, S_ISDIR(status.stx_mode),
			  &storage->layout);
	if (storage->family == FS_LUSTRE)
		fs_list_lustre_targets(root, storage);
	if (!storage->remote)
		look_at_disk(root, &status, storage);
	return 0;
}

/* ---- Storage targets ------------------------------------------------------------------------- */

/* A look at each storage target costs some hundred system calls. */
#define LOOK_AGAIN_NS 60000000000ull

/* Lustre's own rule: up to there it takes them in turn, beyond it weighs them. */
#define UNEVEN_PERCENT 17u

static void note_targets(const struct fs_storage *storage, struct fs_even_targets *even)
{
	uint64_t most = 0, least = UINT64_MAX;

	for (uint32_t i = 0; i < storage->target_count; i++) {
		least = MIN(least, storage->target[i].free_bytes);
		most = MAX(most, storage->target[i].free_bytes);
		even->number[i] = storage->target[i].number;
	}
	/* A list that lacks some says nothing of these. */
	even->count = storage->target_count;
	if (even->count != storage->targets || most - least > most / 100 * UNEVEN_PERCENT)
		even->count = 0;
}

const struct fs_even_targets *fs_even_targets(int directory_fd, const char *directory,
					      struct fs_memory *memory)
{
	struct fs_storage storage;

	if (memory->family != FS_LUSTRE ||
	    (memory->looked_ns && base_now_ns() - memory->looked_ns < LOOK_AGAIN_NS) ||
	    fs_look_at_storage(directory_fd, directory, "", &storage, NULL))
		return &memory->even;
	note_targets(&storage, &memory->even);
	memory->looked_ns = base_now_ns();
	return &memory->even;
}
