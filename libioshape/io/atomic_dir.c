/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Atomic directories: they are filled under a temporary name and then renamed. Also the removal of
 * files and directories that must disappear as a whole.
 */
#define _GNU_SOURCE
#include "io/atomic_file.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

/* Most tries to find a free name. */
#define MOST_TRIES 16

int io_folder_create_locked(struct io_folder *folder, const struct io_folder *parent,
			    const char *name, enum io_lock *lock, struct base_error *error)
{
	int ret = io_folder_create_in(folder, parent, name, error);

	if (ret)
		return ret == -EEXIST ? -EAGAIN : ret;
	*lock = io_folder_lock(folder);
	/*
	 * Another process may have taken the new directory for a stale one, and removed or locked
	 * it.
	 */
	if (*lock == IO_NO_LOCKS ||
	    (*lock == IO_LOCKED && io_folder_is_named(folder, parent, name)))
		return 0;
	io_folder_close(folder);
	return -EAGAIN;
}

/* Splits an absolute path into its parent, which is created and opened, and its name there. */
static int split(struct io_new_folder *made, const char *path, struct base_error *error)
{
	const char *slash = strrchr(path, '/');
	char *above = strndup(path, MAX((size_t)(slash - path), 1));
	int ret = 0;

	made->name = strdup(slash + 1);
	if (!above || !made->name)
		ret = base_no_memory(error, "a path", strlen(path));
	if (!ret)
		ret = io_folder_make(above, error);
	if (!ret)
		ret = io_folder_open(&made->above, above, error);
	free(above);
	return ret;
}

int io_new_folder_make(struct io_new_folder *made, const char *path, struct base_budget *tidying,
		       const struct base_log *log, struct base_error *error)
{
	enum io_lock lock;
	int ret;

	*made = (struct io_new_folder)IO_NO_NEW_FOLDER;
	ret = split(made, path, error);
	if (!ret && tidying)
		io_remove_stale(made->above.fd, made->above.path, tidying, log);
	for (int tries = 0; !ret && tries < MOST_TRIES; tries++) {
		io_temporary_name(made->above.fd, made->name, made->temporary);
		ret = io_folder_create_locked(&made->folder, &made->above, made->temporary, &lock,
					      error);
		if (!ret)
			return 0;
		if (ret == -EAGAIN && tries + 1 < MOST_TRIES)
			ret = 0;
	}
	if (ret == -EAGAIN)
		base_fail(error, ret, "cannot find a free name in \"%s\"", made->above.path);
	*made->temporary = 0;
	io_new_folder_close(made, log);
	return ret;
}

int io_new_folder_commit(struct io_new_folder *made, struct base_error *error)
{
	int ret = io_folder_sync(&made->folder, error);

	if (ret)
		return ret;
	ret = io_folder_rename(&made->above, made->temporary, made->name);
	if (ret == -EEXIST || ret == -ENOTEMPTY || ret == -ENOTDIR)
		return base_fail_with(
			error, -EEXIST, "choose another name",
			"cannot rename \"%s/%s\" into place without replacing an existing entry",
			made->above.path, made->name);
	if (ret)
		return base_fail(error, ret, "cannot rename \"%s/%s\" into place", made->above.path,
				 made->name);
	ret = io_folder_sync(&made->above, error);
	/* Restore the temporary name. */
	if (ret)
		io_folder_rename(&made->above, made->name, made->temporary);
	else
		*made->temporary = 0;
	return ret;
}

/* ---- Replacing a directory ------------------------------------------------------------------- */

/* Opens the existing directory of that name, and claims the file `first` in it, if there is one. */
static int hold_old(const struct io_new_folder *made, const char *first, int64_t newest_ns,
		    struct io_folder *old, struct io_hold *hold, struct base_error *error)
{
	struct io_entry entry;
	int ret = io_folder_open_in(old, &made->above, made->name, error);

	if (!ret)
		ret = io_folder_look(old, ".", &entry, error);
	if (!ret && entry.modified_ns > newest_ns)
		ret = base_fail_reason(error, -EEXIST,
				       "cannot replace \"%s\": it is newer than its replacement",
				       old->path);
	if (!ret && first) {
		ret = io_folder_claim(old, first, hold, error);
		if (ret == -EBUSY)
			base_fail_reason_with(error, ret, "try again later",
					      "cannot replace \"%s\": a process is reading it",
					      old->path);
		ret = ret == -ENOENT ? 0 : ret;
	}
	return ret;
}

/* Exchanges the new and the old directory; afterwards the old one has the name `aside`. */
static int swap(struct io_new_folder *made, char aside[NAME_MAX + 1])
{
	int ret = io_folder_swap(&made->above, made->temporary, made->name);

	if (!ret)
		strcpy(aside, made->temporary);
	if (ret != -EOPNOTSUPP)
		return ret;
	io_temporary_name(made->above.fd, made->name, aside);
	ret = io_folder_rename(&made->above, made->name, aside);
	if (ret)
		return ret;
	ret = io_folder_rename(&made->above, made->temporary, made->name);
	if (ret)
		io_folder_rename(&made->above, aside, made->name);
	return ret;
}

int io_new_folder_replace(struct io_new_folder *made, const char *first, int64_t newest_ns,
			  struct base_error *error)
{
	struct io_folder old = IO_NO_FOLDER;
	struct io_hold hold = IO_NO_HOLD;
	char aside[NAME_MAX + 1];
	int ret = io_folder_sync(&made->folder, error);

	if (ret)
		return ret;
	ret = io_folder_rename(&made->above, made->temporary, made->name);
	if (ret == -EEXIST || ret == -ENOTEMPTY) {
		ret = hold_old(made, first, newest_ns, &old, &hold, error);
		if (!ret)
			ret = swap(made, aside);
	}
	if (!ret) {
		*made->temporary = 0;
		ret = io_folder_sync(&made->above, error);
	} else {
		base_fail(error, ret, "cannot rename \"%s/%s\" into place", made->above.path,
			  made->name);
	}
	/* A later removal of stale files removes what cannot be removed now. */
	if (!ret && old.fd >= 0 && io_folder_is_named(&old, &made->above, aside))
		io_folder_remove(&old, &made->above, aside, NULL, NULL, NULL, NULL);
	io_folder_let_go(&hold);
	io_folder_close(&old);
	return ret;
}

int io_folder_resemble(const struct io_folder *folder, const struct io_original *original,
		       struct base_error *error)
{
	struct stat status;
	int ret = fstat(folder->fd, &status) ? -errno : 0;

	/* Use the mode that the original's process gave it. */
	if (!ret && (status.st_mode & 0777) != (original->mode & 0777) &&
	    fchmod(folder->fd, original->mode & 07777))
		ret = -errno;
	if (!ret)
		ret = io_set_time(folder->fd, original->modified_ns);
	return !ret ? 0 :
		      base_fail(error, ret, "cannot set the modification time of \"%s\"",
				folder->path);
}

void io_new_folder_close(struct io_new_folder *made, const struct base_log *log)
{
	struct base_error error = { 0 };

	if (*made->temporary && io_folder_is_named(&made->folder, &made->above, made->temporary) &&
	    io_folder_remove(&made->folder, &made->above, made->temporary, NULL, NULL, NULL,
			     &error))
		base_log(log, IOSHAPE_LOG_WARNING, "%s", error.text);
	io_folder_close(&made->folder);
	io_folder_close(&made->above);
	free(made->name);
	*made = (struct io_new_folder)IO_NO_NEW_FOLDER;
}

/* ---- Discarding files and directories -------------------------------------------------------- */

/* Removes a directory tree. *stays tells that a process reads it, so nothing was removed. */
static int remove_folder(const struct io_folder *parent, const char *name, const char *first,
			 bool *stays, struct base_error *error)
{
	struct io_hold hold = IO_NO_HOLD;
	struct io_folder folder;
	int ret = io_folder_open_in(&folder, parent, name, error);

	if (ret)
		return ret;
	if (first)
		ret = io_folder_claim(&folder, first, &hold, error);
	*stays = ret == -EBUSY;
	if (!ret || ret == -ENOENT)
		ret = io_folder_remove(&folder, parent, name, NULL, NULL, NULL, error);
	io_folder_let_go(&hold);
	io_folder_close(&folder);
	return ret;
}

/*
 * Restores the name of what was not removed, unless the name is taken since. Then what took it is
 * newer, and the rest here is removed later as stale.
 */
static void give_back(const struct io_folder *folder, const char *doomed, const char *name)
{
	if (renameat2(folder->fd, doomed, folder->fd, name, RENAME_NOREPLACE) && errno == EINVAL)
		io_folder_rename(folder, doomed, name);
}

int io_folder_discard(const struct io_folder *folder, const char *name,
		      const struct io_entry *looked_at, const char *first, struct base_error *error)
{
	char doomed[NAME_MAX + 1];
	struct io_entry entry;
	bool stays = false;
	int fd, ret;

	/*
	 * Under a temporary name no other process can replace it, and it counts as stale if this
	 * process dies. Until then the lock keeps others from removing it as stale.
	 */
	fd = base_register_fd(
		openat(folder->fd, name, O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC));
	if (fd >= 0)
		flock(fd, LOCK_EX | LOCK_NB);
	io_temporary_name(folder->fd, name, doomed);
	ret = io_folder_rename(folder, name, doomed);
	if (ret) {
		base_close(fd);
		return ret == -ENOENT ? -ESTALE :
					base_fail(error, ret, "cannot remove \"%s/%s\" (rename)",
						  folder->path, name);
	}
	ret = io_folder_look(folder, doomed, &entry, error);
	stays = !ret && !io_is_unchanged(looked_at, &entry);
	if (stays)
		ret = -ESTALE;
	else if (!ret && entry.kind == IO_FOLDER)
		ret = remove_folder(folder, doomed, first, &stays, error);
	else if (!ret)
		ret = io_folder_drop_text(folder, doomed, error);
	/*
	 * Restore it only if nothing was removed; a half-removed directory is removed later as
	 * stale.
	 */
	if (stays)
		give_back(folder, doomed, name);
	base_close(fd);
	return ret;
}
