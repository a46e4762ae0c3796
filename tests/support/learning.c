/* SPDX-License-Identifier: Apache-2.0 */
#include "support/learning.h"

#include "base/base.h"
#include "support/random.h"

#include <stdlib.h>
#include <string.h>

#define RANKS 64u       /* of the first job; the second has a quarter of them */
#define INTERVAL_S 60.0 /* between its saves */
#define BYTES (256.0 * MIB)
#define WRITERS (RANKS + RANKS / 4)
#define MOST_TARGETS 64u
#define MILLION 1000000u

const struct learning_storage learning_storages[] = {
	{ "one writer fills it", 1, false, 1e9, 2e9, 0.03, 0.005, 0 },
	{ "eight fill it", 1, false, 7.5e9, 1e9, 0, 0.005, 0 },
	{ "spinning, one stripe", 8, true, 60e6, 1e9, 0.02, 0.02, 0 },
	{ "flash", 8, false, 500e6, 1.5e9, 0.005, 0.002, 0 },
	{ "shared", 4, false, 1e9, 0.8e9, 0.01, 0.005, 0.6 },
};
const size_t learning_storage_count = ARRAY_LENGTH(learning_storages);

enum state { ABSENT, WAITING, OPENING, WRITING };

struct writer {
	enum state state;
	uint32_t target;
	double bytes, left; /* of its save */
	double since_s;     /* it holds */
	double writes_s;    /* it has created its file */
	double parts_s;     /* of the pool, then */
	uint64_t number;    /* in the queue */
};

struct run {
	const struct learning_storage *storage;
	struct writer writers[WRITERS];
	uint32_t writing[MOST_TARGETS];
	uint32_t holding, waiting;
	uint64_t next_number, random;
	double now_s;
	double parts_s; /* a holder's part of the time so far, where it is divided among them */
	double full_s, changed_s;
	double storm_s[2]; /* when each job saves next */
	double neighbour, neighbour_s;
	uint64_t neighbour_random; /* of its own: it does not depend on how many write */
	uint32_t fixed;
	struct learn learn;
	struct learn_epoch epoch;
};

static double chance(uint64_t *state)
{
	return (double)test_random_below(state, MILLION) / MILLION;
}

static uint32_t capacity_of(const struct run *run)
{
	return run->fixed ? run->fixed : learn_capacity(&run->learn);
}

/* ---- The pool -------------------------------------------------------------------------------- */

static void grant(struct run *run)
{
	while (run->waiting && run->holding < capacity_of(run)) {
		struct writer *next = NULL;

		for (struct writer *one = run->writers; one < run->writers + WRITERS; one++) {
			if (one->state == WAITING && (!next || one->number < next->number))
				next = one;
		}
		next->state = OPENING;
		next->since_s = run->now_s;
		next->writes_s = run->now_s + run->storage->open_s * (0.5 + chance(&run->random));
		next->target = (uint32_t)(chance(&run->random) * run->storage->targets);
		next->parts_s = run->parts_s;
		run->waiting--;
		run->holding++;
	}
	if (run->holding >= LEARN_FULL * capacity_of(run))
		run->full_s = run->now_s;
	run->epoch.wanted = MAX(run->epoch.wanted, run->holding + run->waiting);
}

static void release(struct run *run, struct writer *writer)
{
	uint32_t before = capacity_of(run);

	if (run->holding >= LEARN_FULL * before)
		run->full_s = run->now_s;
	writer->state = ABSENT;
	run->holding--;
	if (writer->bytes >= LEARN_LEAST_BYTES && writer->since_s >= run->changed_s &&
	    run->full_s > writer->since_s) {
		run->epoch.reports++;
		run->epoch.bytes += (uint64_t)writer->bytes;
		run->epoch.seconds += run->parts_s - writer->parts_s;
	}
	if (run->epoch.reports >= learn_reports(&run->learn)) {
		learn_from(&run->learn, &run->epoch);
		run->epoch = (struct learn_epoch){ 0 };
		if (capacity_of(run) != before)
			run->changed_s = run->now_s;
	}
	grant(run);
}

/* A job's ranks save at once, if all of them have finished. */
static void storm(struct run *run, unsigned job)
{
	struct writer *first = run->writers + (job ? RANKS : 0);
	struct writer *end = run->writers + (job ? WRITERS : RANKS);

	run->storm_s[job] += job ? 2.1 * INTERVAL_S : INTERVAL_S;
	for (struct writer *one = first; one < end; one++) {
		if (one->state != ABSENT)
			return;
	}
	for (struct writer *one = first; one < end; one++) {
		one->state = WAITING;
		one->bytes = one->left = BYTES * (0.7 + 0.6 * chance(&run->random)) * (job ? 3 : 1);
		one->number = run->next_number++;
		run->waiting++;
	}
	grant(run);
}

/* ---- The storage ----------------------------------------------------------------------------- */

static double rate_of(const struct run *run, const struct writer *writer)
{
	const struct learning_storage *storage = run->storage;
	const uint32_t target = storage->one_stripe ? writer->target : 0;
	const double count = run->writing[target];
	const double all = storage->target_rate * (storage->one_stripe ? 1 : storage->targets) *
			   (1 - run->neighbour) / (1 + storage->loss * (count - 1));

	return MIN(storage->writer_rate, all / count);
}

static void count_writing(struct run *run)
{
	memset(run->writing, 0, sizeof(run->writing));
	for (struct writer *one = run->writers; one < run->writers + WRITERS; one++) {
		if (one->state == WRITING)
			run->writing[run->storage->one_stripe ? one->target : 0]++;
	}
}

static double next_event_s(struct run *run)
{
	double next_s = MIN(run->storm_s[0], run->storm_s[1]);

	count_writing(run);
	if (run->storage->neighbour > 0)
		next_s = MIN(next_s, run->neighbour_s);
	for (struct writer *one = run->writers; one < run->writers + WRITERS; one++) {
		if (one->state == OPENING)
			next_s = MIN(next_s, one->writes_s);
		else if (one->state == WRITING)
			next_s = MIN(next_s, run->now_s + one->left / rate_of(run, one));
	}
	return next_s;
}

static void advance(struct run *run, double to_s)
{
	const double step_s = to_s - run->now_s;

	for (struct writer *one = run->writers; one < run->writers + WRITERS; one++) {
		if (one->state == WRITING)
			one->left -= rate_of(run, one) * step_s;
	}
	if (run->holding)
		run->parts_s += step_s / run->holding;
	run->now_s = to_s;
}

static void happen(struct run *run)
{
	for (unsigned job = 0; job < 2; job++) {
		if (run->now_s >= run->storm_s[job])
			storm(run, job);
	}
	if (run->storage->neighbour > 0 && run->now_s >= run->neighbour_s) {
		run->neighbour = run->storage->neighbour *
				 (double)test_random_below(&run->neighbour_random, 3) / 2;
		run->neighbour_s = run->now_s + 5 + 55 * chance(&run->neighbour_random);
	}
	for (struct writer *one = run->writers; one < run->writers + WRITERS; one++) {
		if (one->state == OPENING && run->now_s >= one->writes_s)
			one->state = WRITING;
		else if (one->state == WRITING && one->left < 1)
			release(run, one);
	}
}

void learning_run(const struct learning_storage *storage, uint32_t capacity, uint32_t start,
		  uint64_t seed, double from_s, double to_s, struct learning_result *result)
{
	struct run run = {
		.storage = storage, .fixed = capacity, .random = seed, .neighbour_random = seed
	};
	double bytes = 0, busy_s = 0;
	uint64_t best;

	learn_begin(&run.learn, start);
	run.storm_s[1] = 0.3 * INTERVAL_S;
	*result = (struct learning_result){ .least = LEARN_MOST };
	while (run.now_s < to_s) {
		const double next_s = next_event_s(&run), step_s = next_s - run.now_s;

		best = run.learn.best;
		if (run.now_s >= from_s) {
			for (struct writer *one = run.writers; one < run.writers + WRITERS; one++)
				bytes += one->state == WRITING ? rate_of(&run, one) * step_s : 0;
			busy_s += run.holding ? step_s : 0;
			result->most = MAX(result->most, (uint32_t)best);
			result->least = MIN(result->least, (uint32_t)best);
		}
		advance(&run, next_s);
		happen(&run);
		result->moves += run.now_s >= from_s && run.learn.best != best;
	}
	result->capacity = (uint32_t)run.learn.best;
	result->bytes_per_s = bytes / busy_s;
}
