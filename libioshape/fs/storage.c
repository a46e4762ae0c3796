/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Finds out which storage a path or open file is on: mount, family, free space, layout and targets.
 * Also creates files with a layout, and names the pool of slots of a storage.
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
#include <sys/xattr.h>
#include <unistd.h>

/* ---- The mount table ------------------------------------------------------------------------- */

/*
 * Reads a decimal number that ends at `stop`, and moves *at past it. sscanf() would measure the
 * whole rest of the text first.
 */
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

static bool is_octal(char digit)
{
	return digit >= '0' && digit <= '7';
}

/*
 * Appends the word up to the next space, decoding escapes such as "\040", and moves *at past the
 * space. Drops what does not fit.
 */
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
 * Reads a line of mountinfo if it describes the mount or device: "36 35 98:0 /root /mount options
 * [optional ...] - type source super-options". The number of optional fields varies; " - " ends
 * them.
 */
static bool read_line(const char *line, const char *end, uint64_t mount, unsigned device_major,
		      unsigned device_minor, struct fs_mount *found)
{
	unsigned id, parent, line_major, line_minor;
	const char *at = line, *dash;
	char root[1] = ""; /* not kept */

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

/* Finds a mount in the text of /proc/self/mountinfo, as find_in_table() describes. Pure. */
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

/* Lines beyond this are ignored. Mount tables of big clusters have thousands of lines. */
#define MOUNTINFO_BYTES (1 * MIB)

/*
 * Finds the mount with this number. If `mount` is 0, finds the last mount of the device, which
 * hides earlier ones on one mount point. Returns 0, -ENOENT or another negative errno.
 */
static int find_in_table(const char *root, uint64_t mount, unsigned device_major,
			 unsigned device_minor, struct fs_mount *found)
{
	struct base_buffer text = { 0 };
	int ret = fs_read_whole(root, "/proc/self/mountinfo", MOUNTINFO_BYTES, &text);

	if (!ret)
		ret = find_line((const char *)text.data, mount, device_major, device_minor, found);
	base_buffer_free(&text);
	return ret;
}

/* Masks for statx(), of Linux 5.8 and 6.8. Older headers have spare bytes in place of the field. */
#define STATX_MOUNT 0x1000U
#define STATX_UNIQUE_MOUNT 0x4000U

/* Offset of stx_mnt_id in struct statx, part of the kernel's ABI. */
#define MNT_ID_AT 0x90

/*
 * Returns the number of the mount that was asked for: STATX_MOUNT, the one in the mount table, or
 * STATX_UNIQUE_MOUNT, which is unique until the next boot. Returns 0 if the kernel does not tell.
 */
static uint64_t mount_number(const struct statx *status, unsigned which)
{
	uint64_t mount = 0;

	if (status->stx_mask & which)
		memcpy(&mount, (const char *)status + MNT_ID_AT, sizeof(mount));
	return mount;
}

/* ---- The mount of a path --------------------------------------------------------------------- */

/*
 * Fields to request: the unique number of the mount, or on older kernels the number in the mount
 * table.
 */
static const unsigned mount_fields = STATX_TYPE | STATX_MOUNT | STATX_UNIQUE_MOUNT;

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

/*
 * Calls statx() for a path, following links; if it does not exist, for its directory. Returns 0 or
 * a negative errno.
 */
static int statx_path(const char *path, unsigned mask, struct statx *status)
{
	return statx(AT_FDCWD, path, 0, mask, status) ? look_at_directory(path, mask, status) : 0;
}

static uint64_t mount_of(const struct statx *status)
{
	uint64_t mount = mount_number(status, STATX_UNIQUE_MOUNT);

	if (!mount)
		mount = mount_number(status, STATX_MOUNT);
	/*
	 * The device is the last resort: two mounts of a server may share one, and have two names.
	 */
	return mount ? mount :
		       UINT64_C(1) << 63 | makedev(status->stx_dev_major, status->stx_dev_minor);
}

static void record_mount(struct fs_found *found, const struct statx *status)
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
		record_mount(found, &directory);
}

void fs_find(const char *path, struct fs_found *found)
{
	struct statx status;
	bool dangling;

	memset(found, 0, sizeof(*found));
	/* Do not follow links at first; otherwise an absent path would be looked up twice. */
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
	record_mount(found, &status);
}

static uint64_t magic_of(const struct statfs *system)
{
	return (uint64_t)(unsigned long)system->f_type & 0xffffffff;
}

/* ---- Free space ------------------------------------------------------------------------------ */

#define EXT4_MAGIC 0xef53

/* Returns the bytes that this user can still write; UINT64_MAX if the filesystem does not tell. */
static uint64_t free_bytes(const struct statfs *system)
{
	uint64_t unit = (uint64_t)(system->f_frsize ? system->f_frsize : system->f_bsize);
	uint64_t blocks = system->f_bavail, bytes;

	/* Some FUSE filesystems and /proc do not count blocks. */
	if (!system->f_blocks)
		return UINT64_MAX;
	/*
	 * ext4 reserves a twentieth for root, but statfs() reports the reduced number to root as
	 * well.
	 */
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
	space->magic = magic_of(&system);
	return 0;
}

static void record_device(struct fs_space *space, const struct stat *status)
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
	/* The target's directory becomes known only when the file is created. */
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
		record_device(space, &status);
	free(at);
	return ret;
}

void fs_space_type(const struct fs_space *space, char *type, size_t type_bytes)
{
	struct fs_mount mount;

	if (find_in_table("", 0, space->device_major, space->device_minor, &mount))
		fs_magic_name(space->magic, type, type_bytes);
	else
		snprintf(type, type_bytes, "%s", mount.type);
}

/* ---- Identifying filesystems by their answers ------------------------------------------------ */

/*
 * The filesystems with layouts, in the order in which a filesystem in user space is tested for
 * them.
 */
static const struct fs_product *const products[] = { &fs_lustre, &fs_ceph, &fs_beegfs };

static const struct fs_product *product_of(enum fs_family family)
{
	for (size_t i = 0; i < ARRAY_LENGTH(products); i++) {
		if (products[i]->family == family)
			return products[i];
	}
	return NULL;
}

/*
 * Reads the layout of an open file, or of new files in an open directory. Costs one or two system
 * calls on families with layouts, none on others. Returns false and zeroes *layout if it is not
 * known.
 */
static bool read_layout_of(int fd, enum fs_family family, bool directory, struct fs_layout *layout)
{
	const struct fs_product *product = product_of(family);
	int ret = -ENOTSUP;

	memset(layout, 0, sizeof(*layout));
	if (product)
		ret = product->read_layout(fd, directory, layout);
	/* The first components of a long layout are better than none. */
	if (ret && ret != -E2BIG)
		memset(layout, 0, sizeof(*layout));
	return layout->count > 0;
}

static enum fs_family family_behind_fuse(int fd)
{
	for (size_t i = 0; i < ARRAY_LENGTH(products); i++) {
		if (products[i]->answers(fd))
			return products[i]->family;
	}
	return FS_FUSE;
}

/*
 * Returns the family by type and magic number. For a filesystem in user space of unknown type, asks
 * questions that only the families with layouts answer: its daemon may pass them on to such a
 * filesystem, or imitate one. Costs up to five system calls, once for each mount.
 */
static enum fs_family family_of_open(int fd, const char *type, uint64_t magic)
{
	enum fs_family family = fs_family_of(type, magic);

	return family == FS_FUSE ? family_behind_fuse(fd) : family;
}

/* ---- Files and directories ------------------------------------------------------------------- */

/* Linux 6.1; older headers have spare bytes in place of its two fields. */
#ifndef STATX_DIOALIGN
#define STATX_DIOALIGN 0x2000U
#endif

/*
 * Offsets of stx_dio_mem_align and stx_dio_offset_align in struct statx, part of the kernel's ABI.
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

/* Finds type and family, by the mount table or, if that fails, by the magic number. */
static void find_type(int fd, struct fs_info *info, unsigned device_major, unsigned device_minor)
{
	struct fs_mount mount;

	if (find_in_table("", 0, device_major, device_minor, &mount))
		fs_magic_name(info->magic, info->type, sizeof(info->type));
	else
		memcpy(info->type, mount.type, sizeof(info->type));
	info->family = family_of_open(fd, info->type, info->magic);
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
 * Returns whether the device is still the one in memory. The kernel reuses device numbers, at once
 * for the anonymous devices of FUSE and NFS. So an anonymous device on another mount may be another
 * filesystem.
 */
static bool is_same_device(const struct fs_memory *memory, const struct fs_info *info,
			   const struct statx *status)
{
	return *memory->type && (status->stx_dev_major || !memory->mount) &&
	       memory->device_major == status->stx_dev_major &&
	       memory->device_minor == status->stx_dev_minor && memory->magic == info->magic;
}

/* Finds what all files of a mount have in common, from the memory if possible. */
static int find_mount(int fd, const char *path, struct fs_info *info, struct fs_memory *memory,
		      const struct statx *status, struct base_error *error)
{
	const uint64_t mount = mount_number(status, STATX_UNIQUE_MOUNT);
	struct statfs system;

	if (memory && mount && memory->mount == mount) {
		info->magic = memory->magic;
	} else {
		if (fstatfs(fd, &system))
			return base_fail(error, -errno,
					 "cannot look at the filesystem of \"%s\" (statfs)", path);
		info->magic = magic_of(&system);
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

/* Describes everything except the layout. */
static int describe(int fd, const char *path, struct fs_memory *memory, struct fs_info *info,
		    bool *is_directory, struct base_error *error)
{
	/* Not length and times, for which a network client might have to ask the server. */
	const unsigned wanted = STATX_TYPE | STATX_DIOALIGN | STATX_UNIQUE_MOUNT;
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
		read_layout_of(fd, info->family, is_directory, &info->layout);
	return ret;
}

/* Changes to a directory's layout affect our new files after at most an hour. */
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
	/* Without a unique mount number, the inode number could mean another directory later. */
	if (!memory->mount || statx(directory_fd, inherits ? ".." : "", flags, STATX_INO, &above))
		above.stx_ino = 0;
	if (above.stx_ino && memory->directory == above.stx_ino &&
	    now_ns - memory->asked_ns < ASK_AGAIN_NS) {
		info->layout = memory->layout;
		return 0;
	}
	read_layout_of(fd, info->family, is_directory, &info->layout);
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

/* ---- Mounts ---------------------------------------------------------------------------------- */

static void read_mount(const char *root, const struct statx *status, struct fs_mount *mount)
{
	const unsigned device_major = status->stx_dev_major, device_minor = status->stx_dev_minor;
	const uint64_t number = mount_number(status, STATX_MOUNT);
	struct fs_mount found;

	/*
	 * In another mount namespace, the mount's number is not in the table, but its device may
	 * be.
	 */
	if (!find_in_table(root, number, device_major, device_minor, &found) ||
	    (number && !find_in_table(root, 0, device_major, device_minor, &found)))
		*mount = found;
}

static bool is_remote(const struct fs_storage *storage)
{
	/* "fuseblk" is not remote: it is a local block device behind FUSE. */
	if (storage->family == FS_OTHER || storage->family == FS_FUSE)
		return fs_type_is_shared(storage->mount.type);
	return !fs_is_local(storage->family);
}

int fs_look_at_storage(int directory_fd, const char *path, const char *root,
		       struct fs_storage *storage, struct base_error *error)
{
	struct statx status;
	struct statfs system;
	uint64_t magic;

	memset(storage, 0, sizeof(*storage));
	if (statx(directory_fd, "", AT_EMPTY_PATH, STATX_BASIC_STATS | STATX_MOUNT, &status))
		return base_fail(error, -errno, "cannot look at \"%s\" (statx)", path);
	if (fstatfs(directory_fd, &system))
		return base_fail(error, -errno, "cannot look at the filesystem of \"%s\" (statfs)",
				 path);
	magic = magic_of(&system);
	storage->total_bytes = (uint64_t)system.f_blocks * (uint64_t)system.f_frsize;
	storage->free_bytes = (uint64_t)system.f_bavail * (uint64_t)system.f_frsize;
	fs_magic_name(magic, storage->mount.type, sizeof(storage->mount.type));
	read_mount(root, &status, &storage->mount);
	storage->family = family_of_open(directory_fd, storage->mount.type, magic);
	storage->remote = is_remote(storage);
	storage->targets = fs_count_targets(directory_fd, storage->family);
	read_layout_of(directory_fd, storage->family, S_ISDIR(status.stx_mode), &storage->layout);
	if (storage->family == FS_LUSTRE)
		fs_list_lustre_targets(root, storage);
	return 0;
}

/* ---- Storage targets ------------------------------------------------------------------------- */

/* Time between two lists of the targets, each of which costs some hundred system calls. */
#define LOOK_AGAIN_NS 60000000000ull

/*
 * Lustre's own rule: up to this difference it uses the targets in turn, beyond it weighs them by
 * free space.
 */
#define UNEVEN_PERCENT 17u

static void record_targets(const struct fs_storage *storage, struct fs_even_targets *even)
{
	uint64_t most = 0, least = UINT64_MAX;

	for (uint32_t i = 0; i < storage->target_count; i++) {
		least = MIN(least, storage->target[i].free_bytes);
		most = MAX(most, storage->target[i].free_bytes);
		even->number[i] = storage->target[i].number;
	}
	/* Targets that are missing in the list may be fuller. */
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
	record_targets(&storage, &memory->even);
	memory->looked_ns = base_now_ns();
	return &memory->even;
}

/* ---- Creating files with a layout ------------------------------------------------------------ */

/*
 * A layout is fixed when a file is created. Servers may cut, ignore or refuse it, and some report
 * success without applying it. So it is read back. A file that cannot get the layout gets the
 * directory's, because a save matters more than its stripes.
 */

#define TEXT_BYTES 64

static bool component_is_another(const struct fs_component *ask, const struct fs_component *got)
{
	if (got->end != UINT64_MAX || got->on_metadata)
		return true;
	if (ask->stripe_bytes && ask->stripe_bytes != got->stripe_bytes)
		return true;
	if (*ask->pool && strcmp(ask->pool, got->pool) != 0)
		return true;
	return ask->stripe_count && ask->stripe_count < got->stripe_count;
}

/*
 * Compares the layouts. Returns 0 if `got` is as requested, 1 if it only has fewer stripes, 2 for
 * other differences. `text` receives a clause.
 */
static int compare(const struct fs_layout *ask, const struct fs_layout *got, char *text,
		   size_t text_bytes)
{
	const struct fs_component *wanted = &ask->components[0], *component = &got->components[0];
	const bool another = got->count != 1 || component_is_another(wanted, component);
	const bool fewer = wanted->stripe_count != FS_ALL_TARGETS &&
			   component->stripe_count < wanted->stripe_count;
	char asked[TEXT_BYTES], given[TEXT_BYTES];

	if (text_bytes)
		*text = 0;
	if (!another && !fewer)
		return 0;
	fs_layout_text(ask, asked, sizeof(asked));
	fs_layout_text(got, given, sizeof(given));
	snprintf(text, text_bytes, "layout %s was requested, the filesystem gave %s", asked,
		 got->count ? given : "none");
	return another ? 2 : 1;
}

static int ask_for(int directory_fd, const char *name, mode_t mode, enum fs_family family,
		   const struct fs_layout *ask, struct fs_answer *answer)
{
	const struct fs_product *product = product_of(family);

	if (product && product->create)
		return product->create(directory_fd, name, mode, ask, answer);
	snprintf(answer->why, sizeof(answer->why), "%s does not support layouts",
		 fs_family_name(family));
	return -EOPNOTSUPP;
}

int fs_create_with_layout(int directory_fd, const char *name, mode_t mode, enum fs_family family,
			  const struct fs_layout *ask, char *remark, size_t remark_bytes)
{
	struct fs_answer answer = { 0 };
	char asked[TEXT_BYTES], given[TEXT_BYTES];
	int fd, differs;

	if (remark_bytes)
		*remark = 0;
	fd = ask_for(directory_fd, name, mode, family, ask, &answer);
	if (fd == -EEXIST)
		return fd;
	if (fd >= 0) {
		differs = compare(ask, &answer.got, remark, remark_bytes);
		if (differs < 2 || (answer.plain && !*answer.why))
			return fd;
		if (!answer.plain) {
			unlinkat(directory_fd, name, 0);
			close(fd);
			fd = -1;
		}
	}
	fs_layout_text(ask, asked, sizeof(asked));
	fs_layout_text(&answer.got, given, sizeof(given));
	if (!*answer.why)
		snprintf(answer.why, sizeof(answer.why), "the filesystem gave %s",
			 answer.got.count ? given : "none");
	snprintf(remark, remark_bytes,
		 "the file could not get the layout %s and has the directory's: %s", asked,
		 answer.why);
	return fd >= 0 ? fd : fs_create_plainly(directory_fd, name, mode, 0);
}

/*
 * ---- The name of a pool of slots --------------------------------------------------------------
 */

/* Names a BeeGFS by the configuration file of the mount: the source is the same for every BeeGFS.
 */
static void name_beegfs(struct fs_mount *mount)
{
	static const char option[] = ",cfgFile=";
	const char *file = strstr(mount->options, option);

	if (!file)
		return;
	file += strlen(option);
	snprintf(mount->source, sizeof(mount->source), "%.*s", (int)strcspn(file, ","), file);
}

/* Known by Linux 5.11 and libcephfs 16. */
#define CEPH_ID_XATTR "ceph.cluster_fsid"
/* Characters of a cluster's id, a UUID as text. */
#define CEPH_ID_BYTES 36

/*
 * Replaces type and source of a CephFS mount by "ceph" and the id of its cluster: the mount table
 * says "ceph-fuse" for every cluster, or lists monitors. Does nothing if the id is not known.
 */
static void name_ceph(struct fs_mount *mount)
{
	char id[CEPH_ID_BYTES];

	if (lgetxattr(mount->mount_point, CEPH_ID_XATTR, id, sizeof(id)) != CEPH_ID_BYTES)
		return;
	snprintf(mount->source, sizeof(mount->source), "%.*s", CEPH_ID_BYTES, id);
	/* One pool for the kernel's client and ceph-fuse. */
	snprintf(mount->type, sizeof(mount->type), "ceph");
}

static void make_safe(char *name)
{
	for (; *name; name++) {
		if (!strchr(FS_POOL_CHARACTERS, *name))
			*name = '_';
	}
}

/*
 * Makes the pool's name from a line of the mount table; `target_pool` is "" if there is none. Uses
 * only characters that are safe in file names and Redis keys: no space, no brace. Pure.
 */
static void name_mount(const char *type, const char *source, const char *target_pool,
		       const char *host, char name[FS_POOL_BYTES])
{
	char whole[64 + sizeof(((struct fs_mount *)0)->source) + FS_TARGET_POOL_BYTES + 64];
	const char *dot = *target_pool ? "." : "";
	const char *part;
	int bytes = (int)strlen(source);

	/*
	 * Clients may name any of several management servers, and may mount a subfolder. Only the
	 * filesystem's name counts.
	 */
	if (!strcmp(type, "lustre") && fs_lustre_name(source, &part)) {
		bytes = (int)fs_lustre_name(source, &part);
		source = part;
	}
	if (!strcmp(type, "nfs4"))
		type = "nfs";
	if (fs_type_is_shared(type))
		snprintf(whole, sizeof(whole), "%s:%.*s%s%s", type, bytes, source, dot,
			 target_pool);
	else
		snprintf(whole, sizeof(whole), "%s:%.*s%s%s@%s", type, bytes, source, dot,
			 target_pool, host);
	make_safe(whole);
	if (strlen(whole) < FS_POOL_BYTES)
		snprintf(name, FS_POOL_BYTES, "%s", whole);
	else
		snprintf(name, FS_POOL_BYTES, "%.*s-%016llx", FS_POOL_BYTES - 18, whole,
			 /* Keeps names apart that differ only in the cut part. */
			 (unsigned long long)base_hash_text(whole));
}

/*
 * Names the host by its boot id, which all its containers share, unlike the host name. "" if not
 * known.
 */
static void name_host(char *host, size_t bytes)
{
	if (fs_read_line("", "/proc/sys/kernel/random/boot_id", host, bytes))
		*host = 0;
	host[strcspn(host, "-")] = 0;
}

/*
 * Opens a path that is a directory, or else its parent. Returns a negative number if there is none.
 */
static int open_directory(const char *path)
{
	int fd = base_above_streams(open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC));
	char *parent;

	if (fd >= 0)
		return fd;
	parent = base_directory_of(path);
	if (parent)
		fd = base_above_streams(open(parent, O_RDONLY | O_DIRECTORY | O_CLOEXEC));
	free(parent);
	return fd;
}

/*
 * Finds the pool of targets of new files there, on Lustre. Files in another pool are on other
 * disks, so saves need not wait for each other. Writes "" if there is none.
 */
static void find_target_pool(const char *path, const char *type, char pool[FS_TARGET_POOL_BYTES])
{
	enum fs_family family = fs_family_of(type, 0);
	const struct fs_component *component;
	struct fs_layout layout;
	int fd;

	*pool = 0;
	if (family != FS_LUSTRE && family != FS_FUSE)
		return;
	fd = open_directory(path);
	if (fd < 0)
		return;
	if (family_of_open(fd, type, 0) == FS_LUSTRE &&
	    read_layout_of(fd, FS_LUSTRE, true, &layout)) {
		component = fs_layout_main(&layout, 0);
		memcpy(pool, component ? component->pool : "",
		       component ? FS_TARGET_POOL_BYTES : 1);
	}
	close(fd);
}

int fs_pool_of_path(const char *path, char name[FS_POOL_BYTES], struct base_error *error)
{
	char host[40], target_pool[FS_TARGET_POOL_BYTES];
	struct fs_mount mount = { .type = "device" };
	struct statx status;
	uint64_t number;
	int ret;

	/* Use the number that the mount table has. */
	ret = statx_path(path, STATX_TYPE | STATX_MOUNT, &status);
	if (ret)
		return base_fail(error, ret, "cannot look at the directory of \"%s\"", path);
	number = mount_number(&status, STATX_MOUNT);
	/* Without a mount table, the device identifies the storage on this host. */
	snprintf(mount.source, sizeof(mount.source), "%u:%u", status.stx_dev_major,
		 status.stx_dev_minor);
	/* The source in the table does not tell which BeeGFS or CephFS it is. */
	if (number && !find_in_table("", number, 0, 0, &mount)) {
		if (fs_family_of(mount.type, 0) == FS_BEEGFS)
			name_beegfs(&mount);
		if (fs_family_of(mount.type, 0) == FS_CEPH)
			name_ceph(&mount);
	}
	find_target_pool(path, mount.type, target_pool);
	name_host(host, sizeof(host));
	name_mount(mount.type, mount.source, target_pool, host, name);
	return 0;
}
