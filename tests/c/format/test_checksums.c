/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The file of checksums beside a file: it is read as it was written, and invalid contents are
 * refused.
 */
#include "format/index.c"
#include "support/check_main.h"
#include "support/fail_memory.h"
#include "support/scratch.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

static struct test_case tests = { .name = "checksums" };

static const uint32_t crcs[] = { 1, 0xffffffff, 3 };

static const struct format_checksums sample = {
	.file_bytes = 2 * MIB + 5,
	.block_bytes = MIB,
	.blocks = ARRAY_LENGTH(crcs),
	.crc32 = crcs,
	.modified_ns = 1700000000123456789,
};

static struct base_buffer encoded(const struct format_checksums *checksums)
{
	struct base_buffer bytes = { 0 };

	ck_assert_int_eq(format_checksums_encode(&bytes, checksums), 0);
	ck_assert_uint_le(bytes.bytes, FORMAT_MOST_CHECKSUMS_BYTES);
	return bytes;
}

/* Recomputes the checksum of the changed file, as an attacker could. */
static void seal(struct base_buffer *bytes)
{
	base_put_le(bytes->data + 12, base_crc32(0, bytes->data + 16, bytes->bytes - 16), 4);
}

static int decode(const struct base_buffer *bytes, size_t length)
{
	struct format_checksums found = { 0 };
	/* An exact copy, so that sanitizers detect a read beyond it. */
	uint8_t *copy = malloc(length + 1);
	int ret;

	memcpy(copy, bytes->data, length);
	ret = format_checksums_decode(&found, copy, length);
	if (!ret) {
		ck_assert(checksums_valid(&found));
		format_checksums_free(&found);
	}
	free(copy);
	return ret;
}

TEST(tests, what_is_written_comes_back)
{
	struct format_checksums found;
	struct base_buffer bytes = encoded(&sample);

	ck_assert_int_eq(format_checksums_decode(&found, bytes.data, bytes.bytes), 0);
	ck_assert_uint_eq(found.file_bytes, sample.file_bytes);
	ck_assert_uint_eq(found.block_bytes, sample.block_bytes);
	ck_assert_uint_eq(found.blocks, sample.blocks);
	ck_assert_int_eq(found.modified_ns, sample.modified_ns);
	ck_assert_mem_eq(found.crc32, crcs, sizeof(crcs));
	format_checksums_free(&found);
	base_buffer_free(&bytes);
}

TEST(tests, an_empty_file_has_none)
{
	const struct format_checksums nothing = { .block_bytes = MIB };
	struct base_buffer bytes = encoded(&nothing);

	ck_assert_int_eq(decode(&bytes, bytes.bytes), 0);
	base_buffer_free(&bytes);
}

/* Offset in the file, width and value of a number. */
static const struct {
	size_t at;
	unsigned bytes;
	uint64_t value;
} lies[] = {
	{ 16, 8, 0 },       { 16, 8, MIB + 1 },     { 16, 8, 32 * KIB },
	{ 16, 8, 2 * GIB }, { 16, 8, UINT64_MAX },  { 24, 8, 0 },
	{ 24, 8, 2 * MIB }, { 24, 8, 3 * MIB + 1 }, { 24, 8, UINT64_MAX },
};

LOOP_TEST(tests, numbers_that_do_not_fit_each_other_are_refused, 0, ARRAY_LENGTH(lies))
{
	struct base_buffer bytes = encoded(&sample);

	base_put_le(bytes.data + lies[_i].at, lies[_i].value, lies[_i].bytes);
	seal(&bytes);
	ck_assert_int_eq(decode(&bytes, bytes.bytes), IOSHAPE_E_DAMAGED);
	base_buffer_free(&bytes);
}

TEST(tests, a_later_version_is_not_believed)
{
	struct base_buffer bytes = encoded(&sample);

	base_put_le(bytes.data + 8, BASE_FORMAT(1u) + 1, 4);
	seal(&bytes);
	ck_assert_int_eq(decode(&bytes, bytes.bytes), IOSHAPE_E_FORMAT);
	base_buffer_free(&bytes);
}

TEST(tests, what_could_not_be_read_again_is_not_written)
{
	const uint64_t most_blocks = FORMAT_MOST_CHECKSUMS_BYTES / sizeof(uint32_t) - 10;
	uint32_t *many = calloc(most_blocks + 1, sizeof(*many));
	struct format_checksums large = { .block_bytes = MIB, .crc32 = many };
	struct base_buffer bytes = { 0 };

	for (large.blocks = most_blocks; large.blocks <= most_blocks + 1; large.blocks++) {
		large.file_bytes = large.blocks * MIB;
		ck_assert_int_eq(format_checksums_encode(&bytes, &large),
				 large.blocks == most_blocks ? 0 : -EFBIG);
		ck_assert_uint_eq(bytes.bytes, FORMAT_MOST_CHECKSUMS_BYTES);
	}
	base_buffer_free(&bytes);
	free(many);
}

TEST(tests, memory_may_run_out)
{
	struct base_buffer bytes = encoded(&sample), none = { 0 };
	struct format_checksums found;

	int ret;

	fail_memory_at(1);
	ret = format_checksums_encode(&none, &sample);
	fail_memory_at(0);
	ck_assert_int_eq(ret, -ENOMEM);
	fail_memory_at(1);
	ret = format_checksums_decode(&found, bytes.data, bytes.bytes);
	fail_memory_at(0);
	ck_assert_int_eq(ret, -ENOMEM);
	base_buffer_free(&bytes);
}

/* ---- Checksums of a plain file --------------------------------------------------------------- */

static int open_plain(struct format_reader *reader, struct base_error *error)
{
	return format_reader_open_plain(reader, scratch_path("file"), 0, 0, IOSHAPE_DIRECT_OFF,
					error);
}

TEST(tests, a_plain_file_takes_those_of_its_length_only)
{
	struct format_checksums of_another = sample, own = { .block_bytes = MIB, .blocks = 1 };
	struct base_error error = { 0 };
	struct format_reader reader;
	uint32_t *crc = malloc(sizeof(*crc));

	scratch_setup();
	ck_assert_int_eq(open_plain(&reader, &error), -ENOENT);
	scratch_write(scratch_path("file"), "bytes", 5);
	ck_assert_int_eq(open_plain(&reader, NULL), 0);
	ck_assert_int_eq(format_reader_add_checksums(&reader, &of_another, NULL),
			 IOSHAPE_E_DAMAGED);
	ck_assert(!reader.has_index);
	ck_assert_ptr_eq(of_another.crc32, sample.crc32);
	*crc = base_crc32(0, "bytes", 5);
	own.crc32 = crc;
	own.file_bytes = 5;
	ck_assert_int_eq(format_reader_add_checksums(&reader, &own, NULL), 0);
	ck_assert(reader.has_index && !reader.no_checksums);
	ck_assert_ptr_eq(reader.index.checks, crc);
	ck_assert_ptr_null(own.crc32);
	/* This also frees the checksums. */
	format_reader_close(&reader);
	scratch_teardown();
}

TEST(tests, memory_for_a_plain_file_may_run_out)
{
	struct format_reader reader;
	unsigned long nth = 0, came;
	unsigned failed = 0;
	int ret;

	scratch_setup();
	scratch_write(scratch_path("file"), "", 0);
	do {
		fail_memory_at(++nth);
		ret = open_plain(&reader, NULL);
		if (!ret)
			format_reader_close(&reader);
		came = fail_memory_count();
		fail_memory_at(0);
		ck_assert(!ret || ret == -ENOMEM);
		failed += ret != 0;
	} while (came >= nth);
	ck_assert_uint_ge(failed, 3);
	scratch_teardown();
}
