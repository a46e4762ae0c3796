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

/* Names that turn out to be taken; each holds 64 random bits, so one would do. */
#define MAX_NAMES 16

/* ---- The temporary file ---------------------------------------------------------------------- */

static int make_name(struct ring_destination *destination, struct base_error *error)
{
	char name[NAME_MAX + 1];

	if (!destination->unseen)
		ring_temporary_name(destination->directory_fd, destination->name, name);
	free(destination->temporary);
	destination->temporary = strdup(destination->unseen ? destination->name : name);
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
 * try again; negative is a failure. *created is what the file is; whoever shares its locks shares
 * what the kernel knows of it, so no server is asked.
 */
static int lock_temporary(struct ring_destination *destination, struct statx *created,
			  struct ring_notes *notes)
{
	const int fd = destination->fd, at = AT_EMPTY_PATH | AT_STATX_DONT_SYNC;

	if (flock(fd, LOCK_EX | LOCK_NB)) {
		if (errno == EWOULDBLOCK)
			return 1;
		ring_note(notes, IOSHAPE_STEP_LOCK, "no file locks here: %s",
			  ioshape_strerror(-errno));
	}
	if (statx(fd, "", at, RING_WHAT_IT_IS | STATX_NLINK, created))
		return -errno;
	return !created->stx_nlink;
}

/* With `mode` it is born: who opens a file keeps it, whatever its mode becomes. */
static int open_temporary(struct ring_destination *destination, struct ring_striping *striping,
			  mode_t mode, struct statx *created, struct ring_notes *notes,
			  struct base_error *error)
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
			if (ret == -EEXIST && !destination->unseen)
				continue;
			return base_fail(
				error, ret,
				"cannot create a temporary file for \"%s\" in \"%s\"" BASE_REMEDY
				"the directory must be writable, because the file is "
				"replaced as a whole",
				destination->path, destination->directory);
		}
		ret = lock_temporary(destination, created, notes);
		if (!ret)
			return 0;
		remove_temporary(destination);
		if (ret < 0)
			return base_fail(error, ret, "cannot look at the temporary file of \"%s\"",
					 destination->path);
	}
	return base_refuse(error, -EEXIST, "cannot find a free name for a temporary file in \"%s\"",
			   destination->directory);
}

/* What lets more people in, or fewer, than the mode says: 500 of them fit. */
#define ACL "system.posix_acl_access"
#define DEFAULT_ACL "system.posix_acl_default"
#define MOST_ACL_BYTES 4096

struct acl {
	ssize_t bytes; /* negative: there is none, and why */
	char data[MOST_ACL_BYTES];
};

/* That of the file which will be replaced. */
static void read_acl(const struct ring_destination *destination, struct acl *acl)
{
	char *old = NULL;

	acl->bytes = -ENOMEM;
	if (asprintf(&old, "%s/%s", destination->directory, destination->name) < 0)
		return;
	acl->bytes = lgetxattr(old, ACL, acl->data, sizeof(acl->data));
	if (acl->bytes < 0)
		acl->bytes = -errno;
	free(old);
}

static bool has_none(const struct acl *acl)
{
	return acl->bytes == -ENODATA || acl->bytes == -EOPNOTSUPP;
}

/*
 * The new file has the old one's ACL, or none: it may have been born with its directory's default
 * one, of which a mode would let everybody in who is named there. False if that cannot be had.
 */
static bool copy_acl(const struct ring_destination *destination, const struct acl *acl,
		     bool same_group)
{
	if (acl->bytes >= 0)
		return same_group &&
		       !fsetxattr(destination->fd, ACL, acl->data, (size_t)acl->bytes, 0);
	if (acl->bytes != -ENODATA)
		return acl->bytes == -EOPNOTSUPP; /* nor has the new one any */
	if (fgetxattr(destination->fd, ACL, NULL, 0) < 0 && errno == ENODATA)
		return true;
	return !fremovexattr(destination->fd, ACL) || errno == ENODATA;
}

#define UNKNOWN_MODE ((mode_t)-1)

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
static void copy_access(struct ring_destination *destination, const struct acl *acl,
			const struct statx *new, struct ring_notes *notes)
{
	mode_t mode = destination->old_mode, now = new->stx_mode & 07777;
	bool same_group = true;

	/* Only root can give files away; others share them by group at most. */
	if (new->stx_uid != destination->old_user || new->stx_gid != destination->old_group) {
		now = UNKNOWN_MODE; /* a new owner may cost it some bits */
		if (fchown(destination->fd, destination->old_user, destination->old_group)) {
			ring_note(notes, IOSHAPE_STEP_OWNER,
				  "owner of the replaced file not kept: %s",
				  ioshape_strerror(-errno));
			same_group = !fchown(destination->fd, (uid_t)-1, destination->old_group);
			mode = same_group ? mode & 0777 : without_group(mode);
		}
	}
	if (!copy_acl(destination, acl, same_group)) {
		ring_note(notes, IOSHAPE_STEP_OWNER,
			  "ACL of the replaced file not kept: only its owner may read it");
		mode &= 0700;
	}
	if (acl->bytes >= 0)
		now = UNKNOWN_MODE; /* an ACL sets some, too */
	if (mode != now && fchmod(destination->fd, mode))
		ring_note(notes, IOSHAPE_STEP_OWNER, "mode of the replaced file not kept: %s",
			  ioshape_strerror(-errno));
}

/*
 * Who opens a file keeps it, whatever its mode becomes: so from the beginning nobody may who might
 * not open the old one, whoever owns the new one.
 */
static mode_t first_mode(const struct ring_destination *destination, const struct acl *acl)
{
	return has_none(acl) ? without_group(destination->old_mode) : 0600;
}

/*
 * The umask of the call counts, not the umask of the moment at which a thread creates the file. In
 * a directory with a default ACL neither counts, so the mode stays as the kernel has set it.
 */
static int make_new(struct ring_destination *destination, struct ring_striping *striping,
		    struct ring_notes *notes, struct base_error *error)
{
	const mode_t mode = 0666 & ~(striping->umask_then ? striping->umask_then - 1 : 0);
	struct statx created;
	int ret = open_temporary(destination, striping, mode, &created, notes, error);

	if (ret || !striping->umask_then || (created.stx_mode & 0777) == mode)
		return ret;
	if (fgetxattr(destination->directory_fd, DEFAULT_ACL, NULL, 0) >= 0 ||
	    (errno != ENODATA && errno != EOPNOTSUPP))
		return 0;
	if (fchmod(destination->fd, mode))
		ring_note(notes, IOSHAPE_STEP_OWNER, "mode by the umask of the call not set: %s",
			  ioshape_strerror(-errno));
	return 0;
}

static int begin(struct ring_destination *destination, struct ring_striping *striping,
		 struct ring_notes *notes, struct base_error *error)
{
	struct statx created;
	struct acl acl;
	int ret;

	if (!destination->replaces)
		return make_new(destination, striping, notes, error);
	read_acl(destination, &acl);
	ret = open_temporary(destination, striping, first_mode(destination, &acl), &created, notes,
			     error);
	if (!ret)
		copy_access(destination, &acl, &created, notes);
	return ret;
}

static int prepare(struct ring_destination *destination, const char *path, bool unseen,
		   struct base_error *error)
{
	memset(destination, 0, sizeof(*destination));
	destination->directory_fd = destination->fd = destination->lock_fd = -1;
	destination->unseen = unseen;
	if (!*path || path[strlen(path) - 1] == '/')
		return base_refuse(error, -EINVAL,
				   "cannot save to \"%s\"" BASE_REMEDY "give the name of a file",
				   path);
	destination->path = strdup(path);
	if (!destination->path)
		return base_no_memory(error, "a path", strlen(path));
	return ring_destination_find(destination, error);
}

int ring_destination_open(struct ring_destination *destination, const char *path, bool unseen,
			  struct ring_striping *striping, struct ring_notes *notes,
			  struct base_error *error)
{
	int ret = prepare(destination, path, unseen, error);

	if (!ret)
		ret = begin(destination, striping, notes, error);
	if (ret < 0)
		ring_destination_close(destination);
	return MIN(ret, 0);
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

/*
 * -EEXIST if another process has made it meanwhile. Nobody else sees the file before it has its
 * layout: what cannot be given one is removed and made again.
 */
static int make_shared(struct ring_destination *destination, struct ring_striping *striping,
		       struct ring_notes *notes, struct base_error *error)
{
	int ret = make_new(destination, striping, notes, error);

	if (ret)
		return ret;
	ret = link_into_place(destination);
	if (!ret && destination->temporary) {
		unlinkat(destination->directory_fd, destination->temporary, 0);
		forget_temporary(destination);
	}
	if (ret)
		remove_temporary(destination);
	return !ret || ret == -EEXIST ?
		       ret :
		       base_fail(error, ret,
				 "cannot put \"%s\" in place" BASE_REMEDY "use mode=each",
				 destination->path);
}

static int open_or_make(struct ring_destination *destination, struct ring_striping *striping,
			struct ring_notes *notes, struct base_error *error)
{
	const int flags = O_RDWR | O_NOFOLLOW | O_CLOEXEC;
	int ret = -EEXIST;

	for (int attempt = 0; ret == -EEXIST && attempt < MAX_NAMES; attempt++) {
		destination->fd =
			base_own(openat(destination->directory_fd, destination->name, flags));
		if (destination->fd >= 0)
			return 0;
		if (errno != ENOENT)
			return base_fail(error, -errno, "cannot open \"%s\" to save a part of it",
					 destination->path);
		ret = make_shared(destination, striping, notes, error);
	}
	return ret != -EEXIST ? ret :
				base_fail(error, ret,
					  "cannot save a part of \"%s\": others make and remove it "
					  "all the time" BASE_REMEDY "save under another name",
					  destination->path);
}

int ring_destination_begin_again(struct ring_destination *destination,
				 struct ring_striping *striping, struct ring_notes *notes,
				 struct base_error *error)
{
	if (destination->shared) {
		base_close(destination->fd);
		destination->fd = -1;
		return open_or_make(destination, striping, notes, error);
	}
	remove_temporary(destination);
	return begin(destination, striping, notes, error);
}

int ring_destination_open_shared(struct ring_destination *destination, const char *path,
				 struct ring_striping *striping, struct ring_notes *notes,
				 struct base_error *error)
{
	int ret = prepare(destination, path, false, error);

	if (ret > 0)
		ret = base_refuse(error, -EINVAL,
				  "cannot save a part of \"%s\": it is no regular file" BASE_REMEDY
				  "give the name of one",
				  path);
	if (!ret) {
		destination->shared = true;
		ret = open_or_make(destination, striping, notes, error);
	}
	if (ret)
		ring_destination_close(destination);
	return ret;
}

/* ---- The end --------------------------------------------------------------------------------- */

static const char *remedy_of_sync(int code)
{
	return code == EINVAL || code == EOPNOTSUPP ?
		       "the filesystem refuses how the file was written, set direct=off" :
		       "the storage failed or is full, save again or elsewhere";
}

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
				 "cannot bring \"%s\" to stable storage (fsync)" BASE_REMEDY "%s",
				 destination->path, remedy_of_sync(errno));
	return 0;
}

/* Some network filesystems report lost writes only here. */
static int close_checked(struct ring_destination *destination, struct base_error *error)
{
	int fd = destination->fd;

	destination->fd = -1;
	if (!destination->stream) {
		/* Straight to its number: who moved it would close it in between, and that close is
		 * the one that reports. */
		destination->lock_fd = base_own(fcntl(fd, F_DUPFD_CLOEXEC, STDERR_FILENO + 1));
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

static int put_in_place(struct ring_destination *destination, bool no_replace,
			struct base_error *error)
{
	int fd = destination->directory_fd, ret;

	if (destination->unseen) {
		forget_temporary(destination);
		return 0;
	}
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

static bool is_still_there(const struct ring_destination *destination)
{
	struct stat here, ours;

	return !fstatat(destination->directory_fd, destination->name, &here, AT_SYMLINK_NOFOLLOW) &&
	       !fstat(destination->lock_fd, &ours) && here.st_ino == ours.st_ino &&
	       here.st_dev == ours.st_dev;
}

int ring_destination_commit(struct ring_destination *destination, bool no_replace, bool no_sync,
			    struct ring_notes *notes, struct base_error *error)
{
	int ret = close_checked(destination, error), old = -1;

	if (ret || destination->stream)
		return ret;
	if (destination->shared && !is_still_there(destination))
		return base_fail(error, -ESTALE,
				 "\"%s\" was removed or replaced while a part of it was "
				 "written" BASE_REMEDY "save again",
				 destination->path);
	if (destination->shared)
		return no_sync ? 0 : sync_name(destination, notes, error);
	/*
	 * When the last name of the old file goes, its blocks are freed, and whoever renames over
	 * it or syncs the directory waits for that. Holding it open puts it off until we are done;
	 * and nobody else gets them before the new name is durable, as ext4 with data=writeback
	 * allows. An NFS client would give an open file another name first (.nfs…), which two
	 * clients that replace one file at the same time leave behind.
	 */
	if (destination->frees_here && !destination->absent)
		old = base_own(openat(destination->directory_fd, destination->name,
				      O_PATH | O_NOFOLLOW | O_CLOEXEC));
	ret = put_in_place(destination, no_replace, error);
	if (!ret && !no_sync && !destination->unseen)
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
