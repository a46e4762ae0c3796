/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Memory that runs out when a test wants it to. Link fail_memory.c with the flags that go with it
 * (see tests/meson.build): allocations of the library and of the test then pass through here.
 */
#ifndef TESTS_SUPPORT_FAIL_MEMORY_H
#define TESTS_SUPPORT_FAIL_MEMORY_H

/* The nth allocation from now on fails, 1 being the next, and all behind it; 0: none. */
void fail_memory_at(unsigned long nth);

/* Only the nth fails. */
void fail_memory_once_at(unsigned long nth);

/* Instead: whether it fails is up to this, told its name and where its caller goes on. */
typedef int (*fail_memory_fn)(const char *name, const void *site);
void fail_memory_by(fail_memory_fn decide);

/* Allocations since fail_memory_at(), those that failed included. */
unsigned long fail_memory_count(void);

#endif
