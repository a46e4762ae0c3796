/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Streams over functions of the caller's: messages of the two sides. Private to this floor.
 *
 * One side speaks at a time, as both know which: a send may wait until the other side receives. The
 * receiver grants so many blocks as it has room for, the sender sends just these; or an end or a
 * failure in the place of one, after which nothing is left that was granted. While there is no room
 * the receiver says so every second, so that nobody takes it for dead.
 */
#ifndef GATHER_COMM_WIRE_H
#define GATHER_COMM_WIRE_H

#include "gather/stream.h"

#define COMM_HEAD_BYTES 64u
#define COMM_MOST_BLOCK_BYTES (64 * MIB)
#define COMM_MOST_BLOCKS 1024u
#define COMM_HOLD_MS 1000u

enum comm_kind {
	/* From the receiver. */
	COMM_GRANT = 1, /* a: blocks; b: bytes of each, at most */
	COMM_HOLD,      /* not yet */
	COMM_STOP,      /* no more, ever */
	COMM_DONE,      /* after the end: all was taken */
	/* From the sender. */
	COMM_BLOCK, /* a: bytes that follow */
	COMM_END,   /* a: bytes in all; b: checksum */
	COMM_FAIL,  /* a: bytes of a text that follows */
};

struct comm_head {
	uint32_t kind;
	uint64_t a, b;
};

/* One rank, as this side of the stream reaches it. */
struct comm_link {
	const struct ioshape_comm *comm;
	uint32_t other;
	uint32_t tag;
	uint32_t timeout_ms;
	bool broken; /* a function failed: none is called any more */
};

/* Sentences name the other rank. */
int comm_link_send(struct comm_link *link, const void *data, size_t bytes,
		   struct base_error *error);
int comm_link_receive(struct comm_link *link, void *into, size_t bytes, struct base_error *error);
int comm_link_say(struct comm_link *link, enum comm_kind kind, uint64_t a, uint64_t b,
		  struct base_error *error);
int comm_link_hear(struct comm_link *link, struct comm_head *head, struct base_error *error);
/* What was heard is not what may be said now. */
int comm_link_mistaken(struct comm_link *link, struct base_error *error);
void comm_link_progress(const struct comm_link *link);

#endif
