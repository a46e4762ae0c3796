/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Loops of statistics.c over one block, for one instruction set. statistics.c includes this file
 * once for each set, and defines NAME(), TARGET, VECTOR_BYTES and HALVES() before. With FLOATS_ONLY
 * it defines less.
 *
 * The loops have constant lengths, so that compilers replace them by vector code at -O2.
 */

typedef float NAME(floats) __attribute__((vector_size(VECTOR_BYTES)));
typedef double NAME(doubles) __attribute__((vector_size(VECTOR_BYTES)));
typedef uint32_t NAME(words) __attribute__((vector_size(VECTOR_BYTES)));

/* Finds the extremes of numbers that consist of a sign and a magnitude, as floats do. */
#define RANGE(bits, element)                                                                       \
	TARGET static void NAME(range##bits)(const void *data, struct range *range)                \
	{                                                                                          \
		const element *at = data;                                                          \
		int##bits##_t most_signed = INT##bits##_MIN;                                       \
		uint##bits##_t most = 0, least = UINT##bits##_MAX, zeros = 0;                      \
                                                                                                   \
		for (size_t i = 0; i < BLOCK_BYTES / sizeof(*at); i++) {                           \
			const uint##bits##_t x = at[i];                                            \
			const int##bits##_t with_sign = (int##bits##_t)x;                          \
                                                                                                   \
			most_signed = with_sign > most_signed ? with_sign : most_signed;           \
			most = x > most ? x : most;                                                \
			least = x < least ? x : least;                                             \
			zeros += (uint##bits##_t)(x << 1) == 0;                                    \
		}                                                                                  \
		*range = (struct range){ most_signed, most, least, zeros };                        \
	}
RANGE(64, loose64)
#ifndef FLOATS_ONLY
RANGE(16, loose16)
RANGE(32, loose32)

/* Adds a block of integers. Four sums hide the latency of an addition. */
#define INTEGERS(name, element, sum_type, sum_count)                                               \
	TARGET static void NAME(name)(const void *data, struct base_statistics *statistics)        \
	{                                                                                          \
		const element *at = data;                                                          \
		element least = at[0], most = at[0];                                               \
		sum_type sums[4] = { 0 };                                                          \
		uint16_t zeros = 0;                                                                \
                                                                                                   \
		for (size_t i = 0; i < BLOCK_BYTES / sizeof(*at); i++) {                           \
			least = at[i] < least ? at[i] : least;                                     \
			most = at[i] > most ? at[i] : most;                                        \
		}                                                                                  \
		for (size_t i = 0; i < BLOCK_BYTES / sizeof(*at); i++)                             \
			zeros += at[i] == 0;                                                       \
		for (size_t i = 0; i < BLOCK_BYTES / sizeof(*at); i += (sum_count))                \
			for (size_t k = 0; k < (sum_count); k++)                                   \
				sums[k] += (sum_type)at[i + k] * (sum_type)at[i + k];              \
		statistics->count += BLOCK_BYTES / sizeof(*at);                                    \
		statistics->zeros += zeros;                                                        \
		statistics->minimum = MIN(statistics->minimum, (double)least);                     \
		statistics->maximum = MAX(statistics->maximum, (double)most);                      \
		statistics->sum_squares +=                                                         \
			(double)sums[0] + (double)sums[1] + (double)sums[2] + (double)sums[3];     \
	}
INTEGERS(integers_int8, int8_t, int32_t, 1)
INTEGERS(integers_uint8, uint8_t, uint32_t, 1)
INTEGERS(integers_int16, loose_int16, int64_t, 1)
INTEGERS(integers_uint16, loose16, uint64_t, 1)
INTEGERS(integers_int32, loose_int32, double, 4)
INTEGERS(integers_uint32, loose32, double, 4)
INTEGERS(integers_int64, loose_int64, double, 4)
INTEGERS(integers_uint64, loose64, double, 4)
#undef INTEGERS
#endif
#undef RANGE

/* Sums of floats depend on their order. So the numbers are added in the same order for each
 * instruction set: in vectors of 64 bytes, which consist of several registers where those are
 * shorter. No product is fused with its addition (see meson.build). */
#define REGISTERS (64 / VECTOR_BYTES)
#define EACH_REGISTER _Pragma("GCC unroll 4") for (size_t k = 0; k < REGISTERS; k++)

#define SUM_NUMBERS(sum, vectors)                                                                  \
	EACH_REGISTER                                                                              \
	for (size_t i = 0; i < VECTOR_BYTES / sizeof((vectors)[0][0]); i++)                        \
	(sum) += (double)(vectors)[k][i]

/* Add up the squares of numbers, each multiplied by `scale`. Two sums hide the latency of an
 * addition. */
#define SQUARES(name, vector, load)                                                                \
	TARGET static double NAME(name)(const void *data, double scale)                            \
	{                                                                                          \
		const NAME(vector) factor =                                                        \
			(NAME(vector)){ 0 } + (__typeof__(((NAME(vector)){ 0 })[0]))scale;         \
		NAME(vector) one[REGISTERS], other[REGISTERS];                                     \
		NAME(vector) sums[2][REGISTERS] = { { { 0 } } };                                   \
		const uint8_t *at = data;                                                          \
		double sum = 0;                                                                    \
                                                                                                   \
		if (scale == 1) {                                                                  \
			for (size_t i = 0; i < BLOCK_BYTES;) {                                     \
				load;                                                              \
				EACH_REGISTER                                                      \
				{                                                                  \
					sums[0][k] += one[k] * one[k];                             \
					sums[1][k] += other[k] * other[k];                         \
				}                                                                  \
			}                                                                          \
		} else {                                                                           \
			for (size_t i = 0; i < BLOCK_BYTES;) {                                     \
				load;                                                              \
				EACH_REGISTER                                                      \
				{                                                                  \
					one[k] *= factor;                                          \
					other[k] *= factor;                                        \
					sums[0][k] += one[k] * one[k];                             \
					sums[1][k] += other[k] * other[k];                         \
				}                                                                  \
			}                                                                          \
		}                                                                                  \
		SUM_NUMBERS(sum, sums[0]);                                                         \
		SUM_NUMBERS(sum, sums[1]);                                                         \
		return sum;                                                                        \
	}

#define LOAD_TWO                                                                                   \
	EACH_REGISTER                                                                              \
	{                                                                                          \
		memcpy(&one[k], at + i + k * VECTOR_BYTES, VECTOR_BYTES);                          \
		memcpy(&other[k], at + i + 64 + k * VECTOR_BYTES, VECTOR_BYTES);                   \
	}                                                                                          \
	i += 128
SQUARES(squares_float32, floats, LOAD_TWO)
SQUARES(squares_float64, doubles, LOAD_TWO)
#undef LOAD_TWO

/* A bfloat16 is the upper half of a float32. */
#define LOAD_BFLOAT16                                                                              \
	EACH_REGISTER                                                                              \
	{                                                                                          \
		NAME(words) pairs;                                                                 \
                                                                                                   \
		memcpy(&pairs, at + i + k * VECTOR_BYTES, VECTOR_BYTES);                           \
		one[k] = (NAME(floats))(pairs << 16);                                              \
		other[k] = (NAME(floats))(pairs & 0xffff0000u);                                    \
	}                                                                                          \
	i += 64
SQUARES(squares_bfloat16, floats, LOAD_BFLOAT16)
#undef LOAD_BFLOAT16

#define LOAD_FLOAT16                                                                               \
	EACH_REGISTER                                                                              \
	{                                                                                          \
		HALVES(one[k], at + i + k * VECTOR_BYTES / 2);                                     \
		HALVES(other[k], at + i + 32 + k * VECTOR_BYTES / 2);                              \
	}                                                                                          \
	i += 64
SQUARES(squares_float16, floats, LOAD_FLOAT16)
#undef LOAD_FLOAT16

#undef SQUARES
#undef SUM_NUMBERS
#undef EACH_REGISTER
#undef REGISTERS
