/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Private to the I/O layer: the controller that limits how many requests of a file are in flight,
 * and the judgement whether storage or writer is faster. Pure: it takes the times of requests and
 * decides whether the next request may leave. No clock, no I/O, no allocation.
 *
 * It is a delay-based congestion control, like TCP Vegas (Brakmo, O'Malley and Peterson, 1994) and
 * LEDBAT (RFC 6817). The baseline is the least time that requests take, when none waits in a queue.
 * While requests take little longer, the limit grows: it doubles at the beginning, as in slow
 * start, and rises by one later. When requests take longer than the latency bound, they wait behind
 * others of this file or of another job. Then the limit is multiplied by bound ÷ latency.
 *
 * The limit applies to each storage target separately. All targets of a file have the same limit,
 * because a file sends too few requests to a target to measure each one.
 *
 * Bytes are bytes, times are nanoseconds of any one clock, limits are counted in requests.
 */
#ifndef IO_DEPTH_H
#define IO_DEPTH_H

#include <stdbool.h>
#include <stdint.h>

/* Targets whose requests are counted separately; beyond that, some targets share a count. */
#define IO_MOST_TARGETS 64u

/* The file's requests, as the controller needs to know them. */
struct io_depth_options {
	uint64_t request_bytes; /* bytes of a usual request */
	uint32_t targets;       /* targets that store the file; 1 if not known */
	uint64_t stripe_bytes;  /* with several targets: bytes of a stripe */
	uint32_t most;          /* most requests in flight for one target */
	bool fixed;             /* the user set the depth: the limit is always `most` */
	/* All requests in flight must complete before the next ones leave. */
	bool pauses;
	/* Other hosts may use the storage, and the common targets are not known. */
	bool shared;
};

/* The state of the controller for one file. */
struct io_depth {
	struct io_depth_options options;
	uint32_t limit; /* most requests in flight for each target */

	/* For each target: bytes in flight, and bytes sent since it was last idle (for pauses). */
	uint64_t in_flight[IO_MOST_TARGETS], sent[IO_MOST_TARGETS];

	/* The baseline: time of a request when none waits; 0: not known yet. */
	uint64_t least_ns;
	bool starting; /* slow start: no request has exceeded the bound so far */
	/* The current round: completions of requests that were sent under this limit. */
	/* Beginning of the limit; sum of the latencies in this round. */
	uint64_t since_ns, latency_ns;
	uint32_t answers;
	bool raised;     /* the limit was raised for this round */
	uint32_t steady; /* rounds since the limit changed */
	uint32_t wait;   /* rounds to wait before the limit is raised again */
};

/* Begins a file. */
void io_depth_begin(struct io_depth *depth, const struct io_depth_options *options);

/* Returns whether a request at this file offset may leave now. */
bool io_depth_allows(const struct io_depth *depth, uint64_t offset);

/* Records that a request left. */
void io_depth_sent(struct io_depth *depth, uint64_t offset, uint64_t bytes);

/*
 * Records a completion, and may change the limit. If `idle`, no request was ready to follow, or the
 * queue was busy elsewhere when it completed. Such latencies say nothing about the limit.
 */
void io_depth_answered(struct io_depth *depth, uint64_t offset, uint64_t bytes, uint64_t sent_ns,
		       uint64_t now_ns, bool idle);

/* The pace of the storage, compared with that of the writer that fills the blocks. Begins as zeros.
 */
struct io_pace {
	uint64_t bytes, ns; /* position and time of the last judgement */
	uint64_t waited_ns; /* time for which the writer waited for the storage since then */
	bool starved;       /* the storage completes blocks faster than the writer fills them */
};

/*
 * Judges the storage when the writer has sent `sent_bytes` in all. Decides each time that the
 * writer has sent as many bytes as can be in flight. The storage is faster if the writer hardly
 * waited for it.
 */
void io_pace_judge(struct io_pace *pace, uint64_t sent_bytes, uint64_t in_flight_bytes,
		   uint64_t now_ns);

#endif
