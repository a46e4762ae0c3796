/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The linker turns malloc() into __wrap_malloc() and __real_malloc() into malloc(), and so on:
 * sanitizers and valgrind still see every allocation. Not for several threads.
 */
#include "support/fail_memory.h"

#include <errno.h>
#include <stdbool.h>
#include <stddef.h>

static unsigned long count, first_failure;

void fail_memory_at(unsigned long nth)
{
	count = 0;
	first_failure = nth;
}

unsigned long fail_memory_count(void)
{
	return count;
}

static bool fails(void)
{
	count++;
	if (!first_failure || count < first_failure)
		return false;
	errno = ENOMEM;
	return true;
}

void *__real_malloc(size_t bytes);
void *__wrap_malloc(size_t bytes);
void *__real_calloc(size_t count_of, size_t bytes);
void *__wrap_calloc(size_t count_of, size_t bytes);
void *__real_realloc(void *memory, size_t bytes);
void *__wrap_realloc(void *memory, size_t bytes);
void *__real_reallocarray(void *memory, size_t count_of, size_t bytes);
void *__wrap_reallocarray(void *memory, size_t count_of, size_t bytes);
char *__real_strdup(const char *text);
char *__wrap_strdup(const char *text);

void *__wrap_malloc(size_t bytes)
{
	return fails() ? NULL : __real_malloc(bytes);
}

void *__wrap_calloc(size_t count_of, size_t bytes)
{
	return fails() ? NULL : __real_calloc(count_of, bytes);
}

void *__wrap_realloc(void *memory, size_t bytes)
{
	return fails() ? NULL : __real_realloc(memory, bytes);
}

void *__wrap_reallocarray(void *memory, size_t count_of, size_t bytes)
{
	return fails() ? NULL : __real_reallocarray(memory, count_of, bytes);
}

char *__wrap_strdup(const char *text)
{
	return fails() ? NULL : __real_strdup(text);
}
