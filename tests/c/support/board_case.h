/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Message stores of all kinds, for tests: functions that open them and functions that must succeed.
 */
#ifndef TESTS_SUPPORT_BOARD_CASE_H
#define TESTS_SUPPORT_BOARD_CASE_H

#include "group/store.h"
#include "support/must.h"
#include "support/redis_server.h"
#include "support/scratch.h"

#include <stdlib.h>
#include <unistd.h>

#define BOARD_CASE_PATIENCE_MS 10000

static const struct store_ops *const board_case_kinds[] = {
	&store_memory,
	&store_files,
	&store_redis,
};

struct board_case {
	const struct store_ops *ops;
	uint32_t ranks;
	char name[32];
	const char *memory; /* shared-memory folder of the store of one host; NULL: the default */
	char address[128];
	struct slots_config coordinator;
	struct redis_server server;
};

static inline bool board_case_is(const struct board_case *boards, const char *id)
{
	return !strcmp(boards->ops->id, id);
}

static inline void board_case_begin(struct board_case *boards, int kind, uint32_t ranks)
{
	memset(boards, 0, sizeof(*boards));
	boards->ops = board_case_kinds[kind];
	boards->ranks = ranks;
	snprintf(boards->name, sizeof(boards->name), "%x%llx", (unsigned)getpid(),
		 (unsigned long long)base_now_ns());
	boards->coordinator = (struct slots_config){ .pool = "scratch", .lease_ms = 15000 };
	if (!board_case_is(boards, "redis"))
		return;
	redis_server_init(&boards->server);
	redis_server_start(&boards->server);
	snprintf(boards->address, sizeof(boards->address), "unix://%s", boards->server.socket);
	boards->coordinator.address = boards->address;
}

static inline void board_case_end(struct board_case *boards)
{
	if (board_case_is(boards, "redis"))
		redis_server_free(&boards->server);
}

static inline int board_case_try(const struct board_case *boards, uint32_t rank,
				 uint32_t deadline_ms, struct store **board,
				 struct base_error *error)
{
	const struct store_config config = {
		.name = boards->name,
		.rank = rank,
		.ranks = boards->ranks,
		.directory = scratch_directory(),
		.coordinator = &boards->coordinator,
		.deadline_ms = deadline_ms,
		.memory = boards->memory,
	};

	return store_open(board, boards->ops, &config, error);
}

static inline struct store *board_case_open(const struct board_case *boards, uint32_t rank)
{
	const uint64_t end = base_now_ns() + base_ms_to_ns(BOARD_CASE_PATIENCE_MS);
	struct base_error error;
	struct store *board;
	int ret;

	/* In a host's memory ranks open the store after rank 0, as they know from their meeting. */
	do {
		error = (struct base_error){ 0 };
		ret = board_case_try(boards, rank, BOARD_CASE_PATIENCE_MS, &board, &error);
	} while (ret == -ETIMEDOUT && base_now_ns() < end && !usleep(1000));
	MUST(!ret, "%s", error.text);
	return board;
}

static inline void board_case_post(struct store *board, const char *scope, const char *name,
				   const void *note, size_t bytes)
{
	struct base_error error = { 0 };

	MUST(!store_put(board, scope, name, note, bytes, &error), "%s", error.text);
}

static inline bool board_case_look(struct store *board, const char *scope, const char *name,
				   struct base_buffer *note)
{
	struct base_error error = { 0 };
	const int ret = store_get(board, scope, name, note, &error);

	MUST(!ret || ret == -EAGAIN, "%s", error.text);
	MUST(!error.code, "a sentence for a note that is not there: %s", error.text);
	return !ret;
}

/* Waits until the message exists and has this text. */
static inline void board_case_expect(struct store *board, const char *scope, const char *name,
				     const void *text, size_t bytes)
{
	const uint64_t end = base_now_ns() + base_ms_to_ns(BOARD_CASE_PATIENCE_MS);
	struct base_buffer note = { 0 };

	while (!board_case_look(board, scope, name, &note) || note.bytes != bytes ||
	       (bytes && memcmp(note.data, text, bytes) != 0)) {
		MUST(base_now_ns() < end, "no such note: %s-%s", scope, name);
		store_wait(board, 500);
	}
	base_buffer_free(&note);
}

/* State of board_case_count(), which counts messages whose text is "note of RANK". */
struct board_case_found {
	bool *have;
	uint32_t count, calls;
};

static inline int board_case_count(void *user, uint32_t rank, const struct base_buffer *note)
{
	struct board_case_found *found = user;
	char text[32];

	found->calls++;
	snprintf(text, sizeof(text), "note of %u", rank);
	if (note->bytes == strlen(text) && !memcmp(note->data, text, note->bytes)) {
		found->count++;
		found->have[rank] = true;
	}
	return 0;
}

static inline void board_case_post_own(struct store *board, const char *scope, const char *prefix,
				       uint32_t rank)
{
	char name[STORE_NAME_BYTES], text[32];

	snprintf(name, sizeof(name), "%s-%u", prefix, rank);
	snprintf(text, sizeof(text), "note of %u", rank);
	board_case_post(board, scope, name, text, strlen(text));
}

/* Waits until the messages of `count` ranks have been collected, each once. */
static inline void board_case_collect(struct store *board, const char *scope, const char *prefix,
				      uint32_t count)
{
	const uint64_t end = base_now_ns() + base_ms_to_ns(BOARD_CASE_PATIENCE_MS);
	bool *have = calloc(board->config.ranks, sizeof(bool));
	struct board_case_found found = { .have = have };
	struct base_error error = { 0 };

	for (;;) {
		MUST(!store_collect(board, scope, prefix, have, board_case_count, &found, &error),
		     "%s", error.text);
		if (found.count >= count)
			break;
		MUST(base_now_ns() < end, "only %u of %u notes", found.count, count);
		store_wait(board, 500);
	}
	MUST(found.count == count && found.calls == count, "notes came twice");
	free(have);
}

#endif
