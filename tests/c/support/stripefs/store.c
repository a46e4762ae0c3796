/* SPDX-License-Identifier: Apache-2.0 */
/* Memory for the contents of files, in blocks of a mapped sparse file. */
#include "stripefs.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

/* distance from one block to the next */
#define STRIDE ((uint64_t)BLOCK_BYTES + HEAD_ROOM)

static struct {
	char *memory;
	uint32_t blocks;
	uint32_t touched; /* blocks that were handed out at least once */
	/*
	 * Returned blocks. The last one is taken first, because its memory is most likely in the
	 * caches.
	 */
	uint32_t *returned;
	uint32_t returned_count;
} store;

static int map_file(const char *folder, uint64_t bytes)
{
	char path[4096];
	int file, result = 0;

	snprintf(path, sizeof(path), "%s/objects", folder);
	file = open(path, O_RDWR | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
	if (file < 0)
		return -errno;
	if (ftruncate(file, (off_t)bytes)) {
		result = -errno;
	} else {
		store.memory = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
		if (store.memory == MAP_FAILED)
			result = -errno;
	}
	close(file);
	return result;
}

int store_open(const char *folder, uint64_t bytes)
{
	const uint64_t blocks = bytes / BLOCK_BYTES;
	/* The largest read request goes a little beyond its block. */
	const uint64_t mapped = (blocks + 2) * STRIDE;
	int result;

	store.blocks = (uint32_t)blocks;
	store.returned = calloc(blocks, sizeof(store.returned[0]));
	if (!store.returned)
		return -ENOMEM;
	result = map_file(folder, mapped);
	if (result)
		return result;
	madvise(store.memory, mapped, MADV_HUGEPAGE);
	return 0;
}

uint32_t store_take(void)
{
	if (store.returned_count)
		return store.returned[--store.returned_count];
	return store.touched < store.blocks ? ++store.touched : 0;
}

void store_give(uint32_t block)
{
	if (block)
		store.returned[store.returned_count++] = block;
}

char *store_block(uint32_t block)
{
	return store.memory + (block - 1) * STRIDE + HEAD_ROOM;
}
