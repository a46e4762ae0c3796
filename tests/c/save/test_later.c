/* SPDX-License-Identifier: Apache-2.0 */
/* Records that are copied after the call has returned. */
#define _GNU_SOURCE
#include "internal.h"
#include "support/check_main.h"
#include "support/random.h"
#include "support/scratch.h"

#include <ioshape/ioshape.h>

#include <errno.h>
#include <pthread.h>
#include <sched.h>
#include <semaphore.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define MIB ((size_t)1 << 20)
#define LARGE (34 * MIB + 12345) /* more than the least staging memory */
#define COUNT 5

static struct ioshape_context *context;
static uint8_t *large;      /* of the record that is copied later */
static uint8_t now[300000]; /* of the records that are copied during the call */
/* Copies from before the call. */
static uint8_t *large_kept, kept[sizeof(now)];
static sem_t reached, opened;
static struct ioshape_save_options how;

static void open_context(uint64_t staging_bytes)
{
	struct ioshape_context_options options = IOSHAPE_CONTEXT_OPTIONS_INIT;

	options.staging_bytes = staging_bytes;
	ck_assert_int_eq(ioshape_context_open(&context, &options), 0);
}

static void setup(void)
{
	uint64_t seed = 1;

	scratch_setup();
	large = malloc(LARGE);
	large_kept = malloc(LARGE);
	ck_assert(large && large_kept);
	test_random_fill(&seed, large, LARGE);
	memcpy(large_kept, large, LARGE);
	test_random_fill(&seed, now, sizeof(now));
	memcpy(kept, now, sizeof(now));
	how = (struct ioshape_save_options)IOSHAPE_SAVE_OPTIONS_INIT;
	sem_init(&reached, 0, 0);
	sem_init(&opened, 0, 0);
	open_context(256 * MIB);
}

static void teardown(void)
{
	ioshape_context_free(context);
	ck_assert_uint_eq(scratch_temporaries(scratch_directory()), 0);
	free(large);
	free(large_kept);
	scratch_teardown();
}

static struct test_case later = { .name = "later", .setup = setup, .teardown = teardown };

/* Stops until the gate is opened. */
static int fetch_at_gate(void *user, uint64_t offset, void *into, size_t bytes)
{
	(void)user;
	if (!offset) {
		sem_post(&reached);
		sem_wait(&opened);
	}
	memset(into, 'f', bytes);
	return 0;
}

/* Begins a save. If `gated`, copying stops at a record before the large one. */
static int begin(const char *path, bool gated, struct ioshape_save **save)
{
	struct ioshape_record records[COUNT] = {
		{ .name = "data.pkl", .data = now, .bytes = 1000 },
		{ .name = "data/0", .data = now, .bytes = sizeof(now) },
		{ .name = "data/1", .bytes = gated ? MIB : 0 },
		{ .name = "data/2", .data = large, .bytes = LARGE },
		{ .name = "version", .data = now, .bytes = 2 },
	};

	static const uint8_t is_later[COUNT] = { 0, 0, 1, 1, 0 };

	if (gated)
		records[2].fetch = fetch_at_gate;
	return save_records_lazily(context, path, records, is_later, COUNT, &how, save);
}

/* Checks that the file has the contents from the time of the call. */
static void check_file(const char *path)
{
	struct ioshape_reader *reader;
	uint8_t *read = malloc(LARGE);
	uint64_t at;

	ck_assert_ptr_nonnull(read);
	ck_assert_int_eq(ioshape_reader_open(context, path, NULL, &reader), 0);
	ck_assert_int_eq(ioshape_reader_find_record(reader, "data/2", &at), 0);
	ck_assert_int_eq(ioshape_reader_read(reader, at, 0, read, LARGE), 0);
	ck_assert_mem_eq(read, large_kept, LARGE);
	ck_assert_int_eq(ioshape_reader_find_record(reader, "data/0", &at), 0);
	ck_assert_int_eq(ioshape_reader_read(reader, at, 0, read, sizeof(now)), 0);
	ck_assert_mem_eq(read, kept, sizeof(now));
	ioshape_reader_free(reader);
	free(read);
}

TEST(later, what_is_copied_later_may_change_when_it_is_copied)
{
	const char *path = strdupa(scratch_path("file"));
	struct ioshape_save *save;

	for (int i = 0; i < 4; i++) {
		ck_assert_int_eq(begin(path, false, &save), 0);
		memset(now, 0xff, sizeof(now));
		ck_assert_int_eq(save_wait_copied(save), 0);
		memset(large, 0xff, LARGE);
		ck_assert_int_eq(save_wait_copied(save), 0);
		ck_assert_int_eq(ioshape_save_wait(save, -1), 0);
		ck_assert_int_eq(save_wait_copied(save), 0);
		ioshape_save_free(save);
		check_file(path);
		memcpy(now, kept, sizeof(now));
		memcpy(large, large_kept, LARGE);
	}
}

TEST(later, nobody_need_wait_for_it)
{
	const char *path = strdupa(scratch_path("file"));
	struct ioshape_save *save;

	ck_assert_int_eq(begin(path, false, &save), 0);
	ck_assert_int_eq(ioshape_save_wait(save, -1), 0);
	ioshape_save_free(save);
	check_file(path);
}

static atomic_bool waited;

static void *wait_copied(void *save)
{
	ck_assert_int_eq(save_wait_copied(save), 0);
	atomic_store(&waited, true);
	return NULL;
}

TEST(later, the_call_returns_before_and_waiting_after_it_is_copied)
{
	const char *path = strdupa(scratch_path("file"));
	struct ioshape_save *save;
	pthread_t thread;

	atomic_store(&waited, false);
	ck_assert_int_eq(begin(path, true, &save), 0);
	sem_wait(&reached);
	/* These records were copied during the call. */
	memset(now, 0xff, sizeof(now));
	ck_assert_int_eq(pthread_create(&thread, NULL, wait_copied, save), 0);
	ck_assert_int_eq(ioshape_save_wait(save, 100), -EINPROGRESS);
	ck_assert(!atomic_load(&waited));
	sem_post(&opened);
	pthread_join(thread, NULL);
	memset(large, 0xff, LARGE);
	ck_assert_int_eq(ioshape_save_wait(save, -1), 0);
	ioshape_save_free(save);
	check_file(path);
}

TEST(later, what_changes_too_early_fails_the_save)
{
	const char *path = strdupa(scratch_path("file"));
	struct ioshape_save *save;

	ck_assert_int_eq(begin(path, false, &save), 0);
	ck_assert_int_eq(ioshape_save_wait(save, -1), 0);
	ioshape_save_free(save);
	ck_assert_int_eq(begin(path, true, &save), 0);
	sem_wait(&reached);
	memset(large, 0xff, LARGE);
	sem_post(&opened);
	ck_assert_int_eq(save_wait_copied(save), 0);
	ck_assert_int_eq(ioshape_save_wait(save, -1), IOSHAPE_E_CHANGED);
	ck_assert_str_eq(ioshape_last_error()->record, "data/2");
	ioshape_save_free(save);
	check_file(path);
}

TEST(later, it_can_be_stopped_and_freed_while_it_is_copied)
{
	const char *path = strdupa(scratch_path("file"));
	struct ioshape_save *save;

	ck_assert_int_eq(begin(path, true, &save), 0);
	sem_wait(&reached);
	ck_assert_int_eq(ioshape_save_cancel(save), 0);
	sem_post(&opened);
	ck_assert_int_eq(save_wait_copied(save), 0);
	ck_assert_int_eq(ioshape_save_wait(save, -1), -ECANCELED);
	ioshape_save_free(save);
	ck_assert_int_eq(begin(path, false, &save), 0);
	ioshape_save_free(save);
	/* All staging memory is free again. */
	ck_assert_int_eq(save_reserve(context, 256 * MIB), 0);
}

TEST(later, what_does_not_fit_into_staging_memory_is_copied_in_the_call)
{
	const char *path = strdupa(scratch_path("file"));
	struct ioshape_save *save;

	ioshape_context_free(context);
	open_context(32 * MIB);
	ck_assert_int_eq(begin(path, false, &save), 0);
	memset(large, 0xff, LARGE);
	memset(now, 0xff, sizeof(now));
	ck_assert_int_eq(save_wait_copied(save), 0);
	ck_assert_int_eq(ioshape_save_wait(save, -1), 0);
	ioshape_save_free(save);
	check_file(path);
}

/* ---- Copying threads ------------------------------------------------------------------------- */

static atomic_int leisurely; /* threads that began as background copiers */
static atomic_bool holds;    /* whether these threads stop before they copy anything */

/* Replaces the C library's function, which each background copier calls first. */
int pthread_setschedparam(pthread_t thread, int policy, const struct sched_param *param)
{
	(void)thread;
	(void)policy;
	(void)param;
	atomic_fetch_add(&leisurely, 1);
	if (atomic_load(&holds))
		sem_wait(&opened);
	return 0;
}

/* Opens the gate when other threads have copied all. */
static void *open_when_copied(void *save)
{
	struct ioshape_save_status status = { .size = sizeof(status) };

	do {
		usleep(1000);
		ck_assert_int_eq(ioshape_save_get_status(save, &status, NULL), 0);
	} while (status.done_bytes < status.total_bytes);
	sem_post(&opened);
	return NULL;
}

TEST(later, who_waits_for_its_end_copies_too)
{
	const char *path = strdupa(scratch_path("file"));
	const int64_t timeouts_ms[] = { -1, 100000 };
	struct ioshape_save *save;
	pthread_t thread;

	atomic_store(&holds, true);
	for (size_t i = 0; i < 2; i++) {
		ck_assert_int_eq(begin(path, false, &save), 0);
		ck_assert_int_eq(pthread_create(&thread, NULL, open_when_copied, save), 0);
		ck_assert_int_eq(ioshape_save_wait(save, timeouts_ms[i]), 0);
		pthread_join(thread, NULL);
		ioshape_save_free(save);
		check_file(path);
	}
}

TEST(later, who_waits_until_it_is_copied_does_not_wait_for_a_thread_that_does_not_run)
{
	const char *path = strdupa(scratch_path("file"));
	struct ioshape_save *save;

	atomic_store(&holds, true);
	ck_assert_int_eq(begin(path, false, &save), 0);
	ck_assert_int_eq(save_wait_copied(save), 0);
	memset(large, 0xff, LARGE);
	sem_post(&opened);
	ck_assert_int_eq(ioshape_save_wait(save, -1), 0);
	ioshape_save_free(save);
	check_file(path);
}

TEST(later, with_a_deadline_it_is_not_copied_at_leisure)
{
	const char *path = strdupa(scratch_path("file"));
	struct ioshape_save *save;

	for (int i = 0; i < 2; i++) {
		atomic_store(&leisurely, 0);
		how.deadline_ms = i ? 100000 : 0;
		ck_assert_int_eq(begin(path, false, &save), 0);
		/* A wait without time is only a question, so it does not speed up the copy. */
		while (ioshape_save_wait(save, 0) == -EINPROGRESS)
			usleep(1000);
		ck_assert_int_eq(ioshape_save_wait(save, 0), 0);
		ck_assert_int_eq(atomic_load(&leisurely), !i);
		ioshape_save_free(save);
		check_file(path);
	}
}

TEST(later, what_is_borrowed_is_in_use_until_the_save_has_ended)
{
	const char *path = strdupa(scratch_path("file"));
	struct ioshape_save *save;
	pthread_t thread;

	how.borrow = 1;
	atomic_store(&waited, false);
	ck_assert_int_eq(begin(path, true, &save), 0);
	sem_wait(&reached);
	ck_assert_int_eq(pthread_create(&thread, NULL, wait_copied, save), 0);
	ck_assert_int_eq(ioshape_save_wait(save, 100), -EINPROGRESS);
	ck_assert(!atomic_load(&waited));
	sem_post(&opened);
	pthread_join(thread, NULL);
	ck_assert_int_eq(ioshape_save_wait(save, 0), 0);
	ioshape_save_free(save);
	check_file(path);
}
