/* SPDX-License-Identifier: Apache-2.0 */
/* Stands at the top of the extension's source, which cffi writes. */
#include <ioshape/ioshape.h>
#include <ioshape/operator.h>
#include <ioshape/probe.h>

/* Not public; the package has the library inside. */
#include "base/base.h"
#include "base/job.h"

#include <stdlib.h>

/* The one table of settings, for Python. What people read of a choice is made there of its words.
 */
struct ioshape_py_setting {
	const char *name, *owner, *kind, *words;
	uint64_t least, most;
	const char *values, *otherwise, *about, *user;
};

#define NUMBER(owner, name, kind, least, most, values, otherwise, about, user)                     \
	{ #name, #owner, kind, "", least, most, values, otherwise, about, user },
#define CHOICE(owner, name, words, about, user)                                                    \
	{ #name, #owner, "choice", words, 0, 0, "", "", about, user },
#define BYTES(owner, name, ...) NUMBER(owner, name, "bytes", __VA_ARGS__)
#define POWER(owner, name, ...) NUMBER(owner, name, "power", __VA_ARGS__)
#define COUNT(owner, name, least, most, ...)                                                       \
	NUMBER(owner, name, "count", least, most, #least " to " #most, __VA_ARGS__)
#define TEXT(owner, name, ...) NUMBER(owner, name, "text", 1, __VA_ARGS__)
#define NAME(owner, name, ...) NUMBER(owner, name, "name", 1, __VA_ARGS__)
#define PATH(owner, name, ...) NUMBER(owner, name, "path", 1, __VA_ARGS__)
#define SWITCH(owner, name, ...) NUMBER(owner, name, "switch", 0, 0, "`yes`, `no`", __VA_ARGS__)
#define SECONDS(owner, name, ...) NUMBER(owner, name, "seconds", 0, 0, __VA_ARGS__)

static const struct ioshape_py_setting ioshape_py_settings[] = {
#include "base/settings.def"
};

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
