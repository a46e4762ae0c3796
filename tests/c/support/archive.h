/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Zip archives in memory, made with the library's pure encoders. An archive is a list of extents
 * with zeros between them. Data that is NULL is all zeros and takes no memory, so records may be of
 * any size.
 */
#ifndef TESTS_SUPPORT_ARCHIVE_H
#define TESTS_SUPPORT_ARCHIVE_H

#include "format/writer.c"

#include <check.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#define ARCHIVE_MOST_RECORDS 128u

struct archive_extent {
	uint64_t offset;
	uint64_t bytes;
	uint8_t *data; /* owned */
};

struct archive {
	struct archive_extent extents[2 * ARCHIVE_MOST_RECORDS + 1]; /* in ascending order */
	size_t extent_count;
	struct format_entry entries[ARCHIVE_MOST_RECORDS];
	uint64_t count;
	uint64_t cursor;
	uint64_t bytes; /* size of the archive; set by archive_finish() */
};

static inline void archive_put(struct archive *archive, uint64_t offset, struct base_buffer *bytes)
{
	ck_assert_uint_lt(archive->extent_count, ARRAY_LENGTH(archive->extents));
	archive->extents[archive->extent_count++] =
		(struct archive_extent){ offset, bytes->bytes, bytes->data };
	memset(bytes, 0, sizeof(*bytes));
}

/*
 * Returns the checksum of zeros. Doubles the length with each step, so that a terabyte takes no
 * time.
 */
static inline uint32_t archive_crc_of_zeros(uint64_t bytes)
{
	uint32_t result = 0, power = base_crc32(0, "", 1);

	for (uint64_t length = 1; bytes; bytes >>= 1, length *= 2) {
		if (bytes & 1)
			result = base_crc32_combine(result, power, length);
		power = base_crc32_combine(power, power, length);
	}
	return result;
}

/*
 * Appends a record. `name` includes the folder. With `unknown` the header is written as if the
 * length were not known yet.
 */
static inline void archive_add(struct archive *archive, const char *name, const void *data,
			       uint64_t bytes, uint32_t alignment, bool unknown)
{
	uint64_t announced = unknown ? FORMAT_UNKNOWN_BYTES : bytes;
	struct base_buffer header = { 0 }, tail = { 0 };
	struct format_entry *entry;
	struct format_extent extent;

	ck_assert_uint_lt(archive->count, ARCHIVE_MOST_RECORDS);
	entry = &archive->entries[archive->count++];
	ck_assert_int_eq(
		lay_out_record(archive->cursor, strlen(name), announced, alignment, &extent), 0);
	entry->name = strdup(name);
	entry->name_bytes = (uint32_t)strlen(name);
	entry->bytes = bytes;
	entry->crc32 = data ? base_crc32(0, data, bytes) : archive_crc_of_zeros(bytes);
	entry->header_offset = extent.header_offset;
	entry->data_offset = extent.data_offset;

	ck_assert_int_eq(encode_header(&header, name, &extent, announced), 0);
	ck_assert_uint_eq(header.bytes, extent.header_bytes);
	if (data)
		ck_assert_int_eq(base_buffer_append(&header, data, bytes), 0);
	archive_put(archive, extent.header_offset, &header);
	ck_assert_int_eq(encode_descriptor(&tail, entry->crc32, bytes, extent.zip64), 0);
	archive->cursor = extent.data_offset + bytes + tail.bytes;
	if (!unknown)
		ck_assert_uint_eq(archive->cursor, extent.end);
	archive_put(archive, extent.data_offset + bytes, &tail);
}

static inline void archive_finish(struct archive *archive)
{
	struct base_buffer directory = { 0 };

	ck_assert_int_eq(
		encode_directory(&directory, archive->entries, archive->count, archive->cursor), 0);
	ck_assert_uint_eq(directory.bytes, directory_bytes(archive->entries, archive->count));
	archive->bytes = archive->cursor + directory.bytes;
	archive_put(archive, archive->cursor, &directory);
}

/* Implements format_fetch_fn for a struct archive. */
static inline int archive_fetch(void *user, uint64_t offset, void *into, size_t bytes)
{
	const struct archive *archive = user;

	/* A parser must never ask for bytes outside the archive. */
	ck_assert_uint_le(offset, archive->bytes);
	ck_assert_uint_le(bytes, archive->bytes - offset);
	memset(into, 0, bytes);
	for (size_t i = 0; i < archive->extent_count; i++) {
		const struct archive_extent *extent = &archive->extents[i];
		uint64_t begin = MAX(offset, extent->offset);
		uint64_t end = MIN(offset + bytes, extent->offset + extent->bytes);

		if (begin < end)
			memcpy((uint8_t *)into + (begin - offset),
			       extent->data + (begin - extent->offset), end - begin);
	}
	return 0;
}

/* Returns the whole archive in one buffer, to be freed. For small archives only. */
static inline uint8_t *archive_flat(const struct archive *archive)
{
	uint8_t *flat = malloc(archive->bytes);

	ck_assert_ptr_nonnull(flat);
	archive_fetch((void *)(uintptr_t)archive, 0, flat, archive->bytes);
	return flat;
}

static inline void archive_free(struct archive *archive)
{
	for (size_t i = 0; i < archive->extent_count; i++)
		free(archive->extents[i].data);
	for (uint64_t i = 0; i < archive->count; i++)
		free(archive->entries[i].name);
	memset(archive, 0, sizeof(*archive));
}

/* ---- Archives as plain bytes ----------------------------------------------------------------- */

struct archive_bytes {
	const uint8_t *data;
	size_t bytes;
};

/* Implements format_fetch_fn for a struct archive_bytes. */
static inline int archive_bytes_fetch(void *user, uint64_t offset, void *into, size_t bytes)
{
	const struct archive_bytes *archive = user;

	ck_assert_uint_le(offset, archive->bytes);
	ck_assert_uint_le(bytes, archive->bytes - offset);
	memcpy(into, archive->data + offset, bytes);
	return 0;
}

#endif
