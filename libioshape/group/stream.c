/* SPDX-License-Identifier: Apache-2.0 */
/* Both ends of a stream, independent of the link that carries it. */
#define _GNU_SOURCE
#include "group/stream.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#ifndef MADV_POPULATE_READ
#define MADV_POPULATE_READ 22 /* Linux 5.14 */
#endif

/* Most bytes of one reference to memory: how finely the sender learns what was taken. */
#define REFERENCE_BYTES (8 * MIB)
/* Fewer bytes cost less to copy than to map. */
#define LEAST_REFERENCE_BYTES (4 * KIB)

#define MAGIC UINT32_C(0x6d7473) /* "stm"; the format follows in the highest byte */

int stream_go_on(const struct stream_wait *wait, struct base_error *error)
{
	int ret = wait->go_on ? wait->go_on(wait->user, error) : 0;

	return ret ? base_fail(error, ret, "the wait for the data of a rank was stopped") : 0;
}

/* Records `ret` as the stream's failure, unless it has failed before. Returns the code of the first
 * failure. */
static int keep(struct base_error *kept, int ret, struct base_error *error)
{
	if (!ret)
		return 0;
	if (!kept->code)
		base_fail(kept, ret, "a stream between ranks failed");
	if (error && !error->code)
		*error = *kept;
	return kept->code;
}

/* ---- Frames ---------------------------------------------------------------------------------- */

static uint32_t magic(void)
{
	return MAGIC | (uint32_t)STREAM_FORMAT << 24;
}

void stream_write_frame(uint8_t into[STREAM_FRAME_BYTES], const struct stream_frame *frame)
{
	base_put_le(into, magic(), 4);
	base_put_le(into + 4, frame->kind, 4);
	base_put_le(into + 8, frame->offset, 8);
	base_put_le(into + 16, frame->bytes, 8);
	base_put_le(into + 24, frame->crc32, 4);
	base_put_le(into + 28, frame->block, 4);
}

bool stream_read_frame(struct stream_frame *frame, const uint8_t from[STREAM_FRAME_BYTES])
{
	*frame = (struct stream_frame){
		.kind = (uint32_t)base_get_le(from + 4, 4),
		.offset = base_get_le(from + 8, 8),
		.bytes = base_get_le(from + 16, 8),
		.crc32 = (uint32_t)base_get_le(from + 24, 4),
		.block = (uint32_t)base_get_le(from + 28, 4),
	};
	return base_get_le(from, 4) == magic();
}

/* Fails because a frame is not allowed at this point of the stream. */
static int fail_unexpected(const struct stream_link *link, struct base_error *error)
{
	return base_fail_reason_with(
		error, -EPROTO,
		"check that both ranks use the same version of this library, and a "
		"comm that keeps messages in order",
		"rank %u sent an unexpected message", link->rank);
}

/* ---- The sender: receiving replies ----------------------------------------------------------- */

static int take_credit(struct stream_sender *sender, const struct stream_frame *frame,
		       struct base_error *error)
{
	if (frame->offset < sender->taken || frame->offset > sender->said || !frame->block ||
	    frame->block > STREAM_MOST_BLOCK_BYTES || frame->bytes < frame->block ||
	    frame->bytes > STREAM_MOST_BLOCKS * STREAM_MOST_BLOCK_BYTES ||
	    (sender->block && frame->block != sender->block))
		return fail_unexpected(sender->link, error);
	sender->taken = frame->offset;
	sender->window = frame->bytes;
	sender->block = frame->block;
	return 0;
}

static int take_reply(struct stream_sender *sender, const struct stream_frame *frame,
		      const char *text, struct base_error *error)
{
	switch (frame->kind) {
	case STREAM_CREDIT:
		return take_credit(sender, frame, error);
	case STREAM_HOLD:
		return stream_go_on(&sender->wait, error);
	case STREAM_DONE:
		if (!sender->end_said)
			break;
		sender->done = true;
		sender->taken = sender->said;
		return 0;
	case STREAM_STOP:
		sender->stopped = true;
		return base_fail_reason(error, -ECANCELED,
					"the writer stopped receiving this rank's data: %.*s",
					(int)frame->bytes, text);
	}
	return fail_unexpected(sender->link, error);
}

/* Takes all replies that have arrived. */
static int hear_all(struct stream_sender *sender, struct base_error *error)
{
	struct stream_link *link = sender->link;
	struct stream_frame frame;
	const void *text;
	int ret;

	for (;;) {
		ret = link->ops->receive(link, &frame, &text, false, error);
		if (ret)
			return ret == -EAGAIN ? 0 : ret;
		ret = take_reply(sender, &frame, text, error);
		/* The receiver closes the connection after STREAM_DONE, so do not receive again. */
		if (ret || sender->done)
			return ret;
	}
}

/* Takes the next reply, without which the sender cannot go on. Waits a little if there is none. */
static int hear(struct stream_sender *sender, struct base_error *error)
{
	struct stream_link *link = sender->link;
	struct stream_frame frame;
	const void *text;
	int ret = link->ops->receive(link, &frame, &text, true, error);

	if (!ret)
		return take_reply(sender, &frame, text, error);
	if (ret != -EAGAIN)
		return ret;
	return link->ops->wait(link, false) ? 0 : stream_go_on(&sender->wait, error);
}

/* ---- The sender: sending frames -------------------------------------------------------------- */

static int say(struct stream_sender *sender, const struct stream_frame *frame, const void *data,
	       struct base_error *error)
{
	struct stream_link *link = sender->link;
	int ret;

	for (;;) {
		struct base_error why = { 0 };

		ret = link->ops->send(link, frame, data, &why);
		if (!ret)
			return 0;
		if (ret != -EAGAIN) {
			/* The receiver may have sent the reason. */
			int reply = hear_all(sender, error);

			return reply ? reply : base_propagate(error, &why);
		}
		ret = hear_all(sender, error);
		if (!ret && !link->ops->wait(link, true))
			ret = stream_go_on(&sender->wait, error);
		if (ret)
			return ret;
	}
}

/* Waits for this side's turn, if the link takes turns. */
static int await_turn(struct stream_sender *sender, struct base_error *error)
{
	int ret = 0;

	while (!ret && sender->link->ops->takes_turns &&
	       sender->said >= sender->taken + sender->window)
		ret = hear(sender, error);
	return ret;
}

/* Sends a frame with bytes of the stream, when the credit allows it. */
static int say_piece(struct stream_sender *sender, const struct stream_frame *frame,
		     const void *data, struct base_error *error)
{
	int ret = hear_all(sender, error);

	while (!ret && sender->said + frame->bytes > sender->taken + sender->window)
		ret = hear(sender, error);
	if (!ret)
		ret = say(sender, frame, data, error);
	if (!ret)
		sender->said += frame->bytes;
	return ret;
}

/* Sends the batch. The other block is filled while this one is sent. */
static int say_batch(struct stream_sender *sender, struct base_error *error)
{
	const struct stream_frame frame = { .kind = STREAM_BYTES, .bytes = sender->batched };
	int ret;

	if (!sender->batched)
		return 0;
	ret = say_piece(sender, &frame, sender->batch + sender->filling * (size_t)sender->block,
			error);
	sender->filling = 1 - sender->filling;
	sender->batched = 0;
	return ret;
}

/* Waits until the receiver has said how large blocks are, and allocates the batch. */
static int make_batch(struct stream_sender *sender, struct base_error *error)
{
	int ret = 0;

	while (!ret && !sender->block)
		ret = hear(sender, error);
	if (ret || sender->batch)
		return ret;
	sender->batch = base_map(2 * (size_t)sender->block);
	return sender->batch ? 0 :
			       base_no_memory(error, "send buffers", 2 * (uint64_t)sender->block);
}

static int put(struct stream_sender *sender, const void *data, size_t bytes,
	       struct base_error *error)
{
	const uint8_t *from = data;
	size_t piece;
	int ret = make_batch(sender, error);

	for (; !ret && bytes; from += piece, bytes -= piece) {
		piece = 0;
		if (sender->batched == sender->block)
			ret = say_batch(sender, error);
		if (ret)
			break;
		piece = MIN(bytes, sender->block - sender->batched);
		memcpy(sender->batch + sender->filling * (size_t)sender->block + sender->batched,
		       from, piece);
		sender->batched += piece;
	}
	return ret;
}

static int put_shared(struct stream_sender *sender, const void *data, uint64_t offset, size_t bytes,
		      uint32_t crc32, struct base_error *error)
{
	const bool whole = bytes <= REFERENCE_BYTES;
	const uint8_t *from = data;
	size_t step;
	int ret;

	if (!sender->has_memory || bytes < LEAST_REFERENCE_BYTES)
		return put(sender, data, bytes, error);
	ret = say_batch(sender, error);
	for (; !ret && bytes; from += step, offset += step, bytes -= step) {
		struct stream_frame frame = { .kind = STREAM_SHARED, .offset = offset };

		step = MIN(bytes, REFERENCE_BYTES);
		frame.bytes = step;
		frame.crc32 = whole ? crc32 : base_crc32(0, from, step);
		ret = say_piece(sender, &frame, NULL, error);
	}
	return ret;
}

static int end(struct stream_sender *sender, uint32_t crc32, struct base_error *error)
{
	const struct stream_frame frame = { .kind = STREAM_END,
					    .bytes = sender->offset,
					    .crc32 = crc32 };
	int ret = say_batch(sender, error);

	if (!ret)
		ret = await_turn(sender, error);
	if (!ret)
		ret = say(sender, &frame, NULL, error);
	sender->end_said = !ret;
	while (!ret && !sender->done)
		ret = hear(sender, error);
	return ret;
}

/* ---- The sender: functions of stream.h ------------------------------------------------------- */

int stream_sender_new(struct stream_sender **out, struct stream_link *link, bool has_memory,
		      const struct stream_frame *credit, const struct stream_wait *wait,
		      struct base_error *error)
{
	struct stream_sender *sender = calloc(1, sizeof(*sender));

	*out = sender;
	if (!sender) {
		link->ops->close(link);
		return base_no_memory(error, "a stream between ranks", sizeof(*sender));
	}
	sender->link = link;
	sender->wait = *wait;
	sender->has_memory = has_memory;
	sender->window = credit->bytes;
	sender->block = credit->block;
	return 0;
}

static int check_open(struct stream_sender *sender)
{
	if (!sender->failure.code && sender->ended)
		base_fail_reason(&sender->failure, -EINVAL,
				 "data was written to a stream that has ended");
	return sender->failure.code;
}

int stream_sender_put(struct stream_sender *sender, const void *data, size_t bytes,
		      struct base_error *error)
{
	int ret = check_open(sender);

	if (!ret && bytes)
		ret = put(sender, data, bytes, &sender->failure);
	if (!ret)
		sender->offset += bytes;
	return keep(&sender->failure, ret, error);
}

int stream_sender_put_shared(struct stream_sender *sender, const void *data, uint64_t offset,
			     size_t bytes, uint32_t crc32, struct base_error *error)
{
	int ret = check_open(sender);

	if (!ret && bytes)
		ret = put_shared(sender, data, offset, bytes, crc32, &sender->failure);
	if (!ret)
		sender->offset += bytes;
	return keep(&sender->failure, ret, error);
}

int stream_sender_await_taken(struct stream_sender *sender, uint64_t offset,
			      struct base_error *error)
{
	int ret = sender->failure.code;

	if (!ret && offset > sender->offset)
		ret = base_fail_reason(&sender->failure, -EINVAL,
				       "a stream waits for data that was never written to it");
	/* All other bytes have been copied: those not in shared memory, and those still in the
	 * batch. */
	offset = MIN(offset, sender->said);
	while (!ret && !sender->ended && sender->has_memory && sender->taken < offset)
		ret = hear(sender, &sender->failure);
	return keep(&sender->failure, ret, error);
}

int stream_sender_end(struct stream_sender *sender, uint32_t crc32, struct base_error *error)
{
	int ret = sender->failure.code;

	if (!ret && !sender->ended)
		ret = end(sender, crc32, &sender->failure);
	if (!ret)
		sender->ended = true;
	return keep(&sender->failure, ret, error);
}

static int wait_no_longer(void *user, struct base_error *error)
{
	const uint64_t *until_ns = user;

	return base_now_ns() < *until_ns ? 0 :
					   base_fail_reason(error, -ETIMEDOUT, "no answer came");
}

/* Sends `why` to the receiver. If the link takes turns, waits for this side's turn, so that the
 * next stream between the two ranks finds nothing in its way. */
static void say_why(struct stream_sender *sender, const char *why)
{
	const struct stream_frame frame = { .kind = STREAM_FAIL,
					    .bytes = MIN(strlen(why), STREAM_TEXT_BYTES - 1) };
	const struct stream_link_ops *ops = sender->link->ops;
	uint64_t until_ns = base_now_ns() + base_ms_to_ns(sender->link->last_words_ms);
	int ret = 0;

	sender->wait = (struct stream_wait){ wait_no_longer, &until_ns };
	if (!sender->end_said) {
		if (!await_turn(sender, NULL))
			say(sender, &frame, why, NULL);
		return;
	}
	while (ops->takes_turns && !ret && !sender->done)
		ret = hear(sender, NULL);
}

void stream_sender_free(struct stream_sender *sender, const char *why)
{
	if (!sender)
		return;
	if (!sender->ended && !sender->stopped)
		say_why(sender, why ? why : "it gave up");
	sender->link->ops->close(sender->link);
	base_unmap(sender->batch, 2 * (size_t)sender->block);
	free(sender);
}

/* ---- The receiver: taking frames ------------------------------------------------------------- */

static int map_memory(struct stream_receiver *receiver, struct base_error *error)
{
	const void *view;
	uint64_t bytes;
	int ret = base_shared_view(receiver->memory_fd, &view, &bytes);

	if (ret)
		return base_fail(error, ret,
				 ret == -EPERM ? "the shared memory of rank %u is not sealed "
						 "against shrinking, so it is not read" :
						 "cannot map the shared memory of rank %u",
				 receiver->link->rank);
	if (receiver->view)
		base_unmap((void *)(uintptr_t)receiver->view, receiver->view_bytes);
	receiver->view = view;
	receiver->view_bytes = bytes;
	return 0;
}

static int follow_reference(struct stream_receiver *receiver, const struct stream_frame *frame,
			    const void **data, size_t *bytes, struct base_error *error)
{
	const uint64_t page = (uint64_t)sysconf(_SC_PAGESIZE);
	uint64_t end, begin;
	int ret = 0;

	if (receiver->memory_fd < 0 || !frame->bytes || frame->bytes > REFERENCE_BYTES ||
	    __builtin_add_overflow(frame->offset, frame->bytes, &end))
		return fail_unexpected(receiver->link, error);
	/* The sender's memory has grown since it was mapped. */
	if (end > receiver->view_bytes)
		ret = map_memory(receiver, error);
	if (!ret && end > receiver->view_bytes)
		ret = base_fail_reason(error, -EPROTO,
				       "rank %u refers to bytes outside of its memory",
				       receiver->link->rank);
	if (ret)
		return ret;
	/* Best effort: map all pages at once, instead of one by one. */
	begin = frame->offset / page * page;
	madvise((void *)(uintptr_t)(receiver->view + begin), end - begin, MADV_POPULATE_READ);
	*data = receiver->view + frame->offset;
	*bytes = (size_t)frame->bytes;
	receiver->lasts = true;
	receiver->summed = true;
	receiver->run_crc32 = frame->crc32;
	return 0;
}

/* Sends STREAM_DONE. All bytes have arrived, so it does not matter if the sender is gone. */
static int say_done(struct stream_receiver *receiver, struct base_error *error)
{
	const struct stream_frame frame = { .kind = STREAM_DONE };
	struct stream_link *link = receiver->link;
	int ret = 0;

	while (!ret && link->ops->send(link, &frame, NULL, NULL) == -EAGAIN)
		if (!link->ops->wait(link, true))
			ret = stream_go_on(&receiver->wait, error);
	return ret;
}

static int take_end(struct stream_receiver *receiver, const struct stream_frame *frame,
		    struct base_error *error)
{
	if (frame->bytes != receiver->offset)
		return base_fail_reason(error, -EPROTO,
					"rank %u has sent %llu bytes, of which %llu have arrived",
					receiver->link->rank, (unsigned long long)frame->bytes,
					(unsigned long long)receiver->offset);
	receiver->crc32 = frame->crc32;
	return say_done(receiver, error);
}

static int take_frame(struct stream_receiver *receiver, const struct stream_frame *frame,
		      const void **data, size_t *bytes, struct base_error *error)
{
	switch (frame->kind) {
	case STREAM_BYTES:
		if (!frame->bytes)
			break;
		*bytes = (size_t)frame->bytes;
		receiver->lasts = receiver->link->ops->bytes_last;
		return 0;
	case STREAM_SHARED:
		return follow_reference(receiver, frame, data, bytes, error);
	case STREAM_END:
		return take_end(receiver, frame, error);
	case STREAM_FAIL:
		return base_fail_reason(
			error, -ECANCELED, "rank %u failed: %.*s", receiver->link->rank,
			(int)MIN(frame->bytes, STREAM_TEXT_BYTES), (const char *)*data);
	}
	return fail_unexpected(receiver->link, error);
}

/* Returns whether a frame must wait until all bytes are released. After the end the sender may
 * reuse its memory, and growth of the memory replaces the view: neither may happen while bytes are
 * read. */
static bool must_wait(const struct stream_receiver *receiver, const struct stream_frame *frame)
{
	if (receiver->released == receiver->offset)
		return false;
	return frame->kind == STREAM_END || (frame->kind == STREAM_SHARED &&
					     (frame->offset > receiver->view_bytes ||
					      frame->bytes > receiver->view_bytes - frame->offset));
}

static int get_frame(struct stream_receiver *receiver, struct stream_frame *frame,
		     const void **data, struct base_error *error)
{
	if (!receiver->waiting.kind)
		return receiver->link->ops->receive(receiver->link, frame, data, false, error);
	*frame = receiver->waiting;
	receiver->waiting.kind = 0;
	return 0;
}

static int next(struct stream_receiver *receiver, const void **data, size_t *bytes,
		struct base_error *error)
{
	struct stream_link *link = receiver->link;
	struct stream_frame frame;
	int ret;

	for (;;) {
		ret = get_frame(receiver, &frame, data, error);
		if (!ret && must_wait(receiver, &frame)) {
			receiver->waiting = frame;
			return -EAGAIN;
		}
		if (ret != -EAGAIN) {
			if (!ret)
				ret = take_frame(receiver, &frame, data, bytes, error);
			base_error_of_rank(error, link->rank);
			return ret;
		}
		/* The sender may be waiting for what was released. */
		link->ops->release(link, receiver->released, true);
		if (receiver->released < receiver->offset)
			return -EAGAIN;
		ret = link->ops->wait(link, false) ? 0 : stream_go_on(&receiver->wait, error);
		if (ret)
			return ret;
	}
}

/* ---- The receiver: functions of stream.h ----------------------------------------------------- */

int stream_receiver_new(struct stream_receiver **out, struct stream_link *link, int memory_fd,
			const struct stream_wait *wait, struct base_error *error)
{
	struct stream_receiver *receiver = calloc(1, sizeof(*receiver));
	int ret = 0;

	*out = NULL;
	if (!receiver) {
		link->ops->close(link);
		base_close(memory_fd);
		return base_no_memory(error, "a stream between ranks", sizeof(*receiver));
	}
	receiver->link = link;
	receiver->wait = *wait;
	receiver->memory_fd = memory_fd;
	if (memory_fd >= 0)
		ret = map_memory(receiver, &receiver->failure);
	if (!ret) {
		*out = receiver;
		return 0;
	}
	base_error_of_rank(&receiver->failure, link->rank);
	base_propagate(error, &receiver->failure);
	stream_receiver_free(receiver);
	return ret;
}

int stream_receiver_next(struct stream_receiver *receiver, const void **data, size_t *bytes,
			 struct base_error *error)
{
	int ret = receiver->failure.code;

	*data = NULL;
	*bytes = 0;
	if (!receiver->holds)
		stream_receiver_release(receiver, receiver->offset);
	if (!ret && !receiver->ended) {
		receiver->summed = receiver->lasts = false;
		ret = next(receiver, data, bytes, &receiver->failure);
		receiver->ended = !ret && !*bytes;
	}
	if (ret == -EAGAIN && !receiver->failure.code)
		return ret;
	if (!ret)
		receiver->offset += *bytes;
	return keep(&receiver->failure, ret, error);
}

void stream_receiver_release(struct stream_receiver *receiver, uint64_t offset)
{
	if (offset <= receiver->released)
		return;
	receiver->released = MIN(offset, receiver->offset);
	receiver->link->ops->release(receiver->link, receiver->released, false);
}

/* Frees a receiver. If a stop cannot be sent at once, the end of the connection stops the
 * sender. */
void stream_receiver_free(struct stream_receiver *receiver)
{
	struct stream_frame stop = { .kind = STREAM_STOP };
	const char *why;

	if (!receiver)
		return;
	why = receiver->failure.code ? receiver->failure.text : "it gave up";
	stop.bytes = MIN(strlen(why), STREAM_TEXT_BYTES - 1);
	if (!receiver->ended)
		receiver->link->ops->send(receiver->link, &stop, why, NULL);
	receiver->link->ops->close(receiver->link);
	if (receiver->view)
		base_unmap((void *)(uintptr_t)receiver->view, receiver->view_bytes);
	base_close(receiver->memory_fd);
	free(receiver);
}
