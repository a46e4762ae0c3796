/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Free space for what is saved. It is looked for before a save queues for its slot, so that no save
 * waits for a slot that it cannot use. Nothing is reserved: other writers may take the space
 * meanwhile. The save finds that out when it opens or writes the file, and the same rule decides.
 */
#define _GNU_SOURCE
#include "save/file.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define TARGETS_BYTES 320

static bool is_lack_of_space(int code)
{
	return code == -ENOSPC || code == -EDQUOT;
}

/* ---- Looking --------------------------------------------------------------------------------- */

static bool fits(const struct save_space *space, struct fs_space *seen)
{
	int ret = space->found ? fs_space_of_found(space->path, space->found, seen) :
				 fs_space_of_directory(space->path, seen);

	/* Opening says what is wrong with a path that cannot be looked at, or is a pipe. */
	return ret || space->needed_bytes <= seen->free_bytes;
}

/*
 * These count removed files as free later: XFS when a thread of its own has come to it, btrfs with
 * its next transaction. A reservation gets the space at once.
 */
static bool counts_late(const struct fs_space *seen)
{
	static const char *const late[] = { "xfs", "btrfs", "ext4" };
	char type[32];

	fs_magic_name(seen->magic, type, sizeof(type));
	for (size_t i = 0; i < ARRAY_LENGTH(late); i++) {
		if (!strcmp(type, late[i]))
			return true;
	}
	return false;
}

static bool fits_after_all(const struct save_space *space, struct fs_space *seen)
{
	return fits(space, seen) || (counts_late(seen) && io_can_reserve(space->path, !space->found,
									 space->needed_bytes));
}

static void clear(const struct save_space *space)
{
	if (space->clear)
		space->clear(space->clear_user);
	else
		io_clear_space(space->path, &space->context->log);
}

static int fail_too_little(const struct save_space *space, const struct fs_space *seen,
			   struct base_error *error)
{
	bool fails = space->context->full == IOSHAPE_FULL_FAIL;
	const uint64_t replaced_bytes = space->found ? fs_replaced_bytes(space->path) : 0;
	bool replaces = replaced_bytes && seen->free_bytes + replaced_bytes >= space->needed_bytes;
	char type[32];

	fs_space_type(seen, type, sizeof(type));
	base_refuse_with(
		error, -ENOSPC,
		BASE_WORDS("free space%s save elsewhere%s", fails ? "," : " or",
			   fails ? ", or set full=skip" : ""),
		"cannot save \"%s\": needs %s, %s are free on its "
		"filesystem (%s)%s",
		space->path, BASE_SIZE(space->needed_bytes), BASE_SIZE(seen->free_bytes), type,
		replaces ? ", where the old file stays until the new one is complete" : "");
	base_error_space(error, space->needed_bytes, seen->free_bytes);
	return -ENOSPC;
}

/*
 * Names the storage targets that could not hold their part of the file, on filesystems that tell of
 * each. Which of them the file gets is known only when it is created. Returns false if the
 * filesystem has no storage targets.
 */
static bool name_full_targets(const struct save_space *space, char *into, size_t into_bytes)
{
	char *directory = space->found ? base_directory_of(space->path) : strdup(space->path);
	struct io_folder folder = IO_NO_FOLDER;
	const struct fs_part *part;
	struct fs_storage storage;
	struct fs_info info;
	uint64_t stripes = 1;
	bool has_targets;

	*into = 0;
	has_targets = directory && !io_folder_open(&folder, directory, NULL) &&
		      !fs_describe(folder.fd, directory, NULL, &info, NULL) &&
		      fs_takes_layouts(info.family);
	if (has_targets && !fs_look_at_storage(folder.fd, directory, "", &storage, NULL)) {
		part = fs_layout_main(&storage.layout, space->needed_bytes);
		if (part && part->stripe_count)
			stripes = part->stripe_count;
		/* All of them are the most that it can have. */
		fs_name_full_targets(
			&storage, space->needed_bytes / MIN(stripes, MAX(storage.targets, 1)) + 1,
			into, into_bytes);
	}
	io_folder_close(&folder);
	free(directory);
	return has_targets;
}

/* A write met a full disk. statfs() tells of the whole filesystem, which may have space elsewhere.
 */
static void explain(const struct save_space *space, struct base_error *error)
{
	char targets[TARGETS_BYTES];
	struct fs_space seen;
	bool has_targets;

	if (!fits(space, &seen) || seen.free_bytes == UINT64_MAX || error->code != -ENOSPC)
		return;
	has_targets = name_full_targets(space, targets, sizeof(targets));
	if (!has_targets && !seen.no_inodes)
		return;
	base_rephrase(error, error->code, "%s (%s are free on the whole filesystem: %s%s)",
		      error->sentence, BASE_SIZE(seen.free_bytes),
		      seen.no_inodes ? "its inodes are used up" :
		      *targets       ? "of its storage targets are full " :
				       "one of its storage targets may be full",
		      seen.no_inodes ? "" : targets);
}

/* ---- Skipping -------------------------------------------------------------------------------- */

int save_space_verdict(const struct ioshape_context *context, int ret, struct base_error *error)
{
	if (!is_lack_of_space(ret) || context->full != IOSHAPE_FULL_SKIP)
		return ret;
	return base_rephrase(error, IOSHAPE_E_SKIPPED, "skipped (full=skip): %s", error->sentence);
}

void save_space_note_skip(struct io_notes *notes, const struct base_error *error)
{
	io_note(notes, IOSHAPE_STEP_SKIPPED, "%s", error->sentence);
}

/* ---- One save -------------------------------------------------------------------------------- */

int save_space_check(const struct save_space *space, struct io_notes *notes,
		     struct base_error *error)
{
	const struct ioshape_context *context = space->context;
	struct fs_space seen;
	int ret;

	if (space->needed_bytes <= IO_SMALL_FILE_BYTES)
		return 0;
	if (fits(space, &seen))
		return 0;
	clear(space);
	if (fits_after_all(space, &seen))
		return 0;
	fs_space_type(&seen, notes->filesystem, sizeof(notes->filesystem));
	ret = fail_too_little(space, &seen, error);
	return save_space_verdict(context, ret, error);
}

int save_space_explain(const struct save_space *space, int ret, struct base_error *error)
{
	struct fs_space seen;

	if (!is_lack_of_space(ret))
		return ret;
	/* Bytes that have gone to a pipe or a device are not skipped. */
	if (space->found && fs_space_of_path(space->path, &seen) == -EINVAL)
		return ret;
	explain(space, error);
	base_error_space(error, space->needed_bytes, UINT64_MAX);
	return save_space_verdict(space->context, ret, error);
}
