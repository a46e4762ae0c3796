/* SPDX-License-Identifier: Apache-2.0 */
/* Order of requests in the pool of one host, with several opens of the pool in one process. */
#include "support/check_main.h"
#include "support/local_pool.h"
#include "support/random.h"

#include <errno.h>
#include <pthread.h>
#include <string.h>

#define POOLS 3u

static void *pools[POOLS];
static struct slots_request request;

static void begin(uint32_t capacity)
{
	for (unsigned i = 0; i < POOLS; i++)
		pools[i] = open_pool("p", capacity, 15000);
	request = (struct slots_request){ .weight = 1 };
}

static void setup(void)
{
	folder_setup();
	begin(2);
}

static void end(void)
{
	for (unsigned i = 0; i < POOLS; i++)
		slots_local.close(pools[i]);
}

static void teardown(void)
{
	end();
	folder_teardown();
}

static struct test_case tests = { .name = "order", .setup = setup, .teardown = teardown };

/*
 * Returns the open that a request belongs to, by the number in its ID: "a-4" belongs to the second.
 */
static void *pool_of(const char *id)
{
	return pools[(unsigned)atoi(strchr(id, '-') + 1) % POOLS];
}

static enum slots_state request_slot(const char *id)
{
	snprintf(request.id, sizeof(request.id), "%s", id);
	error.code = 0;
	ck_assert_msg(!slots_local.acquire(pool_of(id), &request, &answer, &error), "%s",
		      error.text);
	return answer.state;
}

static enum slots_state state_of(const char *id)
{
	ck_assert_msg(!look(pool_of(id), id), "%s", error.text);
	return answer.state;
}

static void release(const char *id)
{
	ck_assert_int_eq(give_back(pool_of(id), id), 0);
}

TEST(tests, a_request_that_comes_while_a_waiter_is_about_to_look_does_not_overtake_it)
{
	for (unsigned i = 0; i < 2; i++)
		request_slot(i ? "a-1" : "a-0");
	ck_assert_int_eq(request_slot("a-2"), SLOTS_WAITING);
	release("a-0");
	release("a-1");
	/* Two slots are free, one of which is reserved for the waiter. */
	ck_assert_int_eq(request_slot("a-3"), SLOTS_WAITING);
	ck_assert_int_eq(state_of("a-2"), SLOTS_HOLDING);
	ck_assert_int_eq(state_of("a-3"), SLOTS_HOLDING);
}

TEST(tests, small_requests_pass_the_queue_one_at_a_time_in_their_order)
{
	request_slot("a-0");
	request_slot("a-1");
	request.bytes = SLOTS_SMALL_BYTES + 1;
	ck_assert_int_eq(request_slot("l-2"), SLOTS_WAITING);
	request.bytes = SLOTS_SMALL_BYTES;
	ck_assert_int_eq(request_slot("s-0"), SLOTS_HOLDING);
	ck_assert_uint_eq(answer.weight, 0);
	ck_assert_int_eq(request_slot("s-1"), SLOTS_WAITING);
	ck_assert_int_eq(request_slot("s-2"), SLOTS_WAITING);
	request.weight = 2;
	ck_assert_int_eq(request_slot("h-1"), SLOTS_WAITING);
	release("s-0");
	ck_assert_int_eq(state_of("h-1"), SLOTS_WAITING);
	ck_assert_int_eq(state_of("s-2"), SLOTS_WAITING);
	ck_assert_int_eq(state_of("s-1"), SLOTS_HOLDING);
	/* The request is in the main queue, too. */
	release("a-0");
	ck_assert_int_eq(state_of("s-2"), SLOTS_WAITING);
	ck_assert_int_eq(state_of("l-2"), SLOTS_HOLDING);
	release("a-1");
	ck_assert_int_eq(state_of("s-2"), SLOTS_HOLDING);
	ck_assert_uint_eq(answer.weight, 1);
}

TEST(tests, a_small_request_takes_a_slot_that_is_free)
{
	/* Whichever slot is free, and whichever is looked at first. */
	for (unsigned i = 0; i < 8; i++) {
		request.bytes = 0;
		request_slot("a-0");
		request.bytes = 1;
		ck_assert_int_eq(request_slot("s-1"), SLOTS_HOLDING);
		ck_assert_uint_eq(answer.weight, 1);
		release("s-1");
		ck_assert_int_eq(request_slot("s-1"), SLOTS_HOLDING);
		ck_assert_uint_eq(answer.weight, 1);
		release("a-0");
		release("s-1");
	}
}

TEST(tests, a_request_that_is_repeated_changes_nothing)
{
	uint64_t fence;

	request_slot("a-0");
	fence = answer.fence;
	ck_assert_int_eq(request_slot("a-0"), SLOTS_HOLDING);
	ck_assert_uint_eq(answer.fence, fence);
	request_slot("a-1");
	request_slot("a-2");
	ck_assert_int_eq(request_slot("a-3"), SLOTS_WAITING);
	ck_assert_int_eq(request_slot("a-2"), SLOTS_WAITING);
	ck_assert_uint_eq(answer.position, 0);
	release("a-0");
	release("a-0");
	ck_assert_int_eq(state_of("a-0"), SLOTS_NONE);
}

static void *open_asking(uint32_t capacity)
{
	struct slots_config config = { .address = pool_address,
				       .pool = "p",
				       .lease_ms = 15000,
				       .asked_capacity = capacity,
				       .default_capacity = 2 };
	void *pool;

	MUST(!slots_local.open(&pool, &config, &error), "%s", error.text);
	return pool;
}

TEST(tests, the_capacity_is_the_jobs_then_the_default)
{
	void *wants_three = open_asking(3), *wants_five = open_asking(5);

	ck_assert_int_eq(ask(wants_three, "j-1", 1), 0);
	ck_assert_uint_eq(answer.capacity, 3);
	/* The capacity stays while the pool is in use. */
	ck_assert_int_eq(ask(wants_five, "j-2", 1), 0);
	ck_assert_uint_eq(answer.capacity, 3);
	give_back(wants_three, "j-1");
	give_back(wants_five, "j-2");
	ck_assert_int_eq(ask(wants_five, "j-3", 1), 0);
	ck_assert_uint_eq(answer.capacity, 5);
	give_back(wants_five, "j-3");
	request.default_capacity = 4;
	request_slot("a-0");
	ck_assert_uint_eq(answer.capacity, 4);
	slots_local.close(wants_three);
	slots_local.close(wants_five);
}

TEST(tests, holders_have_places_of_their_own)
{
	unsigned seen = 0;
	char id[16];

	end();
	begin(4);
	request.default_capacity = 4;
	for (unsigned i = 0; i < 4; i++) {
		snprintf(id, sizeof(id), "a-%u", i);
		ck_assert_int_eq(request_slot(id), SLOTS_HOLDING);
		ck_assert(answer.target_group >= 1 && answer.target_group <= 4);
		seen |= 1u << answer.target_group;
	}
	ck_assert_uint_eq(seen, 0x1e);
	for (unsigned i = 0; i < 4; i++) {
		snprintf(id, sizeof(id), "a-%u", i);
		release(id);
	}
	/* A process that writes file after file uses the slots in turn. */
	seen = 0;
	for (unsigned i = 0; i < 4; i++) {
		request_slot("b-0");
		seen |= 1u << answer.target_group;
		release("b-0");
	}
	ck_assert_uint_eq(seen, 0x1e);
}

/* ---- Many requests --------------------------------------------------------------------------- */

#define TURNS 500u
#define THREADS 4u
#define CAPACITY 2u

static atomic_int writing;

struct turns {
	void *pool;
	unsigned thread;
	uint64_t fences[TURNS];
};

static void *take_turns(void *argument)
{
	struct turns *turns = argument;

	for (unsigned i = 0; i < TURNS; i++) {
		struct slots_request mine = { .weight = 1 };
		struct slots_beat beat = { 0 };
		struct slots_answer told;

		snprintf(mine.id, sizeof(mine.id), "t%u-%u", turns->thread, i);
		memcpy(beat.id, mine.id, sizeof(beat.id));
		REQUIRE(!slots_local.acquire(turns->pool, &mine, &told, NULL));
		while (told.state == SLOTS_WAITING)
			REQUIRE(!slots_local.beat(turns->pool, &beat, &told, NULL));
		REQUIRE(told.state == SLOTS_HOLDING);
		REQUIRE(atomic_fetch_add(&writing, 1) < (int)CAPACITY);
		turns->fences[i] = told.fence;
		REQUIRE(!i || told.fence > turns->fences[i - 1]);
		atomic_fetch_sub(&writing, 1);
		REQUIRE(!slots_local.release(turns->pool, mine.id, 0, NULL));
	}
	return NULL;
}

static int by_number(const void *a, const void *b)
{
	const uint64_t *left = a, *right = b;

	return (*left > *right) - (*left < *right);
}

TEST(tests, never_more_than_the_capacity_write_and_no_fence_is_given_twice)
{
	static struct turns turns[THREADS];
	static uint64_t fences[THREADS * TURNS];
	pthread_t threads[THREADS];

	for (unsigned i = 0; i < THREADS; i++) {
		turns[i].pool = pools[i % POOLS];
		turns[i].thread = i;
		ck_assert_int_eq(base_start_thread(&threads[i], take_turns, &turns[i]), 0);
	}
	for (unsigned i = 0; i < THREADS; i++) {
		pthread_join(threads[i], NULL);
		memcpy(fences + i * TURNS, turns[i].fences, sizeof(turns[i].fences));
	}
	qsort(fences, ARRAY_LENGTH(fences), sizeof(fences[0]), by_number);
	for (size_t i = 1; i < ARRAY_LENGTH(fences); i++)
		REQUIRE(fences[i] > fences[i - 1]);
}

/* State of a request in the test's own model. */
struct known {
	enum slots_state state;
	uint32_t weight;
	bool urgent;
	uint64_t asked; /* sequence number of the request */
	char id[16];
};

#define REQUESTS 24u

static bool is_before(const struct known *a, const struct known *b)
{
	return a->urgent != b->urgent ? a->urgent : a->asked < b->asked;
}

static void note_answer(struct known *all, struct known *one)
{
	if (one->state == SLOTS_WAITING && answer.state == SLOTS_HOLDING) {
		for (unsigned i = 0; i < REQUESTS; i++)
			REQUIRE(all[i].state != SLOTS_WAITING || !is_before(&all[i], one));
	}
	REQUIRE(answer.state != SLOTS_NONE);
	one->state = answer.state;
}

static uint32_t used_by(const struct known *all, uint32_t capacity)
{
	uint32_t used = 0, urgent = 0;

	for (unsigned i = 0; i < REQUESTS; i++) {
		const bool holds = all[i].state == SLOTS_HOLDING;

		used += holds ? MIN(all[i].weight, capacity) : 0;
		urgent += holds && all[i].urgent;
	}
	return used - (urgent > 0);
}

TEST(tests, random_requests_keep_the_order_and_the_capacity)
{
	struct known all[REQUESTS] = { 0 };
	uint64_t seed = 11, asked = 0;
	unsigned granted = 0;

	for (unsigned i = 0; i < scratch_rounds(20000); i++) {
		const unsigned who = (unsigned)test_random_below(&seed, REQUESTS);
		struct known *one = &all[who];

		if (one->state == SLOTS_NONE) {
			one->weight = 1 + (uint32_t)test_random_below(&seed, 8) / 7 * 4;
			one->urgent = test_random_below(&seed, 10) == 0;
			one->weight = one->urgent ? 1 : one->weight;
			one->asked = ++asked;
			snprintf(one->id, sizeof(one->id), "r%u-%u", i, who);
			request.weight = one->weight;
			request.urgent = one->urgent;
			one->state = SLOTS_WAITING;
			request_slot(one->id);
			note_answer(all, one);
		} else if (one->state == SLOTS_HOLDING || test_random_below(&seed, 40) == 0) {
			release(one->id);
			one->state = SLOTS_NONE;
		} else {
			state_of(one->id);
			granted += one->state != answer.state;
			note_answer(all, one);
		}
		REQUIRE(used_by(all, 2) <= 2);
	}
	ck_assert_uint_gt(granted, scratch_rounds(20000) / 100);
}
