/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Who may write, of those on one host. A request gets a tag: its job's request before it had a
 * lower one by STEP / share; and it is not below the highest that was let in. The lowest tag is
 * next; of those alike, the one that came first. So jobs alternate, by their shares; no job has
 * credit from a time when it did not write, and no request waits for ever.
 *
 * The next one that does not fit waits until it does, and all behind it; one that is heavier than
 * the capacity writes alone; a small one may be let past the queue. An urgent one, which has a
 * deadline, is before all others, and writes beside the slots if no more are in use. How large
 * saves are and how long they take is a matter of slots.lua.
 */
#include "slots/local.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>

#define STEP 1000000u /* between two requests of a job whose share is 1 */

#define PACE_NS 250000000.0           /* a grant of bandwidth lasts about so long ... */
#define PACE_WRITERS 8u               /* ... shared by so many writers at most */
#define LONGEST_PACE_NS 3600000000000 /* it is given no longer in advance */
#define UNLIMITED_MS 10000u           /* where bandwidth has no limit, ask again then */

struct local_usage local_count(struct local_table *table)
{
	struct local_usage usage = { 0 };

	for (uint32_t i = 0; i < table->image.head.member_end; i++) {
		const struct local_member *member = local_member(table, i);
		const bool holds = member->state == LOCAL_HOLDING;

		usage.holders += holds;
		usage.waiters += member->state == LOCAL_WAITING;
		usage.express += holds && !member->given;
		usage.used += holds ? member->given : 0;
	}
	return usage;
}

uint32_t local_capacity(const struct local_head *head)
{
	return MAX(head->set_capacity ? head->set_capacity : head->capacity, 1u);
}

uint64_t local_small_bytes(const struct local_head *head)
{
	return head->set_small_bytes ? head->set_small_bytes : SLOTS_SMALL_BYTES;
}

uint32_t local_express(const struct local_head *head)
{
	return head->set_express ? head->set_express : SLOTS_EXPRESS;
}

bool local_is_set(const struct local_head *head)
{
	return head->set_capacity || head->set_pool_rate || head->set_job_rate ||
	       head->set_small_bytes || head->set_express;
}

bool local_is_urgent(const struct local_member *member)
{
	return !member->tag;
}

/* ---- Looking for members --------------------------------------------------------------------- */

static struct local_member *find(struct local_table *table, const char *id)
{
	for (uint32_t i = 0; i < table->image.head.member_end; i++) {
		struct local_member *member = local_member(table, i);

		if (member->state != LOCAL_FREE && !strcmp(member->id, id))
			return member;
	}
	return NULL;
}

/* Waiters in the order of the queue, holders in that of their grants. */
static bool is_before(const struct local_member *a, const struct local_member *b)
{
	if (a->state == LOCAL_HOLDING)
		return a->fence < b->fence;
	return a->tag < b->tag || (a->tag == b->tag && a->seq < b->seq);
}

struct local_member *local_next(struct local_table *table, enum local_state state,
				const struct local_member *last)
{
	struct local_member *best = NULL;

	for (uint32_t i = 0; i < table->image.head.member_end; i++) {
		struct local_member *member = local_member(table, i);

		if (member->state == (uint32_t)state && (!last || is_before(last, member)) &&
		    (!best || is_before(member, best)))
			best = member;
	}
	return best;
}

static struct local_member *next_small(struct local_table *table)
{
	struct local_member *member = local_next(table, LOCAL_WAITING, NULL);

	while (member && !member->small)
		member = local_next(table, LOCAL_WAITING, member);
	return member;
}

/* ---- Jobs ------------------------------------------------------------------------------------ */

/* Finds it, or replaces the one that was seen least lately. */
static struct local_job *job_named(struct local_table *table, const char *name)
{
	struct local_head *head = &table->image.head;
	struct local_job *oldest = NULL, *job;

	for (uint32_t i = 0; i < head->job_end; i++) {
		job = local_job(table, i);
		if (!strcmp(job->name, name))
			return job;
		if (!oldest || job->seen < oldest->seen)
			oldest = job;
	}
	job = head->job_end < LOCAL_JOBS ? local_job(table, head->job_end++) : oldest;
	memset(job, 0, sizeof(*job));
	snprintf(job->name, sizeof(job->name), "%s", name);
	local_changed(table, head);
	local_changed(table, job);
	return job;
}

/* ---- Coming and going ------------------------------------------------------------------------ */

static void forget(struct local_table *table, struct local_member *member, uint64_t passed)
{
	struct local_head *head = &table->image.head;

	if (member->state == LOCAL_HOLDING) {
		struct local_job *job = job_named(table, member->job);

		job->written += passed;
		job->writes++;
		local_changed(table, job);
	}
	memset(member, 0, sizeof(*member));
	local_changed(table, member);
	while (head->member_end && !local_member(table, head->member_end - 1)->state) {
		head->member_end--;
		local_changed(table, head);
	}
}

static void count_grant(struct local_table *table)
{
	struct local_head *head = &table->image.head;
	const uint64_t minute = table->now_ns / 60000000000;

	if (minute != head->minute) {
		head->last_minute = minute == head->minute + 1 ? head->this_minute : 0;
		head->this_minute = 0;
		head->minute = minute;
	}
	head->this_minute++;
	head->grants++;
}

static void admit(struct local_table *table, struct local_member *member, uint32_t given,
		  uint32_t lease_ms)
{
	struct local_head *head = &table->image.head;
	struct local_job *job = given ? job_named(table, member->job) : NULL;

	/* Made of the time, so that they rise although the file was lost. */
	head->fence = MAX(head->fence + 1, table->wall_ms * 1024);
	count_grant(table);
	if (job) {
		job->tag = MAX(job->tag, member->tag);
		head->tag = MAX(head->tag, member->tag);
		local_changed(table, job);
	}
	member->state = LOCAL_HOLDING;
	member->given = given;
	member->fence = head->fence;
	member->since_ns = table->now_ns;
	member->deadline_ns = table->now_ns + base_ms_to_ns(lease_ms);
	local_changed(table, head);
	local_changed(table, member);
}

static bool fits(const struct local_head *head, const struct local_usage *usage,
		 const struct local_member *member)
{
	return !usage->used || usage->used + member->weight <= local_capacity(head) ||
	       (local_is_urgent(member) && usage->used <= local_capacity(head));
}

/* A slot for one that waits. It has half of its lease to show that it knows. */
static void let_in(struct local_table *table, struct local_member *member, uint32_t given)
{
	admit(table, member, given, member->lease_ms / 2);
	table->woken[table->woken_count++] = member->wake;
}

static void let_in_those_that_fit(struct local_table *table)
{
	const struct local_head *head = &table->image.head;
	struct local_usage usage = local_count(table);

	while (table->woken_count < LOCAL_WOKEN) {
		struct local_member *first = local_next(table, LOCAL_WAITING, NULL);

		if (!first || !fits(head, &usage, first))
			break;
		let_in(table, first, first->weight);
		usage = local_count(table);
	}
	while (table->woken_count < LOCAL_WOKEN && usage.express < local_express(head)) {
		struct local_member *first = next_small(table);

		if (!first)
			break;
		let_in(table, first, 0);
		usage.express++;
	}
}

void local_tick(struct local_table *table)
{
	for (uint32_t i = 0; i < table->image.head.member_end; i++) {
		struct local_member *member = local_member(table, i);

		if (member->state != LOCAL_FREE && member->deadline_ns <= table->now_ns)
			forget(table, member, member->passed);
	}
	let_in_those_that_fit(table);
}

/* ---- Answers --------------------------------------------------------------------------------- */

static void answer_nobody(struct local_table *table, struct slots_answer *answer)
{
	*answer = (struct slots_answer){ .state = SLOTS_NONE,
					 .capacity = local_capacity(&table->image.head) };
}

static void name_ahead(struct slots_answer *answer, const struct local_member *member)
{
	if (member)
		snprintf(answer->ahead, sizeof(answer->ahead), "job %.50s, rank %u on %.50s",
			 member->job, member->rank, member->node);
}

static void answer_waiter(struct local_table *table, const struct local_member *member,
			  struct slots_answer *answer)
{
	const struct local_member *ahead = NULL;

	for (uint32_t i = 0; i < table->image.head.member_end; i++) {
		const struct local_member *other = local_member(table, i);

		if (other->state != LOCAL_WAITING || !is_before(other, member))
			continue;
		answer->position++;
		if (!ahead || is_before(ahead, other))
			ahead = other;
	}
	name_ahead(answer, ahead ? ahead : local_next(table, LOCAL_HOLDING, NULL));
}

/* Whoever asks about a request shows that it lives, and counts on a whole lease from now. */
static void answer_for(struct local_table *table, struct local_member *member,
		       struct slots_answer *answer)
{
	const bool holds = member->state == LOCAL_HOLDING;

	member->deadline_ns = table->now_ns + base_ms_to_ns(member->lease_ms);
	local_changed(table, member);
	*answer = (struct slots_answer){
		.state = holds ? SLOTS_HOLDING : SLOTS_WAITING,
		.fence = holds ? member->fence : 0,
		.weight = holds ? member->given : 0,
		.capacity = local_capacity(&table->image.head),
		.beat_ms = MAX(member->lease_ms / 3, 1u),
	};
	if (!holds)
		answer_waiter(table, member, answer);
}

/* ---- Operations ------------------------------------------------------------------------------ */

/* Behind all of its job that wait. */
static uint64_t next_tag(struct local_table *table, const struct local_job *job, uint32_t share)
{
	uint64_t latest = job->tag;

	for (uint32_t i = 0; i < table->image.head.member_end; i++) {
		const struct local_member *member = local_member(table, i);

		if (member->state == LOCAL_WAITING && !strcmp(member->job, job->name))
			latest = MAX(latest, member->tag);
	}
	return MAX(latest + STEP / MAX(share, 1u), table->image.head.tag);
}

/* NULL where the table is full. */
static struct local_member *enrol(struct local_table *table, const struct slots_config *config,
				  const struct slots_request *request, uint32_t process,
				  uint32_t wake)
{
	struct local_head *head = &table->image.head;
	struct local_member *member;
	struct local_job *job;
	uint32_t i = 0;

	while (i < head->member_end && local_member(table, i)->state != LOCAL_FREE)
		i++;
	if (i == LOCAL_MEMBERS)
		return NULL;
	job = job_named(table, config->identity.job);
	job->seen = ++head->seq;
	snprintf(job->user, sizeof(job->user), "%s", config->identity.user);
	member = local_member(table, i);
	*member = (struct local_member){
		.bytes = MIN(request->bytes, SLOTS_MOST_BYTES),
		.tag = request->urgent ? 0 : next_tag(table, job, config->identity.share),
		.seq = head->seq,
		.since_ns = table->now_ns,
		.state = LOCAL_WAITING,
		.rank = config->identity.rank,
		.weight = MAX(request->weight, 1u),
		.lease_ms = config->lease_ms,
		.process = process,
		.wake = wake,
	};
	member->small = member->weight == 1 && member->bytes &&
			member->bytes <= local_small_bytes(head);
	snprintf(member->id, sizeof(member->id), "%s", request->id);
	snprintf(member->job, sizeof(member->job), "%s", config->identity.job);
	snprintf(member->node, sizeof(member->node), "%s", config->identity.node);
	head->member_end = MAX(head->member_end, i + 1);
	local_changed(table, head);
	local_changed(table, job);
	local_changed(table, member);
	return member;
}

int local_queue_acquire(struct local_table *table, const struct slots_config *config,
			const struct slots_request *request, uint32_t process, uint32_t wake,
			struct slots_answer *answer)
{
	struct local_head *head = &table->image.head;
	struct local_member *member;
	struct local_usage usage;

	local_tick(table);
	member = find(table, request->id);
	if (member) {
		answer_for(table, member, answer);
		return 0;
	}
	/* Nobody is disturbed: what jobs ask for counts. */
	if (!head->member_end || !head->capacity) {
		const uint32_t usual = request->default_capacity ? request->default_capacity :
								   config->default_capacity;

		head->by_job = config->asked_capacity > 0;
		head->capacity = head->by_job ? config->asked_capacity : usual;
	}
	usage = local_count(table);
	member = enrol(table, config, request, process, wake);
	if (!member)
		return -ENOSPC;
	if (local_next(table, LOCAL_WAITING, NULL) == member && fits(head, &usage, member))
		admit(table, member, member->weight, config->lease_ms);
	else if (member->small && usage.express < local_express(head))
		admit(table, member, 0, config->lease_ms);
	if (member->state == LOCAL_WAITING && request->never_wait) {
		forget(table, member, 0);
		answer_nobody(table, answer);
		return 0;
	}
	answer_for(table, member, answer);
	return 0;
}

void local_queue_beat(struct local_table *table, const struct slots_config *config,
		      const struct slots_beat *beat, struct slots_answer *answer)
{
	struct local_member *member;

	local_tick(table);
	member = find(table, beat->id);
	if (!member) {
		answer_nobody(table, answer);
		return;
	}
	if (member->state == LOCAL_HOLDING)
		member->passed = beat->passed;
	member->lease_ms = config->lease_ms;
	answer_for(table, member, answer);
}

static bool remove_member(struct local_table *table, const char *id, const uint64_t *passed)
{
	struct local_member *member;

	local_tick(table);
	member = find(table, id);
	if (!member)
		return false;
	forget(table, member, passed ? *passed : member->passed);
	let_in_those_that_fit(table);
	return true;
}

bool local_queue_release(struct local_table *table, const char *id, uint64_t passed)
{
	return remove_member(table, id, &passed);
}

static void note_act(struct local_table *table, const struct slots_config *config, const char *what)
{
	struct local_head *head = &table->image.head;
	struct local_act *act = &table->image.acts[head->acts++ % SLOTS_ACTS];
	char who[SLOTS_NAME_BYTES];

	slots_name_operator(&config->identity, who);
	memset(act, 0, sizeof(*act));
	act->wall_ms = table->wall_ms;
	snprintf(act->who, sizeof(act->who), "%.*s", (int)sizeof(act->who) - 1, who);
	snprintf(act->what, sizeof(act->what), "%.*s", (int)sizeof(act->what) - 1, what);
	local_changed(table, head);
	local_changed(table, act);
}

bool local_queue_kick(struct local_table *table, const struct slots_config *config, const char *id)
{
	const bool found = remove_member(table, id, NULL);
	char what[SLOTS_NAME_BYTES];

	snprintf(what, sizeof(what), "kick %.40s", id);
	if (found)
		note_act(table, config, what);
	return found;
}

/* What was given in advance at a rate that the operator has replaced is owed by nobody. */
static void forget_paces(struct local_table *table)
{
	table->image.head.free_ns = 0;
	for (uint32_t i = 0; i < table->image.head.job_end; i++) {
		local_job(table, i)->free_ns = 0;
		local_changed(table, local_job(table, i));
	}
}

void local_queue_set(struct local_table *table, const struct slots_config *config,
		     const struct ioshape_pool_settings *settings)
{
	struct local_head *head = &table->image.head;
	char what[SLOTS_NAME_BYTES];

	local_tick(table);
	local_describe(head, settings, what);
	if (settings->clear || settings->capacity)
		head->set_capacity = settings->capacity;
	if (settings->clear || settings->pool_bytes_per_s)
		head->set_pool_rate = settings->pool_bytes_per_s;
	if (settings->clear || settings->job_bytes_per_s)
		head->set_job_rate = settings->job_bytes_per_s;
	if (settings->clear || settings->small_bytes)
		head->set_small_bytes = settings->small_bytes;
	if (settings->clear || settings->express)
		head->set_express = settings->express;
	if (settings->clear || settings->pool_bytes_per_s || settings->job_bytes_per_s)
		forget_paces(table);
	local_changed(table, head);
	note_act(table, config, what);
	let_in_those_that_fit(table);
}

void local_queue_bury(struct local_table *table, uint32_t process)
{
	for (uint32_t i = 0; i < table->image.head.member_end; i++) {
		struct local_member *member = local_member(table, i);

		if (member->state != LOCAL_FREE && member->process == process)
			forget(table, member, member->passed);
	}
	let_in_those_that_fit(table);
}

uint32_t local_queue_in_the_way(struct local_table *table, uint32_t *processes, uint32_t room)
{
	const struct local_member *first = local_next(table, LOCAL_WAITING, NULL);
	uint32_t found = 0;

	for (uint32_t i = 0; first && i < table->image.head.member_end && found < room; i++) {
		const struct local_member *member = local_member(table, i);
		bool known = member != first && member->state != LOCAL_HOLDING;

		for (uint32_t j = 0; j < found && !known; j++)
			known = processes[j] == member->process;
		if (!known)
			processes[found++] = member->process;
	}
	return found;
}

/* ---- Bandwidth ------------------------------------------------------------------------------- */

/* 0 stands for no limit. */
static uint64_t lower_rate(uint64_t a, uint64_t b)
{
	return a && b ? MIN(a, b) : MAX(a, b);
}

/* How long so many bytes take, also below 0. */
static int64_t duration_ns(double bytes, uint64_t rate)
{
	const double ns = bytes * 1e9 / (double)rate, most = LONGEST_PACE_NS;

	return (int64_t)MAX(MIN(ns, most), -most);
}

static uint64_t later(uint64_t ns, int64_t more_ns)
{
	return more_ns < 0 ? ns - MIN(ns, (uint64_t)-more_ns) : ns + (uint64_t)more_ns;
}

/* When bandwidth is free again. A clock may have begun again since that was written. */
static uint64_t free_at(uint64_t free_ns, uint64_t now)
{
	return MIN(free_ns, now + (uint64_t)LONGEST_PACE_NS);
}

/*
 * `wanted` above 0: a share of the bandwidth, at least so many bytes, from when pool and job have
 * it free again. Below 0: so much of the last share comes back. It was the last one that was given,
 * unless others came after it; then nobody loses.
 */
void local_queue_pace(struct local_table *table, const struct slots_config *config, int64_t wanted,
		      struct slots_grant *grant)
{
	struct local_head *head = &table->image.head;
	const uint64_t job_rate = lower_rate(config->rate, head->set_job_rate);
	const uint64_t pool_rate = head->set_pool_rate, rate = lower_rate(job_rate, pool_rate);
	const uint64_t now = table->now_ns;
	double bytes = (double)wanted;
	struct local_job *job;
	uint64_t start = now;

	local_tick(table);
	*grant = (struct slots_grant){ .end_ms = rate ? 0 : UNLIMITED_MS };
	if (!rate)
		return;
	job = job_named(table, config->identity.job);
	if (wanted > 0) {
		const uint32_t writers = MIN(MAX(local_count(table).holders, 1u), PACE_WRITERS);

		bytes = MAX(bytes, (double)rate * (PACE_NS / 1e9) / writers);
		start = MAX(start, pool_rate ? free_at(head->free_ns, now) : 0);
		start = MAX(start, job_rate ? free_at(job->free_ns, now) : 0);
		head->free_ns = pool_rate ? start : 0;
		job->free_ns = job_rate ? start : 0;
		grant->bytes = (uint64_t)bytes;
		grant->start_ms = (uint32_t)((start - now) / 1000000);
		grant->end_ms =
			(uint32_t)((later(start, duration_ns(bytes, rate)) - now) / 1000000 + 1);
	}
	if (pool_rate)
		head->free_ns = later(head->free_ns, duration_ns(bytes, pool_rate));
	if (job_rate)
		job->free_ns = later(job->free_ns, duration_ns(bytes, job_rate));
	local_changed(table, head);
	local_changed(table, job);
}
