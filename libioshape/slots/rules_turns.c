/* SPDX-License-Identifier: Apache-2.0 */
/* Who is next, coming and going: what the operations of rules.c are made of. */
#include "slots/rules_parts.h"

#include <string.h>

#define MOST_REAPED 16  /* dead holders, and as many waiters, per call */
#define MOST_GRANTED 32 /* per call */
#define LEARNING (1.0 / 8)
#define UNKNOWN_COST 1000.0
#define MINUTE_MS 60000

uint32_t rules_capacity(const struct rules_state *state)
{
	const uint32_t set = state->pool.set_capacity;

	return MAX(set ? set : state->pool.capacity, 1);
}

uint64_t rules_small_bytes(const struct rules_state *state)
{
	return state->pool.set_small ? state->pool.set_small : SLOTS_SMALL_BYTES;
}

uint32_t rules_express(const struct rules_state *state)
{
	return state->pool.set_express ? state->pool.set_express : SLOTS_EXPRESS;
}

bool rules_numbers_set(const struct rules_numbers *pool)
{
	return pool->set_capacity || pool->set_pool_rate || pool->set_job_rate || pool->set_small ||
	       pool->set_express;
}

/* A third, rounded up. */
uint32_t rules_third(uint32_t lease)
{
	return lease / 3 + (lease % 3 > 0);
}

struct rules_member *rules_find(struct rules_state *state, const char *id)
{
	for (uint32_t i = 0; i < state->member_count; i++) {
		if (!strcmp(state->members[i].id, id))
			return &state->members[i];
	}
	return NULL;
}

/* Zeros behind the text, too: nothing of our memory goes into files. */
void rules_put_text(char *to, const char *text, size_t room)
{
	size_t bytes = strnlen(text, room - 1);

	memcpy(to, text, bytes);
	memset(to + bytes, 0, room - bytes);
}

/* ---- Jobs ------------------------------------------------------------------------------------ */

/* Tags of an earlier busy time count as 0. */
static double used_so_far(const struct rules_state *state, const struct rules_job *job)
{
	return job->busy == state->pool.busy ? job->finish : 0;
}

static struct rules_job *room_for_job(struct rules_state *state)
{
	struct rules_job *least = NULL;

	if (state->job_count < RULES_JOBS)
		return &state->jobs[state->job_count++];
	for (struct rules_job *job = state->jobs; job < state->jobs + RULES_JOBS; job++) {
		if (!job->members &&
		    (!least || used_so_far(state, job) < used_so_far(state, least)))
			least = job;
	}
	return least;
}

static struct rules_job *known_job(struct rules_state *state, const char *name)
{
	for (uint32_t i = 0; i < state->job_count; i++) {
		if (!strcmp(state->jobs[i].name, name))
			return &state->jobs[i];
	}
	return NULL;
}

struct rules_job *rules_job_named(struct rules_state *state, const char *name)
{
	struct rules_job *job = known_job(state, name);

	if (!job) {
		job = room_for_job(state);
		if (!job)
			return NULL;
		*job = (struct rules_job){ .busy = state->pool.busy, .usual = UNKNOWN_COST };
		rules_put_text(job->name, name, sizeof(job->name));
	}
	if (job->busy != state->pool.busy) {
		job->busy = state->pool.busy;
		job->members = 0;
		job->finish = job->latest = job->small_finish = 0;
	}
	return job;
}

void rules_join(struct rules_state *state, struct rules_job *job, uint32_t share)
{
	if (!job->members++) {
		job->share = share;
		state->shares += share;
	}
}

/* What a slot was really used for, instead of what was expected. */
static void settle(struct rules_state *state, struct rules_job *job,
		   const struct rules_member *member, const uint64_t *passed)
{
	const double time = (double)(state->now - member->since);
	const double more = time * member->weight - member->cost;
	struct rules_numbers *pool = &state->pool;

	job->finish = MAX(job->finish + more / member->share, 0);
	if (member->given)
		pool->vt = MAX(pool->vt + more / (double)state->shares, pool->served);
	if (passed)
		job->usual += (MAX(time, 1) - job->usual) * LEARNING;
	if (passed && *passed) {
		/* Sums, not a mean of speeds: a small write tells little about large ones. */
		job->ms = job->ms * (1 - LEARNING) + time;
		job->bytes = job->bytes * (1 - LEARNING) + (double)*passed;
		pool->ms = pool->ms * (1 - LEARNING) + time;
		pool->bytes = pool->bytes * (1 - LEARNING) + (double)*passed;
	}
}

/* Its job is charged for what it used, or not charged any more. */
static void leave(struct rules_state *state, const struct rules_member *member,
		  const uint64_t *passed)
{
	struct rules_job *job = known_job(state, member->job);

	if (!job) /* cannot be: it has a member */
		return;
	if (member->state == RULES_WAITING)
		job->finish = MAX(job->finish - member->cost / member->share, 0);
	else if (member->cost > 0)
		settle(state, job, member, passed);
	if (!--job->members)
		state->shares -= job->share;
}

/* ---- Order ----------------------------------------------------------------------------------- */

bool rules_queues_before(const struct rules_member *a, const struct rules_member *b)
{
	return a->start < b->start || (a->start <= b->start && a->seq < b->seq);
}

bool rules_ends_before(const struct rules_member *a, const struct rules_member *b)
{
	if (a->deadline != b->deadline)
		return a->deadline < b->deadline;
	return strcmp(a->id, b->id) < 0;
}

static bool slips_before(const struct rules_member *a, const struct rules_member *b)
{
	return a->small_start < b->small_start ||
	       (a->small_start <= b->small_start && a->seq < b->seq);
}

struct rules_member *rules_first(struct rules_state *state, enum rules_member_state which,
				 rules_before_fn before)
{
	struct rules_member *best = NULL;

	for (uint32_t i = 0; i < state->member_count; i++) {
		struct rules_member *member = &state->members[i];

		if (member->state == which && (!best || before(member, best)))
			best = member;
	}
	return best;
}

static struct rules_member *first_small(struct rules_state *state)
{
	struct rules_member *best = NULL;

	for (uint32_t i = 0; i < state->member_count; i++) {
		struct rules_member *member = &state->members[i];

		if (member->state == RULES_WAITING && member->small &&
		    (!best || slips_before(member, best)))
			best = member;
	}
	return best;
}

/* ---- Coming and going ------------------------------------------------------------------------ */

void rules_count(struct rules_state *state, const struct rules_member *member, bool in)
{
	const uint32_t one = in ? 1 : UINT32_MAX;

	if (member->state == RULES_WAITING) {
		state->waiters += one;
		if (member->small)
			state->small_waiters += one;
		return;
	}
	state->holders += one;
	state->used += in ? member->given : -(uint64_t)member->given;
	if (!member->given)
		state->express_used += one;
}

/* The last member moves into its place. */
void rules_forget(struct rules_state *state, struct rules_member *member, const uint64_t *passed)
{
	struct rules_member *last = &state->members[--state->member_count];

	rules_count(state, member, false);
	leave(state, member, passed);
	if (member != last)
		*member = *last;
}

void rules_admit(struct rules_state *state, struct rules_member *member, uint32_t given,
		 uint32_t lease)
{
	struct rules_numbers *pool = &state->pool;

	pool->fence = MAX(pool->fence + 1, (uint64_t)state->now * 1024);
	pool->grants++;
	pool->this_minute++;
	member->state = RULES_HOLDING;
	member->fence = pool->fence;
	member->since = state->now;
	member->given = given;
	member->deadline = state->now + lease;
	rules_count(state, member, true);
	if (given) {
		/* As if all who want slots were served at once, each by its share; and never behind
		 * the one that is served, so that new jobs do not pass old ones for ever. */
		pool->served = MAX(pool->served, member->start);
		pool->vt = MAX(pool->vt + member->cost / (double)state->shares, pool->served);
	} else {
		pool->small_vt = MAX(pool->small_vt + member->cost / (double)state->shares,
				     member->small_start);
	}
}

/* A slot for who waits. It has half of its lease to show that it knows: if the wake is lost, the
 * next beat comes after a third. */
static void grant(struct rules_state *state, struct rules_member *member, uint32_t given)
{
	rules_count(state, member, false);
	rules_admit(state, member, given, member->lease / 2 + member->lease % 2);
	if (state->woken_count < RULES_WOKEN)
		state->woken[state->woken_count++] = member->process;
}

/* More than there is may come in when it is alone. */
bool rules_fit(const struct rules_state *state, uint32_t weight)
{
	return !state->used || state->used + weight <= rules_capacity(state);
}

void rules_let_in(struct rules_state *state)
{
	struct rules_member *member;
	int granted = 0;

	while (state->waiters && granted < MOST_GRANTED && state->used < rules_capacity(state)) {
		member = rules_first(state, RULES_WAITING, rules_queues_before);
		if (!rules_fit(state, member->weight))
			break;
		grant(state, member, member->weight);
		granted++;
	}
	while (state->small_waiters && granted < MOST_GRANTED &&
	       state->express_used < rules_express(state)) {
		member = first_small(state);
		grant(state, member, 0);
		granted++;
	}
}

/* At most so many, those that ended first: as in Redis, where time is shared. */
static void reap(struct rules_state *state, enum rules_member_state which)
{
	for (int i = 0; i < MOST_REAPED; i++) {
		struct rules_member *member = rules_first(state, which, rules_ends_before);

		if (!member || member->deadline > state->now)
			return;
		rules_forget(state, member, NULL);
	}
}

/* What every operation begins with. */
void rules_tick(struct rules_state *state, int64_t now)
{
	struct rules_numbers *pool = &state->pool;
	int64_t minute;

	state->now = pool->clock = MAX(now, pool->clock);
	minute = state->now / MINUTE_MS;
	if (minute != pool->minute) {
		pool->last_minute = minute == pool->minute + 1 ? pool->this_minute : 0;
		pool->this_minute = 0;
		pool->minute = minute;
	}
	if (state->holders)
		reap(state, RULES_HOLDING);
	if (state->waiters)
		reap(state, RULES_WAITING);
	rules_let_in(state);
}
