/* SPDX-License-Identifier: Apache-2.0 */
/* Rows of requests: how much of a file a storage target is given at a time. */
#include "ring/lane.h"

#include <string.h>

void ring_rows_begin(struct ring_rows *rows, const struct ring_shape *shape)
{
	memset(rows, 0, sizeof(*rows));
	if (!shape || !shape->row || !shape->stripe_bytes || shape->targets > RING_MOST_ROWS)
		return;
	rows->targets = shape->targets;
	rows->stripe_bytes = shape->stripe_bytes;
	rows->length = shape->row;
}

static uint32_t target_of(const struct ring_rows *rows, uint64_t offset)
{
	return (uint32_t)(offset / rows->stripe_bytes % rows->targets);
}

bool ring_row_has_room(const struct ring_rows *rows, uint64_t offset)
{
	uint32_t target;

	if (!rows->targets)
		return true;
	target = target_of(rows, offset);
	return !rows->flying[target] || rows->sent[target] < rows->length;
}

void ring_row_sent(struct ring_rows *rows, uint64_t offset)
{
	uint32_t target;

	if (!rows->targets)
		return;
	target = target_of(rows, offset);
	if (!rows->flying[target])
		rows->sent[target] = 0;
	rows->sent[target]++;
	rows->flying[target]++;
}

void ring_row_done(struct ring_rows *rows, uint64_t offset)
{
	if (rows->targets)
		rows->flying[target_of(rows, offset)]--;
}
