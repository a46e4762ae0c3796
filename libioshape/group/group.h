/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Inside the group floor. What all ranks do together is a round: opening, a save, asking for
 * the newest generation. Rounds are numbered alike on all ranks and happen one after the other. In
 * each, every rank leaves its notes on the board, and rank 0 decides.
 */
#ifndef GROUP_GROUP_H
#define GROUP_GROUP_H

#include "gather/gather.h"
#include "group/generation/generation.h"

/* ---- Notes (notes.c; pure) ------------------------------------------------------------------- */

/* Of all that ranks tell and send each other. */
#define GROUP_NOTES_FORMAT BASE_FORMAT(5u)

/* Appended to a buffer; a failure is remembered in `failed`. */
struct group_note {
	struct base_buffer bytes;
	bool failed;
};

void group_note_number(struct group_note *note, uint64_t number);
void group_note_text(struct group_note *note, const char *text);
void group_note_bytes(struct group_note *note, const void *data, size_t bytes);
void group_note_error(struct group_note *note, const struct base_error *error);

/* Reading: what does not fit sets `bad`, and gives zeros from then on. */
struct group_note_reader {
	const uint8_t *at;
	size_t left;
	bool bad;
};

struct group_note_reader group_read_note(const struct base_buffer *note);
uint64_t group_read_number(struct group_note_reader *reader);
/* Cuts off what does not fit. */
void group_read_text(struct group_note_reader *reader, char *into, size_t into_bytes);
/* Where they lie in the note; none if they are not there. */
const uint8_t *group_read_bytes(struct group_note_reader *reader, size_t *bytes);
/* Another rank's failure as that of `error`; returns its code. 0 if it did not fail, or is bad. */
int group_read_error(struct group_note_reader *reader, struct base_error *error);

/* ---- Tiers ----------------------------------------------------------------------------------- */

/* What a group asks of a tier, which is above it: struct ioshape_tier begins with this. Paths are
 * those of generations in the group's directory. */
struct group_tier {
	const struct group_tier_ops *ops;
};

struct group_tier_ops {
	/* Where it lies, or would; nothing is made. To be freed. */
	int (*find)(struct group_tier *tier, const char *path, char **place,
		    struct base_error *error);
	/* ioshape_tier_place() and ioshape_tier_keep(). */
	int (*make_room)(struct group_tier *tier, const char *path, uint64_t bytes,
			 struct base_error *error);
	int (*keep)(struct group_tier *tier, const char *path, uint32_t keep_last,
		    uint64_t keep_every, struct base_error *error);
	/* The same for what lies there, if it has not been kept; 0 also if nothing does. */
	int (*keep_once)(struct group_tier *tier, const char *path, uint32_t keep_last,
			 uint64_t keep_every, struct base_error *error);
};

static inline struct group_tier *group_tier_of(const struct ioshape_group_options *options)
{
	return (struct group_tier *)(void *)options->tier;
}

/* ---- Groups (group.c, meeting.c) ------------------------------------------------------------- */

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
	char *node, *rack;
	char board_name[17];
	struct gather_board *board; /* NULL: there is only this rank */
	struct slots_config coordinator;
	uint64_t deadline_ns;
	uint64_t nonce;
	uint64_t id; /* the same for all ranks, and no other group's */
	/* The scope of heartbeats: the same whichever round a rank is in. */
	char life[GATHER_NAME_BYTES];
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

/* Everybody finds everybody (meeting.c). The board is open. */
int group_meet(struct ioshape_group *group, struct base_error *error);
/* Who is where, as rank 0 says it. True if it knows us in this life. */
bool group_take_roster(struct ioshape_group *group, const struct base_buffer *note);

/* ---- Ranks (ranks.c; pure) ------------------------------------------------------------------- */

/* Numbers the nodes by their keys. -ENOMEM. */
int group_find_nodes(struct ioshape_group *group);
/* From the ranks' nodes, which another process has numbered. False if it cannot be so. */
bool group_find_leaders(struct ioshape_group *group, uint64_t node_count);

/* The rank that writes the part of this one. */
uint32_t group_writer_of(const struct ioshape_group *group, enum ioshape_mode mode, uint32_t rank);

/* Whether it is the first of its node. */
static inline bool group_leads_node(const struct ioshape_group *group, uint32_t rank)
{
	return group->leaders[group->ranks[rank].node] == rank;
}

/* Whether it is on our node. */
bool group_is_local(const struct ioshape_group *group, uint32_t rank);

/* Whether it is set for all ranks. */
bool group_has_all(const struct ioshape_group *group, const bool *have);

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

/* ---- Rounds (round.c) ------------------------------------------------------------------------ */

struct group_round {
	struct ioshape_group *group;
	uint64_t number;
	char scope[GATHER_NAME_BYTES]; /* on the board */
	const atomic_bool *abort;      /* NULL: it cannot be stopped */
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

/* "<what>-<our rank>". Tries until the deadline. */
int group_round_post(struct group_round *round, const char *what, struct group_note *note,
		     struct base_error *error);
/* Until something may have changed; not for long. */
void group_round_rest(struct group_round *round);
/* Sends a heartbeat now and then: to be called from whatever takes long. */
void group_round_beat(struct group_round *round);

/*
 * Waits for "<what>-<rank>". A rank that is gone, or sent no heartbeat until the deadline, is
 * -ETIMEDOUT with a sentence that names it. `told` (may be NULL) is called now and then.
 */
int group_round_await(struct group_round *round, const char *what, uint32_t rank,
		      struct base_buffer *note, void (*told)(void *user), void *user,
		      struct base_error *error);

/* What is known of a rank that is waited for. Zero it. */
struct group_watched {
	uint64_t heard_ns; /* when its last heartbeat, or the beginning, was */
	uint64_t done_bytes;
	bool ahead; /* it is in a later round than we */
};

/* One look: -EAGAIN (no sentence) if the note is not there yet; otherwise as above. */
int group_round_look(struct group_round *round, const char *what, uint32_t rank,
		     struct group_watched *watched, struct base_buffer *note,
		     struct base_error *error);

/*
 * The same for all ranks for which have[rank] is not set; found() sets it. found() may end it with
 * a code. Ranks that were lost are named together.
 */
struct group_collection {
	const char *what;
	const char *missing; /* for the sentence: "did not come to save" */
	bool *have;
	int (*found)(void *user, uint32_t rank, const struct base_buffer *note);
	void *user;
	/* Ranks send heartbeats meanwhile, and hear how far all are; otherwise the deadline is for
	 * all. */
	bool beats;
};
int group_round_collect(struct group_round *round, const struct group_collection *collection,
			struct base_error *error);

#endif
