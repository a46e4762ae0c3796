/* SPDX-License-Identifier: Apache-2.0 */
/* Reads return what was written to the file, or the reader locates the damage. */
#include "support/archive.h"
#include "support/check_main.h"
#include "support/random.h"
#include "support/reader_case.h"
#include "support/scratch.h"

#include <fcntl.h>
#include <stdio.h>
#include <unistd.h>

/* Sizes around that of a block, and of a plain read. */
static const size_t sizes[] = {
	300, 0, 1, MIB - 1, MIB, MIB + 1, 3 * MIB + 77, 5 * MIB + 5, 4 * MIB + 64, 4096
};
#define RECORDS ARRAY_LENGTH(sizes)

static struct {
	uint8_t *data[RECORDS];
	struct io_queue *queue;
	struct base_error error;
	struct format_reader reader;
	char path[4096];
} test;

static void setup(void)
{
	memset(&test, 0, sizeof(test));
	scratch_setup();
	snprintf(test.path, sizeof(test.path), "%s", scratch_path("test.pt"));
	reader_case_fill(test.data, sizes, RECORDS);
	test.queue = reader_case_queue(IOSHAPE_ENGINE_BUFFERED, MIB, 4);
}

static void teardown(void)
{
	for (size_t i = 0; i < RECORDS; i++)
		free(test.data[i]);
	io_queue_close(test.queue);
	scratch_teardown();
}

static const char *record_name(char name[32], size_t i)
{
	snprintf(name, 32, "data/%zu", i);
	return name;
}

static void write_indexed(size_t count)
{
	reader_case_write(test.path, test.queue, test.data, sizes, count);
}

static void add_records(struct archive *archive, size_t first, size_t count)
{
	char name[32], full[64];

	for (size_t i = first; i < first + count; i++) {
		snprintf(full, sizeof(full), "archive/%s", record_name(name, i));
		archive_add(archive, full, test.data[i], sizes[i], 64, false);
	}
}

static void write_archive(struct archive *archive)
{
	uint8_t *flat;

	archive_finish(archive);
	flat = archive_flat(archive);
	scratch_write(test.path, flat, archive->bytes);
	free(flat);
	archive_free(archive);
}

/* Writes a file without an index, like torch.save(). */
static void write_plain(size_t first, size_t count)
{
	struct archive archive = { 0 };

	add_records(&archive, first, count);
	write_archive(&archive);
}

static void write_file(bool indexed)
{
	if (indexed)
		write_indexed(RECORDS);
	else
		write_plain(0, RECORDS);
}

static int try_open(void)
{
	memset(&test.error, 0, sizeof(test.error));
	return format_reader_open(&test.reader, test.path, 0, 0, IOSHAPE_DIRECT_OFF, &test.error);
}

static void open_reader(void)
{
	ck_assert_msg(!try_open(), "%s", test.error.text);
}

static int read_ranges(const struct format_range *ranges, size_t count, bool verify)
{
	memset(&test.error, 0, sizeof(test.error));
	return format_reader_read(&test.reader, test.queue, NULL, ranges, count, verify, NULL, NULL,
				  &test.error);
}

static void flip_byte(uint64_t offset, uint8_t bits)
{
	int fd = open(test.path, O_RDWR);
	uint8_t byte;

	ck_assert_int_eq(pread(fd, &byte, 1, (off_t)offset), 1);
	byte ^= bits;
	ck_assert_int_eq(pwrite(fd, &byte, 1, (off_t)offset), 1);
	close(fd);
}

/* ---- Reading
 * --------------------------------------------------------------------------------------------- */

static struct test_case reading = { .name = "reading", .setup = setup, .teardown = teardown };

/*
 * Reads random ranges: whole records, parts, overlapping, empty, and some that are only verified.
 */
static void check_random_ranges(uint64_t seed, bool verify)
{
	struct format_range ranges[64] = { 0 };
	size_t count = 1 + test_random_below(&seed, ARRAY_LENGTH(ranges));
	uint64_t span = test_random_below(&seed, 2) ? 3000 : 3 * MIB;

	for (size_t i = 0; i < count; i++) {
		size_t record = test_random_below(&seed, RECORDS);
		uint64_t offset = test_random_below(&seed, sizes[record] + 1);
		uint64_t bytes = test_random_below(&seed, span);

		bytes = MIN(bytes, sizes[record] - offset);
		if (!test_random_below(&seed, 8)) {
			offset = 0;
			bytes = sizes[record];
		}
		ranges[i] = (struct format_range){ record, offset, bytes, NULL };
		if (test_random_below(&seed, 8))
			ranges[i].into = calloc(1, bytes + 1);
	}
	ck_assert_msg(!read_ranges(ranges, count, verify), "%s", test.error.text);
	for (size_t i = 0; i < count; i++) {
		const uint8_t *into = ranges[i].into;

		if (!into)
			continue;
		ck_assert_mem_eq(into, test.data[ranges[i].record] + ranges[i].offset,
				 ranges[i].bytes);
		ck_assert_uint_eq(into[ranges[i].bytes], 0); /* no byte more was written */
		free(ranges[i].into);
	}
}

LOOP_TEST(reading, random_ranges_are_what_was_written, 0, 4)
{
	write_file(_i & 1);
	open_reader();
	for (uint64_t i = 0; i < scratch_rounds(60); i++)
		check_random_ranges(i, _i & 2);
	format_reader_close(&test.reader);
}

/* More ranges than a batch holds, with blocks that begin in one batch and end in the next. */
LOOP_TEST(reading, many_small_ranges_are_read_in_batches, 0, 4)
{
	const size_t record = 6, step = 100;
	size_t count = 30000;
	struct format_range *ranges = calloc(count, sizeof(*ranges));
	uint8_t *into = calloc(count, 150);

	write_file(_i & 1);
	open_reader();
	/* Ranges of 150 bytes overlap, ranges of 50 leave gaps. Each overlap needs another pass. */
	for (size_t bytes = 50; bytes <= 150; bytes += 100) {
		count = bytes == 50 ? 30000 : 300;
		for (size_t i = 0; i < count; i++)
			ranges[i] =
				(struct format_range){ record, i * step, bytes, into + i * 150 };
		ck_assert_msg(!read_ranges(ranges, count, _i & 2), "%s", test.error.text);
		for (size_t i = 0; i < count; i++)
			ck_assert_mem_eq(into + i * 150, test.data[record] + i * step, bytes);
	}
	format_reader_close(&test.reader);
	free(into);
	free(ranges);
}

/* ---- Damage
 * ------------------------------------------------------------------------------------------------
 */

static struct test_case damage_case = { .name = "damage", .setup = setup, .teardown = teardown };

/*
 * torch's files have one checksum for each record, which only a read of the whole record can
 * verify.
 */
TEST(damage_case, damage_in_files_of_torch_is_found_when_the_record_is_read_whole)
{
	const size_t record = 7; /* a little more than 5 MiB: two plain reads */
	uint8_t *into = malloc(2 * sizes[record]);
	const struct format_range whole = { record, 0, sizes[record], into };
	const struct format_range verified = { record, 0, sizes[record], NULL };
	const struct format_range part = { record, 1, sizes[record] - 1, into };
	const struct format_range both[] = { part,
					     { record, 0, sizes[record], into + sizes[record] } };

	write_file(false);
	open_reader();
	ck_assert_int_eq(read_ranges(&verified, 1, true), 0);
	flip_byte(test.reader.directory.entries[record].data_offset + 4 * MIB + 99, 0x80);
	ck_assert_int_eq(read_ranges(&whole, 1, true), IOSHAPE_E_DAMAGED);
	ck_assert_str_eq(test.error.record, "data/7");
	ck_assert_int_eq(read_ranges(&verified, 1, true), IOSHAPE_E_DAMAGED);
	ck_assert_int_eq(read_ranges(both, 2, true), IOSHAPE_E_DAMAGED);
	ck_assert_int_eq(read_ranges(&part, 1, true), 0);
	ck_assert_int_eq(read_ranges(&whole, 1, false), 0);
	format_reader_close(&test.reader);
	free(into);
}

/*
 * Opens the file and reads all records. What is accepted must be what was written. Returns whether
 * all was accepted.
 */
static bool read_all_and_compare(size_t first, size_t count)
{
	uint8_t into[512];
	char name[32];
	bool accepted = true;

	if (try_open()) {
		ck_assert(test.error.code == IOSHAPE_E_DAMAGED ||
			  test.error.code == IOSHAPE_E_FORMAT ||
			  test.error.code == IOSHAPE_E_LIMIT);
		return false;
	}
	for (size_t i = first; i < first + count && accepted; i++) {
		uint64_t position;

		record_name(name, i);
		accepted = format_names_find(test.reader.directory.names, name, strlen(name),
					     &position);
		if (!accepted)
			break;
		const struct format_range range = { position, 0,
						    test.reader.directory.entries[position].bytes,
						    into };
		ck_assert_uint_lt(range.bytes, sizeof(into));
		accepted = !read_ranges(&range, 1, true);
		if (accepted) {
			ck_assert_uint_eq(range.bytes, sizes[i]);
			ck_assert_mem_eq(into, test.data[i], sizes[i]);
		}
	}
	format_reader_close(&test.reader);
	return accepted;
}

LOOP_TEST(damage_case, no_single_bit_flip_goes_unnoticed, 0, 2)
{
	size_t bytes, accepted = 0;

	if (_i)
		write_indexed(3);
	else
		write_plain(0, 3);
	free(scratch_read(test.path, &bytes));
	ck_assert(read_all_and_compare(0, 3));
	for (size_t at = 0; at < bytes; at++) {
		for (unsigned bit = 0; bit < 8; bit++) {
			flip_byte(at, (uint8_t)(1u << bit));
			accepted += read_all_and_compare(0, 3);
			flip_byte(at, (uint8_t)(1u << bit));
		}
	}
	/* Changes of padding, time stamps and descriptors are harmless. All others were refused. */
	ck_assert_uint_gt(accepted, 0);
	ck_assert_uint_lt(accepted, bytes * 8);
	ck_assert(read_all_and_compare(0, 3));
}

/* ---- The index
 * ------------------------------------------------------------------------------------------------
 */

static struct test_case index_case = { .name = "index", .setup = setup, .teardown = teardown };

TEST(index_case, a_damaged_index_is_refused)
{
	uint64_t offset;

	write_indexed(3);
	open_reader();
	offset = test.reader.directory.entries[3].data_offset;
	format_reader_close(&test.reader);
	flip_byte(offset + 40, 4);
	ck_assert_int_eq(try_open(), IOSHAPE_E_DAMAGED);
}

/* An index with impossible offsets is not used, although its checksums are right. */
LOOP_TEST(index_case, an_index_with_impossible_offsets_is_not_used, 0, 3)
{
	static const uint64_t wrong[] = { 0, 37, UINT64_MAX };
	uint8_t old[4], *file;
	uint64_t index, end;
	size_t bytes;

	write_indexed(3);
	open_reader();
	index = test.reader.directory.entries[3].data_offset;
	end = index + test.reader.directory.entries[3].bytes;
	base_put_le(old, test.reader.directory.entries[3].crc32, 4);
	format_reader_close(&test.reader);
	file = scratch_read(test.path, &bytes);
	base_put_le(file + index + 40 + 16, wrong[_i], 8); /* of the first record */
	for (size_t at = end; at + 4 <= bytes; at++)
		if (!memcmp(file + at, old, 4))
			base_put_le(file + at, base_crc32(0, file + index, end - index), 4);
	scratch_write(test.path, file, bytes);
	free(file);
	open_reader();
	ck_assert(!test.reader.has_index);
	ck_assert_int_eq(test.reader.index_problem.code, IOSHAPE_E_DAMAGED);
	format_reader_close(&test.reader);
	ck_assert(read_all_and_compare(0, 3));
}

/*
 * Puts records into a new archive, with the unchanged index, like a tool that does not know
 * indexes.
 */
static void repack(size_t first, size_t count, uint32_t alignment)
{
	struct archive archive = { 0 };
	const struct format_entry *entry;
	size_t bytes;
	uint8_t *old;

	write_indexed(3);
	old = scratch_read(test.path, &bytes);
	open_reader();
	for (size_t i = first; i < first + count; i++) {
		char name[64];

		entry = &test.reader.directory.entries[i];
		snprintf(name, sizeof(name), "other/%s", entry->name);
		archive_add(&archive, name, old + entry->data_offset, entry->bytes, alignment,
			    false);
	}
	entry = &test.reader.directory.entries[3];
	archive_add(&archive, "other/" FORMAT_INDEX_RECORD, old + entry->data_offset, entry->bytes,
		    1, false);
	format_reader_close(&test.reader);
	free(old);
	write_archive(&archive);
}

TEST(index_case, a_repacked_archive_is_read_without_its_index)
{
	repack(0, 3, 1);
	open_reader();
	ck_assert(!test.reader.has_index);
	ck_assert_int_eq(test.reader.index_problem.code, IOSHAPE_E_DAMAGED);
	format_reader_close(&test.reader);
	ck_assert(read_all_and_compare(0, 3));

	/* Without the first record. */
	repack(1, 2, 1);
	open_reader();
	ck_assert(!test.reader.has_index);
	format_reader_close(&test.reader);
	ck_assert(read_all_and_compare(1, 2));
}

/*
 * Two records of equal size exchange names, in the directory and in the local headers. All
 * checksums remain right.
 */
TEST(index_case, records_under_wrong_names_are_not_taken_for_indexed)
{
	size_t bytes;
	uint8_t *file;

	write_indexed(3);
	file = scratch_read(test.path, &bytes);
	for (size_t at = 0; at + 14 < bytes; at++)
		if (!memcmp(file + at, "archive/data/2", 14))
			file[at + 13] = '7';
	scratch_write(test.path, file, bytes);
	free(file);
	open_reader();
	ck_assert(!test.reader.has_index);
	format_reader_close(&test.reader);
}

TEST(index_case, an_index_of_a_later_version_is_left_alone)
{
	struct archive archive = { 0 };
	uint8_t index[64] = "ioshape\n\x02";

	add_records(&archive, 0, 3);
	archive_add(&archive, "archive/" FORMAT_INDEX_RECORD, index, sizeof(index), 64, false);
	write_archive(&archive);
	open_reader();
	ck_assert(!test.reader.has_index);
	ck_assert_int_eq(test.reader.index_problem.code, IOSHAPE_E_FORMAT);
	format_reader_close(&test.reader);
	ck_assert(read_all_and_compare(0, 3));
}

/* The library always writes the index as the last record. */
TEST(index_case, an_index_in_another_place_is_a_record_like_any_other)
{
	struct archive archive = { 0 };

	archive_add(&archive, "archive/" FORMAT_INDEX_RECORD, "nonsense", 8, 64, false);
	add_records(&archive, 0, 3);
	write_archive(&archive);
	open_reader();
	ck_assert(!test.reader.has_index);
	ck_assert_int_eq(test.reader.index_problem.code, 0);
	format_reader_close(&test.reader);
	ck_assert(read_all_and_compare(0, 3));
}

TEST(index_case, what_is_not_there_or_no_file_is_refused)
{
	ck_assert_int_eq(try_open(), -ENOENT);
	scratch_write(test.path, "", 0);
	ck_assert_int_eq(try_open(), IOSHAPE_E_DAMAGED);
	snprintf(test.path, sizeof(test.path), "%s", scratch_directory());
	ck_assert_int_eq(try_open(), -EISDIR);
}
