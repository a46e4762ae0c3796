/* SPDX-License-Identifier: Apache-2.0 */
/* Groups of real processes that save together, in every mode, and what happens when some fail. */
#define _GNU_SOURCE
#include "support/check_main.h"
#include "support/open_context.h"
#include "support/sample.h"
#include "support/scratch.h"
#include "support/wires.h"

#include <ioshape/group.h>

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define MOST_RANKS WIRES_RANKS
#define DEADLINE_MS 60000u
#define MIB ((size_t)1 << 20)

static struct wires wires;

/* ---- Ranks ----------------------------------------------------------------------------------- */

struct scene {
	uint32_t ranks, nodes;
	enum ioshape_mode mode;
	enum ioshape_store store;
	bool background;
	size_t bytes;      /* of each rank's large tensor */
	size_t more_bytes; /* in addition, for the last rank */
	uint64_t steps;
	uint32_t keep_last;
	uint32_t deadline_ms;
	bool wired;
	const char *layout; /* mode that the group must choose */
};

struct member {
	const struct scene *scene;
	uint32_t rank;
	struct ioshape_context *context;
	struct ioshape_group *group;
};

static uint64_t seed_of(uint32_t rank, uint64_t step)
{
	return rank * 1000 + step;
}

static void make_sample(struct sample *sample, const struct scene *scene, uint32_t rank,
			uint64_t step)
{
	sample_make(sample, seed_of(rank, step),
		    rank + 1 == scene->ranks && scene->more_bytes ? scene->more_bytes :
								    scene->bytes);
}

/* Opens a context whose staging memory is smaller than a large part. */
static struct ioshape_context *open_context(void)
{
	struct ioshape_context_options options = IOSHAPE_CONTEXT_OPTIONS_INIT;
	struct ioshape_context *context;
	options.staging_bytes = 32 * MIB;
	ck_assert_msg(!open_context_with(
			      &context, &options,
			      (struct test_rules){ .block_bytes = 256 * 1024, .queue_depth = 4 }),
		      "%s", ioshape_last_error()->sentence);
	return context;
}

static void open_member(struct member *member)
{
	struct ioshape_group_options options = IOSHAPE_GROUP_OPTIONS_INIT;
	const struct scene *scene = member->scene;
	char node[32];
	int ret;

	member->context = open_context();
	snprintf(node, sizeof(node), "n%u", member->rank * scene->nodes / scene->ranks);
	options.rank = member->rank;
	options.ranks = scene->ranks;
	options.local_ranks = scene->ranks;
	options.mode = scene->mode;
	options.store = scene->store;
	options.node = node;
	options.comm = scene->wired ? &wires.comm : NULL;
	options.token = scratch_directory();
	options.deadline_ms = scene->deadline_ms ? scene->deadline_ms : DEADLINE_MS;
	options.keep_last = scene->keep_last;
	ret = ioshape_group_open(member->context, scratch_path("checkpoints"), &options,
				 &member->group);
	ck_assert_msg(!ret, "rank %u: %s", member->rank, ioshape_last_error()->sentence);
}

/* Saves a step. Returns the code of the save, which ioshape_last_error() describes. */
static int save_reported(struct member *member, uint64_t step, struct ioshape_report *report)
{
	struct ioshape_save_options options = IOSHAPE_SAVE_OPTIONS_INIT;
	const bool background = member->scene->background;
	struct ioshape_save *save;
	struct sample sample;
	int ret;

	make_sample(&sample, member->scene, member->rank, step);
	options.metadata = &sample.metadata;
	options.report = background ? NULL : report;
	ret = ioshape_group_save_tensors(member->group, step, sample.tensors, sample.count,
					 &options, background ? &save : NULL);
	if (!ret && background) {
		sample_spoil(&sample);
		ioshape_save_wait(save, -1);
		ioshape_save_get_report(save, report);
		ret = ioshape_save_wait(save, -1);
		ioshape_save_free(save);
	}
	sample_free(&sample);
	return ret;
}

static int save_step(struct member *member, uint64_t step)
{
	struct ioshape_report report = IOSHAPE_REPORT_INIT;

	return save_reported(member, step, &report);
}

static void save_well(struct member *member, uint64_t step)
{
	ck_assert_msg(!save_step(member, step), "rank %u: %s", member->rank,
		      ioshape_last_error()->sentence);
}

static void close_member(struct member *member)
{
	ioshape_group_free(member->group);
	ioshape_context_free(member->context);
}

static int run_well(struct member *member)
{
	struct ioshape_search_options intact = IOSHAPE_SEARCH_OPTIONS_INIT;
	struct ioshape_report report = IOSHAPE_REPORT_INIT;
	uint64_t latest = 0;
	int ret;

	open_member(member);
	for (uint64_t step = 1; step <= member->scene->steps; step++) {
		ret = save_reported(member, step, &report);
		ck_assert_msg(!ret, "rank %u: %s", member->rank, ioshape_last_error()->sentence);
		ck_assert_str_eq(report.mode, member->scene->layout);
		ck_assert_uint_gt(report.checkpoint_bytes,
				  member->scene->ranks * member->scene->bytes);
	}
	for (intact.intact = 0; intact.intact < 2; intact.intact++) {
		ck_assert_int_eq(ioshape_group_get_latest(member->group, &intact, &latest), 0);
		ck_assert_uint_eq(latest, member->scene->steps);
	}
	close_member(member);
	return 0;
}

static int look_beside(struct member *member)
{
	open_member(member);
	save_well(member, 1);
	/* The checkpoint is the only entry. */
	ck_assert_uint_eq(scratch_entries(scratch_path("checkpoints")), 1);
	close_member(member);
	return 0;
}

static pid_t start(const struct scene *scene, uint32_t rank, int (*run)(struct member *))
{
	pid_t child = fork();

	ck_assert_int_ge(child, 0);
	if (!child) {
		struct member member = { .scene = scene, .rank = rank };

		wires_be(&wires, rank);
		scratch_leave_child(run(&member));
	}
	return child;
}

static void run_all(const struct scene *scene, int (*run)(struct member *),
		    int expected[MOST_RANKS])
{
	pid_t children[MOST_RANKS];
	int status;

	for (uint32_t rank = 0; rank < scene->ranks; rank++)
		children[rank] = start(scene, rank, run);
	wires_cut(&wires);
	for (uint32_t rank = 0; rank < scene->ranks; rank++) {
		ck_assert_int_eq(waitpid(children[rank], &status, 0), children[rank]);
		if (expected && expected[rank] < 0)
			ck_assert_msg(WIFSIGNALED(status), "rank %u", rank);
		else
			ck_assert_msg(WIFEXITED(status) && !WEXITSTATUS(status),
				      "rank %u: status %#x", rank, (unsigned)status);
	}
}

static void setup(void)
{
	scratch_setup();
	ck_assert(wires_lay(&wires, MOST_RANKS));
}

/* ---- Inspecting checkpoints ------------------------------------------------------------------ */

static void check_checkpoint(const struct scene *scene, uint64_t step)
{
	struct ioshape_context *context =
		sample_context(IOSHAPE_ENGINE_AUTO, IOSHAPE_DIRECT_PREFER);
	struct ioshape_checkpoint *checkpoint;
	struct ioshape_reader *reader;
	struct sample sample;
	char why[1024];
	int ret;

	ret = ioshape_checkpoint_open(context, scratch_path("checkpoints"), step, &checkpoint);
	ck_assert_msg(!ret, "%s", ioshape_last_error()->sentence);
	for (uint32_t rank = 0; rank < scene->ranks; rank++) {
		ret = ioshape_checkpoint_open_shard(checkpoint, rank, NULL, &reader);
		ck_assert_msg(!ret, "%s", ioshape_last_error()->sentence);
		make_sample(&sample, scene, rank, step);
		ret = sample_check_reader(reader, &sample, why, sizeof(why));
		ck_assert_msg(!ret, "rank %u: %s", rank, why);
		sample_free(&sample);
		ioshape_reader_free(reader);
	}
	ret = ioshape_checkpoint_verify(checkpoint, NULL, NULL);
	ck_assert_msg(!ret, "%s", ioshape_last_error()->sentence);
	ioshape_checkpoint_free(checkpoint);
	ioshape_context_free(context);
}

/* Returns 1 if there is an entry for this step, else 0. */
static unsigned count_of(uint64_t step)
{
	char name[64];

	snprintf(name, sizeof(name), "checkpoints/step-%010llu", (unsigned long long)step);
	return !access(scratch_path(name), F_OK);
}

/* ---- Saves that succeed ---------------------------------------------------------------------- */

static const struct scene good[] = {
	{ .ranks = 1, .nodes = 1, .layout = "each" },
	{ .ranks = 3, .nodes = 1, .mode = IOSHAPE_MODE_EACH, .layout = "each" },
	{ .ranks = 4, .nodes = 1, .layout = "node" },
	{ .ranks = 4, .nodes = 1, .layout = "node", .background = true },
	{ .ranks = 4, .nodes = 2, .mode = IOSHAPE_MODE_NODE, .layout = "node", .background = true },
	{ .ranks = 4, .nodes = 1, .mode = IOSHAPE_MODE_RANK0, .layout = "rank0" },
	{ .ranks = 5, .nodes = 2, .mode = IOSHAPE_MODE_RANK0, .layout = "rank0", .wired = true },
	{ .ranks = 6,
	  .nodes = 3,
	  .mode = IOSHAPE_MODE_RANK0,
	  .layout = "rank0",
	  .wired = true,
	  .background = true },
	/* More than all staging memory; one rank has much more than the others. */
	{ .ranks = 3, .nodes = 1, .layout = "node", .background = true, .more_bytes = 40 * MIB },
	{ .ranks = 3, .nodes = 1, .layout = "node", .more_bytes = 40 * MIB },
	{ .ranks = 3,
	  .nodes = 3,
	  .mode = IOSHAPE_MODE_RANK0,
	  .layout = "rank0",
	  .wired = true,
	  .more_bytes = 40 * MIB,
	  .background = true },
};

#define GOOD_SCENES ((int)(sizeof(good) / sizeof(*good)))
/* Number of the first large scene. */
#define LARGE_SCENE 8

static struct test_case saves = { .name = "saves", .setup = setup, .teardown = scratch_teardown };
static struct test_case files_tests = {
	.name = "files", .setup = setup, .teardown = scratch_teardown, .tags = "files"
};

LOOP_TEST(saves, saves_and_loads, 0, GOOD_SCENES)
{
	static const enum ioshape_store stores[] = { IOSHAPE_STORE_AUTO, IOSHAPE_STORE_FILES };
	struct scene scene = good[_i % GOOD_SCENES];

	scene.store = stores[_i / GOOD_SCENES];
	scene.bytes = MIB;
	scene.steps = 2;
	run_all(&scene, run_well, NULL);
	for (uint64_t step = 1; step <= scene.steps; step++)
		check_checkpoint(&scene, step);
	/* The directory contains nothing else. */
	ck_assert_uint_eq(scratch_entries(scratch_path("checkpoints")), scene.steps);
}
/* Scenes that take long do not depend on the store and are tested once. */
CHECK_ADD(files_tests, saves_and_loads, GOOD_SCENES, GOOD_SCENES + LARGE_SCENE)

TEST(saves, keeps_as_many_as_asked)
{
	const struct scene scene = {
		.ranks = 3,
		.nodes = 1,
		.layout = "node",
		.bytes = MIB,
		.steps = 5,
		.keep_last = 2,
	};

	run_all(&scene, run_well, NULL);
	ck_assert_uint_eq(scratch_entries(scratch_path("checkpoints")), 2);
	check_checkpoint(&scene, 4);
	check_checkpoint(&scene, 5);
}

/* ---- Saves that fail ------------------------------------------------------------------------- */

/* What one rank does instead of saving step 2, and the errors of the others. */
struct mishap {
	struct scene scene;
	uint32_t victim;
	bool dies;
	int (*instead)(struct member *member);
	int expected; /* result of the others' saves; 0: any failure */
	bool goes_on; /* step 3 succeeds */
	bool may_come_too_late;
	const char *awaited; /* file that the others wait for before they save */
};

static const struct mishap *mishap;

static int die(struct member *member)
{
	(void)member;
	kill(getpid(), SIGKILL);
	return 0;
}

/* Opens a group of another job on this host, which removes the shared memory of dead processes. */
static void sweep_when_parent_is_dead(pid_t parent)
{
	struct ioshape_group_options options = IOSHAPE_GROUP_OPTIONS_INIT;
	struct ioshape_context *context;
	struct ioshape_group *group;

	while (getppid() == parent)
		usleep(1000);
	context = open_context();
	options.ranks = options.local_ranks = 2;
	options.token = scratch_path("other job");
	options.deadline_ms = 1000;
	/* The other rank of this job never arrives. */
	ck_assert_int_eq(ioshape_group_open(context, scratch_path("checkpoints"), &options, &group),
			 -ETIMEDOUT);
	scratch_write(scratch_path("swept"), "", 0);
	_exit(0);
}

static int die_and_be_swept_away(struct member *member)
{
	const pid_t me = getpid();

	if (!fork())
		sweep_when_parent_is_dead(me);
	return die(member);
}

static void *kill_later(void *unused)
{
	(void)unused;
	usleep(20000);
	kill(getpid(), SIGKILL);
	return NULL;
}

static int die_while_saving(struct member *member)
{
	pthread_t thread;

	ck_assert_int_eq(pthread_create(&thread, NULL, kill_later, NULL), 0);
	save_step(member, 2);
	pause();
	return 0;
}

static int say_why_not(struct member *member)
{
	ck_assert_int_eq(ioshape_group_fail(member->group, 2, "the model has burnt"), 0);
	return 0;
}

static int save_another_step(struct member *member)
{

	ck_assert_int_eq(save_step(member, 7), -EINVAL);
	return 0;
}

/* File that the other ranks create when they have failed. */
static const char gave_up[] = "gave-up";

/*
 * Saves after the others have failed. It waits for their file instead of a time, because they may
 * be late themselves on a busy machine.
 */
static int be_late(struct member *member)
{
	while (access(scratch_path(gave_up), F_OK))
		usleep(1000);
	usleep(400000);
	ck_assert_int_lt(save_step(member, 2), 0);
	return 0;
}

static int save_without_space(struct member *member)
{
	struct rlimit limit, low;

	ck_assert_int_eq(getrlimit(RLIMIT_FSIZE, &limit), 0);
	low = limit;
	low.rlim_cur = 1 * MIB;
	ck_assert_int_eq(setrlimit(RLIMIT_FSIZE, &low), 0);
	ck_assert_int_eq(save_step(member, 2), -EFBIG);
	ck_assert_int_eq(setrlimit(RLIMIT_FSIZE, &limit), 0);
	return 0;
}

static int stop_writing(void *user, enum ioshape_phase phase, uint64_t done, uint64_t total)
{
	(void)user;
	(void)done;
	(void)total;
	return phase == IOSHAPE_PHASE_WRITE;
}

static int cancel(struct member *member)
{
	struct ioshape_save_options options = IOSHAPE_SAVE_OPTIONS_INIT;
	struct sample sample;
	int ret;

	make_sample(&sample, member->scene, member->rank, 2);
	options.progress = stop_writing;
	ret = ioshape_group_save_tensors(member->group, 2, sample.tensors, sample.count, &options,
					 NULL);
	ck_assert_int_eq(ret, -ECANCELED);
	sample_free(&sample);
	return 0;
}

/* Frees a save in the background as soon as it has begun. */
static int free_at_once(struct member *member)
{
	struct ioshape_save *save;
	struct sample sample;
	int ret;

	make_sample(&sample, member->scene, member->rank, 2);
	ret = ioshape_group_save_tensors(member->group, 2, sample.tensors, sample.count, NULL,
					 &save);
	ck_assert_int_eq(ret, 0);
	usleep(1000 * (useconds_t)(getpid() % 8));
	ioshape_save_free(save);
	sample_free(&sample);
	return 0;
}

static int save_badly(struct member *member)
{
	struct ioshape_tensor bad = { .name = "", .dtype = IOSHAPE_UINT8 };

	ck_assert_int_eq(ioshape_group_save_tensors(member->group, 2, &bad, 1, NULL, NULL),
			 -EINVAL);
	return 0;
}

static int save_as_the_latest(struct member *member)
{
	ck_assert_int_eq(
		ioshape_group_save_tensors(member->group, IOSHAPE_LATEST, NULL, 0, NULL, NULL),
		-EINVAL);
	return 0;
}

static int save_with_wrong_options(struct member *member)
{
	struct ioshape_save_options options = { .size = 3 };

	ck_assert_int_eq(ioshape_group_save_tensors(member->group, 2, NULL, 0, &options, NULL),
			 -EINVAL);
	return 0;
}

static int run_into_mishap(struct member *member)
{
	struct timespec begin, end;
	int ret;

	open_member(member);
	save_well(member, 1);
	clock_gettime(CLOCK_MONOTONIC, &begin);
	if (member->rank == mishap->victim) {
		mishap->instead(member);
	} else {
		while (mishap->awaited && access(scratch_path(mishap->awaited), F_OK))
			usleep(1000);
		ret = save_step(member, 2);
		if (ret < 0)
			close(open(scratch_path(gave_up), O_WRONLY | O_CREAT | O_CLOEXEC, 0600));
		ck_assert_msg(ret < 0 || mishap->may_come_too_late, "rank %u saved without rank %u",
			      member->rank, mishap->victim);
		if (mishap->expected)
			ck_assert_int_eq(ret, mishap->expected);
		if (ret)
			ck_assert_msg(ioshape_last_error()->rank == mishap->victim,
				      "rank %lld is said to have failed, not %u: %s",
				      (long long)ioshape_last_error()->rank, mishap->victim,
				      ioshape_last_error()->sentence);
	}
	clock_gettime(CLOCK_MONOTONIC, &end);
	/* The failure must be known long before the deadline. */
	ck_assert_int_lt(end.tv_sec - begin.tv_sec, DEADLINE_MS / 2000);
	if (mishap->goes_on)
		save_well(member, 3);
	close_member(member);
	return 0;
}

#define NODE_OF_4                                                                                  \
	{                                                                                          \
		.ranks = 4, .nodes = 1, .layout = "node", .bytes = MIB                             \
	}
#define EACH_OF_4                                                                                  \
	{                                                                                          \
		.ranks = 4, .nodes = 1, .mode = IOSHAPE_MODE_EACH, .layout = "each", .bytes = MIB  \
	}
#define WIRED_4                                                                                    \
	{                                                                                          \
		.ranks = 4, .nodes = 2, .mode = IOSHAPE_MODE_RANK0, .layout = "rank0",             \
		.bytes = MIB, .wired = true, .store = IOSHAPE_STORE_HOST                           \
	}
#define LARGE_4                                                                                    \
	{                                                                                          \
		.ranks = 4, .nodes = 1, .layout = "node", .bytes = MIB, .more_bytes = 40 * MIB     \
	}
#define HASTY_4                                                                                    \
	{                                                                                          \
		.ranks = 4, .nodes = 1, .layout = "node", .bytes = MIB, .deadline_ms = 1000        \
	}

static const struct mishap mishaps[] = {
	{ NODE_OF_4, 2, true, die, 0, false, false, NULL },
	{ NODE_OF_4, 0, true, die, 0, false, false, NULL },
	{ NODE_OF_4, 0, true, die_and_be_swept_away, 0, false, false, "swept" },
	{ EACH_OF_4, 3, true, die, 0, false, false, NULL },
	{ WIRED_4, 2, true, die, 0, false, false, NULL },
	{ LARGE_4, 3, true, die_while_saving, 0, false, false, NULL },
	{ LARGE_4, 0, true, die_while_saving, 0, false, false, NULL },
	{ NODE_OF_4, 1, false, say_why_not, 0, true, false, NULL },
	{ NODE_OF_4, 0, false, say_why_not, 0, true, false, NULL },
	{ NODE_OF_4, 2, false, save_another_step, -EINVAL, true, false, NULL },
	{ HASTY_4, 2, false, be_late, -ETIMEDOUT, true, false, NULL },
	{ EACH_OF_4, 1, false, save_without_space, -EFBIG, true, false, NULL },
	{ NODE_OF_4, 0, false, save_without_space, -EFBIG, true, false, NULL },
	{ NODE_OF_4, 2, false, cancel, 0, true, false, NULL },
	{ WIRED_4, 3, false, cancel, 0, true, false, NULL },
	{ NODE_OF_4, 2, false, free_at_once, 0, true, true, NULL },
	{ WIRED_4, 3, false, free_at_once, 0, true, true, NULL },
	{ NODE_OF_4, 0, false, save_badly, -EINVAL, true, false, NULL },
	{ NODE_OF_4, 2, false, save_with_wrong_options, -EINVAL, true, false, NULL },
	{ NODE_OF_4, 3, false, save_badly, -EINVAL, true, false, NULL },
	{ NODE_OF_4, 1, false, save_as_the_latest, -EINVAL, true, false, NULL },
};

static struct test_case mishap_tests = {
	.name = "mishaps", .setup = setup, .teardown = scratch_teardown, .tags = "mishaps"
};

/*
 * valgrind slows each process down: it runs only the first scenes, in which ranks die, and a few
 * more.
 */
LOOP_TEST(mishap_tests, a_mishap_fails_one_checkpoint, 0,
	  scratch_under_valgrind() ? 9 : sizeof(mishaps) / sizeof(*mishaps))
{
	int expected[MOST_RANKS] = { 0 };
	struct scene again;

	mishap = &mishaps[_i];
	expected[mishap->victim] = mishap->dies ? -1 : 0;
	run_all(&mishap->scene, run_into_mishap, expected);
	check_checkpoint(&mishap->scene, 1);
	if (mishap->goes_on) {
		check_checkpoint(&mishap->scene, 3);
		ck_assert_uint_eq(count_of(1) + count_of(2) + count_of(3),
				  scratch_entries(scratch_path("checkpoints")));
		ck_assert(mishap->may_come_too_late || !count_of(2));
	}
	if (mishap->scene.wired || !mishap->dies)
		return;
	/* The restarted job saves, and removes what the dead process left. */
	again = mishap->scene;
	again.steps = 2;
	run_all(&again, run_well, NULL);
	check_checkpoint(&again, 2);
	ck_assert_uint_eq(scratch_entries(scratch_path("checkpoints")), again.steps);
}

static int come_alone(struct member *member)
{
	struct ioshape_group_options options = IOSHAPE_GROUP_OPTIONS_INIT;
	int ret;

	member->context = sample_context(IOSHAPE_ENGINE_AUTO, IOSHAPE_DIRECT_PREFER);
	options.rank = member->rank;
	options.ranks = 3;
	options.local_ranks = 3;
	options.token = scratch_directory();
	options.deadline_ms = 1000;
	ret = ioshape_group_open(member->context, scratch_path("checkpoints"), &options,
				 &member->group);
	ck_assert_int_eq(ret, -ETIMEDOUT);
	ck_assert_ptr_null(member->group);
	ioshape_context_free(member->context);
	return 0;
}

/* Ranks meet in the directory, and leave nothing there once all share memory. */
TEST(saves, ranks_that_share_memory_leave_nothing_in_the_directory)
{
	static const struct scene scene = { .ranks = 3, .nodes = 1, .bytes = MIB };

	run_all(&scene, look_beside, NULL);
}

LOOP_TEST(saves, a_group_that_is_not_complete, 0, 2)
{
	const struct scene alone = { .ranks = 1, .nodes = 1 };
	struct member member = { .scene = &alone, .rank = (uint32_t)_i };

	come_alone(&member);
}

static int use_in_child(void *argument)
{
	struct member *member = argument;
	uint64_t step;

	if (ioshape_group_get_latest(member->group, NULL, &step) != -EPERM ||
	    ioshape_group_fail(member->group, 1, "x") != -EPERM ||
	    ioshape_group_save_tensors(member->group, 1, NULL, 0, NULL, NULL) != -EPERM)
		return 1;
	ioshape_group_free(member->group);
	return 0;
}

TEST(saves, a_forked_child_touches_nothing)
{
	const struct scene scene = { .ranks = 1, .nodes = 1, .bytes = MIB };
	struct member member = { .scene = &scene };

	open_member(&member);
	ck_assert_int_eq(scratch_in_child(use_in_child, &member), 0);
	ck_assert_int_eq(save_step(&member, 1), 0);
	close_member(&member);
	check_checkpoint(&scene, 1);
}

TEST(saves, a_step_is_replaced_or_not)
{
	const struct scene scene = { .ranks = 1, .nodes = 1, .bytes = MIB };
	struct ioshape_save_options options = IOSHAPE_SAVE_OPTIONS_INIT;
	struct member member = { .scene = &scene };

	open_member(&member);
	ck_assert_int_eq(save_step(&member, 1), 0);
	ck_assert_int_eq(save_step(&member, 1), 0);
	options.replace = IOSHAPE_OFF;
	ck_assert_int_eq(ioshape_group_save_tensors(member.group, 1, NULL, 0, &options, NULL),
			 -EEXIST);
	close_member(&member);
	check_checkpoint(&scene, 1);
	ck_assert_uint_eq(scratch_entries(scratch_path("checkpoints")), 1);
}

/* Retention keeps the checkpoint of the lower step, which was saved last. */
TEST(saves, going_back_keeps_what_was_saved_last)
{
	const struct scene scene = { .ranks = 1, .nodes = 1, .bytes = MIB, .keep_last = 1 };
	struct member member = { .scene = &scene };

	open_member(&member);
	ck_assert_int_eq(save_step(&member, 7), 0);
	ck_assert_int_eq(save_step(&member, 5), 0);
	close_member(&member);
	check_checkpoint(&scene, 5);
	ck_assert_uint_eq(scratch_entries(scratch_path("checkpoints")), 1);
}

TEST(saves, who_has_a_file_open_does_not_wait_for_itself)
{
	const struct scene scene = { .ranks = 1, .nodes = 1, .bytes = 20 * MIB };
	struct member member = { .scene = &scene };
	struct ioshape_file *file;

	setenv("IOSHAPE_SLOTS", "1", 1);
	open_member(&member);
	ck_assert_int_eq(ioshape_file_open(member.context, scratch_path("other"), NULL, &file), 0);
	ck_assert_int_eq(ioshape_file_write(file, "text", 4), 0);
	ck_assert_int_eq(save_step(&member, 1), 0);
	ck_assert_int_eq(ioshape_file_commit(file, NULL), 0);
	ioshape_file_free(file);
	close_member(&member);
	check_checkpoint(&scene, 1);
}

static void *save_many(void *argument)
{
	static atomic_uint next = 10;
	struct member *member = argument;

	for (int i = 0; i < 2; i++)
		ck_assert_int_eq(save_step(member, atomic_fetch_add(&next, 1)), 0);
	return NULL;
}

/* The staging memory is too small for two saves at a time. */
TEST(saves, threads_of_a_rank_save_one_after_the_other)
{
	const struct scene scene = {
		.ranks = 1, .nodes = 1, .bytes = 24 * MIB, .background = true
	};
	struct member member = { .scene = &scene };
	pthread_t threads[3];

	open_member(&member);
	for (int i = 0; i < 3; i++)
		ck_assert_int_eq(pthread_create(&threads[i], NULL, save_many, &member), 0);
	for (int i = 0; i < 3; i++)
		ck_assert_int_eq(pthread_join(threads[i], NULL), 0);
	close_member(&member);
	for (uint64_t step = 10; step < 16; step++)
		check_checkpoint(&scene, step);
}
