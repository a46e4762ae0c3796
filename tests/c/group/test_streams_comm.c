/* SPDX-License-Identifier: Apache-2.0 */
/* Streams over the caller's send and receive functions, between two processes. */
#define _GNU_SOURCE
#include "group/stream.h"
#include "support/check_main.h"
#include "support/stream_case.h"
#include "support/wires.h"

#include <ioshape/group.h>

#include <errno.h>
#include <poll.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#define BLOCK (64 * KIB)
#define BLOCKS 4u
#define TIMEOUT_MS 20000u

static struct wires wires;
static const struct ioshape_comm *comm;

/* Forks rank 1, which sends; rank 0 is the test. */
static pid_t begin(bool synchronous, void (*run)(const void *), const void *argument)
{
	pid_t child;

	ck_assert(wires_lay(&wires, 2));
	wires.synchronous = synchronous;
	child = stream_start(run, argument);
	comm = wires_be(&wires, 0);
	return child;
}

static void finish(pid_t child)
{
	wires_cut(&wires);
	stream_expect_well(child);
}

static struct stream_sender *send_with(uint32_t tag)
{
	struct stream_sender *sender;
	struct base_error error = { 0 };

	if (stream_sender_open_comm(&sender, comm, 0, tag, TIMEOUT_MS, &stream_patient, &error))
		stream_fail(error.text);
	return sender;
}

static struct stream_receiver *receive_with(uint32_t tag)
{
	struct stream_receiver *receiver;
	struct base_error error = { 0 };

	if (stream_receiver_open_comm(&receiver, comm, 1, tag, BLOCK, BLOCKS, NULL, TIMEOUT_MS,
				      &stream_patient, &error))
		stream_fail(error.text);
	return receiver;
}

/* ---- Every byte arrives ---------------------------------------------------------------------- */

static void send_plans(const void *argument)
{
	const struct stream_plan *plan = argument;
	struct stream_memory memory;

	comm = wires_be(&wires, 1);
	stream_memory_open(&memory, 24 * MIB);
	for (uint32_t tag = 1; plan->rank; plan++, tag++) {
		struct stream_sender *sender = send_with(tag);

		stream_send_plan(sender, plan, &memory);
		stream_sender_free(sender, NULL);
	}
	stream_memory_close(&memory);
	wires_cut(&wires);
}

static struct test_case tests = { .name = "all" };

LOOP_TEST(tests, every_byte_comes_in_its_place, 0, 6)
{
	const uint64_t seed = 10 * (uint64_t)_i;
	const struct stream_plan plans[] = {
		{ .rank = 1, .seed = seed + 1, .pieces = 30, .most_bytes = 20 * MIB },
		{ .rank = 1, .seed = seed + 2 },
		{ .rank = 1, .seed = seed + 3, .pieces = 1, .most_bytes = 1 },
		{ .rank = 1, .seed = seed + 4, .pieces = 1, .most_bytes = BLOCK },
		{ .rank = 1, .seed = seed + 5, .pieces = 200, .most_bytes = BLOCK },
		{ .rank = 0 },
	};
	pid_t child = begin(_i % 2, send_plans, plans);

	for (uint32_t tag = 1; plans[tag - 1].rank; tag++) {
		struct stream_receiver *receiver = receive_with(tag);

		stream_receive_plan(receiver, &plans[tag - 1]);
		stream_receiver_free(receiver);
	}
	finish(child);
}

/* ---- Sending ahead, within bounds ------------------------------------------------------------ */

LOOP_TEST(tests, blocks_are_received_ahead_and_no_more_than_were_granted, 0, 2)
{
	const struct stream_plan plans[] = {
		{ .rank = 1, .seed = 5, .pieces = 1, .most_bytes = 3 * MIB },
		{ .rank = 0 },
	};
	pid_t child = begin(_i % 2, send_plans, plans);
	struct stream_receiver *receiver = receive_with(1);
	struct base_error error = { 0 };
	const void *data;
	uint64_t at, before;
	size_t bytes;

	ck_assert_int_eq(stream_receiver_next(receiver, &data, &bytes, &error), 0);
	ck_assert_uint_eq(bytes, BLOCK);
	/* Longer than a sender with a short limit would wait for a message. */
	usleep(2500000);
	before = __atomic_load_n(&wires.messages, __ATOMIC_RELAXED);
	/* Each block takes two messages. */
	ck_assert_uint_eq(before, 2 * BLOCKS);
	ck_assert(stream_holds(data, 0, bytes, 5));
	for (at = bytes; bytes; at += bytes) {
		ck_assert_int_eq(stream_receiver_next(receiver, &data, &bytes, &error), 0);
		ck_assert(stream_holds(data, at, bytes, 5));
	}
	ck_assert_uint_eq(at, 3 * MIB);
	stream_receiver_free(receiver);
	finish(child);
}

/* The sender's block that is being filled, in addition to the granted blocks. */
#define OWN_BLOCKS 1u

struct ahead {
	int told[2]; /* pipe on which the sender reports that it has put all bytes */
};

static void send_ahead(const void *argument)
{
	const struct ahead *ahead = argument;
	static uint8_t bytes[(BLOCKS + OWN_BLOCKS) * BLOCK];
	struct base_error error = { 0 };
	struct stream_sender *sender;

	comm = wires_be(&wires, 1);
	sender = send_with(1);
	stream_fill(bytes, 0, sizeof(bytes), 6);
	STREAM_MUST(!stream_sender_put(sender, bytes, sizeof(bytes), &error));
	STREAM_MUST(write(ahead->told[1], "", 1) == 1);
	memset(bytes, 0, sizeof(bytes)); /* they may change after the put */
	STREAM_MUST(!stream_sender_end(sender, 0, &error));
	stream_sender_free(sender, NULL);
	wires_cut(&wires);
}

/* The sender fills the next block while one is being sent. */
LOOP_TEST(tests, more_is_put_while_nobody_takes_it, 0, 2)
{
	struct base_error error = { 0 };
	struct stream_receiver *receiver;
	struct pollfd put = { .events = POLLIN };
	struct ahead ahead;
	const void *data;
	size_t bytes;
	uint64_t at;
	pid_t child;

	ck_assert_int_eq(pipe(ahead.told), 0);
	child = begin(_i, send_ahead, &ahead);
	receiver = receive_with(1);
	put.fd = ahead.told[0];
	ck_assert_int_eq(poll(&put, 1, (int)(60000 * stream_slowness())), 1);
	for (at = 0; at < (BLOCKS + OWN_BLOCKS) * BLOCK; at += bytes) {
		ck_assert_int_eq(stream_receiver_next(receiver, &data, &bytes, &error), 0);
		ck_assert(stream_holds(data, at, bytes, 6));
	}
	ck_assert_int_eq(stream_receiver_next(receiver, &data, &bytes, &error), 0);
	ck_assert_uint_eq(bytes, 0);
	stream_receiver_free(receiver);
	close(ahead.told[0]);
	close(ahead.told[1]);
	finish(child);
}

/* ---- Reported failures, and the next stream on the channel ----------------------------------- */

static const struct stream_plan next_plan = {
	.rank = 1, .seed = 77, .pieces = 10, .most_bytes = MIB
};

static void send_next(void)
{
	struct stream_sender *sender = send_with(9);
	struct stream_memory memory;

	stream_memory_open(&memory, 24 * MIB);
	stream_send_plan(sender, &next_plan, &memory);
	stream_memory_close(&memory);
	stream_sender_free(sender, NULL);
	wires_cut(&wires);
}

static void receive_next(pid_t child)
{
	struct stream_receiver *receiver = receive_with(9);

	stream_receive_plan(receiver, &next_plan);
	stream_receiver_free(receiver);
	finish(child);
}

#define BURNT "the tensor \"w\" could not be fetched"

static void fail_then_send(const void *argument)
{
	static const char bytes[3 * BLOCK + 77];
	struct base_error error = { 0 };
	struct stream_sender *sender;

	comm = wires_be(&wires, 1);
	sender = send_with(1);
	for (uintptr_t i = 0; i < (uintptr_t)argument; i++)
		if (stream_sender_put(sender, bytes, sizeof(bytes), &error))
			stream_fail(error.text);
	stream_sender_free(sender, BURNT);
	send_next();
}

LOOP_TEST(tests, a_sender_says_why_it_failed, 0, 4)
{
	pid_t child = begin(_i % 2, fail_then_send, (const void *)(uintptr_t)(_i * 5));
	struct stream_receiver *receiver = receive_with(1);
	struct stream_end end = { 0 };

	ck_assert_int_eq(stream_drain(receiver, &end), -ECANCELED);
	ck_assert_uint_eq(end.error.rank, 1);
	ck_assert_ptr_nonnull(strstr(end.error.text, BURNT));
	stream_receiver_free(receiver);
	receive_next(child);
}

static void send_until_stopped(const void *argument)
{
	struct stream_end end = { 0 };
	struct stream_sender *sender;

	(void)argument;
	comm = wires_be(&wires, 1);
	sender = send_with(1);
	STREAM_MUST(stream_flood(sender, NULL, &end) == -ECANCELED);
	STREAM_MUST(stream_sender_end(sender, 0, NULL) == -ECANCELED);
	stream_sender_free(sender, NULL);
	send_next();
}

LOOP_TEST(tests, a_receiver_stops_the_sender, 0, 4)
{
	pid_t child = begin(_i % 2, send_until_stopped, NULL);
	struct stream_receiver *receiver = receive_with(1);
	struct base_error error = { 0 };
	const void *data;
	size_t bytes;

	for (int i = 0; i < _i; i++)
		ck_assert_int_eq(stream_receiver_next(receiver, &data, &bytes, &error), 0);
	stream_receiver_free(receiver);
	receive_next(child);
}

static int no_patience(void *user, struct base_error *error)
{
	unsigned *asked = user;

	return ++*asked < 3 ? 0 : base_fail(error, -ETIMEDOUT, "the checkpoint was given up");
}

static void end_and_give_up(const void *argument)
{
	unsigned asked = 0;
	const struct stream_wait wait = { no_patience, &asked };
	struct stream_sender *sender;
	struct base_error error = { 0 };

	(void)argument;
	comm = wires_be(&wires, 1);
	STREAM_MUST(!stream_sender_open_comm(&sender, comm, 0, 1, TIMEOUT_MS, &wait, &error));
	STREAM_MUST(!stream_sender_put(sender, "bytes", 5, &error));
	STREAM_MUST(stream_sender_end(sender, 0, &error) == -ETIMEDOUT);
	stream_sender_free(sender, error.text);
	send_next();
}

/* The receiver is slow with the last block, and the sender gives up before the acknowledgement. */
LOOP_TEST(tests, giving_up_after_the_end_leaves_nothing_behind, 0, 2)
{
	pid_t child = begin(_i % 2, end_and_give_up, NULL);
	struct stream_receiver *receiver = receive_with(1);
	struct base_error error = { 0 };
	const void *data;
	size_t bytes;

	ck_assert_int_eq(stream_receiver_next(receiver, &data, &bytes, &error), 0);
	ck_assert_uint_eq(bytes, 5);
	usleep(3500000);
	ck_assert_int_eq(stream_receiver_next(receiver, &data, &bytes, &error), 0);
	ck_assert_uint_eq(bytes, 0);
	stream_receiver_free(receiver);
	receive_next(child);
}

/* ---- Deaths ---------------------------------------------------------------------------------- */

static void send_for_ever(const void *argument)
{
	struct stream_end end = { 0 };

	(void)argument;
	comm = wires_be(&wires, 1);
	stream_flood(send_with(1), NULL, &end);
}

LOOP_TEST(tests, a_killed_sender_is_named, 0, 8)
{
	struct stream_end end = {
		.child = begin(_i % 2, send_for_ever, NULL),
		.life_ns = 1 + base_ms_to_ns(stream_random((uint64_t)_i) % 50),
	};
	struct stream_receiver *receiver = receive_with(1);

	ck_assert_int_eq(stream_drain(receiver, &end), -ECONNRESET);
	ck_assert_uint_eq(end.error.rank, 1);
	stream_receiver_free(receiver);
	wires_cut(&wires);
}

static void receive_for_ever(const void *argument)
{
	struct stream_end end = { 0 };

	(void)argument;
	comm = wires_be(&wires, 0);
	stream_drain(receive_with(1), &end);
}

LOOP_TEST(tests, a_killed_receiver_is_found_out, 0, 8)
{
	struct stream_end end = {
		.life_ns = 1 + base_ms_to_ns(stream_random((uint64_t)_i) % 50),
	};
	struct stream_sender *sender;

	ck_assert(wires_lay(&wires, 2));
	wires.synchronous = _i % 2;
	end.child = stream_start(receive_for_ever, NULL);
	comm = wires_be(&wires, 1);
	sender = send_with(1);
	ck_assert_int_lt(stream_flood(sender, NULL, &end), 0);
	stream_sender_free(sender, NULL);
	wires_cut(&wires);
}

/* ---- Invalid messages ------------------------------------------------------------------------ */

static const struct {
	uint32_t kind;
	uint64_t bytes;
	bool other_format;
} lies[] = {
	{ STREAM_BYTES, 0, false },
	{ STREAM_BYTES, BLOCK + 1, false },
	{ STREAM_BYTES, UINT64_MAX, false },
	{ STREAM_SHARED, 1, false },
	{ STREAM_FAIL, STREAM_TEXT_BYTES, false },
	{ STREAM_CREDIT, 1, false },
	{ 4711, 1, false },
	{ STREAM_END, 1, false },
	{ STREAM_END, 0, true },
};

static void lie(const void *argument)
{
	const uintptr_t which = (uintptr_t)argument;
	const struct stream_frame told = { .kind = lies[which].kind, .bytes = lies[which].bytes };
	uint8_t head[STREAM_FRAME_BYTES];
	struct stream_frame credit;

	comm = wires_be(&wires, 1);
	STREAM_MUST(!comm->receive(comm->user, 0, 1, head, sizeof(head), TIMEOUT_MS));
	STREAM_MUST(stream_read_frame(&credit, head));
	STREAM_MUST(credit.kind == STREAM_CREDIT && credit.bytes == BLOCKS * BLOCK &&
		    credit.block == BLOCK);
	stream_write_frame(head, &told);
	head[3] += lies[which].other_format;
	STREAM_MUST(!comm->send(comm->user, 0, 1, head, sizeof(head), TIMEOUT_MS));
}

LOOP_TEST(tests, a_lie_is_refused, 0, (int)ARRAY_LENGTH(lies))
{
	pid_t child = begin(false, lie, (const void *)(uintptr_t)_i);
	struct stream_receiver *receiver = receive_with(1);
	struct base_error error = { 0 };
	const void *data;
	size_t bytes;

	ck_assert_int_eq(stream_receiver_next(receiver, &data, &bytes, &error), -EPROTO);
	ck_assert_uint_eq(error.rank, 1);
	stream_receiver_free(receiver);
	finish(child);
}

/* ---- Functions that violate their contract --------------------------------------------------- */

static int calls_of_functions;

static int send_oddly(void *user, uint32_t to, uint32_t tag, const void *data, size_t bytes,
		      uint32_t timeout_ms)
{
	(void)user;
	(void)to;
	(void)tag;
	(void)data;
	(void)bytes;
	(void)timeout_ms;
	calls_of_functions++;
	return 7;
}

static int receive_oddly(void *user, uint32_t from, uint32_t tag, void *into, size_t bytes,
			 uint32_t timeout_ms)
{
	return send_oddly(user, from, tag, into, bytes, timeout_ms);
}

TEST(tests, after_a_function_has_failed_none_is_called)
{
	const struct ioshape_comm odd = { .size = sizeof(odd),
					  .send = send_oddly,
					  .receive = receive_oddly };
	struct base_error error = { 0 };
	struct stream_receiver *receiver;
	struct stream_sender *sender;
	const void *data;
	size_t bytes;

	/* A positive result counts as a failure, too. */
	ck_assert_int_eq(
		stream_sender_open_comm(&sender, &odd, 3, 1, TIMEOUT_MS, &stream_patient, &error),
		0);
	ck_assert_int_eq(stream_sender_put(sender, "x", 1, &error), -EIO);
	ck_assert_int_eq(stream_sender_put(sender, "x", 1, NULL), -EIO);
	stream_sender_free(sender, "it failed");
	ck_assert_int_eq(calls_of_functions, 1);
	ck_assert_int_eq(stream_receiver_open_comm(&receiver, &odd, 3, 1, BLOCK, BLOCKS, NULL,
						   TIMEOUT_MS, &stream_patient, NULL),
			 0);
	ck_assert_int_eq(stream_receiver_next(receiver, &data, &bytes, NULL), -EIO);
	stream_receiver_free(receiver);
	ck_assert_int_eq(calls_of_functions, 2);
}
