/* SPDX-License-Identifier: Apache-2.0 */
/* Parses any bytes as messages of other ranks: rosters, plans, errors, parity records. */
#define _GNU_SOURCE
#include <ioshape/group.h>

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "fuzz.h"
/* Included, because the functions that read rosters and plans are static. */
#include "group/agree.c"
#include "group/group.c"
#include "tier/parity.h"

#define MOST_RANKS 8u
#define STEP 1000u

static void try_roster(uint32_t ranks, const struct base_buffer *body)
{
	struct group_rank known[MOST_RANKS] = { 0 };
	uint32_t leaders[MOST_RANKS];
	struct ioshape_group group = { .ranks = known, .leaders = leaders };
	bool complete;

	group.options.ranks = ranks;
	group.options.rank = ranks - 1;
	if (!take_roster(&group, body, &complete))
		return;
	MUST(group.node_count && group.node_count <= ranks);
	MUST(group.options.mode <= IOSHAPE_MODE_RANK0);
	for (uint32_t rank = 0; rank < ranks; rank++) {
		MUST(known[rank].node < group.node_count);
		MUST(group_writer_of(&group, IOSHAPE_MODE_NODE, rank) <= rank);
		MUST(memchr(known[rank].where, 0, sizeof(known[rank].where)));
	}
}

static void try_plan(uint32_t ranks, const struct base_buffer *body)
{
	struct group_planned planned[MOST_RANKS];
	struct group_plan plan = { .count = ranks, .ranks = planned };

	if (!group_read_message(&group_plans[0], body, &plan) || plan.failure.code ||
	    !is_valid(&plan, ranks, STEP) || plan.asks == GROUP_ASKS_DIGESTS)
		return;
	for (uint32_t rank = 0; rank < ranks; rank++)
		MUST(planned[rank].kept <= rank && group_is_kept(&plan, planned[rank].kept));
	MUST(group_parse_name(plan.attempt).kind == GROUP_NAME_ATTEMPT);
	MUST(memchr(plan.not_near, 0, sizeof(plan.not_near)));
	MUST(!strchr(plan.attempt, '/') && memchr(plan.why, 0, sizeof(plan.why)));
	MUST(plan.mode >= IOSHAPE_MODE_EACH && plan.mode <= IOSHAPE_MODE_RANK0);
}

static void try_error(const struct base_buffer *body)
{
	struct group_verdict verdict = { 0 };
	const struct base_error *error = &verdict.failure;

	if (!group_read_message(&group_verdict, body, &verdict) || !error->code)
		return;
	MUST(error->code < 0);
	MUST(memchr(error->text, 0, sizeof(error->text)));
	MUST(memchr(error->path, 0, sizeof(error->path)));
	MUST(memchr(error->record, 0, sizeof(error->record)));
}

/*
 * Tries the bytes as a parity record with correct length and checksum, which mutations would not
 * find.
 */
static void try_record(const struct base_buffer *body)
{
	const size_t head = 20, bytes = (head + body->bytes + PARITY_RECORD_UNIT - 1) /
					PARITY_RECORD_UNIT * PARITY_RECORD_UNIT;
	struct parity_record record;
	uint8_t *text = calloc(1, bytes);
	struct parity_set set;

	MUST(text);
	memcpy(text, "iosparit", 8);
	base_put_le(text + 8, PARITY_FORMAT, 4);
	base_put_le(text + 12, bytes, 4);
	base_put_le(text + 16, base_crc32(0, body->data, body->bytes), 4);
	if (body->bytes)
		memcpy(text + head, body->data, body->bytes);
	if (!parity_record_decode(&record, text, bytes, "fuzz", NULL)) {
		for (uint32_t node = 0; node < record.sets.nodes; node++) {
			set = parity_set_of(&record.sets, node);
			MUST(set.count && set.position < set.count && set.parity < set.count);
			MUST(set.nodes[set.position] == node && set.count <= PARITY_MOST_DATA);
		}
		for (uint32_t file = 0; file < record.file_count; file++)
			MUST(record.node_of_file[file] < record.sets.nodes);
		parity_record_free(&record);
	}
	free(text);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes)
{
	struct base_buffer body = { 0 };
	uint32_t ranks;

	if (!bytes)
		return 0;
	ranks = 1 + data[0] % MOST_RANKS;
	MUST(!base_buffer_append(&body, data + 1, bytes - 1));
	try_roster(ranks, &body);
	try_plan(ranks, &body);
	try_error(&body);
	try_record(&body);
	base_buffer_free(&body);
	return 0;
}
