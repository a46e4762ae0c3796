/* SPDX-License-Identifier: Apache-2.0 */
#define _GNU_SOURCE
#include "gather/host_folder.h"

#include "gather/board.h"
#include "ring/ring.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#define FOLDER_MARK "board-"
#define LIFE "life"
#define RANK0_FILE LIFE "-0"

void host_folder_init(struct host_folder *folder, const struct gather_board_config *config)
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

void host_folder_leave(struct host_folder *folder, bool keep_fd)
{
	news_unmap(&folder->news);
	base_close(folder->life_fd);
	base_close(folder->rank0_fd);
	if (!keep_fd)
		base_close(folder->fd);
	folder->life_fd = folder->rank0_fd = folder->fd = -1;
}

int host_folder_take(struct host_folder *folder)
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

int host_folder_join(struct host_folder *folder)
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

bool host_folder_is_gone(const struct host_folder *folder, uint32_t rank)
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

void host_folder_count(const struct host_folder *folder, bool *here, uint32_t ranks)
{
	const struct ring_private_folder shelf = { .path = (char *)(uintptr_t)folder->path };
	struct counting counting = { here, ranks };

	ring_private_list(&shelf, folder->fd, count_life, &counting, NULL);
}
