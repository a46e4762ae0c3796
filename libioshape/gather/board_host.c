/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The board of ranks on one host: notes are files in a folder in memory, kept as the board of
 * files keeps them (board_files.c).
 *
 * Ranks in containers may not see each other's folder, and the memory may be full. Then all ranks
 * move to the board of files beside the generations, and take with them what they had posted. How
 * they agree on it: who sees the folder is told by its page (news.c). Who does not see it asks
 * beside the generations, with a number that nobody has used before; rank 0 answers with that
 * number.
 */
#define _GNU_SOURCE
#include "gather/board.h"
#include "gather/board_files.h"
#include "gather/news.h"
#include "gather/place.h"
#include "ring/ring.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

/* ---- The folder ------------------------------------------------------------------------------ */

/*
 * Each rank has a file life-<rank> in the folder, which it has locked. The kernel drops the lock
 * when the process ends, however it ends. A folder whose life-0 is not locked is a dead job's.
 */
struct host_folder {
	char place[PLACE_PATH_BYTES];                         /* in which it is; "" for none */
	char path[PLACE_PATH_BYTES + GATHER_NAME_BYTES + 16]; /* its own */
	uint32_t rank;
	int fd;
	int life_fd;  /* our own, locked */
	int rank0_fd; /* rank 0's; rank 0: -1 */
	struct news news;
};

#define FOLDER_MARK "board-"
#define LIFE "life"
#define RANK0_FILE LIFE "-0"

static void host_folder_init(struct host_folder *folder, const struct gather_board_config *config)
{
	memset(folder, 0, sizeof(*folder));
	folder->fd = folder->life_fd = folder->rank0_fd = -1;
	folder->rank = config->rank;
	place_find(folder->place, config->memory, NULL);
	snprintf(folder->path, sizeof(folder->path), "%s/" FOLDER_MARK "%s", folder->place,
		 config->name);
}

/* ---- Lives ----------------------------------------------------------------------------------- */

/* Locks belong to the open file, not to the process: a process may be several ranks. */
static bool is_locked(int fd)
{
	struct flock lock = { .l_type = F_WRLCK, .l_whence = SEEK_SET };

	return !fcntl(fd, F_OFD_GETLK, &lock) && lock.l_type != F_UNLCK;
}

static int open_life(int folder_fd, const char *name)
{
	return base_above_streams(
		openat(folder_fd, name, O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC));
}

static bool lives(int folder_fd, const char *name)
{
	const int fd = open_life(folder_fd, name);
	const bool locked = fd >= 0 && is_locked(fd);

	if (fd >= 0)
		close(fd);
	return locked;
}

/* It is locked before it has its name: what has one and is not locked is dead. */
static int begin_life(struct host_folder *folder)
{
	struct flock lock = { .l_type = F_WRLCK, .l_whence = SEEK_SET };
	char temporary[GATHER_NAME_BYTES], name[GATHER_NAME_BYTES];
	int fd, ret = 0;

	snprintf(temporary, sizeof(temporary), ".%016llx", (unsigned long long)base_random());
	board_name_of(name, LIFE, folder->rank);
	fd = base_own(openat(folder->fd, temporary,
			     O_RDWR | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0600));
	if (fd < 0)
		return -errno;
	if (fcntl(fd, F_OFD_SETLK, &lock) || linkat(folder->fd, temporary, folder->fd, name, 0))
		ret = -errno;
	unlinkat(folder->fd, temporary, 0);
	if (ret)
		base_close(fd);
	else
		folder->life_fd = fd;
	return ret;
}

/* ---- Rank 0 takes a folder ------------------------------------------------------------------- */

static int open_folder(const char *path)
{
	const int fd = base_own(open(path, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC));

	return fd < 0 ? -errno : fd;
}

struct sweeping {
	const struct host_folder *folder;
	int place_fd;
};

/* Of a dead job: nobody makes one while we hold the place's lock. */
static int sweep_one(void *opaque, const char *name)
{
	const struct sweeping *sweeping = opaque;
	struct ring_private_folder shelf = { .owner = geteuid() };
	char path[sizeof(sweeping->folder->path) + NAME_MAX];
	int fd;

	if (strncmp(name, FOLDER_MARK, strlen(FOLDER_MARK)) != 0)
		return 0;
	fd = base_above_streams(
		openat(sweeping->place_fd, name, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC));
	if (fd < 0)
		return 0;
	snprintf(path, sizeof(path), "%s/%s", sweeping->folder->place, name);
	shelf.path = path;
	if (!lives(fd, RANK0_FILE))
		ring_private_destroy(&shelf);
	close(fd);
	return 0;
}

static int make_folder(struct host_folder *folder, int place_fd)
{
	const struct ring_private_folder place = { .path = folder->place, .owner = geteuid() };
	struct sweeping sweeping = { folder, place_fd };
	int ret;

	ring_private_list(&place, place_fd, sweep_one, &sweeping, NULL);
	if (mkdir(folder->path, 0700))
		return errno == EEXIST ? -EADDRINUSE : -errno;
	folder->fd = open_folder(folder->path);
	ret = folder->fd < 0 ? folder->fd : news_make(&folder->news, folder->fd);
	/* Last: with it the others come. */
	return ret ? ret : begin_life(folder);
}

/* The descriptor of the folder itself is left alone if keep_fd is set. */
static void host_folder_leave(struct host_folder *folder, bool keep_fd)
{
	news_unmap(&folder->news);
	base_close(folder->life_fd);
	base_close(folder->rank0_fd);
	if (!keep_fd)
		base_close(folder->fd);
	folder->life_fd = folder->rank0_fd = folder->fd = -1;
}

/*
 * Rank 0 makes it, and removes those of dead jobs. 0 or a negative errno; -EADDRINUSE: a rank 0
 * that lives has one of this name.
 */
static int host_folder_take(struct host_folder *folder)
{
	const struct ring_private_folder shelf = { .path = folder->path, .owner = geteuid() };
	const int flags = O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC;
	const int place_fd = base_own(open(folder->place, flags));
	int ret = 0;

	if (place_fd < 0)
		return -errno;
	if (flock(place_fd, LOCK_EX | LOCK_NB))
		ret = errno == EWOULDBLOCK ? -EADDRINUSE : -errno;
	if (!ret) {
		ret = make_folder(folder, place_fd);
		if (ret && ret != -EADDRINUSE)
			ring_private_destroy(&shelf);
		if (ret)
			host_folder_leave(folder, false);
	}
	base_close(place_fd);
	return ret;
}

/* ---- The others ------------------------------------------------------------------------------ */

/* The others: -ENOENT if there is none yet, -EEXIST if it has had a rank of this number. */
static int host_folder_join(struct host_folder *folder)
{
	int ret;

	folder->fd = *folder->place ? open_folder(folder->path) : -ENOENT;
	if (folder->fd < 0)
		return folder->fd;
	folder->rank0_fd = base_own(open_life(folder->fd, RANK0_FILE));
	/* No rank 0, or a dead job's: ours is still to come. */
	ret = folder->rank0_fd >= 0 && is_locked(folder->rank0_fd) ? 0 : -ENOENT;
	if (!ret)
		ret = news_find(&folder->news, folder->fd);
	if (!ret)
		ret = begin_life(folder);
	if (ret)
		host_folder_leave(folder, false);
	return ret;
}

/* Whether this rank has been here, and has ended. */
static bool host_folder_is_gone(const struct host_folder *folder, uint32_t rank)
{
	char name[GATHER_NAME_BYTES];
	bool gone;
	int fd;

	if (!rank)
		return folder->rank0_fd >= 0 && !is_locked(folder->rank0_fd);
	board_name_of(name, LIFE, rank);
	fd = open_life(folder->fd, name);
	/* Without a file it has not come yet. */
	gone = fd >= 0 && !is_locked(fd);
	if (fd >= 0)
		close(fd);
	return gone;
}

struct counting {
	bool *here;
	uint32_t ranks;
};

static int count_life(void *opaque, const char *name)
{
	const struct counting *counting = opaque;
	unsigned long rank;
	char *end;

	if (strncmp(name, LIFE "-", strlen(LIFE "-")) != 0)
		return 0;
	rank = strtoul(name + strlen(LIFE "-"), &end, 10);
	if (!*end && rank < counting->ranks)
		counting->here[rank] = true;
	return 0;
}

/* Sets here[rank] for all who have come. */
static void host_folder_count(const struct host_folder *folder, bool *here, uint32_t ranks)
{
	const struct ring_private_folder shelf = { .path = (char *)(uintptr_t)folder->path };
	struct counting counting = { here, ranks };

	ring_private_list(&shelf, folder->fd, count_life, &counting, NULL);
}

/* ---- The board ------------------------------------------------------------------------------- */

#define MOST_PAUSE_MS 100u
#define DEATHS_MS 100u    /* nothing wakes anybody when a rank ends: it is asked for this often */
#define PATIENCE_MS 1000u /* before anything is done beside the generations */
#define RESTS 3u          /* times as long as a look at many ranks took, until the next one */

/* Of the handshake beside the generations. */
#define SCOPE "place"
#define QUESTION "elsewhere"
#define ANSWER "moved"

/* Why the notes have moved; or an errno, negative: they cannot be kept in memory. */
#define NOT_SHARED 1

struct host_board {
	struct gather_board base;
	char place_id[GATHER_PLACE_BYTES];
	struct host_folder folder;

	struct gather_board *memory; /* boards of files: in the folder, or NULL */
	struct gather_board *beside; /* and beside the generations, when it is needed */
	int moved;                   /* why */
	char remark[256];
	uint64_t rest_until_ns;

	/* Rank 0, until all ranks are here. */
	bool *here;
	bool complete;
	uint64_t next_count_ns, patient_until_ns;
};

/* ---- Moving beside the generations ----------------------------------------------------------- */

static int open_beside(struct host_board *board, struct base_error *error)
{
	return board->beside ? 0 :
			       gather_board_open(&board->beside, &gather_board_files,
						 &board->base.config, error);
}

/* From now on our notes are beside the generations. */
static void begin_there(struct host_board *board, int why)
{
	board->moved = why;
	board->base.remark = board->remark;
	if (board->moved == NOT_SHARED)
		snprintf(board->remark, sizeof(board->remark),
			 "not all ranks of this host see the same /dev/shm: their notes are files "
			 "beside the generations");
	else
		snprintf(board->remark, sizeof(board->remark),
			 "notes of ranks cannot be kept in memory (%s): they are files beside the "
			 "generations",
			 ioshape_strerror(board->moved));
}

/* What fails now is tried again at the next call. */
static int follow(struct host_board *board, struct base_error *error)
{
	const struct news_page *page = board->folder.news.page;
	int ret = 0;

	if (!board->moved && page && atomic_load(&page->moved)) {
		ret = open_beside(board, error);
		if (!ret)
			ret = files_copy(board->beside, board->memory, error);
		if (!ret)
			begin_there(board, atomic_load(&page->moved));
	}
	return ret;
}

static int move(struct host_board *board, int why, struct base_error *error)
{
	news_move(&board->folder.news, why);
	return follow(board, error);
}

/* For who has nothing in memory to take along. */
static int begin_beside(struct host_board *board, int why, struct base_error *error)
{
	const int ret = open_beside(board, error);

	if (!ret)
		begin_there(board, why);
	return ret;
}

/* Memory may be full, or somebody has cleared it away under the feet of the living. */
static bool is_reason_to_move(const struct host_board *board, int code)
{
	return code == -ENOSPC || code == -EDQUOT || code == -EROFS ||
	       (code == IOSHAPE_E_COORDINATOR && !host_folder_is_gone(&board->folder, 0) &&
		!atomic_load(&board->folder.news.page->closed));
}

/* ---- Rank 0: who is here --------------------------------------------------------------------- */

/* Somebody who does not see our folder. The question goes back as it is. */
static int answer(void *opaque, uint32_t rank, const struct base_buffer *note)
{
	struct host_board *board = opaque;
	const size_t bytes = strlen(board->place_id);
	char name[GATHER_NAME_BYTES];
	int ret = 0;

	/* It is still to come into our folder. */
	if (!board->moved && note->bytes > bytes && note->data[bytes] == ' ' &&
	    !memcmp(note->data, board->place_id, bytes))
		return 0;
	if (!board->moved)
		ret = move(board, NOT_SHARED, NULL);
	board_name_of(name, ANSWER, rank);
	if (!ret)
		ret = gather_board_post(board->beside, SCOPE, name, note->data, note->bytes, NULL);
	board->here[rank] |= !ret;
	return 0;
}

static void count_ranks(struct host_board *board)
{
	if (board->complete || base_now_ns() < board->next_count_ns)
		return;
	if (board->memory)
		host_folder_count(&board->folder, board->here, board->base.config.ranks);
	if (!board->beside && base_now_ns() >= board->patient_until_ns &&
	    files_are_beside(&board->base.config))
		open_beside(board, NULL);
	if (board->beside)
		gather_board_collect(board->beside, SCOPE, QUESTION, board->here, answer, board,
				     NULL);
	board->complete = !memchr(board->here, false, board->base.config.ranks * sizeof(bool));
	/* The questions of those who have come after all are left there. */
	if (board->complete && !board->moved && files_are_beside(&board->base.config) &&
	    !open_beside(board, NULL)) {
		gather_board_close(board->beside);
		board->beside = NULL;
	}
	board->next_count_ns = base_now_ns() + base_ms_to_ns(MOST_PAUSE_MS);
}

/* ---- Notes ----------------------------------------------------------------------------------- */

static int host_post(struct gather_board *base, const char *scope, const char *name,
		     const void *note, size_t bytes, struct base_error *error)
{
	struct host_board *board = (struct host_board *)base;
	struct base_error why = { 0 };
	int ret = follow(board, error);

	if (ret)
		return ret;
	if (board->moved)
		return gather_board_post(board->beside, scope, name, note, bytes, error);
	ret = gather_board_post(board->memory, scope, name, note, bytes, &why);
	if (!ret)
		news_tell(&board->folder.news, name);
	else if (is_reason_to_move(board, ret))
		/* The note is among those that are taken along. */
		ret = move(board, ret == IOSHAPE_E_COORDINATOR ? -ENOENT : ret, error);
	else
		base_pass_on(error, &why);
	return ret;
}

static int host_look(struct gather_board *base, const char *scope, const char *name,
		     struct base_buffer *note, struct base_error *error)
{
	struct host_board *board = (struct host_board *)base;
	int ret = follow(board, error);

	if (ret)
		return ret;
	if (board->moved)
		return gather_board_look(board->beside, scope, name, note, error);
	news_watch(&board->folder.news, name);
	return gather_board_look(board->memory, scope, name, note, error);
}

/* What costs more, the more ranks there are, is not done all the time. */
static void rest_after(struct host_board *board, uint64_t begin_ns)
{
	const uint64_t now = base_now_ns();

	board->rest_until_ns = MAX(board->rest_until_ns, now) + RESTS * (now - begin_ns);
}

static int host_collect(struct gather_board *base, const char *scope, const char *prefix,
			const bool *have, gather_found_fn *found, void *user,
			struct base_error *error)
{
	struct host_board *board = (struct host_board *)base;
	int ret = follow(board, error);
	const uint64_t begin_ns = base_now_ns();
	char name[GATHER_NAME_BYTES];

	if (ret)
		return ret;
	if (board->moved)
		return gather_board_collect(board->beside, scope, prefix, have, found, user, error);
	board_name_of(name, prefix, 0);
	news_watch(&board->folder.news, name);
	ret = gather_board_collect(board->memory, scope, prefix, have, found, user, error);
	rest_after(board, begin_ns);
	return ret;
}

static void host_wait(struct gather_board *base, uint32_t timeout_ms)
{
	struct host_board *board = (struct host_board *)base;
	uint64_t now = base_now_ns();

	timeout_ms = MIN(timeout_ms, DEATHS_MS);
	if (follow(board, NULL)) {
		board_sleep_ms(timeout_ms);
	} else if (board->moved) {
		gather_board_wait(board->beside, timeout_ms);
	} else {
		news_wait(&board->folder.news, now + base_ms_to_ns(timeout_ms));
		now = base_now_ns();
		if (now < board->rest_until_ns)
			board_sleep_ms((uint32_t)((board->rest_until_ns - now) / 1000000));
	}
	if (!board->base.config.rank)
		count_ranks(board);
}

static bool host_is_gone(struct gather_board *base, uint32_t rank)
{
	struct host_board *board = (struct host_board *)base;
	const uint64_t begin_ns = base_now_ns();
	bool gone = false;

	if (!board->moved) {
		gone = host_folder_is_gone(&board->folder, rank);
		rest_after(board, begin_ns);
	}
	return gone;
}

static void host_drop(struct gather_board *base, const char *scope)
{
	struct host_board *board = (struct host_board *)base;

	if (!follow(board, NULL))
		gather_board_drop(board->moved ? board->beside : board->memory, scope);
}

/* ---- Rank 0 makes the folder ----------------------------------------------------------------- */

static int open_as_rank0(struct host_board *board, struct base_error *error)
{
	const uint64_t end_ns = base_now_ns() + base_ms_to_ns(board->base.config.deadline_ms);
	int ret;

	board->here = calloc(board->base.config.ranks, sizeof(bool));
	if (!board->here)
		return base_no_memory(error, "ranks of a board", board->base.config.ranks);
	board->here[0] = true;
	board->patient_until_ns = base_now_ns() + base_ms_to_ns(PATIENCE_MS);
	while ((ret = host_folder_take(&board->folder)) == -EADDRINUSE && base_now_ns() < end_ns)
		board_sleep_ms(20);
	if (ret == -EADDRINUSE)
		return base_fail(error, ret,
				 "another group with the same token still runs on this host (%s is "
				 "its folder)" BASE_REMEDY "end it, or give this one another token",
				 board->folder.path);
	return ret ? begin_beside(board, ret, error) : 0;
}

/* ---- The others join it ---------------------------------------------------------------------- */

/* "<what we see> <a number>" */
#define QUESTION_BYTES (GATHER_PLACE_BYTES + 24)

/* Whether rank 0 has answered. */
static bool ask_rank0(struct host_board *board, const char *question)
{
	char name[GATHER_NAME_BYTES];
	struct base_buffer note = { 0 };
	bool answered;
	int ret = 0;

	if (!board->beside) {
		ret = open_beside(board, NULL);
		board_name_of(name, QUESTION, board->base.config.rank);
		if (!ret)
			ret = gather_board_post(board->beside, SCOPE, name, question,
						strlen(question), NULL);
	}
	board_name_of(name, ANSWER, board->base.config.rank);
	if (!ret)
		ret = gather_board_look(board->beside, SCOPE, name, &note, NULL);
	answered = !ret && note.bytes == strlen(question) &&
		   !memcmp(note.data, question, note.bytes);
	base_buffer_free(&note);
	return answered;
}

static int say_why(const struct host_board *board, int code, struct base_error *error)
{
	if (code == -EEXIST)
		return base_fail(error, code,
				 "in %s is another group with the same token, which has or had a "
				 "rank %" PRIu32 BASE_REMEDY
				 "end it, or give this one another token",
				 board->folder.path, board->base.config.rank);
	return base_refuse(
		error, -ETIMEDOUT,
		"rank 0 of the group has not come to %s within %" PRIu32
		" s (nor beside the generations)" BASE_REMEDY
		"see whether it failed, runs on another host, or uses another version of "
		"this library",
		*board->folder.place ? board->folder.path : "this host",
		board->base.config.deadline_ms / 1000);
}

static int open_as_other(struct host_board *board, struct base_error *error)
{
	char question[QUESTION_BYTES];
	const uint64_t begin_ns = base_now_ns();
	const uint64_t end_ns = begin_ns + base_ms_to_ns(board->base.config.deadline_ms);
	bool answered = false;
	uint32_t pause_ms = 1;
	int ret;

	snprintf(question, sizeof(question), "%s %016llx", board->place_id,
		 (unsigned long long)base_random());
	while ((ret = host_folder_join(&board->folder)) && !answered && base_now_ns() < end_ns) {
		if (base_now_ns() - begin_ns < base_ms_to_ns(PATIENCE_MS)) {
			board_sleep_ms(pause_ms);
			pause_ms = MIN(2 * pause_ms, MOST_PAUSE_MS);
		} else {
			answered = ask_rank0(board, question);
			if (!answered)
				board_sleep_ms(MOST_PAUSE_MS);
		}
	}
	if (answered && ret)
		return begin_beside(board, NOT_SHARED, error);
	if (ret)
		return say_why(board, ret, error);
	/* It has come after all. */
	if (board->beside)
		gather_board_drop(board->beside, SCOPE);
	return 0;
}

/* ---- Opening and closing --------------------------------------------------------------------- */

static void host_close(struct gather_board *base)
{
	struct host_board *board = (struct host_board *)base;

	if (!base->config.rank && board->folder.news.page)
		atomic_store(&board->folder.news.page->closed, 1);
	/* Rank 0: while its life is locked, nobody takes the folder for a dead job's. */
	gather_board_close(board->memory);
	gather_board_close(board->beside);
	host_folder_leave(&board->folder, board->memory != NULL);
	free(board->here);
	free(board);
}

static int host_open(struct gather_board **out, const struct gather_board_config *config,
		     struct base_error *error)
{
	struct host_board *board = board_new(sizeof(*board), &gather_board_host, config, error);
	int ret;

	if (!board)
		return -ENOMEM;
	host_folder_init(&board->folder, config);
	place_identify(board->place_id, board->folder.place);
	ret = config->rank ? open_as_other(board, error) : open_as_rank0(board, error);
	if (!ret && !board->moved)
		ret = files_open_held(&board->memory, config, board->folder.path, board->folder.fd,
				      error);
	if (ret)
		host_close(&board->base);
	else
		*out = &board->base;
	return ret;
}

const struct gather_board_ops gather_board_host = {
	.id = "host",
	.open = host_open,
	.post = host_post,
	.look = host_look,
	.collect = host_collect,
	.wait = host_wait,
	.is_gone = host_is_gone,
	.drop = host_drop,
	.close = host_close,
};
