/* SPDX-License-Identifier: Apache-2.0 */
/* Measures the time from a release of a slot until the next holder runs. Two writers, each with its
 * own context, pass a slot to each other. */
#define _GNU_SOURCE
#include "bench.h"

#include <ioshape/slots.h>

#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define PAUSE_US                                                                                   \
	2000 /* minimum time for the other writer to block in its wait; up to twice as long at     \
		random */
#define WRITERS 2

struct relay {
	size_t count; /* handovers to measure */
	double *ms;
	atomic_size_t done;
	_Atomic uint64_t released_ns; /* 0 before the first release */
};

struct runner {
	pthread_t thread;
	struct relay *relay;
	struct runner *other;
	struct ioshape_context *context;
	atomic_bool waiting;
	unsigned seed;
};

static int note_that_it_waits(void *user, const struct ioshape_place *place)
{
	struct runner *runner = user;

	(void)place;
	atomic_store(&runner->waiting, true);
	return atomic_load(&runner->relay->done) >= runner->relay->count;
}

static void note_time(struct relay *relay, uint64_t now)
{
	const uint64_t released = atomic_load(&relay->released_ns);

	if (released && atomic_load(&relay->done) < relay->count)
		relay->ms[atomic_fetch_add(&relay->done, 1)] = (double)(now - released) / 1e6;
}

static void *run(void *argument)
{
	struct runner *runner = argument;
	struct relay *relay = runner->relay;
	struct ioshape_slot_options options = IOSHAPE_SLOT_OPTIONS_INIT;

	options.path = "/";
	options.expected_bytes = 64ull << 20;
	options.waiting = note_that_it_waits;
	options.waiting_user = runner;
	while (atomic_load(&relay->done) < relay->count) {
		struct ioshape_slot *slot;

		if (ioshape_slot_acquire(runner->context, &options, &slot))
			break; /* the other writer has measured enough, so the callback gave up */
		note_time(relay, now_ns());
		atomic_store(&runner->waiting, false);
		while (!atomic_load(&runner->other->waiting) &&
		       atomic_load(&relay->done) < relay->count)
			usleep(PAUSE_US / 10);
		usleep(PAUSE_US + (useconds_t)rand_r(&runner->seed) % PAUSE_US);
		atomic_store(&relay->released_ns, now_ns());
		ioshape_slot_free(slot);
	}
	return NULL;
}

static int by_value(const void *a, const void *b)
{
	const double *left = a, *right = b;

	return (*left > *right) - (*left < *right);
}

/* Measures handovers. Keys: count=N, and settings as for `context`. */
void run_handovers(struct bench *bench, const struct command *command)
{
	struct relay relay = { .count = command_number(command, "count", 100) };
	struct runner runners[WRITERS] = { 0 };

	(void)bench;
	relay.ms = calloc(relay.count, sizeof(*relay.ms));
	if (!relay.ms)
		fail("no memory for %zu handovers", relay.count);
	for (int i = 0; i < WRITERS; i++) {
		runners[i].relay = &relay;
		runners[i].other = &runners[!i];
		runners[i].seed = (unsigned)i;
		runners[i].context = open_context(command);
	}
	for (int i = 0; i < WRITERS; i++) {
		if (pthread_create(&runners[i].thread, NULL, run, &runners[i]))
			fail("no thread");
	}
	for (int i = 0; i < WRITERS; i++) {
		pthread_join(runners[i].thread, NULL);
		ioshape_context_free(runners[i].context);
	}
	if (atomic_load(&relay.done) < relay.count)
		fail("a writer got no slot");
	qsort(relay.ms, relay.count, sizeof(*relay.ms), by_value);
	answer_number("p50_ms", relay.ms[relay.count / 2]);
	answer_number("p99_ms", relay.ms[relay.count * 99 / 100]);
	answer_number("max_ms", relay.ms[relay.count - 1]);
	free(relay.ms);
}
