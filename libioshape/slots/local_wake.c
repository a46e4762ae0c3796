/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Datagrams that wake processes whose requests were granted. Each pool of a process listens under a
 * random name, which stands beside its requests in the table. Names are the kernel's (abstract):
 * nothing is left behind.
 *
 * A wake is a hint, and heartbeats tell as well, 20 ms later. They alone do so where another
 * process has the name, which nobody can know before it is taken, or between containers that share
 * the pool's folder but not their network. Sockets with a path would be no better: members are of
 * several users, so each must be able to wake any other, and names are in a table that all can
 * read.
 */
#define _GNU_SOURCE
#include "slots/local.h"

#include <errno.h>
#include <poll.h>
#include <stdio.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

#define MOST_HASTY 16
#define MOST_AT_ONCE 64 /* wakes that are taken for one */

static socklen_t name_of(uint32_t wake, struct sockaddr_un *name)
{
	*name = (struct sockaddr_un){ .sun_family = AF_UNIX };
	snprintf(name->sun_path + 1, sizeof(name->sun_path) - 1, "ioshape-wake-%08x", wake);
	return (socklen_t)(offsetof(struct sockaddr_un, sun_path) +
			   sizeof("\0ioshape-wake-01234567") - 1);
}

static int new_socket(void)
{
	return base_above_streams(socket(AF_UNIX, SOCK_DGRAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
}

void local_open_wake(struct local_pool *pool)
{
	const uint32_t wake = (uint32_t)base_random() | 1;
	struct sockaddr_un name;
	const socklen_t bytes = name_of(wake, &name);

	pool->wake = 0;
	pool->wake_fd = new_socket();
	if (pool->wake_fd < 0)
		return;
	if (!bind(pool->wake_fd, (const struct sockaddr *)&name, bytes)) {
		pool->wake = wake;
		return;
	}
	close(pool->wake_fd);
	pool->wake_fd = -1;
}

void local_wake(const uint32_t *wakes, uint32_t count)
{
	struct sockaddr_un name;
	int fd;

	if (!count)
		return;
	fd = new_socket();
	for (uint32_t i = 0; fd >= 0 && i < count; i++) {
		const socklen_t bytes = name_of(wakes[i], &name);

		/* Whoever has a full queue has been woken already. */
		sendto(fd, "", 1, MSG_NOSIGNAL, (const struct sockaddr *)&name, bytes);
	}
	if (fd >= 0)
		close(fd);
}

static void drain(int fd)
{
	char bytes[8];

	for (int i = 0; i < MOST_AT_ONCE && read(fd, bytes, sizeof(bytes)) > 0; i++)
		;
}

/*
 * Anybody can send to the socket. Datagrams that are there already when we come to wait, many times
 * in a row, are not from those who let us in.
 */
static void slow_down(struct local_pool *pool, uint64_t began)
{
	const struct timespec pause = { .tv_nsec = 5000000 };

	pool->hasty = base_now_ns() - began < 1000000 ? pool->hasty + 1 : 0;
	if (pool->hasty > MOST_HASTY)
		nanosleep(&pause, NULL);
}

int local_wait(void *opaque, uint32_t timeout_ms, struct base_error *error)
{
	struct local_pool *pool = opaque;
	struct pollfd polled[2] = {
		{ .fd = pool->interrupt, .events = POLLIN },
		{ .fd = pool->wake_fd, .events = POLLIN }, /* -1 is passed over */
	};
	const uint64_t began = base_now_ns();
	int ready = poll(polled, 2, (int)MIN(timeout_ms, INT32_MAX));

	if (ready < 0 && errno != EINTR)
		return base_refuse(error, IOSHAPE_E_COORDINATOR,
				   "waiting for a slot of pool \"%s\" failed (errno %d)",
				   pool->config.pool, errno);
	if (ready <= 0)
		return 0;
	if (polled[0].revents)
		drain(polled[0].fd);
	if (polled[1].revents) {
		drain(polled[1].fd);
		slow_down(pool, began);
	}
	return 0;
}
