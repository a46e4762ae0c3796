/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The file of checksums that lies beside a file in another format. docs/format.md explains its
 * bytes. All numbers are little-endian.
 */
#include "zip/index.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#define MAGIC "ioshsums"
#define MAGIC_BYTES 8u
#define VERSION BASE_FORMAT(1u)

/* magic, u32 version, u32 CRC-32 of all that follows, u64 block_bytes, u64 file_bytes,
 * i64 modified_ns; then u32 for each block */
#define CRC_AT 12u
#define CHECKED_FROM 16u
#define HEADER_BYTES 40u
#define CRC_BYTES 4u

uint64_t zip_checksums_blocks(uint64_t file_bytes, uint64_t block_bytes)
{
	return file_bytes ? (file_bytes - 1) / block_bytes + 1 : 0;
}

bool zip_checksums_valid(const struct zip_checksums *checksums)
{
	const uint64_t unit = checksums->block_bytes;

	return unit >= ZIP_LEAST_CHECK_BYTES && unit <= ZIP_MOST_CHECK_BYTES &&
	       !(unit & (unit - 1)) &&
	       checksums->blocks == zip_checksums_blocks(checksums->file_bytes, unit) &&
	       (checksums->crc32 || !checksums->blocks);
}

int zip_checksums_encode(struct base_buffer *out, const struct zip_checksums *checksums)
{
	const size_t bytes = HEADER_BYTES + CRC_BYTES * checksums->blocks;
	uint8_t *at;

	if (bytes > ZIP_MOST_CHECKSUMS_BYTES)
		return -EFBIG;
	if (base_buffer_reserve(out, bytes))
		return -ENOMEM;
	at = out->data + out->bytes;
	memcpy(at, MAGIC, MAGIC_BYTES);
	base_put_le(at + MAGIC_BYTES, VERSION, 4);
	base_put_le(at + CHECKED_FROM, checksums->block_bytes, 8);
	base_put_le(at + 24, checksums->file_bytes, 8);
	base_put_le(at + 32, (uint64_t)checksums->modified_ns, 8);
	for (uint64_t i = 0; i < checksums->blocks; i++)
		base_put_le(at + HEADER_BYTES + CRC_BYTES * i, checksums->crc32[i], CRC_BYTES);
	base_put_le(at + CRC_AT, base_crc32(0, at + CHECKED_FROM, bytes - CHECKED_FROM), 4);
	out->bytes += bytes;
	return 0;
}

int zip_checksums_decode(struct zip_checksums *checksums, const uint8_t *data, size_t bytes)
{
	struct zip_checksums found = { 0 };
	uint32_t *values;

	if (bytes < HEADER_BYTES || memcmp(data, MAGIC, MAGIC_BYTES) != 0)
		return IOSHAPE_E_FORMAT;
	if (base_get_le(data + MAGIC_BYTES, 4) != VERSION)
		return IOSHAPE_E_FORMAT;
	if (base_get_le(data + CRC_AT, 4) !=
	    base_crc32(0, data + CHECKED_FROM, bytes - CHECKED_FROM))
		return IOSHAPE_E_DAMAGED;
	found.block_bytes = base_get_le(data + CHECKED_FROM, 8);
	found.file_bytes = base_get_le(data + 24, 8);
	found.modified_ns = (int64_t)base_get_le(data + 32, 8);
	found.blocks = (bytes - HEADER_BYTES) / CRC_BYTES;
	values = malloc(MAX(bytes - HEADER_BYTES, 1));
	found.crc32 = values;
	if (!values)
		return -ENOMEM;
	if ((bytes - HEADER_BYTES) % CRC_BYTES || !zip_checksums_valid(&found)) {
		free(values);
		return IOSHAPE_E_DAMAGED;
	}
	for (uint64_t i = 0; i < found.blocks; i++)
		values[i] = (uint32_t)base_get_le(data + HEADER_BYTES + CRC_BYTES * i, CRC_BYTES);
	*checksums = found;
	return 0;
}

void zip_checksums_free(struct zip_checksums *checksums)
{
	free((void *)(uintptr_t)checksums->crc32);
	memset(checksums, 0, sizeof(*checksums));
}
