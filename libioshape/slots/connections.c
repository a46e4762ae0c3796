/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The two connections of a pool: one for commands, and one on which wait() has BLPOP asked. While
 * nobody waits there is only the first; wait() takes that, and gives it back.
 */
#define _GNU_SOURCE
#include "slots/redis.h"

#include <errno.h>
#include <stdio.h>

#define FIRST_BACKOFF_MS 50u
#define MOST_BACKOFF_MS 1000u

/* ---- Making one: back-off -------------------------------------------------------------------- */

/* So that thousands of clients do not all come back in the same millisecond. */
static uint64_t jitter(struct redis_pool *pool, uint64_t most)
{
	pool->random ^= pool->random << 13;
	pool->random ^= pool->random >> 7;
	pool->random ^= pool->random << 17;
	return pool->random % (most + 1);
}

void redis_note_failure(struct redis_pool *pool, const char *why)
{
	const unsigned doublings = MIN(pool->failures, 10u);
	const uint64_t most_ms = MIN(FIRST_BACKOFF_MS << doublings, MOST_BACKOFF_MS);

	pool->failures++;
	pool->not_before_ns = base_now_ns() + most_ms * 500000 + jitter(pool, most_ms * 500000);
	if (why != pool->last_failure)
		snprintf(pool->last_failure, sizeof(pool->last_failure), "%s", why);
}

int redis_obtain(struct redis_pool *pool, struct slots_link **out, uint64_t until_ns, char *why)
{
	int ret;

	*out = NULL;
	if (pool->failures && base_now_ns() < pool->not_before_ns) {
		snprintf(why, LINK_WHY_BYTES, "%s", pool->last_failure);
		return -EAGAIN;
	}
	ret = route_connect(&pool->route, out, until_ns, why);
	if (ret)
		redis_note_failure(pool, why);
	return ret;
}

/* ---- How long it may take ------------------------------------------------------------------- */

void redis_hurry(void *opaque, uint64_t until_ns)
{
	struct redis_pool *pool = opaque;

	__atomic_store_n(&pool->hurry_ns, until_ns, __ATOMIC_RELAXED);
}

uint64_t redis_call_end(const struct redis_pool *pool)
{
	const uint64_t hurry_ns = __atomic_load_n(&pool->hurry_ns, __ATOMIC_RELAXED);
	const uint64_t now = base_now_ns();

	/* That lease is long over: nobody waits to say so. */
	if (now > hurry_ns + REDIS_CALL_NS)
		return now + REDIS_CALL_NS;
	return MIN(now + REDIS_CALL_NS, MAX(now, hurry_ns));
}

/* ---- The one for wakes ----------------------------------------------------------------------- */

void redis_drop_wake(struct redis_pool *pool)
{
	link_close(pool->wake);
	pool->wake = NULL;
	pool->woken |= pool->asked;
	pool->asked = false;
}

void redis_give_back(struct redis_pool *pool, bool keep)
{
	if (!pool->wake || pool->asked)
		return;
	if (pool->commands) {
		if (keep)
			return;
		link_close(pool->wake);
	} else {
		pool->commands = pool->wake;
	}
	pool->wake = NULL;
}

void redis_tidy(struct redis_pool *pool)
{
	char why[LINK_WHY_BYTES];
	redisReply *reply;

	if (!__atomic_load_n(&pool->rested, __ATOMIC_RELAXED) || pool->waiting || !pool->wake)
		return;
	if (pool->asked) {
		if (link_take(pool->wake, &reply, why) ||
		    (!reply && base_now_ns() > pool->due_ns + REDIS_DEAD_NS)) {
			redis_drop_wake(pool);
		} else if (reply) {
			pool->asked = false;
			pool->woken |= reply->type != REDIS_REPLY_NIL;
			freeReplyObject(reply);
		}
	}
	redis_give_back(pool, false);
}

/*
 * Closing with BLPOP asked could lose a wake: until the server sees it, it may still push to it.
 * What cannot be done now, because another thread's call is under way or the answer has not come,
 * is left to the next call.
 */
void redis_rest(void *opaque)
{
	struct redis_pool *pool = opaque;

	__atomic_store_n(&pool->rested, true, __ATOMIC_RELAXED);
	if (pthread_mutex_trylock(&pool->lock))
		return;
	redis_tidy(pool);
	pthread_mutex_unlock(&pool->lock);
}
