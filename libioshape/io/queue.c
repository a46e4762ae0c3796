/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Lanes: the rules for the requests of a file, and the queue of these requests. Engine, number of
 * buffers and their size may change from file to file. The lane sends full buffers when the
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
				  MIN(IO_READ_DEPTH, IO_MOST_LANE_BYTES / shape.block_bytes));
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
 * are worth a request, or an equal part of a stripe that is too large. Returns 0 if requests cannot
 * follow the stripes.
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
static const struct fs_part *stripes_at(const struct fs_layout *layout, uint64_t offset)
{
	const struct fs_part *part;

	for (uint32_t i = 0; i < MIN(layout->count, (uint32_t)FS_MOST_PARTS); i++) {
		part = &layout->parts[i];
		if (offset >= part->begin && offset < part->end)
			return stripe_block(part->stripe_bytes) ? part : NULL;
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
static const struct fs_part *widest(const struct fs_layout *layout, uint64_t file_bytes)
{
	const struct fs_part *part, *found = NULL;

	for (uint32_t i = 0; i < MIN(layout->count, (uint32_t)FS_MOST_PARTS); i++) {
		part = &layout->parts[i];
		if (file_bytes && part->begin >= file_bytes)
			continue;
		if (!stripe_block(part->stripe_bytes))
			continue;
		if (!found || bytes_for(part->stripe_count, part->stripe_bytes) >
				      bytes_for(found->stripe_count, found->stripe_bytes))
			found = part;
	}
	return found;
}

static size_t largest_block(const struct fs_layout *layout, uint64_t file_bytes)
{
	size_t most = 0;

	for (uint32_t i = 0; i < MIN(layout->count, (uint32_t)FS_MOST_PARTS); i++) {
		if (!file_bytes || layout->parts[i].begin < file_bytes)
			most = MAX(most, stripe_block(layout->parts[i].stripe_bytes));
	}
	return most;
}

/* Returns the number of buffers for so many bytes in flight, plus one that is filled meanwhile. */
static unsigned buffers_for(uint64_t bytes, size_t block_bytes)
{
	uint64_t most = MAX(IO_MOST_LANE_BYTES / block_bytes, 2);
	uint64_t buffers = MAX(bytes / block_bytes, 1) + 1;

	return (unsigned)MIN(MIN(buffers, most), IO_MOST_DEPTH);
}

/*
 * Sets the shape for striped files: a request has one stripe, several stripes, or an equal part of
 * one.
 */
static void shape_for_stripes(struct io_shape *shape, const struct io_config *config,
			      const struct fs_layout *layout, const struct fs_part *part,
			      uint64_t file_bytes)
{
	/*
	 * A file on all targets has a very large stripe_count; more targets than buffers do not
	 * matter.
	 */
	const uint32_t targets = MIN(part->stripe_count, IO_MOST_DEPTH);

	shape->request_bytes = config->block_bytes ? config->block_bytes :
						     stripe_block(part->stripe_bytes);
	if (!config->block_bytes)
		shape->block_bytes = largest_block(layout, file_bytes);
	if (!config->depth)
		shape->depth =
			buffers_for(bytes_for(targets, part->stripe_bytes), shape->block_bytes);
	/* Requests that span targets are not attributed to one. */
	if (!config->depth && part->stripe_count <= IO_MOST_TARGETS &&
	    shape->request_bytes <= part->stripe_bytes) {
		shape->targets = targets;
		shape->stripe_bytes = part->stripe_bytes;
	}
}

/* Writes the reason for engine, blocks and depth, for the report. */
static void explain(const struct io_config *config, const struct fs_info *fs,
		    const struct fs_part *part, char *why, size_t why_bytes)
{
	char blocks[64] = "";

	if (config->block_bytes && config->depth)
		snprintf(blocks, sizeof(blocks), "; blocks as requested");
	else if (part)
		snprintf(blocks, sizeof(blocks), "; %u stripes of %llu%c",
			 MIN(part->stripe_count, IO_MOST_DEPTH),
			 (unsigned long long)part->stripe_bytes /
				 (part->stripe_bytes % MIB ? KIB : MIB),
			 part->stripe_bytes % MIB ? 'K' : 'M');
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
	const struct fs_part *part = widest(&fs->layout, file_bytes);
	struct io_shape shape = shape_standard(config);

	shape.engine = choose_engine(config, fs);
	if (part && !(config->block_bytes && config->depth)) {
		shape_for_stripes(&shape, config, &fs->layout, part, file_bytes);
	} else if (!config->block_bytes && !config->depth && fs_cuts_requests(fs->family)) {
		shape.block_bytes = CUT_BYTES;
		shape.depth = buffers_for((IO_DEPTH - 1) * IO_BLOCK_BYTES, CUT_BYTES);
		shape.shared = true;
	}
	explain(config, fs, part, why, why_bytes);
	return shape;
}

size_t io_request_bytes(const struct fs_layout *layout, uint64_t offset, size_t block_bytes)
{
	const struct fs_part *part = stripes_at(layout, offset);
	uint64_t bytes, unit;

	if (!part) {
		/* Not striped here, but the next component may be. */
		part = fs_layout_at(layout, offset);
		return part ? MIN(block_bytes, part->end - offset) : block_bytes;
	}
	bytes = stripe_block(part->stripe_bytes);
	/* Stripes are counted from the beginning of the file, not of the component. */
	unit = MAX(bytes, part->stripe_bytes);
	bytes = MIN(MIN(bytes, block_bytes), unit - offset % unit);
	return MIN(bytes, part->end - offset);
}

/* Most retries in a row of a request without progress. */
#define MAX_RETRIES 100

/* ---- Downgrades for the report --------------------------------------------------------------- */

void io_note(struct io_notes *notes, enum ioshape_downgrade_code code, const char *format, ...)
{
	struct ioshape_downgrade *downgrade;
	va_list args;

	if (!notes)
		return;
	if (notes->count < IOSHAPE_REPORT_DOWNGRADES) {
		downgrade = &notes->downgrades[notes->count];
		downgrade->code = code;
		va_start(args, format);
		vsnprintf(downgrade->sentence, sizeof(downgrade->sentence), format, args);
		va_end(args);
		base_make_plain(downgrade->sentence);
		base_garble(downgrade->sentence);
	}
	notes->count++;
}

void io_notes_report(const struct io_notes *notes, struct ioshape_report *report)
{
	report->downgrade_count = notes->count;
	memcpy(report->downgrades, notes->downgrades, sizeof(report->downgrades));
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

static const struct io_engine_ops *const *engines_of(const struct io_lane *lane)
{
	return lane->config.engines ? lane->config.engines : engines_from(lane->shape.engine);
}

static int try_engine(struct io_lane *lane, const struct io_engine_ops *ops, char *why,
		      size_t why_bytes)
{
	struct io_engine_params params = {
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

static void remember_downgrade(struct io_lane *lane, const char *why)
{
	size_t used = strlen(lane->downgrade);

	if (*why)
		snprintf(lane->downgrade + used, sizeof(lane->downgrade) - used, "%s%s",
			 used ? ", " : "", why);
}

/* Closes the engine; the next file opens another one. */
static void drop_engine(struct io_lane *lane)
{
	lane->ops->close(lane->engine);
	lane->ops = NULL;
	lane->engine_failed = false;
	lane->downgrade[0] = 0;
}

/* ---- Shapes ---------------------------------------------------------------------------------- */

/*
 * Allocates what the shape needs beyond the present buffers and memory. On failure the old memory
 * stays.
 */
static int make_room(struct io_lane *lane, const struct io_shape *shape, struct base_error *error)
{
	const size_t bytes = shape->block_bytes * shape->depth;
	struct io_buffer *buffers;
	uint8_t *memory;

	if (shape->depth > lane->buffers_made) {
		buffers = calloc(shape->depth, sizeof(*buffers));
		if (!buffers)
			return base_no_memory(error, "an I/O queue",
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
		/* The engine may have registered the old memory. */
		if (lane->ops)
			drop_engine(lane);
		base_unmap(lane->memory, lane->memory_bytes);
		lane->memory = memory;
		lane->memory_bytes = bytes;
	}
	return 0;
}

static void cut_buffers(struct io_lane *lane, const struct io_shape *shape)
{
	lane->shape = *shape;
	lane->free = NULL;
	for (unsigned i = shape->depth; i-- > 0;) {
		lane->buffers[i].data = lane->memory + i * shape->block_bytes;
		io_lane_give_back(lane, &lane->buffers[i]);
	}
	lane->limit = MAX(shape->depth - 1, 1u);
}

/* Returns whether the open engine is the one that this shape would open. */
static bool serves(const struct io_lane *lane, const struct io_shape *shape)
{
	return shape->depth <= lane->engine_depth &&
	       (lane->config.engines || shape->engine == lane->engine_asked);
}

int io_lane_shape(struct io_lane *lane, const struct io_shape *shape, struct base_error *error)
{
	const struct io_shape before = lane->shape;
	int ret;

	if (shape->engine == before.engine && shape->block_bytes == before.block_bytes &&
	    shape->depth == before.depth) {
		/* The targets may differ. */
		lane->shape = *shape;
		return 0;
	}
	ret = make_room(lane, shape, error);
	if (!ret && lane->ops && !serves(lane, shape))
		drop_engine(lane);
	/* Even after a failure: make_room() may have replaced the buffers. */
	if (lane->memory)
		cut_buffers(lane, ret ? &before : shape);
	return ret;
}

/* Opens the first engine of the list that the kernel allows. */
static int start_any(struct io_lane *lane, struct base_error *error)
{
	const struct io_engine_ops *const *engines = engines_of(lane);
	char why[200] = "";
	int ret = -ENOTSUP;

	for (size_t i = 0; ret && engines[i]; i++) {
		ret = try_engine(lane, engines[i], why, sizeof(why));
		lane->first_code = i ? lane->first_code : ret;
		remember_downgrade(lane, why);
	}
	if (ret)
		return base_fail(error, ret, "no engine can be used (%s)", lane->downgrade);
	if (*lane->downgrade)
		base_log(&lane->config.log, IOSHAPE_LOG_INFO, "using the %s engine: %s",
			 lane->ops->id, lane->downgrade);
	return 0;
}

int io_lane_start(struct io_lane *lane, struct base_error *error)
{
	const struct io_engine_ops *asked = io_engine_of(lane->config.engine);
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
		return base_fail_with(error, ret, "choose another engine or set engine=auto",
				      "cannot use the requested %s engine (%s)", asked->id, why);
	remember_downgrade(lane, why);
	return 0;
}

/* ---- Lanes ----------------------------------------------------------------------------------- */

int io_lane_open(struct io_lane **out, const struct io_config *config, struct base_error *error)
{
	const struct io_shape shape = shape_standard(config);
	struct io_lane *lane;
	int ret;

	*out = NULL;
	lane = calloc(1, sizeof(*lane));
	if (!lane)
		return base_no_memory(error, "an I/O queue", sizeof(*lane));
	lane->config = *config;
	lane->fd = -1;
	ret = io_lane_shape(lane, &shape, error);
	if (ret)
		io_lane_close(lane);
	else
		*out = lane;
	return ret;
}

void io_lane_close(struct io_lane *lane)
{
	if (!lane)
		return;
	io_lane_drain(lane, NULL);
	if (lane->ops)
		lane->ops->close(lane->engine);
	base_unmap(lane->memory, lane->memory_bytes);
	free(lane->buffers);
	free(lane);
}

void io_lane_fills(struct io_lane *lane, struct base_fresh *fresh)
{
	lane->fresh = fresh;
}

void io_choose(const struct io_config *config, const struct fs_info *fs, uint64_t file_bytes,
	       struct io_choice *choice)
{
	const struct io_shape shape =
		io_shape_for(config, fs, file_bytes, choice->why, sizeof(choice->why));
	const struct io_engine_ops *asked = io_engine_of(config->engine);
	struct base_error error = { 0 };
	struct io_lane *lane;
	int ret = io_lane_open(&lane, config, &error);

	if (!ret)
		ret = io_lane_shape(lane, &shape, &error);
	if (!ret)
		ret = io_lane_start(lane, &error);
	choice->block_bytes = shape.block_bytes;
	choice->depth = shape.depth;
	choice->code = lane ? lane->first_code : ret;
	choice->engine = !ret ? lane->ops->id : asked ? asked->id : "";
	snprintf(choice->note, sizeof(choice->note), "%.255s",
		 ret ? error.sentence : lane->downgrade);
	io_lane_close(lane);
}

/* ---- Beginning and ending a file ------------------------------------------------------------- */

static void begin_depth(struct io_lane *lane)
{
	const struct io_shape *shape = &lane->shape;
	const uint32_t targets = MAX(shape->targets, 1);
	const struct io_depth_options options = {
		.request_bytes = shape->request_bytes ? shape->request_bytes : shape->block_bytes,
		.targets = targets,
		.stripe_bytes = shape->stripe_bytes,
		.most = MAX(lane->limit / targets, 1),
		/* Engines that complete a request on submission have no latencies. */
		.fixed = shape->fixed || !lane->ops->direct,
		.pauses = shape->targets > 0,
		.shared = shape->shared,
	};

	io_depth_begin(&lane->depth, &options);
}

void io_lane_attach(struct io_lane *lane, int fd, const char *path, bool reading,
		    struct io_notes *notes)
{
	lane->fd = fd;
	lane->path = path;
	lane->reading = reading;
	lane->verb = reading ? "read" : "write";
	lane->notes = notes;
	lane->direct = false;
	lane->alignment = 1;
	if (!reading)
		begin_depth(lane);
	lane->file_bytes = UINT64_MAX;
	if (*lane->downgrade)
		io_note(notes, IOSHAPE_DOWNGRADE_ENGINE, "%s", lane->downgrade);
}

void io_lane_detach(struct io_lane *lane)
{
	if (lane->fd < 0)
		return;
	lane->fd = -1;
	lane->direct = false;
	lane->path = NULL;
	lane->notes = NULL;
}

int io_set_direct(int fd, bool on)
{
	int flags = fcntl(fd, F_GETFL);

	if (flags < 0)
		return -errno;
	flags = on ? flags | O_DIRECT : flags & ~O_DIRECT;
	return fcntl(fd, F_SETFL, flags) ? -errno : 0;
}

uint32_t io_lane_direct_alignment(const struct io_lane *lane, const struct fs_info *fs)
{
	/*
	 * If the kernel does not tell the alignment, it is at most a page on every known
	 * filesystem.
	 */
	uint32_t alignment = fs->offset_alignment ? fs->offset_alignment : 4096;

	/* After a short result, the rest has the same offset in the buffer as in the block. */
	alignment = MAX(alignment, fs->memory_alignment);
	if (alignment & (alignment - 1) || lane->shape.block_bytes % alignment)
		return 0;
	return alignment;
}

static int try_direct(struct io_lane *lane, const struct fs_info *fs)
{
	if (!lane->ops->direct || (fs->direct_known && !fs->direct_works) ||
	    !io_lane_direct_alignment(lane, fs))
		return -ENOTSUP;
	return io_set_direct(lane->fd, true);
}

int io_lane_go_direct(struct io_lane *lane, const struct fs_info *fs, struct base_error *error)
{
	bool required = lane->config.direct == IOSHAPE_DIRECT_REQUIRE;
	int ret;

	/* io_lane_attach() has noted why it is this engine. */
	if (lane->config.direct == IOSHAPE_DIRECT_OFF || (!lane->ops->direct && !required))
		return 0;
	if (!required && fs_writes_cached(fs->family, fs->magic))
		return 0;
	ret = try_direct(lane, fs);
	if (ret && required)
		return base_fail_with(error, ret, "use direct=prefer",
				      "cannot use direct I/O on \"%s\" (%s, %s engine), which was "
				      "required",
				      lane->path, fs->type, lane->ops->id);
	if (ret) {
		io_note(lane->notes, IOSHAPE_DOWNGRADE_DIRECT, "no direct I/O on %s: %s", fs->type,
			ioshape_strerror(ret));
		return 0;
	}
	lane->direct = true;
	lane->alignment = io_lane_direct_alignment(lane, fs);
	return 0;
}

/* ---- Buffers --------------------------------------------------------------------------------- */

static struct io_buffer *buffer_of(struct io_op *op)
{
	return (struct io_buffer *)((char *)op - offsetof(struct io_buffer, op));
}

struct io_buffer *io_lane_free_buffer(struct io_lane *lane)
{
	struct io_op *op = lane->free;

	if (!op)
		return NULL;
	lane->free = op->next;
	return buffer_of(op);
}

static void add_part(struct io_buffer *buffer, const uint8_t *from, size_t bytes)
{
	struct iovec *part = &buffer->parts[buffer->op.part_count++];

	memcpy(&part->iov_base, &from, sizeof(from)); /* writev() only reads it */
	part->iov_len = bytes;
}

/*
 * Lists in op.parts the memory of the bytes that have not been written yet. The list stays empty if
 * they are all in the buffer.
 */
static void find_parts(struct io_buffer *buffer)
{
	size_t at = buffer->moved;

	buffer->op.parts = buffer->parts;
	buffer->op.part_count = 0;
	for (unsigned i = 0; i < buffer->loan_count; i++) {
		const struct io_loan *loan = &buffer->loans[i];
		const size_t end = loan->at + loan->bytes;

		if (end <= at)
			continue;
		if (loan->at > at) {
			add_part(buffer, buffer->data + at, loan->at - at);
			at = loan->at;
		}
		add_part(buffer, loan->from + (at - loan->at), end - at);
		at = end;
	}
	if (buffer->op.part_count && at < buffer->bytes)
		add_part(buffer, buffer->data + at, buffer->bytes - at);
}

static int send(struct io_lane *lane, struct io_buffer *buffer)
{
	int ret;

	find_parts(buffer);
	buffer->op.fd = lane->fd;
	buffer->op.kind = lane->reading ? IO_READ : IO_WRITE;
	buffer->op.data = buffer->data + buffer->moved;
	buffer->op.bytes = buffer->bytes - buffer->moved;
	buffer->op.offset = buffer->offset + buffer->moved;
	ret = lane->ops->submit(lane->engine, &buffer->op);
	if (ret) {
		buffer->failed = ret;
		buffer->refused = true;
		lane->engine_failed = true;
		return ret;
	}
	buffer->in_flight = true;
	lane->in_flight++;
	return 0;
}

/* Sends a buffer for the first time, and tells the controller. For writing only. */
static int leave(struct io_lane *lane, struct io_buffer *buffer)
{
	buffer->sent_ns = base_now_ns();
	io_depth_sent(&lane->depth, buffer->offset, buffer->bytes);
	return send(lane, buffer);
}

static int tell_failure(const struct io_lane *lane, const struct io_buffer *buffer,
			struct base_error *error)
{
	if (buffer->refused)
		base_fail(error, buffer->failed,
			  "cannot %s \"%s\" at offset %llu: the %s engine accepted no request",
			  lane->verb, lane->path, (unsigned long long)buffer->op.offset,
			  lane->ops->id);
	else
		base_fail_with(error, buffer->failed, io_remedy(buffer->failed),
			       "cannot %s \"%s\" at offset %llu (%s, %s engine)", lane->verb,
			       lane->path, (unsigned long long)buffer->op.offset,
			       BASE_SIZE(buffer->op.bytes), lane->ops->id);
	base_error_at(error, buffer->op.offset);
	return buffer->failed;
}

static bool may_leave(const struct io_lane *lane, const struct io_buffer *buffer)
{
	return lane->in_flight < lane->limit && io_depth_allows(&lane->depth, buffer->offset);
}

/* Sends the queued buffers that the in-flight limit allows; in order, for each target. */
static int send_ready(struct io_lane *lane, struct base_error *error)
{
	struct io_op **at = &lane->ready;

	while (*at) {
		struct io_buffer *buffer = buffer_of(*at);

		if (!may_leave(lane, buffer)) {
			at = &buffer->op.next;
			continue;
		}
		*at = buffer->op.next;
		lane->ready_count--;
		if (leave(lane, buffer)) {
			io_lane_give_back(lane, buffer);
			return tell_failure(lane, buffer, error);
		}
	}
	return 0;
}

/* Drops the queued buffers after a failure: nothing more is sent. */
static void drop_ready(struct io_lane *lane)
{
	while (lane->ready) {
		struct io_buffer *buffer = buffer_of(lane->ready);

		lane->ready = buffer->op.next;
		io_lane_give_back(lane, buffer);
	}
	lane->ready_count = 0;
}

static void keep_back(struct io_lane *lane, struct io_buffer *buffer)
{
	struct io_op **end = &lane->ready;

	while (*end)
		end = &(*end)->next;
	buffer->op.next = NULL;
	*end = &buffer->op;
	lane->ready_count++;
}

int io_lane_submit(struct io_lane *lane, struct io_buffer *buffer, struct base_error *error)
{
	int ret;

	buffer->moved = 0;
	buffer->retries = 0;
	buffer->in_flight = false;
	buffer->failed = 0;
	buffer->refused = false;
	/* Readers keep the limit themselves, since they take their blocks back in order. */
	if (!lane->reading && (lane->ready || !may_leave(lane, buffer))) {
		keep_back(lane, buffer);
		ret = send_ready(lane, error);
		if (ret)
			drop_ready(lane);
		return ret;
	}
	ret = lane->reading ? send(lane, buffer) : leave(lane, buffer);
	if (ret && !lane->reading) {
		io_lane_give_back(lane, buffer);
		return tell_failure(lane, buffer, error);
	}
	return 0;
}

/*
 * Switches to the page cache if the file accepted O_DIRECT but refuses direct requests. Returns
 * false if `code` means something else or direct I/O is required.
 */
static bool leave_direct(struct io_lane *lane, int code)
{
	if (code != -EINVAL && code != -EOPNOTSUPP)
		return false;
	if (lane->config.direct == IOSHAPE_DIRECT_REQUIRE)
		return false;
	/* Another request has already changed the mode; this one is only sent again. */
	if (!lane->direct)
		return lane->alignment > 1;
	if (io_set_direct(lane->fd, false))
		return false;
	lane->direct = false;
	io_note(lane->notes, IOSHAPE_DOWNGRADE_DIRECT, "continued with buffered I/O: %s",
		ioshape_strerror(code));
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
static int judge_failure(struct io_lane *lane, struct io_buffer *buffer, int code)
{
	const bool passes = code == -EINTR || code == -EAGAIN || code == -ECANCELED;

	if (!passes && !leave_direct(lane, code))
		return code;
	return may_retry(buffer) ? SEND_AGAIN : code;
}

/*
 * Records that `bytes` more bytes were moved. Returns false after too many results without
 * progress. Direct I/O continues only at aligned offsets, so bytes after the last one are moved
 * again.
 */
static bool goes_on(const struct io_lane *lane, struct io_buffer *buffer, size_t bytes)
{
	size_t moved = buffer->moved + bytes;

	if (lane->direct)
		moved -= moved % lane->alignment;
	if (moved <= buffer->moved)
		return may_retry(buffer);
	buffer->moved = moved;
	buffer->retries = 0;
	return true;
}

static int judge_short_write(const struct io_lane *lane, struct io_buffer *buffer, size_t bytes)
{
	return goes_on(lane, buffer, bytes) ? SEND_AGAIN : -EIO;
}

/*
 * Decides what to do about a short read. The end of the file is no failure, whether it was known or
 * not.
 */
static int judge_short_read(const struct io_lane *lane, struct io_buffer *buffer, size_t bytes)
{
	const bool ends = !bytes || buffer->offset + buffer->moved + bytes >= lane->file_bytes;

	if (!ends && goes_on(lane, buffer, bytes))
		return SEND_AGAIN;
	buffer->moved += bytes;
	return 0;
}

/*
 * Decides what a completion means. Returns 0 if the buffer is done, SEND_AGAIN, or a negative
 * errno.
 */
static int judge(struct io_lane *lane, struct io_buffer *buffer)
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
		ret = judge_failure(lane, buffer, (int)result);
	else if (lane->reading)
		ret = judge_short_read(lane, buffer, (size_t)result);
	else
		ret = judge_short_write(lane, buffer, (size_t)result);
	if (ret == SEND_AGAIN && lane->notes)
		lane->notes->short_results++;
	return ret;
}

/* A wait shorter than this means that the completion was already there. */
#define AT_ONCE_NS 20000u

/*
 * Tells the controller the latency of a request. The latency is only known if the lane was waiting
 * for this completion or for one just before. Otherwise a slow program or other work of the
 * processor may have delayed the lane.
 */
static void tell_depth(struct io_lane *lane, const struct io_buffer *buffer, uint64_t asked_ns)
{
	const uint64_t now_ns = base_now_ns();
	bool unseen;

	if (now_ns - asked_ns > AT_ONCE_NS)
		lane->waited_ns = now_ns;
	unseen = now_ns - lane->waited_ns > (now_ns - buffer->sent_ns) / 4;
	io_depth_answered(&lane->depth, buffer->offset, buffer->bytes, buffer->sent_ns, now_ns,
			  unseen || !lane->ready);
}

/*
 * Makes the kernel start writeback of a buffered block, so that fsync finds little left. Errors are
 * ignored: fsync reports them.
 */
static void begin_writeback(const struct io_lane *lane, const struct io_buffer *buffer)
{
	if (!lane->direct && lane->fd >= 0)
		sync_file_range(lane->fd, (off_t)buffer->offset, (off_t)buffer->bytes,
				SYNC_FILE_RANGE_WRITE);
}

/*
 * Waits for one completion and acts on it: resends, records a failure, or frees the buffer and
 * sends the next.
 */
static int reap(struct io_lane *lane, struct base_error *error)
{
	const uint64_t asked_ns = lane->reading ? 0 : base_now_ns();
	struct io_op *op = lane->ops->wait(lane->engine);
	struct io_buffer *buffer;
	int ret;

	if (!op) {
		lane->in_flight = 0;
		lane->engine_failed = true;
		drop_ready(lane);
		return base_refuse(error, -EIO, "the %s engine lost requests for \"%s\"",
				   lane->ops->id, lane->path);
	}
	buffer = buffer_of(op);
	buffer->in_flight = false;
	lane->in_flight--;
	ret = judge(lane, buffer);
	if (ret == SEND_AGAIN) {
		ret = send(lane, buffer);
	} else if (ret) {
		buffer->failed = ret;
		/* The engine may be at fault; opening another one costs little after a failure. */
		lane->engine_failed = true;
	}
	/* A reader still needs the buffer. */
	if (lane->reading)
		return 0;
	if (!buffer->in_flight)
		tell_depth(lane, buffer, asked_ns);
	if (ret)
		tell_failure(lane, buffer, error);
	else if (!buffer->in_flight)
		begin_writeback(lane, buffer);
	if (!buffer->in_flight)
		io_lane_give_back(lane, buffer);
	if (!ret)
		ret = send_ready(lane, error);
	if (ret)
		drop_ready(lane);
	return ret;
}

/*
 * Returns whether enough buffers are queued. Then the lane waits for completions, so that it sees
 * when they come.
 */
static bool is_ahead(const struct io_lane *lane)
{
	return !lane->reading && lane->in_flight && !lane->depth.options.fixed &&
	       lane->ready_count >= lane->depth.limit * lane->depth.options.targets;
}

int io_lane_take(struct io_lane *lane, struct io_buffer **buffer, struct base_error *error)
{
	int ret;

	while (is_ahead(lane)) {
		ret = reap(lane, error);
		if (ret)
			return ret;
	}
	while (!(*buffer = io_lane_free_buffer(lane))) {
		ret = reap(lane, error);
		if (ret)
			return ret;
	}
	return 0;
}

int io_lane_finish(struct io_lane *lane, struct io_buffer *buffer, struct base_error *error)
{
	int ret = 0;

	while (!ret && buffer->in_flight)
		ret = reap(lane, error);
	if (!ret && buffer->failed)
		ret = tell_failure(lane, buffer, error);
	return ret;
}

/* Share of the requests that may be in flight when the next writer begins: 1 / TAIL_PART. */
#define TAIL_PART 8

/* Least time to create a file on a network filesystem: a few replies of a metadata server. */
#define BEGINNING_NS 20000000u

unsigned io_lane_tail(const struct io_lane *lane, uint64_t submitted, uint64_t took_ns,
		      uint64_t beginning_ns)
{
	const uint64_t left =
		(lane->in_flight + lane->ready_count) * (uint64_t)lane->shape.block_bytes;
	const uint64_t done = submitted - MIN(left, submitted);
	const double requests = (double)done / (double)MAX(took_ns, 1000) *
				(double)MAX(beginning_ns, BEGINNING_NS) /
				(double)lane->shape.block_bytes;
	/* On shared storage, requests that wait delay other writers. */
	const double enough = lane->shape.shared ? lane->depth.limit : lane->limit / TAIL_PART;

	return (unsigned)MIN(MAX(requests, enough), lane->limit / 2.0);
}

int io_lane_settle(struct io_lane *lane, unsigned most, struct base_error *error)
{
	int ret = 0;

	while (!ret && lane->in_flight && lane->ready_count + lane->in_flight > most)
		ret = reap(lane, error);
	return ret;
}

int io_lane_drain(struct io_lane *lane, struct base_error *error)
{
	int first = 0;

	while (lane->in_flight) {
		int ret = reap(lane, error);

		if (ret && !first)
			first = ret;
	}
	return first;
}
