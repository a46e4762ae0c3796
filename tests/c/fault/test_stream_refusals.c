/* SPDX-License-Identifier: Apache-2.0 */
/* Streams between nodes whose sender gets no memory or no thread: both sides get the reason. */
#define _GNU_SOURCE
#include "group/group.h"
#include "support/check_main.h"
#include "support/stream_case.h"
#include "support/wires.h"

#include <ioshape/group.h>

#include <errno.h>
#include <string.h>
#include <unistd.h>

#define BLOCK (64 * KIB)
#define BLOCKS 4u
#define TIMEOUT_MS 20000u

static struct test_case tests = { .name = "refusals" };

static struct wires wires;

/* ---- Faults in this process ------------------------------------------------------------------ */

static bool no_memory, no_thread;

void *__real_base_map(size_t bytes);
void *__wrap_base_map(size_t bytes);
void *__wrap_base_map(size_t bytes)
{
	return no_memory ? NULL : __real_base_map(bytes);
}

int __real_base_start_thread(pthread_t *thread, void *(*run)(void *), void *argument);
int __wrap_base_start_thread(pthread_t *thread, void *(*run)(void *), void *argument);
int __wrap_base_start_thread(pthread_t *thread, void *(*run)(void *), void *argument)
{
	return no_thread ? -EAGAIN : __real_base_start_thread(thread, run, argument);
}

static const struct {
	bool *refused;
	int code; /* error of the sender */
	const char *says;
} refusals[] = {
	{ &no_memory, -ENOMEM, "send buffers" },
	{ &no_thread, -ENOMEM, "cannot start a thread to send to rank 0" },
};

/* ---- The sender, in a child ------------------------------------------------------------------ */

static const struct stream_plan next_plan = {
	.rank = 1, .seed = 3, .pieces = 5, .most_bytes = MIB
};

static struct stream_sender *send_with(const struct ioshape_comm *comm, uint32_t tag)
{
	struct stream_sender *sender;
	struct base_error error = { 0 };

	if (stream_sender_open_comm(&sender, comm, 0, tag, TIMEOUT_MS, &stream_patient, &error))
		stream_fail(error.text);
	return sender;
}

static void be_refused(const void *argument)
{
	const uintptr_t which = (uintptr_t)argument;
	const struct ioshape_comm *comm = wires_be(&wires, 1);
	struct stream_sender *sender = send_with(comm, 1);
	static const uint8_t bytes[BLOCK + 1];
	struct base_error error = { 0 };
	struct stream_memory memory;

	*refusals[which].refused = true;
	/* A block is sent when it is full and one more byte comes. */
	STREAM_MUST(stream_sender_put(sender, bytes, sizeof(bytes), &error) ==
		    refusals[which].code);
	STREAM_MUST(strstr(error.text, refusals[which].says));
	STREAM_MUST(stream_sender_end(sender, 0, NULL) == refusals[which].code);
	stream_sender_free(sender, error.text);
	*refusals[which].refused = false;
	stream_memory_open(&memory, 24 * MIB);
	sender = send_with(comm, 2);
	stream_send_plan(sender, &next_plan, &memory);
	stream_sender_free(sender, NULL);
	stream_memory_close(&memory);
	wires_cut(&wires);
}

/* ---- The receiver ---------------------------------------------------------------------------- */

static struct stream_receiver *receive_with(const struct ioshape_comm *comm, uint32_t tag)
{
	struct stream_receiver *receiver;
	struct base_error error = { 0 };

	ck_assert_int_eq(stream_receiver_open_comm(&receiver, comm, 1, tag, BLOCK, BLOCKS, NULL,
						   TIMEOUT_MS, &stream_patient, &error),
			 0);
	return receiver;
}

LOOP_TEST(tests, both_sides_hear_why_and_the_next_stream_is_well, 0,
	  2 * (int)ARRAY_LENGTH(refusals))
{
	const size_t which = (size_t)_i / 2;
	const struct ioshape_comm *comm;
	struct stream_receiver *receiver;
	struct stream_end end = { 0 };
	pid_t child;

	ck_assert(wires_lay(&wires, 2));
	wires.synchronous = _i % 2;
	child = stream_start(be_refused, (const void *)which);
	comm = wires_be(&wires, 0);
	receiver = receive_with(comm, 1);
	ck_assert_int_eq(stream_drain(receiver, &end), -ECANCELED);
	ck_assert_uint_eq(end.error.rank, 1);
	ck_assert_ptr_nonnull(strstr(end.error.text, refusals[which].says));
	stream_receiver_free(receiver);
	receiver = receive_with(comm, 2);
	stream_receive_plan(receiver, &next_plan);
	stream_receiver_free(receiver);
	wires_cut(&wires);
	stream_expect_well(child);
}

TEST(tests, a_receiver_without_memory_or_a_thread_is_none)
{
	const struct ioshape_comm *comm;
	struct stream_receiver *receiver;

	ck_assert(wires_lay(&wires, 2));
	comm = wires_be(&wires, 0);
	for (size_t i = 0; i < ARRAY_LENGTH(refusals); i++) {
		struct base_error error = { 0 };

		*refusals[i].refused = true;
		ck_assert_int_eq(stream_receiver_open_comm(&receiver, comm, 1, 1, BLOCK, BLOCKS,
							   NULL, TIMEOUT_MS, &stream_patient,
							   &error),
				 i ? -EAGAIN : -ENOMEM);
		*refusals[i].refused = false;
		ck_assert_ptr_null(receiver);
		ck_assert_int_ne(*error.text, 0);
	}
	wires_cut(&wires);
}
