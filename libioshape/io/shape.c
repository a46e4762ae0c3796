/* SPDX-License-Identifier: Apache-2.0 */
/* In which requests a file is written: the rules. Numbers in, numbers out. */
#include "io/queue.h"

#include <stdio.h>

/* A request shorter than this costs more to send than its bytes. */
#define LEAST_BLOCK_BYTES (512 * KIB)
#define MOST_BLOCK_BYTES (64 * MIB)

/* What Lustre's stripes are multiples of; nothing smaller is a stripe. */
#define LEAST_STRIPE_BYTES (64 * KIB)

/* Where the kernel cuts what is longer, and sends all the parts at once: for them to be counted one
 * by one, a request is no longer either. */
#define CUT_BYTES (1 * MIB)

/* Memory for one storage target. How much of it is in flight is not decided here (depth.c). */
#define TARGET_BYTES (8 * MIB)

struct io_shape io_shape_standard(const struct io_config *config)
{
	return (struct io_shape){
		.engine = config->engine,
		.block_bytes = config->block_bytes ? config->block_bytes : IO_BLOCK_BYTES,
		.depth = config->depth ? config->depth : IO_DEPTH,
		.fixed = config->depth != 0,
	};
}

/*
 * The one rule for engines. A client of a network filesystem, or of FUSE, may serve a request in
 * the call that submits it, and the requests of a file one after the other: there the kernel's
 * workers submit. docs/performance.md ("Which engine") has the measurements.
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
	struct io_shape shape = io_shape_standard(config);

	shape.engine = choose_engine(config, fs);
	if (!config->depth && bytes > shape.depth * shape.block_bytes)
		shape.depth = MAX(shape.depth,
				  MIN(IO_READ_DEPTH, IO_MOST_LANE_BYTES / shape.block_bytes));
	return shape;
}

/* The least number of equal parts, each whole pages, that are small enough; or uneven ones. */
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
 * Bytes of a request on stripes of this size: one stripe, or as many small ones as make a request
 * worth while, or an even part of one too large. 0: no use can be made of them.
 */
static size_t stripe_block(uint64_t stripe_bytes)
{
	if (stripe_bytes < LEAST_STRIPE_BYTES || stripe_bytes % 4096)
		return 0;
	if (stripe_bytes > MOST_BLOCK_BYTES)
		return part_of(stripe_bytes);
	return stripe_bytes * ((LEAST_BLOCK_BYTES + stripe_bytes - 1) / stripe_bytes);
}

/* The part of a file's layout that byte `offset` is in; NULL if it is not striped there. */
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

/* Buffers for so many targets, in bytes. */
static uint64_t bytes_for(uint32_t targets, uint64_t stripe_bytes)
{
	const uint64_t most = IO_MOST_DEPTH * MOST_BLOCK_BYTES;
	/* Whole stripes, and one at least: or targets would idle. */
	const uint64_t each = MAX(TARGET_BYTES / MAX(stripe_bytes, 1), 1) * MAX(stripe_bytes, 1);

	targets = MAX(targets, 1);
	return each > most / targets ? most : each * targets;
}

/* The part whose requests are largest, of those that a file of so many bytes reaches: buffers hold
 * them all. */
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

/* Buffers for so much in flight: one more, which is filled meanwhile. */
static unsigned buffers_for(uint64_t bytes, size_t block_bytes)
{
	uint64_t most = MAX(IO_MOST_LANE_BYTES / block_bytes, 2);
	uint64_t buffers = MAX(bytes / block_bytes, 1) + 1;

	return (unsigned)MIN(MIN(buffers, most), IO_MOST_DEPTH);
}

/* Requests of one stripe each, or of an even part of one. */
static void shape_for_stripes(struct io_shape *shape, const struct io_config *config,
			      const struct fs_layout *layout, const struct fs_part *part,
			      uint64_t file_bytes)
{
	/* All of them, however many that are: as many as there can be requests. */
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

/* Tells the report how engine, blocks and depth were chosen. */
static void explain(const struct io_config *config, const struct fs_info *fs,
		    const struct fs_part *part, char *why, size_t why_bytes)
{
	char blocks[64] = "";

	if (config->block_bytes && config->depth)
		snprintf(blocks, sizeof(blocks), "; blocks as asked for");
	else if (part)
		snprintf(blocks, sizeof(blocks), "; %u stripes of %llu%c",
			 MIN(part->stripe_count, IO_MOST_DEPTH),
			 (unsigned long long)part->stripe_bytes /
				 (part->stripe_bytes % MIB ? KIB : MIB),
			 part->stripe_bytes % MIB ? 'K' : 'M');
	else if (config->block_bytes || config->depth)
		snprintf(blocks, sizeof(blocks), "; blocks as asked for");
	else if (fs_cuts_requests(fs->family))
		snprintf(blocks, sizeof(blocks), "; requests as the kernel cuts them");
	snprintf(why, why_bytes, "%s%s",
		 config->engine != IOSHAPE_ENGINE_AUTO             ? "engine as asked for" :
		 choose_engine(config, fs) == IOSHAPE_ENGINE_URING ? "local filesystem" :
								     "network filesystem",
		 blocks);
}

struct io_shape io_shape_for(const struct io_config *config, const struct fs_info *fs,
			     uint64_t file_bytes, char *why, size_t why_bytes)
{
	const struct fs_part *part = widest(&fs->layout, file_bytes);
	struct io_shape shape = io_shape_standard(config);

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
		/* Not striped here, but perhaps further on. */
		part = fs_layout_at(layout, offset);
		return part ? MIN(block_bytes, part->end - offset) : block_bytes;
	}
	bytes = stripe_block(part->stripe_bytes);
	/* Stripes are counted from the beginning of the file, wherever the part begins. */
	unit = MAX(bytes, part->stripe_bytes);
	bytes = MIN(MIN(bytes, block_bytes), unit - offset % unit);
	return MIN(bytes, part->end - offset);
}
