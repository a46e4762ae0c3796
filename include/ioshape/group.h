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

#include <ioshape/container.h>

#ifdef __cplusplus
extern "C" {
#endif

/* ---- How ranks talk -------------------------------------------------------------------------- */

/*
 * Ways for bytes between nodes, which one writer for all ranks needs: MPI (ioshape/mpi.h), or
 * functions of the caller's. They are called on threads of the library's (in a blocking save also
 * on the caller's), at most one at a time in each direction for each pair of ranks.
 */
struct ioshape_comm {
	size_t size; /* sizeof(struct ioshape_comm) */
	void *user;
	/*
	 * Sends or receives exactly these bytes. Messages of one pair of ranks and one tag keep
	 * their order. 0, or a negative errno: -ETIMEDOUT after timeout_ms, -EPIPE or -ECONNRESET
	 * if the other side is gone. After a failure nothing more is sent to, or received from,
	 * that rank.
	 */
	int (*send)(void *user, uint32_t to, uint32_t tag, const void *data, size_t bytes,
		    uint32_t timeout_ms);
	int (*receive)(void *user, uint32_t from, uint32_t tag, void *into, size_t bytes,
		       uint32_t timeout_ms);
	/* Called now and then while the library waits for other things; NULL if nothing needs it.
	 */
	void (*progress)(void *user);
};

/* ---- Groups ---------------------------------------------------------------------------------- */

enum ioshape_mode {
	IOSHAPE_MODE_AUTO = 0, /* by the rule in docs/groups.md; the report says why */
	IOSHAPE_MODE_EACH = 1, /* every rank writes its own file */
	IOSHAPE_MODE_NODE = 2, /* one file for each node */
	IOSHAPE_MODE_RANK0 = 3 /* one file, written by rank 0 */
};

/* Where ranks leave each other notes: who is there, what is planned, who has finished. */
enum ioshape_board {
	IOSHAPE_BOARD_AUTO = 0,    /* the first that works of those below */
	IOSHAPE_BOARD_REDIS = 1,   /* the context's coordinator, where that is a Redis */
	IOSHAPE_BOARD_SOCKETS = 2, /* all ranks are on this host */
	IOSHAPE_BOARD_FILES = 3    /* small files beside the generations */
};

struct ioshape_group;

struct ioshape_group_options {
	size_t size; /* sizeof(struct ioshape_group_options) */
	uint32_t rank;
	uint32_t ranks; /* of the group; 0 is 1 */
	/* Ranks of it on this host, if the launcher says; 0 unknown. */
	uint32_t local_ranks;
	enum ioshape_mode mode;   /* IOSHAPE_MODE */
	enum ioshape_board board; /* IOSHAPE_BOARD */
	/* What all ranks of this job, and no other job, have in common; NULL: the context's job. */
	const char *token;
	/* IOSHAPE_NODE: ranks with the same name share memory; NULL: by the host they are on. */
	const char *node;
	const struct ioshape_comm *comm; /* borrowed until the group is freed; NULL for none */
	/* IOSHAPE_DEADLINE_MS: a rank that gives no sign of life for so long is lost; 1000 to
	 * 3600000; default 120000. */
	uint32_t deadline_ms;
	/* After each save: complete generations to keep, newest first; 0: all. */
	uint32_t keep_last;
	/* Besides: those whose step is a multiple of this; 0: none. */
	uint64_t keep_every;
};

#define IOSHAPE_GROUP_OPTIONS_INIT IOSHAPE_SIZED(ioshape_group_options)

/*
 * All ranks of a job call this with the same directory, which is made if it is not there. Waits
 * until all have. `mode`, `keep_last` and `keep_every` of rank 0 count. On failure *out is NULL and
 * ioshape_context_message() names the ranks that were missing.
 */
int ioshape_group_open(struct ioshape_context *context, const char *directory,
		       const struct ioshape_group_options *options, struct ioshape_group **out);

/*
 * Saves this rank's part of generation `step`. All ranks call it, in the same order of steps. Only
 * when all parts are on stable storage does the generation appear; then the call returns 0, on all
 * ranks. Otherwise it fails, on all ranks, with a sentence that names the rank and what it failed
 * with, and what was there before is as it was; so it is if a rank dies. A complete generation of
 * the same step is replaced at once.
 *
 * The other rules are those of ioshape_save_tensors(), but that functions of the caller's (fetch,
 * progress) are called on a thread of the library's. options->no_replace: -EEXIST if there is a
 * complete generation of this step; no_sync means nothing here. The report's bytes are those of
 * this rank's part, or, if it writes for others, of their file.
 */
int ioshape_group_save_tensors(struct ioshape_group *group, uint64_t step,
			       const struct ioshape_tensor *tensors, size_t count,
			       const struct ioshape_save_options *options);
int ioshape_group_save_records(struct ioshape_group *group, uint64_t step,
			       const struct ioshape_record *records, size_t count,
			       const struct ioshape_save_options *options);

/*
 * The same in the background: returns when this rank's tensors have been copied, or at once with
 * options->borrow. The handle ends when the generation has, well or not. Generations of one group
 * are written one after the other.
 */
int ioshape_group_save_tensors_async(struct ioshape_group *group, uint64_t step,
				     const struct ioshape_tensor *tensors, size_t count,
				     const struct ioshape_save_options *options,
				     struct ioshape_save **out);
int ioshape_group_save_records_async(struct ioshape_group *group, uint64_t step,
				     const struct ioshape_record *records, size_t count,
				     const struct ioshape_save_options *options,
				     struct ioshape_save **out);

/*
 * In the place of a save: this rank has nothing to bring to generation `step`. The call that the
 * other ranks make for it fails, with this sentence and rank in theirs, and so does nobody wait in
 * vain. 0 if they could be told.
 */
int ioshape_group_fail(struct ioshape_group *group, uint64_t step, const char *why);

/*
 * The newest complete generation, the same for all ranks: rank 0 looks, the others are told. All
 * ranks call it. -ENOENT if there is none.
 */
int ioshape_group_latest(struct ioshape_group *group, uint64_t *step);

/* Saves under way are aborted. NULL is fine. The other ranks see this one as gone. */
void ioshape_group_free(struct ioshape_group *group);

/* ---- Generations ----------------------------------------------------------------------------- */

/* A generation that is open for reading. While it is, on this host and wherever locks reach,
 * nothing removes it. */
struct ioshape_generation;

struct ioshape_generation_info {
	size_t size; /* sizeof(struct ioshape_generation_info): set before the call */
	uint64_t step;
	uint32_t ranks;
	uint32_t files; /* without the manifest */
	uint64_t bytes; /* of these files */
	int64_t saved;  /* seconds since 1970 */
	enum ioshape_mode mode;
	uint32_t reserved;
	const char *path; /* of the directory; valid until the generation is freed */
};

struct ioshape_part_info {
	size_t size;      /* sizeof(struct ioshape_part_info): set before the call */
	const char *file; /* path; valid until the generation is freed */
	const char *name; /* in the zip, or of the file itself: "rank-00007.pt" */
	uint64_t offset;  /* in the file; 0 if it is a file of its own */
	uint64_t bytes;
	uint32_t crc32;
	uint32_t reserved;
};

/*
 * Opens generation `step` of a directory, whichever job saved it: the manifest is read and checked,
 * also against the sizes of the files. -ENOENT if there is none, IOSHAPE_E_DAMAGED if it does not
 * hold. On failure *out is NULL.
 */
int ioshape_generation_open(struct ioshape_context *context, const char *directory, uint64_t step,
			    struct ioshape_generation **out);
/* The newest one that holds. */
int ioshape_generation_open_latest(struct ioshape_context *context, const char *directory,
				   struct ioshape_generation **out);
int ioshape_generation_get_info(struct ioshape_generation *generation,
				struct ioshape_generation_info *info);
/* -ENOENT if it has no such rank. */
int ioshape_generation_part(struct ioshape_generation *generation, uint32_t rank,
			    struct ioshape_part_info *info);
/* A reader of that rank's part, as ioshape_reader_open() gives it: only its range is read. */
int ioshape_generation_reader(struct ioshape_generation *generation, uint32_t rank,
			      const struct ioshape_reader_options *options,
			      struct ioshape_reader **out);
/* Reads all of it and compares all checksums, those of the manifest included. */
int ioshape_generation_verify(struct ioshape_generation *generation, ioshape_progress_fn progress,
			      void *progress_user);
/* The last failure's sentence is ioshape_context_message(). NULL is fine. */
void ioshape_generation_free(struct ioshape_generation *generation);

/*
 * The steps of the complete generations in a directory, oldest first, in memory to be freed with
 * ioshape_steps_free(). A look at names and manifests; files are not read.
 */
int ioshape_generation_steps(struct ioshape_context *context, const char *directory,
			     uint64_t **steps, size_t *count);
void ioshape_steps_free(uint64_t *steps);

struct ioshape_prune_options {
	size_t size;         /* sizeof(struct ioshape_prune_options) */
	uint32_t keep_last;  /* 0: all */
	uint32_t dry_run;    /* 1: only count */
	uint64_t keep_every; /* 0: none */
	/* Told about each generation that goes, before it does; NULL for none. */
	void (*removing)(void *user, uint64_t step, uint64_t bytes);
	void *removing_user;
};

#define IOSHAPE_PRUNE_OPTIONS_INIT IOSHAPE_SIZED(ioshape_prune_options)

/*
 * Removes complete generations that are not to be kept, oldest first, and what dead jobs left
 * behind. Never the newest complete one, and none that somebody reads. *removed (may be NULL)
 * receives how many generations went.
 */
int ioshape_generations_prune(struct ioshape_context *context, const char *directory,
			      const struct ioshape_prune_options *options, uint64_t *removed);

#ifdef __cplusplus
}
#endif

#endif
