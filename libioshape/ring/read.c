/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Reading pieces of a file into memory. Stretches that lie in the page cache are copied out by
 * several threads; the others stream past it through the lane, in big blocks, in order.
 */
#define _GNU_SOURCE
#include "ring/lane.h"

#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#ifndef __NR_cachestat
#define __NR_cachestat 451 /* Linux 6.5; the same number on every architecture */
#endif

/* The unit in which we decide whether a stretch is cached. */
#define STRETCH_BYTES (64 * MIB)

/* Pieces with no more than this between them are read in one go. */
#define GAP_BYTES (256 * KIB)

/* What one pread brings: it stays in the second-level cache until its checksum is taken. */
#define SIP_BYTES (256 * KIB)

/* Below this, threads are not worth starting. */
#define PARALLEL_BYTES (8 * MIB)

#define MAX_THREADS 64u

struct reading {
	struct ring_lane *lane;
	const struct ring_input *input;
	ioshape_progress_fn progress;
	void *progress_user;
	uint64_t total;
	_Atomic uint64_t done;
	struct base_error *error;
};

static int tell(struct reading *reading)
{
	if (reading->progress && reading->progress(reading->progress_user, IOSHAPE_PHASE_READ,
						   atomic_load(&reading->done), reading->total))
		return base_fail(reading->error, -ECANCELED,
				 "reading %s was stopped by its progress callback",
				 reading->input->path);
	return 0;
}

/* ---- Is it cached? --------------------------------------------------------------------------- */

struct cachestat_range {
	uint64_t offset, bytes;
};

struct cachestat_result {
	uint64_t cached, dirty, writeback, evicted, recently_evicted;
};

/* Older kernels: asks about a page here and there. */
static bool is_sampled_cached(int fd, uint64_t offset, uint64_t bytes)
{
	const uint64_t page = (uint64_t)sysconf(_SC_PAGESIZE), samples = 16;
	uint64_t begin = offset / page * page, span = offset + bytes - begin;
	unsigned char state;
	unsigned hits = 0;
	uint8_t *view;

	view = mmap(NULL, span, PROT_READ, MAP_SHARED, fd, (off_t)begin);
	if (view == MAP_FAILED)
		return true; /* nothing to map on some filesystems: through the cache is always
				right */
	for (uint64_t i = 0; i < samples; i++) {
		if (!mincore(view + span * i / samples / page * page, page, &state))
			hits += state & 1;
	}
	munmap(view, span);
	return hits > samples / 2;
}

static bool is_cached(int fd, uint64_t offset, uint64_t bytes)
{
	struct cachestat_range range = { offset, bytes };
	struct cachestat_result result;

	if (syscall(__NR_cachestat, fd, &range, &result, 0))
		return is_sampled_cached(fd, offset, bytes);
	return result.cached * (uint64_t)sysconf(_SC_PAGESIZE) > bytes / 2;
}

/* ---- Through the page cache ------------------------------------------------------------------ */

struct crew {
	struct reading *reading;
	struct ring_piece *pieces;
	size_t count;
	size_t batch;        /* pieces taken at a time */
	_Atomic size_t next; /* piece that nobody has taken yet */
	_Atomic bool stop;
};

struct hand {
	struct crew *crew;
	pthread_t thread;
	uint8_t *scratch; /* for pieces that are only verified; made at need */
	struct base_error error;
};

static int read_piece(struct hand *hand, struct ring_piece *piece)
{
	const struct ring_input *input = hand->crew->reading->input;
	uint8_t *to = piece->into;
	uint64_t done, sip;
	int ret = 0;

	if (!to && !hand->scratch) {
		hand->scratch = malloc(SIP_BYTES);
		if (!hand->scratch)
			return base_no_memory(&hand->error, "verifying", SIP_BYTES);
	}
	for (done = 0; !ret && done < piece->bytes; done += sip) {
		sip = MIN(piece->bytes - done, SIP_BYTES);
		to = piece->into ? (uint8_t *)piece->into + done : hand->scratch;
		ret = ring_input_get(input, piece->offset + done, to, sip, &hand->error);
		if (!ret && piece->want_crc)
			piece->crc = base_crc32(piece->crc, to, sip);
	}
	atomic_fetch_add(&hand->crew->reading->done, piece->bytes);
	return ret;
}

/* Works until nothing is left. Only the caller's own thread may speak to the progress callback. */
static void work(struct hand *hand, bool speaks)
{
	struct crew *crew = hand->crew;
	size_t begin, end;
	int ret = 0;

	while (!ret && !atomic_load(&crew->stop)) {
		begin = atomic_fetch_add(&crew->next, crew->batch);
		if (begin >= crew->count)
			break;
		end = MIN(begin + crew->batch, crew->count);
		for (size_t i = begin; !ret && i < end; i++)
			ret = read_piece(hand, &crew->pieces[i]);
		if (!ret && speaks)
			ret = tell(crew->reading);
	}
	if (ret)
		atomic_store(&crew->stop, true);
}

static void *work_in_thread(void *argument)
{
	work(argument, false);
	return NULL;
}

static unsigned start_hands(struct hand *hands, unsigned wanted)
{
	sigset_t all, before;
	unsigned started = 0;

	sigfillset(&all);
	pthread_sigmask(SIG_SETMASK, &all, &before);
	while (started < wanted &&
	       !pthread_create(&hands[started].thread, NULL, work_in_thread, &hands[started]))
		started++;
	pthread_sigmask(SIG_SETMASK, &before, NULL);
	return started;
}

static int read_cached(struct reading *reading, struct ring_piece *pieces, size_t count,
		       uint64_t bytes)
{
	struct crew crew = { .reading = reading, .pieces = pieces, .count = count };
	unsigned wanted = bytes < PARALLEL_BYTES ? 1 :
						   MIN(reading->lane->config.threads, MAX_THREADS);
	struct hand *hands = calloc(wanted, sizeof(*hands));
	unsigned started;
	int ret = 0;

	if (!hands)
		return base_no_memory(reading->error, "reading threads", wanted * sizeof(*hands));
	/* Small pieces in batches of about a check block, large ones singly. */
	crew.batch = MAX(1, MIN(64, count * MIB / MAX(bytes, 1)));
	for (unsigned i = 0; i < wanted; i++)
		hands[i].crew = &crew;
	started = start_hands(hands + 1, wanted - 1);
	work(&hands[0], true);
	for (unsigned i = 1; i <= started; i++)
		pthread_join(hands[i].thread, NULL);
	ret = reading->error ? reading->error->code : 0;
	for (unsigned i = 0; i < wanted; i++) {
		if (hands[i].error.code && !ret) {
			ret = hands[i].error.code;
			if (reading->error)
				*reading->error = hands[i].error;
		}
		free(hands[i].scratch);
	}
	free(hands);
	return ret;
}

/* ---- Past the page cache --------------------------------------------------------------------- */

/* One sequential stretch of blocks, and the pieces that its bytes belong to. */
struct stream {
	struct reading *reading;
	struct ring_piece *pieces;
	size_t count;
	size_t piece;            /* the first that is not complete */
	size_t scout;            /* the first that no request covers yet */
	uint64_t next_offset;    /* where the next request begins, if it continues the last */
	struct ring_slot **fifo; /* submitted and not yet consumed, oldest at `head` */
	unsigned head, queued;
};

static uint64_t piece_end(const struct ring_piece *piece)
{
	return piece->offset + piece->bytes;
}

/*
 * The next request: as much of the coming pieces as a block holds, from an aligned offset, reading
 * over small gaps. False if all is under way.
 */
static bool next_request(struct stream *stream, uint64_t *offset, size_t *bytes)
{
	uint64_t block = stream->reading->lane->config.block_bytes;
	uint64_t unit = stream->reading->lane->alignment, begin, end;

	while (stream->scout < stream->count &&
	       (!stream->pieces[stream->scout].bytes ||
		piece_end(&stream->pieces[stream->scout]) <= stream->next_offset))
		stream->scout++;
	if (stream->scout == stream->count)
		return false;
	begin = stream->pieces[stream->scout].offset / unit * unit;
	begin = MAX(begin, stream->next_offset);
	end = begin;
	for (size_t i = stream->scout; i < stream->count && end < begin + block; i++) {
		if (stream->pieces[i].offset > end + GAP_BYTES && end > begin)
			break;
		end = MAX(end, piece_end(&stream->pieces[i]));
	}
	*offset = begin;
	*bytes = MIN(base_round_up(end, unit) - begin, block);
	stream->next_offset = begin + *bytes;
	return true;
}

static void consume_piece(struct ring_piece *piece, const uint8_t *data, uint64_t offset,
			  uint64_t begin, uint64_t end)
{
	const uint8_t *from = data + (begin - offset);
	size_t bytes = end - begin;

	if (!piece->into)
		piece->crc = base_crc32(piece->crc, from, bytes);
	else if (piece->want_crc)
		piece->crc = base_copy_crc32(
			piece->crc, (uint8_t *)piece->into + (begin - piece->offset), from, bytes);
	else
		memcpy((uint8_t *)piece->into + (begin - piece->offset), from, bytes);
}

/* Hands the bytes of one block to the pieces they belong to. */
static int consume(struct stream *stream, struct ring_slot *slot)
{
	struct reading *reading = stream->reading;
	uint64_t offset = slot->offset, end = offset + slot->moved, from, to;

	while (stream->piece < stream->count) {
		struct ring_piece *piece = &stream->pieces[stream->piece];

		from = MAX(piece->offset, offset);
		to = MIN(piece_end(piece), end);
		if (from < to) {
			consume_piece(piece, slot->slab, offset, from, to);
			atomic_fetch_add(&reading->done, to - from);
		}
		if (piece_end(piece) > end) {
			if (slot->moved < slot->bytes && piece->offset < offset + slot->bytes)
				return base_fail(reading->error, IOSHAPE_E_DAMAGED,
						 "%s ends at offset %llu, before what was to be "
						 "read; it was "
						 "cut short while open",
						 reading->input->path, (unsigned long long)end);
			break;
		}
		stream->piece++;
	}
	return tell(reading);
}

static int fill_queue(struct stream *stream)
{
	struct ring_lane *lane = stream->reading->lane;
	struct ring_slot *slot;
	int ret;

	while (stream->queued < lane->config.depth) {
		slot = ring_lane_free_slot(lane);
		if (!slot)
			return 0;
		if (!next_request(stream, &slot->offset, &slot->bytes)) {
			ring_lane_give_back(lane, slot);
			return 0;
		}
		stream->fifo[(stream->head + stream->queued++) % lane->config.depth] = slot;
		ret = ring_lane_submit(lane, slot, stream->reading->error);
		if (ret)
			return ret;
	}
	return 0;
}

static int run_stream(struct stream *stream)
{
	struct ring_lane *lane = stream->reading->lane;
	struct ring_slot *slot;
	int ret;

	while (!(ret = fill_queue(stream)) && stream->queued) {
		slot = stream->fifo[stream->head];
		ret = ring_lane_finish(lane, slot, stream->reading->error);
		if (!ret)
			ret = consume(stream, slot);
		if (ret)
			break;
		stream->head = (stream->head + 1) % lane->config.depth;
		stream->queued--;
		ring_lane_give_back(lane, slot);
	}
	ring_lane_drain(lane, NULL);
	for (unsigned i = 0; i < stream->queued; i++)
		ring_lane_give_back(lane, stream->fifo[(stream->head + i) % lane->config.depth]);
	return ret;
}

static int read_direct(struct reading *reading, struct ring_piece *pieces, size_t count)
{
	struct stream stream = { .reading = reading, .pieces = pieces, .count = count };
	struct ring_lane *lane = reading->lane;
	int ret = ring_lane_start(lane, reading->error);

	if (ret)
		return ret;
	stream.fifo = calloc(lane->config.depth, sizeof(struct ring_slot *));
	if (!stream.fifo)
		return base_no_memory(reading->error, "a read queue",
				      lane->config.depth * sizeof(struct ring_slot *));
	ring_lane_attach(lane, reading->input->direct_fd, reading->input->path, true, NULL);
	lane->direct = true;
	lane->alignment = ring_lane_direct_alignment(lane, &reading->input->fs);
	lane->file_bytes = reading->input->bytes;
	ret = run_stream(&stream);
	ring_lane_detach(lane);
	free(stream.fifo);
	return ret;
}

/* ---- Which way ------------------------------------------------------------------------------- */

/* Pieces from `first` on that lie within a stretch; at least one. */
static size_t stretch(const struct ring_piece *pieces, size_t count, size_t first, uint64_t *bytes)
{
	uint64_t limit = pieces[first].offset + STRETCH_BYTES;
	size_t i;

	*bytes = 0;
	for (i = first; i < count && (i == first || piece_end(&pieces[i]) <= limit); i++)
		*bytes += pieces[i].bytes;
	return i;
}

static bool goes_cached(const struct ring_lane *lane, const struct ring_input *input,
			const struct ring_piece *pieces, size_t first, size_t end)
{
	uint64_t offset = pieces[first].offset;

	return input->direct_fd < 0 || !ring_lane_direct_alignment(lane, &input->fs) ||
	       is_cached(input->fd, offset, piece_end(&pieces[end - 1]) - offset);
}

int ring_read(struct ring_lane *lane, const struct ring_input *input, struct ring_piece *pieces,
	      size_t count, ioshape_progress_fn progress, void *progress_user,
	      struct base_error *error)
{
	struct reading reading = { lane, input, progress, progress_user, 0, 0, error };
	uint64_t bytes, run_bytes;
	size_t first, end, next;
	bool cached;
	int ret = 0;

	for (size_t i = 0; i < count; i++) {
		reading.total += pieces[i].bytes;
		pieces[i].crc = 0;
	}
	/* However little there is to read, and whoever reads it, the callback hears of it. */
	ret = tell(&reading);
	/* Neighbouring stretches that go the same way become one run. */
	for (first = 0; !ret && first < count; first = end) {
		end = stretch(pieces, count, first, &run_bytes);
		cached = goes_cached(lane, input, pieces, first, end);
		while (end < count) {
			next = stretch(pieces, count, end, &bytes);
			if (goes_cached(lane, input, pieces, end, next) != cached)
				break;
			end = next;
			run_bytes += bytes;
		}
		if (cached)
			ret = read_cached(&reading, pieces + first, end - first, run_bytes);
		else
			ret = read_direct(&reading, pieces + first, end - first);
	}
	return ret;
}
