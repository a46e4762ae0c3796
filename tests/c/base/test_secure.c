/* SPDX-License-Identifier: Apache-2.0 */
/* A set-group-ID program ignores settings in its user's environment. */
#define _GNU_SOURCE
#include "base/base.h"
#include "slots/slots.h"
#include "support/check_main.h"
#include "support/scratch.h"

#include <ioshape/group.h>

#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#define OTHER_GROUP 12345

/* Runs in that program. Returns 0 if no setting was taken. */
static int take_settings(void)
{
	struct ioshape_context_options options = { .size = sizeof(options) };
	struct slots_identity identity;
	struct base_error error = { 0 };

	if (base_settings_take(BASE_SETTINGS_CONTEXT, &options, &error))
		return 2;
	slots_identify(&identity, NULL, 0);
	return options.password_file || options.coordinator || !strcmp(identity.job, "taken");
}

static struct test_case all_case = { .name = "secure",
				     .setup = scratch_setup,
				     .teardown = scratch_teardown };

/* With and without set-group-ID. */
LOOP_TEST(all_case, settings_are_not_for_programs_with_more_rights, 0, 2)
{
	char program[4096];
	pid_t child;
	int status;

	/* Only root can make such a program, and valgrind does not honour set-group-ID. */
	if (geteuid() || scratch_under_valgrind())
		return;
	snprintf(program, sizeof(program), "cp /proc/%ld/exe '%s'", (long)getpid(),
		 scratch_path("program"));
	ck_assert_int_eq(system(program), 0);
	ck_assert_int_eq(chown(scratch_path("program"), 0, OTHER_GROUP), 0);
	ck_assert_int_eq(chmod(scratch_path("program"), _i ? 02755 : 0755), 0);
	child = fork();
	if (!child) {
		setenv("IOSHAPE_PASSWORD_FILE", "/etc/shadow", 1);
		setenv("IOSHAPE_COORDINATOR", "open", 1);
		setenv("SLURM_JOB_ID", "taken", 1);
		execl(scratch_path("program"), "program", "inside", (char *)NULL);
		_exit(99);
	}
	ck_assert_int_eq(waitpid(child, &status, 0), child);
	ck_assert(WIFEXITED(status));
	ck_assert_int_eq(WEXITSTATUS(status), !_i);
}

int main(int count, char **arguments)
{
	if (count > 1 && !strcmp(arguments[1], "inside"))
		return take_settings();
	return check_run();
}
