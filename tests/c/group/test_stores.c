/* SPDX-License-Identifier: Apache-2.0 */
/* Promises that all stores for messages share. */
#define _GNU_SOURCE
#include "group/store.h"
#include "support/check_main.h"
#include "support/store_case.h"

#include <signal.h>
#include <sys/time.h>
#include <sys/wait.h>

#define MOST 8

static struct store_case stores;
static struct store *of[256];

static void open_all(int kind, uint32_t ranks)
{
	store_case_begin(&stores, kind, ranks);
	for (uint32_t i = 0; i < ranks; i++)
		of[i] = store_case_open(&stores, i);
}

static void close_all(void)
{
	/* Rank 0 last, because it waits for the others. */
	for (uint32_t i = stores.ranks; i-- > 0;) {
		if (of[i])
			store_close(of[i]);
		of[i] = NULL;
	}
	store_case_end(&stores);
}

static bool sees(uint32_t rank, const char *scope, const char *name, const char *text)
{
	struct base_buffer body = { 0 };
	bool well = store_case_look(of[rank], scope, name, &body) && body.bytes == strlen(text) &&
		    !memcmp(body.data, text, body.bytes);

	base_buffer_free(&body);
	return well;
}

static struct test_case stores_tests = { .name = "stores",
					 .setup = scratch_setup,
					 .teardown = scratch_teardown };

LOOP_TEST(stores_tests, test_every_rank_sees_what_any_rank_puts, 0, ARRAY_LENGTH(store_case_kinds))
{
	open_all(_i, 4);
	for (uint32_t from = 0; from < 4; from++) {
		store_case_put_own(of[from], "s1", "hello", from);
		for (uint32_t to = 0; to < 4; to++) {
			char name[16], text[16];

			snprintf(name, sizeof(name), "hello-%u", from);
			snprintf(text, sizeof(text), "note of %u", from);
			ck_assert(sees(to, "s1", name, text));
		}
	}
	for (uint32_t to = 0; to < 4; to++)
		store_case_collect(of[to], "s1", "hello", 4);
	close_all();
}

LOOP_TEST(stores_tests, test_what_is_not_there_is_no_failure, 0, ARRAY_LENGTH(store_case_kinds))
{
	struct base_buffer body = { 0 };
	struct store_case_found found = { 0 };
	bool have[3] = { 0 };

	open_all(_i, 3);
	for (uint32_t i = 0; i < 3; i++) {
		struct base_error error = { 0 };

		ck_assert_int_eq(store_get(of[i], "s1", "plan", &body, &error), -EAGAIN);
		ck_assert_int_eq(error.code, 0);
		ck_assert_int_eq(
			store_collect(of[i], "s1", "done", have, store_case_count, &found, &error),
			0);
		ck_assert_uint_eq(found.calls, 0);
	}
	/* A message of another scope, or whose name has this one as prefix, is not found. */
	store_case_put(of[1], "s1", "plan", "x", 1);
	ck_assert_int_eq(store_get(of[2], "s2", "plan", &body, NULL), -EAGAIN);
	ck_assert_int_eq(store_get(of[2], "s1", "pla", &body, NULL), -EAGAIN);
	ck_assert_int_eq(store_get(of[2], "s1", "plan-", &body, NULL), -EAGAIN);
	base_buffer_free(&body);
	close_all();
}

LOOP_TEST(stores_tests, test_a_message_put_again_is_replaced, 0, ARRAY_LENGTH(store_case_kinds))
{
	open_all(_i, 2);
	store_case_put(of[1], "s1", "n", "first", 5);
	ck_assert(sees(0, "s1", "n", "first"));
	store_case_put(of[1], "s1", "n", "other", 5);
	ck_assert(sees(0, "s1", "n", "other"));
	ck_assert(sees(1, "s1", "n", "other"));
	store_case_put(of[0], "s1", "n", "by rank 0", 9);
	ck_assert(sees(1, "s1", "n", "by rank 0"));
	close_all();
}

LOOP_TEST(stores_tests, test_messages_hold_any_bytes_of_any_length, 0,
	  ARRAY_LENGTH(store_case_kinds))
{
	static const size_t sizes[] = { 0, 1, 255, 4096, 65537, 10 * MIB };
	uint8_t *bytes = malloc(10 * MIB);

	open_all(_i, 3);
	for (size_t i = 0; i < 10 * MIB; i++)
		bytes[i] = (uint8_t)((i * 2654435761u) >> 13);
	for (size_t i = 0; i < ARRAY_LENGTH(sizes); i++) {
		store_case_put(of[1], "s1", "n", bytes, sizes[i]);
		store_case_expect(of[0], "s1", "n", bytes, sizes[i]);
		store_case_expect(of[2], "s1", "n", bytes, sizes[i]);
		store_case_put(of[0], "s1", "m", bytes, sizes[i]);
		store_case_expect(of[1], "s1", "m", bytes, sizes[i]);
	}
	ck_assert_int_eq(store_put(of[1], "s1", "n", bytes, STORE_MAX_MESSAGE_BYTES + 1, NULL),
			 -E2BIG);
	free(bytes);
	close_all();
}

LOOP_TEST(stores_tests, test_names_that_are_none_are_refused, 0, ARRAY_LENGTH(store_case_kinds))
{
	static const char *const bad[] = {
		"",
		"A",
		"a b",
		"a/b",
		"..",
		"a\n",
		"a_b",
		"\xc3\xa4",
		"a2345678901234567890123456789012345678901234567890123456789012-a",
	};
	struct store_case_found found = { 0 };
	struct base_buffer body = { 0 };
	bool have[2] = { 0 };

	open_all(_i, 2);
	for (size_t i = 0; i < ARRAY_LENGTH(bad); i++) {
		for (int rank = 0; rank < 2; rank++) {
			struct base_error error = { 0 };

			ck_assert_int_eq(store_put(of[rank], "s", bad[i], "", 0, &error), -EINVAL);
			ck_assert_int_eq(error.code, -EINVAL);
			ck_assert_int_eq(store_put(of[rank], bad[i], "n", "", 0, NULL), -EINVAL);
			ck_assert_int_eq(store_get(of[rank], "s", bad[i], &body, NULL), -EINVAL);
			ck_assert_int_eq(store_get(of[rank], bad[i], "n", &body, NULL), -EINVAL);
			ck_assert_int_eq(store_collect(of[rank], "s", bad[i], have,
						       store_case_count, &found, NULL),
					 -EINVAL);
		}
	}
	/* The longest valid names. */
	store_case_put(of[1], "a23456789012345678901234567890123456789012345678901234567890123",
		       "b23456789012345678901234567890123456789012345678901234567890123", "x", 1);
	ck_assert(sees(0, "a23456789012345678901234567890123456789012345678901234567890123",
		       "b23456789012345678901234567890123456789012345678901234567890123", "x"));
	close_all();
}

LOOP_TEST(stores_tests, test_rank0_drops_a_scope_for_all, 0, ARRAY_LENGTH(store_case_kinds))
{
	open_all(_i, 2);
	store_case_put(of[0], "s1", "n", "a", 1);
	store_case_put(of[1], "s1", "m", "b", 1);
	store_case_put(of[1], "s2", "m", "c", 1);
	store_drop(of[1], "s1");
	store_drop(of[0], "s1");
	ck_assert(!sees(1, "s1", "n", "a"));
	ck_assert(!sees(0, "s1", "m", "b"));
	ck_assert(sees(0, "s2", "m", "c"));
	/* The scope may be used again. */
	store_case_put(of[1], "s1", "n", "d", 1);
	ck_assert(sees(0, "s1", "n", "d"));
	close_all();
}

static int stop_at_second(void *user, uint32_t rank, const struct base_buffer *body)
{
	unsigned *calls = user;

	(void)rank;
	(void)body;
	return ++*calls == 2 ? -ECANCELED : 0;
}

LOOP_TEST(stores_tests, test_collect_asks_for_what_is_missing, 0, ARRAY_LENGTH(store_case_kinds))
{
	struct store_case_found found = { 0 };
	struct base_error error = { 0 };
	bool have[8] = { 0 };
	unsigned calls;

	open_all(_i, 8);
	for (uint32_t i = 0; i < 8; i += 2)
		store_case_put_own(of[i], "s1", "want", i);
	for (int rank = 0; rank < 2; rank++) {
		memset(have, 0, sizeof(have));
		have[2] = have[3] = true;
		found = (struct store_case_found){ .have = have };
		ck_assert_int_eq(store_collect(of[rank], "s1", "want", have, store_case_count,
					       &found, &error),
				 0);
		ck_assert_uint_eq(found.calls, 3);
		ck_assert_uint_eq(found.count, 3);
		/* An error of the callback ends the call; the next call succeeds. */
		memset(have, 0, sizeof(have));
		calls = 0;
		ck_assert_int_eq(
			store_collect(of[rank], "s1", "want", have, stop_at_second, &calls, NULL),
			-ECANCELED);
		ck_assert_uint_eq(calls, 2);
		ck_assert(sees((uint32_t)rank, "s1", "want-6", "note of 6"));
	}
	close_all();
}

struct poster {
	pthread_t thread;
	struct store *store;
	uint32_t rank;
};

/*
 * Exchanges messages like a save: all ranks put, rank 0 collects and answers, and all ranks wait
 * for the answer.
 */
static void take_shard(struct store *store, uint32_t rank, unsigned rounds)
{
	char scope[16], answer[16];

	for (unsigned round = 0; round < rounds; round++) {
		snprintf(scope, sizeof(scope), "r%u", round);
		snprintf(answer, sizeof(answer), "answer %u", round);
		store_case_put_own(store, scope, "want", rank);
		if (!rank) {
			store_case_collect(store, scope, "want", stores.ranks);
			store_case_put(store, scope, "plan", answer, strlen(answer));
		}
		store_case_expect(store, scope, "plan", answer, strlen(answer));
		store_case_put_own(store, scope, "done", rank);
		if (!rank) {
			store_case_collect(store, scope, "done", stores.ranks);
			store_drop(store, scope);
		}
	}
}

static void *take_part_in_thread(void *opaque)
{
	struct poster *poster = opaque;

	poster->store = store_case_open(&stores, poster->rank);
	take_shard(poster->store, poster->rank, 5);
	return NULL;
}

LOOP_TEST(stores_tests, test_threads_with_a_store_each, 0, ARRAY_LENGTH(store_case_kinds))
{
	struct poster posters[MOST];

	store_case_begin(&stores, _i, MOST);
	/* Rank 0 comes last. */
	for (uint32_t i = MOST; i-- > 0;) {
		posters[i] = (struct poster){ .rank = i };
		ck_assert(!pthread_create(&posters[i].thread, NULL, take_part_in_thread,
					  &posters[i]));
	}
	for (uint32_t i = 0; i < MOST; i++) {
		ck_assert(!pthread_join(posters[i].thread, NULL));
		of[i] = posters[i].store;
	}
	close_all();
}

static pid_t fork_rank(uint32_t rank, unsigned rounds)
{
	const pid_t pid = fork();
	struct store *store;

	ck_assert_int_ge(pid, 0);
	if (pid)
		return pid;
	store = store_case_open(&stores, rank);
	take_shard(store, rank, rounds);
	store_close(store);
	scratch_leave_child(0);
}

LOOP_TEST(stores_tests, test_processes_with_a_store_each, 0, ARRAY_LENGTH(store_case_kinds))
{
	pid_t pids[MOST];
	int status;

	store_case_begin(&stores, _i, MOST);
	for (uint32_t i = 1; i < MOST; i++)
		pids[i] = fork_rank(i, 10);
	of[0] = store_case_open(&stores, 0);
	take_shard(of[0], 0, 10);
	for (uint32_t i = 1; i < MOST; i++) {
		ck_assert_int_eq(waitpid(pids[i], &status, 0), pids[i]);
		ck_assert_int_eq(status, 0);
	}
	close_all();
}

LOOP_TEST(stores_tests, test_two_hundred_ranks, 0, ARRAY_LENGTH(store_case_kinds))
{
	open_all(_i, 200);
	for (uint32_t i = 0; i < 200; i++)
		store_case_put_own(of[i], "s1", "want", i);
	store_case_collect(of[0], "s1", "want", 200);
	store_case_collect(of[199], "s1", "want", 200);
	store_case_put(of[0], "s1", "plan", "p", 1);
	for (uint32_t i = 0; i < 200; i++)
		store_case_expect(of[i], "s1", "plan", "p", 1);
	close_all();
}

static void *put_soon(void *opaque)
{
	usleep(100000);
	store_case_put(opaque, "s1", "n", "x", 1);
	return NULL;
}

LOOP_TEST(stores_tests, test_wait_ends_when_something_comes_or_time_is_over, 0,
	  ARRAY_LENGTH(store_case_kinds))
{
	struct base_buffer body = { 0 };
	pthread_t thread;

	for (uint32_t waiting = 0; waiting < 2; waiting++) {
		open_all(_i, 2);
		ck_assert(!store_case_look(of[waiting], "s1", "n", &body));
		ck_assert(!pthread_create(&thread, NULL, put_soon, of[1 - waiting]));
		/* Longer than the test's time limit. */
		while (!store_case_look(of[waiting], "s1", "n", &body))
			store_wait(of[waiting], 3600000);
		ck_assert(!pthread_join(thread, NULL));
		/* No more messages come, so after at most one spurious wake-up the call waits. */
		store_wait(of[waiting], 200);
		store_wait(of[waiting], 200);
		close_all();
	}
	base_buffer_free(&body);
}

static int use_in_child(void *store)
{
	struct base_buffer body = { 0 };
	struct base_error error = { 0 };
	bool have[2] = { 0 };

	MUST(store_put(store, "s1", "n", "x", 1, &error) == -EPERM, "posted in a child");
	MUST(store_get(store, "s1", "n", &body, NULL) == -EPERM, "looked in a child");
	MUST(store_collect(store, "s1", "n", have, NULL, NULL, NULL) == -EPERM,
	     "collected in a child");
	MUST(!store_has_ended(store, 1), "gone in a child");
	store_drop(store, "s1");
	store_close(store);
	return 0;
}

LOOP_TEST(stores_tests, test_a_forked_child_touches_nothing, 0, ARRAY_LENGTH(store_case_kinds))
{
	open_all(_i, 2);
	store_case_put(of[0], "s1", "m", "x", 1);
	for (int rank = 0; rank < 2; rank++)
		ck_assert_int_eq(scratch_in_child(use_in_child, of[rank]), 0);
	ck_assert(sees(0, "s1", "m", "x"));
	ck_assert(sees(1, "s1", "m", "x"));
	ck_assert(!sees(1, "s1", "n", "x"));
	close_all();
}

LOOP_TEST(stores_tests, test_no_descriptor_is_left, 0, ARRAY_LENGTH(store_case_kinds))
{
	unsigned before;

	store_case_begin(&stores, _i, 3);
	before = scratch_descriptors();
	for (int round = 0; round < 3; round++) {
		for (uint32_t i = 0; i < 3; i++) {
			of[i] = store_case_open(&stores, i);
			store_case_put_own(of[i], "s1", "n", i);
		}
		for (uint32_t i = 3; i-- > 0;)
			store_close(of[i]);
		memset(of, 0, sizeof(of));
		ck_assert_uint_eq(scratch_descriptors(), before);
	}
	store_case_end(&stores);
}

LOOP_TEST(stores_tests, test_ranks_that_are_none_are_refused, 0, ARRAY_LENGTH(store_case_kinds))
{
	struct base_error error = { 0 };
	struct store *store;

	store_case_begin(&stores, _i, 2);
	ck_assert_int_eq(store_case_try(&stores, 2, 100, &store, &error), -EINVAL);
	ck_assert_ptr_null(store);
	strcpy(stores.name, "../x");
	ck_assert_int_eq(store_case_try(&stores, 0, 100, &store, NULL), -EINVAL);
	store_case_end(&stores);
}

static void on_alarm(int number)
{
	(void)number;
}

TEST(stores_tests, test_a_signal_ends_no_pause)
{
	const struct itimerval often = { { .tv_usec = 5000 }, { .tv_usec = 5000 } }, never = { 0 };
	const uint64_t begin = base_now_ns();

	signal(SIGALRM, on_alarm);
	ck_assert_int_eq(setitimer(ITIMER_REAL, &often, NULL), 0);
	store_sleep_ns(base_ms_to_ns(50));
	ck_assert_uint_ge(base_now_ns() - begin, base_ms_to_ns(50));
	ck_assert_int_eq(setitimer(ITIMER_REAL, &never, NULL), 0);
}
