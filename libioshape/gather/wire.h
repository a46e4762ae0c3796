/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What goes over the sockets of a board: frames of a head, a scope, a name and a body. Each side
 * distrusts the other: lengths are checked here, names and numbers by who uses them.
 */
#ifndef GATHER_WIRE_H
#define GATHER_WIRE_H

#include "gather/board.h"

/* type, length of the scope, of the name, 0; id, number, length of the body (u32 each) */
#define WIRE_HEAD_BYTES 16u

enum wire_type {
	/* To rank 0, which answers each with the same id. The number of a HELLO is the sender's
	 * rank, and its body the number of ranks (u32). The body of a COLLECT has a bit for each
	 * rank; notes of those that are set are not wanted. */
	WIRE_HELLO = 1,
	WIRE_POST,
	WIRE_LOOK,
	WIRE_COLLECT,
	/* From rank 0. A NOTE's number is the rank that COLLECT found. The number of a DONE is 0,
	 * or a negative errno; for COLLECT 1 if there is more. CHANGED and GONE come by themselves:
	 * something that was looked for was posted; rank `number` has ended. */
	WIRE_NOTE,
	WIRE_DONE,
	WIRE_CHANGED,
	WIRE_GONE
};

struct wire_head {
	enum wire_type type;
	uint32_t id;
	uint32_t number;
	uint32_t body_bytes;
	char scope[GATHER_NAME_BYTES];
	char name[GATHER_NAME_BYTES];
};

/* Returns the length of what was put together. */
#define WIRE_MOST_HEAD_BYTES (WIRE_HEAD_BYTES + 2 * (GATHER_NAME_BYTES - 1))
size_t wire_put_head(uint8_t raw[WIRE_MOST_HEAD_BYTES], const struct wire_head *head);

/* What has come of a frame. Zero it to begin. */
struct wire_input {
	uint8_t raw[WIRE_MOST_HEAD_BYTES];
	size_t raw_bytes;
	bool has_head;
	struct wire_head head;
	uint8_t *body; /* of the caller's; NULL: what comes is thrown away */
	size_t body_bytes;
};

enum wire_event {
	WIRE_NOTHING, /* yet */
	WIRE_HEAD,    /* `head` is there: set `body`, and go on */
	WIRE_WHOLE    /* go on with wire_next() */
};

/* Takes from a socket what is there, but not for ever. An event, or a negative errno: -ECONNRESET
 * at its end, -EPROTO for what is no frame. */
int wire_read(struct wire_input *input, int fd);
void wire_next(struct wire_input *input);

/* Sends without waiting: a head from `sent` on and, behind it, a body. How many bytes went, 0 if
 * none can now, or a negative errno. */
ssize_t wire_write(int fd, const uint8_t *head, size_t head_bytes, const void *body,
		   size_t body_bytes, size_t sent);

#endif
