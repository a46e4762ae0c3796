/* SPDX-License-Identifier: Apache-2.0 */
/* What the table of a pool says to an operator. */
#include "slots/local.h"

#include <string.h>

static void list(struct local_table *table, enum local_state state,
		 struct ioshape_pool_status *status)
{
	const struct local_member *member = local_next(table, state, NULL);
	const bool holds = state == LOCAL_HOLDING;

	for (uint32_t i = 0; member && i < SLOTS_LISTED; i++) {
		const struct ioshape_member row = {
			.id = member->id,
			.job = member->job,
			.node = member->node,
			.rank = member->rank,
			.weight = member->weight,
			.express = holds && !member->given,
			.urgent = local_is_urgent(member),
			.expected_bytes = member->bytes,
			.written_bytes = member->passed,
			.fence = member->fence,
			.since_s = base_seconds(table->now_ns - member->since_ns),
			.lease_s = base_seconds(member->deadline_ns - table->now_ns),
		};

		slots_status_add(status, holds, &row);
		member = local_next(table, state, member);
	}
}

/* With what it has written in the slots that it holds. */
static uint64_t written_by(struct local_table *table, const struct local_job *job)
{
	uint64_t written = job->written;

	for (uint32_t i = 0; i < table->image.head.member_end; i++) {
		const struct local_member *member = local_member(table, i);

		if (member->state == LOCAL_HOLDING && !strcmp(member->job, job->name))
			written += member->passed;
	}
	return written;
}

/* Those that wrote most come first. */
static void list_jobs(struct local_table *table, struct ioshape_pool_status *status)
{
	bool listed[LOCAL_JOBS] = { false };

	for (uint32_t n = 0; n < table->image.head.job_end; n++) {
		struct ioshape_pool_job row = { 0 };
		uint32_t most = 0;

		for (uint32_t i = 0; i < table->image.head.job_end; i++) {
			const struct local_job *job = local_job(table, i);
			const uint64_t written = written_by(table, job);

			if (listed[i] || (row.job && written <= row.written_bytes))
				continue;
			row = (struct ioshape_pool_job){ .job = job->name,
							 .user = job->user,
							 .written_bytes = written,
							 .writes = job->writes };
			most = i;
		}
		listed[most] = true;
		slots_status_add_job(status, &row);
	}
}

/* In the last 60 s, if those of the minute before came evenly. */
static uint32_t grants_last_minute(const struct local_table *table)
{
	const struct local_head *head = &table->image.head;
	const uint64_t minute = table->now_ns / 60000000000;
	const double left = 1 - (double)(table->now_ns % 60000000000) / 60e9;
	double grants = 0;

	if (minute == head->minute)
		grants = head->this_minute + head->last_minute * left;
	else if (minute == head->minute + 1)
		grants = head->this_minute * left;
	/* A forged head may say any numbers. */
	return (uint32_t)MIN(grants + 0.5, UINT32_MAX);
}

void local_status(struct local_table *table, uint32_t usual, struct ioshape_pool_status *status)
{
	const struct local_head *head = &table->image.head;
	struct local_usage usage;

	local_tick(table);
	usage = local_count(table);
	status->capacity = head->set_capacity || head->capacity ? local_capacity(head) : usual;
	status->capacity_by = head->set_capacity ? "operator" : head->by_job ? "job" : "default";
	status->used = (uint32_t)MIN(usage.used, UINT32_MAX);
	status->pool_bytes_per_s = head->set_pool_rate;
	status->job_bytes_per_s = head->set_job_rate;
	status->small_bytes = local_small_bytes(head);
	status->express = local_express(head);
	status->grants = head->grants;
	status->grants_last_minute = grants_last_minute(table);
	status->holder_count = usage.holders;
	status->waiter_count = usage.waiters;
	list(table, LOCAL_HOLDING, status);
	list(table, LOCAL_WAITING, status);
	list_jobs(table, status);
	status->changed_s = (double)head->set_ms / 1e3;
}
