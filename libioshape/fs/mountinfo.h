/* SPDX-License-Identifier: Apache-2.0 */
/* Inside the fs floor: the mount table of this process, and what statfs() says. */
#ifndef FS_MOUNTINFO_H
#define FS_MOUNTINFO_H

#include "fs/fs.h"

/* Its text, ended by a 0, into a zeroed buffer, to be freed either way. 0 or a negative errno. */
int fs_read_mountinfo(struct base_buffer *text);

struct statfs;

/* For new bytes of this user; UINT64_MAX if the filesystem does not say it (room.c). */
uint64_t fs_free_bytes(const struct statfs *system);

#endif
