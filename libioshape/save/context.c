/* SPDX-License-Identifier: Apache-2.0 */
/* Contexts: the checks at the beginning of each call, queues that are kept from save to save, and
 * absolute paths. */
#define _GNU_SOURCE
#include "save/file.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* ---- The beginning of each call -------------------------------------------------------------- */

int save_enter(const struct ioshape_context *context, struct base_error *error)
{
	if (!context)
		return base_fail_reason_with(error, -EINVAL, "open one first",
					     "no context was given");
	if (context->owner != base_pid())
		return base_fail_reason_with(error, -EPERM, "open one after the fork",
					     "this context belongs to the parent process");
	return 0;
}

int save_enter_path(const struct ioshape_context *context, const char *path, void *options,
		    size_t options_bytes, const void *given, const char *what,
		    struct base_error *error)
{
	int ret = save_enter(context, error);

	if (!ret)
		ret = base_take_options(options, options_bytes, given, what, error);
	if (!ret && !path)
		ret = base_fail_reason(error, -EINVAL, "no path was given");
	return ret;
}

/* ---- Settings of the context ----------------------------------------------------------------- */

struct save_settings save_settings(const struct ioshape_context *context)
{
	return (struct save_settings){
		.log = &context->log,
		.io = &context->config,
		.slots = &context->slots.config,
		.pool_name = context->slots.pool_name,
	};
}

/* ---- Queues kept from save to save ----------------------------------------------------------- */

int save_take_queue(struct ioshape_context *context, struct io_queue **queue,
		    struct base_error *error)
{
	*queue = NULL;
	pthread_mutex_lock(&context->lock);
	if (context->queue_count)
		*queue = context->queues[--context->queue_count];
	pthread_mutex_unlock(&context->lock);
	return *queue ? 0 : io_queue_open(queue, &context->config, error);
}

void save_return_queue(struct ioshape_context *context, struct io_queue *queue)
{
	if (!queue)
		return;
	pthread_mutex_lock(&context->lock);
	if (context->queue_count < SAVE_KEPT_QUEUES) {
		context->queues[context->queue_count++] = queue;
		queue = NULL;
	}
	pthread_mutex_unlock(&context->lock);
	io_queue_close(queue);
}

/* ---- Paths ----------------------------------------------------------------------------------- */

/* Makes a path absolute by the working directory alone, for a directory that cannot be resolved.
 * The caller frees the result. NULL with errno on failure. */
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
		return base_fail_reason_with(error, -EINVAL, "give the name of a file",
					     "cannot save to \"%s\"", path);
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
	return base_fail(error, -code, "cannot find the working directory to resolve \"%s\"", path);
}
