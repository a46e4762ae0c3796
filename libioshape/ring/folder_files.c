/* SPDX-License-Identifier: Apache-2.0 */
/* Small files in a directory: put there whole, read whole, and held while they are in use. */
#define _GNU_SOURCE
#include "ring/destination.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

/* ---- Writing --------------------------------------------------------------------------------- */

static int write_all(int fd, const void *data, size_t bytes)
{
	size_t done = 0;
	ssize_t put;

	/* Beyond that the kernel would send a signal that ends the application. */
	if (bytes > base_largest_file())
		return -EFBIG;
	while (done < bytes) {
		put = write(fd, (const char *)data + done, bytes - done);
		if (put < 0 && errno == EINTR)
			continue;
		if (put <= 0)
			return put ? -errno : -EIO;
		done += (size_t)put;
	}
	return 0;
}

static int write_durably(const struct ring_folder *folder, const char *name, int fd,
			 const void *data, size_t bytes, struct base_error *error)
{
	int ret = write_all(fd, data, bytes);

	if (!ret && fsync(fd))
		ret = -errno;
	/* A child that was forked meanwhile has the descriptor, too, and would keep the lock. */
	flock(fd, LOCK_UN);
	/* Some network filesystems report lost writes only here. */
	if (close(fd) && !ret && errno != EINTR)
		ret = -errno;
	return !ret ? 0 :
		      base_fail(error, ret,
				"cannot write \"%s/%s\"" BASE_REMEDY
				"the storage failed or is full",
				folder->path, name);
}

int ring_folder_put(const struct ring_folder *folder, const char *name, const void *data,
		    size_t bytes, struct base_error *error)
{
	char temporary[NAME_MAX + 1];
	int fd, ret;

	snprintf(temporary, sizeof(temporary), ".%.200s" RING_TEMPORARY_MARK "%s-%016llx", name,
		 ring_machine_tag(), (unsigned long long)base_random());
	fd = openat(folder->fd, temporary, O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC,
		    0666);
	if (fd < 0)
		return base_fail(error, -errno, "cannot create \"%s/%s\"", folder->path, name);
	/* So that nobody takes it for abandoned, and removes it. */
	(void)flock(fd, LOCK_EX | LOCK_NB);
	ret = write_durably(folder, name, fd, data, bytes, error);
	if (!ret && renameat(folder->fd, temporary, folder->fd, name))
		ret = base_fail(error, -errno, "cannot put \"%s/%s\" in place (rename)",
				folder->path, name);
	if (ret)
		unlinkat(folder->fd, temporary, 0);
	return ret;
}

/* ---- Reading --------------------------------------------------------------------------------- */

/* Shared; -ENOENT if it is just being removed, or has been. */
static int take_hold(int fd)
{
	struct stat status;

	if (flock(fd, LOCK_SH | LOCK_NB) && errno == EWOULDBLOCK)
		return -ENOENT;
	return fstat(fd, &status) || status.st_nlink ? 0 : -ENOENT;
}

static int check(const struct ring_folder *folder, const char *name, int fd, size_t most_bytes,
		 size_t *bytes, struct base_error *error)
{
	struct stat status;

	if (fstat(fd, &status))
		return base_fail(error, -errno, "cannot look at \"%s/%s\" (fstat)", folder->path,
				 name);
	if (!S_ISREG(status.st_mode))
		return base_refuse(error, IOSHAPE_E_FORMAT, "\"%s/%s\" is not a regular file",
				   folder->path, name);
	if ((uint64_t)status.st_size > most_bytes)
		return base_refuse(error, IOSHAPE_E_LIMIT,
				   "\"%s/%s\" has %llu bytes" BASE_REMEDY "at most %zu are read",
				   folder->path, name, (unsigned long long)status.st_size,
				   most_bytes);
	*bytes = (size_t)status.st_size;
	return 0;
}

static int read_all(const struct ring_folder *folder, const char *name, int fd, size_t bytes,
		    struct base_buffer *into, struct base_error *error)
{
	size_t done = 0;
	ssize_t got;

	if (base_buffer_reserve(into, bytes))
		return base_no_memory(error, name, bytes);
	while (done < bytes) {
		got = pread(fd, into->data + into->bytes + done, bytes - done, (off_t)done);
		if (got < 0 && errno == EINTR)
			continue;
		if (got < 0)
			return base_fail(error, -errno, "cannot read \"%s/%s\"", folder->path,
					 name);
		if (!got)
			return base_refuse(error, IOSHAPE_E_DAMAGED,
					   "\"%s/%s\" was cut short while it was read",
					   folder->path, name);
		done += (size_t)got;
	}
	into->bytes += bytes;
	return 0;
}

int ring_folder_get(const struct ring_folder *folder, const char *name, size_t most_bytes,
		    struct base_buffer *into, struct ring_hold *hold, struct base_error *error)
{
	struct ring_hold taken = { .owner = base_pid() };
	size_t bytes = 0;
	int ret;

	if (hold)
		*hold = (struct ring_hold)RING_NO_HOLD;
	/* O_NONBLOCK: a pipe must be refused, not waited for. */
	taken.fd = openat(folder->fd, name, O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC);
	if (taken.fd < 0)
		return errno == ENOENT ? -ENOENT :
					 base_fail(error, -errno, "cannot open \"%s/%s\"",
						   folder->path, name);
	ret = hold ? take_hold(taken.fd) : 0;
	if (!ret)
		ret = check(folder, name, taken.fd, most_bytes, &bytes, error);
	if (!ret)
		ret = read_all(folder, name, taken.fd, bytes, into, error);
	if (!ret && hold)
		*hold = taken;
	else
		ring_folder_let_go(&taken);
	return ret;
}

void ring_folder_let_go(struct ring_hold *hold)
{
	if (hold->fd >= 0) {
		if (hold->owner == base_pid())
			flock(hold->fd, LOCK_UN);
		close(hold->fd);
	}
	*hold = (struct ring_hold)RING_NO_HOLD;
}
