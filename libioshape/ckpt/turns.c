/* SPDX-License-Identifier: Apache-2.0 */
/* Saves to one file take their places in the order in which they were asked for. */
#define _GNU_SOURCE
#include "ckpt/ckpt.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* Without the directory: as far as the working directory tells. */
static char *from_working_directory(const char *path)
{
	char *directory = *path == '/' ? NULL : getcwd(NULL, 0), *absolute = NULL;

	if (!directory)
		return strdup(path);
	if (asprintf(&absolute, "%s/%s", directory, path) < 0)
		absolute = NULL;
	free(directory);
	return absolute;
}

int ckpt_absolute_path(const char *path, char **absolute, struct base_error *error)
{
	const char *slash = strrchr(path, '/'), *name = slash ? slash + 1 : path;
	char *directory = slash ? strndup(path, (size_t)(slash - path) + 1) : strdup(".");
	char *resolved;

	*absolute = NULL;
	if (!*name) {
		free(directory);
		return base_fail(error, -EINVAL, "cannot save to \"%s\"; give the name of a file",
				 path);
	}
	resolved = directory ? realpath(directory, NULL) : NULL;
	if (!resolved)
		*absolute = from_working_directory(path);
	else if (asprintf(absolute, "%s/%s", strcmp(resolved, "/") ? resolved : "", name) < 0)
		*absolute = NULL;
	free(resolved);
	free(directory);
	return *absolute ? 0 : base_no_memory(error, "a path", strlen(path));
}

int ckpt_turn_begin(struct ioshape_context *context, struct ckpt_turn *turn, const char *path,
		    struct base_error *error)
{
	struct ckpt_turn **end = &context->turns;
	int ret;

	*turn = (struct ckpt_turn){ 0 };
	ret = ckpt_absolute_path(path, &turn->path, error);
	if (ret)
		return ret;
	pthread_mutex_lock(&context->lock);
	while (*end)
		end = &(*end)->next;
	*end = turn;
	pthread_mutex_unlock(&context->lock);
	return 0;
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
	free(turn->path);
}

/* ---- Room ------------------------------------------------------------------------------------ */

void ckpt_turn_note_room(struct ioshape_context *context, struct ckpt_turn *turn,
			 enum ckpt_turn_room room)
{
	pthread_mutex_lock(&context->lock);
	turn->room = room;
	pthread_mutex_unlock(&context->lock);
}

/* Whether one of the others of its path, from `first` up to `end`, stands so. */
static bool has_other(const struct ckpt_turn *first, const struct ckpt_turn *end,
		      const struct ckpt_turn *turn, enum ckpt_turn_room room)
{
	const struct ckpt_turn *other = first;

	while (other != end && (other->room != room || strcmp(other->path, turn->path) != 0))
		other = other->next;
	return other != end;
}

bool ckpt_turn_is_behind(struct ioshape_context *context, const struct ckpt_turn *turn)
{
	bool behind;

	pthread_mutex_lock(&context->lock);
	behind = has_other(context->turns, turn, turn, CKPT_ROOM_AWAITED);
	pthread_mutex_unlock(&context->lock);
	return behind;
}

bool ckpt_turn_is_overtaken(struct ioshape_context *context, const struct ckpt_turn *turn)
{
	bool overtaken;

	pthread_mutex_lock(&context->lock);
	overtaken = has_other(turn->next, NULL, turn, CKPT_ROOM_TAKEN);
	pthread_mutex_unlock(&context->lock);
	return overtaken;
}
