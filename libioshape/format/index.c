/* SPDX-License-Identifier: Apache-2.0 */
/* Encodes and decodes the index record, which holds checksums of blocks, the tensor table, metadata
 * and statistics. Also encodes and decodes the files of checksums and of statistics beside a file
 * in another format. docs/format.md specifies their bytes. All numbers are little-endian. Pure. */
#define _GNU_SOURCE
#include "format/format.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

/* ---- Layout of the index record -------------------------------------------------------------- */

/* Every section begins on a multiple of 8. */

#define INDEX_MAGIC "ioshape\n"
#define INDEX_MAGIC_BYTES 8u
#define INDEX_VERSION BASE_FORMAT(1u)

/* magic, u32 version, u32 sections, u32 directory_crc32, u32 zero, u64 check_bytes, u64 records */
#define INDEX_HEADER_BYTES 40u
#define INDEX_SECTIONS_AT 12u

/* u32 tag, u32 zero, u64 bytes of the payload that follows, padded with zeros to a multiple of 8 */
#define SECTION_HEADER_BYTES 16u
#define SECTION_ALIGNMENT 8u

enum index_section {
	SECTION_OFFSETS = 1,    /* u64 for each record: offset of its data in the file */
	SECTION_CHECKS = 2,     /* u32 for each block of each record: its CRC-32 */
	SECTION_TENSORS = 3,    /* optional: the tensor table */
	SECTION_METADATA = 4,   /* optional: step, attributes and blob */
	SECTION_STATISTICS = 5, /* optional: alarms, and statistics of each record */
	SECTION_COUNT
};

/* u64 tensors, u64 dimensions of all tensors; then rows, shapes, strides, names */
#define TABLE_HEADER_BYTES 16u
/* u64 record, u32 dtype, u32 dims, u32 name_bytes, u32 zero */
#define TABLE_ROW_BYTES 24u
#define TABLE_ROW_NAME_BYTES_AT 16u

/* i64 step, u64 blob_bytes, u64 attributes; then pairs of lengths, names and values, the blob */
#define METADATA_HEADER_BYTES 24u
/* u32 name_bytes, u32 value_bytes */
#define METADATA_PAIR_BYTES 8u

/* u32 alarms, u32 zero; then a row for each record */
#define STATISTICS_HEADER_BYTES 8u
/* u32 dtype, u32 alarms, u64 nans, u64 infinities, u64 zeros, f64 minimum, f64 maximum, f64 sum of
 * squares */
#define STATISTICS_ROW_BYTES FORMAT_STATISTICS_BYTES

/* ---- Checking metadata ----------------------------------------------------------------------- */

/* Checks an attribute and adds the lengths of its name and value to *bytes. */
static int check_attribute(const struct ioshape_attribute *attribute, uint64_t *bytes,
			   struct base_error *error)
{
	size_t value_bytes;
	int ret = format_check_name("attribute", attribute->name, error);

	if (ret)
		return ret;
	if (!attribute->value)
		return base_fail_reason_with(error, -EINVAL, "use \"\" for an empty value",
					     "cannot save attribute \"%s\": it has no value",
					     FORMAT_SHOWN(attribute->name));
	value_bytes = strnlen(attribute->value, IOSHAPE_MAX_METADATA_BYTES + 1);
	if (value_bytes <= IOSHAPE_MAX_METADATA_BYTES &&
	    !format_utf8_valid(attribute->value, value_bytes))
		return base_fail_reason_with(error, -EINVAL, "use the blob for bytes",
					     "cannot save attribute \"%s\": its value is not valid "
					     "UTF-8",
					     FORMAT_SHOWN(attribute->name));
	*bytes += strlen(attribute->name) + value_bytes;
	return 0;
}

static int check_attributes(const struct ioshape_metadata *metadata, struct format_names *names,
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
			return base_fail_reason_with(
				error, IOSHAPE_E_LIMIT, "save them as a tensor",
				"blob and attributes together have more than %s",
				BASE_SIZE(IOSHAPE_MAX_METADATA_BYTES));
		ret = format_names_add(names, name, strlen(name), i);
		if (ret)
			return base_fail(error, ret == -EEXIST ? -EINVAL : ret,
					 "attribute \"%s\" occurs twice or cannot be stored",
					 FORMAT_SHOWN(name));
	}
	return 0;
}

int format_check_metadata(const struct ioshape_metadata *metadata, struct base_error *error)
{
	struct format_names *names;
	int ret;

	if (metadata->blob_bytes > IOSHAPE_MAX_METADATA_BYTES)
		return base_fail_reason_with(error, IOSHAPE_E_LIMIT, "save it as a tensor",
					     "the metadata's blob has %s, the limit is %s",
					     BASE_SIZE(metadata->blob_bytes),
					     BASE_SIZE(IOSHAPE_MAX_METADATA_BYTES));
	if (metadata->blob_bytes && !metadata->blob)
		return base_fail_reason(error, -EINVAL,
					"the metadata's blob is NULL, but its size is %s",
					BASE_SIZE(metadata->blob_bytes));
	if (metadata->attribute_count > IOSHAPE_MAX_ATTRIBUTES)
		return base_fail_reason_with(error, IOSHAPE_E_LIMIT, "use the blob",
					     "the metadata has %zu attributes, the limit is %u",
					     metadata->attribute_count, IOSHAPE_MAX_ATTRIBUTES);
	if (!metadata->attribute_count)
		return 0;
	if (!metadata->attributes)
		return base_fail_reason(
			error, -EINVAL,
			"the metadata's attributes are NULL, but their number is %zu",
			metadata->attribute_count);

	ret = format_names_new(&names, metadata->attribute_count);
	if (ret)
		return base_no_memory(error, "names of attributes", metadata->attribute_count);
	ret = check_attributes(metadata, names, error);
	format_names_free(names);
	return ret;
}

/* ---- Encoding -------------------------------------------------------------------------------- */

/* Buffer to which the encoder appends. After a failure it appends nothing more. */
struct out {
	struct base_buffer *bytes;
	uint32_t sections; /* number of sections so far */
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

/* Begins a section and returns the offset of its payload. */
static size_t begin_section(struct out *out, enum index_section tag)
{
	out->sections++;
	put_le(out, tag, 4);
	put_le(out, 0, 4);
	put_le(out, 0, 8); /* length of the payload; end_section() sets it */
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

static void put_records(struct out *out, const struct format_index *index)
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

static void put_table(struct out *out, const struct format_index *index)
{
	const struct format_tensor_row *rows = index->tensors;
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

static void put_double(struct out *out, double value)
{
	uint64_t bits;

	memcpy(&bits, &value, sizeof(bits));
	put_le(out, bits, 8);
}

static void put_statistics(struct out *out, const struct format_index *index)
{
	put_le(out, index->alarms, 4);
	put_le(out, 0, 4);
	for (uint64_t i = 0; i < index->records; i++) {
		const struct base_statistics *row = &index->examined[i].statistics;

		put_le(out, row->dtype, 4);
		put_le(out, index->examined[i].alarms, 4);
		put_le(out, row->nans, 8);
		put_le(out, row->infinities, 8);
		put_le(out, row->zeros, 8);
		put_double(out, row->minimum);
		put_double(out, row->maximum);
		put_double(out, row->sum_squares);
	}
}

int format_index_encode(struct base_buffer *bytes, const struct format_index *index)
{
	const struct ioshape_metadata *metadata = &index->metadata;
	const size_t before = bytes->bytes;
	struct out out = { .bytes = bytes };
	size_t begin;

	put_bytes(&out, INDEX_MAGIC, INDEX_MAGIC_BYTES);
	put_le(&out, INDEX_VERSION, 4);
	put_le(&out, 0, 4); /* number of sections; set at the end */
	put_le(&out, index->directory_crc32, 4);
	put_le(&out, 0, 4);
	put_le(&out, index->check_bytes, 8);
	put_le(&out, index->records, 8);
	put_records(&out, index);
	if (index->has_table)
		put_table(&out, index);
	if (metadata->step || metadata->blob_bytes || metadata->attribute_count)
		put_metadata(&out, metadata);
	if (index->has_statistics) {
		begin = begin_section(&out, SECTION_STATISTICS);
		put_statistics(&out, index);
		end_section(&out, begin);
	}
	/* The library must not write a file that it could not read again. */
	if (!out.failed && bytes->bytes - before > FORMAT_MAX_INDEX_BYTES)
		out.failed = IOSHAPE_E_LIMIT;
	if (out.failed)
		bytes->bytes = before;
	else
		base_put_le(bytes->data + before + INDEX_SECTIONS_AT, out.sections, 4);
	return out.failed;
}

uint32_t format_directory_crc32(const struct format_entry *entries, uint64_t count,
				size_t folder_bytes)
{
	uint8_t numbers[4 + 4 + 8 + 8];
	uint32_t crc = 0;

	for (uint64_t i = 0; i < count; i++) {
		size_t name_bytes = entries[i].name_bytes - folder_bytes;

		base_put_le(numbers, name_bytes, 4);
		base_put_le(numbers + 4, entries[i].crc32, 4);
		base_put_le(numbers + 8, entries[i].bytes, 8);
		base_put_le(numbers + 16, entries[i].header_offset, 8);
		crc = base_crc32(crc, numbers, sizeof(numbers));
		crc = base_crc32(crc, entries[i].name + folder_bytes, name_bytes);
	}
	return crc;
}

void format_index_free(struct format_index *index)
{
	format_names_free(index->names);
	free(index->memory);
	memset(index, 0, sizeof(*index));
}

/* ---- Decoding -------------------------------------------------------------------------------- */

/* The bytes are untrusted. The decoder compares every count with the bytes that are there before it
 * multiplies it, allocates memory for it or uses it. The result is in one piece of memory, at most
 * a few times as large as the record. Only the table of names has memory of its own. */

/* Bytes of the record that are not decoded yet. */
struct view {
	const uint8_t *data;
	uint64_t bytes;
};

struct decoder {
	struct format_index *index;
	const struct format_entry *entries;
	uint64_t entry_count;
	uint64_t section_count; /* number of sections that the header announces */
	/* payloads by tag; data is NULL if the section is absent */
	struct view sections[SECTION_COUNT];
	uint64_t tensors; /* rows of the tensor table */
	uint64_t dims;    /* dimensions of all rows together */
	uint64_t attributes;
	uint64_t blob_bytes;
	uint8_t *space; /* memory of the result that is still unused */
	struct base_error *error;
};

static int damaged(const struct decoder *decoder, const char *what)
{
	return base_fail_reason_with(decoder->error, IOSHAPE_E_DAMAGED,
				     "torch.load can still read the tensors",
				     "record " FORMAT_INDEX_RECORD ": %s", what);
}

static int too_many(const struct decoder *decoder, const char *what, uint64_t count, uint64_t limit)
{
	return base_fail_reason(decoder->error, IOSHAPE_E_LIMIT,
				"record " FORMAT_INDEX_RECORD ": %llu %s exceed the limit of %llu",
				(unsigned long long)count, what, (unsigned long long)limit);
}

static bool take(struct view *view, uint64_t bytes, struct view *part)
{
	if (bytes > view->bytes)
		return false;
	part->data = view->data;
	part->bytes = bytes;
	view->data += bytes;
	view->bytes -= bytes;
	return true;
}

/* Decodes the next number of a view, which the caller has found to be long enough. */
static uint64_t next(struct view *view, unsigned bytes)
{
	uint64_t value = base_get_le(view->data, bytes);

	view->data += bytes;
	view->bytes -= bytes;
	return value;
}

/* ---- First pass: find the sections and compute the memory that they take --------------------- */

static int find_sections(struct decoder *decoder, struct view rest)
{
	struct view payload, padding;
	uint64_t tag, bytes;

	for (uint64_t i = 0; i < decoder->section_count; i++) {
		if (rest.bytes < SECTION_HEADER_BYTES)
			return damaged(decoder, "a section is truncated");
		tag = next(&rest, 4);
		next(&rest, 4);
		bytes = next(&rest, 8);
		if (!take(&rest, bytes, &payload) ||
		    !take(&rest, base_round_up(bytes, SECTION_ALIGNMENT) - bytes, &padding))
			return damaged(decoder, "a section is truncated");
		/* Sections of later versions are skipped. */
		if (tag == 0 || tag >= SECTION_COUNT)
			continue;
		if (decoder->sections[tag].data)
			return damaged(decoder, "a section occurs twice");
		decoder->sections[tag] = payload;
	}
	return rest.bytes ? damaged(decoder, "it has extra bytes at its end") : 0;
}

static int read_header(struct decoder *decoder, struct view *all)
{
	struct view header;
	uint64_t version, check_bytes;

	if (!take(all, INDEX_HEADER_BYTES, &header))
		return damaged(decoder, "it is truncated");
	if (memcmp(header.data, INDEX_MAGIC, INDEX_MAGIC_BYTES))
		return damaged(decoder, "it does not begin with the magic number of an index");
	next(&header, INDEX_MAGIC_BYTES);
	version = next(&header, 4);
	if (version != INDEX_VERSION)
		return base_fail_reason_with(decoder->error, IOSHAPE_E_FORMAT,
					     "use a newer version of ioshape",
					     "record " FORMAT_INDEX_RECORD
					     " has version %llu, but this library reads version %u",
					     (unsigned long long)version, INDEX_VERSION);
	decoder->section_count = next(&header, 4);
	decoder->index->directory_crc32 = (uint32_t)next(&header, 4);
	next(&header, 4);
	check_bytes = next(&header, 8);
	if (check_bytes < FORMAT_LEAST_CHECK_BYTES || check_bytes > FORMAT_MOST_CHECK_BYTES ||
	    (check_bytes & (check_bytes - 1)))
		return damaged(decoder, "its block size is not valid");
	if (next(&header, 8) != decoder->entry_count)
		return damaged(decoder, "its number of records differs from the archive's");
	decoder->index->check_bytes = check_bytes;
	decoder->index->records = decoder->entry_count;
	return 0;
}

/* Returns the number of blocks of a record. Entries do not overlap and lie in one file, so the sum
 * over all of them cannot overflow. */
static uint64_t blocks_of(const struct decoder *decoder, const struct format_entry *entry)
{
	const uint64_t check_bytes = decoder->index->check_bytes;

	return entry->bytes / check_bytes + (entry->bytes % check_bytes != 0);
}

static int size_records(struct decoder *decoder, uint64_t *space)
{
	uint64_t blocks = 0;

	for (uint64_t i = 0; i < decoder->entry_count; i++)
		blocks += blocks_of(decoder, &decoder->entries[i]);
	/* A division cannot overflow, as a product could. */
	if (!decoder->sections[SECTION_OFFSETS].data ||
	    decoder->sections[SECTION_OFFSETS].bytes % 8 ||
	    decoder->sections[SECTION_OFFSETS].bytes / 8 != decoder->entry_count)
		return damaged(decoder, "the numbers of data offsets and of records differ");
	if (!decoder->sections[SECTION_CHECKS].data ||
	    decoder->sections[SECTION_CHECKS].bytes % 4 ||
	    decoder->sections[SECTION_CHECKS].bytes / 4 != blocks)
		return damaged(decoder, "the numbers of checksums and of blocks differ");
	decoder->index->check_count = blocks;
	*space += 2 * decoder->sections[SECTION_OFFSETS].bytes +
		  decoder->sections[SECTION_CHECKS].bytes;
	return 0;
}

static int size_table(struct decoder *decoder, uint64_t *space)
{
	struct view *table = &decoder->sections[SECTION_TENSORS];
	uint64_t names;

	if (!table->data)
		return 0;
	if (table->bytes < TABLE_HEADER_BYTES)
		return damaged(decoder, "the tensor table is truncated");
	decoder->tensors = next(table, 8);
	decoder->dims = next(table, 8);
	if (decoder->tensors > IOSHAPE_MAX_TENSORS)
		return too_many(decoder, "tensors", decoder->tensors, IOSHAPE_MAX_TENSORS);
	if (decoder->tensors > table->bytes / TABLE_ROW_BYTES ||
	    decoder->dims > (table->bytes - decoder->tensors * TABLE_ROW_BYTES) / 16)
		return damaged(decoder, "the tensor table is truncated");
	names = table->bytes - decoder->tensors * TABLE_ROW_BYTES - decoder->dims * 16;
	decoder->index->has_table = true;
	decoder->index->tensor_count = decoder->tensors;
	*space += decoder->tensors * (sizeof(struct format_tensor_row) + 1) + decoder->dims * 16 +
		  names;
	return 0;
}

static int size_metadata(struct decoder *decoder, uint64_t *space)
{
	struct view *metadata = &decoder->sections[SECTION_METADATA];
	uint64_t text;

	if (!metadata->data)
		return 0;
	if (metadata->bytes < METADATA_HEADER_BYTES)
		return damaged(decoder, "the metadata is truncated");
	decoder->index->metadata.step = (int64_t)next(metadata, 8);
	decoder->blob_bytes = next(metadata, 8);
	decoder->attributes = next(metadata, 8);
	if (decoder->attributes > IOSHAPE_MAX_ATTRIBUTES)
		return too_many(decoder, "attributes", decoder->attributes, IOSHAPE_MAX_ATTRIBUTES);
	if (decoder->attributes > metadata->bytes / METADATA_PAIR_BYTES)
		return damaged(decoder, "the metadata is truncated");
	text = metadata->bytes - decoder->attributes * METADATA_PAIR_BYTES;
	if (text > IOSHAPE_MAX_METADATA_BYTES)
		return too_many(decoder, "bytes of metadata", text, IOSHAPE_MAX_METADATA_BYTES);
	if (decoder->blob_bytes > text)
		return damaged(decoder, "the metadata is truncated");
	*space += decoder->attributes * (sizeof(struct ioshape_attribute) + 2) + text;
	return 0;
}

static int size_statistics(struct decoder *decoder, uint64_t *space)
{
	struct view *rows = &decoder->sections[SECTION_STATISTICS];

	if (!rows->data)
		return 0;
	if (rows->bytes < STATISTICS_HEADER_BYTES ||
	    (rows->bytes - STATISTICS_HEADER_BYTES) % STATISTICS_ROW_BYTES ||
	    (rows->bytes - STATISTICS_HEADER_BYTES) / STATISTICS_ROW_BYTES != decoder->entry_count)
		return damaged(decoder, "the numbers of statistics and of records differ");
	decoder->index->has_statistics = true;
	decoder->index->alarms = (uint32_t)next(rows, 4);
	next(rows, 4);
	*space += decoder->entry_count * sizeof(struct format_examined);
	return 0;
}

/* ---- Second pass: copy with checks ----------------------------------------------------------- */

/* Allocates memory of the result, whose size the first pass has computed. Types with wider
 * alignment must come first and text last. */
static void *give(struct decoder *decoder, uint64_t bytes)
{
	void *space = decoder->space;

	decoder->space += bytes;
	return space;
}

static char *give_text(struct decoder *decoder, const struct view *text)
{
	char *copy = give(decoder, text->bytes + 1);

	if (text->bytes)
		memcpy(copy, text->data, text->bytes);
	copy[text->bytes] = '\0';
	return copy;
}

/* Returns whether the text is valid UTF-8 without NUL. With a NUL, the C string would be shorter
 * than the text. */
static bool text_valid(const struct view *text)
{
	return format_utf8_valid((const char *)text->data, text->bytes);
}

static bool name_valid(const struct view *name)
{
	return name->bytes && name->bytes <= IOSHAPE_MAX_NAME_BYTES && text_valid(name);
}

static void copy_records(struct decoder *decoder)
{
	struct format_index *index = decoder->index;
	uint64_t *offsets = give(decoder, decoder->entry_count * 8);
	uint64_t *first_check = give(decoder, decoder->entry_count * 8), block = 0;
	uint32_t *checks = give(decoder, index->check_count * 4);

	for (uint64_t i = 0; i < decoder->entry_count; i++) {
		offsets[i] = next(&decoder->sections[SECTION_OFFSETS], 8);
		first_check[i] = block;
		block += blocks_of(decoder, &decoder->entries[i]);
	}
	for (uint64_t i = 0; i < index->check_count; i++)
		checks[i] = (uint32_t)next(&decoder->sections[SECTION_CHECKS], 4);
	index->data_offsets = offsets;
	index->first_check = first_check;
	index->checks = checks;
}

/* Copies the fixed parts of the rows, then the shapes and strides. */
static int copy_rows(struct decoder *decoder, struct format_tensor_row *rows, int64_t *numbers)
{
	struct view *table = &decoder->sections[SECTION_TENSORS];
	uint64_t dims = 0;

	for (uint64_t i = 0; i < decoder->tensors; i++) {
		rows[i].record = next(table, 8);
		rows[i].dtype = (uint32_t)next(table, 4);
		rows[i].dims = (uint32_t)next(table, 4);
		next(table, 8);
		/* Records must increase from row to row. Otherwise a small file could claim any
		 * number of tensors in the same bytes. */
		if (rows[i].record >= decoder->entry_count ||
		    (i && rows[i].record <= rows[i - 1].record))
			return damaged(decoder, "a tensor has no record of its own");
		if (!format_dtype_of(rows[i].dtype))
			return damaged(decoder, "a tensor has an unknown dtype");
		if (rows[i].dims > IOSHAPE_MAX_DIMS || rows[i].dims > decoder->dims - dims)
			return damaged(decoder, "a tensor has too many dimensions");
		rows[i].shape = numbers + dims;
		rows[i].strides = numbers + decoder->dims + dims;
		dims += rows[i].dims;
	}
	if (dims != decoder->dims)
		return damaged(decoder, "the tensor table has a wrong number of dimensions");
	for (uint64_t i = 0; i < 2 * decoder->dims; i++)
		numbers[i] = (int64_t)next(table, 8);
	return 0;
}

static int check_extent(const struct decoder *decoder, const struct format_tensor_row *row)
{
	const uint64_t bytes = decoder->entries[row->record].bytes;
	const unsigned element_bytes = format_dtype_of(row->dtype)->bytes;
	uint64_t elements;

	if (!format_strides_dense(row->dims, row->shape, row->strides, &elements) ||
	    bytes % element_bytes || elements != bytes / element_bytes)
		return damaged(decoder, "the shape of a tensor does not fit its record");
	return 0;
}

/* Copies the names of the rows. `encoded` points to the encoded rows. */
static int copy_names(struct decoder *decoder, struct format_tensor_row *rows,
		      const uint8_t *encoded)
{
	struct view *table = &decoder->sections[SECTION_TENSORS], name;
	int ret;

	for (uint64_t i = 0; i < decoder->tensors; i++, encoded += TABLE_ROW_BYTES) {
		if (!take(table, base_get_le(encoded + TABLE_ROW_NAME_BYTES_AT, 4), &name) ||
		    !name_valid(&name))
			return damaged(decoder, "a tensor has a name that is not valid");
		rows[i].name = give_text(decoder, &name);
		ret = format_names_add(decoder->index->names, rows[i].name, name.bytes, i);
		if (ret == -EEXIST)
			return damaged(decoder, "two tensors have the same name");
		if (ret)
			return base_no_memory(decoder->error, "the names of tensors", name.bytes);
	}
	return table->bytes ? damaged(decoder, "the tensor table has extra bytes at its end") : 0;
}

static int copy_table(struct decoder *decoder, struct format_tensor_row *rows, int64_t *numbers)
{
	const uint8_t *encoded = decoder->sections[SECTION_TENSORS].data;
	int ret = copy_rows(decoder, rows, numbers);

	for (uint64_t i = 0; !ret && i < decoder->tensors; i++)
		ret = check_extent(decoder, &rows[i]);
	if (ret)
		return ret;
	if (format_names_new(&decoder->index->names, decoder->tensors))
		return base_no_memory(decoder->error, "the names of tensors", decoder->tensors);
	decoder->index->tensors = rows;
	return copy_names(decoder, rows, encoded);
}

static int copy_metadata(struct decoder *decoder, struct ioshape_attribute *attributes)
{
	struct view text = decoder->sections[SECTION_METADATA], lengths, name, value;
	struct ioshape_metadata *metadata = &decoder->index->metadata;
	int ret;

	if (!take(&text, decoder->attributes * METADATA_PAIR_BYTES, &lengths))
		return damaged(decoder, "the metadata is truncated");
	for (uint64_t i = 0; i < decoder->attributes; i++) {
		uint64_t name_bytes = next(&lengths, 4), value_bytes = next(&lengths, 4);

		if (!take(&text, name_bytes, &name) || !take(&text, value_bytes, &value) ||
		    !name_valid(&name) || !text_valid(&value))
			return damaged(decoder, "an attribute is not valid");
		attributes[i].name = give_text(decoder, &name);
		attributes[i].value = give_text(decoder, &value);
	}
	if (text.bytes != decoder->blob_bytes)
		return damaged(decoder, "the metadata's blob has the wrong length");
	if (decoder->blob_bytes)
		metadata->blob = memcpy(give(decoder, text.bytes), text.data, text.bytes);
	metadata->blob_bytes = text.bytes;
	metadata->attributes = decoder->attributes ? attributes : NULL;
	metadata->attribute_count = decoder->attributes;
	ret = format_check_metadata(metadata, NULL);
	if (ret == -ENOMEM)
		return base_no_memory(decoder->error, "the names of attributes",
				      decoder->attributes);
	return ret ? damaged(decoder, "an attribute occurs twice") : 0;
}

static double next_double(struct view *view)
{
	const uint64_t bits = next(view, 8);
	double value;

	memcpy(&value, &bits, sizeof(value));
	return value;
}

/* Returns whether the numbers are possible. A comparison with NaN gives false. */
static bool statistics_valid(const struct base_statistics *row)
{
	const uint64_t count = row->count;
	const bool finite = count - row->nans - row->infinities;

	return row->nans <= count && row->infinities <= count - row->nans &&
	       row->zeros <= count - row->nans - row->infinities && row->sum_squares >= 0 &&
	       (finite ? row->minimum <= row->maximum : row->minimum > row->maximum);
}

static int copy_statistics(struct decoder *decoder, struct format_examined *examined)
{
	struct view *rows = &decoder->sections[SECTION_STATISTICS];

	for (uint64_t i = 0; i < decoder->entry_count; i++) {
		struct base_statistics *row = &examined[i].statistics;
		const uint32_t dtype = (uint32_t)next(rows, 4);

		/* A later version may examine other types. */
		if (!base_statistics_begin(row, dtype)) {
			examined[i].alarms = 0;
			take(rows, STATISTICS_ROW_BYTES - 4, &(struct view){ 0 });
			continue;
		}
		examined[i].alarms = (uint32_t)next(rows, 4);
		row->count = base_statistics_count(dtype, decoder->entries[i].bytes);
		row->nans = next(rows, 8);
		row->infinities = next(rows, 8);
		row->zeros = next(rows, 8);
		row->minimum = next_double(rows);
		row->maximum = next_double(rows);
		row->sum_squares = next_double(rows);
		if (!statistics_valid(row))
			return damaged(decoder, "statistics are not valid");
	}
	decoder->index->examined = examined;
	return 0;
}

static int copy_all(struct decoder *decoder)
{
	struct format_tensor_row *rows = give(decoder, decoder->tensors * sizeof(*rows));
	struct ioshape_attribute *attributes =
		give(decoder, decoder->attributes * sizeof(*attributes));
	int64_t *numbers = give(decoder, decoder->dims * 16);
	struct format_examined *examined =
		give(decoder,
		     decoder->index->has_statistics ? decoder->entry_count * sizeof(*examined) : 0);
	int ret = 0;

	copy_records(decoder);
	if (decoder->index->has_table)
		ret = copy_table(decoder, rows, numbers);
	if (!ret && decoder->sections[SECTION_METADATA].data)
		ret = copy_metadata(decoder, attributes);
	if (!ret && decoder->index->has_statistics)
		ret = copy_statistics(decoder, examined);
	return ret;
}

int format_index_decode(struct format_index *index, const uint8_t *data, size_t bytes,
			const struct format_entry *entries, uint64_t entry_count,
			struct base_error *error)
{
	struct view all = { data, bytes };
	struct decoder decoder = {
		.index = index,
		.entries = entries,
		.entry_count = entry_count,
		.error = error,
	};
	uint64_t space = 1; /* never allocate 0 bytes */
	int ret;

	memset(index, 0, sizeof(*index));
	ret = read_header(&decoder, &all);
	if (!ret)
		ret = find_sections(&decoder, all);
	if (!ret)
		ret = size_records(&decoder, &space);
	if (!ret)
		ret = size_table(&decoder, &space);
	if (!ret)
		ret = size_metadata(&decoder, &space);
	if (!ret)
		ret = size_statistics(&decoder, &space);
	if (ret)
		goto fail;

	if ((size_t)space == space)
		index->memory = decoder.space = malloc((size_t)space);
	if (!decoder.space) {
		ret = base_no_memory(error, "the index", space);
		goto fail;
	}
	ret = copy_all(&decoder);
	if (!ret)
		return 0;
fail:
	format_index_free(index);
	return ret;
}

/* ---- Files beside a file in another format --------------------------------------------------- */

/* Both files begin with: magic, u32 version, u32 CRC-32 of all that follows, u64 number, u64
 * file_bytes, i64 modified_ns. The number is block_bytes of checksums, and the count of tensors of
 * statistics. */
#define SUMS_MAGIC "ioshsums"
#define STATISTICS_MAGIC "ioshstat"
#define BESIDE_MAGIC_BYTES 8u
#define BESIDE_VERSION BASE_FORMAT(1u)
#define BESIDE_CRC_AT 12u
#define BESIDE_CHECKED_FROM 16u
#define BESIDE_HEADER_BYTES 40u
/* of checksums: u32 for each block */
#define SUM_BYTES 4u
/* of statistics: u64 bytes, u32 crc32, u32 zero for each tensor; then the payload of the section */
#define TENSOR_BYTES 16u

/* Appends the header, whose checksum end_beside() sets. */
static void begin_beside(struct out *out, const char *magic, uint64_t number,
			 const struct format_beside *file)
{
	put_bytes(out, magic, BESIDE_MAGIC_BYTES);
	put_le(out, BESIDE_VERSION, 4);
	put_le(out, 0, 4);
	put_le(out, number, 8);
	put_le(out, file->file_bytes, 8);
	put_le(out, (uint64_t)file->modified_ns, 8);
}

static int end_beside(struct out *out, size_t begin)
{
	const size_t bytes = out->bytes->bytes - begin;
	uint8_t *at;

	if (!out->failed && bytes > FORMAT_MOST_BESIDE_BYTES)
		out->failed = -EFBIG;
	if (out->failed) {
		out->bytes->bytes = begin;
		return out->failed;
	}
	at = out->bytes->data + begin;
	base_put_le(at + BESIDE_CRC_AT,
		    base_crc32(0, at + BESIDE_CHECKED_FROM, bytes - BESIDE_CHECKED_FROM), 4);
	return 0;
}

/* Takes the header off the bytes. Returns 0, IOSHAPE_E_FORMAT or IOSHAPE_E_DAMAGED. */
static int take_header(struct view *bytes, const char *magic, uint64_t *number,
		       struct format_beside *file)
{
	const struct view whole = *bytes;
	struct view header;

	if (!take(bytes, BESIDE_HEADER_BYTES, &header) ||
	    memcmp(header.data, magic, BESIDE_MAGIC_BYTES) != 0 ||
	    base_get_le(header.data + BESIDE_MAGIC_BYTES, 4) != BESIDE_VERSION)
		return IOSHAPE_E_FORMAT;
	if (base_get_le(header.data + BESIDE_CRC_AT, 4) !=
	    base_crc32(0, header.data + BESIDE_CHECKED_FROM, whole.bytes - BESIDE_CHECKED_FROM))
		return IOSHAPE_E_DAMAGED;
	next(&header, 8);
	next(&header, 8);
	*number = next(&header, 8);
	file->file_bytes = next(&header, 8);
	file->modified_ns = (int64_t)next(&header, 8);
	return 0;
}

static uint64_t blocks_in(uint64_t file_bytes, uint64_t block_bytes)
{
	return file_bytes ? (file_bytes - 1) / block_bytes + 1 : 0;
}

/* Returns whether the numbers are consistent. */
static bool checksums_valid(const struct format_checksums *checksums)
{
	const uint64_t unit = checksums->block_bytes;

	return unit >= FORMAT_LEAST_CHECK_BYTES && unit <= FORMAT_MOST_CHECK_BYTES &&
	       !(unit & (unit - 1)) &&
	       checksums->blocks == blocks_in(checksums->file.file_bytes, unit) &&
	       (checksums->crc32 || !checksums->blocks);
}

int format_checksums_encode(struct base_buffer *bytes, const struct format_checksums *checksums)
{
	const size_t begin = bytes->bytes;
	struct out out = { .bytes = bytes };

	begin_beside(&out, SUMS_MAGIC, checksums->block_bytes, &checksums->file);
	for (uint64_t i = 0; i < checksums->blocks; i++)
		put_le(&out, checksums->crc32[i], SUM_BYTES);
	return end_beside(&out, begin);
}

int format_checksums_decode(struct format_checksums *checksums, const uint8_t *data, size_t bytes)
{
	struct format_checksums found = { 0 };
	struct view rest = { data, bytes };
	uint32_t *values;
	int ret = take_header(&rest, SUMS_MAGIC, &found.block_bytes, &found.file);

	if (ret)
		return ret;
	found.blocks = rest.bytes / SUM_BYTES;
	values = malloc(MAX(rest.bytes, 1));
	found.crc32 = values;
	if (!values)
		return -ENOMEM;
	if (rest.bytes % SUM_BYTES || !checksums_valid(&found)) {
		free(values);
		return IOSHAPE_E_DAMAGED;
	}
	for (uint64_t i = 0; i < found.blocks; i++)
		values[i] = (uint32_t)next(&rest, SUM_BYTES);
	*checksums = found;
	return 0;
}

void format_checksums_free(struct format_checksums *checksums)
{
	free((void *)(uintptr_t)checksums->crc32);
	memset(checksums, 0, sizeof(*checksums));
}

int format_statistics_encode(struct base_buffer *bytes, const struct format_statistics *statistics)
{
	const size_t begin = bytes->bytes;
	struct out out = { .bytes = bytes };

	begin_beside(&out, STATISTICS_MAGIC, statistics->index.records, &statistics->file);
	for (uint64_t i = 0; i < statistics->index.records; i++) {
		put_le(&out, statistics->tensors[i].bytes, 8);
		put_le(&out, statistics->tensors[i].crc32, 4);
		put_le(&out, 0, 4);
	}
	put_statistics(&out, &statistics->index);
	return end_beside(&out, begin);
}

/* Copies what the file says of the tensors. Returns false if they have more bytes than the file. */
static bool copy_tensors(struct format_entry *tensors, uint64_t count, struct view *rows,
			 uint64_t file_bytes)
{
	static char no_name[] = "";

	for (uint64_t i = 0; i < count; i++) {
		tensors[i] = (struct format_entry){ .name = no_name };
		tensors[i].bytes = next(rows, 8);
		tensors[i].crc32 = (uint32_t)next(rows, 4);
		next(rows, 4);
		if (tensors[i].bytes > file_bytes)
			return false;
		file_bytes -= tensors[i].bytes;
	}
	return true;
}

int format_statistics_decode(struct format_statistics *statistics, const uint8_t *data,
			     size_t bytes)
{
	struct format_statistics found = { 0 };
	struct decoder decoder = { .index = &found.index };
	struct view rest = { data, bytes }, rows;
	uint64_t count, space = 1;
	int ret = take_header(&rest, STATISTICS_MAGIC, &count, &found.file);

	if (ret)
		return ret;
	if (count > bytes / TENSOR_BYTES || !take(&rest, count * TENSOR_BYTES, &rows))
		return IOSHAPE_E_DAMAGED;
	found.index.records = decoder.entry_count = count;
	decoder.sections[SECTION_STATISTICS] = rest;
	ret = size_statistics(&decoder, &space);
	if (ret)
		return ret;
	found.tensors = calloc(MAX(count, 1), sizeof(*found.tensors));
	found.index.memory = decoder.space = malloc(space);
	decoder.entries = found.tensors;
	if (!found.tensors || !decoder.space)
		ret = -ENOMEM;
	else if (!copy_tensors(found.tensors, count, &rows, found.file.file_bytes))
		ret = IOSHAPE_E_DAMAGED;
	if (!ret)
		ret = copy_statistics(&decoder, give(&decoder, space - 1));
	if (ret)
		format_statistics_free(&found);
	else
		*statistics = found;
	return ret;
}

void format_statistics_free(struct format_statistics *statistics)
{
	format_index_free(&statistics->index);
	free(statistics->tensors);
	memset(statistics, 0, sizeof(*statistics));
}
