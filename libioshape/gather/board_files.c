/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The board of ranks that have nothing in common but a filesystem: a folder with a file for each
 * note, named <scope>.<name>.
 *
 * Nobody knows who has ended, and a folder of an earlier job may be there: its notes are seen until
 * rank 0 drops their scopes.
 */
#define _GNU_SOURCE
#include "gather/board.h"

#include "ring/ring.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define FOLDER_MARK ".ioshape-board-"
#define FORGOTTEN_AFTER_S (24 * 3600)
#define LEAST_PAUSE_MS 5u
#define MOST_PAUSE_MS 250u
#define LEAST_CHECK_MS 1000u
#define MOST_CHECK_MS 30000u

struct files_board {
	pid_t pid;
	uint32_t rank, ranks;
	struct ring_shelf shelf;
	struct board_table own; /* what we posted: posted again if it gets lost */
	uint64_t stamps[16];    /* of files seen lately: others are news */
	unsigned next_stamp;
	uint32_t pause_ms; /* of the next wait() */
	uint32_t check_ms; /* between looks for our own notes */
	uint64_t check_ns; /* the next one */
};

static bool is_ours(const struct files_board *board)
{
	return board->pid == base_pid();
}

static int not_ours(struct base_error *error)
{
	return base_fail(error, -EPERM,
			 "this group was opened before fork(): open one in the child");
}

/* Nobody but rank 0 makes it again: otherwise a rank that ends late would leave it behind. */
static int enter(struct files_board *board, struct base_error *error)
{
	int fd = ring_shelf_enter(&board->shelf, error);

	if (fd == -ENOENT && !board->rank && !ring_shelf_make(&board->shelf))
		fd = ring_shelf_enter(&board->shelf, error);
	return fd;
}

static int is_away(const struct files_board *board, struct base_error *error)
{
	return base_fail(error, IOSHAPE_E_COORDINATOR,
			 "the folder %s is gone: rank 0 of the group has ended, or somebody "
			 "removed it",
			 board->shelf.path);
}

/* What an NFS server that is away for a moment, or has changed, brings about: the folder is out of
 * reach now, and the caller tries anew. The sentence says what it was. */
static int unless_passing(int ret, struct base_error *error)
{
	if (ret != -ESTALE && ret != -EIO && ret != -ETIMEDOUT && ret != -EINTR)
		return ret;
	if (error && error->code == ret)
		error->code = IOSHAPE_E_COORDINATOR;
	return IOSHAPE_E_COORDINATOR;
}

static void file_name(char file[BOARD_KEY_BYTES], const char *scope, const char *name)
{
	snprintf(file, BOARD_KEY_BYTES, "%s.%s", scope, name);
}

/* ---- Posting --------------------------------------------------------------------------------- */

static int put(struct files_board *board, const char *scope, const char *name, const void *bytes,
	       size_t count, struct base_error *error)
{
	char file[BOARD_KEY_BYTES];
	int fd, ret = -ENOENT;

	file_name(file, scope, name);
	for (int i = 0; i < 2 && ret == -ENOENT; i++) {
		fd = enter(board, error);
		ret = fd < 0 ? fd : ring_shelf_put(&board->shelf, fd, file, bytes, count, error);
		ring_shelf_leave(fd);
	}
	return ret == -ENOENT ? is_away(board, error) : unless_passing(ret, error);
}

struct check {
	struct files_board *board;
	int folder_fd;
};

static int check_one(void *opaque, const struct board_entry *entry)
{
	struct check *check = opaque;
	char file[BOARD_KEY_BYTES];

	file_name(file, entry->scope, entry->name);
	if (ring_shelf_has(check->folder_fd, file))
		return 0;
	return ring_shelf_put(&check->board->shelf, check->folder_fd, file, entry->note->data,
			      entry->note->bytes, NULL);
}

/* Whether our own notes are still there: an earlier job's rank 0 may have taken them away as it
 * ended. */
static void check_own(struct files_board *board)
{
	const uint64_t now = base_now_ns();
	struct check check = { .board = board };

	if (now < board->check_ns)
		return;
	check.folder_fd = enter(board, NULL);
	if (check.folder_fd >= 0)
		board_table_each(&board->own, check_one, &check);
	ring_shelf_leave(check.folder_fd);
	board->check_ms = MIN(2 * board->check_ms, MOST_CHECK_MS);
	board->check_ns = base_now_ns() + base_ms_to_ns(board->check_ms);
}

static int files_post(void *opaque, const char *scope, const char *name, const void *note,
		      size_t bytes, struct base_error *error)
{
	struct files_board *board = opaque;
	int ret = is_ours(board) ? board_check(scope, name, bytes, error) : not_ours(error);

	if (!ret)
		ret = board_table_keep(&board->own, scope, name, note, bytes, error);
	if (!ret)
		ret = put(board, scope, name, note, bytes, error);
	/* Answers may come soon. */
	board->pause_ms = LEAST_PAUSE_MS;
	/* Sooner than before, never later: signs of life are posted all the time. */
	board->check_ms = LEAST_CHECK_MS;
	board->check_ns = MIN(board->check_ns, base_now_ns() + base_ms_to_ns(LEAST_CHECK_MS));
	/* Who writes for long posts, and does not wait. */
	if (!ret)
		check_own(board);
	return ret;
}

/* ---- Looking --------------------------------------------------------------------------------- */

static void has_found(struct files_board *board, uint64_t stamp)
{
	for (size_t i = 0; i < ARRAY_LENGTH(board->stamps); i++) {
		if (board->stamps[i] == stamp)
			return;
	}
	board->stamps[board->next_stamp] = stamp;
	board->next_stamp = (board->next_stamp + 1) % ARRAY_LENGTH(board->stamps);
	board->pause_ms = LEAST_PAUSE_MS;
}

static int files_look(void *opaque, const char *scope, const char *name, struct base_buffer *note,
		      struct base_error *error)
{
	struct files_board *board = opaque;
	char file[BOARD_KEY_BYTES];
	uint64_t stamp;
	int fd, ret = is_ours(board) ? board_check(scope, name, 0, error) : not_ours(error);

	if (ret)
		return ret;
	file_name(file, scope, name);
	fd = enter(board, error);
	ret = fd < 0 ? fd :
		       ring_shelf_get(&board->shelf, fd, file, GATHER_MAX_NOTE_BYTES, note, &stamp,
				      error);
	ring_shelf_leave(fd);
	if (!ret)
		has_found(board, stamp);
	if (fd == -ENOENT)
		return is_away(board, error);
	return ret == -ENOENT ? -EAGAIN : unless_passing(ret, error);
}

/* What collect() goes by while it lists the folder. */
struct collection {
	struct files_board *board;
	int folder_fd;
	char begin[BOARD_KEY_BYTES + 2]; /* "<scope>.<prefix>-" */
	const bool *have;
	int (*found)(void *user, uint32_t rank, const struct base_buffer *note);
	void *user;
	struct base_buffer note;
	struct base_error *error;
	int stopped; /* what found() said */
};

/* The rank at the end of a name, as board_name_of() writes it. */
static bool read_rank(const char *digits, uint32_t ranks, uint32_t *rank)
{
	const size_t count = strspn(digits, "0123456789");
	unsigned long long number;

	if (!count || digits[count] || count > 10 || (*digits == '0' && count > 1))
		return false;
	number = strtoull(digits, NULL, 10);
	*rank = (uint32_t)number;
	return number < ranks;
}

static int collect_file(void *opaque, const char *name)
{
	struct collection *collection = opaque;
	struct files_board *board = collection->board;
	const size_t length = strlen(collection->begin);
	uint64_t stamp;
	uint32_t rank;
	int ret;

	if (strncmp(name, collection->begin, length) != 0 ||
	    !read_rank(name + length, board->ranks, &rank) || collection->have[rank])
		return 0;
	ret = ring_shelf_get(&board->shelf, collection->folder_fd, name, GATHER_MAX_NOTE_BYTES,
			     &collection->note, &stamp, collection->error);
	if (ret)
		return ret == -ENOENT ? 0 : ret;
	has_found(board, stamp);
	collection->stopped = collection->found(collection->user, rank, &collection->note);
	return collection->stopped;
}

static int files_collect(void *opaque, const char *scope, const char *prefix, const bool *have,
			 int (*found)(void *user, uint32_t rank, const struct base_buffer *note),
			 void *user, struct base_error *error)
{
	struct files_board *board = opaque;
	struct collection collection = {
		.board = board, .have = have, .found = found, .user = user, .error = error
	};
	int ret = is_ours(board) ? board_check_prefix(scope, prefix, error) : not_ours(error);

	if (ret)
		return ret;
	snprintf(collection.begin, sizeof(collection.begin), "%s.%s-", scope, prefix);
	ret = collection.folder_fd = enter(board, error);
	if (ret >= 0)
		ret = ring_shelf_list(&board->shelf, collection.folder_fd, collect_file,
				      &collection, error);
	ring_shelf_leave(collection.folder_fd);
	base_buffer_free(&collection.note);
	if (collection.stopped)
		return collection.stopped;
	return ret == -ENOENT ? is_away(board, error) : unless_passing(ret, error);
}

/* ---- Waiting --------------------------------------------------------------------------------- */

static void files_wait(void *opaque, uint32_t timeout_ms)
{
	struct files_board *board = opaque;

	board_sleep_ms(MIN(timeout_ms, is_ours(board) ? board->pause_ms : timeout_ms));
	if (!is_ours(board))
		return;
	board->pause_ms = MIN(2 * board->pause_ms, MOST_PAUSE_MS);
	check_own(board);
}

static bool files_is_gone(void *opaque, uint32_t rank)
{
	(void)opaque;
	(void)rank;
	return false;
}

/* ---- Ending ---------------------------------------------------------------------------------- */

struct removal {
	int folder_fd;
	char begin[GATHER_NAME_BYTES + 1];
};

static int remove_file(void *opaque, const char *name)
{
	const struct removal *removal = opaque;

	if (!strncmp(name, removal->begin, strlen(removal->begin)))
		ring_shelf_remove(removal->folder_fd, name);
	return 0;
}

static void files_drop(void *opaque, const char *scope)
{
	struct files_board *board = opaque;
	struct removal removal;

	if (!is_ours(board) || !board_is_name(scope))
		return;
	board_table_drop(&board->own, scope);
	if (board->rank)
		return;
	snprintf(removal.begin, sizeof(removal.begin), "%s.", scope);
	removal.folder_fd = ring_shelf_enter(&board->shelf, NULL);
	if (removal.folder_fd >= 0)
		ring_shelf_list(&board->shelf, removal.folder_fd, remove_file, &removal, NULL);
	ring_shelf_leave(removal.folder_fd);
}

static void free_board(struct files_board *board)
{
	board_table_free(&board->own);
	ring_shelf_close(&board->shelf);
	free(board);
}

static void files_close(void *opaque)
{
	struct files_board *board = opaque;

	if (!board || !is_ours(board))
		return;
	if (!board->rank)
		ring_shelf_destroy(&board->shelf);
	free_board(board);
}

/* ---- Opening --------------------------------------------------------------------------------- */

static int open_shelf(struct files_board *board, const struct gather_board_config *config,
		      struct base_error *error)
{
	const size_t room = strlen(config->directory) + strlen(config->name) + 32;
	char *path = malloc(room);
	int ret;

	if (!path)
		return base_no_memory(error, "a path", room);
	snprintf(path, room, "%s/" FOLDER_MARK "%s", config->directory, config->name);
	ret = ring_shelf_open(&board->shelf, path, error);
	free(path);
	if (!ret && !config->rank)
		ring_shelf_destroy_old(&board->shelf, config->directory, FOLDER_MARK,
				       FORGOTTEN_AFTER_S);
	return ret;
}

static int files_open(void **out, const struct gather_board_config *config,
		      struct base_error *error)
{
	struct files_board *board;
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
	board->pause_ms = LEAST_PAUSE_MS;
	board->check_ms = LEAST_CHECK_MS;
	board->check_ns = base_now_ns() + base_ms_to_ns(LEAST_CHECK_MS);
	ret = open_shelf(board, config, error);
	if (ret) {
		free_board(board);
		return ret;
	}
	*out = board;
	return 0;
}

const struct gather_board_ops gather_board_files = {
	.id = "files",
	.open = files_open,
	.post = files_post,
	.look = files_look,
	.collect = files_collect,
	.wait = files_wait,
	.is_gone = files_is_gone,
	.drop = files_drop,
	.close = files_close,
};
