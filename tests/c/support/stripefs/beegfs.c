/* SPDX-License-Identifier: Apache-2.0 */
/*
 * BeeGFS's ioctls: they report a file's stripes, and create files with other stripes than their
 * directory's default.
 */
#include "play.h"

#include <errno.h>
#include <string.h>

#define TEST_IS_BEEGFS 0x80066616u
#define GET_STRIPEINFO 0x800c6619u
#define MKFILE_STRIPEHINTS 0x4018661bu

enum { PATTERN_RAID0 = 1, NAME_BYTES = 256 };

struct hints {
	uint64_t name; /* an address in the caller's memory */
	uint32_t mode, targets, chunk;
};

struct info {
	uint32_t pattern, chunk;
	uint16_t targets;
};

static void get_info(fuse_req_t request, const struct node *node, uint64_t address)
{
	const struct component *component;
	struct info info;

	if (!S_ISREG(node->stat.st_mode)) {
		answer_ioctl(request, -EINVAL, NULL, 0);
		return;
	}
	component = &node->layout->components[0];
	memset(&info, 0, sizeof(info));
	info.pattern = PATTERN_RAID0;
	info.chunk = (uint32_t)component->stripe_size;
	info.targets = component->count;
	answer_ioctl(request, caller_write(request, &info, address, 10) ? 0 : -EFAULT, NULL, 0);
}

static int read_name(fuse_req_t request, uint64_t address, char name[static NAME_BYTES])
{
	size_t length = 0;

	/* Read byte by byte: the memory behind the string may not be mapped. */
	while (caller_read(request, name + length, address + length, 1)) {
		if (!name[length])
			return strchr(name, '/') || !length ? -EINVAL : 0;
		if (++length == NAME_BYTES)
			return -ENAMETOOLONG;
	}
	return -EFAULT;
}

static int make_file(fuse_req_t request, struct node *directory, uint64_t address)
{
	struct layout wish;
	struct hints hints;
	char name[NAME_BYTES];
	struct node *node;
	int result;

	if (!S_ISDIR(directory->stat.st_mode))
		return -ENOTDIR;
	if (!caller_read(request, &hints, address, 20))
		return -EFAULT;
	result = read_name(request, hints.name, name);
	if (result)
		return result;
	if (entry_find(directory, name))
		return -EEXIST;
	/* A chunk size of 0 means the directory's. */
	if (hints.chunk & (hints.chunk - 1) || (hints.chunk && hints.chunk < CHUNK_BYTES))
		return -EINVAL;
	node = node_create(directory, S_IFREG | (hints.mode & 07777), fuse_req_ctx(request));
	entry_add(directory, name, node);
	file_lay_out(node, directory, false);
	layout_default(&wish);
	if (hints.chunk)
		wish.components[0].stripe_size = hints.chunk;
	if (hints.targets)
		wish.components[0].count = hints.targets < UINT16_MAX ? (uint16_t)hints.targets :
									UINT16_MAX;
	return layout_create(node->layout, &wish);
}

bool beegfs_ioctl(fuse_req_t request, struct node *node, unsigned int command, uint64_t address)
{
	/* The answer is longer than the size in the ioctl's number, as with the real client. */
	static const char test[] = "_FhGFS_";

	if (command == TEST_IS_BEEGFS)
		answer_ioctl(request,
			     caller_write(request, test, address, sizeof(test)) ? 0 : -EFAULT, NULL,
			     0);
	else if (command == GET_STRIPEINFO)
		get_info(request, node, address);
	else if (command == MKFILE_STRIPEHINTS)
		answer_ioctl(request, make_file(request, node, address), NULL, 0);
	else
		return false;
	return true;
}
