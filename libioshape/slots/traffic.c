/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Commands and what can become of them: connections that have to be made again, scripts that the
 * server forgot, redirects, refusals.
 */
#define _GNU_SOURCE
#include "slots/redis.h"
#include "slots/script.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>

#define MOST_REDIRECTS 5
#define MOST_ANEW 2

/* ---- Error replies --------------------------------------------------------------------------- */

bool redis_must_look_anew(const redisReply *reply)
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

void redis_describe(const struct slots_link *link, const redisReply *reply, char *why)
{
	const char *remedy = "";
	char words[200];

	link_words(reply, words, sizeof(words));
	if (link_says(reply, "NOPERM") || link_says(reply, "can't run this command") ||
	    link_says(reply, "No permissions"))
		remedy = "; give its user the rights in docs/coordinator/users.acl";
	else if (link_says(reply, "NOAUTH") || link_says(reply, "unauthenticated"))
		remedy = "; give a password in the address, password_file or IOSHAPE_PASSWORD";
	else if (link_says(reply, "OOM "))
		remedy = "; raise its maxmemory";
	snprintf(why, LINK_WHY_BYTES, "%s says: %s%s", link_name(link), words, remedy);
}

/* ---- One command ----------------------------------------------------------------------------- */

void redis_begin(const struct redis_pool *pool, struct link_command *command, const char *operation)
{
	command->count = command->number_count = 0;
	link_add_text(command, "EVALSHA");
	link_add_text(command, slots_script_sha1);
	link_add_text(command, "1");
	link_add_text(command, pool->key);
	link_add_text(command, operation);
}

/* The whole text, for a server that forgot it or never had it. */
static void send_script_itself(struct link_command *command)
{
	command->texts[0] = "EVAL";
	command->bytes[0] = strlen("EVAL");
	command->texts[1] = slots_script;
	command->bytes[1] = slots_script_bytes;
}

/* What goes on during one call. */
struct attempt {
	struct redis_pool *pool;
	struct link_command *command;
	uint64_t until_ns;
	unsigned redirects, anew;
	bool repeated, whole_script, asking;
	char why[LINK_WHY_BYTES];
};

enum verdict { DONE, AGAIN, FAILED };

static void drop(struct redis_pool *pool)
{
	link_close(pool->commands);
	pool->commands = NULL;
}

static enum verdict follow(struct attempt *attempt, const struct slots_node *node, bool asking)
{
	struct redis_pool *pool = attempt->pool;

	if (++attempt->redirects > MOST_REDIRECTS) {
		snprintf(attempt->why, sizeof(attempt->why),
			 "%s and other nodes send us to each other; is the cluster complete?",
			 link_name(pool->commands));
		drop(pool);
		redis_note_failure(pool, attempt->why);
		return FAILED;
	}
	pool->route.moved = *node;
	pool->route.has_moved = true;
	attempt->asking = asking;
	drop(pool);
	return AGAIN;
}

static enum verdict judge(struct attempt *attempt, const redisReply *reply)
{
	struct redis_pool *pool = attempt->pool;
	struct slots_node node;
	bool asking;

	if (reply->type != REDIS_REPLY_ERROR) {
		pool->failures = 0;
		return DONE;
	}
	if (!strncmp(reply->str, "NOSCRIPT", 8) && !attempt->whole_script) {
		attempt->whole_script = true;
		send_script_itself(attempt->command);
		return AGAIN;
	}
	if (link_says(reply, "IOSHAPE-ANEW") && ++attempt->anew < MOST_ANEW)
		return AGAIN;
	if (route_is_redirect(pool->commands, reply, &node, &asking))
		return follow(attempt, &node, asking);
	redis_describe(pool->commands, reply, attempt->why);
	if (redis_must_look_anew(reply)) {
		drop(pool);
		pool->route.has_moved = false;
		redis_note_failure(pool, attempt->why);
	}
	return FAILED;
}

/* In a cluster whose slots are just being moved. */
static int say_asking(struct attempt *attempt)
{
	struct link_command command = { 0 };
	redisReply *reply;
	int ret;

	attempt->asking = false;
	link_add_text(&command, "ASKING");
	ret = link_ask(attempt->pool->commands, &command, &reply, attempt->until_ns, attempt->why);
	freeReplyObject(reply);
	return ret;
}

static enum verdict try_once(struct attempt *attempt, redisReply **reply)
{
	struct redis_pool *pool = attempt->pool;
	const bool kept = pool->commands;
	enum verdict verdict;
	int ret;

	if (!kept && redis_obtain(pool, &pool->commands, attempt->until_ns, attempt->why))
		return FAILED;
	link_expect(pool->commands, pool->most_reply_bytes);
	ret = attempt->asking ? say_asking(attempt) : 0;
	if (!ret)
		ret = link_ask(pool->commands, attempt->command, reply, attempt->until_ns,
			       attempt->why);
	if (ret) {
		drop(pool);
		/* A server that was restarted has forgotten our connection: no failure yet. */
		if (ret == -ECONNRESET && kept && !attempt->repeated) {
			attempt->repeated = true;
			return AGAIN;
		}
		redis_note_failure(pool, attempt->why);
		return FAILED;
	}
	verdict = judge(attempt, *reply);
	if (verdict != DONE) {
		freeReplyObject(*reply);
		*reply = NULL;
	}
	return verdict;
}

int redis_call(struct redis_pool *pool, struct link_command *command, redisReply **reply,
	       bool *repeated, struct base_error *error)
{
	struct attempt attempt = { .pool = pool, .command = command };
	enum verdict verdict;

	*reply = NULL;
	pthread_mutex_lock(&pool->lock);
	attempt.until_ns = redis_call_end(pool);
	redis_tidy(pool);
	do {
		verdict = try_once(&attempt, reply);
	} while (verdict == AGAIN);
	pthread_mutex_unlock(&pool->lock);
	if (repeated)
		*repeated = attempt.repeated;
	if (verdict == DONE)
		return 0;
	return base_refuse(error, IOSHAPE_E_COORDINATOR, "%s", attempt.why);
}

/* ---- Elsewhere in a cluster ------------------------------------------------------------------ */

static int ask_there(const struct redis_pool *pool, const struct slots_node *node,
		     const struct link_command *command, uint64_t most_ns, redisReply **reply,
		     char *why)
{
	const uint64_t until_ns = MIN(redis_call_end(pool), base_now_ns() + most_ns);
	struct slots_link *link;
	int ret;

	ret = link_open(&link, &pool->address, node, true, until_ns, why);
	if (!ret)
		ret = link_ask(link, command, reply, until_ns, why);
	if (!ret && (*reply)->type == REDIS_REPLY_ERROR) {
		redis_describe(link, *reply, why);
		ret = -EACCES;
	}
	link_close(link);
	return ret;
}

/* With the lock. Where the key is, if it is not here: *moved. */
static int ask_here(struct redis_pool *pool, const struct link_command *command, uint64_t most_ns,
		    redisReply **reply, struct slots_node *node, bool *moved, char *why)
{
	const uint64_t until_ns = MIN(redis_call_end(pool), base_now_ns() + most_ns);
	bool kept, asking;
	int ret;

	*moved = false;
	do {
		kept = pool->commands;
		if (!kept && redis_obtain(pool, &pool->commands, until_ns, why))
			return -EAGAIN;
		ret = link_ask(pool->commands, command, reply, until_ns, why);
		if (ret)
			drop(pool);
	} while (ret == -ECONNRESET && kept);
	if (ret) {
		if (ret != -ETIMEDOUT || most_ns == REDIS_CALL_NS)
			redis_note_failure(pool, why);
		return ret;
	}
	if ((*reply)->type != REDIS_REPLY_ERROR)
		return 0;
	*moved = route_is_redirect(pool->commands, *reply, node, &asking);
	redis_describe(pool->commands, *reply, why);
	return -EACCES;
}

int redis_call_elsewhere(struct redis_pool *pool, const struct link_command *command,
			 uint64_t most_ns, redisReply **reply, struct base_error *error)
{
	struct slots_node node;
	char why[LINK_WHY_BYTES];
	bool moved;
	int ret;

	*reply = NULL;
	pthread_mutex_lock(&pool->lock);
	redis_tidy(pool);
	ret = ask_here(pool, command, most_ns, reply, &node, &moved, why);
	pthread_mutex_unlock(&pool->lock);
	if (moved) {
		freeReplyObject(*reply);
		*reply = NULL;
		ret = ask_there(pool, &node, command, most_ns, reply, why);
	}
	if (!ret)
		return 0;
	freeReplyObject(*reply);
	*reply = NULL;
	return base_refuse(error, IOSHAPE_E_COORDINATOR, "%s", why);
}
