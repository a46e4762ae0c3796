/* SPDX-License-Identifier: Apache-2.0 */
/* Layouts of all kinds from the answers of filesystems, and answers that are invalid. */
/* Included, because their parsers are static. */
#include "fs/beegfs_ceph.c"
#undef STRIPE_UNIT
#include "fs/lustre.c"
#include "support/check_main.h"
#include "support/layouts.h"

#define END UINT64_MAX

/*
 * Parses an exact copy of the bytes, so that sanitizers detect a read beyond them. Checks the
 * invariants of the result.
 */
static int parse(const uint8_t *data, size_t bytes, struct fs_layout *layout)
{
	uint8_t *copy = malloc(bytes ? bytes : 1);
	int ret;

	REQUIRE(copy);
	memcpy(copy, data, bytes);
	memset(layout, 0xa5, sizeof(*layout));
	ret = parse_layout(copy, bytes, layout);
	free(copy);
	REQUIRE(layout->count <= FS_MOST_COMPONENTS);
	REQUIRE(!ret || ret == -EINVAL || ret == -ENOTSUP || ret == -E2BIG);
	REQUIRE((!ret || ret == -E2BIG) == (layout->count > 0));
	for (uint32_t i = 0; i < layout->count; i++) {
		REQUIRE(layout->components[i].begin <= layout->components[i].end);
		REQUIRE(!i || layout->components[i].begin >= layout->components[i - 1].end);
		REQUIRE(memchr(layout->components[i].pool, 0, FS_TARGET_POOL_BYTES));
		REQUIRE(layout->components[i].stripe_bytes % 65536 == 0);
	}
	return ret;
}

static const char *text_of(const struct fs_layout *layout)
{
	static char text[96];

	fs_layout_text(layout, text, sizeof(text));
	return text;
}

/* ---- Plain layouts --------------------------------------------------------------------------- */

static const struct {
	struct layout_plain plain;
	const char *text;
	int result;
} plains[] = {
	{ { 0, LAYOUT_RAID0, 1 << 20, 8, NULL, 8 }, "8 x 1M", 0 },
	{ { 0, LAYOUT_RAID0, 4 << 20, 1, NULL, 1 }, "1 x 4M", 0 },
	{ { 0, LAYOUT_RAID0, 1 << 20, 4, "flash", 4 }, "4 x 1M, pool flash", 0 },
	{ { 0, LAYOUT_RAID0, 1 << 20, 4, "fifteen-letters", 0 },
	  "4 x 1M, pool fifteen-letters",
	  0 },
	{ { LAYOUT_V3, LAYOUT_RAID0, 1 << 16, 2, NULL, 2 }, "2 x 64K", 0 },
	{ { LAYOUT_SPECIFIC, LAYOUT_RAID0, 3 << 16, 2, "p", 2 }, "2 x 192K, pool p", 0 },
	{ { 0, LAYOUT_RAID0 | LAYOUT_OVERSTRIPED, 1 << 20, 16, NULL, 16 },
	  "16 x 1M overstriped",
	  0 },
	/*
	 * Of directories: all targets, once or several times; 0 or a missing value leaves the
	 * choice to the server.
	 */
	{ { 0, LAYOUT_RAID0, 1 << 20, 0xffff, NULL, 0 }, "all x 1M", 0 },
	{ { 0, LAYOUT_RAID0 | LAYOUT_OVERSTRIPED, 1 << 20, 0xfffe, NULL, 0 },
	  "all x 1M overstriped",
	  0 },
	{ { 0, LAYOUT_RAID0, 1 << 20, 0xffe0, NULL, 0 }, "all x 1M overstriped", 0 },
	{ { 0, LAYOUT_RAID0, 0, 0, NULL, 0 }, "default x default", 0 },
	{ { 0, 0, 1 << 20, 4, NULL, 0 }, "4 x 1M", 0 },
	{ { 0, LAYOUT_RAID0, 1 << 20, 2000, NULL, 0 }, "2000 x 1M", 0 },
	{ { 0, LAYOUT_METADATA, 1 << 20, 0, NULL, 0 }, "on metadata", 0 },
	/* Released to tape, of another application, or of an unknown kind. */
	{ { 0, LAYOUT_RAID0 | LAYOUT_RELEASED, 1 << 20, 4, NULL, 0 }, "", -ENOTSUP },
	{ { LAYOUT_FOREIGN, LAYOUT_RAID0, 1 << 20, 4, NULL, 0 }, "", -ENOTSUP },
	{ { 0, 0x400, 1 << 20, 4, NULL, 0 }, "", -ENOTSUP },
	{ { 0, 0x5, 1 << 20, 4, NULL, 0 }, "", -ENOTSUP },
	{ { 0, 0x8, 1 << 20, 4, NULL, 0 }, "", -ENOTSUP },
	/* Values that Lustre does not produce. */
	{ { 0, LAYOUT_RAID0, (1 << 20) + 1, 4, NULL, 0 }, "", -EINVAL },
	{ { 0, LAYOUT_RAID0, 4096, 4, NULL, 0 }, "", -EINVAL },
	{ { 0, LAYOUT_RAID0, 1 << 20, 2001, NULL, 0 }, "", -EINVAL },
	{ { 0, LAYOUT_RAID0, 1 << 20, 0xffdf, NULL, 0 }, "", -EINVAL },
	{ { 0, LAYOUT_RAID0, 1 << 20, 4, "a\nline", 0 }, "", -EINVAL },
	{ { 0, LAYOUT_RAID0, 1 << 20, 4, "../../../x", 0 }, "", -EINVAL },
	{ { 0, LAYOUT_RAID0, 1 << 20, 4, "sixteen--letters", 0 }, "", -EINVAL },
	{ { 0x0bd20bd0, LAYOUT_RAID0, 1 << 20, 4, NULL, 0 }, "", -EINVAL },
	{ { 0x0cd10bd0, LAYOUT_RAID0, 1 << 20, 4, NULL, 0 }, "", -EINVAL },
};

static struct test_case cases = { .name = "parsers" };

LOOP_TEST(cases, plain_layouts_are_read, 0, ARRAY_LENGTH(plains))
{
	struct layout_bytes blob = { 0 };
	struct fs_layout layout;

	layout_add_plain(&blob, &plains[_i].plain);
	ck_assert_int_eq(parse(blob.data, blob.bytes, &layout), plains[_i].result);
	ck_assert_str_eq(text_of(&layout), plains[_i].text);
	if (!plains[_i].result)
		ck_assert_uint_eq(layout.mirrors, 1);
}

/* ---- Composite layouts ----------------------------------------------------------------------- */

#define PLAIN(count, size)                                                                         \
	{                                                                                          \
		0, LAYOUT_RAID0, size, count, NULL, 0                                              \
	}
#define K (1u << 10)
#define M (1u << 20)
#define G (1ull << 30)

static const struct composite {
	const char *text;
	struct {
		int result;
		uint16_t mirrors, count;
		uint32_t magic;
	} head;
	struct layout_component components[12];
} composites[] = {
	{ "to 100M: 1 x 1M; to 10G: 8 x 1M; 32 x 1M",
	  { 0, 1, 3, LAYOUT_COMPOSITE },
	  { { 0, 100 * M, 1, LAYOUT_INIT, { 0, LAYOUT_RAID0, M, 1, NULL, 1 } },
	    { 100 * M, 10 * G, 2, 0, PLAIN(8, M) },
	    { 10 * G, END, 3, 0, PLAIN(32, M) } } },
	{ "to 1M: on metadata; 4 x 4M, pool flash",
	  { 0, 1, 2, LAYOUT_COMPOSITE },
	  { { 0, M, 1, LAYOUT_INIT, { 0, LAYOUT_METADATA, M, 0, NULL, 0 } },
	    { M, END, 2, 0, { 0, LAYOUT_RAID0, 4 * M, 4, "flash", 0 } } } },
	{ "all x 4M", { 0, 1, 1, LAYOUT_COMPOSITE }, { { 0, END, 1, 0, PLAIN(0xffff, 4 * M) } } },
	/* A component that grows into the next one as far as its targets have space. */
	{ "to 10G: 1 x 1M; 4 x 1M",
	  { 0, 1, 4, LAYOUT_EXTENDING },
	  { { 0, 64 * M, 1, LAYOUT_INIT, { 0, LAYOUT_RAID0, M, 1, NULL, 1 } },
	    { 64 * M, 10 * G, 2, LAYOUT_EXTENSION, PLAIN(1, 64 * M) },
	    { 10 * G, 10 * G, 3, 0, PLAIN(4, M) },
	    { 10 * G, END, 4, LAYOUT_EXTENSION, PLAIN(4, 64 * M) } } },
	/* Mirrors: the first one counts. */
	{ "8 x 1M, 2 copies",
	  { 0, 2, 2, LAYOUT_COMPOSITE },
	  { { 0, END, 0x10001, LAYOUT_INIT, PLAIN(8, M) },
	    { 0, END, 0x20002, LAYOUT_INIT, PLAIN(2, 4 * M) } } },
	{ "to 2G: 8 x 1M; 4 x 1M, 3 copies",
	  { 0, 3, 5, LAYOUT_COMPOSITE },
	  { { 0, 2 * G, 0x10001, LAYOUT_INIT | LAYOUT_STALE, PLAIN(8, M) },
	    { 2 * G, END, 0x10002, 0, PLAIN(4, M) },
	    { 0, G, 0x20003, LAYOUT_INIT, PLAIN(1, M) },
	    { G, END, 0x20004, 0, PLAIN(4, M) },
	    { 0, END, 0x30005, LAYOUT_INIT, PLAIN(2, 4 * M) } } },
	/* Of an unknown kind. */
	{ "",
	  { -ENOTSUP, 2, 2, LAYOUT_COMPOSITE },
	  { { 0, END, 0x10001, LAYOUT_INIT, { LAYOUT_FOREIGN, 0, 0, 0, NULL, 0 } },
	    { 0, END, 0x20002, LAYOUT_INIT, PLAIN(2, 4 * M) } } },
	{ "",
	  { -ENOTSUP, 1, 2, LAYOUT_COMPOSITE },
	  { { 0, M, 1, LAYOUT_INIT, PLAIN(1, M) },
	    { M, END, 2, LAYOUT_INIT, { 0, 0x5, M, 1, NULL, 0 } } } },
	/* More parts than fit: the first ones. */
	{ "to 1M: 1 x 1M; to 2M: 2 x 1M; to 3M: 3 x 1M; to 4M: 4 x 1M; to 5M: 5 x 1M; "
	  "to 6M: 6 x 1M; to...",
	  { -E2BIG, 1, 9, LAYOUT_COMPOSITE },
	  { { 0, M, 1, 0, PLAIN(1, M) },
	    { M, 2 * M, 2, 0, PLAIN(2, M) },
	    { 2 * M, 3 * M, 3, 0, PLAIN(3, M) },
	    { 3 * M, 4 * M, 4, 0, PLAIN(4, M) },
	    { 4 * M, 5 * M, 5, 0, PLAIN(5, M) },
	    { 5 * M, 6 * M, 6, 0, PLAIN(6, M) },
	    { 6 * M, 7 * M, 7, 0, PLAIN(7, M) },
	    { 7 * M, 8 * M, 8, 0, PLAIN(8, M) },
	    { 8 * M, END, 9, 0, PLAIN(9, M) } } },
	/* Invalid layouts. */
	{ "", { -EINVAL, 2, 1, LAYOUT_COMPOSITE }, { { 0, END, 1, 0, PLAIN(1, M) } } },
	{ "", { -EINVAL, 1, 0, LAYOUT_COMPOSITE }, { { 0 } } },
	{ "", { -EINVAL, 1, 1, LAYOUT_COMPOSITE }, { { 2 * M, M, 1, 0, PLAIN(1, M) } } },
	{ "",
	  { -EINVAL, 1, 2, LAYOUT_COMPOSITE },
	  { { 0, 2 * M, 1, 0, PLAIN(1, M) }, { M, END, 2, 0, PLAIN(1, M) } } },
	{ "", { -EINVAL, 1, 1, LAYOUT_EXTENDING }, { { 0, M, 1, LAYOUT_EXTENSION, PLAIN(1, M) } } },
	{ "", { -EINVAL, 1, 1, LAYOUT_COMPOSITE }, { { 0, END, 1, 0, PLAIN(1, 4096) } } },
	{ "",
	  { -EINVAL, 1, 1, LAYOUT_COMPOSITE },
	  { { 0, END, 1, 0, { LAYOUT_COMPOSITE, 1, M, 1, NULL, 0 } } } },
};

LOOP_TEST(cases, layouts_of_components_are_read, 0, ARRAY_LENGTH(composites))
{
	const struct composite *want = &composites[_i];
	struct layout_bytes blob = { 0 };
	struct fs_layout layout;

	layout_composite(&blob, want->head.magic, want->head.mirrors, want->components,
			 want->head.count);
	ck_assert_int_eq(parse(blob.data, blob.bytes, &layout), want->head.result);
	ck_assert_str_eq(text_of(&layout), want->text);
	if (!want->head.result)
		ck_assert_uint_eq(layout.mirrors, want->head.mirrors);
}

/* ---- Untrusted bytes ------------------------------------------------------------------------- */

TEST(cases, cut_short_anywhere_it_is_no_layout)
{
	struct fs_layout layout;
	size_t least;

	for (size_t i = 0; i < ARRAY_LENGTH(composites); i++) {
		struct layout_bytes blob = { 0 };

		layout_composite(&blob, composites[i].head.magic, composites[i].head.mirrors,
				 composites[i].components, composites[i].head.count);
		for (size_t bytes = 0; bytes < blob.bytes; bytes++)
			REQUIRE(parse(blob.data, bytes, &layout) == -EINVAL);
	}
	for (size_t i = 0; i < ARRAY_LENGTH(plains); i++) {
		struct layout_bytes blob = { 0 };

		if (plains[i].result)
			continue;
		layout_add_plain(&blob, &plains[i].plain);
		/* The list of targets is not read. */
		least = blob.bytes - plains[i].plain.objects * (size_t)24;
		for (size_t bytes = 0; bytes < least; bytes++)
			REQUIRE(parse(blob.data, bytes, &layout) == -EINVAL);
		REQUIRE(!parse(blob.data, least, &layout));
	}
}

TEST(cases, absurd_counts_sizes_and_places_are_refused)
{
	static const uint64_t absurd[] = { 0xffffffff, 0x80000000, 0x7fffffff, 0xfffffff0,
					   0x10000,    8193,       31 };
	/*
	 * Total size, number of entries, number of mirrors, and offset and size of the first two
	 * components.
	 */
	static const struct {
		size_t at;
		unsigned bytes;
	} fields[] = { { 4, 4 },  { 14, 2 },      { 16, 2 },     { 56, 4 },
		       { 60, 4 }, { 56 + 48, 4 }, { 60 + 48, 4 } };
	struct fs_layout layout;

	for (size_t field = 0; field < ARRAY_LENGTH(fields); field++) {
		for (size_t i = 0; i < ARRAY_LENGTH(absurd); i++) {
			struct layout_bytes blob = { 0 };

			layout_composite(&blob, composites[0].head.magic, 1,
					 composites[0].components, composites[0].head.count);
			layout_put(&blob, fields[field].at, absurd[i], fields[field].bytes);
			/* 0x10000 and 0x80000000 are 0 in two bytes, which is valid. */
			if (fields[field].at == 16 && !(absurd[i] & 0xffff))
				continue;
			ck_assert_int_eq(parse(blob.data, blob.bytes, &layout), -EINVAL);
		}
	}
}

/* ---- Ceph and BeeGFS ------------------------------------------------------------------------- */

static const struct {
	const char *text;
	const char *layout;
	int result;
} cephs[] = {
	{ "stripe_unit=4194304 stripe_count=1 object_size=4194304 pool=cephfs_data",
	  "1 x 4M, pool cephfs_data", 0 },
	{ "stripe_unit=1048576 stripe_count=8 object_size=4194304 pool=fast pool_namespace=a",
	  "8 x 1M, pool fast", 0 },
	/* Fields may be in any order. A pool's name that is too long is omitted. */
	{ "pool=cephfs.scratch.data object_size=65536 stripe_count=2 stripe_unit=65536", "2 x 64K",
	  0 },
	{ "stripe_unit=65536 stripe_count=2 object_size=65536", "2 x 64K", 0 },
	{ "", "", -EINVAL },
	{ "stripe_unit=4194304 stripe_count=1 pool=x", "", -EINVAL },
	{ "stripe_unit=4194304stripe_count=1 object_size=4194304", "", -EINVAL },
	{ "stripe_unit=4194304 stripe_count= object_size=4194304", "", -EINVAL },
	{ "stripe_unit=4194304 stripe_count=-1 object_size=4194304", "", -EINVAL },
	{ "stripe_unit=0 stripe_count=1 object_size=0", "", -EINVAL },
	{ "stripe_unit=4194304 stripe_count=0 object_size=4194304", "", -EINVAL },
	{ "stripe_unit=4194304 stripe_count=1 object_size=65536", "", -EINVAL },
	{ "stripe_unit=65536 stripe_count=1 object_size=100000", "", -EINVAL },
	{ "stripe_unit=1000 stripe_count=1 object_size=1000", "", -EINVAL },
	{ "stripe_unit=4194304 stripe_count=99999 object_size=4194304", "", -EINVAL },
	/* 4194304 plus 2^64 */
	{ "stripe_unit=18446744073713745920 stripe_count=1 object_size=18446744073713745920", "",
	  -EINVAL },
};

LOOP_TEST(cases, layouts_of_ceph_are_read, 0, ARRAY_LENGTH(cephs))
{
	size_t bytes = strlen(cephs[_i].text);
	char *copy = malloc(bytes + 1);
	struct fs_layout layout;

	/* Attributes do not end with a 0 byte. */
	copy = realloc(copy, bytes ? bytes : 1);
	memcpy(copy, cephs[_i].text, bytes);
	ck_assert_int_eq(parse_ceph_layout(copy, bytes, &layout), cephs[_i].result);
	ck_assert_str_eq(text_of(&layout), cephs[_i].layout);
	while (bytes--) {
		int ret = parse_ceph_layout(copy, bytes, &layout);

		REQUIRE(!ret || ret == -EINVAL);
	}
	free(copy);
}

TEST(cases, layouts_of_beegfs_are_read)
{
	struct fs_layout layout;

	ck_assert_int_eq(make_beegfs_layout(1, 512 * K, 4, &layout), 0);
	ck_assert_str_eq(text_of(&layout), "4 x 512K");
	ck_assert_int_eq(make_beegfs_layout(3, M, 2, &layout), 0);
	ck_assert_str_eq(text_of(&layout), "2 x 1M, 2 copies");
	ck_assert_int_eq(make_beegfs_layout(2, 64 * K, 65535, &layout), 0);
	ck_assert_str_eq(text_of(&layout), "65535 x 64K, 2 copies");
	ck_assert_int_eq(make_beegfs_layout(0, M, 2, &layout), -ENOTSUP);
	ck_assert_int_eq(make_beegfs_layout(4, M, 2, &layout), -ENOTSUP);
	ck_assert_int_eq(make_beegfs_layout(1, 3 * M, 2, &layout), -EINVAL);
	ck_assert_int_eq(make_beegfs_layout(1, 32 * K, 2, &layout), -EINVAL);
	ck_assert_int_eq(make_beegfs_layout(1, 0, 2, &layout), -EINVAL);
	ck_assert_int_eq(make_beegfs_layout(1, M, 0, &layout), -EINVAL);
	ck_assert_uint_eq(layout.count, 0);
}

/* ---- Using a layout -------------------------------------------------------------------------- */

static void progressive(struct fs_layout *layout)
{
	struct layout_bytes blob = { 0 };

	layout_composite(&blob, composites[0].head.magic, 1, composites[0].components,
			 composites[0].head.count);
	ck_assert_int_eq(parse(blob.data, blob.bytes, layout), 0);
}

TEST(cases, the_component_of_a_byte_is_found)
{
	struct fs_layout layout;

	progressive(&layout);
	ck_assert_ptr_eq(fs_layout_at(&layout, 0), &layout.components[0]);
	ck_assert_ptr_eq(fs_layout_at(&layout, 100 * M - 1), &layout.components[0]);
	ck_assert_ptr_eq(fs_layout_at(&layout, 100 * M), &layout.components[1]);
	ck_assert_ptr_eq(fs_layout_at(&layout, 10 * G), &layout.components[2]);
	ck_assert_ptr_eq(fs_layout_at(&layout, END), &layout.components[2]);
	layout.components[1].begin = 200 * M;
	ck_assert_ptr_null(fs_layout_at(&layout, 200 * M - 1));
	layout.components[2].end = 20 * G;
	ck_assert_ptr_null(fs_layout_at(&layout, 20 * G));
	layout.count = 0;
	ck_assert_ptr_null(fs_layout_at(&layout, 0));
}

TEST(cases, the_component_of_most_bytes_is_found)
{
	struct fs_layout layout;

	progressive(&layout);
	ck_assert_ptr_eq(fs_layout_main(&layout, 1), &layout.components[0]);
	ck_assert_ptr_eq(fs_layout_main(&layout, 200 * M), &layout.components[0]);
	ck_assert_ptr_eq(fs_layout_main(&layout, 200 * M + 1), &layout.components[1]);
	ck_assert_ptr_eq(fs_layout_main(&layout, 15 * G), &layout.components[1]);
	ck_assert_ptr_eq(fs_layout_main(&layout, 100 * G), &layout.components[2]);
	/* For an unknown size, the part of the largest files. */
	ck_assert_ptr_eq(fs_layout_main(&layout, 0), &layout.components[2]);
	layout.count = 0;
	ck_assert_ptr_null(fs_layout_main(&layout, 1));
}

TEST(cases, a_text_says_that_it_was_cut)
{
	struct fs_layout layout;
	char text[48], whole[96];

	progressive(&layout);
	strcpy(layout.components[0].pool, "fifteen-letters");
	fs_layout_text(&layout, whole, sizeof(whole));
	for (size_t room = 1; room <= sizeof(text); room++) {
		memset(text, 'x', sizeof(text));
		fs_layout_text(&layout, text, room);
		ck_assert_uint_lt(strlen(text), room);
		if (room <= 3)
			continue;
		ck_assert_str_eq(text + strlen(text) - 3, "...");
		ck_assert_int_eq(strncmp(text, whole, strlen(text) - 3), 0);
	}
	ck_assert_str_eq(text, "to 100M: 1 x 1M, pool fifteen-letters; to 10...");
	layout.count = 0;
	fs_layout_text(&layout, text, sizeof(text));
	ck_assert_str_eq(text, "");
}
