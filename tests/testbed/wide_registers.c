/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Preloaded into User-mode Linux of Debian 12, which fails on processors with AMX. It sets the
 * registers of its processes from a buffer that is too small for those of AMX, and Linux accepts
 * all registers or none (PTRACE_SETREGSET of NT_X86_XSTATE). This library adds the missing
 * registers with their present values.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <elf.h>
#include <stdarg.h>
#include <string.h>
#include <sys/ptrace.h>
#include <sys/types.h>
#include <sys/uio.h>

#define MOST_BYTES 16384u /* size of all registers; about 11,000 with AMX */

typedef long (*ptrace_fn)(enum __ptrace_request request, pid_t process, void *address, void *data);

static long set_registers(ptrace_fn next, pid_t process, void *kind, struct iovec *given)
{
	/* Static, because User-mode Linux has small stacks. A single thread runs here. */
	static char all[MOST_BYTES] __attribute__((aligned(64)));
	struct iovec iov = { .iov_base = all, .iov_len = sizeof(all) };
	long ret = next(PTRACE_GETREGSET, process, kind, &iov);

	if (ret || given->iov_len > iov.iov_len)
		return next(PTRACE_SETREGSET, process, kind, given);
	memcpy(all, given->iov_base, given->iov_len);
	return next(PTRACE_SETREGSET, process, kind, &iov);
}

long ptrace(enum __ptrace_request request, ...)
{
	static ptrace_fn next;
	void *address, *data;
	pid_t process;
	va_list args;

	va_start(args, request);
	process = va_arg(args, pid_t);
	address = va_arg(args, void *);
	data = va_arg(args, void *);
	va_end(args);
	if (!next)
		*(void **)&next = dlsym(RTLD_NEXT, "ptrace");
	if (request == PTRACE_SETREGSET && address == (void *)NT_X86_XSTATE)
		return set_registers(next, process, address, data);
	return next(request, process, address, data);
}
