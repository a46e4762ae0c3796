/* SPDX-License-Identifier: Apache-2.0 */
/* Streams on one host and hostile processes, which must do no harm. */
#define _GNU_SOURCE
#include "support/local_stream_case.h"

#include <fcntl.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>

/* ---- Invalid frames -------------------------------------------------------------------------- */

#define MOST_INLINE_BYTES (64 * KIB)

static const struct {
	const char *what;
	struct stream_frame frame;
	size_t extra;
} lies[] = {
	{ "behind the end", { .kind = STREAM_SHARED, .offset = MIB, .bytes = 1 }, 0 },
	{ "across the end", { .kind = STREAM_SHARED, .offset = MIB - 4096, .bytes = 4097 }, 0 },
	{ "overflow", { .kind = STREAM_SHARED, .offset = UINT64_MAX - 10, .bytes = 4096 }, 0 },
	{ "far too long", { .kind = STREAM_SHARED, .bytes = GIB }, 0 },
	{ "nothing", { .kind = STREAM_SHARED }, 0 },
	{ "no bytes", { .kind = STREAM_BYTES }, 0 },
	{ "unknown", { .kind = 4711 }, 0 },
	{ "what a receiver says", { .kind = STREAM_DONE }, 0 },
	{ "too large",
	  { .kind = STREAM_BYTES, .bytes = MOST_INLINE_BYTES + 1 },
	  MOST_INLINE_BYTES + 1 },
	{ "fewer bytes than it says", { .kind = STREAM_BYTES, .bytes = 10 }, 9 },
	{ "more bytes than it says", { .kind = STREAM_END, .bytes = 0 }, 1 },
	{ "far more bytes than there are", { .kind = STREAM_FAIL, .bytes = UINT64_MAX }, 1 },
	{ "a wrong end", { .kind = STREAM_END, .bytes = 17 }, 0 },
	{ "shorter than a head", { 0 }, SIZE_MAX },
};

static int connect_raw(void)
{
	const struct sockaddr_un to = find_socket();
	int fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);

	STREAM_MUST(fd >= 0 && !connect(fd, (const struct sockaddr *)&to, sizeof(to)));
	return fd;
}

static void say_hello(int fd, uint32_t rank, int memory_fd)
{
	const struct stream_frame hello = { .kind = STREAM_HELLO, .offset = rank };

	send_frame(fd, &hello, NULL, 0, &memory_fd, memory_fd >= 0);
}

static struct test_case all_tests = { .name = "all", .setup = begin, .teardown = end };

LOOP_TEST(all_tests, a_lie_is_refused, 0, ARRAY_LENGTH(lies))
{
	static char extra[MOST_INLINE_BYTES + 1];
	struct stream_listener *listener = listen_here();
	struct stream_receiver *receiver;
	struct base_error error = { 0 };
	int fd = connect_raw(), memory_fd = base_shared_open();
	const void *data;
	size_t bytes;

	ck_assert_int_eq(base_shared_grow(memory_fd, MIB), 0);
	say_hello(fd, RANK, memory_fd);
	if (lies[_i].extra == SIZE_MAX)
		ck_assert_int_eq(send(fd, "lie", 3, 0), 3);
	else
		send_frame(fd, &lies[_i].frame, extra, lies[_i].extra, NULL, 0);
	receiver = receive_from(listener, RANK);
	ck_assert_int_eq(stream_receiver_next(receiver, &data, &bytes, &error), -EPROTO);
	ck_assert_msg(error.rank == RANK, "%s", lies[_i].what);
	stream_receiver_free(receiver);
	stream_listener_close(listener);
	close(fd);
	base_close(memory_fd);
}

/* Sends a message of so many bytes, with so many descriptors. */
static void send_fds(int fd, const void *data, size_t bytes, unsigned count)
{
	const int passed[2] = { 0, 1 };
	struct iovec piece = { NULL, bytes };
	union {
		char space[CMSG_SPACE(sizeof(passed))];
		struct cmsghdr head;
	} control = { { 0 } };
	struct msghdr message = { .msg_iov = &piece,
				  .msg_iovlen = 1,
				  .msg_control = control.space,
				  .msg_controllen = CMSG_SPACE(count * sizeof(int)) };

	memcpy(&piece.iov_base, &data, sizeof(data));
	control.head.cmsg_level = SOL_SOCKET;
	control.head.cmsg_type = SCM_RIGHTS;
	control.head.cmsg_len = CMSG_LEN(count * sizeof(int));
	memcpy(CMSG_DATA(&control.head), passed, count * sizeof(int));
	ck_assert_int_eq(sendmsg(fd, &message, MSG_NOSIGNAL), (ssize_t)bytes);
}

/* end() checks that no descriptor is left open. */
TEST(all_tests, descriptors_that_nobody_wants_are_closed)
{
	const struct stream_frame say_hello = { .kind = STREAM_HELLO, .offset = RANK },
				  say_end = { .kind = STREAM_END };
	uint8_t hello[STREAM_FRAME_BYTES], no_hello[STREAM_FRAME_BYTES];
	static const struct {
		size_t bytes;
		unsigned fds;
		bool no_hello;
	} messages[] = { { 0, 1, false },
			 { 0, 2, false },
			 { 3, 2, false },
			 { 3, 1, false },
			 { sizeof(hello), 2, false },
			 { sizeof(hello), 2, true },
			 { sizeof(hello), 1, true } };
	const struct stream_wait wait = { not_at_all, NULL };
	struct stream_listener *listener = listen_here();
	struct stream_receiver *receiver;
	int fds[ARRAY_LENGTH(messages)];

	stream_write_frame(hello, &say_hello);
	stream_write_frame(no_hello, &say_end);
	for (size_t i = 0; i < ARRAY_LENGTH(messages); i++) {
		fds[i] = connect_raw();
		send_fds(fds[i], messages[i].no_hello ? no_hello : hello, messages[i].bytes,
			 messages[i].fds);
		/* After an empty message the connection still works. */
		if (!messages[i].bytes)
			send_fds(fds[i], no_hello, sizeof(no_hello), 1);
	}
	receiver = receive_from(listener, RANK);
	stream_receiver_free(receiver);
	ck_assert_int_eq(stream_receiver_open_local(&receiver, listener, RANK + 1, &wait, NULL),
			 -ETIMEDOUT);
	stream_listener_close(listener);
	for (size_t i = 0; i < ARRAY_LENGTH(messages); i++)
		close(fds[i]);
}

TEST(all_tests, memory_that_could_shrink_is_refused)
{
	struct stream_listener *listener = listen_here();
	struct stream_receiver *receiver;
	struct base_error error = { 0 };
	int fd = connect_raw(), memory_fd = memfd_create("test", MFD_CLOEXEC | MFD_ALLOW_SEALING);

	ck_assert_int_eq(ftruncate(memory_fd, MIB), 0);
	say_hello(fd, RANK, memory_fd);
	ck_assert_int_eq(
		stream_receiver_open_local(&receiver, listener, RANK, &stream_patient, &error),
		-EPERM);
	ck_assert_ptr_null(receiver);
	ck_assert_uint_eq(error.rank, RANK);
	stream_listener_close(listener);
	close(fd);
	close(memory_fd);
}

TEST(all_tests, our_memory_cannot_shrink)
{
	int fd = base_shared_open();

	ck_assert_int_ge(fd, 0);
	ck_assert_int_eq(base_shared_grow(fd, MIB), 0);
	ck_assert_int_eq(ftruncate(fd, 4096), -1);
	ck_assert_int_eq(errno, EPERM);
	base_close(fd);
}

TEST(all_tests, strangers_are_sent_away)
{
	/* Correct except for the version of the format. */
	const struct stream_frame hello = { .kind = STREAM_HELLO, .offset = RANK };
	uint8_t nearly[STREAM_FRAME_BYTES];
	struct stream_plan plan = { .rank = RANK, .seed = 4, .pieces = 5, .most_bytes = MIB };
	struct stream_listener *listener = listen_here();
	struct stream_receiver *receiver;
	int gone = connect_raw(), rude, beyond;
	pid_t child;
	char byte;

	close(gone);
	child = stream_start(send_random, &plan);
	/*
	 * It connects after the child. If it were accepted as a rank, it would replace the child.
	 */
	stream_await_sleep(child);
	rude = connect_raw();
	stream_write_frame(nearly, &hello);
	nearly[3]++;
	ck_assert_int_eq(send(rude, nearly, sizeof(nearly), 0), sizeof(nearly));
	beyond = connect_raw();
	say_hello(beyond, MOST_RANKS, -1);
	receiver = receive_from(listener, RANK);
	stream_receive_plan(receiver, &plan);
	stream_expect_well(child);
	ck_assert_int_eq(recv(rude, &byte, 1, MSG_DONTWAIT), 0);
	ck_assert_int_eq(recv(beyond, &byte, 1, MSG_DONTWAIT), 0);
	stream_receiver_free(receiver);
	stream_listener_close(listener);
	close(beyond);
	close(rude);
}

/*
 * Connects as another user, which only root can do. The folder's mode prevents this; the second
 * connection bypasses it, and its messages must be ignored.
 */
static void come_as_nobody(const void *argument)
{
	const struct sockaddr_un to = find_socket();
	struct sockaddr_un opened = { .sun_family = AF_UNIX };
	int file, fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);

	(void)argument;
	STREAM_MUST(fd >= 0 && !chmod(to.sun_path, 0777));
	file = open(to.sun_path, O_PATH | O_CLOEXEC);
	snprintf(opened.sun_path, sizeof(opened.sun_path), "/proc/self/fd/%d", file);
	STREAM_MUST(!setresuid(65534, 65534, 65534));
	STREAM_MUST(connect(fd, (const struct sockaddr *)&to, sizeof(to)) && errno == EACCES);
	STREAM_MUST(!connect(fd, (const struct sockaddr *)&opened, sizeof(opened)));
	say_hello(fd, RANK, -1);
}

TEST_IF(all_tests, other_users_are_sent_away, !geteuid())
{
	const struct stream_wait wait = { not_at_all, NULL };
	struct stream_listener *listener = listen_here();
	struct stream_receiver *receiver;
	struct base_error error = { 0 };
	pid_t child = stream_start(come_as_nobody, NULL);

	stream_expect_well(child);
	ck_assert_int_eq(stream_receiver_open_local(&receiver, listener, RANK, &wait, &error),
			 -ETIMEDOUT);
	stream_listener_close(listener);
}

TEST(all_tests, a_rank_that_comes_again_begins_anew)
{
	struct stream_plan plan = { .rank = RANK, .seed = 8, .pieces = 5, .most_bytes = MIB };
	struct stream_listener *listener = listen_here();
	struct stream_receiver *receiver;
	int first = connect_raw();
	pid_t child;
	char byte;

	say_hello(first, RANK, -1);
	child = stream_start(send_random, &plan);
	stream_await_sleep(child); /* the child has connected, and waits for the receiver to read */
	receiver = receive_from(listener, RANK);
	stream_receive_plan(receiver, &plan);
	ck_assert_int_eq(recv(first, &byte, 1, MSG_DONTWAIT), 0);
	stream_receiver_free(receiver);
	stream_listener_close(listener);
	close(first);
	stream_expect_well(child);
}
