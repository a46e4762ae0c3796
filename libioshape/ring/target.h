/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Inside the ring floor: where a file is to appear, and the temporary file that becomes it.
 */
#ifndef RING_TARGET_H
#define RING_TARGET_H

#include "ring/ring.h"

struct ring_target {
	char *path;      /* as given, for messages */
	char *directory; /* of the final file, symbolic links followed */
	char *name;      /* of the final file in it */
	char *temporary; /* name in the same directory; NULL while there is none to remove */
	int directory_fd;
	int fd;      /* what is written to; -1 when closed */
	int lock_fd; /* a second descriptor of the same open file: keeps its lock past close(fd) */
	bool stream; /* a pipe or device: written straight, nothing to rename */
	bool device; /* a stream whose data can be synced */
};

/*
 * Finds out what `path` is and opens what to write to. The temporary file is locked for as long as
 * this process lives: see ring_remove_stale().
 */
int ring_target_open(struct ring_target *target, const char *path, struct ring_notes *notes,
		     struct base_error *error);

/* Everything written is on stable storage. */
int ring_target_sync(struct ring_target *target, struct base_error *error);

/* Closes, puts the file in place of the old one and makes that durable, too. */
int ring_target_commit(struct ring_target *target, bool no_replace, bool no_sync,
		       struct ring_notes *notes, struct base_error *error);

/* Without a commit, removes the temporary file. Safe on a zeroed struct with descriptors at -1. */
void ring_target_close(struct ring_target *target);

/* ---- Replaced files (release.c) -------------------------------------------------------------- */

/* Closes the descriptor of a file that has been replaced, without waiting for its space. */
void ring_release(int fd);

/* Waits until that space is there; false if nothing was on its way. */
bool ring_await_releases(void);

#define RING_TEMPORARY_MARK ".ioshape-tmp-"

/*
 * Removes temporary files in a directory whose writers are dead. Touches nothing else, and nothing
 * that another process is still writing. Best effort: returns how many it removed.
 */
unsigned ring_remove_stale(int directory_fd, const char *directory, const struct base_log *log);

#endif
