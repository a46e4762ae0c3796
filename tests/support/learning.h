/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A pool in front of modelled storage, in model time: jobs whose ranks save at once, a queue, and
 * the real rule of slots/learn.c, or a fixed number of writers. The same seed gives the same run.
 */
#ifndef TESTS_SUPPORT_LEARNING_H
#define TESTS_SUPPORT_LEARNING_H

#include "slots/learn.h"

#include <stddef.h>

/* Rates in bytes per second. */
struct learning_storage {
	const char *name;
	uint32_t targets; /* each a queue of its own */
	bool one_stripe;  /* each file lies on one target, chosen at random; otherwise on all */
	double target_rate;
	double writer_rate; /* what one writer can send */
	double loss;        /* of a target's rate for each writer beyond the first: seeks */
	double open_s;      /* a writer creates its file, holding a slot, before the first byte */
	double neighbour;   /* takes up to this part, changing every 5 to 60 s */
};

extern const struct learning_storage learning_storages[];
extern const size_t learning_storage_count;

struct learning_result {
	double bytes_per_s; /* from `from_s` to `to_s`, of the time in which anybody wrote */
	uint32_t capacity;  /* at the end: the best known */
	uint32_t most;      /* the highest and the lowest best known in that time */
	uint32_t least;
	unsigned moves; /* of the best known, in that time */
};

/* `capacity` 0: as it is learnt, beginning with `start`. */
void learning_run(const struct learning_storage *storage, uint32_t capacity, uint32_t start,
		  uint64_t seed, double from_s, double to_s, struct learning_result *result);

#endif
