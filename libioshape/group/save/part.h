/* SPDX-License-Identifier: Apache-2.0 */
/* Inside the group floor: a generation that is being saved, and one rank's part in it. */
#ifndef GROUP_SAVE_PART_H
#define GROUP_SAVE_PART_H

#include "group/group.h"

/* What rank 0 has decided. */
struct group_plan {
	enum ioshape_mode mode;
	char why[160];
	bool near;                              /* on tiers, and not in the group's directory */
	bool together;                          /* all nodes see the same tier */
	char not_near[BASE_ERROR_TEXT_BYTES];   /* why not, if there is a tier */
	char attempt[GROUP_ATTEMPT_NAME_BYTES]; /* its name there */
	uint64_t alignment;                     /* of parts in bundles */
	uint64_t total_bytes;                   /* of all kept parts; about, as the next */
	uint64_t repeated_bytes;                /* of the parts that are not kept */
	uint64_t *bytes;                        /* of each rank's, 0 if it is not kept */
	/* By rank: the lowest rank with an equal part, and the rank whose copy is stored for it. */
	uint32_t *same, *kept;
	/* The question before the plan: these ranks shall say the digests of their parts. */
	bool asks;
	bool *asked;
	uint8_t key[BASE_MAC_BYTES];
};

/* Memory for the numbers of so many ranks, each of which keeps a part of its own. -ENOMEM. */
int group_plan_init(struct group_plan *plan, uint32_t ranks);
void group_plan_free(struct group_plan *plan);

static inline bool group_is_kept(const struct group_plan *plan, uint32_t rank)
{
	return plan->kept[rank] == rank;
}

/* Reads what rank 0 has posted into an initialised plan. Pure. */
int group_read_plan(struct group_plan *plan, uint32_t ranks, uint64_t step,
		    const struct base_buffer *note, struct base_error *error);

/* Waits for rank 0's note "plan" or "agreed" and reads it. If it is a question, answers it and
 * waits for the plan that follows (save.c). */
struct group_part;
int group_await_plan(struct group_part *part, const char *what, struct base_error *error);

/* What a writer has written. */
struct group_written {
	char name[ZIP_PART_NAME_BYTES];
	uint64_t bytes;
	uint32_t crc32;
	uint32_t count;
	struct group_written_part {
		uint32_t rank;
		uint32_t crc32;
		uint64_t offset, bytes;
	} * parts; /* to be freed */
};

/* Or why it has not. */
void group_note_written(struct group_note *note, const struct group_written *written,
			const struct base_error *failure);

/* A sample or a digest of a rank's part. */
struct group_sum {
	bool known;
	struct group_sum_key { /* compared as bytes: no gaps */
		uint64_t bytes;
		uint64_t node; /* if copies on several nodes are kept; 0 elsewhere */
		uint8_t mac[BASE_MAC_BYTES];
	} key;
};

/* One rank's part in one generation, while it is being saved. */
struct group_part {
	struct group_round round;
	struct ioshape_group *group;
	struct ioshape_save *save;
	const struct save_task *task;
	uint64_t step;
	struct group_plan plan;
	struct group_sum sample;   /* of our part */
	struct save_digest digest; /* the same; zeros if it was not asked for */
	struct group_sum *sums;    /* rank 0: of each rank's */
	bool asked;                /* rank 0: the question has been posted */
	struct ioshape_report *report;
	struct ring_notes notes;                 /* for the report: of what was before the file */
	char unprotected[BASE_ERROR_TEXT_BYTES]; /* why nodes do not protect each other; "" */
	enum ioshape_phase phase;                /* told last: only ever later ones */
	/* Of a stream that we wait for: whose, how far it was, and since when. */
	uint32_t awaited;
	uint64_t awaited_bytes, awaited_ns;
};

/* ---- Equal parts (save/same.c) --------------------------------------------------------------- */

/* Before the rank says what it wants. */
void group_take_sample(struct group_part *part);
void group_note_sum(struct group_note *note, const struct group_sum *sum);
void group_read_sum(struct group_note_reader *reader, struct group_sum *sum);
/* Rank 0, which has the samples of all: finds out which parts are equal, and keeps one of each. */
int group_find_same(struct group_part *part, struct base_error *error);
/* The others: answer its question. */
int group_answer_digest(struct group_part *part, struct base_error *error);
/* Whether the plan has this rank write a file. */
bool group_has_file(const struct group_part *part);
/* Counts the files that the generation has in this mode. */
uint32_t group_count_files(const struct group_part *part, enum ioshape_mode mode);
/* Compares the checksum of our written part with its digest, on which other ranks rely.
 * IOSHAPE_E_CHANGED. */
int group_check_digest(const struct group_part *part, uint32_t crc32, struct base_error *error);

/* ---- The tier (save/near.c) ------------------------------------------------------------------ */

/* Rank 0: where the generation is made, and room for it on this node. */
void group_choose_place(struct group_part *part);
/* The others: it is in the plan. */
void group_take_place(struct group_part *part);
/* Rank 0: it is made in the directory after all, and all reports say why. */
void group_save_directly(struct group_part *part, const char *why);
/* Whether each node saves on a tier of its own. */
static inline bool group_is_spread(const struct group_part *part)
{
	return part->plan.near && part->group->node_count > 1 && !part->plan.together;
}
/* How much of the generation is written where this node writes; about. */
uint64_t group_bytes_here(const struct group_part *part);
static inline const char *group_place_of(const struct group_part *part)
{
	return part->plan.near ? part->group->near : part->group->directory;
}
/* Rank 0: its number is higher than those of both places. */
void group_continue_serials(struct group_part *part, struct group_attempt *attempt);
/* It is in place: if that is on the tier, it will be drained, whatever becomes of this process. */
int group_keep(const struct group_part *part, struct base_error *error);

/* ---- The tiers of several nodes (save/spread.c) ---------------------------------------------- */

/* What a node keeps for others, if all save so much. */
uint64_t group_parity_bytes(const struct ioshape_group *group, uint64_t bytes);
/* Rank 0, which has room, asks the first rank of each other node for theirs. -EAGAIN, with a
 * sentence: one has none. If all have found rank 0's directory, they are on one tier together. */
int group_ask_for_room(struct group_part *part, struct base_error *error);
/* The others: whether this node has it is told, and what rank 0 has decided then is the plan. */
int group_answer_for_room(struct group_part *part, struct group_attempt *attempt,
			  struct base_error *error);
/* Rank 0: all nodes put their files in place, with the manifest. */
int group_commit_spread(struct group_part *part, struct group_attempt *attempt,
			struct zip_manifest *manifest, struct base_error *error);
/* The first ranks of the others do their part in it, when rank 0 says so. */
void group_follow_commit(struct group_part *part, struct group_attempt *attempt,
			 struct base_error *error);

/* Rank 0 (lead.c): all of the generation. `own` is what this rank failed with before, if it did. */
int group_lead(struct group_part *part, const struct base_error *own, struct base_error *error);
/* The others are told that there will be none. */
int group_lead_nowhere(struct group_part *part, const struct base_error *why,
		       struct base_error *error);

/* For the writers: writes the file, with the parts of all ranks whose writer this one is. */
int group_write_parts(struct group_part *part, struct group_written *written,
		      struct base_error *error);
/* For the others: sends our part to its writer. */
int group_send_part(struct group_part *part, struct base_error *error);

/* An ioshape_progress_fn for all that takes long in a part: tells the caller's, and the others. */
int group_part_track(void *part, enum ioshape_phase phase, uint64_t done_bytes,
		     uint64_t total_bytes);
/* The same, and -ECANCELED if the save shall stop. */
int group_part_go_on(struct group_part *part, enum ioshape_phase phase, uint64_t done_bytes,
		     uint64_t total_bytes, struct base_error *error);

/* What parts of a generation begin on multiples of, in bundles: stripe_bytes may be 0. Pure. */
uint64_t group_part_alignment(uint64_t bytes, uint32_t parts, uint64_t stripe_bytes);

/* Streams of this generation. */
void group_stream_address(const struct group_part *part, uint32_t writer, char *into,
			  size_t into_bytes);
uint32_t group_stream_tag(const struct group_part *part);
/* Each block is two messages, between which both sides wait for each other: with 4 MiB a save by
 * rank 0 over gloo took a fifth longer. Two streams are received at a time. */
#define GROUP_STREAM_BLOCK_BYTES (16 * MIB)
#define GROUP_STREAM_BLOCKS 3u

/* ---- Shares (save/api.c, save/save.c) -------------------------------------------------------- */

/* What one rank has in one save: from the call that begins it to the end of the save's thread. */
struct group_share {
	struct ioshape_group *group;
	uint64_t step;
	uint64_t round;
};

/* A rank's part in a save, for save_begin(); `user` is a struct group_share from malloc(). */
extern const struct save_collective_ops group_save_ops;
/* The save could not even be begun: the others are told so. */
int group_give_up(const struct group_share *share, const struct base_error *why,
		  struct base_error *error);

#endif
