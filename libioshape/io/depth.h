/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Inside the ring floor: how many requests of a file are in flight. Pure: times of requests in,
 * whether the next request may leave out. No clock, no I/O, no allocation.
 *
 * The controller is that of a delay-based congestion control: TCP Vegas (Brakmo, O'Malley and
 * Peterson, 1994) and LEDBAT (RFC 6817). The least time that requests take is the baseline: then
 * nothing waits. While requests take little longer, the limit grows: it doubles at the beginning,
 * as in slow start, and rises by one later. When requests take longer than the latency bound,
 * they wait in a queue, ours or that of another job, and the limit is multiplied by bound ÷
 * latency.
 *
 * Each storage target has the limit for itself. All targets of a file have the same limit, because
 * a file has too few requests for a target to tell them apart.
 *
 * Bytes are bytes, times are nanoseconds of any one clock, limits are counted in requests.
 */
#ifndef IO_DEPTH_H
#define IO_DEPTH_H

#include <stdbool.h>
#include <stdint.h>

/* Targets whose requests are counted apart; with more, some share a count. */
#define IO_MOST_TARGETS 64u

/* How a file is to be written. */
struct io_depth_options {
	uint64_t request_bytes; /* of a usual request */
	uint32_t targets;       /* that the file lies on; 1 if that is not known */
	uint64_t stripe_bytes;  /* with more than one target: what lies on one in a row */
	uint32_t most;          /* requests in flight for one target */
	bool fixed;             /* always `most`: the user has said so */
	bool pauses;            /* all in flight must come back before the next ones leave */
	bool shared;            /* others may use it, and where they meet is not known */
};

struct io_depth {
	struct io_depth_options options;
	uint32_t limit; /* requests in flight for each target */

	/* Of each target: bytes in flight; and bytes sent since nothing was, for pauses. */
	uint64_t in_flight[IO_MOST_TARGETS], sent[IO_MOST_TARGETS];

	/* The baseline: what requests took when nothing waited; 0: not known yet. */
	uint64_t least_ns;
	bool starting; /* slow start: no request has waited so far */
	/* The round: answers to requests that were sent under this limit. */
	uint64_t since_ns, latency_ns; /* the latter of all of them together */
	uint32_t answers;
	bool raised;   /* the limit was raised for this round */
	uint32_t calm; /* rounds since the limit changed */
	uint32_t wait; /* rounds before it is raised again */

	/* For the report. */
};

void io_depth_begin(struct io_depth *depth, const struct io_depth_options *options);

/* Returns whether a request at this offset of the file may leave. */
bool io_depth_allows(const struct io_depth *depth, uint64_t offset);

void io_depth_sent(struct io_depth *depth, uint64_t offset, uint64_t bytes);

/*
 * Takes note of an answer. `idle`: no request was ready to follow it, or the lane was not looking
 * when it came. Such times say nothing about the limit.
 */
void io_depth_answered(struct io_depth *depth, uint64_t offset, uint64_t bytes, uint64_t sent_ns,
		       uint64_t now_ns, bool idle);

#endif
