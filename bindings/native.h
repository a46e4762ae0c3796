/* SPDX-License-Identifier: Apache-2.0 */
/* Stands at the top of the extension's source, which cffi writes. */
#include <ioshape/ioshape.h>

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
