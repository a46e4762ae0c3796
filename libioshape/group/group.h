/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The group floor: what all ranks of a job do together.
 *
 * What they do is a round: opening, a save, asking for the newest generation. Rounds are numbered
 * alike on all ranks and happen one after the other. In each, every rank leaves its messages on the
 * board, and rank 0 decides.
 *
 * Generations on disk are directories of files that are written under a name of their own (an
 * attempt), put in place with their manifest, opened, counted and removed. All of it is checked
 * against other processes that do the same in the same directory: attempts are locked by their
 * writer, manifests by their readers, and the kernel drops those locks when a process dies. Where a
 * filesystem has no locks, time decides, as said at each function.
 */
#ifndef GROUP_GROUP_H
#define GROUP_GROUP_H

#include "group/store.h"
#include "group/stream.h"
#include "save/save.h"

#include <ioshape/group.h>

#include <stdio.h>
#include <string.h>

/* ---- Names in a directory of generations (generations.c) ------------------------------------- */

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
	GROUP_NAME_REPLACED, /* stepped aside for another of its step: see generations.c */
	GROUP_NAME_PRUNED,   /* stepped aside to be removed: see generations.c */
	GROUP_NAME_DRAINED,  /* nodes bring their files there: see tier/drain.c */
};

struct group_name {
	enum group_name_kind kind;
	uint64_t step;
	char id[GROUP_ATTEMPT_ID_BYTES]; /* of an attempt, also where it is drained */
};

void group_step_name(char into[GROUP_STEP_NAME_BYTES], uint64_t step);
struct group_name group_parse_name(const char *name);

/* Where nodes bring the files of that attempt, each from its tier. */
void group_drained_name(char into[GROUP_ATTEMPT_NAME_BYTES], uint64_t step, const char *id);

/* The first digits of the id of a job's attempts. */
#define GROUP_JOB_BYTES 9

/* ---- Attempts (generations.c) ---------------------------------------------------------------- */

struct group_attempt {
	struct io_folder directory; /* of the generations */
	struct io_folder folder;    /* of this attempt; locked, where locks work */
	char name[GROUP_ATTEMPT_NAME_BYTES];
	char id[GROUP_ATTEMPT_ID_BYTES]; /* for format_manifest.attempt */
	uint64_t step;
	/* Its number is higher: that of the newest that was there when it began, or in another
	 * directory that goes with this one. Then its own. */
	uint64_t last_serial;
	/* The files of the manifest that are in this directory, by their numbers; NULL: all. */
	const bool *files_here;
	struct io_entry seen; /* the directory, when the attempt had its name */
	bool committed;
	struct base_log log;
};

/* To begin with; group_attempt_abandon() is safe on it. */
#define GROUP_NO_ATTEMPT                                                                           \
	{                                                                                          \
		.directory = IO_NO_FOLDER, .folder = IO_NO_FOLDER                                  \
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
int group_attempt_commit(struct group_attempt *attempt, const struct format_manifest *manifest,
			 bool no_replace, struct base_error *error);

/* Ends every attempt: without a commit, nothing is left of it. */
void group_attempt_abandon(struct group_attempt *attempt);

/* ---- Generations in a directory (generations.c) ---------------------------------------------- */

/* One that holds: its manifest is sound, and the files are there with their sizes. On the tiers of
 * several nodes, where a file of parities says so, each has its own files only. */
struct group_generation {
	struct io_folder folder;
	struct format_manifest manifest;
	struct io_hold held; /* on the manifest: no process removes it while it is open */
};

#define GROUP_NO_GENERATION                                                                        \
	{                                                                                          \
		.folder = IO_NO_FOLDER, .held = IO_NO_HOLD                                         \
	}

/* -ENOENT, without a sentence, if there is no such directory or no manifest in it;
 * IOSHAPE_E_DAMAGED and others if it does not hold. On failure it is closed. */
int group_generation_open(struct group_generation *generation, const struct io_folder *directory,
			  const char *name, uint64_t step, struct base_error *error);
void group_generation_close(struct group_generation *generation);
/* Whether the files are there with their sizes; `remedy` ends the sentence if not. */
int group_check_files(const struct io_folder *folder, const struct format_manifest *manifest,
		      const char *remedy, struct base_error *error);
uint64_t group_generation_bytes(const struct group_generation *generation);

/* "node-00003.parity": what protects the files of a node on its tier, and tells them apart from an
 * incomplete generation. */
#define GROUP_PARITY_NAME_BYTES 32
void group_parity_name(char into[GROUP_PARITY_NAME_BYTES], uint32_t node);
/* Whether it is one, and whose. */
bool group_parse_parity_name(const char *name, uint32_t *node);
/* Whether a directory has one: a generation in it has the files of some nodes only. */
bool group_is_of_nodes(const struct io_folder *folder);

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

/* Lists the candidates, newest first. Only the beginning of each manifest has been looked at. */
int group_list_by_age(const struct io_folder *directory, struct group_candidates *candidates,
		      struct base_error *error);
/* Opens the one at that position; or another one from behind it, if it could not be read when they
 * were sorted and now proves to be older. */
int group_open_candidate(struct group_generation *generation, const struct io_folder *directory,
			 struct group_candidates *candidates, size_t at, struct base_error *error);
void group_candidates_free(struct group_candidates *candidates);

/* The directory of that path, absolute whatever the working directory will be. */
int group_open_directory(struct io_folder *directory, const char *path, struct base_error *error);

/* Whether a process has no more memory or descriptors: then it knows nothing about what it looked
 * at. */
bool group_is_shortage(int code);

/* The highest serial number in a directory. What cannot be listed is not there for whoever looks
 * for the newest either. */
uint64_t group_last_serial(const struct io_folder *directory, const struct base_log *log);

/* -ENOENT with a sentence. */
int group_open_step(struct group_generation *generation, const struct io_folder *directory,
		    uint64_t step, struct base_error *error);

/* ---- Removal (generations.c) ----------------------------------------------------------------- */

/*
 * Removes attempts of this user whose processes are dead. One that is locked is alive. One that is
 * not is dead if it was begun in this lock domain or by this job, and otherwise if nothing in it
 * was touched for a day: locks may not reach farther. Where there are no locks, those of this job
 * are dead (but for those of this process), and others after a day. `job` is the job's hash, as in
 * an attempt's id, or NULL. What stepped aside gets its place back, or goes if that is taken. Best
 * effort: failures are logged. `last_serial` is raised to that of the newest generation that is
 * there; it may be NULL. The next call removes what the budget did not reach.
 */
void group_tidy(const struct io_folder *directory, const char *job, uint64_t *last_serial,
		struct base_budget *budget, const struct base_log *log);

/* ioshape_generation_prune(), for calls that are on a context already. `job` as for group_tidy().
 */
int group_prune(struct ioshape_context *context, const char *directory, const char *job,
		const struct ioshape_prune_options *options, uint64_t *removed,
		struct base_error *error);

/* ---- The public handle of a generation (handle.c) -------------------------------------------- */

struct ioshape_generation {
	struct ioshape_context *context;
	struct io_folder directory;
	struct group_generation found;
	char name[GROUP_ATTEMPT_NAME_BYTES]; /* of its directory when it was opened */
	pthread_mutex_t lock;                /* of the texts below, which are made at need */
	char **paths;                        /* of files */
	char **part_names;                   /* by rank, where they are not those of files */
};

/* ---- Notes (messages.c) ---------------------------------------------------------------------- */

/* Of all that ranks tell and send each other. */
#define GROUP_NOTES_FORMAT BASE_FORMAT(6u)

/* Appended to a buffer; a failure is remembered in `failed`. */
struct group_note {
	struct base_buffer bytes;
	bool failed;
};

/* ---- Tiers ----------------------------------------------------------------------------------- */

/*
 * What a group asks of the tier that it saves on first. libioshape-tier has these functions: its
 * struct ioshape_tier begins with struct group_tier. Paths are those of generations in the group's
 * directory.
 */
struct group_tier {
	const struct group_tier_ops *ops;
};

struct group_round;
/* What the tiers of all nodes have together; rank 0's. */
struct group_spreads;

struct group_tier_ops {
	/* Finds where the copy lies, or would lie; makes nothing. *place is to be freed. */
	int (*find)(struct group_tier *tier, const char *path, char **place,
		    struct base_error *error);
	/* As ioshape_tier_place(), for so many bytes and what this node keeps for the others of
	 * `nodes` nodes. */
	int (*make_room)(struct group_tier *tier, const char *path, uint64_t bytes, uint32_t nodes,
			 struct base_error *error);
	/* As ioshape_tier_keep(). */
	int (*keep)(struct group_tier *tier, const char *path, uint32_t keep_last,
		    uint64_t keep_every, struct base_error *error);

	/* Rank 0, of a generation that each node has saved on its own tier: appends what all nodes
	 * need for protect(). */
	int (*plan)(const struct ioshape_group *group, const struct format_manifest *manifest,
		    struct base_buffer *plan, struct base_error *error);
	/* The first rank of each node, together: writes into `folder`, which has the files of this
	 * node, what marks them as one node's and what protects other nodes. The generation is good
	 * without the latter: `unprotected` says why there is none. */
	int (*protect)(struct group_round *round, const struct format_manifest *manifest,
		       const struct base_buffer *plan, const struct io_folder *folder,
		       char unprotected[BASE_ERROR_TEXT_BYTES], struct base_error *error);

	/* All ranks of several nodes. Rank 0 hears which generations the tiers have together,
	 * newest first. *spreads is to be freed; NULL on other ranks. */
	int (*look)(struct group_round *round, struct group_spreads **spreads,
		    struct group_candidates *found, struct base_error *error);
	/* Rank 0: whether all of that one is there, or can be made. IOSHAPE_E_DAMAGED. */
	int (*check)(const struct group_spreads *spreads, size_t at, struct base_error *error);
	/* All ranks: gives each node what its ranks want of the generation that rank 0 names.
	 * `failure` is rank 0's: what a node could not do. */
	int (*restore)(struct group_round *round, const struct group_spreads *spreads, size_t at,
		       struct base_error *failure, struct base_error *error);
	void (*free)(struct group_spreads *spreads);
};

static inline struct group_tier *group_tier_of(const struct ioshape_group_options *options)
{
	return (struct group_tier *)(void *)options->tier;
}

/* ---- Groups (group.c) ------------------------------------------------------------------------ */

#define GROUP_WHERE_BYTES 64

struct group_rank {
	uint64_t nonce; /* of this life of the rank's process */
	/* Its last heartbeat, as it says it: they rise; and when it was heard. Only in rounds. */
	uint64_t beat, heard_ns;
	uint32_t node;
	char node_key[GROUP_WHERE_BYTES]; /* equal: they can share memory */
	char where[GROUP_WHERE_BYTES];    /* for messages: "n03, process 4711" */
	char domain[GROUP_WHERE_BYTES];   /* who has the same fails with it; known to rank 0 */
	bool has_tier;                    /* the same */
};

struct ioshape_group {
	pid_t owner;
	struct ioshape_context *context;
	struct ioshape_group_options options; /* strings are those below */
	char *directory;                      /* absolute */
	char *near;                           /* on its tier; NULL if there is a rank without one */
	bool has_tiers;                       /* all ranks have one */
	char *token;
	char job[GROUP_JOB_BYTES]; /* of the token: in the names of attempts */
	char *node;
	char board_name[17];
	struct store *board; /* NULL: there is only this rank */
	/* Ranks that meet in the directory, and share memory, move to it: where they will, and
	 * where they were, until all have. */
	struct store *memory, *met;
	bool may_move;
	struct slots_config coordinator;
	uint64_t deadline_ns;
	uint64_t nonce;
	uint64_t id; /* the same for all ranks, and no other group's */
	/* The scope of heartbeats: the same whichever round a rank is in. */
	char life[STORE_NAME_BYTES];
	struct group_rank *ranks;
	uint32_t *leaders; /* by node: its lowest rank, by which nodes are numbered */
	uint32_t node_count;

	pthread_mutex_t beginning; /* one save at a time is staged: in the order of their rounds */
	pthread_mutex_t lock;      /* of what follows */
	pthread_cond_t change;
	unsigned running;         /* saves that have not ended */
	struct fs_memory storage; /* below the directory; only in rounds */
	bool comm_failed;         /* bytes do not travel between nodes any more; only in rounds */
	/* The highest of the directory and the tier, once they have been looked at; only in rounds.
	 */
	uint64_t last_serial;
	bool serials_known;
	uint64_t kept_round; /* the first one whose notes have not been dropped; only in rounds */
	uint64_t next_round; /* that will be given out */
	uint64_t round;      /* that is going on */
};

/* Whether nodes look at each other's tiers. */
static inline bool group_has_tiers(const struct ioshape_group *group)
{
	return group->near && group->node_count > 1;
}

/* The rank that writes the part of this one. */
static inline uint32_t group_writer_of(const struct ioshape_group *group, enum ioshape_mode mode,
				       uint32_t rank)
{
	if (mode == IOSHAPE_MODE_RANK0)
		return 0;
	return mode == IOSHAPE_MODE_NODE ? group->leaders[group->ranks[rank].node] : rank;
}

/* Whether it is the first of its node. */
static inline bool group_leads_node(const struct ioshape_group *group, uint32_t rank)
{
	return group->leaders[group->ranks[rank].node] == rank;
}

/* Whether it is on our node. */
static inline bool group_is_local(const struct ioshape_group *group, uint32_t rank)
{
	return group->ranks[rank].node == group->ranks[group->options.rank].node;
}

/* Whether it is set for all ranks. */
static inline bool group_has_all(const struct ioshape_group *group, const bool *have)
{
	return !memchr(have, false, group->options.ranks * sizeof(*have));
}

/* "rank 3 (n03, process 4711)": for messages; valid until the end of the block it stands in. */
#define GROUP_RANK_BYTES 96
const char *group_show_rank(const struct ioshape_group *group, uint32_t rank,
			    char into[GROUP_RANK_BYTES]);
#define GROUP_SHOWN_RANK(group, rank) group_show_rank(group, rank, (char[GROUP_RANK_BYTES]){ 0 })

/* Some ranks, as many as one sentence can name. Zero it. */
#define GROUP_MOST_NAMED 8u
struct group_names {
	char text[GROUP_MOST_NAMED * (GROUP_RANK_BYTES + 2) + 16];
	uint32_t count, first;
};
void group_name_rank(struct group_names *names, const struct ioshape_group *group, uint32_t rank);

/* What a rank has failed with, named, as the failure of `error`. Returns its code. */
int group_fail_of_rank(const struct ioshape_group *group, uint32_t rank,
		       const struct base_error *failure, struct base_error *error);

/* ---- Rounds (messages.c) --------------------------------------------------------------------- */

struct group_round {
	struct ioshape_group *group;
	uint64_t number;
	char scope[STORE_NAME_BYTES]; /* on the board */
	const atomic_bool *abort;     /* NULL: it cannot be stopped */
	struct ioshape_save *save;    /* whose progress is told; NULL: there is none */
	enum ioshape_phase phase;     /* told last: only ever later ones */
	/* How far this rank is: part of its heartbeats. */
	uint64_t done_bytes;
	uint64_t last_beat_ns;
	/* The others could not be told what they wait for. Without heartbeats they stop waiting. */
	bool silent;
	/* What rank 0 last said of all: for progress. */
	uint64_t group_done, group_total;
};

/* The next number; to be begun later, in this order, by whatever thread. */
uint64_t group_round_reserve(struct ioshape_group *group);
/* Waits until the rounds before it have ended. */
void group_round_begin(struct group_round *round, struct ioshape_group *group, uint64_t number,
		       const atomic_bool *abort);
void group_round_end(struct group_round *round);
/* Drops the notes of the rounds before it. Rank 0: once all have come to this one. */
void group_round_forget(const struct group_round *round);

/* Until something may have changed; not for long. */
void group_round_rest(struct group_round *round);
/* Sends a heartbeat now and then: to be called from whatever takes long. */
void group_round_beat(struct group_round *round);
/* An ioshape_progress_fn for all that takes long in a round: tells the save's caller, and the other
 * ranks. */
int group_round_track(void *round, enum ioshape_phase phase, uint64_t done_bytes,
		      uint64_t total_bytes);
/* The same, and -ECANCELED if the round shall stop. */
int group_round_go_on(struct group_round *round, enum ioshape_phase phase, uint64_t done_bytes,
		      uint64_t total_bytes, struct base_error *error);

/* What is known of a rank that is waited for. Zero it. */
struct group_watched {
	uint64_t heard_ns; /* when its last heartbeat, or the beginning, was */
	uint64_t done_bytes;
	bool ahead; /* it is in a later round than we */
};

/*
 * Rank 0: hears many ranks. What a rank fails with is the failure of the whole, and named.
 * Ranks that were lost are named together.
 */
struct group_collection {
	const char *what;
	const char *missing; /* for the sentence: "did not come to save" */
	bool leaders;        /* only of the first rank of each node */
	/* Which of them; NULL: all. */
	bool (*awaits)(const void *user, uint32_t rank);
	/* Called once for each: what it says, or why it cannot be used. */
	int (*found)(void *user, uint32_t rank, const struct base_buffer *note,
		     struct base_error *failure);
	void *user;
	/* Ranks send heartbeats meanwhile, and hear how far all are; otherwise the deadline is for
	 * all. */
	bool beats;
};
int group_round_collect(struct group_round *round, const struct group_collection *collection,
			struct base_error *error);

/* ---- Messages (messages.c) ------------------------------------------------------------------- */

/*
 * All that ranks tell each other is in one table, with who tells it to whom. Each message has a
 * payload, which is one of the structs below or nothing.
 */
struct group_payload;

struct group_message {
	const char *name; /* on the board: "<name>-<rank>" */
	/* Writes its payload or reads one. */
	void (*pass)(struct group_payload *payload, void *message);
};

/* Writes a payload or reads one: a message's pass() says once what there is, and in which order.
 * What is read and does not fit is bad, and 0. */
struct group_payload {
	struct group_note *note; /* NULL: it is read */
	/* What is left to be read. */
	const uint8_t *at;
	size_t left;
	bool bad;
};

void group_pass_number(struct group_payload *payload, uint64_t *number);
/* A number that is no larger than `most`. */
void group_pass_small(struct group_payload *payload, uint32_t *number, uint32_t most);
void group_pass_half(struct group_payload *payload, uint32_t *number);
void group_pass_text(struct group_payload *payload, char *text, size_t bytes);
void group_pass_failure(struct group_payload *payload, struct base_error *failure);
/* Appends what is read. */
void group_pass_bytes(struct group_payload *payload, struct base_buffer *bytes);
/* Numbers that are no larger than `most`; memory for those that are read is allocated. */
void group_pass_list(struct group_payload *payload, uint32_t **list, uint32_t count, uint32_t most);

/* Rank 0 asks twice at most before there is a plan. */
#define GROUP_MOST_PLANS 3u

extern const struct group_message group_hello, group_roster, group_no_roster, group_beat,
	group_want, group_plans[GROUP_MOST_PLANS], group_digest, group_call, group_here, group_done,
	group_room, group_commit, group_kept, group_verdict, group_next, group_whole, group_checked,
	group_intact, group_bye;

struct group_hello {
	struct group_rank own;
	uint64_t ranks;  /* of the group, as this one knows it */
	uint64_t roster; /* the id of the roster that it has heard; 0: none */
};

struct group_roster {
	uint64_t id; /* of the group */
	bool complete;
	enum ioshape_mode mode; /* rank 0's */
	bool has_tiers;
	uint32_t nodes;
	uint32_t count;
	struct group_rank *ranks;
};

struct group_beat {
	uint64_t now_ns; /* they rise */
	uint64_t round;
	uint64_t done_bytes;              /* of this rank */
	uint64_t group_done, group_total; /* of rank 0: of all, as it has heard */
};

/* A sample or a digest of a rank's part. */
struct group_sum {
	bool known;
	struct group_sum_key { /* compared as bytes: no gaps */
		uint64_t bytes;
		uint64_t node; /* if copies on several nodes are kept; 0 elsewhere */
		uint8_t mac[BASE_MAC_BYTES];
	} key;
};

struct group_want {
	struct base_error failure; /* why there will be nothing */
	uint64_t step;
	uint64_t bytes;
	struct group_sum sample;
};

/* What rank 0 has decided, or what it has to know first. */
struct group_plan {
	struct base_error failure; /* why there is none */
	enum group_question {
		GROUP_NO_QUESTION,
		GROUP_ASKS_DIGESTS, /* of those ranks' parts, with `key` */
		GROUP_ASKS_ROOM,    /* of each node on its tier: the rest is as planned */
	} asks;
	uint8_t key[BASE_MAC_BYTES];
	enum ioshape_mode mode;
	char why[160];
	bool near;                              /* on tiers, and not in the group's directory */
	bool together;                          /* all nodes see the same tier */
	char not_near[BASE_ERROR_TEXT_BYTES];   /* why not, if there is a tier */
	char attempt[GROUP_ATTEMPT_NAME_BYTES]; /* its name there */
	uint64_t alignment;                     /* of parts in bundles */
	uint64_t total_bytes;                   /* of all kept parts; about, as the next */
	uint64_t repeated_bytes;                /* of the parts that are not kept */
	uint32_t count;
	struct group_planned {
		uint64_t bytes; /* 0 if it is not kept */
		uint32_t same;  /* the lowest rank with an equal part */
		uint32_t kept;  /* the rank whose copy is stored for it */
		bool asked;     /* for its digest */
	} * ranks;
};

struct group_digest {
	struct base_error failure;
	struct group_sum sum;
};

struct group_call {
	uint32_t rank;
};

/* What a writer has written. */
struct group_written {
	struct base_error failure; /* or why it has not */
	char name[FORMAT_PART_NAME_BYTES];
	uint64_t bytes;
	uint32_t crc32;
	uint32_t count;
	struct group_written_part {
		uint32_t rank;
		uint32_t crc32;
		uint64_t offset, bytes;
	} * parts; /* to be freed */
};

struct group_verdict {
	struct base_error failure;
	uint64_t generation_bytes;
	char unprotected[BASE_ERROR_TEXT_BYTES]; /* why nodes do not protect each other; "" */
};

/* What the first rank of a node answers rank 0. */
struct group_answer {
	struct base_error failure;
	char remark[BASE_ERROR_TEXT_BYTES];
};

/* What nodes put in place on their tiers. */
struct group_commit {
	struct base_buffer manifest; /* its text */
	struct base_buffer plan;     /* struct group_tier_ops */
};

/* A generation, on the group's tier or in its directory. */
struct group_found {
	struct base_error failure; /* why it cannot be had */
	uint64_t step;             /* IOSHAPE_LATEST: there are no more */
	bool near;
};

/* Tells the other ranks. Tries until the deadline. */
int group_tell(struct group_round *round, const struct group_message *message, const void *payload,
	       struct base_error *error);
/*
 * Waits for what a rank tells. A rank that is gone, or sent no heartbeat until the deadline, is
 * -ETIMEDOUT with a sentence that names it. `told` (may be NULL) is called now and then. Lists in
 * the payload need memory: their counts say for how many, and then how many there are.
 */
int group_hear(struct group_round *round, const struct group_message *message, uint32_t rank,
	       void *payload, void (*told)(void *user), void *user, struct base_error *error);
/* One look: -EAGAIN (no sentence) if the message is not there yet; otherwise as above. */
int group_look(struct group_round *round, const struct group_message *message, uint32_t rank,
	       struct group_watched *watched, void *payload, struct base_error *error);
/* Appends the message; a failure is remembered in the note. */
void group_write_message(const struct group_message *message, struct group_note *note,
			 const void *payload);
/* False: it is no such message, and the payload holds anything. */
bool group_read_message(const struct group_message *message, const struct base_buffer *note,
			void *payload);

/* ---- A generation that is being saved -------------------------------------------------------- */

/* One rank's part in one generation, while it is being saved. */
struct group_part {
	struct group_round round;
	struct ioshape_group *group;
	const struct save_task *task;
	uint64_t step;
	struct group_plan plan;
	struct group_sum sample;   /* of our part */
	struct save_digest digest; /* the same; zeros if it was not asked for */
	uint64_t hashed_bytes;     /* of our part: read for both */
	struct group_sum *sums;    /* rank 0: of each rank's */
	uint32_t plans;            /* posted or heard so far */
	struct ioshape_report *report;
	struct io_notes notes;                   /* for the report: of what was before the file */
	char unprotected[BASE_ERROR_TEXT_BYTES]; /* why nodes do not protect each other; "" */
	/* Of a stream that we wait for: whose, how far it was, and since when. */
	uint32_t awaited;
	uint64_t awaited_bytes, awaited_ns;
};

static inline bool group_is_kept(const struct group_plan *plan, uint32_t rank)
{
	return plan->ranks[rank].kept == rank;
}

/* ---- What the ranks agree on (agree.c) ------------------------------------------------------- */

/* Whether each node saves on a tier of its own. */
static inline bool group_is_spread(const struct group_part *part)
{
	return part->plan.near && part->group->node_count > 1 && !part->plan.together;
}
static inline const char *group_place_of(const struct group_part *part)
{
	return part->plan.near ? part->group->near : part->group->directory;
}
/* Rank 0: hears what all want, asks what it has to know, and begins the attempt. */
int group_make_plan(struct group_part *part, struct group_attempt *attempt,
		    struct base_error *error);
/* Rank 0: tells the others what is decided, or asks them first. `failure`: why there is no plan. */
int group_tell_plan(struct group_part *part, enum group_question question,
		    const struct base_error *failure, struct base_error *error);
/* The others: answers what rank 0 asks until there is a plan. `attempt` is on this node's tier. */
int group_await_plan(struct group_part *part, struct group_attempt *attempt,
		     struct base_error *error);

/* ---- The bytes of parts (parts.c) ------------------------------------------------------------ */

/* Counts the files that the generation has in this mode. */
uint32_t group_count_files(const struct group_part *part, enum ioshape_mode mode);
/* For the writers: writes the file, with the parts of all ranks whose writer this one is. */
int group_write_parts(struct group_part *part, struct group_written *written,
		      struct base_error *error);
/* For the others: sends our part to its writer. */
int group_send_part(struct group_part *part, struct base_error *error);

/* ---- What nodes answer rank 0 (messages.c) --------------------------------------------------- */

struct group_answers {
	struct base_error failure; /* the first one, with its rank */
	uint32_t count, same;      /* of these, so many failed with -EEXIST */
	/* The first remark, in the caller's BASE_ERROR_TEXT_BYTES; NULL: nobody wants it. */
	char *remark;
};

/* Rank 0: hears the first rank of each other node. */
int group_collect_answers(struct group_round *round, const struct group_message *message,
			  const char *missing, struct group_answers *answers,
			  struct base_error *error);

#endif
