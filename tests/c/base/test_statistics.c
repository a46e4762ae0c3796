/* SPDX-License-Identifier: Apache-2.0 */
/* Statistics of tensors compared with a plain computation, for each instruction set of this
 * machine. */
#include "base/base.h"
#include "support/check_main.h"
#include "support/random.h"

#include <ioshape/ioshape.h>

#include <float.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#define ROOM 10000

static uint8_t bytes[ROOM + 64];
static struct base_statistics_rest rest;
static enum base_instructions most = BASE_INSTRUCTION_SETS;

/* ---- Plain computation ----------------------------------------------------------------------- */

/* Returns a number by the definition of its type. */
static double define_float(uint64_t bits, unsigned exponent_bits, unsigned mantissa_bits, int bias)
{
	double fraction = 0;
	int exponent = 0;

	for (unsigned i = 0; i < mantissa_bits; i++)
		fraction = (fraction + (double)(bits >> i & 1)) / 2;
	for (unsigned i = 0; i < exponent_bits; i++)
		exponent += (int)(bits >> (mantissa_bits + i) & 1) << i;
	fraction = exponent ? ldexp(1 + fraction, exponent - bias) : ldexp(fraction, 1 - bias);
	return bits >> (exponent_bits + mantissa_bits) & 1 ? -fraction : fraction;
}

static double define_ieee(uint64_t bits, unsigned exponent_bits, unsigned mantissa_bits)
{
	const uint64_t highest = (1ull << exponent_bits) - 1;

	if ((bits >> mantissa_bits & highest) == highest) {
		if (bits & ((1ull << mantissa_bits) - 1))
			return NAN;
		return bits >> (exponent_bits + mantissa_bits) ? -INFINITY : INFINITY;
	}
	return define_float(bits, exponent_bits, mantissa_bits, (int)(highest >> 1));
}

static const struct type {
	uint32_t dtype;
	size_t bytes;
} all_types[] = {
	{ IOSHAPE_UINT8, 1 },           { IOSHAPE_INT8, 1 },
	{ IOSHAPE_INT16, 2 },           { IOSHAPE_INT32, 4 },
	{ IOSHAPE_INT64, 8 },           { IOSHAPE_FLOAT16, 2 },
	{ IOSHAPE_FLOAT32, 4 },         { IOSHAPE_FLOAT64, 8 },
	{ IOSHAPE_COMPLEX32, 2 },       { IOSHAPE_COMPLEX64, 4 },
	{ IOSHAPE_COMPLEX128, 8 },      { IOSHAPE_BOOL, 1 },
	{ IOSHAPE_BFLOAT16, 2 },        { IOSHAPE_UINT16, 2 },
	{ IOSHAPE_UINT32, 4 },          { IOSHAPE_UINT64, 8 },
	{ IOSHAPE_FLOAT8_E4M3FN, 1 },   { IOSHAPE_FLOAT8_E5M2, 1 },
	{ IOSHAPE_FLOAT8_E4M3FNUZ, 1 }, { IOSHAPE_FLOAT8_E5M2FNUZ, 1 },
	{ IOSHAPE_FLOAT8_E8M0FNU, 1 },
};

static double define(uint32_t dtype, uint64_t bits)
{
	switch (dtype) {
	case IOSHAPE_INT8:
		return (int8_t)bits;
	case IOSHAPE_INT16:
		return (int16_t)bits;
	case IOSHAPE_INT32:
		return (int32_t)bits;
	case IOSHAPE_INT64:
		return (double)(int64_t)bits;
	case IOSHAPE_COMPLEX32:
	case IOSHAPE_FLOAT16:
		return define_ieee(bits, 5, 10);
	case IOSHAPE_COMPLEX64:
	case IOSHAPE_FLOAT32:
		return define_ieee(bits, 8, 23);
	case IOSHAPE_COMPLEX128:
	case IOSHAPE_FLOAT64:
		return define_ieee(bits, 11, 52);
	case IOSHAPE_BFLOAT16:
		return define_ieee(bits, 8, 7);
	case IOSHAPE_FLOAT8_E4M3FN:
		return (bits & 0x7f) == 0x7f ? NAN : define_float(bits, 4, 3, 7);
	case IOSHAPE_FLOAT8_E5M2:
		return define_ieee(bits, 5, 2);
	case IOSHAPE_FLOAT8_E4M3FNUZ:
		return bits == 0x80 ? NAN : define_float(bits, 4, 3, 8);
	case IOSHAPE_FLOAT8_E5M2FNUZ:
		return bits == 0x80 ? NAN : define_float(bits, 5, 2, 16);
	case IOSHAPE_FLOAT8_E8M0FNU:
		return bits == 0xff ? NAN : ldexp(1, (int)bits - 127);
	default:
		return (double)bits;
	}
}

static struct base_statistics plain(const struct type *type, const uint8_t *data, size_t length)
{
	struct base_statistics result = { .minimum = INFINITY, .maximum = -INFINITY };

	for (size_t i = 0; i + type->bytes <= length; i += type->bytes) {
		const double number =
			define(type->dtype, base_get_le(data + i, (unsigned)type->bytes));

		result.count++;
		result.nans += number != number;
		result.infinities += number > DBL_MAX || number < -DBL_MAX;
		if (!(number >= -DBL_MAX && number <= DBL_MAX))
			continue;
		result.zeros += number == 0;
		result.minimum = number < result.minimum ? number : result.minimum;
		result.maximum = number > result.maximum ? number : result.maximum;
		result.sum_squares += number * number;
	}
	return result;
}

static void compare(const struct type *type, const uint8_t *data, size_t length, size_t cut)
{
	const struct base_statistics expected = plain(type, data, length);
	struct base_statistics result;

	cut = MIN(cut, length);
	ck_assert(base_statistics_begin(&result, type->dtype));
	base_statistics_add_with(&result, &rest, data, cut, most);
	base_statistics_add_with(&result, &rest, data + cut, length - cut, most);
	base_statistics_end(&result, &rest);
	ck_assert_uint_eq(result.count, expected.count);
	ck_assert_uint_eq(result.nans, expected.nans);
	ck_assert_uint_eq(result.infinities, expected.infinities);
	ck_assert_uint_eq(result.zeros, expected.zeros);
	ck_assert_double_eq(result.minimum, expected.minimum);
	ck_assert_double_eq(result.maximum, expected.maximum);
	if (isinf(expected.sum_squares))
		ck_assert(isinf(result.sum_squares));
	else
		ck_assert_double_le(fabs(result.sum_squares - expected.sum_squares),
				    3e-6 * expected.sum_squares);
}

/* Fills the memory in one of several ways that are hard for the loops. */
static void fill(uint64_t *state, const struct type *type, unsigned way)
{
	/* Sign and magnitude: zeros, subnormal numbers, the smallest and the largest, infinity. */
	static const uint64_t special16[] = {
		0, 0x8000, 1, 0x8001, 0x0400, 0x7bff, 0xfbff, 0x7c00
	};
	static const uint64_t special32[] = { 0,          0x80000000, 1,          0x80000001,
					      0x00800000, 0x7f7fffff, 0xff7fffff, 0x7f800000 };
	static const uint64_t special64[] = { 0,
					      1ull << 63,
					      1,
					      1ull << 63 | 1,
					      1ull << 52,
					      0x7fefffffffffffff,
					      0xffefffffffffffff,
					      0x7ff0000000000000 };
	const uint64_t bound = way == 3 ? 7 : 8;

	test_random_fill(state, bytes, sizeof(bytes));
	if (way == 1) /* magnitudes that are close to each other */
		for (size_t i = 0; i + type->bytes <= sizeof(bytes); i += type->bytes)
			bytes[i + type->bytes - 1] = (bytes[i + type->bytes - 1] & 0x80) | 0x3c;
	if (way == 2) /* one number everywhere */
		for (size_t i = type->bytes; i < sizeof(bytes); i++)
			bytes[i] = bytes[i - type->bytes];
	if (way < 3 || type->bytes == 1)
		return;
	for (size_t i = 0; i + type->bytes <= sizeof(bytes); i += type->bytes) {
		const uint64_t which = test_random_below(state, bound);
		const uint64_t bits = type->bytes == 2 ? special16[which] :
				      type->bytes == 4 ? special32[which] :
							 special64[which];

		base_put_le(bytes + i,
			    type->dtype == IOSHAPE_BFLOAT16 ? special32[which] >> 16 : bits,
			    (unsigned)type->bytes);
	}
}

static struct test_case tests = { .name = "Statistics" };

/* Sanitizers do not look into the loops. */
TEST(tests, nothing_around_the_numbers_is_read)
{
	const size_t page = (size_t)sysconf(_SC_PAGESIZE), length = 4 * BASE_STATISTICS_BLOCK;
	uint8_t *memory =
		mmap(NULL, length + 2 * page, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	uint64_t state = 3;

	ck_assert_ptr_ne(memory, MAP_FAILED);
	memory += page;
	ck_assert_int_eq(mprotect(memory, length, PROT_READ | PROT_WRITE), 0);
	test_random_fill(&state, memory, length);
	for (most = BASE_PORTABLE; most < BASE_INSTRUCTION_SETS; most++)
		for (size_t i = 0; i < ARRAY_LENGTH(all_types); i++)
			compare(&all_types[i], memory, length, 0);
}

TEST(tests, they_are_those_of_a_plain_computation)
{
	uint64_t state = 1;

	for (most = BASE_PORTABLE; most < BASE_INSTRUCTION_SETS; most++)
		for (size_t i = 0; i < ARRAY_LENGTH(all_types); i++)
			for (unsigned way = 0; way < 5; way++) {
				const size_t begin = test_random_below(&state, 64);

				fill(&state, &all_types[i], way);
				compare(&all_types[i], bytes, ROOM, 0);
				compare(&all_types[i], bytes + begin, ROOM,
					test_random_below(&state, ROOM));
				/* Only one block has something special. */
				memset(bytes, 0, 5000);
				compare(&all_types[i], bytes, ROOM, 4096);
			}
}

TEST(tests, they_are_right_for_short_lengths_and_for_any_division)
{
	uint64_t state = 2;

	for (size_t i = 0; i < ARRAY_LENGTH(all_types); i++)
		for (size_t length = 0; length <= 300; length++) {
			const size_t begin = test_random_below(&state, 64);

			fill(&state, &all_types[i], length % 5);
			compare(&all_types[i], bytes + begin, length,
				test_random_below(&state, length + 1));
		}
}

TEST(tests, they_are_right_byte_by_byte)
{
	struct base_statistics result;
	uint64_t state = 3;

	fill(&state, &all_types[6], 4);
	ck_assert(base_statistics_begin(&result, IOSHAPE_FLOAT32));
	for (size_t i = 0; i < 1000; i++)
		base_statistics_add(&result, &rest, bytes + i, 1);
	base_statistics_end(&result, &rest);
	ck_assert_uint_eq(result.count, 250);
	ck_assert_uint_eq(result.zeros, plain(&all_types[6], bytes, 1000).zeros);
}

/* Files of equal tensors are equal, on whatever machine and from whatever buffers they are saved.
 */
TEST(tests, they_are_the_same_to_the_last_bit_for_each_machine_and_each_division)
{
	uint64_t state = 9;

	for (size_t i = 0; i < ARRAY_LENGTH(all_types); i++) {
		struct base_statistics whole, result;

		fill(&state, &all_types[i], i % 2);
		base_statistics_begin(&whole, all_types[i].dtype);
		base_statistics_add_with(&whole, &rest, bytes, ROOM, BASE_PORTABLE);
		base_statistics_end(&whole, &rest);
		for (most = BASE_PORTABLE; most <= BASE_INSTRUCTION_SETS; most++) {
			base_statistics_begin(&result, all_types[i].dtype);
			for (size_t done = 0, piece; done < ROOM; done += piece) {
				piece = 1 + test_random_below(&state, ROOM / 2);
				piece = MIN(piece, ROOM - done);
				base_statistics_add_with(&result, &rest, bytes + done, piece, most);
			}
			base_statistics_end(&result, &rest);
			ck_assert_mem_eq(&result.sum_squares, &whole.sum_squares, sizeof(double));
			ck_assert_double_eq(result.minimum, whole.minimum);
			ck_assert_double_eq(result.maximum, whole.maximum);
		}
	}
}

/* Each thread examines a slice. */
TEST(tests, they_are_the_same_to_the_last_bit_for_each_number_of_threads)
{
	static struct base_statistics_rest other_rest;
	const size_t size = 3 * BASE_STATISTICS_SLICE + 1020;
	uint8_t *memory = malloc(size);
	uint64_t state = 11;

	ck_assert_ptr_nonnull(memory);
	for (size_t i = 0; i < ARRAY_LENGTH(all_types); i++) {
		struct base_statistics whole, result, other;

		for (size_t at = 0; at < size; at += ROOM) {
			fill(&state, &all_types[i], 0);
			memcpy(memory + at, bytes, MIN(size - at, ROOM));
		}
		base_statistics_begin(&whole, all_types[i].dtype);
		base_statistics_add(&whole, &rest, memory, size);
		base_statistics_end(&whole, &rest);
		base_statistics_begin(&result, all_types[i].dtype);
		for (size_t done = 0, piece; done < size; done += piece) {
			piece = MIN(size - done, BASE_STATISTICS_SLICE);
			base_statistics_begin(&other, all_types[i].dtype);
			base_statistics_restart(&other_rest);
			base_statistics_add(&other, &other_rest, memory + done, piece);
			base_statistics_join(&result, &rest, &other, &other_rest);
		}
		base_statistics_end(&result, &rest);
		ck_assert_uint_eq(result.count, whole.count);
		ck_assert_uint_eq(result.zeros, whole.zeros);
		ck_assert_mem_eq(&result.sum_squares, &whole.sum_squares, sizeof(double));
		ck_assert_double_eq(result.minimum, whole.minimum);
		ck_assert_double_eq(result.maximum, whole.maximum);
	}
	free(memory);
}

TEST(tests, each_value_of_a_small_type_is_right)
{
	struct base_statistics result;

	for (size_t i = 0; i < ARRAY_LENGTH(all_types); i++)
		for (uint32_t bits = 0;
		     all_types[i].bytes <= 2 && bits < 1u << (8 * all_types[i].bytes); bits++) {
			const double number = define(all_types[i].dtype, bits);

			base_put_le(bytes, bits, 2);
			base_statistics_begin(&result, all_types[i].dtype);
			base_statistics_add(&result, &rest, bytes, all_types[i].bytes);
			base_statistics_end(&result, &rest);
			ck_assert_uint_eq(result.nans, isnan(number) ? 1 : 0);
			ck_assert_uint_eq(result.infinities, isinf(number) ? 1 : 0);
			if (isfinite(number))
				ck_assert_double_eq(result.minimum, number);
		}
}

TEST(tests, very_small_and_very_large_numbers_keep_their_squares)
{
	static const float numbers[] = { 1e-45f, 1e-38f, 1e-20f, 1e20f, 3e38f };
	struct base_statistics result;
	float *floats = (float *)(void *)bytes;

	for (most = BASE_PORTABLE; most < BASE_INSTRUCTION_SETS; most++)
		for (size_t i = 0; i < ARRAY_LENGTH(numbers); i++) {
			const double expected = (double)numbers[i] * (double)numbers[i] * 2048;

			for (size_t k = 0; k < 2048; k++)
				floats[k] = numbers[i];
			base_statistics_begin(&result, IOSHAPE_FLOAT32);
			base_statistics_add_with(&result, &rest, floats, 2048 * sizeof(*floats),
						 most);
			base_statistics_end(&result, &rest);
			ck_assert_double_le(fabs(result.sum_squares - expected), 3e-6 * expected);
			ck_assert(base_statistics_constant(&result));
		}
}

TEST(tests, a_tensor_is_constant_if_its_numbers_are_finite_and_equal)
{
	struct base_statistics result;
	float numbers[] = { 0, -0.0f, 0 };

	base_statistics_begin(&result, IOSHAPE_FLOAT32);
	ck_assert(!base_statistics_constant(&result));
	base_statistics_add(&result, &rest, numbers, sizeof(numbers));
	base_statistics_end(&result, &rest);
	ck_assert(base_statistics_constant(&result));
	numbers[0] = NAN;
	base_statistics_add(&result, &rest, numbers, sizeof(*numbers));
	base_statistics_end(&result, &rest);
	ck_assert(!base_statistics_constant(&result));
}

TEST(tests, other_types_are_not_examined)
{
	struct base_statistics result;

	ck_assert(!base_statistics_begin(&result, 0));
	ck_assert(!base_statistics_begin(&result, IOSHAPE_FLOAT4_E2M1FN_X2));
	ck_assert(!base_statistics_begin(&result, UINT32_MAX));
	base_statistics_add(&result, &rest, bytes, sizeof(bytes));
	ck_assert_uint_eq(result.count, 0);
}

TEST(tests, differences_are_those_of_a_plain_computation)
{
	static uint8_t other[sizeof(bytes)];
	uint64_t state = 4;

	for (size_t i = 0; i < ARRAY_LENGTH(all_types); i++)
		for (unsigned way = 0; way < 3; way++) {
			const struct type *type = &all_types[i];
			struct base_difference sum = { 0 }, expected = { 0 };

			fill(&state, type, 1);
			memcpy(other, bytes, sizeof(bytes));
			for (unsigned k = 0; k < 1000 * way; k++)
				other[test_random_below(&state, ROOM)] ^= 1;
			for (size_t at = 0; at < ROOM; at += type->bytes) {
				const uint64_t a = base_get_le(bytes + at, (unsigned)type->bytes);
				const uint64_t b = base_get_le(other + at, (unsigned)type->bytes);
				const double x = define(type->dtype, a);
				const double step = a == b ? 0 : x - define(type->dtype, b);

				expected.count++;
				expected.changed += a != b;
				expected.squares_of_a += isfinite(x) ? x * x : 0;
				expected.squares += step * step;
			}
			ck_assert(base_difference_add(&sum, type->dtype, bytes, other, 4096));
			ck_assert(base_difference_add(&sum, type->dtype, bytes + 4096, other + 4096,
						      ROOM - 4096));
			ck_assert_uint_eq(sum.count, expected.count);
			ck_assert_uint_eq(sum.changed, expected.changed);
			ck_assert_double_le(fabs(sum.squares_of_a - expected.squares_of_a),
					    1e-12 * expected.squares_of_a);
			if (isnan(expected.squares))
				ck_assert(isnan(sum.squares));
			else
				ck_assert_double_le(fabs(sum.squares - expected.squares),
						    1e-12 * expected.squares);
		}
}

TEST(tests, differences_count_bytes_of_types_without_statistics)
{
	struct base_difference sum = { 0 };
	const uint8_t a[] = { 1, 2, 3 }, b[] = { 1, 7, 4 };

	ck_assert(!base_difference_add(&sum, IOSHAPE_FLOAT4_E2M1FN_X2, a, b, 3));
	ck_assert_uint_eq(sum.count, 3);
	ck_assert_uint_eq(sum.changed, 2);
}
