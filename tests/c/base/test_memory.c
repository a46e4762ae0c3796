/* SPDX-License-Identifier: Apache-2.0 */
/* Memory from the kernel, and growing buffers. */
#define _GNU_SOURCE
#include "base/base.h"
#include "support/check_main.h"
#include "support/sandbox.h"
#include "support/scratch.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

/* Makes malloc() return NULL under sanitizers, which otherwise end the program. */
const char *__asan_default_options(void);
const char *__asan_default_options(void)
{
	return "allocator_may_return_null=1";
}

const char *__tsan_default_options(void);
const char *__tsan_default_options(void)
{
	return "allocator_may_return_null=1";
}

static const size_t map_sizes[] = {
	1, 4096, 4097, 2 * MIB - 1, 2 * MIB, 2 * MIB + 1, 6 * MIB + 4096
};

/* Returns the size of the mapping from `memory` on, and its flags, from /proc. */
static size_t mapped_bytes(const void *memory, char *flags, size_t flags_bytes)
{
	FILE *maps = fopen("/proc/self/smaps", "re");
	unsigned long begin, end, wanted = (unsigned long)memory;
	size_t found = 0;
	char line[512];
	bool in_it = false;

	ck_assert_ptr_nonnull(maps);
	while (fgets(line, sizeof(line), maps)) {
		if (sscanf(line, "%lx-%lx ", &begin, &end) == 2) {
			in_it = begin <= wanted && wanted < end;
			if (in_it)
				found = end - wanted;
		} else if (in_it && !strncmp(line, "VmFlags:", 8)) {
			snprintf(flags, flags_bytes, "%s", line);
		}
	}
	fclose(maps);
	return found;
}

static struct test_case maps_tests = { .name = "maps" };

LOOP_TEST(maps_tests, maps_begin_on_a_page_and_hold_what_was_asked_for, 0, ARRAY_LENGTH(map_sizes))
{
	const size_t bytes = map_sizes[_i];
	uint8_t *memory = base_map(bytes);
	char flags[512];

	ck_assert_ptr_nonnull(memory);
	ck_assert_uint_eq((uintptr_t)memory % (bytes >= 2 * MIB ? 2 * MIB : 4096), 0);
	ck_assert_uint_ge(mapped_bytes(memory, flags, sizeof(flags)), bytes);
	ck_assert_uint_eq(memory[0], 0);
	ck_assert_mem_eq(memory, memory + 1, bytes - 1);
	memset(memory, 0x77, bytes);
	base_prefault(memory, bytes); /* keeps the contents */
	ck_assert_uint_eq(memory[0], 0x77);
	ck_assert_mem_eq(memory, memory + 1, bytes - 1);
	base_unmap(memory, bytes);
	ck_assert_uint_eq(mapped_bytes(memory, flags, sizeof(flags)), 0);
}

TEST(maps_tests, more_memory_than_there_are_addresses_is_refused)
{
	ck_assert_ptr_null(base_map((size_t)1 << 62));
	base_unmap(NULL, 4096);
}

/* Runs in a child without MADV_POPULATE_WRITE. */
static int touch_by_hand(void *argument)
{
	size_t bytes = 1024 * (size_t)sysconf(_SC_PAGESIZE);
	unsigned char resident[1024];
	uint8_t *memory = base_map(bytes);

	(void)argument;
	memset(memory, 0x42, bytes / 2);
	if (sandbox_refuse(__NR_madvise, EINVAL))
		return 99;
	base_prefault(memory, bytes);
	if (memory[0] != 0x42 || memcmp(memory, memory + 1, bytes / 2 - 1) != 0 ||
	    memory[bytes / 2])
		return 1;
	if (mincore(memory, bytes, resident))
		return 2;
	for (size_t i = 0; i < ARRAY_LENGTH(resident); i++)
		if (!(resident[i] & 1))
			return 3;
	base_unmap(memory, bytes);
	return 0;
}

TEST(maps_tests, an_older_kernel_touches_pages_all_the_same)
{
	ck_assert_int_eq(scratch_in_child(touch_by_hand, NULL), 0);
}

TEST(maps_tests, touched_pages_are_in_memory)
{
	unsigned char resident[1024];
	const size_t page = (size_t)sysconf(_SC_PAGESIZE), bytes = 1024 * page;
	uint8_t *memory = base_map(bytes);

	base_prefault(memory, bytes);
	ck_assert_int_eq(mincore(memory, bytes, resident), 0);
	for (size_t i = 0; i < ARRAY_LENGTH(resident); i++)
		ck_assert(resident[i] & 1);
	base_unmap(memory, bytes);
}

static int look_for(void *argument)
{
	unsigned char state;

	/* ENOMEM: no memory is mapped at the address. */
	return mincore(argument, (size_t)sysconf(_SC_PAGESIZE), &state) && errno == ENOMEM ? 0 : 1;
}

LOOP_TEST(maps_tests, maps_are_not_inherited_by_children, 0, ARRAY_LENGTH(map_sizes))
{
	void *memory = base_map(map_sizes[_i]);
	int status = scratch_in_child(look_for, memory);

	ck_assert(WIFEXITED(status));
	ck_assert_int_eq(WEXITSTATUS(status), 0);
	base_unmap(memory, map_sizes[_i]);
}

static struct test_case buffers_tests = { .name = "buffers" };

TEST(buffers_tests, a_buffer_keeps_all_that_was_appended)
{
	struct base_buffer buffer = { 0 };
	uint8_t expected[3000];
	size_t used = 0;

	for (size_t length = 0; used + length <= sizeof(expected); length = (length + 7) % 53) {
		for (size_t i = 0; i < length; i++)
			expected[used + i] = (uint8_t)(used + i * 3);
		ck_assert_int_eq(
			base_buffer_append(&buffer, length ? expected + used : NULL, length), 0);
		used += length;
	}
	/* A buffer that cannot grow stays unchanged. */
	ck_assert_int_eq(base_buffer_reserve(&buffer, SIZE_MAX), -ENOMEM);
	ck_assert_int_eq(base_buffer_reserve(&buffer, SIZE_MAX / 4), -ENOMEM);
	ck_assert_uint_eq(buffer.bytes, used);
	ck_assert_mem_eq(buffer.data, expected, used);
	base_buffer_free(&buffer);
	ck_assert_ptr_null(buffer.data);
	base_buffer_free(&buffer);
}

TEST(buffers_tests, a_buffer_does_not_move_within_what_was_reserved)
{
	struct base_buffer buffer = { 0 };
	const uint8_t *before;

	ck_assert_int_eq(base_buffer_reserve(&buffer, 10000), 0);
	before = buffer.data;
	for (int i = 0; i < 10000; i++)
		ck_assert_int_eq(base_buffer_append(&buffer, "x", 1), 0);
	ck_assert_ptr_eq(buffer.data, before);
	base_buffer_free(&buffer);
}

TEST(buffers_tests, numbers_are_little_endian)
{
	static const uint8_t expected[8] = { 0x08, 0x07, 0x06, 0x05, 0x04, 0x03, 0x02, 0x01 };
	uint8_t bytes[9] = { 0 };

	for (unsigned count = 1; count <= 8; count++) {
		memset(bytes, 0xee, sizeof(bytes));
		base_put_le(bytes, 0x0102030405060708ull, count);
		ck_assert_mem_eq(bytes, expected, count);
		ck_assert_uint_eq(bytes[count], 0xee);
		ck_assert_uint_eq(base_get_le(bytes, count),
				  0x0102030405060708ull & (UINT64_MAX >> (64 - 8 * count)));
	}
}

/* ---- Descriptors ----------------------------------------------------------------------------- */

static int owned_fd, plain_fd;

/* Runs in a forked child. */
static int have_only_plain_ones(void *unused)
{
	char byte;

	(void)unused;
	/* The number stays in use, so that it cannot become another file's. */
	if (fcntl(owned_fd, F_GETFD) < 0 || read(owned_fd, &byte, 1) != -1 || errno != EBADF)
		return 1;
	/* base_close() leaves it open: it no longer belongs to the library. */
	if (base_close(owned_fd) || fcntl(owned_fd, F_GETFD) < 0)
		return 2;
	return read(plain_fd, &byte, 1) ? 3 : 0;
}

TEST(buffers_tests, a_child_of_fork_holds_no_file_of_ours)
{
	char byte;

	owned_fd = base_register_fd(open("/dev/null", O_RDONLY | O_CLOEXEC));
	plain_fd = open("/dev/null", O_RDONLY | O_CLOEXEC);
	ck_assert(owned_fd >= 0 && plain_fd >= 0);
	ck_assert_int_eq(scratch_in_child(have_only_plain_ones, NULL), 0);
	ck_assert_int_eq(read(owned_fd, &byte, 1), 0);
	ck_assert_int_eq(base_close(owned_fd), 0);
	ck_assert_int_lt(fcntl(owned_fd, F_GETFD), 0);
	/* Descriptors that are closed or invalid are not closed again. */
	ck_assert_int_eq(base_close(owned_fd), 0);
	ck_assert_int_eq(base_register_fd(-1), -1);
	ck_assert_int_eq(base_close(-1), 0);
	ck_assert(!base_unregister_fd(-1));
	/*
	 * The table has no entry for so high a number, so base_close() closes it as if it were
	 * registered.
	 */
	ck_assert_int_eq(base_register_fd(INT_MAX), INT_MAX);
	ck_assert(base_unregister_fd(INT_MAX));
	ck_assert_int_lt(base_close(INT_MAX), 0);
	close(plain_fd);
}

static int own_with_closed_streams(void *nothing)
{
	struct rlimit streams_only;
	int fd;

	(void)nothing;
	close(STDIN_FILENO);
	close(STDERR_FILENO);
	fd = base_register_fd(open("/dev/null", O_RDONLY | O_CLOEXEC));
	if (fd <= STDERR_FILENO || !(fcntl(fd, F_GETFD) & FD_CLOEXEC))
		return 1;
	if (fcntl(STDIN_FILENO, F_GETFD) >= 0 || fcntl(STDERR_FILENO, F_GETFD) >= 0)
		return 2;
	/* If no number is left, nothing stays open. */
	if (getrlimit(RLIMIT_NOFILE, &streams_only))
		return 3;
	streams_only.rlim_cur = 3;
	if (setrlimit(RLIMIT_NOFILE, &streams_only))
		return 3;
	if (base_register_fd(open("/dev/null", O_RDONLY | O_CLOEXEC)) != -1 ||
	    (errno != EINVAL && errno != EMFILE))
		return 4;
	return fcntl(STDIN_FILENO, F_GETFD) >= 0 ? 5 : 0;
}

/* Output to a closed stderr must not end up in a checkpoint. */
TEST(buffers_tests, no_file_of_ours_takes_the_number_of_a_closed_stream)
{
	ck_assert_int_eq(scratch_in_child(own_with_closed_streams, NULL), 0);
}

static int have_it_closed(void *limit)
{
	const int ret = fcntl(owned_fd, F_GETFD) >= 0;

	/* Restores the limit, for what happens at the end of a process. */
	return ret || setrlimit(RLIMIT_NOFILE, limit);
}

/* Without a free descriptor, no placeholder can replace the file. */
TEST(buffers_tests, a_child_that_may_open_nothing_holds_no_file_of_ours)
{
	struct rlimit limit, none;

	owned_fd = base_register_fd(open("/dev/null", O_RDONLY | O_CLOEXEC));
	ck_assert_int_ge(owned_fd, 0);
	ck_assert_int_eq(getrlimit(RLIMIT_NOFILE, &limit), 0);
	none = limit;
	none.rlim_cur = 0;
	ck_assert_int_eq(setrlimit(RLIMIT_NOFILE, &none), 0);
	ck_assert_int_eq(scratch_in_child(have_it_closed, &limit), 0);
	ck_assert_int_eq(setrlimit(RLIMIT_NOFILE, &limit), 0);
	ck_assert_int_eq(base_close(owned_fd), 0);
}
