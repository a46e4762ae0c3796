/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Memory that a preloaded program shares with its holder, the process that takes slots for it. The
 * program trusts nothing in it: the worst that a wrong value does is that the program writes
 * without a slot.
 */
#ifndef PRELOAD_MAILBOX_H
#define PRELOAD_MAILBOX_H

#include <ioshape/ioshape.h>

#include <linux/futex.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

/* Both processes have this text, so that a library never uses the holder of another release. */
#define MAILBOX_VERSION "ioshape-holder " IOSHAPE_VERSION

enum {
	MAILBOX_FD = 3, /* the holder's descriptor of this memory */
	MAILBOX_BEAT_MS = 200,
	MAILBOX_STILL_MS = 5000, /* a holder whose beat is older is dead, stopped or starved */
	MAILBOX_PATH_BYTES = 4096,
	MAILBOX_PROGRAM_BYTES = 64
};

/* State of a program's request for a slot. In parentheses: who leaves the state. */
enum mailbox_state {
	MAILBOX_ABSENT, /* there is no holder, or it has ended (program, by starting one) */
	MAILBOX_IDLE,   /* nothing is asked for (program; holder, when it ends) */
	MAILBOX_ASKING, /* the program writes its request (program) */
	MAILBOX_ASKED,  /* the program waits (holder; program, when it gives up) */
	MAILBOX_HELD,   /* the holder has the slot (both) */
	MAILBOX_CLOSED, /* the program has closed its file (holder) */
	MAILBOX_REFUSED /* the holder cannot take a slot, or need not (program) */
};

struct mailbox {
	char version[sizeof(MAILBOX_VERSION)];
	/* The program fills these before the holder starts. */
	int32_t pid;
	uint32_t everywhere; /* 1: files of local filesystems take slots, too */
	uint64_t wait_ms;    /* longest wait for a slot */
	char program[MAILBOX_PROGRAM_BYTES];
	/* The program writes these in MAILBOX_ASKING. */
	char path[MAILBOX_PATH_BYTES]; /* of the file */
	uint32_t bounces; /* slots in a row that it lost by a pause and asked for again at once */
	/* Counters of the program. */
	_Atomic int32_t calls;  /* calls in progress that write to its large files */
	_Atomic uint64_t bytes; /* bytes that such calls were asked to write */
	/* Values of the holder. The program fills in its process id. */
	_Atomic int32_t holder;
	_Atomic uint64_t beat_ms; /* time of its last beat (CLOCK_MONOTONIC) */
	_Atomic uint64_t allowed; /* `bytes` may grow to this number now */
	/* time when the last slot was returned because of a pause; 0: for another reason */
	_Atomic uint64_t paused_ms;
	_Atomic uint32_t grants; /* futex: changes when `allowed` grows */
	/* Futex: an enum mailbox_state, which both change by compare and swap. */
	_Atomic uint32_t state;
};

static inline uint64_t mailbox_now_ms(void)
{
	struct timespec now;

	clock_gettime(CLOCK_MONOTONIC, &now);
	return (uint64_t)now.tv_sec * 1000 + (uint64_t)now.tv_nsec / 1000000;
}

/* Waits until `word` may have changed from `value`. Returns what futex() returns. */
static inline long mailbox_wait(_Atomic uint32_t *word, uint32_t value, long ms)
{
	const struct timespec longest = { ms / 1000, ms % 1000 * 1000000 };

	return syscall(SYS_futex, word, FUTEX_WAIT, value, &longest, NULL, 0);
}

static inline void mailbox_wake(_Atomic uint32_t *word)
{
	syscall(SYS_futex, word, FUTEX_WAKE, INT32_MAX, NULL, NULL, 0);
}

/* Changes the state if it still is `from`, and wakes the other process. */
static inline int mailbox_move(struct mailbox *box, enum mailbox_state from, enum mailbox_state to)
{
	uint32_t expected = from;

	if (!atomic_compare_exchange_strong(&box->state, &expected, to))
		return 0;
	mailbox_wake(&box->state);
	return 1;
}

#endif
