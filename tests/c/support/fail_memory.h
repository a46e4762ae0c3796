/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Makes allocations fail. Link fail_memory.c with its linker flags (see tests/meson.build):
 * allocations of the library and of the test then pass through its wrappers.
 */
#ifndef TESTS_SUPPORT_FAIL_MEMORY_H
#define TESTS_SUPPORT_FAIL_MEMORY_H

/* Makes the nth allocation from now on and all later ones fail; 1 is the next one, 0 means none. */
void fail_memory_at(unsigned long nth);

/*
 * Lets `decide` choose which allocations fail. It gets the name of the function and the return
 * address of the call.
 */
typedef int (*fail_memory_fn)(const char *name, const void *site);
void fail_memory_by(fail_memory_fn decide);

/* Returns the number of allocations since fail_memory_at(), failed ones included. */
unsigned long fail_memory_count(void);

#endif
