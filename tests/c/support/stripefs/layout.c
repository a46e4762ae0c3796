/* SPDX-License-Identifier: Apache-2.0 */
/* Mapping from bytes of a file to objects on targets. */
#include "stripefs.h"

#include <errno.h>
#include <string.h>

/*
 * Next target for a new file: round robin over all files, like an allocator whose targets all have
 * one size.
 */
static unsigned int next_target;

const struct pool *pool_find(const char *name)
{
	for (unsigned int i = 0; i < options.pool_count; i++)
		if (strncmp(options.pools[i].name, name, POOL_NAME_BYTES) == 0)
			return &options.pools[i];
	return NULL;
}

void layout_default(struct layout *layout)
{
	if (options.progressive.count) {
		*layout = options.progressive;
		return;
	}
	memset(layout, 0, sizeof(*layout));
	layout->count = 1;
	layout->components[0] = (struct component){
		.end = UINT64_MAX,
		.stripe_size = options.stripe_size,
		.count = (uint16_t)options.stripe_count,
		.first = UINT16_MAX,
		.object_size = options.play == PLAY_CEPH ? options.stripe_size : 0,
	};
}

static int make_component(struct component *component)
{
	const struct pool *pool = component->pool[0] ? pool_find(component->pool) : NULL;
	const unsigned int there = pool ? pool->count : options.targets;
	unsigned int count = component->count, first = component->first;

	if (component->made)
		return 0;
	component->made = true;
	if (component->by_hand) {
		component->spread = component->count;
		return 0;
	}
	if (component->on_mds) {
		component->count = 1;
		component->spread = 1;
		component->targets[0] = (uint16_t)options.targets;
		return 0;
	}
	if (count == 0)
		count = options.stripe_count;
	/*
	 * A stripe count above the number of targets is cut to that number, unless a target may
	 * hold several stripes.
	 */
	if (count == UINT16_MAX || (count > there && !component->overstriped))
		count = there;
	if (count > MAX_TARGETS)
		count = MAX_TARGETS;
	if (first == UINT16_MAX) {
		first = next_target++;
	} else if (pool) {
		/* The first target is numbered within the filesystem, not within the pool. */
		for (first = 0; first < there; first++)
			if (pool->targets[first] == component->first)
				break;
		if (first == there)
			return -EINVAL;
	}
	component->count = (uint16_t)count;
	component->spread = component->object_size ? (uint16_t)there : (uint16_t)count;
	for (unsigned int i = 0; i < component->spread; i++) {
		const unsigned int index = (first + i) % there;

		component->targets[i] = pool ? pool->targets[index] : (uint16_t)index;
	}
	return 0;
}

int layout_create(struct layout *layout, const struct layout *wish)
{
	*layout = *wish;
	layout->generation = 0;
	for (unsigned int i = 0; i < layout->count; i++) {
		struct component *component = &layout->components[i];

		component->made = false;
		if (!component->stripe_size)
			component->stripe_size = options.stripe_size;
	}
	return layout->count ? make_component(&layout->components[0]) : 0;
}

int layout_make(struct layout *layout, uint64_t offset, uint64_t bytes)
{
	int result = 0;

	for (unsigned int i = 0; i < layout->count && !result; i++) {
		struct component *component = &layout->components[i];

		if (component->made || offset >= component->end ||
		    offset + bytes <= component->start)
			continue;
		result = make_component(component);
		layout->generation++;
	}
	return result;
}

const struct component *layout_component(const struct layout *layout, uint64_t offset)
{
	for (unsigned int i = 0; i < layout->count; i++)
		if (offset >= layout->components[i].start && offset < layout->components[i].end)
			return &layout->components[i];
	return NULL;
}

/* Returns the object that holds a byte, and how many bytes are contiguous in it from there on. */
static struct piece locate(const struct component *component, unsigned int index, uint64_t offset)
{
	/* Stripes are counted from the beginning of the file in every component. */
	const uint64_t stripe = offset / component->stripe_size;
	const uint64_t within = offset % component->stripe_size;
	const uint64_t column = stripe % component->count, row = stripe / component->count;
	struct piece piece = {
		.target = component->targets[column],
		.object = (uint32_t)(index << 24 | column),
		.offset = row * component->stripe_size + within,
		.bytes = (uint32_t)(component->stripe_size - within),
	};

	if (component->object_size) {
		const uint64_t rows = component->object_size / component->stripe_size;
		const uint64_t object = row / rows * component->count + column;

		/* CephFS may store these objects anywhere; the model places them round robin. */
		piece.target = component->targets[object % component->spread];
		piece.object = (uint32_t)object;
		piece.offset = row % rows * component->stripe_size + within;
	}
	return piece;
}

int layout_target(const struct layout *layout, uint64_t offset)
{
	const struct component *component = layout_component(layout, offset);

	if (!component || !component->made)
		return -EIO;
	return locate(component, 0, offset).target;
}

int layout_split(const struct layout *layout, uint64_t offset, uint32_t bytes,
		 struct piece pieces[static MAX_PARTS])
{
	int count = 0;

	while (bytes) {
		const struct component *component = layout_component(layout, offset);
		struct piece piece;
		int same = 0;

		if (!component || !component->made)
			return -EIO;
		piece = locate(component, (unsigned int)(component - layout->components), offset);
		if (piece.bytes > bytes)
			piece.bytes = bytes;
		if (piece.bytes > component->end - offset)
			piece.bytes = (uint32_t)(component->end - offset);
		/* Pieces that are contiguous in an object are one request to the target. */
		while (same < count && (pieces[same].object != piece.object ||
					pieces[same].offset + pieces[same].bytes != piece.offset))
			same++;
		if (same < count)
			pieces[same].bytes += piece.bytes;
		else if (count < MAX_PARTS)
			pieces[count++] = piece;
		else
			return -EIO;
		offset += piece.bytes;
		bytes -= piece.bytes;
	}
	return count;
}
