/* SPDX-License-Identifier: Apache-2.0 */
/* The priority boost that follows from the cost of waiting. */
#include "slots/slots.h"
#include "support/check_main.h"

#define SECOND UINT64_C(1000000000)

static struct test_case tests = { .name = "boost" };

/* A job that is neither early nor late. */
static const struct slots_priority_inputs usual = {
	.ranks = 4000,
	.writers = 4000,
	.bytes = 500000000,
	.age_ns = 600 * SECOND,
};

static int32_t boost_of(struct slots_priority_inputs inputs)
{
	return slots_boost_ms(&inputs);
}

/* Compares up to rounding. */
static void check_to_ms(int32_t found, int32_t expected)
{
	ck_assert_int_ge(found, expected - 1);
	ck_assert_int_le(found, expected + 1);
}

/* Compares up to the error of linear interpolation between powers of two. */
static void check_ms(int32_t found, int32_t expected)
{
	ck_assert_int_ge(found, expected - 5200);
	ck_assert_int_le(found, expected + 5200);
}

TEST(tests, twice_the_cost_is_a_minute)
{
	const int32_t before = boost_of(usual);
	struct slots_priority_inputs inputs = usual;

	check_ms(before, -12000);
	inputs.age_ns *= 2;
	check_to_ms(boost_of(inputs), before + 60000);
	inputs.bytes *= 4;
	check_to_ms(boost_of(inputs), before - 60000);
	inputs = usual;
	/*
	 * A job of twice the size has twice the failures, each of which costs twice as much, for
	 * twice the bytes.
	 */
	inputs.ranks = inputs.writers = 8000;
	check_to_ms(boost_of(inputs), before + 60000);
	/* One rank writes for eight. */
	inputs = usual;
	inputs.writers /= 8;
	inputs.bytes *= 8;
	check_to_ms(boost_of(inputs), before);
	inputs.writers = 0; /* all ranks write */
	check_to_ms(boost_of(inputs), before - 180000);
}

TEST(tests, a_save_that_holds_training_up_costs_more)
{
	struct slots_priority_inputs inputs = usual;

	inputs.bytes *= 8;
	inputs.blocks_training = true;
	check_ms(boost_of(inputs), 183000);
	inputs.bytes = 1;
	ck_assert_int_eq(boost_of(inputs), SLOTS_MOST_BOOST_MS);
}

TEST(tests, what_is_not_known_or_absurd_is_within_bounds)
{
	static const struct slots_priority_inputs nothing,
		most = { UINT32_MAX, 1, 1, UINT64_MAX, true },
		least = { 1, UINT32_MAX, UINT64_MAX, 1, false };

	ck_assert_int_eq(slots_boost_ms(&nothing), 0);
	ck_assert_int_eq(slots_boost_ms(&most), SLOTS_MOST_BOOST_MS);
	ck_assert_int_eq(slots_boost_ms(&least), -SLOTS_MOST_BOOST_MS);
}

TEST(tests, files_saved_soon_after_each_other_are_of_one_checkpoint)
{
	struct slots_checkpoints checkpoints = { 0 };
	uint64_t now = base_now_ns() + 600 * SECOND, age;

	/* At first, the age is the time since the program began. */
	age = slots_checkpoints_begin(&checkpoints, now);
	ck_assert_uint_ge(age, 600 * SECOND);
	ck_assert_uint_lt(age, 660 * SECOND);
	/* Writes for a minute, and then the next two files of this checkpoint. */
	now += 60 * SECOND;
	checkpoints.last_ns = now; /* the time of the last write */
	for (int i = 0; i < 2; i++) {
		now += 59 * SECOND;
		ck_assert_uint_eq(slots_checkpoints_begin(&checkpoints, now), age);
	}
	/* The next checkpoint begins an hour after this one began. */
	now += 3600 * SECOND - (60 + 2 * 59) * SECOND;
	ck_assert_uint_eq(slots_checkpoints_begin(&checkpoints, now), 3600 * SECOND);
}
