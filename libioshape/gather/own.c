/* SPDX-License-Identifier: Apache-2.0 */
#define _GNU_SOURCE
#include "gather/own.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdlib.h>
#include <unistd.h>

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_once_t once = PTHREAD_ONCE_INIT;
static int *owned;
static size_t count, room;

static void before_fork(void)
{
	pthread_mutex_lock(&lock);
}

static void in_parent(void)
{
	pthread_mutex_unlock(&lock);
}

/* Only what may be done in a child of a process with threads. */
static void in_child(void)
{
	for (size_t i = 0; i < count; i++)
		close(owned[i]);
	count = 0;
	pthread_mutex_unlock(&lock);
}

/* The library is never unloaded (-z nodelete), so the handlers stay valid. */
static void watch_forks(void)
{
	pthread_atfork(before_fork, in_parent, in_child);
}

static void add(int fd)
{
	if (count == room) {
		const size_t more = room ? 2 * room : 16;
		int *grown = realloc(owned, more * sizeof(*owned));

		if (!grown)
			return;
		owned = grown;
		room = more;
	}
	owned[count++] = fd;
}

/* No fork() happens between the opening and our knowing of it. */
int gather_own_open(int folder_fd, const char *path, int flags, mode_t mode)
{
	int fd;

	pthread_once(&once, watch_forks);
	pthread_mutex_lock(&lock);
	fd = openat(folder_fd, path, flags | O_CLOEXEC, mode);
	if (fd >= 0)
		add(fd);
	else
		fd = -errno;
	pthread_mutex_unlock(&lock);
	return fd;
}

static void forget(int fd)
{
	for (size_t i = 0; i < count; i++) {
		if (owned[i] == fd) {
			owned[i] = owned[--count];
			break;
		}
	}
	if (!count) {
		free(owned);
		owned = NULL;
		room = 0;
	}
}

void gather_own_close(int fd)
{
	if (fd < 0)
		return;
	pthread_mutex_lock(&lock);
	forget(fd);
	close(fd);
	pthread_mutex_unlock(&lock);
}
