/* SPDX-License-Identifier: Apache-2.0 */
/* Interface between the parts of harm.c, which run an act and judge the results of its ranks. */
#ifndef TESTS_CAMPAIGN_HARM_RUN_H
#define TESTS_CAMPAIGN_HARM_RUN_H

#include "base/base.h"
#include "harm.h"
#include "support/calls.h"

#include <signal.h>
#include <stdint.h>
#include <string.h>
#include <sys/wait.h>

/* The results of a child, in memory that it shares with its parent. */
struct told {
	bool ended;
	int ret;
	int descriptors; /* number of leaked descriptors */
	bool leaked;
	bool opened;  /* a context was opened; errors of opening one name no path */
	bool unnamed; /* an error lacks operation, path or message, or has a wrong code */
	char sentence[1024];
	char wrong[256];
};

/* What happens to one or two system calls of the act. */
struct harm {
	enum calls_mode mode;
	unsigned rank;
	unsigned long nth;
	int code;
	unsigned long also; /* number of a second call; 0: none */
	int also_code;
	/* expected names of the calls; NULL: any */
	const char *name, *also_name;
};

/* The current act, its harm, and the results and exit statuses of its ranks. */
extern const struct act *act;
extern struct harm harm;
extern struct told *told;
extern int statuses[HARM_RANKS];

/* number of calls that failed, and of processes that were killed, so far */
extern unsigned harmed;

/* Makes the old state and runs all ranks. */
void harm_run(void);
unsigned harm_ranks(void);
/* Returns the number of calls of a rank when nothing fails, and records the calls. */
unsigned long harm_count_calls(unsigned rank);
/* Returns the name of a call in the record, or "?" if it is unknown. */
const char *harm_name_of(unsigned long nth);

/* Returns a random number from 0 to `below` - 1, which follows from the seed. */
uint64_t harm_random(uint64_t below);

/* Reports a finding. `kind` is torn, lost, litter or wrong. */
void harm_found(const char *kind, const char *what);
/* Runs the act's again(), and reports `kind` if it finds leftovers. */
void harm_check_litter(const char *kind);

/* Modes of the program (harm_kill.c, harm_fault.c). */
void harm_kills(unsigned count);
void harm_faults(uint64_t seed, unsigned count);
void harm_memory(void);
void harm_once(char **numbers, int count);

/* Judges the results of a failed call (harm_judge.c). */
void harm_judge(void);
/* Returns whether the code is a passing condition, which must not be injected for all later
 * calls. */
bool harm_passes(int code);

#endif
