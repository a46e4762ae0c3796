/* SPDX-License-Identifier: Apache-2.0 */
#define _GNU_SOURCE
#include "ring/destination.h"
#include "ring/folder.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/xattr.h>
#include <unistd.h>

/* As many links as the kernel itself follows. */
#define MAX_LINKS 40

/* Names that turn out to be taken; each holds 64 random bits, so one would do. */
#define MAX_NAMES 16

/* ---- Where the path leads -------------------------------------------------------------------- */

/* Splits into directory and name. "a" is "." and "a". */
static int split(struct ring_destination *destination, const char *path, struct base_error *error)
{
	const char *slash = strrchr(path, '/');

	free(destination->directory);
	free(destination->name);
	destination->directory = !slash        ? strdup(".") :
				 slash == path ? strdup("/") :
						 strndup(path, (size_t)(slash - path));
	destination->name = strdup(slash ? slash + 1 : path);
	if (!destination->directory || !destination->name)
		return base_no_memory(error, "a path", strlen(path));
	/* A link that ends in a slash. */
	if (!*destination->name)
		return base_fail(error, -EISDIR,
				 "cannot save to \"%s\"" BASE_REMEDY
				 "give the name of a file in it",
				 destination->path);
	return 0;
}

/*
 * Where everybody may put something and nobody can remove what others put (/tmp), what another user
 * left under our name is a trap: the kernel's rule for those who open it (fs.protected_symlinks,
 * fs.protected_regular), which does not see those who rename.
 */
static int refuse_planted(const struct ring_destination *destination, const struct stat *directory,
			  const struct stat *found, struct base_error *error)
{
	const mode_t everybodys = S_ISVTX | S_IWOTH;

	if ((directory->st_mode & everybodys) != everybodys || found->st_uid == geteuid() ||
	    found->st_uid == directory->st_uid)
		return 0;
	return base_refuse(error, -EACCES,
			   "cannot save to \"%s\": another user has put a %s there, in a directory "
			   "where everybody may" BASE_REMEDY "remove it, or save elsewhere",
			   destination->path, S_ISLNK(found->st_mode) ? "link" : "file");
}

/* Whose it is and what it says belong together: both of the link that is open. */
static int read_open_link(const struct ring_destination *destination, int fd, char text[PATH_MAX],
			  struct base_error *error)
{
	struct stat link, directory;
	const ssize_t bytes = readlinkat(fd, "", text, PATH_MAX - 1);

	if (bytes < 0 || fstat(fd, &link) || stat(destination->directory, &directory))
		return base_fail(error, -errno, "cannot follow the link \"%s\"", destination->path);
	text[bytes] = 0;
	return refuse_planted(destination, &directory, &link, error);
}

/* What a link in the destination's directory says, as a path of our own; NULL if it is none. */
static int read_link(const struct ring_destination *destination, const char *path, char **out,
		     struct base_error *error)
{
	char text[PATH_MAX];
	int fd = -1, ret;

	*out = NULL;
	if (readlink(path, text, sizeof(text)) >= 0)
		fd = base_own(open(path, O_PATH | O_NOFOLLOW | O_CLOEXEC));
	if (fd < 0)
		return errno == EINVAL || errno == ENOENT ?
			       0 :
			       base_fail(error, -errno, "cannot follow the link \"%s\"",
					 destination->path);
	ret = read_open_link(destination, fd, text, error);
	base_close(fd);
	if (ret)
		return ret;
	if (text[0] == '/')
		*out = strdup(text);
	else if (asprintf(out, "%s/%s", destination->directory, text) < 0)
		*out = NULL;
	return *out ? 0 : base_no_memory(error, "a path", strlen(text));
}

/* Follows links from path to path, also a last one that leads to nothing yet, as open() would. */
static int follow(struct ring_destination *destination, struct base_error *error)
{
	char *path = strdup(destination->path), *next;
	int ret;

	if (!path)
		return base_no_memory(error, "a path", strlen(destination->path));
	for (int links = 0;; links++) {
		ret = split(destination, path, error);
		if (!ret && !destination->absent)
			ret = read_link(destination, path, &next, error);
		if (ret || destination->absent || !next)
			break;
		free(path);
		path = next;
		if (links == MAX_LINKS) {
			ret = base_refuse(error, -ELOOP,
					  "cannot save to \"%s\": too many symbolic links",
					  destination->path);
			break;
		}
	}
	free(path);
	return ret;
}

/* ---- What is there --------------------------------------------------------------------------- */

/* What to do where the directory cannot be opened. */
static const char *directory_remedy(const char *path, int code)
{
	if (code != ENOENT)
		return "";
	if (!strncmp(path, "~", 1) || strstr(path, "/~"))
		return "write the home directory out: only a shell knows what \"~\" is "
		       "(in Python os.path.expanduser())";
	return "create it first";
}

static int open_directory(struct ring_destination *destination, struct base_error *error)
{
	destination->directory_fd =
		base_own(open(destination->directory, O_RDONLY | O_DIRECTORY | O_CLOEXEC));
	/* One may write into a directory that one may not list; it just cannot be synced then. */
	if (destination->directory_fd < 0 && errno == EACCES)
		destination->directory_fd =
			base_own(open(destination->directory, O_PATH | O_DIRECTORY | O_CLOEXEC));
	if (destination->directory_fd < 0)
		return base_fail(
			error, -errno,
			"cannot save to \"%s\": cannot open its directory \"%s\"" BASE_REMEDY "%s",
			destination->path, destination->directory,
			directory_remedy(destination->directory, errno));
	return 0;
}

/*
 * 1 if the path leads to a pipe or a device, which has been opened. By the path as it was given:
 * the text of a link such as /dev/stdout or /dev/fd/63 ("pipe:[4711]") leads nowhere.
 */
static int open_if_stream(struct ring_destination *destination, struct base_error *error)
{
	struct stat status;

	/* Each question about a name may be one to a server: where there is nothing, one will do.
	 */
	if (lstat(destination->path, &status)) {
		destination->absent = errno == ENOENT;
		return 0;
	}
	if (S_ISLNK(status.st_mode) && stat(destination->path, &status))
		return 0;
	if (S_ISREG(status.st_mode) || S_ISDIR(status.st_mode))
		return 0;
	destination->stream = true;
	destination->device = S_ISBLK(status.st_mode);
	destination->fd = base_own(open(destination->path, O_WRONLY | O_NOCTTY | O_CLOEXEC));
	if (destination->fd < 0)
		return base_fail(error, -errno, "cannot open \"%s\" for writing",
				 destination->path);
	return 1;
}

/* A rename would replace a file whatever its mode; who protected it did not mean that. */
static bool may_write(const struct ring_destination *destination)
{
	/* Without the flag it is a system call that every sandbox knows. */
	int flags = getuid() == geteuid() && getgid() == getegid() ? 0 : AT_EACCESS;

	return !faccessat(destination->directory_fd, destination->name, W_OK, flags);
}

/* 1 and its status if there is a regular file, 0 if there is nothing. */
static int look(struct ring_destination *destination, struct stat *old, struct base_error *error)
{
	struct stat directory;

	if (destination->absent)
		return 0;
	if (fstatat(destination->directory_fd, destination->name, old, 0)) {
		if (errno == ENOENT)
			return 0;
		return base_fail(error, -errno, "cannot look at \"%s\"", destination->path);
	}
	if (S_ISDIR(old->st_mode))
		return base_fail(error, -EISDIR,
				 "cannot save to \"%s\"" BASE_REMEDY
				 "give the name of a file in it",
				 destination->path);
	if (!S_ISREG(old->st_mode))
		return base_refuse(error, -EBUSY,
				   "cannot save to \"%s\": it is changing under our hands",
				   destination->path);
	if (fstat(destination->directory_fd, &directory))
		return base_fail(error, -errno, "cannot look at \"%s\"", destination->directory);
	if (refuse_planted(destination, &directory, old, error))
		return -EACCES;
	if (!may_write(destination))
		return base_fail(error, -errno, "cannot replace \"%s\": the file is not writable",
				 destination->path);
	return 1;
}

/* ---- The temporary file ---------------------------------------------------------------------- */

static int make_name(struct ring_destination *destination, struct base_error *error)
{
	char name[NAME_MAX + 1];

	ring_temporary_name(destination->directory_fd, destination->name, name);
	free(destination->temporary);
	destination->temporary = strdup(name);
	return destination->temporary ? 0 : base_no_memory(error, "a name", NAME_MAX);
}

static void forget_temporary(struct ring_destination *destination)
{
	free(destination->temporary);
	destination->temporary = NULL;
}

static void remove_temporary(struct ring_destination *destination)
{
	unlinkat(destination->directory_fd, destination->temporary, 0);
	base_close(destination->fd);
	destination->fd = -1;
	forget_temporary(destination);
}

/*
 * The lock tells others that the writer lives; the kernel drops it when it dies. Somebody tidying
 * up may have come between creation and lock, and taken the new file for an abandoned one: 1 means
 * try again.
 */
static int lock_temporary(struct ring_destination *destination, struct ring_notes *notes)
{
	struct stat status;

	if (flock(destination->fd, LOCK_EX | LOCK_NB)) {
		if (errno == EWOULDBLOCK)
			return 1;
		ring_note(notes, IOSHAPE_STEP_LOCK, "no file locks here: %s",
			  ioshape_strerror(-errno));
		return 0;
	}
	return fstat(destination->fd, &status) || !status.st_nlink;
}

/* With `mode` it is born: who opens a file keeps it, whatever its mode becomes. */
static int open_temporary(struct ring_destination *destination, struct ring_striping *striping,
			  mode_t mode, struct ring_notes *notes, struct base_error *error)
{
	int ret;

	for (int attempt = 0; attempt < MAX_NAMES; attempt++) {
		ret = make_name(destination, error);
		if (ret)
			return ret;
		ret = ring_striping_create(striping, destination->directory_fd,
					   destination->directory, destination->temporary, mode,
					   notes);
		destination->fd = base_own(MAX(ret, -1));
		if (ret < 0) {
			forget_temporary(destination); /* it is not ours */
			if (ret == -EEXIST)
				continue;
			return base_fail(
				error, ret,
				"cannot create a temporary file for \"%s\" in \"%s\"" BASE_REMEDY
				"the directory must be writable, because the file is "
				"replaced as a whole",
				destination->path, destination->directory);
		}
		if (!lock_temporary(destination, notes))
			return 0;
		remove_temporary(destination);
	}
	return base_refuse(error, -EEXIST, "cannot find a free name for a temporary file in \"%s\"",
			   destination->directory);
}

/* What lets more people in, or fewer, than the mode says: 500 of them fit. */
#define ACL "system.posix_acl_access"
#define MOST_ACL_BYTES 4096

/*
 * The new file has the old one's ACL, or none: it may have been born with its directory's default
 * one, of which a mode would let everybody in who is named there. False if that cannot be had.
 */
static bool copy_acl(const struct ring_destination *destination, bool same_group)
{
	char acl[MOST_ACL_BYTES], *old = NULL;
	ssize_t bytes;

	if (asprintf(&old, "%s/%s", destination->directory, destination->name) < 0)
		return false;
	bytes = lgetxattr(old, ACL, acl, sizeof(acl));
	free(old);
	if (bytes >= 0)
		return same_group && !fsetxattr(destination->fd, ACL, acl, (size_t)bytes, 0);
	if (errno != ENODATA)
		return errno == EOPNOTSUPP; /* nor has the new one any */
	return !fremovexattr(destination->fd, ACL) || errno == ENODATA;
}

/* Of another group: a member of either may do no more than before. */
static mode_t without_group(mode_t mode)
{
	const mode_t all = mode >> 3 & mode & 07;

	return (mode & 0700) | all << 3 | all;
}

/*
 * The new file looks like the one it replaces: who may read it must not change with its contents.
 * What cannot be kept makes it less, never more.
 */
static int copy_access(struct ring_destination *destination, struct ring_notes *notes,
		       struct base_error *error)
{
	mode_t mode = destination->old_mode;
	bool same_group = true;
	struct stat new;

	if (fstat(destination->fd, &new))
		return base_fail(error, -errno, "cannot look at the temporary file of \"%s\"",
				 destination->path);
	/* Only root can give files away; others share them by group at most. */
	if ((new.st_uid != destination->old_user || new.st_gid != destination->old_group) &&
	    fchown(destination->fd, destination->old_user, destination->old_group)) {
		ring_note(notes, IOSHAPE_STEP_OWNER, "owner of the replaced file not kept: %s",
			  ioshape_strerror(-errno));
		same_group = !fchown(destination->fd, (uid_t)-1, destination->old_group);
		mode = same_group ? mode & 0777 : without_group(mode);
	}
	if (!copy_acl(destination, same_group)) {
		ring_note(notes, IOSHAPE_STEP_OWNER,
			  "ACL of the replaced file not kept: only its owner may read it");
		mode &= 0700;
	}
	if (fchmod(destination->fd, mode))
		ring_note(notes, IOSHAPE_STEP_OWNER, "mode of the replaced file not kept: %s",
			  ioshape_strerror(-errno));
	return 0;
}

static int begin(struct ring_destination *destination, struct ring_striping *striping,
		 struct ring_notes *notes, struct base_error *error)
{
	const mode_t mode = destination->replaces ? 0600 : 0666 & ~striping->mask;
	int ret = open_temporary(destination, striping, mode, notes, error);

	return ret || !destination->replaces ? ret : copy_access(destination, notes, error);
}

int ring_destination_begin_again(struct ring_destination *destination,
				 struct ring_striping *striping, struct ring_notes *notes,
				 struct base_error *error)
{
	remove_temporary(destination);
	return begin(destination, striping, notes, error);
}

int ring_destination_open(struct ring_destination *destination, const char *path,
			  struct ring_striping *striping, struct ring_notes *notes,
			  struct base_error *error)
{
	struct stat old;
	int ret;

	memset(destination, 0, sizeof(*destination));
	destination->directory_fd = destination->fd = destination->lock_fd = -1;
	if (!*path || path[strlen(path) - 1] == '/')
		return base_refuse(error, -EINVAL,
				   "cannot save to \"%s\"" BASE_REMEDY "give the name of a file",
				   path);
	destination->path = strdup(path);
	if (!destination->path)
		return base_no_memory(error, "a path", strlen(path));
	ret = open_if_stream(destination, error);
	if (ret)
		goto out;
	ret = follow(destination, error);
	if (!ret)
		ret = open_directory(destination, error);
	if (!ret)
		ret = look(destination, &old, error);
	if (ret < 0)
		goto out;
	destination->replaces = ret;
	if (destination->replaces) {
		destination->old_mode = old.st_mode & 07777;
		destination->old_user = old.st_uid;
		destination->old_group = old.st_gid;
	}
	ret = begin(destination, striping, notes, error);
out:
	if (ret < 0)
		ring_destination_close(destination);
	return MIN(ret, 0);
}

/* ---- The end --------------------------------------------------------------------------------- */

int ring_destination_sync(struct ring_destination *destination, struct base_error *error)
{
	if (destination->stream && !destination->device)
		return 0;
	/*
	 * Once only: after a failure the kernel may call the lost pages clean, so that a second
	 * fsync would succeed over a file with holes.
	 */
	if (fsync(destination->fd))
		return base_fail(error, -errno,
				 "cannot bring \"%s\" to stable storage (fsync)" BASE_REMEDY
				 "the storage failed or is full, save again or elsewhere",
				 destination->path);
	return 0;
}

/* Some network filesystems report lost writes only here. */
static int close_checked(struct ring_destination *destination, struct base_error *error)
{
	int fd = destination->fd;

	destination->fd = -1;
	if (!destination->stream) {
		destination->lock_fd = base_own(dup(fd));
		if (destination->lock_fd < 0) {
			destination->fd = fd;
			return base_fail(error, -errno,
					 "cannot finish \"%s\"" BASE_REMEDY "raise ulimit -n",
					 destination->path);
		}
	}
	/* After EINTR Linux has closed it all the same. */
	if (base_close(fd) && errno != EINTR)
		return base_fail(error, -errno,
				 "cannot finish \"%s\"" BASE_REMEDY "the storage failed or is full",
				 destination->path);
	return 0;
}

/* 0 if the name was free and is now ours; decided by the kernel, so that of two writers one wins.
 */
static int link_into_place(struct ring_destination *destination)
{
	int fd = destination->directory_fd;

	if (!renameat2(fd, destination->temporary, fd, destination->name, RENAME_NOREPLACE)) {
		forget_temporary(destination);
		return 0;
	}
	if (errno != EINVAL && errno != ENOSYS)
		return -errno;
	/* A filesystem without that flag; the temporary name goes when the destination is closed.
	 */
	return linkat(fd, destination->temporary, fd, destination->name, 0) ? -errno : 0;
}

static int put_in_place(struct ring_destination *destination, bool no_replace,
			struct base_error *error)
{
	int fd = destination->directory_fd, ret;

	if (no_replace) {
		ret = link_into_place(destination);
		return !ret ? 0 :
			      base_fail(error, ret, "cannot put \"%s\" in place%s" BASE_REMEDY "%s",
					destination->path,
					ret == -EEXIST ? " without replacing what is there" : "",
					ret == -EEXIST ? "choose another name" : "");
	}
	if (renameat(fd, destination->temporary, fd, destination->name))
		return base_fail(error, -errno, "cannot put \"%s\" in place", destination->path);
	forget_temporary(destination);
	return 0;
}

int ring_destination_sync_directory(struct ring_destination *destination, struct ring_notes *notes)
{
	if (!fsync(destination->directory_fd))
		return 0;
	/* A directory that may be written to and not be read: all of its filesystem, then. */
	if (errno == EBADF && !syncfs(destination->lock_fd))
		return 0;
	/* Filesystems that make names durable by themselves. */
	if (errno == EINVAL || errno == EOPNOTSUPP || errno == ENOSYS) {
		ring_note(notes, IOSHAPE_STEP_SYNC, "directory not synced: %s",
			  ioshape_strerror(-errno));
		return 0;
	}
	return -errno;
}

static int sync_name(struct ring_destination *destination, struct ring_notes *notes,
		     struct base_error *error)
{
	const int ret = ring_destination_sync_directory(destination, notes);

	return !ret ? 0 :
		      base_fail(error, ret,
				"\"%s\" is in place, but its directory could not be brought to "
				"stable storage (fsync), so a power failure may bring the old file "
				"back",
				destination->path);
}

int ring_destination_commit(struct ring_destination *destination, bool no_replace, bool no_sync,
			    struct ring_notes *notes, struct base_error *error)
{
	int ret = close_checked(destination, error), old = -1;

	if (ret || destination->stream)
		return ret;
	/*
	 * When the last name of the old file goes, its blocks are freed, and whoever renames over
	 * it or syncs the directory waits for that. Holding it open puts it off until we are done;
	 * and nobody else gets them before the new name is durable, as ext4 with data=writeback
	 * allows.
	 */
	if (!destination->absent)
		old = base_own(openat(destination->directory_fd, destination->name,
				      O_PATH | O_NOFOLLOW | O_CLOEXEC));
	ret = put_in_place(destination, no_replace, error);
	if (!ret && !no_sync)
		ret = sync_name(destination, notes, error);
	ring_release(old);
	return ret;
}

void ring_destination_close(struct ring_destination *destination)
{
	if (destination->temporary)
		unlinkat(destination->directory_fd, destination->temporary, 0);
	base_close(destination->fd);
	base_close(destination->lock_fd);
	base_close(destination->directory_fd);
	free(destination->temporary);
	free(destination->name);
	free(destination->directory);
	free(destination->path);
	memset(destination, 0, sizeof(*destination));
	destination->directory_fd = destination->fd = destination->lock_fd = -1;
}
