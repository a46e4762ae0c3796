/* SPDX-License-Identifier: Apache-2.0 */
/* The address of a Redis, taken apart. Pure; the text may come from anywhere. */
#ifndef SLOTS_ADDRESS_H
#define SLOTS_ADDRESS_H

#include "base/base.h"

#define ADDRESS_HOSTS 16u
#define ADDRESS_HOST_BYTES 256   /* a DNS name has at most 253 letters */
#define ADDRESS_PATH_BYTES 108   /* what fits into a sockaddr_un */
#define ADDRESS_SECRET_BYTES 513 /* of passwords and users, with the final 0 */

struct slots_node {
	char host[ADDRESS_HOST_BYTES];
	uint16_t port;
};

enum slots_address_kind {
	ADDRESS_HOST, /* one server, or nodes of one cluster */
	ADDRESS_UNIX,
	ADDRESS_SENTINEL
};

struct slots_address {
	enum slots_address_kind kind;
	bool tls;
	struct slots_node nodes[ADDRESS_HOSTS]; /* or sentinels */
	size_t node_count;
	char path[ADDRESS_PATH_BYTES];
	char service[ADDRESS_HOST_BYTES]; /* the name that sentinels know the master by */
	char user[ADDRESS_SECRET_BYTES];
	char password[ADDRESS_SECRET_BYTES];
	bool has_password;
	uint32_t database;
};

/*
 * redis://, rediss://, unix://, sentinel://, as include/ioshape/context.h says. -EINVAL names the
 * part that is wrong, but quotes nothing of the text: who forgets to escape a password finds its
 * pieces in any part.
 */
int address_parse(struct slots_address *address, const char *text, struct base_error *error);

/*
 * "host:port" as Redis writes it in redirects: an IPv6 host has no brackets, and none, left "",
 * means the one that answered. 0 or -EINVAL.
 */
int address_parse_node(struct slots_node *node, const char *text, size_t bytes);

#endif
