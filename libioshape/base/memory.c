/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Memory: page-aligned mappings, growing byte arrays, fresh memory that a load fills, and memory
 * that is shared with other processes.
 */
#define _GNU_SOURCE
#include "base/base.h"

#include <errno.h>
#include <fcntl.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23 /* Linux 5.14 */
#endif
#ifndef MADV_COLLAPSE
#define MADV_COLLAPSE 25 /* Linux 6.1 */
#endif

/* ---- Memory ---------------------------------------------------------------------------------- */

#define HUGE_PAGE_BYTES (2 * MIB)

/*
 * Maps whole pages from the beginning of a huge page on, with this protection (PROT_…), without
 * further advice. Returns NULL on failure.
 */
static void *map_aligned(size_t bytes, int protection)
{
	const size_t allocated = bytes + HUGE_PAGE_BYTES;
	uint8_t *memory, *wanted;

	memory = mmap(NULL, allocated, protection, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	if (memory == MAP_FAILED)
		return NULL;
	wanted = memory + (base_round_up((uintptr_t)memory, HUGE_PAGE_BYTES) - (uintptr_t)memory);
	if (wanted > memory)
		munmap(memory, (size_t)(wanted - memory));
	munmap(wanted + bytes, (size_t)(memory + allocated - (wanted + bytes)));
	return wanted;
}

void *base_map(size_t bytes)
{
	const int protection = PROT_READ | PROT_WRITE;
	void *memory;

	bytes = base_round_up(bytes, (uint64_t)sysconf(_SC_PAGESIZE));
	if (bytes >= HUGE_PAGE_BYTES)
		memory = map_aligned(bytes, protection);
	else
		memory = mmap(NULL, bytes, protection, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	if (!memory || memory == MAP_FAILED)
		return NULL;
	/*
	 * Best effort. Without huge pages copies are slower; without DONTFORK, fork() copies more.
	 */
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

	/* MADV_POPULATE_WRITE would hold the lock that other threads need to map their memory. */
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
	size_t need, allocated;
	uint8_t *data;

	if (__builtin_add_overflow(buffer->bytes, more, &need))
		return -ENOMEM;
	if (need <= buffer->allocated)
		return 0;
	allocated = MAX(need, buffer->allocated + buffer->allocated / 2);
	allocated = MAX(allocated, 256);
	data = realloc(buffer->data, allocated);
	if (!data)
		return -ENOMEM;
	buffer->data = data;
	buffer->allocated = allocated;
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

/* ---- Fresh memory: huge pages for loads ------------------------------------------------------ */

/*
 * Prepares the caller's memory before it is filled for the first time: with huge pages where they
 * cost less.
 *
 * The kernel gives a huge page only if the first touch finds 2 MiB without any page. But allocators
 * write a header in front of each piece. So small pieces leave no such stretch, and get pages of 4
 * KiB at four times the cost. If a stretch has some pages already, MADV_COLLAPSE turns it into a
 * huge page: just before it is filled, when only headers must be copied.
 *
 * If memory is fragmented, the kernel compacts it for each huge page, which costs more than it
 * gains. So each step is timed, and the first one that is too slow ends the use of huge pages. From
 * then on small pages are populated, many with one call, which saves a sixth of the cost of single
 * faults.
 */

#define SETTING "/sys/kernel/mm/transparent_hugepage/enabled"

/* Extents with gaps up to this size, such as allocator headers, count as one. */
#define HEADER_BYTES 8192u

/* Bytes that are prepared at a time, since each MADV_COLLAPSE interrupts all cores. */
#define UNIT_BYTES (16 * MIB)
#define LEAST_PAGE_BYTES 4096u

/*
 * Processor time for a huge page from which on small pages cost less: 2 MiB of those take 0.2 to
 * 0.6 ms, a huge page in fragmented memory 1 to 2 ms.
 */
#define SLOW_NS 700000u

struct stretch {
	uintptr_t begin, end; /* addresses, at huge-page boundaries */
	size_t first_unit;    /* index in `prepared` of its first unit */
};

struct base_fresh {
	size_t page_bytes;
	_Atomic bool stopped; /* huge pages are used up or too slow */
	size_t count;
	struct stretch *stretches; /* sorted by address */
	_Atomic bool *prepared;    /* flags of units */
};

/* Returns whether the administrator has forbidden huge pages, which MADV_COLLAPSE ignores. */
static bool are_forbidden(void)
{
	char text[64] = "";
	int fd = base_above_streams(open(SETTING, O_RDONLY | O_CLOEXEC));

	if (fd < 0)
		return false;
	if (read(fd, text, sizeof(text) - 1) < 0)
		*text = 0;
	close(fd);
	return strstr(text, "[never]");
}

static int compare(const void *a, const void *b)
{
	const struct base_extent *left = a, *right = b;

	return left->begin < right->begin ? -1 : left->begin > right->begin;
}

/* Adds the huge pages of an address range as a stretch, if it is long enough. */
static void add(struct base_fresh *fresh, uintptr_t begin, uintptr_t end, size_t most)
{
	struct stretch stretch = {
		.begin = base_round_up(begin, HUGE_PAGE_BYTES),
		.end = end / HUGE_PAGE_BYTES * HUGE_PAGE_BYTES,
	};
	const struct stretch *last = fresh->count ? &fresh->stretches[fresh->count - 1] : NULL;

	if (fresh->count == most || end - begin < BASE_FRESH_LEAST_BYTES ||
	    stretch.begin >= stretch.end)
		return;
	if (last)
		stretch.first_unit =
			last->first_unit + (last->end - last->begin - 1) / UNIT_BYTES + 1;
	fresh->stretches[fresh->count++] = stretch;
}

/* Merges adjacent extents and adds them. */
static void add_all(struct base_fresh *fresh, struct base_extent *extents, size_t count,
		    size_t most)
{
	uintptr_t begin = extents[0].begin, end = extents[0].end;

	for (size_t i = 1; i < count; i++) {
		if (extents[i].begin > end + HEADER_BYTES) {
			add(fresh, begin, end, most);
			begin = extents[i].begin;
			end = extents[i].end;
		}
		end = MAX(end, extents[i].end);
	}
	add(fresh, begin, end, most);
}

struct base_fresh *base_fresh_open(struct base_extent *extents, size_t count, size_t most)
{
	struct base_fresh *fresh = NULL;
	const struct stretch *last;

	if (count && most && !base_without("fresh"))
		fresh = calloc(1, sizeof(*fresh));
	if (!fresh)
		return NULL;
	fresh->page_bytes = (size_t)sysconf(_SC_PAGESIZE);
	fresh->stretches = calloc(MIN(count, most), sizeof(*fresh->stretches));
	qsort(extents, count, sizeof(*extents), compare);
	if (fresh->stretches)
		add_all(fresh, extents, count, most);
	if (fresh->count) {
		last = &fresh->stretches[fresh->count - 1];
		fresh->prepared =
			calloc(last->first_unit + (last->end - last->begin) / UNIT_BYTES + 1,
			       sizeof(*fresh->prepared));
	}
	fresh->stopped = fresh->count && are_forbidden();
	if (fresh->prepared)
		return fresh;
	base_fresh_close(fresh);
	return NULL;
}

size_t base_fresh_count(const struct base_fresh *fresh)
{
	return fresh ? fresh->count : 0;
}

void base_fresh_close(struct base_fresh *fresh)
{
	if (!fresh)
		return;
	free(fresh->prepared);
	free(fresh->stretches);
	free(fresh);
}

static uint64_t thread_ns(void)
{
	struct timespec now = { 0 };

	clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
	return (uint64_t)now.tv_sec * 1000000000 + (uint64_t)now.tv_nsec;
}

/* Turns a range that has some small pages into huge pages. */
static int collapse(uintptr_t begin, uintptr_t end)
{
	if (begin == end || !madvise((void *)begin, end - begin, MADV_COLLAPSE))
		return 0;
	/* Other errors are transient, such as a page that is in use elsewhere. */
	return errno == EINVAL || errno == ENOMEM ? -errno : 0;
}

/* Counts the pages that are in memory. */
static size_t count_there(const unsigned char *pages, size_t count)
{
	size_t there = 0;

	for (size_t i = 0; i < count; i++)
		there += pages[i] & 1;
	return there;
}

/*
 * Gives each 2 MiB a huge page: a new one if it has no page, a collapsed one if it has some. Leaves
 * it alone if it has all pages.
 */
static int make_huge(const struct base_fresh *fresh, uintptr_t begin, uintptr_t end)
{
	const size_t each = HUGE_PAGE_BYTES / fresh->page_bytes;
	unsigned char pages[UNIT_BYTES / LEAST_PAGE_BYTES];
	uintptr_t run = begin, at;
	size_t there;
	int ret = 0;

	if (base_without("collapsing"))
		return madvise((void *)begin, end - begin, MADV_HUGEPAGE) ? -errno : 0;
	if (madvise((void *)begin, end - begin, MADV_HUGEPAGE) ||
	    mincore((void *)begin, end - begin, pages))
		return -errno;
	for (at = begin; !ret && at < end; at += HUGE_PAGE_BYTES) {
		there = count_there(pages + (at - begin) / fresh->page_bytes, each);
		if (there && there < each)
			continue;
		if (!there && madvise((void *)at, fresh->page_bytes, MADV_POPULATE_WRITE))
			ret = -errno;
		if (!ret)
			ret = collapse(run, at);
		run = at + HUGE_PAGE_BYTES;
	}
	return ret ? ret : collapse(run, end);
}

static void prepare(struct base_fresh *fresh, uintptr_t begin, uintptr_t end)
{
	const uint64_t begin_ns = thread_ns();
	const int ret = make_huge(fresh, begin, end);
	const uint64_t each_ns = (thread_ns() - begin_ns) / ((end - begin) / HUGE_PAGE_BYTES);

	if (ret || each_ns > SLOW_NS)
		atomic_store(&fresh->stopped, true);
}

/* Returns the last stretch that begins before the address; NULL if there is none. */
static const struct stretch *find(const struct base_fresh *fresh, uintptr_t address)
{
	size_t low = 0, high = fresh->count, middle;

	while (low < high) {
		middle = (low + high) / 2;
		if (fresh->stretches[middle].begin < address)
			low = middle + 1;
		else
			high = middle;
	}
	return low ? &fresh->stretches[low - 1] : NULL;
}

/*
 * Populates a range with small pages. Pages at its edges are left out, as they may be shared with
 * other data.
 */
static void populate(const struct base_fresh *fresh, uintptr_t begin, uintptr_t end)
{
	begin = base_round_up(begin, fresh->page_bytes);
	end = end / fresh->page_bytes * fresh->page_bytes;
	if (begin < end)
		madvise((void *)begin, end - begin, MADV_POPULATE_WRITE);
}

void base_fresh_prepare(struct base_fresh *fresh, const void *memory, size_t bytes)
{
	const uintptr_t begin = (uintptr_t)memory, end = begin + bytes;
	const struct stretch *stretch = fresh && bytes ? find(fresh, end) : NULL;
	uintptr_t from, to;
	size_t unit;

	if (!stretch || begin >= stretch->end)
		return;
	unit = begin > stretch->begin ? (begin - stretch->begin) / UNIT_BYTES : 0;
	for (from = stretch->begin + unit * UNIT_BYTES; from < MIN(end, stretch->end);
	     from = to, unit++) {
		to = MIN(from + UNIT_BYTES, stretch->end);
		if (!atomic_load(&fresh->stopped) &&
		    !atomic_exchange(&fresh->prepared[stretch->first_unit + unit], true))
			prepare(fresh, from, to);
		if (atomic_load(&fresh->stopped))
			populate(fresh, MAX(begin, from), MIN(end, to));
	}
}

/* ---- Shared memory --------------------------------------------------------------------------- */

/*
 * A signal interrupts fallocate(), which then undoes its work. Small steps complete between the
 * signals of a profiler.
 */
#define STEP_BYTES (1 * MIB)
#define MOST_INTERRUPTIONS 1000

int base_shared_open(void)
{
	int fd = base_register_fd(memfd_create("ioshape", MFD_CLOEXEC | MFD_ALLOW_SEALING)), ret;

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
static int get_pages(int fd, uint64_t offset, uint8_t *address, size_t bytes)
{
	const size_t page = (size_t)sysconf(_SC_PAGESIZE);

	/* A hint, which the kernel mostly ignores for shared memory. */
	madvise(address, bytes, MADV_HUGEPAGE);
	/* MADV_COLLAPSE is no hint, but works only on ranges that have a page already. */
	for (size_t at = 0; at < bytes; at += HUGE_PAGE_BYTES)
		madvise(address + at, page, MADV_POPULATE_WRITE);
	madvise(address, bytes, MADV_COLLAPSE);
	if (!madvise(address, bytes, MADV_POPULATE_WRITE))
		return 0;
	/* EFAULT stands for what would have been SIGBUS. */
	if (errno == EFAULT || errno == ENOMEM)
		return -ENOMEM;
	return allocate_pages(fd, offset, bytes);
}

/* Maps a range at a huge-page boundary. Returns -ENOMEM, or the error of mmap(). */
static int map_part(int fd, uint64_t offset, size_t bytes, int protection, uint8_t **memory)
{
	uint8_t *address = NULL; /* the compiler cannot know that errno is not 0 */
	int ret;

	bytes = base_round_up(bytes, (uint64_t)sysconf(_SC_PAGESIZE));
	/* Reserve addresses first, so that the mapping begins at a huge page. */
	address = map_aligned(bytes, PROT_NONE);
	if (!address)
		return -ENOMEM;
	if (mmap(address, bytes, protection, MAP_SHARED | MAP_FIXED, fd, (off_t)offset) ==
	    MAP_FAILED) {
		ret = -errno;
		munmap(address, bytes);
		return ret;
	}
	/* A hint: without it, fork() copies more. */
	madvise(address, bytes, MADV_DONTFORK);
	*memory = address;
	return 0;
}

int base_shared_grow(int fd, uint64_t bytes)
{
	/* Beyond it, the kernel sends a signal that would end the application. */
	if (bytes > base_largest_file())
		return -EFBIG;
	return ftruncate(fd, (off_t)bytes) ? -errno : 0;
}

int base_shared_map(int fd, uint64_t offset, size_t bytes, void **memory)
{
	uint8_t *address = NULL; /* the compiler cannot know that errno is not 0 */
	int ret;

	*memory = NULL;
	ret = map_part(fd, offset, bytes, PROT_READ | PROT_WRITE, &address);
	if (ret)
		return ret;
	ret = get_pages(fd, offset, address, bytes);
	if (ret) {
		base_unmap(address, bytes);
		base_shared_drop(fd, offset, bytes);
		return ret;
	}
	*memory = address;
	return 0;
}

void base_shared_drop(int fd, uint64_t offset, size_t bytes)
{
	/* Fails only if a signal interrupts it. */
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
