/* SPDX-License-Identifier: Apache-2.0 */
/* Inside the fs floor: the mount table of this process. */
#ifndef FS_MOUNTINFO_H
#define FS_MOUNTINFO_H

#include "fs/fs.h"

/* Its text, ended by a 0, into a zeroed buffer, to be freed either way. 0 or a negative errno. */
int fs_read_mountinfo(struct base_buffer *text);

#endif
