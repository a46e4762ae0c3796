/* SPDX-License-Identifier: Apache-2.0 */
/* What a context keeps from save to save. */
#define _GNU_SOURCE
#include "save/context/context.h"

#include <stdlib.h>
#include <string.h>

int save_take_lane(struct ioshape_context *context, struct ring_lane **lane,
		   struct base_error *error)
{
	*lane = NULL;
	pthread_mutex_lock(&context->lock);
	if (context->lane_count)
		*lane = context->lanes[--context->lane_count];
	pthread_mutex_unlock(&context->lock);
	return *lane ? 0 : ring_lane_open(lane, &context->config, error);
}

void save_return_lane(struct ioshape_context *context, struct ring_lane *lane)
{
	if (!lane)
		return;
	pthread_mutex_lock(&context->lock);
	if (context->lane_count < SAVE_KEPT_LANES) {
		context->lanes[context->lane_count++] = lane;
		lane = NULL;
	}
	pthread_mutex_unlock(&context->lock);
	ring_lane_close(lane);
}

static bool should_tidy(struct ioshape_context *context, const char *path)
{
	char *directory = base_directory_of(path);
	bool known = !directory;

	pthread_mutex_lock(&context->lock);
	for (size_t i = 0; !known && i < context->tidied_count; i++)
		known = !strcmp(context->tidied[i], directory);
	/* A job that saves into ever new directories has nothing to tidy in them. */
	if (!known && context->tidied_count < SAVE_KEPT_DIRECTORIES) {
		context->tidied[context->tidied_count++] = directory;
		directory = NULL;
	} else {
		known = true;
	}
	pthread_mutex_unlock(&context->lock);
	free(directory);
	return !known;
}

struct base_budget *save_begin_tidying(struct ioshape_context *context, const char *path,
				       struct base_budget *budget)
{
	if (!should_tidy(context, path))
		return NULL;
	*budget = base_budget_begin();
	return budget;
}

/* The next save into the directory removes the rest. */
static void tidy_again(struct ioshape_context *context, const char *path)
{
	char *directory = base_directory_of(path), *tidied = NULL;

	pthread_mutex_lock(&context->lock);
	for (size_t i = 0; directory && !tidied && i < context->tidied_count; i++) {
		if (strcmp(context->tidied[i], directory) != 0)
			continue;
		tidied = context->tidied[i];
		context->tidied[i] = context->tidied[--context->tidied_count];
	}
	pthread_mutex_unlock(&context->lock);
	free(tidied);
	free(directory);
}

void save_end_tidying(struct ioshape_context *context, const char *path,
		      const struct base_budget *budget)
{
	if (budget && base_budget_is_spent(budget))
		tidy_again(context, path);
}
