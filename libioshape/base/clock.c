/* SPDX-License-Identifier: Apache-2.0 */
#include "base/base.h"

#include <errno.h>
#include <time.h>

uint64_t base_now_ns(void)
{
	struct timespec now;

	clock_gettime(CLOCK_MONOTONIC, &now);
	return (uint64_t)now.tv_sec * 1000000000ull + (uint64_t)now.tv_nsec;
}

double base_wall_seconds(void)
{
	struct timespec now;

	clock_gettime(CLOCK_REALTIME, &now);
	return (double)now.tv_sec + (double)now.tv_nsec * 1e-9;
}

void base_cond_init(pthread_cond_t *condition)
{
	pthread_condattr_t attributes;

	pthread_condattr_init(&attributes);
	pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC);
	pthread_cond_init(condition, &attributes);
	pthread_condattr_destroy(&attributes);
}

/* Longer is for ever; it keeps the sum with the clock within its type. */
#define LONGEST_TIMEOUT_MS (1000ll * 3600 * 24 * 365 * 100)

uint64_t base_deadline_ns(int64_t ms)
{
	return ms ? base_now_ns() + base_ms_to_ns((uint64_t)MIN(MAX(ms, 0), LONGEST_TIMEOUT_MS)) :
		    0;
}

bool base_cond_wait_ms(pthread_cond_t *condition, pthread_mutex_t *lock, int64_t timeout_ms)
{
	struct timespec when;

	timeout_ms = MIN(timeout_ms, LONGEST_TIMEOUT_MS);
	clock_gettime(CLOCK_MONOTONIC, &when);
	when.tv_sec += (time_t)(timeout_ms / 1000);
	when.tv_nsec += (long)(timeout_ms % 1000) * 1000000;
	if (when.tv_nsec >= 1000000000) {
		when.tv_sec++;
		when.tv_nsec -= 1000000000;
	}
	return pthread_cond_timedwait(condition, lock, &when) != ETIMEDOUT;
}

struct base_budget base_budget_begin(void)
{
	return (struct base_budget){ .entries = BASE_TIDY_ENTRIES };
}

bool base_budget_look(struct base_budget *budget)
{
	if (budget && !budget->until_ns)
		budget->until_ns = base_now_ns() + BASE_TIDY_NS;
	if (budget && base_now_ns() >= budget->until_ns)
		budget->entries = 0;
	return !budget || budget->entries;
}

bool base_budget_take(struct base_budget *budget)
{
	const bool may = base_budget_look(budget);

	if (budget && may)
		budget->entries--;
	return may;
}
