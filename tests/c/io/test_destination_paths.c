/* SPDX-License-Identifier: Apache-2.0 */
/* Destinations that are links, directories, pipes and devices. */
#define _GNU_SOURCE
#include "support/check_main.h"
#include "support/target_case.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <signal.h>
#include <sys/socket.h>
#include <sys/un.h>

/* ---- Refused paths --------------------------------------------------------------------------- */

static struct test_case paths = { .name = "paths and links",
				  .setup = target_setup,
				  .teardown = target_teardown };

TEST(paths, what_is_no_file_name_is_refused)
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

TEST(paths, a_missing_directory_is_an_error_with_a_remedy)
{
	ck_assert_str_ne(must_fail("missing/file", -ENOENT)->remedy, "");
	scratch_write("file", OLD);
	must_fail("file/below", -ENOTDIR);
	ck_assert(scratch_same("file", OLD));
}

/* ---- Symbolic links -------------------------------------------------------------------------- */

TEST(paths, a_link_stays_and_what_it_leads_to_is_replaced)
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

TEST(paths, the_temporary_file_lies_beside_what_a_link_leads_to)
{
	struct file_write write = file_write_defaults();

	mkdir("there", 0777);
	ck_assert_int_eq(symlink("there/file", "link"), 0);
	ck_assert_int_eq(file_write_open(&write, "link"), 0);
	ck_assert_uint_eq(scratch_temporaries("there"), 1);
	ck_assert_uint_eq(scratch_temporaries("."), 0);
	file_write_close(&write);
}

TEST(paths, chains_of_links_are_followed_as_the_kernel_does)
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

TEST(paths, a_link_that_leads_to_nothing_yet_gets_its_file)
{
	mkdir("there", 0777);
	ck_assert_int_eq(symlink("there/second", "first"), 0);
	ck_assert_int_eq(symlink("file", "there/second"), 0);
	must_save("first");
	ck_assert(is_link("first"));
	ck_assert(is_link("there/second"));
	ck_assert(scratch_same("there/file", NEW));
}

TEST(paths, links_that_lead_nowhere_are_refused)
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
	/* A link to a directory may be a component of the path. */
	must_save("to-directory/file");
	ck_assert(scratch_same("directory/file", NEW));
}

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

/* Writes 1 MiB to a pipe at `path`, and reads at most `stop_after` bytes of it from `fd`. */
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
	write.options.expected_bytes = sizeof(data) * 3; /* pipes must not be preallocated */
	ret = file_write_all(&write, path, data, sizeof(data));
	pthread_join(reader, NULL);
	if (!ret) {
		ck_assert_uint_eq(drain.bytes, sizeof(data));
		ck_assert_uint_eq(drain.crc, base_crc32(0, data, sizeof(data)));
	}
	*error = write.error;
	return ret;
}

static struct test_case streams = { .name = "pipes and devices",
				    .setup = target_setup,
				    .teardown = target_teardown };

TEST(streams, a_named_pipe_is_written_straight)
{
	struct base_error error;
	int fd;

	ck_assert_int_eq(mkfifo("pipe", 0666), 0);
	/* Opens both ends, so that neither side waits for the other. */
	fd = open("pipe", O_RDWR | O_CLOEXEC);
	ck_assert_msg(!write_to_pipe("pipe", fd, 1 << 20, &error), "%s", error.text);
}

/* A shell's >(command) passes such a path. */
TEST(streams, a_pipe_given_by_its_descriptor_is_written_straight)
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

TEST(streams, a_reader_that_goes_away_is_an_error_and_no_signal)
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
	close(ends[1]);
	/* The signal's mask and handler are unchanged. */
	pthread_sigmask(SIG_SETMASK, NULL, &mask);
	ck_assert(!sigismember(&mask, SIGPIPE));
	sigpending(&mask);
	ck_assert(!sigismember(&mask, SIGPIPE));
	ck_assert_int_eq(sigaction(SIGPIPE, NULL, &before), 0);
	ck_assert(before.sa_handler == SIG_DFL);
}

TEST(streams, a_signal_that_was_pending_stays_pending)
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

TEST(streams, devices_are_written_straight)
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

TEST(streams, a_socket_is_refused)
{
	struct sockaddr_un address = { .sun_family = AF_UNIX, .sun_path = "socket" };
	int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);

	ck_assert_int_eq(bind(fd, (struct sockaddr *)&address, sizeof(address)), 0);
	must_fail("socket", -ENXIO);
	close(fd);
}
