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
	atomic_store(&pool->listened, UINT32_MAX);
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

uint32_t local_wake_bit(uint64_t ticket)
{
	return UINT32_C(1) << ticket % 32;
}

void local_wake(struct local_pool *pool, uint32_t bits)
{
	static uint32_t unused;

	/* The kernel adds to the word; nobody waits for the other one. */
	syscall(SYS_futex, &unused, FUTEX_WAKE_OP, 1, (void *)0, pool->word,
		FUTEX_OP(FUTEX_OP_ADD, 1, FUTEX_OP_CMP_LT, 0));
	syscall(SYS_futex, pool->word, FUTEX_WAKE_BITSET, INT_MAX, NULL, NULL, bits);
}

void local_interrupt(void *opaque)
{
	struct local_pool *pool = opaque;

	local_wake(pool, atomic_load(&pool->listened));
}

/* The bits of the requests of this process that wait; all if there are none. */
static uint32_t bits_of_waiters(struct local_pool *pool)
{
	uint32_t bits = 0;

	pthread_mutex_lock(&pool->lock);
	for (const struct local_member *member = pool->members; member; member = member->next) {
		if (!member->holding)
			bits |= local_wake_bit(member->ticket);
	}
	pthread_mutex_unlock(&pool->lock);
	return bits ? bits : UINT32_MAX;
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
	const uint64_t until_ns = base_now_ns() + base_ms_to_ns(timeout_ms);
	const struct timespec until = { .tv_sec = (time_t)(until_ns / 1000000000),
					.tv_nsec = (long)(until_ns % 1000000000) };

	(void)error;
	atomic_store(&pool->listened, bits_of_waiters(pool));
	if (syscall(SYS_futex, pool->word, FUTEX_WAIT_BITSET, pool->seen, &until, NULL,
		    atomic_load(&pool->listened)) &&
	    errno == EFAULT)
		nap(base_ms_to_ns(MIN(timeout_ms, BLIND_MS)));
	/* All that happens from here on ends the next wait. */
	pool->seen = value_of(pool);
	return 0;
}
