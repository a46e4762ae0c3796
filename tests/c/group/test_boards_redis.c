/* SPDX-License-Identifier: Apache-2.0 */
/* The store in a Redis that stops, loses its data, and asks for passwords. */
#define _GNU_SOURCE
#include "support/board_case.h"
#include "support/check_main.h"

#include <poll.h>
#include <signal.h>
#include <sys/stat.h>

static struct board_case boards;
static struct store *zero, *one;

static void setup(void)
{
	scratch_setup();
	board_case_begin(&boards, 2, 4);
	ck_assert_str_eq(boards.ops->id, "redis");
	zero = board_case_open(&boards, 0);
	one = board_case_open(&boards, 1);
}

/* Runs a command on the key of scope s1. */
static long long ask(const char *command, const char *arguments)
{
	char line[200];

	snprintf(line, sizeof(line), "%s {ios:scratch}:board:%s:s1%s", command, boards.name,
		 arguments);
	return redis_server_tell(&boards.server, line);
}

static void teardown(void)
{
	store_close(one);
	store_close(zero);
	board_case_end(&boards);
	scratch_teardown();
}

static void forget_everything(void)
{
	redis_server_kill(&boards.server);
	redis_server_start(&boards.server);
	ck_assert_int_eq(redis_server_tell(&boards.server, "DBSIZE"), 0);
}

static struct test_case tests = { .name = "redis", .setup = setup, .teardown = teardown };

TEST(tests, test_a_redis_that_forgot_everything_is_told_again)
{
	uint8_t binary[1000];
	uint64_t end;

	for (size_t i = 0; i < sizeof(binary); i++)
		binary[i] = (uint8_t)i;
	board_case_post(one, "s1", "n", binary, sizeof(binary));
	board_case_post(one, "s1", "m", "second", 6);
	board_case_post(one, "s2", "n", "other scope", 11);
	board_case_post(one, "s3", "n", "dropped", 7);
	store_drop(one, "s3");
	forget_everything();
	/* Waiting alone must restore the messages. */
	end = base_now_ns() + base_ms_to_ns(8000);
	while (redis_server_tell(&boards.server, "DBSIZE") < 2) {
		ck_assert_uint_lt(base_now_ns(), end);
		store_wait(one, 250);
	}
	board_case_expect(zero, "s1", "n", binary, sizeof(binary));
	board_case_expect(zero, "s1", "m", "second", 6);
	board_case_expect(zero, "s2", "n", "other scope", 11);
	ck_assert_int_eq(redis_server_tell(&boards.server, "DBSIZE"), 2);
}

/*
 * After a failover. The next message is put into the same scope or another one, while the rank
 * waits or does not.
 */
TEST(tests, test_a_lost_note_comes_back_while_others_are_posted)
{
	struct base_buffer note = { 0 };
	uint64_t end;

	board_case_post(one, "s1", "want-1", "x", 1);
	for (int way = 0; way < 4; way++) {
		ask(way < 3 ? "HDEL" : "HSET", way < 3 ? " want-1" : " want-1 old");
		end = base_now_ns() + base_ms_to_ns(2500);
		for (int i = 0; !board_case_look(zero, "s1", "want-1", &note) || note.bytes != 1;
		     i++) {
			ck_assert_uint_lt(base_now_ns(), end);
			board_case_post(one, way % 2 ? "s1" : "life", "beat-1", &i, sizeof(i));
			if (way < 2)
				usleep(200000);
			else
				store_wait(one, 200);
		}
	}
	base_buffer_free(&note);
}

/* More messages than one round trip checks. */
TEST(tests, test_many_lost_notes_come_back)
{
	uint8_t *bytes = calloc(1, 700 * KIB);
	char name[32];
	uint64_t end;

	for (int i = 0; i < 300; i++) {
		snprintf(name, sizeof(name), "n-%d", i);
		board_case_post(one, "s1", name, &i, sizeof(i));
	}
	board_case_post(one, "s1", "large", bytes, 700 * KIB);
	board_case_post(one, "s1", "larger", bytes, 600 * KIB);
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
		board_case_expect(zero, "s1", name, &i, sizeof(i));
	}
	board_case_expect(zero, "s1", "large", bytes, 700 * KIB);
	board_case_expect(zero, "s1", "larger", bytes, 600 * KIB);
	free(bytes);
}

TEST(tests, test_a_redis_that_is_away_is_told_soon_and_found_again)
{
	struct base_buffer note = { 0 };
	struct base_error error = { 0 };
	bool have[4] = { 0 };
	uint64_t began;
	int ret;

	/* The server is stopped, or running but silent. */
	for (int silent = 0; silent < 2; silent++) {
		board_case_post(zero, "s1", "n", "x", 1);
		if (silent)
			redis_server_signal(&boards.server, SIGSTOP);
		else
			redis_server_kill(&boards.server);
		for (int i = 0; i < 3; i++) {
			began = base_now_ns();
			memset(&error, 0, sizeof(error));
			ret = i == 0 ? store_put(one, "s1", "m", "y", 1, &error) :
			      i == 1 ? store_get(one, "s1", "n", &note, &error) :
				       store_collect(one, "s1", "want", have, board_case_count,
						     NULL, &error);
			ck_assert_int_eq(ret, IOSHAPE_E_COORDINATOR);
			ck_assert_int_eq(error.code, IOSHAPE_E_COORDINATOR);
			ck_assert_uint_lt(base_now_ns() - began, 3000000000);
		}
		if (silent)
			redis_server_signal(&boards.server, SIGCONT);
		else
			redis_server_start(&boards.server);
		began = base_now_ns();
		do {
			ck_assert_uint_lt(base_now_ns() - began, 5000000000);
			store_wait(one, 100);
			ret = store_get(one, "s1", "m", &note, NULL);
		} while (ret);
		/* A put that failed during the outage is repeated. */
		ck_assert(board_case_look(one, "s1", "m", &note));
	}
	base_buffer_free(&note);
}

TEST(tests, test_keys_have_an_end_and_the_pools_tag)
{
	long long left;

	board_case_post(one, "s1", "n", "x", 1);
	left = ask("PTTL", "");
	ck_assert_int_gt(left, 3590000);
	ck_assert_int_le(left, 3600000);
	ask("PEXPIRE", " 5000");
	board_case_post(zero, "s1", "m", "x", 1);
	left = ask("PTTL", "");
	ck_assert_int_gt(left, 3590000);
	store_drop(zero, "s1");
	ck_assert_int_eq(redis_server_tell(&boards.server, "DBSIZE"), 0);
	/* A message that is put after the drop expires, too. */
	board_case_post(one, "s1", "late", "x", 1);
	left = ask("PTTL", "");
	ck_assert_int_gt(left, 3590000);
}

TEST(tests, test_passwords_stay_out_of_sentences)
{
	struct base_error error = { 0 };
	char address[200];
	struct store *board;

	redis_server_tell(&boards.server, "CONFIG SET requirepass RIGHT-ONE");
	snprintf(address, sizeof(address), "redis://:SECRET-ONE@127.0.0.1:%u", boards.server.port);
	boards.coordinator.address = address;
	ck_assert_int_eq(board_case_try(&boards, 0, 100, &board, &error), IOSHAPE_E_COORDINATOR);
	ck_assert_ptr_null(strstr(error.text, "SECRET"));
	/* With the password outside the address, and over TCP. */
	snprintf(address, sizeof(address), "redis://127.0.0.1:%u", boards.server.port);
	boards.coordinator.password = "RIGHT-ONE";
	board = board_case_open(&boards, 0);
	board_case_post(board, "s1", "n", "x", 1);
	board_case_expect(board, "s1", "n", "x", 1);
	store_close(board);
}

TEST(tests, test_other_coordinators_are_no_board)
{
	static const char *const others[] = { "local", "local:/tmp/x", "open", "nonsense" };
	struct store *board;

	for (size_t i = 0; i < ARRAY_LENGTH(others); i++) {
		boards.coordinator.address = others[i];
		ck_assert_int_eq(board_case_try(&boards, 0, 100, &board, NULL), -EINVAL);
		ck_assert_ptr_null(board);
	}
	boards.coordinator.address = NULL;
	ck_assert_int_eq(board_case_try(&boards, 0, 100, &board, NULL), -EINVAL);
}

/* The key has another type: another program's key, or a reply of a lying server. */
TEST(tests, test_a_key_of_another_kind_is_an_error)
{
	struct base_buffer note = { 0 };

	ask("SET", " x");
	ck_assert_int_eq(store_get(zero, "s1", "n", &note, NULL), IOSHAPE_E_COORDINATOR);
	ck_assert_int_eq(store_put(zero, "s1", "n", "x", 1, NULL), IOSHAPE_E_COORDINATOR);
	store_drop(zero, "s1");
	board_case_post(zero, "s1", "n", "x", 1);
	base_buffer_free(&note);
}

TEST(tests, test_the_largest_note_passes)
{
	/* valgrind would exceed the time limit of a call. */
	const size_t most = scratch_under_valgrind() ? 4 * MIB : STORE_MAX_MESSAGE_BYTES;
	uint8_t *bytes = calloc(1, most);

	bytes[most - 1] = 1;
	board_case_post(one, "s1", "n", bytes, most);
	board_case_expect(zero, "s1", "n", bytes, most);
	free(bytes);
}

/* ---- Other users of the Redis ---- */

/* A value that is not sealed, or was sealed for another name or scope, is ignored. */
TEST(tests, test_what_others_write_is_no_note)
{
	struct base_buffer note = { 0 };
	struct board_case_found found = { 0 };
	bool have[4] = { 0 };
	redisReply *real;

	board_case_post(one, "s2", "n", "x", 1);
	real = redis_server_say(&boards.server, "HGET {ios:scratch}:board:%s:s2 n", boards.name);
	redis_server_tell(&boards.server, "HSET {ios:scratch}:board:%s:s1 n %b", boards.name,
			  real->str, real->len);
	redis_server_tell(&boards.server, "HSET {ios:scratch}:board:%s:s2 m %b", boards.name,
			  real->str, real->len);
	freeReplyObject(real);
	ck_assert(board_case_look(zero, "s2", "n", &note));
	ck_assert(!board_case_look(zero, "s1", "n", &note));
	ck_assert(!board_case_look(zero, "s2", "m", &note));
	ask("HSET", " short x");
	ask("HSET", " long 0123456789012345678901234567890123456789");
	ask("HSET", " want-1 0123456789012345678901234567890123456789");
	ck_assert(!board_case_look(zero, "s1", "short", &note));
	ck_assert(!board_case_look(zero, "s1", "long", &note));
	ck_assert(!board_case_look(one, "s1", "long", &note));
	ck_assert_int_eq(store_collect(zero, "s1", "want", have, board_case_count, &found, NULL),
			 0);
	ck_assert_uint_eq(found.calls, 0);
	base_buffer_free(&note);
}

/* The old rank 0 was killed and could not remove its secret. The new rank 0 creates another one. */
TEST(tests, test_a_new_rank_0_is_understood_by_those_who_have_read_the_old_secret)
{
	struct store *before = zero;
	struct base_buffer none = { 0 };
	char secret[128];

	board_case_post(one, "s1", "hello-1", "note of 1", 9);
	zero = board_case_open(&boards, 0);
	/* The message is sealed with the old secret. */
	ck_assert(!board_case_look(zero, "s1", "hello-1", &none));
	board_case_post(zero, "s1", "roster-0", "r", 1);
	board_case_expect(one, "s1", "roster-0", "r", 1);
	board_case_expect(zero, "s1", "hello-1", "note of 1", 9);
	/* The old rank 0 ends late and removes the new secret, which is then restored. */
	store_close(before);
	snprintf(secret, sizeof(secret), ".ioshape-board-%s/redis.secret", boards.name);
	while (access(scratch_path(secret), F_OK))
		store_wait(zero, 250);
	store_close(board_case_open(&boards, 2));
}

static int open_as_another_user(void *unused)
{
	struct base_error error = { 0 };
	struct store *late;

	(void)unused;
	MUST(!setresuid(54321, 54321, 54321), "not another user");
	MUST(board_case_try(&boards, 2, BOARD_CASE_PATIENCE_MS, &late, &error) == -EACCES,
	     "it was given the secret");
	MUST(error.code == -EACCES && *error.sentence && *error.remedy, "no words");
	return 0;
}

TEST(tests, test_who_cannot_read_the_secret_is_told_at_once)
{
	if (geteuid())
		return;
	ck_assert(!chmod(boards.server.directory, 0711) && !chmod(boards.server.socket, 0777));
	ck_assert(!chmod(scratch_directory(), 0711));
	ck_assert_int_eq(scratch_in_child(open_as_another_user, NULL), 0);
}

TEST(tests, test_without_rank_0_there_is_no_secret)
{
	struct base_error error = { 0 };
	struct store *late;

	store_close(one);
	store_close(zero);
	ck_assert_int_eq(board_case_try(&boards, 1, 300, &late, &error), -ETIMEDOUT);
	zero = board_case_open(&boards, 0);
	one = board_case_open(&boards, 1);
}

int main(void)
{
	return check_run("boards_redis");
}
