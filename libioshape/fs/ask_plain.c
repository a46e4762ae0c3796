/* SPDX-License-Identifier: Apache-2.0 */
/* What all ways of asking for a layout share. */
#define _GNU_SOURCE
#include "fs/ask.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>

int fs_create_plainly(int directory_fd, const char *name, mode_t mode, int more_flags)
{
	int fd = openat(directory_fd, name,
			O_RDWR | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC | more_flags, mode);

	return fd < 0 ? -errno : fd;
}

void fs_refused(struct fs_answer *answer, const char *what)
{
	if (!*answer->why)
		snprintf(answer->why, sizeof(answer->why), "%s: %s", what,
			 ioshape_strerror(-errno));
}
