/* SPDX-License-Identifier: Apache-2.0 */
/* What rank 0 answers to the other ranks of a board of sockets, and tells them unasked. */
#define _GNU_SOURCE
#include "gather/board_server.h"

#include <errno.h>
#include <string.h>
#include <sys/epoll.h>

#define NOTES_IN_AN_ANSWER 256u

/* ---- Watches --------------------------------------------------------------------------------- */

void sockets_watch_add(struct sockets_watch *watch, uint64_t hash)
{
	for (size_t i = 0; i < ARRAY_LENGTH(watch->hashes); i++) {
		if (watch->hashes[i] == hash)
			return;
	}
	watch->hashes[watch->next] = hash;
	watch->next = (watch->next + 1) % ARRAY_LENGTH(watch->hashes);
}

bool sockets_watch_has(const struct sockets_watch *watch, uint64_t note, uint64_t family)
{
	for (size_t i = 0; i < ARRAY_LENGTH(watch->hashes); i++) {
		if (watch->hashes[i] && (watch->hashes[i] == note || watch->hashes[i] == family))
			return true;
	}
	return false;
}

/* ---- What the others are told ---------------------------------------------------------------- */

/* While something is to be sent, nothing is read: who asks and does not listen asks no more. */
static void choose_events(struct sockets_server *server, struct sockets_connection *connection)
{
	const uint32_t events = connection->first ? EPOLLOUT : EPOLLIN;
	struct epoll_event event = { .events = events, .data.ptr = connection };

	if (events == connection->events)
		return;
	connection->events = events;
	epoll_ctl(server->epoll, EPOLL_CTL_MOD, connection->fd, &event);
}

/* News come between answers, so that there are never many of them. Whether there were any. */
static bool add_news(struct sockets_server *server, struct sockets_connection *connection)
{
	uint32_t gone = UINT32_MAX;

	if (!connection->has_rank || connection->deaf)
		return false;
	pthread_mutex_lock(&server->lock);
	if (connection->gone_told < server->gone_count)
		gone = server->gone_order[connection->gone_told++];
	pthread_mutex_unlock(&server->lock);
	/* Without memory for it, it hears of it by asking. */
	if (gone != UINT32_MAX)
		return !sockets_connection_add(connection, WIRE_GONE, 0, gone, NULL);
	if (!connection->change_due)
		return false;
	connection->change_due = false;
	connection->told = true;
	return !sockets_connection_add(connection, WIRE_CHANGED, 0, 0, NULL);
}

void sockets_send_out(struct sockets_server *server, struct sockets_connection *connection)
{
	while (sockets_connection_flush(connection) && add_news(server, connection))
		;
	choose_events(server, connection);
}

/* Once is enough, until it asks for something. */
void sockets_tell_others(struct sockets_server *server, const struct sockets_connection *but,
			 const struct sockets_posted *posted)
{
	struct sockets_connection *other;

	for (other = server->connections; other; other = other->next) {
		if (other == but || other->told || other->change_due ||
		    (posted && !sockets_watch_has(&other->watch, posted->note, posted->family)))
			continue;
		other->change_due = true;
		sockets_send_out(server, other);
	}
}

void sockets_tell_rank0(struct sockets_server *server)
{
	server->has_changed = true;
	pthread_cond_broadcast(&server->changed);
}

/* ---- What the others ask --------------------------------------------------------------------- */

static int answer(struct sockets_connection *connection, int code)
{
	return sockets_connection_add(connection, WIRE_DONE, connection->input.head.id,
				      (uint32_t)code, NULL);
}

static int take_in(struct sockets_server *server, struct sockets_connection *connection)
{
	const uint32_t rank = connection->input.head.number;
	bool was_here;

	if (connection->has_rank)
		return -EPROTO;
	if (base_get_le(connection->have, 4) != server->ranks || !rank || rank >= server->ranks)
		return answer(connection, -EINVAL);
	pthread_mutex_lock(&server->lock);
	was_here = server->gone[rank];
	pthread_mutex_unlock(&server->lock);
	if (server->of_rank[rank] || was_here)
		return answer(connection, -EEXIST);
	connection->has_rank = true;
	connection->rank = rank;
	server->of_rank[rank] = connection;
	return answer(connection, 0);
}

static int take_post(struct sockets_server *server, struct sockets_connection *connection)
{
	const struct wire_head *head = &connection->input.head;
	const struct sockets_posted posted = { board_hash(head->scope, head->name),
					       board_hash_family(head->scope, head->name) };
	int ret = connection->refusal;

	if (connection->posted) {
		pthread_mutex_lock(&server->lock);
		ret = board_table_put(&server->table, head->scope, head->name, connection->posted);
		if (!ret && sockets_watch_has(&server->watch, posted.note, posted.family))
			sockets_tell_rank0(server);
		pthread_mutex_unlock(&server->lock);
		connection->posted = NULL;
	}
	if (!ret)
		sockets_tell_others(server, connection, &posted);
	return answer(connection, ret);
}

static int give_note(struct sockets_server *server, struct sockets_connection *connection)
{
	const struct wire_head *head = &connection->input.head;
	struct board_note *note = sockets_server_look(server, head->scope, head->name);

	sockets_watch_add(&connection->watch, board_hash(head->scope, head->name));
	if (!note)
		return answer(connection, -EAGAIN);
	return sockets_connection_add(connection, WIRE_NOTE, head->id, 0, note);
}

static int give_notes(struct sockets_server *server, struct sockets_connection *connection)
{
	const struct wire_head *head = &connection->input.head;
	char name[GATHER_NAME_BYTES];
	struct board_note *note;
	unsigned found = 0;
	int ret = 0;

	sockets_watch_add(&connection->watch, board_hash_prefix(head->scope, head->name));
	for (uint32_t rank = 0; rank < server->ranks && !ret; rank++) {
		if (connection->have[rank / 8] & 1u << rank % 8)
			continue;
		board_name_of(name, head->name, rank);
		note = sockets_server_look(server, head->scope, name);
		if (!note)
			continue;
		ret = sockets_connection_add(connection, WIRE_NOTE, head->id, rank, note);
		if (++found == NOTES_IN_AN_ANSWER)
			break;
	}
	return ret ? ret : answer(connection, found == NOTES_IN_AN_ANSWER);
}

/* Where the body goes; -EPROTO for what does not come from us. */
int sockets_prepare(struct sockets_server *server, struct sockets_connection *connection)
{
	struct wire_input *input = &connection->input;
	const struct wire_head *head = &input->head;
	const bool names = board_is_name(head->scope) && board_is_name(head->name);

	if (head->type == WIRE_HELLO) {
		input->body = connection->have;
		return head->body_bytes == 4 ? 0 : -EPROTO;
	}
	if (!connection->has_rank || !names)
		return -EPROTO;
	switch (head->type) {
	case WIRE_POST:
		connection->posted =
			board_note_new(&server->table, head->body_bytes, &connection->refusal);
		input->body = connection->posted ? connection->posted->data : NULL;
		return 0;
	case WIRE_LOOK:
		return head->body_bytes ? -EPROTO : 0;
	case WIRE_COLLECT:
		memset(connection->have, 0, sizeof(connection->have));
		input->body = connection->have;
		return head->body_bytes <= sizeof(connection->have) &&
				       !board_check_prefix(head->scope, head->name, NULL) ?
			       0 :
			       -EPROTO;
	default:
		return -EPROTO;
	}
}

int sockets_obey(struct sockets_server *server, struct sockets_connection *connection)
{
	connection->told = false;
	switch (connection->input.head.type) {
	case WIRE_HELLO:
		return take_in(server, connection);
	case WIRE_POST:
		return take_post(server, connection);
	case WIRE_LOOK:
		return give_note(server, connection);
	default:
		return give_notes(server, connection);
	}
}
