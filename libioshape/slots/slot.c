/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The state machine of a slot, in the order in which things happen:
 *
 *     1. Pools        Opens and closes pools. `open` is the coordinator that queues no request.
 *     2. Answers      An answer of the coordinator sets the stage of a slot; so does its silence.
 *     3. Heartbeats   A heartbeat keeps a place in the queue, or a slot as long as bytes pass.
 *     4. The thread   The thread of a pool waits for wake-ups and sends heartbeats.
 *     5. Ask          The thread that wants a slot asks the coordinator, which grants it at once,
 *                     queues it, or does not answer.
 *     6. Queue        The thread sleeps until the pool's thread has news of its slot. It wakes up
 *                     only to ask its caller whether to go on.
 *     7. Unreachable  A coordinator that does not answer is asked again, with growing pauses.
 *                     Then it answers, or the policy lets the writer write without a slot or fail.
 *                     A request with a deadline writes without a slot in time.
 *     8. Acquire      The stage of the slot decides what happens next.
 *     9. Bandwidth    Bytes leave as evenly as the slot's share of the bandwidth allows.
 *     10. Release     The coordinator takes the slot back. If it is unreachable, the slot ends with
 *                     its lease.
 */
#include "slots/slots.h"

#include <errno.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

/* The caller of slots_acquire() is asked this often whether to go on waiting. */
#define POLL_MS 100

/* The policy for an unreachable coordinator applies after this time. Before, it may just be
 * restarting. */
#define RESTART_MS 2000u

/* Pauses before an unreachable coordinator is asked again. Each pause is twice the previous one. */
#define RETRY_FIRST_MS 50
#define RETRY_LAST_MS 1000
/* Pause before the pool's thread repeats a call that failed. */
#define RETRY_MS 250

/* Assumed duration of a write until this process has completed one. */
#define FIRST_WRITE_MS 1000u

/* The pool's thread looks at all slots this often in a lease. The first heartbeat is due after a
 * third of it. */
#define LOOKS_PER_LEASE 6
#define LONGEST_LOOK_MS 3000u
/* After this many looks at an idle pool its thread sleeps until it is signalled, and the
 * coordinator closes its connections. */
#define IDLE_LOOKS 10

/* Another client can send wake-ups without end. After MOST_SPURIOUS spurious wake-ups in a row,
 * each within SPURIOUS_NS, the thread pauses for BACK_OFF_NS, so that it does not occupy a core. */
#define MOST_SPURIOUS 16
#define SPURIOUS_NS 1000000u
#define BACK_OFF_NS 5000000

/* ---- Pools and slots of this process --------------------------------------------------------- */

enum slots_stage {
	STAGE_ASKING,      /* its thread is calling the coordinator */
	STAGE_QUEUED,      /* its thread sleeps until the pool's thread has news */
	STAGE_FORGOTTEN,   /* the coordinator does not know the request any more: ask again */
	STAGE_UNREACHABLE, /* the coordinator does not answer */
	STAGE_HELD,
	STAGE_LOST,   /* the slot was held, and is lost */
	STAGE_WITHOUT /* its owner writes without a slot, or does not write */
};

struct slots_slot {
	struct slots_pool *pool;
	struct slots_slot *next; /* next in pool->slots */
	struct slots_wanted wanted;
	char id[SLOTS_ID_BYTES]; /* id of the request */
	int32_t boost_ms;
	_Atomic uint64_t passed;      /* bytes written so far */
	_Atomic uint64_t progress_ns; /* time when `passed` last grew */

	/* The pool's lock protects these. */
	enum slots_stage stage;
	struct slots_answer answer; /* latest answer of the coordinator */
	/* Another thread uses the slot without the lock: do not free it. */
	bool in_call;
	uint64_t beat_due_ns;
	uint64_t lease_end_ns; /* the process trusts its lease only until then */
	uint64_t held_ns;      /* time since when it is held; 0 until slots_acquire() returns */
	struct ioshape_slot_info info;

	/* Bandwidth: used only by the thread that calls slots_pass(). */
	uint64_t grant_bytes, grant_used;
	uint64_t grant_start_ns, grant_end_ns;
};

struct slots_pool {
	const struct slots_ops *ops;
	void *coordinator;
	struct slots_config config;
	struct slots_policy policy;
	/* The latest answer was that bandwidth has no limit; do not ask before then. */
	_Atomic uint64_t unlimited_until_ns;

	pthread_mutex_t lock;  /* protects all members below */
	pthread_cond_t change; /* signalled when a slot changes */
	struct slots_slot *slots;
	uint64_t next_number;
	uint32_t capacity; /* latest known capacity; 0: unknown */
	uint32_t write_ms; /* average time that this process holds a slot; 0: unknown */
	struct slots_checkpoints checkpoints;
	/* Time since when the coordinator is unreachable; 0: it answers. */
	_Atomic uint64_t unreachable_ns;
	struct base_error unreachable_why; /* error of the latest call that failed */
	uint64_t round;                    /* number of writes with a staggered start */
	/* Whether the user was told that this coordinator has no shares. */
	bool told_ignored;

	/* The pool's thread. */
	pthread_t thread;
	bool started, stop;
	bool asleep;   /* there was no work for a while */
	bool in_wait;  /* the thread is in the coordinator's wait() */
	bool no_wakes; /* wait() fails: only heartbeats report a grant */
	/* Spurious wake-ups in a row. The thread counts them without the lock. */
	atomic_uint spurious;
	pthread_cond_t thread_change;
	uint64_t thread_wakes_ns; /* when it next looks at all slots */
};

/* ---- 1. Pools -------------------------------------------------------------------------------- */

static int open_open(void **coordinator, const struct slots_config *config,
		     struct base_error *error)
{
	*coordinator = NULL;
	if (strcmp(config->address, "open"))
		return base_fail_reason(error, -EINVAL,
					"the coordinator's address has text after \"open\"");
	return 0;
}

static int open_acquire(void *coordinator, const struct slots_request *request,
			struct slots_answer *answer, struct base_error *error)
{
	(void)coordinator, (void)error;
	*answer = (struct slots_answer){ .state = SLOTS_HOLDING, .weight = request->weight };
	return 0;
}

static int open_release(void *coordinator, const char *id, uint64_t passed,
			struct base_error *error)
{
	(void)coordinator, (void)id, (void)passed, (void)error;
	return 0;
}

static void open_close(void *coordinator)
{
	(void)coordinator;
}

/* Has no other functions: only the pool's thread would call them, and it never starts with this
 * coordinator. */
const struct slots_ops slots_open = {
	.id = "open",
	.open = open_open,
	.acquire = open_acquire,
	.release = open_release,
	.close = open_close,
};

const struct slots_ops *slots_coordinator_of(const char *address)
{
	static const struct slots_ops *const words[] = { &slots_local, &slots_open };

	for (size_t i = 0; i < ARRAY_LENGTH(words); i++) {
		const size_t bytes = strlen(words[i]->id);

		if (!strncmp(address, words[i]->id, bytes) &&
		    (!address[bytes] || address[bytes] == ':'))
			return words[i];
	}
	return &slots_redis;
}

static void free_pool(struct slots_pool *pool)
{
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
	snprintf(pool->config.identity.client, sizeof(pool->config.identity.client), "%016llx",
		 (unsigned long long)base_random());
	pool->ops = config->ops ? config->ops : slots_coordinator_of(config->address);
	ret = pool->ops->open(&pool->coordinator, &pool->config, error);
	if (ret)
		free_pool(pool);
	else
		*out = pool;
	return ret;
}

void slots_pool_close(struct slots_pool *pool)
{
	if (!pool)
		return;
	pthread_mutex_lock(&pool->lock);
	pool->stop = true;
	if (pool->started) {
		pthread_cond_signal(&pool->thread_change);
		pool->ops->interrupt(pool->coordinator);
	}
	pthread_mutex_unlock(&pool->lock);
	if (pool->started)
		pthread_join(pool->thread, NULL);
	pool->ops->close(pool->coordinator);
	free_pool(pool);
}

const char *slots_pool_name(const struct slots_pool *pool)
{
	return pool->config.pool;
}

/* ---- 2. Answers: functions below need the lock ----------------------------------------------- */

static void record_reachable(struct slots_pool *pool)
{
	if (!pool->unreachable_ns)
		return;
	base_log(&pool->config.log, IOSHAPE_LOG_INFO,
		 "the coordinator of pool \"%s\" answers again after %.1f s; saves wait for slots "
		 "again",
		 pool->config.pool, base_seconds(base_now_ns() - pool->unreachable_ns));
	pool->unreachable_ns = 0;
}

static void record_unreachable(struct slots_pool *pool, const struct base_error *error)
{
	static const char *const until[] = {
		"saves continue without slots, each after its own delay",
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

/* Returns the pause before a failed call is repeated, in ns. */
static uint64_t retry_ns(const struct slots_pool *pool)
{
	return base_ms_to_ns(MIN(RETRY_MS, pool->config.lease_ms / LOOKS_PER_LEASE));
}

/* Takes over an answer. `sent_ns` is the time when the question was sent. */
static void take_answer(struct slots_slot *slot, const struct slots_answer *answer,
			uint64_t sent_ns)
{
	struct slots_pool *pool = slot->pool;
	const uint32_t beat_ms = answer->beat_ms ? answer->beat_ms : pool->config.lease_ms / 3;

	slot->answer = *answer;
	if (answer->capacity)
		pool->capacity = answer->capacity;
	switch (answer->state) {
	case SLOTS_HOLDING:
		/* The stall time-out begins with the grant: before it nothing could be written. */
		if (slot->stage != STAGE_HELD) {
			atomic_store(&slot->progress_ns, sent_ns);
			pool->spurious = 0;
		}
		slot->stage = STAGE_HELD;
		/* The coordinator's lease began after the question was sent. A fifth of the lease
		 * is a margin for a call under way, and for clocks that run at different rates. */
		slot->lease_end_ns = sent_ns + base_ms_to_ns(pool->config.lease_ms) / 5 * 4;
		break;
	case SLOTS_WAITING:
		slot->stage = STAGE_QUEUED;
		break;
	case SLOTS_NONE:
		slot->stage = STAGE_FORGOTTEN;
		break;
	}
	slot->beat_due_ns = sent_ns + base_ms_to_ns(beat_ms);
}

/* ---- 3. Heartbeats: functions below need the lock and release it during calls ---------------- */

/* Marks a slot as lost, and reports that to its owner. */
static void lose(struct slots_slot *slot, const char *why)
{
	struct slots_pool *pool = slot->pool;

	/* The slot was granted and lost before the thread that waits for it woke up. */
	if (!slot->held_ns) {
		slot->stage = STAGE_FORGOTTEN;
		return;
	}
	slot->stage = STAGE_LOST;
	slot->info.lost = 1;
	snprintf(slot->info.note, sizeof(slot->info.note), "the slot was lost: %s", why);
	base_log(&pool->config.log, IOSHAPE_LOG_WARNING,
		 "a slot of pool \"%s\" was lost: %s; its writer continues without it",
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

/* Sends a heartbeat for a slot that is queued or held, and takes over the answer. */
static void send_heartbeat(struct slots_slot *slot)
{
	struct slots_pool *pool = slot->pool;
	const bool held = slot->stage == STAGE_HELD;
	struct slots_beat beat = {
		.passed = atomic_load(&slot->passed),
		.holding = held,
		.fence = slot->answer.fence,
		.epoch = slot->answer.epoch,
		.weight = slot->answer.weight,
		.bytes = slot->wanted.bytes,
	};
	struct base_error error = { 0 };
	struct slots_answer answer;
	uint64_t sent_ns;
	int ret;

	memcpy(beat.id, slot->id, sizeof(beat.id));
	slot->in_call = true;
	pthread_mutex_unlock(&pool->lock);
	sent_ns = base_now_ns();
	ret = pool->ops->beat(pool->coordinator, &beat, &answer, &error);
	pthread_mutex_lock(&pool->lock);
	slot->in_call = false;
	if (ret) {
		record_unreachable(pool, &error);
		if (slot->stage == STAGE_QUEUED)
			slot->stage = STAGE_UNREACHABLE;
		slot->beat_due_ns = base_now_ns() + retry_ns(pool);
	} else {
		record_reachable(pool);
		take_answer(slot, &answer, sent_ns);
		if (held && slot->stage != STAGE_HELD)
			lose(slot, "its lease ended, an operator revoked it, or the coordinator "
				   "lost its data");
	}
	pthread_cond_broadcast(&pool->change);
}

/* Tells the coordinator that a request is over. If that fails, the request ends with its lease. */
static void send_release(struct slots_slot *slot)
{
	struct slots_pool *pool = slot->pool;

	slot->in_call = true;
	pthread_mutex_unlock(&pool->lock);
	pool->ops->release(pool->coordinator, slot->id, atomic_load(&slot->passed), NULL);
	pthread_mutex_lock(&pool->lock);
	slot->in_call = false;
}

/* Returns whether no bytes have passed for stall_ms. A disk that hangs must not block the queue. */
static bool is_stalled(const struct slots_slot *slot, uint64_t now)
{
	const uint64_t progress_ns = atomic_load(&slot->progress_ns);

	return now > progress_ns && now - progress_ns > base_ms_to_ns(slot->pool->policy.stall_ms);
}

static void give_up_stalled(struct slots_slot *slot)
{
	struct slots_pool *pool = slot->pool;
	char why[96];

	send_release(slot);
	snprintf(why, sizeof(why), "nothing was written for %u s", pool->policy.stall_ms / 1000);
	lose(slot, why);
	pthread_cond_broadcast(&pool->change);
}

/* ---- 4. The pool's thread -------------------------------------------------------------------- */

struct outlook {
	bool queued;     /* at least one slot is queued */
	bool busy;       /* at least one slot is queued or held */
	uint64_t due_ns; /* time when the thread must act at the latest */
};

static struct outlook look_around(const struct slots_pool *pool, uint64_t now)
{
	const uint32_t look_ms = MIN(pool->config.lease_ms / LOOKS_PER_LEASE, LONGEST_LOOK_MS);
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
	return outlook;
}

/* Does what is due for a slot. The caller holds the lock. Returns true if the lock was released
 * meanwhile; then the list of slots may have changed. */
static bool look_after(struct slots_slot *slot, uint64_t now)
{
	const bool held = slot->stage == STAGE_HELD;

	/* The heartbeat of another slot may have taken long. */
	if (held && base_now_ns() >= slot->lease_end_ns)
		lose(slot, "the coordinator did not answer before the lease ended");
	else if (held && is_stalled(slot, now))
		give_up_stalled(slot);
	else if ((held || slot->stage == STAGE_QUEUED) && now >= slot->beat_due_ns)
		send_heartbeat(slot);
	else
		return false;
	return true;
}

static void look_after_all(struct slots_pool *pool)
{
	struct slots_slot *slot = pool->slots;
	const uint64_t now = base_now_ns();

	/* This ends: a slot that was looked after is not due again. */
	while (slot && !pool->stop)
		slot = look_after(slot, now) ? pool->slots : slot->next;
}

/* Waits for a wake-up by the coordinator. The caller does not hold the lock. */
static int wait_for_wake(struct slots_pool *pool, uint32_t wait_ms, struct base_error *error)
{
	const struct timespec back_off = { .tv_nsec = BACK_OFF_NS };
	const uint64_t began = base_now_ns();
	const int ret = pool->ops->wait(pool->coordinator, wait_ms, error);

	pool->spurious = wait_ms && base_now_ns() - began < SPURIOUS_NS ? pool->spurious + 1 : 0;
	if (pool->spurious > MOST_SPURIOUS)
		nanosleep(&back_off, NULL);
	return ret;
}

/* Waits for a wake-up and makes heartbeats of queued slots due. The caller holds the lock, which
 * this releases meanwhile. */
static void wait_in_coordinator(struct slots_pool *pool, uint32_t wait_ms)
{
	struct base_error error = { 0 };
	int ret;

	pool->in_wait = true;
	pthread_mutex_unlock(&pool->lock);
	ret = wait_for_wake(pool, wait_ms, &error);
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
			 "cannot wait for wake-ups of pool \"%s\": %s; only heartbeats report a "
			 "granted slot",
			 pool->config.pool, error.text);
	/* The wake-up may be for any of these slots, or the coordinator may be unreachable. The
	 * answers to the heartbeats will tell. */
	for (struct slots_slot *slot = pool->slots; slot; slot = slot->next) {
		if (slot->stage == STAGE_QUEUED)
			slot->beat_due_ns = 0;
	}
}

/* Waits until a heartbeat is due or a wake-up comes. The caller holds the lock, which this releases
 * meanwhile. */
static void wait_for_news(struct slots_pool *pool, const struct outlook *outlook, uint64_t now)
{
	uint32_t wait_ms = 0;

	if (outlook->due_ns > now)
		wait_ms = (uint32_t)((outlook->due_ns - now) / 1000000 + 1);
	pool->thread_wakes_ns = outlook->due_ns;
	if (outlook->queued)
		wait_in_coordinator(pool, wait_ms);
	else if (wait_ms)
		base_cond_wait_ms(&pool->thread_change, &pool->lock, wait_ms);
}

/* Sleeps until another thread calls tell_thread(), with connections closed. The caller holds the
 * lock, which this releases meanwhile. */
static void sleep_long(struct slots_pool *pool)
{
	pool->asleep = true;
	pthread_mutex_unlock(&pool->lock);
	if (pool->ops->rest)
		pool->ops->rest(pool->coordinator);
	pthread_mutex_lock(&pool->lock);
	while (pool->asleep && !pool->stop)
		pthread_cond_wait(&pool->thread_change, &pool->lock);
}

/*
 * Runs the thread of a pool. A wake-up is a hint: the thread sends a heartbeat for every queued
 * slot, and the answer says whether that slot was granted. Slots that come and go do not signal the
 * thread. It looks by itself several times in the shortest time in which a heartbeat can become
 * due. It sleeps only when there was no work for a while.
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
	}
	pthread_mutex_unlock(&pool->lock);
	return NULL;
}

/* Starts the pool's thread if it does not run. The caller holds the lock. If the thread cannot
 * start, the thread that waits in the queue sends its own heartbeats, and a held slot ends with its
 * lease. */
static void start_thread(struct slots_pool *pool)
{
	if (pool->started || pool->stop)
		return;
	pool->thread_wakes_ns = 0;
	pool->started = !base_start_thread(&pool->thread, run_thread, pool);
}

/* Tells the pool's thread that a slot has a heartbeat due at due_ns. If the slot is queued, the
 * thread also begins to wait for wake-ups. The caller holds the lock. */
static void tell_thread(struct slots_pool *pool, uint64_t due_ns, bool queued)
{
	const bool earlier = due_ns < pool->thread_wakes_ns;

	start_thread(pool);
	if (pool->in_wait && (earlier || queued))
		pool->ops->interrupt(pool->coordinator);
	else if (!pool->in_wait && (queued || earlier || pool->asleep))
		pthread_cond_signal(&pool->thread_change);
	pool->asleep = false;
}

/* ---- 5. Ask ---------------------------------------------------------------------------------- */

/* The state of one call of slots_acquire(). */
struct attempt {
	struct slots_slot *slot;
	uint64_t begin_ns;
	uint64_t retry_ms; /* next pause */
	uint64_t alone_ns; /* time when it may write without a slot; 0: undecided */
	/* Time when it writes without a slot because of its deadline; 0: it has no deadline. */
	uint64_t last_ns;
	uint64_t told_ns; /* time when the caller was last asked; 0: never */
};

/* Asks the coordinator for the slot and sets its stage. The caller holds the lock, which this
 * releases meanwhile. */
static void ask(struct attempt *attempt)
{
	struct slots_slot *slot = attempt->slot;
	struct slots_pool *pool = slot->pool;
	const struct slots_wanted *wanted = &slot->wanted;
	struct slots_request request = {
		.weight = wanted->weight,
		.bytes = wanted->bytes,
		.urgent = wanted->deadline_ns > 0,
		.default_capacity = wanted->default_capacity,
		.boost_ms = slot->boost_ms,
	};
	struct base_error why;
	struct slots_answer answer;
	uint64_t sent_ns;
	int ret;

	memcpy(request.id, slot->id, sizeof(request.id));
	base_error_begin(&why);
	slot->stage = STAGE_ASKING;
	pthread_mutex_unlock(&pool->lock);
	sent_ns = base_now_ns();
	ret = pool->ops->acquire(pool->coordinator, &request, &answer, &why);
	pthread_mutex_lock(&pool->lock);
	if (!ret && answer.state == SLOTS_NONE)
		ret = base_fail_reason_with(
			&why, IOSHAPE_E_COORDINATOR,
			"check that all jobs use the same version of ioshape",
			"the coordinator of pool \"%s\" did not store a request",
			pool->config.pool);
	if (ret) {
		record_unreachable(pool, &why);
		slot->stage = STAGE_UNREACHABLE;
		return;
	}
	record_reachable(pool);
	take_answer(slot, &answer, sent_ns);
}

/* ---- 6. Queue -------------------------------------------------------------------------------- */

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

/* Asks the caller of slots_acquire() whether to go on waiting. Returns 0 if so. Called without the
 * lock. */
static int ask_caller(struct attempt *attempt, struct base_error *error)
{
	const struct slots_wanted *wanted = &attempt->slot->wanted;
	const char *pool = attempt->slot->pool->config.pool;
	const uint64_t now = base_now_ns();
	const uint64_t waited_ms = (now - attempt->begin_ns) / 1000000;
	struct ioshape_place place;

	if (wanted->timeout_ms < 0)
		return base_fail_reason(error, -EAGAIN, "no slot of pool \"%s\" is free", pool);
	if (wanted->timeout_ms && waited_ms >= (uint64_t)wanted->timeout_ms)
		return base_fail_with(error, -ETIMEDOUT,
				      "give it more time, or ask the operator for more slots",
				      "no slot of pool \"%s\" became free in %.1f s", pool,
				      (double)waited_ms / 1e3);
	/* News of the slot can wake this thread more often than the caller wants to be asked. */
	if (!wanted->waiting ||
	    (attempt->told_ns && now - attempt->told_ns < base_ms_to_ns(POLL_MS)))
		return 0;
	attempt->told_ns = now;
	describe_place(attempt, &place);
	if (wanted->waiting(wanted->waiting_user, &place))
		return base_fail_reason(error, -ECANCELED,
					"the caller stopped waiting for a slot of pool \"%s\"",
					pool);
	return 0;
}

/* Returns the time in ms until the caller is asked again. */
static int64_t poll_ms(const struct attempt *attempt)
{
	const int64_t timeout_ms = attempt->slot->wanted.timeout_ms;
	const int64_t waited_ms = (int64_t)((base_now_ns() - attempt->begin_ns) / 1000000);

	return timeout_ms > 0 ? MAX(MIN(POLL_MS, timeout_ms - waited_ms), 1) : POLL_MS;
}

/* Asks the caller, then sleeps until a slot changes, for at most most_ms. The caller holds the
 * lock, which this releases meanwhile. */
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
		base_cond_wait_ms(&pool->change, &pool->lock, MIN(most_ms, poll_ms(attempt)));
	return ret;
}

/* Decides to write without a slot, and withdraws the request, because it may be in the queue ahead
 * of others. The caller holds the lock, which this releases meanwhile. */
static void go_without(struct slots_slot *slot)
{
	slot->stage = STAGE_WITHOUT;
	if (!slot->pool->unreachable_ns)
		send_release(slot);
}

static bool is_last(const struct attempt *attempt)
{
	return attempt->last_ns && base_now_ns() >= attempt->last_ns;
}

/* Waits until the slot leaves STAGE_QUEUED. The caller holds the lock, which this releases
 * meanwhile. */
static int wait_in_queue(struct attempt *attempt, struct base_error *error)
{
	struct slots_slot *slot = attempt->slot;
	struct slots_pool *pool = slot->pool;
	int ret = 0;

	/* The coordinator has answered: the next outage begins with the shortest pause, and with a
	 * new stagger time. */
	attempt->retry_ms = RETRY_FIRST_MS;
	attempt->alone_ns = 0;
	if (!slot->info.position) {
		slot->info.position = slot->answer.position + 1;
		snprintf(slot->info.ahead, sizeof(slot->info.ahead), "%s", slot->answer.ahead);
	}
	tell_thread(pool, slot->beat_due_ns, true);
	while (!ret && slot->stage == STAGE_QUEUED) {
		if (is_last(attempt) && !slot->in_call) {
			go_without(slot);
			break;
		}
		ret = sleep_in_stage(attempt, POLL_MS, error);
		/* If the pool's thread cannot start, this thread sends the heartbeats. */
		start_thread(pool);
		if (!pool->started && slot->stage == STAGE_QUEUED && !slot->in_call &&
		    base_now_ns() >= slot->beat_due_ns)
			send_heartbeat(slot);
	}
	/* A slot that was granted just before a failure or time-out is kept. */
	return slot->stage == STAGE_HELD ? 0 : ret;
}

/* ---- 7. Unreachable -------------------------------------------------------------------------- */

/* Returns when this writer may write without a slot. The caller holds the lock. */
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

/* Returns a random time between ms / 2 and ms, so that clients which failed together do not retry
 * together. */
static uint64_t with_jitter(uint64_t ms)
{
	return ms / 2 + base_random() % (ms / 2 + 1);
}

/*
 * Waits until the coordinator should be asked again. Returns 0, also in STAGE_WITHOUT, when the
 * writer goes ahead without a slot; or the code with which the policy or the caller ends the wait.
 * The caller holds the lock, which this releases meanwhile.
 */
static int wait_unreachable(struct attempt *attempt, struct base_error *error)
{
	struct slots_slot *slot = attempt->slot;
	struct slots_pool *pool = slot->pool;
	const uint64_t since_ns = atomic_load(&pool->unreachable_ns);
	uint64_t now = base_now_ns(), until = now + base_ms_to_ns(with_jitter(attempt->retry_ms));
	const bool restarting = now - since_ns < base_ms_to_ns(RESTART_MS);
	int ret = 0;

	/* The coordinator has answered a call for another slot meanwhile. */
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

/* ---- 8. Acquire ------------------------------------------------------------------------------ */

/* Waits until the slot is held, or the writer goes ahead without one. The caller holds the lock,
 * which this releases meanwhile. */
static int acquire(struct attempt *attempt, struct base_error *error)
{
	struct slots_slot *slot = attempt->slot;
	int ret = 0;

	ask(attempt);
	while (!ret && slot->stage != STAGE_HELD && slot->stage != STAGE_WITHOUT) {
		if (slot->stage == STAGE_QUEUED)
			ret = wait_in_queue(attempt, error);
		else if (slot->stage == STAGE_UNREACHABLE)
			ret = wait_unreachable(attempt, error);
		if (!ret && (slot->stage == STAGE_UNREACHABLE || slot->stage == STAGE_FORGOTTEN))
			ask(attempt);
	}
	return ret;
}

/*
 * Returns when a request with a deadline goes ahead without a slot; 0: no deadline. After that
 * time, half of the deadline is left, or as much as recent writes took if that is more. The caller
 * holds the lock.
 */
static uint64_t last_moment(const struct attempt *attempt)
{
	const struct slots_slot *slot = attempt->slot;
	const uint64_t begin_ns = attempt->begin_ns, deadline_ns = slot->wanted.deadline_ns;
	const uint64_t all_ns = deadline_ns > begin_ns ? deadline_ns - begin_ns : 0;
	const uint64_t write_ns = base_ms_to_ns(slot->pool->write_ms);

	return deadline_ns ? begin_ns + all_ns - MIN(all_ns, MAX(all_ns / 2, write_ns)) : 0;
}

static struct slots_slot *new_slot(struct slots_pool *pool, const struct slots_wanted *wanted)
{
	struct slots_slot *slot = calloc(1, sizeof(*slot));

	if (!slot)
		return NULL;
	slot->pool = pool;
	slot->wanted = *wanted;
	slot->info.size = sizeof(slot->info);
	return slot;
}

/* Computes the boost from what waiting costs the job. The caller holds the lock. */
static void tell_cost(struct slots_slot *slot, uint64_t now_ns)
{
	const struct slots_priority_inputs inputs = {
		.ranks = slot->pool->config.identity.ranks,
		.writers = slot->wanted.writers,
		.bytes = slot->wanted.bytes,
		.age_ns = slots_checkpoints_begin(&slot->pool->checkpoints, now_ns),
		.blocks_training = slot->wanted.blocks_training,
	};

	if (base_without("boosts"))
		slot->boost_ms = 0;
	else if (slot->wanted.yields)
		slot->boost_ms = -SLOTS_MOST_BOOST_MS;
	else
		slot->boost_ms = slots_boost_ms(&inputs);
}

/* Reports once that the local coordinator ignores shares. The caller holds the lock. */
static void record_ignored_share(struct slots_pool *pool, struct ioshape_slot_info *info)
{
	if (pool->ops != &slots_local || pool->told_ignored ||
	    pool->config.identity.share == SLOTS_USUAL_SHARE)
		return;
	pool->told_ignored = true;
	snprintf(info->note, sizeof(info->note),
		 "the share had no effect: the processes of one host write in the order of their "
		 "requests; use a Redis as coordinator");
	base_log(&pool->config.log, IOSHAPE_LOG_WARNING, "%s", info->note);
}

/* Fills in what reports say about the slot. The caller holds the lock. */
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
	info->bypass = !without && !open && !slot->answer.weight;
	memccpy(info->coordinator,
		!without    ? pool->ops->id :
		unreachable ? "stagger" :
			      "deadline",
		0, sizeof(info->coordinator) - 1);
	if (!open)
		memcpy(info->pool, pool->config.pool, sizeof(info->pool));
	if (without)
		snprintf(info->note, sizeof(info->note),
			 unreachable ? "no slot was acquired, the save wrote after a delay of %.1f "
				       "s: %.180s" :
				       "no slot was acquired in %.1f s, and the deadline was near",
			 info->waited_s, pool->unreachable_why.text);
	else
		record_ignored_share(slot->pool, info);
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
	snprintf(slot->id, sizeof(slot->id), "%s-%llu", pool->config.identity.client,
		 (unsigned long long)pool->next_number++);
	slot->next = pool->slots;
	pool->slots = slot;
	attempt.last_ns = last_moment(&attempt);
	tell_cost(slot, attempt.begin_ns);
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
	/* The request may be in the queue, or may just have been granted. */
	if (ret)
		slots_release(slot);
	return ret;
}

/* ---- 9. Bandwidth ---------------------------------------------------------------------------- */

/* Limits bytes per second. The coordinator grants shares of the bandwidth, each for about a quarter
 * of a second. Within a share, bytes leave evenly, block by block. */

/*
 * Waits until until_ns, but at most for stall_ms, so that a rate that is set far too low does not
 * stop a save. The wait counts as progress: a paced writer must not look like a disk that hangs.
 */
static int wait_until(struct slots_slot *slot, uint64_t until_ns, int (*stop)(void *user),
		      void *stop_user)
{
	uint64_t now = base_now_ns();
	int ret;

	until_ns = MIN(until_ns, now + base_ms_to_ns(slot->pool->policy.stall_ms));
	for (; now < until_ns; now = base_now_ns()) {
		const uint64_t nap_ns = MIN(until_ns - now, base_ms_to_ns(POLL_MS));
		const struct timespec nap = { .tv_sec = 0, .tv_nsec = (long)nap_ns };

		ret = stop ? stop(stop_user) : 0;
		if (ret)
			return ret;
		nanosleep(&nap, NULL);
		atomic_store(&slot->progress_ns, base_now_ns());
	}
	return 0;
}

/* Computes this rank's part of the job's rate, for coordinators that grant no bandwidth. With
 * "local", no more ranks write at a time than there are slots. */
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
	/* The share begins where the previous one ended, or now if that is past. */
	slot->grant_start_ns = MAX(slot->grant_end_ns, now);
	slot->grant_end_ns =
		slot->grant_start_ns + (uint64_t)((double)slot->grant_bytes / (double)rate * 1e9);
}

/* Asks the coordinator for a share of the bandwidth, no larger than what is left to write. A
 * coordinator that is known to be unreachable is not asked, because each question would delay a
 * block. */
static int ask_for_share(struct slots_slot *slot, uint64_t bytes, struct slots_grant *grant)
{
	struct slots_pool *pool = slot->pool;
	const uint64_t all = slot->wanted.bytes, passed = atomic_load(&slot->passed);
	const uint64_t most = !all ? SLOTS_MOST_BYTES : bytes + (all > passed ? all - passed : 0);
	struct base_error why = { 0 };
	int ret;

	if (atomic_load(&pool->unreachable_ns))
		return IOSHAPE_E_COORDINATOR;
	ret = pool->ops->pace(pool->coordinator, bytes, most, grant, &why);
	if (ret) {
		pthread_mutex_lock(&pool->lock);
		record_unreachable(pool, &why);
		pthread_mutex_unlock(&pool->lock);
	}
	return ret;
}

/*
 * Begins a new share. While the coordinator is unreachable the writer keeps its previous rate, so
 * that other jobs stay protected.
 */
static void take_share(struct slots_slot *slot, uint64_t bytes)
{
	struct slots_pool *pool = slot->pool;
	const uint64_t length_ns = slot->grant_end_ns - slot->grant_start_ns;
	struct slots_grant grant = { 0 };
	uint64_t now;
	bool granted;

	slot->grant_used = 0;
	granted = pool->ops->pace && !ask_for_share(slot, bytes, &grant);
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

/* Returns when the next byte of the share may leave. */
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

void slots_count_alarms(struct slots_pool *pool, uint32_t alarms)
{
	struct base_error ignored = { 0 };

	if (pool->ops->alarm && !atomic_load(&pool->unreachable_ns))
		pool->ops->alarm(pool->coordinator, alarms, &ignored);
}

/* ---- 10. Release ----------------------------------------------------------------------------- */

void slots_info(struct slots_slot *slot, struct ioshape_slot_info *info)
{
	pthread_mutex_lock(&slot->pool->lock);
	*info = slot->info;
	pthread_mutex_unlock(&slot->pool->lock);
}

uint32_t slots_target_group(struct slots_slot *slot)
{
	uint32_t group;

	if (base_without("target groups"))
		return 0;
	pthread_mutex_lock(&slot->pool->lock);
	group = slot->stage == STAGE_HELD && slot->wanted.default_capacity ?
			slot->answer.target_group :
			0;
	pthread_mutex_unlock(&slot->pool->lock);
	return group;
}

/* Updates the average time that a slot is held. The caller holds the lock. */
static void learn_write_time(struct slots_pool *pool, const struct slots_slot *slot, uint64_t now)
{
	uint64_t write_ms = (now - slot->held_ns) / 1000000;

	if (!slot->held_ns)
		return;
	write_ms = MIN(MAX(write_ms, 1), UINT32_MAX / 2);
	pool->write_ms = pool->write_ms ? (uint32_t)((3ull * pool->write_ms + write_ms) / 4) :
					  (uint32_t)write_ms;
}

/* Removes a slot from its pool's list. The caller holds the lock. */
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
	uint64_t now;

	if (!slot)
		return;
	pool = slot->pool;
	pthread_mutex_lock(&pool->lock);
	while (slot->in_call)
		pthread_cond_wait(&pool->change, &pool->lock);
	unlink_slot(slot);
	now = base_now_ns();
	learn_write_time(pool, slot, now);
	pool->checkpoints.last_ns = now;
	if (slot->stage != STAGE_WITHOUT && !pool->unreachable_ns)
		send_release(slot);
	pthread_mutex_unlock(&pool->lock);
	free(slot);
}
