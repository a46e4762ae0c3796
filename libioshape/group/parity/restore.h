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
	char attempt[40];
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

/* The text of a record, as it stands in the file of that name, and how long that is (file_bytes may
 * be NULL). -EINVAL, without a sentence, if there is none. */
int group_read_record(const struct ring_folder *folder, const char *name, struct base_buffer *text,
		      uint64_t *file_bytes);

/* Each node says what it has; rank 0 knows afterwards what there is. */
int group_look_at_tiers(struct group_round *round, struct group_spreads *spreads,
			struct base_error *error);
void group_spreads_free(struct group_spreads *spreads);

/* Rank 0: whether all of it is there, or can be made. */
bool group_is_restorable(const struct group_spread *spread, struct base_error *error);

/* All ranks: once it has ended well, every node has what its ranks want of the generation that rank
 * 0 names. `failure` is rank 0's: what a node could not do. */
int group_restore(struct group_round *round, const struct group_spread *spread,
		  struct base_error *failure, struct base_error *error);

#endif
