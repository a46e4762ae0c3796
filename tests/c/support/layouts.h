/* SPDX-License-Identifier: Apache-2.0 */
/* Builds layouts as Lustre's servers send them, and invalid ones. */
#ifndef TESTS_SUPPORT_LAYOUTS_H
#define TESTS_SUPPORT_LAYOUTS_H

#include <stddef.h>
#include <stdint.h>

#define LAYOUT_V1 0x0bd10bd0u
#define LAYOUT_V3 0x0bd30bd0u
#define LAYOUT_SPECIFIC 0x0bd50bd0u
#define LAYOUT_COMPOSITE 0x0bd60bd0u
#define LAYOUT_FOREIGN 0x0bd70bd0u
#define LAYOUT_EXTENDING 0x0bd80bd0u

#define LAYOUT_RAID0 0x1u
#define LAYOUT_METADATA 0x100u
#define LAYOUT_OVERSTRIPED 0x200u
#define LAYOUT_RELEASED 0x80000000u

#define LAYOUT_STALE 0x1u
#define LAYOUT_INIT 0x10u
#define LAYOUT_EXTENSION 0x40u

struct layout_plain {
	uint32_t magic; /* 0: version 1, or version 3 if there is a pool */
	uint32_t pattern;
	uint32_t stripe_bytes;
	uint16_t stripe_count;
	const char *pool;
	uint16_t objects; /* number of targets in the list that follows */
};

struct layout_component {
	uint64_t begin, end;
	uint32_t id, flags;
	struct layout_plain plain;
};

struct layout_bytes {
	size_t bytes;
	uint8_t data[8192];
};

void layout_put(struct layout_bytes *blob, size_t at, uint64_t value, unsigned bytes);
/* Appends a simple layout. */
void layout_add_plain(struct layout_bytes *blob, const struct layout_plain *plain);
/* Fills `blob` with a composite layout. */
void layout_composite(struct layout_bytes *blob, uint32_t magic, uint16_t mirrors,
		      const struct layout_component *components, uint16_t count);

#endif
