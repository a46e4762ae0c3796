/* SPDX-License-Identifier: Apache-2.0 */
/* Acquiring slots in one process, with a coordinator that follows a script. */
#define _GNU_SOURCE
#include "support/check_main.h"
#include "support/scripted_coordinator.h"

#include <ioshape/slots.h>

#include <errno.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#define LEASE_MS 600u

static struct slots_pool *pool;
static struct script script;
static struct slots_policy policy;
static uint32_t ranks;
static atomic_uint warnings, infos;

/* Wraps pthread_create(): no thread can be created while the flag is set. */
static atomic_bool no_threads;
int __real_pthread_create(pthread_t *thread, const pthread_attr_t *attributes, void *(*run)(void *),
			  void *argument);
int __wrap_pthread_create(pthread_t *thread, const pthread_attr_t *attributes, void *(*run)(void *),
			  void *argument);
int __wrap_pthread_create(pthread_t *thread, const pthread_attr_t *attributes, void *(*run)(void *),
			  void *argument)
{
	return no_threads ? EAGAIN : __real_pthread_create(thread, attributes, run, argument);
}

/* Wraps nanosleep(): the library's thread calls it only to pause after too many wake-ups. */
static atomic_uint pauses;
int __real_nanosleep(const struct timespec *time, struct timespec *left);
int __wrap_nanosleep(const struct timespec *time, struct timespec *left);
int __wrap_nanosleep(const struct timespec *time, struct timespec *left)
{
	pauses++;
	return __real_nanosleep(time, left);
}

static void hear(void *user, enum ioshape_log_level level, const char *message)
{
	(void)user, (void)message;
	warnings += level == IOSHAPE_LOG_WARNING;
	infos += level == IOSHAPE_LOG_INFO;
}

static void open_pool(void)
{
	struct slots_config config = {
		.address = "",
		.ops = &script_coordinator,
		.pool = "p",
		.lease_ms = LEASE_MS,
		.default_capacity = 2,
		.log = { hear, NULL, IOSHAPE_LOG_DEBUG },
	};
	struct base_error error = { 0 };

	slots_identify(&config.identity, "J", 0);
	config.identity.ranks = ranks;
	ck_assert_int_eq(slots_pool_open(&pool, &config, &policy, &error), 0);
}

static void setup(void)
{
	script = (struct script){
		.acquired = SLOTS_HOLDING,
		.beaten = SLOTS_HOLDING,
		.beat_ms = LEASE_MS / 3,
		.capacity = 2,
	};
	policy = (struct slots_policy){ IOSHAPE_UNREACHABLE_STAGGER, 400, 60000 };
	warnings = infos = pauses = 0;
	ranks = 4;
	no_threads = false;
	script_install(&script);
	open_pool();
}

static void teardown(void)
{
	slots_pool_close(pool);
}

static struct slots_slot *take(const struct slots_wanted *wanted)
{
	struct slots_wanted plain = { .weight = 1 };
	struct base_error error = { 0 };
	struct slots_slot *slot;

	ck_assert_msg(slots_acquire(pool, wanted ? wanted : &plain, &slot, &error) == 0, "%s",
		      error.text);
	return slot;
}

static struct ioshape_slot_info info_of(struct slots_slot *slot)
{
	struct ioshape_slot_info info;

	slots_info(slot, &info);
	return info;
}

/* Waits until the condition holds, for at most two seconds. */
#define EVENTUALLY(condition)                                                                      \
	do {                                                                                       \
		for (int tries = 0; tries < 400 && !(condition); tries++)                          \
			usleep(5000);                                                              \
		ck_assert(condition);                                                              \
	} while (0)

/* ---- Waiting --------------------------------------------------------------------------------- */

static struct test_case waiting_case = { .name = "waiting", .setup = setup, .teardown = teardown };

TEST(waiting_case, an_uncontended_slot_takes_two_calls)
{
	struct slots_slot *slot = take(NULL);
	struct ioshape_slot_info info = info_of(slot);

	ck_assert_str_eq(info.coordinator, "test");
	ck_assert_str_eq(info.pool, "p");
	ck_assert_uint_eq(info.position, 0);
	ck_assert_uint_eq(info.capacity, 2);
	ck_assert_uint_ne(info.fence, 0);
	slots_release(slot);
	ck_assert_uint_eq(script_counts().acquires, 1);
	ck_assert_uint_eq(script_counts().releases, 1);
	ck_assert_uint_eq(script_counts().beats, 0);
}

/* A later behaviour of the coordinator. */
struct change {
	unsigned after_ms;
	struct script to;
};

static void *change_later(void *argument)
{
	const struct change *change = argument;

	usleep(change->after_ms * 1000);
	script = change->to;
	script_change(&script);
	return NULL;
}

/* Takes a slot while another thread changes the coordinator's behaviour. */
static struct slots_slot *take_until(const struct slots_wanted *wanted, struct change *change)
{
	struct slots_slot *slot;
	pthread_t thread;

	script_change(&script);
	ck_assert_int_eq(pthread_create(&thread, NULL, change_later, change), 0);
	slot = take(wanted);
	pthread_join(thread, NULL);
	return slot;
}

static struct change grant_soon(void)
{
	struct change change = { 250, script };

	change.to.beaten = SLOTS_HOLDING;
	return change;
}

static struct change become_unreachable_soon(void)
{
	struct change change = { 200, script };

	change.to.unreachable = true;
	return change;
}

struct heard_places {
	unsigned calls;
	struct ioshape_place last;
	int answer;
};

static int hear_place(void *user, const struct ioshape_place *place)
{
	struct heard_places *heard = user;

	heard->calls++;
	heard->last = *place;
	return heard->answer;
}

TEST(waiting_case, a_waiter_hears_where_it_stands_and_is_woken_by_the_grant)
{
	struct heard_places heard = { .answer = 0 };
	const struct slots_wanted wanted = { .weight = 1,
					     .waiting = hear_place,
					     .waiting_user = &heard };
	struct slots_slot *slot;
	struct change grant;

	script.acquired = script.beaten = SLOTS_WAITING;
	script.position = 3;
	script.beat_ms = 100000;
	grant = grant_soon();
	slot = take_until(&wanted, &grant);
	ck_assert_uint_ge(heard.calls, 2);
	ck_assert_uint_eq(heard.last.position, 3);
	ck_assert_str_eq(heard.last.ahead, "job J, rank 7 on n03");
	ck_assert_str_eq(heard.last.coordinator, "test");
	ck_assert_uint_eq(info_of(slot).position, 4);
	ck_assert_double_ge(info_of(slot).waited_s, 0.2);
	slots_release(slot);
}

TEST(waiting_case, a_request_that_holds_training_up_says_so)
{
	struct slots_wanted wanted = { .weight = 1, .bytes = UINT64_C(1) << 30, .writers = 1 };

	slots_release(take(&wanted));
	ck_assert_int_lt(script_counts().boost_ms, 0);
	wanted.blocks_training = true;
	slots_release(take(&wanted));
	ck_assert_int_gt(script_counts().boost_ms, 0);
	wanted.yields = true;
	slots_release(take(&wanted));
	ck_assert_int_eq(script_counts().boost_ms, -SLOTS_MOST_BOOST_MS);
}

/*
 * Returns a request with a deadline in so many milliseconds, whatever the time that writing takes.
 */
static struct slots_wanted wanted_in(int64_t deadline_ms)
{
	return (struct slots_wanted){ .weight = 1, .deadline_ns = base_deadline_ns(deadline_ms) };
}

TEST(waiting_case, with_a_deadline_nobody_waits_until_it_is_over)
{
	const struct slots_wanted wanted = wanted_in(1000);
	struct slots_slot *slot;

	script.acquired = script.beaten = SLOTS_WAITING;
	script_change(&script);
	slot = take(&wanted);
	ck_assert_str_eq(info_of(slot).coordinator, "deadline");
	ck_assert_str_ne(info_of(slot).note, "");
	ck_assert_uint_eq(info_of(slot).fence, 0);
	ck_assert_double_ge(info_of(slot).waited_s, 0.49);
	/* It no longer waits in the queue. */
	EVENTUALLY(script_counts().releases == 1);
	slots_release(slot);
	ck_assert_uint_eq(script_counts().releases, 1);
}

TEST(waiting_case, as_much_time_is_left_as_the_latest_writes_took)
{
	const struct slots_wanted wanted = wanted_in(400);
	struct slots_slot *slot = take(NULL);

	usleep(500000);
	slots_release(slot);
	script.acquired = script.beaten = SLOTS_WAITING;
	script_change(&script);
	slot = take(&wanted);
	ck_assert_str_eq(info_of(slot).coordinator, "deadline");
	/* Half of the time until the deadline would be 0.2 s. */
	ck_assert_double_lt(info_of(slot).waited_s, 0.2);
	slots_release(slot);
}

TEST(waiting_case, with_a_deadline_bandwidth_is_not_waited_for)
{
	const struct slots_wanted wanted = wanted_in(600000);
	struct slots_slot *slot = take(&wanted);

	script.rate = 1000;
	script_change(&script);
	/* It would take 100 s, which is longer than a test may take. */
	slots_pass(slot, 100000, NULL, NULL);
	ck_assert_double_eq(info_of(slot).paced_s, 0);
	slots_release(slot);
}

TEST(waiting_case, a_waiter_that_was_forgotten_asks_again)
{
	struct slots_slot *slot;
	struct change grant;

	script.acquired = SLOTS_WAITING;
	script.beaten = SLOTS_NONE;
	script.beat_ms = 20;
	grant = grant_soon();
	slot = take_until(NULL, &grant);
	ck_assert_uint_ge(script_counts().acquires, 2);
	slots_release(slot);
}

static atomic_uint lost_calls;

static void hear_loss(void *user, const char *why)
{
	(void)user, (void)why;
	lost_calls++;
}

/* Grants the waiter's slot and takes it away again while the waiter is busy in this callback. */
static int grant_and_take_away(void *user, const struct ioshape_place *place)
{
	unsigned *calls = user;

	(void)place;
	if (!(*calls)++) {
		unsigned beats = script_counts().beats;

		script.beaten = SLOTS_HOLDING;
		script_change(&script);
		EVENTUALLY(script_counts().beats > beats);
		script.beaten = SLOTS_NONE;
		script_change(&script);
		beats = script_counts().beats;
		EVENTUALLY(script_counts().beats > beats);
		usleep(50000); /* until the answer has been read */
		script.acquired = SLOTS_HOLDING;
		script_change(&script);
	}
	return 0;
}

TEST(waiting_case, a_slot_that_is_lost_before_its_waiter_wakes_is_asked_for_again)
{
	unsigned calls = 0;
	const struct slots_wanted wanted = { .weight = 1,
					     .waiting = grant_and_take_away,
					     .waiting_user = &calls,
					     .lost = hear_loss };
	struct slots_slot *slot;

	lost_calls = 0;
	script.acquired = script.beaten = SLOTS_WAITING;
	script.beat_ms = 20;
	script_change(&script);
	slot = take(&wanted);
	ck_assert_uint_eq(script_counts().acquires, 2);
	ck_assert_uint_eq(lost_calls, 0);
	ck_assert_uint_eq(info_of(slot).lost, 0);
	slots_release(slot);
}

/* ---- Heartbeats ------------------------------------------------------------------------------ */

TEST(waiting_case, a_holder_shows_that_it_lives_and_how_far_it_is)
{
	struct slots_slot *slot = take(NULL);

	slots_pass(slot, 12345, NULL, NULL);
	EVENTUALLY(script_counts().beats >= 3);
	ck_assert_uint_eq(script_counts().passed, 12345);
	ck_assert(script_counts().holding);
	ck_assert_uint_eq(info_of(slot).lost, 0);
	slots_release(slot);
}

TEST(waiting_case, a_lost_slot_is_told_once_and_is_not_held_again)
{
	const struct slots_wanted wanted = { .weight = 1, .lost = hear_loss };
	struct slots_slot *slot = take(&wanted);

	lost_calls = 0;
	script.beaten = SLOTS_NONE;
	script_change(&script);
	EVENTUALLY(lost_calls == 1);
	script.beaten = SLOTS_HOLDING;
	script_change(&script);
	usleep(LEASE_MS * 1000);
	ck_assert_uint_eq(lost_calls, 1);
	ck_assert_uint_eq(info_of(slot).lost, 1);
	slots_release(slot);
}

TEST(waiting_case, a_holder_that_moves_nothing_loses_its_slot)
{
	const struct slots_wanted wanted = { .weight = 1, .lost = hear_loss };
	struct slots_slot *slot;

	slots_pool_close(pool);
	policy.stall_ms = 700;
	open_pool();
	slot = take(&wanted);
	lost_calls = 0;
	/* While bytes are written the slot is kept. */
	for (int i = 0; i < 20; i++) {
		slots_pass(slot, 1, NULL, NULL);
		usleep(50000);
	}
	ck_assert_uint_eq(lost_calls, 0);
	/* When no more are written, the slot is lost. */
	EVENTUALLY(lost_calls == 1);
	ck_assert_uint_ge(script_counts().releases, 1);
	slots_release(slot);
}

TEST(waiting_case, a_slot_that_was_waited_for_long_is_not_taken_to_hang)
{
	const struct slots_wanted wanted = { .weight = 1, .lost = hear_loss };
	struct slots_slot *slot;
	struct change grant;

	slots_pool_close(pool);
	policy.stall_ms = 100; /* less than the wait for the grant */
	script.acquired = script.beaten = SLOTS_WAITING;
	grant = grant_soon();
	open_pool();
	lost_calls = 0;
	slot = take_until(&wanted, &grant);
	ck_assert_uint_eq(info_of(slot).lost, 0);
	ck_assert_uint_eq(lost_calls, 0);
	slots_release(slot);
}

/* ---- Unreachable ----------------------------------------------------------------------------- */

static struct test_case unreachable_case = {
	.name = "unreachable", .setup = setup, .teardown = teardown, .tags = "unreachable"
};

TEST(unreachable_case, an_unreachable_coordinator_makes_no_save_fail)
{
	struct slots_slot *slot;
	struct ioshape_slot_info info;

	script.unreachable = true;
	script_change(&script);
	slot = take(NULL);
	info = info_of(slot);
	ck_assert_str_eq(info.coordinator, "stagger");
	ck_assert_uint_eq(info.fence, 0);
	ck_assert_str_ne(info.note, "");
	ck_assert_uint_eq(warnings, 1);
	slots_release(slot);
	/* The coordinator is known to be unreachable: no further wait, and no further log line. */
	slot = take(NULL);
	ck_assert_double_lt(info_of(slot).waited_s, info.waited_s);
	slots_release(slot);
	ck_assert_uint_eq(warnings, 1);
	script.unreachable = false;
	script_change(&script);
	slot = take(NULL);
	ck_assert_str_eq(info_of(slot).coordinator, "test");
	ck_assert_uint_ge(infos, 1);
	slots_release(slot);
}

TEST(unreachable_case, a_coordinator_that_is_being_restarted_is_waited_for)
{
	struct change answer_again = { 300, script };
	struct slots_slot *slot;

	script.unreachable = true;
	slot = take_until(NULL, &answer_again);
	ck_assert_str_eq(info_of(slot).coordinator, "test");
	slots_release(slot);
}

TEST(unreachable_case, the_policy_wait_waits_as_long_as_it_takes)
{
	const struct slots_wanted wanted = { .weight = 1, .timeout_ms = 3000 };
	struct base_error error = { 0 };
	struct slots_slot *slot;

	slots_pool_close(pool);
	policy.unreachable = IOSHAPE_UNREACHABLE_WAIT;
	open_pool();
	script.unreachable = true;
	script_change(&script);
	ck_assert_int_eq(slots_acquire(pool, &wanted, &slot, &error), -ETIMEDOUT);
}

LOOP_TEST(unreachable_case, with_a_deadline_every_policy_lets_it_write_in_time,
	  IOSHAPE_UNREACHABLE_STAGGER, IOSHAPE_UNREACHABLE_FAIL + 1)
{
	struct slots_wanted wanted;
	struct slots_slot *slot;

	slots_pool_close(pool);
	policy.unreachable = (enum ioshape_unreachable)_i;
	open_pool();
	script.unreachable = true;
	script_change(&script);
	wanted = wanted_in(5000);
	slot = take(&wanted);
	ck_assert_str_eq(info_of(slot).coordinator, "stagger");
	ck_assert(base_now_ns() < wanted.deadline_ns);
	slots_release(slot);
}

TEST(unreachable_case, a_holder_outlives_a_short_outage_and_loses_its_slot_in_a_long_one)
{
	const struct slots_wanted wanted = { .weight = 1, .lost = hear_loss };
	struct slots_slot *slot = take(&wanted);

	lost_calls = 0;
	script.unreachable = true;
	script_change(&script);
	usleep(LEASE_MS * 1000 / 2);
	script.unreachable = false;
	script_change(&script);
	usleep(LEASE_MS * 1000);
	ck_assert_uint_eq(lost_calls, 0);
	script.unreachable = true;
	script_change(&script);
	EVENTUALLY(lost_calls == 1);
	slots_release(slot);
}

/*
 * Makes the coordinator unreachable from 0.2 to 2.6 s. It becomes unreachable again for a moment,
 * when the waiter's staggered start of the first outage would be due. Then it grants the slot.
 */
static void *become_unreachable_twice(void *argument)
{
	const uint32_t *own_ms = argument;

	for (int i = 0; i < 2; i++) {
		usleep(i ? *own_ms * 1000 : 200000);
		script.unreachable = true;
		script_change(&script);
		usleep(i ? 100000 : 2400000);
		script.unreachable = false;
		script_change(&script);
	}
	usleep(500000);
	script.beaten = script.acquired = SLOTS_HOLDING;
	script_change(&script);
	return NULL;
}

TEST(unreachable_case, each_outage_of_a_wait_is_counted_by_itself)
{
	struct slots_identity identity = { .job = "J" };
	struct slots_slot *slot;
	pthread_t thread;
	uint32_t own_ms;

	slots_pool_close(pool);
	ranks = identity.ranks = 64;
	policy.stagger_most_ms = 4000;
	open_pool();
	/* Between the end of the first outage and the second one. */
	own_ms = slots_stagger_ms(&identity, 0, 2, 1000, policy.stagger_most_ms);
	ck_assert_msg(own_ms > 1600 && own_ms < 3000, "%u", own_ms);
	script.acquired = script.beaten = SLOTS_WAITING;
	script_change(&script);
	ck_assert_int_eq(pthread_create(&thread, NULL, become_unreachable_twice, &own_ms), 0);
	slot = take(NULL);
	pthread_join(thread, NULL);
	ck_assert_str_eq(info_of(slot).coordinator, "test");
	slots_release(slot);
}

TEST(unreachable_case, an_answer_that_makes_no_sense_fails_nothing)
{
	struct slots_slot *slot;

	script.acquired = SLOTS_NONE;
	script_change(&script);
	slot = take(NULL);
	ck_assert_str_eq(info_of(slot).coordinator, "stagger");
	slots_release(slot);
}

TEST(unreachable_case, a_writer_that_waited_goes_ahead_alone)
{
	struct slots_slot *slot;
	struct change outage;

	script.acquired = script.beaten = SLOTS_WAITING;
	outage = become_unreachable_soon();
	slot = take_until(NULL, &outage);
	ck_assert_str_eq(info_of(slot).coordinator, "stagger");
	ck_assert_uint_ge(info_of(slot).position, 1);
	slots_release(slot);
}

TEST(waiting_case, without_wakes_heartbeats_tell_of_the_grant)
{
	struct slots_slot *slot;
	struct change grant;

	script.acquired = script.beaten = SLOTS_WAITING;
	script.deaf = true;
	script.beat_ms = 100;
	grant = grant_soon();
	slot = take_until(NULL, &grant);
	ck_assert_str_eq(info_of(slot).coordinator, "test");
	ck_assert_uint_eq(script_counts().acquires, 1);
	ck_assert_uint_eq(warnings, 0);
	slots_release(slot);
}

TEST(waiting_case, wakes_without_an_end_do_not_keep_the_process_busy)
{
	const struct slots_wanted wanted = { .weight = 1, .timeout_ms = 500 };
	struct base_error error = { 0 };
	struct slots_slot *slot;

	script.acquired = script.beaten = SLOTS_WAITING;
	script.floods = true;
	script_change(&script);
	ck_assert_int_eq(slots_acquire(pool, &wanted, &slot, &error), -ETIMEDOUT);
	ck_assert_uint_ge(script_counts().waits, 16);
	ck_assert_uint_le(script_counts().waits, 200);
	ck_assert_uint_ge(pauses, 1);
}

TEST(waiting_case, wakes_that_bring_slots_are_not_followed_by_a_pause)
{
	script.acquired = SLOTS_WAITING;
	script.beaten = SLOTS_HOLDING;
	script.floods = true;
	script_change(&script);
	for (int i = 0; i < 100; i++)
		slots_release(take(NULL));
	ck_assert_uint_eq(pauses, 0);
}

TEST(waiting_case, without_a_thread_the_waiter_sends_its_heartbeats)
{
	const struct slots_wanted wanted = { .weight = 1, .timeout_ms = 5000 };
	struct slots_slot *slot;

	script.acquired = SLOTS_WAITING;
	script.beaten = SLOTS_HOLDING;
	script.beat_ms = 200;
	script_change(&script);
	no_threads = true;
	slot = take(&wanted);
	ck_assert_uint_ge(script_counts().beats, 1);
	slots_release(slot);
	no_threads = false;
}

/* ---- Bandwidth ------------------------------------------------------------------------------- */

TEST(waiting_case, bytes_pass_at_the_rate_that_was_set)
{
	struct slots_slot *slot = take(NULL);
	uint64_t begin;

	script.rate = 10000000;
	script_change(&script);
	begin = base_now_ns();
	/* The last piece is sent when the others have had their time. */
	for (int i = 0; i < 11; i++)
		slots_pass(slot, 500000, NULL, NULL);
	ck_assert_double_ge(base_seconds(base_now_ns() - begin), 0.45);
	ck_assert(info_of(slot).paced_s > 0.4);
	slots_release(slot);
}

static int stop_now(void *user)
{
	(void)user;
	return 1;
}

TEST(waiting_case, waiting_for_bandwidth_can_be_stopped)
{
	struct slots_slot *slot = take(NULL);

	script.rate = 1000;
	script_change(&script);
	slots_pass(slot, 1000, NULL, NULL);
	/* Without the stop it would take 100 s, which is longer than a test may take. */
	ck_assert_int_eq(slots_pass(slot, 100000, stop_now, NULL), 1);
	slots_release(slot);
}

TEST(waiting_case, a_rate_that_is_far_too_low_does_not_stop_a_save)
{
	const struct slots_wanted wanted = { .weight = 1, .lost = hear_loss };
	struct slots_slot *slot;

	slots_pool_close(pool);
	policy.stall_ms = 700;
	open_pool();
	lost_calls = 0;
	slot = take(&wanted);
	script.rate = 1;
	script_change(&script);
	/* At that rate it would take more than an hour. */
	for (int i = 0; i < 4; i++)
		slots_pass(slot, 1000, NULL, NULL);
	/* Waiting for bandwidth must not count as a stalled disk. */
	ck_assert_uint_eq(lost_calls, 0);
	slots_release(slot);
}

TEST(waiting_case, a_coordinator_that_hangs_does_not_hold_up_every_block)
{
	struct slots_slot *slot = take(NULL);

	script.unreachable = true;
	script.silence_ms = 300;
	script_change(&script);
	for (int i = 0; i < 20; i++)
		slots_pass(slot, 4 * MIB, NULL, NULL);
	ck_assert_uint_le(script_counts().paces, 3);
	slots_release(slot);
}

TEST(waiting_case, without_a_limit_the_coordinator_is_seldom_asked)
{
	struct slots_slot *slot = take(NULL);

	for (int i = 0; i < 1000; i++)
		slots_pass(slot, 4 * MIB, NULL, NULL);
	ck_assert_uint_le(script_counts().paces, 3);
	slots_release(slot);
}

/* ---- Staggered starts ------------------------------------------------------------------------ */

static struct test_case pure = { .name = "own time" };

TEST(pure, the_ranks_of_a_job_are_dealt_out_over_rounds)
{
	struct slots_identity identity = { .ranks = 64, .job = "J" };
	unsigned in_turn[8] = { 0 };

	for (uint32_t rank = 0; rank < 64; rank++) {
		uint32_t ms;

		identity.rank = rank;
		snprintf(identity.client, sizeof(identity.client), "%016x", rank);
		ms = slots_stagger_ms(&identity, 5, 8, 1000, 120000);
		ck_assert_uint_lt(ms, 8 * 1000 + 250);
		in_turn[ms / 1000]++;
	}
	for (int i = 0; i < 8; i++)
		ck_assert_uint_eq(in_turn[i], 8);
}

TEST(pure, no_round_is_later_than_the_longest_wait)
{
	struct slots_identity identity = { .ranks = 5000, .job = "J", .client = "x" };
	uint32_t latest = 0;

	for (uint32_t rank = 0; rank < 5000; rank++) {
		identity.rank = rank;
		latest = MAX(latest, slots_stagger_ms(&identity, 0, 1, 30000, 120000));
	}
	ck_assert_uint_le(latest, 120000);
	ck_assert_uint_gt(latest, 110000);
}

TEST(pure, no_rank_is_always_the_last)
{
	struct slots_identity identity = { .ranks = 16, .job = "J", .client = "x" };
	bool early = false, late = false;

	for (uint64_t round = 0; round < 64; round++) {
		uint32_t ms = slots_stagger_ms(&identity, round, 1, 1000, 120000);

		early |= ms < 4000;
		late |= ms > 12000;
	}
	ck_assert(early && late);
}
