/* SPDX-License-Identifier: Apache-2.0 */
/* Background saves: the staging memory that they use, and how they are stopped. */
#define _GNU_SOURCE
#include "support/async_case.h"
#include "support/check_main.h"
#include "support/one_core.h"

#include <errno.h>
#include <pthread.h>
#include <stdio.h>
#include <string.h>

/* ---- Staging memory -------------------------------------------------------------------------- */

struct late {
	char path[512];
	const struct sample *of;
	atomic_bool begun;
};

static void *save_late(void *argument)
{
	struct late *late = argument;
	struct ioshape_save *save;
	int ret = ioshape_save_tensors(context, late->path, late->of->tensors, late->of->count,
				       NULL, &save);

	atomic_store(&late->begun, true);
	return ret || end(save) ? late : NULL;
}

/* Otherwise small saves could delay a large one forever. */
static struct test_case staging = { .name = "staging",
				    .setup = async_setup,
				    .teardown = async_teardown };

TEST(staging, who_waits_for_room_is_not_overtaken)
{
	struct sample large;
	struct late late[2] = { { .of = &large }, { .of = &sample } };
	struct ioshape_save *first;
	pthread_t threads[2];
	struct gate gate;
	void *failure;

	/* Two chunks: the first save holds one, and the large one needs both. */
	sample_make(&large, 5, 20 * MIB);
	ioshape_context_free(context);
	context = open_with(32 * MIB);
	first = begin_gated(&gate, IOSHAPE_PHASE_WRITE, scratch_path("first"));
	for (int i = 0; i < 2; i++) {
		snprintf(late[i].path, sizeof(late[i].path), "%s",
			 scratch_path(i ? "small" : "large"));
		pthread_create(&threads[i], NULL, save_late, &late[i]);
		usleep(200000);
	}
	ck_assert(!atomic_load(&late[0].begun));
	ck_assert(!atomic_load(&late[1].begun));
	sem_post(&gate.opened);
	for (int i = 0; i < 2; i++) {
		pthread_join(threads[i], &failure);
		ck_assert_ptr_null(failure);
	}
	ck_assert_int_eq(end(first), 0);
	sample_free(&large);
}

static int stop_waiting(void *user, enum ioshape_phase phase, uint64_t done, uint64_t total)
{
	int *calls = user;

	(void)done, (void)total;
	ck_assert_int_eq(phase, IOSHAPE_PHASE_STAGE);
	return ++*calls == 2;
}

TEST(staging, who_waits_for_room_can_be_told_to_stop)
{
	struct ioshape_save_options options = IOSHAPE_SAVE_OPTIONS_INIT;
	struct ioshape_save *first, *second = NULL, *third;
	struct gate gate;
	int calls = 0;

	ioshape_context_free(context);
	context = open_with(16 * MIB);
	first = begin_gated(&gate, IOSHAPE_PHASE_WRITE, scratch_path("first"));
	options.progress = stop_waiting;
	options.progress_user = &calls;
	ck_assert_int_eq(ioshape_save_tensors(context, scratch_path("second"), sample.tensors,
					      sample.count, &options, &second),
			 -ECANCELED);
	ck_assert_ptr_null(second);
	ck_assert_int_eq(calls, 2);
	/* The next save does not wait behind the stopped one. */
	sem_post(&gate.opened);
	third = begin(scratch_path("third"), &sample, NULL);
	ck_assert_int_eq(end(third), 0);
	ck_assert_int_eq(end(first), 0);
	ck_assert(!is_there(scratch_path("second")));
}

LOOP_TEST(staging, a_save_that_is_canceled_leaves_the_old_file, 0, 2)
{
	struct ioshape_save *save, *next;
	struct gate gate;

	scratch_write(scratch_path("file"), "old", 3);
	save = begin_gated(&gate, _i ? IOSHAPE_PHASE_WRITE : IOSHAPE_PHASE_PLAN,
			   scratch_path("file"));
	/* This save waits for the first one's commit. */
	next = begin(scratch_path("file"), &sample, NULL);
	ck_assert_int_eq(ioshape_save_cancel(next), 0);
	ck_assert_int_eq(ioshape_save_wait(next, -1), -ECANCELED);
	ck_assert_int_eq(ioshape_save_cancel(save), 0);
	ck_assert_int_eq(ioshape_save_wait(save, 0), -EINPROGRESS);
	sem_post(&gate.opened);
	ck_assert_int_eq(ioshape_save_wait(save, -1), -ECANCELED);
	ck_assert_int_eq(ioshape_save_cancel(save), 0);
	ck_assert_int_eq(ioshape_save_wait(save, -1), -ECANCELED);
	ck_assert(scratch_same(scratch_path("file"), "old", 3));
	ck_assert_uint_eq(scratch_entries(scratch_directory()), 1);
	ioshape_save_free(save);
	ioshape_save_free(next);
	ck_assert_int_eq(ioshape_save_cancel(NULL), -EINVAL);
}

TEST(staging, a_checkpoint_larger_than_the_stage_passes_through_it)
{
	struct ioshape_save_options options;
	struct ioshape_save *save;
	struct sample large;

	/* Five chunks of tensors pass through two chunks of staging memory. */
	sample_make(&large, 5, 70 * MIB);
	options = with_metadata(&large);
	ioshape_context_free(context);
	context = open_with(32 * MIB);
	save = begin(scratch_path("file"), &large, &options);
	sample_spoil(&large);
	ck_assert_int_eq(end(save), 0);
	must_hold(scratch_path("file"), &large);
	sample_free(&large);
}

TEST(staging, a_large_save_that_fails_early_does_not_hang)
{
	struct ioshape_save *save;
	struct sample large;

	sample_make(&large, 5, 70 * MIB);
	ioshape_context_free(context);
	context = open_with(32 * MIB);
	save = begin("/dev/full", &large, NULL);
	ck_assert_int_eq(end(save), -ENOSPC);
	save = begin(scratch_path("missing/file"), &large, NULL);
	ck_assert_int_eq(end(save), -ENOENT);
	/* All staging memory is free again. */
	save = begin(scratch_path("file"), &large, NULL);
	ck_assert_int_eq(end(save), 0);
	sample_free(&large);
}

/* ---- Progress -------------------------------------------------------------------------------- */

struct told {
	atomic_uint calls;
	unsigned stop_at;
	atomic_uint phases; /* a bit for each reported phase */
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
	ret = ioshape_save_tensors(context, scratch_path("file"), of->tensors, of->count, &options,
				   &save);
	if (ret) {
		ck_assert_ptr_null(save);
		return ret;
	}
	ret = ioshape_save_wait(save, -1);
	ioshape_save_free(save);
	return ret;
}

/* Stops the save at each progress call in turn, in the caller's thread and in the save's. */
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

TEST(staging, the_callback_can_stop_a_save_at_every_call)
{
	stop_everywhere(&sample, 1);
}

/* Stops the save at the end of staging, after a pause in which the writer could finish. */
static int stop_when_all_is_staged(void *user, enum ioshape_phase phase, uint64_t done,
				   uint64_t total)
{
	(void)user;
	if (phase != IOSHAPE_PHASE_STAGE || done != total)
		return 0;
	usleep(300000);
	return 1;
}

TEST(staging, the_last_word_about_staging_comes_before_the_file_is_in_place)
{
	struct ioshape_save_options options;
	struct ioshape_save *save;
	struct sample large;

	sample_make(&large, 5, 40 * MIB);
	options = with_metadata(&large);
	options.progress = stop_when_all_is_staged;
	options.sync = IOSHAPE_OFF;
	ioshape_context_free(context);
	keep_to_one_core(); /* so that the caller's own thread stages the last bytes */
	context = open_with(32 * MIB);
	scratch_write(scratch_path("file"), "old", 3);
	ck_assert_int_eq(ioshape_save_tensors(context, scratch_path("file"), large.tensors,
					      large.count, &options, &save),
			 -ECANCELED);
	ck_assert_ptr_null(save);
	ck_assert(scratch_same(scratch_path("file"), "old", 3));
	ck_assert_uint_eq(scratch_entries(scratch_directory()), 1);
	sample_free(&large);
}

TEST(staging, the_callback_can_stop_a_save_larger_than_the_stage)
{
	struct sample large;

	sample_make(&large, 5, 50 * MIB);
	ioshape_context_free(context);
	context = open_with(32 * MIB);
	stop_everywhere(&large, scratch_long() ? 1 : 29);
	sample_free(&large);
}
