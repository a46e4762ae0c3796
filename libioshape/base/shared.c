/* SPDX-License-Identifier: Apache-2.0 */
/* Memory with a file descriptor, which other processes can map. */
#define _GNU_SOURCE
#include "base/base.h"

#include <errno.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

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

/* Gets the pages before anything touches them: for a touch that finds no memory there is no error,
 * but SIGBUS. */
static int get_pages(int fd, uint64_t offset, size_t bytes)
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

int base_shared_grow(int fd, uint64_t bytes)
{
	/* Beyond that the kernel sends a signal that would end the application. */
	if (bytes > base_largest_file())
		return -EFBIG;
	return ftruncate(fd, (off_t)bytes) ? -errno : 0;
}

int base_shared_map(int fd, uint64_t offset, size_t bytes, void **memory)
{
	void *place = base_map(bytes);
	int ret;

	*memory = NULL;
	if (!place)
		return -ENOMEM;
	ret = get_pages(fd, offset, bytes);
	/* In the place of memory that begins on a huge page. */
	if (!ret && mmap(place, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, fd,
			 (off_t)offset) == MAP_FAILED)
		ret = -errno;
	if (ret) {
		base_shared_drop(fd, offset, bytes);
		base_unmap(place, bytes);
		return ret;
	}
	/* Both are wishes, as in base_map(); huge pages are often refused for shared memory. */
	madvise(place, bytes, MADV_HUGEPAGE);
	madvise(place, bytes, MADV_DONTFORK);
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
	void *memory;
	int seals;

	*view = NULL;
	*bytes = 0;
	seals = fcntl(fd, F_GET_SEALS);
	if (seals < 0 || !(seals & F_SEAL_SHRINK))
		return -EPERM;
	if (fstat(fd, &status))
		return -errno;
	if (!status.st_size)
		return 0;
	memory = mmap(NULL, (size_t)status.st_size, PROT_READ, MAP_SHARED, fd, 0);
	if (memory == MAP_FAILED)
		return -errno;
	madvise(memory, (size_t)status.st_size, MADV_DONTFORK);
	*view = memory;
	*bytes = (uint64_t)status.st_size;
	return 0;
}
