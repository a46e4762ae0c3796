/* SPDX-License-Identifier: Apache-2.0 */
#include "format/format.h"

#include <errno.h>
#include <inttypes.h>
#include <string.h>

#define METADATA_NAME "__metadata__"
#define LENGTH_BYTES 8u
#define ALIGNMENT 8u

/*
 * The format's names of dtypes, and their order: larger elements first, so that all lie aligned.
 * Which of two equally large ones is the first was the original library's choice.
 */
static const struct {
	const char *name;
	uint8_t place; /* from the end of the file */
} dtypes[] = {
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

int format_safetensors_check(const struct ioshape_tensor *tensor, struct base_error *error)
{
	const uint32_t dtype = (uint32_t)tensor->dtype;

	if (dtype >= ARRAY_LENGTH(dtypes) || !dtypes[dtype].name)
		return base_refuse_with(
			error, -EINVAL, "convert it, or save a torch file",
			"tensor \"%s\" has the dtype %s, which safetensors files cannot "
			"hold",
			FORMAT_SHOWN(tensor->name), format_dtype_of(dtype)->name);
	if (tensor->dtype == IOSHAPE_FLOAT4_E2M1FN_X2 && !tensor->dims)
		return base_refuse_with(
			error, -EINVAL, "give it a dimension",
			"tensor \"%s\" is one byte of two values, for which safetensors "
			"files have no shape",
			FORMAT_SHOWN(tensor->name));
	if (!strcmp(tensor->name, METADATA_NAME))
		return base_refuse_with(error, -EINVAL, "rename it",
					"a tensor is called \"" METADATA_NAME
					"\", which safetensors files use otherwise");
	return 0;
}

int format_safetensors_compare(const struct ioshape_tensor *one, const struct ioshape_tensor *other)
{
	int order = dtypes[other->dtype].place - dtypes[one->dtype].place;

	return order ? order : strcmp(one->name, other->name);
}

/* ---- The header ------------------------------------------------------------------------------ */

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

/* What the file calls the shape: it counts values, where torch counts bytes of two. */
static uint64_t length_in_file(const struct ioshape_tensor *tensor, uint32_t dim)
{
	const bool halves = tensor->dtype == IOSHAPE_FLOAT4_E2M1FN_X2 && dim + 1 == tensor->dims;

	return (uint64_t)tensor->shape[dim] << halves;
}

static int put_tensor(struct base_buffer *out, const struct ioshape_tensor *tensor,
		      uint64_t *offset)
{
	uint64_t bytes = ioshape_dtype_bytes(tensor->dtype);
	int ret;

	ret = format_json_put_string(out, tensor->name);
	if (!ret)
		ret = format_json_put(out, ":{\"dtype\":\"%s\",\"shape\":[",
				      dtypes[tensor->dtype].name);
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
			ret = put_tensor(out, &tensors[i], &offset);
	}
	if (!ret)
		ret = format_json_put(out, "}");
	while (!ret && out->bytes % ALIGNMENT)
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
		return base_refuse_with(
			error, -EINVAL, "write them as attributes",
			"safetensors files hold attributes, and neither a step nor a "
			"blob");
	ret = base_buffer_append(out, length, sizeof(length));
	if (!ret)
		ret = put_json(out, tensors, count, metadata);
	if (ret)
		return base_no_memory(error, "the header", count * 128);
	if (out->bytes - LENGTH_BYTES > FORMAT_SAFETENSORS_MAX_HEADER_BYTES)
		return base_refuse_with(
			error, IOSHAPE_E_LIMIT, "save fewer in one file",
			"the names and shapes of %zu tensors and the metadata take %s, "
			"more than readers of safetensors accept",
			count, BASE_SIZE(out->bytes));
	base_put_le(out->data, out->bytes - LENGTH_BYTES, LENGTH_BYTES);
	return 0;
}
