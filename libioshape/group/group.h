/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The group layer: everything that the ranks of a job do together. What one rank saves of a
 * checkpoint is its shard.
 *
 * The ranks proceed in rounds: opening the group, a save, a search for the newest checkpoint. All
 * ranks number the rounds alike and finish one before they begin the next. In each round every rank
 * puts its messages into the store and rank 0 decides.
 *
 * A checkpoint on disk is a directory of files. It is written under a temporary name, as an
 * attempt. The commit adds the manifest and renames the directory to its final name. Other
 * processes may save into the same directory or prune it at the same time. So a writer holds a lock
 * on its attempt, and a reader holds a lock on the manifest. The kernel drops both locks when the
 * process dies. If a filesystem has no locks, age decides, as the functions below describe.
 */
#ifndef GROUP_GROUP_H
#define GROUP_GROUP_H

#include "group/store.h"
#include "group/stream.h"
#include "save/save.h"

#include <ioshape/group.h>

#include <stdio.h>
#include <string.h>

/* ---- Names in a directory of checkpoints (checkpoints.c) ------------------------------------- */

/* "step-0000001000" */
#define GROUP_STEP_NAME_BYTES 32
/* ".step-0000001000.<job>-<domain>-<random>", ".drained-step-0000001000.<job>-<domain>-<random>",
 * ".replaced-step-0000001000.<random>", ".pruned-step-0000001000.<random>" */
#define GROUP_ATTEMPT_NAME_BYTES 96
/* "<job>-<lock domain>-<random>": 8, 8 and 16 hexadecimal digits */
#define GROUP_ATTEMPT_ID_BYTES 35

enum group_name_kind {
	GROUP_NAME_OTHER,
	GROUP_NAME_STEP,
	GROUP_NAME_ATTEMPT,
	GROUP_NAME_REPLACED, /* moved aside for another checkpoint of its step: see checkpoints.c */
	GROUP_NAME_PRUNED,   /* moved aside to be removed: see checkpoints.c */
	GROUP_NAME_DRAINED,  /* target into which nodes drain their files: see tier/drain.c */
};

struct group_name {
	enum group_name_kind kind;
	uint64_t step;
	char id[GROUP_ATTEMPT_ID_BYTES]; /* id of an attempt or of a drain target; else empty */
};

void group_step_name(char into[GROUP_STEP_NAME_BYTES], uint64_t step);
struct group_name group_parse_name(const char *name);

/* Writes the name of the directory into which each node drains its files of attempt `id`. */
void group_drained_name(char into[GROUP_ATTEMPT_NAME_BYTES], uint64_t step, const char *id);

/* Size of a job's hash: 8 hexadecimal digits, which begin the ids of its attempts, and a final
 * 0. */
#define GROUP_JOB_BYTES 9

/* ---- Attempts (checkpoints.c) ---------------------------------------------------------------- */

struct group_attempt {
	struct io_folder directory; /* directory of the checkpoints */
	struct io_folder folder; /* directory of this attempt; locked if the filesystem has locks */
	char name[GROUP_ATTEMPT_NAME_BYTES];
	char id[GROUP_ATTEMPT_ID_BYTES]; /* id stored in the manifest, as format_manifest.attempt */
	uint64_t step;
	/* Lower bound of the attempt's serial number. It is the highest serial found when the
	 * attempt began, in this directory or in the one that belongs with it (tier and
	 * destination). After the commit it is the attempt's own serial. */
	uint64_t last_serial;
	/* Files of the manifest that are in this directory, by index; NULL: all of them. */
	const bool *files_here;
	struct io_entry seen; /* state of `directory` when the attempt got its name */
	bool committed;
	struct base_log log;
};

/* Initial value, on which group_attempt_abandon() is safe. */
#define GROUP_NO_ATTEMPT                                                                           \
	{                                                                                          \
		.directory = IO_NO_FOLDER, .folder = IO_NO_FOLDER                                  \
	}

/*
 * Begins the attempt at a checkpoint. `name` is NULL, or the name of rank 0's attempt: then this is
 * the attempt of another node, on that node's tier, for that node's own files. Creates `directory`
 * if it is missing, and removes what dead jobs left in it (group_tidy()). Then creates a new
 * directory in it for the files of `step`.
 *
 * Only rank 0 holds the attempt; other writers need only its path. Other processes regard the
 * attempt as alive while this process holds its lock. `job` is the job's hash.
 */
int group_attempt_begin(struct group_attempt *attempt, const char *directory, uint64_t step,
			const char *name, const char *job, const struct base_log *log,
			struct base_error *error);

/* Returns the serial number that the attempt would get now. It is higher than the serials of all
 * checkpoints that are there, even if their jobs began later or had other clocks. */
uint64_t group_next_serial(const struct group_attempt *attempt);

/* Returns the attempt's path, valid until the attempt is committed or abandoned. */
static inline const char *group_attempt_path(const struct group_attempt *attempt)
{
	return attempt->folder.path;
}

/*
 * Writes the manifest and makes the attempt the checkpoint of its step, durably. After a crash at
 * any time either the old checkpoint or the new one is there. A manifest without a serial number
 * gets the next one.
 *
 * Returns -EEXIST if `no_replace` is set and a complete checkpoint is there, and IOSHAPE_E_DAMAGED
 * if a file of the manifest is missing. After a failure the directory is as it was before, and the
 * attempt can only be abandoned.
 */
int group_attempt_commit(struct group_attempt *attempt, const struct format_manifest *manifest,
			 bool no_replace, struct base_error *error);

/* Frees an attempt and removes its directory, unless the attempt was committed. */
void group_attempt_abandon(struct group_attempt *attempt);

/* ---- Checkpoints in a directory (checkpoints.c) ---------------------------------------------- */

/* A valid checkpoint: its manifest is valid, and its files exist with the sizes listed there. If
 * the directory has a parity file, it is on the tier of one of several nodes and needs only that
 * node's files. */
struct group_checkpoint {
	struct io_folder folder;
	struct format_manifest manifest;
	/* Lock on the manifest, which keeps other processes from removing the checkpoint. */
	struct io_hold held;
};

#define GROUP_NO_CHECKPOINT                                                                        \
	{                                                                                          \
		.folder = IO_NO_FOLDER, .held = IO_NO_HOLD                                         \
	}

/* Opens a checkpoint and validates it. Returns -ENOENT, without an error message, if there is no
 * such directory or no manifest in it. Returns IOSHAPE_E_DAMAGED or another code if the checkpoint
 * is not valid. On failure `checkpoint` is closed. */
int group_checkpoint_open(struct group_checkpoint *checkpoint, const struct io_folder *directory,
			  const char *name, uint64_t step, struct base_error *error);
void group_checkpoint_close(struct group_checkpoint *checkpoint);
/* Checks that the files exist with the sizes of the manifest. `remedy` is the advice that ends the
 * error message. */
int group_check_files(const struct io_folder *folder, const struct format_manifest *manifest,
		      const char *remedy, struct base_error *error);
uint64_t group_checkpoint_bytes(const struct group_checkpoint *checkpoint);

/* "node-00003.parity": file on a node's tier with the parity that protects the node's files. It
 * also tells a checkpoint of several nodes from an incomplete one. */
#define GROUP_PARITY_NAME_BYTES 32
void group_parity_name(char into[GROUP_PARITY_NAME_BYTES], uint32_t node);
/* Returns whether `name` is the name of a parity file; *node receives its node. */
bool group_parse_parity_name(const char *name, uint32_t *node);
/* Returns whether the directory has a parity file: its checkpoint has the files of some nodes
 * only. */
bool group_is_of_nodes(const struct io_folder *folder);

/* A directory that may be a checkpoint. This includes one that was moved aside, which readers use
 * while no other directory has its name. */
#define GROUP_UNKNOWN_SERIAL UINT64_MAX
struct group_candidate {
	uint64_t step;
	/* Serial number in its manifest; 0: not read yet, GROUP_UNKNOWN_SERIAL: not readable. */
	uint64_t serial;
	bool aside;
	char name[GROUP_ATTEMPT_NAME_BYTES];
};

struct group_candidates {
	struct group_candidate *all;
	size_t count;
};

/* Lists the candidates, newest first. Reads only the beginning of each manifest. */
int group_list_by_age(const struct io_folder *directory, struct group_candidates *candidates,
		      struct base_error *error);
void group_candidates_free(struct group_candidates *candidates);

/* Opens the directory at `path`, with an absolute path that stays valid if the process changes its
 * working directory. */
int group_open_directory(struct io_folder *directory, const char *path, struct base_error *error);

/* Returns whether `code` means that this process is out of memory or file descriptors. Such a
 * failure says nothing about the file that the process tried to read. */
bool group_is_shortage(int code);

/* Returns the highest serial number in a directory. If the directory cannot be listed, logs a
 * warning and returns the highest one seen: a search for the newest checkpoint cannot list it
 * either. */
uint64_t group_last_serial(const struct io_folder *directory, const struct base_log *log);

/* Opens the checkpoint of a step. Returns -ENOENT, with an error message, if there is none. */
int group_open_step(struct group_checkpoint *checkpoint, const struct io_folder *directory,
		    uint64_t step, struct base_error *error);

/* ---- Removing old attempts and checkpoints (checkpoints.c) ----------------------------------- */

/*
 * Removes attempts of this user whose processes are dead. Best effort: failures are logged.
 *
 * An attempt that is locked is alive. One that is not locked is dead if it was begun in this lock
 * domain or by this job. Any other is dead if nothing in it was touched for a day, because locks
 * may not reach the host that writes it. On a filesystem without locks, attempts of this job are
 * dead, because it makes one after the other; attempts of other jobs are dead after a day.
 *
 * Directories that were moved aside get their names back, or are removed if the name is taken.
 * Temporary files and directories are removed as by io_remove_stale().
 * `job` is the job's hash, as in an attempt's id, or NULL. *last_serial is raised to the serial
 * number of the newest checkpoint found; last_serial may be NULL. The next call removes what this
 * one did not reach within the budget.
 */
void group_tidy(const struct io_folder *directory, const char *job, uint64_t *last_serial,
		struct base_budget *budget, const struct base_log *log);

/* Prunes a directory as ioshape_checkpoint_prune() does. The caller has entered the context
 * already. `job` is as for group_tidy(). */
int group_prune(struct ioshape_context *context, const char *directory, const char *job,
		const struct ioshape_prune_options *options, uint64_t *removed,
		struct base_error *error);

/* ---- The public handle of a checkpoint (handle.c) -------------------------------------------- */

struct ioshape_checkpoint {
	struct ioshape_context *context;
	struct io_folder directory;
	struct group_checkpoint found;
	char name[GROUP_ATTEMPT_NAME_BYTES]; /* name of its directory when it was opened */
	pthread_mutex_t lock; /* protects the texts below, which are made on demand */
	char **paths;         /* paths of the files, by file */
	char **shard_names; /* names of the shards, by rank, if they are members of a shard file */
};

/* ---- Writing messages (messages.c) ----------------------------------------------------------- */

/* Version of all messages and streams between ranks. */
#define GROUP_MESSAGES_FORMAT BASE_FORMAT(7u)

/* A message that is being written. `failed` remembers that an append failed. */
struct group_body {
	struct base_buffer bytes;
	bool failed;
};

/* ---- What a group asks of a tier ------------------------------------------------------------- */

/*
 * What a group asks of the tier on which it saves first. libioshape-tier implements these
 * functions: its struct ioshape_tier begins with struct group_tier. Paths are those of checkpoints
 * in the group's directory.
 */
struct group_tier {
	const struct group_tier_ops *ops;
};

struct group_round;
/* What the tiers of all nodes hold together; only rank 0 has it. */
struct group_spreads;

struct group_tier_ops {
	/* Finds the path on the tier for `path`; creates nothing. The caller frees *copy_path. */
	int (*find)(struct group_tier *tier, const char *path, char **copy_path,
		    struct base_error *error);
	/* Reserves space as ioshape_tier_path() does: for `bytes` bytes, and for what this node
	 * keeps for the other nodes of `nodes`. */
	int (*reserve_space)(struct group_tier *tier, const char *path, uint64_t bytes,
			     uint32_t nodes, struct base_error *error);
	/* Keeps the copy for the drain, as ioshape_tier_keep() does. */
	int (*keep)(struct group_tier *tier, const char *path, uint32_t keep_last,
		    uint64_t keep_every, struct base_error *error);

	/* Called on rank 0 for a checkpoint that each node has saved on its own tier. Appends the
	 * plan that all nodes need for protect(). */
	int (*plan)(const struct ioshape_group *group, const struct format_manifest *manifest,
		    struct base_buffer *plan, struct base_error *error);
	/*
	 * Called on the first rank of each node at the same time. Writes into `folder`, which has
	 * this node's files, the parity file that marks them as one node's, and the parity that
	 * protects other nodes. The checkpoint is valid without the latter; then `unprotected`
	 * receives the reason.
	 */
	int (*protect)(struct group_round *round, const struct format_manifest *manifest,
		       const struct base_buffer *plan, const struct io_folder *folder,
		       char unprotected[BASE_ERROR_TEXT_BYTES], struct base_error *error);

	/* Called on all ranks of several nodes. On rank 0, `found` receives the checkpoints that
	 * the tiers have together, newest first, and *spreads receives what holds them. The caller
	 * frees *spreads with free(); it is NULL on other ranks. */
	int (*look)(struct group_round *round, struct group_spreads **spreads,
		    struct group_candidates *found, struct base_error *error);
	/* Called on rank 0: checks that all of a checkpoint is on the tiers or can be restored.
	 * Returns IOSHAPE_E_DAMAGED if not. */
	int (*check)(const struct group_spreads *spreads, size_t at, struct base_error *error);
	/* Called on all ranks: gives each node the files of the checkpoint that its ranks want.
	 * Rank 0 names the checkpoint by `spreads` and `at`. On rank 0 `failure` receives what a
	 * node could not do. */
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
	uint64_t nonce; /* random number of this process, drawn when it opened the group */
	/* Time of its last heartbeat, which rises, by the rank's own clock; and by this process's
	 * clock. Used only within rounds. */
	uint64_t beat, heard_ns;
	uint32_t node;
	char node_key[GROUP_WHERE_BYTES]; /* ranks with equal keys can share memory */
	char where[GROUP_WHERE_BYTES];    /* location for error messages: "n03, process 4711" */
	/* Failure domain, whose ranks fail together; only rank 0 knows it. */
	char domain[GROUP_WHERE_BYTES];
	bool has_tier; /* the rank has a tier; only rank 0 knows it */
};

struct ioshape_group {
	pid_t owner;
	struct ioshape_context *context;
	struct ioshape_group_options options; /* options; their strings are the copies below */
	char *directory; /* absolute path of the directory of the checkpoints */
	char *near;      /* path of that directory on the tier; NULL if a rank has no tier */
	bool has_tiers;  /* all ranks have a tier */
	char *token;
	char job[GROUP_JOB_BYTES]; /* hash of the token, which begins the ids of attempts */
	char *node;
	char store_name[17];  /* name of the store in which the ranks meet */
	char memory_name[17]; /* name of the store in memory: the group's id */
	struct store *store;  /* store for messages; NULL if this is the only rank */
	/* Ranks that share memory meet in a store in the directory and then move to a store in
	 * memory: `memory` is the new store before the move, `met` the old store after it. Rank 0
	 * needs `met` until all ranks have moved. */
	struct store *memory, *met;
	bool may_move;
	struct slots_config coordinator;
	uint64_t deadline_ns;
	uint64_t nonce;
	uint64_t id; /* id of the group, equal on all its ranks */
	/* Scope of heartbeats in the store, which does not depend on the round. */
	char life[STORE_NAME_BYTES];
	struct group_rank *ranks;
	uint32_t *leaders; /* lowest rank of each node, by node; nodes are numbered in this order */
	uint32_t node_count;

	/* Held while a save is staged, so that saves are staged in the order of their rounds. */
	pthread_mutex_t beginning;
	pthread_mutex_t lock; /* protects the members below */
	pthread_cond_t change;
	unsigned running; /* saves that have not ended */
	/* What is known about the storage below the directory. Used only within rounds. */
	struct fs_memory storage;
	bool comm_failed; /* bytes cannot be sent between nodes any more; used only within rounds */
	/* Highest serial number in the directory and on the tier, once both were read. Used only
	 * within rounds. */
	uint64_t last_serial;
	bool serials_known;
	/* Oldest round whose messages were not dropped yet. Used only within rounds. */
	uint64_t kept_round;
	uint64_t next_round; /* number that the next round will get */
	uint64_t round;      /* number of the round that may run now */
};

/* Returns whether nodes look at each other's tiers. */
static inline bool group_has_tiers(const struct ioshape_group *group)
{
	return group->near && group->node_count > 1;
}

/* Returns the rank that writes the shard of `rank`. */
static inline uint32_t group_writer_of(const struct ioshape_group *group, enum ioshape_mode mode,
				       uint32_t rank)
{
	if (mode == IOSHAPE_MODE_RANK0)
		return 0;
	return mode == IOSHAPE_MODE_NODE ? group->leaders[group->ranks[rank].node] : rank;
}

/* Returns whether `rank` is the first rank of its node. */
static inline bool group_leads_node(const struct ioshape_group *group, uint32_t rank)
{
	return group->leaders[group->ranks[rank].node] == rank;
}

/* Returns whether `rank` is on this process's node. */
static inline bool group_is_local(const struct ioshape_group *group, uint32_t rank)
{
	return group->ranks[rank].node == group->ranks[group->options.rank].node;
}

/* Returns whether have[rank] is set for all ranks. */
static inline bool group_has_all(const struct ioshape_group *group, const bool *have)
{
	return !memchr(have, false, group->options.ranks * sizeof(*have));
}

/* Writes "rank 3 (n03, process 4711)" for error messages and returns `into`. The text of
 * GROUP_SHOWN_RANK() is valid until the end of the enclosing block. */
#define GROUP_RANK_BYTES 96
const char *group_show_rank(const struct ioshape_group *group, uint32_t rank,
			    char into[GROUP_RANK_BYTES]);
#define GROUP_SHOWN_RANK(group, rank) group_show_rank(group, rank, (char[GROUP_RANK_BYTES]){ 0 })

/* A list of ranks for an error message, which names GROUP_MOST_NAMED of them at most. Initialise it
 * to zero. */
#define GROUP_MOST_NAMED 8u
struct group_names {
	char text[GROUP_MOST_NAMED * (GROUP_RANK_BYTES + 2) + 16];
	uint32_t count, first;
};
void group_name_rank(struct group_names *names, const struct ioshape_group *group, uint32_t rank);

/* Records the failure of `rank` in `error` and names the rank. Returns the code of `failure`. */
int group_fail_of_rank(const struct ioshape_group *group, uint32_t rank,
		       const struct base_error *failure, struct base_error *error);

/* ---- Rounds (messages.c) --------------------------------------------------------------------- */

struct group_round {
	struct ioshape_group *group;
	uint64_t number;
	char scope[STORE_NAME_BYTES]; /* scope of its messages in the store */
	/* Stops the round when it becomes true; NULL: the round cannot be stopped. */
	const atomic_bool *abort;
	struct ioshape_save *save; /* save that receives the progress; NULL for none */
	enum ioshape_phase phase;  /* phase reported last; it never goes back */
	uint64_t done_bytes;       /* progress of this rank */
	uint64_t last_beat_ns;
	/* This rank could not put its result into the store. It sends no more heartbeats, so that
	 * the others stop waiting for it. */
	bool silent;
};

/* Returns the next round number. Any thread may begin the round later; rounds begin in the order of
 * their numbers. */
uint64_t group_round_reserve(struct ioshape_group *group);
/* Waits until the rounds before it have ended, then begins the round. */
void group_round_begin(struct group_round *round, struct ioshape_group *group, uint64_t number,
		       const atomic_bool *abort);
void group_round_end(struct group_round *round);
/* Drops this rank's messages of earlier rounds. Rank 0, which drops those of all ranks, may call it
 * only when all ranks have come to this round. */
void group_round_forget(const struct group_round *round);

/* Sleeps until something may have changed, but not for long. */
void group_round_rest(struct group_round *round);
/* Sends a heartbeat if one is due. Call it regularly in everything that takes long. */
void group_round_beat(struct group_round *round);
/* Reports progress to the caller of the save, and sends a heartbeat if one is due. An
 * ioshape_progress_fn for everything that takes long in a round. */
int group_round_track(void *round, enum ioshape_phase phase, uint64_t done_bytes,
		      uint64_t total_bytes);
/* Reports progress as group_round_track() does, and returns -ECANCELED if the round must stop. */
int group_round_go_on(struct group_round *round, enum ioshape_phase phase, uint64_t done_bytes,
		      uint64_t total_bytes, struct base_error *error);

/* What is known about a rank that is waited for. Initialise it to zero. */
struct group_watched {
	uint64_t heard_ns; /* time of its last heartbeat, or of the beginning of the wait */
	bool ahead;        /* it is in a later round than this process */
};

/*
 * How rank 0 collects one message from each of many ranks. If a rank reports a failure, the
 * collection fails with it and names the rank. Ranks that were lost are named together.
 */
struct group_collection {
	const char *what;
	/* What a lost rank failed to do, for the error message: "did not come to save". */
	const char *missing;
	bool leaders; /* collect only from the first rank of each node */
	/* Returns whether a message of `rank` is expected; NULL: from all ranks. */
	bool (*awaits)(const void *user, uint32_t rank);
	/* Called once for each message. May fail, with the reason why the message cannot be
	 * used. */
	int (*found)(void *user, uint32_t rank, const struct base_buffer *body,
		     struct base_error *failure);
	void *user;
	/* Ranks send heartbeats meanwhile. Otherwise one deadline counts for the whole
	 * collection. */
	bool beats;
};
int group_round_collect(struct group_round *round, const struct group_collection *collection,
			struct base_error *error);

/* ---- Messages (messages.c) ------------------------------------------------------------------- */

/*
 * One table has all messages that ranks send each other, with their senders and receivers. A
 * message's payload is one of the structs below, or nothing.
 */
struct group_payload;

struct group_message {
	const char *name; /* name in the store: "<name>-<rank>" */
	/* Writes the payload of a message or reads one. */
	void (*pass)(struct group_payload *payload, void *message);
};

/* State of writing or reading a payload. To pass a member means to write it or to read it, so a
 * message's pass() lists its members once, in order. Reading sets `bad` and yields 0 for a member
 * that does not fit. */
struct group_payload {
	struct group_body *body; /* destination when writing; NULL when reading */
	/* Bytes that are still to be read. */
	const uint8_t *at;
	size_t left;
	bool bad;
};

void group_pass_number(struct group_payload *payload, uint64_t *number);
/* Passes a number that is `most` at most; a larger one is bad. */
void group_pass_small(struct group_payload *payload, uint32_t *number, uint32_t most);
void group_pass_half(struct group_payload *payload, uint32_t *number);
void group_pass_text(struct group_payload *payload, char *text, size_t bytes);
void group_pass_failure(struct group_payload *payload, struct base_error *failure);
/* Passes bytes; reading appends them to the buffer. */
void group_pass_bytes(struct group_payload *payload, struct base_buffer *bytes);
/* Passes numbers that are `most` at most. Reading allocates the list, which the caller frees. */
void group_pass_list(struct group_payload *payload, uint32_t **list, uint32_t count, uint32_t most);

/* Rank 0 sends two questions at most before the plan. */
#define GROUP_MOST_PLANS 3u

extern const struct group_message group_hello, group_roster, group_no_roster, group_beat,
	group_want, group_plans[GROUP_MOST_PLANS], group_digest, group_call, group_here, group_done,
	group_space, group_commit, group_kept, group_verdict, group_next, group_restored,
	group_whole, group_checked, group_intact, group_bye;

struct group_hello {
	struct group_rank own;
	uint64_t ranks;  /* ranks of the group, as this rank knows it */
	uint64_t roster; /* id of the roster that this rank has read; 0: none */
};

struct group_roster {
	uint64_t id; /* id of the group */
	bool complete;
	enum ioshape_mode mode; /* mode of rank 0's options */
	bool has_tiers;
	uint32_t nodes;
	uint32_t count;
	struct group_rank *ranks;
};

struct group_beat {
	uint64_t now_ns; /* rises with each heartbeat */
	uint64_t round;
};

/* A sample or a digest of a rank's shard. */
struct group_sum {
	bool known;
	struct group_sum_key { /* compared as bytes, so it must have no padding */
		uint64_t bytes;
		uint64_t node; /* node of the rank if each node keeps a copy; else 0 */
		uint8_t mac[BASE_MAC_BYTES];
	} key;
};

struct group_want {
	struct base_error failure; /* why this rank will save nothing */
	uint64_t step;
	uint64_t bytes;
	struct group_sum sample;
};

/* Rank 0's decision, or a question that it asks before. */
struct group_plan {
	struct base_error failure; /* why there is no plan */
	enum group_question {
		GROUP_NO_QUESTION,
		GROUP_ASKS_DIGESTS, /* digests of the asked ranks' shards, by `key` */
		GROUP_ASKS_SPACE,   /* space on each node's tier; the rest of the plan is final */
	} asks;
	uint8_t key[BASE_MAC_BYTES];
	enum ioshape_mode mode;
	char why[160];
	bool near;                            /* save on the tiers, not in the group's directory */
	bool together;                        /* all nodes see one tier */
	char not_near[BASE_ERROR_TEXT_BYTES]; /* why not on the tiers, if there are any; else "" */
	char attempt[GROUP_ATTEMPT_NAME_BYTES]; /* name of the attempt */
	uint64_t alignment;                     /* alignment of shards in shard files, in bytes */
	uint64_t total_bytes;    /* approximate bytes of all shards that are stored */
	uint64_t repeated_bytes; /* approximate bytes of the shards that are not stored */
	uint32_t count;
	struct group_planned {
		uint64_t bytes; /* bytes of the shard; 0 if it is not stored */
		uint32_t same;  /* lowest rank with an equal shard */
		uint32_t kept;  /* rank whose copy is stored for this rank */
		bool asked;     /* rank 0 asks for its digest */
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
	struct base_error failure; /* why it has not written the file */
	char name[FORMAT_SHARD_NAME_BYTES];
	uint64_t bytes;
	uint32_t crc32;
	uint32_t count;
	struct group_written_shard {
		uint32_t rank;
		uint32_t crc32;
		uint64_t offset, bytes;
	} * shards; /* owned by the receiver of the struct, who frees it */
};

struct group_verdict {
	struct base_error failure;
	uint64_t checkpoint_bytes;
	/* Why nodes do not protect each other's files; else "". */
	char unprotected[BASE_ERROR_TEXT_BYTES];
};

/* What the first rank of a node answers rank 0. */
struct group_answer {
	struct base_error failure;
	char remark[BASE_ERROR_TEXT_BYTES];
};

/* What each node needs to commit its files on its tier. */
struct group_commit {
	struct base_buffer manifest; /* text of the manifest */
	struct base_buffer plan;     /* plan for protect() of struct group_tier_ops */
};

/* A checkpoint that the search found, on the group's tier or in its directory. */
struct group_found {
	struct base_error failure; /* why it cannot be used */
	uint64_t step;             /* IOSHAPE_LATEST: there are no more */
	bool near;
};

/* Puts a message into the store for the other ranks. Retries until the deadline while the store is
 * out of reach. */
int group_tell(struct group_round *round, const struct group_message *message, const void *payload,
	       struct base_error *error);
/*
 * Waits for a message of `rank`. Returns -ETIMEDOUT, with an error message that names the rank, if
 * the rank has ended or sent no heartbeat within the deadline. Lists in the payload are read into
 * the caller's memory: their counts must say how many elements it holds, and receive how many were
 * read.
 */
int group_hear(struct group_round *round, const struct group_message *message, uint32_t rank,
	       void *payload, struct base_error *error);
/* Looks for a message of `rank` once. Returns -EAGAIN, without an error message, if the message is
 * not there yet; otherwise as group_hear(). */
int group_look(struct group_round *round, const struct group_message *message, uint32_t rank,
	       struct group_watched *watched, void *payload, struct base_error *error);
/* Appends a message; `body` remembers a failure. */
void group_write_message(const struct group_message *message, struct group_body *body,
			 const void *payload);
/* Reads a message. Returns false if the bytes are not such a message; then the payload is
 * undefined. */
bool group_read_message(const struct group_message *message, const struct base_buffer *body,
			void *payload);

/* ---- A checkpoint that is being saved -------------------------------------------------------- */

/* The state of one rank while it saves its shard of one checkpoint. */
struct group_shard {
	struct group_round round;
	struct ioshape_group *group;
	const struct save_task *task;
	uint64_t step;
	struct group_plan plan;
	struct group_sum sample; /* sample of this rank's shard */
	/* Digest of this rank's shard; zero if rank 0 did not ask for it. */
	struct save_digest digest;
	uint64_t hashed_bytes; /* bytes of this rank's shard that were read for sample and digest */
	struct group_sum *sums; /* on rank 0: sample or digest of each rank */
	uint32_t plans;         /* plans and questions sent or received so far */
	struct ioshape_report *report;
	struct io_downgrades
		downgrades; /* downgrades recorded before the file was opened, for the report */
	/* Why nodes do not protect each other's files; else "". */
	char unprotected[BASE_ERROR_TEXT_BYTES];
	/* Stream that the writer waits for: its rank, the progress when it was last seen to change,
	 * and when that was. */
	uint32_t awaited;
	uint64_t awaited_bytes, awaited_ns;
};

static inline bool group_is_kept(const struct group_plan *plan, uint32_t rank)
{
	return plan->ranks[rank].kept == rank;
}

/* ---- Agreeing on a plan (agree.c) ------------------------------------------------------------ */

/* Returns whether each node saves on a tier of its own. */
static inline bool group_is_spread(const struct group_shard *shard)
{
	return shard->plan.near && shard->group->node_count > 1 && !shard->plan.together;
}
static inline const char *group_directory_of(const struct group_shard *shard)
{
	return shard->plan.near ? shard->group->near : shard->group->directory;
}
/* Collects what all ranks want, asks them for digests and space if needed, and begins the attempt.
 * Called on rank 0. */
int group_make_plan(struct group_shard *shard, struct group_attempt *attempt,
		    struct base_error *error);
/* Sends the plan or a question to the other ranks. Called on rank 0. `failure`, if set, says why
 * there is no plan. */
int group_tell_plan(struct group_shard *shard, enum group_question question,
		    const struct base_error *failure, struct base_error *error);
/* Answers the questions of rank 0 until it sends the plan. Called on the other ranks. `attempt` is
 * on this node's tier. */
int group_await_plan(struct group_shard *shard, struct group_attempt *attempt,
		     struct base_error *error);

/* ---- Writing and sending shards (shards.c) ----------------------------------------------------
 */

/* Returns how many files the checkpoint has in this mode. */
uint32_t group_count_files(const struct group_shard *shard, enum ioshape_mode mode);
/* Writes this rank's file, with the shards of all ranks that it writes for. Called on writers. */
int group_write_shards(struct group_shard *shard, struct group_written *written,
		       struct base_error *error);
/* Sends this rank's shard to its writer. Called on ranks that do not write. */
int group_send_shard(struct group_shard *shard, struct base_error *error);

/* ---- Answers of nodes to rank 0 (messages.c) ------------------------------------------------- */

struct group_answers {
	struct base_error failure; /* first failure, with its rank */
	uint32_t count, same;      /* number of answers; of these, how many failed with -EEXIST */
	/* First remark, in a buffer of the caller of BASE_ERROR_TEXT_BYTES; NULL: remarks are
	 * ignored. */
	char *remark;
};

/* Collects the answers of the first ranks of the other nodes. Called on rank 0. */
int group_collect_answers(struct group_round *round, const struct group_message *message,
			  const char *missing, struct group_answers *answers,
			  struct base_error *error);

#endif
