/* SPDX-License-Identifier: Apache-2.0 */
/* Inside the slots floor: a Redis as a client sees it (redis.c), also for the notes of ranks
 * (notes.c). */
#ifndef SLOTS_REDIS_H
#define SLOTS_REDIS_H

#include "slots/link.h"
#include "slots/slots.h"

/* Versions of the library whose scripts keep other data have a pool each. */
#define REDIS_SCRIPT_FORMAT BASE_FORMAT(6u)

/* The server that has the keys of a pool: the one named, a cluster's node, or the master that
 * sentinels know. */
struct redis_client {
	struct slots_config config;
	struct slots_address address; /* with the password, wherever that came from */
	char key[SLOTS_KEY_BYTES];    /* of the script's data */
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
/* Sends a command and returns what is no error of any kind; *reply is the caller's. It may reach
 * the server twice. */
int client_call(struct redis_client *client, struct link_command *command, redisReply **reply,
		struct base_error *error);

#endif
