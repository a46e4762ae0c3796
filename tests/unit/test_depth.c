/* SPDX-License-Identifier: Apache-2.0 */
/* How much is in flight: what holds whatever times requests take, and what holds on storages. */
#include "base/base.h"
#include "support/check_main.h"
#include "support/modelled_storage.h"
#include "support/random.h"

#include <string.h>

#define MS 1000000u

static struct ring_depth depth;

static void begin(uint32_t targets, uint32_t most, const struct ring_taught *taught)
{
	const struct ring_depth_options options = {
		.request_bytes = MIB,
		.targets = targets,
		.stripe_bytes = targets > 1 ? MIB : 0,
		.most = most,
		.pauses = targets > 1,
	};

	ring_depth_begin(&depth, &options, taught);
}

/* ---- Rules ----------------------------------------------------------------------------------- */

static struct test_case rules = { .name = "rules" };

TEST(rules, what_the_user_has_said_is_always_in_flight)
{
	const struct ring_depth_options options = { .request_bytes = MIB,
						    .most = 7,
						    .fixed = true };
	uint64_t now = 1;

	ring_depth_begin(&depth, &options, NULL);
	for (unsigned i = 0; i < 7; i++) {
		ck_assert(ring_depth_allows(&depth, i * MIB));
		ring_depth_sent(&depth, i * MIB, MIB, now);
	}
	ck_assert(!ring_depth_allows(&depth, 7 * MIB));
	for (unsigned i = 0; i < 1000; i++) {
		now += (1 + i % 100) * MS;
		ring_depth_answered(&depth, 0, MIB, 1, now, false);
		ring_depth_sent(&depth, 0, MIB, now);
		ck_assert_uint_eq(depth.window, 7);
	}
}

TEST(rules, a_target_has_a_pause_after_each_window)
{
	struct ring_taught taught = { MIB, 2, MS };

	begin(4, 16, &taught);
	for (uint64_t offset = 0; offset < 8 * MIB; offset += MIB) {
		ck_assert(ring_depth_allows(&depth, offset));
		ring_depth_sent(&depth, offset, MIB, 1);
	}
	/* One of its two requests is done: it has had its window all the same. */
	ck_assert(!ring_depth_allows(&depth, 8 * MIB));
	ring_depth_answered(&depth, 0, MIB, 1, 2, false);
	ck_assert(!ring_depth_allows(&depth, 8 * MIB));
	ring_depth_answered(&depth, 4 * MIB, MIB, 1, 3, false);
	ck_assert(ring_depth_allows(&depth, 8 * MIB));
	/* Its neighbours are not asked. */
	ck_assert(!ring_depth_allows(&depth, 9 * MIB));
}

/* Requests that take so long each, one after the other while the window lasts. */
static void answer(unsigned count, uint64_t *now, uint64_t took, bool starved)
{
	for (unsigned i = 0; i < count; i++) {
		const uint64_t sent = *now;

		for (unsigned n = 0; n < depth.window; n++)
			ring_depth_sent(&depth, 0, MIB, sent);
		*now += took;
		for (unsigned n = depth.window; n > 0; n--)
			ring_depth_answered(&depth, 0, MIB, sent, *now, starved);
	}
}

static void begin_shared(const struct ring_taught *taught)
{
	const struct ring_depth_options options = {
		.request_bytes = MIB, .targets = 1, .most = 52, .shared = true
	};

	ring_depth_begin(&depth, &options, taught);
}

TEST(rules, on_a_shared_storage_that_tells_nothing_small_windows_have_pauses)
{
	for (unsigned window = 4; window < 6; window++) {
		begin_shared(NULL);
		depth.window = window;
		for (uint64_t i = 0; i < window; i++) {
			ck_assert(ring_depth_allows(&depth, i * MIB));
			ring_depth_sent(&depth, i * MIB, MIB, 1);
		}
		ring_depth_answered(&depth, 0, MIB, 1, 2, false);
		ck_assert(ring_depth_allows(&depth, window * MIB) == (window > 4));
	}
}

TEST(rules, on_a_shared_storage_that_tells_nothing_a_file_begins_carefully)
{
	const struct ring_taught taught = { MIB, 40, 20 * MS };
	uint64_t now = 1;

	begin_shared(&taught);
	ck_assert_uint_eq(depth.window, 1);
	/* While nothing waits it is soon where the last one was. */
	answer(7, &now, 20 * MS, false);
	ck_assert_uint_ge(depth.window, 40);
}

TEST(rules, while_nothing_waits_the_window_grows_to_the_bound)
{
	uint64_t now = 1;

	begin(1, 24, NULL);
	ck_assert_uint_eq(depth.window, 1);
	answer(30, &now, 10 * MS, false);
	ck_assert_uint_eq(depth.window, 24);
}

TEST(rules, what_others_make_wait_is_not_taken_for_the_least)
{
	uint64_t now = 1;

	begin_shared(NULL);
	answer(1, &now, 20 * MS, false);
	answer(400, &now, 80 * MS, false);
	ck_assert_uint_eq(depth.window, 1);
	ck_assert_uint_eq(depth.least_ns, 20 * MS);
	/* Where nobody else is, it has become slower. */
	begin(1, 52, NULL);
	answer(1, &now, 20 * MS, false);
	answer(400, &now, 80 * MS, false);
	ck_assert_uint_gt(depth.least_ns, 30 * MS);
}

TEST(rules, a_slow_producer_teaches_nothing)
{
	const struct ring_taught taught = { MIB, 8, MS };
	uint64_t now = 1;

	begin(1, 24, &taught);
	answer(200, &now, MS + MS / 2, true);
	ck_assert_uint_eq(depth.window, 8);
	ck_assert_uint_eq(depth.least_ns, MS);
}

/* Nobody minds a few milliseconds; and a processor that does other work makes as many. */
TEST(rules, what_is_short_is_no_reason_to_send_less)
{
	const struct ring_taught taught = { MIB, 16, MS };
	uint64_t now = 1;

	begin(1, 16, &taught);
	answer(20, &now, MS, false);
	answer(20, &now, 9 * MS, false);
	ck_assert_uint_eq(depth.window, 16);
	ck_assert_uint_eq(depth.halved, 0);
}

TEST(rules, a_jump_of_latency_halves_the_window_after_three_answers)
{
	const struct ring_taught taught = { MIB, 16, 10 * MS };
	uint64_t now = 1;

	begin(1, 16, &taught);
	answer(20, &now, 10 * MS, false);
	ck_assert_uint_eq(depth.window, 16);
	for (unsigned i = 0; i < 16; i++)
		ring_depth_sent(&depth, 0, MIB, now);
	for (unsigned i = 0; i < 3; i++)
		ring_depth_answered(&depth, 0, MIB, now, now + 40 * MS, false);
	ck_assert_uint_eq(depth.window, 8);
	ck_assert_uint_eq(depth.halved, 1);
}

TEST(rules, the_next_file_begins_where_this_one_ended)
{
	struct ring_taught taught = { 0 };
	uint64_t now = 1;

	begin(1, 16, NULL);
	ck_assert(!ring_depth_teach(&depth, &taught));
	answer(30, &now, 10 * MS, false);
	ck_assert(ring_depth_teach(&depth, &taught));
	begin(1, 16, &taught);
	ck_assert_uint_eq(depth.window, 16);
	ck_assert_uint_eq(depth.least_ns, 10 * MS);
	/* Less memory, and requests of another size. */
	begin(1, 5, &taught);
	ck_assert_uint_eq(depth.window, 5);
	taught.request_bytes = 4 * MIB;
	begin(1, 16, &taught);
	ck_assert_uint_eq(depth.window, 1);
}

/* ---- Whatever happens ------------------------------------------------------------------------ */

static struct test_case anything = { .name = "anything" };

#define MOST_SENT 4096u

struct sent {
	uint64_t offset, bytes, at;
};

/* Any order, any times, also none at all, and back; sizes that are no requests'. */
static void any_course(uint64_t *random)
{
	static struct sent sent[MOST_SENT];
	const uint32_t targets = 1 + (uint32_t)test_random_below(random, 80);
	const uint32_t most = (uint32_t)test_random_below(random, 70);
	const struct ring_taught taught = { MIB, (uint32_t)test_random_below(random, 100),
					    test_random(random) >> test_random_below(random, 64) };
	uint64_t now = test_random(random) >> 8, count = 0, flying = 0;

	begin(targets, most, test_random(random) % 2 ? &taught : NULL);
	for (unsigned i = 0; i < 2000; i++) {
		const uint64_t offset = test_random_below(random, 1000) * MIB;

		REQUIRE(depth.window >= 1 && depth.window <= MAX(most, 1));
		REQUIRE(depth.smallest <= depth.window && depth.window <= depth.largest);
		if (count < MOST_SENT && test_random(random) % 2 &&
		    (ring_depth_allows(&depth, offset) || !test_random_below(random, 50))) {
			sent[count] =
				(struct sent){ offset, test_random_below(random, 2 * MIB), now };
			ring_depth_sent(&depth, offset, sent[count].bytes, now);
			flying += sent[count++].bytes;
		} else if (count) {
			const uint64_t which = test_random_below(random, count);
			const struct sent one = sent[which];

			sent[which] = sent[--count];
			flying -= one.bytes;
			ring_depth_answered(&depth, one.offset, one.bytes, one.at, now,
					    test_random(random) % 8 == 0);
		} else {
			REQUIRE(ring_depth_allows(&depth, offset));
		}
		now += test_random(random) % 4 ?
			       test_random(random) >> (20 + test_random(random) % 44) :
			       (uint64_t)0 - test_random_below(random, MS);
	}
	for (uint32_t i = 0; i < RING_MOST_TARGETS; i++)
		flying -= depth.flying[i];
	REQUIRE(!flying);
}

TEST(anything, windows_stay_within_their_bounds_and_counts_are_right)
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

LOOP_TEST(storages, what_was_learned_makes_the_next_save_no_slower, 0, 8)
{
	struct modelled_run run = run_on((unsigned)_i, 2);
	struct ring_taught taught;
	struct modelled_result first = modelled_write(&run);

	ck_assert(ring_depth_teach(&first.depth, &taught));
	run.taught = &taught;
	ck_assert_double_ge(modelled_write(&run).bytes_per_s, 0.97 * first.bytes_per_s);
}

/* Others who have sixteen requests in flight, for a second. */
struct course {
	uint32_t before, least_beside;
	double at_the_end;
};

static void follow(void *user, double now, const struct ring_depth *now_depth)
{
	struct course *course = user;

	if (now < 3)
		course->before = now_depth->window;
	else if (now < 4)
		course->least_beside = MIN(course->least_beside, now_depth->window);
	else if (now > 5)
		course->at_the_end += (double)MIB;
}

TEST(storages, it_makes_room_for_others_and_comes_back)
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

/* On a spinning disk each pause costs two seeks while others read: more in a row is worth it. */
TEST(storages, on_a_spinning_disk_beside_readers_the_window_grows)
{
	struct modelled_run run = run_on(0, 4);
	struct modelled_result alone = modelled_write(&run), beside;

	run.neighbour = (struct modelled_neighbour){ 0.001, 1e6, 4, 16 * KIB, 0.01 };
	run.bytes = GIB;
	beside = modelled_write(&run);
	ck_assert_uint_eq(alone.depth.window, 1);
	ck_assert_uint_ge(beside.depth.window, 2);
	run.fixed = 1;
	ck_assert_double_ge(beside.bytes_per_s, 1.3 * modelled_write(&run).bytes_per_s);
}

int main(void)
{
	return check_run("ring/depth");
}
