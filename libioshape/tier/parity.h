/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Parity of libioshape-tier. A checkpoint of a group can be spread over the tiers of several nodes.
 * Each node then has its own files and the whole manifest. The nodes protect each other's files
 * with parity.
 *
 * Nodes form sets. A set of n members may lose m of them. The files of each member, one after the
 * other, are cut into n - m segments of equal size. Each member keeps n elements: its segments, and
 * m parities. The elements of a set form n groups. A group has one element of every member, each
 * with another number. Its m parities are computed from its n - m segments, so any n - m elements
 * of a group give the others. With two members and one parity, the parity is a copy at the partner.
 *
 * Nodes have the numbers that they had when the checkpoint was saved. `holders` gives, for each of
 * them, the current node that has its files.
 */
#ifndef TIER_PARITY_H
#define TIER_PARITY_H

#include "group/group.h"

#include <ioshape/tier.h>

/* Version of the record that precedes the parities in a file such as "node-00003.parity". */
#define PARITY_FORMAT BASE_FORMAT(1u)
/* Value in `holders` for a node whose files no current node has. */
#define PARITY_NOWHERE UINT32_MAX

/* ---- Reed-Solomon codes (parity.c; pure) ----------------------------------------------------- */

/* Limits of a code. Elements of data have the numbers from 0 on, and parities the next numbers. Any
 * lost elements follow from as many others as there are elements of data. */
#define PARITY_MOST_DATA 32u
#define PARITY_MOST 2u

/* ---- Sets of nodes that protect each other (parity.c; pure) ---------------------------------- */

/* Division of all nodes into sets. */
struct parity_sets {
	uint32_t nodes;
	/* most members that a set may lose; 0: the nodes do not protect each other */
	uint32_t parity;
	uint32_t set_nodes; /* members of a set; sets may have up to twice as many */
	uint32_t *order;    /* nodes, set after set; owned */
};

/* Divides the nodes into sets, whose members come from as many domains (racks, hosts) as possible.
 * Returns 0 or -ENOMEM. */
int parity_sets_make(struct parity_sets *sets, uint32_t nodes, uint32_t parity, uint32_t set_nodes,
		     const char *const *domains);

/* The set of one node. Its members are distinct. */
struct parity_set {
	const uint32_t *nodes;
	uint32_t count, parity;
	uint32_t position; /* position of that node in `nodes` */
};
/* Returns the set of a node. */
struct parity_set parity_set_of(const struct parity_sets *sets, uint32_t node);
/* Returns the number of segments of each member. */
static inline uint32_t parity_segments_of(const struct parity_set *set)
{
	return set->count - set->parity;
}

/* Term of the sum that gives an element: a coefficient times another element. */
struct parity_source {
	uint32_t node, element;
	uint8_t coefficient;
};

/* Returns whether all files of the nodes exist or can be restored. Takes time in proportion to the
 * number of nodes. */
bool parity_can_restore(const struct parity_sets *sets, const uint32_t *holders,
			const uint32_t *parities);

/* ---- Parity records (parity.c; pure) --------------------------------------------------------- */

/* Record in front of the parities of a node: the sets, and which node saved which file. */
struct parity_record {
	struct parity_sets sets;
	uint32_t node; /* node that the parities belong to */
	/* number of parities that follow; fewer than sets.parity if they could not be made */
	uint32_t parities;
	uint32_t file_count;
	uint32_t *node_of_file; /* node of each file of the manifest; owned */
};

/* Reads or writes a record as part of a message. After a successful read all its numbers are valid
 * indices of its arrays. */
void parity_pass_record(struct group_payload *payload, struct parity_record *record);
/* Appends an encoded record. Its length is a multiple of PARITY_RECORD_UNIT, and the parities begin
 * behind it. Returns 0 or -ENOMEM. */
#define PARITY_RECORD_UNIT 4096u
int parity_record_encode(struct base_buffer *out, const struct parity_record *record);
/* Returns the length of a record, given its first PARITY_RECORD_UNIT bytes; 0 if the bytes are no
 * record. */
uint64_t parity_record_bytes(const void *begin, size_t bytes);
/* Decodes a record. Returns 0, IOSHAPE_E_DAMAGED, -EOPNOTSUPP for another version, or -ENOMEM. */
int parity_record_decode(struct parity_record *record, const void *data, size_t bytes,
			 const char *path, struct base_error *error);
void parity_record_free(struct parity_record *record);

/* Returns the size of a segment of a set. */
uint64_t parity_segment_bytes(const struct format_manifest *manifest,
			      const struct parity_record *record, const struct parity_set *set);

/* ---- Exchange of elements between nodes (parity.c) ------------------------------------------- */

/* Assignment of work: a current node gets what a node of the checkpoint had. It gets its files and
 * parities, or only its parities, made for the first time, if it has the files itself. */
struct parity_making {
	uint32_t target; /* current node */
	uint32_t node;   /* node of the checkpoint */
	uint32_t turn;   /* position among the assignments of this target */
};

/* An exchange, in which all nodes of a group take part. */
struct parity_exchange {
	struct group_round *round;
	const struct format_manifest *manifest;
	const struct parity_record *record; /* record of any node; only its sets and files matter */
	const uint32_t *holders, *parities;
	/* assignments, the same on all nodes and in the same order */
	const struct parity_making *makings;
	uint32_t count;
	bool fresh;         /* true: parities are made for the first time */
	const char *folder; /* folder with this node's files, to which the new files are written */
	/* The following members are state of the exchange. */
	atomic_bool broken;        /* bytes can no longer travel between nodes */
	uint32_t own;              /* number of this current node */
	struct parity_work *works; /* assignments that concern this node */
	uint32_t work_count, turns;
	uint64_t most_steps;       /* blocks of all elements of the largest assignment */
	struct base_error sending; /* error of the thread that sends */
};

/* Runs the exchange. The first ranks of all nodes call it together. It sends what other nodes need,
 * and writes what this node gets. The checksums of restored files are compared with those of the
 * manifest. */
int parity_exchange_run(struct parity_exchange *exchange, struct base_error *error);

#endif
