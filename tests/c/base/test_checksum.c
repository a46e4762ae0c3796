/* SPDX-License-Identifier: Apache-2.0 */
/* CRC-32 compared with its definition bit by bit, and the MAC compared with published results. */
#include "base/base.h"
#include "support/check_main.h"
#include "support/random.h"

#include <string.h>

#define ROOM (512 * 1024)

static uint8_t bytes[ROOM], copy[ROOM];

/* Computes the CRC-32 as RFC 1952 defines it. */
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

static struct test_case tests = { .name = "CRC-32" };

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

typedef uint32_t copy_fn(uint32_t crc, void *restrict to, const void *restrict from, size_t bytes);

static void check_copying(copy_fn *copy_crc32)
{
	/* Below, at and above the sizes at which the library copies in another way. */
	static const size_t lengths[] = { 0,     1,      63,     64,     65,    4095,
					  16383, 16384,  16385,  16640,  65535, 65536,
					  65537, 131071, 131072, 131073, 300001 };
	uint64_t state = 3;

	test_random_fill(&state, bytes, sizeof(bytes));
	for (size_t i = 0; i < ARRAY_LENGTH(lengths); i++) {
		size_t begin = test_random_below(&state, 64) + 1,
		       to = test_random_below(&state, 64) + 1;
		uint32_t start = (uint32_t)test_random(&state);

		memset(copy, 0x5a, sizeof(copy));
		ck_assert_uint_eq(copy_crc32(start, copy + to, bytes + begin, lengths[i]),
				  naive_crc32(start, bytes + begin, lengths[i]));
		ck_assert_mem_eq(copy + to, bytes + begin, lengths[i]);
		ck_assert_uint_eq(copy[to - 1], 0x5a);
		ck_assert_uint_eq(copy[to + lengths[i]], 0x5a);
	}
}

TEST(tests, copying_copies_and_checksums_and_touches_nothing_else)
{
	check_copying(base_copy_crc32);
}

TEST(tests, moving_copies_and_checksums_and_touches_nothing_else)
{
	check_copying(base_crc32_move);
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

/*
 * For lengths that no test can write, appending zeros in two steps must equal appending them in
 * one.
 */
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

/* ---- The MAC --------------------------------------------------------------------------------- */

static struct test_case macs = { .name = "MAC" };

/*
 * SipHash-2-4-128 of the bytes 0, 1, 2, ... with the key 00 01 02 ... 0f, from its authors' test
 * vectors.
 */
static const struct {
	size_t bytes;
	uint8_t mac[BASE_MAC_BYTES];
} vectors[] = {
	{ 0,
	  { 0xa3, 0x81, 0x7f, 0x04, 0xba, 0x25, 0xa8, 0xe6, 0x6d, 0xf6, 0x72, 0x14, 0xc7, 0x55,
	    0x02, 0x93 } },
	{ 1,
	  { 0xda, 0x87, 0xc1, 0xd8, 0x6b, 0x99, 0xaf, 0x44, 0x34, 0x76, 0x59, 0x11, 0x9b, 0x22,
	    0xfc, 0x45 } },
	{ 7,
	  { 0xa1, 0xf1, 0xeb, 0xbe, 0xd8, 0xdb, 0xc1, 0x53, 0xc0, 0xb8, 0x4a, 0xa6, 0x1f, 0xf0,
	    0x82, 0x39 } },
	{ 8,
	  { 0x3b, 0x62, 0xa9, 0xba, 0x62, 0x58, 0xf5, 0x61, 0x0f, 0x83, 0xe2, 0x64, 0xf3, 0x14,
	    0x97, 0xb4 } },
	{ 15,
	  { 0x54, 0x93, 0xe9, 0x99, 0x33, 0xb0, 0xa8, 0x11, 0x7e, 0x08, 0xec, 0x0f, 0x97, 0xcf,
	    0xc3, 0xd9 } },
	{ 63,
	  { 0x51, 0x50, 0xd1, 0x77, 0x2f, 0x50, 0x83, 0x4a, 0x50, 0x3e, 0x06, 0x9a, 0x97, 0x3f,
	    0xbd, 0x7c } },
};

LOOP_TEST(macs, it_is_as_published, 0, ARRAY_LENGTH(vectors))
{
	uint8_t key[BASE_MAC_BYTES], data[63], mac[BASE_MAC_BYTES];

	for (size_t i = 0; i < sizeof(data); i++)
		data[i] = (uint8_t)i;
	memcpy(key, data, sizeof(key));
	base_mac(mac, key, data, vectors[_i].bytes);
	ck_assert_mem_eq(mac, vectors[_i].mac, sizeof(mac));
}

/* Every cut of the bytes into three pieces. */
LOOP_TEST(macs, it_is_the_same_in_three_pieces, 0, 24)
{
	uint8_t key[BASE_MAC_BYTES] = { 1 }, data[64], whole[BASE_MAC_BYTES], mac[BASE_MAC_BYTES];
	const size_t first = (size_t)_i;
	struct base_mac state;

	for (size_t i = 0; i < sizeof(data); i++)
		data[i] = (uint8_t)(i * 7);
	base_mac(whole, key, data, sizeof(data));
	for (size_t second = first; second <= sizeof(data); second++) {
		base_mac_begin(&state, key);
		base_mac_put(&state, data, first);
		base_mac_put(&state, data + first, second - first);
		base_mac_put(&state, data + second, sizeof(data) - second);
		base_mac_end(&state, mac);
		ck_assert_mem_eq(mac, whole, sizeof(mac));
	}
}
