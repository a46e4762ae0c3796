/* SPDX-License-Identifier: Apache-2.0 */
/* Stands at the top of the extension's source, which cffi writes. */
#include <ioshape/ioshape.h>
#include <ioshape/operator.h>
#include <ioshape/probe.h>

/* Not public; the package has the library inside. */
#include "base/job.h"

#include <stdlib.h>

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
