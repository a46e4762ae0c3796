/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Reading pieces of a file into memory. Stretches that lie in the page cache, or belong there
 * because others will ask for them, are copied out by several threads; the others stream past it
 * through the lane, in big blocks, in order.
 */
#define _GNU_SOURCE
#include "ring/read.h"

#include <errno.h>
#include <stdlib.h>

/*
 * A reader that reads onward may begin so much before the end of its last read: readers verify
 * whole blocks, of a megabyte each, also where they want a part of one. At most this share of the
 * buffers is kept for it.
 */
#define LOOK_BACK_BYTES (1 * MIB)
#define LOOK_BACK_SHARE 4

/* Reads up to this length are left to the page cache until they turn out to follow each other. */
#define SMALL_BYTES (256 * KIB)

/* ---- Which way ------------------------------------------------------------------------------- */

/* Pieces from `first` on that lie within a stretch; at least one. */
static size_t stretch(const struct ring_piece *pieces, size_t count, size_t first, uint64_t *bytes)
{
	uint64_t limit = pieces[first].offset + RING_STRETCH_BYTES;
	size_t i;

	*bytes = 0;
	for (i = first; i < count && (i == first || ring_piece_end(&pieces[i]) <= limit); i++)
		*bytes += pieces[i].bytes;
	return i;
}

/*
 * Where little is wanted of what will be read ahead, all of that counts: the kernel reads ahead,
 * too, but not as far as we do. It is asked once for many small reads.
 */
static bool is_cached_onward(struct ring_stream *stream, uint64_t offset)
{
	uint64_t end = MIN(offset + RING_STRETCH_BYTES, stream->ahead_end);

	if (offset >= stream->cached_begin && offset < stream->cached_end)
		return true;
	if (!ring_is_cached(stream->input->fd, offset, end - offset))
		return false;
	stream->cached_begin = offset;
	stream->cached_end = end;
	return true;
}

static bool goes_cached(struct ring_stream *stream, const struct ring_reading *reading,
			const struct ring_piece *pieces, size_t first, size_t last)
{
	uint64_t offset = pieces[first].offset, end = ring_piece_end(&pieces[last - 1]);

	if (ring_stream_covers(stream, offset))
		return false;
	if (reading->all_cached)
		return true;
	if (end - offset < SMALL_BYTES && end < stream->ahead_end)
		return is_cached_onward(stream, offset);
	return ring_is_cached(stream->input->fd, offset, end - offset);
}

/* Neighbouring stretches that go the same way become one run. */
static int read_stretches(struct ring_stream *stream, struct ring_reading *reading,
			  struct ring_piece *pieces, size_t count, uint64_t keep)
{
	uint64_t bytes, run_bytes;
	size_t first, end, next;
	bool cached;
	int ret = 0;

	for (first = 0; !ret && first < count; first = end) {
		end = stretch(pieces, count, first, &run_bytes);
		cached = goes_cached(stream, reading, pieces, first, end);
		while (end < count) {
			next = stretch(pieces, count, end, &bytes);
			if (goes_cached(stream, reading, pieces, end, next) != cached)
				break;
			end = next;
			run_bytes += bytes;
		}
		if (cached)
			ret = ring_read_cached(stream, reading, pieces + first, end - first,
					       run_bytes);
		else
			ret = ring_stream_read(stream, reading, pieces + first, end - first, keep);
	}
	return ret;
}

/* To read so much through the page cache costs a lone process tens of milliseconds at most. */
#define SMALL_INPUT_BYTES (256 * MIB)

/*
 * Most of a small file: other processes may load it at the same time. Of a part of a file the page
 * cache would read more than is wanted. Through FUSE it is filled too slowly to do so for others
 * who may never come.
 */
static bool is_most_of_a_small_one(const struct ring_reading *reading)
{
	const struct ring_input *input = reading->input;

	return input->may_share && input->bytes <= SMALL_INPUT_BYTES &&
	       input->fs.magic != FS_FUSE_MAGIC && reading->total > input->bytes / 2;
}

static bool is_all_cached(const struct ring_reading *reading)
{
	const struct ring_input *input = reading->input;

	return input->shared || input->direct_fd < 0 || is_most_of_a_small_one(reading) ||
	       !ring_lane_direct_alignment(reading->lane, &input->fs);
}

/*
 * However little there is to read, and whoever reads it, the callback hears of it. Offsets become
 * those of the file, until finish().
 */
static int begin(struct ring_reading *reading, struct ring_piece *pieces, size_t count)
{
	const struct ring_input *input = reading->input;

	for (size_t i = 0; i < count; i++) {
		reading->total += pieces[i].bytes;
		pieces[i].crc = 0;
		pieces[i].offset += input->base;
	}
	reading->all_cached = is_all_cached(reading);
	/* Behind a part of a file other bytes follow. */
	if (count && ring_piece_end(&pieces[count - 1]) > input->base + input->bytes)
		return ring_cut_short(input, input->base + input->bytes, reading->error);
	return ring_tell(reading);
}

static void finish(const struct ring_reading *reading, struct ring_piece *pieces, size_t count)
{
	for (size_t i = 0; i < count; i++)
		pieces[i].offset -= reading->input->base;
}

int ring_read(struct ring_lane *lane, const struct ring_input *input, struct ring_piece *pieces,
	      size_t count, ioshape_progress_fn progress, void *progress_user,
	      struct base_error *error)
{
	struct ring_reading reading = {
		.lane = lane,
		.input = input,
		.progress = progress,
		.progress_user = progress_user,
		.error = error,
	};
	struct ring_stream stream = { .input = input };
	int ret;

	ret = ring_lane_shape_to_read(lane, input, error);
	if (ret)
		return ret;
	base_crew_init(&stream.crew);
	ret = begin(&reading, pieces, count);
	if (!ret)
		ret = read_stretches(&stream, &reading, pieces, count, UINT64_MAX);
	ring_stream_stop(&stream);
	base_crew_dismiss(&stream.crew);
	finish(&reading, pieces, count);
	return ret;
}

/* ---- Onward ---------------------------------------------------------------------------------- */

static bool continues(const struct ring_run *run, uint64_t begin)
{
	return run->bytes && begin <= run->end + RING_GAP_BYTES &&
	       begin + LOOK_BACK_BYTES >= run->end;
}

/* Adds a call to the run, or begins another. What was read in the run before it. */
static uint64_t add_to(struct ring_run *run, bool goes_on, uint64_t begin, uint64_t end)
{
	uint64_t before = goes_on ? run->bytes : 0;

	run->bytes = before + (goes_on ? end - MIN(MAX(begin, run->end), end) : end - begin);
	run->end = goes_on ? MAX(run->end, end) : end;
	return before;
}

/*
 * Whether a call is small and somewhere else: through the page cache with it, whatever is there,
 * and without a word about it to the stream. Otherwise *before is how far its run has come.
 */
static bool is_aside(struct ring_stream *stream, uint64_t block, uint64_t begin, uint64_t end,
		     uint64_t *before)
{
	bool covered = ring_stream_covers(stream, begin);
	bool goes_on = covered || continues(&stream->run, begin);
	uint64_t small = stream->lane ? block : SMALL_BYTES;
	/* What is no longer kept of the past is no reason to turn back. */
	bool elsewhere = !covered && (!goes_on || begin < stream->run.end);

	if (stream->lane && elsewhere && end - begin < small) {
		if (add_to(&stream->aside, continues(&stream->aside, begin), begin, end) < block)
			return true;
		/* It has become what is read now, and the stream is what was read before. */
		stream->run = stream->aside;
		stream->aside.bytes = 0;
		goes_on = true;
	}
	*before = add_to(&stream->run, goes_on, begin, end);
	return !stream->lane && end - begin < small && *before < block / 8;
}

/*
 * How far to read ahead: as far as the lane allows for who has come a long way, not at all for who
 * has just jumped here. A reader that jumps about reads little that it does not want.
 */
static uint64_t ahead_of(const struct ring_stream *stream, const struct ring_lane *lane,
			 uint64_t before, uint64_t begin, uint64_t end)
{
	uint64_t block = lane->shape.block_bytes, all = stream->end - stream->input->base;
	uint64_t bytes = MIN(before, all / 8) * 4 + (end - begin) / 8;

	if (end >= stream->end || bytes < block / 2)
		return 0;
	if (bytes >= block * lane->shape.depth || bytes >= stream->end - end)
		return stream->end;
	return end + bytes;
}

static int read_onward(struct ring_stream *stream, struct ring_reading *reading,
		       struct ring_piece *pieces, size_t count)
{
	const struct ring_lane *lane = reading->lane;
	uint64_t look_back = lane->shape.block_bytes * lane->shape.depth / LOOK_BACK_SHARE;
	uint64_t offset = pieces[0].offset, end = ring_piece_end(&pieces[count - 1]), before = 0;

	stream->ahead_end = 0;
	if (is_aside(stream, lane->shape.block_bytes, offset, end, &before))
		return ring_read_cached(stream, reading, pieces, count, reading->total);
	stream->ahead_end = ahead_of(stream, lane, before, offset, end);
	look_back = MIN(end, MIN(look_back, LOOK_BACK_BYTES));
	return read_stretches(stream, reading, pieces, count, end - look_back);
}

int ring_read_onward(struct ring_stream *stream, struct ring_lane *lane, struct ring_piece *pieces,
		     size_t count, ioshape_progress_fn progress, void *progress_user,
		     struct base_error *error)
{
	struct ring_reading reading = {
		.lane = lane,
		.input = stream->input,
		.progress = progress,
		.progress_user = progress_user,
		.error = error,
	};
	int ret = stream->lane ? 0 : ring_lane_shape_to_read(lane, stream->input, error);

	if (ret)
		return ret;
	ret = begin(&reading, pieces, count);
	if (!ret && reading.total)
		ret = read_onward(stream, &reading, pieces, count);
	finish(&reading, pieces, count);
	return ret;
}

void ring_stream_expect(struct ring_stream *stream, struct ring_lane *lane, uint64_t offset)
{
	const uint64_t begin = stream->input->base + offset;
	struct ring_reading reading = { .lane = lane, .input = stream->input };

	if (begin >= stream->end || ring_lane_shape_to_read(lane, stream->input, NULL))
		return;
	reading.total = stream->end - begin; /* all of it is expected */
	if (is_all_cached(&reading))
		ring_ask_ahead(stream, begin);
	else if (!ring_is_cached(stream->input->fd, begin,
				 MIN(RING_STRETCH_BYTES, stream->end - begin)))
		ring_stream_begin(stream, &reading, begin);
}

bool ring_stream_is_idle(const struct ring_stream *stream)
{
	return !stream->lane ||
	       stream->next_offset <= base_round_up(stream->run.end, stream->lane->alignment);
}
