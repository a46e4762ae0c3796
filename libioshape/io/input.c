/* SPDX-License-Identifier: Apache-2.0 */
/* A file, or a part of one, open for reading, twice: through the page cache and, where possible,
 * past it. */
#define _GNU_SOURCE
#include "io/atomic_file.h"
#include "io/queue.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

static int open_buffered(struct io_input *input, const char *path, struct base_error *error)
{
	struct stat status;

	/* O_NONBLOCK: a pipe must be refused, not waited for. It means nothing for regular files.
	 */
	input->fd = base_own(open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK));
	if (input->fd < 0)
		return base_fail(error, -errno, "cannot open \"%s\"", path);
	if (fstat(input->fd, &status))
		return base_fail(error, -errno, "cannot look at \"%s\"", path);
	if (S_ISDIR(status.st_mode))
		return base_fail_with(error, -EISDIR, "give the name of a file",
				      "cannot load \"%s\"", path);
	if (!S_ISREG(status.st_mode))
		return base_refuse(error, -ESPIPE, "cannot load \"%s\": it is not a regular file",
				   path);
	input->bytes = (uint64_t)status.st_size;
	input->modified_ns = io_modified_ns(&status);
	return fs_describe(input->fd, path, NULL, &input->fs, error);
}

/* The very same file, whatever has taken its name since: by way of /proc. */
static int open_direct(struct io_input *input, enum ioshape_direct direct, struct base_error *error)
{
	char same_file[64];

	if (direct == IOSHAPE_DIRECT_OFF)
		return 0;
	errno = EOPNOTSUPP;
	if (!input->fs.direct_known || input->fs.direct_works) {
		snprintf(same_file, sizeof(same_file), "/proc/self/fd/%d", input->fd);
		input->direct_fd = base_own(open(same_file, O_RDONLY | O_CLOEXEC | O_DIRECT));
	}
	if (input->direct_fd < 0 && direct == IOSHAPE_DIRECT_REQUIRE)
		return base_fail_with(error, -errno, "use direct=prefer",
				      "cannot use direct I/O on \"%s\" (%s), which was required",
				      input->path, input->fs.type);
	return 0;
}

/* From all of the file to a part of it. */
static int take_part(struct io_input *input, const char *path, uint64_t base, uint64_t bytes,
		     struct base_error *error)
{
	char *named;

	if (!base && !bytes)
		return 0;
	if (base > input->bytes || bytes > input->bytes - base)
		return base_refuse_with(
			error, IOSHAPE_E_DAMAGED, "use another copy",
			"cannot load %s from offset %llu of \"%s\": it has only %s, so "
			"that it was cut short or is another file",
			BASE_SIZE(bytes), (unsigned long long)base, path, BASE_SIZE(input->bytes));
	if (asprintf(&named, "%s (part at offset %llu)", path, (unsigned long long)base) < 0)
		return base_no_memory(error, "a path", strlen(path));
	free(input->path);
	input->path = named;
	input->base = base;
	input->bytes = bytes;
	return 0;
}

int io_input_open(struct io_input *input, const char *path, uint64_t base, uint64_t bytes,
		  enum ioshape_direct direct, struct base_error *error)
{
	int ret;

	memset(input, 0, sizeof(*input));
	input->fd = input->direct_fd = input->claim_fd = -1;
	input->path = strdup(path);
	if (!input->path)
		return base_no_memory(error, "a path", strlen(path));
	ret = open_buffered(input, path, error);
	if (!ret)
		ret = take_part(input, path, base, bytes, error);
	if (!ret)
		ret = open_direct(input, direct, error);
	if (ret)
		io_input_close(input);
	return ret;
}

void io_look_anew(const char *path)
{
	struct statx status;

	/* Opening may go by what the client knows of a file that is still open; this asks. */
	statx(AT_FDCWD, path, AT_STATX_FORCE_SYNC, STATX_BASIC_STATS, &status);
}

void io_input_close(struct io_input *input)
{
	base_close(input->claim_fd);
	base_close(input->direct_fd);
	base_close(input->fd);
	free(input->path);
	memset(input, 0, sizeof(*input));
	input->fd = input->direct_fd = input->claim_fd = -1;
}

bool io_input_claim(struct io_input *input)
{
	/* A name that only one socket of the host can have, and that the kernel frees with it. */
	struct sockaddr_un name = { .sun_family = AF_UNIX };
	struct stat status;
	socklen_t bytes;

	if (fstat(input->fd, &status))
		return true;
	bytes = (socklen_t)snprintf(name.sun_path + 1, sizeof(name.sun_path) - 1,
				    "ioshape-load-%llx-%llx", (unsigned long long)status.st_dev,
				    (unsigned long long)status.st_ino);
	bytes += (socklen_t)offsetof(struct sockaddr_un, sun_path) + 1;
	input->claim_fd = base_own(socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0));
	return input->claim_fd < 0 ||
	       !bind(input->claim_fd, (const struct sockaddr *)&name, bytes) || errno != EADDRINUSE;
}

int io_cut_short(const struct io_input *input, uint64_t offset, struct base_error *error)
{
	return base_refuse(error, IOSHAPE_E_DAMAGED,
			   "\"%s\" ends at offset %llu, before what was to be read: it was cut "
			   "short while open",
			   input->path, (unsigned long long)(offset - input->base));
}

int io_input_get(const struct io_input *input, uint64_t offset, void *into, size_t bytes,
		 struct base_error *error)
{
	size_t done = 0;
	ssize_t got;

	/* Behind a part of a file other bytes follow. */
	if (offset > input->bytes || bytes > input->bytes - offset)
		return io_cut_short(input, input->base + input->bytes, error);
	while (done < bytes) {
		got = pread(input->fd, (char *)into + done, bytes - done,
			    (off_t)(input->base + offset + done));
		if (got < 0 && errno == EINTR)
			continue;
		/* GlusterFS opens a file late (performance.open-behind), and another client may
		 * have replaced it. */
		if (got < 0)
			return base_fail(error, errno == ENOENT ? -ESTALE : -errno,
					 "cannot read \"%s\" at offset %llu", input->path,
					 (unsigned long long)(offset + done));
		if (!got)
			return io_cut_short(input, input->base + offset + done, error);
		done += (size_t)got;
	}
	return 0;
}

/* ---- A small file beside it ------------------------------------------------------------------ */

/* By the name that the open file has: links have been followed. */
static int open_beside(const struct io_input *input, const char *suffix)
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

int io_input_get_beside(const struct io_input *input, const char *suffix, size_t most_bytes,
			struct base_buffer *into)
{
	struct stat file, beside;
	const int fd = open_beside(input, suffix);
	int ret;

	if (fd < 0)
		return fd;
	ret = fstat(input->fd, &file) ? -errno : io_read_whole(fd, most_bytes, into, &beside);
	/* Where others may put files, they do not tell of ours. */
	if (!ret && beside.st_uid != file.st_uid && beside.st_uid)
		ret = -EPERM;
	base_close(fd);
	return ret;
}
