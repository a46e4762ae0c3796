/* SPDX-License-Identifier: Apache-2.0 */
/* Byte ranges of a file, whichever records they contain or cut. */
#define _GNU_SOURCE
#include "support/archive.h"
#include "support/check_main.h"
#include "support/reader_case.h"
#include "support/scratch.h"

#include <fcntl.h>
#include <stdio.h>
#include <unistd.h>

static const size_t sizes[] = { 300, 0, 1, MIB - 1, MIB, MIB + 1, 2 * MIB + 77, 4096, 0 };
#define RECORDS ARRAY_LENGTH(sizes)
#define LARGE 6

/* Kinds of files. */
enum kind { INDEXED, TORCH, NO_CHECKSUMS, SHUFFLED, KINDS };

static struct {
	uint8_t *data[RECORDS];
	uint8_t *file; /* contents of the file */
	uint8_t *into;
	size_t file_bytes;
	struct io_queue *queue;
	struct io_stream *stream;
	struct base_error error;
	struct format_reader reader;
	char path[4096];
} test;

static void open_queue(unsigned depth)
{
	test.queue = reader_case_queue(IOSHAPE_ENGINE_AUTO, 256 * KIB, depth);
}

static void setup(void)
{
	memset(&test, 0, sizeof(test));
	scratch_setup();
	snprintf(test.path, sizeof(test.path), "%s", scratch_path("test.pt"));
	reader_case_fill(test.data, sizes, RECORDS);
	open_queue(4);
}

static void teardown(void)
{
	for (size_t i = 0; i < RECORDS; i++)
		free(test.data[i]);
	free(test.file);
	free(test.into);
	io_queue_close(test.queue);
	scratch_teardown();
}

static void write_archive(enum kind kind)
{
	struct archive archive = { 0 };
	struct format_entry entry;
	uint8_t *flat;
	char name[32];

	for (size_t i = 0; i < RECORDS; i++) {
		snprintf(name, sizeof(name), "archive/data/%zu", i);
		archive_add(&archive, name, test.data[i], sizes[i], 64, false);
		if (kind == NO_CHECKSUMS)
			archive.entries[i].crc32 = 0;
	}
	/* Some tools list records in another order than that of the file. */
	for (size_t i = 0; kind == SHUFFLED && i + 3 < RECORDS; i += 2) {
		entry = archive.entries[i];
		archive.entries[i] = archive.entries[i + 3];
		archive.entries[i + 3] = entry;
	}
	archive_finish(&archive);
	flat = archive_flat(&archive);
	if (kind == NO_CHECKSUMS)
		for (size_t i = 0; i < RECORDS; i++)
			memset(flat + archive.entries[i].header_offset + 14, 0, 4);
	scratch_write(test.path, flat, archive.bytes);
	free(flat);
	archive_free(&archive);
}

static void open_reader(void)
{
	struct format_reader *reader = &test.reader;

	memset(&test.error, 0, sizeof(test.error));
	ck_assert_msg(
		!format_reader_open(reader, test.path, 0, 0, IOSHAPE_DIRECT_PREFER, &test.error),
		"%s", test.error.text);
	ck_assert_int_eq(io_stream_open(&test.stream, &reader->input,
					format_reader_data_end(reader), &test.error),
			 0);
}

static void close_reader(void)
{
	io_stream_free(test.stream);
	format_reader_close(&test.reader);
}

static void make_file(enum kind kind)
{
	if (kind == INDEXED)
		reader_case_write(test.path, test.queue, test.data, sizes, RECORDS);
	else
		write_archive(kind);
	free(test.file);
	free(test.into);
	test.file = scratch_read(test.path, &test.file_bytes);
	test.into = malloc(test.file_bytes + 1);
	open_reader();
	ck_assert_int_eq(test.reader.has_index, kind == INDEXED);
	ck_assert_int_eq(test.reader.no_checksums, kind == NO_CHECKSUMS);
}

static int try_get(uint64_t offset, uint64_t bytes)
{
	int ret;

	memset(&test.error, 0, sizeof(test.error));
	memset(test.into, 0x99, bytes + 1);
	ret = format_reader_read_file(&test.reader, test.queue, test.stream, offset, test.into,
				      bytes, true, NULL, NULL, &test.error);
	if (ret || io_stream_is_idle(test.stream))
		io_stream_stop(test.stream);
	ck_assert_uint_eq(test.into[bytes], 0x99);
	return ret;
}

static void get(uint64_t offset, uint64_t bytes)
{
	ck_assert_msg(!try_get(offset, bytes), "%s", test.error.text);
	if (memcmp(test.into, test.file + offset, bytes) != 0)
		ck_abort_msg("%llu bytes at %llu differ", (unsigned long long)bytes,
			     (unsigned long long)offset);
}

static const struct format_entry *entry_of(size_t record)
{
	char name[32];
	uint64_t position;

	snprintf(name, sizeof(name), "data/%zu", record);
	ck_assert(format_names_find(test.reader.directory.names, name, strlen(name), &position));
	return &test.reader.directory.entries[position];
}

/* Lists the offsets where something begins or ends, and those one byte before and after. */
static size_t find_edges(uint64_t *edges)
{
	size_t count = 0;

	edges[count++] = 0;
	for (size_t i = 0; i < RECORDS; i++) {
		const struct format_entry *entry = entry_of(i);
		const uint64_t here[] = { entry->header_offset, entry->header_offset + 30,
					  entry->data_offset, entry->data_offset + entry->bytes };

		for (size_t k = 0; k < ARRAY_LENGTH(here); k++)
			for (uint64_t at = here[k] ? here[k] - 1 : 0; at <= here[k] + 1; at++)
				if (at > edges[count - 1])
					edges[count++] = at;
	}
	edges[count++] = test.reader.directory.offset;
	edges[count++] = test.file_bytes - 22;
	edges[count++] = test.file_bytes;
	return count;
}

static struct test_case tests = { .name = "stretches", .setup = setup, .teardown = teardown };

LOOP_TEST(tests, however_a_file_is_cut_it_is_what_lies_there, 0, 2 * KINDS)
{
	const size_t rarer = scratch_under_valgrind() ? 3 : 1;
	uint64_t edges[RECORDS * 12 + 4];
	size_t count;

	make_file((enum kind)(_i / 2));
	count = find_edges(edges);
	for (size_t step = 1; step < 6; step += 2) {
		if (_i % 2)
			scratch_evict(test.path);
		for (size_t i = 0; i < count; i += step)
			get(edges[i], edges[MIN(i + step, count - 1)] - edges[i]);
	}
	/* From each offset to later ones. */
	for (size_t i = 0; i < count; i += 7 * rarer)
		for (size_t k = i; k < count; k += 9 * rarer)
			get(edges[i], edges[k] - edges[i]);
	close_reader();
}

LOOP_TEST(tests, pieces_of_any_length_one_after_another, 0, 2 * KINDS)
{
	static const uint64_t steps[] = { 12345, 65536, MIB, 3 * MIB, 100 * MIB };

	make_file((enum kind)(_i / 2));
	for (size_t i = 0; i < ARRAY_LENGTH(steps); i++) {
		if (_i % 2)
			scratch_evict(test.path);
		for (uint64_t at = 0; at < test.file_bytes; at += steps[i])
			get(at, MIN(steps[i], test.file_bytes - at));
	}
	close_reader();
}

LOOP_TEST(tests, small_memory_does_as_well, 0, 3)
{
	io_queue_close(test.queue);
	open_queue(1 + (unsigned)_i);
	make_file(INDEXED);
	scratch_evict(test.path);
	for (uint64_t at = 0; at < test.file_bytes; at += 90001)
		get(at, MIN(90001, test.file_bytes - at));
	get(0, test.file_bytes);
	close_reader();
}

static void flip_byte(uint64_t offset)
{
	int fd = open(test.path, O_RDWR | O_CLOEXEC);
	uint8_t byte = test.file[offset] ^ 0x10;

	test.file[offset] = byte;
	ck_assert_int_eq(pwrite(fd, &byte, 1, (off_t)offset), 1);
	close(fd);
}

TEST(tests, damage_is_told_by_the_call_that_reads_it_and_by_no_other)
{
	const struct format_entry *entry;
	uint64_t at, step = 500000;
	unsigned damaged = 0;
	int ret;

	make_file(INDEXED);
	entry = entry_of(LARGE);
	at = entry->data_offset + MIB + 1000;
	flip_byte(at);
	for (int cold = 0; cold < 2; cold++) {
		if (cold)
			scratch_evict(test.path);
		for (uint64_t begin = 0; begin < test.file_bytes; begin += step) {
			uint64_t end = MIN(begin + step, test.file_bytes);
			bool touches = begin < entry->data_offset + 2 * MIB &&
				       end > entry->data_offset + MIB;

			ret = try_get(begin, end - begin);
			ck_assert_int_eq(ret, touches ? IOSHAPE_E_DAMAGED : 0);
			if (!touches)
				continue;
			damaged++;
			ck_assert_str_eq(test.error.record, "data/6");
			ck_assert_uint_eq(test.error.offset, entry->data_offset + MIB);
		}
	}
	ck_assert_uint_ge(damaged, 4);
	close_reader();
}

LOOP_TEST(tests, a_record_of_torch_is_verified_when_all_of_it_is_read, 0, 2)
{
	const struct format_entry *entry;

	make_file(_i ? SHUFFLED : TORCH);
	entry = entry_of(LARGE);
	flip_byte(entry->data_offset + 77);
	get(0, entry->data_offset + entry->bytes - 1);
	get(entry->data_offset + 1, test.file_bytes - entry->data_offset - 1);
	ck_assert_int_eq(try_get(entry->data_offset, entry->bytes), IOSHAPE_E_DAMAGED);
	ck_assert_str_eq(test.error.record, "data/6");
	ck_assert_int_eq(try_get(entry->header_offset, entry->bytes + 500), IOSHAPE_E_DAMAGED);
	ck_assert_int_eq(try_get(0, test.file_bytes), IOSHAPE_E_DAMAGED);
	close_reader();
}

LOOP_TEST(tests, nothing_is_claimed_about_what_lies_between, 0, KINDS)
{
	make_file((enum kind)_i);
	for (size_t i = 0; i < RECORDS; i++)
		flip_byte(entry_of(i)->data_offset + sizes[i] + 5);
	flip_byte(test.file_bytes - 5);
	get(0, test.file_bytes);
	close_reader();
}

TEST(tests, unverified_is_unverified)
{
	make_file(INDEXED);
	flip_byte(entry_of(LARGE)->data_offset);
	ck_assert_int_eq(format_reader_read_file(&test.reader, test.queue, test.stream, 0,
						 test.into, test.file_bytes, false, NULL, NULL,
						 &test.error),
			 0);
	ck_assert_mem_eq(test.into, test.file, test.file_bytes);
	close_reader();
}

static int count_progress(void *user, enum ioshape_phase phase, uint64_t done, uint64_t total)
{
	uint64_t *last = user;

	ck_assert_int_eq(phase, IOSHAPE_PHASE_READ);
	ck_assert_uint_ge(done, *last);
	ck_assert_uint_le(done, total);
	*last = done;
	return done > 4 * MIB;
}

TEST(tests, progress_is_told_and_can_stop_it)
{
	uint64_t last = 0, bytes = 2 * MIB;

	make_file(INDEXED);
	scratch_evict(test.path);
	ck_assert_int_eq(format_reader_read_file(&test.reader, test.queue, test.stream, 0,
						 test.into, bytes, true, count_progress, &last,
						 &test.error),
			 0);
	ck_assert_uint_ge(last, bytes);
	last = 0;
	ck_assert_int_eq(format_reader_read_file(&test.reader, test.queue, test.stream, 0,
						 test.into, test.file_bytes, true, count_progress,
						 &last, &test.error),
			 -ECANCELED);
	close_reader();
}
