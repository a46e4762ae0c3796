/* SPDX-License-Identifier: Apache-2.0 */
/* Slot pools of a Redis, for tests: their configuration, and calls that must succeed. */
#ifndef TESTS_SUPPORT_REDIS_CASE_H
#define TESTS_SUPPORT_REDIS_CASE_H

#include "base/base.h"
#include "slots/slots.h"
#include "support/must.h"
#include "support/redis_server.h"

#include <poll.h>

#define LEASE_MS 3000

static inline struct slots_config redis_case_config(const char *address, const char *client)
{
	struct slots_config config = {
		.address = address,
		.pool = "scratch",
		.identity = { .job = "job", .node = "n01", .ranks = 1, .share = 100 },
		.lease_ms = LEASE_MS,
		.default_capacity = 1,
	};

	snprintf(config.identity.client, sizeof(config.identity.client), "%016d", atoi(client));
	return config;
}

static inline void *redis_case_open_config(const struct slots_config *config)
{
	struct base_error error = { 0 };
	void *pool;

	MUST(!slots_redis.open(&pool, config, &error), "%s", error.text);
	return pool;
}

static inline void *redis_case_open(const char *address, const char *client)
{
	const struct slots_config config = redis_case_config(address, client);

	return redis_case_open_config(&config);
}

static inline struct slots_request redis_case_request(const char *id)
{
	struct slots_request request = { .weight = 1 };

	snprintf(request.id, sizeof(request.id), "%s", id);
	return request;
}

static inline struct slots_answer redis_case_acquire(void *pool, const char *id)
{
	const struct slots_request request = redis_case_request(id);
	struct base_error error = { 0 };
	struct slots_answer answer;

	MUST(!slots_redis.acquire(pool, &request, &answer, &error), "%s", error.text);
	return answer;
}

static inline struct slots_beat redis_case_beat_of(const char *id, const struct slots_answer *held)
{
	struct slots_beat beat = {
		.holding = held->state == SLOTS_HOLDING,
		.fence = held->fence,
		.epoch = held->epoch,
		.weight = held->weight,
	};

	snprintf(beat.id, sizeof(beat.id), "%s", id);
	return beat;
}

static inline struct slots_answer redis_case_beat(void *pool, const char *id,
						  const struct slots_answer *held)
{
	const struct slots_beat beat = redis_case_beat_of(id, held);
	struct base_error error = { 0 };
	struct slots_answer answer;

	MUST(!slots_redis.beat(pool, &beat, &answer, &error), "%s", error.text);
	return answer;
}

static inline void redis_case_release(void *pool, const char *id)
{
	struct base_error error = { 0 };

	MUST(!slots_redis.release(pool, id, 0, &error), "%s", error.text);
}

/* Calls wait(). Returns how many milliseconds it took. */
static inline unsigned redis_case_wait(void *pool, uint32_t timeout_ms)
{
	struct base_error error = { 0 };
	const uint64_t begin = base_now_ns();

	MUST(!slots_redis.wait(pool, timeout_ms, &error), "%s", error.text);
	return (unsigned)((base_now_ns() - begin) / 1000000);
}

/* Limit for calls that must not hang, generous enough for any machine. */
#define REDIS_CASE_GENEROUS_MS 30000u

static inline void redis_case_be_woken(void *pool)
{
	MUST(redis_case_wait(pool, REDIS_CASE_GENEROUS_MS) < REDIS_CASE_GENEROUS_MS, "not woken");
}

/* ---- Tests of a failing server, run by libcheck ---------------------------------------------- */

static inline unsigned redis_case_ms_since(uint64_t begin)
{
	return (unsigned)((base_now_ns() - begin) / 1000000);
}

/* Calls acquire(), which must fail in time. Returns how many milliseconds it took. */
static inline unsigned redis_case_refused(void *pool, struct base_error *error)
{
	const struct slots_request request = redis_case_request("1-1");
	const uint64_t begin = base_now_ns();
	struct slots_answer answer;

	memset(error, 0, sizeof(*error));
	ck_assert_int_eq(slots_redis.acquire(pool, &request, &answer, error),
			 IOSHAPE_E_COORDINATOR);
	ck_assert_int_eq(error->code, IOSHAPE_E_COORDINATOR);
	ck_assert_uint_lt(redis_case_ms_since(begin), REDIS_CASE_GENEROUS_MS);
	return redis_case_ms_since(begin);
}

static inline void redis_case_must_say(const struct base_error *error, const char *words)
{
	ck_assert_msg(strstr(error->text, words), "\"%s\" lacks \"%s\"", error->text, words);
}

/* Repeats acquire() until it succeeds, as a pool does after an outage. */
static inline void redis_case_until_well(void *pool, const char *id)
{
	const struct slots_request request = redis_case_request(id);
	const uint64_t begin = base_now_ns();
	struct base_error error = { 0 };
	struct slots_answer answer;

	while (slots_redis.acquire(pool, &request, &answer, &error)) {
		ck_assert_msg(redis_case_ms_since(begin) < REDIS_CASE_GENEROUS_MS, "%s",
			      error.text);
		error.code = 0;
		poll(NULL, 0, 5);
	}
}

/*
 * Acquires a slot. A new server first grants no slots for a while, to protect holders from before;
 * this waits for that.
 */
static inline struct slots_answer redis_case_hold(void *pool, const char *id)
{
	struct slots_answer answer = redis_case_acquire(pool, id);

	for (int i = 0; answer.state != SLOTS_HOLDING && i < 1000; i++) {
		poll(NULL, 0, 10);
		answer = redis_case_beat(pool, id, &answer);
	}
	ck_assert_int_eq(answer.state, SLOTS_HOLDING);
	return answer;
}

#endif
