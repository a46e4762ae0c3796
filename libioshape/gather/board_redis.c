/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The board of ranks that share a Redis: a hash for each scope, with a field for each note.
 *
 * A Redis may lose its data, or, in a failover, the latest of it, and other users can change it. So
 * each rank looks now and then whether its own notes are still there, as they were, and posts again
 * those that are not. Notes that no rank of the job has put there (board_secret.c) are none.
 */
#define _GNU_SOURCE
#include "gather/board.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define MOST_PAUSE_MS 250u
#define RANKS_FOR_A_MS 4u    /* with thousands of ranks, pauses grow: together they ask as often */
#define MOST_CHECK_BYTES MIB /* that are read again at a time, unless one note has more */
#define RENEWED_AFTER_NS (SLOTS_NOTES_KEPT_MS / 6 * UINT64_C(1000000))

/* One that we have posted in, and not dropped. */
struct redis_scope {
	struct redis_scope *next;
	char name[GATHER_NAME_BYTES];
	uint64_t renewed_ns;
};

struct redis_board {
	struct gather_board base;
	struct slots_notes *notes;
	struct board_secret secret;
	struct board_own own;
	struct redis_scope *scopes;
};

static void name_list(const struct redis_board *board, char list[SLOTS_NOTES_LIST_BYTES],
		      const char *scope)
{
	snprintf(list, SLOTS_NOTES_LIST_BYTES, "%s:%s", board->base.config.name, scope);
}

/* ---- Our own notes --------------------------------------------------------------------------- */

/* A list that was not there before would stay for ever. */
static int put(struct redis_board *board, struct redis_scope *scope, const char *name,
	       const void *bytes, size_t count, struct base_error *error)
{
	char list[SLOTS_NOTES_LIST_BYTES];
	struct base_buffer sealed = { 0 };
	int ret;

	name_list(board, list, scope->name);
	if (board_secret_seal(&board->secret, list, name, bytes, count, &sealed))
		ret = base_no_memory(error, "a note", count);
	else
		ret = slots_notes_put(board->notes, list, name, sealed.data, sealed.bytes, error);
	base_buffer_free(&sealed);
	if (!ret)
		ret = slots_notes_renew(board->notes, list, error);
	if (!ret)
		scope->renewed_ns = base_now_ns();
	return ret;
}

/* Some of our notes in a scope. */
struct check {
	struct redis_board *board;
	struct redis_scope *scope;
	char list[SLOTS_NOTES_LIST_BYTES];
	const struct board_entry *entries[SLOTS_NOTES_AT_A_TIME];
	bool there[SLOTS_NOTES_AT_A_TIME];
	size_t count;
	size_t bytes;
};

static int compare(void *opaque, size_t index, const void *data, size_t bytes)
{
	struct check *check = opaque;
	const struct board_entry *entry = check->entries[index];
	const uint8_t *note =
		board_secret_unseal(&check->board->secret, check->list, entry->name, data, &bytes);

	check->there[index] = note && bytes == entry->bytes && !memcmp(note, entry->data, bytes);
	return 0;
}

static int check_some(struct check *check)
{
	struct redis_board *board = check->board;
	const char *names[SLOTS_NOTES_AT_A_TIME];
	int ret = 0;

	for (size_t i = 0; i < check->count; i++)
		names[i] = check->entries[i]->name;
	memset(check->there, 0, sizeof(check->there));
	if (check->count)
		ret = slots_notes_get(board->notes, check->list, names, check->count, compare,
				      check, NULL);
	for (size_t i = 0; i < check->count && !ret; i++) {
		const struct board_entry *entry = check->entries[i];

		if (!check->there[i])
			ret = put(board, check->scope, entry->name, entry->data, entry->bytes,
				  NULL);
	}
	check->count = check->bytes = 0;
	return ret;
}

static int check_one(void *opaque, const struct board_entry *entry)
{
	struct check *check = opaque;
	int ret = 0;

	if (strcmp(entry->scope, check->scope->name) != 0)
		return 0;
	if (check->count == ARRAY_LENGTH(check->entries) ||
	    check->bytes + entry->bytes > MOST_CHECK_BYTES)
		ret = check_some(check);
	check->entries[check->count++] = entry;
	check->bytes += entry->bytes;
	return ret;
}

static int check_scope(struct redis_board *board, struct redis_scope *scope)
{
	struct check check = { .board = board, .scope = scope };
	int ret;

	name_list(board, check.list, scope->name);
	ret = board_table_each(&board->own.notes, check_one, &check);
	if (!ret)
		ret = check_some(&check);
	if (!ret && base_now_ns() - scope->renewed_ns > RENEWED_AFTER_NS) {
		ret = slots_notes_renew(board->notes, check.list, NULL);
		scope->renewed_ns = ret ? scope->renewed_ns : base_now_ns();
	}
	return ret;
}

/* What fails is tried again the next time. */
static void check_own(struct redis_board *board)
{
	int ret = 0;

	if (!board_own_is_due(&board->own))
		return;
	if (!board->base.config.rank)
		board_secret_keep(&board->secret);
	for (struct redis_scope *scope = board->scopes; scope && !ret; scope = scope->next)
		ret = check_scope(board, scope);
}

/* ---- Posting --------------------------------------------------------------------------------- */

static struct redis_scope *enter_scope(struct redis_board *board, const char *name,
				       struct base_error *error)
{
	struct redis_scope *scope = board->scopes;

	while (scope && strcmp(scope->name, name) != 0)
		scope = scope->next;
	if (scope)
		return scope;
	scope = calloc(1, sizeof(*scope));
	if (!scope) {
		base_no_memory(error, "a note", sizeof(*scope));
		return NULL;
	}
	strcpy(scope->name, name);
	scope->next = board->scopes;
	board->scopes = scope;
	return scope;
}

static int redis_post(struct gather_board *base, const char *scope_name, const char *name,
		      const void *note, size_t bytes, struct base_error *error)
{
	struct redis_board *board = (struct redis_board *)base;
	struct redis_scope *scope = enter_scope(board, scope_name, error);
	int ret = scope ? board_own_keep(&board->own, scope_name, name, note, bytes, error) :
			  -ENOMEM;

	if (!ret)
		ret = put(board, scope, name, note, bytes, error);
	/* Who writes for long posts, and does not wait. */
	if (!ret)
		check_own(board);
	return ret;
}

/* ---- Looking --------------------------------------------------------------------------------- */

/* What is asked for in one call. */
struct question {
	struct redis_board *board;
	char list[SLOTS_NOTES_LIST_BYTES];
	const char *names[SLOTS_NOTES_AT_A_TIME];
	size_t count; /* of names */
	struct base_buffer *note;
	bool has_found;
	bool has_strange; /* something that no rank has posted, as far as the secret is known */

	const uint32_t *ranks; /* of the names, for collect() */
	gather_found_fn *tell;
	void *user;
	struct base_error *error;
};

static int take_note(void *opaque, size_t index, const void *data, size_t bytes)
{
	struct question *question = opaque;
	struct base_buffer *note = question->note;

	data = board_secret_unseal(&question->board->secret, question->list, question->names[index],
				   data, &bytes);
	if (!data) {
		question->has_strange = true;
		return 0;
	}
	note->bytes = 0;
	if (base_buffer_append(note, data, bytes))
		return base_no_memory(question->error, "a note", bytes);
	question->has_found = true;
	board_own_see(&question->board->own,
		      board_hash(question->list, question->names[index]) ^
			      ((uint64_t)base_crc32(0, data, bytes) << 32 | bytes));
	return question->tell ? question->tell(question->user, question->ranks[index], note) : 0;
}

static int ask(struct question *question)
{
	return slots_notes_get(question->board->notes, question->list, question->names,
			       question->count, take_note, question, question->error);
}

/* Rank 0 may have begun a new life. What we had posted goes out by its secret then. */
static bool learn_secret(struct redis_board *board)
{
	if (!board->base.config.rank || !board->secret.files || !board_secret_renew(&board->secret))
		return false;
	board->own.check_ns = 0;
	check_own(board);
	return true;
}

static int redis_look(struct gather_board *base, const char *scope, const char *name,
		      struct base_buffer *note, struct base_error *error)
{
	struct question question = {
		.board = (struct redis_board *)base,
		.names = { name },
		.count = 1,
		.note = note,
		.error = error,
	};
	int ret;

	name_list(question.board, question.list, scope);
	ret = ask(&question);
	if (!ret && question.has_strange && learn_secret(question.board))
		ret = ask(&question);
	return ret || question.has_found ? ret : -EAGAIN;
}

static int collect_some(struct question *question, const char *prefix, const uint32_t *ranks,
			size_t count)
{
	char names[SLOTS_NOTES_AT_A_TIME][GATHER_NAME_BYTES];

	for (size_t i = 0; i < count; i++) {
		board_name_of(names[i], prefix, ranks[i]);
		question->names[i] = names[i];
	}
	question->ranks = ranks;
	question->count = count;
	return ask(question);
}

static int redis_collect(struct gather_board *base, const char *scope, const char *prefix,
			 const bool *have, gather_found_fn *found, void *user,
			 struct base_error *error)
{
	uint32_t ranks[SLOTS_NOTES_AT_A_TIME];
	struct base_buffer note = { 0 };
	struct question question = {
		.board = (struct redis_board *)base,
		.note = &note,
		.tell = found,
		.user = user,
		.error = error,
	};
	size_t count = 0;
	int ret = 0;

	name_list(question.board, question.list, scope);
	for (uint32_t rank = 0; rank < base->config.ranks && !ret; rank++) {
		if (!have[rank])
			ranks[count++] = rank;
		if (count == ARRAY_LENGTH(ranks) || (count && rank + 1 == base->config.ranks)) {
			ret = collect_some(&question, prefix, ranks, count);
			count = 0;
		}
	}
	base_buffer_free(&note);
	return ret;
}

/* ---- Waiting --------------------------------------------------------------------------------- */

static void redis_wait(struct gather_board *base, uint32_t timeout_ms)
{
	struct redis_board *board = (struct redis_board *)base;

	board_own_sleep(&board->own, timeout_ms,
			MAX(MOST_PAUSE_MS, base->config.ranks / RANKS_FOR_A_MS));
	check_own(board);
}

/* ---- Ending ---------------------------------------------------------------------------------- */

static void redis_drop(struct gather_board *base, const char *name)
{
	struct redis_board *board = (struct redis_board *)base;
	char list[SLOTS_NOTES_LIST_BYTES];
	struct redis_scope **at, *scope;

	board_table_drop(&board->own.notes, name);
	for (at = &board->scopes; (scope = *at); at = &scope->next) {
		if (!strcmp(scope->name, name)) {
			*at = scope->next;
			free(scope);
			break;
		}
	}
	if (base->config.rank)
		return;
	name_list(board, list, name);
	/* If it cannot be said now, time removes them. */
	slots_notes_remove(board->notes, list, NULL);
}

/* Scopes that rank 0 has not dropped stay for a while: others may still read them. */
static void redis_close(struct gather_board *base)
{
	struct redis_board *board = (struct redis_board *)base;
	struct redis_scope *scope;

	while ((scope = board->scopes)) {
		board->scopes = scope->next;
		free(scope);
	}
	board_table_free(&board->own.notes);
	board_secret_close(&board->secret);
	slots_notes_close(board->notes);
	free(board);
}

/* ---- Opening --------------------------------------------------------------------------------- */

/* Whether it answers, and lets us read what we are about to write. */
static int try_it(struct gather_board *board, struct base_error *error)
{
	struct base_buffer note = { 0 };
	const int ret = redis_look(board, "open", "open", &note, error);

	base_buffer_free(&note);
	return ret == -EAGAIN ? 0 : ret;
}

static int redis_open(struct gather_board **out, const struct gather_board_config *config,
		      struct base_error *error)
{
	struct redis_board *board = board_new(sizeof(*board), &gather_board_redis, config, error);
	int ret;

	if (!board)
		return -ENOMEM;
	board_own_begin(&board->own);
	ret = slots_notes_open(&board->notes, config->coordinator, error);
	if (!ret)
		ret = try_it(&board->base, error);
	if (!ret)
		ret = board_secret_open(&board->secret, config, error);
	if (ret)
		redis_close(&board->base);
	else
		*out = &board->base;
	return ret;
}

const struct gather_board_ops gather_board_redis = {
	.id = "redis",
	.open = redis_open,
	.post = redis_post,
	.look = redis_look,
	.collect = redis_collect,
	.wait = redis_wait,
	.is_gone = board_cannot_tell,
	.drop = redis_drop,
	.close = redis_close,
};
