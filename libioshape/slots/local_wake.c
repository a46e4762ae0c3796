/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Waking waiters, by a futex word in the first page of the pool's file. The word counts what may
 * have freed a slot. It is never read or written through memory: another user may cut the file
 * short, and then a load raises SIGBUS, where futex() and pread() only fail.
 */
#define _GNU_SOURCE
#include "slots/local.h"

#include <errno.h>
#include <limits.h>
#include <linux/futex.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#define PAGE_BYTES 4096u
/* Without a word that others can change, a waiter looks so often. */
#define BLIND_MS 20u

static uint32_t *map(int flags, int fd, uint32_t *at)
{
	const size_t word = offsetof(struct slots_file_head, wake) / sizeof(uint32_t);
	uint32_t *page = mmap(at ? at - word : NULL, PAGE_BYTES, PROT_READ | PROT_WRITE,
			      MAP_SHARED | flags, fd, 0);

	if (page == MAP_FAILED)
		return NULL;
	/* A child that mapped the file would keep its parent's locks. */
	madvise(page, PAGE_BYTES, MADV_DONTFORK);
	return page + word;
}

int local_wake_init(struct local_pool *pool)
{
	pool->word = map(MAP_ANONYMOUS, -1, NULL);
	return pool->word ? 0 : -ENOMEM;
}

void local_wake_map(struct local_pool *pool, int fd)
{
	/* In the place of the other one: a thread that waits may be about to use it. If that fails
	 * futex() fails, too, and waiters look by themselves. */
	atomic_store(&pool->mapped, true);
	if (!map(MAP_FIXED, fd, pool->word))
		errno = 0;
}

void local_wake_free(struct local_pool *pool)
{
	const size_t word = offsetof(struct slots_file_head, wake) / sizeof(uint32_t);

	munmap(pool->word - word, PAGE_BYTES);
}

void local_wake(void *opaque)
{
	struct local_pool *pool = opaque;

	syscall(SYS_futex, pool->word, FUTEX_WAKE_OP, INT_MAX, (void *)0, pool->word,
		FUTEX_OP(FUTEX_OP_ADD, 1, FUTEX_OP_CMP_LT, 0));
}

static uint32_t value_of(struct local_pool *pool)
{
	uint32_t value = 0;

	if (!atomic_load(&pool->mapped))
		return __atomic_load_n(pool->word, __ATOMIC_RELAXED);
	pthread_mutex_lock(&pool->lock);
	if (pread(pool->fd, &value, sizeof(value), offsetof(struct slots_file_head, wake)) < 0)
		errno = 0;
	pthread_mutex_unlock(&pool->lock);
	return value;
}

static void nap(uint64_t ns)
{
	const struct timespec pause = { .tv_nsec = (long)MIN(ns, 999999999u) };

	nanosleep(&pause, NULL);
}

int local_wait(void *opaque, uint32_t timeout_ms, struct base_error *error)
{
	struct local_pool *pool = opaque;
	const struct timespec timeout = { .tv_sec = timeout_ms / 1000,
					  .tv_nsec = (long)(timeout_ms % 1000) * 1000000 };

	(void)error;
	if (syscall(SYS_futex, pool->word, FUTEX_WAIT, pool->seen, &timeout, NULL, 0) &&
	    errno == EFAULT)
		nap(base_ms_to_ns(MIN(timeout_ms, BLIND_MS)));
	/* All that happens from here on ends the next wait. */
	pool->seen = value_of(pool);
	return 0;
}
