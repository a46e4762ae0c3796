/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Counts every call of the library that the system may refuse, and makes a chosen call fail or ends
 * the process there. The linker turns close() into __wrap_close() and so on (see
 * tests/meson.build), in the library and in the test. Outside calls_begin() and calls_end() the
 * wrappers only pass calls on. Allocations count, too, after fail_memory_by(calls_fail).
 *
 * The record is in memory that is shared with children, so a parent sees how far a killed child
 * came.
 */
#ifndef TESTS_SUPPORT_CALLS_H
#define TESTS_SUPPORT_CALLS_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <sys/types.h>

#define CALLS_MOST 4096

/* Used in place of an errno: the call does not fail, but does less than it was asked for. */
#define CALLS_SHORT 100000

enum calls_mode {
	CALLS_COUNT,
	CALLS_FAIL, /* the nth call fails with `code` and has no effect; a close still closes */
	CALLS_FAIL_FIRST, /* the first call of a name fails, and only that one: see
			     calls_begin_named() */
	CALLS_FAIL_FROM,  /* the nth call and all later ones of its name fail; for allocations, all
			     allocations */
	CALLS_KILL,       /* SIGKILL ends the process before the nth call has an effect */
};

struct calls_record {
	atomic_ulong count;
	/*
	 * Names of the calls. The fsync of a directory is "fsync directory". The close of a
	 * temporary file is "close temporary", its statx "statx temporary" and so on. NULL: the
	 * call was in progress when the recording ended.
	 */
	const char *_Atomic names[CALLS_MOST];
	uint32_t sites[CALLS_MOST]; /* return addresses of the calls, relative to the program */
	int codes[CALLS_MOST];      /* errors that the calls were made to fail with; 0: none */
	mode_t temporary_mode; /* of the newest temporary file, as requested, before the umask */
	int temporary_flags;
};

void calls_begin(enum calls_mode mode, unsigned long nth, int code);
void calls_begin_named(const char *name, int code);
void calls_end(void);

/* Makes the nth call fail, too. Call it after calls_begin(). */
void calls_also(unsigned long nth, int code);

/* Makes all calls of this name fail from now on, as if the system lacked it. Cannot be undone. */
void calls_deny(const char *name, int code);

/* Returns the record of the last calls_begin() in this process or in a child. */
struct calls_record *calls_record(void);

/*
 * Returns the position (from 0) of the first call of this name at or after `from`; -1 if there is
 * none.
 */
long calls_find(const char *name, unsigned long from);

/* Returns whether calls of this name allocate or map memory. */
bool calls_is_memory(const char *name);

/*
 * Decides about a call, for wrappers. Returns 0 if the call is to be made, CALLS_SHORT if it is to
 * do a part of its work, or else the error, which is also in errno. `site` is the return address of
 * the call.
 */
int calls_fail(const char *name, const void *site);

#endif
