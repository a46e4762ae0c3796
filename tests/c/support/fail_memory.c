/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Wrappers of the functions that allocate. The linker turns malloc() into __wrap_malloc() and
 * __real_malloc() into malloc(), so sanitizers and valgrind still see every allocation.
 */
#define _GNU_SOURCE
#include "support/fail_memory.h"

#include <dirent.h>
#include <errno.h>
#include <hiredis.h>
#include <locale.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdio.h>
#include <sys/mman.h>

/* Atomic, because several threads of the library may allocate at once. */
static atomic_ulong count, first_failure;
static fail_memory_fn decides;

void fail_memory_at(unsigned long nth)
{
	atomic_store(&first_failure, 0);
	atomic_store(&count, 0);
	atomic_store(&first_failure, nth);
}

void fail_memory_by(fail_memory_fn decide)
{
	decides = decide;
}

unsigned long fail_memory_count(void)
{
	return atomic_load(&count);
}

static bool fails(const char *name, const void *site)
{
	unsigned long now, first;

	if (decides)
		return decides(name, site) != 0;
	now = atomic_fetch_add(&count, 1) + 1;
	first = atomic_load(&first_failure);
	if (!first || now < first)
		return false;
	errno = ENOMEM;
	return true;
}

#define WRAP(type, name, failure, parameters, arguments)                                           \
	type __real_##name parameters;                                                             \
	type __wrap_##name parameters;                                                             \
	type __wrap_##name parameters                                                              \
	{                                                                                          \
		return fails(#name, __builtin_return_address(0)) ? (failure) :                     \
								   __real_##name arguments;        \
	}

WRAP(void *, malloc, NULL, (size_t bytes), (bytes))
WRAP(void *, calloc, NULL, (size_t elements, size_t bytes), (elements, bytes))
WRAP(void *, realloc, NULL, (void *memory, size_t bytes), (memory, bytes))
WRAP(void *, reallocarray, NULL, (void *memory, size_t elements, size_t bytes),
     (memory, elements, bytes))
WRAP(char *, strdup, NULL, (const char *text), (text))
WRAP(char *, strndup, NULL, (const char *text, size_t bytes), (text, bytes))
WRAP(void *, mmap64, MAP_FAILED,
     (void *address, size_t bytes, int protection, int flags, int fd, off64_t offset),
     (address, bytes, protection, flags, fd, offset))
WRAP(char *, realpath, NULL, (const char *path, char *resolved), (path, resolved))
WRAP(DIR *, fdopendir, NULL, (int fd), (fd))
WRAP(locale_t, newlocale, NULL, (int categories, const char *name, locale_t base),
     (categories, name, base))
WRAP(FILE *, open_memstream, NULL, (char **into, size_t *bytes), (into, bytes))
/* Its result type depends on the version of hiredis. */
WRAP(__typeof__(redisFormatCommandArgv(NULL, 0, NULL, NULL)), redisFormatCommandArgv, -1,
     (char **into, int words, const char **word, const size_t *bytes), (into, words, word, bytes))
WRAP(redisReader *, redisReaderCreate, NULL, (void), ())
WRAP(int, pthread_create, EAGAIN,
     (pthread_t * thread, const pthread_attr_t *attributes, void *(*run)(void *), void *argument),
     (thread, attributes, run, argument))

int __real_asprintf(char **into, const char *format, ...);
int __wrap_asprintf(char **into, const char *format, ...) __attribute__((format(printf, 2, 3)));
int __wrap_asprintf(char **into, const char *format, ...)
{
	va_list args;
	int ret;

	if (fails("asprintf", __builtin_return_address(0)))
		return -1;
	va_start(args, format);
	ret = vasprintf(into, format, args);
	va_end(args);
	return ret;
}
