/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Where a path leads, and what is there. Each question about a name may be one to a server, so each
 * directory on the way is opened once, and its name looked at once.
 */
#define _GNU_SOURCE
#include "ring/destination.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

/* As many links as the kernel itself follows. */
#define MAX_LINKS 40

/* Splits into directory and name. "a" is "." and "a". */
static int split(struct ring_destination *destination, const char *path, struct base_error *error)
{
	const char *slash = strrchr(path, '/');

	free(destination->directory);
	free(destination->name);
	destination->directory = base_directory_of(path);
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
	base_close(destination->directory_fd);
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

static int look_at(int fd, const char *name, struct statx *found)
{
	return statx(fd, name, AT_SYMLINK_NOFOLLOW | (*name ? 0 : AT_EMPTY_PATH), RING_WHAT_IT_IS,
		     found) ?
		       -errno :
		       0;
}

/*
 * Where everybody may put something and nobody can remove what others put (/tmp), what another user
 * left under our name is a trap: the kernel's rule for those who open it (fs.protected_symlinks,
 * fs.protected_regular), which does not see those who rename.
 */
static int refuse_planted(const struct ring_destination *destination, const struct statx *found,
			  struct base_error *error)
{
	const mode_t everybodys = S_ISVTX | S_IWOTH;
	struct statx directory;
	int ret;

	if (found->stx_uid == geteuid())
		return 0;
	ret = look_at(destination->directory_fd, "", &directory);
	if (ret)
		return base_fail(error, ret, "cannot look at \"%s\"", destination->directory);
	if ((directory.stx_mode & everybodys) != everybodys || found->stx_uid == directory.stx_uid)
		return 0;
	return base_refuse(error, -EACCES,
			   "cannot save to \"%s\": another user has put a %s there, in a directory "
			   "where everybody may" BASE_REMEDY "remove it, or save elsewhere",
			   destination->path, S_ISLNK(found->stx_mode) ? "link" : "file");
}

/* Whose it is and what it says belong together: both of the link that is open. */
static int read_open_link(const struct ring_destination *destination, int fd, char text[PATH_MAX],
			  struct base_error *error)
{
	struct statx link;
	const ssize_t bytes = readlinkat(fd, "", text, PATH_MAX - 1);
	int ret = bytes < 0 ? -errno : look_at(fd, "", &link);

	if (ret)
		return base_fail(error, ret, "cannot follow the link \"%s\"", destination->path);
	text[bytes] = 0;
	return refuse_planted(destination, &link, error);
}

/* What the link at the destination's name says, as a path of our own. */
static int read_link(const struct ring_destination *destination, char **out,
		     struct base_error *error)
{
	char text[PATH_MAX];
	int fd, ret;

	*out = NULL;
	fd = base_own(openat(destination->directory_fd, destination->name,
			     O_PATH | O_NOFOLLOW | O_CLOEXEC));
	if (fd < 0)
		return base_fail(error, -errno, "cannot follow the link \"%s\"", destination->path);
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

/* ---- What is there --------------------------------------------------------------------------- */

static bool is_stream(mode_t mode)
{
	return !S_ISREG(mode) && !S_ISDIR(mode) && !S_ISLNK(mode);
}

/*
 * 1 if the path leads to a pipe or a device, which has been opened. By the path as it was given:
 * the text of a link such as /dev/stdout or /dev/fd/63 ("pipe:[4711]") leads nowhere.
 */
static int open_if_stream(struct ring_destination *destination, const struct statx *found,
			  struct base_error *error)
{
	mode_t mode = found->stx_mode;
	struct stat status;

	if (S_ISLNK(mode) && !stat(destination->path, &status))
		mode = status.st_mode;
	if (!is_stream(mode))
		return 0;
	destination->stream = true;
	destination->device = S_ISBLK(mode);
	destination->fd = base_own(open(destination->path, O_WRONLY | O_NOCTTY | O_CLOEXEC));
	if (destination->fd < 0)
		return base_fail(error, -errno, "cannot open \"%s\" for writing",
				 destination->path);
	return 1;
}

/* Opens the directory of a path, and looks once at what has the name there. */
static int look_in_directory(struct ring_destination *destination, const char *path,
			     struct statx *found, struct base_error *error)
{
	int ret = split(destination, path, error);

	if (!ret)
		ret = open_directory(destination, error);
	if (ret)
		return ret;
	ret = destination->unseen ? -ENOENT :
				    look_at(destination->directory_fd, destination->name, found);
	destination->absent = ret == -ENOENT;
	if (ret && !destination->absent)
		return base_fail(error, ret, "cannot look at \"%s\"", destination->path);
	return 0;
}

/*
 * Follows links from path to path, also a last one that leads to nothing yet, as open() would. 1 if
 * there is a pipe or a device, which has been opened.
 */
static int find(struct ring_destination *destination, struct statx *found, struct base_error *error)
{
	char *path = destination->path, *next;
	int ret;

	for (int links = 0;; links++) {
		ret = look_in_directory(destination, path, found, error);
		if (path != destination->path)
			free(path);
		if (ret || destination->absent)
			return ret;
		ret = links ? 0 : open_if_stream(destination, found, error);
		if (ret || !S_ISLNK(found->stx_mode))
			return ret;
		if (links == MAX_LINKS)
			return base_refuse(error, -ELOOP,
					   "cannot save to \"%s\": too many symbolic links",
					   destination->path);
		ret = read_link(destination, &next, error);
		if (ret)
			return ret;
		path = next;
	}
}

/*
 * A rename would replace a file whatever its mode; who protected it did not mean that. Of the
 * user's own file the mode says it, and the filesystem need not be asked.
 */
static bool may_write(const struct ring_destination *destination, const struct statx *old)
{
	/* Without the flag it is a system call that every sandbox knows. */
	int flags = getuid() == geteuid() && getgid() == getegid() ? 0 : AT_EACCESS;

	if (old->stx_uid == geteuid() && old->stx_mode & S_IWUSR)
		return true;
	return !faccessat(destination->directory_fd, destination->name, W_OK, flags);
}

/* Whether what is there may be replaced, and how. */
static int check_old(struct ring_destination *destination, const struct statx *old,
		     struct base_error *error)
{
	int ret;

	if (S_ISDIR(old->stx_mode))
		return base_fail(error, -EISDIR,
				 "cannot save to \"%s\"" BASE_REMEDY
				 "give the name of a file in it",
				 destination->path);
	if (!S_ISREG(old->stx_mode))
		return base_refuse(error, -EBUSY,
				   "cannot save to \"%s\": it is changing under our hands",
				   destination->path);
	ret = refuse_planted(destination, old, error);
	if (ret)
		return ret;
	if (!may_write(destination, old))
		return base_fail(error, -errno, "cannot replace \"%s\": the file is not writable",
				 destination->path);
	destination->replaces = true;
	destination->old_mode = old->stx_mode & 07777;
	destination->old_user = old->stx_uid;
	destination->old_group = old->stx_gid;
	return 0;
}

int ring_destination_find(struct ring_destination *destination, struct base_error *error)
{
	struct statx found;
	int ret = find(destination, &found, error);

	if (!ret && !destination->absent)
		ret = check_old(destination, &found, error);
	return ret;
}
