/* SPDX-License-Identifier: Apache-2.0 */
#include "base/base.h"

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
