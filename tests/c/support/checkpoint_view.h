/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Functions with which tests inspect the checkpoints of a group in "runs" below the working
 * directory.
 */
#ifndef TESTS_SUPPORT_CHECKPOINT_VIEW_H
#define TESTS_SUPPORT_CHECKPOINT_VIEW_H

#include "support/check_main.h"
#include "support/checkpoint_case.h"
#include "support/open_context.h"

#include <ioshape/group.h>
#include <ioshape/ioshape.h>

#include <unistd.h>

#define PLACE(step) "runs/step-000000000" #step

static struct ioshape_context *context;
static struct base_error error;
static char logged[4096];

static inline void take_log(void *user, enum ioshape_log_level level, const char *line)
{
	size_t length = strlen(logged);

	(void)user;
	if (level <= IOSHAPE_LOG_WARNING)
		snprintf(logged + length, sizeof(logged) - length, "%s\n", line);
}

static inline struct ioshape_context *open_context(void)
{
	struct ioshape_context_options options = IOSHAPE_CONTEXT_OPTIONS_INIT;
	struct ioshape_context *opened;

	options.coordinator = "open";
	options.log = take_log;
	ck_assert_int_eq(
		open_context_with(&opened, &options,
				  (struct test_rules){ .block_bytes = 64 << 10, .queue_depth = 4 }),
		0);
	return opened;
}

static inline void setup(void)
{
	scratch_setup();
	ck_assert_int_eq(chdir(scratch_directory()), 0);
	context = open_context();
	memset(&error, 0, sizeof(error));
	*logged = 0;
}

static inline void teardown(void)
{
	ioshape_context_free(context);
	ck_assert_int_eq(chdir("/"), 0);
	scratch_teardown();
}

static inline const char *message(void)
{
	return ioshape_last_error()->sentence;
}

static inline struct ioshape_checkpoint *open_latest(void)
{
	struct ioshape_checkpoint *checkpoint;

	ck_assert_msg(!ioshape_checkpoint_open(context, "runs", IOSHAPE_LATEST, &checkpoint), "%s",
		      message());
	return checkpoint;
}

static inline uint64_t step_of(struct ioshape_checkpoint *checkpoint)
{
	struct ioshape_checkpoint_info info = { .size = sizeof(info) };

	ck_assert_int_eq(ioshape_checkpoint_get_info(checkpoint, &info), 0);
	return info.step;
}

static inline uint64_t latest(void)
{
	struct ioshape_checkpoint *checkpoint = open_latest();
	uint64_t step = step_of(checkpoint);

	ioshape_checkpoint_free(checkpoint);
	return step;
}

/* Returns the steps of all checkpoints as text: "1 2 3 ". */
static inline const char *steps(void)
{
	static char text[256];
	uint64_t *found;
	size_t count, length = 0;

	ck_assert_msg(!ioshape_checkpoint_list(context, "runs", &found, &count), "%s", message());
	*text = 0;
	for (size_t i = 0; i < count; i++)
		length += (size_t)snprintf(text + length, sizeof(text) - length, "%llu ",
					   (unsigned long long)found[i]);
	ioshape_free(found);
	return text;
}

#endif
