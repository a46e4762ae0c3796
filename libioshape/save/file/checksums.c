/* SPDX-License-Identifier: Apache-2.0 */
/* Checksums of files in other formats: computed while they are written, and put beside them. */
#include "save/file/file.h"

#include <errno.h>
#include <stdlib.h>

/* As in our own files. */
#define BLOCK_BYTES ZIP_CHECK_BYTES

static int end_block(struct save_checksums *checksums, struct base_error *error)
{
	if (base_buffer_append(&checksums->crcs, &checksums->crc, sizeof(checksums->crc)))
		return base_no_memory(error, "checksums", checksums->crcs.bytes);
	checksums->crc = 0;
	checksums->filled = 0;
	return 0;
}

int save_checksums_put(struct save_checksums *checksums, struct ring_writer *file, const void *data,
		       size_t bytes, uint32_t *crc, struct base_error *error)
{
	const uint8_t *from = data;
	int ret = 0;

	for (size_t piece; !ret && bytes; from += piece, bytes -= piece) {
		const uint32_t before = checksums->crc;

		piece = MIN(bytes, BLOCK_BYTES - checksums->filled);
		/* Both come from the piece's own: no byte is looked at twice. */
		if (crc)
			checksums->crc = 0;
		ret = ring_writer_put(file, from, piece, &checksums->crc, error);
		if (crc) {
			*crc = base_crc32_combine(*crc, checksums->crc, piece);
			checksums->crc = base_crc32_combine(before, checksums->crc, piece);
		}
		checksums->filled += piece;
		if (!ret && checksums->filled == BLOCK_BYTES)
			ret = end_block(checksums, error);
	}
	return ret;
}

int save_checksums_end(struct save_checksums *checksums, struct base_error *error)
{
	return checksums->filled ? end_block(checksums, error) : 0;
}

struct zip_checksums save_checksums_of(const struct save_checksums *checksums,
				       const struct ring_writer *file)
{
	return (struct zip_checksums){
		.file_bytes = ring_writer_offset(file),
		.block_bytes = BLOCK_BYTES,
		.blocks = checksums->crcs.bytes / sizeof(uint32_t),
		.crc32 = (const uint32_t *)(const void *)checksums->crcs.data,
		.modified_ns = ring_writer_modified_ns(file),
	};
}

void save_checksums_put_beside(const struct save_checksums *checksums, struct ring_writer *file,
			       struct ring_notes *notes)
{
	const struct zip_checksums all = save_checksums_of(checksums, file);
	struct base_buffer bytes = { 0 };
	struct base_error error = { 0 };
	int ret;

	if (!checksums->beside || !all.modified_ns)
		return;
	ret = zip_checksums_encode(&bytes, &all);
	if (ret == -ENOMEM)
		base_no_memory(&error, "checksums", bytes.bytes);
	else if (ret)
		base_fail(&error, ret, "cannot keep checksums of a file of %s",
			  BASE_SIZE(all.file_bytes));
	else
		ret = ring_writer_put_beside(file, ZIP_CHECKSUMS_SUFFIX, bytes.data, bytes.bytes,
					     &error);
	/* The file is in place all the same. */
	if (ret)
		ring_note(notes, IOSHAPE_STEP_CHECKSUMS, "no checksums beside the file: %s",
			  error.text);
	base_buffer_free(&bytes);
}
