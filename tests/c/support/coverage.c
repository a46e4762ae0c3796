/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Writes coverage counters when a child of a test ends by _exit(), which the linker turns into this
 * function. gcov itself writes them only at exit(). A process that is killed writes none.
 */
#include <unistd.h>

void __gcov_dump(void);
void __real__exit(int status) __attribute__((noreturn));
void __wrap__exit(int status) __attribute__((noreturn));

void __wrap__exit(int status)
{
	__gcov_dump();
	__real__exit(status);
}
