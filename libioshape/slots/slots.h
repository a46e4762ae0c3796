/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The right to write now. Two layers: coordinators, which keep the order of a pool among all
 * processes (redis.c, local.c, and one in slot.c that has no order; a table of functions each), and
 * pools, the part of it that happens in this process (slot.c): waiting, heartbeats, bandwidth,
 * and what to do while the coordinator cannot be reached. All network traffic of the
 * library happens on this floor.
 *
 * docs/slots.md says who is next; slots.lua decides it for Redis, local.c for one host.
 */
#ifndef SLOTS_SLOTS_H
#define SLOTS_SLOTS_H

#include "base/base.h"

#include <ioshape/slots.h>

#include <sys/types.h>

/* ---- Names ----------------------------------------------------------------------------------- */

#define SLOTS_USER_BYTES 24

/* Who we are: the same for all requests of a process to a pool. Printable ASCII only. */
struct slots_identity {
	char client[17]; /* 16 hexadecimal digits, random: each pool of a process is a client */
	char job[SLOTS_TEXT_BYTES];
	char node[SLOTS_TEXT_BYTES];
	char user[SLOTS_USER_BYTES];
	uint32_t rank;
	uint32_t ranks; /* of the job, as far as is known; at least 1 */
	uint32_t share;
};

/* ---- Coordinators ---------------------------------------------------------------------------- */

struct slots_ops;

/* What a pool is opened with. Strings are borrowed until the pool is closed. */
struct slots_config {
	const char *address;       /* ioshape_context_options.coordinator */
	const char *password;      /* NULL if there is none beside the address's */
	const char *password_file; /* instead of it; read before each connection; NULL: none */
	char pool[SLOTS_NAME_BYTES];
	struct slots_identity identity;
	uint32_t lease_ms;
	uint32_t asked_capacity; /* by the job; 0 for none */
	uint32_t default_capacity;
	uint64_t rate;               /* of the job, bytes per second; 0: any */
	const struct slots_ops *ops; /* the coordinator; NULL: the one that the address names */
	/* NULL, or when the next lease of this process ends, 0 if it holds none: calls return by
	 * then, because a thread that waits for an answer could not say that a slot was lost. */
	const _Atomic uint64_t *lease_end_ns;
	struct base_log log;
};

/* A request for a slot. It is made under an id of the client's, so that it can be repeated when the
 * answer was lost: the second time it changes nothing. */
struct slots_request {
	char id[SLOTS_ID_BYTES];
	uint32_t weight;
	uint64_t bytes;  /* that are to be written; 0 unknown */
	bool never_wait; /* if it is not granted at once, it is not queued either */
	bool urgent;     /* it has a deadline: before those that have none, one beside the slots */
	/* Instead of the pool's; 0: that. So many writers have storage targets of their own: slots
	 * that are held at a time have places among them. */
	uint32_t default_capacity;
	int32_t boost_ms; /* time of the whole pool that it may get ahead of its share */
};

/* A heartbeat. */
struct slots_beat {
	char id[SLOTS_ID_BYTES];
	uint64_t passed; /* bytes so far */
	bool holding;    /* as far as the client knows */
	/* For those that hold: what may be reclaimed if the coordinator lost its data. */
	uint64_t fence;
	uint64_t epoch;
	uint32_t weight; /* as granted: 0 for express */
	uint64_t bytes;
};

enum slots_state {
	SLOTS_NONE, /* neither holder nor waiter: never was, timed out, kicked, or lost */
	SLOTS_WAITING,
	SLOTS_HOLDING
};

struct slots_answer {
	enum slots_state state;
	uint64_t fence;    /* holders */
	uint64_t epoch;    /* of the coordinator's data */
	uint32_t weight;   /* granted; 0: express */
	uint32_t position; /* waiters: how many are ahead in the queue */
	uint32_t place;    /* holders: of default_capacity places, the one to write to; 0: none */
	uint32_t capacity;
	uint32_t beat_ms;             /* when the next heartbeat is due, at the latest */
	char ahead[SLOTS_NAME_BYTES]; /* waiters: "job 4711, rank 7 on n03" */
};

/* A share of the bandwidth: `bytes` may leave, spread evenly, from `start_ms` from now until
 * `end_ms` from now. bytes is 0 if nothing limits the bandwidth: then ask again after end_ms. */
struct slots_grant {
	uint64_t bytes;
	uint32_t start_ms;
	uint32_t end_ms;
};

/*
 * One coordinator. A pool's functions may be called from several threads at a
 * time, except wait(), which one thread calls. All but wait() return soon: within about two
 * seconds, whatever the network does. IOSHAPE_E_COORDINATOR: unreachable, or it refuses us; the
 * sentence says why. Nothing needs to be reopened after that: the next call tries again.
 */
struct slots_ops {
	const char *id;
	/* Checks the address, connects to nothing yet. -EINVAL, naming what is wrong. */
	int (*open)(void **pool, const struct slots_config *config, struct base_error *error);
	int (*acquire)(void *pool, const struct slots_request *request, struct slots_answer *answer,
		       struct base_error *error);
	int (*beat)(void *pool, const struct slots_beat *beat, struct slots_answer *answer,
		    struct base_error *error);
	/* Also takes back a request. An unknown id is fine. `passed` as in beats. */
	int (*release)(void *pool, const char *id, uint64_t passed, struct base_error *error);
	/*
	 * Waits until something may have happened to a request of this pool's in this process (a
	 * hint: beat() tells the truth), until interrupt(), or for timeout_ms.
	 */
	int (*wait)(void *pool, uint32_t timeout_ms, struct base_error *error);
	/* Any thread. Ends the wait() under way, or the next one at once. */
	void (*interrupt)(void *pool);
	/* No other call is under way. What the process held is given back where that takes no
	 * waiting. */
	void (*close)(void *pool);
	/* Optional. The thread that waits: no slot was held or waited for for a while, so
	 * that connections can be closed. */
	void (*rest)(void *pool);
	/* Optional: NULL if the coordinator grants no bandwidth. Below 0: so many bytes of the last
	 * grant were not used. */
	int (*pace)(void *pool, int64_t bytes, struct slots_grant *grant, struct base_error *error);
	/* Optional: NULL if the coordinator has no pools. Tells where a pool of this configuration
	 * is kept, for the operator's calls in Python. */
	int (*describe)(const struct slots_config *config, struct slots_coordinator *found,
			struct base_error *error);
};

extern const struct slots_ops slots_redis;
extern const struct slots_ops slots_local;
extern const struct slots_ops slots_open;

/* The coordinator that an address names; NULL for a word that is none. */
const struct slots_ops *slots_coordinator_of(const char *address);

/* ---- Numbers that all coordinators go by (docs/slots.md) ------------------------------------- */

#define SLOTS_SMALL_BYTES (16 * MIB) /* up to here a request may be let past the queue */
#define SLOTS_EXPRESS 1u             /* so many of them at a time */
#define SLOTS_USUAL_SHARE 100u       /* of a job that does not ask for another one */
#define SLOTS_MOST_PLACES 64u
#define SLOTS_MOST_BOOST_MS 300000
#define SLOTS_MOST_CAPACITY 65536u
/* In a request, or per second: above it the numbers of slots.lua have holes. */
#define SLOTS_MOST_BYTES (UINT64_C(1) << 53)

/* ---- Pools in this process (slot.c) ---------------------------------------------------------- */

struct slots_pool;

struct slots_policy {
	enum ioshape_unreachable unreachable;
	uint32_t stagger_most_ms;
	uint32_t stall_ms;
};

int slots_pool_open(struct slots_pool **out, const struct slots_config *config,
		    const struct slots_policy *policy, struct base_error *error);
/* All its slots have been released. */
void slots_pool_close(struct slots_pool *pool);
const char *slots_pool_name(const struct slots_pool *pool);
/* A slot that is held, or was; one thread at a time, but for slots_info(). */
struct slots_slot;

struct slots_wanted {
	uint32_t weight; /* at least 1 */
	uint64_t bytes;
	/* By rule, for writers as this one: instead of the pool's, and like that only where neither
	 * operator nor job said anything. 0: the pool's. */
	uint32_t default_capacity;
	uint32_t writers; /* of its job at a time; 0: all ranks */
	bool holds_up;    /* the program does nothing else meanwhile */
	bool yields; /* what is written is safe elsewhere: all others go first, as far as may be */
	int64_t timeout_ms; /* as in ioshape_slot_options */
	/* base_deadline_ns(); 0: none. Otherwise it goes before those without, and ahead without a
	 * slot in time; bandwidth is not waited for. */
	uint64_t deadline_ns;
	ioshape_queue_fn waiting;
	void *waiting_user;
	ioshape_lost_fn lost;
	void *lost_user;
};

int slots_acquire(struct slots_pool *pool, const struct slots_wanted *wanted,
		  struct slots_slot **out, struct base_error *error);
/*
 * Before bytes are written. Waits as the bandwidth dial asks; meanwhile `stop` (may be NULL) is
 * asked ten times a second: anything but 0 ends the waiting and is returned.
 */
int slots_pass(struct slots_slot *slot, uint64_t bytes, int (*stop)(void *user), void *stop_user);
void slots_info(struct slots_slot *slot, struct ioshape_slot_info *info);
/* From 1 on: to which part of the storage targets its file should go, of as many as
 * slots_wanted.default_capacity; 0: to any. */
uint32_t slots_place(struct slots_slot *slot);
void slots_release(struct slots_slot *slot);

/* ---- Notes in a Redis (notes.c) -------------------------------------------------------------- */

/*
 * Lists of named bytes beside a pool's own keys, each under "{ios:<pool>}:board:<list>". One thread
 * at a time. Calls return within about two seconds; IOSHAPE_E_COORDINATOR as above.
 */
struct slots_notes;

#define SLOTS_NOTES_AT_A_TIME 128u
#define SLOTS_NOTES_KEPT_MS (3600u * 1000)
#define SLOTS_NOTES_REPLY_BYTES (256 * MIB) /* in one call */
#define SLOTS_NOTES_LIST_BYTES 192

/* Connects to nothing yet. -EINVAL, naming what is wrong, if the address is no Redis'. */
int slots_notes_open(struct slots_notes **out, const struct slots_config *config,
		     struct base_error *error);
/* Replaces what has this name. The list is kept for SLOTS_NOTES_KEPT_MS from now. */
int slots_notes_put(struct slots_notes *notes, const char *list, const char *name, const void *data,
		    size_t bytes, struct base_error *error);
/* found() is called for those of `count` names that are there, in order; anything but 0 ends it
 * with that code. */
int slots_notes_get(struct slots_notes *notes, const char *list, const char *const *names,
		    size_t count,
		    int (*found)(void *user, size_t index, const void *data, size_t bytes),
		    void *user, struct base_error *error);
int slots_notes_remove(struct slots_notes *notes, const char *list, struct base_error *error);
void slots_notes_close(struct slots_notes *notes); /* NULL is fine */

/* ---- What a process says of itself (identity.c) ---------------------------------------------- */

/* What a job loses while it waits for a slot, as far as its process knows. */
struct slots_stake {
	uint32_t ranks, writers; /* of the job; those that write at a time */
	uint64_t bytes;          /* of this writer; 0 unknown */
	uint64_t age_ns;         /* of the work that a failure would destroy */
	bool holds_up;           /* its ranks do nothing else meanwhile */
};

/* Return the boost of a request, in ms, within SLOTS_MOST_BOOST_MS either way. */
int32_t slots_boost_ms(const struct slots_stake *stake);

/* Checkpoints of this process in a pool: files that it saves soon after each other are of one.
 * Begins as zeros. */
struct slots_checkpoints {
	uint64_t begin_ns; /* of the latest one */
	uint64_t age_ns;   /* then, of the one before */
	uint64_t last_ns;  /* when one of its files was last written */
};

/* A file is asked for: the age of the work that it saves. */
uint64_t slots_checkpoints_begin(struct slots_checkpoints *checkpoints, uint64_t now_ns);

/* When the coordinator is unreachable: how long this writer waits before it writes, in
 * ms. */
uint32_t slots_stagger_ms(const struct slots_identity *identity, uint64_t save, uint32_t capacity,
			  uint32_t write_ms, uint32_t most_ms);

/* Who this process is, from the launcher's variables, but for `client`, which each pool draws.
 * `job` may be NULL. */
void slots_identify(struct slots_identity *identity, const char *job, uint32_t share);

#endif
