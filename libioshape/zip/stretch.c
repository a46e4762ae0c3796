/* SPDX-License-Identifier: Apache-2.0 */
/* Reading a stretch of the file as it lies: the records in it, and what lies between them. */
#define _GNU_SOURCE
#include "zip/layout.h"
#include "zip/ranges.h"

#include <stdlib.h>

struct stretch {
	const struct zip_reader *reader;
	uint64_t begin, end;
	uint8_t *into;
	struct zip_range *ranges;
	uint64_t count, room;
};

/* The nth record in the order of the file. */
static uint64_t nth_record(const struct zip_directory *directory, uint64_t n)
{
	return directory->order ? directory->order[n] : n;
}

static uint64_t data_end(const struct zip_entry *entry)
{
	return entry->data_offset + entry->bytes;
}

/* The first record, in the order of the file, that ends at this offset or behind it. */
static uint64_t first_record(const struct zip_directory *directory, uint64_t offset)
{
	uint64_t from = 0, to = directory->count, middle;

	while (from < to) {
		middle = from + (to - from) / 2;
		if (data_end(&directory->entries[nth_record(directory, middle)]) < offset)
			from = middle + 1;
		else
			to = middle;
	}
	return from;
}

/* `begin` and `end` in the file. 0 or -ENOMEM. */
static int add_range(struct stretch *stretch, uint64_t record, uint64_t begin, uint64_t end)
{
	void *ranges = stretch->ranges;
	uint64_t base = 0;
	int ret;

	if (record == ZIP_NO_RECORD && begin == end)
		return 0;
	ret = zip_grow(&ranges, stretch->count, &stretch->room, sizeof(*stretch->ranges));
	stretch->ranges = ranges;
	if (ret)
		return ret;
	if (record != ZIP_NO_RECORD)
		base = stretch->reader->directory.entries[record].data_offset;
	stretch->ranges[stretch->count++] = (struct zip_range){
		.record = record,
		.offset = begin - base,
		.bytes = end - begin,
		.into = begin < end ? stretch->into + (begin - stretch->begin) : NULL,
	};
	return 0;
}

/* Empty records count as read where they lie: they have a checksum, too. */
static int divide(struct stretch *stretch)
{
	const struct zip_directory *directory = &stretch->reader->directory;
	uint64_t at = stretch->begin, record, begin, end;
	int ret = 0;

	for (uint64_t n = first_record(directory, at); !ret && n < directory->count; n++) {
		record = nth_record(directory, n);
		begin = MAX(at, directory->entries[record].data_offset);
		end = MIN(stretch->end, data_end(&directory->entries[record]));
		if (begin > end)
			break;
		ret = add_range(stretch, ZIP_NO_RECORD, at, begin);
		if (!ret && (begin < end || !directory->entries[record].bytes))
			ret = add_range(stretch, record, begin, end);
		at = end;
	}
	return ret ? ret : add_range(stretch, ZIP_NO_RECORD, at, stretch->end);
}

/* Headers that the stretch has all of. */
static int check_headers(const struct stretch *stretch, struct base_error *error)
{
	const struct zip_directory *directory = &stretch->reader->directory;
	int ret = 0;

	for (uint64_t n = first_record(directory, stretch->begin); !ret && n < directory->count;
	     n++) {
		const struct zip_entry *entry = &directory->entries[nth_record(directory, n)];

		if (entry->header_offset + ZIP_LOCAL_BYTES > stretch->end)
			break;
		if (entry->header_offset >= stretch->begin)
			ret = zip_check_header(
				stretch->reader, entry,
				stretch->into + (entry->header_offset - stretch->begin), error);
	}
	return ret;
}

uint64_t zip_reader_data_end(const struct zip_reader *reader)
{
	const struct zip_directory *directory = &reader->directory;

	/* The index was read when the file was opened. */
	if (reader->has_index)
		return directory->entries[directory->count - 1].header_offset;
	return directory->offset;
}

int zip_reader_read_file(const struct zip_reader *reader, struct ring_lane *lane,
			 struct ring_stream *stream, uint64_t offset, void *into, uint64_t bytes,
			 bool verify, ioshape_progress_fn progress, void *progress_user,
			 struct base_error *error)
{
	struct stretch stretch = {
		.reader = reader,
		.begin = offset,
		.end = offset + bytes,
		.into = into,
	};
	int ret;

	if (divide(&stretch))
		ret = base_no_memory(error, "the ranges of a stretch",
				     stretch.count * sizeof(*stretch.ranges));
	else
		ret = zip_reader_read(reader, lane, stream, stretch.ranges, stretch.count, verify,
				      progress, progress_user, error);
	free(stretch.ranges);
	return ret ? ret : check_headers(&stretch, error);
}
