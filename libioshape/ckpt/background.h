/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Inside the ckpt floor: a save in the background. The caller's thread, helped by others, copies
 * the payload into chunks of staging memory, which hold the records' bytes one after the other; a
 * thread of the save's own writes them from there. If all chunks can be held at once writing begins
 * when copying is over, so that the two do not fight for memory bandwidth while training waits.
 * Otherwise they go round: the writer hands back what it has written, and the copying goes on with
 * that. A save that borrows stages nothing: its thread reads the caller's memory.
 */
#ifndef CKPT_BACKGROUND_H
#define CKPT_BACKGROUND_H

#include "ckpt/ckpt.h"

struct ioshape_save {
	pid_t owner;
	struct ioshape_context *context;
	struct ioshape_save *next; /* in context->background, under the context's lock */
	char *path;
	struct ckpt_plan plan;
	struct ring_file_options file_options;
	ioshape_progress_fn progress; /* the caller's; may be NULL */
	void *progress_user;
	ioshape_queue_fn queue; /* the same */
	void *queue_user;
	bool borrow;
	struct ckpt_pool *staging; /* of the context: where its chunks come from */
	struct ckpt_turn turn;     /* not of a group's: those have rounds */
	/* Of a group's: NULL and zeros otherwise. */
	struct ioshape_group *group;
	uint64_t step;
	uint64_t round;
	bool blocks; /* the thread that began it does nothing but wait for it */
	pthread_t caller;
	/* Told when a chunk has been read to its end, before any goes back; it may have to wait. */
	int (*leaving)(void *user, struct base_error *error);
	void *leaving_user;
	size_t lag; /* chunks behind the reader's that are kept nevertheless */
	uint64_t begin_ns;
	bool started; /* the thread */
	bool joined;  /* it has been waited for, or never ran */
	pthread_t thread;
	atomic_bool abort;

	/* Staging. */
	struct ckpt_chunk *
		*chunks; /* by position; NULL before it is filled and after it was written */
	size_t chunk_count;
	size_t admitted;     /* chunks that may be held at a time; shrinks as the last ones go */
	size_t reader_chunk; /* those before it have been handed back */
	size_t read_position;
	struct ckpt_chunk *reading; /* the one whose bytes were handed out last; NULL for none */
	_Atomic uint64_t staged_bytes;

	pthread_mutex_t lock; /* of what follows, and of `chunks` */
	pthread_cond_t change;
	size_t next_to_fill;
	size_t held; /* chunks in our hands */
	bool copying;
	bool failed;              /* copying ended early */
	bool written;             /* writing has ended, well or not */
	bool done;                /* and so has everything else */
	enum ioshape_phase phase; /* only ever later ones */
	uint64_t done_bytes, total_bytes;
	struct ioshape_place place; /* while it waits for a slot */
	int result;
	struct ioshape_report report;
	struct base_error error;
};

/* ---- Staging (stage.c) ----------------------------------------------------------------------- */

/* Copies the payload into chunks; returns early if somebody sets `failed`, or the writer ends. */
void ckpt_stage_copy(struct ioshape_save *save);

/* Tells the progress callback how far copying is. -ECANCELED if it wants to stop. */
int ckpt_stage_tell(void *save, struct base_error *error);

/* A ckpt_source: hands out the staged bytes in order, and hands chunks back that lie behind them.
 */
int ckpt_stage_next(void *user, size_t record, uint64_t offset, const void **data, size_t *bytes,
		    struct base_error *error);

/* Its restart(): if no chunk has been handed back. */
bool ckpt_stage_restart(void *user);

/* Nobody copies or writes any more: what is still held, and the rest of the promise, goes back. */
void ckpt_stage_release(struct ioshape_save *save);

/* ---- Life (background.c) --------------------------------------------------------------------- */

/* What makes a save one of a group's. */
struct ckpt_group_share {
	struct ioshape_group *group;
	uint64_t step;
	uint64_t round;
	bool blocks; /* the caller does nothing but wait for it */
};

/* Begins a save; `share` is NULL, or what makes it one of a group's. */
int ckpt_begin_save(struct ioshape_context *context, const char *path,
		    const struct ckpt_payload *payload, const struct ioshape_save_options *options,
		    const struct ckpt_group_share *share, struct ioshape_save **out,
		    struct base_error *error);

/* An ioshape_progress_fn for all that a save does: notes how far it is, and tells the caller's. */
int ckpt_track(void *save, enum ioshape_phase phase, uint64_t done_bytes, uint64_t total_bytes);

/* Where its bytes are: what it has staged, or what it borrows. direct->scratch is to be freed. */
struct ckpt_source ckpt_source_of(struct ioshape_save *save, struct ckpt_direct *direct);
/* Notes where it stands in the queue for a slot. */
struct ckpt_watch ckpt_watch_of(struct ioshape_save *save);

/* Waits for the save's thread, if it was started. */
void ckpt_join(struct ioshape_save *save);

/* The last of it; it has been joined and is in no list. */
void ckpt_free_save(struct ioshape_save *save);

#endif
