/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Inside the group floor: generations that lie on the tiers of several nodes, each of which has its
 * own files and all of the manifest, and how these nodes keep what one of them loses.
 *
 * Nodes form sets. Of a set with n members m may be lost. Each member's files, one behind the
 * other, are cut into n - m segments of one size. A member has so many elements: its segments, and
 * m parities. Of n groups each has one element of every member, none of them twice: m are the
 * parities of the others, so any m follow from the rest. With two members and one parity that is a
 * copy at the partner.
 *
 * Nodes are numbered as they were when the generation was saved. Which node of today has the files
 * of which is said by `holders`.
 */
#ifndef GROUP_PARITY_PARITY_H
#define GROUP_PARITY_PARITY_H

#include "group/group.h"

/* Of all that "node-00003.parity" has in front of its parities. */
#define GROUP_PARITY_FORMAT BASE_FORMAT(1u)
#define GROUP_NOWHERE UINT32_MAX

/* ---- What nodes answer rank 0 (answers.c) ---------------------------------------------------- */

struct group_answers {
	struct base_error failure; /* the first one, with its rank */
	uint32_t count, same;      /* of these, so many failed with -EEXIST */
	/* The first remark, in the caller's BASE_ERROR_TEXT_BYTES; NULL: nobody wants it. */
	char *remark;
};

/* Rank 0: of the first rank of each other node. */
int group_collect_answers(struct group_round *round, const char *what, const char *missing,
			  struct group_answers *answers, struct base_error *error);
/* The others: what this one failed with, if it did. */
int group_answer(struct group_round *round, const char *what, const struct base_error *failure,
		 const char *remark, struct base_error *error);

/* ---- Who protects whom (sets.c; pure) -------------------------------------------------------- */

struct group_sets {
	uint32_t nodes;
	uint32_t parity;    /* most that a set may lose; 0: the nodes do not protect each other */
	uint32_t set_nodes; /* members of a set, or up to twice as many */
	uint32_t *order;    /* of nodes: set after set; owned */
};

/* Members of one set come from as many domains (racks, hosts) as can be. -ENOMEM. */
int group_sets_make(struct group_sets *sets, uint32_t nodes, uint32_t parity, uint32_t set_nodes,
		    const char *const *domains);
void group_sets_free(struct group_sets *sets);

/* The set of a node; none of its members is there twice. */
struct group_set {
	const uint32_t *nodes;
	uint32_t count, parity;
	uint32_t position; /* of that node */
};
struct group_set group_set_of(const struct group_sets *sets, uint32_t node);
static inline uint32_t group_segments_of(const struct group_set *set)
{
	return set->count - set->parity;
}

/* An element that another one is the sum of: times the coefficient. */
struct group_source {
	uint32_t node, element;
	uint8_t coefficient;
};

/*
 * Find what an element of the node at set->position is made of: of itself, if a node holds it and
 * it is not `fresh`; otherwise of what is left of its group. holders[] and parities[] are by node,
 * and have an item for each node of the sets: the node of today that has its files, and how many
 * parities lie with them. -ENOENT: too much of the group is lost.
 */
int group_find_sources(const struct group_set *set, const uint32_t *holders,
		       const uint32_t *parities, uint32_t element, bool fresh,
		       struct group_source sources[BASE_MOST_DATA], uint32_t *count);

/* Whether everything that the nodes had is there, or can be made. Takes time in proportion to the
 * number of nodes. */
bool group_can_restore(const struct group_sets *sets, const uint32_t *holders,
		       const uint32_t *parities);

/* ---- What is written down (record.c; pure) --------------------------------------------------- */

struct group_record {
	struct group_sets sets;
	uint32_t node;     /* whose parities they are */
	uint32_t parities; /* that follow: fewer than sets.parity, if they could not be made */
	uint32_t file_count;
	uint32_t *node_of_file; /* by file of the manifest; owned */
};

/* Appended; its length is a multiple of GROUP_RECORD_UNIT, behind which the parities begin. */
#define GROUP_RECORD_UNIT 4096u
int group_record_encode(struct base_buffer *out, const struct group_record *record);
/* How long it is, from its first GROUP_RECORD_UNIT bytes; 0: it is none. */
uint64_t group_record_bytes(const void *begin, size_t bytes);
/* IOSHAPE_E_DAMAGED, -EOPNOTSUPP, -ENOMEM. */
int group_record_decode(struct group_record *record, const void *data, size_t bytes,
			const char *path, struct base_error *error);
void group_record_free(struct group_record *record);
/* Compare a record that another process or a disk gave with the manifest and the number of nodes
 * that it is used with: their arrays are indexed by its numbers. IOSHAPE_E_DAMAGED. */
int group_record_check(const struct group_record *record, const struct zip_manifest *manifest,
		       uint32_t nodes, const char *path, struct base_error *error);
/* Whether two records name the same sets and the same files of each node. */
bool group_records_agree(const struct group_record *left, const struct group_record *right);
/* Of a generation that lies all in one place, as if one node had saved it. -ENOMEM. */
int group_record_whole(struct group_record *record, uint32_t file_count);

/* ---- Elements on their way (exchange.c) ------------------------------------------------------ */

/* A node of today that gets what a node of the generation had: all of it, or, if that is what it
 * has itself, its parities, which are made for the first time. */
struct group_making {
	uint32_t target; /* node of today */
	uint32_t node;   /* of the generation */
	uint32_t turn;   /* of those that this target gets */
};

struct group_exchange {
	struct group_round *round;
	const struct zip_manifest *manifest;
	const struct group_record *record; /* that of any node, of which sets and files count */
	const uint32_t *holders, *parities;
	const struct group_making *makings; /* the same on all nodes, in the same order */
	uint32_t count;
	bool fresh;         /* they are made for the first time */
	const char *folder; /* where this node has its files, and gets what it gets */
	atomic_bool broken; /* out: bytes do not travel between nodes any more */
};

/*
 * Called by the first rank of each node, together: sends what others need, and writes what this
 * node gets. What was restored has the checksums of the manifest.
 */
int group_exchange_run(struct group_exchange *exchange, struct ioshape_context *context,
		       struct base_error *error);

/* All bytes of a node's files, and of a segment of its set. */
uint64_t group_node_bytes(const struct zip_manifest *manifest, const struct group_record *record,
			  uint32_t node);
uint64_t group_segment_bytes(const struct zip_manifest *manifest, const struct group_record *record,
			     const struct group_set *set);

/* Inside it (held.c): the files of a node that lie here, while one thread reads them. */
struct group_held {
	const struct group_exchange *exchange;
	bool is_open;
	uint32_t node;
	struct group_set set;
	uint64_t segment_bytes;
	uint32_t count; /* of its files */
	struct held_file {
		struct ring_input input;
		uint64_t at; /* where it begins among all of them */
	} * files;
	struct ring_input parity; /* its path is NULL before it is open */
	uint64_t parity_at;       /* where the first begins */
};

/* Bytes of an element of a node; there are zeros behind its last file. The files stay open until
 * those of another node are wanted. */
int group_held_get(struct group_held *held, uint32_t node, uint32_t element, uint64_t offset,
		   void *into, size_t bytes, struct base_error *error);
void group_held_close(struct group_held *held);

#endif
