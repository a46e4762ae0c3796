/* SPDX-License-Identifier: Apache-2.0 */
/* The space of a new file, before its first byte; and before there is a file. */
#define _GNU_SOURCE
#include "ring/destination.h"
#include "ring/lane.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* Interruptions in a row before we believe that they will not end. */
#define MAX_INTERRUPTIONS 100

/* Blocks for so many bytes, interrupted or not. */
static int allocate(int fd, uint64_t offset, uint64_t bytes)
{
	int interruptions = 0, ret;

	do {
		ret = fallocate(fd, 0, (off_t)offset, (off_t)bytes) ? -errno : 0;
	} while (ret == -EINTR && ++interruptions < MAX_INTERRUPTIONS);
	return ret;
}

/*
 * Direct writes that extend a file wait for all others, on FUSE, XFS and others; so while it is
 * written it is at least as long as it will be. What follows the expected bytes (an index) is less
 * than a block as a rule. The writer cuts it in the end.
 */
static uint64_t length_meanwhile(const struct ring_reservation *reservation)
{
	const uint64_t block = reservation->block_bytes, bytes = reservation->bytes;

	return !block ? bytes :
			MAX(bytes, MIN((bytes / block + 2) * block, reservation->most_bytes));
}

static int reserve(const struct ring_destination *destination,
		   const struct ring_reservation *reservation)
{
	int ret = allocate(destination->fd, reservation->offset, length_meanwhile(reservation));

	/* A bit less will do. */
	if (ret == -ENOSPC || ret == -EDQUOT || ret == -EFBIG)
		ret = allocate(destination->fd, reservation->offset, reservation->bytes);
	return ret;
}

/* Where space cannot be had ahead. */
static void set_length(const struct ring_destination *destination,
		       const struct ring_reservation *reservation)
{
	if (ftruncate(destination->fd, (off_t)length_meanwhile(reservation)))
		base_log(reservation->log, IOSHAPE_LOG_DEBUG, "cannot set the length of %s: %s",
			 destination->path, ioshape_strerror(-errno));
}

static int no_room(const struct ring_destination *destination,
		   const struct ring_reservation *reservation, int code, struct base_error *error)
{
	const uint64_t bytes = reservation->bytes;
	const uint64_t free_bytes = fs_free_bytes_behind(destination->fd);

	/* On the whole; not where the file would lie, or not for this user. */
	if (free_bytes >= bytes)
		base_fail(error, code,
			  "cannot save \"%s\": the %s that it needs cannot be reserved on its "
			  "filesystem (%s)" BASE_REMEDY "%s",
			  destination->path, BASE_SIZE(bytes), reservation->fs->type,
			  ring_remedy(code));
	else
		base_refuse(error, code,
			    "cannot save \"%s\": needs %s, %s are free on its filesystem "
			    "(%s)" BASE_REMEDY "%s",
			    destination->path, BASE_SIZE(bytes), BASE_SIZE(free_bytes),
			    reservation->fs->type, ring_remedy(code));
	base_error_space(error, bytes, free_bytes);
	return code;
}

int ring_destination_reserve(struct ring_destination *destination,
			     const struct ring_reservation *reservation, struct ring_notes *notes,
			     struct base_error *error)
{
	int ret = reserve(destination, reservation);

	/* The space of a file that we have replaced may be on its way. */
	if ((ret == -ENOSPC || ret == -EDQUOT) && ring_await_releases())
		ret = reserve(destination, reservation);
	switch (ret) {
	case 0:
		return 0;
	case -ENOSPC:
	case -EDQUOT:
	case -EFBIG:
	case -EIO:
		return no_room(destination, reservation, ret, error);
	default:
		/* Nothing can be reserved: then what there is free decides. */
		if (reservation->bytes > fs_free_bytes_behind(destination->fd))
			return no_room(destination, reservation, -ENOSPC, error);
		ring_note(notes, IOSHAPE_STEP_PREALLOCATE, "no preallocation on %s: %s",
			  reservation->fs->type, ioshape_strerror(ret));
		if (!destination->shared) /* it would cut what others have written */
			set_length(destination, reservation);
		return 0;
	}
}

/* ---- Before there is a file ------------------------------------------------------------------ */

/* The directory that a file at `path` will be in, behind a symbolic link as well; to be freed. */
static char *directory_of(const char *path)
{
	char *resolved = realpath(path, NULL), *directory = resolved ? resolved : strdup(path);
	char *slash = directory ? strrchr(directory, '/') : NULL;

	if (slash)
		slash[slash == directory] = 0;
	else if (directory)
		strcpy(directory, *directory ? "." : "");
	return directory;
}

static int open_directory(const char *path)
{
	return path ? base_above_streams(open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC)) : -1;
}

void ring_clear_space(const char *path, const struct base_log *log)
{
	char *directory = directory_of(path);
	const int fd = open_directory(directory);

	ring_await_releases();
	if (fd >= 0) {
		/* Without this space the save fails: so all of it goes now. */
		ring_remove_stale(fd, directory, NULL, log);
		close(fd);
	}
	free(directory);
}

bool ring_can_reserve(const char *path, bool in_directory, uint64_t bytes)
{
	char *directory = in_directory ? NULL : directory_of(path);
	const int parent = open_directory(in_directory ? path : directory);
	int fd = -1;
	bool can;

	/* A file without a name: nothing is left of it, whatever happens. */
	if (parent >= 0)
		fd = base_above_streams(
			openat(parent, ".", O_TMPFILE | O_WRONLY | O_CLOEXEC, 0600));
	/* Beyond the process's limit asking would end it. */
	can = fd >= 0 && bytes <= base_largest_file() && !allocate(fd, 0, bytes);
	if (fd >= 0)
		close(fd);
	if (parent >= 0)
		close(parent);
	free(directory);
	return can;
}
