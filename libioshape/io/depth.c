/* SPDX-License-Identifier: Apache-2.0 */
/* The in-flight controller: times of requests in, limits out. depth.h describes the algorithm. */
#include "io/depth.h"

#include "base/base.h"

#include <string.h>

/*
 * The constants come from these figures of `tests/bench.sh fs`, unless another experiment is named:
 * depth_regret, depth_reaction_ms and depth_recovery_ms. They measure a save alone, and one beside
 * another writer, on eight modelled storages.
 */

/*
 * The smallest baseline. When the processor does other work, a writer may notice a completion this
 * late. With 2 ms, a server that pauses now and then gets a fifth of its throughput. With 12 ms, a
 * save makes way for another one too late.
 */
#define HARMLESS_NS 6000000u

/*
 * The latency bound as a multiple of the baseline. From 2 on, a spinning disk has a queue that
 * gains nothing, and a save needs half a second to make way. With 1.3 a save takes longer to
 * recover.
 */
#define BOUND 1.6
/*
 * The latency bound on stripes, where each pause makes a disk seek: runs of three requests instead
 * of two. With 1.6 the ranks of a storm wait 5 % longer (`tests/bench.sh storm`, hdd).
 */
#define BOUND_ON_STRIPES 2.0
/*
 * The latency bound where several writers share unknown targets, so that the queue of each delays
 * the others. With 1.6 the queue is half as long again, and the writers are no faster.
 */
#define BOUND_SHARED 1.2

/*
 * On shared storage, limits up to this value have pauses. Many servers prefer the request that
 * continues the last one, so a request that is always ready would keep other writers out (storm
 * blind_hdd). With 16 a server idles in the pauses and loses a quarter of its throughput.
 */
#define SHARED_PAUSES 4u

/*
 * Fewest completions in a round; their mean averages out noise. With 2 a shared storage is slower;
 * with 32 a save needs two seconds to recover.
 */
#define LEAST_ANSWERS 8u

/*
 * Most rounds between two attempts to raise the limit while attempts fail. With 1 or 4 a spinning
 * disk has a queue for longer, and a save makes way later. 64 is no better.
 */
#define MOST_WAIT 16u

/*
 * EWMA weight of a round in a rising baseline. Without it, a save starves beside readers on a
 * spinning disk (tests/c/io/test_depth.c).
 */
#define DRIFT 0.25

void io_depth_begin(struct io_depth *depth, const struct io_depth_options *options)
{
	memset(depth, 0, sizeof(*depth));
	depth->options = *options;
	depth->options.most = MAX(options->most, 1);
	depth->options.targets = MIN(MAX(options->targets, 1), IO_MOST_TARGETS);
	depth->limit = options->fixed ? depth->options.most : 1;
	depth->starting = true;
}

static uint32_t target_of(const struct io_depth *depth, uint64_t offset)
{
	if (!depth->options.stripe_bytes)
		return 0;
	return (uint32_t)(offset / depth->options.stripe_bytes % depth->options.targets);
}

bool io_depth_allows(const struct io_depth *depth, uint64_t offset)
{
	const struct io_depth_options *options = &depth->options;
	const bool pauses = !options->fixed &&
			    (options->pauses || (options->shared && depth->limit <= SHARED_PAUSES));
	const uint32_t target = target_of(depth, offset);
	const uint64_t used = pauses ? depth->sent[target] : depth->in_flight[target];

	return !depth->in_flight[target] || used < depth->limit * options->request_bytes;
}

void io_depth_sent(struct io_depth *depth, uint64_t offset, uint64_t bytes)
{
	const uint32_t target = target_of(depth, offset);

	if (!depth->in_flight[target])
		depth->sent[target] = 0;
	depth->sent[target] += bytes;
	depth->in_flight[target] += bytes;
}

static void set_limit(struct io_depth *depth, double limit, uint64_t now_ns)
{
	const uint32_t before = depth->limit;

	depth->limit = (uint32_t)MIN(MAX(limit, 1.0), (double)depth->options.most);
	depth->raised = depth->limit > before;
	if (depth->limit == before)
		return;
	depth->steady = 0;
	depth->since_ns = now_ns;
}

static void learn_least(struct io_depth *depth, double latency_ns)
{
	const double least_ns = (double)depth->least_ns;

	if (!depth->least_ns || latency_ns < least_ns)
		depth->least_ns = (uint64_t)MAX(latency_ns, 1.0);
	/*
	 * With a limit of 1, no request of this file waits for another: the storage has become
	 * slower, or another job stays. On shared storage other writers come and go, so the least
	 * time seen remains the baseline.
	 */
	else if (depth->limit == 1 && !depth->options.shared)
		depth->least_ns = (uint64_t)(least_ns + (latency_ns - least_ns) * DRIFT);
}

static double bound_ns(const struct io_depth *depth)
{
	const double times = depth->options.shared      ? BOUND_SHARED :
			     depth->options.targets > 1 ? BOUND_ON_STRIPES :
							  BOUND;

	return times * (double)MAX(depth->least_ns, HARMLESS_NS);
}

static void decide(struct io_depth *depth, double latency_ns, uint64_t now_ns)
{
	const double ratio = bound_ns(depth) / latency_ns;

	if (ratio < 1) {
		depth->wait = depth->raised ? MIN(2 * depth->wait + 1, MOST_WAIT) : 0;
		depth->starting = false;
		set_limit(depth, depth->limit * MAX(ratio, 0.5), now_ns);
		return;
	}
	depth->wait = depth->raised ? 0 : depth->wait;
	depth->steady++;
	depth->raised = false;
	if (depth->starting)
		set_limit(depth, depth->limit * 2.0, now_ns);
	else if (depth->steady > depth->wait)
		set_limit(depth, depth->limit + 1.0, now_ns);
}

void io_depth_answered(struct io_depth *depth, uint64_t offset, uint64_t bytes, uint64_t sent_ns,
		       uint64_t now_ns, bool idle)
{
	const uint64_t took_ns = now_ns > sent_ns ? now_ns - sent_ns : 1;
	const uint32_t target = target_of(depth, offset),
		       one_each = depth->limit * depth->options.targets,
		       enough = depth->starting ? one_each : MAX(one_each, LEAST_ANSWERS);
	double latency_ns;

	depth->in_flight[target] -= MIN(bytes, depth->in_flight[target]);
	if (depth->options.fixed || idle || sent_ns < depth->since_ns)
		return;
	if (depth->options.shared)
		learn_least(depth, (double)took_ns);
	depth->latency_ns += took_ns;
	depth->answers++;
	/* A round ends early if its requests have taken longer than a whole round at the bound. */
	if (depth->answers < enough &&
	    (!depth->least_ns || (double)depth->latency_ns < enough * bound_ns(depth)))
		return;
	latency_ns = (double)depth->latency_ns / depth->answers;
	depth->latency_ns = depth->answers = 0;
	learn_least(depth, latency_ns);
	decide(depth, latency_ns, now_ns);
}

/* ---- Pace ------------------------------------------------------------------------------------ */

/* If the caller waits for less than 1 / WAITING_PART of the time, the storage is faster. */
#define WAITING_PART 8

void io_pace_judge(struct io_pace *pace, uint64_t sent_bytes, uint64_t in_flight_bytes,
		   uint64_t now_ns)
{
	if (sent_bytes - pace->bytes < in_flight_bytes)
		return;
	/* The first blocks found an empty queue, so they prove nothing. */
	pace->starved = pace->bytes && pace->waited_ns * WAITING_PART < now_ns - pace->ns;
	pace->bytes = sent_bytes;
	pace->ns = now_ns;
	pace->waited_ns = 0;
}
