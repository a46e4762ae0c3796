/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The store of ranks that share a Redis: a hash for each scope, with a field for each message.
 *
 * A Redis may lose its data, or the latest of it in a failover. So each rank puts its own messages
 * again now and then. That costs no more than checking whether they are still there.
 *
 * All users of the Redis can write there, but only the ranks of the job know its secret. Rank 0
 * draws the secret when it opens its store. It puts it into a store of files in the checkpoint
 * directory, which only this user can read. Each message in the Redis begins with a MAC by that
 * secret. A message without a valid MAC is ignored.
 *
 * When a job starts again, its ranks may read the secret of the earlier run, until rank 0 has drawn
 * a new one. So a rank that finds a message with a wrong MAC looks for a new secret.
 */
#define _GNU_SOURCE
#include "group/store.h"

#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>

#define SECRET_SCOPE "redis"
#define SECRET_NAME "secret"
/* Bounds of the pause between two looks for the secret. */
#define FIRST_PAUSE_MS 5u
#define MOST_PAUSE_MS 250u
/* In large jobs the upper bound is ranks / RANKS_FOR_A_MS milliseconds, so that all ranks together
 * look no more often than a thousand ranks would. */
#define RANKS_FOR_A_MS 4u

struct redis_store {
	struct store base;
	struct slots_messages *hashes;
	struct store *secrets; /* store of files that has the secret */
	uint8_t secret[BASE_MAC_BYTES];
};

/* ---- The secret ------------------------------------------------------------------------------ */

/* Reads the secret. Returns -EAGAIN if it is not there yet. */
static int read_secret(struct redis_store *store, struct base_error *error)
{
	struct base_buffer message = { 0 };
	int ret = store_get(store->secrets, SECRET_SCOPE, SECRET_NAME, &message, error);

	if (!ret && message.bytes != sizeof(store->secret))
		ret = -EAGAIN;
	if (!ret)
		memcpy(store->secret, message.data, sizeof(store->secret));
	base_buffer_free(&message);
	return ret;
}

static int draw_secret(struct redis_store *store, struct base_error *error)
{
	if (getrandom(store->secret, sizeof(store->secret), 0) != sizeof(store->secret))
		return base_fail(error, -errno,
				 "cannot make a random secret for the ranks of a job");
	return store_put(store->secrets, SECRET_SCOPE, SECRET_NAME, store->secret,
			 sizeof(store->secret), error);
}

static int await_secret(struct redis_store *store, struct base_error *error)
{
	const struct store_config *config = &store->base.config;
	const uint64_t end_ns = base_now_ns() + base_ms_to_ns(config->deadline_ms);
	const uint32_t most_pause_ms = MAX(MOST_PAUSE_MS, config->ranks / RANKS_FOR_A_MS);
	struct base_error why;
	int ret;

	for (uint32_t pause_ms = FIRST_PAUSE_MS;; pause_ms = MIN(2 * pause_ms, most_pause_ms)) {
		why = (struct base_error){ 0 };
		ret = read_secret(store, &why);
		if (!ret)
			return 0;
		if (ret != -EAGAIN && ret != IOSHAPE_E_COORDINATOR)
			return base_propagate(error, &why);
		if (base_now_ns() >= end_ns)
			break;
		store_sleep_ns(base_ms_to_ns(pause_ms));
	}
	return base_fail_reason_with(
		error, -ETIMEDOUT,
		"check whether it failed, and whether all nodes share that directory",
		"rank 0 of the group has not written the secret for messages to \"%s\" within "
		"%" PRIu32 " s",
		config->directory, config->deadline_ms / 1000);
}

/* Opens the store of the secret. Rank 0 draws the secret; the other ranks wait until it has. */
static int open_secret(struct redis_store *store, struct base_error *error)
{
	const struct store_config *config = &store->base.config;
	const int ret = store_open(&store->secrets, &store_files, config, error);

	if (ret)
		return ret;
	return config->rank ? await_secret(store, error) : draw_secret(store, error);
}

/* Reads the secret again. If rank 0 has restarted and drawn a new one, puts this rank's messages
 * again, with MACs by that secret, and returns true. */
static bool learn_secret(struct redis_store *store)
{
	uint8_t before[sizeof(store->secret)];

	memcpy(before, store->secret, sizeof(before));
	if (!store->base.config.rank || !store->secrets || read_secret(store, NULL) ||
	    !memcmp(before, store->secret, sizeof(before)))
		return false;
	store_restore(&store->base);
	return true;
}

/* ---- Signing and checking messages ----------------------------------------------------------- */

/* Computes the MAC of a message. Its key depends on list and name, so that a message copied to
 * another name is not valid there. */
static void sign(const struct redis_store *store, const char *list, const char *name,
		 const void *message, size_t bytes, uint8_t mac[BASE_MAC_BYTES])
{
	char signed_name[SLOTS_MESSAGES_LIST_BYTES + STORE_NAME_BYTES];
	const int length = snprintf(signed_name, sizeof(signed_name), "%s %s", list, name);
	uint8_t key[BASE_MAC_BYTES];

	base_mac(key, store->secret, signed_name, (size_t)length);
	base_mac(mac, key, message, bytes);
}

/* Appends the MAC and the message, as the Redis gets them. Returns 0 or -ENOMEM. */
static int seal(const struct redis_store *store, const char *list, const char *name,
		const void *message, size_t bytes, struct base_buffer *sealed)
{
	uint8_t mac[BASE_MAC_BYTES];

	sign(store, list, name, message, bytes, mac);
	return base_buffer_append(sealed, mac, sizeof(mac)) ||
			       base_buffer_append(sealed, message, bytes) ?
		       -ENOMEM :
		       0;
}

/* Returns the message in bytes from the Redis, or NULL if its MAC is not valid under this name.
 * *bytes becomes the message's length. */
static const uint8_t *unseal(const struct redis_store *store, const char *list, const char *name,
			     const void *sealed, size_t *bytes)
{
	const uint8_t *mac = sealed, *message = mac + BASE_MAC_BYTES;
	uint8_t expected[BASE_MAC_BYTES], different = 0;

	if (*bytes < BASE_MAC_BYTES)
		return NULL;
	*bytes -= BASE_MAC_BYTES;
	sign(store, list, name, message, *bytes, expected);
	/* Takes constant time, wherever the MACs differ. */
	for (size_t i = 0; i < sizeof(expected); i++)
		different |= mac[i] ^ expected[i];
	return different ? NULL : message;
}

/* ---- Putting messages ------------------------------------------------------------------------ */

static void name_list(const struct redis_store *store, char list[SLOTS_MESSAGES_LIST_BYTES],
		      const char *scope)
{
	snprintf(list, SLOTS_MESSAGES_LIST_BYTES, "%s:%s", store->base.config.name, scope);
}

static int redis_put(struct store *base, const char *scope, const char *name, const void *message,
		     size_t bytes, struct base_error *error)
{
	struct redis_store *store = (struct redis_store *)base;
	char list[SLOTS_MESSAGES_LIST_BYTES];
	struct base_buffer sealed = { 0 };
	int ret;

	name_list(store, list, scope);
	if (seal(store, list, name, message, bytes, &sealed))
		ret = base_no_memory(error, "a message to other ranks", bytes);
	else
		ret = slots_messages_put(store->hashes, list, name, sealed.data, sealed.bytes,
					 error);
	base_buffer_free(&sealed);
	return ret;
}

static int redis_restore(struct store *base, const struct store_own *own)
{
	struct redis_store *store = (struct redis_store *)base;

	/* Put the secret again as well: rank 0 of an earlier run may have removed it when it
	 * ended. */
	if (!base->config.rank)
		store_wait(store->secrets, 0);
	return redis_put(base, own->scope, own->name, own->data, own->bytes, NULL);
}

/* ---- Getting messages ------------------------------------------------------------------------ */

/* The messages that one call asks for. */
struct question {
	struct redis_store *store;
	char list[SLOTS_MESSAGES_LIST_BYTES];
	const char *names[SLOTS_MESSAGES_AT_A_TIME];
	size_t count; /* number of names */
	struct base_buffer *message;
	bool has_found;
	bool has_strange; /* a message had a wrong MAC */

	const uint32_t *ranks; /* rank of each name, for collect() */
	store_found_fn *tell;
	void *user;
	struct base_error *error;
};

static int take_message(void *opaque, size_t index, const void *data, size_t bytes)
{
	struct question *question = opaque;
	struct base_buffer *message = question->message;

	data = unseal(question->store, question->list, question->names[index], data, &bytes);
	if (!data) {
		question->has_strange = true;
		return 0;
	}
	message->bytes = 0;
	if (base_buffer_append(message, data, bytes))
		return base_no_memory(question->error, "a message of another rank", bytes);
	question->has_found = true;
	return question->tell ? question->tell(question->user, question->ranks[index], message) : 0;
}

static int ask(struct question *question)
{
	return slots_messages_get(question->store->hashes, question->list, question->names,
				  question->count, take_message, question, question->error);
}

static int redis_get(struct store *base, const char *scope, const char *name,
		     struct base_buffer *message, struct base_error *error)
{
	struct question question = {
		.store = (struct redis_store *)base,
		.names = { name },
		.count = 1,
		.message = message,
		.error = error,
	};
	int ret;

	name_list(question.store, question.list, scope);
	ret = ask(&question);
	if (!ret && question.has_strange && learn_secret(question.store))
		ret = ask(&question);
	return ret || question.has_found ? ret : -EAGAIN;
}

static int collect_some(struct question *question, const char *prefix, const uint32_t *ranks,
			size_t count)
{
	char names[SLOTS_MESSAGES_AT_A_TIME][STORE_NAME_BYTES];

	for (size_t i = 0; i < count; i++) {
		store_name_of(names[i], prefix, ranks[i]);
		question->names[i] = names[i];
	}
	question->ranks = ranks;
	question->count = count;
	return ask(question);
}

static int redis_collect(struct store *base, const char *scope, const char *prefix,
			 const bool *have, store_found_fn *found, void *user,
			 struct base_error *error)
{
	uint32_t ranks[SLOTS_MESSAGES_AT_A_TIME];
	struct base_buffer message = { 0 };
	struct question question = {
		.store = (struct redis_store *)base,
		.message = &message,
		.tell = found,
		.user = user,
		.error = error,
	};
	size_t count = 0;
	int ret = 0;

	name_list(question.store, question.list, scope);
	for (uint32_t rank = 0; rank < base->config.ranks && !ret; rank++) {
		if (!have[rank])
			ranks[count++] = rank;
		if (count == ARRAY_LENGTH(ranks) || (count && rank + 1 == base->config.ranks)) {
			ret = collect_some(&question, prefix, ranks, count);
			count = 0;
		}
	}
	base_buffer_free(&message);
	return ret;
}

/* ---- Opening and closing --------------------------------------------------------------------- */

/* Drops a scope. If the Redis cannot be reached, its expiry removes the scope. */
static void redis_drop(struct store *base, const char *scope)
{
	struct redis_store *store = (struct redis_store *)base;
	char list[SLOTS_MESSAGES_LIST_BYTES];

	name_list(store, list, scope);
	slots_messages_remove(store->hashes, list, NULL);
}

/* Closes the store. Scopes that rank 0 has not dropped stay for a while, because other ranks may
 * still read them. */
static void redis_close(struct store *base)
{
	struct redis_store *store = (struct redis_store *)base;

	/* On rank 0 this removes the secret, so that no rank can read it any more. */
	store_close(store->secrets);
	explicit_bzero(store->secret, sizeof(store->secret));
	slots_messages_close(store->hashes);
}

/* Checks that the Redis answers, and that it permits reading what this rank will write. */
static int try_it(struct store *store, struct base_error *error)
{
	struct base_buffer message = { 0 };
	const int ret = redis_get(store, "open", "open", &message, error);

	base_buffer_free(&message);
	return ret == -EAGAIN ? 0 : ret;
}

static int redis_open(struct store **out, const struct store_config *config,
		      struct base_error *error)
{
	struct redis_store *store = store_new(sizeof(*store), &store_redis, config, error);
	int ret;

	if (!store)
		return -ENOMEM;
	*out = &store->base;
	ret = slots_messages_open(&store->hashes, config->coordinator, error);
	if (!ret)
		ret = try_it(&store->base, error);
	return ret ? ret : open_secret(store, error);
}

const struct store_ops store_redis = {
	.id = "redis",
	.wait_divisor = 1,
	.least_wait_ns = 5000000,
	.most_wait_ns = 250000000,
	.open = redis_open,
	.put = redis_put,
	.restore = redis_restore,
	.get = redis_get,
	.collect = redis_collect,
	.drop = redis_drop,
	.close = redis_close,
};
