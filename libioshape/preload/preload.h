/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The preload library. Programs that do not know ioshape take turns with it: a large sequential
 * write takes a slot. All else passes.
 *
 *     calls.c     the functions that it replaces
 *     settings.c  the variables, read once when the program starts
 *     files.c     which descriptor is a large sequential write
 *     turn.c      one slot for each filesystem: asking, waiting, leaving
 *     start.c     starting the holder
 *     holder.c    the program that takes the slots; not part of the library
 *
 * The code runs inside unknown programs, in any thread and in signal handlers. So it takes no lock
 * that it would have to wait for, allocates nothing, opens nothing and prints nothing. Whatever
 * fails, the program writes as without the library.
 */
#ifndef PRELOAD_PRELOAD_H
#define PRELOAD_PRELOAD_H

#include "preload/mailbox.h"

#include <stdbool.h>
#include <sys/types.h>

#define PRELOAD_EXPORT __attribute__((visibility("default")))

/* ---- Settings (settings.c) ------------------------------------------------------------------- */

enum { PRELOAD_VARIABLES = 4096 };

struct preload_settings {
	bool everywhere;  /* files of local filesystems count, too */
	uint64_t bytes;   /* growth of a file that makes it a large sequential write */
	uint64_t wait_ms; /* longest wait for slots of one file */
	char program[MAILBOX_PROGRAM_BYTES];
	/* path of the holder: at most that of the library, and a name */
	char holder[MAILBOX_PATH_BYTES + 64];
	char excluded[MAILBOX_PATH_BYTES];
	/* The C library's clone(). That of a sanitizer in the program cannot share memory. */
	int (*clone)(int (*run)(void *), void *stack, int flags, void *argument, ...);
	char *environment[PRELOAD_VARIABLES + 1]; /* environment of the holder */
	int restrictions;                         /* preload_restrictions() at the start */
};

extern struct preload_settings preload_settings;

/* Reads the settings. Returns whether the library shall do anything in this program. */
bool preload_settings_read(void);
/* Returns a number that changes when the program restricts itself, as sandboxes do. */
int preload_restrictions(void);
/* Returns whether the user excluded the file at this path. */
bool preload_excludes(const char *path);

/* ---- Turns of this process (turn.c) ---------------------------------------------------------- */

/* The turn of this process on one filesystem: all its files there share one slot. */
struct preload_turn {
	_Atomic uint64_t device;   /* st_dev of the filesystem plus 1; 0: unused */
	_Atomic uint32_t starting; /* 1 while a thread starts the holder */
	_Atomic uint32_t started;  /* 1 if this process has a holder */
	_Atomic int32_t files;     /* large files that are open */
	/* time that the program has waited for slots since it closed its last large file */
	_Atomic uint64_t waited_ms;
	_Atomic uint32_t bounces;  /* slots in a row that it lost and asked for again at once */
	_Atomic uint64_t retry_ms; /* no slot is asked for before this time (CLOCK_MONOTONIC) */
};

/* Makes this process the owner of its turns. */
void preload_turns_prepare(void);
/* Returns whether this process owns the turns and the table of files. A child of vfork() does
 * not. */
bool preload_is_owner(void);
/* Finds the turn on a filesystem. Returns NULL if slots are not to be asked for there now. */
struct preload_turn *preload_turn_find(dev_t device);
/* Waits for a slot for the file at this path. With NULL, waits only if another thread asked for the
 * slot of this process. Returns false if the program shall go on without. */
bool preload_turn_ask(struct preload_turn *turn, const char *path);
/* Returns whether this process has waited for so long that it writes without a slot until it closes
 * the file. */
bool preload_turn_is_over(const struct preload_turn *turn);
/* Begins a call that writes `bytes` bytes in the slot, once the bandwidth limits allow it. Returns
 * the mailbox for preload_end(), or NULL if the slot is gone. */
struct mailbox *preload_turn_write(struct preload_turn *turn, uint64_t bytes);
/* Begins a call that writes no bytes. Returns the mailbox for preload_end(). */
struct mailbox *preload_turn_touch(struct preload_turn *turn);
/* Returns whether the holder works. */
bool preload_turn_check(struct preload_turn *turn);
/* Counts a file that is no longer large. After the last one, the slot is free. `closed` tells
 * whether the program has closed the file. */
void preload_turn_leave(struct preload_turn *turn, bool closed);

/* ---- Starting the holder (start.c) ----------------------------------------------------------- */

/* Memory of a mailbox. It is a whole number of pages on all machines, because the holder's memory
 * replaces it. */
union preload_box {
	struct mailbox box;
	char pages[65536];
};

/* Starts a holder, whose mailbox then replaces the memory of `box`. */
bool preload_start_holder(union preload_box *box);

/* ---- Files (files.c) ------------------------------------------------------------------------- */

enum { PRELOAD_FILES = 65536 /* larger descriptors pass */ };

enum preload_kind {
	PRELOAD_NEW,  /* nothing is known about the descriptor */
	PRELOAD_SEEN, /* half of the growth has been written to it */
	PRELOAD_LARGE /* it is a large sequential write */
};

struct preload_file {
	_Atomic uint64_t bytes; /* bytes written since the last look */
	_Atomic uint32_t kind;
	_Atomic uint32_t looking; /* 1 while a thread uses the members below */
	struct preload_turn *_Atomic turn;
	dev_t device;
	ino_t inode;
	int64_t size, position; /* of the file at the last look */
};

/* The table of descriptors. One is looked at after so many bytes, and before a call that writes the
 * second number of bytes at once. 0 bytes: the library does nothing. */
extern struct preload_file preload_files[PRELOAD_FILES];
extern uint64_t preload_look_bytes, preload_large_bytes;

/* Begins to follow the files of this process. */
void preload_files_prepare(void);
/* Looks at a descriptor to which `bytes` bytes will be written. Returns the mailbox for
 * preload_end(), or NULL if the call needs no end. */
struct mailbox *preload_look(int fd, uint64_t bytes);
/* Returns the mailbox of a call that does not write but belongs to a large file, like fsync(). */
struct mailbox *preload_touch(int fd);
/* Forgets a descriptor that the program has closed. */
void preload_forget(int fd);

/* Counts a call that writes, before it begins. This is all that a small write costs. */
static inline struct mailbox *preload_begin(int fd, uint64_t bytes)
{
	struct preload_file *file;
	uint64_t written;

	if ((unsigned)fd >= PRELOAD_FILES || !preload_look_bytes)
		return NULL;
	file = &preload_files[fd];
	written = atomic_load_explicit(&file->bytes, memory_order_relaxed);
	if (written >= preload_look_bytes || bytes >= preload_large_bytes ||
	    atomic_load_explicit(&file->kind, memory_order_relaxed) == PRELOAD_LARGE)
		return preload_look(fd, bytes);
	atomic_store_explicit(&file->bytes, written + bytes, memory_order_relaxed);
	return NULL;
}

/* Ends a call that preload_begin() began. */
static inline void preload_end(struct mailbox *box)
{
	if (box)
		atomic_fetch_sub(&box->calls, 1);
}

#endif
