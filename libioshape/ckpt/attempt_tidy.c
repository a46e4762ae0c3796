/* SPDX-License-Identifier: Apache-2.0 */
/* What processes that died have left in a directory of generations. */
#include "ckpt/generation.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#define ABANDONED_AFTER_S ((int64_t)24 * 3600)

struct tidying {
	const struct ring_folder *directory;
	const char *job; /* NULL: none */
	const struct base_log *log;
};

/* ---- Dead or alive --------------------------------------------------------------------------- */

struct last_touch {
	const struct ring_folder *folder;
	int64_t seconds;
};

static int see_touch(void *user, const char *name, struct base_error *error)
{
	struct last_touch *last = user;
	struct ring_entry entry;
	int ret = ring_folder_look(last->folder, name, &entry, error);

	if (!ret)
		last->seconds = MAX(last->seconds, entry.modified);
	return ret == -ENOENT ? 0 : ret;
}

static bool is_untouched(const struct ring_folder *folder)
{
	struct last_touch last = { folder, 0 };

	return !see_touch(&last, ".", NULL) && !ring_folder_list(folder, see_touch, &last, NULL) &&
	       time(NULL) - last.seconds > ABANDONED_AFTER_S;
}

static bool is_own_user(const struct ring_folder *folder)
{
	struct ring_entry entry;

	return !ring_folder_look(folder, ".", &entry, NULL) && entry.owner == geteuid();
}

static bool is_this_job(const struct tidying *tidying, const char *id)
{
	return tidying->job && !strncmp(id, tidying->job, 8);
}

static bool is_this_machine(const char *id)
{
	const char *machine = ring_machine_tag();

	return strcmp(machine, RING_UNKNOWN_MACHINE) && !strncmp(id + 9, machine, 8);
}

static bool is_this_process(const char *id)
{
	char number[9];

	snprintf(number, sizeof(number), "%08x", ckpt_process_number());
	return !strncmp(id + 18, number, 8);
}

static bool is_dead(const struct tidying *tidying, struct ring_folder *folder, const char *id)
{
	switch (ring_folder_lock(folder)) {
	case RING_BUSY:
		return false;
	case RING_LOCKED:
		return is_this_machine(id) || is_this_job(tidying, id) || is_untouched(folder);
	case RING_NO_LOCKS:
		break;
	}
	return is_this_job(tidying, id) ? !is_this_process(id) : is_untouched(folder);
}

/* ---- Removing -------------------------------------------------------------------------------- */

int ckpt_remove(const struct ring_folder *folder, const struct ring_folder *directory,
		const char *name, struct base_error *error)
{
	struct ring_hold claim;
	int ret;

	ret = ring_folder_claim(folder, ZIP_MANIFEST_NAME, &claim, error);
	if (!ret || ret == -ENOENT)
		ret = ring_folder_remove(folder, directory, name, ZIP_MANIFEST_NAME, &claim, error);
	ring_folder_let_go(&claim);
	return ret;
}

static void remove_it(const struct tidying *tidying, const struct ring_folder *folder,
		      const char *name, const char *what)
{
	struct base_error error = { 0 };
	int ret = ckpt_remove(folder, tidying->directory, name, &error);

	if (!ret)
		base_log(tidying->log, IOSHAPE_LOG_WARNING, "removed %s, %s", folder->path, what);
	else if (ret != -EBUSY)
		base_log(tidying->log, IOSHAPE_LOG_WARNING, "%s", error.text);
}

/* A process died, or still is, between the two renames of a replacement, or while it pruned. */
static void tidy_aside(const struct tidying *tidying, const struct ring_folder *folder,
		       const char *name, const struct ckpt_name *parsed)
{
	char place[CKPT_STEP_NAME_BYTES];
	struct ring_entry entry;
	int ret;

	if (parsed->kind == CKPT_NAME_PRUNED &&
	    ring_folder_look(folder, ZIP_MANIFEST_NAME, &entry, NULL) == -ENOENT) {
		remove_it(tidying, folder, name, "which somebody had begun to remove");
		return;
	}
	ckpt_step_name(place, parsed->step);
	ret = ring_folder_look(tidying->directory, place, &entry, NULL);
	if (!ret) {
		remove_it(tidying, folder, name, "which had been replaced");
	} else if (ret == -ENOENT) {
		ret = ring_folder_rename(tidying->directory, name, place);
		base_log(tidying->log, IOSHAPE_LOG_WARNING,
			 ret ? "%s: cannot rename it to %s" : "%s: renamed back to %s",
			 folder->path, place);
	}
}

static int tidy_one(void *user, const char *name, struct base_error *error)
{
	const struct tidying *tidying = user;
	struct ckpt_name parsed = ckpt_parse_name(name);
	struct ring_folder folder;

	(void)error;
	if (parsed.kind == CKPT_NAME_OTHER || parsed.kind == CKPT_NAME_STEP)
		return 0;
	if (ring_folder_open_in(&folder, tidying->directory, name, NULL))
		return 0;
	if (!is_own_user(&folder))
		goto out;
	/*
	 * The name is compared under the lock: the attempt may have been committed between our open
	 * and its unlock, and would be a complete generation by now.
	 */
	if (parsed.kind == CKPT_NAME_ATTEMPT) {
		if (is_dead(tidying, &folder, parsed.id) &&
		    ring_folder_is_named(&folder, tidying->directory, name))
			remove_it(tidying, &folder, name, "left behind by a dead process");
	} else if (ring_folder_lock(&folder) != RING_BUSY &&
		   ring_folder_is_named(&folder, tidying->directory, name)) {
		tidy_aside(tidying, &folder, name, &parsed);
	}
out:
	ring_folder_close(&folder);
	return 0;
}

void ckpt_tidy(const struct ring_folder *directory, const char *job, const struct base_log *log)
{
	struct tidying tidying = { directory, job, log };
	struct base_error error = { 0 };

	if (ring_folder_list(directory, tidy_one, &tidying, &error))
		base_log(log, IOSHAPE_LOG_WARNING, "%s", error.text);
}
