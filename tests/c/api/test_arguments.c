/* SPDX-License-Identifier: Apache-2.0 */
/* Invalid arguments and structs of other versions are refused, and the library never prints. */
#define _GNU_SOURCE
#include "support/check_main.h"
#include "support/every_call.h"
#include "support/sample.h"
#include "support/scratch.h"

#include <ioshape/group.h>
#include <ioshape/slots.h>

#include <errno.h>
#include <fcntl.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#define COUNT(array) (sizeof(array) / sizeof((array)[0]))

static struct ioshape_context *context;
static struct sample sample;
static char output[4096];
static int real_output[2] = { -1, -1 };

/* Redirects standard output and error to a file, which must stay empty. */
static void setup(void)
{
	int fd;

	scratch_setup();
	sample_make(&sample, 3, 100000);
	context = sample_context(IOSHAPE_ENGINE_AUTO, IOSHAPE_DIRECT_PREFER);
	snprintf(output, sizeof(output), "%s.output", scratch_directory());
	fd = open(output, O_RDWR | O_CREAT | O_TRUNC | O_APPEND | O_CLOEXEC, 0600);
	for (int i = 0; i < 2; i++) {
		fflush(NULL);
		real_output[i] = dup(i + 1);
		dup2(fd, i + 1);
	}
	close(fd);
}

static void teardown(void)
{
	struct stat status;

	ioshape_context_free(context);
	fflush(NULL);
	for (int i = 0; i < 2; i++) {
		dup2(real_output[i], i + 1);
		close(real_output[i]);
	}
	ck_assert_int_eq(stat(output, &status), 0);
	ck_assert_msg(!status.st_size, "something was printed: see %s", output);
	unlink(output);
	sample_free(&sample);
	scratch_teardown();
}

static int save_with(const struct ioshape_save_options *options)
{
	return ioshape_save_tensors(context, scratch_path("file"), sample.tensors, sample.count,
				    options, NULL);
}

/* Checks that all calls returned -EINVAL. */
static void must_be_refused(const int *answers, size_t count)
{
	for (size_t i = 0; i < count; i++)
		ck_assert_msg(answers[i] == -EINVAL, "call %zu: %d", i, answers[i]);
	ck_assert_int_eq(ioshape_last_error()->code, -EINVAL);
}

#define MUST_BE_REFUSED(answers) must_be_refused(answers, COUNT(answers))

/* ---- NULL ------------------------------------------------------------------------------------ */

static struct test_case calls_case = { .name = "calls", .setup = setup, .teardown = teardown };

TEST(calls_case, no_handle_is_an_error_and_nothing_is_freed_without_harm)
{
	const struct handles none = { 0 };

	ck_assert_int_eq(first_call_without(&none, -EINVAL), 0);
	ioshape_context_free(NULL);
	ioshape_save_free(NULL);
	ioshape_file_free(NULL);
	ioshape_reader_free(NULL);
	ioshape_free(NULL);
}

TEST(calls_case, no_path_no_data_and_no_place_for_the_result_are_errors)
{
	const char *path = scratch_path("file");
	struct ioshape_report report = IOSHAPE_REPORT_INIT;
	struct ioshape_save_options with_report = IOSHAPE_SAVE_OPTIONS_INIT;
	struct ioshape_save_options beside = IOSHAPE_SAVE_OPTIONS_INIT;
	struct ioshape_save_options told = IOSHAPE_SAVE_OPTIONS_INIT;
	struct ioshape_save_options safetensors = IOSHAPE_SAVE_OPTIONS_INIT;
	struct ioshape_save_options no_format = IOSHAPE_SAVE_OPTIONS_INIT;
	struct ioshape_save *save;
	struct ioshape_reader *reader;
	struct ioshape_file *file;

	with_report.report = &report; /* background saves report by their handle */
	beside.checksums = IOSHAPE_CHECKSUMS_BESIDE;
	safetensors.format = told.format = IOSHAPE_FORMAT_SAFETENSORS;
	told.checksums = (enum ioshape_keep_checksums)2;
	no_format.format = (enum ioshape_format)2;
	const int openings[] = {
		ioshape_context_open(NULL, NULL),
		ioshape_save_tensors(context, NULL, NULL, 0, NULL, NULL),
		ioshape_save_tensors(context, NULL, NULL, 0, NULL, &save),
		ioshape_save_tensors(context, "", NULL, 0, NULL, NULL),
		ioshape_save_tensors(context, "directory/", NULL, 0, NULL, &save),
		ioshape_save_tensors(context, "/", NULL, 0, NULL, NULL),
		ioshape_save_tensors(context, path, NULL, 1, NULL, NULL),
		ioshape_save_tensors(context, path, NULL, 1, NULL, &save),
		ioshape_save_records(context, path, NULL, 1, NULL, NULL),
		ioshape_save_tensors(context, path, NULL, 1, &safetensors, NULL),
		ioshape_save_tensors(context, NULL, NULL, 0, &safetensors, &save),
		ioshape_save_records(context, path, NULL, 0, &safetensors, NULL),
		ioshape_save_tensors(context, path, NULL, 0, &with_report, &save),
		ioshape_save_tensors(context, path, NULL, 0, &beside, NULL),
		ioshape_save_records(context, path, NULL, 0, &beside, NULL),
		ioshape_save_tensors(context, path, NULL, 0, &told, NULL),
		ioshape_save_tensors(context, path, NULL, 0, &no_format, NULL),
		ioshape_file_open(context, NULL, NULL, &file),
		ioshape_file_open(context, path, NULL, NULL),
		ioshape_reader_open(context, NULL, NULL, &reader),
		ioshape_reader_open(context, path, NULL, NULL),
	};

	MUST_BE_REFUSED(openings);
	ck_assert(!save && !file && !reader);
	ck_assert_uint_eq(scratch_entries(scratch_directory()), 0);

	ck_assert_int_eq(save_with(NULL), 0);
	ck_assert_int_eq(ioshape_reader_open(context, path, NULL, &reader), 0);
	const int results[] = {
		ioshape_reader_get_info(reader, NULL),
		ioshape_reader_get_record(reader, 0, NULL),
		ioshape_reader_find_record(reader, "data.pkl", NULL),
		ioshape_reader_get_tensor(reader, 0, NULL),
		ioshape_reader_find_tensor(reader, sample.tensors[0].name, NULL),
		ioshape_reader_get_metadata(reader, NULL),
		ioshape_reader_load(reader, NULL, 1),
		ioshape_reader_load_records(reader, NULL, 1),
	};

	MUST_BE_REFUSED(results);
	ck_assert_str_eq(ioshape_last_error()->path, path);
	ioshape_reader_free(reader);
}

static struct ioshape_slot *take_slot(void)
{
	struct ioshape_slot_options options = IOSHAPE_SLOT_OPTIONS_INIT;
	struct ioshape_slot *slot;

	options.path = scratch_directory();
	ck_assert_msg(!ioshape_slot_acquire(context, &options, &slot), "%s",
		      ioshape_last_error()->sentence);
	return slot;
}

TEST(calls_case, slots_need_what_they_are_about_and_a_place_for_what_they_give)
{
	const char *path = scratch_directory();
	struct ioshape_slot_options heavy = IOSHAPE_SLOT_OPTIONS_INIT;
	struct ioshape_slot_info info = IOSHAPE_SLOT_INFO_INIT;
	struct ioshape_slot *slot = take_slot(), *none;

	heavy.path = path;
	heavy.weight = UINT32_MAX;
	const int answers[] = {
		ioshape_slot_acquire(NULL, NULL, &none),
		ioshape_slot_acquire(context, &heavy, &none),
		ioshape_slot_acquire(context, NULL, NULL),
		ioshape_slot_pace(NULL, 1),
		ioshape_slot_get_info(NULL, &info),
		ioshape_slot_get_info(slot, NULL),
	};

	MUST_BE_REFUSED(answers);
	ck_assert_ptr_null(none);
	ck_assert_int_eq(ioshape_slot_get_info(slot, &info), 0);
	ioshape_slot_free(slot);
	ioshape_slot_free(NULL);
}

/* Runs in a forked child. */
static int use_slot(void *slot)
{
	struct ioshape_slot_info info = IOSHAPE_SLOT_INFO_INIT;
	int wrong = ioshape_slot_pace(slot, 1) != -EPERM;

	wrong += ioshape_slot_get_info(slot, &info) != -EPERM;
	ioshape_slot_free(slot);
	return wrong;
}

TEST(calls_case, a_slot_is_its_processs)
{
	struct ioshape_slot *slot = take_slot();

	ck_assert_int_eq(scratch_in_child(use_slot, slot), 0);
	ck_assert_int_eq(ioshape_slot_pace(slot, 1), 0);
	ioshape_slot_free(slot);
}

TEST(calls_case, a_group_needs_a_place_for_what_it_finds)
{
	struct ioshape_group *group, *none;

	ck_assert_int_eq(ioshape_group_open(context, scratch_path("steps"), NULL, &group), 0);
	const int answers[] = {
		ioshape_group_open(context, NULL, NULL, &none),
		ioshape_group_open(context, "", NULL, &none),
		ioshape_group_open(context, scratch_path("steps"), NULL, NULL),
		ioshape_group_fail(NULL, 1, "why"),
		ioshape_group_save_tensors(NULL, 1, NULL, 0, NULL, NULL),
		ioshape_group_save_tensors(group, 1, NULL, 1, NULL, NULL),
	};

	MUST_BE_REFUSED(answers);
	ck_assert_ptr_null(none);
	ck_assert_int_eq(ioshape_group_fail(group, 1, NULL), 0);
	ioshape_group_free(group);
	ioshape_group_free(NULL);
}

static int open_group(const struct ioshape_group_options *options)
{
	struct ioshape_group *group;
	const int ret = ioshape_group_open(context, scratch_path("steps"), options, &group);

	ioshape_group_free(group);
	return ret;
}

TEST(calls_case, a_group_needs_ranks_a_store_and_whole_functions)
{
	struct ioshape_comm comm = { .size = sizeof(comm) };
	struct ioshape_group_options wrong[7];

	for (size_t i = 0; i < COUNT(wrong); i++) {
		wrong[i] = (struct ioshape_group_options)IOSHAPE_GROUP_OPTIONS_INIT;
		wrong[i].ranks = wrong[i].local_ranks = 2;
		wrong[i].token = "token";
		wrong[i].deadline_ms = 1000;
	}
	wrong[0].rank = 2;
	wrong[1].ranks = UINT32_MAX;
	wrong[2].store = (enum ioshape_store)99;
	wrong[3].store = IOSHAPE_STORE_REDIS; /* there is no coordinator */
	wrong[4].comm = &comm;
	wrong[5].mode = (enum ioshape_mode)99;
	wrong[6].size = 1;
	for (size_t i = 0; i < COUNT(wrong); i++)
		ck_assert_msg(open_group(&wrong[i]) == -EINVAL, "options %zu: %d: %s", i,
			      ioshape_last_error()->code, ioshape_last_error()->sentence);
	setenv("IOSHAPE_TEST_STORE", "none", 1);
	wrong[0].rank = 0;
	ck_assert_int_eq(open_group(&wrong[0]), -EINVAL);
}

/* ---- Tensors --------------------------------------------------------------------------------- */

TEST(calls_case, a_tensor_that_makes_no_sense_is_refused_by_name)
{
	static const int64_t shape[2] = { 3, 4 }, negative[2] = { 3, -4 };
	static const int64_t huge[2] = { INT64_MAX, INT64_MAX }, strides[2] = { -4, 1 };
	static const int64_t gaps[2] = { 8, 1 };
	static const uint8_t data[12 * 16];
	static char long_name[IOSHAPE_MAX_NAME_BYTES + 2];
	const struct ioshape_tensor bad[] = {
		{ "odd", (enum ioshape_dtype)0, 2, shape, NULL, data },
		{ "odd", (enum ioshape_dtype)99, 2, shape, NULL, data },
		{ "odd", IOSHAPE_FLOAT32, 2, NULL, NULL, data },
		{ "odd", IOSHAPE_FLOAT32, 2, negative, NULL, data },
		{ "odd", IOSHAPE_FLOAT32, 2, shape, strides, data },
		{ "odd", IOSHAPE_FLOAT32, 2, shape, gaps, data },
		{ "odd", IOSHAPE_FLOAT32, 2, shape, NULL, NULL },
		{ "even", IOSHAPE_FLOAT32, 2, shape, NULL, data },
		{ NULL, IOSHAPE_FLOAT32, 2, shape, NULL, data },
		{ "", IOSHAPE_FLOAT32, 2, shape, NULL, data },
		{ "\xff\xfe", IOSHAPE_FLOAT32, 2, shape, NULL, data },
		/* These exceed a limit. */
		{ "odd", IOSHAPE_FLOAT32, 2, huge, NULL, data },
		{ "odd", IOSHAPE_FLOAT32, IOSHAPE_MAX_DIMS + 1, shape, NULL, data },
		{ "odd", IOSHAPE_FLOAT32, UINT32_MAX, shape, NULL, data },
		{ long_name, IOSHAPE_FLOAT32, 2, shape, NULL, data },
	};

	memset(long_name, 'n', sizeof(long_name) - 1);
	for (size_t i = 0; i < COUNT(bad); i++) {
		const struct ioshape_tensor pair[] = {
			{ "even", IOSHAPE_FLOAT32, 2, shape, NULL, data },
			bad[i],
		};
		const int ret =
			ioshape_save_tensors(context, scratch_path("file"), pair, 2, NULL, NULL);
		const char *record = ioshape_last_error()->record;

		ck_assert_msg(ret == (i < 11 ? -EINVAL : IOSHAPE_E_LIMIT), "%zu: %d", i, ret);
		if (bad[i].name && *bad[i].name != '\xff')
			ck_assert_msg(!strncmp(record, bad[i].name, 4), "%zu: %s", i, record);
	}
	ck_assert_uint_eq(scratch_entries(scratch_directory()), 0);
}

TEST(calls_case, no_tensors_make_a_file)
{
	struct ioshape_reader *reader;
	struct ioshape_reader_info info = { .size = sizeof(info), .tensors = 77 };

	ck_assert_int_eq(ioshape_save_tensors(context, scratch_path("file"), NULL, 0, NULL, NULL),
			 0);
	ck_assert_int_eq(ioshape_reader_open(context, scratch_path("file"), NULL, &reader), 0);
	ck_assert_int_eq(ioshape_reader_get_info(reader, &info), 0);
	ck_assert_uint_eq(info.has_table, 1);
	ck_assert_uint_eq(info.tensors, 0);
	ck_assert_uint_eq(info.block_bytes, 1 << 20);
	ck_assert_int_eq(ioshape_reader_load(reader, NULL, 0), 0);
	ioshape_reader_free(reader);
}

/* ---- Structs of other versions --------------------------------------------------------------- */

TEST(calls_case, a_size_that_was_forgotten_is_refused_everywhere)
{
	const char *path = strdupa(scratch_path("file")); /* save_with() reuses buffers */
	struct ioshape_context_options context_options = { 0 };
	struct ioshape_save_options save_options = { 0 };
	struct ioshape_reader_options reader_options = { 0 };
	struct ioshape_file_options file_options = { 0 };
	struct ioshape_record_info record = { 0 };
	struct ioshape_tensor_info tensor = { 0 };
	struct ioshape_save_status status = { 0 };
	struct ioshape_metadata metadata = { 0 };
	struct ioshape_reader_info info = { 0 };
	struct ioshape_report report = { 0 };
	struct ioshape_save_options with_report = IOSHAPE_SAVE_OPTIONS_INIT;
	struct ioshape_save_options with_metadata = IOSHAPE_SAVE_OPTIONS_INIT;
	struct ioshape_context *other = context;
	struct ioshape_reader *reader, *other_reader;
	struct ioshape_file *file;
	struct ioshape_save *save;

	with_report.report = &report;
	with_metadata.metadata = &metadata;
	const int begun[] = {
		ioshape_context_open(&other, &context_options),
		save_with(&save_options),
		save_with(&with_report),
		save_with(&with_metadata),
		ioshape_save_tensors(context, path, NULL, 0, &save_options, &save),
		ioshape_file_open(context, path, &file_options, &file),
	};

	MUST_BE_REFUSED(begun);
	ck_assert_ptr_null(other);
	ck_assert_uint_eq(scratch_entries(scratch_directory()), 0);

	ck_assert_int_eq(ioshape_save_tensors(context, path, sample.tensors, 1, NULL, &save), 0);
	ck_assert_int_eq(ioshape_save_wait(save, -1), 0);
	ck_assert_int_eq(ioshape_reader_open(context, path, NULL, &reader), 0);
	const int asked[] = {
		ioshape_save_get_report(save, &report),
		ioshape_save_get_status(save, &status, NULL),
		ioshape_reader_get_info(reader, &info),
		ioshape_reader_get_record(reader, 0, &record),
		ioshape_reader_get_tensor(reader, 0, &tensor),
		ioshape_reader_get_metadata(reader, &metadata),
		ioshape_reader_open(context, path, &reader_options, &other_reader),
	};

	MUST_BE_REFUSED(asked);
	ioshape_reader_free(reader);
	ioshape_save_free(save);
}

TEST(calls_case, a_report_is_filled_as_far_as_the_caller_knows_it)
{
	struct ioshape_save_options options = IOSHAPE_SAVE_OPTIONS_INIT;
	struct {
		struct ioshape_report known;
		uint64_t unknown;
	} report;

	memset(&report, 0xee, sizeof(report));
	report.known.size = offsetof(struct ioshape_report, write_s);
	options.report = &report.known;
	ck_assert_int_eq(save_with(&options), 0);
	ck_assert_uint_gt(report.known.file_bytes, sample.total_bytes);
	for (size_t i = offsetof(struct ioshape_report, write_s); i < sizeof(report); i++)
		ck_assert_uint_eq(((uint8_t *)&report)[i], 0xee);
	report.known.size = sizeof(report);
	ck_assert_int_eq(save_with(&options), 0);
	ck_assert_uint_eq(report.known.size, sizeof(report));
	ck_assert_uint_eq(report.unknown, 0);
	ck_assert_str_eq(report.known.mode, "single");
}

TEST(calls_case, a_report_is_told_in_one_line)
{
	struct ioshape_report report = IOSHAPE_REPORT_INIT;
	char text[512], little[10];
	const char *whole =
		"2,147,483,648 bytes in 0.612 s, stage 0.100, slot 0.020 (behind job 4711; "
		"redis), write 0.450, sync 0.029, 1.500 s after its deadline, uring, direct on "
		"ext4; no preallocation; no lock";
	size_t length;

	report.file_bytes = 2147483648;
	report.total_s = 0.612;
	report.stage_s = 0.1;
	report.slot_s = 0.02;
	report.write_s = 0.45;
	report.sync_s = 0.029;
	report.deadline_left_s = -1.5;
	report.direct = 1;
	report.downgrade_count = 2;
	strcpy(report.engine, "uring");
	strcpy(report.filesystem, "ext4");
	strcpy(report.coordinator, "redis");
	strcpy(report.ahead, "job 4711");
	strcpy(report.downgrades[0].sentence, "no preallocation");
	strcpy(report.downgrades[1].sentence, "no lock");
	length = ioshape_report_text(&report, text, sizeof(text));
	ck_assert_str_eq(text, whole);
	ck_assert_uint_eq(length, strlen(whole));
	/* A buffer that is too small, and no buffer at all. */
	ck_assert_uint_eq(ioshape_report_text(&report, little, sizeof(little)), length);
	ck_assert_str_eq(little, "2,147,483");
	ck_assert_uint_eq(ioshape_report_text(&report, NULL, 0), length);
	/* More downgrades than the report has entries. */
	report.downgrade_count = IOSHAPE_REPORT_DOWNGRADES + 5;
	for (size_t i = 0; i < IOSHAPE_REPORT_DOWNGRADES; i++)
		strcpy(report.downgrades[i].sentence, "s");
	ck_assert_uint_gt(ioshape_report_text(&report, text, sizeof(text)), 0);
	ck_assert_str_eq(strrchr(text, ';'), "; s");
	/* A group's report. */
	report = (struct ioshape_report){ .size = sizeof(report), .file_bytes = 999 };
	report.checkpoint_bytes = 1000;
	report.repeated_bytes = 1000000;
	report.alarms = IOSHAPE_ALARM_NONFINITE;
	strcpy(report.alarm, "tensor \"a\" has 1 NaN");
	strcpy(report.mode, "node");
	strcpy(report.why, "one node");
	ioshape_report_text(&report, text, sizeof(text));
	ck_assert_str_eq(text, "999 bytes in 0.000 s, part of 1,000 bytes, node: one node, "
			       "1,000,000 bytes of identical shards are stored once; "
			       "alarm: tensor \"a\" has 1 NaN");
	report.size = 3;
	ck_assert_uint_eq(ioshape_report_text(&report, text, sizeof(text)), 0);
}

TEST(calls_case, the_report_of_a_failed_save_is_filled_too)
{
	struct ioshape_save_options options = IOSHAPE_SAVE_OPTIONS_INIT;
	struct ioshape_report report = IOSHAPE_REPORT_INIT;

	memset((char *)&report + sizeof(size_t), 0xee, sizeof(report) - sizeof(size_t));
	options.report = &report;
	ck_assert_int_eq(sample_save(context, scratch_path("missing/file"), &sample, &options),
			 -ENOENT);
	ck_assert_uint_eq(report.file_bytes, 0);
	ck_assert_double_ge(report.total_s, 0);
	ck_assert_double_lt(report.total_s, 60);
	ck_assert_uint_eq(report.downgrade_count, 0);
	/* This save fails at the very end, so its report is nearly complete. */
	scratch_write(scratch_path("file"), "old", 3);
	options.replace = IOSHAPE_OFF;
	ck_assert_int_eq(save_with(&options), -EEXIST);
	ck_assert_uint_gt(report.file_bytes, sample.total_bytes);
	ck_assert_uint_ge(report.file_bytes, sample.total_bytes);
	ck_assert_double_gt(report.write_s, 0);
	ck_assert_uint_ne(report.filesystem[0], 0);
}

/* ---- Contexts -------------------------------------------------------------------------------- */

TEST(calls_case, context_options_out_of_range_are_refused)
{
	static const struct ioshape_context_options bad[] = {
		{ .staging_bytes = 1 },
		{ .staging_bytes = (16 << 20) - 1 },
		{ .engine = (enum ioshape_engine)(IOSHAPE_ENGINE_BUFFERED + 1) },
		{ .engine = (enum ioshape_engine) - 1 },
		{ .direct = (enum ioshape_direct)3 },
		{ .log_level = (enum ioshape_log_level)(IOSHAPE_LOG_DEBUG + 1) },
		{ .full = (enum ioshape_full)2 },
		{ .full = (enum ioshape_full) - 1 },
		{ .examine = "ignore" },
		{ .examine = "nonfinite=stop" },
		{ .examine = "nonfinit=fail" },
		{ .examine = "constant=off,,jump=warn" },
		{ .examine = "constant" },
		{ .engine = IOSHAPE_ENGINE_BUFFERED, .direct = IOSHAPE_DIRECT_REQUIRE },
	};

	for (size_t i = 0; i < COUNT(bad); i++) {
		struct ioshape_context_options options = bad[i];
		struct ioshape_context *other = context;

		options.size = sizeof(options);
		ck_assert_msg(ioshape_context_open(&other, &options) == -EINVAL, "%zu", i);
		ck_assert_ptr_null(other);
	}
}

static struct ioshape_report report_of(const struct ioshape_context_options *options)
{
	struct ioshape_save_options save_options = IOSHAPE_SAVE_OPTIONS_INIT;
	struct ioshape_report report = IOSHAPE_REPORT_INIT;
	struct ioshape_context *other;

	save_options.report = &report;
	ck_assert_int_eq(ioshape_context_open(&other, options), 0);
	ck_assert_int_eq(sample_save(other, scratch_path("file"), &sample, &save_options), 0);
	ioshape_context_free(other);
	return report;
}

TEST(calls_case, variables_fill_what_is_left_at_zero)
{
	struct ioshape_context_options options = IOSHAPE_CONTEXT_OPTIONS_INIT;
	struct ioshape_report report;

	setenv("IOSHAPE_ENGINE", "threads", 1);
	setenv("IOSHAPE_DIRECT", "off", 1);
	report = report_of(&options);
	ck_assert_str_eq(report.engine, "threads");
	ck_assert_uint_eq(report.direct, 0);
	/* An option of the program overrides the variable. */
	options.engine = IOSHAPE_ENGINE_BUFFERED;
	ck_assert_str_eq(report_of(&options).engine, "buffered");
}

TEST(calls_case, variables_that_make_no_sense_are_refused)
{
	static const char *const bad[][2] = {
		{ "IOSHAPE_ENGINE", "nonsense" },        { "IOSHAPE_ENGINE", "nil" },
		{ "IOSHAPE_DIRECT", "nonsense" },        { "IOSHAPE_SLOTS", "-1" },
		{ "IOSHAPE_STAGING_BYTES", "nonsense" }, { "IOSHAPE_STAGING_BYTES", "15M" },
	};

	for (size_t i = 0; i < COUNT(bad); i++) {
		struct ioshape_context *other;

		setenv(bad[i][0], bad[i][1], 1);
		ck_assert_msg(ioshape_context_open(&other, NULL) == -EINVAL, "%s=%s", bad[i][0],
			      bad[i][1]);
		unsetenv(bad[i][0]);
	}
}

/* The metadata of one save does not appear in the next file. */
TEST(calls_case, saves_do_not_know_of_each_other)
{
	char why[512];

	ck_assert_int_eq(sample_save(context, scratch_path("file"), &sample, NULL), 0);
	ck_assert_int_eq(save_with(NULL), 0);
	sample.metadata = (struct ioshape_metadata)IOSHAPE_METADATA_INIT;
	ck_assert_msg(!sample_check(context, scratch_path("file"), &sample, why, sizeof(why)), "%s",
		      why);
}

/* ---- Failures -------------------------------------------------------------------------------- */

static void must_have_failed(int code, const char *operation, const char *path, const char *record)
{
	const struct ioshape_error *error = ioshape_last_error();

	ck_assert_int_eq(error->code, code);
	ck_assert_str_eq(error->operation, operation);
	ck_assert_str_eq(error->path, path);
	ck_assert_str_eq(error->record, record);
}

TEST(calls_case, a_failure_tells_the_path_and_what_was_being_done)
{
	const char *path = scratch_path("missing/file"), *text = scratch_path("text");
	struct ioshape_reader *reader;
	uint64_t index;

	ck_assert_int_eq(ioshape_save_tensors(context, path, NULL, 0, NULL, NULL), -ENOENT);
	must_have_failed(-ENOENT, "save", path, "");
	ck_assert_int_eq(ioshape_reader_open(context, path, NULL, &reader), -ENOENT);
	must_have_failed(-ENOENT, "load", path, "");
	scratch_write(text, "this is no archive", 18);
	ck_assert_int_eq(ioshape_reader_open(context, text, NULL, &reader), IOSHAPE_E_FORMAT);
	must_have_failed(IOSHAPE_E_FORMAT, "load", text, "");
	ck_assert_int_eq(ioshape_reader_open(context, scratch_directory(), NULL, &reader), -EISDIR);
	ck_assert_int_eq(save_with(NULL), 0);
	ck_assert_int_eq(ioshape_reader_open(context, scratch_path("file"), NULL, &reader), 0);
	ck_assert_int_eq(ioshape_reader_find_record(reader, "z", &index), -ENOENT);
	must_have_failed(-ENOENT, "load", scratch_path("file"), "z");
	ioshape_reader_free(reader);
}

/* A sentence contains path, reason and remedy. */
TEST(calls_case, a_failure_in_words_wording)
{
	const char *path = scratch_path("missing/file");

	ck_assert_int_eq(ioshape_save_tensors(context, path, NULL, 0, NULL, NULL), -ENOENT);
	ck_assert_ptr_nonnull(strstr(ioshape_last_error()->sentence, path));
	ck_assert_ptr_nonnull(strstr(ioshape_last_error()->sentence, strerror(ENOENT)));
	ck_assert_int_eq(ioshape_save_tensors(NULL, path, NULL, 0, NULL, NULL), -EINVAL);
	ck_assert_str_eq(ioshape_last_error()->remedy, "open one first");
}
