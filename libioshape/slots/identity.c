/* SPDX-License-Identifier: Apache-2.0 */
/* Who this process is: what its launcher says in variables. */
#include "slots/slots.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define DEFAULT_SHARE 100u

/* Others read it in their logs and terminals: what could do harm there is replaced. */
static void take_text(char *into, const char *from)
{
	size_t i;

	for (i = 0; from[i] && i < SLOTS_TEXT_BYTES - 1; i++)
		into[i] = from[i] > ' ' && from[i] < 0x7f ? from[i] : '_';
	into[i] = 0;
}

static const char *first_set(const char *const *variables)
{
	for (; *variables; variables++) {
		const char *text = getenv(*variables);

		/* torchrun calls a job without a name "none". */
		if (text && *text && strcmp(text, "none"))
			return text;
	}
	return NULL;
}

static uint32_t first_number(const char *const *variables, uint32_t otherwise)
{
	uint32_t number = otherwise;

	for (; *variables; variables++) {
		const char *text = getenv(*variables);

		if (text && *text && !base_env_count(*variables, &number, NULL))
			return number;
	}
	return otherwise;
}

static void name_job(struct slots_identity *identity)
{
	/* Slurm's job is the same job whoever starts the ranks inside it. */
	static const char *const jobs[] = { "SLURM_JOB_ID",        "PBS_JOBID",
					    "LSB_JOBID",           "FLUX_JOB_ID",
					    "TORCHELASTIC_RUN_ID", "PMIX_NAMESPACE",
					    "PMI_JOBID",           NULL };
	static const char *const meetings[] = { "MASTER_ADDR", NULL };
	static const char *const ports[] = { "MASTER_PORT", NULL };
	const char *job = first_set(jobs), *meeting = first_set(meetings);
	const char *port = first_set(ports);
	char text[SLOTS_TEXT_BYTES];

	if (job) {
		take_text(identity->job, job);
		return;
	}
	/* Ranks of one job meet at one place; and what is started by hand shares a terminal. */
	if (meeting && port)
		snprintf(text, sizeof(text), "%.50s:%.8s", meeting, port);
	else
		snprintf(text, sizeof(text), "%.50s-%ld", identity->node, (long)getsid(0));
	take_text(identity->job, text);
}

void slots_identify_client(struct slots_identity *identity)
{
	snprintf(identity->client, sizeof(identity->client), "%016llx",
		 (unsigned long long)base_random());
}

void slots_identify(struct slots_identity *identity, const char *job, uint32_t share)
{
	static const char *const ranks[] = { "RANK",         "OMPI_COMM_WORLD_RANK",
					     "SLURM_PROCID", "PMI_RANK",
					     "PMIX_RANK",    NULL };
	static const char *const sizes[] = { "WORLD_SIZE",
					     "OMPI_COMM_WORLD_SIZE",
					     "SLURM_STEP_NUM_TASKS",
					     "PMI_SIZE",
					     "PMIX_SIZE",
					     NULL };
	char node[SLOTS_TEXT_BYTES] = "";

	memset(identity, 0, sizeof(*identity));
	gethostname(node, sizeof(node) - 1);
	take_text(identity->node, *node ? node : "?");
	identity->rank = first_number(ranks, 0);
	identity->ranks = MAX(first_number(sizes, 1), 1);
	identity->share = share ? share : DEFAULT_SHARE;
	if (job && *job)
		take_text(identity->job, job);
	else
		name_job(identity);
	slots_identify_client(identity);
}
