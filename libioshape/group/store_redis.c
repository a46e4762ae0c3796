/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The store of ranks that share a Redis: a hash for each scope, with a field for each message.
 *
 * A Redis may lose its data, or, in a failover, the latest of it. So each rank puts its own
 * messages again now and then. That costs no more than to look whether they are still there.
 *
 * All users of the Redis can write there, but only the ranks of the job know its secret. Rank 0
 * draws it when it opens its store, and leaves it in the checkpoint directory, as a message in a
 * store of files: only this user can read that. Each message in the Redis begins with a MAC by that
 * secret. What no rank of the job has put there is no message.
 *
 * A job that starts again finds the secret of the life before, until its own rank 0 has drawn one.
 * So a rank that finds something that is not authentic looks for a new secret.
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
/* While rank 0 has not drawn it. */
#define FIRST_PAUSE_MS 5u
#define MOST_PAUSE_MS 250u
#define RANKS_FOR_A_MS 4u /* thousands of ranks look as often, together, as a thousand */

struct redis_store {
	struct store base;
	struct slots_notes *hashes;
	struct store *secrets; /* where the secret is; NULL: it is not known */
	uint8_t secret[BASE_MAC_BYTES];
};

/* ---- The secret ------------------------------------------------------------------------------ */

/* -EAGAIN: it is not there yet. */
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
		return base_fail(error, -errno, "cannot draw a secret for the ranks of a job");
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
			return base_pass_on(error, &why);
		if (base_now_ns() >= end_ns)
			break;
		store_sleep_ns(base_ms_to_ns(pause_ms));
	}
	return base_refuse_with(
		error, -ETIMEDOUT,
		"see whether it failed, and whether all nodes share that directory",
		"rank 0 of the group has not left the secret of its messages in \"%s\" "
		"within %" PRIu32 " s",
		config->directory, config->deadline_ms / 1000);
}

/* Rank 0 draws it; the others wait until it has. */
static int open_secret(struct redis_store *store, struct base_error *error)
{
	const struct store_config *config = &store->base.config;
	const int ret = store_open(&store->secrets, &store_files, config, error);

	if (ret)
		return ret;
	return config->rank ? await_secret(store, error) : draw_secret(store, error);
}

/* Whether rank 0 has begun a new life. Then what this rank has put is put again by its secret. */
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

/* ---- Sealed messages ------------------------------------------------------------------------- */

/* Each place has a key of its own, so that a message says nothing in the place of another one. */
static void sign(const struct redis_store *store, const char *list, const char *name,
		 const void *message, size_t bytes, uint8_t mac[BASE_MAC_BYTES])
{
	char place[SLOTS_NOTES_LIST_BYTES + STORE_NAME_BYTES];
	const int length = snprintf(place, sizeof(place), "%s %s", list, name);
	uint8_t key[BASE_MAC_BYTES];

	base_mac(key, store->secret, place, (size_t)length);
	base_mac(mac, key, message, bytes);
}

/* Appends the message as it goes to the Redis: 0 or -ENOMEM. */
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

/* The message in what came from the Redis; NULL if no rank of the job has put it in this place.
 * Changes `bytes` to the message's. */
static const uint8_t *unseal(const struct redis_store *store, const char *list, const char *name,
			     const void *sealed, size_t *bytes)
{
	const uint8_t *mac = sealed, *message = mac + BASE_MAC_BYTES;
	uint8_t expected[BASE_MAC_BYTES], different = 0;

	if (*bytes < BASE_MAC_BYTES)
		return NULL;
	*bytes -= BASE_MAC_BYTES;
	sign(store, list, name, message, *bytes, expected);
	/* In the same time wherever they differ. */
	for (size_t i = 0; i < sizeof(expected); i++)
		different |= mac[i] ^ expected[i];
	return different ? NULL : message;
}

/* ---- Putting --------------------------------------------------------------------------------- */

static void name_list(const struct redis_store *store, char list[SLOTS_NOTES_LIST_BYTES],
		      const char *scope)
{
	snprintf(list, SLOTS_NOTES_LIST_BYTES, "%s:%s", store->base.config.name, scope);
}

static int redis_put(struct store *base, const char *scope, const char *name, const void *message,
		     size_t bytes, struct base_error *error)
{
	struct redis_store *store = (struct redis_store *)base;
	char list[SLOTS_NOTES_LIST_BYTES];
	struct base_buffer sealed = { 0 };
	int ret;

	name_list(store, list, scope);
	if (seal(store, list, name, message, bytes, &sealed))
		ret = base_no_memory(error, "a message to other ranks", bytes);
	else
		ret = slots_notes_put(store->hashes, list, name, sealed.data, sealed.bytes, error);
	base_buffer_free(&sealed);
	return ret;
}

static int redis_restore(struct store *base, const struct store_own *own)
{
	struct redis_store *store = (struct redis_store *)base;

	/* Rank 0 of an earlier life may have taken the secret away as it ended. */
	if (!base->config.rank)
		store_wait(store->secrets, 0);
	return redis_put(base, own->scope, own->name, own->data, own->bytes, NULL);
}

/* ---- Looking --------------------------------------------------------------------------------- */

/* What is asked for in one call. */
struct question {
	struct redis_store *store;
	char list[SLOTS_NOTES_LIST_BYTES];
	const char *names[SLOTS_NOTES_AT_A_TIME];
	size_t count; /* of names */
	struct base_buffer *message;
	bool has_found;
	bool has_strange; /* something that no rank has put there, as far as the secret is known */

	const uint32_t *ranks; /* of the names, for collect() */
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
	store_saw(&question->store->base,
		  base_hash_text(question->list) ^
			  base_rotate(base_hash_text(question->names[index]), 1) ^
			  ((uint64_t)base_crc32(0, data, bytes) << 32 | bytes));
	return question->tell ? question->tell(question->user, question->ranks[index], message) : 0;
}

static int ask(struct question *question)
{
	return slots_notes_get(question->store->hashes, question->list, question->names,
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
	char names[SLOTS_NOTES_AT_A_TIME][STORE_NAME_BYTES];

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
	uint32_t ranks[SLOTS_NOTES_AT_A_TIME];
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

/* ---- Opening and ending ---------------------------------------------------------------------- */

/* If it cannot be said now, time removes them. */
static void redis_drop(struct store *base, const char *scope)
{
	struct redis_store *store = (struct redis_store *)base;
	char list[SLOTS_NOTES_LIST_BYTES];

	name_list(store, list, scope);
	slots_notes_remove(store->hashes, list, NULL);
}

/* Scopes that rank 0 has not dropped stay for a while: others may still read them. */
static void redis_close(struct store *base)
{
	struct redis_store *store = (struct redis_store *)base;

	/* Rank 0: no rank can read the secret any more. */
	store_close(store->secrets);
	explicit_bzero(store->secret, sizeof(store->secret));
	slots_notes_close(store->hashes);
}

/* Whether it answers, and lets us read what we are about to write. */
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
	ret = slots_notes_open(&store->hashes, config->coordinator, error);
	if (!ret)
		ret = try_it(&store->base, error);
	return ret ? ret : open_secret(store, error);
}

const struct store_ops store_redis = {
	.id = "redis",
	.wait_part = 1,
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
