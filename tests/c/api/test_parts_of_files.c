/* SPDX-License-Identifier: Apache-2.0 */
/* A file that several processes write at once, each its own range. */
#define _GNU_SOURCE
#include "support/check_main.h"
#include "support/random.h"
#include "support/sample.h"
#include "support/scratch.h"

#include <errno.h>
#include <fcntl.h>
#include <stdbool.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#define MIB ((size_t)1 << 20)
#define PARTS 4u
#define PAIRS (PARTS * PARTS)
#define PART_BYTES (2 * MIB)

static struct ioshape_context *context;
static uint8_t *data; /* expected contents of the file */
static unsigned descriptors_before;

static void setup(void)
{
	uint64_t state = 5;

	scratch_setup();
	data = malloc(PARTS * PART_BYTES);
	ck_assert_ptr_nonnull(data);
	test_random_fill(&state, data, PARTS * PART_BYTES);
	descriptors_before = scratch_descriptors();
	context = sample_context(IOSHAPE_ENGINE_AUTO, IOSHAPE_DIRECT_PREFER);
}

static void teardown(void)
{
	ioshape_context_free(context);
	ck_assert_uint_eq(scratch_descriptors(), descriptors_before);
	ck_assert_uint_eq(scratch_temporaries(scratch_directory()), 0);
	free(data);
	scratch_teardown();
}

static struct ioshape_file_options options_of(unsigned part, uint64_t expected)
{
	struct ioshape_file_options options = IOSHAPE_FILE_OPTIONS_INIT;

	options.part_bytes = PART_BYTES;
	options.part_offset = part * PART_BYTES;
	options.file_bytes = PARTS * PART_BYTES;
	options.expected_bytes = expected;
	return options;
}

/* Writes a range with this context. In practice each process has its own. */
static int write_part(struct ioshape_context *in, unsigned part, size_t bytes, uint64_t expected,
		      bool commit, struct ioshape_report *report)
{
	const struct ioshape_file_options options = options_of(part, expected);
	struct ioshape_file *file;
	int ret;

	ret = ioshape_file_open(in, scratch_path("file"), &options, &file);
	if (!ret)
		ret = ioshape_file_write(file, data + part * PART_BYTES, bytes);
	if (!ret && commit)
		ret = ioshape_file_commit(file, report);
	ioshape_file_free(file);
	return ret;
}

static void check_part(unsigned part, size_t bytes)
{
	uint8_t *back = malloc(bytes);
	const int fd = open(scratch_path("file"), O_RDONLY | O_CLOEXEC);

	ck_assert_int_ge(fd, 0);
	ck_assert_int_eq(pread(fd, back, bytes, (off_t)(part * PART_BYTES)), (ssize_t)bytes);
	ck_assert_mem_eq(back, data + part * PART_BYTES, bytes);
	close(fd);
	free(back);
}

/* Small ranges are buffered and large ones direct, with and without preallocation, in any order. */
static const size_t lengths[] = { 1, 4097, MIB + 1, PART_BYTES };

static struct test_case parts_tests = { .name = "parts", .setup = setup, .teardown = teardown };

LOOP_TEST(parts_tests, each_part_lies_where_it_shall_whoever_comes_first, 0, PAIRS)
{
	const unsigned first = (unsigned)_i % PARTS;
	struct ioshape_report report = IOSHAPE_REPORT_INIT;

	for (unsigned i = 0; i < PARTS; i++) {
		const unsigned part = (first + i) % PARTS;
		const size_t bytes = lengths[(part + (unsigned)_i / PARTS) % PARTS];

		ck_assert_int_eq(
			write_part(context, part, bytes, _i % 2 ? bytes : 0, true, &report), 0);
		ck_assert_uint_eq(report.file_bytes, bytes);
	}
	for (unsigned part = 0; part < PARTS; part++)
		check_part(part, lengths[(part + (unsigned)_i / PARTS) % PARTS]);
	ck_assert_uint_eq(scratch_entries(scratch_directory()), 1);
}

static int write_in_child(void *argument)
{
	const unsigned part = *(const unsigned *)argument;
	struct ioshape_context *own = sample_context(IOSHAPE_ENGINE_AUTO, IOSHAPE_DIRECT_PREFER);
	const int ret = write_part(own, part, PART_BYTES, part % 2 ? PART_BYTES : 0, true, NULL);

	ioshape_context_free(own);
	return ret != 0;
}

TEST(parts_tests, processes_write_one_file_at_the_same_time)
{
	unsigned parts[PARTS];
	pid_t children[PARTS];
	int status;

	for (unsigned part = 0; part < PARTS; part++) {
		parts[part] = part;
		children[part] = fork();
		if (!children[part])
			scratch_leave_child(write_in_child(&parts[part]));
	}
	for (unsigned part = 0; part < PARTS; part++) {
		ck_assert_int_eq(waitpid(children[part], &status, 0), children[part]);
		ck_assert_int_eq(status, 0);
	}
	ck_assert(scratch_same(scratch_path("file"), data, PARTS * PART_BYTES));
}

TEST(parts_tests, a_part_without_a_commit_leaves_the_others)
{
	ck_assert_int_eq(write_part(context, 1, PART_BYTES, PART_BYTES, true, NULL), 0);
	ck_assert_int_eq(write_part(context, 0, PART_BYTES - 1, 0, false, NULL), 0);
	ck_assert_int_eq(write_part(context, 2, PART_BYTES - 1, PART_BYTES, false, NULL), 0);
	check_part(1, PART_BYTES);
}

/* The bytes are in a file that the path no longer names. */
TEST(parts_tests, a_part_of_a_file_that_is_gone_is_not_saved)
{
	struct ioshape_file_options options = options_of(0, 0);
	struct ioshape_file *file;

	for (int made_again = 0; made_again < 2; made_again++) {
		ck_assert_int_eq(ioshape_file_open(context, scratch_path("file"), &options, &file),
				 0);
		ck_assert_int_eq(ioshape_file_write(file, data, PART_BYTES), 0);
		ck_assert_int_eq(unlink(scratch_path("file")), 0);
		if (made_again)
			scratch_write(scratch_path("file"), data, 1);
		ck_assert_int_eq(ioshape_file_commit(file, NULL), -ESTALE);
		ioshape_file_free(file);
	}
}

/* Neither data nor the padding of direct I/O reaches beyond the range. */
TEST(parts_tests, nothing_is_written_outside_a_part)
{
	struct ioshape_file_options options = options_of(1, 0);
	struct ioshape_file *file;

	scratch_write(scratch_path("file"), data, PARTS * PART_BYTES);
	ck_assert_int_eq(ioshape_file_open(context, scratch_path("file"), &options, &file), 0);
	ck_assert_int_eq(ioshape_file_write(file, data + PART_BYTES, PART_BYTES - 5), 0);
	ck_assert_int_eq(ioshape_file_commit(file, NULL), 0);
	ioshape_file_free(file);
	ck_assert_int_eq(write_part(context, 0, PART_BYTES, 0, true, NULL), 0);
	check_part(2, PART_BYTES);

	ck_assert_int_eq(ioshape_file_open(context, scratch_path("file"), &options, &file), 0);
	ck_assert_int_eq(ioshape_file_write(file, data + PART_BYTES, PART_BYTES), 0);
	ck_assert_int_eq(ioshape_file_write(file, data, 1), 0); /* still buffered */
	ck_assert_int_eq(ioshape_file_commit(file, NULL), -EFBIG);
	ck_assert_ptr_nonnull(strstr(ioshape_last_error()->sentence, "a part of 2.0 MiB"));
	ioshape_file_free(file);
	check_part(2, PART_BYTES);
	options.expected_bytes = PART_BYTES + 1;
	ck_assert_int_eq(ioshape_file_open(context, scratch_path("file"), &options, &file), -EFBIG);
	for (unsigned part = 2; part < PARTS; part++)
		check_part(part, PART_BYTES);
}

TEST(parts_tests, parts_are_checked)
{
	static const struct {
		uint64_t bytes, offset, of_file;
		enum ioshape_keep_checksums checksums;
	} refused[] = {
		{ .offset = MIB },
		{ .of_file = MIB },
		{ .bytes = MIB + 1 },
		{ .bytes = MIB, .offset = 4096 },
		{ .bytes = MIB, .offset = (UINT64_C(1) << 63) - MIB },
		{ .bytes = MIB, .checksums = IOSHAPE_CHECKSUMS_BESIDE },
	};
	struct ioshape_file_options options = IOSHAPE_FILE_OPTIONS_INIT;
	struct ioshape_file *file;

	for (size_t i = 0; i < sizeof(refused) / sizeof(refused[0]); i++) {
		options.part_bytes = refused[i].bytes;
		options.part_offset = refused[i].offset;
		options.file_bytes = refused[i].of_file;
		options.checksums = refused[i].checksums;
		ck_assert_int_eq(ioshape_file_open(context, scratch_path("file"), &options, &file),
				 -EINVAL);
	}
	options = options_of(0, 0);
	ck_assert_int_eq(ioshape_file_open(context, "/dev/null", &options, &file), -EINVAL);
	ck_assert_int_eq(ioshape_file_open(context, scratch_path("x/y"), &options, &file), -ENOENT);
	ck_assert_int_eq(mkdir(scratch_path("folder"), 0700), 0);
	ck_assert_int_eq(ioshape_file_open(context, scratch_path("folder"), &options, &file),
			 -EISDIR);
	ck_assert_uint_eq(scratch_entries(scratch_directory()), 1);
}

/* The limit applies to offsets from the beginning of the file. */
TEST(parts_tests, a_part_beyond_the_largest_file_is_refused)
{
	struct rlimit limit, before;
	int small, large;

	ck_assert_int_eq(getrlimit(RLIMIT_FSIZE, &before), 0);
	limit = before;
	limit.rlim_cur = PART_BYTES;
	ck_assert_int_eq(setrlimit(RLIMIT_FSIZE, &limit), 0);
	small = write_part(context, 0, PART_BYTES, 0, true, NULL);
	large = write_part(context, 1, PART_BYTES, PART_BYTES, true, NULL);
	ck_assert_int_eq(setrlimit(RLIMIT_FSIZE, &before), 0);
	ck_assert_int_eq(small, 0);
	ck_assert_int_eq(large, -EFBIG);
	check_part(0, PART_BYTES);
}
