/* SPDX-License-Identifier: Apache-2.0 */
/* The Redis coordinator with a server that works. tests/c/fault has those that fail. */
#include "slots/slots.h"
#include "support/check_main.h"
#include "support/redis_case.h"
#include "support/scratch.h"

#include <ioshape/slots.h>

#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <unistd.h>

static struct redis_server server;
static char address[128];

/*
 * Starts one server for all tests. For half a lease it grants slots only to holders from before, so
 * this waits.
 */
static void start(void)
{
	redis_server_init(&server);
	redis_server_start(&server);
	snprintf(address, sizeof(address), "unix://%s", server.socket);
	poll(NULL, 0, LEASE_MS / 2 + 1100);
}

static void stop(void)
{
	redis_server_free(&server);
}

static void empty(void)
{
	redis_server_tell(&server, "FLUSHALL");
}

static void leave(void)
{
}

static struct test_case tests_case = {
	.name = "redis", .start = start, .stop = stop, .setup = empty, .teardown = leave
};

TEST(tests_case, a_size_beyond_all_measure_takes_a_slot)
{
	struct slots_request request = redis_case_request("1-1");
	void *pool = redis_case_open(address, "1");
	struct slots_answer answer;

	request.bytes = UINT64_MAX;
	ck_assert_int_eq(slots_redis.acquire(pool, &request, &answer, NULL), 0);
	ck_assert_int_eq(answer.state, SLOTS_HOLDING);
	slots_redis.close(pool);
}

TEST(tests_case, bandwidth_is_granted_as_the_job_and_the_operator_say)
{
	struct slots_config config = redis_case_config(address, "1");
	struct slots_grant grant;
	void *pool = redis_case_open_config(&config);

	ck_assert_int_eq(slots_redis.pace(pool, 1 << 20, 1 << 20, &grant, NULL), 0);
	ck_assert_uint_eq(grant.bytes, 0);
	ck_assert_uint_gt(grant.end_ms, 1000);
	slots_redis.close(pool);
	config.rate = 4 << 20;
	pool = redis_case_open_config(&config);
	ck_assert_int_eq(slots_redis.pace(pool, 2 << 20, 2 << 20, &grant, NULL), 0);
	ck_assert_uint_eq(grant.bytes, 2 << 20);
	ck_assert_uint_eq(grant.start_ms, 0);
	ck_assert_uint_ge(grant.end_ms, 499);
	ck_assert_uint_le(grant.end_ms, 502);
	ck_assert_int_eq(slots_redis.pace(pool, 2 << 20, 2 << 20, &grant, NULL), 0);
	ck_assert_uint_gt(grant.start_ms, 0);
	/* More than asked for, but never more than is left to write. */
	ck_assert_int_eq(slots_redis.pace(pool, 1, UINT64_MAX, &grant, NULL), 0);
	ck_assert_uint_eq(grant.bytes, 1 << 20);
	ck_assert_int_eq(slots_redis.pace(pool, 1, 1000, &grant, NULL), 0);
	ck_assert_uint_eq(grant.bytes, 1000);
	slots_redis.close(pool);
}

TEST(tests_case, keys_have_the_pools_name_without_braces)
{
	struct slots_config config = redis_case_config(address, "1");
	struct slots_coordinator found;
	void *pool;

	strcpy(config.pool, "lustre:scratch/{x}\n");
	pool = redis_case_open_config(&config);
	redis_case_acquire(pool, "1-1");
	ck_assert_int_eq(redis_server_tell(&server, "EXISTS {ios:lustre:scratch/_x__}:v7:m"), 1);
	slots_redis.close(pool);
	ck_assert_int_eq(slots_redis.describe(&config, &found, NULL), 0);
	ck_assert_str_eq(found.key, "{ios:lustre:scratch/_x__}:v7:m");
}

TEST(tests_case, a_script_that_the_server_forgot_is_sent_again)
{
	void *pool = redis_case_open(address, "1");
	struct slots_answer answer = redis_case_acquire(pool, "1-1");

	redis_server_tell(&server, "SCRIPT FLUSH");
	ck_assert_int_eq(redis_case_beat(pool, "1-1", &answer).state, SLOTS_HOLDING);
	redis_server_tell(&server, "SCRIPT FLUSH");
	redis_case_release(pool, "1-1");
	/* From then on the script is called by its checksum. */
	redis_server_tell(&server, "CONFIG RESETSTAT");
	redis_case_acquire(pool, "1-2");
	redis_case_release(pool, "1-2");
	redisReply *stats = redis_server_say(&server, "INFO commandstats");
	ck_assert_ptr_nonnull(strstr(stats->str, "cmdstat_evalsha:calls=2"));
	ck_assert_ptr_null(strstr(stats->str, "cmdstat_eval:"));
	freeReplyObject(stats);
	slots_redis.close(pool);
}

TEST(tests_case, half_lost_data_is_asked_for_anew)
{
	void *pool = redis_case_open(address, "1"), *other = redis_case_open(address, "2");
	struct slots_answer held = redis_case_acquire(pool, "1-1"), waits;

	waits = redis_case_acquire(other, "2-1");
	ck_assert_int_eq(redis_server_tell(&server, "DEL {ios:scratch}:v7:h"), 1);
	/* The holder reclaims its slot. The waiter is no longer known. */
	ck_assert_int_eq(redis_case_beat(other, "2-1", &waits).state, SLOTS_NONE);
	(void)redis_case_beat(pool, "1-1", &held);
	slots_redis.close(pool);
	slots_redis.close(other);
}

TEST(tests_case, all_slots_of_a_process_are_kept_when_the_data_is_lost)
{
	struct slots_config config = redis_case_config(address, "1");
	struct slots_answer one, two;
	void *pool;

	config.asked_capacity = 2;
	pool = redis_case_open_config(&config);
	one = redis_case_acquire(pool, "1-1");
	two = redis_case_acquire(pool, "1-2");
	poll(NULL, 0, 5); /* epochs are milliseconds */
	redis_server_tell(&server, "FLUSHALL");
	ck_assert_int_eq(redis_case_beat(pool, "1-1", &one).state, SLOTS_HOLDING);
	ck_assert_int_eq(redis_case_beat(pool, "1-2", &two).state, SLOTS_HOLDING);
	slots_redis.close(pool);
}

/* ---- Waiting --------------------------------------------------------------------------------- */

static void *interrupt_soon(void *pool)
{
	poll(NULL, 0, 100);
	slots_redis.interrupt(pool);
	return NULL;
}

/* Interrupts a wait, so that its BLPOP stays pending. */
static void wait_interrupted(void *pool)
{
	pthread_t thread;

	pthread_create(&thread, NULL, interrupt_soon, pool);
	redis_case_be_woken(pool);
	pthread_join(thread, NULL);
}

TEST(tests_case, an_interruption_ends_waiting_at_once_and_loses_no_wake)
{
	void *holder = redis_case_open(address, "1"), *pool = redis_case_open(address, "2");
	struct slots_answer answer;

	redis_case_acquire(holder, "1-1");
	answer = redis_case_acquire(pool, "2-1");
	wait_interrupted(pool);
	slots_redis.interrupt(pool);
	redis_case_be_woken(pool); /* if no wait is in progress, the next one is interrupted */
	/* Meanwhile commands work, and the next wait gets the wake-up. */
	ck_assert_int_eq(redis_case_beat(pool, "2-1", &answer).state, SLOTS_WAITING);
	redis_case_release(holder, "1-1");
	redis_case_be_woken(pool);
	ck_assert_int_eq(redis_case_beat(pool, "2-1", &answer).state, SLOTS_HOLDING);
	slots_redis.close(holder);
	slots_redis.close(pool);
}

TEST(tests_case, a_wake_that_came_while_nobody_waited_is_not_lost)
{
	void *holder = redis_case_open(address, "1"), *pool = redis_case_open(address, "2");

	for (int round = 0; round < 2; round++) {
		redis_case_acquire(holder, "1-1");
		redis_case_acquire(pool, "2-1");
		if (round) { /* with a pending BLPOP, and a rest in between */
			wait_interrupted(pool);
			slots_redis.rest(pool);
		}
		redis_case_release(holder, "1-1");
		redis_case_be_woken(pool);
		redis_case_release(pool, "2-1");
	}
	slots_redis.close(holder);
	slots_redis.close(pool);
}

TEST(tests_case, no_connection_is_kept_at_rest_and_two_while_it_waits)
{
	unsigned before = scratch_descriptors();
	void *holder = redis_case_open(address, "1"), *pool = redis_case_open(address, "2");
	struct slots_answer answer;

	ck_assert_uint_eq(scratch_descriptors(), before + 2); /* two eventfds */
	redis_case_acquire(holder, "1-1");
	answer = redis_case_acquire(pool, "2-1");
	ck_assert_uint_eq(scratch_descriptors(), before + 4);
	for (int i = 0; i < 2; i++) {
		redis_case_wait(pool, 100);
		wait_interrupted(pool); /* with a pending BLPOP */
		redis_case_beat(pool, "2-1", &answer);
		ck_assert_uint_eq(scratch_descriptors(), before + 5);
		slots_redis.rest(pool);
		ck_assert_uint_eq(scratch_descriptors(), before + 3);
	}
	slots_redis.close(holder);
	slots_redis.close(pool);
	ck_assert_uint_eq(scratch_descriptors(), before);
}

/* Returns the number of connections, not counting the one that asks. */
static unsigned connections(void)
{
	redisReply *reply = redis_server_say(&server, "CLIENT LIST");
	unsigned lines = 0;

	for (const char *at = reply->str; (at = strchr(at, '\n')); at++)
		lines++;
	freeReplyObject(reply);
	return lines - 1;
}

TEST(tests_case, a_process_that_neither_holds_nor_waits_keeps_no_connection)
{
	struct slots_config config = redis_case_config(address, "1");
	const struct slots_policy policy = { .stall_ms = 60000 };
	const struct slots_wanted wanted = { .weight = 1 };
	struct base_error error = { 0 };
	struct ioshape_slot_info info;
	struct slots_pool *pool;
	struct slots_slot *slot;

	config.lease_ms = 600; /* short, so that heartbeats are frequent */
	MUST(!slots_pool_open(&pool, &config, &policy, &error), "%s", error.text);
	for (int turn = 0; turn < 2; turn++) {
		const uint64_t begin = base_now_ns();
		unsigned looks = 0, kept = 0;

		MUST(!slots_acquire(pool, &wanted, &slot, &error), "%s", error.text);
		slots_info(slot, &info);
		ck_assert_str_eq(info.coordinator, "redis");
		/* A holder keeps a connection for its heartbeats. On a busy machine an answer may
		 * be late, and then it connects anew. */
		for (; !turn && redis_case_ms_since(begin) < 1500; looks++) {
			kept += connections() > 0;
			poll(NULL, 0, 50);
		}
		ck_assert_uint_ge(2 * kept, looks);
		slots_release(slot);
		while (connections()) {
			ck_assert_uint_lt(redis_case_ms_since(begin), REDIS_CASE_GENEROUS_MS);
			poll(NULL, 0, 20);
		}
	}
	slots_pool_close(pool);
}

TEST(tests_case, no_descriptor_goes_on_to_programs_that_are_started)
{
	bool before[256];
	void *pool;

	for (int fd = 0; fd < 256; fd++)
		before[fd] = fcntl(fd, F_GETFD) >= 0;
	pool = redis_case_open(address, "1");
	redis_case_acquire(pool, "1-1");
	for (int fd = 0; fd < 256; fd++) {
		int flags = fcntl(fd, F_GETFD);

		ck_assert(before[fd] || flags < 0 || flags & FD_CLOEXEC);
	}
	slots_redis.close(pool);
}

TEST(tests_case, a_slot_without_waiting_takes_two_commands)
{
	void *pool = redis_case_open(address, "1");
	redisReply *stats;
	long long calls = 0;

	redis_case_acquire(pool, "1-0");
	redis_case_release(pool, "1-0");
	redis_server_tell(&server, "CONFIG RESETSTAT");
	for (int i = 0; i < 100; i++) {
		redis_case_acquire(pool, "1-1");
		redis_case_release(pool, "1-1");
	}
	stats = redis_server_say(&server, "INFO stats");
	calls = atoll(strstr(stats->str, "total_reads_processed:") + 22);
	ck_assert_int_le(calls, 205);
	freeReplyObject(stats);
	slots_redis.close(pool);
}

/* ---- Threads --------------------------------------------------------------------------------- */

#define THREADS 4
#define TURNS 50

struct worker {
	void *pool;
	int number;
	pthread_t thread;
};

static void *take_turns(void *argument)
{
	struct worker *worker = argument;
	char id[SLOTS_ID_BYTES];

	for (int i = 0; i < TURNS; i++) {
		snprintf(id, sizeof(id), "1-%d", worker->number * TURNS + i);
		struct slots_answer answer = redis_case_acquire(worker->pool, id);

		while (answer.state == SLOTS_WAITING) {
			poll(NULL, 0, 1);
			answer = redis_case_beat(worker->pool, id, &answer);
		}
		MUST(answer.state == SLOTS_HOLDING, "not known any more");
		redis_case_release(worker->pool, id);
	}
	return NULL;
}

TEST(tests_case, threads_may_call_while_one_of_them_waits)
{
	struct worker workers[THREADS];
	void *pool = redis_case_open(address, "1");

	for (int i = 0; i < THREADS; i++) {
		workers[i].pool = pool;
		workers[i].number = i;
		pthread_create(&workers[i].thread, NULL, take_turns, &workers[i]);
	}
	for (int i = 0; i < 20; i++)
		redis_case_wait(pool, 10);
	for (int i = 0; i < THREADS; i++)
		pthread_join(workers[i].thread, NULL);
	ck_assert_int_eq(redis_server_tell(&server, "ZCARD {ios:scratch}:v7:h"), 0);
	ck_assert_int_eq(redis_server_tell(&server, "ZCARD {ios:scratch}:v7:q"), 0);
	slots_redis.close(pool);
}
