/* SPDX-License-Identifier: Apache-2.0 */
/* Reading through the page cache, where what is wanted lies there: by several threads. */
#define _GNU_SOURCE
#include "ring/read.h"

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

#define MAX_THREADS 64u

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

bool ring_is_cached(int fd, uint64_t offset, uint64_t bytes)
{
	struct cachestat_range range = { offset, bytes };
	struct cachestat_result result;

	if (syscall(__NR_cachestat, fd, &range, &result, 0))
		return is_sampled_cached(fd, offset, bytes);
	return result.cached * (uint64_t)sysconf(_SC_PAGESIZE) > bytes / 2;
}

/* ---- Through the page cache ------------------------------------------------------------------ */

struct crew {
	struct ring_reading *reading;
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
		ret = ring_get_at(input, piece->offset + done, to, sip, &hand->error);
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
			ret = ring_tell(crew->reading);
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
	unsigned started = 0;

	while (started < wanted &&
	       !base_start_thread(&hands[started].thread, work_in_thread, &hands[started]))
		started++;
	return started;
}

int ring_read_cached(struct ring_reading *reading, struct ring_piece *pieces, size_t count,
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
