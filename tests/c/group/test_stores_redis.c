/* SPDX-License-Identifier: Apache-2.0 */
/* The store in a Redis that stops, loses its data, and asks for passwords. */
#define _GNU_SOURCE
#include "support/check_main.h"
#include "support/store_case.h"

#include <poll.h>
#include <signal.h>
#include <sys/stat.h>

static struct store_case stores;
static struct store *zero, *one;

static void setup(void)
{
	scratch_setup();
	store_case_begin(&stores, 2, 4);
	ck_assert_str_eq(stores.ops->id, "redis");
	zero = store_case_open(&stores, 0);
	one = store_case_open(&stores, 1);
}

/* Runs a command on the key of scope s1. */
static long long ask(const char *command, const char *arguments)
{
	char line[200];

	snprintf(line, sizeof(line), "%s {ios:scratch}:store:%s:s1%s", command, stores.name,
		 arguments);
	return redis_server_tell(&stores.server, line);
}

static void teardown(void)
{
	store_close(one);
	store_close(zero);
	store_case_end(&stores);
	scratch_teardown();
}

static void forget_everything(void)
{
	redis_server_kill(&stores.server);
	redis_server_start(&stores.server);
	ck_assert_int_eq(redis_server_tell(&stores.server, "DBSIZE"), 0);
}

static struct test_case tests = { .name = "redis", .setup = setup, .teardown = teardown };

TEST(tests, test_a_redis_that_forgot_everything_is_told_again)
{
	uint8_t binary[1000];
	uint64_t end;

	for (size_t i = 0; i < sizeof(binary); i++)
		binary[i] = (uint8_t)i;
	store_case_put(one, "s1", "n", binary, sizeof(binary));
	store_case_put(one, "s1", "m", "second", 6);
	store_case_put(one, "s2", "n", "other scope", 11);
	store_case_put(one, "s3", "n", "dropped", 7);
	store_drop(one, "s3");
	forget_everything();
	/* Waiting alone must restore the messages. */
	end = base_now_ns() + base_ms_to_ns(8000);
	while (redis_server_tell(&stores.server, "DBSIZE") < 2) {
		ck_assert_uint_lt(base_now_ns(), end);
		store_wait(one, 250);
	}
	store_case_expect(zero, "s1", "n", binary, sizeof(binary));
	store_case_expect(zero, "s1", "m", "second", 6);
	store_case_expect(zero, "s2", "n", "other scope", 11);
	ck_assert_int_eq(redis_server_tell(&stores.server, "DBSIZE"), 2);
}

/*
 * After a failover. The next message is put into the same scope or another one, while the rank
 * waits or does not.
 */
TEST(tests, test_a_lost_message_comes_back_while_others_are_put)
{
	struct base_buffer body = { 0 };
	uint64_t end;

	store_case_put(one, "s1", "want-1", "x", 1);
	for (int way = 0; way < 4; way++) {
		ask(way < 3 ? "HDEL" : "HSET", way < 3 ? " want-1" : " want-1 old");
		end = base_now_ns() + base_ms_to_ns(2500);
		for (int i = 0; !store_case_look(zero, "s1", "want-1", &body) || body.bytes != 1;
		     i++) {
			ck_assert_uint_lt(base_now_ns(), end);
			store_case_put(one, way % 2 ? "s1" : "life", "beat-1", &i, sizeof(i));
			if (way < 2)
				usleep(200000);
			else
				store_wait(one, 200);
		}
	}
	base_buffer_free(&body);
}

/* More messages than one round trip checks. */
TEST(tests, test_many_lost_messages_come_back)
{
	uint8_t *bytes = calloc(1, 700 * KIB);
	char name[32];
	uint64_t end;

	for (int i = 0; i < 300; i++) {
		snprintf(name, sizeof(name), "n-%d", i);
		store_case_put(one, "s1", name, &i, sizeof(i));
	}
	store_case_put(one, "s1", "large", bytes, 700 * KIB);
	store_case_put(one, "s1", "larger", bytes, 600 * KIB);
	for (int i = 0; i < 300; i += 7) {
		snprintf(name, sizeof(name), " n-%d", i);
		ask("HDEL", name);
	}
	ask("HDEL", " large larger");
	end = base_now_ns() + base_ms_to_ns(5000);
	while (ask("HLEN", "") < 302) {
		ck_assert_uint_lt(base_now_ns(), end);
		store_wait(one, 250);
	}
	for (int i = 0; i < 300; i++) {
		snprintf(name, sizeof(name), "n-%d", i);
		store_case_expect(zero, "s1", name, &i, sizeof(i));
	}
	store_case_expect(zero, "s1", "large", bytes, 700 * KIB);
	store_case_expect(zero, "s1", "larger", bytes, 600 * KIB);
	free(bytes);
}

TEST(tests, test_a_redis_that_is_away_is_told_soon_and_found_again)
{
	struct base_buffer body = { 0 };
	struct base_error error = { 0 };
	bool have[4] = { 0 };
	uint64_t began;
	int ret;

	/* The server is stopped, or running but silent. */
	for (int silent = 0; silent < 2; silent++) {
		store_case_put(zero, "s1", "n", "x", 1);
		if (silent)
			redis_server_signal(&stores.server, SIGSTOP);
		else
			redis_server_kill(&stores.server);
		for (int i = 0; i < 3; i++) {
			began = base_now_ns();
			memset(&error, 0, sizeof(error));
			ret = i == 0 ? store_put(one, "s1", "m", "y", 1, &error) :
			      i == 1 ? store_get(one, "s1", "n", &body, &error) :
				       store_collect(one, "s1", "want", have, store_case_count,
						     NULL, &error);
			ck_assert_int_eq(ret, IOSHAPE_E_COORDINATOR);
			ck_assert_int_eq(error.code, IOSHAPE_E_COORDINATOR);
			ck_assert_uint_lt(base_now_ns() - began, 3000000000);
		}
		if (silent)
			redis_server_signal(&stores.server, SIGCONT);
		else
			redis_server_start(&stores.server);
		began = base_now_ns();
		do {
			ck_assert_uint_lt(base_now_ns() - began, 5000000000);
			store_wait(one, 100);
			ret = store_get(one, "s1", "m", &body, NULL);
		} while (ret);
		/* A put that failed during the outage is repeated. */
		ck_assert(store_case_look(one, "s1", "m", &body));
	}
	base_buffer_free(&body);
}

TEST(tests, test_keys_have_an_end_and_the_pools_tag)
{
	long long left;

	store_case_put(one, "s1", "n", "x", 1);
	left = ask("PTTL", "");
	ck_assert_int_gt(left, 3590000);
	ck_assert_int_le(left, 3600000);
	ask("PEXPIRE", " 5000");
	store_case_put(zero, "s1", "m", "x", 1);
	left = ask("PTTL", "");
	ck_assert_int_gt(left, 3590000);
	store_drop(zero, "s1");
	ck_assert_int_eq(redis_server_tell(&stores.server, "DBSIZE"), 0);
	/* A message that is put after the drop expires, too. */
	store_case_put(one, "s1", "late", "x", 1);
	left = ask("PTTL", "");
	ck_assert_int_gt(left, 3590000);
}

TEST(tests, test_passwords_stay_out_of_sentences)
{
	struct base_error error = { 0 };
	char address[200];
	struct store *store;

	redis_server_tell(&stores.server, "CONFIG SET requirepass RIGHT-ONE");
	snprintf(address, sizeof(address), "redis://:SECRET-ONE@127.0.0.1:%u", stores.server.port);
	stores.coordinator.address = address;
	ck_assert_int_eq(store_case_try(&stores, 0, 100, &store, &error), IOSHAPE_E_COORDINATOR);
	ck_assert_ptr_null(strstr(error.text, "SECRET"));
	/* With the password outside the address, and over TCP. */
	snprintf(address, sizeof(address), "redis://127.0.0.1:%u", stores.server.port);
	stores.coordinator.password = "RIGHT-ONE";
	store = store_case_open(&stores, 0);
	store_case_put(store, "s1", "n", "x", 1);
	store_case_expect(store, "s1", "n", "x", 1);
	store_close(store);
}

TEST(tests, test_other_coordinators_are_no_store)
{
	static const char *const others[] = { "local", "local:/tmp/x", "open", "nonsense" };
	struct store *store;

	for (size_t i = 0; i < ARRAY_LENGTH(others); i++) {
		stores.coordinator.address = others[i];
		ck_assert_int_eq(store_case_try(&stores, 0, 100, &store, NULL), -EINVAL);
		ck_assert_ptr_null(store);
	}
	stores.coordinator.address = NULL;
	ck_assert_int_eq(store_case_try(&stores, 0, 100, &store, NULL), -EINVAL);
}

/* The key has another type: another program's key, or a reply of a lying server. */
TEST(tests, test_a_key_of_another_kind_is_an_error)
{
	struct base_buffer body = { 0 };

	ask("SET", " x");
	ck_assert_int_eq(store_get(zero, "s1", "n", &body, NULL), IOSHAPE_E_COORDINATOR);
	ck_assert_int_eq(store_put(zero, "s1", "n", "x", 1, NULL), IOSHAPE_E_COORDINATOR);
	store_drop(zero, "s1");
	store_case_put(zero, "s1", "n", "x", 1);
	base_buffer_free(&body);
}

TEST(tests, test_the_largest_message_passes)
{
	/* valgrind would exceed the time limit of a call. */
	const size_t most = scratch_under_valgrind() ? 4 * MIB : STORE_MAX_MESSAGE_BYTES;
	uint8_t *bytes = calloc(1, most);

	bytes[most - 1] = 1;
	store_case_put(one, "s1", "n", bytes, most);
	store_case_expect(zero, "s1", "n", bytes, most);
	free(bytes);
}

/* ---- Other users of the Redis ---------------------------------------------------------------- */

/* A value that is not sealed, or was sealed for another name or scope, is ignored. */
TEST(tests, test_what_others_write_is_no_message)
{
	struct base_buffer body = { 0 };
	struct store_case_found found = { 0 };
	bool have[4] = { 0 };
	redisReply *real;

	store_case_put(one, "s2", "n", "x", 1);
	real = redis_server_say(&stores.server, "HGET {ios:scratch}:store:%s:s2 n", stores.name);
	redis_server_tell(&stores.server, "HSET {ios:scratch}:store:%s:s1 n %b", stores.name,
			  real->str, real->len);
	redis_server_tell(&stores.server, "HSET {ios:scratch}:store:%s:s2 m %b", stores.name,
			  real->str, real->len);
	freeReplyObject(real);
	ck_assert(store_case_look(zero, "s2", "n", &body));
	ck_assert(!store_case_look(zero, "s1", "n", &body));
	ck_assert(!store_case_look(zero, "s2", "m", &body));
	ask("HSET", " short x");
	ask("HSET", " long 0123456789012345678901234567890123456789");
	ask("HSET", " want-1 0123456789012345678901234567890123456789");
	ck_assert(!store_case_look(zero, "s1", "short", &body));
	ck_assert(!store_case_look(zero, "s1", "long", &body));
	ck_assert(!store_case_look(one, "s1", "long", &body));
	ck_assert_int_eq(store_collect(zero, "s1", "want", have, store_case_count, &found, NULL),
			 0);
	ck_assert_uint_eq(found.calls, 0);
	base_buffer_free(&body);
}

/* The old rank 0 was killed and could not remove its secret. The new rank 0 creates another one. */
TEST(tests, test_a_new_rank_0_is_understood_by_those_who_have_read_the_old_secret)
{
	struct store *before = zero;
	struct base_buffer none = { 0 };
	char secret[128];

	store_case_put(one, "s1", "hello-1", "note of 1", 9);
	zero = store_case_open(&stores, 0);
	/* The message is sealed with the old secret. */
	ck_assert(!store_case_look(zero, "s1", "hello-1", &none));
	store_case_put(zero, "s1", "roster-0", "r", 1);
	store_case_expect(one, "s1", "roster-0", "r", 1);
	store_case_expect(zero, "s1", "hello-1", "note of 1", 9);
	/* The old rank 0 ends late and removes the new secret, which is then restored. */
	store_close(before);
	snprintf(secret, sizeof(secret), ".ioshape-store-%s/redis.secret", stores.name);
	while (access(scratch_path(secret), F_OK))
		store_wait(zero, 250);
	store_close(store_case_open(&stores, 2));
}

static int open_as_another_user(void *unused)
{
	struct base_error error = { 0 };
	struct store *late;

	(void)unused;
	MUST(!setresuid(54321, 54321, 54321), "not another user");
	MUST(store_case_try(&stores, 2, STORE_CASE_PATIENCE_MS, &late, &error) == -EACCES,
	     "it was given the secret");
	MUST(error.code == -EACCES && *error.sentence && *error.remedy, "no words");
	return 0;
}

TEST(tests, test_who_cannot_read_the_secret_is_told_at_once)
{
	if (geteuid())
		return;
	ck_assert(!chmod(stores.server.directory, 0711) && !chmod(stores.server.socket, 0777));
	ck_assert(!chmod(scratch_directory(), 0711));
	ck_assert_int_eq(scratch_in_child(open_as_another_user, NULL), 0);
}

TEST(tests, test_without_rank_0_there_is_no_secret)
{
	struct base_error error = { 0 };
	struct store *late;

	store_close(one);
	store_close(zero);
	ck_assert_int_eq(store_case_try(&stores, 1, 300, &late, &error), -ETIMEDOUT);
	zero = store_case_open(&stores, 0);
	one = store_case_open(&stores, 1);
}
