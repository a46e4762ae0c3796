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

/*
 * Type and source ("/dev/sda1", "server:/export") of the mount with this number, in the text of a
 * mountinfo file. Pure. 0 or -ENOENT.
 */
int fs_mountinfo_mount(const char *mountinfo, uint64_t mount, char *type, size_t type_bytes,
		       char *source, size_t source_bytes);

/* ---- Pools (pool.c) -------------------------------------------------------------------------- */

#define FS_POOL_BYTES 128

/* What a pool's name is made of. */
#define FS_POOL_CHARACTERS "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789._:@+/-"

/*
 * A name for the storage behind a mount, the same on all hosts that share it: "nfs:server:/export",
 * "lustre:fs1". What one host alone can reach has `host` in its name. Made of characters that are
 * safe in file names' neighbourhood and in Redis: no space, no brace. Pure.
 */
void fs_pool_of_mount(const char *type, const char *source, const char *host,
		      char name[FS_POOL_BYTES]);

/* The same for the file or directory `path`, whose last part need not exist. */
int fs_pool_of_path(const char *path, char name[FS_POOL_BYTES], struct base_error *error);

/* A number that is the same for paths on one mount, and for no others while it is mounted; quick to
 * be had. 0 or a negative errno. */
int fs_mount_of_path(const char *path, uint64_t *mount);

/* A name for a statfs magic number: "nfs", "lustre"; "0x…" for one not known here. Pure. */
void fs_magic_name(uint64_t magic, char *type, size_t type_bytes);

#endif
