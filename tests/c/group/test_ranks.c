/* SPDX-License-Identifier: Apache-2.0 */
/* Nodes of ranks, their leaders, and heartbeats. */
/* Included, because it tests static functions. */
#include "group/group.c"
#include "support/check_main.h"
#include "support/store_case.h"

#include <ioshape/group.h>

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>

#define MANY_RANKS (1u << 20)
#define RANKS_OF_A_NODE 8u

static void make(struct ioshape_group *group, uint32_t ranks)
{
	*group = (struct ioshape_group){ .options.ranks = ranks };
	group->ranks = calloc(ranks, sizeof(*group->ranks));
	group->leaders = calloc(ranks, sizeof(*group->leaders));
	ck_assert(group->ranks && group->leaders);
}

static void clear(struct ioshape_group *group)
{
	free(group->ranks);
	free(group->leaders);
}

static struct test_case all = { .name = "all" };

/* Consecutive ranks are on different nodes, as some launchers place them. */
TEST(all, a_million_ranks_find_their_leaders)
{
	const uint32_t nodes = MANY_RANKS / RANKS_OF_A_NODE;
	struct ioshape_group group;

	make(&group, MANY_RANKS);
	for (uint32_t rank = 0; rank < MANY_RANKS; rank++)
		snprintf(group.ranks[rank].node_key, sizeof(group.ranks[rank].node_key), "n%u",
			 rank % nodes);
	ck_assert(!find_nodes(&group));
	ck_assert_uint_eq(group.node_count, nodes);
	for (uint32_t rank = 0; rank < MANY_RANKS; rank++) {
		REQUIRE(group.ranks[rank].node == rank % nodes);
		REQUIRE(group_writer_of(&group, IOSHAPE_MODE_NODE, rank) == rank % nodes);
		REQUIRE(group_writer_of(&group, IOSHAPE_MODE_EACH, rank) == rank);
		REQUIRE(group_writer_of(&group, IOSHAPE_MODE_RANK0, rank) == 0);
	}
	/* A rank that only receives the numbers of nodes finds the same leaders. */
	for (uint32_t node = 0; node < nodes; node++)
		group.leaders[node] = UINT32_MAX;
	ck_assert(find_leaders(&group, nodes));
	for (uint32_t node = 0; node < nodes; node++)
		REQUIRE(group.leaders[node] == node);
	clear(&group);
}

TEST(all, numbers_that_cannot_be_are_refused)
{
	static const struct {
		uint32_t node[3];
		uint64_t count;
		bool good;
	} cases[] = {
		{ { 0, 1, 0 }, 2, true },
		{ { 0, 0, 0 }, 1, true },
		{ { 1, 0, 0 }, 2, false },
		{ { 0, 2, 1 }, 3, false },
		{ { 0, 1, 0 }, 3, false },
		{ { 0, 1, UINT32_MAX }, 2, false },
		{ { 0, 1, 2 }, 3ull + (1ull << 32), false },
	};

	for (size_t i = 0; i < ARRAY_LENGTH(cases); i++) {
		struct ioshape_group group;

		make(&group, 3);
		for (uint32_t rank = 0; rank < 3; rank++)
			group.ranks[rank].node = cases[i].node[rank];
		ck_assert_msg(find_leaders(&group, cases[i].count) == cases[i].good, "%zu", i);
		clear(&group);
	}
}

TEST(all, a_failure_arrives_whole_and_names_its_rank)
{
	struct group_verdict told = { .checkpoint_bytes = 42 }, heard_all = { 0 };
	struct base_error *failure = &told.failure, *heard = &heard_all.failure, named = { 0 };
	struct group_body body = { 0 };
	struct ioshape_group group;

	base_fail_reason_with(failure, -ENOSPC, "free space", "cannot write");
	base_error_about(failure, NULL, "/scratch/node-00001.zip");
	base_error_in_record(failure, "weight");
	base_error_at(failure, 1ull << 40);
	base_error_space(failure, 5, UINT64_MAX);
	group_write_message(&group_verdict, &body, &told);
	ck_assert(!body.failed);
	ck_assert(group_read_message(&group_verdict, &body.bytes, &heard_all));
	ck_assert_int_eq(heard->code, -ENOSPC);
	ck_assert_uint_eq(heard_all.checkpoint_bytes, 42);
	ck_assert_str_eq(heard->sentence, failure->sentence);
	ck_assert_str_eq(heard->remedy, failure->remedy);
	ck_assert_str_eq(heard->text, failure->text);
	ck_assert_str_eq(heard->path, failure->path);
	ck_assert_str_eq(heard->record, failure->record);
	ck_assert_uint_eq(heard->known, failure->known);
	ck_assert_uint_eq(heard->offset, failure->offset);
	ck_assert_uint_eq(heard->needed_bytes, 5);
	ck_assert_uint_eq(heard->free_bytes, UINT64_MAX);
	make(&group, 4);
	ck_assert_int_eq(group_fail_of_rank(&group, 3, heard, &named), -ENOSPC);
	ck_assert(named.known & BASE_KNOWS_RANK);
	ck_assert_uint_eq(named.rank, 3);
	ck_assert_str_eq(named.remedy, failure->remedy);
	clear(&group);
	base_buffer_free(&body.bytes);
}

TEST(all, a_failure_that_was_cut_off_is_bad)
{
	struct group_verdict told = { 0 };
	struct group_body body = { 0 };

	base_fail_reason_with(&told.failure, -EIO, "try again", "cannot write");
	group_write_message(&group_verdict, &body, &told);
	for (size_t bytes = 0; bytes < body.bytes.bytes; bytes++) {
		const struct base_buffer cut = { .data = body.bytes.data, .bytes = bytes };
		struct group_verdict heard = { 0 };

		REQUIRE(!group_read_message(&group_verdict, &cut, &heard));
	}
	base_buffer_free(&body.bytes);
}

/* ---- Heartbeats ------------------------------------------------------------------------------ */

static struct test_case heartbeats = { .name = "heartbeats",
				       .setup = scratch_setup,
				       .teardown = scratch_teardown };

/* A rank waits for its writer's call and for the verdict. Both come from rank 0. */
TEST(heartbeats, they_are_heard_by_all_who_wait_for_a_rank)
{
	struct group_watched first = { 0 }, second = { 0 };
	struct group_round round = { .scope = "r1-3" }, zeros = { .scope = "r1-3" };
	struct ioshape_group group, zero;
	struct group_verdict verdict;
	struct group_call call;
	struct store_case stores;
	uint64_t end_ns;

	store_case_begin(&stores, 1, 2);
	make(&zero, 2);
	make(&group, 2);
	zero.store = store_case_open(&stores, 0);
	group.store = store_case_open(&stores, 1);
	zero.deadline_ns = group.deadline_ns = base_ms_to_ns(2000);
	strcpy(zero.life, "r1-life");
	strcpy(group.life, "r1-life");
	group.options.rank = 1;
	zeros.group = &zero;
	round.group = &group;
	for (end_ns = base_now_ns() + base_ms_to_ns(3000); base_now_ns() < end_ns;) {
		group_round_beat(&zeros);
		ck_assert_int_eq(group_look(&round, &group_call, 0, &first, &call, NULL), -EAGAIN);
		ck_assert_int_eq(group_look(&round, &group_verdict, 0, &second, &verdict, NULL),
				 -EAGAIN);
		store_wait(group.store, 20);
	}
	store_close(group.store);
	store_close(zero.store);
	clear(&group);
	clear(&zero);
}
