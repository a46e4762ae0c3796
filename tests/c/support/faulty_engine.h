/* SPDX-License-Identifier: Apache-2.0 */
/*
 * An engine that injects faults in front of a real engine: short results, errors, interruptions,
 * delays, and completions out of order. If a single thread uses it, its faults follow from a seed
 * alone, so a failure can be reproduced with IOSHAPE_TEST_SEED=<seed>.
 */
#ifndef TESTS_SUPPORT_FAULTY_ENGINE_H
#define TESTS_SUPPORT_FAULTY_ENGINE_H

#include "io/queue.h"

/* Frequency of each fault: once in so many requests; 0: never. */
struct faulty_plan {
	const struct io_engine_ops *inner; /* real engine that moves the bytes */
	uint64_t seed;
	unsigned eio, enospc;
	unsigned interrupted, again; /* EINTR and EAGAIN, without moving bytes */
	unsigned invalid;       /* EINVAL, as from files that turn out not to support direct I/O */
	unsigned short_results; /* only a part is moved; writes may move nothing */
	unsigned not_taken;     /* submit() itself fails */
	unsigned delays;
	bool reorder;       /* completions come in random order */
	unsigned fail_open; /* how many times open() fails before it succeeds */
};

/* Counters of all engines since faulty_context(). */
struct faulty_counts {
	unsigned long opened, closed, submitted, completed;
	unsigned long faults; /* requests with an injected fault */
	unsigned long hard;   /* faults that make a save fail */
	unsigned long misuse; /* calls that violate the engine contract in queue.h */
};

/* Opens a context whose only engine for AUTO is the faulty one. One context at a time. */
struct ioshape_context *faulty_context(const struct faulty_plan *plan, enum ioshape_direct direct);

const struct faulty_counts *faulty_counts(void);

/* Returns $IOSHAPE_TEST_SEED if it is set, else `standard`. */
uint64_t faulty_seed(uint64_t standard);

#endif
