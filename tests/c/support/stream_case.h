/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Helpers for tests of streams: bytes that depend on their offset, child processes, and random
 * pieces.
 */
#ifndef TESTS_SUPPORT_STREAM_CASE_H
#define TESTS_SUPPORT_STREAM_CASE_H

#include "group/group.h"

/* Waits for any event, for two minutes in all (times stream_slowness()). */
extern const struct stream_wait stream_patient;

/*
 * Returns how many times slower than usual this build may be: more than 1 under sanitizers and
 * valgrind.
 */
unsigned stream_slowness(void);

/* Prints the sentence and ends this process, which may be a child of the test. */
void stream_fail(const char *sentence) __attribute__((noreturn));
#define STREAM_MUST(condition)                                                                     \
	do {                                                                                       \
		if (!(condition))                                                                  \
			stream_fail(#condition);                                                   \
	} while (0)

uint64_t stream_random(uint64_t seed);

/* Fill and check the bytes of a stream from offset `at` on. */
void stream_fill(void *into, uint64_t at, size_t bytes, uint64_t seed);
bool stream_holds(const void *data, uint64_t at, size_t bytes, uint64_t seed);

/* Child processes. */
pid_t stream_start(void (*run)(const void *argument), const void *argument);
void stream_expect_well(pid_t child);
/*
 * Waits until the child has slept for 200 ms: then it waits for another process, however slow the
 * machine is.
 */
void stream_await_sleep(pid_t child);
int stream_count_fds(void);

/* Shared memory to send from, mapped as a whole. */
struct stream_memory {
	int fd;
	uint8_t *base;
	size_t bytes;
	size_t used; /* bytes that were used in this pass through the memory */
};
void stream_memory_open(struct stream_memory *memory, size_t bytes);
void stream_memory_close(struct stream_memory *memory);

/* Random pieces. Sender and receiver derive the same ones from the seed. */
struct stream_plan {
	uint32_t rank;
	bool with_memory;
	uint64_t seed;
	unsigned pieces;
	uint64_t most_bytes; /* size of the first piece, and limit of the others */
};
/* Sends all pieces and the end of the stream. */
void stream_send_plan(struct stream_sender *sender, const struct stream_plan *plan,
		      struct stream_memory *memory);
/* Receives to the end and compares all bytes. Returns how many there were. */
uint64_t stream_receive_all(struct stream_receiver *receiver, uint64_t seed);
/*
 * A peer to kill after `life_ns` (0: never) while a stream runs, and the error with which the
 * stream then fails. The failure must come soon after the kill.
 */
struct stream_end {
	pid_t child;
	uint64_t life_ns;
	struct base_error error;
};
int stream_drain(struct stream_receiver *receiver, struct stream_end *end);
/*
 * Sends the same bytes again and again until the stream fails; also from `shared` if that is not
 * NULL. Returns the code.
 */
int stream_flood(struct stream_sender *sender, const struct stream_memory *shared,
		 struct stream_end *end);
/*
 * Receives a stream like stream_receive_all(), and checks its length and checksum against the plan.
 */
void stream_receive_plan(struct stream_receiver *receiver, const struct stream_plan *plan);

#endif
