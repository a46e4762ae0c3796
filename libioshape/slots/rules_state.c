/* SPDX-License-Identifier: Apache-2.0 */
/* A pool's state where it comes from: from nothing, or from a file that anybody may have written.
 */
#include "slots/rules_parts.h"

#include <string.h>

#define FIRST_MS 16.0 /* what the first write is taken to have had */
#define FIRST_BYTES 16e6
#define LONGEST_LEASE_MS (600 * 1000)
#define LONGEST_PACE_MS (3600.0 * 1000) /* ahead of the clock that bandwidth may be given away */
#define MOST_NUMBER (UINT64_C(1) << 62) /* counters that rise by one never get there */
#define MOST_FENCE (UINT64_C(1) << 53)
#define MOST_COST 1e30

void rules_make(struct rules_state *state, int64_t now, uint64_t epoch_above, uint64_t fence_above)
{
	memset(state, 0, offsetof(struct rules_state, jobs));
	state->now = now;
	state->pool.clock = now;
	state->pool.epoch = MAX(epoch_above + 1, (uint64_t)now);
	state->pool.fence = MAX(fence_above, (uint64_t)now * 1024);
	state->pool.ms = FIRST_MS;
	state->pool.bytes = FIRST_BYTES;
}

/* False for what is no number, too. */
static bool within(double value, double least, double most)
{
	return value >= least && value <= most;
}

static bool text_holds(const char *text, size_t room)
{
	for (size_t i = 0; i < room; i++) {
		if (!text[i])
			return true;
		if (text[i] < ' ' || text[i] > '~')
			return false;
	}
	return false;
}

static bool member_holds(const struct rules_member *member, int64_t clock)
{
	return text_holds(member->id, sizeof(member->id)) && member->id[0] &&
	       text_holds(member->job, sizeof(member->job)) &&
	       text_holds(member->node, sizeof(member->node)) && member->fence <= MOST_FENCE &&
	       member->seq <= MOST_NUMBER && member->since >= 0 && member->since <= clock &&
	       member->deadline >= 0 && member->deadline <= clock + LONGEST_LEASE_MS &&
	       within(member->cost, 0, MOST_COST) && within(member->start, 0, MOST_COST) &&
	       within(member->small_start, 0, MOST_COST) && member->share > 0 &&
	       member->weight > 0 && member->lease > 0 && member->lease <= LONGEST_LEASE_MS &&
	       member->small <= 1 &&
	       (member->state == RULES_WAITING || member->state == RULES_HOLDING);
}

static bool job_holds(const struct rules_job *job, double latest_free)
{
	return text_holds(job->name, sizeof(job->name)) && job->busy <= MOST_NUMBER &&
	       within(job->finish, 0, MOST_COST) && within(job->usual, 0, MOST_COST) &&
	       within(job->latest, 0, MOST_COST) && within(job->small_finish, 0, MOST_COST) &&
	       within(job->ms, 0, MOST_COST) && within(job->bytes, 0, MOST_COST) &&
	       within(job->free, -MOST_COST, latest_free);
}

static bool numbers_hold(const struct rules_numbers *pool, double latest_free)
{
	return pool->clock >= 0 && pool->clock <= RULES_LATEST_MS && pool->epoch <= MOST_FENCE &&
	       pool->fence <= MOST_FENCE && pool->seq <= MOST_NUMBER && pool->busy <= MOST_NUMBER &&
	       pool->grants <= MOST_NUMBER && pool->minute >= 0 &&
	       pool->minute <= RULES_LATEST_MS && within(pool->vt, 0, MOST_COST) &&
	       within(pool->served, 0, MOST_COST) && within(pool->small_vt, 0, MOST_COST) &&
	       within(pool->ms, 0, MOST_COST) && within(pool->bytes, 1, MOST_COST) &&
	       within(pool->free, -MOST_COST, latest_free) && pool->by <= 1;
}

static struct rules_job *job_of(struct rules_state *state, const struct rules_member *member)
{
	for (uint32_t i = 0; i < state->job_count; i++) {
		if (!strcmp(state->jobs[i].name, member->job))
			return &state->jobs[i];
	}
	return NULL;
}

/* False where a member has no job that could be charged. */
static bool count_members(struct rules_state *state)
{
	state->holders = state->waiters = state->small_waiters = state->express_used = 0;
	state->used = state->shares = 0;
	for (uint32_t i = 0; i < state->job_count; i++)
		state->jobs[i].members = 0;
	for (uint32_t i = 0; i < state->member_count; i++) {
		const struct rules_member *member = &state->members[i];
		struct rules_job *job = job_of(state, member);

		if (!job || job->busy != state->pool.busy || !job->share)
			return false;
		rules_join(state, job, job->share);
		rules_count(state, member, true);
	}
	return true;
}

bool rules_hold(struct rules_state *state)
{
	const double latest_free = (double)state->pool.clock + LONGEST_PACE_MS;

	if (!numbers_hold(&state->pool, latest_free))
		return false;
	for (uint32_t i = 0; i < state->member_count; i++) {
		if (!member_holds(&state->members[i], state->pool.clock))
			return false;
	}
	for (uint32_t i = 0; i < state->job_count; i++) {
		if (!job_holds(&state->jobs[i], latest_free))
			return false;
	}
	return count_members(state);
}
