/* SPDX-License-Identifier: Apache-2.0 */
#include "ckpt/ckpt.h"

#include <errno.h>
#include <stdlib.h>
#include <unistd.h>

void ckpt_pool_init(struct ckpt_pool *pool, uint64_t limit_bytes, bool shared)
{
	*pool = (struct ckpt_pool){
		.limit = MAX(1, limit_bytes / CKPT_CHUNK_BYTES),
		.shared = shared,
		.fd = -1,
	};
	pthread_mutex_init(&pool->lock, NULL);
	base_cond_init(&pool->change);
}

/* ---- Shared chunks --------------------------------------------------------------------------- */

static int fail_shared(struct base_error *error, int code)
{
	switch (code) {
	case -EMFILE:
	case -ENFILE:
		return base_fail(error, code,
				 "cannot make shared memory to stage in: no file descriptor is "
				 "free; raise ulimit -n");
	case -EFBIG:
		return base_fail(error, code,
				 "cannot make shared memory to stage in larger than the limit of "
				 "file sizes; raise ulimit -f");
	case -ENOMEM:
		return base_fail(error, code,
				 "there are no %llu MiB of shared memory left to stage in; allow "
				 "the container more memory, or lower staging_bytes",
				 (unsigned long long)(CKPT_CHUNK_BYTES / MIB));
	default:
		return base_fail(error, code,
				 "cannot make shared memory (memfd_create) to stage in; allow it, "
				 "or use mode \"each\"");
	}
}

/* Under the lock. */
static int need_fd(struct ckpt_pool *pool)
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

int ckpt_pool_share(struct ckpt_pool *pool, int *fd, struct base_error *error)
{
	int ret;

	pthread_mutex_lock(&pool->lock);
	ret = need_fd(pool);
	*fd = pool->fd;
	pthread_mutex_unlock(&pool->lock);
	return ret ? fail_shared(error, ret) : 0;
}

/* A part of the fd that nobody uses; longer at need. Under the lock. */
static int take_range(struct ckpt_pool *pool, struct ckpt_chunk *chunk)
{
	struct ckpt_chunk *range = pool->ranges;
	int ret = need_fd(pool);

	if (ret)
		return ret;
	if (range) {
		pool->ranges = range->next;
		chunk->offset = range->offset;
		free(range);
		return 0;
	}
	ret = base_shared_grow(pool->fd, pool->fd_bytes + CKPT_CHUNK_BYTES);
	if (ret)
		return ret;
	chunk->offset = pool->fd_bytes;
	pool->fd_bytes += CKPT_CHUNK_BYTES;
	return 0;
}

static void keep_range(struct ckpt_pool *pool, struct ckpt_chunk *chunk)
{
	pthread_mutex_lock(&pool->lock);
	chunk->next = pool->ranges;
	pool->ranges = chunk;
	pthread_mutex_unlock(&pool->lock);
}

static int map_shared(struct ckpt_pool *pool, struct ckpt_chunk **chunk, struct base_error *error)
{
	void *memory;
	int ret;

	pthread_mutex_lock(&pool->lock);
	ret = take_range(pool, *chunk);
	pthread_mutex_unlock(&pool->lock);
	if (ret)
		return fail_shared(error, ret);
	ret = base_shared_map(pool->fd, (*chunk)->offset, CKPT_CHUNK_BYTES, &memory);
	if (ret) {
		keep_range(pool, *chunk);
		*chunk = NULL;
		return fail_shared(error, ret);
	}
	(*chunk)->memory = memory;
	return 0;
}

/* ---- Chunks ---------------------------------------------------------------------------------- */

static void free_chunk(struct ckpt_pool *pool, struct ckpt_chunk *chunk)
{
	base_unmap(chunk->memory, CKPT_CHUNK_BYTES);
	chunk->memory = NULL;
	if (!pool->shared) {
		free(chunk);
		return;
	}
	base_shared_drop(pool->fd, chunk->offset, CKPT_CHUNK_BYTES);
	keep_range(pool, chunk);
}

static int make_chunk(struct ckpt_pool *pool, struct ckpt_chunk **out, struct base_error *error)
{
	struct ckpt_chunk *chunk = calloc(1, sizeof(*chunk));
	int ret = 0;

	if (!chunk)
		return base_no_memory(error, "staging", sizeof(*chunk));
	if (pool->shared) {
		ret = map_shared(pool, &chunk, error);
	} else {
		chunk->memory = base_map(CKPT_CHUNK_BYTES);
		if (!chunk->memory)
			ret = base_no_memory(error, "staging", CKPT_CHUNK_BYTES);
	}
	if (ret) {
		free(chunk);
		return ret;
	}
	/* Freshly mapped memory takes a copy at a tenth of the speed: map it in bulk. */
	if (!pool->shared)
		base_prefault(chunk->memory, CKPT_CHUNK_BYTES);
	*out = chunk;
	return 0;
}

/* One more, which pool->made already counts. */
static int make_counted_chunk(struct ckpt_pool *pool, struct ckpt_chunk **chunk,
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

void ckpt_pool_destroy(struct ckpt_pool *pool)
{
	struct ckpt_chunk *range, *next;

	ckpt_pool_trim(pool);
	for (range = pool->ranges; range; range = next) {
		next = range->next;
		free(range);
	}
	if (pool->fd >= 0)
		close(pool->fd);
	pthread_cond_destroy(&pool->change);
	pthread_mutex_destroy(&pool->lock);
}

/* ---- Admission ------------------------------------------------------------------------------- */

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
		free_chunk(pool, chunk);
	}
}
