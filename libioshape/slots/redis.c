/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The coordinator that is a Redis. The first half sends one command: it reads the password, finds
 * the server, connects, and handles lost connections, missing scripts, redirects and refusals. The
 * second half calls the script that keeps the queue (slots.lua), and waits for wake-ups.
 */
#define _GNU_SOURCE
#include "slots/redis.h"

#include "fs/fs.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <unistd.h>

/* Longest duration of a call, whatever the network does. */
#define REDIS_CALL_NS 2000000000ull

#define FIRST_BACKOFF_MS 50u
#define MOST_BACKOFF_MS 1000u
#define MOST_REDIRECTS 5
#define MOST_ANEW 2
#define MOST_HEALS 2

/* The script's times have a resolution of 1 ms. More frequent heartbeats would gain nothing. */
#define LEAST_BEAT_MS 20u

/* ---- The password ---------------------------------------------------------------------------- */

/* Reads the beginning of a file. Returns the number of bytes, or -errno. */
static ssize_t read_beginning(const char *path, char *text, size_t room)
{
	/* O_NONBLOCK: the call must not wait for the writer of a FIFO. */
	int fd = base_above_streams(open(path, O_RDONLY | O_NONBLOCK | O_NOCTTY | O_CLOEXEC));
	ssize_t got = 1, bytes = 0;

	if (fd < 0)
		return -errno;
	while (got > 0 && (size_t)bytes < room) {
		got = TEMP_FAILURE_RETRY(read(fd, text + bytes, room - (size_t)bytes));
		if (got > 0)
			bytes += got;
	}
	if (got < 0)
		bytes = -errno;
	close(fd);
	return bytes;
}

static int refuse_file(const struct redis_client *client, const char *why, struct base_error *error)
{
	return base_refuse_with(error, IOSHAPE_E_COORDINATOR,
				"write the password on its first line, and let this user read it "
				"(chgrp GROUP, chmod 440)",
				"the password file \"%s\" %s", client->config.password_file, why);
}

/* Reads the first line of the password file into the address. The caller holds the lock. If that
 * fails, a password that was read earlier is kept. If there is none, the coordinator counts as
 * unreachable, so that no save fails because an operator changed the mode of a file. */
static int read_password(struct redis_client *client, struct base_error *error)
{
	struct slots_address *address = &client->address;
	char text[ADDRESS_SECRET_BYTES + 1], why[96];
	const char *end;
	ssize_t bytes;
	int ret = 0;

	if (!client->config.password_file)
		return 0;
	bytes = read_beginning(client->config.password_file, text, sizeof(text));
	end = bytes > 0 ? memchr(text, '\n', (size_t)bytes) : NULL;
	if (end)
		bytes = end - text;
	if (bytes > 0 && text[bytes - 1] == '\r')
		bytes--;
	snprintf(why, sizeof(why), "cannot be read (%s)", strerror(bytes < 0 ? (int)-bytes : 0));
	if (end && !bytes) {
		ret = 0; /* an empty line: the server needs no password */
	} else if (bytes > 0 && bytes < ADDRESS_SECRET_BYTES) {
		memcpy(address->password, text, (size_t)bytes);
		address->password[bytes] = 0;
		address->has_password = true;
	} else if (!address->has_password) {
		ret = refuse_file(client,
				  bytes < 0 ? why :
				  !bytes    ? "is empty" :
					      "has a first line that is too long for a password",
				  error);
	}
	explicit_bzero(text, sizeof(text));
	return ret;
}

/* ---- Finding the server ---------------------------------------------------------------------- */

/* Returns the deadline for the next host: an equal part of the time that is left. A host that drops
 * all packets must not use up the time of the others. */
static uint64_t until_next(uint64_t until_ns, size_t hosts_left)
{
	uint64_t now = base_now_ns();

	return now + (until_ns > now ? until_ns - now : 0) / hosts_left;
}

static int ask_sentinel(struct slots_link *link, const struct slots_address *address,
			redisReply **reply, uint64_t until_ns, struct base_error *error)
{
	struct link_command command = { 0 };

	link_add_texts(&command, "SENTINEL", "get-master-addr-by-name", address->service);
	return link_ask(link, &command, reply, until_ns, error);
}

static int read_master(const struct slots_link *link, const struct slots_address *address,
		       const redisReply *reply, struct slots_node *master, struct base_error *error)
{
	char text[ADDRESS_HOST_BYTES + 8], words[200];

	if (reply->type == REDIS_REPLY_ERROR) {
		link_words(reply, words, sizeof(words));
		return base_refuse(error, -EACCES, "the sentinel (%s) says: %s", link->name, words);
	}
	if (reply->type == REDIS_REPLY_NIL)
		return base_refuse_with(error, -ENOENT, "check the service name in the address",
					"the sentinel (%s) knows no service \"%s\"", link->name,
					address->service);
	if (reply->type == REDIS_REPLY_ARRAY && reply->elements == 2 &&
	    reply->element[0]->type == REDIS_REPLY_STRING &&
	    reply->element[1]->type == REDIS_REPLY_STRING &&
	    (size_t)snprintf(text, sizeof(text), "%s:%s", reply->element[0]->str,
			     reply->element[1]->str) < sizeof(text) &&
	    !address_parse_node(master, text, strlen(text)) && *master->host)
		return 0;
	return base_refuse(error, -EPROTO, "the sentinel (%s) names no usable master", link->name);
}

static int find_master(const struct slots_address *address, const struct slots_node *sentinel,
		       struct slots_node *master, uint64_t until_ns, struct base_error *error)
{
	struct slots_link *link;
	redisReply *reply = NULL;
	int ret;

	ret = link_open(&link, address, sentinel, false, 0, until_ns, error);
	if (ret)
		return ret;
	ret = ask_sentinel(link, address, &reply, until_ns, error);
	if (!ret && link_says(reply, "NOAUTH") && address->has_password) {
		freeReplyObject(reply);
		reply = NULL;
		ret = link_authenticate(link, address, until_ns, error);
		if (!ret)
			ret = ask_sentinel(link, address, &reply, until_ns, error);
	}
	if (!ret)
		ret = read_master(link, address, reply, master, error);
	freeReplyObject(reply);
	link_close(link);
	return ret;
}

/* Connects to a node, or to the master that a sentinel names. After a failover sentinels may name
 * the old master for a moment; it then answers READONLY. */
static int connect_through(const struct redis_client *client, const struct slots_node *node,
			   struct slots_link **out, uint64_t until_ns, struct base_error *error)
{
	struct slots_node master;
	int ret = 0;

	if (client->address.kind == ADDRESS_SENTINEL) {
		ret = find_master(&client->address, node, &master, until_ns, error);
		node = &master;
	}
	return ret ? ret :
		     link_open(out, &client->address, node, true, client->most_reply_bytes,
			       until_ns, error);
}

/* Finds the server and connects to it. The caller holds the lock. */
static int find_server(struct redis_client *client, struct slots_link **out, uint64_t until_ns,
		       struct base_error *error)
{
	const struct slots_address *address = &client->address;
	const size_t count = address->node_count, bytes = client->most_reply_bytes;
	struct base_error why = { 0 };
	int ret = -EINVAL;

	if (address->kind == ADDRESS_UNIX)
		return link_open(out, address, NULL, true, bytes, until_ns, error);
	if (client->has_moved) {
		ret = link_open(out, address, &client->moved, true, bytes, until_next(until_ns, 2),
				NULL);
		if (!ret)
			return 0;
		client->has_moved = false;
	}
	for (size_t i = 0; i < count; i++) {
		why.code = 0; /* keep the error of the last host */
		ret = connect_through(client, &address->nodes[(client->next + i) % count], out,
				      until_next(until_ns, count - i), &why);
		if (!ret) {
			client->next = (client->next + i) % count;
			return 0;
		}
	}
	client->next = (client->next + 1) % count;
	if (count > 1)
		base_rephrase(&why, ret,
			      "none of the %zu hosts in the address can be used; the last: %s",
			      count, why.sentence);
	base_pass_on(error, &why);
	return ret;
}

/* ---- Connections ----------------------------------------------------------------------------- */

static int take_address(struct redis_client *client, struct base_error *error)
{
	struct slots_address *address = &client->address;
	struct slots_config *config = &client->config;
	int ret = address_parse(address, config->address, error);

	if (ret)
		return ret;
#ifndef SLOTS_TLS
	if (address->tls)
		return base_refuse_with(
			error, -EINVAL,
			"install hiredis 1.0 or newer with hiredis_ssl (Debian 13: libhiredis-dev "
			"and libssl-dev) and rebuild ioshape",
			"this library was built without TLS, so rediss:// cannot be used");
#endif
	/* A password in the address takes precedence. */
	if (address->has_password)
		config->password_file = NULL;
	if (address->has_password || config->password_file || !config->password ||
	    !*config->password)
		return 0;
	if (strlen(config->password) >= sizeof(address->password))
		return base_refuse(error, -EINVAL,
				   "the coordinator's password is longer than %d bytes",
				   ADDRESS_SECRET_BYTES - 1);
	strcpy(address->password, config->password);
	address->has_password = true;
	return 0;
}

int client_open(struct redis_client *client, const struct slots_config *config,
		struct base_error *error)
{
	*client = (struct redis_client){ .config = *config };
	pthread_mutex_init(&client->lock, NULL);
	/* Replace all characters that are not allowed in keys. Most of all, a name must not contain
	 * the braces that mark the keys' hash tag. */
	for (char *at = client->config.pool; *at; at++) {
		if (!strchr(FS_POOL_CHARACTERS, *at))
			*at = '_';
	}
	snprintf(client->key, sizeof(client->key), "{ios:%s}:v%u:m", client->config.pool,
		 REDIS_SCRIPT_FORMAT);
	return take_address(client, error);
}

/* Closes the connection, and erases the password from memory. */
void client_close(struct redis_client *client)
{
	link_close(client->commands);
	pthread_mutex_destroy(&client->lock);
	explicit_bzero(&client->address, sizeof(client->address));
}

/* Closes the connection for commands. The caller holds the lock. */
static void drop(struct redis_client *client)
{
	link_close(client->commands);
	client->commands = NULL;
}

/* Records a failure and sets the time before which no call connects. The caller holds the lock. */
static void note_failure(struct redis_client *client, const struct base_error *error)
{
	const unsigned doublings = MIN(client->failures, 10u);
	const uint64_t most_ms = MIN(FIRST_BACKOFF_MS << doublings, MOST_BACKOFF_MS);

	client->failures++;
	/* The random half keeps thousands of clients from returning in the same millisecond. */
	client->not_before_ns =
		base_now_ns() + most_ms * 500000 + base_random() % (most_ms * 500000 + 1);
	client->last_failure = *error;
}

/* Connects to the server, or fails at once during the back-off. The caller holds the lock. */
static int obtain(struct redis_client *client, struct slots_link **out, uint64_t until_ns,
		  struct base_error *error)
{
	int ret;

	*out = NULL;
	if (client->failures && base_now_ns() < client->not_before_ns)
		return base_pass_on(error, &client->last_failure);
	ret = read_password(client, error);
	if (!ret)
		ret = find_server(client, out, until_ns, error);
	if (ret)
		note_failure(client, error);
	return ret;
}

/* Returns when a call that begins now must end. A thread that waits for an answer cannot report a
 * lost slot, so a call takes less than what is left of a lease that the process trusts no more
 * (slot.c). */
static uint64_t call_end(const struct redis_client *client)
{
	return base_now_ns() + MIN(REDIS_CALL_NS, base_ms_to_ns(client->config.lease_ms) / 6);
}

/* Opens a second connection beside the one for commands, subject to the back-off. */
static int connect_beside(struct redis_client *client, struct slots_link **out,
			  struct base_error *error)
{
	int ret;

	pthread_mutex_lock(&client->lock);
	ret = obtain(client, out, call_end(client), error);
	pthread_mutex_unlock(&client->lock);
	return ret;
}

/* ---- Error replies --------------------------------------------------------------------------- */

/* Returns whether a reply is a redirect, "MOVED 3999 host:port". Fills in the node. */
static bool is_redirect(const struct slots_link *link, const redisReply *reply,
			struct slots_node *node)
{
	const char *const where = strrchr(reply->str, ' ');

	if (strncmp(reply->str, "MOVED ", 6) != 0)
		return false;
	if (address_parse_node(node, where + 1, strlen(where + 1)))
		return false;
	if (!*node->host)
		memcpy(node->host, link->node.host, sizeof(node->host));
	return true;
}

/* Returns whether another server may be the right one after this error. ASK and TRYAGAIN: the
 * cluster moves the pool's keys to another node. */
static bool is_moved(const redisReply *reply)
{
	static const char *const words[] = { "READONLY",  "LOADING",         "MASTERDOWN",
					     "UNBLOCKED", "CLUSTERDOWN",     "TRYAGAIN",
					     "NOAUTH",    "unauthenticated", "NOREPLICAS",
					     "ASK " };

	for (size_t i = 0; i < ARRAY_LENGTH(words); i++) {
		if (link_says(reply, words[i]))
			return true;
	}
	return false;
}

static void refuse(const struct slots_link *link, const redisReply *reply, struct base_error *error)
{
	const char *remedy = "";
	char words[200];

	link_words(reply, words, sizeof(words));
	if (link_says(reply, "NOPERM") || link_says(reply, "can't run this command") ||
	    link_says(reply, "No permissions"))
		remedy = "give its user the rights in docs/coordinator/users.acl";
	else if (link_says(reply, "NOAUTH") || link_says(reply, "unauthenticated"))
		remedy = "give a password in the address, password_file or IOSHAPE_PASSWORD";
	else if (link_says(reply, "OOM "))
		remedy = "raise its maxmemory";
	base_refuse_with(error, -EACCES, remedy, "%s says: %s", link->name, words);
}

/* Consequence of an error reply. */
enum sequel {
	REFUSED,    /* the server rejects this command; the connection stays usable */
	REDIRECTED, /* the next connection goes to another node of the cluster */
	LOST        /* another server may be the right one: connect again later */
};

/* Decides what follows from an error reply. The caller holds the lock. */
static enum sequel take_error(struct redis_client *client, const struct slots_link *link,
			      const redisReply *reply, struct base_error *error)
{
	struct slots_node node;

	if (is_redirect(link, reply, &node)) {
		client->moved = node;
		client->has_moved = true;
		return REDIRECTED;
	}
	refuse(link, reply, error);
	if (!is_moved(reply))
		return REFUSED;
	client->has_moved = false;
	note_failure(client, error);
	return LOST;
}

/* ---- Sending one command --------------------------------------------------------------------- */

/* Begins a call of the script. `subject` is the id of a request or the name of a job; known_epoch
 * is the latest epoch that this client has seen. The caller adds arguments by link_add_*(). */
static void begin_call(const struct redis_client *client, struct link_command *command,
		       const char *operation, const char *subject, uint64_t known_epoch)
{
	command->count = command->number_count = 0;
	link_add_texts(command, "EVALSHA", slots_script_sha1, "1", client->key, operation, subject);
	link_add_numbers(command, client->config.lease_ms, known_epoch);
}

/* Replaces the script's hash by its whole text, for a server that does not have the script. */
static void send_script_itself(struct link_command *command)
{
	command->texts[0] = "EVAL";
	command->bytes[0] = strlen("EVAL");
	command->texts[1] = slots_script;
	command->bytes[1] = strlen(slots_script);
}

/* Returns whether the script failed because it cannot read the pool's keys. Any client may write
 * garbage there, and the keys then stay unreadable. */
static bool cannot_be_read(const struct link_command *command, const redisReply *reply)
{
	static const char *const words[] = { "WRONGTYPE", "attempt to ", "Bad data format",
					     "Missing bytes in input", "bad argument #" };

	if (strncmp(command->texts[0], "EVAL", 4) != 0)
		return false;
	for (size_t i = 0; i < ARRAY_LENGTH(words); i++) {
		if (link_says(reply, words[i]))
			return true;
	}
	return false;
}

/* The state of one call. */
struct attempt {
	struct redis_client *client;
	struct link_command *command;
	uint64_t until_ns;
	unsigned redirects, anew, heals;
	bool repeated, whole_script;
	struct base_error why;
};

enum verdict { DONE, AGAIN, FAILED };

/* Removes the pool's data, so that the script starts it anew with the operator's settings. At the
 * second attempt it removes these settings instead; their key ends in "o". */
static bool heal(struct attempt *attempt, const redisReply *broken)
{
	struct redis_client *client = attempt->client;
	struct link_command command = { 0 };
	char key[SLOTS_KEY_BYTES], words[200];
	redisReply *reply = NULL;
	int ret;

	if (attempt->heals == MOST_HEALS)
		return false;
	memcpy(key, client->key, sizeof(key));
	if (attempt->heals++)
		key[strlen(key) - 1] = 'o';
	link_add_texts(&command, "DEL", key);
	ret = link_ask(client->commands, &command, &reply, attempt->until_ns, NULL);
	freeReplyObject(reply);
	link_words(broken, words, sizeof(words));
	if (attempt->heals == 1)
		base_log(&client->config.log, IOSHAPE_LOG_WARNING,
			 "pool \"%s\" had unreadable keys in %s (%s); it was reset, and keeps the "
			 "readable settings of operators",
			 client->config.pool, client->commands->name, words);
	return !ret;
}

static enum verdict judge(struct attempt *attempt, const redisReply *reply)
{
	struct redis_client *client = attempt->client;
	enum sequel sequel;

	if (reply->type != REDIS_REPLY_ERROR) {
		client->failures = 0;
		return DONE;
	}
	if (!strncmp(reply->str, "NOSCRIPT", 8) && !attempt->whole_script) {
		attempt->whole_script = true;
		send_script_itself(attempt->command);
		return AGAIN;
	}
	if (link_says(reply, "IOSHAPE-ANEW") && ++attempt->anew < MOST_ANEW)
		return AGAIN;
	if (cannot_be_read(attempt->command, reply) && heal(attempt, reply))
		return AGAIN;
	sequel = take_error(client, client->commands, reply, &attempt->why);
	if (sequel == REDIRECTED && ++attempt->redirects > MOST_REDIRECTS) {
		base_refuse_with(
			&attempt->why, IOSHAPE_E_COORDINATOR, "check that the cluster is complete",
			"%s and other nodes redirect to each other", client->commands->name);
		note_failure(client, &attempt->why);
		sequel = LOST;
	}
	if (sequel != REFUSED)
		drop(client);
	return sequel == REDIRECTED ? AGAIN : FAILED;
}

static enum verdict try_once(struct attempt *attempt, redisReply **reply)
{
	struct redis_client *client = attempt->client;
	const bool kept = client->commands;
	enum verdict verdict;
	int ret;

	if (!kept && obtain(client, &client->commands, attempt->until_ns, &attempt->why))
		return FAILED;
	ret = link_ask(client->commands, attempt->command, reply, attempt->until_ns, &attempt->why);
	if (ret) {
		drop(client);
		/* A restarted server has dropped our connection. That is no failure yet: repeat the
		 * command once. */
		if (ret == -ECONNRESET && kept && !attempt->repeated) {
			attempt->repeated = true;
			attempt->why.code = 0;
			return AGAIN;
		}
		note_failure(client, &attempt->why);
		return FAILED;
	}
	verdict = judge(attempt, *reply);
	if (verdict != DONE) {
		freeReplyObject(*reply);
		*reply = NULL;
	}
	return verdict;
}

int client_call(struct redis_client *client, struct link_command *command, redisReply **reply,
		struct base_error *error)
{
	struct attempt attempt = { .client = client, .command = command };
	enum verdict verdict;

	*reply = NULL;
	pthread_mutex_lock(&client->lock);
	attempt.until_ns = call_end(client);
	do {
		verdict = try_once(&attempt, reply);
	} while (verdict == AGAIN);
	pthread_mutex_unlock(&client->lock);
	if (verdict == DONE)
		return 0;
	attempt.why.code = IOSHAPE_E_COORDINATOR;
	return base_pass_on(error, &attempt.why);
}

/* ---- The pool -------------------------------------------------------------------------------- */

/* A pool kept by a Redis. */
struct redis_pool {
	struct redis_client client;
	char wake_key[SLOTS_KEY_BYTES];
	_Atomic uint64_t epoch; /* epoch of the latest answer */

	/* Used only by the thread that waits. */
	/* Connection for BLPOP; NULL: not connected yet, lost, or closed while idle. */
	struct slots_link *wake;
	bool asked;        /* BLPOP was sent and not answered yet */
	bool woken;        /* a wake-up may have been lost: the next wait() returns at once */
	bool told_refused; /* whether the user was told that the server refuses BLPOP */
	uint64_t due_ns;   /* when a healthy server has answered BLPOP at the latest */
	int interruption;  /* an eventfd */
};

/* ---- Opening and closing --------------------------------------------------------------------- */

static void redis_close(void *opaque)
{
	struct redis_pool *pool = opaque;

	link_close(pool->wake);
	client_close(&pool->client);
	if (pool->interruption >= 0)
		close(pool->interruption);
	free(pool);
}

static int redis_open(void **out, const struct slots_config *config, struct base_error *error)
{
	struct redis_pool *pool = calloc(1, sizeof(*pool));
	int ret;

	*out = NULL;
	if (!pool)
		return base_no_memory(error, "a pool", sizeof(*pool));
	pool->interruption = -1;
	ret = client_open(&pool->client, config, error);
	if (!ret)
		pool->interruption = base_above_streams(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
	if (!ret && pool->interruption < 0)
		ret = base_fail(error, -errno, "cannot make an eventfd");
	if (ret) {
		redis_close(pool);
		return ret;
	}
	snprintf(pool->wake_key, sizeof(pool->wake_key), "{ios:%s}:v%u:w:%s",
		 pool->client.config.pool, REDIS_SCRIPT_FORMAT, config->identity.client);
	*out = pool;
	return 0;
}

/* ---- Answers --------------------------------------------------------------------------------- */

/* The script answers with lists of names and values. The server may be an impostor, so every value
 * is checked. Unknown names are ignored. */

/* Reads an integer, or a number as text. Lua answers with text above 2^53, and for values that it
 * received as text. */
static int read_number(const redisReply *reply, uint64_t *number)
{
	char *end;

	if (reply->type == REDIS_REPLY_INTEGER) {
		*number = reply->integer > 0 ? (uint64_t)reply->integer : 0;
		return 0;
	}
	if (reply->type != REDIS_REPLY_STRING || !reply->len)
		return -EPROTO;
	if (reply->str[0] == '-') {
		*number = 0;
		return 0;
	}
	if (reply->str[0] < '0' || reply->str[0] > '9')
		return -EPROTO;
	errno = 0;
	*number = strtoull(reply->str, &end, 10);
	return errno || end != reply->str + reply->len ? -EPROTO : 0;
}

/* Returns the value of a name. NULL: the name is missing, or the reply is not a list of names and
 * values. */
static const redisReply *find(const redisReply *reply, const char *name)
{
	if (reply->type != REDIS_REPLY_ARRAY || reply->elements % 2)
		return NULL;
	for (size_t i = 0; i < reply->elements; i += 2) {
		if (reply->element[i]->type != REDIS_REPLY_STRING)
			return NULL;
		if (!strcmp(reply->element[i]->str, name))
			return reply->element[i + 1];
	}
	return NULL;
}

static int take(const redisReply *reply, const char *name, uint64_t *number)
{
	const redisReply *value = find(reply, name);

	return value ? read_number(value, number) : -EPROTO;
}

/* Reads a number of 32 bits. Another client may have forged it, so a number that is too large
 * counts as the largest. */
static int take_small(const redisReply *reply, const char *name, uint32_t *number)
{
	uint64_t large = 0;
	int ret = take(reply, name, &large);

	*number = (uint32_t)MIN(large, UINT32_MAX);
	return ret;
}

/* Reads a text without characters that could mislead a terminal, because other clients choose
 * it. */
static int take_words(const redisReply *reply, const char *name, char *words, size_t room)
{
	const redisReply *value = find(reply, name);

	if (!value || value->type != REDIS_REPLY_STRING)
		return -EPROTO;
	link_words(value, words, room);
	return 0;
}

static int read_answer(const redisReply *reply, struct slots_answer *answer)
{
	uint32_t state;

	*answer = (struct slots_answer){ .state = SLOTS_NONE };
	if (take_small(reply, "state", &state) || state > SLOTS_HOLDING ||
	    take(reply, "epoch", &answer->epoch) ||
	    take_small(reply, "capacity", &answer->capacity))
		return -EPROTO;
	answer->state = (enum slots_state)state;
	if (state == SLOTS_NONE)
		return 0;
	if (take_small(reply, "beat", &answer->beat_ms))
		return -EPROTO;
	if (answer->beat_ms)
		answer->beat_ms = MAX(answer->beat_ms, LEAST_BEAT_MS);
	if (state == SLOTS_WAITING)
		return take_small(reply, "position", &answer->position) ||
				       take_words(reply, "ahead", answer->ahead,
						  sizeof(answer->ahead)) ?
			       -EPROTO :
			       0;
	return take(reply, "fence", &answer->fence) ||
			       take_small(reply, "weight", &answer->weight) ||
			       take_small(reply, "target", &answer->place) ?
		       -EPROTO :
		       0;
}

static int read_grant(const redisReply *reply, struct slots_grant *grant)
{
	if (take(reply, "bytes", &grant->bytes) || take_small(reply, "start", &grant->start_ms) ||
	    take_small(reply, "end", &grant->end_ms) || grant->end_ms < grant->start_ms)
		return -EPROTO;
	return 0;
}

/* ---- Requests -------------------------------------------------------------------------------- */

/* Returns a number of bytes, limited to what the script can count exactly. */
static uint64_t amount(uint64_t bytes)
{
	return MIN(bytes, SLOTS_MOST_BYTES);
}

static uint64_t known_epoch(const struct redis_pool *pool)
{
	return atomic_load_explicit(&pool->epoch, memory_order_relaxed);
}

static int not_understood(const struct redis_pool *pool, const char *operation,
			  struct base_error *error)
{
	return base_refuse_with(
		error, IOSHAPE_E_COORDINATOR,
		"check that it is a Redis, and that all jobs use the same version of ioshape",
		"the coordinator's answer to \"%s\" for pool %s is not valid", operation,
		pool->client.config.pool);
}

/* Makes a call whose answer is the state of a request. */
static int ask_about(struct redis_pool *pool, const char *operation, struct link_command *command,
		     struct slots_answer *answer, struct base_error *error)
{
	redisReply *reply;
	int ret;

	ret = client_call(&pool->client, command, &reply, error);
	if (ret)
		return ret;
	ret = read_answer(reply, answer);
	freeReplyObject(reply);
	if (ret)
		return not_understood(pool, operation, error);
	atomic_store_explicit(&pool->epoch, answer->epoch, memory_order_relaxed);
	return 0;
}

static int redis_acquire(void *opaque, const struct slots_request *request,
			 struct slots_answer *answer, struct base_error *error)
{
	struct redis_pool *pool = opaque;
	const struct slots_config *config = &pool->client.config;
	const struct slots_identity *identity = &config->identity;
	struct link_command command;
	char boost[16];

	snprintf(boost, sizeof(boost), "%d", request->boost_ms);
	begin_call(&pool->client, &command, "acquire", request->id, known_epoch(pool));
	link_add_texts(&command, identity->client, identity->node, identity->job);
	link_add_numbers(&command, identity->rank, MAX(identity->share, 1u), request->weight,
			 amount(request->bytes), config->asked_capacity,
			 request->default_capacity ? request->default_capacity :
						     config->default_capacity);
	link_add_texts(&command, identity->user);
	link_add_numbers(&command, request->urgent);
	link_add_texts(&command, boost);
	return ask_about(pool, "acquire", &command, answer, error);
}

static int redis_beat(void *opaque, const struct slots_beat *beat, struct slots_answer *answer,
		      struct base_error *error)
{
	struct redis_pool *pool = opaque;
	const struct slots_identity *identity = &pool->client.config.identity;
	struct link_command command;

	/* A holder sends the epoch of its own slot: another slot of this process may have seen a
	 * newer epoch. */
	begin_call(&pool->client, &command, "beat", beat->id,
		   beat->holding ? beat->epoch : known_epoch(pool));
	link_add_numbers(&command, amount(beat->passed), beat->holding, beat->fence, beat->weight,
			 amount(beat->bytes));
	link_add_texts(&command, identity->client, identity->node, identity->job);
	link_add_numbers(&command, identity->rank, MAX(identity->share, 1u));
	return ask_about(pool, "beat", &command, answer, error);
}

static int redis_release(void *opaque, const char *id, uint64_t passed, struct base_error *error)
{
	struct redis_pool *pool = opaque;
	struct link_command command;
	redisReply *reply;
	int ret;

	begin_call(&pool->client, &command, "release", id, known_epoch(pool));
	link_add_numbers(&command, amount(passed));
	ret = client_call(&pool->client, &command, &reply, error);
	freeReplyObject(reply);
	return ret;
}

/* Asks for bandwidth. If an answer is lost and the call repeated, the first grant
 * is lost. Then writers are slower for a moment. */
static int redis_pace(void *opaque, uint64_t bytes, uint64_t most, struct slots_grant *grant,
		      struct base_error *error)
{
	struct redis_pool *pool = opaque;
	struct link_command command;
	redisReply *reply;
	int ret;

	memset(grant, 0, sizeof(*grant));
	begin_call(&pool->client, &command, "pace", pool->client.config.identity.job,
		   known_epoch(pool));
	link_add_numbers(&command, amount(bytes), amount(most), amount(pool->client.config.rate));
	link_add_texts(&command, pool->client.config.identity.user);
	ret = client_call(&pool->client, &command, &reply, error);
	if (ret)
		return ret;
	ret = read_grant(reply, grant);
	freeReplyObject(reply);
	return ret ? not_understood(pool, "pace", error) : 0;
}

/* ---- Waiting for a wake-up ------------------------------------------------------------------- */

/*
 * A waiter sends BLPOP for its client's own list, on a connection used for nothing else. If wait()
 * is interrupted, the BLPOP stays pending, and the next wait() continues with it.
 *
 * No wake-up is lost. What the server pushes stays in the list until a BLPOP takes it, and its
 * reply is read by this wait() or by the next one. If the connection breaks while a BLPOP is
 * pending, wait() fails, and the next heartbeat reports the state. A failure of wait() does not
 * mean that the coordinator is unreachable. The server may refuse only BLPOP; then heartbeats alone
 * report a grant.
 */

/* An answer to BLPOP that is this late will not come. */
#define DEAD_NS 2000000000ull
/* The server ends a BLPOP up to this late, because it looks for expired ones ten times a second. */
#define LATE_NS 150000000ull

static void redis_interrupt(void *opaque)
{
	struct redis_pool *pool = opaque;
	const uint64_t one = 1;

	/* The write fails only if the counter is full, and then an interruption is pending
	 * already. */
	while (write(pool->interruption, &one, sizeof(one)) < 0 && errno == EINTR)
		;
}

static bool was_interrupted(struct redis_pool *pool)
{
	uint64_t count;

	return read(pool->interruption, &count, sizeof(count)) == sizeof(count);
}

static void drop_wake(struct redis_pool *pool)
{
	link_close(pool->wake);
	pool->wake = NULL;
	pool->asked = false;
}

/* Closes the connections of an idle pool. Otherwise a server with 100,000 processes that save twice
 * an hour would need most of its memory for connections. The next call connects again. */
static void redis_rest(void *opaque)
{
	struct redis_pool *pool = opaque;

	pool->woken |= pool->asked;
	drop_wake(pool);
	pthread_mutex_lock(&pool->client.lock);
	drop(&pool->client);
	pthread_mutex_unlock(&pool->client.lock);
}

static int ask_to_be_woken(struct redis_pool *pool, uint64_t until_ns, struct base_error *error)
{
	/* BLPOP takes 0 for "without limit". */
	const uint64_t left_ms = MAX((uint64_t)link_time_left_ms(until_ns), 1u);
	struct link_command command = { 0 };
	char seconds[32];

	snprintf(seconds, sizeof(seconds), "%llu.%03u", (unsigned long long)(left_ms / 1000),
		 (unsigned)(left_ms % 1000));
	link_add_texts(&command, "BLPOP", pool->wake_key, seconds);
	pool->asked = true;
	pool->due_ns = base_now_ns() + base_ms_to_ns(left_ms);
	return link_send(pool->wake, &command, call_end(&pool->client), error);
}

/* Warns once that the server refuses BLPOP, and why. */
static void tell_refused(struct redis_pool *pool, const struct base_error *error)
{
	if (!pool->told_refused)
		base_log(&pool->client.config.log, IOSHAPE_LOG_WARNING,
			 "the coordinator cannot wake processes in pool \"%s\", so they get slots "
			 "seconds late: %s",
			 pool->client.config.pool, error->text);
	pool->told_refused = true;
}

/* Reads the answer to BLPOP. Returns 1 for a wake-up, 0 if BLPOP must be sent again or its answer
 * is incomplete, or a negative code. */
static int take_wake(struct redis_pool *pool, struct base_error *error)
{
	enum sequel sequel;
	redisReply *reply;
	int ret = link_take(pool->wake, &reply, error);

	if (ret || !reply)
		return ret;
	pool->asked = false;
	if (reply->type != REDIS_REPLY_ERROR) {
		ret = reply->type != REDIS_REPLY_NIL;
	} else {
		pthread_mutex_lock(&pool->client.lock);
		sequel = take_error(&pool->client, pool->wake, reply, error);
		pthread_mutex_unlock(&pool->client.lock);
		if (sequel == REFUSED)
			tell_refused(pool, error);
		if (sequel != REFUSED)
			drop_wake(pool);
		ret = sequel == REDIRECTED ? 0 : -EACCES;
	}
	freeReplyObject(reply);
	return ret;
}

/* Returns when wait() ends. If an answer is due at about until_ns, wait() waits a little longer for
 * it. */
static uint64_t last_moment(const struct redis_pool *pool, uint64_t until_ns)
{
	return pool->asked && pool->due_ns <= until_ns + LATE_NS ? until_ns + LATE_NS : until_ns;
}

/* Waits once for the answer to BLPOP. Returns what take_wake() does. */
static int wait_once(struct redis_pool *pool, uint64_t until_ns, struct base_error *error)
{
	const uint64_t dead_ns = pool->due_ns + DEAD_NS;
	struct pollfd ready[] = {
		{ .fd = pool->wake->context->fd, .events = POLLIN },
		{ .fd = pool->interruption, .events = POLLIN },
	};

	if (poll(ready, ARRAY_LENGTH(ready), link_time_left_ms(MIN(until_ns, dead_ns))) < 0)
		return 0; /* a signal, or no memory: the caller's loop has a deadline */
	if (ready[0].revents)
		return take_wake(pool, error);
	if (base_now_ns() >= dead_ns)
		return base_refuse(error, -ETIMEDOUT, "%s does not answer in time",
				   pool->wake->name);
	return 0;
}

static int redis_wait(void *opaque, uint32_t timeout_ms, struct base_error *error)
{
	struct redis_pool *pool = opaque;
	const uint64_t until_ns = base_now_ns() + base_ms_to_ns(timeout_ms);
	struct base_error why = { 0 };
	int ret = pool->woken;

	pool->woken = false;
	while (!ret && !was_interrupted(pool)) {
		if (!pool->wake)
			ret = connect_beside(&pool->client, &pool->wake, &why);
		if (ret || base_now_ns() >= last_moment(pool, until_ns))
			break;
		if (!pool->asked)
			ret = ask_to_be_woken(pool, until_ns, &why);
		if (!ret)
			ret = wait_once(pool, last_moment(pool, until_ns), &why);
	}
	if (ret >= 0) {
		was_interrupted(pool);
		return 0;
	}
	/* After a refusal the connection stays usable. */
	if (ret != -EACCES)
		drop_wake(pool);
	why.code = IOSHAPE_E_COORDINATOR;
	return base_pass_on(error, &why);
}

/* ---- For the operator's commands in Python --------------------------------------------------- */

static int redis_describe(const struct slots_config *config, struct slots_coordinator *found,
			  struct base_error *error)
{
	struct redis_client client;
	int ret = client_open(&client, config, error);

	if (!ret)
		ret = read_password(&client, error);
	found->id = slots_redis.id;
	found->address = client.address;
	memcpy(found->key, client.key, sizeof(found->key));
	found->small_bytes = SLOTS_SMALL_BYTES;
	found->express = SLOTS_EXPRESS;
	client_close(&client);
	return ret;
}

const struct slots_ops slots_redis = {
	.id = "redis",
	.open = redis_open,
	.acquire = redis_acquire,
	.beat = redis_beat,
	.release = redis_release,
	.wait = redis_wait,
	.interrupt = redis_interrupt,
	.rest = redis_rest,
	.pace = redis_pace,
	.close = redis_close,
	.describe = redis_describe,
};
