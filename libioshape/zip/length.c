/* SPDX-License-Identifier: Apache-2.0 */
/* How long an archive will be, before its first byte: what plan.c, index.c and encode.c make of it.
 */
#include "zip/layout.h"
#include "zip/zip.h"

#include <string.h>

static void add_entry(struct zip_length *length, size_t name_bytes, uint64_t bytes,
		      const struct zip_place *place)
{
	const struct zip_entry entry = {
		.name_bytes = (uint32_t)name_bytes,
		.bytes = bytes,
		.header_offset = place->header_offset,
	};

	length->directory_bytes += zip_directory_bytes(&entry, 1) - zip_directory_bytes(NULL, 0);
	length->records++;
	length->checks += (bytes + ZIP_CHECK_BYTES - 1) / ZIP_CHECK_BYTES;
}

int zip_length_add(struct zip_length *length, size_t name_bytes, uint64_t bytes, uint32_t alignment)
{
	struct zip_place place;
	int ret = zip_place_record(length->cursor, name_bytes, bytes,
				   alignment ? alignment : zip_default_alignment(bytes), &place);

	if (ret)
		return ret;
	add_entry(length, name_bytes, bytes, &place);
	length->cursor = place.end;
	return 0;
}

int zip_length_add_member(struct zip_length *length, size_t name_bytes, uint64_t bytes,
			  uint64_t alignment)
{
	struct zip_place place;
	int ret = zip_place_member(length->cursor, name_bytes, alignment, &place);

	if (ret)
		return ret;
	add_entry(length, name_bytes, bytes, &place);
	length->cursor = place.data_offset + bytes + zip_descriptor_bytes(true);
	return length->cursor > ZIP_MAX_FILE_BYTES ? IOSHAPE_E_LIMIT : 0;
}

int zip_length_add_index(struct zip_length *length, const struct zip_index *given)
{
	struct base_buffer rest = { 0 };
	struct zip_index index = *given;
	uint64_t bytes;
	int ret;

	/* All but what grows with the records. */
	index.records = index.check_count = 0;
	ret = zip_index_encode(&rest, &index);
	bytes = rest.bytes + length->records * sizeof(*index.data_offsets) +
		base_round_up(length->checks * sizeof(*index.checks), sizeof(uint64_t));
	base_buffer_free(&rest);
	return ret ? ret :
		     zip_length_add(length, strlen(ZIP_FOLDER) + strlen(ZIP_INDEX_RECORD), bytes,
				    0);
}

uint64_t zip_length_of(const struct zip_length *length)
{
	return length->cursor + length->directory_bytes + zip_directory_bytes(NULL, 0);
}
