/* SPDX-License-Identifier: Apache-2.0 */
/* ioshape_probe(): what a path sits on, whatever the path is. */
#define _GNU_SOURCE
#include "support/check_main.h"
#include "support/sample.h"
#include "support/scratch.h"

#include <ioshape/probe.h>

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

/* The answer has this member. */
static void expect(const char *path, const struct ioshape_probe_options *options,
		   const char *member)
{
	char *json = NULL;
	int ret = ioshape_probe(context, path, options, &json);

	ck_assert_msg(!ret, "%s: %d", path, ret);
	ck_assert_msg(strstr(json, member) != NULL, "%s: no %s in %s", path, member, json);
	ioshape_free(json);
}

static void expect_directory(const char *path, const char *directory)
{
	char member[PATH_MAX + 32];

	snprintf(member, sizeof(member), "\"directory\": \"%s\"", directory);
	expect(path, NULL, member);
}

static struct test_case paths = { .name = "paths", .setup = setup, .teardown = teardown };

TEST(paths, a_directory_is_described_and_left_alone)
{
	const unsigned descriptors = scratch_descriptors();

	expect_directory(scratch_directory(), real);
	expect(scratch_directory(), NULL, "\"for_bytes\": 4294967296");
	expect(scratch_directory(), NULL, "\"engine\": \"");
	ck_assert_uint_eq(scratch_entries(scratch_directory()), 0);
	ck_assert_uint_eq(scratch_descriptors(), descriptors);
}

/* They all have the directory in common. */
TEST(paths, a_file_a_link_and_a_name_to_be_mean_their_directory)
{
	const char *const names[] = { "file", "link", "new.pt", "new/", "pipe" };

	scratch_write(scratch_path("file"), "x", 1);
	ck_assert_int_eq(symlink("file", scratch_path("link")), 0);
	ck_assert_int_eq(mkfifo(scratch_path("pipe"), 0600), 0);
	for (size_t i = 0; i < sizeof(names) / sizeof(names[0]); i++)
		expect_directory(scratch_path(names[i]), real);
	expect(scratch_path("file"), NULL, "\"is_file\": true");
	expect(scratch_path("link"), NULL, "\"is_file\": true");
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
	static const char *const members[] = {
		"\"for_bytes\": 12345", "\"engine\": \"threads\"", "\"block_bytes\": 1048576",
		"\"queue_depth\": 3",   "\"writers\": 7",          "\"pool\": \"shared\"",
	};
	struct ioshape_probe_options options = IOSHAPE_PROBE_OPTIONS_INIT;
	struct ioshape_context_options settings = IOSHAPE_CONTEXT_OPTIONS_INIT;

	ioshape_context_free(context);
	settings.engine = IOSHAPE_ENGINE_THREADS;
	settings.block_bytes = 1 << 20;
	settings.queue_depth = 3;
	settings.slots = 7;
	settings.pool = "shared";
	ck_assert_int_eq(ioshape_context_open(&context, &settings), 0);
	options.bytes = 12345;
	options.files = 9;
	for (size_t i = 0; i < sizeof(members) / sizeof(members[0]); i++)
		expect(scratch_directory(), &options, members[i]);
}

TEST(paths, what_cannot_be_looked_at_is_refused)
{
	struct ioshape_probe_options options = IOSHAPE_PROBE_OPTIONS_INIT;
	const char *path = scratch_path("none/new.pt");
	char *json = (char *)&json;

	ck_assert_int_eq(ioshape_probe(context, path, NULL, &json), -ENOENT);
	ck_assert_ptr_null(json);
	ck_assert_str_eq(ioshape_last_error()->path, path);
	scratch_write(scratch_path("file"), "x", 1);
	ck_assert_int_eq(ioshape_probe(context, scratch_path("file/new.pt"), NULL, &json),
			 -ENOTDIR);
	ck_assert_int_eq(ioshape_probe(context, "", NULL, &json), -EINVAL);
	ck_assert_int_eq(ioshape_probe(context, NULL, NULL, &json), -EINVAL);
	ck_assert_int_eq(ioshape_probe(NULL, path, NULL, &json), -EINVAL);
	ck_assert_int_eq(ioshape_probe(context, path, NULL, NULL), -EINVAL);
	options.size = 0;
	ck_assert_int_eq(ioshape_probe(context, scratch_directory(), &options, &json), -EINVAL);
}

static int probe_in_child(void *json)
{
	int ret = ioshape_probe(context, scratch_directory(), NULL, json);

	scratch_leave_child(ret == -EPERM ? 0 : 1);
}

TEST(paths, in_a_child_it_touches_nothing)
{
	char *json = NULL;

	ck_assert_int_eq(scratch_in_child(probe_in_child, &json), 0);
}

int main(void)
{
	return check_run("probe");
}
