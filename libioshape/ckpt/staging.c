/* SPDX-License-Identifier: Apache-2.0 */
#include "ckpt/ckpt.h"

#include <errno.h>
#include <stdlib.h>

int ckpt_pool_init(struct ckpt_pool *pool, uint64_t limit_bytes)
{
	*pool = (struct ckpt_pool){ .limit = MAX(1, limit_bytes / CKPT_CHUNK_BYTES) };
	pthread_mutex_init(&pool->lock, NULL);
	base_cond_init(&pool->change);
	return 0;
}

static void free_chunk(struct ckpt_chunk *chunk)
{
	base_unmap(chunk->memory, CKPT_CHUNK_BYTES);
	free(chunk);
}

static struct ckpt_chunk *make_chunk(void)
{
	struct ckpt_chunk *chunk = calloc(1, sizeof(*chunk));

	if (!chunk)
		return NULL;
	chunk->memory = base_map(CKPT_CHUNK_BYTES);
	if (!chunk->memory) {
		free(chunk);
		return NULL;
	}
	/* Freshly mapped memory takes a copy at a tenth of the speed: map it in bulk. */
	base_prefault(chunk->memory, CKPT_CHUNK_BYTES);
	return chunk;
}

/* One more, which pool->made already counts. */
static int make_counted_chunk(struct ckpt_pool *pool, struct ckpt_chunk **chunk,
			      struct base_error *error)
{
	*chunk = make_chunk();
	if (*chunk)
		return 0;
	pthread_mutex_lock(&pool->lock);
	pool->made--;
	pthread_mutex_unlock(&pool->lock);
	return base_no_memory(error, "staging", CKPT_CHUNK_BYTES);
}

void ckpt_pool_destroy(struct ckpt_pool *pool)
{
	ckpt_pool_trim(pool);
	pthread_cond_destroy(&pool->change);
	pthread_mutex_destroy(&pool->lock);
}

/* Who waits for room, first come first. */
struct ckpt_waiter {
	struct ckpt_waiter *next;
};

static void join_queue(struct ckpt_pool *pool, struct ckpt_waiter *waiter)
{
	struct ckpt_waiter **link = &pool->waiters;

	while (*link)
		link = &(*link)->next;
	*link = waiter;
}

static void leave_queue(struct ckpt_pool *pool, const struct ckpt_waiter *waiter)
{
	struct ckpt_waiter **link = &pool->waiters;

	while (*link != waiter)
		link = &(*link)->next;
	*link = waiter->next;
	pthread_cond_broadcast(&pool->change);
}

int ckpt_pool_admit(struct ckpt_pool *pool, size_t chunks, bool refuse,
		    int (*go_on)(void *user, struct base_error *error), void *user,
		    struct base_error *error)
{
	struct ckpt_waiter waiter = { NULL };
	int ret = 0;

	pthread_mutex_lock(&pool->lock);
	if (refuse && (pool->waiters || pool->admitted + chunks > pool->limit)) {
		ret = base_fail(error, -EAGAIN,
				"no staging memory is free (%llu MiB in all, set by "
				"staging_bytes); wait for "
				"an earlier save or allow more",
				(unsigned long long)(pool->limit * CKPT_CHUNK_BYTES / MIB));
		goto out;
	}
	/* A queue: without one small saves would overtake a large one for ever. */
	join_queue(pool, &waiter);
	while (!ret && (pool->waiters != &waiter || pool->admitted + chunks > pool->limit)) {
		if (base_cond_wait_ms(&pool->change, &pool->lock, CKPT_PATIENCE_MS))
			continue;
		pthread_mutex_unlock(&pool->lock);
		ret = go_on(user, error);
		pthread_mutex_lock(&pool->lock);
	}
	leave_queue(pool, &waiter);
	if (!ret)
		pool->admitted += chunks;
out:
	pthread_mutex_unlock(&pool->lock);
	return ret;
}

void ckpt_pool_leave(struct ckpt_pool *pool, size_t chunks)
{
	pthread_mutex_lock(&pool->lock);
	pool->admitted -= chunks;
	pthread_cond_broadcast(&pool->change);
	pthread_mutex_unlock(&pool->lock);
}

int ckpt_pool_get(struct ckpt_pool *pool, struct ckpt_chunk **chunk, struct base_error *error)
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

void ckpt_pool_put(struct ckpt_pool *pool, struct ckpt_chunk *chunk)
{
	pthread_mutex_lock(&pool->lock);
	chunk->next = pool->free;
	pool->free = chunk;
	pthread_mutex_unlock(&pool->lock);
}

int ckpt_pool_reserve(struct ckpt_pool *pool, size_t chunks, struct base_error *error)
{
	struct ckpt_chunk *chunk;
	bool enough;
	int ret;

	if (chunks > pool->limit)
		return base_fail(
			error, -ENOMEM,
			"cannot reserve %llu MiB of staging memory; staging_bytes allows %llu",
			(unsigned long long)(chunks * CKPT_CHUNK_BYTES / MIB),
			(unsigned long long)(pool->limit * CKPT_CHUNK_BYTES / MIB));
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
		ckpt_pool_put(pool, chunk);
	}
}

void ckpt_pool_trim(struct ckpt_pool *pool)
{
	struct ckpt_chunk *chunk, *next;

	pthread_mutex_lock(&pool->lock);
	chunk = pool->free;
	pool->free = NULL;
	for (next = chunk; next; next = next->next)
		pool->made--;
	pthread_mutex_unlock(&pool->lock);
	for (; chunk; chunk = next) {
		next = chunk->next;
		free_chunk(chunk);
	}
}
