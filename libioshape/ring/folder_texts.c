/* SPDX-License-Identifier: Apache-2.0 */
/* Small texts in a directory, and files that have to go from it. */
#define _GNU_SOURCE
#include "ring/folder.h"

#include <errno.h>
#include <stdio.h>
#include <unistd.h>

int ring_folder_put_text(const struct ring_folder *folder, const char *name, const char *text,
			 struct base_error *error)
{
	if (!symlinkat(text, folder->fd, name))
		return 0;
	if (errno == EEXIST)
		return -EEXIST;
	return base_fail(error, -errno, "cannot make the note \"%s/%s\" (a symbolic link)",
			 folder->path, name);
}

int ring_folder_get_text(const struct ring_folder *folder, const char *name, char into[PATH_MAX])
{
	const ssize_t bytes = readlinkat(folder->fd, name, into, PATH_MAX);

	if (bytes < 0)
		return -errno;
	if (bytes == PATH_MAX)
		return -ENAMETOOLONG;
	into[bytes] = 0;
	return 0;
}

int ring_folder_drop_text(const struct ring_folder *folder, const char *name,
			  struct base_error *error)
{
	if (!unlinkat(folder->fd, name, 0) || errno == ENOENT)
		return 0;
	return base_fail(error, -errno, "cannot remove \"%s/%s\"", folder->path, name);
}

/* *stays: nothing of it has gone, as somebody reads it. */
static int remove_folder(const struct ring_folder *parent, const char *name, const char *first,
			 bool *stays, struct base_error *error)
{
	struct ring_hold hold = RING_NO_HOLD;
	struct ring_folder folder;
	int ret = ring_folder_open_in(&folder, parent, name, error);

	if (ret)
		return ret;
	if (first)
		ret = ring_folder_claim(&folder, first, &hold, error);
	*stays = ret == -EBUSY;
	if (!ret || ret == -ENOENT)
		ret = ring_folder_remove(&folder, parent, name, NULL, NULL, error);
	ring_folder_let_go(&hold);
	ring_folder_close(&folder);
	return ret;
}

/* Not in the place of what has taken the name since: that is newer, and what is left over here is
 * tidied like all that a dead writer leaves. */
static void give_back(const struct ring_folder *folder, const char *doomed, const char *name)
{
	if (renameat2(folder->fd, doomed, folder->fd, name, RENAME_NOREPLACE) && errno == EINVAL)
		ring_folder_rename(folder, doomed, name);
}

int ring_folder_discard(const struct ring_folder *folder, const char *name,
			const struct ring_entry *looked_at, const char *first,
			struct base_error *error)
{
	char doomed[NAME_MAX + 1];
	struct ring_entry entry;
	bool stays = false;
	int ret;

	/* Under a name of its own it cannot be replaced any more, and dies with its process. */
	ring_temporary_name(folder->fd, name, doomed);
	ret = ring_folder_rename(folder, name, doomed);
	if (ret)
		return ret == -ENOENT ? -ESTALE :
					base_fail(error, ret, "cannot remove \"%s/%s\" (rename)",
						  folder->path, name);
	ret = ring_folder_look(folder, doomed, &entry, error);
	stays = !ret && !ring_is_unchanged(looked_at, &entry);
	if (stays)
		ret = -ESTALE;
	else if (!ret && entry.kind == RING_FOLDER)
		ret = remove_folder(folder, doomed, first, &stays, error);
	else if (!ret)
		ret = ring_folder_drop_text(folder, doomed, error);
	/* Only as a whole: the rest of what could not be removed is tidied later. */
	if (stays)
		give_back(folder, doomed, name);
	return ret;
}
