/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Private to the save layer: background saves. The caller's thread and its helpers copy the payload
 * into chunks of staging memory, one record after the other. A thread of the save writes from the
 * chunks. If all chunks can be held at once, writing begins when copying is over, so that the two
 * do not compete for memory bandwidth while training waits. Otherwise chunks are reused: the writer
 * gives back what it has written, and copying goes on with that. A save that borrows stages
 * nothing; its thread reads the caller's memory.
 */
#ifndef SAVE_BACKGROUND_H
#define SAVE_BACKGROUND_H

#include "save/file.h"

/* Chunks that are kept behind the one that is read. Disks have about this much in flight. */
#define SAVE_MOST_LAG 3u

/*
 * The input of a save. It never changes after the save has begun, so all threads read it without a
 * lock.
 */
struct save_request {
	pid_t owner;
	char *path; /* absolute path */
	struct save_plan plan;
	struct save_task task;
	ioshape_progress_fn progress; /* the caller's callback; may be NULL */
	void *progress_user;
	ioshape_queue_fn queue; /* the caller's callback; may be NULL */
	void *queue_user;
	struct save_collective collective;
	pthread_t caller; /* thread that began the save */
	uint64_t begin_ns;
};

/* State shared by the threads that copy and the one that writes. */
struct save_stage {
	/* The context's pool, from which chunks come; never changes. */
	struct save_staging *staging;
	size_t chunk_count; /* number of chunks of the payload; never changes */

	/* The save's lock protects these. */
	struct save_chunk *
		*chunks; /* by position; NULL before it is filled and after it was given back */
	size_t admitted; /* chunks that may be held at a time; shrinks towards the end */
	size_t held;
	size_t next_to_fill;
	bool copying;
	bool written;              /* writing has ended, successfully or not */
	struct base_error failure; /* copying ended early with this error */

	/* Used by the writing thread only. */
	size_t oldest; /* position of the oldest chunk that was not given back */
	size_t position;
	struct save_chunk *reading; /* chunk whose bytes were handed out last; NULL: none */
	struct io_writer *file;     /* file that is written from the chunks; NULL: none */
	struct save_outlet outlet;  /* consumer for which chunks are kept; zeros: none */
	/* Chunks that are kept, so that the consumer always has some in flight. */
	size_t lag;
	/* Outlet's offset at the end of each of the latest chunks, by position. */
	uint64_t ends[SAVE_MOST_LAG + 1];

	_Atomic uint64_t copied_bytes;

	/* State of the copying after the call. */
	bool later;          /* some record is copied after the call; never changes */
	uint64_t next_slice; /* The save's lock protects this and all members below. */
	unsigned copiers;    /* threads that are copying a slice */
	bool making;         /* one thread is getting a chunk */
	bool copied;         /* copying has ended, successfully or not */
	bool hurry;          /* a thread waits for the copying */
};

/* Progress of the save, and its result. The save's lock protects it. */
struct save_state {
	enum ioshape_phase phase; /* never goes back */
	uint64_t done_bytes, total_bytes;
	struct ioshape_place place; /* position in the queue for a slot */
	bool done;
	int result;
	struct ioshape_report report; /* until `done` only the time of staging and planning */
	struct base_error error;
};

struct ioshape_save {
	struct save_request request;

	/* Used by the calls that begin and end the save. */
	struct ioshape_context *context; /* NULL after the context was freed */
	/* In context->background, protected by the context's lock. */
	TAILQ_ENTRY(ioshape_save) entry;
	pthread_t thread;
	bool started; /* the thread was started */
	bool joined;  /* the thread was joined, or never ran */

	atomic_bool abort;
	struct save_order order; /* unused in a collective save, which has an order of its own */
	struct save_compare compare; /* used for the shard of a collective save */

	pthread_mutex_t lock;
	pthread_cond_t change; /* signalled when anything under the lock changes */
	struct save_stage stage;
	struct save_state state;
};

#endif
