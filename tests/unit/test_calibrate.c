/* SPDX-License-Identifier: Apache-2.0 */
/* Trials of how a mount is best written to, and what follows for a file. */
#define _GNU_SOURCE
#include "ring/calibrate.h"
#include "support/check_main.h"
#include "support/file_writer.h"
#include "support/scratch.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#define NOW 1800000000.0

static struct ring_calibration sample(void)
{
	return (struct ring_calibration){
		.engine = IOSHAPE_ENGINE_URING_ASYNC,
		.bytes_per_s = 1900000000,
		.measured_at = NOW,
	};
}

static struct ring_memory *memory;

/* What is remembered is remembered in the folder of this test alone. */
static void setup(void)
{
	scratch_setup();
	setenv("XDG_CACHE_HOME", scratch_path("cache"), 1);
	ck_assert_int_eq(ring_memory_open(&memory, NULL), 0);
}

static void teardown(void)
{
	ring_memory_close(memory);
	scratch_teardown();
}

/* ---- What follows for a file ----------------------------------------------------------------- */

static struct ring_choice choice;

static enum ring_reason reason_of(const struct ring_config *config, const char *path,
				  uint64_t bytes)
{
	ring_choose(config, path, bytes, true, &choice);
	ck_assert_str_eq(choice.why, ring_reason_text(choice.reason));
	return choice.reason;
}

START_TEST(what_is_not_tried_says_why)
{
	struct ring_config config = { .engine = IOSHAPE_ENGINE_THREADS };
	const char *path = scratch_path("file"), *pipe = scratch_path("pipe");

	ck_assert_int_eq(reason_of(&config, path, GIB), RING_AS_ASKED);
	config.engine = IOSHAPE_ENGINE_NIL;
	ck_assert_int_eq(reason_of(&config, path, GIB), RING_AS_ASKED);
	config.engine = IOSHAPE_ENGINE_AUTO;
	ck_assert_int_eq(reason_of(&config, path, 15 * MIB), RING_SMALL_FILE);
	ck_assert_int_eq(reason_of(&config, path, 127 * MIB), RING_NOT_LARGE);
	ck_assert_int_eq(reason_of(&config, path, 0), RING_SIZE_UNKNOWN);
	ck_assert_int_eq(mkfifo(pipe, 0600), 0);
	ck_assert_int_eq(reason_of(&config, pipe, GIB), RING_NO_REGULAR_FILE);
	ck_assert_int_eq(reason_of(&config, "/dev/null", GIB), RING_NO_REGULAR_FILE);
	ck_assert_int_eq(reason_of(&config, scratch_path("no/file"), GIB), RING_UNKNOWN_MOUNT);
	ring_choose(&config, path, GIB, false, &choice);
	ck_assert_int_eq(choice.reason, RING_NOT_TRIED);
	config.calibrate = IOSHAPE_CALIBRATE_OFF;
	ck_assert_int_eq(reason_of(&config, path, GIB), RING_CALIBRATION_OFF);
	config.calibrate = IOSHAPE_CALIBRATE_AUTO;
	config.direct = IOSHAPE_DIRECT_OFF;
	ck_assert_int_eq(reason_of(&config, path, GIB), RING_DIRECT_OFF);
	ck_assert_uint_eq(scratch_entries(scratch_directory()), 1);
}
END_TEST

START_TEST(a_trial_to_come_is_foreseen)
{
	const struct ring_config config = { .memory = memory, .threads = 1 };
	const struct fs_layout none = { 0 };
	struct ring_forecast forecast;
	struct ring_calibration found = sample();
	char mount[FS_POOL_BYTES];

	ck_assert_int_eq(
		ring_foresee(&config, scratch_directory(), FS_OTHER, &none, GIB, &forecast, NULL),
		0);
	ck_assert(forecast.trial_to_come);
	ck_assert_int_eq(
		ring_foresee(&config, scratch_directory(), FS_OTHER, &none, MIB, &forecast, NULL),
		0);
	ck_assert(!forecast.trial_to_come);
	ck_assert_int_eq(fs_pool_of_path(scratch_path("file"), mount, NULL), 0);
	found.measured_at = base_wall_seconds();
	ring_memory_put(memory, mount, &found);
	ck_assert_int_eq(
		ring_foresee(&config, scratch_directory(), FS_OTHER, &none, GIB, &forecast, NULL),
		0);
	ck_assert(!forecast.trial_to_come);
	ck_assert(forecast.calibration.measured_at == found.measured_at);
	ck_assert_int_eq(forecast.shape.engine, found.engine);
}
END_TEST

static struct ring_shape shape_of(const struct ring_config *config, const struct fs_layout *layout,
				  char why[160])
{
	return ring_shape_chosen(config, &choice, FS_OTHER, layout, GIB, why, 160);
}

START_TEST(what_was_found_is_followed_where_it_fits)
{
	const struct fs_layout none = { 0 }, stripes = {
		.count = 1,
		.parts[0] = { .end = UINT64_MAX, .stripe_bytes = MIB, .stripe_count = 2 }
	};
	struct ring_config config = { .engine = IOSHAPE_ENGINE_AUTO };
	struct ring_shape shape;
	char why[160];

	choice = (struct ring_choice){ .calibration = sample(), .why = "found" };
	shape = shape_of(&config, &none, why);
	ck_assert_int_eq(shape.engine, IOSHAPE_ENGINE_URING_ASYNC);
	ck_assert_uint_eq(shape.block_bytes, 4 * MIB);
	ck_assert_uint_eq(shape.depth, 14);
	ck_assert_str_eq(why, "found");
	/* Blocks are by the stripes, and as the user has said. */
	shape = shape_of(&config, &stripes, why);
	ck_assert_int_eq(shape.engine, IOSHAPE_ENGINE_URING_ASYNC);
	ck_assert_uint_eq(shape.block_bytes, MIB);
	ck_assert_str_eq(why, "found; 2 stripes of 1M");
	config.depth = 3;
	shape = shape_of(&config, &none, why);
	ck_assert_uint_eq(shape.block_bytes, 4 * MIB);
	ck_assert_uint_eq(shape.depth, 3);
	ck_assert_str_eq(why, "found; blocks as asked for");
	/* Nothing goes through the page cache where that is forbidden. */
	choice.calibration.engine = IOSHAPE_ENGINE_BUFFERED;
	config = (struct ring_config){ .direct = IOSHAPE_DIRECT_REQUIRE };
	ck_assert_int_eq(shape_of(&config, &none, why).engine, IOSHAPE_ENGINE_AUTO);
	choice.calibration.engine = IOSHAPE_ENGINE_THREADS;
	choice.reason = RING_NOT_LARGE;
	ck_assert_int_eq(shape_of(&config, &none, why).engine, IOSHAPE_ENGINE_AUTO);
}
END_TEST

/* After a failure it would wait for ten minutes. */
static void let_try_again(void)
{
	struct ring_turn turn;

	ck_assert_int_eq(ring_memory_try(memory, choice.mount, base_wall_seconds() + 601, &turn),
			 0);
	ring_memory_tried(memory, choice.mount, 0, &turn);
}

/* Machines that do other things as well, and checkers, are too slow for a trial now and then. */
static void choose_patiently(const struct ring_config *config, const char *path)
{
	for (int i = 0; i < 20; i++) {
		ring_choose(config, path, GIB, true, &choice);
		if (choice.reason == RING_AS_CALIBRATED)
			return;
		ck_assert_int_eq(choice.reason, RING_TRIAL_FAILED);
		let_try_again();
	}
	ck_abort_msg("never quick enough");
}

/* There is nothing to be tried in memory, nor on a disk that is nearly full. */
static bool can_try(void)
{
	const struct ring_config config = { .threads = 1 };
	struct ring_bench bench = { 0 };
	int ret = ring_bench_open(&bench, &config, "file", NULL);

	ring_bench_close(&bench);
	return !ret;
}

START_TEST(a_large_file_is_tried_for_once)
{
	struct ring_config config = { .memory = memory, .threads = 1 };
	const char *path = scratch_path("file");
	struct ring_calibration found;
	double first;

	/* Nothing is taken from a file that needs all there is. */
	ring_choose(&config, path, (uint64_t)1 << 60, true, &choice);
	ck_assert_int_eq(choice.reason, RING_TRIAL_FAILED);
	let_try_again();
	choose_patiently(&config, path);
	found = choice.calibration;
	ck_assert_uint_gt(found.bytes_per_s, 0);
	ck_assert_uint_gt(found.trial_count, 0);
	first = found.measured_at;
	/* Nothing is left behind. */
	ck_assert_uint_eq(scratch_temporaries(scratch_directory()), 0);
	ck_assert_int_eq(ring_memory_get(memory, choice.mount, 0, base_wall_seconds(), &found), 0);
	/* From now on smaller files follow it as well. */
	ring_choose(&config, path, 20 * MIB, true, &choice);
	ck_assert_int_eq(choice.reason, RING_AS_CALIBRATED);
	ck_assert(choice.calibration.measured_at == first);
	ring_choose(&config, path, 0, true, &choice);
	ck_assert_int_eq(choice.reason, RING_AS_CALIBRATED);
	/* Anew, once. */
	config.calibrate = IOSHAPE_CALIBRATE_AGAIN;
	config.opened_s = base_wall_seconds();
	choose_patiently(&config, path);
	ck_assert(choice.calibration.measured_at > first);
	first = choice.calibration.measured_at;
	ring_choose(&config, path, GIB, true, &choice);
	ck_assert(!choice.reason && choice.calibration.measured_at == first);
}
END_TEST

static void open_bench(struct ring_bench *bench)
{
	const struct ring_config config = { .threads = 1 };
	struct base_error error = { 0 };

	ck_assert_msg(!ring_bench_open(bench, &config, scratch_path("file"), &error), "%s",
		      error.text);
	bench->end_ns = UINT64_MAX;
	bench->room_bytes = 8 * MIB;
}

START_TEST(trials_keep_to_their_room_and_their_time)
{
	struct ring_trial trial = { .engine = IOSHAPE_ENGINE_THREADS,
				    .block_bytes = MIB,
				    .depth = 2 };
	struct ring_bench bench = { 0 };
	struct stat status;

	open_bench(&bench);
	for (int i = 0; i < 5; i++) {
		bench.has_direct = i % 2 && bench.has_direct;
		ck_assert_int_eq(ring_bench_try(&bench, &trial, 3 * MIB, 0), 0);
		ck_assert_uint_gt(trial.bytes_per_s, 0);
		ck_assert_uint_le(bench.at, bench.room_bytes);
	}
	ck_assert_int_eq(fstat(bench.buffered.fd, &status), 0);
	ck_assert_int_le(status.st_size, 256 * (int64_t)MIB);
	/* What is larger than what there is to be written. */
	trial.block_bytes = 2 * RING_BLOCK_BYTES;
	ck_assert_int_eq(ring_bench_try(&bench, &trial, GIB, 0), -ETIME);
	trial.block_bytes = MIB;
	bench.end_ns = 0;
	ck_assert_int_eq(ring_bench_try(&bench, &trial, MIB, 0), -ETIME);
	ring_bench_close(&bench);
	ck_assert_uint_eq(scratch_entries(scratch_directory()), 0);
}
END_TEST

START_TEST(a_trial_that_cannot_write_fails)
{
	struct ring_trial trial = { .engine = IOSHAPE_ENGINE_THREADS,
				    .block_bytes = MIB,
				    .depth = 2 };
	struct ring_bench bench = { 0 };
	int fd;

	open_bench(&bench);
	bench.has_direct = false;
	fd = bench.buffered.fd;
	bench.buffered.fd = open("/dev/null", O_RDONLY | O_CLOEXEC);
	ck_assert_int_eq(ring_bench_try(&bench, &trial, 4 * MIB, 0), -EBADF);
	close(bench.buffered.fd);
	/* All that is written there is gone, and cannot be synced. */
	bench.buffered.fd = open("/dev/null", O_WRONLY | O_CLOEXEC);
	bench.fs.family = FS_OTHER;
	ck_assert_int_eq(ring_bench_try(&bench, &trial, 4 * MIB, 0), -EINVAL);
	close(bench.buffered.fd);
	bench.buffered.fd = fd;
	/* An engine that could not be had is not asked for again. */
	bench.refused[IOSHAPE_ENGINE_BUFFERED] = true;
	trial.engine = IOSHAPE_ENGINE_BUFFERED;
	ck_assert_int_eq(ring_bench_try(&bench, &trial, MIB, 0), -ENOTSUP);
	ring_bench_close(&bench);
}
END_TEST

START_TEST(a_file_is_written_as_was_found_and_reports_it)
{
	struct file_write write = file_write_defaults();
	struct ring_calibration found = sample();
	char mount[FS_POOL_BYTES];
	uint8_t *data = calloc(1, 17 * MIB);

	ck_assert_int_eq(fs_pool_of_path(scratch_path("file"), mount, NULL), 0);
	found.engine = IOSHAPE_ENGINE_THREADS;
	found.measured_at = base_wall_seconds() - 7300;
	ring_memory_put(memory, mount, &found);
	write.config.memory = memory;
	write.config.block_bytes = write.config.depth = 0;
	write.options.expected_bytes = 17 * MIB;
	ck_assert_msg(!file_write_all(&write, scratch_path("file"), data, 17 * MIB), "%s",
		      write.error.text);
	ck_assert_str_eq(write.report.engine, "threads");
	ck_assert_uint_eq(write.report.block_bytes, 4 * MIB);
	ck_assert_str_eq(write.report.choice, "calibrated 2 h ago: threads, 1.90 GB/s");
	ck_assert(scratch_same(scratch_path("file"), data, 17 * MIB));
	free(data);
}
END_TEST

int main(void)
{
	Suite *suite = suite_create("ring/calibrate");
	TCase *files = tcase_create("files");

	tcase_add_checked_fixture(files, setup, teardown);
	tcase_add_test(files, what_is_not_tried_says_why);
	if (can_try())
		tcase_add_test(files, a_trial_to_come_is_foreseen);
	tcase_add_test(files, what_was_found_is_followed_where_it_fits);
	if (can_try()) {
		tcase_add_test(files, a_large_file_is_tried_for_once);
		tcase_add_test(files, trials_keep_to_their_room_and_their_time);
		tcase_add_test(files, a_trial_that_cannot_write_fails);
	}
	tcase_add_test(files, a_file_is_written_as_was_found_and_reports_it);
	suite_add_tcase(suite, files);
	return check_main(suite);
}
