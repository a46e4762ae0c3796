/* SPDX-License-Identifier: Apache-2.0 */
/*
 * How a slot is acquired, in the order in which it happens:
 *
 *   1. Ask        the thread that wants a slot asks the coordinator, which grants it at once,
 *                 queues it, or does not answer.
 *   2. Queue      a queued thread sleeps until the pool's thread has news of its slot; it wakes
 *                 only to ask its caller whether to go on.
 *   3. Wake       the pool's thread waits for the coordinator's wakes. A wake is a hint: it sends a
 *                 heartbeat for every queued slot, and the answer says whether that was granted.
 *                 The same thread sends the heartbeats of slots that are held (heartbeat.c).
 *   4. Unreachable  a coordinator that does not answer is asked again, with growing pauses, until
 *                 it answers, or until the policy lets the writer go ahead without a slot or fail.
 *   5. Acquire    all of it together: what happens next follows from the slot's stage.
 *   6. Release    the coordinator is told; if it cannot be reached, later, by the pool's thread.
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

/* Looks without anything to do before the pool's thread goes to sleep. */
#define IDLE_LOOKS 10

/* One call of slots_acquire(). */
struct attempt {
	struct slots_slot *slot;
	uint64_t begin_ns;
	uint64_t retry_ms; /* the next pause */
	uint64_t alone_ns; /* when it may write without a slot; 0: not decided */
	uint64_t told_ns;  /* when the caller was last asked; 0: never */
};

/* ---- 1. Ask ---------------------------------------------------------------------------------- */

/* Under the lock, which it lets go meanwhile. Sets the stage. */
static int ask(struct attempt *attempt, struct base_error *error)
{
	struct slots_slot *slot = attempt->slot;
	struct slots_pool *pool = slot->pool;
	struct base_error why = { 0 };
	struct slots_answer answer;
	uint64_t sent_ns;
	int ret;

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

static void start_thread(struct slots_pool *pool);
static void tell_thread(struct slots_pool *pool, uint64_t due_ns, bool queued);

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
	tell_thread(pool, slot->beat_due_ns, true);
	while (!ret && slot->stage == STAGE_QUEUED) {
		ret = sleep_in_stage(attempt, PATIENCE_MS, error);
		/* No thread can be had: this one does its work. */
		start_thread(pool);
		if (!pool->started && slot->stage == STAGE_QUEUED && !slot->in_call &&
		    base_now_ns() >= slot->beat_due_ns)
			slots_heartbeat(slot);
	}
	/* What was granted at the last moment is taken. */
	return slot->stage == STAGE_HELD ? 0 : ret;
}

/* ---- 3. Wake: the pool's thread -------------------------------------------------------------- */

struct outlook {
	bool queued;     /* a slot is in the queue */
	bool busy;       /* there is something to look after at all */
	uint64_t due_ns; /* when, at the latest */
};

static struct outlook look_around(const struct slots_pool *pool, uint64_t now)
{
	const uint64_t look_ns = base_ms_to_ns(pool->config.lease_ms) / SLOTS_LOOKS_PER_LEASE;
	struct outlook outlook = { .due_ns = now + look_ns };

	for (const struct slots_slot *slot = pool->slots; slot; slot = slot->next) {
		const bool queued = slot->stage == STAGE_QUEUED, held = slot->stage == STAGE_HELD;

		outlook.queued |= queued;
		outlook.busy |= queued || held;
		if (queued || held)
			outlook.due_ns = MIN(outlook.due_ns, slot->beat_due_ns);
		if (held)
			outlook.due_ns = MIN(outlook.due_ns, slot->lease_end_ns);
	}
	if (pool->unsent_count) {
		outlook.busy = true;
		outlook.due_ns = MIN(outlook.due_ns, now + slots_retry_ns(pool));
	}
	return outlook;
}

/* For a wake of the coordinator's. Under the lock, which it lets go meanwhile. */
static void wait_for_wake(struct slots_pool *pool, uint32_t wait_ms)
{
	struct base_error error = { 0 };
	int ret;

	pool->in_wait = true;
	pthread_mutex_unlock(&pool->lock);
	ret = pool->ops->wait(pool->coordinator, wait_ms, &error);
	pthread_mutex_lock(&pool->lock);
	pool->in_wait = false;
	if (ret && pool->no_wakes) {
		if (!pool->stop && wait_ms)
			base_cond_wait_ms(&pool->thread_change, &pool->lock, wait_ms);
		return;
	}
	pool->no_wakes = ret != 0;
	if (ret)
		base_log(&pool->config.log, IOSHAPE_LOG_DEBUG,
			 "wakes of pool \"%s\" cannot be waited for: %s; heartbeats alone tell of "
			 "a grant",
			 pool->config.pool, error.text);
	/* It may have been for any of them, and it may be that the coordinator cannot be reached.
	 * The answers to heartbeats tell. */
	for (struct slots_slot *slot = pool->slots; slot; slot = slot->next) {
		if (slot->stage == STAGE_QUEUED)
			slot->beat_due_ns = 0;
	}
}

/* Until something is due, or heard. Under the lock, which it lets go meanwhile. */
static void wait_for_news(struct slots_pool *pool, const struct outlook *outlook, uint64_t now)
{
	uint32_t wait_ms = 0;

	if (outlook->due_ns > now)
		wait_ms = (uint32_t)((outlook->due_ns - now) / 1000000 + 1);
	pool->thread_wakes_ns = outlook->due_ns;
	if (outlook->queued)
		wait_for_wake(pool, wait_ms);
	else if (wait_ms)
		base_cond_wait_ms(&pool->thread_change, &pool->lock, wait_ms);
}

static void look_after_all(struct slots_pool *pool)
{
	struct slots_slot *slot = pool->slots;
	const uint64_t now = base_now_ns();

	/* A slot that was looked after is not due again, so this ends. */
	while (slot)
		slot = slots_look_after(slot, now) ? pool->slots : slot->next;
}

/* Releases that did not reach the coordinator. Under the lock, which it lets go meanwhile. */
static void send_unsent(struct slots_pool *pool)
{
	struct base_error error = { 0 };
	char id[SLOTS_ID_BYTES];
	uint64_t passed;
	int ret = 0;

	while (!ret && pool->unsent_count && !pool->stop) {
		const unsigned last = pool->unsent_count - 1;

		if (base_now_ns() >= pool->unsent[last].until_ns) {
			pool->unsent_count--;
			continue;
		}
		memcpy(id, pool->unsent[last].id, sizeof(id));
		passed = pool->unsent[last].passed;
		pthread_mutex_unlock(&pool->lock);
		ret = pool->ops->release(pool->coordinator, id, passed, &error);
		pthread_mutex_lock(&pool->lock);
		if (ret)
			continue;
		slots_note_reachable(pool);
		/* Others may have come behind it, or taken its place, meanwhile. */
		for (unsigned i = 0; i < pool->unsent_count; i++) {
			if (!strcmp(pool->unsent[i].id, id))
				pool->unsent[i] = pool->unsent[--pool->unsent_count];
		}
	}
}

/*
 * It is not woken for every slot that comes and goes: it looks by itself several times in the
 * shortest time in which a heartbeat can become due, and sleeps only when there has been nothing to
 * look after for a while.
 */
static void *run_thread(void *argument)
{
	struct slots_pool *pool = argument;
	unsigned idle = 0;

	pthread_mutex_lock(&pool->lock);
	while (!pool->stop) {
		const uint64_t now = base_now_ns();
		const struct outlook outlook = look_around(pool, now);

		idle = outlook.busy ? 0 : idle + 1;
		if (idle > IDLE_LOOKS) {
			pool->ops->rest(pool->coordinator);
			pool->asleep = true;
			pthread_cond_wait(&pool->thread_change, &pool->lock);
			pool->asleep = false;
			idle = 0;
			continue;
		}
		wait_for_news(pool, &outlook, now);
		look_after_all(pool);
		send_unsent(pool);
	}
	pthread_mutex_unlock(&pool->lock);
	return NULL;
}

/* Under the lock. If it cannot be started, a queued slot's own thread does its work, and a held
 * slot ends with its lease. */
static void start_thread(struct slots_pool *pool)
{
	if (pool->started || pool->stop)
		return;
	pool->thread_wakes_ns = 0;
	pool->started = !base_start_thread(&pool->thread, run_thread, pool);
}

/* There is something to look after by then, or a slot that is queued: wakes are waited for from now
 * on. Under the lock. */
static void tell_thread(struct slots_pool *pool, uint64_t due_ns, bool queued)
{
	const bool earlier = due_ns < pool->thread_wakes_ns;

	start_thread(pool);
	if (pool->in_wait && earlier)
		pool->ops->interrupt(pool->coordinator);
	else if (!pool->in_wait && (queued || earlier || pool->asleep))
		pthread_cond_signal(&pool->thread_change);
}

void slots_stop(struct slots_pool *pool)
{
	pthread_mutex_lock(&pool->lock);
	pool->stop = true;
	if (pool->started) {
		pthread_cond_signal(&pool->thread_change);
		pool->ops->interrupt(pool->coordinator);
	}
	pthread_mutex_unlock(&pool->lock);
	if (pool->started)
		pthread_join(pool->thread, NULL);
}

/* ---- 4. Unreachable -------------------------------------------------------------------------- */

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

/* Under the lock. */
static void release_later(struct slots_pool *pool, const struct slots_slot *slot)
{
	const unsigned i = pool->unsent_count < SLOTS_UNSENT ? pool->unsent_count++ : 0;

	memcpy(pool->unsent[i].id, slot->request.id, sizeof(pool->unsent[i].id));
	pool->unsent[i].passed = atomic_load(&slot->passed);
	pool->unsent[i].until_ns = base_now_ns() + base_ms_to_ns(pool->config.lease_ms);
	tell_thread(pool, base_now_ns(), false);
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
	if (!restarting && pool->policy.unreachable == IOSHAPE_UNREACHABLE_FAIL) {
		*error = pool->unreachable_why;
		return error->code;
	}
	if (!restarting && pool->policy.unreachable == IOSHAPE_UNREACHABLE_STAGGER &&
	    !attempt->alone_ns)
		attempt->alone_ns = own_time(pool, &slot->wanted);
	if (attempt->alone_ns)
		until = MIN(until, attempt->alone_ns);
	attempt->retry_ms = MIN(attempt->retry_ms * 2, RETRY_LAST_MS);
	for (; !ret && now < until; now = base_now_ns())
		ret = sleep_in_stage(attempt, (int64_t)((until - now) / 1000000) + 1, error);
	if (!ret && attempt->alone_ns && now >= attempt->alone_ns) {
		slot->stage = STAGE_WITHOUT;
		/* It may stand in the queue, in the way of others. */
		release_later(pool, slot);
	}
	return ret;
}

/* ---- 5. Acquire ------------------------------------------------------------------------------ */

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
	slot->request.default_capacity = wanted->default_capacity;
	slot->info.size = sizeof(slot->info);
	return slot;
}

/* What reports say of it. Under the lock. */
static void fill_info(const struct attempt *attempt)
{
	struct slots_slot *slot = attempt->slot;
	const struct slots_pool *pool = slot->pool;
	struct ioshape_slot_info *info = &slot->info;
	const bool without = slot->stage == STAGE_WITHOUT, open = pool->ops == &slots_open;

	info->waited_s = base_seconds(slot->held_ns - attempt->begin_ns);
	info->capacity = pool->capacity;
	info->fence = without ? 0 : slot->answer.fence;
	info->express = !without && !open && !slot->answer.weight;
	memccpy(info->coordinator, without ? "stagger" : pool->ops->id, 0,
		sizeof(info->coordinator) - 1);
	if (!open)
		memcpy(info->pool, pool->config.pool, sizeof(info->pool));
	if (without)
		snprintf(info->note, sizeof(info->note),
			 "no slot was acquired, the writer waited %.1f s for a time of its own: "
			 "%.180s",
			 info->waited_s, pool->unreachable_why.text);
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
	snprintf(slot->request.id, sizeof(slot->request.id), "%s-%llu",
		 pool->config.identity.client, (unsigned long long)pool->next_number++);
	slot->next = pool->slots;
	pool->slots = slot;
	ret = acquire(&attempt, error);
	if (!ret) {
		slot->held_ns = base_now_ns();
		fill_info(&attempt);
		if (slot->stage == STAGE_HELD && pool->ops != &slots_open)
			tell_thread(pool, slot->beat_due_ns, false);
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

/* ---- 6. Release ------------------------------------------------------------------------------ */

void slots_info(struct slots_slot *slot, struct ioshape_slot_info *info)
{
	pthread_mutex_lock(&slot->pool->lock);
	*info = slot->info;
	pthread_mutex_unlock(&slot->pool->lock);
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
