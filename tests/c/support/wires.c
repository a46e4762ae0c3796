/* SPDX-License-Identifier: Apache-2.0 */
#define _GNU_SOURCE
#include "support/wires.h"

#include <ioshape/group.h>

#include <errno.h>
#include <poll.h>
#include <string.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

struct envelope {
	uint32_t tag, reserved;
	uint64_t bytes;
};

static uint64_t now_ns(void)
{
	struct timespec now;

	clock_gettime(CLOCK_MONOTONIC, &now);
	return (uint64_t)now.tv_sec * 1000000000 + (uint64_t)now.tv_nsec;
}

/* Moves all bytes. Returns 0, -ETIMEDOUT or -ECONNRESET. */
static int move(int fd, void *into, const void *from, size_t bytes, uint64_t until_ns)
{
	while (bytes) {
		struct pollfd ready = { .fd = fd, .events = into ? POLLIN : POLLOUT };
		const uint64_t now = now_ns();
		ssize_t moved;

		if (now >= until_ns)
			return -ETIMEDOUT;
		if (poll(&ready, 1, (int)((until_ns - now) / 1000000) + 1) <= 0)
			continue;
		moved = into ? recv(fd, into, bytes, MSG_DONTWAIT) :
			       send(fd, from, bytes, MSG_DONTWAIT | MSG_NOSIGNAL);
		if (moved < 0 && (errno == EAGAIN || errno == EINTR))
			continue;
		if (moved <= 0)
			return -ECONNRESET;
		bytes -= (size_t)moved;
		if (into)
			into = (char *)into + moved;
		else
			from = (const char *)from + moved;
	}
	return 0;
}

static int send_to(void *user, uint32_t to, uint32_t tag, const void *data, size_t bytes,
		   uint32_t timeout_ms)
{
	const struct wires *wires = user;
	const int fd = wires->fds[wires->rank][to][1];
	const uint64_t until_ns = now_ns() + (uint64_t)timeout_ms * 1000000;
	const struct envelope envelope = { .tag = tag, .bytes = bytes };
	char heard;
	int ret = move(fd, NULL, &envelope, sizeof(envelope), until_ns);

	if (!ret)
		ret = move(fd, NULL, data, bytes, until_ns);
	if (!ret && wires->synchronous)
		ret = move(fd, &heard, NULL, 1, until_ns);
	return ret;
}

static int receive_from(void *user, uint32_t from, uint32_t tag, void *into, size_t bytes,
			uint32_t timeout_ms)
{
	struct wires *wires = user;
	const int fd = wires->fds[from][wires->rank][0];
	const uint64_t until_ns = now_ns() + (uint64_t)timeout_ms * 1000000;
	struct envelope envelope;
	int ret = move(fd, &envelope, NULL, sizeof(envelope), until_ns);

	/* The protocol leaves no other message in the channel. */
	if (!ret && (envelope.tag != tag || envelope.bytes != bytes))
		ret = -EPROTO;
	if (!ret)
		ret = move(fd, into, NULL, bytes, until_ns);
	if (!ret && wires->synchronous)
		ret = move(fd, NULL, "", 1, until_ns);
	/* A test reads the counter meanwhile. */
	__atomic_add_fetch(&wires->messages, 1, __ATOMIC_RELAXED);
	return ret;
}

static void cut(int *fd)
{
	if (*fd >= 0)
		close(*fd);
	*fd = -1;
}

bool wires_lay(struct wires *wires, uint32_t ranks)
{
	memset(wires, 0, sizeof(*wires));
	wires->ranks = ranks;
	memset(wires->fds, -1, sizeof(wires->fds));
	for (uint32_t from = 0; from < ranks; from++)
		for (uint32_t to = 0; to < ranks; to++)
			if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0,
				       wires->fds[from][to]))
				return false;
	return true;
}

const struct ioshape_comm *wires_be(struct wires *wires, uint32_t rank)
{
	for (uint32_t from = 0; from < wires->ranks; from++) {
		for (uint32_t to = 0; to < wires->ranks; to++) {
			if (to != rank)
				cut(&wires->fds[from][to][0]);
			if (from != rank)
				cut(&wires->fds[from][to][1]);
		}
	}
	wires->rank = rank;
	wires->comm = (struct ioshape_comm){
		.size = sizeof(wires->comm),
		.user = wires,
		.send = send_to,
		.receive = receive_from,
	};
	return &wires->comm;
}

void wires_cut(struct wires *wires)
{
	for (uint32_t from = 0; from < wires->ranks; from++) {
		for (uint32_t to = 0; to < wires->ranks; to++) {
			cut(&wires->fds[from][to][0]);
			cut(&wires->fds[from][to][1]);
		}
	}
	wires->ranks = 0;
}
