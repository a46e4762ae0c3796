/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Where records lie in an archive, and the bytes around them, as torch writes them: no time stamps,
 * so that equal tensors make equal files; lengths and checksum behind the data, so that the file is
 * written from front to back in one go. Pure.
 */
#include "format/format.h"
#include "format/layout.h"

#include <errno.h>
#include <string.h>

/* ---- Places ---------------------------------------------------------------------------------- */

uint32_t format_default_alignment(uint64_t bytes)
{
	return bytes >= FORMAT_LARGE_RECORD_BYTES ? FORMAT_LARGE_ALIGNMENT : FORMAT_SMALL_ALIGNMENT;
}

/* A header at `cursor` with no more padding than it must have. `end` is where it ends. */
static int begin_place(uint64_t cursor, size_t name_bytes, bool zip64, struct format_place *place,
		       uint64_t *end)
{
	*place = (struct format_place){ .zip64 = zip64 };
	if (!name_bytes || name_bytes > FORMAT_MAX_FULL_NAME_BYTES ||
	    cursor > FORMAT_MAX_FILE_BYTES)
		return IOSHAPE_E_LIMIT;
	*end = cursor + FORMAT_LOCAL_BYTES + name_bytes + (zip64 ? ZIP64_LOCAL_FIELD_BYTES : 0) +
	       FORMAT_PADDING_FIELD_BYTES;
	return 0;
}

int format_place_record(uint64_t cursor, size_t name_bytes, uint64_t bytes, uint32_t alignment,
			struct format_place *place)
{
	/*
	 * Sizes from 2^32 - 1 on do not fit the header's old fields, since all ones stand for "look
	 * in the zip64 field". Offsets do not matter here: local headers hold none.
	 */
	const bool zip64 = bytes >= UINT32_MAX;
	uint64_t header_end = 0;
	int ret;

	if (!alignment || alignment & (alignment - 1) || alignment > FORMAT_LARGE_ALIGNMENT)
		return -EINVAL;
	ret = begin_place(cursor, name_bytes, zip64, place, &header_end);
	if (ret)
		return ret;
	place->header_offset = cursor;
	place->data_offset = base_round_up(header_end, alignment);
	place->header_bytes = (uint32_t)(place->data_offset - cursor);
	place->descriptor_offset = place->end = place->data_offset;
	if (bytes != FORMAT_UNKNOWN_BYTES) {
		/* Written so that no sum can wrap: the left side is far below 2^64. */
		if (bytes > FORMAT_MAX_FILE_BYTES)
			return IOSHAPE_E_LIMIT;
		place->descriptor_offset += bytes;
		place->end = place->descriptor_offset + format_descriptor_bytes(zip64);
	}
	return place->end > FORMAT_MAX_FILE_BYTES ? IOSHAPE_E_LIMIT : 0;
}

int format_place_member(uint64_t cursor, size_t name_bytes, uint64_t alignment,
			struct format_place *place)
{
	uint64_t end = 0, past;
	int ret;

	if (!alignment || alignment % FORMAT_LARGE_ALIGNMENT ||
	    alignment > FORMAT_MAX_MEMBER_ALIGNMENT)
		return -EINVAL;
	ret = begin_place(cursor, name_bytes, true, place, &end);
	if (ret)
		return ret;
	place->header_bytes = (uint32_t)(end - cursor);
	past = end % alignment; /* which need not be a power of two */
	place->data_offset = past ? end + (alignment - past) : end;
	place->header_offset = place->data_offset - place->header_bytes;
	place->descriptor_offset = place->end = place->data_offset;
	return place->end > FORMAT_MAX_FILE_BYTES ? IOSHAPE_E_LIMIT : 0;
}

/* ---- Bytes ----------------------------------------------------------------------------------- */

/* Room for `bytes` more, zeroed and counted. NULL without memory. */
static uint8_t *extend(struct base_buffer *out, size_t bytes)
{
	uint8_t *at;

	if (base_buffer_reserve(out, bytes))
		return NULL;
	at = out->data + out->bytes;
	memset(at, 0, bytes);
	out->bytes += bytes;
	return at;
}

/* Like torch: true sizes in the zip64 field as far as they are known, so that a repair tool can use
 * them. */
static void put_zip64_field(uint8_t *at, uint64_t bytes)
{
	if (bytes == FORMAT_UNKNOWN_BYTES)
		bytes = 0;
	base_put_le(at, ZIP64_FIELD_ID, 2);
	base_put_le(at + 2, ZIP64_LOCAL_FIELD_BYTES - FORMAT_FIELD_HEAD_BYTES, 2);
	base_put_le(at + 4, bytes, 8);
	base_put_le(at + 12, bytes, 8);
}

int format_encode_header(struct base_buffer *out, const char *name,
			 const struct format_place *place, uint64_t bytes)
{
	size_t name_bytes = strlen(name);
	size_t fixed = FORMAT_LOCAL_BYTES + name_bytes;
	size_t zip64_bytes = place->zip64 ? ZIP64_LOCAL_FIELD_BYTES : 0;
	/* The place was planned for this name: it has room for the rest. */
	size_t padding = place->header_bytes - fixed - zip64_bytes - FORMAT_PADDING_FIELD_BYTES;
	uint8_t *at = extend(out, place->header_bytes);

	if (!at)
		return -ENOMEM;
	base_put_le(at, FORMAT_LOCAL_SIGNATURE, 4);
	base_put_le(at + FORMAT_LOCAL_FLAGS, FORMAT_FLAG_UTF8 | FORMAT_FLAG_DESCRIPTOR, 2);
	if (place->zip64) {
		base_put_le(at + FORMAT_LOCAL_NEEDED, FORMAT_VERSION_ZIP64, 2);
		base_put_le(at + FORMAT_LOCAL_PACKED, FORMAT_IN_ZIP64_32, 4);
		base_put_le(at + FORMAT_LOCAL_SIZE, FORMAT_IN_ZIP64_32, 4);
	}
	base_put_le(at + FORMAT_LOCAL_NAME, name_bytes, 2);
	base_put_le(at + FORMAT_LOCAL_EXTRA, place->header_bytes - fixed, 2);
	memcpy(at + FORMAT_LOCAL_BYTES, name, name_bytes);
	at += fixed;
	if (place->zip64)
		put_zip64_field(at, bytes);
	at += zip64_bytes;
	base_put_le(at, FORMAT_PADDING_FIELD_ID, 2);
	base_put_le(at + 2, padding, 2);
	memset(at + FORMAT_PADDING_FIELD_BYTES, 'Z', padding);
	return 0;
}

int format_encode_descriptor(struct base_buffer *out, uint32_t crc32, uint64_t bytes, bool zip64)
{
	unsigned width = zip64 ? 8 : 4;
	uint8_t *at = extend(out, format_descriptor_bytes(zip64));

	if (!at)
		return -ENOMEM;
	base_put_le(at, FORMAT_DESCRIPTOR_SIGNATURE, 4);
	base_put_le(at + 4, crc32, 4);
	base_put_le(at + 8, bytes, width);
	base_put_le(at + 8 + width, bytes, width);
	return 0;
}

/* The zip64 field of a directory entry: the numbers that do not fit, in this order. 0 if all do. */
static unsigned central_field_bytes(const struct format_entry *entry)
{
	unsigned numbers = 0;

	if (entry->bytes >= FORMAT_IN_ZIP64_32)
		numbers += 2; /* both sizes */
	if (entry->header_offset >= FORMAT_IN_ZIP64_32)
		numbers++;
	return numbers ? FORMAT_FIELD_HEAD_BYTES + 8 * numbers : 0;
}

static void put_central_field(uint8_t *at, const struct format_entry *entry, unsigned bytes)
{
	base_put_le(at, ZIP64_FIELD_ID, 2);
	base_put_le(at + 2, bytes - FORMAT_FIELD_HEAD_BYTES, 2);
	at += FORMAT_FIELD_HEAD_BYTES;
	if (entry->bytes >= FORMAT_IN_ZIP64_32) {
		base_put_le(at, entry->bytes, 8);
		base_put_le(at + 8, entry->bytes, 8);
		at += 16;
	}
	if (entry->header_offset >= FORMAT_IN_ZIP64_32)
		base_put_le(at, entry->header_offset, 8);
}

static int encode_entry(struct base_buffer *out, const struct format_entry *entry)
{
	unsigned field = central_field_bytes(entry);
	uint8_t *at = extend(out, FORMAT_CENTRAL_BYTES + entry->name_bytes + field);

	if (!at)
		return -ENOMEM;
	base_put_le(at, FORMAT_CENTRAL_SIGNATURE, 4);
	base_put_le(at + FORMAT_CENTRAL_NEEDED, field ? FORMAT_VERSION_ZIP64 : 0, 2);
	base_put_le(at + FORMAT_CENTRAL_FLAGS, FORMAT_FLAG_UTF8 | FORMAT_FLAG_DESCRIPTOR, 2);
	base_put_le(at + FORMAT_CENTRAL_CRC, entry->crc32, 4);
	base_put_le(at + FORMAT_CENTRAL_PACKED, MIN(entry->bytes, FORMAT_IN_ZIP64_32), 4);
	base_put_le(at + FORMAT_CENTRAL_SIZE, MIN(entry->bytes, FORMAT_IN_ZIP64_32), 4);
	base_put_le(at + FORMAT_CENTRAL_NAME, entry->name_bytes, 2);
	base_put_le(at + FORMAT_CENTRAL_EXTRA, field, 2);
	base_put_le(at + FORMAT_CENTRAL_OFFSET, MIN(entry->header_offset, FORMAT_IN_ZIP64_32), 4);
	at += FORMAT_CENTRAL_BYTES;
	memcpy(at, entry->name, entry->name_bytes);
	if (field)
		put_central_field(at + entry->name_bytes, entry, field);
	return 0;
}

/*
 * Torch writes the zip64 records whether they are needed or not. So do we: a reader then always
 * knows from the locator that the numbers are not merely large.
 */
static int encode_end(struct base_buffer *out, uint64_t count, uint64_t bytes, uint64_t offset)
{
	uint8_t *at = extend(out, ZIP64_END_BYTES + ZIP64_LOCATOR_BYTES + FORMAT_END_BYTES);

	if (!at)
		return -ENOMEM;
	base_put_le(at, ZIP64_END_SIGNATURE, 4);
	base_put_le(at + ZIP64_END_LENGTH, ZIP64_END_BYTES - ZIP64_END_LENGTH_STARTS, 8);
	base_put_le(at + ZIP64_END_MADE_BY, FORMAT_MADE_BY_UNIX_30, 2);
	base_put_le(at + ZIP64_END_NEEDED, FORMAT_VERSION_ZIP64, 2);
	base_put_le(at + ZIP64_END_DISK_COUNT, count, 8);
	base_put_le(at + ZIP64_END_COUNT, count, 8);
	base_put_le(at + ZIP64_END_SIZE, bytes, 8);
	base_put_le(at + ZIP64_END_OFFSET, offset, 8);

	at += ZIP64_END_BYTES;
	base_put_le(at, ZIP64_LOCATOR_SIGNATURE, 4);
	base_put_le(at + ZIP64_LOCATOR_OFFSET, offset + bytes, 8);
	base_put_le(at + ZIP64_LOCATOR_DISKS, 1, 4);

	at += ZIP64_LOCATOR_BYTES;
	base_put_le(at, FORMAT_END_SIGNATURE, 4);
	base_put_le(at + FORMAT_END_DISK_COUNT, MIN(count, FORMAT_IN_ZIP64_16), 2);
	base_put_le(at + FORMAT_END_COUNT, MIN(count, FORMAT_IN_ZIP64_16), 2);
	base_put_le(at + FORMAT_END_SIZE, MIN(bytes, FORMAT_IN_ZIP64_32), 4);
	base_put_le(at + FORMAT_END_OFFSET, MIN(offset, FORMAT_IN_ZIP64_32), 4);
	return 0;
}

static uint64_t entries_bytes(const struct format_entry *entries, uint64_t count)
{
	uint64_t bytes = 0;

	for (uint64_t i = 0; i < count; i++)
		bytes += FORMAT_CENTRAL_BYTES + entries[i].name_bytes +
			 central_field_bytes(&entries[i]);
	return bytes;
}

uint64_t format_directory_bytes(const struct format_entry *entries, uint64_t count)
{
	return entries_bytes(entries, count) + ZIP64_END_BYTES + ZIP64_LOCATOR_BYTES +
	       FORMAT_END_BYTES;
}

int format_encode_directory(struct base_buffer *out, const struct format_entry *entries,
			    uint64_t count, uint64_t offset)
{
	size_t before = out->bytes;
	int ret;

	/* Once for all: growing step by step would copy a large directory several times. */
	ret = base_buffer_reserve(out, format_directory_bytes(entries, count));
	for (uint64_t i = 0; i < count && !ret; i++)
		ret = encode_entry(out, &entries[i]);
	if (!ret)
		ret = encode_end(out, count, out->bytes - before, offset);
	if (ret)
		out->bytes = before;
	return ret;
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

/* ---- How long an archive will be ------------------------------------------------------------- */

static void add_entry(struct format_length *length, size_t name_bytes, uint64_t bytes,
		      const struct format_place *place)
{
	const struct format_entry entry = {
		.name_bytes = (uint32_t)name_bytes,
		.bytes = bytes,
		.header_offset = place->header_offset,
	};

	length->directory_bytes +=
		format_directory_bytes(&entry, 1) - format_directory_bytes(NULL, 0);
	length->records++;
	length->checks += (bytes + FORMAT_CHECK_BYTES - 1) / FORMAT_CHECK_BYTES;
}

int format_length_add(struct format_length *length, size_t name_bytes, uint64_t bytes,
		      uint32_t alignment)
{
	struct format_place place;
	int ret = format_place_record(length->cursor, name_bytes, bytes,
				      alignment ? alignment : format_default_alignment(bytes),
				      &place);

	if (ret)
		return ret;
	add_entry(length, name_bytes, bytes, &place);
	length->cursor = place.end;
	return 0;
}

int format_length_add_member(struct format_length *length, size_t name_bytes, uint64_t bytes,
			     uint64_t alignment)
{
	struct format_place place;
	int ret = format_place_member(length->cursor, name_bytes, alignment, &place);

	if (ret)
		return ret;
	add_entry(length, name_bytes, bytes, &place);
	length->cursor = place.data_offset + bytes + format_descriptor_bytes(true);
	return length->cursor > FORMAT_MAX_FILE_BYTES ? IOSHAPE_E_LIMIT : 0;
}

int format_length_add_index(struct format_length *length, const struct format_index *given)
{
	struct base_buffer rest = { 0 };
	struct format_index index = *given;
	uint64_t bytes;
	int ret;

	/* All but what grows with the records. */
	index.records = index.check_count = 0;
	ret = format_index_encode(&rest, &index);
	bytes = rest.bytes + length->records * sizeof(*index.data_offsets) +
		base_round_up(length->checks * sizeof(*index.checks), sizeof(uint64_t));
	base_buffer_free(&rest);
	return ret ? ret :
		     format_length_add(length, strlen(FORMAT_FOLDER) + strlen(FORMAT_INDEX_RECORD),
				       bytes, 0);
}

uint64_t format_length_of(const struct format_length *length)
{
	return length->cursor + length->directory_bytes + format_directory_bytes(NULL, 0);
}
