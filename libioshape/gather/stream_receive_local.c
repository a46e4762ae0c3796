/* SPDX-License-Identifier: Apache-2.0 */
/* The receiver's side of a stream on one host. */
#define _GNU_SOURCE
#include "gather/local_link.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#ifndef MADV_POPULATE_READ
#define MADV_POPULATE_READ 22 /* Linux 5.14 */
#endif

struct local_receiver {
	struct gather_receiver base;
	struct local_link link;
	int memory_fd; /* of the sender; -1 for none */
	const uint8_t *view;
	uint64_t view_bytes;
	uint64_t told;             /* how many bytes the sender knows to be taken */
	struct local_head waiting; /* a message that waits until all is released; kind 0: none */
	uint8_t message[LOCAL_INLINE_BYTES];
};

static int fail_gone(const struct local_receiver *receiver, int code, struct base_error *error)
{
	if (code == -ECONNRESET)
		return base_fail_with(error, code, "look for why it ended",
				      "rank %u (process %d) went away before all of its bytes had "
				      "come",
				      receiver->base.rank, (int)receiver->link.pid);
	return base_fail(error, code, "cannot receive the bytes of rank %u (process %d)",
			 receiver->base.rank, (int)receiver->link.pid);
}

static int map_memory(struct local_receiver *receiver, struct base_error *error)
{
	const void *view;
	uint64_t bytes;
	int ret = base_shared_view(receiver->memory_fd, &view, &bytes);

	if (ret)
		return base_fail(error, ret,
				 ret == -EPERM ? "the shared memory that rank %u brought could "
						 "shrink under its reader, and is not read" :
						 "cannot map the shared memory of rank %u",
				 receiver->base.rank);
	if (receiver->view)
		base_unmap((void *)(uintptr_t)receiver->view, receiver->view_bytes);
	receiver->view = view;
	receiver->view_bytes = bytes;
	return 0;
}

static int follow_reference(struct local_receiver *receiver, const struct local_head *head,
			    const void **data, size_t *bytes, struct base_error *error)
{
	const uint64_t page = (uint64_t)sysconf(_SC_PAGESIZE);
	uint64_t end, begin;
	int ret = 0;

	if (receiver->memory_fd < 0 || !head->b || head->b > LOCAL_REFERENCE_BYTES ||
	    __builtin_add_overflow(head->a, head->b, &end))
		return fail_gone(receiver, -EPROTO, error);
	/* It has grown since. */
	if (end > receiver->view_bytes)
		ret = map_memory(receiver, error);
	if (!ret && end > receiver->view_bytes)
		ret = base_refuse(error, -EPROTO,
				  "rank %u (process %d) refers to bytes outside of its memory",
				  receiver->base.rank, (int)receiver->link.pid);
	if (ret)
		return ret;
	/* A wish: all at once instead of page by page. */
	begin = head->a / page * page;
	madvise((void *)(uintptr_t)(receiver->view + begin), end - begin, MADV_POPULATE_READ);
	*data = receiver->view + head->a;
	*bytes = (size_t)head->b;
	receiver->base.lasts = true;
	receiver->base.summed = true;
	receiver->base.run_crc32 = head->crc32;
	return 0;
}

/* -EAGAIN if there is no room for it now. The sender's end is found out when it is listened to. */
static int tell(struct local_receiver *receiver)
{
	const struct local_head head = { .kind = LOCAL_TAKEN, .a = receiver->base.released };
	int ret;

	if (receiver->told == head.a)
		return 0;
	ret = local_link_send(&receiver->link, &head, NULL, 0, -1);
	if (!ret)
		receiver->told = head.a;
	return ret;
}

/* All bytes have come: a sender that does not hear it any more does not matter. */
static int tell_done(struct local_receiver *receiver, struct base_error *error)
{
	const struct local_head head = { .kind = LOCAL_DONE };
	int ret = 0;

	while (!ret && local_link_send(&receiver->link, &head, NULL, 0, -1) == -EAGAIN)
		ret = local_link_wait(&receiver->link, POLLOUT, &receiver->base.wait, error);
	return ret;
}

static int take_end(struct local_receiver *receiver, const struct local_head *head,
		    struct base_error *error)
{
	if (head->a != receiver->base.offset)
		return base_refuse(error, -EPROTO,
				   "rank %u has sent %llu bytes, of which %llu have come",
				   receiver->base.rank, (unsigned long long)head->a,
				   (unsigned long long)receiver->base.offset);
	receiver->base.crc32 = (uint32_t)head->b;
	return tell_done(receiver, error);
}

static int take_message(struct local_receiver *receiver, const struct local_head *head,
			size_t extra, const void **data, size_t *bytes, struct base_error *error)
{
	switch (head->kind) {
	case LOCAL_BYTES:
		if (!extra)
			break;
		*data = receiver->message;
		*bytes = extra;
		return 0;
	case LOCAL_REFERENCE:
		return follow_reference(receiver, head, data, bytes, error);
	case LOCAL_END:
		return take_end(receiver, head, error);
	case LOCAL_FAIL:
		return base_refuse(error, -ECANCELED, "rank %u failed: %.*s", receiver->base.rank,
				   (int)MIN(extra, STREAM_TEXT_BYTES),
				   (const char *)receiver->message);
	}
	return fail_gone(receiver, -EPROTO, error);
}

/* After the end the sender's memory is its own again, and another view takes the place of this one:
 * not while somebody reads there. */
static bool must_wait(const struct local_receiver *receiver, const struct local_head *head)
{
	if (receiver->base.released == receiver->base.offset)
		return false;
	return head->kind == LOCAL_END ||
	       (head->kind == LOCAL_REFERENCE &&
		(head->a > receiver->view_bytes || head->b > receiver->view_bytes - head->a));
}

static int receive_head(struct local_receiver *receiver, struct local_head *head, size_t *extra)
{
	if (!receiver->waiting.kind)
		return local_link_receive(&receiver->link, head, receiver->message,
					  sizeof(receiver->message), extra, NULL);
	*head = receiver->waiting;
	receiver->waiting.kind = 0;
	*extra = 0;
	return 0;
}

static int next(struct gather_receiver *base, const void **data, size_t *bytes,
		struct base_error *error)
{
	struct local_receiver *receiver = (struct local_receiver *)base;
	struct local_head head;
	size_t extra;
	short events;
	int ret;

	if (base->released - receiver->told >= LOCAL_TELL_BYTES)
		tell(receiver);
	for (;;) {
		ret = receive_head(receiver, &head, &extra);
		if (!ret && must_wait(receiver, &head)) {
			receiver->waiting = head;
			return -EAGAIN;
		}
		if (ret != -EAGAIN) {
			ret = ret ? fail_gone(receiver, ret, error) :
				    take_message(receiver, &head, extra, data, bytes, error);
			base_error_of_rank(error, base->rank);
			return ret;
		}
		/* The sender may wait for what is to be released. */
		if (base->released < base->offset) {
			tell(receiver);
			return -EAGAIN;
		}
		events = POLLIN;
		if (tell(receiver) == -EAGAIN)
			events |= POLLOUT;
		ret = local_link_wait(&receiver->link, events, &base->wait, error);
		if (ret)
			return ret;
	}
}

static void free_receiver(struct local_receiver *receiver)
{
	local_link_close(&receiver->link);
	if (receiver->view)
		base_unmap((void *)(uintptr_t)receiver->view, receiver->view_bytes);
	base_close(receiver->memory_fd);
	free(receiver);
}

static void close_receiver(struct gather_receiver *base)
{
	struct local_receiver *receiver = (struct local_receiver *)base;
	const struct local_head head = { .kind = LOCAL_STOP };
	const char *why = base->failure.code ? base->failure.text : "the writer gave up";

	/* If there is no room the end of the connection must do. */
	if (!base->ended)
		local_link_send(&receiver->link, &head, why,
				MIN(strlen(why), STREAM_TEXT_BYTES - 1), -1);
	free_receiver(receiver);
}

/* The sender hears of it in next(). */
static void release(struct gather_receiver *base)
{
	(void)base;
}

static const struct stream_receiver_ops ops = {
	.next = next,
	.release = release,
	.close = close_receiver,
};

int gather_receiver_open_local(struct gather_receiver **out, struct gather_listener *listener,
			       uint32_t rank, const struct gather_wait *wait,
			       struct base_error *error)
{
	struct local_receiver *receiver = calloc(1, sizeof(*receiver));
	int ret;

	*out = NULL;
	if (!receiver)
		return base_no_memory(error, "a stream between ranks", sizeof(*receiver));
	receiver->base.ops = &ops;
	receiver->base.wait = *wait;
	receiver->base.rank = rank;
	receiver->memory_fd = -1;
	receiver->link = (struct local_link){ .fd = -1, .process_fd = -1 };
	ret = listener_await(listener, rank, &receiver->link, &receiver->memory_fd, wait, error);
	if (!ret && receiver->memory_fd >= 0) {
		ret = map_memory(receiver, &receiver->base.failure);
		base_error_of_rank(&receiver->base.failure, rank);
	}
	if (!ret) {
		*out = &receiver->base;
		return 0;
	}
	if (error && !error->code)
		*error = receiver->base.failure;
	if (receiver->link.fd >= 0)
		close_receiver(&receiver->base);
	else
		free_receiver(receiver);
	return ret;
}
