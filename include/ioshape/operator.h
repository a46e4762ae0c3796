/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Pools of slots as those who run a cluster see them: who writes, who waits, and what is allowed.
 *
 * ioshape/ioshape.h does not include this header: programs that save need none of it. The commands
 * "ioshape top" and "ioshape slots" are made of it. Any thread may call its functions.
 */
#ifndef IOSHAPE_OPERATOR_H
#define IOSHAPE_OPERATOR_H

#include <ioshape/context.h>

#ifdef __cplusplus
extern "C" {
#endif

/**
 * Names the pool that saves to a path use.
 *
 * That is the context's `pool`, or one named after the filesystem that the path is on.
 *
 * @param context  an open context
 * @param path     a file or directory
 * @param name     receives the name
 * @param bytes    size of `name`; 128 are always enough
 * @return 0; -ENAMETOOLONG if `name` is too small; another negative code
 */
int ioshape_pool_get_name(struct ioshape_context *context, const char *path, char *name,
			  size_t bytes);

/**
 * Lists the pools that the coordinator knows.
 *
 * @param context  an open context
 * @param names    receives the names, each ended by '\n', in one string to be freed with
 *                 ioshape_free(); NULL if the call fails
 * @return 0 or a negative code
 */
int ioshape_pool_list(struct ioshape_context *context, char **names);

/** Who holds a slot, or waits for one. Strings belong to the status. */
struct ioshape_member {
	const char *id;
	const char *job;
	const char *node;
	uint32_t rank;
	uint32_t pid; /**< of its process, as that process sees it; 0 with a Redis */
	uint32_t weight;
	uint32_t express;        /**< 1: a small one, let past the queue */
	uint32_t urgent;         /**< 1: it has a deadline */
	uint64_t expected_bytes; /**< that it said it would write; 0 unknown */
	uint64_t written_bytes;  /**< as of its last heartbeat */
	uint64_t fence;          /**< of holders */
	double since_s;          /**< held, or waited */
	double lease_s;          /**< left of its lease; of a waiter: until it is taken for dead */
};

/** What a job wrote in slots of a pool. Strings belong to the status. */
struct ioshape_pool_job {
	const char *job;
	const char *user;       /**< of its latest request, as the job says; "" if unknown */
	uint64_t written_bytes; /**< since the pool began, or the job was forgotten */
	uint64_t writes;        /**< slots that it had */
	double held_s;          /**< that it had them, together; with a Redis */
	double waited_s;        /**< that it waited for them, together; with a Redis */
};

/** What an operator allows one job, or one user. Strings belong to the status. */
struct ioshape_pool_limit {
	const char *job;      /**< NULL: it is a user's */
	const char *user;     /**< NULL: it is a job's */
	uint32_t share;       /**< instead of the job's own, of which 100 is usual; 0: its own */
	uint64_t bytes_per_s; /**< of the job, or of all jobs of the user together; 0: any */
};

/** The state of a pool at one moment. */
struct ioshape_pool_status {
	size_t size; /**< sizeof(struct ioshape_pool_status), set by the library */
	const char *pool;
	const char *coordinator;
	uint32_t capacity;
	const char *capacity_by;     /**< "operator", "job" or "default" */
	uint32_t used;               /**< slots, by weight */
	uint64_t pool_bytes_per_s;   /**< that the operator allows; 0: any */
	uint64_t job_bytes_per_s;    /**< the same for each job */
	uint64_t small_bytes;        /**< a save of at most so many may be let past the queue */
	uint32_t express;            /**< so many of them at a time */
	uint64_t grants;             /**< since the pool began; counted with a Redis */
	uint32_t grants_last_minute; /**< in the last 60 s, to within those of the minute before */
	const struct ioshape_member *holders; /**< oldest first; the first 256 */
	size_t holder_listed;
	size_t holder_count;                  /**< all */
	const struct ioshape_member *waiters; /**< the next one first; the first 256 */
	size_t waiter_listed;
	size_t waiter_count;                 /**< all */
	const struct ioshape_pool_job *jobs; /**< those that wrote most; at most 64 */
	size_t job_listed;
	const struct ioshape_pool_limit *limits; /**< for one job or user; at most 64 */
	size_t limit_listed;
	uint64_t written_bytes; /**< since it began; these three with a Redis */
	double held_s;          /**< that slots were held since then, together */
	double waited_s;        /**< the same for waiting */
	double changed_s;       /**< when an operator last set something, in seconds
				 since 1970; 0: never */
};

/**
 * Tells the state of a pool.
 *
 * @param context  an open context
 * @param pool     its name; NULL: the context's
 * @param out      receives the state, to be freed with ioshape_pool_status_free(), or NULL
 * @return 0 or a negative code
 */
int ioshape_pool_get_status(struct ioshape_context *context, const char *pool,
			    struct ioshape_pool_status **out);

/**
 * Frees the state of a pool, and all strings and lists in it.
 *
 * @param status  the state; NULL is fine
 */
void ioshape_pool_status_free(struct ioshape_pool_status *status);

/** What an operator allows in a pool. It stays until it is cleared, and wins over jobs' wishes. */
struct ioshape_pool_settings {
	size_t size;       /**< sizeof(struct ioshape_pool_settings) */
	uint32_t capacity; /**< 0 in any of these: as it was */
	uint64_t pool_bytes_per_s;
	uint64_t job_bytes_per_s;
	uint64_t small_bytes;
	uint32_t express;
	uint32_t clear; /**< 1: first forget all that was set */
	/** A job's or a user's name: then `job_bytes_per_s`, `share` and `clear` are for that one
	 * alone, and the others are 0. Needs a Redis. */
	const char *job;
	const char *user;
	uint32_t share; /**< of which 100 is usual; the job cannot raise it */
};

#define IOSHAPE_POOL_SETTINGS_INIT IOSHAPE_SIZED(ioshape_pool_settings)

/**
 * Sets what a pool allows. With "local" that is the capacity alone, at most 1000.
 *
 * @param context   an open context
 * @param pool      its name; NULL: the context's
 * @param settings  what to change
 * @return 0; -ENOTSUP if the coordinator has no such setting; another negative code
 */
int ioshape_pool_set(struct ioshape_context *context, const char *pool,
		     const struct ioshape_pool_settings *settings);

/**
 * Takes a slot away from a holder, or a place in the queue from a waiter.
 *
 * A save that loses its slot goes on without one; a save that waits asks again, and is the last.
 * Needs a Redis: on one host the kernel keeps a slot for its process.
 *
 * @param context  an open context
 * @param pool     its name; NULL: the context's
 * @param id       of the holder or waiter, as in the pool's status
 * @return 0; -ENOENT if no request has this id; -ENOTSUP with "local"; another negative code
 */
int ioshape_pool_kick(struct ioshape_context *context, const char *pool, const char *id);

#ifdef __cplusplus
}
#endif

#endif
