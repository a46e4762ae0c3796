/* SPDX-License-Identifier: Apache-2.0 */
#include "fs/sysfile.h"
#include "fs/text.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#define PATH_BYTES 1024

static int open_below(const char *root, const char *path)
{
	char whole[PATH_BYTES];
	int fd;

	if ((size_t)snprintf(whole, sizeof(whole), "%s%s", root, path) >= sizeof(whole))
		return -ENAMETOOLONG;
	fd = base_above_streams(open(whole, O_RDONLY | O_CLOEXEC | O_NONBLOCK));
	return fd < 0 ? -errno : fd;
}

int fs_read_whole(const char *root, const char *path, size_t most, struct base_buffer *text)
{
	int fd = open_below(root, path), ret;
	ssize_t got;

	if (fd < 0)
		return fd;
	do {
		ret = base_buffer_reserve(text, 16 * KIB);
		if (ret)
			break;
		got = read(fd, text->data + text->bytes, text->room - text->bytes - 1);
		if (got > 0)
			text->bytes += (size_t)got;
		else if (got < 0 && !text->bytes)
			ret = -errno;
	} while (got > 0 && text->bytes < most);
	if (text->data)
		text->data[text->bytes] = 0;
	close(fd);
	return ret;
}

int fs_read_line(const char *root, const char *path, char *line, size_t line_bytes)
{
	int fd = open_below(root, path), ret = 0;
	ssize_t got;

	if (fd < 0)
		return fd;
	got = read(fd, line, line_bytes);
	if (got < 0)
		ret = -errno;
	else if (memchr(line, '\n', (size_t)got))
		*(char *)memchr(line, '\n', (size_t)got) = 0;
	else if ((size_t)got < line_bytes)
		line[got] = 0;
	else
		ret = -E2BIG;
	close(fd);
	return ret;
}

int fs_read_number(const char *root, const char *path, uint64_t *number)
{
	char line[32];
	int ret = fs_read_line(root, path, line, sizeof(line));

	if (ret)
		return ret;
	return fs_whole_number(line, strlen(line), number) ? 0 : -EINVAL;
}
