/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Streams: the frames that the two ends send each other, and the link that carries them. Private
 * to this layer.
 *
 * The sender sends the stream's bytes, or says where in its memory they are, and then the end or a
 * failure. It never goes further than the receiver's credit. The receiver's credit says what it
 * does not need any more, and how far beyond that the sender may go.
 */
#ifndef GATHER_STREAM_H
#define GATHER_STREAM_H

#include "gather/gather.h"

/* How long anything waits before `go_on` is asked. */
#define STREAM_PATIENCE_MS 100

/* What one side tells the other about its failure, with the final 0. */
#define STREAM_TEXT_BYTES 512

/* Limits of what a credit may say. */
#define STREAM_MOST_BLOCK_BYTES (64 * MIB)
#define STREAM_MOST_BLOCKS 1024u

/* ---- Frames ---------------------------------------------------------------------------------- */

#define STREAM_FORMAT BASE_FORMAT(3u)

enum stream_kind {
	/* From the sender. */
	STREAM_HELLO = 1, /* offset: its rank; on one host, with the fd of its memory, if any */
	STREAM_BYTES,     /* so many bytes follow */
	STREAM_SHARED,    /* so many bytes are in its memory, at this offset, with this checksum */
	STREAM_END,       /* bytes: in all; crc32: of all */
	STREAM_FAIL,      /* a text of so many bytes follows */
	/* From the receiver. */
	STREAM_CREDIT, /* offset: all before it is free again; bytes: how far beyond that the
			* sender may go; block: how many bytes a STREAM_BYTES has at most */
	STREAM_HOLD,   /* nothing new, but the receiver lives */
	STREAM_STOP,   /* the receiver wants nothing more; a text of so many bytes follows */
	STREAM_DONE,   /* after the end: all was taken */
};

struct stream_frame {
	uint32_t kind;
	uint32_t crc32;
	uint64_t offset, bytes;
	uint32_t block;
};

#define STREAM_FRAME_BYTES 32u
void stream_write_frame(uint8_t into[STREAM_FRAME_BYTES], const struct stream_frame *frame);
/* False: of another format, or no frame. */
bool stream_read_frame(struct stream_frame *frame, const uint8_t from[STREAM_FRAME_BYTES]);
/* Whether frame->bytes of data follow it. */
static inline bool stream_has_data(const struct stream_frame *frame)
{
	return frame->kind == STREAM_BYTES || frame->kind == STREAM_FAIL ||
	       frame->kind == STREAM_STOP;
}

/* ---- Links ----------------------------------------------------------------------------------- */

struct stream_link;

/* Codes come with a sentence, but for -EAGAIN: not now. */
struct stream_link_ops {
	/* One side speaks at a time, as both know which: the sender until the credit is used up. */
	bool takes_turns;
	/* What receive() hands out stays until it is released; else until the next receive(). */
	bool bytes_last;

	/* Sends a frame and what follows it. `data` must stay until the next send(). */
	int (*send)(struct stream_link *link, const struct stream_frame *frame, const void *data,
		    struct base_error *error);
	/* The next frame and what follows it. `must`: this side can do nothing before. */
	int (*receive)(struct stream_link *link, struct stream_frame *frame, const void **data,
		       bool must, struct base_error *error);
	/* Waits until something may have changed. False: nothing has for STREAM_PATIENCE_MS. */
	bool (*wait)(struct stream_link *link, bool to_send);
	/* Receiver: what is before `offset` is not needed any more. `idle`: there is nothing else
	 * to do than to tell the sender. */
	void (*release)(struct stream_link *link, uint64_t offset, bool idle);
	/* Ends the connection, and frees the link. */
	void (*close)(struct stream_link *link);
};

/* The first member of each kind's own struct. */
struct stream_link {
	const struct stream_link_ops *ops;
	uint32_t rank;          /* for sentences: whose bytes these are; of a sender between nodes,
				 * the rank that writes them */
	uint32_t last_words_ms; /* how long a sender that fails tries to say why */
};

/* Asks whether to wait on. */
int stream_go_on(const struct gather_wait *wait, struct base_error *error);

/* ---- Both ends (stream.c) -------------------------------------------------------------------- */

struct gather_sender {
	struct stream_link *link;
	struct gather_wait wait;
	bool has_memory;
	uint64_t offset; /* bytes put */
	uint64_t said;   /* of these, on their way; the others are in `batch` */
	uint64_t taken;  /* of these, free again */
	uint64_t window; /* how far `said` may go beyond `taken` */
	uint32_t block;  /* bytes that go together; 0: not known yet */
	uint8_t *batch;  /* of small pieces: two blocks, of which one is sent */
	unsigned filling;
	size_t batched;
	bool end_said, done, stopped, ended;
	struct base_error failure; /* the first one: all later calls answer the same */
};

struct gather_receiver {
	struct stream_link *link;
	struct gather_wait wait;
	int memory_fd; /* of the sender; -1 for none */
	const uint8_t *view;
	uint64_t view_bytes;
	uint64_t offset;   /* bytes handed out */
	uint64_t released; /* of these, so many are not needed any more */
	bool holds;        /* what is not needed is told; otherwise it is all that was handed out */
	struct stream_frame waiting; /* one that waits until all is released; kind 0: none */
	/* Of the run handed out last. */
	bool lasts, summed;
	uint32_t run_crc32;
	uint32_t crc32; /* of all, after the end */
	bool ended;
	struct base_error failure;
};

/* Take over the link and the fd, also where they fail. `credit`: what the sender may do before it
 * has heard of any. */
int stream_sender_new(struct gather_sender **out, struct stream_link *link, bool has_memory,
		      const struct stream_frame *credit, const struct gather_wait *wait,
		      struct base_error *error);
int stream_receiver_new(struct gather_receiver **out, struct stream_link *link, int memory_fd,
			const struct gather_wait *wait, struct base_error *error);

#endif
