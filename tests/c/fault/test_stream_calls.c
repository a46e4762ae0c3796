/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Listeners of streams on a host that are killed at a system call, and whose sockets are removed.
 */
#define _GNU_SOURCE
#include "support/calls.h"
#include "support/local_stream_case.h"

#include <dirent.h>
#include <string.h>
#include <sys/wait.h>

static unsigned long dies_at; /* number of the call that ends the listener */

static void setup(void)
{
	begin();
	calls_record();
}

static struct test_case tests = { .name = "local", .setup = setup, .teardown = end };

static void listen_and_die(const void *unused)
{
	(void)unused;
	calls_begin(CALLS_KILL, dies_at, 0);
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

	for (dies_at = 1; status; dies_at++) {
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
