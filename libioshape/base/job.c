/* SPDX-License-Identifier: Apache-2.0 */
#define _GNU_SOURCE
#include "base/base.h"

#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define MOST_DIGITS 9

/* By the variables that each sets. What srun or mpirun started may start torchrun in turn, so the
 * innermost launcher is asked first. */
static const struct launcher {
	const char *name, *rank, *ranks, *local_rank;
	const char *local_ranks; /* NULL: in Slurm's list */
} launchers[] = {
	{ "torchrun", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE" },
	{ "openmpi", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK",
	  "OMPI_COMM_WORLD_LOCAL_SIZE" },
	{ "slurm", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", NULL },
	{ "mpich", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS" },
	{ "pmi", "PMIX_RANK", "PMIX_SIZE", "PMIX_LOCAL_RANK", "PMIX_LOCAL_SIZE" },
};

/* A number at the beginning of a text; the rest of it, or NULL if there is none. */
static const char *take_number(const char *text, uint32_t *number)
{
	size_t digits = strspn(text, "0123456789");

	if (!digits || digits > MOST_DIGITS)
		return NULL;
	*number = (uint32_t)strtoul(text, NULL, 10);
	return text + digits;
}

static bool read_number(const char *variable, uint32_t *number)
{
	const char *text = secure_getenv(variable), *rest = text ? take_number(text, number) : NULL;

	return rest && !*rest;
}

/* Slurm lists the tasks of all nodes, as in "4(x2),3". 0 if it does not tell of this node. */
static uint32_t slurm_local_ranks(void)
{
	const char *at = secure_getenv("SLURM_STEP_TASKS_PER_NODE");
	uint32_t node, tasks, nodes;

	if (!read_number("SLURM_NODEID", &node))
		return 0;
	while (at && (at = take_number(at, &tasks))) {
		nodes = 1;
		if (!strncmp(at, "(x", 2)) {
			size_t digits = strspn(at + 2, "0123456789");

			/* More than a number holds are enough for every node. */
			if (!take_number(at + 2, &nodes))
				nodes = UINT32_MAX;
			at += 2 + digits + (at[2 + digits] == ')');
		}
		if (node < nodes)
			return tasks;
		node -= nodes;
		at += *at == ',';
	}
	return 0;
}

static void name_job(struct base_job *job)
{
	/* Slurm's job is the same job whoever starts the ranks inside it. */
	static const char *const variables[] = {
		"SLURM_JOB_ID",        "PBS_JOBID",      "LSB_JOBID", "FLUX_JOB_ID",
		"TORCHELASTIC_RUN_ID", "PMIX_NAMESPACE", "PMI_JOBID"
	};

	for (size_t i = 0; i < ARRAY_LENGTH(variables) && !*job->id; i++) {
		const char *text = secure_getenv(variables[i]);

		/* torchrun calls a job without a name "none". */
		if (text && strcmp(text, "none") != 0)
			snprintf(job->id, sizeof(job->id), "%s", text);
	}
}

void base_job_find(struct base_job *job)
{
	*job = (struct base_job){ .ranks = 1, .local_ranks = 1, .launcher = "alone" };
	name_job(job);
	for (size_t i = 0; i < ARRAY_LENGTH(launchers); i++) {
		const struct launcher *launcher = &launchers[i];
		uint32_t rank, ranks, local_ranks = 0;

		if (!read_number(launcher->rank, &rank) || !read_number(launcher->ranks, &ranks) ||
		    rank >= ranks)
			continue;
		job->rank = rank;
		job->ranks = ranks;
		if (!read_number(launcher->local_rank, &job->local_rank))
			job->local_rank = 0;
		if (!launcher->local_ranks)
			local_ranks = slurm_local_ranks();
		else if (!read_number(launcher->local_ranks, &local_ranks))
			local_ranks = 0;
		job->local_ranks = MAX(local_ranks, 1);
		snprintf(job->launcher, sizeof(job->launcher), "%s", launcher->name);
		return;
	}
}

unsigned base_copy_threads(void)
{
	const long online = sysconf(_SC_NPROCESSORS_ONLN);
	struct base_job job;
	unsigned share, most;
	cpu_set_t cores;

	base_job_find(&job);
	share = online > 0 ? (unsigned)online / job.local_ranks : 1;
	most = MIN(MAX(share, 1u), BASE_MOST_COPY_THREADS);
	if (sched_getaffinity(0, sizeof(cores), &cores))
		return most; /* a machine with more cores than a cpu_set_t has */
	return MIN((unsigned)CPU_COUNT(&cores), most);
}
