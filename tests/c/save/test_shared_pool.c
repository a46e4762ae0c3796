/* SPDX-License-Identifier: Apache-2.0 */
/* Staging memory that another process can map. */
#define _GNU_SOURCE
#include "save/context.h"
#include "support/check_main.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#define CHUNKS 4u

static struct save_staging pool;
static struct base_error error;

static void begin(void)
{
	save_staging_init(&pool, CHUNKS * SAVE_CHUNK_BYTES, true);
}

static void end(void)
{
	save_staging_destroy(&pool);
}

static struct save_chunk *get(void)
{
	struct save_chunk *chunk;

	ck_assert_msg(!save_staging_get(&pool, &chunk, &error), "%s", error.text);
	return chunk;
}

static uint64_t bytes_held(void)
{
	struct stat status;

	ck_assert_int_eq(fstat(pool.fd, &status), 0);
	return (uint64_t)status.st_blocks * 512;
}

static struct test_case tests = { .name = "all", .setup = begin, .teardown = end };

TEST(tests, a_pool_that_nobody_uses_takes_nothing)
{
	ck_assert_int_eq(pool.fd, -1);
	save_staging_trim(&pool);
	ck_assert_int_eq(pool.fd, -1);
}

TEST(tests, what_is_written_into_a_chunk_is_at_its_offset_of_the_fd)
{
	struct save_chunk *chunks[CHUNKS];
	uint64_t bytes;
	const void *view;

	for (unsigned i = 0; i < CHUNKS; i++) {
		chunks[i] = get();
		memset(chunks[i]->memory, (int)i + 1, SAVE_CHUNK_BYTES);
	}
	ck_assert_int_eq(base_shared_view(pool.fd, &view, &bytes), 0);
	ck_assert_uint_eq(bytes, CHUNKS * SAVE_CHUNK_BYTES);
	for (unsigned i = 0; i < CHUNKS; i++) {
		const uint8_t *seen = (const uint8_t *)view + chunks[i]->offset;

		ck_assert_int_eq(memcmp(seen, chunks[i]->memory, SAVE_CHUNK_BYTES), 0);
		ck_assert_int_eq(seen[SAVE_CHUNK_BYTES - 1], (int)i + 1);
		save_staging_put(&pool, chunks[i]);
	}
	munmap((void *)(uintptr_t)view, bytes);
}

TEST(tests, trimming_gives_the_memory_back_and_the_range_is_used_again)
{
	struct save_chunk *chunks[CHUNKS];

	for (unsigned round = 0; round < 3; round++) {
		struct stat status;

		for (unsigned i = 0; i < CHUNKS; i++)
			chunks[i] = get();
		ck_assert_uint_eq(bytes_held(), CHUNKS * SAVE_CHUNK_BYTES);
		for (unsigned i = 0; i < CHUNKS; i++)
			for (unsigned j = 0; j < i; j++)
				ck_assert_uint_ne(chunks[i]->offset, chunks[j]->offset);
		for (unsigned i = 1; i < CHUNKS; i++)
			save_staging_put(&pool, chunks[i]);
		chunks[0]->memory[5] = 77;
		save_staging_trim(&pool);
		ck_assert_uint_eq(bytes_held(), SAVE_CHUNK_BYTES);
		ck_assert_uint_eq(chunks[0]->memory[5], 77);
		save_staging_put(&pool, chunks[0]);
		save_staging_trim(&pool);
		ck_assert_uint_eq(bytes_held(), 0);
		ck_assert_uint_eq(pool.made, 0);
		ck_assert_int_eq(fstat(pool.fd, &status), 0);
		ck_assert_int_eq(status.st_size, (off_t)(CHUNKS * SAVE_CHUNK_BYTES));
	}
}

TEST(tests, it_cannot_shrink_and_is_not_passed_on_by_execution)
{
	save_staging_put(&pool, get());
	ck_assert_int_eq(fcntl(pool.fd, F_GETFD), FD_CLOEXEC);
	ck_assert_int_eq(fcntl(pool.fd, F_GET_SEALS), F_SEAL_SHRINK | F_SEAL_SEAL);
	ck_assert_int_eq(ftruncate(pool.fd, 4096), -1);
}

TEST(tests, without_descriptors_or_room_for_files_it_says_what_to_raise)
{
	struct save_chunk *first, *second;
	struct rlimit before, little;

	ck_assert_int_eq(getrlimit(RLIMIT_NOFILE, &before), 0);
	little = (struct rlimit){ 0, before.rlim_max };
	ck_assert_int_eq(setrlimit(RLIMIT_NOFILE, &little), 0);
	ck_assert_int_eq(save_staging_get(&pool, &first, &error), -EMFILE);
	ck_assert_int_eq(setrlimit(RLIMIT_NOFILE, &before), 0);
	ck_assert_ptr_nonnull(strstr(error.text, "raise ulimit -n"));
	ck_assert_uint_eq(pool.made, 0);
	first = get();
	ck_assert_int_eq(getrlimit(RLIMIT_FSIZE, &before), 0);
	little = (struct rlimit){ SAVE_CHUNK_BYTES + 4096, before.rlim_max };
	ck_assert_int_eq(setrlimit(RLIMIT_FSIZE, &little), 0);
	error.code = 0;
	ck_assert_int_eq(save_staging_get(&pool, &second, &error), -EFBIG);
	ck_assert_int_eq(setrlimit(RLIMIT_FSIZE, &before), 0);
	ck_assert_ptr_nonnull(strstr(error.text, "ulimit -f"));
	ck_assert_uint_eq(pool.made, 1);
	error.code = 0;
	second = get();
	save_staging_put(&pool, first);
	save_staging_put(&pool, second);
}

TEST(tests, a_forked_child_does_not_have_it)
{
	struct save_chunk *chunk = get();
	pid_t child = fork();
	int status;

	if (!child) {
		unsigned char resident;

		_exit(mincore(chunk->memory, 4096, &resident) && errno == ENOMEM ? 0 : 1);
	}
	ck_assert_int_eq(waitpid(child, &status, 0), child);
	ck_assert_int_eq(status, 0);
	save_staging_put(&pool, chunk);
}
