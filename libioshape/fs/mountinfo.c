/* SPDX-License-Identifier: Apache-2.0 */
#define _GNU_SOURCE
#include "fs/mountinfo.h"
#include "fs/sysfile.h"

#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/statfs.h>

/* Mount tables of big clusters have thousands of lines; what lies beyond this is not looked at. */
#define MOUNTINFO_BYTES (1 * MIB)

/* Where newer headers have stx_mnt_id: part of the kernel's ABI. */
#define MNT_ID_AT 0x90

int fs_find_mount(const char *root, uint64_t mount, unsigned device_major, unsigned device_minor,
		  struct fs_mount *found)
{
	struct base_buffer text = { 0 };
	int ret = fs_read_whole(root, "/proc/self/mountinfo", MOUNTINFO_BYTES, &text);

	if (!ret)
		ret = fs_mountinfo_line((const char *)text.data, mount, device_major, device_minor,
					found);
	base_buffer_free(&text);
	return ret;
}

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

int fs_stat(int fd, const char *path, unsigned statx_mask, struct statx *status,
	    struct statfs *system, struct base_error *error)
{
	if (statx(fd, "", AT_EMPTY_PATH, STATX_BASIC_STATS | statx_mask, status))
		return base_fail(error, -errno, "cannot look at \"%s\" (statx)", path);
	if (fstatfs(fd, system))
		return base_fail(error, -errno, "cannot look at the filesystem of \"%s\" (statfs)",
				 path);
	return 0;
}

uint64_t fs_magic(const struct statfs *system)
{
	return (uint64_t)(unsigned long)system->f_type & 0xffffffff;
}
