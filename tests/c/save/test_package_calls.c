/* SPDX-License-Identifier: Apache-2.0 */
/* Calls of internal.h that only the Python package makes. */
#define _GNU_SOURCE
#include "internal.h"
#include "support/check_main.h"
#include "support/gate.h"
#include "support/random.h"
#include "support/reader_info.h"
#include "support/sample.h"
#include "support/scratch.h"

#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#define MIB ((size_t)1 << 20)
#define CHUNK_BYTES (16 * MIB)
#define DATA_BYTES (5 * MIB)
#define LARGE 4 /* index of the large tensor */

static struct ioshape_context *context;
static struct ioshape_reader *reader;
static struct sample sample;
static uint8_t *data, *into;

static void setup(void)
{
	uint64_t state = 5;

	scratch_setup();
	sample_make(&sample, 3, DATA_BYTES);
	data = malloc(DATA_BYTES);
	into = malloc(sample.total_bytes);
	ck_assert(data && into);
	test_random_fill(&state, data, DATA_BYTES);
	context = sample_context(IOSHAPE_ENGINE_AUTO, IOSHAPE_DIRECT_PREFER);
}

static void teardown(void)
{
	ioshape_context_free(context);
	sample_free(&sample);
	free(data);
	free(into);
	scratch_teardown();
}

static struct test_case tests = { .name = "package_calls", .setup = setup, .teardown = teardown };

/* ---- Memory ---------------------------------------------------------------------------------- */

static size_t mapped_bytes(void)
{
	FILE *file = fopen("/proc/self/statm", "re");
	size_t pages;

	ck_assert_ptr_nonnull(file);
	ck_assert_int_eq(fscanf(file, "%zu", &pages), 1);
	fclose(file);
	return pages * (size_t)sysconf(_SC_PAGESIZE);
}

TEST(tests, what_a_save_holds_counts_as_reserved)
{
	struct gate gate;
	struct ioshape_save_options options = gate_options(&gate, IOSHAPE_PHASE_SYNC, 0);
	const struct ioshape_record record = { .name = "one",
					       .data = calloc(1, 2 * CHUNK_BYTES),
					       .bytes = 2 * CHUNK_BYTES };
	struct ioshape_save *save;
	size_t before;

	ck_assert_ptr_nonnull(record.data);
	ck_assert_int_eq(
		ioshape_save_records(context, scratch_path("a.pt"), &record, 1, &options, &save),
		0);
	/* By now the save has mapped its memory for I/O. */
	sem_wait(&gate.reached);
	before = mapped_bytes();
	/* sample_context() allows four chunks. */
	ck_assert_int_eq(save_reserve(context, 4 * CHUNK_BYTES), 0);
	/* Two chunks are new; the other two are held by the save or were returned by it. */
	ck_assert_uint_ge(mapped_bytes() - before, 2 * CHUNK_BYTES);
	ck_assert_uint_lt(mapped_bytes() - before, 3 * CHUNK_BYTES);
	ck_assert_int_eq(save_reserve(context, 4 * CHUNK_BYTES + 1), -ENOMEM);
	sem_post(&gate.opened);
	ck_assert_int_eq(ioshape_save_wait(save, -1), 0);
	ioshape_save_free(save);
	free((void *)(uintptr_t)record.data);
}

/* ---- Readers --------------------------------------------------------------------------------- */

static const enum ioshape_engine engines[] = { IOSHAPE_ENGINE_URING, IOSHAPE_ENGINE_THREADS,
					       IOSHAPE_ENGINE_BUFFERED };

/*
 * After a prefetch the program loads the whole record, a part, or something else. The cache is
 * cold, so that prefetching can begin.
 */
LOOP_TEST(tests, what_is_expected_comes_as_if_it_had_not_been, 0, 3)
{
	struct ioshape_context *other = sample_context(engines[_i], IOSHAPE_DIRECT_PREFER);
	struct ioshape_load_request request = { .into = into };
	struct ioshape_tensor_info tensor = { .size = sizeof(tensor) };
	struct ioshape_reader_info info = { .size = sizeof(info) };

	ck_assert_int_eq(sample_save(context, scratch_path("file"), &sample, NULL), 0);
	ck_assert_int_eq(save_reader_prefetch(NULL, 0), -EINVAL);
	ck_assert_int_eq(ioshape_reader_open(other, scratch_path("file"), NULL, &reader), 0);
	ck_assert_int_eq(ioshape_reader_get_info(reader, &info), 0);
	ck_assert_int_eq(save_reader_prefetch(reader, info.records), -ENOENT);
	for (size_t i = 0; i < sample.count; i++) {
		scratch_evict(scratch_path("file"));
		ck_assert_int_eq(ioshape_reader_get_tensor(reader, LARGE, &tensor), 0);
		ck_assert_int_eq(save_reader_prefetch(reader, 0), 0);
		ck_assert_int_eq(save_reader_prefetch(reader, tensor.record), 0);
		request.tensor = i;
		request.bytes = sample.bytes[i];
		memset(into, 0x99, sample.total_bytes);
		ck_assert_int_eq(ioshape_reader_load(reader, &request, 1), 0);
		ck_assert_mem_eq(into, sample.expected[i], sample.bytes[i]);
		if (i % 2)
			continue;
		/* Another record is loaded first. */
		ck_assert_int_eq(save_reader_prefetch(reader, tensor.record), 0);
		ck_assert_int_eq(ioshape_reader_read(reader, tensor.record, 100, into, 200), 0);
		ck_assert_mem_eq(into, (uint8_t *)sample.expected[LARGE] + 100, 200);
		ck_assert_int_eq(ioshape_reader_verify(reader, 1), 0);
	}
	/* A reader may be closed while a prefetch is in flight. */
	scratch_evict(scratch_path("file"));
	ck_assert_int_eq(save_reader_prefetch(reader, 0), 0);
	ioshape_reader_free(reader);
	ioshape_context_free(other);
}

/* ---- Archives inside files ------------------------------------------------------------------- */

static struct ioshape_file *open_file(const char *path, const struct ioshape_file_options *options)
{
	struct ioshape_file *file;

	ck_assert_msg(!ioshape_file_open(context, path, options, &file), "%s",
		      ioshape_last_error()->sentence);
	return file;
}

static void must_write(struct ioshape_file *file, const void *from, size_t bytes)
{
	ck_assert_msg(!ioshape_file_write(file, from, bytes), "%s", ioshape_last_error()->sentence);
}

static void must_verify(const char *path)
{
	struct ioshape_reader_options options = IOSHAPE_READER_OPTIONS_INIT;

	options.any_format = 1;
	ck_assert_int_eq(ioshape_reader_open(context, path, &options, &reader), 0);
	ck_assert_int_eq(ioshape_reader_verify(reader, 1), 0);
	ioshape_reader_free(reader);
}

static int fetch_data(void *user, uint64_t offset, void *to, size_t count)
{
	(void)user;
	memcpy(to, data + offset, count);
	return 0;
}

/* With other bytes before and after it, and with and without checksums of the file. */
LOOP_TEST(tests, an_archive_is_a_part_of_a_file, 0, 2)
{
	const struct ioshape_record records[] = {
		{ .name = "data.pkl", .data = "pickle", .bytes = 6 },
		{ .name = "data/0", .data = data, .bytes = 2 * MIB + 5 },
		{ .name = "data/1", .bytes = MIB + 7, .fetch = fetch_data },
		{ .name = "version", .data = "3\n", .bytes = 2 },
	};
	struct ioshape_reader_options part = IOSHAPE_READER_OPTIONS_INIT;
	struct ioshape_file_options options = IOSHAPE_FILE_OPTIONS_INIT;
	struct ioshape_record_info info = IOSHAPE_RECORD_INFO_INIT;
	const char *path = scratch_path("file");
	char *back = malloc(2 * MIB + 5);
	struct ioshape_file *file;
	uint64_t bytes, record;

	options.checksums = _i ? IOSHAPE_CHECKSUMS_BESIDE : IOSHAPE_CHECKSUMS_NONE;
	file = open_file(path, &options);
	must_write(file, data, 12345);
	ck_assert_int_eq(save_file_write_records(file, "w", NULL, 1, &bytes), -EINVAL);
	ck_assert_int_eq(save_file_write_records(file, "w", records, 4, &bytes), 0);
	ck_assert_uint_gt(bytes, 3 * MIB + 20);
	must_write(file, data, 54321);
	ck_assert_int_eq(ioshape_file_commit(file, NULL), 0);
	ioshape_file_free(file);
	if (_i)
		must_verify(path);
	part.file_offset = 12345;
	part.file_bytes = bytes;
	ck_assert_int_eq(ioshape_reader_open(context, path, &part, &reader), 0);
	ck_assert_int_eq(ioshape_reader_verify(reader, 1), 0);
	ck_assert_int_eq(ioshape_reader_find_record(reader, "data/0", &record), 0);
	ck_assert_int_eq(ioshape_reader_read(reader, record, 1, back, 2 * MIB), 0);
	ck_assert_mem_eq(back, data + 1, 2 * MIB);
	ck_assert_int_eq(ioshape_reader_get_record(reader, record + 1, &info), 0);
	ck_assert_uint_eq(info.bytes, MIB + 7);
	ck_assert_int_eq(ioshape_reader_read(reader, record + 1, 0, back, MIB + 7), 0);
	ck_assert_mem_eq(back, data, MIB + 7);
	ioshape_reader_free(reader);
	free(back);
}

/* Saves 40 tensors in two files, half of them of the second group, and returns the result of
 * judging all of them. */
static struct save_verdict save_items(const char *name, const float first[2], const float second[2])
{
	struct ioshape_record records[] = {
		{ .name = "data.pkl", .data = "pickle", .bytes = 6 },
		{ .name = "data/0", .bytes = 8, .dtype = IOSHAPE_FLOAT32 },
	};
	struct save_verdict verdict;
	struct save_items *items;
	char path[64], item[16];

	ck_assert_int_eq(save_items_make(context, scratch_path(name), &items), 0);
	for (uint8_t number = 0; number < 2; number++) {
		struct ioshape_file *file;

		snprintf(path, sizeof(path), "%s-%d", name, number);
		file = open_file(scratch_path(path), NULL);
		records[1].data = number ? second : first;
		records[1].group = number + 1;
		/* This one is not examined yet. */
		ck_assert_int_eq(save_file_write_records(file, NULL, records, 2, NULL), 0);
		ck_assert_int_eq(save_file_examine(file, items), 0);
		for (int i = 0; i < 20; i++) {
			snprintf(item, sizeof(item), "%d", 20 * number + i);
			ck_assert_int_eq(save_file_write_records(file, item, records, 2, NULL), 0);
		}
		ck_assert_int_eq(ioshape_file_commit(file, NULL), 0);
		ioshape_file_free(file);
	}
	ck_assert_int_eq(save_items_judge(items, &verdict), 0);
	if (verdict.alarms) {
		uint64_t next = 0, count = 0;
		uint32_t alarms;

		while (save_items_alarm(items, &next, &alarms))
			count += alarms == IOSHAPE_ALARM_NONFINITE;
		ck_assert_uint_eq(count, 20);
	}
	save_items_free(items);
	return verdict;
}

TEST(tests, archives_in_several_files_are_judged_together)
{
	struct save_verdict verdict = save_items("step-1", (float[]){ 1, 2 }, (float[]){ 3, 4 });

	ck_assert_uint_eq(verdict.alarms, 0);
	verdict = save_items("step-2", (float[]){ 1, 2 }, (float[]){ 3, NAN });
	ck_assert_uint_eq(verdict.alarms, IOSHAPE_ALARM_NONFINITE);
	ck_assert_ptr_nonnull(strstr(verdict.alarm, "has 1 NaN"));
	ck_assert_ptr_nonnull(strstr(verdict.alarm, "(and 19 more tensors)"));
	verdict = save_items("step-3", (float[]){ 1, 2 }, (float[]){ 3, 5 });
	ck_assert_uint_eq(verdict.alarms, 0);
}

static int fetch_some(void *user, uint64_t offset, void *to, size_t count)
{
	return offset + count == MIB + 7 ? -EIO : fetch_data(user, offset, to, count);
}

TEST(tests, half_an_archive_is_not_committed)
{
	const struct ioshape_record records[] = {
		{ .name = "data.pkl", .data = "pickle", .bytes = 6 },
		{ .name = "data/0", .bytes = MIB + 7, .fetch = fetch_some },
	};
	const char *path = scratch_path("file");
	struct ioshape_file *file = open_file(path, NULL);
	uint64_t bytes = 1;

	ck_assert_int_eq(save_file_write_records(file, "w", records, 2, &bytes), -EIO);
	ck_assert_uint_eq(bytes, 0);
	ck_assert_int_eq(ioshape_file_write(file, data, 1), -EIO);
	ck_assert_int_eq(ioshape_file_commit(file, NULL), -EIO);
	ioshape_file_free(file);
	ck_assert_int_eq(access(path, F_OK), -1);
}
