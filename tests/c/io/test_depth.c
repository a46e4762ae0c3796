/* SPDX-License-Identifier: Apache-2.0 */
/* The in-flight controller: rules that hold for any latencies, and results on modelled storages. */
#include "base/base.h"
#include "support/check_main.h"
#include "support/modelled_storage.h"
#include "support/random.h"

#include <string.h>

#define MS 1000000u

static struct io_depth depth;

static void begin(uint32_t targets, uint32_t most)
{
	const struct io_depth_options options = {
		.request_bytes = MIB,
		.targets = targets,
		.stripe_bytes = targets > 1 ? MIB : 0,
		.most = most,
		.pauses = targets > 1,
	};

	io_depth_begin(&depth, &options);
}

/* Puts the controller into the state of a file that is half written. */
static void begin_at(uint32_t targets, uint32_t most, uint32_t limit, uint64_t least_ns)
{
	begin(targets, most);
	depth.limit = limit;
	depth.least_ns = least_ns;
	depth.starting = false;
}

/* ---- Rules ----------------------------------------------------------------------------------- */

static struct test_case rules = { .name = "rules" };

TEST(rules, what_the_user_has_said_is_always_in_flight)
{
	const struct io_depth_options options = { .request_bytes = MIB, .most = 7, .fixed = true };
	uint64_t now = 1;

	io_depth_begin(&depth, &options);
	for (unsigned i = 0; i < 7; i++) {
		ck_assert(io_depth_allows(&depth, i * MIB));
		io_depth_sent(&depth, i * MIB, MIB);
	}
	ck_assert(!io_depth_allows(&depth, 7 * MIB));
	for (unsigned i = 0; i < 1000; i++) {
		now += (1 + i % 100) * MS;
		io_depth_answered(&depth, 0, MIB, 1, now, false);
		io_depth_sent(&depth, 0, MIB);
		ck_assert_uint_eq(depth.limit, 7);
	}
}

TEST(rules, a_target_has_a_pause_after_all_that_may_be_in_flight)
{
	begin_at(4, 16, 2, MS);
	for (uint64_t offset = 0; offset < 8 * MIB; offset += MIB) {
		ck_assert(io_depth_allows(&depth, offset));
		io_depth_sent(&depth, offset, MIB);
	}
	/* One of the target's two requests is done, the other one is in flight. */
	ck_assert(!io_depth_allows(&depth, 8 * MIB));
	io_depth_answered(&depth, 0, MIB, 1, 2, false);
	ck_assert(!io_depth_allows(&depth, 8 * MIB));
	io_depth_answered(&depth, 4 * MIB, MIB, 1, 3, false);
	ck_assert(io_depth_allows(&depth, 8 * MIB));
	/* Each target is limited by itself. */
	ck_assert(!io_depth_allows(&depth, 9 * MIB));
}

/* Runs rounds of requests that each take `took` ns. */
static void answer(unsigned count, uint64_t *now, uint64_t took, bool idle)
{
	for (unsigned i = 0; i < count; i++) {
		const uint64_t sent = *now;
		const unsigned limit = depth.limit;

		for (unsigned n = 0; n < limit; n++)
			io_depth_sent(&depth, 0, MIB);
		*now += took;
		for (unsigned n = 0; n < limit; n++)
			io_depth_answered(&depth, 0, MIB, sent, *now, idle);
	}
}

static void begin_shared(void)
{
	const struct io_depth_options options = {
		.request_bytes = MIB, .targets = 1, .most = 52, .shared = true
	};

	io_depth_begin(&depth, &options);
}

TEST(rules, on_a_shared_storage_that_tells_nothing_small_limits_have_pauses)
{
	for (unsigned limit = 4; limit < 6; limit++) {
		begin_shared();
		depth.limit = limit;
		for (uint64_t i = 0; i < limit; i++) {
			ck_assert(io_depth_allows(&depth, i * MIB));
			io_depth_sent(&depth, i * MIB, MIB);
		}
		io_depth_answered(&depth, 0, MIB, 1, 2, false);
		ck_assert(io_depth_allows(&depth, limit * MIB) == (limit > 4));
	}
}

TEST(rules, a_file_begins_with_one_request_for_each_target_and_doubles_while_nothing_waits)
{
	uint64_t now = 1;

	begin(1, 24);
	for (unsigned limit = 1; limit < 24; limit = MIN(2 * limit, 24)) {
		ck_assert_uint_eq(depth.limit, limit);
		answer(1, &now, 10 * MS, false);
	}
	ck_assert_uint_eq(depth.limit, 24);
}

TEST(rules, what_others_make_wait_is_not_taken_for_the_least)
{
	uint64_t now = 1;

	begin_shared();
	answer(1, &now, 20 * MS, false);
	answer(400, &now, 80 * MS, false);
	ck_assert_uint_eq(depth.limit, 1);
	ck_assert_uint_eq(depth.least_ns, 20 * MS);
	/*
	 * On storage that is not shared, slower requests mean that the storage has become slower.
	 */
	begin(1, 52);
	answer(1, &now, 20 * MS, false);
	answer(400, &now, 80 * MS, false);
	ck_assert_uint_gt(depth.least_ns, 30 * MS);
}

TEST(rules, a_slow_producer_teaches_nothing)
{
	uint64_t now = 1;

	begin_at(1, 24, 8, MS);
	answer(200, &now, 100 * MS, true);
	ck_assert_uint_eq(depth.limit, 8);
	ck_assert_uint_eq(depth.least_ns, MS);
}

/* A processor that does other work delays answers by some milliseconds. */
TEST(rules, what_is_short_is_no_reason_to_send_less)
{
	uint64_t now = 1;

	begin_at(1, 16, 16, MS);
	answer(20, &now, 9 * MS, false);
	ck_assert_uint_eq(depth.limit, 16);
}

TEST(rules, a_jump_of_latency_halves_the_limit_after_one_round)
{
	uint64_t now = 1;

	begin_at(1, 16, 16, 10 * MS);
	answer(1, &now, 40 * MS, false);
	ck_assert_uint_eq(depth.limit, 8);
}

/* Five answers of sixteen take longer than a whole round at the bound. */
TEST(rules, a_round_ends_early_if_its_requests_take_too_long)
{
	begin_at(1, 16, 16, 10 * MS);
	for (unsigned i = 0; i < 16; i++)
		io_depth_sent(&depth, 0, MIB);
	for (unsigned i = 0; i < 5; i++) {
		ck_assert_uint_eq(depth.limit, 16);
		io_depth_answered(&depth, 0, MIB, 1, 1 + 60 * MS, false);
	}
	ck_assert_uint_eq(depth.limit, 8);
}

/* Answers to requests that were sent before a change say nothing about the new limit. */
TEST(rules, what_was_sent_under_another_limit_does_not_count)
{
	uint64_t now = 1, before;

	begin_at(1, 16, 16, 10 * MS);
	before = now;
	answer(1, &now, 40 * MS, false);
	for (unsigned i = 0; i < 100; i++)
		io_depth_answered(&depth, 0, MIB, before, now + 40 * MS, false);
	ck_assert_uint_eq(depth.limit, 8);
}

/* Each failure doubles the number of rounds until the next attempt. */
TEST(rules, a_limit_that_cannot_be_raised_is_tried_less_and_less_often)
{
	uint64_t now = 1;
	unsigned raised = 0, rounds = 400;

	begin_at(1, 16, 1, 10 * MS);
	for (unsigned i = 0; i < rounds * 8; i++) {
		/* The storage serves one request at a time. */
		answer(1, &now, depth.limit * 10 * MS, false);
		raised += depth.limit > 1;
		ck_assert_uint_le(depth.limit, 2);
	}
	ck_assert_uint_gt(raised, 0);
	ck_assert_uint_lt(raised, rounds * 8 / 16);
}

/* ---- Invariants ------------------------------------------------------------------------------ */

static struct test_case anything = { .name = "anything" };

#define MOST_SENT 4096u

struct sent {
	uint64_t offset, bytes, at;
};

/*
 * Sends and answers at random: any order, any latencies including none, and sizes that no real
 * request has.
 */
static void any_course(uint64_t *random)
{
	static struct sent sent[MOST_SENT];
	const uint32_t targets = 1 + (uint32_t)test_random_below(random, 80);
	const uint32_t most = (uint32_t)test_random_below(random, 70);
	uint64_t now = test_random(random) >> 8, count = 0, in_flight = 0;

	begin(targets, most);
	depth.options.shared = test_random(random) % 2;
	for (unsigned i = 0; i < 2000; i++) {
		const uint64_t offset = test_random_below(random, 1000) * MIB;

		REQUIRE(depth.limit >= 1 && depth.limit <= MAX(most, 1));
		if (count < MOST_SENT && test_random(random) % 2 &&
		    (io_depth_allows(&depth, offset) || !test_random_below(random, 50))) {
			sent[count] =
				(struct sent){ offset, test_random_below(random, 2 * MIB), now };
			io_depth_sent(&depth, offset, sent[count].bytes);
			in_flight += sent[count++].bytes;
		} else if (count) {
			const uint64_t which = test_random_below(random, count);
			const struct sent one = sent[which];

			sent[which] = sent[--count];
			in_flight -= one.bytes;
			io_depth_answered(&depth, one.offset, one.bytes, one.at, now,
					  test_random(random) % 8 == 0);
		} else {
			REQUIRE(io_depth_allows(&depth, offset));
		}
		now += test_random(random) % 4 ?
			       test_random(random) >> (20 + test_random(random) % 44) :
			       (uint64_t)0 - test_random_below(random, MS);
	}
	for (uint32_t i = 0; i < IO_MOST_TARGETS; i++)
		in_flight -= depth.in_flight[i];
	REQUIRE(!in_flight);
}

TEST(anything, limits_stay_within_their_bounds_and_counts_are_right)
{
	uint64_t random = 14;

	for (unsigned i = 0; i < 1000; i++)
		any_course(&random);
}

/* ---- On storages ----------------------------------------------------------------------------- */

static struct test_case storages = { .name = "storages" };

static struct modelled_run run_on(unsigned storage, uint64_t seed)
{
	return (struct modelled_run){
		.storage = &modelled_storages[storage],
		.bytes = 2 * GIB,
		.fill = (double)modelled_storages[storage].request_bytes / 8e9,
		.seed = seed,
	};
}

LOOP_TEST(storages, alone_it_is_as_fast_as_the_best_fixed_depth, 0, 8)
{
	const unsigned fixed[] = { 2, 8, modelled_storages[_i].buffers - 1 };
	struct modelled_run run = run_on((unsigned)_i, 1);
	double ours = modelled_write(&run).bytes_per_s;

	ck_assert_uint_eq(modelled_storage_count, 8);
	for (size_t i = 0; i < ARRAY_LENGTH(fixed); i++) {
		run.fixed = fixed[i];
		ck_assert_double_ge(ours, 0.94 * modelled_write(&run).bytes_per_s);
	}
}

/* Other writers with sixteen requests in flight, for a second. */
struct course {
	uint32_t before, least_beside;
	double at_the_end;
};

static void follow(void *user, double now, const struct io_depth *now_depth)
{
	struct course *course = user;

	if (now < 3)
		course->before = now_depth->limit;
	else if (now < 4)
		course->least_beside = MIN(course->least_beside, now_depth->limit);
	else if (now > 5)
		course->at_the_end += (double)MIB;
}

TEST(storages, it_makes_way_for_others_and_comes_back)
{
	struct course course = { .least_beside = UINT32_MAX };
	struct modelled_run run = run_on(1, 3); /* flash */

	run.bytes = 0;
	run.seconds = 6;
	run.neighbour = (struct modelled_neighbour){ 3, 4, 16, MIB, 0 };
	run.watch = follow;
	run.user = &course;
	modelled_write(&run);
	ck_assert_uint_ge(course.before, 8);
	ck_assert_uint_le(course.least_beside, course.before / 2);
	ck_assert_double_ge(course.at_the_end, 0.9 * 8 * 250e6);
}

/* On a spinning disk with readers, each pause costs two seeks, so more requests in sequence pay. */
TEST(storages, on_a_spinning_disk_beside_readers_the_limit_grows)
{
	struct modelled_run run = run_on(0, 4);
	struct modelled_result alone = modelled_write(&run), beside;

	run.neighbour = (struct modelled_neighbour){ 0.001, 1e6, 4, 16 * KIB, 0.01 };
	run.bytes = GIB;
	beside = modelled_write(&run);
	ck_assert_uint_eq(alone.depth.limit, 1);
	ck_assert_uint_ge(beside.depth.limit, 2);
	run.fixed = 1;
	ck_assert_double_ge(beside.bytes_per_s, 1.3 * modelled_write(&run).bytes_per_s);
}

/* ---- Pace ------------------------------------------------------------------------------------ */

#define IN_FLIGHT (52 * MIB)

static struct test_case pace = { .name = "pace" };

/* Sends as many bytes as can be in flight, in blocks of 4 MiB. Of the time that each block takes,
 * the writer waits for the storage. */
static void send_all_in_flight(struct io_pace *of, uint64_t *sent, uint64_t *now, uint64_t block_ns,
			       uint64_t waited_ns)
{
	for (uint64_t done = 0; done < IN_FLIGHT; done += 4 * MIB) {
		*sent += 4 * MIB;
		*now += block_ns;
		of->waited_ns += waited_ns;
		io_pace_judge(of, *sent, IN_FLIGHT, *now);
	}
}

TEST(pace, the_first_blocks_find_an_empty_queue_and_prove_nothing)
{
	struct io_pace of = { 0 };
	uint64_t sent = 0, now = 5 * MS;

	send_all_in_flight(&of, &sent, &now, MS, 0);
	ck_assert(!of.starved);
	send_all_in_flight(&of, &sent, &now, MS, 0);
	ck_assert(of.starved);
}

TEST(pace, a_writer_that_waits_an_eighth_of_the_time_has_slower_storage)
{
	struct io_pace of = { 0 };
	uint64_t sent = 0, now = 5 * MS;

	send_all_in_flight(&of, &sent, &now, 8 * MS, 8 * MS);
	send_all_in_flight(&of, &sent, &now, 8 * MS, MS);
	ck_assert(!of.starved);
	send_all_in_flight(&of, &sent, &now, 8 * MS, MS - 1);
	ck_assert(of.starved);
	send_all_in_flight(&of, &sent, &now, 8 * MS, MS);
	ck_assert(!of.starved);
}

TEST(pace, a_judgement_holds_until_so_many_bytes_are_sent_again)
{
	struct io_pace of = { 0 };
	uint64_t sent = 0, now = 5 * MS;

	for (unsigned i = 0; i < 2; i++)
		send_all_in_flight(&of, &sent, &now, MS, 0);
	of.waited_ns += 1000 * MS;
	io_pace_judge(&of, sent + IN_FLIGHT - 1, IN_FLIGHT, now + 1000 * MS);
	ck_assert(of.starved);
	io_pace_judge(&of, sent + IN_FLIGHT, IN_FLIGHT, now + 1000 * MS);
	ck_assert(!of.starved);
}
