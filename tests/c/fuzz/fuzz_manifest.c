/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Parses any text as a manifest. An accepted manifest must be consistent, and is written and read
 * again.
 */
#include "format/manifest.h"
#include "fuzz.h"

#include <string.h>

static void must_hold(const struct format_manifest *manifest)
{
	MUST(manifest->rank_count && manifest->rank_count <= FORMAT_MAX_RANKS);
	MUST(manifest->file_count && manifest->file_count <= FORMAT_MAX_RANKS);
	for (uint32_t i = 0; i < manifest->file_count; i++) {
		const char *name = manifest->files[i].name;

		MUST(*name && strlen(name) <= FORMAT_MAX_FILE_NAME_BYTES);
		MUST(!strchr(name, '/') && strcmp(name, ".") != 0 && strcmp(name, "..") != 0);
		MUST(strcmp(name, FORMAT_MANIFEST_NAME) != 0);
	}
	for (uint32_t i = 0; i < manifest->rank_count; i++) {
		const struct format_manifest_shard *shard = &manifest->shards[i];

		MUST(shard->file < manifest->file_count);
		MUST(shard->bytes <= manifest->files[shard->file].bytes);
		MUST(shard->offset <= manifest->files[shard->file].bytes - shard->bytes);
	}
}

static void try_text(const uint8_t *text, size_t bytes)
{
	struct base_buffer first = { 0 }, second = { 0 };
	struct format_manifest manifest, again;
	struct base_error error = { 0 };
	int ret;

	ret = format_manifest_decode(&manifest, (const char *)text, bytes, "manifest.json", &error);
	MUST(ret == error.code);
	if (ret) {
		MUST(!manifest.files && !manifest.shards);
		return;
	}
	must_hold(&manifest);
	MUST(!format_manifest_encode(&first, &manifest));
	MUST(!format_manifest_decode(&again, (const char *)first.data, first.bytes, "again",
				     &error));
	MUST(!format_manifest_encode(&second, &again));
	MUST(first.bytes == second.bytes && !memcmp(first.data, second.data, first.bytes));
	format_manifest_free(&manifest);
	format_manifest_free(&again);
	base_buffer_free(&first);
	base_buffer_free(&second);
}

/* Tries the text with a correct checksum, which mutations would hardly find. */
static void try_with_checksum(const uint8_t *data, size_t bytes)
{
	struct base_buffer text = { 0 };
	char tail[64];

	snprintf(tail, sizeof(tail), "  \"crc32\": \"%08x\"\n}\n", base_crc32(0, data, bytes));
	MUST(!base_buffer_append(&text, data, bytes));
	MUST(!base_buffer_append(&text, tail, strlen(tail)));
	try_text(text.data, text.bytes);
	base_buffer_free(&text);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes)
{
	try_text(data, bytes);
	try_with_checksum(data, bytes);
	return 0;
}
