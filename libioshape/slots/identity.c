/* SPDX-License-Identifier: Apache-2.0 */
/* Who this process is: what its launcher says in variables. */
#define _GNU_SOURCE
#include "slots/slots.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define DEFAULT_SHARE 100u

/* Others read it in their logs and terminals: what could do harm there is replaced. */
static void take_text(char *into, size_t room, const char *from)
{
	size_t i;

	for (i = 0; from[i] && i < room - 1; i++)
		into[i] = from[i] > ' ' && from[i] < 0x7f ? from[i] : '_';
	into[i] = 0;
}

static const char *first_set(const char *const *variables)
{
	for (; *variables; variables++) {
		const char *text = secure_getenv(*variables);

		if (text && *text)
			return text;
	}
	return NULL;
}

/* What every host calls itself. */
static bool is_loopback(const char *address)
{
	return !strcmp(address, "localhost") || !strcmp(address, "::1") ||
	       !strncmp(address, "127.", 4);
}

static void name_job(struct slots_identity *identity, const struct base_job *job)
{
	const char *meeting = secure_getenv("MASTER_ADDR"), *port = secure_getenv("MASTER_PORT");
	char text[sizeof(job->id)];

	/* Ranks of one job meet at one place; and what is started by hand shares a terminal. */
	if (meeting && is_loopback(meeting))
		meeting = identity->node;
	if (*job->id)
		snprintf(text, sizeof(text), "%s", job->id);
	else if (meeting && *meeting && port && *port)
		snprintf(text, sizeof(text), "%.50s:%.8s", meeting, port);
	else
		snprintf(text, sizeof(text), "%.50s-%ld", identity->node, (long)getsid(0));
	take_text(identity->job, sizeof(identity->job), text);
}

/* Without asking a directory service, which may hang. */
static void name_user(struct slots_identity *identity)
{
	static const char *const users[] = { "SLURM_JOB_USER", "USER", "LOGNAME", NULL };
	const char *user = first_set(users);

	if (user)
		take_text(identity->user, sizeof(identity->user), user);
	else
		snprintf(identity->user, sizeof(identity->user), "uid%lu",
			 (unsigned long)geteuid());
}

void slots_identify_client(struct slots_identity *identity)
{
	snprintf(identity->client, sizeof(identity->client), "%016llx",
		 (unsigned long long)base_random());
}

void slots_identify(struct slots_identity *identity, const char *job, uint32_t share)
{
	struct base_job found;
	char node[SLOTS_TEXT_BYTES] = "";

	memset(identity, 0, sizeof(*identity));
	gethostname(node, sizeof(node) - 1);
	take_text(identity->node, sizeof(identity->node), *node ? node : "?");
	name_user(identity);
	base_job_find(&found);
	identity->rank = found.rank;
	identity->ranks = found.ranks;
	identity->share = share ? share : DEFAULT_SHARE;
	if (job && *job)
		take_text(identity->job, sizeof(identity->job), job);
	else
		name_job(identity, &found);
	slots_identify_client(identity);
}
