/* SPDX-License-Identifier: Apache-2.0 */
/* The main() of all programs that include check_main.h. */
#include "support/check_main.h"

static struct check_test *tests;

void check_add(struct check_test *added)
{
	struct check_test **link = &tests;

	while (*link && (*link)->test->line <= added->test->line)
		link = &(*link)->next;
	added->next = *link;
	*link = added;
}

static void make_case(struct test_case *one, Suite *suite)
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

int check_run(void)
{
	Suite *suite = suite_create("");
	SRunner *runner;
	int failed;

	/*
	 * One generous time-out for all tests. libcheck's 4 s are too short on a busy machine; only
	 * a test that hangs reaches this limit. No test depends on the value.
	 */
	setenv("CK_DEFAULT_TIMEOUT", getenv("IOSHAPE_TEST_LONG") ? "1800" : "300", 0);
	for (struct check_test *one = tests; one; one = one->next) {
		if (!one->in->made)
			make_case(one->in, suite);
		tcase_add_loop_test(one->in->made, one->test, one->begin, one->end);
	}
	runner = srunner_create(suite);
	srunner_set_tap(runner, "-");
	srunner_run_all(runner, CK_SILENT);
	/* No test ran if the selected tags do not exist (any longer): that is a failure. */
	failed = srunner_ntests_run(runner) > 0 ? srunner_ntests_failed(runner) : 1;
	srunner_free(runner);
	return failed ? EXIT_FAILURE : EXIT_SUCCESS;
}

/* A program may have a main() of its own. */
__attribute__((weak)) int main(void)
{
	return check_run();
}
