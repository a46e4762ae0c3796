/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Statistics of the elements of a tensor.
 *
 * Floats are examined in blocks that fit into the first-level cache, each in two passes. The first
 * pass finds the extremes by comparing integers. If they are finite, so are all numbers, and the
 * second pass adds up the squares. Blocks with NaN or infinities, the ends of records and the rarer
 * types are examined number by number.
 *
 * The blocks begin at fixed offsets in the tensor, and so do the slices whose sums are added. So
 * equal tensors have equal statistics, to the last bit, however their bytes come, and however many
 * threads examine them.
 */
#include "base/base.h"

#include <ioshape/ioshape.h>

#include <math.h>
#include <string.h>

#ifdef __x86_64__
#include <immintrin.h>
#endif

#define BLOCK_BYTES BASE_STATISTICS_BLOCK

/* Numbers at any address. */
typedef uint16_t loose16 __attribute__((aligned(1), may_alias));
typedef uint32_t loose32 __attribute__((aligned(1), may_alias));
typedef uint64_t loose64 __attribute__((aligned(1), may_alias));
typedef int16_t loose_int16 __attribute__((aligned(1), may_alias));
typedef int32_t loose_int32 __attribute__((aligned(1), may_alias));
typedef int64_t loose_int64 __attribute__((aligned(1), may_alias));

/* Extremes of a block, as bit patterns. `most_signed` has the largest magnitude of the numbers
 * without sign, `most` of those with sign. `least` has the smallest magnitude if all have one sign.
 */
struct range {
	int64_t most_signed;
	uint64_t most, least;
	uint64_t zeros;
};

/* ---- Single numbers -------------------------------------------------------------------------- */

/* Returns a float of fewer than 64 bits: its sign, `exponent` bits and `mantissa` bits. */
static double small_float(uint64_t bits, unsigned exponent, unsigned mantissa, int bias)
{
	const uint64_t fraction = bits & ((1ull << mantissa) - 1);
	const uint64_t power = bits >> mantissa & ((1ull << exponent) - 1);
	const double magnitude = power ? ldexp((double)(fraction | 1ull << mantissa),
					       (int)power - bias - (int)mantissa) :
					 ldexp((double)fraction, 1 - bias - (int)mantissa);

	return bits >> (exponent + mantissa) & 1 ? -magnitude : magnitude;
}

static double float32_of(const void *at)
{
	float number;

	memcpy(&number, at, sizeof(number));
	return (double)number;
}

static double float16_of(const void *at)
{
	const uint32_t bits = *(const loose16 *)at;
	const uint32_t moved = (bits & 0x7fff) << 13; /* see HALVES below */
	const double finite = float32_of(&moved) * 0x1p112;
	const double magnitude = (bits & 0x7c00) != 0x7c00 ? finite : bits & 0x3ff ? NAN : INFINITY;

	return bits >> 15 ? -magnitude : magnitude;
}

static double bfloat16_of(const void *at)
{
	const uint32_t bits = (uint32_t) * (const loose16 *)at << 16;

	return float32_of(&bits);
}

static double float64_of(const void *at)
{
	double number;

	memcpy(&number, at, sizeof(number));
	return number;
}

static double float8_e4m3fn_of(const void *at)
{
	const uint8_t bits = *(const uint8_t *)at;

	return (bits & 0x7f) == 0x7f ? NAN : small_float(bits, 4, 3, 7);
}

static double float8_e5m2_of(const void *at)
{
	const uint16_t bits = (uint16_t)(*(const uint8_t *)at << 8); /* half of a float16 */

	return float16_of(&bits);
}

static double float8_e4m3fnuz_of(const void *at)
{
	const uint8_t bits = *(const uint8_t *)at;

	return bits == 0x80 ? NAN : small_float(bits, 4, 3, 8);
}

static double float8_e5m2fnuz_of(const void *at)
{
	const uint8_t bits = *(const uint8_t *)at;

	return bits == 0x80 ? NAN : small_float(bits, 5, 2, 16);
}

static double float8_e8m0fnu_of(const void *at)
{
	const uint8_t bits = *(const uint8_t *)at;

	return bits == 0xff ? NAN : ldexp(1, bits - 127);
}

#define NUMBER(name, type)                                                                         \
	static double name##_of(const void *at)                                                    \
	{                                                                                          \
		type number;                                                                       \
                                                                                                   \
		memcpy(&number, at, sizeof(number));                                               \
		return (double)number;                                                             \
	}
NUMBER(uint8, uint8_t)
NUMBER(int8, int8_t)
NUMBER(int16, int16_t)
NUMBER(int32, int32_t)
NUMBER(int64, int64_t)
NUMBER(uint16, uint16_t)
NUMBER(uint32, uint32_t)
NUMBER(uint64, uint64_t)
#undef NUMBER

/* ---- Loops for the instruction sets ---------------------------------------------------------- */

/* Sanitizers would check the loops number by number, which takes most of the tests' time. Instead,
 * tests/c/base/test_statistics.c shows that the loops read nothing beyond a block. */
#ifdef __clang__
#define UNCHECKED __attribute__((no_sanitize("address", "thread", "undefined", "coverage")))
#else
#define UNCHECKED
#endif

#define NAME(name) name##_portable
#define TARGET UNCHECKED
#define VECTOR_BYTES 16
/* Moves exponent and mantissa to their bits in a float32, and the sign. The factor corrects the
 * bias, also of subnormal numbers. */
#define HALVES(into, from)                                                                         \
	do {                                                                                       \
		uint32_t halves[VECTOR_BYTES / 4];                                                 \
                                                                                                   \
		for (size_t j = 0; j < VECTOR_BYTES / 4; j++)                                      \
			halves[j] =                                                                \
				(uint32_t)(((const loose16 *)(const void *)(from))[j] & 0x7fff)    \
				<< 13;                                                             \
		memcpy(&(into), halves, sizeof(halves));                                           \
		(into) *= 0x1p112f;                                                                \
	} while (0)
#include "base/statistics_loops.h"
#undef HALVES
#undef VECTOR_BYTES
#undef TARGET
#undef NAME

#ifdef __x86_64__
#define NAME(name) name##_avx2
#define TARGET UNCHECKED __attribute__((target("avx2,fma,f16c")))
#define VECTOR_BYTES 32
#define HALVES(into, from)                                                                         \
	(into) = (NAME(floats))_mm256_cvtph_ps(_mm_loadu_si128((const void *)(from)))
#include "base/statistics_loops.h"
#undef HALVES
#undef VECTOR_BYTES
#undef TARGET
#undef NAME

#define NAME(name) name##_avx512
#define TARGET UNCHECKED __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,fma,f16c")))
#define VECTOR_BYTES 64
#define FLOATS_ONLY
#define HALVES(into, from)                                                                         \
	(into) = (NAME(floats))_mm512_cvtph_ps(_mm256_loadu_si256((const void *)(from)))
#include "base/statistics_loops.h"
#undef HALVES
#undef VECTOR_BYTES
#undef TARGET
#undef NAME
#endif

struct loops {
	/* For floats. */
	void (*range)(const void *data, struct range *range);
	double (*squares)(const void *data, double scale);
	/* For integers. */
	void (*integers)(const void *data, struct base_statistics *statistics);
};

/* AVX-512 makes only sums of floats faster, and the comparison of wide ones. `wide` is the set for
 * comparisons. */
#ifdef __x86_64__
#define FLOATS(bits, name, wide)                                                                   \
	{                                                                                          \
		{ range##bits##_portable, squares_##name##_portable, NULL },                       \
			{ range##bits##_avx2, squares_##name##_avx2, NULL },                       \
		{                                                                                  \
			range##bits##_##wide, squares_##name##_avx512, NULL                        \
		}                                                                                  \
	}
#define INTEGERS(name)                                                                             \
	{                                                                                          \
		{ NULL, NULL, integers_##name##_portable },                                        \
			{ NULL, NULL, integers_##name##_avx2 },                                    \
		{                                                                                  \
			NULL, NULL, integers_##name##_avx2                                         \
		}                                                                                  \
	}
#else
#define FLOATS(bits, name, wide)                                                                   \
	{                                                                                          \
		{                                                                                  \
			range##bits##_portable, squares_##name##_portable, NULL                    \
		}                                                                                  \
	}
#define INTEGERS(name)                                                                             \
	{                                                                                          \
		{                                                                                  \
			NULL, NULL, integers_##name##_portable                                     \
		}                                                                                  \
	}
#endif

static enum base_instructions best_of(enum base_instructions most)
{
#ifdef __x86_64__
	if (most >= BASE_AVX512 && __builtin_cpu_supports("avx512bw") &&
	    __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq"))
		return BASE_AVX512;
	if (most >= BASE_AVX2 && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"))
		return BASE_AVX2;
#endif
	(void)most;
	return BASE_PORTABLE;
}

/* ---- Differences ----------------------------------------------------------------------------- */

/* Compares numbers of a type. `values` has the number of each byte, for the types of one byte. Four
 * sums hide the latency of an addition. */
typedef void (*difference_fn)(struct base_difference *sum, const double *values, const uint8_t *a,
			      const uint8_t *b, size_t count);

#define DIFFERENCE(name, bytes, number_of)                                                         \
	static void name##_difference(struct base_difference *sum, const double *values,           \
				      const uint8_t *a, const uint8_t *b, size_t count)            \
	{                                                                                          \
		double own[4] = { 0 }, steps[4] = { 0 };                                           \
                                                                                                   \
		(void)values;                                                                      \
		for (size_t i = 0; i < count; i++, a += (bytes), b += (bytes)) {                   \
			const double number = number_of(a);                                        \
			const double step = number - number_of(b);                                 \
                                                                                                   \
			own[i % 4] += isfinite(number) ? number * number : 0;                      \
			if (!memcmp(a, b, (bytes)))                                                \
				continue;                                                          \
			sum->changed++;                                                            \
			steps[i % 4] += step * step;                                               \
		}                                                                                  \
		sum->squares_of_a += own[0] + own[1] + own[2] + own[3];                            \
		sum->squares += steps[0] + steps[1] + steps[2] + steps[3];                         \
	}

#define VALUE_OF(at) values[*(at)]
DIFFERENCE(bytes, 1, VALUE_OF)
#undef VALUE_OF

/* ---- Types ----------------------------------------------------------------------------------- */

/* The numbers in elements of a type: an element is one number, or two if it is complex. */
struct numbers {
	double (*number_of)(const void *at);
	uint8_t bytes;
	uint8_t mantissa; /* for floats that have loops: bits of the mantissa */
	int bias;
	difference_fn difference;
	struct loops loops[BASE_INSTRUCTION_SETS];
};

#define FLOAT(bits, name, mantissa, bias, wide)                                                    \
	DIFFERENCE(name, (bits) / 8, name##_of)                                                    \
	static const struct numbers name = {                                                       \
		name##_of, (bits) / 8, mantissa, bias, name##_difference, FLOATS(bits, name, wide) \
	};
#define INTEGER(name)                                                                              \
	DIFFERENCE(name, sizeof(name##_t), name##_of)                                              \
	static const struct numbers name = { name##_of, sizeof(name##_t),  0,                      \
					     0,         name##_difference, INTEGERS(name) };
#define FLOAT8(name)                                                                               \
	static const struct numbers name = { .number_of = name##_of,                               \
					     .bytes = 1,                                           \
					     .difference = bytes_difference };
FLOAT(16, float16, 10, 15, avx2)
FLOAT(32, float32, 23, 127, avx2)
FLOAT(64, float64, 52, 1023, avx512)
FLOAT(16, bfloat16, 7, 127, avx2)
INTEGER(int8)
INTEGER(int16)
INTEGER(int32)
INTEGER(int64)
INTEGER(uint8)
INTEGER(uint16)
INTEGER(uint32)
INTEGER(uint64)
FLOAT8(float8_e4m3fn)
FLOAT8(float8_e5m2)
FLOAT8(float8_e4m3fnuz)
FLOAT8(float8_e5m2fnuz)
FLOAT8(float8_e8m0fnu)

static const struct numbers *const types[] = {
	[IOSHAPE_UINT8] = &uint8,
	[IOSHAPE_INT8] = &int8,
	[IOSHAPE_INT16] = &int16,
	[IOSHAPE_INT32] = &int32,
	[IOSHAPE_INT64] = &int64,
	[IOSHAPE_FLOAT16] = &float16,
	[IOSHAPE_FLOAT32] = &float32,
	[IOSHAPE_FLOAT64] = &float64,
	[IOSHAPE_COMPLEX32] = &float16,
	[IOSHAPE_COMPLEX64] = &float32,
	[IOSHAPE_COMPLEX128] = &float64,
	[IOSHAPE_BOOL] = &uint8,
	[IOSHAPE_BFLOAT16] = &bfloat16,
	[IOSHAPE_UINT16] = &uint16,
	[IOSHAPE_UINT32] = &uint32,
	[IOSHAPE_UINT64] = &uint64,
	[IOSHAPE_FLOAT8_E4M3FN] = &float8_e4m3fn,
	[IOSHAPE_FLOAT8_E5M2] = &float8_e5m2,
	[IOSHAPE_FLOAT8_E4M3FNUZ] = &float8_e4m3fnuz,
	[IOSHAPE_FLOAT8_E5M2FNUZ] = &float8_e5m2fnuz,
	[IOSHAPE_FLOAT8_E8M0FNU] = &float8_e8m0fnu,
};

static const struct numbers *numbers_of(uint32_t dtype)
{
	return dtype < ARRAY_LENGTH(types) ? types[dtype] : NULL;
}

bool base_statistics_begin(struct base_statistics *statistics, uint32_t dtype)
{
	*statistics = (struct base_statistics){ .minimum = INFINITY, .maximum = -INFINITY };
	if (numbers_of(dtype))
		statistics->dtype = dtype;
	return statistics->dtype;
}

uint64_t base_statistics_count(uint32_t dtype, uint64_t bytes)
{
	const struct numbers *numbers = numbers_of(dtype);

	return numbers ? bytes / numbers->bytes : 0;
}

/* ---- Adding numbers -------------------------------------------------------------------------- */

/* Counts `times` equal numbers. */
static void add_number(struct base_statistics *statistics, double number, uint64_t times)
{
	statistics->count += times;
	if (isnan(number)) {
		statistics->nans += times;
	} else if (isinf(number)) {
		statistics->infinities += times;
	} else {
		statistics->zeros += number == 0 ? times : 0;
		statistics->minimum = MIN(statistics->minimum, number);
		statistics->maximum = MAX(statistics->maximum, number);
		statistics->sum_squares += number * number * (double)times;
	}
}

static void add_numbers(struct base_statistics *statistics, const struct numbers *numbers,
			const uint8_t *data, size_t bytes)
{
	for (size_t i = 0; i < bytes; i += numbers->bytes)
		add_number(statistics, numbers->number_of(data + i), 1);
}

/* Adds a block of finite floats, whose extremes are known. */
static void add_finite(struct base_statistics *statistics, const struct numbers *numbers,
		       const struct loops *loops, const uint8_t *data, const struct range *range)
{
	const uint64_t sign = 1ull << (8 * numbers->bytes - 1);
	const bool negative = range->most & sign, positive = range->most_signed >= 0;
	const uint64_t most_positive = (uint64_t)range->most_signed;
	const double minimum = numbers->number_of(negative ? &range->most : &range->least);
	const double maximum = numbers->number_of(positive ? &most_positive : &range->least);
	const double largest = MAX(-minimum, maximum);
	int exponent = 0;

	statistics->count += BLOCK_BYTES / numbers->bytes;
	statistics->zeros += range->zeros;
	statistics->minimum = MIN(statistics->minimum, minimum);
	statistics->maximum = MAX(statistics->maximum, maximum);
	/* Squares of very large or small numbers would leave the range of floats. */
	if (numbers != &float16 && largest && (largest > 0x1p50 || largest < 0x1p-30))
		frexp(largest, &exponent);
	/* The scale must be a normal float, too. */
	exponent = MAX(exponent, 2 - numbers->bias);
	statistics->sum_squares += ldexp(loops->squares(data, ldexp(1, -exponent)), 2 * exponent);
}

static void add_block(struct base_statistics *statistics, const struct numbers *numbers,
		      const struct loops *loops, const uint8_t *data)
{
	const uint64_t magnitudes = (1ull << (8 * numbers->bytes - 1)) - 1;
	const uint64_t infinity = magnitudes & ~((1ull << numbers->mantissa) - 1);
	struct range range;

	loops->range(data, &range);
	if ((range.most_signed >= 0 && (uint64_t)range.most_signed >= infinity) ||
	    (range.most > magnitudes && (range.most & magnitudes) >= infinity))
		add_numbers(statistics, numbers, data, BLOCK_BYTES);
	else
		add_finite(statistics, numbers, loops, data, &range);
}

/* Adds a block of numbers of one byte, by counting how often each of the 256 occurs. */
static void add_bytes(struct base_statistics *statistics, const struct numbers *numbers,
		      const uint8_t *data)
{
	/* Several tables, because a count cannot be read just after it was written. */
	uint32_t counts[4][256] = { { 0 } };

	for (size_t i = 0; i < BLOCK_BYTES; i++)
		counts[i % 4][data[i]]++;
	for (unsigned value = 0; value < 256; value++) {
		const uint8_t byte = (uint8_t)value;
		const uint64_t times = (uint64_t)counts[0][value] + counts[1][value] +
				       counts[2][value] + counts[3][value];

		if (times)
			add_number(statistics, numbers->number_of(&byte), times);
	}
}

/* Adds the sum of squares of a slice to that of the slices before it. */
static void end_slice(struct base_statistics *statistics, struct base_statistics_rest *rest)
{
	rest->slices += statistics->sum_squares;
	statistics->sum_squares = 0;
	rest->slice_bytes = 0;
}

/* Adds whole blocks. */
static void add_blocks(struct base_statistics *statistics, struct base_statistics_rest *rest,
		       enum base_instructions most, const uint8_t *data, size_t bytes)
{
	const struct numbers *numbers = numbers_of(statistics->dtype);
	const struct loops *loops = &numbers->loops[best_of(most)];

	for (; bytes; bytes -= BLOCK_BYTES, data += BLOCK_BYTES) {
		if (loops->range)
			add_block(statistics, numbers, loops, data);
		else if (loops->integers)
			loops->integers(data, statistics);
		else
			add_bytes(statistics, numbers, data);
		rest->slice_bytes += BLOCK_BYTES;
		if (rest->slice_bytes == BASE_STATISTICS_SLICE)
			end_slice(statistics, rest);
	}
}

void base_statistics_add_with(struct base_statistics *statistics, struct base_statistics_rest *rest,
			      const void *data, size_t bytes, enum base_instructions most)
{
	const uint8_t *at = data;
	size_t piece;

	if (!statistics->dtype)
		return;
	if (rest->bytes) {
		piece = MIN(bytes, BLOCK_BYTES - rest->bytes);
		memcpy(rest->block + rest->bytes, at, piece);
		rest->bytes += piece;
		at += piece;
		bytes -= piece;
		if (rest->bytes < BLOCK_BYTES)
			return;
		add_blocks(statistics, rest, most, rest->block, BLOCK_BYTES);
	}
	rest->bytes = bytes % BLOCK_BYTES;
	add_blocks(statistics, rest, most, at, bytes - rest->bytes);
	memcpy(rest->block, at + bytes - rest->bytes, rest->bytes);
}

void base_statistics_add(struct base_statistics *statistics, struct base_statistics_rest *rest,
			 const void *data, size_t bytes)
{
	base_statistics_add_with(statistics, rest, data, bytes, BASE_INSTRUCTION_SETS);
}

void base_statistics_join(struct base_statistics *statistics, struct base_statistics_rest *rest,
			  const struct base_statistics *next,
			  const struct base_statistics_rest *next_rest)
{
	statistics->count += next->count;
	statistics->nans += next->nans;
	statistics->infinities += next->infinities;
	statistics->zeros += next->zeros;
	statistics->minimum = MIN(statistics->minimum, next->minimum);
	statistics->maximum = MAX(statistics->maximum, next->maximum);
	statistics->sum_squares = next->sum_squares;
	rest->slices += next_rest->slices;
	rest->slice_bytes = next_rest->slice_bytes;
	rest->bytes = next_rest->bytes;
	memcpy(rest->block, next_rest->block, rest->bytes);
}

void base_statistics_end(struct base_statistics *statistics, struct base_statistics_rest *rest)
{
	const struct numbers *numbers = numbers_of(statistics->dtype);

	if (numbers)
		add_numbers(statistics, numbers, rest->block,
			    rest->bytes / numbers->bytes * numbers->bytes);
	end_slice(statistics, rest);
	statistics->sum_squares = rest->slices;
	base_statistics_restart(rest);
}

bool base_statistics_constant(const struct base_statistics *statistics)
{
	return statistics->count && !statistics->nans && !statistics->infinities &&
	       statistics->minimum == statistics->maximum;
}

/* ---- Comparing two tensors ------------------------------------------------------------------- */

bool base_difference_add(struct base_difference *sum, uint32_t dtype, const void *a, const void *b,
			 size_t bytes)
{
	const struct numbers *numbers = numbers_of(dtype);
	double values[256] = { 0 };

	for (unsigned value = 0; numbers && numbers->bytes == 1 && value < 256; value++)
		values[value] = numbers->number_of(&(uint8_t){ (uint8_t)value });
	if (numbers)
		numbers->difference(sum, values, a, b, bytes / numbers->bytes);
	else
		bytes_difference(sum, values, a, b, bytes);
	sum->count += numbers ? bytes / numbers->bytes : bytes;
	return numbers;
}
