/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Memory that processes share, on kernels that lack newer calls: either all of it is there, or
 * there is an error. Touching it never ends the process.
 */
#define _GNU_SOURCE
#include "base/base.h"
#include "support/calls.h"
#include "support/check_main.h"

#include <errno.h>
#include <string.h>

#define BYTES (3 * MIB)

static struct test_case tests = { .name = "shared" };

static int look_at(int fd, const void *memory)
{
	const void *view;
	uint64_t bytes;
	int ret = base_shared_view(fd, &view, &bytes);

	if (ret)
		return ret;
	/* No assertion here: it would make counted calls. */
	ret = bytes != BYTES || memcmp(view, memory, BYTES) ? -EBADMSG : 0;
	base_unmap((void *)(uintptr_t)view, bytes);
	return ret;
}

/* Uses shared memory like a save: writes all of it, and reads it through a second mapping. */
static int use(void)
{
	void *memory = NULL;
	const int fd = base_shared_open();
	int ret = fd < 0 ? fd : base_shared_grow(fd, BYTES);

	if (!ret)
		ret = base_shared_map(fd, 0, BYTES, &memory);
	if (!ret) {
		memset(memory, 7, BYTES);
		ret = look_at(fd, memory);
		base_unmap(memory, BYTES);
		base_shared_drop(fd, 0, BYTES);
	}
	if (fd >= 0)
		base_close(fd);
	return ret;
}

/* Before Linux 5.14 there is no MADV_POPULATE_WRITE, so fallocate() creates the pages. */
TEST(tests, an_older_kernel_makes_all_pages_beforehand)
{
	calls_deny("madvise", EINVAL);
	calls_begin(CALLS_COUNT, 0, 0);
	ck_assert_int_eq(use(), 0);
	calls_end();
	ck_assert_int_ge(calls_find("fallocate64", 0), 0);
}

/*
 * A profiler's signals interrupt fallocate(), which is then repeated. Other failures are returned.
 */
TEST(tests, an_older_kernel_is_asked_again_after_a_signal)
{
	calls_deny("madvise", EINVAL);
	calls_begin_named("fallocate64", EINTR);
	ck_assert_int_eq(use(), 0);
	calls_begin_named("fallocate64", ENOSPC);
	ck_assert_int_eq(use(), -ENOMEM);
	calls_begin_named("fallocate64", EPERM);
	ck_assert_int_eq(use(), -EPERM);
	calls_end();
}

TEST(tests, signals_without_end_are_given_up)
{
	calls_deny("madvise", EINVAL);
	calls_deny("fallocate64", EINTR);
	calls_begin(CALLS_COUNT, 0, 0);
	ck_assert_int_eq(use(), -EINTR);
	calls_end();
}
