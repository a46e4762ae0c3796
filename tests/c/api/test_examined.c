/* SPDX-License-Identifier: Apache-2.0 */
/* Saves keep statistics of their tensors in the file. */
#define _GNU_SOURCE
#include "support/check_main.h"
#include "support/scratch.h"

#include <ioshape/ioshape.h>

#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

/* More than a chunk of staging memory, and no multiple of any piece. */
#define NUMBERS ((size_t)5000001)

static struct ioshape_context *context;
static float *numbers;

static void setup(void)
{
	scratch_setup();
	ck_assert_int_eq(ioshape_context_open(&context, NULL), 0);
	numbers = malloc(NUMBERS * sizeof(*numbers));
	ck_assert_ptr_nonnull(numbers);
	for (size_t i = 0; i < NUMBERS; i++)
		numbers[i] = (float)(i % 7);
	numbers[17] = -2.5f;
	numbers[NUMBERS / 2] = NAN;
	numbers[NUMBERS - 1] = -INFINITY;
}

static void teardown(void)
{
	free(numbers);
	ioshape_context_free(context);
	scratch_teardown();
}

/* Returns the statistics of a record, or of the tensor at a position in a file in another format.
 */
static struct ioshape_statistics statistics_of(const char *name, const char *record)
{
	struct ioshape_reader_options options = IOSHAPE_READER_OPTIONS_INIT;
	struct ioshape_statistics statistics = IOSHAPE_STATISTICS_INIT;
	struct ioshape_reader *reader;
	uint64_t index;

	options.any_format = 1;
	ck_assert_int_eq(ioshape_reader_open(context, scratch_path(name), &options, &reader), 0);
	if (ioshape_reader_find_record(reader, record, &index))
		index = strtoul(record, NULL, 10);
	ck_assert_int_eq(ioshape_reader_get_statistics(reader, index, &statistics), 0);
	ck_assert_int_eq(ioshape_reader_verify(reader, 1), 0);
	ioshape_reader_free(reader);
	return statistics;
}

static void expect_statistics_of_numbers(const char *name, const char *record)
{
	const struct ioshape_statistics found = statistics_of(name, record);
	double squares = 0;
	uint64_t zeros = 0;

	for (size_t i = 0; i < NUMBERS; i++) {
		zeros += numbers[i] == 0;
		squares += isfinite(numbers[i]) ? (double)numbers[i] * (double)numbers[i] : 0;
	}
	ck_assert_uint_eq(found.dtype, IOSHAPE_FLOAT32);
	ck_assert_uint_eq(found.alarms, 0);
	ck_assert_uint_eq(found.count, NUMBERS);
	ck_assert_uint_eq(found.nans, 1);
	ck_assert_uint_eq(found.infinities, 1);
	ck_assert_uint_eq(found.zeros, zeros);
	ck_assert_double_eq(found.minimum, -2.5);
	ck_assert_double_eq(found.maximum, 6);
	ck_assert_double_eq_tol(found.sum_squares / squares, 1, 1e-6);
	ck_assert_uint_eq(found.constant, 0);
}

static struct test_case tests = { .name = "examined", .setup = setup, .teardown = teardown };

TEST(tests, tensors_are_examined)
{
	const int64_t shape = NUMBERS, one = 1;
	const int16_t seven = 7;
	const struct ioshape_tensor tensors[] = {
		{ .name = "a",
		  .dtype = IOSHAPE_FLOAT32,
		  .dims = 1,
		  .shape = &shape,
		  .data = numbers },
		{ .name = "b", .dtype = IOSHAPE_INT16, .dims = 1, .shape = &one, .data = &seven },
	};
	struct ioshape_statistics found;

	ck_assert_int_eq(
		ioshape_save_tensors(context, scratch_path("a.pt"), tensors, 2, NULL, NULL), 0);
	expect_statistics_of_numbers("a.pt", "data/0");
	found = statistics_of("a.pt", "data/1");
	ck_assert_uint_eq(found.dtype, IOSHAPE_INT16);
	ck_assert_uint_eq(found.constant, 1);
	ck_assert_double_eq(found.maximum, 7);
	found = statistics_of("a.pt", "data.pkl");
	ck_assert_uint_eq(found.dtype, 0);
	ck_assert_uint_eq(found.count, 0);
}

/* Delivers the bytes like a GPU's copy function. */
static int fetch(void *user, uint64_t offset, void *into, size_t bytes)
{
	memcpy(into, (const char *)user + offset, bytes);
	return 0;
}

static void save_records(const char *name, int fetches, int background, int borrow)
{
	struct ioshape_save_options options = IOSHAPE_SAVE_OPTIONS_INIT;
	/* The first record moves the second one to another position in staging memory. */
	const struct ioshape_record records[] = {
		{ .name = "data.pkl", .data = "abc", .bytes = 3 },
		{ .name = "data/0",
		  .data = fetches ? NULL : numbers,
		  .bytes = NUMBERS * sizeof(*numbers),
		  .fetch = fetches ? fetch : NULL,
		  .fetch_user = numbers,
		  .dtype = IOSHAPE_FLOAT32 },
	};
	struct ioshape_save *save = NULL;

	options.borrow = (uint32_t)borrow;
	ck_assert_int_eq(ioshape_save_records(context, scratch_path(name), records, 2, &options,
					      background ? &save : NULL),
			 0);
	if (background)
		ck_assert_int_eq(ioshape_save_wait(save, UINT32_MAX), 0);
	ioshape_save_free(save);
}

TEST(tests, records_are_examined_however_they_are_written)
{
	for (int fetches = 0; fetches < 2; fetches++)
		for (int background = 0; background < 2; background++)
			for (int borrow = 0; borrow <= background; borrow++) {
				save_records("a.pt", fetches, background, borrow);
				expect_statistics_of_numbers("a.pt", "data/0");
			}
}

static void save_safetensors(const char *name, int background)
{
	struct ioshape_save_options options = IOSHAPE_SAVE_OPTIONS_INIT;
	const int64_t shape = NUMBERS, one = 1;
	const int16_t seven = 7;
	/* The file has the larger type first. */
	const struct ioshape_tensor tensors[] = {
		{ .name = "a", .dtype = IOSHAPE_INT16, .dims = 1, .shape = &one, .data = &seven },
		{ .name = "b",
		  .dtype = IOSHAPE_FLOAT32,
		  .dims = 1,
		  .shape = &shape,
		  .data = numbers },
	};
	struct ioshape_save *save = NULL;

	options.format = IOSHAPE_FORMAT_SAFETENSORS;
	options.checksums = IOSHAPE_CHECKSUMS_BESIDE;
	ck_assert_int_eq(ioshape_save_tensors(context, scratch_path(name), tensors, 2, &options,
					      background ? &save : NULL),
			 0);
	if (background)
		ck_assert_int_eq(ioshape_save_wait(save, UINT32_MAX), 0);
	ioshape_save_free(save);
}

TEST(tests, statistics_of_safetensors_are_beside_the_file)
{
	struct ioshape_reader_options options = IOSHAPE_READER_OPTIONS_INIT;
	struct ioshape_statistics found = IOSHAPE_STATISTICS_INIT;
	struct ioshape_reader *reader;

	for (int background = 0; background < 2; background++) {
		save_safetensors("a.safetensors", background);
		expect_statistics_of_numbers("a.safetensors", "0");
		ck_assert_double_eq(statistics_of("a.safetensors", "1").maximum, 7);
	}
	/* The records of a reader begin at 0, and so do the tensors. */
	options.any_format = 1;
	ck_assert_int_eq(
		ioshape_reader_open(context, scratch_path("a.safetensors"), &options, &reader), 0);
	ck_assert_int_eq(ioshape_reader_get_statistics(reader, 2, &found), -ENOENT);
	ioshape_reader_free(reader);
}

TEST(tests, statistics_of_another_version_of_a_file_do_not_count)
{
	struct ioshape_reader_options options = IOSHAPE_READER_OPTIONS_INIT;
	struct ioshape_reader_info info = IOSHAPE_READER_INFO_INIT;
	struct ioshape_context_options off = IOSHAPE_CONTEXT_OPTIONS_INIT;
	struct ioshape_reader *reader;

	save_safetensors("a.safetensors", 0);
	ioshape_context_free(context);
	off.examine = "off";
	ck_assert_int_eq(ioshape_context_open(&context, &off), 0);
	save_safetensors("a.safetensors", 0);
	ck_assert_uint_eq(scratch_entries(scratch_directory()), 3);
	options.any_format = 1;
	ck_assert_int_eq(
		ioshape_reader_open(context, scratch_path("a.safetensors"), &options, &reader), 0);
	ck_assert_int_eq(ioshape_reader_get_info(reader, &info), 0);
	ck_assert_uint_eq(info.checksums, 1);
	ck_assert_uint_eq(info.examined, 0);
	ioshape_reader_free(reader);
}

TEST(tests, unknown_types_and_groups_are_refused)
{
	struct ioshape_record record = { .name = "a", .data = numbers, .bytes = 8, .dtype = 1000 };

	ck_assert_int_eq(
		ioshape_save_records(context, scratch_path("a.pt"), &record, 1, NULL, NULL),
		-EINVAL);
	record.dtype = 0;
	record.group = 256;
	ck_assert_int_eq(
		ioshape_save_records(context, scratch_path("a.pt"), &record, 1, NULL, NULL),
		-EINVAL);
	ck_assert_uint_eq(scratch_entries(scratch_directory()), 0);
}

TEST(tests, a_file_without_statistics_has_none)
{
	struct ioshape_context_options off = IOSHAPE_CONTEXT_OPTIONS_INIT;
	struct ioshape_statistics statistics = IOSHAPE_STATISTICS_INIT;
	struct ioshape_reader_info info = IOSHAPE_READER_INFO_INIT;
	struct ioshape_reader *reader;

	ioshape_context_free(context);
	off.examine = "off";
	ck_assert_int_eq(ioshape_context_open(&context, &off), 0);
	save_records("a.pt", 0, 0, 0);
	ck_assert_int_eq(ioshape_reader_open(context, scratch_path("a.pt"), NULL, &reader), 0);
	ck_assert_int_eq(ioshape_reader_get_info(reader, &info), 0);
	ck_assert_uint_eq(info.examined, 0);
	ck_assert_int_eq(ioshape_reader_get_statistics(reader, 1, &statistics), -ENODATA);
	ck_assert_int_eq(ioshape_reader_get_statistics(reader, 2, &statistics), -ENOENT);
	ioshape_reader_free(reader);
}
