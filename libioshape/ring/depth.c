/* SPDX-License-Identifier: Apache-2.0 */
/* How much of a file is in flight: the rules. Times in, windows out. */
#include "ring/depth.h"

#include "base/base.h"

#include <string.h>

/*
 * A round is a window's worth of answers, and enough to see through noise: the latter less at the
 * beginning, while nothing waits, and where answers are slow.
 */
#define FIRST_ANSWERS 2u
#define LEAST_ANSWERS 8u
#define MOST_ANSWERS 32u
#define LONG_ROUND_NS 100000000u

/*
 * A latency that nobody minds: what is less counts as this. It is also longer than a processor that
 * does other work keeps a writer from sending the next request, in which a fast disk would idle.
 */
#define HARMLESS_NS 6000000u

/* Up to so many times the least latency a window is free; nearer to that than this it stays. On
 * stripes a file has only a few requests for each target, and what comes in a pause makes a disk
 * seek: fewer and longer windows. */
#define FREE 1.6
#define FREE_ON_STRIPES 2.0
#define STEADY 1.1
/* Up to here it may go if it pays: if twice the window brings half of this part more throughput. */
#define PAYS_UP_TO 4.0
#define PAYS 0.065

/* Where others share what is not known a file begins with one request at a time, whatever the last
 * one had, which may have been alone at its end: there are several writers, and what waits is in
 * others' way. Up to here a window is free, and up to there it may go if it pays. Up to so many
 * requests it has pauses, because many a storage serves first what continues the last request, and
 * a request that is always ready would keep everybody else out. */
#define SHARED_FREE 1.2
#define SHARED_PAYS_UP_TO 2.0
#define SHARED_PAUSES 4u

/* So many requests in a row, so many times slower than usual: somebody else has come. */
#define JUMP 2.0
#define JUMP_ANSWERS 3u

/* Rounds between two tries of a larger window; more of them while those bring nothing. */
#define TRY_EVERY 4u
#define TRY_AT_LEAST_EVERY 16u
/* Rounds for which a window that pays is kept, before a smaller one is tried again. */
#define LEAST_FLOOR_ROUNDS 8u
#define MOST_FLOOR_ROUNDS 32u

/* Of a rise of the least latency so much is believed in a round. */
#define BELIEF 0.25

void ring_depth_begin(struct ring_depth *depth, const struct ring_depth_options *options,
		      const struct ring_taught *taught)
{
	memset(depth, 0, sizeof(*depth));
	depth->options = *options;
	depth->options.most = MAX(options->most, 1);
	depth->options.targets = MIN(MAX(options->targets, 1), RING_MOST_TARGETS);
	depth->window = 1;
	if (options->fixed) {
		depth->window = depth->options.most;
	} else if (taught && taught->request_bytes == options->request_bytes && taught->window) {
		if (!options->shared)
			depth->window = MIN(taught->window, depth->options.most);
		depth->least_ns = taught->least_ns;
	}
	depth->starting = !depth->least_ns || options->shared;
	depth->quickest_ns = UINT64_MAX;
	depth->smallest = depth->largest = depth->window;
	depth->points[depth->point_count++].window = depth->window;
	depth->floor_for = LEAST_FLOOR_ROUNDS;
	depth->wait = TRY_EVERY;
}

static uint32_t target_of(const struct ring_depth *depth, uint64_t offset)
{
	if (!depth->options.stripe_bytes)
		return 0;
	return (uint32_t)(offset / depth->options.stripe_bytes % depth->options.targets);
}

static bool has_pauses(const struct ring_depth *depth)
{
	const struct ring_depth_options *options = &depth->options;

	if (options->fixed)
		return false;
	return options->pauses || (options->shared && depth->window <= SHARED_PAUSES);
}

bool ring_depth_allows(const struct ring_depth *depth, uint64_t offset)
{
	const uint32_t target = target_of(depth, offset);
	const uint64_t window = depth->window * depth->options.request_bytes;

	if (!depth->flying[target])
		return true;
	if (has_pauses(depth))
		return depth->sent[target] < window;
	return depth->flying[target] < window;
}

void ring_depth_sent(struct ring_depth *depth, uint64_t offset, uint64_t bytes, uint64_t now_ns)
{
	const uint32_t target = target_of(depth, offset);

	if (!depth->flying[target])
		depth->sent[target] = 0;
	depth->sent[target] += bytes;
	depth->flying[target] += bytes;
	if (!depth->begun_ns)
		depth->begun_ns = now_ns;
}

static double pays_up_to(const struct ring_depth *depth)
{
	return depth->options.shared ? SHARED_PAYS_UP_TO : PAYS_UP_TO;
}

static double is_free_up_to(const struct ring_depth *depth)
{
	return depth->options.shared      ? SHARED_FREE :
	       depth->options.targets > 1 ? FREE_ON_STRIPES :
					    FREE;
}

static double least_that_counts(const struct ring_depth *depth)
{
	return (double)MAX(depth->least_ns, HARMLESS_NS);
}

/* ---- Rounds ---------------------------------------------------------------------------------- */

static uint32_t requests_flying(const struct ring_depth *depth)
{
	uint64_t bytes = 0;

	for (uint32_t i = 0; i < depth->options.targets; i++)
		bytes += depth->flying[i];
	return (uint32_t)(bytes / MAX(depth->options.request_bytes, 1));
}

static void begin_round(struct ring_depth *depth, uint64_t now_ns)
{
	depth->begun_ns = now_ns;
	depth->bytes = depth->latency_ns = 0;
	depth->answers = depth->starved = 0;
}

/* If there are too many, every other one goes: those that are left are spread as before. */
static void keep_point(struct ring_depth *depth)
{
	uint32_t kept = 0;

	if (depth->point_count == RING_DEPTH_POINTS) {
		for (uint32_t i = 0; i < RING_DEPTH_POINTS; i += 2)
			depth->points[kept++] = depth->points[i];
		depth->point_count = kept;
	}
	depth->points[depth->point_count++] =
		(struct ring_depth_point){ depth->now_ns, depth->window };
}

static void set_window(struct ring_depth *depth, uint32_t window)
{
	window = MIN(MAX(window, 1), depth->options.most);
	if (window == depth->window)
		return;
	/* Beyond that, what is usual does not change by more than half. */
	if (depth->starting)
		depth->usual_ns = 0;
	depth->window = window;
	depth->smallest = MIN(depth->smallest, window);
	depth->largest = MAX(depth->largest, window);
	keep_point(depth);
	depth->rate = 0;
	depth->calm = 0;
	depth->skip = requests_flying(depth);
}

/* How many times the throughput of a smaller window a larger one must bring. */
static double worth(uint32_t larger, uint32_t smaller)
{
	return 1 + PAYS * (larger - smaller) / larger;
}

static void keep_for_a_while(struct ring_depth *depth, uint32_t window)
{
	depth->floor = window;
	depth->floor_rounds = depth->floor_for;
	depth->floor_for = MIN(depth->floor_for * 2, MOST_FLOOR_ROUNDS);
}

/* A window that was tried stays if nothing waits there, or if it pays. True if it does not. */
static bool undo(struct ring_depth *depth, double rate, bool is_free)
{
	const uint32_t window = depth->window, former = depth->former;
	const bool wider = window > former;
	const bool pays = wider ? rate >= depth->former_rate * worth(window, former) :
				  depth->former_rate >= rate * worth(former, window);

	depth->former = 0;
	if (wider && (pays || is_free)) {
		depth->wait = 0;
		if (pays)
			keep_for_a_while(depth, window);
		return false;
	}
	if (!wider && !pays)
		return false;
	if (wider)
		depth->wait = MIN(MAX(depth->wait * 2, TRY_EVERY), TRY_AT_LEAST_EVERY);
	else
		keep_for_a_while(depth, former);
	set_window(depth, former);
	return true;
}

static void halve(struct ring_depth *depth)
{
	depth->former = depth->floor = depth->late = 0;
	depth->usual_ns = 0;
	depth->floor_for = LEAST_FLOOR_ROUNDS;
	depth->wait = TRY_EVERY;
	depth->halved++;
	set_window(depth, depth->window / 2);
}

static void try_other(struct ring_depth *depth, uint32_t window, double rate)
{
	window = MIN(MAX(window, 1), depth->options.most);
	if (window == depth->window)
		return;
	depth->former = depth->window;
	depth->former_rate = rate;
	set_window(depth, window);
}

/* The window at which a request would take so many times the least latency, if all that waits were
 * ours; at least half of what it is. */
static uint32_t window_for(const struct ring_depth *depth, double times, double latency_ns)
{
	return MAX((uint32_t)(depth->window * times * least_that_counts(depth) / latency_ns),
		   depth->window / 2);
}

/* What follows from a whole round in which there was always something to send. */
static void decide(struct ring_depth *depth, double rate, double latency_ns)
{
	const double wait = latency_ns / least_that_counts(depth);
	const bool is_free = wait < is_free_up_to(depth) * STEADY;

	if (depth->former && undo(depth, rate, is_free))
		return;
	if (depth->rate > 0 && latency_ns * STEADY * STEADY < depth->usual_ns)
		depth->wait = 0;
	depth->usual_ns = depth->rate > 0 ? (depth->usual_ns + latency_ns) / 2 : latency_ns;
	depth->rate = depth->rate > 0 ? (depth->rate + rate) / 2 : rate;
	depth->calm++;
	if (depth->floor_rounds && !--depth->floor_rounds)
		depth->floor = 0;
	depth->starting &= wait < is_free_up_to(depth);
	if (depth->starting)
		set_window(depth, depth->window * 2);
	else if (wait > pays_up_to(depth))
		set_window(depth, window_for(depth, pays_up_to(depth), latency_ns));
	else if (!is_free && depth->window > depth->floor)
		try_other(depth,
			  MAX(window_for(depth, is_free_up_to(depth), latency_ns), depth->floor),
			  depth->rate);
	else if (depth->calm > depth->wait && wait * 1.5 < pays_up_to(depth))
		try_other(depth, depth->window + MAX(depth->window / 2, 1), depth->rate);
}

static void learn_least(struct ring_depth *depth, double latency_ns)
{
	const double least_ns = (double)depth->least_ns;

	if (!depth->least_ns || latency_ns < least_ns)
		depth->least_ns = (uint64_t)latency_ns;
	/* Nothing of ours waits: the storage has become slower, or somebody else stays. */
	else if (depth->window == 1)
		depth->least_ns = (uint64_t)(least_ns + (latency_ns - least_ns) * BELIEF);
	/* What is more than the quickest took is waiting for others. */
	if (depth->options.shared)
		depth->least_ns = MIN(depth->least_ns, depth->quickest_ns);
	depth->least_ns = MAX(depth->least_ns, 1);
}

static void end_round(struct ring_depth *depth, uint64_t now_ns)
{
	const double latency_ns = (double)depth->latency_ns / depth->answers;
	const double took_ns = (double)MAX(now_ns - depth->begun_ns, 1);

	if (depth->starved * 4 <= depth->answers) {
		learn_least(depth, latency_ns);
		decide(depth, (double)depth->bytes / took_ns, latency_ns);
	}
	begin_round(depth, now_ns);
}

/* A window's worth at least, and enough to see through noise; less where answers are slow. */
static bool is_round(const struct ring_depth *depth, uint64_t now_ns)
{
	const uint32_t one_each = depth->window * depth->options.targets;
	uint32_t enough = MIN(MAX(one_each, LEAST_ANSWERS), MOST_ANSWERS);

	if (depth->starting)
		return depth->answers >= MAX(one_each, FIRST_ANSWERS);
	if (now_ns - depth->begun_ns > LONG_ROUND_NS)
		enough = MIN(one_each, FIRST_ANSWERS);
	return depth->answers >= enough << (depth->former != 0);
}

/* Some requests in a row that took far longer than they do with this window. */
static bool has_jumped(struct ring_depth *depth, uint64_t took_ns, bool starved)
{
	const double usual_ns =
		MAX(depth->usual_ns, least_that_counts(depth) * is_free_up_to(depth));

	if (!starved && depth->usual_ns > 0 && (double)took_ns > usual_ns * JUMP)
		depth->late++;
	else
		depth->late = 0;
	return depth->late >= JUMP_ANSWERS && depth->window > 1;
}

void ring_depth_answered(struct ring_depth *depth, uint64_t offset, uint64_t bytes,
			 uint64_t sent_ns, uint64_t now_ns, bool starved)
{
	const uint64_t took_ns = now_ns > sent_ns ? now_ns - sent_ns : 1;
	const uint32_t target = target_of(depth, offset);

	depth->flying[target] -= MIN(bytes, depth->flying[target]);
	depth->now_ns = now_ns;
	depth->all_answers++;
	depth->quickest_ns = MIN(depth->quickest_ns, took_ns);
	depth->all_latency_ns += took_ns;
	if (depth->options.fixed)
		return;
	if (has_jumped(depth, took_ns, starved)) {
		halve(depth);
		begin_round(depth, now_ns);
		return;
	}
	if (depth->skip) {
		if (!--depth->skip)
			begin_round(depth, now_ns);
		return;
	}
	depth->bytes += bytes;
	depth->starved += starved;
	depth->answers++;
	depth->latency_ns += took_ns;
	if (is_round(depth, now_ns))
		end_round(depth, now_ns);
}

bool ring_depth_teach(const struct ring_depth *depth, struct ring_taught *taught)
{
	if (depth->options.fixed || !depth->least_ns)
		return false;
	*taught = (struct ring_taught){
		.request_bytes = depth->options.request_bytes,
		.window = depth->former ? MIN(depth->former, depth->window) : depth->window,
		.least_ns = depth->least_ns,
	};
	return true;
}
