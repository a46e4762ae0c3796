/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The address of a Redis, taken apart (address.c), and one connection (link.c).
 *
 * One thread at a time uses a connection. Nothing here waits longer than it is
 * told to, and no signal comes of a server that went away.
 *
 * Results: 0; -ECONNRESET: the server closed the connection; -ETIMEDOUT; or another negative errno.
 * After anything but 0 the connection is out of step and good for link_close() only.
 */
#ifndef SLOTS_LINK_H
#define SLOTS_LINK_H

#include "base/base.h"

#include <hiredis.h>

#define LINK_MOST_ARGUMENTS 136
#define LINK_MOST_NUMBERS 24

/*
 * Takes apart redis://, rediss://, unix://, sentinel://, as include/ioshape/ioshape.h says; the
 * text may come from anywhere. -EINVAL names the part that is wrong, but quotes nothing of the
 * text: who forgets to escape a password finds its pieces in any part.
 */
int address_parse(struct slots_address *address, const char *text, struct base_error *error);
/*
 * Takes apart "host:port" as Redis writes it in redirects: an IPv6 host has no brackets, and none,
 * left "", means the one that answered. 0 or -EINVAL.
 */
int address_parse_node(struct slots_node *node, const char *text, size_t bytes);

struct slots_link {
	redisContext *context;
	struct slots_node node;             /* "" and 0 for a socket's */
	char name[ADDRESS_HOST_BYTES + 32]; /* "redis at host:port" */
	bool tls;
	size_t reply_bytes; /* that came of a reply which is not whole yet */
	size_t most_reply_bytes;
	size_t sent_bytes; /* of the latest command */
};

/* A command. Texts are borrowed until it is sent; numbers are kept in it. */
struct link_command {
	int count, number_count;
	char numbers[LINK_MOST_NUMBERS][24];
	const char *texts[LINK_MOST_ARGUMENTS];
	size_t bytes[LINK_MOST_ARGUMENTS];
};

void link_add_bytes(struct link_command *command, const char *text, size_t bytes);
void link_add_text_list(struct link_command *command, const char *const texts[], size_t count);
void link_add_number_list(struct link_command *command, const uint64_t numbers[], size_t count);
#define link_add_texts(command, ...)                                                               \
	link_add_text_list(command, (const char *const[]){ __VA_ARGS__ },                          \
			   ARRAY_LENGTH(((const char *const[]){ __VA_ARGS__ })))
#define link_add_numbers(command, ...)                                                             \
	link_add_number_list(command, (const uint64_t[]){ __VA_ARGS__ },                           \
			     ARRAY_LENGTH(((const uint64_t[]){ __VA_ARGS__ })))

/* Connects, shows the password, selects the database. `node` is NULL for an address's socket;
 * unless it is `greeted`, neither password nor database are sent. Replies may have
 * `most_reply_bytes`, where that is more than usual. Until `until_ns` at most. */
int link_open(struct slots_link **out, const struct slots_address *address,
	      const struct slots_node *node, bool greeted, size_t most_reply_bytes,
	      uint64_t until_ns, struct base_error *error);
/* NULL is fine. */
void link_close(struct slots_link *link);

int link_send(struct slots_link *link, const struct link_command *command, uint64_t until_ns,
	      struct base_error *error);
/* Takes what has come so far: *reply stays NULL if it is not a whole reply. */
int link_take(struct slots_link *link, redisReply **reply, struct base_error *error);
/* Sends a command, and waits for the reply. */
int link_ask(struct slots_link *link, const struct link_command *command, redisReply **reply,
	     uint64_t until_ns, struct base_error *error);
/* Shows the address's password; for servers that ask for it late. */
int link_authenticate(struct slots_link *link, const struct slots_address *address,
		      uint64_t until_ns, struct base_error *error);

/* Has no reply with more elements than any that is ours. */
void link_limit_replies(redisReader *reader);
/* Copies the words of an error reply, without what could mislead a terminal, into `words`. */
void link_words(const redisReply *reply, char *words, size_t room);
/* Tells whether an error reply says this, as its code or, from a script, further behind. */
bool link_says(const redisReply *reply, const char *word);

/* Milliseconds until then, at least 0, rounded up. */
int link_time_left_ms(uint64_t until_ns);

#endif
