/* SPDX-License-Identifier: Apache-2.0 */
/* Keeps a process on one core: contexts that it opens copy with one thread. */
#ifndef TESTS_SUPPORT_ONE_CORE_H
#define TESTS_SUPPORT_ONE_CORE_H

#include <check.h>
#include <sched.h>

/* Sets the affinity to the first allowed core. The test's source needs _GNU_SOURCE. */
static inline void keep_to_one_core(void)
{
	cpu_set_t cores, one;
	int core = 0;

	ck_assert_int_eq(sched_getaffinity(0, sizeof(cores), &cores), 0);
	while (!CPU_ISSET(core, &cores))
		core++;
	CPU_ZERO(&one);
	CPU_SET(core, &one);
	ck_assert_int_eq(sched_setaffinity(0, sizeof(one), &one), 0);
}

#endif
