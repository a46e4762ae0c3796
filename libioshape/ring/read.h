/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Inside the ring floor: the two ways to read pieces of a file, through the page cache (cached.c)
 * and past it (stream.c). read.c chooses.
 *
 * In here offsets are those of the file, also where a part of it is read: by them direct I/O is
 * aligned, and the page cache asked.
 */
#ifndef RING_READ_H
#define RING_READ_H

#include "ring/lane.h"

#include <pthread.h>

/* The unit in which we decide whether a stretch is cached. */
#define RING_STRETCH_BYTES (64 * MIB)

/* Pieces with no more than this between them are read in one go. */
#define RING_GAP_BYTES (256 * KIB)

/* One call. */
struct ring_reading {
	struct ring_lane *lane;
	const struct ring_input *input;
	ioshape_progress_fn progress;
	void *progress_user;
	bool all_cached; /* all goes through the page cache, whether it lies there or not */
	uint64_t total;
	_Atomic uint64_t done;
	uint64_t tell_ns; /* the callback is not called again before then, but at the end */
	struct base_error *error;
};

/* Tells the progress callback now and then, and -ECANCELED if it wants to stop (input.c). */
int ring_tell(struct ring_reading *reading);

static inline uint64_t ring_piece_end(const struct ring_piece *piece)
{
	return piece->offset + piece->bytes;
}

/* ---- Through the page cache (cached.c) ------------------------------------------------------- */

/* The sentence for a file that ends there. IOSHAPE_E_DAMAGED. */
int ring_cut_short(const struct ring_input *input, uint64_t offset, struct base_error *error);

/* ring_input_get(), by the offset in the file. */
int ring_get_at(const struct ring_input *input, uint64_t offset, void *into, size_t bytes,
		struct base_error *error);

bool ring_is_cached(int fd, uint64_t offset, uint64_t bytes);

struct ring_stream;

/* Asks the kernel for what follows, as far as anybody is ahead. */
void ring_ask_ahead(struct ring_stream *stream, uint64_t offset);

/* `bytes` of all pieces together. What follows them is asked for, up to stream->ahead_end. */
int ring_read_cached(struct ring_stream *stream, struct ring_reading *reading,
		     struct ring_piece *pieces, size_t count, uint64_t bytes);

/* ---- Memory to read into (preparer.c) ---------------------------------------------------------
 */

/* While it runs it uses the pieces, but what is read of them. */
struct ring_preparer {
	pthread_t thread;
	bool runs;
	_Atomic bool stop;
	struct base_fresh *fresh;
	const struct ring_reading *reading;
	const struct ring_piece *pieces;
	size_t count;
};

/* ---- Past it (stream.c) ---------------------------------------------------------------------- */

/* Calls that continue each other. */
struct ring_run {
	uint64_t end;
	uint64_t bytes; /* of all of them */
};

/*
 * Blocks of one file on their way, in the order of the file, without gaps but where nobody wants to
 * read. First come the pieces of the call; what will probably be asked for next is sent for as
 * well, and waits in its buffer.
 */
struct ring_stream {
	const struct ring_input *input;
	uint64_t end; /* nothing is read ahead from here on */

	struct ring_lane *lane;    /* NULL while nothing is under way */
	struct ring_buffer **fifo; /* submitted and not yet let go, oldest at `head` */
	unsigned head, queued;
	uint64_t next_offset; /* where the next request begins, if it continues the last */
	uint64_t ahead_end;   /* how far this call may read ahead */
	uint64_t clear_end;   /* up to here we know that nothing is in the page cache */

	/* Of the call. */
	struct ring_reading *reading;
	struct ring_preparer preparer;
	struct ring_piece *pieces;
	size_t count;
	size_t piece; /* the first that is not complete */
	size_t scout; /* the first that no request covers yet */

	/* Found to be in the page cache. */
	uint64_t cached_begin, cached_end;

	/* Through the page cache: what the kernel has been asked for; up to where we have looked
	 * whether that is necessary, and what we have found there. */
	uint64_t asked_end, looked_end;
	bool all_there;
	bool kernel_ahead, kernel_ahead_known; /* the kernel need not be asked */
	struct base_crew crew;

	/* For read.c, to tell who reads onward from who jumps about. */
	struct ring_run run;   /* that the stream is for */
	struct ring_run aside; /* small reads elsewhere, meanwhile */
};

/* Whether the byte there is in memory or under way. */
bool ring_stream_covers(const struct ring_stream *stream, uint64_t offset);

/* Begins to read ahead from there. Takes reading->lane over, as below. */
int ring_stream_begin(struct ring_stream *stream, struct ring_reading *reading, uint64_t offset);

/*
 * Reads the pieces, some of which have bytes, and sends for what follows, up to stream->ahead_end.
 * Blocks that end behind `keep` stay in memory for the next call. Takes reading->lane over, until
 * ring_stream_stop().
 */
int ring_stream_read(struct ring_stream *stream, struct ring_reading *reading,
		     struct ring_piece *pieces, size_t count, uint64_t keep);

#endif
