/* SPDX-License-Identifier: Apache-2.0 */
/* Engines that the kernel refuses, at the beginning or later in the life of the process. */
#define _GNU_SOURCE
#include "base/base.h"
#include "support/check_main.h"
#include "support/report_downgrade.h"
#include "support/sample.h"
#include "support/sandbox.h"
#include "support/scratch.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

static struct sample sample;
static uint8_t *new_file;
static size_t new_bytes;
static const char old_file[] = "what was there before";

static void save_first(void)
{
	struct ioshape_context *context =
		sample_context(IOSHAPE_ENGINE_BUFFERED, IOSHAPE_DIRECT_OFF);

	ck_assert_int_eq(sample_save(context, "file", &sample, NULL), 0);
	ioshape_context_free(context);
}

static void setup(void)
{
	scratch_setup();
	ck_assert_int_eq(chdir(scratch_directory()), 0);
	/* Nine blocks, so that some are in flight when others are done. */
	sample_make(&sample, 7, 400000);
	save_first();
	new_file = scratch_read("file", &new_bytes);
}

static void teardown(void)
{
	free(new_file);
	sample_free(&sample);
	ck_assert_int_eq(chdir("/"), 0);
	scratch_teardown();
}

/* ---- A kernel that stops taking requests ----------------------------------------------------- */

static int save_while_the_door_closes(void *argument)
{
	/* An alarm would be in the file, which is compared. */
	const int unset = setenv("IOSHAPE_EXAMINE", "unchanged=off", 1);
	struct ioshape_context *context =
		sample_context(IOSHAPE_ENGINE_AUTO, IOSHAPE_DIRECT_PREFER);
	struct ioshape_save_options options = IOSHAPE_SAVE_OPTIONS_INIT;
	struct ioshape_report report = IOSHAPE_REPORT_INIT;
	int ret;

	(void)argument;
	options.report = &report;
	options.metadata = &sample.metadata;
	if (unset ||
	    ioshape_save_tensors(context, "file", sample.tensors, sample.count, &options, NULL))
		return 1;
	if (strcmp(report.engine, "uring") != 0)
		return 0; /* io_uring is not available here */
	scratch_write("file", old_file, sizeof(old_file));
	if (sandbox_refuse(__NR_io_uring_enter, EPERM))
		return 2;
	ret = ioshape_save_tensors(context, "file", sample.tensors, sample.count, &options, NULL);
	if (ret != -EPERM || !scratch_same("file", old_file, sizeof(old_file)))
		return 3;
	/* One save fails; later ones use another engine and report it. */
	for (int i = 0; i < 2; i++) {
		ret = ioshape_save_tensors(context, "file", sample.tensors, sample.count, &options,
					   NULL);
		if (ret || !scratch_same("file", new_file, new_bytes))
			return 4;
		if (strcmp(report.engine, "threads") != 0 || !report.downgrade_count ||
		    !report_downgrade(&report, IOSHAPE_DOWNGRADE_ENGINE))
			return 5;
	}
	ioshape_context_free(context);
	return scratch_entries(".") == 1 ? 0 : 6;
}

static struct test_case doors = { .name = "sandboxes", .setup = setup, .teardown = teardown };

TEST(doors, a_context_survives_the_end_of_its_engine)
{
	ck_assert_int_eq(scratch_in_child(save_while_the_door_closes, NULL), 0);
}

static int save_without_uring(void *argument)
{
	struct ioshape_save_options options = IOSHAPE_SAVE_OPTIONS_INIT;
	struct ioshape_report report = IOSHAPE_REPORT_INIT;
	struct ioshape_context *context;

	options.report = &report;
	options.metadata = &sample.metadata;
	if (sandbox_refuse(*(int *)argument, EPERM))
		return 2;
	context = sample_context(IOSHAPE_ENGINE_AUTO, IOSHAPE_DIRECT_PREFER);
	if (ioshape_save_tensors(context, "file", sample.tensors, sample.count, &options, NULL))
		return 3;
	ioshape_context_free(context);
	if (!scratch_same("file", new_file, new_bytes))
		return 4;
	return !strcmp(report.engine, "threads") && report.downgrade_count == 1 &&
			       report_downgrade(&report, IOSHAPE_DOWNGRADE_ENGINE) ?
		       0 :
		       5;
}

TEST(doors, a_sandbox_without_io_uring_is_saved_in_and_reported)
{
	static int calls[] = { __NR_io_uring_setup, __NR_io_uring_enter };

	for (size_t i = 0; i < ARRAY_LENGTH(calls); i++)
		ck_assert_int_eq(scratch_in_child(save_without_uring, &calls[i]), 0);
}
