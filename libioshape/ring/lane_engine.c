/* SPDX-License-Identifier: Apache-2.0 */
/* The engine of a lane, and the shape of its buffers: what may change from one file to the next. */
#include "ring/lane.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

const struct ring_engine_ops *const *ring_engines_from(enum ioshape_engine first)
{
	static const struct ring_engine_ops *const all[][4] = {
		{ &ring_engine_uring, &ring_engine_threads, &ring_engine_buffered, NULL },
		{ &ring_engine_uring_async, &ring_engine_threads, &ring_engine_buffered, NULL },
	};

	return all[first == IOSHAPE_ENGINE_URING_ASYNC];
}

const struct ring_engine_ops *ring_engine_of(enum ioshape_engine which)
{
	switch (which) {
	case IOSHAPE_ENGINE_URING:
		return &ring_engine_uring;
	case IOSHAPE_ENGINE_URING_ASYNC:
		return &ring_engine_uring_async;
	case IOSHAPE_ENGINE_THREADS:
		return &ring_engine_threads;
	case IOSHAPE_ENGINE_BUFFERED:
		return &ring_engine_buffered;
	case IOSHAPE_ENGINE_NIL:
		return &ring_engine_nil;
	default:
		return NULL;
	}
}

/* ---- Engines --------------------------------------------------------------------------------- */

static const struct ring_engine_ops *const *engines_of(const struct ring_lane *lane)
{
	return lane->config.engines ? lane->config.engines : ring_engines_from(lane->shape.engine);
}

static int try_engine(struct ring_lane *lane, const struct ring_engine_ops *ops, char *why,
		      size_t why_bytes)
{
	struct ring_engine_params params = {
		.depth = lane->shape.depth,
		.memory = lane->memory,
		.memory_bytes = lane->memory_bytes,
		.log = lane->config.log,
	};
	int ret = ops->open(&lane->engine, &params, why, why_bytes);

	if (!ret) {
		lane->ops = ops;
		lane->engine_asked = lane->shape.engine;
		lane->engine_depth = params.depth;
	}
	return ret;
}

static void remember_step_down(struct ring_lane *lane, const char *why)
{
	size_t used = strlen(lane->step_down);

	if (*why)
		snprintf(lane->step_down + used, sizeof(lane->step_down) - used, "%s%s",
			 used ? ", " : "", why);
}

/* It does not take requests any more: the next file gets another, or the same one anew. */
static void drop_engine(struct ring_lane *lane)
{
	lane->ops->close(lane->engine);
	lane->ops = NULL;
	lane->engine_failed = false;
	lane->step_down[0] = 0;
}

/* ---- Shapes ---------------------------------------------------------------------------------- */

/* Room for so many buffers and bytes; nothing has changed if it fails. */
static int make_room(struct ring_lane *lane, const struct ring_shape *shape,
		     struct base_error *error)
{
	const size_t bytes = shape->block_bytes * shape->depth;
	struct ring_buffer *buffers;
	uint8_t *memory;

	if (shape->depth > lane->buffers_made) {
		buffers = calloc(shape->depth, sizeof(*buffers));
		if (!buffers)
			return base_no_memory(error, "an I/O lane",
					      shape->depth * sizeof(*buffers));
		free(lane->buffers);
		lane->buffers = buffers;
		lane->buffers_made = shape->depth;
		lane->free = NULL;
	}
	if (bytes > lane->memory_bytes) {
		memory = base_map(bytes);
		if (!memory)
			return base_no_memory(error, "I/O buffers", bytes);
		/* It may have registered the memory. */
		if (lane->ops)
			drop_engine(lane);
		base_unmap(lane->memory, lane->memory_bytes);
		lane->memory = memory;
		lane->memory_bytes = bytes;
	}
	return 0;
}

static void cut_buffers(struct ring_lane *lane, const struct ring_shape *shape)
{
	lane->shape = *shape;
	lane->free = NULL;
	for (unsigned i = shape->depth; i-- > 0;) {
		lane->buffers[i].data = lane->memory + i * shape->block_bytes;
		ring_lane_give_back(lane, &lane->buffers[i]);
	}
	lane->limit = MAX(shape->depth - 1, 1u);
}

/* Returns whether the engine that is open is the one that this shape would open. */
static bool serves(const struct ring_lane *lane, const struct ring_shape *shape)
{
	return shape->depth <= lane->engine_depth &&
	       (lane->config.engines || shape->engine == lane->engine_asked);
}

int ring_lane_shape(struct ring_lane *lane, const struct ring_shape *shape,
		    struct base_error *error)
{
	const struct ring_shape before = lane->shape;
	int ret;

	if (shape->engine == before.engine && shape->block_bytes == before.block_bytes &&
	    shape->depth == before.depth) {
		/* Its targets may be others. */
		lane->shape = *shape;
		return 0;
	}
	ret = make_room(lane, shape, error);
	if (!ret && lane->ops && !serves(lane, shape))
		drop_engine(lane);
	/* Also after a failure: there may be other buffers. */
	if (lane->memory)
		cut_buffers(lane, ret ? &before : shape);
	return ret;
}

int ring_lane_shape_to_read(struct ring_lane *lane, const struct ring_input *input,
			    struct base_error *error)
{
	const struct ring_shape shape = ring_shape_to_read(&lane->config, &input->fs, input->bytes);

	return ring_lane_shape(lane, &shape, error);
}

/* ---- Engine and file ------------------------------------------------------------------------- */

/* Opens the first engine that the kernel allows. */
static int start_any(struct ring_lane *lane, struct base_error *error)
{
	const struct ring_engine_ops *const *engines = engines_of(lane);
	char why[200] = "";
	int ret = -ENOTSUP;

	for (size_t i = 0; ret && engines[i]; i++) {
		ret = try_engine(lane, engines[i], why, sizeof(why));
		remember_step_down(lane, why);
	}
	if (ret)
		return base_fail(error, ret, "no engine can be used (%s)", lane->step_down);
	if (*lane->step_down)
		base_log(&lane->config.log, IOSHAPE_LOG_INFO, "using the %s engine: %s",
			 lane->ops->id, lane->step_down);
	return 0;
}

int ring_lane_start(struct ring_lane *lane, struct base_error *error)
{
	const struct ring_engine_ops *asked = ring_engine_of(lane->config.engine);
	char why[200] = "";
	int ret;

	if (lane->engine_failed)
		drop_engine(lane);
	if (lane->ops)
		return 0;
	if (!asked)
		return start_any(lane, error);
	ret = try_engine(lane, asked, why, sizeof(why));
	if (ret)
		return base_fail(error, ret,
				 "cannot use the %s engine that was asked for (%s)" BASE_REMEDY
				 "choose another or leave the choice to the library",
				 asked->id, why);
	remember_step_down(lane, why);
	return 0;
}
