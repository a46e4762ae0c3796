/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Parses the address of a Redis (address.c), and handles one connection to it (link.c).
 *
 * One thread at a time may use a connection. No function waits past its deadline, and a closed
 * connection raises no SIGPIPE.
 *
 * Functions return 0; -ECONNRESET if the server closed the connection; -ETIMEDOUT; or another
 * negative errno. After any failure the replies no longer match the commands, so only link_close()
 * may follow.
 */
#ifndef SLOTS_LINK_H
#define SLOTS_LINK_H

#include "base/base.h"

#include <hiredis.h>

#define LINK_MOST_ARGUMENTS 136
#define LINK_MOST_NUMBERS 24

/*
 * Parses redis://, rediss://, unix:// and sentinel:// addresses, as include/ioshape/ioshape.h
 * describes them. The text may be untrusted. -EINVAL: the error names the wrong part, but quotes
 * nothing. If a user forgets to escape a password, its pieces can land in any part.
 */
int address_parse(struct slots_address *address, const char *text, struct base_error *error);
/*
 * Parses "host:port" as Redis writes it in redirects. An IPv6 host needs no brackets there. A
 * missing host, left as "", means the server that sent the redirect. Returns 0 or -EINVAL.
 */
int address_parse_node(struct slots_node *node, const char *text, size_t bytes);

struct slots_link {
	redisContext *context;
	struct slots_node node;             /* "" and 0 for a Unix socket */
	char name[ADDRESS_HOST_BYTES + 32]; /* such as "redis at host:port" */
	bool tls;
	size_t reply_bytes; /* bytes received of a reply that is not complete yet */
	size_t most_reply_bytes;
	size_t sent_bytes; /* bytes sent of the latest command */
};

/* A command under construction. Texts are borrowed until it is sent; the command keeps its own copy
 * of numbers. */
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

/* Connects by until_ns at the latest. `node` is NULL for the Unix socket of the address. If
 * `greeted`, also sends the password and selects the database. `most_reply_bytes` raises the limit
 * for the length of a reply; it never lowers it. */
int link_open(struct slots_link **out, const struct slots_address *address,
	      const struct slots_node *node, bool greeted, size_t most_reply_bytes,
	      uint64_t until_ns, struct base_error *error);
/* NULL is allowed. */
void link_close(struct slots_link *link);

/* Sends a command by until_ns at the latest. */
int link_send(struct slots_link *link, const struct link_command *command, uint64_t until_ns,
	      struct base_error *error);
/* Reads what has arrived. *reply stays NULL until a reply is complete. */
int link_take(struct slots_link *link, redisReply **reply, struct base_error *error);
/* Sends a command and waits for its reply. */
int link_ask(struct slots_link *link, const struct link_command *command, redisReply **reply,
	     uint64_t until_ns, struct base_error *error);
/* Sends the address's password. Needed for servers that ask for it only when a command comes. */
int link_authenticate(struct slots_link *link, const struct slots_address *address,
		      uint64_t until_ns, struct base_error *error);

/* Makes the reader reject replies with more elements than any reply that the library expects. */
void link_limit_replies(redisReader *reader);
/* Copies the text of an error reply into `words`, with control and non-ASCII characters replaced,
 * because these could mislead a terminal. */
void link_words(const redisReply *reply, char *words, size_t room);
/* Returns whether the reply is an error whose text contains `word`. Errors from scripts have the
 * code further back. */
bool link_says(const redisReply *reply, const char *word);

/* Returns the milliseconds until until_ns, at least 0, rounded up. */
int link_time_left_ms(uint64_t until_ns);

#endif
