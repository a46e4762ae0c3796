/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The mount table of this process, small texts of the kernel, families of filesystems by type,
 * which mount a path is on, and how much space there is for a file.
 */
#define _GNU_SOURCE
#include "fs/fs.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/statfs.h>
#include <sys/sysmacros.h>
#include <unistd.h>

/* ---- Numbers --------------------------------------------------------------------------------- */

/* Reads a decimal number that ends at `stop`; moves *at behind that. Not sscanf(): it measures all
 * the rest of the text first. */
static bool take_number(const char **at, const char *end, char stop, unsigned *number)
{
	const char *begin = *at;
	uint64_t value = 0;

	for (; *at < end && **at >= '0' && **at <= '9' && value <= UINT32_MAX; ++*at)
		value = value * 10 + (unsigned)(**at - '0');
	if (*at == begin || *at == end || **at != stop || value > UINT32_MAX)
		return false;
	++*at;
	*number = (unsigned)value;
	return true;
}

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
		got = read(fd, text->data + text->bytes, text->room - text->bytes - 1);
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

/* ---- The mount table ------------------------------------------------------------------------- */

static bool is_octal(char digit)
{
	return digit >= '0' && digit <= '7';
}

/* Up to the next space, "\040" as the byte it stands for; moves *at behind the space. What does not
 * fit is left out. */
static void take_escaped(const char **at, const char *end, char *word, size_t word_bytes)
{
	size_t used = strlen(word);

	while (*at < end && **at != ' ') {
		unsigned char byte = (unsigned char)*(*at)++;

		if (byte == '\\' && end - *at >= 3 && is_octal((*at)[0]) && is_octal((*at)[1]) &&
		    is_octal((*at)[2])) {
			byte = (unsigned char)(((*at)[0] - '0') << 6 | ((*at)[1] - '0') << 3 |
					       ((*at)[2] - '0'));
			*at += 3;
		}
		if (used + 1 < word_bytes && byte)
			word[used++] = (char)byte;
	}
	word[used] = 0;
	if (*at < end)
		++*at;
}

static void add_comma(char *text, size_t text_bytes)
{
	size_t used = strlen(text);

	if (used && used + 1 < text_bytes)
		memcpy(text + used, ",", 2);
}

/*
 * A line of mountinfo: "36 35 98:0 /root /mount options [optional ...] - type source
 * super-options". The number of optional fields varies; " - " ends them.
 */
static bool read_line(const char *line, const char *end, uint64_t mount, unsigned device_major,
		      unsigned device_minor, struct fs_mount *found)
{
	unsigned id, parent, line_major, line_minor;
	const char *at = line, *dash;
	char root[1] = ""; /* is not kept */

	if (!take_number(&at, end, ' ', &id) || !take_number(&at, end, ' ', &parent) ||
	    !take_number(&at, end, ':', &line_major) || !take_number(&at, end, ' ', &line_minor))
		return false;
	if (mount ? id != mount : line_major != device_major || line_minor != device_minor)
		return false;
	dash = memmem(at, (size_t)(end - at), " - ", 3);
	if (!dash)
		return false;
	memset(found, 0, sizeof(*found));
	take_escaped(&at, dash, root, sizeof(root));
	take_escaped(&at, dash, found->mount_point, sizeof(found->mount_point));
	take_escaped(&at, dash, found->options, sizeof(found->options));
	dash += 3;
	take_escaped(&dash, end, found->type, sizeof(found->type));
	take_escaped(&dash, end, found->source, sizeof(found->source));
	add_comma(found->options, sizeof(found->options));
	take_escaped(&dash, end, found->options, sizeof(found->options));
	return *found->type && *found->mount_point;
}

/* As fs_find_mount(), in the text of /proc/self/mountinfo. Pure. */
static int find_line(const char *mountinfo, uint64_t mount, unsigned device_major,
		     unsigned device_minor, struct fs_mount *found)
{
	struct fs_mount candidate;
	const char *line, *end;
	int ret = -ENOENT;

	for (line = mountinfo; *line; line = *end ? end + 1 : end) {
		end = strchrnul(line, '\n');
		if (!read_line(line, end, mount, device_major, device_minor, &candidate))
			continue;
		*found = candidate;
		ret = 0;
		if (mount)
			break;
	}
	return ret;
}

/* Mount tables of big clusters have thousands of lines; lines beyond this are ignored. */
#define MOUNTINFO_BYTES (1 * MIB)

int fs_find_mount(const char *root, uint64_t mount, unsigned device_major, unsigned device_minor,
		  struct fs_mount *found)
{
	struct base_buffer text = { 0 };
	int ret = fs_read_whole(root, "/proc/self/mountinfo", MOUNTINFO_BYTES, &text);

	if (!ret)
		ret = find_line((const char *)text.data, mount, device_major, device_minor, found);
	base_buffer_free(&text);
	return ret;
}

/* Where newer headers have stx_mnt_id: part of the kernel's ABI. */
#define MNT_ID_AT 0x90

uint64_t fs_mount_number(const struct statx *status)
{
	uint64_t mount = 0;

	if (status->stx_mask & FS_STATX_MOUNT)
		memcpy(&mount, (const char *)status + MNT_ID_AT, sizeof(mount));
	return mount;
}

uint64_t fs_unique_mount_number(const struct statx *status)
{
	uint64_t mount = 0;

	if (status->stx_mask & FS_STATX_UNIQUE_MOUNT)
		memcpy(&mount, (const char *)status + MNT_ID_AT, sizeof(mount));
	return mount;
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

uint64_t fs_magic(const struct statfs *system)
{
	return (uint64_t)(unsigned long)system->f_type & 0xffffffff;
}

/* ---- Which mount a path is on ---------------------------------------------------------------- */

/* The number that no other mount gets, where the kernel has one; that of the mount table, where
 * not. */
static const unsigned mount_fields = STATX_TYPE | FS_STATX_MOUNT | FS_STATX_UNIQUE_MOUNT;

static int look_at_directory(const char *path, unsigned mask, struct statx *status)
{
	char *directory = base_directory_of(path);
	int ret;

	if (!directory)
		return -ENOMEM;
	ret = statx(AT_FDCWD, directory, 0, mask, status) ? -errno : 0;
	free(directory);
	return ret;
}

int fs_statx_path(const char *path, unsigned mask, struct statx *status)
{
	return statx(AT_FDCWD, path, 0, mask, status) ? look_at_directory(path, mask, status) : 0;
}

static uint64_t mount_of(const struct statx *status)
{
	uint64_t mount = fs_unique_mount_number(status);

	if (!mount)
		mount = fs_mount_number(status);
	/* Not by its device first: two mounts of a server may share one, and have two names. */
	return mount ? mount :
		       UINT64_C(1) << 63 | makedev(status->stx_dev_major, status->stx_dev_minor);
}

static void note_mount(struct fs_found *found, const struct statx *status)
{
	found->mount = mount_of(status);
	found->device_major = status->stx_dev_major;
	found->device_minor = status->stx_dev_minor;
}

void fs_find_directory(const char *path, struct fs_found *found)
{
	struct statx directory;

	memset(found, 0, sizeof(*found));
	found->absent = true;
	found->code = look_at_directory(path, mount_fields, &directory);
	if (!found->code)
		note_mount(found, &directory);
}

void fs_find(const char *path, struct fs_found *found)
{
	struct statx status;
	bool dangling;

	memset(found, 0, sizeof(*found));
	/* Not behind a link at first: what is absent would be asked for twice. */
	if (statx(AT_FDCWD, path, AT_SYMLINK_NOFOLLOW, mount_fields, &status)) {
		found->code = -errno;
	} else if (S_ISLNK(status.stx_mode) && statx(AT_FDCWD, path, 0, mount_fields, &status)) {
		found->code = -errno;
		found->dangling = errno == ENOENT;
	}
	if (found->code == -ENOENT) {
		dangling = found->dangling;
		fs_find_directory(path, found);
		found->dangling = dangling;
	}
	if (found->code || found->absent)
		return;
	found->regular = S_ISREG(status.stx_mode);
	note_mount(found, &status);
}

/* ---- Free space ------------------------------------------------------------------------------ */

#define EXT4_MAGIC 0xef53

/* For new bytes of this user; UINT64_MAX if the filesystem does not say it. */
static uint64_t free_bytes(const struct statfs *system)
{
	uint64_t unit = (uint64_t)(system->f_frsize ? system->f_frsize : system->f_bsize);
	uint64_t blocks = system->f_bavail, bytes;

	/* Filesystems that do not count: some of FUSE, /proc. */
	if (!system->f_blocks)
		return UINT64_MAX;
	/* ext4 keeps a twentieth for root, and statfs() tells root the same as everybody else. */
	if (system->f_type == EXT4_MAGIC && !geteuid())
		blocks = MAX(blocks, system->f_bfree);
	return __builtin_mul_overflow(blocks, unit, &bytes) ? UINT64_MAX : bytes;
}

uint64_t fs_free_bytes_behind(int fd)
{
	struct statfs system;

	return fstatfs(fd, &system) ? UINT64_MAX : free_bytes(&system);
}

static int look(const char *path, struct fs_space *space)
{
	struct statfs system;

	if (statfs(path, &system))
		return -errno;
	space->free_bytes = free_bytes(&system);
	space->no_inodes = system.f_files && !system.f_ffree;
	space->magic = fs_magic(&system);
	return 0;
}

static void note_device(struct fs_space *space, const struct stat *status)
{
	space->device_major = major(status->st_dev);
	space->device_minor = minor(status->st_dev);
}

int fs_space_of_found(const char *path, const struct fs_found *found, struct fs_space *space)
{
	char *directory;
	int ret;

	memset(space, 0, sizeof(*space));
	space->free_bytes = UINT64_MAX;
	if (found->code)
		return found->code;
	/* Where a link that leads to nothing leads to is found out when the file is made. */
	if (found->dangling)
		return -ENOENT;
	if (!found->absent && !found->regular)
		return -EINVAL;
	directory = found->absent ? base_directory_of(path) : strdup(path);
	if (!directory)
		return -ENOMEM;
	ret = look(directory, space);
	space->device_major = found->device_major;
	space->device_minor = found->device_minor;
	free(directory);
	return ret;
}

uint64_t fs_replaced_bytes(const char *path)
{
	struct stat status;

	return stat(path, &status) ? 0 : (uint64_t)status.st_blocks * 512;
}

int fs_space_of_directory(const char *path, struct fs_space *space)
{
	char *at = strdup(path), *above;
	struct stat status;
	int ret;

	memset(space, 0, sizeof(*space));
	space->free_bytes = UINT64_MAX;
	for (;;) {
		if (!at)
			return -ENOMEM;
		ret = stat(at, &status) ? -errno : look(at, space);
		if (ret != -ENOENT || !strcmp(at, "/") || !strcmp(at, "."))
			break;
		above = base_directory_of(at);
		free(at);
		at = above;
	}
	if (!ret)
		note_device(space, &status);
	free(at);
	return ret;
}

void fs_space_type(const struct fs_space *space, char *type, size_t type_bytes)
{
	struct fs_mount mount;

	if (fs_find_mount("", 0, space->device_major, space->device_minor, &mount))
		fs_magic_name(space->magic, type, type_bytes);
	else
		snprintf(type, type_bytes, "%s", mount.type);
}

/* ---- Storage targets ------------------------------------------------------------------------- */

#define MOST_NAMED 3u

/* The fullest of those that come after `last`: by free bytes, then by place. */
static const struct fs_target *next_full(const struct fs_storage *storage, uint64_t bytes,
					 const struct fs_target *last)
{
	const struct fs_target *found = NULL;

	for (uint32_t i = 0; i < MIN(storage->target_count, ARRAY_LENGTH(storage->target)); i++) {
		const struct fs_target *target = &storage->target[i];

		if (target->free_bytes >= bytes ||
		    (found && found->free_bytes <= target->free_bytes))
			continue;
		if (!last || target->free_bytes > last->free_bytes ||
		    (target->free_bytes == last->free_bytes && target > last))
			found = target;
	}
	return found;
}

void fs_name_full_targets(const struct fs_storage *storage, uint64_t bytes, char *into,
			  size_t into_bytes)
{
	const struct fs_target *target = NULL;
	unsigned named = 0, more = 0;
	size_t used = 0;

	*into = 0;
	while ((target = next_full(storage, bytes, target))) {
		if (named == MOST_NAMED) {
			more++;
			continue;
		}
		snprintf(into + used, into_bytes - used, "%s%s (%s free)", named++ ? ", " : "",
			 target->name, BASE_SIZE(target->free_bytes));
		used = strlen(into);
	}
	if (more)
		snprintf(into + used, into_bytes - used, " and %u more", more);
}
