/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Generations on disk: directories of files that are written under a name of their own (an
 * attempt), put in place with their manifest, opened, counted and removed.
 *
 * All of it is checked against other processes that do the same in the same directory: attempts are
 * locked by their writer, manifests by their readers, and the kernel drops those locks when a
 * process dies. Where a filesystem has no locks, time decides, as said at each function.
 */
#ifndef GROUP_GENERATION_H
#define GROUP_GENERATION_H

#include "save/save.h"

#include <ioshape/group.h>

/* ---- Names (names.c; pure) ------------------------------------------------------------------- */

/* "step-0000001000" */
#define GROUP_STEP_NAME_BYTES 32
/* ".step-0000001000.<job>-<domain>-<random>", ".drained-" in front of "step" with the same behind
 * it, ".replaced-step-0000001000.<random>", ".pruned-step-0000001000.<random>" */
#define GROUP_ATTEMPT_NAME_BYTES 96
/* "<job>-<lock domain>-<random>": 8, 8 and 16 hexadecimal digits. */
#define GROUP_ATTEMPT_ID_BYTES 35

enum group_name_kind {
	GROUP_NAME_OTHER,
	GROUP_NAME_STEP,
	GROUP_NAME_ATTEMPT,
	GROUP_NAME_REPLACED, /* stepped aside for another of its step: see attempt.c */
	GROUP_NAME_PRUNED,   /* stepped aside to be removed: see prune.c */
	GROUP_NAME_DRAINED,  /* nodes bring their files there: see tier/carry.c */
};

struct group_name {
	enum group_name_kind kind;
	uint64_t step;
	char id[GROUP_ATTEMPT_ID_BYTES]; /* of an attempt, also where it is drained */
};

void group_step_name(char into[GROUP_STEP_NAME_BYTES], uint64_t step);
struct group_name group_parse_name(const char *name);
/* A name for what steps aside: `kind` is GROUP_NAME_REPLACED or GROUP_NAME_PRUNED. */
void group_aside_name(char into[GROUP_ATTEMPT_NAME_BYTES], enum group_name_kind kind, uint64_t step,
		      uint64_t number);

/* Where nodes bring the files of that attempt, each from its tier. */
void group_drained_name(char into[GROUP_ATTEMPT_NAME_BYTES], uint64_t step, const char *id);

/* ---- Attempts (attempt.c, tidy.c)
 * -------------------------------------------------------------------- */

struct group_attempt {
	struct ring_folder directory; /* of the generations */
	struct ring_folder folder;    /* of this attempt; locked, where locks work */
	char name[GROUP_ATTEMPT_NAME_BYTES];
	char id[GROUP_ATTEMPT_ID_BYTES]; /* for zip_manifest.attempt */
	uint64_t step;
	/* Its number is higher: that of the newest that was there when it began, or in another
	 * directory that goes with this one. Then its own. */
	uint64_t last_serial;
	/* The files of the manifest that are in this directory, by their numbers; NULL: all. */
	const bool *files_here;
	struct ring_entry seen; /* the directory, when the attempt had its name */
	bool committed;
	struct base_log log;
};

/* To begin with; group_attempt_abandon() is safe on it. */
#define GROUP_NO_ATTEMPT                                                                           \
	{                                                                                          \
		.directory = RING_NO_FOLDER, .folder = RING_NO_FOLDER                              \
	}

/*
 * Makes `directory` if it is not there, removes what dead jobs left in it (group_tidy), and makes a
 * new directory in it, for the files of generation `step`. Its writers need only the path: rank 0
 * alone holds the attempt. Other processes take it for alive as long as this one is.
 * `job` is its hash.
 */
int group_attempt_begin(struct group_attempt *attempt, const char *directory, uint64_t step,
			const char *job, const struct base_log *log, struct base_error *error);

/* The same on another node, for its own files: under the name that rank 0's has. */
int group_attempt_join(struct group_attempt *attempt, const char *directory, uint64_t step,
		       const char *name, const char *job, const struct base_log *log,
		       struct base_error *error);

/* The number that the attempt would have now: after all that are there, though their jobs began
 * later, and had other clocks. */
uint64_t group_next_serial(const struct group_attempt *attempt);

/* Valid until commit or abandon. */
static inline const char *group_attempt_path(const struct group_attempt *attempt)
{
	return attempt->folder.path;
}

/*
 * Writes the manifest, with the next serial number if it has none, and makes the attempt the
 * generation of its step, durably: whatever happens, there is the old generation or the new one.
 * -EEXIST with no_replace if there is a complete one; IOSHAPE_E_DAMAGED if one of its files is not
 * there. After a failure it is as it was before, and can only be abandoned.
 */
int group_attempt_commit(struct group_attempt *attempt, const struct zip_manifest *manifest,
			 bool no_replace, struct base_error *error);

/* Ends every attempt: without a commit, nothing is left of it. */
void group_attempt_abandon(struct group_attempt *attempt);

/*
 * Removes attempts of this user whose processes are dead. One that is locked is alive. One that is
 * not is dead if it was begun in this lock domain or by this job, and otherwise if nothing in it
 * was touched for a day: locks may not reach farther. Where there are no locks, those of this job
 * are dead (but for those of this process), and others after a day. `job` is the job's hash, as in
 * an attempt's id, or NULL. What stepped aside gets its place back, or goes if that is taken. Best
 * effort: failures are logged. `last_serial` is raised to that of the newest generation that is
 * there; it may be NULL. The next call removes what the budget did not reach.
 */
void group_tidy(const struct ring_folder *directory, const char *job, uint64_t *last_serial,
		struct base_budget *budget, const struct base_log *log);

/* Removes what is open as `folder` and called `name`, manifest first. -EBUSY, without a sentence,
 * if a process reads it: then nothing is touched. -EAGAIN, without a sentence, if the budget did
 * not reach all of it. */
int group_remove_generation(const struct ring_folder *folder, const struct ring_folder *directory,
			    const char *name, struct base_budget *budget, struct base_error *error);

/* The first digits of the id of a job's attempts. */
#define GROUP_JOB_BYTES 9
void group_job_hash(char into[GROUP_JOB_BYTES], const char *token);

/* The highest serial number in a directory. What cannot be listed is not there for whoever looks
 * for the newest either. */
uint64_t group_last_serial(const struct ring_folder *directory, const struct base_log *log);

/* For a new name: digits of this process, and random ones. */
uint64_t group_name_number(void);

/* ---- Generations (open.c, list.c) ------------------------------------------------------------ */

/* One that holds: its manifest is sound, and the files are there with their sizes. On the tiers of
 * several nodes, where a file of parities says so, each has its own files only. */
struct group_generation {
	struct ring_folder folder;
	struct zip_manifest manifest;
	struct ring_hold held; /* on the manifest: no process removes it while it is open */
};

#define GROUP_NO_GENERATION                                                                        \
	{                                                                                          \
		.folder = RING_NO_FOLDER, .held = RING_NO_HOLD                                     \
	}

/* -ENOENT, without a sentence, if there is no such directory or no manifest in it;
 * IOSHAPE_E_DAMAGED and others if it does not hold. On failure it is closed. */
int group_generation_open(struct group_generation *generation, const struct ring_folder *directory,
			  const char *name, uint64_t step, struct base_error *error);
void group_generation_close(struct group_generation *generation);
/* Whether the files are there with their sizes; `remedy` ends the sentence if not. */
int group_check_files(const struct ring_folder *folder, const struct zip_manifest *manifest,
		      const char *remedy, struct base_error *error);
uint64_t group_generation_bytes(const struct group_generation *generation);

/* "node-00003.parity": what protects the files of a node on its tier, and tells them apart from an
 * incomplete generation. */
#define GROUP_PARITY_NAME_BYTES 32
void group_parity_name(char into[GROUP_PARITY_NAME_BYTES], uint32_t node);
/* Whether it is one, and whose. */
bool group_parse_parity_name(const char *name, uint32_t *node);
/* Whether a directory has one: a generation in it has the files of some nodes only. */
bool group_is_of_nodes(const struct ring_folder *folder);

/* A name that may be a generation's: also that of one that stepped aside while nothing is in its
 * place. */
#define GROUP_UNKNOWN_SERIAL UINT64_MAX
struct group_candidate {
	uint64_t step;
	uint64_t serial; /* of its manifest; 0: not looked at, GROUP_UNKNOWN_SERIAL: not readable */
	bool aside;
	char name[GROUP_ATTEMPT_NAME_BYTES];
};

struct group_candidates {
	struct group_candidate *all;
	size_t count;
};

/* By step; those aside behind the other of their step. */
int group_list_generations(const struct ring_folder *directory, struct group_candidates *candidates,
			   struct base_error *error);
/* The same, newest first. Only the beginning of each manifest has been looked at. */
int group_list_by_age(const struct ring_folder *directory, struct group_candidates *candidates,
		      struct base_error *error);
/* Newest first: by serial numbers, so that what a job saves after going back to an earlier step is
 * newer than what it has given up. First those that may be the newest, for all that is known. */
void group_sort_by_age(struct group_candidates *candidates);
/* Opens the one at that position; or another one from behind it, if it could not be read when they
 * were sorted and now proves to be older. */
int group_open_candidate(struct group_generation *generation, const struct ring_folder *directory,
			 struct group_candidates *candidates, size_t at, struct base_error *error);
/* Whether it holds; -ENOENT, with a sentence, if it has no manifest. */
int group_look_at_candidate(const struct ring_folder *directory,
			    struct group_candidates *candidates, size_t at,
			    struct base_error *error);
void group_candidates_free(struct group_candidates *candidates);

/* The directory of that path, absolute whatever the working directory will be. */
int group_open_directory(struct ring_folder *directory, const char *path, struct base_error *error);

/* Whether a process has no more memory or descriptors: then it knows nothing about what it looked
 * at. */
bool group_is_shortage(int code);

/* Whether it failed because of what it is: then an older one may be taken instead. Not if it was
 * this process that could not. */
bool group_is_its_own_fault(int code);

/* 0 or a negative errno; *serial is GROUP_UNKNOWN_SERIAL then. */
int group_peek_serial(const struct ring_folder *directory, const char *name, uint64_t *serial);

/*
 * Generations that are there and cannot be used, with the reasons. Zero to begin with. If there is
 * no other, a job must not take that for its first start.
 */
struct group_unusable {
	size_t count;
	char why[BASE_ERROR_TEXT_BYTES / 2];
};

/* Counts one. `why` may be NULL: the first reasons are enough. */
void group_unusable_add(struct group_unusable *unusable, const struct base_error *why);
/* Fails: -ENOENT if none was counted, otherwise IOSHAPE_E_UNUSABLE. */
int group_fail_unusable(const struct group_unusable *unusable, const char *directory,
			struct base_error *error);

/* -ENOENT with a sentence, IOSHAPE_E_UNUSABLE if none of several holds. Those newer ones that do
 * not hold are told to the log. */
int group_open_step(struct group_generation *generation, const struct ring_folder *directory,
		    uint64_t step, struct base_error *error);
int group_open_latest(struct group_generation *generation, const struct ring_folder *directory,
		      const struct base_log *log, struct base_error *error);

/* ---- Retention (prune.c) --------------------------------------------------------------------- */

/*
 * Which of the complete generations go, given oldest first: sets `goes` for each, and returns how
 * many. Those stay that are among the newest `keep_last` (0: all), or whose step is a multiple of
 * keep_every (0: none). The newest stays.
 */
size_t group_retention(const uint64_t *steps, size_t count, uint32_t keep_last, uint64_t keep_every,
		       bool *goes);

/* ioshape_generation_prune(), for calls that are on a context already. `job` as for group_tidy().
 */
int group_prune(struct ioshape_context *context, const char *directory, const char *job,
		const struct ioshape_prune_options *options, uint64_t *removed,
		struct base_error *error);

#endif
