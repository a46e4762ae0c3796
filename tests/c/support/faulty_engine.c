/* SPDX-License-Identifier: Apache-2.0 */
#define _GNU_SOURCE
#include "support/faulty_engine.h"

#include "save/context.h"
#include "support/random.h"
#include "support/sample.h"

#include <check.h>
#include <errno.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#define MOST_IN_FLIGHT 64

struct faulty {
	void *inner;
	uint64_t random;
	/*
	 * Requests that are finished without the inner engine, or that wait to be completed out of
	 * order.
	 */
	struct io_op *ready[MOST_IN_FLIGHT];
	unsigned ready_count;
	unsigned in_inner;
	/* Requests that were shortened for the inner engine, with their full lengths. */
	struct {
		struct io_op *op;
		size_t bytes;
	} cut[MOST_IN_FLIGHT];
	unsigned cut_count;
};

static struct faulty_plan plan;
static struct faulty_counts counts;
/* Several engines may be open at a time, each used by its own thread. */
static pthread_mutex_t counting = PTHREAD_MUTEX_INITIALIZER;

static unsigned long count_one(unsigned long *counter)
{
	unsigned long now;

	pthread_mutex_lock(&counting);
	now = ++*counter;
	pthread_mutex_unlock(&counting);
	return now;
}

static bool happens(struct faulty *faulty, unsigned once_in)
{
	return once_in && !test_random_below(&faulty->random, once_in);
}

static void misused(void)
{
	count_one(&counts.misuse);
}

/* ---- The engine ------------------------------------------------------------------------------ */

static int faulty_open(void **engine, const struct io_engine_params *params, char *why,
		       size_t why_bytes)
{
	struct faulty *faulty;
	int ret;

	if (plan.fail_open) {
		plan.fail_open--;
		snprintf(why, why_bytes, "the faulty engine would not open");
		return -EPERM;
	}
	faulty = calloc(1, sizeof(*faulty));
	if (!faulty) {
		snprintf(why, why_bytes, "no memory");
		return -ENOMEM;
	}
	ret = plan.inner->open(&faulty->inner, params, why, why_bytes);
	if (ret) {
		free(faulty);
		return ret;
	}
	faulty->random = plan.seed + count_one(&counts.opened);
	*engine = faulty;
	return 0;
}

static void finish(struct faulty *faulty, struct io_op *op, int64_t result)
{
	op->result = result;
	faulty->ready[faulty->ready_count++] = op;
}

static const struct timespec moment = { 0, 200000 };

/* Returns the error that this request fails with; 0 if it may go on. */
static int choose_failure(struct faulty *faulty)
{
	int code = 0;

	if (happens(faulty, plan.eio))
		code = -EIO;
	else if (happens(faulty, plan.enospc))
		code = -ENOSPC;
	if (code) {
		count_one(&counts.hard);
		return code;
	}
	if (happens(faulty, plan.interrupted))
		return -EINTR;
	if (happens(faulty, plan.again))
		return -EAGAIN;
	if (happens(faulty, plan.invalid))
		return -EINVAL;
	return 0;
}

/*
 * Returns how many bytes of a request are moved. A write may end anywhere. A read ends early only
 * at a multiple of the unit of direct I/O, as in the kernel.
 */
static size_t choose_length(struct faulty *faulty, const struct io_op *op)
{
	size_t bytes;

	if (!happens(faulty, plan.short_results))
		return op->bytes;
	bytes = test_random_below(&faulty->random, op->bytes + 1);
	if (op->kind == IO_READ)
		bytes = bytes / 4096 * 4096;
	return bytes;
}

static int pass_on(struct faulty *faulty, struct io_op *op)
{
	size_t asked = op->bytes, bytes = choose_length(faulty, op);
	int ret;

	if (bytes != asked)
		count_one(&counts.faults);
	if (!bytes && op->kind == IO_READ)
		bytes = MIN(asked, 4096); /* 0 bytes would mean the end of the file */
	if (!bytes) {
		finish(faulty, op, 0);
		return 0;
	}
	op->bytes = bytes;
	ret = plan.inner->submit(faulty->inner, op);
	if (ret) {
		op->bytes = asked;
		return ret;
	}
	faulty->cut[faulty->cut_count].op = op;
	faulty->cut[faulty->cut_count++].bytes = asked;
	faulty->in_inner++;
	return 0;
}

static int faulty_submit(void *engine, struct io_op *op)
{
	struct faulty *faulty = engine;
	int ret = 0, code;

	count_one(&counts.submitted);
	if (op->fd < 0 || !op->bytes || faulty->in_inner + faulty->ready_count >= MOST_IN_FLIGHT)
		misused();
	if (happens(faulty, plan.delays))
		nanosleep(&moment, NULL);
	if (happens(faulty, plan.not_taken)) {
		count_one(&counts.faults);
		count_one(&counts.hard);
		return -EBUSY;
	}
	code = choose_failure(faulty);
	if (code) {
		count_one(&counts.faults);
		finish(faulty, op, code);
	} else {
		ret = pass_on(faulty, op);
	}
	return ret;
}

static void collect(struct faulty *faulty)
{
	struct io_op *op = plan.inner->wait(faulty->inner);

	if (!op) {
		misused();
		return;
	}
	faulty->in_inner--;
	for (unsigned i = 0; i < faulty->cut_count; i++) {
		if (faulty->cut[i].op != op)
			continue;
		op->bytes = faulty->cut[i].bytes;
		faulty->cut[i] = faulty->cut[--faulty->cut_count];
		break;
	}
	faulty->ready[faulty->ready_count++] = op;
}

static struct io_op *faulty_wait(void *engine)
{
	struct faulty *faulty = engine;
	struct io_op *op;
	unsigned chosen = 0;

	/* A random choice needs all completions. */
	while (faulty->in_inner && (plan.reorder || !faulty->ready_count))
		collect(faulty);
	if (!faulty->ready_count)
		return NULL;
	count_one(&counts.completed);
	if (plan.reorder)
		chosen = (unsigned)test_random_below(&faulty->random, faulty->ready_count);
	op = faulty->ready[chosen];
	faulty->ready_count--;
	memmove(faulty->ready + chosen, faulty->ready + chosen + 1,
		(faulty->ready_count - chosen) * sizeof(faulty->ready[0]));
	if (happens(faulty, plan.delays))
		nanosleep(&moment, NULL);
	return op;
}

static void faulty_close(void *engine)
{
	struct faulty *faulty = engine;

	if (faulty->in_inner || faulty->ready_count)
		misused();
	count_one(&counts.closed);
	plan.inner->close(faulty->inner);
	free(faulty);
}

static struct io_engine_ops faulty_ops = {
	.id = "faulty",
	.direct = true,
	.open = faulty_open,
	.submit = faulty_submit,
	.wait = faulty_wait,
	.close = faulty_close,
};

/* ---- Interface for tests --------------------------------------------------------------------- */

struct ioshape_context *faulty_context(const struct faulty_plan *wanted, enum ioshape_direct direct)
{
	static const struct io_engine_ops *const engines[] = { &faulty_ops, NULL };
	struct ioshape_context *context = sample_context(IOSHAPE_ENGINE_AUTO, direct);

	plan = *wanted;
	memset(&counts, 0, sizeof(counts));
	faulty_ops.direct = plan.inner->direct;
	context->config.engines = engines;
	return context;
}

const struct faulty_counts *faulty_counts(void)
{
	return &counts;
}

uint64_t faulty_seed(uint64_t standard)
{
	const char *text = getenv("IOSHAPE_TEST_SEED");

	return text && *text ? strtoull(text, NULL, 0) : standard;
}
