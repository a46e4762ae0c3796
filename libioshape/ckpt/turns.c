/* SPDX-License-Identifier: Apache-2.0 */
/* Saves to one path take their places in the order in which they were asked for. */
#include "ckpt/ckpt.h"

#include <errno.h>
#include <string.h>

void ckpt_turn_begin(struct ioshape_context *context, struct ckpt_turn *turn, const char *path)
{
	struct ckpt_turn **end = &context->turns;

	*turn = (struct ckpt_turn){ .path = path };
	pthread_mutex_lock(&context->lock);
	while (*end)
		end = &(*end)->next;
	*end = turn;
	pthread_mutex_unlock(&context->lock);
}

static bool is_first(const struct ioshape_context *context, const struct ckpt_turn *turn)
{
	const struct ckpt_turn *other = context->turns;

	while (other != turn && strcmp(other->path, turn->path))
		other = other->next;
	return other == turn;
}

int ckpt_turn_wait(struct ioshape_context *context, struct ckpt_turn *turn,
		   struct base_error *error)
{
	int ret = 0;

	pthread_mutex_lock(&context->lock);
	while (!turn->abort_waits && !is_first(context, turn))
		pthread_cond_wait(&context->saves_change, &context->lock);
	if (turn->abort_waits)
		ret = base_fail(error, -ECANCELED, "the save to %s was aborted", turn->path);
	pthread_mutex_unlock(&context->lock);
	return ret;
}

void ckpt_turn_end(struct ioshape_context *context, struct ckpt_turn *turn)
{
	struct ckpt_turn **link = &context->turns;

	pthread_mutex_lock(&context->lock);
	while (*link != turn)
		link = &(*link)->next;
	*link = turn->next;
	pthread_cond_broadcast(&context->saves_change);
	pthread_mutex_unlock(&context->lock);
}
