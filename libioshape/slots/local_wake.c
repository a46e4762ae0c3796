/* SPDX-License-Identifier: Apache-2.0 */
/* FIFOs that wake processes whose requests were granted. A wake is a hint: heartbeats tell, too. */
#define _GNU_SOURCE
#include "slots/local.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <poll.h>
#include <stdio.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#define FIFO_NAME_BYTES 64
#define MOST_HASTY 16

static void fifo_name(char name[FIFO_NAME_BYTES], const struct local_file *file, uint32_t number)
{
	snprintf(name, FIFO_NAME_BYTES, "ioshape-%016" PRIx64 "-%u.v%u.wake", file->hash, number,
		 LOCAL_VERSION);
}

/* With one name only: a second one may be given by anybody to a FIFO of anybody's. */
static bool is_a_wake(const struct stat *stat)
{
	return S_ISFIFO(stat->st_mode) && stat->st_nlink == 1;
}

/*
 * For reading and writing: so opening does not wait for the other side, and writing raises no
 * SIGPIPE when there is none. Looks before it opens: under this name might be anything, even
 * the pool's file, whose locks would end with the descriptor.
 */
static int open_fifo(const struct local_file *file, const char *name)
{
	struct stat stat;
	int fd;

	if (fstatat(file->folder_fd, name, &stat, AT_SYMLINK_NOFOLLOW) || !is_a_wake(&stat))
		return -1;
	fd = openat(file->folder_fd, name, O_RDWR | O_NONBLOCK | O_NOFOLLOW | O_CLOEXEC);
	if (fd >= 0 && (fstat(fd, &stat) || !is_a_wake(&stat))) {
		close(fd);
		fd = -1;
	}
	return fd;
}

void local_expect_wake(struct local_pool *pool, struct local_file *file)
{
	char name[FIFO_NAME_BYTES];
	int fd, before = atomic_load(&pool->fifo);
	bool made;

	if (before >= 0 && pool->fifo_opened == file->opened)
		return;
	pool->fifo_opened = file->opened;
	fifo_name(name, file, pool->number);
	/* What a dead process left serves as well, whoever's it was. */
	made = !mkfifoat(file->folder_fd, name, 0666);
	if (!made && errno != EEXIST)
		return;
	fd = open_fifo(file, name);
	if (fd < 0)
		return;
	/* For all users, whatever the umask. What was there is left as it is: it may be anybody's.
	 */
	if (made && fchmod(fd, 0666))
		errno = 0;
	if (before < 0) {
		atomic_store(&pool->fifo, fd);
		return;
	}
	/* A thread may be waiting on the old one: the descriptor stays, whatever is behind it. */
	dup3(fd, before, O_CLOEXEC);
	close(fd);
}

void local_remove_fifo(struct local_file *file, uint32_t number)
{
	char name[FIFO_NAME_BYTES];

	fifo_name(name, file, number);
	unlinkat(file->folder_fd, name, 0);
}

void local_remove_fifos(int folder_fd, uint64_t hash)
{
	int fd = openat(folder_fd, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
	DIR *folder = fd >= 0 ? fdopendir(fd) : NULL;
	struct dirent *entry;
	char begin[40], end[16];

	if (!folder) {
		if (fd >= 0)
			close(fd);
		return;
	}
	snprintf(begin, sizeof(begin), "ioshape-%016" PRIx64 "-", hash);
	snprintf(end, sizeof(end), ".v%u.wake", LOCAL_VERSION);
	for (long looked = 0; looked < LOCAL_MOST_ENTRIES && (entry = readdir(folder)); looked++) {
		if (!strncmp(entry->d_name, begin, strlen(begin)) && strstr(entry->d_name, end))
			unlinkat(folder_fd, entry->d_name, 0);
	}
	closedir(folder);
}

void local_end_wake(struct local_pool *pool, struct local_file *file)
{
	if (atomic_load(&pool->fifo) >= 0)
		local_remove_fifo(file, pool->number);
}

void local_wake(struct local_file *file, const uint32_t *numbers, uint32_t count)
{
	char name[FIFO_NAME_BYTES];

	for (uint32_t i = 0; i < count; i++) {
		int fd;

		fifo_name(name, file, numbers[i]);
		fd = open_fifo(file, name);
		if (fd < 0)
			continue;
		/* A full one has been heard of already. */
		if (write(fd, "", 1) < 0)
			errno = 0;
		close(fd);
	}
}

static void drain(int fd)
{
	char bytes[512];

	if (read(fd, bytes, sizeof(bytes)) < 0)
		errno = 0;
}

/*
 * Anybody can write into the FIFO. Bytes that are there already when we come to wait, many times in
 * a row, are not from those who let us in.
 */
static void slow_down(struct local_pool *pool, uint64_t began)
{
	const struct timespec pause = { .tv_nsec = 5000000 };

	pool->hasty = base_now_ns() - began < 1000000 ? pool->hasty + 1 : 0;
	if (pool->hasty > MOST_HASTY)
		nanosleep(&pause, NULL);
}

int local_wait(struct local_pool *pool, uint32_t timeout_ms, struct base_error *error)
{
	struct pollfd polled[2] = {
		{ .fd = pool->interrupt, .events = POLLIN },
		{ .fd = atomic_load(&pool->fifo), .events = POLLIN }, /* -1 is passed over */
	};
	const uint64_t began = base_now_ns();
	int ready = poll(polled, 2, (int)MIN(timeout_ms, INT32_MAX));

	if (ready < 0 && errno != EINTR)
		return base_refuse(error, IOSHAPE_E_COORDINATOR,
				   "waiting for a slot of pool \"%s\" failed (errno %d)",
				   pool->config.pool, errno);
	if (ready <= 0)
		return 0;
	if (polled[0].revents)
		drain(polled[0].fd);
	if (polled[1].revents) {
		drain(polled[1].fd);
		slow_down(pool, began);
	}
	return 0;
}
