/* SPDX-License-Identifier: Apache-2.0 */
#include "format/format.h"
#include "support/check_main.h"

static struct test_case tests = { .name = "dtypes" };

TEST(tests, what_is_no_dtype_has_neither)
{
	static const int wrong[] = {
		0, -1, IOSHAPE_FLOAT4_E2M1FN_X2 + 1, 1000, INT32_MAX, INT32_MIN
	};

	for (size_t i = 0; i < ARRAY_LENGTH(wrong); i++) {
		ck_assert_uint_eq(ioshape_dtype_bytes((enum ioshape_dtype)wrong[i]), 0);
		ck_assert_ptr_null(format_dtype_of(wrong[i]));
		ck_assert_ptr_null(format_dtype_of((uint32_t)wrong[i]));
	}
}

/* Files contain these numbers, so they must never change. */
TEST(tests, the_numbers_in_files_never_change)
{
	static const struct {
		const char *name;
		size_t bytes;
	} dtypes[] = {
		[1] = { "uint8", 1 },
		[2] = { "int8", 1 },
		[3] = { "int16", 2 },
		[4] = { "int32", 4 },
		[5] = { "int64", 8 },
		[6] = { "float16", 2 },
		[7] = { "float32", 4 },
		[8] = { "float64", 8 },
		[9] = { "complex32", 4 },
		[10] = { "complex64", 8 },
		[11] = { "complex128", 16 },
		[12] = { "bool", 1 },
		[13] = { "bfloat16", 2 },
		[14] = { "uint16", 2 },
		[15] = { "uint32", 4 },
		[16] = { "uint64", 8 },
		[17] = { "float8_e4m3fn", 1 },
		[18] = { "float8_e5m2", 1 },
		[19] = { "float8_e4m3fnuz", 1 },
		[20] = { "float8_e5m2fnuz", 1 },
		[21] = { "float8_e8m0fnu", 1 },
		[22] = { "float4_e2m1fn_x2", 1 },
	};

	for (uint32_t i = 1; i < ARRAY_LENGTH(dtypes); i++) {
		ck_assert_str_eq(format_dtype_of(i)->name, dtypes[i].name);
		ck_assert_uint_eq(ioshape_dtype_bytes((enum ioshape_dtype)i), dtypes[i].bytes);
	}
}
