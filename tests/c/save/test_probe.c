/* SPDX-License-Identifier: Apache-2.0 */
/* Storage information for paths of all kinds. */
#define _GNU_SOURCE
#include "internal.h"
#include "support/check_main.h"
#include "support/open_context.h"
#include "support/sample.h"
#include "support/scratch.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

static struct ioshape_context *context;
static char real[PATH_MAX];

static void setup(void)
{
	scratch_setup();
	ck_assert_ptr_nonnull(realpath(scratch_directory(), real));
	context = sample_context(IOSHAPE_ENGINE_AUTO, IOSHAPE_DIRECT_PREFER);
}

static void teardown(void)
{
	ioshape_context_free(context);
	scratch_teardown();
}

static struct save_probe probe(const char *path)
{
	struct save_probe found;
	int ret = save_probe_path(context, path, 0, 0, &found);

	ck_assert_msg(!ret, "%s: %d", path, ret);
	return found;
}

static void expect_directory(const char *path, const char *directory)
{
	ck_assert_str_eq(probe(path).directory, directory);
}

static struct test_case paths = { .name = "paths", .setup = setup, .teardown = teardown };

TEST(paths, a_directory_is_described_and_left_alone)
{
	const unsigned descriptors = scratch_descriptors();

	expect_directory(scratch_directory(), real);
	ck_assert_uint_eq(probe(scratch_directory()).for_bytes, UINT64_C(4) << 30);
	ck_assert_str_ne(probe(scratch_directory()).engine, "");
	ck_assert_uint_eq(scratch_entries(scratch_directory()), 0);
	ck_assert_uint_eq(scratch_descriptors(), descriptors);
}

/* All of these paths have the directory in common. */
TEST(paths, a_file_a_link_and_a_name_to_be_mean_their_directory)
{
	const char *const names[] = { "file", "link", "new.pt", "new/", "pipe" };

	scratch_write(scratch_path("file"), "x", 1);
	ck_assert_int_eq(symlink("file", scratch_path("link")), 0);
	ck_assert_int_eq(mkfifo(scratch_path("pipe"), 0600), 0);
	for (size_t i = 0; i < sizeof(names) / sizeof(names[0]); i++)
		expect_directory(scratch_path(names[i]), real);
	ck_assert(probe(scratch_path("file")).is_file);
	ck_assert(probe(scratch_path("link")).is_file);
}

TEST(paths, a_name_without_a_directory_is_in_this_one)
{
	int here = open(".", O_RDONLY | O_DIRECTORY);

	ck_assert_int_eq(chdir(scratch_directory()), 0);
	expect_directory("new.pt", real);
	expect_directory("/new-in-the-root", "/");
	ck_assert_int_eq(fchdir(here), 0);
	close(here);
}

TEST(paths, the_plan_is_for_what_is_asked)
{
	struct ioshape_context_options settings = IOSHAPE_CONTEXT_OPTIONS_INIT;
	struct save_probe found;

	ioshape_context_free(context);
	settings.engine = IOSHAPE_ENGINE_THREADS;
	settings.slots = 7;
	settings.pool = "shared";
	ck_assert_int_eq(
		open_context_with(&context, &settings,
				  (struct test_rules){ .block_bytes = 1 << 20, .queue_depth = 3 }),
		0);
	ck_assert_int_eq(save_probe_path(context, scratch_directory(), 12345, 9, &found), 0);
	ck_assert_uint_eq(found.for_bytes, 12345);
	ck_assert_str_eq(found.engine, "threads");
	ck_assert_uint_eq(found.block_bytes, 1 << 20);
	ck_assert_uint_eq(found.queue_depth, 3);
	ck_assert_uint_eq(found.writers, 7);
	ck_assert_str_eq(found.pool, "shared");
}

TEST(paths, what_cannot_be_looked_at_is_refused)
{
	const char *path = scratch_path("none/new.pt");
	struct save_probe found;

	ck_assert_int_eq(save_probe_path(context, path, 0, 0, &found), -ENOENT);
	ck_assert_str_eq(ioshape_last_error()->path, path);
	scratch_write(scratch_path("file"), "x", 1);
	ck_assert_int_eq(save_probe_path(context, scratch_path("file/new.pt"), 0, 0, &found),
			 -ENOTDIR);
	ck_assert_int_eq(save_probe_path(context, "", 0, 0, &found), -EINVAL);
}

static int probe_in_child(void *unused)
{
	struct save_probe found;
	int ret = save_probe_path(context, scratch_directory(), 0, 0, &found);

	(void)unused;
	scratch_leave_child(ret == -EPERM ? 0 : 1);
}

TEST(paths, in_a_child_it_touches_nothing)
{
	ck_assert_int_eq(scratch_in_child(probe_in_child, NULL), 0);
}
