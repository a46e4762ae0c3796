/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A Redis and one command: the password, which server, a connection, and what can become of the
 * command: connections that have to be made again, scripts that the server forgot, redirects,
 * refusals.
 */
#define _GNU_SOURCE
#include "slots/redis.h"

#include "fs/fs.h"

#include <errno.h>
#include <fcntl.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#define FIRST_BACKOFF_MS 50u
#define MOST_BACKOFF_MS 1000u
#define MOST_REDIRECTS 5
#define MOST_ANEW 2
#define MOST_HEALS 2

/* ---- The password ---------------------------------------------------------------------------- */

/* Reads the file's beginning. Returns its bytes, or -errno. */
static ssize_t read_beginning(const char *path, char *text, size_t room)
{
	/* A FIFO without a writer is not waited for. */
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
	return base_refuse_with(
		error, IOSHAPE_E_COORDINATOR,
		"have its first line hold the password, and let this user read it (chgrp "
		"GROUP, chmod 440)",
		"the password file \"%s\" %s", client->config.password_file, why);
}

/* With the lock. Reads the first line of the password file into the address. If that fails, a
 * password that was read before stays. Without one the coordinator counts as unreachable: no save
 * fails because an operator has changed the mode of a file. */
int client_read_password(struct redis_client *client, struct base_error *error)
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
		ret = 0; /* an empty line: none is needed */
	} else if (bytes > 0 && bytes < ADDRESS_SECRET_BYTES) {
		memcpy(address->password, text, (size_t)bytes);
		address->password[bytes] = 0;
		address->has_password = true;
	} else if (!address->has_password) {
		ret = refuse_file(
			client,
			bytes < 0 ? why :
			!bytes    ? "is empty" :
				    "begins with a line that is longer than a password can be",
			error);
	}
	explicit_bzero(text, sizeof(text));
	return ret;
}

/* ---- Which server ---------------------------------------------------------------------------- */

/* So that one host that swallows everything does not take the time of the others. */
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
		return base_refuse_with(error, -ENOENT, "check the name in the address",
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

/* After a failover sentinels may name the old master for a moment: it says READONLY then. */
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

/* Finds the server and connects to it. With the lock. */
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
		why.code = 0; /* the last one's is told */
		ret = connect_through(client, &address->nodes[(client->next + i) % count], out,
				      until_next(until_ns, count - i), &why);
		if (!ret) {
			client->next = (client->next + i) % count;
			return 0;
		}
	}
	client->next = (client->next + 1) % count;
	if (count > 1)
		base_rephrase(&why, ret, "none of the %zu hosts in the address helps; the last: %s",
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
			"install hiredis 1.0 or newer with hiredis_ssl (Debian 13: "
			"libhiredis-dev and libssl-dev) and build it again",
			"this library was built without TLS, so that rediss:// cannot "
			"be used");
#endif
	/* One in the address wins. */
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
	/* The braces of the keys' tag, above all, must not come from a name. */
	for (char *at = client->config.pool; *at; at++) {
		if (!strchr(FS_POOL_CHARACTERS, *at))
			*at = '_';
	}
	snprintf(client->key, sizeof(client->key), "{ios:%s}:v%u:m", client->config.pool,
		 REDIS_SCRIPT_FORMAT);
	return take_address(client, error);
}

/* The password is not left behind in memory. */
void client_close(struct redis_client *client)
{
	link_close(client->commands);
	pthread_mutex_destroy(&client->lock);
	explicit_bzero(&client->address, sizeof(client->address));
}

/* With the lock. */
static void drop(struct redis_client *client)
{
	link_close(client->commands);
	client->commands = NULL;
}

void client_rest(struct redis_client *client)
{
	pthread_mutex_lock(&client->lock);
	drop(client);
	pthread_mutex_unlock(&client->lock);
}

/* With the lock. */
static void note_failure(struct redis_client *client, const struct base_error *error)
{
	const unsigned doublings = MIN(client->failures, 10u);
	const uint64_t most_ms = MIN(FIRST_BACKOFF_MS << doublings, MOST_BACKOFF_MS);

	client->failures++;
	/* So that thousands of clients do not all come back in the same millisecond. */
	client->not_before_ns =
		base_now_ns() + most_ms * 500000 + base_random() % (most_ms * 500000 + 1);
	client->last_failure = *error;
}

/* With the lock. */
static int obtain(struct redis_client *client, struct slots_link **out, uint64_t until_ns,
		  struct base_error *error)
{
	int ret;

	*out = NULL;
	if (client->failures && base_now_ns() < client->not_before_ns)
		return base_pass_on(error, &client->last_failure);
	ret = client_read_password(client, error);
	if (!ret)
		ret = find_server(client, out, until_ns, error);
	if (ret)
		note_failure(client, error);
	return ret;
}

uint64_t client_call_end(const struct redis_client *client)
{
	const _Atomic uint64_t *lease_end_ns = client->config.lease_end_ns;
	const uint64_t now = base_now_ns();
	const uint64_t by_ns =
		lease_end_ns ? atomic_load_explicit(lease_end_ns, memory_order_relaxed) : 0;

	/* Where that lease is long over, no thread waits to say so. */
	if (now > by_ns + REDIS_CALL_NS)
		return now + REDIS_CALL_NS;
	return MIN(now + REDIS_CALL_NS, MAX(now, by_ns));
}

int client_connect(struct redis_client *client, struct slots_link **out, struct base_error *error)
{
	int ret;

	pthread_mutex_lock(&client->lock);
	ret = obtain(client, out, client_call_end(client), error);
	pthread_mutex_unlock(&client->lock);
	return ret;
}

/* ---- Error replies --------------------------------------------------------------------------- */

/* "MOVED 3999 host:port", and the same with ASK. */
static bool is_redirect(const struct slots_link *link, const redisReply *reply,
			struct slots_node *node, bool *asking)
{
	const char *const where = strrchr(reply->str, ' ');

	*asking = !strncmp(reply->str, "ASK ", 4);
	if (!*asking && strncmp(reply->str, "MOVED ", 6) != 0)
		return false;
	if (address_parse_node(node, where + 1, strlen(where + 1)))
		return false;
	if (!*node->host)
		memcpy(node->host, link->node.host, sizeof(node->host));
	return true;
}

/* Errors after which another server may be the right one. */
static bool is_moved(const redisReply *reply)
{
	static const char *const words[] = { "READONLY",  "LOADING",         "MASTERDOWN",
					     "UNBLOCKED", "CLUSTERDOWN",     "TRYAGAIN",
					     "NOAUTH",    "unauthenticated", "NOREPLICAS" };

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

/* With the lock. */
static enum client_sequel take_error(struct redis_client *client, const struct slots_link *link,
				     const redisReply *reply, bool *asking,
				     struct base_error *error)
{
	struct slots_node node;

	if (is_redirect(link, reply, &node, asking)) {
		client->moved = node;
		client->has_moved = true;
		return CLIENT_REDIRECTED;
	}
	refuse(link, reply, error);
	if (!is_moved(reply))
		return CLIENT_REFUSED;
	client->has_moved = false;
	note_failure(client, error);
	return CLIENT_LOST;
}

enum client_sequel client_take_error(struct redis_client *client, const struct slots_link *link,
				     const redisReply *reply, bool *asking,
				     struct base_error *error)
{
	enum client_sequel sequel;

	pthread_mutex_lock(&client->lock);
	sequel = take_error(client, link, reply, asking, error);
	pthread_mutex_unlock(&client->lock);
	return sequel;
}

/* ---- One command ----------------------------------------------------------------------------- */

void client_begin(const struct redis_client *client, struct link_command *command,
		  const char *operation, const char *subject, uint64_t known_epoch)
{
	command->count = command->number_count = 0;
	link_add_texts(command, "EVALSHA", slots_script_sha1, "1", client->key, operation, subject);
	link_add_numbers(command, client->config.lease_ms, known_epoch);
}

/* The whole text, for a server that forgot it or never had it. */
static void send_script_itself(struct link_command *command)
{
	command->texts[0] = "EVAL";
	command->bytes[0] = strlen("EVAL");
	command->texts[1] = slots_script;
	command->bytes[1] = slots_script_bytes;
}

/* Any client may write garbage to a pool's keys, which then stays: the script cannot read them. */
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

/* What goes on during one call. */
struct attempt {
	struct redis_client *client;
	struct link_command *command;
	uint64_t until_ns;
	unsigned redirects, anew, heals;
	bool repeated, whole_script;
	bool asking, asked; /* the next command is to be introduced by ASKING; the last one was */
	struct base_error why;
};

enum verdict { DONE, AGAIN, FAILED };

/* Remove the pool's data, so that the script begins it anew with what operators have set. If that
 * does not help, remove what they have set, which is in the key that ends in "o". */
static bool heal(struct attempt *attempt, const redisReply *broken)
{
	struct redis_client *client = attempt->client;
	struct link_command command = { 0 };
	char key[REDIS_KEY_BYTES], words[200];
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
			 "pool \"%s\" had keys in %s that could not be read (%s); it begins "
			 "anew, with what operators have set as far as that can be read",
			 client->config.pool, client->commands->name, words);
	return !ret;
}

static enum verdict judge(struct attempt *attempt, const redisReply *reply)
{
	struct redis_client *client = attempt->client;
	enum client_sequel sequel;

	if (reply->type != REDIS_REPLY_ERROR) {
		client->failures = 0;
		return DONE;
	}
	if (!strncmp(reply->str, "NOSCRIPT", 8) && !attempt->whole_script) {
		attempt->whole_script = true;
		attempt->asking = attempt->asked;
		send_script_itself(attempt->command);
		return AGAIN;
	}
	if (link_says(reply, "IOSHAPE-ANEW") && ++attempt->anew < MOST_ANEW)
		return AGAIN;
	if (cannot_be_read(attempt->command, reply) && heal(attempt, reply))
		return AGAIN;
	sequel = take_error(client, client->commands, reply, &attempt->asking, &attempt->why);
	if (sequel == CLIENT_REDIRECTED && ++attempt->redirects > MOST_REDIRECTS) {
		base_refuse_with(
			&attempt->why, IOSHAPE_E_COORDINATOR, "check that the cluster is complete",
			"%s and other nodes send us to each other", client->commands->name);
		note_failure(client, &attempt->why);
		sequel = CLIENT_LOST;
	}
	if (sequel != CLIENT_REFUSED)
		drop(client);
	return sequel == CLIENT_REDIRECTED ? AGAIN : FAILED;
}

/* In a cluster whose slots are just being moved. */
static int say_asking(struct attempt *attempt)
{
	struct link_command command = { 0 };
	redisReply *reply;
	int ret;

	attempt->asking = false;
	link_add_texts(&command, "ASKING");
	ret = link_ask(attempt->client->commands, &command, &reply, attempt->until_ns,
		       &attempt->why);
	freeReplyObject(reply);
	return ret;
}

static enum verdict try_once(struct attempt *attempt, redisReply **reply)
{
	struct redis_client *client = attempt->client;
	const bool kept = client->commands;
	enum verdict verdict;
	int ret;

	if (!kept && obtain(client, &client->commands, attempt->until_ns, &attempt->why))
		return FAILED;
	attempt->asked = attempt->asking;
	ret = attempt->asking ? say_asking(attempt) : 0;
	if (!ret)
		ret = link_ask(client->commands, attempt->command, reply, attempt->until_ns,
			       &attempt->why);
	if (ret) {
		drop(client);
		/* A server that was restarted has forgotten our connection: no failure yet. */
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

/* With the lock. */
static int call(struct attempt *attempt, uint64_t most_ns, redisReply **reply,
		struct base_error *error)
{
	enum verdict verdict;

	*reply = NULL;
	attempt->until_ns = MIN(client_call_end(attempt->client), base_now_ns() + most_ns);
	do {
		verdict = try_once(attempt, reply);
	} while (verdict == AGAIN);
	if (verdict == DONE)
		return 0;
	attempt->why.code = IOSHAPE_E_COORDINATOR;
	return base_pass_on(error, &attempt->why);
}

int client_call(struct redis_client *client, struct link_command *command, redisReply **reply,
		struct base_error *error)
{
	struct attempt attempt = { .client = client, .command = command };
	int ret;

	pthread_mutex_lock(&client->lock);
	ret = call(&attempt, REDIS_CALL_NS, reply, error);
	pthread_mutex_unlock(&client->lock);
	return ret;
}

int client_call_aside(struct redis_client *client, struct link_command *command, uint64_t most_ns,
		      redisReply **reply, struct base_error *error)
{
	struct attempt attempt = { .client = client, .command = command };
	struct slots_node moved;
	unsigned failures;
	bool has_moved;
	int ret;

	pthread_mutex_lock(&client->lock);
	moved = client->moved;
	has_moved = client->has_moved;
	failures = client->failures;
	ret = call(&attempt, most_ns, reply, error);
	client->failures = failures;
	/* Back to the pool's own keys. */
	if (attempt.redirects) {
		drop(client);
		client->moved = moved;
		client->has_moved = has_moved;
	}
	pthread_mutex_unlock(&client->lock);
	return ret;
}
