/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The thread of a pool: signs of life for all that wait or hold, and what they hear in answer.
 *
 * It is not woken for every slot that comes and goes: it looks by itself several times in the
 * shortest time in which a sign of life can become due, and sleeps only when there has been nothing
 * to look after for a while.
 */
#include "slots/pool.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>

/* Looks per lease. The first sign of life is due after a third of it. */
#define LOOKS 6

/* Looks without anything to do before it goes to sleep. */
#define IDLE_LOOKS 10

/* The coordinator did not answer: ask again so soon. */
#define RETRY_MS 250

static uint64_t retry_ns(const struct slots_pool *pool)
{
	return base_ms_to_ns(MIN(RETRY_MS, pool->config.lease_ms / LOOKS));
}

/* ---- Answers --------------------------------------------------------------------------------- */

void slots_watch_leases(struct slots_pool *pool)
{
	uint64_t until_ns = 0;

	for (const struct slots_slot *slot = pool->slots; slot; slot = slot->next) {
		if (slot->stage == STAGE_HELD && (!until_ns || slot->lease_end_ns < until_ns))
			until_ns = slot->lease_end_ns;
	}
	pool->ops->hurry(pool->coordinator, until_ns);
}

void slots_take_answer(struct slots_slot *slot, const struct slots_answer *answer, uint64_t sent_ns)
{
	struct slots_pool *pool = slot->pool;

	slot->answer = *answer;
	if (answer->capacity)
		pool->capacity = answer->capacity;
	switch (answer->state) {
	case SLOTS_HOLDING:
		/* While it waited nothing could be written. */
		if (slot->stage != STAGE_HELD)
			atomic_store(&slot->progress_ns, base_now_ns());
		slot->stage = STAGE_HELD;
		/* The coordinator's lease began later than the question was sent; a tenth of it is
		 * for clocks that differ. */
		slot->lease_end_ns = sent_ns + base_ms_to_ns(pool->config.lease_ms) / 10 * 9;
		break;
	case SLOTS_WAITING:
		slot->stage = STAGE_QUEUED;
		break;
	case SLOTS_NONE:
		slot->stage = STAGE_UNKNOWN;
		break;
	}
	slot->beat_due_ns = sent_ns + base_ms_to_ns(answer->beat_ms ? answer->beat_ms :
								      pool->config.lease_ms / 3);
	slots_watch_leases(pool);
	if (pool->ops != &slots_open && slot->stage == STAGE_HELD)
		slots_beats_need(pool, slot->beat_due_ns);
}

/* The slot is not held any more. The lock is held, and let go while the owner is told. */
static void lose(struct slots_slot *slot, const char *why)
{
	struct slots_pool *pool = slot->pool;

	slot->stage = STAGE_LOST;
	slot->info.lost = 1;
	slots_watch_leases(pool);
	snprintf(slot->info.note, sizeof(slot->info.note), "the slot was lost: %s", why);
	base_log(&pool->config.log, IOSHAPE_LOG_WARNING,
		 "a slot of pool %s was lost: %s; its writer goes on without it", pool->config.pool,
		 why);
	if (!slot->wish.lost)
		return;
	slot->beating = true;
	pthread_mutex_unlock(&pool->lock);
	slot->wish.lost(slot->wish.lost_user, why);
	pthread_mutex_lock(&pool->lock);
	slot->beating = false;
	pthread_cond_broadcast(&pool->change);
}

/* ---- One sign of life ------------------------------------------------------------------------ */

static void fill_beat(const struct slots_slot *slot, struct slots_beat *beat)
{
	*beat = (struct slots_beat){
		.passed = atomic_load(&slot->passed),
		.holding = slot->stage == STAGE_HELD,
		.fence = slot->answer.fence,
		.epoch = slot->answer.epoch,
		.weight = slot->answer.weight,
		.bytes = slot->request.bytes,
	};
	memcpy(beat->id, slot->request.id, sizeof(beat->id));
}

static void take_silence(struct slots_slot *slot, const struct base_error *why)
{
	struct slots_pool *pool = slot->pool;

	slots_note_away(pool, why);
	if (slot->stage == STAGE_QUEUED)
		slot->stage = STAGE_AWAY;
	slot->beat_due_ns = base_now_ns() + retry_ns(pool);
}

/* The lock is held, and let go while the coordinator is asked. */
static void beat(struct slots_slot *slot)
{
	struct slots_pool *pool = slot->pool;
	bool held = slot->stage == STAGE_HELD;
	struct base_error error = { 0 };
	struct slots_answer answer;
	struct slots_beat said;
	uint64_t sent_ns;
	int ret;

	fill_beat(slot, &said);
	slot->beating = true;
	pthread_mutex_unlock(&pool->lock);
	sent_ns = base_now_ns();
	ret = pool->ops->beat(pool->coordinator, &said, &answer, &error);
	pthread_mutex_lock(&pool->lock);
	slot->beating = false;
	if (ret) {
		take_silence(slot, &error);
	} else {
		slots_note_back(pool);
		slots_take_answer(slot, &answer, sent_ns);
		if (held && slot->stage != STAGE_HELD)
			lose(slot, "its lease had ended, an operator took it away, or the "
				   "coordinator lost its data");
	}
	pthread_cond_broadcast(&pool->change);
}

/* A disk that hangs must not keep the others waiting. */
static bool is_stalled(const struct slots_slot *slot, uint64_t now)
{
	const uint64_t progress_ns = atomic_load(&slot->progress_ns);

	return now > progress_ns && now - progress_ns > base_ms_to_ns(slot->pool->policy.stall_ms);
}

/* The lock is held, and let go meanwhile. */
static void give_up(struct slots_slot *slot)
{
	struct slots_pool *pool = slot->pool;
	char why[96];

	slot->beating = true;
	pthread_mutex_unlock(&pool->lock);
	pool->ops->release(pool->coordinator, slot->request.id, atomic_load(&slot->passed), NULL);
	pthread_mutex_lock(&pool->lock);
	slot->beating = false;
	snprintf(why, sizeof(why), "nothing was written for %u s (stall_ms)",
		 pool->policy.stall_ms / 1000);
	lose(slot, why);
	pthread_cond_broadcast(&pool->change);
}

/* The lock is held, and let go while something is done: then true, and the list may have changed.
 */
static bool look_after(struct slots_slot *slot, uint64_t now)
{
	if (slot->stage == STAGE_HELD && now >= slot->lease_end_ns) {
		lose(slot, "the coordinator has not answered for as long as its lease lasts");
		return true;
	}
	if (slot->stage == STAGE_HELD && is_stalled(slot, now)) {
		give_up(slot);
		return true;
	}
	if ((slot->stage == STAGE_HELD || slot->stage == STAGE_QUEUED) &&
	    now >= slot->beat_due_ns) {
		beat(slot);
		return true;
	}
	return false;
}

/* ---- What could not be said before ----------------------------------------------------------- */

/* The lock is held, and let go while the coordinator is told. */
static void say_the_unsaid(struct slots_pool *pool)
{
	struct base_error error = { 0 };
	char id[SLOTS_ID_BYTES];
	uint64_t passed;
	int ret;

	while (pool->unsaid_count && !pool->stop) {
		const unsigned last = pool->unsaid_count - 1;

		if (base_now_ns() >= pool->unsaid[last].until_ns) {
			pool->unsaid_count--;
			continue;
		}
		memcpy(id, pool->unsaid[last].id, sizeof(id));
		passed = pool->unsaid[last].passed;
		pthread_mutex_unlock(&pool->lock);
		ret = pool->ops->release(pool->coordinator, id, passed, &error);
		pthread_mutex_lock(&pool->lock);
		if (ret)
			return;
		slots_note_back(pool);
		/* Others may have come behind it, or taken its place, meanwhile. */
		for (unsigned i = 0; i < pool->unsaid_count; i++) {
			if (!strcmp(pool->unsaid[i].id, id))
				pool->unsaid[i] = pool->unsaid[--pool->unsaid_count];
		}
	}
}

/* ---- The thread ------------------------------------------------------------------------------ */

struct outlook {
	bool waiting;    /* somebody is in the queue */
	bool busy;       /* there is something to look after at all */
	uint64_t due_ns; /* when, at the latest */
};

static struct outlook look_around(const struct slots_pool *pool, uint64_t now)
{
	struct outlook outlook = { .due_ns = now + base_ms_to_ns(pool->config.lease_ms) / LOOKS };

	for (const struct slots_slot *slot = pool->slots; slot; slot = slot->next) {
		bool queued = slot->stage == STAGE_QUEUED, held = slot->stage == STAGE_HELD;

		outlook.waiting |= queued;
		outlook.busy |= queued || held;
		if (queued || held)
			outlook.due_ns = MIN(outlook.due_ns, slot->beat_due_ns);
		if (held)
			outlook.due_ns = MIN(outlook.due_ns, slot->lease_end_ns);
	}
	if (pool->unsaid_count) {
		outlook.busy = true;
		outlook.due_ns = MIN(outlook.due_ns, now + retry_ns(pool));
	}
	return outlook;
}

/* Until something is due, or heard. The lock is held, and let go meanwhile. */
static void wait_for_news(struct slots_pool *pool, const struct outlook *outlook, uint64_t now)
{
	uint32_t wait_ms = 0;
	struct base_error error = { 0 };
	int ret;

	if (outlook->due_ns > now)
		wait_ms = (uint32_t)((outlook->due_ns - now) / 1000000 + 1);
	pool->thread_wakes_ns = outlook->due_ns;
	if (!outlook->waiting) {
		if (wait_ms)
			base_cond_wait_ms(&pool->thread_change, &pool->lock, wait_ms);
		return;
	}
	pool->in_wait = true;
	pthread_mutex_unlock(&pool->lock);
	ret = pool->ops->wait(pool->coordinator, wait_ms, &error);
	pthread_mutex_lock(&pool->lock);
	pool->in_wait = false;
	if (ret && pool->deaf) {
		if (!pool->stop && wait_ms)
			base_cond_wait_ms(&pool->thread_change, &pool->lock, wait_ms);
		return;
	}
	if (ret)
		base_log(&pool->config.log, IOSHAPE_LOG_DEBUG,
			 "wakes of pool %s cannot be waited for: %s; who waits asks now and then",
			 pool->config.pool, error.text);
	pool->deaf = ret != 0;
	/* A wake does not say the truth, and may have been for any of them: all ask. And so they do
	 * if the coordinator may be out of reach. */
	for (struct slots_slot *slot = pool->slots; slot; slot = slot->next) {
		if (slot->stage == STAGE_QUEUED)
			slot->beat_due_ns = 0;
	}
}

static void look_after_all(struct slots_pool *pool)
{
	struct slots_slot *slot = pool->slots;
	const uint64_t now = base_now_ns();

	/* Whoever was spoken for is not due again, so this ends. */
	while (slot)
		slot = look_after(slot, now) ? pool->slots : slot->next;
}

static void *run(void *argument)
{
	struct slots_pool *pool = argument;
	unsigned idle = 0;

	pthread_mutex_lock(&pool->lock);
	while (!pool->stop) {
		const uint64_t now = base_now_ns();
		const struct outlook outlook = look_around(pool, now);

		idle = outlook.busy ? 0 : idle + 1;
		if (!outlook.waiting)
			pool->ops->rest(pool->coordinator);
		if (idle > IDLE_LOOKS) {
			pool->asleep = true;
			pthread_cond_wait(&pool->thread_change, &pool->lock);
			pool->asleep = false;
			idle = 0;
			continue;
		}
		wait_for_news(pool, &outlook, now);
		look_after_all(pool);
		if (pool->unsaid_count)
			say_the_unsaid(pool);
	}
	pthread_mutex_unlock(&pool->lock);
	return NULL;
}

static void start(struct slots_pool *pool)
{
	if (pool->started || pool->stop)
		return;
	pool->thread_wakes_ns = 0;
	pool->started = !base_start_thread(&pool->thread, run, pool);
}

void slots_beats_need(struct slots_pool *pool, uint64_t due_ns)
{
	start(pool);
	if (pool->asleep || due_ns < pool->thread_wakes_ns)
		pthread_cond_signal(&pool->thread_change);
}

void slots_beats_queue(struct slots_pool *pool, uint64_t due_ns)
{
	start(pool);
	if (!pool->in_wait)
		pthread_cond_signal(&pool->thread_change);
	else if (due_ns < pool->thread_wakes_ns)
		pool->ops->interrupt(pool->coordinator);
}

void slots_beats_by_hand(struct slots_slot *slot)
{
	start(slot->pool);
	if (!slot->pool->started && slot->stage == STAGE_QUEUED && !slot->beating &&
	    base_now_ns() >= slot->beat_due_ns)
		beat(slot);
}

void slots_beats_stop(struct slots_pool *pool)
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
