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

/* A case whose tests have the same set-up. */
static inline TCase *check_case(Suite *suite, const char *name, SFun setup, SFun teardown,
				double timeout_s)
{
	TCase *added = tcase_create(name);

	tcase_add_checked_fixture(added, setup, teardown);
	tcase_set_timeout(added, timeout_s);
	suite_add_tcase(suite, added);
	return added;
}

static inline int check_main(Suite *suite)
{
	SRunner *runner = srunner_create(suite);
	int failed;

	/* What a trial finds differs from one run to the next; its own tests ask for it. */
	setenv("IOSHAPE_CALIBRATE", "off", 0);
	srunner_set_tap(runner, "-");
	srunner_run_all(runner, CK_SILENT);
	/* Tags of a part that nothing has any longer would select nothing. */
	failed = srunner_ntests_run(runner) > 0 ? srunner_ntests_failed(runner) : 1;
	srunner_free(runner);
	return failed ? EXIT_FAILURE : EXIT_SUCCESS;
}

#endif
