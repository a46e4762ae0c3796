/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The end of an archive. Zip is read from its end, and readers that disagree about where that is
 * can be made to see different archives in one file. We take the last end record, as torch and most
 * readers do, and refuse the file if anything about it is ambiguous.
 */
#include "zip/end.h"
#include "zip/layout.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#define MOST_COMMENT_BYTES UINT16_MAX
/* The most that can lie between the end of the directory's zip64 end record and the end of the
 * file. */
#define TAIL_BYTES (ZIP64_LOCATOR_BYTES + ZIP_END_BYTES + MOST_COMMENT_BYTES)

int zip_source_get(const struct zip_source *source, uint64_t offset, void *into, size_t bytes)
{
	int ret;

	if (offset > source->bytes || bytes > source->bytes - offset)
		return base_refuse(source->error, IOSHAPE_E_DAMAGED,
				   "cannot read \"%s\": it refers to bytes %" PRIu64 " to %" PRIu64
				   " of itself but has only %" PRIu64
				   ", so it is truncated or overwritten",
				   source->path, offset, offset + bytes, source->bytes);
	ret = source->fetch(source->user, offset, into, bytes);
	return ret ? base_fail(source->error, ret, "cannot read \"%s\" at offset %" PRIu64,
			       source->path, offset) :
		     0;
}

/* ---- Files that are no archive at all -------------------------------------------------------- */

#define AGAIN "load it with Python and save it again"
#define UNPACK "unpack it first"

static const struct {
	const char *bytes;
	size_t length;
	const char *what, *remedy;
} known_beginnings[] = {
	/* Pickles of protocol 2 to 5: torch.save() before 1.6 began with one, and still does on
	   request. */
	{ "\x80\x02", 2, "a torch file of the old kind, from before torch 1.6",
	  "load it with torch.load() and save it again" },
	{ "\x80\x03", 2, "a plain pickle", AGAIN },
	{ "\x80\x04", 2, "a plain pickle", AGAIN },
	{ "\x80\x05", 2, "a plain pickle", AGAIN },
	{ "\x1f\x8b", 2, "compressed by gzip", UNPACK },
	{ "\x28\xb5\x2f\xfd", 4, "compressed by zstd", UNPACK },
	{ "\xfd"
	  "7zXZ",
	  5, "compressed by xz", UNPACK },
	{ "BZh", 3, "compressed by bzip2", UNPACK },
	{ "\x89HDF", 4, "an HDF5 file", "load it with a reader of that format" },
	{ "7z\xbc\xaf", 4, "a 7z archive", UNPACK },
};

/* Its header is the length of a JSON text, and then that text. */
static bool looks_like_safetensors(const uint8_t *head, size_t bytes, uint64_t file_bytes)
{
	return bytes >= 9 && head[8] == '{' && base_get_le(head, 8) < file_bytes;
}

static int refuse_without_end(const struct zip_source *source)
{
	uint8_t head[16] = { 0 };
	size_t bytes = MIN(source->bytes, sizeof(head));
	int ret;

	if (!source->bytes)
		return base_refuse(
			source->error, IOSHAPE_E_DAMAGED,
			"cannot load \"%s\": it is empty, truncated or never written" BASE_REMEDY
			"use another copy",
			source->path);
	ret = zip_source_get(source, 0, head, bytes);
	if (ret)
		return ret;
	if (bytes < 4 ? head[0] == 'P' : base_get_le(head, 4) == ZIP_LOCAL_SIGNATURE)
		return base_refuse(source->error, IOSHAPE_E_DAMAGED,
				   "cannot load \"%s\": it begins like a torch zip but has no end "
				   "record, so it is truncated (%s are left)" BASE_REMEDY
				   "use another copy",
				   source->path, BASE_SIZE(source->bytes));
	for (size_t i = 0; i < ARRAY_LENGTH(known_beginnings); i++)
		if (bytes >= known_beginnings[i].length &&
		    !memcmp(head, known_beginnings[i].bytes, known_beginnings[i].length))
			return base_refuse(source->error, IOSHAPE_E_FORMAT,
					   "cannot load \"%s\": it is %s" BASE_REMEDY "%s",
					   source->path, known_beginnings[i].what,
					   known_beginnings[i].remedy);
	if (looks_like_safetensors(head, bytes, source->bytes))
		return base_refuse(
			source->error, IOSHAPE_E_FORMAT,
			"cannot load \"%s\": it looks like a safetensors file" BASE_REMEDY
			"load it with that library",
			source->path);
	return base_refuse(
		source->error, IOSHAPE_E_FORMAT,
		"cannot load \"%s\": it has neither the beginning nor the end of a zip" BASE_REMEDY
		"check that it was written by torch.save() or by this library",
		source->path);
}

/* ---- The records at the end ------------------------------------------------------------------ */

static int refuse(const struct zip_source *source, const char *what)
{
	return base_refuse(source->error, IOSHAPE_E_DAMAGED,
			   "cannot load \"%s\": %s, so the file is damaged or truncated" BASE_REMEDY
			   "use another copy",
			   source->path, what);
}

static int refuse_disks(const struct zip_source *source)
{
	return base_refuse(
		source->error, IOSHAPE_E_FORMAT,
		"cannot load \"%s\": it is one part of a zip split over several" BASE_REMEDY
		"join them first",
		source->path);
}

/* The tail's last end record, by its position in the tail. */
static int seek_end_record(const struct zip_source *source, const uint8_t *tail, size_t bytes,
			   size_t *position)
{
	size_t at;

	if (bytes < ZIP_END_BYTES)
		return refuse_without_end(source);
	for (at = bytes - ZIP_END_BYTES; base_get_le(tail + at, 4) != ZIP_END_SIGNATURE; at--)
		if (!at)
			return refuse_without_end(source);
	/*
	 * A comment that holds the signature itself is refused here as well: other readers would
	 * not see the archive that we see.
	 */
	if (at + ZIP_END_BYTES + base_get_le(tail + at + ZIP_END_COMMENT, 2) != bytes)
		return refuse(source,
			      "its end record does not end where the file ends, so bytes were "
			      "appended or are missing");
	*position = at;
	return 0;
}

/* A number in the end record is that of the zip64 end record, or all ones. */
static bool agrees(uint64_t old, uint64_t all_ones, uint64_t number)
{
	return old == number || old == all_ones;
}

/* `locator` lies at `offset` of the file; *directory_end receives where the directory has to end.
 */
static int read_zip64_end(const struct zip_source *source, const uint8_t *locator, uint64_t offset,
			  const uint8_t *record, struct zip_end *end, uint64_t *directory_end)
{
	uint64_t begin = base_get_le(locator + ZIP64_LOCATOR_OFFSET, 8);
	uint8_t zip64[ZIP64_END_BYTES];
	int ret;

	if (base_get_le(locator + ZIP64_LOCATOR_DISK, 4) ||
	    base_get_le(locator + ZIP64_LOCATOR_DISKS, 4) > 1)
		return refuse_disks(source);
	if (begin > offset || offset - begin < ZIP64_END_BYTES)
		return refuse(source, "its zip64 locator points to a wrong place");
	ret = zip_source_get(source, begin, zip64, sizeof(zip64));
	if (ret)
		return ret;
	if (base_get_le(zip64, 4) != ZIP64_END_SIGNATURE ||
	    base_get_le(zip64 + ZIP64_END_LENGTH, 8) != offset - begin - ZIP64_END_LENGTH_STARTS)
		return refuse(source, "there is no zip64 end record where its locator points to");
	if (base_get_le(zip64 + ZIP64_END_DISK, 4) ||
	    base_get_le(zip64 + ZIP64_END_DIRECTORY_DISK, 4))
		return refuse_disks(source);
	end->count = base_get_le(zip64 + ZIP64_END_COUNT, 8);
	end->bytes = base_get_le(zip64 + ZIP64_END_SIZE, 8);
	end->offset = base_get_le(zip64 + ZIP64_END_OFFSET, 8);
	if (base_get_le(zip64 + ZIP64_END_DISK_COUNT, 8) != end->count ||
	    !agrees(base_get_le(record + ZIP_END_COUNT, 2), ZIP_IN_ZIP64_16, end->count) ||
	    !agrees(base_get_le(record + ZIP_END_SIZE, 4), ZIP_IN_ZIP64_32, end->bytes) ||
	    !agrees(base_get_le(record + ZIP_END_OFFSET, 4), ZIP_IN_ZIP64_32, end->offset))
		return refuse(source,
			      "its end record and its zip64 end record contradict each other");
	*directory_end = begin;
	return 0;
}

static int check_end(const struct zip_source *source, const struct zip_end *end,
		     uint64_t directory_end)
{
	if (end->offset > directory_end || directory_end - end->offset != end->bytes)
		return refuse(source, "its directory does not lie where its end record says");
	if (!end->count)
		return base_refuse(
			source->error, IOSHAPE_E_FORMAT,
			"cannot load \"%s\": it is a zip without any record, not a torch zip",
			source->path);
	if (end->count > ZIP_MAX_RECORDS || end->bytes > ZIP_MAX_DIRECTORY_BYTES)
		return base_refuse(
			source->error, IOSHAPE_E_LIMIT,
			"cannot load \"%s\": it says to have %" PRIu64
			" records in a directory of %s, and at most %u in %s are supported",
			source->path, end->count, BASE_SIZE(end->bytes), ZIP_MAX_RECORDS,
			BASE_SIZE(ZIP_MAX_DIRECTORY_BYTES));
	if (end->count * ZIP_CENTRAL_BYTES > end->bytes)
		return refuse(source, "its directory is too short for so many records");
	return 0;
}

static int read_end(const struct zip_source *source, const uint8_t *tail, size_t bytes,
		    struct zip_end *end)
{
	const uint8_t *record, *locator;
	uint64_t directory_end;
	size_t at = 0;
	int ret;

	ret = seek_end_record(source, tail, bytes, &at);
	if (ret)
		return ret;
	record = tail + at;
	directory_end = source->bytes - bytes + at;
	if (!agrees(base_get_le(record + ZIP_END_DISK, 2), ZIP_IN_ZIP64_16, 0) ||
	    !agrees(base_get_le(record + ZIP_END_DIRECTORY_DISK, 2), ZIP_IN_ZIP64_16, 0) ||
	    base_get_le(record + ZIP_END_DISK_COUNT, 2) != base_get_le(record + ZIP_END_COUNT, 2))
		return refuse_disks(source);
	end->count = base_get_le(record + ZIP_END_COUNT, 2);
	end->bytes = base_get_le(record + ZIP_END_SIZE, 4);
	end->offset = base_get_le(record + ZIP_END_OFFSET, 4);
	/*
	 * All ones without a locator is no contradiction: 65,535 records need no zip64 yet. Numbers
	 * that are wrong in that way do not pass check_end().
	 */
	locator = record - ZIP64_LOCATOR_BYTES;
	if (at >= ZIP64_LOCATOR_BYTES && base_get_le(locator, 4) == ZIP64_LOCATOR_SIGNATURE) {
		ret = read_zip64_end(source, locator, directory_end - ZIP64_LOCATOR_BYTES, record,
				     end, &directory_end);
		if (ret)
			return ret;
	}
	return check_end(source, end, directory_end);
}

int zip_find_end(const struct zip_source *source, struct zip_end *end)
{
	size_t bytes = (size_t)MIN(source->bytes, TAIL_BYTES);
	uint8_t *tail;
	int ret;

	if (source->bytes > ZIP_MAX_FILE_BYTES)
		return base_refuse(source->error, IOSHAPE_E_LIMIT, "cannot load \"%s\": it has %s",
				   source->path, BASE_SIZE(source->bytes));
	tail = malloc(MAX(bytes, 1));
	if (!tail)
		return base_no_memory(source->error, "the end of the file", bytes);
	ret = zip_source_get(source, source->bytes - bytes, tail, bytes);
	if (!ret)
		ret = read_end(source, tail, bytes, end);
	free(tail);
	return ret;
}
