/* SPDX-License-Identifier: Apache-2.0 */
/* A directory on its way: all files go into a new one beside the destination, which takes its
 * place. */
#define _GNU_SOURCE
#include "tier/tier.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* Each costs descriptors and stack. No framework nests what it saves half as deep. */
#define MOST_LEVELS 8

/* One directory in it, or itself. */
struct level {
	struct tier_carry *carry;
	const struct ring_folder *from, *to;
	int64_t later_ns; /* from a time here to the same there */
	unsigned levels;  /* that may lie in it */
};

/* Checksums of a file that is there: they are made again, of what is carried. */
static bool are_checksums(const struct ring_folder *folder, const char *name)
{
	const size_t bytes = strlen(name), suffix = strlen(ZIP_CHECKSUMS_SUFFIX);
	char file[NAME_MAX + 1];
	struct ring_entry entry;

	if (bytes <= suffix || strcmp(name + bytes - suffix, ZIP_CHECKSUMS_SUFFIX))
		return false;
	snprintf(file, sizeof(file), "%.*s", (int)(bytes - suffix), name);
	return !ring_folder_look(folder, file, &entry, NULL) && entry.kind == RING_FILE;
}

static struct ring_original original_of(const struct level *level, const struct ring_entry *copy)
{
	return (struct ring_original){
		.modified_ns = copy->modified_ns + level->later_ns,
		.mode = copy->mode,
		.newest_ns = INT64_MAX, /* nobody else puts anything there */
	};
}

static int carry_file(const struct level *level, const char *name, const struct ring_entry *copy,
		      struct base_error *error)
{
	struct tier_file file = {
		.carry = level->carry,
		.copy = *copy,
		.original = original_of(level, copy),
		.in_new_directory = true,
	};
	char *from = NULL, *to = NULL;
	int ret;

	if (asprintf(&from, "%s/%s", level->from->path, name) < 0)
		from = NULL;
	if (asprintf(&to, "%s/%s", level->to->path, name) < 0)
		to = NULL;
	file.from = from;
	file.to = to;
	ret = from && to ? tier_carry_file(&file, error) :
			   base_no_memory(error, "a path", strlen(level->to->path));
	level->carry->done += copy->bytes;
	free(from);
	free(to);
	return ret;
}

static int carry_all(const struct level *level, struct base_error *error);

static int carry_inner(const struct level *level, const char *name, const struct ring_entry *copy,
		       struct base_error *error)
{
	const struct ring_original original = original_of(level, copy);
	struct ring_folder from = RING_NO_FOLDER, to = RING_NO_FOLDER;
	struct level inner = *level;
	int ret;

	if (!level->levels)
		return base_refuse(error, IOSHAPE_E_LIMIT,
				   "cannot drain \"%s/%s\": directories lie too deep in it",
				   level->from->path, name);
	inner.levels--;
	inner.from = &from;
	inner.to = &to;
	ret = ring_folder_open_in(&from, level->from, name, error);
	if (!ret)
		ret = ring_folder_create_in(&to, level->to, name, error);
	if (ret == -EEXIST)
		ret = base_fail(error, ret, "cannot make \"%s/%s\"", level->to->path, name);
	if (!ret)
		ret = carry_all(&inner, error);
	if (!ret)
		ret = ring_folder_resemble(&to, &original, error);
	if (!ret)
		ret = ring_folder_sync(&to, error);
	ring_folder_close(&to);
	ring_folder_close(&from);
	return ret;
}

static int carry_one(void *user, const char *name, struct base_error *error)
{
	const struct level *level = user;
	struct ring_entry copy;
	int ret = ring_folder_look(level->from, name, &copy, error);

	if (ret == -ENOENT)
		return -EAGAIN;
	if (ret)
		return ret;
	if (copy.kind == RING_FOLDER)
		return carry_inner(level, name, &copy, error);
	if (copy.kind == RING_FILE)
		return are_checksums(level->from, name) ? 0 : carry_file(level, name, &copy, error);
	return base_refuse(error, -EINVAL,
			   "cannot drain \"%s/%s\": it is neither a file nor a directory",
			   level->from->path, name);
}

static int carry_all(const struct level *level, struct base_error *error)
{
	struct level own = *level;

	return ring_folder_list(level->from, carry_one, &own, error);
}

/* Under the name that it was looked at by, and as it was. */
static bool is_still_there(const struct tier_carry *carry)
{
	struct ring_entry now;

	return !ring_look(carry->place, false, &now) && ring_is_unchanged(&carry->copy, &now);
}

static int fill(struct tier_carry *carry, const struct ring_folder *to, struct base_error *error)
{
	struct ring_folder from;
	struct level level = {
		.carry = carry,
		.from = &from,
		.to = to,
		.later_ns = carry->original.modified_ns - carry->copy.modified_ns,
		.levels = MOST_LEVELS,
	};
	int ret = ring_folder_open(&from, carry->place, error);

	if (!ret)
		ret = carry_all(&level, error);
	ring_folder_close(&from);
	/* What failed, did perhaps because somebody has replaced it. */
	if (ret != -ECANCELED && !is_still_there(carry)) {
		base_error_begin(error);
		return -EAGAIN;
	}
	return ret ? ret : ring_folder_resemble(to, &carry->original, error);
}

/* The last of a directory: it has its time. */
static int put_in_place(struct tier_carry *carry, struct ring_new_folder *made,
			struct base_error *error)
{
	struct ring_entry there;
	int ret = ring_folder_look(&made->folder, ".", &there, error);

	if (!ret)
		ret = ring_new_folder_replace(made, ZIP_MANIFEST_NAME, carry->original.newest_ns,
					      error);
	if (!ret)
		carry->there_ns = there.modified_ns;
	return ret;
}

int tier_carry_folder(struct tier_carry *carry, struct base_error *error)
{
	const struct base_log *log = save_log(carry->tier->context);
	const struct ioshape_drain_options *options = carry->options;
	struct base_budget tidying = base_budget_begin();
	struct ring_new_folder made;
	int ret = ring_new_folder_make(&made, carry->entry->path, &tidying, log, error);

	if (ret)
		return ret;
	ret = fill(carry, &made.folder, error);
	if (!ret)
		ret = put_in_place(carry, &made, error);
	ring_new_folder_close(&made, log);
	if (!ret && options->progress)
		options->progress(options->progress_user, IOSHAPE_PHASE_DONE, carry->bytes,
				  carry->bytes);
	return ret;
}
