/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Saves to paths in a directory of the test, which is the working directory. Each program includes
 * this once.
 */
#ifndef TESTS_SUPPORT_TARGET_CASE_H
#define TESTS_SUPPORT_TARGET_CASE_H

#include "support/file_writer.h"
#include "support/scratch.h"

#include <check.h>
#include <sys/stat.h>
#include <unistd.h>

static const char new_bytes[] = "the new contents", old_bytes[] = "what was there before";
#define NEW new_bytes, sizeof(new_bytes)
#define OLD old_bytes, sizeof(old_bytes)

static unsigned descriptors_before;

static inline void target_setup(void)
{
	scratch_setup();
	ck_assert_int_eq(chdir(scratch_directory()), 0);
	descriptors_before = scratch_descriptors();
}

static inline void target_teardown(void)
{
	/* No test may leave descriptors or temporary files. */
	ck_assert_uint_eq(scratch_descriptors(), descriptors_before);
	ck_assert_uint_eq(scratch_temporaries("."), 0);
	ck_assert_int_eq(chdir("/"), 0);
	scratch_teardown();
}

static inline void must_save(const char *path)
{
	struct file_write write = file_write_defaults();

	ck_assert_msg(!file_write_all(&write, path, NEW), "%s", write.error.text);
}

/* Writes the file, which must fail with this code. Returns the error, valid until the next call. */
static inline const struct base_error *must_fail(const char *path, int code)
{
	static struct file_write write;

	write = file_write_defaults();
	ck_assert_int_eq(file_write_all(&write, path, NEW), code);
	ck_assert_int_eq(write.error.code, code);
	ck_assert_str_ne(write.error.sentence, "");
	return &write.error;
}

static inline mode_t mode_of(const char *path)
{
	struct stat status;

	ck_assert_int_eq(stat(path, &status), 0);
	return status.st_mode & 07777;
}

static inline bool is_link(const char *path)
{
	struct stat status;

	return !lstat(path, &status) && S_ISLNK(status.st_mode);
}

#endif
