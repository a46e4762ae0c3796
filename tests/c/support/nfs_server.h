/* SPDX-License-Identifier: Apache-2.0 */
/*
 * An NFS server in user space (NFS-Ganesha) inside a test machine (support/machine.h). It exports a
 * folder in memory, which the kernel's NFS client mounts.
 */
#ifndef TESTS_SUPPORT_NFS_SERVER_H
#define TESTS_SUPPORT_NFS_SERVER_H

#include <stdbool.h>

/*
 * Folders: on the server, as the client sees it, and as another client sees it. The clients share
 * no cache, as if they were on two hosts.
 */
#define NFS_SERVER_FOLDER "/run/export"
#define NFS_CLIENT_FOLDER "/run/mnt"
#define NFS_OTHER_FOLDER "/run/other"

/* Returns NULL, or a message that says what is not installed. */
const char *nfs_server_missing(void);

/* Starts the server with an export of this size. */
bool nfs_server_start(unsigned mebibytes);

/* Mounts the export with this version ("3", "4.2") at both clients' folders. */
bool nfs_server_mount(const char *version);
void nfs_server_unmount(void);

/*
 * Sends a signal to the server. SIGSTOP simulates a server that is down, SIGCONT one that is back.
 */
void nfs_server_signal(int number);

#endif
