/* SPDX-License-Identifier: Apache-2.0 */
/* Which checkpoints retention keeps: every directory of a few steps, with every policy. */
/* Included, because it tests a static function. */
#include "group/checkpoints.c"
#include "support/check_main.h"

#include <string.h>

#define STEPS 8u /* steps 0 to 7, each of which exists or not */

/* Returns whether a checkpoint is kept, by the words of the documentation. */
static bool should_stay(const uint64_t *steps, size_t count, size_t i, uint32_t keep_last,
			uint64_t keep_every)
{
	size_t newer = 0;

	for (size_t other = 0; other < count; other++)
		newer += steps[other] > steps[i];
	if (!newer || !keep_last || newer < keep_last)
		return true;
	return keep_every && steps[i] / keep_every * keep_every == steps[i];
}

static struct test_case all = { .name = "all" };

TEST(all, every_small_case_is_as_documented)
{
	uint64_t steps[STEPS];
	bool goes[STEPS];
	size_t count, going, expected;

	for (unsigned there = 0; there < 1u << STEPS; there++) {
		count = 0;
		for (unsigned step = 0; step < STEPS; step++)
			if (there >> step & 1)
				steps[count++] = step;
		for (uint32_t last = 0; last <= STEPS + 1; last++) {
			for (uint64_t every = 0; every <= STEPS + 1; every++) {
				memset(goes, 0x55, sizeof(goes));
				going = retention(steps, count, last, every, goes);
				expected = 0;
				for (size_t i = 0; i < count; i++) {
					REQUIRE(goes[i] ==
						!should_stay(steps, count, i, last, every));
					expected += goes[i];
				}
				REQUIRE(going == expected);
				REQUIRE(!count || !goes[count - 1]);
			}
		}
	}
}

TEST(all, large_numbers_do_not_wrap)
{
	const uint64_t steps[] = { 0, 1, UINT64_MAX - 1, UINT64_MAX };
	bool goes[4];

	ck_assert_uint_eq(retention(steps, 4, 1, 0, goes), 3);
	ck_assert_uint_eq(retention(steps, 4, UINT32_MAX, 0, goes), 0);
	ck_assert_uint_eq(retention(steps, 4, 1, UINT64_MAX - 1, goes), 1);
	ck_assert(!goes[0] && goes[1] && !goes[2] && !goes[3]);
}
