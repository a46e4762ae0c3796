/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Decodes any bytes as the checksums and as the statistics beside a file. Accepted checksums must
 * be encoded to equal bytes.
 */
#include "format/index.c"
#include "fuzz.h"

static void try_statistics(const uint8_t *data, size_t bytes)
{
	struct format_statistics found;
	int ret = format_statistics_decode(&found, data, bytes);

	MUST(!ret || ret == IOSHAPE_E_FORMAT || ret == IOSHAPE_E_DAMAGED || ret == -ENOMEM);
	if (!ret)
		format_statistics_free(&found);
}

static void try_bytes(const uint8_t *data, size_t bytes)
{
	struct format_checksums found;
	struct base_buffer again = { 0 };
	int ret = format_checksums_decode(&found, data, bytes);

	MUST(!ret || ret == IOSHAPE_E_FORMAT || ret == IOSHAPE_E_DAMAGED || ret == -ENOMEM);
	try_statistics(data, bytes);
	if (ret)
		return;
	MUST(checksums_valid(&found));
	MUST(!format_checksums_encode(&again, &found));
	MUST(again.bytes == bytes && !memcmp(again.data, data, bytes));
	base_buffer_free(&again);
	format_checksums_free(&found);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes)
{
	/* An exact copy, so that sanitizers detect a read beyond it. */
	uint8_t *copy = malloc(bytes + 1);

	MUST(copy);
	if (bytes)
		memcpy(copy, data, bytes);
	try_bytes(copy, bytes);
	/* Tries again with a correct checksum, which mutations would not find. */
	if (bytes > 16) {
		base_put_le(copy + 12, base_crc32(0, copy + 16, bytes - 16), 4);
		try_bytes(copy, bytes);
	}
	free(copy);
	return 0;
}
