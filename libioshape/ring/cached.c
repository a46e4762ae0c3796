/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Reading through the page cache, by several threads. What is not there the kernel is asked for,
 * far ahead of them: it reads once what several processes want.
 */
#define _GNU_SOURCE
#include "ring/read.h"

#include <fcntl.h>
#include <pthread.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#ifndef __NR_cachestat
#define __NR_cachestat 451 /* Linux 6.5; the same number on every architecture */
#endif

/* What one pread brings: it stays in the second-level cache until its checksum is taken. */
#define SIP_BYTES (256 * KIB)

/* Below this, threads are not worth starting. */
#define PARALLEL_BYTES (8 * MIB)

/* The kernel is asked for what lies so far ahead of those who copy. */
#define AHEAD_BYTES (64 * MIB)
/*
 * Where the kernel reads so far ahead by itself, that is enough. It does so in large pieces of
 * memory, while what it is asked for comes in single pages: to copy those costs half as much again.
 */
#define KERNEL_AHEAD_BYTES (4 * MIB)
/* One readahead(2) brings no more than the device takes in a request, which is seldom less. */
#define ASK_BYTES (512 * KIB)

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

/* False where the kernel does not tell. */
static bool count_cached(int fd, uint64_t offset, uint64_t bytes, uint64_t *cached)
{
	struct cachestat_range range = { offset, bytes };
	struct cachestat_result result;

	if (syscall(__NR_cachestat, fd, &range, &result, 0))
		return false;
	*cached = result.cached * (uint64_t)sysconf(_SC_PAGESIZE);
	return true;
}

bool ring_is_cached(int fd, uint64_t offset, uint64_t bytes)
{
	uint64_t cached;

	if (!count_cached(fd, offset, bytes, &cached))
		return is_sampled_cached(fd, offset, bytes);
	return cached > bytes / 2;
}

/* ---- Ahead ----------------------------------------------------------------------------------- */

/*
 * A daemon in user space reads ahead by what it sees of the kernel's own reading, which is to be
 * one read after the other: asked ahead, or by several threads, ceph-fuse takes twice as long.
 */
static bool is_read_in_order(const struct ring_input *input)
{
	return input->fs.magic == FS_FUSE_MAGIC;
}

static bool reads_ahead_itself(struct ring_stream *stream)
{
	const struct ring_input *input = stream->input;

	if (!stream->kernel_ahead_known)
		stream->kernel_ahead = is_read_in_order(input) ||
				       fs_read_ahead_of(input->fd) >= KERNEL_AHEAD_BYTES;
	stream->kernel_ahead_known = true;
	return stream->kernel_ahead;
}

/* That something cannot be asked for is nobody's failure: it is read when it is copied. */
static void ask_for(struct ring_stream *stream, uint64_t begin, uint64_t end)
{
	const struct ring_input *input = stream->input;
	uint64_t step, stretch, cached;

	for (begin = MAX(begin, stream->asked_end); begin < end; begin += step) {
		step = MIN(end - begin, ASK_BYTES);
		if (begin >= stream->looked_end) {
			stretch = MIN(RING_STRETCH_BYTES, input->base + input->bytes - begin);
			stream->looked_end = begin + stretch;
			stream->all_there = count_cached(input->fd, begin, stretch, &cached) &&
					    cached >= stretch;
		}
		if (!stream->all_there && !reads_ahead_itself(stream))
			readahead(input->fd, (off_t)begin, step);
	}
	stream->asked_end = MAX(stream->asked_end, end);
}

void ring_ask_ahead(struct ring_stream *stream, uint64_t offset)
{
	ask_for(stream, offset, MIN(offset + AHEAD_BYTES, stream->end));
}

/* ---- Through the page cache ------------------------------------------------------------------ */

struct job {
	struct ring_stream *stream;
	bool asks;              /* it is worth while */
	pthread_mutex_t asking; /* for the stream, and for: */
	size_t asked;           /* pieces that the kernel has been asked for */
	struct ring_reading *reading;
	struct ring_piece *pieces;
	size_t count;
	size_t batch;        /* pieces taken at a time */
	_Atomic size_t next; /* piece that nobody has taken yet */
	_Atomic bool stop;
	struct hand *hands;    /* the caller's own first */
	_Atomic unsigned used; /* of them */
};

/* Who reads. */
struct hand {
	struct job *job;
	uint8_t *scratch; /* for pieces that are only verified; made at need */
	struct base_error error;
};

static int read_piece(struct hand *hand, struct ring_piece *piece)
{
	const struct ring_input *input = hand->job->reading->input;
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
		if (piece->into)
			base_fresh_prepare(hand->job->reading->lane->fresh, to, sip);
		ret = ring_get_at(input, piece->offset + done, to, sip, &hand->error);
		if (!ret && piece->want_crc)
			piece->crc = base_crc32(piece->crc, to, sip);
	}
	atomic_fetch_add(&hand->job->reading->done, piece->bytes);
	return ret;
}

/* Asks for pieces up to so far ahead of the one that is copied next, and then for what follows. */
static void read_ahead(struct job *job, uint64_t from)
{
	/* Not a little at each call. */
	const uint64_t limit = (from + AHEAD_BYTES) / ASK_BYTES * ASK_BYTES;
	const struct ring_piece *piece;
	uint64_t begin, end;

	while (job->asked < job->count && job->pieces[job->asked].offset < limit) {
		begin = end = job->pieces[job->asked].offset;
		for (; job->asked < job->count && end - begin < ASK_BYTES; job->asked++) {
			piece = &job->pieces[job->asked];
			if (piece->offset > end + RING_GAP_BYTES)
				break;
			end = MAX(end, ring_piece_end(piece));
		}
		ask_for(job->stream, begin, end);
	}
	if (job->asked == job->count)
		ask_for(job->stream, ring_piece_end(&job->pieces[job->count - 1]),
			MIN(limit, job->stream->ahead_end));
}

/* Works until nothing is left. Only the caller's own thread may speak to the progress callback. */
static void work(struct hand *hand, bool speaks)
{
	struct job *job = hand->job;
	size_t begin, end;
	int ret = 0;

	while (!ret && !atomic_load(&job->stop)) {
		begin = atomic_fetch_add(&job->next, job->batch);
		if (begin >= job->count)
			break;
		end = MIN(begin + job->batch, job->count);
		/* One asks; the others find what it has asked for. */
		if (job->asks && !pthread_mutex_trylock(&job->asking)) {
			read_ahead(job, job->pieces[begin].offset);
			pthread_mutex_unlock(&job->asking);
		}
		for (size_t i = begin; !ret && i < end; i++)
			ret = read_piece(hand, &job->pieces[i]);
		if (!ret && speaks)
			ret = ring_tell(job->reading);
	}
	if (ret)
		atomic_store(&job->stop, true);
}

static void help(void *user)
{
	struct job *job = user;

	work(&job->hands[atomic_fetch_add(&job->used, 1)], false);
}

int ring_read_cached(struct ring_stream *stream, struct ring_reading *reading,
		     struct ring_piece *pieces, size_t count, uint64_t bytes)
{
	const bool is_alone = bytes < PARALLEL_BYTES || is_read_in_order(reading->input);
	const unsigned wanted = is_alone ? 1 :
					   MIN(reading->lane->config.threads, BASE_MOST_HELPERS);
	struct hand *hands = calloc(wanted, sizeof(*hands));
	struct job job = { .stream = stream,
			   .asking = PTHREAD_MUTEX_INITIALIZER,
			   .reading = reading,
			   .pieces = pieces,
			   .count = count,
			   .hands = hands,
			   .used = 1,
			   .asks = reading->all_cached &&
				   (bytes >= ASK_BYTES || stream->ahead_end) };
	int ret;

	if (!hands)
		return base_no_memory(reading->error, "reading threads", wanted * sizeof(*hands));
	/* Who has turned back asks again. */
	if (stream->asked_end > ring_piece_end(&pieces[count - 1]) + AHEAD_BYTES)
		stream->asked_end = stream->looked_end = 0;
	/* Small pieces in batches of about a check block, large ones singly. */
	job.batch = MAX(1, MIN(64, count * MIB / MAX(bytes, 1)));
	for (unsigned i = 0; i < wanted; i++)
		hands[i].job = &job;
	base_crew_begin(&stream->crew, wanted - 1, help, &job);
	work(&hands[0], true);
	base_crew_finish(&stream->crew);
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
	/* Of the last bytes, which another thread may have brought. */
	return ret ? ret : ring_tell(reading);
}
