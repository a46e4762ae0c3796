/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Two ranks save a checkpoint on a tier, and one rank dies before any of its calls, or one of its
 * calls fails. A checkpoint that a rank reported as saved reaches its destination, whichever rank
 * is left. It arrives complete or not at all.
 */
#define _GNU_SOURCE
#include "support/check_main.h"
#include "support/sample.h"
#include "support/tier_calls.h"

#include <ioshape/group.h>

#include <errno.h>
#include <signal.h>
#include <stdbool.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#define RANKS 2

/* Memory of all processes: ranks whose save succeeded. */
static struct {
	bool saved[RANKS];
} * shared;

static void setup(void)
{
	shared = tier_calls_setup(sizeof(*shared));
}

static struct test_case tests = { .name = "groups",
				  .setup = setup,
				  .teardown = tier_calls_teardown };

/* ---- In a child process ---------------------------------------------------------------------- */

struct harm {
	uint32_t victim;
	enum calls_mode mode;
	unsigned long nth;
	uint64_t step; /* 1, or a later step */
};

static int save(const struct harm *harm, uint32_t rank)
{
	struct ioshape_group_options options = IOSHAPE_GROUP_OPTIONS_INIT;
	struct ioshape_group *group = NULL;
	struct sample sample;
	int ret;

	sample_make(&sample, rank, 50000);
	options.rank = rank;
	options.ranks = options.local_ranks = RANKS;
	options.mode = IOSHAPE_MODE_EACH;
	options.token = scratch_directory();
	options.deadline_ms = 20000;
	options.tier = tier;
	ret = ioshape_group_open(context, "there", &options, &group);
	if (harm && rank == harm->victim)
		calls_begin(harm->mode, harm->nth, EIO);
	if (!ret)
		ret = ioshape_group_save_tensors(group, harm ? harm->step : 1, sample.tensors,
						 sample.count, NULL, NULL);
	calls_end();
	shared->saved[rank] = !ret;
	ioshape_group_free(group);
	sample_free(&sample);
	return ret;
}

static pid_t start(const struct harm *harm, uint32_t rank)
{
	pid_t child;

	fflush(NULL);
	child = fork();
	ck_assert_int_ge(child, 0);
	if (!child) {
		int ret = tier_calls_open("tier");

		if (!ret)
			ret = save(harm, rank);
		tier_calls_close();
		scratch_leave_child(ret != 0);
	}
	return child;
}

static int drain(void *unused)
{
	struct ioshape_tier_copy *copies;
	size_t count, waiting = 0;
	int ret = tier_calls_open("tier");

	(void)unused;
	if (!ret)
		ret = ioshape_tier_drain(tier, NULL);
	if (!ret)
		ret = ioshape_tier_list(tier, &copies, &count);
	for (size_t i = 0; !ret && i < count; i++)
		waiting += copies[i].number != 0;
	if (!ret)
		free(copies);
	tier_calls_close();
	scratch_leave_child(ret || waiting);
}

static int verify(void *argument)
{
	const uint64_t *step = argument;
	struct ioshape_checkpoint *checkpoint = NULL;
	int ret = tier_calls_open("tier");

	if (!ret)
		ret = ioshape_checkpoint_open(context, "there", *step, &checkpoint);
	if (!ret)
		ret = ioshape_checkpoint_verify(checkpoint, NULL, NULL);
	ioshape_checkpoint_free(checkpoint);
	tier_calls_close();
	scratch_leave_child(ret == -ENOENT ? 2 : ret != 0);
}

/* ---- Each call ------------------------------------------------------------------------------- */

static void begin_scene(void)
{
	pid_t children[RANKS];
	int status;

	scratch_remove("tier");
	scratch_remove("there");
	ck_assert_int_eq(mkdir("tier", 0777), 0);
	ck_assert_int_eq(mkdir("there", 0777), 0);
	for (uint32_t rank = 0; rank < RANKS; rank++)
		children[rank] = start(NULL, rank);
	for (uint32_t rank = 0; rank < RANKS; rank++) {
		ck_assert_int_eq(waitpid(children[rank], &status, 0), children[rank]);
		ck_assert_int_eq(status, 0);
	}
	memset(shared, 0, sizeof(*shared));
}

static bool is_there(uint64_t step)
{
	const int status = scratch_in_child(verify, &step);

	ck_assert_msg(WIFEXITED(status) && WEXITSTATUS(status) != 1, "step %d is torn", (int)step);
	return !WEXITSTATUS(status);
}

/* Runs both ranks, with harm at the nth call of the victim. Returns whether that call exists. */
static bool harm_once(struct harm *harm)
{
	pid_t children[RANKS];
	int status;

	begin_scene();
	for (uint32_t rank = 0; rank < RANKS; rank++)
		children[rank] = start(harm, rank);
	for (uint32_t rank = 0; rank < RANKS; rank++) {
		ck_assert_int_eq(waitpid(children[rank], &status, 0), children[rank]);
		ck_assert_msg(WIFEXITED(status) ||
				      (rank == harm->victim && WTERMSIG(status) == SIGKILL),
			      "%lu: %x", harm->nth, (unsigned)status);
	}
	/* If the tier fails, the checkpoint is saved directly. */
	ck_assert_msg(harm->mode == CALLS_FAIL || !is_there(harm->step),
		      "%lu: nobody has drained it", harm->nth);
	ck_assert_int_eq(scratch_in_child(drain, NULL), 0);
	for (uint32_t rank = 0; rank < RANKS; rank++)
		ck_assert_msg(is_there(harm->step) || !shared->saved[rank],
			      "%lu: what rank %u has saved is lost", harm->nth, rank);
	ck_assert_msg(is_there(1), "%lu: the one before it is lost", harm->nth);
	return harm->nth <= atomic_load(&calls_record()->count);
}

static unsigned long step_of(enum calls_mode mode)
{
	return scratch_long() ? 1 : mode == CALLS_KILL ? 5 : 13;
}

LOOP_TEST(tests, whichever_rank_dies_at_any_call_what_was_saved_is_drained, 0, RANKS)
{
	struct harm harm = { .victim = (uint32_t)_i, .mode = CALLS_KILL, .nth = 1, .step = 2 };

	while (harm_once(&harm))
		harm.nth += step_of(harm.mode);
	ck_assert_uint_gt(harm.nth, 50);
}

LOOP_TEST(tests, whatever_call_of_a_rank_fails_what_was_saved_is_drained, 0, RANKS)
{
	struct harm harm = { .victim = (uint32_t)_i, .mode = CALLS_FAIL, .nth = 1, .step = 2 };

	while (harm_once(&harm))
		harm.nth += step_of(harm.mode);
}
