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

/* All its strings in one piece of memory, which begins with the id. */
static int copy_strings(struct ioshape_member *into, const struct ioshape_member *from)
{
	const size_t id = strlen(from->id) + 1, job = strlen(from->job) + 1;
	const size_t node = strlen(from->node) + 1;
	char *text = malloc(id + job + node);

	if (!text)
		return -ENOMEM;
	into->id = memcpy(text, from->id, id);
	into->job = memcpy(text + id, from->job, job);
	into->node = memcpy(text + id + job, from->node, node);
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
	if (copy_strings(&more[*count], member))
		return -ENOMEM;
	++*count;
	maker->status.holders = maker->holders;
	maker->status.waiters = maker->waiters;
	return 0;
}

IOSHAPE_EXPORT void ioshape_pool_status_free(struct ioshape_pool_status *status)
{
	slots_status_abandon((struct slots_status_maker *)status);
}
