/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A torch zip on its way into a sink: records one after the other, then the index, then the
 * directory. The bytes themselves pass through to the sink, which checksums them while it copies.
 */
#define _GNU_SOURCE
#include "zip/entries.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#define FOLDER_BYTES (sizeof(ZIP_FOLDER) - 1)

struct zip_writer {
	struct zip_sink sink; /* without ops until it is ours */
	char *path;

	struct zip_entries entries; /* the last one may be open */
	uint32_t *checks; /* of full blocks, and of the last one of each record that has ended */
	uint64_t check_count, check_room;

	bool open;          /* between begin and end */
	uint64_t announced; /* bytes of the open record, or IOSHAPE_UNKNOWN_BYTES */
	struct zip_place place;
	uint64_t done;      /* bytes of the open record that have been put */
	uint32_t block_crc; /* of the block that is not full yet */
	uint64_t block_bytes;

	uint64_t payload_bytes;
	struct base_buffer scratch; /* headers and descriptors */
	int failed;                 /* the code after which nothing more is written */
	bool finished;              /* nothing may follow a directory */
};

/* ---- Life ------------------------------------------------------------------------------------ */

int zip_writer_new(struct zip_writer **out, struct zip_sink sink, const char *path,
		   struct base_error *error)
{
	struct zip_writer *writer;

	*out = NULL;
	writer = calloc(1, sizeof(*writer));
	if (!writer)
		return base_no_memory(error, "a container writer", sizeof(*writer));
	writer->path = strdup(path);
	if (!writer->path) {
		zip_writer_free(writer);
		return base_no_memory(error, "a container writer", sizeof(*writer));
	}
	writer->sink = sink;
	*out = writer;
	return 0;
}

void zip_writer_free(struct zip_writer *writer)
{
	if (!writer)
		return;
	if (writer->sink.ops)
		writer->sink.ops->free(writer->sink.to);
	base_buffer_free(&writer->scratch);
	free(writer->checks);
	zip_entries_free(&writer->entries);
	free(writer->path);
	free(writer);
}

uint64_t zip_writer_payload_bytes(const struct zip_writer *writer)
{
	return writer->payload_bytes;
}

/* After this only zip_writer_free() makes sense. */
static int fail_for_good(struct zip_writer *writer, int code)
{
	if (!writer->failed)
		writer->failed = code;
	return code;
}

/* First in every call. */
static int check_usable(const struct zip_writer *writer, struct base_error *error)
{
	if (writer->failed)
		return base_fail(error, writer->failed,
				 "cannot write on to \"%s\" after an earlier failure" BASE_REMEDY
				 "begin a new file",
				 writer->path);
	if (writer->finished)
		return base_refuse(error, -EINVAL,
				   "\"%s\" is complete" BASE_REMEDY "begin a new file for more",
				   writer->path);
	return 0;
}

static const char *last_name(const struct zip_writer *writer)
{
	return zip_entries_last(&writer->entries)->name + FOLDER_BYTES;
}

/* To the sink, which continues `*crc` on the way. */
static int put_through(struct zip_writer *writer, const void *data, size_t bytes, uint32_t *crc,
		       struct base_error *error)
{
	return writer->sink.ops->put(writer->sink.to, data, bytes, crc, error);
}

static uint64_t offset_of(const struct zip_writer *writer)
{
	return writer->sink.ops->offset(writer->sink.to);
}

/* ---- Beginning a record ---------------------------------------------------------------------- */

/* What the caller can do wrong. Nothing has changed when one of these is refused. */
static int check_begin(const struct zip_writer *writer, const char *name, uint32_t alignment,
		       struct base_error *error)
{
	int ret;

	ret = zip_check_record(name, alignment, writer->path, error);
	if (ret)
		return ret;
	if (writer->open)
		return base_refuse(
			error, -EINVAL,
			"cannot begin record \"%s\" of \"%s\" while \"%s\" is open" BASE_REMEDY
			"end that first",
			ZIP_SHOWN(name), writer->path, ZIP_SHOWN(last_name(writer)));
	if (zip_entries_have(&writer->entries, name))
		return base_refuse(error, -EEXIST,
				   "record \"%s\" is in %s already" BASE_REMEDY
				   "names must be unique",
				   ZIP_SHOWN(name), writer->path);
	/* One place is kept for the index, which the reader counts too. */
	if (writer->entries.count + 1 >= ZIP_MAX_RECORDS)
		return base_refuse(error, IOSHAPE_E_LIMIT,
				   "record \"%s\" of \"%s\" is one above %u", ZIP_SHOWN(name),
				   writer->path, ZIP_MAX_RECORDS);
	return 0;
}

/* Takes up the new record; its header lies in scratch afterwards. */
static int note_record(struct zip_writer *writer, const char *name, uint64_t bytes)
{
	int ret;

	ret = zip_entries_add(&writer->entries, ZIP_FOLDER, name, &writer->place);
	if (ret)
		return ret;
	writer->scratch.bytes = 0;
	return zip_encode_header(&writer->scratch, zip_entries_last(&writer->entries)->name,
				 &writer->place, bytes);
}

static int begin_record(struct zip_writer *writer, const char *name, uint64_t bytes,
			uint32_t alignment, struct base_error *error)
{
	int ret;

	if (!alignment)
		alignment = zip_default_alignment(bytes);
	ret = zip_place_record(offset_of(writer), FOLDER_BYTES + strlen(name), bytes, alignment,
			       &writer->place);
	if (ret)
		return base_fail(error, ret, "record \"%s\" of %llu bytes does not fit into %s",
				 ZIP_SHOWN(name), (unsigned long long)bytes, writer->path);
	ret = note_record(writer, name, bytes);
	if (ret) {
		base_fail(error, ret, "cannot begin record \"%s\" of \"%s\"", ZIP_SHOWN(name),
			  writer->path);
		return fail_for_good(writer, ret);
	}
	ret = put_through(writer, writer->scratch.data, writer->scratch.bytes, NULL, error);
	if (ret)
		return fail_for_good(writer, ret);
	writer->open = true;
	writer->announced = bytes;
	writer->done = 0;
	writer->block_crc = 0;
	writer->block_bytes = 0;
	return 0;
}

int zip_writer_begin(struct zip_writer *writer, const char *name, uint64_t bytes,
		     uint32_t alignment, struct base_error *error)
{
	int ret;

	ret = check_usable(writer, error);
	if (!ret)
		ret = check_begin(writer, name, alignment, error);
	return ret ? ret : begin_record(writer, name, bytes, alignment, error);
}

/* ---- The bytes of a record ------------------------------------------------------------------- */

static int push_check(struct zip_writer *writer, uint32_t crc)
{
	void *checks = writer->checks;
	int ret = zip_grow(&checks, writer->check_count, &writer->check_room,
			   sizeof(*writer->checks));

	writer->checks = checks;
	if (!ret)
		writer->checks[writer->check_count++] = crc;
	return ret;
}

/* The block is full, or the record ends in it. */
static int end_block(struct zip_writer *writer, struct base_error *error)
{
	struct zip_entry *entry = zip_entries_last(&writer->entries);

	if (push_check(writer, writer->block_crc)) {
		base_no_memory(error, "checksums of blocks",
			       writer->check_count * sizeof(uint32_t));
		return fail_for_good(writer, -ENOMEM);
	}
	/* The record's own checksum comes from those of its blocks: no byte is looked at twice. */
	if (writer->done == writer->block_bytes)
		entry->crc32 = writer->block_crc;
	else
		entry->crc32 =
			base_crc32_combine(entry->crc32, writer->block_crc, writer->block_bytes);
	writer->block_crc = 0;
	writer->block_bytes = 0;
	return 0;
}

static int put_pieces(struct zip_writer *writer, const uint8_t *data, size_t bytes,
		      struct base_error *error)
{
	size_t piece;
	int ret;

	for (; bytes; data += piece, bytes -= piece) {
		piece = MIN(bytes, ZIP_CHECK_BYTES - writer->block_bytes);
		ret = put_through(writer, data, piece, &writer->block_crc, error);
		if (ret)
			return fail_for_good(writer, ret);
		writer->block_bytes += piece;
		writer->done += piece;
		if (writer->block_bytes < ZIP_CHECK_BYTES)
			continue;
		ret = end_block(writer, error);
		if (ret)
			return ret;
	}
	return 0;
}

int zip_writer_put(struct zip_writer *writer, const void *data, size_t bytes,
		   struct base_error *error)
{
	int ret;

	ret = check_usable(writer, error);
	if (ret)
		return ret;
	if (!writer->open)
		return base_refuse(error, -EINVAL,
				   "no record of %s is open to be written" BASE_REMEDY
				   "begin one first",
				   writer->path);
	if (bytes && !data)
		return base_refuse(error, -EINVAL, "cannot write %zu bytes at NULL to %s", bytes,
				   writer->path);
	/* Of an unknown length: as much as the largest file holds. */
	if (bytes > MIN(writer->announced, (uint64_t)INT64_MAX) - writer->done)
		return base_refuse(error, -EINVAL,
				   "record \"%s\" of \"%s\" was announced with %llu bytes and "
				   "would get %llu" BASE_REMEDY
				   "announce IOSHAPE_UNKNOWN_BYTES if it is not known",
				   ZIP_SHOWN(last_name(writer)), writer->path,
				   (unsigned long long)writer->announced,
				   (unsigned long long)writer->done + bytes);
	return put_pieces(writer, data, bytes, error);
}

static int end_record(struct zip_writer *writer, struct base_error *error)
{
	struct zip_entry *entry = zip_entries_last(&writer->entries);
	int ret;

	if (writer->block_bytes) {
		ret = end_block(writer, error);
		if (ret)
			return ret;
	}
	entry->bytes = writer->done;
	writer->scratch.bytes = 0;
	ret = zip_encode_descriptor(&writer->scratch, entry->crc32, entry->bytes,
				    writer->place.zip64);
	if (ret)
		base_no_memory(error, "a data descriptor", writer->scratch.room);
	else
		ret = put_through(writer, writer->scratch.data, writer->scratch.bytes, NULL, error);
	if (ret)
		return fail_for_good(writer, ret);
	writer->open = false;
	return 0;
}

int zip_writer_end(struct zip_writer *writer, struct base_error *error)
{
	int ret;

	ret = check_usable(writer, error);
	if (ret)
		return ret;
	if (!writer->open)
		return base_refuse(error, -EINVAL, "no record of %s is open to be ended",
				   writer->path);
	if (writer->announced != IOSHAPE_UNKNOWN_BYTES && writer->done < writer->announced)
		return base_refuse(
			error, -EINVAL,
			"record \"%s\" of \"%s\" was announced with %llu bytes and got %llu",
			ZIP_SHOWN(last_name(writer)), writer->path,
			(unsigned long long)writer->announced, (unsigned long long)writer->done);
	ret = end_record(writer, error);
	if (!ret)
		writer->payload_bytes += writer->done;
	return ret;
}

/* ---- The end of the file --------------------------------------------------------------------- */

static int encode_index(struct zip_writer *writer, const struct zip_index *given,
			struct base_buffer *bytes)
{
	struct zip_index index = { .has_table = false };
	uint64_t *offsets;
	int ret;

	offsets = reallocarray(NULL, MAX(writer->entries.count, 1), sizeof(*offsets));
	if (!offsets)
		return -ENOMEM;
	for (uint64_t i = 0; i < writer->entries.count; i++)
		offsets[i] = writer->entries.list[i].data_offset;
	if (given)
		index = *given;
	index.check_bytes = ZIP_CHECK_BYTES;
	index.directory_crc32 =
		zip_directory_crc32(writer->entries.list, writer->entries.count, FOLDER_BYTES);
	index.records = writer->entries.count;
	index.data_offsets = offsets;
	index.check_count = writer->check_count;
	index.checks = writer->checks;
	ret = zip_index_encode(bytes, &index);
	free(offsets);
	return ret;
}

static int write_index(struct zip_writer *writer, const struct zip_index *given,
		       struct base_error *error)
{
	struct base_buffer bytes = { 0 };
	int ret;

	ret = encode_index(writer, given, &bytes);
	if (ret) {
		base_fail(error, ret, "cannot build the index of %s", writer->path);
		goto out;
	}
	ret = begin_record(writer, ZIP_INDEX_RECORD, bytes.bytes, 0, error);
	if (!ret)
		ret = put_pieces(writer, bytes.data, bytes.bytes, error);
	if (!ret)
		ret = end_record(writer, error);
out:
	base_buffer_free(&bytes);
	return ret;
}

int zip_writer_finish(struct zip_writer *writer, const struct zip_index *index,
		      struct base_error *error)
{
	int ret;

	ret = check_usable(writer, error);
	if (ret)
		return ret;
	if (writer->open)
		return base_refuse(error, -EINVAL,
				   "record \"%s\" of \"%s\" is still open" BASE_REMEDY
				   "end it first",
				   ZIP_SHOWN(last_name(writer)), writer->path);
	ret = write_index(writer, index, error);
	if (!ret)
		ret = zip_put_directory(&writer->sink, &writer->entries, writer->path, error);
	if (!ret)
		ret = writer->sink.ops->finish(writer->sink.to, error);
	writer->finished = true;
	return ret ? fail_for_good(writer, ret) : 0;
}
