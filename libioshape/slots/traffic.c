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

#define FIRST_BACKOFF_MS 50u
#define MOST_BACKOFF_MS 1000u
#define MOST_REDIRECTS 5
#define MOST_ANEW 2
#define HEALED_AGAIN_NS (60ull * 1000000000)

/* ---- Connections ----------------------------------------------------------------------------- */

void redis_note_failure(struct redis_pool *pool, const struct base_error *error)
{
	const unsigned doublings = MIN(pool->failures, 10u);
	const uint64_t most_ms = MIN(FIRST_BACKOFF_MS << doublings, MOST_BACKOFF_MS);

	pool->failures++;
	/* So that thousands of clients do not all come back in the same millisecond. */
	pool->not_before_ns =
		base_now_ns() + most_ms * 500000 + base_random() % (most_ms * 500000 + 1);
	pool->last_failure = *error;
}

int redis_obtain(struct redis_pool *pool, struct slots_link **out, uint64_t until_ns,
		 struct base_error *error)
{
	int ret;

	*out = NULL;
	if (pool->failures && base_now_ns() < pool->not_before_ns)
		return base_pass_on(error, &pool->last_failure);
	ret = redis_read_password(pool, error);
	if (!ret)
		ret = route_connect(&pool->route, out, until_ns, error);
	if (ret)
		redis_note_failure(pool, error);
	return ret;
}

void redis_hurry(void *opaque, uint64_t until_ns)
{
	struct redis_pool *pool = opaque;

	__atomic_store_n(&pool->hurry_ns, until_ns, __ATOMIC_RELAXED);
}

uint64_t redis_call_end(const struct redis_pool *pool)
{
	const uint64_t hurry_ns = __atomic_load_n(&pool->hurry_ns, __ATOMIC_RELAXED);
	const uint64_t now = base_now_ns();

	/* That lease is long over: nobody waits to say so. */
	if (now > hurry_ns + REDIS_CALL_NS)
		return now + REDIS_CALL_NS;
	return MIN(now + REDIS_CALL_NS, MAX(now, hurry_ns));
}

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

int redis_refused(const struct slots_link *link, const redisReply *reply, struct base_error *error)
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
	return base_refuse(error, -EACCES, "%s says: %s" BASE_REMEDY "%s", link_name(link), words,
			   remedy);
}

/* ---- One command ----------------------------------------------------------------------------- */

void redis_begin(const struct redis_pool *pool, struct link_command *command, const char *operation,
		 const char *subject, uint64_t known_epoch)
{
	command->count = command->number_count = 0;
	link_add_texts(command, "EVALSHA", slots_script_sha1, "1", pool->key, operation, subject);
	link_add_numbers(command, pool->config.lease_ms, known_epoch);
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
	struct redis_pool *pool;
	struct link_command *command;
	uint64_t until_ns;
	unsigned redirects, anew;
	bool repeated, whole_script;
	bool asking, asked; /* the next command is to be introduced by ASKING; the last one was */
	struct base_error why;
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
		base_refuse(&attempt->why, IOSHAPE_E_COORDINATOR,
			    "%s and other nodes send us to each other" BASE_REMEDY
			    "check that the cluster is complete",
			    link_name(pool->commands));
		drop(pool);
		redis_note_failure(pool, &attempt->why);
		return FAILED;
	}
	pool->route.moved = *node;
	pool->route.has_moved = true;
	attempt->asking = asking;
	drop(pool);
	return AGAIN;
}

/* Drop the keys that the script cannot read. The next try shows whether that helps. */
static bool heal(struct attempt *attempt, const redisReply *broken)
{
	struct redis_pool *pool = attempt->pool;
	const uint64_t now = base_now_ns();
	struct link_command command = { 0 };
	redisReply *reply = NULL;
	char words[200];
	bool done;

	if (now < pool->heal_not_before_ns)
		return false;
	pool->heal_not_before_ns = now + HEALED_AGAIN_NS;
	link_add_text(&command, "EVAL");
	link_add_bytes(&command, slots_heal_script, slots_heal_script_bytes);
	link_add_texts(&command, "1", pool->key);
	done = !link_ask(pool->commands, &command, &reply, attempt->until_ns, NULL) &&
	       reply->type != REDIS_REPLY_ERROR;
	freeReplyObject(reply);
	if (!done)
		return false;
	link_words(broken, words, sizeof(words));
	base_log(
		&pool->config.log, IOSHAPE_LOG_WARNING,
		"pool \"%s\" had keys in %s that could not be read (%s); it begins anew, with what "
		"operators have set as far as that can be read",
		pool->config.pool, link_name(pool->commands), words);
	return true;
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
		attempt->asking = attempt->asked;
		send_script_itself(attempt->command);
		return AGAIN;
	}
	if (link_says(reply, "IOSHAPE-ANEW") && ++attempt->anew < MOST_ANEW)
		return AGAIN;
	if (route_is_redirect(pool->commands, reply, &node, &asking))
		return follow(attempt, &node, asking);
	if (cannot_be_read(attempt->command, reply) && heal(attempt, reply))
		return AGAIN;
	redis_refused(pool->commands, reply, &attempt->why);
	if (redis_must_look_anew(reply)) {
		drop(pool);
		pool->route.has_moved = false;
		redis_note_failure(pool, &attempt->why);
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
	ret = link_ask(attempt->pool->commands, &command, &reply, attempt->until_ns, &attempt->why);
	freeReplyObject(reply);
	return ret;
}

static enum verdict try_once(struct attempt *attempt, redisReply **reply)
{
	struct redis_pool *pool = attempt->pool;
	const bool kept = pool->commands;
	enum verdict verdict;
	int ret;

	if (!kept && redis_obtain(pool, &pool->commands, attempt->until_ns, &attempt->why))
		return FAILED;
	link_expect(pool->commands, pool->most_reply_bytes);
	attempt->asked = attempt->asking;
	ret = attempt->asking ? say_asking(attempt) : 0;
	if (!ret)
		ret = link_ask(pool->commands, attempt->command, reply, attempt->until_ns,
			       &attempt->why);
	if (ret) {
		drop(pool);
		/* A server that was restarted has forgotten our connection: no failure yet. */
		if (ret == -ECONNRESET && kept && !attempt->repeated) {
			attempt->repeated = true;
			attempt->why.code = 0;
			return AGAIN;
		}
		redis_note_failure(pool, &attempt->why);
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
	attempt->until_ns = MIN(redis_call_end(attempt->pool), base_now_ns() + most_ns);
	do {
		verdict = try_once(attempt, reply);
	} while (verdict == AGAIN);
	if (verdict == DONE)
		return 0;
	attempt->why.code = IOSHAPE_E_COORDINATOR;
	return base_pass_on(error, &attempt->why);
}

int redis_call(struct redis_pool *pool, struct link_command *command, redisReply **reply,
	       bool *repeated, struct base_error *error)
{
	struct attempt attempt = { .pool = pool, .command = command };
	int ret;

	pthread_mutex_lock(&pool->lock);
	ret = call(&attempt, REDIS_CALL_NS, reply, error);
	pthread_mutex_unlock(&pool->lock);
	if (repeated)
		*repeated = attempt.repeated;
	return ret;
}

int redis_call_aside(struct redis_pool *pool, struct link_command *command, uint64_t most_ns,
		     redisReply **reply, struct base_error *error)
{
	struct attempt attempt = { .pool = pool, .command = command };
	struct slots_route route;
	unsigned failures;
	int ret;

	pthread_mutex_lock(&pool->lock);
	route = pool->route;
	failures = pool->failures;
	ret = call(&attempt, most_ns, reply, error);
	pool->failures = failures;
	/* Back to the pool's own keys. */
	if (attempt.redirects) {
		drop(pool);
		pool->route = route;
	}
	pthread_mutex_unlock(&pool->lock);
	return ret;
}
