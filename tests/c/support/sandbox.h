/* SPDX-License-Identifier: Apache-2.0 */
/* Takes system calls away from the calling process for good, as sandboxes do: for forked children.
 */
#ifndef TESTS_SUPPORT_SANDBOX_H
#define TESTS_SUPPORT_SANDBOX_H

/* The system call `number` (__NR_...) fails with `code` from now on. Returns 0, or -1 with errno.
 */
int sandbox_refuse(int number, int code);

#endif
