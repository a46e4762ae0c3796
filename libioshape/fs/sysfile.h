/* SPDX-License-Identifier: Apache-2.0 */
/* Inside the fs floor: small texts below /proc and /sys. `root` is put before the path: "" but in
 * tests. */
#ifndef FS_SYSFILE_H
#define FS_SYSFILE_H

#include "fs/fs.h"

/* No more than `most` bytes of a file, ended by a 0, into a zeroed buffer, to be freed either way.
 * 0 or a negative errno. */
int fs_read_whole(const char *root, const char *path, size_t most, struct base_buffer *text);

/* The first line, without its end. 0 or a negative errno; -E2BIG if it does not fit. */
int fs_read_line(const char *root, const char *path, char *line, size_t line_bytes);

/* The number that is the first line, or a negative errno. */
int fs_read_number(const char *root, const char *path, uint64_t *number);

#endif
