/* SPDX-License-Identifier: Apache-2.0 */
#include "fs/mountinfo.h"

#include <errno.h>
#include <fcntl.h>
#include <unistd.h>

/* Mount tables of big clusters have thousands of lines; what lies beyond this is not looked at. */
#define MOUNTINFO_BYTES (1 * MIB)

int fs_read_mountinfo(struct base_buffer *text)
{
	int fd, ret = 0;
	ssize_t got;

	fd = open("/proc/self/mountinfo", O_RDONLY | O_CLOEXEC);
	if (fd < 0)
		return -errno;
	do {
		ret = base_buffer_reserve(text, 16 * KIB);
		if (ret)
			break;
		got = read(fd, text->data + text->bytes, text->room - text->bytes - 1);
		if (got > 0)
			text->bytes += (size_t)got;
	} while (got > 0 && text->bytes < MOUNTINFO_BYTES);
	if (!ret)
		text->data[text->bytes] = 0;
	close(fd);
	return ret;
}
