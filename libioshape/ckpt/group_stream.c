/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A rank that brings its part to another one, which writes it. The archive is made here, headers,
 * checksums and all, and goes out as a stream. To a writer on this node only references go: the
 * bytes lie in memory that the writer maps. That is the staging memory, or, for a save that
 * borrows, a window of a few chunks that its bytes are copied through.
 */
#include "ckpt/group.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* Less than this is sent as it is: a reference costs as much as a few pages. */
#define SMALL_BYTES (32 * KIB)

/* Chunks in the window of a save that borrows: one is filled while others are being written. */
#define WINDOW_CHUNKS 4u

/* From here on two checksums are joined, rather than made twice. */
#define COMBINE_BYTES (4 * KIB)

struct bringing {
	struct ckpt_part *part;
	struct gather_sender *sender;
	bool local;
	uint32_t crc32; /* of all so far */
	uint64_t total_bytes;
	struct ckpt_watched watched; /* rank 0, while we wait */
	struct base_buffer note;
	/* Staged: where in the stream the chunk before the last one ended. */
	uint64_t chunk_end;
	/* Borrowed: the window. */
	struct ckpt_chunk *window[WINDOW_CHUNKS];
	uint64_t window_end[WINDOW_CHUNKS]; /* in the stream, of what it last held */
	size_t chunks;                      /* of the window; 0 where there is none */
	size_t current;                     /* the one being filled */
	size_t used;                        /* bytes of it */
};

void ckpt_stream_address(const struct ckpt_part *part, uint32_t writer, char *into, size_t room)
{
	snprintf(into, room, "ioshape-%016llx-%llu-%u", (unsigned long long)part->group->id,
		 (unsigned long long)part->round.number, writer);
}

/* MPI promises tags up to 32767. */
uint32_t ckpt_stream_tag(const struct ckpt_part *part)
{
	return (uint32_t)(part->round.number % 16384);
}

/* While we wait for the writer: it may have failed, and so may everything. */
static int go_on(void *user, struct base_error *error)
{
	struct bringing *bringing = user;
	struct ckpt_part *part = bringing->part;
	struct ckpt_note_reader reader;
	int ret;

	if (ckpt_part_track(part, IOSHAPE_PHASE_WAIT, part->round.done_bytes,
			    bringing->total_bytes) ||
	    atomic_load(&part->save->abort))
		return base_fail(error, -ECANCELED, "the save was stopped");
	ret = ckpt_round_look(&part->round, "verdict", 0, &bringing->watched, &bringing->note,
			      error);
	if (ret == -EAGAIN)
		return 0;
	/* All is well: the writer has all, and its word of that is on the way. */
	reader = ckpt_read_note(&bringing->note);
	if (!ret && !ckpt_read_number(&reader) && !reader.bad)
		return 0;
	return ret ? ret :
		     base_fail(error, -EPIPE, "the generation was given up before all was written");
}

/* Waits until the writer needs nothing before `end` any more. */
static int await_taken(struct bringing *bringing, uint64_t end, struct base_error *error)
{
	return gather_sender_await_taken(bringing->sender, end, error);
}

/* ---- Staged ---------------------------------------------------------------------------------- */

/* Chunks go back one later than they could, so that the writer has always one to go on with. */
static int leaving(void *user, struct base_error *error)
{
	struct bringing *bringing = user;
	uint64_t end = gather_sender_offset(bringing->sender);
	int ret;

	ret = await_taken(bringing, bringing->part->save->lag ? bringing->chunk_end : end, error);
	bringing->chunk_end = end;
	return ret;
}

/* Where in the shared memory these bytes are; false if they are somewhere else. */
static bool find_staged(const struct bringing *bringing, const void *data, uint64_t *offset)
{
	const struct ckpt_chunk *chunk = bringing->part->save->reading;
	const uint8_t *at = data;

	if (!chunk || at < chunk->memory || at >= chunk->memory + CKPT_CHUNK_BYTES)
		return false;
	*offset = chunk->offset + (uint64_t)(at - chunk->memory);
	return true;
}

/* ---- Borrowed -------------------------------------------------------------------------------- */

/*
 * Above the pool's limit: what later saves have staged already waits for this one to end, so this
 * one must not wait for that memory.
 */
static int open_window(struct bringing *bringing, struct base_error *error)
{
	struct ioshape_save *save = bringing->part->save;
	size_t wanted = MIN(ckpt_chunks_for(save->plan.payload_bytes), WINDOW_CHUNKS);
	int ret = 0;

	while (!ret && bringing->chunks < wanted) {
		ret = ckpt_pool_get(&save->context->shared_pool,
				    &bringing->window[bringing->chunks], error);
		bringing->chunks += !ret;
	}
	return ret;
}

static void close_window(struct bringing *bringing)
{
	while (bringing->chunks)
		ckpt_pool_put(&bringing->part->save->context->shared_pool,
			      bringing->window[--bringing->chunks]);
}

/* The next free bytes of the window: at most so many. */
static int find_room(struct bringing *bringing, size_t *bytes, struct base_error *error)
{
	int ret;

	if (bringing->used == CKPT_CHUNK_BYTES) {
		bringing->window_end[bringing->current] = gather_sender_offset(bringing->sender);
		bringing->current = (bringing->current + 1) % bringing->chunks;
		ret = await_taken(bringing, bringing->window_end[bringing->current], error);
		if (ret)
			return ret;
		bringing->used = 0;
	}
	*bytes = MIN(*bytes, CKPT_CHUNK_BYTES - bringing->used);
	return 0;
}

static int put_through_window(struct bringing *bringing, const uint8_t *data, size_t bytes,
			      uint32_t *crc, struct base_error *error)
{
	const struct ckpt_chunk *chunk;
	size_t piece;
	int ret = 0;

	for (*crc = 0; !ret && bytes; data += piece, bytes -= piece) {
		piece = bytes;
		ret = find_room(bringing, &piece, error);
		if (ret)
			return ret;
		chunk = bringing->window[bringing->current];
		*crc = base_copy_crc32(*crc, chunk->memory + bringing->used, data, piece);
		ret = gather_sender_put_shared(bringing->sender, chunk->memory + bringing->used,
					       chunk->offset + bringing->used, piece, error);
		bringing->used += piece;
	}
	return ret;
}

/* ---- The sink -------------------------------------------------------------------------------- */

static uint64_t sink_offset(void *to)
{
	const struct bringing *bringing = to;

	return gather_sender_offset(bringing->sender);
}

static int send_out(struct bringing *bringing, const void *data, size_t bytes, uint32_t *crc,
		    struct base_error *error)
{
	uint64_t offset;

	if (bringing->local && bytes >= SMALL_BYTES) {
		if (bringing->chunks)
			return put_through_window(bringing, data, bytes, crc, error);
		if (find_staged(bringing, data, &offset)) {
			*crc = base_crc32(0, data, bytes);
			return gather_sender_put_shared(bringing->sender, data, offset, bytes,
							error);
		}
	}
	*crc = base_crc32(0, data, bytes);
	return gather_sender_put(bringing->sender, data, bytes, error);
}

static int sink_put(void *to, const void *data, size_t bytes, uint32_t *crc,
		    struct base_error *error)
{
	struct bringing *bringing = to;
	struct ckpt_part *part = bringing->part;
	uint32_t piece_crc = 0;
	int ret;

	ret = send_out(bringing, data, bytes, &piece_crc, error);
	if (ret)
		return ret;
	if (crc && bytes < COMBINE_BYTES)
		*crc = base_crc32(*crc, data, bytes);
	else if (crc)
		*crc = base_crc32_combine(*crc, piece_crc, bytes);
	bringing->crc32 = base_crc32_combine(bringing->crc32, piece_crc, bytes);
	if (ckpt_part_track(part, IOSHAPE_PHASE_WRITE,
			    MIN(gather_sender_offset(bringing->sender), bringing->total_bytes),
			    bringing->total_bytes) ||
	    atomic_load(&part->save->abort))
		return base_fail(error, -ECANCELED, "the save was stopped");
	return 0;
}

static int sink_finish(void *to, struct base_error *error)
{
	struct bringing *bringing = to;

	return gather_sender_end(bringing->sender, bringing->crc32, error);
}

static void sink_free(void *to)
{
	(void)to;
}

static const struct zip_sink_ops sink_ops = { sink_offset, sink_put, sink_finish, sink_free };

/* ---- Bringing -------------------------------------------------------------------------------- */

/* Over the caller's functions ranks come one after the other. */
static int await_turn(struct bringing *bringing, uint32_t writer, struct base_error *error)
{
	struct ckpt_part *part = bringing->part;
	uint32_t rank = part->group->options.rank, turn = 0;
	struct ckpt_note_reader reader;
	int ret;

	for (;;) {
		struct ckpt_watched unused = { 0 };

		ret = ckpt_round_look(&part->round, "turn", writer, &unused, &bringing->note,
				      error);
		if (!ret) {
			reader = ckpt_read_note(&bringing->note);
			turn = (uint32_t)ckpt_read_number(&reader);
		}
		if (ret && ret != -EAGAIN)
			return ret;
		if (turn >= rank)
			return 0;
		ret = go_on(bringing, error);
		if (ret)
			return ret;
		ckpt_round_rest(&part->round);
	}
}

static int open_sender(struct bringing *bringing, struct base_error *error)
{
	struct ckpt_part *part = bringing->part;
	const struct ioshape_group *group = part->group;
	const struct gather_wait wait = { go_on, bringing };
	uint32_t writer = ckpt_writer_of(group, part->plan.mode, group->options.rank);
	char address[GATHER_ADDRESS_BYTES];
	struct ckpt_note here = { 0 };
	int ret, fd;

	bringing->local = group->ranks[writer].node == group->ranks[group->options.rank].node;
	if (!bringing->local) {
		ret = await_turn(bringing, writer, error);
		/* From here on the writer receives: what fails is said on the stream. */
		if (!ret)
			ret = ckpt_round_post(&part->round, "here", &here, error);
		return ret ? ret :
			     gather_sender_open_comm(&bringing->sender, group->options.comm, writer,
						     ckpt_stream_tag(part),
						     group->options.deadline_ms, &wait, error);
	}
	if (part->save->borrow && part->save->plan.payload_bytes) {
		ret = open_window(bringing, error);
		if (ret)
			return ret;
	}
	ret = ckpt_pool_share(&group->context->shared_pool, &fd, error);
	if (ret)
		return ret;
	ckpt_stream_address(part, writer, address, sizeof(address));
	return gather_sender_open_local(&bringing->sender, address, group->options.rank, fd, &wait,
					error);
}

static int bring(struct bringing *bringing, struct base_error *error)
{
	struct ioshape_save *save = bringing->part->save;
	struct ckpt_direct direct;
	const struct ckpt_source source = ckpt_source_of(save, &direct);
	const struct zip_sink sink = { &sink_ops, bringing };
	struct zip_writer *zip = NULL;
	int ret;

	ret = zip_writer_new(&zip, sink, save->path, error);
	if (!ret)
		ret = ckpt_write_records(zip, &save->plan, &source, error);
	zip_writer_free(zip);
	free(direct.scratch);
	return ret;
}

int ckpt_bring_part(struct ckpt_part *part, struct base_error *error)
{
	struct ioshape_save *save = part->save;
	struct bringing bringing = { .part = part, .total_bytes = save->plan.expected_bytes };
	uint64_t begin_ns = base_now_ns();
	int ret;

	ret = open_sender(&bringing, error);
	if (!ret) {
		save->leaving = leaving;
		save->leaving_user = &bringing;
		save->lag = save->admitted > 1;
		ret = bring(&bringing, error);
		save->leaving = NULL;
		part->report->file_bytes = gather_sender_offset(bringing.sender);
	}
	gather_sender_free(bringing.sender, ret ? error->text : NULL);
	close_window(&bringing);
	base_buffer_free(&bringing.note);
	part->report->write_s = base_seconds(base_now_ns() - begin_ns);
	return ret;
}
