/* SPDX-License-Identifier: Apache-2.0 */
/* A directory and what is in it, removed: no links are followed. */
#define _GNU_SOURCE
#include "ring/ring.h"

#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/file.h>
#include <unistd.h>

/* Somebody may still put files there. */
#define MOST_ROUNDS 8
/* Each costs a descriptor and stack. No framework nests what it saves half as deep. */
#define MOST_LEVELS 8

int ring_folder_claim(const struct ring_folder *folder, const char *name, struct ring_hold *hold,
		      struct base_error *error)
{
	const int flags = O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC;

	/* NFS gives an exclusive lock to who may write only. */
	hold->fd = base_own(openat(folder->fd, name, O_RDWR | flags));
	if (hold->fd < 0 && errno != ENOENT)
		hold->fd = base_own(openat(folder->fd, name, O_RDONLY | flags));
	if (hold->fd < 0)
		return errno == ENOENT ? -ENOENT :
					 base_fail(error, -errno, "cannot open \"%s/%s\"",
						   folder->path, name);
	if (!flock(hold->fd, LOCK_EX | LOCK_NB) || errno != EWOULDBLOCK)
		return 0;
	ring_folder_let_go(hold);
	return -EBUSY;
}

/* What an NFS client calls a file that was removed while it was open on this host; it goes when it
 * is closed, and cannot be removed before. */
#define HIDDEN_BY_NFS ".nfs"

struct removal {
	const struct ring_folder *folder;
	unsigned levels; /* of directories in it that go as well */
	struct base_budget *budget;
	bool hidden; /* such a file is there */
	int ret;     /* the first failure */
};

static int remove_rest(struct removal *removal, const struct ring_folder *parent, const char *name,
		       struct base_error *error);

static int remove_inner(const struct removal *removal, const char *name, struct base_error *error)
{
	struct ring_folder inner = RING_NO_FOLDER;
	struct removal of_inner = {
		.folder = &inner,
		.levels = removal->levels - 1,
		.budget = removal->budget,
	};
	int ret;

	if (!removal->levels)
		return base_refuse(error, -ENOTEMPTY,
				   "\"%s\" was not removed, because there is a directory in it "
				   "that does not belong there: %s" BASE_REMEDY
				   "look at it, and remove it yourself",
				   removal->folder->path, name);
	ret = ring_folder_open_in(&inner, removal->folder, name, error);
	if (!ret)
		ret = remove_rest(&of_inner, removal->folder, name, error);
	ring_folder_close(&inner);
	return ret == -ENOENT ? 0 : ret;
}

static int try_to_remove(struct removal *removal, const char *name, struct base_error *error)
{
	const struct ring_folder *folder = removal->folder;
	struct ring_entry entry;

	if (!base_budget_take(removal->budget))
		return -EAGAIN;
	if (!unlinkat(folder->fd, name, 0) || errno == ENOENT)
		return 0;
	if (errno == EBUSY && !strncmp(name, HIDDEN_BY_NFS, strlen(HIDDEN_BY_NFS))) {
		removal->hidden = true;
		return 0;
	}
	if ((errno == EISDIR || errno == EPERM) && !ring_folder_look(folder, name, &entry, error) &&
	    entry.kind == RING_FOLDER)
		return remove_inner(removal, name, error);
	return base_fail(error, -errno, "cannot remove \"%s/%s\"", folder->path, name);
}

/* Goes on after an entry that cannot be removed; stops when the budget is spent. */
static int remove_file(void *user, const char *name, struct base_error *error)
{
	struct removal *removal = user;
	int ret = try_to_remove(removal, name, error);

	if (!removal->ret)
		removal->ret = ret;
	return ret == -EAGAIN ? ret : 0;
}

/*
 * Some filesystems give the blocks of a removed file to others at once (ext4 with data=writeback):
 * after a power failure the file is back, with what others wrote there. So what says that it is
 * good is gone for good before.
 */
static int remove_first(struct removal *removal, const char *name, struct base_error *error)
{
	struct ring_entry entry;
	int ret;

	if (ring_folder_look(removal->folder, name, &entry, NULL) == -ENOENT)
		return 0;
	ret = try_to_remove(removal, name, error);
	return ret ? ret : ring_folder_sync(removal->folder, error);
}

/* All that is in it, and then itself. */
static int remove_rest(struct removal *removal, const struct ring_folder *parent, const char *name,
		       struct base_error *error)
{
	int ret = 0;

	for (int round = 0; !ret; round++) {
		removal->hidden = false;
		ret = ring_folder_list(removal->folder, remove_file, removal, error);
		if (!ret)
			ret = removal->ret;
		if (ret || !unlinkat(parent->fd, name, AT_REMOVEDIR) || errno == ENOENT)
			break;
		if ((errno != ENOTEMPTY && errno != EEXIST) || round == MOST_ROUNDS)
			ret = removal->hidden ?
				      -EBUSY :
				      base_fail(error, -errno, "cannot remove the directory \"%s\"",
						removal->folder->path);
	}
	return ret;
}

int ring_folder_remove_some(const struct ring_folder *folder, const struct ring_folder *parent,
			    const char *name, const char *first, struct ring_hold *hold,
			    struct base_budget *budget, struct base_error *error)
{
	struct removal removal = {
		.folder = folder,
		.levels = first ? 0 : MOST_LEVELS,
		.budget = budget,
	};
	int ret = first ? remove_first(&removal, first, error) : 0;

	/* Nobody can begin to read it any more, and while it is open its directory may have to
	 * stay. */
	if (!ret && hold)
		ring_folder_let_go(hold);
	return ret ? ret : remove_rest(&removal, parent, name, error);
}

int ring_folder_remove(const struct ring_folder *folder, const struct ring_folder *parent,
		       const char *name, const char *first, struct ring_hold *hold,
		       struct base_error *error)
{
	return ring_folder_remove_some(folder, parent, name, first, hold, NULL, error);
}
