/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Lustre's archive (HSM): its ioctls, a coordinator that accepts every request, and a copytool. The
 * copytool copies all files concurrently, each at the speed of one target.
 */
#include "play.h"

#include <errno.h>
#include <string.h>

#define STATE_GET 0x802066d3u
#define REQUEST 0x401866d9u
#define CURRENT_ACTION 0x801866dcu
#define PATH2FID 0x800866adu

enum {
	HAS_COPY = 0x1, /* HS_EXISTS */
	DIRTY = 0x2,
	ARCHIVED = 0x8,
	NO_ACTION = 1,
	ARCHIVE = 10,
	WAITING = 1,
	RUNNING = 2,
	/* most items in a request */
	MOST_ITEMS = 1024,
};

/* First half of a FID, in front of the file's number. Any value but 0 does. */
static const uint64_t sequence = 0x200000401;

struct fid {
	uint64_t sequence;
	uint32_t number, version;
};

struct request {
	uint32_t action, archive;
	uint64_t flags;
	uint32_t items, data_bytes;
};

struct item {
	struct fid fid;
	uint64_t offset, length;
};

struct state {
	uint32_t flags, archive, in_progress_state, in_progress_action;
	uint64_t offset, length;
};

struct action {
	uint32_t state, action;
	uint64_t offset, length;
};

_Static_assert(sizeof(struct request) == 24 && sizeof(struct item) == 32, "as Lustre's");
_Static_assert(sizeof(struct state) == 32 && sizeof(struct action) == 24, "as Lustre's");

enum archive_order archive_order;

/* ---- The copytool ---------------------------------------------------------------------------- */

void hsm_changed(struct node *node)
{
	node->archive.changed = true;
	if (node->archive.flags & ARCHIVED)
		node->archive.flags |= DIRTY;
}

static uint64_t bytes_done(const struct node *node)
{
	const uint64_t bytes = (uint64_t)((double)(now_ns() - node->archive.begun_ns) / NS_PER_S *
					  options.bandwidth);
	const uint64_t size = (uint64_t)node->stat.st_size;

	return bytes < size ? bytes : size;
}

/* Updates the state of a file's archive request to the current time. */
static void settle(struct node *node)
{
	struct archive *archive = &node->archive;

	if (!archive->wanted || archive_order == ARCHIVE_STUCK)
		return;
	if (archive_order == ARCHIVE_FAILING) {
		archive->wanted = false;
	} else if (bytes_done(node) == (uint64_t)node->stat.st_size) {
		archive->wanted = false;
		archive->flags = HAS_COPY | ARCHIVED | (archive->changed ? DIRTY : 0);
	}
}

/* ---- ioctl ----------------------------------------------------------------------------------- */

static void answer(fuse_req_t request, const void *bytes, uint64_t address, size_t count)
{
	const bool written = caller_write(request, bytes, address, count);

	answer_ioctl(request, written ? 0 : -EFAULT, NULL, 0);
}

static void do_state(fuse_req_t request, struct node *node, uint64_t address)
{
	struct state state = { 0 };

	settle(node);
	state.flags = node->archive.flags;
	state.archive = state.flags ? 1 : 0;
	answer(request, &state, address, sizeof(state));
}

static void do_action(fuse_req_t request, struct node *node, uint64_t address)
{
	struct action action = { .state = WAITING, .action = NO_ACTION };

	settle(node);
	if (node->archive.wanted) {
		action.action = ARCHIVE;
		action.length = UINT64_MAX;
		if (archive_order != ARCHIVE_STUCK) {
			action.state = RUNNING;
			action.length = bytes_done(node);
		}
	}
	answer(request, &action, address, sizeof(action));
}

static void do_fid(fuse_req_t request, const struct node *node, uint64_t address)
{
	const struct fid fid = { .sequence = sequence, .number = (uint32_t)node->stat.st_ino };

	answer(request, &fid, address, sizeof(fid));
}

static int want(struct node *node)
{
	struct archive *archive = node ? &node->archive : NULL;

	if (!node)
		return -ENOENT;
	settle(node);
	/* A request is ignored if the file is archived already, or is being archived. */
	if (archive->wanted || (archive->flags & (ARCHIVED | DIRTY)) == ARCHIVED)
		return 0;
	archive->wanted = true;
	archive->changed = false;
	archive->begun_ns = now_ns();
	return 0;
}

static int take_request(fuse_req_t request, uint64_t address)
{
	struct request head;
	struct item item;
	int result = 0;

	if (!caller_read(request, &head, address, sizeof(head)))
		return -EFAULT;
	if (archive_order == ARCHIVE_OFF)
		return -EAGAIN;
	if (head.action != ARCHIVE || head.items > MOST_ITEMS)
		return -EINVAL;
	if (archive_order == ARCHIVE_REFUSED || fuse_req_ctx(request)->uid)
		return -EPERM;
	for (uint32_t i = 0; i < head.items && !result; i++) {
		address += i ? sizeof(item) : sizeof(head);
		if (!caller_read(request, &item, address, sizeof(item)))
			result = -EFAULT;
		else
			result = item.fid.sequence == sequence && item.length == UINT64_MAX ?
					 want(node_numbered(item.fid.number)) :
					 -EINVAL;
	}
	return result;
}

bool hsm_ioctl(fuse_req_t request, struct node *node, unsigned int command, uint64_t address)
{
	const bool is_file = S_ISREG(node->stat.st_mode);

	if (command == STATE_GET && is_file)
		do_state(request, node, address);
	else if (command == CURRENT_ACTION && is_file)
		do_action(request, node, address);
	else if (command == PATH2FID)
		do_fid(request, node, address);
	else if (command == REQUEST && S_ISDIR(node->stat.st_mode))
		answer_ioctl(request, take_request(request, address), NULL, 0);
	else
		return false;
	return true;
}
