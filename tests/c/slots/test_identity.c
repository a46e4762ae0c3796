/* SPDX-License-Identifier: Apache-2.0 */
/* Identity of a process in its pool: job, rank and node, from the launcher's variables. */
#define _GNU_SOURCE
#include "base/base.h"
#include "slots/slots.h"
#include "support/check_main.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static void forget_launchers(void)
{
	static const char *const variables[] = {
		"RANK",
		"WORLD_SIZE",
		"SLURM_JOB_ID",
		"SLURM_PROCID",
		"PBS_JOBID",
		"LSB_JOBID",
		"FLUX_JOB_ID",
		"TORCHELASTIC_RUN_ID",
		"PMIX_NAMESPACE",
		"PMI_JOBID",
		"MASTER_ADDR",
		"MASTER_PORT",
		"PMI_RANK",
		"PMI_SIZE",
		"PMIX_RANK",
		"PMIX_SIZE",
		"OMPI_COMM_WORLD_RANK",
		"OMPI_COMM_WORLD_SIZE",
		"SLURM_STEP_NUM_TASKS",
		"SLURM_STEP_TASKS_PER_NODE",
		"SLURM_NODEID",
	};

	for (size_t i = 0; i < ARRAY_LENGTH(variables); i++)
		unsetenv(variables[i]);
}

static struct test_case all_case = { .name = "identity", .setup = forget_launchers };

TEST(all_case, the_job_of_the_launcher_is_the_job)
{
	struct slots_identity identity;

	setenv("TORCHELASTIC_RUN_ID", "run-7", 1);
	setenv("RANK", "3", 1);
	setenv("WORLD_SIZE", "8", 1);
	slots_identify(&identity, NULL, 0);
	ck_assert_str_eq(identity.job, "run-7");
	ck_assert_uint_eq(identity.rank, 3);
	ck_assert_uint_eq(identity.ranks, 8);
	ck_assert_uint_eq(identity.share, 100);
	/* Slurm's job counts, whichever launcher starts the ranks inside it. */
	setenv("SLURM_JOB_ID", "4711", 1);
	slots_identify(&identity, NULL, 7);
	ck_assert_str_eq(identity.job, "4711");
	ck_assert_uint_eq(identity.share, 7);
	/* A setting of the user overrides it. */
	slots_identify(&identity, "mine", 0);
	ck_assert_str_eq(identity.job, "mine");
}

LOOP_TEST(all_case, ranks_without_a_jobs_name_meet_where_they_meet, 0, 2)
{
	struct slots_identity identity;
	char expected[80];

	setenv("TORCHELASTIC_RUN_ID", "none", 1); /* torchrun's value if it was given no ID */
	setenv("MASTER_ADDR", "n01", 1);
	setenv("MASTER_PORT", "29500", 1);
	slots_identify(&identity, NULL, 0);
	ck_assert_str_eq(identity.job, "n01:29500");
	/* On loopback addresses the node's name distinguishes jobs on different hosts. */
	setenv("MASTER_ADDR", _i ? "127.0.0.1" : "localhost", 1);
	slots_identify(&identity, NULL, 0);
	snprintf(expected, sizeof(expected), "%.50s:29500", identity.node);
	ck_assert_str_eq(identity.job, expected);
}

TEST(all_case, alone_it_is_one_rank_of_its_terminals_job)
{
	struct slots_identity identity, again;

	slots_identify(&identity, NULL, 0);
	slots_identify(&again, NULL, 0);
	ck_assert_uint_eq(identity.rank, 0);
	ck_assert_uint_eq(identity.ranks, 1);
	ck_assert_str_ne(identity.node, "");
	ck_assert_str_eq(identity.job, again.job);
	ck_assert_int_eq(strncmp(identity.job, identity.node, strlen(identity.node)), 0);
}

TEST(all_case, what_could_do_harm_in_a_terminal_is_replaced)
{
	struct slots_identity identity;
	char longest[200];

	slots_identify(&identity, "a b\033[31mc\n\xc3\xa9", 0);
	ck_assert_str_eq(identity.job, "a_b_[31mc___");
	memset(longest, 'x', sizeof(longest));
	longest[sizeof(longest) - 1] = 0;
	slots_identify(&identity, longest, 0);
	ck_assert_uint_eq(strlen(identity.job), SLOTS_TEXT_BYTES - 1);
	setenv("RANK", "many", 1);
	slots_identify(&identity, NULL, 0);
	ck_assert_uint_eq(identity.rank, 0);
}

TEST(all_case, the_first_rank_is_a_rank_like_any_other)
{
	struct slots_identity identity;

	setenv("SLURM_PROCID", "5", 1);
	setenv("RANK", "0", 1);
	setenv("SLURM_STEP_NUM_TASKS", "16", 1);
	setenv("WORLD_SIZE", "1", 1);
	slots_identify(&identity, NULL, 0);
	ck_assert_uint_eq(identity.rank, 0);
	ck_assert_uint_eq(identity.ranks, 1);
	/* An empty value and a value that is no number are ignored. */
	setenv("RANK", "", 1);
	setenv("WORLD_SIZE", "all", 1);
	slots_identify(&identity, NULL, 0);
	ck_assert_uint_eq(identity.rank, 5);
	ck_assert_uint_eq(identity.ranks, 16);
}

/* ---- Ranks on a node ------------------------------------------------------------------------- */

static const struct {
	const char *tasks, *node;
	uint32_t local_ranks;
} slurm[] = {
	{ "4(x2),3", "0", 4 },
	{ "4(x2),3", "1", 4 },
	{ "4(x2),3", "2", 3 },
	{ "8", "0", 8 },
	{ "2,16", "1", 16 },
	/* The variables say nothing about this node, or are invalid. */
	{ "4(x2),3", "3", 1 },
	{ "4", NULL, 1 },
	{ NULL, "0", 1 },
	{ "", "0", 1 },
	{ "many", "0", 1 },
	{ "4(x,3", "0", 4 },
	{ "4(x99999999999),3", "7", 4 },
	{ "4(x1,3", "1", 3 },
	{ "9999999999", "0", 1 },
	{ "4", "-1", 1 },
	{ "4", "0x", 1 },
};

LOOP_TEST(all_case, slurm_lists_how_many_ranks_each_node_has, 0, (int)ARRAY_LENGTH(slurm))
{
	struct base_job job;

	setenv("SLURM_PROCID", "5", 1);
	setenv("SLURM_STEP_NUM_TASKS", "64", 1);
	setenv("SLURM_LOCALID", "1", 1);
	if (slurm[_i].tasks)
		setenv("SLURM_STEP_TASKS_PER_NODE", slurm[_i].tasks, 1);
	if (slurm[_i].node)
		setenv("SLURM_NODEID", slurm[_i].node, 1);
	base_job_find(&job);
	ck_assert_str_eq(job.launcher, "slurm");
	ck_assert_uint_eq(job.rank, 5);
	ck_assert_uint_eq(job.ranks, 64);
	ck_assert_uint_eq(job.local_rank, 1);
	ck_assert_uint_eq(job.local_ranks, slurm[_i].local_ranks);
}

TEST(all_case, a_rank_beyond_the_last_is_none)
{
	struct base_job job;

	setenv("OMPI_COMM_WORLD_RANK", "1", 1);
	setenv("OMPI_COMM_WORLD_SIZE", "2", 1);
	setenv("OMPI_COMM_WORLD_LOCAL_RANK", "one", 1);
	setenv("OMPI_COMM_WORLD_LOCAL_SIZE", "2", 1);
	setenv("RANK", "2", 1);
	setenv("WORLD_SIZE", "2", 1);
	base_job_find(&job);
	ck_assert_str_eq(job.launcher, "openmpi");
	ck_assert_uint_eq(job.rank, 1);
	ck_assert_uint_eq(job.local_rank, 0);
	ck_assert_uint_eq(job.local_ranks, 2);
}

static const struct {
	const char *slurm, *user, *logname, *expected; /* NULL: the numeric user ID */
} users[] = {
	{ "ann", "bob", "cy", "ann" },
	{ NULL, "bob", "cy", "bob" },
	{ "", "", "cy", "cy" },
	{ NULL, NULL, NULL, NULL },
};

LOOP_TEST(all_case, the_user_is_who_slurm_or_the_login_says, 0, (int)ARRAY_LENGTH(users))
{
	struct slots_identity identity;
	char number[32];

	unsetenv("SLURM_JOB_USER");
	unsetenv("USER");
	unsetenv("LOGNAME");
	if (users[_i].slurm)
		setenv("SLURM_JOB_USER", users[_i].slurm, 1);
	if (users[_i].user)
		setenv("USER", users[_i].user, 1);
	if (users[_i].logname)
		setenv("LOGNAME", users[_i].logname, 1);
	slots_identify(&identity, NULL, 0);
	snprintf(number, sizeof(number), "uid%lu", (unsigned long)geteuid());
	ck_assert_str_eq(identity.user, users[_i].expected ? users[_i].expected : number);
}

/* Returns the node's name "n03" with a program and a path. */
static const char *named(const char *program, const char *path)
{
	static struct slots_identity identity;

	snprintf(identity.node, sizeof(identity.node), "n03");
	slots_identify_program(&identity, program, path);
	return identity.node;
}

TEST(all_case, operators_see_the_end_of_a_long_path)
{
	char text[200];

	ck_assert_str_eq(named("cp", "/scratch/a b"), "n03:cp:/scratch/a_b");
	ck_assert_str_eq(named("cp", "/scratch/runs/of/the/last/night/7/checkpoints/model.bin"),
			 "n03:cp:...f/the/last/night/7/checkpoints/model.bin");
	memset(text, 'x', sizeof(text) - 1);
	text[sizeof(text) - 1] = 0;
	ck_assert_uint_eq(strlen(named("cp", text)), 50);
	ck_assert_uint_lt(strlen(named(text, "/scratch")), SLOTS_TEXT_BYTES);
}

TEST(all_case, half_a_meeting_point_is_none)
{
	static const struct {
		const char *address, *port;
	} halves[] = { { "n01", NULL }, { "n01", "" }, { "", "29500" }, { NULL, "29500" } };

	for (size_t i = 0; i < ARRAY_LENGTH(halves); i++) {
		struct slots_identity identity;

		unsetenv("MASTER_ADDR");
		unsetenv("MASTER_PORT");
		if (halves[i].address)
			setenv("MASTER_ADDR", halves[i].address, 1);
		if (halves[i].port)
			setenv("MASTER_PORT", halves[i].port, 1);
		slots_identify(&identity, "", 0);
		ck_assert_ptr_null(strchr(identity.job, ':'));
	}
}
