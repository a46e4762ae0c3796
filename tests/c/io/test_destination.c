/* SPDX-License-Identifier: Apache-2.0 */
/* A file appears as a whole or not at all, with the permissions that it should have. */
#define _GNU_SOURCE
/* Included, because it tests static functions. */
#include "io/atomic_file.c"
#include "support/check_main.h"
#include "support/target_case.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <sys/wait.h>
#include <sys/xattr.h>

#define NOBODY 65534

/* ---- The temporary file ---------------------------------------------------------------------- */

/* Returns the path of the only temporary file in a directory. */
static const char *temporary_in(const char *directory)
{
	static char name[PATH_MAX];
	DIR *listing = opendir(directory);
	struct dirent *entry;
	unsigned found = 0;

	while ((entry = readdir(listing))) {
		if (strstr(entry->d_name, ".ioshape-tmp-")) {
			snprintf(name, sizeof(name), "%s/%s", directory, entry->d_name);
			found++;
		}
	}
	closedir(listing);
	ck_assert_uint_eq(found, 1);
	return name;
}

static struct test_case file_tests = { .name = "temporary file",
				       .setup = target_setup,
				       .teardown = target_teardown };

TEST(file_tests, bytes_go_to_a_hidden_file_beside_the_target_until_the_commit)
{
	struct file_write write = file_write_defaults();
	const char *name;

	mkdir("directory", 0777);
	scratch_write("directory/file", OLD);
	ck_assert_int_eq(file_write_open(&write, "directory/file"), 0);
	ck_assert_int_eq(io_writer_put(write.writer, NEW, NULL, &write.error), 0);
	ck_assert_uint_eq(scratch_entries("directory"), 2);
	name = strrchr(temporary_in("directory"), '/') + 1;
	ck_assert_int_eq(strncmp(name, ".file.ioshape-tmp-", 18), 0);
	ck_assert_int_eq(io_writer_finish(write.writer, &write.error), 0);
	ck_assert(scratch_same("directory/file", OLD));
	ck_assert_int_eq(io_writer_commit(write.writer, &write.error), 0);
	ck_assert(scratch_same("directory/file", NEW));
	ck_assert_uint_eq(scratch_entries("directory"), 1);
	file_write_close(&write);
}

static int last_step; /* last call before the writer is freed: 0 open, 1 put, 2 finish */

LOOP_TEST(file_tests, a_writer_freed_before_its_commit_leaves_nothing, 0, 6)
{
	struct file_write write = file_write_defaults();
	static char data[300 * 1024];

	last_step = _i / 2;
	if (_i % 2)
		scratch_write("file", OLD);
	write.options.expected_bytes = 5 * MIB;
	ck_assert_int_eq(file_write_open(&write, "file"), 0);
	ck_assert_uint_eq(scratch_temporaries("."), 1);
	if (last_step >= 1)
		ck_assert_int_eq(
			io_writer_put(write.writer, data, sizeof(data), NULL, &write.error), 0);
	if (last_step >= 2)
		ck_assert_int_eq(io_writer_finish(write.writer, &write.error), 0);
	file_write_close(&write);
	ck_assert_uint_eq(scratch_entries("."), (unsigned)_i % 2);
	if (_i % 2)
		ck_assert(scratch_same("file", OLD));
}

TEST(file_tests, names_as_long_as_can_be_are_saved_to)
{
	char name[NAME_MAX + 2];

	memset(name, 'n', sizeof(name));
	for (size_t length = NAME_MAX - 60; length <= NAME_MAX; length++) {
		name[length] = 0;
		must_save(name);
		ck_assert(scratch_same(name, NEW));
		unlink(name);
		name[length] = 'n';
	}
	name[NAME_MAX + 1] = 0;
	must_fail(name, -ENAMETOOLONG);
}

TEST(file_tests, paths_longer_than_the_kernel_takes_are_refused)
{
	static char path[3 * PATH_MAX];

	for (size_t i = 0; i + 2 < sizeof(path); i += 2)
		memcpy(path + i, "./", 2);
	path[sizeof(path) - 2] = 'f';
	must_fail(path, -ENAMETOOLONG);
}

/* ---- Permissions ----------------------------------------------------------------------------- */

static struct test_case rights = { .name = "rights",
				   .setup = target_setup,
				   .teardown = target_teardown };

TEST(rights, a_new_file_has_the_mode_that_open_would_give_it)
{
	static const mode_t masks[] = { 0, 022, 027, 077, 0777 };

	for (size_t i = 0; i < ARRAY_LENGTH(masks); i++) {
		mode_t before = umask(masks[i]);

		must_save("file");
		umask(before);
		ck_assert_uint_eq(mode_of("file"), 0666 & ~masks[i]);
		unlink("file");
	}
}

TEST(rights, a_replaced_files_mode_is_kept)
{
	static const mode_t modes[] = { 0600, 0640, 0644, 0666, 0755, 0700, 0777, 02664, 01644 };

	for (size_t i = 0; i < ARRAY_LENGTH(modes); i++) {
		mode_t before = umask(i % 2 ? 0 : 077);

		scratch_write("file", OLD);
		ck_assert_int_eq(chmod("file", modes[i]), 0);
		must_save("file");
		umask(before);
		ck_assert(scratch_same("file", NEW));
		ck_assert_uint_eq(mode_of("file"), modes[i]);
	}
}

TEST_IF(rights, root_keeps_the_owner_of_a_replaced_file, !geteuid())
{
	struct stat status;

	scratch_write("file", OLD);
	ck_assert_int_eq(chown("file", NOBODY, 12345), 0);
	ck_assert_int_eq(chmod("file", 0640), 0);
	must_save("file");
	ck_assert_int_eq(stat("file", &status), 0);
	ck_assert_uint_eq(status.st_uid, NOBODY);
	ck_assert_uint_eq(status.st_gid, 12345);
	ck_assert_uint_eq(status.st_mode & 07777, 0640);
}

/*
 * Runs in a child, in the directory of the test: calls the function as a user without root's
 * rights.
 */
static int as_a_user(int (*body)(void *), void *argument)
{
	if (!geteuid()) {
		if (chown(".", NOBODY, NOBODY) || setgid(NOBODY) || setuid(NOBODY))
			return 99;
	}
	return body(argument);
}

struct user_case {
	int expected;
	const char *path;
};

static int save_as_told(void *argument)
{
	const struct user_case *wanted = argument;
	struct file_write write = file_write_defaults();

	/* A save that succeeds reports no downgrade. */
	return file_write_all(&write, wanted->path, NEW) != wanted->expected ||
	       write.downgrades.count;
}

static int save_as_a_user(void *argument)
{
	return as_a_user(save_as_told, argument);
}

TEST(rights, a_file_that_is_not_writable_is_not_replaced)
{
	struct user_case wanted = { -EACCES, "file" };

	scratch_write("file", OLD);
	ck_assert_int_eq(chmod("file", 0444), 0);
	if (!geteuid())
		ck_assert_int_eq(chown("file", NOBODY, NOBODY), 0);
	ck_assert_int_eq(scratch_in_child(save_as_a_user, &wanted), 0);
	ck_assert(scratch_same("file", OLD));
	ck_assert_uint_eq(mode_of("file"), 0444);
}

TEST(rights, a_directory_that_is_not_writable_is_an_error)
{
	struct user_case wanted = { -EACCES, "directory/file" };

	mkdir("directory", 0777);
	scratch_write("directory/file", OLD);
	chmod("directory/file", 0666);
	ck_assert_int_eq(chmod("directory", 0555), 0);
	ck_assert_int_eq(scratch_in_child(save_as_a_user, &wanted), 0);
	ck_assert(scratch_same("directory/file", OLD));
	chmod("directory", 0777);
}

TEST(rights, a_directory_that_cannot_be_entered_is_an_error)
{
	struct user_case wanted = { -EACCES, "directory/file" };

	mkdir("directory", 0777);
	ck_assert_int_eq(chmod("directory", 0), 0);
	ck_assert_int_eq(scratch_in_child(save_as_a_user, &wanted), 0);
	chmod("directory", 0777);
	ck_assert_uint_eq(scratch_entries("directory"), 0);
}

TEST(rights, a_directory_that_cannot_be_listed_is_written_to)
{
	struct user_case wanted = { 0, "directory/file" };

	mkdir("directory", 0777);
	if (!geteuid())
		ck_assert_int_eq(chown("directory", NOBODY, NOBODY), 0);
	ck_assert_int_eq(chmod("directory", 0333), 0);
	ck_assert_int_eq(scratch_in_child(save_as_a_user, &wanted), 0);
	chmod("directory", 0777);
	ck_assert(scratch_same("directory/file", NEW));
	ck_assert_uint_eq(scratch_entries("directory"), 1);
}

/*
 * Replaces a file of another user that is writable, in a directory of ours. Its mode can be kept,
 * its owner cannot.
 */
static int replace_a_strangers_file(void *argument)
{
	struct file_write write = file_write_defaults();

	(void)argument;
	if (file_write_all(&write, "file", NEW))
		return 1;
	if (write.downgrades.count != 1 || write.downgrades.list[0].code != IOSHAPE_DOWNGRADE_OWNER)
		return 2;
	return mode_of("file") == 0666 ? 0 : 3;
}

static int replace_as_a_user(void *argument)
{
	return as_a_user(replace_a_strangers_file, argument);
}

TEST_IF(rights, a_strangers_file_is_replaced_with_a_downgrade, !geteuid())
{
	scratch_write("file", OLD);
	ck_assert_int_eq(chmod("file", 0666), 0);
	ck_assert_int_eq(scratch_in_child(replace_as_a_user, NULL), 0);
	ck_assert(scratch_same("file", NEW));
}

/* The ACL as setfacl stores it: USER_OBJ rw, USER 65534 r, GROUP_OBJ -, MASK r, OTHER -. */
#define ACL_BYTES 44
static const uint8_t acl[ACL_BYTES] = {
	2,    0, 0, 0,                                                             /* version */
	0x01, 0, 6, 0, 0xff, 0xff, 0xff, 0xff, 0x02, 0, 4, 0, 0xfe, 0xff, 0,    0, /* 65534 */
	0x04, 0, 0, 0, 0xff, 0xff, 0xff, 0xff, 0x10, 0, 4, 0, 0xff, 0xff, 0xff, 0xff,
	0x20, 0, 0, 0, 0xff, 0xff, 0xff, 0xff,
};

static int read_it(void *argument)
{
	(void)argument;
	if (setgid(NOBODY) || setuid(NOBODY))
		return 99;
	return access("file", R_OK) ? 1 : 0;
}

static bool nobody_may_read_it(void)
{
	int status;

	ck_assert_int_eq(chmod(".", 0755), 0);
	status = scratch_in_child(read_it, NULL);
	ck_assert(WIFEXITED(status) && WEXITSTATUS(status) <= 1);
	return !WEXITSTATUS(status);
}

/* The directory's default ACL names a user who had no access to the old file. */
TEST_IF(rights, a_default_acl_lets_nobody_else_in, !geteuid())
{
	scratch_write("file", OLD);
	ck_assert_int_eq(chmod("file", 0640), 0);
	if (setxattr(".", "system.posix_acl_default", acl, sizeof(acl), 0))
		return; /* the filesystem supports no ACLs */
	ck_assert(!nobody_may_read_it());
	must_save("file");
	ck_assert_uint_eq(mode_of("file"), 0640);
	ck_assert(!nobody_may_read_it());
}

TEST_IF(rights, a_replaced_files_acl_is_kept, !geteuid())
{
	uint8_t found[ACL_BYTES + 1];

	scratch_write("file", OLD);
	if (setxattr("file", "system.posix_acl_access", acl, sizeof(acl), 0))
		return;
	ck_assert_uint_eq(mode_of("file"), 0640);
	must_save("file");
	ck_assert_int_eq(getxattr("file", "system.posix_acl_access", found, sizeof(found)),
			 sizeof(acl));
	ck_assert_mem_eq(found, acl, sizeof(acl));
	ck_assert(nobody_may_read_it());
}

struct narrowing {
	mode_t old, new;
};

static int replace_a_file_of_another_group(void *argument)
{
	const struct narrowing *narrowing = argument;
	struct file_write write = file_write_defaults();

	return file_write_all(&write, "file", NEW) ? 1 : mode_of("file") != narrowing->new;
}

static int replace_it_as_a_user(void *argument)
{
	return as_a_user(replace_a_file_of_another_group, argument);
}

/*
 * The group cannot be kept, so neither the old group nor the new one may have more access than
 * before.
 */
TEST_IF(rights, what_cannot_be_kept_makes_access_less, !geteuid())
{
	static const struct narrowing cases[] = {
		{ 0660, 0600 }, { 0606, 0600 }, { 0664, 0644 }, { 0646, 0644 }, { 06775, 0755 },
	};

	for (size_t i = 0; i < ARRAY_LENGTH(cases); i++) {
		scratch_write("file", OLD);
		ck_assert_int_eq(chown("file", NOBODY, 12345), 0);
		ck_assert_int_eq(chmod("file", cases[i].old), 0);
		ck_assert_int_eq(
			scratch_in_child(replace_it_as_a_user, (void *)(uintptr_t)&cases[i]), 0);
	}
}

/*
 * In a directory like /tmp, a file or link that another user created first must not receive the
 * save.
 */
TEST_IF(rights, what_another_user_planted_in_a_sticky_directory_is_refused, !geteuid())
{
	mkdir("tmp", 0777);
	ck_assert_int_eq(chmod("tmp", 01777), 0);
	scratch_write("tmp/file", OLD);
	ck_assert_int_eq(symlink("../mine", "tmp/link"), 0);
	must_save("tmp/file");
	must_save("tmp/link");
	ck_assert_int_eq(lchown("tmp/file", NOBODY, NOBODY), 0);
	ck_assert_int_eq(lchown("tmp/link", NOBODY, NOBODY), 0);
	scratch_write("mine", OLD);
	ck_assert_str_ne(must_fail("tmp/file", -EACCES)->remedy, "");
	ck_assert_str_ne(must_fail("tmp/link", -EACCES)->remedy, "");
	ck_assert(scratch_same("mine", OLD));
	/* The owner of the directory may put links there. */
	ck_assert_int_eq(chown("tmp", NOBODY, NOBODY), 0);
	must_save("tmp/link");
	ck_assert(scratch_same("mine", NEW));
}

/* ---- Saves that must not replace ------------------------------------------------------------- */

static ino_t inode_of(const char *path)
{
	struct stat status;

	ck_assert_int_eq(stat(path, &status), 0);
	return status.st_ino;
}

/* Returns whether this process has the file open, which keeps its space. */
static bool is_held(ino_t inode)
{
	DIR *listing = opendir("/proc/self/fd");
	struct dirent *entry;
	struct stat status;
	bool held = false;

	while ((entry = readdir(listing)))
		held = held || (!fstatat(dirfd(listing), entry->d_name, &status, 0) &&
				status.st_ino == inode);
	closedir(listing);
	return held;
}

static struct test_case replace_tests = { .name = "no replace",
					  .setup = target_setup,
					  .teardown = target_teardown };

TEST(replace_tests, the_space_of_a_large_replaced_file_is_given_back)
{
	for (int links = 1; links <= 2; links++) {
		int fd = open("file", O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
		ino_t old;

		ck_assert_int_eq(ftruncate(fd, 100 << 20), 0);
		close(fd);
		old = inode_of("file");
		if (links == 2)
			ck_assert_int_eq(link("file", "other"), 0);
		must_save("file");
		ck_assert(scratch_same("file", NEW));
		/* At once if another name remains; soon if this was the last one. */
		if (links == 1)
			await_releases();
		ck_assert(!is_held(old));
		ck_assert(!await_releases());
	}
}

TEST(replace_tests, a_name_taken_meanwhile_is_not_replaced)
{
	struct file_write write = file_write_defaults();

	write.options.no_replace = true;
	ck_assert_int_eq(file_write_open(&write, "file"), 0);
	ck_assert_int_eq(io_writer_put(write.writer, NEW, NULL, NULL), 0);
	ck_assert_int_eq(io_writer_finish(write.writer, NULL), 0);
	scratch_write("file", OLD);
	ck_assert_int_eq(io_writer_commit(write.writer, &write.error), -EEXIST);
	file_write_close(&write);
	ck_assert(scratch_same("file", OLD));
}

static atomic_uint winners;

static void *race(void *failed)
{
	struct file_write write = file_write_defaults();
	int ret;

	write.options.no_replace = true;
	ret = file_write_all(&write, "file", NEW);
	if (!ret)
		atomic_fetch_add(&winners, 1);
	return ret && ret != -EEXIST ? failed : NULL;
}

TEST(replace_tests, of_many_who_must_not_replace_one_wins)
{
	for (int round = 0; round < 10; round++) {
		pthread_t threads[4];
		void *failure;

		atomic_store(&winners, 0);
		for (size_t i = 0; i < ARRAY_LENGTH(threads); i++)
			ck_assert_int_eq(pthread_create(&threads[i], NULL, race, threads), 0);
		for (size_t i = 0; i < ARRAY_LENGTH(threads); i++) {
			pthread_join(threads[i], &failure);
			ck_assert_ptr_null(failure);
		}
		ck_assert_uint_eq(atomic_load(&winners), 1);
		ck_assert(scratch_same("file", NEW));
		unlink("file");
	}
}
