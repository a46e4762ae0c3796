/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Saves and loads by one thread and by several. The linker (--wrap) decides how fast the storage
 * seems and which memory it accepts, and lets the start of a thread fail.
 */
#define _GNU_SOURCE
#include "io/queue.h"
#include "save/context.h"
#include "support/check_main.h"
#include "support/random.h"
#include "support/scratch.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define PAGE 4096u
#define SECTOR 512u
#define TENSORS 5u
/* Several blocks, and odd, so that slices and blocks of statistics have a rest. */
#define MOST_BYTES (9 * MIB + 4 * 1021)

static struct {
	struct ioshape_tensor tensors[TENSORS];
	int64_t shapes[TENSORS];
	uint8_t *allocated[TENSORS];
	uint8_t *memory[TENSORS]; /* begins a sector, but not a page */
	struct ioshape_context *context;
	struct ioshape_report report;
	enum ioshape_format format;
	const char *examine;
	unsigned asked;   /* how often the library asked for the speed of the storage */
	unsigned starts;  /* threads that were started */
	bool slow;        /* the storage seems slow */
	bool no_thread;   /* no thread can be started */
	uint64_t stop_at; /* the progress callback stops the save here; 0: never */
} test;

bool __wrap_io_writer_is_starved(const struct io_writer *writer);
bool __wrap_io_writer_is_starved(const struct io_writer *writer)
{
	(void)writer;
	/* The other threads begin in the middle of a slice of a tensor. */
	return ++test.asked > 3 && !test.slow;
}

void __wrap_io_pace_judge(struct io_pace *pace, uint64_t sent_bytes, uint64_t in_flight_bytes,
			  uint64_t now_ns);
void __wrap_io_pace_judge(struct io_pace *pace, uint64_t sent_bytes, uint64_t in_flight_bytes,
			  uint64_t now_ns)
{
	(void)in_flight_bytes;
	(void)now_ns;
	/* Other threads begin after the first block. */
	pace->starved = sent_bytes && !test.slow;
}

int __real_pthread_create(pthread_t *thread, const pthread_attr_t *attributes, void *(*run)(void *),
			  void *argument);
int __wrap_pthread_create(pthread_t *thread, const pthread_attr_t *attributes, void *(*run)(void *),
			  void *argument);
int __wrap_pthread_create(pthread_t *thread, const pthread_attr_t *attributes, void *(*run)(void *),
			  void *argument)
{
	test.starts++;
	return test.no_thread ? EAGAIN : __real_pthread_create(thread, attributes, run, argument);
}

int __real_fs_describe_new(int fd, int directory_fd, bool inherits, const char *path,
			   struct fs_memory *memory, struct fs_info *info,
			   struct base_error *error);
int __wrap_fs_describe_new(int fd, int directory_fd, bool inherits, const char *path,
			   struct fs_memory *memory, struct fs_info *info,
			   struct base_error *error);
int __wrap_fs_describe_new(int fd, int directory_fd, bool inherits, const char *path,
			   struct fs_memory *memory, struct fs_info *info, struct base_error *error)
{
	const int ret =
		__real_fs_describe_new(fd, directory_fd, inherits, path, memory, info, error);

	info->memory_alignment = info->offset_alignment = SECTOR;
	info->direct_known = info->direct_works = true;
	return ret;
}

/* ---- An engine that moves no byte ------------------------------------------------------------ */

static struct {
	const uint8_t *memory; /* the queue's buffers */
	size_t memory_bytes;
	struct io_op *done;
	uint64_t copied_bytes; /* bytes that it got from those buffers */
} nil;

static int nil_open(void **engine, const struct io_engine_params *params, char *why,
		    size_t why_bytes)
{
	(void)why_bytes;
	why[0] = 0;
	nil.memory = params->memory;
	nil.memory_bytes = params->memory_bytes;
	*engine = &nil;
	return 0;
}

static int nil_submit(void *engine, struct io_op *op)
{
	(void)engine;
	nil.copied_bytes += op->range_count ? 0 : op->bytes;
	for (unsigned i = 0; i < op->range_count; i++) {
		const uint8_t *at = op->ranges[i].iov_base;

		if (at >= nil.memory && at < nil.memory + nil.memory_bytes)
			nil.copied_bytes += op->ranges[i].iov_len;
	}
	op->result = (int64_t)op->bytes;
	op->next = nil.done;
	nil.done = op;
	return 0;
}

static struct io_op *nil_wait(void *engine)
{
	struct io_op *op = nil.done;

	(void)engine;
	nil.done = op ? op->next : NULL;
	return op;
}

static void nil_close(void *engine)
{
	(void)engine;
}

static const struct io_engine_ops nil_ops = {
	.id = "nil",
	.direct = true,
	.open = nil_open,
	.submit = nil_submit,
	.wait = nil_wait,
	.close = nil_close,
};

/* ---- Saves ----------------------------------------------------------------------------------- */

/* Makes finite numbers of several types, in tensors that are long and short. */
static void make_tensors(void)
{
	static const enum ioshape_dtype dtypes[TENSORS] = { IOSHAPE_FLOAT32, IOSHAPE_BFLOAT16,
							    IOSHAPE_UINT8, IOSHAPE_FLOAT32,
							    IOSHAPE_INT64 };
	static const char *const names[TENSORS] = { "a", "b", "c", "d", "e" };
	uint64_t state = 7;

	for (unsigned i = 0; i < TENSORS; i++) {
		const uint64_t bytes = i == 3 ? 4096 : MOST_BYTES / 8 * 8;
		const unsigned each = ioshape_dtype_bytes(dtypes[i]);

		test.allocated[i] = aligned_alloc(PAGE, base_round_up(SECTOR + bytes, PAGE));
		ck_assert_ptr_nonnull(test.allocated[i]);
		test.memory[i] = test.allocated[i] + SECTOR;
		test_random_fill(&state, test.memory[i], bytes);
		for (uint64_t at = each - 1; i < 2 && at < bytes; at += each)
			test.memory[i][at] &= 0xbf;
		test.shapes[i] = (int64_t)(bytes / each);
		test.tensors[i] = (struct ioshape_tensor){ .name = names[i],
							   .dtype = dtypes[i],
							   .dims = 1,
							   .shape = &test.shapes[i],
							   .data = test.memory[i] };
	}
}

static void setup(void)
{
	scratch_setup();
	memset(&test, 0, sizeof(test));
	make_tensors();
}

static void teardown(void)
{
	ioshape_context_free(test.context);
	for (unsigned i = 0; i < TENSORS; i++)
		free(test.allocated[i]);
	ck_assert_uint_eq(scratch_temporaries(scratch_directory()), 0);
	scratch_teardown();
}

static struct test_case tests = {
	.name = "all",
	.setup = setup,
	.teardown = teardown,
};

static void open_context(unsigned threads)
{
	struct ioshape_context_options options = IOSHAPE_CONTEXT_OPTIONS_INIT;

	ioshape_context_free(test.context);
	options.coordinator = "open"; /* needs no thread of its own */
	options.examine = test.examine;
	ck_assert_int_eq(ioshape_context_open(&test.context, &options), 0);
	test.context->config.threads = threads;
	test.starts = test.asked = 0;
}

static int stop(void *user, enum ioshape_phase phase, uint64_t done, uint64_t total)
{
	(void)user;
	(void)phase;
	(void)total;
	return test.stop_at && done >= test.stop_at;
}

static int save(const char *name)
{
	struct ioshape_save_options options = IOSHAPE_SAVE_OPTIONS_INIT;

	test.report = (struct ioshape_report)IOSHAPE_REPORT_INIT;
	options.report = &test.report;
	options.format = test.format;
	if (test.format == IOSHAPE_FORMAT_SAFETENSORS)
		options.checksums = IOSHAPE_CHECKSUMS_BESIDE;
	options.progress = stop;
	return ioshape_save_tensors(test.context, scratch_path(name), test.tensors, TENSORS,
				    &options, NULL);
}

static int save_staged(const char *name)
{
	struct ioshape_save_options options = IOSHAPE_SAVE_OPTIONS_INIT;
	struct ioshape_save *background;
	int ret;

	ck_assert_int_eq(ioshape_save_tensors(test.context, scratch_path(name), test.tensors,
					      TENSORS, &options, &background),
			 0);
	ret = ioshape_save_wait(background, -1);
	ioshape_save_free(background);
	return ret;
}

/* Checks the file against the checksums in it or beside it. */
static void must_verify(const char *name)
{
	struct ioshape_reader_options options = IOSHAPE_READER_OPTIONS_INIT;
	struct ioshape_reader *reader;

	options.any_format = 1;
	ck_assert_int_eq(ioshape_reader_open(test.context, scratch_path(name), &options, &reader),
			 0);
	ck_assert_int_eq(ioshape_reader_verify(reader, 1), 0);
	ioshape_reader_free(reader);
}

static void must_equal(const char *one, const char *other)
{
	char command[8192];

	snprintf(command, sizeof(command), "cmp '%s/%s' '%s/%s'", scratch_directory(), one,
		 scratch_directory(), other);
	ck_assert_int_eq(system(command), 0);
}

TEST(tests, the_file_of_several_threads_is_that_of_one)
{
	for (unsigned format = 0; format < 2; format++) {
		test.format = format ? IOSHAPE_FORMAT_SAFETENSORS : IOSHAPE_FORMAT_TORCH;
		open_context(1);
		ck_assert_int_eq(save("one"), 0);
		ck_assert_uint_eq(test.starts, 0);
		for (unsigned threads = 2; threads <= 4; threads++) {
			open_context(threads);
			ck_assert_int_eq(save("several"), 0);
			ck_assert_uint_eq(test.starts, threads - 1);
			must_equal("one", "several");
			must_verify("several");
		}
	}
}

TEST(tests, several_threads_write_from_staging_memory)
{
	unsigned starts[2];

	open_context(1);
	ck_assert_int_eq(save("one"), 0);
	for (unsigned i = 0; i < 2; i++) {
		open_context(2);
		test.slow = !i;
		ck_assert_int_eq(save_staged("staged"), 0);
		starts[i] = test.starts;
		must_equal("one", "staged");
	}
	ck_assert_uint_eq(starts[1], starts[0] + 1);
}

TEST(tests, a_save_without_statistics_has_several_threads)
{
	for (unsigned threads = 1; threads <= 2; threads++) {
		test.examine = "off";
		open_context(threads);
		ck_assert_int_eq(save(threads == 1 ? "one" : "two"), 0);
		ck_assert_uint_eq(test.starts, threads - 1);
	}
	must_equal("one", "two");
}

static void must_load(const char *name)
{
	struct ioshape_reader_options options = IOSHAPE_READER_OPTIONS_INIT;
	struct ioshape_load_request requests[TENSORS];
	struct ioshape_reader *reader;

	/* The file is read directly, where that is possible. */
	options.shared = IOSHAPE_OFF;
	ck_assert_int_eq(ioshape_reader_open(test.context, scratch_path(name), &options, &reader),
			 0);
	for (unsigned i = 0; i < TENSORS; i++) {
		const uint64_t bytes =
			(uint64_t)test.shapes[i] * ioshape_dtype_bytes(test.tensors[i].dtype);

		requests[i] = (struct ioshape_load_request){ i, 0, bytes, malloc(bytes) };
		ck_assert_ptr_nonnull(requests[i].into);
	}
	ck_assert_int_eq(ioshape_reader_load(reader, requests, TENSORS), 0);
	for (unsigned i = 0; i < TENSORS; i++) {
		ck_assert_mem_eq(requests[i].into, test.memory[i], requests[i].bytes);
		free(requests[i].into);
	}
	ioshape_reader_free(reader);
}

TEST(tests, several_threads_load_what_one_does)
{
	open_context(1);
	ck_assert_int_eq(save("file"), 0);
	for (unsigned threads = 1; threads <= 4; threads++) {
		open_context(threads);
		must_load("file");
		ck_assert_uint_eq(test.starts, threads - 1);
	}
}

TEST(tests, a_save_without_other_threads_writes_the_same_file)
{
	open_context(1);
	ck_assert_int_eq(save("one"), 0);
	open_context(2);
	test.no_thread = true;
	ck_assert_int_eq(save("two"), 0);
	ck_assert_uint_ge(test.starts, 1);
	must_equal("one", "two");
}

TEST(tests, alarms_are_those_of_the_save_s_thread)
{
	for (unsigned threads = 1; threads <= 2; threads++) {
		const uint32_t infinity = 0x7f800000;

		open_context(threads);
		ck_assert_int_eq(save("step-1"), 0);
		ck_assert_uint_eq(test.report.alarms, 0);
		memcpy(test.memory[0] + MOST_BYTES / 8 * 8 - 4, &infinity, 4);
		ck_assert_int_eq(save("step-2"), 0);
		ck_assert_uint_eq(test.report.alarms, IOSHAPE_ALARM_NONFINITE);
		memset(test.memory[0] + MOST_BYTES / 8 * 8 - 4, 0, 4);
	}
}

TEST(tests, a_save_that_stops_leaves_no_thread)
{
	open_context(2);
	for (unsigned i = 1; i < 8; i++) {
		test.stop_at = i * 4 * MIB;
		ck_assert_int_eq(save("stopped"), -ECANCELED);
	}
	test.stop_at = 0;
	ck_assert_int_eq(save("complete"), 0);
	ck_assert_uint_eq(test.starts, 8);
}

TEST(tests, examining_does_not_make_a_save_copy)
{
	static const struct io_engine_ops *const engines[] = { &nil_ops, NULL };

	for (unsigned threads = 1; threads <= 2; threads++) {
		open_context(threads);
		test.context->config.engines = engines;
		nil.copied_bytes = 0;
		ck_assert_int_eq(save("nothing"), 0);
		/* Only the first block, and the ends of tensors. */
		ck_assert_uint_lt(nil.copied_bytes, test.report.file_bytes / 5);
	}
}
