/* SPDX-License-Identifier: Apache-2.0 */
/*
 * How many writers pay. A pool starts with a number that a rule gave, and compares it with others:
 * for a while so many write, then the other number, in turns. More writers must give clearly more
 * throughput, because each adds to what neighbours wait for; fewer may give a little less.
 *
 * The coordinators (slots.lua, local_queue.c) add up what holders report. When there are enough
 * reports, the client whose release completed them asks learn_from(), and the coordinator keeps the
 * result. So the rule stands here alone. Pure: numbers in, numbers out, no clock.
 */
#ifndef SLOTS_LEARN_H
#define SLOTS_LEARN_H

#include <stdbool.h>
#include <stdint.h>

#define LEARN_MOST                                                                                 \
	256u /* writers: what is learnt never goes beyond, but for the rule's own number */
#define LEARN_MOST_START 65536u
/* Smaller saves tell how long files take to create, not what the storage writes. */
#define LEARN_LEAST_BYTES (4u * 1024 * 1024)
/* A report teaches if so much of the capacity was in use at some time while its holder wrote. */
#define LEARN_FULL 0.8
#define LEARN_TEXT_BYTES 400

enum learn_why {
	LEARN_START, /* nothing has been compared yet */
	LEARN_MORE,  /* its last move: more writers gave more */
	LEARN_FEWER, /* its last move: fewer gave as much */
	LEARN_KEPT,  /* others were tried and gave no better */
};

/* What one comparison found: `writers` gave `permille` thousandths of what the best give. */
struct learn_found {
	uint64_t writers; /* 0: not tried */
	uint64_t permille;
};

/* What a pool keeps. All members have one type: as text they are a list of numbers. */
struct learn {
	uint64_t start; /* the rule's number: another one begins anew */
	uint64_t best;
	uint64_t trial;     /* compared with the best now; 0: none */
	uint64_t in_trial;  /* 1: the trial is in force, 0: the best */
	uint64_t fine;      /* 1: steps of a half, 0: steps of two */
	uint64_t tried;     /* directions of this step, as bits: 1 more, 2 fewer */
	uint64_t pairs;     /* epochs of the trial and the best compared so far ... */
	uint64_t shares;    /* ... and the trial's share of both rates in each, in millionths */
	uint64_t rate;      /* bytes per second, of the latest epoch; 0: none */
	uint64_t usual;     /* the same of the best, as a slow mean */
	uint64_t quiet;     /* epochs since the last comparison */
	uint64_t patience;  /* so many until the next one */
	uint64_t surprises; /* epochs in a row that were far from the usual */
	uint64_t why;       /* enum learn_why */
	struct learn_found more, fewer;
};

/* The reports since the last call, added up. */
struct learn_epoch {
	uint32_t reports;
	uint32_t wanted; /* the most that held or waited at a time */
	uint64_t bytes;
	/* Time of the storage: each holder's, divided by how many wrote beside it, itself included.
	 */
	double seconds;
};

void learn_begin(struct learn *learn, uint32_t start);
/* How many may write now. */
uint32_t learn_capacity(const struct learn *learn);
/* How many reports make an epoch. */
uint32_t learn_reports(const struct learn *learn);
/* An epoch is complete. Nonsense teaches nothing. */
void learn_from(struct learn *learn, const struct learn_epoch *epoch);

/* Whether learn_from() could have left it. */
bool learn_is_sound(const struct learn *learn);

/* As text, for a coordinator that keeps it. */
void learn_write(const struct learn *learn, char text[LEARN_TEXT_BYTES]);
/* What anybody may have written: anything but such a text, and what was learnt from another start,
 * begins anew. */
void learn_read(struct learn *learn, const char *text, uint32_t start);

#endif
