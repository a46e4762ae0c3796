/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The file of checksums beside a file: it is read as it was written, and invalid contents are
 * refused.
 */
#include "format/index.c"
#include "support/check_main.h"
#include "support/fail_memory.h"
#include "support/scratch.h"

#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

static struct test_case tests = { .name = "checksums" };

static const uint32_t crcs[] = { 1, 0xffffffff, 3 };

static const struct format_checksums sample = {
	.file = { 2 * MIB + 5, 1700000000123456789 },
	.block_bytes = MIB,
	.blocks = ARRAY_LENGTH(crcs),
	.crc32 = crcs,
};

static struct base_buffer encoded(const struct format_checksums *checksums)
{
	struct base_buffer bytes = { 0 };

	ck_assert_int_eq(format_checksums_encode(&bytes, checksums), 0);
	ck_assert_uint_le(bytes.bytes, FORMAT_MOST_BESIDE_BYTES);
	return bytes;
}

/* Recomputes the checksum of the changed file, as an attacker could. */
static void seal(struct base_buffer *bytes)
{
	base_put_le(bytes->data + 12, base_crc32(0, bytes->data + 16, bytes->bytes - 16), 4);
}

static int decode(const struct base_buffer *bytes, size_t length)
{
	struct format_checksums found = { 0 };
	/* An exact copy, so that sanitizers detect a read beyond it. */
	uint8_t *copy = malloc(length + 1);
	int ret;

	memcpy(copy, bytes->data, length);
	ret = format_checksums_decode(&found, copy, length);
	if (!ret) {
		ck_assert(checksums_valid(&found));
		format_checksums_free(&found);
	}
	free(copy);
	return ret;
}

TEST(tests, what_is_written_comes_back)
{
	struct format_checksums found;
	struct base_buffer bytes = encoded(&sample);

	ck_assert_int_eq(format_checksums_decode(&found, bytes.data, bytes.bytes), 0);
	ck_assert_uint_eq(found.file.file_bytes, sample.file.file_bytes);
	ck_assert_uint_eq(found.block_bytes, sample.block_bytes);
	ck_assert_uint_eq(found.blocks, sample.blocks);
	ck_assert_int_eq(found.file.modified_ns, sample.file.modified_ns);
	ck_assert_mem_eq(found.crc32, crcs, sizeof(crcs));
	format_checksums_free(&found);
	base_buffer_free(&bytes);
}

TEST(tests, an_empty_file_has_none)
{
	const struct format_checksums nothing = { .block_bytes = MIB };
	struct base_buffer bytes = encoded(&nothing);

	ck_assert_int_eq(decode(&bytes, bytes.bytes), 0);
	base_buffer_free(&bytes);
}

/* Offset in the file, width and value of a number. */
static const struct {
	size_t at;
	unsigned bytes;
	uint64_t value;
} lies[] = {
	{ 16, 8, 0 },       { 16, 8, MIB + 1 },     { 16, 8, 32 * KIB },
	{ 16, 8, 2 * GIB }, { 16, 8, UINT64_MAX },  { 24, 8, 0 },
	{ 24, 8, 2 * MIB }, { 24, 8, 3 * MIB + 1 }, { 24, 8, UINT64_MAX },
};

LOOP_TEST(tests, numbers_that_do_not_fit_each_other_are_refused, 0, ARRAY_LENGTH(lies))
{
	struct base_buffer bytes = encoded(&sample);

	base_put_le(bytes.data + lies[_i].at, lies[_i].value, lies[_i].bytes);
	seal(&bytes);
	ck_assert_int_eq(decode(&bytes, bytes.bytes), IOSHAPE_E_DAMAGED);
	base_buffer_free(&bytes);
}

TEST(tests, a_later_version_is_not_believed)
{
	struct base_buffer bytes = encoded(&sample);

	base_put_le(bytes.data + 8, BASE_FORMAT(1u) + 1, 4);
	seal(&bytes);
	ck_assert_int_eq(decode(&bytes, bytes.bytes), IOSHAPE_E_FORMAT);
	base_buffer_free(&bytes);
}

TEST(tests, what_could_not_be_read_again_is_not_written)
{
	const uint64_t most_blocks = FORMAT_MOST_BESIDE_BYTES / sizeof(uint32_t) - 10;
	uint32_t *many = calloc(most_blocks + 1, sizeof(*many));
	struct format_checksums large = { .block_bytes = MIB, .crc32 = many };
	struct base_buffer bytes = { 0 };

	for (large.blocks = most_blocks; large.blocks <= most_blocks + 1; large.blocks++) {
		large.file.file_bytes = large.blocks * MIB;
		ck_assert_int_eq(format_checksums_encode(&bytes, &large),
				 large.blocks == most_blocks ? 0 : -EFBIG);
		ck_assert_uint_eq(bytes.bytes, FORMAT_MOST_BESIDE_BYTES);
	}
	base_buffer_free(&bytes);
	free(many);
}

TEST(tests, memory_may_run_out)
{
	struct base_buffer bytes = encoded(&sample), none = { 0 };
	struct format_checksums found;

	int ret;

	fail_memory_at(1);
	ret = format_checksums_encode(&none, &sample);
	fail_memory_at(0);
	ck_assert_int_eq(ret, -ENOMEM);
	fail_memory_at(1);
	ret = format_checksums_decode(&found, bytes.data, bytes.bytes);
	fail_memory_at(0);
	ck_assert_int_eq(ret, -ENOMEM);
	base_buffer_free(&bytes);
}

/* ---- Statistics ------------------------------------------------------------------------------ */

/* Encodes the statistics of two tensors: one of floats, and one that was not examined. */
static struct base_buffer encoded_statistics(void)
{
	const float numbers[] = { 3, 0, -4, NAN };
	struct format_entry tensors[] = { { .bytes = sizeof(numbers), .crc32 = 7 },
					  { .bytes = 5, .crc32 = 8 } };
	struct format_examined examined[2] = { { .alarms = IOSHAPE_ALARM_NONFINITE } };
	const struct format_statistics statistics = {
		.file = sample.file,
		.tensors = tensors,
		.index = { .records = 2, .examined = examined, .alarms = IOSHAPE_ALARM_NONFINITE },
	};
	struct base_statistics_rest rest = { 0 };
	struct base_buffer bytes = { 0 };

	base_statistics_begin(&examined[0].statistics, IOSHAPE_FLOAT32);
	base_statistics_add(&examined[0].statistics, &rest, numbers, sizeof(numbers));
	base_statistics_end(&examined[0].statistics, &rest);
	ck_assert_int_eq(format_statistics_encode(&bytes, &statistics), 0);
	return bytes;
}

static int decode_statistics(const struct base_buffer *bytes, size_t length)
{
	struct format_statistics found;
	uint8_t *copy = malloc(length + 1);
	int ret;

	memcpy(copy, bytes->data, length);
	ret = format_statistics_decode(&found, copy, length);
	if (!ret)
		format_statistics_free(&found);
	free(copy);
	return ret;
}

TEST(tests, statistics_come_back)
{
	struct base_buffer bytes = encoded_statistics();
	const struct format_examined *row;
	struct format_statistics found;

	ck_assert_int_eq(format_statistics_decode(&found, bytes.data, bytes.bytes), 0);
	ck_assert_uint_eq(found.file.file_bytes, sample.file.file_bytes);
	ck_assert_int_eq(found.file.modified_ns, sample.file.modified_ns);
	ck_assert_uint_eq(found.index.records, 2);
	ck_assert_uint_eq(found.index.alarms, IOSHAPE_ALARM_NONFINITE);
	ck_assert_uint_eq(found.tensors[1].bytes, 5);
	ck_assert_uint_eq(found.tensors[1].crc32, 8);
	row = &found.index.examined[0];
	ck_assert_uint_eq(row->alarms, IOSHAPE_ALARM_NONFINITE);
	ck_assert_uint_eq(row->statistics.count, 4);
	ck_assert_uint_eq(row->statistics.nans, 1);
	ck_assert_uint_eq(row->statistics.zeros, 1);
	ck_assert_double_eq(row->statistics.minimum, -4);
	ck_assert_double_eq(row->statistics.maximum, 3);
	ck_assert_double_eq(row->statistics.sum_squares, 25);
	ck_assert_uint_eq(found.index.examined[1].statistics.dtype, 0);
	format_statistics_free(&found);
	base_buffer_free(&bytes);
}

TEST(tests, no_bit_of_statistics_may_be_wrong_and_no_byte_missing)
{
	struct base_buffer bytes = encoded_statistics();

	for (size_t bit = 0; bit < 8 * bytes.bytes; bit++) {
		bytes.data[bit / 8] ^= (uint8_t)(1u << bit % 8);
		ck_assert_int_ne(decode_statistics(&bytes, bytes.bytes), 0);
		bytes.data[bit / 8] ^= (uint8_t)(1u << bit % 8);
	}
	for (size_t length = 0; length < bytes.bytes; length++)
		ck_assert_int_ne(decode_statistics(&bytes, length), 0);
	base_buffer_free(&bytes);
}

/* The count of tensors, the size of the file and of a tensor, and the number of NaN. */
static const struct {
	size_t at;
	uint64_t value;
} false_statistics[] = { { 16, 0 },           { 16, 1 }, { 16, 3 },          { 16, UINT64_MAX },
			 { 24, 20 },          { 40, 0 }, { 40, UINT64_MAX }, { 56, UINT64_MAX },
			 { 56, 2 * MIB + 1 }, { 88, 5 }, { 88, UINT64_MAX } };

LOOP_TEST(tests, statistics_that_contradict_each_other_are_refused, 0,
	  ARRAY_LENGTH(false_statistics))
{
	struct base_buffer bytes = encoded_statistics();

	base_put_le(bytes.data + false_statistics[_i].at, false_statistics[_i].value, 8);
	seal(&bytes);
	ck_assert_int_eq(decode_statistics(&bytes, bytes.bytes), IOSHAPE_E_DAMAGED);
	base_buffer_free(&bytes);
}

TEST(tests, memory_for_statistics_may_run_out)
{
	struct base_buffer bytes = encoded_statistics();
	struct format_statistics found;
	int ret = -ENOMEM;

	for (int i = 1; ret; i++) {
		ck_assert_int_lt(i, 10);
		fail_memory_at(i);
		ret = format_statistics_decode(&found, bytes.data, bytes.bytes);
		fail_memory_at(0);
		ck_assert(!ret || ret == -ENOMEM);
	}
	format_statistics_free(&found);
	base_buffer_free(&bytes);
}

/* ---- Checksums of a plain file --------------------------------------------------------------- */

static int open_plain(struct format_reader *reader, struct base_error *error)
{
	return format_reader_open_plain(reader, scratch_path("file"), 0, 0, IOSHAPE_DIRECT_OFF,
					error);
}

TEST(tests, a_plain_file_takes_those_of_its_length_only)
{
	struct format_checksums of_another = sample, own = { .block_bytes = MIB, .blocks = 1 };
	struct base_error error = { 0 };
	struct format_reader reader;
	uint32_t *crc = malloc(sizeof(*crc));

	scratch_setup();
	ck_assert_int_eq(open_plain(&reader, &error), -ENOENT);
	scratch_write(scratch_path("file"), "bytes", 5);
	ck_assert_int_eq(open_plain(&reader, NULL), 0);
	ck_assert_int_eq(format_reader_add_checksums(&reader, &of_another, NULL),
			 IOSHAPE_E_DAMAGED);
	ck_assert(!reader.has_index);
	ck_assert_ptr_eq(of_another.crc32, sample.crc32);
	*crc = base_crc32(0, "bytes", 5);
	own.crc32 = crc;
	own.file.file_bytes = 5;
	ck_assert_int_eq(format_reader_add_checksums(&reader, &own, NULL), 0);
	ck_assert(reader.has_index && !reader.no_checksums);
	ck_assert_ptr_eq(reader.index.checks, crc);
	ck_assert_ptr_null(own.crc32);
	/* This also frees the checksums. */
	format_reader_close(&reader);
	scratch_teardown();
}
