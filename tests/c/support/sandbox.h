/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Blocks system calls of the calling process for good, as sandboxes do. Use it in forked children.
 */
#ifndef TESTS_SUPPORT_SANDBOX_H
#define TESTS_SUPPORT_SANDBOX_H

/*
 * Makes the system call `number` (__NR_...) fail with `code` from now on. Returns 0, or -1 with
 * errno.
 */
int sandbox_refuse(int number, int code);

#endif
