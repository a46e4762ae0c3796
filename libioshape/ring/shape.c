/* SPDX-License-Identifier: Apache-2.0 */
/* In which requests a file is written: the rules. Numbers in, numbers out. */
#include "ring/ring.h"

#include <stdio.h>

/* A request shorter than this costs more to send than its bytes. */
#define LEAST_BLOCK_BYTES (512 * KIB)
#define MOST_BLOCK_BYTES (64 * MIB)

/* What Lustre's stripes are multiples of; nothing smaller is a stripe. */
#define LEAST_STRIPE_BYTES (64 * KIB)

/*
 * In a row for one storage target, where its speed is not known. More keeps a disk's elevator and a
 * flash array's channels busier, and makes a neighbour's small read wait longer behind it
 * (docs/performance.md); the makespan stops gaining somewhere here.
 */
#define TARGET_BYTES (8 * MIB)

struct ring_shape ring_shape_standard(const struct ring_config *config)
{
	return (struct ring_shape){
		.engine = config->engine,
		.block_bytes = config->block_bytes ? config->block_bytes : RING_BLOCK_BYTES,
		.depth = config->depth ? config->depth : RING_DEPTH,
	};
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

/* What a target writes in so long keeps it busy; and a seek before it is a small part of the time.
 */
#define BURST_S 0.010
#define BURST_SEEKS 10
#define MOST_TARGET_BYTES (32 * MIB)

uint64_t ring_target_bytes(const struct ring_calibration *calibration)
{
	const double burst_s = MAX(BURST_S, BURST_SEEKS * calibration->seek_us * 1e-6);

	if (!calibration->target_bytes_per_s)
		return 0;
	return MIN((uint64_t)((double)calibration->target_bytes_per_s * burst_s),
		   MOST_TARGET_BYTES);
}

uint64_t ring_flight(uint32_t targets, uint64_t stripe_bytes, uint64_t target_bytes)
{
	const uint64_t most = RING_MOST_DEPTH * MOST_BLOCK_BYTES;
	uint64_t each = target_bytes ? target_bytes : TARGET_BYTES;

	/* Whole stripes, and one at least: or targets would idle. */
	each = MAX(each / MAX(stripe_bytes, 1), 1) * MAX(stripe_bytes, 1);
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
		if (!found || ring_flight(part->stripe_count, part->stripe_bytes, 0) >
				      ring_flight(found->stripe_count, found->stripe_bytes, 0))
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
static unsigned buffers_for(uint64_t flight, size_t block_bytes)
{
	uint64_t most = MAX(RING_MOST_LANE_BYTES / block_bytes, 2);
	uint64_t buffers = MAX(flight / block_bytes, 1) + 1;

	return (unsigned)MIN(MIN(buffers, most), RING_MOST_DEPTH);
}

struct ring_shape ring_shape_for(const struct ring_config *config, const struct fs_layout *layout,
				 uint64_t file_bytes, char *why, size_t why_bytes)
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
			shape.depth = buffers_for(
				ring_flight(targets, part->stripe_bytes, config->target_bytes),
				shape.block_bytes);
		/* A request that spans several targets is in nobody's burst. */
		if (!config->depth && part->stripe_count <= RING_MOST_BURSTS &&
		    request <= part->stripe_bytes) {
			shape.burst = (uint32_t)(ring_flight(1, part->stripe_bytes,
							     config->target_bytes) /
						 request);
			shape.burst = MAX(shape.burst, 1);
			shape.targets = targets;
			shape.stripe_bytes = part->stripe_bytes;
		}
		snprintf(why, why_bytes, "%u stripes of %llu%c", targets,
			 (unsigned long long)part->stripe_bytes /
				 (part->stripe_bytes % MIB ? KIB : MIB),
			 part->stripe_bytes % MIB ? 'K' : 'M');
	} else if (config->block_bytes || config->depth) {
		snprintf(why, why_bytes, "blocks as asked for");
	}
	return shape;
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
