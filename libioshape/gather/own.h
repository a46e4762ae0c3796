/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Descriptors that a forked child must not keep: as long as it did, nobody would see that we have
 * ended, and a name that we listened at would stay taken. Close-on-exec helps only those who exec.
 */
#ifndef GATHER_OWN_H
#define GATHER_OWN_H

/* Around the making of one: no fork() happens in between. Nothing in between may wait. */
void gather_own_begin(void);
void gather_own_end(void);
/* In between: fd (below 0 is fine) is ours. Without memory for that it is only close-on-exec. */
void gather_own_add(int fd);

/* Closes it; -1 is fine. */
void gather_own_close(int fd);

#endif
