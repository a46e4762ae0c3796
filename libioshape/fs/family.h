/* SPDX-License-Identifier: Apache-2.0 */
/* Inside the fs floor: which family a filesystem is of, and what it answers about a file. */
#ifndef FS_FAMILY_H
#define FS_FAMILY_H

#include "fs/fs.h"

/* By the type in the mount table, or if that is not known by statfs' f_type. Pure. */
enum fs_family fs_family_of(const char *type, uint64_t magic);

/*
 * What a filesystem in user space of no known type is: it is asked the questions that only the
 * families with layouts can answer. A daemon may pass them on to such a filesystem below it, or
 * play one. Up to five system calls: once per mount. FS_FUSE if it is none of them.
 */
enum fs_family fs_family_behind_fuse(int fd);

/* By all of these. */
enum fs_family fs_family_of_open(int fd, const char *type, uint64_t magic);

/* The layout of an open file, or what new files in an open directory get. One or two system calls
 * on families that have layouts (on Ceph some more for a directory), none on others. False if it
 * does not tell; *layout is zero then.
 */
bool fs_ask_for_layout(int fd, enum fs_family family, bool directory, struct fs_layout *layout);

#endif
