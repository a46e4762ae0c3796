/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Private to the I/O layer: the destination of a file and the temporary file that becomes it. Also
 * what atomic files and atomic directories share: temporary names and their removal.
 */
#ifndef IO_ATOMIC_FILE_H
#define IO_ATOMIC_FILE_H

#include "io/io.h"

#include <limits.h>
#include <sys/stat.h>

/* ---- Temporary names (folder.c) -------------------------------------------------------------- */

#define IO_TEMPORARY_MARK ".ioshape-tmp-"

/*
 * Writes a temporary name for `name`: ".model.pt.ioshape-tmp-<lock domain>-<random>". The first
 * part is shortened if the whole would be too long for a name.
 */
void io_temporary_name(int folder_fd, const char *name, char into[NAME_MAX + 1]);

/* Sets the modification time of a copy. Returns 0 or a negative errno. */
int io_set_time(int fd, int64_t modified_ns);

/* ---- Atomic files (atomic_file.c) ------------------------------------------------------------ */

/* A file that is being created or replaced, with its temporary file. */
struct io_destination {
	/* Options; the caller sets them before the opening. Borrowed. */
	const struct io_file_options *options;
	const struct io_config *config;
	struct fs_memory *memory;
	struct io_downgrades *downgrades;
	/* Direct I/O has failed: use the page cache, whatever the settings say. */
	bool buffered;

	char *path;      /* path as the caller gave it, for messages */
	char *directory; /* directory of the final file, with symbolic links followed */
	char *name;      /* name of the final file in that directory */
	char *temporary; /* temporary name in that directory; NULL: nothing to remove */
	int directory_fd;
	int fd; /* descriptor to write to; -1: closed */
	/* A duplicate of fd, which keeps the lock after close(fd) has reported errors. */
	int lock_fd;
	bool shared; /* other processes also write the file, so it is never removed */
	bool absent; /* the path did not exist, not even as a link */
	/* Replaces an existing file, with this mode and owner. */
	bool replaces;
	mode_t old_mode;
	uid_t old_user;
	gid_t old_group;
	bool stream; /* a pipe or device: written in place, not renamed */
	bool device; /* a block device: a stream that can be synced */

	struct fs_info fs;      /* filesystem of the new file */
	struct fs_layout asked; /* requested stripes; its count is 0 if none were requested */
	/* The last file on this mount suggested that stripes cannot be requested. */
	bool guessed;
};

/*
 * Finds out what `path` is, and opens the temporary file, pipe or device to write to. A temporary
 * file stays locked while this process lives: see io_remove_stale(). The caller must close the
 * destination even if this fails.
 */
int io_destination_open(struct io_destination *destination, const char *path,
			struct base_error *error);
/*
 * Reserves the space of the file, or at least sets its length to `length`, which it keeps while it
 * is written. Returns -ENOSPC and similar errors now instead of in the middle of the save.
 */
int io_destination_reserve(struct io_destination *destination, uint64_t length,
			   struct base_error *error);
/* Starts over with a new temporary file. A file that other processes also write is opened again. */
int io_destination_begin_again(struct io_destination *destination, struct base_error *error);

/*
 * Gives a copy the mode and time of its original; for other files it does nothing. Call it before
 * the sync.
 */
int io_destination_resemble(struct io_destination *destination, struct base_error *error);
/* Syncs what was written. */
int io_destination_sync(struct io_destination *destination, struct base_error *error);

/* Closes the file, renames it over the old one and syncs the directory. */
int io_destination_commit(struct io_destination *destination, struct base_error *error);

/* Writes a small file beside the committed one, as io_writer_put_beside() describes. */
int io_destination_put_beside(const struct io_destination *destination, const char *suffix,
			      const void *data, size_t bytes, struct base_error *error);

/* Closes and frees the destination. Without a commit it removes the temporary file. */
void io_destination_close(struct io_destination *destination);

#endif
