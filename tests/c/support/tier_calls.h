/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Fixture of tests whose processes save on a tier and die at one of their calls. Processes work in
 * the scratch directory and report in memory that they share. The variables belong to the test:
 * each program includes this once.
 */
#ifndef TESTS_SUPPORT_TIER_CALLS_H
#define TESTS_SUPPORT_TIER_CALLS_H

#include "support/calls.h"
#include "support/scratch.h"

#include <ioshape/ioshape.h>
#include <ioshape/tier.h>

#include <check.h>
#include <sys/mman.h>
#include <unistd.h>

/* Handles of a process, between open and close. */
static struct ioshape_context *context;
static struct ioshape_tier *tier;

/* Returns zeroed memory that all processes share. */
static inline void *tier_calls_setup(size_t bytes)
{
	void *shared;

	scratch_setup();
	ck_assert_int_eq(chdir(scratch_directory()), 0);
	shared = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
	ck_assert_ptr_ne(shared, MAP_FAILED);
	calls_record();
	return shared;
}

static inline void tier_calls_teardown(void)
{
	ck_assert_int_eq(chdir("/"), 0);
	scratch_teardown();
}

static inline int tier_calls_open(const char *folder)
{
	struct ioshape_context_options options = IOSHAPE_CONTEXT_OPTIONS_INIT;
	struct ioshape_tier_options tier_options = IOSHAPE_TIER_OPTIONS_INIT;
	int ret;

	options.coordinator = "open";
	tier_options.parity = IOSHAPE_PARITY_1_OF_2; /* for groups of several nodes */
	ret = ioshape_context_open(&context, &options);
	return ret ? ret : ioshape_tier_open(context, folder, &tier_options, &tier);
}

static inline void tier_calls_close(void)
{
	ioshape_tier_free(tier);
	ioshape_context_free(context);
	tier = NULL;
	context = NULL;
}

#endif
