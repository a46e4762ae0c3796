/* SPDX-License-Identifier: Apache-2.0 */
#define _GNU_SOURCE
#include "fs/family.h"
#include "fs/mountinfo.h"

#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/statfs.h>

/* Linux 6.1; older headers call the bytes of its two fields spare. */
#ifndef STATX_DIOALIGN
#define STATX_DIOALIGN 0x2000U
#endif

/* Offsets of stx_dio_mem_align and stx_dio_offset_align in struct statx, part of the kernel's ABI.
 */
#define DIO_MEM_ALIGN_AT 0x98
#define DIO_OFFSET_ALIGN_AT 0x9c

/* Whoever changes a directory's layout sees files follow within an hour. */
#define ASK_AGAIN_NS 3600000000000ull

/* A look at each storage target costs some hundred system calls. */
#define LOOK_AGAIN_NS 60000000000ull

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
	memory->counted = false;
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

uint32_t fs_remembered_targets(int directory_fd, struct fs_memory *memory)
{
	if (!memory->counted)
		memory->targets = fs_count_targets(directory_fd, memory->family);
	memory->counted = true;
	return memory->targets;
}

/* Lustre's own rule: up to there it takes them in turn, beyond it weighs them. */
#define UNEVEN_PERCENT 17u

static void note_targets(struct fs_memory *memory, const struct fs_storage *storage)
{
	struct fs_even_targets *even = &memory->even;
	uint64_t most = 0, least = UINT64_MAX;

	for (uint32_t i = 0; i < storage->target_count; i++) {
		least = MIN(least, storage->target[i].free_bytes);
		most = MAX(most, storage->target[i].free_bytes);
		even->number[i] = storage->target[i].number;
	}
	memory->looked_ns = base_now_ns();
	memory->least_free_bytes = least;
	/* A list that lacks some says nothing of these. */
	even->count = storage->target_count;
	if (even->count != storage->targets || most - least > most / 100 * UNEVEN_PERCENT)
		even->count = 0;
}

static bool looked_lately(const struct fs_memory *memory)
{
	return memory->looked_ns && base_now_ns() - memory->looked_ns < LOOK_AGAIN_NS;
}

bool fs_targets_are_low(int directory_fd, const char *directory, uint64_t bytes,
			struct fs_memory *memory, struct fs_storage *storage)
{
	if (memory->family != FS_LUSTRE || bytes <= FS_ONE_STRIPE_BYTES)
		return false;
	if (looked_lately(memory) && memory->least_free_bytes >= bytes)
		return false;
	if (fs_look_at_storage(directory_fd, directory, "", storage, NULL))
		return false;
	note_targets(memory, storage);
	return memory->least_free_bytes < bytes;
}

const struct fs_even_targets *fs_even_targets(int directory_fd, const char *directory,
					      struct fs_memory *memory)
{
	struct fs_storage storage;

	if (memory->family == FS_LUSTRE && !looked_lately(memory) &&
	    !fs_look_at_storage(directory_fd, directory, "", &storage, NULL))
		note_targets(memory, &storage);
	return &memory->even;
}

void fs_expect_layout(struct fs_memory *memory, int directory_fd, bool inherits)
{
	const int flags = AT_STATX_DONT_SYNC | (inherits ? 0 : AT_EMPTY_PATH);
	struct statx status;

	memory->next_directory = 0;
	if (!statx(directory_fd, inherits ? ".." : "", flags, STATX_INO, &status))
		memory->next_directory = status.stx_ino;
}

static void find_layout(int fd, bool directory, struct fs_memory *memory, struct fs_info *info)
{
	const uint64_t in = memory && memory->mount ? memory->next_directory : 0,
		       now_ns = base_now_ns();

	if (memory)
		memory->next_directory = 0;
	if (in && memory->directory == in && now_ns - memory->asked_ns < ASK_AGAIN_NS) {
		info->layout = memory->layout;
		return;
	}
	fs_ask_for_layout(fd, info->family, directory, &info->layout);
	if (!in)
		return;
	memory->directory = in;
	memory->asked_ns = now_ns;
	memory->layout = info->layout;
}

int fs_describe(int fd, const char *path, struct fs_memory *memory, struct fs_info *info,
		struct base_error *error)
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
	find_layout(fd, S_ISDIR(status.stx_mode), memory, info);
	return 0;
}
