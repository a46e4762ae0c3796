/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The two engines that do their work inside submit(): buffered, which any kernel and filesystem can
 * do, and nil, which does nothing and so shows what everything else costs.
 */
#define _GNU_SOURCE
#include "ring/ring.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

struct finished {
	struct ring_op *first; /* in no particular order */
};

static int inline_open(void **engine, const struct ring_engine_params *params, char *why,
		       size_t why_bytes)
{
	(void)params;
	why[0] = 0;
	*engine = calloc(1, sizeof(struct finished));
	if (*engine)
		return 0;
	snprintf(why, why_bytes, "no memory");
	return -ENOMEM;
}

void ring_engine_any_file(void *engine, int fd)
{
	(void)engine;
	(void)fd;
}

static int finish(struct finished *finished, struct ring_op *op, int64_t result)
{
	op->result = result;
	op->next = finished->first;
	finished->first = op;
	return 0;
}

static int buffered_submit(void *engine, struct ring_op *op)
{
	ssize_t moved;

	if (op->kind == RING_READ) {
		moved = pread(op->fd, op->data, op->bytes, (off_t)op->offset);
		return finish(engine, op, moved < 0 ? -errno : moved);
	}
	if (op->part_count)
		moved = pwritev(op->fd, op->parts, (int)op->part_count, (off_t)op->offset);
	else
		moved = pwrite(op->fd, op->data, op->bytes, (off_t)op->offset);
	return finish(engine, op, moved < 0 ? -errno : moved);
}

static int nil_submit(void *engine, struct ring_op *op)
{
	return finish(engine, op, (int64_t)op->bytes);
}

static struct ring_op *inline_wait(void *engine)
{
	struct finished *finished = engine;
	struct ring_op *op = finished->first;

	if (op)
		finished->first = op->next;
	return op;
}

static void inline_close(void *engine)
{
	free(engine);
}

const struct ring_engine_ops ring_engine_buffered = {
	.id = "buffered",
	.direct = false,
	.open = inline_open,
	.attach = ring_engine_any_file,
	.submit = buffered_submit,
	.wait = inline_wait,
	.close = inline_close,
};

const struct ring_engine_ops ring_engine_nil = {
	.id = "nil",
	.direct = false,
	.open = inline_open,
	.attach = ring_engine_any_file,
	.submit = nil_submit,
	.wait = inline_wait,
	.close = inline_close,
};
