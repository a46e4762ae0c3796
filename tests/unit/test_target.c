/* SPDX-License-Identifier: Apache-2.0 */
/* Where a file appears, with which rights, and that it appears whole or not at all. */
#define _GNU_SOURCE
#include "support/check_main.h"
#include "support/file_writer.h"
#include "support/scratch.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#define NOBODY 65534

static const char new_bytes[] = "the new contents", old_bytes[] = "what was there before";
#define NEW new_bytes, sizeof(new_bytes)
#define OLD old_bytes, sizeof(old_bytes)

static unsigned descriptors_before;

static void setup(void)
{
	scratch_setup();
	ck_assert_int_eq(chdir(scratch_directory()), 0);
	descriptors_before = scratch_descriptors();
}

static void teardown(void)
{
	/* Whatever happened in a test. */
	ck_assert_uint_eq(scratch_descriptors(), descriptors_before);
	ck_assert_uint_eq(scratch_temporaries("."), 0);
	ck_assert_int_eq(chdir("/"), 0);
	scratch_teardown();
}

static void must_save(const char *path)
{
	struct file_write write = file_write_defaults();

	ck_assert_msg(!file_write_all(&write, path, NEW), "%s", write.error.text);
}

/* The sentence, until the next call. */
static const char *must_fail(const char *path, int code)
{
	static struct file_write write;

	write = file_write_defaults();
	ck_assert_int_eq(file_write_all(&write, path, NEW), code);
	ck_assert_int_eq(write.error.code, code);
	ck_assert_ptr_nonnull(strstr(write.error.text, ioshape_strerror(code)));
	return write.error.text;
}

static mode_t mode_of(const char *path)
{
	struct stat status;

	ck_assert_int_eq(stat(path, &status), 0);
	return status.st_mode & 07777;
}

static bool is_link(const char *path)
{
	struct stat status;

	return !lstat(path, &status) && S_ISLNK(status.st_mode);
}

/* ---- The temporary file ---------------------------------------------------------------------- */

/* The name of the one temporary file in a directory. */
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

START_TEST(bytes_go_to_a_hidden_file_beside_the_target_until_the_commit)
{
	struct file_write write = file_write_defaults();
	const char *name;

	mkdir("directory", 0777);
	scratch_write("directory/file", OLD);
	ck_assert_int_eq(file_write_open(&write, "directory/file"), 0);
	ck_assert_int_eq(ring_writer_put(write.writer, NEW, NULL, &write.error), 0);
	ck_assert_uint_eq(scratch_entries("directory"), 2);
	name = strrchr(temporary_in("directory"), '/') + 1;
	ck_assert_int_eq(strncmp(name, ".file.ioshape-tmp-", 18), 0);
	ck_assert_int_eq(ring_writer_finish(write.writer, &write.error), 0);
	ck_assert(scratch_same("directory/file", OLD));
	ck_assert_int_eq(ring_writer_commit(write.writer, &write.error), 0);
	ck_assert(scratch_same("directory/file", NEW));
	ck_assert_uint_eq(scratch_entries("directory"), 1);
	file_write_close(&write);
}
END_TEST

static int last_step; /* done before the writer is freed: 0 open, 1 put, 2 finish */

START_TEST(a_writer_freed_before_its_commit_leaves_nothing)
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
			ring_writer_put(write.writer, data, sizeof(data), NULL, &write.error), 0);
	if (last_step >= 2)
		ck_assert_int_eq(ring_writer_finish(write.writer, &write.error), 0);
	file_write_close(&write);
	ck_assert_uint_eq(scratch_entries("."), (unsigned)_i % 2);
	if (_i % 2)
		ck_assert(scratch_same("file", OLD));
}
END_TEST

START_TEST(names_as_long_as_can_be_are_saved_to)
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
END_TEST

START_TEST(paths_longer_than_the_kernel_takes_are_refused)
{
	static char path[3 * PATH_MAX];

	for (size_t i = 0; i + 2 < sizeof(path); i += 2)
		memcpy(path + i, "./", 2);
	path[sizeof(path) - 2] = 'f';
	must_fail(path, -ENAMETOOLONG);
}
END_TEST

START_TEST(two_writers_to_one_path_do_not_mix)
{
	struct file_write first = file_write_defaults(), second = file_write_defaults();
	static char one[200 * 1024], two[300 * 1024];

	memset(one, '1', sizeof(one));
	memset(two, '2', sizeof(two));
	ck_assert_int_eq(file_write_open(&first, "file"), 0);
	ck_assert_int_eq(file_write_open(&second, "file"), 0);
	ck_assert_int_eq(ring_writer_put(first.writer, one, sizeof(one), NULL, NULL), 0);
	ck_assert_int_eq(ring_writer_put(second.writer, two, sizeof(two), NULL, NULL), 0);
	ck_assert_int_eq(file_write_end(&second), 0);
	ck_assert(scratch_same("file", two, sizeof(two)));
	ck_assert_int_eq(file_write_end(&first), 0);
	ck_assert(scratch_same("file", one, sizeof(one)));
	file_write_close(&first);
	file_write_close(&second);
}
END_TEST

/* ---- Rights ---------------------------------------------------------------------------------- */

START_TEST(a_new_file_has_the_mode_that_open_would_give_it)
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
END_TEST

START_TEST(a_replaced_files_mode_is_kept)
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
END_TEST

START_TEST(nobody_else_can_read_the_temporary_file_of_a_protected_one)
{
	struct file_write write = file_write_defaults();
	mode_t before = umask(0);

	scratch_write("file", OLD);
	chmod("file", 0600);
	ck_assert_int_eq(file_write_open(&write, "file"), 0);
	ck_assert_uint_eq(mode_of(temporary_in(".")), 0600);
	umask(before);
	file_write_close(&write);
}
END_TEST

START_TEST(root_keeps_the_owner_of_a_replaced_file)
{
	struct stat status;

	if (geteuid())
		return;
	scratch_write("file", OLD);
	ck_assert_int_eq(chown("file", NOBODY, 12345), 0);
	ck_assert_int_eq(chmod("file", 0640), 0);
	must_save("file");
	ck_assert_int_eq(stat("file", &status), 0);
	ck_assert_uint_eq(status.st_uid, NOBODY);
	ck_assert_uint_eq(status.st_gid, 12345);
	ck_assert_uint_eq(status.st_mode & 07777, 0640);
}
END_TEST

/* Runs in a child, in the directory of the test: as somebody who is not root. */
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
	const char *words; /* that the sentence has */
};

static int save_as_told(void *argument)
{
	const struct user_case *wanted = argument;
	struct file_write write = file_write_defaults();
	int ret = file_write_all(&write, wanted->path, NEW);

	if (ret != wanted->expected)
		return 1;
	if (ret &&
	    (!strstr(write.error.text, wanted->path) || !strstr(write.error.text, wanted->words)))
		return 2;
	return 0;
}

static int save_as_a_user(void *argument)
{
	return as_a_user(save_as_told, argument);
}

START_TEST(a_file_that_is_not_writable_is_not_replaced)
{
	struct user_case wanted = { -EACCES, "file", "not writable" };

	scratch_write("file", OLD);
	ck_assert_int_eq(chmod("file", 0444), 0);
	if (!geteuid())
		ck_assert_int_eq(chown("file", NOBODY, NOBODY), 0);
	ck_assert_int_eq(scratch_in_child(save_as_a_user, &wanted), 0);
	ck_assert(scratch_same("file", OLD));
	ck_assert_uint_eq(mode_of("file"), 0444);
}
END_TEST

START_TEST(a_directory_that_is_not_writable_is_an_error_that_says_so)
{
	struct user_case wanted = { -EACCES, "directory/file", "directory" };

	mkdir("directory", 0777);
	scratch_write("directory/file", OLD);
	chmod("directory/file", 0666);
	ck_assert_int_eq(chmod("directory", 0555), 0);
	ck_assert_int_eq(scratch_in_child(save_as_a_user, &wanted), 0);
	ck_assert(scratch_same("directory/file", OLD));
	chmod("directory", 0777);
}
END_TEST

START_TEST(a_directory_that_cannot_be_entered_is_an_error_that_says_so)
{
	struct user_case wanted = { -EACCES, "directory/file", "directory" };

	mkdir("directory", 0777);
	ck_assert_int_eq(chmod("directory", 0), 0);
	ck_assert_int_eq(scratch_in_child(save_as_a_user, &wanted), 0);
	chmod("directory", 0777);
	ck_assert_uint_eq(scratch_entries("directory"), 0);
}
END_TEST

START_TEST(a_directory_that_cannot_be_listed_is_written_to)
{
	struct user_case wanted = { 0, "directory/file", "" };

	mkdir("directory", 0777);
	if (!geteuid())
		ck_assert_int_eq(chown("directory", NOBODY, NOBODY), 0);
	ck_assert_int_eq(chmod("directory", 0333), 0);
	ck_assert_int_eq(scratch_in_child(save_as_a_user, &wanted), 0);
	chmod("directory", 0777);
	ck_assert(scratch_same("directory/file", NEW));
	ck_assert_uint_eq(scratch_entries("directory"), 1);
}
END_TEST

/* Not ours, but writable for us, in a directory of ours: its owner cannot be kept, its mode can. */
static int replace_a_strangers_file(void *argument)
{
	struct file_write write = file_write_defaults();

	(void)argument;
	if (file_write_all(&write, "file", NEW))
		return 1;
	if (write.notes.count != 1 || !strstr(write.notes.text, "owner"))
		return 2;
	return mode_of("file") == 0666 ? 0 : 3;
}

static int replace_as_a_user(void *argument)
{
	return as_a_user(replace_a_strangers_file, argument);
}

START_TEST(a_strangers_file_is_replaced_with_a_note)
{
	if (geteuid())
		return;
	scratch_write("file", OLD);
	ck_assert_int_eq(chmod("file", 0666), 0);
	ck_assert_int_eq(scratch_in_child(replace_as_a_user, NULL), 0);
	ck_assert(scratch_same("file", NEW));
}
END_TEST

/* ---- Paths that are not to be saved to ------------------------------------------------------- */

START_TEST(what_is_no_file_name_is_refused)
{
	mkdir("directory", 0777);
	must_fail("", -EINVAL);
	must_fail("file/", -EINVAL);
	must_fail("directory/", -EINVAL);
	must_fail("directory", -EISDIR);
	must_fail(".", -EISDIR);
	must_fail("..", -EISDIR);
	must_fail("/", -EINVAL);
	must_fail("directory/.", -EISDIR);
	ck_assert_uint_eq(scratch_entries("."), 1);
	ck_assert_uint_eq(scratch_entries("directory"), 0);
}
END_TEST

START_TEST(a_missing_directory_is_named_with_the_remedy)
{
	const char *text = must_fail("missing/file", -ENOENT);

	ck_assert_ptr_nonnull(strstr(text, "missing/file"));
	ck_assert_ptr_nonnull(strstr(text, "create it first"));
	scratch_write("file", OLD);
	must_fail("file/below", -ENOTDIR);
	ck_assert(scratch_same("file", OLD));
}
END_TEST

/* ---- Symbolic links -------------------------------------------------------------------------- */

START_TEST(a_link_stays_and_what_it_leads_to_is_replaced)
{
	mkdir("here", 0777);
	mkdir("there", 0777);
	for (int relative = 0; relative < 2; relative++) {
		const char *leads_to = relative ? "../there/file" : scratch_path("there/file");

		scratch_write("there/file", OLD);
		unlink("here/link");
		ck_assert_int_eq(symlink(leads_to, "here/link"), 0);
		must_save("here/link");
		ck_assert(is_link("here/link"));
		ck_assert(!is_link("there/file"));
		ck_assert(scratch_same("there/file", NEW));
		ck_assert_uint_eq(scratch_entries("there"), 1);
		ck_assert_uint_eq(scratch_entries("here"), 1);
	}
}
END_TEST

START_TEST(the_temporary_file_lies_beside_what_a_link_leads_to)
{
	struct file_write write = file_write_defaults();

	mkdir("there", 0777);
	ck_assert_int_eq(symlink("there/file", "link"), 0);
	ck_assert_int_eq(file_write_open(&write, "link"), 0);
	ck_assert_uint_eq(scratch_temporaries("there"), 1);
	ck_assert_uint_eq(scratch_temporaries("."), 0);
	file_write_close(&write);
}
END_TEST

START_TEST(chains_of_links_are_followed_as_the_kernel_does)
{
	char from[32], to[32];

	scratch_write("link-0", OLD);
	for (int i = 1; i <= 41; i++) {
		snprintf(from, sizeof(from), "link-%d", i);
		snprintf(to, sizeof(to), "link-%d", i - 1);
		ck_assert_int_eq(symlink(to, from), 0);
	}
	must_save("link-5");
	ck_assert(scratch_same("link-0", NEW));
	scratch_write("link-0", OLD);
	must_save("link-40");
	ck_assert(scratch_same("link-0", NEW));
	ck_assert(is_link("link-1"));
	ck_assert_int_lt(open("link-41", O_WRONLY), 0);
	must_fail("link-41", -ELOOP);
}
END_TEST

START_TEST(a_link_that_leads_to_nothing_yet_gets_its_file)
{
	mkdir("there", 0777);
	ck_assert_int_eq(symlink("there/second", "first"), 0);
	ck_assert_int_eq(symlink("file", "there/second"), 0);
	must_save("first");
	ck_assert(is_link("first"));
	ck_assert(is_link("there/second"));
	ck_assert(scratch_same("there/file", NEW));
}
END_TEST

START_TEST(links_that_lead_nowhere_are_refused)
{
	mkdir("directory", 0777);
	ck_assert_int_eq(symlink("loop", "loop"), 0);
	must_fail("loop", -ELOOP);
	ck_assert_int_eq(symlink("missing/file", "to-missing"), 0);
	must_fail("to-missing", -ENOENT);
	ck_assert_int_eq(symlink("directory", "to-directory"), 0);
	must_fail("to-directory", -EISDIR);
	ck_assert_int_eq(symlink("directory/", "to-directory-with-slash"), 0);
	must_fail("to-directory-with-slash", -EISDIR);
	ck_assert_int_eq(symlink("new/", "to-new-with-slash"), 0);
	must_fail("to-new-with-slash", -EISDIR);
	ck_assert_uint_eq(scratch_entries("directory"), 0);
	/* Through a directory's link one may go. */
	must_save("to-directory/file");
	ck_assert(scratch_same("directory/file", NEW));
}
END_TEST

/* ---- Not to replace -------------------------------------------------------------------------- */

START_TEST(what_must_not_be_replaced_is_not)
{
	struct file_write write = file_write_defaults();

	scratch_write("file", OLD);
	write.options.no_replace = true;
	ck_assert_int_eq(file_write_all(&write, "file", NEW), -EEXIST);
	ck_assert_ptr_nonnull(strstr(write.error.text, "file"));
	ck_assert(scratch_same("file", OLD));
	ck_assert_uint_eq(scratch_entries("."), 1);
}
END_TEST

START_TEST(what_is_not_there_need_not_be_replaced)
{
	struct file_write write = file_write_defaults();

	write.options.no_replace = true;
	ck_assert_int_eq(file_write_all(&write, "file", NEW), 0);
	ck_assert(scratch_same("file", NEW));
	ck_assert_uint_eq(scratch_entries("."), 1);
}
END_TEST

START_TEST(a_name_taken_meanwhile_is_not_replaced)
{
	struct file_write write = file_write_defaults();

	write.options.no_replace = true;
	ck_assert_int_eq(file_write_open(&write, "file"), 0);
	ck_assert_int_eq(ring_writer_put(write.writer, NEW, NULL, NULL), 0);
	ck_assert_int_eq(ring_writer_finish(write.writer, NULL), 0);
	scratch_write("file", OLD);
	ck_assert_int_eq(ring_writer_commit(write.writer, &write.error), -EEXIST);
	file_write_close(&write);
	ck_assert(scratch_same("file", OLD));
}
END_TEST

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

START_TEST(of_many_who_must_not_replace_one_wins)
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
END_TEST

/* ---- Pipes and devices ----------------------------------------------------------------------- */

struct drain {
	int fd;
	size_t bytes;
	uint32_t crc;
	size_t stop_after;
};

static void *drain_pipe(void *argument)
{
	struct drain *drain = argument;
	char piece[5000];
	ssize_t got;

	while ((got = read(drain->fd, piece, sizeof(piece))) > 0) {
		drain->crc = base_crc32(drain->crc, piece, (size_t)got);
		drain->bytes += (size_t)got;
		if (drain->bytes >= drain->stop_after)
			break;
	}
	close(drain->fd);
	return NULL;
}

/* Writes 1 MiB to `path`, which leads to a pipe, and reads so much of it from `fd`. */
static int write_to_pipe(const char *path, int fd, size_t stop_after, struct base_error *error)
{
	static uint8_t data[1 << 20];
	struct drain drain = { .fd = fd, .stop_after = stop_after };
	struct file_write write = file_write_defaults();
	pthread_t reader;
	int ret;

	for (size_t i = 0; i < sizeof(data); i++)
		data[i] = (uint8_t)(i * 7 + i / 251);
	ck_assert_int_eq(pthread_create(&reader, NULL, drain_pipe, &drain), 0);
	write.options.expected_bytes = sizeof(data) * 3; /* nothing to preallocate there */
	ret = file_write_all(&write, path, data, sizeof(data));
	pthread_join(reader, NULL);
	if (!ret) {
		ck_assert_uint_eq(drain.bytes, sizeof(data));
		ck_assert_uint_eq(drain.crc, base_crc32(0, data, sizeof(data)));
	}
	*error = write.error;
	return ret;
}

START_TEST(a_named_pipe_is_written_straight)
{
	struct base_error error;
	int fd;

	ck_assert_int_eq(mkfifo("pipe", 0666), 0);
	/* Both ends, so that neither side waits for the other. */
	fd = open("pipe", O_RDWR | O_CLOEXEC);
	ck_assert_msg(!write_to_pipe("pipe", fd, 1 << 20, &error), "%s", error.text);
}
END_TEST

/* As a shell's >(command) passes it. */
START_TEST(a_pipe_given_by_its_descriptor_is_written_straight)
{
	struct base_error error;
	char path[64];
	int ends[2];

	for (int i = 0; i < 2; i++) {
		ck_assert_int_eq(pipe2(ends, O_CLOEXEC), 0);
		snprintf(path, sizeof(path), i ? "/dev/fd/%d" : "/proc/self/fd/%d", ends[1]);
		ck_assert_msg(!write_to_pipe(path, ends[0], 1 << 20, &error), "%s", error.text);
		close(ends[1]);
	}
}
END_TEST

START_TEST(a_reader_that_goes_away_is_an_error_and_no_signal)
{
	struct sigaction before;
	struct base_error error;
	sigset_t mask;
	char path[64];
	int ends[2];

	ck_assert_int_eq(sigaction(SIGPIPE, NULL, &before), 0);
	ck_assert(before.sa_handler == SIG_DFL);
	ck_assert_int_eq(pipe2(ends, O_CLOEXEC), 0);
	snprintf(path, sizeof(path), "/proc/self/fd/%d", ends[1]);
	ck_assert_int_eq(write_to_pipe(path, ends[0], 100000, &error), -EPIPE);
	ck_assert_ptr_nonnull(strstr(error.text, path));
	close(ends[1]);
	/* And everything is as before. */
	pthread_sigmask(SIG_SETMASK, NULL, &mask);
	ck_assert(!sigismember(&mask, SIGPIPE));
	sigpending(&mask);
	ck_assert(!sigismember(&mask, SIGPIPE));
	ck_assert_int_eq(sigaction(SIGPIPE, NULL, &before), 0);
	ck_assert(before.sa_handler == SIG_DFL);
}
END_TEST

START_TEST(a_signal_that_was_pending_stays_pending)
{
	struct base_error error;
	sigset_t mask, pending;
	char path[64];
	int ends[2];

	sigemptyset(&mask);
	sigaddset(&mask, SIGPIPE);
	pthread_sigmask(SIG_BLOCK, &mask, NULL);
	pthread_kill(pthread_self(), SIGPIPE);
	ck_assert_int_eq(pipe2(ends, O_CLOEXEC), 0);
	snprintf(path, sizeof(path), "/proc/self/fd/%d", ends[1]);
	ck_assert_int_eq(write_to_pipe(path, ends[0], 100000, &error), -EPIPE);
	close(ends[1]);
	sigpending(&pending);
	ck_assert(sigismember(&pending, SIGPIPE));
	pthread_sigmask(SIG_SETMASK, NULL, &pending);
	ck_assert(sigismember(&pending, SIGPIPE));
	signal(SIGPIPE, SIG_IGN);
}
END_TEST

START_TEST(devices_are_written_straight)
{
	struct file_write write = file_write_defaults();
	struct stat status;

	ck_assert_msg(!file_write_all(&write, "/dev/null", NEW), "%s", write.error.text);
	ck_assert_uint_eq(scratch_temporaries("/dev"), 0);
	ck_assert_int_eq(stat("/dev/null", &status), 0);
	ck_assert(S_ISCHR(status.st_mode));
	must_fail("/dev/full", -ENOSPC);
	ck_assert_int_eq(symlink("/dev/null", "link"), 0);
	must_save("link");
	ck_assert(is_link("link"));
}
END_TEST

START_TEST(a_socket_is_refused)
{
	struct sockaddr_un address = { .sun_family = AF_UNIX, .sun_path = "socket" };
	int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);

	ck_assert_int_eq(bind(fd, (struct sockaddr *)&address, sizeof(address)), 0);
	must_fail("socket", -ENXIO);
	close(fd);
}
END_TEST

int main(void)
{
	Suite *suite = suite_create("ring/target");
	TCase *file = tcase_create("temporary file"), *rights = tcase_create("rights");
	TCase *paths = tcase_create("paths"), *replace = tcase_create("no replace");
	TCase *streams = tcase_create("pipes and devices");
	TCase *all[] = { file, rights, paths, replace, streams };

	for (size_t i = 0; i < ARRAY_LENGTH(all); i++) {
		tcase_add_checked_fixture(all[i], setup, teardown);
		tcase_set_timeout(all[i], 30);
		suite_add_tcase(suite, all[i]);
	}
	tcase_add_test(file, bytes_go_to_a_hidden_file_beside_the_target_until_the_commit);
	tcase_add_loop_test(file, a_writer_freed_before_its_commit_leaves_nothing, 0, 6);
	tcase_add_test(file, names_as_long_as_can_be_are_saved_to);
	tcase_add_test(file, paths_longer_than_the_kernel_takes_are_refused);
	tcase_add_test(file, two_writers_to_one_path_do_not_mix);

	tcase_add_test(rights, a_new_file_has_the_mode_that_open_would_give_it);
	tcase_add_test(rights, a_replaced_files_mode_is_kept);
	tcase_add_test(rights, nobody_else_can_read_the_temporary_file_of_a_protected_one);
	tcase_add_test(rights, root_keeps_the_owner_of_a_replaced_file);
	tcase_add_test(rights, a_file_that_is_not_writable_is_not_replaced);
	tcase_add_test(rights, a_directory_that_is_not_writable_is_an_error_that_says_so);
	tcase_add_test(rights, a_directory_that_cannot_be_entered_is_an_error_that_says_so);
	tcase_add_test(rights, a_directory_that_cannot_be_listed_is_written_to);
	tcase_add_test(rights, a_strangers_file_is_replaced_with_a_note);

	tcase_add_test(paths, what_is_no_file_name_is_refused);
	tcase_add_test(paths, a_missing_directory_is_named_with_the_remedy);
	tcase_add_test(paths, a_link_stays_and_what_it_leads_to_is_replaced);
	tcase_add_test(paths, the_temporary_file_lies_beside_what_a_link_leads_to);
	tcase_add_test(paths, chains_of_links_are_followed_as_the_kernel_does);
	tcase_add_test(paths, a_link_that_leads_to_nothing_yet_gets_its_file);
	tcase_add_test(paths, links_that_lead_nowhere_are_refused);

	tcase_add_test(replace, what_must_not_be_replaced_is_not);
	tcase_add_test(replace, what_is_not_there_need_not_be_replaced);
	tcase_add_test(replace, a_name_taken_meanwhile_is_not_replaced);
	tcase_add_test(replace, of_many_who_must_not_replace_one_wins);

	tcase_add_test(streams, a_named_pipe_is_written_straight);
	tcase_add_test(streams, a_pipe_given_by_its_descriptor_is_written_straight);
	tcase_add_test(streams, a_reader_that_goes_away_is_an_error_and_no_signal);
	tcase_add_test(streams, a_signal_that_was_pending_stays_pending);
	tcase_add_test(streams, devices_are_written_straight);
	tcase_add_test(streams, a_socket_is_refused);
	return check_main(suite);
}
