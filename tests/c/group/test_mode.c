/* SPDX-License-Identifier: Apache-2.0 */
/* Every row of the table of modes in group/agree.c. */
/* Included, because the rule is static. */
#define _GNU_SOURCE
#include "group/agree.c"
#include "support/check_main.h"

#include <ioshape/group.h>

#include <string.h>

#define AUTO IOSHAPE_MODE_AUTO
#define EACH IOSHAPE_MODE_EACH
#define NODE IOSHAPE_MODE_NODE
#define RANK0 IOSHAPE_MODE_RANK0

static const struct {
	enum ioshape_mode asked;
	uint32_t ranks, nodes;
	uint64_t bytes;
	bool shared, comm;
	uint32_t targets, stripes, capacity;
	enum ioshape_mode mode;
	const char *why;
} cases[] = {
	/* One rank: the setting does not matter. */
	{ AUTO, 1, 1, GIB, true, true, 0, 0, 0, EACH, "one rank" },
	{ RANK0, 1, 1, GIB, true, true, 0, 0, 0, EACH, "one rank" },
	/* Modes as set. */
	{ EACH, 8, 1, GIB, true, true, 0, 0, 0, EACH, "as requested" },
	{ EACH, 8, 2, 1, false, false, 0, 0, 0, EACH, "as requested" },
	{ NODE, 8, 2, 1, true, false, 0, 0, 0, NODE, "as requested" },
	{ NODE, 4, 4, 1, false, false, 0, 0, 0, NODE, "as requested" },
	{ RANK0, 8, 1, GIB, true, false, 0, 0, 0, RANK0, "as requested" },
	{ RANK0, 8, 2, GIB, true, true, 0, 0, 0, RANK0, "as requested" },
	{ RANK0, 4, 4, GIB, false, true, 0, 0, 0, RANK0, "as requested" },
	/* Modes that are not possible. */
	{ NODE, 8, 2, 1, false, true, 0, 0, 0, EACH, "node was requested, but the ranks of a" },
	{ RANK0, 8, 1, 1, false, true, 0, 0, 0, EACH, "rank0 was requested, but the ranks of a" },
	{ RANK0, 8, 2, 1, false, false, 0, 0, 0, EACH, "rank0 was requested, but the ranks of" },
	{ RANK0, 8, 2, 1, true, false, 0, 0, 0, NODE, "but nodes cannot send data to each" },
	{ RANK0, 4, 4, 1, false, false, 0, 0, 0, NODE, "but nodes cannot send data to each" },
	/* One node. */
	{ AUTO, 8, 1, GIB, true, false, 0, 0, 0, NODE, "8 ranks on 1 node: a file" },
	{ AUTO, 8, 1, 1, true, true, 0, 0, 0, NODE, "8 ranks on 1 node: a file" },
	{ AUTO, 8, 1, GIB, false, true, 0, 0, 0, EACH, "cannot share memory" },
	/* Few bytes from several nodes. */
	{ AUTO, 8, 2, 64 * MIB, true, true, 0, 0, 0, RANK0, "few bytes from 2 nodes" },
	{ AUTO, 4, 4, 64 * MIB, false, true, 0, 0, 0, RANK0, "few bytes from 4 nodes" },
	{ AUTO, 8, 2, 64 * MIB + 1, true, true, 0, 0, 0, NODE, "8 ranks on 2 nodes" },
	{ AUTO, 8, 2, 64 * MIB, true, false, 0, 0, 0, NODE, "8 ranks on 2 nodes" },
	{ AUTO, 8, 2, 64 * MIB, false, true, 0, 0, 0, EACH, "cannot share memory" },
	/* One rank on each node. */
	{ AUTO, 4, 4, GIB, true, true, 0, 0, 0, EACH, "one rank on each of 4 nodes" },
	{ AUTO, 4, 4, 1, true, false, 0, 0, 0, EACH, "one rank on each of 4 nodes" },
	/* Several ranks on each node. */
	{ AUTO, 64, 8, 100 * GIB, true, true, 0, 0, 0, NODE, "64 ranks on 8 nodes" },
	{ AUTO, 64, 8, 100 * GIB, false, true, 0, 0, 0, EACH, "cannot share memory" },
	/* Remarks about storage targets and slots. */
	{ AUTO, 64, 8, GIB, true, true, 64, 2, 0, NODE, "use 16 of 64 storage targets" },
	{ AUTO, 64, 8, GIB, true, true, 63, 2, 0, NODE, "a file for each node" },
	{ AUTO, 64, 8, GIB, true, true, 0, 0, 3, NODE, "at most 3 of 8 nodes write at a time" },
};

static struct test_case tests = { .name = "all" };

LOOP_TEST(tests, a_row_of_the_table, 0, (int)ARRAY_LENGTH(cases))
{
	const struct facts facts = {
		.ranks = cases[_i].ranks,
		.nodes = cases[_i].nodes,
		.bytes = cases[_i].bytes,
		.most_bytes = cases[_i].bytes,
		.targets = cases[_i].targets,
		.stripes = cases[_i].stripes,
		.capacity = cases[_i].capacity,
		.shared = cases[_i].shared,
		.comm = cases[_i].comm,
	};
	char why[256];

	ck_assert_int_eq(mode_for(cases[_i].asked, &facts, why, sizeof(why)), cases[_i].mode);
	ck_assert_msg(strstr(why, cases[_i].why), "%s", why);
	ck_assert_int_eq(!strstr(why, "storage targets"), !strstr(cases[_i].why, "targets"));
	ck_assert_int_eq(!strstr(why, "at a time"), !strstr(cases[_i].why, "at a time"));
}

TEST(tests, a_reason_is_cut_to_its_room)
{
	const struct facts facts = { .ranks = 64,
				     .nodes = 8,
				     .bytes = GIB,
				     .shared = true,
				     .targets = 1000,
				     .stripes = 1,
				     .capacity = 1 };
	char why[16];

	for (size_t room = 0; room < sizeof(why); room++) {
		memset(why, '#', sizeof(why));
		ck_assert_int_eq(mode_for(AUTO, &facts, why, room), NODE);
		if (room)
			ck_assert_uint_lt(strlen(why), room);
		ck_assert_int_eq(why[room], '#');
	}
	ck_assert_int_eq(mode_for(AUTO, &facts, NULL, 0), NODE);
}

int main(void)
{
	return check_run("mode");
}
