/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Generations on disk: directories of files that are written under a name of their own (an
 * attempt), put in place with their manifest, opened, counted and removed.
 *
 * All of it is checked against other processes that do the same in the same directory: attempts are
 * locked by their writer, manifests by their readers, and the kernel drops those locks when a
 * process dies. Where a filesystem has no locks, time decides, as said at each function.
 */
#ifndef CKPT_GENERATION_H
#define CKPT_GENERATION_H

#include "ckpt/ckpt.h"

#include <ioshape/group.h>

/* ---- Names (generation_names.c; pure) -------------------------------------------------------- */

/* "step-0000001000" */
#define CKPT_STEP_NAME_BYTES 32
/* ".step-0000001000.<job>-<machine>-<random>", ".replaced-step-0000001000.<random>",
 * ".pruned-step-0000001000.<random>" */
#define CKPT_ATTEMPT_NAME_BYTES 96
/* "<job>-<machine>-<random>": 8, 8 and 16 hexadecimal digits. */
#define CKPT_ATTEMPT_ID_BYTES 35

enum ckpt_name_kind {
	CKPT_NAME_OTHER,
	CKPT_NAME_STEP,
	CKPT_NAME_ATTEMPT,
	CKPT_NAME_REPLACED, /* stepped aside for another of its step: see attempt.c */
	CKPT_NAME_PRUNED,   /* stepped aside to be removed: see prune.c */
};

struct ckpt_name {
	enum ckpt_name_kind kind;
	uint64_t step;
	char id[CKPT_ATTEMPT_ID_BYTES]; /* of an attempt */
};

void ckpt_step_name(char into[CKPT_STEP_NAME_BYTES], uint64_t step);
struct ckpt_name ckpt_parse_name(const char *name);
/* A name for what steps aside: `kind` is CKPT_NAME_REPLACED or CKPT_NAME_PRUNED. */
void ckpt_aside_name(char into[CKPT_ATTEMPT_NAME_BYTES], enum ckpt_name_kind kind, uint64_t step,
		     uint64_t number);

/* ---- Attempts (attempt.c, attempt_tidy.c) ---------------------------------------------------- */

struct ckpt_attempt {
	struct ring_folder directory; /* of the generations */
	struct ring_folder folder;    /* of this attempt; locked, where locks work */
	char name[CKPT_ATTEMPT_NAME_BYTES];
	char id[CKPT_ATTEMPT_ID_BYTES]; /* for zip_manifest.attempt */
	uint64_t step;
	bool committed;
	struct base_log log;
};

/* To begin with; ckpt_attempt_abandon() is safe on it. */
#define CKPT_NO_ATTEMPT                                                                            \
	{                                                                                          \
		.directory = RING_NO_FOLDER, .folder = RING_NO_FOLDER                              \
	}

/*
 * Makes `directory` if it is not there, removes what dead jobs left in it (ckpt_tidy), and makes a
 * new directory in it, for the files of generation `step`. Its writers need only the path: rank 0
 * alone holds the attempt. Other processes take it for alive as long as this one is.
 * `token` is that of the job.
 */
int ckpt_attempt_begin(struct ckpt_attempt *attempt, const char *directory, uint64_t step,
		       const char *token, const struct base_log *log, struct base_error *error);

/* Valid until commit or abandon. */
static inline const char *ckpt_attempt_path(const struct ckpt_attempt *attempt)
{
	return attempt->folder.path;
}

/*
 * Writes the manifest, and makes the attempt the generation of its step, durably: whatever happens,
 * there is the old generation or the new one. -EEXIST with no_replace if there is a complete one;
 * IOSHAPE_E_DAMAGED if its files are not there as the manifest says.
 * After a failure it is as it was before, and can only be abandoned.
 */
int ckpt_attempt_commit(struct ckpt_attempt *attempt, const struct zip_manifest *manifest,
			bool no_replace, struct base_error *error);

/* Ends every attempt: without a commit, nothing is left of it. */
void ckpt_attempt_abandon(struct ckpt_attempt *attempt);

/*
 * Removes attempts of this user whose processes are dead. One that is locked is alive. One that is
 * not is dead if it was begun on this machine or by this job, and otherwise if nothing in it was
 * touched for a day: locks may not reach across machines. Where there are no locks, those of this
 * job are dead (but for those of this process), and others after a day. `job` is the job's hash, as
 * in an attempt's id, or NULL. What stepped aside gets its place back, or goes if that is taken.
 * Best effort: failures are logged.
 */
void ckpt_tidy(const struct ring_folder *directory, const char *job, const struct base_log *log);

/*
 * Removes what is open as `folder` and called `name`, manifest first. -EBUSY, without a sentence,
 * if somebody reads it: then nothing is touched.
 */
int ckpt_remove(const struct ring_folder *folder, const struct ring_folder *directory,
		const char *name, struct base_error *error);

/* The first digits of the id of a job's attempts. */
#define CKPT_JOB_BYTES 9
void ckpt_job_hash(char into[CKPT_JOB_BYTES], const char *token);

/* The first half of the last digits of the ids of this process's attempts. */
uint32_t ckpt_process_number(void);

/* For a new name: that, and random digits. */
uint64_t ckpt_name_number(void);

/* ---- Generations (generation*.c) ------------------------------------------------------------- */

/* One that holds: its manifest is sound, and the files are there with their sizes. */
struct ckpt_generation {
	struct ring_folder folder;
	struct zip_manifest manifest;
	struct ring_hold held; /* on the manifest: nobody removes it while it is open */
};

#define CKPT_NO_GENERATION                                                                         \
	{                                                                                          \
		.folder = RING_NO_FOLDER, .held = RING_NO_HOLD                                     \
	}

/* -ENOENT, without a sentence, if there is no such directory or no manifest in it;
 * IOSHAPE_E_DAMAGED and others if it does not hold. On failure it is closed. */
int ckpt_generation_open(struct ckpt_generation *generation, const struct ring_folder *directory,
			 const char *name, uint64_t step, struct base_error *error);
void ckpt_generation_close(struct ckpt_generation *generation);
/* Whether the files are there with their sizes; `remedy` ends the sentence if not. */
int ckpt_check_files(const struct ring_folder *folder, const struct zip_manifest *manifest,
		     const char *remedy, struct base_error *error);
uint64_t ckpt_generation_bytes(const struct ckpt_generation *generation);

/* A name that may be a generation's: also that of one that stepped aside while nothing is in its
 * place. */
struct ckpt_candidate {
	uint64_t step;
	bool aside;
	char name[CKPT_ATTEMPT_NAME_BYTES];
};

struct ckpt_candidates {
	struct ckpt_candidate *all; /* newest first; those aside behind the other of their step */
	size_t count;
};

int ckpt_list(const struct ring_folder *directory, struct ckpt_candidates *candidates,
	      struct base_error *error);
void ckpt_candidates_free(struct ckpt_candidates *candidates);

/* The directory of that path, absolute whatever the working directory will be. */
int ckpt_open_directory(struct ring_folder *directory, const char *path, struct base_error *error);

/* Step by step; -ENOENT with a sentence. Those newer ones that do not hold are told to the log. */
int ckpt_open_step(struct ckpt_generation *generation, const struct ring_folder *directory,
		   uint64_t step, struct base_error *error);
int ckpt_open_latest(struct ckpt_generation *generation, const struct ring_folder *directory,
		     const struct base_log *log, struct base_error *error);

/* ---- Retention (retention.c, pure; prune.c) -------------------------------------------------- */

/*
 * Which of the complete generations go, given oldest first: sets `goes` for each, and returns how
 * many. Those stay that are among the newest `keep_last` (0: all), or whose step is a multiple of
 * keep_every (0: none). The newest stays.
 */
size_t ckpt_retention(const uint64_t *steps, size_t count, uint32_t keep_last, uint64_t keep_every,
		      bool *goes);

/* ioshape_generations_prune(), for who is inside already. `job` as for ckpt_tidy(). `spared` is a
 * step that stays in any case; NULL for none. */
int ckpt_prune(struct ioshape_context *context, const char *directory, const char *job,
	       const struct ioshape_prune_options *options, const uint64_t *spared,
	       uint64_t *removed, struct base_error *error);

#endif
