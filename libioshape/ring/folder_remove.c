/* SPDX-License-Identifier: Apache-2.0 */
/* A directory and the files in it, removed: one level, and no links followed. */
#define _GNU_SOURCE
#include "ring/ring.h"

#include <errno.h>
#include <fcntl.h>
#include <sys/file.h>
#include <unistd.h>

/* Somebody may still put files there. */
#define MOST_ROUNDS 8

int ring_folder_claim(const struct ring_folder *folder, const char *name, struct ring_hold *hold,
		      struct base_error *error)
{
	hold->owner = base_pid();
	hold->fd = openat(folder->fd, name, O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC);
	if (hold->fd < 0)
		return errno == ENOENT ?
			       -ENOENT :
			       base_fail(error, -errno, "cannot open %s/%s", folder->path, name);
	if (!flock(hold->fd, LOCK_EX | LOCK_NB) || errno != EWOULDBLOCK)
		return 0;
	ring_folder_let_go(hold);
	return -EBUSY;
}

struct removal {
	const struct ring_folder *folder;
	int ret; /* the first failure */
};

static int try_to_remove(const struct ring_folder *folder, const char *name,
			 struct base_error *error)
{
	struct ring_entry entry;

	if (!unlinkat(folder->fd, name, 0) || errno == ENOENT)
		return 0;
	if ((errno == EISDIR || errno == EPERM) && !ring_folder_look(folder, name, &entry, error) &&
	    entry.kind == RING_FOLDER)
		return base_fail(error, -ENOTEMPTY,
				 "%s was not removed, because there is a directory in it that does "
				 "not belong there: %s; look at it, and remove it yourself",
				 folder->path, name);
	return base_fail(error, -errno, "cannot remove %s/%s", folder->path, name);
}

/* What cannot be removed does not keep the rest. */
static int remove_file(void *user, const char *name, struct base_error *error)
{
	struct removal *removal = user;
	int ret = try_to_remove(removal->folder, name, error);

	if (!removal->ret)
		removal->ret = ret;
	return 0;
}

int ring_folder_remove(const struct ring_folder *folder, const struct ring_folder *parent,
		       const char *name, const char *first, struct base_error *error)
{
	struct removal removal = { folder, 0 };
	int ret = try_to_remove(folder, first, error);

	for (int round = 0; !ret; round++) {
		ret = ring_folder_list(folder, remove_file, &removal, error);
		if (!ret)
			ret = removal.ret;
		if (ret || !unlinkat(parent->fd, name, AT_REMOVEDIR) || errno == ENOENT)
			break;
		if ((errno != ENOTEMPTY && errno != EEXIST) || round == MOST_ROUNDS)
			ret = base_fail(error, -errno, "cannot remove the directory %s (rmdir)",
					folder->path);
	}
	return ret;
}
