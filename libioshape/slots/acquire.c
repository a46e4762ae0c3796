/* SPDX-License-Identifier: Apache-2.0 */
/*
 * How a slot is acquired, in the order in which it happens:
 *
 *   1. Ask        the thread that wants a slot asks the coordinator, which grants it at once,
 *                 queues it, or does not answer.
 *   2. Queue      a queued thread sleeps until the pool's thread has news of its slot; it wakes
 *                 only to ask its caller whether to go on.
 *   3. Unreachable  a coordinator that does not answer is asked again, with growing pauses, until
 *                 it answers, or until the policy lets the writer go ahead without a slot or fail.
 *                 A request with a deadline goes ahead without a slot in time, too, whatever it
 *                 waits for.
 *   4. Acquire    all of it together: what happens next follows from the slot's stage.
 *   5. Release    the coordinator is told; if it cannot be reached, later, by the pool's thread.
 */
#include "slots/pool.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* A caller that waits is asked so often whether to go on. */
#define PATIENCE_MS 100

/* A coordinator that is being restarted is waited for, before the policy applies. */
#define RESTART_MS 2000u

/* Pauses before a coordinator that does not answer is asked again: each twice the one before. */
#define RETRY_FIRST_MS 50
#define RETRY_LAST_MS 1000

/* How long a write is taken to last before one has been seen. */
#define FIRST_WRITE_MS 1000u

/* One call of slots_acquire(). */
struct attempt {
	struct slots_slot *slot;
	uint64_t begin_ns;
	uint64_t retry_ms; /* the next pause */
	uint64_t alone_ns; /* when it may write without a slot; 0: not decided */
	uint64_t last_ns;  /* by then it does, because of its deadline; 0: it has none */
	uint64_t told_ns;  /* when the caller was last asked; 0: never */
};

/* ---- 1. Ask ---------------------------------------------------------------------------------- */

/* Under the lock, which it lets go meanwhile. Sets the stage. */
static int ask(struct attempt *attempt, struct base_error *error)
{
	struct slots_slot *slot = attempt->slot;
	struct slots_pool *pool = slot->pool;
	struct base_error why;
	struct slots_answer answer;
	uint64_t sent_ns;
	int ret;

	base_error_begin(&why);
	slot->stage = STAGE_ASKING;
	pthread_mutex_unlock(&pool->lock);
	sent_ns = base_now_ns();
	ret = pool->ops->acquire(pool->coordinator, &slot->request, &answer, &why);
	pthread_mutex_lock(&pool->lock);
	if (!ret && answer.state == SLOTS_NONE && !slot->request.never_wait)
		ret = base_refuse(
			&why, IOSHAPE_E_COORDINATOR,
			"the coordinator of pool \"%s\" does not keep a request" BASE_REMEDY
			"check that it is of this version",
			pool->config.pool);
	if (ret) {
		slots_note_unreachable(pool, &why);
		slot->stage = STAGE_UNREACHABLE;
		return 0;
	}
	slots_note_reachable(pool);
	slots_take_answer(slot, &answer, sent_ns);
	if (slot->stage == STAGE_FORGOTTEN)
		return base_refuse(error, -EAGAIN, "no slot of pool \"%s\" is free",
				   pool->config.pool);
	return 0;
}

/* ---- 2. Queue -------------------------------------------------------------------------------- */

static void describe_place(const struct attempt *attempt, struct ioshape_place *place)
{
	const struct slots_slot *slot = attempt->slot;
	struct slots_pool *pool = slot->pool;

	*place = (struct ioshape_place){ .size = sizeof(*place) };
	pthread_mutex_lock(&pool->lock);
	place->position = slot->answer.position;
	place->capacity = pool->capacity;
	snprintf(place->ahead, sizeof(place->ahead), "%s", slot->answer.ahead);
	snprintf(place->coordinator, sizeof(place->coordinator), "%s",
		 slot->stage == STAGE_UNREACHABLE ? "unreachable" : pool->ops->id);
	pthread_mutex_unlock(&pool->lock);
	place->waited_s = base_seconds(base_now_ns() - attempt->begin_ns);
	snprintf(place->pool, sizeof(place->pool), "%s", pool->config.pool);
}

/* Whether the caller goes on waiting. Without the lock. */
static int ask_caller(struct attempt *attempt, struct base_error *error)
{
	const struct slots_wanted *wanted = &attempt->slot->wanted;
	const char *pool = attempt->slot->pool->config.pool;
	const uint64_t now = base_now_ns();
	const uint64_t waited_ms = (now - attempt->begin_ns) / 1000000;
	struct ioshape_place place;

	if (wanted->timeout_ms &&
	    (wanted->timeout_ms < 0 || waited_ms >= (uint64_t)wanted->timeout_ms))
		return base_fail(error, wanted->timeout_ms < 0 ? -EAGAIN : -ETIMEDOUT,
				 "no slot of pool \"%s\" came free in %.1f s" BASE_REMEDY
				 "give it more time, or ask the operator for more slots",
				 pool, (double)waited_ms / 1e3);
	/* News of the slot may wake us more often. */
	if (!wanted->waiting ||
	    (attempt->told_ns && now - attempt->told_ns < base_ms_to_ns(PATIENCE_MS)))
		return 0;
	attempt->told_ns = now;
	describe_place(attempt, &place);
	if (wanted->waiting(wanted->waiting_user, &place))
		return base_refuse(error, -ECANCELED,
				   "waiting for a slot of pool \"%s\" was given up", pool);
	return 0;
}

/* How long until the caller is to be asked again. */
static int64_t patience_ms(const struct attempt *attempt)
{
	const int64_t timeout_ms = attempt->slot->wanted.timeout_ms;
	const int64_t waited_ms = (int64_t)((base_now_ns() - attempt->begin_ns) / 1000000);

	return timeout_ms > 0 ? MAX(MIN(PATIENCE_MS, timeout_ms - waited_ms), 1) : PATIENCE_MS;
}

/* Asks the caller, then sleeps until a slot changes, for `most_ms` at most. Under the lock, which
 * it lets go meanwhile. */
static int sleep_in_stage(struct attempt *attempt, int64_t most_ms, struct base_error *error)
{
	struct slots_slot *slot = attempt->slot;
	struct slots_pool *pool = slot->pool;
	const enum slots_stage stage = slot->stage;
	int ret;

	pthread_mutex_unlock(&pool->lock);
	ret = ask_caller(attempt, error);
	pthread_mutex_lock(&pool->lock);
	if (!ret && slot->stage == stage)
		base_cond_wait_ms(&pool->change, &pool->lock, MIN(most_ms, patience_ms(attempt)));
	return ret;
}

/* Under the lock. */
static void release_later(struct slots_pool *pool, const struct slots_slot *slot)
{
	const unsigned i = pool->unsent_count < SLOTS_UNSENT ? pool->unsent_count++ : 0;

	memcpy(pool->unsent[i].id, slot->request.id, sizeof(pool->unsent[i].id));
	pool->unsent[i].passed = atomic_load(&slot->passed);
	pool->unsent[i].until_ns = base_now_ns() + base_ms_to_ns(pool->config.lease_ms);
	slots_tell_thread(pool, base_now_ns(), false);
}

/* It may stand in the queue, in the way of others. Under the lock. */
static void go_without(struct slots_slot *slot)
{
	slot->stage = STAGE_WITHOUT;
	release_later(slot->pool, slot);
}

static bool is_last(const struct attempt *attempt)
{
	return attempt->last_ns && base_now_ns() >= attempt->last_ns;
}

/* Until the stage is another one. Under the lock, which it lets go meanwhile. */
static int wait_in_queue(struct attempt *attempt, struct base_error *error)
{
	struct slots_slot *slot = attempt->slot;
	struct slots_pool *pool = slot->pool;
	int ret = 0;

	/* It answered: the next time that it does not is counted by itself. */
	attempt->retry_ms = RETRY_FIRST_MS;
	attempt->alone_ns = 0;
	if (!slot->info.position) {
		slot->info.position = slot->answer.position + 1;
		snprintf(slot->info.ahead, sizeof(slot->info.ahead), "%s", slot->answer.ahead);
	}
	slots_tell_thread(pool, slot->beat_due_ns, true);
	while (!ret && slot->stage == STAGE_QUEUED) {
		if (is_last(attempt) && !slot->in_call) {
			go_without(slot);
			break;
		}
		ret = sleep_in_stage(attempt, PATIENCE_MS, error);
		/* No thread can be had: this one does its work. */
		slots_start_thread(pool);
		if (!pool->started && slot->stage == STAGE_QUEUED && !slot->in_call &&
		    base_now_ns() >= slot->beat_due_ns)
			slots_heartbeat(slot);
	}
	/* What was granted at the last moment is taken. */
	return slot->stage == STAGE_HELD ? 0 : ret;
}

/* ---- 3. Unreachable -------------------------------------------------------------------------- */

/* When this writer may go ahead without a slot. Under the lock. */
static uint64_t own_time(struct slots_pool *pool, const struct slots_wanted *wanted)
{
	const struct slots_config *config = &pool->config;
	const uint32_t capacity = pool->capacity           ? pool->capacity :
				  config->asked_capacity   ? config->asked_capacity :
				  wanted->default_capacity ? wanted->default_capacity :
							     config->default_capacity;
	const uint32_t write_ms = pool->write_ms ? pool->write_ms : FIRST_WRITE_MS;

	return base_now_ns() +
	       base_ms_to_ns(slots_stagger_ms(&config->identity, pool->round++, capacity, write_ms,
					      pool->policy.stagger_most_ms));
}

/* A random part of its last half: those that failed together do not come back together. */
static uint64_t with_jitter(uint64_t ms)
{
	return ms / 2 + base_random() % (ms / 2 + 1);
}

/*
 * Returns when the coordinator should be asked again; or in STAGE_WITHOUT, when the writer goes
 * ahead without a slot; or with a code. Under the lock, which it lets go meanwhile.
 */
static int wait_unreachable(struct attempt *attempt, struct base_error *error)
{
	struct slots_slot *slot = attempt->slot;
	struct slots_pool *pool = slot->pool;
	const uint64_t since_ns = atomic_load(&pool->unreachable_ns);
	uint64_t now = base_now_ns(), until = now + base_ms_to_ns(with_jitter(attempt->retry_ms));
	const bool restarting = now - since_ns < base_ms_to_ns(RESTART_MS);
	int ret = 0;

	/* It has answered to another slot meanwhile. */
	if (!since_ns)
		return 0;
	if (!restarting && pool->policy.unreachable == IOSHAPE_UNREACHABLE_FAIL &&
	    !attempt->last_ns) {
		*error = pool->unreachable_why;
		return error->code;
	}
	if (!restarting && pool->policy.unreachable == IOSHAPE_UNREACHABLE_STAGGER &&
	    !attempt->alone_ns)
		attempt->alone_ns = own_time(pool, &slot->wanted);
	if (attempt->last_ns)
		attempt->alone_ns = attempt->alone_ns ? MIN(attempt->alone_ns, attempt->last_ns) :
							attempt->last_ns;
	if (attempt->alone_ns)
		until = MIN(until, attempt->alone_ns);
	attempt->retry_ms = MIN(attempt->retry_ms * 2, RETRY_LAST_MS);
	for (; !ret && now < until; now = base_now_ns())
		ret = sleep_in_stage(attempt, (int64_t)((until - now) / 1000000) + 1, error);
	if (!ret && attempt->alone_ns && now >= attempt->alone_ns)
		go_without(slot);
	return ret;
}

/* ---- 4. Acquire ------------------------------------------------------------------------------ */

/* Until it is held, or the writer goes ahead without. Under the lock, let go meanwhile. */
static int acquire(struct attempt *attempt, struct base_error *error)
{
	struct slots_slot *slot = attempt->slot;
	int ret = ask(attempt, error);

	while (!ret && slot->stage != STAGE_HELD && slot->stage != STAGE_WITHOUT) {
		if (slot->stage == STAGE_QUEUED)
			ret = wait_in_queue(attempt, error);
		else if (slot->stage == STAGE_UNREACHABLE)
			ret = wait_unreachable(attempt, error);
		if (!ret && (slot->stage == STAGE_UNREACHABLE || slot->stage == STAGE_FORGOTTEN))
			ret = ask(attempt, error);
	}
	return ret;
}

/*
 * What is left of its deadline then is half of it, or as much as the latest writes took here if
 * that is more. Under the lock.
 */
static uint64_t last_moment(const struct attempt *attempt)
{
	const struct slots_slot *slot = attempt->slot;
	const uint64_t begin_ns = attempt->begin_ns, deadline_ns = slot->wanted.deadline_ns;
	const uint64_t all_ns = deadline_ns > begin_ns ? deadline_ns - begin_ns : 0;
	const uint64_t write_ns = base_ms_to_ns(slot->pool->write_ms);

	return deadline_ns ? begin_ns + all_ns - MIN(all_ns, MAX(all_ns / 2, write_ns)) : 0;
}

/* "CLIENT-NUMBER". Each turn takes one; snprintf() would take a tenth of a local turn. */
static void name_request(char id[SLOTS_ID_BYTES], const char *client, uint64_t number)
{
	char digits[20], *first = digits + sizeof(digits);
	char *end = id + strlen(client);

	do {
		*--first = (char)('0' + number % 10);
	} while (number /= 10);
	memcpy(id, client, (size_t)(end - id));
	*end++ = '-';
	memcpy(end, first, (size_t)(digits + sizeof(digits) - first));
	end[digits + sizeof(digits) - first] = 0;
}

static struct slots_slot *new_slot(struct slots_pool *pool, const struct slots_wanted *wanted)
{
	struct slots_slot *slot = calloc(1, sizeof(*slot));

	if (!slot)
		return NULL;
	slot->pool = pool;
	slot->wanted = *wanted;
	slot->request.weight = wanted->weight;
	slot->request.bytes = wanted->bytes;
	slot->request.never_wait = wanted->timeout_ms < 0;
	slot->request.urgent = wanted->deadline_ns > 0;
	slot->request.default_capacity = wanted->default_capacity;
	slot->info.size = sizeof(slot->info);
	return slot;
}

/* Under the lock. */
static void tell_cost(struct slots_slot *slot, uint64_t now_ns)
{
	const struct slots_stake stake = {
		.ranks = slot->pool->config.identity.ranks,
		.writers = slot->wanted.writers,
		.bytes = slot->wanted.bytes,
		.age_ns = slots_checkpoints_begin(&slot->pool->checkpoints, now_ns),
		.holds_up = slot->wanted.holds_up,
	};

	if (base_without("boosts"))
		slot->request.boost_ms = 0;
	else if (slot->wanted.yields)
		slot->request.boost_ms = -SLOTS_MOST_BOOST_MS;
	else
		slot->request.boost_ms = slots_boost_ms(&stake);
}

/* Says once that the processes of one host have no shares. Under the lock. */
static void note_ignored_share(struct slots_pool *pool, struct ioshape_slot_info *info)
{
	if (pool->ops != &slots_local || pool->told_ignored ||
	    pool->config.identity.share == SLOTS_USUAL_SHARE)
		return;
	pool->told_ignored = true;
	snprintf(info->note, sizeof(info->note),
		 "the share was not obeyed: the processes of one host write in the order in which "
		 "they ask; use a Redis as coordinator");
	base_log(&pool->config.log, IOSHAPE_LOG_WARNING, "%s", info->note);
}

/* What reports say of it. Under the lock. */
static void fill_info(const struct attempt *attempt)
{
	struct slots_slot *slot = attempt->slot;
	const struct slots_pool *pool = slot->pool;
	struct ioshape_slot_info *info = &slot->info;
	const bool without = slot->stage == STAGE_WITHOUT, open = pool->ops == &slots_open;
	const bool unreachable = pool->unreachable_ns != 0;

	info->waited_s = base_seconds(slot->held_ns - attempt->begin_ns);
	info->capacity = pool->capacity;
	info->fence = without ? 0 : slot->answer.fence;
	info->express = !without && !open && !slot->answer.weight;
	memccpy(info->coordinator,
		!without    ? pool->ops->id :
		unreachable ? "stagger" :
			      "deadline",
		0, sizeof(info->coordinator) - 1);
	if (!open)
		memcpy(info->pool, pool->config.pool, sizeof(info->pool));
	if (without)
		snprintf(info->note, sizeof(info->note),
			 unreachable ?
				 "no slot was acquired, the writer waited %.1f s for a time "
				 "of its own: %.180s" :
				 "no slot was acquired in %.1f s, and the deadline comes near",
			 info->waited_s, pool->unreachable_why.text);
	else
		note_ignored_share(slot->pool, info);
}

int slots_acquire(struct slots_pool *pool, const struct slots_wanted *wanted,
		  struct slots_slot **out, struct base_error *error)
{
	struct attempt attempt = { .begin_ns = base_now_ns(), .retry_ms = RETRY_FIRST_MS };
	struct slots_slot *slot = new_slot(pool, wanted);
	int ret;

	*out = NULL;
	if (!slot)
		return base_no_memory(error, "a slot", sizeof(*slot));
	attempt.slot = slot;
	pthread_mutex_lock(&pool->lock);
	name_request(slot->request.id, pool->config.identity.client, pool->next_number++);
	slot->next = pool->slots;
	pool->slots = slot;
	attempt.last_ns = last_moment(&attempt);
	tell_cost(slot, base_now_ns());
	ret = acquire(&attempt, error);
	if (!ret) {
		slot->held_ns = base_now_ns();
		fill_info(&attempt);
		if (slot->stage == STAGE_HELD && pool->ops != &slots_open)
			slots_tell_thread(pool, slot->beat_due_ns, false);
		*out = slot;
	} else if (slot->stage == STAGE_FORGOTTEN) {
		slot->stage = STAGE_WITHOUT;
	}
	pthread_mutex_unlock(&pool->lock);
	/* It may stand in the queue, or be granted just now. */
	if (ret)
		slots_release(slot);
	return ret;
}

/* ---- 5. Release ------------------------------------------------------------------------------ */

void slots_info(struct slots_slot *slot, struct ioshape_slot_info *info)
{
	pthread_mutex_lock(&slot->pool->lock);
	*info = slot->info;
	pthread_mutex_unlock(&slot->pool->lock);
}

uint32_t slots_place(struct slots_slot *slot)
{
	uint32_t place;

	if (base_without("places"))
		return 0;
	pthread_mutex_lock(&slot->pool->lock);
	place = slot->stage == STAGE_HELD && slot->wanted.default_capacity ? slot->answer.place : 0;
	pthread_mutex_unlock(&slot->pool->lock);
	return place;
}

/* Under the lock. */
static void learn_write_time(struct slots_pool *pool, const struct slots_slot *slot)
{
	uint64_t write_ms = (base_now_ns() - slot->held_ns) / 1000000;

	if (!slot->held_ns)
		return;
	write_ms = MIN(MAX(write_ms, 1), UINT32_MAX / 2);
	pool->write_ms = pool->write_ms ? (uint32_t)((3ull * pool->write_ms + write_ms) / 4) :
					  (uint32_t)write_ms;
}

/* Under the lock. */
static void unlink_slot(struct slots_slot *slot)
{
	struct slots_slot **link = &slot->pool->slots;

	while (*link != slot)
		link = &(*link)->next;
	*link = slot->next;
}

void slots_release(struct slots_slot *slot)
{
	struct slots_pool *pool;
	bool tell, unreachable;

	if (!slot)
		return;
	pool = slot->pool;
	slots_pace_end(slot);
	pthread_mutex_lock(&pool->lock);
	while (slot->in_call)
		pthread_cond_wait(&pool->change, &pool->lock);
	unlink_slot(slot);
	slots_watch_leases(pool);
	learn_write_time(pool, slot);
	slots_checkpoints_end(&pool->checkpoints, base_now_ns());
	tell = slot->stage != STAGE_WITHOUT;
	unreachable = pool->unreachable_ns != 0;
	pthread_mutex_unlock(&pool->lock);
	if (tell && (unreachable || pool->ops->release(pool->coordinator, slot->request.id,
						       atomic_load(&slot->passed), NULL))) {
		pthread_mutex_lock(&pool->lock);
		release_later(pool, slot);
		pthread_mutex_unlock(&pool->lock);
	}
	free(slot);
}
