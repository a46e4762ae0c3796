/* SPDX-License-Identifier: Apache-2.0 */
/* Directories that appear as a whole or not at all. */
#define _GNU_SOURCE
#include "internal.h"
#include "support/check_main.h"
#include "support/sample.h"
#include "support/scratch.h"

#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

static struct ioshape_context *context;

static void setup(void)
{
	scratch_setup();
	context = sample_context(IOSHAPE_ENGINE_AUTO, IOSHAPE_DIRECT_PREFER);
}

static void teardown(void)
{
	ioshape_context_free(context);
	scratch_teardown();
}

static struct save_directory *make(const char *path)
{
	struct save_directory *directory;

	ck_assert_msg(!save_directory_make(context, path, &directory), "%s",
		      ioshape_last_error()->sentence);
	return directory;
}

static void put(const char *folder, const char *name)
{
	char path[4096];

	snprintf(path, sizeof(path), "%s/%s", folder, name);
	scratch_write(path, "new", 3);
}

static bool is_there(const char *path)
{
	return !access(path, F_OK);
}

static struct test_case directory_tests = { .name = "directory",
					    .setup = setup,
					    .teardown = teardown };

TEST(directory_tests, what_is_filled_appears_whole)
{
	struct save_directory *directory = make(scratch_path("above/ready/"));
	char inside[4096];

	put(save_directory_path(directory), "a");
	put(save_directory_path(directory), "b");
	ck_assert(!is_there(scratch_path("above/ready")));
	ck_assert_int_eq(save_directory_commit(directory), 0);
	ck_assert_int_eq(save_directory_commit(directory), -EINVAL);
	save_directory_free(directory);
	ck_assert_uint_eq(scratch_entries(scratch_path("above")), 1);
	ck_assert_uint_eq(scratch_entries(scratch_path("above/ready")), 2);
	snprintf(inside, sizeof(inside), "%s/a", scratch_path("above/ready"));
	ck_assert(scratch_same(inside, "new", 3));
}

TEST(directory_tests, without_a_commit_nothing_is_left)
{
	struct save_directory *directory = make(scratch_path("ready"));

	put(save_directory_path(directory), "a");
	save_directory_free(directory);
	ck_assert_uint_eq(scratch_entries(scratch_directory()), 0);
}

/* 0: nothing, 1: an empty directory, 2: one with a file, 3: a file. */
LOOP_TEST(directory_tests, only_an_empty_directory_is_replaced, 0, 4)
{
	struct save_directory *directory = make(scratch_path("ready"));

	put(save_directory_path(directory), "a");
	if (_i == 3)
		scratch_write(scratch_path("ready"), "old", 3);
	else if (_i)
		ck_assert_int_eq(mkdir(scratch_path("ready"), 0777), 0);
	if (_i == 2)
		scratch_write(scratch_path("ready/old"), "old", 3);
	ck_assert_int_eq(save_directory_commit(directory), _i < 2 ? 0 : -EEXIST);
	if (_i >= 2) {
		ck_assert_str_eq(ioshape_last_error()->path, scratch_path("ready"));
		ck_assert_uint_eq(scratch_entries(save_directory_path(directory)), 1);
	}
	save_directory_free(directory);
	ck_assert_uint_eq(scratch_entries(scratch_directory()), 1);
	ck_assert(_i == 3 || is_there(scratch_path(_i == 2 ? "ready/old" : "ready/a")));
}

static void fill_and_wait(int ready)
{
	struct save_directory *directory;
	struct ioshape_context *own;

	if (ioshape_context_open(&own, NULL) ||
	    save_directory_make(own, scratch_path("ready"), &directory))
		_exit(1);
	put(save_directory_path(directory), "a");
	if (write(ready, "", 1) != 1)
		_exit(1);
	for (;;)
		pause();
}

/* Makes a directory with a new context, because a context tidies each directory once. */
static void make_and_drop(void)
{
	struct ioshape_context *other = sample_context(IOSHAPE_ENGINE_AUTO, IOSHAPE_DIRECT_PREFER);
	struct save_directory *directory;

	ck_assert_int_eq(save_directory_make(other, scratch_path("ready"), &directory), 0);
	save_directory_free(directory);
	ioshape_context_free(other);
}

TEST(directory_tests, what_a_killed_process_left_goes_with_the_next_and_not_before_it_died)
{
	int ends[2], status;
	pid_t pid;
	char byte;

	ck_assert_int_eq(pipe(ends), 0);
	pid = fork();
	if (!pid)
		fill_and_wait(ends[1]);
	ck_assert_int_eq(read(ends[0], &byte, 1), 1);
	make_and_drop();
	ck_assert_uint_eq(scratch_entries(scratch_directory()), 1);
	kill(pid, SIGKILL);
	ck_assert_int_eq(waitpid(pid, &status, 0), pid);
	make_and_drop();
	ck_assert_uint_eq(scratch_entries(scratch_directory()), 0);
	close(ends[0]);
	close(ends[1]);
}

TEST(directory_tests, arguments_are_checked)
{
	struct save_directory *directory;

	ck_assert_int_eq(save_directory_make(NULL, "ready", &directory), -EINVAL);
	ck_assert_int_eq(save_directory_make(context, NULL, &directory), -EINVAL);
	ck_assert_int_eq(save_directory_make(context, "", &directory), -EINVAL);
	ck_assert_int_eq(save_directory_make(context, "/", &directory), -EINVAL);
	ck_assert_int_eq(save_directory_make(context, "ready", NULL), -EINVAL);
	ck_assert_int_eq(save_directory_commit(NULL), -EINVAL);
	ck_assert_ptr_null(save_directory_path(NULL));
	save_directory_free(NULL);
}
