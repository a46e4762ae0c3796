/* SPDX-License-Identifier: Apache-2.0 */
/* Layout interfaces of the simulated filesystems. */
#ifndef STRIPEFS_PLAY_H
#define STRIPEFS_PLAY_H

#include "stripefs.h"

enum { MOST_LAYOUT_BYTES = 1 << 16 };

/*
 * Copy memory of the calling process. These ioctls use more memory than their number says. False:
 * the address is not accessible.
 */
bool caller_read(fuse_req_t request, void *to, uint64_t address, size_t bytes);
bool caller_write(fuse_req_t request, const void *from, uint64_t address, size_t bytes);

/*
 * Get and set the one layout attribute of Lustre, like layout_attribute() and
 * set_layout_attribute().
 */
ssize_t lustre_get(const struct node *node, char *blob);
int lustre_set(struct node *node, const char *blob, size_t bytes);
/*
 * Return whether the ioctl belongs to this filesystem. If so, the request has been answered, or
 * will be.
 */
bool lustre_ioctl(fuse_req_t request, struct node *node, unsigned int command, uint64_t address);
bool beegfs_ioctl(fuse_req_t request, struct node *node, unsigned int command, uint64_t address);
ssize_t ceph_get(const struct node *node, const char *name, char *text);
int ceph_set(struct node *node, const char *name, const char *value, size_t bytes);

#endif
