/* SPDX-License-Identifier: Apache-2.0 */
/* Inside the fs floor: the mount table of this process, and what statfs() says. */
#ifndef FS_MOUNTINFO_H
#define FS_MOUNTINFO_H

#include "fs/fs.h"

/*
 * The mount with this number, or if `mount` is 0 one of this device (the last one: it hides the
 * others if it lies over them). Spaces and such are as they are, not as "\040". Pure. 0 or -ENOENT.
 */
int fs_mountinfo_line(const char *mountinfo, uint64_t mount, unsigned device_major,
		      unsigned device_minor, struct fs_mount *found);

/* The same in the mount table of this process; `root` is put before its path. */
int fs_find_mount(const char *root, uint64_t mount, unsigned device_major, unsigned device_minor,
		  struct fs_mount *found);

/* Whether hosts share filesystems of this type as a rule. Pure. */
bool fs_type_is_shared(const char *type);

/* "scratch" out of "10.0.0.1@tcp:10.0.0.2@tcp:/scratch/folder", a Lustre mount's source. The bytes
 * of the name and where it begins; 0 if there is none. Pure. */
size_t fs_lustre_name(const char *source, const char **name);

/* The number that the kernel gave this mount, or 0 if it does not say. */
struct statx;
uint64_t fs_mount_number(const struct statx *status);
/* To be asked of statx() for it. Linux 5.8; older headers call the bytes of its field spare. */
#define FS_STATX_MOUNT 0x1000U
/* One that no other mount gets until the next boot: Linux 6.8; 0 if the kernel does not say. */
uint64_t fs_unique_mount_number(const struct statx *status);
#define FS_STATX_UNIQUE_MOUNT 0x4000U

struct statfs;

/* Both of an open file; `path` is for the sentence. 0 or a negative errno. */
int fs_stat(int fd, const char *path, unsigned statx_mask, struct statx *status,
	    struct statfs *system, struct base_error *error);
/* The filesystem's number, by which it is known. */
uint64_t fs_magic(const struct statfs *system);

/* For new bytes of this user; UINT64_MAX if the filesystem does not say it (space.c). */
uint64_t fs_free_bytes(const struct statfs *system);

#endif
