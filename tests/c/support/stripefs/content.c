/* SPDX-License-Identifier: Apache-2.0 */
/* Contents of files: blocks of the store, by offset in the file. */
#include "stripefs.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

static const char zeros[CHUNK_BYTES];

static uint16_t chunk_bits(uint32_t first, uint32_t end)
{
	return (uint16_t)((1u << end) - (1u << first));
}

/*
 * Clips [offset, offset + bytes) to the block in which it begins. Stores the beginning within the
 * block in `from` and returns the end.
 */
static uint32_t in_block(uint64_t offset, uint64_t bytes, uint32_t *from)
{
	*from = (uint32_t)(offset % BLOCK_BYTES);
	return bytes < BLOCK_BYTES - *from ? *from + (uint32_t)bytes : BLOCK_BYTES;
}

static int grow(struct node *node, uint64_t end)
{
	const size_t count = (end + BLOCK_BYTES - 1) / BLOCK_BYTES;
	size_t room = node->block_count;
	struct block *blocks;

	if (count <= node->block_count)
		return 0;
	room = room * 2 > count ? room * 2 : count;
	blocks = realloc(node->blocks, room * sizeof(blocks[0]));
	if (!blocks)
		return -ENOSPC;
	memset(blocks + node->block_count, 0, (room - node->block_count) * sizeof(blocks[0]));
	node->blocks = blocks;
	node->block_count = room;
	return 0;
}

static int take_chunk(struct node *node, uint64_t offset)
{
	const int index = layout_target(node->layout, offset);
	struct target *target;

	if (index < 0)
		return index;
	target = &targets[index];
	if (target->full || target->used_bytes + CHUNK_BYTES > target->capacity_bytes)
		return -ENOSPC;
	target->used_bytes += CHUNK_BYTES;
	sysfs_renew();
	node->stat.st_blocks += CHUNK_BYTES / 512;
	return 0;
}

static void drop_chunk(struct node *node, uint64_t offset)
{
	const int index = layout_target(node->layout, offset);

	if (index >= 0)
		targets[index].used_bytes -= CHUNK_BYTES;
	sysfs_renew();
	node->stat.st_blocks -= CHUNK_BYTES / 512;
}

int content_reserve(struct node *node, uint64_t offset, uint64_t bytes)
{
	const uint64_t end = offset + bytes;
	int result = grow(node, end);

	for (uint64_t at = offset - offset % CHUNK_BYTES; !result && at < end; at += CHUNK_BYTES) {
		struct block *block = &node->blocks[at / BLOCK_BYTES];
		const uint16_t bit = (uint16_t)(1u << at % BLOCK_BYTES / CHUNK_BYTES);

		if (block->reserved & bit)
			continue;
		result = take_chunk(node, at);
		if (!result)
			block->reserved |= bit;
	}
	return result;
}

/* Zeroes the rest of the first and the last chunk if they are written for the first time. */
static void clear_around(struct block *block, char *memory, uint32_t from, uint32_t to)
{
	const uint32_t first = from / CHUNK_BYTES, last = (to - 1) / CHUNK_BYTES;

	if (!(block->written & 1u << first))
		memset(memory + first * CHUNK_BYTES, 0, from - first * CHUNK_BYTES);
	if (!(block->written & 1u << last))
		memset(memory + to, 0, (last + 1) * CHUNK_BYTES - to);
}

int content_write(struct node *node, uint64_t offset, const char *buffer, uint32_t bytes,
		  uint32_t *staged)
{
	while (bytes) {
		struct block *block = &node->blocks[offset / BLOCK_BYTES];
		uint32_t from;
		const uint32_t to = in_block(offset, bytes, &from);

		if (*staged && to - from == BLOCK_BYTES && buffer == store_block(*staged)) {
			/* No copy: the block that the kernel filled becomes the file's. */
			store_give(block->index);
			block->index = *staged;
			*staged = 0;
		} else {
			if (!block->index)
				block->index = store_take();
			if (!block->index)
				return -ENOSPC;
			clear_around(block, store_block(block->index), from, to);
			memcpy(store_block(block->index) + from, buffer, to - from);
		}
		block->written |= chunk_bits(from / CHUNK_BYTES, (to - 1) / CHUNK_BYTES + 1);
		offset += to - from;
		buffer += to - from;
		bytes -= to - from;
	}
	return 0;
}

int content_read(struct node *node, uint64_t offset, uint32_t bytes, struct iovec *parts)
{
	int count = 0;

	while (bytes) {
		const struct block *block = offset / BLOCK_BYTES < node->block_count ?
						    &node->blocks[offset / BLOCK_BYTES] :
						    NULL;
		const uint32_t from = (uint32_t)(offset % BLOCK_BYTES);
		const uint32_t chunk = from / CHUNK_BYTES;
		uint32_t length = CHUNK_BYTES - from % CHUNK_BYTES;
		const char *data = zeros;

		if (length > bytes)
			length = bytes;
		if (block && block->written & 1u << chunk)
			data = store_block(block->index) + from;
		if (count && (char *)parts[count - 1].iov_base + parts[count - 1].iov_len == data &&
		    data != zeros)
			parts[count - 1].iov_len += length;
		else
			parts[count++] = (struct iovec){ (char *)(uintptr_t)data, length };
		offset += length;
		bytes -= length;
	}
	return count;
}

/* Frees whole chunks and zeroes the bytes in partly punched ones. */
static void punch_block(struct node *node, uint64_t offset, uint32_t from, uint32_t to)
{
	struct block *block = &node->blocks[offset / BLOCK_BYTES];
	const uint64_t base = offset - offset % BLOCK_BYTES;

	for (uint32_t at = from; at < to;) {
		const uint32_t chunk = at / CHUNK_BYTES;
		const uint32_t end = (chunk + 1) * CHUNK_BYTES < to ? (chunk + 1) * CHUNK_BYTES :
								      to;
		const uint16_t bit = (uint16_t)(1u << chunk);

		if (end - at == CHUNK_BYTES) {
			if (block->reserved & bit)
				drop_chunk(node, base + at);
			block->reserved &= (uint16_t)~bit;
			block->written &= (uint16_t)~bit;
		} else if (block->written & bit) {
			memset(store_block(block->index) + at, 0, end - at);
		}
		at = end;
	}
	if (!block->written) {
		store_give(block->index);
		block->index = 0;
	}
}

void content_punch(struct node *node, uint64_t offset, uint64_t bytes)
{
	const uint64_t end = offset + bytes;

	while (offset < end && offset / BLOCK_BYTES < node->block_count) {
		uint32_t from;
		const uint32_t to = in_block(offset, end - offset, &from);

		punch_block(node, offset, from, to);
		offset += to - from;
	}
}

int content_truncate(struct node *node, uint64_t size)
{
	const uint64_t held = (uint64_t)node->block_count * BLOCK_BYTES;

	/* Space that was reserved beyond the new end is freed, too. */
	if (size < held) {
		const uint64_t whole = (size + CHUNK_BYTES - 1) / CHUNK_BYTES * CHUNK_BYTES;

		content_punch(node, size, whole - size);
		content_punch(node, whole, held - whole);
	}
	node->stat.st_size = (off_t)size;
	return 0;
}
