/* SPDX-License-Identifier: Apache-2.0 */
/* The operations of slots.lua. Functions have the names that they have there, where those serve. */
#include "slots/rules_parts.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>

#define NEAR 100 /* up to this position one is told who goes before it, not who holds a slot */
#define BELIEVED (300.0 * 1000) /* of what bytes make us expect */
#define PACE_MS 250             /* a grant of bandwidth lasts about so long, */
#define PACE_TURNS 8u           /* shared by so many writers at most */

/* ---- Answers --------------------------------------------------------------------------------- */

static void nobody(const struct rules_state *state, struct slots_answer *answer)
{
	/* One by one: to clear the text as well would cost as much as all the rest. */
	answer->state = SLOTS_NONE;
	answer->fence = 0;
	answer->epoch = state->pool.epoch;
	answer->weight = 0;
	answer->position = 0;
	answer->capacity = rules_capacity(state);
	answer->beat_ms = 0;
	answer->ahead[0] = 0;
}

static void holder(const struct rules_state *state, const struct rules_member *member,
		   struct slots_answer *answer)
{
	nobody(state, answer);
	answer->state = SLOTS_HOLDING;
	answer->fence = member->fence;
	answer->weight = member->given;
	answer->beat_ms = rules_third(member->lease);
}

/* How many are before it in the queue, and the last of them. */
static uint32_t position_of(const struct rules_state *state, const struct rules_member *member,
			    const struct rules_member **ahead)
{
	uint32_t position = 0;

	for (uint32_t i = 0; i < state->member_count; i++) {
		const struct rules_member *other = &state->members[i];

		if (other->state != RULES_WAITING || !rules_queues_before(other, member))
			continue;
		position++;
		if (!*ahead || rules_queues_before(*ahead, other))
			*ahead = other;
	}
	return position;
}

static void waiter(struct rules_state *state, const struct rules_member *member,
		   struct slots_answer *answer)
{
	const struct rules_member *ahead = NULL;

	nobody(state, answer);
	answer->state = SLOTS_WAITING;
	answer->beat_ms = rules_third(member->lease);
	answer->position = position_of(state, member, &ahead);
	if (!answer->position || answer->position > NEAR)
		ahead = rules_first(state, RULES_HOLDING, rules_ends_before);
	if (!answer->position) {
		/* The next one looks whether who holds a slot is still alive. */
		const int64_t change = ahead ? ahead->deadline - state->now : 0;

		answer->beat_ms = (uint32_t)MAX(1, MIN(change, (int64_t)answer->beat_ms));
	}
	/* Where it is too long it ends early. */
	if (ahead && snprintf(answer->ahead, sizeof(answer->ahead), "job %s, rank %u on %s",
			      ahead->job, ahead->rank, ahead->node) < 0)
		answer->ahead[0] = 0;
}

static void stands(struct rules_state *state, const struct rules_member *member,
		   struct slots_answer *answer)
{
	if (member->state == RULES_HOLDING)
		holder(state, member, answer);
	else
		waiter(state, member, answer);
}

/* Whoever asks about a request that is known shows that it lives, whatever the question was. */
static void renew(struct rules_state *state, struct rules_member *member,
		  const struct slots_config *config, struct slots_answer *answer)
{
	member->deadline = state->now + config->lease_ms;
	stands(state, member, answer);
}

/* ---- Operations ------------------------------------------------------------------------------ */

static double expected_cost(const struct rules_state *state, const struct rules_job *job,
			    uint64_t bytes, uint32_t weight)
{
	double time = job->usual;

	if (bytes) {
		const bool known = job->bytes > 0;
		const double ms = known ? job->ms : state->pool.ms;
		const double per = known ? job->bytes : state->pool.bytes;

		/* Those of its job that queue behind one that announces far too much would have
		 * tags far too late. */
		time = MIN(1 + (double)bytes * ms / per, MAX(BELIEVED, 8 * job->usual));
	}
	return time * weight;
}

/* A request takes its place in the order of its job, and is charged for. */
static struct rules_member *enrol(struct rules_state *state, const struct slots_config *config,
				  const struct slots_request *request, uint32_t process,
				  bool at_once)
{
	const struct slots_identity *identity = &config->identity;
	struct rules_job *job = rules_job_named(state, identity->job);
	struct rules_member *member = &state->members[state->member_count];

	if (!job)
		return NULL;
	state->member_count++;
	*member = (struct rules_member){
		.bytes = request->bytes,
		.since = state->now,
		.cost = expected_cost(state, job, request->bytes, request->weight),
		/* Never before one of the same job that came earlier, whatever that was charged
		 * since. */
		.start = MAX(state->pool.vt, MAX(job->finish, job->latest)),
		.rank = identity->rank,
		.share = identity->share,
		.weight = request->weight,
		.lease = config->lease_ms,
		.process = process,
	};
	rules_put_text(member->id, request->id, sizeof(member->id));
	rules_put_text(member->job, identity->job, sizeof(member->job));
	rules_put_text(member->node, identity->node, sizeof(member->node));
	job->finish = member->start + member->cost / member->share;
	job->latest = member->start;
	member->small = !at_once && member->bytes && member->bytes <= rules_small_bytes(state) &&
			member->weight == 1;
	if (member->small) {
		member->small_start = MAX(state->pool.small_vt, job->small_finish);
		job->small_finish = member->small_start + member->cost / member->share;
	}
	rules_join(state, job, member->share);
	return member;
}

static void enqueue(struct rules_state *state, struct rules_member *member)
{
	member->state = RULES_WAITING;
	member->seq = ++state->pool.seq;
	member->deadline = state->now + member->lease;
	rules_count(state, member, true);
}

/* Nobody is disturbed: a new busy time begins, and what jobs ask for counts. */
static void begin_busy_time(struct rules_state *state, const struct slots_config *config,
			    const struct slots_request *request)
{
	struct rules_numbers *pool = &state->pool;
	const uint32_t usual = request->default_capacity ? request->default_capacity :
							   config->default_capacity;
	const bool idle = !state->member_count;

	if (idle || !pool->capacity) {
		pool->by = config->asked_capacity > 0;
		pool->capacity = pool->by ? config->asked_capacity : usual;
	}
	if (idle) {
		pool->busy++;
		pool->vt = pool->served = pool->small_vt = 0;
		state->shares = 0;
	}
}

int rules_acquire(struct rules_state *state, int64_t now, const struct slots_config *config,
		  const struct slots_request *request, uint32_t process,
		  struct slots_answer *answer)
{
	struct rules_member *member;
	bool at_once;

	rules_tick(state, now);
	member = rules_find(state, request->id);
	if (member) {
		renew(state, member, config, answer);
		return 0;
	}
	if (state->member_count == RULES_MEMBERS)
		return -ENOSPC;
	begin_busy_time(state, config, request);
	at_once = !state->waiters && rules_fit(state, request->weight);
	member = enrol(state, config, request, process, at_once);
	if (!member)
		return -ENOSPC;
	if (at_once) {
		rules_admit(state, member, request->weight, config->lease_ms);
	} else {
		enqueue(state, member);
		rules_let_in(state);
	}
	if (member->state == RULES_WAITING && request->never_wait) {
		rules_forget(state, member, NULL);
		nobody(state, answer);
		return 0;
	}
	/* Whoever hears this counts on a whole lease, also if it was let in from the queue, for
	 * half of one. */
	member->deadline = state->now + config->lease_ms;
	stands(state, member, answer);
	return 0;
}

void rules_beat(struct rules_state *state, int64_t now, const struct slots_config *config,
		const struct slots_beat *beat, struct slots_answer *answer)
{
	struct rules_member *member;

	rules_tick(state, now);
	member = rules_find(state, beat->id);
	if (!member) {
		nobody(state, answer);
		return;
	}
	if (member->state == RULES_HOLDING)
		member->passed = beat->passed;
	renew(state, member, config, answer);
}

bool rules_release(struct rules_state *state, int64_t now, const char *id, uint64_t passed)
{
	struct rules_member *member;

	rules_tick(state, now);
	member = rules_find(state, id);
	if (!member)
		return false;
	rules_forget(state, member, &passed);
	rules_let_in(state);
	return true;
}

/* 0 stands for no limit. */
static double lower_rate(double a, double b)
{
	if (a > 0 && b > 0)
		return MIN(a, b);
	return a > 0 ? a : b;
}

/* floor() and ceil() of what is not below 0, without libm. Above 2^53 there are no fractions. */
static double floor_of(double value)
{
	return value < 0x1p53 ? (double)(uint64_t)value : value;
}

static double ceil_of(double value)
{
	return floor_of(value) + (floor_of(value) < value);
}

static uint32_t in_ms(double ms)
{
	return ms >= UINT32_MAX ? UINT32_MAX : (uint32_t)ms;
}

void rules_pace(struct rules_state *state, int64_t now, const struct slots_config *config,
		int64_t wanted, struct slots_grant *out)
{
	struct rules_numbers *pool = &state->pool;
	const double job_rate = lower_rate((double)config->rate, (double)pool->set_job_rate);
	const double pool_rate = (double)pool->set_pool_rate;
	const double rate = lower_rate(job_rate, pool_rate);
	double bytes = (double)wanted, start, of_pool, of_job;
	struct rules_job *job;

	rules_tick(state, now);
	start = (double)state->now;
	*out = (struct slots_grant){ 0 };
	if (!(rate > 0)) {
		out->end_ms = 10000;
		return;
	}
	/* One that finds no room among so many owes nothing. */
	job = job_rate > 0 ? rules_job_named(state, config->identity.job) : NULL;
	of_pool = pool_rate > 0 ? pool->free : 0;
	of_job = job ? job->free : 0;
	if (bytes > 0) {
		const uint32_t turns = MIN(MAX(state->holders, 1), PACE_TURNS);

		bytes = MAX(bytes, floor_of(rate * PACE_MS / 1000 / turns));
		start = MAX(start, MAX(of_pool, of_job));
		of_pool = of_job = start;
	}
	/* What comes back was the last that was given, unless others came after it: nobody loses.
	 */
	if (pool_rate > 0)
		pool->free = of_pool + bytes * 1000 / pool_rate;
	if (job)
		job->free = of_job + bytes * 1000 / job_rate;
	if (bytes <= 0)
		return;
	start -= (double)state->now;
	out->bytes = (uint64_t)bytes;
	out->start_ms = in_ms(floor_of(start));
	out->end_ms = in_ms(ceil_of(start + bytes * 1000 / rate));
}

void rules_set(struct rules_state *state, int64_t now, const struct ioshape_pool_settings *settings)
{
	struct rules_numbers *pool = &state->pool;

	rules_tick(state, now);
	if (settings->clear || settings->capacity)
		pool->set_capacity = settings->capacity;
	if (settings->clear || settings->pool_rate)
		pool->set_pool_rate = settings->pool_rate;
	if (settings->clear || settings->job_rate)
		pool->set_job_rate = settings->job_rate;
	if (settings->clear || settings->small_bytes)
		pool->set_small = settings->small_bytes;
	if (settings->clear || settings->express)
		pool->set_express = settings->express;
	rules_let_in(state);
}

bool rules_kick(struct rules_state *state, int64_t now, const char *id)
{
	struct rules_member *member;

	rules_tick(state, now);
	member = rules_find(state, id);
	if (!member)
		return false;
	rules_forget(state, member, NULL);
	rules_let_in(state);
	return true;
}

/* The one after `last` in this order; the first if that is NULL. */
static const struct rules_member *next(struct rules_state *state, enum rules_member_state which,
				       rules_before_fn before, const struct rules_member *last)
{
	const struct rules_member *best = NULL;

	for (uint32_t i = 0; i < state->member_count; i++) {
		const struct rules_member *member = &state->members[i];

		if (member->state == which && (!last || before(last, member)) &&
		    (!best || before(member, best)))
			best = member;
	}
	return best;
}

static bool came_before(const struct rules_member *a, const struct rules_member *b)
{
	return a->fence < b->fence;
}

static int list(struct rules_state *state, enum rules_member_state which, rules_before_fn before,
		struct slots_status_maker *maker)
{
	const struct rules_member *member = next(state, which, before, NULL);
	int ret = 0;

	for (uint32_t i = 0; member && i < SLOTS_LISTED && !ret; i++) {
		const struct ioshape_member row = {
			.id = member->id,
			.job = member->job,
			.node = member->node,
			.rank = member->rank,
			.weight = member->weight,
			.express = which == RULES_HOLDING && !member->given,
			.bytes = member->bytes,
			.passed = member->passed,
			.fence = member->fence,
			.since_s = (double)(state->now - member->since) / 1000,
			.lease_s = (double)(member->deadline - state->now) / 1000,
		};

		ret = slots_status_add(maker, which == RULES_HOLDING, &row);
		member = next(state, which, before, member);
	}
	return ret;
}

int rules_status(struct rules_state *state, int64_t now, struct slots_status_maker *maker)
{
	struct ioshape_pool_status *status = slots_status_of(maker);
	const struct rules_numbers *pool = &state->pool;
	int ret;

	rules_tick(state, now);
	status->capacity = rules_capacity(state);
	status->capacity_by = pool->set_capacity ? "operator" : pool->by ? "job" : "default";
	status->used = (uint32_t)MIN(state->used, UINT32_MAX);
	status->pool_rate = pool->set_pool_rate;
	status->job_rate = pool->set_job_rate;
	status->small_bytes = rules_small_bytes(state);
	status->express = rules_express(state);
	status->grants = pool->grants;
	status->grants_last_minute = pool->last_minute;
	status->holder_count = state->holders;
	status->waiter_count = state->waiters;
	ret = list(state, RULES_HOLDING, came_before, maker);
	return ret ? ret : list(state, RULES_WAITING, rules_queues_before, maker);
}

void rules_bury(struct rules_state *state, int64_t now, uint32_t process)
{
	uint32_t i = 0;

	state->now = state->pool.clock = MAX(now, state->pool.clock);
	while (i < state->member_count) {
		if (state->members[i].process == process)
			rules_forget(state, &state->members[i], NULL);
		else
			i++;
	}
	rules_let_in(state);
}

uint32_t rules_in_the_way(struct rules_state *state, uint32_t *processes, uint32_t room)
{
	const struct rules_member *head = rules_first(state, RULES_WAITING, rules_queues_before);
	uint32_t count = 0;

	for (uint32_t i = 0; head && i < state->member_count && count < room; i++) {
		const struct rules_member *member = &state->members[i];
		bool known = member != head && member->state != RULES_HOLDING;

		for (uint32_t j = 0; j < count && !known; j++)
			known = processes[j] == member->process;
		if (!known)
			processes[count++] = member->process;
	}
	return count;
}
