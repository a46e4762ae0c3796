/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Saves and loads in which each allocation, mapping and thread in turn fails. Each call either
 * succeeds, or fails and leaves the old file and nothing else. Sanitizers detect leaks and crashes.
 */
#define _GNU_SOURCE
#include "base/base.h"
#include "support/check_main.h"
#include "support/fail_memory.h"
#include "support/open_context.h"
#include "support/sample.h"
#include "support/scratch.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

static struct sample sample;
static uint8_t *new_file;
static size_t new_bytes;
static const char old_file[] = "what was there before";
static bool once; /* only the nth allocation fails, instead of all later ones */
static unsigned failures;

/*
 * Makes allocations fail. Until they work again there may be no assertion, because assertions
 * allocate.
 */
static void fail_at(unsigned long nth)
{
	if (once)
		fail_memory_once_at(nth);
	else
		fail_memory_at(nth);
}

static struct ioshape_context *open_context(enum ioshape_engine engine)
{
	struct ioshape_context_options options = IOSHAPE_CONTEXT_OPTIONS_INIT;
	struct ioshape_context *context;

	options.engine = engine;
	options.staging_bytes = 64 * MIB;
	return open_context_with(&context, &options,
				 (struct test_rules){ .block_bytes = 64 * KIB, .queue_depth = 2 }) ?
		       NULL :
		       context;
}

static int save(struct ioshape_context *context)
{
	struct ioshape_save_options options = IOSHAPE_SAVE_OPTIONS_INIT;
	struct ioshape_report report = IOSHAPE_REPORT_INIT;

	options.metadata = &sample.metadata;
	options.report = &report;
	options.sync = IOSHAPE_OFF;
	return ioshape_save_tensors(context, "file", sample.tensors, sample.count, &options, NULL);
}

/* Waits for a background save whose begin returned `ret`. Returns its result. */
static int await(int ret, struct ioshape_save *handle)
{
	if (ret)
		return handle ? -EBADMSG : ret;
	ret = ioshape_save_wait(handle, -1);
	ioshape_save_free(handle);
	return ret;
}

static int begin(struct ioshape_context *context, bool borrow)
{
	struct ioshape_save_options options = IOSHAPE_SAVE_OPTIONS_INIT;
	struct ioshape_save *handle;
	int ret;

	options.metadata = &sample.metadata;
	options.sync = IOSHAPE_OFF;
	options.borrow = borrow;
	ret = ioshape_save_tensors(context, "file", sample.tensors, sample.count, &options,
				   &handle);
	return await(ret, handle);
}

static int save_in_background(struct ioshape_context *context)
{
	return begin(context, false);
}

static int save_borrowed(struct ioshape_context *context)
{
	return begin(context, true);
}

static int fetch(void *user, uint64_t offset, void *into, size_t bytes)
{
	memcpy(into, (const uint8_t *)user + offset, bytes);
	return 0;
}

/* Saves records; every second one comes from a function, the others from memory. */
static int save_fetched(struct ioshape_context *context, bool background)
{
	struct ioshape_save_options options = IOSHAPE_SAVE_OPTIONS_INIT;
	struct ioshape_record records[SAMPLE_TENSORS] = { 0 };
	char names[SAMPLE_TENSORS][32];
	struct ioshape_save *handle;
	int ret;

	options.metadata = &sample.metadata;
	options.sync = IOSHAPE_OFF;
	for (size_t i = 0; i < sample.count; i++) {
		snprintf(names[i], sizeof(names[i]), "data/%zu", i);
		records[i].name = names[i];
		records[i].bytes = sample.bytes[i];
		if (i % 2) {
			records[i].fetch = fetch;
			records[i].fetch_user = sample.expected[i];
		} else {
			records[i].data = sample.expected[i];
		}
	}
	ret = ioshape_save_records(context, "file", records, sample.count, &options,
				   background ? &handle : NULL);
	return background ? await(ret, handle) : ret;
}

static int save_fetched_now(struct ioshape_context *context)
{
	return save_fetched(context, false);
}

static int save_fetched_in_background(struct ioshape_context *context)
{
	return save_fetched(context, true);
}

static int save_raw(struct ioshape_context *context)
{
	return sample_write_raw(context, "file", &sample);
}

static int save_records(struct ioshape_context *context)
{
	return sample_write_records(context, "file", &sample);
}

static int load(struct ioshape_context *context)
{
	static uint8_t into[1 << 20];
	struct ioshape_reader *reader;
	int ret;

	ret = ioshape_reader_open(context, "file", NULL, &reader);
	if (ret)
		return reader ? -EBADMSG : ret;
	ret = sample_load(reader, &sample, into);
	if (!ret)
		ret = ioshape_reader_verify(reader, 1);
	ioshape_reader_free(reader);
	return ret;
}

static const struct {
	int (*act)(struct ioshape_context *context);
	enum ioshape_engine engine;
	bool loads;
	bool same; /* its file equals the one that setup() saves */
} acts[] = {
	{ save, IOSHAPE_ENGINE_AUTO, false, true },
	{ save_in_background, IOSHAPE_ENGINE_THREADS, false, true },
	{ save_borrowed, IOSHAPE_ENGINE_AUTO, false, true },
	{ save_records, IOSHAPE_ENGINE_BUFFERED, false, false },
	{ save_fetched_now, IOSHAPE_ENGINE_AUTO, false, false },
	{ save_fetched_in_background, IOSHAPE_ENGINE_BUFFERED, false, false },
	{ save_raw, IOSHAPE_ENGINE_AUTO, false, false },
	{ load, IOSHAPE_ENGINE_AUTO, true, false },
};

static void setup(void)
{
	struct ioshape_context *context;

	scratch_setup();
	ck_assert_int_eq(chdir(scratch_directory()), 0);
	sample_make(&sample, 7, 100000);
	context = open_context(IOSHAPE_ENGINE_AUTO);
	ck_assert_ptr_nonnull(context);
	ck_assert_int_eq(save(context), 0);
	new_file = scratch_read("file", &new_bytes);
	ioshape_context_free(context);
}

static void teardown(void)
{
	free(new_file);
	sample_free(&sample);
	ck_assert_int_eq(chdir("/"), 0);
	scratch_teardown();
}

static void check_outcome(int ret, bool loads, unsigned long nth)
{
	const struct ioshape_error *error = ioshape_last_error();

	ck_assert_msg(scratch_entries(".") == 1, "allocation %lu: files left behind", nth);
	if (ret) {
		failures++;
		/* Threads and mappings have their own error codes. */
		ck_assert_msg(ret == -ENOMEM || ret == -EAGAIN, "allocation %lu: %d, \"%s\"", nth,
			      ret, error->sentence);
		ck_assert_msg(*error->sentence, "allocation %lu: no message", nth);
	}
	if (ret && !loads)
		ck_assert_msg(scratch_same("file", old_file, sizeof(old_file)),
			      "allocation %lu: failed, and the old file is gone: %s", nth,
			      error->sentence);
}

/* Returns false if there were fewer than nth allocations. */
static bool run(int which, unsigned long nth)
{
	unsigned descriptors = scratch_descriptors();
	struct ioshape_context *context;
	unsigned long count;
	int ret = -ENOMEM;

	if (acts[which].loads) {
		scratch_write("file", new_file, new_bytes);
		scratch_evict("file");
	} else {
		scratch_write("file", old_file, sizeof(old_file));
	}
	fail_at(nth);
	context = open_context(acts[which].engine);
	if (context)
		ret = acts[which].act(context);
	ioshape_context_free(context);
	count = fail_memory_count();
	fail_memory_at(0);
	check_outcome(ret, acts[which].loads, nth);
	ck_assert_msg(scratch_descriptors() == descriptors, "allocation %lu: descriptors left open",
		      nth);
	/* A save that succeeded nevertheless is complete. */
	if (!ret && acts[which].same)
		ck_assert(scratch_same("file", new_file, new_bytes));
	return count >= nth;
}

/*
 * Cases with tags of their own: meson.build runs each as a test, because they wait while memory is
 * missing.
 */
#define ACTS(name_)                                                                                \
	{                                                                                          \
		.name = #name_, .setup = setup, .teardown = teardown, .tags = #name_               \
	}

static struct test_case saves = ACTS(saves), lent = ACTS(lent);
static struct test_case fetched = ACTS(fetched), others = ACTS(others);

LOOP_TEST(saves, each_allocation_may_fail, 0, 4)
{
	unsigned long nth = 1;

	once = _i % 2;
	failures = 0;
	while (run(_i / 2, nth))
		nth++;
	ck_assert_uint_gt(nth, 20);
	ck_assert_uint_gt(failures, 10);
}
CHECK_ADD(lent, each_allocation_may_fail, 4, 8)
CHECK_ADD(fetched, each_allocation_may_fail, 8, 12)
CHECK_ADD(others, each_allocation_may_fail, 12, 2 * ARRAY_LENGTH(acts))
