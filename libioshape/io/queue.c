/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The queue of the I/O requests of one file, and the rules for these requests. Engine, number of
 * buffers and their size may change from file to file. The queue sends full buffers when the
 * in-flight limit allows, resends the rest of short results, and continues through the page cache
 * if direct I/O does not work.
 */
#define _GNU_SOURCE
#include "io/queue.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

/* ---- Shapes: rules for the requests of a file ------------------------------------------------ */

/* Requests shorter than this cost more to send than their bytes. */
#define LEAST_BLOCK_BYTES (512 * KIB)
#define MOST_BLOCK_BYTES (64 * MIB)

/* Smallest stripe that is believed. Lustre's stripes are multiples of it. */
#define LEAST_STRIPE_BYTES (64 * KIB)

/*
 * Request size on filesystems whose kernel client cuts longer requests and sends the pieces at
 * once. With longer requests the controller could not count what is in flight.
 */
#define CUT_BYTES (1 * MIB)

/* Buffer memory for one storage target. depth.c decides how much of it is in flight. */
#define TARGET_BYTES (8 * MIB)

/* Returns the user's settings, with defaults for the rest. Pure. */
static struct io_shape shape_standard(const struct io_config *config)
{
	return (struct io_shape){
		.engine = config->engine,
		.block_bytes = config->block_bytes ? config->block_bytes : IO_BLOCK_BYTES,
		.depth = config->depth ? config->depth : IO_DEPTH,
		.fixed = config->depth != 0,
	};
}

/*
 * Returns the engine by the filesystem. Clients of network filesystems and FUSE may serve a request
 * in the call that submits it, so a file's requests would run one after the other. There the
 * kernel's workers submit. docs/performance.md ("Which engine") has the measurements.
 */
static enum ioshape_engine choose_engine(const struct io_config *config, const struct fs_info *fs)
{
	if (config->engine != IOSHAPE_ENGINE_AUTO)
		return config->engine;
	return fs_is_local(fs->family) && fs->magic != FS_FUSE_MAGIC ? IOSHAPE_ENGINE_URING :
								       IOSHAPE_ENGINE_URING_ASYNC;
}

struct io_shape io_shape_to_read(const struct io_config *config, const struct fs_info *fs,
				 uint64_t bytes)
{
	struct io_shape shape = shape_standard(config);

	shape.engine = choose_engine(config, fs);
	if (!config->depth && bytes > shape.depth * shape.block_bytes)
		shape.depth = MAX(shape.depth,
				  MIN(IO_READ_DEPTH, IO_MOST_QUEUE_BYTES / shape.block_bytes));
	return shape;
}

/*
 * Returns the size of a stripe's parts: the fewest equal parts of whole pages that are small
 * enough. Returns MOST_BLOCK_BYTES if the stripe cannot be divided so.
 */
static size_t part_of(uint64_t stripe_bytes)
{
	const uint64_t pages = stripe_bytes / 4096;

	for (uint64_t parts = 2; parts <= stripe_bytes / LEAST_BLOCK_BYTES && parts < 1024;
	     parts++) {
		if (pages % parts == 0 && stripe_bytes / parts <= MOST_BLOCK_BYTES)
			return stripe_bytes / parts;
	}
	return MOST_BLOCK_BYTES;
}

/*
 * Returns the bytes of a request on stripes of this size: one stripe, several small stripes that
 * are worth a request, or an equal part of a stripe that is too large. Returns 0 if requests
 * cannot follow the stripes.
 */
static size_t stripe_block(uint64_t stripe_bytes)
{
	if (stripe_bytes < LEAST_STRIPE_BYTES || stripe_bytes % 4096)
		return 0;
	if (stripe_bytes > MOST_BLOCK_BYTES)
		return part_of(stripe_bytes);
	return stripe_bytes * ((LEAST_BLOCK_BYTES + stripe_bytes - 1) / stripe_bytes);
}

/* Returns the layout component of byte `offset`; NULL if requests cannot follow its stripes. */
static const struct fs_component *stripes_at(const struct fs_layout *layout, uint64_t offset)
{
	const struct fs_component *component;

	for (uint32_t i = 0; i < MIN(layout->count, (uint32_t)FS_MOST_COMPONENTS); i++) {
		component = &layout->components[i];
		if (offset >= component->begin && offset < component->end)
			return stripe_block(component->stripe_bytes) ? component : NULL;
	}
	return NULL;
}

/* Returns the bytes of buffers for so many targets. */
static uint64_t bytes_for(uint32_t targets, uint64_t stripe_bytes)
{
	const uint64_t most = IO_MOST_DEPTH * MOST_BLOCK_BYTES;
	/* Whole stripes, at least one for each target, or targets would idle. */
	const uint64_t each = MAX(TARGET_BYTES / MAX(stripe_bytes, 1), 1) * MAX(stripe_bytes, 1);

	targets = MAX(targets, 1);
	return each > most / targets ? most : each * targets;
}

/*
 * Returns the layout component that needs the most buffer memory, among those that a file of
 * file_bytes reaches. NULL if there is none.
 */
static const struct fs_component *widest(const struct fs_layout *layout, uint64_t file_bytes)
{
	const struct fs_component *component, *found = NULL;

	for (uint32_t i = 0; i < MIN(layout->count, (uint32_t)FS_MOST_COMPONENTS); i++) {
		component = &layout->components[i];
		if (file_bytes && component->begin >= file_bytes)
			continue;
		if (!stripe_block(component->stripe_bytes))
			continue;
		if (!found || bytes_for(component->stripe_count, component->stripe_bytes) >
				      bytes_for(found->stripe_count, found->stripe_bytes))
			found = component;
	}
	return found;
}

static size_t largest_block(const struct fs_layout *layout, uint64_t file_bytes)
{
	size_t most = 0;

	for (uint32_t i = 0; i < MIN(layout->count, (uint32_t)FS_MOST_COMPONENTS); i++) {
		if (!file_bytes || layout->components[i].begin < file_bytes)
			most = MAX(most, stripe_block(layout->components[i].stripe_bytes));
	}
	return most;
}

/* Returns the number of buffers for so many bytes in flight, plus one that is filled meanwhile. */
static unsigned buffers_for(uint64_t bytes, size_t block_bytes)
{
	uint64_t most = MAX(IO_MOST_QUEUE_BYTES / block_bytes, 2);
	uint64_t buffers = MAX(bytes / block_bytes, 1) + 1;

	return (unsigned)MIN(MIN(buffers, most), IO_MOST_DEPTH);
}

/*
 * Sets the shape for striped files: a request has one stripe, several stripes, or an equal part of
 * one.
 */
static void shape_for_stripes(struct io_shape *shape, const struct io_config *config,
			      const struct fs_layout *layout, const struct fs_component *component,
			      uint64_t file_bytes)
{
	/*
	 * A file on all targets has a very large stripe_count; more targets than buffers do not
	 * matter.
	 */
	const uint32_t targets = MIN(component->stripe_count, IO_MOST_DEPTH);

	shape->request_bytes = config->block_bytes ? config->block_bytes :
						     stripe_block(component->stripe_bytes);
	if (!config->block_bytes)
		shape->block_bytes = largest_block(layout, file_bytes);
	if (!config->depth)
		shape->depth = buffers_for(bytes_for(targets, component->stripe_bytes),
					   shape->block_bytes);
	/* Requests that span targets are not attributed to one. */
	if (!config->depth && component->stripe_count <= IO_MOST_TARGETS &&
	    shape->request_bytes <= component->stripe_bytes) {
		shape->targets = targets;
		shape->stripe_bytes = component->stripe_bytes;
	}
}

/* Writes the reason for engine, blocks and depth, for the report. */
static void explain(const struct io_config *config, const struct fs_info *fs,
		    const struct fs_component *component, char *why, size_t why_bytes)
{
	char blocks[64] = "";

	if (config->block_bytes && config->depth)
		snprintf(blocks, sizeof(blocks), "; blocks as requested");
	else if (component)
		snprintf(blocks, sizeof(blocks), "; %u stripes of %llu%c",
			 MIN(component->stripe_count, IO_MOST_DEPTH),
			 (unsigned long long)component->stripe_bytes /
				 (component->stripe_bytes % MIB ? KIB : MIB),
			 component->stripe_bytes % MIB ? 'K' : 'M');
	else if (config->block_bytes || config->depth)
		snprintf(blocks, sizeof(blocks), "; blocks as requested");
	else if (fs_cuts_requests(fs->family))
		snprintf(blocks, sizeof(blocks), "; requests of the size that the kernel sends");
	snprintf(why, why_bytes, "%s%s",
		 config->engine != IOSHAPE_ENGINE_AUTO             ? "engine as requested" :
		 choose_engine(config, fs) == IOSHAPE_ENGINE_URING ? "local filesystem" :
								     "network filesystem",
		 blocks);
}

struct io_shape io_shape_for(const struct io_config *config, const struct fs_info *fs,
			     uint64_t file_bytes, char *why, size_t why_bytes)
{
	const struct fs_component *component = widest(&fs->layout, file_bytes);
	struct io_shape shape = shape_standard(config);

	shape.engine = choose_engine(config, fs);
	if (component && !(config->block_bytes && config->depth)) {
		shape_for_stripes(&shape, config, &fs->layout, component, file_bytes);
	} else if (!config->block_bytes && !config->depth && fs_cuts_requests(fs->family)) {
		shape.block_bytes = CUT_BYTES;
		shape.depth = buffers_for((IO_DEPTH - 1) * IO_BLOCK_BYTES, CUT_BYTES);
		shape.shared = true;
	}
	explain(config, fs, component, why, why_bytes);
	return shape;
}

size_t io_request_bytes(const struct fs_layout *layout, uint64_t offset, size_t block_bytes)
{
	const struct fs_component *component = stripes_at(layout, offset);
	uint64_t bytes, unit;

	if (!component) {
		/* Not striped here, but the next component may be. */
		component = fs_layout_at(layout, offset);
		return component ? MIN(block_bytes, component->end - offset) : block_bytes;
	}
	bytes = stripe_block(component->stripe_bytes);
	/* Stripes are counted from the beginning of the file, not of the component. */
	unit = MAX(bytes, component->stripe_bytes);
	bytes = MIN(MIN(bytes, block_bytes), unit - offset % unit);
	return MIN(bytes, component->end - offset);
}

/* Most retries in a row of a request without progress. */
#define MAX_RETRIES 100

/* ---- Downgrades for the report --------------------------------------------------------------- */

void io_add_downgrade(struct io_downgrades *downgrades, enum ioshape_downgrade_code code,
		      const char *format, ...)
{
	struct ioshape_downgrade *downgrade;
	va_list args;

	if (!downgrades)
		return;
	if (downgrades->count < IOSHAPE_REPORT_DOWNGRADES) {
		downgrade = &downgrades->list[downgrades->count];
		downgrade->code = code;
		va_start(args, format);
		vsnprintf(downgrade->sentence, sizeof(downgrade->sentence), format, args);
		va_end(args);
		base_make_plain(downgrade->sentence);
		base_garble(downgrade->sentence);
	}
	downgrades->count++;
}

void io_report_downgrades(const struct io_downgrades *downgrades, struct ioshape_report *report)
{
	report->downgrade_count = downgrades->count;
	memcpy(report->downgrades, downgrades->list, sizeof(report->downgrades));
}

const char *io_remedy(int code)
{
	switch (code) {
	case -ENOSPC:
		return "free space or save elsewhere";
	case -EDQUOT:
		return "free some of your quota or save elsewhere";
	case -EIO:
		return "the storage failed, see the kernel's log";
	case -EFBIG:
		return "the filesystem or a limit (ulimit -f) does not allow files this large";
	case -ENOTCONN:
	case -EBADFD: /* GlusterFS: the file was open when the client lost the brick */
		return "the filesystem's client lost a server, see its log";
	default:
		return "";
	}
}

/* ---- Engines --------------------------------------------------------------------------------- */

/* Returns the engines to try in order when `first` was chosen by rule, ended by NULL. */
static const struct io_engine_ops *const *engines_from(enum ioshape_engine first)
{
	static const struct io_engine_ops *const all[][4] = {
		{ &io_engine_uring, &io_engine_threads, &io_engine_buffered, NULL },
		{ &io_engine_uring_async, &io_engine_threads, &io_engine_buffered, NULL },
	};

	return all[first == IOSHAPE_ENGINE_URING_ASYNC];
}

const struct io_engine_ops *io_engine_of(enum ioshape_engine which)
{
	switch (which) {
	case IOSHAPE_ENGINE_URING:
		return &io_engine_uring;
	case IOSHAPE_ENGINE_URING_ASYNC:
		return &io_engine_uring_async;
	case IOSHAPE_ENGINE_THREADS:
		return &io_engine_threads;
	case IOSHAPE_ENGINE_BUFFERED:
		return &io_engine_buffered;
	default:
		return NULL;
	}
}

static const struct io_engine_ops *const *engines_of(const struct io_queue *queue)
{
	return queue->config.engines ? queue->config.engines : engines_from(queue->shape.engine);
}

static int try_engine(struct io_queue *queue, const struct io_engine_ops *ops, char *why,
		      size_t why_bytes)
{
	struct io_engine_params params = {
		.depth = queue->shape.depth,
		.memory = queue->memory,
		.memory_bytes = queue->memory_bytes,
		.log = queue->config.log,
	};
	int ret = ops->open(&queue->engine, &params, why, why_bytes);

	if (!ret) {
		queue->ops = ops;
		queue->engine_asked = queue->shape.engine;
		queue->engine_depth = params.depth;
	}
	return ret;
}

static void remember_downgrade(struct io_queue *queue, const char *why)
{
	size_t used = strlen(queue->downgrade);

	if (*why)
		snprintf(queue->downgrade + used, sizeof(queue->downgrade) - used, "%s%s",
			 used ? ", " : "", why);
}

/* Closes the engine; the next file opens another one. */
static void drop_engine(struct io_queue *queue)
{
	queue->ops->close(queue->engine);
	queue->ops = NULL;
	queue->engine_failed = false;
	queue->downgrade[0] = 0;
}

/* ---- Shapes ---------------------------------------------------------------------------------- */

/*
 * Allocates what the shape needs beyond the present buffers and memory. On failure the old memory
 * stays.
 */
static int fit_buffers(struct io_queue *queue, const struct io_shape *shape,
		       struct base_error *error)
{
	const size_t bytes = shape->block_bytes * shape->depth;
	struct io_buffer *buffers;
	uint8_t *memory;

	if (shape->depth > queue->buffers_made) {
		buffers = calloc(shape->depth, sizeof(*buffers));
		if (!buffers)
			return base_no_memory(error, "an I/O queue",
					      shape->depth * sizeof(*buffers));
		free(queue->buffers);
		queue->buffers = buffers;
		queue->buffers_made = shape->depth;
		queue->free = NULL;
	}
	if (bytes > queue->memory_bytes) {
		memory = base_map(bytes);
		if (!memory)
			return base_no_memory(error, "I/O buffers", bytes);
		/* The engine may have registered the old memory. */
		if (queue->ops)
			drop_engine(queue);
		base_unmap(queue->memory, queue->memory_bytes);
		queue->memory = memory;
		queue->memory_bytes = bytes;
	}
	return 0;
}

static void cut_buffers(struct io_queue *queue, const struct io_shape *shape)
{
	queue->shape = *shape;
	queue->free = NULL;
	for (unsigned i = shape->depth; i-- > 0;) {
		queue->buffers[i].data = queue->memory + i * shape->block_bytes;
		io_queue_give_back(queue, &queue->buffers[i]);
	}
	queue->limit = MAX(shape->depth - 1, 1u);
}

/* Returns whether the open engine is the one that this shape would open. */
static bool serves(const struct io_queue *queue, const struct io_shape *shape)
{
	return shape->depth <= queue->engine_depth &&
	       (queue->config.engines || shape->engine == queue->engine_asked);
}

int io_queue_shape(struct io_queue *queue, const struct io_shape *shape, struct base_error *error)
{
	const struct io_shape before = queue->shape;
	int ret;

	if (shape->engine == before.engine && shape->block_bytes == before.block_bytes &&
	    shape->depth == before.depth) {
		/* The targets may differ. */
		queue->shape = *shape;
		return 0;
	}
	ret = fit_buffers(queue, shape, error);
	if (!ret && queue->ops && !serves(queue, shape))
		drop_engine(queue);
	/* Even after a failure: fit_buffers() may have replaced the buffers. */
	if (queue->memory)
		cut_buffers(queue, ret ? &before : shape);
	return ret;
}

/* Opens the first engine of the list that the kernel allows. */
static int start_any(struct io_queue *queue, struct base_error *error)
{
	const struct io_engine_ops *const *engines = engines_of(queue);
	char why[200] = "";
	int ret = -ENOTSUP;

	for (size_t i = 0; ret && engines[i]; i++) {
		ret = try_engine(queue, engines[i], why, sizeof(why));
		queue->first_code = i ? queue->first_code : ret;
		remember_downgrade(queue, why);
	}
	if (ret)
		return base_fail(error, ret, "no engine can be used (%s)", queue->downgrade);
	if (*queue->downgrade)
		base_log(&queue->config.log, IOSHAPE_LOG_INFO, "using the %s engine: %s",
			 queue->ops->id, queue->downgrade);
	return 0;
}

int io_queue_start(struct io_queue *queue, struct base_error *error)
{
	const struct io_engine_ops *asked = io_engine_of(queue->config.engine);
	char why[200] = "";
	int ret;

	if (queue->engine_failed)
		drop_engine(queue);
	if (queue->ops)
		return 0;
	if (!asked)
		return start_any(queue, error);
	ret = try_engine(queue, asked, why, sizeof(why));
	if (ret)
		return base_fail_with(error, ret, "choose another engine or set engine=auto",
				      "cannot use the requested %s engine (%s)", asked->id, why);
	remember_downgrade(queue, why);
	return 0;
}

/* ---- Queues ---------------------------------------------------------------------------------- */

int io_queue_open(struct io_queue **out, const struct io_config *config, struct base_error *error)
{
	const struct io_shape shape = shape_standard(config);
	struct io_queue *queue;
	int ret;

	*out = NULL;
	queue = calloc(1, sizeof(*queue));
	if (!queue)
		return base_no_memory(error, "an I/O queue", sizeof(*queue));
	queue->config = *config;
	queue->fd = -1;
	ret = io_queue_shape(queue, &shape, error);
	if (ret)
		io_queue_close(queue);
	else
		*out = queue;
	return ret;
}

void io_queue_close(struct io_queue *queue)
{
	if (!queue)
		return;
	io_queue_drain(queue, NULL);
	if (queue->ops)
		queue->ops->close(queue->engine);
	base_unmap(queue->memory, queue->memory_bytes);
	free(queue->buffers);
	free(queue);
}

void io_queue_fills(struct io_queue *queue, struct base_fresh *fresh)
{
	queue->fresh = fresh;
}

void io_choose(const struct io_config *config, const struct fs_info *fs, uint64_t file_bytes,
	       struct io_choice *choice)
{
	const struct io_shape shape =
		io_shape_for(config, fs, file_bytes, choice->why, sizeof(choice->why));
	const struct io_engine_ops *asked = io_engine_of(config->engine);
	struct base_error error = { 0 };
	struct io_queue *queue;
	int ret = io_queue_open(&queue, config, &error);

	if (!ret)
		ret = io_queue_shape(queue, &shape, &error);
	if (!ret)
		ret = io_queue_start(queue, &error);
	choice->block_bytes = shape.block_bytes;
	choice->depth = shape.depth;
	choice->code = queue ? queue->first_code : ret;
	choice->engine = !ret ? queue->ops->id : asked ? asked->id : "";
	snprintf(choice->downgrade, sizeof(choice->downgrade), "%.255s",
		 ret ? error.sentence : queue->downgrade);
	io_queue_close(queue);
}

/* ---- Beginning and ending a file ------------------------------------------------------------- */

static void begin_depth(struct io_queue *queue)
{
	const struct io_shape *shape = &queue->shape;
	const uint32_t targets = MAX(shape->targets, 1);
	const struct io_depth_options options = {
		.request_bytes = shape->request_bytes ? shape->request_bytes : shape->block_bytes,
		.targets = targets,
		.stripe_bytes = shape->stripe_bytes,
		.most = MAX(queue->limit / targets, 1),
		/* Engines that complete a request on submission have no latencies. */
		.fixed = shape->fixed || !queue->ops->direct,
		.pauses = shape->targets > 0,
		.shared = shape->shared,
	};

	io_depth_begin(&queue->depth, &options);
}

void io_queue_attach(struct io_queue *queue, int fd, const char *path, bool reading,
		     struct io_downgrades *downgrades)
{
	queue->fd = fd;
	queue->path = path;
	queue->reading = reading;
	queue->verb = reading ? "read" : "write";
	queue->downgrades = downgrades;
	queue->direct = false;
	queue->alignment = 1;
	if (!reading)
		begin_depth(queue);
	queue->file_bytes = UINT64_MAX;
	if (*queue->downgrade)
		io_add_downgrade(downgrades, IOSHAPE_DOWNGRADE_ENGINE, "%s", queue->downgrade);
}

void io_queue_detach(struct io_queue *queue)
{
	if (queue->fd < 0)
		return;
	queue->fd = -1;
	queue->direct = false;
	queue->path = NULL;
	queue->downgrades = NULL;
}

int io_set_direct(int fd, bool on)
{
	int flags = fcntl(fd, F_GETFL);

	if (flags < 0)
		return -errno;
	flags = on ? flags | O_DIRECT : flags & ~O_DIRECT;
	return fcntl(fd, F_SETFL, flags) ? -errno : 0;
}

uint32_t io_queue_direct_alignment(const struct io_queue *queue, const struct fs_info *fs)
{
	/*
	 * If the kernel does not tell the alignment, it is at most a page on every known
	 * filesystem.
	 */
	uint32_t alignment = fs->offset_alignment ? fs->offset_alignment : 4096;

	/* After a short result, the rest has the same offset in the buffer as in the block. */
	alignment = MAX(alignment, fs->memory_alignment);
	if (alignment & (alignment - 1) || queue->shape.block_bytes % alignment)
		return 0;
	return alignment;
}

static int try_direct(struct io_queue *queue, const struct fs_info *fs)
{
	if (!queue->ops->direct || (fs->direct_known && !fs->direct_works) ||
	    !io_queue_direct_alignment(queue, fs))
		return -ENOTSUP;
	return io_set_direct(queue->fd, true);
}

int io_queue_go_direct(struct io_queue *queue, const struct fs_info *fs, struct base_error *error)
{
	bool required = queue->config.direct == IOSHAPE_DIRECT_REQUIRE;
	int ret;

	/* io_queue_attach() has recorded why it is this engine. */
	if (queue->config.direct == IOSHAPE_DIRECT_OFF || (!queue->ops->direct && !required))
		return 0;
	if (!required && fs_writes_cached(fs->family, fs->magic))
		return 0;
	ret = try_direct(queue, fs);
	if (ret && required)
		return base_fail_with(error, ret, "use direct=prefer",
				      "cannot use direct I/O on \"%s\" (%s, %s engine), which was "
				      "required",
				      queue->path, fs->type, queue->ops->id);
	if (ret) {
		io_add_downgrade(queue->downgrades, IOSHAPE_DOWNGRADE_DIRECT,
				 "no direct I/O on %s: %s", fs->type, ioshape_strerror(ret));
		return 0;
	}
	queue->direct = true;
	queue->alignment = io_queue_direct_alignment(queue, fs);
	return 0;
}

/* ---- Buffers --------------------------------------------------------------------------------- */

static struct io_buffer *buffer_of(struct io_op *op)
{
	return (struct io_buffer *)((char *)op - offsetof(struct io_buffer, op));
}

struct io_buffer *io_queue_free_buffer(struct io_queue *queue)
{
	struct io_op *op = queue->free;

	if (!op)
		return NULL;
	queue->free = op->next;
	return buffer_of(op);
}

static void add_range(struct io_buffer *buffer, const uint8_t *from, size_t bytes)
{
	struct iovec *range = &buffer->ranges[buffer->op.range_count++];

	memcpy(&range->iov_base, &from, sizeof(from)); /* writev() only reads it */
	range->iov_len = bytes;
}

/*
 * Lists in op.ranges the memory of the bytes that have not been written yet. The list stays empty
 * if they are all in the buffer.
 */
static void find_ranges(struct io_buffer *buffer)
{
	size_t at = buffer->moved;

	buffer->op.ranges = buffer->ranges;
	buffer->op.range_count = 0;
	for (unsigned i = 0; i < buffer->loan_count; i++) {
		const struct io_loan *loan = &buffer->loans[i];
		const size_t end = loan->at + loan->bytes;

		if (end <= at)
			continue;
		if (loan->at > at) {
			add_range(buffer, buffer->data + at, loan->at - at);
			at = loan->at;
		}
		add_range(buffer, loan->from + (at - loan->at), end - at);
		at = end;
	}
	if (buffer->op.range_count && at < buffer->bytes)
		add_range(buffer, buffer->data + at, buffer->bytes - at);
}

static int send(struct io_queue *queue, struct io_buffer *buffer)
{
	int ret;

	find_ranges(buffer);
	buffer->op.fd = queue->fd;
	buffer->op.kind = queue->reading ? IO_READ : IO_WRITE;
	buffer->op.data = buffer->data + buffer->moved;
	buffer->op.bytes = buffer->bytes - buffer->moved;
	buffer->op.offset = buffer->offset + buffer->moved;
	ret = queue->ops->submit(queue->engine, &buffer->op);
	if (ret) {
		buffer->failed = ret;
		buffer->refused = true;
		queue->engine_failed = true;
		return ret;
	}
	buffer->in_flight = true;
	queue->in_flight++;
	return 0;
}

/* Sends a buffer for the first time, and tells the controller. For writing only. */
static int leave(struct io_queue *queue, struct io_buffer *buffer)
{
	buffer->sent_ns = base_now_ns();
	io_depth_sent(&queue->depth, buffer->offset, buffer->bytes);
	return send(queue, buffer);
}

static int tell_failure(const struct io_queue *queue, const struct io_buffer *buffer,
			struct base_error *error)
{
	if (buffer->refused)
		base_fail(error, buffer->failed,
			  "cannot %s \"%s\" at offset %llu: the %s engine accepted no request",
			  queue->verb, queue->path, (unsigned long long)buffer->op.offset,
			  queue->ops->id);
	else
		base_fail_with(error, buffer->failed, io_remedy(buffer->failed),
			       "cannot %s \"%s\" at offset %llu (%s, %s engine)", queue->verb,
			       queue->path, (unsigned long long)buffer->op.offset,
			       BASE_SIZE(buffer->op.bytes), queue->ops->id);
	base_error_at(error, buffer->op.offset);
	return buffer->failed;
}

static bool may_leave(const struct io_queue *queue, const struct io_buffer *buffer)
{
	return queue->in_flight < queue->limit && io_depth_allows(&queue->depth, buffer->offset);
}

/* Sends the queued buffers that the in-flight limit allows; in order, for each target. */
static int send_ready(struct io_queue *queue, struct base_error *error)
{
	struct io_op **at = &queue->ready;

	while (*at) {
		struct io_buffer *buffer = buffer_of(*at);

		if (!may_leave(queue, buffer)) {
			at = &buffer->op.next;
			continue;
		}
		*at = buffer->op.next;
		queue->ready_count--;
		if (leave(queue, buffer)) {
			io_queue_give_back(queue, buffer);
			return tell_failure(queue, buffer, error);
		}
	}
	return 0;
}

/* Drops the queued buffers after a failure: nothing more is sent. */
static void drop_ready(struct io_queue *queue)
{
	while (queue->ready) {
		struct io_buffer *buffer = buffer_of(queue->ready);

		queue->ready = buffer->op.next;
		io_queue_give_back(queue, buffer);
	}
	queue->ready_count = 0;
}

static void keep_back(struct io_queue *queue, struct io_buffer *buffer)
{
	struct io_op **end = &queue->ready;

	while (*end)
		end = &(*end)->next;
	buffer->op.next = NULL;
	*end = &buffer->op;
	queue->ready_count++;
}

int io_queue_submit(struct io_queue *queue, struct io_buffer *buffer, struct base_error *error)
{
	int ret;

	buffer->moved = 0;
	buffer->retries = 0;
	buffer->in_flight = false;
	buffer->failed = 0;
	buffer->refused = false;
	/* Readers keep the limit themselves, since they take their blocks back in order. */
	if (!queue->reading && (queue->ready || !may_leave(queue, buffer))) {
		keep_back(queue, buffer);
		ret = send_ready(queue, error);
		if (ret)
			drop_ready(queue);
		return ret;
	}
	ret = queue->reading ? send(queue, buffer) : leave(queue, buffer);
	if (ret && !queue->reading) {
		io_queue_give_back(queue, buffer);
		return tell_failure(queue, buffer, error);
	}
	return 0;
}

/*
 * Switches to the page cache if the file accepted O_DIRECT but refuses direct requests. Returns
 * false if `code` means something else or direct I/O is required.
 */
static bool leave_direct(struct io_queue *queue, int code)
{
	if (code != -EINVAL && code != -EOPNOTSUPP)
		return false;
	if (queue->config.direct == IOSHAPE_DIRECT_REQUIRE)
		return false;
	/* Another request has already changed the mode; this one is only sent again. */
	if (!queue->direct)
		return queue->alignment > 1;
	if (io_set_direct(queue->fd, false))
		return false;
	queue->direct = false;
	io_add_downgrade(queue->downgrades, IOSHAPE_DOWNGRADE_DIRECT,
			 "continued with buffered I/O: %s", ioshape_strerror(code));
	return true;
}

/*
 * Counts a retry, and returns false after too many in a row. From the third on it pauses for 1 ms.
 */
static bool may_retry(struct io_buffer *buffer)
{
	const struct timespec pause = { 0, 1000000 };

	if (++buffer->retries > MAX_RETRIES)
		return false;
	if (buffer->retries > 2)
		nanosleep(&pause, NULL);
	return true;
}

#define SEND_AGAIN 1

/*
 * Decides what to do about a failed request. The kernel returns -ECANCELED if the submitting thread
 * ends before it serves the request; readers may move between threads.
 */
static int judge_failure(struct io_queue *queue, struct io_buffer *buffer, int code)
{
	const bool passes = code == -EINTR || code == -EAGAIN || code == -ECANCELED;

	if (!passes && !leave_direct(queue, code))
		return code;
	return may_retry(buffer) ? SEND_AGAIN : code;
}

/*
 * Records that `bytes` more bytes were moved. Returns false after too many results without
 * progress. Direct I/O continues only at aligned offsets, so bytes after the last one are moved
 * again.
 */
static bool goes_on(const struct io_queue *queue, struct io_buffer *buffer, size_t bytes)
{
	size_t moved = buffer->moved + bytes;

	if (queue->direct)
		moved -= moved % queue->alignment;
	if (moved <= buffer->moved)
		return may_retry(buffer);
	buffer->moved = moved;
	buffer->retries = 0;
	return true;
}

static int judge_short_write(const struct io_queue *queue, struct io_buffer *buffer, size_t bytes)
{
	return goes_on(queue, buffer, bytes) ? SEND_AGAIN : -EIO;
}

/*
 * Decides what to do about a short read. The end of the file is no failure, whether it was known or
 * not.
 */
static int judge_short_read(const struct io_queue *queue, struct io_buffer *buffer, size_t bytes)
{
	const bool ends = !bytes || buffer->offset + buffer->moved + bytes >= queue->file_bytes;

	if (!ends && goes_on(queue, buffer, bytes))
		return SEND_AGAIN;
	buffer->moved += bytes;
	return 0;
}

/*
 * Decides what a completion means. Returns 0 if the buffer is done, SEND_AGAIN, or a negative
 * errno.
 */
static int judge(struct io_queue *queue, struct io_buffer *buffer)
{
	const int64_t result = buffer->op.result;
	int ret;

	if (result == (int64_t)buffer->op.bytes) {
		buffer->moved = buffer->bytes;
		return 0;
	}
	if (result > (int64_t)buffer->op.bytes)
		return -EIO;
	if (result < 0)
		ret = judge_failure(queue, buffer, (int)result);
	else if (queue->reading)
		ret = judge_short_read(queue, buffer, (size_t)result);
	else
		ret = judge_short_write(queue, buffer, (size_t)result);
	if (ret == SEND_AGAIN && queue->downgrades)
		queue->downgrades->short_results++;
	return ret;
}

/* A wait shorter than this means that the completion was already there. */
#define AT_ONCE_NS 20000u

/*
 * Tells the controller the latency of a request. The latency is only known if the queue was waiting
 * for this completion or for one just before. Otherwise a slow program or other work of the
 * processor may have delayed the queue.
 */
static void tell_depth(struct io_queue *queue, const struct io_buffer *buffer, uint64_t asked_ns)
{
	const uint64_t now_ns = base_now_ns();
	bool unseen;

	if (now_ns - asked_ns > AT_ONCE_NS)
		queue->waited_ns = now_ns;
	unseen = now_ns - queue->waited_ns > (now_ns - buffer->sent_ns) / 4;
	io_depth_answered(&queue->depth, buffer->offset, buffer->bytes, buffer->sent_ns, now_ns,
			  unseen || !queue->ready);
}

/*
 * Makes the kernel start writeback of a buffered block, so that fsync finds little left. Errors are
 * ignored: fsync reports them.
 */
static void begin_writeback(const struct io_queue *queue, const struct io_buffer *buffer)
{
	if (!queue->direct && queue->fd >= 0)
		sync_file_range(queue->fd, (off_t)buffer->offset, (off_t)buffer->bytes,
				SYNC_FILE_RANGE_WRITE);
}

/*
 * Waits for one completion and acts on it: resends, records a failure, or frees the buffer and
 * sends the next.
 */
static int reap(struct io_queue *queue, struct base_error *error)
{
	const uint64_t asked_ns = queue->reading ? 0 : base_now_ns();
	struct io_op *op = queue->ops->wait(queue->engine);
	struct io_buffer *buffer;
	int ret;

	if (!op) {
		queue->in_flight = 0;
		queue->engine_failed = true;
		drop_ready(queue);
		return base_fail_reason(error, -EIO, "the %s engine lost requests for \"%s\"",
					queue->ops->id, queue->path);
	}
	buffer = buffer_of(op);
	buffer->in_flight = false;
	queue->in_flight--;
	ret = judge(queue, buffer);
	if (ret == SEND_AGAIN) {
		ret = send(queue, buffer);
	} else if (ret) {
		buffer->failed = ret;
		/* The engine may be at fault; opening another one costs little after a failure. */
		queue->engine_failed = true;
	}
	/* A reader still needs the buffer. */
	if (queue->reading)
		return 0;
	if (!buffer->in_flight)
		tell_depth(queue, buffer, asked_ns);
	if (ret)
		tell_failure(queue, buffer, error);
	else if (!buffer->in_flight)
		begin_writeback(queue, buffer);
	if (!buffer->in_flight)
		io_queue_give_back(queue, buffer);
	if (!ret)
		ret = send_ready(queue, error);
	if (ret)
		drop_ready(queue);
	return ret;
}

/*
 * Returns whether enough buffers are queued. Then the queue waits for completions, so that it sees
 * when they come.
 */
static bool is_ahead(const struct io_queue *queue)
{
	return !queue->reading && queue->in_flight && !queue->depth.options.fixed &&
	       queue->ready_count >= queue->depth.limit * queue->depth.options.targets;
}

int io_queue_take(struct io_queue *queue, struct io_buffer **buffer, struct base_error *error)
{
	int ret;

	while (is_ahead(queue)) {
		ret = reap(queue, error);
		if (ret)
			return ret;
	}
	while (!(*buffer = io_queue_free_buffer(queue))) {
		ret = reap(queue, error);
		if (ret)
			return ret;
	}
	return 0;
}

int io_queue_finish(struct io_queue *queue, struct io_buffer *buffer, struct base_error *error)
{
	int ret = 0;

	while (!ret && buffer->in_flight)
		ret = reap(queue, error);
	if (!ret && buffer->failed)
		ret = tell_failure(queue, buffer, error);
	return ret;
}

/* Share of the requests that may be in flight when the next writer begins: 1 / TAIL_PART. */
#define TAIL_PART 8

/* Least time to create a file on a network filesystem: a few replies of a metadata server. */
#define BEGINNING_NS 20000000u

unsigned io_queue_tail(const struct io_queue *queue, uint64_t submitted, uint64_t took_ns,
		       uint64_t beginning_ns)
{
	const uint64_t left =
		(queue->in_flight + queue->ready_count) * (uint64_t)queue->shape.block_bytes;
	const uint64_t done = submitted - MIN(left, submitted);
	const double requests = (double)done / (double)MAX(took_ns, 1000) *
				(double)MAX(beginning_ns, BEGINNING_NS) /
				(double)queue->shape.block_bytes;
	/* On shared storage, requests that wait delay other writers. */
	const double enough = queue->shape.shared ? queue->depth.limit : queue->limit / TAIL_PART;

	return (unsigned)MIN(MAX(requests, enough), queue->limit / 2.0);
}

int io_queue_reduce(struct io_queue *queue, unsigned most, struct base_error *error)
{
	int ret = 0;

	while (!ret && queue->in_flight && queue->ready_count + queue->in_flight > most)
		ret = reap(queue, error);
	return ret;
}

int io_queue_drain(struct io_queue *queue, struct base_error *error)
{
	int first = 0;

	while (queue->in_flight) {
		int ret = reap(queue, error);

		if (ret && !first)
			first = ret;
	}
	return first;
}
