/* SPDX-License-Identifier: Apache-2.0 */
/* Deadlines, and the library's threads: how they start, help each other and copy together. */
#define _GNU_SOURCE
#include "base/base.h"

#include <errno.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

/* ---- Deadlines and waits --------------------------------------------------------------------- */

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

/* ---- Starting a thread ----------------------------------------------------------------------- */

int base_start_thread(pthread_t *thread, void *(*run)(void *), void *argument)
{
	sigset_t all, before;
	int ret;

	/* The application's signals are for its own threads. */
	sigfillset(&all);
	pthread_sigmask(SIG_SETMASK, &all, &before);
	ret = pthread_create(thread, NULL, run, argument);
	pthread_sigmask(SIG_SETMASK, &before, NULL);
	return -ret;
}

/* ---- Threads that help ----------------------------------------------------------------------- */

static void *help(void *argument)
{
	struct base_crew *crew = argument;

	pthread_mutex_lock(&crew->lock);
	for (;;) {
		while (!crew->places && !crew->dismissed)
			pthread_cond_wait(&crew->begins, &crew->lock);
		if (crew->dismissed)
			break;
		crew->places--;
		crew->busy++;
		pthread_mutex_unlock(&crew->lock);
		crew->work(crew->user);
		pthread_mutex_lock(&crew->lock);
		if (!--crew->busy)
			pthread_cond_signal(&crew->ends);
	}
	pthread_mutex_unlock(&crew->lock);
	return NULL;
}

void base_crew_init(struct base_crew *crew)
{
	*crew = (struct base_crew){ .owner = base_pid() };
	pthread_mutex_init(&crew->lock, NULL);
	pthread_cond_init(&crew->begins, NULL);
	pthread_cond_init(&crew->ends, NULL);
}

void base_crew_begin(struct base_crew *crew, unsigned wanted, void (*work)(void *user), void *user)
{
	wanted = MIN(wanted, BASE_MOST_HELPERS);
	while (crew->started < wanted &&
	       !base_start_thread(&crew->threads[crew->started], help, crew))
		crew->started++;
	pthread_mutex_lock(&crew->lock);
	crew->work = work;
	crew->user = user;
	crew->places = MIN(wanted, crew->started);
	pthread_cond_broadcast(&crew->begins);
	pthread_mutex_unlock(&crew->lock);
}

void base_crew_finish(struct base_crew *crew)
{
	pthread_mutex_lock(&crew->lock);
	crew->places = 0;
	while (crew->busy)
		pthread_cond_wait(&crew->ends, &crew->lock);
	pthread_mutex_unlock(&crew->lock);
}

void base_crew_dismiss(struct base_crew *crew)
{
	if (crew->owner != base_pid())
		return;
	pthread_mutex_lock(&crew->lock);
	crew->dismissed = true;
	pthread_cond_broadcast(&crew->begins);
	pthread_mutex_unlock(&crew->lock);
	while (crew->started)
		pthread_join(crew->threads[--crew->started], NULL);
	pthread_cond_destroy(&crew->ends);
	pthread_cond_destroy(&crew->begins);
	pthread_mutex_destroy(&crew->lock);
}

/* ---- Copies by several threads --------------------------------------------------------------- */

#define SLICE_BYTES (256 * KIB)

/* Below this, nobody is woken. */
#define PARALLEL_BYTES (1 * MIB)

struct base_copier {
	struct base_crew crew;
	unsigned helpers;
	char *to;
	const char *from;
	size_t bytes;
	_Atomic size_t next; /* byte that nobody has taken yet */
};

struct base_copier *base_copier_open(void)
{
	struct base_copier *copier = calloc(1, sizeof(*copier));

	if (!copier)
		return NULL;
	base_crew_init(&copier->crew);
	copier->helpers = base_copy_threads() - 1;
	return copier;
}

static void copy_slices(void *user)
{
	struct base_copier *copier = user;
	size_t at;

	while ((at = atomic_fetch_add(&copier->next, SLICE_BYTES)) < copier->bytes)
		memcpy(copier->to + at, copier->from + at, MIN(copier->bytes - at, SLICE_BYTES));
}

void base_copier_copy(struct base_copier *copier, void *to, const void *from, size_t bytes)
{
	if (!copier) {
		memcpy(to, from, bytes);
		return;
	}
	copier->to = to;
	copier->from = from;
	copier->bytes = bytes;
	atomic_store(&copier->next, 0);
	base_crew_begin(&copier->crew, bytes < PARALLEL_BYTES ? 0 : copier->helpers, copy_slices,
			copier);
	copy_slices(copier);
	base_crew_finish(&copier->crew);
}

void base_copier_free(struct base_copier *copier)
{
	if (!copier)
		return;
	base_crew_dismiss(&copier->crew);
	free(copier);
}
