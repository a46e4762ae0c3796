/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Many threads use one context at once: saves, loads, errors and memory. Written for
 * ThreadSanitizer.
 */
#define _GNU_SOURCE
#include "support/check_main.h"
#include "support/open_context.h"
#include "support/sample.h"
#include "support/scratch.h"
#include "support/write_record.h"

#include <errno.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#define THREADS 6
#define ROUNDS 8

static struct ioshape_context *context;
static struct sample samples[THREADS];
static atomic_uint log_lines;

static void count_lines(void *user, enum ioshape_log_level level, const char *message)
{
	(void)user;
	(void)level;
	(void)message;
	atomic_fetch_add(&log_lines, 1);
}

static void setup(void)
{
	struct ioshape_context_options options = IOSHAPE_CONTEXT_OPTIONS_INIT;

	scratch_setup();
	ck_assert_int_eq(chdir(scratch_directory()), 0);
	for (size_t i = 0; i < THREADS; i++)
		sample_make(&samples[i], 10 + i, 300000 + 50000 * i);
	options.staging_bytes = 64 << 20;
	options.log = count_lines;
	options.log_level = IOSHAPE_LOG_DEBUG;
	ck_assert_int_eq(open_context_with(
				 &context, &options,
				 (struct test_rules){ .block_bytes = 64 * 1024, .queue_depth = 3 }),
			 0);
}

static void teardown(void)
{
	ioshape_context_free(context);
	ck_assert_uint_eq(scratch_temporaries("."), 0);
	for (size_t i = 0; i < THREADS; i++)
		sample_free(&samples[i]);
	ck_assert_int_eq(chdir("/"), 0);
	scratch_teardown();
}

/* A thread and its failure. Only the main thread may use assertions. */
struct worker {
	size_t number;
	int (*act)(struct worker *worker);
	char path[32];
	char why[512];
};

static void *work(void *argument)
{
	struct worker *worker = argument;

	for (int round = 0; round < ROUNDS; round++)
		if (worker->act(worker))
			return worker;
	return NULL;
}

static void run_all(int (*act)(struct worker *worker), const char *path)
{
	struct worker workers[THREADS];
	pthread_t threads[THREADS];
	void *failure;

	for (size_t i = 0; i < THREADS; i++) {
		workers[i] = (struct worker){ .number = i, .act = act };
		snprintf(workers[i].path, sizeof(workers[i].path), "%s%zu", path, i);
		ck_assert_int_eq(pthread_create(&threads[i], NULL, work, &workers[i]), 0);
	}
	for (size_t i = 0; i < THREADS; i++) {
		pthread_join(threads[i], &failure);
		ck_assert_msg(!failure, "thread %zu: %s", i, workers[i].why);
	}
}

static int complain(struct worker *worker, const char *why)
{
	snprintf(worker->why, sizeof(worker->why), "%s", why);
	return -1;
}

static struct ioshape_save_options options_for(const struct worker *worker)
{
	struct ioshape_save_options options = IOSHAPE_SAVE_OPTIONS_INIT;

	options.metadata = &samples[worker->number].metadata;
	options.sync = worker->number % 2 ? IOSHAPE_OFF : IOSHAPE_ON;
	return options;
}

static int save_blocking(struct worker *worker, const char *path)
{
	struct sample *sample = &samples[worker->number];
	struct ioshape_save_options options = options_for(worker);
	struct ioshape_report report = IOSHAPE_REPORT_INIT;

	options.report = &report;
	if (ioshape_save_tensors(context, path, sample->tensors, sample->count, &options, NULL))
		return complain(worker, ioshape_last_error()->sentence);
	/* The samples differ in size by more than the zip adds. */
	return report.file_bytes - sample->total_bytes < 50000 ?
		       0 :
		       complain(worker, "another save's report");
}

static int save_in_background(struct worker *worker, const char *path)
{
	struct sample *sample = &samples[worker->number];
	struct ioshape_save_options options = options_for(worker);
	struct ioshape_save *save;
	int ret;

	if (ioshape_save_tensors(context, path, sample->tensors, sample->count, &options, &save))
		return complain(worker, ioshape_last_error()->sentence);
	ret = ioshape_save_wait(save, -1);
	if (ret)
		complain(worker, ioshape_last_error()->sentence);
	ioshape_save_free(save);
	return ret;
}

static int check(struct worker *worker, const char *path)
{
	return sample_check(context, path, &samples[worker->number], worker->why,
			    sizeof(worker->why));
}

static int save_and_load(struct worker *worker)
{
	int ret = worker->number % 2 ? save_in_background(worker, worker->path) :
				       save_blocking(worker, worker->path);

	return ret ? ret : check(worker, worker->path);
}

static struct test_case tests = { .name = "threads", .setup = setup, .teardown = teardown };

TEST(tests, threads_save_and_load_at_the_same_time)
{
	run_all(save_and_load, "file-");
	ck_assert_uint_gt(atomic_load(&log_lines), 0);
}

static int save_to_one_path(struct worker *worker)
{
	return worker->number % 2 ? save_in_background(worker, "file") :
				    save_blocking(worker, "file");
}

TEST(tests, threads_that_save_to_one_path_leave_one_of_their_files)
{
	char why[512];
	unsigned whole = 0;

	run_all(save_to_one_path, "");
	for (size_t i = 0; i < THREADS; i++)
		whole += !sample_check(context, "file", &samples[i], why, sizeof(why));
	ck_assert_uint_eq(whole, 1);
}

/* Checks that the error of a thread describes the thread's own last call. */
static int fail_and_ask_why(struct worker *worker)
{
	char path[64];

	snprintf(path, sizeof(path), "missing-%zu/file", worker->number);
	if (ioshape_save_tensors(context, path, NULL, 0, NULL, NULL) != -ENOENT)
		return complain(worker, "no failure");
	if (!strstr(ioshape_last_error()->path, path))
		return complain(worker, ioshape_last_error()->sentence);
	return 0;
}

TEST(tests, threads_are_told_of_their_own_failures)
{
	run_all(fail_and_ask_why, "");
}

static int write_records(struct worker *worker)
{
	struct sample *sample = &samples[worker->number];
	struct ioshape_reader *reader;
	int ret;

	if (write_record(context, worker->path, "data.pkl", sample->expected[4], sample->bytes[4],
			 NULL))
		return complain(worker, ioshape_last_error()->sentence);
	if (ioshape_reader_open(context, worker->path, NULL, &reader))
		return complain(worker, ioshape_last_error()->sentence);
	ret = ioshape_reader_verify(reader, 1);
	if (ret)
		complain(worker, ioshape_last_error()->sentence);
	ioshape_reader_free(reader);
	return ret;
}

TEST(tests, threads_write_and_verify_records_at_the_same_time)
{
	run_all(write_records, "records-");
}

/* Frees saves at random times after they have begun. */
static int save_and_drop(struct worker *worker)
{
	struct sample *sample = &samples[worker->number];
	struct ioshape_save *save;

	if (ioshape_save_tensors(context, worker->path, sample->tensors, sample->count, NULL,
				 &save))
		return complain(worker, ioshape_last_error()->sentence);
	usleep((useconds_t)(worker->number * 700));
	ioshape_save_free(save);
	return 0;
}

TEST(tests, threads_begin_and_drop_saves_at_the_same_time)
{
	run_all(save_and_drop, "dropped-");
}
