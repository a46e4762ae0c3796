/* SPDX-License-Identifier: Apache-2.0 */
/* What every unit test program ends with: runs one suite and reports in TAP, which meson reads. */
#ifndef TESTS_SUPPORT_CHECK_MAIN_H
#define TESTS_SUPPORT_CHECK_MAIN_H

#include <check.h>
#include <stdlib.h>

/* ck_assert() for inner loops: that one tells the parent process each time it is passed. */
#define REQUIRE(condition)                                                                         \
	do {                                                                                       \
		if (!(condition))                                                                  \
			ck_abort_msg("%s", #condition);                                            \
	} while (0)

/*
 * Only a test that hangs reaches its time-out, on a machine that does ten other things, too: so all
 * have the same one, and none has one of its own. libcheck's is 4 s. What a test checks does not
 * depend on it.
 */
__attribute__((constructor)) static void check_set_timeout(void)
{
	setenv("CK_DEFAULT_TIMEOUT", getenv("IOSHAPE_TEST_LONG") ? "1800" : "300", 0);
}

/* A case whose tests have the same set-up. */
static inline TCase *check_case(Suite *suite, const char *name, SFun setup, SFun teardown)
{
	TCase *added = tcase_create(name);

	tcase_add_checked_fixture(added, setup, teardown);
	suite_add_tcase(suite, added);
	return added;
}

/*
 * Tests that are found by themselves: TEST(case, name) is a function that check_run() runs.
 *
 *     static struct test_case waiting = { .name = "waiting", .setup = setup };
 *
 *     TEST(waiting, giving_up_leaves_the_queue)
 *     {
 *     }
 */
struct test_case {
	const char *name;
	void (*start)(void), (*stop)(void);     /* around all of its tests */
	void (*setup)(void), (*teardown)(void); /* around each */
	const char *tags;
	TCase *made;
};

struct check_test {
	struct check_test *next;
	struct test_case *in;
	const TTest *test;
	int begin, end; /* of _i */
};

static struct check_test *check_tests;

/* In the order of their lines. */
static inline void check_add(struct check_test *added)
{
	struct check_test **link = &check_tests;

	while (*link && (*link)->test->line <= added->test->line)
		link = &(*link)->next;
	added->next = *link;
	*link = added;
}

/* Makes a function a test, of one more case perhaps. */
#define CHECK_ADD(case_, name_, begin_, end_)                                                      \
	__attribute__((constructor)) static void add_##name_##_to_##case_(void)                    \
	{                                                                                          \
		static const TTest check_this = { #name_, name_, __FILE__, __LINE__ };             \
		static struct check_test check_added = { NULL, &(case_), &check_this, begin_,      \
							 end_ };                                   \
                                                                                                   \
		check_add(&check_added);                                                           \
	}

/* For each _i from `begin` to before `end`. */
#define LOOP_TEST(case_, name_, begin_, end_)                                                      \
	static void name_(int _i);                                                                 \
	CHECK_ADD(case_, name_, begin_, end_)                                                      \
	static void name_(int _i __attribute__((unused)))

#define TEST(case_, name_) LOOP_TEST(case_, name_, 0, 1)

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
	/* Tags of a part that nothing has any longer would select nothing. */
	failed = srunner_ntests_run(runner) > 0 ? srunner_ntests_failed(runner) : 1;
	srunner_free(runner);
	return failed ? EXIT_FAILURE : EXIT_SUCCESS;
}

/* All tests of this program. */
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
