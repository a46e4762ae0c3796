/* SPDX-License-Identifier: Apache-2.0 */
/* Headers of safetensors files: contents, limits, and failing allocations. */
/* Included, because it tests static functions. */
#include "format/tensors.c"
#include "support/check_main.h"
#include "support/fail_memory.h"

#include <errno.h>
#include <string.h>

static struct test_case tests = { .name = "safetensors" };

static int64_t shape[] = { 3, 2 };
static struct ioshape_tensor tensors[] = {
	{ .name = "\"a\"", .dtype = IOSHAPE_FLOAT32, .dims = 2, .shape = shape },
	{ .name = "b", .dtype = IOSHAPE_FLOAT4_E2M1FN_X2, .dims = 2, .shape = shape },
	{ .name = "c", .dtype = IOSHAPE_BOOL },
};
static struct ioshape_attribute attributes[] = { { "format", "pt" }, { "epoch", "3" } };
static struct base_error error;

static struct ioshape_metadata metadata_of(size_t count)
{
	struct ioshape_metadata metadata = IOSHAPE_METADATA_INIT;

	metadata.attributes = attributes;
	metadata.attribute_count = count;
	return metadata;
}

static const char with_metadata[] =
	"{\"__metadata__\":{\"format\":\"pt\",\"epoch\":\"3\"},"
	"\"\\\"a\\\"\":{\"dtype\":\"F32\",\"shape\":[3,2],\"data_offsets\":[0,24]},"
	"\"b\":{\"dtype\":\"F4\",\"shape\":[3,4],\"data_offsets\":[24,30]},"
	"\"c\":{\"dtype\":\"BOOL\",\"shape\":[],\"data_offsets\":[30,31]}}";

static void must_be(const struct base_buffer *header, const char *json)
{
	const size_t bytes = strlen(json);

	ck_assert_uint_eq(header->bytes % 8, 0);
	ck_assert_uint_lt(header->bytes - 8 - bytes, 8);
	ck_assert_uint_eq(base_get_le(header->data, 8), header->bytes - 8);
	ck_assert_mem_eq(header->data + 8, json, bytes);
	for (size_t i = 8 + bytes; i < header->bytes; i++)
		ck_assert_int_eq(header->data[i], ' ');
}

TEST(tests, a_header_says_where_each_tensor_lies)
{
	const struct ioshape_metadata metadata = metadata_of(2), none = metadata_of(0);
	struct base_buffer header = { 0 };

	ck_assert_int_eq(format_safetensors_header(&header, tensors, 3, &metadata, &error), 0);
	must_be(&header, with_metadata);
	base_buffer_free(&header);
	ck_assert_int_eq(format_safetensors_header(&header, tensors, 0, &none, &error), 0);
	must_be(&header, "{\"__metadata__\":{}}");
	base_buffer_free(&header);
	ck_assert_int_eq(format_safetensors_header(&header, tensors + 2, 1, NULL, &error), 0);
	must_be(&header, "{\"c\":{\"dtype\":\"BOOL\",\"shape\":[],\"data_offsets\":[0,1]}}");
	base_buffer_free(&header);
}

TEST(tests, larger_elements_come_first_then_names_decide)
{
	const struct ioshape_tensor other = { .name = "d", .dtype = IOSHAPE_BOOL };

	ck_assert_int_lt(format_safetensors_compare(&tensors[0], &tensors[1]), 0);
	ck_assert_int_gt(format_safetensors_compare(&tensors[2], &tensors[1]), 0);
	ck_assert_int_lt(format_safetensors_compare(&tensors[2], &other), 0);
}

TEST(tests, what_has_no_place_in_them_is_refused)
{
	struct ioshape_metadata step = metadata_of(0), blob = metadata_of(0);
	struct ioshape_tensor odd = tensors[1];
	struct base_buffer header = { 0 };

	step.step = 7;
	blob.blob = "x";
	blob.blob_bytes = 1;
	ck_assert_int_eq(format_safetensors_header(&header, tensors, 3, &step, &error), -EINVAL);
	ck_assert_int_eq(format_safetensors_header(&header, tensors, 3, &blob, &error), -EINVAL);
	ck_assert_int_eq(check_tensor(&odd, &error), 0);
	odd.dims = 0;
	ck_assert_int_eq(check_tensor(&odd, &error), -EINVAL);
	odd.dtype = IOSHAPE_COMPLEX128;
	ck_assert_int_eq(check_tensor(&odd, &error), -EINVAL);
	odd.dtype = IOSHAPE_BOOL;
	odd.name = "__metadata__";
	ck_assert_int_eq(check_tensor(&odd, &error), -EINVAL);
	odd.name = "__metadata";
	ck_assert_int_eq(check_tensor(&odd, &error), 0);
}

/* Bytes that are already in the buffer shift the positions at which it has to grow. */
TEST(tests, a_header_without_memory_is_none)
{
	const struct ioshape_metadata metadata = metadata_of(2);
	struct base_buffer header = { 0 };
	unsigned failures = 0;
	int ret;

	for (size_t before = 0; before < 1024; before++) {
		for (unsigned long nth = 1; nth < 4; nth++) {
			ck_assert_int_eq(base_buffer_reserve(&header, before + 1), 0);
			header.bytes = before;
			fail_memory_at(nth);
			ret = format_safetensors_header(&header, tensors, 3, &metadata, &error);
			fail_memory_at(0);
			ck_assert(!ret || ret == -ENOMEM);
			failures += ret != 0;
			base_buffer_free(&header);
		}
	}
	ck_assert_uint_gt(failures, 1024);
}
