/* SPDX-License-Identifier: Apache-2.0 */
/* The removal of generations: those that dead processes have left, and those that are not kept. */
#define _GNU_SOURCE
#include "group/group.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

struct tidying {
	const struct io_folder *directory;
	const char *job;       /* NULL: none */
	uint64_t *last_serial; /* NULL: nobody wants to know */
	struct io_clock *clock;
	const struct base_log *log;
	struct base_budget *budget;
};

/* ---- Dead or alive --------------------------------------------------------------------------- */

struct last_touch {
	const struct io_folder *folder;
	int64_t seconds;
	struct base_budget *budget;
};

static int see_touch(void *user, const char *name, struct base_error *error)
{
	struct last_touch *last = user;
	struct io_entry entry;
	int ret = base_budget_look(last->budget) ?
			  io_folder_look(last->folder, name, &entry, error) :
			  -EAGAIN;

	if (!ret)
		last->seconds = MAX(last->seconds, entry.modified);
	return ret == -ENOENT ? 0 : ret;
}

static bool is_untouched(const struct tidying *tidying, const struct io_folder *folder)
{
	struct last_touch last = { folder, 0, tidying->budget };

	return !see_touch(&last, ".", NULL) && !io_folder_list(folder, see_touch, &last, NULL) &&
	       io_is_abandoned(tidying->clock, last.seconds);
}

static bool is_ours(const struct io_folder *folder)
{
	struct io_entry entry;

	return !io_folder_look(folder, ".", &entry, NULL) && base_is_own_user(entry.owner);
}

static bool is_this_job(const struct tidying *tidying, const char *id)
{
	return tidying->job && !strncmp(id, tidying->job, 8);
}

static bool is_this_domain(const struct tidying *tidying, const char *id)
{
	char domain[IO_DOMAIN_BYTES];

	io_lock_domain(tidying->directory->fd, domain);
	return io_is_lock_domain(id + 9, domain);
}

static bool is_dead(const struct tidying *tidying, struct io_folder *folder, const char *id)
{
	switch (io_folder_lock(folder)) {
	case IO_BUSY:
		return false;
	case IO_LOCKED:
		return is_this_domain(tidying, id) || is_this_job(tidying, id) ||
		       is_untouched(tidying, folder);
	case IO_NO_LOCKS:
		break;
	}
	return is_this_job(tidying, id) ? !group_is_this_process(id) :
					  is_untouched(tidying, folder);
}

/* ---- Removing -------------------------------------------------------------------------------- */

int group_remove_generation(const struct io_folder *folder, const struct io_folder *directory,
			    const char *name, struct base_budget *budget, struct base_error *error)
{
	struct io_hold claim;
	int ret;

	ret = io_folder_claim(folder, FORMAT_MANIFEST_NAME, &claim, error);
	if (!ret || ret == -ENOENT)
		ret = io_folder_remove(folder, directory, name, FORMAT_MANIFEST_NAME, &claim,
				       budget, error);
	io_folder_let_go(&claim);
	return ret;
}

static void remove_it(const struct tidying *tidying, const struct io_folder *folder,
		      const char *name, const char *what)
{
	struct base_error error = { 0 };
	int ret =
		group_remove_generation(folder, tidying->directory, name, tidying->budget, &error);

	if (!ret)
		base_log(tidying->log, IOSHAPE_LOG_WARNING, "removed %s, %s", folder->path, what);
	else if (ret == -EAGAIN)
		base_log(tidying->log, IOSHAPE_LOG_WARNING,
			 "removed a part of %s, %s: the next save removes more", folder->path,
			 what);
	else if (ret != -EBUSY)
		base_log(tidying->log, IOSHAPE_LOG_WARNING, "%s", error.text);
}

/* A process died, or still is, between the two renames of a replacement, or while it pruned. */
static void tidy_aside(const struct tidying *tidying, const struct io_folder *folder,
		       const char *name, const struct group_name *parsed)
{
	char place[GROUP_STEP_NAME_BYTES];
	struct io_entry entry;
	int ret;

	if (parsed->kind == GROUP_NAME_PRUNED &&
	    io_folder_look(folder, FORMAT_MANIFEST_NAME, &entry, NULL) == -ENOENT) {
		remove_it(tidying, folder, name, "which another process had begun to remove");
		return;
	}
	group_step_name(place, parsed->step);
	ret = io_folder_look(tidying->directory, place, &entry, NULL);
	if (!ret) {
		remove_it(tidying, folder, name, "which had been replaced");
	} else if (ret == -ENOENT) {
		ret = io_folder_rename(tidying->directory, name, place);
		base_log(tidying->log, IOSHAPE_LOG_WARNING,
			 ret ? "%s: cannot rename it to %s" : "%s: renamed back to %s",
			 folder->path, place);
	}
}

static int tidy_one(void *user, const char *name, struct base_error *error)
{
	const struct tidying *tidying = user;
	struct group_name parsed = group_parse_name(name);
	struct io_folder folder;

	(void)error;
	if (tidying->last_serial) /* while the names are listed anyway */
		group_note_serial(tidying->directory, name, tidying->last_serial);
	if (parsed.kind == GROUP_NAME_OTHER || parsed.kind == GROUP_NAME_STEP ||
	    !base_budget_look(tidying->budget))
		return 0;
	if (io_folder_open_in(&folder, tidying->directory, name, NULL))
		return 0;
	if (!is_ours(&folder))
		goto out;
	/*
	 * The name is compared under the lock: the attempt may have been committed between our open
	 * and its unlock, and would be a complete generation by now.
	 */
	if (parsed.kind == GROUP_NAME_DRAINED) {
		/* Nobody holds it for as long as others may bring something. */
		if (is_untouched(tidying, &folder))
			remove_it(tidying, &folder, name, "which nobody brings more files to");
	} else if (parsed.kind == GROUP_NAME_ATTEMPT) {
		if (is_dead(tidying, &folder, parsed.id) &&
		    io_folder_is_named(&folder, tidying->directory, name))
			remove_it(tidying, &folder, name, "left behind by a dead process");
	} else if (io_folder_lock(&folder) != IO_BUSY &&
		   io_folder_is_named(&folder, tidying->directory, name)) {
		tidy_aside(tidying, &folder, name, &parsed);
	}
out:
	io_folder_close(&folder);
	return 0;
}

void group_tidy(const struct io_folder *directory, const char *job, uint64_t *last_serial,
		struct base_budget *budget, const struct base_log *log)
{
	struct io_clock clock = { .directory_fd = directory->fd };
	struct tidying tidying = { directory, job, last_serial, &clock, log, budget };
	struct base_error error = { 0 };

	if (io_folder_list(directory, tidy_one, &tidying, &error))
		base_log(log, IOSHAPE_LOG_WARNING, "%s", error.text);
}

/* Pure. */
static size_t retention(const uint64_t *steps, size_t count, uint32_t keep_last,
			uint64_t keep_every, bool *goes)
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
	struct io_folder directory;
	const struct ioshape_prune_options *options;
	const struct base_log *log;
	uint64_t removed;
};

/*
 * It gets a name of its own first: if we die half way, group_tidy() removes the rest. But with
 * its manifest it still counts, and gets its place back: it may be another than we had looked at.
 */
static int rename_and_remove(struct pruning *pruning, const struct io_folder *folder,
			     const char *name, uint64_t step, struct io_hold *claim,
			     struct base_error *error)
{
	char doomed[GROUP_ATTEMPT_NAME_BYTES];
	struct io_entry manifest;
	int ret;

	group_aside_name(doomed, GROUP_NAME_PRUNED, step, group_name_number());
	ret = io_folder_rename(&pruning->directory, name, doomed);
	if (ret == -ENOENT) /* another pruner was there before us */
		return 0;
	if (ret)
		return base_fail(error, ret, "cannot remove \"%s\" (rename)", folder->path);
	/* Replaced just now: what we have renamed is the new one. */
	if (!io_folder_is_named(folder, &pruning->directory, doomed)) {
		io_folder_rename(&pruning->directory, doomed, name);
		return 0;
	}
	/* Else a power failure might leave it under its own name, without its manifest. */
	ret = io_folder_sync(&pruning->directory, error);
	if (!ret)
		ret = io_folder_remove(folder, &pruning->directory, doomed, FORMAT_MANIFEST_NAME,
				       claim, NULL, error);
	/* The files belong to another user, or the storage fails: it is complete as it was. */
	if (ret && !io_folder_look(folder, FORMAT_MANIFEST_NAME, &manifest, NULL)) {
		io_folder_rename(&pruning->directory, doomed, name);
		return ret;
	}
	/* What does not belong there is to be found where the sentence says. */
	if (ret == -ENOTEMPTY)
		io_folder_rename(&pruning->directory, doomed, name);
	pruning->removed++;
	return ret;
}

/*
 * The generation is known, but not held: its manifest is ours alone from here on, and its lock
 * keeps group_tidy() from putting it back.
 */
static int remove_generation(struct pruning *pruning, struct io_folder *folder, uint64_t step,
			     uint64_t bytes, struct base_error *error)
{
	char name[GROUP_STEP_NAME_BYTES];
	struct io_hold claim;
	int ret;

	group_step_name(name, step);
	ret = io_folder_claim(folder, FORMAT_MANIFEST_NAME, &claim, error);
	if (!ret && io_folder_lock(folder) == IO_BUSY)
		ret = -EBUSY;
	if (ret == -EBUSY)
		base_log(pruning->log, IOSHAPE_LOG_INFO, "%s stays: a process uses it",
			 folder->path);
	if (!ret && io_folder_is_named(folder, &pruning->directory, name)) {
		if (pruning->options->removing)
			pruning->options->removing(pruning->options->removing_user, step, bytes);
		if (pruning->options->dry_run)
			pruning->removed++;
		else
			ret = rename_and_remove(pruning, folder, name, step, &claim, error);
	}
	io_folder_let_go(&claim);
	return ret == -EBUSY || ret == -ENOENT ? 0 : ret;
}

static int prune_step(struct pruning *pruning, uint64_t step, struct base_error *error)
{
	struct group_generation generation;
	struct base_error why = { 0 };
	struct io_folder folder;
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
	generation.folder = (struct io_folder)IO_NO_FOLDER;
	group_generation_close(&generation);
	ret = remove_generation(pruning, &folder, step, bytes, error);
	io_folder_close(&folder);
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
	ret = group_list_steps(&pruning->directory, &steps, &count, error);
	if (!ret) {
		goes = calloc(MAX(count, 1), sizeof(*goes));
		if (!goes)
			ret = base_no_memory(error, "a list of steps", count);
	}
	if (!ret)
		retention(steps, count, options->keep_last, options->keep_every, goes);
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
		.directory = IO_NO_FOLDER,
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
	io_folder_close(&pruning.directory);
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
