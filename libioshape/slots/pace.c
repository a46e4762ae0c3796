/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The second dial: bytes per second. The coordinator hands out shares of bandwidth, each for a
 * quarter of a second or so; inside a share bytes leave evenly, block by block.
 */
#include "slots/slot.h"

#include <time.h>

/* A writer that waits for bandwidth is asked so often whether to go on. */
#define PATIENCE_NS 100000000ull

/*
 * Waits on the clock until then, but not for ever: a rate that somebody has set far too low must
 * not stop a save. Nobody takes it for a disk that hangs.
 */
static int wait_until(struct slots_slot *slot, uint64_t until_ns, int (*stop)(void *user),
		      void *stop_user)
{
	uint64_t now = base_now_ns();
	int ret;

	until_ns = MIN(until_ns, now + base_ms_to_ns(slot->pool->policy.stall_ms));
	for (; now < until_ns; now = base_now_ns()) {
		const uint64_t nap_ns = MIN(until_ns - now, PATIENCE_NS);
		const struct timespec nap = { .tv_sec = 0, .tv_nsec = (long)nap_ns };

		ret = stop ? stop(stop_user) : 0;
		if (ret)
			return ret;
		nanosleep(&nap, NULL);
		atomic_store(&slot->progress_ns, base_now_ns());
	}
	return 0;
}

/* Takes this rank's part of what the job may use, where no Redis hands out shares. With "local" no
 * more ranks than there are slots write at a time. */
static void take_own_share(struct slots_slot *slot, uint64_t bytes, uint64_t now)
{
	struct slots_pool *pool = slot->pool;
	uint32_t writers = pool->config.identity.ranks;
	uint64_t rate;

	pthread_mutex_lock(&pool->lock);
	if (pool->ops == &slots_local)
		writers = MIN(writers, MAX(pool->capacity, 1u));
	pthread_mutex_unlock(&pool->lock);
	rate = MAX(pool->config.rate / writers, 1);
	slot->grant_bytes = MAX(bytes, rate / 4);
	/* It goes on where the last one ended, unless that is long ago. */
	slot->grant_start_ns = MAX(slot->grant_end_ns, now);
	slot->grant_end_ns =
		slot->grant_start_ns + (uint64_t)((double)slot->grant_bytes / (double)rate * 1e9);
}

/* A coordinator that is known to be unreachable is not asked: each question would hold up a block.
 */
static int ask_for_share(struct slots_pool *pool, uint64_t bytes, struct slots_grant *grant)
{
	struct base_error why = { 0 };
	int ret;

	if (atomic_load(&pool->unreachable_ns))
		return IOSHAPE_E_COORDINATOR;
	ret = pool->ops->pace(pool->coordinator, (int64_t)bytes, grant, &why);
	if (ret) {
		pthread_mutex_lock(&pool->lock);
		slots_note_unreachable(pool, &why);
		pthread_mutex_unlock(&pool->lock);
	}
	return ret;
}

/*
 * A new share. While the coordinator is unreachable the writer keeps the pace that it had, so that
 * what protects the neighbours does not end with it.
 */
static void take_share(struct slots_slot *slot, uint64_t bytes)
{
	struct slots_pool *pool = slot->pool;
	const uint64_t length_ns = slot->grant_end_ns - slot->grant_start_ns;
	struct slots_grant grant = { 0 };
	uint64_t now;
	bool granted;

	slot->grant_used = 0;
	granted = pool->ops->pace && !ask_for_share(pool, bytes, &grant);
	now = base_now_ns();
	if (!granted) {
		if (slot->grant_bytes && pool->ops->pace) {
			slot->grant_start_ns = MAX(slot->grant_end_ns, now);
			slot->grant_end_ns = slot->grant_start_ns + length_ns;
		} else if (pool->config.rate) {
			take_own_share(slot, bytes, now);
		} else {
			atomic_store(&pool->unlimited_until_ns, now + base_ms_to_ns(1000));
		}
		return;
	}
	slot->grant_bytes = MIN(grant.bytes, SLOTS_MOST_BYTES);
	slot->grant_start_ns = now + base_ms_to_ns(grant.start_ms);
	slot->grant_end_ns = now + base_ms_to_ns(grant.end_ms);
	if (!grant.bytes)
		atomic_store(&pool->unlimited_until_ns, slot->grant_end_ns);
}

/* When the next byte of the share may leave. */
static uint64_t due_ns(const struct slots_slot *slot)
{
	const uint64_t length_ns = slot->grant_end_ns - slot->grant_start_ns;

	return slot->grant_start_ns +
	       (uint64_t)((double)length_ns * (double)slot->grant_used / (double)slot->grant_bytes);
}

static int pace(struct slots_slot *slot, uint64_t bytes, int (*stop)(void *user), void *stop_user)
{
	struct slots_pool *pool = slot->pool;
	uint64_t waited_ns = 0;
	int ret = 0;

	while (!ret && bytes) {
		uint64_t piece, begin_ns;

		if (slot->grant_used >= slot->grant_bytes) {
			take_share(slot, bytes);
			if (!slot->grant_bytes)
				break;
		}
		piece = MIN(bytes, slot->grant_bytes - slot->grant_used);
		begin_ns = base_now_ns();
		ret = wait_until(slot, due_ns(slot), stop, stop_user);
		waited_ns += base_now_ns() - begin_ns;
		slot->grant_used += piece;
		bytes -= piece;
	}
	pthread_mutex_lock(&pool->lock);
	slot->info.paced_s += base_seconds(waited_ns);
	pthread_mutex_unlock(&pool->lock);
	return ret;
}

int slots_pass(struct slots_slot *slot, uint64_t bytes, int (*stop)(void *user), void *stop_user)
{
	struct slots_pool *pool = slot->pool;
	uint64_t now = base_now_ns();
	int ret = 0;

	bytes = MIN(bytes, SLOTS_MOST_BYTES);
	atomic_fetch_add(&slot->passed, bytes);
	if (!slot->wanted.deadline_ns && (slot->grant_used < slot->grant_bytes ||
					  now >= atomic_load(&pool->unlimited_until_ns))) {
		ret = pace(slot, bytes, stop, stop_user);
		now = base_now_ns();
	}
	atomic_store(&slot->progress_ns, now);
	return ret;
}

void slots_pace_end(struct slots_slot *slot)
{
	struct slots_pool *pool = slot->pool;
	struct slots_grant ignored;

	if (pool->ops->pace && slot->grant_used < slot->grant_bytes &&
	    !atomic_load(&pool->unreachable_ns))
		pool->ops->pace(pool->coordinator, -(int64_t)(slot->grant_bytes - slot->grant_used),
				&ignored, NULL);
	slot->grant_bytes = 0;
}
