/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Two engines that call pwrite() and pread(), for kernels and sandboxes without io_uring. "threads"
 * calls them in a few threads. "buffered" calls them inside submit(), which works with any kernel
 * and filesystem.
 */
#define _GNU_SOURCE
#include "io/queue.h"

#include <errno.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#define MAX_THREADS 16

/* ---- Requests -------------------------------------------------------------------------------- */

struct op_queue {
	struct io_op *first;
	struct io_op **end;
};

static void queue_init(struct op_queue *queue)
{
	queue->first = NULL;
	queue->end = &queue->first;
}

static void queue_put(struct op_queue *queue, struct io_op *op)
{
	op->next = NULL;
	*queue->end = op;
	queue->end = &op->next;
}

static struct io_op *queue_get(struct op_queue *queue)
{
	struct io_op *op = queue->first;

	if (op) {
		queue->first = op->next;
		if (!queue->first)
			queue->end = &queue->first;
	}
	return op;
}

static void run(struct io_op *op)
{
	ssize_t moved;

	if (op->range_count)
		moved = pwritev(op->fd, op->ranges, (int)op->range_count, (off_t)op->offset);
	else if (op->kind == IO_WRITE)
		moved = pwrite(op->fd, op->data, op->bytes, (off_t)op->offset);
	else
		moved = pread(op->fd, op->data, op->bytes, (off_t)op->offset);
	op->result = moved < 0 ? -errno : moved;
}

/* ---- The engine "threads" -------------------------------------------------------------------- */

struct pool {
	pthread_mutex_t lock;
	pthread_cond_t work; /* a request is queued, or the pool is closing */
	pthread_cond_t news; /* a request is done */
	struct op_queue todo, done;
	/* Requests not yet returned by wait(); used by the owning thread only. */
	unsigned in_flight;
	bool leaving;
	unsigned threads;
	pthread_t thread[MAX_THREADS];
};

static void *serve(void *argument)
{
	struct pool *pool = argument;
	struct io_op *op;

	pthread_mutex_lock(&pool->lock);
	for (;;) {
		op = queue_get(&pool->todo);
		if (op) {
			pthread_mutex_unlock(&pool->lock);
			run(op);
			pthread_mutex_lock(&pool->lock);
			queue_put(&pool->done, op);
			pthread_cond_signal(&pool->news);
		} else if (pool->leaving) {
			break;
		} else {
			pthread_cond_wait(&pool->work, &pool->lock);
		}
	}
	pthread_mutex_unlock(&pool->lock);
	return NULL;
}

static void threads_close(void *engine)
{
	struct pool *pool = engine;

	pthread_mutex_lock(&pool->lock);
	pool->leaving = true;
	pthread_cond_broadcast(&pool->work);
	pthread_mutex_unlock(&pool->lock);
	for (unsigned i = 0; i < pool->threads; i++)
		pthread_join(pool->thread[i], NULL);
	pthread_cond_destroy(&pool->news);
	pthread_cond_destroy(&pool->work);
	pthread_mutex_destroy(&pool->lock);
	free(pool);
}

static int start_threads(struct pool *pool, unsigned wanted)
{
	int ret = 0;

	while (!ret && pool->threads < wanted) {
		ret = base_start_thread(&pool->thread[pool->threads], serve, pool);
		if (!ret)
			pool->threads++;
	}
	/* Fewer threads than wanted are slower; none is a failure. */
	return pool->threads ? 0 : ret;
}

static int threads_open(void **engine, const struct io_engine_params *params, char *why,
			size_t why_bytes)
{
	struct pool *pool;
	int ret;

	why[0] = 0;
	pool = calloc(1, sizeof(*pool));
	if (!pool) {
		snprintf(why, why_bytes, "no memory");
		return -ENOMEM;
	}
	pthread_mutex_init(&pool->lock, NULL);
	pthread_cond_init(&pool->work, NULL);
	pthread_cond_init(&pool->news, NULL);
	queue_init(&pool->todo);
	queue_init(&pool->done);
	ret = start_threads(pool, MIN(params->depth, MAX_THREADS));
	if (ret) {
		snprintf(why, why_bytes, "no thread could be started: %s", ioshape_strerror(ret));
		threads_close(pool);
		return ret;
	}
	*engine = pool;
	return 0;
}

static int threads_submit(void *engine, struct io_op *op)
{
	struct pool *pool = engine;

	pthread_mutex_lock(&pool->lock);
	queue_put(&pool->todo, op);
	pthread_cond_signal(&pool->work);
	pthread_mutex_unlock(&pool->lock);
	pool->in_flight++;
	return 0;
}

static struct io_op *threads_wait(void *engine)
{
	struct pool *pool = engine;
	struct io_op *op;

	if (!pool->in_flight)
		return NULL;
	pthread_mutex_lock(&pool->lock);
	while (!(op = queue_get(&pool->done)))
		pthread_cond_wait(&pool->news, &pool->lock);
	pthread_mutex_unlock(&pool->lock);
	pool->in_flight--;
	return op;
}

const struct io_engine_ops io_engine_threads = {
	.id = "threads",
	.direct = true,
	.open = threads_open,
	.submit = threads_submit,
	.wait = threads_wait,
	.close = threads_close,
};

/* ---- The engine "buffered" ------------------------------------------------------------------- */

static int buffered_open(void **engine, const struct io_engine_params *params, char *why,
			 size_t why_bytes)
{
	struct op_queue *done = malloc(sizeof(*done));

	(void)params;
	why[0] = 0;
	*engine = done;
	if (done) {
		queue_init(done);
		return 0;
	}
	snprintf(why, why_bytes, "no memory");
	return -ENOMEM;
}

static int buffered_submit(void *engine, struct io_op *op)
{
	run(op);
	queue_put(engine, op);
	return 0;
}

static struct io_op *buffered_wait(void *engine)
{
	return queue_get(engine);
}

static void buffered_close(void *engine)
{
	free(engine);
}

const struct io_engine_ops io_engine_buffered = {
	.id = "buffered",
	.direct = false,
	.open = buffered_open,
	.submit = buffered_submit,
	.wait = buffered_wait,
	.close = buffered_close,
};
