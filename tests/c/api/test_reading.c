/* SPDX-License-Identifier: Apache-2.0 */
/* Loads of whole files and of parts, in any order; damage is found and named. */
#define _GNU_SOURCE
#include "support/check_main.h"
#include "support/random.h"
#include "support/reader_info.h"
#include "support/sample.h"
#include "support/scratch.h"
#include "support/write_record.h"

#include <errno.h>
#include <fcntl.h>
#include <stdbool.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#define LARGE 4 /* index of the large tensor */
#define LARGE_BYTES (5u << 20)
#define COUNT(array) (sizeof(array) / sizeof((array)[0]))

static struct ioshape_context *context;
static struct ioshape_reader *reader;
static struct sample sample;
static uint8_t *into;

static void setup(void)
{
	scratch_setup();
	sample_make(&sample, 3, LARGE_BYTES);
	into = malloc(sample.total_bytes);
	context = sample_context(IOSHAPE_ENGINE_AUTO, IOSHAPE_DIRECT_PREFER);
	ck_assert_int_eq(sample_save(context, scratch_path("file"), &sample, NULL), 0);
	ck_assert_int_eq(ioshape_reader_open(context, scratch_path("file"), NULL, &reader), 0);
}

static void teardown(void)
{
	ioshape_reader_free(reader);
	ioshape_context_free(context);
	sample_free(&sample);
	free(into);
	scratch_teardown();
}

static const enum ioshape_engine engines[] = { IOSHAPE_ENGINE_URING, IOSHAPE_ENGINE_THREADS,
					       IOSHAPE_ENGINE_BUFFERED };

static struct test_case reading_tests = { .name = "reading", .setup = setup, .teardown = teardown };

LOOP_TEST(reading_tests, what_was_saved_is_loaded_through_every_engine_warm_and_cold, 0, 6)
{
	struct ioshape_context *other = sample_context(engines[_i / 2], IOSHAPE_DIRECT_PREFER);
	char why[512];
	int ret;

	if (_i % 2)
		scratch_evict(scratch_path("file"));
	ret = sample_check(other, scratch_path("file"), &sample, why, sizeof(why));
	ck_assert_msg(!ret, "%s", why);
	ioshape_context_free(other);
}

TEST(reading_tests, strides_are_told_and_lead_through_the_bytes)
{
	for (uint64_t i = 0; i < sample.count; i++) {
		const struct ioshape_tensor *tensor = &sample.tensors[i];
		struct ioshape_tensor_info info = { .size = sizeof(info) };
		uint64_t index;
		int64_t most = 0;

		ck_assert_int_eq(ioshape_reader_find_tensor(reader, tensor->name, &index), 0);
		ck_assert_int_eq(ioshape_reader_get_tensor(reader, index, &info), 0);
		ck_assert_str_eq(info.name, tensor->name);
		ck_assert(info.dims == 0 || (info.shape && info.strides));
		for (uint32_t k = 0; k < info.dims; k++) {
			ck_assert_int_ge(info.strides[k], 0);
			most += (info.shape[k] - 1) * info.strides[k];
		}
		/* The last element ends where the bytes end. */
		if (info.bytes)
			ck_assert_uint_eq((uint64_t)(most + 1) * ioshape_dtype_bytes(info.dtype),
					  info.bytes);
	}
}

TEST(reading_tests, any_ranges_in_any_order_are_what_was_saved)
{
	struct ioshape_load_request requests[40];
	uint64_t state = 31;

	for (int round = 0; round < 30; round++) {
		uint8_t *at = into;
		size_t count = 1 + test_random_below(&state, 40);

		if (round % 2)
			scratch_evict(scratch_path("file"));
		memset(into, 0x99, sample.total_bytes);
		for (size_t i = 0; i < count; i++) {
			uint64_t tensor = test_random_below(&state, sample.count);
			uint64_t offset = test_random_below(&state, sample.bytes[tensor] + 1);
			uint64_t most = sample.bytes[tensor] - offset;

			if (most > sample.total_bytes / 40)
				most = sample.total_bytes / 40;
			requests[i] = (struct ioshape_load_request){
				.tensor = tensor,
				.offset = offset,
				.bytes = test_random_below(&state, most + 1),
				.into = at,
			};
			at += requests[i].bytes;
		}
		ck_assert_int_eq(ioshape_reader_load(reader, requests, count), 0);
		for (size_t i = 0; i < count; i++)
			ck_assert_mem_eq(requests[i].into,
					 (uint8_t *)sample.expected[requests[i].tensor] +
						 requests[i].offset,
					 requests[i].bytes);
		for (uint8_t *rest = at; rest < into + sample.total_bytes; rest += 4097)
			ck_assert_uint_eq(*rest, 0x99);
	}
}

/* Loads the first bytes of each tensor that has any, in one call. */
TEST(reading_tests, records_are_loaded_many_at_once)
{
	struct ioshape_load_request requests[COUNT(sample.tensors)];
	struct ioshape_reader_info info = { .size = sizeof(info) };
	struct ioshape_tensor_info tensor = { .size = sizeof(tensor) };
	size_t each = sample.total_bytes / sample.count;

	memset(into, 0x99, sample.total_bytes);
	for (size_t i = 0; i < sample.count; i++) {
		ck_assert_int_eq(ioshape_reader_get_tensor(reader, i, &tensor), 0);
		requests[i] = (struct ioshape_load_request){
			.tensor = tensor.record,
			.bytes = sample.bytes[i] < each ? sample.bytes[i] : each,
			.into = into + i * each,
		};
	}
	ck_assert_int_eq(ioshape_reader_load_records(reader, requests, sample.count), 0);
	for (size_t i = 0; i < sample.count; i++)
		ck_assert_mem_eq(requests[i].into, sample.expected[i], requests[i].bytes);
	ck_assert_int_eq(ioshape_reader_get_info(reader, &info), 0);
	requests[0].tensor = info.records;
	ck_assert_int_eq(ioshape_reader_load_records(reader, requests, 1), -ENOENT);
	requests[0].tensor = info.records - 1;
	requests[0].offset = UINT64_MAX;
	ck_assert_int_eq(ioshape_reader_load_records(reader, requests, 1), -ERANGE);
}

/* Returns whether huge pages were requested for this memory ("hg" in smaps). */
static bool expects_huge_pages(const void *memory)
{
	FILE *maps = fopen("/proc/self/smaps", "re");
	unsigned long begin, end;
	bool here = false, found = false;
	char line[4096];

	ck_assert_ptr_nonnull(maps);
	while (!found && fgets(line, sizeof(line), maps)) {
		if (sscanf(line, "%lx-%lx ", &begin, &end) == 2)
			here = (uintptr_t)memory >= begin && (uintptr_t)memory < end;
		else if (here && !strncmp(line, "VmFlags:", 8))
			found = strstr(line, " hg") != NULL;
	}
	fclose(maps);
	return found;
}

/* Returns whether the machine allows huge pages with madvise. */
static bool may_have_huge_pages(void)
{
	FILE *file = fopen("/sys/kernel/mm/transparent_hugepage/enabled", "re");
	char text[64] = "[never]";

	if (file) {
		ck_assert_ptr_nonnull(fgets(text, sizeof(text), file));
		fclose(file);
	}
	return !strstr(text, "[never]");
}

TEST_IF(reading_tests, fresh_memory_is_filled_in_huge_pages_if_it_is_said_to_be_fresh,
	!access("/sys/kernel/mm/transparent_hugepage", F_OK))
{
	struct ioshape_reader_options options = IOSHAPE_READER_OPTIONS_INIT;
	const size_t room = 16u << 20;

	ioshape_reader_free(reader);
	for (int said = 0; said < 2; said++) {
		uint8_t *fresh = mmap(NULL, room, PROT_READ | PROT_WRITE,
				      MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
		struct ioshape_load_request request = { LARGE, 0, LARGE_BYTES, fresh + 5000 };

		ck_assert_ptr_ne(fresh, MAP_FAILED);
		options.fresh_memory = said;
		ck_assert_int_eq(
			ioshape_reader_open(context, scratch_path("file"), &options, &reader), 0);
		ck_assert_int_eq(ioshape_reader_load(reader, &request, 1), 0);
		ck_assert_mem_eq(request.into, sample.expected[LARGE], LARGE_BYTES);
		ck_assert_int_eq(expects_huge_pages(fresh + 5000 + LARGE_BYTES / 2),
				 said && may_have_huge_pages());
		/* Huge pages must not be requested for memory outside the destination. */
		ck_assert(!expects_huge_pages(fresh));
		ck_assert(!expects_huge_pages(fresh + room - 1));
		ck_assert_int_eq(munmap(fresh, room), 0);
		ioshape_reader_free(reader);
	}
	reader = NULL;
}

TEST(reading_tests, what_lies_outside_is_refused_by_name)
{
	static const struct {
		uint64_t offset, bytes;
	} ranges[] = { { LARGE_BYTES, 1 },        { LARGE_BYTES + 1, 0 }, { 0, LARGE_BYTES + 1ull },
		       { 1, LARGE_BYTES },        { UINT64_MAX, 1 },      { 1, UINT64_MAX },
		       { UINT64_MAX, UINT64_MAX } };
	uint64_t record;

	for (size_t i = 0; i < COUNT(ranges); i++) {
		struct ioshape_load_request request = { LARGE, ranges[i].offset, ranges[i].bytes,
							into };

		ck_assert_int_eq(ioshape_reader_load(reader, &request, 1), -ERANGE);
		ck_assert_str_eq(ioshape_last_error()->record, sample.tensors[LARGE].name);
	}
	ck_assert_int_eq(ioshape_reader_find_record(reader, "data/4", &record), 0);
	ck_assert_int_eq(ioshape_reader_read(reader, record, LARGE_BYTES, into, 1), -ERANGE);
	ck_assert_str_eq(ioshape_last_error()->record, "data/4");
	ck_assert_int_eq(ioshape_reader_read(reader, record, 0, NULL, 1), -EINVAL);
	ck_assert_int_eq(ioshape_reader_read(reader, record, LARGE_BYTES, NULL, 0), 0);
	ck_assert_int_eq(
		ioshape_reader_load(reader, &(struct ioshape_load_request){ LARGE, 0, 1, NULL }, 1),
		-EINVAL);
	ck_assert_int_eq(
		ioshape_reader_load(reader, &(struct ioshape_load_request){ 99, 0, 1, into }, 1),
		-ENOENT);
}

TEST(reading_tests, what_is_not_there_is_not_found)
{
	struct ioshape_record_info record = { .size = sizeof(record) };
	struct ioshape_tensor_info tensor = { .size = sizeof(tensor) };
	uint64_t index = 77;

	ck_assert_int_eq(ioshape_reader_find_tensor(reader, "nobody", &index), -ENOENT);
	ck_assert_str_eq(ioshape_last_error()->record, "nobody");
	ck_assert_int_eq(ioshape_reader_find_tensor(reader, "", &index), -ENOENT);
	ck_assert_int_eq(ioshape_reader_find_record(reader, "archive/data.pkl", &index), -ENOENT);
	ck_assert_int_eq(ioshape_reader_get_tensor(reader, sample.count, &tensor), -ENOENT);
	ck_assert_int_eq(ioshape_reader_get_tensor(reader, UINT64_MAX, &tensor), -ENOENT);
	ck_assert_int_eq(ioshape_reader_get_record(reader, info_of_reader(reader).records, &record),
			 -ENOENT);
	ck_assert_uint_eq(index, 77);
}

TEST(reading_tests, records_are_listed_in_the_order_of_the_file)
{
	uint64_t end = 0, tensors = 0;

	ck_assert_uint_ge(info_of_reader(reader).records, sample.count + 2);
	for (uint64_t i = 0; i < info_of_reader(reader).records; i++) {
		struct ioshape_record_info info = { .size = sizeof(info) };
		uint64_t found;

		ck_assert_int_eq(ioshape_reader_get_record(reader, i, &info), 0);
		ck_assert_uint_gt(info.file_offset, end);
		end = info.file_offset + info.bytes;
		ck_assert_int_eq(ioshape_reader_find_record(reader, info.name, &found), 0);
		ck_assert_uint_eq(found, i);
		ck_assert_int_ne(info.name[0], '.'); /* the library's own records are hidden */
		tensors += !strncmp(info.name, "data/", 5);
	}
	ck_assert_uint_eq(tensors, sample.count);
}

TEST(reading_tests, files_without_a_table_have_records_only)
{
	struct ioshape_tensor_info tensor = { .size = sizeof(tensor) };
	struct ioshape_metadata metadata = IOSHAPE_METADATA_INIT;
	struct ioshape_save_options options = IOSHAPE_SAVE_OPTIONS_INIT;
	uint64_t number;

	options.metadata = &sample.metadata;
	ck_assert_int_eq(
		write_record(context, scratch_path("records"), "data.pkl", "abc", 3, &options), 0);
	ioshape_reader_free(reader);
	ck_assert_int_eq(ioshape_reader_open(context, scratch_path("records"), NULL, &reader), 0);
	ck_assert_uint_eq(info_of_reader(reader).has_table, 0);
	ck_assert_uint_eq(info_of_reader(reader).tensors, 0);
	ck_assert_int_eq(ioshape_reader_get_tensor(reader, 0, &tensor), IOSHAPE_E_NO_TABLE);
	ck_assert_int_eq(ioshape_reader_find_tensor(reader, "a", &number), IOSHAPE_E_NO_TABLE);
	ck_assert_int_eq(ioshape_reader_load(reader, NULL, 0), IOSHAPE_E_NO_TABLE);
	ck_assert_int_eq(ioshape_reader_read(reader, 0, 1, into, 2), 0);
	ck_assert_mem_eq(into, "bc", 2);
	ck_assert_int_eq(ioshape_reader_get_metadata(reader, &metadata), 0);
	ck_assert_int_eq(metadata.step, sample.metadata.step);
	ck_assert_int_eq(ioshape_reader_verify(reader, 1), 0);
}

/* ---- Damage ---------------------------------------------------------------------------------- */

/*
 * Flips a bit of a record's byte in the file; a second call restores it. Returns the offset in the
 * file.
 */
static uint64_t flip(const char *record, uint64_t offset)
{
	struct ioshape_record_info info = { .size = sizeof(info) };
	uint64_t index;
	uint8_t byte;
	int fd;

	ck_assert_int_eq(ioshape_reader_find_record(reader, record, &index), 0);
	ck_assert_int_eq(ioshape_reader_get_record(reader, index, &info), 0);
	fd = open(scratch_path("file"), O_RDWR | O_CLOEXEC);
	ck_assert_int_eq(pread(fd, &byte, 1, (off_t)(info.file_offset + offset)), 1);
	byte ^= 0x10;
	ck_assert_int_eq(pwrite(fd, &byte, 1, (off_t)(info.file_offset + offset)), 1);
	close(fd);
	return info.file_offset + offset;
}

TEST(reading_tests, damage_is_found_and_named_wherever_it_is)
{
	static const uint64_t places[] = {
		0, 77, (1 << 20) - 1, 1 << 20, 3 << 20, LARGE_BYTES - 1
	};
	struct ioshape_load_request request = { LARGE, 0, LARGE_BYTES, into };
	const struct ioshape_error *error;

	for (size_t i = 0; i < 2 * COUNT(places); i++) {
		const uint64_t place = places[i / 2], at = flip("data/4", place);

		if (i % 2)
			scratch_evict(scratch_path("file"));
		ck_assert_int_eq(ioshape_reader_load(reader, &request, 1), IOSHAPE_E_DAMAGED);
		error = ioshape_last_error();
		ck_assert_str_eq(error->path, scratch_path("file"));
		ck_assert_ptr_nonnull(strstr(error->record, "data/4"));
		/* Offset of the block that contains the damage. */
		ck_assert(error->offset <= at && at < error->offset + (1 << 20));
		ck_assert_int_eq(ioshape_reader_verify(reader, 1), IOSHAPE_E_DAMAGED);
		ck_assert_ptr_nonnull(strstr(ioshape_last_error()->record, "data/4"));
		flip("data/4", place);
	}
	ck_assert_int_eq(ioshape_reader_load(reader, &request, 1), 0);
	ck_assert_mem_eq(into, sample.expected[LARGE], LARGE_BYTES);
	ck_assert_int_eq(ioshape_reader_verify(reader, 1), 0);
}

/*
 * Changes the checksum of a record in the central directory, where it is 30 bytes before the name.
 */
static void change_checksum(const char *record)
{
	const int fd = open(scratch_path("file"), O_RDWR);
	const off_t end = lseek(fd, 0, SEEK_END);
	uint8_t *bytes = mmap(NULL, (size_t)end, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
	uint8_t *at = bytes, *name = NULL;

	ck_assert_ptr_ne(bytes, MAP_FAILED);
	while ((at = memmem(at, (size_t)(bytes + end - at), record, strlen(record)))) {
		name = at;
		at += strlen(record);
	}
	ck_assert_ptr_nonnull(name);
	name -= strlen("file/");
	name[-30] ^= 1;
	munmap(bytes, (size_t)end);
	close(fd);
}

TEST(reading_tests, an_empty_record_has_a_checksum_too)
{
	change_checksum("data/3");
	ioshape_reader_free(reader);
	ck_assert_int_eq(ioshape_reader_open(context, scratch_path("file"), NULL, &reader), 0);
	ck_assert_int_eq(ioshape_reader_verify(reader, 1), IOSHAPE_E_DAMAGED);
	ck_assert_ptr_nonnull(strstr(ioshape_last_error()->record, "data/3"));
}

TEST(reading_tests, without_data_the_structure_is_verified)
{
	flip("data/4", 1 << 20);
	ck_assert_int_eq(ioshape_reader_verify(reader, 1), IOSHAPE_E_DAMAGED);
	ck_assert_int_eq(ioshape_reader_verify(reader, 0), 0);
}

TEST(reading_tests, damage_elsewhere_does_not_keep_from_reading_the_rest)
{
	struct ioshape_load_request request = { LARGE, 2 << 20, 1 << 20, into };

	flip("data/4", 10);
	flip("data/0", 10);
	ck_assert_int_eq(ioshape_reader_load(reader, &request, 1), 0);
	ck_assert_mem_eq(into, (uint8_t *)sample.expected[LARGE] + (2 << 20), 1 << 20);
	/* A range that touches the damaged block is verified with the whole block. */
	request = (struct ioshape_load_request){ LARGE, 500000, 10, into };
	ck_assert_int_eq(ioshape_reader_load(reader, &request, 1), IOSHAPE_E_DAMAGED);
}

TEST(reading_tests, who_does_not_want_to_verify_gets_what_is_there)
{
	struct ioshape_load_request request = { LARGE, 0, LARGE_BYTES, into };
	struct ioshape_reader_options options = IOSHAPE_READER_OPTIONS_INIT;
	struct ioshape_reader *careless;

	options.verify = IOSHAPE_OFF;
	ck_assert_int_eq(ioshape_reader_open(context, scratch_path("file"), &options, &careless),
			 0);
	flip("data/4", 100);
	ck_assert_int_eq(ioshape_reader_load(careless, &request, 1), 0);
	ck_assert_uint_eq(into[100] ^ 0x10, ((uint8_t *)sample.expected[LARGE])[100]);
	/* ioshape_reader_verify() verifies in any case. */
	ck_assert_int_eq(ioshape_reader_verify(careless, 1), IOSHAPE_E_DAMAGED);
	ioshape_reader_free(careless);
}

TEST(reading_tests, a_file_cut_short_while_it_is_open_is_damaged)
{
	struct ioshape_load_request request = { LARGE, 0, LARGE_BYTES, into };

	ck_assert_int_eq(truncate(scratch_path("file"), 2 << 20), 0);
	for (int cold = 0; cold < 2; cold++) {
		if (cold)
			scratch_evict(scratch_path("file"));
		ck_assert_int_eq(ioshape_reader_load(reader, &request, 1), IOSHAPE_E_DAMAGED);
		ck_assert_str_eq(ioshape_last_error()->path, scratch_path("file"));
	}
}

TEST(reading_tests, a_reader_keeps_the_file_it_opened)
{
	struct ioshape_load_request request = { LARGE, 0, LARGE_BYTES, into };

	/* The save replaces the file; the reader keeps the old one open. */
	ck_assert_int_eq(ioshape_save_tensors(context, scratch_path("file"), NULL, 0, NULL, NULL),
			 0);
	ck_assert_int_eq(ioshape_reader_load(reader, &request, 1), 0);
	ck_assert_mem_eq(into, sample.expected[LARGE], LARGE_BYTES);
}

/* ---- Progress -------------------------------------------------------------------------------- */

struct told {
	unsigned calls, stop_at;
	uint64_t last, total;
};

static int stop_at_nth(void *user, enum ioshape_phase phase, uint64_t done, uint64_t total)
{
	struct told *told = user;

	ck_assert_int_eq(phase, IOSHAPE_PHASE_READ);
	ck_assert_uint_le(done, total);
	told->last = done;
	told->total = total;
	return ++told->calls == told->stop_at;
}

TEST(reading_tests, the_callback_can_stop_reading_at_every_call)
{
	struct ioshape_reader_options options = IOSHAPE_READER_OPTIONS_INIT;
	struct ioshape_load_request request = { LARGE, 0, LARGE_BYTES, into };
	struct told told = { 0 };

	ioshape_reader_free(reader);
	options.progress = stop_at_nth;
	options.progress_user = &told;
	ck_assert_int_eq(ioshape_reader_open(context, scratch_path("file"), &options, &reader), 0);
	for (unsigned nth = 1;; nth++) {
		int ret;

		told = (struct told){ .stop_at = nth };
		if (nth % 2)
			scratch_evict(scratch_path("file"));
		ret = ioshape_reader_load(reader, &request, 1);
		ck_assert_uint_ge(told.calls, 1);
		if (told.calls < nth) {
			ck_assert_int_eq(ret, 0);
			ck_assert_mem_eq(into, sample.expected[LARGE], LARGE_BYTES);
			break;
		}
		ck_assert_int_eq(ret, -ECANCELED);
		ck_assert_uint_eq(told.calls, nth);
		ck_assert_str_eq(ioshape_last_error()->path, scratch_path("file"));
	}
}
