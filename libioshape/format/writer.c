/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Writes an archive into a sink: the records one after the other, then the index, then the
 * directory, as torch writes them. There are no time stamps, so that equal tensors make equal
 * files. Lengths and checksums follow the data, so that the file can be written from front to back
 * in one pass.
 *
 * The archive is a torch zip or a shard file. A shard file is a zip of whole files, each of which
 * begins on a boundary of the storage. Zeros before the member's header align it, because an extra
 * field holds at most 64 KiB and cannot pad to a stripe. Data passes through to the sink, which
 * computes its checksum while it copies.
 */
#define _GNU_SOURCE
#include "format/format.h"
#include "format/layout.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

/* ---- Positions of records -------------------------------------------------------------------- */

/* Position of a record. It follows from the end of the record before, the length of the name, the
 * size and the alignment. */
struct format_extent {
	uint64_t header_offset;     /* offset of the local header */
	uint64_t data_offset;       /* offset of the first byte of data */
	uint64_t descriptor_offset; /* offset of the data descriptor, directly behind the data */
	uint64_t end;               /* offset of the next record's header */
	/* size of the local header with name and extra field: data_offset - header_offset */
	uint32_t header_bytes;
	bool zip64; /* sizes take 8 bytes, in the local extra field and in the descriptor */
};

uint32_t format_default_alignment(uint64_t bytes)
{
	return bytes >= FORMAT_LARGE_RECORD_BYTES ? FORMAT_LARGE_ALIGNMENT : FORMAT_SMALL_ALIGNMENT;
}

/* Begins a position at `cursor`. Sets *end to the end of its header with the least possible
 * padding. */
static int begin_extent(uint64_t cursor, size_t name_bytes, bool zip64,
			struct format_extent *extent, uint64_t *end)
{
	*extent = (struct format_extent){ .zip64 = zip64 };
	if (!name_bytes || name_bytes > FORMAT_MAX_FULL_NAME_BYTES ||
	    cursor > FORMAT_MAX_FILE_BYTES)
		return IOSHAPE_E_LIMIT;
	*end = cursor + FORMAT_LOCAL_BYTES + name_bytes + (zip64 ? ZIP64_LOCAL_FIELD_BYTES : 0) +
	       FORMAT_PADDING_FIELD_BYTES;
	return 0;
}

/* Computes the position of a record. `bytes` may be FORMAT_UNKNOWN_BYTES. Then zip64 is set, and
 * descriptor_offset and end equal data_offset. Returns 0, or IOSHAPE_E_LIMIT if the file would
 * exceed 2^63 bytes or the name is too long. */
static int lay_out_record(uint64_t cursor, size_t name_bytes, uint64_t bytes, uint32_t alignment,
			  struct format_extent *extent)
{
	/* Sizes from 2^32 - 1 on do not fit the old fields of the header, where all ones mean "in
	 * the zip64 field". Offsets do not matter here, because local headers hold none. */
	const bool zip64 = bytes >= UINT32_MAX;
	uint64_t header_end = 0;
	int ret = begin_extent(cursor, name_bytes, zip64, extent, &header_end);

	if (ret)
		return ret;
	extent->header_offset = cursor;
	extent->data_offset = base_round_up(header_end, alignment);
	extent->header_bytes = (uint32_t)(extent->data_offset - cursor);
	extent->descriptor_offset = extent->end = extent->data_offset;
	if (bytes != FORMAT_UNKNOWN_BYTES) {
		/* The check of `bytes` keeps the sum far below 2^64, so it cannot wrap. */
		if (bytes > FORMAT_MAX_FILE_BYTES)
			return IOSHAPE_E_LIMIT;
		extent->descriptor_offset += bytes;
		extent->end = extent->descriptor_offset + format_descriptor_bytes(zip64);
	}
	return extent->end > FORMAT_MAX_FILE_BYTES ? IOSHAPE_E_LIMIT : 0;
}

/*
 * Computes the position of a member of a shard file whose length is not known yet. Its data begins
 * on the next multiple of `alignment`, a number that another rank may have sent. Its
 * header ends there, and zeros fill the gap between `cursor` and header_offset. Returns 0, -EINVAL
 * for an invalid alignment, or IOSHAPE_E_LIMIT if the file would exceed 2^63 bytes or the name is
 * too long.
 */
static int lay_out_member(uint64_t cursor, size_t name_bytes, uint64_t alignment,
			  struct format_extent *extent)
{
	uint64_t end = 0, past;
	int ret;

	if (!alignment || alignment % FORMAT_LARGE_ALIGNMENT ||
	    alignment > FORMAT_MAX_MEMBER_ALIGNMENT)
		return -EINVAL;
	ret = begin_extent(cursor, name_bytes, true, extent, &end);
	if (ret)
		return ret;
	extent->header_bytes = (uint32_t)(end - cursor);
	past = end % alignment; /* `alignment` need not be a power of two */
	extent->data_offset = past ? end + (alignment - past) : end;
	extent->header_offset = extent->data_offset - extent->header_bytes;
	extent->descriptor_offset = extent->end = extent->data_offset;
	return extent->end > FORMAT_MAX_FILE_BYTES ? IOSHAPE_E_LIMIT : 0;
}

/* ---- Encoding -------------------------------------------------------------------------------- */

/* Extends the buffer by `bytes` zeroed bytes and returns them; NULL if there is no memory. */
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

/* Writes the zip64 field of a local header. Like torch, it has the true sizes if they are known, so
 * that a repair tool can use them. */
static void put_zip64_field(uint8_t *at, uint64_t bytes)
{
	if (bytes == FORMAT_UNKNOWN_BYTES)
		bytes = 0;
	base_put_le(at, ZIP64_FIELD_ID, 2);
	base_put_le(at + 2, ZIP64_LOCAL_FIELD_BYTES - FORMAT_FIELD_HEAD_BYTES, 2);
	base_put_le(at + 4, bytes, 8);
	base_put_le(at + 12, bytes, 8);
}

/* Appends the local header, exactly extent->header_bytes bytes. `name` includes the folder. */
static int encode_header(struct base_buffer *out, const char *name,
			 const struct format_extent *extent, uint64_t bytes)
{
	size_t name_bytes = strlen(name);
	size_t fixed = FORMAT_LOCAL_BYTES + name_bytes;
	size_t zip64_bytes = extent->zip64 ? ZIP64_LOCAL_FIELD_BYTES : 0;
	/* The position was computed for this name, so the difference is not negative. */
	size_t padding = extent->header_bytes - fixed - zip64_bytes - FORMAT_PADDING_FIELD_BYTES;
	uint8_t *at = extend(out, extent->header_bytes);

	if (!at)
		return -ENOMEM;
	base_put_le(at, FORMAT_LOCAL_SIGNATURE, 4);
	base_put_le(at + FORMAT_LOCAL_FLAGS, FORMAT_FLAG_UTF8 | FORMAT_FLAG_DESCRIPTOR, 2);
	if (extent->zip64) {
		base_put_le(at + FORMAT_LOCAL_NEEDED, FORMAT_VERSION_ZIP64, 2);
		base_put_le(at + FORMAT_LOCAL_PACKED, FORMAT_IN_ZIP64_32, 4);
		base_put_le(at + FORMAT_LOCAL_SIZE, FORMAT_IN_ZIP64_32, 4);
	}
	base_put_le(at + FORMAT_LOCAL_NAME, name_bytes, 2);
	base_put_le(at + FORMAT_LOCAL_EXTRA, extent->header_bytes - fixed, 2);
	memcpy(at + FORMAT_LOCAL_BYTES, name, name_bytes);
	at += fixed;
	if (extent->zip64)
		put_zip64_field(at, bytes);
	at += zip64_bytes;
	base_put_le(at, FORMAT_PADDING_FIELD_ID, 2);
	base_put_le(at + 2, padding, 2);
	memset(at + FORMAT_PADDING_FIELD_BYTES, 'Z', padding);
	return 0;
}

/* Appends a data descriptor: 16 bytes, or 24 with zip64. */
static int encode_descriptor(struct base_buffer *out, uint32_t crc32, uint64_t bytes, bool zip64)
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

/* Returns the size of the zip64 field of a directory entry. It holds the numbers that do not fit
 * into the old fields: sizes, then offset. Returns 0 if all fit. */
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

/* Appends the zip64 records and the end record. torch always writes the zip64 records, and so does
 * this library. The locator then tells a reader that the numbers are not merely large. */
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

/* Returns the number of bytes that encode_directory() appends, without building them. */
static uint64_t directory_bytes(const struct format_entry *entries, uint64_t count)
{
	return entries_bytes(entries, count) + ZIP64_END_BYTES + ZIP64_LOCATOR_BYTES +
	       FORMAT_END_BYTES;
}

/*
 * Appends the central directory, the zip64 records and the end record, for a directory at `offset`.
 */
static int encode_directory(struct base_buffer *out, const struct format_entry *entries,
			    uint64_t count, uint64_t offset)
{
	size_t before = out->bytes;
	int ret;

	/*
	 * Reserves once, because growing step by step would copy a large directory several times.
	 */
	ret = base_buffer_reserve(out, directory_bytes(entries, count));
	for (uint64_t i = 0; i < count && !ret; i++)
		ret = encode_entry(out, &entries[i]);
	if (!ret)
		ret = encode_end(out, count, out->bytes - before, offset);
	if (ret)
		out->bytes = before;
	return ret;
}

/* ---- The writer ------------------------------------------------------------------------------ */

struct format_writer {
	struct format_sink sink;
	const char *folder; /* prefix of every record's name, with its slash; static */
	uint64_t alignment; /* alignment of the members of a shard file; 0 for a torch zip */
	char *path;         /* path for messages */

	struct base_buffer entry_list;
	struct format_entry
		/* the entries in entry_list, one for each record that has begun; the last may be
		 * open */
		*entries;
	uint64_t count;
	struct base_buffer scratch; /* buffer for headers and descriptors */
	int failed; /* code of the first failure, after which nothing more is written */

	struct format_extent extent; /* position of the open record */
	uint64_t announced; /* announced size of the open record, or FORMAT_UNKNOWN_BYTES */
	uint64_t done;      /* bytes of the open record that have been put */

	/* The following members are for torch zips. */
	/* uint32_t for each full block, and for the last block of each record */
	struct base_buffer checks;
	uint32_t block_crc; /* checksum of the current block, which is not full yet */
	uint64_t block_bytes;
};

/* ---- Creating and freeing -------------------------------------------------------------------- */

static int open_writer(struct format_writer **out, struct format_sink sink, const char *folder,
		       const char *path, struct base_error *error)
{
	struct format_writer *writer = calloc(1, sizeof(*writer));

	*out = NULL;
	if (!writer)
		return base_no_memory(error, "a container writer", sizeof(*writer));
	writer->sink = sink;
	writer->folder = folder;
	writer->path = strdup(path);
	if (!writer->path) {
		format_writer_free(writer);
		return base_no_memory(error, "the directory of an archive", strlen(path));
	}
	*out = writer;
	return 0;
}

int format_writer_new(struct format_writer **out, struct format_sink sink, const char *path,
		      struct base_error *error)
{
	return open_writer(out, sink, FORMAT_FOLDER, path, error);
}

int format_writer_new_bundle(struct format_writer **out, struct format_sink sink, const char *path,
			     uint64_t alignment, struct base_error *error)
{
	int ret = open_writer(out, sink, "", path, error);

	if (!ret)
		(*out)->alignment = alignment;
	return ret;
}

void format_writer_free(struct format_writer *writer)
{
	if (!writer)
		return;
	base_buffer_free(&writer->scratch);
	for (uint64_t i = 0; i < writer->count; i++)
		free(writer->entries[i].name);
	base_buffer_free(&writer->entry_list);
	base_buffer_free(&writer->checks);
	free(writer->path);
	free(writer);
}

const struct format_entry *format_writer_entries(const struct format_writer *writer,
						 uint64_t *count)
{
	*count = writer->count;
	return writer->entries;
}

static struct format_entry *last_entry(const struct format_writer *writer)
{
	return &writer->entries[writer->count - 1];
}

static const char *last_name(const struct format_writer *writer)
{
	return last_entry(writer)->name + strlen(writer->folder);
}

static uint64_t offset_of(const struct format_writer *writer)
{
	return writer->sink.ops->offset(writer->sink.to);
}

/* ---- Output to the sink ---------------------------------------------------------------------- */

/* Records and returns a code, after which only format_writer_free() is allowed. The functions below
 * call it for every failure. */
static int fail(struct format_writer *writer, int code)
{
	writer->failed = code;
	return code;
}

/* Refuses to continue after a failure. */
static int check_failed(const struct format_writer *writer, struct base_error *error)
{
	return writer->failed ? base_fail_with(error, writer->failed, "begin a new file",
					       "cannot continue \"%s\" after an earlier failure",
					       writer->path) :
				0;
}

/* Puts bytes into the sink, which continues `*crc` over them. `crc` may be NULL. */
static int put(struct format_writer *writer, const void *data, size_t bytes, uint32_t *crc,
	       struct base_error *error)
{
	int ret = writer->sink.ops->put(writer->sink.to, data, bytes, crc, error);

	return ret ? fail(writer, ret) : 0;
}

static int put_zeros(struct format_writer *writer, uint64_t bytes, struct base_error *error)
{
	static const uint8_t zeros[16 * KIB];
	uint64_t piece;
	int ret = 0;

	for (; !ret && bytes; bytes -= piece) {
		piece = MIN(bytes, sizeof(zeros));
		ret = put(writer, zeros, piece, NULL, error);
	}
	return ret;
}

/* ---- Beginning a record ---------------------------------------------------------------------- */

static int add_entry(struct format_writer *writer, const char *name)
{
	const size_t folder_bytes = strlen(writer->folder), name_bytes = strlen(name);
	struct format_entry entry = {
		.name = malloc(folder_bytes + name_bytes + 1),
		.name_bytes = (uint32_t)(folder_bytes + name_bytes),
		.header_offset = writer->extent.header_offset,
		.data_offset = writer->extent.data_offset,
	};
	void *entries;

	if (!entry.name)
		return -ENOMEM;
	if (base_buffer_append(&writer->entry_list, &entry, sizeof(entry))) {
		free(entry.name);
		return -ENOMEM;
	}
	entries = writer->entry_list.data;
	writer->entries = entries;
	writer->count++;
	memcpy(entry.name, writer->folder, folder_bytes);
	memcpy(entry.name + folder_bytes, name, name_bytes + 1);
	return 0;
}

static int find_extent(struct format_writer *writer, const char *name, uint64_t bytes,
		       uint32_t alignment)
{
	const size_t name_bytes = strlen(writer->folder) + strlen(name);

	if (writer->alignment)
		return lay_out_member(offset_of(writer), name_bytes, writer->alignment,
				      &writer->extent);
	return lay_out_record(offset_of(writer), name_bytes, bytes,
			      alignment ? alignment : format_default_alignment(bytes),
			      &writer->extent);
}

int format_writer_begin(struct format_writer *writer, const char *name, uint64_t bytes,
			uint32_t alignment, struct base_error *error)
{
	int ret = check_failed(writer, error);

	if (ret)
		return ret;
	ret = find_extent(writer, name, bytes, alignment);
	if (ret)
		return base_fail(error, ret, "record \"%s\" of %s does not fit into \"%s\"",
				 FORMAT_SHOWN(name), BASE_SIZE(bytes), writer->path);
	writer->announced = bytes;
	writer->done = 0;
	writer->block_crc = 0;
	writer->block_bytes = 0;
	writer->scratch.bytes = 0;
	ret = add_entry(writer, name);
	if (!ret)
		ret = encode_header(&writer->scratch, last_entry(writer)->name, &writer->extent,
				    bytes);
	if (ret) {
		base_fail(error, ret, "cannot begin record \"%s\" of \"%s\"", FORMAT_SHOWN(name),
			  writer->path);
		return fail(writer, ret);
	}
	ret = put_zeros(writer, writer->extent.header_offset - offset_of(writer), error);
	return ret ? ret : put(writer, writer->scratch.data, writer->scratch.bytes, NULL, error);
}

/* ---- The bytes of a record ------------------------------------------------------------------- */

/* Ends a block that is full, or in which the record ends. */
static int end_block(struct format_writer *writer, struct base_error *error)
{
	struct format_entry *entry = last_entry(writer);

	if (base_buffer_append(&writer->checks, &writer->block_crc, sizeof(writer->block_crc))) {
		base_no_memory(error, "checksums of blocks", writer->checks.bytes);
		return fail(writer, -ENOMEM);
	}
	/* Combining the checksums of the blocks avoids a second pass over the bytes. */
	if (writer->done == writer->block_bytes)
		entry->crc32 = writer->block_crc;
	else
		entry->crc32 =
			base_crc32_combine(entry->crc32, writer->block_crc, writer->block_bytes);
	writer->block_crc = 0;
	writer->block_bytes = 0;
	return 0;
}

/* Records that bytes of the record were put. */
static int add_to_block(struct format_writer *writer, size_t bytes, struct base_error *error)
{
	writer->block_bytes += bytes;
	writer->done += bytes;
	return writer->block_bytes < FORMAT_CHECK_BYTES ? 0 : end_block(writer, error);
}

static int put_blocks(struct format_writer *writer, const uint8_t *data, size_t bytes,
		      struct base_error *error)
{
	size_t piece;
	int ret;

	for (; bytes; data += piece, bytes -= piece) {
		piece = MIN(bytes, FORMAT_CHECK_BYTES - writer->block_bytes);
		ret = put(writer, data, piece, &writer->block_crc, error);
		if (!ret)
			ret = add_to_block(writer, piece, error);
		if (ret)
			return ret;
	}
	return 0;
}

/* Appends bytes to the open member and continues its checksum, and `*crc` if that is not NULL. Only
 * short pieces are read twice; for long ones the checksum is combined. */
static int put_in_member(struct format_writer *writer, const void *data, size_t bytes,
			 uint32_t *crc, struct base_error *error)
{
	struct format_entry *entry = last_entry(writer);
	uint32_t part = 0;
	int ret;

	writer->done += bytes;
	if (!crc)
		return put(writer, data, bytes, &entry->crc32, error);
	if (bytes <= BASE_CRC32_TWICE_BYTES) {
		entry->crc32 = base_crc32(entry->crc32, data, bytes);
		return put(writer, data, bytes, crc, error);
	}
	ret = put(writer, data, bytes, &part, error);
	*crc = base_crc32_combine(*crc, part, bytes);
	entry->crc32 = base_crc32_combine(entry->crc32, part, bytes);
	return ret;
}

int format_writer_put(struct format_writer *writer, const void *data, size_t bytes,
		      struct base_error *error)
{
	int ret = check_failed(writer, error);

	if (ret || !bytes)
		return ret;
	return writer->alignment ? put_in_member(writer, data, bytes, NULL, error) :
				   put_blocks(writer, data, bytes, error);
}

int format_writer_put_summed(struct format_writer *writer, const void *data, size_t bytes,
			     uint32_t crc32, struct base_error *error)
{
	struct format_entry *entry;
	int ret = check_failed(writer, error);

	if (ret)
		return ret;
	/* The checksum of a block that ends within these bytes is not known. */
	if (!writer->alignment && bytes > FORMAT_CHECK_BYTES - writer->block_bytes)
		return put_blocks(writer, data, bytes, error);
	ret = writer->sink.ops->put_summed(writer->sink.to, data, bytes, crc32, error);
	if (ret)
		return fail(writer, ret);
	if (!writer->alignment) {
		writer->block_crc = base_crc32_combine(writer->block_crc, crc32, bytes);
		return add_to_block(writer, bytes, error);
	}
	entry = last_entry(writer);
	entry->crc32 = base_crc32_combine(entry->crc32, crc32, bytes);
	writer->done += bytes;
	return 0;
}

/* ---- The end of a record --------------------------------------------------------------------- */

int format_writer_end(struct format_writer *writer, struct base_error *error)
{
	struct format_entry *entry;
	int ret = check_failed(writer, error);

	if (ret)
		return ret;
	/* The header has the announced size already. */
	if (writer->announced != FORMAT_UNKNOWN_BYTES && writer->done != writer->announced) {
		base_fail_reason(
			error, -EIO,
			"record \"%s\" of \"%s\" was announced with %llu bytes and got %llu",
			FORMAT_SHOWN(last_name(writer)), writer->path,
			(unsigned long long)writer->announced, (unsigned long long)writer->done);
		return fail(writer, -EIO);
	}
	if (writer->block_bytes)
		ret = end_block(writer, error);
	if (ret)
		return ret;
	entry = last_entry(writer);
	entry->bytes = writer->done;
	writer->scratch.bytes = 0;
	if (encode_descriptor(&writer->scratch, entry->crc32, entry->bytes, writer->extent.zip64)) {
		base_no_memory(error, "a data descriptor", writer->scratch.allocated);
		return fail(writer, -ENOMEM);
	}
	return put(writer, writer->scratch.data, writer->scratch.bytes, NULL, error);
}

/* ---- The end of the archive ------------------------------------------------------------------ */

static int encode_index(struct format_writer *writer, const struct format_index *given,
			struct base_buffer *bytes)
{
	struct format_index index = { .has_table = false };
	void *checks = writer->checks.data;
	uint64_t *offsets;
	int ret;

	offsets = reallocarray(NULL, MAX(writer->count, 1), sizeof(*offsets));
	if (!offsets)
		return -ENOMEM;
	for (uint64_t i = 0; i < writer->count; i++)
		offsets[i] = writer->entries[i].data_offset;
	if (given)
		index = *given;
	index.check_bytes = FORMAT_CHECK_BYTES;
	index.directory_crc32 =
		format_directory_crc32(writer->entries, writer->count, strlen(writer->folder));
	index.records = writer->count;
	index.data_offsets = offsets;
	index.check_count = writer->checks.bytes / sizeof(*index.checks);
	index.checks = checks;
	ret = format_index_encode(bytes, &index);
	free(offsets);
	return ret;
}

static int write_index(struct format_writer *writer, const struct format_index *given,
		       struct base_error *error)
{
	struct base_buffer bytes = { 0 };
	int ret;

	ret = encode_index(writer, given, &bytes);
	if (ret) {
		base_fail(error, ret, "cannot build the index of \"%s\"", writer->path);
		goto out;
	}
	ret = format_writer_begin(writer, FORMAT_INDEX_RECORD, bytes.bytes, 0, error);
	if (!ret)
		ret = format_writer_put(writer, bytes.data, bytes.bytes, error);
	if (!ret)
		ret = format_writer_end(writer, error);
out:
	base_buffer_free(&bytes);
	return ret;
}

static int write_directory(struct format_writer *writer, struct base_error *error)
{
	struct base_buffer bytes = { 0 };
	int ret;

	/* The library must not write a file that it could not read again. */
	if (directory_bytes(writer->entries, writer->count) > FORMAT_MAX_DIRECTORY_BYTES)
		return base_fail_reason_with(error, IOSHAPE_E_LIMIT, "use fewer or shorter names",
					     "the directory of \"%s\" would exceed %s",
					     writer->path, BASE_SIZE(FORMAT_MAX_DIRECTORY_BYTES));
	ret = encode_directory(&bytes, writer->entries, writer->count, offset_of(writer));
	if (ret)
		base_fail(error, ret, "cannot build the directory of \"%s\"", writer->path);
	else
		ret = put(writer, bytes.data, bytes.bytes, NULL, error);
	base_buffer_free(&bytes);
	return ret;
}

int format_writer_finish(struct format_writer *writer, const struct format_index *index,
			 struct base_error *error)
{
	int ret = check_failed(writer, error);

	if (ret)
		return ret;
	if (!writer->alignment)
		ret = write_index(writer, index, error);
	if (!ret)
		ret = write_directory(writer, error);
	return ret ? fail(writer, ret) : 0;
}

/* ---- Sinks ----------------------------------------------------------------------------------- */

static uint64_t file_offset(void *to)
{
	return io_writer_offset(to);
}

static int file_put(void *to, const void *data, size_t bytes, uint32_t *crc,
		    struct base_error *error)
{
	return io_writer_put(to, data, bytes, crc, error);
}

static int file_put_summed(void *to, const void *data, size_t bytes, uint32_t crc32,
			   struct base_error *error)
{
	return io_writer_put_summed(to, data, bytes, crc32, error);
}

struct format_sink format_sink_of_file(struct io_writer *file)
{
	static const struct format_sink_ops ops = { file_offset, file_put, file_put_summed };

	return (struct format_sink){ &ops, file };
}

static uint64_t member_offset(void *to)
{
	const struct format_writer *bundle = to;

	return bundle->done;
}

static int member_put(void *to, const void *data, size_t bytes, uint32_t *crc,
		      struct base_error *error)
{
	return put_in_member(to, data, bytes, crc, error);
}

static int member_put_summed(void *to, const void *data, size_t bytes, uint32_t crc32,
			     struct base_error *error)
{
	return format_writer_put_summed(to, data, bytes, crc32, error);
}

struct format_sink format_sink_of_member(struct format_writer *bundle)
{
	static const struct format_sink_ops ops = { member_offset, member_put, member_put_summed };

	return (struct format_sink){ &ops, bundle };
}

/* ---- Length of an archive -------------------------------------------------------------------- */

static int add_extent(struct format_length *length, size_t name_bytes, uint64_t bytes,
		      const struct format_extent *extent)
{
	const struct format_entry entry = {
		.name_bytes = (uint32_t)name_bytes,
		.bytes = bytes,
		.header_offset = extent->header_offset,
	};

	length->directory_bytes += entries_bytes(&entry, 1);
	length->records++;
	length->checks += (bytes + FORMAT_CHECK_BYTES - 1) / FORMAT_CHECK_BYTES;
	length->cursor = extent->data_offset + bytes + format_descriptor_bytes(extent->zip64);
	return length->cursor > FORMAT_MAX_FILE_BYTES ? IOSHAPE_E_LIMIT : 0;
}

int format_length_add(struct format_length *length, size_t name_bytes, uint64_t bytes,
		      uint32_t alignment)
{
	struct format_extent extent;
	int ret = lay_out_record(length->cursor, name_bytes, bytes,
				 alignment ? alignment : format_default_alignment(bytes), &extent);

	return ret ? ret : add_extent(length, name_bytes, bytes, &extent);
}

int format_length_add_member(struct format_length *length, size_t name_bytes, uint64_t bytes,
			     uint64_t alignment)
{
	struct format_extent extent;
	int ret = lay_out_member(length->cursor, name_bytes, alignment, &extent);

	return ret ? ret : add_extent(length, name_bytes, bytes, &extent);
}

int format_length_add_index(struct format_length *length, const struct format_index *given)
{
	struct base_buffer rest = { 0 };
	struct format_index index = *given;
	uint64_t bytes;
	int ret;

	/* The part of the index that does not grow with the records. */
	index.records = index.check_count = 0;
	ret = format_index_encode(&rest, &index);
	bytes = rest.bytes + length->records * sizeof(*index.data_offsets) +
		base_round_up(length->checks * sizeof(*index.checks), sizeof(uint64_t)) +
		(index.has_statistics ? length->records * FORMAT_STATISTICS_BYTES : 0);
	base_buffer_free(&rest);
	return ret ? ret :
		     format_length_add(length, strlen(FORMAT_FOLDER) + strlen(FORMAT_INDEX_RECORD),
				       bytes, 0);
}

uint64_t format_length_of(const struct format_length *length)
{
	return length->cursor + length->directory_bytes + directory_bytes(NULL, 0);
}
