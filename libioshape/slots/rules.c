/* SPDX-License-Identifier: Apache-2.0 */
/* Coming, staying and going, as in slots.lua: the functions have the names that they have there. */
#include "slots/rules.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>

#define MOST_REAPED 16  /* dead holders, and as many waiters, per call */
#define MOST_GRANTED 32 /* per call */
#define AGEING (1.0 / 64)
#define LEARNING (1.0 / 8)
#define FIRST_MS_PER_BYTE 1e-6
#define UNKNOWN_COST 1000.0
#define PACE_MS 250
#define MINUTE_MS 60000

static uint32_t capacity(const struct rules_state *state)
{
	return state->pool.set_capacity ? state->pool.set_capacity : state->pool.capacity;
}

static uint64_t small_bytes(const struct rules_state *state)
{
	return state->pool.set_small ? state->pool.set_small : SLOTS_SMALL_BYTES;
}

static uint32_t express(const struct rules_state *state)
{
	return state->pool.set_express ? state->pool.set_express : SLOTS_EXPRESS;
}

bool rules_was_set(const struct rules_state *state)
{
	const struct rules_numbers *pool = &state->pool;

	return pool->set_capacity || pool->set_pool_rate || pool->set_job_rate || pool->set_small ||
	       pool->set_express;
}

/* A third, rounded up. */
static uint32_t third(uint32_t lease)
{
	return lease / 3 + (lease % 3 > 0);
}

static struct rules_member *find(struct rules_state *state, const char *id)
{
	for (uint32_t i = 0; i < state->member_count; i++) {
		if (!strcmp(state->members[i].id, id))
			return &state->members[i];
	}
	return NULL;
}

/* Zeros behind the text, too: nothing of our memory goes into files. */
static void put_text(char *to, const char *text, size_t room)
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
	struct rules_job *least = &state->jobs[0];

	if (state->job_count < RULES_JOBS)
		return &state->jobs[state->job_count++];
	for (struct rules_job *job = state->jobs; job < state->jobs + RULES_JOBS; job++) {
		if (used_so_far(state, job) < used_so_far(state, least))
			least = job;
	}
	return least;
}

static struct rules_job *load_job(struct rules_state *state, const char *name)
{
	struct rules_job *job = NULL;

	for (uint32_t i = 0; i < state->job_count && !job; i++) {
		if (!strcmp(state->jobs[i].name, name))
			job = &state->jobs[i];
	}
	if (!job) {
		job = room_for_job(state);
		*job = (struct rules_job){ .busy = state->pool.busy, .usual = UNKNOWN_COST };
		put_text(job->name, name, sizeof(job->name));
	}
	if (job->busy != state->pool.busy) {
		job->busy = state->pool.busy;
		job->finish = job->latest = 0;
	}
	return job;
}

/* ---- Order ----------------------------------------------------------------------------------- */

typedef bool (*before_fn)(const struct rules_member *, const struct rules_member *);

static bool queues_before(const struct rules_member *a, const struct rules_member *b)
{
	return a->start < b->start || (a->start <= b->start && a->seq < b->seq);
}

static bool ends_before(const struct rules_member *a, const struct rules_member *b)
{
	if (a->deadline != b->deadline)
		return a->deadline < b->deadline;
	return strcmp(a->id, b->id) < 0;
}

/* Small ones: by start tag and age. */
static bool slips_before(const struct rules_member *a, const struct rules_member *b)
{
	double left = a->start + (double)a->since, right = b->start + (double)b->since;

	return left < right || (left <= right && strcmp(a->id, b->id) < 0);
}

static struct rules_member *first(struct rules_state *state, enum rules_member_state which,
				  before_fn before)
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

static void count(struct rules_state *state, const struct rules_member *member, bool in)
{
	const uint32_t one = in ? 1 : UINT32_MAX;

	if (member->state == RULES_WAITING) {
		state->waiters += one;
		return;
	}
	state->holders += one;
	state->used += in ? member->given : -(uint64_t)member->given;
	if (!member->given)
		state->express_used += one;
}

/* The last member moves into its place. */
static void forget(struct rules_state *state, struct rules_member *member)
{
	struct rules_member *last = &state->members[--state->member_count];

	count(state, member, false);
	if (member != last)
		*member = *last;
}

static void admit(struct rules_state *state, struct rules_member *member, uint32_t given,
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
	count(state, member, true);
	if (given)
		pool->vt = MAX(pool->vt, member->start) + member->cost / member->share * AGEING;
}

/* A slot for who waits. It has a third of its lease to show that it knows. */
static void grant(struct rules_state *state, struct rules_member *member, uint32_t given)
{
	count(state, member, false);
	admit(state, member, given, third(member->lease));
	if (state->woken_count < RULES_WOKEN)
		state->woken[state->woken_count++] = member->process;
}

/* More than there is may come in when it is alone. */
static bool fits(const struct rules_state *state, uint32_t weight)
{
	return !state->used || state->used + weight <= capacity(state);
}

static void grant_those_that_fit(struct rules_state *state)
{
	struct rules_member *member;
	int granted = 0;

	while (state->waiters && granted < MOST_GRANTED) {
		member = first(state, RULES_WAITING, queues_before);
		if (!fits(state, member->weight))
			break;
		grant(state, member, member->weight);
		granted++;
	}
	while (state->waiters && state->express_used < express(state) && granted < MOST_GRANTED) {
		member = first_small(state);
		if (!member)
			break;
		grant(state, member, 0);
		granted++;
	}
}

/* At most so many, those that ended first: as in Redis, where time is shared. */
static void reap(struct rules_state *state, enum rules_member_state which)
{
	for (int i = 0; i < MOST_REAPED; i++) {
		struct rules_member *member = first(state, which, ends_before);

		if (!member || member->deadline > state->now)
			return;
		forget(state, member);
	}
}

/* What every operation begins with. */
static void tick(struct rules_state *state, int64_t now)
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
	grant_those_that_fit(state);
}

/* ---- Answers --------------------------------------------------------------------------------- */

static void nobody(const struct rules_state *state, struct slots_answer *answer)
{
	/* One by one: to clear the text as well would cost as much as all the rest. */
	answer->state = SLOTS_NONE;
	answer->fence = 0;
	answer->epoch = state->pool.epoch;
	answer->weight = 0;
	answer->position = 0;
	answer->capacity = capacity(state);
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
	answer->beat_ms = third(member->lease);
}

/* How many are before it in the queue, and the last of them. */
static uint32_t position_of(const struct rules_state *state, const struct rules_member *member,
			    const struct rules_member **ahead)
{
	uint32_t position = 0;

	for (uint32_t i = 0; i < state->member_count; i++) {
		const struct rules_member *other = &state->members[i];

		if (other->state != RULES_WAITING || !queues_before(other, member))
			continue;
		position++;
		if (!*ahead || queues_before(*ahead, other))
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
	answer->beat_ms = third(member->lease);
	answer->position = position_of(state, member, &ahead);
	if (!answer->position) {
		/* The next one looks whether who holds a slot is still alive. */
		int64_t change;

		ahead = first(state, RULES_HOLDING, ends_before);
		change = ahead ? ahead->deadline - state->now : 0;
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

/* ---- Operations ------------------------------------------------------------------------------ */

/* A request takes its place in the order of its job, and is charged for. */
static struct rules_member *enrol(struct rules_state *state, const struct slots_config *config,
				  const struct slots_request *request, uint32_t process)
{
	const struct slots_identity *identity = &config->identity;
	struct rules_job *job = load_job(state, identity->job);
	struct rules_member *member = &state->members[state->member_count++];
	const double time = request->bytes ? 1 + (double)request->bytes * state->pool.speed :
					     job->usual;

	*member = (struct rules_member){
		.bytes = request->bytes,
		.since = state->now,
		.cost = time * request->weight,
		/* Never before one of the same job that came earlier, whatever that was charged
		 * since. */
		.start = MAX(state->pool.vt, MAX(job->finish, job->latest)),
		.rank = identity->rank,
		.share = identity->share,
		.weight = request->weight,
		.lease = config->lease_ms,
		.process = process,
	};
	put_text(member->id, request->id, sizeof(member->id));
	put_text(member->job, identity->job, sizeof(member->job));
	put_text(member->node, identity->node, sizeof(member->node));
	job->finish = member->start + member->cost / member->share;
	job->latest = member->start;
	return member;
}

static void enqueue(struct rules_state *state, struct rules_member *member)
{
	member->state = RULES_WAITING;
	member->seq = ++state->pool.seq;
	member->deadline = state->now + member->lease;
	member->small = member->bytes && member->bytes <= small_bytes(state) && member->weight == 1;
	count(state, member, true);
}

int rules_acquire(struct rules_state *state, int64_t now, const struct slots_config *config,
		  const struct slots_request *request, uint32_t process,
		  struct slots_answer *answer)
{
	struct rules_member *member;
	bool at_once;

	tick(state, now);
	member = find(state, request->id);
	if (member) {
		stands(state, member, answer);
		return 0;
	}
	if (!state->member_count) {
		/* Nobody is disturbed: a new busy time begins, and what jobs ask for counts. */
		state->pool.capacity = config->asked_capacity ? config->asked_capacity :
								config->default_capacity;
		state->pool.by = config->asked_capacity > 0;
		state->pool.busy++;
	}
	at_once = !state->waiters && fits(state, request->weight);
	if (request->never_wait && !at_once) {
		nobody(state, answer);
		return 0;
	}
	if (state->member_count == RULES_MEMBERS)
		return -ENOSPC;
	member = enrol(state, config, request, process);
	if (at_once) {
		admit(state, member, request->weight, config->lease_ms);
	} else {
		enqueue(state, member);
		grant_those_that_fit(state);
	}
	stands(state, member, answer);
	return 0;
}

void rules_beat(struct rules_state *state, int64_t now, const struct slots_config *config,
		const struct slots_beat *beat, struct slots_answer *answer)
{
	struct rules_member *member;

	tick(state, now);
	member = find(state, beat->id);
	if (!member) {
		nobody(state, answer);
		return;
	}
	member->deadline = state->now + config->lease_ms;
	if (member->state == RULES_HOLDING)
		member->passed = beat->passed;
	stands(state, member, answer);
}

/* What a slot was really used for, instead of what was expected: learnt, and charged to the job. */
static void settle(struct rules_state *state, const struct rules_member *member, uint64_t passed)
{
	const double time = (double)(state->now - member->since);
	struct rules_job *job = load_job(state, member->job);
	const double cost = time * member->weight;
	double *speed = &state->pool.speed;

	if (passed >= MIB && time > 0)
		*speed += (time / (double)passed - *speed) * LEARNING;
	job->finish = MAX(job->finish + (cost - member->cost) / member->share, 0);
	job->usual += (MAX(cost / member->weight, 1) - job->usual) * LEARNING;
}

bool rules_release(struct rules_state *state, int64_t now, const char *id, uint64_t passed)
{
	struct rules_member *member;

	tick(state, now);
	member = find(state, id);
	if (!member)
		return false;
	if (member->state == RULES_HOLDING && member->cost > 0)
		settle(state, member, passed);
	forget(state, member);
	grant_those_that_fit(state);
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
	double bytes = (double)wanted, start, *job_free = NULL;

	tick(state, now);
	start = (double)state->now;
	*out = (struct slots_grant){ 0 };
	if (!(rate > 0)) {
		out->end_ms = 10000;
		return;
	}
	if (job_rate > 0)
		job_free = &load_job(state, config->identity.job)->free;
	if (bytes > 0) {
		bytes = MAX(bytes, floor_of(rate * PACE_MS / 1000));
		start = MAX(start, MAX(pool_rate > 0 ? pool->free : 0, job_free ? *job_free : 0));
	}
	/* What comes back was the last that was given, unless others came after it: nobody loses.
	 */
	if (pool_rate > 0)
		pool->free = (bytes > 0 ? start : pool->free) + bytes * 1000 / pool_rate;
	if (job_free)
		*job_free = (bytes > 0 ? start : *job_free) + bytes * 1000 / job_rate;
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

	tick(state, now);
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
	grant_those_that_fit(state);
}

bool rules_kick(struct rules_state *state, int64_t now, const char *id)
{
	struct rules_member *member;

	tick(state, now);
	member = find(state, id);
	if (!member)
		return false;
	forget(state, member);
	grant_those_that_fit(state);
	return true;
}

/* The one after `last` in this order; the first if that is NULL. */
static const struct rules_member *next(struct rules_state *state, enum rules_member_state which,
				       before_fn before, const struct rules_member *last)
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

static int list(struct rules_state *state, enum rules_member_state which, before_fn before,
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

	tick(state, now);
	status->capacity = capacity(state);
	status->capacity_by = pool->set_capacity ? "operator" : pool->by ? "job" : "default";
	status->used = (uint32_t)MIN(state->used, UINT32_MAX);
	status->pool_rate = pool->set_pool_rate;
	status->job_rate = pool->set_job_rate;
	status->small_bytes = small_bytes(state);
	status->express = express(state);
	status->grants = pool->grants;
	status->grants_last_minute = pool->last_minute;
	status->waiter_count = state->waiters;
	ret = list(state, RULES_HOLDING, ends_before, maker);
	return ret ? ret : list(state, RULES_WAITING, queues_before, maker);
}

void rules_bury(struct rules_state *state, int64_t now, uint32_t process)
{
	uint32_t i = 0;

	state->now = state->pool.clock = MAX(now, state->pool.clock);
	while (i < state->member_count) {
		if (state->members[i].process == process)
			forget(state, &state->members[i]);
		else
			i++;
	}
	grant_those_that_fit(state);
}

uint32_t rules_in_the_way(struct rules_state *state, uint32_t *processes, uint32_t room)
{
	const struct rules_member *head = first(state, RULES_WAITING, queues_before);
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
