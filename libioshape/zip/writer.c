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
	struct zip_out out;
	uint32_t *checks; /* of full blocks, and of the last one of each record that has ended */
	uint64_t check_count, check_room;

	uint64_t announced; /* bytes of the open record, or IOSHAPE_UNKNOWN_BYTES */
	struct zip_place place;
	uint64_t done;      /* bytes of the open record that have been put */
	uint32_t block_crc; /* of the block that is not full yet */
	uint64_t block_bytes;

	uint64_t payload_bytes;
};

/* ---- Life ------------------------------------------------------------------------------------ */

int zip_writer_new(struct zip_writer **out, struct zip_sink sink, const char *path,
		   struct base_error *error)
{
	struct zip_writer *writer;
	int ret;

	*out = NULL;
	writer = calloc(1, sizeof(*writer));
	if (!writer)
		return base_no_memory(error, "a container writer", sizeof(*writer));
	ret = zip_out_new(&writer->out, sink, ZIP_FOLDER, path, error);
	if (ret) {
		free(writer);
		return ret;
	}
	*out = writer;
	return 0;
}

void zip_writer_free(struct zip_writer *writer)
{
	if (!writer)
		return;
	zip_out_free(&writer->out);
	free(writer->checks);
	free(writer);
}

uint64_t zip_writer_payload_bytes(const struct zip_writer *writer)
{
	return writer->payload_bytes;
}

const struct zip_entry *zip_writer_entries(const struct zip_writer *writer, uint64_t *count)
{
	*count = writer->out.open ? 0 : writer->out.count;
	return writer->out.entries;
}

static const char *last_name(const struct zip_writer *writer)
{
	return zip_out_last(&writer->out)->name + FOLDER_BYTES;
}

/* ---- Beginning a record ---------------------------------------------------------------------- */

static int begin_record(struct zip_writer *writer, const char *name, uint64_t bytes,
			uint32_t alignment, struct base_error *error)
{
	int ret;

	if (!alignment)
		alignment = zip_default_alignment(bytes);
	ret = zip_place_record(zip_out_offset(&writer->out), FOLDER_BYTES + strlen(name), bytes,
			       alignment, &writer->place);
	if (ret)
		return base_fail(error, ret, "record \"%s\" of %s does not fit into \"%s\"",
				 ZIP_SHOWN(name), BASE_SIZE(bytes), writer->out.path);
	ret = zip_out_begin(&writer->out, name, &writer->place, bytes, error);
	writer->announced = bytes;
	writer->done = 0;
	writer->block_crc = 0;
	writer->block_bytes = 0;
	return ret;
}

int zip_writer_begin(struct zip_writer *writer, const char *name, uint64_t bytes,
		     uint32_t alignment, struct base_error *error)
{
	int ret;

	ret = zip_out_check(&writer->out, false, error);
	if (!ret)
		ret = zip_out_check_record(&writer->out, name, alignment, error);
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
	struct zip_entry *entry = zip_out_last(&writer->out);

	if (push_check(writer, writer->block_crc)) {
		base_no_memory(error, "checksums of blocks",
			       writer->check_count * sizeof(uint32_t));
		return zip_out_fail(&writer->out, -ENOMEM);
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
		ret = zip_out_put(&writer->out, data, piece, &writer->block_crc, error);
		if (ret)
			return ret;
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

	ret = zip_out_check(&writer->out, true, error);
	if (ret)
		return ret;
	if (bytes && !data)
		return base_refuse(error, -EINVAL, "cannot write %zu bytes at NULL to \"%s\"",
				   bytes, writer->out.path);
	/* Of an unknown length: as much as the largest file holds. */
	if (bytes > MIN(writer->announced, (uint64_t)INT64_MAX) - writer->done)
		return base_refuse(error, -EINVAL,
				   "record \"%s\" of \"%s\" was announced with %llu bytes and "
				   "would get %llu" BASE_REMEDY
				   "announce IOSHAPE_UNKNOWN_BYTES if it is not known",
				   ZIP_SHOWN(last_name(writer)), writer->out.path,
				   (unsigned long long)writer->announced,
				   (unsigned long long)writer->done + bytes);
	return put_pieces(writer, data, bytes, error);
}

static int end_record(struct zip_writer *writer, struct base_error *error)
{
	int ret = writer->block_bytes ? end_block(writer, error) : 0;

	if (ret)
		return ret;
	zip_out_last(&writer->out)->bytes = writer->done;
	return zip_out_end(&writer->out, writer->place.zip64, error);
}

int zip_writer_end(struct zip_writer *writer, struct base_error *error)
{
	int ret;

	ret = zip_out_check(&writer->out, true, error);
	if (ret)
		return ret;
	if (writer->announced != IOSHAPE_UNKNOWN_BYTES && writer->done < writer->announced)
		return base_refuse(
			error, -EINVAL,
			"record \"%s\" of \"%s\" was announced with %llu bytes and got %llu",
			ZIP_SHOWN(last_name(writer)), writer->out.path,
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

	offsets = reallocarray(NULL, MAX(writer->out.count, 1), sizeof(*offsets));
	if (!offsets)
		return -ENOMEM;
	for (uint64_t i = 0; i < writer->out.count; i++)
		offsets[i] = writer->out.entries[i].data_offset;
	if (given)
		index = *given;
	index.check_bytes = ZIP_CHECK_BYTES;
	index.directory_crc32 =
		zip_directory_crc32(writer->out.entries, writer->out.count, FOLDER_BYTES);
	index.records = writer->out.count;
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
		base_fail(error, ret, "cannot build the index of \"%s\"", writer->out.path);
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

	ret = zip_out_check(&writer->out, false, error);
	if (ret)
		return ret;
	ret = write_index(writer, index, error);
	if (!ret)
		ret = zip_out_finish(&writer->out, error);
	return ret ? zip_out_fail(&writer->out, ret) : 0;
}
