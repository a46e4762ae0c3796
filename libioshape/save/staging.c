/* SPDX-License-Identifier: Apache-2.0 */
/* Staging memory: chunks, and their promises to saves in the order in which these ask. context.h
 * has the rules. */
#include "save/context.h"

#include <errno.h>
#include <stdlib.h>

/* ---- The pool -------------------------------------------------------------------------------- */

void save_staging_init(struct save_staging *pool, uint64_t limit_bytes, bool shared)
{
	*pool = (struct save_staging){
		.limit = MAX(1, limit_bytes / SAVE_CHUNK_BYTES),
		.shared = shared,
		.fd = -1,
	};
	TAILQ_INIT(&pool->waiters);
	pthread_mutex_init(&pool->lock, NULL);
	base_cond_init(&pool->change);
}

/* ---- Shared chunks --------------------------------------------------------------------------- */

static int fail_shared(struct base_error *error, int code)
{
	return base_fail_with(error, code,
			      "raise ulimit -n, ulimit -f and the container's memory, allow "
			      "memfd_create, or use mode \"each\"",
			      "cannot create shared memory for staging (memfd_create)");
}

/* Makes the memfd if there is none. The caller holds the lock. */
static int need_fd(struct save_staging *pool)
{
	int fd;

	if (pool->fd >= 0)
		return 0;
	fd = base_shared_open();
	if (fd < 0)
		return fd;
	pool->fd = fd;
	return 0;
}

/* Takes an unused range of the memfd, which grows at need. The caller holds the lock. */
static int take_range(struct save_staging *pool, struct save_chunk *chunk)
{
	struct save_chunk *range = pool->ranges;
	int ret = need_fd(pool);

	if (ret)
		return ret;
	if (range) {
		pool->ranges = range->next;
		chunk->offset = range->offset;
		free(range);
		return 0;
	}
	ret = base_shared_grow(pool->fd, pool->fd_bytes + SAVE_CHUNK_BYTES);
	if (ret)
		return ret;
	chunk->offset = pool->fd_bytes;
	pool->fd_bytes += SAVE_CHUNK_BYTES;
	return 0;
}

static void keep_range(struct save_staging *pool, struct save_chunk *chunk)
{
	pthread_mutex_lock(&pool->lock);
	chunk->next = pool->ranges;
	pool->ranges = chunk;
	pthread_mutex_unlock(&pool->lock);
}

static int map_shared(struct save_staging *pool, struct save_chunk **chunk,
		      struct base_error *error)
{
	void *memory;
	int ret;

	pthread_mutex_lock(&pool->lock);
	ret = take_range(pool, *chunk);
	pthread_mutex_unlock(&pool->lock);
	if (ret)
		return fail_shared(error, ret);
	ret = base_shared_map(pool->fd, (*chunk)->offset, SAVE_CHUNK_BYTES, &memory);
	if (ret) {
		keep_range(pool, *chunk);
		*chunk = NULL;
		return fail_shared(error, ret);
	}
	(*chunk)->memory = memory;
	return 0;
}

/* ---- Chunks ---------------------------------------------------------------------------------- */

static void free_chunk(struct save_staging *pool, struct save_chunk *chunk)
{
	base_unmap(chunk->memory, SAVE_CHUNK_BYTES);
	chunk->memory = NULL;
	if (!pool->shared) {
		free(chunk);
		return;
	}
	base_shared_drop(pool->fd, chunk->offset, SAVE_CHUNK_BYTES);
	keep_range(pool, chunk);
}

static int make_chunk(struct save_staging *pool, struct save_chunk **out, struct base_error *error)
{
	struct save_chunk *chunk = calloc(1, sizeof(*chunk));
	int ret = 0;

	if (!chunk)
		return base_no_memory(error, "staging", sizeof(*chunk));
	if (pool->shared) {
		ret = map_shared(pool, &chunk, error);
	} else {
		chunk->memory = base_map(SAVE_CHUNK_BYTES);
		if (!chunk->memory)
			ret = base_no_memory(error, "staging", SAVE_CHUNK_BYTES);
	}
	if (ret) {
		free(chunk);
		return ret;
	}
	/* Touching new memory takes longer than the copy, and several threads can make chunks at
	 * once. */
	if (!pool->shared)
		base_prefault(chunk->memory, SAVE_CHUNK_BYTES);
	*out = chunk;
	return 0;
}

/* Makes a chunk that pool->made counts already, and corrects the count on failure. */
static int make_counted_chunk(struct save_staging *pool, struct save_chunk **chunk,
			      struct base_error *error)
{
	int ret = make_chunk(pool, chunk, error);

	if (!ret)
		return 0;
	pthread_mutex_lock(&pool->lock);
	pool->made--;
	pthread_mutex_unlock(&pool->lock);
	return ret;
}

void save_staging_destroy(struct save_staging *pool)
{
	struct save_chunk *range, *next;

	save_staging_trim(pool);
	for (range = pool->ranges; range; range = next) {
		next = range->next;
		free(range);
	}
	if (pool->fd >= 0)
		base_close(pool->fd);
	pthread_cond_destroy(&pool->change);
	pthread_mutex_destroy(&pool->lock);
}

/* ---- Admission ------------------------------------------------------------------------------- */

/* A save that waits for staging memory, in the order in which saves asked. */
struct save_waiter {
	TAILQ_ENTRY(save_waiter) entry;
};

int save_staging_admit(struct save_staging *pool, size_t chunks,
		       int (*go_on)(void *user, struct base_error *error), void *user,
		       struct base_error *error)
{
	struct save_waiter waiter;
	int ret = 0;

	pthread_mutex_lock(&pool->lock);
	/* Without a queue, small saves could overtake a large one for ever. */
	TAILQ_INSERT_TAIL(&pool->waiters, &waiter, entry);
	while (!ret &&
	       (TAILQ_FIRST(&pool->waiters) != &waiter || pool->admitted + chunks > pool->limit)) {
		if (base_cond_wait_ms(&pool->change, &pool->lock, SAVE_POLL_MS))
			continue;
		pthread_mutex_unlock(&pool->lock);
		ret = go_on(user, error);
		pthread_mutex_lock(&pool->lock);
	}
	TAILQ_REMOVE(&pool->waiters, &waiter, entry);
	pthread_cond_broadcast(&pool->change);
	if (!ret)
		pool->admitted += chunks;
	pthread_mutex_unlock(&pool->lock);
	return ret;
}

void save_staging_leave(struct save_staging *pool, size_t chunks)
{
	pthread_mutex_lock(&pool->lock);
	pool->admitted -= chunks;
	pthread_cond_broadcast(&pool->change);
	pthread_mutex_unlock(&pool->lock);
}

int save_staging_get(struct save_staging *pool, struct save_chunk **chunk, struct base_error *error)
{
	pthread_mutex_lock(&pool->lock);
	*chunk = pool->free;
	if (*chunk)
		pool->free = (*chunk)->next;
	else
		pool->made++;
	pthread_mutex_unlock(&pool->lock);
	return *chunk ? 0 : make_counted_chunk(pool, chunk, error);
}

void save_staging_put(struct save_staging *pool, struct save_chunk *chunk)
{
	pthread_mutex_lock(&pool->lock);
	chunk->next = pool->free;
	pool->free = chunk;
	pthread_mutex_unlock(&pool->lock);
}

int save_staging_reserve(struct save_staging *pool, size_t chunks, struct base_error *error)
{
	struct save_chunk *chunk;
	bool enough;
	int ret;

	if (chunks > pool->limit) {
		ret = base_fail_reason_with(
			error, -ENOMEM,
			BASE_WORDS("raise staging_bytes, which allows %llu MiB",
				   (unsigned long long)(pool->limit * SAVE_CHUNK_BYTES / MIB)),
			"cannot reserve %llu MiB of staging memory",
			(unsigned long long)(chunks * SAVE_CHUNK_BYTES / MIB));
		base_error_space(error, chunks * SAVE_CHUNK_BYTES, pool->limit * SAVE_CHUNK_BYTES);
		return ret;
	}
	for (;;) {
		pthread_mutex_lock(&pool->lock);
		enough = pool->made >= chunks;
		pool->made += !enough;
		pthread_mutex_unlock(&pool->lock);
		if (enough)
			return 0;
		ret = make_counted_chunk(pool, &chunk, error);
		if (ret)
			return ret;
		save_staging_put(pool, chunk);
	}
}

void save_staging_trim(struct save_staging *pool)
{
	struct save_chunk *chunk, *next;

	pthread_mutex_lock(&pool->lock);
	chunk = pool->free;
	pool->free = NULL;
	for (next = chunk; next; next = next->next)
		pool->made--;
	pthread_mutex_unlock(&pool->lock);
	for (; chunk; chunk = next) {
		next = chunk->next;
		free_chunk(pool, chunk);
	}
}

/* ---- Chunks for another process that writes -------------------------------------------------- */

int save_shared_fd(struct ioshape_context *context, int *fd, struct base_error *error)
{
	struct save_staging *pool = &context->shared_pool;
	int ret;

	pthread_mutex_lock(&pool->lock);
	ret = need_fd(pool);
	*fd = pool->fd;
	pthread_mutex_unlock(&pool->lock);
	return ret ? fail_shared(error, ret) : 0;
}

struct save_staging *save_shared_pool(struct ioshape_context *context)
{
	return &context->shared_pool;
}
