/* SPDX-License-Identifier: Apache-2.0 */
/* Archives of all sizes are parsed as they were written, and inconsistent ones are refused. */
#include "format/layout.h"
#include "support/archive.h"
#include "support/check_main.h"
#include "support/random.h"

#include <stdio.h>

static const uint8_t small_data[] = "twelve bytes";

static int parse_archive(struct archive *archive, struct format_directory *directory)
{
	struct base_error error = { 0 };
	int ret;

	ret = format_parse(directory, archive->bytes, archive_fetch, archive, "test.pt", &error);
	for (uint64_t i = 0; i < directory->count && !ret; i++)
		ret = format_locate(directory, i, archive_fetch, archive, "test.pt", &error);
	ck_assert_msg(!ret, "%s", error.text);
	return ret;
}

static void check_same(const struct archive *archive, const struct format_directory *directory,
		       size_t folder_bytes)
{
	const struct format_entry *put, *got;
	uint64_t position;

	ck_assert_uint_eq(directory->count, archive->count);
	ck_assert_uint_eq(directory->offset, archive->cursor);
	for (uint64_t i = 0; i < archive->count; i++) {
		put = &archive->entries[i];
		got = &directory->entries[i];
		ck_assert_str_eq(got->name, put->name + folder_bytes);
		ck_assert_uint_eq(got->name_bytes, put->name_bytes - folder_bytes);
		ck_assert_uint_eq(got->crc32, put->crc32);
		ck_assert_uint_eq(got->bytes, put->bytes);
		ck_assert_uint_eq(got->header_offset, put->header_offset);
		ck_assert_uint_eq(got->data_offset, put->data_offset);
		ck_assert(
			format_names_find(directory->names, got->name, got->name_bytes, &position));
		ck_assert_uint_eq(position, i);
	}
}

/* ---- Round trips ----------------------------------------------------------------------------- */

static void round_trip(struct archive *archive, size_t folder_bytes)
{
	struct format_directory directory;

	archive_finish(archive);
	parse_archive(archive, &directory);
	check_same(archive, &directory, folder_bytes);
	format_directory_free(&directory);
	archive_free(archive);
}

static struct test_case well = { .name = "what is written comes back" };

LOOP_TEST(well, random_archives_come_back_as_they_went_in, 0, 100)
{
	uint64_t seed = (uint64_t)_i, bytes;
	struct archive archive = { 0 };
	char name[64];
	unsigned count = 1 + (unsigned)test_random_below(&seed, ARCHIVE_MOST_RECORDS);
	unsigned most_bits = (unsigned)test_random_below(&seed, 54); /* of sizes: up to petabytes */

	for (unsigned i = 0; i < count; i++) {
		snprintf(name, sizeof(name), "archive/data/%u", i);
		bytes = test_random(&seed) >> (63 - test_random_below(&seed, most_bits + 1));
		archive_add(&archive, name, NULL, bytes, 1u << test_random_below(&seed, 13),
			    test_random_below(&seed, 4) == 0);
	}
	round_trip(&archive, strlen("archive/"));
}

TEST(well, sizes_around_four_gigabytes_come_back)
{
	struct archive archive = { 0 };
	char name[64];

	for (uint64_t i = 0; i < 5; i++) {
		snprintf(name, sizeof(name), "x/%u", (unsigned)i);
		archive_add(&archive, name, NULL, 0xfffffffd + i, 64, false);
	}
	archive_add(&archive, "x/small", small_data, sizeof(small_data), 64, false);
	archive_add(&archive, "x/unknown", small_data, sizeof(small_data), 4096, true);
	round_trip(&archive, 2);
}

/* An offset of 0xffffffff has to be stored in the zip64 field, a smaller one not. */
TEST(well, offsets_around_four_gigabytes_come_back)
{
	for (uint64_t i = 0; i < 5; i++) {
		struct archive archive = { 0 };

		archive_add(&archive, "a/b", NULL, 0xfffffffd + i - 64 - 16, 64, false);
		ck_assert_uint_eq(archive.cursor, 0xfffffffd + i);
		archive_add(&archive, "a/c", small_data, sizeof(small_data), 1, false);
		round_trip(&archive, 2);
	}
}

TEST(well, any_folder_that_torch_would_make_is_read)
{
	char name[FORMAT_MAX_FULL_NAME_BYTES + 1];
	struct archive archive = { 0 };

	memset(name, 'f', sizeof(name));
	name[255] = '/';
	name[FORMAT_MAX_FULL_NAME_BYTES] = '\0';
	archive_add(&archive, name, small_data, sizeof(small_data), 64, false);
	round_trip(&archive, 256);
}

/* More records than the end record's 16 bits can count. */
LOOP_TEST(well, more_records_than_sixteen_bits_count_come_back, 0, 4)
{
	static const uint64_t counts[] = { 65534, 65535, 65536, 100000 };
	uint64_t count = counts[_i];
	struct format_entry *entries = calloc(count, sizeof(*entries));
	struct base_buffer buffer = { 0 };
	struct format_directory directory;
	struct base_error error = { 0 };
	char *names = malloc(count * 16);

	for (uint64_t i = 0; i < count; i++) {
		entries[i].name = names + i * 16;
		entries[i].name_bytes = (uint32_t)sprintf(entries[i].name, "a/%u", (unsigned)i);
		entries[i].header_offset = i * 40;
	}
	ck_assert_int_eq(base_buffer_reserve(&buffer, count * 40), 0);
	memset(buffer.data, 0, count * 40);
	buffer.bytes = count * 40;
	ck_assert_int_eq(encode_directory(&buffer, entries, count, count * 40), 0);
	ck_assert_int_eq(format_parse(&directory, buffer.bytes, archive_bytes_fetch,
				      &(struct archive_bytes){ buffer.data, buffer.bytes },
				      "test.pt", &error),
			 0);
	ck_assert_uint_eq(directory.count, count);
	ck_assert_str_eq(directory.entries[count - 1].name, entries[count - 1].name + 2);
	format_directory_free(&directory);
	base_buffer_free(&buffer);
	free(names);
	free(entries);
}

/* ---- A small archive to damage --------------------------------------------------------------- */

/* Three records and their directory. */
struct spoilt {
	struct archive archive;
	uint8_t *flat;
	size_t bytes;
	uint8_t *central[3]; /* their entries in the directory */
	uint8_t *zip64_end, *locator, *end;
	struct base_error error;
};

static void spoil_setup(struct spoilt *spoilt)
{
	static const char *const names[] = { "archive/data.pkl", "archive/data/0",
					     "archive/version" };
	uint8_t *at;

	memset(spoilt, 0, sizeof(*spoilt));
	for (size_t i = 0; i < ARRAY_LENGTH(names); i++)
		archive_add(&spoilt->archive, names[i], small_data, sizeof(small_data) - i, 64,
			    false);
	archive_finish(&spoilt->archive);
	spoilt->bytes = spoilt->archive.bytes;
	spoilt->flat = archive_flat(&spoilt->archive);
	at = spoilt->flat + spoilt->archive.cursor;
	for (size_t i = 0; i < ARRAY_LENGTH(names); i++) {
		spoilt->central[i] = at;
		at += FORMAT_CENTRAL_BYTES + strlen(names[i]);
	}
	spoilt->zip64_end = at;
	spoilt->locator = at + ZIP64_END_BYTES;
	spoilt->end = spoilt->locator + ZIP64_LOCATOR_BYTES;
}

static void spoil_teardown(struct spoilt *spoilt)
{
	free(spoilt->flat);
	archive_free(&spoilt->archive);
}

/* Parses and locates all records. Frees the directory. */
static int spoil_parse(struct spoilt *spoilt)
{
	struct archive_bytes bytes = { spoilt->flat, spoilt->bytes };
	struct format_directory directory;
	int ret;

	memset(&spoilt->error, 0, sizeof(spoilt->error));
	ret = format_parse(&directory, bytes.bytes, archive_bytes_fetch, &bytes, "test.pt",
			   &spoilt->error);
	if (ret) {
		ck_assert_ptr_null(directory.entries);
		ck_assert_int_eq(spoilt->error.code, ret);
		return ret;
	}
	for (uint64_t i = 0; i < directory.count && !ret; i++)
		ret = format_locate(&directory, i, archive_bytes_fetch, &bytes, "test.pt",
				    &spoilt->error);
	format_directory_free(&directory);
	return ret;
}

/* Sets a field to a value, and checks that parsing returns this code. */
#define CHECK_FIELD(extent, offset, width, value, code)                                            \
	do {                                                                                       \
		struct spoilt spoilt;                                                              \
                                                                                                   \
		spoil_setup(&spoilt);                                                              \
		ck_assert_int_eq(spoil_parse(&spoilt), 0);                                         \
		base_put_le(spoilt.extent + (offset), value, width);                               \
		ck_assert_msg(spoil_parse(&spoilt) == (code), "%s", spoilt.error.text);            \
		spoil_teardown(&spoilt);                                                           \
	} while (0)

#define ALL_ONES UINT64_MAX

/* ---- Inconsistent archives ------------------------------------------------------------------- */

static struct test_case lies = { .name = "lies" };

TEST(lies, impossible_numbers_in_the_end_records_are_refused)
{
	CHECK_FIELD(end, FORMAT_END_COUNT, 2, 2,
		    IOSHAPE_E_DAMAGED); /* differs from the other count */
	CHECK_FIELD(end, FORMAT_END_DISK, 2, 1, IOSHAPE_E_DAMAGED);
	CHECK_FIELD(end, FORMAT_END_DIRECTORY_DISK, 2, 1, IOSHAPE_E_DAMAGED);
	CHECK_FIELD(end, FORMAT_END_SIZE, 4, 7, IOSHAPE_E_DAMAGED);
	CHECK_FIELD(end, FORMAT_END_OFFSET, 4, 7, IOSHAPE_E_DAMAGED);
	CHECK_FIELD(end, FORMAT_END_COMMENT, 2, 1, IOSHAPE_E_DAMAGED);
	CHECK_FIELD(locator, ZIP64_LOCATOR_OFFSET, 8, 0, IOSHAPE_E_DAMAGED);
	CHECK_FIELD(locator, ZIP64_LOCATOR_OFFSET, 8, ALL_ONES, IOSHAPE_E_DAMAGED);
	CHECK_FIELD(locator, ZIP64_LOCATOR_DISK, 4, 1, IOSHAPE_E_DAMAGED);
	CHECK_FIELD(locator, ZIP64_LOCATOR_DISKS, 4, 2, IOSHAPE_E_DAMAGED);
	CHECK_FIELD(zip64_end, 0, 4, 0, IOSHAPE_E_DAMAGED);
	CHECK_FIELD(zip64_end, ZIP64_END_LENGTH, 8, 45, IOSHAPE_E_DAMAGED);
	CHECK_FIELD(zip64_end, ZIP64_END_LENGTH, 8, ALL_ONES, IOSHAPE_E_DAMAGED);
	CHECK_FIELD(zip64_end, ZIP64_END_DISK, 4, 1, IOSHAPE_E_DAMAGED);
	CHECK_FIELD(zip64_end, ZIP64_END_COUNT, 8, 4, IOSHAPE_E_DAMAGED);
	CHECK_FIELD(zip64_end, ZIP64_END_SIZE, 8, ALL_ONES, IOSHAPE_E_DAMAGED);
	CHECK_FIELD(zip64_end, ZIP64_END_OFFSET, 8, ALL_ONES, IOSHAPE_E_DAMAGED);
}

/*
 * Inserts bytes before `at`. Invalidates all pointers into the archive. Returns where the bytes
 * are.
 */
static uint8_t *insert(struct spoilt *spoilt, const uint8_t *at, const void *bytes, size_t count)
{
	size_t before = (size_t)(at - spoilt->flat);
	uint8_t *longer = malloc(spoilt->bytes + count);

	memcpy(longer, spoilt->flat, before);
	memcpy(longer + before, bytes, count);
	memcpy(longer + before + count, spoilt->flat + before, spoilt->bytes - before);
	free(spoilt->flat);
	spoilt->flat = longer;
	spoilt->bytes += count;
	return longer + before;
}

TEST(lies, gaps_between_the_directory_and_its_end_are_refused)
{
	struct spoilt spoilt;
	uint8_t *at;

	spoil_setup(&spoilt);
	at = insert(&spoilt, spoilt.zip64_end, "gap", 4) + 4 + ZIP64_END_BYTES;
	base_put_le(at + ZIP64_LOCATOR_OFFSET, base_get_le(at + ZIP64_LOCATOR_OFFSET, 8) + 4, 8);
	ck_assert_int_eq(spoil_parse(&spoilt), IOSHAPE_E_DAMAGED);
	spoil_teardown(&spoilt);
}

/* The record is in the comment. Its length leads back to the locator by wrapping around 2^64. */
TEST(lies, a_zip64_end_record_behind_its_locator_is_refused)
{
	struct spoilt spoilt;
	uint8_t record[ZIP64_END_BYTES], *at;
	size_t locator;

	spoil_setup(&spoilt);
	locator = (size_t)(spoilt.locator - spoilt.flat);
	memcpy(record, spoilt.zip64_end, sizeof(record));
	base_put_le(record + ZIP64_END_LENGTH,
		    -(uint64_t)(ZIP64_LOCATOR_BYTES + FORMAT_END_BYTES + ZIP64_END_LENGTH_STARTS),
		    8);
	base_put_le(record + ZIP64_END_SIZE,
		    base_get_le(record + ZIP64_END_SIZE, 8) + ZIP64_END_BYTES +
			    ZIP64_LOCATOR_BYTES + FORMAT_END_BYTES,
		    8);
	base_put_le(spoilt.end + FORMAT_END_SIZE, 0xffffffff, 4);
	base_put_le(spoilt.end + FORMAT_END_COMMENT, sizeof(record), 2);
	at = insert(&spoilt, spoilt.flat + spoilt.bytes, record, sizeof(record));
	base_put_le(spoilt.flat + locator + ZIP64_LOCATOR_OFFSET, (uint64_t)(at - spoilt.flat), 8);
	ck_assert_int_eq(spoil_parse(&spoilt), IOSHAPE_E_DAMAGED);
	spoil_teardown(&spoilt);
}

/* Sums of these sizes and the offset wrap around 2^64 and end up inside the file. */
TEST(lies, sizes_that_wrap_around_are_refused)
{
	static const uint64_t values[] = {
		UINT64_MAX,       UINT64_MAX - 33,     UINT64_MAX - 34,
		UINT64_MAX - 300, (uint64_t)INT64_MAX, UINT64_C(1) << 63
	};

	for (size_t i = 0; i < ARRAY_LENGTH(values); i++) {
		struct archive archive = { 0 };
		struct format_directory directory;
		uint8_t *field;

		archive_add(&archive, "a/b", NULL, 5 * GIB, 64, false);
		archive_finish(&archive);
		/*
		 * Skips the entry's header, the name and the field's header; then come the two
		 * sizes.
		 */
		field = archive.extents[archive.extent_count - 1].data + FORMAT_CENTRAL_BYTES + 3 +
			FORMAT_FIELD_HEAD_BYTES;
		ck_assert_uint_eq(base_get_le(field, 8), 5 * GIB);
		base_put_le(field, values[i], 8);
		base_put_le(field + 8, values[i], 8);
		ck_assert_int_eq(format_parse(&directory, archive.bytes, archive_fetch, &archive,
					      "test.pt", NULL),
				 IOSHAPE_E_DAMAGED);
		archive_free(&archive);
	}
}

/* Without a zip64 locator the numbers of the end record must be true. */
TEST(lies, all_ones_without_zip64_are_refused)
{
	struct spoilt spoilt;

	for (size_t i = 0; i < 3; i++) {
		spoil_setup(&spoilt);
		memset(spoilt.locator, 0, 4);
		if (i == 0)
			base_put_le(spoilt.end + FORMAT_END_COUNT - 2, 0xffffffff, 4);
		else
			base_put_le(spoilt.end + (i == 1 ? FORMAT_END_SIZE : FORMAT_END_OFFSET),
				    0xffffffff, 4);
		ck_assert_int_eq(spoil_parse(&spoilt), IOSHAPE_E_DAMAGED);
		spoil_teardown(&spoilt);
	}
}

/* Both end records agree on numbers that contradict the file. */
TEST(lies, huge_counts_cost_nothing_and_are_refused)
{
	static const struct {
		uint64_t count;
		int code;
	} cases[] = {
		{ 0, IOSHAPE_E_FORMAT },
		{ 2, IOSHAPE_E_DAMAGED },
		{ 4, IOSHAPE_E_DAMAGED },
		{ FORMAT_MAX_RECORDS, IOSHAPE_E_DAMAGED },
		{ FORMAT_MAX_RECORDS + 1, IOSHAPE_E_LIMIT },
		{ UINT64_C(1) << 60, IOSHAPE_E_LIMIT },
		{ UINT64_MAX, IOSHAPE_E_LIMIT },
	};

	for (size_t i = 0; i < ARRAY_LENGTH(cases); i++) {
		struct spoilt spoilt;

		spoil_setup(&spoilt);
		base_put_le(spoilt.zip64_end + ZIP64_END_DISK_COUNT, cases[i].count, 8);
		base_put_le(spoilt.zip64_end + ZIP64_END_COUNT, cases[i].count, 8);
		base_put_le(spoilt.end + FORMAT_END_DISK_COUNT, 0xffff, 2);
		base_put_le(spoilt.end + FORMAT_END_COUNT, 0xffff, 2);
		ck_assert_msg(spoil_parse(&spoilt) == cases[i].code, "%s", spoilt.error.text);
		spoil_teardown(&spoilt);
	}
}

/* A directory of a terabyte, in a sparse file that is large enough. */
TEST(lies, directories_above_the_limit_are_refused)
{
	struct archive archive = { 0 };
	struct base_buffer end = { 0 };
	struct format_directory directory;
	struct base_error error = { 0 };

	ck_assert_int_eq(encode_directory(&end, NULL, 0, 1024 * GIB), 0);
	base_put_le(end.data + ZIP64_END_DISK_COUNT, 1000, 8);
	base_put_le(end.data + ZIP64_END_COUNT, 1000, 8);
	base_put_le(end.data + ZIP64_END_SIZE, 1024 * GIB, 8);
	base_put_le(end.data + ZIP64_END_OFFSET, 0, 8);
	base_put_le(end.data + ZIP64_END_BYTES + ZIP64_LOCATOR_BYTES + FORMAT_END_DISK_COUNT,
		    0xffffffff, 4);
	base_put_le(end.data + ZIP64_END_BYTES + ZIP64_LOCATOR_BYTES + FORMAT_END_SIZE, ALL_ONES,
		    8);
	archive.bytes = 1024 * GIB + end.bytes;
	archive_put(&archive, 1024 * GIB, &end);
	ck_assert_msg(format_parse(&directory, archive.bytes, archive_fetch, &archive, "test.pt",
				   &error) == IOSHAPE_E_LIMIT,
		      "%s", error.text);
	archive_free(&archive);
}

TEST(lies, impossible_numbers_in_the_directory_are_refused)
{
	CHECK_FIELD(central[0], 0, 4, 0, IOSHAPE_E_DAMAGED);
	CHECK_FIELD(central[1], FORMAT_CENTRAL_SIZE, 4, 7, IOSHAPE_E_DAMAGED);
	CHECK_FIELD(central[1], FORMAT_CENTRAL_PACKED, 4, 7, IOSHAPE_E_DAMAGED);
	/* All ones refer to a zip64 field, which is missing. */
	CHECK_FIELD(central[1], FORMAT_CENTRAL_PACKED, 8, ALL_ONES, IOSHAPE_E_DAMAGED);
	CHECK_FIELD(central[1], FORMAT_CENTRAL_OFFSET, 4, ALL_ONES, IOSHAPE_E_DAMAGED);
	CHECK_FIELD(central[1], FORMAT_CENTRAL_DISK, 2, ALL_ONES, IOSHAPE_E_DAMAGED);
	CHECK_FIELD(central[1], FORMAT_CENTRAL_DISK, 2, 1, IOSHAPE_E_DAMAGED);
	CHECK_FIELD(central[1], FORMAT_CENTRAL_OFFSET, 4, 0xfffffff0, IOSHAPE_E_DAMAGED);
	CHECK_FIELD(central[1], FORMAT_CENTRAL_OFFSET, 4, 0, IOSHAPE_E_DAMAGED); /* overlaps */
	CHECK_FIELD(central[1], FORMAT_CENTRAL_OFFSET, 4, 60, IOSHAPE_E_DAMAGED);
	CHECK_FIELD(central[1], FORMAT_CENTRAL_NAME, 2, 0, IOSHAPE_E_FORMAT);
	CHECK_FIELD(central[1], FORMAT_CENTRAL_NAME, 2, 0xffff, IOSHAPE_E_DAMAGED);
	CHECK_FIELD(central[1], FORMAT_CENTRAL_EXTRA, 2, 1, IOSHAPE_E_DAMAGED);
	CHECK_FIELD(central[1], FORMAT_CENTRAL_COMMENT, 2, 0xffff, IOSHAPE_E_DAMAGED);
	CHECK_FIELD(central[2], FORMAT_CENTRAL_COMMENT, 2, 1, IOSHAPE_E_DAMAGED);
}

TEST(lies, what_we_do_not_read_is_said)
{
	struct spoilt archive;

	spoil_setup(&archive);
	base_put_le(archive.central[1] + FORMAT_CENTRAL_METHOD, 8, 2);
	base_put_le(archive.central[1] + FORMAT_CENTRAL_PACKED, 1, 4);
	ck_assert_int_eq(spoil_parse(&archive), IOSHAPE_E_FORMAT);
	spoil_teardown(&archive);
	CHECK_FIELD(central[1], FORMAT_CENTRAL_FLAGS, 2, 0x0809, IOSHAPE_E_FORMAT);
	CHECK_FIELD(central[1], FORMAT_CENTRAL_FLAGS, 2, 0x0848, IOSHAPE_E_FORMAT);
	CHECK_FIELD(central[1], FORMAT_CENTRAL_FLAGS, 2, 0x2808, IOSHAPE_E_FORMAT);
	CHECK_FIELD(central[1], FORMAT_CENTRAL_FLAGS, 2, 0x0828, IOSHAPE_E_FORMAT);
	/* torch would read wrong data or none, without an error. */
	CHECK_FIELD(central[1], FORMAT_CENTRAL_METHOD, 2, 8, IOSHAPE_E_DAMAGED);
	CHECK_FIELD(central[1], FORMAT_CENTRAL_METHOD, 2, 1, IOSHAPE_E_DAMAGED);
	CHECK_FIELD(central[1], FORMAT_CENTRAL_ATTRIBUTES, 4, 0x10, IOSHAPE_E_DAMAGED);
}

TEST(lies, records_that_overlap_are_refused)
{
	/* Sizes that reach into the next record or into the directory. */
	for (size_t i = 0; i < 3; i++) {
		struct spoilt spoilt;
		uint64_t limit, least;

		spoil_setup(&spoilt);
		least = spoilt.archive.entries[i].header_offset + FORMAT_LOCAL_BYTES +
			spoilt.archive.entries[i].name_bytes;
		limit = i < 2 ? spoilt.archive.entries[i + 1].header_offset : spoilt.archive.cursor;
		base_put_le(spoilt.central[i] + FORMAT_CENTRAL_PACKED, limit - least + 1, 4);
		base_put_le(spoilt.central[i] + FORMAT_CENTRAL_SIZE, limit - least + 1, 4);
		ck_assert_int_eq(spoil_parse(&spoilt), IOSHAPE_E_DAMAGED);
		spoil_teardown(&spoilt);
	}
}

/* Only the local header contains the length of its extra field. */
TEST(lies, local_headers_that_do_not_match_are_refused)
{
	static const struct {
		size_t offset, width;
		uint64_t value;
	} cases[] = {
		{ 0, 4, 0 },
		{ FORMAT_LOCAL_NAME, 2, 13 },
		{ FORMAT_LOCAL_EXTRA, 2, 0xffff },
		{ FORMAT_LOCAL_EXTRA, 2, 100 }, /* reaches into the next record */
		{ FORMAT_LOCAL_BYTES, 1, 'b' },
		{ FORMAT_LOCAL_METHOD, 2, 8 },
		{ FORMAT_LOCAL_FLAGS, 2, 0x0809 },
		{ FORMAT_LOCAL_FLAGS, 2, 0x0800 }, /* says that the sizes are true */
	};

	for (size_t i = 0; i < ARRAY_LENGTH(cases); i++) {
		struct spoilt spoilt;

		spoil_setup(&spoilt);
		base_put_le(spoilt.flat + spoilt.archive.entries[1].header_offset + cases[i].offset,
			    cases[i].value, (unsigned)cases[i].width);
		ck_assert_int_eq(spoil_parse(&spoilt), IOSHAPE_E_DAMAGED);
		spoil_teardown(&spoilt);
	}
}

static int parse_names(const char *first, const char *second)
{
	struct archive archive = { 0 };
	struct format_directory directory;
	struct base_error error = { 0 };
	int ret;

	archive_add(&archive, first, small_data, sizeof(small_data), 64, false);
	archive_add(&archive, second, small_data, sizeof(small_data), 64, false);
	archive_finish(&archive);
	ret = format_parse(&directory, archive.bytes, archive_fetch, &archive, "test.pt", &error);
	if (!ret)
		format_directory_free(&directory);
	archive_free(&archive);
	return ret;
}

TEST(lies, names_have_to_make_sense)
{
	char too_long[FORMAT_MAX_FULL_NAME_BYTES + 1];

	memset(too_long, 'n', sizeof(too_long));
	too_long[1] = '/';
	too_long[2 + IOSHAPE_MAX_NAME_BYTES + 1] = '\0';
	ck_assert_int_eq(parse_names("a/b", "a/c"), 0);
	ck_assert_int_eq(parse_names("a/b", "a/b"), IOSHAPE_E_DAMAGED);
	ck_assert_int_eq(parse_names("a/b", "b/c"), IOSHAPE_E_FORMAT);
	ck_assert_int_eq(parse_names("a/b", "ab"), IOSHAPE_E_FORMAT);
	ck_assert_int_eq(parse_names("b", "a/b"), IOSHAPE_E_FORMAT);
	ck_assert_int_eq(parse_names("/b", "/c"), IOSHAPE_E_FORMAT);
	ck_assert_int_eq(parse_names("a/b", "a/\xff"), IOSHAPE_E_FORMAT);
	ck_assert_int_eq(parse_names("n/b", too_long), IOSHAPE_E_LIMIT);
	too_long[2 + IOSHAPE_MAX_NAME_BYTES] = '\0';
	ck_assert_int_eq(parse_names("n/b", too_long), 0);
	/* A folder that contains data. */
	ck_assert_int_eq(parse_names("a/b", "a/"), IOSHAPE_E_DAMAGED);
}

TEST(well, empty_folders_of_repacking_tools_are_no_records)
{
	struct archive archive = { 0 };
	struct format_directory directory;

	archive_add(&archive, "a/", "", 0, 1, false);
	archive_add(&archive, "a/data.pkl", small_data, sizeof(small_data), 64, false);
	archive_add(&archive, "a/data/", "", 0, 1, false);
	archive_add(&archive, "a/data/0", small_data, sizeof(small_data), 64, false);
	archive_finish(&archive);
	parse_archive(&archive, &directory);
	ck_assert_uint_eq(directory.count, 2);
	ck_assert_str_eq(directory.entries[0].name, "data.pkl");
	ck_assert_str_eq(directory.entries[1].name, "data/0");
	format_directory_free(&directory);
	archive_free(&archive);

	/* Their names count for the common folder, and an archive of folders alone is refused. */
	for (int records = 0; records < 2; records++) {
		archive_add(&archive, "a/", "", 0, 1, false);
		if (records)
			archive_add(&archive, "b/data.pkl", small_data, sizeof(small_data), 64,
				    false);
		archive_finish(&archive);
		ck_assert_int_eq(format_parse(&directory, archive.bytes, archive_fetch, &archive,
					      "test.pt", NULL),
				 IOSHAPE_E_FORMAT);
		archive_free(&archive);
	}
}

static void reverse(struct format_entry *entries, size_t count)
{
	struct format_entry swap;

	for (size_t i = 0; i < count / 2; i++) {
		swap = entries[i];
		entries[i] = entries[count - 1 - i];
		entries[count - 1 - i] = swap;
	}
}

/* The directory lists the records in reverse order. They come back in the order of the file, and
 * must not overlap. */
TEST(well, the_directory_may_have_another_order_than_the_file)
{
	struct archive archive = { 0 };
	struct format_directory directory;
	char name[32];

	for (unsigned i = 0; i < 10; i++) {
		snprintf(name, sizeof(name), "a/%u", i);
		archive_add(&archive, name, small_data, i, 64, false);
	}
	reverse(archive.entries, 10);
	archive_finish(&archive);
	reverse(archive.entries, 10);
	parse_archive(&archive, &directory);
	check_same(&archive, &directory, 2);
	for (uint64_t i = 0; i < 10; i++) {
		const struct format_entry *entry = &directory.entries[i];

		ck_assert(format_data_fits(&directory, i, entry->data_offset));
		ck_assert(!format_data_fits(&directory, i, entry->header_offset + 30));
		ck_assert(!format_data_fits(&directory, i, entry->data_offset + 200));
		ck_assert(!format_data_fits(&directory, i, UINT64_MAX));
	}
	format_directory_free(&directory);
	/*
	 * The last record of the file, which is first in the directory, reaches into the directory.
	 */
	archive.entries[9].bytes = 200;
	archive.extents[archive.extent_count - 1].bytes = 0;
	reverse(archive.entries, 10);
	archive_finish(&archive);
	ck_assert_int_eq(
		format_parse(&directory, archive.bytes, archive_fetch, &archive, "test.pt", NULL),
		IOSHAPE_E_DAMAGED);
	archive_free(&archive);
}

/* ---- Ends of files --------------------------------------------------------------------------- */

static struct test_case ends_case = { .name = "ends of files" };

TEST(ends_case, every_truncation_is_refused)
{
	struct spoilt spoilt;
	size_t all;

	spoil_setup(&spoilt);
	all = spoilt.bytes;
	for (spoilt.bytes = 0; spoilt.bytes < all; spoilt.bytes++)
		ck_assert_int_eq(spoil_parse(&spoilt), IOSHAPE_E_DAMAGED);
	ck_assert_int_eq(spoil_parse(&spoilt), 0);
	spoil_teardown(&spoilt);
}

TEST(ends_case, appended_bytes_are_refused_and_comments_are_not)
{
	static const size_t lengths[] = { 1, 21, 22, 23, 100, 65534, 65535 };

	for (size_t i = 0; i < ARRAY_LENGTH(lengths); i++) {
		struct spoilt spoilt;
		size_t end;

		spoil_setup(&spoilt);
		end = (size_t)(spoilt.end - spoilt.flat);
		spoilt.flat = realloc(spoilt.flat, spoilt.bytes + lengths[i]);
		memset(spoilt.flat + spoilt.bytes, 'P', lengths[i]);
		spoilt.bytes += lengths[i];
		ck_assert_int_eq(spoil_parse(&spoilt), IOSHAPE_E_DAMAGED);
		base_put_le(spoilt.flat + end + FORMAT_END_COMMENT, lengths[i], 2);
		ck_assert_msg(spoil_parse(&spoilt) == 0, "%s", spoilt.error.text);
		spoil_teardown(&spoilt);
	}
}

/* Readers interpret such a file differently, so it is refused. */
TEST(ends_case, a_comment_with_another_end_record_is_refused)
{
	struct spoilt spoilt;
	uint8_t comment[40] = { 0 };

	spoil_setup(&spoilt);
	base_put_le(spoilt.end + FORMAT_END_COMMENT, sizeof(comment), 2);
	memcpy(comment + 5, spoilt.end, FORMAT_END_BYTES);
	insert(&spoilt, spoilt.flat + spoilt.bytes, comment, sizeof(comment));
	ck_assert_int_eq(spoil_parse(&spoilt), IOSHAPE_E_DAMAGED);
	spoil_teardown(&spoilt);
}

TEST(ends_case, bytes_in_front_are_refused)
{
	static const uint8_t more[100];
	struct spoilt spoilt;

	spoil_setup(&spoilt);
	insert(&spoilt, spoilt.flat, more, sizeof(more));
	ck_assert_int_eq(spoil_parse(&spoilt), IOSHAPE_E_DAMAGED);
	spoil_teardown(&spoilt);
}

TEST(ends_case, other_kinds_of_files_are_recognised)
{
	static const struct {
		const char *bytes;
		size_t length;
	} cases[] = {
		{ "\x80\x02\x8a\nl\xfc\x9c"
		  "F\xf9 j\xa8P\x19.",
		  15 },
		{ "\x80\x04\x95\x05\0\0\0\0\0\0\0}\x94.", 14 },
		{ "\x1f\x8b\x08\0\0\0\0\0", 8 },
		{ "\x08\0\0\0\0\0\0\0{\"a\": 1}", 16 },
		{ "Hello, world. This is a text.", 29 },
		{ "\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0", 23 },
		{ "x", 1 },
	};

	for (size_t i = 0; i < ARRAY_LENGTH(cases); i++) {
		struct archive_bytes bytes = { (const uint8_t *)cases[i].bytes, cases[i].length };
		struct format_directory directory;

		ck_assert_int_eq(format_parse(&directory, bytes.bytes, archive_bytes_fetch, &bytes,
					      "test.pt", NULL),
				 IOSHAPE_E_FORMAT);
	}
}

TEST(ends_case, a_pickle_of_old_torch_is_explained_wording)
{
	struct archive_bytes bytes = { (const uint8_t *)"\x80\x02\x8a\nl\xfc", 6 };
	struct format_directory directory;
	struct base_error error = { 0 };

	format_parse(&directory, bytes.bytes, archive_bytes_fetch, &bytes, "test.pt", &error);
	ck_assert_str_eq(error.sentence, "cannot load \"test.pt\": it is a torch file in the old "
					 "format, from before torch 1.6");
	ck_assert_str_eq(error.remedy, "load it with torch.load() and save it again");
}

static int failing_fetch(void *user, uint64_t offset, void *into, size_t bytes)
{
	unsigned *left = user;

	(void)offset;
	if (!(*left)--)
		return -EIO;
	memset(into, 0, bytes);
	return 0;
}

TEST(ends_case, failed_reads_are_reported_as_such)
{
	for (unsigned nth = 0; nth < 2; nth++) {
		struct format_directory directory;
		struct base_error error = { 0 };
		unsigned left = nth;

		ck_assert_int_eq(
			format_parse(&directory, 1000, failing_fetch, &left, "test.pt", &error),
			-EIO);
		ck_assert_int_eq(error.code, -EIO);
	}
}

/* ---- Encoding
 * ------------------------------------------------------------------------------------------- */

static struct test_case encoding = { .name = "encoding" };

/* The first bytes of a record as torch writes them, without the sizes in between. */
TEST(encoding, a_header_is_to_the_byte_that_of_torch)
{
	static const uint8_t expected[64] =
		"PK\x03\x04\0\0\x08\x08\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0"
		"\x0a\0\x18\0m/data.pklFB\x14\0ZZZZZZZZZZZZZZZZZZZ";
	struct base_buffer out = { 0 };
	struct format_extent extent;

	ck_assert_int_eq(lay_out_record(0, 10, 296, 64, &extent), 0);
	ck_assert_int_eq(encode_header(&out, "m/data.pkl", &extent, 296), 0);
	ck_assert_uint_eq(out.bytes, 64);
	ck_assert_mem_eq(out.data, expected, 63);
	ck_assert_uint_eq(out.data[63], 'Z');
	out.bytes = 0;
	ck_assert_int_eq(encode_descriptor(&out, 0x297ec914, 296, false), 0);
	ck_assert_uint_eq(out.bytes, 16);
	ck_assert_mem_eq(out.data, "PK\x07\x08\x14\xc9\x7e\x29\x28\x01\0\0\x28\x01\0\0", 16);
	base_buffer_free(&out);
}

/* The checksum covers all that the directory says about a record, except the name of the folder. */
TEST(encoding, the_checksum_of_a_directory_covers_every_field)
{
	const struct format_entry entry = { (char *)(uintptr_t) "x/data/0", 8, 1, 2, 3, 4 };
	struct format_entry changed[] = { entry, entry, entry, entry, entry, entry };
	uint32_t crc = format_directory_crc32(&entry, 1, 2);

	changed[0].name = (char *)(uintptr_t) "x/data/1";
	changed[1].name_bytes--;
	changed[2].crc32++;
	changed[3].bytes++;
	changed[4].header_offset++;
	for (size_t i = 0; i < 5; i++)
		ck_assert_uint_ne(format_directory_crc32(&changed[i], 1, 2), crc);
	ck_assert_uint_ne(format_directory_crc32(changed + 5, 0, 2), crc);
	changed[5].name = (char *)(uintptr_t) "folder/data/0";
	changed[5].name_bytes = 13;
	ck_assert_uint_eq(format_directory_crc32(&changed[5], 1, 7), crc);
}
