/* SPDX-License-Identifier: Apache-2.0 */
#define _GNU_SOURCE
#include "ring/target.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

/* As many links as the kernel itself follows. */
#define MAX_LINKS 40

/* Names that turn out to be taken; each holds 64 random bits, so one would do. */
#define MAX_NAMES 16

/* ---- Where the path leads -------------------------------------------------------------------- */

/* Splits into directory and name. "a" is "." and "a". */
static int split(struct ring_target *target, const char *path, struct base_error *error)
{
	const char *slash = strrchr(path, '/');

	free(target->directory);
	free(target->name);
	target->directory = !slash        ? strdup(".") :
			    slash == path ? strdup("/") :
					    strndup(path, (size_t)(slash - path));
	target->name = strdup(slash ? slash + 1 : path);
	if (!target->directory || !target->name)
		return base_no_memory(error, "a path", strlen(path));
	/* A link that ends in a slash. */
	if (!*target->name)
		return base_fail(error, -EISDIR, "cannot save to %s; give the name of a file in it",
				 target->path);
	return 0;
}

/* What a link in the target's directory says, as a path of our own; NULL if it is none. */
static int read_link(const struct ring_target *target, const char *path, char **out,
		     struct base_error *error)
{
	char text[PATH_MAX];
	ssize_t bytes = readlink(path, text, sizeof(text) - 1);

	*out = NULL;
	if (bytes < 0)
		return errno == EINVAL || errno == ENOENT ?
			       0 :
			       base_fail(error, -errno, "cannot look at %s (readlink)",
					 target->path);
	text[bytes] = 0;
	if (text[0] == '/')
		*out = strdup(text);
	else if (asprintf(out, "%s/%s", target->directory, text) < 0)
		*out = NULL;
	return *out ? 0 : base_no_memory(error, "a path", (uint64_t)bytes);
}

/* Follows links from path to path, also a last one that leads to nothing yet, as open() would. */
static int follow(struct ring_target *target, struct base_error *error)
{
	char *path = strdup(target->path), *next;
	int ret;

	if (!path)
		return base_no_memory(error, "a path", strlen(target->path));
	for (int links = 0;; links++) {
		ret = split(target, path, error);
		if (!ret && !target->absent)
			ret = read_link(target, path, &next, error);
		if (ret || target->absent || !next)
			break;
		free(path);
		path = next;
		if (links == MAX_LINKS) {
			ret = base_fail(error, -ELOOP, "cannot save to %s: too many symbolic links",
					target->path);
			break;
		}
	}
	free(path);
	return ret;
}

/* ---- What is there --------------------------------------------------------------------------- */

static int open_directory(struct ring_target *target, struct base_error *error)
{
	target->directory_fd = open(target->directory, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
	/* One may write into a directory that one may not list; it just cannot be synced then. */
	if (target->directory_fd < 0 && errno == EACCES)
		target->directory_fd = open(target->directory, O_PATH | O_DIRECTORY | O_CLOEXEC);
	if (target->directory_fd < 0)
		return base_fail(error, -errno, "cannot save to %s: cannot open its directory %s%s",
				 target->path, target->directory,
				 errno == ENOENT ? "; create it first" : "");
	return 0;
}

/*
 * 1 if the path leads to a pipe or a device, which has been opened. By the path as it was given:
 * the text of a link such as /dev/stdout or /dev/fd/63 ("pipe:[4711]") leads nowhere.
 */
static int open_if_stream(struct ring_target *target, struct base_error *error)
{
	struct stat status;

	/* Each question about a name may be one to a server: where there is nothing, one will do.
	 */
	if (lstat(target->path, &status)) {
		target->absent = errno == ENOENT;
		return 0;
	}
	if (S_ISLNK(status.st_mode) && stat(target->path, &status))
		return 0;
	if (S_ISREG(status.st_mode) || S_ISDIR(status.st_mode))
		return 0;
	target->stream = true;
	target->device = S_ISBLK(status.st_mode);
	target->fd = open(target->path, O_WRONLY | O_NOCTTY | O_CLOEXEC);
	if (target->fd < 0)
		return base_fail(error, -errno, "cannot open %s for writing", target->path);
	return 1;
}

/* A rename would replace a file whatever its mode; who protected it did not mean that. */
static bool may_write(const struct ring_target *target)
{
	/* Without the flag it is a system call that every sandbox knows. */
	int flags = getuid() == geteuid() && getgid() == getegid() ? 0 : AT_EACCESS;

	return !faccessat(target->directory_fd, target->name, W_OK, flags);
}

/* 1 and its status if there is a regular file, 0 if there is nothing. */
static int look(struct ring_target *target, struct stat *old, struct base_error *error)
{
	if (target->absent)
		return 0;
	if (fstatat(target->directory_fd, target->name, old, 0)) {
		if (errno == ENOENT)
			return 0;
		return base_fail(error, -errno, "cannot look at %s (stat)", target->path);
	}
	if (S_ISDIR(old->st_mode))
		return base_fail(error, -EISDIR, "cannot save to %s; give the name of a file in it",
				 target->path);
	if (!S_ISREG(old->st_mode))
		return base_fail(error, -EBUSY, "cannot save to %s: it is changing under our hands",
				 target->path);
	if (!may_write(target))
		return base_fail(error, -errno, "cannot replace %s: the file is not writable",
				 target->path);
	return 1;
}

/* ---- The temporary file ---------------------------------------------------------------------- */

static char machine_tag[9];
static pthread_once_t machine_tag_once = PTHREAD_ONCE_INIT;

static void read_machine_tag(void)
{
	char text[64];
	ssize_t bytes = 0;
	int fd;

	fd = open("/proc/sys/kernel/random/boot_id", O_RDONLY | O_CLOEXEC);
	if (fd >= 0) {
		bytes = read(fd, text, sizeof(text));
		close(fd);
	}
	if (bytes > 0)
		snprintf(machine_tag, sizeof(machine_tag), "%08x",
			 base_crc32(0, text, (size_t)bytes));
	else
		strcpy(machine_tag, RING_UNKNOWN_MACHINE);
}

const char *ring_machine_tag(void)
{
	pthread_once(&machine_tag_once, read_machine_tag);
	return machine_tag;
}

/* ".model.pt.ioshape-tmp-<machine>-<random>", the first part shortened so that it is a legal name.
 */
static int make_name(struct ring_target *target, struct base_error *error)
{
	char end[64];
	int room;

	snprintf(end, sizeof(end), RING_TEMPORARY_MARK "%s-%016llx", ring_machine_tag(),
		 (unsigned long long)base_random());
	room = NAME_MAX - 1 - (int)strlen(end);
	free(target->temporary);
	if (asprintf(&target->temporary, ".%.*s%s", room, target->name, end) < 0) {
		target->temporary = NULL;
		return base_no_memory(error, "a name", NAME_MAX);
	}
	return 0;
}

static void forget_temporary(struct ring_target *target)
{
	free(target->temporary);
	target->temporary = NULL;
}

static void remove_temporary(struct ring_target *target)
{
	unlinkat(target->directory_fd, target->temporary, 0);
	close(target->fd);
	target->fd = -1;
	forget_temporary(target);
}

/*
 * The lock tells others that the writer lives; the kernel drops it when it dies. Somebody tidying
 * up may have come between creation and lock, and taken the new file for an abandoned one: 1 means
 * try again.
 */
static int lock_temporary(struct ring_target *target, struct ring_notes *notes)
{
	struct stat status;

	if (flock(target->fd, LOCK_EX | LOCK_NB)) {
		if (errno == EWOULDBLOCK)
			return 1;
		ring_note(notes, "no file locks here: %s", ioshape_strerror(-errno));
		return 0;
	}
	return fstat(target->fd, &status) || !status.st_nlink;
}

/* With `mode` it is born: who opens a file keeps it, whatever its mode becomes. */
static int open_temporary(struct ring_target *target, struct ring_striping *striping, mode_t mode,
			  struct ring_notes *notes, struct base_error *error)
{
	int ret;

	for (int attempt = 0; attempt < MAX_NAMES; attempt++) {
		ret = make_name(target, error);
		if (ret)
			return ret;
		ret = ring_striping_create(striping, target->directory_fd, target->directory,
					   target->temporary, mode, notes);
		target->fd = MAX(ret, -1);
		if (ret < 0) {
			forget_temporary(target); /* it is not ours */
			if (ret == -EEXIST)
				continue;
			return base_fail(error, ret,
					 "cannot create a temporary file for %s in %s; the "
					 "directory must be "
					 "writable, because the file is replaced as a whole",
					 target->path, target->directory);
		}
		if (!lock_temporary(target, notes))
			return 0;
		remove_temporary(target);
	}
	return base_fail(error, -EEXIST, "cannot find a free name for a temporary file in %s",
			 target->directory);
}

/* The new file looks like the one it replaces: who may read it must not change with its contents.
 */
static int copy_mode(struct ring_target *target, struct ring_notes *notes, struct base_error *error)
{
	struct stat new;

	if (fstat(target->fd, &new))
		return base_fail(error, -errno, "cannot look at the temporary file of %s",
				 target->path);
	/* Only root can give files away; others share them by group at most. */
	if ((new.st_uid != target->old_user || new.st_gid != target->old_group) &&
	    fchown(target->fd, target->old_user, target->old_group) &&
	    fchown(target->fd, (uid_t)-1, target->old_group))
		ring_note(notes, "owner of the replaced file not kept: %s",
			  ioshape_strerror(-errno));
	if ((new.st_mode & 07777) != target->old_mode && fchmod(target->fd, target->old_mode))
		ring_note(notes, "mode of the replaced file not kept: %s",
			  ioshape_strerror(-errno));
	return 0;
}

static int begin(struct ring_target *target, struct ring_striping *striping,
		 struct ring_notes *notes, struct base_error *error)
{
	int ret = open_temporary(target, striping, target->replaces ? 0600 : 0666, notes, error);

	return ret || !target->replaces ? ret : copy_mode(target, notes, error);
}

int ring_target_begin_again(struct ring_target *target, struct ring_striping *striping,
			    struct ring_notes *notes, struct base_error *error)
{
	remove_temporary(target);
	return begin(target, striping, notes, error);
}

int ring_target_open(struct ring_target *target, const char *path, struct ring_striping *striping,
		     struct ring_notes *notes, struct base_error *error)
{
	struct stat old;
	int ret;

	memset(target, 0, sizeof(*target));
	target->directory_fd = target->fd = target->lock_fd = -1;
	if (!*path || path[strlen(path) - 1] == '/')
		return base_fail(error, -EINVAL, "cannot save to \"%s\"; give the name of a file",
				 path);
	target->path = strdup(path);
	if (!target->path)
		return base_no_memory(error, "a path", strlen(path));
	ret = open_if_stream(target, error);
	if (ret)
		goto out;
	ret = follow(target, error);
	if (!ret)
		ret = open_directory(target, error);
	if (!ret)
		ret = look(target, &old, error);
	if (ret < 0)
		goto out;
	target->replaces = ret;
	if (target->replaces) {
		target->old_mode = old.st_mode & 07777;
		target->old_user = old.st_uid;
		target->old_group = old.st_gid;
	}
	ret = begin(target, striping, notes, error);
out:
	if (ret < 0)
		ring_target_close(target);
	return MIN(ret, 0);
}

/* ---- The end --------------------------------------------------------------------------------- */

int ring_target_sync(struct ring_target *target, struct base_error *error)
{
	if (target->stream && !target->device)
		return 0;
	/*
	 * Once only: after a failure the kernel may call the lost pages clean, so that a second
	 * fsync would succeed over a file with holes.
	 */
	if (fsync(target->fd))
		return base_fail(
			error, -errno,
			"cannot bring %s to stable storage (fsync); the storage failed or is full, "
			"save again or elsewhere",
			target->path);
	return 0;
}

/* Some network filesystems report lost writes only here. */
static int close_checked(struct ring_target *target, struct base_error *error)
{
	int fd = target->fd;

	target->fd = -1;
	if (!target->stream) {
		target->lock_fd = dup(fd);
		if (target->lock_fd < 0) {
			target->fd = fd;
			return base_fail(error, -errno, "cannot finish %s (dup); raise ulimit -n",
					 target->path);
		}
	}
	/* After EINTR Linux has closed it all the same. */
	if (close(fd) && errno != EINTR)
		return base_fail(error, -errno,
				 "cannot finish %s (close); the storage failed or is full",
				 target->path);
	return 0;
}

/* 0 if the name was free and is now ours; decided by the kernel, so that of two writers one wins.
 */
static int link_into_place(struct ring_target *target)
{
	int fd = target->directory_fd;

	if (!renameat2(fd, target->temporary, fd, target->name, RENAME_NOREPLACE)) {
		forget_temporary(target);
		return 0;
	}
	if (errno != EINVAL && errno != ENOSYS)
		return -errno;
	/* A filesystem without that flag; the temporary name goes when the target is closed. */
	return linkat(fd, target->temporary, fd, target->name, 0) ? -errno : 0;
}

static int put_in_place(struct ring_target *target, bool no_replace, struct base_error *error)
{
	int fd = target->directory_fd, ret;

	if (no_replace) {
		ret = link_into_place(target);
		return !ret ? 0 :
			      base_fail(error, ret, "cannot put %s in place%s", target->path,
					ret == -EEXIST ? " without replacing what is there; choose "
							 "another name" :
							 "");
	}
	if (renameat(fd, target->temporary, fd, target->name))
		return base_fail(error, -errno, "cannot put %s in place (rename)", target->path);
	forget_temporary(target);
	return 0;
}

static int sync_directory(struct ring_target *target, struct ring_notes *notes,
			  struct base_error *error)
{
	if (!fsync(target->directory_fd))
		return 0;
	/* Filesystems that make names durable by themselves, or a directory that may not be read.
	 */
	if (errno == EINVAL || errno == EBADF || errno == EOPNOTSUPP || errno == ENOSYS) {
		ring_note(notes, "directory not synced: %s", ioshape_strerror(-errno));
		return 0;
	}
	return base_fail(
		error, -errno,
		"%s is in place, but its directory could not be brought to stable storage (fsync); "
		"a power failure may bring the old file back",
		target->path);
}

int ring_target_commit(struct ring_target *target, bool no_replace, bool no_sync,
		       struct ring_notes *notes, struct base_error *error)
{
	int ret = close_checked(target, error), old = -1;

	if (ret || target->stream)
		return ret;
	/*
	 * When the last name of the old file goes, its blocks are freed, and whoever renames over
	 * it or syncs the directory waits for that. Holding it open puts it off until we are done.
	 */
	if (!target->absent)
		old = openat(target->directory_fd, target->name, O_PATH | O_NOFOLLOW | O_CLOEXEC);
	ret = put_in_place(target, no_replace, error);
	if (!ret && !no_sync)
		ret = sync_directory(target, notes, error);
	ring_release(old);
	return ret;
}

void ring_target_close(struct ring_target *target)
{
	if (target->temporary)
		unlinkat(target->directory_fd, target->temporary, 0);
	if (target->fd >= 0)
		close(target->fd);
	if (target->lock_fd >= 0)
		close(target->lock_fd);
	if (target->directory_fd >= 0)
		close(target->directory_fd);
	free(target->temporary);
	free(target->name);
	free(target->directory);
	free(target->path);
	memset(target, 0, sizeof(*target));
	target->directory_fd = target->fd = target->lock_fd = -1;
}
