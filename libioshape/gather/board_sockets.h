/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A board in rank 0's memory. Rank 0 serves it (board_server.c, and board_connection.c for each of
 * the others), on a thread of its own; the others ask (board_client.c).
 */
#ifndef GATHER_BOARD_SOCKETS_H
#define GATHER_BOARD_SOCKETS_H

#include "gather/board.h"
#include "gather/wire.h"

#include <sys/socket.h>
#include <sys/un.h>

/* No call waits longer for bytes that do not come. */
#define SOCKETS_CALL_NS 2000000000ull
#define SOCKETS_MOST_RANKS 4096u

struct sockets_address {
	struct sockaddr_un un;
	socklen_t bytes;
	char text[ARRAY_LENGTH(((struct sockaddr_un *)0)->sun_path) + 1]; /* for sentences */
};

void sockets_name(struct sockets_address *address, const char *board);

/* What somebody looked for lately: when it is posted, he is told. */
struct sockets_watch {
	uint64_t hashes[16];
	unsigned next;
};

void sockets_watch_add(struct sockets_watch *watch, uint64_t hash);
bool sockets_watch_has(const struct sockets_watch *watch, uint64_t note, uint64_t family);

/* ---- Rank 0 (board_server.c) ----------------------------------------------------------------- */

struct sockets_server;

int sockets_serve(struct sockets_server **out, const struct gather_board_config *config,
		  struct base_error *error);
int sockets_server_post(struct sockets_server *server, const char *scope, const char *name,
			const void *bytes, size_t count, struct base_error *error);
/* NULL if there is none; to be left. */
struct board_note *sockets_server_look(struct sockets_server *server, const char *scope,
				       const char *name);
/* What was looked for is remembered: wait() ends when it is posted. */
void sockets_server_watch(struct sockets_server *server, uint64_t hash);
void sockets_server_wait(struct sockets_server *server, uint32_t timeout_ms);
bool sockets_server_is_gone(struct sockets_server *server, uint32_t rank);
void sockets_server_drop(struct sockets_server *server, const char *scope);
/* Those who were told of something may still ask for it, for a moment. */
void sockets_server_close(struct sockets_server *server);

/* ---- The others (board_client.c) ------------------------------------------------------------- */

struct sockets_client;

int sockets_join(struct sockets_client **out, const struct gather_board_config *config,
		 struct base_error *error);
int sockets_client_post(struct sockets_client *client, const char *scope, const char *name,
			const void *bytes, size_t count, struct base_error *error);
int sockets_client_look(struct sockets_client *client, const char *scope, const char *name,
			struct base_buffer *note, struct base_error *error);
int sockets_client_collect(struct sockets_client *client, const char *scope, const char *prefix,
			   const bool *have,
			   int (*found)(void *user, uint32_t rank, const struct base_buffer *note),
			   void *user, struct base_error *error);
void sockets_client_wait(struct sockets_client *client, uint32_t timeout_ms);
bool sockets_client_is_gone(struct sockets_client *client, uint32_t rank);
void sockets_client_close(struct sockets_client *client);

/* ---- One of the others, as rank 0 sees it (board_connection.c) --------------------------------
 */

struct sockets_out;

/* Used by the server's thread alone. */
struct sockets_connection {
	struct sockets_connection *next;
	int fd;
	bool has_rank; /* said who it is, and was taken in */
	uint32_t rank;
	uint64_t since_ns;
	struct wire_input input;
	struct board_note *posted; /* the note that is coming; NULL: refused with `refusal` */
	int refusal;
	uint8_t have[(SOCKETS_MOST_RANKS + 7) / 8]; /* HELLO's and COLLECT's body */
	struct sockets_out *first, **last;          /* to be sent; nothing is read meanwhile */
	bool deaf;                                  /* nothing can be sent any more */
	uint32_t events;                            /* that epoll waits for */
	struct sockets_watch watch;
	bool told;          /* of a change, and has asked for nothing since */
	bool change_due;    /* it is to be told */
	uint32_t gone_told; /* of those who have ended, in order, so many were named to it */
};

/* Puts a frame to the end of what is to be sent. The caller's use of the note is taken over. */
int sockets_connection_add(struct sockets_connection *connection, enum wire_type type, uint32_t id,
			   uint32_t number, struct board_note *note);
/* Sends what can be sent now; whether that is all. That nobody listens any more is seen by reading.
 */
bool sockets_connection_flush(struct sockets_connection *connection);
void sockets_connection_free(struct sockets_connection *connection);

#endif
