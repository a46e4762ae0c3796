/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Sequential reads, call by call: when bytes are prefetched, and that they equal those from
 * pread().
 */
#define _GNU_SOURCE
#include "io/queue.h"
#include "support/check_main.h"
#include "support/random.h"
#include "support/scripted_queue.h"

#include <errno.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

#define FILE_BYTES (6u * 1024 * 1024 + 12345)
#define STREAM_END (FILE_BYTES - 20000) /* as if a directory followed */

/*
 * Offset of the part of the file that is read. So many bytes before and after it must not be read.
 */
static uint64_t base;

static uint8_t *data, *into;
static struct io_input input;
static struct io_stream *stream;

static void setup(void)
{
	uint8_t *whole = malloc(FILE_BYTES + 2 * base);
	uint64_t state = 5;

	scratch_setup();
	data = malloc(FILE_BYTES + 8);
	into = malloc(FILE_BYTES + 8);
	test_random_fill(&state, data, FILE_BYTES);
	memset(whole, 0xb5, FILE_BYTES + 2 * base);
	memcpy(whole + base, data, FILE_BYTES);
	scratch_write(scratch_path("file"), whole, FILE_BYTES + 2 * base);
	free(whole);
	scratch_evict(scratch_path("file"));
	memset(&error, 0, sizeof(error));
}

static void setup_aligned_part(void)
{
	base = 12288;
	setup();
}

static void setup_part_anywhere(void)
{
	base = 70001;
	setup();
}

static void teardown(void)
{
	free(data);
	free(into);
	scratch_teardown();
}

static void open_stream(const struct io_config *config)
{
	ck_assert_msg(!io_queue_open(&queue, config, &error), "%s", error.text);
	ck_assert_msg(!io_input_open(&input, scratch_path("file"), base, base ? FILE_BYTES : 0,
				     IOSHAPE_DIRECT_PREFER, &error),
		      "%s", error.text);
	ck_assert_msg(!io_stream_open(&stream, &input, STREAM_END, &error), "%s", error.text);
}

static void close_stream(void)
{
	io_stream_free(stream);
	/* Every buffer is free again. */
	ck_assert_uint_eq(queue->in_flight, 0);
	ck_assert_uint_eq(count_free(), queue->shape.depth);
	io_input_close(&input);
	io_queue_close(queue);
}

/* The scripted engine answers like the file, but fails in this range. */
static int64_t fail_from, fail_to;
static int64_t as_the_file(const struct io_op *op, unsigned nth)
{
	ssize_t got;

	(void)nth;
	ck_assert_int_eq(op->kind, IO_READ);
	if ((int64_t)op->offset >= fail_from && (int64_t)op->offset < fail_to)
		return -EIO;
	got = pread(op->fd, op->data, op->bytes, (off_t)op->offset);
	return got < 0 ? -errno : got;
}

static void begin_scripted(void)
{
	struct io_config config = {
		.engines = tried_engines, .block_bytes = BLOCK, .depth = DEPTH, .threads = 1
	};

	tried_engines[0] = &scripted;
	tried_engines[1] = NULL;
	answer = as_the_file;
	open_stream(&config);
}

static int try_get(uint64_t offset, size_t bytes)
{
	struct io_piece piece = {
		.offset = offset, .bytes = bytes, .into = into, .want_crc = true
	};
	int ret;

	memset(into, 0x99, bytes + 1);
	ret = io_read_onward(stream, queue, &piece, 1, NULL, NULL, &error);
	if (ret || io_stream_is_idle(stream))
		io_stream_stop(stream);
	if (ret)
		return ret;
	if (memcmp(into, data + offset, bytes) != 0 || into[bytes] != 0x99)
		ck_abort_msg("%zu bytes at %llu differ", bytes, (unsigned long long)offset);
	ck_assert_uint_eq(piece.crc, base_crc32(0, data + offset, bytes));
	return 0;
}

static void get(uint64_t offset, size_t bytes)
{
	ck_assert_msg(!try_get(offset, bytes), "%s", error.text);
}

static uint64_t asked_end(unsigned nth)
{
	return asked[nth].offset + asked[nth].bytes;
}

/* Checks that requests are contiguous and do not overlap. */
static void check_sequence(unsigned first)
{
	for (unsigned i = first + 1; i < requests; i++)
		ck_assert_uint_eq(asked[i].offset, asked_end(i - 1));
}

static struct test_case ahead = { .name = "ahead", .setup = setup, .teardown = teardown };

TEST_IF(ahead, who_reads_onward_finds_the_next_bytes_under_way, scratch_direct())
{
	uint64_t at = 8 * BLOCK;

	begin_scripted();
	get(0, at);
	for (size_t bytes = 30; at + bytes < STREAM_END;
	     bytes = bytes == 30 ? 3 * BLOCK + 77 : 30) {
		get(at, bytes);
		at += bytes;
		/* All buffers are used to prefetch. */
		if (at > 16 * BLOCK && at + DEPTH * BLOCK < STREAM_END)
			ck_assert_uint_ge(asked_end(requests - 1), at + (DEPTH - 2) * BLOCK);
	}
	check_sequence(0);
	ck_assert_uint_le(asked_end(requests - 1), base_round_up(STREAM_END, 4096));
	close_stream();
}

/* A prefetch may begin in the middle of a block, and does not disturb reads elsewhere. */
TEST_IF(ahead, what_is_expected_is_under_way_before_it_is_asked_for, scratch_direct())
{
	const uint64_t at = 3 * BLOCK + 100;

	begin_scripted();
	io_stream_prefetch(stream, queue, at);
	ck_assert(!io_stream_is_idle(stream));
	ck_assert_uint_eq(requests, DEPTH - 1);
	ck_assert_uint_le(asked[0].offset, at);
	ck_assert_uint_gt(asked[0].offset + 4096, at);
	get(FILE_BYTES - 22, 22);
	ck_assert_uint_eq(requests, DEPTH - 1);
	get(at, 8 * BLOCK);
	check_sequence(0);
	ck_assert_uint_ge(asked_end(requests - 1), at + 8 * BLOCK);
	io_stream_stop(stream);
	io_stream_prefetch(stream, queue, at);
	get(50 * BLOCK, 4 * BLOCK);
	close_stream();
}

TEST_IF(ahead, nothing_is_expected_that_is_in_the_page_cache_or_not_there, scratch_direct())
{
	begin_scripted();
	io_stream_prefetch(stream, queue, STREAM_END);
	io_stream_prefetch(stream, queue, UINT64_MAX / 2);
	ck_assert(io_stream_is_idle(stream));
	ck_assert(!io_input_get(&input, 0, into, STREAM_END, &error));
	io_stream_prefetch(stream, queue, 0);
	ck_assert(io_stream_is_idle(stream));
	ck_assert_uint_eq(requests, 0);
	close_stream();
}

TEST_IF(ahead, small_records_are_read_in_blocks_too, scratch_direct())
{
	begin_scripted();
	for (uint64_t at = 0; at + 1000 < STREAM_END; at += 1000) {
		get(at, 30);
		get(at + 64, 900);
	}
	check_sequence(0);
	ck_assert_uint_gt(requests, 0);
	ck_assert_uint_lt(requests, STREAM_END / BLOCK + 20);
	close_stream();
}

TEST_IF(ahead, who_jumps_about_pays_for_little_that_he_does_not_want, scratch_direct())
{
	uint64_t state = 9, wanted = 0, read = 0;

	begin_scripted();
	for (int i = 0; i < 50; i++) {
		uint64_t bytes = 300000 + test_random_below(&state, 300000);
		/* Backward each time, or far forward. */
		uint64_t at = i % 2 ? 4 * MIB + test_random_below(&state, MIB) :
				      test_random_below(&state, MIB);

		get(at, bytes);
		wanted += bytes;
	}
	for (unsigned i = 0; i < requests; i++)
		read += asked[i].bytes;
	ck_assert_uint_le(read, wanted + wanted / 8 + 100 * 4096ull);
	close_stream();
}

TEST_IF(ahead, small_reads_elsewhere_do_not_disturb, scratch_direct())
{
	unsigned before;

	begin_scripted();
	get(0, 8 * BLOCK);
	get(8 * BLOCK, 8 * BLOCK);
	for (uint64_t at = 16 * BLOCK; at < 40 * BLOCK; at += 100000) {
		before = requests;
		get(FILE_BYTES - 22, 22);
		get(5 * MIB + 77, 100);
		get(77, 100);
		ck_assert_uint_eq(requests, before);
		get(at, 100000);
	}
	check_sequence(0);
	close_stream();
}

/* If small reads follow each other for long enough, they become the sequential stream. */
TEST_IF(ahead, small_reads_elsewhere_may_be_the_new_way, scratch_direct())
{
	unsigned first;

	begin_scripted();
	get(3 * MIB, 8 * BLOCK);
	get(3 * MIB + 8 * BLOCK, 8 * BLOCK);
	first = requests;
	for (uint64_t at = 0; at < 2 * MIB; at += 8000)
		get(at, 8000);
	ck_assert_uint_gt(requests, first);
	ck_assert_uint_lt(asked[first].offset, MIB);
	check_sequence(first);
	close_stream();
}

TEST_IF(ahead, what_was_just_read_may_be_read_again, scratch_direct())
{
	begin_scripted();
	get(0, 8 * BLOCK);
	for (uint64_t at = 8 * BLOCK; at + 2 * BLOCK < STREAM_END; at += BLOCK)
		get(at - 30000, 30000 + BLOCK);
	check_sequence(0);
	close_stream();
}

TEST_IF(ahead, a_jump_back_starts_again, scratch_direct())
{
	begin_scripted();
	for (int i = 0; i < 3; i++) {
		get(0, 20 * BLOCK);
		get(20 * BLOCK, 20 * BLOCK);
		get(70 * BLOCK, 10 * BLOCK); /* after a jump forward */
	}
	close_stream();
}

TEST_IF(ahead, a_failure_ahead_is_told_to_who_asks_for_its_bytes, scratch_direct())
{
	uint64_t at;
	int ret = 0;

	fail_from = 20 * BLOCK + 4096;
	fail_to = 21 * BLOCK + 8192;
	begin_scripted();
	get(0, 8 * BLOCK);
	for (at = 8 * BLOCK; !ret; at += 1000) {
		ck_assert_uint_lt(at, 23 * BLOCK);
		ret = try_get(at, 1000);
	}
	ck_assert_int_eq(ret, -EIO);
	/* The failed request contains the byte that was asked for. */
	ck_assert_uint_ge(at + 1000, (uint64_t)fail_from);
	/* The storage works again, and reads succeed. */
	fail_to = 0;
	memset(&error, 0, sizeof(error));
	ck_assert_int_eq(io_queue_start(queue, &error), 0);
	get(at, 4 * BLOCK);
	close_stream();
}

TEST_IF(ahead, a_failure_ahead_is_forgotten_when_nobody_asks, scratch_direct())
{
	fail_from = 17 * BLOCK;
	fail_to = INT64_MAX;
	begin_scripted();
	get(0, 8 * BLOCK);
	get(8 * BLOCK, 8 * BLOCK);
	ck_assert_uint_ge(asked_end(requests - 1), 18 * BLOCK);
	get(0, 8 * BLOCK);
	get(8 * BLOCK, BLOCK);
	close_stream();
	ck_assert_int_eq(error.code, 0);
}

TEST_IF(ahead, requests_ahead_that_are_not_taken_fail_when_their_bytes_are_asked_for,
	scratch_direct())
{
	begin_scripted();
	get(0, 8 * BLOCK);
	get(8 * BLOCK, BLOCK);
	refuse_submit = -EPERM;
	get(9 * BLOCK, BLOCK);
	ck_assert_int_eq(try_get(10 * BLOCK, 8 * BLOCK), -EPERM);
	close_stream();
}

TEST_IF(ahead, an_engine_that_loses_requests_is_found_out, scratch_direct())
{
	begin_scripted();
	get(0, 8 * BLOCK);
	get(8 * BLOCK, BLOCK);
	lost = 1;
	ck_assert_int_eq(try_get(9 * BLOCK, 8 * BLOCK), -EIO);
	lost = 0;
	waiting = NULL;
	close_stream();
}

TEST_IF(ahead, nothing_is_left_in_flight_wherever_it_ends, scratch_direct())
{
	for (uint64_t bytes = 5 * BLOCK; bytes < FILE_BYTES; bytes += 9 * BLOCK) {
		begin_scripted();
		get(0, bytes);
		get(bytes, 1000);
		close_stream();
		ck_assert_ptr_null(waiting);
		ck_assert_uint_eq(opened, closed);
		requests = 0;
	}
}

TEST(ahead, what_is_in_the_page_cache_is_not_read_past_it)
{
	uint8_t *there = malloc(2 * MIB);
	int file = open(scratch_path("file"), O_RDONLY | O_CLOEXEC);

	/* The whole file: the decision is made for larger units than this file. */
	for (uint64_t at = 0; at < FILE_BYTES; at += 2 * MIB)
		ck_assert_int_gt(pread(file, there, 2 * MIB, (off_t)at), 0);
	close(file);
	free(there);
	begin_scripted();
	for (uint64_t at = 0; at + 700000 < FILE_BYTES; at += 700000)
		get(at, 700000);
	ck_assert_uint_eq(requests, 0);
	close_stream();
}

/* Returns whether more than half of the range is in the page cache. */
static bool is_cached(uint64_t offset, uint64_t bytes)
{
	const uint64_t page = (uint64_t)sysconf(_SC_PAGESIZE), first = (base + offset) / page;
	const size_t pages = (size_t)((base + offset + bytes + page - 1) / page - first);
	unsigned char *there = calloc(pages, 1);
	size_t cached = 0;
	void *view =
		mmap(NULL, pages * page, PROT_READ, MAP_SHARED, input.fd, (off_t)(first * page));

	ck_assert(there && view != MAP_FAILED);
	ck_assert_int_eq(mincore(view, pages * page, there), 0);
	for (size_t i = 0; i < pages; i++)
		cached += there[i] & 1;
	munmap(view, pages * page);
	free(there);
	return cached > pages / 2;
}

/* The library asks the kernel for the next bytes. */
TEST(ahead, what_others_want_too_goes_through_the_page_cache)
{
	begin_scripted();
	input.shared = true;
	posix_fadvise(input.fd, 0, 0, POSIX_FADV_RANDOM); /* no kernel read-ahead */
	get(0, 8 * BLOCK);
	get(8 * BLOCK, 8 * BLOCK);
	get(16 * BLOCK, 8 * BLOCK);
	for (int i = 0; i < 3000 && !is_cached(2 * MIB, 3 * MIB); i++)
		usleep(10000);
	ck_assert(is_cached(2 * MIB, 3 * MIB));
	for (uint64_t at = 24 * BLOCK; at + 70000 < FILE_BYTES; at += 70000)
		get(at, 70000);
	get(0, MIB);
	ck_assert_uint_eq(requests, 0);
	close_stream();
}

TEST_IF(ahead, a_file_cut_short_underneath_is_damaged, scratch_direct())
{
	begin_scripted();
	get(0, 8 * BLOCK);
	get(8 * BLOCK, BLOCK);
	ck_assert_int_eq(truncate(scratch_path("file"), 16 * BLOCK), 0);
	for (uint64_t at = 9 * BLOCK; at < 16 * BLOCK; at += BLOCK)
		get(at, BLOCK);
	/* Bytes that were prefetched before the cut are still delivered. */
	for (uint64_t at = 16 * BLOCK; at < 24 * BLOCK; at += BLOCK) {
		int ret = try_get(at, BLOCK);

		ck_assert(ret == 0 || ret == IOSHAPE_E_DAMAGED);
		if (at > 20 * BLOCK)
			ck_assert_int_eq(ret, IOSHAPE_E_DAMAGED);
	}
	close_stream();
}

/* A part is prefetched like a whole file, up to its end. */
static struct test_case aligned_part = { .name = "aligned part",
					 .setup = setup_aligned_part,
					 .teardown = teardown };
static struct test_case part_anywhere = { .name = "part anywhere",
					  .setup = setup_part_anywhere,
					  .teardown = teardown };

TEST_IF(aligned_part, a_part_is_read_ahead_to_its_end, scratch_direct())
{
	begin_scripted();
	get(0, 8 * BLOCK);
	for (uint64_t at = 8 * BLOCK; at < STREAM_END; at += BLOCK)
		get(at, MIN(BLOCK, STREAM_END - at));
	ck_assert_uint_eq(asked[0].offset, base / queue->alignment * queue->alignment);
	check_sequence(0);
	for (unsigned i = 0; i < requests; i++) {
		ck_assert_uint_eq(asked[i].offset % queue->alignment, 0);
		ck_assert_uint_eq(asked[i].bytes % queue->alignment, 0);
	}
	ck_assert_uint_eq(asked_end(requests - 1),
			  base_round_up(base + STREAM_END, queue->alignment));
	/* Most blocks were prefetched. */
	ck_assert_uint_le(requests, STREAM_END / BLOCK + 6);
	close_stream();
}
CHECK_ADD(part_anywhere, a_part_is_read_ahead_to_its_end, 0, scratch_direct())

/* ---- Real engines ---------------------------------------------------------------------------- */

static void warm_some(uint64_t *state)
{
	int file = open(scratch_path("file"), O_RDONLY | O_CLOEXEC);

	for (int i = 0; i < 20; i++)
		ck_assert_int_ge(
			pread(file, into, 200000, (off_t)test_random_below(state, FILE_BYTES)), 0);
	close(file);
}

/* Reads sequentially, with random jumps and sizes. */
static void wander(uint64_t *state)
{
	uint64_t at = 0, bytes;

	for (unsigned i = 0; i < scratch_rounds(200); i++) {
		switch (test_random_below(state, 12)) {
		case 0:
			at = test_random_below(state, FILE_BYTES);
			break;
		case 1:
			at -= MIN(at, test_random_below(state, 100000));
			break;
		case 2:
			at += test_random_below(state, 500000);
			break;
		}
		bytes = test_random_below(state, 2) ? test_random_below(state, 100) :
						      test_random_below(state, 700000);
		at = MIN(at, FILE_BYTES);
		bytes = MIN(bytes, FILE_BYTES - at);
		get(at, bytes);
		at += bytes;
	}
}

static struct test_case engines_tests = { .name = "engines", .setup = setup, .teardown = teardown };

LOOP_TEST(engines_tests, wherever_one_reads_it_is_what_pread_says, 0, 9)
{
	static const enum ioshape_engine engines[] = { IOSHAPE_ENGINE_URING, IOSHAPE_ENGINE_THREADS,
						       IOSHAPE_ENGINE_BUFFERED };
	static const unsigned depths[] = { 1, 2, 5 };
	struct io_config config = { .engine = engines[_i % 3],
				    .block_bytes = BLOCK << (_i % 2),
				    .depth = depths[_i / 3],
				    .threads = 2 };
	uint64_t state = 100 + (uint64_t)_i;

	for (int round = 0; round < 3; round++) {
		scratch_evict(scratch_path("file"));
		if (round == 1)
			warm_some(&state);
		open_stream(&config);
		wander(&state);
		close_stream();
	}
}
CHECK_ADD(aligned_part, wherever_one_reads_it_is_what_pread_says, 0, 9)
CHECK_ADD(part_anywhere, wherever_one_reads_it_is_what_pread_says, 0, 9)
