/* SPDX-License-Identifier: Apache-2.0 */
/* Inside the save floor: what a context is, what it keeps from save to save, and its pools. */
#ifndef SAVE_CONTEXT_H
#define SAVE_CONTEXT_H

#include "save/save.h"

#include <sys/queue.h>

/* ---- Staging memory (staging.c) -------------------------------------------------------------- */

/*
 * Chunks are made at need and kept. A save is admitted when all the chunks that it will hold at a
 * time can be its own: then it can always go on, whatever other saves wait for. First come, first
 * served.
 *
 * The chunks of a shared pool are ranges of one memfd, which can be passed to another process of
 * this host. A forked child that does not execute anything keeps the fd open, and with it the
 * memory if we die before trimming.
 */
struct save_staging {
	pthread_mutex_t lock;
	pthread_cond_t change;
	bool shared;
	int fd; /* shared: -1 before the first chunk was made */
	uint64_t fd_bytes;
	struct save_chunk *ranges; /* shared: parts of the fd without memory, for chunks to come */
	struct save_chunk *free;
	size_t limit;    /* chunks that may be admitted at a time */
	size_t made;     /* chunks that there are, free or not */
	size_t admitted; /* promised to saves, whether they hold them yet or not */
	TAILQ_HEAD(, save_waiter) waiters;
};

void save_staging_init(struct save_staging *pool, uint64_t limit_bytes, bool shared);
/* Everything has been handed back. */
void save_staging_destroy(struct save_staging *pool);
/* How long a caller waits before its progress callback is asked whether it should. */
#define SAVE_PATIENCE_MS 100

/*
 * Waits for free chunks. `chunks` is at most pool->limit. While it waits, `go_on` is
 * asked now and then; anything but 0 ends the waiting with that code.
 */
int save_staging_admit(struct save_staging *pool, size_t chunks,
		       int (*go_on)(void *user, struct base_error *error), void *user,
		       struct base_error *error);
/* Gives up a promise (or, after the chunk was put back, ends it). */
void save_staging_leave(struct save_staging *pool, size_t chunks);
/* A chunk that was promised. -ENOMEM if there is no memory for it after all. */
int save_staging_get(struct save_staging *pool, struct save_chunk **chunk,
		     struct base_error *error);
void save_staging_put(struct save_staging *pool, struct save_chunk *chunk);
/* Makes and prefaults free chunks until there are so many; frees those that are not used. */
int save_staging_reserve(struct save_staging *pool, size_t chunks, struct base_error *error);
void save_staging_trim(struct save_staging *pool);

/* ---- Pools (slot.c) -------------------------------------------------------------------------- */

/* A context's pools, and what they are opened with. */
struct save_slots {
	char *address, *password, *password_file, *pool_name; /* only the address is never NULL */
	struct slots_config config; /* of all pools, but for their names */
	struct slots_policy policy;
	struct fs_layout_request layout; /* of new files */
	pthread_mutex_t lock;            /* of what follows */
	struct save_pool_use *pools;
	struct save_pool_of_mount *mounts;
};

/* Lanes that are kept for the next save; more than so many at a time come and go. */
#define SAVE_KEPT_LANES 8

/* Directories remembered as tidied of stale temporary files. */
#define SAVE_KEPT_DIRECTORIES 256

/* Series of saves, or of loads, that are remembered: the newest ones. */
#define SAVE_KEPT_SERIES 32u

/* What is remembered of a file (unchanged.c). */
struct save_seen;

struct save_seen_list {
	TAILQ_HEAD(, save_seen) all; /* the newest first */
	size_t count;
};

struct ioshape_context {
	pid_t owner; /* the process that opened it */
	struct base_log log;
	struct io_config config;
	bool has_neighbours; /* the job has other ranks on this host */
	enum ioshape_full full;
	enum ioshape_unchanged unchanged;
	struct save_staging pool;
	struct save_staging shared_pool; /* of ranks that hand their bytes to another process */
	struct save_slots slots;

	pthread_mutex_t lock; /* of all below */
	pthread_cond_t saves_change;
	struct io_lane *lanes[SAVE_KEPT_LANES];
	size_t lane_count;
	char *tidied[SAVE_KEPT_DIRECTORIES];
	size_t tidied_count;
	TAILQ_HEAD(, save_order) orders;       /* saves that have begun, oldest first */
	struct save_seen_list saved, loaded;   /* one of each series */
	TAILQ_HEAD(, save_compare) compared;   /* saves under way whose records are written */
	struct save_hold *holds;               /* slots of open files */
	TAILQ_HEAD(, ioshape_save) background; /* handles not yet freed: save.c */
};

int save_take_lane(struct ioshape_context *context, struct io_lane **lane,
		   struct base_error *error);
void save_return_lane(struct ioshape_context *context, struct io_lane *lane);

/* Forgets what was saved and loaded, at the end of a context (unchanged.c). */
void save_seen_forget(struct ioshape_context *context);

/* Ends what is in the background, without a trace, and lets go of its handles (save.c). For
 * the end of a context. */
void save_end_background(struct ioshape_context *context);

/* ---- Pools of a context (slot.c) ------------------------------------------------------------- */

/* Connects to nothing yet. lease_ms: 0 by default. On failure there is nothing to destroy. */
int save_slots_init(struct save_slots *slots, const struct ioshape_context_options *options,
		    uint32_t lease_ms, const struct base_log *log, struct base_error *error);
/* All slots have been released. */
void save_slots_destroy(struct save_slots *slots);

/* ---- Pools ----------------------------------------------------------------------------------- */

/* The same where targets are not known. */
uint32_t save_slots_usual(const struct save_slots *slots, enum fs_family family);

/* A file on that mount that asked for nothing has this layout: where directories do not tell. */
void save_slots_note_layout(struct save_slots *slots, uint64_t mount,
			    const struct fs_layout *layout);

#endif
