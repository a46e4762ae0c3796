/* SPDX-License-Identifier: Apache-2.0 */
#include "zip/zip.h"

/*
 * Torch stopped adding typed storages at bfloat16. Tensors of later dtypes lie in an untyped
 * storage, and their pickle names the dtype itself.
 */
static const struct zip_dtype dtypes[] = {
	[IOSHAPE_UINT8] = { "uint8", "ByteStorage", 1 },
	[IOSHAPE_INT8] = { "int8", "CharStorage", 1 },
	[IOSHAPE_INT16] = { "int16", "ShortStorage", 2 },
	[IOSHAPE_INT32] = { "int32", "IntStorage", 4 },
	[IOSHAPE_INT64] = { "int64", "LongStorage", 8 },
	[IOSHAPE_FLOAT16] = { "float16", "HalfStorage", 2 },
	[IOSHAPE_FLOAT32] = { "float32", "FloatStorage", 4 },
	[IOSHAPE_FLOAT64] = { "float64", "DoubleStorage", 8 },
	[IOSHAPE_COMPLEX32] = { "complex32", NULL, 4 },
	[IOSHAPE_COMPLEX64] = { "complex64", "ComplexFloatStorage", 8 },
	[IOSHAPE_COMPLEX128] = { "complex128", "ComplexDoubleStorage", 16 },
	[IOSHAPE_BOOL] = { "bool", "BoolStorage", 1 },
	[IOSHAPE_BFLOAT16] = { "bfloat16", "BFloat16Storage", 2 },
	[IOSHAPE_UINT16] = { "uint16", NULL, 2 },
	[IOSHAPE_UINT32] = { "uint32", NULL, 4 },
	[IOSHAPE_UINT64] = { "uint64", NULL, 8 },
	[IOSHAPE_FLOAT8_E4M3FN] = { "float8_e4m3fn", NULL, 1 },
	[IOSHAPE_FLOAT8_E5M2] = { "float8_e5m2", NULL, 1 },
	[IOSHAPE_FLOAT8_E4M3FNUZ] = { "float8_e4m3fnuz", NULL, 1 },
	[IOSHAPE_FLOAT8_E5M2FNUZ] = { "float8_e5m2fnuz", NULL, 1 },
	[IOSHAPE_FLOAT8_E8M0FNU] = { "float8_e8m0fnu", NULL, 1 },
	[IOSHAPE_FLOAT4_E2M1FN_X2] = { "float4_e2m1fn_x2", NULL, 1 },
};

const struct zip_dtype *zip_dtype_of(uint32_t dtype)
{
	if (dtype >= ARRAY_LENGTH(dtypes) || !dtypes[dtype].name)
		return NULL;
	return &dtypes[dtype];
}

IOSHAPE_EXPORT size_t ioshape_dtype_bytes(enum ioshape_dtype dtype)
{
	const struct zip_dtype *known = zip_dtype_of((uint32_t)dtype);

	return known ? known->bytes : 0;
}
