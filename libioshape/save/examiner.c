/* SPDX-License-Identifier: Apache-2.0 */
/* A thread that examines tensors while another one writes them. */
#include "save/file.h"

#include <stdlib.h>

/* Shorter tensors are examined sooner than the thread wakes up. */
#define LEAST_BYTES (1 * MIB)

/* Bytes after which a thread checks whether the save has ended. */
#define STEP_BYTES (1 * MIB)

/*
 * Most bytes that wait for the thread before the save's thread examines bytes itself. At the end of
 * the save, that thread waits for about as many: a few milliseconds.
 */
#define MOST_WAITING_BYTES (16 * MIB)

/* A tensor that waits, or what is left of it. */
struct save_examination {
	STAILQ_ENTRY(save_examination) entry;
	struct base_statistics *statistics;
	struct base_statistics_rest rest;
	const uint8_t *data;
	size_t bytes;
};

/* Records that some bytes have been examined. Returns whether to go on. */
static bool go_on(struct save_examiner *examiner, size_t examined)
{
	bool leaving;

	pthread_mutex_lock(&examiner->lock);
	examiner->waiting_bytes -= examined;
	leaving = examiner->leaving;
	pthread_mutex_unlock(&examiner->lock);
	return !leaving;
}

/* Examines a tensor, and frees the description of the work. */
static void examine(struct save_examiner *examiner, struct save_examination *examination)
{
	size_t step = 0;

	for (; go_on(examiner, step) && examination->bytes; examination->bytes -= step) {
		step = MIN(examination->bytes, STEP_BYTES);
		base_statistics_add(examination->statistics, &examination->rest, examination->data,
				    step);
		examination->data += step;
	}
	base_statistics_end(examination->statistics, &examination->rest);
	free(examination);
}

/* Removes the first tensor from the list. The caller holds the lock. */
static struct save_examination *next(struct save_examiner *examiner)
{
	struct save_examination *first = STAILQ_FIRST(&examiner->waiting);

	if (first)
		STAILQ_REMOVE_HEAD(&examiner->waiting, entry);
	return first;
}

static void *run(void *user)
{
	struct save_examiner *examiner = user;
	struct save_examination *examination;

	pthread_mutex_lock(&examiner->lock);
	while (!examiner->leaving) {
		examination = next(examiner);
		if (!examination) {
			pthread_cond_wait(&examiner->change, &examiner->lock);
			continue;
		}
		examiner->busy = true;
		pthread_mutex_unlock(&examiner->lock);
		examine(examiner, examination);
		pthread_mutex_lock(&examiner->lock);
		examiner->busy = false;
		pthread_cond_signal(&examiner->change);
	}
	pthread_mutex_unlock(&examiner->lock);
	return NULL;
}

/* Starts the thread unless it runs. Returns whether it runs. */
static bool start(struct save_examiner *examiner)
{
	if (examiner->started)
		return true;
	pthread_mutex_init(&examiner->lock, NULL);
	pthread_cond_init(&examiner->change, NULL);
	STAILQ_INIT(&examiner->waiting);
	examiner->started = !base_start_thread(&examiner->thread, run, examiner);
	if (examiner->started)
		return true;
	pthread_cond_destroy(&examiner->change);
	pthread_mutex_destroy(&examiner->lock);
	/* Without a thread the save is slower, and a further attempt would cost time. */
	examiner->allowed = false;
	return false;
}

/* Returns whether the thread has enough to do. If not, that stays so until the caller adds work. */
static bool is_behind(struct save_examiner *examiner)
{
	bool behind;

	pthread_mutex_lock(&examiner->lock);
	behind = examiner->waiting_bytes > MOST_WAITING_BYTES;
	pthread_mutex_unlock(&examiner->lock);
	return behind;
}

bool save_examiner_take(struct save_examiner *examiner, struct base_statistics *statistics,
			const struct base_statistics_rest *rest, const void *data, size_t bytes)
{
	struct save_examination *examination;

	if (!examiner->allowed || bytes < LEAST_BYTES || !examiner->file ||
	    !io_writer_is_starved(examiner->file) || !start(examiner) || is_behind(examiner))
		return false;
	examination = malloc(sizeof(*examination));
	if (!examination)
		return false;
	*examination = (struct save_examination){
		.statistics = statistics,
		.rest = *rest,
		.data = data,
		.bytes = bytes,
	};
	pthread_mutex_lock(&examiner->lock);
	STAILQ_INSERT_TAIL(&examiner->waiting, examination, entry);
	examiner->waiting_bytes += bytes;
	pthread_cond_signal(&examiner->change);
	pthread_mutex_unlock(&examiner->lock);
	return true;
}

void save_examiner_finish(struct save_examiner *examiner)
{
	struct save_examination *examination;

	if (!examiner || !examiner->started)
		return;
	pthread_mutex_lock(&examiner->lock);
	while ((examination = next(examiner))) {
		pthread_mutex_unlock(&examiner->lock);
		examine(examiner, examination);
		pthread_mutex_lock(&examiner->lock);
	}
	while (examiner->busy)
		pthread_cond_wait(&examiner->change, &examiner->lock);
	pthread_mutex_unlock(&examiner->lock);
}

void save_examiner_close(struct save_examiner *examiner)
{
	struct save_examination *examination;

	if (!examiner->started)
		return;
	pthread_mutex_lock(&examiner->lock);
	examiner->leaving = true;
	while ((examination = next(examiner)))
		free(examination);
	pthread_cond_signal(&examiner->change);
	pthread_mutex_unlock(&examiner->lock);
	pthread_join(examiner->thread, NULL);
	pthread_cond_destroy(&examiner->change);
	pthread_mutex_destroy(&examiner->lock);
	examiner->started = false;
}
