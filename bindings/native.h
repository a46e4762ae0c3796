/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Prelude of the extension module ioshape._native: cffi includes it at the top of the C source that
 * it generates. It has the table of settings for Python, destructors, and small functions that must
 * be C.
 */
#include <ioshape/group.h>
#include <ioshape/ioshape.h>
#include <ioshape/slots.h>
#include <ioshape/tier.h>

/* The package contains the library, so it may use internal declarations. */
#include "internal.h"

#include <stdatomic.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/*
 * The table of settings (base/settings.def) as rows for Python. A choice has no list of values
 * here: Python makes the text for users from its words.
 */
#define NUMBER(owner, name, kind, least, most, values, otherwise, about, user)                     \
	{ #name, #owner, kind, "", least, most, values, otherwise, about, user },
#define CHOICE(owner, name, words, about, user)                                                    \
	{ #name, #owner, "choice", words, 0, 0, "", "", about, user },
#define BYTES(owner, name, ...) NUMBER(owner, name, "bytes", __VA_ARGS__)
#define COUNT(owner, name, least, most, ...)                                                       \
	NUMBER(owner, name, "count", least, most, #least " to " #most, __VA_ARGS__)
#define TEXT(owner, name, ...) NUMBER(owner, name, "text", 1, __VA_ARGS__)
#define NAME(owner, name, ...) NUMBER(owner, name, "name", 1, __VA_ARGS__)
#define PATH(owner, name, ...) NUMBER(owner, name, "path", 1, __VA_ARGS__)
#define RULES(owner, name, ...) NUMBER(owner, name, "rules", 1, __VA_ARGS__)
#define SWITCH(owner, name, ...) NUMBER(owner, name, "switch", 0, 0, "`yes`, `no`", __VA_ARGS__)
#define RETIRED(name, why) NUMBER(PACKAGE, name, "retired", 0, 0, "", "", why, "")

/* Units that the numbers in the table use. */
#define KIB (UINT64_C(1) << 10)
#define MIB (UINT64_C(1) << 20)

static const struct base_setting_row ioshape_py_settings[] = {
#include "base/settings.def"
};

/*
 * Defines a destructor of a C object that Python owns. It is C because a destructor in Python could
 * receive a Ctrl-C, and Python drops exceptions raised there. `keep` is unused: it is a handle that
 * keeps a Python object alive until the C object is freed.
 */
#define FREED_BY_C(name)                                                                           \
	static void ioshape_py_free_##name(void *keep, struct ioshape_##name **out)                \
	{                                                                                          \
		(void)keep;                                                                        \
		ioshape_##name##_free(*out);                                                       \
	}
FREED_BY_C(context)
FREED_BY_C(save)
FREED_BY_C(file)
FREED_BY_C(slot)
FREED_BY_C(reader)
FREED_BY_C(group)
FREED_BY_C(checkpoint)
FREED_BY_C(tier)

static void ioshape_py_free_directory(void *keep, struct save_directory **out)
{
	(void)keep;
	save_directory_free(*out);
}

static void ioshape_py_free_items(void *keep, struct save_items **out)
{
	(void)keep;
	save_items_free(*out);
}

/* Implemented in Python; cffi defines it further down in the generated source. */
static int ioshape_py_progress(void *user, enum ioshape_phase phase, uint64_t done_bytes,
			       uint64_t total_bytes);

/*
 * Calls Python's progress function in the staging phase only. The caller's thread stages, and
 * Python must handle signals meanwhile. The later phases run on a thread of the library, which must
 * not wait for the GIL.
 */
static int ioshape_py_progress_of_stage(void *user, enum ioshape_phase phase, uint64_t done_bytes,
					uint64_t total_bytes)
{
	if (phase != IOSHAPE_PHASE_STAGE)
		return 0;
	return ioshape_py_progress(user, phase, done_bytes, total_bytes);
}

/*
 * Progress function of a background drain, which must not wait for the GIL. Returns the flag that
 * `user` points to; the drain ends when another thread sets it.
 */
static int ioshape_py_progress_until(void *user, enum ioshape_phase phase, uint64_t done_bytes,
				     uint64_t total_bytes)
{
	(void)phase, (void)done_bytes, (void)total_bytes;
	return *(volatile int *)user;
}

/* Implemented in Python; cffi defines it further down in the generated source. */
static void ioshape_py_on_log(void *user, enum ioshape_log_level level, const char *message);

static atomic_bool log_ended;
static atomic_uint log_calls; /* calls of ioshape_py_log() under way */

/*
 * Passes a log message to Python, until ioshape_py_end_log() is called. The library logs from its
 * own threads and with locks held. A thread that asks for the GIL while Python shuts down never
 * returns, and others would wait for its locks for ever.
 */
static void ioshape_py_log(void *user, enum ioshape_log_level level, const char *message)
{
	atomic_fetch_add(&log_calls, 1);
	if (!atomic_load(&log_ended))
		ioshape_py_on_log(user, level, message);
	atomic_fetch_sub(&log_calls, 1);
}

/*
 * Ends logging before Python shuts down. Waits for calls under way, but at most about a second,
 * because a handler may be stuck.
 */
static void ioshape_py_end_log(void)
{
	atomic_store(&log_ended, true);
	for (int i = 0; i < 1000 && atomic_load(&log_calls); i++)
		usleep(1000);
}

/*
 * Copies the memory that `user` points to. Other processes may change it at any time. The checksums
 * are those of the copy, so the file is valid whatever they do.
 */
static int ioshape_py_copy(void *user, uint64_t offset, void *into, size_t bytes)
{
	memcpy(into, (const char *)user + offset, bytes);
	return 0;
}

static int lost_status; /* 0: no save was lost in this process */

static void change_status(int status, void *unused)
{
	(void)unused;
	/* glibc allows exit() in a handler: remaining handlers run once, the last status counts. */
	if (!status && lost_status)
		exit(lost_status);
}

/*
 * Replaces an exit status of 0 by `status`; 0 leaves it. It is C because Python code cannot see or
 * change the status with which the interpreter exits.
 */
static void ioshape_py_end_with(int status)
{
	static int registered;

	lost_status = status;
	if (status && !registered)
		registered = !on_exit(change_status, NULL);
}
