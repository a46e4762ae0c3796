/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Two ranks as two nodes, whose tiers have copies of each other's files, and one of them dies
 * before any of its calls, or a call of it fails. What a rank has called saved comes to its
 * destination; and what a node has lost is restored, if not by this restart, by the next.
 */
#define _GNU_SOURCE
#include "internal.h"
#include "support/check_main.h"
#include "support/pair_comm.h"
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
#define NO_VICTIM UINT32_MAX

/* Of all processes: which ranks were done well. */
static struct {
	bool well[RANKS];
} * shared;

static struct pair_comm pair;

static void setup(void)
{
	shared = tier_calls_setup(sizeof(*shared));
}

static struct test_case tests = { .name = "nodes",
				  .setup = setup,
				  .teardown = tier_calls_teardown };

/* ---- In a process of its own ----------------------------------------------------------------- */

struct harm {
	uint32_t victim;
	enum calls_mode mode;
	unsigned long nth;
	int (*act)(struct ioshape_group *group, const struct sample *sample);
};

static const char *tier_of(uint32_t node)
{
	return node ? "tier-1" : "tier-0";
}

static int save(struct ioshape_group *group, const struct sample *sample)
{
	return ioshape_group_save_tensors(group, 2, sample->tensors, sample->count, NULL, NULL);
}

static int save_first(struct ioshape_group *group, const struct sample *sample)
{
	return ioshape_group_save_tensors(group, 1, sample->tensors, sample->count, NULL, NULL);
}

static int restore(struct ioshape_group *group, const struct sample *sample)
{
	uint64_t step;

	(void)sample;
	return ioshape_group_get_latest(group, NULL, &step);
}

static int take_part(const struct harm *harm, uint32_t rank)
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
	options.node = rank ? "another" : "one";
	options.comm = pair_comm_be(&pair, rank);
	/* A rank waits this long for a killed one. Runs without a victim have time on a busy host.
	 */
	options.deadline_ms = harm->victim == NO_VICTIM ? 30000 : 1000;
	options.tier = tier;
	ret = ioshape_group_open(context, "there", &options, &group);
	if (rank == harm->victim)
		calls_begin(harm->mode, harm->nth, EIO);
	if (!ret)
		ret = harm->act(group, &sample);
	calls_end();
	shared->well[rank] = !ret;
	ioshape_group_free(group);
	pair_comm_close(&pair);
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
		int ret = tier_calls_open(tier_of(rank));

		if (!ret)
			ret = take_part(harm, rank);
		tier_calls_close();
		scratch_leave_child(ret != 0);
	}
	return child;
}

/* Runs both ranks. The victim may be killed. */
static void run(const struct harm *harm)
{
	pid_t children[RANKS];
	int status;

	memset(shared, 0, sizeof(*shared));
	pair_comm_open(&pair, false);
	for (uint32_t rank = 0; rank < RANKS; rank++)
		children[rank] = start(harm, rank);
	for (uint32_t rank = 0; rank < RANKS; rank++) {
		close(pair.fds[rank][0]);
		close(pair.fds[rank][1]);
	}
	for (uint32_t rank = 0; rank < RANKS; rank++) {
		ck_assert_int_eq(waitpid(children[rank], &status, 0), children[rank]);
		ck_assert_msg(WIFEXITED(status) ||
				      (rank == harm->victim && WTERMSIG(status) == SIGKILL),
			      "%lu: %x", harm->nth, (unsigned)status);
	}
}

static void must_do(int (*act)(struct ioshape_group *group, const struct sample *sample),
		    unsigned long nth)
{
	const struct harm none = { .victim = NO_VICTIM, .act = act };

	run(&none);
	ck_assert_msg(shared->well[0] && shared->well[1], "%lu", nth);
}

/* Drains the tier of one node. Saves that wait for the other node stay. */
static int drain(void *argument)
{
	const uint32_t *node = argument;
	int ret = tier_calls_open(tier_of(*node));

	if (!ret)
		ret = ioshape_tier_drain(tier, NULL);
	tier_calls_close();
	scratch_leave_child(ret && ret != -EAGAIN);
}

static void drain_all(void)
{
	for (uint32_t turn = 0; turn < 2 * RANKS; turn++) {
		uint32_t node = turn % RANKS;

		ck_assert_int_eq(scratch_in_child(drain, &node), 0);
	}
}

static int verify(void *argument)
{
	const uint64_t *step = argument;
	struct ioshape_checkpoint *checkpoint = NULL;
	int ret = tier_calls_open(tier_of(0));

	if (!ret)
		ret = ioshape_checkpoint_open(context, "there", *step, &checkpoint);
	if (!ret)
		ret = ioshape_checkpoint_verify(checkpoint, NULL, NULL);
	ioshape_checkpoint_free(checkpoint);
	tier_calls_close();
	scratch_leave_child(ret == -ENOENT ? 2 : ret != 0);
}

static bool is_there(uint64_t step)
{
	const int status = scratch_in_child(verify, &step);

	ck_assert_msg(WIFEXITED(status) && WEXITSTATUS(status) != 1, "step %d is torn", (int)step);
	return !WEXITSTATUS(status);
}

/* ---- Each call ------------------------------------------------------------------------------- */

static void lose(uint32_t node)
{
	scratch_remove(tier_of(node));
	ck_assert_int_eq(mkdir(tier_of(node), 0777), 0);
}

static void begin_scene(void)
{
	scratch_remove("there");
	ck_assert_int_eq(mkdir("there", 0777), 0);
	for (uint32_t node = 0; node < RANKS; node++)
		lose(node);
	must_do(save_first, 0);
}

/* Returns whether the victim made an nth call. */
static bool harm_save(struct harm *harm)
{
	begin_scene();
	harm->act = save;
	run(harm);
	drain_all();
	for (uint32_t rank = 0; rank < RANKS; rank++)
		ck_assert_msg(is_there(2) || !shared->well[rank],
			      "%lu: what rank %u has saved is lost", harm->nth, rank);
	ck_assert_msg(is_there(1), "%lu: the one before it is lost", harm->nth);
	return harm->nth <= atomic_load(&calls_record()->count);
}

static bool harm_restore(struct harm *harm)
{
	begin_scene();
	lose(1);
	harm->act = restore;
	run(harm);
	/* The other one is lost now, or what it has lost is still to be restored. */
	if (shared->well[0] && shared->well[1])
		lose(0);
	must_do(restore, harm->nth);
	drain_all();
	ck_assert_msg(is_there(1), "%lu: it is lost", harm->nth);
	return harm->nth <= atomic_load(&calls_record()->count);
}

static unsigned long stride_of(enum calls_mode mode)
{
	return scratch_long() ? 1 : mode == CALLS_KILL ? 17 : 41;
}

LOOP_TEST(tests, whichever_node_dies_at_any_call_what_was_saved_is_drained, 0, RANKS)
{
	struct harm harm = { .victim = (uint32_t)_i, .mode = CALLS_KILL, .nth = 1 };

	while (harm_save(&harm))
		harm.nth += stride_of(harm.mode);
	ck_assert_uint_gt(harm.nth, 100);
}

LOOP_TEST(tests, whatever_call_of_a_node_fails_what_was_saved_is_drained, 0, RANKS)
{
	struct harm harm = { .victim = (uint32_t)_i, .mode = CALLS_FAIL, .nth = 1 };

	while (harm_save(&harm))
		harm.nth += stride_of(harm.mode);
}

LOOP_TEST(tests, whichever_node_dies_while_it_restores_the_next_restart_does, 0, RANKS)
{
	struct harm harm = { .victim = (uint32_t)_i, .mode = CALLS_KILL, .nth = 1 };

	while (harm_restore(&harm))
		harm.nth += stride_of(harm.mode);
	ck_assert_uint_gt(harm.nth, 50);
}

LOOP_TEST(tests, whatever_call_fails_while_nodes_restore_the_next_restart_does, 0, RANKS)
{
	struct harm harm = { .victim = (uint32_t)_i, .mode = CALLS_FAIL, .nth = 1 };

	while (harm_restore(&harm))
		harm.nth += stride_of(harm.mode);
}
