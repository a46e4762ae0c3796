/* SPDX-License-Identifier: Apache-2.0 */
/* What is the same for boards of all kinds: who may call, and with which names. */
#define _GNU_SOURCE
#include "gather/board.h"

#include <errno.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#define MOST_RANK_DIGITS 10u /* of 32 bits */

/* ---- Checks ---------------------------------------------------------------------------------- */

static bool is_ours(const struct gather_board *board)
{
	return board->pid == base_pid();
}

/* The name itself is not said: it may hold anything. */
static int check_name(const char *what, const char *name, struct base_error *error)
{
	if (board_is_name(name))
		return 0;
	return base_refuse(error, -EINVAL,
			   "a board's %s must have 1 to %d letters of a-z, 0-9 and \"-\"", what,
			   GATHER_NAME_BYTES - 1);
}

static int check_call(const struct gather_board *board, const char *scope, const char *name,
		      struct base_error *error)
{
	int ret;

	if (!is_ours(board))
		return base_refuse(error, -EPERM,
				   "this group was opened before fork()" BASE_REMEDY
				   "open one in the child");
	ret = check_name("scope", scope, error);
	return ret ? ret : check_name("note", name, error);
}

/* ---- Opening and closing --------------------------------------------------------------------- */

void *board_new(size_t bytes, const struct gather_board_ops *ops,
		const struct gather_board_config *config, struct base_error *error)
{
	struct gather_board *board = calloc(1, bytes);

	if (board)
		*board = (struct gather_board){ .ops = ops, .config = *config, .pid = base_pid() };
	else
		base_no_memory(error, "a board", bytes);
	return board;
}

int gather_board_open(struct gather_board **out, const struct gather_board_ops *ops,
		      const struct gather_board_config *config, struct base_error *error)
{
	int ret = check_name("name", config->name, error);

	*out = NULL;
	if (!ret && config->rank >= config->ranks)
		ret = base_refuse(error, -EINVAL,
				  "there is no rank %" PRIu32 " among %" PRIu32 " ranks",
				  config->rank, config->ranks);
	return ret ? ret : ops->open(out, config, error);
}

void gather_board_close(struct gather_board *board)
{
	if (board && is_ours(board))
		board->ops->close(board);
}

const char *gather_board_id(const struct gather_board *board)
{
	return board->ops->id;
}

/* ---- Notes ----------------------------------------------------------------------------------- */

int gather_board_post(struct gather_board *board, const char *scope, const char *name,
		      const void *note, size_t bytes, struct base_error *error)
{
	int ret = check_call(board, scope, name, error);

	if (!ret && bytes > GATHER_MAX_NOTE_BYTES)
		ret = base_refuse(error, -E2BIG,
				  "note %s-%s has %zu bytes" BASE_REMEDY
				  "a board takes notes of up to %llu",
				  scope, name, bytes, GATHER_MAX_NOTE_BYTES);
	return ret ? ret : board->ops->post(board, scope, name, note, bytes, error);
}

int gather_board_look(struct gather_board *board, const char *scope, const char *name,
		      struct base_buffer *note, struct base_error *error)
{
	int ret = check_call(board, scope, name, error);

	return ret ? ret : board->ops->look(board, scope, name, note, error);
}

int gather_board_collect(struct gather_board *board, const char *scope, const char *prefix,
			 const bool *have, gather_found_fn *found, void *user,
			 struct base_error *error)
{
	int ret = check_call(board, scope, prefix, error);

	if (!ret && strlen(prefix) + 1 + MOST_RANK_DIGITS >= GATHER_NAME_BYTES)
		ret = base_refuse(error, -EINVAL, "\"%s\" is too long to begin notes' names with",
				  prefix);
	return ret ? ret : board->ops->collect(board, scope, prefix, have, found, user, error);
}

void gather_board_drop(struct gather_board *board, const char *scope)
{
	if (is_ours(board) && board_is_name(scope))
		board->ops->drop(board, scope);
}

/* ---- Others ---------------------------------------------------------------------------------- */

void gather_board_wait(struct gather_board *board, uint32_t timeout_ms)
{
	if (is_ours(board))
		board->ops->wait(board, timeout_ms);
	else
		board_sleep_ms(timeout_ms);
}

bool gather_board_is_gone(struct gather_board *board, uint32_t rank)
{
	return is_ours(board) && rank < board->config.ranks && board->ops->is_gone(board, rank);
}

bool board_cannot_tell(struct gather_board *board, uint32_t rank)
{
	(void)board;
	(void)rank;
	return false;
}

const char *gather_board_remark(const struct gather_board *board)
{
	return board->remark;
}
