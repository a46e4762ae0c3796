/* SPDX-License-Identifier: Apache-2.0 */
/* The board over sockets: ends of processes, and peers that do what they should not. */
#define _GNU_SOURCE
#include "gather/board_sockets.h"
#include "support/board_case.h"
#include "support/check_main.h"

#include <signal.h>
#include <stdatomic.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/wait.h>

static struct board_case boards;
static void *of[8];

static void setup(void)
{
	scratch_setup();
	board_case_begin(&boards, 0, 8);
	ck_assert_str_eq(boards.ops->id, "sockets");
}

static void open_ranks(uint32_t first, uint32_t last)
{
	for (uint32_t i = first; i <= last; i++)
		of[i] = board_case_open(&boards, i);
}

static void close_all(void)
{
	for (uint32_t i = ARRAY_LENGTH(of); i-- > 0;) {
		if (of[i])
			boards.ops->close(of[i]);
		of[i] = NULL;
	}
}

static void wait_until_gone(void *board, uint32_t rank)
{
	const uint64_t end = base_now_ns() + base_ms_to_ns(5000);

	while (!boards.ops->is_gone(board, rank)) {
		ck_assert_uint_lt(base_now_ns(), end);
		boards.ops->wait(board, 1000);
	}
}

/* A process with a board, and one that it forked, which outlives it. Its note says that both are
 * there. */
static pid_t start_process(uint32_t rank, pid_t *orphan)
{
	int pipes[2];
	pid_t pid;

	ck_assert(!pipe(pipes));
	pid = fork();
	if (!pid) {
		void *board = board_case_open(&boards, rank);
		pid_t child = fork();

		if (!child) {
			alarm(30);
			pause();
			_exit(0);
		}
		/* So that the child has left fork() when it is told. */
		usleep(50000);
		board_case_post_own(&boards, board, "s1", "hello", rank);
		MUST(write(pipes[1], &child, sizeof(child)) == sizeof(child), "no pipe");
		alarm(30);
		for (;;)
			pause();
	}
	ck_assert_int_eq(read(pipes[0], orphan, sizeof(*orphan)), sizeof(*orphan));
	close(pipes[0]);
	close(pipes[1]);
	return pid;
}

static void kill_now(pid_t pid)
{
	int status;

	kill(pid, SIGKILL);
	ck_assert_int_eq(waitpid(pid, &status, 0), pid);
}

START_TEST(test_all_see_that_a_rank_was_killed)
{
	pid_t orphan, pid;

	open_ranks(0, 2);
	pid = start_process(3, &orphan);
	for (uint32_t i = 0; i < 3; i++)
		ck_assert(!boards.ops->is_gone(of[i], 3));
	kill_now(pid);
	for (uint32_t i = 0; i < 3; i++) {
		wait_until_gone(of[i], 3);
		ck_assert(!boards.ops->is_gone(of[i], 0));
		ck_assert(!boards.ops->is_gone(of[i], 1));
		ck_assert(!boards.ops->is_gone(of[i], 4));
		/* What it had posted stays. */
		board_case_expect(&boards, of[i], "s1", "hello-3", "note of 3", 9);
	}
	/* Who comes later hears of it as well. */
	open_ranks(4, 4);
	wait_until_gone(of[4], 3);
	kill(orphan, SIGKILL);
	close_all();
}
END_TEST

START_TEST(test_all_see_that_rank_0_was_killed)
{
	struct base_buffer note = { 0 };
	struct base_error error = { 0 };
	bool have[8] = { 0 };
	pid_t orphan, pid = start_process(0, &orphan);
	uint64_t began;

	open_ranks(1, 2);
	board_case_expect(&boards, of[1], "s1", "hello-0", "note of 0", 9);
	kill_now(pid);
	for (uint32_t i = 1; i < 3; i++) {
		wait_until_gone(of[i], 0);
		ck_assert_int_eq(boards.ops->look(of[i], "s1", "hello-0", &note, &error),
				 IOSHAPE_E_COORDINATOR);
		ck_assert_ptr_nonnull(strstr(error.text, "rank 0"));
		ck_assert_int_eq(boards.ops->post(of[i], "s1", "n", "x", 1, NULL),
				 IOSHAPE_E_COORDINATOR);
		ck_assert_int_eq(boards.ops->collect(of[i], "s1", "hello", have, board_case_count,
						     NULL, NULL),
				 IOSHAPE_E_COORDINATOR);
	}
	/* Nobody spins. */
	boards.ops->wait(of[1], 10);
	began = base_now_ns();
	boards.ops->wait(of[1], 200);
	ck_assert_uint_ge(base_now_ns() - began, 200000000);
	/* The next job can have the name, although a child of the old one lives. */
	of[0] = board_case_open(&boards, 0);
	of[3] = board_case_open(&boards, 3);
	board_case_post(&boards, of[3], "s1", "n", "x", 1);
	board_case_expect(&boards, of[0], "s1", "n", "x", 1);
	kill(orphan, SIGKILL);
	base_buffer_free(&note);
	close_all();
}
END_TEST

START_TEST(test_rank_0_that_does_not_come_is_named)
{
	const uint64_t began = base_now_ns();
	struct base_error error = { 0 };
	void *board;

	ck_assert_int_eq(board_case_try(&boards, 1, 300, &board, &error), -ETIMEDOUT);
	ck_assert_ptr_null(board);
	ck_assert_ptr_nonnull(strstr(error.text, "rank 0"));
	ck_assert_uint_ge(base_now_ns() - began, 300000000);
	ck_assert_uint_lt(base_now_ns() - began, 3000000000);
}
END_TEST

static void *close_soon(void *board)
{
	usleep(200000);
	boards.ops->close(board);
	return NULL;
}

START_TEST(test_another_group_of_the_same_name_is_waited_for)
{
	struct base_error error = { 0 };
	pthread_t thread;
	void *board;

	open_ranks(0, 1);
	ck_assert_int_eq(board_case_try(&boards, 0, 200, &board, &error), -EADDRINUSE);
	ck_assert_ptr_nonnull(strstr(error.text, "another group"));
	memset(&error, 0, sizeof(error));
	ck_assert_int_eq(board_case_try(&boards, 1, 200, &board, &error), -EEXIST);
	ck_assert_ptr_nonnull(strstr(error.text, "another group"));
	/* Nor does a rank come back that has ended: it would be of another job. */
	boards.ops->close(of[1]);
	of[1] = NULL;
	wait_until_gone(of[0], 1);
	ck_assert_int_eq(board_case_try(&boards, 1, 200, &board, NULL), -EEXIST);
	boards.ranks = 7;
	ck_assert_int_eq(board_case_try(&boards, 2, 200, &board, NULL), -EINVAL);
	boards.ranks = 8;
	ck_assert(!pthread_create(&thread, NULL, close_soon, of[0]));
	ck_assert_int_eq(board_case_try(&boards, 0, 5000, &of[0], NULL), 0);
	ck_assert(!pthread_join(thread, NULL));
	open_ranks(1, 1);
	close_all();
}
END_TEST

/* ---- Peers that are not well --------------------------------------------------------------- */

static int connect_raw(void)
{
	struct sockets_address address;
	int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);

	sockets_name(&address, boards.name);
	ck_assert(!connect(fd, (struct sockaddr *)&address.un, address.bytes));
	return fd;
}

static void send_raw(int fd, enum wire_type type, uint32_t number, const char *scope,
		     const char *name, const void *body, uint32_t announced, uint32_t sent)
{
	struct wire_head head = {
		.type = type, .id = 1, .number = number, .body_bytes = announced
	};
	uint8_t raw[WIRE_MOST_HEAD_BYTES];
	size_t bytes;

	strcpy(head.scope, scope);
	strcpy(head.name, name);
	bytes = wire_put_head(raw, &head);
	ck_assert_int_eq(send(fd, raw, bytes, MSG_NOSIGNAL), (ssize_t)bytes);
	/* The head may have been enough to be shown out. */
	if (sent && send(fd, body, sent, MSG_NOSIGNAL) != sent)
		ck_assert_int_eq(errno, EPIPE);
}

static int join_raw(uint32_t rank)
{
	const uint8_t ranks[4] = { 8 };
	const int fd = connect_raw();
	uint8_t answer[WIRE_HEAD_BYTES];

	send_raw(fd, WIRE_HELLO, rank, "", "", ranks, 4, 4);
	ck_assert_int_eq(recv(fd, answer, sizeof(answer), MSG_WAITALL), sizeof(answer));
	ck_assert_uint_eq(answer[0], WIRE_DONE);
	ck_assert_uint_eq(base_get_le(answer + 8, 4), 0);
	return fd;
}

START_TEST(test_who_stalls_stalls_nobody_else)
{
	uint8_t *big = calloc(1, 10 * MIB);
	int talker, listener;
	uint64_t began;

	open_ranks(0, 2);
	board_case_post(&boards, of[0], "s1", "big", big, 10 * MIB);
	/* One does not finish what it says, another asks and asks and does not listen. */
	talker = join_raw(5);
	send_raw(talker, WIRE_POST, 0, "s1", "never", big, 60 * MIB, 1000);
	listener = join_raw(6);
	for (int i = 0; i < 100; i++)
		send_raw(listener, WIRE_LOOK, 0, "s1", "big", NULL, 0, 0);
	began = base_now_ns();
	for (int i = 0; i < 100; i++) {
		board_case_post(&boards, of[1], "s1", "n", &i, sizeof(i));
		board_case_expect(&boards, of[2], "s1", "n", &i, sizeof(i));
		board_case_expect(&boards, of[0], "s1", "n", &i, sizeof(i));
	}
	ck_assert_uint_lt(base_now_ns() - began, 5000000000);
	close(talker);
	close(listener);
	wait_until_gone(of[1], 5);
	wait_until_gone(of[1], 6);
	board_case_expect(&boards, of[1], "s1", "big", big, 10 * MIB);
	free(big);
	close_all();
}
END_TEST

static bool is_closed(int fd)
{
	struct timeval patience = { 5, 0 };
	uint8_t bytes[64];
	ssize_t got;

	setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof(patience));
	do {
		got = recv(fd, bytes, sizeof(bytes), 0);
	} while (got > 0);
	close(fd);
	return !got || errno == ECONNRESET;
}

START_TEST(test_what_is_no_frame_ends_the_connection)
{
	uint8_t raw[64] = { 0 };
	uint64_t random = 1;
	int fd;

	open_ranks(0, 1);
	/* Before it has said who it is. */
	fd = connect_raw();
	send_raw(fd, WIRE_LOOK, 0, "s1", "n", NULL, 0, 0);
	ck_assert(is_closed(fd));
	fd = connect_raw();
	send_raw(fd, WIRE_HELLO, 2, "", "", raw, 5, 5);
	ck_assert(is_closed(fd));
	/* Names that are none, and kinds of frames that only rank 0 sends. */
	fd = join_raw(2);
	send_raw(fd, WIRE_LOOK, 0, "s1", "../n", NULL, 0, 0);
	ck_assert(is_closed(fd));
	fd = join_raw(3);
	send_raw(fd, WIRE_GONE, 1, "s1", "n", NULL, 0, 0);
	ck_assert(is_closed(fd));
	fd = join_raw(4);
	send_raw(fd, WIRE_COLLECT, 0, "s1", "n", raw, 1 << 20, 10);
	ck_assert(is_closed(fd));
	/* Too long a body. */
	fd = join_raw(5);
	raw[0] = WIRE_POST;
	raw[1] = raw[2] = 1;
	base_put_le(raw + 12, GATHER_MAX_NOTE_BYTES + 1, 4);
	raw[16] = raw[17] = 'a';
	ck_assert_int_eq(send(fd, raw, 18, MSG_NOSIGNAL), 18);
	ck_assert(is_closed(fd));
	for (int i = 0; i < 200; i++) {
		fd = connect_raw();
		for (size_t k = 0; k < sizeof(raw); k++) {
			random = random * 6364136223846793005u + 1442695040888963407u;
			raw[k] = (uint8_t)(random >> 33);
		}
		raw[0] %= 10;
		send(fd, raw, sizeof(raw), MSG_NOSIGNAL);
		close(fd);
	}
	board_case_post(&boards, of[1], "s1", "n", "x", 1);
	board_case_expect(&boards, of[0], "s1", "n", "x", 1);
	ck_assert(!boards.ops->is_gone(of[0], 1));
	close_all();
}
END_TEST

/* As rank 0: takes somebody in, and answers what he asks first with this. */
struct liar {
	int fd;
	uint8_t type;
	uint8_t scope_bytes;
	uint32_t number;
};

static void *lie(void *opaque)
{
	const struct liar *liar = opaque;
	uint8_t frame[WIRE_HEAD_BYTES] = { WIRE_DONE }, request[256];
	const int fd = accept(liar->fd, NULL, NULL);

	REQUIRE(recv(fd, request, WIRE_HEAD_BYTES + 4, MSG_WAITALL) == WIRE_HEAD_BYTES + 4);
	memcpy(frame + 4, request + 4, 4);
	REQUIRE(send(fd, frame, sizeof(frame), MSG_NOSIGNAL) == sizeof(frame));
	REQUIRE(recv(fd, request, sizeof(request), 0) > 0);
	frame[0] = liar->type;
	frame[1] = liar->scope_bytes;
	memcpy(frame + 4, request + 4, 4);
	base_put_le(frame + 8, liar->number, 4);
	REQUIRE(send(fd, frame, sizeof(frame), MSG_NOSIGNAL) == sizeof(frame));
	/* It stays. */
	recv(fd, request, 1, 0);
	close(fd);
	return NULL;
}

START_TEST(test_a_rank_0_that_makes_no_sense_has_not_ended)
{
	static const struct liar liars[] = { { 0, WIRE_DONE, 255, 0 },
					     { 0, WIRE_DONE, 0, 4711 },
					     { 0, 99, 0, 0 } };
	struct sockets_address address;

	sockets_name(&address, boards.name);
	for (size_t i = 0; i < ARRAY_LENGTH(liars); i++) {
		struct liar liar = liars[i];
		struct base_error error = { 0 };
		struct base_buffer note = { 0 };
		pthread_t thread;

		liar.fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
		ck_assert(!bind(liar.fd, (struct sockaddr *)&address.un, address.bytes));
		ck_assert(!listen(liar.fd, 1));
		ck_assert(!pthread_create(&thread, NULL, lie, &liar));
		of[1] = board_case_open(&boards, 1);
		ck_assert_int_eq(boards.ops->post(of[1], "s1", "n", "x", 1, &error), -EPROTO);
		ck_assert_ptr_nonnull(strstr(error.text, "rank 0"));
		ck_assert_ptr_nonnull(strstr(error.text, "cannot be understood"));
		ck_assert_ptr_null(strstr(error.text, "ended"));
		ck_assert(!boards.ops->is_gone(of[1], 0));
		/* Where the next frame begins is not known any more. */
		if (liar.scope_bytes) {
			boards.ops->wait(of[1], 10);
			ck_assert_int_eq(boards.ops->look(of[1], "s1", "n", &note, NULL), -EPROTO);
			ck_assert(!boards.ops->is_gone(of[1], 0));
		}
		close_all();
		ck_assert(!pthread_join(thread, NULL));
		close(liar.fd);
	}
}
END_TEST

START_TEST(test_a_stopped_rank_0_is_away_and_comes_back)
{
	uint8_t *big = calloc(1, 10 * MIB);
	struct base_error error = { 0 };
	pid_t orphan, pid = start_process(0, &orphan);
	uint64_t began;

	open_ranks(1, 2);
	kill(pid, SIGSTOP);
	big[7] = 7;
	/* The second call has to finish what the first one began. */
	for (int i = 0; i < 2; i++) {
		began = base_now_ns();
		ck_assert_int_eq(boards.ops->post(of[1], "s1", "big", big, 10 * MIB, &error),
				 IOSHAPE_E_COORDINATOR);
		ck_assert_uint_ge(base_now_ns() - began, 1900000000);
		ck_assert_uint_lt(base_now_ns() - began, 4000000000);
	}
	ck_assert_ptr_nonnull(strstr(error.text, "stopped"));
	kill(pid, SIGCONT);
	board_case_post(&boards, of[1], "s1", "n", "x", 1);
	board_case_expect(&boards, of[2], "s1", "n", "x", 1);
	board_case_post(&boards, of[1], "s1", "big", big, 10 * MIB);
	board_case_expect(&boards, of[2], "s1", "big", big, 10 * MIB);
	kill_now(pid);
	kill(orphan, SIGKILL);
	free(big);
	close_all();
}
END_TEST

static void *close_now(void *board)
{
	boards.ops->close(board);
	return NULL;
}

START_TEST(test_what_was_told_can_be_read_while_rank_0_closes)
{
	struct base_buffer note = { 0 };

	for (int i = 0; i < 20; i++) {
		pthread_t thread;

		open_ranks(0, 1);
		ck_assert(!board_case_look(&boards, of[1], "s1", "verdict", &note));
		board_case_post(&boards, of[0], "s1", "verdict", "good", 4);
		ck_assert(!pthread_create(&thread, NULL, close_now, of[0]));
		board_case_expect(&boards, of[1], "s1", "verdict", "good", 4);
		wait_until_gone(of[1], 0);
		ck_assert(!pthread_join(thread, NULL));
		of[0] = NULL;
		close_all();
	}
	base_buffer_free(&note);
}
END_TEST

/* ---- Limits ---------------------------------------------------------------------------------- */

START_TEST(test_notes_have_a_limit_together)
{
	struct board_table table = { 0 };
	struct board_note *note;
	char name[32];
	int code, count = 0;

	/* Memory that nobody touches is none. */
	while ((note = board_note_new(&table, GATHER_MAX_NOTE_BYTES, &code))) {
		snprintf(name, sizeof(name), "n-%d", count++);
		ck_assert_int_eq(board_table_put(&table, "s1", name, note), 0);
	}
	ck_assert_int_eq(code, -ENOSPC);
	ck_assert_int_eq(count, 15);
	board_table_drop(&table, "s1");
	ck_assert_uint_eq(table.bytes, 0);
	/* Empty ones, too, cost something. */
	for (count = 0; count < 100000; count++) {
		snprintf(name, sizeof(name), "n-%d", count);
		note = board_note_new(&table, 0, &code);
		REQUIRE(note && !board_table_put(&table, "s1", name, note));
	}
	ck_assert_uint_gt(table.bytes, 100000 * sizeof(struct board_entry));
	ck_assert_ptr_nonnull(board_table_get(&table, "s1", "n-99999"));
	ck_assert_ptr_null(board_table_get(&table, "s1", "n-100000"));
	board_table_free(&table);
	ck_assert_uint_eq(table.bytes, 0);
}
END_TEST

static atomic_uint warnings;

static void count_warning(void *user, enum ioshape_log_level level, const char *line)
{
	(void)user;
	if (level == IOSHAPE_LOG_WARNING && strstr(line, "ulimit -n"))
		warnings++;
}

static pid_t try_in_child(const struct rlimit *limit, uint32_t rank, uint32_t deadline_ms,
			  int wanted)
{
	const pid_t pid = fork();
	struct base_error error = { 0 };
	void *board;
	int ret;

	if (pid)
		return pid;
	MUST(!setrlimit(RLIMIT_NOFILE, limit), "no descriptors");
	ret = board_case_try(&boards, rank, deadline_ms, &board, &error);
	MUST(ret == wanted, "%d instead of %d: %s", ret, wanted, error.text);
	if (ret)
		MUST(strstr(error.text, "ulimit"), "%s", error.text);
	else
		boards.ops->close(board);
	scratch_leave_child(0);
}

START_TEST(test_too_few_descriptors_are_told)
{
	struct gather_board_config config = { .name = boards.name,
					      .ranks = 8,
					      .log = { count_warning, NULL, IOSHAPE_LOG_WARNING } };
	struct rlimit before, none;
	int status;
	pid_t pid;

	/* There the connection is made, and ended again, before it is refused. */
	if (scratch_under_valgrind())
		return;
	ck_assert_int_eq(boards.ops->open(&of[0], &config, NULL), 0);
	ck_assert(!getrlimit(RLIMIT_NOFILE, &before));
	none = before;
	none.rlim_cur = 3;
	ck_assert(!setrlimit(RLIMIT_NOFILE, &none));
	pid = try_in_child(&before, 1, 1500, -ETIMEDOUT);
	ck_assert_int_eq(waitpid(pid, &status, 0), pid);
	ck_assert(!setrlimit(RLIMIT_NOFILE, &before));
	ck_assert_int_eq(status, 0);
	ck_assert_uint_eq(warnings, 1);
	pid = try_in_child(&before, 2, 5000, 0);
	ck_assert_int_eq(waitpid(pid, &status, 0), pid);
	ck_assert_int_eq(status, 0);
	close_all();
}
END_TEST

int main(void)
{
	Suite *suite = suite_create("boards_sockets");
	TCase *tests = tcase_create("sockets");

	tcase_add_checked_fixture(tests, setup, scratch_teardown);
	tcase_set_timeout(tests, 60);
	tcase_add_test(tests, test_all_see_that_a_rank_was_killed);
	tcase_add_test(tests, test_all_see_that_rank_0_was_killed);
	tcase_add_test(tests, test_rank_0_that_does_not_come_is_named);
	tcase_add_test(tests, test_another_group_of_the_same_name_is_waited_for);
	tcase_add_test(tests, test_who_stalls_stalls_nobody_else);
	tcase_add_test(tests, test_what_is_no_frame_ends_the_connection);
	tcase_add_test(tests, test_a_rank_0_that_makes_no_sense_has_not_ended);
	tcase_add_test(tests, test_a_stopped_rank_0_is_away_and_comes_back);
	tcase_add_test(tests, test_what_was_told_can_be_read_while_rank_0_closes);
	tcase_add_test(tests, test_notes_have_a_limit_together);
	tcase_add_test(tests, test_too_few_descriptors_are_told);
	suite_add_tcase(suite, tests);
	return check_main(suite);
}
