/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Inside the slots floor: a pool as this process sees it, and its slots. A thread that wants a slot
 * asks the coordinator itself. One thread of the pool's own does what takes time: it waits for
 * wakes, and sends heartbeats for all slots that are queued or held.
 *
 * acquire.c tells how a slot is acquired and released; it calls thread.c, that calls heartbeat.c,
 * and all call contact.c. pool.c opens and closes.
 */
#ifndef SLOTS_POOL_H
#define SLOTS_POOL_H

#include "slots/slots.h"

#include <stdatomic.h>

/* Releases that did not reach the coordinator; older ones are left to the end of their lease. */
#define SLOTS_UNSENT 64

/* The thread looks at all slots so often in a lease. The first heartbeat is due after a third. */
#define SLOTS_LOOKS_PER_LEASE 6

enum slots_stage {
	STAGE_ASKING,      /* its thread talks to the coordinator */
	STAGE_QUEUED,      /* its thread sleeps until the pool's thread has news */
	STAGE_FORGOTTEN,   /* the coordinator does not know it any more: ask again */
	STAGE_UNREACHABLE, /* the coordinator does not answer */
	STAGE_HELD,
	STAGE_LOST,   /* it was held */
	STAGE_WITHOUT /* its owner writes without a slot, or does not write */
};

struct slots_slot {
	struct slots_pool *pool;
	struct slots_slot *next; /* in pool->slots */
	struct slots_wanted wanted;
	struct slots_request request;
	_Atomic uint64_t passed;      /* bytes */
	_Atomic uint64_t progress_ns; /* when the last of them passed */

	/* Under the pool's lock. */
	enum slots_stage stage;
	struct slots_answer answer; /* the latest */
	bool in_call;               /* the pool's thread speaks for it, without the lock */
	uint64_t beat_due_ns;
	uint64_t lease_end_ns; /* believed no longer than this */
	uint64_t held_ns;      /* since; 0 until slots_acquire() returns */
	struct ioshape_slot_info info;

	/* Bandwidth (pace.c), of the thread that passes. */
	uint64_t grant_bytes, grant_used;
	uint64_t grant_start_ns, grant_end_ns;
};

struct slots_pool {
	const struct slots_ops *ops;
	void *coordinator;
	struct slots_config config;
	struct slots_policy policy;
	char *address, *password, *password_file; /* what the config points to */
	_Atomic uint64_t unlimited_until_ns;      /* no bandwidth was set when we last asked */

	pthread_mutex_t lock;  /* of all below */
	pthread_cond_t change; /* of slots */
	struct slots_slot *slots;
	uint64_t next_number;
	uint32_t capacity; /* as last heard; 0 if never */
	uint32_t write_ms; /* how long slots are held here; 0 if not known yet */
	struct slots_checkpoints checkpoints;
	_Atomic uint64_t unreachable_ns;   /* since when; 0: the coordinator answers */
	struct base_error unreachable_why; /* of the latest call that failed */
	uint64_t round;                    /* counts writes without it */
	bool told_ignored;                 /* that the coordinator knows no shares */
	struct {
		char id[SLOTS_ID_BYTES];
		uint64_t passed, until_ns;
	} unsent[SLOTS_UNSENT];
	unsigned unsent_count;

	/* The pool's thread. */
	pthread_t thread;
	bool started, stop;
	bool asleep;   /* there has been nothing to look after */
	bool in_wait;  /* of the coordinator */
	bool no_wakes; /* they cannot be waited for: heartbeats alone tell of a grant */
	pthread_cond_t thread_change;
	uint64_t thread_wakes_ns; /* when it looks again by itself */
};

/* ---- What the coordinator answers (contact.c) ------------------------------------------------ */

/* All under the lock. */
void slots_note_reachable(struct slots_pool *pool);
void slots_note_unreachable(struct slots_pool *pool, const struct base_error *error);
/* Takes an answer over. `sent_ns` is when the question was sent. */
void slots_take_answer(struct slots_slot *slot, const struct slots_answer *answer,
		       uint64_t sent_ns);
/* After a slot came or went: calls of the coordinator end before the next lease does. */
void slots_watch_leases(struct slots_pool *pool);
/* When a call that failed is tried again, from now. */
uint64_t slots_retry_ns(const struct slots_pool *pool);

/* ---- Heartbeats (heartbeat.c) ---------------------------------------------------------------- */

/* Sends one, for a slot that is queued or held, and takes the answer. Under the lock, which it lets
 * go meanwhile. */
void slots_heartbeat(struct slots_slot *slot);
/* Of a slot that is queued or held, what is due. Under the lock; true: it was let go meanwhile, and
 * the list of slots may have changed. */
bool slots_look_after(struct slots_slot *slot, uint64_t now);

/* ---- The pool's thread (thread.c) ------------------------------------------------------------ */

/* Under the lock. If it cannot be started, a queued slot's own thread does its work, and a held
 * slot ends with its lease. */
void slots_start_thread(struct slots_pool *pool);
/* There is something to look after by then, or a slot that is queued: wakes are waited for from now
 * on. Under the lock. */
void slots_tell_thread(struct slots_pool *pool, uint64_t due_ns, bool queued);
/* Ends it. */
void slots_stop(struct slots_pool *pool);

/* ---- Bandwidth (pace.c) ---------------------------------------------------------------------- */

/* What was granted and not used goes back. */
void slots_pace_end(struct slots_slot *slot);

#endif
