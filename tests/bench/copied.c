/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Counts the bytes that this process copies. The linker (--wrap) redirects every call in the
 * library's objects and in the benchmark's to a function here, which counts first. Bytes of socket
 * calls count because the kernel copies them. Bytes written to files do not count: whether the
 * kernel copies them is in the report ("direct").
 */
#include "bench.h"

#include <stdatomic.h>
#include <sys/socket.h>

static _Atomic uint64_t in_memory, through_sockets;

static void count(_Atomic uint64_t *counter, size_t bytes)
{
	atomic_fetch_add_explicit(counter, bytes, memory_order_relaxed);
}

void *__real_memcpy(void *to, const void *from, size_t bytes);
void *__wrap_memcpy(void *to, const void *from, size_t bytes);
void *__wrap_memcpy(void *to, const void *from, size_t bytes)
{
	count(&in_memory, bytes);
	return __real_memcpy(to, from, bytes);
}

void *__real___memcpy_chk(void *to, const void *from, size_t bytes, size_t room);
void *__wrap___memcpy_chk(void *to, const void *from, size_t bytes, size_t room);
void *__wrap___memcpy_chk(void *to, const void *from, size_t bytes, size_t room)
{
	count(&in_memory, bytes);
	return __real___memcpy_chk(to, from, bytes, room);
}

void *__real_memmove(void *to, const void *from, size_t bytes);
void *__wrap_memmove(void *to, const void *from, size_t bytes);
void *__wrap_memmove(void *to, const void *from, size_t bytes)
{
	count(&in_memory, bytes);
	return __real_memmove(to, from, bytes);
}

static ssize_t moved(ssize_t bytes)
{
	if (bytes > 0)
		count(&through_sockets, (size_t)bytes);
	return bytes;
}

ssize_t __real_send(int fd, const void *data, size_t bytes, int flags);
ssize_t __wrap_send(int fd, const void *data, size_t bytes, int flags);
ssize_t __wrap_send(int fd, const void *data, size_t bytes, int flags)
{
	return moved(__real_send(fd, data, bytes, flags));
}

ssize_t __real_recv(int fd, void *into, size_t room, int flags);
ssize_t __wrap_recv(int fd, void *into, size_t room, int flags);
ssize_t __wrap_recv(int fd, void *into, size_t room, int flags)
{
	return moved(__real_recv(fd, into, room, flags));
}

ssize_t __real_sendmsg(int fd, const struct msghdr *message, int flags);
ssize_t __wrap_sendmsg(int fd, const struct msghdr *message, int flags);
ssize_t __wrap_sendmsg(int fd, const struct msghdr *message, int flags)
{
	return moved(__real_sendmsg(fd, message, flags));
}

ssize_t __real_recvmsg(int fd, struct msghdr *message, int flags);
ssize_t __wrap_recvmsg(int fd, struct msghdr *message, int flags);
ssize_t __wrap_recvmsg(int fd, struct msghdr *message, int flags)
{
	return moved(__real_recvmsg(fd, message, flags));
}

void run_copied(struct bench *bench, const struct command *command)
{
	(void)bench;
	(void)command;
	answer_number("in_memory", (double)atomic_exchange(&in_memory, 0));
	answer_number("through_sockets", (double)atomic_exchange(&through_sockets, 0));
}
