/* SPDX-License-Identifier: Apache-2.0 */
/* What tests of streams share: bytes that know their place, processes, and random pieces. */
#ifndef TESTS_SUPPORT_STREAM_CASE_H
#define TESTS_SUPPORT_STREAM_CASE_H

#include "group/group.h"

/* Waits for anything, for two minutes in all (times stream_slowness()). */
extern const struct stream_wait stream_patient;

/* How many times slower than usual this may be: more than 1 under sanitizers and valgrind. */
unsigned stream_slowness(void);
/* How soon a death is found out: a second, but for those. */
uint64_t stream_soon_ns(void);

/* Ends this process, which may be a child of the test, with a sentence. */
void stream_fail(const char *sentence) __attribute__((noreturn));
#define STREAM_MUST(condition)                                                                     \
	do {                                                                                       \
		if (!(condition))                                                                  \
			stream_fail(#condition);                                                   \
	} while (0)

uint64_t stream_random(uint64_t seed);

/* The bytes of a stream from `at` on. */
void stream_fill(void *into, uint64_t at, size_t bytes, uint64_t seed);
bool stream_holds(const void *data, uint64_t at, size_t bytes, uint64_t seed);

/* Children. */
pid_t stream_start(void (*run)(const void *argument), const void *argument);
void stream_expect_well(pid_t child);
/* Until it has slept for a fifth of a second: it waits for somebody, however slow the machine is.
 */
void stream_await_sleep(pid_t child);
int stream_count_fds(void);

/* Memory to send from, all of it mapped. */
struct stream_memory {
	int fd;
	uint8_t *base;
	size_t bytes;
	size_t used; /* the rest has not been sent from in this round through it */
};
void stream_memory_open(struct stream_memory *memory, size_t bytes);
void stream_memory_close(struct stream_memory *memory);

/* Random pieces, the same for both sides. */
struct stream_plan {
	uint32_t rank;
	bool with_memory;
	uint64_t seed;
	unsigned pieces;
	uint64_t most_bytes; /* the first piece has so many, the others at most */
};
uint64_t stream_plan_bytes(const struct stream_plan *plan);
/* Puts all pieces and the end. */
void stream_send_plan(struct stream_sender *sender, const struct stream_plan *plan,
		      struct stream_memory *memory);
/* Receives to the end, and compares all bytes; returns how many. */
uint64_t stream_receive_all(struct stream_receiver *receiver, uint64_t seed);
/*
 * To the end, or until it fails: with its code. After so long the other side is killed (0: it is
 * not), which must be found out soon.
 */
struct stream_end {
	pid_t child;
	uint64_t life_ns;
	struct base_error error;
};
int stream_drain(struct stream_receiver *receiver, struct stream_end *end);
/* The same bytes again and again; also from `shared` (may be NULL). */
int stream_flood(struct stream_sender *sender, const struct stream_memory *shared,
		 struct stream_end *end);
/* The same with length and checksum. */
void stream_receive_plan(struct stream_receiver *receiver, const struct stream_plan *plan);

#endif
