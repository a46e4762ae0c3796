/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Encodes the index record, and checks the limits of the metadata in it.
 */
#define _GNU_SOURCE
#include "zip/index.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

/* ---- Metadata -------------------------------------------------------------------------------- */

/* Adds the lengths of name and value to *bytes. */
static int check_attribute(const struct ioshape_attribute *attribute, uint64_t *bytes,
			   struct base_error *error)
{
	size_t value_bytes;
	int ret = zip_check_name("attribute", attribute->name, error);

	if (ret)
		return ret;
	if (!attribute->value)
		return base_refuse(error, -EINVAL,
				   "cannot save attribute \"%s\": it has no value" BASE_REMEDY
				   "use \"\" for an empty one",
				   ZIP_SHOWN(attribute->name));
	value_bytes = strnlen(attribute->value, IOSHAPE_MAX_METADATA_BYTES + 1);
	if (value_bytes <= IOSHAPE_MAX_METADATA_BYTES &&
	    !zip_utf8_valid(attribute->value, value_bytes))
		return base_refuse(error, -EINVAL,
				   "cannot save attribute \"%s\": its value is not valid "
				   "UTF-8" BASE_REMEDY "use the blob for bytes",
				   ZIP_SHOWN(attribute->name));
	*bytes += strlen(attribute->name) + value_bytes;
	return 0;
}

static int check_attributes(const struct ioshape_metadata *metadata, struct zip_names *names,
			    struct base_error *error)
{
	uint64_t bytes = metadata->blob_bytes;
	int ret;

	for (size_t i = 0; i < metadata->attribute_count; i++) {
		const char *name = metadata->attributes[i].name;

		ret = check_attribute(&metadata->attributes[i], &bytes, error);
		if (ret)
			return ret;
		if (bytes > IOSHAPE_MAX_METADATA_BYTES)
			return base_refuse(
				error, IOSHAPE_E_LIMIT,
				"blob and attributes together have more than %s" BASE_REMEDY
				"save them as a tensor",
				BASE_SIZE(IOSHAPE_MAX_METADATA_BYTES));
		ret = zip_names_add(names, name, strlen(name), i);
		if (ret)
			return base_fail(error, ret == -EEXIST ? -EINVAL : ret,
					 "attribute \"%s\" is there twice or cannot be noted",
					 ZIP_SHOWN(name));
	}
	return 0;
}

int zip_check_metadata(const struct ioshape_metadata *metadata, struct base_error *error)
{
	struct zip_names *names;
	int ret;

	if (metadata->blob_bytes > IOSHAPE_MAX_METADATA_BYTES)
		return base_refuse(error, IOSHAPE_E_LIMIT,
				   "the metadata's blob has %s, more than %s" BASE_REMEDY
				   "save it as a tensor",
				   BASE_SIZE(metadata->blob_bytes),
				   BASE_SIZE(IOSHAPE_MAX_METADATA_BYTES));
	if (metadata->blob_bytes && !metadata->blob)
		return base_refuse(error, -EINVAL, "the metadata's blob is NULL and has %s",
				   BASE_SIZE(metadata->blob_bytes));
	if (metadata->attribute_count > IOSHAPE_MAX_ATTRIBUTES)
		return base_refuse(error, IOSHAPE_E_LIMIT,
				   "%zu attributes are more than %u" BASE_REMEDY "use the blob",
				   metadata->attribute_count, IOSHAPE_MAX_ATTRIBUTES);
	if (!metadata->attribute_count)
		return 0;
	if (!metadata->attributes)
		return base_refuse(error, -EINVAL,
				   "the metadata's attributes are NULL and number %zu",
				   metadata->attribute_count);

	ret = zip_names_new(&names, metadata->attribute_count);
	if (ret)
		return base_no_memory(error, "names of attributes", metadata->attribute_count);
	ret = check_attributes(metadata, names, error);
	zip_names_free(names);
	return ret;
}

/* ---- Encoding -------------------------------------------------------------------------------- */

/* Where bytes are appended. After a failure nothing more is. */
struct out {
	struct base_buffer *bytes;
	uint32_t sections; /* begun so far */
	int failed;
};

static void put_bytes(struct out *out, const void *data, size_t bytes)
{
	if (!out->failed)
		out->failed = base_buffer_append(out->bytes, data, bytes);
}

static void put_le(struct out *out, uint64_t value, unsigned bytes)
{
	uint8_t number[8];

	base_put_le(number, value, bytes);
	put_bytes(out, number, bytes);
}

static void put_values(struct out *out, const int64_t *values, uint32_t count)
{
	for (uint32_t i = 0; i < count; i++)
		put_le(out, (uint64_t)values[i], 8);
}

/* Returns where its payload begins. */
static size_t begin_section(struct out *out, enum index_section tag)
{
	out->sections++;
	put_le(out, tag, 4);
	put_le(out, 0, 4);
	put_le(out, 0, 8); /* the payload's length, once that is known */
	return out->bytes->bytes;
}

static void end_section(struct out *out, size_t begin)
{
	static const uint8_t zeros[SECTION_ALIGNMENT];
	const size_t bytes = out->bytes->bytes - begin;

	put_bytes(out, zeros, base_round_up(bytes, SECTION_ALIGNMENT) - bytes);
	if (!out->failed)
		base_put_le(out->bytes->data + begin - 8, bytes, 8);
}

static void put_records(struct out *out, const struct zip_index *index)
{
	size_t begin = begin_section(out, SECTION_OFFSETS);

	for (uint64_t i = 0; i < index->records; i++)
		put_le(out, index->data_offsets[i], 8);
	end_section(out, begin);

	begin = begin_section(out, SECTION_CHECKS);
	for (uint64_t i = 0; i < index->check_count; i++)
		put_le(out, index->checks[i], 4);
	end_section(out, begin);
}

static void put_table(struct out *out, const struct zip_index *index)
{
	const struct zip_tensor_row *rows = index->tensors;
	const size_t begin = begin_section(out, SECTION_TENSORS);
	uint64_t dims = 0;

	for (uint64_t i = 0; i < index->tensor_count; i++)
		dims += rows[i].dims;
	put_le(out, index->tensor_count, 8);
	put_le(out, dims, 8);
	for (uint64_t i = 0; i < index->tensor_count; i++) {
		put_le(out, rows[i].record, 8);
		put_le(out, rows[i].dtype, 4);
		put_le(out, rows[i].dims, 4);
		put_le(out, strlen(rows[i].name), 4);
		put_le(out, 0, 4);
	}
	for (uint64_t i = 0; i < index->tensor_count; i++)
		put_values(out, rows[i].shape, rows[i].dims);
	for (uint64_t i = 0; i < index->tensor_count; i++)
		put_values(out, rows[i].strides, rows[i].dims);
	for (uint64_t i = 0; i < index->tensor_count; i++)
		put_bytes(out, rows[i].name, strlen(rows[i].name));
	end_section(out, begin);
}

static void put_metadata(struct out *out, const struct ioshape_metadata *metadata)
{
	const struct ioshape_attribute *attributes = metadata->attributes;
	const size_t begin = begin_section(out, SECTION_METADATA);

	put_le(out, (uint64_t)metadata->step, 8);
	put_le(out, metadata->blob_bytes, 8);
	put_le(out, metadata->attribute_count, 8);
	for (size_t i = 0; i < metadata->attribute_count; i++) {
		put_le(out, strlen(attributes[i].name), 4);
		put_le(out, strlen(attributes[i].value), 4);
	}
	for (size_t i = 0; i < metadata->attribute_count; i++) {
		put_bytes(out, attributes[i].name, strlen(attributes[i].name));
		put_bytes(out, attributes[i].value, strlen(attributes[i].value));
	}
	put_bytes(out, metadata->blob, metadata->blob_bytes);
	end_section(out, begin);
}

int zip_index_encode(struct base_buffer *bytes, const struct zip_index *index)
{
	const struct ioshape_metadata *metadata = &index->metadata;
	const size_t before = bytes->bytes;
	struct out out = { .bytes = bytes };

	put_bytes(&out, INDEX_MAGIC, INDEX_MAGIC_BYTES);
	put_le(&out, INDEX_VERSION, 4);
	put_le(&out, 0, 4); /* sections, once they are counted */
	put_le(&out, index->directory_crc32, 4);
	put_le(&out, 0, 4);
	put_le(&out, index->check_bytes, 8);
	put_le(&out, index->records, 8);
	put_records(&out, index);
	if (index->has_table)
		put_table(&out, index);
	if (metadata->step || metadata->blob_bytes || metadata->attribute_count)
		put_metadata(&out, metadata);
	/* A file that could not be read again must not be written. */
	if (!out.failed && bytes->bytes - before > ZIP_MAX_INDEX_BYTES)
		out.failed = IOSHAPE_E_LIMIT;
	if (out.failed)
		bytes->bytes = before;
	else
		base_put_le(bytes->data + before + INDEX_SECTIONS_AT, out.sections, 4);
	return out.failed;
}

void zip_index_free(struct zip_index *index)
{
	zip_names_free(index->names);
	free(index->memory);
	memset(index, 0, sizeof(*index));
}
