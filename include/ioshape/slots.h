/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Slots: the right to write now.
 *
 * A pool stands for one storage resource that writers share, usually a filesystem. It admits a
 * limited number of writers at a time, and each of them holds a slot. Every save takes a slot of
 * its pool by itself. A program that does its own I/O takes these steps:
 *
 * 1. Call ioshape_slot_acquire(), which waits until the program may write.
 *
 * 2. Call ioshape_slot_pace() before each piece that it writes.
 *
 * 3. Call ioshape_slot_free() once the bytes are on stable storage.
 *
 * The context's `coordinator` decides the order of the writers. "local" orders the processes of
 * this host, without a server. The address of a Redis orders all hosts that use it. "open" means no
 * coordination: no process waits.
 *
 * A lease protects each slot. A thread of the library renews it as long as bytes are written. If a
 * holder dies, the next request in the queue gets its slot. With "local" the kernel frees it at
 * once, and with Redis it is free when the lease ends. Slots make saves faster and protect other
 * jobs. Correctness never depends on them: a save whose slot is lost goes on and is still atomic.
 */
#ifndef IOSHAPE_SLOTS_H
#define IOSHAPE_SLOTS_H

#include <ioshape/ioshape.h>

#ifdef __cplusplus
extern "C" {
#endif

/**
 * Receives the news that a slot was lost.
 *
 * The library calls this function at most once for each slot, on a thread of its own. A slot is
 * lost if its lease ends: the process was stopped, no bytes were written for too long, or the
 * coordinator was unreachable. It is also lost if an operator takes it away (with a Redis), or if
 * the coordinator loses its data. The function must not call the library.
 *
 * @param user  `lost_user` of the slot's options
 * @param why   reason, for people; valid only during the call
 */
typedef void (*ioshape_lost_fn)(void *user, const char *why);

/** The right to write, until the slot is freed or lost. */
struct ioshape_slot;

/** Options of a request for a slot. */
struct ioshape_slot_options {
	size_t size; /**< sizeof(struct ioshape_slot_options) */
	/** Name of the pool. NULL: the context's pool, or if that is not set, the pool of the
	 * filesystem of `path`. */
	const char *pool;
	const char *path; /**< path of a file or directory; its last name need not exist */
	/** Number of slots that the writer takes; 0 means 1. A request for more slots than the pool
	 * has writes alone. */
	uint32_t weight;
	/** Number of bytes that will be written; 0 if unknown. The coordinator uses it for fair
	 * shares, and small writes wait less. */
	uint64_t expected_bytes;
	/** longest wait; 0 waits without a limit, a negative value does not wait */
	int64_t timeout_ms;
	/** receives the position in the queue while the call waits; NULL for none */
	ioshape_queue_fn waiting;
	void *waiting_user;   /**< passed to `waiting` */
	ioshape_lost_fn lost; /**< receives the news that the slot was lost; NULL for none */
	void *lost_user;      /**< passed to `lost`; borrowed until the slot is freed */
	/**
	 * Time from the call on by which the writing must be done, because the process will end. 0:
	 * no deadline. Negative: the deadline has passed already. A request with a deadline goes
	 * ahead of requests without one. One of them at a time gets a slot in addition to the
	 * pool's slots. The call stops waiting when half of the time has passed, or when only as
	 * much time is left as the latest writes took. It then returns a handle without a slot, and
	 * the program should write. The call also does so if the coordinator is unreachable,
	 * whatever `unreachable` is. Writers with a deadline are exempt from bandwidth limits.
	 */
	int64_t deadline_ms;
};

/** Initializes a struct ioshape_slot_options with all defaults. */
#define IOSHAPE_SLOT_OPTIONS_INIT IOSHAPE_SIZED(ioshape_slot_options)

/**
 * Waits for a slot.
 *
 * Any thread may call this function.
 *
 * @param context  context. It must be open and outlive the slot
 * @param options  options of the request. NULL for all defaults
 * @param out      receives the slot, to be freed with ioshape_slot_free(). NULL if the call fails
 * @return 0; -ETIMEDOUT if no slot was free within `timeout_ms`; -EAGAIN if no slot is free and
 *         `timeout_ms` is negative; -ECANCELED if `waiting` gave up; -EINVAL for an invalid
 *         argument; IOSHAPE_E_COORDINATOR if the coordinator is unreachable and the context has
 *         IOSHAPE_UNREACHABLE_FAIL; another negative code
 */
int ioshape_slot_acquire(struct ioshape_context *context,
			 const struct ioshape_slot_options *options, struct ioshape_slot **out);

/**
 * Waits until the bandwidth limits of the job and the pool allow the next bytes.
 *
 * Call this function before each piece that you write. It also shows that the writer makes
 * progress: if a slot sees no call for two minutes, the next request gets it. One thread at a time
 * may call this function for a slot.
 *
 * @param slot   the slot
 * @param bytes  number of bytes that are about to be written
 * @return 0; -EINVAL if `slot` is NULL; -EPERM in a forked child
 */
int ioshape_slot_pace(struct ioshape_slot *slot, uint64_t bytes);

/** State of a slot, and how it was acquired. */
struct ioshape_slot_info {
	size_t size; /**< sizeof(struct ioshape_slot_info); set before the call */
	/** number that rises with every slot that the pool grants; 0 without coordination */
	uint64_t fence;
	double waited_s; /**< seconds that the request waited for the slot */
	double paced_s;  /**< seconds spent waiting for bandwidth so far */
	/** position in the queue when the wait began, from 1 on; 0 if the request did not wait */
	uint32_t position;
	uint32_t capacity; /**< number of slots of the pool */
	uint32_t lost;     /**< 1 if the slot is no longer held */
	uint32_t express;  /**< 1 if the small-file bypass granted the slot ahead of the queue */
	char ahead[128];   /**< request that was ahead when the wait began; "" if there was none */
	char pool[128];    /**< name of the pool; "" without coordination */
	/** "redis", "local" or "open"; "stagger" or "deadline" if the writer goes ahead without a
	 * slot */
	char coordinator[16];
	char note[256]; /**< what was not as preferred and why; "" if nothing */
};

/** Initializes a struct ioshape_slot_info. */
#define IOSHAPE_SLOT_INFO_INIT IOSHAPE_SIZED(ioshape_slot_info)

/**
 * Returns the state of a slot, and how it was acquired.
 *
 * Any thread may call this function until the slot is freed.
 *
 * @param slot  the slot
 * @param info  filled. Its size must be set before the call
 * @return 0; -EINVAL if an argument is NULL or the size is invalid; -EPERM in a forked child
 */
int ioshape_slot_get_info(struct ioshape_slot *slot, struct ioshape_slot_info *info);

/**
 * Releases a slot, which the next request in the queue can then get, and frees its handle.
 *
 * If the coordinator does not answer, the call waits a few seconds at most. The slot is then free
 * when its lease ends. In a forked child the call does nothing.
 *
 * @param slot  the slot; NULL is allowed
 */
void ioshape_slot_free(struct ioshape_slot *slot);

#ifdef __cplusplus
}
#endif

#endif
