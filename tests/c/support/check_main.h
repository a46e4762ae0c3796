/* SPDX-License-Identifier: Apache-2.0 */
/* Tests of a program, which libcheck runs and reports in TAP, which meson reads. */
#ifndef TESTS_SUPPORT_CHECK_MAIN_H
#define TESTS_SUPPORT_CHECK_MAIN_H

#include <check.h>
#include <stdlib.h>

/*
 * Replaces ck_assert() in inner loops: ck_assert() writes to the parent process whenever it passes.
 */
#define REQUIRE(condition)                                                                         \
	do {                                                                                       \
		if (!(condition))                                                                  \
			ck_abort_msg("%s", #condition);                                            \
	} while (0)

/*
 * Test cases whose tests register themselves. TEST(case, name) defines a function that the program
 * runs:
 *
 *     static struct test_case waiting = { .name = "waiting", .setup = setup };
 *
 *     TEST(waiting, giving_up_leaves_the_queue)
 *     {
 *     }
 */
struct test_case {
	const char *name;
	void (*start)(void), (*stop)(void);     /* once around all tests of the case */
	void (*setup)(void), (*teardown)(void); /* around each test */
	const char *tags;
	TCase *made;
};

struct check_test {
	struct check_test *next;
	struct test_case *in;
	const TTest *test;
	int begin, end; /* range of _i */
};

#ifdef __cplusplus
extern "C" {
#endif
/* Registers a test, in the order of the source lines. */
void check_add(struct check_test *added);

/* Runs all registered tests. Returns the exit status of the program. main() calls it. */
int check_run(void);
#ifdef __cplusplus
}
#endif

/*
 * Makes a function a test of this case, for each _i from `begin` to `end` - 1. A function may be a
 * test of several cases.
 */
#define CHECK_ADD(case_, name_, begin_, end_)                                                      \
	__attribute__((constructor)) static void add_##name_##_to_##case_(void)                    \
	{                                                                                          \
		static const TTest check_this = { #name_, name_, __FILE__, __LINE__ };             \
		static struct check_test check_added = { NULL, &(case_), &check_this, 0, 0 };      \
                                                                                                   \
		check_added.begin = (int)(begin_);                                                 \
		check_added.end = (int)(end_);                                                     \
		check_add(&check_added);                                                           \
	}

#define LOOP_TEST(case_, name_, begin_, end_)                                                      \
	static void name_(int _i);                                                                 \
	CHECK_ADD(case_, name_, begin_, end_)                                                      \
	static void name_(int _i __attribute__((unused)))

#define TEST(case_, name_) LOOP_TEST(case_, name_, 0, 1)

/* Defines a test that the program has only if the condition is true when it starts. */
#define TEST_IF(case_, name_, condition_) LOOP_TEST(case_, name_, 0, !!(condition_))

#endif
