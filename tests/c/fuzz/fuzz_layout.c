/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Parses any bytes as a filesystem's answer about a layout and as a mount table. Each input is
 * tried in each way.
 */
/* Included, because their parsers are static. */
#include "fs/beegfs_ceph.c"
#undef STRIPE_UNIT
#include "fs/lustre.c"
#undef PATH_BYTES
#include "fs/storage.c"
#include "fuzz.h"

static bool has_end(const char *text, size_t room)
{
	return memchr(text, 0, room);
}

/* Uses a layout in all ways. */
static void use(const struct fs_layout *layout)
{
	char text[96], small[8];

	fs_layout_text(layout, text, sizeof(text));
	fs_layout_text(layout, small, sizeof(small));
	MUST(has_end(text, sizeof(text)) && has_end(small, sizeof(small)));
	MUST(!layout->count == !*text);
	for (uint64_t offset = 1; offset; offset <<= 7) {
		const struct fs_component *part = fs_layout_at(layout, offset);
		const struct fs_component *most = fs_layout_main(layout, offset);

		MUST(!part || (part->begin <= offset && offset <= part->end));
		MUST(!most || most->begin < offset);
	}
}

static void check(const struct fs_layout *layout, int ret)
{
	MUST(!ret || ret == -EINVAL || ret == -ENOTSUP || ret == -E2BIG);
	MUST((!ret || ret == -E2BIG) == (layout->count > 0));
	MUST(layout->count <= FS_MOST_COMPONENTS);
	for (uint32_t i = 0; i < layout->count; i++) {
		const struct fs_component *part = &layout->components[i];

		MUST(part->begin <= part->end && part->stripe_bytes % (64 * KIB) == 0);
		MUST(!i || part[-1].end <= part->begin);
		MUST(has_end(part->pool, sizeof(part->pool)));
		MUST(part->stripe_count <= 65535 || part->stripe_count == FS_ALL_TARGETS);
	}
	use(layout);
}

/*
 * Parses the input as the only component of a composite layout. Mutations would hardly find both
 * byte orders, or a table whose entry fits.
 */
static void try_component(const uint8_t *data, size_t bytes)
{
	uint8_t *blob = calloc(1, 80 + bytes);
	struct fs_layout layout;

	MUST(blob);
	base_put_le(blob, 0x0bd60bd0, 4);
	base_put_le(blob + 4, 80 + bytes, 4);
	base_put_le(blob + 14, 1, 2);
	base_put_le(blob + 32 + 16, UINT64_MAX, 8);
	base_put_le(blob + 32 + 24, 80, 4);
	base_put_le(blob + 32 + 28, bytes, 4);
	if (bytes)
		memcpy(blob + 80, data, bytes);
	check(&layout, parse_layout(blob, 80 + bytes, &layout));
	free(blob);
}

static void try_mount_table(const char *text)
{
	struct fs_mount mount;
	char pool[FS_POOL_BYTES];
	const char *name;

	for (uint64_t number = 0; number < 102; number += 101) {
		memset(&mount, 0xa5, sizeof(mount));
		if (find_line(text, number, 0, 46, &mount))
			continue;
		MUST(*mount.type && has_end(mount.type, sizeof(mount.type)));
		MUST(*mount.mount_point && has_end(mount.mount_point, sizeof(mount.mount_point)));
		MUST(has_end(mount.source, sizeof(mount.source)));
		MUST(has_end(mount.options, sizeof(mount.options)));
		name_mount(mount.type, mount.source, "flash", "host", pool);
		MUST(has_end(pool, sizeof(pool)) &&
		     strspn(pool, FS_POOL_CHARACTERS) == strlen(pool));
		MUST(fs_lustre_name(mount.source, &name) < sizeof(mount.source));
	}
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes)
{
	struct fs_layout layout;
	char *text = malloc(bytes + 1);

	MUST(text);
	if (bytes)
		memcpy(text, data, bytes);
	text[bytes] = 0;
	check(&layout, parse_layout(data, bytes, &layout));
	try_component(data, bytes);
	check(&layout, parse_ceph_layout((const char *)data, bytes, &layout));
	try_mount_table(text);
	free(text);
	return 0;
}
