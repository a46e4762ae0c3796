/* SPDX-License-Identifier: Apache-2.0 */
#include "zip/layout.h"
#include "zip/zip.h"

#include <errno.h>

uint32_t zip_default_alignment(uint64_t bytes)
{
	return bytes >= ZIP_LARGE_RECORD_BYTES ? ZIP_LARGE_ALIGNMENT : ZIP_SMALL_ALIGNMENT;
}

/* A header at `cursor` with no more padding than it must have. `end` is where it ends. */
static int begin_place(uint64_t cursor, size_t name_bytes, bool zip64, struct zip_place *place,
		       uint64_t *end)
{
	*place = (struct zip_place){ .zip64 = zip64 };
	if (!name_bytes || name_bytes > ZIP_MAX_FULL_NAME_BYTES || cursor > ZIP_MAX_FILE_BYTES)
		return IOSHAPE_E_LIMIT;
	*end = cursor + ZIP_LOCAL_BYTES + name_bytes + (zip64 ? ZIP64_LOCAL_FIELD_BYTES : 0) +
	       ZIP_PADDING_FIELD_BYTES;
	return 0;
}

int zip_place_record(uint64_t cursor, size_t name_bytes, uint64_t bytes, uint32_t alignment,
		     struct zip_place *place)
{
	/*
	 * Sizes from 2^32 - 1 on do not fit the header's old fields, since all ones stand for "look
	 * in the zip64 field". Offsets do not matter here: local headers hold none.
	 */
	const bool zip64 = bytes >= UINT32_MAX;
	uint64_t header_end = 0;
	int ret;

	if (!alignment || alignment & (alignment - 1) || alignment > ZIP_LARGE_ALIGNMENT)
		return -EINVAL;
	ret = begin_place(cursor, name_bytes, zip64, place, &header_end);
	if (ret)
		return ret;
	place->header_offset = cursor;
	place->data_offset = base_round_up(header_end, alignment);
	place->header_bytes = (uint32_t)(place->data_offset - cursor);
	place->descriptor_offset = place->end = place->data_offset;
	if (bytes != IOSHAPE_UNKNOWN_BYTES) {
		/* Written so that no sum can wrap: the left side is far below 2^64. */
		if (bytes > ZIP_MAX_FILE_BYTES)
			return IOSHAPE_E_LIMIT;
		place->descriptor_offset += bytes;
		place->end = place->descriptor_offset + zip_descriptor_bytes(zip64);
	}
	return place->end > ZIP_MAX_FILE_BYTES ? IOSHAPE_E_LIMIT : 0;
}

int zip_place_member(uint64_t cursor, size_t name_bytes, uint64_t alignment,
		     struct zip_place *place)
{
	uint64_t end = 0, past;
	int ret;

	if (!alignment || alignment % ZIP_LARGE_ALIGNMENT || alignment > ZIP_MAX_MEMBER_ALIGNMENT)
		return -EINVAL;
	ret = begin_place(cursor, name_bytes, true, place, &end);
	if (ret)
		return ret;
	place->header_bytes = (uint32_t)(end - cursor);
	past = end % alignment; /* which need not be a power of two */
	place->data_offset = past ? end + (alignment - past) : end;
	place->header_offset = place->data_offset - place->header_bytes;
	place->descriptor_offset = place->end = place->data_offset;
	return place->end > ZIP_MAX_FILE_BYTES ? IOSHAPE_E_LIMIT : 0;
}
