/* SPDX-License-Identifier: Apache-2.0 */
#define _GNU_SOURCE
#include "base/base.h"

#include <errno.h>
#include <signal.h>
#include <time.h>

void base_hold_sigpipe(struct base_held_sigpipe *held)
{
	const int code = errno;
	sigset_t pipe_signal, pending;

	sigemptyset(&pipe_signal);
	sigaddset(&pipe_signal, SIGPIPE);
	sigpending(&pending);
	held->was_pending = sigismember(&pending, SIGPIPE);
	pthread_sigmask(SIG_BLOCK, &pipe_signal, &held->before);
	errno = code;
}

void base_let_sigpipe(const struct base_held_sigpipe *held, bool raised)
{
	const struct timespec no_time = { 0, 0 };
	const int code = errno;
	sigset_t pipe_signal;

	sigemptyset(&pipe_signal);
	sigaddset(&pipe_signal, SIGPIPE);
	if (raised && !held->was_pending)
		sigtimedwait(&pipe_signal, NULL, &no_time);
	pthread_sigmask(SIG_SETMASK, &held->before, NULL);
	errno = code;
}
