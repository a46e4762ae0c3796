/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Atomic files. A file is created under a temporary name in its directory, with its stripes and its
 * space reserved. It is renamed when all of it is on stable storage. Until then, its lock shows
 * that its writer is alive. writer.c writes the bytes.
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
#include <sys/sysmacros.h>
#include <sys/xattr.h>
#include <time.h>
#include <unistd.h>

/* ---- Resolving the path ---------------------------------------------------------------------- */

/*
 * Each look at a name may cost a request to a server. So each directory on the way is opened once,
 * and each name is looked at once.
 */

/* As many links as the kernel follows. */
#define MAX_LINKS 40

/*
 * What must be known of a file that will be replaced. Not its length or times: if they have just
 * been written, a network client would have to ask the server.
 */
#define WHAT_IT_IS (STATX_TYPE | STATX_MODE | STATX_UID | STATX_GID)

/* Splits a path into directory and name: "a" becomes "." and "a". */
static int split(struct io_destination *destination, const char *path, struct base_error *error)
{
	const char *slash = strrchr(path, '/');

	free(destination->directory);
	free(destination->name);
	destination->directory = base_directory_of(path);
	destination->name = strdup(slash ? slash + 1 : path);
	if (!destination->directory || !destination->name)
		return base_no_memory(error, "a path", strlen(path));
	/* The path of a link may end in a slash. */
	if (!*destination->name)
		return base_fail_with(error, -EISDIR, "give the name of a file in it",
				      "cannot save to \"%s\"", destination->path);
	return 0;
}

/* Returns the advice if the directory cannot be opened. */
static const char *directory_remedy(const char *path, int code)
{
	if (code != ENOENT)
		return "";
	if (!strncmp(path, "~", 1) || strstr(path, "/~"))
		return "give the full path, because only a shell expands \"~\" (in Python "
		       "os.path.expanduser())";
	return "create it first";
}

static int open_directory(struct io_destination *destination, struct base_error *error)
{
	base_close(destination->directory_fd);
	destination->directory_fd =
		base_register_fd(open(destination->directory, O_RDONLY | O_DIRECTORY | O_CLOEXEC));
	/*
	 * A process may have permission to write into a directory but not to list it. Such a
	 * directory cannot be synced.
	 */
	if (destination->directory_fd < 0 && errno == EACCES)
		destination->directory_fd = base_register_fd(
			open(destination->directory, O_PATH | O_DIRECTORY | O_CLOEXEC));
	if (destination->directory_fd < 0)
		return base_fail_with(error, -errno,
				      directory_remedy(destination->directory, errno),
				      "cannot save to \"%s\": cannot open its directory \"%s\"",
				      destination->path, destination->directory);
	return 0;
}

static int look_at(int fd, const char *name, struct statx *found)
{
	return statx(fd, name, AT_SYMLINK_NOFOLLOW | (*name ? 0 : AT_EMPTY_PATH), WHAT_IT_IS,
		     found) ?
		       -errno :
		       0;
}

/*
 * Refuses a file or link that another user planted in a directory like /tmp, where all users may
 * create names but not remove those of others. The kernel protects processes that open such names
 * (fs.protected_symlinks, fs.protected_regular), but not those that rename over them.
 */
static int refuse_planted(const struct io_destination *destination, const struct statx *found,
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
	return base_fail_reason_with(error, -EACCES, "remove it, or save elsewhere",
				     "cannot save to \"%s\": another user owns the %s there, in a "
				     "directory that all users can write to",
				     destination->path, S_ISLNK(found->stx_mode) ? "link" : "file");
}

/* Reads the target of an open link, and checks its owner on that same link. */
static int read_open_link(const struct io_destination *destination, int fd, char text[PATH_MAX],
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

/*
 * Returns in *out the path that the link at the destination's name points to; the caller frees it.
 */
static int read_link(const struct io_destination *destination, char **out, struct base_error *error)
{
	char text[PATH_MAX];
	int fd, ret;

	*out = NULL;
	fd = base_register_fd(openat(destination->directory_fd, destination->name,
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

/* ---- Checking what exists -------------------------------------------------------------------- */

static bool is_stream(mode_t mode)
{
	return !S_ISREG(mode) && !S_ISDIR(mode) && !S_ISLNK(mode);
}

/*
 * Opens the path if it leads to a pipe or a device, and returns 1 then. It opens the path as given:
 * the text of a link such as /dev/stdout or /dev/fd/63 ("pipe:[4711]") is no path.
 */
static int open_if_stream(struct io_destination *destination, const struct statx *found,
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
	destination->fd =
		base_register_fd(open(destination->path, O_WRONLY | O_NOCTTY | O_CLOEXEC));
	if (destination->fd < 0)
		return base_fail(error, -errno, "cannot open \"%s\" for writing",
				 destination->path);
	return 1;
}

/* Opens the directory of a path, and looks once at the existing entry of that name. */
static int look_in_directory(struct io_destination *destination, const char *path,
			     struct statx *found, struct base_error *error)
{
	int ret = split(destination, path, error);

	if (!ret)
		ret = open_directory(destination, error);
	if (ret)
		return ret;
	ret = destination->options->unseen ?
		      -ENOENT :
		      look_at(destination->directory_fd, destination->name, found);
	destination->absent = ret == -ENOENT;
	if (ret && !destination->absent)
		return base_fail(error, ret, "cannot look at \"%s\"", destination->path);
	return 0;
}

/*
 * Follows symbolic links as open() would, even a last one whose target does not exist yet. Returns
 * 1 if the path leads to a pipe or device, which is then open.
 */
static int follow(struct io_destination *destination, struct statx *found, struct base_error *error)
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
			return base_fail_reason(error, -ELOOP,
						"cannot save to \"%s\": too many symbolic links",
						destination->path);
		ret = read_link(destination, &next, error);
		if (ret)
			return ret;
		path = next;
	}
}

/*
 * Returns whether the caller may write to the existing file. A rename would replace a file even if
 * its owner protected it. For the caller's own file the mode answers, without a request to the
 * filesystem.
 */
static bool may_write(const struct io_destination *destination, const struct statx *old)
{
	/* Without the flag, every sandbox knows the system call. */
	int flags = getuid() == geteuid() && getgid() == getegid() ? 0 : AT_EACCESS;

	if (old->stx_uid == geteuid() && old->stx_mode & S_IWUSR)
		return true;
	return !faccessat(destination->directory_fd, destination->name, W_OK, flags);
}

/* Checks whether the existing file may be replaced, and records its mode and owner. */
static int check_old(struct io_destination *destination, const struct statx *old,
		     struct base_error *error)
{
	int ret;

	if (S_ISDIR(old->stx_mode))
		return base_fail_with(error, -EISDIR, "give the name of a file in it",
				      "cannot save to \"%s\"", destination->path);
	if (!S_ISREG(old->stx_mode))
		return base_fail_reason(error, -EBUSY,
					"cannot save to \"%s\": another process is changing it",
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

/*
 * Finds the final file: follows links as open() would, and opens its directory. Returns 1 if the
 * path leads to a pipe or device, which is then open.
 */
static int find(struct io_destination *destination, struct base_error *error)
{
	struct statx found;
	int ret = follow(destination, &found, error);

	if (!ret && !destination->absent)
		ret = check_old(destination, &found, error);
	return ret;
}

/* ---- Stripes --------------------------------------------------------------------------------- */

/* Returns the length of the whole file, including the ranges of other writers; 0: not known. */
static uint64_t bytes_of(const struct io_file_options *options)
{
	return options->part_bytes ? options->file_bytes : options->expected_bytes;
}

static bool is_small(const struct io_destination *destination)
{
	const uint64_t bytes = bytes_of(destination->options);

	return bytes && bytes <= IO_SMALL_FILE_BYTES;
}

/*
 * Decides whether to request stripes for the new file, by what is known of the mount and the
 * directory. Fills in destination->asked.
 */
static bool must_ask(struct io_destination *destination)
{
	const struct io_file_options *options = destination->options;
	const struct fs_layout_request *request = &destination->config->layout;
	const uint64_t bytes = bytes_of(options);
	const int directory_fd = destination->directory_fd;
	const char *directory = destination->directory;
	struct fs_memory *memory = destination->memory;
	struct fs_facts facts = { .file_bytes = bytes, .writers = options->files };
	struct fs_info info;
	char why[160];
	int ask;

	memset(&destination->asked, 0, sizeof(destination->asked));
	if (is_small(destination) || request->kind == FS_REQUEST_DIRECTORY)
		return false;
	/* Every directory gives at least one stripe. */
	if (request->kind == FS_REQUEST_AUTO && !options->target_group &&
	    bytes <= FS_ONE_STRIPE_BYTES)
		return false;
	/*
	 * Most files follow others on the same mount, where no stripes can be requested, so they
	 * cost no call. If this file is elsewhere, describe() finds out later.
	 */
	destination->guessed = *memory->type && !fs_takes_layouts(memory->family);
	if (destination->guessed || fs_describe(directory_fd, directory, memory, &info, NULL))
		return false;
	if (!fs_takes_layouts(info.family))
		return false;
	facts.family = info.family;
	facts.directory = info.layout;
	facts.targets = fs_remembered_targets(directory_fd, memory);
	ask = fs_choose_layout(request, &facts, &destination->asked, why, sizeof(why));
	base_log(&destination->config->log, IOSHAPE_LOG_DEBUG, "layout of the new file in %s: %s",
		 directory, why);
	if (options->target_group)
		ask |= fs_take_target_group(
			&facts, fs_even_targets(directory_fd, directory, memory),
			options->target_group, options->target_groups, &destination->asked);
	return ask > 0;
}

/* ---- Direct I/O ------------------------------------------------------------------------------ */

static bool is_on_device_of(const struct fs_memory *memory, int directory_fd)
{
	struct stat status;

	return *memory->type && !fstat(directory_fd, &status) &&
	       major(status.st_dev) == memory->device_major &&
	       minor(status.st_dev) == memory->device_minor;
}

static bool may_go_direct(const struct io_destination *destination)
{
	const struct io_engine_ops *ops = io_engine_of(destination->config->engine);

	return !destination->buffered && !is_small(destination) &&
	       destination->config->direct != IOSHAPE_DIRECT_OFF && (!ops || ops->direct);
}

/*
 * Returns whether the file must be opened with O_DIRECT: on FUSE, if it will be written directly.
 * FUSE decides at the opening whether it caches pages of the file. Only if it caches none do direct
 * writes run in parallel.
 */
static bool opens_direct(const struct io_destination *destination)
{
	struct fs_memory *memory = destination->memory;
	struct fs_info info;

	/* Most files follow others on a mount that is not FUSE; they cost no call. */
	if (!may_go_direct(destination) || (*memory->type && memory->magic != FS_FUSE_MAGIC))
		return false;
	if (!is_on_device_of(memory, destination->directory_fd) &&
	    fs_describe(destination->directory_fd, destination->directory, memory, &info, NULL))
		return false;
	return memory->magic == FS_FUSE_MAGIC &&
	       (destination->config->direct == IOSHAPE_DIRECT_REQUIRE ||
		!fs_writes_cached(memory->family, memory->magic));
}

/* ---- Creating -------------------------------------------------------------------------------- */

/*
 * Creates the temporary file without requesting stripes. O_DIRECT is cleared after the opening; the
 * engine sets it again when it starts.
 */
static int create_plainly(const struct io_destination *destination, mode_t mode)
{
	const int directory_fd = destination->directory_fd;
	const char *name = destination->temporary;
	int fd = -1;

	if (opens_direct(destination)) {
		fd = fs_create_plainly(directory_fd, name, mode, O_DIRECT);
		/* Some filesystems refuse O_DIRECT after they have created the file. */
		if (fd == -EINVAL)
			unlinkat(directory_fd, name, 0);
		else if (fd < 0)
			return fd;
		if (fd >= 0 && !io_set_direct(fd, false))
			return fd;
	}
	if (fd >= 0) {
		close(fd);
		unlinkat(directory_fd, name, 0);
	}
	return fs_create_plainly(directory_fd, name, mode, 0);
}

/*
 * Opens the temporary file again with O_DIRECT, and closes `fd`. Returns `fd` itself if that fails.
 */
static int open_direct(const struct io_destination *destination, int fd)
{
	int again = base_above_streams(openat(destination->directory_fd, destination->temporary,
					      O_RDWR | O_DIRECT | O_NOFOLLOW | O_CLOEXEC));
	struct stat before, now;

	if (again < 0)
		return fd;
	if (io_set_direct(again, false) || fstat(fd, &before) || fstat(again, &now) ||
	    before.st_ino != now.st_ino || before.st_dev != now.st_dev) {
		close(again);
		return fd;
	}
	close(fd);
	return again;
}

/*
 * Creates the temporary file as open(O_CREAT | O_EXCL) does, with the requested stripes. Returns a
 * descriptor or a negative errno.
 */
static int destination_create(struct io_destination *destination, mode_t mode)
{
	char why[256];
	int fd;

	if (!must_ask(destination))
		return create_plainly(destination, mode);
	fd = fs_create_with_layout(destination->directory_fd, destination->temporary, mode,
				   destination->memory->family, &destination->asked, why,
				   sizeof(why));
	if (fd >= 0 && *why)
		io_add_downgrade(destination->downgrades, IOSHAPE_DOWNGRADE_LAYOUT, "%s", why);
	if (fd >= 0 && opens_direct(destination))
		fd = open_direct(destination, fd);
	return fd;
}

/* ---- The temporary file ---------------------------------------------------------------------- */

/* Most tries to find a free name. Each name has 64 random bits, so one should do. */
#define MAX_NAMES 16

static int make_name(struct io_destination *destination, struct base_error *error)
{
	char name[NAME_MAX + 1];

	if (!destination->options->unseen)
		io_temporary_name(destination->directory_fd, destination->name, name);
	free(destination->temporary);
	destination->temporary = strdup(destination->options->unseen ? destination->name : name);
	return destination->temporary ? 0 : base_no_memory(error, "a name", NAME_MAX);
}

static void forget_temporary(struct io_destination *destination)
{
	free(destination->temporary);
	destination->temporary = NULL;
}

static void remove_temporary(struct io_destination *destination)
{
	unlinkat(destination->directory_fd, destination->temporary, 0);
	base_close(destination->fd);
	destination->fd = -1;
	forget_temporary(destination);
}

/*
 * Locks the temporary file, which tells other processes that its writer is alive; the kernel drops
 * the lock when the process dies. Returns 1 if the caller must try again: a process that removes
 * stale files may have taken the new file for an abandoned one before it was locked. *created is
 * the file's state. Processes that share the file's locks share the kernel's knowledge of it, so no
 * server is asked.
 */
static int lock_temporary(struct io_destination *destination, struct statx *created)
{
	const int fd = destination->fd, at = AT_EMPTY_PATH | AT_STATX_DONT_SYNC;

	if (flock(fd, LOCK_EX | LOCK_NB)) {
		if (errno == EWOULDBLOCK)
			return 1;
		io_add_downgrade(destination->downgrades, IOSHAPE_DOWNGRADE_LOCK,
				 "no file locks on this filesystem: %s", ioshape_strerror(-errno));
	}
	if (statx(fd, "", at, WHAT_IT_IS | STATX_NLINK, created))
		return -errno;
	return !created->stx_nlink;
}

/*
 * Creates and locks the temporary file. It has `mode` from the beginning, because a process that
 * has opened the file keeps it open, even if the mode becomes stricter.
 */
static int open_temporary(struct io_destination *destination, mode_t mode, struct statx *created,
			  struct base_error *error)
{
	int ret;

	for (int attempt = 0; attempt < MAX_NAMES; attempt++) {
		ret = make_name(destination, error);
		if (ret)
			return ret;
		ret = destination_create(destination, mode);
		destination->fd = base_register_fd(MAX(ret, -1));
		if (ret < 0) {
			forget_temporary(destination); /* the name belongs to another process */
			if (ret == -EEXIST && !destination->options->unseen)
				continue;
			return base_fail_with(error, ret,
					      "the directory must be writable, because the file is "
					      "replaced as a whole",
					      "cannot create a temporary file for \"%s\" in \"%s\"",
					      destination->path, destination->directory);
		}
		ret = lock_temporary(destination, created);
		if (!ret)
			return 0;
		remove_temporary(destination);
		if (ret < 0)
			return base_fail(error, ret, "cannot look at the temporary file of \"%s\"",
					 destination->path);
	}
	return base_fail_reason(error, -EEXIST,
				"cannot find a free name for a temporary file in \"%s\"",
				destination->directory);
}

/* Access control lists, which grant or deny access beyond the mode. 4096 bytes hold 500 entries. */
#define ACL "system.posix_acl_access"
#define DEFAULT_ACL "system.posix_acl_default"
#define MOST_ACL_BYTES 4096

struct acl {
	ssize_t bytes; /* bytes of data, or a negative errno if there is none */
	char data[MOST_ACL_BYTES];
};

/* Reads the ACL of the file that will be replaced. */
static void read_acl(const struct io_destination *destination, struct acl *acl)
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
 * Gives the new file the ACL of the old one, or none. The directory's default ACL may have given it
 * one, and with it a mode would admit all users named there. Returns false if that cannot be done.
 */
static bool copy_acl(const struct io_destination *destination, const struct acl *acl,
		     bool same_group)
{
	if (acl->bytes >= 0)
		return same_group &&
		       !fsetxattr(destination->fd, ACL, acl->data, (size_t)acl->bytes, 0);
	if (acl->bytes != -ENODATA)
		return acl->bytes == -EOPNOTSUPP; /* there are no ACLs here */
	if (fgetxattr(destination->fd, ACL, NULL, 0) < 0 && errno == ENODATA)
		return true;
	return !fremovexattr(destination->fd, ACL) || errno == ENODATA;
}

#define UNKNOWN_MODE ((mode_t)-1)

/*
 * Returns a mode for a file in another group: members of either group may do no more than before.
 */
static mode_t without_group(mode_t mode)
{
	const mode_t all = mode >> 3 & mode & 07;

	return (mode & 0700) | all << 3 | all;
}

/*
 * Gives the new file owner, group, mode and ACL of the file that it replaces, so that the same
 * users can read it. What cannot be kept makes access stricter, never wider.
 */
static void copy_access(struct io_destination *destination, const struct acl *acl,
			const struct statx *new)
{
	struct io_downgrades *downgrades = destination->downgrades;
	mode_t mode = destination->old_mode, now = new->stx_mode & 07777;
	bool same_group = true;

	/* Only root can change the owner; other users can at most keep the group. */
	if (new->stx_uid != destination->old_user || new->stx_gid != destination->old_group) {
		now = UNKNOWN_MODE; /* chown may clear some bits */
		if (fchown(destination->fd, destination->old_user, destination->old_group)) {
			io_add_downgrade(downgrades, IOSHAPE_DOWNGRADE_OWNER,
					 "the owner of the replaced file was not kept: %s",
					 ioshape_strerror(-errno));
			same_group = !fchown(destination->fd, (uid_t)-1, destination->old_group);
			mode = same_group ? mode & 0777 : without_group(mode);
		}
	}
	if (!copy_acl(destination, acl, same_group)) {
		io_add_downgrade(
			downgrades, IOSHAPE_DOWNGRADE_OWNER,
			"the ACL of the replaced file was not kept: only the owner can read the "
			"new file");
		mode &= 0700;
	}
	if (acl->bytes >= 0)
		now = UNKNOWN_MODE; /* an ACL also sets mode bits */
	if (mode != now && fchmod(destination->fd, mode))
		io_add_downgrade(downgrades, IOSHAPE_DOWNGRADE_OWNER,
				 "the mode of the replaced file was not kept: %s",
				 ioshape_strerror(-errno));
}

/*
 * Returns the mode to create the file with. A process that has opened a file keeps it open, even if
 * the mode becomes stricter. So from the beginning no user may open the file who could not open the
 * old one.
 */
static mode_t first_mode(const struct io_destination *destination, const struct acl *acl)
{
	return has_none(acl) ? without_group(destination->old_mode) : 0600;
}

/*
 * Returns options->umask_then if it differs from the current umask; else 0, since then the kernel
 * applies the umask or the directory's default ACL.
 */
static int changed_umask(const struct io_file_options *options)
{
	return options->umask_then == 1 + base_umask() ? 0 : options->umask_then;
}

/*
 * Creates a file that replaces none, with the umask of the call, not of the moment when a thread
 * creates the file. In a directory with a default ACL neither umask counts, so the kernel's mode
 * stays.
 */
static int make_new(struct io_destination *destination, struct base_error *error)
{
	const int umask_then = changed_umask(destination->options);
	const mode_t mode = 0666 & ~(umask_then ? umask_then - 1 : 0);
	struct statx created;
	int ret = open_temporary(destination, mode, &created, error);

	if (ret || !umask_then || (created.stx_mode & 0777) == mode)
		return ret;
	if (fgetxattr(destination->directory_fd, DEFAULT_ACL, NULL, 0) >= 0 ||
	    (errno != ENODATA && errno != EOPNOTSUPP))
		return 0;
	if (fchmod(destination->fd, mode))
		io_add_downgrade(destination->downgrades, IOSHAPE_DOWNGRADE_OWNER,
				 "the mode from the caller's umask was not set: %s",
				 ioshape_strerror(-errno));
	return 0;
}

static int begin(struct io_destination *destination, struct base_error *error)
{
	struct statx created;
	struct acl acl;
	int ret;

	if (!destination->replaces)
		return make_new(destination, error);
	read_acl(destination, &acl);
	ret = open_temporary(destination, first_mode(destination, &acl), &created, error);
	if (!ret)
		copy_access(destination, &acl, &created);
	return ret;
}

/*
 * Renames the temporary file unless its final name is taken (-EEXIST). The kernel decides, so one
 * of two writers wins.
 */
static int link_into_place(struct io_destination *destination)
{
	int fd = destination->directory_fd;

	if (!renameat2(fd, destination->temporary, fd, destination->name, RENAME_NOREPLACE)) {
		forget_temporary(destination);
		return 0;
	}
	if (errno != EINVAL && errno != ENOSYS)
		return -errno;
	/*
	 * The filesystem lacks that flag. The temporary name is removed when the destination is
	 * closed.
	 */
	return linkat(fd, destination->temporary, fd, destination->name, 0) ? -errno : 0;
}

/*
 * Creates a file that several processes write. Returns -EEXIST if another process was first. The
 * file gets its final name only after its layout; if that fails, it is removed.
 */
static int make_shared(struct io_destination *destination, struct base_error *error)
{
	int ret = make_new(destination, error);

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
		       base_fail_with(error, ret, "use mode=each",
				      "cannot rename \"%s\" into place", destination->path);
}

/* Opens a file that several processes write, or creates it if this process is first. */
static int open_or_make(struct io_destination *destination, struct base_error *error)
{
	const int flags = O_RDWR | O_NOFOLLOW | O_CLOEXEC;
	int ret = -EEXIST;

	for (int attempt = 0; ret == -EEXIST && attempt < MAX_NAMES; attempt++) {
		destination->fd = base_register_fd(
			openat(destination->directory_fd, destination->name, flags));
		if (destination->fd >= 0)
			return 0;
		if (errno != ENOENT)
			return base_fail(error, -errno, "cannot open \"%s\" to write a part of it",
					 destination->path);
		ret = make_shared(destination, error);
	}
	return ret != -EEXIST ? ret :
				base_fail_with(error, ret, "save under another name",
					       "cannot save a part of \"%s\": other processes keep "
					       "creating and removing it",
					       destination->path);
}

int io_destination_begin_again(struct io_destination *destination, struct base_error *error)
{
	if (destination->shared) {
		base_close(destination->fd);
		destination->fd = -1;
		return open_or_make(destination, error);
	}
	remove_temporary(destination);
	return begin(destination, error);
}

/*
 * Describes the filesystem of the new file. If it is on another kind of filesystem than the file
 * before, where stripes can be requested, the file is created again.
 */
static int describe(struct io_destination *destination, struct base_error *error)
{
	const char *path = destination->path;
	struct fs_memory *memory = destination->memory;
	int ret;

	if (destination->asked.count || destination->stream)
		ret = fs_describe(destination->fd, path, memory, &destination->fs, error);
	else
		ret = fs_describe_new(destination->fd, destination->directory_fd,
				      destination->options->unseen, path, memory, &destination->fs,
				      error);
	if (ret || destination->stream || destination->shared || !destination->guessed ||
	    !fs_takes_layouts(destination->fs.family))
		return ret;
	ret = io_destination_begin_again(destination, error);
	return ret ? ret : fs_describe(destination->fd, path, memory, &destination->fs, error);
}

static int open_found(struct io_destination *destination, struct base_error *error)
{
	const struct io_file_options *options = destination->options;
	int ret = find(destination, error);

	if (ret > 0 && options->part_bytes)
		return base_fail_reason_with(
			error, -EINVAL, "give the name of a regular file",
			"cannot save a part of \"%s\": it is not a regular file",
			destination->path);
	destination->shared = options->part_bytes > 0;
	/* Before there is a temporary file of our own, which would cost another look. */
	if (!ret && options->tidying)
		io_remove_stale(destination->directory_fd, destination->directory, options->tidying,
				&destination->config->log);
	if (!ret)
		ret = destination->shared ? open_or_make(destination, error) :
					    begin(destination, error);
	return MIN(ret, 0);
}

int io_destination_open(struct io_destination *destination, const char *path,
			struct base_error *error)
{
	int ret;

	destination->directory_fd = destination->fd = destination->lock_fd = -1;
	if (!*path || path[strlen(path) - 1] == '/')
		return base_fail_reason_with(error, -EINVAL, "give the name of a file",
					     "cannot save to \"%s\"", path);
	destination->path = strdup(path);
	if (!destination->path)
		return base_no_memory(error, "a path", strlen(path));
	ret = open_found(destination, error);
	if (ret)
		return ret;
	return describe(destination, error);
}

/* ---- Copies ---------------------------------------------------------------------------------- */

static const struct io_original *original_of(const struct io_destination *destination)
{
	return destination->stream ? NULL : destination->options->original;
}

/*
 * Returns whether the process that saved the original had another umask. If it had ours, the kernel
 * has applied it already, or the directory's default ACL.
 */
static bool has_other_umask(const struct io_original *original)
{
	const int umask = base_umask();

	return umask < 0 || (original->mode & 0666) != (0666 & ~(unsigned)umask);
}

int io_set_time(int fd, int64_t modified_ns)
{
	const struct timespec times[2] = {
		{ .tv_nsec = UTIME_OMIT },
		{ modified_ns / 1000000000, modified_ns % 1000000000 },
	};

	return futimens(fd, times) ? -errno : 0;
}

int io_destination_resemble(struct io_destination *destination, struct base_error *error)
{
	const struct io_original *original = original_of(destination);
	int ret;

	if (!original)
		return 0;
	if (!destination->replaces && has_other_umask(original) &&
	    fchmod(destination->fd, original->mode & 0777))
		io_add_downgrade(destination->downgrades, IOSHAPE_DOWNGRADE_OWNER,
				 "the mode of the original was not kept: %s",
				 ioshape_strerror(-errno));
	ret = io_set_time(destination->fd, original->modified_ns);
	return !ret ? 0 : base_fail(error, ret, "cannot set the time of \"%s\"", destination->path);
}

/* Checks, just before a copy is committed, that the existing file is not newer (-EEXIST). */
static int check_newest(const struct io_destination *destination, struct base_error *error)
{
	const struct io_original *original = original_of(destination);
	struct stat there;

	/* On other errors the rename will report them. */
	if (!original ||
	    fstatat(destination->directory_fd, destination->name, &there, AT_SYMLINK_NOFOLLOW))
		return 0;
	if (io_modified_ns(&there) <= original->newest_ns)
		return 0;
	return base_fail_reason(error, -EEXIST, "\"%s\" is newer than what was to replace it",
				destination->path);
}

/* ---- Closing replaced files ------------------------------------------------------------------ */

/*
 * A filesystem frees the blocks of a file when its last descriptor is closed. For 1 GiB, ext4 with
 * the discard mount option took 0.12 s, an eighth of a whole save. So a thread closes large
 * replaced files, and the save does not wait.
 */

/* Smaller files are freed faster than a thread starts. */
#define LARGE_FILE_BYTES (64 * MIB)

/* Longest wait for the space of replaced files. */
#define MOST_WAIT_NS (10ull * 1000000000)

/* Files that threads of this process are closing, whose space is not free yet. */
static atomic_uint releasing;

static void *release(void *fd)
{
	base_close((int)(intptr_t)fd);
	atomic_fetch_sub(&releasing, 1);
	return NULL;
}

/* Closes the descriptor of a file that has been replaced, without waiting for its space. */
static void release_fd(int fd)
{
	struct statx status;
	pthread_t thread;

	if (fd < 0)
		return;
	/* The kernel's own knowledge is enough to decide which thread closes the file. */
	if (!statx(fd, "", AT_EMPTY_PATH | AT_STATX_DONT_SYNC, STATX_SIZE | STATX_NLINK, &status) &&
	    !status.stx_nlink && status.stx_size >= LARGE_FILE_BYTES) {
		atomic_fetch_add(&releasing, 1);
		/* The thread uses no memory of ours, so it need not be joined. */
		if (!base_start_thread(&thread, release, (void *)(intptr_t)fd)) {
			pthread_detach(thread);
			return;
		}
		atomic_fetch_sub(&releasing, 1);
	}
	base_close(fd);
}

/*
 * Waits until the space of replaced files is free. Returns false if there was nothing to wait for.
 */
static bool await_releases(void)
{
	const struct timespec pause = { .tv_nsec = 5000000 };
	uint64_t begin = base_now_ns();
	bool waited = false;

	/* After fork() the child lacks the parent's thread, hence the limit. */
	while (atomic_load(&releasing) && base_now_ns() - begin < MOST_WAIT_NS) {
		nanosleep(&pause, NULL);
		waited = true;
	}
	return waited;
}

/* ---- Sync and commit ------------------------------------------------------------------------- */

static const char *remedy_of_sync(int code)
{
	return code == EINVAL || code == EOPNOTSUPP ?
		       "the filesystem rejects the way the file was written, set direct=off" :
		       "the storage failed or is full, save again or elsewhere";
}

int io_destination_sync(struct io_destination *destination, struct base_error *error)
{
	if (destination->stream && !destination->device)
		return 0;
	/*
	 * Call fsync only once: after a failure the kernel may mark the lost pages clean, and a
	 * second fsync would succeed over a file with holes.
	 */
	if (fsync(destination->fd))
		return base_fail_with(error, -errno, remedy_of_sync(errno),
				      "cannot sync \"%s\" to stable storage (fsync)",
				      destination->path);
	return 0;
}

/* Closes the file and checks the result: some network filesystems report lost writes only here. */
static int close_checked(struct io_destination *destination, struct base_error *error)
{
	int fd = destination->fd;

	destination->fd = -1;
	if (!destination->stream) {
		/*
		 * Duplicate to a number above the standard streams at once. Moving the duplicate
		 * later would close a descriptor in between, and that close could swallow the
		 * error.
		 */
		destination->lock_fd =
			base_register_fd(fcntl(fd, F_DUPFD_CLOEXEC, STDERR_FILENO + 1));
		if (destination->lock_fd < 0) {
			destination->fd = fd;
			return base_fail_with(error, -errno, "raise ulimit -n",
					      "cannot finish \"%s\"", destination->path);
		}
	}
	/* After EINTR, Linux has closed the descriptor. */
	if (base_close(fd) && errno != EINTR)
		return base_fail_with(error, -errno, "the storage failed or is full",
				      "cannot finish \"%s\"", destination->path);
	return 0;
}

static int rename_into_place(struct io_destination *destination, struct base_error *error)
{
	int fd = destination->directory_fd, ret;

	if (destination->options->unseen) {
		forget_temporary(destination);
		return 0;
	}
	if (destination->options->no_replace) {
		ret = link_into_place(destination);
		return !ret ? 0 :
			      base_fail_with(
				      error, ret, ret == -EEXIST ? "choose another name" : "",
				      "cannot rename \"%s\" into place%s", destination->path,
				      ret == -EEXIST ? " without replacing an existing file" : "");
	}
	if (renameat(fd, destination->temporary, fd, destination->name))
		return base_fail(error, -errno, "cannot rename \"%s\" into place",
				 destination->path);
	forget_temporary(destination);
	return 0;
}

/*
 * Syncs the directory, so that its names are durable. Returns 0 or a negative errno without an
 * error message.
 */
static int sync_directory(const struct io_destination *destination,
			  struct io_downgrades *downgrades)
{
	if (!fsync(destination->directory_fd))
		return 0;
	/* The directory is writable but not readable, so sync all of its filesystem. */
	if (errno == EBADF && !syncfs(destination->lock_fd))
		return 0;
	/* Such filesystems make names durable by themselves. */
	if (errno == EINVAL || errno == EOPNOTSUPP || errno == ENOSYS) {
		io_add_downgrade(downgrades, IOSHAPE_DOWNGRADE_SYNC,
				 "the directory was not synced: %s", ioshape_strerror(-errno));
		return 0;
	}
	return -errno;
}

static int sync_name(struct io_destination *destination, struct base_error *error)
{
	const int ret = sync_directory(destination, destination->downgrades);

	return !ret ? 0 :
		      base_fail(error, ret,
				"\"%s\" is saved, but its directory could not be synced (fsync), "
				"so a power failure may restore the old file",
				destination->path);
}

static bool is_still_there(const struct io_destination *destination)
{
	struct stat here, ours;

	return !fstatat(destination->directory_fd, destination->name, &here, AT_SYMLINK_NOFOLLOW) &&
	       !fstat(destination->lock_fd, &ours) && here.st_ino == ours.st_ino &&
	       here.st_dev == ours.st_dev;
}

int io_destination_commit(struct io_destination *destination, struct base_error *error)
{
	const struct io_file_options *options = destination->options;
	int ret = check_newest(destination, error), old = -1;

	if (!ret)
		ret = close_checked(destination, error);
	if (ret || destination->stream)
		return ret;
	if (destination->shared && !is_still_there(destination))
		return base_fail_with(error, -ESTALE, "save again",
				      "\"%s\" was removed or replaced while a part of it was "
				      "written",
				      destination->path);
	if (destination->shared)
		return options->no_sync ? 0 : sync_name(destination, error);
	/*
	 * When the last name of the old file is removed, its blocks are freed, and the rename or
	 * the sync of the directory waits for that. An open descriptor delays it until the commit
	 * is done. It also keeps other files from getting these blocks before the new name is
	 * durable, as ext4 with data=writeback allows. Not on network filesystems: an NFS client
	 * would rename an open file first (.nfs…), and two clients that replace a file at the same
	 * time leave such files behind.
	 */
	if (fs_is_local(destination->fs.family) && !destination->absent)
		old = base_register_fd(openat(destination->directory_fd, destination->name,
					      O_PATH | O_NOFOLLOW | O_CLOEXEC));
	ret = rename_into_place(destination, error);
	if (!ret && !options->no_sync && !options->unseen)
		ret = sync_name(destination, error);
	release_fd(old);
	return ret;
}

static int put_small_file(const struct io_destination *destination, const char *name,
			  const void *data, size_t bytes)
{
	const bool durable = !destination->options->no_sync;
	struct stat status;
	int ret;

	if (fstat(destination->lock_fd, &status))
		return -errno;
	ret = io_put_whole(destination->directory_fd, name, data, bytes, durable,
			   status.st_mode & 0666);
	if (!ret && durable)
		/* The sync of the file has recorded downgrades. */
		ret = sync_directory(destination, NULL);
	return ret;
}

int io_destination_put_beside(const struct io_destination *destination, const char *suffix,
			      const void *data, size_t bytes, struct base_error *error)
{
	char name[NAME_MAX + 1];
	int ret = -ENAMETOOLONG;

	if (snprintf(name, sizeof(name), "%s%s", destination->name, suffix) <= NAME_MAX)
		ret = put_small_file(destination, name, data, bytes);
	return !ret ? 0 :
		      base_fail_with(error, ret, io_remedy(ret), "cannot write \"%s%s\"",
				     destination->path, suffix);
}

void io_destination_close(struct io_destination *destination)
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
	destination->temporary = destination->name = destination->directory = NULL;
	destination->path = NULL;
	destination->directory_fd = destination->fd = destination->lock_fd = -1;
}

/* ---- Space ----------------------------------------------------------------------------------- */

/* Most interrupted calls in a row. */
#define MAX_INTERRUPTIONS 100

/* Allocates blocks for a range; repeats interrupted calls. */
static int allocate(int fd, uint64_t offset, uint64_t bytes)
{
	int interruptions = 0, ret;

	do {
		ret = fallocate(fd, 0, (off_t)offset, (off_t)bytes) ? -errno : 0;
	} while (ret == -EINTR && ++interruptions < MAX_INTERRUPTIONS);
	return ret;
}

static int reserve(const struct io_destination *destination, uint64_t length)
{
	const struct io_file_options *options = destination->options;
	int ret = allocate(destination->fd, options->part_offset, length);

	/* `length` may exceed what is needed. */
	if (ret == -ENOSPC || ret == -EDQUOT || ret == -EFBIG)
		ret = allocate(destination->fd, options->part_offset, options->expected_bytes);
	return ret;
}

static int no_space(const struct io_destination *destination, int code, struct base_error *error)
{
	const uint64_t bytes = destination->options->expected_bytes;
	const uint64_t free_bytes = fs_free_bytes_behind(destination->fd);

	/*
	 * The filesystem as a whole has enough free space, but not on these targets, or not for
	 * this user.
	 */
	if (free_bytes >= bytes)
		base_fail_with(error, code, io_remedy(code),
			       "cannot save \"%s\": the %s that it needs cannot be reserved on its "
			       "filesystem (%s)",
			       destination->path, BASE_SIZE(bytes), destination->fs.type);
	else
		base_fail_reason_with(error, code, io_remedy(code),
				      "cannot save \"%s\": needs %s, %s are free on its filesystem "
				      "(%s)",
				      destination->path, BASE_SIZE(bytes), BASE_SIZE(free_bytes),
				      destination->fs.type);
	base_error_space(error, bytes, free_bytes);
	return code;
}

int io_destination_reserve(struct io_destination *destination, uint64_t length,
			   struct base_error *error)
{
	int ret = reserve(destination, length);

	/* The space of a file that this process has replaced may not be free yet. */
	if ((ret == -ENOSPC || ret == -EDQUOT) && await_releases())
		ret = reserve(destination, length);
	switch (ret) {
	case 0:
		return 0;
	case -ENOSPC:
	case -EDQUOT:
	case -EFBIG:
	case -EIO:
		return no_space(destination, ret, error);
	default:
		/* The filesystem cannot reserve space, so its free space decides. */
		if (destination->options->expected_bytes > fs_free_bytes_behind(destination->fd))
			return no_space(destination, -ENOSPC, error);
		io_add_downgrade(destination->downgrades, IOSHAPE_DOWNGRADE_PREALLOCATE,
				 "no preallocation on %s: %s", destination->fs.type,
				 ioshape_strerror(ret));
		/* In a shared file, ftruncate() would cut what other processes have written. */
		if (!destination->shared && ftruncate(destination->fd, (off_t)length))
			base_log(&destination->config->log, IOSHAPE_LOG_DEBUG,
				 "cannot set the length of %s: %s", destination->path,
				 ioshape_strerror(-errno));
		return 0;
	}
}

/* ---- Freeing and probing space --------------------------------------------------------------- */

/* Returns the directory of a file at `path`, with symbolic links followed; the caller frees it. */
static char *directory_of(const char *path)
{
	char *resolved = realpath(path, NULL);
	char *directory = base_directory_of(resolved ? resolved : path);

	free(resolved);
	return directory;
}

static int open_path(const char *path)
{
	return path ? base_above_streams(open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC)) : -1;
}

void io_clear_space(const char *path, const struct base_log *log)
{
	char *directory = directory_of(path);
	const int fd = open_path(directory);

	await_releases();
	if (fd >= 0) {
		/* The save fails without this space, so everything stale is removed now. */
		io_remove_stale(fd, directory, NULL, log);
		close(fd);
	}
	free(directory);
}

bool io_can_reserve(const char *path, bool in_directory, uint64_t bytes)
{
	char *directory = in_directory ? NULL : directory_of(path);
	const int parent = open_path(in_directory ? path : directory);
	int fd = -1;
	bool can;

	/* An unnamed file leaves nothing behind, whatever happens. */
	if (parent >= 0)
		fd = base_above_streams(
			openat(parent, ".", O_TMPFILE | O_WRONLY | O_CLOEXEC, 0600));
	/* Beyond ulimit -f, fallocate() would raise a signal that ends the process. */
	can = fd >= 0 && bytes <= base_largest_file() && !allocate(fd, 0, bytes);
	if (fd >= 0)
		close(fd);
	if (parent >= 0)
		close(parent);
	free(directory);
	return can;
}
