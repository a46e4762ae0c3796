/* SPDX-License-Identifier: Apache-2.0 */
/* What calls make of bad arguments, of structs of other versions, and that nothing is ever printed.
 */
#define _GNU_SOURCE
#include "support/check_main.h"
#include "support/sample.h"
#include "support/scratch.h"
#include "support/write_record.h"

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

/* From here on standard output and error go to a file, which must stay empty. */
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

static const char *message(void)
{
	return ioshape_last_error()->sentence;
}

static bool says(const char *text, const char *part)
{
	return strstr(text, part) != NULL;
}

/* ---- NULL ------------------------------------------------------------------------------------ */

START_TEST(nothing_is_freed_without_harm)
{
	ioshape_context_free(NULL);
	ioshape_save_free(NULL);
	ioshape_writer_free(NULL);
	ioshape_reader_free(NULL);
}
END_TEST

START_TEST(no_context_is_an_error)
{
	struct ioshape_writer *writer = (struct ioshape_writer *)&sample;
	struct ioshape_reader *reader = (struct ioshape_reader *)&sample;
	struct ioshape_save *save = (struct ioshape_save *)&sample;

	ck_assert_int_eq(ioshape_save_tensors(NULL, "file", NULL, 0, NULL, NULL), -EINVAL);
	ck_assert_int_eq(ioshape_save_tensors(NULL, "file", NULL, 0, NULL, &save), -EINVAL);
	ck_assert_ptr_null(save);
	ck_assert_int_eq(ioshape_writer_open(NULL, "file", NULL, &writer), -EINVAL);
	ck_assert_ptr_null(writer);
	ck_assert_int_eq(ioshape_reader_open(NULL, "file", NULL, &reader), -EINVAL);
	ck_assert_ptr_null(reader);
	ck_assert_int_eq(ioshape_context_reserve(NULL, 1), -EINVAL);
	ck_assert_ptr_nonnull(ioshape_last_error()->sentence);
}
END_TEST

START_TEST(no_handle_is_an_error)
{
	struct ioshape_record_info record = { .size = sizeof(record) };
	struct ioshape_tensor_info tensor = { .size = sizeof(tensor) };
	struct ioshape_metadata metadata = IOSHAPE_METADATA_INIT;
	struct ioshape_save_status status = IOSHAPE_SAVE_STATUS_INIT;
	struct ioshape_reader_info info = IOSHAPE_READER_INFO_INIT;
	struct ioshape_report report = IOSHAPE_REPORT_INIT;
	uint64_t number;
	char byte;

	ck_assert_int_eq(ioshape_save_wait(NULL, 0), -EINVAL);
	ck_assert_int_eq(ioshape_save_get_report(NULL, &report), -EINVAL);
	ck_assert_int_eq(ioshape_save_get_status(NULL, &status, NULL), -EINVAL);
	ck_assert_int_eq(ioshape_last_error()->code, -EINVAL);
	ck_assert_int_eq(ioshape_writer_begin_record(NULL, "a", 1, 0), -EINVAL);
	ck_assert_int_eq(ioshape_writer_write(NULL, "a", 1), -EINVAL);
	ck_assert_int_eq(ioshape_writer_end_record(NULL), -EINVAL);
	ck_assert_int_eq(ioshape_writer_commit(NULL, NULL), -EINVAL);
	ck_assert_int_eq(ioshape_writer_commit(NULL, &report), -EINVAL);
	ck_assert_int_eq(ioshape_last_error()->code, -EINVAL);
	ck_assert_int_eq(ioshape_reader_get_info(NULL, &info), -EINVAL);
	ck_assert_int_eq(ioshape_reader_get_record(NULL, 0, &record), -EINVAL);
	ck_assert_int_eq(ioshape_reader_find_record(NULL, "a", &number), -EINVAL);
	ck_assert_int_eq(ioshape_reader_read(NULL, 0, 0, &byte, 1), -EINVAL);
	ck_assert_int_eq(ioshape_reader_verify(NULL), -EINVAL);
	ck_assert_int_eq(ioshape_reader_get_tensor(NULL, 0, &tensor), -EINVAL);
	ck_assert_int_eq(ioshape_reader_find_tensor(NULL, "a", &number), -EINVAL);
	ck_assert_int_eq(ioshape_reader_load(NULL, NULL, 0), -EINVAL);
	ck_assert_int_eq(ioshape_reader_get_metadata(NULL, &metadata), -EINVAL);
	ck_assert_int_eq(ioshape_last_error()->code, -EINVAL);
}
END_TEST

START_TEST(no_path_and_no_place_for_the_handle_are_errors)
{
	struct ioshape_save *save;
	struct ioshape_writer *writer;
	struct ioshape_reader *reader;

	ck_assert_int_eq(ioshape_context_open(NULL, NULL), -EINVAL);
	ck_assert_int_eq(ioshape_save_tensors(context, NULL, NULL, 0, NULL, NULL), -EINVAL);
	ck_assert(says(message(), "path"));
	ck_assert_int_eq(ioshape_save_tensors(context, NULL, NULL, 0, NULL, &save), -EINVAL);
	ck_assert_int_eq(ioshape_writer_open(context, NULL, NULL, &writer), -EINVAL);
	ck_assert_int_eq(ioshape_writer_open(context, "x", NULL, NULL), -EINVAL);
	ck_assert_int_eq(ioshape_reader_open(context, NULL, NULL, &reader), -EINVAL);
	ck_assert_int_eq(ioshape_reader_open(context, "x", NULL, NULL), -EINVAL);
}
END_TEST

START_TEST(tensors_that_are_not_there_are_an_error)
{
	struct ioshape_save *save;

	ck_assert_int_eq(ioshape_save_tensors(context, scratch_path("file"), NULL, 1, NULL, NULL),
			 -EINVAL);
	ck_assert_int_eq(ioshape_save_tensors(context, scratch_path("file"), NULL, 1, NULL, &save),
			 -EINVAL);
	ck_assert_uint_eq(scratch_entries(scratch_directory()), 0);
}
END_TEST

/* ---- Tensors --------------------------------------------------------------------------------- */

/* Each is refused with its name in the sentence, before anything has begun. */
START_TEST(a_tensor_that_makes_no_sense_is_refused_by_name)
{
	static const int64_t shape[2] = { 3, 4 }, negative[2] = { 3, -4 };
	static const int64_t huge[2] = { INT64_MAX, INT64_MAX }, strides[2] = { -4, 1 };
	static const uint8_t data[12 * 16];
	const struct ioshape_tensor good = { "odd one", IOSHAPE_FLOAT32, 2, shape, NULL, data };
	struct ioshape_tensor bad[9];
	char long_name[IOSHAPE_MAX_NAME_BYTES + 2];

	for (size_t i = 0; i < COUNT(bad); i++)
		bad[i] = good;
	bad[0].dtype = (enum ioshape_dtype)0;
	bad[1].dtype = (enum ioshape_dtype)99;
	bad[2].shape = NULL;
	bad[3].shape = negative;
	bad[4].shape = huge;
	bad[5].strides = strides;
	bad[6].data = NULL;
	bad[7].dims = IOSHAPE_MAX_DIMS + 1;
	bad[8].dims = UINT32_MAX;
	for (size_t i = 0; i < COUNT(bad); i++) {
		struct ioshape_tensor pair[2] = { good, bad[i] };
		int ret;

		pair[0].name = "even one";
		ret = ioshape_save_tensors(context, scratch_path("file"), pair, 2, NULL, NULL);
		ck_assert_msg(ret == -EINVAL || ret == IOSHAPE_E_LIMIT, "%zu: %d", i, ret);
		ck_assert_msg(says(message(), "odd one"), "%zu: %s", i, message());
	}
	memset(long_name, 'n', sizeof(long_name) - 1);
	long_name[sizeof(long_name) - 1] = 0;
	for (int i = 0; i < 4; i++) {
		const char *const names[] = { NULL, "", "\xff\xfe", long_name };
		struct ioshape_tensor one = good;
		int ret;

		one.name = names[i];
		ret = ioshape_save_tensors(context, scratch_path("file"), &one, 1, NULL, NULL);
		ck_assert_msg(ret == (i == 3 ? IOSHAPE_E_LIMIT : -EINVAL), "name %d: %d", i, ret);
		ck_assert_str_ne(message(), "");
	}
	ck_assert_uint_eq(scratch_entries(scratch_directory()), 0);
}
END_TEST

START_TEST(two_tensors_of_one_name_are_refused)
{
	struct ioshape_tensor twice[2] = { sample.tensors[0], sample.tensors[0] };

	ck_assert_int_eq(ioshape_save_tensors(context, scratch_path("file"), twice, 2, NULL, NULL),
			 -EINVAL);
	ck_assert(says(message(), sample.tensors[0].name));
}
END_TEST

START_TEST(no_tensors_make_a_file)
{
	struct ioshape_reader *reader;
	struct ioshape_reader_info info = { .size = sizeof(info), .tensors = 77 };

	ck_assert_int_eq(ioshape_save_tensors(context, scratch_path("file"), NULL, 0, NULL, NULL),
			 0);
	ck_assert_int_eq(ioshape_reader_open(context, scratch_path("file"), NULL, &reader), 0);
	ck_assert_int_eq(ioshape_reader_get_info(reader, &info), 0);
	ck_assert_uint_eq(info.has_table, 1);
	ck_assert_uint_eq(info.tensors, 0);
	ck_assert_int_eq(ioshape_reader_load(reader, NULL, 0), 0);
	ioshape_reader_free(reader);
}
END_TEST

/* ---- Structs of other versions --------------------------------------------------------------- */

START_TEST(options_of_older_and_newer_headers_are_taken)
{
	struct {
		struct ioshape_save_options known;
		uint64_t unknown[4];
	} options = { .known = IOSHAPE_SAVE_OPTIONS_INIT };

	options.known.size = sizeof(size_t);
	options.known.replace =
		IOSHAPE_OFF; /* not looked at: the caller's header does not have it */
	ck_assert_int_eq(save_with(&options.known), 0);
	ck_assert_int_eq(save_with(&options.known), 0);
	options.known = (struct ioshape_save_options)IOSHAPE_SAVE_OPTIONS_INIT;
	options.known.size = sizeof(options);
	ck_assert_int_eq(save_with(&options.known), 0);
	options.unknown[3] = 1;
	ck_assert_int_eq(save_with(&options.known), -EINVAL);
	ck_assert(says(message(), "ioshape_save_options"));
	options.known.size = 0;
	ck_assert_int_eq(save_with(&options.known), -EINVAL);
	ck_assert(says(message(), "ioshape_save_options"));
}
END_TEST

/* Every call that takes a struct with a size refuses one that is not set. */
START_TEST(a_size_that_was_forgotten_is_refused_everywhere)
{
	struct ioshape_context_options context_options = { 0 };
	struct ioshape_save_options save_options = { 0 };
	struct ioshape_writer_options writer_options = { 0 };
	struct ioshape_reader_options reader_options = { 0 };
	struct ioshape_record_info record = { 0 };
	struct ioshape_tensor_info tensor = { 0 };
	struct ioshape_metadata metadata = { 0 };
	struct ioshape_report report = { 0 };
	struct ioshape_context *other = context;
	struct ioshape_writer *writer;
	struct ioshape_reader *reader;
	struct ioshape_save *save;

	ck_assert_int_eq(ioshape_context_open(&other, &context_options), -EINVAL);
	ck_assert_ptr_null(other);
	ck_assert(says(message(), "ioshape_context_options"));
	ck_assert_int_eq(save_with(&save_options), -EINVAL);
	ck_assert_int_eq(
		ioshape_save_tensors(context, scratch_path("file"), NULL, 0, &save_options, &save),
		-EINVAL);
	ck_assert_int_eq(
		ioshape_writer_open(context, scratch_path("file"), &writer_options, &writer),
		-EINVAL);
	save_options.size = sizeof(save_options);
	save_options.report = &report;
	ck_assert_int_eq(save_with(&save_options), -EINVAL);
	ck_assert(says(message(), "ioshape_report"));
	save_options.report = NULL;
	save_options.metadata = &metadata;
	ck_assert_int_eq(save_with(&save_options), -EINVAL);
	ck_assert(says(message(), "ioshape_metadata"));
	/* None of them has begun anything. */
	ck_assert_uint_eq(scratch_entries(scratch_directory()), 0);

	save_options.metadata = NULL;
	ck_assert_int_eq(save_with(&save_options), 0);
	ck_assert_int_eq(
		ioshape_reader_open(context, scratch_path("file"), &reader_options, &reader),
		-EINVAL);
	ck_assert_int_eq(ioshape_reader_open(context, scratch_path("file"), NULL, &reader), 0);
	ck_assert_int_eq(ioshape_reader_get_record(reader, 0, &record), -EINVAL);
	ck_assert(says(ioshape_last_error()->sentence, "ioshape_record_info"));
	ck_assert_int_eq(ioshape_reader_get_tensor(reader, 0, &tensor), -EINVAL);
	ck_assert_int_eq(ioshape_reader_get_metadata(reader, &metadata), -EINVAL);
	ioshape_reader_free(reader);
	ck_assert_int_eq(ioshape_save_tensors(context, scratch_path("file"), NULL, 0, NULL, &save),
			 0);
	ck_assert_int_eq(ioshape_save_wait(save, -1), 0);
	ck_assert_int_eq(ioshape_save_get_report(save, &report), -EINVAL);
	ioshape_save_free(save);
}
END_TEST

START_TEST(a_report_is_filled_as_far_as_the_caller_knows_it)
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
	ck_assert_uint_eq(report.known.tensor_bytes, sample.total_bytes);
	for (size_t i = offsetof(struct ioshape_report, write_s); i < sizeof(report); i++)
		ck_assert_uint_eq(((uint8_t *)&report)[i], 0xee);
	report.known.size = sizeof(report);
	ck_assert_int_eq(save_with(&options), 0);
	ck_assert_uint_eq(report.known.size, sizeof(report));
	ck_assert_uint_eq(report.unknown, 0);
	ck_assert_str_eq(report.known.mode, "single");
}
END_TEST

START_TEST(the_report_of_a_failed_save_is_filled_too)
{
	struct ioshape_save_options options = IOSHAPE_SAVE_OPTIONS_INIT;
	struct ioshape_report report = IOSHAPE_REPORT_INIT;

	memset((char *)&report + sizeof(size_t), 0xee, sizeof(report) - sizeof(size_t));
	options.report = &report;
	ck_assert_int_eq(ioshape_save_tensors(context, scratch_path("missing/file"), sample.tensors,
					      sample.count, &options, NULL),
			 -ENOENT);
	ck_assert_uint_eq(report.file_bytes, 0);
	ck_assert_double_ge(report.total_s, 0);
	ck_assert_double_lt(report.total_s, 60);
	ck_assert_uint_lt(strnlen(report.steps[0].sentence, sizeof(report.steps[0].sentence)),
			  sizeof(report.steps[0].sentence));
	/* One that fails at the very end has much to report. */
	scratch_write(scratch_path("file"), "old", 3);
	options.replace = IOSHAPE_OFF;
	ck_assert_int_eq(save_with(&options), -EEXIST);
	ck_assert_uint_gt(report.file_bytes, sample.total_bytes);
	ck_assert_uint_eq(report.tensor_bytes, sample.total_bytes);
	ck_assert_double_gt(report.write_s, 0);
	ck_assert_uint_ne(report.filesystem[0], 0);
}
END_TEST

/* ---- Contexts -------------------------------------------------------------------------------- */

START_TEST(context_options_out_of_range_are_refused)
{
	static const struct {
		uint64_t block_bytes;
		uint32_t queue_depth;
		int engine, direct, level, calibrate, disk_full;
		const char *word;
	} bad[] = {
		{ .block_bytes = 1, .word = "block_bytes" },
		{ .block_bytes = 65535, .word = "block_bytes" },
		{ .block_bytes = 65537, .word = "block_bytes" },
		{ .block_bytes = 128u << 20, .word = "block_bytes" },
		{ .queue_depth = 65, .word = "queue_depth" },
		{ .engine = IOSHAPE_ENGINE_NIL + 1, .word = "engine" },
		{ .engine = -1, .word = "engine" },
		{ .direct = 3, .word = "direct" },
		{ .level = 5, .word = "log_level" },
		{ .calibrate = 3, .word = "calibrate" },
		{ .disk_full = 2, .word = "full" },
		{ .disk_full = -1, .word = "full" },
		{ .engine = IOSHAPE_ENGINE_BUFFERED,
		  .direct = IOSHAPE_DIRECT_REQUIRE,
		  .word = "direct" },
	};

	for (size_t i = 0; i < COUNT(bad); i++) {
		struct ioshape_context_options options = IOSHAPE_CONTEXT_OPTIONS_INIT;
		struct ioshape_context *other = context;

		options.block_bytes = bad[i].block_bytes;
		options.queue_depth = bad[i].queue_depth;
		options.engine = (enum ioshape_engine)bad[i].engine;
		options.direct = (enum ioshape_direct)bad[i].direct;
		options.log_level = (enum ioshape_log_level)bad[i].level;
		options.calibrate = (enum ioshape_calibrate)bad[i].calibrate;
		options.full = (enum ioshape_full)bad[i].disk_full;
		ck_assert_msg(ioshape_context_open(&other, &options) == -EINVAL, "%zu", i);
		ck_assert_ptr_null(other);
		ck_assert_msg(says(message(), bad[i].word), "%zu: %s", i, message());
	}
}
END_TEST

START_TEST(variables_fill_what_is_left_at_zero)
{
	struct ioshape_context_options options = IOSHAPE_CONTEXT_OPTIONS_INIT;
	struct ioshape_save_options save_options = IOSHAPE_SAVE_OPTIONS_INIT;
	struct ioshape_report report = IOSHAPE_REPORT_INIT;
	struct ioshape_context *other;

	setenv("IOSHAPE_ENGINE", "threads", 1);
	setenv("IOSHAPE_DIRECT", "off", 1);
	setenv("IOSHAPE_BLOCK_BYTES", "128K", 1);
	setenv("IOSHAPE_QUEUE_DEPTH", "3", 1);
	ck_assert_int_eq(ioshape_context_open(&other, &options), 0);
	save_options.report = &report;
	ck_assert_int_eq(ioshape_save_tensors(other, scratch_path("file"), sample.tensors,
					      sample.count, &save_options, NULL),
			 0);
	ioshape_context_free(other);
	ck_assert_str_eq(report.engine, "threads");
	ck_assert_uint_eq(report.direct, 0);
	ck_assert_uint_eq(report.block_bytes, 128 << 10);
	ck_assert_uint_eq(report.queue_depth, 3);
	/* What the program sets is stronger. */
	options.engine = IOSHAPE_ENGINE_BUFFERED;
	ck_assert_int_eq(ioshape_context_open(&other, &options), 0);
	ck_assert_int_eq(ioshape_save_tensors(other, scratch_path("file"), sample.tensors,
					      sample.count, &save_options, NULL),
			 0);
	ioshape_context_free(other);
	ck_assert_str_eq(report.engine, "buffered");
}
END_TEST

START_TEST(variables_that_make_no_sense_are_named)
{
	static const char *const variables[] = { "IOSHAPE_ENGINE", "IOSHAPE_DIRECT",
						 "IOSHAPE_BLOCK_BYTES", "IOSHAPE_QUEUE_DEPTH",
						 "IOSHAPE_STAGING_BYTES" };

	for (size_t i = 0; i < COUNT(variables); i++) {
		struct ioshape_context *other;

		setenv(variables[i], "nonsense", 1);
		ck_assert_int_eq(ioshape_context_open(&other, NULL), -EINVAL);
		ck_assert_msg(says(message(), variables[i]) && says(message(), "nonsense"), "%s",
			      message());
		unsetenv(variables[i]);
	}
}
END_TEST

START_TEST(contexts_do_not_know_of_each_other)
{
	char why[512];
	struct ioshape_context *other = sample_context(IOSHAPE_ENGINE_BUFFERED, IOSHAPE_DIRECT_OFF);

	ck_assert_int_eq(save_with(NULL), 0);
	ck_assert_int_eq(
		ioshape_save_tensors(other, scratch_path("missing/file"), NULL, 0, NULL, NULL),
		-ENOENT);
	ck_assert(says(ioshape_last_error()->sentence, "missing/file"));
	ioshape_context_free(other);
	sample.metadata.step = 0;
	ck_assert_int_eq(save_with(NULL), 0);
	/* Without metadata there is none. */
	ck_assert_int_eq(sample_check(context, scratch_path("file"), &sample, why, sizeof(why)),
			 -EBADMSG);
	ck_assert(says(why, "metadata"));
}
END_TEST

START_TEST(memory_is_given_back_when_it_is_asked_for)
{
	ck_assert_int_eq(ioshape_context_reserve(context, 0), 0);
	ck_assert_int_eq(save_with(NULL), 0);
	ck_assert_int_eq(ioshape_context_reserve(context, 20 << 20), 0);
	ck_assert_int_eq(ioshape_context_reserve(context, 0), 0);
	ck_assert_int_eq(ioshape_context_reserve(context, 0), 0);
	ck_assert_int_eq(ioshape_context_reserve(context, UINT64_MAX), -ENOMEM);
	ck_assert(ioshape_last_error()->code == -ENOMEM);
	ck_assert_int_eq(save_with(NULL), 0);
}
END_TEST

/* ---- Sentences ------------------------------------------------------------------------------- */

START_TEST(a_failure_names_the_path_and_what_was_being_done)
{
	struct ioshape_reader *reader;
	struct ioshape_writer *writer;
	const char *path = scratch_path("missing/file");

	ck_assert_int_eq(ioshape_save_tensors(context, path, NULL, 0, NULL, NULL), -ENOENT);
	ck_assert(says(message(), path));
	ck_assert_str_eq(ioshape_last_error()->operation, "save");
	ck_assert_str_eq(ioshape_last_error()->path, path);
	ck_assert_int_eq(ioshape_writer_open(context, path, NULL, &writer), -ENOENT);
	ck_assert(says(message(), path));
	ck_assert_int_eq(ioshape_reader_open(context, path, NULL, &reader), -ENOENT);
	ck_assert(says(message(), path));
	scratch_write(scratch_path("text"), "this is no archive", 18);
	ck_assert_int_eq(ioshape_reader_open(context, scratch_path("text"), NULL, &reader),
			 IOSHAPE_E_FORMAT);
	ck_assert(says(message(), scratch_path("text")));
	ck_assert_int_eq(ioshape_reader_open(context, scratch_directory(), NULL, &reader), -EISDIR);
}
END_TEST

START_TEST(writers_and_readers_have_sentences_of_their_own)
{
	struct ioshape_writer *writer;
	struct ioshape_reader *reader;
	uint64_t index;

	ck_assert_int_eq(ioshape_writer_open(context, scratch_path("file"), NULL, &writer), 0);
	ck_assert_int_eq(write_record(writer, "a", "1", 1, 0), 0);
	ck_assert_int_eq(write_record(writer, "a", "1", 1, 0), -EEXIST);
	ck_assert(says(ioshape_last_error()->sentence, "\"a\""));
	ck_assert(says(ioshape_last_error()->sentence, scratch_path("file")));
	ck_assert_int_eq(write_record(writer, "b", "2", 1, 0), 0);
	ck_assert_int_eq(ioshape_writer_commit(writer, NULL), 0);
	ck_assert_int_eq(write_record(writer, "c", "3", 1, 0), -EINVAL);
	ck_assert_int_eq(ioshape_writer_commit(writer, NULL), -EINVAL);
	ioshape_writer_free(writer);

	ck_assert_int_eq(ioshape_reader_open(context, scratch_path("file"), NULL, &reader), 0);
	ck_assert_int_eq(ioshape_reader_find_record(reader, "z", &index), -ENOENT);
	ck_assert(says(ioshape_last_error()->sentence, "\"z\""));
	ck_assert_int_eq(ioshape_reader_find_record(reader, "b", &index), 0);
	ck_assert_uint_eq(index, 1);
	ioshape_reader_free(reader);
}
END_TEST

int main(void)
{
	Suite *suite = suite_create("api/arguments");
	TCase *nothing = tcase_create("NULL"), *tensors = tcase_create("tensors");
	TCase *structs = tcase_create("structs"), *contexts = tcase_create("contexts");
	TCase *sentences = tcase_create("sentences");
	TCase *all[] = { nothing, tensors, structs, contexts, sentences };

	for (size_t i = 0; i < COUNT(all); i++) {
		tcase_add_checked_fixture(all[i], setup, teardown);
		tcase_set_timeout(all[i], 30);
		suite_add_tcase(suite, all[i]);
	}
	tcase_add_test(nothing, nothing_is_freed_without_harm);
	tcase_add_test(nothing, no_context_is_an_error);
	tcase_add_test(nothing, no_handle_is_an_error);
	tcase_add_test(nothing, no_path_and_no_place_for_the_handle_are_errors);
	tcase_add_test(nothing, tensors_that_are_not_there_are_an_error);
	tcase_add_test(tensors, a_tensor_that_makes_no_sense_is_refused_by_name);
	tcase_add_test(tensors, two_tensors_of_one_name_are_refused);
	tcase_add_test(tensors, no_tensors_make_a_file);
	tcase_add_test(structs, options_of_older_and_newer_headers_are_taken);
	tcase_add_test(structs, a_size_that_was_forgotten_is_refused_everywhere);
	tcase_add_test(structs, a_report_is_filled_as_far_as_the_caller_knows_it);
	tcase_add_test(structs, the_report_of_a_failed_save_is_filled_too);
	tcase_add_test(contexts, context_options_out_of_range_are_refused);
	tcase_add_test(contexts, variables_fill_what_is_left_at_zero);
	tcase_add_test(contexts, variables_that_make_no_sense_are_named);
	tcase_add_test(contexts, contexts_do_not_know_of_each_other);
	tcase_add_test(contexts, memory_is_given_back_when_it_is_asked_for);
	tcase_add_test(sentences, a_failure_names_the_path_and_what_was_being_done);
	tcase_add_test(sentences, writers_and_readers_have_sentences_of_their_own);
	return check_main(suite);
}
