/* SPDX-License-Identifier: Apache-2.0 */
/* A file in any format, read as an archive is: one record that is all of it. */
#include "zip/ranges.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

/* Nobody changes it. */
static char no_name[1];

static int add_entry(struct zip_reader *reader)
{
	struct zip_directory *directory = &reader->directory;
	const uint64_t bytes = reader->input.bytes;

	directory->entries = malloc(sizeof(*directory->entries));
	if (!directory->entries || zip_names_new(&directory->names, 0))
		return -ENOMEM;
	/* No header comes before the end, which is where a directory would begin. */
	directory->entries[0] = (struct zip_entry){
		.name = no_name,
		.bytes = bytes,
		.header_offset = bytes,
	};
	directory->count = 1;
	directory->offset = bytes;
	return 0;
}

static int open_once(struct zip_reader *reader, const char *path, uint64_t base, uint64_t bytes,
		     enum ioshape_direct direct, struct base_error *error)
{
	int ret;

	memset(reader, 0, sizeof(*reader));
	ret = ring_input_open(&reader->input, path, base, bytes, direct, error);
	if (ret)
		return ret;
	reader->plain = true;
	reader->no_checksums = true;
	if (!add_entry(reader))
		return 0;
	zip_reader_close(reader);
	return base_no_memory(error, "a reader", sizeof(*reader));
}

int zip_reader_open_plain(struct zip_reader *reader, const char *path, uint64_t base,
			  uint64_t bytes, enum ioshape_direct direct, struct base_error *error)
{
	return zip_open_latest(reader, path, base, bytes, direct, open_once, error);
}

int zip_reader_add_checksums(struct zip_reader *reader, const struct zip_checksums *checksums,
			     struct base_error *error)
{
	const size_t bytes = checksums->blocks * sizeof(*checksums->crc32);
	uint64_t *first;

	if (!zip_checksums_valid(checksums))
		return base_refuse(error, -EINVAL,
				   "the checksums given for \"%s\" cannot be those of a file",
				   reader->input.path);
	if (checksums->file_bytes != reader->input.bytes)
		return base_refuse(
			error, IOSHAPE_E_DAMAGED,
			"\"%s\" has %s, and its checksums are of %s: it was cut short, or "
			"is another file" BASE_REMEDY "use another copy",
			reader->input.path, BASE_SIZE(reader->input.bytes),
			BASE_SIZE(checksums->file_bytes));
	first = calloc(1, sizeof(*first) + bytes);
	if (!first)
		return base_no_memory(error, "the checksums of a file", bytes);
	if (bytes)
		memcpy(first + 1, checksums->crc32, bytes);
	/* The index of that archive: its one record has all blocks, from the first on. */
	reader->index = (struct zip_index){
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
