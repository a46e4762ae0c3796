/* SPDX-License-Identifier: Apache-2.0 */
/* What streams of all kinds have in common. Private to this floor. */
#ifndef GATHER_STREAM_H
#define GATHER_STREAM_H

#include "gather/gather.h"

/* How long anything waits before `go_on` is asked. */
#define STREAM_PATIENCE_MS 100

/* What one side tells the other about its failure, with the final 0. */
#define STREAM_TEXT_BYTES 512

struct stream_sender_ops {
	int (*put)(struct gather_sender *sender, const void *data, size_t bytes,
		   struct base_error *error);
	int (*put_shared)(struct gather_sender *sender, const void *data, uint64_t offset,
			  size_t bytes, uint32_t crc32, struct base_error *error);
	uint64_t (*taken)(struct gather_sender *sender);
	int (*await_taken)(struct gather_sender *sender, uint64_t offset, struct base_error *error);
	int (*end)(struct gather_sender *sender, uint32_t crc32, struct base_error *error);
	/* Ends the stream, not well unless it has ended, and frees it. */
	void (*close)(struct gather_sender *sender, const char *why);
};

/* The first member of each kind's own struct. */
struct gather_sender {
	const struct stream_sender_ops *ops;
	struct gather_wait wait;
	uint64_t offset; /* bytes put */
	bool ended;
	struct base_error failure; /* the first one: all later calls answer the same */
};

struct stream_receiver_ops {
	/* *bytes is 0 on entry, and stays so at the end. -EAGAIN: something must be released. */
	int (*next)(struct gather_receiver *receiver, const void **data, size_t *bytes,
		    struct base_error *error);
	/* What is before receiver->released is not needed any more. */
	void (*release)(struct gather_receiver *receiver);
	void (*close)(struct gather_receiver *receiver);
};

struct gather_receiver {
	const struct stream_receiver_ops *ops;
	struct gather_wait wait;
	uint32_t rank;
	uint64_t offset;   /* bytes handed out */
	uint64_t released; /* of these, so many are not needed any more */
	bool holds;        /* what is not needed is told; otherwise it is all that was handed out */
	uint32_t crc32;
	/* Of the run handed out last. */
	bool lasts, summed;
	uint32_t run_crc32;
	bool ended;
	struct base_error failure;
};

/* Asks whether to wait on. */
int stream_go_on(const struct gather_wait *wait, struct base_error *error);

#endif
