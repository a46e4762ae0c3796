/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Runs a test in a small virtual machine, for filesystems that this host's kernel lacks. The
 * machine is User-mode Linux: a kernel that is an ordinary program. It can read this host's files
 * and not change them. If this kernel has the filesystem and the test runs as root, namespaces are
 * used instead.
 */
#ifndef TESTS_SUPPORT_MACHINE_H
#define TESTS_SUPPORT_MACHINE_H

#include <stdbool.h>

/*
 * Runs `body` as root in such a machine. There filesystems of this type can be mounted once
 * `modules` are loaded (names, NULL at the end). /run is empty, writable and in memory, and is the
 * working directory. The network is a loopback interface. Output is printed on the host.
 *
 * Call it first in main(): inside the machine the program starts again. Returns what `body`
 * returned, or -1 with *why_not if no machine is available. The machine ends after `seconds` in any
 * case.
 */
int machine_run(const char *type, const char *const modules[], unsigned seconds, int (*body)(void),
		const char **why_not);

/* Starts a program in the background. It ends with the machine. Returns its process ID or -1. */
int machine_start(char *const arguments[], const char *output);

/*
 * Waits until a server accepts connections at this port of the loopback. Returns false after the
 * time-out.
 */
bool machine_wait_for_port(unsigned port, unsigned timeout_ms);

#endif
