/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Answers to metadata operations. Counts each operation, and sends the answer when the metadata
 * server of the model is done with it.
 */
#include "stripefs.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/fuse.h>
#include <stdlib.h>
#include <string.h>

/* Headers of older kernels and of older libfuse lack these flags. */
#ifndef FOPEN_PARALLEL_DIRECT_WRITES
#define FOPEN_PARALLEL_DIRECT_WRITES (1 << 6)
#endif
#ifndef FUSE_HANDLE_KILLPRIV_V2
#define FUSE_HANDLE_KILLPRIV_V2 (1 << 28)
#endif

/*
 * Validity of names and attributes. Lustre's client caches them under locks; with a single client
 * the kernel may cache them, too.
 */
#define CACHED_S 3600.0

enum what { ERROR, ENTRY, ATTRIBUTES, OPEN, CREATE, BYTES, SIZE, STATFS, IOCTL, SYNCED };

struct answer {
	fuse_req_t request;
	enum what what;
	int error;
	struct node *node;
	struct fuse_file_info file;
	struct stat stat;
	struct statvfs statfs;
	size_t count;
	char bytes[];
};

/* Flags to add to the next answer to an open. */
static uint32_t more_open_flags;

double answer_valid_s(void)
{
	return options.mount_count > 1 ? 0 : CACHED_S;
}

ssize_t answer_send(int device, struct iovec *parts, int count, void *mount)
{
	bool *const initialized = &((struct mount *)mount)->initialized;

	if (!*initialized && count > 1 && parts[1].iov_len >= sizeof(struct fuse_init_out)) {
		/*
		 * Without this flag the kernel asks for the attribute with capabilities before each
		 * write.
		 */
		((struct fuse_init_out *)parts[1].iov_base)->flags |= FUSE_HANDLE_KILLPRIV_V2;
		*initialized = true;
	}
	if (more_open_flags && count > 1 && parts[1].iov_len >= sizeof(struct fuse_open_out)) {
		struct fuse_open_out *last =
			(struct fuse_open_out *)(void *)((char *)parts[1].iov_base +
							 parts[1].iov_len - sizeof(*last));

		last->open_flags |= more_open_flags;
	}
	return writev(device, parts, count);
}

static void fill_entry(struct fuse_entry_param *entry, struct node *node)
{
	*entry = (struct fuse_entry_param){
		.ino = ino_of(node),
		.generation = 1,
		.attr = node->stat,
		.attr_timeout = answer_valid_s(),
		.entry_timeout = answer_valid_s(),
	};
}

/* Takes back the lookup that was counted for a name if the answer did not reach the kernel. */
static void unless_heard(int result, struct node *node)
{
	if (!result)
		return;
	node->lookups--;
	node_settle(node);
}

static void send_open(const struct answer *answer)
{
	struct node *node = answer->node;
	struct fuse_entry_param entry;
	int result;

	if (answer->file.direct_io && options.direct != DIRECT_SERIAL)
		more_open_flags = FOPEN_PARALLEL_DIRECT_WRITES;
	if (answer->what == OPEN) {
		result = fuse_reply_open(answer->request, &answer->file);
	} else {
		fill_entry(&entry, node);
		result = fuse_reply_create(answer->request, &entry, &answer->file);
	}
	more_open_flags = 0;
	if (!result)
		return;
	/* The kernel did not receive the answer, so it will not close the file. */
	node->opens--;
	node->lookups -= answer->what == CREATE;
	node_settle(node);
}

static void send_ioctl(const struct answer *answer)
{
	if (answer->error < 0)
		fuse_reply_err(answer->request, -answer->error);
	else
		fuse_reply_ioctl(answer->request, answer->error,
				 answer->count ? answer->bytes : NULL, answer->count);
}

/*
 * Returns the error of a write that was answered before it failed, and clears it: it is reported
 * once.
 */
static int late_error(const struct answer *answer)
{
	const int error = answer->node->late_error;

	answer->node->late_error = 0;
	return error;
}

static void send_answer(void *argument)
{
	struct answer *answer = argument;
	struct fuse_entry_param entry;

	switch (answer->what) {
	case ERROR:
		fuse_reply_err(answer->request, answer->error);
		break;
	case ENTRY:
		fill_entry(&entry, answer->node);
		unless_heard(fuse_reply_entry(answer->request, &entry), answer->node);
		break;
	case ATTRIBUTES:
		fuse_reply_attr(answer->request, &answer->stat, answer_valid_s());
		break;
	case OPEN:
	case CREATE:
		send_open(answer);
		break;
	case BYTES:
		fuse_reply_buf(answer->request, answer->bytes, answer->count);
		break;
	case SIZE:
		fuse_reply_xattr(answer->request, answer->count);
		break;
	case STATFS:
		fuse_reply_statfs(answer->request, &answer->statfs);
		break;
	case IOCTL:
		send_ioctl(answer);
		break;
	case SYNCED:
		fuse_reply_err(answer->request, late_error(answer));
		break;
	}
	free(answer);
}

static struct answer *prepare(fuse_req_t request, enum what what, const void *bytes, size_t count)
{
	struct answer *answer = calloc(1, sizeof(*answer) + count);

	if (!answer)
		abort();
	answer->request = request;
	answer->what = what;
	answer->count = count;
	if (count && bytes)
		memcpy(answer->bytes, bytes, count);
	return answer;
}

static void send_when_done(struct answer *answer, enum kind kind)
{
	uint64_t at_ns;

	statistics.operations[kind]++;
	at_ns = model_metadata();
	if (at_ns > now_ns())
		model_later(at_ns, send_answer, answer);
	else
		send_answer(answer);
}

void answer_error(fuse_req_t request, enum kind kind, int error)
{
	struct answer *answer = prepare(request, ERROR, NULL, 0);

	answer->error = error;
	send_when_done(answer, kind);
}

void answer_entry(fuse_req_t request, enum kind kind, struct node *node)
{
	struct answer *answer = prepare(request, ENTRY, NULL, 0);

	node->lookups++;
	node->known_to |= asking;
	answer->node = node;
	send_when_done(answer, kind);
}

void answer_known_entry(fuse_req_t request, struct node *node)
{
	struct answer *answer = prepare(request, ENTRY, NULL, 0);

	node->lookups++;
	answer->node = node;
	send_answer(answer);
}

void answer_attributes(fuse_req_t request, enum kind kind, struct node *node)
{
	struct answer *answer = prepare(request, ATTRIBUTES, NULL, 0);

	node->known_to |= asking;
	answer->stat = node->stat;
	send_when_done(answer, kind);
}

void answer_open(fuse_req_t request, struct node *node, const struct fuse_file_info *file)
{
	struct answer *answer = prepare(request, OPEN, NULL, 0);

	node->opens++;
	answer->node = node;
	answer->file = *file;
	send_when_done(answer, OP_OPEN);
}

void answer_create(fuse_req_t request, struct node *node, const struct fuse_file_info *file)
{
	struct answer *answer = prepare(request, CREATE, NULL, 0);

	node->lookups++;
	node->opens++;
	node->known_to |= asking;
	answer->node = node;
	answer->file = *file;
	send_when_done(answer, OP_CREATE);
}

void answer_bytes(fuse_req_t request, enum kind kind, const void *bytes, size_t count)
{
	send_when_done(prepare(request, BYTES, bytes, count), kind);
}

void answer_statfs(fuse_req_t request, const struct statvfs *statfs)
{
	struct answer *answer = prepare(request, STATFS, NULL, 0);

	answer->statfs = *statfs;
	send_when_done(answer, OP_STATFS);
}

void answer_ioctl(fuse_req_t request, int result, const void *bytes, size_t count)
{
	struct answer *answer = prepare(request, IOCTL, bytes, count);

	answer->error = result;
	send_when_done(answer, OP_IOCTL);
}

void answer_value(fuse_req_t request, const void *value, size_t bytes, size_t room)
{
	struct answer *answer;

	if (room && room < bytes) {
		answer_error(request, OP_GETXATTR, ERANGE);
		return;
	}
	answer = prepare(request, room ? BYTES : SIZE, value, bytes);
	send_when_done(answer, OP_GETXATTR);
}

static void send_synced(void *argument)
{
	send_when_done(argument, OP_FSYNC);
}

void answer_synced(fuse_req_t request, struct node *node)
{
	struct answer *answer = prepare(request, SYNCED, NULL, 0);

	answer->node = node;
	model_flush(node, send_synced, answer);
}
