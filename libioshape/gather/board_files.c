/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The board of ranks that have nothing in common but a filesystem: a folder with a file for each
 * note, named <scope>.<name>.
 *
 * Nobody knows who has ended, and a folder of an earlier job may be there: its notes are seen until
 * rank 0 drops their scopes.
 */
#define _GNU_SOURCE
#include "gather/board_files.h"

#include "ring/ring.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define FOLDER_MARK ".ioshape-board-"
#define FORGOTTEN_AFTER_S (24 * 3600)
#define MOST_PAUSE_MS 250u

struct files_board {
	struct gather_board base;
	struct ring_private_folder shelf;
	int held_fd; /* the folder; -1: it is opened anew each time */
	struct board_own own;
};

/* Nobody but rank 0 makes it again: otherwise a rank that ends late would leave it behind. */
static int enter(struct files_board *board, struct base_error *error)
{
	int fd = board->held_fd;

	if (fd < 0)
		fd = ring_private_enter(&board->shelf, error);
	if (fd == -ENOENT && !board->base.config.rank && !ring_private_make(&board->shelf))
		fd = ring_private_enter(&board->shelf, error);
	return fd;
}

static void leave(const struct files_board *board, int folder_fd)
{
	if (folder_fd != board->held_fd)
		ring_private_leave(folder_fd);
}

static int is_away(const struct files_board *board, struct base_error *error)
{
	return base_refuse(
		error, IOSHAPE_E_COORDINATOR,
		"the folder %s is gone: rank 0 of the group has ended, or somebody removed it",
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
		ret = fd < 0 ? fd : ring_private_put(&board->shelf, fd, file, bytes, count, error);
		leave(board, fd);
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
	if (ring_private_has(check->folder_fd, file))
		return 0;
	return ring_private_put(&check->board->shelf, check->folder_fd, file, entry->data,
				entry->bytes, NULL);
}

/* Whether our own notes are still there: an earlier job's rank 0 may have taken them away as it
 * ended. */
static void check_own(struct files_board *board)
{
	struct check check = { .board = board };

	if (!board_own_is_due(&board->own))
		return;
	check.folder_fd = enter(board, NULL);
	if (check.folder_fd >= 0)
		board_table_each(&board->own.notes, check_one, &check);
	leave(board, check.folder_fd);
}

static int files_post(struct gather_board *base, const char *scope, const char *name,
		      const void *note, size_t bytes, struct base_error *error)
{
	struct files_board *board = (struct files_board *)base;
	int ret = board_own_keep(&board->own, scope, name, note, bytes, error);

	if (!ret)
		ret = put(board, scope, name, note, bytes, error);
	/* Who writes for long posts, and does not wait. */
	if (!ret)
		check_own(board);
	return ret;
}

/* ---- Looking --------------------------------------------------------------------------------- */

static int files_look(struct gather_board *base, const char *scope, const char *name,
		      struct base_buffer *note, struct base_error *error)
{
	struct files_board *board = (struct files_board *)base;
	char file[BOARD_KEY_BYTES];
	uint64_t stamp;
	int fd, ret;

	file_name(file, scope, name);
	fd = enter(board, error);
	ret = fd < 0 ? fd :
		       ring_private_get(&board->shelf, fd, file, GATHER_MAX_NOTE_BYTES, note,
					&stamp, error);
	leave(board, fd);
	if (!ret)
		board_own_see(&board->own, stamp);
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
	gather_found_fn *found;
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
	    !read_rank(name + length, board->base.config.ranks, &rank) || collection->have[rank])
		return 0;
	ret = ring_private_get(&board->shelf, collection->folder_fd, name, GATHER_MAX_NOTE_BYTES,
			       &collection->note, &stamp, collection->error);
	if (ret)
		return ret == -ENOENT ? 0 : ret;
	board_own_see(&board->own, stamp);
	collection->stopped = collection->found(collection->user, rank, &collection->note);
	return collection->stopped;
}

static int files_collect(struct gather_board *base, const char *scope, const char *prefix,
			 const bool *have, gather_found_fn *found, void *user,
			 struct base_error *error)
{
	struct files_board *board = (struct files_board *)base;
	struct collection collection = {
		.board = board, .have = have, .found = found, .user = user, .error = error
	};
	int ret;

	snprintf(collection.begin, sizeof(collection.begin), "%s.%s-", scope, prefix);
	ret = collection.folder_fd = enter(board, error);
	if (ret >= 0)
		ret = ring_private_list(&board->shelf, collection.folder_fd, collect_file,
					&collection, error);
	leave(board, collection.folder_fd);
	base_buffer_free(&collection.note);
	if (collection.stopped)
		return collection.stopped;
	return ret == -ENOENT ? is_away(board, error) : unless_passing(ret, error);
}

/* ---- Waiting --------------------------------------------------------------------------------- */

static void files_wait(struct gather_board *base, uint32_t timeout_ms)
{
	struct files_board *board = (struct files_board *)base;

	board_own_sleep(&board->own, timeout_ms, MOST_PAUSE_MS);
	check_own(board);
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
		ring_private_remove(removal->folder_fd, name);
	return 0;
}

static void files_drop(struct gather_board *base, const char *scope)
{
	struct files_board *board = (struct files_board *)base;
	struct removal removal;

	board_table_drop(&board->own.notes, scope);
	if (base->config.rank)
		return;
	snprintf(removal.begin, sizeof(removal.begin), "%s.", scope);
	removal.folder_fd = board->held_fd >= 0 ? board->held_fd :
						  ring_private_enter(&board->shelf, NULL);
	if (removal.folder_fd >= 0)
		ring_private_list(&board->shelf, removal.folder_fd, remove_file, &removal, NULL);
	leave(board, removal.folder_fd);
}

static void free_board(struct files_board *board)
{
	board_table_free(&board->own.notes);
	base_close(board->held_fd);
	ring_private_close(&board->shelf);
	free(board);
}

static void files_close(struct gather_board *base)
{
	struct files_board *board = (struct files_board *)base;

	if (!base->config.rank)
		ring_private_destroy(&board->shelf);
	free_board(board);
}

/* ---- Opening --------------------------------------------------------------------------------- */

static struct files_board *new_board(const struct gather_board_config *config,
				     struct base_error *error)
{
	struct files_board *board = board_new(sizeof(*board), &gather_board_files, config, error);

	if (!board)
		return NULL;
	board->held_fd = -1;
	board_own_begin(&board->own);
	return board;
}

/* "<directory>/.ioshape-board-<name>", to be freed. */
static char *name_folder(const struct gather_board_config *config)
{
	char *path;

	return asprintf(&path, "%s/" FOLDER_MARK "%s", config->directory, config->name) < 0 ? NULL :
											      path;
}

bool files_are_beside(const struct gather_board_config *config)
{
	char *path = name_folder(config);
	const bool is = path && !access(path, F_OK);

	free(path);
	return is;
}

static int files_open(struct gather_board **out, const struct gather_board_config *config,
		      struct base_error *error)
{
	struct files_board *board = new_board(config, error);
	char *path;
	int ret;

	if (!board)
		return -ENOMEM;
	path = name_folder(config);
	ret = path ? ring_private_open(&board->shelf, path, error) :
		     base_no_memory(error, "a path", strlen(config->directory));
	free(path);
	if (ret) {
		free_board(board);
		return ret;
	}
	if (!config->rank)
		ring_private_destroy_old(&board->shelf, config->directory, FOLDER_MARK,
					 FORGOTTEN_AFTER_S);
	*out = &board->base;
	return 0;
}

int files_open_held(struct gather_board **out, const struct gather_board_config *config,
		    const char *path, int folder_fd, struct base_error *error)
{
	struct files_board *board = new_board(config, error);

	if (!board)
		return -ENOMEM;
	board->shelf.owner = geteuid();
	board->shelf.path = strdup(path);
	if (!board->shelf.path) {
		free_board(board);
		return base_no_memory(error, "a path", strlen(path));
	}
	board->held_fd = folder_fd;
	*out = &board->base;
	return 0;
}

/* ---- Another place --------------------------------------------------------------------------- */

struct copying {
	struct gather_board *to;
	struct base_error *error;
};

static int copy_one(void *opaque, const struct board_entry *entry)
{
	const struct copying *copying = opaque;

	return files_post(copying->to, entry->scope, entry->name, entry->data, entry->bytes,
			  copying->error);
}

int files_copy(struct gather_board *to, const struct gather_board *from, struct base_error *error)
{
	struct copying copying = { to, error };

	return board_table_each(&((const struct files_board *)from)->own.notes, copy_one, &copying);
}

const struct gather_board_ops gather_board_files = {
	.id = "files",
	.open = files_open,
	.post = files_post,
	.look = files_look,
	.collect = files_collect,
	.wait = files_wait,
	.is_gone = board_cannot_tell,
	.drop = files_drop,
	.close = files_close,
};
