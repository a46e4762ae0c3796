/* SPDX-License-Identifier: Apache-2.0 */
/* Small files in a directory: put there whole, read whole, and held while they are in use. */
#define _GNU_SOURCE
#include "ring/destination.h"
#include "ring/folder.h"
#include "ring/lane.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

/* ---- Any directory --------------------------------------------------------------------------- */

DIR *ring_listing(int folder_fd)
{
	const int fd =
		base_above_streams(openat(folder_fd, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC));
	DIR *listing = fd < 0 ? NULL : fdopendir(fd);

	if (!listing && fd >= 0)
		close(fd);
	return listing;
}

static int write_all(int fd, const uint8_t *data, size_t bytes)
{
	ssize_t done;

	/* Beyond that the kernel would send a signal that ends the application. */
	if (bytes > base_largest_file())
		return -EFBIG;
	while (bytes) {
		done = write(fd, data, bytes);
		if (done < 0 && errno == EINTR)
			continue;
		if (done <= 0)
			return done ? -errno : -EIO;
		data += done;
		bytes -= (size_t)done;
	}
	return 0;
}

/* Not there after a failure. */
static int put_new(int folder_fd, const char *name, const void *data, size_t bytes, bool durable,
		   mode_t mode)
{
	const int flags = O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC;
	int fd, ret;

	fd = base_own(openat(folder_fd, name, flags, mode));
	if (fd < 0)
		return -errno;
	/* So that nobody takes it for abandoned, and removes it. */
	if (durable)
		(void)flock(fd, LOCK_EX | LOCK_NB);
	ret = write_all(fd, data, bytes);
	if (!ret && durable && fsync(fd))
		ret = -errno;
	/* Some network filesystems report lost writes only here. */
	if (base_close(fd) && !ret && errno != EINTR)
		ret = -errno;
	if (ret)
		unlinkat(folder_fd, name, 0);
	return ret;
}

int ring_put_whole(int folder_fd, const char *name, const void *data, size_t bytes, bool durable,
		   mode_t mode)
{
	char temporary[NAME_MAX + 1];
	int ret;

	ring_temporary_name(folder_fd, name, temporary);
	ret = put_new(folder_fd, temporary, data, bytes, durable, mode);
	if (!ret && renameat(folder_fd, temporary, folder_fd, name)) {
		ret = -errno;
		unlinkat(folder_fd, temporary, 0);
	}
	return ret;
}

int ring_read_whole(int fd, size_t most_bytes, struct base_buffer *into, struct stat *status)
{
	size_t room;
	ssize_t got;

	if (fstat(fd, status))
		return -errno;
	if (!S_ISREG(status->st_mode))
		return -EPERM;
	if ((uint64_t)status->st_size > most_bytes)
		return -EFBIG;
	into->bytes = 0;
	/* What an NFS client knows of its length may be old. */
	for (room = (size_t)status->st_size + 1;; room = 4096) {
		if (base_buffer_reserve(into, room))
			return -ENOMEM;
		got = read(fd, into->data + into->bytes, into->room - into->bytes);
		if (!got)
			return 0;
		if (got < 0 && errno != EINTR)
			return -errno;
		into->bytes += (size_t)MAX(got, 0);
		if (into->bytes > most_bytes)
			return -EFBIG;
	}
}

/* ---- Those that are open by their name ------------------------------------------------------- */

int ring_folder_put(const struct ring_folder *folder, const char *name, const void *data,
		    size_t bytes, struct base_error *error)
{
	const int ret = put_new(folder->fd, name, data, bytes, true, 0666);

	return !ret ? 0 :
		      base_fail(error, ret, "cannot write \"%s/%s\"" BASE_REMEDY "%s", folder->path,
				name, ring_remedy(ret));
}

/* Shared; -ENOENT if it is just being removed, or has been. */
static int take_hold(int fd)
{
	struct stat status;

	if (flock(fd, LOCK_SH | LOCK_NB) && errno == EWOULDBLOCK)
		return -ENOENT;
	return fstat(fd, &status) || status.st_nlink ? 0 : -ENOENT;
}

static int read_file(const struct ring_folder *folder, const char *name, int fd, size_t most_bytes,
		     struct base_buffer *into, struct base_error *error)
{
	struct stat status;
	const int ret = ring_read_whole(fd, most_bytes, into, &status);

	if (ret == -EPERM)
		return base_refuse(error, IOSHAPE_E_FORMAT, "\"%s/%s\" is not a regular file",
				   folder->path, name);
	if (ret == -EFBIG)
		return base_refuse(error, IOSHAPE_E_LIMIT,
				   "cannot read \"%s/%s\": it is larger than %s", folder->path,
				   name, BASE_SIZE(most_bytes));
	if (ret)
		return base_fail(error, ret, "cannot read \"%s/%s\"", folder->path, name);
	if ((uint64_t)status.st_size > into->bytes)
		return base_refuse(error, IOSHAPE_E_DAMAGED,
				   "\"%s/%s\" was cut short while it was read", folder->path, name);
	return 0;
}

int ring_folder_get(const struct ring_folder *folder, const char *name, size_t most_bytes,
		    struct base_buffer *into, struct ring_hold *hold, struct base_error *error)
{
	struct ring_hold taken = RING_NO_HOLD;
	int ret;

	if (hold)
		*hold = (struct ring_hold)RING_NO_HOLD;
	/* O_NONBLOCK: a pipe must be refused, not waited for. */
	taken.fd =
		base_own(openat(folder->fd, name, O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC));
	if (taken.fd < 0)
		return errno == ENOENT ? -ENOENT :
					 base_fail(error, -errno, "cannot open \"%s/%s\"",
						   folder->path, name);
	ret = hold ? take_hold(taken.fd) : 0;
	if (!ret)
		ret = read_file(folder, name, taken.fd, most_bytes, into, error);
	if (!ret && hold)
		*hold = taken;
	else
		ring_folder_let_go(&taken);
	return ret;
}

ssize_t ring_folder_peek(const struct ring_folder *folder, const char *name, void *into,
			 size_t bytes)
{
	const int fd = base_above_streams(
		openat(folder->fd, name, O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC));
	ssize_t got;

	if (fd < 0)
		return -errno;
	do
		got = pread(fd, into, bytes, 0);
	while (got < 0 && errno == EINTR);
	if (got < 0)
		got = -errno;
	close(fd);
	return got;
}

static int lock(int fd, bool wait)
{
	while (flock(fd, LOCK_EX | (wait ? 0 : LOCK_NB))) {
		if (errno == EWOULDBLOCK)
			return -EBUSY;
		if (errno != EINTR)
			return -errno;
	}
	return 0;
}

int ring_folder_take(const struct ring_folder *folder, const char *name, bool wait,
		     struct ring_hold *hold, struct base_error *error)
{
	int ret;

	hold->fd =
		base_own(openat(folder->fd, name, O_RDWR | O_CREAT | O_NOFOLLOW | O_CLOEXEC, 0600));
	if (hold->fd < 0)
		return base_fail(error, -errno, "cannot open \"%s/%s\"", folder->path, name);
	ret = lock(hold->fd, wait);
	if (ret)
		ring_folder_let_go(hold);
	return !ret || ret == -EBUSY ?
		       ret :
		       base_fail(error, ret, "cannot lock \"%s/%s\"", folder->path, name);
}

void ring_folder_let_go(struct ring_hold *hold)
{
	base_close(hold->fd);
	*hold = (struct ring_hold)RING_NO_HOLD;
}
