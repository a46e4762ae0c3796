/* SPDX-License-Identifier: Apache-2.0 */
#define _GNU_SOURCE
#include "support/calls.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <hiredis.h>
#include <liburing.h>
#include <locale.h>
#include <netdb.h>
#include <poll.h>
#include <sched.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/uio.h>
#include <sys/vfs.h>
#include <sys/xattr.h>
#include <unistd.h>

/* Address at which the program is loaded. */
extern const char __executable_start[] __attribute__((visibility("hidden")));

static struct calls_record *record;
static atomic_bool active;
static enum calls_mode wanted_mode;
static struct {
	unsigned long nth;
	int code;
} wanted[2];
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
	wanted[0].nth = nth;
	wanted[0].code = code;
	wanted[1].nth = 0;
	atomic_store(&active, true);
}

void calls_begin_named(const char *name, int code)
{
	wanted_name = name;
	calls_begin(CALLS_FAIL_FIRST, 0, code);
}

void calls_also(unsigned long nth, int code)
{
	wanted[1].nth = nth;
	wanted[1].code = code;
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

/*
 * Returns whether two calls count as one name if all calls from a position on fail. All allocations
 * do.
 */
static bool is_alike(const char *name, const char *other)
{
	return !strcmp(name, other) || (calls_is_memory(name) && calls_is_memory(other));
}

static int choose(const char *name, unsigned long now)
{
	for (unsigned i = 0; i < denied_count; i++)
		if (!strcmp(name, denied[i].name))
			return denied[i].code;
	if (wanted_mode == CALLS_FAIL_FIRST && wanted_name && !strcmp(name, wanted_name)) {
		wanted_name = NULL;
		return wanted[0].code;
	}
	if (now == wanted[1].nth)
		return wanted[1].code;
	if (now == wanted[0].nth && (wanted_mode == CALLS_FAIL || wanted_mode == CALLS_FAIL_FROM))
		return wanted[0].code;
	if (wanted_mode == CALLS_FAIL_FROM && now > wanted[0].nth && wanted[0].nth <= CALLS_MOST) {
		const char *first = atomic_load(&record->names[wanted[0].nth - 1]);

		return first && is_alike(name, first) ? wanted[0].code : 0;
	}
	return 0;
}

/* Replaces a short result by an interruption, for calls that cannot do a part of their work. */
static int errno_of(int code)
{
	return code == CALLS_SHORT ? EINTR : code;
}

int calls_fail(const char *name, const void *site)
{
	unsigned long now;
	int code;

	if (!atomic_load(&active))
		return 0;
	now = atomic_fetch_add(&record->count, 1) + 1;
	if (wanted_mode == CALLS_KILL && now == wanted[0].nth)
		kill(getpid(), SIGKILL);
	code = choose(name, now);
	if (now <= CALLS_MOST) {
		record->sites[now - 1] = (uint32_t)((const char *)site - __executable_start);
		record->codes[now - 1] = code;
		atomic_store(&record->names[now - 1], name);
	}
	if (code)
		errno = errno_of(code);
	return code;
}

/* Decides about the call whose wrapper this is used in: 0, an errno or CALLS_SHORT. */
#define FAIL(name) calls_fail(name, __builtin_return_address(0))

/* Wraps a function that fails by returning `failure` and setting errno. */
#define WRAP(type, name, failure, parameters, arguments)                                           \
	type __real_##name parameters;                                                             \
	type __wrap_##name parameters;                                                             \
	type __wrap_##name parameters                                                              \
	{                                                                                          \
		return FAIL(#name) ? (failure) : __real_##name arguments;                          \
	}

/* Wraps a function that may do less than it was asked for. */
#define WRAP_PART(name, parameters, arguments, less)                                               \
	ssize_t __real_##name parameters;                                                          \
	ssize_t __wrap_##name parameters;                                                          \
	ssize_t __wrap_##name parameters                                                           \
	{                                                                                          \
		const int code = FAIL(#name);                                                      \
                                                                                                   \
		if (code == CALLS_SHORT)                                                           \
			return __real_##name less;                                                 \
		return code ? -1 : __real_##name arguments;                                        \
	}

/* Wraps a function that fails by returning a negative errno. */
#define WRAP_RING(name, parameters, arguments)                                                     \
	int __real_##name parameters;                                                              \
	int __wrap_##name parameters;                                                              \
	int __wrap_##name parameters                                                               \
	{                                                                                          \
		return FAIL(#name) ? -errno : __real_##name arguments;                             \
	}

/*
 * Returns the length of a short result. It is whole pages where possible, because direct reads can
 * only go on there.
 */
static size_t part(size_t bytes)
{
	return bytes > 8192 ? bytes / 2 / 4096 * 4096 : (bytes + 1) / 2;
}

/* ---- Files ----------------------------------------------------------------------------------- */

WRAP(int, access, -1, (const char *path, int mode), (path, mode))
WRAP(int, dup, -1, (int fd), (fd))
WRAP(int, dup3, -1, (int fd, int other, int flags), (fd, other, flags))
WRAP(int, faccessat, -1, (int fd, const char *name, int mode, int flags), (fd, name, mode, flags))
WRAP(int, fallocate64, -1, (int fd, int mode, off64_t offset, off64_t bytes),
     (fd, mode, offset, bytes))
WRAP(int, fchmod, -1, (int fd, mode_t mode), (fd, mode))
WRAP(int, fchown, -1, (int fd, uid_t user, gid_t group), (fd, user, group))
WRAP(ssize_t, fgetxattr, -1, (int fd, const char *name, void *value, size_t bytes),
     (fd, name, value, bytes))
WRAP(char *, fgets, NULL, (char *into, int bytes, FILE *file), (into, bytes, file))
WRAP(int, flock, -1, (int fd, int operation), (fd, operation))
WRAP(FILE *, fopen64, NULL, (const char *path, const char *mode), (path, mode))
WRAP(int, fremovexattr, -1, (int fd, const char *name), (fd, name))
WRAP(int, fsetxattr, -1, (int fd, const char *name, const void *value, size_t bytes, int flags),
     (fd, name, value, bytes, flags))
WRAP(int, fstat64, -1, (int fd, struct stat64 *status), (fd, status))
WRAP(int, fstatat64, -1, (int fd, const char *name, struct stat64 *status, int flags),
     (fd, name, status, flags))
WRAP(int, fstatvfs64, -1, (int fd, struct statvfs64 *status), (fd, status))
WRAP(int, ftruncate64, -1, (int fd, off64_t bytes), (fd, bytes))
WRAP(int, futimens, -1, (int fd, const struct timespec times[2]), (fd, times))
WRAP(char *, getcwd, NULL, (char *into, size_t bytes), (into, bytes))
WRAP(ssize_t, lgetxattr, -1, (const char *path, const char *name, void *value, size_t bytes),
     (path, name, value, bytes))
WRAP(int, link, -1, (const char *from, const char *to), (from, to))
WRAP(int, linkat, -1, (int fd, const char *from, int to_fd, const char *to, int flags),
     (fd, from, to_fd, to, flags))
WRAP(int, lstat64, -1, (const char *path, struct stat64 *status), (path, status))
WRAP(int, mkdir, -1, (const char *path, mode_t mode), (path, mode))
WRAP(int, mkdirat, -1, (int fd, const char *name, mode_t mode), (fd, name, mode))
WRAP(DIR *, opendir, NULL, (const char *path), (path))
WRAP(struct dirent64 *, readdir64, NULL, (DIR * listing), (listing))
WRAP(ssize_t, readlink, -1, (const char *path, char *into, size_t bytes), (path, into, bytes))
WRAP(ssize_t, readlinkat, -1, (int fd, const char *path, char *into, size_t bytes),
     (fd, path, into, bytes))
WRAP(int, renameat, -1, (int fd, const char *from, int to_fd, const char *to),
     (fd, from, to_fd, to))
WRAP(int, renameat2, -1, (int fd, const char *from, int to_fd, const char *to, unsigned flags),
     (fd, from, to_fd, to, flags))
WRAP(int, rmdir, -1, (const char *path), (path))
WRAP(int, stat64, -1, (const char *path, struct stat64 *status), (path, status))
WRAP(int, statfs64, -1, (const char *path, struct statfs64 *status), (path, status))
WRAP(int, symlinkat, -1, (const char *text, int fd, const char *name), (text, fd, name))
WRAP(int, sync_file_range, -1, (int fd, off64_t offset, off64_t bytes, unsigned flags),
     (fd, offset, bytes, flags))
WRAP(int, syncfs, -1, (int fd), (fd))
WRAP(int, unlink, -1, (const char *path), (path))
WRAP(int, unlinkat, -1, (int fd, const char *name, int flags), (fd, name, flags))
WRAP_PART(pread64, (int fd, void *data, size_t bytes, off64_t offset), (fd, data, bytes, offset),
	  (fd, data, part(bytes), offset))
WRAP_PART(read, (int fd, void *data, size_t bytes), (fd, data, bytes), (fd, data, part(bytes)))
WRAP_PART(write, (int fd, const void *data, size_t bytes), (fd, data, bytes),
	  (fd, data, part(bytes)))

/* ---- Sockets and other system calls ---------------------------------------------------------- */

WRAP(int, accept4, -1, (int fd, struct sockaddr *address, socklen_t *bytes, int flags),
     (fd, address, bytes, flags))
WRAP(int, bind, -1, (int fd, const struct sockaddr *address, socklen_t bytes), (fd, address, bytes))
WRAP(int, connect, -1, (int fd, const struct sockaddr *address, socklen_t bytes),
     (fd, address, bytes))
WRAP(int, eventfd, -1, (unsigned value, int flags), (value, flags))
WRAP(int, getaddrinfo, EAI_AGAIN,
     (const char *host, const char *service, const struct addrinfo *hints, struct addrinfo **found),
     (host, service, hints, found))
WRAP(int, gethostname, -1, (char *into, size_t bytes), (into, bytes))
WRAP(ssize_t, getrandom, -1, (void *into, size_t bytes, unsigned flags), (into, bytes, flags))
WRAP(int, getrlimit64, -1, (int what, struct rlimit64 *limit), (what, limit))
WRAP(int, getsockopt, -1, (int fd, int level, int name, void *value, socklen_t *bytes),
     (fd, level, name, value, bytes))
WRAP(int, listen, -1, (int fd, int most), (fd, most))
WRAP(int, madvise, -1, (void *memory, size_t bytes, int advice), (memory, bytes, advice))
WRAP(int, memfd_create, -1, (const char *name, unsigned flags), (name, flags))
WRAP(int, mincore, -1, (void *memory, size_t bytes, unsigned char *there), (memory, bytes, there))
WRAP(int, poll, -1, (struct pollfd * fds, nfds_t count, int timeout_ms), (fds, count, timeout_ms))
WRAP(int, sched_getaffinity, -1, (pid_t process, size_t bytes, cpu_set_t *set),
     (process, bytes, set))
WRAP(int, setsockopt, -1, (int fd, int level, int name, const void *value, socklen_t bytes),
     (fd, level, name, value, bytes))
WRAP(int, shutdown, -1, (int fd, int how), (fd, how))
WRAP(int, socket, -1, (int domain, int type, int protocol), (domain, type, protocol))
WRAP(ssize_t, recvmsg, -1, (int fd, struct msghdr *message, int flags), (fd, message, flags))
WRAP(ssize_t, send, -1, (int fd, const void *data, size_t bytes, int flags),
     (fd, data, bytes, flags))
WRAP(ssize_t, sendmsg, -1, (int fd, const struct msghdr *message, int flags), (fd, message, flags))
WRAP(ssize_t, sendto, -1,
     (int fd, const void *data, size_t bytes, int flags, const struct sockaddr *address,
      socklen_t address_bytes),
     (fd, data, bytes, flags, address, address_bytes))

WRAP(redisContext *, redisConnectFd, NULL, (int fd), (fd))

/* Wraps a function of hiredis, which reports failures in its context. */
#define WRAP_REDIS(name, parameters, arguments)                                                    \
	int __real_##name parameters;                                                              \
	int __wrap_##name parameters;                                                              \
	int __wrap_##name parameters                                                               \
	{                                                                                          \
		const int code = FAIL(#name);                                                      \
                                                                                                   \
		if (!code)                                                                         \
			return __real_##name arguments;                                            \
		context->err = REDIS_ERR_IO;                                                       \
		snprintf(context->errstr, sizeof(context->errstr), "made to fail");                \
		return REDIS_ERR;                                                                  \
	}

WRAP_REDIS(redisAppendFormattedCommand, (redisContext * context, const char *command, size_t bytes),
	   (context, command, bytes))
WRAP_REDIS(redisBufferRead, (redisContext * context), (context))
WRAP_REDIS(redisBufferWrite, (redisContext * context, int *done), (context, done))
WRAP_REDIS(redisGetReplyFromReader, (redisContext * context, void **reply), (context, reply))

/* ---- io_uring -------------------------------------------------------------------------------- */

WRAP_RING(io_uring_queue_init, (unsigned entries, struct io_uring *ring, unsigned flags),
	  (entries, ring, flags))
WRAP_RING(io_uring_ring_dontfork, (struct io_uring * ring), (ring))
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
WRAP_RING(io_uring_register_iowq_max_workers, (struct io_uring * ring, unsigned *values),
	  (ring, values))

/* Waits for the completion, and makes it fail. */
int __real___io_uring_get_cqe(struct io_uring *ring, struct io_uring_cqe **cqe, unsigned submit,
			      unsigned count, sigset_t *signals);
int __wrap___io_uring_get_cqe(struct io_uring *ring, struct io_uring_cqe **cqe, unsigned submit,
			      unsigned count, sigset_t *signals);
int __wrap___io_uring_get_cqe(struct io_uring *ring, struct io_uring_cqe **cqe, unsigned submit,
			      unsigned count, sigset_t *signals)
{
	const int code = FAIL("__io_uring_get_cqe");
	int ret;

	if (code == EINTR)
		return -EINTR;
	ret = __real___io_uring_get_cqe(ring, cqe, submit, count, signals);
	if (!ret && code == CALLS_SHORT && (*cqe)->res > 0)
		(*cqe)->res = (int)part((size_t)(*cqe)->res);
	else if (!ret && code)
		(*cqe)->res = -errno_of(code);
	return ret;
}

/* ---- Functions with special cases ------------------------------------------------------------ */

bool calls_is_memory(const char *name)
{
	static const char *const names[] = { "asprintf",
					     "calloc",
					     "fdopendir",
					     "malloc",
					     "mmap64",
					     "newlocale",
					     "open_memstream",
					     "pthread_create",
					     "realloc",
					     "reallocarray",
					     "realpath",
					     "redisFormatCommandArgv",
					     "redisReaderCreate",
					     "strdup",
					     "strndup" };

	for (size_t i = 0; i < sizeof(names) / sizeof(*names); i++)
		if (!strcmp(name, names[i]))
			return true;
	return false;
}

int __real_close(int fd);
int __wrap_close(int fd);

int __real_fcntl64(int fd, int command, ...);

/*
 * Returns whether the descriptor is a temporary file that is open for writing. The library opens
 * with O_NONBLOCK if it only checks whether the writer is dead.
 */
static bool is_temporary(int fd)
{
	char link[64], path[4096];
	ssize_t bytes;

	if (!atomic_load(&active))
		return false;
	snprintf(link, sizeof(link), "/proc/self/fd/%d", fd);
	bytes = __real_readlink(link, path, sizeof(path) - 1);
	if (bytes < 0 || __real_fcntl64(fd, F_GETFL) & O_NONBLOCK)
		return false;
	path[bytes] = 0;
	return strstr(path, ".ioshape-tmp-") != NULL;
}

int __wrap_close(int fd)
{
	const int code = FAIL(is_temporary(fd) ? "close temporary" : "close");
	int result;

	/* Linux closes the descriptor even if close() fails. */
	result = __real_close(fd);
	if (!code)
		return result;
	errno = errno_of(code);
	return -1;
}

ssize_t __real_pwritev64(int fd, const struct iovec *parts, int count, off64_t offset);
ssize_t __wrap_pwritev64(int fd, const struct iovec *parts, int count, off64_t offset);
ssize_t __wrap_pwritev64(int fd, const struct iovec *parts, int count, off64_t offset)
{
	return FAIL("pwritev64") ? -1 : __real_pwritev64(fd, parts, count, offset);
}

ssize_t __real_pwrite64(int fd, const void *data, size_t bytes, off64_t offset);
ssize_t __wrap_pwrite64(int fd, const void *data, size_t bytes, off64_t offset);
ssize_t __wrap_pwrite64(int fd, const void *data, size_t bytes, off64_t offset)
{
	const int code = FAIL(is_temporary(fd) ? "pwrite64 temporary" : "pwrite64");

	if (code == CALLS_SHORT)
		return __real_pwrite64(fd, data, part(bytes), offset);
	return code ? -1 : __real_pwrite64(fd, data, bytes, offset);
}

int __real_fclose(FILE *file);
int __wrap_fclose(FILE *file);
int __wrap_fclose(FILE *file)
{
	const int code = FAIL("fclose");
	const int result = __real_fclose(file);

	if (!code)
		return result;
	errno = errno_of(code);
	return EOF;
}

int __real_statx(int fd, const char *name, int flags, unsigned mask, struct statx *status);
int __wrap_statx(int fd, const char *name, int flags, unsigned mask, struct statx *status);
int __wrap_statx(int fd, const char *name, int flags, unsigned mask, struct statx *status)
{
	return FAIL(!*name && is_temporary(fd) ? "statx temporary" : "statx") ?
		       -1 :
		       __real_statx(fd, name, flags, mask, status);
}

int __real_fstatfs64(int fd, struct statfs64 *status);
int __wrap_fstatfs64(int fd, struct statfs64 *status);
int __wrap_fstatfs64(int fd, struct statfs64 *status)
{
	return FAIL(is_temporary(fd) ? "fstatfs64 temporary" : "fstatfs64") ?
		       -1 :
		       __real_fstatfs64(fd, status);
}

int __real_fsync(int fd);
int __wrap_fsync(int fd);
int __wrap_fsync(int fd)
{
	struct stat64 status;
	const bool directory = !__real_fstat64(fd, &status) && S_ISDIR(status.st_mode);

	return FAIL(directory ? "fsync directory" : "fsync") ? -1 : __real_fsync(fd);
}

/* Reads the single variable argument of these calls. */
#define TAKE(last, type, into)                                                                     \
	do {                                                                                       \
		va_list args;                                                                      \
                                                                                                   \
		va_start(args, last);                                                              \
		into = va_arg(args, type);                                                         \
		va_end(args);                                                                      \
	} while (0)

int __wrap_fcntl64(int fd, int command, ...);
int __wrap_fcntl64(int fd, int command, ...)
{
	long argument;

	TAKE(command, long, argument);
	return FAIL("fcntl64") ? -1 : __real_fcntl64(fd, command, argument);
}

int __real_ioctl(int fd, unsigned long command, ...);
int __wrap_ioctl(int fd, unsigned long command, ...);
int __wrap_ioctl(int fd, unsigned long command, ...)
{
	void *argument;

	TAKE(command, void *, argument);
	return FAIL("ioctl") ? -1 : __real_ioctl(fd, command, argument);
}

int __real_open64(const char *path, int flags, ...);
int __wrap_open64(const char *path, int flags, ...);
int __wrap_open64(const char *path, int flags, ...)
{
	mode_t mode;

	TAKE(flags, mode_t, mode);
	return FAIL("open64") ? -1 : __real_open64(path, flags, mode);
}

int __real_openat64(int fd, const char *name, int flags, ...);
int __wrap_openat64(int fd, const char *name, int flags, ...);
int __wrap_openat64(int fd, const char *name, int flags, ...)
{
	const bool temporary = strstr(name, ".ioshape-tmp-") && flags & O_CREAT;
	mode_t mode;

	TAKE(flags, mode_t, mode);
	if (FAIL(temporary ? "openat64 temporary" : "openat64"))
		return -1;
	if (atomic_load(&active) && temporary) {
		record->temporary_mode = mode;
		record->temporary_flags = flags;
	}
	return __real_openat64(fd, name, flags, mode);
}

long __real_syscall(long number, ...);
long __wrap_syscall(long number, ...);
/*
 * The caller may have passed fewer than six arguments. Like the real function, this passes on
 * whatever is on the stack.
 */
__attribute__((no_sanitize("address"))) long __wrap_syscall(long number, ...)
{
	long arguments[6];
	va_list args;

	va_start(args, number);
	for (int i = 0; i < 6; i++)
		arguments[i] = va_arg(args, long);
	va_end(args);
	return FAIL("syscall") ? -1 :
				 __real_syscall(number, arguments[0], arguments[1], arguments[2],
						arguments[3], arguments[4], arguments[5]);
}
