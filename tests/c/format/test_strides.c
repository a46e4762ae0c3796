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

static void expect_layout(const struct ioshape_tensor *tensor, uint64_t bytes,
			  const int64_t *strides)
{
	int64_t saved[IOSHAPE_MAX_DIMS];
	struct format_layout layout = { .strides = saved };
	struct base_error error = { 0 };

	ck_assert_msg(!format_layout_tensor(tensor, &layout, &error), "%s", error.text);
	ck_assert_uint_eq(layout.bytes, bytes);
	for (uint32_t i = 0; i < tensor->dims; i++)
		ck_assert_int_eq(saved[i], strides[i]);
}

static struct test_case layout_case = { .name = "layout" };

TEST(layout_case, dense_tensors_keep_their_strides)
{
	const struct {
		struct ioshape_tensor tensor;
		uint64_t bytes;
		const int64_t *strides; /* strides in the file */
	} cases[] = {
		{ tensor_of(0, NULL, NULL), 4, NULL },
		{ tensor_of(3, LIST(2, 3, 4), NULL), 96, LIST(12, 4, 1) },
		{ tensor_of(3, LIST(2, 3, 4), LIST(12, 4, 1)), 96, LIST(12, 4, 1) },
		/* Transposed; channels last. */
		{ tensor_of(2, LIST(3, 5), LIST(1, 3)), 60, LIST(1, 3) },
		{ tensor_of(4, LIST(2, 3, 4, 5), LIST(60, 1, 15, 3)), 480, LIST(60, 1, 15, 3) },
		/*
		 * In a channels_last batch of one, torch uses the stride of the batch dimension.
		 * Absurd strides are replaced.
		 */
		{ tensor_of(4, LIST(1, 3, 4, 5), LIST(60, 1, 15, 3)), 240, LIST(60, 1, 15, 3) },
		{ tensor_of(3, LIST(1, 3, 4), LIST(INT64_MAX, 4, 1)), 48, LIST(12, 4, 1) },
		{ tensor_of(2, LIST(3, 1), LIST(1, 0)), 12, LIST(1, 0) },
		{ tensor_of(2, LIST(1, 1), LIST(INT64_MAX, INT64_MAX)), 4, LIST(1, 1) },
		/* Empty tensors, as in torch: a size of 0 counts as 1. */
		{ tensor_of(3, LIST(3, 0, 4), NULL), 0, LIST(4, 4, 1) },
		{ tensor_of(2, LIST(0, 3), NULL), 0, LIST(3, 1) },
		{ tensor_of(2, LIST(3, 0), LIST(1, 3)), 0, LIST(1, 3) },
		{ tensor_of(2, LIST(3, 0), LIST(INT64_MAX, INT64_MAX)), 0, LIST(1, 1) },
		{ tensor_of(2, LIST(0, INT64_MAX / 4), NULL), 0, LIST(INT64_MAX / 4, 1) },
		{ { "w", IOSHAPE_INT8, 1, LIST(0), NULL, NULL }, 0, LIST(1) },
	};

	for (size_t i = 0; i < ARRAY_LENGTH(cases); i++)
		expect_layout(&cases[i].tensor, cases[i].bytes, cases[i].strides);
}

TEST(layout_case, what_the_layout_calls_dense_is_dense_for_the_reader)
{
	uint64_t seed = 2;
	unsigned accepted = 0;

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
		if (format_layout_tensor(&tensor, &layout, NULL))
			continue;
		ck_assert(format_strides_dense(dims, shape, saved, &elements));
		ck_assert_uint_eq(elements * 4, layout.bytes);
		accepted++;
	}
	ck_assert_uint_gt(accepted, ROUNDS / 20);
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
		/* Overflows of the number of bytes, then offsets far away. */
		{ tensor_of(2, LIST(INT64_MAX, 2), NULL), IOSHAPE_E_LIMIT },
		{ tensor_of(1, LIST(INT64_MAX / 4 + 1), NULL), IOSHAPE_E_LIMIT },
		{ tensor_of(3, LIST(INT64_MAX, 2, 0), NULL), IOSHAPE_E_LIMIT },
		{ tensor_of(2, LIST(2, 2), LIST(INT64_MAX, 1)), -EINVAL },
		{ tensor_of(2, LIST(3, 2), LIST(INT64_MAX / 2 + 1, 1)), -EINVAL },
		{ tensor_of(1, LIST(2), LIST(INT64_MAX / 4)), -EINVAL },
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
