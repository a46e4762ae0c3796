/* SPDX-License-Identifier: Apache-2.0 */
/* Private to the save layer: contexts, the memory and pools that they keep from save to save. */
#ifndef SAVE_CONTEXT_H
#define SAVE_CONTEXT_H

#include "save/save.h"

#include <sys/queue.h>

/* ---- Staging memory (staging.c) -------------------------------------------------------------- */

/*
 * A pool of staging memory. Chunks are made at need and kept. A save is admitted when it can own
 * all chunks that it will hold at a time. So it can always finish, whatever other saves wait for.
 * Saves are admitted in the order in which they ask.
 *
 * The chunks of a shared pool are ranges of one memfd, which can be passed to another process of
 * this host. A forked child that does not execute another program keeps the fd open. If this
 * process dies before it trims the pool, the child keeps the memory, too.
 */
struct save_staging {
	pthread_mutex_t lock;
	pthread_cond_t change;
	bool shared;
	int fd; /* shared: the memfd; -1 before the first chunk is made */
	uint64_t fd_bytes;
	/* Shared: ranges of the memfd without memory, for later chunks. */
	struct save_chunk *ranges;
	struct save_chunk *free;
	size_t limit;    /* chunks that may be admitted at a time */
	size_t made;     /* existing chunks, free or in use */
	size_t admitted; /* chunks promised to saves, held or not */
	TAILQ_HEAD(, save_waiter) waiters;
};

/* Begins an empty pool of at most limit_bytes, but at least one chunk. */
void save_staging_init(struct save_staging *pool, uint64_t limit_bytes, bool shared);
/* Frees a pool to which all chunks have been given back. */
void save_staging_destroy(struct save_staging *pool);
/* A caller that waits is asked this often, by its progress callback, whether to go on. */
#define SAVE_POLL_MS 100

/*
 * Waits until `chunks` chunks can be promised; they must not exceed pool->limit. Calls `go_on` now
 * and then; if that returns anything but 0, the wait ends with its code.
 */
int save_staging_admit(struct save_staging *pool, size_t chunks,
		       int (*go_on)(void *user, struct base_error *error), void *user,
		       struct base_error *error);
/* Ends the promise of some chunks, which were put back or never taken. */
void save_staging_leave(struct save_staging *pool, size_t chunks);
/* Makes and prefaults chunks until `chunks` exist. save_staging_trim() frees unused ones. */
int save_staging_reserve(struct save_staging *pool, size_t chunks, struct base_error *error);
void save_staging_trim(struct save_staging *pool);

/* ---- Pools (slot.c) -------------------------------------------------------------------------- */

/* The pools of a context, and the configuration with which they are opened. */
struct save_slots {
	char *address, *password, *password_file, *pool_name; /* only the address is never NULL */
	struct slots_config config; /* configuration of all pools, without their names */
	struct slots_policy policy;
	struct fs_layout_request layout; /* requested layout of new files */
	pthread_mutex_t lock;            /* protects all members below */
	struct save_pool_use *pools;
	struct save_pool_of_mount *mounts;
};

/* Queues (an engine and its buffers) that are kept for later saves. Queues beyond that are closed
 * after use. */
#define SAVE_KEPT_QUEUES 8

/* Remembered directories whose stale temporary files were removed. */
#define SAVE_KEPT_DIRECTORIES 256

/* Checkpoint families that are remembered for saves, and as many for loads: the newest ones. */
#define SAVE_KEPT_FAMILIES 32u

/* Rules that judge a save (examine.c). The bits of enum ioshape_alarm have the same order. */
enum save_rule { SAVE_NONFINITE, SAVE_UNCHANGED, SAVE_CONSTANT, SAVE_JUMP, SAVE_RULES };
enum save_action { SAVE_WARN, SAVE_FAIL, SAVE_OFF };

/* Takes the setting `examine`, which may be NULL. -EINVAL: it is not valid. */
int save_examine_parse(uint8_t chosen[SAVE_RULES], const char *text, struct base_error *error);

/* The facts that are remembered of a file (examine.c). */
struct save_seen;

struct save_seen_list {
	TAILQ_HEAD(, save_seen) all; /* newest first */
	size_t count;
};

struct ioshape_context {
	pid_t owner; /* process that opened the context */
	struct base_log log;
	struct io_config config;
	bool has_neighbours; /* the job has other ranks on this host */
	enum ioshape_full full;
	uint8_t examine[SAVE_RULES]; /* an enum save_action for each rule */
	bool examines;               /* not all rules are off */
	struct save_staging pool;
	struct save_staging shared_pool; /* for ranks whose bytes another process writes */
	struct save_slots slots;

	pthread_mutex_t lock; /* protects all members below */
	pthread_cond_t saves_change;
	struct io_queue *queues[SAVE_KEPT_QUEUES];
	size_t queue_count;
	uint64_t tidied[SAVE_KEPT_DIRECTORIES]; /* hashes of their paths */
	size_t tidied_count;
	TAILQ_HEAD(, save_order) orders;       /* saves under way, oldest first */
	struct save_seen_list saved, loaded;   /* newest file of each checkpoint family */
	uint64_t seen_count;                   /* files remembered so far */
	TAILQ_HEAD(, save_compare) compared;   /* saves under way whose records were compared */
	struct save_hold *holds;               /* slots of open files */
	TAILQ_HEAD(, ioshape_save) background; /* handles that are not freed yet (save.c) */
};

/* Takes a kept queue, or opens a new one. */
int save_take_queue(struct ioshape_context *context, struct io_queue **queue,
		    struct base_error *error);
/* Keeps the queue for later, or closes it. NULL is allowed. */
void save_return_queue(struct ioshape_context *context, struct io_queue *queue);

/* Forgets all saved and loaded files, when a context is freed (examine.c). */
void save_seen_forget(struct ioshape_context *context);

/* Stops all background saves and detaches their handles, when a context is freed (save.c). */
void save_end_background(struct ioshape_context *context);

/* ---- Setting up slots (slot.c) --------------------------------------------------------------- */

/* Checks the options and prepares the pools; does not connect yet. lease_ms is 0 for the default.
 * On failure there is nothing to destroy. */
int save_slots_init(struct save_slots *slots, const struct ioshape_context_options *options,
		    uint32_t lease_ms, const struct base_log *log, struct base_error *error);
/* Closes all pools. All their slots must have been released. */
void save_slots_destroy(struct save_slots *slots);

/* ---- Capacity and layouts (slot.c) ----------------------------------------------------------- */

/* Returns the default capacity for a filesystem whose storage targets are unknown. */
uint32_t save_slots_usual(const struct save_slots *slots, enum fs_family family);

/* Records the layout that a file on a mount got without asking for one. Used where directories do
 * not report their layout. */
void save_slots_record_layout(struct save_slots *slots, uint64_t mount,
			      const struct fs_layout *layout);

#endif
