/* SPDX-License-Identifier: Apache-2.0 */
#include "support/check_main.h"
#include "zip/zip.h"

START_TEST(every_dtype_has_a_name_and_a_size)
{
	for (int dtype = IOSHAPE_UINT8; dtype <= IOSHAPE_FLOAT4_E2M1FN_X2; dtype++) {
		ck_assert_ptr_nonnull(zip_dtype_of(dtype)->name);
		ck_assert_uint_gt(ioshape_dtype_bytes(dtype), 0);
	}
	ck_assert_str_eq(zip_dtype_of(IOSHAPE_BFLOAT16)->name, "bfloat16");
	ck_assert_str_eq(zip_dtype_of(IOSHAPE_FLOAT4_E2M1FN_X2)->name, "float4_e2m1fn_x2");
	ck_assert_uint_eq(ioshape_dtype_bytes(IOSHAPE_BOOL), 1);
	ck_assert_uint_eq(ioshape_dtype_bytes(IOSHAPE_COMPLEX32), 4);
	ck_assert_uint_eq(ioshape_dtype_bytes(IOSHAPE_COMPLEX128), 16);
}
END_TEST

START_TEST(what_is_no_dtype_has_neither)
{
	static const int wrong[] = {
		0, -1, IOSHAPE_FLOAT4_E2M1FN_X2 + 1, 1000, INT32_MAX, INT32_MIN
	};

	for (size_t i = 0; i < ARRAY_LENGTH(wrong); i++) {
		ck_assert_uint_eq(ioshape_dtype_bytes((enum ioshape_dtype)wrong[i]), 0);
		ck_assert_ptr_null(zip_dtype_of(wrong[i]));
		ck_assert_ptr_null(zip_dtype_of((uint32_t)wrong[i]));
	}
}
END_TEST

/* Files hold the numbers: a value that moved would make old files lie. */
START_TEST(the_numbers_in_files_never_change)
{
	static const char *const names[] = {
		[1] = "uint8",
		[2] = "int8",
		[3] = "int16",
		[4] = "int32",
		[5] = "int64",
		[6] = "float16",
		[7] = "float32",
		[8] = "float64",
		[9] = "complex32",
		[10] = "complex64",
		[11] = "complex128",
		[12] = "bool",
		[13] = "bfloat16",
		[14] = "uint16",
		[15] = "uint32",
		[16] = "uint64",
		[17] = "float8_e4m3fn",
		[18] = "float8_e5m2",
		[19] = "float8_e4m3fnuz",
		[20] = "float8_e5m2fnuz",
		[21] = "float8_e8m0fnu",
		[22] = "float4_e2m1fn_x2",
	};

	for (uint32_t i = 1; i < ARRAY_LENGTH(names); i++)
		ck_assert_str_eq(zip_dtype_of(i)->name, names[i]);
}
END_TEST

int main(void)
{
	Suite *suite = suite_create("zip/dtype");
	TCase *tests = tcase_create("dtypes");

	tcase_add_test(tests, every_dtype_has_a_name_and_a_size);
	tcase_add_test(tests, what_is_no_dtype_has_neither);
	tcase_add_test(tests, the_numbers_in_files_never_change);
	suite_add_tcase(suite, tests);
	return check_main(suite);
}
