/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Contexts: what every call begins with, what they keep from save to save, and directories that
 * appear whole.
 */
#define _GNU_SOURCE
#include "save/file.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* ---- Every call ------------------------------------------------------------------------------ */

int save_enter(const struct ioshape_context *context, struct base_error *error)
{
	if (!context)
		return base_refuse_with(error, -EINVAL, "open one first", "no context was given");
	if (context->owner != base_pid())
		return base_refuse_with(error, -EPERM, "open one after the fork",
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
		ret = base_refuse(error, -EINVAL, "no path was given");
	return ret;
}

/* ---- What it was opened with ----------------------------------------------------------------- */

const struct base_log *save_log(const struct ioshape_context *context)
{
	return &context->log;
}

const struct io_config *save_config(const struct ioshape_context *context)
{
	return &context->config;
}

const struct slots_config *save_slots_config(const struct ioshape_context *context)
{
	return &context->slots.config;
}

const char *save_pool_name(const struct ioshape_context *context)
{
	return context->slots.pool_name;
}

/* ---- What is kept from save to save ---------------------------------------------------------- */

int save_take_lane(struct ioshape_context *context, struct io_lane **lane, struct base_error *error)
{
	*lane = NULL;
	pthread_mutex_lock(&context->lock);
	if (context->lane_count)
		*lane = context->lanes[--context->lane_count];
	pthread_mutex_unlock(&context->lock);
	return *lane ? 0 : io_lane_open(lane, &context->config, error);
}

void save_return_lane(struct ioshape_context *context, struct io_lane *lane)
{
	if (!lane)
		return;
	pthread_mutex_lock(&context->lock);
	if (context->lane_count < SAVE_KEPT_LANES) {
		context->lanes[context->lane_count++] = lane;
		lane = NULL;
	}
	pthread_mutex_unlock(&context->lock);
	io_lane_close(lane);
}

/* ---- Paths ----------------------------------------------------------------------------------- */

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
		return base_refuse_with(error, -EINVAL, "give the name of a file",
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
	return base_fail(error, -code, "cannot find the working directory, in which \"%s\" is",
			 path);
}

/* ---- Directories that are tidied ---------------------------------------------------------------
 */

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

/* ---- Directories that appear whole ----------------------------------------------------------- */

struct save_directory {
	struct ioshape_context *context;
	struct io_new_folder made;
	char *path; /* that it will have; absolute */
};

/* "runs/step-10/" is as good as "runs/step-10". */
static char *without_slashes(const char *path)
{
	size_t bytes = strlen(path);

	while (bytes > 1 && path[bytes - 1] == '/')
		bytes--;
	return strndup(path, bytes);
}

static int make(struct save_directory *directory, const char *path, struct base_error *error)
{
	struct ioshape_context *context = directory->context;
	char *given = without_slashes(path);
	struct base_budget budget, *tidying;
	int ret;

	if (!given)
		return base_no_memory(error, "a path", strlen(path));
	ret = save_absolute_path(given, &directory->path, error);
	free(given);
	if (ret)
		return ret;
	tidying = save_begin_tidying(context, directory->path, &budget);
	ret = io_new_folder_make(&directory->made, directory->path, tidying, save_log(context),
				 error);
	save_end_tidying(context, directory->path, tidying);
	return ret;
}

int save_directory_make(struct ioshape_context *context, const char *path,
			struct save_directory **out)
{
	struct base_error error = { 0 };
	struct save_directory *directory = NULL;
	int ret;

	if (!out)
		return base_missing("save");
	*out = NULL;
	ret = save_enter(context, &error);
	if (!ret && !path)
		ret = base_refuse(&error, -EINVAL, "no path was given");
	if (!ret) {
		directory = calloc(1, sizeof(*directory));
		if (!directory)
			ret = base_no_memory(&error, "a directory", sizeof(*directory));
	}
	if (!ret) {
		directory->context = context;
		directory->made = (struct io_new_folder)IO_NO_NEW_FOLDER;
		ret = make(directory, path, &error);
	}
	if (ret)
		save_directory_free(directory);
	else
		*out = directory;
	return base_leave(ret, "save", path, &error);
}

const char *save_directory_path(const struct save_directory *directory)
{
	return directory ? directory->made.folder.path : NULL;
}

int save_directory_commit(struct save_directory *directory)
{
	struct base_error error = { 0 };
	int ret;

	if (!directory)
		return base_missing("save");
	ret = save_enter(directory->context, &error);
	if (!ret && !*directory->made.temporary)
		ret = base_refuse(&error, -EINVAL, "\"%s\" is in place already", directory->path);
	if (!ret)
		ret = io_new_folder_commit(&directory->made, &error);
	return base_leave(ret, "save", directory->path, &error);
}

void save_directory_free(struct save_directory *directory)
{
	if (!directory || save_enter(directory->context, NULL))
		return;
	io_new_folder_close(&directory->made, save_log(directory->context));
	free(directory->path);
	free(directory);
}
