/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Group saves: all ranks of a job save one checkpoint together, which exists as a whole or not at
 * all.
 *
 * The checkpoint is a directory such as "step-0000001000" with a few large files and
 * "manifest.json". The manifest lists the files with their sizes and checksums, and it is written
 * last. A directory without a valid manifest is no checkpoint.
 *
 * What one rank saves is its shard. Each shard is an ordinary file of torch.save(). It is a file of
 * its own (mode "each"), a member of one zip per node ("node"), or a member of a single zip
 * ("rank0"). The report of a save names the mode.
 *
 * The page docs/groups.md describes how ranks find each other, how the mode is chosen, and what
 * happens when something fails.
 */
#ifndef IOSHAPE_GROUP_H
#define IOSHAPE_GROUP_H

#include <ioshape/ioshape.h>

#ifdef __cplusplus
extern "C" {
#endif

/* ---- Transport between ranks ----------------------------------------------------------------- */

/**
 * Transport between nodes, which a single writer for all ranks needs.
 *
 * MPI provides one (ioshape/mpi.h), or the program provides its own functions. The library calls
 * them on threads of the library and of the caller, several at a time. For each pair of ranks, it
 * calls at most one at a time in each direction. `tag` is a number that both ranks pass for one
 * message.
 */
struct ioshape_comm {
	size_t size; /**< sizeof(struct ioshape_comm) */
	void *user;  /**< passed to the functions */
	/**
	 * Sends exactly `bytes` bytes to rank `to`. Messages between two ranks with one tag must
	 * keep their order. Returns 0, or a negative errno: -ETIMEDOUT after `timeout_ms`, -EPIPE
	 * or -ECONNRESET if the other rank is gone. After a failure the library exchanges no more
	 * messages with that rank.
	 */
	int (*send)(void *user, uint32_t to, uint32_t tag, const void *data, size_t bytes,
		    uint32_t timeout_ms);
	/**
	 * Receives exactly `bytes` bytes from rank `from`. Messages between two ranks with one tag
	 * must keep their order. Returns 0, or a negative errno: -ETIMEDOUT after `timeout_ms`,
	 * -EPIPE or -ECONNRESET if the other rank is gone. After a failure the library exchanges no
	 * more messages with that rank.
	 */
	int (*receive)(void *user, uint32_t from, uint32_t tag, void *into, size_t bytes,
		       uint32_t timeout_ms);
	/** Called at intervals while the library waits for a rank's message in the store, so that
	 * the transport can make progress. NULL if the transport does not need it. */
	void (*progress)(void *user);
};

/* ---- Groups ---------------------------------------------------------------------------------- */

/** Which ranks write files. */
enum ioshape_mode {
	/** chosen by the rule in docs/groups.md; the report gives the reason */
	IOSHAPE_MODE_AUTO = 0,
	IOSHAPE_MODE_EACH = 1, /**< every rank writes a file of its own */
	IOSHAPE_MODE_NODE = 2, /**< one rank of each node writes one file for the node */
	IOSHAPE_MODE_RANK0 = 3 /**< rank 0 writes one file for all ranks */
};

/** Key-value store through which the ranks exchange messages: which ranks are there, what is
 * planned, and which ranks have finished. All ranks must use the same store. */
enum ioshape_store {
	IOSHAPE_STORE_AUTO = 0,  /**< the first of the following that works */
	IOSHAPE_STORE_REDIS = 1, /**< the context's coordinator, if that is a Redis */
	IOSHAPE_STORE_HOST = 2,  /**< memory of this host, if all ranks are on it */
	IOSHAPE_STORE_FILES = 3  /**< small files beside the checkpoints */
};

/** The ranks of a job that save together. */
struct ioshape_group;

/** A fast local disk of this node; see ioshape/tier.h. */
struct ioshape_tier;

/** Options of a group. `ranks` and `token` must be the same on all ranks, and so must the effective
 * value of `store`. For `mode`, `keep_last` and `keep_every` the values of rank 0 count. */
struct ioshape_group_options {
	size_t size;    /**< sizeof(struct ioshape_group_options) */
	uint32_t rank;  /**< rank of this process, from 0 to ranks - 1 */
	uint32_t ranks; /**< number of ranks, at most 1048576; 0 means 1 */
	/** number of ranks of the group on this host; 0 if unknown */
	uint32_t local_ranks;
	enum ioshape_mode mode;   /**< which ranks write files (IOSHAPE_MODE) */
	enum ioshape_store store; /**< store for the messages between ranks */
	/** Name that all ranks of this job share and that no other job uses. Ranks meet if they
	 * open one directory with one token. NULL: the `job` of the context. */
	const char *token;
	/** Name of this rank's node. Ranks of one host that give one name share memory. NULL: the
	 * name of the host. */
	const char *node;
	/** Transport between nodes; borrowed until the group is freed. NULL for none. Without one,
	 * a group on several nodes uses IOSHAPE_MODE_NODE in place of IOSHAPE_MODE_RANK0. */
	const struct ioshape_comm *comm;
	/**
	 * Longest wait for another rank in milliseconds (IOSHAPE_DEADLINE_MS): 1000 to 3600000. A
	 * rank that does not come, or sends no heartbeat, for this time counts as lost, and the
	 * call fails with -ETIMEDOUT. The library sends heartbeats by itself, but not during a
	 * system call such as fsync(). Default: 120000. This is not the `deadline_ms` of a save.
	 */
	uint32_t deadline_ms;
	/** number of newest complete checkpoints to keep after each save; 0 keeps all */
	uint32_t keep_last;
	/** also keep checkpoints whose step is a multiple of this; 0 for none */
	uint64_t keep_every;
	/**
	 * Tier on which checkpoints are saved first; NULL for none. All ranks open the tier of
	 * their node. Borrowed until the group is freed. `keep_last` and `keep_every` apply to the
	 * directory, once the checkpoints are drained to it.
	 *
	 * A checkpoint is saved directly if it does not fit on the tier of a node, or if a rank has
	 * no tier. Saves with a deadline or with `replace` off are also direct. The report then has
	 * IOSHAPE_DOWNGRADE_TIER.
	 */
	struct ioshape_tier *tier;
	uint32_t reserved; /**< must be 0 */
};

/** Initializes a struct ioshape_group_options with all defaults. */
#define IOSHAPE_GROUP_OPTIONS_INIT IOSHAPE_SIZED(ioshape_group_options)

/**
 * Opens a group.
 *
 * All ranks of a job call this function with the same directory, and each call waits until all
 * ranks have called. The directory is created if it does not exist.
 *
 * @param context    an open context, which must outlive the group
 * @param directory  directory of the checkpoints
 * @param options    options of the group. NULL for all defaults, which is a group of one rank
 * @param out        receives the group, to be freed with ioshape_group_free(). NULL if the call
 *                   fails
 * @return 0; -ETIMEDOUT if ranks did not call within `deadline_ms`, and the error names them;
 *         -EINVAL for an invalid argument; IOSHAPE_E_COORDINATOR; another negative code
 */
int ioshape_group_open(struct ioshape_context *context, const char *directory,
		       const struct ioshape_group_options *options, struct ioshape_group **out);

/**
 * Saves this rank's tensors as its shard of a checkpoint.
 *
 * All ranks call this function or ioshape_group_save_records(), in the same order of steps. The
 * checkpoint appears when all shards are on stable storage, and the save then succeeds on all
 * ranks. If a rank fails or dies, the save fails on all ranks, and the directory is as before. The
 * error names the rank and its failure. A complete checkpoint of the same step is replaced
 * atomically.
 *
 * If `out` is NULL, the call returns when the save has ended, and borrows everything that is passed
 * until then. It calls options->progress on a thread of the library. With `out` the save goes on in
 * the background, as ioshape_save_tensors() describes it. It ends when the whole checkpoint is
 * complete. Saves of one group are written one after the other.
 *
 * If options->replace is off and the step has a complete checkpoint, the save fails with -EEXIST. A
 * checkpoint is always on stable storage when its save succeeds: options->sync has no effect. Give
 * options->deadline_ms on all ranks or on none.
 *
 * @param group    the group
 * @param step     number of the checkpoint. IOSHAPE_LATEST is invalid
 * @param tensors  tensors to save. Their names must differ
 * @param count    number of tensors; 0 is allowed
 * @param options  options of the save. NULL for all defaults
 * @param out      receives the background save, to be freed with ioshape_save_free(). NULL makes
 *                 the call wait. If the call fails, *out is NULL
 * @return 0; -EINVAL for an invalid argument; -EEXIST; -ETIMEDOUT if a rank did not come or answer
 *         in time; -ENOSPC, -EDQUOT or IOSHAPE_E_SKIPPED for lack of space; IOSHAPE_E_ALARM;
 *         -ECANCELED if a callback stopped the save; another negative code, also that of another
 *         rank
 */
int ioshape_group_save_tensors(struct ioshape_group *group, uint64_t step,
			       const struct ioshape_tensor *tensors, size_t count,
			       const struct ioshape_save_options *options,
			       struct ioshape_save **out);

/**
 * Saves this rank's records as its shard of a checkpoint.
 *
 * All ranks call this function or ioshape_group_save_tensors(), in the same order of steps. The
 * checkpoint appears when all shards are on stable storage, and the save then succeeds on all
 * ranks. If a rank fails or dies, the save fails on all ranks, and the directory is as before. The
 * error names the rank and its failure. A complete checkpoint of the same step is replaced
 * atomically.
 *
 * If `out` is NULL, the call returns when the save has ended, and borrows everything that is passed
 * until then. It calls options->progress and `fetch` on a thread of the library. With `out` the
 * save goes on in the background, as ioshape_save_records() describes it. It ends when the whole
 * checkpoint is complete. Saves of one group are written one after the other.
 *
 * If options->replace is off and the step has a complete checkpoint, the save fails with -EEXIST. A
 * checkpoint is always on stable storage when its save succeeds: options->sync has no effect. Give
 * options->deadline_ms on all ranks or on none.
 *
 * @param group    the group
 * @param step     number of the checkpoint. IOSHAPE_LATEST is invalid
 * @param records  records to save. Their names must differ
 * @param count    number of records; 0 is allowed
 * @param options  options of the save. NULL for all defaults
 * @param out      receives the background save, to be freed with ioshape_save_free(). NULL makes
 *                 the call wait. If the call fails, *out is NULL
 * @return 0; -EINVAL for an invalid argument; -EEXIST; -ETIMEDOUT if a rank did not come or answer
 *         in time; -ENOSPC, -EDQUOT or IOSHAPE_E_SKIPPED for lack of space; IOSHAPE_E_ALARM;
 *         -ECANCELED if a callback stopped the save; another negative code, also that of another
 *         rank
 */
int ioshape_group_save_records(struct ioshape_group *group, uint64_t step,
			       const struct ioshape_record *records, size_t count,
			       const struct ioshape_save_options *options,
			       struct ioshape_save **out);

/**
 * Tells the other ranks that this rank contributes nothing to a checkpoint.
 *
 * Call this function instead of a save, so that no rank waits for this one. The saves of this step
 * then fail on the other ranks. Their error names this rank and `why`.
 *
 * @param group  the group
 * @param step   number of the checkpoint
 * @param why    reason in one sentence. NULL for a general one
 * @return 0 if the other ranks were told; -EINVAL if `group` is NULL; -EPERM in a forked child;
 *         another negative code
 */
int ioshape_group_fail(struct ioshape_group *group, uint64_t step, const char *why);

/** Options of the search for the newest checkpoint. */
struct ioshape_search_options {
	size_t size; /**< sizeof(struct ioshape_search_options) */
	/** 1: find the newest intact checkpoint, by reading all its bytes. 0: find the newest
	 * complete one. */
	uint32_t intact;
	/** 1: also pass over checkpoints that raised an alarm when they were saved (enum
	 * ioshape_alarm). Without effect unless `intact` is set. */
	uint32_t healthy;
	/**
	 * Called on each rank for every newer checkpoint that was passed over, if `intact` is set.
	 * Such a checkpoint is damaged, has no manifest, is not readable for a rank, or raised an
	 * alarm.
	 * ioshape_last_error() describes the reason during the call. NULL for none.
	 */
	void (*passed_over)(void *user, uint64_t step);
	void *passed_over_user; /**< passed to `passed_over` */
	/**
	 * Receives the directory of the checkpoint that was found: that of the group or that on its
	 * tier. During a call of passed_over() it is the directory of the checkpoint that was
	 * passed over. The text belongs to the group. NULL if not needed.
	 */
	const char **directory;
};

/** Initializes a struct ioshape_search_options with all defaults. */
#define IOSHAPE_SEARCH_OPTIONS_INIT IOSHAPE_SIZED(ioshape_search_options)

/**
 * Finds the newest checkpoint of a group and returns the same one on all ranks.
 *
 * All ranks call this function. To find a complete checkpoint, rank 0 searches and tells the
 * others. To find an intact one, the ranks read the candidates, the newest first. Each rank reads
 * an equal share of the shards and compares their checksums. The first candidate that is intact on
 * all ranks is the result. If the nodes have tiers, they first restore what a lost node had, as far
 * as the parity allows.
 *
 * @param group    the group
 * @param options  options of the search. NULL finds the newest complete checkpoint
 * @param step     receives the number of the checkpoint
 * @return 0; -ENOENT if there is no checkpoint at all, which means that the job starts for the
 *         first time; IOSHAPE_E_UNUSABLE if there are checkpoints but none can be used; -ETIMEDOUT
 *         if a rank did not come or answer in time; another negative code
 */
int ioshape_group_get_latest(struct ioshape_group *group,
			     const struct ioshape_search_options *options, uint64_t *step);

/**
 * Frees a group.
 *
 * Saves that have not ended are aborted. Their handles stay valid for ioshape_save_free(). The
 * other ranks see that this rank has left. Rank 0 waits up to 10 s until the others have read its
 * last message. In a forked child the call does nothing.
 *
 * @param group  the group; NULL is allowed
 */
void ioshape_group_free(struct ioshape_group *group);

/* ---- Checkpoints of groups ------------------------------------------------------------------- */

/** The newest complete checkpoint, where a function takes a step. The newest is the one that was
 * saved last, whatever its step is. */
#define IOSHAPE_LATEST UINT64_MAX

/**
 * A complete checkpoint of a group that is open for reading.
 *
 * While it is open, no process removes it, on this host and on hosts that share locks with it. A
 * save of the same step can still replace it. From then on the functions of the handle return
 * -ESTALE, so that a program never mixes old and new shards. Open the checkpoint again then.
 * Several threads may use one handle.
 */
struct ioshape_checkpoint;

/** Description of a checkpoint of a group. */
struct ioshape_checkpoint_info {
	size_t size;            /**< sizeof(struct ioshape_checkpoint_info); set before the call */
	uint64_t step;          /**< number of the checkpoint */
	uint32_t ranks;         /**< number of ranks that saved it */
	uint32_t files;         /**< number of files without the manifest */
	uint64_t bytes;         /**< size of these files together */
	int64_t saved_s;        /**< time of the save, in seconds since 1970 */
	enum ioshape_mode mode; /**< which ranks wrote the files */
	uint32_t distinct;      /**< number of distinct shards; 1 if all ranks saved equal bytes */
	const char *path;       /**< path of the directory; valid until the checkpoint is freed */
	/** serial number, higher than those of the checkpoints that existed when it was saved */
	uint64_t serial;
};

/** Initializes a struct ioshape_checkpoint_info. */
#define IOSHAPE_CHECKPOINT_INFO_INIT IOSHAPE_SIZED(ioshape_checkpoint_info)

/** Location of a rank's shard: an ordinary file of torch.save(), or a range of a zip. */
struct ioshape_shard_info {
	size_t size;      /**< sizeof(struct ioshape_shard_info); set before the call */
	const char *file; /**< path of the file; valid until the checkpoint is freed */
	/** Name of the shard in the zip, or name of the file itself: "rank-00007.pt". If an equal
	 * shard of another rank is stored, the name of that one. */
	const char *name;
	uint64_t offset;  /**< offset of the shard in the file; 0 if it is a file of its own */
	uint64_t bytes;   /**< size of the shard */
	uint32_t crc32;   /**< CRC-32 of the shard */
	uint32_t same_as; /**< lowest rank that saved equal bytes; this rank if there is no other */
};

/** Initializes a struct ioshape_shard_info. */
#define IOSHAPE_SHARD_INFO_INIT IOSHAPE_SIZED(ioshape_shard_info)

/**
 * Opens a checkpoint of a group for reading. Any process may open it, also one of another job.
 *
 * The call reads the manifest and checks it, also against the names and sizes of the files. It does
 * not read the files. With IOSHAPE_LATEST it passes over newer checkpoints that are not valid, and
 * logs a warning for each.
 *
 * @param context    an open context, which must outlive the checkpoint
 * @param directory  directory of the checkpoints
 * @param step       number of the checkpoint. IOSHAPE_LATEST opens the newest
 * @param out        receives the checkpoint, to be freed with ioshape_checkpoint_free(). NULL if
 *                   the call fails
 * @return 0; -ENOENT if there is no such checkpoint; IOSHAPE_E_DAMAGED if it is not valid;
 *         IOSHAPE_E_FORMAT if its manifest is none of this library; -EOPNOTSUPP if a later version
 *         of the library wrote it; IOSHAPE_E_UNUSABLE for IOSHAPE_LATEST if there are checkpoints
 *         but none is valid; another negative code
 */
int ioshape_checkpoint_open(struct ioshape_context *context, const char *directory, uint64_t step,
			    struct ioshape_checkpoint **out);

/**
 * Returns the description of a checkpoint.
 *
 * @param checkpoint  the checkpoint
 * @param info        filled; set its `size` before the call
 * @return 0; -EINVAL if an argument is NULL or the size is invalid; -EPERM in a forked child
 */
int ioshape_checkpoint_get_info(struct ioshape_checkpoint *checkpoint,
				struct ioshape_checkpoint_info *info);

/**
 * Returns the location of a rank's shard.
 *
 * @param checkpoint  the checkpoint
 * @param rank        rank that saved the shard
 * @param info        filled; set its `size` before the call
 * @return 0; -ENOENT if the checkpoint has no such rank; -EINVAL if an argument is NULL or the size
 *         is invalid; -EPERM in a forked child
 */
int ioshape_checkpoint_get_shard(struct ioshape_checkpoint *checkpoint, uint32_t rank,
				 struct ioshape_shard_info *info);

/**
 * Opens a rank's shard for reading. The reader reads only the shard's range of the file.
 *
 * The reader may outlive the checkpoint. It must not outlive the context.
 *
 * @param checkpoint  the checkpoint
 * @param rank        rank that saved the shard
 * @param options     options of the reader. `file_offset` and `file_bytes` must be 0. NULL for all
 *                    defaults
 * @param out         receives the reader, to be freed with ioshape_reader_free(). NULL if the call
 *                    fails
 * @return 0; -ENOENT if the checkpoint has no such rank, or if the file is on the tier of another
 *         node; -ESTALE if the checkpoint was replaced or removed; -EINVAL for an invalid argument;
 *         IOSHAPE_E_DAMAGED; another negative code
 */
int ioshape_checkpoint_open_shard(struct ioshape_checkpoint *checkpoint, uint32_t rank,
				  const struct ioshape_reader_options *options,
				  struct ioshape_reader **out);

/**
 * Reads all files of a checkpoint and compares them with the checksums of the manifest.
 *
 * The checksums cover every byte, including the checksums inside the shards.
 *
 * @param checkpoint     the checkpoint
 * @param progress       receives the progress. NULL for none
 * @param progress_user  passed to `progress`
 * @return 0; IOSHAPE_E_DAMAGED for the first damage; -ESTALE if the checkpoint was replaced or
 *         removed; -ECANCELED if `progress` stopped the call; -EPERM in a forked child; another
 *         negative code
 */
int ioshape_checkpoint_verify(struct ioshape_checkpoint *checkpoint, ioshape_progress_fn progress,
			      void *progress_user);

/**
 * Closes a checkpoint and frees its handle, also in a forked child.
 *
 * @param checkpoint  the checkpoint; NULL is allowed
 */
void ioshape_checkpoint_free(struct ioshape_checkpoint *checkpoint);

/**
 * Lists the complete checkpoints in a directory, oldest first.
 *
 * The oldest is the one that was saved first. The call reads names and manifests, but not the files
 * of the checkpoints.
 *
 * @param context    an open context
 * @param directory  directory of the checkpoints
 * @param steps      receives an array of their numbers, to be freed with ioshape_free(). NULL if
 *                   the call fails
 * @param count      receives the number of checkpoints
 * @return 0; -ENOENT if there is no such directory; -EINVAL if an argument is NULL; another
 *         negative code
 */
int ioshape_checkpoint_list(struct ioshape_context *context, const char *directory,
			    uint64_t **steps, size_t *count);

/** Options that select the checkpoints to keep. */
struct ioshape_prune_options {
	size_t size;        /**< sizeof(struct ioshape_prune_options) */
	uint32_t keep_last; /**< number of newest checkpoints to keep; 0 keeps all */
	uint32_t dry_run;   /**< 1: remove nothing, only count */
	/** also keep checkpoints whose step is a multiple of this; 0 for none */
	uint64_t keep_every;
	/** called for each checkpoint before it is removed, with its step and size; NULL for none
	 */
	void (*removing)(void *user, uint64_t step, uint64_t bytes);
	void *removing_user; /**< passed to `removing` */
};

/** Initializes a struct ioshape_prune_options with all defaults. */
#define IOSHAPE_PRUNE_OPTIONS_INIT IOSHAPE_SIZED(ioshape_prune_options)

/**
 * Removes the checkpoints that are not to be kept, oldest first, and files that dead jobs left
 * behind.
 *
 * The newest complete checkpoint always stays, and so does a checkpoint that a process has open.
 * Several processes may prune at a time. If a checkpoint cannot be removed, the call goes on with
 * the others and returns the first failure.
 *
 * @param context    an open context
 * @param directory  directory of the checkpoints
 * @param options    which checkpoints stay. NULL keeps all
 * @param removed    receives the number of removed checkpoints. NULL if not needed
 * @return 0; -ENOENT if there is no such directory; -EINVAL for an invalid argument; another
 *         negative code
 */
int ioshape_checkpoint_prune(struct ioshape_context *context, const char *directory,
			     const struct ioshape_prune_options *options, uint64_t *removed);

#ifdef __cplusplus
}
#endif

#endif
