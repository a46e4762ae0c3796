/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What the parts of harm.c share: an act is run, and what its ranks told is judged.
 */
#ifndef TESTS_CAMPAIGN_HARM_RUN_H
#define TESTS_CAMPAIGN_HARM_RUN_H

#include "base/base.h"
#include "harm.h"
#include "support/calls.h"

#include <signal.h>
#include <stdint.h>
#include <string.h>
#include <sys/wait.h>

/* What a child has to tell, in memory that it shares with its parent. */
struct told {
	bool ended;
	int ret;
	int descriptors; /* too many */
	bool leaked;
	bool opened;  /* a context: errors of that are about no path */
	bool unnamed; /* an error without operation, path or sentence, or with another code */
	char sentence[1024];
	char wrong[256];
};

/* What becomes of one of its calls, or of two. */
struct harm {
	enum calls_mode mode;
	unsigned rank;
	unsigned long nth;
	int code;
	unsigned long also; /* 0: none */
	int also_code;
	/* In place of their numbers: the first calls from there, whose numbers are known when they
	 * have come. 0: none. */
	uint32_t site, also_site;
	/* What they are to be, where their numbers are known; NULL: whatever they are. */
	const char *name, *also_name;
};

/* The act; what is done to it; what came of that, by rank. */
extern const struct act *act;
extern struct harm harm;
extern struct told *told;
extern int statuses[HARM_RANKS];

/* Made to fail, or killed, so often. */
extern unsigned harmed;

/* The old state is made, and all ranks run. */
void harm_run(void);
unsigned harm_ranks(void);
/* So many calls has the rank if nothing fails; what they are is in the record. */
unsigned long harm_count_calls(unsigned rank);
/* Of a call in the record; "?" if that is not known. */
const char *harm_name_of(unsigned long nth);

/* From 0 to below `below`: follows from the seed. */
uint64_t harm_random(uint64_t below);

/* `kind` is torn, lost, litter or wrong. */
void harm_found(const char *kind, const char *what);
/* The next one tidies, or `kind` is found. */
void harm_check_litter(const char *kind);

/* harm_kill.c, harm_fault.c: what the program does. */
void harm_kills(unsigned count);
void harm_faults(uint64_t seed, unsigned count);
void harm_once(char **numbers, int count);

/* harm_judge.c: what may not come of a failure. */
void harm_judge(void);
/* Nobody waits for what passes if it never does. */
bool harm_passes(int code);

#endif
