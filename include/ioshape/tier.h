/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Tiers: a tier is a folder on a fast disk of this node. Programs save checkpoints there first, and
 * a drain copies them to their destinations on shared storage later.
 *
 * A program asks for a path on the tier with ioshape_tier_path() and saves there with any function
 * of this library. After the save it calls ioshape_tier_keep(). From then on the copy is durable on
 * the tier and waits to be drained. This process can drain it, and so can any later process of the
 * user, such as "ioshape drain". Copies on the tier are ordinary files.
 *
 * The functions are in a library of their own, ioshape-tier (pkg-config: ioshape-tier). Any thread
 * may call them, except that ioshape_tier_free() must be the last call on a tier. Several processes
 * of one user may use one tier at a time.
 */
#ifndef IOSHAPE_TIER_H
#define IOSHAPE_TIER_H

#include <ioshape/ioshape.h>

#ifdef __cplusplus
extern "C" {
#endif

/** A folder on a fast disk, with the copies of this user. */
struct ioshape_tier;

/** Parity: how many nodes of a set may lose their tier, and how many nodes form a set. */
enum ioshape_parity {
	IOSHAPE_PARITY_NONE = 0, /**< no parity */
	/** one of 2: each of two partners has a copy of the other's files */
	IOSHAPE_PARITY_1_OF_2 = 1,
	IOSHAPE_PARITY_1_OF_4 = 2, /**< any one of 4 nodes */
	IOSHAPE_PARITY_1_OF_8 = 3, /**< any one of 8 nodes */
	IOSHAPE_PARITY_2_OF_4 = 4, /**< any two of 4 nodes */
	IOSHAPE_PARITY_2_OF_6 = 5, /**< any two of 6 nodes */
	IOSHAPE_PARITY_2_OF_8 = 6  /**< any two of 8 nodes */
};

/** Options of a tier. */
struct ioshape_tier_options {
	size_t size; /**< sizeof(struct ioshape_tier_options) */
	/** most bytes that all copies together may take; 0 for all free space */
	uint64_t most_bytes;
	/** Number of drained copies to keep in each directory, newest first. 0 keeps them until a
	 * save needs their space. */
	uint32_t keep_last;
	/**
	 * Parity that the nodes of a group keep for each other when they save on their tiers
	 * (IOSHAPE_PARITY). It makes up for lost nodes. The group needs a `comm`. The value of rank
	 * 0 counts.
	 */
	enum ioshape_parity parity;
};

/** Initializes a struct ioshape_tier_options with all defaults. */
#define IOSHAPE_TIER_OPTIONS_INIT IOSHAPE_SIZED(ioshape_tier_options)

/**
 * Opens a tier.
 *
 * The call creates the user's own folder, ioshape-UID, in `folder` if it does not exist.
 *
 * @param context  an open context, which must outlive the tier. Drains use its settings, such as
 *                 `share` and `rate`
 * @param folder   existing folder on the fast disk. Other users cannot write to the user's folder
 *                 in it
 * @param options  options of the tier. NULL for all defaults
 * @param out      receives the tier, to be freed with ioshape_tier_free(). NULL if the call fails
 * @return 0; -EINVAL for an invalid argument or variable; -ENOENT if `folder` does not exist;
 *         -EPERM in a forked child; -EACCES if another user owns the folder ioshape-UID or can
 *         write to it; another negative code
 */
int ioshape_tier_open(struct ioshape_context *context, const char *folder,
		      const struct ioshape_tier_options *options, struct ioshape_tier **out);

/**
 * Returns the path on the tier under which to save what belongs at `path`, and makes space for it.
 *
 * The call creates the directory of that path. If the space is too small, it removes drained
 * copies, oldest first.
 *
 * @param tier       the tier
 * @param path       destination of the file, or of a group's checkpoint: its directory and
 *                   "step-<number>". It need not exist
 * @param bytes      number of bytes that will be saved; 0 if unknown
 * @param copy_path  receives the path on the tier, to be freed with ioshape_free(). NULL if the
 * call fails
 * @return 0; -ENOSPC if the space is too small because the other copies are not drained yet;
 *         -EINVAL if `path` is invalid or lies on the tier; -EPERM in a forked child, or if a link
 *         of another user is on the way to `path`; another negative code
 */
int ioshape_tier_path(struct ioshape_tier *tier, const char *path, uint64_t bytes,
		      char **copy_path);

/** Options of a copy. */
struct ioshape_tier_keep_options {
	size_t size; /**< sizeof(struct ioshape_tier_keep_options) */
	/** Number of newest checkpoints to keep at the destination once this one is drained, as in
	 * struct ioshape_prune_options. 0 keeps all. It applies to checkpoints of groups. */
	uint32_t keep_last;
	uint32_t reserved; /**< must be 0 */
	/** also keep checkpoints whose step is a multiple of this; 0 for none */
	uint64_t keep_every;
};

/** Initializes a struct ioshape_tier_keep_options with all defaults. */
#define IOSHAPE_TIER_KEEP_OPTIONS_INIT IOSHAPE_SIZED(ioshape_tier_keep_options)

/**
 * Records durably that the copy of `path` on the tier waits to be drained.
 *
 * Call this function when the save has succeeded. The copy then outlives this process. If a copy is
 * kept again before it is drained, it is drained once, in its latest state.
 *
 * @param tier     the tier
 * @param path     destination. The path that ioshape_tier_path() was given
 * @param options  options of the copy. NULL for all defaults
 * @return 0; -ENOENT if there is no copy of `path` on the tier; -EINVAL for an invalid argument, or
 *         for a directory that is no group's checkpoint; -EPERM in a forked child; another negative
 *         code
 */
int ioshape_tier_keep(struct ioshape_tier *tier, const char *path,
		      const struct ioshape_tier_keep_options *options);

/**
 * Returns the path of the copy of `path` on the tier, unless the destination has a newer file.
 *
 * The call also finds a copy that was saved but is not kept yet. It does not read the copy.
 *
 * @param tier       the tier
 * @param path       destination. The path that ioshape_tier_path() was given
 * @param copy_path  receives the path on the tier, to be freed with ioshape_free(). NULL if the
 * call fails
 * @return 0; -ENOENT if there is no copy or the destination is newer, and ioshape_last_error() then
 *         does not change; -EINVAL for an invalid argument; -EPERM in a forked child; another
 *         negative code
 */
int ioshape_tier_find(struct ioshape_tier *tier, const char *path, char **copy_path);

/** A copy on a tier. */
struct ioshape_tier_copy {
	const char *path;      /**< path of the destination */
	const char *copy_path; /**< path on the tier */
	uint64_t bytes;        /**< size of the copy */
	int64_t saved_s;       /**< time of the save, in seconds since 1970 */
	/** number in the journal, lower for copies that are drained earlier; 0 if drained */
	uint64_t number;
	uint32_t directory; /**< 1 if the copy is a directory: a group's checkpoint */
	uint32_t reserved;  /**< 0 */
};

/**
 * Lists the copies on a tier: first those that wait, in the order of the drain, then the drained
 * ones.
 *
 * Each path is listed once. Copies that are saved but not kept yet are not listed.
 *
 * @param tier    the tier
 * @param copies  receives an array. The array and its texts are one piece of memory, to be freed
 *                with ioshape_free(). NULL if the call fails
 * @param count   receives the number of copies
 * @return 0; -EINVAL if an argument is NULL; -EPERM in a forked child; another negative code
 */
int ioshape_tier_list(struct ioshape_tier *tier, struct ioshape_tier_copy **copies, size_t *count);

/** Result of a drain for one copy. */
enum ioshape_drained {
	IOSHAPE_DRAINED = 0,       /**< the copy is at its destination, durably */
	IOSHAPE_DRAINED_OVERTAKEN, /**< not drained: a later save to the path is drained instead */
	IOSHAPE_DRAINED_NEWER,  /**< not drained: the destination has a newer file, which stays */
	IOSHAPE_DRAINED_GONE,   /**< not drained: the copy was removed from the tier */
	IOSHAPE_DRAINED_FAILED, /**< not drained: the copy waits for the next drain */
	/**
	 * A checkpoint of several nodes: the files of this node are at the destination, but those
	 * of other nodes are missing. The checkpoint appears when they are there, and it waits
	 * until then.
	 */
	IOSHAPE_DRAINED_WAITS
};

/** Options of a drain. */
struct ioshape_drain_options {
	size_t size; /**< sizeof(struct ioshape_drain_options) */
	/** destination of the copy to drain; NULL for all copies */
	const char *path;
	/**
	 * Called for each copy when it is done, with its destination, the result and the bytes that
	 * were drained. During the call ioshape_last_error() describes a failure. NULL for none.
	 */
	void (*ended)(void *user, const char *path, enum ioshape_drained result, uint64_t bytes);
	void *ended_user; /**< passed to `ended`; borrowed during the drain */
	/** Receives the progress of the copy that is being drained. If it returns another value
	 * than 0, the drain ends with -ECANCELED. NULL for none. */
	ioshape_progress_fn progress;
	void *progress_user; /**< passed to `progress`; borrowed during the drain */
};

/** Initializes a struct ioshape_drain_options with all defaults. */
#define IOSHAPE_DRAIN_OPTIONS_INIT IOSHAPE_SIZED(ioshape_drain_options)

/**
 * Copies what waits on a tier to its destinations, oldest first, until nothing waits.
 *
 * One process drains a tier at a time. Other calls wait until it has ended and then drain what is
 * left. Meanwhile they call the progress function with IOSHAPE_PHASE_WAIT. If a copy fails, it
 * keeps waiting, and the drain goes on with the others.
 *
 * A destination is replaced as a save replaces it, unless it was modified after the copy was saved.
 * It gets the modification time of the copy, by the clock of its own filesystem.
 *
 * @param tier     the tier
 * @param options  options of the drain. NULL for all defaults
 * @return 0 if nothing waits any more; -ECANCELED if the progress function stopped the drain;
 *         -EAGAIN if what waits needs files of other nodes; -EINVAL for an invalid argument; -EPERM
 *         in a forked child; another negative code for the first copy that failed
 */
int ioshape_tier_drain(struct ioshape_tier *tier, const struct ioshape_drain_options *options);

/**
 * Removes the copy of `path` that waits on a tier without draining it. The copy is lost.
 *
 * Use it for a copy that can never be drained, because its destination is gone for good or the copy
 * is damaged.
 *
 * @param tier   the tier
 * @param path   destination. The path that ioshape_tier_path() was given, or that
 *               ioshape_tier_list() returns
 * @param bytes  receives the size of the copy. NULL if not needed
 * @return 0; -ENOENT if no copy of `path` waits; -EBUSY if a process drains the tier or reads the
 *         copy; -ESTALE if a process saves the copy again; another negative code, and what was not
 *         removed still waits
 */
int ioshape_tier_forget(struct ioshape_tier *tier, const char *path, uint64_t *bytes);

/**
 * Frees a tier. In a forked child the call does nothing.
 *
 * No other call on the tier may be in progress.
 *
 * @param tier  the tier; NULL is allowed
 */
void ioshape_tier_free(struct ioshape_tier *tier);

#ifdef __cplusplus
}
#endif

#endif
