/* SPDX-License-Identifier: Apache-2.0 */
/* Files in other formats: written as a whole or not at all, byte for byte. */
#define _GNU_SOURCE
#include "support/check_main.h"
#include "support/random.h"
#include "support/sample.h"
#include "support/scratch.h"

#include <errno.h>
#include <fcntl.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdio.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#define MIB ((size_t)1 << 20)
#define ROOM (5 * MIB)

/* Counts the library's calls of fsync(). */
static atomic_uint syncs;

int fsync(int fd)
{
	atomic_fetch_add(&syncs, 1);
	return (int)syscall(SYS_fsync, fd);
}

static struct ioshape_context *context;
static uint8_t *data;
static unsigned descriptors_before;
static int working_directory;

static void setup(void)
{
	uint64_t state = 5;

	working_directory = open(".", O_PATH | O_DIRECTORY | O_CLOEXEC);
	scratch_setup();
	data = malloc(ROOM);
	ck_assert_ptr_nonnull(data);
	test_random_fill(&state, data, ROOM);
	descriptors_before = scratch_descriptors();
	context = sample_context(IOSHAPE_ENGINE_AUTO, IOSHAPE_DIRECT_PREFER);
}

static void teardown(void)
{
	ioshape_context_free(context);
	ck_assert_uint_eq(scratch_descriptors(), descriptors_before);
	ck_assert_uint_eq(scratch_temporaries(scratch_directory()), 0);
	free(data);
	ck_assert_int_eq(fchdir(working_directory), 0);
	close(working_directory);
	scratch_teardown();
}

static struct ioshape_file *open_file(const char *path, const struct ioshape_file_options *options)
{
	struct ioshape_file *file;

	ck_assert_msg(!ioshape_file_open(context, path, options, &file), "%s",
		      ioshape_last_error()->sentence);
	ck_assert_ptr_nonnull(file);
	return file;
}

static void must_write(struct ioshape_file *file, const void *from, size_t bytes)
{
	ck_assert_msg(!ioshape_file_write(file, from, bytes), "%s", ioshape_last_error()->sentence);
}

static void must_commit(struct ioshape_file *file, struct ioshape_report *report)
{
	ck_assert_msg(!ioshape_file_commit(file, report), "%s", ioshape_last_error()->sentence);
	ioshape_file_free(file);
}

/* ---- Contents -------------------------------------------------------------------------------- */

/*
 * Pieces of random length, with and without an announced length. The lengths are around block
 * boundaries, and small ones.
 */
static const size_t lengths[] = { 0, 1, 65535, 65536, 65537, MIB, MIB + 1, ROOM - 3 };

static struct test_case bytes_tests = { .name = "bytes", .setup = setup, .teardown = teardown };

LOOP_TEST(bytes_tests, what_is_written_is_what_is_there, 0,
	  3 * (sizeof(lengths) / sizeof(lengths[0])))
{
	struct ioshape_file_options options = IOSHAPE_FILE_OPTIONS_INIT;
	struct ioshape_report report = IOSHAPE_REPORT_INIT;
	size_t bytes = lengths[_i / 3], piece;
	uint64_t state = (uint64_t)_i;
	struct ioshape_file *file;

	/* Unknown, right, too large. */
	options.expected_bytes = _i % 3 == 0 ? 0 : _i % 3 == 1 ? bytes : bytes + 3 * MIB;
	scratch_write(scratch_path("file"), "old", 3);
	file = open_file(scratch_path("file"), &options);
	for (size_t done = 0; done < bytes; done += piece) {
		piece = test_random_below(&state, 300000);
		piece = piece < bytes - done ? piece : bytes - done;
		must_write(file, data + done, piece);
	}
	must_write(file, NULL, 0);
	ck_assert(scratch_same(scratch_path("file"), "old", 3));
	must_commit(file, &report);
	ck_assert(scratch_same(scratch_path("file"), data, bytes));
	ck_assert_uint_eq(report.file_bytes, bytes);
	ck_assert_str_eq(report.mode, "single");
	ck_assert_str_ne(report.engine, "");
	ck_assert_str_ne(report.filesystem, "");
	ck_assert_double_gt(report.total_s, 0);
	ck_assert_double_ge(report.total_s, report.plan_s + report.write_s + report.sync_s);
	ck_assert_double_eq(report.stage_s, 0);
	ck_assert_uint_eq(scratch_entries(scratch_directory()), 1);
}

TEST(bytes_tests, memory_is_free_again_when_a_write_returns)
{
	struct ioshape_file *file = open_file(scratch_path("file"), NULL);
	uint8_t *piece = malloc(MIB);

	for (size_t done = 0; done < 4 * MIB; done += MIB) {
		memcpy(piece, data + done, MIB);
		must_write(file, piece, MIB);
		memset(piece, 0xff, MIB);
	}
	free(piece);
	must_commit(file, NULL);
	ck_assert(scratch_same(scratch_path("file"), data, 4 * MIB));
}

LOOP_TEST(bytes_tests, a_file_without_a_commit_leaves_no_trace, 0, 2)
{
	struct ioshape_file *file;

	scratch_write(scratch_path("file"), "old", 3);
	file = open_file(scratch_path("file"), NULL);
	ck_assert_uint_eq(scratch_temporaries(scratch_directory()), 1);
	must_write(file, data, _i ? ROOM : 10);
	ioshape_file_free(file);
	ck_assert(scratch_same(scratch_path("file"), "old", 3));
	ck_assert_uint_eq(scratch_entries(scratch_directory()), 1);
}

TEST(bytes_tests, several_files_are_written_at_the_same_time)
{
	struct ioshape_file *files[10]; /* more than the io queues that a context keeps */
	char names[10][16];

	for (int i = 0; i < 10; i++) {
		snprintf(names[i], sizeof(names[i]), "file%d", i);
		files[i] = open_file(scratch_path(names[i]), NULL);
	}
	for (size_t done = 0; done < 2 * MIB; done += MIB / 2)
		for (int i = 0; i < 10; i++)
			must_write(files[i], data + i + done, MIB / 2);
	for (int i = 9; i >= 0; i--)
		must_commit(files[i], NULL);
	for (int i = 0; i < 10; i++)
		ck_assert(scratch_same(scratch_path(names[i]), data + i, 2 * MIB));
}

/* ---- Promises shared with saves -------------------------------------------------------------- */

static struct test_case promises = { .name = "promises", .setup = setup, .teardown = teardown };

TEST(promises, what_is_there_may_have_to_stay)
{
	struct ioshape_file_options options = IOSHAPE_FILE_OPTIONS_INIT;
	struct ioshape_report report = IOSHAPE_REPORT_INIT;
	struct ioshape_file *file;

	options.replace = IOSHAPE_OFF;
	scratch_write(scratch_path("file"), "old", 3);
	file = open_file(scratch_path("file"), &options);
	must_write(file, data, 2 * MIB);
	ck_assert_int_eq(ioshape_file_commit(file, &report), -EEXIST);
	ck_assert_str_eq(ioshape_last_error()->path, scratch_path("file"));
	ck_assert_uint_eq(report.file_bytes, 2 * MIB);
	ioshape_file_free(file);
	ck_assert(scratch_same(scratch_path("file"), "old", 3));
	file = open_file(scratch_path("other"), &options);
	must_write(file, data, 10);
	must_commit(file, NULL);
	ck_assert(scratch_same(scratch_path("other"), data, 10));
}

LOOP_TEST(promises, stable_storage_is_waited_for_unless_told_otherwise, 0, 2)
{
	struct ioshape_file_options options = IOSHAPE_FILE_OPTIONS_INIT;
	struct ioshape_file *file;

	options.sync = _i ? IOSHAPE_OFF : IOSHAPE_ON;
	file = open_file(scratch_path("file"), &options);
	must_write(file, data, 2 * MIB);
	atomic_store(&syncs, 0);
	must_commit(file, NULL);
	/* One for the file, one for its directory. */
	ck_assert_uint_eq(atomic_load(&syncs), _i ? 0 : 2);
	ck_assert(scratch_same(scratch_path("file"), data, 2 * MIB));
}

TEST(promises, a_relative_path_means_what_it_meant_at_the_opening)
{
	struct ioshape_file *file;

	ck_assert_int_eq(chdir(scratch_directory()), 0);
	file = open_file("file", NULL);
	must_write(file, data, 10);
	ck_assert_int_eq(chdir("/"), 0);
	must_commit(file, NULL);
	ck_assert(scratch_same(scratch_path("file"), data, 10));
}

/* ---- Order and progress ---------------------------------------------------------------------- */

static int linger(void *user, enum ioshape_phase phase, uint64_t done, uint64_t total)
{
	(void)user;
	(void)done;
	(void)total;
	if (phase == IOSHAPE_PHASE_SYNC)
		usleep(200000);
	return 0;
}

static struct test_case order_tests = { .name = "order", .setup = setup, .teardown = teardown };

TEST(order_tests, a_commit_waits_for_earlier_saves_to_the_path)
{
	struct ioshape_save_options options = IOSHAPE_SAVE_OPTIONS_INIT;
	struct ioshape_report report = IOSHAPE_REPORT_INIT;
	struct ioshape_save *save;
	struct ioshape_file *file = open_file(scratch_path("file"), NULL);

	must_write(file, data, 10);
	options.progress = linger;
	ck_assert_int_eq(
		ioshape_save_tensors(context, scratch_path("file"), NULL, 0, &options, &save), 0);
	must_commit(file, &report);
	ck_assert_int_ne(ioshape_save_wait(save, 0), -EINPROGRESS);
	ck_assert_double_gt(report.commit_s, 0.05);
	ioshape_save_free(save);
	ck_assert(scratch_same(scratch_path("file"), data, 10));
}

struct told {
	enum ioshape_phase phase;
	uint64_t done, total;
	enum ioshape_phase stop_in;
	bool backwards;
};

static int listen(void *user, enum ioshape_phase phase, uint64_t done, uint64_t total)
{
	struct told *told = user;

	told->backwards |= phase < told->phase || done < told->done ||
			   (told->total && (total != told->total || done > total));
	told->phase = phase;
	told->done = done;
	told->total = total;
	return phase == told->stop_in;
}

TEST(order_tests, progress_is_told_and_can_stop)
{
	static const enum ioshape_phase stops[] = { IOSHAPE_PHASE_PLAN, IOSHAPE_PHASE_WRITE,
						    IOSHAPE_PHASE_SYNC };
	struct ioshape_file_options options = IOSHAPE_FILE_OPTIONS_INIT;
	struct told told = { 0 };
	struct ioshape_file *file;
	int ret;

	options.expected_bytes = ROOM;
	options.progress = listen;
	options.progress_user = &told;
	file = open_file(scratch_path("file"), &options);
	must_write(file, data, ROOM);
	must_commit(file, NULL);
	ck_assert(!told.backwards && told.phase == IOSHAPE_PHASE_DONE);
	ck_assert(told.done == ROOM && told.total == ROOM);
	for (size_t i = 0; i < sizeof(stops) / sizeof(stops[0]); i++) {
		told = (struct told){ .stop_in = stops[i] };
		ret = ioshape_file_open(context, scratch_path("other"), &options, &file);
		if (!ret)
			ret = ioshape_file_write(file, data, ROOM);
		if (!ret)
			ret = ioshape_file_commit(file, NULL);
		ck_assert_int_eq(ret, -ECANCELED);
		ioshape_file_free(file);
	}
	ck_assert_uint_eq(scratch_entries(scratch_directory()), 1);
}

/* ---- Failures -------------------------------------------------------------------------------- */

static struct test_case failures = { .name = "failures", .setup = setup, .teardown = teardown };

TEST(failures, arguments_are_checked)
{
	struct ioshape_file_options options = IOSHAPE_FILE_OPTIONS_INIT;
	struct ioshape_report report = { 0 };
	struct ioshape_file *file = (struct ioshape_file *)&options;

	ck_assert_int_eq(ioshape_file_open(NULL, scratch_path("file"), NULL, &file), -EINVAL);
	ck_assert_ptr_null(file);
	ck_assert_int_eq(ioshape_file_open(context, scratch_path("file"), NULL, NULL), -EINVAL);
	ck_assert_int_eq(ioshape_file_open(context, NULL, NULL, &file), -EINVAL);
	ck_assert_int_eq(ioshape_file_open(context, "", NULL, &file), -EINVAL);
	ck_assert_int_eq(ioshape_file_open(context, scratch_path("x/"), NULL, &file), -EINVAL);
	ck_assert_int_eq(ioshape_file_open(context, scratch_path("x/y"), NULL, &file), -ENOENT);
	ck_assert_str_eq(ioshape_last_error()->path, scratch_path("x/y"));
	options.size = 0;
	ck_assert_int_eq(ioshape_file_open(context, scratch_path("file"), &options, &file),
			 -EINVAL);
	ck_assert_ptr_null(file);
	ck_assert_int_eq(ioshape_file_write(NULL, data, 1), -EINVAL);
	ck_assert_int_eq(ioshape_file_commit(NULL, NULL), -EINVAL);
	ioshape_file_free(NULL);

	/* These errors are not final. */
	file = open_file(scratch_path("file"), NULL);
	ck_assert_int_eq(ioshape_file_write(file, NULL, 1), -EINVAL);
	ck_assert_str_eq(ioshape_last_error()->path, scratch_path("file"));
	must_write(file, data, 10);
	ck_assert_int_eq(ioshape_file_commit(file, &report), -EINVAL);
	ck_assert_int_eq(ioshape_file_commit(file, NULL), 0);
	ck_assert_int_eq(ioshape_file_write(file, data, 1), -EINVAL);
	ck_assert_int_eq(ioshape_file_commit(file, NULL), -EINVAL);
	ioshape_file_free(file);
	ck_assert(scratch_same(scratch_path("file"), data, 10));
}

TEST(failures, a_failure_is_final_and_leaves_the_old_file)
{
	struct rlimit limit, before;
	struct ioshape_file *file;
	int ret;

	scratch_write(scratch_path("file"), "old", 3);
	ck_assert_int_eq(getrlimit(RLIMIT_FSIZE, &before), 0);
	limit = before;
	limit.rlim_cur = MIB;
	ck_assert_int_eq(setrlimit(RLIMIT_FSIZE, &limit), 0);
	file = open_file(scratch_path("file"), NULL);
	ret = ioshape_file_write(file, data, 2 * MIB);
	ck_assert_int_eq(setrlimit(RLIMIT_FSIZE, &before), 0);
	ck_assert_int_eq(ret, -EFBIG);
	ck_assert_str_eq(ioshape_last_error()->path, scratch_path("file"));
	ck_assert_int_eq(ioshape_file_write(file, data, 1), -EIO);
	ck_assert_int_eq(ioshape_file_commit(file, NULL), -EIO);
	ck_assert_str_eq(ioshape_last_error()->path, scratch_path("file"));
	ioshape_file_free(file);
	ck_assert(scratch_same(scratch_path("file"), "old", 3));
	ck_assert_uint_eq(scratch_entries(scratch_directory()), 1);

	file = open_file("/dev/full", NULL);
	ret = ioshape_file_write(file, data, 2 * MIB);
	ck_assert_int_eq(ret, -ENOSPC);
	ck_assert_str_eq(ioshape_last_error()->path, "/dev/full");
	ioshape_file_free(file);
}

/* ---- Checksums ------------------------------------------------------------------------------- */

/* Opens a reader for a file in any format. */
static struct ioshape_reader *open_any(const char *path, struct ioshape_reader_info *info)
{
	struct ioshape_reader_options options = IOSHAPE_READER_OPTIONS_INIT;
	struct ioshape_reader *reader;

	options.any_format = 1;
	ck_assert_int_eq(ioshape_reader_open(context, path, &options, &reader), 0);
	info->size = sizeof(*info);
	ck_assert_int_eq(ioshape_reader_get_info(reader, info), 0);
	return reader;
}

/* Loads ranges of the file in one call: two that overlap, and the end, in any order. */
static void must_load_ranges(struct ioshape_reader *reader)
{
	uint8_t *back = malloc(4 * MIB);
	const struct ioshape_load_request ranges[] = {
		{ 0, 2 * MIB + 1, MIB + 4, back },
		{ 0, 7, MIB, back + 2 * MIB },
		{ 0, MIB, 100, back + 3 * MIB },
	};
	const struct ioshape_load_request wrong[] = {
		{ 0, 3 * MIB, 6, back },
		{ 1, 0, 1, back },
	};

	ck_assert_int_eq(ioshape_reader_load_records(reader, ranges, 3), 0);
	for (size_t i = 0; i < 3; i++)
		ck_assert_mem_eq(ranges[i].into, data + ranges[i].offset, ranges[i].bytes);
	ck_assert_int_eq(ioshape_reader_load_records(reader, &wrong[0], 1), -ERANGE);
	ck_assert_str_eq(strstr(ioshape_last_error()->sentence, ", too few to"),
			 ", too few to read 6 from offset 3145728");
	ck_assert_int_eq(ioshape_reader_load_records(reader, &wrong[1], 1), -ENOENT);
	free(back);
}

static void must_verify(const char *path)
{
	struct ioshape_reader_info info;
	struct ioshape_reader *reader = open_any(path, &info);
	uint8_t *back = malloc(MIB);

	ck_assert(info.checksums && !info.torch_zip && !info.records);
	ck_assert_uint_eq(info.file_bytes, 3 * MIB + 5);
	ck_assert_int_eq(ioshape_reader_read(reader, 0, MIB - 3, back, MIB), 0);
	ck_assert_mem_eq(back, data + MIB - 3, MIB);
	must_load_ranges(reader);
	ck_assert_int_eq(ioshape_reader_verify(reader, 1), 0);
	ioshape_reader_free(reader);
	free(back);
}

static struct test_case checksums = { .name = "checksums", .setup = setup, .teardown = teardown };

TEST(checksums, checksums_are_kept_beside_the_file)
{
	struct ioshape_file_options options = IOSHAPE_FILE_OPTIONS_INIT;
	const char *path = scratch_path("file");
	struct ioshape_reader_info info;
	struct ioshape_file *file;

	options.checksums = IOSHAPE_CHECKSUMS_BESIDE;
	file = open_file(path, &options);
	must_write(file, data, MIB + 1);
	must_write(file, data + MIB + 1, 2 * MIB + 4);
	must_commit(file, NULL);
	ck_assert_uint_eq(scratch_entries(scratch_directory()), 2);
	must_verify(path);

	must_commit(open_file(path, NULL), NULL);
	ioshape_reader_free(open_any(path, &info));
	ck_assert(!info.checksums && !info.file_bytes);
}

TEST(checksums, checksums_are_no_promise_of_pipes)
{
	struct ioshape_file_options options = IOSHAPE_FILE_OPTIONS_INIT;
	struct ioshape_report report = IOSHAPE_REPORT_INIT;
	struct ioshape_file *file;

	options.checksums = IOSHAPE_CHECKSUMS_BESIDE;
	file = open_file("/dev/null", &options);
	must_write(file, data, MIB);
	must_commit(file, &report);
	ck_assert_uint_eq(report.downgrade_count, 0);
	options.checksums = (enum ioshape_keep_checksums)7;
	ck_assert_int_eq(ioshape_file_open(context, scratch_path("file"), &options, &file),
			 -EINVAL);
}

TEST(checksums, a_torch_zip_is_read_as_one_in_any_format)
{
	const struct ioshape_tensor tensor = {
		.name = "w",
		.dtype = IOSHAPE_UINT8,
		.dims = 1,
		.shape = (const int64_t[]){ 1000 },
		.data = data,
	};
	const char *path = scratch_path("model.pt");
	struct ioshape_reader_info info;

	ck_assert_int_eq(ioshape_save_tensors(context, path, &tensor, 1, NULL, NULL), 0);
	ioshape_reader_free(open_any(path, &info));
	ck_assert(info.torch_zip && info.checksums && info.tensors == 1);
}
