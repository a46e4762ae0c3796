/* SPDX-License-Identifier: Apache-2.0 */
/* A client of one Redis (redis.c). Private to the slots layer. Pools and the messages of ranks
 * (notes.c) both use it. */
#ifndef SLOTS_REDIS_H
#define SLOTS_REDIS_H

#include "slots/link.h"
#include "slots/slots.h"

/* Version of the script's data format, part of each key. Versions of the library with different
 * formats use separate pools. */
#define REDIS_SCRIPT_FORMAT BASE_FORMAT(7u)

/* A client of the server that has the keys of a pool. That is the server which the address names, a
 * node of a cluster, or the master that the sentinels name. */
struct redis_client {
	struct slots_config config;
	struct slots_address address; /* includes the password, whichever source it came from */
	char key[SLOTS_KEY_BYTES];    /* key of the script's data */
	size_t most_reply_bytes;      /* longest reply; 0: the default */

	pthread_mutex_t lock; /* protects all members below */
	/* NULL: not connected yet, connection lost, or closed while idle */
	struct slots_link *commands;
	struct slots_node moved; /* in a cluster: the node that has this pool's keys */
	bool has_moved;
	size_t next; /* index of the host in the address that is tried first */
	/* After failures the client does not connect before not_before_ns. Until then calls fail
	 * with last_failure. */
	unsigned failures;
	uint64_t not_before_ns;
	struct base_error last_failure;
};

/* Parses the address, and does not connect yet. -EINVAL: the error names the wrong part. */
int client_open(struct redis_client *client, const struct slots_config *config,
		struct base_error *error);
void client_close(struct redis_client *client);
/* Sends a command and returns its reply, unless that is an error. The caller frees *reply. The
 * command may reach the server twice. */
int client_call(struct redis_client *client, struct link_command *command, redisReply **reply,
		struct base_error *error);

#endif
