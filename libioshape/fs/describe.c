/* SPDX-License-Identifier: Apache-2.0 */
#define _GNU_SOURCE
#include "fs/family.h"
#include "fs/mountinfo.h"

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

/* What is the same for all files of a mount. */
static void find_mount(int fd, struct fs_info *info, struct fs_memory *memory,
		       unsigned device_major, unsigned device_minor)
{
	/* The kernel gives numbers of devices that are gone to others. */
	if (memory && *memory->type && memory->device_major == device_major &&
	    memory->device_minor == device_minor && memory->magic == info->magic) {
		memcpy(info->type, memory->type, sizeof(info->type));
		info->family = memory->family;
		return;
	}
	find_type(fd, info, device_major, device_minor);
	if (!memory)
		return;
	memcpy(memory->type, info->type, sizeof(memory->type));
	memory->family = info->family;
	memory->magic = info->magic;
	memory->counted = false;
	memory->device_major = device_major;
	memory->device_minor = device_minor;
}

uint32_t fs_remembered_targets(int directory_fd, struct fs_memory *memory)
{
	if (!memory->counted)
		memory->targets = fs_count_targets(directory_fd, memory->family);
	memory->counted = true;
	return memory->targets;
}

bool fs_targets_are_low(int directory_fd, const char *directory, uint64_t bytes,
			struct fs_memory *memory, struct fs_storage *storage)
{
	uint64_t now_ns = base_now_ns();

	if (memory->family != FS_LUSTRE || bytes <= FS_ONE_STRIPE_BYTES)
		return false;
	if (memory->looked_ns && now_ns - memory->looked_ns < LOOK_AGAIN_NS &&
	    memory->least_free_bytes >= bytes)
		return false;
	if (fs_look_at_storage(directory_fd, directory, "", storage, NULL))
		return false;
	memory->looked_ns = now_ns;
	memory->least_free_bytes = UINT64_MAX;
	for (uint32_t i = 0; i < storage->target_count; i++)
		memory->least_free_bytes =
			MIN(memory->least_free_bytes, storage->target[i].free_bytes);
	return memory->least_free_bytes < bytes;
}

int fs_describe(int fd, const char *path, struct fs_memory *memory, struct fs_info *info,
		struct base_error *error)
{
	struct statx status;
	struct statfs system;
	int ret;

	memset(info, 0, sizeof(*info));
	ret = fs_stat(fd, path, STATX_DIOALIGN, &status, &system, error);
	if (ret)
		return ret;
	info->magic = fs_magic(&system);
	info->free_bytes = fs_free_bytes(&system);
	info->block_bytes = status.stx_blksize;
	read_alignment(info, &status);
	find_mount(fd, info, memory, status.stx_dev_major, status.stx_dev_minor);
	fs_ask_for_layout(fd, info->family, S_ISDIR(status.stx_mode), &info->layout);
	return 0;
}
