/* SPDX-License-Identifier: Apache-2.0 */
/* Files written in blocks: every length, every engine, with and without direct I/O. */
#define _GNU_SOURCE
#include "io/queue.h"
#include "support/check_main.h"
#include "support/file_writer.h"
#include "support/random.h"
#include "support/scratch.h"

#include <errno.h>
#include <fcntl.h>
#include <glob.h>
#include <limits.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#define BLOCK (64 * KIB)
#define SMALL (1 * MIB) /* largest file that is written with one plain write */
#define ROOM (6 * MIB)

static const enum ioshape_engine engines[] = { IOSHAPE_ENGINE_URING, IOSHAPE_ENGINE_URING_ASYNC,
					       IOSHAPE_ENGINE_THREADS, IOSHAPE_ENGINE_BUFFERED };
static const char *const engine_names[] = { "uring", "uring-async", "threads", "buffered" };

static uint8_t *data;
static unsigned descriptors_before;

static void setup(void)
{
	uint64_t state = 11;

	scratch_setup();
	data = malloc(ROOM);
	ck_assert_ptr_nonnull(data);
	test_random_fill(&state, data, ROOM);
	descriptors_before = scratch_descriptors();
}

static void teardown(void)
{
	ck_assert_uint_eq(scratch_descriptors(), descriptors_before);
	ck_assert_uint_eq(scratch_temporaries(scratch_directory()), 0);
	free(data);
	scratch_teardown();
}

/* Writes `bytes` in pieces of random length, and compares the file. */
static void write_and_compare(struct file_write *write, size_t bytes, uint64_t seed)
{
	const char *path = scratch_path("file");
	uint32_t crc = 0;

	ck_assert_msg(!file_write_open(write, path), "%s", write->error.text);
	for (size_t done = 0, piece; done < bytes; done += piece) {
		piece = 1 + test_random_below(&seed, 3 * BLOCK / 2);
		piece = MIN(piece, bytes - done);
		ck_assert_uint_eq(io_writer_offset(write->writer), done);
		ck_assert_int_eq(
			io_writer_put(write->writer, data + done, piece, &crc, &write->error), 0);
	}
	ck_assert_uint_eq(io_writer_offset(write->writer), bytes);
	ck_assert_msg(!file_write_end(write), "%s", write->error.text);
	file_write_close(write);
	ck_assert_uint_eq(crc, base_crc32(0, data, bytes));
	ck_assert_msg(scratch_same(path, data, bytes), "%zu bytes, %s", bytes,
		      write->report.engine);
	ck_assert_uint_eq(write->report.file_bytes, bytes);
}

static const size_t lengths[] = {
	0,
	1,
	2,
	511,
	512,
	513,
	4095,
	4096,
	4097,
	BLOCK - 4096,
	BLOCK - 512,
	BLOCK - 1,
	BLOCK,
	BLOCK + 1,
	BLOCK + 511,
	BLOCK + 512,
	BLOCK + 4096,
	2 * BLOCK - 1,
	2 * BLOCK,
	2 * BLOCK + 1,
	4 * BLOCK - 1,
	4 * BLOCK,
	4 * BLOCK + 1,
	5 * BLOCK + 777,
	SMALL - 1,
	SMALL,
	SMALL + 1,
	SMALL + BLOCK,
	2 * SMALL + 1,
	3 * SMALL + 12345,
	5 * SMALL + 3,
};

static struct test_case lengths_case = { .name = "lengths", .setup = setup, .teardown = teardown };

LOOP_TEST(lengths_case, every_length_arrives_through_every_engine, 0, ARRAY_LENGTH(engines))
{
	for (size_t i = 0; i < ARRAY_LENGTH(lengths); i++) {
		for (int direct = 0; direct < 2; direct++) {
			struct file_write write = file_write_defaults();

			write.config.engine = engines[_i];
			write.config.direct = direct ? IOSHAPE_DIRECT_PREFER : IOSHAPE_DIRECT_OFF;
			write.options.no_sync = true;
			write_and_compare(&write, lengths[i], i);
			ck_assert_uint_eq(write.report.direct && !direct, 0);
			if (lengths[i] < BLOCK)
				continue; /* it was written with one plain write */
			ck_assert_str_eq(write.report.engine, engine_names[_i]);
			ck_assert_uint_eq(write.report.direct,
					  direct && scratch_direct() && _i < 3 ? 1u : 0u);
		}
	}
}

/*
 * Writes a piece with a continued checksum, a new one or none. Copies the expected bytes to
 * `expected`.
 */
static void put_somehow(struct file_write *write, uint64_t *seed, uint8_t *expected, size_t bytes)
{
	uint32_t crc = (uint32_t)test_random(seed), before = crc;

	memcpy(expected, data, bytes);
	if (test_random_below(seed, 2)) {
		REQUIRE(!io_writer_put(write->writer, data, bytes, NULL, &write->error));
	} else {
		crc = test_random_below(seed, 2) ? 0 : crc;
		before = crc;
		REQUIRE(!io_writer_put(write->writer, data, bytes, &crc, &write->error));
		ck_assert_uint_eq(crc, base_crc32(before, data, bytes));
	}
}

LOOP_TEST(lengths_case, a_whole_file_has_a_checksum_whatever_it_came_in, 0, ARRAY_LENGTH(engines))
{
	uint8_t *expected = malloc(ROOM);
	uint64_t seed = 5;

	for (size_t i = 0; i < ARRAY_LENGTH(lengths); i++) {
		struct file_write write = file_write_defaults();

		write.config.engine = engines[_i];
		write.options.no_sync = write.options.want_crc32 = true;
		ck_assert_msg(!file_write_open(&write, scratch_path("file")), "%s",
			      write.error.text);
		for (size_t done = 0, piece; done < lengths[i]; done += piece) {
			piece = (size_t)1 << test_random_below(&seed, 20);
			piece = 1 + test_random_below(&seed, piece);
			piece = MIN(piece, lengths[i] - done);
			put_somehow(&write, &seed, expected + done, piece);
		}
		ck_assert_msg(!file_write_end(&write), "%s", write.error.text);
		ck_assert_uint_eq(io_writer_crc32(write.writer),
				  base_crc32(0, expected, lengths[i]));
		file_write_close(&write);
		ck_assert(scratch_same(scratch_path("file"), expected, lengths[i]));
	}
	free(expected);
}

/* Larger than the limit of small files, smaller than a block. */
LOOP_TEST(lengths_case, a_file_within_one_large_block_arrives, 0, ARRAY_LENGTH(engines))
{
	static const size_t sizes[] = { 1,         4097,          SMALL - 1, SMALL,
					SMALL + 1, 3 * SMALL + 5, 4 * SMALL };

	for (size_t i = 0; i < ARRAY_LENGTH(sizes); i++) {
		struct file_write write = file_write_defaults();

		write.config.engine = engines[_i];
		write.options.no_sync = true;
		write.config.block_bytes = 4 * MIB;
		write.config.depth = 2;
		write_and_compare(&write, sizes[i], i);
		/* An engine that is set is used even for a small file. */
		ck_assert_str_eq(write.report.engine, engine_names[_i]);
		write.config.engine = IOSHAPE_ENGINE_AUTO;
		write_and_compare(&write, sizes[i], i);
		ck_assert_int_eq(!strcmp(write.report.engine, "buffered"), sizes[i] <= SMALL);
	}
}

LOOP_TEST(lengths_case, what_is_expected_changes_nothing_but_when_a_full_disk_is_noticed, 0,
	  ARRAY_LENGTH(engines))
{
	static const struct {
		uint64_t expected;
		size_t bytes;
	} cases[] = {
		{ 3 * MIB, 3 * MIB },
		{ 3 * MIB + 17, 3 * MIB + 17 },
		{ 5 * MIB, 2 * MIB + 1 },
		{ 5 * MIB, 100 },
		{ 5 * MIB, 0 },
		{ 2 * MIB, 5 * MIB + 9 },
		{ 1 * MIB + 1, 5 * MIB + 9 },
		{ 1, 5 * MIB },
		{ 64 * MIB, 4 * BLOCK },
	};

	for (size_t i = 0; i < ARRAY_LENGTH(cases); i++) {
		struct file_write write = file_write_defaults();
		struct stat status;

		write.config.engine = engines[_i];
		write.options.no_sync = true;
		write.options.expected_bytes = cases[i].expected;
		write_and_compare(&write, cases[i].bytes, i);
		ck_assert_int_eq(stat(scratch_path("file"), &status), 0);
		/* Unused preallocated space is freed. */
		ck_assert_uint_le((uint64_t)status.st_blocks * 512, cases[i].bytes + MIB);
	}
}

TEST(lengths_case, more_than_the_disk_has_is_noticed_before_the_first_byte)
{
	struct file_write write = file_write_defaults();

	write.options.expected_bytes = 1ull << 50;
	ck_assert_int_lt(file_write_open(&write, scratch_path("file")), 0);
	ck_assert(write.error.code == -ENOSPC || write.error.code == -EFBIG);
	ck_assert_uint_eq(write.error.needed_bytes, 1ull << 50);
	ck_assert_uint_lt(write.error.free_bytes, 1ull << 50);
	file_write_close(&write);
	ck_assert_uint_eq(scratch_entries(scratch_directory()), 0);
}

/*
 * A context uses one queue for file after file: small and large ones, with abandoned ones in
 * between.
 */
LOOP_TEST(lengths_case, a_queue_serves_file_after_file, 0, ARRAY_LENGTH(engines))
{
	struct file_write write = file_write_defaults();
	uint64_t state = 12;

	write.config.engine = engines[_i];
	ck_assert_int_eq(io_queue_open(&write.queue, &write.config, NULL), 0);
	for (int i = 0; i < 40; i++) {
		size_t bytes = lengths[test_random_below(&state, ARRAY_LENGTH(lengths))];

		memset(&write.downgrades, 0, sizeof(write.downgrades));
		write.options.expected_bytes = i % 3 ? bytes : 0;
		write.options.no_sync = i % 5;
		ck_assert_int_eq(io_writer_open(&write.writer, write.queue, scratch_path("file"),
						&write.options, &write.downgrades, &write.error),
				 0);
		ck_assert_int_eq(io_writer_put(write.writer, data, bytes, NULL, &write.error), 0);
		if (i % 4)
			ck_assert_int_eq(file_write_end(&write), 0);
		io_writer_free(write.writer);
		if (i % 4)
			ck_assert(scratch_same(scratch_path("file"), data, bytes));
	}
	io_queue_close(write.queue);
}

/* ---- Required direct I/O --------------------------------------------------------------------- */

static struct test_case direct_tests = { .name = "direct", .setup = setup, .teardown = teardown };

LOOP_TEST(direct_tests, required_direct_io_is_used_for_files_of_any_length, 0,
	  scratch_direct() ? 2 : 0)
{
	for (size_t i = 0; i < ARRAY_LENGTH(lengths); i++) {
		struct file_write write = file_write_defaults();

		write.config.engine = engines[_i];
		write.config.direct = IOSHAPE_DIRECT_REQUIRE;
		write.options.no_sync = true;
		write_and_compare(&write, lengths[i], i);
		if (lengths[i])
			ck_assert_uint_eq(write.report.direct, 1);
	}
}

/* Returns the size of the only file in the scratch directory. */
static uint64_t size_meanwhile(void)
{
	char pattern[PATH_MAX];
	struct stat status;
	glob_t found;

	snprintf(pattern, sizeof(pattern), "%s/.*ioshape-tmp-*", scratch_directory());
	REQUIRE(!glob(pattern, 0, NULL, &found));
	REQUIRE(found.gl_pathc == 1);
	REQUIRE(!stat(found.gl_pathv[0], &status));
	globfree(&found);
	return (uint64_t)status.st_size;
}

/* A direct write that extends a file waits for all others of the file. So the file has a length
 * beyond them before they leave, also if the length that the caller expected was too small. */
LOOP_TEST(direct_tests, direct_writes_never_extend_the_file, 0, scratch_direct() ? 2 : 0)
{
	struct file_write write = file_write_defaults();
	const char *path = scratch_path("file");

	write.config.direct = IOSHAPE_DIRECT_REQUIRE;
	write.options.no_sync = true;
	write.options.expected_bytes = _i ? 2 * MIB : 0;
	ck_assert_msg(!file_write_open(&write, path), "%s", write.error.text);
	for (size_t done = 0; done < ROOM; done += BLOCK) {
		REQUIRE(!io_writer_put(write.writer, data + done, BLOCK, NULL, &write.error));
		ck_assert_uint_ge(size_meanwhile(), done + BLOCK);
	}
	ck_assert_uint_ge(size_meanwhile(), 2 * ROOM);
	ck_assert_msg(!file_write_end(&write), "%s", write.error.text);
	file_write_close(&write);
	ck_assert(scratch_same(path, data, ROOM));
}

LOOP_TEST(direct_tests, direct_io_leaves_nothing_in_the_page_cache, 0, scratch_direct() ? 2 : 0)
{
	struct file_write write = file_write_defaults();
	unsigned char *resident;
	size_t pages, cached = 0;
	void *view;
	int fd;

	write.config.engine = engines[_i];
	write_and_compare(&write, 0, 1);
	write = file_write_defaults();
	write.config.engine = engines[_i];
	ck_assert_int_eq(file_write_all(&write, scratch_path("file"), data, 5 * MIB), 0);
	ck_assert_uint_eq(write.report.direct, 1);
	fd = open(scratch_path("file"), O_RDONLY | O_CLOEXEC);
	view = mmap(NULL, 5 * MIB, PROT_READ, MAP_SHARED, fd, 0);
	pages = 5 * MIB / (size_t)sysconf(_SC_PAGESIZE);
	resident = calloc(pages, 1);
	ck_assert_int_eq(mincore(view, 5 * MIB, resident), 0);
	for (size_t i = 0; i < pages; i++)
		cached += resident[i] & 1;
	ck_assert_uint_le(cached, pages / 20);
	munmap(view, 5 * MIB);
	close(fd);
	free(resident);
}

/* ---- Progress and stopping ------------------------------------------------------------------- */

struct told {
	unsigned calls, stop_at;
	enum ioshape_phase last_phase;
	uint64_t last_done;
	uint64_t total;
	unsigned phases[IOSHAPE_PHASE_DONE + 1];
};

static int note_progress(void *user, enum ioshape_phase phase, uint64_t done, uint64_t total)
{
	struct told *told = user;

	ck_assert_int_ge(phase, told->last_phase);
	ck_assert_uint_ge(done, told->last_done);
	ck_assert_uint_eq(total, told->total);
	told->last_phase = phase;
	told->last_done = done;
	told->phases[phase]++;
	return ++told->calls == told->stop_at;
}

static int write_telling(struct file_write *write, struct told *told, size_t bytes)
{
	*write = file_write_defaults();
	write->options.progress = note_progress;
	write->options.progress_user = told;
	write->options.progress_total = told->total = bytes;
	return file_write_all(write, scratch_path("file"), data, bytes);
}

static struct test_case stop_tests = { .name = "progress", .setup = setup, .teardown = teardown };

TEST(stop_tests, progress_is_told_phase_by_phase_and_block_by_block)
{
	struct told told = { 0 };
	struct file_write write;

	ck_assert_int_eq(write_telling(&write, &told, 10 * BLOCK + 5), 0);
	ck_assert_uint_eq(told.phases[IOSHAPE_PHASE_PLAN], 1);
	ck_assert_uint_eq(told.phases[IOSHAPE_PHASE_WRITE], 11);
	ck_assert_uint_eq(told.phases[IOSHAPE_PHASE_SYNC], 1);
	ck_assert_uint_eq(told.phases[IOSHAPE_PHASE_COMMIT], 1);
	ck_assert_uint_eq(told.phases[IOSHAPE_PHASE_DONE], 1);
	ck_assert_uint_eq(told.last_done, 10 * BLOCK + 5);
}

TEST(stop_tests, another_thread_can_stop_the_write)
{
	for (int step = 0; step < 3; step++) {
		struct file_write write = file_write_defaults();
		atomic_bool abort = false;

		write.options.abort = &abort;
		ck_assert_int_eq(file_write_open(&write, scratch_path("file")), 0);
		if (step == 0)
			atomic_store(&abort, true);
		ck_assert_int_eq(io_writer_put(write.writer, data, 4 * BLOCK, NULL, &write.error),
				 step ? 0 : -ECANCELED);
		if (step == 1)
			atomic_store(&abort, true);
		if (step > 0)
			ck_assert_int_eq(io_writer_finish(write.writer, &write.error),
					 step > 1 ? 0 : -ECANCELED);
		atomic_store(&abort, true);
		if (step > 1)
			ck_assert_int_eq(io_writer_commit(write.writer, &write.error), -ECANCELED);
		file_write_close(&write);
		ck_assert_uint_eq(scratch_entries(scratch_directory()), 0);
	}
}

TEST(stop_tests, after_a_failure_nothing_goes_on)
{
	struct file_write write = file_write_defaults();
	atomic_bool abort = true;

	write.options.abort = &abort;
	abort = false;
	ck_assert_int_eq(file_write_open(&write, scratch_path("file")), 0);
	abort = true;
	ck_assert_int_eq(io_writer_put(write.writer, data, 4 * BLOCK, NULL, &write.error),
			 -ECANCELED);
	abort = false;
	memset(&write.error, 0, sizeof(write.error));
	ck_assert_int_lt(io_writer_put(write.writer, data, BLOCK, NULL, &write.error), 0);
	ck_assert_int_lt(io_writer_put(write.writer, data, 1, NULL, NULL), 0);
	ck_assert_int_lt(io_writer_finish(write.writer, NULL), 0);
	ck_assert_int_lt(io_writer_commit(write.writer, NULL), 0);
	file_write_close(&write);
	ck_assert_uint_eq(scratch_entries(scratch_directory()), 0);
}

/* ---- Limits of the process ------------------------------------------------------------------- */

/* Writes a file above `ulimit -f`. The signal for that would end the application, so it must not be
 * raised. */
static int write_above_the_limit(void *argument)
{
	const struct rlimit limit = { 2 * MIB, 2 * MIB };
	struct file_write write = file_write_defaults();
	int which = *(int *)argument;

	if (setrlimit(RLIMIT_FSIZE, &limit))
		return 99;
	write.config.engine = engines[which / 2];
	write.options.expected_bytes = which % 2 ? 5 * MIB : 0;
	if (file_write_all(&write, "file", data, 5 * MIB) != -EFBIG)
		return 1;
	return *write.error.remedy ? 0 : 2;
}

static struct test_case limits_tests = { .name = "limits", .setup = setup, .teardown = teardown };

LOOP_TEST(limits_tests, a_file_above_the_processes_limit_is_an_error_and_no_signal, 0,
	  2 * ARRAY_LENGTH(engines))
{
	ck_assert_int_eq(chdir(scratch_directory()), 0);
	ck_assert_int_eq(scratch_in_child(write_above_the_limit, &_i), 0);
	ck_assert_uint_eq(scratch_entries(scratch_directory()), 0);
	ck_assert_int_eq(chdir("/"), 0);
}

/* ---- When the next writer may begin ---------------------------------------------------------- */

static void see_block(void *user, uint64_t bytes)
{
	*(uint64_t *)user += bytes;
}

/* Returns whether little of the file is in flight before it is finished. */
static bool is_little_left(enum ioshape_engine engine, enum ioshape_direct direct)
{
	struct file_write write = file_write_defaults();
	uint64_t passed = 0;
	bool is_little;

	write.config.engine = engine;
	write.config.direct = direct;
	write.options = (struct io_file_options){
		.before_block = see_block,
		.before_block_user = &passed,
	};
	ck_assert_int_eq(file_write_open(&write, scratch_path("turn")), 0);
	ck_assert_int_eq(io_writer_put(write.writer, data, 2 * SMALL + 777, NULL, &write.error), 0);
	ck_assert_int_eq(io_writer_end(write.writer, &is_little, &write.error), 0);
	ck_assert_uint_eq(passed, 2 * SMALL + 777);
	ck_assert_int_eq(file_write_end(&write), 0);
	file_write_close(&write);
	ck_assert_uint_eq(passed, 2 * SMALL + 777);
	ck_assert(scratch_same(scratch_path("turn"), data, 2 * SMALL + 777));
	return is_little;
}

TEST(stop_tests, the_next_writer_may_begin_before_the_sync_if_the_bytes_are_past_the_cache)
{
	ck_assert(is_little_left(IOSHAPE_ENGINE_URING, IOSHAPE_DIRECT_REQUIRE));
	ck_assert(is_little_left(IOSHAPE_ENGINE_THREADS, IOSHAPE_DIRECT_REQUIRE));
	/* In the page cache, bytes leave only at the sync. */
	ck_assert(!is_little_left(IOSHAPE_ENGINE_URING, IOSHAPE_DIRECT_OFF));
	ck_assert(!is_little_left(IOSHAPE_ENGINE_BUFFERED, IOSHAPE_DIRECT_PREFER));
}

static unsigned tail_of(bool shared, uint32_t in_flight)
{
	struct io_queue queue = {
		.shape = { .block_bytes = MIB, .shared = shared },
		.limit = 56,
		.in_flight = 10,
		.depth = { .limit = in_flight },
	};

	/* At 10 MiB/s less than one more request is done while the next file begins. */
	return io_queue_tail(&queue, 20 * MIB, 1000000000, 0);
}

TEST(stop_tests, where_several_write_to_what_is_not_known_a_turn_ends_later)
{
	ck_assert_uint_eq(tail_of(false, 3), 7);
	ck_assert_uint_eq(tail_of(true, 3), 3);
	ck_assert_uint_eq(tail_of(true, 50), 28);
}
