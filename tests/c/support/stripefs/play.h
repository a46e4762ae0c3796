/* SPDX-License-Identifier: Apache-2.0 */
/* What each filesystem that is played says about layouts. */
#ifndef STRIPEFS_PLAY_H
#define STRIPEFS_PLAY_H

#include "stripefs.h"

enum { MOST_LAYOUT_BYTES = 1 << 16 };

/* The memory of whoever called: an ioctl's number says less of it than there is. */
bool caller_read(fuse_req_t request, void *to, uint64_t address, size_t bytes);
bool caller_write(fuse_req_t request, const void *from, uint64_t address, size_t bytes);

/* As layout_attribute() and set_layout_attribute() of one name. */
ssize_t lustre_get(const struct node *node, char *blob);
int lustre_set(struct node *node, const char *blob, size_t bytes);
/* Whether they are theirs; then they have answered, or will. */
bool lustre_ioctl(fuse_req_t request, struct node *node, unsigned int command, uint64_t address);
bool hsm_ioctl(fuse_req_t request, struct node *node, unsigned int command, uint64_t address);
bool beegfs_ioctl(fuse_req_t request, struct node *node, unsigned int command, uint64_t address);
ssize_t ceph_get(const struct node *node, const char *name, char *text);
int ceph_set(struct node *node, const char *name, const char *value, size_t bytes);

#endif
