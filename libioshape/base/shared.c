/* SPDX-License-Identifier: Apache-2.0 */
/* Memory with a file descriptor, which other processes can map. */
#define _GNU_SOURCE
#include "base/base.h"

#include <errno.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23 /* Linux 5.14 */
#endif
#ifndef MADV_COLLAPSE
#define MADV_COLLAPSE 25 /* Linux 6.1 */
#endif

#define HUGE_PAGE_BYTES (2 * MIB)

/* fallocate() gives up, and undoes its work, when a signal comes: small steps get done between
 * those of a profiler. */
#define STEP_BYTES (1 * MIB)
#define MOST_INTERRUPTIONS 1000

int base_shared_open(void)
{
	int fd = memfd_create("ioshape", MFD_CLOEXEC | MFD_ALLOW_SEALING), ret;

	if (fd < 0)
		return -errno;
	/* Whoever maps it can rely on its size. And nobody whom it is passed to can seal it
	 * further.
	 */
	if (!fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_SEAL))
		return fd;
	ret = -errno;
	close(fd);
	return ret;
}

/* Without touching them. */
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
 * All pages, before anything touches them: for a touch that finds no memory there is no error, but
 * SIGBUS. Huge ones where the kernel has them: a copy into small ones takes up to half as long
 * again.
 */
static int get_pages(int fd, uint64_t offset, uint8_t *place, size_t bytes)
{
	const size_t page = (size_t)sysconf(_SC_PAGESIZE);

	/* A wish, which shared memory is mostly refused. */
	madvise(place, bytes, MADV_HUGEPAGE);
	/* An order, which is not: but it takes ranges in which there is something. */
	for (size_t at = 0; at < bytes; at += HUGE_PAGE_BYTES)
		madvise(place + at, page, MADV_POPULATE_WRITE);
	madvise(place, bytes, MADV_COLLAPSE);
	if (!madvise(place, bytes, MADV_POPULATE_WRITE))
		return 0;
	/* EFAULT: what would have been SIGBUS. */
	if (errno == EFAULT || errno == ENOMEM)
		return -ENOMEM;
	return allocate_pages(fd, offset, bytes);
}

/* Room for a mapping, from a huge page's beginning on. NULL if there is none. */
static uint8_t *reserve_room(size_t bytes)
{
	const size_t room = bytes + HUGE_PAGE_BYTES;
	uint8_t *memory, *wanted;

	memory = mmap(NULL, room, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
	if (memory == MAP_FAILED)
		return NULL;
	wanted = memory + (base_round_up((uintptr_t)memory, HUGE_PAGE_BYTES) - (uintptr_t)memory);
	if (wanted > memory)
		munmap(memory, (size_t)(wanted - memory));
	munmap(wanted + bytes, (size_t)(memory + room - (wanted + bytes)));
	return wanted;
}

/* -ENOMEM, or what mmap() failed with. */
static int map_part(int fd, uint64_t offset, size_t bytes, int protection, uint8_t **memory)
{
	uint8_t *place;
	int ret;

	bytes = base_round_up(bytes, (uint64_t)sysconf(_SC_PAGESIZE));
	place = reserve_room(bytes);
	if (!place)
		return -ENOMEM;
	if (mmap(place, bytes, protection, MAP_SHARED | MAP_FIXED, fd, (off_t)offset) ==
	    MAP_FAILED) {
		ret = -errno;
		munmap(place, bytes);
		return ret;
	}
	/* A wish: without it a fork copies more. */
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
	uint8_t *place;
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
	/* It cannot fail but by an interruption. */
	for (unsigned i = 0; i < MOST_INTERRUPTIONS; i++)
		if (!fallocate(fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, (off_t)offset,
			       (off_t)bytes) ||
		    errno != EINTR)
			return;
}

int base_shared_view(int fd, const void **view, uint64_t *bytes)
{
	struct stat status;
	uint8_t *memory;
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
