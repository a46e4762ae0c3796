/* SPDX-License-Identifier: Apache-2.0 */
/* Runs the tests of a program with libcheck and reports in TAP, which meson reads. */
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
 * Sets one generous time-out for all tests. libcheck's 4 s are too short on a busy machine; only a
 * test that hangs reaches this limit. No test depends on the value.
 */
__attribute__((constructor)) static void check_set_timeout(void)
{
	setenv("CK_DEFAULT_TIMEOUT", getenv("IOSHAPE_TEST_LONG") ? "1800" : "300", 0);
}

/*
 * Test cases whose tests register themselves. TEST(case, name) defines a function that check_run()
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

static struct check_test *check_tests;

/* Registers a test, in the order of the source lines. */
static inline void check_add(struct check_test *added)
{
	struct check_test **link = &check_tests;

	while (*link && (*link)->test->line <= added->test->line)
		link = &(*link)->next;
	added->next = *link;
	*link = added;
}

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

static inline void check_make_case(struct test_case *one, Suite *suite)
{
	one->made = tcase_create(one->name);
	if (one->start || one->stop)
		tcase_add_unchecked_fixture(one->made, one->start, one->stop);
	if (one->setup || one->teardown)
		tcase_add_checked_fixture(one->made, one->setup, one->teardown);
	if (one->tags)
		tcase_set_tags(one->made, one->tags);
	suite_add_tcase(suite, one->made);
}

static inline int check_main(Suite *suite)
{
	SRunner *runner = srunner_create(suite);
	int failed;

	srunner_set_tap(runner, "-");
	srunner_run_all(runner, CK_SILENT);
	/* No test ran if the selected tags do not exist (any longer): that is a failure. */
	failed = srunner_ntests_run(runner) > 0 ? srunner_ntests_failed(runner) : 1;
	srunner_free(runner);
	return failed ? EXIT_FAILURE : EXIT_SUCCESS;
}

/* Runs all registered tests of the program. Returns its exit status. */
static inline int check_run(const char *name)
{
	Suite *suite = suite_create(name);

	for (struct check_test *one = check_tests; one; one = one->next) {
		if (!one->in->made)
			check_make_case(one->in, suite);
		tcase_add_loop_test(one->in->made, one->test, one->begin, one->end);
	}
	return check_main(suite);
}

#endif
