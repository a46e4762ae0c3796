/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The tier: a fast disk of this node on which checkpoints are saved first, and from which they are
 * carried to where they belong.
 *
 * A program asks where to save (ioshape_tier_place()), saves there by any call of this library, and
 * then keeps what it saved (ioshape_tier_keep()): it is durable on the tier, and will be drained,
 * by this process, by the next one of the user's, or by "ioshape drain". Copies on the tier are
 * ordinary files.
 *
 * Any thread may call any of this. Several processes of one user may use one tier at a time.
 */
#ifndef IOSHAPE_TIER_H
#define IOSHAPE_TIER_H

#include <ioshape/ioshape.h>

#ifdef __cplusplus
extern "C" {
#endif

/** A folder on a fast disk, and what this user has on it. */
struct ioshape_tier;

/** How many nodes of a set may lose their tier, and how many nodes are a set. */
enum ioshape_parity {
	IOSHAPE_PARITY_NONE = 0,
	IOSHAPE_PARITY_1_OF_2 = 1, /**< partners have a copy of each other's files */
	IOSHAPE_PARITY_1_OF_4 = 2,
	IOSHAPE_PARITY_1_OF_8 = 3,
	IOSHAPE_PARITY_2_OF_4 = 4,
	IOSHAPE_PARITY_2_OF_6 = 5,
	IOSHAPE_PARITY_2_OF_8 = 6
};

/** How a tier is used. */
struct ioshape_tier_options {
	size_t size; /**< sizeof(struct ioshape_tier_options) */
	/** What copies may take in all; 0: as much as is free. */
	uint64_t most_bytes;
	/** Drained copies that stay in each directory, newest first; 0: as many as there is room
	 * for. */
	uint32_t keep_last;
	/** IOSHAPE_PARITY: nodes of a group that save on their tiers keep, for each other, what
	 * makes up for one that is lost. The group needs a `comm`. Rank 0's counts. */
	enum ioshape_parity parity;
};

#define IOSHAPE_TIER_OPTIONS_INIT IOSHAPE_SIZED(ioshape_tier_options)

/**
 * Opens a tier: makes the user's own folder in it, if it is not there.
 *
 * @param context  an open context; it must outlive the tier. Drains write by its settings: its
 *                 share and rate are theirs
 * @param folder   on the fast disk; it must be there
 * @param options  NULL for all defaults
 * @param out      receives the tier, to be freed with ioshape_tier_free(), or NULL
 * @return 0 or a negative code
 */
int ioshape_tier_open(struct ioshape_context *context, const char *folder,
		      const struct ioshape_tier_options *options, struct ioshape_tier **out);

/**
 * Tells where to save what shall end at `path`, and makes room for it.
 *
 * The directory of the place is made. Copies that have been drained go, oldest first, until so many
 * bytes are free.
 *
 * @param tier   the tier
 * @param path   a file's or a directory's; it is not looked at
 * @param bytes  that will be saved; 0 unknown
 * @param place  receives the path on the tier, to be freed with ioshape_free(), or NULL
 * @return 0; -ENOSPC: what is left waits to be drained; another negative code
 */
int ioshape_tier_place(struct ioshape_tier *tier, const char *path, uint64_t bytes, char **place);

/** How a copy is kept. */
struct ioshape_tier_keep_options {
	size_t size; /**< sizeof(struct ioshape_tier_keep_options) */
	/** Of a group's generation: once it is drained, so many stay at the destination, as
	 * struct ioshape_prune_options says; 0: all. */
	uint32_t keep_last;
	uint32_t reserved; /**< 0 */
	uint64_t keep_every;
};

#define IOSHAPE_TIER_KEEP_OPTIONS_INIT IOSHAPE_SIZED(ioshape_tier_keep_options)

/**
 * Notes, durably, that what lies at the place of `path` is to be carried there.
 *
 * To be called when the save has ended well. From then on it is not lost with this process.
 *
 * A copy kept again before it was drained is carried once, as it is then.
 *
 * @param tier     the tier
 * @param path     as for ioshape_tier_place()
 * @param options  NULL for all defaults
 * @return 0; -ENOENT: nothing lies there; another negative code
 */
int ioshape_tier_keep(struct ioshape_tier *tier, const char *path,
		      const struct ioshape_tier_keep_options *options);

/**
 * Finds the copy of `path`, if the destination has none that is newer.
 *
 * A copy that was saved and is not kept yet is found, too. The copy is not read.
 *
 * @param tier   the tier
 * @param path   as for ioshape_tier_place()
 * @param place  receives its path on the tier, to be freed with ioshape_free(), or NULL
 * @return 0; -ENOENT, without a sentence: there is none, or the destination's is newer; another
 *         negative code
 */
int ioshape_tier_find(struct ioshape_tier *tier, const char *path, char **place);

/** A copy on the tier. */
struct ioshape_tier_copy {
	const char *path;  /**< of the destination */
	const char *place; /**< on the tier */
	uint64_t bytes;
	int64_t saved_s;    /**< seconds since 1970 */
	uint64_t number;    /**< in the journal: what is drained first is lower; 0: drained */
	uint32_t directory; /**< 1: it is one */
	uint32_t reserved;  /**< 0 */
};

/**
 * Lists what lies on the tier: first what waits to be drained, in that order, then what has been.
 *
 * A path is listed once. What was saved and is not kept yet is not listed.
 *
 * @param tier    the tier
 * @param copies  receives them, with their texts in one piece of memory, to be freed with
 *                ioshape_free(), or NULL
 * @param count   receives how many there are
 * @return 0 or a negative code
 */
int ioshape_tier_list(struct ioshape_tier *tier, struct ioshape_tier_copy **copies, size_t *count);

/** What became of a copy. */
enum ioshape_drained {
	IOSHAPE_DRAINED = 0,       /**< it is at its destination, durably */
	IOSHAPE_DRAINED_OVERTAKEN, /**< a later save to the same path goes instead */
	IOSHAPE_DRAINED_NEWER,     /**< there is a newer one at the destination, which stays */
	IOSHAPE_DRAINED_GONE,      /**< it was removed from the tier before */
	IOSHAPE_DRAINED_FAILED,    /**< it waits for the next drain */
	/** A generation of several nodes: the files that are here are there, and it appears when
	 * those of the others are; it waits until then. */
	IOSHAPE_DRAINED_WAITS
};

/** How a tier is drained. */
struct ioshape_drain_options {
	size_t size; /**< sizeof(struct ioshape_drain_options) */
	/** Only what was kept for this path, a file's or a directory's; NULL: everything. */
	const char *path;
	/** Told of each copy when it is done with; ioshape_last_error() says why one failed, during
	 * the call. NULL for none. */
	void (*ended)(void *user, const char *path, enum ioshape_drained result, uint64_t bytes);
	void *ended_user; /**< borrowed during the drain */
	/** Told of the bytes of the copy that is carried; not 0 ends the drain with -ECANCELED. */
	ioshape_progress_fn progress;
	void *progress_user; /**< borrowed during the drain */
};

#define IOSHAPE_DRAIN_OPTIONS_INIT IOSHAPE_SIZED(ioshape_drain_options)

/**
 * Carries what waits on the tier to its destinations, oldest first, until nothing waits any more.
 *
 * One process drains a tier at a time: others wait until it has ended, and carry what is left; the
 * progress function is called meanwhile, with IOSHAPE_PHASE_WAIT. What fails stays, and does not
 * keep the others; the first failure is the answer.
 *
 * A destination is replaced as by a save, unless it was modified after the copy was saved. It gets
 * the copy's time, by the clock of its own filesystem.
 *
 * @param tier     the tier
 * @param options  NULL for all defaults
 * @return 0: nothing of it waits any more; -ECANCELED: the progress function ended it; -EAGAIN:
 *         what waits does so for other nodes; another negative code
 */
int ioshape_tier_drain(struct ioshape_tier *tier, const struct ioshape_drain_options *options);

/**
 * Removes what waits for `path` from the tier, undrained: its copy is lost.
 *
 * For what can never be carried, as its destination is gone for good, or the copy is damaged.
 *
 * @param tier   the tier
 * @param path   as for ioshape_tier_place(), or as ioshape_tier_list() has it
 * @param bytes  receives how many the copy had, or NULL
 * @return 0; -ENOENT: nothing waits for it; -EBUSY: a process drains the tier, or reads the copy;
 *         another negative code: what was not removed waits still
 */
int ioshape_tier_forget(struct ioshape_tier *tier, const char *path, uint64_t *bytes);

/**
 * Frees a tier. No call on it may be under way.
 *
 * @param tier  the tier; NULL is fine
 */
void ioshape_tier_free(struct ioshape_tier *tier);

#ifdef __cplusplus
}
#endif

#endif
