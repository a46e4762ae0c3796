/* SPDX-License-Identifier: Apache-2.0 */
/* Streams: the bytes of ranks on the way to the rank that writes them. */
#ifndef GROUP_STREAM_H
#define GROUP_STREAM_H

#include "base/base.h"

#include <ioshape/group.h>

/*
 * The bytes of one rank, in order, to the rank that writes them. Memory is bounded on both sides:
 * the sender is held up while too much has not been taken yet. Both ends are used by one thread
 * each.
 *
 * While a call waits it asks `go_on` about ten times a second; anything but 0 ends the waiting with
 * that code.
 */
struct stream_wait {
	int (*go_on)(void *user, struct base_error *error);
	void *user;
};

struct stream_sender;

#define STREAM_ADDRESS_BYTES 80 /* of local streams, with the final 0 */

/* Over a socket of this host to the writer who listens at `address`; it is tried until the writer
 * listens, or go_on ends it. memory_fd is passed on; -1 for none. */
int stream_sender_open_local(struct stream_sender **out, const char *address, uint32_t rank,
			     int memory_fd, const struct stream_wait *wait,
			     struct base_error *error);
/* Over the caller's functions. `tag` is the same on both sides, and new for each stream. */
int stream_sender_open_comm(struct stream_sender **out, const struct ioshape_comm *comm,
			    uint32_t to, uint32_t tag, uint32_t timeout_ms,
			    const struct stream_wait *wait, struct base_error *error);
/* Appends bytes. The memory is free again when it returns. */
int stream_sender_put(struct stream_sender *sender, const void *data, size_t bytes,
		      struct base_error *error);
/*
 * The same for bytes in the shared memory, at `offset` of its fd: they are not copied, and must
 * stay as they are until stream_sender_await_taken() returns for them. Their checksum goes with
 * them, so that nobody need look at them again. Over functions it is the same as the above.
 */
int stream_sender_put_shared(struct stream_sender *sender, const void *data, uint64_t offset,
			     size_t bytes, uint32_t crc32, struct base_error *error);
/* Waits until nobody needs what was put before `offset`. */
int stream_sender_await_taken(struct stream_sender *sender, uint64_t offset,
			      struct base_error *error);
/* Says that this was all, with a checksum of it, and waits until all has been taken. */
int stream_sender_end(struct stream_sender *sender, uint32_t crc32, struct base_error *error);
/* Without an end the receiver is told why, or that we are gone. NULL is fine. */
void stream_sender_free(struct stream_sender *sender, const char *why);

/* Where the ranks of this host bring their bytes to. */
struct stream_listener;

int stream_listener_open(struct stream_listener **out, const char *address,
			 struct base_error *error);
void stream_listener_close(struct stream_listener *listener); /* NULL is fine */

struct stream_receiver;

/* The stream of this rank: waits until it has come. */
int stream_receiver_open_local(struct stream_receiver **out, struct stream_listener *listener,
			       uint32_t rank, const struct stream_wait *wait,
			       struct base_error *error);
/*
 * `blocks` blocks of block_bytes are received ahead, on a thread of its own. `memory` is so much,
 * the caller's until the receiver is freed; NULL: the receiver's own, which is new each time.
 */
int stream_receiver_open_comm(struct stream_receiver **out, const struct ioshape_comm *comm,
			      uint32_t from, uint32_t tag, size_t block_bytes, unsigned blocks,
			      void *memory, uint32_t timeout_ms, const struct stream_wait *wait,
			      struct base_error *error);
/*
 * The next run of bytes, valid until the next call; *bytes is 0 at the end. A sender that failed or
 * went away is an error that names the rank and says what it said.
 */
int stream_receiver_next(struct stream_receiver *receiver, const void **data, size_t *bytes,
			 struct base_error *error);
/* All before this offset in the stream is not needed any more. */
void stream_receiver_release(struct stream_receiver *receiver, uint64_t offset);
/* Before the end the sender is told to stop. NULL is fine. */
void stream_receiver_free(struct stream_receiver *receiver);

/* ---- What the links of all kinds share (stream*.c) ------------------------------------------- */

/*
 * The sender sends the stream's bytes, or says where in its memory they are, and then the end or a
 * failure. It never goes further than the receiver's credit. The receiver's credit says what it
 * does not need any more, and how far beyond that the sender may go.
 */

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
int stream_go_on(const struct stream_wait *wait, struct base_error *error);

/* ---- Both ends (stream.c) -------------------------------------------------------------------- */

struct stream_sender {
	struct stream_link *link;
	struct stream_wait wait;
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

struct stream_receiver {
	struct stream_link *link;
	struct stream_wait wait;
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

/* Bytes put so far. */
static inline uint64_t stream_sender_offset(const struct stream_sender *sender)
{
	return sender->offset;
}

/*
 * From now on bytes stay as they are until they are released; but where stream_receiver_lasts()
 * denies it of the run handed out last, only until the next call. That is then -EAGAIN, without a
 * sentence, where nothing goes on before something is released.
 */
static inline void stream_receiver_hold(struct stream_receiver *receiver)
{
	receiver->holds = true;
}
static inline bool stream_receiver_lasts(const struct stream_receiver *receiver)
{
	return receiver->holds && receiver->lasts;
}

/* The checksum that the sender has given for the run handed out last. False: none. */
static inline bool stream_receiver_summed(const struct stream_receiver *receiver, uint32_t *crc32)
{
	*crc32 = receiver->run_crc32;
	return receiver->summed;
}

/* After the end: the sender's checksum. */
static inline uint32_t stream_receiver_crc32(const struct stream_receiver *receiver)
{
	return receiver->crc32;
}

/* Take over the link and the fd, also where they fail. `credit`: what the sender may do before it
 * has heard of any. */
int stream_sender_new(struct stream_sender **out, struct stream_link *link, bool has_memory,
		      const struct stream_frame *credit, const struct stream_wait *wait,
		      struct base_error *error);
int stream_receiver_new(struct stream_receiver **out, struct stream_link *link, int memory_fd,
			const struct stream_wait *wait, struct base_error *error);

#endif
