/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Inside the ckpt floor: groups. What all ranks do together is a round: opening, a save, asking for
 * the newest generation. Rounds are numbered alike on all ranks and happen one after the other. In
 * each, every rank leaves its notes on the board, and rank 0 decides.
 */
#ifndef CKPT_GROUP_H
#define CKPT_GROUP_H

#include "ckpt/background.h"
#include "gather/gather.h"

#include <limits.h>

#define CKPT_PATH_BYTES PATH_MAX

/* ---- Notes (group_notes.c; pure) ------------------------------------------------------------- */

/* Appended to a buffer; a failure is remembered in `failed`. */
struct ckpt_note {
	struct base_buffer bytes;
	bool failed;
};

void ckpt_note_number(struct ckpt_note *note, uint64_t number);
void ckpt_note_text(struct ckpt_note *note, const char *text);

/* Reading: what does not fit sets `bad`, and gives zeros from then on. */
struct ckpt_note_reader {
	const uint8_t *at;
	size_t left;
	bool bad;
};

struct ckpt_note_reader ckpt_read_note(const struct base_buffer *note);
uint64_t ckpt_read_number(struct ckpt_note_reader *reader);
/* Cuts off what does not fit. */
void ckpt_read_text(struct ckpt_note_reader *reader, char *into, size_t room);

/* ---- Groups (group.c, group_meeting.c) ------------------------------------------------------- */

#define CKPT_WHERE_BYTES 64

struct ckpt_group_rank {
	uint64_t nonce; /* of this life of the rank's process */
	uint32_t node;
	char node_key[CKPT_WHERE_BYTES]; /* equal: they can share memory */
	char where[CKPT_WHERE_BYTES];    /* for messages: "n03, process 4711" */
};

struct ioshape_group {
	pid_t owner;
	struct ioshape_context *context;
	struct ioshape_group_options options; /* strings are those below */
	char *directory;                      /* absolute */
	char *token;
	char *node;
	const struct gather_board_ops *ops; /* NULL: there is only this rank */
	void *board;
	struct slots_config coordinator;
	uint64_t deadline_ns;
	uint64_t nonce;
	uint64_t id; /* the same for all ranks, and no other group's */
	/* The scope of signs of life: they are the same whichever round a rank is in. */
	char life[GATHER_NAME_BYTES];
	struct ckpt_group_rank *ranks;
	uint32_t node_count;
	uint32_t leader;     /* the lowest rank of our node */
	uint32_t node_ranks; /* of our node */

	pthread_mutex_t beginning; /* one save at a time is staged: in the order of their rounds */
	pthread_mutex_t lock;      /* of what follows */
	pthread_cond_t change;
	unsigned running;         /* saves that have not ended */
	struct fs_memory storage; /* below the directory; only in rounds */
	bool comm_failed;         /* bytes do not travel between nodes any more; only in rounds */
	uint64_t kept_round; /* the first one whose notes have not been dropped; only in rounds */
	uint64_t next_round; /* that will be given out */
	uint64_t round;      /* whose turn it is */
};

/* Everybody finds everybody (group_meeting.c). The board is open. */
int ckpt_group_meet(struct ioshape_group *group, struct base_error *error);

/* "rank 3 (n03, process 4711)": for messages; valid until the end of the block it stands in. */
#define CKPT_RANK_BYTES 96
const char *ckpt_show_rank(const struct ioshape_group *group, uint32_t rank,
			   char into[CKPT_RANK_BYTES]);
#define CKPT_SHOWN_RANK(group, rank) ckpt_show_rank(group, rank, (char[CKPT_RANK_BYTES]){ 0 })

/* ---- Rounds (group_round.c) ------------------------------------------------------------------ */

struct ckpt_round {
	struct ioshape_group *group;
	uint64_t number;
	char scope[GATHER_NAME_BYTES]; /* on the board */
	const atomic_bool *abort;      /* NULL: nobody stops it */
	/* How far this rank is: part of its signs of life. */
	uint64_t done_bytes;
	uint64_t last_beat_ns;
	/* What rank 0 last said of all: for progress. */
	uint64_t group_done, group_total;
};

/* The next number; to be begun later, in this order, by whatever thread. */
uint64_t ckpt_round_reserve(struct ioshape_group *group);
/* Only its scope. */
void ckpt_round_name(struct ckpt_round *round, const struct ioshape_group *group, uint64_t number);
/* Waits until the rounds before it have ended. */
void ckpt_round_begin(struct ckpt_round *round, struct ioshape_group *group, uint64_t number,
		      const atomic_bool *abort);
void ckpt_round_end(struct ckpt_round *round);
/* Drops the notes of the rounds before it. Rank 0: once all have come to this one. */
void ckpt_round_forget(const struct ckpt_round *round);

/* "<what>-<our rank>". Tries until the deadline. */
int ckpt_round_post(struct ckpt_round *round, const char *what, struct ckpt_note *note,
		    struct base_error *error);
/* Until something may have changed; not for long. */
void ckpt_round_rest(struct ckpt_round *round);
/* Says now and then that we live: to be called from whatever takes long. */
void ckpt_round_beat(struct ckpt_round *round);

/*
 * Waits for "<what>-<rank>". A rank that is gone, or gave no sign of life until the deadline, is
 * -ETIMEDOUT with a sentence that names it. `told` (may be NULL) is called now and then.
 */
int ckpt_round_await(struct ckpt_round *round, const char *what, uint32_t rank,
		     struct base_buffer *note, void (*told)(void *user), void *user,
		     struct base_error *error);

/* What is known of a rank that is waited for. Zero it. */
struct ckpt_watched {
	uint64_t sign;     /* its last sign of life, as it says it */
	uint64_t heard_ns; /* when that, or the beginning, was */
	uint64_t done_bytes;
	bool ahead; /* it is in a later round than we */
};

/* One look: -EAGAIN (no sentence) if the note is not there yet; otherwise as above. */
int ckpt_round_look(struct ckpt_round *round, const char *what, uint32_t rank,
		    struct ckpt_watched *watched, struct base_buffer *note,
		    struct base_error *error);

/*
 * The same for all ranks for which have[rank] is not set; found() sets it. found() may end it with
 * a code. Ranks that were lost are named together.
 */
struct ckpt_collection {
	const char *what;
	const char *missing; /* for the sentence: "did not come to save" */
	bool *have;
	int (*found)(void *user, uint32_t rank, const struct base_buffer *note);
	void *user;
	bool signs; /* ranks give signs of life meanwhile; otherwise the deadline is for all */
	bool tells; /* rank 0 tells the others how far all are */
};
/* Whether it is set for all ranks. */
bool ckpt_has_all(const struct ioshape_group *group, const bool *have);
int ckpt_round_collect(struct ckpt_round *round, const struct ckpt_collection *collection,
		       struct base_error *error);

/* ---- Generations being saved (group_save.c, group_lead.c, group_write.c, group_stream.c)
 * ------------------- */

/* What rank 0 has decided. */
struct ckpt_group_plan {
	enum ioshape_mode mode;
	char why[160];
	char path[CKPT_PATH_BYTES]; /* of the attempt */
	uint64_t alignment;         /* of parts in bundles */
	uint64_t total_bytes;       /* of all parts; about, as the next */
	uint64_t *bytes;            /* of each rank's; to be freed */
};

/* What a writer has written. */
struct ckpt_written {
	char name[ZIP_PART_NAME_BYTES];
	uint64_t bytes;
	uint32_t crc32;
	uint32_t count;
	struct ckpt_written_part {
		uint32_t rank;
		uint32_t crc32;
		uint64_t offset, bytes;
	} * parts; /* to be freed */
};

/* One rank's part in one generation, while it is being saved. */
struct ckpt_part {
	struct ckpt_round round;
	struct ioshape_group *group;
	struct ioshape_save *save;
	struct ckpt_group_plan plan;
	struct ioshape_report *report;
	struct ring_notes notes;  /* for the report: of what was before the file */
	enum ioshape_phase phase; /* told last: only ever later ones */
	/* Of a stream that we wait for: whose, how far it was, and since when. */
	uint32_t awaited;
	uint64_t awaited_bytes, awaited_ns;
};

/* Rank 0 (group_lead.c): all of the generation. `own` is what it failed with before, if it did. */
int ckpt_lead(struct ckpt_part *part, const struct base_error *own, struct base_error *error);
/* The others are told that there will be none. */
int ckpt_lead_nowhere(struct ckpt_part *part, const struct base_error *why,
		      struct base_error *error);

/* The rank that writes the part of this one. */
uint32_t ckpt_writer_of(const struct ioshape_group *group, enum ioshape_mode mode, uint32_t rank);

/* How many files a generation has. */
uint32_t ckpt_files_of(const struct ioshape_group *group, enum ioshape_mode mode);

/* For the writers: writes the file, with the parts of all ranks whose writer this one is. */
int ckpt_write_parts(struct ckpt_part *part, struct ckpt_written *written,
		     struct base_error *error);
/* For the others: brings our part to its writer. */
int ckpt_bring_part(struct ckpt_part *part, struct base_error *error);

/* An ioshape_progress_fn for all that takes long in a part: tells the caller's, and the others. */
int ckpt_part_track(void *part, enum ioshape_phase phase, uint64_t done_bytes,
		    uint64_t total_bytes);

/* Streams of this generation. */
void ckpt_stream_address(const struct ckpt_part *part, uint32_t writer, char *into, size_t room);
uint32_t ckpt_stream_tag(const struct ckpt_part *part);
/* Each block is two messages, between which both sides wait for each other: with 4 MiB a save by
 * rank 0 over gloo took a fifth longer. Two streams are received at a time. */
#define CKPT_STREAM_BLOCK_BYTES (16 * MIB)
#define CKPT_STREAM_BLOCKS 3u

/* Whether saves of this group are staged in memory that their writer can map. */
bool ckpt_group_shares_memory(const struct ioshape_group *group);
/* A save of this group's begins; has ended, and does not know the group any more. */
void ckpt_group_enter(struct ioshape_group *group);
void ckpt_group_leave(struct ioshape_group *group);
/* What a save in the background does if it is a group's. */
int ckpt_group_run(struct ioshape_save *save, struct ioshape_report *report,
		   struct base_error *error);
/* The save could not even be begun: the others are told so. */
int ckpt_group_give_up(const struct ckpt_group_share *share, const struct base_error *why,
		       struct base_error *error);

#endif
