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
 * A slot has a lease of 15 seconds. A thread of the library renews the lease as long as the holder
 * writes: a program shows that by calling ioshape_slot_pace(). A holder that does not write for two
 * minutes loses its slot. If a holder dies, the next request in the queue gets its slot: with
 * "local" at once, with a Redis when the lease ends.
 *
 * Slots make saves faster and protect other jobs. Correctness never depends on them: a save whose
 * slot is lost goes on and is still atomic.
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
 * The library calls this function at most once for each slot, on a thread of the library. A slot is
 * lost if the process was stopped for longer than the lease, or if the coordinator was unreachable
 * for that time. It is also lost if the program did not call ioshape_slot_pace() for two minutes.
 * With a Redis it is lost, too, if an operator takes it away, or if the Redis loses its data. The
 * program may go on writing without the slot. The function must not call the library.
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
	/** Name of the pool. NULL: the `pool` of the context's options. If that is not set, either,
	 * the pool of the filesystem of `path`. */
	const char *pool;
	/**
	 * Path of a file or directory on the filesystem that will be written. The last name in it
	 * need not exist. It has no effect if a pool is named. If neither `pool` nor `path` is
	 * given and the context names no pool, the request fails with -EINVAL.
	 */
	const char *path;
	/** Number of slots that the writer takes, at most 65536; 0 means 1. A request for more
	 * slots than the pool has waits until no other writes, and writes alone. */
	uint32_t weight;
	/**
	 * Number of bytes that will be written; 0 if unknown. The coordinator uses it for fair
	 * shares. A request for one slot and 1 byte to 16 MiB is small: one small request at a time
	 * may write in addition to the pool's slots. With a Redis, an operator can set other
	 * limits.
	 */
	uint64_t expected_bytes;
	/** longest wait in milliseconds; 0 waits without a limit, a negative value does not wait */
	int64_t timeout_ms;
	/** receives the position in the queue while the call waits; NULL for none */
	ioshape_queue_fn waiting;
	void *waiting_user;   /**< passed to `waiting` */
	ioshape_lost_fn lost; /**< receives the news that the slot was lost; NULL for none */
	void *lost_user;      /**< passed to `lost`; borrowed until the slot is freed */
	/**
	 * Milliseconds from the call until the process will end, for a program that must have
	 * written before that. 0: no deadline. Negative: the deadline has passed already.
	 *
	 * A request with a deadline goes ahead of requests without one, and no bandwidth limit
	 * applies to it. One such request at a time may write in addition to the pool's slots. The
	 * call waits for half of the time at most. If recent writes of this process took longer
	 * than that, it waits less, so that as much time is left. If it has no slot then, or if the
	 * coordinator is unreachable, it returns 0 and a handle without a slot, and the program
	 * should write without one.
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
 * @param context  an open context, which must outlive the slot
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
 * Call this function before each piece that you write. Without a bandwidth limit it returns at
 * once. Each call also shows that the writer makes progress. If you do not call it for two minutes,
 * you lose the slot, and the next request in the queue gets it. So write pieces that take less than
 * that. One thread at a time may call this function for a slot.
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
	uint32_t bypass;   /**< 1 if the small-file bypass granted the slot ahead of the queue */
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
 * @param info  filled; set its `size` before the call
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
