/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Rank 0's side of a board of sockets. A thread of its own speaks with the others and never waits
 * for one of them; rank 0 itself uses the same notes, under the lock, which is never held while
 * bytes move.
 */
#define _GNU_SOURCE
#include "gather/board_server.h"

#include "gather/own.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#define MORE_CONNECTIONS 64u           /* than ranks: some that have not said yet who they are */
#define INTRODUCTION_NS 10000000000ull /* they have so long for that */
#define LINGER_NS 1000000000ull
#define SWEEP_MS 1000
#define NO_DESCRIPTOR_MS 100

/* ---- Connections ----------------------------------------------------------------------------- */

static void end_connection(struct sockets_server *server, struct sockets_connection *connection)
{
	struct sockets_connection **at = &server->connections, *other;
	const bool had_rank = connection->has_rank;

	while (*at != connection)
		at = &(*at)->next;
	*at = connection->next;
	server->connection_count--;
	epoll_ctl(server->epoll, EPOLL_CTL_DEL, connection->fd, NULL);
	if (had_rank) {
		server->of_rank[connection->rank] = NULL;
		pthread_mutex_lock(&server->lock);
		server->gone[connection->rank] = true;
		server->gone_order[server->gone_count++] = connection->rank;
		sockets_tell_rank0(server);
		pthread_mutex_unlock(&server->lock);
	}
	sockets_connection_free(connection);
	for (other = had_rank ? server->connections : NULL; other; other = other->next)
		sockets_send_out(server, other);
}

/* One frame at most, so that all have their turns. */
static void serve(struct sockets_server *server, struct sockets_connection *connection,
		  uint32_t events)
{
	int event = WIRE_NOTHING;

	if (connection->first)
		sockets_send_out(server, connection);
	if (!connection->first && (events & (EPOLLIN | EPOLLHUP | EPOLLERR)))
		event = wire_read(&connection->input, connection->fd);
	if (event == WIRE_HEAD) {
		event = sockets_prepare(server, connection);
		if (!event)
			event = wire_read(&connection->input, connection->fd);
	}
	if (event == WIRE_WHOLE) {
		event = sockets_obey(server, connection);
		wire_next(&connection->input);
		if (!event)
			sockets_send_out(server, connection);
	}
	if (event < 0)
		end_connection(server, connection);
}

static bool is_ours(int fd)
{
	struct ucred peer;
	socklen_t bytes = sizeof(peer);

	return !getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &peer, &bytes) && peer.uid == geteuid();
}

static int add_connection(struct sockets_server *server, int fd)
{
	struct sockets_connection *connection = calloc(1, sizeof(*connection));
	struct epoll_event event = { .events = EPOLLIN };

	if (!connection)
		return -ENOMEM;
	connection->fd = fd;
	connection->events = EPOLLIN;
	connection->since_ns = base_now_ns();
	connection->last = &connection->first;
	event.data.ptr = connection;
	if (epoll_ctl(server->epoll, EPOLL_CTL_ADD, fd, &event)) {
		free(connection);
		return -ENOMEM;
	}
	connection->next = server->connections;
	server->connections = connection;
	server->connection_count++;
	return 0;
}

static void listen_to(struct sockets_server *server, bool listens)
{
	struct epoll_event event = { .events = EPOLLIN, .data.ptr = &server->listener };

	if (server->listener < 0 || server->listens == listens)
		return;
	server->listens = listens;
	epoll_ctl(server->epoll, listens ? EPOLL_CTL_ADD : EPOLL_CTL_DEL, server->listener, &event);
}

/* Nobody gets in for now; those who wait to be let in stay where they are. */
static void has_no_descriptor(struct sockets_server *server, int code)
{
	listen_to(server, false);
	server->listen_again_ns = base_now_ns() + base_ms_to_ns(NO_DESCRIPTOR_MS);
	if (server->warned)
		return;
	server->warned = true;
	base_log(&server->log, IOSHAPE_LOG_WARNING,
		 "rank 0 cannot take in all ranks of the group at %s: %s; raise the limit of open "
		 "files (ulimit -n) to some more than the number of ranks",
		 server->address.text, ioshape_strerror(-code));
}

static void let_in(struct sockets_server *server)
{
	int fd, code;

	gather_own_begin();
	fd = accept4(server->listener, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK);
	code = errno;
	gather_own_add(fd);
	gather_own_end();
	if (fd < 0) {
		if (code == EMFILE || code == ENFILE || code == ENOMEM || code == ENOBUFS)
			has_no_descriptor(server, code);
		return;
	}
	if (!is_ours(fd) || server->connection_count >= server->ranks + MORE_CONNECTIONS ||
	    add_connection(server, fd))
		gather_own_close(fd);
}

static void sweep(struct sockets_server *server)
{
	const uint64_t now = base_now_ns();
	struct sockets_connection *connection, *next;

	if (now < server->sweep_ns)
		return;
	server->sweep_ns = now + base_ms_to_ns(SWEEP_MS);
	for (connection = server->connections; connection; connection = next) {
		next = connection->next;
		if (!connection->has_rank && now > connection->since_ns + INTRODUCTION_NS)
			end_connection(server, connection);
	}
}

/* ---- The thread ------------------------------------------------------------------------------ */

/* Tells what rank 0 posted. */
static void tell_posted(struct sockets_server *server)
{
	struct sockets_posted posted[MOST_POSTED];
	unsigned count;

	pthread_mutex_lock(&server->lock);
	count = server->posted_count;
	memcpy(posted, server->posted, sizeof(posted));
	server->posted_count = 0;
	pthread_mutex_unlock(&server->lock);
	if (count > MOST_POSTED)
		sockets_tell_others(server, NULL, NULL);
	for (unsigned i = 0; i < count && count <= MOST_POSTED; i++)
		sockets_tell_others(server, NULL, &posted[i]);
}

static void dispatch(struct sockets_server *server, const struct epoll_event *event)
{
	uint64_t number;

	if (event->data.ptr == &server->listener)
		let_in(server);
	else if (event->data.ptr != &server->event)
		serve(server, event->data.ptr, event->events);
	else if (read(server->event, &number, sizeof(number)) < 0)
		errno = 0; /* somebody else read it: nobody is there */
}

static bool is_closing(struct sockets_server *server)
{
	bool closing;

	pthread_mutex_lock(&server->lock);
	closing = server->closing;
	pthread_mutex_unlock(&server->lock);
	return closing;
}

/* Whether nobody is about to ask for something that it was told of. */
static bool is_settled(const struct sockets_server *server)
{
	const struct sockets_connection *one = server->connections;

	while (one && !one->first && !one->told && !one->change_due)
		one = one->next;
	return !one;
}

static void *run_server(void *opaque)
{
	struct sockets_server *server = opaque;
	struct epoll_event events[64];
	uint64_t end_ns = UINT64_MAX;
	int count, patience_ms;
	bool closing = false;

	do {
		patience_ms = closing ? 10 : server->listens ? SWEEP_MS : NO_DESCRIPTOR_MS;
		count = epoll_wait(server->epoll, events, ARRAY_LENGTH(events), patience_ms);
		for (int i = 0; i < count; i++)
			dispatch(server, &events[i]);
		tell_posted(server);
		sweep(server);
		if (!server->listens && base_now_ns() >= server->listen_again_ns)
			listen_to(server, true);
		if (!closing && is_closing(server)) {
			closing = true;
			end_ns = base_now_ns() + LINGER_NS;
			/* The next job may take the name. */
			listen_to(server, false);
			gather_own_close(server->listener);
			server->listener = -1;
			count = 1;
		}
	} while (!closing || ((count || !is_settled(server)) && base_now_ns() < end_ns));
	return NULL;
}

/* ---- Rank 0 itself --------------------------------------------------------------------------- */

static void wake_thread(struct sockets_server *server)
{
	const uint64_t one = 1;

	/* It fails only if it is full: then the thread has been woken. */
	if (write(server->event, &one, sizeof(one)) < 0)
		errno = 0;
}

int sockets_server_post(struct sockets_server *server, const char *scope, const char *name,
			const void *bytes, size_t count, struct base_error *error)
{
	const struct sockets_posted posted = { board_hash(scope, name),
					       board_hash_family(scope, name) };
	struct board_note *note;
	int ret;

	note = board_note_new(&server->table, count, &ret);
	if (note) {
		if (count)
			memcpy(note->data, bytes, count);
		pthread_mutex_lock(&server->lock);
		ret = board_table_put(&server->table, scope, name, note);
		if (!ret && server->posted_count < MOST_POSTED)
			server->posted[server->posted_count] = posted;
		if (!ret && server->posted_count <= MOST_POSTED)
			server->posted_count++;
		pthread_mutex_unlock(&server->lock);
	}
	if (ret == -ENOSPC)
		return base_fail(error, ret, "the board's notes have more than %llu bytes",
				 BOARD_MOST_BYTES);
	if (ret)
		return base_no_memory(error, "a note", count);
	wake_thread(server);
	return 0;
}

struct board_note *sockets_server_look(struct sockets_server *server, const char *scope,
				       const char *name)
{
	struct board_note *note;

	pthread_mutex_lock(&server->lock);
	note = board_table_get(&server->table, scope, name);
	if (note)
		board_note_use(note);
	pthread_mutex_unlock(&server->lock);
	return note;
}

void sockets_server_watch(struct sockets_server *server, uint64_t hash)
{
	pthread_mutex_lock(&server->lock);
	sockets_watch_add(&server->watch, hash);
	pthread_mutex_unlock(&server->lock);
}

void sockets_server_wait(struct sockets_server *server, uint32_t timeout_ms)
{
	const uint64_t end_ns = base_now_ns() + base_ms_to_ns(timeout_ms);
	uint64_t now;

	pthread_mutex_lock(&server->lock);
	while (!server->has_changed && (now = base_now_ns()) < end_ns)
		base_cond_wait_ms(&server->changed, &server->lock,
				  (int64_t)((end_ns - now + 999999) / 1000000));
	server->has_changed = false;
	pthread_mutex_unlock(&server->lock);
}

bool sockets_server_is_gone(struct sockets_server *server, uint32_t rank)
{
	bool gone;

	pthread_mutex_lock(&server->lock);
	gone = rank < server->ranks && server->gone[rank];
	pthread_mutex_unlock(&server->lock);
	return gone;
}

void sockets_server_drop(struct sockets_server *server, const char *scope)
{
	pthread_mutex_lock(&server->lock);
	board_table_drop(&server->table, scope);
	pthread_mutex_unlock(&server->lock);
}

/* ---- Opening and closing --------------------------------------------------------------------- */

void sockets_name(struct sockets_address *address, const char *board)
{
	struct sockaddr_un *un = &address->un;
	int length;

	memset(address, 0, sizeof(*address));
	un->sun_family = AF_UNIX;
	/* Behind a 0: a name that is no file's, and goes when the last descriptor does. */
	length = snprintf(un->sun_path + 1, sizeof(un->sun_path) - 1, "ioshape-board-%u-%s",
			  (unsigned)geteuid(), board);
	address->bytes = (socklen_t)(offsetof(struct sockaddr_un, sun_path) + 1 + (size_t)length);
	snprintf(address->text, sizeof(address->text), "@%s", un->sun_path + 1);
}

static int open_listener(struct sockets_server *server)
{
	const struct sockets_address *address = &server->address;
	int fd, code = 0;

	gather_own_begin();
	fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
	if (fd < 0)
		code = errno;
	gather_own_add(fd);
	gather_own_end();
	if (!code && (bind(fd, (const struct sockaddr *)&address->un, address->bytes) ||
		      listen(fd, (int)SOCKETS_MOST_RANKS))) {
		code = errno;
		gather_own_close(fd);
	}
	if (!code)
		server->listener = fd;
	return -code;
}

static int take_name(struct sockets_server *server, uint32_t deadline_ms, struct base_error *error)
{
	const uint64_t end_ns = base_now_ns() + base_ms_to_ns(deadline_ms);
	int ret;

	while ((ret = open_listener(server)) == -EADDRINUSE && base_now_ns() < end_ns)
		board_sleep_ms(20);
	if (ret == -EADDRINUSE)
		return base_fail(error, ret,
				 "another group with the same token still runs on this host (the "
				 "socket %s is taken): end it, or give this one another token",
				 server->address.text);
	if (ret)
		return base_fail(error, ret, "cannot listen at %s for the ranks of this host",
				 server->address.text);
	return 0;
}

static int start(struct sockets_server *server, struct base_error *error)
{
	struct epoll_event event = { .events = EPOLLIN, .data.ptr = &server->event };
	int ret = 0;

	gather_own_begin();
	server->epoll = epoll_create1(EPOLL_CLOEXEC);
	server->event = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
	if (server->epoll < 0 || server->event < 0)
		ret = -errno;
	gather_own_add(server->epoll);
	gather_own_add(server->event);
	gather_own_end();
	if (!ret && epoll_ctl(server->epoll, EPOLL_CTL_ADD, server->event, &event))
		ret = -errno;
	if (!ret) {
		listen_to(server, true);
		ret = base_start_thread(&server->thread, run_server, server);
	}
	return ret ? base_fail(error, ret, "cannot serve the board at %s", server->address.text) :
		     0;
}

static void free_server(struct sockets_server *server)
{
	struct sockets_connection *connection;

	while ((connection = server->connections)) {
		server->connections = connection->next;
		sockets_connection_free(connection);
	}
	gather_own_close(server->listener);
	gather_own_close(server->epoll);
	gather_own_close(server->event);
	board_table_free(&server->table);
	pthread_cond_destroy(&server->changed);
	pthread_mutex_destroy(&server->lock);
	free(server);
}

int sockets_serve(struct sockets_server **out, const struct gather_board_config *config,
		  struct base_error *error)
{
	struct sockets_server *server = calloc(1, sizeof(*server));
	int ret;

	*out = NULL;
	if (!server)
		return base_no_memory(error, "a board", sizeof(*server));
	pthread_mutex_init(&server->lock, NULL);
	base_cond_init(&server->changed);
	server->ranks = config->ranks;
	server->log = config->log;
	server->listener = server->epoll = server->event = -1;
	sockets_name(&server->address, config->name);
	ret = take_name(server, config->deadline_ms, error);
	if (!ret)
		ret = start(server, error);
	if (ret) {
		free_server(server);
		return ret;
	}
	*out = server;
	return 0;
}

void sockets_server_close(struct sockets_server *server)
{
	pthread_mutex_lock(&server->lock);
	server->closing = true;
	pthread_mutex_unlock(&server->lock);
	wake_thread(server);
	pthread_join(server->thread, NULL);
	free_server(server);
}
