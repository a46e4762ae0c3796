/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What harm.c does harm to: an act of the library, by one process or by several ranks, that changes
 * what is on the disk from an old state to a new one, or looks at it.
 */
#ifndef TESTS_CAMPAIGN_HARM_H
#define TESTS_CAMPAIGN_HARM_H

#include <ioshape/ioshape.h>

#include <stdbool.h>
#include <stddef.h>

#define HARM_RANKS 4

enum state {
	STATE_OLD,
	STATE_NEW,
	STATE_GONE,
	STATE_TORN,
};

struct act {
	const char *name;
	/* Of the family; what it does is up to it. */
	const void *variant;
	unsigned ranks; /* 0: one process */

	/* Once: in the working directory, which is empty. And in the end. */
	void (*open)(const struct act *act);
	void (*close)(const struct act *act);

	/* Makes the old state, each time. */
	void (*begin)(const struct act *act);
	/* In a child, one for each rank. A failure is told to harm_heed(). */
	int (*run)(const struct act *act, unsigned rank);
	/* What is there afterwards. NULL: nothing is changed, and run() says what it found. */
	enum state (*look)(const struct act *act);
	/* The next one that does such a thing, to tidy; and how much is left then that should not
	 * be there. NULL: nothing is ever left. */
	unsigned (*again)(const struct act *act);

	bool durable;     /* its order of calls is to survive a power failure, and no failure of a
			     write or sync is passed over */
	bool slow;        /* as those of several ranks: tried less often */
	bool apart;       /* ranks do not fail because another one does */
	bool passes_over; /* what cannot be read is none of its business */
	bool leaves;      /* what it cannot remove goes with the next one */
	bool mounts;      /* not listed where that is forbidden */
	bool no_faults;   /* what comes of a failure is up to the caller */
};

extern const struct act *const directory_acts,
	*const file_acts, *const group_acts, *const look_acts, *const slots_acts, *const tier_acts;

/* In a child: returns `ret`, and takes note of what the library says about it. */
int harm_heed(int ret);

/* How much processes left there that could not tell where they were: it has to wait for its age. */
unsigned harm_homeless(const char *folder);
/* Removes them, all of which are files: for the next trial they would be what it has left. */
void harm_forget_homeless(const char *folder);

/* In a child: what must not be, whatever failed. Returns a code for run(). */
int harm_wrong(const char *format, ...) __attribute__((format(printf, 1, 2)));

/* In begin() and again(): ends the program if this fails, which nobody harmed. */
void harm_must(int ret, const char *what);

/* In begin() and again(): in a process of its own, which did nothing before. */
void harm_alone(int (*body)(const struct act *act), const struct act *act, const char *what);

/* In again(): run() once more, by all ranks and without harm. */
void harm_play(void);

/* The folder of the pools of this host, which is not the working directory. */
const char *harm_coordinator(void);

/* A Redis for the act, as open() and close(); and its address. */
void harm_open_redis(const struct act *act);
void harm_close_redis(const struct act *act);
const char *harm_redis(void);

/* Before anything in a child is done that has a failing call "by the system". */
void harm_deny(const char *name, int code);

#endif
