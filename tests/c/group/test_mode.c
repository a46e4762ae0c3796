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
	bool comm;
	enum ioshape_mode mode;
	const char *why;
} cases[] = {
	/* One rank: the setting does not matter. */
	{ AUTO, 1, 1, GIB, true, EACH, "one rank" },
	{ RANK0, 1, 1, GIB, true, EACH, "one rank" },
	/* Modes as set. */
	{ EACH, 8, 1, GIB, true, EACH, "as requested" },
	{ EACH, 8, 2, 1, false, EACH, "as requested" },
	{ NODE, 8, 2, 1, false, NODE, "as requested" },
	{ NODE, 4, 4, 1, false, NODE, "as requested" },
	{ RANK0, 8, 1, GIB, false, RANK0, "as requested" },
	{ RANK0, 8, 2, GIB, true, RANK0, "as requested" },
	{ RANK0, 4, 4, GIB, true, RANK0, "as requested" },
	/* Modes that are not possible. */
	{ RANK0, 8, 2, 1, false, NODE, "but nodes cannot send data to each" },
	{ RANK0, 4, 4, 1, false, NODE, "but nodes cannot send data to each" },
	/* One node. */
	{ AUTO, 8, 1, GIB, false, NODE, "8 ranks on 1 node: a file" },
	{ AUTO, 8, 1, 1, true, NODE, "8 ranks on 1 node: a file" },
	/* Few bytes from several nodes. */
	{ AUTO, 8, 2, 64 * MIB, true, RANK0, "few bytes from 2 nodes" },
	{ AUTO, 4, 4, 64 * MIB, true, RANK0, "few bytes from 4 nodes" },
	{ AUTO, 8, 2, 64 * MIB + 1, true, NODE, "8 ranks on 2 nodes" },
	{ AUTO, 8, 2, 64 * MIB, false, NODE, "8 ranks on 2 nodes" },
	/* One rank on each node. */
	{ AUTO, 4, 4, GIB, true, EACH, "one rank on each of 4 nodes" },
	{ AUTO, 4, 4, 1, false, EACH, "one rank on each of 4 nodes" },
	/* Several ranks on each node. */
	{ AUTO, 64, 8, 100 * GIB, true, NODE, "64 ranks on 8 nodes" },
};

static struct test_case tests = { .name = "all" };

LOOP_TEST(tests, a_row_of_the_table, 0, (int)ARRAY_LENGTH(cases))
{
	const struct facts facts = {
		.ranks = cases[_i].ranks,
		.nodes = cases[_i].nodes,
		.bytes = cases[_i].bytes,
		.comm = cases[_i].comm,
	};
	char why[256];

	ck_assert_int_eq(mode_for(cases[_i].asked, &facts, why, sizeof(why)), cases[_i].mode);
	ck_assert_msg(strstr(why, cases[_i].why), "%s", why);
}
