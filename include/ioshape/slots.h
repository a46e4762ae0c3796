/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The slot level: the right to write now.
 *
 * A pool stands for one storage resource that writers share: a filesystem, as a rule. It admits so
 * many writers at a time. Every save takes a slot of its pool by itself; programs that do their own
 * I/O do it with the calls below:
 *
 *     ioshape_slot_acquire(context, &options, &slot);  waits for its turn
 *     ioshape_slot_pass(slot, bytes);                  before each piece that is written
 *     ioshape_slot_release(slot);                      as soon as the bytes are on stable storage
 *
 * Who keeps the order is the context's `coordinator`: "local" (the processes of this host among
 * themselves, without a server), a Redis (all hosts that use it), or "open" (nobody).
 *
 * A slot is held by a lease that the library's own thread renews as long as bytes pass. The kernel
 * (local) or the end of the lease (Redis) gives a dead holder's slot to the next. A slot is for
 * speed and for the neighbours, never for correctness: nothing breaks if one is lost.
 */
#ifndef IOSHAPE_SLOTS_H
#define IOSHAPE_SLOTS_H

#include <stddef.h>
#include <stdint.h>

#include <ioshape/context.h>

#ifdef __cplusplus
extern "C" {
#endif

/* ---- Waiting for a turn ---------------------------------------------------------------------- */

/* Where a request stands. */
struct ioshape_place {
	size_t size;       /* sizeof(struct ioshape_place) */
	uint32_t position; /* requests that are ahead of it in the queue: at 0 it is the next */
	uint32_t capacity; /* of the pool; 0 if it is not known */
	double waited_s;
	char ahead[128];      /* who goes before it, or holds a slot: "job 4711, rank 7 on n03" */
	char pool[128];       /* "" if there is no coordination */
	char coordinator[16]; /* "redis", "local"; "away" while it is out of reach */
};

/*
 * Told about every ten times a second while a request waits, in the thread that waits. Anything but
 * 0 gives up: acquiring then fails with -ECANCELED. It must not call the library.
 */
typedef int (*ioshape_queue_fn)(void *user, const struct ioshape_place *place);

/*
 * Told once, on a thread of the library's, when a slot is not held any more although it was not
 * released: the lease ran out (the process was stopped, or nothing passed for too long), an
 * operator took it away, or the coordinator lost its data. It must not call the library.
 */
typedef void (*ioshape_lost_fn)(void *user, const char *why);

struct ioshape_slot;

struct ioshape_slot_options {
	size_t size; /* sizeof(struct ioshape_slot_options) */
	/* The pool; NULL: the context's, and without one it is named after the filesystem of ... */
	const char *pool;
	const char *path; /* ... this file or directory (the last part need not exist) */
	uint32_t weight;  /* slots that it takes; 0 is 1. More than there are: it writes alone. */
	/* That are going to be written, 0 if unknown: for fairness; and small ones wait less. */
	uint64_t bytes;
	int64_t timeout_ms;       /* then -ETIMEDOUT; 0: no end; below 0: never wait */
	ioshape_queue_fn waiting; /* NULL for none */
	void *waiting_user;
	ioshape_lost_fn lost; /* NULL for none */
	void *lost_user;      /* borrowed until the slot is released */
};

#define IOSHAPE_SLOT_OPTIONS_INIT IOSHAPE_SIZED(ioshape_slot_options)

/*
 * Waits for a slot. Any thread. On success *out is the slot, to be released with
 * ioshape_slot_release(). On failure *out is NULL and nothing is held: -ETIMEDOUT, -EAGAIN,
 * -ECANCELED, -EINVAL, or IOSHAPE_E_COORDINATOR: out of reach, and the context's `away` is "fail".
 */
int ioshape_slot_acquire(struct ioshape_context *context,
			 const struct ioshape_slot_options *options, struct ioshape_slot **out);

/*
 * Says that so many bytes are about to be written, and waits as long as the bandwidth set for the
 * job or the pool asks for. It keeps the slot alive: without it the slot is taken to hang after the
 * context's stall_ms. 0, -EINVAL, -EPERM. One thread at a time for each slot.
 */
int ioshape_slot_pass(struct ioshape_slot *slot, uint64_t bytes);

/* How a slot was come by. */
struct ioshape_slot_info {
	size_t size;          /* sizeof(struct ioshape_slot_info) */
	uint64_t fence;       /* rises with every grant of the pool; 0 without coordination */
	double waited_s;      /* for the slot */
	double paced_s;       /* for bandwidth, so far */
	uint32_t position;    /* in the queue when it began to wait, from 1 on; 0: it did not */
	uint32_t capacity;    /* of the pool */
	uint32_t lost;        /* 1: not held any more */
	uint32_t express;     /* 1: so small that it was let past the queue */
	char ahead[128];      /* who was, when it began to wait; "" if nobody */
	char pool[128];       /* "" if there is no coordination */
	char coordinator[16]; /* "redis", "local", "open", or "stagger": it was out of reach */
	char note[256];       /* what was not as preferred, and why; "" if nothing */
};

/* 0, -EINVAL, -EPERM. Any thread; not after the release. */
int ioshape_slot_get_info(struct ioshape_slot *slot, struct ioshape_slot_info *info);

/* Gives the slot to the next in the queue. NULL is fine. Never waits long, whatever became of the
 * coordinator. */
void ioshape_slot_release(struct ioshape_slot *slot);

/* ---- The operator's view --------------------------------------------------------------------- */

/*
 * The name of the pool that saves to this path use: the context's `pool`, or one made of the
 * filesystem that the path is on. Up to `bytes` with the final 0; 128 are always enough.
 */
int ioshape_pool_name(struct ioshape_context *context, const char *path, char *name, size_t bytes);

/* One holder of a slot, or one that waits. Strings belong to the status. */
struct ioshape_member {
	const char *id;
	const char *job;
	const char *node;
	uint32_t rank;
	uint32_t weight;
	uint32_t express; /* 1: a small one, let past the queue */
	uint64_t bytes;   /* it said it would write; 0 unknown */
	uint64_t passed;  /* bytes, as of its last sign of life */
	uint64_t fence;   /* holders */
	double since_s;   /* held, or waited */
	double lease_s;   /* left of it; of a waiter: until it is taken for dead */
};

/* The state of a pool, at one moment. */
struct ioshape_pool_status {
	size_t size; /* sizeof(struct ioshape_pool_status), set by the library */
	const char *pool;
	const char *coordinator;
	uint32_t capacity;
	const char *capacity_by; /* "operator", "job" or "default" */
	uint32_t used;           /* slots, by weight */
	uint64_t pool_rate;      /* bytes per second that the operator allows; 0: any */
	uint64_t job_rate;       /* the same for each job */
	uint64_t small_bytes;    /* up to here a save may be let past the queue */
	uint32_t express;        /* so many of them at a time */
	uint64_t grants;         /* since the pool began */
	uint32_t grants_last_minute;
	const struct ioshape_member *holders; /* oldest first; the first 256 */
	size_t holder_listed;
	size_t holder_count;                  /* all */
	const struct ioshape_member *waiters; /* the next one first; the first 256 */
	size_t waiter_listed;
	size_t waiter_count; /* all */
};

/* *out is to be freed with ioshape_pool_status_free(). `pool` NULL is the context's. */
int ioshape_pool_get_status(struct ioshape_context *context, const char *pool,
			    struct ioshape_pool_status **out);
void ioshape_pool_status_free(struct ioshape_pool_status *status);

/* What the operator sets wins over what jobs ask for, and stays until it is cleared. */
struct ioshape_pool_settings {
	size_t size;       /* sizeof(struct ioshape_pool_settings) */
	uint32_t capacity; /* 0 in any of these: as it was */
	uint64_t pool_rate;
	uint64_t job_rate;
	uint64_t small_bytes;
	uint32_t express;
	uint32_t clear; /* 1: first forget all that was set */
};

#define IOSHAPE_POOL_SETTINGS_INIT IOSHAPE_SIZED(ioshape_pool_settings)

int ioshape_pool_set(struct ioshape_context *context, const char *pool,
		     const struct ioshape_pool_settings *settings);

/* Takes a slot, or a place in the queue, away from who has this id. -ENOENT if nobody does. A save
 * whose slot is taken away goes on without one; one that waits asks anew, and is the last. */
int ioshape_pool_kick(struct ioshape_context *context, const char *pool, const char *id);

/*
 * The names of the pools that the coordinator knows, each ended by '\n', in one string to be freed
 * with ioshape_pool_names_free().
 */
int ioshape_pool_names(struct ioshape_context *context, char **names);
void ioshape_pool_names_free(char *names);

#ifdef __cplusplus
}
#endif

#endif
