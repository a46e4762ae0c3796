/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Streams between two processes of a host: every byte arrives, memory is bounded, and no process
 * waits for a dead one.
 */
#define _GNU_SOURCE
#include "support/local_stream_case.h"
#include "support/scratch.h"

#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

/* ---- Every byte arrives ---------------------------------------------------------------------- */

static struct test_case tests = { .name = "all", .setup = begin, .teardown = end };

LOOP_TEST(tests, every_byte_comes_in_its_place, 0, 9)
{
	struct stream_plan plan = {
		.rank = RANK,
		.seed = (uint64_t)_i * 7919 + 1,
		/* The last plan is an empty stream. */
		.pieces = _i == 8 ? 0 : 40,
		.most_bytes = _i ? MIB : 40 * MIB,
		.with_memory = _i % 2 == 0,
	};
	struct stream_listener *listener = listen_here();
	struct stream_receiver *receiver;
	pid_t child = stream_start(send_random, &plan);

	receiver = receive_from(listener, RANK);
	stream_receive_plan(receiver, &plan);
	stream_receiver_free(receiver);
	stream_listener_close(listener);
	stream_expect_well(child);
}

#define MANY 64u

TEST(tests, many_ranks_come_in_any_order)
{
	struct stream_listener *listener = listen_here();
	struct stream_plan plan = { .pieces = 6, .most_bytes = 256 * KIB, .with_memory = true };
	pid_t children[MANY];

	for (uint32_t i = 0; i < MANY; i++) {
		plan.rank = i;
		plan.seed = i + 1;
		children[i] = stream_start(send_random, &plan);
	}
	for (uint32_t i = 0; i < MANY; i++) {
		struct stream_receiver *receiver;

		plan.rank = (i * 37 + 5) % MANY;
		plan.seed = plan.rank + 1;
		receiver = receive_from(listener, plan.rank);
		stream_receive_plan(receiver, &plan);
		stream_receiver_free(receiver);
	}
	for (uint32_t i = 0; i < MANY; i++)
		stream_expect_well(children[i]);
	stream_listener_close(listener);
}

/* Sends from memory that grows after the reader has mapped it. */
static void send_growing(const void *argument)
{
	struct stream_sender *sender;
	struct base_error error = { 0 };
	int fd = base_shared_open();

	(void)argument;
	STREAM_MUST(fd >= 0);
	sender = send_as(RANK, fd);
	for (unsigned i = 0; i < 4; i++) {
		void *memory;

		STREAM_MUST(!base_shared_grow(fd, (i + 1) * MIB));
		STREAM_MUST(!base_shared_map(fd, i * MIB, MIB, &memory));
		stream_fill(memory, i * MIB, MIB, 3);
		if (stream_sender_put_shared(sender, memory, i * MIB, MIB,
					     base_crc32(0, memory, MIB), &error))
			stream_fail(error.text);
		if (stream_sender_await_taken(sender, stream_sender_offset(sender), &error))
			stream_fail(error.text);
		STREAM_MUST(sender->taken == stream_sender_offset(sender));
		/* The receiver no longer reads the memory. */
		memset(memory, 0xee, MIB);
		base_unmap(memory, MIB);
	}
	if (stream_sender_end(sender, 0, &error))
		stream_fail(error.text);
	stream_sender_free(sender, NULL);
	base_close(fd);
}

TEST(tests, memory_may_grow)
{
	struct stream_listener *listener = listen_here();
	struct stream_receiver *receiver;
	pid_t child = stream_start(send_growing, NULL);

	receiver = receive_from(listener, RANK);
	ck_assert_uint_eq(stream_receive_all(receiver, 3), 4 * MIB);
	stream_receiver_free(receiver);
	stream_listener_close(listener);
	stream_expect_well(child);
}

/* ---- Bytes that the receiver holds ----------------------------------------------------------- */

/*
 * Checks that the last piece is unchanged: the sender may not overwrite it before it is released.
 */
static void must_be_held(const struct stream_receiver *receiver, pid_t child, const void *data,
			 uint64_t at, size_t bytes)
{
	uint32_t crc32;

	ck_assert(stream_receiver_lasts(receiver));
	ck_assert(stream_receiver_summed(receiver, &crc32));
	ck_assert_uint_eq(crc32, base_crc32(0, data, bytes));
	/* The sender sleeps, so it has not been told that it may reuse the memory. */
	stream_await_sleep(child);
	ck_assert(stream_holds(data, at, bytes, 3));
}

/* The sender's memory grows, so the receiver maps it again while it holds a piece. */
TEST(tests, what_is_held_is_not_taken_before_it_is_released)
{
	struct stream_listener *listener = listen_here();
	struct stream_receiver *receiver;
	struct base_error error = { 0 };
	pid_t child = stream_start(send_growing, NULL);
	const void *data, *none;
	uint64_t at = 0;
	size_t bytes, nothing;

	receiver = receive_from(listener, RANK);
	stream_receiver_hold(receiver);
	for (;; at += bytes) {
		ck_assert_msg(!stream_receiver_next(receiver, &data, &bytes, &error), "%s",
			      error.text);
		if (!bytes)
			break;
		must_be_held(receiver, child, data, at, bytes);
		ck_assert_int_eq(stream_receiver_next(receiver, &none, &nothing, &error), -EAGAIN);
		ck_assert_int_eq(error.code, 0);
		/* Asking for more must not release the piece. */
		stream_await_sleep(child);
		ck_assert(stream_holds(data, at, bytes, 3));
		stream_receiver_release(receiver, at + bytes);
	}
	ck_assert_uint_eq(at, 4 * MIB);
	stream_receiver_free(receiver);
	stream_listener_close(listener);
	stream_expect_well(child);
}

/* Sends pieces and waits only for the end, after which all memory belongs to the sender again. */
static void send_and_change(const void *argument)
{
	struct stream_memory memory;
	struct stream_sender *sender;
	struct base_error error = { 0 };

	(void)argument;
	stream_memory_open(&memory, 3 * MIB);
	sender = send_as(RANK, memory.fd);
	stream_fill(memory.base, 0, memory.bytes, 3);
	for (uint64_t at = 0; at < memory.bytes; at += MIB)
		if (stream_sender_put_shared(sender, memory.base + at, at, MIB,
					     base_crc32(0, memory.base + at, MIB), &error))
			stream_fail(error.text);
	/* A small piece is sent inside the message. */
	if (stream_sender_put(sender, "abc", 3, &error) || stream_sender_end(sender, 0, &error))
		stream_fail(error.text);
	memset(memory.base, 0xee, memory.bytes);
	stream_sender_free(sender, NULL);
	stream_memory_close(&memory);
}

TEST(tests, the_end_waits_until_all_is_released)
{
	struct stream_listener *listener = listen_here();
	struct stream_receiver *receiver;
	struct base_error error = { 0 };
	pid_t child = stream_start(send_and_change, NULL);
	const void *data[3], *last;
	size_t bytes;

	receiver = receive_from(listener, RANK);
	stream_receiver_hold(receiver);
	for (unsigned i = 0; i < 3; i++) {
		int ret;

		while ((ret = stream_receiver_next(receiver, &data[i], &bytes, &error)) == -EAGAIN)
			usleep(1000);
		ck_assert_msg(!ret && bytes == MIB, "%s", error.text);
	}
	while (stream_receiver_next(receiver, &last, &bytes, &error) == -EAGAIN)
		usleep(1000);
	ck_assert_uint_eq(bytes, 3);
	ck_assert(!stream_receiver_lasts(receiver));
	ck_assert_int_eq(stream_receiver_next(receiver, &last, &bytes, &error), -EAGAIN);
	stream_receiver_release(receiver, 2 * MIB);
	ck_assert_int_eq(stream_receiver_next(receiver, &last, &bytes, &error), -EAGAIN);
	stream_await_sleep(child);
	for (unsigned i = 0; i < 3; i++)
		ck_assert(stream_holds(data[i], i * MIB, MIB, 3));
	stream_receiver_release(receiver, 3 * MIB + 3);
	ck_assert_int_eq(stream_receiver_next(receiver, &last, &bytes, &error), 0);
	ck_assert_uint_eq(bytes, 0);
	stream_receiver_free(receiver);
	stream_listener_close(listener);
	stream_expect_well(child);
}

/* ---- Mistakes of the sender ------------------------------------------------------------------ */

static void receive_to_the_end(const void *whole)
{
	struct stream_listener *listener = listen_here();
	struct stream_receiver *receiver = receive_from(listener, RANK);
	struct stream_end ending = { 0 };

	STREAM_MUST(!stream_drain(receiver, &ending) == *(const bool *)whole);
	stream_receiver_free(receiver);
	stream_listener_close(listener);
}

LOOP_TEST(tests, what_was_put_and_ended_is_all, 0, 4)
{
	const bool whole = _i != 2;
	pid_t child = stream_start(receive_to_the_end, &whole);
	struct stream_sender *sender = send_as(RANK, -1);
	struct base_error error = { 0 }, again = { 0 };
	uint8_t data[100];

	stream_fill(data, 0, sizeof(data), 1);
	ck_assert_int_eq(stream_sender_put(sender, data, 0, &error), 0);
	ck_assert_int_eq(stream_sender_put(sender, data, sizeof(data), &error), 0);
	if (_i == 2)
		ck_assert_int_eq(stream_sender_await_taken(sender, 101, &error), -EINVAL);
	else
		ck_assert_int_eq(stream_sender_end(sender, 0, &error), 0);
	if (_i == 0)
		ck_assert_int_eq(stream_sender_put(sender, data, 1, &error), -EINVAL);
	if (_i == 1)
		ck_assert_int_eq(stream_sender_put_shared(sender, data, 0, 1, 0, &error), -EINVAL);
	if (_i == 3) {
		ck_assert_int_eq(stream_sender_end(sender, 0, &error), 0);
		ck_assert_int_eq(stream_sender_await_taken(sender, 100, &error), 0);
		ck_assert_int_eq(stream_sender_put(sender, data, 0, NULL), -EINVAL);
	} else {
		/* Later calls return the first failure. */
		ck_assert_int_eq(stream_sender_end(sender, 0, &again), -EINVAL);
		ck_assert_int_eq(stream_sender_put_shared(sender, data, 0, 0, 0, NULL), -EINVAL);
		ck_assert_str_eq(again.text, error.text);
	}
	stream_sender_free(sender, "a mistake");
	stream_expect_well(child);
}

/* ---- Bounds ---------------------------------------------------------------------------------- */

/* Pipe: the receiver starts when it has read a byte. */
static int starter[2];

static void receive_later(const void *argument)
{
	struct stream_listener *listener = listen_here();
	struct stream_receiver *receiver = receive_from(listener, RANK);
	char byte;

	(void)argument;
	STREAM_MUST(read(starter[0], &byte, 1) == 1);
	stream_receive_all(receiver, 5);
	stream_receiver_free(receiver);
	stream_listener_close(listener);
}

static struct {
	struct stream_sender *sender;
	uint64_t offset; /* limit of the sender's offset while the receiver takes nothing */
	unsigned asked;
} held;

static int look_while_held(void *user, struct base_error *error)
{
	(void)user;
	(void)error;
	if (!held.sender)
		return 0;
	if (++held.asked == 5) {
		ck_assert_uint_eq(held.sender->taken, 0);
		ck_assert_uint_eq(stream_sender_offset(held.sender), held.offset);
		ck_assert_int_eq(write(starter[1], "", 1), 1);
	}
	return held.asked < 300 ? 0 : -ETIMEDOUT;
}

LOOP_TEST(tests, a_slow_receiver_holds_the_sender, 0, 2)
{
	const struct stream_wait wait = { look_while_held, NULL };
	const bool with_memory = _i == 0;
	struct stream_memory memory;
	struct base_error error = { 0 };
	pid_t child;

	ck_assert_int_eq(pipe(starter), 0);
	child = stream_start(receive_later, NULL);
	stream_memory_open(&memory, 96 * MIB);
	held.sender = NULL;
	/* Without shared memory only what a socket holds of the first 8 MiB has been sent. */
	held.offset = with_memory ? 64 * MIB : 0;
	ck_assert_msg(!stream_sender_open_local(&held.sender, address, RANK,
						with_memory ? memory.fd : -1, &wait, &error),
		      "%s", error.text);
	/* The 8 MiB are sent repeatedly, at offsets of the stream that are multiples of 8 MiB. */
	for (unsigned i = 0; i < 24; i++) {
		const uint64_t at = stream_sender_offset(held.sender);

		if (!with_memory) {
			stream_fill(memory.base, at, 8 * MIB, 5);
			ck_assert_int_eq(
				stream_sender_put(held.sender, memory.base, 8 * MIB, &error), 0);
			continue;
		}
		if (at < memory.bytes)
			stream_fill(memory.base + at, at, 8 * MIB, 5);
		else
			break;
		ck_assert_msg(!stream_sender_put_shared(held.sender, memory.base + at, at, 8 * MIB,
							0, &error),
			      "%s", error.text);
	}
	ck_assert_msg(!stream_sender_end(held.sender, 0, &error), "%s", error.text);
	ck_assert_uint_ge(held.asked, 5);
	ck_assert_uint_eq(held.sender->taken, stream_sender_offset(held.sender));
	stream_sender_free(held.sender, NULL);
	stream_memory_close(&memory);
	stream_expect_well(child);
	close(starter[0]);
	close(starter[1]);
}

/* ---- Deaths ---------------------------------------------------------------------------------- */

/* Forks a child that keeps the socket open, as workers of a training job may. */
static void leave_an_heir(void)
{
	if (fork())
		return;
	sleep(3);
	scratch_leave_child(0);
}

static void send_for_ever(const void *argument)
{
	const bool with_heir = argument;
	struct stream_end end = { 0 };
	struct stream_memory memory;
	struct stream_sender *sender;

	stream_memory_open(&memory, 4 * MIB);
	sender = send_as(RANK, memory.fd);
	if (with_heir)
		leave_an_heir();
	stream_flood(sender, &memory, &end);
}

/* Starts the i-th process to be killed. Every fourth has a child that keeps the socket open. */
static struct stream_end start_to_be_killed(int i, void (*run)(const void *with_heir))
{
	return (struct stream_end){
		.child = stream_start(run, i % 4 == 3 ? "" : NULL),
		.life_ns = 1 + base_ms_to_ns(stream_random((uint64_t)i) % 60),
	};
}

LOOP_TEST(tests, a_killed_sender_is_named, 0, 12)
{
	struct stream_listener *listener = listen_here();
	struct stream_end end = start_to_be_killed(_i, send_for_ever);
	struct stream_receiver *receiver = receive_from(listener, RANK);

	ck_assert_int_eq(stream_drain(receiver, &end), -ECONNRESET);
	ck_assert_uint_eq(end.error.rank, RANK);
	stream_receiver_free(receiver);
	stream_listener_close(listener);
}

static void receive_for_ever(const void *argument)
{
	struct stream_listener *listener = listen_here();
	struct stream_receiver *receiver = receive_from(listener, RANK);
	struct stream_end end = { 0 };

	if (argument)
		leave_an_heir();
	stream_drain(receiver, &end);
}

LOOP_TEST(tests, a_killed_receiver_is_found_out, 0, 12)
{
	struct stream_end end = start_to_be_killed(_i, receive_for_ever);
	struct stream_memory memory;
	struct stream_sender *sender;

	stream_memory_open(&memory, 4 * MIB);
	sender = send_as(RANK, memory.fd);
	ck_assert_int_eq(stream_flood(sender, &memory, &end), -ECONNRESET);
	/* Later calls return this failure, too. */
	ck_assert_int_eq(stream_sender_end(sender, 0, NULL), -ECONNRESET);
	stream_sender_free(sender, NULL);
	stream_memory_close(&memory);
}

/* ---- Failures that are reported to the other side -------------------------------------------- */

#define BURNT "the tensor \"w\" could not be fetched"

static void send_and_fail(const void *argument)
{
	static const char bytes[100000];
	struct stream_sender *sender = send_as(RANK, -1);
	struct base_error error = { 0 };

	for (uintptr_t i = 0; i < (uintptr_t)argument; i++)
		if (stream_sender_put(sender, bytes, sizeof(bytes), &error))
			stream_fail(error.text);
	stream_sender_free(sender, BURNT);
}

LOOP_TEST(tests, a_sender_says_why_it_failed, 0, 3)
{
	struct stream_listener *listener = listen_here();
	struct stream_receiver *receiver;
	struct stream_end end = { 0 };
	pid_t child = stream_start(send_and_fail, (const void *)(uintptr_t)(_i * 100));

	receiver = receive_from(listener, RANK);
	ck_assert_int_eq(stream_drain(receiver, &end), -ECANCELED);
	ck_assert_uint_eq(end.error.rank, RANK);
	ck_assert_ptr_nonnull(strstr(end.error.text, BURNT));
	stream_receiver_free(receiver);
	stream_listener_close(listener);
	stream_expect_well(child);
}

static void receive_and_stop(const void *argument)
{
	struct stream_listener *listener = listen_here();
	struct stream_receiver *receiver = receive_from(listener, RANK);
	struct base_error error = { 0 };
	const void *data;
	size_t bytes;

	(void)argument;
	if (stream_receiver_next(receiver, &data, &bytes, &error))
		stream_fail(error.text);
	stream_receiver_free(receiver);
	stream_listener_close(listener);
}

TEST(tests, a_receiver_stops_the_sender)
{
	pid_t child = stream_start(receive_and_stop, NULL);
	struct stream_sender *sender = send_as(RANK, -1);
	struct stream_end end = { 0 };

	ck_assert_int_eq(stream_flood(sender, NULL, &end), -ECANCELED);
	stream_sender_free(sender, NULL);
	stream_expect_well(child);
}

static int because_of_a_rank(void *user, struct base_error *error)
{
	(void)user;
	base_fail_reason(error, -ETIMEDOUT, "a rank ended");
	base_error_of_rank(error, RANK + 1);
	return -ETIMEDOUT;
}

TEST(tests, a_writer_that_never_listens_is_explained)
{
	const struct stream_wait wait = { because_of_a_rank, NULL };
	struct stream_sender *sender;
	struct base_error error = { 0 };

	ck_assert_int_eq(stream_sender_open_local(&sender, address, RANK, -1, &wait, &error),
			 -ETIMEDOUT);
	ck_assert_ptr_null(sender);
	ck_assert_int_eq(error.code, -ETIMEDOUT);
	ck_assert_int_eq(error.rank, RANK + 1);
}

/*
 * Listens and dies. The name of its socket remains until the next writer of this user removes it,
 * which may be that of another test.
 */
static void listen_and_die(const void *socket)
{
	listen_here();
	ck_assert(!access(((const struct sockaddr_un *)socket)->sun_path, F_OK));
	kill(getpid(), SIGKILL);
}

TEST(tests, a_killed_writer_leaves_no_socket)
{
	struct stream_listener *listener;
	const struct sockaddr_un dead = find_socket();
	int status;
	pid_t child;

	child = stream_start(listen_and_die, &dead);
	ck_assert_int_eq(waitpid(child, &status, 0), child);
	ck_assert(WIFSIGNALED(status));
	strcat(address, "-next");
	listener = listen_here();
	ck_assert(access(dead.sun_path, F_OK));
	stream_listener_close(listener);
}

TEST(tests, a_rank_that_never_comes_ends_when_the_caller_says_so)
{
	const struct stream_wait wait = { not_at_all, NULL };
	struct stream_listener *listener = listen_here();
	struct stream_receiver *receiver;
	struct base_error error = { 0 };

	ck_assert_int_eq(stream_receiver_open_local(&receiver, listener, RANK, &wait, &error),
			 -ETIMEDOUT);
	ck_assert_ptr_null(receiver);
	stream_listener_close(listener);
}
