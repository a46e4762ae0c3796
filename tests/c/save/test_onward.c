/* SPDX-License-Identifier: Apache-2.0 */
/* Reads a file call by call, like a program that takes it for a plain file. */
#define _GNU_SOURCE
#include "internal.h"
#include "support/check_main.h"
#include "support/random.h"
#include "support/reader_info.h"
#include "support/sample.h"
#include "support/scratch.h"

#include <errno.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define LARGE_BYTES (20u << 20)

static struct ioshape_context *context;
static struct ioshape_reader *reader;
static struct sample sample;
static uint8_t *file, *into;
static size_t file_bytes;
static unsigned descriptors_before;

static void setup(void)
{
	scratch_setup();
	sample_make(&sample, 3, LARGE_BYTES);
	context = sample_context(IOSHAPE_ENGINE_AUTO, IOSHAPE_DIRECT_PREFER);
	ck_assert_int_eq(sample_save(context, scratch_path("file"), &sample, NULL), 0);
	file = scratch_read(scratch_path("file"), &file_bytes);
	into = malloc(file_bytes + 1);
	scratch_evict(scratch_path("file"));
	descriptors_before = scratch_descriptors();
	ck_assert_int_eq(ioshape_reader_open(context, scratch_path("file"), NULL, &reader), 0);
}

static void teardown(void)
{
	ioshape_reader_free(reader);
	ioshape_context_free(context);
	ck_assert_uint_le(scratch_descriptors(), descriptors_before);
	sample_free(&sample);
	free(file);
	free(into);
	scratch_teardown();
}

static void get(uint64_t offset, size_t bytes)
{
	memset(into, 0x99, bytes + 1);
	ck_assert_int_eq(save_reader_read_file(reader, offset, into, bytes), 0);
	if (memcmp(into, file + offset, bytes) != 0 || into[bytes] != 0x99)
		ck_abort_msg("%zu bytes at %llu differ", bytes, (unsigned long long)offset);
}

static struct ioshape_record_info info_of(uint64_t record)
{
	struct ioshape_record_info info = { .size = sizeof(info) };

	ck_assert_int_eq(ioshape_reader_get_record(reader, record, &info), 0);
	return info;
}

static struct test_case tests = { .name = "onward", .setup = setup, .teardown = teardown };

/* The end first, then record by record, each header by itself. */
TEST(tests, as_torch_reads_a_file)
{
	uint64_t at = 0;

	ck_assert_uint_eq(info_of_reader(reader).file_bytes, file_bytes);
	for (size_t back = 22; back < 300; back += 22)
		get(file_bytes - back, 22);
	for (uint64_t i = 0; i < info_of_reader(reader).records; i++) {
		struct ioshape_record_info info = info_of(i);

		get(at, 30);
		get(info.file_offset, info.bytes);
		at = info.file_offset + info.bytes;
	}
}

/* Local headers have no checksum, but their lengths determine where torch finds the data. */
TEST(tests, a_header_that_leads_elsewhere_is_damage)
{
	static const unsigned fields[] = { 0, 3, 26, 27, 28, 29 };
	uint64_t at = 0;

	for (uint64_t i = 0; i < info_of_reader(reader).records; i++) {
		struct ioshape_record_info info = info_of(i);
		uint8_t *header = memmem(file + at, info.file_offset - at, "PK\3\4", 4);

		ck_assert_ptr_nonnull(header);
		for (size_t f = 0; f < sizeof(fields) / sizeof(fields[0]); f++) {
			uint64_t place = (uint64_t)(header - file);

			header[fields[f]] ^= 1;
			scratch_write(scratch_path("file"), file, file_bytes);
			ck_assert_int_eq(save_reader_read_file(reader, place, into, 30),
					 IOSHAPE_E_DAMAGED);
			ck_assert_ptr_nonnull(strstr(ioshape_last_error()->record, info.name));
			if (i == 2 && !f)
				ck_assert_int_eq(ioshape_reader_verify(reader, 1),
						 IOSHAPE_E_DAMAGED);
			header[fields[f]] ^= 1;
		}
		at = info.file_offset + info.bytes;
	}
	scratch_write(scratch_path("file"), file, file_bytes);
	get(0, file_bytes);
	ck_assert_int_eq(ioshape_reader_verify(reader, 1), 0);
	/* Readers recognize a zip file by its first bytes. */
	ioshape_reader_free(reader);
	file[0] ^= 1;
	scratch_write(scratch_path("file"), file, file_bytes);
	ck_assert_int_eq(ioshape_reader_open(context, scratch_path("file"), NULL, &reader),
			 IOSHAPE_E_DAMAGED);
}

TEST(tests, records_one_after_another)
{
	for (uint64_t i = 0; i < info_of_reader(reader).records; i++) {
		struct ioshape_record_info info = info_of(i);

		for (uint64_t at = 0; at < info.bytes; at += 700001) {
			size_t bytes = info.bytes - at < 700001 ? info.bytes - at : 700001;

			ck_assert_int_eq(ioshape_reader_read(reader, i, at, into, bytes), 0);
			ck_assert_mem_eq(into, file + info.file_offset + at, bytes);
		}
	}
}

TEST(tests, other_calls_may_come_between)
{
	char why[512];

	for (int i = 0; i < 3; i++) {
		scratch_evict(scratch_path("file"));
		for (uint64_t at = 0; at + 3000000 < file_bytes; at += 3000000) {
			get(at, 1000000);
			switch ((at / 3000000) % 4) {
			case 0:
				ck_assert_int_eq(ioshape_reader_verify(reader, 1), 0);
				break;
			case 1:
				ck_assert_int_eq(sample_check(context, scratch_path("file"),
							      &sample, why, sizeof(why)),
						 0);
				break;
			case 2:
				ck_assert_int_eq(save_reserve(context, 0), 0);
				break;
			}
			get(at + 1000000, 2000000);
		}
	}
}

TEST(tests, what_lies_outside_is_refused)
{
	static const struct {
		uint64_t behind, bytes;
	} ranges[] = { { 0, 1 }, { 1, 0 }, { 0, UINT64_MAX }, { UINT64_MAX >> 1, 1 } };

	get(file_bytes, 0);
	ck_assert_int_eq(save_reader_read_file(reader, 7, NULL, 0), 0);
	for (size_t i = 0; i < sizeof(ranges) / sizeof(ranges[0]); i++) {
		ck_assert_int_eq(save_reader_read_file(reader, file_bytes + ranges[i].behind, into,
						       ranges[i].bytes),
				 -ERANGE);
		ck_assert_str_eq(ioshape_last_error()->path, scratch_path("file"));
	}
	ck_assert_int_eq(save_reader_read_file(reader, file_bytes - 1, into, 2), -ERANGE);
	ck_assert_int_eq(save_reader_read_file(reader, UINT64_MAX, into, 2), -ERANGE);
	ck_assert_int_eq(save_reader_read_file(reader, 0, NULL, 1), -EINVAL);
	/* The next call works normally. */
	get(0, 1000);
}

TEST(tests, a_file_that_shrinks_underneath_is_damaged)
{
	uint64_t at = 0;
	int ret = 0;

	get(0, 3000000);
	ck_assert_int_eq(truncate(scratch_path("file"), 9000000), 0);
	for (at = 3000000; !ret && at + 100000 < file_bytes; at += 100000)
		ret = save_reader_read_file(reader, at, into, 100000);
	ck_assert_int_eq(ret, IOSHAPE_E_DAMAGED);
	get(0, 3000000);
}

static int read_in_child(void *unused)
{
	int ret = save_reader_read_file(reader, 3000000, into, 100);

	(void)unused;
	ioshape_reader_free(reader);
	ioshape_context_free(context);
	scratch_leave_child(ret == -EPERM ? 0 : 1);
}

TEST(tests, a_child_touches_nothing_of_what_is_under_way)
{
	get(0, 3000000);
	ck_assert_int_eq(scratch_in_child(read_in_child, NULL), 0);
	for (uint64_t at = 3000000; at + 1000000 < file_bytes; at += 1000000)
		get(at, 1000000);
}

static void *read_a_part(void *argument)
{
	uint64_t at = *(const uint64_t *)argument;

	get(at, 1000000);
	return NULL;
}

/* One thread at a time uses the reader. Requests of a thread outlive it. */
TEST(tests, a_reader_may_be_handed_from_thread_to_thread)
{
	pthread_t thread;

	for (uint64_t at = 0; at + 1000000 < file_bytes; at += 1000000) {
		ck_assert_int_eq(pthread_create(&thread, NULL, read_a_part, &at), 0);
		pthread_join(thread, NULL);
	}
}

TEST(tests, it_can_be_freed_anywhere)
{
	for (size_t bytes = 1000; bytes < file_bytes; bytes += 1700000) {
		get(0, bytes);
		get(bytes, 30);
		ioshape_reader_free(reader);
		reader = NULL;
		scratch_evict(scratch_path("file"));
		ck_assert_int_eq(ioshape_reader_open(context, scratch_path("file"), NULL, &reader),
				 0);
	}
}

TEST(tests, readers_side_by_side)
{
	enum { READERS = 10 }; /* more than the queues that a context keeps */
	struct ioshape_reader *readers[READERS];

	for (int i = 0; i < READERS; i++)
		ck_assert_int_eq(
			ioshape_reader_open(context, scratch_path("file"), NULL, &readers[i]), 0);
	for (uint64_t at = 0; at + 2000000 < file_bytes; at += 2000000) {
		for (int i = 0; i < READERS; i++) {
			ck_assert_int_eq(save_reader_read_file(readers[i], at, into, 2000000), 0);
			ck_assert_mem_eq(into, file + at, 2000000);
		}
	}
	for (int i = 0; i < READERS; i++)
		ioshape_reader_free(readers[i]);
}
