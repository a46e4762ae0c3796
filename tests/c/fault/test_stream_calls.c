/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A stream between two processes of a host, while each call of one end fails in turn. Either the
 * stream carries all bytes, or both ends get an error and leave nothing open.
 */
#define _GNU_SOURCE
#include "support/calls.h"
#include "support/fail_memory.h"
#include "support/local_stream_case.h"

#include <dirent.h>
#include <stdatomic.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>

#define PIECE (96 * KIB)
#define SEED 5u

/* Memory that both ends share. */
static struct shared {
	atomic_bool over;
	int ret; /* result of the child */
	int fds; /* descriptors that the child left open */
	char sentence[1024];
} * shared;

/* Waits until the other end has ended. */
static int wait_for_other(void *user, struct base_error *error)
{
	(void)user;
	return atomic_load(&shared->over) ? base_fail(error, -ETIMEDOUT, "it has ended") : 0;
}

static const struct stream_wait while_other_lives = { wait_for_other, NULL };

static int receive_all(struct stream_receiver *receiver, struct base_error *error)
{
	uint64_t at = 0;
	const void *data;
	size_t bytes = 1;
	int ret = 0;

	while (!ret && bytes) {
		ret = stream_receiver_next(receiver, &data, &bytes, error);
		if (!ret && !stream_holds(data, at, bytes, SEED))
			stream_fail("other bytes came");
		at += bytes;
	}
	if (!ret && at != 2 * PIECE)
		stream_fail("fewer bytes came");
	return ret;
}

static int receive(struct stream_memory *unused, struct base_error *error)
{
	struct stream_listener *listener = NULL;
	struct stream_receiver *receiver = NULL;
	int ret = stream_listener_open(&listener, address, error);

	(void)unused;
	if (!ret)
		ret = stream_receiver_open_local(&receiver, listener, RANK, &while_other_lives,
						 error);
	if (!ret)
		ret = receive_all(receiver, error);
	stream_receiver_free(receiver);
	stream_listener_close(listener);
	return ret;
}

static int send_all(struct stream_memory *memory, struct base_error *error)
{
	struct stream_sender *sender = NULL;
	int ret = stream_sender_open_local(&sender, address, RANK, memory->fd, &while_other_lives,
					   error);

	if (!ret)
		ret = stream_sender_put_shared(sender, memory->base, 0, PIECE,
					       base_crc32(0, memory->base, PIECE), error);
	if (!ret)
		ret = stream_sender_put(sender, memory->base + PIECE, PIECE, error);
	if (!ret)
		ret = stream_sender_await_taken(sender, PIECE, error);
	if (!ret)
		ret = stream_sender_end(sender, base_crc32(0, memory->base, 2 * PIECE), error);
	stream_sender_free(sender, ret ? "a call failed" : NULL);
	return ret;
}

/* Call that fails, in the end under test. */
static struct {
	int (*run)(struct stream_memory *memory, struct base_error *error);
	enum calls_mode mode;
	unsigned long nth;
	int code;
} failing;

static int run_end(int (*run)(struct stream_memory *memory, struct base_error *error),
		   struct base_error *error)
{
	struct stream_memory memory;
	int ret;

	stream_memory_open(&memory, MIB);
	stream_fill(memory.base, 0, 2 * PIECE, SEED);
	if (run == failing.run)
		calls_begin(failing.mode, failing.nth, failing.code);
	ret = run(&memory, error);
	calls_end();
	stream_memory_close(&memory);
	return ret;
}

static void send_in_child(const void *unused)
{
	const int before = stream_count_fds();
	struct base_error error = { 0 };

	(void)unused;
	shared->ret = run_end(send_all, &error);
	snprintf(shared->sentence, sizeof(shared->sentence), "%s", error.text);
	shared->fds = stream_count_fds() - before;
	atomic_store(&shared->over, true);
}

static void setup(void)
{
	begin();
	shared = mmap(NULL, sizeof(*shared), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1,
		      0);
	ck_assert_ptr_ne(shared, MAP_FAILED);
	calls_record();
	fail_memory_by(calls_fail);
}

static void teardown(void)
{
	munmap(shared, sizeof(*shared));
	end();
}

static struct test_case tests = { .name = "local", .setup = setup, .teardown = teardown };

static const int codes[] = { EIO, EINTR, EAGAIN, ENOMEM, EMFILE, ECONNRESET };

static void run_both(enum calls_mode mode, unsigned long *failed)
{
	struct base_error error = { 0 };
	pid_t child;
	int ret;

	memset(shared, 0, sizeof(*shared));
	failing.mode = mode;
	child = stream_start(send_in_child, NULL);
	ret = run_end(receive, &error);
	atomic_store(&shared->over, true);
	stream_expect_well(child);
	ck_assert_int_eq(error.code, ret);
	ck_assert_msg(!ret == !*error.text, "call %lu with %d: no sentence for %d", failing.nth,
		      failing.code, ret);
	ck_assert_msg(!shared->ret == !*shared->sentence, "call %lu with %d: no sentence for %d",
		      failing.nth, failing.code, shared->ret);
	ck_assert_msg(!shared->fds && stream_count_fds() == fds_before,
		      "call %lu with %d: descriptors left open", failing.nth, failing.code);
	*failed += ret || shared->ret;
}

/*
 * Leaves out calls on the shared folder: other tests may use it too, and a failed removal would
 * leave files there.
 */
static bool is_tried(const char *name)
{
	return name && strcmp(name, "readdir64") != 0 && strcmp(name, "unlink") != 0;
}

LOOP_TEST(tests, each_call_may_fail, 0, 2 * (int)ARRAY_LENGTH(codes))
{
	const char *names[CALLS_MOST];
	unsigned long failed = 0, count;

	failing.run = _i % 2 ? send_all : receive;
	failing.code = codes[_i / 2];
	run_both(CALLS_COUNT, &failed);
	ck_assert_uint_eq(failed, 0);
	count = MIN(atomic_load(&calls_record()->count), CALLS_MOST);
	for (unsigned long i = 0; i < count; i++)
		names[i] = atomic_load(&calls_record()->names[i]);
	for (failing.nth = 1; failing.nth <= count; failing.nth++)
		if (is_tried(names[failing.nth - 1]))
			run_both(CALLS_FAIL, &failed);
	ck_assert_uint_ge(failed, 3);
}

static void listen_and_die(const void *unused)
{
	(void)unused;
	calls_begin(CALLS_KILL, failing.nth, 0);
	listen_here();
	calls_end();
}

/*
 * Returns the number of sockets without a listener. Sockets on which other tests are about to
 * listen count, too.
 */
static unsigned count_dead(void)
{
	struct sockaddr_un at = find_socket();
	struct dirent *entry;
	unsigned dead = 0;
	size_t folder;
	DIR *listing;

	folder = (size_t)(strrchr(at.sun_path, '/') + 1 - at.sun_path);
	at.sun_path[folder] = 0;
	listing = opendir(at.sun_path);
	ck_assert_ptr_nonnull(listing);
	while ((entry = readdir(listing))) {
		const int fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);

		ck_assert_int_ge(fd, 0);
		snprintf(at.sun_path + folder, sizeof(at.sun_path) - folder, "%.60s",
			 entry->d_name);
		dead += strstr(entry->d_name, "stream-") &&
			connect(fd, (const struct sockaddr *)&at, sizeof(at)) &&
			errno == ECONNREFUSED;
		close(fd);
	}
	closedir(listing);
	return dead;
}

TEST(tests, a_listener_killed_at_any_call_leaves_no_socket)
{
	int status = 1;

	for (failing.nth = 1; status; failing.nth++) {
		const pid_t child = stream_start(listen_and_die, NULL);

		ck_assert_int_eq(waitpid(child, &status, 0), child);
	}
	/* A killed child also leaves its socket. New listeners remove such sockets. */
	do {
		stream_listener_close(listen_here());
	} while (count_dead());
}

TEST(tests, a_listener_whose_socket_was_tidied_away_makes_another)
{
	calls_begin_named("link", ENOENT);
	stream_listener_close(listen_here());
	calls_end();
	ck_assert_int_ge(calls_find("link", 0), 0);
}

int main(void)
{
	return check_run("stream_calls");
}
