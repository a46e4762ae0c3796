/* SPDX-License-Identifier: Apache-2.0 */
#define _GNU_SOURCE
#include "base/base.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

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
