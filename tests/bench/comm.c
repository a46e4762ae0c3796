/* SPDX-License-Identifier: Apache-2.0 */
/* A comm between the "nodes" of this machine: one socket between each rank and rank 0. */
#define _GNU_SOURCE
#include "bench.h"

#include <ioshape/group.h>

#include <errno.h>
#include <poll.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>

#define MOST_RANKS 1024

static struct {
	struct ioshape_comm functions;
	int fds[MOST_RANKS]; /* indexed by the other rank; 0 if there is no socket */
} comm;

/* Returns 0, -EPIPE without a socket, -ETIMEDOUT, or -ECONNRESET for any failure of the socket. */
static int move(uint32_t rank, void *into, const void *from, size_t bytes, uint32_t timeout_ms)
{
	const int fd = rank < MOST_RANKS ? comm.fds[rank] : 0;
	struct pollfd ready = { .fd = fd, .events = into ? POLLIN : POLLOUT };
	ssize_t moved;

	if (!fd)
		return -EPIPE;
	for (size_t done = 0; done < bytes; done += (size_t)moved) {
		if (poll(&ready, 1, (int)timeout_ms) == 0)
			return -ETIMEDOUT;
		moved = into ? recv(fd, (char *)into + done, bytes - done, MSG_DONTWAIT) :
			       send(fd, (const char *)from + done, bytes - done,
				    MSG_DONTWAIT | MSG_NOSIGNAL);
		if (moved < 0 && (errno == EAGAIN || errno == EINTR))
			moved = 0;
		else if (moved <= 0)
			return -ECONNRESET;
	}
	return 0;
}

/* Ignores tags: a rank sends one stream after the other, and a socket keeps the order of bytes. */
static int send_bytes(void *user, uint32_t to, uint32_t tag, const void *data, size_t bytes,
		      uint32_t timeout_ms)
{
	(void)user;
	(void)tag;
	return move(to, NULL, data, bytes, timeout_ms);
}

static int receive_bytes(void *user, uint32_t from, uint32_t tag, void *into, size_t bytes,
			 uint32_t timeout_ms)
{
	(void)user;
	(void)tag;
	return move(from, into, NULL, bytes, timeout_ms);
}

const struct ioshape_comm *comm_of(const char *fds, uint32_t rank)
{
	uint32_t other = rank ? 0 : 1;
	char *end;

	if (!fds)
		return NULL;
	memset(&comm, 0, sizeof(comm));
	comm.functions = (struct ioshape_comm){
		.size = sizeof(comm.functions),
		.send = send_bytes,
		.receive = receive_bytes,
	};
	for (;;) {
		if (other == MOST_RANKS)
			fail("more than %d ranks", MOST_RANKS);
		comm.fds[other++] = (int)strtol(fds, &end, 10);
		if (*end != ':')
			return &comm.functions;
		fds = end + 1;
	}
}
