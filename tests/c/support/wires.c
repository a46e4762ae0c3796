/* SPDX-License-Identifier: Apache-2.0 */
#define _GNU_SOURCE
#include "support/wires.h"

#include <ioshape/group.h>

#include <errno.h>
#include <poll.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

static int move_bytes(int fd, void *data, size_t bytes, uint32_t timeout_ms, bool out)
{
	struct pollfd ready = { .fd = fd, .events = out ? POLLOUT : POLLIN };
	ssize_t moved;

	while (bytes) {
		if (!poll(&ready, 1, (int)timeout_ms))
			return -ETIMEDOUT;
		moved = out ? send(fd, data, bytes, MSG_NOSIGNAL | MSG_DONTWAIT) :
			      recv(fd, data, bytes, MSG_DONTWAIT);
		if (moved < 0 && (errno == EAGAIN || errno == EINTR))
			continue;
		if (moved <= 0)
			return -ECONNRESET;
		data = (char *)data + moved;
		bytes -= (size_t)moved;
	}
	return 0;
}

static int send_to(void *user, uint32_t to, uint32_t tag, const void *data, size_t bytes,
		   uint32_t timeout_ms)
{
	const struct wires *wires = user;

	(void)tag;
	return move_bytes(wires->fds[wires->rank][to][1], (void *)(uintptr_t)data, bytes,
			  timeout_ms, true);
}

static int receive_from(void *user, uint32_t from, uint32_t tag, void *into, size_t bytes,
			uint32_t timeout_ms)
{
	const struct wires *wires = user;

	(void)tag;
	return move_bytes(wires->fds[from][wires->rank][0], into, bytes, timeout_ms, false);
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
