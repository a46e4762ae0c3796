/* SPDX-License-Identifier: Apache-2.0 */
/* Any bytes as the checksums beside a file. What is accepted is what is written of it. */
#include "format/index.c"
#include "fuzz.h"

static void try_bytes(const uint8_t *data, size_t bytes)
{
	struct format_checksums found;
	struct base_buffer again = { 0 };
	int ret = format_checksums_decode(&found, data, bytes);

	MUST(!ret || ret == IOSHAPE_E_FORMAT || ret == IOSHAPE_E_DAMAGED || ret == -ENOMEM);
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
	/* Of its own, so that a read beyond it is noticed. */
	uint8_t *copy = malloc(bytes + 1);

	MUST(copy);
	if (bytes)
		memcpy(copy, data, bytes);
	try_bytes(copy, bytes);
	/* The same with a checksum that is right, which nobody guesses. */
	if (bytes > 16) {
		base_put_le(copy + 12, base_crc32(0, copy + 16, bytes - 16), 4);
		try_bytes(copy, bytes);
	}
	free(copy);
	return 0;
}
