/* SPDX-License-Identifier: Apache-2.0 */
/* Bursts of requests: how much of a file a storage target is given at a time. */
#include "ring/lane.h"

#include <string.h>

void ring_bursts_begin(struct ring_bursts *bursts, const struct ring_shape *shape)
{
	memset(bursts, 0, sizeof(*bursts));
	if (!shape || !shape->burst || !shape->stripe_bytes || shape->targets > RING_MOST_BURSTS)
		return;
	bursts->targets = shape->targets;
	bursts->stripe_bytes = shape->stripe_bytes;
	bursts->length = shape->burst;
}

static uint32_t target_of(const struct ring_bursts *bursts, uint64_t offset)
{
	return (uint32_t)(offset / bursts->stripe_bytes % bursts->targets);
}

bool ring_burst_has_room(const struct ring_bursts *bursts, uint64_t offset)
{
	uint32_t target;

	if (!bursts->targets)
		return true;
	target = target_of(bursts, offset);
	return !bursts->flying[target] || bursts->sent[target] < bursts->length;
}

void ring_burst_sent(struct ring_bursts *bursts, uint64_t offset)
{
	uint32_t target;

	if (!bursts->targets)
		return;
	target = target_of(bursts, offset);
	if (!bursts->flying[target])
		bursts->sent[target] = 0;
	bursts->sent[target]++;
	bursts->flying[target]++;
}

void ring_burst_done(struct ring_bursts *bursts, uint64_t offset)
{
	if (bursts->targets)
		bursts->flying[target_of(bursts, offset)]--;
}
