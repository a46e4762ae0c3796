/* SPDX-License-Identifier: Apache-2.0 */
/* Shard files: archives as members of a larger file, and readers of one member. */
#define _GNU_SOURCE
#include "format/format.h"
#include "support/check_main.h"
#include "support/fail_memory.h"
#include "support/random.h"
#include "support/scratch.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define RANKS 3u
#define BIG (2 * MIB + 777)

static const uint64_t alignments[] = { 4096, 12288, 1 * MIB, 3 * MIB };

static struct {
	char path[4096];
	struct io_queue *queue;
	struct io_writer *file; /* of the shard file */
	struct format_writer *bundle;
	struct format_entry members[RANKS];
	uint32_t file_crc;
	uint8_t *content; /* contents of the whole file */
	size_t bytes;
	uint8_t *data[RANKS];
	struct io_downgrades downgrades;
	struct base_error error;
} test;

static void setup(void)
{
	const struct io_config config = { .block_bytes = 256 * KIB, .depth = 4, .threads = 2 };
	uint64_t seed = 3;

	scratch_setup();
	memset(&test, 0, sizeof(test));
	snprintf(test.path, sizeof(test.path), "%s", scratch_path("ranks.zip"));
	ck_assert_int_eq(io_queue_open(&test.queue, &config, &test.error), 0);
	for (size_t i = 0; i < RANKS; i++) {
		test.data[i] = malloc(BIG);
		test_random_fill(&seed, test.data[i], BIG);
	}
}

static void teardown(void)
{
	for (size_t i = 0; i < RANKS; i++)
		free(test.data[i]);
	free(test.content);
	io_queue_close(test.queue);
	ck_assert_uint_eq(scratch_temporaries(scratch_directory()), 0);
	scratch_teardown();
}

static void must(int ret)
{
	ck_assert_msg(!ret, "%s", test.error.text);
}

static int open_bundle(uint64_t alignment, ioshape_progress_fn progress, void *user)
{
	const struct io_file_options options = {
		.no_sync = true, .want_crc32 = true, .progress = progress, .progress_user = user
	};
	int ret = io_writer_open(&test.file, test.queue, test.path, &options, &test.downgrades,
				 &test.error);

	if (ret)
		return ret;
	ret = format_writer_new_bundle(&test.bundle, format_sink_of_file(test.file), test.path,
				       alignment, &test.error);
	if (ret)
		io_writer_free(test.file);
	return ret;
}

static void free_bundle(void)
{
	format_writer_free(test.bundle);
	io_writer_free(test.file);
}

/* Writes two records: one in one piece, one in many pieces of all sizes. */
static int put_archive(struct format_writer *writer, unsigned rank)
{
	static const size_t pieces[] = { 1, 100, 5000, 70000, MIB, BIG };
	size_t done = 0, piece;
	int ret;

	ret = format_writer_begin(writer, "data.pkl", 6, 0, &test.error);
	if (!ret)
		ret = format_writer_put(writer, "pickle", 6, &test.error);
	if (!ret)
		ret = format_writer_end(writer, &test.error);
	if (!ret)
		ret = format_writer_begin(writer, "data/0", BIG, 0, &test.error);
	for (unsigned i = 0; !ret && done < BIG; i++, done += piece) {
		piece = MIN(pieces[i % ARRAY_LENGTH(pieces)], BIG - done);
		ret = format_writer_put(writer, test.data[rank] + done, piece, &test.error);
	}
	if (!ret)
		ret = format_writer_end(writer, &test.error);
	return ret ? ret : format_writer_finish(writer, NULL, &test.error);
}

static int put_member(unsigned rank)
{
	struct format_writer *writer;
	char name[32];
	uint64_t count;
	int ret;

	snprintf(name, sizeof(name), "rank-%05u.pt", rank);
	ret = format_writer_begin(test.bundle, name, FORMAT_UNKNOWN_BYTES, 0, &test.error);
	if (!ret)
		ret = format_writer_new(&writer, format_sink_of_member(test.bundle), name,
					&test.error);
	if (ret)
		return ret;
	ret = put_archive(writer, rank);
	format_writer_free(writer);
	if (!ret)
		ret = format_writer_end(test.bundle, &test.error);
	if (!ret)
		test.members[rank] = format_writer_entries(test.bundle, &count)[rank];
	return ret;
}

static int put_all(void)
{
	int ret = 0;

	for (unsigned rank = 0; !ret && rank < RANKS; rank++)
		ret = put_member(rank);
	if (!ret)
		ret = format_writer_finish(test.bundle, NULL, &test.error);
	if (!ret)
		ret = io_writer_finish(test.file, &test.error);
	if (!ret)
		ret = io_writer_commit(test.file, &test.error);
	if (!ret)
		test.file_crc = io_writer_crc32(test.file);
	return ret;
}

static void write_bundle(uint64_t alignment)
{
	must(open_bundle(alignment, NULL, NULL));
	must(put_all());
	free_bundle();
	free(test.content);
	test.content = scratch_read(test.path, &test.bytes);
}

/* ---- Writing --------------------------------------------------------------------------------- */

/* Writes an archive to a file of its own. Returns its contents, to be freed. */
static uint8_t *alone(unsigned rank, size_t *bytes)
{
	const struct io_file_options options = { .no_sync = true };
	struct format_writer *writer;
	struct io_writer *file;

	must(io_writer_open(&file, test.queue, scratch_path("alone"), &options, &test.downgrades,
			    &test.error));
	must(format_writer_new(&writer, format_sink_of_file(file), "alone", &test.error));
	must(put_archive(writer, rank));
	must(io_writer_finish(file, &test.error));
	must(io_writer_commit(file, &test.error));
	format_writer_free(writer);
	io_writer_free(file);
	return scratch_read(scratch_path("alone"), bytes);
}

static struct test_case written_tests = { .name = "written", .setup = setup, .teardown = teardown };

LOOP_TEST(written_tests, members_are_the_files_they_would_be_alone, 0, ARRAY_LENGTH(alignments))
{
	uint64_t end = 0;
	size_t bytes;

	write_bundle(alignments[_i]);
	ck_assert_uint_eq(test.file_crc, base_crc32(0, test.content, test.bytes));
	for (unsigned rank = 0; rank < RANKS; rank++) {
		const struct format_entry *member = &test.members[rank];
		uint8_t *expected = alone(rank, &bytes);

		ck_assert_uint_eq(member->data_offset % alignments[_i], 0);
		ck_assert_uint_ge(member->data_offset, end);
		end = member->data_offset + member->bytes;
		ck_assert_uint_eq(member->bytes, bytes);
		ck_assert_uint_lt(end, test.bytes);
		if (memcmp(test.content + member->data_offset, expected, bytes) != 0)
			ck_abort_msg("member %u differs", rank);
		ck_assert_uint_eq(member->crc32, base_crc32(0, expected, bytes));
		free(expected);
	}
}

static int stop_at(void *user, enum ioshape_phase phase, uint64_t done, uint64_t total)
{
	unsigned *left = user;

	(void)phase;
	(void)done;
	(void)total;
	return *left && !--*left;
}

TEST(written_tests, after_a_failed_write_nothing_more_is_written)
{
	unsigned left, nth;
	int ret = -1;

	for (nth = 2; ret; nth++) {
		left = nth;
		memset(&test.error, 0, sizeof(test.error));
		must(open_bundle(4096, stop_at, &left));
		ret = put_all();
		if (ret) {
			ck_assert_int_eq(ret, -ECANCELED);
			ck_assert_int_eq(test.error.code, -ECANCELED);
			ck_assert_int_lt(format_writer_begin(test.bundle, "more",
							     FORMAT_UNKNOWN_BYTES, 0, NULL),
					 0);
			ck_assert_int_lt(format_writer_put(test.bundle, "m", 1, NULL), 0);
			ck_assert_int_lt(format_writer_finish(test.bundle, NULL, NULL), 0);
		}
		free_bundle();
		ck_assert_int_eq(access(test.path, F_OK), ret ? -1 : 0);
	}
	ck_assert_uint_gt(nth, RANKS * BIG / (256 * KIB));
}

TEST(written_tests, without_memory_nothing_leaks)
{
	unsigned long nth;
	int ret = -ENOMEM;

	for (nth = 1; ret; nth++) {
		memset(&test.error, 0, sizeof(test.error));
		fail_memory_at(nth);
		ret = open_bundle(4096, NULL, NULL);
		if (!ret) {
			ret = put_all();
			fail_memory_at(0);
			free_bundle();
		}
		fail_memory_at(0);
		REQUIRE(!ret || (ret == -ENOMEM && test.error.code == -ENOMEM));
	}
	ck_assert_uint_gt(nth, 20);
}

/* ---- Reading one member ---------------------------------------------------------------------- */

static int open_member(struct format_reader *reader, unsigned rank)
{
	memset(&test.error, 0, sizeof(test.error));
	return format_reader_open(reader, test.path, test.members[rank].data_offset,
				  test.members[rank].bytes, IOSHAPE_DIRECT_PREFER, &test.error);
}

static struct test_case read_back = { .name = "read", .setup = setup, .teardown = teardown };

TEST(read_back, only_the_part_itself_is_an_archive)
{
	struct format_entry *member = &test.members[1], right;
	struct format_reader reader;

	write_bundle(1 * MIB);
	right = *member;
	for (int by = 1; by < 5000; by += 1 + by) {
		*member = right;
		member->bytes -= (uint64_t)by;
		ck_assert_int_lt(open_member(&reader, 1), 0);
		*member = right;
		member->data_offset += (uint64_t)by;
		member->bytes -= (uint64_t)by;
		ck_assert_int_lt(open_member(&reader, 1), 0);
	}
	*member = right;
	member->bytes = test.bytes - member->data_offset + 1;
	ck_assert_int_eq(open_member(&reader, 1), IOSHAPE_E_DAMAGED);
	/* An empty member must not be read as the rest of the file. */
	*member = (struct format_entry){ .data_offset = right.data_offset };
	ck_assert_int_lt(open_member(&reader, 1), 0);
}
