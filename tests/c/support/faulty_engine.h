/* SPDX-License-Identifier: Apache-2.0 */
/*
 * An engine that lies between the library and a true one and makes trouble: short results, errors,
 * interruptions, delays, completions out of order. What it does follows from a seed alone (as long
 * as one thread uses it), so that a failure can be had again: IOSHAPE_TEST_SEED=<seed>.
 */
#ifndef TESTS_SUPPORT_FAULTY_ENGINE_H
#define TESTS_SUPPORT_FAULTY_ENGINE_H

#include "io/queue.h"

/* How often something happens: once in so many requests; 0 never. */
struct faulty_plan {
	const struct io_engine_ops *inner; /* moves the bytes that are moved */
	uint64_t seed;
	unsigned eio, enospc;
	unsigned interrupted, again; /* EINTR and EAGAIN, nothing moved */
	unsigned invalid;            /* EINVAL, as from files that cannot do direct I/O after all */
	unsigned short_results;      /* only a part is moved, down to nothing where it is written */
	unsigned not_taken;          /* submit() itself fails */
	unsigned delays;
	bool reorder;       /* completions come in random order */
	unsigned fail_open; /* how many times open() fails before it succeeds */
};

/* What has happened, for all engines since faulty_context(). */
struct faulty_counts {
	unsigned long opened, closed, submitted, completed;
	unsigned long faults; /* requests that did not do what was asked, by our doing */
	unsigned long hard;   /* those that a save cannot get over */
	unsigned long misuse; /* calls that break the contract in ring.h */
};

/* A context whose AUTO uses it, and nothing else. One at a time. */
struct ioshape_context *faulty_context(const struct faulty_plan *plan, enum ioshape_direct direct);

const struct faulty_counts *faulty_counts(void);

/* $IOSHAPE_TEST_SEED if it is set, and `standard` otherwise. */
uint64_t faulty_seed(uint64_t standard);

#endif
