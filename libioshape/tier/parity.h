/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Inside libioshape-tier: generations that lie on the tiers of several nodes, each of which has its
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
#ifndef TIER_PARITY_H
#define TIER_PARITY_H

#include "group/group.h"

#include <ioshape/tier.h>

/* Of all that "node-00003.parity" has in front of its parities. */
#define PARITY_FORMAT BASE_FORMAT(1u)
#define PARITY_NOWHERE UINT32_MAX

/* ---- Reed-Solomon codes (parity.c; pure) ----------------------------------------------------- */

/*
 * Of so many elements of data, numbered from 0 on, and those of parity behind them, any lost ones
 * follow from as many others as there are elements of data.
 */
#define PARITY_MOST_DATA 32u
#define PARITY_MOST 2u

/* ---- Who protects whom (parity.c; pure) ------------------------------------------------------ */

struct parity_sets {
	uint32_t nodes;
	uint32_t parity;    /* most that a set may lose; 0: the nodes do not protect each other */
	uint32_t set_nodes; /* members of a set, or up to twice as many */
	uint32_t *order;    /* of nodes: set after set; owned */
};

/* Members of one set come from as many domains (racks, hosts) as can be. -ENOMEM. */
int parity_sets_make(struct parity_sets *sets, uint32_t nodes, uint32_t parity, uint32_t set_nodes,
		     const char *const *domains);

/* The set of a node; none of its members is there twice. */
struct parity_set {
	const uint32_t *nodes;
	uint32_t count, parity;
	uint32_t position; /* of that node */
};
struct parity_set parity_set_of(const struct parity_sets *sets, uint32_t node);
static inline uint32_t parity_segments_of(const struct parity_set *set)
{
	return set->count - set->parity;
}

/* An element that another one is the sum of: times the coefficient. */
struct parity_source {
	uint32_t node, element;
	uint8_t coefficient;
};

/* Whether everything that the nodes had is there, or can be made. Takes time in proportion to the
 * number of nodes. */
bool parity_can_restore(const struct parity_sets *sets, const uint32_t *holders,
			const uint32_t *parities);

/* ---- What is written down (parity.c; pure) -------------------------------------------------- */

struct parity_record {
	struct parity_sets sets;
	uint32_t node;     /* whose parities they are */
	uint32_t parities; /* that follow: fewer than sets.parity, if they could not be made */
	uint32_t file_count;
	uint32_t *node_of_file; /* by file of the manifest; owned */
};

/* As part of a message. One that is read and not bad can be used: its numbers lead into its arrays.
 */
void parity_pass_record(struct group_payload *payload, struct parity_record *record);
/* Appended; its length is a multiple of PARITY_RECORD_UNIT, behind which the parities begin. */
#define PARITY_RECORD_UNIT 4096u
int parity_record_encode(struct base_buffer *out, const struct parity_record *record);
/* How long it is, from its first PARITY_RECORD_UNIT bytes; 0: it is none. */
uint64_t parity_record_bytes(const void *begin, size_t bytes);
/* IOSHAPE_E_DAMAGED, -EOPNOTSUPP, -ENOMEM. */
int parity_record_decode(struct parity_record *record, const void *data, size_t bytes,
			 const char *path, struct base_error *error);
void parity_record_free(struct parity_record *record);

/* Bytes of a segment of a set. */
uint64_t parity_segment_bytes(const struct format_manifest *manifest,
			      const struct parity_record *record, const struct parity_set *set);

/* ---- Elements on their way (parity.c) -------------------------------------------------------- */

/* A node of today that gets what a node of the generation had: all of it, or, if that is what it
 * has itself, its parities, which are made for the first time. */
struct parity_making {
	uint32_t target; /* node of today */
	uint32_t node;   /* of the generation */
	uint32_t turn;   /* of those that this target gets */
};

struct parity_exchange {
	struct group_round *round;
	const struct format_manifest *manifest;
	const struct parity_record *record; /* that of any node, of which sets and files count */
	const uint32_t *holders, *parities;
	const struct parity_making *makings; /* the same on all nodes, in the same order */
	uint32_t count;
	bool fresh;         /* they are made for the first time */
	const char *folder; /* where this node has its files, and gets what it gets */
	/* While it runs. */
	atomic_bool broken;        /* bytes do not travel between nodes any more */
	uint32_t own;              /* node of today */
	struct parity_work *works; /* what concerns this node */
	uint32_t work_count, turns;
	uint64_t most_steps;       /* blocks of all elements of the largest */
	struct base_error sending; /* what the thread that sends failed with */
};

/*
 * Called by the first rank of each node, together: sends what others need, and writes what this
 * node gets. What was restored has the checksums of the manifest.
 */
int parity_exchange_run(struct parity_exchange *exchange, struct base_error *error);

#endif
