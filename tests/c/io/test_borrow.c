/* SPDX-License-Identifier: Apache-2.0 */
/* Files written from borrowed memory: the bytes are right, and the memory is released in time. */
#define _GNU_SOURCE
#include "io/queue.h"
#include "support/check_main.h"
#include "support/file_writer.h"
#include "support/random.h"
#include "support/scratch.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <unistd.h>

#define PAGE 4096u
#define CHUNKS 3u
#define CHUNK (2 * MIB)
#define MOST (1 * MIB + 300000) /* size of a piece; more than a block */
#define PIECES 30u

static struct {
	uint8_t *chunks[CHUNKS]; /* memory that it may borrow */
	uint64_t ends[CHUNKS];   /* offset in the file up to which each chunk was used */
	uint8_t *own;            /* memory that is not borrowable */
	uint8_t *wanted;         /* expected contents of the file */
	uint64_t seed;
	uint32_t crc;  /* of the pieces that were put with a checksum */
	bool borrowed; /* some of it was not copied */
	struct file_write write;
} test;

static void setup(void)
{
	scratch_setup();
	memset(&test, 0, sizeof(test));
	for (unsigned i = 0; i < CHUNKS; i++)
		test.chunks[i] = aligned_alloc(PAGE, CHUNK);
	test.own = aligned_alloc(PAGE, CHUNK);
	test.wanted = malloc((size_t)PIECES * MOST);
	test.write = file_write_defaults();
	test.write.config.block_bytes = 1 * MIB;
	test.write.options.want_crc32 = true;
	test.write.options.no_sync = true;
}

static void teardown(void)
{
	for (unsigned i = 0; i < CHUNKS; i++)
		free(test.chunks[i]);
	free(test.own);
	free(test.wanted);
	ck_assert_uint_eq(scratch_temporaries(scratch_directory()), 0);
	scratch_teardown();
}

static struct test_case tests = {
	.name = "all",
	.setup = setup,
	.teardown = teardown,
};

static void must(int ret)
{
	ck_assert_msg(!ret, "%s", test.write.error.text);
}

/* Fills memory with the file's next bytes. */
static void fill(uint8_t *data, size_t bytes)
{
	uint64_t at = io_writer_offset(test.write.writer);

	test_random_fill(&test.seed, data, bytes);
	memcpy(test.wanted + at, data, bytes);
}

static void put(const uint8_t *data, size_t bytes)
{
	uint32_t crc = 0;

	if (test_random_below(&test.seed, 2)) {
		must(io_writer_put_summed(test.write.writer, data, bytes,
					  base_crc32(0, data, bytes), &test.write.error));
		return;
	}
	must(io_writer_put(test.write.writer, data, bytes, &crc, &test.write.error));
	ck_assert_uint_eq(crc, base_crc32(0, data, bytes));
}

/*
 * Lets the writer borrow a chunk and writes it in pieces, like records. Its pages are aligned like
 * those of the file, except for `shift` bytes.
 */
static void put_borrowed(unsigned chunk, size_t shift)
{
	struct io_writer *writer = test.write.writer;
	const size_t bytes = 1 + test_random_below(&test.seed, MOST - 1);
	uint8_t *data;

	must(io_writer_wait_written(writer, test.ends[chunk], &test.write.error));
	ck_assert_uint_ge(io_writer_written(writer), test.ends[chunk]);
	data = test.chunks[chunk] + (io_writer_offset(writer) + shift) % PAGE;
	fill(data, bytes);
	io_writer_borrow(writer, test.chunks[chunk], CHUNK);
	for (size_t done = 0, piece; done < bytes; done += piece) {
		piece = MIN(bytes - done, 256 * KIB);
		put(data + done, piece);
	}
	io_writer_borrow(writer, NULL, 0);
	test.ends[chunk] = io_writer_offset(writer);
	test.borrowed |= io_writer_written(writer) < test.ends[chunk];
}

static void put_own(size_t most)
{
	const size_t bytes = 1 + test_random_below(&test.seed, most);

	fill(test.own, bytes);
	put(test.own, bytes);
	/* The writer has copied the bytes. */
	memset(test.own, 0xee, bytes);
}

/* Writes bytes that are made in the writer's own buffers. */
static void put_made(size_t most)
{
	size_t left = 1 + test_random_below(&test.seed, most), room;
	uint8_t *to;

	for (size_t piece; left; left -= piece) {
		must(io_writer_space(test.write.writer, &to, &room, &test.write.error));
		ck_assert_uint_gt(room, 0);
		piece = MIN(left, room);
		fill(to, piece);
		put(to, piece);
	}
}

static void compare(uint64_t bytes)
{
	FILE *file = fopen(scratch_path("file"), "re");
	uint8_t *found = malloc(bytes + 1);

	ck_assert_ptr_nonnull(file);
	ck_assert_uint_eq(fread(found, 1, bytes + 1, file), bytes);
	ck_assert(!memcmp(found, test.wanted, bytes));
	fclose(file);
	free(found);
}

static const enum ioshape_engine engines[] = { IOSHAPE_ENGINE_URING, IOSHAPE_ENGINE_URING_ASYNC,
					       IOSHAPE_ENGINE_THREADS, IOSHAPE_ENGINE_BUFFERED };

LOOP_TEST(tests, a_file_from_borrowed_memory_has_the_bytes_that_were_put, 0, 8)
{
	uint64_t bytes;

	test.seed = (uint64_t)_i + 1;
	test.write.config.engine = engines[_i / 2];
	test.write.config.direct = _i % 2 ? IOSHAPE_DIRECT_OFF : IOSHAPE_DIRECT_PREFER;
	must(file_write_open(&test.write, scratch_path("file")));
	for (unsigned i = 0; i < PIECES; i++) {
		switch (test_random_below(&test.seed, 7)) {
		case 0:
			put_own(6000);
			break;
		case 1:
			put_own(MOST);
			break;
		case 2:
			put_made(MOST);
			break;
		case 3:
			/* Unaligned, so direct I/O cannot use the memory. */
			put_borrowed(i % CHUNKS, 1 + test_random_below(&test.seed, PAGE - 1));
			break;
		default:
			put_borrowed(i % CHUNKS, 0);
		}
	}
	ck_assert(test.borrowed);
	bytes = io_writer_offset(test.write.writer);
	must(file_write_end(&test.write));
	ck_assert_uint_eq(io_writer_crc32(test.write.writer), base_crc32(0, test.wanted, bytes));
	/* The position of the parts must cause no downgrade. */
	for (unsigned i = 0; i < test.write.downgrades.count; i++)
		ck_assert_ptr_null(strstr(test.write.downgrades.list[i].sentence,
					  "continued with buffered I/O"));
	file_write_close(&test.write);
	compare(bytes);
}

/* Opens a file and fills a block with own memory. From then on the file's engine is at work. */
static void open_and_start(enum ioshape_direct direct)
{
	test.write.config.direct = direct;
	must(file_write_open(&test.write, scratch_path("file")));
	fill(test.own, CHUNK);
	put(test.own, CHUNK);
}

/* Lets the writer borrow a whole chunk but its first `shift` bytes. Returns whether any of it was
 * borrowed. */
static bool is_borrowed(size_t shift)
{
	struct io_writer *writer = test.write.writer;

	fill(test.chunks[0] + shift, CHUNK - PAGE);
	io_writer_borrow(writer, test.chunks[0], CHUNK);
	put(test.chunks[0] + shift, CHUNK - PAGE);
	return io_writer_written(writer) < io_writer_offset(writer);
}

static void end_and_compare(void)
{
	const uint64_t bytes = io_writer_offset(test.write.writer);

	must(file_write_end(&test.write));
	file_write_close(&test.write);
	compare(bytes);
}

/* The kernel copies what goes through the page cache, so any address will do. */
TEST(tests, the_page_cache_borrows_memory_at_any_address)
{
	open_and_start(IOSHAPE_DIRECT_OFF);
	ck_assert(is_borrowed(1));
	end_and_compare();
}

/* Direct I/O borrows memory with the alignment that the filesystem demands: a few bytes on NVMe,
 * 512 on other disks. If the filesystem does not tell, it borrows whole pages. */
LOOP_TEST(tests, direct_io_borrows_memory_with_the_alignment_of_the_device, 0, 3)
{
	struct fs_memory memory = { 0 };
	struct fs_info info;
	uint32_t alignment;
	size_t shift;
	int fd;

	if (!scratch_direct())
		return;
	fd = open(scratch_directory(), O_TMPFILE | O_RDWR, 0600);
	must(fs_describe(fd, scratch_directory(), &memory, &info, &test.write.error));
	close(fd);
	open_and_start(IOSHAPE_DIRECT_REQUIRE);
	alignment = info.memory_alignment ? info.memory_alignment : PAGE;
	shift = _i == 0 ? 0 : _i == 1 ? alignment % PAGE : alignment / 2;
	ck_assert_int_eq(is_borrowed(shift), shift % alignment == 0);
	end_and_compare();
}

/* After io_writer_wait_written(), a failed file no longer uses memory that it may borrow. */
TEST(tests, a_file_that_failed_borrows_nothing)
{
	uint8_t *to;
	size_t room;

	must(file_write_open(&test.write, scratch_path("file")));
	for (unsigned i = 0; i < CHUNKS; i++)
		put_borrowed(i, 0);
	ck_assert(test.borrowed);
	io_writer_fail(test.write.writer);
	ck_assert_int_eq(io_writer_wait_written(test.write.writer, UINT64_MAX, &test.write.error),
			 -EIO);
	ck_assert_uint_eq(io_writer_written(test.write.writer),
			  io_writer_offset(test.write.writer));
	ck_assert_int_eq(io_writer_space(test.write.writer, &to, &room, &test.write.error), -EIO);
	file_write_close(&test.write);
}
