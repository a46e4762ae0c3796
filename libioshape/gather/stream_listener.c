/* SPDX-License-Identifier: Apache-2.0 */
/* Where the ranks of a host come to, in any order; each is kept until its stream is asked for. */
#define _GNU_SOURCE
#include "gather/local_link.h"

#include <dirent.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* More than ranks on any host; each is a file descriptor or three. */
#define MOST_NEWCOMERS 4096u
/* A connection that has not named its rank by then is closed. */
#define SILENCE_MS 10000u

/* Begins the name that a socket has before it listens. */
#define HIDDEN_MARK "." LOCAL_SOCKET_MARK
/* Listeners that tidy may take ours for a dead one's just then. */
#define MOST_TRIES 16

struct newcomer {
	struct local_link link;
	uint64_t since_ns;
	uint64_t rank; /* NOBODY before it has said so */
	int memory_fd;
};

#define NOBODY UINT64_MAX

struct gather_listener {
	int fd;
	struct sockaddr_un at;      /* its path is empty before it is there */
	struct newcomer *newcomers; /* in no order */
	struct pollfd *ready;       /* as many, and one for the listener itself */
	size_t count, room;
};

/* ---- The socket ------------------------------------------------------------------------------ */

/* It gets its name only when it listens: a socket with a name that nobody listens at is dead.
 * -ENOENT: what it was called before was removed meanwhile. */
static int listen_at(int fd, const struct sockaddr_un *at)
{
	struct sockaddr_un before = { .sun_family = AF_UNIX };
	int ret = 0;

	snprintf(before.sun_path, sizeof(before.sun_path), "%.*s/" HIDDEN_MARK "%016llx",
		 (int)(strrchr(at->sun_path, '/') - at->sun_path), at->sun_path,
		 (unsigned long long)base_random());
	if (bind(fd, (const struct sockaddr *)&before, sizeof(before)))
		return -errno;
	if (listen(fd, SOMAXCONN) || link(before.sun_path, at->sun_path))
		ret = errno == EEXIST ? -EADDRINUSE : -errno;
	unlink(before.sun_path);
	return ret;
}

/* The socket, or a negative errno. */
static int listen_anew(const struct sockaddr_un *at)
{
	int fd, ret = -ENOENT;

	for (int tries = 0; ret == -ENOENT && tries < MOST_TRIES; tries++) {
		fd = base_own(socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
		ret = fd < 0 ? -errno : listen_at(fd, at);
		if (ret)
			base_close(fd);
	}
	return ret ? ret : fd;
}

static bool has_our_mark(const char *name)
{
	return !strncmp(name, LOCAL_SOCKET_MARK, strlen(LOCAL_SOCKET_MARK)) ||
	       !strncmp(name, HIDDEN_MARK, strlen(HIDDEN_MARK));
}

static bool is_dead(const struct sockaddr_un *at)
{
	const int fd = base_above_streams(
		socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
	const bool refused = fd >= 0 && connect(fd, (const struct sockaddr *)at, sizeof(*at)) &&
			     errno == ECONNREFUSED;

	if (fd >= 0)
		close(fd);
	return refused;
}

/* Of writers that were killed. */
static void remove_dead(const struct sockaddr_un *beside)
{
	char folder[sizeof(beside->sun_path)];
	struct sockaddr_un at = { .sun_family = AF_UNIX };
	struct base_budget budget = base_budget_begin();
	struct dirent *entry;
	DIR *listing;

	snprintf(folder, sizeof(folder), "%.*s",
		 (int)(strrchr(beside->sun_path, '/') - beside->sun_path), beside->sun_path);
	listing = opendir(folder);
	while (listing && base_budget_look(&budget) && (entry = readdir(listing))) {
		if (!has_our_mark(entry->d_name) ||
		    snprintf(at.sun_path, sizeof(at.sun_path), "%s/%s", folder, entry->d_name) >=
			    (int)sizeof(at.sun_path))
			continue;
		if (is_dead(&at) && base_budget_take(&budget))
			unlink(at.sun_path);
	}
	if (listing)
		closedir(listing);
}

int gather_listener_open(struct gather_listener **out, const char *address,
			 struct base_error *error)
{
	struct gather_listener *listener = calloc(1, sizeof(*listener));
	struct sockaddr_un at;
	int ret;

	*out = NULL;
	if (!listener)
		return base_no_memory(error, "a socket of a writer", sizeof(*listener));
	listener->fd = -1;
	ret = local_address(&at, address, error);
	if (ret)
		goto fail;
	remove_dead(&at);
	listener->fd = listen_anew(&at);
	if (listener->fd < 0) {
		ret = listener->fd;
		base_fail_with(error, ret, "end the process that does, or raise ulimit -n",
			       "cannot listen at \"%s\" for the other ranks of this host",
			       at.sun_path);
		goto fail;
	}
	listener->at = at;
	*out = listener;
	return 0;
fail:
	gather_listener_close(listener);
	return ret;
}

static void free_newcomer(struct newcomer *newcomer)
{
	local_link_close(&newcomer->link);
	base_close(newcomer->memory_fd);
}

void gather_listener_close(struct gather_listener *listener)
{
	if (!listener)
		return;
	for (size_t i = 0; i < listener->count; i++)
		free_newcomer(&listener->newcomers[i]);
	if (*listener->at.sun_path)
		unlink(listener->at.sun_path);
	base_close(listener->fd);
	free(listener->newcomers);
	free(listener->ready);
	free(listener);
}

/* ---- Who comes ------------------------------------------------------------------------------- */

/* Room for one more, and for waiting for all. */
static int make_room(struct gather_listener *listener, struct base_error *error)
{
	const size_t room = listener->room ? 2 * listener->room : 16;
	struct newcomer *newcomers;
	struct pollfd *ready;

	if (listener->count < listener->room)
		return 0;
	newcomers = realloc(listener->newcomers, room * sizeof(*newcomers));
	if (!newcomers)
		return base_no_memory(error, "ranks of this host", room * sizeof(*newcomers));
	listener->newcomers = newcomers;
	ready = realloc(listener->ready, (room + 1) * sizeof(*ready));
	if (!ready)
		return base_no_memory(error, "ranks of this host", (room + 1) * sizeof(*ready));
	listener->ready = ready;
	listener->room = room;
	return 0;
}

static int accept_all(struct gather_listener *listener, struct base_error *error)
{
	struct newcomer *newcomer;
	int ret, fd;

	for (;;) {
		ret = make_room(listener, error);
		if (ret || listener->count == MOST_NEWCOMERS)
			return ret;
		fd = base_above_streams(
			accept4(listener->fd, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK));
		if (fd < 0) {
			if (errno == EAGAIN)
				return 0;
			if (errno == EINTR || errno == ECONNABORTED)
				continue;
			return base_fail_with(error, -errno, "raise ulimit -n",
					      "cannot accept other ranks of this host at \"%s\"",
					      listener->at.sun_path);
		}
		newcomer = &listener->newcomers[listener->count];
		/* Other users are sent away without a word. */
		if (local_link_take(&newcomer->link, fd))
			continue;
		newcomer->since_ns = base_now_ns();
		newcomer->rank = NOBODY;
		newcomer->memory_fd = -1;
		listener->count++;
	}
}

/* The position of this rank's connection; listener->count if there is none. */
static size_t find(const struct gather_listener *listener, uint64_t rank, size_t but)
{
	size_t i = 0;

	while (i < listener->count && (i == but || listener->newcomers[i].rank != rank))
		i++;
	return i;
}

/* False if it is to go. */
static bool hear(struct newcomer *newcomer)
{
	struct local_head head;
	size_t bytes;
	int ret = local_link_receive(&newcomer->link, &head, NULL, 0, &bytes, &newcomer->memory_fd);

	if (ret == -EAGAIN)
		return base_now_ns() - newcomer->since_ns < base_ms_to_ns(SILENCE_MS);
	if (ret || head.kind != LOCAL_HELLO || head.a != LOCAL_MAGIC || head.b > UINT32_MAX)
		return false;
	newcomer->rank = head.b;
	return true;
}

static void drop_newcomer(struct gather_listener *listener, size_t position)
{
	free_newcomer(&listener->newcomers[position]);
	listener->newcomers[position] = listener->newcomers[--listener->count];
}

static void hear_all(struct gather_listener *listener)
{
	struct newcomer *newcomers = listener->newcomers;

	/* From behind: what takes the place of one that goes has been heard. */
	for (size_t i = listener->count; i--;) {
		size_t other;

		if (newcomers[i].rank != NOBODY)
			continue;
		if (!hear(&newcomers[i])) {
			drop_newcomer(listener, i);
			continue;
		}
		other = find(listener, newcomers[i].rank, i);
		/* A rank that comes again has given up what it came with before. */
		if (newcomers[i].rank != NOBODY && other < listener->count)
			drop_newcomer(listener, newcomers[i].since_ns > newcomers[other].since_ns ?
							other :
							i);
	}
}

static int wait_for_newcomers(struct gather_listener *listener, const struct gather_wait *wait,
			      struct base_error *error)
{
	size_t count = 0;

	for (size_t i = 0; i < listener->count; i++)
		if (listener->newcomers[i].rank == NOBODY)
			listener->ready[count++] = (struct pollfd){
				.fd = listener->newcomers[i].link.fd,
				.events = POLLIN,
			};
	if (listener->count < MOST_NEWCOMERS)
		listener->ready[count++] = (struct pollfd){ .fd = listener->fd, .events = POLLIN };
	if (poll(listener->ready, count, STREAM_PATIENCE_MS) > 0)
		return 0;
	return stream_go_on(wait, error);
}

int listener_await(struct gather_listener *listener, uint32_t rank, struct local_link *link,
		   int *memory_fd, const struct gather_wait *wait, struct base_error *error)
{
	int ret = 0;

	while (!ret) {
		size_t position;

		ret = accept_all(listener, error);
		if (ret)
			break;
		hear_all(listener);
		position = find(listener, rank, listener->count);
		if (position < listener->count) {
			*link = listener->newcomers[position].link;
			*memory_fd = listener->newcomers[position].memory_fd;
			listener->newcomers[position] = listener->newcomers[--listener->count];
			break;
		}
		ret = wait_for_newcomers(listener, wait, error);
	}
	return ret;
}
