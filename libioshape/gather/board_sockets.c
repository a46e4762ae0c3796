/* SPDX-License-Identifier: Apache-2.0 */
/* The board of ranks that are all on one host: notes in rank 0's memory. */
#define _GNU_SOURCE
#include "gather/board_sockets.h"

#include <errno.h>
#include <stdlib.h>

struct sockets_board {
	pid_t pid;
	uint32_t ranks;
	struct sockets_server *server; /* rank 0's */
	struct sockets_client *client; /* the others' */
};

/* Nothing of it may be touched in a forked child: its locks may be held by threads that are not
 * there. */
static bool is_ours(const struct sockets_board *board)
{
	return board->pid == base_pid();
}

static int not_ours(struct base_error *error)
{
	return base_fail(error, -EPERM,
			 "this group was opened before fork(): open one in the child");
}

static int sockets_open(void **out, const struct gather_board_config *config,
			struct base_error *error)
{
	struct sockets_board *board;
	int ret;

	*out = NULL;
	ret = board_check_config(config, error);
	if (ret)
		return ret;
	if (config->ranks > SOCKETS_MOST_RANKS)
		return base_fail(error, -E2BIG,
				 "a host's ranks may be %u in a group over sockets, not %u",
				 SOCKETS_MOST_RANKS, config->ranks);
	board = calloc(1, sizeof(*board));
	if (!board)
		return base_no_memory(error, "a board", sizeof(*board));
	board->pid = base_pid();
	board->ranks = config->ranks;
	ret = config->rank ? sockets_join(&board->client, config, error) :
			     sockets_serve(&board->server, config, error);
	if (ret) {
		free(board);
		return ret;
	}
	*out = board;
	return 0;
}

static int sockets_post(void *opaque, const char *scope, const char *name, const void *note,
			size_t bytes, struct base_error *error)
{
	struct sockets_board *board = opaque;
	const int ret = is_ours(board) ? board_check(scope, name, bytes, error) : not_ours(error);

	if (ret)
		return ret;
	if (board->server)
		return sockets_server_post(board->server, scope, name, note, bytes, error);
	return sockets_client_post(board->client, scope, name, note, bytes, error);
}

/* Into the caller's buffer. */
static int copy_note(struct base_buffer *to, struct board_note *note, struct base_error *error)
{
	int ret;

	to->bytes = 0;
	ret = base_buffer_append(to, note->data, note->bytes);
	if (ret)
		base_no_memory(error, "a note", note->bytes);
	board_note_leave(note);
	return ret;
}

static int sockets_look(void *opaque, const char *scope, const char *name, struct base_buffer *note,
			struct base_error *error)
{
	struct sockets_board *board = opaque;
	struct board_note *there;
	int ret = is_ours(board) ? board_check(scope, name, 0, error) : not_ours(error);

	if (ret)
		return ret;
	if (board->client)
		return sockets_client_look(board->client, scope, name, note, error);
	/* First: what is posted in between must end the next wait(). */
	sockets_server_watch(board->server, board_hash(scope, name));
	there = sockets_server_look(board->server, scope, name);
	return there ? copy_note(note, there, error) : -EAGAIN;
}

static int collect_here(struct sockets_board *board, const char *scope, const char *prefix,
			const bool *have,
			int (*found)(void *user, uint32_t rank, const struct base_buffer *note),
			void *user, struct base_error *error)
{
	char name[GATHER_NAME_BYTES];
	struct board_note *there;
	struct base_buffer note = { 0 };
	int ret = 0;

	sockets_server_watch(board->server, board_hash_prefix(scope, prefix));
	for (uint32_t rank = 0; rank < board->ranks && !ret; rank++) {
		if (have[rank])
			continue;
		board_name_of(name, prefix, rank);
		there = sockets_server_look(board->server, scope, name);
		if (!there)
			continue;
		ret = copy_note(&note, there, error);
		if (!ret)
			ret = found(user, rank, &note);
	}
	base_buffer_free(&note);
	return ret;
}

static int sockets_collect(void *opaque, const char *scope, const char *prefix, const bool *have,
			   int (*found)(void *user, uint32_t rank, const struct base_buffer *note),
			   void *user, struct base_error *error)
{
	struct sockets_board *board = opaque;
	const int ret = is_ours(board) ? board_check_prefix(scope, prefix, error) : not_ours(error);

	if (ret)
		return ret;
	if (board->server)
		return collect_here(board, scope, prefix, have, found, user, error);
	return sockets_client_collect(board->client, scope, prefix, have, found, user, error);
}

static void sockets_wait(void *opaque, uint32_t timeout_ms)
{
	struct sockets_board *board = opaque;

	if (!is_ours(board))
		board_sleep_ms(timeout_ms);
	else if (board->server)
		sockets_server_wait(board->server, timeout_ms);
	else
		sockets_client_wait(board->client, timeout_ms);
}

static bool sockets_is_gone(void *opaque, uint32_t rank)
{
	struct sockets_board *board = opaque;

	if (!is_ours(board))
		return false;
	return board->server ? sockets_server_is_gone(board->server, rank) :
			       sockets_client_is_gone(board->client, rank);
}

/* The others' notes stay until rank 0 needs none of them. */
static void sockets_drop(void *opaque, const char *scope)
{
	struct sockets_board *board = opaque;

	if (is_ours(board) && board->server)
		sockets_server_drop(board->server, scope);
}

static void sockets_close(void *opaque)
{
	struct sockets_board *board = opaque;

	if (!board || !is_ours(board))
		return;
	if (board->server)
		sockets_server_close(board->server);
	if (board->client)
		sockets_client_close(board->client);
	free(board);
}

const struct gather_board_ops gather_board_sockets = {
	.id = "sockets",
	.open = sockets_open,
	.post = sockets_post,
	.look = sockets_look,
	.collect = sockets_collect,
	.wait = sockets_wait,
	.is_gone = sockets_is_gone,
	.drop = sockets_drop,
	.close = sockets_close,
};
