/* SPDX-License-Identifier: Apache-2.0 */
/* Saves that wait for slots: their behaviour while they wait, and what they report. */
#define _GNU_SOURCE
#include "support/async_case.h"
#include "support/check_main.h"
#include "support/open_context.h"
#include "support/report_downgrade.h"

#include <ioshape/slots.h>

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

static const uint32_t lease_ms = 2000;
static char address[256];
static struct ioshape_context *other; /* another client of the pool */

static char logged[1024]; /* debug line of the newest file */

static void listen(void *user, enum ioshape_log_level level, const char *message)
{
	(void)user;
	if (level == IOSHAPE_LOG_DEBUG && strstr(message, " engine"))
		snprintf(logged, sizeof(logged), "%s", message);
}

static struct ioshape_context *open_client(const char *job, const char *pool)
{
	struct ioshape_context_options options = IOSHAPE_CONTEXT_OPTIONS_INIT;
	struct ioshape_context *opened;
	int ret;

	options.staging_bytes = 64 * MIB;
	options.coordinator = address;
	options.pool = pool;
	options.job = job;
	options.slots = 1;
	options.log = listen;
	options.log_level = IOSHAPE_LOG_DEBUG;
	ret = open_context_with(&opened, &options,
				(struct test_rules){ .block_bytes = 256 * 1024,
						     .queue_depth = 4,
						     .lease_ms = lease_ms });
	ck_assert_msg(!ret, "%s", ioshape_last_error()->sentence);
	return opened;
}

static void setup(void)
{
	scratch_setup();
	sample_make(&sample, 3, 20 * MIB); /* too large for the small-file bypass */
	snprintf(address, sizeof(address), "local:%s", scratch_directory());
	context = open_client("J", NULL);
	other = open_client("K", NULL);
}

static void teardown(void)
{
	ioshape_context_free(other);
	async_teardown();
}

static struct ioshape_slot *hold(void)
{
	struct ioshape_slot_options options = IOSHAPE_SLOT_OPTIONS_INIT;
	struct ioshape_slot *slot;
	int ret;

	options.path = scratch_path("file");
	ret = ioshape_slot_acquire(other, &options, &slot);
	ck_assert_msg(!ret, "%s", ioshape_last_error()->sentence);
	return slot;
}

/* Returns 1 if the only slot is held or a request waits for it, else 0. */
static int holding(void)
{
	struct ioshape_slot_options options = IOSHAPE_SLOT_OPTIONS_INIT;
	struct ioshape_slot *slot;
	int ret;

	options.path = scratch_path("file");
	options.timeout_ms = -1;
	ret = ioshape_slot_acquire(other, &options, &slot);
	ck_assert(!ret || ret == -EAGAIN);
	ioshape_slot_free(slot);
	return ret == -EAGAIN;
}

static void wait_for_phase(struct ioshape_save *save, enum ioshape_phase expected)
{
	struct ioshape_save_status status = IOSHAPE_SAVE_STATUS_INIT;

	for (int tries = 0; tries < 1000 && status.phase != expected; tries++) {
		ck_assert_int_eq(ioshape_save_get_status(save, &status, NULL), 0);
		usleep(2000);
	}
	ck_assert_int_eq(status.phase, expected);
}

static struct ioshape_report report_of(struct ioshape_save *save)
{
	struct ioshape_report report = IOSHAPE_REPORT_INIT;

	ck_assert_int_eq(ioshape_save_get_report(save, &report), 0);
	return report;
}

struct heard {
	atomic_uint places, waits, plans_before_release;
	atomic_bool released;
	struct ioshape_place last;
};

static int hear_place(void *user, const struct ioshape_place *place)
{
	struct heard *heard = user;

	heard->last = *place;
	heard->places++;
	return 0;
}

static int hear_phase(void *user, enum ioshape_phase phase, uint64_t done_bytes,
		      uint64_t total_bytes)
{
	struct heard *heard = user;

	heard->waits += phase == IOSHAPE_PHASE_WAIT;
	heard->plans_before_release += phase >= IOSHAPE_PHASE_PLAN && !heard->released;
	if (phase == IOSHAPE_PHASE_WAIT)
		ck_assert(done_bytes == 0 && total_bytes > 0);
	return 0;
}

/* ---- Waiting --------------------------------------------------------------------------------- */

static struct test_case all = { .name = "saves in slots", .setup = setup, .teardown = teardown };

TEST(all, a_save_waits_for_its_slot_after_staging_and_before_the_first_byte)
{
	struct ioshape_save_options options = with_metadata(&sample);
	struct ioshape_save_status status = IOSHAPE_SAVE_STATUS_INIT;
	struct ioshape_place place = { .size = sizeof(place) };
	struct heard heard = { .places = 0 };
	struct ioshape_report report;
	struct ioshape_save *save;
	struct ioshape_slot *slot = hold();

	options.progress = hear_phase;
	options.queue = hear_place;
	options.progress_user = options.queue_user = &heard;
	/* The call returns without a slot: training never waits for one. */
	save = begin(scratch_path("file"), &sample, &options);
	wait_for_phase(save, IOSHAPE_PHASE_WAIT);
	for (int tries = 0; tries < 1000 && heard.places < 3; tries++)
		usleep(2000);
	ck_assert_uint_eq(scratch_temporaries(scratch_directory()), 0);
	ck_assert_int_eq(ioshape_save_get_status(save, &status, &place), 0);
	ck_assert_uint_eq(place.position, 0);
	ck_assert_uint_eq(place.capacity, 1);
	ck_assert_str_eq(place.coordinator, "local");
	ck_assert_msg(strstr(place.ahead, "job K, rank 0 on "), "%s", place.ahead);
	ck_assert_double_gt(place.waited_s, 0);
	heard.released = true;
	ioshape_slot_free(slot);
	ck_assert_int_eq(ioshape_save_wait(save, -1), 0);
	ck_assert_uint_eq(heard.plans_before_release, 0);
	ck_assert_uint_ge(heard.waits, 2);
	ck_assert_int_eq(ioshape_save_get_status(save, &status, &place), 0);
	ck_assert_str_eq(place.pool, "");
	report = report_of(save);
	ck_assert_str_eq(report.coordinator, "local");
	ck_assert_msg(strstr(logged, ", capacity 1, write"), "%s", logged);
	ck_assert(report.slot_s >= place.waited_s && report.slot_s <= report.total_s);
	ck_assert_ptr_nonnull(strstr(report.ahead, "job K, rank 0 on "));
	ck_assert_str_eq(report.downgrades[0].sentence, "");
	ioshape_save_free(save);
	must_hold(scratch_path("file"), &sample);
}

TEST(all, a_save_that_waits_can_be_cancelled_and_leaves_the_queue)
{
	struct ioshape_save_options options = with_metadata(&sample);
	struct ioshape_save *save;
	struct ioshape_slot *slot = hold();

	save = begin(scratch_path("file"), &sample, &options);
	wait_for_phase(save, IOSHAPE_PHASE_WAIT);
	ck_assert_int_eq(ioshape_save_cancel(save), 0);
	ck_assert_int_eq(ioshape_save_wait(save, 5000), -ECANCELED);
	ck_assert_str_eq(ioshape_last_error()->path, scratch_path("file"));
	ioshape_save_free(save);
	ck_assert_int_eq(access(scratch_path("file"), F_OK), -1);
	ck_assert_int_eq(holding(), 1);
	ioshape_slot_free(slot);
	ck_assert_int_eq(holding(), 0);
}

TEST(all, freeing_a_context_ends_saves_that_wait)
{
	struct ioshape_save_options options = with_metadata(&sample);
	struct ioshape_slot *slot = hold();
	struct ioshape_save *save;

	save = begin(scratch_path("file"), &sample, &options);
	wait_for_phase(save, IOSHAPE_PHASE_WAIT);
	ioshape_context_free(context);
	ioshape_save_free(save);
	context = open_client("J", NULL);
	ck_assert_int_eq(access(scratch_path("file"), F_OK), -1);
	ioshape_slot_free(slot);
}

static int give_up(void *user, const struct ioshape_place *place)
{
	(void)user;
	return place->waited_s > 0.25;
}

TEST(all, a_blocking_save_can_give_up_waiting)
{
	struct ioshape_report report = IOSHAPE_REPORT_INIT;
	struct ioshape_save_options options = with_metadata(&sample);
	struct ioshape_slot *slot = hold();

	options.queue = give_up;
	options.report = &report;
	ck_assert_int_eq(ioshape_save_tensors(context, scratch_path("file"), sample.tensors,
					      sample.count, &options, NULL),
			 -ECANCELED);
	ioshape_slot_free(slot);
}

/* ---- Deadlines ------------------------------------------------------------------------------- */

static struct ioshape_report save_by(int64_t deadline_ms)
{
	struct ioshape_report report = IOSHAPE_REPORT_INIT;
	struct ioshape_save_options options = with_metadata(&sample);
	int ret;

	options.report = &report;
	options.deadline_ms = deadline_ms;
	ret = ioshape_save_tensors(context, scratch_path("file"), sample.tensors, sample.count,
				   &options, NULL);
	ck_assert_msg(!ret, "%s", ioshape_last_error()->sentence);
	must_hold(scratch_path("file"), &sample);
	return report;
}

TEST(all, a_save_with_a_deadline_goes_before_those_that_wait)
{
	enum { SAVES = 8 };
	struct ioshape_save_options options = with_metadata(&sample);
	struct ioshape_slot *slot = hold();
	struct ioshape_save *saves[SAVES];
	struct ioshape_report report;
	char name[16];

	options.borrow = 1;
	for (int i = 0; i < SAVES; i++) {
		snprintf(name, sizeof(name), "file%d", i);
		saves[i] = begin(scratch_path(name), &sample, &options);
		wait_for_phase(saves[i], IOSHAPE_PHASE_WAIT);
	}
	report = save_by(600000);
	ck_assert_double_gt(report.deadline_left_s, 0);
	ck_assert_double_le(report.deadline_left_s + report.total_s, 600.1);
	ck_assert_str_eq(report.coordinator, "local");
	ck_assert_msg(strstr(logged, ", slot "), "%s", logged);
	for (int i = 0; i < SAVES; i++)
		wait_for_phase(saves[i], IOSHAPE_PHASE_WAIT);
	ioshape_slot_free(slot);
	for (int i = 0; i < SAVES; i++) {
		ck_assert_int_eq(ioshape_save_wait(saves[i], -1), 0);
		ck_assert_double_eq(report_of(saves[i]).deadline_left_s, 0);
		ioshape_save_free(saves[i]);
	}
}

TEST(all, a_save_that_is_too_late_is_saved_and_says_so)
{
	struct ioshape_slot_options urgent = IOSHAPE_SLOT_OPTIONS_INIT;
	struct ioshape_slot *slot = hold(), *beside;
	struct ioshape_report report;

	urgent.path = scratch_path("file");
	urgent.deadline_ms = 600000;
	ck_assert_int_eq(ioshape_slot_acquire(other, &urgent, &beside), 0);
	report = save_by(-1);
	ck_assert_double_lt(report.deadline_left_s, 0);
	ck_assert_str_eq(report.coordinator, "deadline");
	ck_assert_int_eq(report.downgrades[0].code, IOSHAPE_DOWNGRADE_SLOT);
	ioshape_slot_free(beside);
	ioshape_slot_free(slot);
}

TEST(all, a_save_with_a_deadline_overtakes_an_earlier_one_to_its_file)
{
	struct ioshape_save_options options = with_metadata(&sample);
	struct ioshape_slot *slot = hold();
	struct ioshape_save *earlier;

	sample.metadata.step = 1;
	earlier = begin(scratch_path("file"), &sample, &options);
	wait_for_phase(earlier, IOSHAPE_PHASE_WAIT);
	sample.metadata.step = 2;
	save_by(600000);
	wait_for_phase(earlier, IOSHAPE_PHASE_WAIT);
	ioshape_slot_free(slot);
	/* The save succeeds without replacing the newer file. */
	ck_assert_int_eq(ioshape_save_wait(earlier, -1), 0);
	ck_assert_int_eq(report_of(earlier).downgrades[0].code, IOSHAPE_DOWNGRADE_OVERTAKEN);
	ioshape_save_free(earlier);
	must_hold(scratch_path("file"), &sample);
	ck_assert_uint_eq(scratch_temporaries(scratch_directory()), 0);
	/* Later saves are not affected. */
	sample.metadata.step = 3;
	ck_assert_uint_eq(save_by(0).downgrade_count, 0);
	must_hold(scratch_path("file"), &sample);
}

TEST(all, a_save_that_fails_reports_its_deadline_too)
{
	struct ioshape_report report = IOSHAPE_REPORT_INIT;
	struct ioshape_save_options options = with_metadata(&sample);

	options.report = &report;
	options.deadline_ms = 600000;
	ck_assert_int_eq(ioshape_save_tensors(context, scratch_path("no/file"), sample.tensors,
					      sample.count, &options, NULL),
			 -ENOENT);
	ck_assert_double_gt(report.deadline_left_s, 0);
}

TEST(all, files_have_deadlines_too)
{
	struct ioshape_file_options file_options = IOSHAPE_FILE_OPTIONS_INIT;
	struct ioshape_report report = IOSHAPE_REPORT_INIT;
	struct ioshape_slot *slot = hold();
	struct ioshape_file *file;

	file_options.deadline_ms = 600000;
	ck_assert_int_eq(ioshape_file_open(context, scratch_path("file"), &file_options, &file), 0);
	ck_assert_int_eq(ioshape_file_commit(file, &report), 0);
	ioshape_file_free(file);
	ck_assert_double_gt(report.deadline_left_s, 0);
	ioshape_slot_free(slot);
}

/* ---- A process never waits for its own slot -------------------------------------------------- */

TEST(all, saves_to_one_path_do_not_wait_for_each_other_in_a_ring)
{
	enum { SAVES = 12 };
	struct ioshape_save_options options = with_metadata(&sample);
	struct ioshape_save *saves[SAVES];

	/*
	 * One slot, and commits in the order of the calls: a later save must not hold the slot
	 * while it waits for an earlier one.
	 */
	for (int i = 0; i < SAVES; i++) {
		sample.metadata.step = i;
		saves[i] = begin(scratch_path("file"), &sample, &options);
	}
	for (int i = 0; i < SAVES; i++) {
		ck_assert_int_eq(ioshape_save_wait(saves[i], 60000), 0);
		ioshape_save_free(saves[i]);
	}
	must_hold(scratch_path("file"), &sample);
}

TEST(all, two_files_can_be_open_at_a_time_in_one_thread)
{
	struct ioshape_file_options options = IOSHAPE_FILE_OPTIONS_INIT;
	struct ioshape_report report = IOSHAPE_REPORT_INIT;
	struct ioshape_file *first, *second;

	ck_assert_int_eq(ioshape_file_open(context, scratch_path("first"), &options, &first), 0);
	ck_assert_int_eq(ioshape_file_open(context, scratch_path("second"), &options, &second), 0);
	ck_assert_int_eq(ioshape_file_write(first, "1", 1), 0);
	ck_assert_int_eq(ioshape_file_write(second, "2", 1), 0);
	ck_assert_int_eq(holding(), 1);
	ck_assert_int_eq(ioshape_file_commit(first, &report), 0);
	ck_assert_str_eq(report.coordinator, "local");
	ioshape_file_free(first);
	ck_assert_int_eq(ioshape_file_commit(second, NULL), 0);
	ioshape_file_free(second);
	ck_assert_int_eq(holding(), 0);
}

static int write_to_it(void *file, enum ioshape_phase phase, uint64_t done_bytes,
		       uint64_t total_bytes)
{
	static char block[MIB / 4];

	(void)done_bytes;
	(void)total_bytes;
	return phase == IOSHAPE_PHASE_WRITE ? ioshape_file_write(file, block, sizeof(block)) : 0;
}

/* This also holds while the first file waits for bandwidth, which both share. */
TEST(all, progress_of_a_file_may_write_to_another_in_the_same_slot)
{
	static char data[8 * MIB];
	struct ioshape_context_options options = IOSHAPE_CONTEXT_OPTIONS_INIT;
	struct ioshape_file_options watched = IOSHAPE_FILE_OPTIONS_INIT;
	struct ioshape_report report = IOSHAPE_REPORT_INIT;
	struct ioshape_file *first, *second;
	struct ioshape_context *paced;

	options.coordinator = address;
	options.rate = 8 * MIB;
	ck_assert_int_eq(open_context_with(&paced, &options,
					   (struct test_rules){ .block_bytes = 256 * 1024 }),
			 0);
	ck_assert_int_eq(ioshape_file_open(paced, scratch_path("second"), NULL, &second), 0);
	watched.progress = write_to_it;
	watched.progress_user = second;
	ck_assert_int_eq(ioshape_file_open(paced, scratch_path("first"), &watched, &first), 0);
	ck_assert_int_eq(ioshape_file_write(first, data, sizeof(data)), 0);
	ck_assert_int_eq(ioshape_file_commit(first, NULL), 0);
	ioshape_file_free(first);
	ck_assert_int_eq(ioshape_file_commit(second, &report), 0);
	ck_assert_double_gt(report.paced_s, 0);
	ck_assert_uint_gt(report.file_bytes, 0);
	ioshape_file_free(second);
	ioshape_context_free(paced);
}

TEST(all, a_save_does_not_wait_for_a_file_that_its_own_thread_has_open)
{
	struct ioshape_file_options options = IOSHAPE_FILE_OPTIONS_INIT;
	struct ioshape_save_options save_options = with_metadata(&sample);
	struct ioshape_report report = IOSHAPE_REPORT_INIT;
	struct ioshape_file *file;

	ck_assert_int_eq(ioshape_file_open(context, scratch_path("open"), &options, &file), 0);
	save_options.report = &report;
	ck_assert_int_eq(ioshape_save_tensors(context, scratch_path("file"), sample.tensors,
					      sample.count, &save_options, NULL),
			 0);
	ck_assert_str_eq(report.coordinator, "local");
	ck_assert_double_eq(report.slot_s, 0);
	ioshape_file_free(file);
	must_hold(scratch_path("file"), &sample);
	/* The slot is free afterwards. */
	ioshape_slot_free(hold());
}

TEST(all, a_file_does_not_share_a_slot_that_was_lost)
{
	struct ioshape_file_options options = IOSHAPE_FILE_OPTIONS_INIT;
	struct ioshape_file *first, *second;
	char command[400];

	ck_assert_int_eq(ioshape_file_open(context, scratch_path("first"), &options, &first), 0);
	ck_assert_int_eq(holding(), 1);
	/* The holder checks for the slot file with its heartbeats, twice a second. */
	snprintf(command, sizeof(command), "rm %s/ioshape-*.slots", scratch_directory());
	ck_assert_int_eq(system(command), 0);
	usleep(lease_ms * 1000 + 600000);
	ck_assert_int_eq(ioshape_file_open(context, scratch_path("second"), &options, &second), 0);
	ck_assert_int_eq(holding(), 1);
	ioshape_file_free(first);
	ioshape_file_free(second);
}

TEST(all, a_file_that_is_given_up_gives_its_slot_back)
{
	struct ioshape_file_options options = IOSHAPE_FILE_OPTIONS_INIT;
	struct ioshape_file *file;

	ck_assert_int_eq(ioshape_file_open(context, scratch_path("first"), &options, &file), 0);
	ioshape_file_free(file);
	ioshape_slot_free(hold());
}

static void *read_all(void *argument)
{
	char piece[4096];
	int fd = open(argument, O_RDONLY);

	while (read(fd, piece, sizeof(piece)) > 0)
		;
	close(fd);
	return NULL;
}

TEST(all, what_goes_to_a_pipe_takes_no_slot)
{
	struct ioshape_report report = IOSHAPE_REPORT_INIT;
	struct ioshape_save_options options = with_metadata(&sample);
	struct ioshape_slot *slot = hold();
	char path[512];
	pthread_t reader;

	snprintf(path, sizeof(path), "%s", scratch_path("pipe"));
	ck_assert_int_eq(mkfifo(path, 0600), 0);
	ck_assert_int_eq(pthread_create(&reader, NULL, read_all, path), 0);
	options.report = &report;
	ck_assert_int_eq(
		ioshape_save_tensors(context, path, sample.tensors, sample.count, &options, NULL),
		0);
	pthread_join(reader, NULL);
	ck_assert_str_eq(report.coordinator, "");
	ioshape_slot_free(slot);
}

/* ---- Reports --------------------------------------------------------------------------------- */

static struct ioshape_report save_with(struct ioshape_context *with)
{
	struct ioshape_report report = IOSHAPE_REPORT_INIT;
	struct ioshape_save_options options = with_metadata(&sample);
	int ret;

	options.report = &report;
	ret = ioshape_save_tensors(with, scratch_path("file"), sample.tensors, sample.count,
				   &options, NULL);
	ck_assert_msg(!ret, "%s", ioshape_last_error()->sentence);
	return report;
}

TEST(all, without_coordination_the_report_says_so)
{
	struct ioshape_report report;
	struct ioshape_context *alone;

	snprintf(address, sizeof(address), "open");
	alone = open_client("J", NULL);
	report = save_with(alone);
	ck_assert_str_eq(report.coordinator, "open");
	ck_assert_msg(!strstr(logged, ", slot "), "%s", logged);
	ck_assert_str_eq(report.ahead, "");
	ioshape_context_free(alone);
}

TEST(all, a_save_whose_coordinator_is_unreachable_is_saved_all_the_same)
{
	struct ioshape_report report;
	struct ioshape_context *alone;

	snprintf(address, sizeof(address), "unix://%s", scratch_path("there-is-no-such-socket"));
	alone = open_client("J", NULL);
	report = save_with(alone);
	ck_assert_str_eq(report.coordinator, "stagger");
	ck_assert_uint_ge(report.downgrade_count, 1);
	ck_assert_int_eq(report.downgrades[0].code, IOSHAPE_DOWNGRADE_SLOT);
	ioshape_context_free(alone);
	must_hold(scratch_path("file"), &sample);
}

/* Returns the name of the pool that paths are assigned to. */
static const char *pool_of(struct ioshape_context *asked, const char *path)
{
	static char names[2][sizeof(((struct ioshape_slot_info *)NULL)->pool)];
	static unsigned turn;
	struct ioshape_slot_options options = IOSHAPE_SLOT_OPTIONS_INIT;
	struct ioshape_slot_info info = { .size = sizeof(info) };
	struct ioshape_slot *slot;

	options.path = path;
	ck_assert_int_eq(ioshape_slot_acquire(asked, &options, &slot), 0);
	ck_assert_int_eq(ioshape_slot_get_info(slot, &info), 0);
	ioshape_slot_free(slot);
	return strcpy(names[++turn % 2], info.pool);
}

TEST(all, pools_are_named_after_filesystems_or_as_one_likes)
{
	struct ioshape_context *named = open_client("J", "mine:/scratch+1");

	ck_assert_str_eq(pool_of(context, scratch_path("a")), pool_of(other, scratch_path("b")));
	ck_assert_str_ne(pool_of(context, scratch_path("a")), pool_of(context, "/proc/x"));
	ck_assert_str_eq(pool_of(named, scratch_path("a")), "mine:/scratch+1");
	save_with(named);
	ck_assert_msg(strstr(logged, " of pool mine:/scratch+1, "), "%s", logged);
	ioshape_context_free(named);
}

TEST(all, the_rate_of_a_job_holds_its_saves_back)
{
	static const char *const addresses[] = { "local", "open" };

	for (size_t i = 0; i < 2; i++) {
		struct ioshape_context_options options = IOSHAPE_CONTEXT_OPTIONS_INIT;
		struct ioshape_context *paced;
		struct ioshape_report report;

		snprintf(address, sizeof(address), "%s%s%s", addresses[i], i ? "" : ":",
			 i ? "" : scratch_directory());
		options.coordinator = address;
		options.rate = 40 * MIB;
		ck_assert_int_eq(
			open_context_with(&paced, &options,
					  (struct test_rules){ .block_bytes = 256 * 1024 }),
			0);
		report = save_with(paced);
		/*
		 * The rate limit of 40 MiB/s makes 20 MiB take half a second, however fast the
		 * storage is.
		 */
		ck_assert_double_gt(report.total_s, 0.25);
		ck_assert_double_gt(report.paced_s, 0);
		ioshape_context_free(paced);
	}
}

TEST(all, a_share_that_the_processes_of_a_host_do_not_have_is_reported_once)
{
	struct ioshape_context_options options = IOSHAPE_CONTEXT_OPTIONS_INIT;
	struct ioshape_context *shared;

	snprintf(address, sizeof(address), "local:%s", scratch_directory());
	options.coordinator = address;
	options.share = 200;
	ck_assert_int_eq(ioshape_context_open(&shared, &options), 0);
	for (int i = 0; i < 2; i++) {
		const struct ioshape_report report = save_with(shared);
		const char *step = report_downgrade(&report, IOSHAPE_DOWNGRADE_SLOT);

		ck_assert(i ? !step : step && strstr(step, "share"));
	}
	ioshape_context_free(shared);
}

/* ---- Invalid settings ------------------------------------------------------------------------ */

static const struct ioshape_context_options wrong[] = {
	{ .coordinator = "zookeeper://a" },
	{ .coordinator = "redis://u:s3cret@h:99999/" },
	{ .coordinator = "open:house" },
	{ .pool = "a{b}" },
	{ .share = 1001 },
	{ .unreachable = 3 },
	{ .slots = 65537 },
};

LOOP_TEST(all, bad_settings_are_refused, 0, (int)(sizeof(wrong) / sizeof(*wrong)))
{
	struct ioshape_context_options options = wrong[_i];
	struct ioshape_context *refused;

	options.size = sizeof(options);
	ck_assert_int_eq(ioshape_context_open(&refused, &options), -EINVAL);
	ck_assert_ptr_null(refused);
	ck_assert_ptr_null(strstr(ioshape_last_error()->sentence, "s3cret"));
	ck_assert_ptr_null(strstr(ioshape_last_error()->remedy, "s3cret"));
}

/*
 * Returns the error of a call that needs the coordinator, with this text in the password file
 * (NULL: no file).
 */
static const char *asked_with(const char *text, size_t bytes)
{
	struct ioshape_context_options options = IOSHAPE_CONTEXT_OPTIONS_INIT;
	struct ioshape_slot_options slot_options = IOSHAPE_SLOT_OPTIONS_INIT;
	struct ioshape_context *opened;
	struct ioshape_slot *slot;

	options.password_file = scratch_path("password");
	options.coordinator = "redis://127.0.0.1:1";
	options.unreachable = IOSHAPE_UNREACHABLE_FAIL;
	if (text)
		scratch_write(options.password_file, text, bytes);
	/*
	 * Opening a context succeeds with an invalid password file, because an operator may change
	 * it later.
	 */
	ck_assert_int_eq(ioshape_context_open(&opened, &options), 0);
	slot_options.pool = "pool";
	ck_assert_int_eq(ioshape_slot_acquire(opened, &slot_options, &slot), IOSHAPE_E_COORDINATOR);
	ioshape_context_free(opened);
	return ioshape_last_error()->sentence;
}

TEST(all, a_password_file_that_is_not_there_is_named)
{
	struct ioshape_context_options options = IOSHAPE_CONTEXT_OPTIONS_INIT;
	struct ioshape_context *opened;

	ck_assert_ptr_nonnull(strstr(asked_with(NULL, 0), scratch_path("password")));
	/* The file is read only if a password is needed. */
	options.password_file = scratch_path("password");
	options.coordinator = "local";
	ck_assert_int_eq(ioshape_context_open(&opened, &options), 0);
	ioshape_context_free(opened);
}

TEST(all, a_password_is_the_first_line_whole)
{
	static const struct {
		const char *text;
		bool good;
	} files[] = { { "", false },  { "secret", true },     { "secret\n", true },
		      { "\n", true }, { "secret\r\n", true }, { "secret\nsecond", true } };

	for (size_t i = 0; i < sizeof(files) / sizeof(*files); i++) {
		const char *said = asked_with(files[i].text, strlen(files[i].text));

		ck_assert_int_eq(!strstr(said, "password"), files[i].good);
	}
	/* A password that is too long must not be truncated. */
	for (size_t bytes = 511; bytes < 515; bytes++) {
		char line[600];

		memset(line, 'p', sizeof(line));
		line[bytes] = '\n';
		ck_assert_int_eq(!strstr(asked_with(line, bytes + 1), "password"), bytes <= 512);
	}
}
