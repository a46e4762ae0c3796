/* SPDX-License-Identifier: Apache-2.0 */
/* Messages between ranks are read as they were written, and other bytes are refused. */

/* Included, because the functions that write payloads are static. */
#include "group/messages.c"

#include "support/check_main.h"

#include <ioshape/group.h>

#define RANKS 3u

static struct test_case all = { .name = "all" };

static void put_number(struct group_body *body, uint64_t number)
{
	struct group_payload writing = { .body = body };

	group_pass_number(&writing, &number);
}

static struct group_body plan_message(struct group_planned ranks[RANKS])
{
	static struct group_plan told;
	struct group_body body = { 0 };

	told = (struct group_plan){
		.asks = GROUP_ASKS_SPACE,
		.mode = IOSHAPE_MODE_NODE,
		.why = "because",
		.near = true,
		.attempt = ".step-0000000001.x",
		.alignment = MIB,
		.total_bytes = UINT64_MAX,
		.count = RANKS,
		.ranks = ranks,
	};
	memset(told.key, 0xa5, sizeof(told.key));
	group_write_message(&group_plans[0], &body, &told);
	ck_assert(!body.failed);
	return body;
}

TEST(all, a_plan_arrives_as_it_was_told)
{
	struct group_planned ranks[RANKS] = { { 5, 0, 0, true },
					      { 0, 0, 0, true },
					      { 7, 2, 2, 0 } };
	struct group_planned heard_ranks[RANKS];
	struct group_plan heard = { .count = RANKS, .ranks = heard_ranks };
	struct group_body body = plan_message(ranks);

	ck_assert(group_read_message(&group_plans[0], &body.bytes, &heard));
	ck_assert_int_eq(heard.failure.code, 0);
	ck_assert_int_eq(heard.asks, GROUP_ASKS_SPACE);
	ck_assert_int_eq(heard.mode, IOSHAPE_MODE_NODE);
	ck_assert_str_eq(heard.why, "because");
	ck_assert(heard.near && !heard.together);
	ck_assert_str_eq(heard.not_near, "");
	ck_assert_str_eq(heard.attempt, ".step-0000000001.x");
	ck_assert_uint_eq(heard.key[BASE_MAC_BYTES - 1], 0xa5);
	ck_assert_uint_eq(heard.total_bytes, UINT64_MAX);
	ck_assert_uint_eq(heard.count, RANKS);
	for (uint32_t rank = 0; rank < RANKS; rank++) {
		ck_assert_uint_eq(heard_ranks[rank].bytes, ranks[rank].bytes);
		ck_assert_uint_eq(heard_ranks[rank].same, ranks[rank].same);
		ck_assert_uint_eq(heard_ranks[rank].kept, ranks[rank].kept);
		ck_assert(heard_ranks[rank].asked == ranks[rank].asked);
	}
	base_buffer_free(&body.bytes);
}

TEST(all, what_is_cut_or_longer_is_no_message)
{
	struct group_planned ranks[RANKS] = { 0 }, heard_ranks[RANKS];
	struct group_body body = plan_message(ranks);
	const size_t whole = body.bytes.bytes;

	for (size_t bytes = 0; bytes < whole; bytes++) {
		struct group_plan heard = { .count = RANKS, .ranks = heard_ranks };

		body.bytes.bytes = bytes;
		REQUIRE(!group_read_message(&group_plans[0], &body.bytes, &heard));
	}
	body.bytes.bytes = whole;
	ck_assert(!base_buffer_append(&body.bytes, "", 1));
	ck_assert(
		!group_read_message(&group_plans[0], &body.bytes,
				    &(struct group_plan){ .count = RANKS, .ranks = heard_ranks }));
	base_buffer_free(&body.bytes);
}

TEST(all, a_list_of_more_than_there_is_memory_for_is_no_message)
{
	struct group_planned ranks[RANKS] = { 0 }, heard_ranks[RANKS - 1];
	struct group_plan heard = { .count = RANKS - 1, .ranks = heard_ranks };
	struct group_body body = plan_message(ranks);

	ck_assert(!group_read_message(&group_plans[0], &body.bytes, &heard));
	ck_assert_uint_eq(heard.count, 0);
	base_buffer_free(&body.bytes);
}

/* A number that is too large for its member, and a flag that is neither 0 nor 1. */
LOOP_TEST(all, numbers_that_do_not_fit_are_no_message, 0, 2)
{
	struct group_body body = { 0 };
	struct group_call call = { 0 };
	struct group_roster roster = { 0 };

	if (_i) {
		put_number(&body, 1ull << 32);
		ck_assert(!group_read_message(&group_call, &body.bytes, &call));
		ck_assert_uint_eq(call.rank, 0);
	} else {
		put_number(&body, 1); /* the ID */
		put_number(&body, 2); /* the flag "complete" */
		for (int i = 0; i < 4; i++)
			put_number(&body, 0);
		ck_assert(!group_read_message(&group_roster, &body.bytes, &roster));
	}
	base_buffer_free(&body.bytes);
}

/* Reading sets the failure to none, whatever the memory contained. */
TEST(all, a_message_without_a_failure_has_none)
{
	struct group_verdict told = { .checkpoint_bytes = 9 }, heard;
	struct group_body body = { 0 };

	memset(&heard, 0x55, sizeof(heard));
	group_write_message(&group_verdict, &body, &told);
	ck_assert(group_read_message(&group_verdict, &body.bytes, &heard));
	ck_assert_int_eq(heard.failure.code, 0);
	ck_assert_str_eq(heard.failure.text, "");
	ck_assert_uint_eq(heard.checkpoint_bytes, 9);
	base_buffer_free(&body.bytes);
}
