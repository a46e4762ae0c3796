/* SPDX-License-Identifier: Apache-2.0 */
/* Connecting, within a time. hiredis's own way has neither CLOEXEC nor a limit for names. */
#define _GNU_SOURCE
#include "slots/link.h"

#include <errno.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

/* Look-ups of names under way in this process: each may hang for half a minute. */
#define MOST_LOOKUPS 4
static int lookups;

/* A forked child does not have the threads that would count them down. */
static void forget_lookups(void)
{
	__atomic_store_n(&lookups, 0, __ATOMIC_RELAXED);
}

static void expect_forks(void)
{
	pthread_atfork(NULL, NULL, forget_lookups);
}

int link_time_left_ms(uint64_t until_ns)
{
	uint64_t now = base_now_ns();

	if (until_ns <= now)
		return 0;
	return (int)MIN((until_ns - now + 999999) / 1000000, 3600000u);
}

/* ---- Names ----------------------------------------------------------------------------------- */

/* A look-up, in a thread of its own because it cannot be told when to end. Whoever comes last, the
 * thread or who waits for it, frees it. */
struct lookup {
	pthread_mutex_t lock;
	pthread_cond_t changed;
	char host[ADDRESS_HOST_BYTES], port[8];
	struct addrinfo *found;
	int code;
	bool done, abandoned;
};

static int ask_for(const char *host, const char *port, int flags, struct addrinfo **found)
{
	const struct addrinfo wanted = { .ai_socktype = SOCK_STREAM,
					 .ai_flags = AI_NUMERICSERV | flags };

	return getaddrinfo(host, port, &wanted, found);
}

static void free_lookup(struct lookup *lookup)
{
	pthread_cond_destroy(&lookup->changed);
	pthread_mutex_destroy(&lookup->lock);
	free(lookup);
}

static void *run_lookup(void *argument)
{
	struct lookup *lookup = argument;
	struct addrinfo *found = NULL;
	int code = ask_for(lookup->host, lookup->port, AI_ADDRCONFIG, &found);
	bool abandoned;

	__atomic_sub_fetch(&lookups, 1, __ATOMIC_RELAXED);
	pthread_mutex_lock(&lookup->lock);
	lookup->code = code;
	lookup->found = code ? NULL : found;
	lookup->done = true;
	abandoned = lookup->abandoned;
	pthread_cond_signal(&lookup->changed);
	pthread_mutex_unlock(&lookup->lock);
	if (abandoned) {
		if (lookup->found)
			freeaddrinfo(lookup->found);
		free_lookup(lookup);
	}
	return NULL;
}

static struct lookup *start_lookup(const char *host, const char *port)
{
	static pthread_once_t once = PTHREAD_ONCE_INIT;
	struct lookup *lookup = calloc(1, sizeof(*lookup));
	pthread_t thread;

	if (!lookup)
		return NULL;
	pthread_once(&once, expect_forks);
	pthread_mutex_init(&lookup->lock, NULL);
	base_cond_init(&lookup->changed);
	snprintf(lookup->host, sizeof(lookup->host), "%s", host);
	snprintf(lookup->port, sizeof(lookup->port), "%s", port);
	if (__atomic_add_fetch(&lookups, 1, __ATOMIC_RELAXED) > MOST_LOOKUPS ||
	    base_start_thread(&thread, run_lookup, lookup)) {
		__atomic_sub_fetch(&lookups, 1, __ATOMIC_RELAXED);
		free_lookup(lookup);
		return NULL;
	}
	pthread_detach(thread);
	return lookup;
}

/* EAI_AGAIN if the time is over. */
static int look_up(const char *host, const char *port, uint64_t until_ns, struct addrinfo **found)
{
	struct lookup *lookup = start_lookup(host, port);
	int code = EAI_AGAIN, left;

	if (!lookup)
		return EAI_MEMORY;
	pthread_mutex_lock(&lookup->lock);
	while (!lookup->done && (left = link_time_left_ms(until_ns)) > 0)
		base_cond_wait_ms(&lookup->changed, &lookup->lock, left);
	if (!lookup->done) {
		lookup->abandoned = true;
		pthread_mutex_unlock(&lookup->lock);
		return code;
	}
	pthread_mutex_unlock(&lookup->lock);
	code = lookup->code;
	*found = lookup->found;
	free_lookup(lookup);
	return code;
}

/* ---- Sockets --------------------------------------------------------------------------------- */

static int wait_until_connected(int fd, uint64_t until_ns)
{
	struct pollfd ready = { .fd = fd, .events = POLLOUT };
	socklen_t bytes = sizeof(int);
	int code = 0, ret;

	do {
		ret = poll(&ready, 1, link_time_left_ms(until_ns));
	} while (ret < 0 && errno == EINTR);
	if (ret <= 0)
		return ret ? -errno : -ETIMEDOUT;
	if (getsockopt(fd, SOL_SOCKET, SO_ERROR, &code, &bytes))
		return -errno;
	return -code;
}

static int connect_to(const struct sockaddr *to, socklen_t bytes, uint64_t until_ns)
{
	int fd = base_above_streams(
		socket(to->sa_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
	int ret = 0;

	if (fd < 0)
		return -errno;
	if (connect(fd, to, bytes))
		ret = errno == EINPROGRESS || errno == EINTR ? wait_until_connected(fd, until_ns) :
							       -errno;
	if (!ret)
		return fd;
	close(fd);
	/* The queue of a Unix socket is full: the server accepts nobody. */
	return ret == -EAGAIN ? -ETIMEDOUT : ret;
}

/* A peer that vanished without a word is found out in seconds; all of these are wishes. */
static void set_tcp_options(int fd)
{
	const int on = 1, idle_s = 15, interval_s = 5, probes = 3, unanswered_ms = 10000;

	setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on));
	setsockopt(fd, SOL_SOCKET, SO_KEEPALIVE, &on, sizeof(on));
	setsockopt(fd, IPPROTO_TCP, TCP_KEEPIDLE, &idle_s, sizeof(idle_s));
	setsockopt(fd, IPPROTO_TCP, TCP_KEEPINTVL, &interval_s, sizeof(interval_s));
	setsockopt(fd, IPPROTO_TCP, TCP_KEEPCNT, &probes, sizeof(probes));
	setsockopt(fd, IPPROTO_TCP, TCP_USER_TIMEOUT, &unanswered_ms, sizeof(unanswered_ms));
}

static int connect_any(const struct addrinfo *found, uint64_t until_ns)
{
	int fd = -EADDRNOTAVAIL;
	unsigned count = 0;

	for (const struct addrinfo *at = found; at; at = at->ai_next)
		count++;
	/* The first may be of a network that swallows everything: each gets its part of the time.
	 */
	for (; found; found = found->ai_next, count--) {
		uint64_t now = base_now_ns();
		uint64_t left = until_ns > now ? until_ns - now : 0;

		fd = connect_to(found->ai_addr, found->ai_addrlen, now + left / count);
		if (fd >= 0)
			break;
	}
	return fd;
}

static int fail_to_connect(int code, const char *name, struct base_error *error)
{
	return base_fail(error, code,
			 "cannot connect to %s" BASE_REMEDY
			 "check that it runs, and that this host may reach it",
			 name);
}

static int connect_host(const struct slots_node *node, uint64_t until_ns, const char *name,
			struct base_error *error)
{
	struct addrinfo *found = NULL;
	char port[8];
	int code, fd;

	snprintf(port, sizeof(port), "%u", node->port);
	code = ask_for(node->host, port, AI_NUMERICHOST, &found);
	if (code)
		code = look_up(node->host, port, until_ns, &found);
	if (code)
		return base_refuse(error, code == EAI_AGAIN ? -ETIMEDOUT : -EHOSTUNREACH,
				   "the host of %s cannot be found (%s)" BASE_REMEDY
				   "check its name, and this host's name service",
				   name, gai_strerror(code));
	fd = connect_any(found, until_ns);
	freeaddrinfo(found);
	if (fd < 0)
		return fail_to_connect(fd, name, error);
	set_tcp_options(fd);
	return fd;
}

int link_connect(const struct slots_address *address, const struct slots_node *node,
		 uint64_t until_ns, const char *name, struct base_error *error)
{
	struct sockaddr_un to = { .sun_family = AF_UNIX };
	int fd;

	if (node)
		return connect_host(node, until_ns, name, error);
	/* The path's final 0 may be missing if the path fills its room; the kernel knows. */
	memcpy(to.sun_path, address->path, sizeof(to.sun_path));
	fd = connect_to((const struct sockaddr *)&to, sizeof(to), until_ns);
	return fd < 0 ? fail_to_connect(fd, name, error) : fd;
}
