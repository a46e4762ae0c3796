/* SPDX-License-Identifier: Apache-2.0 */
/* Background saves, and a gate that stops them in a phase. A test program includes this once. */
#ifndef TESTS_SUPPORT_ASYNC_CASE_H
#define TESTS_SUPPORT_ASYNC_CASE_H

#include "support/gate.h"
#include "support/open_context.h"
#include "support/sample.h"
#include "support/scratch.h"

#include <check.h>
#include <errno.h>
#include <stdbool.h>
#include <time.h>
#include <unistd.h>

#define MIB (1u << 20)

static struct ioshape_context *context;
static struct sample sample;
static char why[512];

static inline struct ioshape_context *open_with(uint64_t staging_bytes)
{
	struct ioshape_context_options options = IOSHAPE_CONTEXT_OPTIONS_INIT;
	struct ioshape_context *opened;

	options.staging_bytes = staging_bytes;
	ck_assert_int_eq(open_context_with(&opened, &options,
					   (struct test_rules){ .block_bytes = 256 * 1024,
								.queue_depth = 4 }),
			 0);
	return opened;
}

static inline void async_setup(void)
{
	scratch_setup();
	sample_make(&sample, 3, 2 * MIB);
	context = open_with(64 * MIB);
}

static inline void async_teardown(void)
{
	ioshape_context_free(context);
	ck_assert_uint_eq(scratch_temporaries(scratch_directory()), 0);
	sample_free(&sample);
	scratch_teardown();
}

static inline struct ioshape_save_options with_metadata(const struct sample *of)
{
	struct ioshape_save_options options = IOSHAPE_SAVE_OPTIONS_INIT;

	options.metadata = &of->metadata;
	return options;
}

static inline struct ioshape_save *begin(const char *path, const struct sample *of,
					 const struct ioshape_save_options *options)
{
	struct ioshape_save *save;
	int ret = ioshape_save_tensors(context, path, of->tensors, of->count, options, &save);

	ck_assert_msg(!ret, "%s", ioshape_last_error()->sentence);
	ck_assert_ptr_nonnull(save);
	return save;
}

static inline void must_hold(const char *path, const struct sample *expected)
{
	int ret = sample_check(context, path, expected, why, sizeof(why));

	ck_assert_msg(!ret, "%s", why);
}

static inline bool is_there(const char *path)
{
	return access(path, F_OK) == 0;
}

/* Begins a save, and returns when it has stopped at the gate in this phase. */
static inline struct ioshape_save *begin_gated(struct gate *gate, enum ioshape_phase phase,
					       const char *path)
{
	struct ioshape_save_options options = gate_options(gate, phase, 0);
	struct ioshape_save *save;

	options.metadata = &sample.metadata;
	save = begin(path, &sample, &options);
	sem_wait(&gate->reached);
	return save;
}

/* Waits until the save has ended, and frees it. Returns its result. */
static inline int end(struct ioshape_save *save)
{
	int ret = ioshape_save_wait(save, -1);

	ioshape_save_free(save);
	return ret;
}

static inline double now(void)
{
	struct timespec when;

	clock_gettime(CLOCK_MONOTONIC, &when);
	return (double)when.tv_sec + (double)when.tv_nsec / 1e9;
}

#endif
