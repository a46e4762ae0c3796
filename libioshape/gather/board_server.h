/* SPDX-License-Identifier: Apache-2.0 */
/* Rank 0's side of a board of sockets, shared by board_server.c and board_answers.c. */
#ifndef GATHER_BOARD_SERVER_H
#define GATHER_BOARD_SERVER_H

#include "gather/board_sockets.h"

#define MOST_POSTED 64u /* of rank 0's, until the thread tells the others */

struct sockets_posted {
	uint64_t note, family;
};

struct sockets_server {
	uint32_t ranks;
	struct base_log log;
	struct sockets_address address;
	pthread_t thread;
	int listener, epoll, event;

	pthread_mutex_t lock; /* for all down to the empty line */
	pthread_cond_t changed;
	struct board_table table;
	struct sockets_watch watch; /* rank 0's */
	bool has_changed;           /* for rank 0 */
	bool gone[SOCKETS_MOST_RANKS];
	uint32_t gone_order[SOCKETS_MOST_RANKS]; /* those who are, as they ended */
	uint32_t gone_count;
	struct sockets_posted posted[MOST_POSTED];
	unsigned posted_count; /* above MOST_POSTED: everybody is told */
	bool closing;

	/* The thread's own. */
	struct sockets_connection *connections, *of_rank[SOCKETS_MOST_RANKS];
	uint32_t connection_count;
	bool listens, warned;
	uint64_t listen_again_ns, sweep_ns;
};

/* ---- On the server's thread (board_answers.c) ------------------------------------------------ */

/* Sends what can be sent to it now, and what it has not heard yet. */
void sockets_send_out(struct sockets_server *server, struct sockets_connection *connection);
/* All but one that wait for this; NULL: all. */
void sockets_tell_others(struct sockets_server *server, const struct sockets_connection *but,
			 const struct sockets_posted *posted);
/* With the lock: ends its wait(). */
void sockets_tell_rank0(struct sockets_server *server);
/* A head has come: says where the body goes. -EPROTO for what does not come from this library. */
int sockets_prepare(struct sockets_server *server, struct sockets_connection *connection);
/* A whole request has. 0, or a negative errno: the connection is to be ended. */
int sockets_obey(struct sockets_server *server, struct sockets_connection *connection);

#endif
