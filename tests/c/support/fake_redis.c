/* SPDX-License-Identifier: Apache-2.0 */
#define _GNU_SOURCE
#include "support/fake_redis.h"

#include "support/must.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#define GUESTS 32

static void answer(struct fake_redis *fake, struct pollfd *guest)
{
	char heard[65536];
	bool next = fake->words && fake->trickled < strlen(fake->words);
	ssize_t bytes;

	switch (fake->manner) {
	case FAKE_TRICKLES:
		send(guest->fd, next ? fake->words + fake->trickled++ : "+", 1, MSG_NOSIGNAL);
		poll(NULL, 0, 100);
		return;
	case FAKE_FLOODS:
		for (int i = 0; i < 100; i++)
			send(guest->fd, fake->words, strlen(fake->words),
			     MSG_NOSIGNAL | MSG_DONTWAIT);
		return;
	case FAKE_HANGS_UP:
	case FAKE_SAYS:
		bytes = recv(guest->fd, heard, sizeof(heard), 0);
		if (bytes > 0 && fake->manner == FAKE_HANGS_UP &&
		    !memmem(heard, (size_t)bytes, fake->words, strlen(fake->words)))
			return;
		if (fake->manner == FAKE_HANGS_UP)
			bytes = 0;
		if (bytes > 0) {
			send(guest->fd, fake->words, strlen(fake->words), MSG_NOSIGNAL);
			return;
		}
		close(guest->fd);
		guest->fd = -1;
		return;
	default:
		poll(NULL, 0, 10); /* what the client sent stays unread */
	}
}

static void accept_guest(struct fake_redis *fake, struct pollfd *guests)
{
	int fd = accept4(fake->listener, NULL, NULL, SOCK_CLOEXEC);

	if (fd < 0)
		return;
	__atomic_add_fetch(&fake->connections, 1, __ATOMIC_RELAXED);
	for (int i = 1; i < GUESTS && fake->manner != FAKE_CLOSES; i++) {
		if (guests[i].fd < 0) {
			guests[i].fd = fd;
			return;
		}
	}
	close(fd);
}

static void *run(void *argument)
{
	struct fake_redis *fake = argument;
	struct pollfd guests[GUESTS];

	for (int i = 0; i < GUESTS; i++)
		guests[i] = (struct pollfd){ .fd = i ? -1 : fake->listener, .events = POLLIN };
	while (!__atomic_load_n(&fake->stop, __ATOMIC_RELAXED)) {
		if (poll(guests, GUESTS, 20) <= 0)
			continue;
		if (guests[0].revents)
			accept_guest(fake, guests);
		for (int i = 1; i < GUESTS; i++) {
			if (guests[i].fd >= 0 && guests[i].revents)
				answer(fake, &guests[i]);
		}
	}
	for (int i = 1; i < GUESTS; i++) {
		if (guests[i].fd >= 0)
			close(guests[i].fd);
	}
	return NULL;
}

/* Fills the accept queue until the kernel drops new connections. */
static void fill(struct fake_redis *fake, const struct sockaddr_in *where)
{
	for (size_t i = 0; i < sizeof(fake->full) / sizeof(*fake->full); i++) {
		fake->full[i] = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
		if (connect(fake->full[i], (const struct sockaddr *)where, sizeof(*where)) < 0)
			poll(NULL, 0, 20);
	}
}

void fake_redis_start(struct fake_redis *fake, enum fake_manner manner, const char *words)
{
	struct sockaddr_in where = { .sin_family = AF_INET,
				     .sin_addr.s_addr = htonl(INADDR_LOOPBACK) };
	socklen_t bytes = sizeof(where);

	memset(fake, 0, sizeof(*fake));
	fake->manner = manner;
	fake->words = words;
	fake->listener = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
	MUST(!bind(fake->listener, (struct sockaddr *)&where, sizeof(where)), "no free port");
	MUST(!listen(fake->listener, manner == FAKE_FULL ? 0 : 16), "no free port");
	MUST(!getsockname(fake->listener, (struct sockaddr *)&where, &bytes), "no free port");
	snprintf(fake->address, sizeof(fake->address), "redis://127.0.0.1:%u",
		 ntohs(where.sin_port));
	if (manner == FAKE_FULL)
		fill(fake, &where);
	else
		MUST(!pthread_create(&fake->thread, NULL, run, fake), "no thread");
}

void fake_redis_stop(struct fake_redis *fake)
{
	__atomic_store_n(&fake->stop, true, __ATOMIC_RELAXED);
	if (fake->manner != FAKE_FULL)
		pthread_join(fake->thread, NULL);
	for (size_t i = 0; i < sizeof(fake->full) / sizeof(*fake->full); i++) {
		if (fake->manner == FAKE_FULL)
			close(fake->full[i]);
	}
	close(fake->listener);
}

int fake_redis_connections(struct fake_redis *fake)
{
	return __atomic_load_n(&fake->connections, __ATOMIC_RELAXED);
}
