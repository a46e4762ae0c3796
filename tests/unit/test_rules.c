/* SPDX-License-Identifier: Apache-2.0 */
/* The rules of turns, with a clock of the test's own. */
#include "slots/rules.h"
#include "support/check_main.h"
#include "support/random.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>

static struct rules_state state;
static int64_t now;
static struct slots_answer answer;

static void setup(void)
{
	now = 1000000;
	rules_make(&state, now, 0, 0);
	state.woken_count = 0;
}

/* The process of "c3-1" is 3. */
static int ask(const char *id, const char *job, uint32_t weight, uint64_t bytes)
{
	struct slots_config config = {
		.identity = { .ranks = 1, .share = 100, .node = "n01" },
		.lease_ms = 15000,
		.default_capacity = 2,
	};
	struct slots_request request = { .weight = weight, .bytes = bytes };

	snprintf(config.identity.job, sizeof(config.identity.job), "%s", job);
	if (!strcmp(job, "large-share"))
		config.identity.share = 300;
	snprintf(request.id, sizeof(request.id), "%s", id);
	return rules_acquire(&state, now, &config, &request, (uint32_t)(id[1] - '0'), &answer);
}

static enum slots_state look(const char *id)
{
	const struct slots_config config = { .lease_ms = 15000 };
	struct slots_beat beat = { .passed = 1 };

	snprintf(beat.id, sizeof(beat.id), "%s", id);
	rules_beat(&state, now, &config, &beat, &answer);
	return answer.state;
}

static void set_capacity(uint32_t capacity)
{
	const struct ioshape_pool_settings settings = { .capacity = capacity };

	rules_set(&state, now, &settings);
}

START_TEST(slots_are_given_up_to_the_capacity_and_then_in_order)
{
	ck_assert_int_eq(ask("c1-1", "a", 1, 0), 0);
	ck_assert_int_eq(answer.state, SLOTS_HOLDING);
	ck_assert_int_eq(ask("c2-1", "a", 1, 0), 0);
	ck_assert_int_eq(answer.state, SLOTS_HOLDING);
	ask("c3-1", "a", 1, 0);
	ck_assert_int_eq(answer.state, SLOTS_WAITING);
	ck_assert_uint_eq(answer.position, 0);
	ck_assert_str_eq(answer.ahead, "job a, rank 0 on n01");
	ask("c4-1", "a", 1, 0);
	ck_assert_uint_eq(answer.position, 1);
	ck_assert(rules_release(&state, now, "c2-1", 0));
	ck_assert_uint_eq(state.woken_count, 1);
	ck_assert_uint_eq(state.woken[0], 3);
	ck_assert_int_eq(look("c3-1"), SLOTS_HOLDING);
	ck_assert_int_eq(look("c4-1"), SLOTS_WAITING);
	ck_assert_int_eq(look("c2-1"), SLOTS_NONE);
	ck_assert(!rules_release(&state, now, "c2-1", 0));
}
END_TEST

START_TEST(a_repeated_request_is_not_counted_twice)
{
	uint64_t fence;

	ask("c1-1", "a", 1, 0);
	fence = answer.fence;
	ask("c1-1", "a", 1, 0);
	ck_assert_uint_eq(answer.fence, fence);
	ck_assert_uint_eq(state.used, 1);
	ck_assert_uint_eq(state.pool.grants, 1);
}
END_TEST

START_TEST(a_request_made_twice_has_a_whole_lease)
{
	ask("c1-1", "a", 2, 0);
	ask("c2-1", "a", 1, 0);
	ask("c3-1", "a", 1, 0);
	ck_assert_uint_eq(answer.position, 1);
	now += 10000;
	ask("c1-1", "a", 2, 0);
	ck_assert_int_eq(answer.state, SLOTS_HOLDING);
	ask("c2-1", "a", 1, 0);
	ck_assert_int_eq(answer.state, SLOTS_WAITING);
	now += 10000;
	/* c3-1 is silent and taken for dead. */
	ck_assert_int_eq(look("c1-1"), SLOTS_HOLDING);
	ck_assert_int_eq(look("c2-1"), SLOTS_WAITING);
	ck_assert_int_eq(look("c3-1"), SLOTS_NONE);
}
END_TEST

START_TEST(fences_rise_with_every_grant)
{
	uint64_t fence = 0;
	char id[40];

	for (int i = 0; i < 5000; i++) {
		snprintf(id, sizeof(id), "c1-%d", i);
		ask(id, "a", 1, 0);
		ck_assert_uint_gt(answer.fence, fence);
		fence = answer.fence;
		rules_release(&state, now, id, 0);
		now += i % 7 == 0;
	}
}
END_TEST

START_TEST(fences_rise_across_the_loss_of_all_data)
{
	uint64_t fence, epoch;

	ask("c1-1", "a", 1, 0);
	fence = answer.fence;
	epoch = answer.epoch;
	rules_make(&state, now, epoch, fence);
	ask("c1-1", "a", 1, 0);
	ck_assert_uint_gt(answer.fence, fence);
	ck_assert_uint_gt(answer.epoch, epoch);
}
END_TEST

/* One slot, requests of 1 s each, both jobs always wait: how often each was first. */
static void alternate(const char *second, unsigned turns, unsigned got[2])
{
	const char *jobs[2] = { "small-share", second };
	char id[40], holder[40] = "c0-0";
	unsigned asked[2] = { 0, 0 };

	ask(holder, "other", 1, 0);
	set_capacity(1);
	for (unsigned i = 0; i < 4; i++) {
		snprintf(id, sizeof(id), "c%u-%u", 1 + i % 2, asked[i % 2]++);
		ask(id, jobs[i % 2], 1, 1000 * MIB);
	}
	for (unsigned i = 0; i < turns; i++) {
		now += 1000;
		state.woken_count = 0;
		rules_release(&state, now, holder, 0);
		ck_assert_uint_eq(state.woken_count, 1);
		for (uint32_t j = 0; j < state.member_count; j++) {
			if (state.members[j].state == RULES_HOLDING)
				snprintf(holder, sizeof(holder), "%s", state.members[j].id);
		}
		got[holder[1] - '1']++;
		snprintf(id, sizeof(id), "c%c-%u", holder[1], asked[holder[1] - '1']++);
		ask(id, jobs[holder[1] - '1'], 1, 1000 * MIB);
		for (uint32_t j = 0; j < state.member_count; j++)
			state.members[j].deadline = now + 15000; /* they all beat */
	}
}

START_TEST(jobs_of_equal_shares_take_turns)
{
	unsigned got[2] = { 0, 0 };

	alternate("another", 100, got);
	ck_assert_uint_ge(got[0], 48);
	ck_assert_uint_ge(got[1], 48);
}
END_TEST

START_TEST(a_job_with_three_times_the_share_gets_three_times_the_slots)
{
	unsigned got[2] = { 0, 0 };

	alternate("large-share", 400, got);
	ck_assert_uint_ge(got[1], 280);
	ck_assert_uint_le(got[1], 320);
}
END_TEST

START_TEST(a_heavy_request_is_not_overtaken_and_comes_in_alone)
{
	ask("c1-1", "a", 1, 0);
	ask("c2-1", "b", 9, 0); /* more than there is */
	ck_assert_int_eq(answer.state, SLOTS_WAITING);
	ask("c3-1", "c", 1, 0); /* would fit */
	ck_assert_int_eq(answer.state, SLOTS_WAITING);
	rules_release(&state, now, "c1-1", 0);
	ck_assert_int_eq(look("c2-1"), SLOTS_HOLDING);
	ck_assert_uint_eq(state.used, 9);
	ck_assert_int_eq(look("c3-1"), SLOTS_WAITING);
	rules_release(&state, now, "c2-1", 0);
	ck_assert_int_eq(look("c3-1"), SLOTS_HOLDING);
	ck_assert_uint_eq(state.used, 1);
}
END_TEST

START_TEST(what_the_operator_set_wins_until_it_is_cleared)
{
	const struct ioshape_pool_settings clear = { .clear = 1 };

	ask("c1-1", "a", 1, 0);
	ck_assert_uint_eq(answer.capacity, 2);
	set_capacity(1);
	ck_assert(rules_numbers_set(&state.pool));
	ask("c2-1", "a", 1, 0);
	ck_assert_int_eq(answer.state, SLOTS_WAITING);
	ck_assert_uint_eq(answer.capacity, 1);
	rules_set(&state, now, &clear);
	ck_assert(!rules_numbers_set(&state.pool));
	ck_assert_int_eq(look("c2-1"), SLOTS_HOLDING);
	ck_assert_uint_eq(answer.capacity, 2);
}
END_TEST

START_TEST(a_small_one_is_let_past_the_queue_one_at_a_time)
{
	ask("c1-1", "a", 1, 0);
	ask("c2-1", "a", 1, 0);
	ask("c3-1", "b", 1, GIB);
	ask("c4-1", "c", 1, MIB);
	ck_assert_int_eq(answer.state, SLOTS_HOLDING);
	ck_assert_uint_eq(answer.weight, 0);
	ck_assert_uint_eq(state.used, 2);
	ask("c5-1", "c", 1, MIB);
	ck_assert_int_eq(answer.state, SLOTS_WAITING);
	rules_release(&state, now, "c4-1", MIB);
	ck_assert_int_eq(look("c5-1"), SLOTS_HOLDING);
	ck_assert_int_eq(look("c3-1"), SLOTS_WAITING);
	rules_release(&state, now, "c5-1", MIB);
	ck_assert_uint_eq(state.express_used, 0);
}
END_TEST

START_TEST(a_lease_that_ran_out_gives_the_slot_to_the_next)
{
	ask("c1-1", "a", 1, 0);
	ask("c2-1", "a", 1, 0);
	ask("c3-1", "a", 1, 0);
	now += 10000;
	look("c2-1");
	look("c3-1");
	now += 5000; /* c1 has not been heard of for all its lease */
	ck_assert_int_eq(look("c3-1"), SLOTS_HOLDING);
	ck_assert_int_eq(look("c2-1"), SLOTS_HOLDING);
	ck_assert_int_eq(look("c1-1"), SLOTS_NONE); /* and is not let in again silently */
	ck_assert_uint_eq(state.used, 2);
}
END_TEST

START_TEST(who_is_let_in_must_show_soon_that_it_knows)
{
	ask("c1-1", "a", 2, 0);
	ask("c2-1", "a", 2, 0);
	ask("c3-1", "a", 2, 0);
	rules_release(&state, now, "c1-1", 0); /* c2 is let in, and dead */
	now += 7501;
	ck_assert_int_eq(look("c3-1"), SLOTS_HOLDING);
}
END_TEST

START_TEST(a_buried_process_leaves_nothing)
{
	uint32_t processes[8];

	ask("c1-1", "a", 1, 0);
	ask("c1-2", "a", 1, 0);
	ask("c2-1", "a", 1, 0);
	ask("c1-3", "a", 1, 0);
	ask("c3-1", "a", 1, 0);
	ck_assert_uint_eq(rules_in_the_way(&state, processes, 8), 2);
	rules_bury(&state, now, 1);
	ck_assert_uint_eq(state.member_count, 2);
	ck_assert_uint_eq(state.used, 2);
	ck_assert_int_eq(look("c2-1"), SLOTS_HOLDING);
	ck_assert_int_eq(look("c3-1"), SLOTS_HOLDING);
}
END_TEST

START_TEST(who_is_kicked_is_out)
{
	ask("c1-1", "a", 2, 0);
	ask("c2-1", "a", 2, 0);
	ck_assert(!rules_kick(&state, now, "nobody"));
	ck_assert(rules_kick(&state, now, "c1-1"));
	ck_assert_int_eq(look("c1-1"), SLOTS_NONE);
	ck_assert_int_eq(look("c2-1"), SLOTS_HOLDING);
}
END_TEST

START_TEST(bandwidth_is_given_at_the_rate_that_is_set)
{
	const struct ioshape_pool_settings settings = { .pool_rate = 100000000 };
	struct slots_config config = { .lease_ms = 15000, .identity = { .job = "a" } };
	struct slots_grant grant;
	uint64_t bytes = 0;
	double end = 0;

	rules_pace(&state, now, &config, 1000, &grant);
	ck_assert_uint_eq(grant.bytes, 0);
	ck_assert_uint_gt(grant.end_ms, 0);
	rules_set(&state, now, &settings);
	for (int i = 0; i < 40; i++) {
		rules_pace(&state, now, &config, 1000, &grant);
		bytes += grant.bytes;
		end = grant.end_ms;
	}
	ck_assert_double_eq_tol((double)bytes / end, 100000, 100);
	/* What was not used is there for the next. */
	rules_pace(&state, now, &config, -(int64_t)grant.bytes, &grant);
	rules_pace(&state, now, &config, 1000, &grant);
	ck_assert_double_eq_tol(grant.end_ms, end, 1);
	/* The job's own rate is lower. */
	config.rate = 1000000;
	now += 3600000;
	rules_pace(&state, now, &config, 1000, &grant);
	ck_assert_uint_eq(grant.bytes, 250000);
	ck_assert_uint_eq(grant.end_ms, 250);
}
END_TEST

START_TEST(a_full_pool_refuses_and_goes_on)
{
	char id[40];

	for (unsigned i = 0; i < RULES_MEMBERS; i++) {
		snprintf(id, sizeof(id), "c1-%u", i);
		ck_assert_int_eq(ask(id, "a", 1, 0), 0);
	}
	ck_assert_int_eq(ask("c2-1", "a", 1, 0), -ENOSPC);
	ck_assert_int_eq(ask("c1-1023", "a", 1, 0), 0);
	ck_assert(rules_release(&state, now, "c1-0", 0));
	ck_assert_int_eq(ask("c2-1", "a", 1, 0), 0);
}
END_TEST

START_TEST(more_jobs_than_are_remembered_are_served_as_well)
{
	char id[40], job[40];

	for (unsigned i = 0; i < 3 * RULES_JOBS; i++) {
		snprintf(id, sizeof(id), "c1-%u", i);
		snprintf(job, sizeof(job), "job-%u", i);
		REQUIRE(!ask(id, job, 1, 0));
		if (i >= RULES_MEMBERS - 24)
			REQUIRE(rules_release(&state, now, id, 0));
	}
	ck_assert_uint_eq(state.job_count, RULES_JOBS);
	ck_assert(rules_hold(&state));
}
END_TEST

/* What always holds, whatever happened. */
static void require_sound(uint32_t capacity)
{
	struct rules_state copy = state;

	REQUIRE(rules_hold(&state));
	REQUIRE(copy.used == state.used && copy.holders == state.holders);
	REQUIRE(copy.waiters == state.waiters && copy.express_used == state.express_used);
	REQUIRE(state.used <= capacity || state.holders - state.express_used == 1);
}

START_TEST(any_schedule_keeps_the_pool_sound)
{
	uint64_t seed = 4711;
	char id[40], job[8];

	set_capacity(3);
	for (int i = 0; i < 100000; i++) {
		const unsigned client = (unsigned)test_random_below(&seed, 6);

		state.woken_count = 0;
		snprintf(id, sizeof(id), "c%u-%u", client, (unsigned)test_random_below(&seed, 4));
		snprintf(job, sizeof(job), "j%u", client % 3);
		now += (int64_t)test_random_below(&seed, 50);
		switch (test_random_below(&seed, 8)) {
		case 0:
			now += (int64_t)test_random_below(&seed, 8000);
			break;
		case 1:
		case 2:
		case 3:
			ask(id, job, 1 + (uint32_t)test_random_below(&seed, 4),
			    test_random_below(&seed, 64 * MIB));
			break;
		case 4:
			look(id);
			break;
		case 5:
		case 6:
			rules_release(&state, now, id, test_random_below(&seed, 64 * MIB));
			break;
		default:
			rules_bury(&state, now, client);
		}
		if (i % 16 == 0)
			require_sound(3);
	}
}
END_TEST

/* Whatever a neighbour wrote there: it is refused, or every operation ends and stays in bounds. */
START_TEST(damaged_states_are_refused_or_harmless)
{
	static struct rules_state good;
	uint64_t seed = 99;
	unsigned held = 0;

	ask("c1-1", "a", 1, 0);
	ask("c2-1", "b", 1, 0);
	ask("c3-1", "c", 1, 0);
	ask("c4-1", "d", 1, MIB);
	good = state;
	for (int i = 0; i < 30000; i++) {
		uint8_t *parts[] = { (uint8_t *)&state.pool, (uint8_t *)state.members,
				     (uint8_t *)state.jobs };
		const size_t sizes[] = { sizeof(state.pool), 4 * sizeof(state.members[0]),
					 4 * sizeof(state.jobs[0]) };

		memcpy(&state, &good, offsetof(struct rules_state, jobs));
		memcpy(state.jobs, good.jobs, sizes[2]);
		memcpy(state.members, good.members, sizes[1]);
		for (uint64_t j = 1 + test_random_below(&seed, 3); j; j--) {
			const uint64_t part = test_random_below(&seed, 3);

			parts[part][test_random_below(&seed, sizes[part])] =
				(uint8_t)test_random(&seed);
		}
		if (!rules_hold(&state))
			continue;
		held++;
		state.woken_count = 0;
		now = state.pool.clock;
		ask("c5-1", "e", 1, 0);
		look("c3-1");
		rules_release(&state, now, "c1-1", 5 * MIB);
		now += 700000; /* all leases are over, whatever was written there */
		rules_release(&state, now, "none", 0);
		rules_release(&state, now, "none", 0);
		REQUIRE(state.member_count == 0 && state.used == 0);
	}
	ck_assert_uint_gt(held, 1000);
}
END_TEST

int main(void)
{
	Suite *suite = suite_create("rules");
	TCase *tcase = tcase_create("rules");

	tcase_add_checked_fixture(tcase, setup, NULL);
	tcase_add_test(tcase, slots_are_given_up_to_the_capacity_and_then_in_order);
	tcase_add_test(tcase, a_repeated_request_is_not_counted_twice);
	tcase_add_test(tcase, a_request_made_twice_has_a_whole_lease);
	tcase_add_test(tcase, fences_rise_with_every_grant);
	tcase_add_test(tcase, fences_rise_across_the_loss_of_all_data);
	tcase_add_test(tcase, jobs_of_equal_shares_take_turns);
	tcase_add_test(tcase, a_job_with_three_times_the_share_gets_three_times_the_slots);
	tcase_add_test(tcase, a_heavy_request_is_not_overtaken_and_comes_in_alone);
	tcase_add_test(tcase, what_the_operator_set_wins_until_it_is_cleared);
	tcase_add_test(tcase, a_small_one_is_let_past_the_queue_one_at_a_time);
	tcase_add_test(tcase, a_lease_that_ran_out_gives_the_slot_to_the_next);
	tcase_add_test(tcase, who_is_let_in_must_show_soon_that_it_knows);
	tcase_add_test(tcase, a_buried_process_leaves_nothing);
	tcase_add_test(tcase, who_is_kicked_is_out);
	tcase_add_test(tcase, bandwidth_is_given_at_the_rate_that_is_set);
	tcase_add_test(tcase, a_full_pool_refuses_and_goes_on);
	tcase_add_test(tcase, more_jobs_than_are_remembered_are_served_as_well);
	tcase_add_test(tcase, any_schedule_keeps_the_pool_sound);
	tcase_add_test(tcase, damaged_states_are_refused_or_harmless);
	tcase_set_timeout(tcase, 30);
	suite_add_tcase(suite, tcase);
	return check_main(suite);
}
