/* SPDX-License-Identifier: Apache-2.0 */
#define _GNU_SOURCE
#include "support/calls.h"

#include <errno.h>
#include <fcntl.h>
#include <liburing.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/vfs.h>
#include <unistd.h>

static struct calls_record *record;
static atomic_bool active;
static enum calls_mode wanted_mode;
static unsigned long wanted_nth;
static int wanted_code;
static const char *wanted_name;
static struct {
	const char *name;
	int code;
} denied[4];
static unsigned denied_count;

struct calls_record *calls_record(void)
{
	if (!record) {
		record = mmap(NULL, sizeof(*record), PROT_READ | PROT_WRITE,
			      MAP_SHARED | MAP_ANONYMOUS, -1, 0);
		if (record == MAP_FAILED)
			abort();
	}
	return record;
}

void calls_begin(enum calls_mode mode, unsigned long nth, int code)
{
	memset(calls_record(), 0, sizeof(*record));
	wanted_mode = mode;
	wanted_nth = nth;
	wanted_code = code;
	atomic_store(&active, true);
}

void calls_begin_named(const char *name, int code)
{
	wanted_name = name;
	calls_begin(CALLS_FAIL_FIRST, 0, code);
}

void calls_deny(const char *name, int code)
{
	if (denied_count == sizeof(denied) / sizeof(*denied))
		abort();
	denied[denied_count].name = name;
	denied[denied_count++].code = code;
}

void calls_end(void)
{
	atomic_store(&active, false);
}

long calls_find(const char *name, unsigned long from)
{
	unsigned long count = atomic_load(&calls_record()->count);

	for (unsigned long i = from; i < count && i < CALLS_MOST; i++) {
		const char *found = atomic_load(&record->names[i]);

		if (found && !strcmp(found, name))
			return (long)i;
	}
	return -1;
}

static void die(void)
{
	kill(getpid(), SIGKILL);
}

/* Whether the call is to fail; *number is what leave() wants to know. */
static bool enter(const char *name, unsigned long *number)
{
	*number = 0;
	if (!atomic_load(&active))
		return false;
	*number = atomic_fetch_add(&record->count, 1) + 1;
	if (*number <= CALLS_MOST)
		atomic_store(&record->names[*number - 1], name);
	if (wanted_mode == CALLS_FAIL_FIRST && wanted_name && !strcmp(name, wanted_name)) {
		wanted_name = NULL;
		errno = wanted_code;
		return true;
	}
	if (*number == wanted_nth && wanted_mode == CALLS_KILL_BEFORE)
		die();
	for (unsigned i = 0; i < denied_count; i++) {
		if (strcmp(name, denied[i].name))
			continue;
		if (*number == wanted_nth && wanted_mode == CALLS_KILL_AFTER)
			die();
		errno = denied[i].code;
		return true;
	}
	if (*number != wanted_nth || wanted_mode != CALLS_FAIL)
		return false;
	errno = wanted_code;
	return true;
}

static void leave(unsigned long number)
{
	int code = errno;

	if (number && number == wanted_nth && wanted_mode == CALLS_KILL_AFTER)
		die();
	errno = code;
}

/* A function whose failure is -1 and errno. */
#define WRAP(type, name, parameters, arguments)                                                    \
	type __real_##name parameters;                                                             \
	type __wrap_##name parameters;                                                             \
	type __wrap_##name parameters                                                              \
	{                                                                                          \
		unsigned long number;                                                              \
		type result;                                                                       \
                                                                                                   \
		if (enter(#name, &number))                                                         \
			return -1;                                                                 \
		result = __real_##name arguments;                                                  \
		leave(number);                                                                     \
		return result;                                                                     \
	}

WRAP(int, dup, (int fd), (fd))
WRAP(int, fallocate64, (int fd, int mode, off64_t offset, off64_t bytes), (fd, mode, offset, bytes))
WRAP(int, ftruncate64, (int fd, off64_t bytes), (fd, bytes))
WRAP(ssize_t, pwrite64, (int fd, const void *data, size_t bytes, off64_t offset),
     (fd, data, bytes, offset))
WRAP(ssize_t, pread64, (int fd, void *data, size_t bytes, off64_t offset),
     (fd, data, bytes, offset))
WRAP(ssize_t, write, (int fd, const void *data, size_t bytes), (fd, data, bytes))
WRAP(ssize_t, read, (int fd, void *data, size_t bytes), (fd, data, bytes))
WRAP(int, renameat, (int fd, const char *from, int to_fd, const char *to), (fd, from, to_fd, to))
WRAP(int, renameat2, (int fd, const char *from, int to_fd, const char *to, unsigned flags),
     (fd, from, to_fd, to, flags))
WRAP(int, linkat, (int fd, const char *from, int to_fd, const char *to, int flags),
     (fd, from, to_fd, to, flags))
WRAP(int, unlinkat, (int fd, const char *name, int flags), (fd, name, flags))
WRAP(int, mkdir, (const char *path, mode_t mode), (path, mode))
WRAP(int, mkdirat, (int fd, const char *name, mode_t mode), (fd, name, mode))
WRAP(int, fchmod, (int fd, mode_t mode), (fd, mode))
WRAP(int, fchown, (int fd, uid_t user, gid_t group), (fd, user, group))
WRAP(int, flock, (int fd, int operation), (fd, operation))
WRAP(int, fstat64, (int fd, struct stat64 *status), (fd, status))
WRAP(int, stat64, (const char *path, struct stat64 *status), (path, status))
WRAP(int, fstatat64, (int fd, const char *name, struct stat64 *status, int flags),
     (fd, name, status, flags))
WRAP(int, faccessat, (int fd, const char *name, int mode, int flags), (fd, name, mode, flags))
WRAP(ssize_t, readlink, (const char *path, char *into, size_t bytes), (path, into, bytes))
WRAP(int, sync_file_range, (int fd, off64_t offset, off64_t bytes, unsigned flags),
     (fd, offset, bytes, flags))

/* One whose failure is a negative errno. */
#define WRAP_RING(name, parameters, arguments)                                                     \
	int __real_##name parameters;                                                              \
	int __wrap_##name parameters;                                                              \
	int __wrap_##name parameters                                                               \
	{                                                                                          \
		unsigned long number;                                                              \
		int result;                                                                        \
                                                                                                   \
		if (enter(#name, &number))                                                         \
			return -wanted_code;                                                       \
		result = __real_##name arguments;                                                  \
		leave(number);                                                                     \
		return result;                                                                     \
	}

WRAP_RING(io_uring_queue_init, (unsigned entries, struct io_uring *ring, unsigned flags),
	  (entries, ring, flags))
WRAP_RING(io_uring_submit, (struct io_uring * ring), (ring))
WRAP_RING(io_uring_submit_and_wait, (struct io_uring * ring, unsigned count), (ring, count))
WRAP_RING(io_uring_register_buffers,
	  (struct io_uring * ring, const struct iovec *vectors, unsigned count),
	  (ring, vectors, count))
WRAP_RING(io_uring_register_files, (struct io_uring * ring, const int *files, unsigned count),
	  (ring, files, count))
WRAP_RING(io_uring_register_files_update,
	  (struct io_uring * ring, unsigned offset, const int *files, unsigned count),
	  (ring, offset, files, count))

/* ---- Those that need more than that ---------------------------------------------------------- */

int __real_close(int fd);
int __wrap_close(int fd);

int __real_fcntl64(int fd, int command, ...);

/* Open for writing; who only looks whether its writer is dead opens it otherwise. */
static bool is_temporary(int fd)
{
	char link[64], path[4096];
	ssize_t bytes;

	snprintf(link, sizeof(link), "/proc/self/fd/%d", fd);
	bytes = __real_readlink(link, path, sizeof(path) - 1);
	if (bytes < 0 || __real_fcntl64(fd, F_GETFL) & O_NONBLOCK)
		return false;
	path[bytes] = 0;
	return strstr(path, ".ioshape-tmp-") != NULL;
}

int __wrap_close(int fd)
{
	unsigned long number;
	int result;

	/* Whatever it answers, Linux has closed it. */
	if (enter(atomic_load(&active) && is_temporary(fd) ? "close temporary" : "close",
		  &number)) {
		__real_close(fd);
		errno = wanted_code;
		return -1;
	}
	result = __real_close(fd);
	leave(number);
	return result;
}

int __real_statx(int fd, const char *name, int flags, unsigned mask, struct statx *status);
int __wrap_statx(int fd, const char *name, int flags, unsigned mask, struct statx *status);
int __wrap_statx(int fd, const char *name, int flags, unsigned mask, struct statx *status)
{
	bool temporary = atomic_load(&active) && !*name && is_temporary(fd);
	unsigned long number;
	int result;

	if (enter(temporary ? "statx temporary" : "statx", &number))
		return -1;
	result = __real_statx(fd, name, flags, mask, status);
	leave(number);
	return result;
}

int __real_fstatfs64(int fd, struct statfs64 *status);
int __wrap_fstatfs64(int fd, struct statfs64 *status);
int __wrap_fstatfs64(int fd, struct statfs64 *status)
{
	bool temporary = atomic_load(&active) && is_temporary(fd);
	unsigned long number;
	int result;

	if (enter(temporary ? "fstatfs64 temporary" : "fstatfs64", &number))
		return -1;
	result = __real_fstatfs64(fd, status);
	leave(number);
	return result;
}

int __real_fsync(int fd);
int __wrap_fsync(int fd);
int __real_fstat64(int fd, struct stat64 *status);
int __wrap_fsync(int fd)
{
	struct stat64 status;
	unsigned long number;
	bool directory;
	int result;

	directory = !__real_fstat64(fd, &status) && S_ISDIR(status.st_mode);
	if (enter(directory ? "fsync directory" : "fsync", &number))
		return -1;
	result = __real_fsync(fd);
	leave(number);
	return result;
}

int __wrap_fcntl64(int fd, int command, ...);
int __wrap_fcntl64(int fd, int command, ...)
{
	unsigned long number;
	va_list args;
	int result;
	long argument;

	va_start(args, command);
	argument = va_arg(args, long);
	va_end(args);
	if (enter("fcntl64", &number))
		return -1;
	result = __real_fcntl64(fd, command, argument);
	leave(number);
	return result;
}

int __real_open64(const char *path, int flags, ...);
int __wrap_open64(const char *path, int flags, ...);
int __wrap_open64(const char *path, int flags, ...)
{
	unsigned long number;
	va_list args;
	mode_t mode;
	int result;

	va_start(args, flags);
	mode = va_arg(args, mode_t);
	va_end(args);
	/* What is only asked of the system is not the file's business. */
	if (!strncmp(path, "/proc/", 6) || !strncmp(path, "/sys/", 5))
		return __real_open64(path, flags, mode);
	if (enter("open64", &number))
		return -1;
	result = __real_open64(path, flags, mode);
	leave(number);
	return result;
}

int __real_openat64(int fd, const char *name, int flags, ...);
int __wrap_openat64(int fd, const char *name, int flags, ...);
int __wrap_openat64(int fd, const char *name, int flags, ...)
{
	unsigned long number;
	va_list args;
	mode_t mode;
	int result;

	va_start(args, flags);
	mode = va_arg(args, mode_t);
	va_end(args);
	if (enter("openat64", &number))
		return -1;
	if (number && strstr(name, ".ioshape-tmp-") && flags & O_CREAT) {
		record->temporary_mode = mode;
		record->temporary_flags = flags;
	}
	result = __real_openat64(fd, name, flags, mode);
	leave(number);
	return result;
}
