/* SPDX-License-Identifier: Apache-2.0 */
/* Which process this is, without asking the kernel every time; and what it may do. */
#define _GNU_SOURCE
#include "base/base.h"

#include <stdatomic.h>
#include <stdio.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/resource.h>
#include <unistd.h>

/* In a page that is empty again in a child of fork(), however it was forked; NULL: there is none.
 */
static _Atomic pid_t *known;

static void make_page(void)
{
	const size_t bytes = (size_t)sysconf(_SC_PAGESIZE);
	void *page = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

	if (page == MAP_FAILED)
		return;
	if (madvise(page, bytes, MADV_WIPEONFORK))
		munmap(page, bytes);
	else
		known = page;
}

pid_t base_pid(void)
{
	static pthread_once_t once = PTHREAD_ONCE_INIT;
	pid_t pid;

	pthread_once(&once, make_page);
	if (!known)
		return getpid();
	pid = atomic_load_explicit(known, memory_order_relaxed);
	if (!pid) {
		pid = getpid();
		atomic_store_explicit(known, pid, memory_order_relaxed);
	}
	return pid;
}

uint64_t base_largest_file(void)
{
	struct rlimit limit;

	if (getrlimit(RLIMIT_FSIZE, &limit) || limit.rlim_cur == RLIM_INFINITY)
		return UINT64_MAX;
	return limit.rlim_cur;
}

/* What the kernel shows for users that have no number. */
#define NOBODY 65534

bool base_is_one_user(uid_t user)
{
	unsigned first = 0, outside, count = 0;
	FILE *map;

	if (user != NOBODY)
		return true;
	map = fopen("/proc/self/uid_map", "re");
	/* In the first namespace all users have one. */
	if (map && fscanf(map, "%u %u %u", &first, &outside, &count) != 3)
		count = 0;
	if (map)
		fclose(map);
	return !first && count == UINT32_MAX;
}

bool base_is_own_user(uid_t user)
{
	return user == geteuid() && base_is_one_user(user);
}

uint64_t base_random(void)
{
	uint64_t number = 0;

	/* Early in a machine's life there may be no such numbers yet: nobody waits for them. */
	if (getrandom(&number, sizeof(number), GRND_NONBLOCK) != sizeof(number))
		number = base_now_ns() * 0x9e3779b97f4a7c15 ^ (uint64_t)base_pid() << 40;
	return number ? number : 1;
}
