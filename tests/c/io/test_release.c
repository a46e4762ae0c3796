/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Large files that have no name left are closed by a thread, because freeing their space may take
 * long.
 */
#define _GNU_SOURCE
/* Included, because it tests static functions. */
#include "io/atomic_file.c"
#include "support/check_main.h"
#include "support/scratch.h"

#include <fcntl.h>
#include <unistd.h>

static struct test_case tests = { .name = "release",
				  .setup = scratch_setup,
				  .teardown = scratch_teardown };

static int open_file(off_t bytes, bool named)
{
	const int fd =
		base_register_fd(open(scratch_path("file"), O_RDWR | O_CREAT | O_CLOEXEC, 0600));

	ck_assert_int_ge(fd, 0);
	ck_assert_int_eq(ftruncate(fd, bytes), 0);
	if (!named)
		ck_assert_int_eq(unlink(scratch_path("file")), 0);
	return fd;
}

TEST(tests, all_are_closed_in_the_end)
{
	static const off_t sizes[] = { 0, 4096, 64 * MIB, GIB };
	unsigned before;

	ck_assert(!await_releases());
	before = scratch_descriptors();
	for (size_t i = 0; i < ARRAY_LENGTH(sizes); i++) {
		release_fd(open_file(sizes[i], true));
		release_fd(open_file(sizes[i], false));
	}
	release_fd(-1);
	await_releases();
	ck_assert(!await_releases());
	ck_assert_uint_eq(scratch_descriptors(), before);
}

/* Many files, so that a thread is still closing one when the wait begins. */
TEST(tests, who_needs_their_space_waits_for_them)
{
	const unsigned before = scratch_descriptors();
	bool waited = false;

	for (unsigned round = 0; !waited && round < scratch_rounds(1000); round++) {
		for (int i = 0; i < 8; i++)
			release_fd(open_file(64 * MIB, false));
		waited = await_releases();
		ck_assert_uint_eq(scratch_descriptors(), before);
	}
}
