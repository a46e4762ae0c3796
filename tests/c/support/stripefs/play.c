/* SPDX-License-Identifier: Apache-2.0 */
/* Dispatches questions about layouts to the simulated filesystem. */
#include "play.h"

#include <errno.h>
#include <string.h>
#include <sys/uio.h>

bool caller_read(fuse_req_t request, void *to, uint64_t address, size_t bytes)
{
	const struct iovec here = { to, bytes };
	const struct iovec there = { (void *)(uintptr_t)address, bytes };

	return process_vm_readv(fuse_req_ctx(request)->pid, &here, 1, &there, 1, 0) ==
	       (ssize_t)bytes;
}

bool caller_write(fuse_req_t request, const void *from, uint64_t address, size_t bytes)
{
	const struct iovec here = { (void *)(uintptr_t)from, bytes };
	const struct iovec there = { (void *)(uintptr_t)address, bytes };

	return process_vm_writev(fuse_req_ctx(request)->pid, &here, 1, &there, 1, 0) ==
	       (ssize_t)bytes;
}

ssize_t layout_attribute(const struct node *node, const char *name, char *blob)
{
	if (options.play == PLAY_LUSTRE && strcmp(name, "lustre.lov") == 0)
		return lustre_get(node, blob);
	if (options.play == PLAY_CEPH && strncmp(name, "ceph.", 5) == 0)
		return ceph_get(node, name, blob);
	return -EOPNOTSUPP;
}

int set_layout_attribute(struct node *node, const char *name, const char *value, size_t bytes)
{
	if (options.play == PLAY_LUSTRE && strcmp(name, "lustre.lov") == 0)
		return lustre_set(node, value, bytes);
	if (options.play == PLAY_CEPH && strncmp(name, "ceph.", 5) == 0)
		return ceph_set(node, name, value, bytes);
	return -EOPNOTSUPP;
}

static void do_ioctl(fuse_req_t request, fuse_ino_t ino, unsigned int command, void *argument,
		     struct fuse_file_info *file, unsigned int flags, const void *input,
		     size_t input_bytes, size_t output_bytes)
{
	struct node *node = node_of(ino);
	const uint64_t address = (uintptr_t)argument;
	bool known = false;

	(void)file;
	(void)flags;
	(void)input;
	(void)input_bytes;
	(void)output_bytes;
	if (options.play == PLAY_LUSTRE)
		known = lustre_ioctl(request, node, command, address);
	else if (options.play == PLAY_BEEGFS)
		known = beegfs_ioctl(request, node, command, address);
	if (!known)
		fuse_reply_err(request, ENOTTY);
}

void play_operations(struct fuse_lowlevel_ops *operations)
{
	operations->ioctl = do_ioctl;
}
