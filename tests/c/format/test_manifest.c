/* SPDX-License-Identifier: Apache-2.0 */
/* Manifests are read as they were written, and inconsistent ones are refused. */
#define _GNU_SOURCE
#include "format/manifest.h"
#include "support/check_main.h"
#include "support/scratch.h"

#include <ioshape/group.h>
#include <ioshape/ioshape.h>

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define PATH "/checkpoints/step-0000001000/manifest.json"
#define TAIL_BYTES 24 /* size of the checksum line and the bracket */

static struct format_manifest_file node_files[] = {
	{ .name = (char[]){ "node-00000.zip" },
	  .bytes = 40000,
	  .crc32 = 0x0badcafe,
	  .bundle = true },
	{ .name = (char[]){ "rank-00002.pt" }, .bytes = 500, .crc32 = 0x00000017, .bundle = false },
};

static struct format_manifest_shard node_shards[] = {
	{ .file = 0, .crc32 = 0x11111111, .offset = 4096, .bytes = 1000 },
	{ .file = 0, .crc32 = 0x22222222, .offset = 8192, .bytes = 31808 },
	{ .file = 1, .crc32 = 0x00000017, .offset = 0, .bytes = 500 },
};

static const struct format_manifest sample = {
	.step = 1000,
	.saved = 1700000000,
	.serial = 1700000000123,
	.mode = IOSHAPE_MODE_NODE,
	.attempt = "1f2e-03",
	.rank_count = ARRAY_LENGTH(node_shards),
	.shards = node_shards,
	.file_count = ARRAY_LENGTH(node_files),
	.files = node_files,
};

/* Text without the last two lines, which depend on the rest. */
static const char sample_text[] =
	"{\n"
	"  \"format\": \"ioshape-generation\",\n"
	"  \"version\": 1,\n"
	"  \"step\": 1000,\n"
	"  \"saved\": 1700000000,\n"
	"  \"serial\": 1700000000123,\n"
	"  \"mode\": \"node\",\n"
	"  \"attempt\": \"1f2e-03\",\n"
	"  \"files\": [\n"
	"    {\"name\": \"node-00000.zip\", \"bytes\": 40000, \"crc32\": \"0badcafe\", "
	"\"bundle\": true},\n"
	"    {\"name\": \"rank-00002.pt\", \"bytes\": 500, \"crc32\": \"00000017\", "
	"\"bundle\": false}\n"
	"  ],\n"
	"  \"parts\": [\n"
	"    {\"rank\": 0, \"file\": 0, \"offset\": 4096, \"bytes\": 1000, \"crc32\": "
	"\"11111111\"},\n"
	"    {\"rank\": 1, \"file\": 0, \"offset\": 8192, \"bytes\": 31808, \"crc32\": "
	"\"22222222\"},\n"
	"    {\"rank\": 2, \"file\": 1, \"offset\": 0, \"bytes\": 500, \"crc32\": "
	"\"00000017\"}\n"
	"  ],\n";

static struct base_buffer encoded(const struct format_manifest *manifest)
{
	struct base_buffer out = { 0 };

	ck_assert_int_eq(format_manifest_encode(&out, manifest), 0);
	return out;
}

static void expect_same(const struct format_manifest *a, const struct format_manifest *b)
{
	ck_assert_uint_eq(a->step, b->step);
	ck_assert_int_eq(a->saved, b->saved);
	ck_assert_uint_eq(a->serial, b->serial);
	ck_assert_uint_eq(a->mode, b->mode);
	ck_assert_str_eq(a->attempt, b->attempt);
	ck_assert_uint_eq(a->rank_count, b->rank_count);
	ck_assert_uint_eq(a->file_count, b->file_count);
	for (uint32_t i = 0; i < a->file_count; i++) {
		REQUIRE(!strcmp(a->files[i].name, b->files[i].name));
		REQUIRE(a->files[i].bytes == b->files[i].bytes);
		REQUIRE(a->files[i].crc32 == b->files[i].crc32);
		REQUIRE(a->files[i].bundle == b->files[i].bundle);
	}
	for (uint32_t i = 0; i < a->rank_count; i++) {
		REQUIRE(a->shards[i].file == b->shards[i].file);
		REQUIRE(a->shards[i].crc32 == b->shards[i].crc32);
		REQUIRE(a->shards[i].offset == b->shards[i].offset);
		REQUIRE(a->shards[i].bytes == b->shards[i].bytes);
	}
}

static void expect_round_trip(const struct format_manifest *manifest)
{
	struct base_buffer text = encoded(manifest);
	struct base_error error = { 0 };
	struct format_manifest again;

	ck_assert_msg(!format_manifest_decode(&again, (char *)text.data, text.bytes, PATH, &error),
		      "%s", error.text);
	expect_same(&again, manifest);
	format_manifest_free(&again);
	base_buffer_free(&text);
}

/* ---- Writing --------------------------------------------------------------------------------- */

static struct test_case written_case = { .name = "written" };

TEST(written_case, it_is_laid_out_for_people)
{
	struct base_buffer text = encoded(&sample);
	char tail[64];

	ck_assert_uint_eq(text.bytes, strlen(sample_text) + TAIL_BYTES);
	ck_assert_mem_eq(text.data, sample_text, strlen(sample_text));
	snprintf(tail, sizeof(tail), "  \"crc32\": \"%08x\"\n}\n",
		 base_crc32(0, sample_text, strlen(sample_text)));
	ck_assert_uint_eq(strlen(tail), TAIL_BYTES);
	ck_assert_mem_eq(text.data + strlen(sample_text), tail, TAIL_BYTES);
	base_buffer_free(&text);
}

TEST(written_case, what_is_written_comes_back)
{
	struct format_manifest_file file = { .name = (char[]){ "f" }, .bytes = 1, .bundle = true };
	struct format_manifest_shard shard = { .bytes = 1 };
	struct format_manifest smallest = { .mode = IOSHAPE_MODE_RANK0,
					    .attempt = "0",
					    .rank_count = 1,
					    .shards = &shard,
					    .file_count = 1,
					    .files = &file };
	char longest[FORMAT_MAX_FILE_NAME_BYTES + 1];

	expect_round_trip(&sample);
	expect_round_trip(&smallest);
	smallest.step = UINT64_MAX;
	smallest.saved = INT64_MIN;
	smallest.serial = FORMAT_MAX_SERIAL;
	smallest.mode = IOSHAPE_MODE_EACH;
	memset(smallest.attempt, 'f', sizeof(smallest.attempt) - 1);
	file.bytes = FORMAT_MAX_CHECKPOINT_BYTES;
	file.crc32 = shard.crc32 = UINT32_MAX;
	shard.bytes = FORMAT_MAX_CHECKPOINT_BYTES;
	file.bundle = false;
	expect_round_trip(&smallest);
	memset(longest, 'n', sizeof(longest) - 1);
	longest[sizeof(longest) - 1] = '\0';
	file.name = longest;
	expect_round_trip(&smallest);
	file.name = (char[]){ "..." };
	expect_round_trip(&smallest);
}

TEST(written_case, what_could_not_be_read_again_is_not_written)
{
	struct format_manifest_shard shards[] = { node_shards[0], node_shards[1], node_shards[2] };
	struct format_manifest wrong = sample;
	struct base_buffer out = { 0 };

	ck_assert_int_eq(base_buffer_append(&out, "before", 6), 0);
	wrong.mode = IOSHAPE_MODE_AUTO;
	ck_assert_int_eq(format_manifest_encode(&out, &wrong), -EINVAL);
	wrong.mode = 4;
	ck_assert_int_eq(format_manifest_encode(&out, &wrong), -EINVAL);
	wrong = sample;
	wrong.rank_count = 0;
	ck_assert_int_eq(format_manifest_encode(&out, &wrong), -EINVAL);
	wrong = sample;
	wrong.file_count = 1;
	ck_assert_int_eq(format_manifest_encode(&out, &wrong), -EINVAL);
	wrong = sample;
	strcpy(wrong.attempt, "a/b");
	ck_assert_int_eq(format_manifest_encode(&out, &wrong), -EINVAL);
	wrong = sample;
	wrong.shards = shards;
	shards[1].bytes = 0;
	ck_assert_int_eq(format_manifest_encode(&out, &wrong), -EINVAL);
	ck_assert_uint_eq(out.bytes, 6);
	base_buffer_free(&out);
}

TEST(written_case, shards_are_named_by_rank)
{
	char name[FORMAT_SHARD_NAME_BYTES];

	format_shard_name(name, 7);
	ck_assert_str_eq(name, "rank-00007.pt");
	format_shard_name(name, UINT32_MAX);
	ck_assert_str_eq(name, "rank-4294967295.pt");
}

/* ---- Refused manifests ----------------------------------------------------------------------- */

static void expect_refused(const char *text, size_t bytes, int code)
{
	struct base_error error = { 0 };
	struct format_manifest manifest;
	int ret = format_manifest_decode(&manifest, text, bytes, PATH, &error);

	ck_assert_msg(ret == code, "%d instead of %d: %s\n%.*s", ret, code, error.text, (int)bytes,
		      text);
	ck_assert_int_eq(error.code, ret);
	ck_assert(!manifest.files && !manifest.shards);
}

static struct test_case refused_case = { .name = "refused" };

TEST(refused_case, what_is_cut_short_is_refused)
{
	struct base_buffer text = encoded(&sample);

	for (size_t bytes = 0; bytes < text.bytes; bytes++) {
		char *cut = malloc(bytes + !bytes);

		memcpy(cut, text.data, bytes);
		expect_refused(cut, bytes, IOSHAPE_E_DAMAGED);
		free(cut);
	}
	expect_refused(NULL, 0, IOSHAPE_E_DAMAGED);
	base_buffer_free(&text);
}

TEST(refused_case, no_byte_can_be_changed_or_added)
{
	struct base_buffer text = encoded(&sample);
	struct base_error error = { 0 };
	struct format_manifest manifest;

	for (size_t at = 0; at < text.bytes; at++) {
		for (int change = 1; change < 256; change++) {
			text.data[at] ^= (uint8_t)change;
			REQUIRE(format_manifest_decode(&manifest, (char *)text.data, text.bytes,
						       PATH, &error) < 0);
			REQUIRE(!manifest.files && !manifest.shards);
			text.data[at] ^= (uint8_t)change;
		}
	}
	ck_assert_int_eq(base_buffer_append(&text, "\n", 1), 0);
	expect_refused((char *)text.data, text.bytes, IOSHAPE_E_DAMAGED);
	base_buffer_free(&text);
}

/* Returns the sample text with one part replaced and a correct checksum. */
static struct base_buffer changed(const char *from, const char *to)
{
	struct base_buffer text = { 0 };
	const char *at = strstr(sample_text, from);
	char tail[64];

	ck_assert_msg(at != NULL, "%s", from);
	REQUIRE(!base_buffer_append(&text, sample_text, (size_t)(at - sample_text)));
	REQUIRE(!base_buffer_append(&text, to, strlen(to)));
	at += strlen(from);
	REQUIRE(!base_buffer_append(&text, at, strlen(at)));
	snprintf(tail, sizeof(tail), "  \"crc32\": \"%08x\"\n}\n",
		 base_crc32(0, text.data, text.bytes));
	REQUIRE(!base_buffer_append(&text, tail, strlen(tail)));
	return text;
}

static const struct {
	const char *from, *to;
	int code; /* 0: damaged */
} wrong[] = {
	{ "\"version\": 1", "\"version\": 3", -EOPNOTSUPP },
	{ "\"version\": 1", "\"version\": 2", 0 },
	{ "\"offset\": 0, \"bytes\": 500", "\"same\": 1, \"offset\": 0, \"bytes\": 500", 0 },
	{ "\"version\": 1", "\"version\": 0", -EOPNOTSUPP },
	{ "\"version\": 1", "\"version\": 1.0", 0 },
	{ "ioshape-generation", "somebody-else's", IOSHAPE_E_FORMAT },
	{ "{\n  \"format\"", "{\n  \"else\"", IOSHAPE_E_FORMAT },
	{ "\"step\": 1000", "\"step\": 18446744073709551616", 0 },
	{ "\"step\": 1000", "\"step\": -1", 0 },
	{ "\"step\": 1000", "\"step\": \"1000\"", 0 },
	{ "\"step\": 1000", "\"step\": 1000.5", 0 },
	{ "\"step\": 1000,\n", "", 0 },
	{ "\"step\": 1000", "\"step\": 1000, \"step\": 1000", 0 },
	{ "\"step\": 1000", "\"step\": 1000,", 0 },
	{ "\"step\": 1000", "\"step\" 1000", 0 },
	{ "\"saved\": 1700000000", "\"saved\": 9223372036854775808", 0 },
	{ "\"mode\": \"node\"", "\"mode\": \"auto\"", 0 },
	{ "\"mode\": \"node\"", "\"mode\": \"\"", 0 },
	{ "\"mode\": \"node\"", "\"mode\": 2", 0 },
	{ "\"mode\": \"node\"", "\"mode\": \"nodenodenodenodenode\"", IOSHAPE_E_LIMIT },
	{ "1f2e-03", "", 0 },
	{ "1f2e-03", "../etc", 0 },
	{ "1f2e-03", "0123456789012345678901234567890123456789", IOSHAPE_E_LIMIT },
	{ "node-00000.zip", "a/b", 0 },
	{ "node-00000.zip", "/etc/passwd", 0 },
	{ "node-00000.zip", "a\\u002fb", 0 },
	{ "node-00000.zip", "..", 0 },
	{ "node-00000.zip", ".", 0 },
	{ "node-00000.zip", "manifest.json", 0 },
	{ "node-00000.zip", "", 0 },
	{ "node-00000.zip", "a\\u0000b", 0 },
	{ "node-00000.zip", "a\xff", 0 },
	{ "node-00000.zip", "rank-00002.pt", 0 },
	{ "node-00000.zip", "\\u0072ank-00002.pt", 0 },
	{ "\"name\": \"node-00000.zip\", ", "", 0 },
	{ "\"name\": \"node-00000.zip\"", "\"name\": \"a\", \"name\": \"b\"", 0 },
	{ "\"bytes\": 40000", "\"bytes\": 39999", 0 },
	{ "\"bytes\": 40000", "\"bytes\": 40000000000000000000000", 0 },
	{ "\"bytes\": 40000", "\"bytes\": 1152921504606846976", 0 }, /* sum too large */
	{ "\"bundle\": true", "\"bundle\": 1", 0 },
	{ "\"bundle\": true", "\"bundle\": false", 0 },
	{ "\"crc32\": \"0badcafe\"", "\"crc32\": \"0BADCAFE\"", 0 },
	{ "\"crc32\": \"0badcafe\"", "\"crc32\": \"badcafe\"", 0 },
	{ "\"crc32\": \"0badcafe\"", "\"crc32\": \"0badcafe0\"", IOSHAPE_E_LIMIT },
	{ "\"crc32\": \"0badcafe\"", "\"crc32\": 17", 0 },
	{ "\"rank\": 1", "\"rank\": 0", 0 },
	{ "\"rank\": 1", "\"rank\": 2", 0 },
	{ "\"rank\": 1", "\"rank\": 4294967297", 0 },
	{ "\"rank\": 0", "\"rank\": 1", 0 },
	{ "\"rank\": 1, ", "", 0 },
	{ "\"file\": 1", "\"file\": 2", 0 },
	{ "\"file\": 1", "\"file\": 4294967297", 0 },
	{ "\"offset\": 8192", "\"offset\": 5095", 0 },
	{ "\"offset\": 8192", "\"offset\": 4096", 0 },
	{ "\"offset\": 8192", "\"offset\": 8193", 0 },
	{ "\"offset\": 8192", "\"offset\": 40001", 0 },
	{ "\"offset\": 8192", "\"offset\": 18446744073709551615", 0 },
	{ "\"bytes\": 31808", "\"bytes\": 18446744073709551615", 0 },
	{ "\"bytes\": 31808", "\"bytes\": 0", 0 },
	{ "\"offset\": 4096, \"bytes\": 1000", "\"offset\": 0, \"bytes\": 0", 0 },
	{ "\"offset\": 0, \"bytes\": 500", "\"offset\": 1, \"bytes\": 499", 0 },
	{ "\"bytes\": 500, \"crc32\": \"00000017\"}\n  ],\n",
	  "\"bytes\": 500, \"crc32\": \"00000018\"}\n  ],\n", 0 },
	{ "  \"parts\": [", "  \"others\": [", 0 },
	{ "  \"files\": [", "  \"files\": [],  \"others\": [", 0 },
	{ "  \"parts\": [", "  \"parts\": [],  \"others\": [", 0 },
	{ "  \"parts\": [", "  \"parts\": {", 0 },
	{ "  \"files\": [", "  \"x\": ,  \"files\": [", 0 },
	{ "  \"files\": [", "  \"x\": \"no end,  \\\"files\\\": [", 0 },
	{ "  \"files\": [", "  \"x\": [[[],  \"files\": [", 0 },
	{ "  ],\n  \"parts\"", "  ],, \"parts\"", 0 },
};

TEST(refused_case, what_does_not_hold_together_is_refused)
{
	for (size_t i = 0; i < ARRAY_LENGTH(wrong); i++) {
		struct base_buffer text = changed(wrong[i].from, wrong[i].to);

		expect_refused((char *)text.data, text.bytes,
			       wrong[i].code ? wrong[i].code : IOSHAPE_E_DAMAGED);
		base_buffer_free(&text);
	}
}

/* ---- Parts that are stored once for several ranks -------------------------------------------- */

/*
 * Makes a manifest in which ranks 0, 1 and 3 have equal parts. Rank 3 has a copy of its own, on
 * another node.
 */
static void make_repeated(struct format_manifest *manifest, struct format_manifest_shard shards[4])
{
	static const struct format_manifest_shard first = { .offset = 4096,
							    .bytes = 1000,
							    .crc32 = 7 };

	*manifest = sample;
	manifest->shards = shards;
	manifest->rank_count = 4;
	for (uint32_t rank = 0; rank < 4; rank++)
		shards[rank] = first;
	shards[1].repeats = shards[3].repeats = true;
	shards[2].offset = 8192;
	shards[3].offset = 12288;
}

TEST(written_case, a_shard_that_several_ranks_have_comes_back)
{
	static const uint32_t holders[] = { 0, 0, 2, 3 };
	struct format_manifest manifest, back;
	struct format_manifest_shard shards[4];
	struct base_error error = { 0 };
	struct base_buffer text;

	make_repeated(&manifest, shards);
	text = encoded(&manifest);
	ck_assert(memmem(text.data, text.bytes, "\"version\": 2,", 13));
	ck_assert_int_eq(format_manifest_decode(&back, (char *)text.data, text.bytes, PATH, &error),
			 0);
	for (uint32_t rank = 0; rank < 4; rank++) {
		ck_assert_int_eq(back.shards[rank].repeats, rank == 1 || rank == 3);
		ck_assert_uint_eq(back.shards[rank].offset, shards[rank].offset);
		ck_assert_uint_eq(back.shards[rank].holder, holders[rank]);
		ck_assert(!back.shards[rank].repeats || back.shards[rank].same == 0);
	}
	format_manifest_free(&back);
	base_buffer_free(&text);
}

static void expect_not_written(const struct format_manifest *manifest)
{
	struct base_buffer text = { 0 };

	ck_assert_int_eq(format_manifest_encode(&text, manifest), -EINVAL);
	ck_assert_uint_eq(text.bytes, 0);
	base_buffer_free(&text);
}

TEST(refused_case, a_shard_repeats_only_an_equal_one_of_a_lower_rank)
{
	struct format_manifest manifest;
	struct format_manifest_shard shards[4];

	make_repeated(&manifest, shards);
	shards[1].repeats = false; /* its offset is that of rank 0's part */
	expect_not_written(&manifest);
	make_repeated(&manifest, shards);
	shards[3].same = 1; /* rank 1 repeats another rank's part itself */
	expect_not_written(&manifest);
	make_repeated(&manifest, shards);
	shards[1].same = 2; /* refers to a higher rank */
	expect_not_written(&manifest);
	make_repeated(&manifest, shards);
	shards[1].same = 1;
	expect_not_written(&manifest);
	make_repeated(&manifest, shards);
	shards[3].crc32++;
	expect_not_written(&manifest);
	make_repeated(&manifest, shards);
	shards[3].bytes++;
	expect_not_written(&manifest);
	make_repeated(&manifest, shards);
	shards[1].offset += 4; /* overlaps the part of rank 0 */
	expect_not_written(&manifest);
	make_repeated(&manifest, shards);
	shards[2].offset = 4096; /* has the offset of another part */
	expect_not_written(&manifest);
}

TEST(refused_case, two_ranks_cannot_have_one_file)
{
	static const char twice[] =
		"    {\"rank\": 2, \"file\": 1, \"offset\": 0, \"bytes\": 500, \"crc32\": "
		"\"00000017\"},\n"
		"    {\"rank\": 3, \"file\": 1, \"offset\": 0, \"bytes\": 500, \"crc32\": "
		"\"00000017\"}\n";
	const char *last = strstr(sample_text, "    {\"rank\": 2");
	struct base_buffer text;
	char from[256];

	snprintf(from, sizeof(from), "%.*s", (int)(strstr(last, "}\n") + 2 - last), last);
	text = changed(from, twice);
	expect_refused((char *)text.data, text.bytes, IOSHAPE_E_DAMAGED);
	base_buffer_free(&text);
}

/* ---- Manifests of earlier versions ----------------------------------------------------------- */

/* Texts as released versions wrote them. They must stay readable. */
static const char by_0_1[] = "{\n"
			     "  \"format\": \"ioshape-generation\",\n"
			     "  \"version\": 1,\n"
			     "  \"step\": 1000,\n"
			     "  \"saved\": 1700000000,\n"
			     "  \"mode\": \"rank0\",\n"
			     "  \"attempt\": \"1f2e-03\",\n"
			     "  \"files\": [\n"
			     "    {\"name\": \"ranks.zip\", \"bytes\": 40000, \"crc32\": "
			     "\"0badcafe\", \"bundle\": true}\n"
			     "  ],\n"
			     "  \"parts\": [\n"
			     "    {\"rank\": 0, \"file\": 0, \"offset\": 4096, \"bytes\": 1000, "
			     "\"crc32\": \"11111111\"},\n"
			     "    {\"rank\": 1, \"file\": 0, \"offset\": 8192, \"bytes\": 1000, "
			     "\"crc32\": \"11111111\"}\n"
			     "  ],\n"
			     "  \"crc32\": \"9d6095b4\"\n"
			     "}\n";
static const char by_0_2[] = "{\n"
			     "  \"format\": \"ioshape-generation\",\n"
			     "  \"version\": 1,\n"
			     "  \"step\": 1000,\n"
			     "  \"saved\": 1700000000,\n"
			     "  \"serial\": 1700000000123,\n"
			     "  \"mode\": \"rank0\",\n"
			     "  \"attempt\": \"1f2e-03\",\n"
			     "  \"files\": [\n"
			     "    {\"name\": \"ranks.zip\", \"bytes\": 40000, \"crc32\": "
			     "\"0badcafe\", \"bundle\": true}\n"
			     "  ],\n"
			     "  \"parts\": [\n"
			     "    {\"rank\": 0, \"file\": 0, \"offset\": 4096, \"bytes\": 1000, "
			     "\"crc32\": \"11111111\"},\n"
			     "    {\"rank\": 1, \"file\": 0, \"offset\": 8192, \"bytes\": 1000, "
			     "\"crc32\": \"11111111\"}\n"
			     "  ],\n"
			     "  \"crc32\": \"45133f6c\"\n"
			     "}\n";
static const char by_0_2_with_equal_shards[] =
	"{\n"
	"  \"format\": \"ioshape-generation\",\n"
	"  \"version\": 2,\n"
	"  \"step\": 1000,\n"
	"  \"saved\": 1700000000,\n"
	"  \"serial\": 1700000000123,\n"
	"  \"mode\": \"rank0\",\n"
	"  \"attempt\": \"1f2e-03\",\n"
	"  \"files\": [\n"
	"    {\"name\": \"ranks.zip\", \"bytes\": 40000, \"crc32\": \"0badcafe\", \"bundle\": "
	"true}\n"
	"  ],\n"
	"  \"parts\": [\n"
	"    {\"rank\": 0, \"file\": 0, \"offset\": 4096, \"bytes\": 1000, \"crc32\": "
	"\"11111111\"},\n"
	"    {\"rank\": 1, \"file\": 0, \"offset\": 4096, \"bytes\": 1000, \"crc32\": "
	"\"11111111\", \"same\": 0}\n"
	"  ],\n"
	"  \"crc32\": \"2b9f2a47\"\n"
	"}\n";

TEST(written_case, what_earlier_versions_wrote_is_read)
{
	static const struct {
		const char *text;
		uint64_t serial;
		uint64_t offset; /* offset of the shard of rank 1 */
	} cases[] = {
		{ by_0_1, 1700000000000, 8192 },
		{ by_0_2, 1700000000123, 8192 },
		{ by_0_2_with_equal_shards, 1700000000123, 4096 },
	};

	for (size_t i = 0; i < ARRAY_LENGTH(cases); i++) {
		const size_t bytes = strlen(cases[i].text);
		struct base_error error = { 0 };
		struct format_manifest manifest;

		ck_assert_msg(
			!format_manifest_decode(&manifest, cases[i].text, bytes, PATH, &error),
			"%s", error.text);
		ck_assert_uint_eq(manifest.step, 1000);
		ck_assert_int_eq(manifest.saved, 1700000000);
		ck_assert_uint_eq(manifest.serial, cases[i].serial);
		ck_assert_uint_eq(manifest.mode, IOSHAPE_MODE_RANK0);
		ck_assert_str_eq(manifest.files[0].name, "ranks.zip");
		ck_assert_uint_eq(manifest.rank_count, 2);
		ck_assert_uint_eq(manifest.shards[1].offset, cases[i].offset);
		ck_assert_int_eq(manifest.shards[1].repeats, i == 2);
		ck_assert_uint_eq(format_manifest_peek_serial(cases[i].text, bytes),
				  cases[i].serial);
		format_manifest_free(&manifest);
	}
}

TEST(refused_case, other_layouts_and_names_are_refused)
{
	static const char *const other[][2] = {
		{ "  \"files\": [", "  \"new\": 1,\n  \"files\": [" },
		{ "\"bundle\": true", "\"bundle\": true, \"stripe\": 1" },
		{ "\"bytes\": 40000, \"crc32\": \"0badcafe\"",
		  "\"crc32\": \"0badcafe\", \"bytes\": 40000" },
		{ "  \"mode\"", "\t\"mode\"" },
		{ "node-00000.zip", "node\\u002d00000.zip" },
		{ "node-00000.zip", "\xc3\xa4" },
		{ "node-00000.zip", "a b" },
	};

	for (size_t i = 0; i < ARRAY_LENGTH(other); i++) {
		struct base_buffer text = changed(other[i][0], other[i][1]);

		expect_refused((char *)text.data, text.bytes, IOSHAPE_E_DAMAGED);
		base_buffer_free(&text);
	}
}

/* ---- Large manifests, and little memory ------------------------------------------------------ */

static char bundle_name[] = "ranks.zip";

static struct format_manifest many_ranks(uint32_t ranks)
{
	struct format_manifest manifest = sample;

	manifest.rank_count = ranks;
	manifest.shards = calloc(ranks, sizeof(*manifest.shards));
	for (uint32_t i = 0; i < ranks; i++) {
		/* In descending order, so that sorting has work to do. */
		manifest.shards[i].offset = (uint64_t)(ranks - i) * 4096;
		manifest.shards[i].bytes = 4096;
	}
	manifest.file_count = 1;
	manifest.files = calloc(1, sizeof(*manifest.files));
	manifest.files[0] = (struct format_manifest_file){ .name = bundle_name,
							   .bytes = (ranks + 1ull) * 4096,
							   .bundle = true };
	return manifest;
}

static struct test_case large = { .name = "large" };

TEST(large, a_million_ranks_are_no_trouble)
{
	struct format_manifest manifest = many_ranks(scratch_rounds(FORMAT_MAX_RANKS));

	/* A quadratic algorithm would exceed the time limit of a test. */
	expect_round_trip(&manifest);
	free(manifest.shards);
	free(manifest.files);
}

TEST(large, more_than_a_million_are_refused)
{
	struct format_manifest manifest = many_ranks(FORMAT_MAX_RANKS + 1);
	static const char end[] = "\n  ],\n";
	struct base_buffer text = { 0 };
	char more[256];

	ck_assert_int_eq(format_manifest_encode(&text, &manifest), IOSHAPE_E_LIMIT);
	manifest.rank_count--;
	text = encoded(&manifest);
	text.bytes -= TAIL_BYTES + strlen(end);
	ck_assert_mem_eq(text.data + text.bytes, end, strlen(end));
	snprintf(more, sizeof(more),
		 ",\n    {\"rank\": %u, \"file\": 0, \"offset\": 0, \"bytes\": 1, "
		 "\"crc32\": \"00000000\"}%s",
		 FORMAT_MAX_RANKS, end);
	REQUIRE(!base_buffer_append(&text, more, strlen(more)));
	snprintf(more, sizeof(more), "  \"crc32\": \"%08x\"\n}\n",
		 base_crc32(0, text.data, text.bytes));
	REQUIRE(!base_buffer_append(&text, more, strlen(more)));
	expect_refused((char *)text.data, text.bytes, IOSHAPE_E_LIMIT);
	base_buffer_free(&text);
	free(manifest.shards);
	free(manifest.files);
	expect_refused("", FORMAT_MAX_MANIFEST_BYTES + 1, IOSHAPE_E_LIMIT);
}

TEST(large, a_file_for_each_of_many_ranks_is_no_trouble)
{
	const uint32_t ranks = 100000;
	struct format_manifest manifest = many_ranks(ranks);

	free(manifest.files);
	manifest.files = calloc(ranks, sizeof(*manifest.files));
	manifest.file_count = ranks;
	for (uint32_t i = 0; i < ranks; i++) {
		manifest.shards[i] = (struct format_manifest_shard){ .file = i, .bytes = i + 1 };
		manifest.files[i].bytes = i + 1;
		manifest.files[i].name = malloc(FORMAT_SHARD_NAME_BYTES);
		format_shard_name(manifest.files[i].name, i);
	}
	expect_round_trip(&manifest);
	format_manifest_free(&manifest);
}
