/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Message stores of all kinds, for tests: functions that open them and functions that must succeed.
 */
#ifndef TESTS_SUPPORT_STORE_CASE_H
#define TESTS_SUPPORT_STORE_CASE_H

#include "group/store.h"
#include "support/must.h"
#include "support/redis_server.h"
#include "support/scratch.h"

#include <stdlib.h>
#include <unistd.h>

#define STORE_CASE_PATIENCE_MS 10000

static const struct store_ops *const store_case_kinds[] = {
	&store_memory,
	&store_files,
	&store_redis,
};

struct store_case {
	const struct store_ops *ops;
	uint32_t ranks;
	char name[32];
	const char *memory; /* shared-memory folder of the store of one host; NULL: the default */
	char address[128];
	struct slots_config coordinator;
	struct redis_server server;
};

static inline bool store_case_is(const struct store_case *stores, const char *id)
{
	return !strcmp(stores->ops->id, id);
}

static inline void store_case_begin(struct store_case *stores, int kind, uint32_t ranks)
{
	memset(stores, 0, sizeof(*stores));
	stores->ops = store_case_kinds[kind];
	stores->ranks = ranks;
	snprintf(stores->name, sizeof(stores->name), "%x%llx", (unsigned)getpid(),
		 (unsigned long long)base_now_ns());
	stores->coordinator = (struct slots_config){ .pool = "scratch", .lease_ms = 15000 };
	if (!store_case_is(stores, "redis"))
		return;
	redis_server_init(&stores->server);
	redis_server_start(&stores->server);
	snprintf(stores->address, sizeof(stores->address), "unix://%s", stores->server.socket);
	stores->coordinator.address = stores->address;
}

static inline void store_case_end(struct store_case *stores)
{
	if (store_case_is(stores, "redis"))
		redis_server_free(&stores->server);
}

static inline int store_case_try(const struct store_case *stores, uint32_t rank,
				 uint32_t deadline_ms, struct store **store,
				 struct base_error *error)
{
	const struct store_config config = {
		.name = stores->name,
		.rank = rank,
		.ranks = stores->ranks,
		.directory = scratch_directory(),
		.coordinator = &stores->coordinator,
		.deadline_ms = deadline_ms,
		.memory = stores->memory,
	};

	return store_open(store, stores->ops, &config, error);
}

static inline struct store *store_case_open(const struct store_case *stores, uint32_t rank)
{
	const uint64_t end = base_now_ns() + base_ms_to_ns(STORE_CASE_PATIENCE_MS);
	struct base_error error;
	struct store *store;
	int ret;

	/* In a host's memory ranks open the store after rank 0, as they know from their meeting. */
	do {
		error = (struct base_error){ 0 };
		ret = store_case_try(stores, rank, STORE_CASE_PATIENCE_MS, &store, &error);
	} while (ret == -ETIMEDOUT && base_now_ns() < end && !usleep(1000));
	MUST(!ret, "%s", error.text);
	return store;
}

static inline void store_case_put(struct store *store, const char *scope, const char *name,
				  const void *note, size_t bytes)
{
	struct base_error error = { 0 };

	MUST(!store_put(store, scope, name, note, bytes, &error), "%s", error.text);
}

static inline bool store_case_look(struct store *store, const char *scope, const char *name,
				   struct base_buffer *note)
{
	struct base_error error = { 0 };
	const int ret = store_get(store, scope, name, note, &error);

	MUST(!ret || ret == -EAGAIN, "%s", error.text);
	MUST(!error.code, "a sentence for a note that is not there: %s", error.text);
	return !ret;
}

/* Waits until the message exists and has this text. */
static inline void store_case_expect(struct store *store, const char *scope, const char *name,
				     const void *text, size_t bytes)
{
	const uint64_t end = base_now_ns() + base_ms_to_ns(STORE_CASE_PATIENCE_MS);
	struct base_buffer note = { 0 };

	while (!store_case_look(store, scope, name, &note) || note.bytes != bytes ||
	       (bytes && memcmp(note.data, text, bytes) != 0)) {
		MUST(base_now_ns() < end, "no such note: %s-%s", scope, name);
		store_wait(store, 500);
	}
	base_buffer_free(&note);
}

/* State of store_case_count(), which counts messages whose text is "note of RANK". */
struct store_case_found {
	bool *have;
	uint32_t count, calls;
};

static inline int store_case_count(void *user, uint32_t rank, const struct base_buffer *note)
{
	struct store_case_found *found = user;
	char text[32];

	found->calls++;
	snprintf(text, sizeof(text), "note of %u", rank);
	if (note->bytes == strlen(text) && !memcmp(note->data, text, note->bytes)) {
		found->count++;
		found->have[rank] = true;
	}
	return 0;
}

static inline void store_case_put_own(struct store *store, const char *scope, const char *prefix,
				      uint32_t rank)
{
	char name[STORE_NAME_BYTES], text[32];

	snprintf(name, sizeof(name), "%s-%u", prefix, rank);
	snprintf(text, sizeof(text), "note of %u", rank);
	store_case_put(store, scope, name, text, strlen(text));
}

/* Waits until the messages of `count` ranks have been collected, each once. */
static inline void store_case_collect(struct store *store, const char *scope, const char *prefix,
				      uint32_t count)
{
	const uint64_t end = base_now_ns() + base_ms_to_ns(STORE_CASE_PATIENCE_MS);
	bool *have = calloc(store->config.ranks, sizeof(bool));
	struct store_case_found found = { .have = have };
	struct base_error error = { 0 };

	for (;;) {
		MUST(!store_collect(store, scope, prefix, have, store_case_count, &found, &error),
		     "%s", error.text);
		if (found.count >= count)
			break;
		MUST(base_now_ns() < end, "only %u of %u notes", found.count, count);
		store_wait(store, 500);
	}
	MUST(found.count == count && found.calls == count, "notes came twice");
	free(have);
}

#endif
