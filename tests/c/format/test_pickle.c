/* SPDX-License-Identifier: Apache-2.0 */
/* The bounds of data.pkl. tests/python/formats/test_pickle.py checks what torch reads from it. */
#define _GNU_SOURCE
#include "format/format.h"
#include "support/check_main.h"
#include "support/fail_memory.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static struct base_buffer pickle_of(const struct ioshape_tensor *tensors, size_t count)
{
	struct format_layout *layouts = calloc(count + 1, sizeof(*layouts));
	struct base_buffer out = { 0 };

	for (size_t i = 0; i < count; i++) {
		layouts[i].strides = calloc(tensors[i].dims + 1, sizeof(int64_t));
		REQUIRE(!format_layout_tensor(&tensors[i], &layouts[i], NULL));
	}
	ck_assert_int_eq(format_pickle_tensors(&out, tensors, layouts, count), 0);
	for (size_t i = 0; i < count; i++)
		free(layouts[i].strides);
	free(layouts);
	return out;
}

static struct test_case tests_case = { .name = "pickle" };

static struct ioshape_tensor *many_tensors(size_t count, char (*names)[48])
{
	static const int64_t shape[4] = { 2, 1, 70000, 3 };
	static const char data[1];
	struct ioshape_tensor *tensors = calloc(count, sizeof(*tensors));

	for (size_t i = 0; i < count; i++) {
		snprintf(names[i], sizeof(names[i]), "layers.%zu.weight", i);
		tensors[i] = (struct ioshape_tensor){
			.name = names[i],
			.dtype = (enum ioshape_dtype)(1 + i % IOSHAPE_FLOAT4_E2M1FN_X2),
			.dims = (uint32_t)(i % 5),
			.shape = shape,
			.data = data,
		};
	}
	return tensors;
}

TEST(tests_case, without_memory_nothing_is_appended)
{
	char(*names)[48] = calloc(300, sizeof(*names));
	struct ioshape_tensor *tensors = many_tensors(300, names);
	struct format_layout *layouts = calloc(300, sizeof(*layouts));
	struct base_buffer out = { 0 };
	int64_t strides[4];
	unsigned long nth;
	int ret = -ENOMEM;

	for (size_t i = 0; i < 300; i++) {
		layouts[i].strides = strides;
		REQUIRE(!format_layout_tensor(&tensors[i], &layouts[i], NULL));
	}
	base_buffer_append(&out, "before", 6);
	for (nth = 1; ret; nth++) {
		fail_memory_at(nth);
		ret = format_pickle_tensors(&out, tensors, layouts, 300);
		fail_memory_at(0);
		ck_assert(ret == 0 || ret == -ENOMEM);
		if (ret)
			ck_assert_uint_eq(out.bytes, 6);
	}
	ck_assert_uint_gt(nth, 3);
	ck_assert_mem_eq(out.data, "before", 6);
	ck_assert_int_eq(out.data[out.bytes - 1], '.');
	base_buffer_free(&out);
	free(layouts);
	free(tensors);
	free(names);
}

TEST(tests_case, the_longest_names_and_most_dimensions_fit)
{
	int64_t shape[IOSHAPE_MAX_DIMS];
	char name[IOSHAPE_MAX_NAME_BYTES + 1];
	struct ioshape_tensor tensors[64];
	struct base_buffer out;

	memset(name, 'n', sizeof(name) - 1);
	name[sizeof(name) - 1] = '\0';
	for (size_t i = 0; i < IOSHAPE_MAX_DIMS; i++)
		shape[i] = 0;
	shape[63] = INT64_MAX / 16; /* widest strides and numbers */
	for (size_t i = 0; i < ARRAY_LENGTH(tensors); i++)
		tensors[i] = (struct ioshape_tensor){
			name, (enum ioshape_dtype)(1 + i % 22), IOSHAPE_MAX_DIMS, shape, NULL, NULL,
		};
	out = pickle_of(tensors, ARRAY_LENGTH(tensors));
	ck_assert_int_eq(out.data[out.bytes - 1], '.');
	base_buffer_free(&out);
}
