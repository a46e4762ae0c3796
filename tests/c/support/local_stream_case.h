/* SPDX-License-Identifier: Apache-2.0 */
/* Helpers for tests of streams on one host: a listener, and both ends. */
#ifndef TESTS_SUPPORT_LOCAL_STREAM_CASE_H
#define TESTS_SUPPORT_LOCAL_STREAM_CASE_H

#include "group/store.h"
#include "group/stream.h"
#include "support/check_main.h"
#include "support/stream_case.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#define RANK 7u
#define MOST_RANKS 64u

static char address[64];
static int fds_before;

static inline void begin(void)
{
	snprintf(address, sizeof(address), "ioshape-test-%d", (int)getpid());
	fds_before = stream_count_fds();
}

static inline void end(void)
{
	ck_assert_int_eq(stream_count_fds(), fds_before);
}

/* Returns the address of the listener's socket. */
static inline struct sockaddr_un find_socket(void)
{
	struct sockaddr_un at = { .sun_family = AF_UNIX };
	char folder[STORE_FOLDER_BYTES];

	STREAM_MUST(!store_find_folder(folder, NULL, NULL));
	STREAM_MUST(snprintf(at.sun_path, sizeof(at.sun_path), "%s/stream-%s", folder, address) <
		    (int)sizeof(at.sun_path));
	return at;
}

/* Sends a frame without checking it, followed by `bytes` of data, with `count` descriptors. */
static inline void send_frame(int fd, const struct stream_frame *frame, const void *data,
			      size_t bytes, const int *fds, unsigned count)
{
	uint8_t head[STREAM_FRAME_BYTES];
	struct iovec parts[2] = { { head, sizeof(head) }, { NULL, bytes } };
	union {
		char room[CMSG_SPACE(2 * sizeof(int))];
		struct cmsghdr head;
	} control = { { 0 } };
	struct msghdr message = { .msg_iov = parts, .msg_iovlen = bytes ? 2 : 1 };

	stream_write_frame(head, frame);
	memcpy(&parts[1].iov_base, &data, sizeof(data));
	if (count) {
		message.msg_control = control.room;
		message.msg_controllen = CMSG_SPACE(count * sizeof(int));
		control.head.cmsg_level = SOL_SOCKET;
		control.head.cmsg_type = SCM_RIGHTS;
		control.head.cmsg_len = CMSG_LEN(count * sizeof(int));
		memcpy(CMSG_DATA(&control.head), fds, count * sizeof(int));
	}
	STREAM_MUST(sendmsg(fd, &message, MSG_NOSIGNAL) == (ssize_t)(sizeof(head) + bytes));
}

static inline struct stream_listener *listen_here(void)
{
	struct stream_listener *listener;
	struct base_error error = { 0 };

	ck_assert_msg(!stream_listener_open(&listener, address, MOST_RANKS, &error), "%s",
		      error.text);
	return listener;
}

static inline struct stream_receiver *receive_from(struct stream_listener *listener, uint32_t rank)
{
	struct stream_receiver *receiver;
	struct base_error error = { 0 };

	ck_assert_msg(
		!stream_receiver_open_local(&receiver, listener, rank, &stream_patient, &error),
		"%s", error.text);
	return receiver;
}

static inline struct stream_sender *send_as(uint32_t rank, int memory_fd)
{
	struct stream_sender *sender;
	struct base_error error = { 0 };

	if (stream_sender_open_local(&sender, address, rank, memory_fd, &stream_patient, &error))
		stream_fail(error.text);
	return sender;
}

/* Sends the pieces of a plan in a process of its own. */
static inline void send_random(const void *argument)
{
	const struct stream_plan *plan = argument;
	struct stream_memory memory;
	struct stream_sender *sender;

	stream_memory_open(&memory,
			   plan->most_bytes ? 2 * base_round_up(plan->most_bytes, MIB) : MIB);
	sender = send_as(plan->rank, plan->with_memory ? memory.fd : -1);
	stream_send_plan(sender, plan, &memory);
	stream_sender_free(sender, NULL);
	stream_memory_close(&memory);
}

static inline int not_at_all(void *user, struct base_error *error)
{
	(void)user;
	return base_fail(error, -ETIMEDOUT, "the writer of this node was not there in time");
}

#endif
