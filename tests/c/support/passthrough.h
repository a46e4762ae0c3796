/* SPDX-License-Identifier: Apache-2.0 */
/* Mounts the filesystem of passthrough.c. This needs root in a mount namespace of its own. */
#ifndef TESTS_SUPPORT_PASSTHROUGH_H
#define TESTS_SUPPORT_PASSTHROUGH_H

#include <stdlib.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <unistd.h>

/*
 * Shows `base` at the directory `mnt`; `how` may be NULL. Returns NULL and sets the daemon's
 * process ID, or returns why it cannot be mounted.
 */
static inline const char *passthrough_mount(const char *base, const char *mnt, const char *how,
					    pid_t *daemon)
{
	const char *program = getenv("IOSHAPE_TEST_PASSTHROUGH");
	struct stat before, now;

	if (!program || !*program)
		return "libfuse 3 is not installed";
	if (access("/dev/fuse", R_OK | W_OK))
		return "there is no /dev/fuse";
	if (stat(mnt, &before))
		return "there is nothing to mount it on";
	*daemon = fork();
	if (!*daemon) {
		execl(program, program, base, mnt, how, (char *)NULL);
		_exit(127);
	}
	for (int tries = 0; tries < 1000; tries++) {
		if (!stat(mnt, &now) && now.st_dev != before.st_dev)
			return NULL;
		usleep(10000);
	}
	return "the daemon does not mount";
}

#endif
