/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The rules by which writers of one host take turns: what slots.lua does in Redis, operation by
 * operation, on a state in memory. Pure: the time is passed in, nothing is read or written, no
 * memory is allocated.
 *
 * All times are milliseconds, all costs slot-milliseconds. Where Lua counts in doubles and a
 * fraction can appear, so do we: the results are the same to the last bit.
 */
#ifndef SLOTS_RULES_H
#define SLOTS_RULES_H

#include "slots/slots.h"

#define RULES_MEMBERS 1024u /* that hold or wait, in one pool */
#define RULES_JOBS 1024u    /* with members, and remembered; who used least goes first */
#define RULES_WOKEN 128u    /* more than one operation can let in */
#define RULES_LATEST_MS (INT64_C(1) << 42) /* no clock is later than that */

enum rules_member_state { RULES_WAITING = 1, RULES_HOLDING = 2 };

/* Members, jobs and numbers lie in files as they are here, shared by programs of 32 and 64 bits: no
 * type without a fixed width, no padding. */

struct rules_member {
	char id[SLOTS_ID_BYTES];
	char job[SLOTS_TEXT_BYTES];
	char node[SLOTS_TEXT_BYTES];
	uint64_t bytes;
	uint64_t passed;
	uint64_t fence;
	uint64_t seq; /* rises among those that wait: the order of those alike */
	int64_t since;
	int64_t deadline;   /* of the lease; of a waiter: until it is taken for dead */
	double cost;        /* expected when it asked */
	double start;       /* its tag: the queue is in this order */
	double small_start; /* its tag among the small ones */
	uint32_t rank;
	uint32_t share;
	uint32_t weight; /* asked for */
	uint32_t given;  /* 0: express */
	uint32_t lease;
	uint32_t state;   /* enum rules_member_state */
	uint32_t process; /* the caller's: who is to be woken */
	uint32_t small;   /* waits, and may be let past the queue: 0 or 1 */
};

struct rules_job {
	char name[SLOTS_TEXT_BYTES];
	uint64_t busy;       /* in which busy time of the pool it was seen */
	double finish;       /* where its next request begins */
	double latest;       /* where the latest one began */
	double small_finish; /* as finish, among the small ones */
	double usual;        /* what those without a size cost, by weight 1 */
	double ms;           /* time and size of its latest writes */
	double bytes;
	double free;      /* when its bandwidth is free again */
	uint32_t members; /* in the pool */
	uint32_t share;   /* while there are any */
};

struct rules_numbers {
	int64_t clock;  /* the latest time seen: ours never goes back */
	uint64_t epoch; /* when this state was made */
	uint64_t fence; /* the last one given */
	uint64_t seq;
	uint64_t busy; /* counts the times that the pool began to be used */
	uint64_t grants;
	int64_t minute;
	double vt;       /* virtual time: slot-milliseconds that a job of share 1 could have had */
	double served;   /* the latest tag that was let in */
	double small_vt; /* virtual time of those that were let past the queue */
	double ms;       /* time and size of the latest writes */
	double bytes;
	double free; /* when the pool's bandwidth is free again */
	uint64_t set_pool_rate;
	uint64_t set_job_rate;
	uint64_t set_small;
	uint32_t set_capacity;
	uint32_t set_express;
	uint32_t capacity; /* as the jobs ask for it */
	uint32_t by;       /* 1: a job asked; 0: the default */
	uint32_t this_minute;
	uint32_t last_minute;
};

struct rules_state {
	struct rules_numbers pool;
	uint32_t member_count;
	uint32_t job_count;
	/* Counted again by rules_hold(). */
	uint32_t holders;
	uint32_t waiters;
	uint32_t small_waiters;
	uint32_t express_used;
	uint64_t shares; /* of the jobs that hold or wait, together */
	uint64_t used;
	/* Processes of those that waited and were let in since the caller set the count to 0. */
	uint32_t woken_count;
	uint32_t woken[RULES_WOKEN];
	int64_t now; /* during an operation */
	struct rules_job jobs[RULES_JOBS];
	struct rules_member members[RULES_MEMBERS];
};

/* An empty pool. Epoch and fences are above those given. */
void rules_make(struct rules_state *state, int64_t now, uint64_t epoch_above, uint64_t fence_above);

/*
 * Whether numbers, members and jobs from an untrusted place (with counts that are within bounds)
 * can be used: afterwards nothing that is in them leads an operation out of bounds, and nobody
 * stays longer than a lease. Counts what is counted.
 */
bool rules_hold(struct rules_state *state);

/* -ENOSPC if the pool is full. */
int rules_acquire(struct rules_state *state, int64_t now, const struct slots_config *config,
		  const struct slots_request *request, uint32_t process,
		  struct slots_answer *answer);
void rules_beat(struct rules_state *state, int64_t now, const struct slots_config *config,
		const struct slots_beat *beat, struct slots_answer *answer);
bool rules_release(struct rules_state *state, int64_t now, const char *id, uint64_t passed);
void rules_pace(struct rules_state *state, int64_t now, const struct slots_config *config,
		int64_t bytes, struct slots_grant *grant);
void rules_set(struct rules_state *state, int64_t now,
	       const struct ioshape_pool_settings *settings);
bool rules_kick(struct rules_state *state, int64_t now, const char *id);
/* 0 or -ENOMEM. */
int rules_status(struct rules_state *state, int64_t now, struct slots_status_maker *maker);

/* What slots.lua has not: all that this process held and waited for is forgotten, now. */
void rules_bury(struct rules_state *state, int64_t now, uint32_t process);

/* Who would have to be dead for the queue to move: holders, and the first that waits, if there is
 * one. Fills in up to `room` processes, each once, and says how many. */
uint32_t rules_in_the_way(struct rules_state *state, uint32_t *processes, uint32_t room);

/* Whether the operator has set anything. */
bool rules_numbers_set(const struct rules_numbers *pool);

#endif
