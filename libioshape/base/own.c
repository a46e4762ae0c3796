/* SPDX-License-Identifier: Apache-2.0 */
#define _GNU_SOURCE
#include "base/base.h"

#include <errno.h>
#include <fcntl.h>
#include <stdatomic.h>
#include <unistd.h>

/* Higher ones are not known to be ours; nobody has so many. */
#define MOST_OWNED 65536
#define WORD_BITS 64

/* A bit for each. No lock: what fails must not, and a child must find it as it was at any moment.
 */
static _Atomic uint64_t owned[MOST_OWNED / WORD_BITS];

/* Only what may be done in a child of a process with threads. */
static void let_go(uint64_t bits, int first, int nowhere)
{
	for (; bits; bits &= bits - 1) {
		const int fd = first + __builtin_ctzll(bits);

		/* The handles that are inherited still have the number: it must not become another
		 * file's. */
		if (nowhere < 0 || dup3(nowhere, fd, O_CLOEXEC) < 0)
			close(fd);
	}
}

static void in_child(void)
{
	const int before = errno, nowhere = base_above_streams(open("/", O_PATH | O_CLOEXEC));

	for (int i = 0; i < MOST_OWNED / WORD_BITS; i++)
		let_go(atomic_exchange(&owned[i], 0), i * WORD_BITS, nowhere);
	if (nowhere >= 0)
		close(nowhere);
	errno = before;
}

/* The library is never unloaded (-z nodelete), so the handler stays valid. */
static void watch_forks(void)
{
	pthread_atfork(NULL, NULL, in_child);
}

static uint64_t bit_of(int fd)
{
	return UINT64_C(1) << fd % WORD_BITS;
}

int base_above_streams(int fd)
{
	int above, failed;

	if (fd < 0 || fd > STDERR_FILENO)
		return fd;
	above = fcntl(fd, F_DUPFD_CLOEXEC, STDERR_FILENO + 1);
	failed = errno;
	close(fd);
	errno = failed;
	return above;
}

int base_own(int fd)
{
	static pthread_once_t once = PTHREAD_ONCE_INIT;

	pthread_once(&once, watch_forks);
	fd = base_above_streams(fd);
	if (fd >= 0 && fd < MOST_OWNED)
		atomic_fetch_or(&owned[fd / WORD_BITS], bit_of(fd));
	return fd;
}

bool base_disown(int fd)
{
	if (fd < 0)
		return false;
	return fd >= MOST_OWNED ||
	       atomic_fetch_and(&owned[fd / WORD_BITS], ~bit_of(fd)) & bit_of(fd);
}

int base_close(int fd)
{
	return base_disown(fd) ? close(fd) : 0;
}
