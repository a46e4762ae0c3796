/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The code that all kinds of stores share. It checks callers and names. It keeps this rank's own
 * messages, to put them again if the medium loses them. And it sleeps between two looks.
 */
#define _GNU_SOURCE
#include "group/store.h"

#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#define MOST_RANK_DIGITS 10u /* decimal digits of a 32-bit rank */

/* Limits of what one rank has put and not dropped. */
#define MOST_OWN_MESSAGES 4096u
#define MOST_OWN_BYTES (256 * MIB)

/* Interval between two checks for lost messages: a millisecond for each rank, within these bounds.
 * So all ranks together check no more often than a thousand ranks would. */
#define LEAST_RESTORE_MS 1000u
#define MOST_RESTORE_MS 5000u

/* A rank sleeps RESTS times as long as it looked at the others, so it looks for a quarter of its
 * time at most. */
#define RESTS 3u

/* ---- Checks of callers and names ------------------------------------------------------------- */

static bool is_ours(const struct store *store)
{
	return store->pid == getpid();
}

static bool is_name(const char *name)
{
	const size_t length = strspn(name, "abcdefghijklmnopqrstuvwxyz0123456789-");

	return length && !name[length] && length < STORE_NAME_BYTES;
}

/* Checks a name. The error message does not show it, because it may contain anything. */
static int check_name(const char *what, const char *name, struct base_error *error)
{
	if (is_name(name))
		return 0;
	return base_fail_reason(error, -EINVAL,
				"a store's %s must have 1 to %d characters of a-z, 0-9 and \"-\"",
				what, STORE_NAME_BYTES - 1);
}

static int check_call(const struct store *store, const char *scope, const char *name,
		      struct base_error *error)
{
	int ret;

	if (!is_ours(store))
		return base_fail_reason_with(error, -EPERM, "open one in the child",
					     "this group was opened before fork()");
	ret = check_name("scope", scope, error);
	return ret ? ret : check_name("message", name, error);
}

/* Writes the name of a rank's message. It always fits, because store_collect() has checked the
 * prefix. */
void store_name_of(char name[STORE_NAME_BYTES], const char *prefix, uint32_t rank)
{
	snprintf(name, STORE_NAME_BYTES, "%.52s-%" PRIu32, prefix, rank);
}

/* ---- This rank's own messages ---------------------------------------------------------------- */

/* Returns the bytes that a message counts. Its entry counts, too, so that empty messages are not
 * free. */
static uint64_t cost(size_t bytes)
{
	return bytes + sizeof(struct store_own);
}

static void forget(struct store *store, struct store_own **at)
{
	struct store_own *own = *at;

	*at = own->next;
	store->own_bytes -= cost(own->bytes);
	store->own_count--;
	free(own);
}

/* Forgets the messages of a scope; NULL: all messages. */
static void forget_all(struct store *store, const char *scope)
{
	struct store_own **at = &store->own;

	while (*at) {
		if (scope && strcmp((*at)->scope, scope) != 0)
			at = &(*at)->next;
		else
			forget(store, at);
	}
}

/* Keeps a copy of a message. It replaces an earlier one of its name. */
static int keep(struct store *store, const char *scope, const char *name, const void *message,
		size_t bytes, struct base_error *error)
{
	struct store_own *own, **at = &store->own;

	if (store->own_bytes + cost(bytes) > MOST_OWN_BYTES ||
	    store->own_count >= MOST_OWN_MESSAGES)
		return base_fail_reason(
			error, -E2BIG,
			"this rank has more than %u messages to other ranks, or more "
			"than %llu bytes of them",
			MOST_OWN_MESSAGES, MOST_OWN_BYTES);
	own = malloc(sizeof(*own) + bytes);
	if (!own)
		return base_no_memory(error, "a message to other ranks", bytes);
	strcpy(own->scope, scope);
	strcpy(own->name, name);
	own->bytes = bytes;
	if (bytes)
		memcpy(own->data, message, bytes);
	while (*at && (strcmp((*at)->name, name) != 0 || strcmp((*at)->scope, scope) != 0))
		at = &(*at)->next;
	if (*at)
		forget(store, at);
	own->next = *at;
	*at = own;
	store->own_bytes += cost(bytes);
	store->own_count++;
	return 0;
}

static uint32_t least_restore_ms(const struct store *store)
{
	return MIN(MAX(LEAST_RESTORE_MS, store->config.ranks), MOST_RESTORE_MS);
}

static void restore_if_due(struct store *store)
{
	if (base_now_ns() >= store->restore_ns)
		store_restore(store);
}

void store_restore(struct store *store)
{
	int ret = 0;

	store->restore_ms = MIN(2 * store->restore_ms, MOST_RESTORE_MS);
	store->restore_ns = base_now_ns() + base_ms_to_ns(store->restore_ms);
	for (const struct store_own *own = store->own; own && !ret; own = own->next)
		ret = store->ops->restore(store, own);
}

/* ---- Opening and closing --------------------------------------------------------------------- */

void *store_new(size_t bytes, const struct store_ops *ops, const struct store_config *config,
		struct base_error *error)
{
	struct store *store = calloc(1, bytes);

	if (!store) {
		base_no_memory(error, "a store of messages", bytes);
		return NULL;
	}
	*store = (struct store){
		.ops = ops, .config = *config, .pid = getpid(), .news_ns = base_now_ns()
	};
	store->restore_ms = least_restore_ms(store);
	store->restore_ns = store->news_ns + base_ms_to_ns(store->restore_ms);
	return store;
}

int store_open(struct store **out, const struct store_ops *ops, const struct store_config *config,
	       struct base_error *error)
{
	int ret = check_name("name", config->name, error);

	*out = NULL;
	if (!ret && config->rank >= config->ranks)
		ret = base_fail_reason(error, -EINVAL,
				       "rank %" PRIu32 " is out of range: there are %" PRIu32
				       " ranks",
				       config->rank, config->ranks);
	if (!ret)
		ret = ops->open(out, config, error);
	if (ret && *out) {
		store_close(*out);
		*out = NULL;
	}
	return ret;
}

void store_close(struct store *store)
{
	if (!store || !is_ours(store))
		return;
	store->ops->close(store);
	forget_all(store, NULL);
	free(store);
}

/* ---- Putting and getting messages ------------------------------------------------------------ */

int store_put(struct store *store, const char *scope, const char *name, const void *message,
	      size_t bytes, struct base_error *error)
{
	int ret = check_call(store, scope, name, error);

	if (!ret && bytes > STORE_MAX_MESSAGE_BYTES)
		ret = base_fail_reason_with(
			error, -E2BIG,
			BASE_WORDS("a store takes messages of up to %llu", STORE_MAX_MESSAGE_BYTES),
			"message %s-%s has %zu bytes", scope, name, bytes);
	if (!ret)
		ret = keep(store, scope, name, message, bytes, error);
	if (ret)
		return ret;
	/* Answers may come soon. The next check for lost messages comes earlier for the new
	 * message, but never later, because heartbeats are put all the time. */
	store->news_ns = base_now_ns();
	store->restore_ms = least_restore_ms(store);
	store->restore_ns =
		MIN(store->restore_ns, store->news_ns + base_ms_to_ns(store->restore_ms));
	ret = store->ops->put(store, scope, name, message, bytes, error);
	/* Check here as well: a rank that writes for long puts messages, but does not wait. */
	if (!ret)
		restore_if_due(store);
	return ret;
}

int store_get(struct store *store, const char *scope, const char *name, struct base_buffer *message,
	      struct base_error *error)
{
	int ret = check_call(store, scope, name, error);

	return ret ? ret : store->ops->get(store, scope, name, message, error);
}

int store_collect(struct store *store, const char *scope, const char *prefix, const bool *have,
		  store_found_fn *found, void *user, struct base_error *error)
{
	const uint64_t begin_ns = base_now_ns();
	int ret = check_call(store, scope, prefix, error);

	if (!ret && strlen(prefix) + 1 + MOST_RANK_DIGITS >= STORE_NAME_BYTES)
		ret = base_fail_reason(error, -EINVAL,
				       "the prefix \"%s\" of message names is too long", prefix);
	if (!ret)
		ret = store->ops->collect(store, scope, prefix, have, found, user, error);
	store->looking_ns += base_now_ns() - begin_ns;
	return ret;
}

void store_drop(struct store *store, const char *scope)
{
	if (!is_ours(store) || !is_name(scope))
		return;
	forget_all(store, scope);
	if (!store->config.rank)
		store->ops->drop(store, scope);
}

bool store_has_ended(struct store *store, uint32_t rank)
{
	const uint64_t begin_ns = base_now_ns();
	bool ended;

	if (!is_ours(store) || rank >= store->config.ranks || !store->ops->has_ended)
		return false;
	ended = store->ops->has_ended(store, rank);
	store->looking_ns += base_now_ns() - begin_ns;
	return ended;
}

/* ---- Waiting --------------------------------------------------------------------------------- */

void store_sleep_ns(uint64_t ns)
{
	struct timespec left = { .tv_sec = (time_t)(ns / 1000000000),
				 .tv_nsec = (long)(ns % 1000000000) };

	while (nanosleep(&left, &left) && errno == EINTR)
		;
}

void store_has_news(struct store *store)
{
	store->news_ns = base_now_ns();
}

/*
 * Sleeps until the next look, because no medium wakes a rank. The longer there has been no news,
 * the longer it sleeps. So a message is noticed late by no more than a fraction of the time that
 * the rank has waited.
 */
void store_wait(struct store *store, uint32_t timeout_ms)
{
	const struct store_ops *ops = store->ops;
	uint64_t wait_ns = (base_now_ns() - store->news_ns) / ops->wait_divisor;

	wait_ns = MAX(wait_ns, MAX(ops->least_wait_ns, RESTS * store->looking_ns));
	store_sleep_ns(MIN(MIN(wait_ns, ops->most_wait_ns), base_ms_to_ns(timeout_ms)));
	if (!is_ours(store))
		return;
	store->looking_ns = 0;
	restore_if_due(store);
}
