/* SPDX-License-Identifier: Apache-2.0 */
/* Background saves: what the caller may do meanwhile, and how they end. */
#define _GNU_SOURCE
#include "support/async_case.h"
#include "support/check_main.h"

#include <errno.h>
#include <pthread.h>
#include <stdio.h>
#include <string.h>

/* ---- What the caller may do ------------------------------------------------------------------ */

static struct test_case async_tests = { .name = "async",
					.setup = async_setup,
					.teardown = async_teardown };

TEST(async_tests, tensors_may_change_as_soon_as_the_call_returns)
{
	struct ioshape_save_options options = with_metadata(&sample);
	struct ioshape_metadata metadata = sample.metadata;
	struct ioshape_tensor tensors[SAMPLE_TENSORS];
	char path[512], names[SAMPLE_TENSORS][64];
	struct ioshape_save *save;

	/*
	 * Every argument is overwritten after the call: arrays, names, path, options and metadata.
	 */
	memcpy(tensors, sample.tensors, sizeof(tensors));
	for (size_t i = 0; i < sample.count; i++) {
		snprintf(names[i], sizeof(names[i]), "%s", sample.tensors[i].name);
		tensors[i].name = names[i];
	}
	snprintf(path, sizeof(path), "%s", scratch_path("file"));
	options.metadata = &metadata;
	ck_assert_int_eq(
		ioshape_save_tensors(context, path, tensors, sample.count, &options, &save), 0);
	memset(tensors, 0xff, sizeof(tensors));
	memset(names, 0xff, sizeof(names));
	memset(path, 0xff, sizeof(path));
	memset(&options, 0xff, sizeof(options));
	memset(&metadata, 0xff, sizeof(metadata));
	sample_spoil(&sample);
	ck_assert_int_eq(end(save), 0);
	must_hold(scratch_path("file"), &sample);
}

TEST(async_tests, a_save_under_way_says_so)
{
	struct ioshape_report report = IOSHAPE_REPORT_INIT;
	struct ioshape_save *save;
	struct gate gate;

	save = begin_gated(&gate, IOSHAPE_PHASE_SYNC, scratch_path("file"));
	ck_assert_int_eq(ioshape_save_wait(save, 0), -EINPROGRESS);
	ck_assert_int_eq(ioshape_save_get_report(save, &report), -EINPROGRESS);
	ck_assert(!is_there(scratch_path("file")));
	sem_post(&gate.opened);
	ck_assert_int_eq(ioshape_save_wait(save, -1), 0);
	ck_assert_int_eq(ioshape_save_wait(save, 0), 0);
	ck_assert_int_eq(ioshape_save_get_report(save, &report), 0);
	ck_assert_uint_ge(report.file_bytes, sample.total_bytes);
	ck_assert_double_gt(report.total_s, 0);
	ck_assert_double_ge(report.total_s, report.sync_s);
	ioshape_save_free(save);
	must_hold(scratch_path("file"), &sample);
}

TEST(async_tests, waiting_ends_when_the_time_is_up)
{
	static const int64_t times[] = { 0, 1, 50, 1100 };
	struct ioshape_save *save;
	struct gate gate;

	save = begin_gated(&gate, IOSHAPE_PHASE_SYNC, scratch_path("file"));
	for (size_t i = 0; i < sizeof(times) / sizeof(times[0]); i++) {
		double began = now(), wanted = (double)times[i] / 1000;

		ck_assert_int_eq(ioshape_save_wait(save, times[i]), -EINPROGRESS);
		ck_assert_double_ge(now() - began, wanted);
		ck_assert_double_lt(now() - began, wanted + 1);
	}
	sem_post(&gate.opened);
	ck_assert_int_eq(ioshape_save_wait(save, INT64_MAX), 0);
	ck_assert_int_eq(ioshape_save_wait(save, INT64_MIN), 0);
	ioshape_save_free(save);
}

static void *wait_for_it(void *save)
{
	return ioshape_save_wait(save, -1) ? save : NULL;
}

TEST(async_tests, several_threads_can_wait_for_one_save)
{
	pthread_t threads[4];
	struct ioshape_save *save;
	struct gate gate;
	void *failure;

	save = begin_gated(&gate, IOSHAPE_PHASE_WRITE, scratch_path("file"));
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

TEST(async_tests, a_failure_in_the_background_is_told_by_the_handle)
{
	struct ioshape_save_options options = with_metadata(&sample);
	struct ioshape_report report = IOSHAPE_REPORT_INIT;
	struct ioshape_save *save;

	scratch_write(scratch_path("file"), "old", 3);
	options.replace = IOSHAPE_OFF;
	save = begin(scratch_path("file"), &sample, &options);
	ck_assert_int_eq(ioshape_save_wait(save, -1), -EEXIST);
	ck_assert_int_eq(ioshape_save_wait(save, 0), -EEXIST);
	ck_assert_str_eq(ioshape_last_error()->path, scratch_path("file"));
	ck_assert_int_eq(ioshape_save_get_report(save, &report), 0);
	ioshape_save_free(save);
	ck_assert(scratch_same(scratch_path("file"), "old", 3));
	save = begin("/dev/full", &sample, NULL);
	ck_assert_int_eq(ioshape_save_wait(save, -1), -ENOSPC);
	ioshape_save_free(save);
}

/* ---- Order of saves to one path -------------------------------------------------------------- */

/*
 * The first save stops before its commit. The later ones finish sooner and wait for it. Each holds
 * one of the four chunks of staging memory meanwhile.
 */
TEST(async_tests, saves_to_one_path_take_their_places_in_the_order_of_the_calls)
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
	usleep(50000);
	for (int i = 0; i < 4; i++)
		ck_assert_int_eq(ioshape_save_wait(saves[i], 0), -EINPROGRESS);
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

TEST(async_tests, saves_to_other_paths_do_not_wait)
{
	struct ioshape_save *first, *second;
	struct gate gate;

	first = begin_gated(&gate, IOSHAPE_PHASE_SYNC, scratch_path("first"));
	second = begin(scratch_path("second"), &sample, NULL);
	ck_assert_int_eq(ioshape_save_wait(second, 20000), 0);
	ck_assert_int_eq(sample_save(context, scratch_path("third"), &sample, NULL), 0);
	ck_assert_int_eq(ioshape_save_wait(first, 0), -EINPROGRESS);
	sem_post(&gate.opened);
	ck_assert_int_eq(end(first), 0);
	ioshape_save_free(second);
}

TEST(async_tests, a_save_that_waits_for_its_turn_can_be_dropped)
{
	struct ioshape_save *first, *second, *third;
	struct gate gate;

	first = begin_gated(&gate, IOSHAPE_PHASE_SYNC, scratch_path("file"));
	second = begin(scratch_path("file"), &sample, NULL);
	third = begin(scratch_path("file"), &sample, NULL);
	usleep(30000);
	ioshape_save_free(second); /* does not wait for the first save */
	ck_assert_uint_eq(scratch_temporaries(scratch_directory()), 2);
	sem_post(&gate.opened);
	ck_assert_int_eq(end(first), 0);
	ck_assert_int_eq(end(third), 0);
}

/* ---- How saves end --------------------------------------------------------------------------- */

static const enum ioshape_phase gated_phases[] = { IOSHAPE_PHASE_PLAN, IOSHAPE_PHASE_WRITE,
						   IOSHAPE_PHASE_SYNC };

LOOP_TEST(async_tests, a_save_dropped_on_its_way_leaves_nothing, 0, 3)
{
	struct ioshape_save *save;
	pthread_t opener;
	struct gate gate;

	scratch_write(scratch_path("file"), "old", 3);
	save = begin_gated(&gate, gated_phases[_i], scratch_path("file"));
	pthread_create(&opener, NULL, gate_open_later, &gate);
	ioshape_save_free(save); /* waits until the save's thread has ended */
	ck_assert(scratch_same(scratch_path("file"), "old", 3));
	ck_assert_uint_eq(scratch_entries(scratch_directory()), 1);
	pthread_join(opener, NULL);
}

TEST(async_tests, a_save_dropped_at_any_time_leaves_the_old_file_or_the_new)
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

LOOP_TEST(async_tests, the_end_of_the_context_ends_its_saves, 0, 3)
{
	struct ioshape_save *saves[3];
	pthread_t opener;
	struct gate gate;

	saves[0] = begin_gated(&gate, gated_phases[_i], scratch_path("first"));
	saves[1] = begin(scratch_path("first"), &sample, NULL);
	saves[2] = begin(scratch_path("second"), &sample, NULL);
	ck_assert_int_eq(ioshape_save_wait(saves[2], -1), 0);
	pthread_create(&opener, NULL, gate_open_later, &gate);
	ioshape_context_free(context);
	context = NULL;
	pthread_join(opener, NULL);
	ck_assert(!is_there(scratch_path("first")));
	ck_assert(is_there(scratch_path("second")));
	ck_assert_uint_eq(scratch_entries(scratch_directory()), 1);
	for (int i = 0; i < 3; i++)
		ioshape_save_free(saves[i]);
}
