/* SPDX-License-Identifier: Apache-2.0 */
/*
 * An io_queue on an engine that answers as the test says. The variables belong to the test: each
 * program includes this once.
 */
#ifndef TESTS_SUPPORT_SCRIPTED_QUEUE_H
#define TESTS_SUPPORT_SCRIPTED_QUEUE_H

#include "io/queue.h"
#include "support/scratch.h"

#include <check.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#define DEPTH 4u
#define BLOCK (64 * 1024u)
#define MOST_REQUESTS 4096u

/* ---- The scripted engine --------------------------------------------------------------------- */

/* Returns the result of the nth request (from 0). The function may inspect the request. */
typedef int64_t (*answer_fn)(const struct io_op *op, unsigned nth);

static answer_fn answer;
static struct {
	uint64_t offset;
	size_t bytes;
} asked[MOST_REQUESTS];
static unsigned requests, opened, closed, lost;
static int refuse_submit, refuse_open;
static const char *open_remark = "";
static struct io_op *waiting;

static inline int scripted_open(void **engine, const struct io_engine_params *params, char *why,
				size_t why_bytes)
{
	ck_assert_uint_eq(params->depth, DEPTH);
	ck_assert_uint_eq(params->memory_bytes, DEPTH * BLOCK);
	opened++;
	snprintf(why, why_bytes, "%s", refuse_open ? "scripted refusal" : open_remark);
	*engine = &requests;
	return refuse_open;
}

static inline int scripted_submit(void *engine, struct io_op *op)
{
	struct io_op **end = &waiting;

	(void)engine;
	if (refuse_submit)
		return refuse_submit;
	ck_assert_uint_lt(requests, MOST_REQUESTS);
	asked[requests].offset = op->offset;
	asked[requests].bytes = op->bytes;
	op->result = answer(op, requests++);
	op->next = NULL;
	while (*end)
		end = &(*end)->next;
	*end = op;
	return 0;
}

static inline struct io_op *scripted_wait(void *engine)
{
	struct io_op *op = waiting;

	(void)engine;
	if (lost)
		return NULL;
	if (op)
		waiting = op->next;
	return op;
}

static inline void scripted_close(void *engine)
{
	(void)engine;
	closed++;
}

static struct io_engine_ops scripted = {
	.id = "scripted",
	.direct = true,
	.open = scripted_open,
	.submit = scripted_submit,
	.wait = scripted_wait,
	.close = scripted_close,
};

/* ---- Fixture of each test -------------------------------------------------------------------- */

static const struct io_engine_ops *tried_engines[4];
static struct io_queue *queue;
static struct io_downgrades downgrades;
static struct base_error error;
static struct fs_info fs;
static int fd;

static inline void begin_with(enum ioshape_direct direct, const struct base_log *log)
{
	struct io_config config = { .engines = tried_engines,
				    .direct = direct,
				    .block_bytes = BLOCK,
				    .depth = DEPTH,
				    .threads = 1 };

	if (log)
		config.log = *log;
	tried_engines[0] = &scripted;
	tried_engines[1] = NULL;
	memset(&downgrades, 0, sizeof(downgrades));
	memset(&error, 0, sizeof(error));
	fs = (struct fs_info){ .type = "testfs", .offset_alignment = 512, .memory_alignment = 512 };
	fd = open(scratch_path("file"), O_RDWR | O_CREAT | O_CLOEXEC, 0666);
	ck_assert_int_ge(fd, 0);
	ck_assert_msg(!io_queue_open(&queue, &config, &error), "%s", error.text);
}

static inline void start(bool reading)
{
	ck_assert_int_eq(io_queue_start(queue, &error), 0);
	io_queue_attach(queue, fd, "/the/path", reading, &downgrades);
}

static inline void begin(bool reading)
{
	begin_with(IOSHAPE_DIRECT_PREFER, NULL);
	start(reading);
}

static inline unsigned count_free(void)
{
	unsigned count = 0;

	for (struct io_op *op = queue->free; op; op = op->next)
		count++;
	return count;
}

static inline void end(void)
{
	io_queue_detach(queue);
	/* After every test, each buffer must be free exactly once. */
	ck_assert_uint_eq(count_free(), DEPTH);
	ck_assert_uint_eq(queue->in_flight, 0);
	io_queue_close(queue);
	ck_assert_uint_eq(opened, closed);
	close(fd);
}

static inline struct io_buffer *submit(uint64_t offset, size_t bytes)
{
	struct io_buffer *buffer;

	ck_assert_msg(!io_queue_take(queue, &buffer, &error), "%s", error.text);
	buffer->offset = offset;
	buffer->bytes = bytes;
	ck_assert_msg(!io_queue_submit(queue, buffer, &error), "%s", error.text);
	return buffer;
}

static inline bool is_direct(void)
{
	return fcntl(fd, F_GETFL) & O_DIRECT;
}

static inline int64_t all_of_it(const struct io_op *op, unsigned nth)
{
	(void)nth;
	return (int64_t)op->bytes;
}

#endif
