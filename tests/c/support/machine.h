/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A small machine of one's own, for filesystems that the kernel of this one does not have:
 * User-mode Linux, a kernel that is an ordinary program, over the files of this machine, which it
 * can read and not change. Where the kernel has the filesystem and we are root, namespaces do
 * instead.
 */
#ifndef TESTS_SUPPORT_MACHINE_H
#define TESTS_SUPPORT_MACHINE_H

#include <stdbool.h>

/*
 * Runs `body` as root in such a machine, where filesystems of this type can be mounted once its
 * `modules` are loaded (names, NULL at the end), /run is empty and writable (it lies in memory),
 * the network is a loopback, and the working directory is /run. What it prints is printed here.
 *
 * Call it first thing in main(): in the machine the program starts anew. Returns what `body`
 * returned, or -1 and *why_not if there is no machine to be had. It ends after `seconds`, whatever
 * happens.
 */
int machine_run(const char *type, const char *const modules[], unsigned seconds, int (*body)(void),
		const char **why_not);

/* Runs a program in the background; all of them end with the machine. Its process id, or -1. */
int machine_start(char *const arguments[], const char *output);

/* Whether something answers at this port of the loopback before so many milliseconds are over. */
bool machine_wait_for_port(unsigned port, unsigned timeout_ms);

#endif
