/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Plays the other side of a stream with any messages: over a socket and over functions, as sender
 * and as receiver. The input determines the messages. Their headers are valid otherwise, because
 * mutations would hardly find the magic number.
 */
#include <ioshape/group.h>

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include "fuzz.h"
#include "group/store.h"
#include "group/stream.h"
#include "input.h"

#define RANK 7u
#define BLOCK_BYTES 4096u
#define MOST_MESSAGES 64u

/* Ends each wait at once, because all messages are there. */
static int not_at_all(void *user, struct base_error *error)
{
	(void)user;
	return base_fail_reason(error, -ETIMEDOUT, "nothing more comes");
}

static const struct stream_wait in_vain = { not_at_all, NULL };

/* Receives as much as there is, and touches the bytes. */
static void receive_all(struct stream_receiver *receiver)
{
	struct base_error error = { 0 };
	const void *data = NULL;
	uint64_t sum = 0;
	size_t bytes = 1;

	while (bytes && !stream_receiver_next(receiver, &data, &bytes, &error)) {
		if (bytes)
			sum += ((const uint8_t *)data)[0] + ((const uint8_t *)data)[bytes - 1];
	}
	*(volatile uint64_t *)&sum = sum; /* keeps the compiler from removing the reads */
	stream_receiver_free(receiver);
}

/* ---- Streams over functions ------------------------------------------------------------------ */

static int ignore(void *user, uint32_t to, uint32_t tag, const void *data, size_t bytes,
		  uint32_t timeout_ms)
{
	(void)user, (void)to, (void)tag, (void)data, (void)bytes, (void)timeout_ms;
	return 0;
}

static struct stream_frame take_frame(struct input *input)
{
	return (struct stream_frame){
		.kind = (uint32_t)take(input, 1) % 12,
		.offset = take_amount(input, 0, UINT64_MAX),
		.bytes = take_amount(input, 0, UINT64_MAX),
		.block = (uint32_t)take_amount(input, 0, UINT32_MAX),
	};
}

static int hear(void *user, uint32_t from, uint32_t tag, void *into, size_t bytes,
		uint32_t timeout_ms)
{
	struct input *input = user;
	struct stream_frame frame;

	(void)from, (void)tag, (void)timeout_ms;
	if (!input->left)
		return -ECONNRESET;
	memset(into, (int)take(input, 1), bytes);
	if (bytes != STREAM_FRAME_BYTES)
		return 0;
	frame = take_frame(input);
	stream_write_frame(into, &frame);
	return 0;
}

static void try_comm(struct input input)
{
	static const uint8_t some[3 * BLOCK_BYTES];
	const struct ioshape_comm comm = {
		.size = sizeof(comm), .user = &input, .send = ignore, .receive = hear
	};
	struct stream_receiver *receiver;
	struct stream_sender *sender;

	if (!stream_sender_open_comm(&sender, &comm, RANK, 1, 1000, &in_vain, NULL)) {
		if (!stream_sender_put(sender, some, sizeof(some), NULL))
			stream_sender_end(sender, 1, NULL);
		stream_sender_free(sender, "tried");
	}
	if (!stream_receiver_open_comm(&receiver, &comm, RANK, 1, BLOCK_BYTES, 3, NULL, 1000,
				       &in_vain, NULL))
		receive_all(receiver);
}

/* ---- Streams over a socket ------------------------------------------------------------------- */

static struct stream_listener *listener;
static char address[STREAM_ADDRESS_BYTES];
static int memory_fd;

/* Sends a frame. Returns 0 or -1. */
static int send_frame(int fd, const struct stream_frame *frame, const void *data, size_t bytes,
		      int passed_fd)
{
	uint8_t head[STREAM_FRAME_BYTES];
	struct iovec parts[2] = { { head, sizeof(head) }, { NULL, bytes } };
	union {
		char space[CMSG_SPACE(sizeof(int))];
		struct cmsghdr head;
	} control = { { 0 } };
	struct msghdr message = { .msg_iov = parts, .msg_iovlen = 2 };

	stream_write_frame(head, frame);
	memcpy(&parts[1].iov_base, &data, sizeof(data));
	if (passed_fd >= 0) {
		message.msg_control = control.space;
		message.msg_controllen = sizeof(control.space);
		control.head.cmsg_level = SOL_SOCKET;
		control.head.cmsg_type = SCM_RIGHTS;
		control.head.cmsg_len = CMSG_LEN(sizeof(passed_fd));
		memcpy(CMSG_DATA(&control.head), &passed_fd, sizeof(passed_fd));
	}
	return sendmsg(fd, &message, MSG_DONTWAIT | MSG_NOSIGNAL) < 0 ? -1 : 0;
}

static void say_all(int fd, struct input *input)
{
	static const uint8_t some[64 * KIB + 1];
	struct stream_frame frame = { .kind = STREAM_HELLO, .offset = RANK };
	int ret = send_frame(fd, &frame, NULL, 0, take(input, 1) % 2 ? memory_fd : -1);

	for (unsigned i = 0; !ret && input->left && i < MOST_MESSAGES; i++) {
		const bool honest = take(input, 1) % 4;
		uint64_t bytes;

		frame = take_frame(input);
		bytes = honest && stream_has_data(&frame) ? frame.bytes :
							    take_amount(input, 0, UINT64_MAX);
		ret = send_frame(fd, &frame, some, MIN(bytes, sizeof(some)), -1);
	}
}

static void try_local(struct input input)
{
	struct stream_receiver *receiver;
	struct sockaddr_un to = { .sun_family = AF_UNIX };
	char folder[STORE_FOLDER_BYTES];
	int fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);

	MUST(fd >= 0 && !store_find_folder(folder, NULL, NULL));
	snprintf(to.sun_path, sizeof(to.sun_path), "%.60s/stream-%.40s", folder, address);
	MUST(!connect(fd, (const struct sockaddr *)&to, sizeof(to)));
	say_all(fd, &input);
	close(fd);
	if (!stream_receiver_open_local(&receiver, listener, RANK, &in_vain, NULL))
		receive_all(receiver);
}

static void set_up(void)
{
	struct base_error error = { 0 };

	snprintf(address, sizeof(address), "fuzz-%d", (int)getpid());
	if (stream_listener_open(&listener, address, RANK + 1, &error)) {
		fprintf(stderr, "%s\n", error.text);
		abort();
	}
	memory_fd = base_shared_open();
	MUST(memory_fd >= 0 && !base_shared_grow(memory_fd, MIB));
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes)
{
	struct input input = { data, bytes };

	if (!listener)
		set_up();
	if (take(&input, 1) % 2)
		try_comm(input);
	else
		try_local(input);
	return 0;
}
