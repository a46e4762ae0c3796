/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Saves and loads on an engine that injects faults, by seed. A save either succeeds with the right
 * bytes, or fails and leaves the old file and nothing else.
 */
#define _GNU_SOURCE
#include "internal.h"
#include "support/check_main.h"
#include "support/faulty_engine.h"
#include "support/random.h"
#include "support/sample.h"
#include "support/scratch.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define LARGE_BYTES (3u << 20)
#define SEEDS 60 /* unless tests may take long */
#define SEEDS_LONG 3000

static const struct io_engine_ops *const inner[] = { &io_engine_uring, &io_engine_threads,
						     &io_engine_buffered };

static struct sample old_sample, new_sample;
static uint8_t *old_file, *new_file;
static size_t old_bytes, new_bytes;

/* Saves without faults. Returns the bytes of the file, to be freed. */
static uint8_t *reference(const struct sample *sample, size_t *bytes)
{
	struct ioshape_save_options options = IOSHAPE_SAVE_OPTIONS_INIT;
	struct ioshape_context *context =
		sample_context(IOSHAPE_ENGINE_BUFFERED, IOSHAPE_DIRECT_OFF);

	options.metadata = &sample->metadata;
	ck_assert_int_eq(ioshape_save_tensors(context, scratch_path("file"), sample->tensors,
					      sample->count, &options, NULL),
			 0);
	ioshape_context_free(context);
	return scratch_read(scratch_path("file"), bytes);
}

static void setup(void)
{
	scratch_setup();
	sample_make(&old_sample, 1, LARGE_BYTES / 2);
	sample_make(&new_sample, 2, LARGE_BYTES);
	new_file = reference(&new_sample, &new_bytes);
	old_file = reference(&old_sample, &old_bytes);
}

static void teardown(void)
{
	free(old_file);
	free(new_file);
	sample_free(&old_sample);
	sample_free(&new_sample);
	scratch_teardown();
}

/* Returns 0 in half of the cases, else a rate of one in `least` to `most` requests. */
static unsigned rate(uint64_t *state, unsigned least, unsigned most)
{
	return test_random_below(state, 2) ?
		       0 :
		       least + (unsigned)test_random_below(state, most - least);
}

static struct faulty_plan make_plan(uint64_t seed, bool hard)
{
	uint64_t state = seed;
	struct faulty_plan plan = {
		.inner = inner[seed % 3],
		.seed = seed,
		.interrupted = rate(&state, 3, 20),
		.again = rate(&state, 3, 20),
		.invalid = rate(&state, 8, 60),
		.short_results = rate(&state, 2, 10),
		.delays = rate(&state, 4, 20),
		.reorder = test_random_below(&state, 2),
	};

	if (hard) {
		plan.eio = rate(&state, 10, 100);
		plan.enospc = rate(&state, 10, 100);
		plan.not_taken = rate(&state, 20, 200);
	}
	return plan;
}

static int save(struct ioshape_context *context, bool background, char *message,
		size_t message_bytes)
{
	struct ioshape_save_options options = IOSHAPE_SAVE_OPTIONS_INIT;
	struct ioshape_save *handle;
	int ret;

	options.metadata = &new_sample.metadata;
	options.sync = IOSHAPE_OFF; /* the test does not depend on it, and it would take most of the
				       time */
	*message = 0;
	if (!background) {
		ret = ioshape_save_tensors(context, scratch_path("file"), new_sample.tensors,
					   new_sample.count, &options, NULL);
		snprintf(message, message_bytes, "%s", ret ? ioshape_last_error()->sentence : "");
		return ret;
	}
	ret = ioshape_save_tensors(context, scratch_path("file"), new_sample.tensors,
				   new_sample.count, &options, &handle);
	ck_assert_int_eq(ret, 0);
	ret = ioshape_save_wait(handle, -1);
	snprintf(message, message_bytes, "%s", ioshape_last_error()->sentence);
	ioshape_save_free(handle);
	return ret;
}

/* Saves with the faults of this seed. Returns whether the save succeeded. */
static bool save_under(uint64_t seed, bool hard)
{
	const struct faulty_plan plan = make_plan(seed, hard);
	struct ioshape_context *context;
	unsigned descriptors;
	char message[1024];
	int ret;

	scratch_write(scratch_path("file"), old_file, old_bytes);
	descriptors = scratch_descriptors();
	/* A save survives EINVAL only by giving up direct I/O. */
	context = faulty_context(&plan, plan.invalid || seed % 2 ? IOSHAPE_DIRECT_PREFER :
								   IOSHAPE_DIRECT_OFF);
	ret = save(context, seed % 5 < 2, message, sizeof(message));
	ioshape_context_free(context);
	ck_assert_msg(!faulty_counts()->misuse, "seed %llu: the engine was misused",
		      (unsigned long long)seed);
	ck_assert_uint_eq(faulty_counts()->opened, faulty_counts()->closed);
	ck_assert_msg(scratch_descriptors() == descriptors, "seed %llu: descriptors",
		      (unsigned long long)seed);
	ck_assert_msg(scratch_entries(scratch_directory()) == 1, "seed %llu: files left behind",
		      (unsigned long long)seed);
	if (ret) {
		ck_assert_msg(scratch_same(scratch_path("file"), old_file, old_bytes),
			      "seed %llu: failed with %d, and the old file is gone",
			      (unsigned long long)seed, ret);
		ck_assert_msg(strstr(message, scratch_path("file")) != NULL, "seed %llu: \"%s\"",
			      (unsigned long long)seed, message);
		return false;
	}
	ck_assert_msg(scratch_same(scratch_path("file"), new_file, new_bytes),
		      "seed %llu: succeeded with wrong bytes", (unsigned long long)seed);
	return true;
}

static struct test_case by_seed = { .name = "by seed", .setup = setup, .teardown = teardown };

TEST(by_seed, trouble_that_passes_never_fails_a_save)
{
	uint64_t first = faulty_seed(1000), count = scratch_long() ? SEEDS_LONG : SEEDS, faults = 0;

	for (uint64_t seed = first; seed < first + count; seed++) {
		struct faulty_plan plan = make_plan(seed, false);

		/* Without direct I/O an EINVAL is a real error. */
		if (plan.invalid && !plan.inner->direct)
			continue;
		ck_assert_msg(save_under(seed, false), "seed %llu", (unsigned long long)seed);
		faults += faulty_counts()->faults;
	}
	/* The test must have injected enough faults. */
	ck_assert_uint_gt(faults, count);
}

TEST(by_seed, trouble_of_all_kinds_leaves_the_old_file_or_the_new)
{
	uint64_t first = faulty_seed(500000), count = scratch_long() ? SEEDS_LONG : 2 * SEEDS;
	unsigned succeeded = 0;

	for (uint64_t seed = first; seed < first + count; seed++)
		succeeded += save_under(seed, true);
	if (count > 1) {
		ck_assert_uint_gt(succeeded, count / 20);
		ck_assert_uint_lt(succeeded, count);
	}
}

/*
 * Returns the setting with which loads use the engine. By default files as small as these are read
 * through the page cache.
 */
static enum ioshape_direct past_the_page_cache(void)
{
	return scratch_direct() ? IOSHAPE_DIRECT_REQUIRE : IOSHAPE_DIRECT_PREFER;
}

/* Reads the file sequentially, piece by piece, until it ends or a read fails. */
static int read_onward(struct ioshape_context *context, char *why, size_t why_bytes)
{
	struct ioshape_reader *reader;
	uint8_t *into = malloc(new_bytes);
	uint64_t at = 0, bytes;
	int ret;

	ret = ioshape_reader_open(context, scratch_path("file"), NULL, &reader);
	ck_assert_int_eq(ret, 0); /* opening uses no engine */
	for (unsigned i = 0; !ret && at < new_bytes; i++, at += bytes) {
		bytes = i % 3 ? 300000 : 30;
		bytes = bytes < new_bytes - at ? bytes : new_bytes - at;
		ret = save_reader_read_file(reader, at, into, bytes);
		if (!ret)
			ck_assert_mem_eq(into, new_file + at, bytes);
	}
	snprintf(why, why_bytes, "%s", ioshape_last_error()->sentence);
	ioshape_reader_free(reader);
	free(into);
	return ret;
}

TEST(by_seed, trouble_ahead_never_reads_wrong_bytes)
{
	uint64_t first = faulty_seed(700000), count = scratch_long() ? SEEDS_LONG : SEEDS;
	unsigned failed = 0, faults = 0;
	char why[1024];

	for (uint64_t seed = first; seed < first + count; seed++) {
		struct faulty_plan plan = make_plan(seed, seed % 2);
		struct ioshape_context *context;
		int ret;

		plan.invalid = 0;
		scratch_write(scratch_path("file"), new_file, new_bytes);
		scratch_evict(scratch_path("file"));
		context = faulty_context(&plan, past_the_page_cache());
		ret = read_onward(context, why, sizeof(why));
		ioshape_context_free(context);
		faults += (unsigned)faulty_counts()->faults;
		ck_assert_msg(!faulty_counts()->misuse, "seed %llu", (unsigned long long)seed);
		if (!ret)
			continue;
		failed++;
		ck_assert_msg(faulty_counts()->hard && ret != IOSHAPE_E_DAMAGED, "seed %llu: %s",
			      (unsigned long long)seed, why);
		ck_assert_msg(strstr(why, scratch_path("file")) != NULL, "%s", why);
	}
	if (count > 1 && scratch_direct()) {
		ck_assert_uint_gt(faults, count / 2);
		ck_assert_uint_gt(failed, 0);
	}
}

TEST(by_seed, trouble_never_loads_wrong_bytes)
{
	uint64_t first = faulty_seed(900000), count = scratch_long() ? SEEDS_LONG : SEEDS;
	unsigned failed = 0, faults = 0;
	char why[1024];

	for (uint64_t seed = first; seed < first + count; seed++) {
		struct faulty_plan plan = make_plan(seed, seed % 2);
		struct ioshape_context *context;
		int ret;

		plan.invalid = 0;
		scratch_write(scratch_path("file"), new_file, new_bytes);
		scratch_evict(scratch_path("file"));
		context = faulty_context(&plan, past_the_page_cache());
		ret = sample_check(context, scratch_path("file"), &new_sample, why, sizeof(why));
		ioshape_context_free(context);
		faults += (unsigned)faulty_counts()->faults;
		ck_assert_msg(!faulty_counts()->misuse, "seed %llu", (unsigned long long)seed);
		if (!ret)
			continue;
		failed++;
		ck_assert_msg(faulty_counts()->hard && ret != -EBADMSG && ret != IOSHAPE_E_DAMAGED,
			      "seed %llu: %s", (unsigned long long)seed, why);
		ck_assert_msg(strstr(why, scratch_path("file")) != NULL, "%s", why);
	}
	if (count > 1 && scratch_direct()) {
		ck_assert_uint_gt(faults, count);
		ck_assert_uint_gt(failed, 0);
	}
}

TEST(by_seed, an_engine_that_does_not_open_is_an_error_and_the_next_save_may_find_it_well)
{
	struct faulty_plan plan = { .inner = &io_engine_threads, .fail_open = 1 };
	struct ioshape_context *context;
	char message[1024];

	scratch_write(scratch_path("file"), old_file, old_bytes);
	context = faulty_context(&plan, past_the_page_cache());
	ck_assert_int_eq(save(context, false, message, sizeof(message)), -EPERM);
	ck_assert(scratch_same(scratch_path("file"), old_file, old_bytes));
	ck_assert_int_eq(save(context, false, message, sizeof(message)), 0);
	ck_assert(scratch_same(scratch_path("file"), new_file, new_bytes));
	ioshape_context_free(context);
}
