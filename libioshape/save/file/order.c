/* SPDX-License-Identifier: Apache-2.0 */
/* Saves to one path are put in place in the order in which they were begun. */
#define _GNU_SOURCE
#include "save/file/file.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* Without the directory: as far as the working directory tells. NULL with errno. */
static char *from_working_directory(const char *path)
{
	char *directory, *absolute = NULL;

	if (*path == '/')
		return strdup(path);
	directory = getcwd(NULL, 0);
	if (!directory)
		return NULL;
	if (asprintf(&absolute, "%s/%s", directory, path) < 0)
		absolute = NULL;
	free(directory);
	return absolute;
}

int save_absolute_path(const char *path, char **absolute, struct base_error *error)
{
	const char *slash = strrchr(path, '/'), *name = slash ? slash + 1 : path;
	char *directory = slash ? strndup(path, (size_t)(slash - path) + 1) : strdup(".");
	int code = ENOMEM;
	char *resolved;

	*absolute = NULL;
	if (!*name) {
		free(directory);
		return base_refuse(error, -EINVAL,
				   "cannot save to \"%s\"" BASE_REMEDY "give the name of a file",
				   path);
	}
	resolved = directory ? realpath(directory, NULL) : NULL;
	if (!resolved) {
		*absolute = from_working_directory(path);
		code = *absolute ? 0 : errno;
	} else if (asprintf(absolute, "%s/%s", strcmp(resolved, "/") ? resolved : "", name) < 0) {
		*absolute = NULL;
	}
	free(resolved);
	free(directory);
	if (*absolute)
		return 0;
	if (code == ENOMEM)
		return base_no_memory(error, "a path", strlen(path));
	return base_fail(error, -code, "cannot find the working directory, in which \"%s\" is",
			 path);
}

int save_order_begin(struct ioshape_context *context, struct save_order *order, const char *path,
		     struct base_error *error)
{
	int ret;

	*order = (struct save_order){ 0 };
	ret = save_absolute_path(path, &order->path, error);
	if (ret)
		return ret;
	pthread_mutex_lock(&context->lock);
	TAILQ_INSERT_TAIL(&context->orders, order, entry);
	pthread_mutex_unlock(&context->lock);
	return 0;
}

static bool may_commit(const struct ioshape_context *context, const struct save_order *order,
		       bool urgent)
{
	const struct save_order *other;
	bool earlier = true;

	TAILQ_FOREACH(other, &context->orders, entry)
	{
		if (other == order)
			earlier = false;
		else if (((earlier && !urgent) || other->committing) &&
			 !strcmp(other->path, order->path))
			return false;
	}
	return true;
}

int save_order_wait(struct ioshape_context *context, struct save_order *order, bool urgent,
		    struct base_error *error)
{
	int ret = 0;

	pthread_mutex_lock(&context->lock);
	while (!order->abort_waits && !may_commit(context, order, urgent))
		pthread_cond_wait(&context->saves_change, &context->lock);
	if (order->abort_waits)
		ret = base_refuse(error, -ECANCELED, "the save to \"%s\" was aborted", order->path);
	order->committing = !ret;
	pthread_mutex_unlock(&context->lock);
	return ret;
}

void save_order_committed(struct ioshape_context *context, const struct save_order *order)
{
	struct save_order *other;

	pthread_mutex_lock(&context->lock);
	for (other = TAILQ_FIRST(&context->orders); other != order;
	     other = TAILQ_NEXT(other, entry))
		if (!strcmp(other->path, order->path))
			other->overtaken = true;
	pthread_mutex_unlock(&context->lock);
}

void save_order_end(struct ioshape_context *context, struct save_order *order)
{
	pthread_mutex_lock(&context->lock);
	TAILQ_REMOVE(&context->orders, order, entry);
	pthread_cond_broadcast(&context->saves_change);
	pthread_mutex_unlock(&context->lock);
	free(order->path);
}
