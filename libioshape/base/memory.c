/* SPDX-License-Identifier: Apache-2.0 */
/* Memory of the process, memory that other processes can map, and bytes that grow. */
#define _GNU_SOURCE
#include "base/base.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

/* ---- Memory ---------------------------------------------------------------------------------- */

#define HUGE_PAGE_BYTES (2 * MIB)

void *base_map_aligned(size_t bytes, int protection)
{
	const size_t room = bytes + HUGE_PAGE_BYTES;
	uint8_t *memory, *wanted;

	memory = mmap(NULL, room, protection, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	if (memory == MAP_FAILED)
		return NULL;
	wanted = memory + (base_round_up((uintptr_t)memory, HUGE_PAGE_BYTES) - (uintptr_t)memory);
	if (wanted > memory)
		munmap(memory, (size_t)(wanted - memory));
	munmap(wanted + bytes, (size_t)(memory + room - (wanted + bytes)));
	return wanted;
}

void *base_map(size_t bytes)
{
	const int protection = PROT_READ | PROT_WRITE;
	void *memory;

	bytes = base_round_up(bytes, (uint64_t)sysconf(_SC_PAGESIZE));
	if (bytes >= HUGE_PAGE_BYTES)
		memory = base_map_aligned(bytes, protection);
	else
		memory = mmap(NULL, bytes, protection, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	if (!memory || memory == MAP_FAILED)
		return NULL;
	/* Both are wishes: without huge pages it is slower, without DONTFORK a fork copies more. */
	madvise(memory, bytes, MADV_HUGEPAGE);
	madvise(memory, bytes, MADV_DONTFORK);
	return memory;
}

void base_unmap(void *memory, size_t bytes)
{
	if (memory)
		munmap(memory, base_round_up(bytes, (uint64_t)sysconf(_SC_PAGESIZE)));
}

void base_prefault(void *memory, size_t bytes)
{
	size_t page = (size_t)sysconf(_SC_PAGESIZE);
	volatile char *touch = memory;

	/* MADV_POPULATE_WRITE would hold the lock that other threads need to map theirs. */
	for (size_t i = 0; i < bytes; i += page)
		touch[i] = touch[i];
}

void base_free_secret(char *text)
{
	if (text)
		explicit_bzero(text, strlen(text));
	free(text);
}

char *base_directory_of(const char *path)
{
	const char *slash = strrchr(path, '/');

	return strndup(slash ? path : ".", slash ? MAX((size_t)(slash - path), 1) : 1);
}

int base_buffer_reserve(struct base_buffer *buffer, size_t more)
{
	size_t need, room;
	uint8_t *data;

	if (__builtin_add_overflow(buffer->bytes, more, &need))
		return -ENOMEM;
	if (need <= buffer->room)
		return 0;
	room = MAX(need, buffer->room + buffer->room / 2);
	room = MAX(room, 256);
	data = realloc(buffer->data, room);
	if (!data)
		return -ENOMEM;
	buffer->data = data;
	buffer->room = room;
	return 0;
}

int base_buffer_append(struct base_buffer *buffer, const void *data, size_t bytes)
{
	int ret = base_buffer_reserve(buffer, bytes);

	if (ret)
		return ret;
	if (bytes)
		memcpy(buffer->data + buffer->bytes, data, bytes);
	buffer->bytes += bytes;
	return 0;
}

void base_buffer_free(struct base_buffer *buffer)
{
	free(buffer->data);
	memset(buffer, 0, sizeof(*buffer));
}

/* ---- Memory behind a file descriptor, which other processes can map -------------------------- */

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23 /* Linux 5.14 */
#endif
#ifndef MADV_COLLAPSE
#define MADV_COLLAPSE 25 /* Linux 6.1 */
#endif

/* A signal interrupts fallocate(), which then undoes its work. Small steps finish between the
 * signals of a profiler. */
#define STEP_BYTES (1 * MIB)
#define MOST_INTERRUPTIONS 1000

int base_shared_open(void)
{
	int fd = base_own(memfd_create("ioshape", MFD_CLOEXEC | MFD_ALLOW_SEALING)), ret;

	if (fd < 0)
		return -errno;
	/* Processes that map it can rely on its size, and cannot add further seals. */
	if (!fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_SEAL))
		return fd;
	ret = -errno;
	base_close(fd);
	return ret;
}

/* Allocates the pages without touching them. */
static int allocate_pages(int fd, uint64_t offset, size_t bytes)
{
	const uint64_t end = offset + bytes;
	unsigned interruptions = 0;

	while (offset < end) {
		const uint64_t step = MIN(STEP_BYTES, end - offset);

		if (!fallocate(fd, 0, (off_t)offset, (off_t)step)) {
			offset += step;
			continue;
		}
		if (errno != EINTR || ++interruptions > MOST_INTERRUPTIONS)
			return errno == ENOSPC ? -ENOMEM : -errno;
	}
	return 0;
}

/*
 * Allocates all pages before anything touches them, because a touch that finds no memory raises
 * SIGBUS instead of returning an error. Uses huge pages where the kernel has them: a copy into
 * small pages takes up to 1.5 times as long.
 */
static int get_pages(int fd, uint64_t offset, uint8_t *place, size_t bytes)
{
	const size_t page = (size_t)sysconf(_SC_PAGESIZE);

	/* A hint, which the kernel mostly ignores for shared memory. */
	madvise(place, bytes, MADV_HUGEPAGE);
	/* MADV_COLLAPSE is no hint, but works only on ranges that have a page already. */
	for (size_t at = 0; at < bytes; at += HUGE_PAGE_BYTES)
		madvise(place + at, page, MADV_POPULATE_WRITE);
	madvise(place, bytes, MADV_COLLAPSE);
	if (!madvise(place, bytes, MADV_POPULATE_WRITE))
		return 0;
	/* EFAULT stands for what would have been SIGBUS. */
	if (errno == EFAULT || errno == ENOMEM)
		return -ENOMEM;
	return allocate_pages(fd, offset, bytes);
}

/* -ENOMEM, or what mmap() failed with. */
static int map_part(int fd, uint64_t offset, size_t bytes, int protection, uint8_t **memory)
{
	uint8_t *place = NULL; /* the compiler cannot know that errno is set */
	int ret;

	bytes = base_round_up(bytes, (uint64_t)sysconf(_SC_PAGESIZE));
	/* Addresses first, so that the mapping begins on a huge page. */
	place = base_map_aligned(bytes, PROT_NONE);
	if (!place)
		return -ENOMEM;
	if (mmap(place, bytes, protection, MAP_SHARED | MAP_FIXED, fd, (off_t)offset) ==
	    MAP_FAILED) {
		ret = -errno;
		munmap(place, bytes);
		return ret;
	}
	/* A hint: without it, fork() copies more. */
	madvise(place, bytes, MADV_DONTFORK);
	*memory = place;
	return 0;
}

int base_shared_grow(int fd, uint64_t bytes)
{
	/* Beyond that the kernel sends a signal that would end the application. */
	if (bytes > base_largest_file())
		return -EFBIG;
	return ftruncate(fd, (off_t)bytes) ? -errno : 0;
}

int base_shared_map(int fd, uint64_t offset, size_t bytes, void **memory)
{
	uint8_t *place = NULL; /* the compiler cannot know that errno is set */
	int ret;

	*memory = NULL;
	ret = map_part(fd, offset, bytes, PROT_READ | PROT_WRITE, &place);
	if (ret)
		return ret;
	ret = get_pages(fd, offset, place, bytes);
	if (ret) {
		base_unmap(place, bytes);
		base_shared_drop(fd, offset, bytes);
		return ret;
	}
	*memory = place;
	return 0;
}

void base_shared_drop(int fd, uint64_t offset, size_t bytes)
{
	/* It can only fail because a signal interrupts it. */
	for (unsigned i = 0; i < MOST_INTERRUPTIONS; i++)
		if (!fallocate(fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, (off_t)offset,
			       (off_t)bytes) ||
		    errno != EINTR)
			return;
}

int base_shared_view(int fd, const void **view, uint64_t *bytes)
{
	struct stat status;
	uint8_t *memory = NULL;
	int seals, ret;

	*view = NULL;
	*bytes = 0;
	seals = fcntl(fd, F_GET_SEALS);
	if (seals < 0 || !(seals & F_SEAL_SHRINK))
		return -EPERM;
	if (fstat(fd, &status))
		return -errno;
	if (!status.st_size)
		return 0;
	ret = map_part(fd, 0, (size_t)status.st_size, PROT_READ, &memory);
	if (ret)
		return ret;
	*view = memory;
	*bytes = (uint64_t)status.st_size;
	return 0;
}
