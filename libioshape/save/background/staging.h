/* SPDX-License-Identifier: Apache-2.0 */
/* Inside the save floor: memory that saves in the background copy tensors into. */
#ifndef SAVE_STAGING_H
#define SAVE_STAGING_H

#include "save/save.h"

#include <sys/queue.h>

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

#endif
