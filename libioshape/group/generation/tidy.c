/* SPDX-License-Identifier: Apache-2.0 */
/* What is in a directory of generations: serial numbers, and what processes that died have left. */
#include "group/generation/generation.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>

/* ---- Serial numbers -------------------------------------------------------------------------- */

/* Raises the number to that of what is called so, if that is a generation. */
static void note_serial(const struct ring_folder *directory, const char *name,
			enum group_name_kind kind, uint64_t *last)
{
	uint64_t serial;

	if (kind == GROUP_NAME_OTHER || kind == GROUP_NAME_ATTEMPT || kind == GROUP_NAME_DRAINED)
		return;
	group_peek_serial(directory, name, &serial);
	if (serial < ZIP_MAX_SERIAL)
		*last = MAX(*last, serial);
}

struct newest {
	const struct ring_folder *directory;
	uint64_t serial;
};

static int see_serial(void *user, const char *name, struct base_error *error)
{
	struct newest *newest = user;

	(void)error;
	note_serial(newest->directory, name, group_parse_name(name).kind, &newest->serial);
	return 0;
}

uint64_t group_last_serial(const struct ring_folder *directory, const struct base_log *log)
{
	struct newest newest = { .directory = directory };
	struct base_error error = { 0 };

	if (ring_folder_list(directory, see_serial, &newest, &error))
		base_log(log, IOSHAPE_LOG_WARNING, "%s", error.text);
	return newest.serial;
}

struct tidying {
	const struct ring_folder *directory;
	const char *job;       /* NULL: none */
	uint64_t *last_serial; /* NULL: nobody wants to know */
	struct ring_clock *clock;
	const struct base_log *log;
	struct base_budget *budget;
};

/* ---- Dead or alive --------------------------------------------------------------------------- */

struct last_touch {
	const struct ring_folder *folder;
	int64_t seconds;
	struct base_budget *budget;
};

static int see_touch(void *user, const char *name, struct base_error *error)
{
	struct last_touch *last = user;
	struct ring_entry entry;
	int ret = base_budget_look(last->budget) ?
			  ring_folder_look(last->folder, name, &entry, error) :
			  -EAGAIN;

	if (!ret)
		last->seconds = MAX(last->seconds, entry.modified);
	return ret == -ENOENT ? 0 : ret;
}

static bool is_untouched(const struct tidying *tidying, const struct ring_folder *folder)
{
	struct last_touch last = { folder, 0, tidying->budget };

	return !see_touch(&last, ".", NULL) && !ring_folder_list(folder, see_touch, &last, NULL) &&
	       ring_is_abandoned(tidying->clock, last.seconds);
}

static bool is_ours(const struct ring_folder *folder)
{
	struct ring_entry entry;

	return !ring_folder_look(folder, ".", &entry, NULL) && base_is_own_user(entry.owner);
}

static bool is_this_job(const struct tidying *tidying, const char *id)
{
	return tidying->job && !strncmp(id, tidying->job, 8);
}

static bool is_this_domain(const struct tidying *tidying, const char *id)
{
	char domain[RING_DOMAIN_BYTES];

	ring_lock_domain(tidying->directory->fd, domain);
	return ring_is_lock_domain(id + 9, domain);
}

static bool is_this_process(const char *id)
{
	char number[9];

	snprintf(number, sizeof(number), "%08x", (uint32_t)(group_name_number() >> 32));
	return !strncmp(id + 18, number, 8);
}

static bool is_dead(const struct tidying *tidying, struct ring_folder *folder, const char *id)
{
	switch (ring_folder_lock(folder)) {
	case RING_BUSY:
		return false;
	case RING_LOCKED:
		return is_this_domain(tidying, id) || is_this_job(tidying, id) ||
		       is_untouched(tidying, folder);
	case RING_NO_LOCKS:
		break;
	}
	return is_this_job(tidying, id) ? !is_this_process(id) : is_untouched(tidying, folder);
}

/* ---- Removing -------------------------------------------------------------------------------- */

int group_remove_generation(const struct ring_folder *folder, const struct ring_folder *directory,
			    const char *name, struct base_budget *budget, struct base_error *error)
{
	struct ring_hold claim;
	int ret;

	ret = ring_folder_claim(folder, ZIP_MANIFEST_NAME, &claim, error);
	if (!ret || ret == -ENOENT)
		ret = ring_folder_remove_some(folder, directory, name, ZIP_MANIFEST_NAME, &claim,
					      budget, error);
	ring_folder_let_go(&claim);
	return ret;
}

static void remove_it(const struct tidying *tidying, const struct ring_folder *folder,
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
static void tidy_aside(const struct tidying *tidying, const struct ring_folder *folder,
		       const char *name, const struct group_name *parsed)
{
	char place[GROUP_STEP_NAME_BYTES];
	struct ring_entry entry;
	int ret;

	if (parsed->kind == GROUP_NAME_PRUNED &&
	    ring_folder_look(folder, ZIP_MANIFEST_NAME, &entry, NULL) == -ENOENT) {
		remove_it(tidying, folder, name, "which another process had begun to remove");
		return;
	}
	group_step_name(place, parsed->step);
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
	struct group_name parsed = group_parse_name(name);
	struct ring_folder folder;

	(void)error;
	if (tidying->last_serial) /* while the names are listed anyway */
		note_serial(tidying->directory, name, parsed.kind, tidying->last_serial);
	if (parsed.kind == GROUP_NAME_OTHER || parsed.kind == GROUP_NAME_STEP ||
	    !base_budget_look(tidying->budget))
		return 0;
	if (ring_folder_open_in(&folder, tidying->directory, name, NULL))
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

void group_tidy(const struct ring_folder *directory, const char *job, uint64_t *last_serial,
		struct base_budget *budget, const struct base_log *log)
{
	struct ring_clock clock = { .directory_fd = directory->fd };
	struct tidying tidying = { directory, job, last_serial, &clock, log, budget };
	struct base_error error = { 0 };

	if (ring_folder_list(directory, tidy_one, &tidying, &error))
		base_log(log, IOSHAPE_LOG_WARNING, "%s", error.text);
}
