/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Every call of the library that the system may refuse, counted; and at a chosen one a failure or
 * the end of the process. The linker turns close() into __wrap_close() and so on (see
 * tests/meson.build), in the library and in the test alike; nothing happens between calls_end() and
 * calls_begin(). Allocations are among them after fail_memory_by(calls_fail).
 *
 * The record lies in memory that is shared with children: a parent sees how far a killed child
 * came.
 */
#ifndef TESTS_SUPPORT_CALLS_H
#define TESTS_SUPPORT_CALLS_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <sys/types.h>

#define CALLS_MOST 4096

/* Stands for an errno: not a failure, but less than was asked for. */
#define CALLS_SHORT 100000

enum calls_mode {
	CALLS_COUNT,
	CALLS_FAIL,       /* the nth fails with `code`, without having done anything (close: having
			     closed) */
	CALLS_FAIL_FIRST, /* so does the first of a name, and only that: see calls_begin_named() */
	CALLS_FAIL_FROM,  /* the nth, and from there on all of its name; or all allocations */
	CALLS_KILL,       /* SIGKILL to the process before the nth, that is: after the one before */
};

struct calls_record {
	atomic_ulong count;
	/* The "fsync" of a directory is "fsync directory", the "close" of a temporary file "close
	 * temporary", a "statx" or "fstatfs64" of one that is open "statx temporary" and so on.
	 * NULL for a call that was on its way when the end came. */
	const char *_Atomic names[CALLS_MOST];
	uint32_t sites[CALLS_MOST]; /* who called: where it goes on, as an address in the program */
	int codes[CALLS_MOST];      /* what it was made to fail with; 0: it was not */
	mode_t temporary_mode; /* of the last temporary file at its creation, before the umask */
	int temporary_flags;
};

void calls_begin(enum calls_mode mode, unsigned long nth, int code);
void calls_begin_named(const char *name, int code);
void calls_end(void);

/* Besides, the nth fails as well. After calls_begin(). */
void calls_also(unsigned long nth, int code);

/* Besides, the first call that goes on there fails; two places at most. After calls_begin(). */
void calls_at(uint32_t site, int code);

/* Besides, every call of this name fails, as if the system did not have it. For good. */
void calls_deny(const char *name, int code);

/* Of the last calls_begin() in this process or in a child. */
struct calls_record *calls_record(void);

/* The position (from 0) of the first call of this name from `from` on; -1 if there is none. */
long calls_find(const char *name, unsigned long from);

/* Of an allocation, or another way in which memory is had. */
bool calls_is_memory(const char *name);

/* For wrappers: what the call of this name is to fail with (CALLS_SHORT: do a part of it), which is
 * in errno then; 0 if it is to be made. `site` is where its caller goes on. */
int calls_fail(const char *name, const void *site);

#endif
