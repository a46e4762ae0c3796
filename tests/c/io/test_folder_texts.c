/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Short texts in a directory, and removal only of entries that have not changed since they were
 * looked at.
 */
#include "io/io.h"
#include "support/check_main.h"
#include "support/scratch.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

static struct io_folder folder;
static struct base_error error;

static void setup(void)
{
	scratch_setup();
	memset(&error, 0, sizeof(error));
	ck_assert_int_eq(chdir(scratch_directory()), 0);
	ck_assert_int_eq(io_folder_open(&folder, ".", &error), 0);
}

static void teardown(void)
{
	io_folder_close(&folder);
	ck_assert_int_eq(chdir("/"), 0);
	scratch_teardown();
}

static struct test_case tests = { .name = "texts", .setup = setup, .teardown = teardown };

/* ---- Texts ----------------------------------------------------------------------------------- */

TEST(tests, a_text_is_there_once)
{
	char text[PATH_MAX];

	ck_assert_int_eq(io_folder_put_text(&folder, "note", "1 0 /a b", &error), 0);
	ck_assert_int_eq(io_folder_get_text(&folder, "note", text), 0);
	ck_assert_str_eq(text, "1 0 /a b");
	ck_assert_int_eq(io_folder_put_text(&folder, "note", "other", &error), -EEXIST);
	ck_assert_str_eq(error.text, "");
	ck_assert_int_eq(io_folder_drop_text(&folder, "note", &error), 0);
	ck_assert_int_eq(io_folder_drop_text(&folder, "note", &error), 0);
	ck_assert_int_eq(io_folder_get_text(&folder, "note", text), -ENOENT);
}

TEST(tests, a_text_may_be_as_long_as_links_are_and_no_longer)
{
	char text[PATH_MAX + 1], found[PATH_MAX];

	memset(text, 'x', PATH_MAX);
	text[PATH_MAX] = 0;
	ck_assert_int_eq(io_folder_put_text(&folder, "note", text, &error), -ENAMETOOLONG);
	ck_assert_ptr_nonnull(strstr(error.text, "note"));
	/* Some filesystems accept less. */
	text[1000] = 0;
	ck_assert_int_eq(io_folder_put_text(&folder, "note", text, &error), 0);
	ck_assert_int_eq(io_folder_get_text(&folder, "note", found), 0);
	ck_assert_str_eq(found, text);
}

TEST(tests, what_is_no_text_is_neither_read_nor_dropped)
{
	char text[PATH_MAX];

	ck_assert_int_eq(mkdir("note", 0700), 0);
	ck_assert_int_eq(io_folder_get_text(&folder, "note", text), -EINVAL);
	ck_assert_int_lt(io_folder_drop_text(&folder, "note", &error), 0);
	ck_assert_ptr_nonnull(strstr(error.text, "note"));
}

/* ---- Removal --------------------------------------------------------------------------------- */

static struct io_entry look_at(const char *name)
{
	struct io_entry entry;

	ck_assert_int_eq(io_folder_look(&folder, name, &entry, &error), 0);
	return entry;
}

/* Makes a directory with files. Returns its entry. */
static struct io_entry make_folder(void)
{
	ck_assert_int_eq(mkdir("it", 0700), 0);
	scratch_write("it/first", "x", 1);
	scratch_write("it/second", "x", 1);
	return look_at("it");
}

TEST(tests, what_was_looked_at_goes)
{
	struct io_entry entry;

	scratch_write("it", "x", 1);
	entry = look_at("it");
	ck_assert_int_eq(io_folder_discard(&folder, "it", &entry, NULL, &error), 0);
	entry = make_folder();
	ck_assert_int_eq(io_folder_discard(&folder, "it", &entry, NULL, &error), 0);
	entry = make_folder();
	ck_assert_int_eq(io_folder_discard(&folder, "it", &entry, "first", &error), 0);
	entry = make_folder();
	ck_assert_int_eq(io_folder_discard(&folder, "it", &entry, "none", &error), 0);
	ck_assert_uint_eq(scratch_entries("."), 0);
}

TEST(tests, what_took_its_place_stays)
{
	struct io_entry entry;

	scratch_write("it", "x", 1);
	entry = look_at("it");
	scratch_write("new", "longer", 6);
	ck_assert_int_eq(rename("new", "it"), 0);
	ck_assert_int_eq(io_folder_discard(&folder, "it", &entry, NULL, &error), -ESTALE);
	ck_assert(scratch_same("it", "longer", 6));
	ck_assert_uint_eq(scratch_entries("."), 1);
	ck_assert_int_eq(unlink("it"), 0);
	ck_assert_int_eq(io_folder_discard(&folder, "it", &entry, NULL, &error), -ESTALE);
	ck_assert_str_eq(error.text, "");
}

TEST(tests, what_somebody_reads_stays)
{
	const struct io_entry entry = make_folder();
	struct io_hold hold = IO_NO_HOLD;
	struct base_buffer text = { 0 };
	struct io_folder inner;

	ck_assert_int_eq(io_folder_open(&inner, "it", &error), 0);
	ck_assert_int_eq(io_folder_get(&inner, "first", 100, &text, &hold, &error), 0);
	base_buffer_free(&text);
	ck_assert_int_eq(io_folder_discard(&folder, "it", &entry, "first", &error), -EBUSY);
	ck_assert_uint_eq(scratch_entries("it"), 2);
	io_folder_let_go(&hold);
	io_folder_close(&inner);
	ck_assert_int_eq(io_folder_discard(&folder, "it", &entry, "first", &error), 0);
	ck_assert_uint_eq(scratch_entries("."), 0);
}

/* Removes stale files of this directory until it is killed. */
static pid_t start_tidying(void)
{
	const pid_t pid = fork();
	int fd;

	ck_assert_int_ge(pid, 0);
	if (pid)
		return pid;
	fd = open(".", O_RDONLY | O_DIRECTORY | O_CLOEXEC); /* the library's are closed here */
	for (;;)
		io_remove_stale(fd, ".", NULL, NULL);
}

TEST(tests, what_somebody_reads_stays_while_others_tidy)
{
	const struct io_entry entry = make_folder();
	struct io_hold hold = IO_NO_HOLD;
	struct base_buffer text = { 0 };
	struct io_folder inner;
	pid_t pid;

	ck_assert_int_eq(io_folder_open(&inner, "it", &error), 0);
	ck_assert_int_eq(io_folder_get(&inner, "first", 100, &text, &hold, &error), 0);
	base_buffer_free(&text);
	pid = start_tidying();
	for (int i = 0; i < 1000; i++) {
		ck_assert_int_eq(io_folder_discard(&folder, "it", &entry, "first", &error), -EBUSY);
		ck_assert_uint_eq(scratch_entries("it"), 2);
	}
	ck_assert_int_eq(kill(pid, SIGKILL), 0);
	ck_assert_int_eq(waitpid(pid, NULL, 0), pid);
	io_folder_let_go(&hold);
	io_folder_close(&inner);
}
