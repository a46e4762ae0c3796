/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The index record on its way into the file, and the limits of the metadata in it.
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
	size_t name_bytes, value_bytes;

	if (!attribute->name || !*attribute->name)
		return base_refuse(error, -EINVAL,
				   "an attribute has no name" BASE_REMEDY "give each one");
	name_bytes = strnlen(attribute->name, IOSHAPE_MAX_NAME_BYTES + 1);
	if (name_bytes > IOSHAPE_MAX_NAME_BYTES)
		return base_refuse(
			error, IOSHAPE_E_LIMIT,
			"the name of attribute \"%s\" is longer than %u bytes" BASE_REMEDY
			"shorten it",
			ZIP_SHOWN(attribute->name), IOSHAPE_MAX_NAME_BYTES);
	if (!zip_utf8_valid(attribute->name, name_bytes))
		return base_refuse(error, -EINVAL,
				   "the name of attribute \"%s\" is not valid UTF-8" BASE_REMEDY
				   "it must be",
				   ZIP_SHOWN(attribute->name));
	if (!attribute->value)
		return base_refuse(error, -EINVAL,
				   "attribute \"%s\" has no value" BASE_REMEDY
				   "use \"\" for an empty one",
				   ZIP_SHOWN(attribute->name));
	value_bytes = strnlen(attribute->value, IOSHAPE_MAX_METADATA_BYTES + 1);
	if (value_bytes <= IOSHAPE_MAX_METADATA_BYTES &&
	    !zip_utf8_valid(attribute->value, value_bytes))
		return base_refuse(error, -EINVAL,
				   "the value of attribute \"%s\" is not valid UTF-8" BASE_REMEDY
				   "use the blob for bytes",
				   ZIP_SHOWN(attribute->name));
	*bytes += name_bytes + value_bytes;
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
				"blob and attributes together have more than %u bytes" BASE_REMEDY
				"save them as a tensor",
				IOSHAPE_MAX_METADATA_BYTES);
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
				   "the metadata's blob has %zu bytes, more than %u" BASE_REMEDY
				   "save it as a tensor",
				   metadata->blob_bytes, IOSHAPE_MAX_METADATA_BYTES);
	if (metadata->blob_bytes && !metadata->blob)
		return base_refuse(error, -EINVAL, "the metadata's blob is NULL and has %zu bytes",
				   metadata->blob_bytes);
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

/* ---- Sizes ----------------------------------------------------------------------------------- */

/* Sizes of what lies in this process's memory: their sums do not overflow. */

static uint64_t table_bytes(const struct zip_index *index, uint64_t *dims)
{
	uint64_t bytes = TABLE_HEADER_BYTES + index->tensor_count * TABLE_ROW_BYTES;

	*dims = 0;
	for (uint64_t i = 0; i < index->tensor_count; i++) {
		*dims += index->tensors[i].dims;
		bytes += strlen(index->tensors[i].name);
	}
	return bytes + *dims * 2 * sizeof(int64_t);
}

static bool has_metadata(const struct ioshape_metadata *metadata)
{
	return metadata->step || metadata->blob_bytes || metadata->attribute_count;
}

static uint64_t metadata_bytes(const struct ioshape_metadata *metadata)
{
	uint64_t bytes = METADATA_HEADER_BYTES + metadata->attribute_count * METADATA_PAIR_BYTES;

	for (size_t i = 0; i < metadata->attribute_count; i++)
		bytes += strlen(metadata->attributes[i].name) +
			 strlen(metadata->attributes[i].value);
	return bytes + metadata->blob_bytes;
}

/* ---- Encoding: all of these write behind *at, where room has been made ----------------------- */

static void put_le(uint8_t **at, uint64_t value, unsigned bytes)
{
	base_put_le(*at, value, bytes);
	*at += bytes;
}

static void put_bytes(uint8_t **at, const void *data, size_t bytes)
{
	if (bytes)
		memcpy(*at, data, bytes);
	*at += bytes;
}

static void put_values(uint8_t **at, const int64_t *values, uint32_t count)
{
	for (uint32_t i = 0; i < count; i++)
		put_le(at, (uint64_t)values[i], 8);
}

static void begin_section(uint8_t **at, enum index_section tag, uint64_t bytes)
{
	put_le(at, tag, 4);
	put_le(at, 0, 4);
	put_le(at, bytes, 8);
}

static void end_section(uint8_t **at, uint64_t bytes)
{
	while (bytes++ % SECTION_ALIGNMENT)
		put_le(at, 0, 1);
}

static uint64_t section_bytes(uint64_t payload)
{
	return SECTION_HEADER_BYTES + base_round_up(payload, SECTION_ALIGNMENT);
}

static void put_records(uint8_t **at, const struct zip_index *index)
{
	begin_section(at, SECTION_OFFSETS, index->records * 8);
	for (uint64_t i = 0; i < index->records; i++)
		put_le(at, index->data_offsets[i], 8);
	end_section(at, index->records * 8);

	begin_section(at, SECTION_CHECKS, index->check_count * 4);
	for (uint64_t i = 0; i < index->check_count; i++)
		put_le(at, index->checks[i], 4);
	end_section(at, index->check_count * 4);
}

static void put_table(uint8_t **at, const struct zip_index *index, uint64_t bytes, uint64_t dims)
{
	const struct zip_tensor_row *rows = index->tensors;

	begin_section(at, SECTION_TENSORS, bytes);
	put_le(at, index->tensor_count, 8);
	put_le(at, dims, 8);
	for (uint64_t i = 0; i < index->tensor_count; i++) {
		put_le(at, rows[i].record, 8);
		put_le(at, rows[i].dtype, 4);
		put_le(at, rows[i].dims, 4);
		put_le(at, strlen(rows[i].name), 4);
		put_le(at, 0, 4);
	}
	for (uint64_t i = 0; i < index->tensor_count; i++)
		put_values(at, rows[i].shape, rows[i].dims);
	for (uint64_t i = 0; i < index->tensor_count; i++)
		put_values(at, rows[i].strides, rows[i].dims);
	for (uint64_t i = 0; i < index->tensor_count; i++)
		put_bytes(at, rows[i].name, strlen(rows[i].name));
	end_section(at, bytes);
}

static void put_metadata(uint8_t **at, const struct ioshape_metadata *metadata, uint64_t bytes)
{
	const struct ioshape_attribute *attributes = metadata->attributes;

	begin_section(at, SECTION_METADATA, bytes);
	put_le(at, (uint64_t)metadata->step, 8);
	put_le(at, metadata->blob_bytes, 8);
	put_le(at, metadata->attribute_count, 8);
	for (size_t i = 0; i < metadata->attribute_count; i++) {
		put_le(at, strlen(attributes[i].name), 4);
		put_le(at, strlen(attributes[i].value), 4);
	}
	for (size_t i = 0; i < metadata->attribute_count; i++) {
		put_bytes(at, attributes[i].name, strlen(attributes[i].name));
		put_bytes(at, attributes[i].value, strlen(attributes[i].value));
	}
	put_bytes(at, metadata->blob, metadata->blob_bytes);
	end_section(at, bytes);
}

int zip_index_encode(struct base_buffer *out, const struct zip_index *index)
{
	uint64_t table = 0, dims = 0, metadata = 0, total;
	unsigned sections = 2;
	uint8_t *at;
	int ret;

	total = INDEX_HEADER_BYTES + section_bytes(index->records * 8) +
		section_bytes(index->check_count * 4);
	if (index->has_table) {
		table = table_bytes(index, &dims);
		total += section_bytes(table);
		sections++;
	}
	if (has_metadata(&index->metadata)) {
		metadata = metadata_bytes(&index->metadata);
		total += section_bytes(metadata);
		sections++;
	}
	/* A file that could not be read again must not be written. */
	if (total > ZIP_MAX_INDEX_BYTES)
		return IOSHAPE_E_LIMIT;
	ret = base_buffer_reserve(out, total);
	if (ret)
		return ret;

	at = out->data + out->bytes;
	put_bytes(&at, INDEX_MAGIC, INDEX_MAGIC_BYTES);
	put_le(&at, INDEX_VERSION, 4);
	put_le(&at, sections, 4);
	put_le(&at, index->directory_crc32, 4);
	put_le(&at, 0, 4);
	put_le(&at, index->check_bytes, 8);
	put_le(&at, index->records, 8);
	put_records(&at, index);
	if (index->has_table)
		put_table(&at, index, table, dims);
	if (metadata)
		put_metadata(&at, &index->metadata, metadata);
	out->bytes += total;
	return 0;
}

void zip_index_free(struct zip_index *index)
{
	free(index->memory);
	memset(index, 0, sizeof(*index));
}
