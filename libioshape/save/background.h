/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Inside the save floor: saves in the background. The caller's thread, helped by others, copies
 * the payload into chunks of staging memory, which hold the records' bytes one after the other; a
 * thread of the save's own writes them from there. If all chunks can be held at once writing begins
 * when copying is over, so that the two do not fight for memory bandwidth while training waits.
 * Otherwise they go round: the writer hands back what it has written, and the copying goes on with
 * that. A save that borrows stages nothing: its thread reads the caller's memory.
 */
#ifndef SAVE_BACKGROUND_H
#define SAVE_BACKGROUND_H

#include "save/file.h"

/* Chunks that are kept behind the one that is read: so much do disks have under way. */
#define SAVE_MOST_LAG 3u

/*
 * What was asked for. Nothing of it changes once the save has begun: all threads read it without a
 * lock.
 */
struct save_request {
	pid_t owner;
	char *path; /* absolute */
	struct save_plan plan;
	struct save_task task;
	ioshape_progress_fn progress; /* the caller's; may be NULL */
	void *progress_user;
	ioshape_queue_fn queue; /* the same */
	void *queue_user;
	struct save_collective collective;
	pthread_t caller; /* the thread that began it */
	uint64_t begin_ns;
};

/* Between the threads that copy and the one that writes. */
struct save_stage {
	struct save_staging *staging; /* the context's: where chunks come from; never changes */
	size_t chunk_count;           /* the same */

	/* Under the save's lock. */
	struct save_chunk *
		*chunks; /* by position; NULL before it is filled and when it has gone back */
	size_t admitted; /* chunks that may be held at a time; shrinks as the last ones go */
	size_t held;
	size_t next_to_fill;
	bool copying;
	bool written;              /* writing has ended, well or not */
	struct base_error failure; /* copying ended early */

	/* The writing thread's. */
	size_t oldest; /* chunks before it have been handed back */
	size_t position;
	struct save_chunk *reading; /* the one whose bytes were handed out last; NULL for none */
	struct io_writer *file;     /* that is written from the chunks; NULL: none is */
	struct save_outlet outlet;  /* what uses the chunks, which are kept for it; or zeros */
	size_t lag;                 /* so many are kept: that it always has some to go on with */
	uint64_t ends[SAVE_MOST_LAG + 1]; /* by position: how far the outlet was at a chunk's end */

	_Atomic uint64_t copied_bytes;

	/* What is copied after the call. */
	bool later;          /* something is; never changes */
	uint64_t next_slice; /* under the save's lock, and so is what follows */
	unsigned copiers;    /* threads that are copying a slice */
	bool making;         /* one of them is getting a chunk */
	bool copied;         /* it is over, well or not */
	bool hurry;          /* somebody waits for it */
};

/* How far the save is, and how it ended. Under the save's lock. */
struct save_state {
	enum ioshape_phase phase; /* only ever later ones */
	uint64_t done_bytes, total_bytes;
	struct ioshape_place place; /* while it waits for a slot */
	bool done;
	int result;
	struct ioshape_report report; /* of staging, until it is done */
	struct base_error error;
};

struct ioshape_save {
	struct save_request request;

	/* Of the calls that begin and end it. */
	struct ioshape_context *context; /* NULL once the context has ended it */
	TAILQ_ENTRY(ioshape_save) entry; /* in context->background, under the context's lock */
	pthread_t thread;
	bool started; /* the thread */
	bool joined;  /* the thread has been waited for, or never ran */

	atomic_bool abort;
	struct save_order order; /* not of a collective save: those have an order of their own */
	struct save_compare compare; /* of a collective save's part */

	pthread_mutex_t lock;
	pthread_cond_t change; /* of anything under the lock */
	struct save_stage stage;
	struct save_state state;
};

#endif
