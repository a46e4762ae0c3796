/* SPDX-License-Identifier: Apache-2.0 */
/* CRC-32 against the bit by bit definition of it. */
#include "base/base.h"
#include "support/check_main.h"
#include "support/random.h"

#include <string.h>

#define ROOM (512 * 1024)

static uint8_t bytes[ROOM], copy[ROOM];

/* As RFC 1952 defines it. */
static uint32_t naive_crc32(uint32_t crc, const uint8_t *data, size_t count)
{
	crc = ~crc;
	for (size_t i = 0; i < count; i++) {
		crc ^= data[i];
		for (int bit = 0; bit < 8; bit++)
			crc = crc & 1 ? (crc >> 1) ^ 0xedb88320u : crc >> 1;
	}
	return ~crc;
}

static struct test_case tests = { .name = "CRC-32", .timeout_s = 60 };

TEST(tests, it_is_the_checksum_of_zip)
{
	ck_assert_uint_eq(base_crc32(0, "123456789", 9), 0xcbf43926u);
	ck_assert_uint_eq(base_crc32(0, "", 0), 0);
	ck_assert_uint_eq(base_crc32(0x12345678u, "", 0), 0x12345678u);
}

TEST(tests, it_is_right_at_every_length_and_alignment)
{
	uint64_t state = 1;

	test_random_fill(&state, bytes, 4096);
	for (size_t length = 0; length < 600; length++)
		for (size_t begin = 0; begin < 64; begin += 1 + length % 7)
			ck_assert_uint_eq(base_crc32(0, bytes + begin, length),
					  naive_crc32(0, bytes + begin, length));
}

TEST(tests, it_is_right_for_random_pieces_and_continues)
{
	uint64_t state = 2;

	test_random_fill(&state, bytes, sizeof(bytes));
	for (int i = 0; i < 40; i++) {
		size_t begin = test_random_below(&state, ROOM / 2);
		size_t length = test_random_below(&state, ROOM / 2);
		size_t cut = test_random_below(&state, length + 1);
		uint32_t whole = naive_crc32(0, bytes + begin, length);
		uint32_t first = base_crc32(0, bytes + begin, cut);

		ck_assert_uint_eq(base_crc32(0, bytes + begin, length), whole);
		ck_assert_uint_eq(base_crc32(first, bytes + begin + cut, length - cut), whole);
	}
}

TEST(tests, copying_copies_and_checksums_and_touches_nothing_else)
{
	/* Below, at and above the size of the pieces in which it goes. */
	static const size_t lengths[] = { 0,     1,     63,     64,     65,     4095,  65535,
					  65536, 65537, 131071, 131072, 131073, 300001 };
	uint64_t state = 3;

	test_random_fill(&state, bytes, sizeof(bytes));
	for (size_t i = 0; i < ARRAY_LENGTH(lengths); i++) {
		size_t begin = test_random_below(&state, 64) + 1,
		       to = test_random_below(&state, 64) + 1;
		uint32_t start = (uint32_t)test_random(&state);

		memset(copy, 0x5a, sizeof(copy));
		ck_assert_uint_eq(base_copy_crc32(start, copy + to, bytes + begin, lengths[i]),
				  naive_crc32(start, bytes + begin, lengths[i]));
		ck_assert_mem_eq(copy + to, bytes + begin, lengths[i]);
		ck_assert_uint_eq(copy[to - 1], 0x5a);
		ck_assert_uint_eq(copy[to + lengths[i]], 0x5a);
	}
}

TEST(tests, checksums_combine_at_any_split)
{
	uint64_t state = 4;

	test_random_fill(&state, bytes, sizeof(bytes));
	for (int i = 0; i < 400; i++) {
		size_t length = test_random_below(&state, i < 200 ? 300 : ROOM);
		size_t cut = test_random_below(&state, length + 1);
		uint32_t first = base_crc32(0, bytes, cut);
		uint32_t second = base_crc32(0, bytes + cut, length - cut);

		ck_assert_uint_eq(base_crc32_combine(first, second, length - cut),
				  base_crc32(0, bytes, length));
	}
}

TEST(tests, combining_with_nothing_changes_nothing)
{
	ck_assert_uint_eq(base_crc32_combine(0x12345678u, 0, 0), 0x12345678u);
	ck_assert_uint_eq(base_crc32_combine(0, 0x12345678u, 100), 0x12345678u);
}

/* Lengths that no test can write: x^n is cut into two powers whose product it must be. */
TEST(tests, checksums_combine_over_lengths_beyond_32_bits)
{
	uint64_t state = 5;

	for (int i = 0; i < 100; i++) {
		uint64_t first = test_random(&state) >> 8, second = test_random(&state) >> 8;
		uint32_t crc = (uint32_t)test_random(&state);

		ck_assert_uint_eq(base_crc32_combine(base_crc32_combine(crc, 0, first), 0, second),
				  base_crc32_combine(crc, 0, first + second));
	}
}

int main(void)
{
	return check_run("base/checksum");
}
