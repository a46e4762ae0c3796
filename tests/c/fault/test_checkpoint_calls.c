/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The order of the system calls that create and remove a checkpoint of a group.
 * tests/campaign/harm.c tries what a failure or a kill at each of them leaves.
 */
#define _GNU_SOURCE
#include "internal.h"
#include "support/calls.h"
#include "support/check_main.h"
#include "support/checkpoint_case.h"
#include "support/fail_memory.h"

#include <ioshape/group.h>
#include <ioshape/ioshape.h>

#include <errno.h>
#include <sys/wait.h>
#include <unistd.h>

static const struct scenario {
	bool replace; /* a checkpoint of the same step */
	bool no_swap; /* no exchange of names, as on NFS */
	bool no_locks;
} scenarios[] = {
	{ .replace = false },
	{ .replace = true },
	{ .replace = true, .no_swap = true },
	{ .replace = true, .no_swap = true, .no_locks = true },
};

static void setup(void)
{
	scratch_setup();
	ck_assert_int_eq(chdir(scratch_directory()), 0);
}

static void teardown(void)
{
	ck_assert_int_eq(chdir("/"), 0);
	scratch_teardown();
}

static struct test_case tests = { .name = "order", .setup = setup, .teardown = teardown };

LOOP_TEST(tests, the_order_of_calls_survives_a_power_failure, 0, (int)ARRAY_LENGTH(scenarios))
{
	const struct scenario *scenario = &scenarios[_i];
	long written, folder, placed, directory;
	struct base_error error = { 0 };

	io_machine_tag();
	ck_assert_int_eq(checkpoint_save(scenario->replace ? 7 : 1, "old", false, &error), 0);
	/* Denials cannot be undone, but each test is a process of its own. */
	if (scenario->no_swap)
		calls_deny("renameat2", EINVAL);
	if (scenario->no_locks)
		calls_deny("flock", EBADF);
	calls_begin(CALLS_COUNT, 0, 0);
	ck_assert_msg(!checkpoint_save(7, "new", false, &error), "%s", error.text);
	calls_end();
	/* The first fsync is that of the rank's file. */
	written = calls_find("fsync", (unsigned long)calls_find("fsync", 0) + 1);
	ck_assert_int_gt(written, 0);
	folder = calls_find("fsync directory", (unsigned long)written);
	ck_assert_int_gt(folder, written);
	placed = calls_find("renameat", (unsigned long)folder);
	ck_assert_int_gt(placed, folder);
	directory = calls_find("fsync directory", (unsigned long)placed);
	ck_assert_int_gt(directory, placed);
	/* The replaced checkpoint is removed only after the new name is durable. */
	if (scenario->replace)
		ck_assert_int_gt(calls_find("unlinkat", (unsigned long)placed), directory);
}

/*
 * The blocks of a removed file may be reused before its removal is durable. And removals inside a
 * directory may become durable before the new name of the directory. So each step of pruning must
 * be durable before the next one.
 */
TEST(tests, each_step_of_pruning_is_durable_before_the_next)
{
	struct ioshape_context_options context_options = IOSHAPE_CONTEXT_OPTIONS_INIT;
	struct ioshape_prune_options options = IOSHAPE_PRUNE_OPTIONS_INIT;
	long renamed, named, manifest, synced;
	struct base_error error = { 0 };
	struct ioshape_context *context;

	for (uint64_t step = 1; step <= 2; step++)
		ck_assert_int_eq(checkpoint_save(step, "text", false, &error), 0);
	context_options.coordinator = "open";
	ck_assert_int_eq(ioshape_context_open(&context, &context_options), 0);
	options.keep_last = 1;
	calls_begin(CALLS_COUNT, 0, 0);
	ck_assert_int_eq(ioshape_checkpoint_prune(context, "runs", &options, NULL), 0);
	calls_end();
	ioshape_context_free(context);
	renamed = calls_find("renameat", 0);
	ck_assert_int_ge(renamed, 0);
	named = calls_find("fsync directory", (unsigned long)renamed);
	ck_assert_int_gt(named, renamed);
	manifest = calls_find("unlinkat", 0);
	ck_assert_int_gt(manifest, named);
	synced = calls_find("fsync directory", (unsigned long)manifest);
	ck_assert_int_gt(synced, manifest);
	ck_assert_int_gt(calls_find("unlinkat", (unsigned long)manifest + 1), synced);
}

static uint64_t find_newest(struct ioshape_context *context)
{
	struct ioshape_checkpoint_info info = IOSHAPE_CHECKPOINT_INFO_INIT;
	struct ioshape_checkpoint *checkpoint;

	ck_assert_int_eq(ioshape_checkpoint_open(context, "runs", IOSHAPE_LATEST, &checkpoint), 0);
	ck_assert_int_eq(ioshape_checkpoint_get_info(checkpoint, &info), 0);
	ioshape_checkpoint_free(checkpoint);
	return info.step;
}

static uint64_t find_newest_intact(struct ioshape_context *context)
{
	struct ioshape_search_options options = { .size = sizeof(options) };
	struct ioshape_group *group;
	uint64_t step;

	options.intact = 1;
	ck_assert_int_eq(ioshape_group_open(context, "runs", NULL, &group), 0);
	ck_assert_int_eq(ioshape_group_get_latest(group, &options, &step), 0);
	ioshape_group_free(group);
	return step;
}

/* Until the manifest can be read again, the checkpoint may be the newest one. */
TEST(tests, an_older_checkpoint_that_cannot_be_read_for_a_moment_is_not_the_newest)
{
	struct ioshape_context_options options = IOSHAPE_CONTEXT_OPTIONS_INIT;
	struct base_error error = { 0 };
	struct ioshape_context *context;

	ck_assert_int_eq(checkpoint_save(10, "old", false, &error), 0);
	ck_assert_int_eq(checkpoint_save(7, "new", false, &error), 0);
	options.coordinator = "open";
	ck_assert_int_eq(ioshape_context_open(&context, &options), 0);
	/* The first manifest that is read is that of the highest step. */
	calls_begin_named("pread64", EIO);
	ck_assert_uint_eq(find_newest(context), 7);
	calls_begin_named("pread64", EIO);
	ck_assert_uint_eq(find_newest_intact(context), 7);
	calls_end();
	ioshape_context_free(context);
}

/* ---- Ranks ----------------------------------------------------------------------------------- */

#define DEADLINE_MS 1000 /* the minimum */

/*
 * Makes four allocations fail after the fsync of the rank's file has failed. So the rank cannot
 * send its error to the others.
 */
static int no_memory_after_fsync(const char *name, const void *site)
{
	static int left = 4;

	(void)name, (void)site;
	return calls_find("fsync", 0) >= 0 && left-- > 0 ? ENOMEM : 0;
}

static struct ioshape_context *context;
static struct ioshape_group *group;

static uint32_t own_rank;

static int save_step(uint64_t step, struct ioshape_save **out)
{
	/* Equal parts of ranks would be stored once. */
	const float number = (float)own_rank;
	const int64_t one = 1;
	const struct ioshape_tensor tensor = {
		.name = "x", .dtype = IOSHAPE_FLOAT32, .dims = 1, .shape = &one, .data = &number
	};

	return ioshape_group_save_tensors(group, step, &tensor, 1, NULL, out);
}

static bool begin_as(uint32_t rank)
{
	struct ioshape_context_options context_options = IOSHAPE_CONTEXT_OPTIONS_INIT;
	struct ioshape_group_options options = IOSHAPE_GROUP_OPTIONS_INIT;

	alarm(30); /* in case a rank waits forever */
	context_options.coordinator = "open";
	options.rank = own_rank = rank;
	options.ranks = 2;
	options.mode = IOSHAPE_MODE_EACH;
	options.store = IOSHAPE_STORE_HOST;
	options.token = "job";
	options.deadline_ms = DEADLINE_MS;
	return !ioshape_context_open(&context, &context_options) &&
	       !ioshape_group_open(context, "runs", &options, &group);
}

static void end(void)
{
	ioshape_group_free(group);
	ioshape_context_free(context);
}

/* Runs the function in two ranks, both of which must succeed. */
static void run_two(bool (*does)(uint32_t rank))
{
	pid_t children[2];
	int status;

	for (uint32_t rank = 0; rank < 2; rank++) {
		children[rank] = fork();
		ck_assert_int_ge(children[rank], 0);
		if (!children[rank]) {
			bool well = begin_as(rank) && does(rank);

			end();
			_exit(!well);
		}
	}
	for (int rank = 0; rank < 2; rank++) {
		ck_assert_int_eq(waitpid(children[rank], &status, 0), children[rank]);
		ck_assert_msg(!status, "rank %d: %x", rank, (unsigned)status);
	}
}

static bool fails_and_cannot_say(uint32_t rank)
{
	int ret;

	if (rank == 1) {
		calls_begin_named("fsync", EIO);
		fail_memory_by(no_memory_after_fsync);
	}
	ret = save_step(1, NULL);
	calls_end();
	fail_memory_by(NULL);
	return ret != 0;
}

TEST(tests, a_rank_that_cannot_say_that_it_failed_is_not_waited_for)
{
	run_two(fails_and_cannot_say);
}

/*
 * Makes all allocations fail as soon as the rank reads its first message: a heartbeat of rank 0, or
 * the plan.
 */
static int no_memory_to_read(const char *name, const void *site)
{
	(void)name, (void)site;
	return calls_find("fstat64", 0) >= 0 ? ENOMEM : 0;
}

static bool goes_on_without_having_said(uint32_t rank)
{
	int ret;

	if (rank == 1) {
		calls_begin(CALLS_COUNT, 0, 0);
		fail_memory_by(no_memory_to_read);
	}
	ret = save_step(1, NULL);
	calls_end();
	fail_memory_by(NULL);
	/* The rank sends its heartbeats nevertheless, so rank 0 does not take it for dead. */
	return ret && !save_step(2, NULL);
}

TEST(tests, a_rank_that_goes_on_without_having_said_that_it_failed_is_not_waited_for)
{
	run_two(goes_on_without_having_said);
}
