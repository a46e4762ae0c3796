/* SPDX-License-Identifier: Apache-2.0 */
/* Opening an archive: its directory, its index where it has one, and where each record's data
 * begins. */
#define _GNU_SOURCE
#include "format/format.h"
#include "format/layout.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

/* Of a file whose name leads to another one meanwhile: 5 s. GlusterFS's client takes a name for
 * that of a file that another client has replaced for up to a second (md-cache-timeout). */
#define MOST_TRIES 250
#define PAUSE_NS 20000000

struct opening {
	struct format_reader *reader;
	const char *path;
	struct base_error *error;
};

static int fetch(void *user, uint64_t offset, void *into, size_t bytes)
{
	const struct opening *opening = user;

	return io_input_get(&opening->reader->input, offset, into, bytes, opening->error);
}

static int locate(struct opening *opening, uint64_t position)
{
	return format_locate(&opening->reader->directory, position, fetch, opening, opening->path,
			     opening->error);
}

/* ---- The index ------------------------------------------------------------------------------- */

static bool is_index(const struct format_entry *entry)
{
	return entry->name_bytes == strlen(FORMAT_INDEX_RECORD) &&
	       !memcmp(entry->name, FORMAT_INDEX_RECORD, entry->name_bytes);
}

/* Reads the index record, to be freed, and compares its checksum. */
static int read_index(struct opening *opening, const struct format_entry *entry, uint8_t **out)
{
	uint8_t *data;
	int ret;

	if (entry->bytes > FORMAT_MAX_INDEX_BYTES)
		return base_refuse(
			opening->error, IOSHAPE_E_LIMIT,
			"cannot load \"%s\": its index has %s, and at most %s are supported",
			opening->path, BASE_SIZE(entry->bytes), BASE_SIZE(FORMAT_MAX_INDEX_BYTES));
	data = malloc(MAX(entry->bytes, 1));
	if (!data)
		return base_no_memory(opening->error, "the index of an archive", entry->bytes);
	ret = fetch(opening, entry->data_offset, data, entry->bytes);
	if (!ret && base_crc32(0, data, entry->bytes) != entry->crc32)
		ret = base_refuse_with(
			opening->error, IOSHAPE_E_DAMAGED,
			"use another copy, or torch.load(), which does without the index "
			"and verifies nothing",
			"cannot load \"%s\": its index (record '" FORMAT_INDEX_RECORD
			"' at offset %" PRIu64 ") is damaged",
			opening->path, entry->data_offset);
	if (ret)
		free(data);
	else
		*out = data;
	return ret;
}

/* Moves the offsets over. False if the directory is not the one that the index was made with. */
static bool index_fits(struct format_reader *reader)
{
	struct format_directory *directory = &reader->directory;
	const struct format_index *index = &reader->index;

	if (format_directory_crc32(directory->entries, index->records, 0) != index->directory_crc32)
		return false;
	for (uint64_t i = 0; i < index->records; i++) {
		if (!format_data_fits(directory, i, index->data_offsets[i]))
			return false;
		directory->entries[i].data_offset = index->data_offsets[i];
	}
	return true;
}

/* Whether the index is used is in has_index; an index that does not fit is no failure. */
static int decode_index(struct opening *opening, const uint8_t *data, uint64_t bytes)
{
	struct format_reader *reader = opening->reader;
	const struct format_directory *directory = &reader->directory;
	int ret;

	ret = format_index_decode(&reader->index, data, bytes, directory->entries,
				  directory->count - 1, &reader->index_problem);
	if (ret && ret != IOSHAPE_E_DAMAGED && ret != IOSHAPE_E_FORMAT)
		return base_fail(opening->error, ret, "cannot load \"%s\": %s", opening->path,
				 reader->index_problem.text);
	if (ret)
		return 0;
	reader->has_index = index_fits(reader);
	if (!reader->has_index) {
		format_index_free(&reader->index);
		base_refuse(
			&reader->index_problem, IOSHAPE_E_DAMAGED,
			"record '" FORMAT_INDEX_RECORD
			"' of %s does not fit the directory: another tool has changed the archive",
			opening->path);
	}
	return 0;
}

static int open_index(struct opening *opening)
{
	const struct format_directory *directory = &opening->reader->directory;
	const struct format_entry *last = &directory->entries[directory->count - 1];
	uint8_t *data = NULL;
	int ret;

	if (!is_index(last))
		return 0;
	ret = locate(opening, directory->count - 1);
	if (!ret)
		ret = read_index(opening, last, &data);
	if (!ret)
		ret = decode_index(opening, data, last->bytes);
	free(data);
	return ret;
}

/* ---- Local headers --------------------------------------------------------------------------- */

static int locate_all(struct opening *opening)
{
	int ret = 0;

	for (uint64_t i = 0; i < opening->reader->directory.count && !ret; i++)
		ret = locate(opening, i);
	return ret;
}

int format_check_header(const struct format_reader *reader, const struct format_entry *entry,
			const uint8_t *head, struct base_error *error)
{
	char shown[FORMAT_SHOWN_NAME_BYTES];

	if (base_get_le(head, 4) == FORMAT_LOCAL_SIGNATURE &&
	    entry->header_offset + FORMAT_LOCAL_BYTES + base_get_le(head + FORMAT_LOCAL_NAME, 2) +
			    base_get_le(head + FORMAT_LOCAL_EXTRA, 2) ==
		    entry->data_offset)
		return 0;
	base_refuse_with(error, IOSHAPE_E_DAMAGED, "use another copy or an older checkpoint",
			 "\"%s\" is damaged: the header of record '%s' at offset %" PRIu64
			 " of the file does not lead to its data",
			 reader->input.path,
			 format_show_name(shown, entry->name, entry->name_bytes),
			 entry->header_offset);
	base_error_in_record(error, shown);
	base_error_at(error, entry->header_offset);
	return IOSHAPE_E_DAMAGED;
}

static int look_at_header(const struct format_reader *reader, uint64_t record,
			  struct base_error *error)
{
	const struct format_entry *entry = &reader->directory.entries[record];
	uint8_t head[FORMAT_LOCAL_BYTES];
	int ret;

	ret = io_input_get(&reader->input, entry->header_offset, head, sizeof(head), error);
	return ret ? ret : format_check_header(reader, entry, head, error);
}

int format_reader_check_headers(const struct format_reader *reader, struct base_error *error)
{
	int ret = 0;

	/* Without an index they were all looked at when the file was opened. */
	for (uint64_t i = 0;
	     !ret && reader->has_index && !reader->plain && i < reader->directory.count; i++)
		ret = look_at_header(reader, i, error);
	return ret;
}

/* That every record's true checksum is 0 happens to no archive with a pickle in it. */
static bool all_checksums_zero(const struct format_directory *directory)
{
	bool any_bytes = false;

	for (uint64_t i = 0; i < directory->count; i++) {
		if (directory->entries[i].crc32)
			return false;
		any_bytes |= directory->entries[i].bytes > 0;
	}
	return any_bytes;
}

static int open_once(struct format_reader *reader, const char *path, uint64_t base, uint64_t bytes,
		     enum ioshape_direct direct, struct base_error *error)
{
	struct opening opening = { .reader = reader, .error = error };
	int ret;

	memset(reader, 0, sizeof(*reader));
	ret = io_input_open(&reader->input, path, base, bytes, direct, error);
	if (ret)
		return ret;
	opening.path = reader->input.path;
	ret = format_parse(&reader->directory, reader->input.bytes, fetch, &opening, opening.path,
			   error);
	if (!ret)
		ret = open_index(&opening);
	/* By the file's first bytes others tell whether it is a zip at all. */
	if (!ret)
		ret = reader->has_index ? look_at_header(reader, 0, error) : locate_all(&opening);
	if (!ret && !reader->has_index)
		reader->no_checksums = all_checksums_zero(&reader->directory);
	if (ret)
		format_reader_close(reader);
	return ret;
}

/* ---- Files in any format -----------------------------------------------------------------------
 */

/* One record that is all of the file. */

/* Nobody changes it. */
static char no_name[1];

static int add_only_entry(struct format_reader *reader)
{
	struct format_directory *directory = &reader->directory;
	const uint64_t bytes = reader->input.bytes;

	directory->entries = malloc(sizeof(*directory->entries));
	if (!directory->entries || format_names_new(&directory->names, 0))
		return -ENOMEM;
	/* No header comes before the end, which is where a directory would begin. */
	directory->entries[0] = (struct format_entry){
		.name = no_name,
		.bytes = bytes,
		.header_offset = bytes,
	};
	directory->count = 1;
	directory->offset = bytes;
	return 0;
}

static int open_plain_once(struct format_reader *reader, const char *path, uint64_t base,
			   uint64_t bytes, enum ioshape_direct direct, struct base_error *error)
{
	int ret;

	memset(reader, 0, sizeof(*reader));
	ret = io_input_open(&reader->input, path, base, bytes, direct, error);
	if (ret)
		return ret;
	reader->plain = true;
	reader->no_checksums = true;
	if (!add_only_entry(reader))
		return 0;
	format_reader_close(reader);
	return base_no_memory(error, "a reader", sizeof(*reader));
}

/* ---- Opening -----------------------------------------------------------------------------------
 */

/* One try to open a file, after which there is nothing to free if it fails. */
typedef int (*open_fn)(struct format_reader *reader, const char *path, uint64_t base,
		       uint64_t bytes, enum ioshape_direct direct, struct base_error *error);

/* Tries until the file is the one that the name leads to by now. */
static int open_latest(struct format_reader *reader, const char *path, uint64_t base,
		       uint64_t bytes, enum ioshape_direct direct, open_fn open,
		       struct base_error *error)
{
	const struct timespec pause = { 0, PAUSE_NS };
	struct base_error why;
	int ret = 0;

	/*
	 * An NFS client opens what it believes the name to mean, and learns only when it asks for
	 * something of it that another host has replaced the file; then it looks anew. A part of a
	 * file is that of no other one.
	 */
	for (int tries = 0; tries < MOST_TRIES; tries++) {
		memset(&why, 0, sizeof(why));
		ret = open(reader, path, base, bytes, direct, &why);
		if (ret != -ESTALE || base || bytes)
			break;
		io_look_anew(AT_FDCWD, path);
		if (tries)
			nanosleep(&pause, NULL);
	}
	if (ret && error && !error->code)
		*error = why;
	return ret;
}

int format_reader_open(struct format_reader *reader, const char *path, uint64_t base,
		       uint64_t bytes, enum ioshape_direct direct, struct base_error *error)
{
	return open_latest(reader, path, base, bytes, direct, open_once, error);
}

int format_reader_open_plain(struct format_reader *reader, const char *path, uint64_t base,
			     uint64_t bytes, enum ioshape_direct direct, struct base_error *error)
{
	return open_latest(reader, path, base, bytes, direct, open_plain_once, error);
}

int format_reader_add_checksums(struct format_reader *reader,
				const struct format_checksums *checksums, struct base_error *error)
{
	const size_t bytes = checksums->blocks * sizeof(*checksums->crc32);
	uint64_t *first;

	if (!format_checksums_valid(checksums))
		return base_refuse(error, -EINVAL,
				   "the checksums given for \"%s\" cannot be those of a file",
				   reader->input.path);
	if (checksums->file_bytes != reader->input.bytes)
		return base_refuse_with(
			error, IOSHAPE_E_DAMAGED, "use another copy",
			"\"%s\" has %s, and its checksums are of %s: it was cut short, or "
			"is another file",
			reader->input.path, BASE_SIZE(reader->input.bytes),
			BASE_SIZE(checksums->file_bytes));
	first = calloc(1, sizeof(*first) + bytes);
	if (!first)
		return base_no_memory(error, "the checksums of a file", bytes);
	if (bytes)
		memcpy(first + 1, checksums->crc32, bytes);
	/* The index of that archive: its one record has all blocks, from the first on. */
	reader->index = (struct format_index){
		.check_bytes = checksums->block_bytes,
		.records = 1,
		.check_count = checksums->blocks,
		.checks = (const uint32_t *)(first + 1),
		.first_check = first,
		.memory = first,
	};
	reader->has_index = true;
	reader->no_checksums = false;
	return 0;
}

void format_reader_close(struct format_reader *reader)
{
	format_index_free(&reader->index);
	format_directory_free(&reader->directory);
	io_input_close(&reader->input);
	memset(reader, 0, sizeof(*reader));
	reader->input.fd = reader->input.direct_fd = -1;
}
