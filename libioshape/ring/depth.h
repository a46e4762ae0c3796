/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Inside the ring floor: how much of a file is in flight, by what its own requests tell. Pure:
 * times of requests in, whether the next one may leave out. No clock, no I/O, no allocation.
 *
 * A storage target is given a window: so many requests at a time. While a request takes little
 * longer than it ever did, nothing waits there, and the window grows. When requests take longer,
 * they wait: for each other, or for somebody else. Then the window shrinks, as long as that costs
 * no throughput. A window beyond that is kept only if it has been seen to pay, and only up to a few
 * times the least latency. When latency jumps although the window has not changed, somebody else
 * has come: the window is halved at once.
 *
 * All targets of a file have windows of one size, because a file of a few requests to each cannot
 * tell them apart. What is in flight is counted for each target.
 *
 * Bytes are bytes, times are nanoseconds of any one clock, windows are counted in requests.
 */
#ifndef RING_DEPTH_H
#define RING_DEPTH_H

#include <stdbool.h>
#include <stdint.h>

/* Targets that are counted each for itself; of more, some share a count. */
#define RING_MOST_TARGETS 64u

/* What one file has taught, for the next one on its mount. Zeros: nothing. */
struct ring_taught {
	uint64_t request_bytes; /* of what size the requests were; others teach nothing here */
	uint32_t window;        /* for each target */
	uint64_t least_ns;      /* that a request takes if nothing waits */
};

/* How a file is to be written. */
struct ring_depth_options {
	uint64_t request_bytes; /* of a usual request */
	uint32_t targets;       /* that the file lies on; 1 if that is not known */
	uint64_t stripe_bytes;  /* with more than one target: what lies on one in a row */
	uint32_t most;          /* requests in flight for one target */
	bool fixed;             /* always `most`: the user has said so */
	bool pauses;            /* each window is to come back before the next one leaves */
	bool shared;            /* others may use it, and where they meet is not known */
};

/* From then on the window was so large. */
#define RING_DEPTH_POINTS 32u
struct ring_depth_point {
	uint64_t at_ns; /* 0: from the beginning */
	uint32_t window;
};

struct ring_depth {
	struct ring_depth_options options;
	uint32_t window;
	uint64_t least_ns;    /* that rounds have taken on average, if nothing waits */
	uint64_t quickest_ns; /* of single answers */

	/* Of each target: bytes in flight; and bytes sent since nothing was, for pauses. */
	uint64_t flying[RING_MOST_TARGETS], sent[RING_MOST_TARGETS];

	/* The round: some requests that were answered while the window did not change. */
	uint64_t begun_ns, bytes, latency_ns; /* the latter of all of them together */
	uint32_t answers, starved;            /* of these when nothing was ready to follow */
	uint32_t late;                        /* answers in a row that took far too long */
	uint32_t skip; /* answers to come that were sent before the window changed */

	bool starting; /* no request has ever waited */
	/* The rounds before. */
	double rate;     /* bytes per nanosecond with this window; 0: not known yet */
	double usual_ns; /* what a request took with this window; 0: not known yet */
	uint32_t former; /* a window that is compared with this one; 0: none is */
	double former_rate;
	uint32_t floor; /* a window that pays, not to be undercut for so many rounds: */
	uint32_t floor_rounds, floor_for;
	uint32_t calm; /* rounds since the window was last changed or tried */
	uint32_t wait; /* rounds until a larger one is tried again */

	/* For the report: windows, of which only some are kept if there are many; how often one was
	 * halved because somebody else came; and what requests took. */
	struct ring_depth_point points[RING_DEPTH_POINTS];
	uint32_t point_count, smallest, largest, halved;
	uint64_t now_ns, all_answers, all_latency_ns;
};

/* `taught` may be NULL. */
void ring_depth_begin(struct ring_depth *depth, const struct ring_depth_options *options,
		      const struct ring_taught *taught);

/* Whether a request at this offset of the file may leave. */
bool ring_depth_allows(const struct ring_depth *depth, uint64_t offset);

void ring_depth_sent(struct ring_depth *depth, uint64_t offset, uint64_t bytes, uint64_t now_ns);

/*
 * One has come back. `starved`: nothing is ready to follow it, because there is no more or because
 * whoever fills the buffers is slower than the storage; or it has come back before, and was not
 * looked for. Such times say nothing about the window.
 */
void ring_depth_answered(struct ring_depth *depth, uint64_t offset, uint64_t bytes,
			 uint64_t sent_ns, uint64_t now_ns, bool starved);

/* What is to be remembered; false if the file was too short to teach anything. */
bool ring_depth_teach(const struct ring_depth *depth, struct ring_taught *taught);

#endif
