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
#include <sys/statvfs.h>
#include <sys/sysmacros.h>
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

static struct ioshape_storage *probed(const char *path, const struct ioshape_probe_options *options)
{
	struct ioshape_storage *storage = NULL;
	int ret = ioshape_probe(context, path, options, &storage);

	ck_assert_msg(!ret, "%s: %s", path, ioshape_last_error()->sentence);
	ck_assert_uint_eq(storage->size, sizeof(*storage));
	return storage;
}

START_TEST(a_directory_is_described_and_left_alone)
{
	const unsigned descriptors = scratch_descriptors();
	struct ioshape_storage *storage = probed(scratch_directory(), NULL);
	struct statvfs system;

	ck_assert_int_eq(statvfs(scratch_directory(), &system), 0);
	ck_assert_str_eq(storage->directory, real);
	ck_assert_uint_eq(storage->total_bytes, system.f_blocks * system.f_frsize);
	ck_assert_uint_gt(storage->free_bytes, 0);
	ck_assert_uint_le(storage->free_bytes, storage->total_bytes);
	ck_assert_str_ne(storage->type, "");
	ck_assert_uint_eq(!strncmp(real, storage->mount_point, strlen(storage->mount_point)), 1);
	ck_assert_int_eq(storage->direct == IOSHAPE_YES, scratch_direct());
	ck_assert_uint_eq(storage->for_bytes, UINT64_C(4) << 30);
	ck_assert_str_ne(storage->engine, "");
	ck_assert_uint_gt(storage->block_bytes, 0);
	ck_assert_uint_gt(storage->queue_depth, 0);
	ck_assert_str_ne(storage->pool, "");
	ck_assert_uint_gt(storage->writers, 0);
	ck_assert_str_ne(storage->writers_why, "");
	ck_assert_uint_eq(storage->is_file, 0);
	ioshape_free(storage);
	ck_assert_uint_eq(scratch_entries(scratch_directory()), 0);
	ck_assert_uint_eq(scratch_descriptors(), descriptors);
}
END_TEST

/* They all have the directory in common. */
START_TEST(a_file_a_link_and_a_name_to_be_mean_their_directory)
{
	const char *const names[] = { "file", "link", "new.pt", "new/", "pipe" };

	scratch_write(scratch_path("file"), "x", 1);
	ck_assert_int_eq(symlink("file", scratch_path("link")), 0);
	ck_assert_int_eq(mkfifo(scratch_path("pipe"), 0600), 0);
	for (size_t i = 0; i < sizeof(names) / sizeof(names[0]); i++) {
		struct ioshape_storage *storage = probed(scratch_path(names[i]), NULL);

		ck_assert_str_eq(storage->directory, real);
		ck_assert_uint_eq(storage->is_file, i < 2);
		ioshape_free(storage);
	}
}
END_TEST

START_TEST(a_name_without_a_directory_is_in_this_one)
{
	struct ioshape_storage *storage;
	int here = open(".", O_RDONLY | O_DIRECTORY);

	ck_assert_int_eq(chdir(scratch_directory()), 0);
	storage = probed("new.pt", NULL);
	ck_assert_str_eq(storage->directory, real);
	ioshape_free(storage);
	storage = probed("/new-in-the-root", NULL);
	ck_assert_str_eq(storage->directory, "/");
	ioshape_free(storage);
	ck_assert_int_eq(fchdir(here), 0);
	close(here);
}
END_TEST

START_TEST(the_plan_is_for_what_is_asked)
{
	struct ioshape_probe_options options = IOSHAPE_PROBE_OPTIONS_INIT;
	struct ioshape_context_options settings = IOSHAPE_CONTEXT_OPTIONS_INIT;
	struct ioshape_storage *storage;

	ioshape_context_free(context);
	settings.engine = IOSHAPE_ENGINE_THREADS;
	settings.block_bytes = 1 << 20;
	settings.queue_depth = 3;
	settings.slots = 7;
	settings.pool = "shared";
	ck_assert_int_eq(ioshape_context_open(&context, &settings), 0);
	options.bytes = 12345;
	options.files = 9;
	storage = probed(scratch_directory(), &options);
	ck_assert_uint_eq(storage->for_bytes, 12345);
	ck_assert_str_eq(storage->engine, "threads");
	ck_assert_uint_eq(storage->block_bytes, 1 << 20);
	ck_assert_uint_eq(storage->queue_depth, 3);
	ck_assert_uint_eq(storage->writers, 7);
	ck_assert_str_eq(storage->pool, "shared");
	ioshape_free(storage);
}
END_TEST

START_TEST(what_cannot_be_looked_at_is_said)
{
	struct ioshape_storage *storage = (void *)&storage;
	struct ioshape_probe_options options = IOSHAPE_PROBE_OPTIONS_INIT;
	const char *path = scratch_path("none/new.pt");

	ck_assert_int_eq(ioshape_probe(context, path, NULL, &storage), -ENOENT);
	ck_assert_ptr_null(storage);
	ck_assert_ptr_nonnull(strstr(ioshape_last_error()->sentence, path));
	scratch_write(scratch_path("file"), "x", 1);
	ck_assert_int_eq(ioshape_probe(context, scratch_path("file/new.pt"), NULL, &storage),
			 -ENOTDIR);
	ck_assert_int_eq(ioshape_probe(context, "", NULL, &storage), -EINVAL);
	ck_assert_int_eq(ioshape_probe(context, NULL, NULL, &storage), -EINVAL);
	ck_assert_int_eq(ioshape_probe(NULL, path, NULL, &storage), -EINVAL);
	ck_assert_int_eq(ioshape_probe(context, path, NULL, NULL), -EINVAL);
	options.size = 0;
	ck_assert_int_eq(ioshape_probe(context, scratch_directory(), &options, &storage), -EINVAL);
	ioshape_free(NULL);
}
END_TEST

static int probe_in_child(void *storage)
{
	int ret = ioshape_probe(context, scratch_directory(), NULL, storage);

	scratch_leave_child(ret == -EPERM ? 0 : 1);
}

START_TEST(in_a_child_it_touches_nothing)
{
	struct ioshape_storage *storage = NULL;

	ck_assert_int_eq(scratch_in_child(probe_in_child, &storage), 0);
}
END_TEST

int main(void)
{
	Suite *suite = suite_create("probe");
	TCase *paths = tcase_create("paths");

	tcase_add_checked_fixture(paths, setup, teardown);
	tcase_add_test(paths, a_directory_is_described_and_left_alone);
	tcase_add_test(paths, a_file_a_link_and_a_name_to_be_mean_their_directory);
	tcase_add_test(paths, a_name_without_a_directory_is_in_this_one);
	tcase_add_test(paths, the_plan_is_for_what_is_asked);
	tcase_add_test(paths, what_cannot_be_looked_at_is_said);
	tcase_add_test(paths, in_a_child_it_touches_nothing);
	suite_add_tcase(suite, paths);
	return check_main(suite);
}
