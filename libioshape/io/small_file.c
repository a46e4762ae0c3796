/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Small files: put there whole, read whole, and held while they are in use; small texts, as
 * symbolic links that nobody follows; and folders of small files that processes leave each other.
 */
#define _GNU_SOURCE
#include "io/atomic_file.h"
#include "io/queue.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

static int write_all(int fd, const uint8_t *data, size_t bytes)
{
	ssize_t done;

	/* Beyond that the kernel would send a signal that ends the application. */
	if (bytes > base_largest_file())
		return -EFBIG;
	while (bytes) {
		done = write(fd, data, bytes);
		if (done < 0 && errno == EINTR)
			continue;
		if (done <= 0)
			return done ? -errno : -EIO;
		data += done;
		bytes -= (size_t)done;
	}
	return 0;
}

/* Not there after a failure. */
static int put_new(int folder_fd, const char *name, const void *data, size_t bytes, bool durable,
		   mode_t mode)
{
	const int flags = O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC;
	int fd, ret;

	fd = base_own(openat(folder_fd, name, flags, mode));
	if (fd < 0)
		return -errno;
	/* So that nobody takes it for abandoned, and removes it. */
	if (durable)
		(void)flock(fd, LOCK_EX | LOCK_NB);
	ret = write_all(fd, data, bytes);
	if (!ret && durable && fsync(fd))
		ret = -errno;
	/* Some network filesystems report lost writes only here. */
	if (base_close(fd) && !ret && errno != EINTR)
		ret = -errno;
	if (ret)
		unlinkat(folder_fd, name, 0);
	return ret;
}

int io_put_whole(int folder_fd, const char *name, const void *data, size_t bytes, bool durable,
		 mode_t mode)
{
	char temporary[NAME_MAX + 1];
	int ret;

	io_temporary_name(folder_fd, name, temporary);
	ret = put_new(folder_fd, temporary, data, bytes, durable, mode);
	if (!ret && renameat(folder_fd, temporary, folder_fd, name)) {
		ret = -errno;
		unlinkat(folder_fd, temporary, 0);
	}
	return ret;
}

int io_read_whole(int fd, size_t most_bytes, struct base_buffer *into, struct stat *status)
{
	size_t room;
	ssize_t got;

	if (fstat(fd, status))
		return -errno;
	if (!S_ISREG(status->st_mode))
		return -EPERM;
	if ((uint64_t)status->st_size > most_bytes)
		return -EFBIG;
	into->bytes = 0;
	/* What an NFS client knows of its length may be old. */
	for (room = (size_t)status->st_size + 1;; room = 4096) {
		if (base_buffer_reserve(into, room))
			return -ENOMEM;
		got = read(fd, into->data + into->bytes, into->room - into->bytes);
		if (!got)
			return 0;
		if (got < 0 && errno != EINTR)
			return -errno;
		into->bytes += (size_t)MAX(got, 0);
		if (into->bytes > most_bytes)
			return -EFBIG;
	}
}

/* ---- Those that are open by their name ------------------------------------------------------- */

int io_folder_put(const struct io_folder *folder, const char *name, const void *data, size_t bytes,
		  struct base_error *error)
{
	const int ret = put_new(folder->fd, name, data, bytes, true, 0666);

	return !ret ? 0 :
		      base_fail_with(error, ret, io_remedy(ret), "cannot write \"%s/%s\"",
				     folder->path, name);
}

/* Shared; -ENOENT if it is just being removed, or has been. */
static int take_hold(int fd)
{
	struct stat status;

	if (flock(fd, LOCK_SH | LOCK_NB) && errno == EWOULDBLOCK)
		return -ENOENT;
	return fstat(fd, &status) || status.st_nlink ? 0 : -ENOENT;
}

static int read_file(const struct io_folder *folder, const char *name, int fd, size_t most_bytes,
		     struct base_buffer *into, struct base_error *error)
{
	struct stat status;
	const int ret = io_read_whole(fd, most_bytes, into, &status);

	if (ret == -EPERM)
		return base_refuse(error, IOSHAPE_E_FORMAT, "\"%s/%s\" is not a regular file",
				   folder->path, name);
	if (ret == -EFBIG)
		return base_refuse(error, IOSHAPE_E_LIMIT,
				   "cannot read \"%s/%s\": it is larger than %s", folder->path,
				   name, BASE_SIZE(most_bytes));
	if (ret)
		return base_fail(error, ret, "cannot read \"%s/%s\"", folder->path, name);
	if ((uint64_t)status.st_size > into->bytes)
		return base_refuse(error, IOSHAPE_E_DAMAGED,
				   "\"%s/%s\" was cut short while it was read", folder->path, name);
	return 0;
}

int io_folder_get(const struct io_folder *folder, const char *name, size_t most_bytes,
		  struct base_buffer *into, struct io_hold *hold, struct base_error *error)
{
	struct io_hold taken = IO_NO_HOLD;
	int ret;

	if (hold)
		*hold = (struct io_hold)IO_NO_HOLD;
	/* O_NONBLOCK: a pipe must be refused, not waited for. */
	taken.fd =
		base_own(openat(folder->fd, name, O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC));
	if (taken.fd < 0)
		return errno == ENOENT ? -ENOENT :
					 base_fail(error, -errno, "cannot open \"%s/%s\"",
						   folder->path, name);
	ret = hold ? take_hold(taken.fd) : 0;
	if (!ret)
		ret = read_file(folder, name, taken.fd, most_bytes, into, error);
	if (!ret && hold)
		*hold = taken;
	else
		io_folder_let_go(&taken);
	return ret;
}

ssize_t io_folder_peek(const struct io_folder *folder, const char *name, void *into, size_t bytes)
{
	const int fd = base_above_streams(
		openat(folder->fd, name, O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC));
	ssize_t got;

	if (fd < 0)
		return -errno;
	do
		got = pread(fd, into, bytes, 0);
	while (got < 0 && errno == EINTR);
	if (got < 0)
		got = -errno;
	close(fd);
	return got;
}

/* ---- Texts ----------------------------------------------------------------------------------- */

int io_folder_put_text(const struct io_folder *folder, const char *name, const char *text,
		       struct base_error *error)
{
	if (!symlinkat(text, folder->fd, name))
		return 0;
	if (errno == EEXIST)
		return -EEXIST;
	return base_fail(error, -errno, "cannot make the note \"%s/%s\" (a symbolic link)",
			 folder->path, name);
}

int io_folder_get_text(const struct io_folder *folder, const char *name, char into[PATH_MAX])
{
	const ssize_t bytes = readlinkat(folder->fd, name, into, PATH_MAX);

	if (bytes < 0)
		return -errno;
	if (bytes == PATH_MAX)
		return -ENAMETOOLONG;
	into[bytes] = 0;
	return 0;
}

int io_folder_drop_text(const struct io_folder *folder, const char *name, struct base_error *error)
{
	if (!unlinkat(folder->fd, name, 0) || errno == ENOENT)
		return 0;
	return base_fail(error, -errno, "cannot remove \"%s/%s\"", folder->path, name);
}

/* ---- Folders that belong to this user -------------------------------------------------------- */

/*
 * What is in them is looked at as if it came from anybody: only regular files of our own are read,
 * and links are not followed.
 */

/* In the names of folders that are being removed, behind their prefix. */
#define GONE "gone-"
#define MAX_TRIES 10 /* of what fails because another process changes it at the same time */

static int open_folder(const char *path)
{
	const int fd =
		base_above_streams(open(path, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC));

	return fd < 0 ? -errno : fd;
}

/* Whose our files are here: servers may give root's to somebody else. And their time. */
static int look_at_own(struct io_private_folder *shelf, int folder_fd)
{
	struct stat stat;
	int ret = io_look_at_new(folder_fd, &stat);

	if (ret)
		return ret;
	shelf->owner = stat.st_uid;
	shelf->opened = stat.st_mtime;
	return 0;
}

/* Where everybody may put something, another user can have made it first, and this user cannot
 * remove it. */
static int refuse_owner(const char *path, uid_t owner, struct base_error *error)
{
	return base_refuse_with(
		error, -EACCES,
		BASE_WORDS("ask user %u or the administrator to remove it", (unsigned)owner),
		"cannot use the folder \"%s\": it belongs to user %u, and this process runs "
		"as user %u",
		path, (unsigned)owner, (unsigned)geteuid());
}

static int say_open(int code, const char *path, struct base_error *error)
{
	struct stat stat;

	if (code == -EACCES && !lstat(path, &stat) && stat.st_uid != geteuid())
		return refuse_owner(path, stat.st_uid, error);
	if (code == -ELOOP || code == -ENOTDIR)
		return base_fail_with(error, code, "remove it",
				      "cannot use \"%s\": it is no folder", path);
	return base_fail_with(error, code,
			      code == -EACCES ? "run all processes that share it as one user" : "",
			      "cannot keep notes in the folder \"%s\"", path);
}

int io_private_open(struct io_private_folder *shelf, const char *path, struct base_error *error)
{
	struct stat stat;
	int fd, ret;

	memset(shelf, 0, sizeof(*shelf));
	shelf->path = strdup(path);
	if (!shelf->path)
		return base_no_memory(error, "a path", strlen(path));
	/* Another process may remove it between the two. */
	for (int i = 0; i < MAX_TRIES; i++) {
		fd = mkdir(path, 0700) && errno != EEXIST ? -errno : open_folder(path);
		ret = fd < 0 ? fd : look_at_own(shelf, fd);
		if (!ret && fstat(fd, &stat))
			ret = -errno;
		if (fd >= 0)
			close(fd);
		if (ret != -ENOENT)
			break;
	}
	if (!ret && !base_is_one_user(shelf->owner))
		ret = base_refuse_with(
			error, -EACCES, "give it a user with a number there",
			"cannot keep notes in the folder \"%s\": this process runs as "
			"\"nobody\" of a user namespace, like others",
			path);
	else if (!ret && stat.st_uid != shelf->owner)
		ret = refuse_owner(path, stat.st_uid, error);
	else if (!ret && (stat.st_mode & 022))
		ret = base_refuse_with(error, -EACCES, "remove it, or chmod go-w",
				       "cannot use the folder \"%s\": others may write to it",
				       path);
	else if (ret)
		say_open(ret, path, error);
	if (ret)
		io_private_close(shelf);
	return ret;
}

void io_private_close(struct io_private_folder *shelf)
{
	free(shelf->path);
	memset(shelf, 0, sizeof(*shelf));
}

int io_private_enter(const struct io_private_folder *shelf, struct base_error *error)
{
	/* Anew each time: NFS then asks the server for what has changed. */
	const int fd = open_folder(shelf->path);
	struct stat stat;

	if (fd == -ENOENT)
		return fd;
	if (fd < 0)
		return say_open(fd, shelf->path, error);
	if (fstat(fd, &stat)) {
		const int ret = -errno;

		close(fd);
		return say_open(ret, shelf->path, error);
	}
	if (stat.st_uid == shelf->owner && !(stat.st_mode & 022))
		return fd;
	close(fd);
	return base_refuse(error, -EACCES, "the folder \"%s\" is not ours any more", shelf->path);
}

/* ---- Files ----------------------------------------------------------------------------------- */

int io_private_put(const struct io_private_folder *shelf, int folder_fd, const char *name,
		   const void *data, size_t bytes, struct base_error *error)
{
	const int ret = io_put_whole(folder_fd, name, data, bytes, false, 0600);

	/* The folder was removed meanwhile: the caller knows what that means. */
	if (ret == -ENOENT || ret == -ESTALE)
		return -ENOENT;
	return !ret ? 0 :
		      base_fail(error, ret, "cannot write the note \"%s/%s\"", shelf->path, name);
}

/* Once, with -ESTALE if it was replaced just now. */
static int get_once(const struct io_private_folder *shelf, int folder_fd, const char *name,
		    size_t most_bytes, struct base_buffer *into, uint64_t *stamp)
{
	struct stat stat;
	int fd, ret;

	/* O_NONBLOCK: should it be a pipe, do not wait for it. */
	fd = base_above_streams(
		openat(folder_fd, name, O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC));
	if (fd < 0)
		return -errno;
	ret = io_read_whole(fd, most_bytes, into, &stat);
	if (!ret && stat.st_uid != shelf->owner)
		ret = -EPERM;
	if (!ret)
		*stamp = (uint64_t)io_modified_ns(&stat) ^
			 (uint64_t)stat.st_ino * 0x9e3779b97f4a7c15u;
	close(fd);
	return ret;
}

int io_private_get(const struct io_private_folder *shelf, int folder_fd, const char *name,
		   size_t most_bytes, struct base_buffer *into, uint64_t *stamp,
		   struct base_error *error)
{
	int ret = -ESTALE;

	for (int i = 0; i < MAX_TRIES && ret == -ESTALE; i++)
		ret = get_once(shelf, folder_fd, name, most_bytes, into, stamp);
	if (!ret || ret == -ENOENT)
		return ret;
	if (ret == -ENOMEM)
		return base_no_memory(error, "a note", most_bytes);
	if (ret == -EPERM || ret == -ELOOP)
		return base_refuse_with(error, -EPERM, "remove it and find out who put it there",
					"\"%s/%s\" is no file of ours", shelf->path, name);
	return base_fail(error, ret, "cannot read the note \"%s/%s\"", shelf->path, name);
}

struct seen {
	int (*found)(void *user, const char *name);
	void *user;
};

static int see_name(void *user, const char *name, struct base_error *error)
{
	const struct seen *seen = user;

	(void)error;
	return *name == '.' ? 0 : seen->found(seen->user, name);
}

int io_private_list(const struct io_private_folder *shelf, int folder_fd,
		    int (*found)(void *user, const char *name), void *user,
		    struct base_error *error)
{
	const struct io_folder folder = { .fd = folder_fd, .path = shelf->path };
	struct seen seen = { found, user };
	struct base_error why = { 0 };
	const int ret = io_folder_list(&folder, see_name, &seen, &why);

	if (ret == -ENOENT || ret == -ESTALE)
		return -ENOENT;
	if (why.code && error)
		*error = why;
	return ret;
}

/* ---- Removing it ----------------------------------------------------------------------------- */

struct emptying {
	int folder_fd;
	struct base_budget *budget;
};

static int remove_one(void *user, const char *name, struct base_error *error)
{
	const struct emptying *emptying = user;

	(void)error;
	if (!base_budget_take(emptying->budget))
		return -EAGAIN;
	unlinkat(emptying->folder_fd, name, 0);
	return 0;
}

/* False if something is left, as the budget is spent. */
static bool empty(int folder_fd, struct base_budget *budget)
{
	const struct io_folder folder = { .fd = folder_fd };
	struct emptying emptying = { folder_fd, budget };

	return io_folder_list(&folder, remove_one, &emptying, NULL) != -EAGAIN;
}

void io_private_destroy(const struct io_private_folder *shelf)
{
	int fd;

	/* What somebody puts there meanwhile goes as well. */
	for (int i = 0; i < MAX_TRIES; i++) {
		fd = io_private_enter(shelf, NULL);
		if (fd < 0)
			return;
		empty(fd, NULL);
		close(fd);
		if (!rmdir(shelf->path) || (errno != ENOTEMPTY && errno != EEXIST))
			return;
	}
}

/* By its name the next one knows it, should this process not come to the end: what was emptied
 * looks new. */
static bool rename_old(int parent_fd, const char *name, const char *prefix, char *into,
		       size_t into_bytes)
{
	return (size_t)snprintf(into, into_bytes, "%s" GONE "%s", prefix, name + strlen(prefix)) <
		       into_bytes &&
	       !renameat(parent_fd, name, parent_fd, into);
}

struct old_folders {
	const struct io_private_folder *shelf;
	struct io_folder parent;
	const char *prefix;
	int64_t seconds;
	struct base_budget budget;
};

static int remove_if_old(void *user, const char *name, struct base_error *error)
{
	struct old_folders *old = user;
	const size_t prefix = strlen(old->prefix);
	const struct io_private_folder *shelf = old->shelf;
	const int parent_fd = old->parent.fd;
	char renamed[NAME_MAX + 1];
	struct stat stat;
	bool gone;
	int fd;

	(void)error;
	if (!base_budget_look(&old->budget))
		return -EAGAIN;
	if (strncmp(name, old->prefix, prefix) != 0)
		return 0;
	fd = base_above_streams(
		openat(parent_fd, name, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC));
	if (fd < 0)
		return 0;
	gone = !strncmp(name + prefix, GONE, strlen(GONE));
	if (!fstat(fd, &stat) && stat.st_uid == shelf->owner &&
	    (gone || (shelf->opened - stat.st_mtim.tv_sec > old->seconds &&
		      rename_old(parent_fd, name, old->prefix, renamed, sizeof(renamed)))) &&
	    empty(fd, &old->budget))
		unlinkat(parent_fd, gone ? name : renamed, AT_REMOVEDIR);
	close(fd);
	return 0;
}

void io_private_destroy_old(const struct io_private_folder *shelf, const char *directory,
			    const char *prefix, int64_t seconds)
{
	struct old_folders old = {
		.shelf = shelf,
		.prefix = prefix,
		.seconds = seconds,
		.budget = base_budget_begin(),
	};

	if (io_folder_open(&old.parent, directory, NULL))
		return;
	io_folder_list(&old.parent, remove_if_old, &old, NULL);
	io_folder_close(&old.parent);
}
