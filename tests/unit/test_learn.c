/* SPDX-License-Identifier: Apache-2.0 */
/* How many writers pay: slots/learn.c, with storages that are formulas, and with modelled ones. */
#include "slots/learn.h"

#include "support/check_main.h"
#include "support/learning.h"
#include "support/random.h"
#include "support/scratch.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

#define ENOUGH 400 /* epochs: any search is over */
#define SETTLING 8 /* epochs before the first one */

static struct test_case tests = { .name = "learn" };

/* Bytes per second that so many writers get together. */
typedef double storage_fn(double writers);

static double one_fills_it(double writers)
{
	(void)writers;
	return 1e9;
}

static double eight_fill_it(double writers)
{
	return 1e9 * fmin(writers, 8);
}

static double worse_with_each(double writers)
{
	return 1e9 / (1 + 0.1 * writers);
}

static double as_many_as_there_are(double writers)
{
	return 1e9 * writers;
}

static const struct {
	const char *name;
	storage_fn *storage;
	uint32_t least, most; /* that are right */
} storages[] = {
	{ "one fills it", one_fills_it, 1, 1 },
	{ "eight fill it", eight_fill_it, 8, 8 },
	{ "worse with each", worse_with_each, 1, 1 },
	{ "as many as there are", as_many_as_there_are, 40, 40 },
};

#define STORAGES (int)(sizeof(storages) / sizeof(*storages))
#define WANTED 40u

static struct learn_epoch epoch_of(const struct learn *learn, double bytes_per_s)
{
	return (struct learn_epoch){
		.reports = (uint32_t)learn_reports(learn),
		.wanted = WANTED,
		.bytes = 1u << 30,
		.seconds = (double)(1u << 30) / bytes_per_s,
	};
}

static void feed(struct learn *learn, storage_fn *storage, unsigned epochs)
{
	for (unsigned i = 0; i < epochs; i++) {
		const struct learn_epoch epoch = epoch_of(learn, storage(learn_capacity(learn)));

		learn_from(learn, &epoch);
	}
}

LOOP_TEST(tests, it_finds_how_many_pay_from_any_start, 0, STORAGES)
{
	for (uint32_t start = 1; start <= WANTED; start++) {
		struct learn learn;

		learn_begin(&learn, start);
		REQUIRE(learn_capacity(&learn) == start);
		feed(&learn, storages[_i].storage, ENOUGH);
		/* A step of a half may begin beside the one that is right. */
		if (learn.best * 3 < storages[_i].least * 2 ||
		    learn.best * 2 > storages[_i].most * 3)
			ck_abort_msg("%s: from %u to %u", storages[_i].name, start,
				     (unsigned)learn.best);
	}
}

LOOP_TEST(tests, it_begins_with_two_and_is_exact_where_the_answer_is, 0, STORAGES)
{
	struct learn learn;

	learn_begin(&learn, 2);
	feed(&learn, storages[_i].storage, ENOUGH);
	ck_assert_uint_ge(learn.best, storages[_i].least);
	ck_assert_uint_le(learn.best, storages[_i].most);
}

LOOP_TEST(tests, nothing_moves_to_and_fro_on_a_storage_that_stays_as_it_is, 0, STORAGES)
{
	unsigned trials = 0;
	struct learn learn;
	uint64_t best;

	learn_begin(&learn, 2);
	feed(&learn, storages[_i].storage, ENOUGH);
	best = learn.best;
	for (unsigned i = 0; i < 10 * ENOUGH; i++) {
		feed(&learn, storages[_i].storage, 1);
		REQUIRE(learn.best == best);
		trials += learn.in_trial > 0;
	}
	/* What others pay for the curiosity. */
	ck_assert_uint_le(trials, 10 * ENOUGH / 8);
}

/* How many epochs until it writes as many as is right; at most `limit`. */
static unsigned epochs_until(struct learn *learn, storage_fn *storage, uint64_t right,
			     unsigned limit)
{
	unsigned epochs = 0;

	while (learn->best != right && epochs < limit) {
		feed(learn, storage, 1);
		epochs++;
	}
	return epochs;
}

TEST(tests, the_first_steps_are_quick)
{
	struct learn learn;

	learn_begin(&learn, 2);
	/* What its writers have in flight is not learnt yet: nothing is compared. */
	for (unsigned i = 0; i < SETTLING; i++) {
		ck_assert_uint_eq(learn_capacity(&learn), 2);
		feed(&learn, eight_fill_it, 1);
	}
	/* 4, then 8: one epoch each. */
	ck_assert_uint_le(epochs_until(&learn, eight_fill_it, 8, 10), 2);
	learn_begin(&learn, 2);
	ck_assert_uint_le(epochs_until(&learn, worse_with_each, 1, 100), 20 + SETTLING);
}

/* Without SURPRISE in learn.c the first change is noticed only when the rest is over. */
TEST(tests, it_follows_a_storage_that_changes)
{
	struct learn learn;

	learn_begin(&learn, 2);
	feed(&learn, eight_fill_it, 10 * ENOUGH);
	ck_assert_uint_eq(learn.best, 8);
	ck_assert_uint_le(epochs_until(&learn, worse_with_each, 1, ENOUGH), 40);
	/* One writer alone sees no difference between these two. */
	feed(&learn, worse_with_each, 10 * ENOUGH);
	ck_assert_uint_le(epochs_until(&learn, as_many_as_there_are, WANTED, ENOUGH), 160);
}

TEST(tests, never_more_than_want_to_write_nor_than_the_most)
{
	struct learn learn;

	for (uint32_t wanted = 0; wanted <= 100000; wanted = wanted * 2 + 1) {
		learn_begin(&learn, 2);
		for (unsigned i = 0; i < ENOUGH; i++) {
			struct learn_epoch epoch =
				epoch_of(&learn, as_many_as_there_are(learn_capacity(&learn)));

			epoch.wanted = wanted;
			learn_from(&learn, &epoch);
			REQUIRE(learn_capacity(&learn) >= 1);
			REQUIRE(learn_capacity(&learn) <= (wanted > 2 ? wanted : 2));
			REQUIRE(learn_capacity(&learn) <= LEARN_MOST);
		}
	}
	/* What a rule says is the start, however high. */
	learn_begin(&learn, UINT32_MAX);
	feed(&learn, as_many_as_there_are, ENOUGH);
	ck_assert_uint_eq(learn_capacity(&learn), LEARN_MOST_START);
	feed(&learn, worse_with_each, ENOUGH);
	ck_assert_uint_le(learn_capacity(&learn), 16);
	learn_begin(&learn, 0);
	ck_assert_uint_eq(learn_capacity(&learn), 1);
}

TEST(tests, it_says_what_it_found)
{
	struct learn learn;

	learn_begin(&learn, 2);
	ck_assert_uint_eq(learn.why, LEARN_START);
	feed(&learn, eight_fill_it, ENOUGH);
	ck_assert_uint_eq(learn.why, LEARN_MORE);
	ck_assert_uint_eq(learn.more.writers, 12);
	ck_assert_uint_eq(learn.more.permille, 1000);
	ck_assert_uint_eq(learn.fewer.writers, 5);
	ck_assert_uint_eq(learn.fewer.permille, 625);
	learn_begin(&learn, 2);
	feed(&learn, worse_with_each, ENOUGH);
	ck_assert_uint_eq(learn.why, LEARN_FEWER);
	learn_begin(&learn, 8);
	feed(&learn, eight_fill_it, ENOUGH);
	ck_assert_uint_eq(learn.why, LEARN_KEPT);
}

/* ---- Reports that anybody may have made up --------------------------------------------------- */

TEST(tests, reports_that_make_no_sense_teach_nothing)
{
	static const double times[] = { 0, -1, NAN, INFINITY, -INFINITY, 1e-300, 1e300 };
	struct learn learn, before;

	learn_begin(&learn, 2);
	feed(&learn, eight_fill_it, 5);
	before = learn;
	for (size_t i = 0; i < sizeof(times) / sizeof(*times); i++) {
		const struct learn_epoch epoch = { 8, 8, 1u << 30, times[i] };
		const struct learn_epoch empty = { 0, 0, 0, times[i] };
		const struct learn_epoch full = { UINT32_MAX, UINT32_MAX, UINT64_MAX, times[i] };

		learn_from(&learn, &epoch);
		learn_from(&learn, &empty);
		if (times[i] != 1e300)
			learn_from(&learn, &full);
	}
	ck_assert_mem_eq(&learn, &before, sizeof(learn));
}

static double any_double(uint64_t *random)
{
	const uint64_t bits = test_random(random);
	double value;

	memcpy(&value, &bits, sizeof(value));
	return value;
}

TEST(tests, whatever_is_reported_the_bounds_hold_and_it_can_be_kept_as_text)
{
	uint64_t random = 1;
	struct learn learn;

	learn_begin(&learn, 7);
	for (unsigned i = 0; i < scratch_rounds(200000); i++) {
		const bool wild = test_random_below(&random, 4) == 0;
		const struct learn_epoch epoch = {
			.reports = (uint32_t)test_random(&random),
			.wanted =
				(uint32_t)(test_random(&random) >> test_random_below(&random, 64)),
			.bytes = test_random(&random) >> test_random_below(&random, 64),
			.seconds = wild ? any_double(&random) :
					  (double)test_random_below(&random, 1000000) / 1e3,
		};
		char text[LEARN_TEXT_BYTES];
		struct learn read;

		learn_from(&learn, &epoch);
		REQUIRE(learn_capacity(&learn) >= 1 && learn_capacity(&learn) <= LEARN_MOST);
		REQUIRE(learn_reports(&learn) >= 1 && learn_reports(&learn) <= LEARN_MOST);
		learn_write(&learn, text);
		learn_read(&read, text, 7);
		REQUIRE(!memcmp(&read, &learn, sizeof(read)));
	}
}

/* ---- As text --------------------------------------------------------------------------------- */

TEST(tests, a_text_that_is_not_ours_begins_anew)
{
	static const char *const texts[] = {
		"",
		" ",
		"8",
		"2 4",
		"2 4 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0",     /* one too few */
		"2 4 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0", /* one too many */
		"2 4 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 ",
		"02 4 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0",
		"2 -4 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0",
		"3 4 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0", /* from another start */
		"2 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0", /* nobody may write */
		"2 257 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0",
		"2 4 4 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0", /* compared with itself */
		"2 4 0 1 0 0 0 0 0 0 0 0 0 0 0 0 0 0", /* no trial is in force */
		"2 4 8 2 0 0 0 0 0 0 0 0 0 0 0 0 0 0",
		"2 4 0 0 0 0 0 9 0 0 0 0 0 0 0 0 0 0", /* shares of nothing */
		"2 4 0 0 0 0 99 0 0 0 0 0 0 0 0 0 0 0",
		"2 4 0 0 0 0 0 0 18446744073709551615 0 0 0 0 0 0 0 0 0",
		"2 4 0 0 0 0 0 0 0 0 0 999 0 0 0 0 0 0",
		"2 4 0 0 0 0 0 0 0 0 0 0 0 9 0 0 0 0",
	};
	struct learn learn, fresh;

	learn_read(&learn, "2 4 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0", 2);
	ck_assert_uint_eq(learn.best, 4);
	learn_begin(&fresh, 2);
	for (size_t i = 0; i < sizeof(texts) / sizeof(*texts); i++) {
		learn_read(&learn, texts[i], 2);
		if (memcmp(&learn, &fresh, sizeof(learn)) != 0)
			ck_abort_msg("\"%s\" was taken", texts[i]);
	}
}

/* ---- In front of a storage ------------------------------------------------------------------- */

#define SEEDS 8

/* The figure capacity_vs_best of tests/bench.sh fs asks for 0.95, with more runs. */
TEST(tests, after_ten_minutes_little_is_missing_to_the_best)
{
	for (size_t i = 0; i < learning_storage_count; i++) {
		static const uint32_t tried[] = { 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64 };
		const struct learning_storage *storage = &learning_storages[i];
		double best = 0, learnt = 0;
		struct learning_result result;

		for (size_t t = 0; t < sizeof(tried) / sizeof(*tried); t++) {
			double rate = 0;

			for (uint64_t seed = 1; seed <= SEEDS; seed++) {
				learning_run(storage, tried[t], 2, seed, 600, 1200, &result);
				rate += result.bytes_per_s / SEEDS;
			}
			best = fmax(best, rate);
		}
		for (uint64_t seed = 1; seed <= SEEDS; seed++) {
			learning_run(storage, 0, 2, seed, 600, 1200, &result);
			learnt += result.bytes_per_s / SEEDS;
		}
		if (learnt < 0.92 * best)
			ck_abort_msg("%s: %.2f", storage->name, learnt / best);
	}
}

int main(void)
{
	return check_run("learn");
}
