/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Effects of stripes on a checkpoint: where parts begin, how its files are striped, and how many
 * ranks may write.
 */
/* Included, because it tests static functions. */
#include "group/agree.c"
#include "support/check_main.h"

#include <string.h>

/* ---- Alignment of parts ---------------------------------------------------------------------- */

static const struct {
	uint64_t bytes;
	uint32_t shards;
	uint64_t stripe_bytes, alignment;
} alignments[] = {
	{ 64 * MIB - 1, 8, 4 * MIB, 4096 },
	{ 0, 0, 0, 4096 },
	{ GIB, 8, 0, MIB },
	{ GIB, 8, MIB, MIB },
	{ GIB, 8, 4 * MIB, 4 * MIB },
	{ GIB, 8, 16 * MIB, 16 * MIB },
	/* Stripes that are too small or too large. */
	{ GIB, 8, 64 * KIB, MIB },
	{ 100 * GIB, 8, 64 * MIB, MIB },
	/* Parts that are hardly larger than a stripe. */
	{ 64 * MIB, 8, 4 * MIB, MIB },
	{ 64 * MIB, 64, 4 * MIB, MIB },
	{ 128 * MIB, 4, 16 * MIB, MIB },
	{ 128 * MIB, 4, 8 * MIB, 8 * MIB },
	/* Impossible stripe sizes. */
	{ GIB, 8, 1, MIB },
	{ GIB, 8, UINT64_MAX, MIB },
};

static struct test_case pure = { .name = "pure" };

LOOP_TEST(pure, shards_begin_on_stripes, 0, ARRAY_LENGTH(alignments))
{
	uint64_t alignment = shard_alignment(alignments[_i].bytes, alignments[_i].shards,
					     alignments[_i].stripe_bytes);

	ck_assert_uint_eq(alignment, alignments[_i].alignment);
	ck_assert_uint_eq(alignment % 4096, 0);
}

TEST(pure, any_stripe_gives_an_alignment_that_bundles_take)
{
	for (uint64_t stripe = 64 * KIB; stripe < 4 * GIB; stripe += 64 * KIB * 37) {
		uint64_t alignment = shard_alignment(10 * GIB, 8, stripe);

		REQUIRE(alignment >= 4096 && alignment % 4096 == 0 && alignment <= 16 * MIB);
		REQUIRE(alignment == MIB || alignment == stripe);
	}
}

/* ---- Stripes of files ------------------------------------------------------------------------ */

static struct fs_facts lustre(uint32_t targets, uint32_t stripes)
{
	return (struct fs_facts){
		.family = FS_LUSTRE,
		.targets = targets,
		.directory = { .count = 1,
			       .mirrors = 1,
			       .components = { { .end = UINT64_MAX,
						 .stripe_bytes = MIB,
						 .stripe_count = stripes } } },
	};
}

static const struct {
	const char *request;
	uint32_t targets, stripes; /* stripe count of the directory */
	uint64_t bytes;
	uint32_t files;
	const char *layout;
	uint32_t capacity;
} cases[] = {
	{ "directory", 8, 1, GIB, 0, "1 x 1M", 8 },
	{ "directory", 8, 8, GIB, 0, "8 x 1M", 1 },
	{ "directory", 8, FS_ALL_TARGETS, GIB, 0, "all x 1M", 1 },
	{ "auto", 8, 1, 32 * MIB, 0, "1 x 1M", 8 },
	{ "auto", 8, 1, GIB, 0, "8 x 1M", 1 },
	{ "auto", 8, 1, GIB, 4, "2 x 1M", 4 },
	{ "auto", 8, 1, GIB, 32, "1 x 1M", 8 },
	{ "auto", 8, 1, 0, 0, "1 x 1M", 8 },
	{ "auto", 0, 1, GIB, 0, "8 x 1M", 0 },
	{ "stripe_count=4", 16, 1, 0, 0, "4 x 1M", 4 },
};

LOOP_TEST(pure, as_many_write_as_there_are_targets_for_their_stripes, 0, ARRAY_LENGTH(cases))
{
	struct fs_facts facts = lustre(cases[_i].targets, cases[_i].stripes);
	struct save_expected expected = { .bytes = cases[_i].bytes, .files = cases[_i].files };
	struct fs_layout layout;
	struct fs_layout_request request;
	char text[96];

	ck_assert_int_eq(fs_layout_request_parse(cases[_i].request, &request, NULL), 0);
	expected.request = &request;
	ck_assert_uint_eq(save_stripes_of(&facts, &expected, &layout), cases[_i].capacity);
	fs_layout_text(&layout, text, sizeof(text));
	ck_assert_str_eq(text, cases[_i].layout);
}

TEST(pure, without_stripes_there_is_no_rule)
{
	struct fs_facts facts = { .family = FS_EXT };
	struct fs_layout_request request = { .kind = FS_REQUEST_AUTO };
	struct save_expected expected = { .request = &request, .bytes = GIB };
	struct fs_layout layout;

	ck_assert_uint_eq(save_stripes_of(&facts, &expected, &layout), 0);
	ck_assert_uint_eq(layout.count, 0);
}
