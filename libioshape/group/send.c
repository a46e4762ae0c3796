/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A rank that sends its part to another one, which writes it. The archive is made here, headers,
 * checksums and all, and goes out as a stream. To a writer on this node only references go: the
 * bytes lie in memory that the writer maps. That is the staging memory, or, for a save that
 * borrows, a window of a few chunks that its bytes are copied through.
 */
#include "group/group.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* Less than this is sent as it is: a reference costs as much as a few pages. */
#define SMALL_BYTES (32 * KIB)

/* Parts begin on whole ones of these in the writer's file. */
#define PAGE_BYTES 4096u

/* Chunks in the window of a save that borrows: one is filled while others are being written. */
#define WINDOW_CHUNKS 4u

/* From here on two checksums are joined, rather than made twice. */
#define COMBINE_BYTES (4 * KIB)

struct sending {
	struct group_part *part;
	struct stream_sender *sender;
	bool local;
	uint32_t crc32; /* of all so far */
	uint64_t total_bytes;
	struct group_watched watched; /* rank 0, while we wait */
	/* Borrowed: the window. */
	struct save_chunk *window[WINDOW_CHUNKS];
	uint64_t window_end[WINDOW_CHUNKS]; /* in the stream, of what it last held */
	size_t chunks;                      /* of the window; 0 where there is none */
	size_t current;                     /* the one being filled */
	size_t used;                        /* bytes of it */
};

/* While we wait for the writer: it may have failed, and so may everything. */
static int go_on(void *user, struct base_error *error)
{
	struct sending *sending = user;
	struct group_part *part = sending->part;
	struct group_verdict verdict;
	int ret;

	ret = group_round_go_on(&part->round, IOSHAPE_PHASE_WAIT, part->round.done_bytes,
				sending->total_bytes, error);
	if (ret)
		return ret;
	ret = group_look(&part->round, &group_verdict, 0, &sending->watched, &verdict, error);
	if (ret == -EAGAIN)
		return 0;
	/* All is well: the writer has all, and its word of that is on the way. */
	if (!ret && !verdict.failure.code)
		return 0;
	return ret ? ret :
		     base_refuse(error, -EPIPE,
				 "the generation was given up before all was written");
}

/* ---- Staged ---------------------------------------------------------------------------------- */

static uint64_t offset_in_stream(void *sender)
{
	return stream_sender_offset(sender);
}

/* Waits until the writer needs nothing before that any more. */
static int await_taken(void *sender, uint64_t offset, struct base_error *error)
{
	return stream_sender_await_taken(sender, offset, error);
}

/* ---- Borrowed -------------------------------------------------------------------------------- */

/*
 * Above the pool's limit: what later saves have staged already waits for this one to end, so this
 * one must not wait for that memory.
 */
static int open_window(struct sending *sending, struct base_error *error)
{
	const struct save_task *task = sending->part->task;
	size_t wanted = MIN(save_chunks_for(task->payload_bytes), WINDOW_CHUNKS);
	int ret = 0;

	while (!ret && sending->chunks < wanted) {
		ret = save_shared_get(sending->part->group->context,
				      &sending->window[sending->chunks], error);
		sending->chunks += !ret;
	}
	return ret;
}

static void close_window(struct sending *sending)
{
	while (sending->chunks)
		save_shared_put(sending->part->group->context, sending->window[--sending->chunks]);
}

/* The next free bytes of the window: at most so many. They lie there as in the writer's file, to
 * the page: it is written from there. */
static int find_free(struct sending *sending, size_t *bytes, struct base_error *error)
{
	const uint64_t offset = stream_sender_offset(sending->sender);
	int ret;

	sending->used += (offset - sending->used) % PAGE_BYTES;
	if (sending->used >= SAVE_CHUNK_BYTES) {
		sending->window_end[sending->current] = offset;
		sending->current = (sending->current + 1) % sending->chunks;
		ret = await_taken(sending->sender, sending->window_end[sending->current], error);
		if (ret)
			return ret;
		sending->used = offset % PAGE_BYTES;
	}
	*bytes = MIN(*bytes, SAVE_CHUNK_BYTES - sending->used);
	return 0;
}

static int put_through_window(struct sending *sending, const uint8_t *data, size_t bytes,
			      uint32_t *crc, struct base_error *error)
{
	const struct save_chunk *chunk;
	uint32_t piece_crc;
	size_t piece;
	int ret = 0;

	for (*crc = 0; !ret && bytes; data += piece, bytes -= piece) {
		piece = bytes;
		ret = find_free(sending, &piece, error);
		if (ret)
			return ret;
		chunk = sending->window[sending->current];
		piece_crc = base_copy_crc32(0, chunk->memory + sending->used, data, piece);
		ret = stream_sender_put_shared(sending->sender, chunk->memory + sending->used,
					       chunk->offset + sending->used, piece, piece_crc,
					       error);
		*crc = base_crc32_combine(*crc, piece_crc, piece);
		sending->used += piece;
	}
	return ret;
}

/* ---- The sink -------------------------------------------------------------------------------- */

static uint64_t sink_offset(void *to)
{
	const struct sending *sending = to;

	return stream_sender_offset(sending->sender);
}

static int send_out(struct sending *sending, const void *data, size_t bytes, uint32_t *crc,
		    struct base_error *error)
{
	uint64_t offset;

	if (sending->local && bytes >= SMALL_BYTES) {
		if (sending->chunks)
			return put_through_window(sending, data, bytes, crc, error);
		if (save_find_staged(sending->part->round.save, data, &offset)) {
			*crc = base_crc32(0, data, bytes);
			return stream_sender_put_shared(sending->sender, data, offset, bytes, *crc,
							error);
		}
	}
	*crc = base_crc32(0, data, bytes);
	return stream_sender_put(sending->sender, data, bytes, error);
}

static int sink_put(void *to, const void *data, size_t bytes, uint32_t *crc,
		    struct base_error *error)
{
	struct sending *sending = to;
	struct group_part *part = sending->part;
	uint32_t piece_crc = 0;
	int ret;

	ret = send_out(sending, data, bytes, &piece_crc, error);
	if (ret)
		return ret;
	if (crc && bytes < COMBINE_BYTES)
		*crc = base_crc32(*crc, data, bytes);
	else if (crc)
		*crc = base_crc32_combine(*crc, piece_crc, bytes);
	sending->crc32 = base_crc32_combine(sending->crc32, piece_crc, bytes);
	return group_round_go_on(&part->round, IOSHAPE_PHASE_WRITE,
				 MIN(stream_sender_offset(sending->sender), sending->total_bytes),
				 sending->total_bytes, error);
}

static const struct format_sink_ops sink_ops = { .offset = sink_offset, .put = sink_put };

/* ---- Sending --------------------------------------------------------------------------------- */

/* Over the caller's functions ranks come one after the other. */
static int await_call(struct sending *sending, uint32_t writer, struct base_error *error)
{
	struct group_part *part = sending->part;
	struct group_call call = { 0 };
	int ret;

	for (;;) {
		struct group_watched unused = { 0 };

		ret = group_look(&part->round, &group_call, writer, &unused, &call, error);
		if (ret && ret != -EAGAIN)
			return ret;
		if (call.rank >= part->group->options.rank)
			return 0;
		ret = go_on(sending, error);
		if (ret)
			return ret;
		group_round_rest(&part->round);
	}
}

static int open_sender(struct sending *sending, struct base_error *error)
{
	struct group_part *part = sending->part;
	const struct ioshape_group *group = part->group;
	const struct stream_wait wait = { go_on, sending };
	uint32_t writer = group_writer_of(group, part->plan.mode, group->options.rank);
	char address[STREAM_ADDRESS_BYTES];
	int ret, fd;

	sending->local = group_is_local(group, writer);
	if (!sending->local) {
		ret = await_call(sending, writer, error);
		/* From here on the writer receives: what fails is said on the stream. */
		if (!ret)
			ret = group_tell(&part->round, &group_here, NULL, error);
		return ret ? ret :
			     stream_sender_open_comm(&sending->sender, group->options.comm, writer,
						     group_stream_tag(part),
						     group->options.deadline_ms, &wait, error);
	}
	if (part->task->borrow && part->task->payload_bytes) {
		ret = open_window(sending, error);
		if (ret)
			return ret;
	}
	ret = save_shared_fd(group->context, &fd, error);
	if (ret)
		return ret;
	group_stream_address(part, writer, address, sizeof(address));
	return stream_sender_open_local(&sending->sender, address, group->options.rank, fd, &wait,
					error);
}

static int send_part(struct sending *sending, struct base_error *error)
{
	const struct group_part *part = sending->part;
	const struct format_sink sink = { &sink_ops, sending };
	struct format_writer *zip = NULL;
	int ret;

	ret = format_writer_new(&zip, sink, part->task->path, error);
	if (!ret)
		ret = save_write_payload(part->round.save, zip, NULL, error);
	format_writer_free(zip);
	if (!ret)
		ret = group_check_digest(sending->part, sending->crc32, error);
	if (!ret)
		ret = stream_sender_end(sending->sender, sending->crc32, error);
	return ret;
}

int group_send_part(struct group_part *part, struct base_error *error)
{
	struct sending sending = { .part = part, .total_bytes = part->task->expected_bytes };
	const struct ioshape_group *group = part->group;
	const uint32_t rank = group->options.rank;
	uint64_t begin_ns = base_now_ns();
	int ret;

	ret = open_sender(&sending, error);
	if (!ret) {
		const struct save_outlet outlet = { offset_in_stream, await_taken, sending.sender };

		save_keep_chunks(part->round.save, &outlet);
		ret = send_part(&sending, error);
		save_keep_chunks(part->round.save, NULL);
		part->report->file_bytes = stream_sender_offset(sending.sender);
	}
	/* The stream tells sooner than the writer's lock, but only of a process. */
	if (ret == -ECONNRESET) {
		const struct base_error gone = *error;

		memset(error, 0, sizeof(*error));
		ret = group_fail_of_rank(group, group_writer_of(group, part->plan.mode, rank),
					 &gone, error);
	}
	stream_sender_free(sending.sender, ret ? error->text : NULL);
	close_window(&sending);
	part->report->write_s = base_seconds(base_now_ns() - begin_ns);
	return ret;
}
