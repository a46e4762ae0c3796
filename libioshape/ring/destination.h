/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Inside the ring floor: where a file is to appear, and the temporary file that becomes it.
 */
#ifndef RING_TARGET_H
#define RING_TARGET_H

#include "ring/ring.h"

/* How a new file shall lie on storage targets (striping.c). */
struct ring_striping {
	const struct fs_layout_request *request; /* NULL: as it comes */
	uint64_t bytes;                          /* that the file will have; 0 not known */
	uint32_t files;                          /* written at a time; 0 not known */
	uint32_t place, places; /* that part of the storage targets, from 1 on; 0: any */
	/*
	 * The settings allow direct I/O, or require it. FUSE decides when a file is opened whether
	 * it keeps pages of it, and lets direct writes go side by side only if it keeps none.
	 */
	bool direct, direct_required;
	int umask_then; /* 1 + the umask that a new file's mode is by; 0: that of now */
	struct fs_memory *memory;
	const struct base_log *log;
	struct fs_layout asked; /* out; its count is 0 if nothing was asked for */
	bool guessed;           /* that there is nothing to ask for, from the file before */
};

/* Creates it, as open(O_CREAT | O_EXCL) does, but for its stripes. A descriptor or a negative
 * errno. */
int ring_striping_create(struct ring_striping *striping, int directory_fd, const char *directory,
			 const char *name, mode_t mode, struct ring_notes *notes);
/* The file is on another kind of filesystem than the one before: it must be created again. */
bool ring_striping_guessed_wrong(const struct ring_striping *striping, const struct fs_info *file);
/* After file_bytes are in it. */
void ring_striping_report(const struct ring_striping *striping, const struct fs_layout *layout,
			  struct ioshape_report *report);

struct ring_destination {
	char *path;      /* as given, for messages */
	char *directory; /* of the final file, symbolic links followed */
	char *name;      /* of the final file in it */
	char *temporary; /* name in the same directory; NULL while there is none to remove */
	int directory_fd;
	int fd;      /* what is written to; -1 when closed */
	int lock_fd; /* a second descriptor of the same open file: keeps its lock past close(fd) */
	bool unseen; /* nobody reads its directory yet: its temporary name is its name */
	bool shared; /* other processes write it, too: it stays where it is, whatever happens */
	bool absent; /* nothing was at the path, not even a link */
	bool frees_here; /* this host frees the blocks of removed files */
	bool replaces;   /* a file with this mode and owner */
	mode_t old_mode;
	uid_t old_user;
	gid_t old_group;
	bool stream; /* a pipe or device: written straight, nothing to rename */
	bool device; /* a stream whose data can be synced */
};

/*
 * All that is to be known of a file that will be replaced. Neither its length nor its times: where
 * these have just been written, a client would have to ask the server for them.
 */
#define RING_WHAT_IT_IS (STATX_TYPE | STATX_MODE | STATX_UID | STATX_GID)

/*
 * Follows links as open() would, also a last one that leads to nothing yet, and opens the directory
 * of the final file (find.c). 1 if there is a pipe or a device, which has been opened.
 */
int ring_destination_find(struct ring_destination *destination, struct base_error *error);

/*
 * Finds out what `path` is and opens what to write to; `unseen` as in ring_file_options. The
 * temporary file is locked for as long as this process lives: see ring_remove_stale().
 */
int ring_destination_open(struct ring_destination *destination, const char *path, bool unseen,
			  struct ring_striping *striping, struct ring_notes *notes,
			  struct base_error *error);
/* A file that other processes write, too: whoever comes first makes it. */
int ring_destination_open_shared(struct ring_destination *destination, const char *path,
				 struct ring_striping *striping, struct ring_notes *notes,
				 struct base_error *error);
/* Begins anew with another temporary file. A file that other processes write, too, is opened
 * again. */
int ring_destination_begin_again(struct ring_destination *destination,
				 struct ring_striping *striping, struct ring_notes *notes,
				 struct base_error *error);

/* What a file will need (space.c). */
struct ring_reservation {
	uint64_t bytes;       /* expected */
	uint64_t offset;      /* where they begin, if others write what is before and behind */
	uint64_t most_bytes;  /* that this process may write into one file */
	uint64_t block_bytes; /* of a request; 0: the file will have just the expected length */
	const struct fs_info *fs;
	const struct base_log *log;
};

/* Sees to it that there is space for it, or at least that it has its length. -ENOSPC and the like
 * now, and not in the middle of it. */
int ring_destination_reserve(struct ring_destination *destination,
			     const struct ring_reservation *reservation, struct ring_notes *notes,
			     struct base_error *error);
/* From now on it is a file like all others, which takes bytes of any length (striping.c). 0 or a
 * negative errno. */
int ring_leave_direct(int fd);

/* Everything written is on stable storage. */
int ring_destination_sync(struct ring_destination *destination, struct base_error *error);

/* Closes, puts the file in place of the old one and makes that durable, too. */
int ring_destination_commit(struct ring_destination *destination, bool no_replace, bool no_sync,
			    struct ring_notes *notes, struct base_error *error);

/* Names in its directory are on stable storage. 0, or a negative errno without a sentence. */
int ring_destination_sync_directory(struct ring_destination *destination, struct ring_notes *notes);

/* Without a commit, removes the temporary file. Safe on a zeroed struct with descriptors at -1. */
void ring_destination_close(struct ring_destination *destination);

/* ---- Replaced files (release.c) -------------------------------------------------------------- */

/* Closes the descriptor of a file that has been replaced, without waiting for its space. */
void ring_release(int fd);

/* Waits until that space is there; false if nothing was on its way. */
bool ring_await_releases(void);

#define RING_TEMPORARY_MARK ".ioshape-tmp-"

/*
 * Remove temporary files and directories whose writers are dead, as far as the budget reaches.
 * Touches nothing else, and nothing that another process is still writing. Best effort.
 */
void ring_remove_stale(int directory_fd, const char *directory, struct base_budget *budget,
		       const struct base_log *log);

#endif
