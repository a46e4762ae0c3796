/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The group level: all ranks of a job save one checkpoint together, which exists as a whole or not
 * at all.
 *
 * Such a checkpoint is a generation: a directory "step-0000001000" with a few large files and, put
 * there last, "manifest.json", which lists them with sizes and checksums. What has no manifest that
 * holds is no generation. Each rank's part is an ordinary file of torch.save: by itself ("each"),
 * or as a member of a zip per node ("node") or of one zip for all ("rank0").
 *
 * docs/groups.md tells how ranks find each other, which mode is chosen when, and what happens when
 * something fails.
 */
#ifndef IOSHAPE_GROUP_H
#define IOSHAPE_GROUP_H

#include <ioshape/ioshape.h>

#ifdef __cplusplus
extern "C" {
#endif

/* ---- How ranks talk -------------------------------------------------------------------------- */

/**
 * A way for bytes between nodes, which one writer for all ranks needs.
 *
 * It is MPI's (ioshape/mpi.h), or made of functions of the caller's. They are called on threads of
 * the library, in a blocking save also on the caller's, at most one at a time in each direction for
 * each pair of ranks.
 */
struct ioshape_comm {
	size_t size; /**< sizeof(struct ioshape_comm) */
	void *user;
	/**
	 * Sends or receives exactly these bytes. Messages of one pair of ranks and one tag keep
	 * their order. 0, or a negative errno: -ETIMEDOUT after timeout_ms, -EPIPE or -ECONNRESET
	 * if the other side is gone. After a failure nothing more is sent to, or received from,
	 * that rank.
	 */
	int (*send)(void *user, uint32_t to, uint32_t tag, const void *data, size_t bytes,
		    uint32_t timeout_ms);
	int (*receive)(void *user, uint32_t from, uint32_t tag, void *into, size_t bytes,
		       uint32_t timeout_ms);
	/** Called now and then while the library waits for other things; NULL if nothing needs it.
	 */
	void (*progress)(void *user);
};

/* ---- Groups ---------------------------------------------------------------------------------- */

/** Which ranks write. */
enum ioshape_mode {
	IOSHAPE_MODE_AUTO = 0, /**< by the rule in docs/groups.md; the report says why */
	IOSHAPE_MODE_EACH = 1, /**< every rank writes its own file */
	IOSHAPE_MODE_NODE = 2, /**< one file for each node */
	IOSHAPE_MODE_RANK0 = 3 /**< one file, written by rank 0 */
};

/**
 * The board: the store where ranks leave each other notes.
 *
 * The notes say who is there, what is planned, and who has finished.
 */
enum ioshape_board {
	IOSHAPE_BOARD_AUTO = 0,  /**< the first that works of those below */
	IOSHAPE_BOARD_REDIS = 1, /**< the context's coordinator, where that is a Redis */
	IOSHAPE_BOARD_HOST = 2,  /**< all ranks are on this host */
	IOSHAPE_BOARD_FILES = 3  /**< small files beside the generations */
};

/** All ranks of a job, which save together. */
struct ioshape_group;

/** A fast disk of this node: ioshape/tier.h. */
struct ioshape_tier;

/** Who is in a group, and how it saves. */
struct ioshape_group_options {
	size_t size; /**< sizeof(struct ioshape_group_options) */
	uint32_t rank;
	uint32_t ranks; /**< of the group; 0 is 1 */
	/** Ranks of it on this host, if the launcher says; 0 unknown. */
	uint32_t local_ranks;
	enum ioshape_mode mode; /**< IOSHAPE_MODE */
	enum ioshape_board board;
	/** What all ranks of this job, and no other job, have in common; NULL: the context's job.
	 */
	const char *token;
	/** Ranks with the same name share memory; NULL: by the host they are on. */
	const char *node;
	const struct ioshape_comm *comm; /**< borrowed until the group is freed; NULL for none */
	/** IOSHAPE_DEADLINE_MS: a rank that sends no heartbeat for so long is lost; 1000 to
	 * 3600000; default 120000. */
	uint32_t deadline_ms;
	/** After each save: complete generations to keep, newest first; 0: all. */
	uint32_t keep_last;
	/** Besides: those whose step is a multiple of this; 0: none. */
	uint64_t keep_every;
	/**
	 * Generations are saved on this tier first, and kept for the directory: keep_last and
	 * keep_every say what stays there once they are drained. All ranks open the tier of their
	 * node. Borrowed until the group is freed; NULL: none.
	 *
	 * Saved directly, which the report says, is what does not fit on a node's tier, what is
	 * saved with a deadline, or with `replace` off, and what a rank without a tier takes part
	 * in.
	 */
	struct ioshape_tier *tier;
	uint32_t reserved; /**< 0 */
};

#define IOSHAPE_GROUP_OPTIONS_INIT IOSHAPE_SIZED(ioshape_group_options)

/**
 * Opens a group.
 *
 * All ranks of a job call this with the same directory, which is made if it is not there. The call
 * waits until all have. Of `mode`, `keep_last` and `keep_every` those of rank 0 count.
 *
 * @param context    an open context; it must outlive the group
 * @param directory  where the generations lie
 * @param options    NULL for all defaults: a group of one
 * @param out        receives the group, to be freed with ioshape_group_free(), or NULL
 * @return 0; -ETIMEDOUT if ranks were missing, which the error names; another negative code
 */
int ioshape_group_open(struct ioshape_context *context, const char *directory,
		       const struct ioshape_group_options *options, struct ioshape_group **out);

/**
 * Saves this rank's tensors as its part of a generation.
 *
 * All ranks call this or ioshape_group_save_records(), in the same order of steps. Only when all
 * parts are on stable storage does the generation appear; then the save ends well, on all ranks.
 * Otherwise it fails, on all ranks, with an error that names the rank and what it failed with, and
 * what was there before is as it was. The same happens if a rank dies. A complete generation of the
 * same step is replaced in one step.
 *
 * What ioshape_save_tensors() says holds here, too, also about saves in the background: `out` ends
 * when the generation has. But functions of the caller's (fetch, progress) are called on a thread
 * of the library. With options->replace off: -EEXIST if there is a complete generation of this
 * step; `sync` means nothing here. The report's bytes are those of this rank's part or, if it
 * writes for others, of their file. Generations of one group are written one after the other.
 *
 * @param group    the group
 * @param step     the number of the generation
 * @param tensors  `count` tensors with different names
 * @param count    number of tensors; 0 is fine
 * @param options  NULL for all defaults
 * @param out      NULL to wait; otherwise receives the save, to be freed with ioshape_save_free(),
 *                 or NULL if the call fails
 * @return 0 or a negative code
 */
int ioshape_group_save_tensors(struct ioshape_group *group, uint64_t step,
			       const struct ioshape_tensor *tensors, size_t count,
			       const struct ioshape_save_options *options,
			       struct ioshape_save **out);

/**
 * Saves this rank's records as its part of a generation.
 *
 * All that ioshape_group_save_tensors() says holds here, too.
 *
 * @param group    the group
 * @param step     the number of the generation
 * @param records  `count` records with different names
 * @param count    number of records
 * @param options  NULL for all defaults
 * @param out      as for ioshape_group_save_tensors()
 * @return 0 or a negative code
 */
int ioshape_group_save_records(struct ioshape_group *group, uint64_t step,
			       const struct ioshape_record *records, size_t count,
			       const struct ioshape_save_options *options,
			       struct ioshape_save **out);

/**
 * Tells the other ranks that this one brings nothing to a generation.
 *
 * It takes the place of a save. The others' saves of this step fail, with this rank and `why` in
 * their error, so no rank waits for one that will never arrive.
 *
 * @param group  the group
 * @param step   the number of the generation
 * @param why    one sentence; NULL for a general one
 * @return 0 if the others could be told; otherwise a negative code
 */
int ioshape_group_fail(struct ioshape_group *group, uint64_t step, const char *why);

/** Which generation ioshape_group_get_latest() looks for. */
struct ioshape_search_options {
	size_t size;     /**< sizeof(struct ioshape_search_options) */
	uint32_t intact; /**< 1: one that is intact; 0: a complete one */
	uint32_t reserved;
	/**
	 * Called, on each rank, for every newer generation that is not intact: damaged, without a
	 * manifest, or not readable for a rank. ioshape_last_error() says why during the call. NULL
	 * for none.
	 */
	void (*passed_over)(void *user, uint64_t step);
	void *passed_over_user;
	/** Receives where that generation lies, in a call of passed_over() the one that it is
	 * about: the group's directory, or that on its tier. The text belongs to the group. May be
	 * NULL. */
	const char **directory;
};

#define IOSHAPE_SEARCH_OPTIONS_INIT IOSHAPE_SIZED(ioshape_search_options)

/**
 * Finds the newest generation, the same one on all ranks.
 *
 * All ranks call this. For a complete one rank 0 looks and tells the others. For an intact one each
 * rank reads an equal share of the parts of each candidate, the newest first, and compares their
 * checksums; the first that is intact for all is the answer. Nodes with tiers first restore what
 * one of them has lost, as far as the parity of the others allows.
 *
 * @param group    the group
 * @param options  NULL: a complete one
 * @param step     receives the number of the generation
 * @return 0; -ENOENT if there is none at all: the first start; IOSHAPE_E_UNUSABLE if there are some
 *         and none can be used; another negative code
 */
int ioshape_group_get_latest(struct ioshape_group *group,
			     const struct ioshape_search_options *options, uint64_t *step);

/**
 * Frees a group.
 *
 * Saves under way are aborted; their handles may be freed afterwards. The other ranks see this one
 * as gone. Rank 0 waits up to 10 s until the others have read what it said last.
 *
 * @param group  the group; NULL is fine
 */
void ioshape_group_free(struct ioshape_group *group);

/* ---- Generations ----------------------------------------------------------------------------- */

/** Stands for the newest complete generation, where a step is asked for: that which was saved
 * last, whatever its step. */
#define IOSHAPE_LATEST UINT64_MAX

/**
 * A complete generation that is open for reading.
 *
 * While it is open nothing removes it, on this host and wherever locks reach. If a save of the same
 * step replaces it all the same, its calls answer -ESTALE from then on, so that nobody mixes old
 * and new: open it again. Several threads may use one generation.
 */
struct ioshape_generation;

/** What a generation consists of. */
struct ioshape_generation_info {
	size_t size; /**< sizeof(struct ioshape_generation_info): set before the call */
	uint64_t step;
	uint32_t ranks;
	uint32_t files;  /**< without the manifest */
	uint64_t bytes;  /**< of these files */
	int64_t saved_s; /**< seconds since 1970 */
	enum ioshape_mode mode;
	uint32_t distinct; /**< parts that differ: 1 if all ranks saved the same */
	const char *path;  /**< of the directory; valid until the generation is freed */
	/** Higher than those of the generations that were there when it was saved. */
	uint64_t serial;
};

#define IOSHAPE_GENERATION_INFO_INIT IOSHAPE_SIZED(ioshape_generation_info)

/** Where a rank's part lies: an ordinary file of torch.save, or a range of a bundle. */
struct ioshape_part_info {
	size_t size;      /**< sizeof(struct ioshape_part_info): set before the call */
	const char *file; /**< path; valid until the generation is freed */
	const char *name; /**< in the zip, or of the file itself: "rank-00007.pt", or that of
			   the rank whose equal part is stored */
	uint64_t offset;  /**< in the file; 0 if it is a file of its own */
	uint64_t bytes;
	uint32_t crc32;
	uint32_t same_as; /**< the lowest rank that saved the same; this rank if none did */
};

#define IOSHAPE_PART_INFO_INIT IOSHAPE_SIZED(ioshape_part_info)

/**
 * Opens a generation, whichever job saved it.
 *
 * The manifest is read and checked, also against the names and sizes of the files, which are not
 * read. IOSHAPE_LATEST passes over newer generations that do not hold, with a warning to the log.
 *
 * @param context    an open context; it must outlive the generation
 * @param directory  where the generations lie
 * @param step       the number of the generation, or IOSHAPE_LATEST
 * @param out        receives the generation, to be freed with ioshape_generation_free(), or NULL
 * @return 0; -ENOENT if there is none; IOSHAPE_E_DAMAGED if it does not hold; IOSHAPE_E_UNUSABLE if
 *         the newest was asked for, and none holds; IOSHAPE_E_FORMAT if a later version wrote it;
 *         another negative code
 */
int ioshape_generation_open(struct ioshape_context *context, const char *directory, uint64_t step,
			    struct ioshape_generation **out);

/**
 * Tells what a generation consists of.
 *
 * @param generation  the generation
 * @param info        filled; info->size must be set
 * @return 0 or a negative code
 */
int ioshape_generation_get_info(struct ioshape_generation *generation,
				struct ioshape_generation_info *info);

/**
 * Tells where a rank's part lies.
 *
 * @param generation  the generation
 * @param rank        whose part
 * @param info        filled; info->size must be set
 * @return 0; -ENOENT if there is no such rank; another negative code
 */
int ioshape_generation_get_part(struct ioshape_generation *generation, uint32_t rank,
				struct ioshape_part_info *info);

/**
 * Opens a rank's part for reading: only its range of the file is read.
 *
 * The reader may outlive the generation.
 *
 * @param generation  the generation
 * @param rank        whose part
 * @param options     as for ioshape_reader_open(); file_offset and file_bytes are not used
 * @param out         receives the reader, to be freed with ioshape_reader_free(), or NULL
 * @return 0; -ENOENT if there is no such rank; -ESTALE; another negative code
 */
int ioshape_generation_open_part(struct ioshape_generation *generation, uint32_t rank,
				 const struct ioshape_reader_options *options,
				 struct ioshape_reader **out);

/**
 * Reads all files of a generation and compares them with the checksums of the manifest.
 *
 * These cover every byte, also the checksums inside the parts.
 *
 * @param generation     the generation
 * @param progress       told how far it is; NULL for none
 * @param progress_user  passed to `progress`
 * @return 0; IOSHAPE_E_DAMAGED for the first damage; -ESTALE; another negative code
 */
int ioshape_generation_verify(struct ioshape_generation *generation, ioshape_progress_fn progress,
			      void *progress_user);

/**
 * Closes a generation.
 *
 * @param generation  the generation; NULL is fine
 */
void ioshape_generation_free(struct ioshape_generation *generation);

/**
 * Lists the complete generations in a directory, oldest first: in the order in which they were
 * saved.
 *
 * Names and manifests are looked at; files are not read.
 *
 * @param context    an open context
 * @param directory  where the generations lie
 * @param steps      receives their numbers, to be freed with ioshape_free(), or NULL
 * @param count      receives how many there are
 * @return 0 or a negative code
 */
int ioshape_generation_list(struct ioshape_context *context, const char *directory,
			    uint64_t **steps, size_t *count);

/** Which generations stay. */
struct ioshape_prune_options {
	size_t size;         /**< sizeof(struct ioshape_prune_options) */
	uint32_t keep_last;  /**< so many of the newest; 0: all */
	uint32_t dry_run;    /**< 1: nothing is removed, only counted */
	uint64_t keep_every; /**< besides, those whose step is a multiple of this; 0: none */
	/** Told about each generation that goes, before it does; NULL for none. */
	void (*removing)(void *user, uint64_t step, uint64_t bytes);
	void *removing_user;
};

#define IOSHAPE_PRUNE_OPTIONS_INIT IOSHAPE_SIZED(ioshape_prune_options)

/**
 * Removes generations that are not to be kept, oldest first, and what dead jobs left behind.
 *
 * The newest complete generation always stays, and so does one that somebody has open. Several may
 * prune at a time. One that cannot be removed does not keep the others: the first failure is the
 * answer.
 *
 * @param context    an open context
 * @param directory  where the generations lie
 * @param options    NULL: all generations stay
 * @param removed    receives how many went; may be NULL
 * @return 0 or a negative code
 */
int ioshape_generation_prune(struct ioshape_context *context, const char *directory,
			     const struct ioshape_prune_options *options, uint64_t *removed);

#ifdef __cplusplus
}
#endif

#endif
