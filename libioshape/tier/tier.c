/* SPDX-License-Identifier: Apache-2.0 */
/* The public handle for a tier: where to save, what was saved, and where the nearest copy is. */
#define _GNU_SOURCE
#include "tier/tier.h"
#include "tier/parity.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static const struct group_tier_ops for_groups;

/* ---- Opening --------------------------------------------------------------------------------- */

/* The user's own folder, whose name lasts. */
static int open_root(struct ioshape_tier *tier, const char *given, struct base_error *error)
{
	struct io_folder folder = IO_NO_FOLDER;
	struct stat ours;
	char *path = NULL, *absolute = realpath(given, NULL);
	int ret;

	if (!absolute)
		return base_fail(error, -errno, "cannot open the tier \"%s\"", given);
	if (asprintf(&path, "%s/ioshape-%u", strcmp(absolute, "/") ? absolute : "",
		     (unsigned)geteuid()) < 0) {
		path = NULL;
		ret = base_no_memory(error, "a path", strlen(absolute));
	} else {
		ret = io_folder_make_own(path, &ours, error);
	}
	if (!ret)
		ret = io_folder_open(&tier->root, path, error);
	/* Where everybody may put folders, one may perhaps not list them. */
	if (!ret && !io_folder_open(&folder, absolute, NULL))
		ret = io_folder_sync(&folder, error);
	io_folder_close(&folder);
	free(path);
	free(absolute);
	return ret;
}

static int open_folders(struct ioshape_tier *tier, const char *given, struct base_error *error)
{
	char *journal = NULL;
	int ret = open_root(tier, given, error);

	if (ret)
		return ret;
	if (asprintf(&tier->files, "%s/files", tier->root.path) < 0)
		tier->files = NULL;
	if (asprintf(&journal, "%s/journal", tier->root.path) < 0)
		journal = NULL;
	if (!tier->files || !journal)
		ret = base_no_memory(error, "a path", strlen(tier->root.path));
	if (!ret) {
		tier->files_bytes = strlen(tier->files);
		ret = io_folder_make(tier->files, error);
	}
	if (!ret)
		ret = io_folder_make(journal, error);
	if (!ret)
		ret = io_folder_open(&tier->journal, journal, error);
	free(journal);
	return ret;
}

IOSHAPE_EXPORT int ioshape_tier_open(struct ioshape_context *context, const char *folder,
				     const struct ioshape_tier_options *given,
				     struct ioshape_tier **out)
{
	struct ioshape_tier_options options;
	struct base_error error = { 0 };
	struct ioshape_tier *tier = NULL;
	int ret;

	if (!out)
		return base_missing("save");
	*out = NULL;
	ret = save_enter_path(context, folder, &options, sizeof(options), given,
			      "ioshape_tier_options", &error);
	if (!ret)
		ret = base_settings_take(BASE_SETTINGS_TIER, &options, &error);
	if (!ret) {
		tier = calloc(1, sizeof(*tier));
		if (!tier)
			ret = base_no_memory(&error, "a tier", sizeof(*tier));
	}
	if (!ret) {
		tier->of_groups.ops = &for_groups;
		tier->context = context;
		tier->options = options;
		tier->root = tier->journal = (struct io_folder)IO_NO_FOLDER;
		ret = open_folders(tier, folder, &error);
	}
	if (ret)
		ioshape_tier_free(tier);
	else
		*out = tier;
	return base_leave(ret, "save", folder, &error);
}

IOSHAPE_EXPORT void ioshape_tier_free(struct ioshape_tier *tier)
{
	if (!tier || save_enter(tier->context, NULL))
		return;
	io_folder_close(&tier->journal);
	io_folder_close(&tier->root);
	free(tier->files);
	free(tier);
}

/* ---- Before a save --------------------------------------------------------------------------- */

/* The caller's, or nothing. */
static void give(char **into, char *place, int ret)
{
	*into = ret ? NULL : place;
	if (ret)
		free(place);
}

IOSHAPE_EXPORT int ioshape_tier_place(struct ioshape_tier *tier, const char *path, uint64_t bytes,
				      char **place)
{
	struct base_error error = { 0 };
	char *found;
	int ret;

	if (!tier || !place)
		return base_missing("save");
	ret = tier_enter(tier, path, &found, &error);
	if (!ret)
		ret = tier_prepare_place(tier, found, bytes, &error);
	give(place, found, ret);
	return base_leave(ret, "save", path, &error);
}

/* ---- After it -------------------------------------------------------------------------------- */

/* Whether it waits, or was drained, as it is now. */
static bool is_kept(const struct tier_journal *journal, const char *place,
		    const struct io_entry *copy)
{
	const struct tier_entry *newest = tier_newest(journal, place);

	return newest && (!newest->drained || newest->copy_ns == copy->modified_ns);
}

/* `once`: unless it has been kept. */
static int keep(const struct ioshape_tier *tier, const char *place, uint32_t keep_last,
		uint64_t keep_every, bool once, struct base_error *error)
{
	struct tier_entry entry = {
		.keep_last = keep_last,
		.keep_every = keep_every,
		.path = tier_destination(tier, place),
	};
	struct tier_journal journal = { 0 };
	struct io_hold hold = IO_NO_HOLD;
	struct io_entry copy;
	int ret = tier_lock(tier, &hold, error);

	if (!ret)
		ret = tier_look(place, &copy, error);
	if (ret == -ENOENT)
		base_refuse(error, ret, "\"%s\" was not saved on the tier \"%s\"", entry.path,
			    tier->root.path);
	if (!ret)
		ret = tier_journal_read(tier, &journal, error);
	if (!ret && !(once && is_kept(&journal, place, &copy)))
		ret = tier_journal_add(tier, &journal, &entry, error);
	tier_journal_free(&journal);
	io_folder_let_go(&hold);
	return ret;
}

IOSHAPE_EXPORT int ioshape_tier_keep(struct ioshape_tier *tier, const char *path,
				     const struct ioshape_tier_keep_options *given)
{
	struct ioshape_tier_keep_options options;
	struct base_error error = { 0 };
	char *place;
	int ret;

	if (!tier)
		return base_missing("save");
	ret = tier_enter(tier, path, &place, &error);
	if (!ret)
		ret = base_take_options(&options, sizeof(options), given,
					"ioshape_tier_keep_options", &error);
	if (!ret && options.reserved)
		ret = base_refuse(&error, -EINVAL, "options.reserved is %u", options.reserved);
	if (!ret)
		ret = keep(tier, place, options.keep_last, options.keep_every, false, &error);
	free(place);
	return base_leave(ret, "save", path, &error);
}

/* ---- The nearest copy ------------------------------------------------------------------------ */

/* When the destination would be as old as the copy is. */
static int64_t age_there(const struct ioshape_tier *tier, const struct tier_entry *entry,
			 const char *destination, const struct io_entry *copy,
			 const struct io_entry *there)
{
	int64_t time_ns;

	if (entry && entry->drained && entry->copy_ns == copy->modified_ns)
		return copy->kind == IO_FOLDER || copy->bytes == there->bytes ?
			       entry->there_ns :
			       there->modified_ns - 1;
	/* Where nothing can be made, one clock is as good as the other. */
	if (tier_clock_there(tier, destination, copy->modified_ns, &time_ns, NULL))
		return copy->modified_ns;
	return time_ns;
}

static int find(const struct ioshape_tier *tier, const char *place, struct base_error *error)
{
	const char *destination = tier_destination(tier, place);
	struct tier_journal journal;
	struct io_entry copy, there;
	int64_t age;
	int ret = tier_look(place, &copy, error);

	if (ret)
		return ret;
	/* Whatever it cannot be looked at for, the copy is nearer. */
	if (io_look(destination, true, &there))
		return 0;
	ret = tier_journal_read(tier, &journal, error);
	if (ret)
		return ret;
	age = age_there(tier, tier_newest(&journal, place), destination, &copy, &there);
	tier_journal_free(&journal);
	return there.modified_ns > age ? -ENOENT : 0;
}

IOSHAPE_EXPORT int ioshape_tier_find(struct ioshape_tier *tier, const char *path, char **place)
{
	struct base_error error = { 0 };
	char *found;
	int ret;

	if (!tier || !place)
		return base_missing("load");
	ret = tier_enter(tier, path, &found, &error);
	if (!ret)
		ret = find(tier, found, &error);
	give(place, found, ret);
	return ret == -ENOENT ? ret : base_leave(ret, "load", path, &error);
}

/* ---- For groups ------------------------------------------------------------------------------ */

static const struct ioshape_tier *tier_of(const struct group_tier *of_groups)
{
	return (const struct ioshape_tier *)of_groups;
}

static int find_for_group(struct group_tier *of_groups, const char *path, char **place,
			  struct base_error *error)
{
	return tier_enter(tier_of(of_groups), path, place, error);
}

static int make_room_for_group(struct group_tier *of_groups, const char *path, uint64_t bytes,
			       uint32_t nodes, struct base_error *error)
{
	const struct ioshape_tier *tier = tier_of(of_groups);
	char *place;
	int ret = tier_enter(tier, path, &place, error);

	bytes += parity_bytes(tier->options.parity, bytes, nodes);
	if (!ret)
		ret = tier_prepare_place(tier, place, bytes, error);
	free(place);
	return ret;
}

static int keep_for_group(struct group_tier *of_groups, const char *path, uint32_t keep_last,
			  uint64_t keep_every, struct base_error *error)
{
	char *place;
	int ret = tier_enter(tier_of(of_groups), path, &place, error);

	if (!ret)
		ret = keep(tier_of(of_groups), place, keep_last, keep_every, false, error);
	free(place);
	return ret;
}

int tier_keep_once(struct group_tier *of_groups, const char *path, uint32_t keep_last,
		   uint64_t keep_every, struct base_error *error)
{
	char *place;
	int ret = tier_enter(tier_of(of_groups), path, &place, error);

	if (!ret)
		ret = keep(tier_of(of_groups), place, keep_last, keep_every, true, error);
	free(place);
	if (ret != -ENOENT)
		return ret;
	base_error_begin(error);
	return 0;
}

static const struct group_tier_ops for_groups = {
	.find = find_for_group,
	.make_room = make_room_for_group,
	.keep = keep_for_group,
	.plan = parity_plan,
	.protect = parity_protect,
	.look = parity_look,
	.check = parity_check,
	.restore = parity_restore,
	.free = parity_spreads_free,
};
