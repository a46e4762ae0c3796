/* SPDX-License-Identifier: Apache-2.0 */
/* Calls to a Redis that fails, stalls or restarts, and to peers that are not Redis. */
#include "support/check_main.h"
#include "support/fake_redis.h"
#include "support/redis_case.h"
#include "support/scratch.h"

#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <unistd.h>

static struct redis_server server;
static char address[160];

static void setup(void)
{
	redis_server_init(&server);
	snprintf(address, sizeof(address), "redis://127.0.0.1:%u", server.port);
}

static void teardown(void)
{
	redis_server_free(&server);
}

/* ---- Servers that restart -------------------------------------------------------------------- */

static struct test_case tests = { .name = "redis_faults", .setup = setup, .teardown = teardown };

TEST(tests, a_server_that_was_restarted_is_no_failure)
{
	void *pool;

	redis_server_start(&server);
	pool = redis_case_open(address, "1");
	redis_case_acquire(pool, "1-1");
	for (int round = 0; round < 3; round++) {
		redis_server_kill(&server);
		redis_server_start(&server);
		redis_case_acquire(pool, "1-2");
	}
	slots_redis.close(pool);
}

TEST(tests, a_holder_keeps_its_slot_and_fence_when_the_server_loses_all)
{
	struct slots_answer held, kept;
	void *pool, *other;

	redis_server_start(&server);
	pool = redis_case_open(address, "1");
	other = redis_case_open(address, "2");
	held = redis_case_hold(pool, "1-1");
	redis_server_kill(&server);
	redis_server_start(&server);
	/* The first client to come does not hold the slot and must wait. */
	ck_assert_int_eq(redis_case_acquire(other, "2-1").state, SLOTS_WAITING);
	kept = redis_case_beat(pool, "1-1", &held);
	ck_assert_int_eq(kept.state, SLOTS_HOLDING);
	ck_assert_uint_eq(kept.fence, held.fence);
	ck_assert_uint_gt(kept.epoch, held.epoch);
	poll(NULL, 0, LEASE_MS / 2 + 100);
	ck_assert_int_eq(redis_case_beat(other, "2-1", &kept).state, SLOTS_WAITING);
	redis_case_release(pool, "1-1");
	ck_assert_uint_gt(redis_case_hold(other, "2-1").fence, held.fence);
	slots_redis.close(pool);
	slots_redis.close(other);
}

TEST(tests, without_a_server_all_calls_fail_and_then_go_well_again)
{
	struct base_error error = { 0 };
	void *pool;

	redis_server_start(&server);
	pool = redis_case_open(address, "1");
	redis_case_acquire(pool, "1-1");
	redis_server_kill(&server);
	for (int round = 0; round < 20; round++)
		redis_case_refused(pool, &error);
	ck_assert_int_eq(slots_redis.wait(pool, 5000, NULL), IOSHAPE_E_COORDINATOR);
	ck_assert_int_eq(slots_redis.release(pool, "1-1", 0, NULL), IOSHAPE_E_COORDINATOR);
	redis_server_start(&server);
	redis_case_until_well(pool, "1-1"); /* waits for the longest back-off */
	slots_redis.close(pool);
}

TEST(tests, a_server_that_is_gone_is_not_asked_all_the_time)
{
	struct fake_redis fake;
	struct base_error error;
	const uint64_t begin = base_now_ns();
	void *pool;

	fake_redis_start(&fake, FAKE_CLOSES, NULL);
	pool = redis_case_open(fake.address, "1");
	while (redis_case_ms_since(begin) < 2000) {
		redis_case_refused(pool, &error);
		poll(NULL, 0, 1);
	}
	/*
	 * Back-offs are 50, 100, 200, 400, 800, 1000 ms, each shortened at random by up to a half.
	 */
	ck_assert_int_ge(fake_redis_connections(&fake), 4);
	ck_assert_int_le(fake_redis_connections(&fake), 9);
	slots_redis.close(pool);
	fake_redis_stop(&fake);
}

/* Opens a pool with the usual lease, of which a call takes at most two seconds. */
static void *open_with_usual_lease(const char *at)
{
	struct slots_config config = redis_case_config(at, "1");

	config.lease_ms = 15000;
	return redis_case_open_config(&config);
}

TEST(tests, a_server_that_hangs_is_given_up_after_two_seconds)
{
	struct base_error error;
	void *pool;

	redis_server_start(&server);
	pool = open_with_usual_lease(address);
	redis_case_acquire(pool, "1-1");
	redis_server_signal(&server, SIGSTOP);
	ck_assert_uint_ge(redis_case_refused(pool, &error), 1900);
	redis_case_refused(pool, &error); /* the error is repeated without asking the server */
	redis_server_signal(&server, SIGCONT);
	redis_case_until_well(pool, "1-1");
	slots_redis.close(pool);
}

TEST(tests, waiting_on_a_server_that_hangs_ends_with_an_error)
{
	struct base_error error = { 0 };
	uint64_t begin;
	void *pool;
	int ret = 0;

	redis_server_start(&server);
	pool = redis_case_open(address, "1");
	redis_case_acquire(pool, "1-1");
	redis_server_signal(&server, SIGSTOP);
	begin = base_now_ns();
	while (!ret && redis_case_ms_since(begin) < REDIS_CASE_GENEROUS_MS)
		ret = slots_redis.wait(pool, 300, &error);
	ck_assert_int_eq(ret, IOSHAPE_E_COORDINATOR);
	redis_server_signal(&server, SIGCONT);
	redis_case_until_well(pool, "1-1");
	ck_assert_int_eq(slots_redis.wait(pool, 100, NULL), 0);
	slots_redis.close(pool);
}

static void *kill_soon(void *argument)
{
	(void)argument;
	poll(NULL, 0, 100);
	redis_server_signal(&server, SIGKILL);
	return NULL;
}

TEST(tests, waiting_ends_when_the_server_does)
{
	const uint64_t begin = base_now_ns();
	pthread_t thread;
	void *pool;
	int ret = 0;

	redis_server_start(&server);
	pool = redis_case_open(address, "1");
	redis_case_acquire(pool, "1-1");
	pthread_create(&thread, NULL, kill_soon, NULL);
	/* At first there may be a hint to ask again, which then finds the failure. */
	for (int i = 0; i < 3 && !ret; i++)
		ret = slots_redis.wait(pool, REDIS_CASE_GENEROUS_MS, NULL);
	ck_assert_int_eq(ret, IOSHAPE_E_COORDINATOR);
	ck_assert_uint_lt(redis_case_ms_since(begin), REDIS_CASE_GENEROUS_MS);
	pthread_join(thread, NULL);
	slots_redis.close(pool);
}

/* ---- Many threads ---------------------------------------------------------------------------- */

struct hammer {
	void *pool;
	int number;
	bool *stop;
	pthread_t thread;
	unsigned well, failed;
};

static void *hammer(void *argument)
{
	struct hammer *self = argument;
	struct slots_request request = { .weight = 1 };
	struct slots_answer answer;

	for (int i = 0; !__atomic_load_n(self->stop, __ATOMIC_RELAXED); i++) {
		snprintf(request.id, sizeof(request.id), "%d-%d", self->number, i);
		int ret = slots_redis.acquire(self->pool, &request, &answer, NULL);

		MUST(!ret || ret == IOSHAPE_E_COORDINATOR, "%d", ret);
		self->well += !ret;
		self->failed += ret != 0;
		slots_redis.release(self->pool, request.id, 0, NULL);
		poll(NULL, 0, 1);
	}
	return NULL;
}

/* A Unix socket notices at once that the server is gone; writing to it would raise SIGPIPE. */
TEST(tests, a_dead_server_raises_no_signal)
{
	struct base_error error;
	void *pool;

	signal(SIGPIPE, SIG_DFL);
	snprintf(address, sizeof(address), "unix://%s", server.socket);
	redis_server_start(&server);
	pool = redis_case_open(address, "1");
	for (int round = 0; round < 2; round++) {
		redis_case_until_well(pool, "1-1");
		redis_server_kill(&server);
		if (round)
			slots_redis.wait(pool, 20, NULL);
		redis_case_refused(pool, &error);
		redis_server_start(&server);
	}
	slots_redis.close(pool);
}

TEST(tests, a_server_killed_again_and_again_costs_neither_descriptors_nor_signals)
{
	struct hammer hammers[4];
	unsigned before = scratch_descriptors();
	bool stop = false;
	void *pool;

	signal(SIGPIPE, SIG_DFL);
	redis_server_start(&server);
	pool = redis_case_open(address, "1");
	for (int i = 0; i < 4; i++) {
		hammers[i] = (struct hammer){ .pool = pool, .number = i, .stop = &stop };
		pthread_create(&hammers[i].thread, NULL, hammer, &hammers[i]);
	}
	for (int round = 0; round < 8; round++) {
		uint64_t begin = base_now_ns();

		while (redis_case_ms_since(begin) < 150)
			slots_redis.wait(pool, 20, NULL);
		redis_server_kill(&server);
		slots_redis.wait(pool, 20, NULL);
		redis_server_start(&server);
	}
	redis_case_until_well(pool, "9-9");
	__atomic_store_n(&stop, true, __ATOMIC_RELAXED);
	for (int i = 0; i < 4; i++) {
		pthread_join(hammers[i].thread, NULL);
		ck_assert_uint_gt(hammers[i].well, 0);
	}
	ck_assert_uint_le(scratch_descriptors(), before + 3); /* eventfd, 2 connections */
	slots_redis.close(pool);
	ck_assert_uint_eq(scratch_descriptors(), before);
}

/* ---- Peers that are not Redis ---------------------------------------------------------------- */

static const struct {
	enum fake_manner kind;
	unsigned at_least_ms;
} silent_peers[] = {
	{ FAKE_SILENT, 1900 },
	{ FAKE_TRICKLES, 1900 }, /* a byte at a time */
	{ FAKE_FULL, 900 },      /* like a network that drops all packets */
};

LOOP_TEST(tests, a_peer_that_never_answers_is_given_up, 0, (int)ARRAY_LENGTH(silent_peers))
{
	struct fake_redis fake;
	struct base_error error;
	void *pool;

	fake_redis_start(&fake, silent_peers[_i].kind, NULL);
	pool = open_with_usual_lease(fake.address);
	ck_assert_uint_ge(redis_case_refused(pool, &error), silent_peers[_i].at_least_ms);
	slots_redis.close(pool);
	fake_redis_stop(&fake);
}

TEST(tests, what_is_no_answer_of_a_redis_is_said_to_be_none)
{
	static const char *const answers[] = {
		"HTTP/1.1 400 Bad Request\r\n\r\n",
		"\r\n\r\n\r\n",
		"$-7\r\n",
		"*-9\r\n",
		":12x\r\n",
		"\x16\x03\x01\x02",
	};
	struct fake_redis fake;
	struct base_error error;
	void *pool;

	for (size_t i = 0; i < ARRAY_LENGTH(answers); i++) {
		fake_redis_start(&fake, FAKE_SAYS, answers[i]);
		pool = redis_case_open(fake.address, "1");
		redis_case_refused(pool, &error);
		slots_redis.close(pool);
		fake_redis_stop(&fake);
	}
}

#define ONE ":1\r\n"
#define TEXT "$1\r\nx\r\n"
#define NONE "*0\r\n"
/* A field's name and its value. */
#define VALUE(length, name, value) "$" #length "\r\n" name "\r\n" value
#define NUMBER(length, name) VALUE(length, name, ONE)
#define WORD(length, name) VALUE(length, name, TEXT)
/* Fields of the answer to a request. */
#define HOLDS VALUE(5, "state", ":2\r\n")
#define ALL NUMBER(5, "epoch") NUMBER(8, "capacity")
#define HELD NUMBER(4, "beat") NUMBER(6, "weight") NUMBER(6, "target")
#define WAITS NUMBER(4, "beat") NUMBER(8, "position")

TEST(tests, answers_of_another_shape_are_not_taken_for_ours)
{
	static const char *const answers[] = {
		"+OK\r\n",
		":2\r\n",
		"$-1\r\n",
		"*-1\r\n",
		"*0\r\n",
		"$2\r\nno\r\n",
		"*10\r\n:3\r\n:1\r\n:1\r\n:1\r\n:1\r\n:1\r\n:1\r\n$0\r\n\r\n:0\r\n:1\r\n",
		"*6\r\n" VALUE(5, "state", ":3\r\n") ALL,
		"*14\r\n" HOLDS ALL WORD(5, "fence") HELD,
		"*14\r\n" HOLDS ALL VALUE(5, "fence", "$2\r\n1x\r\n") HELD,
		"*14\r\n" HOLDS ALL VALUE(5, "fence", "$21\r\n999999999999999999999\r\n") HELD,
		"*12\r\n" HOLDS ALL HELD,
		"*14\r\n" VALUE(5, "state", NONE) ALL NUMBER(5, "fence") HELD,
		"*14\r\n" HOLDS NUMBER(8, "capacity") NUMBER(5, "epoc?") NUMBER(5, "fence") HELD,
		"*13\r\n" HOLDS ALL HELD "$5\r\nfence\r\n",
		"*12\r\n" VALUE(5, "state", ONE) ALL WAITS VALUE(5, "ahead", NONE),
		"*3\r\n*0\r\n*0\r\n*0\r\n",
		"*3\r\n:5\r\n:9\r\n:2\r\n",
		"*6\r\n" NUMBER(5, "bytes") VALUE(5, "start", ":9\r\n") VALUE(3, "end", ":2\r\n"),
	};
	struct slots_grant grant;
	struct fake_redis fake;
	struct base_error error;
	void *pool;

	for (size_t i = 0; i < ARRAY_LENGTH(answers); i++) {
		fake_redis_start(&fake, FAKE_SAYS, answers[i]);
		pool = redis_case_open(fake.address, "1");
		redis_case_refused(pool, &error);
		/* The last answer ends the connection before the next call. */
		ck_assert_int_eq(slots_redis.pace(pool, 1, 1, &grant, NULL), IOSHAPE_E_COORDINATOR);
		slots_redis.wait(pool, 10, NULL);
		slots_redis.close(pool);
		fake_redis_stop(&fake);
	}
}

TEST(tests, a_reply_without_an_end_is_given_up_before_it_fills_the_memory)
{
	static char flood[65536];
	struct fake_redis fake;
	struct base_error error;
	void *pool;

	/* A string of 512 MiB, and a list with more elements than memory. */
	memset(flood, 'x', sizeof(flood) - 1);
	memcpy(flood, "$536870911\r\n", 12);
	fake_redis_start(&fake, FAKE_FLOODS, flood);
	pool = redis_case_open(fake.address, "1");
	redis_case_refused(pool, &error);
	slots_redis.close(pool);
	fake_redis_stop(&fake);
	fake_redis_start(&fake, FAKE_SAYS, "*1048577\r\n");
	pool = redis_case_open(fake.address, "1");
	redis_case_refused(pool, &error);
	slots_redis.close(pool);
	fake_redis_stop(&fake);
}

TEST(tests, a_server_that_wants_a_heartbeat_each_millisecond_gets_fifty_a_second)
{
	struct fake_redis fake;
	void *pool;

	fake_redis_start(&fake, FAKE_SAYS,
			 "*12\r\n" VALUE(5, "state", ONE) ALL WAITS WORD(5, "ahead"));
	pool = redis_case_open(fake.address, "1");
	ck_assert_uint_eq(redis_case_acquire(pool, "1-1").beat_ms, 20);
	slots_redis.close(pool);
	fake_redis_stop(&fake);
}

TEST(tests, the_sentence_names_the_server_wording)
{
	char path[160], of_path[180];
	const char *const rows[][2] = { { "redis://no-such-host.invalid", "no-such-host.invalid" },
					{ "redis://127.0.0.1:1", "redis at 127.0.0.1:1" },
					{ of_path, path } };
	struct base_error error;

	snprintf(path, sizeof(path), "%s", server.socket);
	snprintf(of_path, sizeof(of_path), "unix://%s", path);
	for (size_t i = 0; i < ARRAY_LENGTH(rows); i++) {
		void *pool = redis_case_open(rows[i][0], "1");

		redis_case_refused(pool, &error);
		redis_case_must_say(&error, rows[i][1]);
		slots_redis.close(pool);
	}
}
