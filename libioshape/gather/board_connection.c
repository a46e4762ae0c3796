/* SPDX-License-Identifier: Apache-2.0 */
#define _GNU_SOURCE
#include "gather/board_sockets.h"

#include "gather/own.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

struct sockets_out {
	struct sockets_out *next;
	uint8_t head[WIRE_HEAD_BYTES];
	struct board_note *note; /* NULL: no body */
	size_t sent;
};

int sockets_connection_add(struct sockets_connection *connection, enum wire_type type, uint32_t id,
			   uint32_t number, struct board_note *note)
{
	const struct wire_head head = { .type = type,
					.id = id,
					.number = number,
					.body_bytes = note ? (uint32_t)note->bytes : 0 };
	uint8_t raw[WIRE_MOST_HEAD_BYTES];
	struct sockets_out *out;

	out = connection->deaf ? NULL : calloc(1, sizeof(*out));
	if (!out) {
		board_note_leave(note);
		return connection->deaf ? 0 : -ENOMEM;
	}
	wire_put_head(raw, &head);
	memcpy(out->head, raw, sizeof(out->head));
	out->note = note;
	*connection->last = out;
	connection->last = &out->next;
	return 0;
}

static void remove_first(struct sockets_connection *connection)
{
	struct sockets_out *out = connection->first;

	connection->first = out->next;
	if (!connection->first)
		connection->last = &connection->first;
	board_note_leave(out->note);
	free(out);
}

static void remove_all(struct sockets_connection *connection)
{
	while (connection->first)
		remove_first(connection);
}

bool sockets_connection_flush(struct sockets_connection *connection)
{
	struct sockets_out *out;
	size_t whole, body;
	ssize_t went;

	while ((out = connection->first)) {
		body = out->note ? out->note->bytes : 0;
		whole = sizeof(out->head) + body;
		went = wire_write(connection->fd, out->head, sizeof(out->head),
				  out->note ? out->note->data : NULL, body, out->sent);
		if (went < 0) {
			/* What it sent before it ended still counts, so reading goes on. */
			connection->deaf = true;
			remove_all(connection);
			return true;
		}
		if (!went)
			return false;
		out->sent += (size_t)went;
		if (out->sent == whole)
			remove_first(connection);
	}
	return true;
}

void sockets_connection_free(struct sockets_connection *connection)
{
	remove_all(connection);
	board_note_leave(connection->posted);
	/* Whoever else may hold the descriptor: the other side is to see that this is the end. */
	shutdown(connection->fd, SHUT_RDWR);
	gather_own_close(connection->fd);
	free(connection);
}
