/* SPDX-License-Identifier: Apache-2.0 */
/*
 * An archive on its way into a sink: records one after the other, then the index, then the
 * directory. It is a torch zip, or a bundle: a zip of whole files, each beginning on a boundary of
 * the storage, with zeros before its header, because an extra field, with its 64 KiB, cannot pad to
 * a stripe. The bytes themselves pass through to the sink, which checksums them while it copies.
 */
#define _GNU_SOURCE
#include "format/format.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

struct format_writer {
	struct format_sink sink;
	const char *folder; /* before the name of every record, with its slash; static */
	uint64_t alignment; /* of the members of a bundle; 0: it is a torch zip */
	char *path;         /* for messages */

	struct format_entry *entries; /* of records that have begun; the last one may be open */
	uint64_t count, room;
	struct format_names *names; /* without the folder */
	struct base_buffer scratch; /* headers and descriptors */
	bool open;                  /* between begin and end */
	bool finished;              /* nothing may follow a directory */
	int failed;                 /* the code after which nothing more is written */

	struct format_place place; /* of the open record */
	uint64_t announced;        /* bytes of it, or FORMAT_UNKNOWN_BYTES */
	uint64_t done;             /* bytes of it that have been put */

	/* Of a torch zip: checksums of full blocks, and of the last one of each record. */
	uint32_t *checks;
	uint64_t check_count, check_room;
	uint32_t block_crc; /* of the block that is not full yet */
	uint64_t block_bytes;
};

int format_grow(void **array, uint64_t count, uint64_t *room, size_t element_bytes)
{
	uint64_t more = *room ? *room * 2 : 64;
	void *larger;

	if (count < *room)
		return 0;
	larger = reallocarray(*array, more, element_bytes);
	if (!larger)
		return -ENOMEM;
	*array = larger;
	*room = more;
	return 0;
}

/* ---- Life ------------------------------------------------------------------------------------ */

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
	if (!writer->path || format_names_new(&writer->names, 0)) {
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
	int ret;

	*out = NULL;
	if (!alignment || alignment % FORMAT_LARGE_ALIGNMENT ||
	    alignment > FORMAT_MAX_MEMBER_ALIGNMENT)
		return base_refuse(error, -EINVAL,
				   "cannot align the records of \"%s\" to %llu bytes: it must be a "
				   "multiple of %s up to %s",
				   path, (unsigned long long)alignment,
				   BASE_SIZE(FORMAT_LARGE_ALIGNMENT),
				   BASE_SIZE(FORMAT_MAX_MEMBER_ALIGNMENT));
	ret = open_writer(out, sink, "", path, error);
	if (!ret)
		(*out)->alignment = alignment;
	return ret;
}

void format_writer_free(struct format_writer *writer)
{
	if (!writer)
		return;
	base_buffer_free(&writer->scratch);
	format_names_free(writer->names);
	for (uint64_t i = 0; i < writer->count; i++)
		free(writer->entries[i].name);
	free(writer->entries);
	free(writer->checks);
	free(writer->path);
	free(writer);
}

const struct format_entry *format_writer_entries(const struct format_writer *writer,
						 uint64_t *count)
{
	*count = writer->open ? 0 : writer->count;
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

/* ---- Checks: a refusal changes nothing ------------------------------------------------------- */

/* First in every call: that nothing has failed, that it is not finished, and whether a record is
 * open. */
static int check_state(const struct format_writer *writer, bool open, struct base_error *error)
{
	if (writer->failed)
		return base_fail_with(error, writer->failed, "begin a new file",
				      "cannot write on to \"%s\" after an earlier failure",
				      writer->path);
	if (writer->finished)
		return base_refuse_with(error, -EINVAL, "begin a new file for more",
					"\"%s\" is complete", writer->path);
	if (open && !writer->open)
		return base_refuse_with(error, -EINVAL, "begin one first",
					"no record of \"%s\" is open", writer->path);
	if (!open && writer->open)
		return base_refuse_with(error, -EINVAL, "end it first",
					"record \"%s\" of \"%s\" is still open",
					FORMAT_SHOWN(last_name(writer)), writer->path);
	return 0;
}

/* That a record may have this name and alignment. */
static int check_record(const struct format_writer *writer, const char *name, uint32_t alignment,
			struct base_error *error)
{
	uint64_t position;
	int ret = format_check_record(name, alignment, writer->path, error);

	if (ret)
		return ret;
	if (format_names_find(writer->names, name, strlen(name), &position))
		return base_refuse_with(error, -EEXIST, "names must be unique",
					"record \"%s\" is in \"%s\" already", FORMAT_SHOWN(name),
					writer->path);
	/* One place is kept for an index, which the reader counts too. */
	if (writer->count + 1 >= FORMAT_MAX_RECORDS)
		return base_refuse(error, IOSHAPE_E_LIMIT,
				   "record \"%s\" of \"%s\" is one above %u", FORMAT_SHOWN(name),
				   writer->path, FORMAT_MAX_RECORDS);
	return 0;
}

/* ---- Into the sink --------------------------------------------------------------------------- */

/* The code, after which only format_writer_free() makes sense. So it is after a failure of all
 * below.
 */
static int fail(struct format_writer *writer, int code)
{
	writer->failed = code;
	return code;
}

/* The sink continues `*crc` on the way; it may be NULL. */
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
	struct format_entry *entry;
	void *entries = writer->entries;
	int ret;

	ret = format_grow(&entries, writer->count, &writer->room, sizeof(*writer->entries));
	writer->entries = entries;
	if (ret)
		return ret;
	entry = &writer->entries[writer->count];
	*entry = (struct format_entry){
		.name = malloc(folder_bytes + name_bytes + 1),
		.name_bytes = (uint32_t)(folder_bytes + name_bytes),
		.header_offset = writer->place.header_offset,
		.data_offset = writer->place.data_offset,
	};
	if (!entry->name)
		return -ENOMEM;
	writer->count++; /* the name is freed with the entries from now on */
	memcpy(entry->name, writer->folder, folder_bytes);
	memcpy(entry->name + folder_bytes, name, name_bytes + 1);
	return format_names_add(writer->names, entry->name + folder_bytes, name_bytes,
				writer->count - 1);
}

static int find_place(struct format_writer *writer, const char *name, uint64_t bytes,
		      uint32_t alignment)
{
	const size_t name_bytes = strlen(writer->folder) + strlen(name);

	if (writer->alignment)
		return format_place_member(offset_of(writer), name_bytes, writer->alignment,
					   &writer->place);
	return format_place_record(offset_of(writer), name_bytes, bytes,
				   alignment ? alignment : format_default_alignment(bytes),
				   &writer->place);
}

static int begin_record(struct format_writer *writer, const char *name, uint64_t bytes,
			uint32_t alignment, struct base_error *error)
{
	int ret = find_place(writer, name, bytes, alignment);

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
		ret = format_encode_header(&writer->scratch, last_entry(writer)->name,
					   &writer->place, bytes);
	if (ret) {
		base_fail(error, ret, "cannot begin record \"%s\" of \"%s\"", FORMAT_SHOWN(name),
			  writer->path);
		return fail(writer, ret);
	}
	ret = put_zeros(writer, writer->place.header_offset - offset_of(writer), error);
	if (!ret)
		ret = put(writer, writer->scratch.data, writer->scratch.bytes, NULL, error);
	writer->open = !ret;
	return ret;
}

int format_writer_begin(struct format_writer *writer, const char *name, uint64_t bytes,
			uint32_t alignment, struct base_error *error)
{
	int ret;

	ret = check_state(writer, false, error);
	if (!ret)
		ret = check_record(writer, name, alignment, error);
	return ret ? ret : begin_record(writer, name, bytes, alignment, error);
}

/* ---- The bytes of a record ------------------------------------------------------------------- */

static int push_check(struct format_writer *writer, uint32_t crc)
{
	void *checks = writer->checks;
	int ret = format_grow(&checks, writer->check_count, &writer->check_room,
			      sizeof(*writer->checks));

	writer->checks = checks;
	if (!ret)
		writer->checks[writer->check_count++] = crc;
	return ret;
}

/* The block is full, or the record ends in it. */
static int end_block(struct format_writer *writer, struct base_error *error)
{
	struct format_entry *entry = last_entry(writer);

	if (push_check(writer, writer->block_crc)) {
		base_no_memory(error, "checksums of blocks",
			       writer->check_count * sizeof(uint32_t));
		return fail(writer, -ENOMEM);
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

static int put_blocks(struct format_writer *writer, const uint8_t *data, size_t bytes,
		      struct base_error *error)
{
	size_t piece;
	int ret;

	for (; bytes; data += piece, bytes -= piece) {
		piece = MIN(bytes, FORMAT_CHECK_BYTES - writer->block_bytes);
		ret = put(writer, data, piece, &writer->block_crc, error);
		if (ret)
			return ret;
		writer->block_bytes += piece;
		writer->done += piece;
		if (writer->block_bytes < FORMAT_CHECK_BYTES)
			continue;
		ret = end_block(writer, error);
		if (ret)
			return ret;
	}
	return 0;
}

/* The member's checksum goes on, and `*crc`, if there is one; no byte is looked at twice but those
 * of small pieces. */
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

/* That so many more may come. */
static int check_bytes(const struct format_writer *writer, const void *data, size_t bytes,
		       struct base_error *error)
{
	int ret = check_state(writer, true, error);

	if (ret)
		return ret;
	if (bytes && !data)
		return base_refuse(error, -EINVAL, "cannot write %zu bytes at NULL to \"%s\"",
				   bytes, writer->path);
	/* Of an unknown length: as much as the largest file holds. */
	if (bytes > MIN(writer->announced, (uint64_t)INT64_MAX) - writer->done)
		return base_refuse_with(error, -EINVAL, "announce all of it",
					"record \"%s\" of \"%s\" was announced with %llu bytes and "
					"would get %llu",
					FORMAT_SHOWN(last_name(writer)), writer->path,
					(unsigned long long)writer->announced,
					(unsigned long long)writer->done + bytes);
	return 0;
}

int format_writer_put(struct format_writer *writer, const void *data, size_t bytes,
		      struct base_error *error)
{
	int ret = check_bytes(writer, data, bytes, error);

	if (ret || !bytes)
		return ret;
	return writer->alignment ? put_in_member(writer, data, bytes, NULL, error) :
				   put_blocks(writer, data, bytes, error);
}

int format_writer_put_summed(struct format_writer *writer, const void *data, size_t bytes,
			     uint32_t crc32, struct base_error *error)
{
	struct format_entry *entry;
	int ret = check_bytes(writer, data, bytes, error);

	if (ret)
		return ret;
	entry = last_entry(writer);
	entry->crc32 = base_crc32_combine(entry->crc32, crc32, bytes);
	writer->done += bytes;
	ret = writer->sink.ops->put_summed(writer->sink.to, data, bytes, crc32, error);
	return ret ? fail(writer, ret) : 0;
}

/* ---- The end of a record --------------------------------------------------------------------- */

static int end_record(struct format_writer *writer, struct base_error *error)
{
	struct format_entry *entry = last_entry(writer);
	int ret = writer->block_bytes ? end_block(writer, error) : 0;

	if (ret)
		return ret;
	entry->bytes = writer->done;
	writer->scratch.bytes = 0;
	if (format_encode_descriptor(&writer->scratch, entry->crc32, entry->bytes,
				     writer->place.zip64)) {
		base_no_memory(error, "a data descriptor", writer->scratch.room);
		return fail(writer, -ENOMEM);
	}
	writer->open = false;
	return put(writer, writer->scratch.data, writer->scratch.bytes, NULL, error);
}

int format_writer_end(struct format_writer *writer, struct base_error *error)
{
	int ret;

	ret = check_state(writer, true, error);
	if (ret)
		return ret;
	if (writer->announced != FORMAT_UNKNOWN_BYTES && writer->done < writer->announced)
		return base_refuse(
			error, -EINVAL,
			"record \"%s\" of \"%s\" was announced with %llu bytes and got %llu",
			FORMAT_SHOWN(last_name(writer)), writer->path,
			(unsigned long long)writer->announced, (unsigned long long)writer->done);
	return end_record(writer, error);
}

/* ---- The end of the archive ------------------------------------------------------------------ */

static int encode_index(struct format_writer *writer, const struct format_index *given,
			struct base_buffer *bytes)
{
	struct format_index index = { .has_table = false };
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
	index.check_count = writer->check_count;
	index.checks = writer->checks;
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
	ret = begin_record(writer, FORMAT_INDEX_RECORD, bytes.bytes, 0, error);
	if (!ret)
		ret = put_blocks(writer, bytes.data, bytes.bytes, error);
	if (!ret)
		ret = end_record(writer, error);
out:
	base_buffer_free(&bytes);
	return ret;
}

static int write_directory(struct format_writer *writer, struct base_error *error)
{
	struct base_buffer bytes = { 0 };
	int ret;

	/* A file that could not be read again must not be written. */
	if (format_directory_bytes(writer->entries, writer->count) > FORMAT_MAX_DIRECTORY_BYTES)
		return base_refuse_with(error, IOSHAPE_E_LIMIT, "use fewer or shorter names",
					"the directory of \"%s\" would pass %s", writer->path,
					BASE_SIZE(FORMAT_MAX_DIRECTORY_BYTES));
	ret = format_encode_directory(&bytes, writer->entries, writer->count, offset_of(writer));
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
	int ret;

	ret = check_state(writer, false, error);
	if (ret)
		return ret;
	if (!writer->alignment)
		ret = write_index(writer, index, error);
	if (!ret)
		ret = write_directory(writer, error);
	writer->finished = !ret;
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
	struct format_writer *bundle = to;
	int ret = check_bytes(bundle, data, bytes, error);

	return ret ? ret : put_in_member(bundle, data, bytes, crc, error);
}

struct format_sink format_sink_of_member(struct format_writer *bundle)
{
	static const struct format_sink_ops ops = { member_offset, member_put, NULL };

	return (struct format_sink){ &ops, bundle };
}
