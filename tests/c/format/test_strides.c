/* SPDX-License-Identifier: Apache-2.0 */
#define _GNU_SOURCE
#include "format/format.h"
#include "support/check_main.h"
#include "support/random.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#define LIST(...)                                                                                  \
	(const int64_t[])                                                                          \
	{                                                                                          \
		__VA_ARGS__                                                                        \
	}
#define ROUNDS 3000

static uint8_t some_data[4096];

static struct ioshape_tensor tensor_of(uint32_t dims, const int64_t *shape, const int64_t *strides)
{
	return (struct ioshape_tensor){
		.name = "weight",
		.dtype = IOSHAPE_FLOAT32,
		.dims = dims,
		.shape = shape,
		.strides = strides,
		.data = some_data,
	};
}

/* ---- Layout ---------------------------------------------------------------------------------- */

static void expect_layout(const struct ioshape_tensor *tensor, bool as_it_lies, uint64_t bytes,
			  const int64_t *strides)
{
	int64_t saved[IOSHAPE_MAX_DIMS];
	struct format_layout layout = { .strides = saved };
	struct base_error error = { 0 };

	ck_assert_msg(!format_layout_tensor(tensor, &layout, &error), "%s", error.text);
	ck_assert_int_eq(layout.as_it_lies, as_it_lies);
	ck_assert_uint_eq(layout.bytes, bytes);
	for (uint32_t i = 0; i < tensor->dims; i++)
		ck_assert_int_eq(saved[i], strides[i]);
}

static struct test_case layout_case = { .name = "layout" };

TEST(layout_case, every_permutation_of_a_dense_block_is_recognised)
{
	uint64_t seed = 1;

	for (int round = 0; round < ROUNDS; round++) {
		int64_t shape[6], strides[6], step = 1;
		uint32_t dims = (uint32_t)test_random_below(&seed, 7), order[6];
		struct ioshape_tensor tensor = tensor_of(dims, shape, strides);
		uint64_t elements;

		for (uint32_t i = 0; i < dims; i++) {
			uint32_t other = (uint32_t)test_random_below(&seed, i + 1);

			shape[i] = 1 + (int64_t)test_random_below(&seed, 4);
			order[i] = order[other];
			order[other] = i;
		}
		for (uint32_t i = 0; i < dims; i++) {
			strides[order[i]] = step;
			step *= shape[order[i]];
		}
		expect_layout(&tensor, true, (uint64_t)step * 4, strides);
		ck_assert(format_strides_dense(dims, shape, strides, &elements));
		ck_assert_uint_eq(elements, (uint64_t)step);
	}
}

TEST(layout_case, tensors_are_saved_as_they_lie_or_packed)
{
	const struct {
		struct ioshape_tensor tensor;
		bool as_it_lies;
		uint64_t bytes;
		const int64_t *strides; /* strides in the file */
	} cases[] = {
		{ tensor_of(0, NULL, NULL), true, 4, NULL },
		{ tensor_of(3, LIST(2, 3, 4), NULL), true, 96, LIST(12, 4, 1) },
		{ tensor_of(3, LIST(2, 3, 4), LIST(12, 4, 1)), true, 96, LIST(12, 4, 1) },
		/* Transposed; channels last. */
		{ tensor_of(2, LIST(3, 5), LIST(1, 3)), true, 60, LIST(1, 3) },
		{ tensor_of(4, LIST(2, 3, 4, 5), LIST(60, 1, 15, 3)), true, 480,
		  LIST(60, 1, 15, 3) },
		/* Expanded; sliced; every second; overlapping; sliced and transposed. */
		{ tensor_of(2, LIST(4, 5), LIST(0, 1)), false, 80, LIST(5, 1) },
		{ tensor_of(2, LIST(4, 5), LIST(10, 1)), false, 80, LIST(5, 1) },
		{ tensor_of(1, LIST(7), LIST(2)), false, 28, LIST(1) },
		{ tensor_of(2, LIST(4, 3), LIST(1, 1)), false, 48, LIST(3, 1) },
		{ tensor_of(2, LIST(4, 5), LIST(1, 8)), false, 80, LIST(5, 1) },
		/*
		 * In a channels_last batch of one, torch uses the stride of the batch dimension.
		 * Absurd strides are replaced.
		 */
		{ tensor_of(4, LIST(1, 3, 4, 5), LIST(60, 1, 15, 3)), true, 240,
		  LIST(60, 1, 15, 3) },
		{ tensor_of(3, LIST(1, 3, 4), LIST(INT64_MAX, 4, 1)), true, 48, LIST(12, 4, 1) },
		{ tensor_of(2, LIST(3, 1), LIST(1, 0)), true, 12, LIST(1, 0) },
		{ tensor_of(2, LIST(1, 1), LIST(INT64_MAX, INT64_MAX)), true, 4, LIST(1, 1) },
		/* Empty tensors, as in torch: a size of 0 counts as 1. */
		{ tensor_of(3, LIST(3, 0, 4), NULL), true, 0, LIST(4, 4, 1) },
		{ tensor_of(2, LIST(0, 3), NULL), true, 0, LIST(3, 1) },
		{ tensor_of(2, LIST(3, 0), LIST(1, 3)), true, 0, LIST(1, 3) },
		{ tensor_of(2, LIST(3, 0), LIST(INT64_MAX, INT64_MAX)), false, 0, LIST(1, 1) },
		{ tensor_of(2, LIST(0, INT64_MAX / 4), NULL), true, 0, LIST(INT64_MAX / 4, 1) },
		{ { "w", IOSHAPE_INT8, 1, LIST(0), NULL, NULL }, true, 0, LIST(1) },
	};

	for (size_t i = 0; i < ARRAY_LENGTH(cases); i++)
		expect_layout(&cases[i].tensor, cases[i].as_it_lies, cases[i].bytes,
			      cases[i].strides);
}

TEST(layout_case, what_the_layout_calls_dense_is_dense_for_the_reader)
{
	uint64_t seed = 2;

	for (int round = 0; round < ROUNDS; round++) {
		int64_t shape[5], strides[5], saved[5];
		uint32_t dims = (uint32_t)test_random_below(&seed, 6);
		struct ioshape_tensor tensor = tensor_of(dims, shape, strides);
		struct format_layout layout = { .strides = saved };
		uint64_t elements;

		for (uint32_t i = 0; i < dims; i++) {
			shape[i] = (int64_t)test_random_below(&seed, 4);
			strides[i] = (int64_t)test_random_below(&seed, 10);
		}
		ck_assert_int_eq(format_layout_tensor(&tensor, &layout, NULL), 0);
		ck_assert(format_strides_dense(dims, shape, saved, &elements));
		ck_assert_uint_eq(elements * 4, layout.bytes);
	}
}

TEST(layout_case, hostile_strides_are_not_dense)
{
	const int64_t many[IOSHAPE_MAX_DIMS + 1] = { 0 };
	uint64_t elements;

	ck_assert(!format_strides_dense(1, LIST(-1), LIST(1), &elements));
	ck_assert(!format_strides_dense(1, LIST(3), LIST(-1), &elements));
	ck_assert(!format_strides_dense(1, LIST(3), LIST(0), &elements));
	ck_assert(!format_strides_dense(2, LIST(3, 1), LIST(1, 4), &elements));
	ck_assert(!format_strides_dense(2, LIST(3, 1), LIST(1, -1), &elements));
	ck_assert(!format_strides_dense(2, LIST(INT64_MAX, 2), LIST(2, 1), &elements));
	ck_assert(!format_strides_dense(3, LIST(INT64_MAX, 0, 2), LIST(2, 2, 1), &elements));
	ck_assert(!format_strides_dense(2, LIST(2, 2), LIST(INT64_MAX, 1), &elements));
	ck_assert(!format_strides_dense(IOSHAPE_MAX_DIMS + 1, many, many, &elements));
	ck_assert(!format_strides_dense(UINT32_MAX, many, many, &elements));
}

TEST(layout_case, impossible_tensors_are_refused)
{
	const int64_t many[IOSHAPE_MAX_DIMS + 1] = { 0 };
	const struct {
		struct ioshape_tensor tensor;
		int code;
	} cases[] = {
		{ { "caf\xe9", IOSHAPE_INT8, 0, NULL, NULL, some_data }, -EINVAL },
		{ { "w", (enum ioshape_dtype)0, 1, LIST(3), NULL, some_data }, -EINVAL },
		{ { "w", (enum ioshape_dtype)23, 1, LIST(3), NULL, some_data }, -EINVAL },
		{ tensor_of(IOSHAPE_MAX_DIMS + 1, many, NULL), IOSHAPE_E_LIMIT },
		{ tensor_of(2, NULL, NULL), -EINVAL },
		{ tensor_of(2, LIST(3, -4), NULL), -EINVAL },
		{ tensor_of(2, LIST(3, 4), LIST(4, -1)), -EINVAL },
		{ tensor_of(2, LIST(0, 4), LIST(-4, 1)), -EINVAL },
		{ { "w", IOSHAPE_INT8, 1, LIST(3), NULL, NULL }, -EINVAL },
		{ { "w", IOSHAPE_INT8, 0, NULL, NULL, NULL }, -EINVAL },
		/* Overflows: of the number of bytes, then of the offsets that strides reach. */
		{ tensor_of(2, LIST(INT64_MAX, 2), NULL), IOSHAPE_E_LIMIT },
		{ tensor_of(1, LIST(INT64_MAX / 4 + 1), NULL), IOSHAPE_E_LIMIT },
		{ tensor_of(3, LIST(INT64_MAX, 2, 0), NULL), IOSHAPE_E_LIMIT },
		{ tensor_of(2, LIST(2, 2), LIST(INT64_MAX, 1)), IOSHAPE_E_LIMIT },
		{ tensor_of(2, LIST(3, 2), LIST(INT64_MAX / 2 + 1, 1)), IOSHAPE_E_LIMIT },
		{ tensor_of(1, LIST(2), LIST(INT64_MAX / 4)), IOSHAPE_E_LIMIT },
	};
	int64_t saved[IOSHAPE_MAX_DIMS];
	struct format_layout layout = { .strides = saved };

	for (size_t i = 0; i < ARRAY_LENGTH(cases); i++) {
		struct base_error error = { 0 };

		ck_assert_int_eq(format_layout_tensor(&cases[i].tensor, &layout, &error),
				 cases[i].code);
		ck_assert_int_eq(error.code, cases[i].code);
	}
}

/* ---- Packing --------------------------------------------------------------------------------- */

/* Packs in the simplest way: element by element, in row-major order. */
static void pack_naively(const struct ioshape_tensor *tensor, size_t element_bytes, uint8_t *to)
{
	int64_t index[IOSHAPE_MAX_DIMS] = { 0 }, offset;
	uint32_t i;

	for (;;) {
		offset = 0;
		for (i = 0; i < tensor->dims; i++)
			offset += index[i] * tensor->strides[i];
		memcpy(to, (const uint8_t *)tensor->data + (size_t)offset * element_bytes,
		       element_bytes);
		to += element_bytes;
		for (i = tensor->dims; i-- > 0; index[i] = 0) {
			if (++index[i] < tensor->shape[i])
				break;
		}
		if (i == UINT32_MAX)
			return;
	}
}

struct sample {
	int64_t shape[6], strides[6];
	struct ioshape_tensor tensor;
	size_t element_bytes, bytes;
	uint8_t *data, *expected;
};

/* Makes a random tensor: sliced, transposed, expanded, overlapping, or of single elements. */
static void make_sample(struct sample *sample, uint64_t *seed)
{
	int64_t step = 1, reach = 0, elements = 1;
	uint32_t dims = (uint32_t)test_random_below(seed, 7);

	sample->element_bytes = (size_t)1 << test_random_below(seed, 5);
	for (uint32_t i = dims; i-- > 0;) {
		uint64_t kind = test_random_below(seed, 8);

		sample->shape[i] = 1 + (int64_t)test_random_below(seed, 5);
		sample->strides[i] = step;
		if (kind == 0)
			sample->strides[i] = 0;
		else if (kind == 1)
			sample->strides[i] = (int64_t)test_random_below(seed, 9);
		else if (kind == 2)
			sample->strides[i] = step += (int64_t)test_random_below(seed, 3);
		step *= sample->shape[i];
	}
	for (uint32_t i = 0, other; i < dims; i++) {
		if (test_random_below(seed, 3))
			continue;
		other = (uint32_t)test_random_below(seed, dims);
		step = sample->strides[i];
		sample->strides[i] = sample->strides[other];
		sample->strides[other] = step;
	}
	for (uint32_t i = 0; i < dims; i++) {
		reach += (sample->shape[i] - 1) * sample->strides[i];
		elements *= sample->shape[i];
	}
	sample->bytes = (size_t)elements * sample->element_bytes;
	/* Exactly as long as the tensor reaches, so that sanitizers detect an access beyond. */
	sample->data = malloc((size_t)(reach + 1) * sample->element_bytes);
	sample->expected = malloc(sample->bytes);
	test_random_fill(seed, sample->data, (size_t)(reach + 1) * sample->element_bytes);
	sample->tensor = tensor_of(dims, sample->shape, sample->strides);
	sample->tensor.data = sample->data;
	pack_naively(&sample->tensor, sample->element_bytes, sample->expected);
}

static void free_sample(struct sample *sample)
{
	free(sample->data);
	free(sample->expected);
}

static struct test_case packing = { .name = "packing" };

TEST(packing, packing_equals_a_loop_over_elements_from_any_byte)
{
	uint64_t seed = 4;

	for (int round = 0; round < ROUNDS; round++) {
		struct sample sample;
		size_t begin, bytes;
		uint8_t *packed;

		make_sample(&sample, &seed);
		begin = round % 2 ? test_random_below(&seed, sample.bytes + 1) : 0;
		bytes = round % 2 ? test_random_below(&seed, sample.bytes - begin + 1) :
				    sample.bytes;
		packed = malloc(bytes + 1);
		packed[bytes] = 0x5a;
		format_pack(&sample.tensor, sample.element_bytes, begin, packed, bytes);
		ck_assert_mem_eq(packed, sample.expected + begin, bytes);
		ck_assert_uint_eq(packed[bytes], 0x5a);
		free(packed);
		free_sample(&sample);
	}
}

/*
 * Transposed matrices are copied in tiles instead of rows. The pieces begin and end anywhere in a
 * row.
 */
TEST(packing, parts_of_transposed_matrices_are_packed)
{
	uint64_t seed = 7;

	for (int round = 0; round < ROUNDS; round++) {
		size_t size = (size_t)1 << test_random_below(&seed, 5), bytes, piece;
		int64_t rows = 1 + (int64_t)test_random_below(&seed, 90);
		int64_t columns = 1 + (int64_t)test_random_below(&seed, 40);
		int64_t step = 1 + (int64_t)test_random_below(&seed, 3);
		int64_t apart = rows * step + (int64_t)test_random_below(&seed, 70);
		struct ioshape_tensor tensor =
			tensor_of(3, LIST(2, rows, columns), LIST(columns * apart, step, apart));
		uint8_t *data, *expected, *packed;

		bytes = (size_t)(2 * rows * columns) * size;
		data = malloc((size_t)(2 * columns * apart) * size);
		expected = malloc(bytes);
		packed = malloc(bytes);
		test_random_fill(&seed, data, (size_t)(2 * columns * apart) * size);
		tensor.data = data;
		pack_naively(&tensor, size, expected);
		for (size_t done = 0; done < bytes; done += piece) {
			piece = 1 + test_random_below(&seed, bytes);
			piece = MIN(piece, bytes - done);
			format_pack(&tensor, size, done, packed + done, piece);
		}
		ck_assert_mem_eq(packed, expected, bytes);
		free(packed);
		free(expected);
		free(data);
	}
}

TEST(packing, packing_without_strides_copies)
{
	struct ioshape_tensor tensor = tensor_of(2, LIST(8, 16), NULL);
	uint8_t packed[512];
	uint64_t seed = 5;

	test_random_fill(&seed, some_data, sizeof(some_data));
	format_pack(&tensor, 4, 0, packed, sizeof(packed));
	ck_assert_mem_eq(packed, some_data, sizeof(packed));
	format_pack(&tensor, 4, 5, packed, 100);
	ck_assert_mem_eq(packed, some_data + 5, 100);
	tensor = tensor_of(0, NULL, NULL);
	format_pack(&tensor, 4, 1, packed, 3);
	ck_assert_mem_eq(packed, some_data + 1, 3);
	tensor = tensor_of(1, LIST(0), NULL);
	format_pack(&tensor, 4, 0, NULL, 0);
}

/* The tensor repeats four elements 2^59 times. Walking to the offset would not end. */
TEST(packing, seeking_does_not_walk)
{
	static const uint32_t pair[2][2] = { { 1, 2 }, { 3, 4 } };
	const int64_t half = INT64_C(1) << 29;
	struct ioshape_tensor tensor = tensor_of(4, LIST(half, 2, half, 2), LIST(0, 2, 0, 1));
	uint32_t packed[4];

	tensor.data = pair;
	/*
	 * The last elements of the first half of dimension 1, and the first ones of the other half.
	 */
	format_pack(&tensor, 4, (uint64_t)half / 2 * 4 * 4 * half + (uint64_t)half * 2 * 4 - 8,
		    packed, 16);
	ck_assert_uint_eq(packed[0], 1);
	ck_assert_uint_eq(packed[1], 2);
	ck_assert_uint_eq(packed[2], 3);
	ck_assert_uint_eq(packed[3], 4);
}

int main(void)
{
	return check_run("zip/strides");
}
