/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The board of ranks that share a Redis: a hash for each scope, with a field for each note.
 *
 * A Redis may lose its data, or, in a failover, the latest of it. So each rank leaves a mark beside
 * its notes, the number of its latest one, and asks for it whenever it asks for anything: if it is
 * not as it should be, the notes are posted again.
 */
#define _GNU_SOURCE
#include "gather/board.h"

#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define LEAST_PAUSE_MS 5u
#define MOST_PAUSE_MS 250u
#define RANKS_FOR_A_MS 4u /* with thousands of ranks, pauses grow: together they ask as often */
#define LEAST_CHECK_MS 1000u
#define MOST_CHECK_MS 30000u
#define MOST_CHECK_BYTES MIB /* that are read again at a time */
#define RENEWED_AFTER_NS (SLOTS_NOTES_KEPT_MS / 6 * UINT64_C(1000000))
#define MARK_BYTES 16

/* One that we have posted in, and not dropped. */
struct redis_scope {
	struct redis_scope *next;
	char name[GATHER_NAME_BYTES];
	uint64_t posted; /* notes; what the mark says */
	uint64_t renewed_ns;
};

struct redis_board {
	pid_t pid;
	uint32_t rank, ranks;
	char name[GATHER_NAME_BYTES];
	char mark[MARK_BYTES]; /* ".<rank>": no note is called so */
	struct slots_notes *notes;
	struct board_table own;
	struct redis_scope *scopes;
	uint64_t stamps[16]; /* of notes seen lately: others are news */
	unsigned next_stamp;
	uint32_t pause_ms; /* of the next wait() */
	uint32_t check_ms; /* between looks for our own notes */
	uint64_t check_ns; /* the next one */
};

static bool is_ours(const struct redis_board *board)
{
	return board->pid == base_pid();
}

static int not_ours(struct base_error *error)
{
	return base_refuse(error, -EPERM,
			   "this group was opened before fork()" BASE_REMEDY
			   "open one in the child");
}

static void name_list(const struct redis_board *board, char list[SLOTS_NOTES_LIST_BYTES],
		      const char *scope)
{
	snprintf(list, SLOTS_NOTES_LIST_BYTES, "%s:%s", board->name, scope);
}

static struct redis_scope *find_scope(const struct redis_board *board, const char *name)
{
	struct redis_scope *scope = board->scopes;

	while (scope && strcmp(scope->name, name) != 0)
		scope = scope->next;
	return scope;
}

static void expect_news(struct redis_board *board)
{
	board->pause_ms = LEAST_PAUSE_MS;
}

static void has_seen(struct redis_board *board, uint64_t stamp)
{
	for (size_t i = 0; i < ARRAY_LENGTH(board->stamps); i++) {
		if (board->stamps[i] == stamp)
			return;
	}
	board->stamps[board->next_stamp] = stamp;
	board->next_stamp = (board->next_stamp + 1) % ARRAY_LENGTH(board->stamps);
	expect_news(board);
}

/* ---- Our own notes --------------------------------------------------------------------------- */

static int put(struct redis_board *board, const struct redis_scope *scope, const char *name,
	       const void *bytes, size_t count, uint64_t mark, bool *fresh,
	       struct base_error *error)
{
	char list[SLOTS_NOTES_LIST_BYTES], text[24];

	name_list(board, list, scope->name);
	snprintf(text, sizeof(text), "%" PRIu64, mark);
	return slots_notes_put(board->notes, list, name, bytes, count, board->mark, text, fresh,
			       error);
}

static int renew(struct redis_board *board, struct redis_scope *scope, struct base_error *error)
{
	char list[SLOTS_NOTES_LIST_BYTES];
	int ret;

	name_list(board, list, scope->name);
	ret = slots_notes_renew(board->notes, list, error);
	if (!ret)
		scope->renewed_ns = base_now_ns();
	return ret;
}

struct restoring {
	struct redis_board *board;
	const struct redis_scope *scope;
};

static int restore_one(void *opaque, const struct board_entry *entry)
{
	const struct restoring *restoring = opaque;

	if (strcmp(entry->scope, restoring->scope->name) != 0)
		return 0;
	/* The mark says that all are there only when they are. */
	return put(restoring->board, restoring->scope, entry->name, entry->data, entry->bytes, 0,
		   NULL, NULL);
}

/* What fails is tried again by the next call that misses the mark. */
static void restore(struct redis_board *board, struct redis_scope *scope)
{
	struct restoring restoring = { .board = board, .scope = scope };
	char list[SLOTS_NOTES_LIST_BYTES], text[24];
	int ret = board_table_each(&board->own, restore_one, &restoring);

	name_list(board, list, scope->name);
	snprintf(text, sizeof(text), "%" PRIu64, scope->posted);
	if (!ret)
		ret = slots_notes_put(board->notes, list, board->mark, text, strlen(text), NULL,
				      NULL, NULL, NULL);
	if (!ret)
		renew(board, scope, NULL);
}

static bool is_mark(const struct redis_scope *scope, const void *data, size_t bytes)
{
	char text[24];

	snprintf(text, sizeof(text), "%" PRIu64, scope->posted);
	return bytes == strlen(text) && !memcmp(data, text, bytes);
}

/* ---- Looking for our own notes --------------------------------------------------------------- */

/* Some of our notes in a scope, and the mark behind them. */
struct check {
	struct redis_board *board;
	struct redis_scope *scope;
	const struct board_entry *entries[SLOTS_NOTES_AT_A_TIME - 1];
	bool there[SLOTS_NOTES_AT_A_TIME - 1];
	size_t count;
	size_t bytes;
	bool marked;
};

static int compare(void *opaque, size_t index, const void *data, size_t bytes)
{
	struct check *check = opaque;
	const struct board_entry *entry;

	if (index == check->count) {
		check->marked = is_mark(check->scope, data, bytes);
		return 0;
	}
	entry = check->entries[index];
	check->there[index] = bytes == entry->bytes && !memcmp(data, entry->data, bytes);
	return 0;
}

static int check_some(struct check *check)
{
	struct redis_board *board = check->board;
	const char *names[SLOTS_NOTES_AT_A_TIME];
	char list[SLOTS_NOTES_LIST_BYTES];
	int ret;

	for (size_t i = 0; i < check->count; i++)
		names[i] = check->entries[i]->name;
	names[check->count] = board->mark;
	memset(check->there, 0, sizeof(check->there));
	check->marked = false;
	name_list(board, list, check->scope->name);
	ret = slots_notes_get(board->notes, list, names, check->count + 1, compare, check, NULL);
	if (!ret && !check->marked)
		restore(board, check->scope);
	for (size_t i = 0; i < check->count && !ret && check->marked; i++) {
		const struct board_entry *entry = check->entries[i];

		if (!check->there[i])
			ret = put(board, check->scope, entry->name, entry->data, entry->bytes,
				  check->scope->posted, NULL, NULL);
	}
	check->count = check->bytes = 0;
	return ret;
}

static int check_one(void *opaque, const struct board_entry *entry)
{
	struct check *check = opaque;
	int ret = 0;

	/* Long ones go by the mark alone. */
	if (strcmp(entry->scope, check->scope->name) != 0 || entry->bytes > MOST_CHECK_BYTES)
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
	int ret = board_table_each(&board->own, check_one, &check);

	if (!ret)
		ret = check_some(&check);
	if (!ret && base_now_ns() - scope->renewed_ns > RENEWED_AFTER_NS)
		ret = renew(board, scope, NULL);
	return ret;
}

/*
 * Who asks for something finds out by the mark that something was lost; this is for who does not
 * ask, and for notes that were lost behind a mark that was posted since.
 */
static void check_own(struct redis_board *board)
{
	struct redis_scope *scope;
	int ret = 0;

	if (base_now_ns() < board->check_ns)
		return;
	for (scope = board->scopes; scope && !ret; scope = scope->next)
		ret = check_scope(board, scope);
	board->check_ms = ret ? LEAST_CHECK_MS : MIN(2 * board->check_ms, MOST_CHECK_MS);
	board->check_ns = base_now_ns() + base_ms_to_ns(board->check_ms);
}

/* ---- Posting --------------------------------------------------------------------------------- */

static int enter_scope(struct redis_board *board, const char *name, struct redis_scope **out,
		       struct base_error *error)
{
	struct redis_scope *scope = find_scope(board, name);

	if (!scope) {
		scope = calloc(1, sizeof(*scope));
		if (!scope)
			return base_no_memory(error, "a note", sizeof(*scope));
		strcpy(scope->name, name);
		scope->next = board->scopes;
		board->scopes = scope;
	}
	*out = scope;
	return 0;
}

static int redis_post(void *opaque, const char *scope_name, const char *name, const void *note,
		      size_t bytes, struct base_error *error)
{
	struct redis_board *board = opaque;
	struct redis_scope *scope = NULL;
	bool fresh;
	int ret = is_ours(board) ? board_check(scope_name, name, bytes, error) : not_ours(error);

	if (!ret)
		ret = enter_scope(board, scope_name, &scope, error);
	if (!ret)
		ret = board_table_put(&board->own, scope_name, name, note, bytes, error);
	if (ret)
		return ret;
	scope->posted++;
	expect_news(board);
	/* Sooner than before, never later: signs of life are posted all the time. */
	board->check_ms = LEAST_CHECK_MS;
	board->check_ns = MIN(board->check_ns, base_now_ns() + base_ms_to_ns(LEAST_CHECK_MS));
	ret = put(board, scope, name, note, bytes, scope->posted, &fresh, error);
	if (!ret)
		ret = renew(board, scope, error);
	/* If earlier ones were lost meanwhile, the mark hides it from now on. */
	if (!ret && fresh && scope->posted > 1)
		restore(board, scope);
	/* Who writes for long posts, and does not wait. */
	if (!ret)
		check_own(board);
	return ret;
}

/* ---- Looking --------------------------------------------------------------------------------- */

/* What is asked for in one call: some names, and the mark behind them. */
struct question {
	struct redis_board *board;
	struct redis_scope *scope; /* NULL: no notes of ours are in it */
	char list[SLOTS_NOTES_LIST_BYTES];
	const char *names[SLOTS_NOTES_AT_A_TIME];
	size_t count; /* of names, without the mark */
	bool marked;
	int (*found)(struct question *question, size_t index);
	struct base_buffer *note;
	bool has_found;

	const uint32_t *ranks; /* of the names, for collect() */
	gather_found_fn *tell;
	void *user;
	int stopped; /* what tell() said */
	struct base_error *error;
};

static int take_note(void *opaque, size_t index, const void *data, size_t bytes)
{
	struct question *question = opaque;
	struct base_buffer *note = question->note;

	if (index == question->count) {
		question->marked = is_mark(question->scope, data, bytes);
		return 0;
	}
	note->bytes = 0;
	if (base_buffer_append(note, data, bytes))
		return base_no_memory(question->error, "a note", bytes);
	question->has_found = true;
	has_seen(question->board, board_hash(question->list, question->names[index]) ^
					  ((uint64_t)base_crc32(0, data, bytes) << 32 | bytes));
	if (question->tell)
		question->stopped =
			question->tell(question->user, question->ranks[index], question->note);
	return question->stopped;
}

static int ask(struct question *question)
{
	struct redis_board *board = question->board;
	const size_t count = question->count + (question->scope ? 1 : 0);
	int ret;

	question->names[question->count] = board->mark;
	question->marked = false;
	ret = slots_notes_get(board->notes, question->list, question->names, count, take_note,
			      question, question->error);
	if (!ret && question->scope && !question->marked)
		restore(board, question->scope);
	return ret;
}

static struct question begin_question(struct redis_board *board, const char *scope,
				      struct base_buffer *note, struct base_error *error)
{
	struct question question = {
		.board = board, .scope = find_scope(board, scope), .note = note, .error = error
	};

	name_list(board, question.list, scope);
	return question;
}

static int redis_look(void *opaque, const char *scope, const char *name, struct base_buffer *note,
		      struct base_error *error)
{
	struct redis_board *board = opaque;
	struct question question;
	int ret = is_ours(board) ? board_check(scope, name, 0, error) : not_ours(error);

	if (ret)
		return ret;
	question = begin_question(board, scope, note, error);
	question.names[question.count++] = name;
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

static int redis_collect(void *opaque, const char *scope, const char *prefix, const bool *have,
			 gather_found_fn *found, void *user, struct base_error *error)
{
	struct redis_board *board = opaque;
	uint32_t ranks[SLOTS_NOTES_AT_A_TIME - 1];
	struct base_buffer note = { 0 };
	struct question question;
	size_t count = 0;
	int ret = is_ours(board) ? board_check_prefix(scope, prefix, error) : not_ours(error);

	if (ret)
		return ret;
	question = begin_question(board, scope, &note, error);
	question.tell = found;
	question.user = user;
	for (uint32_t rank = 0; rank < board->ranks && !ret; rank++) {
		if (!have[rank])
			ranks[count++] = rank;
		if (count == ARRAY_LENGTH(ranks) || (count && rank + 1 == board->ranks)) {
			ret = collect_some(&question, prefix, ranks, count);
			count = 0;
		}
	}
	base_buffer_free(&note);
	return ret;
}

/* ---- Waiting --------------------------------------------------------------------------------- */

static void redis_wait(void *opaque, uint32_t timeout_ms)
{
	struct redis_board *board = opaque;
	uint32_t most_ms;

	if (!is_ours(board)) {
		board_sleep_ms(timeout_ms);
		return;
	}
	board_sleep_ms(MIN(timeout_ms, board->pause_ms));
	most_ms = MAX(MOST_PAUSE_MS, board->ranks / RANKS_FOR_A_MS);
	board->pause_ms = MIN(2 * board->pause_ms, most_ms);
	check_own(board);
}

static bool redis_is_gone(void *opaque, uint32_t rank)
{
	(void)opaque;
	(void)rank;
	return false;
}

/* ---- Ending ---------------------------------------------------------------------------------- */

static const char *redis_remark(void *opaque)
{
	(void)opaque;
	return NULL;
}

static void redis_drop(void *opaque, const char *name)
{
	struct redis_board *board = opaque;
	char list[SLOTS_NOTES_LIST_BYTES];
	struct redis_scope **at, *scope;

	if (!is_ours(board) || !board_is_name(name))
		return;
	board_table_drop(&board->own, name);
	for (at = &board->scopes; (scope = *at); at = &scope->next) {
		if (!strcmp(scope->name, name)) {
			*at = scope->next;
			free(scope);
			break;
		}
	}
	if (board->rank)
		return;
	name_list(board, list, name);
	/* If it cannot be said now, time removes them. */
	slots_notes_remove(board->notes, list, NULL);
}

static void free_board(struct redis_board *board)
{
	struct redis_scope *scope;

	while ((scope = board->scopes)) {
		board->scopes = scope->next;
		free(scope);
	}
	board_table_free(&board->own);
	slots_notes_close(board->notes);
	free(board);
}

/* Scopes that rank 0 has not dropped stay for a while: others may still read them. */
static void redis_close(void *opaque)
{
	struct redis_board *board = opaque;

	if (board && is_ours(board))
		free_board(board);
}

/* ---- Opening --------------------------------------------------------------------------------- */

/* Whether it answers, and lets us read what we are about to write. */
static int try_it(struct redis_board *board, struct base_error *error)
{
	struct base_buffer note = { 0 };
	const int ret = redis_look(board, "open", "open", &note, error);

	base_buffer_free(&note);
	return ret == -EAGAIN ? 0 : ret;
}

static int redis_open(void **out, const struct gather_board_config *config,
		      struct base_error *error)
{
	struct redis_board *board;
	int ret;

	*out = NULL;
	ret = board_check_config(config, error);
	if (ret)
		return ret;
	board = calloc(1, sizeof(*board));
	if (!board)
		return base_no_memory(error, "a board", sizeof(*board));
	board->pid = base_pid();
	board->rank = config->rank;
	board->ranks = config->ranks;
	strcpy(board->name, config->name);
	snprintf(board->mark, sizeof(board->mark), ".%" PRIu32, config->rank);
	board->pause_ms = LEAST_PAUSE_MS;
	board->check_ms = LEAST_CHECK_MS;
	board->check_ns = base_now_ns() + base_ms_to_ns(LEAST_CHECK_MS);
	ret = slots_notes_open(&board->notes, config->coordinator, error);
	if (!ret)
		ret = try_it(board, error);
	if (ret) {
		free_board(board);
		return ret;
	}
	*out = board;
	return 0;
}

const struct gather_board_ops gather_board_redis = {
	.id = "redis",
	.open = redis_open,
	.post = redis_post,
	.look = redis_look,
	.collect = redis_collect,
	.wait = redis_wait,
	.is_gone = redis_is_gone,
	.remark = redis_remark,
	.drop = redis_drop,
	.close = redis_close,
};
