/* SPDX-License-Identifier: Apache-2.0 */
/* Reads of pieces of files, compared with pread(). */
#define _GNU_SOURCE
#include "io/queue.h"
#include "support/check_main.h"
#include "support/random.h"
#include "support/scratch.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#define BLOCK (64 * KIB)
#define SMALL_BYTES (2 * MIB + 12345)
#define LARGE_BYTES (9 * MIB + 12345) /* files of 8 MiB or more are read by several threads */
#define MOST_PIECES 4000

/* State of the page cache: all of the file is in it, nothing, or parts. */
enum cache { WARM, COLD, MIXED };

static const enum ioshape_engine engines[] = { IOSHAPE_ENGINE_URING, IOSHAPE_ENGINE_THREADS,
					       IOSHAPE_ENGINE_BUFFERED };

/*
 * Offset of the part of the file that is read. So many bytes before and after it must not be read.
 */
static uint64_t base;

static uint8_t *data, *into;
static size_t file_bytes; /* of the part */
static struct io_queue *queue;
static struct io_input input;
static struct base_error error;
static struct io_piece pieces[MOST_PIECES];
static unsigned descriptors_before;

static void write_file(void)
{
	uint8_t *whole = malloc(file_bytes + 2 * base);

	memset(whole, 0xb5, file_bytes + 2 * base);
	memcpy(whole + base, data, file_bytes);
	scratch_write(scratch_path("file"), whole, file_bytes + 2 * base);
	free(whole);
}

static void setup(size_t bytes)
{
	uint64_t state = 21;

	file_bytes = bytes;

	scratch_setup();
	data = malloc(file_bytes + 8);
	into = malloc(file_bytes + 8);
	ck_assert(data && into);
	test_random_fill(&state, data, file_bytes);
	write_file();
	descriptors_before = scratch_descriptors();
}

static void setup_small(void)
{
	setup(SMALL_BYTES);
}

/* Sets the base of an aligned part, as in a shard file. */
static void setup_aligned_part(void)
{
	base = 3 * MIB;
	setup(SMALL_BYTES);
}

static void setup_part_anywhere(void)
{
	base = 70001;
	setup(LARGE_BYTES);
}

static void setup_large(void)
{
	setup(LARGE_BYTES);
}

static void teardown(void)
{
	ck_assert_uint_eq(scratch_descriptors(), descriptors_before);
	free(data);
	free(into);
	scratch_teardown();
}

static void set_cache(const char *path, enum cache cache)
{
	char *scratch = malloc(300 * KIB);
	int fd;

	if (cache != WARM)
		scratch_evict(path);
	fd = open(path, O_RDONLY | O_CLOEXEC);
	posix_fadvise(fd, 0, 0, POSIX_FADV_RANDOM);
	/* Reads some parts of it. */
	for (off_t at = 0; cache == MIXED && at < (off_t)(file_bytes + 2 * base);
	     at += (off_t)(512 * KIB))
		ck_assert_int_ge(pread(fd, scratch, 300 * KIB, at), 0);
	close(fd);
	free(scratch);
}

static void begin(enum ioshape_engine engine, enum ioshape_direct direct)
{
	struct io_config config = {
		.engine = engine, .direct = direct, .block_bytes = BLOCK, .depth = 4, .threads = 3
	};

	memset(&error, 0, sizeof(error));
	ck_assert_msg(!io_queue_open(&queue, &config, &error), "%s", error.text);
	ck_assert_msg(!io_input_open(&input, scratch_path("file"), base, base ? file_bytes : 0,
				     direct, &error),
		      "%s", error.text);
}

static void end(void)
{
	io_input_close(&input);
	io_queue_close(queue);
}

/* Checks that memory outside the pieces is unchanged. */
static void check_untouched(uint64_t from, uint64_t to)
{
	if (from < to &&
	    (into[from] != 0x99 || memcmp(into + from, into + from + 1, to - from - 1) != 0))
		ck_abort_msg("something was written between %llu and %llu",
			     (unsigned long long)from, (unsigned long long)to);
}

/* Reads the pieces and compares them. */
static void read_and_compare(size_t count)
{
	uint64_t before = 0;
	int ret;

	memset(into, 0x99, file_bytes);
	for (size_t i = 0; i < count; i++)
		pieces[i].crc = 0xdeadbeef;
	ret = io_read(queue, &input, pieces, count, NULL, NULL, &error);
	ck_assert_msg(!ret, "%s", error.text);
	for (size_t i = 0; i < count; i++) {
		struct io_piece *piece = &pieces[i];

		if (piece->into && memcmp(piece->into, data + piece->offset, piece->bytes) != 0)
			ck_abort_msg("piece %zu of %zu: %llu bytes at %llu differ", i, count,
				     (unsigned long long)piece->bytes,
				     (unsigned long long)piece->offset);
		if (piece->into) {
			check_untouched(before, (uint64_t)((uint8_t *)piece->into - into));
			before = (uint64_t)((uint8_t *)piece->into - into) + piece->bytes;
		}
		if (piece->want_crc)
			ck_assert_uint_eq(piece->crc,
					  base_crc32(0, data + piece->offset, piece->bytes));
	}
	check_untouched(before, file_bytes);
}

/*
 * Makes pieces in ascending order, with gaps. Lengths are up to `most`, sometimes 0; some pieces
 * are only verified.
 */
static size_t make_pieces(uint64_t *state, size_t most_pieces, uint64_t most, uint64_t most_gap)
{
	uint64_t at = test_random_below(state, most_gap + 1);
	size_t count = 0;

	while (count < most_pieces) {
		struct io_piece *piece = &pieces[count];
		uint64_t bytes = test_random_below(state, most + 1);

		if (!test_random_below(state, 8))
			bytes = 0;
		if (!test_random_below(state, 4))
			bytes = bytes / 4096 * 4096;
		if (at + bytes > file_bytes)
			break;
		*piece = (struct io_piece){ .offset = at, .bytes = bytes, .into = into + at };
		piece->want_crc = test_random_below(state, 2);
		if (!test_random_below(state, 5)) {
			piece->into = NULL;
			piece->want_crc = true;
		}
		count++;
		at += bytes +
		      (test_random_below(state, 3) ? 0 : test_random_below(state, most_gap + 1));
		if (!test_random_below(state, 4))
			at = base_round_up(at, 4096);
	}
	return count;
}

static struct test_case reading_tests = { .name = "pieces",
					  .setup = setup_small,
					  .teardown = teardown };
static struct test_case threads = { .name = "many bytes",
				    .setup = setup_large,
				    .teardown = teardown };
static struct test_case aligned = { .name = "aligned part",
				    .setup = setup_aligned_part,
				    .teardown = teardown };
static struct test_case anywhere = { .name = "part anywhere",
				     .setup = setup_part_anywhere,
				     .teardown = teardown };

LOOP_TEST(reading_tests, random_pieces_are_what_pread_says, 0, 3 * ARRAY_LENGTH(engines))
{
	static const struct {
		uint64_t most, most_gap;
	} shapes[] = {
		{ 1000, 100 },      { 100, 5000 },     { 70000, 0 },         { 70000, 300 * KIB },
		{ 300000, 700000 }, { 1 * MIB, 1000 }, { 1 * MIB, 1 * MIB }, { 5000, 600 * KIB },
	};
	uint64_t state = 22 + (uint64_t)_i;
	enum cache cache = (enum cache)(_i / 3);

	for (size_t i = 0; i < ARRAY_LENGTH(shapes); i++) {
		for (int round = 0; round < 2; round++) {
			size_t count = make_pieces(&state, MOST_PIECES, shapes[i].most,
						   shapes[i].most_gap);

			set_cache(scratch_path("file"), cache);
			begin(engines[_i % 3], _i % 3 == 2 || round == 1 ? IOSHAPE_DIRECT_OFF :
									   IOSHAPE_DIRECT_PREFER);
			read_and_compare(count);
			end();
		}
	}
}
CHECK_ADD(threads, random_pieces_are_what_pread_says, 0, 2)
CHECK_ADD(aligned, random_pieces_are_what_pread_says, 0, 3 * ARRAY_LENGTH(engines))
CHECK_ADD(anywhere, random_pieces_are_what_pread_says, 0, 3 * ARRAY_LENGTH(engines))

LOOP_TEST(threads, the_whole_file_in_one_piece, 0, 3 * ARRAY_LENGTH(engines))
{
	set_cache(scratch_path("file"), (enum cache)(_i / 3));
	begin(engines[_i % 3], _i % 3 == 2 ? IOSHAPE_DIRECT_OFF : IOSHAPE_DIRECT_PREFER);
	pieces[0] = (struct io_piece){ .bytes = file_bytes, .into = into, .want_crc = true };
	read_and_compare(1);
	pieces[0].into = NULL;
	read_and_compare(1);
	end();
}
CHECK_ADD(anywhere, the_whole_file_in_one_piece, 0, 3 * ARRAY_LENGTH(engines))

/* Ends of files that are not multiples of the unit of direct I/O. */
LOOP_TEST(reading_tests, the_last_bytes_of_a_file_are_read, 0, 2 * ARRAY_LENGTH(engines))
{
	static const size_t tails[] = { 1, 2, 511, 512, 513, 4095, 4096, 4097, 12345 };

	for (size_t i = 0; i < ARRAY_LENGTH(tails); i++) {
		size_t bytes = file_bytes - 12345 + tails[i] - 1;

		ck_assert_int_eq(truncate(scratch_path("file"), (off_t)bytes), 0);
		for (size_t tail = 1; tail < 10000; tail = tail * 8 + 1) {
			set_cache(scratch_path("file"), _i / 3 ? COLD : WARM);
			begin(engines[_i % 3],
			      _i % 3 == 2 ? IOSHAPE_DIRECT_OFF : IOSHAPE_DIRECT_PREFER);
			pieces[0] = (struct io_piece){ .offset = bytes - tail,
						       .bytes = tail,
						       .into = into,
						       .want_crc = true };
			read_and_compare(1);
			end();
		}
		write_file();
	}
}

LOOP_TEST(reading_tests, pieces_without_bytes_are_read_too, 0, ARRAY_LENGTH(engines))
{
	const uint64_t offsets[] = { 0, 0, 5, BLOCK, BLOCK, file_bytes, file_bytes };

	for (int i = 0; i < 2; i++) {
		set_cache(scratch_path("file"), i ? COLD : WARM);
		begin(engines[_i], _i == 2 ? IOSHAPE_DIRECT_OFF : IOSHAPE_DIRECT_PREFER);
		ck_assert_int_eq(io_read(queue, &input, pieces, 0, NULL, NULL, &error), 0);
		for (size_t k = 0; k < ARRAY_LENGTH(offsets); k++)
			pieces[k] = (struct io_piece){ .offset = offsets[k], .want_crc = true };
		read_and_compare(ARRAY_LENGTH(offsets));
		/* Also beside a piece that has bytes. */
		pieces[3] = (struct io_piece){ .offset = 100, .bytes = 3 * BLOCK, .into = into };
		pieces[4].offset = 100 + 3 * BLOCK;
		read_and_compare(ARRAY_LENGTH(offsets));
		end();
	}
}
CHECK_ADD(aligned, pieces_without_bytes_are_read_too, 0, ARRAY_LENGTH(engines))

LOOP_TEST(reading_tests, a_file_cut_short_underneath_is_damaged, 0, ARRAY_LENGTH(engines))
{
	for (int cold = 0; cold < 2; cold++) {
		for (size_t left = 0; left < file_bytes; left = left * 4 + 50000) {
			write_file();
			begin(engines[_i], _i == 2 ? IOSHAPE_DIRECT_OFF : IOSHAPE_DIRECT_PREFER);
			ck_assert_int_eq(truncate(scratch_path("file"), (off_t)left), 0);
			set_cache(scratch_path("file"), cold ? COLD : WARM);
			for (size_t k = 0; k < 8; k++)
				pieces[k] = (struct io_piece){ .offset = k * 256 * KIB,
							       .bytes = 256 * KIB,
							       .into = into + k * 256 * KIB };
			ck_assert_int_eq(io_read(queue, &input, pieces, 8, NULL, NULL, &error),
					 IOSHAPE_E_DAMAGED);
			/* The queue still works. */
			write_file();
			memset(&error, 0, sizeof(error));
			read_and_compare(8);
			end();
		}
	}
}

TEST(reading_tests, exactly_so_many_bytes_or_damaged)
{
	begin(IOSHAPE_ENGINE_AUTO, IOSHAPE_DIRECT_PREFER);
	ck_assert_int_eq(io_input_get(&input, 77, into, 1000, &error), 0);
	ck_assert_mem_eq(into, data + 77, 1000);
	ck_assert_int_eq(io_input_get(&input, file_bytes, into, 0, &error), 0);
	ck_assert_int_eq(io_input_get(&input, file_bytes - 5, into, 5, &error), 0);
	ck_assert_int_eq(io_input_get(&input, file_bytes - 5, into, 6, &error), IOSHAPE_E_DAMAGED);
	memset(&error, 0, sizeof(error));
	ck_assert_int_eq(io_input_get(&input, file_bytes + 1, into, 1, &error), IOSHAPE_E_DAMAGED);
	end();
}

/* ---- Progress -------------------------------------------------------------------------------- */

struct told {
	unsigned calls, stop_at;
	uint64_t last;
};

static int note_progress(void *user, enum ioshape_phase phase, uint64_t done, uint64_t total)
{
	struct told *told = user;

	ck_assert_int_eq(phase, IOSHAPE_PHASE_READ);
	ck_assert_uint_eq(total, 9 * MIB);
	ck_assert_uint_ge(done, told->last);
	ck_assert_uint_le(done, total);
	told->last = done;
	return ++told->calls == told->stop_at;
}

LOOP_TEST(threads, reading_can_be_stopped_at_any_call, 0, 2)
{
	for (unsigned nth = 1; nth < 40; nth += 1 + nth / 4) {
		struct told told = { .stop_at = nth };
		int ret;

		set_cache(scratch_path("file"), _i ? COLD : WARM);
		begin(IOSHAPE_ENGINE_AUTO, IOSHAPE_DIRECT_PREFER);
		for (size_t k = 0; k < 36; k++)
			pieces[k] = (struct io_piece){ .offset = k * 256 * KIB,
						       .bytes = 256 * KIB,
						       .into = into + k * 256 * KIB };
		ret = io_read(queue, &input, pieces, 36, note_progress, &told, &error);
		ck_assert_int_eq(ret, told.calls >= nth ? -ECANCELED : 0);
		ck_assert_uint_le(told.calls, nth);
		ck_assert_uint_ge(told.calls, 1);
		end();
	}
}
CHECK_ADD(anywhere, reading_can_be_stopped_at_any_call, 0, 2)

/* ---- Parts of files -------------------------------------------------------------------------- */

LOOP_TEST(aligned, nothing_around_a_part_is_ever_read, 0, 2 * ARRAY_LENGTH(engines))
{
	static const uint64_t ends[] = { 1, 4096, 70001 };

	begin(engines[_i % 3], _i % 3 == 2 ? IOSHAPE_DIRECT_OFF : IOSHAPE_DIRECT_PREFER);
	set_cache(scratch_path("file"), _i / 3 ? COLD : WARM);
	ck_assert_uint_eq(input.bytes, file_bytes);
	for (size_t i = 0; i < ARRAY_LENGTH(ends); i++) {
		pieces[0] = (struct io_piece){ .offset = file_bytes - BLOCK,
					       .bytes = BLOCK + ends[i],
					       .into = into };
		memset(&error, 0, sizeof(error));
		ck_assert_int_eq(io_read(queue, &input, pieces, 1, NULL, NULL, &error),
				 IOSHAPE_E_DAMAGED);
		ck_assert_uint_eq(pieces[0].offset, file_bytes - BLOCK);
		memset(&error, 0, sizeof(error));
		ck_assert_int_eq(io_input_get(&input, file_bytes, into, ends[i], &error),
				 IOSHAPE_E_DAMAGED);
		ck_assert_int_eq(io_input_get(&input, -base, into, 1, &error), IOSHAPE_E_DAMAGED);
	}
	end();
}
CHECK_ADD(anywhere, nothing_around_a_part_is_ever_read, 0, 2 * ARRAY_LENGTH(engines))

static struct test_case files_tests = { .name = "files",
					.setup = setup_small,
					.teardown = teardown };

TEST(files_tests, parts_lie_in_their_files)
{
	const uint64_t whole = file_bytes;
	const uint64_t wrong[][2] = { { 0, whole + 1 },
				      { 1, whole },
				      { whole, 1 },
				      { whole + 1, 0 },
				      { 4096, whole - 4095 },
				      { UINT64_MAX, 2 },
				      { 4096, UINT64_MAX - 1 },
				      { UINT64_MAX, UINT64_MAX } };
	const uint64_t right[][2] = {
		{ 0, 1 }, { 0, whole }, { whole - 1, 1 }, { whole, 0 }, { 7, 0 }
	};

	for (size_t i = 0; i < ARRAY_LENGTH(wrong); i++) {
		memset(&error, 0, sizeof(error));
		ck_assert_int_eq(io_input_open(&input, scratch_path("file"), wrong[i][0],
					       wrong[i][1], IOSHAPE_DIRECT_PREFER, &error),
				 IOSHAPE_E_DAMAGED);
		ck_assert_int_eq(input.fd, -1);
	}
	for (size_t i = 0; i < ARRAY_LENGTH(right); i++) {
		ck_assert_int_eq(io_input_open(&input, scratch_path("file"), right[i][0],
					       right[i][1], IOSHAPE_DIRECT_PREFER, &error),
				 0);
		ck_assert_uint_eq(input.bytes, right[i][1]);
		io_input_close(&input);
	}
}

/* ---- Which files can be opened --------------------------------------------------------------- */

static void must_not_open(const char *path, int code)
{
	unsigned before = scratch_descriptors();

	memset(&error, 0, sizeof(error));
	ck_assert_int_eq(io_input_open(&input, path, 0, 0, IOSHAPE_DIRECT_PREFER, &error), code);
	ck_assert_uint_eq(scratch_descriptors(), before);
	io_input_close(&input);
}

TEST(files_tests, only_regular_files_are_read)
{
	must_not_open(scratch_path("missing"), -ENOENT);
	must_not_open(scratch_directory(), -EISDIR);
	must_not_open("/dev/null", -ESPIPE);
	ck_assert_int_eq(mkfifo(scratch_path("pipe"), 0666), 0);
	must_not_open(scratch_path("pipe"), -ESPIPE);
	must_not_open(scratch_path("file/below"), -ENOTDIR);
}

TEST(files_tests, direct_and_buffered_are_the_same_file_whatever_the_name_becomes)
{
	begin(IOSHAPE_ENGINE_AUTO, IOSHAPE_DIRECT_PREFER);
	ck_assert_int_eq(rename(scratch_path("file"), scratch_path("moved")), 0);
	scratch_write(scratch_path("file"), "another", 7);
	scratch_evict(scratch_path("moved"));
	pieces[0] = (struct io_piece){ .bytes = file_bytes, .into = into, .want_crc = true };
	read_and_compare(1);
	end();
}

TEST(files_tests, direct_io_is_refused_where_it_was_required_and_is_not_there)
{
	memset(&error, 0, sizeof(error));
	ck_assert_int_lt(
		io_input_open(&input, "/proc/self/status", 0, 0, IOSHAPE_DIRECT_REQUIRE, &error),
		0);
	ck_assert_int_eq(
		io_input_open(&input, scratch_path("file"), 0, 0, IOSHAPE_DIRECT_OFF, &error), 0);
	ck_assert_int_eq(input.direct_fd, -1);
	io_input_close(&input);
}

/* Several threads may use one open file. */
TEST(files_tests, several_queues_read_one_file)
{
	struct io_config config = { .block_bytes = BLOCK, .depth = 2, .threads = 1 };
	struct io_queue *second;

	begin(IOSHAPE_ENGINE_AUTO, IOSHAPE_DIRECT_PREFER);
	ck_assert_int_eq(io_queue_open(&second, &config, &error), 0);
	for (int i = 0; i < 3; i++) {
		struct io_queue *first = queue;

		scratch_evict(scratch_path("file"));
		pieces[0] =
			(struct io_piece){ .bytes = file_bytes, .into = into, .want_crc = true };
		read_and_compare(1);
		scratch_evict(scratch_path("file"));
		queue = second;
		read_and_compare(1);
		queue = first;
	}
	io_queue_close(second);
	end();
}
