/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A client's write-back cache, separate for each file as on the nodes of a cluster. A write is
 * answered when the bytes are in the client's memory. They leave in whole stripes, with a limited
 * number of requests in flight for each file.
 *
 * The kernel's page cache cannot simulate this: all processes of this machine share it, and it
 * writes file after file.
 */
#include "stripefs.h"

#include <stdlib.h>

struct dirty {
	struct dirty *next;
	uint64_t offset, sequence;
	uint32_t bytes;
};

uint64_t client_oldest(const struct node *node)
{
	return node->leaving->sequence;
}

/* Sends queued requests until the file's in-flight limit is reached. */
void client_send(struct node *node)
{
	while (node->leaving && node->in_flight < options.window) {
		struct dirty *first = node->leaving;

		node->leaving = first->next;
		node->in_flight++;
		model_write_back(node, first->offset, first->bytes, first->sequence);
		free(first);
	}
}

static void put_leaving(struct node *node, uint64_t offset, uint32_t bytes)
{
	struct dirty *last = malloc(sizeof(*last)), **end = &node->leaving;

	if (!last)
		abort();
	*last = (struct dirty){
		.offset = offset,
		.sequence = model_sequence(),
		.bytes = bytes,
	};
	while (*end)
		end = &(*end)->next;
	*end = last;
}

/*
 * Returns the offset at which a request that begins at `offset` must end: at the end of its stripe,
 * and after at most BLOCK_BYTES.
 */
static uint64_t end_of_request(const struct node *node, uint64_t offset)
{
	const struct component *component = layout_component(node->layout, offset);
	const uint64_t stripe = component ? component->stripe_size : BLOCK_BYTES;
	const uint64_t unit = stripe < BLOCK_BYTES ? stripe : BLOCK_BYTES;

	return offset - offset % unit + unit;
}

static void cut(struct node *node, bool all)
{
	while (node->dirty_begin < node->dirty_end) {
		uint64_t end = end_of_request(node, node->dirty_begin);

		if (end > node->dirty_end && !all)
			break;
		end = end < node->dirty_end ? end : node->dirty_end;
		put_leaving(node, node->dirty_begin, (uint32_t)(end - node->dirty_begin));
		node->dirty_begin = end;
	}
	client_send(node);
}

void client_write(struct node *node, uint64_t offset, uint32_t bytes)
{
	if (offset != node->dirty_end) {
		cut(node, true);
		node->dirty_begin = offset;
	}
	node->dirty_end = offset + bytes;
	cut(node, false);
}

void client_flush(struct node *node)
{
	cut(node, true);
}

void client_sent(struct node *node)
{
	node->in_flight--;
	client_send(node);
}
