/* SPDX-License-Identifier: Apache-2.0 */
/* Who a process is to the others of its pool: what its launcher says. */
#define _GNU_SOURCE
#include "slots/slots.h"
#include "support/check_main.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

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
	/* Slurm's job is the same whoever starts the ranks inside it. */
	setenv("SLURM_JOB_ID", "4711", 1);
	slots_identify(&identity, NULL, 7);
	ck_assert_str_eq(identity.job, "4711");
	ck_assert_uint_eq(identity.share, 7);
	/* And what the user says is what counts. */
	slots_identify(&identity, "mine", 0);
	ck_assert_str_eq(identity.job, "mine");
}

LOOP_TEST(all_case, ranks_without_a_jobs_name_meet_where_they_meet, 0, 2)
{
	struct slots_identity identity;
	char expected[80];

	setenv("TORCHELASTIC_RUN_ID", "none", 1); /* what torchrun says when it was told nothing */
	setenv("MASTER_ADDR", "n01", 1);
	setenv("MASTER_PORT", "29500", 1);
	slots_identify(&identity, NULL, 0);
	ck_assert_str_eq(identity.job, "n01:29500");
	/* Jobs on two hosts, each within its own. */
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
	ck_assert_str_ne(identity.client, again.client);
	ck_assert_uint_eq(strlen(identity.client), 16);
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
	/* What is set to nothing, or to no number, is not set. */
	setenv("RANK", "", 1);
	setenv("WORLD_SIZE", "all", 1);
	slots_identify(&identity, NULL, 0);
	ck_assert_uint_eq(identity.rank, 5);
	ck_assert_uint_eq(identity.ranks, 16);
}

int main(void)
{
	return check_run("identity");
}
