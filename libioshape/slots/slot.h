/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Inside the slots floor: a pool as this process sees it, and its slots. slot.c is the state
 * machine of a slot; pace.c limits the bandwidth of slots that are held.
 */
#ifndef SLOTS_SLOT_H
#define SLOTS_SLOT_H

#include "slots/slots.h"

#include <stdatomic.h>

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
	_Atomic uint64_t lease_end_ns;            /* of the slot whose lease ends first; 0: none */

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

	/* The pool's thread. */
	pthread_t thread;
	bool started, stop;
	bool asleep;    /* there has been nothing to look after */
	bool in_wait;   /* of the coordinator */
	bool no_wakes;  /* they cannot be waited for: heartbeats alone tell of a grant */
	unsigned hasty; /* waits in a row that ended at once */
	pthread_cond_t thread_change;
	uint64_t thread_wakes_ns; /* when it looks again by itself */
};

/* Remembers that a call of the coordinator failed, and logs the first failure. Under the lock. */
void slots_note_unreachable(struct slots_pool *pool, const struct base_error *error);

/* Gives back what was granted and not used (pace.c). */
void slots_pace_end(struct slots_slot *slot);

#endif
