/* SPDX-License-Identifier: Apache-2.0 */
/* Inside the save floor: what a context is, and what it keeps from save to save. */
#ifndef SAVE_CONTEXT_H
#define SAVE_CONTEXT_H

#include "save/background/staging.h"
#include "save/save.h"

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

/* What is remembered of a file (file/unchanged.c). */
struct save_seen;

struct save_seen_list {
	TAILQ_HEAD(, save_seen) all; /* the newest first */
	size_t count;
};

struct ioshape_context {
	pid_t owner;     /* the process that opened it */
	uint64_t number; /* unlike the address never used again in this process */
	struct base_log log;
	struct ring_config config;
	bool has_neighbours; /* the job has other ranks on this host */
	enum ioshape_full full;
	enum ioshape_unchanged unchanged;
	struct save_staging pool;
	struct save_staging shared_pool; /* of ranks that hand their bytes to another process */
	struct save_slots slots;

	pthread_mutex_t lock; /* of all below */
	pthread_cond_t saves_change;
	struct ring_lane *lanes[SAVE_KEPT_LANES];
	size_t lane_count;
	char *tidied[SAVE_KEPT_DIRECTORIES];
	size_t tidied_count;
	TAILQ_HEAD(, save_order) orders;       /* saves that have begun, oldest first */
	struct save_seen_list saved, loaded;   /* one of each series */
	TAILQ_HEAD(, save_compare) compared;   /* saves under way whose records are written */
	struct save_shared_slot *shared_slots; /* of open handles */
	TAILQ_HEAD(, ioshape_save) background; /* handles not yet freed: handle.c */
};

int save_take_lane(struct ioshape_context *context, struct ring_lane **lane,
		   struct base_error *error);
void save_return_lane(struct ioshape_context *context, struct ring_lane *lane);

/* Decide whether a save removes what dead processes left in the directory of its absolute path: the
 * first save into a directory does, and further ones as long as something is left. Returns NULL, or
 * `budget`, which save_end_tidying() takes. */
struct base_budget *save_begin_tidying(struct ioshape_context *context, const char *path,
				       struct base_budget *budget);
void save_end_tidying(struct ioshape_context *context, const char *path,
		      const struct base_budget *budget);

/* Of stale bytes (file/unchanged.c): nothing is remembered yet, and at the end of a context. */
void save_seen_init(struct ioshape_context *context);
void save_seen_forget(struct ioshape_context *context);

/* Ends what is in the background, without a trace, and lets go of its handles (handle.c). For the
 * end of a context. */
void save_end_background(struct ioshape_context *context);

#endif
