/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Inside the group floor: what the tiers of all nodes have together, and how a node gets what its
 * ranks want of it. In rounds, by all ranks; the first rank of each node looks, sends and writes.
 */
#ifndef GROUP_PARITY_RESTORE_H
#define GROUP_PARITY_RESTORE_H

#include "group/parity/parity.h"

/* Who has the files of which node. */
struct group_holding {
	uint32_t holder; /* node of today */
	uint32_t node;   /* of the generation */
	uint32_t parities;
};

/* A generation that lies there. */
struct group_spread {
	uint64_t step, serial;
	char attempt[ZIP_ATTEMPT_BYTES];
	struct group_record record;
	uint32_t *node_of_rank; /* of the generation; owned */
	struct group_holding *holdings;
	uint32_t holding_count;
};

struct group_spreads { /* newest first */
	struct group_spread *all;
	size_t count;
};

static inline bool group_has_tiers(const struct ioshape_group *group)
{
	return group->near && group->node_count > 1;
}

/* Rank 0's decision. */
struct group_restoring {
	uint64_t step;
	char attempt[ZIP_ATTEMPT_BYTES];
	uint32_t nodes;               /* of the generation */
	uint32_t *holders, *parities; /* by node; owned, in one piece of memory */
	uint32_t count;
	struct group_making *makings; /* owned */
	char *folder;                 /* owned */
};

/* A message about the generation, from the node that has the manifest. */
struct group_known {
	struct base_buffer note;
	const uint8_t *text; /* of the manifest, in the note */
	size_t text_bytes;
	struct zip_manifest manifest;
	struct group_record record;
};

/* The text of a record, as it stands in the file of that name, and how long that is (file_bytes may
 * be NULL). -EINVAL, without a sentence, if there is none. */
int group_read_record(const struct ring_folder *folder, const char *name, struct base_buffer *text,
		      uint64_t *file_bytes);

/* Each node says what it has; rank 0 knows afterwards what there is. */
int group_look_at_tiers(struct group_round *round, struct group_spreads *spreads,
			struct base_error *error);
void group_spreads_free(struct group_spreads *spreads);

/* Read what other processes say, and refuse what would lead out of an array or takes more time than
 * the job is large. Apart from the rounds, so that a fuzzer can be the other process. */
void group_read_offers(const struct ioshape_group *group, uint32_t rank,
		       const struct base_buffer *note, struct group_spreads *spreads);
int group_read_restoring(const struct ioshape_group *group, const struct base_buffer *note,
			 struct group_restoring *restoring, struct base_error *error);
void group_restoring_free(struct group_restoring *restoring);
/* known->note is what was said. */
int group_read_known(const struct ioshape_group *group, const struct group_restoring *restoring,
		     struct group_known *known, struct base_error *error);
void group_known_free(struct group_known *known);

/* Rank 0: whether all of it is there, or can be made. */
bool group_is_restorable(const struct group_spread *spread, struct base_error *error);

/* All ranks: once it has ended well, every node has what its ranks want of the generation that rank
 * 0 names. `failure` is rank 0's: what a node could not do. */
int group_restore(struct group_round *round, const struct group_spread *spread,
		  struct base_error *failure, struct base_error *error);

#endif
