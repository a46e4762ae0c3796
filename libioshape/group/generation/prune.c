/* SPDX-License-Identifier: Apache-2.0 */
/* The steps of a directory, and the removal of those that are not to be kept. */
#include "group/generation/generation.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>

/* ---- Steps ----------------------------------------------------------------------------------- */

/*
 * Keeps of the candidates those that hold, one for each step, newest first; in memory that is as
 * long. What cannot be read counts as not there, but whoever runs out of memory or descriptors has
 * not looked.
 */
static int keep_complete(const struct ring_folder *directory, struct group_candidates *candidates,
			 struct base_error *error)
{
	struct group_generation generation;
	size_t kept = 0;
	int ret;

	for (size_t i = 0; i < candidates->count; i++) {
		struct group_candidate *candidate = &candidates->all[i];
		struct base_error why = { 0 };

		if (kept && candidates->all[kept - 1].step == candidate->step)
			continue;
		ret = group_generation_open(&generation, directory, candidate->name,
					    candidate->step, &why);
		if (group_is_shortage(ret))
			return base_pass_on(error, &why);
		if (ret)
			continue;
		candidate->serial = generation.manifest.serial;
		group_generation_close(&generation);
		candidates->all[kept++] = *candidate;
	}
	candidates->count = kept;
	group_sort_by_age(candidates);
	return 0;
}

/* Complete ones, oldest first; *steps is to be freed. */
static int list_steps(const struct ring_folder *directory, uint64_t **steps, size_t *count,
		      struct base_error *error)
{
	struct group_candidates candidates;
	int ret = group_list_generations(directory, &candidates, error);

	if (ret)
		return ret;
	ret = keep_complete(directory, &candidates, error);
	*count = ret ? 0 : candidates.count;
	*steps = ret ? NULL : calloc(MAX(*count, 1), sizeof(**steps));
	if (!ret && !*steps)
		ret = base_no_memory(error, "a list of steps", *count * sizeof(**steps));
	for (size_t i = 0; !ret && i < *count; i++)
		(*steps)[i] = candidates.all[*count - 1 - i].step;
	group_candidates_free(&candidates);
	return ret;
}

IOSHAPE_EXPORT int ioshape_generation_list(struct ioshape_context *context, const char *path,
					   uint64_t **steps, size_t *count)
{
	struct ring_folder directory = RING_NO_FOLDER;
	struct base_error error = { 0 };
	int ret;

	if (!steps || !count)
		return base_missing("list");
	*steps = NULL;
	*count = 0;
	ret = save_enter(context, &error);
	if (!ret && !path)
		ret = base_refuse(&error, -EINVAL, "no directory of generations was given");
	if (!ret)
		ret = group_open_directory(&directory, path, &error);
	if (!ret)
		ret = list_steps(&directory, steps, count, &error);
	ring_folder_close(&directory);
	return base_leave(ret, "list", path, &error);
}

/* Pure. */
size_t group_retention(const uint64_t *steps, size_t count, uint32_t keep_last, uint64_t keep_every,
		       bool *goes)
{
	size_t going = 0;

	for (size_t i = 0; i < count; i++) {
		/* The newest is among the last, however few they are. */
		bool is_last = !keep_last || count - i <= keep_last;
		bool is_multiple = keep_every && steps[i] % keep_every == 0;

		goes[i] = !is_last && !is_multiple;
		going += goes[i];
	}
	return going;
}

/* ---- Pruning --------------------------------------------------------------------------------- */

struct pruning {
	struct ring_folder directory;
	const struct ioshape_prune_options *options;
	const struct base_log *log;
	uint64_t removed;
};

/*
 * It gets a name of its own first: if we die half way, group_tidy() removes the rest. But with
 * its manifest it still counts, and gets its place back: it may be another than we had looked at.
 */
static int rename_and_remove(struct pruning *pruning, const struct ring_folder *folder,
			     const char *name, uint64_t step, struct ring_hold *claim,
			     struct base_error *error)
{
	char doomed[GROUP_ATTEMPT_NAME_BYTES];
	struct ring_entry manifest;
	int ret;

	group_aside_name(doomed, GROUP_NAME_PRUNED, step, group_name_number());
	ret = ring_folder_rename(&pruning->directory, name, doomed);
	if (ret == -ENOENT) /* another pruner was there before us */
		return 0;
	if (ret)
		return base_fail(error, ret, "cannot remove \"%s\" (rename)", folder->path);
	/* Replaced just now: what we have renamed is the new one. */
	if (!ring_folder_is_named(folder, &pruning->directory, doomed)) {
		ring_folder_rename(&pruning->directory, doomed, name);
		return 0;
	}
	/* Else a power failure might leave it under its own name, without its manifest. */
	ret = ring_folder_sync(&pruning->directory, error);
	if (!ret)
		ret = ring_folder_remove(folder, &pruning->directory, doomed, ZIP_MANIFEST_NAME,
					 claim, error);
	/* The files belong to another user, or the storage fails: it is complete as it was. */
	if (ret && !ring_folder_look(folder, ZIP_MANIFEST_NAME, &manifest, NULL)) {
		ring_folder_rename(&pruning->directory, doomed, name);
		return ret;
	}
	/* What does not belong there is to be found where the sentence says. */
	if (ret == -ENOTEMPTY)
		ring_folder_rename(&pruning->directory, doomed, name);
	pruning->removed++;
	return ret;
}

/*
 * The generation is known, but not held: its manifest is ours alone from here on, and its lock
 * keeps group_tidy() from putting it back.
 */
static int remove_generation(struct pruning *pruning, struct ring_folder *folder, uint64_t step,
			     uint64_t bytes, struct base_error *error)
{
	char name[GROUP_STEP_NAME_BYTES];
	struct ring_hold claim;
	int ret;

	group_step_name(name, step);
	ret = ring_folder_claim(folder, ZIP_MANIFEST_NAME, &claim, error);
	if (!ret && ring_folder_lock(folder) == RING_BUSY)
		ret = -EBUSY;
	if (ret == -EBUSY)
		base_log(pruning->log, IOSHAPE_LOG_INFO, "%s stays: a process uses it",
			 folder->path);
	if (!ret && ring_folder_is_named(folder, &pruning->directory, name)) {
		if (pruning->options->removing)
			pruning->options->removing(pruning->options->removing_user, step, bytes);
		if (pruning->options->dry_run)
			pruning->removed++;
		else
			ret = rename_and_remove(pruning, folder, name, step, &claim, error);
	}
	ring_folder_let_go(&claim);
	return ret == -EBUSY || ret == -ENOENT ? 0 : ret;
}

static int prune_step(struct pruning *pruning, uint64_t step, struct base_error *error)
{
	struct group_generation generation;
	struct base_error why = { 0 };
	struct ring_folder folder;
	char name[GROUP_STEP_NAME_BYTES];
	uint64_t bytes;
	int ret;

	group_step_name(name, step);
	ret = group_generation_open(&generation, &pruning->directory, name, step, &why);
	if (group_is_shortage(ret))
		return base_pass_on(error, &why);
	/* What is gone, damaged or replaced by now is none of those that were chosen. */
	if (ret)
		return 0;
	bytes = group_generation_bytes(&generation);
	folder = generation.folder;
	generation.folder = (struct ring_folder)RING_NO_FOLDER;
	group_generation_close(&generation);
	ret = remove_generation(pruning, &folder, step, bytes, error);
	ring_folder_close(&folder);
	return ret;
}

static int prune(struct pruning *pruning, struct base_error *error)
{
	const struct ioshape_prune_options *options = pruning->options;
	uint64_t *steps = NULL;
	bool *goes = NULL;
	size_t count = 0;
	int ret = 0, failed;

	if (!options->keep_last)
		return 0;
	ret = list_steps(&pruning->directory, &steps, &count, error);
	if (!ret) {
		goes = calloc(MAX(count, 1), sizeof(*goes));
		if (!goes)
			ret = base_no_memory(error, "a list of steps", count);
	}
	if (!ret)
		group_retention(steps, count, options->keep_last, options->keep_every, goes);
	/* One that cannot be removed does not keep the others. */
	for (size_t i = 0; goes && i < count; i++) {
		failed = goes[i] ? prune_step(pruning, steps[i], error) : 0;
		if (!ret)
			ret = failed;
	}
	free(goes);
	free(steps);
	return ret;
}

int group_prune(struct ioshape_context *context, const char *path, const char *job,
		const struct ioshape_prune_options *options, uint64_t *removed,
		struct base_error *error)
{
	struct pruning pruning = {
		.directory = RING_NO_FOLDER,
		.options = options,
		.log = save_log(context),
	};
	struct base_budget budget = base_budget_begin();
	int ret = group_open_directory(&pruning.directory, path, error);

	/* Only a save of the job must not wait until all is removed. */
	if (!ret && !options->dry_run)
		group_tidy(&pruning.directory, job, NULL, job ? &budget : NULL, save_log(context));
	if (!ret)
		ret = prune(&pruning, error);
	ring_folder_close(&pruning.directory);
	if (removed)
		*removed = pruning.removed;
	return ret;
}

IOSHAPE_EXPORT int ioshape_generation_prune(struct ioshape_context *context, const char *path,
					    const struct ioshape_prune_options *given,
					    uint64_t *removed)
{
	struct ioshape_prune_options options;
	struct base_error error = { 0 };
	int ret;

	if (removed)
		*removed = 0;
	ret = save_enter(context, &error);
	if (!ret)
		ret = base_take_options(&options, sizeof(options), given, "ioshape_prune_options",
					&error);
	if (!ret && !path)
		ret = base_refuse(&error, -EINVAL, "no directory of generations was given");
	if (!ret)
		ret = group_prune(context, path, NULL, &options, removed, &error);
	return base_leave(ret, "prune", path, &error);
}
