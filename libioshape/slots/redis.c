/* SPDX-License-Identifier: Apache-2.0 */
/* The coordinator that is a Redis: calls of the script that keeps the order (slots.lua). */
#define _GNU_SOURCE
#include "slots/redis.h"

#include "fs/fs.h"

#include <errno.h>
#include <poll.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <time.h>
#include <unistd.h>

/* All pools' names, by when they were last in use (ms since 1970, by the clients' clocks). */
#define REGISTRY "{ios:}:pools"
#define NAMED_AGAIN_NS (3600ull * 1000000000)
#define NAME_FAILED_NS (60ull * 1000000000)
#define NAME_MOST_NS 250000000ull

/* The script's shortest time is 1 ms; nothing that it waits for is worth so many heartbeats. */
#define LEAST_BEAT_MS 20u

/* A pool kept by a Redis. */
struct redis_pool {
	struct redis_client client;
	char wake_key[REDIS_KEY_BYTES];
	_Atomic uint64_t epoch;       /* the latest that an answer told */
	_Atomic uint64_t name_due_ns; /* when the pool's name is to be written down */

	/* Of the thread that waits. */
	struct slots_link *wake; /* on which BLPOP is asked; NULL: none yet, lost, or at rest */
	bool asked;              /* BLPOP was sent, and its answer has not come */
	bool woken;              /* a wake may have been missed: the next wait() ends at once */
	bool told_refused;       /* that the server refuses BLPOP */
	uint64_t due_ns;         /* when that answer comes at the latest, if the server is well */
	int interruption;        /* an eventfd */
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

/* The script answers with lists of names and values. The server is not trusted to be the one that
 * it should be; names that are not read are ignored. */

/* Reads an integer, or a number as text, which Lua uses above 2^53 or where it was given text. */
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

/* Returns the value of a name, or NULL: there is none, or this is no list of names and values. */
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

/* Any client may have made it up: a number that is too large counts as the largest. */
static int take_small(const redisReply *reply, const char *name, uint32_t *number)
{
	uint64_t large = 0;
	int ret = take(reply, name, &large);

	*number = (uint32_t)MIN(large, UINT32_MAX);
	return ret;
}

/* Other clients chose the words. */
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

/* As the script can reckon with it. */
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
		"is it a Redis, and do all jobs use the same version of this library?",
		"the coordinator's answer to \"%s\" for pool %s cannot be understood", operation,
		pool->client.config.pool);
}

/* A call whose answer says where a request stands. */
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

static uint64_t wall_ms(void)
{
	struct timespec now;

	clock_gettime(CLOCK_REALTIME, &now);
	return (uint64_t)now.tv_sec * 1000 + (uint64_t)now.tv_nsec / 1000000;
}

/* What an operator set has the score +inf, and keeps it. */
static int write_name(struct redis_pool *pool)
{
	struct link_command command = { 0 };
	redisReply *reply;
	char score[24];
	int ret;

	snprintf(score, sizeof(score), "%llu", (unsigned long long)wall_ms());
	link_add_texts(&command, "ZADD", REGISTRY, "GT", score, pool->client.config.pool);
	ret = client_call_aside(&pool->client, &command, NAME_MOST_NS, &reply, NULL);
	freeReplyObject(reply);
	return ret;
}

/* So that the operator sees it. Nothing depends on it, and no grant waits long for it. */
static void write_name_down(struct redis_pool *pool)
{
	const uint64_t now = base_now_ns();
	uint64_t due_ns = atomic_load(&pool->name_due_ns);

	if (now < due_ns ||
	    !atomic_compare_exchange_strong(&pool->name_due_ns, &due_ns, now + NAME_FAILED_NS))
		return;
	if (!write_name(pool))
		atomic_store(&pool->name_due_ns, now + NAMED_AGAIN_NS);
}

static int redis_acquire(void *opaque, const struct slots_request *request,
			 struct slots_answer *answer, struct base_error *error)
{
	struct redis_pool *pool = opaque;
	const struct slots_config *config = &pool->client.config;
	const struct slots_identity *identity = &config->identity;
	struct link_command command;
	char boost[16];
	int ret;

	snprintf(boost, sizeof(boost), "%d", request->boost_ms);
	client_begin(&pool->client, &command, "acquire", request->id, known_epoch(pool));
	link_add_texts(&command, identity->client, identity->node, identity->job);
	link_add_numbers(&command, identity->rank, MAX(identity->share, 1u), request->weight,
			 amount(request->bytes), config->asked_capacity,
			 request->default_capacity ? request->default_capacity :
						     config->default_capacity,
			 request->never_wait);
	link_add_texts(&command, identity->user);
	link_add_numbers(&command, request->urgent);
	link_add_texts(&command, boost);
	ret = ask_about(pool, "acquire", &command, answer, error);
	if (!ret)
		write_name_down(pool);
	return ret;
}

static int redis_beat(void *opaque, const struct slots_beat *beat, struct slots_answer *answer,
		      struct base_error *error)
{
	struct redis_pool *pool = opaque;
	const struct slots_identity *identity = &pool->client.config.identity;
	struct link_command command;

	/* The epoch that this slot is of: another slot of ours may have seen a newer one. */
	client_begin(&pool->client, &command, "beat", beat->id,
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

	client_begin(&pool->client, &command, "release", id, known_epoch(pool));
	link_add_numbers(&command, amount(passed));
	ret = client_call(&pool->client, &command, &reply, error);
	freeReplyObject(reply);
	return ret;
}

/* If the answer was lost and the call repeated, what the first one granted is lost as well: the
 * writers are slower for a moment. */
static int redis_pace(void *opaque, int64_t bytes, struct slots_grant *grant,
		      struct base_error *error)
{
	struct redis_pool *pool = opaque;
	struct link_command command;
	char wanted[24];
	redisReply *reply;
	int ret;

	memset(grant, 0, sizeof(*grant));
	snprintf(wanted, sizeof(wanted), "%lld", (long long)MIN(bytes, (int64_t)SLOTS_MOST_BYTES));
	client_begin(&pool->client, &command, "pace", pool->client.config.identity.job,
		     known_epoch(pool));
	link_add_texts(&command, wanted);
	link_add_numbers(&command, amount(pool->client.config.rate));
	link_add_texts(&command, pool->client.config.identity.user);
	ret = client_call(&pool->client, &command, &reply, error);
	if (ret)
		return ret;
	ret = bytes < 0 ? 0 : read_grant(reply, grant);
	freeReplyObject(reply);
	return ret ? not_understood(pool, "pace", error) : 0;
}

/* ---- Waiting --------------------------------------------------------------------------------- */

/*
 * Waiting for a wake: BLPOP on this client's own list, on a connection that does nothing else. A
 * BLPOP that is interrupted stays asked: the next wait() continues with it.
 *
 * No wake is lost. What the server pushes stays in the list until a BLPOP takes it. What a BLPOP
 * took is read by this wait() or by the next one. If a connection breaks with a BLPOP asked, wait()
 * fails, and heartbeats tell. A failure to wait is no sign that the coordinator is unreachable: it
 * may refuse BLPOP and nothing else, and then heartbeats alone tell of a grant.
 */

/* An answer to BLPOP that is so late will not come. */
#define DEAD_NS 2000000000ull
/* The server ends a BLPOP up to this much late: it looks for expired ones ten times a second. */
#define LATE_NS 150000000ull

static void redis_interrupt(void *opaque)
{
	struct redis_pool *pool = opaque;
	const uint64_t one = 1;

	/* It fails only where it is full of interruptions already. */
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

/* A server that keeps connections for 100,000 processes which save twice an hour needs most of its
 * memory for that. The next call connects again. */
static void redis_rest(void *opaque)
{
	struct redis_pool *pool = opaque;

	pool->woken |= pool->asked;
	drop_wake(pool);
	client_rest(&pool->client);
}

static int ask_to_be_woken(struct redis_pool *pool, uint64_t until_ns, struct base_error *error)
{
	/* 0 would be for ever. */
	const uint64_t left_ms = MAX((uint64_t)link_time_left_ms(until_ns), 1u);
	struct link_command command = { 0 };
	char seconds[32];

	snprintf(seconds, sizeof(seconds), "%llu.%03u", (unsigned long long)(left_ms / 1000),
		 (unsigned)(left_ms % 1000));
	link_add_texts(&command, "BLPOP", pool->wake_key, seconds);
	pool->asked = true;
	pool->due_ns = base_now_ns() + base_ms_to_ns(left_ms);
	return link_send(pool->wake, &command, client_call_end(&pool->client), error);
}

/* Says once that nothing but BLPOP is refused, and by which server. */
static void tell_refused(struct redis_pool *pool, const struct base_error *error)
{
	if (!pool->told_refused)
		base_log(&pool->client.config.log, IOSHAPE_LOG_WARNING,
			 "processes cannot be woken in pool \"%s\", so that slots come seconds "
			 "later than they could: %s",
			 pool->client.config.pool, error->text);
	pool->told_refused = true;
}

/* Takes an answer to BLPOP. 1: a wake; 0: none, ask again; or a negative code. */
static int take_wake(struct redis_pool *pool, struct base_error *error)
{
	enum client_sequel sequel;
	redisReply *reply;
	bool asking;
	int ret = link_take(pool->wake, &reply, error);

	if (ret || !reply)
		return ret;
	pool->asked = false;
	if (reply->type != REDIS_REPLY_ERROR) {
		ret = reply->type != REDIS_REPLY_NIL;
	} else {
		sequel = client_take_error(&pool->client, pool->wake, reply, &asking, error);
		if (sequel == CLIENT_REFUSED)
			tell_refused(pool, error);
		if (sequel != CLIENT_REFUSED)
			drop_wake(pool);
		ret = sequel == CLIENT_REDIRECTED ? 0 : -EACCES;
	}
	freeReplyObject(reply);
	return ret;
}

/* An answer that is due about at the end is waited for. */
static uint64_t last_moment(const struct redis_pool *pool, uint64_t until_ns)
{
	return pool->asked && pool->due_ns <= until_ns + LATE_NS ? until_ns + LATE_NS : until_ns;
}

/* Waits for an answer to BLPOP once. As take_wake(). */
static int wait_once(struct redis_pool *pool, uint64_t until_ns, struct base_error *error)
{
	const uint64_t dead_ns = pool->due_ns + DEAD_NS;
	struct pollfd ready[] = {
		{ .fd = pool->wake->context->fd, .events = POLLIN },
		{ .fd = pool->interruption, .events = POLLIN },
	};

	if (poll(ready, ARRAY_LENGTH(ready), link_time_left_ms(MIN(until_ns, dead_ns))) < 0)
		return 0; /* a signal, or no memory: the loop has its end */
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
			ret = client_connect(&pool->client, &pool->wake, &why);
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
	/* After a refusal the connection is as good as before. */
	if (ret != -EACCES)
		drop_wake(pool);
	why.code = IOSHAPE_E_COORDINATOR;
	return base_pass_on(error, &why);
}

/* ---- For the operator's calls in Python ------------------------------------------------------ */

static int redis_describe(const struct slots_config *config, struct slots_coordinator *found,
			  struct base_error *error)
{
	struct redis_client client;
	int ret = client_open(&client, config, error);

	if (!ret)
		ret = client_read_password(&client, error);
	found->id = slots_redis.id;
	found->registry = REGISTRY;
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
