/* SPDX-License-Identifier: Apache-2.0 */
/* The public handle for directories that appear whole. */
#include "save/file/file.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

struct save_directory {
	struct ioshape_context *context;
	struct ring_new_folder made;
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
	ret = ring_new_folder_make(&directory->made, directory->path, tidying, save_log(context),
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
		directory->made = (struct ring_new_folder)RING_NO_NEW_FOLDER;
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
		ret = ring_new_folder_commit(&directory->made, &error);
	return base_leave(ret, "save", directory->path, &error);
}

void save_directory_free(struct save_directory *directory)
{
	if (!directory || save_enter(directory->context, NULL))
		return;
	ring_new_folder_close(&directory->made, save_log(directory->context));
	free(directory->path);
	free(directory);
}
