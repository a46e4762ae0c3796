/* SPDX-License-Identifier: Apache-2.0 */
/* A small file beside one that has been put in place, which tells of it. */
#define _GNU_SOURCE
#include "ring/folder.h"
#include "ring/writer.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <sys/stat.h>
#include <unistd.h>

/* ---- Writing --------------------------------------------------------------------------------- */

int64_t ring_writer_modified_ns(const struct ring_writer *writer)
{
	struct stat status;

	/* The descriptor, whatever has taken the name since. */
	if (writer->nil || writer->file.stream || fstat(writer->file.lock_fd, &status))
		return 0;
	return ring_modified_ns(&status);
}

static int put(struct ring_writer *writer, const char *name, const void *data, size_t bytes)
{
	const struct ring_destination *file = &writer->file;
	const bool durable = !writer->options.no_sync;
	struct ring_notes said_before = { 0 };
	struct stat status;
	int ret;

	if (fstat(file->lock_fd, &status))
		return -errno;
	ret = ring_put_whole(file->directory_fd, name, data, bytes, durable, status.st_mode & 0666);
	if (!ret && durable)
		ret = ring_destination_sync_directory(&writer->file, &said_before);
	return ret;
}

int ring_writer_put_beside(struct ring_writer *writer, const char *suffix, const void *data,
			   size_t bytes, struct base_error *error)
{
	const struct ring_destination *file = &writer->file;
	const uint64_t begin = base_now_ns();
	char name[NAME_MAX + 1];
	int ret = -ENAMETOOLONG;

	if (snprintf(name, sizeof(name), "%s%s", file->name, suffix) <= NAME_MAX)
		ret = put(writer, name, data, bytes);
	writer->commit_ns += base_now_ns() - begin;
	return !ret ? 0 :
		      base_fail(error, ret, "cannot write \"%s%s\"" BASE_REMEDY "%s", file->path,
				suffix, ring_remedy(ret));
}

/* ---- Reading --------------------------------------------------------------------------------- */

int64_t ring_input_modified_ns(const struct ring_input *input)
{
	struct stat status;

	return fstat(input->fd, &status) ? 0 : ring_modified_ns(&status);
}

/* By the name that the open file has: links have been followed. */
static int open_beside(const struct ring_input *input, const char *suffix)
{
	char same_file[64], name[PATH_MAX + NAME_MAX];
	ssize_t bytes;
	int fd;

	snprintf(same_file, sizeof(same_file), "/proc/self/fd/%d", input->fd);
	bytes = readlink(same_file, name, PATH_MAX);
	if (bytes < 0 || bytes == PATH_MAX)
		return -ENOENT;
	snprintf(name + bytes, NAME_MAX, "%s", suffix);
	fd = base_own(open(name, O_RDONLY | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK));
	return fd < 0 ? -errno : fd;
}

int ring_input_get_beside(const struct ring_input *input, const char *suffix, size_t most_bytes,
			  struct base_buffer *into)
{
	struct stat file, beside;
	const int fd = open_beside(input, suffix);
	int ret;

	if (fd < 0)
		return fd;
	ret = fstat(input->fd, &file) ? -errno : ring_read_whole(fd, most_bytes, into, &beside);
	/* Where others may put files, they do not tell of ours. */
	if (!ret && beside.st_uid != file.st_uid && beside.st_uid)
		ret = -EPERM;
	base_close(fd);
	return ret;
}
