/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A directory for one test, and files in it. It lies under $IOSHAPE_TEST_DIR, or else where the
 * test was started (meson: the build directory), because direct I/O wants a real disk and /tmp may
 * be none.
 */
#ifndef TESTS_SUPPORT_SCRATCH_H
#define TESTS_SUPPORT_SCRATCH_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

/* For tcase_add_checked_fixture(): a fresh directory for each test, removed after it unless it
 * failed. Contexts take turns in a folder of their own beside it. */
void scratch_setup(void);
void scratch_teardown(void);

/* The directory of this test. */
const char *scratch_directory(void);

/* "NAME in the directory". One of a few buffers that take turns. */
const char *scratch_path(const char *name);

/* Whether files in it can be opened for direct I/O. */
bool scratch_direct(void);

/* Whole files; tests fail where these fail. */
void scratch_write(const char *path, const void *data, size_t bytes);
uint8_t *scratch_read(const char *path, size_t *bytes); /* to be freed */
bool scratch_same(const char *path, const void *data, size_t bytes);

/* Drops what the page cache holds of a file. */
void scratch_evict(const char *path);

/* Names in a directory, "." and ".." not counted; and those of temporary files of saves among them.
 */
unsigned scratch_entries(const char *directory);
unsigned scratch_temporaries(const char *directory);

/* Removes a directory and all in it. */
void scratch_remove(const char *directory);

/* Open descriptors of this process: a save must leave as many as it found. */
unsigned scratch_descriptors(void);

/* Runs `body` in a forked child and returns what waitpid() said. Its result is the child's exit
 * status. */
int scratch_in_child(int (*body)(void *), void *argument);

/*
 * Ends a child as by _exit(), but unseen by valgrind: what only the parent's threads knew of is
 * lost in a child, and would be called a leak.
 */
void scratch_leave_child(int status) __attribute__((noreturn));

/* valgrind complains of what a test does on purpose. */
bool scratch_under_valgrind(void);

/* Rounds of what is the same code each time: fewer where valgrind makes each slow. */
unsigned scratch_rounds(unsigned rounds);

/* $IOSHAPE_TEST_LONG: tests may take minutes. */
bool scratch_long(void);

#endif
