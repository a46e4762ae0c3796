/* SPDX-License-Identifier: Apache-2.0 */
#include "base/base.h"

#include <signal.h>

int base_start_thread(pthread_t *thread, void *(*run)(void *), void *argument)
{
	sigset_t all, before;
	int ret;

	/* The application's signals are for its own threads. */
	sigfillset(&all);
	pthread_sigmask(SIG_SETMASK, &all, &before);
	ret = pthread_create(thread, NULL, run, argument);
	pthread_sigmask(SIG_SETMASK, &before, NULL);
	return -ret;
}
