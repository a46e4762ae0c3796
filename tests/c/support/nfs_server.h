/* SPDX-License-Identifier: Apache-2.0 */
/*
 * An NFS server in user space (NFS-Ganesha) in a machine of one's own (support/machine.h): it
 * exports a folder that lies in memory, which is mounted from there by the kernel's NFS client.
 */
#ifndef TESTS_SUPPORT_NFS_SERVER_H
#define TESTS_SUPPORT_NFS_SERVER_H

#include <stdbool.h>

/* What the server has; what the client sees of it; and what another client does, which shares no
 * cache with it, as if it were on another host. */
#define NFS_SERVER_FOLDER "/run/export"
#define NFS_CLIENT_FOLDER "/run/mnt"
#define NFS_OTHER_FOLDER "/run/other"

/* NULL, or what is missing. */
const char *nfs_server_missing(void);

/* With so much room. */
bool nfs_server_start(unsigned mebibytes);

/* Mounts it with this version ("3", "4.2"), in both places. */
bool nfs_server_mount(const char *version);
void nfs_server_unmount(void);

/* SIGSTOP: it is away; SIGCONT: it is back. */
void nfs_server_signal(int number);

#endif
