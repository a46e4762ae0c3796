/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Inside the ring floor: where a file is to appear, and the temporary file that becomes it; and
 * what files and directories that appear whole have in common.
 */
#ifndef IO_ATOMIC_FILE_H
#define IO_ATOMIC_FILE_H

#include "io/io.h"

#include <limits.h>
#include <sys/stat.h>

/* ---- Temporary names (folder.c) -------------------------------------------------------------- */

#define IO_TEMPORARY_MARK ".ioshape-tmp-"

/* ".model.pt.ioshape-tmp-<lock domain>-<random>", the first part shortened so that it is a legal
 * name. */
void io_temporary_name(int folder_fd, const char *name, char into[NAME_MAX + 1]);

/*
 * Removes temporary files and directories whose writers are dead, as far as the budget reaches.
 * Touches nothing else, and nothing that another process is still writing. Best effort.
 */
void io_remove_stale(int directory_fd, const char *directory, struct base_budget *budget,
		     const struct base_log *log);

/* Of a copy: when it was modified. 0 or a negative errno. */
int io_set_time(int fd, int64_t modified_ns);

/* ---- Atomic files (atomic_file.c) ------------------------------------------------------------ */

struct io_destination {
	/* How it is made: set before it is opened, and borrowed. */
	const struct io_file_options *options;
	const struct io_config *config;
	struct fs_memory *memory;
	struct io_notes *notes;
	bool buffered; /* not for direct I/O, whatever the settings say: it has failed */

	char *path;      /* as given, for messages */
	char *directory; /* of the final file, symbolic links followed */
	char *name;      /* of the final file in it */
	char *temporary; /* name in the same directory; NULL while there is none to remove */
	int directory_fd;
	int fd;      /* what is written to; -1 when closed */
	int lock_fd; /* a second descriptor of the same open file: keeps its lock past close(fd) */
	bool shared; /* other processes write it, too: it stays where it is, whatever happens */
	bool absent; /* nothing was at the path, not even a link */
	bool replaces; /* a file with this mode and owner */
	mode_t old_mode;
	uid_t old_user;
	gid_t old_group;
	bool stream; /* a pipe or device: written straight, nothing to rename */
	bool device; /* a stream whose data can be synced */

	struct fs_info fs;      /* what it lies on */
	struct fs_layout asked; /* stripes; its count is 0 if nothing was asked for */
	bool guessed;           /* that there is nothing to ask for, from the file before */
};

/*
 * Finds out what `path` is and opens what to write to. The temporary file is locked for as long as
 * this process lives: see io_remove_stale(). After a failure, too, it is to be closed.
 */
int io_destination_open(struct io_destination *destination, const char *path,
			struct base_error *error);
/*
 * Sees to it that there is space for it, or at least that it has its length, which is `length`
 * while it is written: -ENOSPC and the like now, and not in the middle of it.
 */
int io_destination_reserve(struct io_destination *destination, uint64_t length,
			   struct base_error *error);
/* Begins anew with another temporary file. A file that other processes write, too, is opened
 * again. */
int io_destination_begin_again(struct io_destination *destination, struct base_error *error);

/* Of a copy: before it is synced, it gets what it has in common with its original. */
int io_destination_resemble(struct io_destination *destination, struct base_error *error);
/* Everything written is on stable storage. */
int io_destination_sync(struct io_destination *destination, struct base_error *error);

/* Closes, puts the file in place of the old one and makes that durable, too. */
int io_destination_commit(struct io_destination *destination, struct base_error *error);

/* After the commit: puts a small file beside it, as io_writer_put_beside() describes. */
int io_destination_put_beside(const struct io_destination *destination, const char *suffix,
			      const void *data, size_t bytes, struct base_error *error);

/* Without a commit, removes the temporary file. */
void io_destination_close(struct io_destination *destination);

#endif
