/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Reading past the page cache, in big blocks, far ahead: of the pieces of one call, and of the
 * calls to come.
 */
#define _GNU_SOURCE
#include "ring/read.h"

#include <stdlib.h>
#include <string.h>

/* ---- Memory made ready ----------------------------------------------------------------------- */

/*
 * A second thread that gets memory ready for what is read past the page cache: pages cost as much
 * as copying into them, and the device would idle meanwhile.
 */

static void *prepare_all(void *argument)
{
	struct ring_preparer *preparer = argument;
	const struct ring_piece *piece;
	uint64_t end = atomic_load(&preparer->reading->done);

	for (size_t i = 0; i < preparer->count && !atomic_load(&preparer->stop); i++) {
		piece = &preparer->pieces[i];
		end += piece->bytes;
		/* Not what has been filled meanwhile. */
		if (piece->into && end > atomic_load(&preparer->reading->done))
			base_fresh_prepare(preparer->fresh, piece->into, piece->bytes);
	}
	return NULL;
}

/* Prepares the memory of the pieces in their order, if it is fresh; or does nothing. */
static void start_preparer(struct ring_preparer *preparer, const struct ring_reading *reading,
			   const struct ring_piece *pieces, size_t count)
{
	const struct ring_lane *lane = reading->lane;

	*preparer = (struct ring_preparer){
		.fresh = lane->fresh, .reading = reading, .pieces = pieces, .count = count
	};
	/* Without it whoever fills the memory prepares it. */
	if (lane->fresh && lane->config.threads > 1)
		preparer->runs = !base_start_thread(&preparer->thread, prepare_all, preparer);
}

static void stop_preparer(struct ring_preparer *preparer)
{
	if (!preparer->runs)
		return;
	atomic_store(&preparer->stop, true);
	pthread_join(preparer->thread, NULL);
}

/* ---- Blocks ---------------------------------------------------------------------------------- */

/* ---- Blocks ---------------------------------------------------------------------------------- */

static struct ring_buffer *buffer_at(const struct ring_stream *stream, unsigned at)
{
	return stream->fifo[(stream->head + at) % stream->lane->shape.depth];
}

static uint64_t buffer_end(const struct ring_buffer *buffer)
{
	return buffer->offset + buffer->bytes;
}

/* The oldest block, which is not in flight. */
static void let_go(struct ring_stream *stream)
{
	ring_lane_give_back(stream->lane, buffer_at(stream, 0));
	stream->head = (stream->head + 1) % stream->lane->shape.depth;
	stream->queued--;
}

bool ring_stream_covers(const struct ring_stream *stream, uint64_t offset)
{
	return stream->lane && stream->queued && offset >= buffer_at(stream, 0)->offset &&
	       offset < stream->next_offset;
}

/*
 * Lets go of what lies before the offset; of everything if the offset lies before it. How blocks
 * that nobody asked for have fared does not matter.
 */
static void go_to(struct ring_stream *stream, uint64_t offset)
{
	bool back = offset < stream->next_offset && !ring_stream_covers(stream, offset);

	while (stream->queued && (back || buffer_end(buffer_at(stream, 0)) <= offset)) {
		ring_lane_finish(stream->lane, buffer_at(stream, 0), NULL);
		let_go(stream);
	}
	if (back) {
		stream->next_offset = 0;
		stream->clear_end = 0;
	}
}

/* ---- Requests -------------------------------------------------------------------------------- */

/* Where reading ahead of `from` ends; `from` itself if there is nothing to read ahead. */
static uint64_t ahead_limit(struct ring_stream *stream, uint64_t from)
{
	uint64_t wanted = MIN(from + stream->lane->shape.block_bytes, stream->ahead_end), next;

	if (wanted <= from)
		return from;
	stream->clear_end = MAX(stream->clear_end, from);
	if (stream->clear_end < wanted) {
		next = MIN(stream->clear_end + RING_STRETCH_BYTES, stream->end);
		if (ring_is_cached(stream->input->fd, stream->clear_end, next - stream->clear_end))
			stream->ahead_end = stream->clear_end;
		else
			stream->clear_end = next;
	}
	return MIN(wanted, stream->clear_end);
}

/*
 * The next request: as much of the coming pieces as a block holds, from an aligned offset, reading
 * over small gaps; where the pieces end, what follows them. False if all is under way.
 */
static bool next_request(struct ring_stream *stream, uint64_t *offset, size_t *bytes)
{
	uint64_t block = stream->lane->shape.block_bytes, unit = stream->lane->alignment;
	uint64_t begin = stream->next_offset, end;
	size_t i;

	while (stream->scout < stream->count &&
	       (!stream->pieces[stream->scout].bytes ||
		ring_piece_end(&stream->pieces[stream->scout]) <= stream->next_offset))
		stream->scout++;
	if (stream->scout < stream->count)
		begin = MAX(begin, stream->pieces[stream->scout].offset / unit * unit);
	end = begin;
	for (i = stream->scout; i < stream->count && end < begin + block; i++) {
		if (stream->pieces[i].offset > end + RING_GAP_BYTES && end > begin)
			break;
		end = MAX(end, ring_piece_end(&stream->pieces[i]));
	}
	if (i == stream->count && end < begin + block)
		end = ahead_limit(stream, end);
	if (end == begin)
		return false;
	*offset = begin;
	*bytes = MIN(base_round_up(end, unit) - begin, block);
	stream->next_offset = begin + *bytes;
	return true;
}

/* Sends requests until so many blocks are under way or wait to be let go. */
static void fill_queue(struct ring_stream *stream, unsigned most)
{
	struct ring_lane *lane = stream->lane;
	struct ring_buffer *buffer;

	while (stream->queued < most) {
		buffer = ring_lane_free_buffer(lane);
		if (!buffer)
			break;
		if (!next_request(stream, &buffer->offset, &buffer->bytes)) {
			ring_lane_give_back(lane, buffer);
			break;
		}
		stream->fifo[(stream->head + stream->queued++) % lane->shape.depth] = buffer;
		/* A failure waits in the buffer until its bytes are asked for. */
		ring_lane_submit(lane, buffer, NULL);
	}
}

/* ---- Pieces ---------------------------------------------------------------------------------- */

static void consume_piece(const struct ring_stream *stream, struct ring_piece *piece,
			  const struct ring_buffer *buffer, uint64_t begin, uint64_t end)
{
	const uint8_t *from = buffer->data + (begin - buffer->offset);
	uint8_t *to = piece->into ? (uint8_t *)piece->into + (begin - piece->offset) : NULL;
	size_t bytes = end - begin;

	if (to && !stream->preparer.runs)
		base_fresh_prepare(stream->lane->fresh, to, bytes);
	if (!to)
		piece->crc = base_crc32(piece->crc, from, bytes);
	else if (piece->want_crc)
		piece->crc = base_crc32_move(piece->crc, to, from, bytes);
	else
		memcpy(to, from, bytes);
}

/* Hands the bytes of one block to the pieces they belong to. */
static int consume(struct ring_stream *stream, struct ring_buffer *buffer)
{
	struct ring_reading *reading = stream->reading;
	uint64_t offset = buffer->offset, end = offset + buffer->moved, from, to;

	while (stream->piece < stream->count) {
		struct ring_piece *piece = &stream->pieces[stream->piece];

		from = MAX(piece->offset, offset);
		to = MIN(ring_piece_end(piece), end);
		if (from < to) {
			consume_piece(stream, piece, buffer, from, to);
			atomic_fetch_add(&reading->done, to - from);
		}
		if (ring_piece_end(piece) > end) {
			if (buffer->moved < buffer->bytes && piece->offset < offset + buffer->bytes)
				return ring_cut_short(reading->input, end, reading->error);
			break;
		}
		stream->piece++;
	}
	return ring_tell(reading);
}

/* ---- Beginning and end ----------------------------------------------------------------------- */

static int begin(struct ring_stream *stream, struct ring_reading *reading)
{
	struct ring_lane *lane = reading->lane;
	int ret = ring_lane_start(lane, reading->error);

	if (ret)
		return ret;
	stream->fifo = calloc(lane->shape.depth, sizeof(struct ring_buffer *));
	if (!stream->fifo)
		return base_no_memory(reading->error, "a read queue",
				      lane->shape.depth * sizeof(struct ring_buffer *));
	stream->lane = lane;
	stream->head = stream->queued = 0;
	stream->next_offset = stream->clear_end = 0;
	ring_lane_attach(lane, stream->input->direct_fd, stream->input->path, true, NULL);
	lane->direct = true;
	lane->alignment = ring_lane_direct_alignment(lane, &stream->input->fs);
	lane->file_bytes = stream->input->base + stream->input->bytes;
	return 0;
}

int ring_stream_begin(struct ring_stream *stream, struct ring_reading *reading, uint64_t offset)
{
	int ret = begin(stream, reading);

	if (ret)
		return ret;
	stream->next_offset = offset / stream->lane->alignment * stream->lane->alignment;
	stream->ahead_end = stream->end;
	stream->count = stream->scout = 0;
	fill_queue(stream, stream->lane->limit);
	return 0;
}

int ring_stream_read(struct ring_stream *stream, struct ring_reading *reading,
		     struct ring_piece *pieces, size_t count, uint64_t keep)
{
	struct ring_buffer *buffer;
	unsigned at = 0; /* the block to be looked at, counted from the oldest */
	int ret = stream->lane ? 0 : begin(stream, reading);

	if (ret)
		return ret;
	stream->reading = reading;
	stream->pieces = pieces;
	stream->count = count;
	stream->piece = stream->scout = 0;
	go_to(stream, pieces[0].offset);
	start_preparer(&stream->preparer, reading, pieces, count);
	while (!ret && stream->piece < count) {
		fill_queue(stream, stream->lane->limit);
		if (at == stream->queued) {
			if (!at)
				break;  /* pieces without bytes */
			let_go(stream); /* what was to be kept has taken all buffers */
			at--;
			continue;
		}
		buffer = buffer_at(stream, at);
		ret = ring_lane_finish(stream->lane, buffer, reading->error);
		/* The buffer kept back goes on its way before this one is looked at. */
		fill_queue(stream, stream->lane->shape.depth);
		if (!ret)
			ret = consume(stream, buffer);
		if (!ret && !at && buffer_end(buffer) <= keep)
			let_go(stream);
		else
			at++;
	}
	stop_preparer(&stream->preparer);
	if (!ret)
		fill_queue(stream, stream->lane->shape.depth);
	stream->reading = NULL;
	stream->pieces = NULL;
	return ret;
}

void ring_stream_stop(struct ring_stream *stream)
{
	struct ring_lane *lane = stream->lane;

	if (!lane)
		return;
	ring_lane_drain(lane, NULL);
	while (stream->queued)
		let_go(stream);
	ring_lane_detach(lane);
	free(stream->fifo);
	stream->fifo = NULL;
	stream->lane = NULL;
}

int ring_stream_open(struct ring_stream **out, const struct ring_input *input, uint64_t end,
		     struct base_error *error)
{
	struct ring_stream *stream = calloc(1, sizeof(*stream));

	*out = stream;
	if (!stream)
		return base_no_memory(error, "reading ahead", sizeof(*stream));
	stream->input = input;
	stream->end = input->base + MIN(end, input->bytes);
	base_crew_init(&stream->crew);
	return 0;
}

void ring_stream_free(struct ring_stream *stream)
{
	if (!stream)
		return;
	ring_stream_stop(stream);
	base_crew_dismiss(&stream->crew);
	free(stream);
}
