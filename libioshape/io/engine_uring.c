/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Two engines on io_uring. The queue's buffers are one registered buffer if the kernel permits.
 *
 * "uring" lets the kernel try each request in the submitting thread. If a filesystem serves
 * requests right there (FUSE without asynchronous direct I/O), they run one after the other.
 * "uring-async" has the kernel's workers serve them from the start (IOSQE_ASYNC), with as many
 * workers as requests.
 */
#define _GNU_SOURCE
#include "io/queue.h"

#include <errno.h>
#include <liburing.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

/* The kernel's limit for a registered buffer. */
#define MAX_REGISTERED_BYTES (1 * GIB)

struct uring {
	struct io_uring ring;
	uint8_t *memory; /* registered as buffer 0; NULL: not registered */
	size_t memory_bytes;
	bool async; /* the kernel's workers serve every request */
	unsigned in_flight;
	/* Requests in the submission queue that the kernel has not taken yet, oldest first. */
	struct io_op *untaken, **untaken_end;
	unsigned untaken_count;
	/*
	 * The error with which the kernel stopped taking submissions, such as -EPERM by a seccomp
	 * filter that was installed later; 0 while it takes them. After it, nothing is submitted.
	 * Untaken requests complete with this code, and submit() returns it.
	 */
	int broken;
};

static bool worth_retrying(int ret)
{
	return ret == -EINTR || ret == -EAGAIN || ret == -EBUSY;
}

/*
 * Creates the ring. The queue looks at completions only when it waits, so the kernel need not
 * interrupt it for them (COOP_TASKRUN, Linux 5.19). SINGLE_ISSUER and DEFER_TASKRUN would bind the
 * ring to one thread, but a kept ring serves the threads of later saves. With a few large requests
 * in flight, they gain nothing measurable.
 */
static int set_up(struct uring *uring, unsigned depth)
{
	static const unsigned flags[] = { IORING_SETUP_COOP_TASKRUN, 0 };
	int ret = -EINVAL;

	for (size_t i = 0; ret == -EINVAL && i < ARRAY_LENGTH(flags); i++)
		ret = io_uring_queue_init(depth, &uring->ring, flags[i]);
	if (ret)
		return ret;
	uring->ring.ring_fd = uring->ring.enter_ring_fd = base_register_fd(uring->ring.ring_fd);
	if (uring->ring.ring_fd >= 0)
		return 0;
	ret = -errno;
	io_uring_queue_exit(&uring->ring);
	return ret;
}

static void tear_down(struct uring *uring)
{
	base_unregister_fd(uring->ring.ring_fd);
	io_uring_queue_exit(&uring->ring);
}

/*
 * Sends a no-op through the ring. A sandbox may allow creating a ring and forbid entering it; only
 * a round trip shows that.
 */
static int round_trip(struct uring *uring)
{
	struct io_uring_sqe *sqe = io_uring_get_sqe(&uring->ring);
	struct io_uring_cqe *cqe;
	int ret;

	io_uring_prep_nop(sqe);
	do {
		ret = io_uring_submit_and_wait(&uring->ring, 1);
	} while (worth_retrying(ret));
	if (ret < 0)
		return ret;
	ret = io_uring_peek_cqe(&uring->ring, &cqe);
	if (ret)
		return ret;
	io_uring_cqe_seen(&uring->ring, cqe);
	return 0;
}

static const char *remedy_for(int code)
{
	switch (code) {
	case -EPERM:
	case -EACCES:
		return " (a seccomp profile or kernel.io_uring_disabled forbids it)";
	case -ENOSYS:
		return " (the kernel is older than 5.1 or built without it)";
	case -ENOMEM:
		return " (RLIMIT_MEMLOCK is too low)";
	default:
		return "";
	}
}

static void register_memory(struct uring *uring, const struct io_engine_params *params, char *why,
			    size_t why_bytes)
{
	struct iovec memory = { params->memory, params->memory_bytes };
	int ret = -ENOTSUP;

	if (params->memory && params->memory_bytes <= MAX_REGISTERED_BYTES)
		ret = io_uring_register_buffers(&uring->ring, &memory, 1);
	if (!ret) {
		uring->memory = params->memory;
		uring->memory_bytes = params->memory_bytes;
	} else if (params->memory) {
		snprintf(why, why_bytes, "the buffers were not registered: %s%s",
			 ioshape_strerror(ret), remedy_for(ret));
	}
}

/*
 * Limits the kernel's workers to the depth; by default the kernel starts up to four for each core.
 * The limit belongs to the ring, whichever thread enters it. Kernels before 5.15 refuse, and keep
 * their default.
 */
static void bound_workers(struct uring *uring, unsigned depth)
{
	unsigned most[2] = { depth, depth }; /* bounded work (files); unbounded work */

	io_uring_register_iowq_max_workers(&uring->ring, most);
}

static int open_ring(void **engine, const struct io_engine_params *params, bool async, char *why,
		     size_t why_bytes)
{
	struct uring *uring;
	int ret;

	why[0] = 0;
	uring = calloc(1, sizeof(*uring));
	if (!uring) {
		snprintf(why, why_bytes, "no memory");
		return -ENOMEM;
	}
	uring->untaken_end = &uring->untaken;
	ret = set_up(uring, params->depth);
	if (ret) {
		snprintf(why, why_bytes, "io_uring could not be set up: %s%s",
			 ioshape_strerror(ret), remedy_for(ret));
		free(uring);
		return ret;
	}
	io_uring_ring_dontfork(&uring->ring);
	ret = round_trip(uring);
	if (ret) {
		snprintf(why, why_bytes, "io_uring could not run a request: %s%s",
			 ioshape_strerror(ret), remedy_for(ret));
		tear_down(uring);
		free(uring);
		return ret;
	}
	register_memory(uring, params, why, why_bytes);
	uring->async = async;
	if (async)
		bound_workers(uring, params->depth);
	*engine = uring;
	return 0;
}

static int uring_open(void **engine, const struct io_engine_params *params, char *why,
		      size_t why_bytes)
{
	return open_ring(engine, params, false, why, why_bytes);
}

static int uring_async_open(void **engine, const struct io_engine_params *params, char *why,
			    size_t why_bytes)
{
	return open_ring(engine, params, true, why, why_bytes);
}

static bool in_memory(const struct uring *uring, const struct io_op *op)
{
	const uint8_t *data = op->data;

	return uring->memory && data >= uring->memory &&
	       data + op->bytes <= uring->memory + uring->memory_bytes;
}

static void prepare(struct uring *uring, struct io_uring_sqe *sqe, struct io_op *op)
{
	const int fd = op->fd;
	unsigned bytes = (unsigned)op->bytes;

	if (op->range_count) {
		io_uring_prep_writev(sqe, fd, op->ranges, op->range_count, op->offset);
	} else if (in_memory(uring, op)) {
		if (op->kind == IO_WRITE)
			io_uring_prep_write_fixed(sqe, fd, op->data, bytes, op->offset, 0);
		else
			io_uring_prep_read_fixed(sqe, fd, op->data, bytes, op->offset, 0);
	} else if (op->kind == IO_WRITE) {
		io_uring_prep_write(sqe, fd, op->data, bytes, op->offset);
	} else {
		io_uring_prep_read(sqe, fd, op->data, bytes, op->offset);
	}
	if (uring->async)
		sqe->flags |= IOSQE_ASYNC;
	io_uring_sqe_set_data(sqe, op);
}

static void put_untaken(struct uring *uring, struct io_op *op)
{
	op->next = NULL;
	*uring->untaken_end = op;
	uring->untaken_end = &op->next;
	uring->untaken_count++;
}

static struct io_op *get_untaken(struct uring *uring)
{
	struct io_op *op = uring->untaken;

	uring->untaken = op->next;
	if (!uring->untaken)
		uring->untaken_end = &uring->untaken;
	uring->untaken_count--;
	return op;
}

/* Drops the requests that the kernel has taken, which it takes in order. */
static void forget_taken(struct uring *uring)
{
	while (uring->untaken_count > io_uring_sq_ready(&uring->ring))
		get_untaken(uring);
}

static int uring_submit(void *engine, struct io_op *op)
{
	struct uring *uring = engine;
	struct io_uring_sqe *sqe;
	int ret;

	if (uring->broken)
		return uring->broken;
	sqe = io_uring_get_sqe(&uring->ring);
	if (!sqe)
		return -EBUSY;
	prepare(uring, sqe, op);
	put_untaken(uring, op);
	uring->in_flight++;
	ret = io_uring_submit(&uring->ring);
	forget_taken(uring);
	/*
	 * A request that is worth retrying stays in the submission queue; wait() submits it again.
	 */
	if (ret < 0 && !worth_retrying(ret))
		uring->broken = ret;
	return 0;
}

static struct io_op *uring_wait(void *engine)
{
	static const struct timespec moment = { 0, 1000000 };
	struct uring *uring = engine;
	struct io_uring_cqe *cqe;
	struct io_op *op;

	if (!uring->in_flight)
		return NULL;
	while (io_uring_peek_cqe(&uring->ring, &cqe)) {
		int ret;

		if (uring->broken && uring->untaken) {
			op = get_untaken(uring);
			op->result = uring->broken;
			uring->in_flight--;
			return op;
		}
		ret = uring->broken ? io_uring_wait_cqe(&uring->ring, &cqe) :
				      io_uring_submit_and_wait(&uring->ring, 1);
		forget_taken(uring);
		/*
		 * Completions still arrive when the kernel no longer lets this process enter the
		 * ring.
		 */
		if (ret < 0 && !worth_retrying(ret))
			uring->broken = ret;
		if (ret < 0 && ret != -EINTR)
			nanosleep(&moment, NULL);
	}
	op = io_uring_cqe_get_data(cqe);
	op->result = cqe->res;
	io_uring_cqe_seen(&uring->ring, cqe);
	uring->in_flight--;
	return op;
}

static void uring_close(void *engine)
{
	struct uring *uring = engine;

	tear_down(uring);
	free(uring);
}

const struct io_engine_ops io_engine_uring = {
	.id = "uring",
	.direct = true,
	.open = uring_open,
	.submit = uring_submit,
	.wait = uring_wait,
	.close = uring_close,
};

const struct io_engine_ops io_engine_uring_async = {
	.id = "uring-async",
	.direct = true,
	.open = uring_async_open,
	.submit = uring_submit,
	.wait = uring_wait,
	.close = uring_close,
};
