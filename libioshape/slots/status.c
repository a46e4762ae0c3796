/* SPDX-License-Identifier: Apache-2.0 */
/* The state of a pool, made by a coordinator, owned by the caller. */
#include "slots/slots.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef char text[SLOTS_NAME_BYTES];

/* A status with room for all that it can list. It is the first member: so the pointer that callers
 * hold frees it all. */
struct whole {
	struct ioshape_pool_status status;
	text pool;
	struct ioshape_member holders[SLOTS_LISTED], waiters[SLOTS_LISTED];
	text holder_texts[SLOTS_LISTED][3], waiter_texts[SLOTS_LISTED][3];
	struct ioshape_pool_job jobs[SLOTS_LISTED_JOBS];
	text job_texts[SLOTS_LISTED_JOBS][2];
	struct ioshape_pool_limit limits[SLOTS_LIMITS];
	text limit_texts[SLOTS_LIMITS];
};

int slots_status_new(struct ioshape_pool_status **out, const char *pool, const char *coordinator,
		     struct base_error *error)
{
	struct whole *whole = calloc(1, sizeof(*whole));

	*out = NULL;
	if (!whole)
		return base_no_memory(error, "a pool's status", sizeof(*whole));
	snprintf(whole->pool, sizeof(whole->pool), "%s", pool);
	whole->status = (struct ioshape_pool_status){
		.size = sizeof(whole->status),
		.pool = whole->pool,
		.coordinator = coordinator,
		.capacity_by = "default",
		.holders = whole->holders,
		.waiters = whole->waiters,
		.jobs = whole->jobs,
		.limits = whole->limits,
	};
	*out = &whole->status;
	return 0;
}

static void copy(text into, const char **from)
{
	snprintf(into, sizeof(text), "%s", *from);
	*from = into;
}

void slots_status_add(struct ioshape_pool_status *status, bool holder,
		      const struct ioshape_member *member)
{
	struct whole *whole = (struct whole *)status;
	size_t *count = holder ? &status->holder_listed : &status->waiter_listed;
	struct ioshape_member *row = (holder ? whole->holders : whole->waiters) + *count;
	text *texts = (holder ? whole->holder_texts : whole->waiter_texts)[*count];

	if (*count == SLOTS_LISTED)
		return;
	*row = *member;
	copy(texts[0], &row->id);
	copy(texts[1], &row->job);
	copy(texts[2], &row->node);
	++*count;
}

void slots_status_add_job(struct ioshape_pool_status *status, const struct ioshape_pool_job *job)
{
	struct whole *whole = (struct whole *)status;
	struct ioshape_pool_job *row = whole->jobs + status->job_listed;
	text *texts = whole->job_texts[status->job_listed];

	if (status->job_listed == SLOTS_LISTED_JOBS)
		return;
	*row = *job;
	copy(texts[0], &row->job);
	copy(texts[1], &row->user);
	status->job_listed++;
}

void slots_status_add_limit(struct ioshape_pool_status *status,
			    const struct ioshape_pool_limit *limit)
{
	struct whole *whole = (struct whole *)status;
	struct ioshape_pool_limit *row = whole->limits + status->limit_listed;

	if (status->limit_listed == SLOTS_LIMITS)
		return;
	*row = *limit;
	copy(whole->limit_texts[status->limit_listed], limit->job ? &row->job : &row->user);
	status->limit_listed++;
}

IOSHAPE_EXPORT void ioshape_pool_status_free(struct ioshape_pool_status *status)
{
	free(status);
}
