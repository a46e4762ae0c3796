/* SPDX-License-Identifier: Apache-2.0 */
/* The coordinator that is a Redis: calls of the script that keeps the order (slots.lua). */
#define _GNU_SOURCE
#include "slots/redis.h"

#include "fs/fs.h"

#include <errno.h>
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
#define NAME_KEPT_MS (7ull * 24 * 3600 * 1000)

/* ---- Opening and closing --------------------------------------------------------------------- */

static int take_address(struct redis_pool *pool, struct base_error *error)
{
	struct slots_address *address = &pool->address;
	int ret = address_parse(address, pool->config.address, error);

	if (ret)
		return ret;
	if (address->tls && !link_has_tls())
		return base_refuse(error, -EINVAL,
				   "this library was built without TLS, so that rediss:// cannot "
				   "be used" BASE_REMEDY
				   "install hiredis 1.0 or newer with hiredis_ssl (Debian 13: "
				   "libhiredis-dev and libssl-dev) and build it again");
	/* One in the address wins. */
	if (address->has_password)
		pool->config.password_file = NULL;
	if (address->has_password || pool->config.password_file || !pool->config.password ||
	    !*pool->config.password)
		return 0;
	if (strlen(pool->config.password) >= sizeof(address->password))
		return base_refuse(error, -EINVAL,
				   "the coordinator's password is longer than %d bytes",
				   ADDRESS_SECRET_BYTES - 1);
	strcpy(address->password, pool->config.password);
	address->has_password = true;
	return 0;
}

/* Versions of the library whose scripts keep other data have a pool each. */
#define SCRIPT_FORMAT BASE_FORMAT(4u)

/* The braces of the keys' tag, above all, must not come from a name. */
static void name_keys(struct redis_pool *pool)
{
	for (char *at = pool->config.pool; *at; at++) {
		if (!strchr(FS_POOL_CHARACTERS, *at))
			*at = '_';
	}
	snprintf(pool->key, sizeof(pool->key), "{ios:%s}:v%u:m", pool->config.pool, SCRIPT_FORMAT);
	snprintf(pool->wake_key, sizeof(pool->wake_key), "{ios:%s}:v%u:w:%s", pool->config.pool,
		 SCRIPT_FORMAT, pool->config.identity.client);
}

static void redis_close(void *opaque)
{
	struct redis_pool *pool = opaque;

	link_close(pool->commands);
	link_close(pool->wake);
	if (pool->interruption >= 0)
		close(pool->interruption);
	pthread_mutex_destroy(&pool->lock);
	address_wipe(&pool->address);
	free(pool);
}

static int redis_open(void **out, const struct slots_config *config, struct base_error *error)
{
	struct redis_pool *pool = calloc(1, sizeof(*pool));
	int ret;

	*out = NULL;
	if (!pool)
		return base_no_memory(error, "a pool", sizeof(*pool));
	pthread_mutex_init(&pool->lock, NULL);
	pool->config = *config;
	pool->route.address = &pool->address;
	pool->interruption = base_above_streams(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
	ret = pool->interruption < 0 ? base_fail(error, -errno, "cannot make an eventfd") :
				       take_address(pool, error);
	if (ret) {
		redis_close(pool);
		return ret;
	}
	name_keys(pool);
	*out = pool;
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
	return __atomic_load_n(&pool->epoch, __ATOMIC_RELAXED);
}

static int not_understood(const struct redis_pool *pool, const char *operation,
			  struct base_error *error)
{
	return base_refuse(
		error, IOSHAPE_E_COORDINATOR,
		"the coordinator's answer to \"%s\" for pool %s cannot be understood" BASE_REMEDY
		"is it a Redis, and do all jobs use the same version of this library?",
		operation, pool->config.pool);
}

/* A call whose answer says where a request stands. */
static int ask_about(struct redis_pool *pool, const char *operation, struct link_command *command,
		     struct slots_answer *answer, struct base_error *error)
{
	redisReply *reply;
	int ret;

	ret = redis_call(pool, command, &reply, NULL, error);
	if (ret)
		return ret;
	ret = redis_read_answer(reply, answer);
	freeReplyObject(reply);
	if (ret)
		return not_understood(pool, operation, error);
	__atomic_store_n(&pool->epoch, answer->epoch, __ATOMIC_RELAXED);
	return 0;
}

static uint64_t wall_ms(void)
{
	struct timespec now;

	clock_gettime(CLOCK_REALTIME, &now);
	return (uint64_t)now.tv_sec * 1000 + (uint64_t)now.tv_nsec / 1000000;
}

static int add_name(struct redis_pool *pool, const char *score, bool only_raise, uint64_t most_ns,
		    struct base_error *error)
{
	struct link_command command = { 0 };
	redisReply *reply;
	int ret;

	link_add_texts(&command, "ZADD", REGISTRY);
	if (only_raise)
		link_add_text(&command, "GT");
	link_add_texts(&command, score, pool->config.pool);
	ret = redis_call_aside(pool, &command, most_ns, &reply, error);
	freeReplyObject(reply);
	return ret;
}

/* What an operator set keeps its score: +inf. */
static int write_name(struct redis_pool *pool, uint64_t most_ns)
{
	char score[24];

	snprintf(score, sizeof(score), "%llu", (unsigned long long)wall_ms());
	return add_name(pool, score, true, most_ns, NULL);
}

/* So that the operator sees it. Nothing depends on it, and no grant waits long for it. */
static void write_name_down(struct redis_pool *pool)
{
	const uint64_t now = base_now_ns();
	uint64_t due_ns = __atomic_load_n(&pool->name_due_ns, __ATOMIC_RELAXED);

	if (now < due_ns ||
	    !__atomic_compare_exchange_n(&pool->name_due_ns, &due_ns, now + NAME_FAILED_NS, false,
					 __ATOMIC_RELAXED, __ATOMIC_RELAXED))
		return;
	if (!write_name(pool, NAME_MOST_NS))
		__atomic_store_n(&pool->name_due_ns, now + NAMED_AGAIN_NS, __ATOMIC_RELAXED);
}

/* Where an operator set something, it is to be found as long as that holds. */
static void write_set_name_down(struct redis_pool *pool,
				const struct ioshape_pool_settings *settings)
{
	if (settings->capacity || settings->pool_bytes_per_s || settings->job_bytes_per_s ||
	    settings->small_bytes || settings->express)
		add_name(pool, "+inf", false, REDIS_CALL_NS, NULL);
	else if (settings->clear && !add_name(pool, "1", false, REDIS_CALL_NS, NULL))
		write_name(pool, REDIS_CALL_NS);
}

static int redis_acquire(void *opaque, const struct slots_request *request,
			 struct slots_answer *answer, struct base_error *error)
{
	struct redis_pool *pool = opaque;
	const struct slots_config *config = &pool->config;
	const struct slots_identity *identity = &config->identity;
	struct link_command command;
	char boost[16];
	int ret;

	snprintf(boost, sizeof(boost), "%d", request->boost_ms);
	redis_begin(pool, &command, "acquire", request->id, known_epoch(pool));
	link_add_texts(&command, identity->client, identity->node, identity->job);
	link_add_numbers(&command, identity->rank, MAX(identity->share, 1u), request->weight,
			 amount(request->bytes), config->asked_capacity,
			 request->default_capacity ? request->default_capacity :
						     config->default_capacity,
			 request->never_wait);
	link_add_text(&command, identity->user);
	link_add_numbers(&command, request->urgent);
	link_add_text(&command, boost);
	ret = ask_about(pool, "acquire", &command, answer, error);
	if (!ret)
		write_name_down(pool);
	return ret;
}

static int redis_beat(void *opaque, const struct slots_beat *beat, struct slots_answer *answer,
		      struct base_error *error)
{
	struct redis_pool *pool = opaque;
	const struct slots_identity *identity = &pool->config.identity;
	struct link_command command;

	/* The epoch that this slot is of: another slot of ours may have seen a newer one. */
	redis_begin(pool, &command, "beat", beat->id,
		    beat->holding ? beat->epoch : known_epoch(pool));
	link_add_numbers(&command, beat->ticket, amount(beat->passed), beat->holding, beat->fence,
			 beat->weight, amount(beat->bytes));
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

	redis_begin(pool, &command, "release", id, known_epoch(pool));
	link_add_numbers(&command, amount(passed));
	ret = redis_call(pool, &command, &reply, NULL, error);
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
	redis_begin(pool, &command, "pace", pool->config.identity.job, known_epoch(pool));
	link_add_text(&command, wanted);
	link_add_numbers(&command, amount(pool->config.rate));
	link_add_text(&command, pool->config.identity.user);
	ret = redis_call(pool, &command, &reply, NULL, error);
	if (ret)
		return ret;
	ret = bytes < 0 ? 0 : redis_read_grant(reply, grant);
	freeReplyObject(reply);
	return ret ? not_understood(pool, "pace", error) : 0;
}

/* ---- The operator's -------------------------------------------------------------------------- */

/* For one job or user. */
static int set_limit(struct redis_pool *pool, const struct ioshape_pool_settings *settings,
		     struct base_error *error)
{
	struct link_command command;
	redisReply *reply;
	uint64_t done;
	int ret;

	redis_begin(pool, &command, "limit", "", 0);
	link_add_numbers(&command, settings->clear != 0);
	link_add_texts(&command, settings->job ? "job" : "user",
		       settings->job ? settings->job : settings->user);
	link_add_numbers(&command, settings->share, amount(settings->job_bytes_per_s));
	ret = redis_call(pool, &command, &reply, NULL, error);
	if (ret)
		return ret;
	ret = redis_read_number(reply, &done);
	freeReplyObject(reply);
	if (ret)
		return not_understood(pool, "limit", error);
	if (!done)
		return base_refuse(error, -ENOSPC,
				   "pool %s has limits for %u jobs and users already" BASE_REMEDY
				   "clear one that is not needed",
				   pool->config.pool, SLOTS_LIMITS);
	if (!settings->clear)
		add_name(pool, "+inf", false, REDIS_CALL_NS, NULL);
	return 0;
}

static int redis_set(void *opaque, const struct ioshape_pool_settings *settings,
		     struct base_error *error)
{
	struct redis_pool *pool = opaque;
	struct link_command command;
	redisReply *reply;
	int ret;

	if (settings->job || settings->user)
		return set_limit(pool, settings, error);
	redis_begin(pool, &command, "set", "", 0);
	link_add_numbers(&command, settings->clear != 0, settings->capacity,
			 amount(settings->pool_bytes_per_s), amount(settings->job_bytes_per_s),
			 amount(settings->small_bytes), settings->express);
	ret = redis_call(pool, &command, &reply, NULL, error);
	freeReplyObject(reply);
	if (!ret)
		write_set_name_down(pool, settings);
	return ret;
}

static int redis_kick(void *opaque, const char *id, struct base_error *error)
{
	struct redis_pool *pool = opaque;
	struct link_command command;
	redisReply *reply;
	uint64_t found;
	bool repeated;
	int ret;

	redis_begin(pool, &command, "kick", id, 0);
	ret = redis_call(pool, &command, &reply, &repeated, error);
	if (ret)
		return ret;
	ret = redis_read_number(reply, &found);
	freeReplyObject(reply);
	if (ret)
		return not_understood(pool, "kick", error);
	/* The first of two calls may be the one that did it. */
	if (found || repeated)
		return 0;
	return base_refuse(error, -ENOENT, "nobody holds or waits for a slot of pool %s as %.40s",
			   pool->config.pool, id);
}

static int redis_status(void *opaque, struct ioshape_pool_status **status, struct base_error *error)
{
	struct redis_pool *pool = opaque;
	struct link_command command;
	redisReply *reply;
	int ret;

	*status = NULL;
	redis_begin(pool, &command, "status", "", 0);
	link_add_numbers(&command, pool->config.default_capacity);
	ret = redis_call(pool, &command, &reply, NULL, error);
	if (ret)
		return ret;
	ret = redis_read_status(reply, pool->config.pool, status, error);
	freeReplyObject(reply);
	return ret == -EPROTO ? not_understood(pool, "status", error) : ret;
}

static int list_names(struct redis_pool *pool, const char *from, const char *to, redisReply **reply,
		      struct base_error *error)
{
	struct link_command command = { 0 };
	int ret;

	link_add_texts(&command, "ZRANGEBYSCORE", REGISTRY, from, to);
	ret = redis_call_aside(pool, &command, REDIS_CALL_NS, reply, error);
	if (ret || (*reply)->type == REDIS_REPLY_ARRAY)
		return ret;
	freeReplyObject(*reply);
	*reply = NULL;
	return not_understood(pool, "names", error);
}

/* Pools that nobody used for a week. Who removes them makes no difference, nor whether. */
static void forget_old_names(struct redis_pool *pool, const char *cut)
{
	struct link_command command = { 0 };
	redisReply *old, *reply;

	if (list_names(pool, "-inf", cut, &old, NULL))
		return;
	link_add_texts(&command, "ZREM", REGISTRY);
	for (size_t i = 0; i < old->elements && command.count < LINK_MOST_ARGUMENTS; i++) {
		if (old->element[i]->type == REDIS_REPLY_STRING)
			link_add_bytes(&command, old->element[i]->str, old->element[i]->len);
	}
	if (command.count > 2 && !redis_call_aside(pool, &command, REDIS_CALL_NS, &reply, NULL))
		freeReplyObject(reply);
	freeReplyObject(old);
}

static int redis_names(void *opaque, struct base_buffer *names, struct base_error *error)
{
	struct redis_pool *pool = opaque;
	char cut[24], after_cut[32], name[SLOTS_NAME_BYTES];
	redisReply *reply;
	int ret;

	snprintf(cut, sizeof(cut), "%llu", (unsigned long long)(wall_ms() - NAME_KEPT_MS));
	snprintf(after_cut, sizeof(after_cut), "(%s", cut);
	ret = list_names(pool, after_cut, "+inf", &reply, error);
	if (ret)
		return ret;
	for (size_t i = 0; i < reply->elements && !ret; i++) {
		if (reply->element[i]->type != REDIS_REPLY_STRING)
			continue;
		link_words(reply->element[i], name, sizeof(name));
		ret = base_buffer_append(names, name, strlen(name));
		if (!ret)
			ret = base_buffer_append(names, "\n", 1);
	}
	freeReplyObject(reply);
	if (ret)
		return base_no_memory(error, "the names of pools", names->bytes);
	forget_old_names(pool, cut);
	return 0;
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
	.hurry = redis_hurry,
	.pace = redis_pace,
	.set = redis_set,
	.kick = redis_kick,
	.status = redis_status,
	.names = redis_names,
	.close = redis_close,
};
