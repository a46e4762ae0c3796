/* SPDX-License-Identifier: Apache-2.0 */
/* Tensors: their dtypes, and which of them are one dense block. Also the pickle that builds tensors
 * from records, and the header of a safetensors file. Pure. */
#define _GNU_SOURCE
#include "format/format.h"

#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <string.h>

/* ---- Dtypes ---------------------------------------------------------------------------------- */

/* bfloat16 is the last dtype for which torch has a typed storage. Tensors of later dtypes are in an
 * untyped storage, and their pickle names the dtype itself. */
static const struct format_dtype dtypes[] = {
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

const struct format_dtype *format_dtype_of(uint32_t dtype)
{
	if (dtype >= ARRAY_LENGTH(dtypes) || !dtypes[dtype].name)
		return NULL;
	return &dtypes[dtype];
}

IOSHAPE_EXPORT size_t ioshape_dtype_bytes(enum ioshape_dtype dtype)
{
	const struct format_dtype *known = format_dtype_of((uint32_t)dtype);

	return known ? known->bytes : 0;
}

/* ---- Layout ---------------------------------------------------------------------------------- */

/* Counts the elements. *span is their number if lengths of 0 were 1. As in torch, the strides of an
 * empty tensor are computed from it. Returns false if a length is negative or the product
 * overflows. */
static bool count_elements(uint32_t dims, const int64_t *shape, uint64_t *elements, int64_t *span)
{
	bool empty = false;

	*span = 1;
	for (uint32_t i = 0; i < dims; i++) {
		if (shape[i] < 0)
			return false;
		if (!shape[i])
			empty = true;
		else if (__builtin_mul_overflow(*span, shape[i], span))
			return false;
	}
	*elements = empty ? 0 : (uint64_t)*span;
	return true;
}

static void contiguous_strides(uint32_t dims, const int64_t *shape, int64_t *strides)
{
	int64_t step = 1; /* count_elements() has checked that this does not overflow */

	for (uint32_t i = dims; i-- > 0;) {
		strides[i] = step;
		step *= MAX(shape[i], 1);
	}
}

/*
 * Sorts the dimensions longer than 1 from the smallest stride to the largest. Returns their number.
 */
static uint32_t sort_dims(uint32_t dims, const int64_t *shape, const int64_t *strides,
			  uint32_t *order)
{
	uint32_t count = 0, at;

	/* Begins at the last dimension, which usually has the smallest stride, so that nothing
	 * needs to move. */
	for (uint32_t i = dims; i-- > 0;) {
		if (shape[i] <= 1)
			continue;
		for (at = count++; at > 0 && strides[order[at - 1]] > strides[i]; at--)
			order[at] = order[at - 1];
		order[at] = i;
	}
	return count;
}

/* Returns whether the strides visit each element of one dense block once. Dimensions of length 0
 * and 1 do not matter. */
static bool fills_block(uint32_t dims, const int64_t *shape, const int64_t *strides)
{
	uint32_t order[IOSHAPE_MAX_DIMS], count;
	int64_t step = 1;

	count = sort_dims(dims, shape, strides, order);
	for (uint32_t i = 0; i < count; i++) {
		if (strides[order[i]] != step)
			return false;
		step *= shape[order[i]];
	}
	return true;
}

bool format_strides_dense(uint32_t dims, const int64_t *shape, const int64_t *strides,
			  uint64_t *elements)
{
	int64_t span;

	if (dims > IOSHAPE_MAX_DIMS || !count_elements(dims, shape, elements, &span))
		return false;
	for (uint32_t i = 0; i < dims; i++) {
		if (strides[i] < 0 || strides[i] > span)
			return false;
	}
	return fills_block(dims, shape, strides);
}

static int check_shape(const struct ioshape_tensor *tensor, const struct format_dtype *dtype,
		       struct base_error *error)
{
	if (!dtype)
		return base_fail_reason(
			error, -EINVAL,
			"tensor \"%s\" has dtype %d, which is not in enum ioshape_dtype",
			FORMAT_SHOWN(tensor->name), (int)tensor->dtype);
	if (tensor->dims > IOSHAPE_MAX_DIMS)
		return base_fail_reason_with(error, IOSHAPE_E_LIMIT, "reshape it",
					     "tensor \"%s\" has %u dimensions, but torch allows %u",
					     FORMAT_SHOWN(tensor->name), tensor->dims,
					     IOSHAPE_MAX_DIMS);
	if (tensor->dims && !tensor->shape)
		return base_fail_reason(error, -EINVAL,
					"tensor \"%s\" has %u dimensions, but no shape",
					FORMAT_SHOWN(tensor->name), tensor->dims);
	for (uint32_t i = 0; i < tensor->dims; i++) {
		if (tensor->shape[i] < 0)
			return base_fail_reason(
				error, -EINVAL,
				"tensor \"%s\" has the negative length %lld in dimension %u",
				FORMAT_SHOWN(tensor->name), (long long)tensor->shape[i], i);
		if (tensor->strides && tensor->strides[i] < 0)
			return base_fail_reason_with(
				error, -EINVAL, "save a contiguous copy",
				"tensor \"%s\" has the negative stride %lld in dimension "
				"%u",
				FORMAT_SHOWN(tensor->name), (long long)tensor->strides[i], i);
	}
	return 0;
}

/* Copies the tensor's strides, except those above the element count. Such a stride belongs to a
 * dimension of length 0 or 1, where it does not matter. */
static void keep_strides(const struct ioshape_tensor *tensor, int64_t span, int64_t *strides)
{
	for (uint32_t i = 0; i < tensor->dims; i++) {
		if (tensor->strides[i] <= span)
			strides[i] = tensor->strides[i];
	}
}

int format_layout_tensor(const struct ioshape_tensor *tensor, struct format_layout *layout,
			 struct base_error *error)
{
	const struct format_dtype *dtype = format_dtype_of((uint32_t)tensor->dtype);
	uint64_t elements;
	int64_t span;
	int ret;

	ret = format_check_name("tensor", tensor->name, error);
	if (!ret)
		ret = check_shape(tensor, dtype, error);
	if (ret)
		return ret;

	if (!count_elements(tensor->dims, tensor->shape, &elements, &span) ||
	    span > INT64_MAX / dtype->bytes)
		return base_fail_reason(error, IOSHAPE_E_LIMIT,
					"the size of tensor \"%s\" does not fit into 63 bits",
					FORMAT_SHOWN(tensor->name));
	if (elements && !tensor->data)
		return base_fail_reason(error, -EINVAL,
					"tensor \"%s\" has %llu elements, but no data",
					FORMAT_SHOWN(tensor->name), (unsigned long long)elements);

	layout->bytes = elements * dtype->bytes;
	contiguous_strides(tensor->dims, tensor->shape, layout->strides);
	if (!tensor->strides)
		return 0;
	if (fills_block(tensor->dims, tensor->shape, tensor->strides))
		keep_strides(tensor, span, layout->strides);
	else if (elements)
		return base_fail_reason_with(error, -EINVAL, "save a contiguous copy",
					     "tensor \"%s\" has gaps or overlaps by its strides",
					     FORMAT_SHOWN(tensor->name));
	return 0;
}

/* ---- The pickle ------------------------------------------------------------------------------ */

/* The pickle that torch.load expects: protocol 2, with only the opcodes that torch's weights_only
 * unpickler supports. A tensor is written as torch writes it: a call of _rebuild_tensor_v2 on a
 * typed storage. Later dtypes use _rebuild_tensor_v3 on an untyped storage. */

/* Opcodes, named as in Python's pickletools. */
enum {
	PROTO = 0x80,
	EMPTY_DICT = '}',
	EMPTY_TUPLE = ')',
	MARK = '(',
	SETITEMS = 'u',
	TUPLE = 't',
	TUPLE1 = 0x85, /* TUPLE2 and TUPLE3 follow */
	BINUNICODE = 'X',
	BININT1 = 'K',
	BININT2 = 'M',
	BININT = 'J',
	LONG1 = 0x8a,
	NEWFALSE = 0x89,
	GLOBAL = 'c',
	BINPUT = 'q',
	BINGET = 'h',
	BINPERSID = 'Q',
	REDUCE = 'R',
	STOP = '.',
};

/* Items per SETITEMS, as in Python's pickle. It bounds the unpickler's stack. */
#define ITEMS_AT_ONCE 1000u

/*
 * Objects that all tensors share. They are written once and then fetched from the unpickler's memo.
 */
enum {
	MEMO_STORAGE,
	MEMO_CPU,
	MEMO_REBUILD_V2,
	MEMO_REBUILD_V3,
	MEMO_ORDERED_DICT,
	MEMO_UNTYPED_STORAGE,
	MEMO_DTYPE, /* + dtype: its typed storage, or otherwise the dtype itself */
};

#define MOST_DTYPES 58u /* `known` has a bit for each entry of the memo */

/* Upper bound of the bytes of one tensor, without its name and its dimensions. A dimension takes
 * two LONG1 of 64 bits. */
#define TENSOR_BYTES 1024u
#define DIM_BYTES (2u * 10u)

struct pickler {
	uint8_t *at;    /* end of the written bytes; space is reserved */
	uint64_t known; /* entries of the memo that are filled */
};

static void put_byte(struct pickler *pickler, unsigned byte)
{
	*pickler->at++ = (uint8_t)byte;
}

static void put_bytes(struct pickler *pickler, const void *bytes, size_t count)
{
	memcpy(pickler->at, bytes, count);
	pickler->at += count;
}

static void put_le(struct pickler *pickler, uint64_t value, unsigned bytes)
{
	base_put_le(pickler->at, value, bytes);
	pickler->at += bytes;
}

static void put_text(struct pickler *pickler, const char *text, size_t bytes)
{
	put_byte(pickler, BINUNICODE);
	put_le(pickler, bytes, 4);
	put_bytes(pickler, text, bytes);
}

/* Writes a number from 0 to 2^63 - 1. */
static void put_count(struct pickler *pickler, uint64_t value)
{
	if (value <= UINT8_MAX) {
		put_byte(pickler, BININT1);
		put_le(pickler, value, 1);
	} else if (value <= UINT16_MAX) {
		put_byte(pickler, BININT2);
		put_le(pickler, value, 2);
	} else if (value <= INT32_MAX) {
		put_byte(pickler, BININT);
		put_le(pickler, value, 4);
	} else {
		put_byte(pickler, LONG1);
		put_byte(pickler, 8);
		put_le(pickler, value, 8);
	}
}

static void put_counts(struct pickler *pickler, const int64_t *values, uint32_t count)
{
	if (!count) {
		put_byte(pickler, EMPTY_TUPLE);
		return;
	}
	if (count > 3)
		put_byte(pickler, MARK);
	for (uint32_t i = 0; i < count; i++)
		put_count(pickler, (uint64_t)values[i]);
	put_byte(pickler, count > 3 ? TUPLE : TUPLE1 + count - 1);
}

/* Fetches an object from the memo and returns true. If it returns false, the caller writes the
 * object and then calls remember(). */
static bool recall(struct pickler *pickler, unsigned number)
{
	if (!(pickler->known & (UINT64_C(1) << number)))
		return false;
	put_byte(pickler, BINGET);
	put_byte(pickler, number);
	return true;
}

static void remember(struct pickler *pickler, unsigned number)
{
	put_byte(pickler, BINPUT);
	put_byte(pickler, number);
	pickler->known |= UINT64_C(1) << number;
}

static void put_word(struct pickler *pickler, unsigned number, const char *word)
{
	if (recall(pickler, number))
		return;
	put_text(pickler, word, strlen(word));
	remember(pickler, number);
}

static void put_global(struct pickler *pickler, unsigned number, const char *module,
		       const char *name)
{
	if (recall(pickler, number))
		return;
	put_byte(pickler, GLOBAL);
	put_bytes(pickler, module, strlen(module));
	put_byte(pickler, '\n');
	put_bytes(pickler, name, strlen(name));
	put_byte(pickler, '\n');
	remember(pickler, number);
}

/*
 * Writes ('storage', class, key, 'cpu', count) as a persistent id. An untyped storage counts bytes.
 */
static void put_storage(struct pickler *pickler, const struct ioshape_tensor *tensor,
			const struct format_dtype *dtype, uint64_t bytes, size_t key)
{
	char digits[24];
	int length = snprintf(digits, sizeof(digits), "%zu", key);

	put_byte(pickler, MARK);
	put_word(pickler, MEMO_STORAGE, "storage");
	if (dtype->storage)
		put_global(pickler, MEMO_DTYPE + (unsigned)tensor->dtype, "torch", dtype->storage);
	else
		put_global(pickler, MEMO_UNTYPED_STORAGE, "torch.storage", "UntypedStorage");
	put_text(pickler, digits, (size_t)length);
	put_word(pickler, MEMO_CPU, "cpu");
	put_count(pickler, dtype->storage ? bytes / dtype->bytes : bytes);
	put_byte(pickler, TUPLE);
	put_byte(pickler, BINPERSID);
}

/* Writes rebuild(storage, offset, size, stride, requires_grad, hooks[, dtype]). */
static void put_tensor(struct pickler *pickler, const struct ioshape_tensor *tensor,
		       const struct format_layout *layout, size_t key)
{
	const struct format_dtype *dtype = format_dtype_of((uint32_t)tensor->dtype);

	put_text(pickler, tensor->name, strlen(tensor->name));
	if (dtype->storage)
		put_global(pickler, MEMO_REBUILD_V2, "torch._utils", "_rebuild_tensor_v2");
	else
		put_global(pickler, MEMO_REBUILD_V3, "torch._utils", "_rebuild_tensor_v3");
	put_byte(pickler, MARK);
	put_storage(pickler, tensor, dtype, layout->bytes, key);
	put_count(pickler, 0);
	put_counts(pickler, tensor->shape, tensor->dims);
	put_counts(pickler, layout->strides, tensor->dims);
	put_byte(pickler, NEWFALSE);
	/* Each tensor gets a dict of its own, so that hooks registered on one do not appear on
	 * another. */
	put_global(pickler, MEMO_ORDERED_DICT, "collections", "OrderedDict");
	put_byte(pickler, EMPTY_TUPLE);
	put_byte(pickler, REDUCE);
	if (!dtype->storage)
		put_global(pickler, MEMO_DTYPE + (unsigned)tensor->dtype, "torch", dtype->name);
	put_byte(pickler, TUPLE);
	put_byte(pickler, REDUCE);
}

int format_pickle_tensors(struct base_buffer *out, const struct ioshape_tensor *tensors,
			  const struct format_layout *layouts, size_t count)
{
	struct pickler pickler = { .known = 0 };
	const size_t begin = out->bytes;
	int ret;

	_Static_assert(IOSHAPE_FLOAT4_E2M1FN_X2 < MOST_DTYPES && MEMO_DTYPE + MOST_DTYPES <= 64,
		       "a dtype without a number in the memo");

	ret = base_buffer_reserve(out, TENSOR_BYTES);
	if (ret)
		return ret;
	pickler.at = out->data + out->bytes;
	put_byte(&pickler, PROTO);
	put_byte(&pickler, 2);
	put_byte(&pickler, EMPTY_DICT);

	for (size_t i = 0; i < count; i++) {
		out->bytes = (size_t)(pickler.at - out->data);
		ret = base_buffer_reserve(out, strlen(tensors[i].name) + TENSOR_BYTES +
						       tensors[i].dims * DIM_BYTES);
		if (ret)
			goto undo;
		pickler.at = out->data + out->bytes;
		if (i % ITEMS_AT_ONCE == 0)
			put_byte(&pickler, MARK);
		put_tensor(&pickler, &tensors[i], &layouts[i], i);
		if ((i + 1) % ITEMS_AT_ONCE == 0 || i + 1 == count)
			put_byte(&pickler, SETITEMS);
	}
	put_byte(&pickler, STOP);
	out->bytes = (size_t)(pickler.at - out->data);
	return 0;
undo:
	out->bytes = begin;
	return ret;
}

/* ---- Safetensors ----------------------------------------------------------------------------- */

#define METADATA_NAME "__metadata__"
#define LENGTH_BYTES 8u
#define HEADER_ALIGNMENT 8u

/* The format's names of dtypes and their order: larger elements first, so that all are aligned. The
 * order of dtypes of equal size is that of the safetensors library. */
static const struct {
	const char *name;
	uint8_t position; /* position, counted from the end of the file */
} safetensors_dtypes[] = {
	[IOSHAPE_BOOL] = { "BOOL", 0 },
	[IOSHAPE_FLOAT4_E2M1FN_X2] = { "F4", 1 },
	[IOSHAPE_UINT8] = { "U8", 2 },
	[IOSHAPE_INT8] = { "I8", 3 },
	[IOSHAPE_FLOAT8_E5M2] = { "F8_E5M2", 4 },
	[IOSHAPE_FLOAT8_E4M3FN] = { "F8_E4M3", 5 },
	[IOSHAPE_FLOAT8_E8M0FNU] = { "F8_E8M0", 6 },
	[IOSHAPE_FLOAT8_E4M3FNUZ] = { "F8_E4M3FNUZ", 7 },
	[IOSHAPE_FLOAT8_E5M2FNUZ] = { "F8_E5M2FNUZ", 8 },
	[IOSHAPE_INT16] = { "I16", 9 },
	[IOSHAPE_UINT16] = { "U16", 10 },
	[IOSHAPE_FLOAT16] = { "F16", 11 },
	[IOSHAPE_BFLOAT16] = { "BF16", 12 },
	[IOSHAPE_INT32] = { "I32", 13 },
	[IOSHAPE_UINT32] = { "U32", 14 },
	[IOSHAPE_FLOAT32] = { "F32", 15 },
	[IOSHAPE_COMPLEX64] = { "C64", 16 },
	[IOSHAPE_FLOAT64] = { "F64", 17 },
	[IOSHAPE_INT64] = { "I64", 18 },
	[IOSHAPE_UINT64] = { "U64", 19 },
};

/* Refuses strides other than those of a contiguous tensor. `strides` are the ones that the tensor
 * would keep in a torch file. */
static int check_row_major(const struct ioshape_tensor *tensor, const int64_t *strides,
			   struct base_error *error)
{
	int64_t step = 1;

	for (uint32_t i = tensor->dims; i-- > 0; step *= MAX(tensor->shape[i], 1)) {
		if (tensor->shape[i] > 1 && strides[i] != step)
			return base_fail_reason_with(
				error, -EINVAL, "save a contiguous copy",
				"tensor \"%s\" is not contiguous, as safetensors files need",
				FORMAT_SHOWN(tensor->name));
	}
	return 0;
}

static int check_tensor(const struct ioshape_tensor *tensor, struct base_error *error)
{
	const uint32_t dtype = (uint32_t)tensor->dtype;

	if (dtype >= ARRAY_LENGTH(safetensors_dtypes) || !safetensors_dtypes[dtype].name)
		return base_fail_reason_with(
			error, -EINVAL, "convert it, or save a torch file",
			"tensor \"%s\" has the dtype %s, which safetensors files cannot "
			"hold",
			FORMAT_SHOWN(tensor->name), format_dtype_of(dtype)->name);
	if (tensor->dtype == IOSHAPE_FLOAT4_E2M1FN_X2 && !tensor->dims)
		return base_fail_reason_with(error, -EINVAL, "give it a dimension",
					     "tensor \"%s\" has no dimension and packs two values, "
					     "which safetensors files cannot hold",
					     FORMAT_SHOWN(tensor->name));
	if (!strcmp(tensor->name, METADATA_NAME))
		return base_fail_reason_with(error, -EINVAL, "rename it",
					     "a tensor is named \"" METADATA_NAME
					     "\", which safetensors files reserve");
	return 0;
}

int format_layout_safetensors(const struct ioshape_tensor *tensor, struct format_layout *layout,
			      struct base_error *error)
{
	int ret = format_layout_tensor(tensor, layout, error);

	if (!ret && layout->bytes)
		ret = check_row_major(tensor, layout->strides, error);
	return ret ? ret : check_tensor(tensor, error);
}

int format_safetensors_compare(const struct ioshape_tensor *one, const struct ioshape_tensor *other)
{
	int order =
		safetensors_dtypes[other->dtype].position - safetensors_dtypes[one->dtype].position;

	return order ? order : strcmp(one->name, other->name);
}

/* ---- Header of a safetensors file ------------------------------------------------------------ */

static int put_metadata(struct base_buffer *out, const struct ioshape_metadata *metadata)
{
	int ret = format_json_put(out, "\"" METADATA_NAME "\":{");

	for (size_t i = 0; !ret && i < metadata->attribute_count; i++) {
		ret = format_json_put(out, i ? "," : "");
		if (!ret)
			ret = format_json_put_string(out, metadata->attributes[i].name);
		if (!ret)
			ret = format_json_put(out, ":");
		if (!ret)
			ret = format_json_put_string(out, metadata->attributes[i].value);
	}
	return ret ? ret : format_json_put(out, "}");
}

/* Returns the length of a dimension in the file. The file counts values, while torch counts bytes
 * of two values. */
static uint64_t length_in_file(const struct ioshape_tensor *tensor, uint32_t dim)
{
	const bool halves = tensor->dtype == IOSHAPE_FLOAT4_E2M1FN_X2 && dim + 1 == tensor->dims;

	return (uint64_t)tensor->shape[dim] << halves;
}

static int put_header_of(struct base_buffer *out, const struct ioshape_tensor *tensor,
			 uint64_t *offset)
{
	uint64_t bytes = ioshape_dtype_bytes(tensor->dtype);
	int ret;

	ret = format_json_put_string(out, tensor->name);
	if (!ret)
		ret = format_json_put(out, ":{\"dtype\":\"%s\",\"shape\":[",
				      safetensors_dtypes[tensor->dtype].name);
	for (uint32_t i = 0; !ret && i < tensor->dims; i++) {
		bytes *= (uint64_t)tensor->shape[i];
		ret = format_json_put(out, "%s%" PRIu64, i ? "," : "", length_in_file(tensor, i));
	}
	if (!ret)
		ret = format_json_put(out, "],\"data_offsets\":[%" PRIu64 ",%" PRIu64 "]}", *offset,
				      *offset + bytes);
	*offset += bytes;
	return ret;
}

static int put_json(struct base_buffer *out, const struct ioshape_tensor *tensors, size_t count,
		    const struct ioshape_metadata *metadata)
{
	uint64_t offset = 0;
	int ret = format_json_put(out, "{");

	if (!ret && metadata)
		ret = put_metadata(out, metadata);
	for (size_t i = 0; !ret && i < count; i++) {
		if (i || metadata)
			ret = format_json_put(out, ",");
		if (!ret)
			ret = put_header_of(out, &tensors[i], &offset);
	}
	if (!ret)
		ret = format_json_put(out, "}");
	while (!ret && out->bytes % HEADER_ALIGNMENT)
		ret = format_json_put(out, " ");
	return ret;
}

int format_safetensors_header(struct base_buffer *out, const struct ioshape_tensor *tensors,
			      size_t count, const struct ioshape_metadata *metadata,
			      struct base_error *error)
{
	static const uint8_t length[LENGTH_BYTES];
	int ret;

	if (metadata && (metadata->step || metadata->blob_bytes))
		return base_fail_reason_with(
			error, -EINVAL, "write them as attributes",
			"safetensors files hold attributes, but neither a step nor a blob");
	ret = base_buffer_append(out, length, sizeof(length));
	if (!ret)
		ret = put_json(out, tensors, count, metadata);
	if (ret)
		return base_no_memory(error, "the header", count * 128);
	if (out->bytes - LENGTH_BYTES > FORMAT_SAFETENSORS_MAX_HEADER_BYTES)
		return base_fail_reason_with(
			error, IOSHAPE_E_LIMIT, "save fewer in one file",
			"the names and shapes of %zu tensors and the metadata take %s, "
			"more than readers of safetensors accept",
			count, BASE_SIZE(out->bytes));
	base_put_le(out->data, out->bytes - LENGTH_BYTES, LENGTH_BYTES);
	return 0;
}
