/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Decide who may write, of the processes of one host: the request that came first, after those with
 * a deadline.
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

/* Cut if it is longer. Each turn takes five, and snprintf() would cost more than the rest of it. */
static void take_text(char *into, size_t room, const char *text)
{
	const size_t bytes = strnlen(text, room - 1);

	memcpy(into, text, bytes);
	memset(into + bytes, 0, room - bytes);
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

struct local_job *local_job_named(struct local_table *table, const char *name)
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
	take_text(job->name, sizeof(job->name), name);
	local_changed(table, head);
	local_changed(table, job);
	return job;
}

/* ---- Coming and going ------------------------------------------------------------------------ */

static void forget(struct local_table *table, struct local_member *member, uint64_t passed)
{
	struct local_head *head = &table->image.head;

	if (member->state == LOCAL_HOLDING) {
		struct local_job *job = local_job_named(table, member->job);

		job->written += passed;
		job->writes++;
		local_changed(table, job);
		local_changed(table, head);
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

/* The next one after the last, of those with the fewest writers. */
static uint8_t take_place(struct local_table *table, uint8_t places)
{
	struct local_head *head = &table->image.head;
	uint32_t writers[SLOTS_MOST_PLACES] = { 0 }, best;

	if (places < 2)
		return 0;
	for (uint32_t i = 0; i < head->member_end; i++) {
		const struct local_member *member = local_member(table, i);

		if (member->state == LOCAL_HOLDING && member->places == places && member->place)
			writers[member->place - 1]++;
	}
	best = head->turn % places;
	for (uint32_t i = 1; i < places; i++) {
		const uint32_t next = (head->turn + i) % places;

		best = writers[next] < writers[best] ? next : best;
	}
	head->turn = best + 1;
	return (uint8_t)head->turn;
}

static void admit(struct local_table *table, struct local_member *member, uint32_t given,
		  uint32_t lease_ms)
{
	struct local_head *head = &table->image.head;

	/* Made of the time, so that they rise although the file was lost. */
	head->fence = MAX(head->fence + 1, table->wall_ms * 1024);
	count_grant(table);
	member->place = take_place(table, member->places);
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
		.place = holds ? member->place : 0,
		.capacity = local_capacity(&table->image.head),
		.beat_ms = MAX(member->lease_ms / 3, 1u),
	};
	if (!holds)
		answer_waiter(table, member, answer);
}

/* ---- Operations ------------------------------------------------------------------------------ */

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
	job = local_job_named(table, config->identity.job);
	job->seen = ++head->seq;
	take_text(job->user, sizeof(job->user), config->identity.user);
	member = local_member(table, i);
	*member = (struct local_member){
		.bytes = MIN(request->bytes, SLOTS_MOST_BYTES),
		.tag = !request->urgent, /* those with a deadline come first */
		.seq = head->seq,
		.since_ns = table->now_ns,
		.state = LOCAL_WAITING,
		.rank = config->identity.rank,
		.weight = MAX(request->weight, 1u),
		.lease_ms = config->lease_ms,
		.process = process,
		.wake = wake,
		.places = (uint8_t)MIN(request->default_capacity, SLOTS_MOST_PLACES),
	};
	member->small = member->weight == 1 && member->bytes &&
			member->bytes <= local_small_bytes(head);
	take_text(member->id, sizeof(member->id), request->id);
	take_text(member->job, sizeof(member->job), config->identity.job);
	take_text(member->node, sizeof(member->node), config->identity.node);
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
	if (!head->member_end || !head->capacity)
		local_choose_capacity(table, config, request);
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

bool local_queue_kick(struct local_table *table, const char *id)
{
	return remove_member(table, id, NULL);
}

void local_queue_set(struct local_table *table, const struct ioshape_pool_settings *settings)
{
	struct local_head *head = &table->image.head;

	local_tick(table);
	head->set_ms = table->wall_ms;
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
		local_forget_paces(table);
	local_changed(table, head);
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
