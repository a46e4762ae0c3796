/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Slots: the right to write now.
 *
 * A pool stands for one storage resource that writers share, as a rule a filesystem. It admits so
 * many writers at a time. Every save takes a slot of its pool by itself. Programs that do their own
 * I/O call ioshape_slot_acquire(), which waits until they may write; ioshape_slot_pace() before
 * each piece that they write; and ioshape_slot_free() once the bytes are on stable storage.
 *
 * The context's `coordinator` says what keeps the order: "local" (this host alone, without a
 * server), the address of a Redis (all hosts that use it), or "open" (nothing: nobody waits).
 *
 * A slot is held by a lease that a thread of the library renews as long as bytes pass. When a
 * holder dies the next in the queue gets its slot: from the kernel (local), or when the lease ends
 * (Redis). A slot is for speed and for the neighbours, never for correctness: nothing breaks if one
 * is lost.
 */
#ifndef IOSHAPE_SLOTS_H
#define IOSHAPE_SLOTS_H

#include <ioshape/ioshape.h>

#ifdef __cplusplus
extern "C" {
#endif

/**
 * Told once when a slot is lost, on a thread of the library.
 *
 * A slot is lost when its lease ran out (the process was stopped, or no bytes passed for too long),
 * when an operator took it away (with a Redis), or when the coordinator lost its data. The function
 * must not call the library.
 */
typedef void (*ioshape_lost_fn)(void *user, const char *why);

/** The right to write, until it is freed or lost. */
struct ioshape_slot;

/** What ioshape_slot_acquire() is asked for. */
struct ioshape_slot_options {
	size_t size; /**< sizeof(struct ioshape_slot_options) */
	/** NULL: the context's pool; without one, that of the filesystem of `path`. */
	const char *pool;
	const char *path; /**< a file or directory; its last part need not exist */
	uint32_t weight;  /**< slots that it takes; 0 is 1. More than there are: it writes alone. */
	/** How much will be written, 0 if unknown: for fairness; and small writes wait less. */
	uint64_t expected_bytes;
	int64_t timeout_ms;       /**< longest wait; 0: no limit; below 0: do not wait */
	ioshape_queue_fn waiting; /**< NULL for none */
	void *waiting_user;
	ioshape_lost_fn lost; /**< NULL for none */
	void *lost_user;      /**< borrowed until the slot is freed */
	/**
	 * ms from the call on by which what is to be written must be, because the process will end;
	 * 0: none; below 0: they are over. Such a request goes before those without a deadline, and
	 * one at a time gets a slot beside those that there are. Once half of the time is over, or
	 * only as much is left as the latest writes took, the call returns a slot that is none:
	 * write. So it does if the coordinator is unreachable, whatever `unreachable` says.
	 * Bandwidth is not limited.
	 */
	int64_t deadline_ms;
};

#define IOSHAPE_SLOT_OPTIONS_INIT IOSHAPE_SIZED(ioshape_slot_options)

/**
 * Waits for a slot.
 *
 * Any thread may call this.
 *
 * @param context  an open context
 * @param options  NULL for all defaults
 * @param out      receives the slot, to be freed with ioshape_slot_free(), or NULL
 * @return 0; -ETIMEDOUT after timeout_ms; -EAGAIN if there is none and timeout_ms is below 0;
 *         -ECANCELED if `waiting` gave up; IOSHAPE_E_COORDINATOR if the coordinator is unreachable
 *         and the context's `unreachable` is IOSHAPE_UNREACHABLE_FAIL; another negative code
 */
int ioshape_slot_acquire(struct ioshape_context *context,
			 const struct ioshape_slot_options *options, struct ioshape_slot **out);

/**
 * Waits until so many bytes may be written within the bandwidth that is set for job and pool.
 *
 * Call it before each piece that is written. It also shows that the writer is at work: a slot that
 * sees none for two minutes goes to the next in the queue. One thread at a time may call this for
 * one slot.
 *
 * @param slot   the slot
 * @param bytes  that are about to be written
 * @return 0; -EINVAL; -EPERM in a forked child
 */
int ioshape_slot_pace(struct ioshape_slot *slot, uint64_t bytes);

/** How a slot was acquired, and whether it is still held. */
struct ioshape_slot_info {
	size_t size;          /**< sizeof(struct ioshape_slot_info): set before the call */
	uint64_t fence;       /**< rises with every slot that the pool gives; 0: no coordination */
	double waited_s;      /**< for the slot */
	double paced_s;       /**< for bandwidth, so far */
	uint32_t position;    /**< in the queue when it began to wait, from 1 on; 0: it did not */
	uint32_t capacity;    /**< slots of the pool */
	uint32_t lost;        /**< 1: no longer held */
	uint32_t express;     /**< 1: so small that it was let past the queue */
	char ahead[128];      /**< who was ahead when it began to wait; "" if nobody */
	char pool[128];       /**< "" if there is no coordination */
	char coordinator[16]; /**< "redis", "local", "open"; "stagger", "deadline": without one */
	char note[256];       /**< what was not as preferred, and why; "" if nothing */
};

#define IOSHAPE_SLOT_INFO_INIT IOSHAPE_SIZED(ioshape_slot_info)

/**
 * Tells how a slot was acquired, and whether it is still held.
 *
 * Any thread may call this until the slot is freed.
 *
 * @param slot  the slot
 * @param info  filled; info->size must be set
 * @return 0; -EINVAL; -EPERM in a forked child
 */
int ioshape_slot_get_info(struct ioshape_slot *slot, struct ioshape_slot_info *info);

/**
 * Gives a slot to the next in the queue.
 *
 * It waits only for a coordinator that does not answer, a few seconds at most.
 *
 * @param slot  the slot; NULL is fine
 */
void ioshape_slot_free(struct ioshape_slot *slot);

#ifdef __cplusplus
}
#endif

#endif
