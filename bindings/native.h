/* SPDX-License-Identifier: Apache-2.0 */
/* Stands at the top of the extension's source, which cffi writes. */
#include <ioshape/group.h>
#include <ioshape/ioshape.h>
#include <ioshape/slots.h>
#include <ioshape/tier.h>

/* Not public; the package has the library inside. */
#include "internal.h"

#include <stdatomic.h>
#include <stdbool.h>
#include <stdlib.h>
#include <unistd.h>

/* The one table of settings, for Python. What people read of a choice is made there of its words.
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
#define SWITCH(owner, name, ...) NUMBER(owner, name, "switch", 0, 0, "`yes`, `no`", __VA_ARGS__)
#define RETIRED(name, why) NUMBER(PACKAGE, name, "retired", 0, 0, "", "", why, "")

/* For the numbers in the table. */
#define KIB (UINT64_C(1) << 10)
#define MIB (UINT64_C(1) << 20)

static const struct base_setting_row ioshape_py_settings[] = {
#include "base/settings.def"
};

/*
 * What Python owns is freed by C alone. Between lines of Python a Ctrl-C would be raised, and be
 * lost: nobody can catch it there. `keep` is a handle of what must live until then.
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
FREED_BY_C(generation)
FREED_BY_C(tier)

static void ioshape_py_free_directory(void *keep, struct save_directory **out)
{
	(void)keep;
	save_directory_free(*out);
}

/* In Python; defined below, by cffi. */
static int ioshape_py_progress(void *user, enum ioshape_phase phase, uint64_t done_bytes,
			       uint64_t total_bytes);

/*
 * While the caller's thread stages, Python must look for signals now and then; when the library's
 * thread writes, it must not be asked for the GIL.
 */
static int ioshape_py_progress_of_stage(void *user, enum ioshape_phase phase, uint64_t done_bytes,
					uint64_t total_bytes)
{
	if (phase != IOSHAPE_PHASE_STAGE)
		return 0;
	return ioshape_py_progress(user, phase, done_bytes, total_bytes);
}

/* Of a drain in the background: it is not asked for the GIL, and ends when somebody says so. */
static int ioshape_py_progress_until(void *user, enum ioshape_phase phase, uint64_t done_bytes,
				     uint64_t total_bytes)
{
	(void)phase, (void)done_bytes, (void)total_bytes;
	return *(volatile int *)user;
}

/* In Python, the same. */
static void ioshape_py_on_log(void *user, enum ioshape_log_level level, const char *message);

static atomic_bool log_ended;
static atomic_uint log_calls; /* under way */

/*
 * The library logs from threads of its own, at any time, and with locks held. A thread that wants
 * the GIL while Python ends, never returns: whoever wants such a lock then would wait for ever.
 */
static void ioshape_py_log(void *user, enum ioshape_log_level level, const char *message)
{
	atomic_fetch_add(&log_calls, 1);
	if (!atomic_load(&log_ended))
		ioshape_py_on_log(user, level, message);
	atomic_fetch_sub(&log_calls, 1);
}

/* Before Python ends. Calls under way are waited for, but not a handler that has got stuck. */
static void ioshape_py_end_log(void)
{
	atomic_store(&log_ended, true);
	for (int i = 0; i < 1000 && atomic_load(&log_calls); i++)
		usleep(1000);
}

static int lost_status; /* 0: nothing is lost, or this is not the process that lost it */

static void change_status(int status, void *unused)
{
	(void)unused;
	/* In glibc the other handlers still run, once each, and the last status counts. */
	if (!status && lost_status)
		exit(lost_status);
}

/* Python asks nobody for its exit status, and only C sees which one it is. */
static void ioshape_py_end_with(int status)
{
	static int registered;

	lost_status = status;
	if (status && !registered)
		registered = !on_exit(change_status, NULL);
}
