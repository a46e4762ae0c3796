/* SPDX-License-Identifier: Apache-2.0 */
/* Inside the slots floor: a Redis as a client sees it (client.c), for the coordinator (redis.c) and
 * the notes of ranks (notes.c). */
#ifndef SLOTS_REDIS_H
#define SLOTS_REDIS_H

#include "slots/link.h"
#include "slots/slots.h"

#define REDIS_KEY_BYTES SLOTS_KEY_BYTES

/* No call takes longer, whatever the network does. */
#define REDIS_CALL_NS 2000000000ull

/* Versions of the library whose scripts keep other data have a pool each. */
#define REDIS_SCRIPT_FORMAT BASE_FORMAT(5u)

/* The server that has the keys of a pool: the one named, a cluster's node, or the master that
 * sentinels know. */
struct redis_client {
	struct slots_config config;
	struct slots_address address; /* with the password, wherever that came from */
	char key[REDIS_KEY_BYTES];    /* of the script's data */
	size_t most_reply_bytes;      /* 0: as usual */

	pthread_mutex_t lock;        /* of what follows */
	struct slots_link *commands; /* NULL: none yet, lost, or at rest */
	struct slots_node moved;     /* in a cluster: where this pool's keys are */
	bool has_moved;
	size_t next; /* of the address's hosts: the first that is asked */
	/* After failures: until then nothing is tried, and the last one is the answer. */
	unsigned failures;
	uint64_t not_before_ns;
	struct base_error last_failure;
};

/* Takes the address apart; connects to nothing yet. -EINVAL, naming what is wrong. */
int client_open(struct redis_client *client, const struct slots_config *config,
		struct base_error *error);
void client_close(struct redis_client *client);
/* Closes the connection. The next call makes another one. */
void client_rest(struct redis_client *client);

/* Begins a call of the script with the operation, whom it is about (an id, a job) and the epoch
 * that this client knows; arguments are added by link_add_*(). */
void client_begin(const struct redis_client *client, struct link_command *command,
		  const char *operation, const char *subject, uint64_t known_epoch);
/* Sends a command and returns what is no error of any kind; *reply is the caller's. It may reach
 * the server twice. */
int client_call(struct redis_client *client, struct link_command *command, redisReply **reply,
		struct base_error *error);
/* The same, within `most_ns`, for what no slot depends on: a failure is no sign that the
 * coordinator is unreachable. In a cluster the key may be on another node than the pool's. */
int client_call_aside(struct redis_client *client, struct link_command *command, uint64_t most_ns,
		      redisReply **reply, struct base_error *error);

/* Opens a connection beside that of the calls, as the back-off allows. */
int client_connect(struct redis_client *client, struct slots_link **out, struct base_error *error);
/* Reads the first line of the password file, if there is one, into the address. */
int client_read_password(struct redis_client *client, struct base_error *error);
/* When a call that begins now has to be over. */
uint64_t client_call_end(const struct redis_client *client);

/* What an error reply leads to. */
enum client_sequel {
	CLIENT_REFUSED,    /* the server does not do this; the connection is as good as before */
	CLIENT_REDIRECTED, /* the next connection goes to another node of the cluster */
	CLIENT_LOST        /* another server may be the right one: connect anew, later */
};
/* *asking: the next command has to be introduced by ASKING. */
enum client_sequel client_take_error(struct redis_client *client, const struct slots_link *link,
				     const redisReply *reply, bool *asking,
				     struct base_error *error);

/* ---- The script, as Redis gets it ---- */

extern const size_t slots_script_bytes; /* internal.h has the others */

#endif
