/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Starting a holder from any thread of an unknown program, which must not notice it:
 *
 * - A child that shares the program's memory, as after vfork(), creates the mailbox and maps it.
 *   The child has descriptors of its own, so the program has none of ours at any time, and a
 *   program without free descriptors does not matter.
 * - That child starts the holder and ends, so the program has no child to wait for. Its end sends
 *   no signal.
 * - The holder leaves the folder of the program and closes its descriptors. It blocks all signals,
 *   so that those of a terminal do not end it.
 */
#define _GNU_SOURCE
#include "preload/preload.h"

#include <errno.h>
#include <fcntl.h>
#include <sched.h>
#include <signal.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/wait.h>

#ifndef SYS_close_range
#define SYS_close_range 436
#endif

enum { STACK_BYTES = 32 << 10, SIGNAL_BYTES = 8 /* of the kernel's sets of signals */ };

/* The children's stacks, and what they need. Only one thread of the program starts a holder. */
static struct {
	_Atomic int32_t busy; /* process id of the process whose thread uses this */
	union preload_box *box;
	bool started;
	char stacks[2][STACK_BYTES] __attribute__((aligned(64)));
} starting;

/* Becomes the holder. */
static int become_holder(void *unused)
{
	char *const arguments[] = { preload_settings.holder, NULL };

	(void)unused;
	syscall(SYS_execve, preload_settings.holder, arguments, preload_settings.environment);
	starting.started = false;
	syscall(SYS_exit, 1);
	return 1;
}

/* Creates the mailbox as descriptor MAILBOX_FD and maps it over the memory of the box. */
static bool make_mailbox(void)
{
	union preload_box *box = starting.box;

	/* It stays open in the holder. */
	return syscall(SYS_memfd_create, "ioshape", 0) == MAILBOX_FD &&
	       !syscall(SYS_ftruncate, MAILBOX_FD, sizeof(*box)) &&
	       mmap(box, sizeof(*box), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, MAILBOX_FD,
		    0) == box;
}

static void fill_mailbox(struct mailbox *box, pid_t program)
{
	memcpy(box->version, MAILBOX_VERSION, sizeof(box->version));
	box->pid = program;
	box->everywhere = preload_settings.everywhere;
	box->wait_ms = preload_settings.wait_ms;
	memcpy(box->program, preload_settings.program, sizeof(box->program));
	atomic_store(&box->beat_ms, mailbox_now_ms());
	atomic_store(&box->state, MAILBOX_IDLE);
}

/*
 * Leaves the program's folder and descriptors. All calls are the kernel's: functions of
 * the C library may be replaced by other preloaded libraries, or end a thread that is cancelled.
 */
static bool leave_program(void)
{
	if (syscall(SYS_close_range, 0, ~0u, 0)) { /* new in Linux 5.9 */
		for (int fd = 0; fd < PRELOAD_FILES; fd++)
			syscall(SYS_close, fd);
	}
	for (int fd = 0; fd < MAILBOX_FD; fd++) {
		if (syscall(SYS_openat, AT_FDCWD, "/dev/null", O_RDWR) != fd)
			return false;
	}
	return !syscall(SYS_chdir, "/");
}

/* Lifts the program's limits for the holder, as far as this user may. */
static void lift_limits(void)
{
	struct rlimit64 limit;

	for (int resource = 0; resource < RLIM_NLIMITS; resource++) {
		if (resource == RLIMIT_CORE || syscall(SYS_prlimit64, 0, resource, NULL, &limit))
			continue;
		limit.rlim_cur = limit.rlim_max;
		syscall(SYS_prlimit64, 0, resource, &limit, NULL);
	}
}

/* Makes the mailbox and starts the holder. Runs in the memory of the program. */
static int prepare_holder(void *unused)
{
	const pid_t program = (pid_t)(intptr_t)unused;
	pid_t holder;

	lift_limits();
	if (leave_program() && make_mailbox()) {
		fill_mailbox(&starting.box->box, program);
		/* An emulator may give this child memory of its own. Then the program does not see
		 * this, and goes on without a holder. */
		starting.started = true;
		holder = preload_settings.clone(become_holder, starting.stacks[1] + STACK_BYTES,
						CLONE_VM | CLONE_VFORK, NULL);
		if (holder < 0)
			starting.started = false;
		atomic_store(&starting.box->box.holder, (int32_t)holder);
	}
	syscall(SYS_exit, 0);
	return 0;
}

bool preload_start_holder(union preload_box *box)
{
	const int32_t pid = (int32_t)getpid();
	int32_t busy = atomic_load(&starting.busy);
	uint64_t all = ~UINT64_C(0), before = 0;
	bool started;
	pid_t child;

	/* A sandbox may kill a program that starts another one. A child that was forked meanwhile
	 * finds its parent's number here. */
	if (preload_restrictions() != preload_settings.restrictions || busy == pid ||
	    !atomic_compare_exchange_strong(&starting.busy, &busy, pid))
		return false;
	starting.box = box;
	starting.started = false;
	/* No handler of the program may run in the child. */
	syscall(SYS_rt_sigprocmask, SIG_SETMASK, &all, &before, SIGNAL_BYTES);
	child = preload_settings.clone(prepare_holder, starting.stacks[0] + STACK_BYTES,
				       CLONE_VM | CLONE_VFORK, (void *)(intptr_t)pid);
	if (child > 0)
		syscall(SYS_wait4, child, NULL, __WCLONE, NULL);
	syscall(SYS_rt_sigprocmask, SIG_SETMASK, &before, NULL, SIGNAL_BYTES);
	started = starting.started;
	atomic_store(&starting.busy, 0);
	return started;
}
