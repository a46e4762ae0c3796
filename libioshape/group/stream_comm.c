/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Streams over the caller's functions, between nodes.
 *
 * Only one side may send at a time, and both know which, because a send may block until the other
 * side receives. The receiver grants as many blocks as it has memory for, and the sender sends
 * these. It may send an end or a failure instead of a block, which ends the grant. While the
 * receiver has no memory, it sends a hold every second, so that the sender does not take it for
 * dead.
 *
 * A thread of the sender sends one block while the next one is filled. A thread of the receiver
 * receives ahead.
 */
#include "group/stream.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#define HOLD_MS 1000u

/* The connection to one rank. */
struct comm {
	const struct ioshape_comm *functions;
	uint32_t other;
	uint32_t tag;
	uint32_t timeout_ms;
	bool broken; /* a function has failed, so none is called any more */
};

static int fail(struct comm *comm, int code, const char *doing, struct base_error *error)
{
	comm->broken = true;
	return base_fail_with(error, code < 0 ? code : -EIO, "check whether that rank is alive",
			      "%s rank %u, with the functions of the group's comm, failed", doing,
			      comm->other);
}

static int send_bytes(struct comm *comm, const void *data, size_t bytes, struct base_error *error)
{
	const struct ioshape_comm *functions = comm->functions;
	int ret = comm->broken ? -EPIPE : 0;

	if (!ret)
		ret = functions->send(functions->user, comm->other, comm->tag, data, bytes,
				      comm->timeout_ms);
	return ret ? fail(comm, ret, "sending to", error) : 0;
}

static int receive_bytes(struct comm *comm, void *into, size_t bytes, struct base_error *error)
{
	const struct ioshape_comm *functions = comm->functions;
	int ret = comm->broken ? -EPIPE : 0;

	if (!ret)
		ret = functions->receive(functions->user, comm->other, comm->tag, into, bytes,
					 comm->timeout_ms);
	return ret ? fail(comm, ret, "receiving from", error) : 0;
}

static int say(struct comm *comm, const struct stream_frame *frame, const void *data,
	       struct base_error *error)
{
	uint8_t head[STREAM_FRAME_BYTES];
	int ret;

	stream_write_frame(head, frame);
	ret = send_bytes(comm, head, sizeof(head), error);
	return ret || !stream_has_data(frame) || !frame->bytes ?
		       ret :
		       send_bytes(comm, data, (size_t)frame->bytes, error);
}

static int fail_mistaken(struct comm *comm, struct base_error *error)
{
	comm->broken = true;
	return base_fail_reason_with(
		error, -EPROTO,
		"check that both ranks use the same version of this library, and a "
		"comm that keeps messages in order",
		"rank %u sent an unexpected message", comm->other);
}

static int hear_frame(struct comm *comm, struct stream_frame *frame, struct base_error *error)
{
	uint8_t head[STREAM_FRAME_BYTES];
	int ret = receive_bytes(comm, head, sizeof(head), error);

	if (ret)
		return ret;
	return stream_read_frame(frame, head) ? 0 : fail_mistaken(comm, error);
}

/* Receives the text that explains a failure or a stop. Nothing is sent to the other side after
 * it. */
static int hear_text(struct comm *comm, const struct stream_frame *frame,
		     char text[STREAM_TEXT_BYTES], struct base_error *error)
{
	int ret = 0;

	if (frame->bytes >= STREAM_TEXT_BYTES)
		return fail_mistaken(comm, error);
	if (frame->bytes)
		ret = receive_bytes(comm, text, (size_t)frame->bytes, error);
	comm->broken = true;
	return ret;
}

/* ---- The sender ------------------------------------------------------------------------------ */

struct comm_sender {
	struct stream_link base;
	struct comm comm; /* used by the thread while it has something to send */
	char text[STREAM_TEXT_BYTES];
	bool runs;
	pthread_t thread;
	pthread_mutex_t lock; /* protects the members below */
	pthread_cond_t change;
	struct stream_frame frame; /* frame to be sent; kind 0: none */
	const void *data;
	bool stop;
	struct base_error failure; /* failure of the thread */
};

static void *send_frames(void *argument)
{
	struct comm_sender *sender = argument;
	struct base_error error = { 0 };

	pthread_mutex_lock(&sender->lock);
	while (!sender->stop) {
		if (!sender->frame.kind) {
			pthread_cond_wait(&sender->change, &sender->lock);
			continue;
		}
		pthread_mutex_unlock(&sender->lock);
		say(&sender->comm, &sender->frame, sender->data, &error);
		pthread_mutex_lock(&sender->lock);
		sender->frame.kind = 0;
		sender->failure = error;
		pthread_cond_broadcast(&sender->change);
	}
	pthread_mutex_unlock(&sender->lock);
	return NULL;
}

/* Returns -EAGAIN if the thread has something to send. Otherwise it is idle, and this returns its
 * failure, if any. */
static int look_at_thread(struct comm_sender *sender, struct base_error *error)
{
	int ret = 0;

	pthread_mutex_lock(&sender->lock);
	if (sender->frame.kind)
		ret = -EAGAIN;
	else if (sender->failure.code)
		ret = base_propagate(error, &sender->failure);
	pthread_mutex_unlock(&sender->lock);
	return ret;
}

/* Sends a frame. Frames with bytes of the stream are sent by the thread. */
static int sender_send(struct stream_link *base, const struct stream_frame *frame, const void *data,
		       struct base_error *error)
{
	struct comm_sender *sender = (struct comm_sender *)base;
	int ret = look_at_thread(sender, error);

	if (ret)
		return ret;
	if (frame->kind != STREAM_BYTES)
		return say(&sender->comm, frame, data, error);
	if (!sender->runs) {
		ret = base_start_thread(&sender->thread, send_frames, sender);
		/* -EAGAIN would mean that the frame must be sent again later. */
		if (ret)
			return base_fail(error, ret == -EAGAIN ? -ENOMEM : ret,
					 "cannot start a thread to send to rank %u",
					 sender->comm.other);
		sender->runs = true;
	}
	pthread_mutex_lock(&sender->lock);
	sender->frame = *frame;
	sender->data = data;
	pthread_cond_broadcast(&sender->change);
	pthread_mutex_unlock(&sender->lock);
	return 0;
}

static int sender_receive(struct stream_link *base, struct stream_frame *frame, const void **data,
			  bool must, struct base_error *error)
{
	struct comm_sender *sender = (struct comm_sender *)base;
	int ret = must ? look_at_thread(sender, error) : -EAGAIN;

	if (!ret)
		ret = hear_frame(&sender->comm, frame, error);
	if (!ret && frame->kind == STREAM_STOP)
		ret = hear_text(&sender->comm, frame, sender->text, error);
	*data = sender->text;
	return ret;
}

static bool sender_wait(struct stream_link *base, bool to_send)
{
	struct comm_sender *sender = (struct comm_sender *)base;
	bool changed = true;

	(void)to_send;
	pthread_mutex_lock(&sender->lock);
	while (changed && sender->frame.kind)
		changed = base_cond_wait_ms(&sender->change, &sender->lock, STREAM_POLL_MS);
	pthread_mutex_unlock(&sender->lock);
	return changed;
}

static void sender_release(struct stream_link *base, uint64_t offset, bool idle)
{
	(void)base, (void)offset, (void)idle;
}

/* Stops the thread. If it is in a function of the caller's, this waits up to timeout_ms. */
static void sender_close(struct stream_link *base)
{
	struct comm_sender *sender = (struct comm_sender *)base;

	if (sender->runs) {
		pthread_mutex_lock(&sender->lock);
		sender->stop = true;
		pthread_cond_broadcast(&sender->change);
		pthread_mutex_unlock(&sender->lock);
		pthread_join(sender->thread, NULL);
	}
	pthread_cond_destroy(&sender->change);
	pthread_mutex_destroy(&sender->lock);
	free(sender);
}

int stream_sender_open_comm(struct stream_sender **out, const struct ioshape_comm *comm,
			    uint32_t to, uint32_t tag, uint32_t timeout_ms,
			    const struct stream_wait *wait, struct base_error *error)
{
	static const struct stream_frame no_credit;
	static const struct stream_link_ops ops = {
		.takes_turns = true,
		.send = sender_send,
		.receive = sender_receive,
		.wait = sender_wait,
		.release = sender_release,
		.close = sender_close,
	};
	struct comm_sender *sender = calloc(1, sizeof(*sender));

	*out = NULL;
	if (!sender)
		return base_no_memory(error, "a stream between ranks", sizeof(*sender));
	pthread_mutex_init(&sender->lock, NULL);
	base_cond_init(&sender->change);
	sender->base = (struct stream_link){ .ops = &ops, .rank = to, .last_words_ms = timeout_ms };
	sender->comm = (struct comm){ comm, to, tag, timeout_ms, false };
	return stream_sender_new(out, &sender->base, false, &no_credit, wait, error);
}

/* ---- The receiver ---------------------------------------------------------------------------- */

struct comm_receiver {
	struct stream_link base;
	struct comm comm; /* used by the thread only */
	uint32_t block;
	unsigned blocks;
	uint8_t *memory;
	bool owns_memory;
	bool runs;
	pthread_t thread;

	pthread_mutex_t lock; /* protects the members below */
	pthread_cond_t change;
	uint64_t received; /* blocks received; block i is at position i % blocks */
	uint64_t handed;   /* blocks handed out */
	uint64_t released; /* blocks not needed any more */
	uint64_t received_bytes, released_bytes;
	size_t *sizes;            /* bytes of each block, by position */
	struct stream_frame last; /* end or failure from the sender; kind 0: not received yet */
	char text[STREAM_TEXT_BYTES];
	/* Frame to send after the end, or instead of more credit; kind 0: none. */
	struct stream_frame answer;
	char why[STREAM_TEXT_BYTES];
	struct base_error failure; /* failure of the thread */
};

/* Waits until there is something to send to the sender, and sends it holds meanwhile. The caller
 * holds the lock. */
static int await_consumer(struct comm_receiver *receiver, bool for_answer, struct base_error *error)
{
	const struct stream_frame hold = { .kind = STREAM_HOLD };
	const struct ioshape_comm *functions = receiver->comm.functions;
	uint64_t said_ns = base_now_ns();
	int ret = 0;

	while (!ret && !receiver->answer.kind &&
	       (for_answer || receiver->received - receiver->released >= receiver->blocks)) {
		if (base_cond_wait_ms(&receiver->change, &receiver->lock, STREAM_POLL_MS))
			continue;
		pthread_mutex_unlock(&receiver->lock);
		if (functions->progress)
			functions->progress(functions->user);
		if (base_now_ns() - said_ns > base_ms_to_ns(HOLD_MS)) {
			ret = say(&receiver->comm, &hold, NULL, error);
			said_ns = base_now_ns();
		}
		pthread_mutex_lock(&receiver->lock);
	}
	return ret;
}

static int receive_block(struct comm_receiver *receiver, uint64_t bytes, struct base_error *error)
{
	/* This check stays valid: only this thread receives blocks, and the others only release
	 * them. */
	const size_t number = receiver->received % receiver->blocks;
	bool is_full;
	int ret;

	pthread_mutex_lock(&receiver->lock);
	is_full = receiver->received - receiver->released >= receiver->blocks;
	pthread_mutex_unlock(&receiver->lock);
	if (!bytes || bytes > receiver->block || is_full)
		return fail_mistaken(&receiver->comm, error);
	ret = receive_bytes(&receiver->comm, receiver->memory + number * receiver->block,
			    (size_t)bytes, error);
	if (ret)
		return ret;
	pthread_mutex_lock(&receiver->lock);
	receiver->sizes[number] = (size_t)bytes;
	receiver->received++;
	receiver->received_bytes += bytes;
	pthread_cond_broadcast(&receiver->change);
	pthread_mutex_unlock(&receiver->lock);
	return 0;
}

/* Receives all blocks that this credit allows, or the sender's last frame. */
static int receive_credit(struct comm_receiver *receiver, const struct stream_frame *credit,
			  struct stream_frame *last, struct base_error *error)
{
	int ret = 0;

	while (!ret && receiver->received_bytes < credit->offset + credit->bytes) {
		struct stream_frame frame;

		ret = hear_frame(&receiver->comm, &frame, error);
		if (ret)
			break;
		if (frame.kind == STREAM_BYTES) {
			ret = receive_block(receiver, frame.bytes, error);
			continue;
		}
		if (frame.kind == STREAM_FAIL)
			ret = hear_text(&receiver->comm, &frame, receiver->text, error);
		else if (frame.kind != STREAM_END)
			ret = fail_mistaken(&receiver->comm, error);
		*last = frame;
		break;
	}
	return ret;
}

/* Receives the stream. Returns when nothing is left to send but the answer. */
static int receive_all(struct comm_receiver *receiver, struct base_error *error)
{
	struct stream_frame last = { 0 };
	int ret = 0;

	while (!ret && !last.kind) {
		struct stream_frame credit = {
			.kind = STREAM_CREDIT,
			.bytes = (uint64_t)receiver->blocks * receiver->block,
			.block = receiver->block,
		};

		pthread_mutex_lock(&receiver->lock);
		ret = await_consumer(receiver, false, error);
		last.kind = receiver->answer.kind;
		credit.offset = receiver->released_bytes;
		pthread_mutex_unlock(&receiver->lock);
		if (ret || last.kind)
			return ret;
		ret = say(&receiver->comm, &credit, NULL, error);
		if (!ret)
			ret = receive_credit(receiver, &credit, &last, error);
	}
	pthread_mutex_lock(&receiver->lock);
	if (!ret)
		receiver->last = last;
	pthread_cond_broadcast(&receiver->change);
	if (!ret && last.kind == STREAM_END)
		ret = await_consumer(receiver, true, error);
	pthread_mutex_unlock(&receiver->lock);
	return ret;
}

static void *receive_in_thread(void *argument)
{
	struct comm_receiver *receiver = argument;
	struct base_error error = { 0 };
	struct stream_frame answer;
	int ret = receive_all(receiver, &error);

	pthread_mutex_lock(&receiver->lock);
	answer = receiver->answer;
	if (ret && receiver->last.kind != STREAM_END) {
		receiver->failure = error;
		pthread_cond_broadcast(&receiver->change);
	}
	pthread_mutex_unlock(&receiver->lock);
	/* All bytes have arrived, or no more are wanted, so a failure to send this does not
	 * matter. */
	if (!ret && answer.kind)
		say(&receiver->comm, &answer, receiver->why, NULL);
	return NULL;
}

/* Leaves a frame to the thread, which sends it in its turn. */
static int receiver_send(struct stream_link *base, const struct stream_frame *frame,
			 const void *data, struct base_error *error)
{
	struct comm_receiver *receiver = (struct comm_receiver *)base;

	(void)error;
	pthread_mutex_lock(&receiver->lock);
	receiver->answer = *frame;
	if (stream_has_data(frame))
		memcpy(receiver->why, data, (size_t)frame->bytes);
	pthread_cond_broadcast(&receiver->change);
	pthread_mutex_unlock(&receiver->lock);
	return 0;
}

static int receiver_receive(struct stream_link *base, struct stream_frame *frame, const void **data,
			    bool must, struct base_error *error)
{
	struct comm_receiver *receiver = (struct comm_receiver *)base;
	size_t number;
	int ret = 0;

	(void)must;
	pthread_mutex_lock(&receiver->lock);
	if (receiver->received > receiver->handed) {
		number = receiver->handed++ % receiver->blocks;
		*data = receiver->memory + number * receiver->block;
		*frame = (struct stream_frame){ .kind = STREAM_BYTES,
						.bytes = receiver->sizes[number] };
	} else if (receiver->failure.code) {
		ret = base_propagate(error, &receiver->failure);
	} else if (receiver->last.kind) {
		*data = receiver->text;
		*frame = receiver->last;
	} else {
		ret = -EAGAIN;
	}
	pthread_mutex_unlock(&receiver->lock);
	return ret;
}

static bool receiver_wait(struct stream_link *base, bool to_send)
{
	struct comm_receiver *receiver = (struct comm_receiver *)base;
	bool changed = true;

	(void)to_send;
	pthread_mutex_lock(&receiver->lock);
	while (changed && receiver->received == receiver->handed && !receiver->last.kind &&
	       !receiver->failure.code)
		changed = base_cond_wait_ms(&receiver->change, &receiver->lock, STREAM_POLL_MS);
	pthread_mutex_unlock(&receiver->lock);
	return changed;
}

/* Releases blocks whose bytes were all released. */
static void receiver_release(struct stream_link *base, uint64_t offset, bool idle)
{
	struct comm_receiver *receiver = (struct comm_receiver *)base;

	(void)idle;
	pthread_mutex_lock(&receiver->lock);
	while (receiver->released < receiver->handed) {
		const size_t bytes = receiver->sizes[receiver->released % receiver->blocks];

		if (receiver->released_bytes + bytes > offset)
			break;
		receiver->released_bytes += bytes;
		receiver->released++;
	}
	pthread_cond_broadcast(&receiver->change);
	pthread_mutex_unlock(&receiver->lock);
}

/* Stops the thread. If it is in a function of the caller's, this waits up to timeout_ms. */
static void receiver_close(struct stream_link *base)
{
	struct comm_receiver *receiver = (struct comm_receiver *)base;

	if (receiver->runs) {
		pthread_mutex_lock(&receiver->lock);
		if (!receiver->answer.kind)
			receiver->answer.kind = STREAM_STOP;
		pthread_cond_broadcast(&receiver->change);
		pthread_mutex_unlock(&receiver->lock);
		pthread_join(receiver->thread, NULL);
	}
	pthread_cond_destroy(&receiver->change);
	pthread_mutex_destroy(&receiver->lock);
	if (receiver->owns_memory)
		base_unmap(receiver->memory, receiver->blocks * (size_t)receiver->block);
	free(receiver->sizes);
	free(receiver);
}

int stream_receiver_open_comm(struct stream_receiver **out, const struct ioshape_comm *comm,
			      uint32_t from, uint32_t tag, size_t block_bytes, unsigned blocks,
			      void *memory, uint32_t timeout_ms, const struct stream_wait *wait,
			      struct base_error *error)
{
	static const struct stream_link_ops ops = {
		.takes_turns = true,
		.bytes_last = true,
		.send = receiver_send,
		.receive = receiver_receive,
		.wait = receiver_wait,
		.release = receiver_release,
		.close = receiver_close,
	};
	struct comm_receiver *receiver = calloc(1, sizeof(*receiver));
	int ret;

	*out = NULL;
	if (!receiver)
		return base_no_memory(error, "a stream between ranks", sizeof(*receiver));
	receiver->base = (struct stream_link){ .ops = &ops, .rank = from };
	receiver->comm = (struct comm){ comm, from, tag, timeout_ms, false };
	receiver->block = (uint32_t)MIN(block_bytes, STREAM_MOST_BLOCK_BYTES);
	receiver->blocks = MIN(MAX(blocks, 1u), STREAM_MOST_BLOCKS);
	pthread_mutex_init(&receiver->lock, NULL);
	base_cond_init(&receiver->change);
	receiver->sizes = calloc(receiver->blocks, sizeof(*receiver->sizes));
	receiver->owns_memory = !memory;
	receiver->memory = memory ? memory : base_map(receiver->blocks * (size_t)receiver->block);
	ret = receiver->sizes && receiver->memory ?
		      0 :
		      base_no_memory(error, "receive buffers",
				     receiver->blocks * (uint64_t)receiver->block);
	if (!ret) {
		ret = base_start_thread(&receiver->thread, receive_in_thread, receiver);
		receiver->runs = !ret;
		if (ret)
			base_fail(error, ret, "cannot start a thread to receive from rank %u",
				  from);
	}
	if (ret) {
		receiver_close(&receiver->base);
		return ret;
	}
	return stream_receiver_new(out, &receiver->base, -1, wait, error);
}
