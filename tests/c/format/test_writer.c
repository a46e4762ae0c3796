/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The archive writer on an io_writer of the test, which fails on request and shows what was
 * written. The functions below replace the library's.
 */
#define _GNU_SOURCE
#include "format/format.h"
#include "support/check_main.h"
#include "support/random.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

/* ---- A mock of io_writer --------------------------------------------------------------------- */

struct io_writer {
	int fd; /* memory, with holes */
	uint64_t bytes;
	bool finished;
};

static unsigned long steps, failing_step; /* number of calls, and of the failing one (0: none) */
static unsigned files;                    /* not freed yet */
static struct io_writer *current;         /* the newest one */

/* Contents of large records: neither stored nor checksummed byte by byte. */
static const uint8_t zeros[MIB];

static bool step_fails(struct base_error *error)
{
	if (++steps != failing_step)
		return false;
	base_fail(error, -EIO, "the test wants it so");
	return true;
}

uint64_t io_writer_offset(const struct io_writer *file)
{
	return file->bytes;
}

int io_writer_put(struct io_writer *file, const void *data, size_t bytes, uint32_t *crc,
		  struct base_error *error)
{
	static uint32_t crc_of_zeros;

	REQUIRE(!file->finished);
	if (step_fails(error))
		return -EIO;
	if (data == zeros && bytes == sizeof(zeros)) {
		if (!crc_of_zeros)
			crc_of_zeros = base_crc32(0, zeros, sizeof(zeros));
		REQUIRE(crc != NULL);
		*crc = base_crc32_combine(*crc, crc_of_zeros, bytes);
		REQUIRE(!ftruncate(file->fd, (off_t)(file->bytes + bytes)));
	} else {
		if (crc)
			*crc = base_crc32(*crc, data, bytes);
		REQUIRE(pwrite(file->fd, data, bytes, (off_t)file->bytes) == (ssize_t)bytes);
	}
	file->bytes += bytes;
	return 0;
}

int io_writer_put_summed(struct io_writer *file, const void *data, size_t bytes, uint32_t crc32,
			 struct base_error *error)
{
	(void)crc32;
	return io_writer_put(file, data, bytes, NULL, error);
}

int io_writer_finish(struct io_writer *file, struct base_error *error)
{
	if (step_fails(error))
		return -EIO;
	file->finished = true;
	return 0;
}

void io_writer_free(struct io_writer *file)
{
	close(file->fd);
	free(file);
	files--;
}

static struct io_writer *new_file(void)
{
	struct io_writer *file = calloc(1, sizeof(*file));

	file->fd = memfd_create("container", MFD_CLOEXEC);
	ck_assert_int_ge(file->fd, 0);
	files++;
	current = file;
	steps = failing_step = 0;
	return file;
}

static int fetch(void *user, uint64_t offset, void *into, size_t bytes)
{
	const struct io_writer *file = user;

	return pread(file->fd, into, bytes, (off_t)offset) == (ssize_t)bytes ? 0 : -EIO;
}

static uint8_t *content_of(const struct io_writer *file)
{
	uint8_t *content = malloc(file->bytes + 1);

	REQUIRE(pread(file->fd, content, file->bytes, 0) == (ssize_t)file->bytes);
	return content;
}

/* ---- Writing and reading back ---------------------------------------------------------------- */

static struct format_writer *new_writer(void)
{
	struct format_writer *writer;

	ck_assert_int_eq(format_writer_new(&writer, format_sink_of_file(new_file()),
					   "/checkpoints/last.pt", NULL),
			 0);
	return writer;
}

static void free_writer(struct format_writer *writer)
{
	format_writer_free(writer);
	io_writer_free(current);
}

static int write_record(struct format_writer *writer, const char *name, const void *data,
			size_t bytes, struct base_error *error)
{
	int ret;

	ret = format_writer_begin(writer, name, bytes, 0, error);
	if (!ret)
		ret = format_writer_put(writer, data, bytes, error);
	if (!ret)
		ret = format_writer_end(writer, error);
	return ret;
}

static void look_back(struct format_directory *directory, struct format_index *index)
{
	struct io_writer *file = current;
	struct base_error error = { 0 };
	struct format_entry *last;
	uint8_t *bytes;

	ck_assert_msg(!format_parse(directory, file->bytes, fetch, file, "test", &error), "%s",
		      error.text);
	for (uint64_t i = 0; i < directory->count; i++)
		REQUIRE(!format_locate(directory, i, fetch, file, "test", &error));

	last = &directory->entries[directory->count - 1];
	ck_assert_str_eq(last->name, FORMAT_INDEX_RECORD);
	bytes = malloc(last->bytes);
	ck_assert_int_eq(fetch(file, last->data_offset, bytes, last->bytes), 0);
	ck_assert_uint_eq(base_crc32(0, bytes, last->bytes), last->crc32);
	ck_assert_msg(!format_index_decode(index, bytes, last->bytes, directory->entries,
					   directory->count - 1, &error),
		      "%s", error.text);
	free(bytes);
}

static void expect_checks(const struct format_index *index, uint64_t first, const uint8_t *data,
			  size_t bytes)
{
	for (size_t done = 0; done < bytes; done += FORMAT_CHECK_BYTES, first++)
		ck_assert_uint_eq(
			index->checks[first],
			base_crc32(0, data + done, MIN(bytes - done, FORMAT_CHECK_BYTES)));
}

/* ---- Contents of the file -------------------------------------------------------------------- */

static const size_t sizes[] = {
	200,       0,       1,   63,      65536,   256 * KIB - 1,
	256 * KIB, MIB - 1, MIB, MIB + 1, 3 * MIB, 5 * MIB + 77,
};

/* Writes pieces of random size, some of them empty. */
static void write_in_pieces(struct format_writer *writer, const char *name, const uint8_t *data,
			    size_t bytes, bool known, uint64_t *seed)
{
	size_t piece;

	ck_assert_int_eq(
		format_writer_begin(writer, name, known ? bytes : FORMAT_UNKNOWN_BYTES, 0, NULL),
		0);
	for (size_t done = 0; done < bytes; done += piece) {
		piece = test_random_below(seed, (size_t)1 << test_random_below(seed, 23));
		piece = MIN(piece, bytes - done);
		REQUIRE(!format_writer_put(writer, data + done, piece, NULL));
	}
	ck_assert_int_eq(format_writer_end(writer, NULL), 0);
}

static void expect_records(const uint8_t *data)
{
	struct format_directory directory;
	struct format_index index;
	uint8_t *content = content_of(current);
	uint64_t check = 0;

	look_back(&directory, &index);
	ck_assert_uint_eq(directory.count, ARRAY_LENGTH(sizes) + 1);
	for (size_t i = 0; i < ARRAY_LENGTH(sizes); i++) {
		const struct format_entry *entry = &directory.entries[i];

		ck_assert_uint_eq(entry->bytes, sizes[i]);
		ck_assert_mem_eq(content + entry->data_offset, data, sizes[i]);
		ck_assert_uint_eq(entry->crc32, base_crc32(0, data, sizes[i]));
		ck_assert_uint_eq(index.data_offsets[i], entry->data_offset);
		expect_checks(&index, check, data, sizes[i]);
		check += (sizes[i] + MIB - 1) / MIB;
	}
	ck_assert_uint_eq(index.check_count, check);
	ck_assert(!current->finished);
	format_index_free(&index);
	format_directory_free(&directory);
	free(content);
}

static struct test_case written_case = { .name = "written" };

LOOP_TEST(written_case, records_come_back_whatever_pieces_they_came_in, 0, 4)
{
	uint8_t *data = malloc(8 * MIB);
	uint64_t seed = 10 + (uint64_t)_i;
	bool known = _i % 2;
	char name[32];

	test_random_fill(&seed, data, 8 * MIB);
	for (int round = 0; round < 3; round++) {
		struct format_writer *writer = new_writer();

		for (size_t i = 0; i < ARRAY_LENGTH(sizes); i++) {
			snprintf(name, sizeof(name), "data/%zu", i);
			write_in_pieces(writer, name, data, sizes[i], known, &seed);
		}
		ck_assert_int_eq(format_writer_finish(writer, NULL, NULL), 0);
		expect_records(data);
		free_writer(writer);
	}
	ck_assert_uint_eq(files, 0);
	free(data);
}

TEST(written_case, data_begins_where_it_was_asked_to)
{
	struct format_writer *writer = new_writer();
	struct format_directory directory;
	struct format_index index;
	uint32_t alignment = 1;
	char name[32];

	for (int i = 0; i < 13; i++, alignment *= 2) {
		snprintf(name, sizeof(name), "%d", i);
		ck_assert_int_eq(format_writer_begin(writer, name, 3, alignment, NULL), 0);
		ck_assert_int_eq(format_writer_put(writer, "abc", 3, NULL), 0);
		ck_assert_int_eq(format_writer_end(writer, NULL), 0);
	}
	ck_assert_int_eq(write_record(writer, "small", zeros, 256 * KIB - 1, NULL), 0);
	ck_assert_int_eq(write_record(writer, "large", zeros, 256 * KIB, NULL), 0);
	ck_assert_int_eq(format_writer_finish(writer, NULL, NULL), 0);
	look_back(&directory, &index);
	for (uint32_t i = 0; i < 13; i++)
		ck_assert_uint_eq(index.data_offsets[i] % (UINT64_C(1) << i), 0);
	ck_assert_uint_eq(index.data_offsets[13] % 64, 0);
	ck_assert_uint_eq(index.data_offsets[14] % 4096, 0);
	format_index_free(&index);
	format_directory_free(&directory);
	free_writer(writer);
}

TEST(written_case, table_and_metadata_are_in_the_index)
{
	const int64_t shape[] = { 2, 5 }, strides[] = { 5, 1 };
	const struct format_tensor_row row = { "w", IOSHAPE_UINT8, 2, shape, strides, 1 };
	const struct format_index given = {
		.has_table = true,
		.tensor_count = 1,
		.tensors = &row,
		.metadata = { .step = 42 },
	};
	struct format_writer *writer = new_writer();
	struct format_directory directory;
	struct format_index index;

	ck_assert_int_eq(write_record(writer, "data.pkl", "pickle", 6, NULL), 0);
	ck_assert_int_eq(write_record(writer, "data/0", "0123456789", 10, NULL), 0);
	ck_assert_int_eq(format_writer_finish(writer, &given, NULL), 0);
	look_back(&directory, &index);
	ck_assert(index.has_table);
	ck_assert_str_eq(index.tensors[0].name, "w");
	ck_assert_int_eq(index.metadata.step, 42);
	format_index_free(&index);
	format_directory_free(&directory);
	free_writer(writer);
}

/* Sizes and offsets that need zip64 fields, known or not, followed by a small record. */
TEST(written_case, records_may_pass_four_gigabytes)
{
	const uint64_t count = 4 * KIB + 1;
	uint32_t crc = 0, block = base_crc32(0, zeros, sizeof(zeros));

	for (uint64_t i = 0; i < count; i++)
		crc = base_crc32_combine(crc, block, sizeof(zeros));

	for (int known = 0; known < 2; known++) {
		struct format_writer *writer = new_writer();
		struct format_directory directory;
		struct format_index index;

		ck_assert_int_eq(format_writer_begin(writer, "data/0",
						     known ? count * MIB : FORMAT_UNKNOWN_BYTES, 0,
						     NULL),
				 0);
		for (uint64_t i = 0; i < count; i++)
			REQUIRE(!format_writer_put(writer, zeros, sizeof(zeros), NULL));
		ck_assert_int_eq(format_writer_end(writer, NULL), 0);
		ck_assert_int_eq(write_record(writer, "data/1", "behind", 6, NULL), 0);
		ck_assert_int_eq(format_writer_finish(writer, NULL, NULL), 0);
		look_back(&directory, &index);
		ck_assert_uint_eq(directory.entries[0].bytes, count * MIB);
		ck_assert_uint_eq(index.check_count, count + 1);
		ck_assert_uint_gt(directory.entries[1].header_offset, count * MIB);
		ck_assert_uint_eq(directory.entries[0].crc32, crc);
		format_index_free(&index);
		format_directory_free(&directory);
		free_writer(writer);
	}
}

/* ---- Failures -------------------------------------------------------------------------------- */

static int write_some(struct format_writer *writer, struct base_error *error)
{
	int ret = 0;
	char name[32];

	for (int i = 0; !ret && i < 70; i++) {
		snprintf(name, sizeof(name), "data/%d", i);
		ret = write_record(writer, name, zeros + 1, i ? 10 : MIB - 1, error);
	}
	if (!ret)
		ret = format_writer_finish(writer, NULL, error);
	return ret;
}

static struct test_case failures = { .name = "failures" };

TEST(failures, a_record_of_another_length_is_no_record)
{
	for (size_t bytes = 1; bytes <= 5; bytes++) {
		struct format_writer *writer = new_writer();
		const int code = bytes == 3 ? 0 : -EIO;

		ck_assert_int_eq(format_writer_begin(writer, "data/0", 3, 0, NULL), 0);
		ck_assert_int_eq(format_writer_put(writer, "abcde", bytes, NULL), 0);
		ck_assert_int_eq(format_writer_end(writer, NULL), code);
		ck_assert_int_eq(format_writer_finish(writer, NULL, NULL), code);
		free_writer(writer);
	}
	format_writer_free(NULL);
	ck_assert_uint_eq(files, 0);
}

/* Each step fails in turn: the failure is reported, and the file is not touched again. */
TEST(failures, after_a_failed_write_nothing_more_is_written)
{
	unsigned long nth;
	int ret = -EIO;

	for (nth = 1; ret; nth++) {
		struct format_writer *writer = new_writer();
		struct base_error error = { 0 };
		unsigned long before;

		failing_step = nth;
		ret = write_some(writer, &error);
		before = steps;
		if (ret) {
			REQUIRE(ret == -EIO && error.code == -EIO);
			REQUIRE(format_writer_begin(writer, "more", 1, 0, NULL) == -EIO);
			REQUIRE(format_writer_put(writer, "m", 1, NULL) == -EIO);
			REQUIRE(format_writer_end(writer, NULL) == -EIO);
			REQUIRE(format_writer_finish(writer, NULL, NULL) == -EIO);
		}
		REQUIRE(steps == before);
		free_writer(writer);
		REQUIRE(files == 0);
	}
	ck_assert_uint_gt(nth, 3 * 70 + 3);
}
