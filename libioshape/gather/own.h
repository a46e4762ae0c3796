/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Descriptors that a forked child must not keep: as long as it did, nobody would see that we have
 * ended, and a name that we listened at would stay taken. Close-on-exec helps only those who exec.
 */
#ifndef GATHER_OWN_H
#define GATHER_OWN_H

#include <sys/types.h>

/* As openat(), of a file that others of this user see locked: or a negative errno. Without memory
 * to keep it in mind it is only close-on-exec. */
int gather_own_open(int folder_fd, const char *path, int flags, mode_t mode);

/* Closes it; -1 is fine. */
void gather_own_close(int fd);

#endif
