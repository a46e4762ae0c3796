/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Any messages as the other side of a stream: over a socket of this host, and over functions, as
 * its sender and as its receiver. The input says which messages: heads are right but for what it
 * says, as mutations would hardly ever find the magic number.
 */
#include <ioshape/group.h>

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "fuzz.h"
#include "gather/comm_wire.h"
#include "gather/local_link.h"
#include "input.h"

#define RANK 7u
#define BLOCK_BYTES 4096u
#define MOST_MESSAGES 64u

/* Whoever waits, waits for nothing: all messages are there. */
static int not_at_all(void *user, struct base_error *error)
{
	(void)user;
	return base_refuse(error, -ETIMEDOUT, "nothing more comes");
}

static const struct gather_wait in_vain = { not_at_all, NULL };

/* As much as it may be; all bytes are there. */
static void receive_all(struct gather_receiver *receiver)
{
	struct base_error error = { 0 };
	const void *data = NULL;
	uint64_t sum = 0;
	size_t bytes = 1;

	while (bytes && !gather_receiver_next(receiver, &data, &bytes, &error)) {
		if (bytes)
			sum += ((const uint8_t *)data)[0] + ((const uint8_t *)data)[bytes - 1];
	}
	*(volatile uint64_t *)&sum = sum; /* they were really read */
	gather_receiver_free(receiver);
}

/* ---- Over functions -------------------------------------------------------------------------- */

static uint8_t comm_magic[4]; /* what every head begins with: our own say it */

static int note_magic(void *user, uint32_t to, uint32_t tag, const void *data, size_t bytes,
		      uint32_t timeout_ms)
{
	(void)user, (void)to, (void)tag, (void)timeout_ms;
	if (bytes == COMM_HEAD_BYTES)
		memcpy(comm_magic, data, sizeof(comm_magic));
	return 0;
}

static int hear(void *user, uint32_t from, uint32_t tag, void *into, size_t bytes,
		uint32_t timeout_ms)
{
	struct input *input = user;
	uint8_t *head = into;

	(void)from, (void)tag, (void)timeout_ms;
	if (!input->left)
		return -ECONNRESET;
	memset(into, (int)take(input, 1), bytes);
	if (bytes != COMM_HEAD_BYTES)
		return 0;
	memcpy(head, comm_magic, sizeof(comm_magic));
	base_put_le(head + 4, take(input, 1) % 16, 4);
	base_put_le(head + 8, take_amount(input, 0, UINT64_MAX), 8);
	base_put_le(head + 16, take_amount(input, 0, UINT64_MAX), 8);
	return 0;
}

static void try_comm(struct input input)
{
	static const uint8_t some[3 * BLOCK_BYTES];
	const struct ioshape_comm comm = {
		.size = sizeof(comm), .user = &input, .send = note_magic, .receive = hear
	};
	struct gather_receiver *receiver;
	struct gather_sender *sender;

	if (!gather_sender_open_comm(&sender, &comm, RANK, 1, 1000, &in_vain, NULL)) {
		if (!gather_sender_put(sender, some, sizeof(some), NULL))
			gather_sender_end(sender, 1, NULL);
		gather_sender_free(sender, "tried");
	}
	if (!gather_receiver_open_comm(&receiver, &comm, RANK, 1, BLOCK_BYTES, 3, NULL, 1000,
				       &in_vain, NULL))
		receive_all(receiver);
}

/* ---- Over a socket --------------------------------------------------------------------------- */

static struct gather_listener *listener;
static char address[GATHER_ADDRESS_BYTES];
static int memory_fd;

static void say_all(int fd, struct input *input)
{
	static const uint8_t some[LOCAL_INLINE_BYTES + 1];
	struct local_link link = { .fd = fd, .process_fd = -1 };
	struct local_head head = { .kind = LOCAL_HELLO, .a = LOCAL_MAGIC, .b = RANK };
	int ret = local_link_send(&link, &head, NULL, 0, take(input, 1) % 2 ? memory_fd : -1);
	uint64_t bytes;

	for (unsigned i = 0; !ret && input->left && i < MOST_MESSAGES; i++) {
		head.kind = (uint32_t)take(input, 1) % 12;
		head.a = take_amount(input, 0, UINT64_MAX);
		head.b = take_amount(input, 0, UINT64_MAX);
		bytes = take_amount(input, 0, UINT64_MAX);
		ret = local_link_send(&link, &head, some, MIN(bytes, sizeof(some)), -1);
	}
}

static void try_local(struct input input)
{
	struct gather_receiver *receiver;
	struct sockaddr_un to;
	int fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);

	MUST(fd >= 0 && !local_address(&to, address, NULL));
	MUST(!connect(fd, (const struct sockaddr *)&to, sizeof(to)));
	say_all(fd, &input);
	close(fd);
	if (!gather_receiver_open_local(&receiver, listener, RANK, &in_vain, NULL))
		receive_all(receiver);
}

static void set_up(void)
{
	struct base_error error = { 0 };

	snprintf(address, sizeof(address), "fuzz-%d", (int)getpid());
	if (gather_listener_open(&listener, address, &error)) {
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
