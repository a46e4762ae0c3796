/* SPDX-License-Identifier: Apache-2.0 */
#define _GNU_SOURCE
#include "support/pair_comm.h"
#include "support/stream_case.h"

#include <ioshape/group.h>

#include <errno.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

struct envelope {
	uint32_t tag, reserved;
	uint64_t bytes;
};

/* Moves all bytes. Returns 0, -ETIMEDOUT or -ECONNRESET. */
static int move(int fd, void *into, const void *from, size_t bytes, uint64_t until_ns)
{
	while (bytes) {
		struct pollfd ready = { .fd = fd, .events = into ? POLLIN : POLLOUT };
		const uint64_t now = base_now_ns();
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
	struct pair_comm *pair = user;
	const int fd = pair->fds[pair->rank][pair->rank];
	const uint64_t until_ns = base_now_ns() + base_ms_to_ns(timeout_ms);
	const struct envelope envelope = { .tag = tag, .bytes = bytes };
	char heard;
	int ret;

	STREAM_MUST(to == !pair->rank);
	ret = move(fd, NULL, &envelope, sizeof(envelope), until_ns);
	if (!ret)
		ret = move(fd, NULL, data, bytes, until_ns);
	if (!ret && pair->synchronous)
		ret = move(fd, &heard, NULL, 1, until_ns);
	return ret;
}

static int receive_from(void *user, uint32_t from, uint32_t tag, void *into, size_t bytes,
			uint32_t timeout_ms)
{
	struct pair_comm *pair = user;
	const int fd = pair->fds[from][pair->rank];
	const uint64_t until_ns = base_now_ns() + base_ms_to_ns(timeout_ms);
	struct envelope envelope;
	int ret;

	STREAM_MUST(from == !pair->rank);
	ret = move(fd, &envelope, NULL, sizeof(envelope), until_ns);
	if (ret)
		return ret;
	/* The protocol leaves no other message in the channel. */
	STREAM_MUST(envelope.tag == tag);
	STREAM_MUST(envelope.bytes == bytes);
	ret = move(fd, into, NULL, bytes, until_ns);
	if (!ret && pair->synchronous)
		ret = move(fd, NULL, "", 1, until_ns);
	/* A test reads the counter meanwhile. */
	__atomic_add_fetch(&pair->messages, 1, __ATOMIC_RELAXED);
	return ret;
}

void pair_comm_open(struct pair_comm *pair, bool synchronous)
{
	*pair = (struct pair_comm){ .synchronous = synchronous };
	for (unsigned i = 0; i < 2; i++)
		STREAM_MUST(!socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, pair->fds[i]));
}

const struct ioshape_comm *pair_comm_be(struct pair_comm *pair, uint32_t rank)
{
	pair->rank = rank;
	for (unsigned i = 0; i < 2; i++) {
		close(pair->fds[i][!rank]);
		pair->fds[i][!rank] = -1;
	}
	pair->comm = (struct ioshape_comm){
		.size = sizeof(pair->comm),
		.user = pair,
		.send = send_to,
		.receive = receive_from,
	};
	return &pair->comm;
}

void pair_comm_close(struct pair_comm *pair)
{
	for (unsigned i = 0; i < 2; i++)
		close(pair->fds[i][pair->rank]);
}
