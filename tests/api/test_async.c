/* SPDX-License-Identifier: Apache-2.0 */
/* Saves in the background: what the caller may do meanwhile, and what becomes of them. */
#define _GNU_SOURCE
#include "support/check_main.h"
#include "support/sample.h"
#include "support/scratch.h"

#include <errno.h>
#include <pthread.h>
#include <semaphore.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdio.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#define MIB (1u << 20)

static struct ioshape_context *context;
static struct sample sample;
static char why[512];

static uint32_t copy_threads = 3;

static struct ioshape_context *open_with(uint64_t staging_bytes, enum ioshape_staging_full full)
{
	struct ioshape_context_options options = IOSHAPE_CONTEXT_OPTIONS_INIT;
	struct ioshape_context *opened;

	options.block_bytes = 256 * 1024;
	options.queue_depth = 4;
	options.copy_threads = copy_threads;
	options.staging_bytes = staging_bytes;
	options.staging_full = full;
	ck_assert_int_eq(ioshape_context_open(&opened, &options, NULL, 0), 0);
	return opened;
}

static void setup(void)
{
	scratch_setup();
	sample_make(&sample, 3, 2 * MIB);
	context = open_with(64 * MIB, IOSHAPE_STAGING_WAIT);
}

static void teardown(void)
{
	ioshape_context_free(context);
	ck_assert_uint_eq(scratch_temporaries(scratch_directory()), 0);
	sample_free(&sample);
	scratch_teardown();
}

static struct ioshape_save_options with_metadata(const struct sample *of)
{
	struct ioshape_save_options options = IOSHAPE_SAVE_OPTIONS_INIT;

	options.metadata = &of->metadata;
	return options;
}

static struct ioshape_save *begin(const char *path, const struct sample *of,
				  const struct ioshape_save_options *options)
{
	struct ioshape_save *save;
	int ret = ioshape_save_tensors_async(context, path, of->tensors, of->count, options, &save);

	ck_assert_msg(!ret, "%s", ioshape_context_message(context));
	ck_assert_ptr_nonnull(save);
	return save;
}

static void must_hold(const char *path, const struct sample *expected)
{
	int ret = sample_check(context, path, expected, why, sizeof(why));

	ck_assert_msg(!ret, "%s", why);
}

static bool is_there(const char *path)
{
	return access(path, F_OK) == 0;
}

/* ---- A gate in the progress callback: the save stands still in a phase until it is opened ---- */

struct gate {
	enum ioshape_phase phase;
	sem_t reached, opened;
	atomic_bool passed;
};

static void gate_init(struct gate *gate, enum ioshape_phase phase)
{
	gate->phase = phase;
	sem_init(&gate->reached, 0, 0);
	sem_init(&gate->opened, 0, 0);
	atomic_store(&gate->passed, false);
}

static int stand_still(void *user, enum ioshape_phase phase, uint64_t done, uint64_t total)
{
	struct gate *gate = user;

	(void)done;
	(void)total;
	if (phase != gate->phase || atomic_exchange(&gate->passed, true))
		return 0;
	sem_post(&gate->reached);
	sem_wait(&gate->opened);
	return 0;
}

static struct ioshape_save *begin_gated(struct gate *gate, enum ioshape_phase phase,
					const char *path)
{
	struct ioshape_save_options options = with_metadata(&sample);

	gate_init(gate, phase);
	options.progress = stand_still;
	options.progress_user = gate;
	return begin(path, &sample, &options);
}

/* ---- What the caller may do ------------------------------------------------------------------ */

START_TEST(tensors_may_change_as_soon_as_the_call_returns)
{
	struct ioshape_save_options options = with_metadata(&sample);
	struct ioshape_metadata metadata = sample.metadata;
	struct ioshape_tensor tensors[SAMPLE_TENSORS];
	char path[512], names[SAMPLE_TENSORS][64];
	struct ioshape_save *save;

	/* All that is passed, spoilt afterwards: arrays, names, path, options, metadata. */
	memcpy(tensors, sample.tensors, sizeof(tensors));
	for (size_t i = 0; i < sample.count; i++) {
		snprintf(names[i], sizeof(names[i]), "%s", sample.tensors[i].name);
		tensors[i].name = names[i];
	}
	snprintf(path, sizeof(path), "%s", scratch_path("file"));
	options.metadata = &metadata;
	ck_assert_int_eq(
		ioshape_save_tensors_async(context, path, tensors, sample.count, &options, &save),
		0);
	memset(tensors, 0xff, sizeof(tensors));
	memset(names, 0xff, sizeof(names));
	memset(path, 0xff, sizeof(path));
	memset(&options, 0xff, sizeof(options));
	memset(&metadata, 0xff, sizeof(metadata));
	sample_spoil(&sample);
	ck_assert_int_eq(ioshape_save_wait(save, -1), 0);
	ioshape_save_free(save);
	must_hold(scratch_path("file"), &sample);
}
END_TEST

START_TEST(a_save_under_way_says_so)
{
	struct ioshape_report report = IOSHAPE_REPORT_INIT;
	struct ioshape_save *save;
	struct gate gate;

	save = begin_gated(&gate, IOSHAPE_PHASE_SYNC, scratch_path("file"));
	sem_wait(&gate.reached);
	ck_assert_int_eq(ioshape_save_poll(save), 0);
	ck_assert_int_eq(ioshape_save_wait(save, 0), -ETIMEDOUT);
	ck_assert_int_eq(ioshape_save_report(save, &report), -EINPROGRESS);
	ck_assert_str_eq(ioshape_save_message(save), "");
	ck_assert(!is_there(scratch_path("file")));
	sem_post(&gate.opened);
	ck_assert_int_eq(ioshape_save_wait(save, -1), 0);
	ck_assert_int_eq(ioshape_save_poll(save), 1);
	ck_assert_int_eq(ioshape_save_wait(save, 0), 0);
	ck_assert_int_eq(ioshape_save_report(save, &report), 0);
	ck_assert_uint_eq(report.tensor_bytes, sample.total_bytes);
	ck_assert_double_gt(report.total_s, 0);
	ck_assert_double_ge(report.total_s, report.sync_s);
	ck_assert_str_eq(ioshape_save_message(save), "");
	ioshape_save_free(save);
	must_hold(scratch_path("file"), &sample);
}
END_TEST

static double now(void)
{
	struct timespec when;

	clock_gettime(CLOCK_MONOTONIC, &when);
	return (double)when.tv_sec + (double)when.tv_nsec / 1e9;
}

START_TEST(waiting_ends_when_the_time_is_up)
{
	static const int64_t times[] = { 0, 1, 50, 1100 };
	struct ioshape_save *save;
	struct gate gate;

	save = begin_gated(&gate, IOSHAPE_PHASE_SYNC, scratch_path("file"));
	sem_wait(&gate.reached);
	for (size_t i = 0; i < sizeof(times) / sizeof(times[0]); i++) {
		double began = now(), wanted = (double)times[i] / 1000;

		ck_assert_int_eq(ioshape_save_wait(save, times[i]), -ETIMEDOUT);
		ck_assert_double_ge(now() - began, wanted);
		ck_assert_double_lt(now() - began, wanted + 1);
	}
	sem_post(&gate.opened);
	ck_assert_int_eq(ioshape_save_wait(save, INT64_MAX), 0);
	ck_assert_int_eq(ioshape_save_wait(save, INT64_MIN), 0);
	ioshape_save_free(save);
}
END_TEST

static void *wait_for_it(void *save)
{
	return ioshape_save_wait(save, -1) ? save : NULL;
}

START_TEST(several_threads_can_wait_for_one_save)
{
	pthread_t threads[4];
	struct ioshape_save *save;
	struct gate gate;
	void *failure;

	save = begin_gated(&gate, IOSHAPE_PHASE_WRITE, scratch_path("file"));
	sem_wait(&gate.reached);
	for (size_t i = 0; i < 4; i++)
		pthread_create(&threads[i], NULL, wait_for_it, save);
	usleep(10000);
	sem_post(&gate.opened);
	for (size_t i = 0; i < 4; i++) {
		pthread_join(threads[i], &failure);
		ck_assert_ptr_null(failure);
	}
	ioshape_save_free(save);
}
END_TEST

START_TEST(a_failure_in_the_background_is_told_by_the_handle)
{
	struct ioshape_save_options options = with_metadata(&sample);
	struct ioshape_report report = IOSHAPE_REPORT_INIT;
	struct ioshape_save *save;

	scratch_write(scratch_path("file"), "old", 3);
	options.no_replace = 1;
	save = begin(scratch_path("file"), &sample, &options);
	ck_assert_int_eq(ioshape_save_wait(save, -1), -EEXIST);
	ck_assert_int_eq(ioshape_save_wait(save, -1), -EEXIST);
	ck_assert_int_eq(ioshape_save_poll(save), 1);
	ck_assert_ptr_nonnull(strstr(ioshape_save_message(save), scratch_path("file")));
	ck_assert_int_eq(ioshape_save_report(save, &report), 0);
	ioshape_save_free(save);
	ck_assert(scratch_same(scratch_path("file"), "old", 3));
	save = begin("/dev/full", &sample, NULL);
	ck_assert_int_eq(ioshape_save_wait(save, -1), -ENOSPC);
	ck_assert_ptr_nonnull(strstr(ioshape_save_message(save), "/dev/full"));
	ioshape_save_free(save);
}
END_TEST

START_TEST(a_report_in_the_options_is_refused)
{
	struct ioshape_save_options options = with_metadata(&sample);
	struct ioshape_report report = IOSHAPE_REPORT_INIT;
	struct ioshape_save *save;

	options.report = &report;
	ck_assert_int_eq(ioshape_save_tensors_async(context, scratch_path("file"), sample.tensors,
						    sample.count, &options, &save),
			 -EINVAL);
	ck_assert_ptr_null(save);
	ck_assert_ptr_nonnull(strstr(ioshape_context_message(context), "ioshape_save_report"));
}
END_TEST

/* ---- Order ----------------------------------------------------------------------------------- */

/*
 * The first stands still before its commit; the others, which are ready sooner, wait for it. (Each
 * holds a chunk of staging memory meanwhile: there are four.)
 */
START_TEST(saves_to_one_path_take_their_places_in_the_order_of_the_calls)
{
	struct ioshape_save *saves[4];
	struct sample last;
	struct gate gate;

	sample_make(&last, 99, 1000);
	saves[0] = begin_gated(&gate, IOSHAPE_PHASE_SYNC, scratch_path("file"));
	for (int i = 1; i < 4; i++) {
		struct ioshape_save_options options = with_metadata(&last);

		last.metadata.step = i;
		saves[i] = begin(scratch_path("file"), &last, &options);
	}
	sem_wait(&gate.reached);
	usleep(50000);
	for (int i = 0; i < 4; i++)
		ck_assert_int_eq(ioshape_save_poll(saves[i]), 0);
	ck_assert(!is_there(scratch_path("file")));
	sem_post(&gate.opened);
	for (int i = 0; i < 4; i++)
		ck_assert_int_eq(ioshape_save_wait(saves[i], -1), 0);
	last.metadata.step = 3;
	must_hold(scratch_path("file"), &last);
	for (int i = 0; i < 4; i++)
		ioshape_save_free(saves[i]);
	sample_free(&last);
}
END_TEST

START_TEST(saves_to_other_paths_do_not_wait)
{
	struct ioshape_save *first, *second;
	struct gate gate;

	first = begin_gated(&gate, IOSHAPE_PHASE_SYNC, scratch_path("first"));
	sem_wait(&gate.reached);
	second = begin(scratch_path("second"), &sample, NULL);
	ck_assert_int_eq(ioshape_save_wait(second, 20000), 0);
	ck_assert_int_eq(ioshape_save_tensors(context, scratch_path("third"), sample.tensors,
					      sample.count, NULL),
			 0);
	ck_assert_int_eq(ioshape_save_poll(first), 0);
	sem_post(&gate.opened);
	ck_assert_int_eq(ioshape_save_wait(first, -1), 0);
	ioshape_save_free(first);
	ioshape_save_free(second);
}
END_TEST

START_TEST(a_save_that_waits_for_its_turn_can_be_dropped)
{
	struct ioshape_save *first, *second, *third;
	struct gate gate;

	first = begin_gated(&gate, IOSHAPE_PHASE_SYNC, scratch_path("file"));
	sem_wait(&gate.reached);
	second = begin(scratch_path("file"), &sample, NULL);
	third = begin(scratch_path("file"), &sample, NULL);
	usleep(30000);
	ioshape_save_free(second); /* does not wait for the first */
	ck_assert_uint_eq(scratch_temporaries(scratch_directory()), 2);
	sem_post(&gate.opened);
	ck_assert_int_eq(ioshape_save_wait(first, -1), 0);
	ck_assert_int_eq(ioshape_save_wait(third, -1), 0);
	ioshape_save_free(first);
	ioshape_save_free(third);
}
END_TEST

/* ---- Staging memory -------------------------------------------------------------------------- */

START_TEST(a_full_stage_refuses_when_told_to)
{
	struct ioshape_save *first, *second;
	struct gate gate;
	int ret;

	ioshape_context_free(context);
	context = open_with(16 * MIB, IOSHAPE_STAGING_REFUSE);
	first = begin_gated(&gate, IOSHAPE_PHASE_WRITE, scratch_path("first"));
	sem_wait(&gate.reached);
	ret = ioshape_save_tensors_async(context, scratch_path("second"), sample.tensors,
					 sample.count, NULL, &second);
	ck_assert_int_eq(ret, -EAGAIN);
	ck_assert_ptr_null(second);
	ck_assert_ptr_nonnull(strstr(ioshape_context_message(context), "staging_bytes"));
	ck_assert(!is_there(scratch_path("second")));
	sem_post(&gate.opened);
	ck_assert_int_eq(ioshape_save_wait(first, -1), 0);
	/* As soon as a save has ended its memory is free. */
	for (int i = 0; i < 20; i++) {
		second = begin(scratch_path("second"), &sample, NULL);
		ck_assert_int_eq(ioshape_save_wait(second, -1), 0);
		ioshape_save_free(second);
	}
	ioshape_save_free(first);
}
END_TEST

static void *open_gate_later(void *gate)
{
	usleep(200000);
	sem_post(&((struct gate *)gate)->opened);
	return NULL;
}

START_TEST(a_full_stage_is_waited_for_otherwise)
{
	struct ioshape_save *first, *second;
	pthread_t opener;
	struct gate gate;
	double began;

	ioshape_context_free(context);
	context = open_with(16 * MIB, IOSHAPE_STAGING_WAIT);
	first = begin_gated(&gate, IOSHAPE_PHASE_WRITE, scratch_path("first"));
	sem_wait(&gate.reached);
	pthread_create(&opener, NULL, open_gate_later, &gate);
	began = now();
	second = begin(scratch_path("second"), &sample, NULL);
	ck_assert_double_gt(now() - began, 0.1);
	pthread_join(opener, NULL);
	ck_assert_int_eq(ioshape_save_wait(second, -1), 0);
	ck_assert_int_eq(ioshape_save_wait(first, -1), 0);
	ioshape_save_free(first);
	ioshape_save_free(second);
}
END_TEST

START_TEST(a_checkpoint_larger_than_the_stage_passes_through_it)
{
	struct ioshape_save_options options;
	struct ioshape_save *save;
	struct sample large;

	/* Two chunks of staging memory for five of tensors. */
	sample_make(&large, 5, 70 * MIB);
	options = with_metadata(&large);
	ioshape_context_free(context);
	context = open_with(32 * MIB, _i ? IOSHAPE_STAGING_REFUSE : IOSHAPE_STAGING_WAIT);
	save = begin(scratch_path("file"), &large, &options);
	sample_spoil(&large);
	ck_assert_int_eq(ioshape_save_wait(save, -1), 0);
	ioshape_save_free(save);
	must_hold(scratch_path("file"), &large);
	sample_free(&large);
}
END_TEST

START_TEST(a_large_save_that_fails_early_does_not_hang)
{
	struct ioshape_save *save;
	struct sample large;

	sample_make(&large, 5, 70 * MIB);
	ioshape_context_free(context);
	context = open_with(32 * MIB, IOSHAPE_STAGING_WAIT);
	save = begin("/dev/full", &large, NULL);
	ck_assert_int_eq(ioshape_save_wait(save, -1), -ENOSPC);
	ioshape_save_free(save);
	save = begin(scratch_path("missing/file"), &large, NULL);
	ck_assert_int_eq(ioshape_save_wait(save, -1), -ENOENT);
	ioshape_save_free(save);
	/* And all of the memory is there again. */
	save = begin(scratch_path("file"), &large, NULL);
	ck_assert_int_eq(ioshape_save_wait(save, -1), 0);
	ioshape_save_free(save);
	sample_free(&large);
}
END_TEST

/* ---- The end of saves ------------------------------------------------------------------------ */

static const enum ioshape_phase gated_phases[] = { IOSHAPE_PHASE_PLAN, IOSHAPE_PHASE_WRITE,
						   IOSHAPE_PHASE_SYNC };

START_TEST(a_save_dropped_on_its_way_leaves_nothing)
{
	struct ioshape_save *save;
	pthread_t opener;
	struct gate gate;

	scratch_write(scratch_path("file"), "old", 3);
	save = begin_gated(&gate, gated_phases[_i], scratch_path("file"));
	sem_wait(&gate.reached);
	pthread_create(&opener, NULL, open_gate_later, &gate);
	ioshape_save_free(save); /* waits until its thread has ended */
	ck_assert(scratch_same(scratch_path("file"), "old", 3));
	ck_assert_uint_eq(scratch_entries(scratch_directory()), 1);
	pthread_join(opener, NULL);
}
END_TEST

START_TEST(a_save_dropped_at_any_time_leaves_the_old_file_or_the_new)
{
	struct ioshape_save_options options = with_metadata(&sample);

	for (int i = 0; i < 60; i++) {
		struct ioshape_save *save;

		scratch_write(scratch_path("file"), "old", 3);
		save = begin(scratch_path("file"), &sample, &options);
		usleep((useconds_t)(i * 100));
		ioshape_save_free(save);
		ck_assert_uint_eq(scratch_entries(scratch_directory()), 1);
		if (!scratch_same(scratch_path("file"), "old", 3))
			must_hold(scratch_path("file"), &sample);
	}
}
END_TEST

START_TEST(the_end_of_the_context_ends_its_saves)
{
	struct ioshape_save *saves[3];
	pthread_t opener;
	struct gate gate;

	saves[0] = begin_gated(&gate, gated_phases[_i], scratch_path("first"));
	saves[1] = begin(scratch_path("first"), &sample, NULL);
	saves[2] = begin(scratch_path("second"), &sample, NULL);
	sem_wait(&gate.reached);
	ck_assert_int_eq(ioshape_save_wait(saves[2], -1), 0);
	pthread_create(&opener, NULL, open_gate_later, &gate);
	ioshape_context_free(context);
	context = NULL;
	pthread_join(opener, NULL);
	ck_assert(!is_there(scratch_path("first")));
	ck_assert(is_there(scratch_path("second")));
	ck_assert_uint_eq(scratch_entries(scratch_directory()), 1);
	for (int i = 0; i < 3; i++)
		ioshape_save_free(saves[i]);
}
END_TEST

/* ---- Progress -------------------------------------------------------------------------------- */

struct told {
	atomic_uint calls;
	unsigned stop_at;
	atomic_uint phases; /* a bit for each that was told */
	atomic_bool stopped;
};

static int stop_at_nth(void *user, enum ioshape_phase phase, uint64_t done, uint64_t total)
{
	struct told *told = user;
	unsigned call = atomic_fetch_add(&told->calls, 1) + 1;

	(void)done;
	(void)total;
	atomic_fetch_or(&told->phases, 1u << phase);
	if (call != told->stop_at)
		return 0;
	if (phase < IOSHAPE_PHASE_COMMIT)
		atomic_store(&told->stopped, true);
	return 1;
}

static int run_telling(struct told *told, const struct sample *of)
{
	struct ioshape_save_options options = with_metadata(of);
	struct ioshape_save *save;
	int ret;

	options.progress = stop_at_nth;
	options.progress_user = told;
	ret = ioshape_save_tensors_async(context, scratch_path("file"), of->tensors, of->count,
					 &options, &save);
	if (ret) {
		ck_assert_ptr_null(save);
		return ret;
	}
	ret = ioshape_save_wait(save, -1);
	ioshape_save_free(save);
	return ret;
}

/* Each call in turn stops the save, whether that call comes from the caller's thread or from the
 * save's. */
static void stop_everywhere(const struct sample *of, unsigned step)
{
	struct told told = { 0 };

	for (unsigned nth = 1;; nth += step) {
		int ret;

		scratch_write(scratch_path("file"), "old", 3);
		memset(&told, 0, sizeof(told));
		told.stop_at = nth;
		ret = run_telling(&told, of);
		if (atomic_load(&told.calls) < nth)
			break;
		ck_assert_uint_eq(scratch_entries(scratch_directory()), 1);
		if (atomic_load(&told.stopped)) {
			ck_assert_int_eq(ret, -ECANCELED);
			ck_assert_msg(scratch_same(scratch_path("file"), "old", 3),
				      "stopped at call %u, and the old file is gone", nth);
		} else {
			ck_assert_int_eq(ret, 0);
			must_hold(scratch_path("file"), of);
		}
	}
	ck_assert_uint_eq(atomic_load(&told.phases),
			  1u << IOSHAPE_PHASE_STAGE | 1u << IOSHAPE_PHASE_PLAN |
				  1u << IOSHAPE_PHASE_WRITE | 1u << IOSHAPE_PHASE_SYNC |
				  1u << IOSHAPE_PHASE_COMMIT | 1u << IOSHAPE_PHASE_DONE);
}

START_TEST(the_callback_can_stop_a_save_at_every_call)
{
	stop_everywhere(&sample, 1);
}
END_TEST

/* Told that all is staged, it thinks about it for so long that the writer could be through. */
static int stop_when_all_is_staged(void *user, enum ioshape_phase phase, uint64_t done,
				   uint64_t total)
{
	(void)user;
	if (phase != IOSHAPE_PHASE_STAGE || done != total)
		return 0;
	usleep(300000);
	return 1;
}

START_TEST(the_last_word_about_staging_comes_before_the_file_is_in_place)
{
	struct ioshape_save_options options;
	struct ioshape_save *save;
	struct sample large;

	sample_make(&large, 5, 40 * MIB);
	options = with_metadata(&large);
	options.progress = stop_when_all_is_staged;
	options.no_sync = 1;
	ioshape_context_free(context);
	copy_threads = 1; /* so that the caller's own thread stages the last of it */
	context = open_with(32 * MIB, IOSHAPE_STAGING_WAIT);
	scratch_write(scratch_path("file"), "old", 3);
	ck_assert_int_eq(ioshape_save_tensors_async(context, scratch_path("file"), large.tensors,
						    large.count, &options, &save),
			 -ECANCELED);
	ck_assert_ptr_null(save);
	ck_assert(scratch_same(scratch_path("file"), "old", 3));
	ck_assert_uint_eq(scratch_entries(scratch_directory()), 1);
	sample_free(&large);
}
END_TEST

START_TEST(the_callback_can_stop_a_save_larger_than_the_stage)
{
	struct sample large;

	sample_make(&large, 5, 50 * MIB);
	ioshape_context_free(context);
	context = open_with(32 * MIB, IOSHAPE_STAGING_WAIT);
	stop_everywhere(&large, scratch_long() ? 1 : 29);
	sample_free(&large);
}
END_TEST

int main(void)
{
	Suite *suite = suite_create("api/async");
	TCase *caller = tcase_create("caller"), *order = tcase_create("order");
	TCase *staging = tcase_create("staging"), *ends = tcase_create("ends");
	TCase *progress = tcase_create("progress");
	TCase *all[] = { caller, order, staging, ends, progress };

	for (size_t i = 0; i < sizeof(all) / sizeof(all[0]); i++) {
		tcase_add_checked_fixture(all[i], setup, teardown);
		tcase_set_timeout(all[i], scratch_long() ? 600 : 60);
		suite_add_tcase(suite, all[i]);
	}
	tcase_add_test(caller, tensors_may_change_as_soon_as_the_call_returns);
	tcase_add_test(caller, a_save_under_way_says_so);
	tcase_add_test(caller, waiting_ends_when_the_time_is_up);
	tcase_add_test(caller, several_threads_can_wait_for_one_save);
	tcase_add_test(caller, a_failure_in_the_background_is_told_by_the_handle);
	tcase_add_test(caller, a_report_in_the_options_is_refused);
	tcase_add_test(order, saves_to_one_path_take_their_places_in_the_order_of_the_calls);
	tcase_add_test(order, saves_to_other_paths_do_not_wait);
	tcase_add_test(order, a_save_that_waits_for_its_turn_can_be_dropped);
	tcase_add_test(staging, a_full_stage_refuses_when_told_to);
	tcase_add_test(staging, a_full_stage_is_waited_for_otherwise);
	tcase_add_loop_test(staging, a_checkpoint_larger_than_the_stage_passes_through_it, 0, 2);
	tcase_add_test(staging, a_large_save_that_fails_early_does_not_hang);
	tcase_add_loop_test(ends, a_save_dropped_on_its_way_leaves_nothing, 0, 3);
	tcase_add_test(ends, a_save_dropped_at_any_time_leaves_the_old_file_or_the_new);
	tcase_add_loop_test(ends, the_end_of_the_context_ends_its_saves, 0, 3);
	tcase_add_test(progress, the_callback_can_stop_a_save_at_every_call);
	tcase_add_test(progress, the_last_word_about_staging_comes_before_the_file_is_in_place);
	tcase_add_test(progress, the_callback_can_stop_a_save_larger_than_the_stage);
	return check_main(suite);
}
