/* SPDX-License-Identifier: Apache-2.0 */
/* The state of a pool, made by a coordinator, owned by the caller. */
#include "slots/slots.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

/* The status is its first member: so the pointer that callers hold frees it all. */
struct slots_status_maker {
	struct ioshape_pool_status status;
	char *pool, *coordinator;
	struct ioshape_member *holders, *waiters;
	struct ioshape_pool_job *jobs;
	struct ioshape_pool_act *acts;
};

static void free_members(struct ioshape_member *members, size_t count)
{
	for (size_t i = 0; i < count; i++)
		free((void *)(uintptr_t)members[i].id); /* the others lie behind it */
	free(members);
}

void slots_status_abandon(struct slots_status_maker *maker)
{
	if (!maker)
		return;
	free_members(maker->holders, maker->status.holder_listed);
	free_members(maker->waiters, maker->status.waiter_listed);
	for (size_t i = 0; i < maker->status.job_listed; i++)
		free((void *)(uintptr_t)maker->jobs[i].job);
	free(maker->jobs);
	for (size_t i = 0; i < maker->status.act_listed; i++)
		free((void *)(uintptr_t)maker->acts[i].who);
	free(maker->acts);
	free(maker->pool);
	free(maker->coordinator);
	free(maker);
}

int slots_status_new(struct slots_status_maker **out, const char *pool, const char *coordinator,
		     struct base_error *error)
{
	struct slots_status_maker *maker = calloc(1, sizeof(*maker));

	*out = NULL;
	if (!maker)
		return base_no_memory(error, "a pool's status", sizeof(*maker));
	maker->status.size = sizeof(maker->status);
	maker->pool = strdup(pool);
	maker->coordinator = strdup(coordinator);
	if (!maker->pool || !maker->coordinator) {
		slots_status_abandon(maker);
		return base_no_memory(error, "a pool's status", strlen(pool));
	}
	maker->status.pool = maker->pool;
	maker->status.coordinator = maker->coordinator;
	maker->status.capacity_by = "default";
	*out = maker;
	return 0;
}

struct ioshape_pool_status *slots_status_of(struct slots_status_maker *maker)
{
	return &maker->status;
}

/* Strings in one piece of memory, which begins with the first. */
static int copy_strings(const char **into[], const char *const from[], size_t count)
{
	size_t bytes = 0;
	char *text;

	for (size_t i = 0; i < count; i++)
		bytes += strlen(from[i]) + 1;
	text = malloc(bytes);
	if (!text)
		return -ENOMEM;
	for (size_t i = 0; i < count; i++) {
		*into[i] = text;
		text = stpcpy(text, from[i]) + 1;
	}
	return 0;
}

int slots_status_add(struct slots_status_maker *maker, bool holder,
		     const struct ioshape_member *member)
{
	struct ioshape_member **list = holder ? &maker->holders : &maker->waiters;
	size_t *count = holder ? &maker->status.holder_listed : &maker->status.waiter_listed;
	struct ioshape_member *more;

	more = reallocarray(*list, *count + 1, sizeof(**list));
	if (!more)
		return -ENOMEM;
	*list = more;
	more[*count] = *member;
	if (copy_strings(
		    (const char **[]){ &more[*count].id, &more[*count].job, &more[*count].node },
		    (const char *[]){ member->id, member->job, member->node }, 3))
		return -ENOMEM;
	++*count;
	maker->status.holders = maker->holders;
	maker->status.waiters = maker->waiters;
	return 0;
}

int slots_status_add_job(struct slots_status_maker *maker, const struct ioshape_pool_job *job)
{
	size_t *count = &maker->status.job_listed;
	struct ioshape_pool_job *more = reallocarray(maker->jobs, *count + 1, sizeof(*more));

	if (!more)
		return -ENOMEM;
	maker->status.jobs = maker->jobs = more;
	more[*count] = *job;
	if (copy_strings((const char **[]){ &more[*count].job, &more[*count].user },
			 (const char *[]){ job->job, job->user }, 2))
		return -ENOMEM;
	++*count;
	return 0;
}

int slots_status_add_act(struct slots_status_maker *maker, const struct ioshape_pool_act *act)
{
	size_t *count = &maker->status.act_listed;
	struct ioshape_pool_act *more = reallocarray(maker->acts, *count + 1, sizeof(*more));

	if (!more)
		return -ENOMEM;
	maker->status.acts = maker->acts = more;
	more[*count] = *act;
	if (copy_strings((const char **[]){ &more[*count].who, &more[*count].what },
			 (const char *[]){ act->who, act->what }, 2))
		return -ENOMEM;
	++*count;
	return 0;
}

IOSHAPE_EXPORT void ioshape_pool_status_free(struct ioshape_pool_status *status)
{
	slots_status_abandon((struct slots_status_maker *)status);
}
