/* SPDX-License-Identifier: Apache-2.0 */
/* Offsets of records, compared with a search for the first offset that meets the rules. */
#include "format/writer.c"
#include "support/check_main.h"
#include "support/random.h"
#include "support/scratch.h"

#include <errno.h>

/* Returns the first multiple of the alignment behind header, name and fields, found by trial. */
static uint64_t first_aligned(uint64_t cursor, size_t name_bytes, bool zip64, uint32_t alignment)
{
	uint64_t at = cursor + 30 + name_bytes + (zip64 ? 20 : 0) + 4;

	while (at % alignment)
		at++;
	return at;
}

static void check_place(uint64_t cursor, size_t name_bytes, uint64_t bytes, uint32_t alignment)
{
	bool zip64 = bytes >= 0xffffffffu;
	uint64_t data = first_aligned(cursor, name_bytes, zip64, alignment);
	struct format_extent extent;

	ck_assert_int_eq(lay_out_record(cursor, name_bytes, bytes, alignment, &extent), 0);
	ck_assert_uint_eq(extent.header_offset, cursor);
	ck_assert_uint_eq(extent.data_offset, data);
	ck_assert_uint_eq(extent.header_bytes, data - cursor);
	ck_assert(extent.zip64 == zip64);
	/* The length of the header's extra field must fit 16 bits. */
	ck_assert_uint_le(extent.header_bytes - 30 - name_bytes, 0xffff);
	if (bytes == FORMAT_UNKNOWN_BYTES) {
		ck_assert_uint_eq(extent.descriptor_offset, data);
		ck_assert_uint_eq(extent.end, data);
	} else {
		ck_assert_uint_eq(extent.descriptor_offset, data + bytes);
		ck_assert_uint_eq(extent.end, data + bytes + (zip64 ? 24 : 16));
	}
}

static struct test_case tests = { .name = "places" };

TEST(tests, every_small_plan_is_the_one_found_by_trying)
{
	for (uint32_t alignment = 1; alignment <= 4096; alignment *= 2)
		for (uint64_t cursor = 0; cursor < 200; cursor++)
			for (size_t name = 1; name < 80; name += 7)
				check_place(cursor, name, cursor * 3, alignment);
}

TEST(tests, plans_at_the_edges_of_four_gigabytes_are_right)
{
	static const uint64_t sizes[] = {
		0,           1,           0xfffffffe,        0xffffffff,
		0x100000000, 0x100000001, UINT64_C(1) << 50, FORMAT_UNKNOWN_BYTES
	};
	static const uint64_t cursors[] = { 0,          1,           0xfffffffe,
					    0xffffffff, 0x100000000, (UINT64_C(1) << 60) + 3 };

	for (size_t i = 0; i < ARRAY_LENGTH(sizes); i++)
		for (size_t j = 0; j < ARRAY_LENGTH(cursors); j++)
			for (uint32_t alignment = 1; alignment <= 4096; alignment *= 4)
				check_place(cursors[j], 16, sizes[i], alignment);
}

TEST(tests, random_plans_are_right)
{
	uint64_t seed = 1;

	for (unsigned i = 0; i < scratch_rounds(20000); i++) {
		uint64_t cursor = test_random(&seed) >> (2 + test_random_below(&seed, 60));
		uint64_t bytes = test_random(&seed) >> (2 + test_random_below(&seed, 61));
		size_t name = 1 + test_random_below(&seed, FORMAT_MAX_FULL_NAME_BYTES);

		check_place(cursor, name, bytes, 1u << test_random_below(&seed, 13));
	}
}

#define MOST ((uint64_t)INT64_MAX)

TEST(tests, impossible_records_are_refused)
{
	static const struct {
		uint64_t cursor;
		size_t name_bytes;
		uint64_t bytes;
		uint32_t alignment;
		int code;
	} cases[] = {
		{ MOST, 8, 0, 64, IOSHAPE_E_LIMIT },
		{ MOST + 1, 8, 0, 64, IOSHAPE_E_LIMIT },
		{ UINT64_MAX, 8, 0, 64, IOSHAPE_E_LIMIT },
		{ 0, 8, MOST, 64, IOSHAPE_E_LIMIT },
		{ 0, 8, UINT64_MAX - 1, 64, IOSHAPE_E_LIMIT },
		{ MOST - 100, 8, FORMAT_UNKNOWN_BYTES, 4096, IOSHAPE_E_LIMIT },
		/* The largest possible record: 64 bytes of header, 24 of descriptor. */
		{ 0, 8, MOST - 64 - 24, 64, 0 },
		{ 0, 8, MOST - 64 - 23, 64, IOSHAPE_E_LIMIT },
		{ 0, 0, 1, 64, IOSHAPE_E_LIMIT },
		{ 0, FORMAT_MAX_FULL_NAME_BYTES, 1, 64, 0 },
		{ 0, FORMAT_MAX_FULL_NAME_BYTES + 1, 1, 64, IOSHAPE_E_LIMIT },
	};
	struct format_extent extent;

	for (size_t i = 0; i < ARRAY_LENGTH(cases); i++)
		ck_assert_int_eq(lay_out_record(cases[i].cursor, cases[i].name_bytes,
						cases[i].bytes, cases[i].alignment, &extent),
				 cases[i].code);
}

static void check_member(uint64_t cursor, size_t name_bytes, uint64_t alignment)
{
	const uint64_t header_bytes = 30 + name_bytes + 20 + 4;
	struct format_extent extent;

	ck_assert_int_eq(lay_out_member(cursor, name_bytes, alignment, &extent), 0);
	ck_assert(extent.zip64);
	ck_assert_uint_eq(extent.data_offset % alignment, 0);
	ck_assert_uint_eq(extent.header_bytes, header_bytes);
	ck_assert_uint_eq(extent.header_offset, extent.data_offset - header_bytes);
	ck_assert_uint_ge(extent.header_offset, cursor);
	/* The offset is the first that is possible. */
	ck_assert_uint_lt(extent.header_offset - cursor, alignment);
}

TEST(tests, members_begin_on_the_next_boundary_that_leaves_room)
{
	static const uint64_t alignments[] = { 4096, 12288, 65536, 3 * MIB, 4 * GIB };
	uint64_t seed = 2;

	for (size_t i = 0; i < ARRAY_LENGTH(alignments); i++) {
		for (uint64_t near = 0; near < 200; near++)
			check_member(alignments[i] - 100 + near, 13, alignments[i]);
		check_member(0, 1, alignments[i]);
		check_member(0, FORMAT_MAX_FULL_NAME_BYTES, alignments[i]);
	}
	for (unsigned i = 0; i < scratch_rounds(20000); i++)
		check_member(test_random(&seed) >> (2 + test_random_below(&seed, 60)),
			     1 + test_random_below(&seed, FORMAT_MAX_FULL_NAME_BYTES),
			     4096 * (1 + test_random_below(&seed, MIB)));
}

TEST(tests, impossible_members_are_refused)
{
	static const struct {
		uint64_t cursor;
		size_t name_bytes;
		uint64_t alignment;
		int code;
	} cases[] = {
		{ MOST, 8, 4096, IOSHAPE_E_LIMIT },
		{ UINT64_MAX, 8, 4096, IOSHAPE_E_LIMIT },
		{ MOST - 4 * GIB, 8, 4 * GIB, IOSHAPE_E_LIMIT },
		{ MOST - 8192, 8, 4096, 0 },
		{ 0, 0, 4096, IOSHAPE_E_LIMIT },
		{ 0, FORMAT_MAX_FULL_NAME_BYTES + 1, 4096, IOSHAPE_E_LIMIT },
		{ 0, 8, 0, -EINVAL },
		{ 0, 8, 64, -EINVAL },
		{ 0, 8, 4097, -EINVAL },
		{ 0, 8, 4 * GIB + 4096, -EINVAL },
	};
	struct format_extent extent;

	for (size_t i = 0; i < ARRAY_LENGTH(cases); i++)
		ck_assert_int_eq(lay_out_member(cases[i].cursor, cases[i].name_bytes,
						cases[i].alignment, &extent),
				 cases[i].code);
}

TEST(tests, large_records_begin_on_pages_and_small_ones_on_cache_lines)
{
	ck_assert_uint_eq(format_default_alignment(0), 64);
	ck_assert_uint_eq(format_default_alignment(256 * KIB - 1), 64);
	ck_assert_uint_eq(format_default_alignment(256 * KIB), 4096);
	ck_assert_uint_eq(format_default_alignment(FORMAT_UNKNOWN_BYTES), 4096);
}
