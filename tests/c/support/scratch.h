/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A directory for one test, and functions for files in it. It is below $IOSHAPE_TEST_DIR, or below
 * the working directory of the test (meson: the build directory). Direct I/O needs a real disk, and
 * /tmp may be in memory.
 */
#ifndef TESTS_SUPPORT_SCRATCH_H
#define TESTS_SUPPORT_SCRATCH_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

/*
 * Make and remove the directory around each test of a test_case. The directory of a failed test is
 * kept. Contexts use slots in a folder beside it.
 */
void scratch_setup(void);
void scratch_teardown(void);

/* Returns the directory of this test. */
const char *scratch_directory(void);

/*
 * Returns the path of NAME in the directory, in one of a few static buffers that are used in turn.
 */
const char *scratch_path(const char *name);

/* Returns whether files in the directory can be opened for direct I/O. */
bool scratch_direct(void);

/* Write, read and compare whole files. The test fails if this fails. */
void scratch_write(const char *path, const void *data, size_t bytes);
uint8_t *scratch_read(const char *path, size_t *bytes); /* caller frees */
bool scratch_same(const char *path, const void *data, size_t bytes);

/* Drops the cached pages of a file. */
void scratch_evict(const char *path);

/* Count the names in a directory without "." and "..", and those of temporary files of saves. */
unsigned scratch_entries(const char *directory);
unsigned scratch_temporaries(const char *directory);

/* Removes a directory and all its contents. */
void scratch_remove(const char *directory);

/* Returns the number of open descriptors of this process. A save must not change it. */
unsigned scratch_descriptors(void);

/*
 * Runs `body` in a forked child, whose exit status is its result. Returns the status from
 * waitpid().
 */
int scratch_in_child(int (*body)(void *), void *argument);

/*
 * Ends a child like _exit(), but hidden from valgrind. Memory that only the parent's threads refer
 * to is unreachable in the child, and valgrind would report leaks.
 */
void scratch_leave_child(int status) __attribute__((noreturn));

/*
 * Returns whether the test runs under valgrind, which reports errors that a test makes on purpose.
 */
bool scratch_under_valgrind(void);

/* Returns how often to repeat the code of a test: fewer times under valgrind, which is slow. */
unsigned scratch_rounds(unsigned rounds);

/* Returns whether $IOSHAPE_TEST_LONG is set: tests may take minutes. */
bool scratch_long(void);

#endif
