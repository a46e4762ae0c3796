/* SPDX-License-Identifier: Apache-2.0 */
#define _GNU_SOURCE
#include "support/check_main.h"
#include "support/fail_memory.h"
#include "support/random.h"
/* Included for the offsets of its format. */
#include "format/index.c"

#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

/* ---- An index with all sections -------------------------------------------------------------- */

#define CHECK_BYTES (64 * KIB)

/* Records as they are in a file: header, data, and 16 bytes of descriptor. */
static struct format_entry entries[] = {
	{ (char[]){ "data.pkl" }, 8, 1, 500, 0, 64 },
	{ (char[]){ "version" }, 7, 2, 2, 580, 640 },
	{ (char[]){ "data/0" }, 6, 3, 96, 658, 704 },
	{ (char[]){ "data/1" }, 6, 4, 3 * CHECK_BYTES + 4, 816, 4096 },
	{ (char[]){ "data/2" }, 6, 5, 0, 3 * CHECK_BYTES + 4116, 3 * CHECK_BYTES + 4160 },
};
static const uint64_t end = 3 * CHECK_BYTES + 4176;
static const uint64_t offsets[] = { 64, 640, 704, 4096, 3 * CHECK_BYTES + 4160 };
/* The first three records have one block each, the fourth has four, and the empty one has none. */
static const uint32_t checks[] = { 0x11, 0x22222222, 0xffffffff, 0, 1, 2, 0x80000000 };

static const int64_t shapes[] = { 2, 3, 4, 3 * CHECK_BYTES / 4 + 1, 3, 0 };
static const int64_t strides[] = { 1, 2, 6, 1, 1, 1 };
static const struct format_tensor_row rows[] = {
	{ "layer.weight", IOSHAPE_INT32, 3, shapes, strides, 2 },
	{ "gewicht\xc3\xa4", IOSHAPE_FLOAT32, 1, shapes + 3, strides + 3, 3 },
	{ "e", IOSHAPE_BFLOAT16, 2, shapes + 4, strides + 4, 4 },
};
static const struct ioshape_attribute attributes[] = {
	{ "model", "llama" },
	{ "empty", "" },
};
static const uint8_t blob[] = { 0, 1, 2, 0xff, 0 };

/* Records without a dtype, all kinds of numbers, nothing but NaN, and no number. */
static const struct format_examined examined[] = {
	{ .alarms = 0 },
	{ .alarms = 0 },
	{ { IOSHAPE_INT32, .count = 24, .zeros = 3, .minimum = -5, .maximum = 70,
	    .sum_squares = 1e4 },
	  IOSHAPE_ALARM_CONSTANT },
	{ { IOSHAPE_FLOAT32, .count = 3 * CHECK_BYTES / 4 + 1, .nans = 3 * CHECK_BYTES / 4,
	    .infinities = 1, .minimum = INFINITY, .maximum = -INFINITY },
	  IOSHAPE_ALARM_NONFINITE | IOSHAPE_ALARM_JUMP },
	{ { IOSHAPE_BFLOAT16, .minimum = INFINITY, .maximum = -INFINITY }, 0 },
};

static const struct format_index everything = {
	.check_bytes = CHECK_BYTES,
	.directory_crc32 = 0xfedcba98,
	.records = ARRAY_LENGTH(entries),
	.data_offsets = offsets,
	.check_count = ARRAY_LENGTH(checks),
	.checks = checks,
	.has_table = true,
	.tensor_count = ARRAY_LENGTH(rows),
	.tensors = rows,
	.metadata = {
		.step = -7,
		.blob = blob,
		.blob_bytes = sizeof(blob),
		.attributes = attributes,
		.attribute_count = ARRAY_LENGTH(attributes),
	},
	.has_statistics = true,
	.examined = examined,
	.alarms = IOSHAPE_ALARM_NONFINITE | IOSHAPE_ALARM_UNCHANGED,
};

static struct base_buffer encoded(const struct format_index *index)
{
	struct base_buffer out = { 0 };

	ck_assert_int_eq(format_index_encode(&out, index), 0);
	return out;
}

static int decode(struct format_index *index, const struct base_buffer *bytes)
{
	return format_index_decode(index, bytes->data, bytes->bytes, entries, ARRAY_LENGTH(entries),
				   NULL);
}

static void expect_equal_tables(const struct format_index *a, const struct format_index *b)
{
	ck_assert_int_eq(a->has_table, b->has_table);
	ck_assert_uint_eq(a->tensor_count, b->tensor_count);
	for (uint64_t i = 0; i < a->tensor_count; i++) {
		const struct format_tensor_row *left = &a->tensors[i], *right = &b->tensors[i];

		ck_assert_str_eq(left->name, right->name);
		ck_assert_uint_eq(left->dtype, right->dtype);
		ck_assert_uint_eq(left->record, right->record);
		ck_assert_uint_eq(left->dims, right->dims);
		ck_assert_mem_eq(left->shape, right->shape, left->dims * sizeof(int64_t));
		ck_assert_mem_eq(left->strides, right->strides, left->dims * sizeof(int64_t));
	}
}

static void expect_equal_rows(const struct format_examined *a, const struct format_examined *b)
{
	ck_assert_uint_eq(a->alarms, b->alarms);
	ck_assert_uint_eq(a->statistics.dtype, b->statistics.dtype);
	if (!a->statistics.dtype)
		return;
	ck_assert_uint_eq(a->statistics.count, b->statistics.count);
	ck_assert_uint_eq(a->statistics.nans, b->statistics.nans);
	ck_assert_uint_eq(a->statistics.infinities, b->statistics.infinities);
	ck_assert_uint_eq(a->statistics.zeros, b->statistics.zeros);
	ck_assert_double_eq(a->statistics.minimum, b->statistics.minimum);
	ck_assert_double_eq(a->statistics.maximum, b->statistics.maximum);
	ck_assert_double_eq(a->statistics.sum_squares, b->statistics.sum_squares);
}

static void expect_equal(const struct format_index *a, const struct format_index *b)
{
	ck_assert_uint_eq(a->check_bytes, b->check_bytes);
	ck_assert_uint_eq(a->directory_crc32, b->directory_crc32);
	ck_assert_uint_eq(a->records, b->records);
	ck_assert_mem_eq(a->data_offsets, b->data_offsets, a->records * sizeof(uint64_t));
	ck_assert_uint_eq(a->check_count, b->check_count);
	ck_assert_mem_eq(a->checks, b->checks, a->check_count * sizeof(uint32_t));
	expect_equal_tables(a, b);
	ck_assert_int_eq(a->metadata.step, b->metadata.step);
	ck_assert_uint_eq(a->metadata.blob_bytes, b->metadata.blob_bytes);
	if (a->metadata.blob_bytes)
		ck_assert_mem_eq(a->metadata.blob, b->metadata.blob, a->metadata.blob_bytes);
	ck_assert_uint_eq(a->metadata.attribute_count, b->metadata.attribute_count);
	for (size_t i = 0; i < a->metadata.attribute_count; i++) {
		ck_assert_str_eq(a->metadata.attributes[i].name, b->metadata.attributes[i].name);
		ck_assert_str_eq(a->metadata.attributes[i].value, b->metadata.attributes[i].value);
	}
	ck_assert_int_eq(a->has_statistics, b->has_statistics);
	ck_assert_uint_eq(a->alarms, b->alarms);
	for (uint64_t i = 0; a->has_statistics && i < a->records; i++)
		expect_equal_rows(&a->examined[i], &b->examined[i]);
}

/* ---- Round trips ----------------------------------------------------------------------------- */

static struct test_case round_trips = { .name = "round trips" };

TEST(round_trips, table_and_metadata_may_be_missing)
{
	struct format_index bare = everything, index;
	struct base_buffer bytes;

	bare.has_table = false;
	bare.tensor_count = 0;
	bare.metadata = (struct ioshape_metadata){ 0 };
	bytes = encoded(&bare);
	ck_assert_int_eq(decode(&index, &bytes), 0);
	expect_equal(&index, &bare);
	ck_assert_ptr_null(index.metadata.blob);
	ck_assert_ptr_null(index.metadata.attributes);
	format_index_free(&index);
	base_buffer_free(&bytes);

	/* An empty table differs from a missing one. */
	bare.has_table = true;
	bytes = encoded(&bare);
	ck_assert_int_eq(decode(&index, &bytes), 0);
	expect_equal(&index, &bare);
	format_index_free(&index);
	base_buffer_free(&bytes);
}

TEST(round_trips, an_index_of_no_records_is_fine)
{
	const struct format_index none = { .check_bytes = FORMAT_CHECK_BYTES };
	struct base_buffer bytes = encoded(&none);
	struct format_index index;

	ck_assert_int_eq(format_index_decode(&index, bytes.data, bytes.bytes, NULL, 0, NULL), 0);
	ck_assert_uint_eq(index.records, 0);
	ck_assert_uint_eq(index.check_count, 0);
	format_index_free(&index);
	base_buffer_free(&bytes);
}

TEST(round_trips, each_part_of_the_metadata_travels_alone)
{
	const struct ioshape_metadata parts[] = {
		{ .step = INT64_MIN },
		{ .blob = blob, .blob_bytes = sizeof(blob) },
		{ .attributes = attributes, .attribute_count = 1 },
	};

	for (size_t i = 0; i < ARRAY_LENGTH(parts); i++) {
		struct format_index given = everything, index;
		struct base_buffer bytes;

		given.metadata = parts[i];
		bytes = encoded(&given);
		ck_assert_int_eq(decode(&index, &bytes), 0);
		expect_equal(&index, &given);
		format_index_free(&index);
		base_buffer_free(&bytes);
	}
}

TEST(round_trips, the_bytes_may_lie_anywhere)
{
	for (size_t shift = 0; shift < 8; shift++) {
		struct base_buffer bytes = { 0 };
		struct format_index index;

		REQUIRE(!base_buffer_append(&bytes, "before!", shift));
		REQUIRE(!format_index_encode(&bytes, &everything));
		ck_assert_int_eq(format_index_decode(&index, bytes.data + shift,
						     bytes.bytes - shift, entries,
						     ARRAY_LENGTH(entries), NULL),
				 0);
		expect_equal(&index, &everything);
		format_index_free(&index);
		base_buffer_free(&bytes);
	}
}

TEST(round_trips, sections_of_the_future_are_skipped)
{
	static const uint8_t unknown[24] = { 77, 0, 0, 0, 0, 0, 0, 0, 3, 0, 0, 0,
					     0,  0, 0, 0, 1, 2, 3, 0, 0, 0, 0, 0 };
	struct base_buffer bytes = encoded(&everything);
	struct format_index index;

	base_buffer_append(&bytes, unknown, sizeof(unknown));
	ck_assert_int_eq(decode(&index, &bytes), IOSHAPE_E_DAMAGED); /* wrong count */
	bytes.data[12]++;
	ck_assert_int_eq(decode(&index, &bytes), 0);
	expect_equal(&index, &everything);
	format_index_free(&index);
	base_buffer_free(&bytes);
}

TEST(round_trips, no_section_is_there_twice)
{
	struct format_index given = everything, index;
	struct base_buffer bytes;
	size_t without;

	given.has_statistics = false;
	bytes = encoded(&given);
	without = bytes.bytes;
	base_buffer_free(&bytes);
	bytes = encoded(&everything);
	ck_assert_int_eq(base_buffer_reserve(&bytes, bytes.bytes), 0);
	base_buffer_append(&bytes, bytes.data + without, bytes.bytes - without);
	bytes.data[12]++;
	ck_assert_int_eq(decode(&index, &bytes), IOSHAPE_E_DAMAGED);
	base_buffer_free(&bytes);
}

/* ---- Damage ---------------------------------------------------------------------------------- */

static uint64_t used; /* keeps the compiler from dropping the reads below */

/* Reads all parts of the index, so that sanitizers detect invalid pointers. */
static void touch(const struct format_index *index)
{
	for (uint64_t i = 0; i < index->records; i++)
		used += index->data_offsets[i];
	for (uint64_t i = 0; i < index->check_count; i++)
		used += index->checks[i];
	for (uint64_t i = 0; i < index->tensor_count; i++) {
		used += strlen(index->tensors[i].name);
		for (uint32_t dim = 0; dim < index->tensors[i].dims; dim++)
			used += (uint64_t)index->tensors[i].shape[dim] +
				(uint64_t)index->tensors[i].strides[dim];
	}
	for (size_t i = 0; i < index->metadata.attribute_count; i++)
		used += strlen(index->metadata.attributes[i].name) +
			strlen(index->metadata.attributes[i].value);
	for (size_t i = 0; i < index->metadata.blob_bytes; i++)
		used += ((const uint8_t *)index->metadata.blob)[i];
	for (uint64_t i = 0; index->has_statistics && i < index->records; i++)
		used += index->examined[i].statistics.zeros;
}

/* Decodes an exact copy of the bytes, so that sanitizers detect a read beyond them. */
static int decode_copy(const uint8_t *data, size_t bytes)
{
	uint8_t *copy = malloc(bytes);
	struct format_index index;
	int ret;

	memcpy(copy, data, bytes);
	ret = format_index_decode(&index, copy, bytes, entries, ARRAY_LENGTH(entries), NULL);
	free(copy);
	if (!ret)
		touch(&index);
	else
		REQUIRE(!index.memory);
	format_index_free(&index);
	return ret;
}

static struct test_case damage = { .name = "damage" };

TEST(damage, every_truncation_is_refused)
{
	struct base_buffer bytes = encoded(&everything);

	for (size_t i = 0; i < bytes.bytes; i++)
		REQUIRE(decode_copy(bytes.data, i) == IOSHAPE_E_DAMAGED);
	base_buffer_append(&bytes, "\0", 1);
	ck_assert_int_eq(decode_copy(bytes.data, bytes.bytes), IOSHAPE_E_DAMAGED);
	base_buffer_free(&bytes);
}

/*
 * Some changes are accepted, such as a flipped bit in a checksum. The CRC-32 of the index record
 * detects those.
 */
TEST(damage, no_flipped_bit_leads_astray)
{
	struct base_buffer bytes = encoded(&everything);
	size_t refused = 0;

	for (size_t i = 0; i < bytes.bytes * 8; i++) {
		int ret;

		bytes.data[i / 8] ^= (uint8_t)(1u << i % 8);
		ret = decode_copy(bytes.data, bytes.bytes);
		REQUIRE(ret == 0 || ret == IOSHAPE_E_DAMAGED || ret == IOSHAPE_E_LIMIT ||
			ret == IOSHAPE_E_FORMAT);
		refused += ret != 0;
		bytes.data[i / 8] ^= (uint8_t)(1u << i % 8);
	}
	ck_assert_uint_gt(refused, bytes.bytes * 8 / 3);
	base_buffer_free(&bytes);
}

TEST(damage, no_made_up_number_leads_astray)
{
	static const uint64_t numbers[] = {
		0,
		1,
		2,
		63,
		65,
		4096,
		UINT32_MAX,
		INT64_MAX,
		UINT64_MAX,
		UINT64_MAX / 8,
		UINT64_MAX / 24 + 1,
		UINT64_C(1) << 63,
		UINT64_C(1) << 32,
		IOSHAPE_MAX_TENSORS,
		IOSHAPE_MAX_TENSORS + 1,
	};
	struct base_buffer bytes = encoded(&everything);
	uint8_t *copy = malloc(bytes.bytes);
	uint64_t seed = 6;

	for (size_t i = 0; i + 8 <= bytes.bytes; i += 4) {
		for (size_t n = 0; n < ARRAY_LENGTH(numbers); n++) {
			memcpy(copy, bytes.data, bytes.bytes);
			base_put_le(copy + i, numbers[n], 8);
			decode_copy(copy, bytes.bytes);
			memcpy(copy, bytes.data, bytes.bytes);
			base_put_le(copy + i, numbers[n], 4);
			decode_copy(copy, bytes.bytes);
		}
	}
	for (int round = 0; round < 20000; round++) {
		memcpy(copy, bytes.data, bytes.bytes);
		for (int n = 0; n < 4; n++)
			copy[test_random_below(&seed, bytes.bytes)] = (uint8_t)test_random(&seed);
		decode_copy(copy, bytes.bytes);
	}
	free(copy);
	base_buffer_free(&bytes);
}

/* Offsets of the numbers in the encoded `everything`. */
#define AT_VERSION 8
#define AT_CHECK_BYTES 24
#define AT_RECORDS 32
#define AT_OFFSETS (INDEX_HEADER_BYTES + SECTION_HEADER_BYTES)
#define AT_CHECKS (AT_OFFSETS + sizeof(offsets) + SECTION_HEADER_BYTES)
#define AT_TABLE (AT_CHECKS + 32 + SECTION_HEADER_BYTES)
#define AT_ROW(i) (AT_TABLE + TABLE_HEADER_BYTES + (i)*TABLE_ROW_BYTES)
#define AT_SHAPES AT_ROW(3)
#define AT_STRIDES (AT_SHAPES + sizeof(shapes))
#define AT_NAMES (AT_STRIDES + sizeof(strides))
#define AT_METADATA (AT_NAMES + 22 + 2 + SECTION_HEADER_BYTES)

static unsigned long allocations; /* during the last call below */

static void expect_refused(size_t at, uint64_t number, unsigned width, int code)
{
	struct base_buffer bytes = encoded(&everything);
	struct base_error error = { 0 };
	struct format_index index;
	int ret;

	allocations = 0;
	ck_assert_uint_le(at + width, bytes.bytes);
	base_put_le(bytes.data + at, number, width);
	fail_memory_at(0);
	ret = format_index_decode(&index, bytes.data, bytes.bytes, entries, ARRAY_LENGTH(entries),
				  &error);
	allocations = fail_memory_count();
	ck_assert_msg(ret == code, "%llu at %zu: %d, %s", (unsigned long long)number, at, ret,
		      error.text);
	ck_assert_int_eq(error.code, code);
	ck_assert_ptr_null(index.memory);
	base_buffer_free(&bytes);
}

TEST(damage, counts_are_refused_before_memory_is_asked_for)
{
	static const struct {
		size_t at;
		uint64_t number;
		int code;
	} cases[] = {
		{ AT_VERSION, UINT64_C(4) << 32 | 2, IOSHAPE_E_FORMAT },
		{ AT_CHECK_BYTES, 0, IOSHAPE_E_DAMAGED },
		{ AT_CHECK_BYTES, 32 * KIB, IOSHAPE_E_DAMAGED },
		{ AT_CHECK_BYTES, 2 * GIB, IOSHAPE_E_DAMAGED },
		{ AT_CHECK_BYTES, 100000, IOSHAPE_E_DAMAGED },
		{ AT_CHECK_BYTES, 128 * KIB, IOSHAPE_E_DAMAGED }, /* not the checksums' blocks */
		{ AT_RECORDS, 4, IOSHAPE_E_DAMAGED },
		{ AT_RECORDS, UINT64_MAX, IOSHAPE_E_DAMAGED },
		{ AT_OFFSETS - 8, 32, IOSHAPE_E_DAMAGED },
		{ AT_OFFSETS - 8, UINT64_MAX, IOSHAPE_E_DAMAGED },
		{ AT_OFFSETS - 8, UINT64_MAX - 7, IOSHAPE_E_DAMAGED },
		{ AT_TABLE, 4, IOSHAPE_E_DAMAGED },
		{ AT_TABLE, IOSHAPE_MAX_TENSORS, IOSHAPE_E_DAMAGED },
		{ AT_TABLE, IOSHAPE_MAX_TENSORS + 1, IOSHAPE_E_LIMIT },
		{ AT_TABLE, UINT64_MAX, IOSHAPE_E_LIMIT },
		{ AT_TABLE + 8, 1000, IOSHAPE_E_DAMAGED },
		{ AT_TABLE + 8, UINT64_MAX / 16 + 2, IOSHAPE_E_DAMAGED },
		{ AT_METADATA + 8, 1000, IOSHAPE_E_DAMAGED },
		{ AT_METADATA + 8, UINT64_MAX, IOSHAPE_E_DAMAGED },
		{ AT_METADATA + 16, 200, IOSHAPE_E_DAMAGED },
		{ AT_METADATA + 16, UINT64_MAX, IOSHAPE_E_LIMIT },
	};

	for (size_t i = 0; i < ARRAY_LENGTH(cases); i++) {
		expect_refused(cases[i].at, cases[i].number, 8, cases[i].code);
		ck_assert_uint_eq(allocations, 0);
	}
}

/* Encodes invalid rows, optionally changes a number, and checks that the decoder refuses them. */
static void expect_rows_refused(const struct format_tensor_row *given_rows, size_t at,
				uint64_t number)
{
	struct format_index given = everything;
	struct base_buffer bytes;

	given.tensors = given_rows;
	bytes = encoded(&given);
	if (at)
		base_put_le(bytes.data + at, number, 4);
	ck_assert_int_eq(decode_copy(bytes.data, bytes.bytes), IOSHAPE_E_DAMAGED);
	base_buffer_free(&bytes);
}

TEST(damage, rows_that_were_never_written_are_refused)
{
	static const int64_t empty[] = { 0, 1 }, ones[] = { 1, 1 };
	struct format_tensor_row bad[3] = { rows[0], rows[1], rows[2] };
	char name[IOSHAPE_MAX_NAME_BYTES + 2];

	bad[1] = bad[0]; /* two tensors in one record */
	bad[1].name = "other";
	expect_rows_refused(bad, 0, 0);

	bad[1] = rows[1];
	bad[2].name = "";
	expect_rows_refused(bad, 0, 0);
	memset(name, 'n', sizeof(name) - 1);
	name[sizeof(name) - 1] = '\0';
	bad[2].name = name;
	expect_rows_refused(bad, 0, 0);
	bad[2].name = "ee"; /* surplus bytes in the names, then a surplus dimension */
	expect_rows_refused(bad, AT_ROW(2) + 16, 1);
	bad[2] = rows[2];
	bad[2].shape = empty;
	bad[2].strides = ones;
	expect_rows_refused(bad, AT_ROW(2) + 12, 1);
}

TEST(damage, offsets_of_nobody_are_refused)
{
	const uint64_t more[] = { 64, 640, 704, 4096, 3 * CHECK_BYTES + 4160, end };
	struct format_index given = everything;
	struct base_buffer bytes;

	given.records++;
	given.data_offsets = more;
	given.has_statistics = false;
	bytes = encoded(&given);
	base_put_le(bytes.data + AT_RECORDS, everything.records, 8);
	ck_assert_int_eq(decode_copy(bytes.data, bytes.bytes), IOSHAPE_E_DAMAGED);
	base_buffer_free(&bytes);
}

TEST(damage, tensors_and_names_fit_their_records)
{
	static const struct {
		size_t at;
		uint64_t number;
		unsigned width;
	} cases[] = {
		{ AT_ROW(0), 5, 8 },     /* no such record */
		{ AT_ROW(1), 2, 8 },     /* record of another tensor */
		{ AT_ROW(0) + 8, 0, 4 }, /* dtype */
		{ AT_ROW(0) + 8, 23, 4 },
		{ AT_ROW(0) + 8, IOSHAPE_INT64, 4 },
		{ AT_ROW(0) + 8, IOSHAPE_INT16, 4 },
		{ AT_ROW(0) + 12, 65, 4 }, /* dimensions */
		{ AT_ROW(0) + 12, 2, 4 },
		{ AT_ROW(2) + 12, 3, 4 },
		{ AT_SHAPES, 3, 8 },
		{ AT_SHAPES, UINT64_MAX, 8 },
		{ AT_SHAPES, INT64_MAX, 8 },
		{ AT_STRIDES, 2, 8 },
		{ AT_STRIDES, UINT64_MAX, 8 },
		{ AT_STRIDES + 40, 4, 8 }, /* of an empty tensor */
		{ AT_ROW(0) + 16, 0, 4 },  /* length of a name */
		{ AT_ROW(0) + 16, 5000, 4 },
		{ AT_ROW(2) + 16, 2, 4 },
		{ AT_NAMES, 0xff, 1 },
		{ AT_NAMES + 3, 0, 1 },
		{ AT_METADATA + 24, 0, 4 }, /* lengths of an attribute's name and value */
		{ AT_METADATA + 28, 6, 4 },
		{ AT_METADATA + 40 + 6, 0x80, 1 },
		{ AT_METADATA + 40 + 6, 0, 1 },
		{ AT_METADATA + 8, 4, 8 }, /* a surplus byte */
	};

	for (size_t i = 0; i < ARRAY_LENGTH(cases); i++)
		expect_refused(cases[i].at, cases[i].number, cases[i].width, IOSHAPE_E_DAMAGED);
}

static void expect_refused_statistics(struct base_statistics statistics)
{
	struct format_examined changed[ARRAY_LENGTH(examined)];
	struct format_index given = everything;
	struct base_buffer bytes;

	memcpy(changed, examined, sizeof(changed));
	changed[2].statistics = statistics;
	given.examined = changed;
	bytes = encoded(&given);
	ck_assert_int_eq(decode_copy(bytes.data, bytes.bytes), IOSHAPE_E_DAMAGED);
	base_buffer_free(&bytes);
}

TEST(damage, impossible_statistics_are_refused)
{
	struct base_statistics wrong = examined[2].statistics;

	wrong.nans = 25;
	expect_refused_statistics(wrong);
	wrong.nans = 0;
	wrong.infinities = UINT64_MAX;
	expect_refused_statistics(wrong);
	wrong.infinities = 22; /* and three zeros, of 24 numbers */
	expect_refused_statistics(wrong);
	wrong = examined[2].statistics;
	wrong.minimum = NAN;
	expect_refused_statistics(wrong);
	wrong.minimum = 71;
	expect_refused_statistics(wrong);
	wrong = examined[2].statistics;
	wrong.sum_squares = -1;
	expect_refused_statistics(wrong);
}

TEST(damage, statistics_of_unknown_types_are_skipped)
{
	struct format_examined changed[ARRAY_LENGTH(examined)];
	struct format_index given = everything, index;
	struct base_buffer bytes;

	memcpy(changed, examined, sizeof(changed));
	changed[2].statistics.dtype = 1000;
	given.examined = changed;
	bytes = encoded(&given);
	ck_assert_int_eq(decode(&index, &bytes), 0);
	ck_assert_uint_eq(index.examined[2].statistics.dtype, 0);
	ck_assert_uint_eq(index.examined[2].alarms, 0);
	expect_equal_rows(&index.examined[3], &examined[3]);
	format_index_free(&index);
	base_buffer_free(&bytes);
}

TEST(damage, names_are_unique)
{
	struct format_tensor_row same[3] = { rows[0], rows[1], rows[2] };
	const struct ioshape_attribute twice[] = { { "a", "1" }, { "a", "2" } };
	struct format_index given = everything;
	struct base_buffer bytes;

	same[2].name = rows[0].name;
	given.tensors = same;
	bytes = encoded(&given);
	ck_assert_int_eq(decode_copy(bytes.data, bytes.bytes), IOSHAPE_E_DAMAGED);
	base_buffer_free(&bytes);

	given = everything;
	given.metadata.attributes = twice;
	bytes = encoded(&given);
	ck_assert_int_eq(decode_copy(bytes.data, bytes.bytes), IOSHAPE_E_DAMAGED);
	base_buffer_free(&bytes);
}

TEST(damage, metadata_is_limited)
{
	struct format_index given = everything;
	struct base_buffer bytes;

	given.metadata.blob_bytes = IOSHAPE_MAX_METADATA_BYTES;
	given.metadata.blob = calloc(1, IOSHAPE_MAX_METADATA_BYTES);
	bytes = encoded(&given);
	ck_assert_int_eq(decode_copy(bytes.data, bytes.bytes), IOSHAPE_E_LIMIT);
	base_buffer_free(&bytes);
	given.metadata.attribute_count = 0;
	bytes = encoded(&given);
	ck_assert_int_eq(decode_copy(bytes.data, bytes.bytes), 0);
	base_buffer_free(&bytes);
	free((void *)(uintptr_t)given.metadata.blob);
}

/* ---- Metadata from the caller ---------------------------------------------------------------- */

static void expect_metadata(const struct ioshape_metadata *metadata, int code)
{
	struct base_error error = { 0 };

	ck_assert_int_eq(format_check_metadata(metadata, &error), code);
	ck_assert_int_eq(error.code, code);
}

static void expect_attribute(const char *name, const char *value, int code)
{
	const struct ioshape_attribute attribute = { name, value };
	const struct ioshape_metadata metadata = { .attributes = &attribute, .attribute_count = 1 };

	expect_metadata(&metadata, code);
}

static struct test_case metadata = { .name = "metadata" };

TEST(metadata, metadata_is_checked_before_it_is_saved)
{
	const struct ioshape_attribute twice[] = { { "a", "1" }, { "b", "1" }, { "a", "2" } };
	const struct ioshape_metadata unsound[] = {
		{ .attributes = twice, .attribute_count = 3 },
		{ .blob_bytes = 1 },
		{ .attribute_count = 1 },
	};
	const struct ioshape_metadata large[] = {
		{ .attribute_count = IOSHAPE_MAX_ATTRIBUTES + 1 },
		{ .blob_bytes = IOSHAPE_MAX_METADATA_BYTES + 1 },
	};

	expect_metadata(&(struct ioshape_metadata){ 0 }, 0);
	expect_metadata(&everything.metadata, 0);
	for (size_t i = 0; i < ARRAY_LENGTH(unsound); i++)
		expect_metadata(&unsound[i], -EINVAL);
	for (size_t i = 0; i < ARRAY_LENGTH(large); i++)
		expect_metadata(&large[i], IOSHAPE_E_LIMIT);
}

TEST(metadata, attributes_are_checked_before_they_are_saved)
{
	char *large = malloc(IOSHAPE_MAX_METADATA_BYTES + 2);

	expect_attribute("gr\xc3\xb6\xc3\x9f"
			 "e",
			 "\xe2\x82\xac", 0);
	expect_attribute(NULL, "v", -EINVAL);
	expect_attribute("", "v", -EINVAL);
	expect_attribute("\xff", "v", -EINVAL);
	expect_attribute("a", NULL, -EINVAL);
	expect_attribute("a", "\xff", -EINVAL);
	memset(large, 'x', IOSHAPE_MAX_METADATA_BYTES + 1);
	/* Name and value count together. */
	for (unsigned over = 3; over--;) {
		large[IOSHAPE_MAX_METADATA_BYTES - 1 + over] = '\0';
		expect_attribute("a", large, over ? IOSHAPE_E_LIMIT : 0);
	}
	for (unsigned over = 2; over--;) {
		large[IOSHAPE_MAX_NAME_BYTES + over] = '\0';
		expect_attribute(large, "", over ? IOSHAPE_E_LIMIT : 0);
	}
	free(large);
}
