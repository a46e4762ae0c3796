/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Waiting for a wake: BLPOP on this client's own list, on a connection that does nothing else. A
 * BLPOP that is interrupted stays asked: the next wait() continues with it.
 *
 * No wake is lost. What the server pushes stays in the list until a BLPOP takes it. What a BLPOP
 * took is read by this wait() or by the next one. If a connection breaks or is closed with a BLPOP
 * asked, the next wait() ends at once, and a heartbeat asks.
 *
 * A server that refuses BLPOP and nothing else is not unreachable: then wait() only sleeps, and
 * heartbeats alone tell of a grant.
 */
#define _GNU_SOURCE
#include "slots/redis.h"

#include <errno.h>
#include <poll.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

/* The server ends a BLPOP up to this much late: it looks for expired ones ten times a second. */
#define LATE_NS 150000000ull
/* An honest server sends no more than WAKES_AT_ONCE wakes at once, and then one in WAKE_NS. */
#define WAKE_NS 2000000ull
#define WAKES_AT_ONCE 100
/* After a refusal, BLPOP is tried again then: somebody may have granted the right, or replaced the
 * proxy. Each time twice as late. */
#define ASK_AGAIN_MS 1000u
#define ASK_AGAIN_LAST_MS 30000u
/* Some proxies close the connection instead of an answer to what they do not know. */
#define MOST_CUT_SHORT 3

void redis_interrupt(void *opaque)
{
	struct redis_pool *pool = opaque;
	const uint64_t one = 1;

	/* It fails only where it is full of interruptions already. */
	while (write(pool->interruption, &one, sizeof(one)) < 0 && errno == EINTR)
		;
}

static bool was_interrupted(struct redis_pool *pool)
{
	uint64_t count;

	return read(pool->interruption, &count, sizeof(count)) == sizeof(count);
}

/* One wait() that is under way. */
struct watch {
	struct redis_pool *pool;
	uint64_t until_ns;
	bool fresh; /* the connection was made for it */
	unsigned redirects;
	struct base_error why;
};

/* What happened: nothing yet; the wait is over; or it failed, as `why` says. */
enum event { NOTHING, ENOUGH, BROKEN };

static void drop_link(struct redis_pool *pool)
{
	link_close(pool->wake);
	pool->wake = NULL;
	pool->woken |= pool->asked;
	pool->asked = false;
}

/* A server that keeps connections for 100,000 processes which save twice an hour needs most of its
 * memory for that. The next call connects again. */
void redis_rest(void *opaque)
{
	struct redis_pool *pool = opaque;

	drop_link(pool);
	pthread_mutex_lock(&pool->lock);
	link_close(pool->commands);
	pool->commands = NULL;
	pthread_mutex_unlock(&pool->lock);
}

static int get_link(struct watch *watch)
{
	struct redis_pool *pool = watch->pool;
	int ret;

	if (pool->wake)
		return 0;
	watch->fresh = true;
	pthread_mutex_lock(&pool->lock);
	ret = redis_obtain(pool, &pool->wake, redis_call_end(pool), &watch->why);
	pthread_mutex_unlock(&pool->lock);
	return ret;
}

static void note_failure(struct watch *watch)
{
	pthread_mutex_lock(&watch->pool->lock);
	redis_note_failure(watch->pool, &watch->why);
	pthread_mutex_unlock(&watch->pool->lock);
}

/* Only BLPOP is refused: `why` says by whom. */
static enum event refused(struct watch *watch)
{
	struct redis_pool *pool = watch->pool;

	if (!pool->refused_until_ns)
		base_log(&pool->config.log, IOSHAPE_LOG_WARNING,
			 "nobody can be woken in pool \"%s\", so that slots come seconds later "
			 "than they could: %s",
			 pool->config.pool, watch->why.text);
	pool->refused_ms = MIN(MAX(2 * pool->refused_ms, ASK_AGAIN_MS), ASK_AGAIN_LAST_MS);
	pool->refused_until_ns = base_now_ns() + base_ms_to_ns(pool->refused_ms);
	drop_link(pool);
	pool->woken = false;
	watch->why.code = 0;
	return NOTHING;
}

static enum event broken(struct watch *watch, int code)
{
	const bool asked = watch->pool->asked;

	drop_link(watch->pool);
	if (code == -ECONNRESET && asked && ++watch->pool->cut_short >= MOST_CUT_SHORT) {
		base_rephrase(
			&watch->why, code,
			"the coordinator closes the connection when it is asked to wait" BASE_REMEDY
			"if there is a proxy in between, let it pass BLPOP");
		return refused(watch);
	}
	if (code == -ECONNRESET && !watch->fresh) {
		/* The server was restarted, perhaps: the next one to ask will know. */
		watch->pool->woken = false;
		watch->why.code = 0;
		return asked ? ENOUGH : NOTHING;
	}
	note_failure(watch);
	return BROKEN;
}

static enum event ask(struct watch *watch)
{
	struct redis_pool *pool = watch->pool;
	const uint64_t now = base_now_ns();
	/* 0 would be for ever. */
	const uint64_t left_ms = MAX((uint64_t)link_time_left_ms(watch->until_ns), 1u);
	struct link_command command = { 0 };
	char seconds[32];
	int ret;

	snprintf(seconds, sizeof(seconds), "%llu.%03u", (unsigned long long)(left_ms / 1000),
		 (unsigned)(left_ms % 1000));
	link_add_texts(&command, "BLPOP", pool->wake_key, seconds);
	pool->asked = true;
	pool->due_ns = now + left_ms * 1000000;
	ret = link_send(pool->wake, &command, redis_call_end(pool), &watch->why);
	return ret ? broken(watch, ret) : NOTHING;
}

static enum event understand(struct watch *watch, const redisReply *reply)
{
	struct redis_pool *pool = watch->pool;
	struct slots_node node;
	bool asking;

	pool->asked = false;
	if (reply->type != REDIS_REPLY_ERROR)
		pool->cut_short = pool->refused_ms = 0;
	if (reply->type == REDIS_REPLY_NIL)
		return NOTHING;
	if (reply->type != REDIS_REPLY_ERROR) {
		pool->wakes_ns = MAX(pool->wakes_ns, base_now_ns()) + WAKE_NS;
		return ENOUGH;
	}
	if (route_is_redirect(pool->wake, reply, &node, &asking) && ++watch->redirects <= 5) {
		pthread_mutex_lock(&pool->lock);
		pool->route.moved = node;
		pool->route.has_moved = true;
		pthread_mutex_unlock(&pool->lock);
		drop_link(pool);
		return NOTHING;
	}
	redis_refused(pool->wake, reply, &watch->why);
	if (!redis_must_look_anew(reply))
		return refused(watch);
	drop_link(pool);
	note_failure(watch);
	return BROKEN;
}

static enum event receive(struct watch *watch)
{
	redisReply *reply;
	enum event event;
	int ret;

	ret = link_take(watch->pool->wake, &reply, &watch->why);
	if (ret)
		return broken(watch, ret);
	if (!reply)
		return NOTHING;
	event = understand(watch, reply);
	freeReplyObject(reply);
	return event;
}

/* Until when it makes sense to wait: an answer that is due about then is waited for. */
static uint64_t deadline(const struct watch *watch)
{
	const struct redis_pool *pool = watch->pool;

	return pool->due_ns <= watch->until_ns + LATE_NS ? watch->until_ns + LATE_NS :
							   watch->until_ns;
}

static enum event wait_once(struct watch *watch)
{
	struct redis_pool *pool = watch->pool;
	const uint64_t dead_ns = pool->due_ns + REDIS_DEAD_NS;
	const uint64_t until_ns = MIN(deadline(watch), dead_ns);
	struct pollfd ready[] = {
		{ .fd = link_fd(pool->wake), .events = POLLIN },
		{ .fd = pool->interruption, .events = POLLIN },
	};

	if (poll(ready, ARRAY_LENGTH(ready), link_time_left_ms(until_ns)) < 0)
		return NOTHING; /* a signal, or no memory: the loop has its end */
	if (ready[0].revents)
		return receive(watch);
	if (ready[1].revents)
		return ENOUGH;
	if (base_now_ns() >= dead_ns) {
		base_refuse(&watch->why, -ETIMEDOUT, "%s does not answer in time",
			    link_name(pool->wake));
		return broken(watch, -ETIMEDOUT);
	}
	return NOTHING;
}

/* Without anybody to wake us. */
static enum event sleep_on(const struct watch *watch)
{
	struct redis_pool *pool = watch->pool;
	const uint64_t until_ns = MIN(watch->until_ns, pool->refused_until_ns);
	struct pollfd ready = { .fd = pool->interruption, .events = POLLIN };

	if (base_now_ns() >= watch->until_ns)
		return ENOUGH;
	(void)poll(&ready, 1, link_time_left_ms(until_ns));
	return NOTHING;
}

/* A list of wakes that has no end must not keep this process, and the server, busy. */
static void calm_down(const struct watch *watch)
{
	struct redis_pool *pool = watch->pool;
	const uint64_t calm_ns = pool->wakes_ns - MIN(pool->wakes_ns, WAKES_AT_ONCE * WAKE_NS);
	const uint64_t until_ns = MIN(watch->until_ns, calm_ns);
	struct pollfd ready = { .fd = pool->interruption, .events = POLLIN };

	if (base_now_ns() < calm_ns)
		(void)poll(&ready, 1, link_time_left_ms(until_ns));
}

static enum event watch_on(struct watch *watch)
{
	struct redis_pool *pool = watch->pool;
	enum event event = NOTHING;

	calm_down(watch);
	while (event == NOTHING) {
		if (was_interrupted(pool))
			return ENOUGH;
		if (base_now_ns() < pool->refused_until_ns) {
			event = sleep_on(watch);
			continue;
		}
		if (get_link(watch))
			return BROKEN;
		/* The answer to what was asked is worth a moment more. */
		if (base_now_ns() >= (pool->asked ? deadline(watch) : watch->until_ns))
			return ENOUGH;
		if (!pool->asked)
			event = ask(watch);
		if (event == NOTHING && pool->asked)
			event = wait_once(watch);
	}
	return event;
}

int redis_wait(void *opaque, uint32_t timeout_ms, struct base_error *error)
{
	struct redis_pool *pool = opaque;
	struct watch watch = {
		.pool = pool,
		.until_ns = base_now_ns() + timeout_ms * 1000000ull,
	};
	enum event event = ENOUGH;

	if (pool->woken)
		pool->woken = false;
	else
		event = watch_on(&watch);
	if (event != BROKEN) {
		was_interrupted(pool);
		return 0;
	}
	watch.why.code = IOSHAPE_E_COORDINATOR;
	return base_pass_on(error, &watch.why);
}
