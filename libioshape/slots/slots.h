/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Slots: the right to write now. This layer does all network traffic of the library.
 *
 * It has two parts. Coordinators keep the order of a pool among all processes. Each one is a table
 * of functions: redis.c, local.c, and one in slot.c that grants everything at once. Pools are what
 * happens in this process (slot.c): waiting, heartbeats, bandwidth, and what to do while the
 * coordinator is unreachable.
 *
 * docs/slots.md has the rules for the next request in the queue. slots.lua applies them in Redis,
 * local.c on one host.
 */
#ifndef SLOTS_SLOTS_H
#define SLOTS_SLOTS_H

#include "base/base.h"

#include <ioshape/slots.h>

#include <sys/types.h>

/* ---- Identity -------------------------------------------------------------------------------- */

#define SLOTS_USER_BYTES 24

/* The identity that a process gives itself before the coordinator. All requests of the process to
 * one pool share it. Printable ASCII only. */
struct slots_identity {
	char client[17]; /* 16 random hexadecimal digits, one client for each pool */
	char job[SLOTS_TEXT_BYTES];
	char node[SLOTS_TEXT_BYTES];
	char user[SLOTS_USER_BYTES];
	uint32_t rank;
	uint32_t ranks; /* ranks of the job, as far as the process knows; at least 1 */
	uint32_t share;
};

/* ---- Coordinators ---------------------------------------------------------------------------- */

struct slots_ops;

/* The configuration with which a pool is opened. Strings are borrowed until the pool is closed. */
struct slots_config {
	const char *address;  /* as in ioshape_context_options.coordinator */
	const char *password; /* NULL if only the address may contain one */
	/* Path, read before each connection and preferred to `password`; NULL: none. */
	const char *password_file;
	char pool[SLOTS_NAME_BYTES];
	struct slots_identity identity;
	uint32_t lease_ms;
	uint32_t asked_capacity; /* capacity that the job asks for; 0: none */
	uint32_t default_capacity;
	/* Bandwidth limit of the job, in bytes per second; 0: unlimited. */
	uint64_t rate;
	const struct slots_ops *ops; /* NULL: those of the coordinator that the address names */
	struct base_log log;
};

/* A request for a slot. The client chooses its id, so that it can repeat the request if the answer
 * was lost. A repeated request changes nothing. */
struct slots_request {
	char id[SLOTS_ID_BYTES];
	uint32_t weight;
	uint64_t bytes; /* bytes that will be written; 0: unknown */
	/* The request has a deadline: it goes before all without one, and one such request may
	 * write beside the slots. */
	bool urgent;
	/* Capacity that replaces the pool's default; 0: the pool's. So many writers can have
	 * separate groups of storage targets. The coordinator spreads the slots that are held over
	 * these groups. */
	uint32_t default_capacity;
	int32_t boost_ms; /* lead over its job's share, in time of the whole pool */
};

/* A heartbeat for a request that holds a slot or waits for one. */
struct slots_beat {
	char id[SLOTS_ID_BYTES];
	uint64_t passed; /* bytes written so far */
	bool holding;    /* whether the client believes that it holds the slot */
	/* The remaining members describe a held slot. With them a holder reclaims its slot if the
	 * coordinator lost its data. */
	uint64_t fence;
	uint64_t epoch;
	uint32_t weight; /* slots as granted; 0: small-file bypass */
	uint64_t bytes;
};

enum slots_state {
	SLOTS_NONE, /* neither holder nor waiter: unknown, expired, kicked or lost */
	SLOTS_WAITING,
	SLOTS_HOLDING
};

struct slots_answer {
	enum slots_state state;
	uint64_t fence;        /* holders only */
	uint64_t epoch;        /* epoch of the coordinator's data */
	uint32_t weight;       /* slots granted; 0: small-file bypass */
	uint32_t position;     /* waiters: number of requests ahead in the queue */
	uint32_t target_group; /* holders: group of storage targets, from 1; 0: any */
	uint32_t capacity;
	uint32_t beat_ms;             /* longest time until the next heartbeat */
	char ahead[SLOTS_NAME_BYTES]; /* waiters: such as "job 4711, rank 7 on n03" */
};

/* A grant of bandwidth: `bytes` may be written, spread evenly between start_ms and end_ms from now.
 * If bytes is 0, nothing limits the bandwidth; the client asks again after end_ms. */
struct slots_grant {
	uint64_t bytes;
	uint32_t start_ms;
	uint32_t end_ms;
};

/*
 * A coordinator. Several threads may call its functions for one pool at a time; only wait() is
 * called by one thread at a time. All functions but wait() return within about two seconds,
 * whatever the network does. They return IOSHAPE_E_COORDINATOR if the coordinator is unreachable or
 * refuses the client; the error message says why. The pool stays usable after that, and the next
 * call tries again.
 */
struct slots_ops {
	const char *id;
	/* Checks the address, and does not connect yet. -EINVAL: the error names the wrong part. */
	int (*open)(void **pool, const struct slots_config *config, struct base_error *error);
	int (*acquire)(void *pool, const struct slots_request *request, struct slots_answer *answer,
		       struct base_error *error);
	int (*beat)(void *pool, const struct slots_beat *beat, struct slots_answer *answer,
		    struct base_error *error);
	/* Releases a slot, or withdraws a request that waits. Succeeds if the id is unknown.
	 * `passed` is the number of bytes written, as in heartbeats. */
	int (*release)(void *pool, const char *id, uint64_t passed, struct base_error *error);
	/*
	 * Waits for a change to one of this process's requests in the pool, until interrupt(), or
	 * for timeout_ms. The return is only a hint; beat() returns the state of a request.
	 */
	int (*wait)(void *pool, uint32_t timeout_ms, struct base_error *error);
	/* Ends the wait() under way; if there is none, the next wait() returns at once. Any thread
	 * may call this. */
	void (*interrupt)(void *pool);
	/* Frees the pool; no other call may be under way. Releases the slots of this process if
	 * that takes no waiting. */
	void (*close)(void *pool);
	/* Optional. The thread that calls wait() calls this when the process has used no slot for a
	 * while, so that the coordinator can close its connections. */
	void (*rest)(void *pool);
	/* Optional: NULL if the coordinator grants no bandwidth. Grants at least `bytes`, and
	 * otherwise at most `most`. */
	int (*pace)(void *pool, uint64_t bytes, uint64_t most, struct slots_grant *grant,
		    struct base_error *error);
	/* Optional: NULL if the coordinator counts nothing. Counts a save of the job that raised
	 * `alarms`, bits of enum ioshape_alarm, for the operator. */
	int (*alarm)(void *pool, uint32_t alarms, struct base_error *error);
	/* Optional: NULL if the coordinator keeps no pools. Fills in where a pool of this
	 * configuration is kept, for the operator's commands in Python. */
	int (*describe)(const struct slots_config *config, struct slots_coordinator *found,
			struct base_error *error);
};

extern const struct slots_ops slots_redis;
extern const struct slots_ops slots_local;
extern const struct slots_ops slots_open;

/* Returns the coordinator that an address names. An address that names none is one of a Redis,
 * whose open() refuses it. */
const struct slots_ops *slots_coordinator_of(const char *address);

/* ---- Numbers that all coordinators use (docs/slots.md) --------------------------------------- */

#define SLOTS_SMALL_BYTES (16 * MIB) /* largest request that may use the small-file bypass */
#define SLOTS_BYPASS 1u              /* requests that may use the small-file bypass at a time */
#define SLOTS_USUAL_SHARE 100u       /* share of a job that does not ask for one */
#define SLOTS_MOST_TARGET_GROUPS 64u
#define SLOTS_MOST_BOOST_MS 300000
#define SLOTS_MOST_CAPACITY 65536u
/* Largest number of bytes in a request, or per second: Lua counts exactly only up to here. */
#define SLOTS_MOST_BYTES (UINT64_C(1) << 53)

/* ---- Pools in this process (slot.c) ---------------------------------------------------------- */

struct slots_pool;

/* The policy of a pool for an unreachable coordinator and for stalled writers. */
struct slots_policy {
	enum ioshape_unreachable unreachable; /* while the coordinator is unreachable */
	uint32_t stagger_most_ms;             /* longest staggered start */
	uint32_t stall_ms;                    /* a slot without progress for so long is given up */
};

/* Opens a pool; does not connect yet. -EINVAL: the address is not valid. */
int slots_pool_open(struct slots_pool **out, const struct slots_config *config,
		    const struct slots_policy *policy, struct base_error *error);
/* Closes a pool whose slots have all been released. NULL is allowed. */
void slots_pool_close(struct slots_pool *pool);
const char *slots_pool_name(const struct slots_pool *pool);
/* A slot that is or was held. One thread at a time may use it; slots_info() may be called by any
 * thread. */
struct slots_slot;

struct slots_wanted {
	uint32_t weight; /* number of slots; at least 1 */
	uint64_t bytes;
	/* Capacity by rule for writers with this file's layout. It replaces the pool's default, and
	 * counts only if neither operator nor job set a capacity. 0: the pool's default. */
	uint32_t default_capacity;
	uint32_t writers;     /* writers of the job at a time; 0: all ranks */
	bool blocks_training; /* training waits for this save */
	bool yields; /* the data is safe already: others go first, within the bounds of the boost */
	int64_t timeout_ms; /* longest wait, as in ioshape_slot_options */
	/* A time from base_deadline_ns(); 0: none. A request with a deadline goes before those
	 * without one, and in time it writes without a slot. Its bandwidth is not limited. */
	uint64_t deadline_ns;
	ioshape_queue_fn waiting;
	void *waiting_user;
	ioshape_lost_fn lost;
	void *lost_user;
};

/*
 * Waits for a slot. Returns 0 with a slot, or with one that stands for writing without a slot: the
 * policy or a deadline allowed that, and slots_info() says so. Otherwise returns -ETIMEDOUT,
 * -EAGAIN, -ECANCELED, -ENOMEM, or a failure of the coordinator if the policy is to fail. *out is
 * NULL then.
 */
int slots_acquire(struct slots_pool *pool, const struct slots_wanted *wanted,
		  struct slots_slot **out, struct base_error *error);
/*
 * Waits until `bytes` may be written within the bandwidth limits. Call it before the bytes are
 * written. While it waits it calls `stop` ten times a second, unless `stop` is NULL. If stop()
 * returns anything but 0, the wait ends and returns that value.
 */
int slots_pass(struct slots_slot *slot, uint64_t bytes, int (*stop)(void *user), void *stop_user);
/* Counts a save that raised `alarms`, if the coordinator counts them and is reachable. */
void slots_count_alarms(struct slots_pool *pool, uint32_t alarms);
/* Fills in how the slot was acquired, and whether it is still held. */
void slots_info(struct slots_slot *slot, struct ioshape_slot_info *info);
/* Returns the group of storage targets for the slot's file, from 1 to
 * slots_wanted.default_capacity; 0: any group. */
uint32_t slots_target_group(struct slots_slot *slot);
/* Gives the slot back and frees it. NULL is allowed. */
void slots_release(struct slots_slot *slot);

/* ---- Messages in a Redis (redis.c) ----------------------------------------------------------- */

/*
 * A connection that keeps lists of named messages in a Redis. Each list has the key
 * "{ios:<pool>}:store:<list>", beside the pool's own keys. One thread at a time may use it. Calls
 * return within about two seconds, and return IOSHAPE_E_COORDINATOR if the Redis is unreachable or
 * refuses the client.
 */
struct slots_messages;

#define SLOTS_MESSAGES_AT_A_TIME 128u
#define SLOTS_MESSAGES_KEPT_MS (3600u * 1000)
#define SLOTS_MESSAGES_REPLY_BYTES (256 * MIB) /* largest reply to one call */
#define SLOTS_MESSAGES_LIST_BYTES 192

/* Opens the lists without connecting yet. -EINVAL: the address is not that of a Redis, or the error
 * names the wrong part of it. */
int slots_messages_open(struct slots_messages **out, const struct slots_config *config,
			struct base_error *error);
/* Puts a message, and replaces one of this name. The list expires SLOTS_MESSAGES_KEPT_MS after the
 * latest put. */
int slots_messages_put(struct slots_messages *messages, const char *list, const char *name,
		       const void *data, size_t bytes, struct base_error *error);
/* Calls found() in order for those of the `count` names that have a message. If found() returns
 * anything but 0, the call ends and returns that value. */
int slots_messages_get(struct slots_messages *messages, const char *list, const char *const *names,
		       size_t count,
		       int (*found)(void *user, size_t index, const void *data, size_t bytes),
		       void *user, struct base_error *error);
int slots_messages_remove(struct slots_messages *messages, const char *list,
			  struct base_error *error);
void slots_messages_close(struct slots_messages *messages); /* NULL is allowed */

/* ---- Identity of a process, and its priority (identity.c) ------------------------------------ */

/* Priority inputs of a request: what the job loses while it waits, as far as its process knows. */
struct slots_priority_inputs {
	uint32_t ranks, writers; /* ranks of the job, and how many of them write at a time */
	uint64_t bytes;          /* bytes of this writer; 0: unknown */
	uint64_t age_ns;         /* age of the work that a failure would destroy */
	bool blocks_training;    /* training waits for this save */
};

/* Returns the priority boost of a request in ms, between -SLOTS_MOST_BOOST_MS and
 * SLOTS_MOST_BOOST_MS. */
int32_t slots_boost_ms(const struct slots_priority_inputs *inputs);

/* The checkpoints of this process in a pool. Files that the process saves soon after each other
 * belong to one checkpoint. Begins as zeros. */
struct slots_checkpoints {
	uint64_t begin_ns; /* when the latest checkpoint began */
	uint64_t age_ns;   /* age of the work that the latest checkpoint saves */
	uint64_t last_ns;  /* when one of its files was last requested or released */
};

/* Records that a slot for a file is requested. Returns the age of the work that the file saves. */
uint64_t slots_checkpoints_begin(struct slots_checkpoints *checkpoints, uint64_t now_ns);

/* Returns how long this writer waits before it writes while the coordinator is unreachable, in
 * ms. */
uint32_t slots_stagger_ms(const struct slots_identity *identity, uint64_t save, uint32_t capacity,
			  uint32_t write_ms, uint32_t most_ms);

/* Fills in the identity of this process, except `client`, which each pool draws at random. Reads
 * the launcher's variables. If `job` is NULL or empty, the name of the job is derived from them,
 * too. */
void slots_identify(struct slots_identity *identity, const char *job, uint32_t share);
/* Adds a program and the path of its file to the node's name, as NODE:PROGRAM:PATH, for operators.
 * What does not fit is cut. */
void slots_identify_program(struct slots_identity *identity, const char *program, const char *path);

#endif
