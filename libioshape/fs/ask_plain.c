/* SPDX-License-Identifier: Apache-2.0 */
/* What all ways of asking for a layout share. */
#define _GNU_SOURCE
#include "fs/ask.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <unistd.h>

int fs_create_plainly(int directory_fd, const char *name, mode_t mode, int more_flags)
{
	const int flags = O_RDWR | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC | more_flags;
	int fd = openat(directory_fd, name, flags, mode), code;

	if (fd < 0)
		return -errno;
	fd = base_above_streams(fd);
	if (fd >= 0)
		return fd;
	code = -errno;
	unlinkat(directory_fd, name, 0);
	return code;
}

void fs_refused(struct fs_answer *answer, const char *what)
{
	if (!*answer->why)
		snprintf(answer->why, sizeof(answer->why), "%s: %s", what,
			 ioshape_strerror(-errno));
}
