/* SPDX-License-Identifier: Apache-2.0 */
/* The queue of one host: on a table in memory, by a clock of the test's own. */
#include "slots/local.h"
#include "support/check_main.h"
#include "support/random.h"
#include "support/scratch.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define LEASE_MS 3000u

static struct local_table *table;
static struct slots_config config;
static struct slots_answer answer;
static bool urgent; /* what is asked for */
static uint32_t places;

static void setup(void)
{
	table = calloc(1, sizeof(*table));
	ck_assert_ptr_nonnull(table);
	table->now_ns = UINT64_C(1000000000000);
	table->wall_ms = UINT64_C(1700000000000);
	urgent = false;
	places = 0;
	local_clear(table, "p");
	config = (struct slots_config){
		.identity = { .job = "job",
			      .node = "here",
			      .user = "me",
			      .ranks = 1,
			      .share = 100 },
		.lease_ms = LEASE_MS,
		.default_capacity = 2,
	};
}

static void teardown(void)
{
	free(table);
}

static void pass_ms(uint64_t ms)
{
	table->now_ns += ms * 1000000;
	table->wall_ms += ms;
}

static int ask_for(const char *id, uint32_t weight, uint64_t bytes, bool never_wait)
{
	struct slots_request request = {
		.weight = weight,
		.bytes = bytes,
		.never_wait = never_wait,
		.urgent = urgent,
		.default_capacity = places,
	};

	snprintf(request.id, sizeof(request.id), "%s", id);
	table->woken_count = 0;
	/* The process is the number behind the first letter. */
	const uint32_t process = (uint32_t)atoi(id + 1);

	return local_queue_acquire(table, &config, &request, process, process, &answer);
}

static enum slots_state ask(const char *id, uint32_t weight)
{
	ck_assert_int_eq(ask_for(id, weight, 0, false), 0);
	return answer.state;
}

static enum slots_state state_of(const char *id)
{
	struct slots_beat beat = { .passed = 5 };

	snprintf(beat.id, sizeof(beat.id), "%s", id);
	local_queue_beat(table, &config, &beat, &answer);
	return answer.state;
}

static bool give_back(const char *id, uint64_t passed)
{
	table->woken_count = 0;
	return local_queue_release(table, id, passed);
}

static void set(uint32_t capacity, bool clear)
{
	const struct ioshape_pool_settings settings = { .capacity = capacity, .clear = clear };

	table->woken_count = 0;
	local_queue_set(table, &settings);
}

static struct test_case tests = { .name = "local queue", .setup = setup, .teardown = teardown };

TEST(tests, slots_are_granted_in_the_order_of_requests)
{
	ck_assert_int_eq(ask("r1", 1), SLOTS_HOLDING);
	ck_assert_int_eq(ask("r2", 1), SLOTS_HOLDING);
	for (int i = 3; i < 6; i++) {
		char id[8];

		snprintf(id, sizeof(id), "r%d", i);
		ck_assert_int_eq(ask(id, 1), SLOTS_WAITING);
		ck_assert_uint_eq(answer.position, (uint32_t)i - 3);
		pass_ms(1);
	}
	ck_assert_str_eq(answer.ahead, "job job, rank 0 on here");
	ck_assert(give_back("r2", 0));
	ck_assert_uint_eq(table->woken_count, 1);
	ck_assert_uint_eq(table->woken[0], 3);
	ck_assert_int_eq(state_of("r3"), SLOTS_HOLDING);
	ck_assert_int_eq(state_of("r4"), SLOTS_WAITING);
	ck_assert_uint_eq(answer.position, 0);
	ck_assert(!give_back("r2", 0));
}

static enum slots_state ask_urgently(const char *id, uint32_t weight)
{
	urgent = true;
	ask(id, weight);
	urgent = false;
	return answer.state;
}

TEST(tests, one_at_a_time_with_a_deadline_is_beside_the_slots)
{
	ck_assert_int_eq(ask("r1", 1), SLOTS_HOLDING);
	ck_assert_int_eq(ask("r2", 1), SLOTS_HOLDING);
	ck_assert_int_eq(ask("r3", 1), SLOTS_WAITING);
	ck_assert_int_eq(ask_urgently("r4", 1), SLOTS_HOLDING);
	ck_assert_uint_eq(answer.weight, 1);
	ck_assert_int_eq(ask_urgently("r5", 1), SLOTS_WAITING);
	ck_assert_uint_eq(answer.position, 0);
	ck_assert_int_eq(ask_urgently("r6", 1), SLOTS_WAITING);
	ck_assert_uint_eq(answer.position, 1);
	ck_assert_int_eq(state_of("r3"), SLOTS_WAITING);
	ck_assert_uint_eq(answer.position, 2);
	/* Any slot that comes back makes room for the next of them. */
	ck_assert(give_back("r1", 0));
	ck_assert_uint_eq(table->woken_count, 1);
	ck_assert_uint_eq(table->woken[0], 5);
	ck_assert(give_back("r5", 0));
	ck_assert_int_eq(state_of("r6"), SLOTS_HOLDING);
	ck_assert(give_back("r4", 0));
	ck_assert_int_eq(state_of("r3"), SLOTS_WAITING);
	ck_assert(give_back("r6", 0));
	ck_assert_int_eq(state_of("r3"), SLOTS_HOLDING);
}

TEST(tests, a_deadline_waits_for_a_writer_that_needs_more_than_there_is)
{
	ck_assert_int_eq(ask("r1", 5), SLOTS_HOLDING);
	ck_assert_int_eq(ask_urgently("r2", 1), SLOTS_WAITING);
	ck_assert(give_back("r1", 0));
	ck_assert_int_eq(state_of("r2"), SLOTS_HOLDING);
	ck_assert_int_eq(ask_urgently("r3", 5), SLOTS_HOLDING);
}

static void ask_as(const char *job, const char *id)
{
	snprintf(config.identity.job, sizeof(config.identity.job), "%s", job);
	ask(id, 1);
}

static uint32_t place_of(const char *id)
{
	ask(id, 1);
	return answer.place;
}

TEST(tests, those_that_hold_slots_have_places_of_their_own)
{
	set(6, false);
	config.default_capacity = 2;
	ck_assert_uint_eq(place_of("r1"), 0); /* so many by rule, of any storage */
	give_back("r1", 0);
	places = 3;
	for (uint32_t i = 1; i <= 7; i++) {
		char id[8];

		snprintf(id, sizeof(id), "r%u", i);
		ck_assert_uint_eq(place_of(id), i > 6 ? 0 : (i - 1) % 3 + 1);
	}
	/* One writer is left there, and two elsewhere. */
	give_back("r2", 0);
	ck_assert_int_eq(state_of("r7"), SLOTS_HOLDING);
	ck_assert_uint_eq(answer.place, 2);
	give_back("r7", 0);
	give_back("r5", 0);
	ck_assert_uint_eq(place_of("r8"), 2);
	ck_assert_uint_eq(place_of("r9"), 2);
}

TEST(tests, a_request_that_is_repeated_changes_nothing)
{
	uint64_t fence;

	ask("r1", 1);
	fence = answer.fence;
	pass_ms(2000);
	ck_assert_int_eq(ask("r1", 1), SLOTS_HOLDING);
	ck_assert_uint_eq(answer.fence, fence);
	ck_assert_uint_eq(table->image.head.grants, 1);
	/* It shows that it lives. */
	pass_ms(2000);
	ck_assert_int_eq(state_of("r1"), SLOTS_HOLDING);
}

TEST(tests, a_heavy_request_is_not_overtaken_and_one_above_the_capacity_writes_alone)
{
	ask("r1", 1);
	ck_assert_int_eq(ask("r2", 5), SLOTS_WAITING);
	ck_assert_int_eq(ask("r3", 1), SLOTS_WAITING);
	give_back("r1", 0);
	ck_assert_int_eq(state_of("r2"), SLOTS_HOLDING);
	ck_assert_int_eq(state_of("r3"), SLOTS_WAITING);
	give_back("r2", 0);
	ck_assert_int_eq(state_of("r3"), SLOTS_HOLDING);
}

TEST(tests, a_small_request_passes_the_queue_one_at_a_time)
{
	ask("r1", 2);
	ck_assert_int_eq(ask("r2", 1), SLOTS_WAITING);
	ck_assert_int_eq(ask_for("r3", 1, 1 * MIB, false), 0);
	ck_assert_int_eq(answer.state, SLOTS_HOLDING);
	ck_assert_uint_eq(answer.weight, 0);
	ck_assert_int_eq(ask_for("r4", 1, 1 * MIB, false), 0);
	ck_assert_int_eq(answer.state, SLOTS_WAITING);
	ck_assert_int_eq(ask_for("r5", 1, SLOTS_SMALL_BYTES + 1, false), 0);
	ck_assert_int_eq(answer.state, SLOTS_WAITING);
	give_back("r3", 0);
	ck_assert_int_eq(state_of("r4"), SLOTS_HOLDING);
	ck_assert_int_eq(state_of("r2"), SLOTS_WAITING);
	ck_assert_int_eq(state_of("r5"), SLOTS_WAITING);
}

TEST(tests, a_request_that_will_not_wait_leaves_nothing_behind)
{
	ask("r1", 2);
	ck_assert_int_eq(ask_for("r2", 1, 0, true), 0);
	ck_assert_int_eq(answer.state, SLOTS_NONE);
	ck_assert_uint_eq(table->image.head.member_end, 1);
}

TEST(tests, without_heartbeats_a_member_is_gone_after_its_lease)
{
	ask("r1", 2);
	ask("r2", 1);
	ask("r3", 1);
	pass_ms(2000);
	ck_assert_int_eq(state_of("r2"), SLOTS_WAITING);
	pass_ms(1000);
	ck_assert_int_eq(state_of("r2"), SLOTS_HOLDING);
	ck_assert_int_eq(state_of("r1"), SLOTS_NONE);
	ck_assert_int_eq(state_of("r3"), SLOTS_NONE);
	/* One that was let in while it waited has half a lease to show that it knows. */
	ask("r4", 2);
	give_back("r2", 0);
	pass_ms(LEASE_MS / 2);
	ck_assert_int_eq(state_of("r4"), SLOTS_NONE);
}

TEST(tests, the_capacity_is_the_operators_then_the_jobs_then_the_default)
{
	ask("r1", 1);
	ck_assert_uint_eq(answer.capacity, 2);
	config.asked_capacity = 7;
	ask("r2", 1);
	ck_assert_uint_eq(answer.capacity, 2); /* the pool is in use */
	give_back("r1", 0);
	give_back("r2", 0);
	ask("r3", 1);
	ck_assert_uint_eq(answer.capacity, 7);
	set(1, false);
	ck_assert(local_is_set(&table->image.head));
	ck_assert_int_eq(ask("r4", 1), SLOTS_WAITING);
	ck_assert_uint_eq(answer.capacity, 1);
	set(0, true);
	ck_assert(!local_is_set(&table->image.head));
	ck_assert_int_eq(state_of("r4"), SLOTS_HOLDING);
}

TEST(tests, fences_rise_by_time_and_by_grant)
{
	uint64_t fence = 0;

	for (unsigned i = 0; i < scratch_rounds(5000); i++) {
		ask("r1", 1);
		REQUIRE(answer.fence > fence);
		fence = answer.fence;
		give_back("r1", 0);
		pass_ms(i % 7 == 0);
	}
	/* Also where the table was lost. */
	table->latest_fence = fence;
	local_clear(table, "p");
	ask("r1", 1);
	ck_assert_uint_gt(answer.fence, fence);
}

TEST(tests, the_dead_are_looked_for_among_holders_and_the_first_that_waits)
{
	uint32_t processes[8];

	ask("r1", 1);
	ask("r2", 1);
	ck_assert_uint_eq(local_queue_in_the_way(table, processes, 8), 0);
	ask("r3", 1);
	ask("r4", 1);
	ck_assert_uint_eq(local_queue_in_the_way(table, processes, 8), 3);
	local_queue_bury(table, 1);
	ck_assert_int_eq(state_of("r1"), SLOTS_NONE);
	ck_assert_int_eq(state_of("r3"), SLOTS_HOLDING);
	ck_assert(local_queue_kick(table, "r2"));
	ck_assert(!local_queue_kick(table, "r2"));
	ck_assert_int_eq(state_of("r4"), SLOTS_HOLDING);
}

TEST(tests, a_full_table_refuses_and_takes_the_next_when_one_leaves)
{
	char id[16];

	for (uint32_t i = 0; i < LOCAL_MEMBERS; i++) {
		snprintf(id, sizeof(id), "r%u", i);
		REQUIRE(!ask_for(id, 1, 0, false));
	}
	ck_assert_int_eq(ask_for("r9999", 1, 0, false), -ENOSPC);
	ck_assert(give_back("r700", 0));
	ck_assert_int_eq(ask("r9999", 1), SLOTS_WAITING);
	ck_assert_uint_eq(answer.position, LOCAL_MEMBERS - 3);
}

static struct slots_grant pace(int64_t bytes)
{
	struct slots_grant grant;

	local_queue_pace(table, &config, bytes, &grant);
	return grant;
}

TEST(tests, bandwidth_is_shared_out_in_turn_and_what_comes_back_is_given_again)
{
	const struct ioshape_pool_settings settings = { .pool_bytes_per_s = 1000000 };
	struct slots_grant grant;

	ck_assert_uint_eq(pace(1000).bytes, 0);
	local_queue_set(table, &settings);
	for (uint32_t i = 0; i < 3; i++) {
		grant = pace(1000);
		ck_assert_uint_eq(grant.bytes, 250000);
		ck_assert_uint_eq(grant.start_ms, i * 250);
		ck_assert_uint_ge(grant.end_ms, (i + 1) * 250);
		ck_assert_uint_le(grant.end_ms, (i + 1) * 250 + 1);
	}
	pace(-250000);
	ck_assert_uint_eq(pace(1000).start_ms, 500);
	/* The lower of both limits. */
	config.rate = 100000;
	grant = pace(1000);
	ck_assert_uint_eq(grant.bytes, 25000);
	ck_assert_uint_eq(grant.start_ms, 750);
	ck_assert_uint_ge(pace(1000).start_ms, 1000);
}

TEST(tests, nobody_owes_what_was_given_at_a_rate_that_was_far_too_low)
{
	const struct ioshape_pool_settings low = { .pool_bytes_per_s = 1, .job_bytes_per_s = 1 };
	const struct ioshape_pool_settings right = { .pool_bytes_per_s = 1000000 };

	local_queue_set(table, &low);
	for (int i = 0; i < 3; i++)
		pace(MIB);
	ck_assert_uint_ge(pace(MIB).start_ms, 3600 * 1000);
	local_queue_set(table, &right);
	ck_assert_uint_eq(pace(1000).start_ms, 0);
}

static struct ioshape_pool_status *status_of_table(void)
{
	struct ioshape_pool_status *status;

	ck_assert_int_eq(slots_status_new(&status, "p", "local", NULL), 0);
	local_status(table, 2, status);
	return status;
}

TEST(tests, a_status_says_who_holds_who_waits_and_how_many_slots_were_granted)
{
	struct ioshape_pool_status *status;

	ask("r1", 2);
	ask("r2", 1);
	ask("r3", 1);
	state_of("r1");
	pass_ms(500);
	status = status_of_table();
	ck_assert_uint_eq(status->capacity, 2);
	ck_assert_uint_eq(status->used, 2);
	ck_assert_uint_eq(status->grants, 1);
	ck_assert_uint_eq(status->holder_count, 1);
	ck_assert_str_eq(status->holders[0].id, "r1");
	ck_assert_uint_eq(status->holders[0].written_bytes, 5);
	ck_assert_double_eq_tol(status->holders[0].since_s, 0.5, 1e-9);
	ck_assert_double_eq_tol(status->holders[0].lease_s, 2.5, 1e-9);
	ck_assert_uint_eq(status->waiter_count, 2);
	ck_assert_str_eq(status->waiters[1].id, "r3");
	ioshape_pool_status_free(status);
}

TEST(tests, a_status_says_who_wrote_how_much_and_when_it_was_set)
{
	struct ioshape_pool_status *status;

	strcpy(config.identity.user, "ann");
	ask_as("large", "r1");
	give_back("r1", 1000);
	ask_as("small", "r2");
	give_back("r2", 3);
	ask_as("small", "r3");
	state_of("r3");
	set(1, false);
	local_queue_kick(table, "nobody");
	ck_assert(local_queue_kick(table, "r3"));
	ask_as("small", "r4");
	state_of("r4");
	status = status_of_table();
	ck_assert_uint_eq(status->job_listed, 2);
	ck_assert_str_eq(status->jobs[0].job, "large");
	ck_assert_str_eq(status->jobs[0].user, "ann");
	ck_assert_uint_eq(status->jobs[0].written_bytes, 1000);
	ck_assert_uint_eq(status->jobs[0].writes, 1);
	ck_assert_uint_eq(status->jobs[1].written_bytes, 3 + 5 + 5);
	ck_assert_uint_eq(status->jobs[1].writes, 2);
	ck_assert_double_eq_tol(status->changed_s, 1700000000.0, 1e-9);
	ioshape_pool_status_free(status);
}

static uint32_t granted_lately(void)
{
	struct ioshape_pool_status *status = status_of_table();
	uint32_t granted = status->grants_last_minute;

	ioshape_pool_status_free(status);
	return granted;
}

TEST(tests, grants_of_the_last_minute_are_counted_from_now)
{
	table->now_ns = UINT64_C(60000000000) * 100;
	for (int i = 0; i < 60; i++) {
		ask("r1", 1);
		give_back("r1", 0);
		pass_ms(1000);
		/* Those just granted count at once, not when the clock's minute is over. */
		ck_assert_uint_eq(granted_lately(), (uint32_t)i + 1);
	}
	pass_ms(30000);
	ck_assert_uint_eq(granted_lately(), 30);
	pass_ms(30000);
	ck_assert_uint_eq(granted_lately(), 0);
}

TEST(tests, jobs_that_were_not_seen_for_long_are_replaced)
{
	for (uint32_t i = 0; i < 3 * LOCAL_JOBS; i++) {
		snprintf(config.identity.job, sizeof(config.identity.job), "job%u", i);
		ask("r1", 1);
		give_back("r1", 100);
	}
	ck_assert_uint_eq(table->image.head.job_end, LOCAL_JOBS);
	for (uint32_t i = 0; i < LOCAL_JOBS; i++) {
		ck_assert_uint_ge((uint32_t)atoi(local_job(table, i)->name + 3), 2 * LOCAL_JOBS);
		ck_assert_uint_eq(local_job(table, i)->written, 100);
	}
}

/* Of one job: first come, first served, never more than the capacity, whatever happens in between.
 */
TEST(tests, random_operations_keep_the_promises)
{
	uint64_t seed = 11;
	char id[16];

	for (unsigned i = 0; i < scratch_rounds(200000); i++) {
		const uint32_t who = (uint32_t)test_random_below(&seed, 64);
		uint64_t used = 0, last_held = 0, first_waiting = UINT64_MAX;

		snprintf(id, sizeof(id), "r%u", who);
		table->woken_count = 0;
		switch (test_random_below(&seed, 8)) {
		case 0:
		case 1:
		case 2:
			REQUIRE(!ask_for(id, 1 + test_random_below(&seed, 8) / 7, 0, false));
			break;
		case 3:
		case 4:
			give_back(id, test_random_below(&seed, MIB));
			break;
		case 5:
			state_of(id);
			break;
		case 6:
			if (test_random_below(&seed, 20) == 0)
				local_queue_bury(table, who);
			break;
		default:
			pass_ms(test_random_below(&seed, 20));
			break;
		}
		for (uint32_t j = 0; j < table->image.head.member_end; j++) {
			const struct local_member *member = local_member(table, j);
			const bool holds = member->state == LOCAL_HOLDING;

			used += holds ? member->given : 0;
			if (member->state == LOCAL_WAITING)
				first_waiting = MIN(first_waiting, member->tag);
			if (holds)
				last_held = MAX(last_held, member->tag);
		}
		REQUIRE(used <= 2);
		REQUIRE(last_held <= first_waiting);
	}
	ck_assert_uint_gt(table->image.head.grants, scratch_rounds(1000));
}

int main(void)
{
	return check_run("local queue");
}
