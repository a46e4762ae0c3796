/* SPDX-License-Identifier: Apache-2.0 */
/* In which requests a file is written: the rules. Numbers in, numbers out. */
#include "ring/ring.h"

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

struct ring_shape ring_shape_standard(const struct ring_config *config)
{
	return (struct ring_shape){
		.engine = config->engine,
		.block_bytes = config->block_bytes ? config->block_bytes : RING_BLOCK_BYTES,
		.depth = config->depth ? config->depth : RING_DEPTH,
		.fixed = config->depth != 0,
	};
}

struct ring_shape ring_shape_to_read(const struct ring_config *config, uint64_t magic,
				     uint64_t bytes)
{
	struct ring_shape shape = ring_shape_standard(config);

	if (shape.engine == IOSHAPE_ENGINE_AUTO && magic == FS_FUSE_MAGIC)
		shape.engine = IOSHAPE_ENGINE_URING_ASYNC;
	if (!config->depth && bytes > shape.depth * shape.block_bytes)
		shape.depth = MAX(shape.depth,
				  MIN(RING_READ_DEPTH, RING_MOST_LANE_BYTES / shape.block_bytes));
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

size_t ring_stripe_block(uint64_t stripe_bytes)
{
	if (stripe_bytes < LEAST_STRIPE_BYTES || stripe_bytes % 4096)
		return 0;
	if (stripe_bytes > MOST_BLOCK_BYTES)
		return part_of(stripe_bytes);
	return stripe_bytes * ((LEAST_BLOCK_BYTES + stripe_bytes - 1) / stripe_bytes);
}

const struct fs_part *ring_stripes_at(const struct fs_layout *layout, uint64_t offset)
{
	const struct fs_part *part;

	for (uint32_t i = 0; i < MIN(layout->count, (uint32_t)FS_MOST_PARTS); i++) {
		part = &layout->parts[i];
		if (offset >= part->begin && offset < part->end)
			return ring_stripe_block(part->stripe_bytes) ? part : NULL;
	}
	return NULL;
}

/* Buffers for so many targets, in bytes. */
static uint64_t bytes_for(uint32_t targets, uint64_t stripe_bytes)
{
	const uint64_t most = RING_MOST_DEPTH * MOST_BLOCK_BYTES;
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
		if (!ring_stripe_block(part->stripe_bytes))
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
			most = MAX(most, ring_stripe_block(layout->parts[i].stripe_bytes));
	}
	return most;
}

/* Buffers for so much in flight: one more, which is filled meanwhile. */
static unsigned buffers_for(uint64_t bytes, size_t block_bytes)
{
	uint64_t most = MAX(RING_MOST_LANE_BYTES / block_bytes, 2);
	uint64_t buffers = MAX(bytes / block_bytes, 1) + 1;

	return (unsigned)MIN(MIN(buffers, most), RING_MOST_DEPTH);
}

struct ring_shape ring_shape_for(const struct ring_config *config, enum fs_family family,
				 const struct fs_layout *layout, uint64_t file_bytes, char *why,
				 size_t why_bytes)
{
	const struct fs_part *part = widest(layout, file_bytes);
	struct ring_shape shape = ring_shape_standard(config);
	uint32_t targets;
	size_t request;

	*why = 0;
	if (config->block_bytes && config->depth) {
		snprintf(why, why_bytes, "blocks as asked for");
	} else if (part) {
		/* All of them, however many that are: as many as there can be requests. */
		targets = MIN(part->stripe_count, RING_MOST_DEPTH);
		request = config->block_bytes ? config->block_bytes :
						ring_stripe_block(part->stripe_bytes);
		if (!config->block_bytes)
			shape.block_bytes = largest_block(layout, file_bytes);
		if (!config->depth)
			shape.depth = buffers_for(bytes_for(targets, part->stripe_bytes),
						  shape.block_bytes);
		shape.request_bytes = request;
		/* A request that spans several targets is nobody's. */
		if (!config->depth && part->stripe_count <= RING_MOST_TARGETS &&
		    request <= part->stripe_bytes) {
			shape.targets = targets;
			shape.stripe_bytes = part->stripe_bytes;
		}
		snprintf(why, why_bytes, "%u stripes of %llu%c", targets,
			 (unsigned long long)part->stripe_bytes /
				 (part->stripe_bytes % MIB ? KIB : MIB),
			 part->stripe_bytes % MIB ? 'K' : 'M');
	} else if (config->block_bytes || config->depth) {
		snprintf(why, why_bytes, "blocks as asked for");
	} else if (fs_cuts_requests(family)) {
		shape.block_bytes = CUT_BYTES;
		shape.depth = buffers_for((RING_DEPTH - 1) * RING_BLOCK_BYTES, CUT_BYTES);
		shape.shared = true;
		snprintf(why, why_bytes, "requests as the kernel cuts them");
	}
	return shape;
}

void ring_shape_recall(struct ring_shape *shape, const struct ring_taught *taught)
{
	const uint64_t most = RING_MOST_LANE_BYTES / shape->block_bytes;

	shape->taught = *taught;
	/* All that could be was in flight: perhaps more is better. */
	if (!shape->fixed && !shape->targets && taught->window + 1 >= shape->depth)
		shape->depth = (unsigned)MAX(MIN(2 * shape->depth, most), shape->depth);
}

size_t ring_request_bytes(const struct fs_layout *layout, uint64_t offset, size_t block_bytes)
{
	const struct fs_part *part = ring_stripes_at(layout, offset);
	uint64_t bytes, unit;

	if (!part) {
		/* Not striped here, but perhaps further on. */
		part = fs_layout_at(layout, offset);
		return part ? MIN(block_bytes, part->end - offset) : block_bytes;
	}
	bytes = ring_stripe_block(part->stripe_bytes);
	/* Stripes are counted from the beginning of the file, wherever the part begins. */
	unit = MAX(bytes, part->stripe_bytes);
	bytes = MIN(MIN(bytes, block_bytes), unit - offset % unit);
	return MIN(bytes, part->end - offset);
}
