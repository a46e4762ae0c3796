/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The functions that the preload library replaces: those that write to descriptors, and those that
 * close them. Each calls the next library's function, which is usually that of the C library.
 * Functions that open or duplicate descriptors are left alone, because files.c compares identities.
 *
 * The C library's own calls of write(), such as that of fclose(), do not come here. So the
 * functions of stdio that write much are replaced, too.
 */
#define _GNU_SOURCE
#undef _FILE_OFFSET_BITS /* it would rename pwrite() to pwrite64() */
#include "preload/preload.h"

#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <sys/sendfile.h>
#include <sys/stat.h>
#include <sys/uio.h>

/* copy_file_range() and sendfile() transfer at most so many bytes of a large file at a time. They
 * may return less than they were asked for, and programs call them again. */
#define MOST_TRANSFER ((size_t)64 << 20)

/* The functions behind ours: result, name, parameters. */
#define FUNCTIONS(FUNCTION)                                                                        \
	FUNCTION(ssize_t, write, (int, const void *, size_t))                                      \
	FUNCTION(ssize_t, pwrite, (int, const void *, size_t, off_t))                              \
	FUNCTION(ssize_t, writev, (int, const struct iovec *, int))                                \
	FUNCTION(ssize_t, pwritev, (int, const struct iovec *, int, off_t))                        \
	FUNCTION(ssize_t, pwritev2, (int, const struct iovec *, int, off_t, int))                  \
	FUNCTION(ssize_t, copy_file_range, (int, off64_t *, int, off64_t *, size_t, unsigned))     \
	FUNCTION(ssize_t, sendfile, (int, int, off_t *, size_t))                                   \
	FUNCTION(ssize_t, splice, (int, off64_t *, int, off64_t *, size_t, unsigned))              \
	FUNCTION(size_t, fwrite, (const void *, size_t, size_t, FILE *))                           \
	FUNCTION(size_t, fwrite_unlocked, (const void *, size_t, size_t, FILE *))                  \
	FUNCTION(int, fsync, (int))                                                                \
	FUNCTION(int, fdatasync, (int))                                                            \
	FUNCTION(int, close, (int))                                                                \
	FUNCTION(int, fclose, (FILE *))

#define MEMBER(result, name, parameters) result(*name) parameters;
static struct {
	FUNCTIONS(MEMBER)
} next;

#define FIND(result, name, parameters) *(void **)&next.name = dlsym(RTLD_NEXT, #name);
static void find_functions(void)
{
	FUNCTIONS(FIND)
}

__attribute__((constructor)) static void prepare(void)
{
	const int saved = errno;

	find_functions();
	if (preload_settings_read()) {
		preload_turns_prepare();
		preload_files_prepare();
	}
	errno = saved;
}

/* Returns whether there is a next function. Constructors of other libraries may call ours before
 * prepare(), and an old C library lacks some functions. */
static bool has(const void *function)
{
	if (function)
		return true;
	errno = ENOSYS;
	return false;
}

#define NEXT(name) ((next.name ? (void)0 : find_functions()), has(*(void **)&next.name))

/*
 * Defines a function that calls the next one between the begin and the end of a write. `failed` is
 * its result if there is no next one, `begin` the call that begins the write.
 */
#define REPLACE(type, failed, begin, name, parameters, ...)                                        \
	PRELOAD_EXPORT type name parameters                                                        \
	{                                                                                          \
		struct mailbox *const box = begin;                                                 \
		const type result = NEXT(name) ? next.name(__VA_ARGS__) : (failed);                \
                                                                                                   \
		preload_end(box);                                                                  \
		return result;                                                                     \
	}

/* Exports a function under its name for 64-bit offsets, too. The compiler checks that all offsets
 * have 64 bits. */
#define ALIAS(name, other)                                                                         \
	PRELOAD_EXPORT extern __typeof__(other) name __attribute__((alias(#other)));

/* ---- Writes ---------------------------------------------------------------------------------- */

/* Begins a write of several pieces. */
static struct mailbox *begin_pieces(int fd, const struct iovec *pieces, int count)
{
	uint64_t bytes = 0;

	for (int i = 0; i < count && i < IOV_MAX; i++)
		bytes += pieces[i].iov_len;
	return preload_begin(fd, bytes);
}

REPLACE(ssize_t, -1, preload_begin(fd, bytes), write, (int fd, const void *data, size_t bytes), fd,
	data, bytes)

REPLACE(ssize_t, -1, preload_begin(fd, bytes), pwrite,
	(int fd, const void *data, size_t bytes, off_t offset), fd, data, bytes, offset)

REPLACE(ssize_t, -1, begin_pieces(fd, pieces, count), writev,
	(int fd, const struct iovec *pieces, int count), fd, pieces, count)

REPLACE(ssize_t, -1, begin_pieces(fd, pieces, count), pwritev,
	(int fd, const struct iovec *pieces, int count, off_t offset), fd, pieces, count, offset)

REPLACE(ssize_t, -1, begin_pieces(fd, pieces, count), pwritev2,
	(int fd, const struct iovec *pieces, int count, off_t offset, int flags), fd, pieces, count,
	offset, flags)

ALIAS(pwrite64, pwrite)
ALIAS(pwritev64, pwritev)
ALIAS(pwritev64v2, pwritev2)

/* ---- Transfers between descriptors ----------------------------------------------------------- */

/* Returns how many bytes a transfer from a descriptor can have: programs ask for more than a file
 * has. */
static size_t available(int from, size_t bytes)
{
	const int saved = errno;
	struct stat found;

	if (bytes > MOST_TRANSFER && !fstat(from, &found) && S_ISREG(found.st_mode) &&
	    (uint64_t)found.st_size < bytes)
		bytes = (size_t)found.st_size;
	errno = saved;
	return bytes;
}

/* Begins a transfer, and limits it if it goes to a large file. */
static struct mailbox *begin_transfer(int from, int to, size_t *bytes)
{
	const size_t expected = available(from, *bytes);
	struct mailbox *box;

	box = preload_begin(to, expected > MOST_TRANSFER ? MOST_TRANSFER : expected);
	if (box && *bytes > MOST_TRANSFER)
		*bytes = MOST_TRANSFER;
	return box;
}

REPLACE(ssize_t, -1, begin_transfer(from, to, &bytes), copy_file_range,
	(int from, off64_t *from_offset, int to, off64_t *to_offset, size_t bytes, unsigned flags),
	from, from_offset, to, to_offset, bytes, flags)

REPLACE(ssize_t, -1, begin_transfer(from, to, &bytes), sendfile,
	(int to, int from, off_t *offset, size_t bytes), to, from, offset, bytes)

ALIAS(sendfile64, sendfile)

REPLACE(ssize_t, -1, begin_transfer(from, to, &bytes), splice,
	(int from, off64_t *from_offset, int to, off64_t *to_offset, size_t bytes, unsigned flags),
	from, from_offset, to, to_offset, bytes, flags)

/* ---- Streams --------------------------------------------------------------------------------- */

/* Returns the descriptor of a stream, or -1 if it has none. */
static int descriptor_of(FILE *stream)
{
	const int saved = errno;
	const int fd = fileno_unlocked(stream);

	errno = saved;
	return fd;
}

static struct mailbox *begin_items(FILE *stream, size_t size, size_t count)
{
	size_t bytes;

	if (__builtin_mul_overflow(size, count, &bytes))
		return NULL;
	return preload_begin(descriptor_of(stream), bytes);
}

#undef fwrite_unlocked /* the C library's header may define macros of these names */
#undef fwrite

REPLACE(size_t, 0, begin_items(stream, size, count), fwrite,
	(const void *data, size_t size, size_t count, FILE *stream), data, size, count, stream)

REPLACE(size_t, 0, begin_items(stream, size, count), fwrite_unlocked,
	(const void *data, size_t size, size_t count, FILE *stream), data, size, count, stream)

/* ---- Syncs and closes ------------------------------------------------------------------------ */
/* A network filesystem writes its cached bytes in these calls, which may take long. The slot is
 * held until they return. */

REPLACE(int, -1, preload_touch(fd), fsync, (int fd), fd)

REPLACE(int, -1, preload_touch(fd), fdatasync, (int fd), fd)

PRELOAD_EXPORT int close(int fd)
{
	struct mailbox *const box = preload_touch(fd);
	const int result = NEXT(close) ? next.close(fd) : -1;

	preload_end(box);
	preload_forget(fd);
	return result;
}

PRELOAD_EXPORT int fclose(FILE *stream)
{
	const int fd = descriptor_of(stream);
	struct mailbox *const box = preload_touch(fd);
	const int result = NEXT(fclose) ? next.fclose(stream) : EOF;

	preload_end(box);
	preload_forget(fd);
	return result;
}
