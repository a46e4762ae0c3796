/* SPDX-License-Identifier: Apache-2.0 */
/* Operations on open files. */
#include "stripefs.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>

#ifndef FALLOC_FL_KEEP_SIZE
#define FALLOC_FL_KEEP_SIZE 0x01
#define FALLOC_FL_PUNCH_HOLE 0x02
#define FALLOC_FL_ZERO_RANGE 0x10
#endif

/*
 * Lustre's O_LOV_DELAY_CREATE includes O_NOCTTY, which the kernel removes before it asks. O_ASYNC
 * is the flag that remains.
 */
#define DELAY_CREATE O_ASYNC

uint32_t staged_block;

void file_lay_out(struct node *node, const struct node *directory, bool delayed)
{
	struct layout wish;

	free(node->layout);
	node->layout = calloc(1, sizeof(*node->layout));
	if (!node->layout)
		abort();
	if (delayed)
		return;
	layout_default(&wish);
	if (directory && directory->layout)
		wish = *directory->layout;
	if (layout_create(node->layout, &wish))
		layout_create(node->layout, (layout_default(&wish), &wish));
}

static bool refuses_direct(const struct fuse_file_info *file)
{
	return file->flags & O_DIRECT && options.direct == DIRECT_NONE;
}

static void set_open(struct node *node, struct fuse_file_info *file)
{
	/*
	 * The kernel runs direct requests to a file in parallel only if it keeps no pages of the
	 * file.
	 */
	file->direct_io = file->flags & O_DIRECT ? 1 : 0;
	file->keep_cache = node->read_by & asking ? 1 : 0;
	node->read_by |= asking;
}

static void do_create(fuse_req_t request, fuse_ino_t parent, const char *name, mode_t mode,
		      struct fuse_file_info *file)
{
	struct node *directory = node_of(parent), *node;
	struct entry *entry = entry_find(directory, name);

	if (strlen(name) > 255) {
		answer_error(request, OP_CREATE, ENAMETOOLONG);
		return;
	}
	if (refuses_direct(file)) {
		answer_error(request, OP_CREATE, EINVAL);
		return;
	}
	if (entry && file->flags & O_EXCL) {
		answer_error(request, OP_CREATE, EEXIST);
		return;
	}
	if (entry) {
		node = entry->node;
		if (file->flags & O_TRUNC) {
			content_truncate(node, 0);
			node_touch(node, true);
		}
	} else {
		node = node_create(directory, S_IFREG | (mode & 07777), fuse_req_ctx(request));
		entry_add(directory, name, node);
		file_lay_out(node, directory,
			     options.play == PLAY_LUSTRE && file->flags & DELAY_CREATE);
	}
	set_open(node, file);
	answer_create(request, node, file);
}

static void do_open(fuse_req_t request, fuse_ino_t ino, struct fuse_file_info *file)
{
	struct node *node = node_of(ino);

	if (refuses_direct(file)) {
		answer_error(request, OP_OPEN, EINVAL);
		return;
	}
	if (file->flags & O_TRUNC) {
		content_truncate(node, 0);
		node_touch(node, true);
	}
	/* Opening a file without objects for writing creates the default objects, as on Lustre. */
	if (!node->layout->count && (file->flags & O_ACCMODE) != O_RDONLY &&
	    !(file->flags & DELAY_CREATE))
		file_lay_out(node, NULL, false);
	set_open(node, file);
	answer_open(request, node, file);
}

static void do_flush(fuse_req_t request, fuse_ino_t ino, struct fuse_file_info *file)
{
	(void)ino;
	(void)file;
	fuse_reply_err(request, 0);
}

static void do_release(fuse_req_t request, fuse_ino_t ino, struct fuse_file_info *file)
{
	struct node *node = node_of(ino);

	(void)file;
	client_flush(node);
	/* The caller does not wait for this operation, but the metadata server does the work. */
	answer_error(request, OP_CLOSE, 0);
	node->opens--;
	node_settle(node);
}

static void do_fsync(fuse_req_t request, fuse_ino_t ino, int data_only, struct fuse_file_info *file)
{
	(void)data_only;
	(void)file;
	client_flush(node_of(ino));
	answer_synced(request, node_of(ino));
}

static bool misaligned(const struct fuse_file_info *file, uint64_t offset, uint64_t bytes)
{
	return file->flags & O_DIRECT && !file->writepage && (offset % PAGE || bytes % PAGE);
}

static void do_read(fuse_req_t request, fuse_ino_t ino, size_t bytes, off_t offset,
		    struct fuse_file_info *file)
{
	struct node *node = node_of(ino);

	statistics.read_requests++;
	statistics.direct_reads += file->flags & O_DIRECT ? 1 : 0;
	if (misaligned(file, (uint64_t)offset, bytes)) {
		fuse_reply_err(request, EINVAL);
		return;
	}
	if (offset >= node->stat.st_size) {
		fuse_reply_buf(request, NULL, 0);
		return;
	}
	if ((off_t)bytes > node->stat.st_size - offset)
		bytes = (size_t)(node->stat.st_size - offset);
	statistics.bytes_read += bytes;
	/*
	 * Bytes that were never written have no object, but reading them creates their component.
	 */
	layout_make(node->layout, (uint64_t)offset, bytes);
	model_io(request, node, false, (uint64_t)offset, (uint32_t)bytes);
}

static int write_now(struct node *node, uint64_t offset, const char *buffer, uint32_t bytes)
{
	int result;

	/* Lustre's client returns EBADF for a file without objects. */
	if (!node->layout->count)
		return -EBADF;
	result = layout_make(node->layout, offset, bytes);
	if (!result)
		result = content_reserve(node, offset, bytes);
	if (!result)
		result = content_write(node, offset, buffer, bytes, &staged_block);
	return result;
}

static void do_write(fuse_req_t request, fuse_ino_t ino, const char *buffer, size_t bytes,
		     off_t offset, struct fuse_file_info *file)
{
	struct node *node = node_of(ino);
	int result;

	if (misaligned(file, (uint64_t)offset, bytes)) {
		statistics.misaligned++;
		fuse_reply_err(request, EINVAL);
		return;
	}
	statistics.direct_writes += file->flags & O_DIRECT ? 1 : 0;
	if (file->flags & O_DIRECT && options.direct == DIRECT_LATE) {
		node->late_error = EINVAL;
		fuse_reply_write(request, bytes);
		return;
	}
	result = write_now(node, (uint64_t)offset, buffer, (uint32_t)bytes);
	if (result) {
		fuse_reply_err(request, -result);
		return;
	}
	statistics_write(node, (uint64_t)offset, (uint32_t)bytes);
	if (offset + (off_t)bytes > node->stat.st_size)
		node->stat.st_size = offset + (off_t)bytes;
	if (fuse_req_ctx(request)->uid && !file->writepage)
		node->stat.st_mode &= ~(mode_t)(S_ISUID | S_ISGID);
	node_touch(node, true);
	if (options.cache == CACHE_CLIENT && !(file->flags & O_DIRECT)) {
		fuse_reply_write(request, bytes);
		client_write(node, (uint64_t)offset, (uint32_t)bytes);
		return;
	}
	model_io(request, node, true, (uint64_t)offset, (uint32_t)bytes);
}

static void do_fallocate(fuse_req_t request, fuse_ino_t ino, int mode, off_t offset, off_t bytes,
			 struct fuse_file_info *file)
{
	struct node *node = node_of(ino);
	int result = 0;

	(void)file;
	if (!options.fallocate || mode & ~(FALLOC_FL_KEEP_SIZE | FALLOC_FL_PUNCH_HOLE)) {
		answer_error(request, OP_FALLOCATE, EOPNOTSUPP);
		return;
	}
	if (mode & FALLOC_FL_PUNCH_HOLE) {
		content_punch(node, (uint64_t)offset, (uint64_t)bytes);
	} else {
		result = node->layout->count ? 0 : -EBADF;
		if (!result)
			result = layout_make(node->layout, (uint64_t)offset, (uint64_t)bytes);
		if (!result)
			result = content_reserve(node, (uint64_t)offset, (uint64_t)bytes);
		if (!result && !(mode & FALLOC_FL_KEEP_SIZE) && offset + bytes > node->stat.st_size)
			node->stat.st_size = offset + bytes;
	}
	node_touch(node, true);
	answer_error(request, OP_FALLOCATE, -result);
}

void io_operations(struct fuse_lowlevel_ops *operations)
{
	operations->create = do_create;
	operations->open = do_open;
	operations->flush = do_flush;
	operations->release = do_release;
	operations->fsync = do_fsync;
	operations->fsyncdir = do_fsync;
	operations->read = do_read;
	operations->write = do_write;
	operations->fallocate = do_fallocate;
}
