/* SPDX-License-Identifier: Apache-2.0 */
/* Streams: carry the bytes of a rank to the rank that writes them. Two transports, called links,
 * carry the frames: a socket and shared memory on one host, the caller's functions between
 * nodes. */
#ifndef GROUP_STREAM_H
#define GROUP_STREAM_H

#include "base/base.h"

#include <ioshape/group.h>

/*
 * A stream carries the bytes of one rank, in order, to the rank that writes them. Memory is bounded
 * on both sides: the sender blocks while the receiver has taken too little. Each end is used by one
 * thread.
 *
 * While a call waits, it calls go_on about ten times a second. Anything but 0 ends the wait with
 * that code.
 */
struct stream_wait {
	int (*go_on)(void *user, struct base_error *error);
	void *user;
};

struct stream_sender;

#define STREAM_ADDRESS_BYTES 80 /* size of a local stream's address, with the final 0 */

/* Opens a stream to the writer that listens at `address` on this host. Retries until the writer
 * listens or go_on ends the wait. memory_fd, the sender's shared memory, is passed to the writer;
 * -1: none. */
int stream_sender_open_local(struct stream_sender **out, const char *address, uint32_t rank,
			     int memory_fd, const struct stream_wait *wait,
			     struct base_error *error);
/* Opens a stream over the caller's functions. `tag` is equal on both sides and new for each
 * stream. */
int stream_sender_open_comm(struct stream_sender **out, const struct ioshape_comm *comm,
			    uint32_t to, uint32_t tag, uint32_t timeout_ms,
			    const struct stream_wait *wait, struct base_error *error);
/* Appends bytes. The caller may reuse the memory when the call returns. */
int stream_sender_put(struct stream_sender *sender, const void *data, size_t bytes,
		      struct base_error *error);
/*
 * Appends bytes that are in the shared memory, at `offset` of its fd. They are not copied, and must
 * not change until stream_sender_await_taken() returns for them. Their checksum travels with them,
 * so that the writer need not read them for it. On a stream over functions this copies, as
 * stream_sender_put() does.
 */
int stream_sender_put_shared(struct stream_sender *sender, const void *data, uint64_t offset,
			     size_t bytes, uint32_t crc32, struct base_error *error);
/* Waits until the writer needs nothing before `offset` any more. */
int stream_sender_await_taken(struct stream_sender *sender, uint64_t offset,
			      struct base_error *error);
/* Ends the stream with the checksum of all its bytes, and waits until the writer has taken them. */
int stream_sender_end(struct stream_sender *sender, uint32_t crc32, struct base_error *error);
/* Frees a sender. If the stream has not ended, the receiver is sent `why`; NULL: a general reason.
 * `sender` may be NULL. */
void stream_sender_free(struct stream_sender *sender, const char *why);

/* The socket at which a writer accepts the streams of ranks of its host. */
struct stream_listener;

/* Listens at `address` for the streams of the group's ranks, of which there are `ranks`. */
int stream_listener_open(struct stream_listener **out, const char *address, uint32_t ranks,
			 struct base_error *error);
void stream_listener_close(struct stream_listener *listener); /* NULL is fine */

struct stream_receiver;

/* Opens the stream of `rank`; waits until the rank has connected. */
int stream_receiver_open_local(struct stream_receiver **out, struct stream_listener *listener,
			       uint32_t rank, const struct stream_wait *wait,
			       struct base_error *error);
/*
 * Opens a stream over the caller's functions, and starts a thread that receives up to `blocks`
 * blocks of `block_bytes` bytes ahead. `memory` has that size and is borrowed until the receiver is
 * freed. NULL: the receiver allocates new memory.
 */
int stream_receiver_open_comm(struct stream_receiver **out, const struct ioshape_comm *comm,
			      uint32_t from, uint32_t tag, size_t block_bytes, unsigned blocks,
			      void *memory, uint32_t timeout_ms, const struct stream_wait *wait,
			      struct base_error *error);
/*
 * Returns the next run of bytes, valid until the next call; *bytes is 0 at the end. If the sender
 * failed or disconnected, the error names the rank and includes the sender's message.
 */
int stream_receiver_next(struct stream_receiver *receiver, const void **data, size_t *bytes,
			 struct base_error *error);
/* Tells the receiver that the caller needs nothing before this offset in the stream any more. */
void stream_receiver_release(struct stream_receiver *receiver, uint64_t offset);
/* Frees a receiver. If the stream has not ended, the sender is told to stop. NULL is fine. */
void stream_receiver_free(struct stream_receiver *receiver);

/* ---- Shared by all kinds of links (stream*.c) ------------------------------------------------ */

/*
 * The protocol. The sender sends the stream's bytes, or references to its shared memory, and then
 * the end or a failure. It never sends more than the receiver's credit allows. A credit says which
 * bytes the receiver has taken, and how many bytes beyond these the sender may send.
 */

/* Longest wait before `go_on` is called. */
#define STREAM_POLL_MS 100

/* Size of the message with which one side explains its failure to the other, with the final 0. */
#define STREAM_TEXT_BYTES 512

/* Limits of the numbers in a credit. */
#define STREAM_MOST_BLOCK_BYTES (64 * MIB)
#define STREAM_MOST_BLOCKS 1024u

/* ---- Frames ---------------------------------------------------------------------------------- */

#define STREAM_FORMAT BASE_FORMAT(3u)

enum stream_kind {
	/* From the sender: */
	/* offset: rank of the sender. On one host, the fd of its memory comes along, if there is
	 * one. */
	STREAM_HELLO = 1,
	STREAM_BYTES, /* `bytes` bytes of data follow */
	/* `bytes` bytes are in the sender's memory, at `offset`, with checksum `crc32`. */
	STREAM_SHARED,
	STREAM_END,  /* bytes: length of the stream; crc32: its checksum */
	STREAM_FAIL, /* a message of `bytes` bytes follows */
	/* From the receiver: */
	/* offset: all before it was taken; bytes: how far beyond it the sender may send; block:
	 * most bytes of one STREAM_BYTES. */
	STREAM_CREDIT,
	STREAM_HOLD, /* nothing new, but the receiver is alive */
	STREAM_STOP, /* the receiver wants no more bytes; a message of `bytes` bytes follows */
	STREAM_DONE, /* answer to STREAM_END: all bytes were taken */
};

struct stream_frame {
	uint32_t kind;
	uint32_t crc32;
	uint64_t offset, bytes;
	uint32_t block;
};

#define STREAM_FRAME_BYTES 32u
void stream_write_frame(uint8_t into[STREAM_FRAME_BYTES], const struct stream_frame *frame);
/* Returns false if the bytes are no frame, or a frame of another version. */
bool stream_read_frame(struct stream_frame *frame, const uint8_t from[STREAM_FRAME_BYTES]);
/* Returns whether frame->bytes bytes of data follow the frame. */
static inline bool stream_has_data(const struct stream_frame *frame)
{
	return frame->kind == STREAM_BYTES || frame->kind == STREAM_FAIL ||
	       frame->kind == STREAM_STOP;
}

/* ---- Links ----------------------------------------------------------------------------------- */

struct stream_link;

/* The operations of a link. Failures have error messages, except -EAGAIN: not possible now. */
struct stream_link_ops {
	/* Only one side may send at a time, and both sides know which: the sender until it has used
	 * up its credit. */
	bool takes_turns;
	/* Data from receive() stays valid until it is released, not just until the next
	 * receive(). */
	bool bytes_last;

	/* Sends a frame and its data. `data` must stay valid until the next send(). */
	int (*send)(struct stream_link *link, const struct stream_frame *frame, const void *data,
		    struct base_error *error);
	/* Receives the next frame and its data. `must`: this side can do nothing before the frame
	 * comes. */
	int (*receive)(struct stream_link *link, struct stream_frame *frame, const void **data,
		       bool must, struct base_error *error);
	/* Waits until something may have changed. Returns false if nothing has for
	 * STREAM_POLL_MS. */
	bool (*wait)(struct stream_link *link, bool to_send);
	/* Called on the receiver: nothing before `offset` is needed any more. `idle`: the receiver
	 * has nothing else to do, so the sender should be told now. */
	void (*release)(struct stream_link *link, uint64_t offset, bool idle);
	/* Closes the connection and frees the link. */
	void (*close)(struct stream_link *link);
};

/* Base of all links: the first member of each kind's own struct. */
struct stream_link {
	const struct stream_link_ops *ops;
	/* Rank for error messages: the sender's; on the sender's side between nodes, the
	 * writer's. */
	uint32_t rank;
	/* How long a failing sender tries to send its error. */
	uint32_t last_words_ms;
};

/* Calls go_on; a failure of it ends the wait. */
int stream_go_on(const struct stream_wait *wait, struct base_error *error);

/* ---- The two ends of a stream (stream.c) ----------------------------------------------------- */

struct stream_sender {
	struct stream_link *link;
	struct stream_wait wait;
	bool has_memory;
	uint64_t offset; /* bytes that were put */
	uint64_t said;   /* bytes of these that were sent; the others are in `batch` */
	uint64_t taken;  /* bytes of these that the receiver has taken */
	uint64_t window; /* credit: how far `said` may be beyond `taken` */
	uint32_t block;  /* most bytes of one frame; 0: not known yet */
	uint8_t *batch;  /* two blocks for small pieces: one is filled while the other is sent */
	unsigned filling;
	size_t batched;
	bool end_said, done, stopped, ended;
	struct base_error failure; /* first failure, which all later calls return */
};

struct stream_receiver {
	struct stream_link *link;
	struct stream_wait wait;
	int memory_fd; /* fd of the sender's memory; -1 for none */
	const uint8_t *view;
	uint64_t view_bytes;
	uint64_t offset;   /* bytes handed out */
	uint64_t released; /* bytes of these that are not needed any more */
	/* The caller releases bytes itself; else each stream_receiver_next() releases all. */
	bool holds;
	/* Frame that waits until all bytes are released; kind 0: none. */
	struct stream_frame waiting;
	/* Properties of the run that was handed out last. */
	bool lasts, summed;
	uint32_t run_crc32;
	uint32_t crc32; /* checksum of the stream, known after the end */
	bool ended;
	struct base_error failure;
};

/* Returns how many bytes were put. */
static inline uint64_t stream_sender_offset(const struct stream_sender *sender)
{
	return sender->offset;
}

/*
 * Makes bytes stay valid until the caller releases them. There are two exceptions. If
 * stream_receiver_lasts() returns false for the run handed out last, that run is valid only until
 * the next call. And stream_receiver_next() returns -EAGAIN, without an error message, if it cannot
 * go on before something is released.
 */
static inline void stream_receiver_hold(struct stream_receiver *receiver)
{
	receiver->holds = true;
}
static inline bool stream_receiver_lasts(const struct stream_receiver *receiver)
{
	return receiver->holds && receiver->lasts;
}

/* Returns whether the sender sent a checksum with the run handed out last; *crc32 receives it. */
static inline bool stream_receiver_summed(const struct stream_receiver *receiver, uint32_t *crc32)
{
	*crc32 = receiver->run_crc32;
	return receiver->summed;
}

/* Returns the sender's checksum of the stream. Call it after the end. */
static inline uint32_t stream_receiver_crc32(const struct stream_receiver *receiver)
{
	return receiver->crc32;
}

/* Create the ends of a stream. They take over the link and the fd, even on failure. `credit` is the
 * sender's credit before it has received one. */
int stream_sender_new(struct stream_sender **out, struct stream_link *link, bool has_memory,
		      const struct stream_frame *credit, const struct stream_wait *wait,
		      struct base_error *error);
int stream_receiver_new(struct stream_receiver **out, struct stream_link *link, int memory_fd,
			const struct stream_wait *wait, struct base_error *error);

#endif
