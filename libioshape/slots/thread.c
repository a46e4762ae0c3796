/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The pool's thread waits for the coordinator's wakes. A wake is a hint: the thread sends a
 * heartbeat for every queued slot, and the answer says whether that was granted. It also sends the
 * heartbeats of slots that are held (heartbeat.c), and releases that did not arrive.
 */
#include "slots/pool.h"

#include <string.h>

/* Looks without anything to do before it goes to sleep, and nobody holds a connection for it. */
#define IDLE_LOOKS 10
#define LONGEST_LOOK_MS 3000u

struct outlook {
	bool queued;     /* a slot is in the queue */
	bool busy;       /* there is something to look after at all */
	uint64_t due_ns; /* when, at the latest */
};

static struct outlook look_around(const struct slots_pool *pool, uint64_t now)
{
	const uint32_t look_ms =
		MIN(pool->config.lease_ms / SLOTS_LOOKS_PER_LEASE, LONGEST_LOOK_MS);
	struct outlook outlook = { .due_ns = now + base_ms_to_ns(look_ms) };

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

/* Until somebody tells the thread. Under the lock, which it lets go meanwhile. */
static void sleep_long(struct slots_pool *pool)
{
	pool->asleep = true;
	pthread_mutex_unlock(&pool->lock);
	pool->ops->rest(pool->coordinator);
	pthread_mutex_lock(&pool->lock);
	while (pool->asleep && !pool->stop)
		pthread_cond_wait(&pool->thread_change, &pool->lock);
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
			sleep_long(pool);
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

void slots_start_thread(struct slots_pool *pool)
{
	if (pool->started || pool->stop)
		return;
	pool->thread_wakes_ns = 0;
	pool->started = !base_start_thread(&pool->thread, run_thread, pool);
}

void slots_tell_thread(struct slots_pool *pool, uint64_t due_ns, bool queued)
{
	const bool earlier = due_ns < pool->thread_wakes_ns;

	slots_start_thread(pool);
	if (pool->in_wait && earlier)
		pool->ops->interrupt(pool->coordinator);
	else if (!pool->in_wait && (queued || earlier || pool->asleep))
		pthread_cond_signal(&pool->thread_change);
	pool->asleep = false;
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
