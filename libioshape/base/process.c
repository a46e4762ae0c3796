/* SPDX-License-Identifier: Apache-2.0 */
/* Which process this is, without asking the kernel every time; and what it may do. */
#define _GNU_SOURCE
#include "base/base.h"

#include <stdatomic.h>
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

uint64_t base_random(void)
{
	uint64_t number = 0;

	/* Early in a machine's life there may be no such numbers yet: nobody waits for them. */
	if (getrandom(&number, sizeof(number), GRND_NONBLOCK) != sizeof(number))
		number = base_now_ns() * 0x9e3779b97f4a7c15 ^ (uint64_t)base_pid() << 40;
	return number ? number : 1;
}
