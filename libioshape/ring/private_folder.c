/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Folders of small files that processes leave each other. What is in them is looked at as if it
 * came from anybody: only regular files of our own are read, and links are not followed.
 */
#define _GNU_SOURCE
#include "ring/folder.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#define MAX_ENTRIES 1000000
/* In the names of folders that are being removed, behind their prefix. */
#define GONE "gone-"
#define MAX_TRIES 10 /* of what fails because another process changes it at the same time */

/* ---- The folder ------------------------------------------------------------------------------ */

static int open_folder(const char *path)
{
	const int fd =
		base_above_streams(open(path, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC));

	return fd < 0 ? -errno : fd;
}

/* Whose our files are here: servers may give root's to somebody else. And their time. */
static int look_at_own(struct ring_private_folder *shelf, int folder_fd)
{
	struct stat stat;
	int ret = ring_look_at_new(folder_fd, &stat);

	if (ret)
		return ret;
	shelf->owner = stat.st_uid;
	shelf->opened = stat.st_mtime;
	return 0;
}

int ring_private_make(const struct ring_private_folder *shelf)
{
	return mkdir(shelf->path, 0700) && errno != EEXIST ? -errno : 0;
}

/* Where everybody may put something, another user can have made it first, and this user cannot
 * remove it. */
static int refuse_owner(const char *path, uid_t owner, struct base_error *error)
{
	return base_refuse(
		error, -EACCES,
		"cannot use the folder \"%s\": it belongs to user %u, and this process runs "
		"as user %u" BASE_REMEDY "ask user %u or the administrator to remove it",
		path, (unsigned)owner, (unsigned)geteuid(), (unsigned)owner);
}

static int say_open(int code, const char *path, struct base_error *error)
{
	struct stat stat;

	if (code == -EACCES && !lstat(path, &stat) && stat.st_uid != geteuid())
		return refuse_owner(path, stat.st_uid, error);
	if (code == -ELOOP || code == -ENOTDIR)
		return base_fail(error, code,
				 "cannot use \"%s\": it is no folder" BASE_REMEDY "remove it",
				 path);
	return base_fail(error, code, "cannot keep notes in the folder \"%s\"" BASE_REMEDY "%s",
			 path,
			 code == -EACCES ? "run all processes that share it as one user" : "");
}

int ring_private_open(struct ring_private_folder *shelf, const char *path, struct base_error *error)
{
	struct stat stat;
	int fd, ret;

	memset(shelf, 0, sizeof(*shelf));
	shelf->path = strdup(path);
	if (!shelf->path)
		return base_no_memory(error, "a path", strlen(path));
	/* Another process may remove it between the two. */
	for (int i = 0; i < MAX_TRIES; i++) {
		ret = ring_private_make(shelf);
		fd = ret ? ret : open_folder(path);
		ret = fd < 0 ? fd : look_at_own(shelf, fd);
		if (!ret && fstat(fd, &stat))
			ret = -errno;
		if (fd >= 0)
			close(fd);
		if (ret != -ENOENT)
			break;
	}
	if (!ret && !base_is_one_user(shelf->owner))
		ret = base_refuse(error, -EACCES,
				  "cannot keep notes in the folder \"%s\": this process runs as "
				  "\"nobody\" of a user namespace, like others" BASE_REMEDY
				  "give it a user with a number there",
				  path);
	else if (!ret && stat.st_uid != shelf->owner)
		ret = refuse_owner(path, stat.st_uid, error);
	else if (!ret && (stat.st_mode & 022))
		ret = base_refuse(error, -EACCES,
				  "cannot use the folder \"%s\": others may write to it" BASE_REMEDY
				  "remove it, or chmod go-w",
				  path);
	else if (ret)
		say_open(ret, path, error);
	if (ret)
		ring_private_close(shelf);
	return ret;
}

void ring_private_close(struct ring_private_folder *shelf)
{
	free(shelf->path);
	memset(shelf, 0, sizeof(*shelf));
}

int ring_private_enter(const struct ring_private_folder *shelf, struct base_error *error)
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

void ring_private_leave(int folder_fd)
{
	if (folder_fd >= 0)
		close(folder_fd);
}

/* ---- Files ----------------------------------------------------------------------------------- */

int ring_private_put(const struct ring_private_folder *shelf, int folder_fd, const char *name,
		     const void *data, size_t bytes, struct base_error *error)
{
	const int ret = ring_put_whole(folder_fd, name, data, bytes, false, 0600);

	/* The folder was removed meanwhile: the caller knows what that means. */
	if (ret == -ENOENT || ret == -ESTALE)
		return -ENOENT;
	return !ret ? 0 :
		      base_fail(error, ret, "cannot write the note \"%s/%s\"", shelf->path, name);
}

/* Once, with -ESTALE if it was replaced just now. */
static int get_once(const struct ring_private_folder *shelf, int folder_fd, const char *name,
		    size_t most_bytes, struct base_buffer *into, uint64_t *stamp)
{
	struct stat stat;
	int fd, ret;

	/* O_NONBLOCK: should it be a pipe, do not wait for it. */
	fd = base_above_streams(
		openat(folder_fd, name, O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC));
	if (fd < 0)
		return -errno;
	ret = ring_read_whole(fd, most_bytes, into, &stat);
	if (!ret && stat.st_uid != shelf->owner)
		ret = -EPERM;
	if (!ret)
		*stamp = (uint64_t)stat.st_ino * 31 + (uint64_t)stat.st_mtim.tv_sec * 1000000007 +
			 (uint64_t)stat.st_mtim.tv_nsec;
	close(fd);
	return ret;
}

int ring_private_get(const struct ring_private_folder *shelf, int folder_fd, const char *name,
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
		return base_refuse(error, -EPERM,
				   "\"%s/%s\" is no file of ours" BASE_REMEDY
				   "remove it and find out who put it there",
				   shelf->path, name);
	return base_fail(error, ret, "cannot read the note \"%s/%s\"", shelf->path, name);
}

bool ring_private_has(int folder_fd, const char *name)
{
	struct stat stat;

	/* Only what is surely not there is missing. */
	return !fstatat(folder_fd, name, &stat, AT_SYMLINK_NOFOLLOW) || errno != ENOENT;
}

int ring_private_list(const struct ring_private_folder *shelf, int folder_fd,
		      int (*found)(void *user, const char *name), void *user,
		      struct base_error *error)
{
	DIR *listing = ring_listing(folder_fd);
	struct dirent *entry;
	int ret = 0;

	if (!listing)
		return errno == ENOENT || errno == ESTALE ?
			       -ENOENT :
			       base_fail(error, -errno, "cannot list the folder \"%s\"",
					 shelf->path);
	for (unsigned seen = 0; seen < MAX_ENTRIES && !ret; seen++) {
		errno = 0;
		entry = readdir(listing);
		if (!entry) {
			if (errno && errno != ENOENT && errno != ESTALE)
				ret = base_fail(error, -errno, "cannot list the folder \"%s\"",
						shelf->path);
			break;
		}
		if (*entry->d_name != '.')
			ret = found(user, entry->d_name);
	}
	closedir(listing);
	return ret;
}

void ring_private_remove(int folder_fd, const char *name)
{
	unlinkat(folder_fd, name, 0);
}

/* ---- Removing it ----------------------------------------------------------------------------- */

/* False if something is left, as the budget is spent. */
static bool empty(int folder_fd, struct base_budget *budget)
{
	DIR *listing = ring_listing(folder_fd);
	struct dirent *entry;
	bool well = true;

	for (unsigned seen = 0; listing && seen < MAX_ENTRIES && (entry = readdir(listing));
	     seen++) {
		well = base_budget_take(budget);
		if (!well)
			break;
		unlinkat(folder_fd, entry->d_name, 0);
	}
	if (listing)
		closedir(listing);
	return well;
}

void ring_private_destroy(const struct ring_private_folder *shelf)
{
	int fd;

	/* What somebody puts there meanwhile goes as well. */
	for (int i = 0; i < MAX_TRIES; i++) {
		fd = ring_private_enter(shelf, NULL);
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

static void remove_if_old(const struct ring_private_folder *shelf, int parent_fd, const char *name,
			  const char *prefix, int64_t seconds, struct base_budget *budget)
{
	const int fd = base_above_streams(
		openat(parent_fd, name, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC));
	const bool gone = !strncmp(name + strlen(prefix), GONE, strlen(GONE));
	char renamed[NAME_MAX + 1];
	struct stat stat;

	if (fd < 0)
		return;
	if (!fstat(fd, &stat) && stat.st_uid == shelf->owner &&
	    (gone || (shelf->opened - stat.st_mtime > seconds &&
		      rename_old(parent_fd, name, prefix, renamed, sizeof(renamed)))) &&
	    empty(fd, budget))
		unlinkat(parent_fd, gone ? name : renamed, AT_REMOVEDIR);
	close(fd);
}

void ring_private_destroy_old(const struct ring_private_folder *shelf, const char *directory,
			      const char *prefix, int64_t seconds)
{
	const int fd = base_above_streams(open(directory, O_RDONLY | O_DIRECTORY | O_CLOEXEC));
	DIR *listing = fd < 0 ? NULL : ring_listing(fd);
	struct base_budget budget = base_budget_begin();
	struct dirent *entry;

	for (unsigned seen = 0; listing && seen < MAX_ENTRIES && base_budget_look(&budget) &&
				(entry = readdir(listing));
	     seen++) {
		if (!strncmp(entry->d_name, prefix, strlen(prefix)))
			remove_if_old(shelf, fd, entry->d_name, prefix, seconds, &budget);
	}
	if (listing)
		closedir(listing);
	if (fd >= 0)
		close(fd);
}
