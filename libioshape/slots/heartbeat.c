/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Heartbeats: they keep a place in the queue, or a slot for as long as bytes pass, and their
 * answers tell whether it is still ours.
 */
#include "slots/pool.h"

#include <stdio.h>
#include <string.h>

/* The slot is not held any more. The lock is held, and let go while the owner is told. */
static void lose(struct slots_slot *slot, const char *why)
{
	struct slots_pool *pool = slot->pool;

	/* Granted and lost again before the thread that waits for it could wake. */
	if (!slot->held_ns) {
		slot->stage = STAGE_FORGOTTEN;
		return;
	}
	slot->stage = STAGE_LOST;
	slot->info.lost = 1;
	slots_watch_leases(pool);
	snprintf(slot->info.note, sizeof(slot->info.note), "the slot was lost: %s", why);
	base_log(&pool->config.log, IOSHAPE_LOG_WARNING,
		 "a slot of pool \"%s\" was lost: %s; its writer goes on without it",
		 pool->config.pool, why);
	if (!slot->wanted.lost)
		return;
	slot->in_call = true;
	pthread_mutex_unlock(&pool->lock);
	slot->wanted.lost(slot->wanted.lost_user, why);
	pthread_mutex_lock(&pool->lock);
	slot->in_call = false;
	pthread_cond_broadcast(&pool->change);
}

static void fill_beat(const struct slots_slot *slot, struct slots_beat *beat)
{
	*beat = (struct slots_beat){
		.passed = atomic_load(&slot->passed),
		.holding = slot->stage == STAGE_HELD,
		.ticket = slot->answer.ticket,
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

	slots_note_unreachable(pool, why);
	if (slot->stage == STAGE_QUEUED)
		slot->stage = STAGE_UNREACHABLE;
	slot->beat_due_ns = base_now_ns() + slots_retry_ns(pool);
}

void slots_heartbeat(struct slots_slot *slot)
{
	struct slots_pool *pool = slot->pool;
	const bool held = slot->stage == STAGE_HELD;
	struct base_error error = { 0 };
	struct slots_answer answer;
	struct slots_beat beat;
	uint64_t sent_ns;
	int ret;

	fill_beat(slot, &beat);
	slot->in_call = true;
	pthread_mutex_unlock(&pool->lock);
	sent_ns = base_now_ns();
	ret = pool->ops->beat(pool->coordinator, &beat, &answer, &error);
	pthread_mutex_lock(&pool->lock);
	slot->in_call = false;
	if (ret) {
		take_silence(slot, &error);
	} else {
		slots_note_reachable(pool);
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
static void give_up_stalled(struct slots_slot *slot)
{
	struct slots_pool *pool = slot->pool;
	char why[96];

	slot->in_call = true;
	pthread_mutex_unlock(&pool->lock);
	pool->ops->release(pool->coordinator, slot->request.id, atomic_load(&slot->passed), NULL);
	pthread_mutex_lock(&pool->lock);
	slot->in_call = false;
	snprintf(why, sizeof(why), "nothing was written for %u s", pool->policy.stall_ms / 1000);
	lose(slot, why);
	pthread_cond_broadcast(&pool->change);
}

bool slots_look_after(struct slots_slot *slot, uint64_t now)
{
	const bool held = slot->stage == STAGE_HELD;
	bool done = true;

	if (held && now >= slot->lease_end_ns)
		lose(slot, "the coordinator has not answered for as long as its lease lasts");
	else if (held && is_stalled(slot, now))
		give_up_stalled(slot);
	else if ((held || slot->stage == STAGE_QUEUED) && now >= slot->beat_due_ns)
		slots_heartbeat(slot);
	else
		done = false;
	return done;
}
