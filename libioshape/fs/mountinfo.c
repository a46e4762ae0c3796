/* SPDX-License-Identifier: Apache-2.0 */
#define _GNU_SOURCE
#include "fs/mountinfo.h"
#include "fs/sysfile.h"

#include <string.h>
#include <sys/stat.h>

/* Mount tables of big clusters have thousands of lines; what lies beyond this is not looked at. */
#define MOUNTINFO_BYTES (1 * MIB)

/* Where newer headers have stx_mnt_id: part of the kernel's ABI. */
#define MNT_ID_AT 0x90

int fs_read_mountinfo(const char *root, struct base_buffer *text)
{
	return fs_read_whole(root, "/proc/self/mountinfo", MOUNTINFO_BYTES, text);
}

uint64_t fs_mount_number(const struct statx *status)
{
	uint64_t mount = 0;

	if (status->stx_mask & FS_STATX_MOUNT)
		memcpy(&mount, (const char *)status + MNT_ID_AT, sizeof(mount));
	return mount;
}
