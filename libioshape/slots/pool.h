/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Inside the slots floor: a pool as this process sees it, and its slots. Whoever wants a slot asks
 * the coordinator in his own thread. One thread of the pool's own does what takes time: it waits
 * for wakes, and gives signs of life for all that wait or hold.
 */
#ifndef SLOTS_POOL_H
#define SLOTS_POOL_H

#include "slots/slots.h"

#include <stdatomic.h>

/* Releases that could not be said yet; older ones are left to the end of their lease. */
#define SLOTS_UNSAID 64

enum slots_stage {
	STAGE_ASKING,  /* its thread talks to the coordinator */
	STAGE_QUEUED,  /* its thread waits for the pool's thread to hear something */
	STAGE_UNKNOWN, /* the coordinator does not know it any more: ask again */
	STAGE_AWAY,    /* the coordinator is out of reach */
	STAGE_HELD,
	STAGE_LOST, /* it was held */
	STAGE_FREE  /* to write, without a slot */
};

struct slots_slot {
	struct slots_pool *pool;
	struct slots_slot *next; /* in pool->slots */
	struct slots_wish wish;
	struct slots_request request;
	_Atomic uint64_t passed;      /* bytes */
	_Atomic uint64_t progress_ns; /* when the last of them passed */

	/* Under the pool's lock. */
	enum slots_stage stage;
	struct slots_answer answer; /* the latest */
	bool beating;               /* the pool's thread is speaking for it, without the lock */
	uint64_t beat_due_ns;
	uint64_t lease_end_ns; /* believed no longer than this */
	uint64_t held_ns;      /* since */
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
	char *address, *password;            /* what the config points to */
	_Atomic uint64_t unlimited_until_ns; /* no bandwidth was set when we last asked */

	pthread_mutex_t lock;  /* of all below */
	pthread_cond_t change; /* of slots */
	struct slots_slot *slots;
	uint64_t next_number;
	uint32_t capacity;          /* as last heard; 0 if never */
	uint32_t write_ms;          /* what a slot is held for, as a rule; 0 if not known yet */
	_Atomic uint64_t away_ns;   /* since when the coordinator is out of reach; 0 if it is not */
	struct base_error away_why; /* as of the latest call that failed */
	uint64_t round;             /* counts saves without it */
	struct {
		char id[SLOTS_ID_BYTES];
		uint64_t passed, until_ns;
	} unsaid[SLOTS_UNSAID];
	unsigned unsaid_count;

	/* The pool's thread (beats.c). */
	pthread_t thread;
	bool started, stop;
	bool asleep;  /* there has been nothing to look after */
	bool in_wait; /* of the coordinator */
	bool deaf;    /* wakes cannot be waited for: who waits asks instead */
	pthread_cond_t thread_change;
	uint64_t thread_wakes_ns; /* when it looks again by itself */
};

/* ---- Signs of life (beats.c) ----------------------------------------------------------------- */

/* Something is there to be looked after; starts the thread if need be. Under the lock. On failure
 * to start it the slot simply ends with its lease. */
void slots_beats_need(struct slots_pool *pool, uint64_t due_ns);
/* The same for a slot that stands in the queue: wakes are waited for from now on. */
void slots_beats_queue(struct slots_pool *pool, uint64_t due_ns);
/* There is no thread: tries again to start one, and meanwhile gives the signs of life of a slot in
 * the queue from the thread that waits for it. Under the lock, which it lets go. */
void slots_beats_by_hand(struct slots_slot *slot);
void slots_beats_stop(struct slots_pool *pool);

/* Takes an answer over. Under the lock. `sent_ns` is when the question was sent. */
void slots_take_answer(struct slots_slot *slot, const struct slots_answer *answer,
		       uint64_t sent_ns);

/* After a slot came or went: calls of the coordinator end before the next lease does. Under the
 * lock. */
void slots_watch_leases(struct slots_pool *pool);

/* Notes that the coordinator answered, or did not. Under the lock. */
void slots_note_back(struct slots_pool *pool);
void slots_note_away(struct slots_pool *pool, const struct base_error *error);

/* ---- Bandwidth (pace.c) ---------------------------------------------------------------------- */

/* What was granted and not used goes back. */
void slots_pace_end(struct slots_slot *slot);

#endif
