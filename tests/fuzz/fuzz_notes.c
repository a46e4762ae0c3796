/* SPDX-License-Identifier: Apache-2.0 */
/* Any bytes as notes of other ranks: rosters, plans, errors. */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "fuzz.h"
#include "group/generation/generation.h"
#include "group/save/part.h"

#define MOST_RANKS 8u
#define STEP 1000u

static void try_roster(uint32_t ranks, const struct base_buffer *note)
{
	struct group_rank known[MOST_RANKS] = { 0 };
	uint32_t leaders[MOST_RANKS];
	struct ioshape_group group = { .ranks = known, .leaders = leaders };

	group.options.ranks = ranks;
	group.options.rank = ranks - 1;
	if (!group_take_roster(&group, note))
		return;
	MUST(group.node_count && group.node_count <= ranks);
	MUST(group.options.mode <= IOSHAPE_MODE_RANK0);
	for (uint32_t rank = 0; rank < ranks; rank++) {
		MUST(known[rank].node < group.node_count);
		MUST(group_writer_of(&group, IOSHAPE_MODE_NODE, rank) <= rank);
		MUST(memchr(known[rank].where, 0, sizeof(known[rank].where)));
	}
}

static void try_plan(uint32_t ranks, const struct base_buffer *note)
{
	uint64_t sizes[MOST_RANKS];
	struct group_plan plan = { .bytes = sizes };
	struct base_error error = { 0 };
	int ret = group_read_plan(&plan, ranks, STEP, note, &error);

	MUST(ret == error.code);
	if (ret)
		return;
	MUST(group_parse_name(plan.attempt).kind == GROUP_NAME_ATTEMPT);
	MUST(memchr(plan.not_near, 0, sizeof(plan.not_near)));
	MUST(!strchr(plan.attempt, '/') && memchr(plan.why, 0, sizeof(plan.why)));
	MUST(plan.mode >= IOSHAPE_MODE_EACH && plan.mode <= IOSHAPE_MODE_RANK0);
}

static void try_error(const struct base_buffer *note)
{
	struct group_note_reader reader = group_read_note(note);
	struct base_error error = { 0 };

	if (!group_read_error(&reader, &error))
		return;
	MUST(error.code < 0 && !reader.bad);
	MUST(memchr(error.text, 0, sizeof(error.text)));
	MUST(memchr(error.path, 0, sizeof(error.path)));
	MUST(memchr(error.record, 0, sizeof(error.record)));
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes)
{
	struct base_buffer note = { 0 };
	uint32_t ranks;

	if (!bytes)
		return 0;
	ranks = 1 + data[0] % MOST_RANKS;
	MUST(!base_buffer_append(&note, data + 1, bytes - 1));
	try_roster(ranks, &note);
	try_plan(ranks, &note);
	try_error(&note);
	base_buffer_free(&note);
	return 0;
}
