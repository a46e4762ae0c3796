/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Interface of acts to harm.c. An act is an operation of the library, in one process or by several
 * ranks. It changes the files on disk from an old state to a new one, or only reads them. harm.c
 * kills the act or makes its system calls fail.
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
	/* parameters of the act; the file that defines it knows their type */
	const void *variant;
	unsigned ranks; /* number of ranks; 0 means one process */

	/* Run once, at the begin and at the end. The working directory is empty at the begin. */
	void (*open)(const struct act *act);
	void (*close)(const struct act *act);

	/* Makes the old state, before each trial. */
	void (*begin)(const struct act *act);
	/* Runs the act in a child process for each rank. It must pass failures to harm_heed(). */
	int (*run)(const struct act *act, unsigned rank);
	/* Returns the state of the files afterwards. NULL: the act changes nothing, and run()
	 * checks its results. */
	enum state (*look)(const struct act *act);
	/* Runs the next operation of this kind, which tidies up. Returns the number of leftovers.
	 * NULL: nothing is ever left. */
	unsigned (*again)(const struct act *act);

	bool durable; /* the order of its system calls survives a power failure, and no failed write
			 or sync is ignored */
	bool slow;    /* takes long, as acts of several ranks do; tried less often */
	bool apart;   /* a rank does not fail because another one does */
	bool passes_over; /* ignores files that it cannot read */
	bool leaves;      /* leftovers that it cannot remove are removed by a later operation */
	bool mounts;      /* mounts filesystems; not listed where that is forbidden */
	bool no_faults;   /* the caller decides what a failure means, so no faults are injected */
};

extern const struct act *const directory_acts, *const file_acts, *const group_acts;
extern const struct act *const look_acts, *const slots_acts, *const tier_acts;
extern const struct act *const tier_group_acts;

/* Returns `ret`, and records the library's error message for it. Only in a child. */
int harm_heed(int ret);

/* Returns the number of files that processes left there because they could not tell their node.
 * Such files stay until they are old enough. */
unsigned harm_homeless(const char *folder);
/* Removes these files. Otherwise the next trial would count them as its leftovers. */
void harm_forget_homeless(const char *folder);

/* Reports something that must never happen, whatever failed. Returns a code for run(). Only in a
 * child. */
int harm_wrong(const char *format, ...) __attribute__((format(printf, 1, 2)));

/* Ends the program if `ret` is a failure, because no fault is active. Only in begin() and
 * again(). */
void harm_must(int ret, const char *what);

/* Runs `body` in a new process, which has done nothing before. Only in begin() and again(). */
void harm_alone(int (*body)(const struct act *act), const struct act *act, const char *what);

/* Runs run() once more, by all ranks and without faults. Only in begin() and again(). */
void harm_play(void);

/* Returns the folder of this host's pools. It is not the working directory. */
const char *harm_coordinator(void);

/* Starts a Redis for the act, and stops it: for open() and close(). harm_redis() returns its
 * address. */
void harm_open_redis(const struct act *act);
void harm_close_redis(const struct act *act);
const char *harm_redis(void);

/* Makes all calls of this name fail with `code` in this child, as if the system did not have
 * them. */
void harm_deny(const char *name, int code);

#endif
