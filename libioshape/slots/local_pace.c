/* SPDX-License-Identifier: Apache-2.0 */
/* Bandwidth that an operator or a job has limited, of those on one host. Pure, as the queue is. */
#include "slots/local.h"

#define PACE_NS 250000000.0           /* a grant of bandwidth lasts about so long ... */
#define PACE_WRITERS 8u               /* ... shared by so many writers at most */
#define LONGEST_PACE_NS 3600000000000 /* it is given no longer in advance */
#define UNLIMITED_MS 10000u           /* where bandwidth has no limit, ask again then */

/* 0 stands for no limit. */
static uint64_t lower_rate(uint64_t a, uint64_t b)
{
	return a && b ? MIN(a, b) : MAX(a, b);
}

/* How long so many bytes take, also below 0. */
static int64_t duration_ns(double bytes, uint64_t rate)
{
	const double ns = bytes * 1e9 / (double)rate, most = LONGEST_PACE_NS;

	return (int64_t)MAX(MIN(ns, most), -most);
}

static uint64_t later(uint64_t ns, int64_t more_ns)
{
	return more_ns < 0 ? ns - MIN(ns, (uint64_t)-more_ns) : ns + (uint64_t)more_ns;
}

/* When bandwidth is free again. A clock may have begun again since that was written. */
static uint64_t free_at(uint64_t free_ns, uint64_t now)
{
	return MIN(free_ns, now + (uint64_t)LONGEST_PACE_NS);
}

void local_queue_pace(struct local_table *table, const struct slots_config *config, int64_t wanted,
		      struct slots_grant *grant)
{
	struct local_head *head = &table->image.head;
	const uint64_t job_rate = lower_rate(config->rate, head->set_job_rate);
	const uint64_t pool_rate = head->set_pool_rate, rate = lower_rate(job_rate, pool_rate);
	const uint64_t now = table->now_ns;
	double bytes = (double)wanted;
	struct local_job *job;
	uint64_t start = now;

	local_tick(table);
	*grant = (struct slots_grant){ .end_ms = rate ? 0 : UNLIMITED_MS };
	if (!rate)
		return;
	job = local_job_named(table, config->identity.job);
	if (wanted > 0) {
		const uint32_t writers = MIN(MAX(local_count(table).holders, 1u), PACE_WRITERS);

		bytes = MAX(bytes, (double)rate * (PACE_NS / 1e9) / writers);
		start = MAX(start, pool_rate ? free_at(head->free_ns, now) : 0);
		start = MAX(start, job_rate ? free_at(job->free_ns, now) : 0);
		head->free_ns = pool_rate ? start : 0;
		job->free_ns = job_rate ? start : 0;
		grant->bytes = (uint64_t)bytes;
		grant->start_ms = (uint32_t)((start - now) / 1000000);
		grant->end_ms =
			(uint32_t)((later(start, duration_ns(bytes, rate)) - now) / 1000000 + 1);
	}
	if (pool_rate)
		head->free_ns = later(head->free_ns, duration_ns(bytes, pool_rate));
	if (job_rate)
		job->free_ns = later(job->free_ns, duration_ns(bytes, job_rate));
	local_changed(table, head);
	local_changed(table, job);
}

void local_forget_paces(struct local_table *table)
{
	table->image.head.free_ns = 0;
	for (uint32_t i = 0; i < table->image.head.job_end; i++) {
		local_job(table, i)->free_ns = 0;
		local_changed(table, local_job(table, i));
	}
}
