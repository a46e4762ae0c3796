/* SPDX-License-Identifier: Apache-2.0 */
/* Memory that is filled for the first time: pieces with an allocator's headers between them. */
#define _GNU_SOURCE
/* Included, because it tests static functions. */
#include "base/memory.c"
#include "support/check_main.h"
#include "support/sandbox.h"
#include "support/scratch.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <unistd.h>

#ifndef MADV_COLLAPSE
#define MADV_COLLAPSE 25
#endif

#define HUGE_PAGE_BYTES (2 * MIB)
#define ALL_BYTES (40 * MIB)
#define ALLOCATOR_BYTES 64u
/* Space before and after the pieces. */
#define MARGIN_BYTES (4 * MIB)
#define LEAST_PAGE_BYTES 4096u

/* With small pieces each stretch of 2 MiB contains a header; with large ones few do. */
static const size_t piece_sizes[] = { 1 * MIB, 8 * MIB };

static uint8_t *place, *memory;
static size_t piece_bytes, count;
static struct base_extent extents[ALL_BYTES / MIB];

/* Makes pieces like those of malloc(): each has a header, and the rest is untouched. */
static void make_pieces(size_t bytes)
{
	piece_bytes = bytes;
	count = ALL_BYTES / bytes;
	place = mmap(NULL, ALL_BYTES + 2 * MARGIN_BYTES, PROT_READ | PROT_WRITE,
		     MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	ck_assert_ptr_ne(place, MAP_FAILED);
	memory = place + MARGIN_BYTES;
	/* Turns huge pages off, whatever the machine's setting is. */
	madvise(place, ALL_BYTES + 2 * MARGIN_BYTES, MADV_NOHUGEPAGE);
	for (size_t i = 0; i < count; i++) {
		memset(memory + i * bytes, 0x55, ALLOCATOR_BYTES);
		/* In another order than that of addresses, as tensors are in a file. */
		extents[i * 7 % count] = (struct base_extent){
			(uintptr_t)memory + i * bytes + ALLOCATOR_BYTES,
			(uintptr_t)memory + (i + 1) * bytes,
		};
	}
}

static void drop_pieces(void)
{
	ck_assert_int_eq(munmap(place, ALL_BYTES + 2 * MARGIN_BYTES), 0);
}

/* Returns the number of bytes in huge pages, of all mappings in this range. */
static size_t huge_bytes(const uint8_t *from, size_t bytes)
{
	FILE *maps = fopen("/proc/self/smaps", "re");
	unsigned long begin, end, kilobytes;
	bool here = false;
	size_t found = 0;
	char line[4096];

	ck_assert_ptr_nonnull(maps);
	while (fgets(line, sizeof(line), maps)) {
		if (sscanf(line, "%lx-%lx ", &begin, &end) == 2)
			here = begin < (uintptr_t)from + bytes && end > (uintptr_t)from;
		else if (here && sscanf(line, "AnonHugePages: %lu", &kilobytes) == 1)
			found += kilobytes << 10;
	}
	fclose(maps);
	return found;
}

/* Returns whether the machine allows huge pages, and the kernel can make one now. */
static bool has_huge_pages(void)
{
	FILE *file = fopen("/sys/kernel/mm/transparent_hugepage/enabled", "re");
	uint8_t *trial = map_aligned(HUGE_PAGE_BYTES, PROT_READ | PROT_WRITE);
	char text[64] = "[never]";
	bool works = false;

	if (file && fgets(text, sizeof(text), file) && !strstr(text, "[never]") && trial) {
		trial[0] = 1;
		works = !madvise(trial, HUGE_PAGE_BYTES, MADV_COLLAPSE) &&
			huge_bytes(trial, HUGE_PAGE_BYTES) >= HUGE_PAGE_BYTES;
	}
	if (file)
		fclose(file);
	if (trial)
		munmap(trial, HUGE_PAGE_BYTES);
	return works;
}

static size_t pages_there(const uint8_t *from, size_t bytes)
{
	static unsigned char pages[(ALL_BYTES + 2 * MARGIN_BYTES) / LEAST_PAGE_BYTES];
	const size_t page = (size_t)sysconf(_SC_PAGESIZE);
	size_t there = 0;

	ck_assert_int_eq(mincore((void *)(uintptr_t)from, bytes, pages), 0);
	for (size_t i = 0; i < bytes / page; i++)
		there += pages[i] & 1;
	return there;
}

static void require_headers(void)
{
	for (size_t i = 0; i < count; i++)
		for (size_t at = 0; at < ALLOCATOR_BYTES; at++)
			ck_assert_uint_eq(memory[i * piece_bytes + at], 0x55);
}

static void prepare_all(struct base_fresh *fresh)
{
	for (size_t i = 0; i < count; i++)
		base_fresh_prepare(fresh, (void *)extents[i].begin,
				   extents[i].end - extents[i].begin);
}

/* MADV_HUGEPAGE alone has no effect on a stretch that contains a header. */
static struct test_case fresh_tests = { .name = "fresh" };

TEST(fresh_tests, small_pieces_side_by_side_are_filled_in_huge_pages)
{
	const bool expected = has_huge_pages();
	struct base_fresh *fresh;

	make_pieces(MIB);
	fresh = base_fresh_open(extents, count, 100);
	ck_assert_ptr_nonnull(fresh);
	ck_assert_uint_eq(base_fresh_count(fresh), 1);
	prepare_all(fresh);
	if (expected)
		ck_assert_uint_ge(huge_bytes(memory, ALL_BYTES), HUGE_PAGE_BYTES);
	base_fresh_close(fresh);
	require_headers();
	drop_pieces();
}

/* Returns whether all stretches of huge pages within the pieces are in memory. */
static bool is_all_there(void)
{
	const size_t page = (size_t)sysconf(_SC_PAGESIZE), bytes = ALL_BYTES - 2 * HUGE_PAGE_BYTES;
	const uintptr_t begin = base_round_up((uintptr_t)memory + ALLOCATOR_BYTES, HUGE_PAGE_BYTES);

	return pages_there((uint8_t *)begin, bytes) == bytes / page;
}

/* With huge or small pages. */
LOOP_TEST(fresh_tests, what_is_prepared_is_there_and_nothing_beside_it, 0,
	  ARRAY_LENGTH(piece_sizes))
{
	struct base_fresh *fresh;
	uint8_t *last;

	make_pieces(piece_sizes[_i]);
	last = (uint8_t *)extents[count - 1].begin;
	ck_assert_uint_eq(pages_there(place, MARGIN_BYTES), 0);
	fresh = base_fresh_open(extents, count, 100);
	ck_assert_ptr_nonnull(fresh);
	prepare_all(fresh);
	ck_assert(is_all_there());
	ck_assert_uint_eq(pages_there(place, MARGIN_BYTES), 0);
	ck_assert_uint_eq(pages_there(memory + ALL_BYTES, MARGIN_BYTES), 0);
	/* A second call, and calls outside the pieces, do no harm. */
	memset(last, 0x77, 10000);
	prepare_all(fresh);
	base_fresh_prepare(fresh, place, 100);
	base_fresh_prepare(fresh, memory + ALL_BYTES + 100, 100);
	base_fresh_prepare(fresh, memory, 0);
	base_fresh_prepare(NULL, memory, 100);
	base_fresh_close(fresh);
	ck_assert_uint_eq(*last, 0x77);
	ck_assert_mem_eq(last, last + 1, 9999);
	ck_assert_uint_eq(pages_there(place, MARGIN_BYTES), 0);
	require_headers();
	drop_pieces();
}

/* Prepares memory in a process without huge pages, as where they cost too much. */
static int prepare_without_huge_pages(void *argument)
{
	struct base_fresh *fresh;

	(void)argument;
	if (prctl(PR_SET_THP_DISABLE, 1, 0, 0, 0))
		return 99;
	fresh = base_fresh_open(extents, count, 100);
	if (!fresh)
		return 1;
	prepare_all(fresh);
	base_fresh_close(fresh);
	require_headers();
	return is_all_there() && !huge_bytes(memory, ALL_BYTES) ? 0 : 2;
}

LOOP_TEST(fresh_tests, without_huge_pages_small_ones_come, 0, ARRAY_LENGTH(piece_sizes))
{
	make_pieces(piece_sizes[_i]);
	ck_assert_int_eq(scratch_in_child(prepare_without_huge_pages, NULL), 0);
	drop_pieces();
}

TEST(fresh_tests, short_stretches_and_more_than_wanted_are_left_alone)
{
	make_pieces(MIB);
	/* These pieces are not adjacent, so each is too short. */
	ck_assert_ptr_null(base_fresh_open((struct base_extent[]){ extents[0], extents[1] }, 2, 9));
	ck_assert_ptr_null(base_fresh_open(extents, 0, 9));
	ck_assert_ptr_null(base_fresh_open(extents, count, 0));
	ck_assert_uint_eq(base_fresh_count(NULL), 0);
	base_fresh_close(NULL);
	drop_pieces();
}

/* Prepares memory on a kernel without these madvise() calls. */
static int prepare_without_advice(void *argument)
{
	struct base_fresh *fresh;

	(void)argument;
	if (sandbox_refuse(__NR_madvise, EINVAL))
		return 99;
	fresh = base_fresh_open(extents, count, 100);
	if (!fresh)
		return 1;
	prepare_all(fresh);
	base_fresh_close(fresh);
	require_headers();
	return 0;
}

TEST(fresh_tests, an_older_kernel_fills_it_all_the_same)
{
	make_pieces(MIB);
	ck_assert_int_eq(scratch_in_child(prepare_without_advice, NULL), 0);
	drop_pieces();
}
