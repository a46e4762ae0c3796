/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What a path sits on. It asks the kernel, and changes nothing.
 */
#ifndef FS_FS_H
#define FS_FS_H

#include "base/base.h"

#include <sys/types.h>

struct fs_info {
	char type[32]; /* as /proc/self/mountinfo says it: "ext4", "fuse.sshfs"; else from the magic
			*/
	uint64_t magic;            /* statfs f_type */
	uint64_t free_bytes;       /* available to this user */
	uint64_t block_bytes;      /* preferred unit of I/O (st_blksize) */
	uint32_t memory_alignment; /* for direct I/O, 0 if the kernel did not say */
	uint32_t offset_alignment;
	bool direct_known; /* the kernel said whether direct I/O works ... */
	bool direct_works; /* ... and this is what it said */
};

/* The type of the filesystem seen last: reading the mount table costs more than a small save. Zero
 * it. */
struct fs_memory {
	unsigned device_major, device_minor;
	char type[32];
};

/* Describes what the open file or directory `fd` is on. `memory` may be NULL. */
int fs_describe(int fd, const char *path, struct fs_memory *memory, struct fs_info *info,
		struct base_error *error);

/*
 * Finds the filesystem type of device major:minor in the text of a mountinfo file. Pure. 0 and the
 * name in `type`, or -ENOENT.
 */
int fs_mountinfo_type(const char *mountinfo, unsigned device_major, unsigned device_minor,
		      char *type, size_t type_bytes);

/* A name for a statfs magic number: "nfs", "lustre"; "0x…" for one not known here. Pure. */
void fs_magic_name(uint64_t magic, char *type, size_t type_bytes);

#endif
