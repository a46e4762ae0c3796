/* SPDX-License-Identifier: Apache-2.0 */
#include "support/layouts.h"

#include <string.h>

#include "support/must.h"

#define HEADER_BYTES 32
#define ENTRY_BYTES 48

void layout_put(struct layout_bytes *blob, size_t at, uint64_t value, unsigned bytes)
{
	MUST(at + bytes <= sizeof(blob->data), "a layout that is too long");
	for (unsigned i = 0; i < bytes; i++)
		blob->data[at + i] = (uint8_t)(value >> 8 * i);
	if (blob->bytes < at + bytes)
		blob->bytes = at + bytes;
}

void layout_add_plain(struct layout_bytes *blob, const struct layout_plain *plain)
{
	uint32_t magic = plain->magic;
	size_t at = blob->bytes;

	if (!magic)
		magic = plain->pool ? LAYOUT_V3 : LAYOUT_V1;
	layout_put(blob, at, magic, 4);
	layout_put(blob, at + 4, plain->pattern, 4);
	layout_put(blob, at + 8, 0x1234, 8);
	layout_put(blob, at + 16, 0x200000401, 8);
	layout_put(blob, at + 24, plain->stripe_bytes, 4);
	layout_put(blob, at + 28, plain->stripe_count, 2);
	layout_put(blob, at + 30, 0xffff, 2);
	at += 32;
	if (magic != LAYOUT_V1) {
		memset(blob->data + at, 0, 16);
		if (plain->pool)
			memcpy(blob->data + at, plain->pool, strlen(plain->pool));
		at += 16;
	}
	blob->bytes = at;
	for (uint16_t i = 0; i < plain->objects; i++, at += 24) {
		layout_put(blob, at, 100 + i, 8);
		layout_put(blob, at + 8, 0, 8);
		layout_put(blob, at + 16, 0, 4);
		layout_put(blob, at + 20, i, 4);
	}
}

void layout_composite(struct layout_bytes *blob, uint32_t magic, uint16_t mirrors,
		      const struct layout_component *components, uint16_t count)
{
	size_t begin, entry;

	memset(blob->data, 0, sizeof(blob->data));
	blob->bytes = 0;
	layout_put(blob, 0, magic, 4);
	layout_put(blob, 8, 7, 4);
	layout_put(blob, 14, count, 2);
	layout_put(blob, 16, mirrors - 1u, 2);
	blob->bytes = HEADER_BYTES + (size_t)count * ENTRY_BYTES;
	for (uint16_t i = 0; i < count; i++) {
		entry = HEADER_BYTES + (size_t)i * ENTRY_BYTES;
		begin = blob->bytes;
		layout_add_plain(blob, &components[i].plain);
		layout_put(blob, entry, components[i].id ? components[i].id : i + 1u, 4);
		layout_put(blob, entry + 4, components[i].flags, 4);
		layout_put(blob, entry + 8, components[i].begin, 8);
		layout_put(blob, entry + 16, components[i].end, 8);
		layout_put(blob, entry + 24, begin, 4);
		layout_put(blob, entry + 28, blob->bytes - begin, 4);
	}
	layout_put(blob, 4, blob->bytes, 4);
}
