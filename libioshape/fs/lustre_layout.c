/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What Lustre answers to "lustre.lov", as in lustre_user.h of its release 2.17. Pure: the bytes
 * come from a filesystem that may be broken, or from a daemon that plays one.
 */
#include "fs/fs.h"

#include <errno.h>
#include <string.h>

enum {
	MAGIC_V1 = 0x0bd10bd0,
	MAGIC_V3 = 0x0bd30bd0,
	MAGIC_SPECIFIC = 0x0bd50bd0, /* v3, with the targets chosen by hand */
	MAGIC_COMPOSITE = 0x0bd60bd0,
	MAGIC_FOREIGN = 0x0bd70bd0,
	MAGIC_EXTENDING = 0x0bd80bd0 /* composite, with components that extend others */
};

/* Where the fields are. Targets follow behind a plain layout; nobody here needs them. */
enum {
	PATTERN_AT = 4,
	STRIPE_SIZE_AT = 24,
	STRIPE_COUNT_AT = 28,
	V1_BYTES = 32,
	POOL_AT = 32,
	POOL_BYTES = 16,
	V3_BYTES = 48,

	SIZE_AT = 4,
	ENTRY_COUNT_AT = 14,
	MIRRORS_AT = 16, /* less one */
	ENTRIES_AT = 32,
	ENTRY_BYTES = 48,
	ENTRY_FLAGS_AT = 4,
	ENTRY_BEGIN_AT = 8,
	ENTRY_END_AT = 16,
	ENTRY_BLOB_AT = 24,
	ENTRY_BLOB_BYTES_AT = 28
};

#define PATTERN_RAID0 0x1u
#define PATTERN_PARITY 0x4u
#define PATTERN_METADATA 0x100u
#define PATTERN_OVERSTRIPING 0x200u
#define PATTERN_FOREIGN 0x400u
#define PATTERN_RELEASED 0x80000000u /* the bytes are on tape */

#define ENTRY_STALE 0x1u
#define ENTRY_EXTENSION 0x40u

#define STRIPE_UNIT (64 * KIB)
#define MOST_STRIPES 2000
/* From here on it means: on all targets, so often on each. */
#define ALL_STRIPES_LEAST 0xffe0
#define ALL_STRIPES 0xffff

/* In the writer's byte order, which the magic shows. */
struct blob {
	const uint8_t *data;
	size_t bytes;
	bool big_endian;
};

static uint64_t take(const struct blob *blob, size_t at, unsigned bytes)
{
	uint64_t value = 0;

	if (!blob->big_endian)
		return base_get_le(blob->data + at, bytes);
	for (unsigned i = 0; i < bytes; i++)
		value = value << 8 | blob->data[at + i];
	return value;
}

static uint32_t take_32(const struct blob *blob, size_t at)
{
	return (uint32_t)take(blob, at, 4);
}

/* Anything at all that begins like this is of Lustre. 0 if it is not. */
static uint32_t read_magic(struct blob *blob)
{
	if (blob->bytes < 4)
		return 0;
	for (int order = 0; order < 2; order++) {
		blob->big_endian = order;
		/* The lower half is the same in all. */
		if ((take_32(blob, 0) & 0xff00ffff) == 0x0b000bd0)
			return take_32(blob, 0);
	}
	return 0;
}

static int read_stripes(const struct blob *blob, uint32_t pattern, struct fs_part *part)
{
	uint64_t size = take_32(blob, STRIPE_SIZE_AT);
	uint32_t count = (uint32_t)take(blob, STRIPE_COUNT_AT, 2);

	if (pattern & PATTERN_METADATA) {
		part->on_metadata = true;
		part->stripe_count = 1;
		return 0;
	}
	if (size % STRIPE_UNIT || (count > MOST_STRIPES && count < ALL_STRIPES_LEAST))
		return -EINVAL;
	part->stripe_bytes = size;
	part->stripe_count = count >= ALL_STRIPES_LEAST ? FS_ALL_TARGETS : count;
	part->overstriped = pattern & PATTERN_OVERSTRIPING ||
			    (count >= ALL_STRIPES_LEAST && count < ALL_STRIPES);
	return 0;
}

static int read_pool(const struct blob *blob, struct fs_part *part)
{
	const uint8_t *name = blob->data + POOL_AT;
	const uint8_t *end = memchr(name, 0, POOL_BYTES);

	if (!end)
		return -EINVAL;
	for (; name < end; name++) {
		/* It will be in reports, in names of slot pools and of files in /proc. */
		if (*name <= ' ' || *name >= 0x7f || *name == '/')
			return -EINVAL;
	}
	memcpy(part->pool, blob->data + POOL_AT, (size_t)(end - (blob->data + POOL_AT)));
	return 0;
}

/* One plain layout. */
static int read_part(struct blob blob, struct fs_part *part)
{
	uint32_t magic = read_magic(&blob), pattern;
	int ret;

	if (magic == MAGIC_FOREIGN)
		return -ENOTSUP;
	if (magic != MAGIC_V1 && magic != MAGIC_V3 && magic != MAGIC_SPECIFIC)
		return -EINVAL;
	if (blob.bytes < (magic == MAGIC_V1 ? V1_BYTES : V3_BYTES))
		return -EINVAL;
	pattern = take_32(&blob, PATTERN_AT);
	if (pattern & (PATTERN_RELEASED | PATTERN_FOREIGN | PATTERN_PARITY))
		return -ENOTSUP;
	/* Directories may leave it open. */
	if ((pattern & 0xffff) && !(pattern & (PATTERN_RAID0 | PATTERN_METADATA)))
		return -ENOTSUP;
	ret = read_stripes(&blob, pattern, part);
	if (!ret && magic != MAGIC_V1)
		ret = read_pool(&blob, part);
	return ret;
}

/* ---- Layouts of components ------------------------------------------------------------------- */

/* Components are listed mirror by mirror, in each from the file's beginning to its end. */
struct mirror {
	struct fs_layout layout;
	uint64_t end;    /* of the components so far */
	bool stale;      /* its bytes are not those of the file */
	bool understood; /* all of its components */
	bool too_many;   /* more than have room */
};

static void add_part(struct mirror *mirror, const struct fs_part *part)
{
	if (mirror->layout.count < FS_MOST_PARTS)
		mirror->layout.parts[mirror->layout.count++] = *part;
	else
		mirror->too_many = true;
}

/* One that extends the component before it, once that is full: for us, it is as if it had. */
static int extend_part(struct mirror *mirror, const struct fs_part *part)
{
	if (!mirror->layout.count)
		return -EINVAL;
	if (!mirror->too_many)
		mirror->layout.parts[mirror->layout.count - 1].end = part->end;
	return 0;
}

static int add_component(const struct blob *blob, size_t entry, struct mirror *mirror)
{
	uint32_t flags = take_32(blob, entry + ENTRY_FLAGS_AT);
	uint64_t at = take_32(blob, entry + ENTRY_BLOB_AT);
	uint64_t bytes = take_32(blob, entry + ENTRY_BLOB_BYTES_AT);
	struct fs_part part = {
		.begin = take(blob, entry + ENTRY_BEGIN_AT, 8),
		.end = take(blob, entry + ENTRY_END_AT, 8),
	};
	int ret;

	if (part.begin > part.end || part.begin < mirror->end)
		return -EINVAL;
	if (at > blob->bytes || bytes > blob->bytes - at)
		return -EINVAL;
	mirror->end = part.end;
	mirror->stale |= (flags & ENTRY_STALE) != 0;
	ret = read_part((struct blob){ blob->data + at, bytes, false }, &part);
	if (ret == -ENOTSUP)
		mirror->understood = false;
	if (ret)
		return ret == -ENOTSUP ? 0 : ret;
	if (flags & ENTRY_EXTENSION)
		return extend_part(mirror, &part);
	add_part(mirror, &part);
	return 0;
}

/* The bytes of a file are in the first mirror that is up to date, for whoever reads or writes. */
static void keep_better(const struct mirror *mirror, struct mirror *best)
{
	bool fit = mirror->understood && mirror->layout.count;
	bool best_fit = best->understood && best->layout.count;

	if (fit && (!best_fit || (best->stale && !mirror->stale)))
		*best = *mirror;
}

static int read_composite(struct blob *blob, struct fs_layout *layout)
{
	static const struct mirror none = { .understood = true };
	struct mirror mirror = none, best = none;
	uint64_t size;
	uint32_t count, mirrors;
	int ret;

	if (blob->bytes < ENTRIES_AT)
		return -EINVAL;
	size = take_32(blob, SIZE_AT);
	count = (uint32_t)take(blob, ENTRY_COUNT_AT, 2);
	mirrors = (uint32_t)take(blob, MIRRORS_AT, 2) + 1;
	if (size > blob->bytes || !count || mirrors > count ||
	    size < ENTRIES_AT + (uint64_t)count * ENTRY_BYTES)
		return -EINVAL;
	blob->bytes = size;
	for (uint32_t i = 0; i < count; i++) {
		size_t entry = ENTRIES_AT + (size_t)i * ENTRY_BYTES;

		if (i && !take(blob, entry + ENTRY_BEGIN_AT, 8) && mirror.end) {
			keep_better(&mirror, &best);
			mirror = none;
		}
		ret = add_component(blob, entry, &mirror);
		if (ret)
			return ret;
	}
	keep_better(&mirror, &best);
	if (!best.layout.count)
		return -ENOTSUP;
	*layout = best.layout;
	layout->mirrors = mirrors;
	return best.too_many ? -E2BIG : 0;
}

int fs_lustre_layout(const void *data, size_t bytes, struct fs_layout *layout)
{
	struct blob blob = { .data = data, .bytes = bytes };
	uint32_t magic = read_magic(&blob);
	struct fs_part part = { .end = UINT64_MAX };
	int ret;

	memset(layout, 0, sizeof(*layout));
	if (magic == MAGIC_COMPOSITE || magic == MAGIC_EXTENDING)
		return read_composite(&blob, layout);
	ret = read_part(blob, &part);
	if (ret)
		return ret;
	layout->count = 1;
	layout->mirrors = 1;
	layout->parts[0] = part;
	return 0;
}
