/* SPDX-License-Identifier: Apache-2.0 */
#define _GNU_SOURCE
#include "gather/news.h"

#include "gather/board.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <linux/futex.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#define FILE_NAME "news"
#define PAGE_BYTES 4096u

_Static_assert(sizeof(struct news_page) <= PAGE_BYTES, "the page is large enough");

static int map(struct news *news, int fd)
{
	void *page = mmap(NULL, PAGE_BYTES, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);

	if (page == MAP_FAILED)
		return -errno;
	news->page = page;
	return 0;
}

/* Written, not only made longer: otherwise a full memory would be a signal at the first touch. */
int news_make(struct news *news, int folder_fd)
{
	static const uint8_t zeros[PAGE_BYTES];
	const int fd = base_above_streams(openat(
		folder_fd, FILE_NAME, O_RDWR | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0600));
	ssize_t written;
	int ret = 0;

	if (fd < 0)
		return -errno;
	written = write(fd, zeros, sizeof(zeros));
	if (written != (ssize_t)sizeof(zeros))
		ret = written < 0 ? -errno : -ENOSPC;
	if (!ret)
		ret = map(news, fd);
	close(fd);
	return ret;
}

int news_find(struct news *news, int folder_fd)
{
	const int fd =
		base_above_streams(openat(folder_fd, FILE_NAME, O_RDWR | O_NOFOLLOW | O_CLOEXEC));
	struct stat stat;
	int ret = fd < 0 || fstat(fd, &stat) ? -errno : 0;

	if (!ret && stat.st_size < (off_t)PAGE_BYTES)
		ret = -EPROTO;
	if (!ret)
		ret = map(news, fd);
	if (fd >= 0)
		close(fd);
	return ret;
}

void news_unmap(struct news *news)
{
	if (news->page)
		munmap(news->page, PAGE_BYTES);
	news->page = NULL;
}

static unsigned family_of(const char *name)
{
	return (unsigned)(board_hash_family(name) % NEWS_FAMILIES);
}

static void wake(struct news *news, uint32_t families)
{
	atomic_fetch_add(&news->page->posts, 1);
	syscall(SYS_futex, &news->page->posts, FUTEX_WAKE_BITSET, INT_MAX, NULL, NULL, families);
}

void news_tell(struct news *news, const char *name)
{
	const unsigned family = family_of(name);

	atomic_fetch_add(&news->page->of_family[family], 1);
	wake(news, 1u << family);
}

void news_move(struct news *news, int why)
{
	int not_yet = 0;

	atomic_compare_exchange_strong(&news->page->moved, &not_yet, why);
	wake(news, UINT32_MAX);
}

void news_watch(struct news *news, const char *name)
{
	const unsigned family = family_of(name);

	if (news->watched & 1u << family)
		return;
	news->watched |= 1u << family;
	news->seen[family] = atomic_load(&news->page->of_family[family]);
}

static bool has_come(const struct news *news)
{
	if (atomic_load(&news->page->moved))
		return true;
	for (unsigned i = 0; i < NEWS_FAMILIES; i++) {
		if (news->watched & 1u << i &&
		    atomic_load(&news->page->of_family[i]) != news->seen[i])
			return true;
	}
	return false;
}

void news_wait(struct news *news, uint64_t until_ns)
{
	const struct timespec until = { .tv_sec = (time_t)(until_ns / 1000000000),
					.tv_nsec = (long)(until_ns % 1000000000) };
	/* The kernel wants one bit at least. */
	const uint32_t families = news->watched ? news->watched : UINT32_MAX;

	while (base_now_ns() < until_ns) {
		const unsigned posts = atomic_load(&news->page->posts);

		if (has_come(news))
			break;
		syscall(SYS_futex, &news->page->posts, FUTEX_WAIT_BITSET, posts, &until, NULL,
			families);
	}
	news->watched = 0;
}
