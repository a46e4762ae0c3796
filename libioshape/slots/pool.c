/* SPDX-License-Identifier: Apache-2.0 */
/* Slots as this process comes by them: asking, waiting, and doing without. */
#include "slots/pool.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* How often who waits is asked whether it should go on. */
#define PATIENCE_MS 100

/* A coordinator that is being restarted is waited for, before we do without it. */
#define RESTART_MS 2000u

/* Asking a coordinator that does not answer: at first so often, then ever less. */
#define RETRY_FIRST_MS 50
#define RETRY_LAST_MS 1000

/* What a write is taken to last before one has been seen. */
#define FIRST_WRITE_MS 1000u

static double seconds_since(uint64_t begin_ns)
{
	return base_seconds(base_now_ns() - begin_ns);
}

/* ---- Pools ----------------------------------------------------------------------------------- */

static void free_pool(struct slots_pool *pool)
{
	base_free_secret(pool->password);
	base_free_secret(pool->address);
	pthread_cond_destroy(&pool->thread_change);
	pthread_cond_destroy(&pool->change);
	pthread_mutex_destroy(&pool->lock);
	free(pool);
}

int slots_pool_open(struct slots_pool **out, const struct slots_config *config,
		    const struct slots_policy *policy, struct base_error *error)
{
	struct slots_pool *pool = calloc(1, sizeof(*pool));
	int ret;

	*out = NULL;
	if (!pool)
		return base_no_memory(error, "a pool of slots", sizeof(*pool));
	pthread_mutex_init(&pool->lock, NULL);
	base_cond_init(&pool->change);
	base_cond_init(&pool->thread_change);
	pool->config = *config;
	pool->policy = *policy;
	pool->address = strdup(config->address);
	pool->password = config->password ? strdup(config->password) : NULL;
	if (!pool->address || (config->password && !pool->password)) {
		ret = base_no_memory(error, "a pool of slots", sizeof(*pool));
		goto fail;
	}
	pool->config.address = pool->address;
	pool->config.password = pool->password;
	pool->ops = slots_coordinator_of(pool->address);
	if (!pool->ops) {
		ret = base_fail(
			error, -EINVAL,
			"the coordinator's address begins with no word that is known here; it "
			"takes local, open, redis://, rediss://, unix:// or sentinel://");
		goto fail;
	}
	ret = pool->ops->open(&pool->coordinator, &pool->config, error);
	if (ret)
		goto fail;
	*out = pool;
	return 0;
fail:
	free_pool(pool);
	return ret;
}

void slots_pool_close(struct slots_pool *pool)
{
	if (!pool)
		return;
	slots_beats_stop(pool);
	pool->ops->close(pool->coordinator);
	free_pool(pool);
}

const char *slots_pool_name(const struct slots_pool *pool)
{
	return pool->config.pool;
}

const struct slots_ops *slots_pool_ops(const struct slots_pool *pool, void **coordinator)
{
	*coordinator = pool->coordinator;
	return pool->ops;
}

/* ---- Out of reach ---------------------------------------------------------------------------- */

void slots_note_back(struct slots_pool *pool)
{
	if (!pool->away_ns)
		return;
	base_log(&pool->config.log, IOSHAPE_LOG_INFO,
		 "the coordinator of pool %s is back after %.1f s; saves take turns again",
		 pool->config.pool, seconds_since(pool->away_ns));
	pool->away_ns = 0;
}

void slots_note_away(struct slots_pool *pool, const struct base_error *error)
{
	static const char *const until[] = {
		"saves go on, each at a time of its own",
		"saves wait until it is back",
		"saves fail until it is back",
	};

	pool->away_why = *error;
	if (pool->away_ns)
		return;
	pool->away_ns = base_now_ns();
	base_log(&pool->config.log, IOSHAPE_LOG_WARNING, "%s; %s", error->text,
		 until[pool->policy.away]);
}

/* ---- Waiting --------------------------------------------------------------------------------- */

/* One request on its way. */
struct attempt {
	struct slots_slot *slot;
	uint64_t begin_ns;
	uint64_t retry_ms;   /* the next time the coordinator does not answer */
	uint64_t stagger_ns; /* when it may write without a slot; 0: not decided */
	uint64_t told_ns;    /* when who waits was asked last; 0: never */
};

/* Asks who waits. Without the lock. */
static int ask_to_go_on(struct attempt *attempt, bool away, struct base_error *error)
{
	struct slots_slot *slot = attempt->slot;
	const struct slots_wish *wish = &slot->wish;
	struct ioshape_place place = { .size = sizeof(place) };
	struct slots_pool *pool = slot->pool;
	const uint64_t now = base_now_ns();
	uint64_t waited_ms = (now - attempt->begin_ns) / 1000000;

	if (wish->timeout_ms && (wish->timeout_ms < 0 || waited_ms >= (uint64_t)wish->timeout_ms))
		return base_fail(
			error, wish->timeout_ms < 0 ? -EAGAIN : -ETIMEDOUT,
			"no slot of pool %s came free in %.1f s; give it more time, or ask "
			"the operator for more slots",
			pool->config.pool, (double)waited_ms / 1e3);
	/* Signs of life may wake us more often. */
	if (!wish->waiting ||
	    (attempt->told_ns && now - attempt->told_ns < base_ms_to_ns(PATIENCE_MS)))
		return 0;
	attempt->told_ns = now;
	pthread_mutex_lock(&pool->lock);
	place.position = slot->answer.position;
	place.capacity = pool->capacity;
	snprintf(place.ahead, sizeof(place.ahead), "%s", slot->answer.ahead);
	pthread_mutex_unlock(&pool->lock);
	place.waited_s = seconds_since(attempt->begin_ns);
	snprintf(place.pool, sizeof(place.pool), "%s", pool->config.pool);
	snprintf(place.coordinator, sizeof(place.coordinator), "%s", away ? "away" : pool->ops->id);
	if (wish->waiting(wish->waiting_user, &place))
		return base_fail(error, -ECANCELED, "waiting for a slot of pool %s was given up",
				 pool->config.pool);
	return 0;
}

/* How long until who waits wants to be asked again. */
static int64_t patience_ms(const struct attempt *attempt)
{
	const int64_t timeout_ms = attempt->slot->wish.timeout_ms;
	int64_t waited_ms = (int64_t)((base_now_ns() - attempt->begin_ns) / 1000000);

	return timeout_ms > 0 ? MAX(MIN(PATIENCE_MS, timeout_ms - waited_ms), 1) : PATIENCE_MS;
}

/* Until the pool's thread hears something of it. The lock is held, and let go while asking. */
static int wait_in_queue(struct attempt *attempt, struct base_error *error)
{
	struct slots_slot *slot = attempt->slot;
	struct slots_pool *pool = slot->pool;
	int ret = 0;

	slots_beats_queue(pool, slot->beat_due_ns);
	while (!ret && slot->stage == STAGE_QUEUED) {
		pthread_mutex_unlock(&pool->lock);
		ret = ask_to_go_on(attempt, false, error);
		pthread_mutex_lock(&pool->lock);
		if (!pool->started)
			slots_beats_by_hand(slot);
		if (!ret && slot->stage == STAGE_QUEUED)
			base_cond_wait_ms(&pool->change, &pool->lock, patience_ms(attempt));
	}
	/* What was granted at the last moment is taken. */
	return slot->stage == STAGE_HELD ? 0 : ret;
}

/* When this writer may go ahead, if nobody tells it before. The lock is held. */
static uint64_t own_time(struct slots_pool *pool, const struct slots_wish *wish)
{
	uint32_t capacity = pool->capacity              ? pool->capacity :
			    pool->config.asked_capacity ? pool->config.asked_capacity :
			    wish->default_capacity      ? wish->default_capacity :
							  pool->config.default_capacity;
	uint32_t stagger_ms;

	stagger_ms = slots_stagger_ms(&pool->config.identity, pool->round++, capacity,
				      pool->write_ms ? pool->write_ms : FIRST_WRITE_MS,
				      pool->policy.stagger_most_ms);
	return base_now_ns() + base_ms_to_ns(stagger_ms);
}

/* A random part of the last half of it: those that failed together do not come back together. */
static uint64_t with_jitter(uint64_t ms)
{
	uint64_t chance = base_now_ns() * 0x9e3779b97f4a7c15;

	return ms / 2 + (chance >> 33) % (ms / 2 + 1);
}

/* The pool's thread says it as soon as the coordinator listens. The lock is held. */
static void say_later(struct slots_pool *pool, const struct slots_slot *slot)
{
	unsigned i = pool->unsaid_count < SLOTS_UNSAID ? pool->unsaid_count++ : 0;

	memcpy(pool->unsaid[i].id, slot->request.id, sizeof(pool->unsaid[i].id));
	pool->unsaid[i].passed = atomic_load(&slot->passed);
	pool->unsaid[i].until_ns = base_now_ns() + base_ms_to_ns(pool->config.lease_ms);
	slots_beats_need(pool, base_now_ns());
}

/*
 * The coordinator did not answer. Returns when it should be asked again, or with STAGE_FREE when
 * the writer goes ahead without it, or with a code. The lock is held, and let go while waiting.
 */
static int wait_while_away(struct attempt *attempt, struct base_error *error)
{
	struct slots_slot *slot = attempt->slot;
	struct slots_pool *pool = slot->pool;
	uint64_t now = base_now_ns(), until = now + base_ms_to_ns(with_jitter(attempt->retry_ms));
	const uint64_t away_ns = atomic_load(&pool->away_ns);
	bool restarting = now - away_ns < base_ms_to_ns(RESTART_MS);
	int ret = 0;

	/* It has answered to another slot meanwhile. */
	if (!away_ns)
		return 0;
	attempt->retry_ms = MIN(attempt->retry_ms * 2, RETRY_LAST_MS);
	if (!restarting && pool->policy.away == IOSHAPE_AWAY_FAIL) {
		*error = pool->away_why;
		return error->code;
	}
	if (!restarting && pool->policy.away == IOSHAPE_AWAY_STAGGER && !attempt->stagger_ns)
		attempt->stagger_ns = own_time(pool, &attempt->slot->wish);
	if (attempt->stagger_ns)
		until = MIN(until, attempt->stagger_ns);
	while (!ret && now < until) {
		pthread_mutex_unlock(&pool->lock);
		ret = ask_to_go_on(attempt, true, error);
		pthread_mutex_lock(&pool->lock);
		if (!ret)
			base_cond_wait_ms(
				&pool->change, &pool->lock,
				MIN((int64_t)((until - now) / 1000000) + 1, patience_ms(attempt)));
		now = base_now_ns();
	}
	if (!ret && attempt->stagger_ns && now >= attempt->stagger_ns) {
		slot->stage = STAGE_FREE;
		/* It may stand in the queue, in the way of others. */
		say_later(pool, slot);
	}
	return ret;
}

/* ---- Acquiring ------------------------------------------------------------------------------- */

/* One question, without the lock while it is under way. */
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
		ret = base_fail(&why, IOSHAPE_E_COORDINATOR,
				"the coordinator of pool %s does not keep a request; is it of this "
				"version?",
				pool->config.pool);
	/* Whatever it is: no save fails because of it, unless it was told to. */
	if (ret) {
		slots_note_away(pool, &why);
		slot->stage = STAGE_AWAY;
		return 0;
	}
	slots_note_back(pool);
	slots_take_answer(slot, &answer, sent_ns);
	if (slot->stage == STAGE_UNKNOWN)
		return base_fail(error, -EAGAIN, "no slot of pool %s is free", pool->config.pool);
	return 0;
}

/* The lock is held. */
static int acquire(struct attempt *attempt, struct base_error *error)
{
	struct slots_slot *slot = attempt->slot;
	bool queued = false;
	int ret;

	ret = ask(attempt, error);
	while (!ret && slot->stage != STAGE_HELD && slot->stage != STAGE_FREE) {
		if (!queued && slot->stage == STAGE_QUEUED) {
			queued = true;
			slot->info.position = slot->answer.position + 1;
			snprintf(slot->info.ahead, sizeof(slot->info.ahead), "%s",
				 slot->answer.ahead);
		}
		if (slot->stage == STAGE_QUEUED)
			ret = wait_in_queue(attempt, error);
		else if (slot->stage == STAGE_AWAY)
			ret = wait_while_away(attempt, error);
		if (!ret && slot->stage != STAGE_HELD && slot->stage != STAGE_QUEUED &&
		    slot->stage != STAGE_FREE)
			ret = ask(attempt, error);
		/* The next time it is away begins anew. */
		if (slot->stage == STAGE_QUEUED) {
			attempt->retry_ms = RETRY_FIRST_MS;
			attempt->stagger_ns = 0;
		}
	}
	return ret;
}

static struct slots_slot *new_slot(struct slots_pool *pool, const struct slots_wish *wish)
{
	struct slots_slot *slot = calloc(1, sizeof(*slot));

	if (!slot)
		return NULL;
	slot->pool = pool;
	slot->wish = *wish;
	slot->request.weight = wish->weight;
	slot->request.bytes = wish->bytes;
	slot->request.never_wait = wish->timeout_ms < 0;
	slot->request.default_capacity = wish->default_capacity;
	slot->info.size = sizeof(slot->info);
	return slot;
}

static void take_leave(struct slots_slot *slot)
{
	struct slots_slot **link = &slot->pool->slots;

	while (*link != slot)
		link = &(*link)->next;
	*link = slot->next;
}

/* What the report will say of a slot that was come by. The lock is held. */
static void fill_info(const struct attempt *attempt)
{
	struct slots_slot *slot = attempt->slot;
	const struct slots_pool *pool = slot->pool;
	struct ioshape_slot_info *info = &slot->info;
	bool free_for_all = slot->stage == STAGE_FREE;

	info->waited_s = base_seconds(slot->held_ns - attempt->begin_ns);
	info->capacity = pool->capacity;
	info->fence = free_for_all ? 0 : slot->answer.fence;
	info->express = !free_for_all && pool->ops != &slots_open && !slot->answer.weight;
	memccpy(info->coordinator, free_for_all ? "stagger" : pool->ops->id, 0,
		sizeof(info->coordinator) - 1);
	if (pool->ops != &slots_open)
		memcpy(info->pool, pool->config.pool, sizeof(info->pool));
	if (free_for_all)
		snprintf(
			info->note, sizeof(info->note),
			"no slot was taken, the writer waited %.1f s for a time of its own: %.180s",
			info->waited_s, pool->away_why.text);
}

int slots_acquire(struct slots_pool *pool, const struct slots_wish *wish, struct slots_slot **out,
		  struct base_error *error)
{
	struct attempt attempt = { .begin_ns = base_now_ns(), .retry_ms = RETRY_FIRST_MS };
	struct slots_slot *slot = new_slot(pool, wish);
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
		*out = slot;
	} else if (slot->stage == STAGE_UNKNOWN) {
		slot->stage = STAGE_FREE;
	}
	pthread_mutex_unlock(&pool->lock);
	/* It may stand in the queue, or be granted just now. */
	if (ret)
		slots_release(slot);
	return ret;
}

/* ---- Holding and releasing ------------------------------------------------------------------- */

void slots_info(struct slots_slot *slot, struct ioshape_slot_info *info)
{
	pthread_mutex_lock(&slot->pool->lock);
	*info = slot->info;
	pthread_mutex_unlock(&slot->pool->lock);
}

static void learn_write_time(struct slots_pool *pool, const struct slots_slot *slot)
{
	uint64_t write_ms = (base_now_ns() - slot->held_ns) / 1000000;

	if (!slot->held_ns)
		return;
	write_ms = MIN(MAX(write_ms, 1), UINT32_MAX / 2);
	pool->write_ms = pool->write_ms ? (uint32_t)((3ull * pool->write_ms + write_ms) / 4) :
					  (uint32_t)write_ms;
}

void slots_release(struct slots_slot *slot)
{
	struct slots_pool *pool;
	bool say, away;

	if (!slot)
		return;
	pool = slot->pool;
	slots_pace_end(slot);
	pthread_mutex_lock(&pool->lock);
	while (slot->beating)
		pthread_cond_wait(&pool->change, &pool->lock);
	take_leave(slot);
	slots_watch_leases(pool);
	learn_write_time(pool, slot);
	say = slot->stage != STAGE_FREE;
	away = pool->away_ns != 0;
	pthread_mutex_unlock(&pool->lock);
	if (say && (away || pool->ops->release(pool->coordinator, slot->request.id,
					       atomic_load(&slot->passed), NULL))) {
		pthread_mutex_lock(&pool->lock);
		say_later(pool, slot);
		pthread_mutex_unlock(&pool->lock);
	}
	free(slot);
}
