/* SPDX-License-Identifier: Apache-2.0 */
/* What a pool knows of its coordinator: whether it can be reached, and what it answered. */
#include "slots/pool.h"

/* A call that failed is tried again so soon. */
#define RETRY_MS 250

uint64_t slots_retry_ns(const struct slots_pool *pool)
{
	return base_ms_to_ns(MIN(RETRY_MS, pool->config.lease_ms / SLOTS_LOOKS_PER_LEASE));
}

/* ---- Reachable or not ------------------------------------------------------------------------ */

void slots_note_reachable(struct slots_pool *pool)
{
	if (!pool->unreachable_ns)
		return;
	base_log(&pool->config.log, IOSHAPE_LOG_INFO,
		 "the coordinator of pool \"%s\" answers again after %.1f s; saves wait for slots "
		 "again",
		 pool->config.pool, base_seconds(base_now_ns() - pool->unreachable_ns));
	pool->unreachable_ns = 0;
}

void slots_note_unreachable(struct slots_pool *pool, const struct base_error *error)
{
	static const char *const until[] = {
		"saves go on without slots, each after a delay of its own",
		"saves wait until it can be reached",
		"saves fail until it can be reached",
	};

	pool->unreachable_why = *error;
	if (pool->unreachable_ns)
		return;
	pool->unreachable_ns = base_now_ns();
	base_log(&pool->config.log, IOSHAPE_LOG_WARNING, "%s; %s", error->text,
		 until[pool->policy.unreachable]);
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
	const uint32_t beat_ms = answer->beat_ms ? answer->beat_ms : pool->config.lease_ms / 3;

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
		slot->stage = STAGE_FORGOTTEN;
		break;
	}
	slot->beat_due_ns = sent_ns + base_ms_to_ns(beat_ms);
	slots_watch_leases(pool);
}
