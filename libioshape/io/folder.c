/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Operations on directories: create, open, lock, list, rename and remove. Operations on small files
 * in them: write whole, read whole, hold. And the removal of what dead processes left behind. No
 * symbolic link in a directory is followed.
 *
 * A living writer holds a lock on its temporary file or directory; the kernel drops the lock when
 * the process dies. If another process gets the lock, the writer is dead, provided that both are in
 * one lock domain. Locks may not reach other machines or mounts. So what another domain left behind
 * counts as abandoned only after a day without changes.
 */
#define _GNU_SOURCE
#include "io/atomic_file.h"
#include "io/queue.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

/* Most entries that io_folder_list() lists. */
#define MOST_ENTRIES 1000000u
/* Entries of a directory that one removal of stale files looks at. */
#define MOST_TIDIED 100000u
/* Entries to look at to find any regular file. */
#define MOST_LOOKED_AT 1000u

/* ---- Creating directories -------------------------------------------------------------------- */

/*
 * Syncs the parent of a path. Best effort; errors are ignored. Some filesystems cannot, and where
 * it matters, the later sync of its content fails, too.
 */
static void sync_above(const char *path)
{
	char *above = strdup(path), *slash;
	int fd;

	if (!above)
		return;
	slash = strrchr(above, '/');
	if (slash)
		slash[slash == above] = 0;
	fd = base_above_streams(open(slash ? above : ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC));
	if (fd >= 0) {
		fsync(fd);
		close(fd);
	}
	free(above);
}

static int make_one(const char *path, struct base_error *error)
{
	struct stat status;
	int ret;

	if (!mkdir(path, 0777)) {
		sync_above(path);
		return 0;
	}
	ret = -errno;
	/*
	 * For a parent that this process may not write to, mkdir() fails with EACCES or EROFS even
	 * if the directory exists.
	 */
	if (!stat(path, &status)) {
		if (S_ISDIR(status.st_mode))
			return 0;
		ret = -ENOTDIR;
	}
	return base_fail(error, ret, "cannot make the directory \"%s\"", path);
}

int io_folder_make(const char *path, struct base_error *error)
{
	char *copy = strdup(path);
	int ret = 0;

	if (!copy)
		return base_no_memory(error, "a path", strlen(path));
	for (size_t end = strlen(copy); end > 1 && copy[end - 1] == '/';)
		copy[--end] = 0;
	for (char *slash = strchr(copy + (*copy == '/'), '/'); !ret && slash;
	     slash = strchr(slash + 1, '/')) {
		*slash = 0;
		ret = make_one(copy, error);
		*slash = '/';
	}
	if (!ret)
		ret = make_one(copy, error);
	free(copy);
	return ret;
}

/* ---- Private directories --------------------------------------------------------------------- */

#define MOST_TRIES 10 /* tries, if another process changes the directory at the same time */

/*
 * Fails because another user owns the directory. In a directory like /tmp, another user may have
 * created it first, and this user cannot remove it.
 */
static int refuse_owner(const char *path, uid_t owner, struct base_error *error)
{
	return base_fail_reason_with(
		error, -EACCES,
		BASE_WORDS("ask user %u or the administrator to remove it", (unsigned)owner),
		"cannot use the folder \"%s\": it belongs to user %u, and this process runs "
		"as user %u",
		path, (unsigned)owner, (unsigned)geteuid());
}

static int fail_private(int code, const char *path, struct base_error *error)
{
	struct stat stat;

	if (code == -EACCES && !lstat(path, &stat) && stat.st_uid != geteuid())
		return refuse_owner(path, stat.st_uid, error);
	if (code == -ELOOP || code == -ENOTDIR)
		return base_fail_with(error, code, "remove it",
				      "cannot use \"%s\": it is not a folder", path);
	return base_fail_with(error, code,
			      code == -EACCES ? "run all processes that share it as one user" : "",
			      "cannot keep files in the folder \"%s\"", path);
}

/*
 * Creates a file and removes it again, to see the owner and time that the server gives to new
 * files. Returns 0 or a negative errno.
 */
static int look_at_new(int folder_fd, struct stat *status)
{
	const int flags = O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC;
	char name[NAME_MAX + 1];
	int fd, ret;

	io_temporary_name(folder_fd, "new", name);
	fd = base_register_fd(openat(folder_fd, name, flags, 0600));
	if (fd < 0)
		return -errno;
	ret = fstat(fd, status) ? -errno : 0;
	unlinkat(folder_fd, name, 0);
	base_close(fd);
	return ret;
}

/*
 * Creates and describes a private directory. Servers may map root to another user, so a new file
 * shows which owner this process's files have.
 */
static int make_private(const char *path, struct stat *folder, struct stat *ours)
{
	int fd, ret;

	if (mkdir(path, 0700) && errno != EEXIST)
		return -errno;
	fd = base_above_streams(open(path, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC));
	if (fd < 0)
		return -errno;
	ret = look_at_new(fd, ours);
	if (!ret && fstat(fd, folder))
		ret = -errno;
	close(fd);
	return ret;
}

int io_folder_make_private(const char *path, struct stat *ours, struct base_error *error)
{
	struct stat folder;
	int ret = -ENOENT;

	/* Another process may remove the directory meanwhile. */
	for (int i = 0; i < MOST_TRIES && ret == -ENOENT; i++)
		ret = make_private(path, &folder, ours);
	if (ret)
		return fail_private(ret, path, error);
	if (!base_is_one_user(ours->st_uid))
		return base_fail_reason_with(
			error, -EACCES, "map its user in the user namespace",
			"cannot keep files in the folder \"%s\": this process runs as the unmapped "
			"user \"nobody\" of a user namespace, as other users may",
			path);
	if (folder.st_uid != ours->st_uid)
		return refuse_owner(path, folder.st_uid, error);
	if (folder.st_mode & 022)
		return base_fail_reason_with(
			error, -EACCES, "remove it, or chmod go-w",
			"cannot use the folder \"%s\": other users can write to it", path);
	return 0;
}

/* ---- Opening --------------------------------------------------------------------------------- */

static int open_at(struct io_folder *folder, int fd, const char *name, int flags,
		   struct base_error *error)
{
	folder->fd = base_register_fd(openat(fd, name, O_RDONLY | O_DIRECTORY | O_CLOEXEC | flags));
	if (folder->fd >= 0)
		return 0;
	return base_fail(error, -errno, "cannot open the directory \"%s\"", folder->path);
}

int io_folder_open(struct io_folder *folder, const char *path, struct base_error *error)
{
	int ret;

	*folder = (struct io_folder)IO_NO_FOLDER;
	folder->path = strdup(path);
	if (!folder->path)
		return base_no_memory(error, "a path", strlen(path));
	ret = open_at(folder, AT_FDCWD, path, 0, error);
	if (ret)
		io_folder_close(folder);
	return ret;
}

int io_folder_open_in(struct io_folder *folder, const struct io_folder *parent, const char *name,
		      struct base_error *error)
{
	int ret;

	*folder = (struct io_folder)IO_NO_FOLDER;
	if (asprintf(&folder->path, "%s/%s", parent->path, name) < 0) {
		folder->path = NULL;
		return base_no_memory(error, "a path", strlen(parent->path));
	}
	ret = open_at(folder, parent->fd, name, O_NOFOLLOW, error);
	if (ret)
		io_folder_close(folder);
	return ret;
}

int io_folder_create_in(struct io_folder *folder, const struct io_folder *parent, const char *name,
			struct base_error *error)
{
	struct base_error why = { 0 };
	int ret;

	*folder = (struct io_folder)IO_NO_FOLDER;
	if (mkdirat(parent->fd, name, 0777)) {
		if (errno == EEXIST)
			return -EEXIST;
		return base_fail_with(error, -errno, "it must be writable",
				      "cannot make a directory in \"%s\"", parent->path);
	}
	ret = io_folder_open_in(folder, parent, name, &why);
	/* Another process removed it as stale. */
	if (ret == -ENOENT)
		return -EEXIST;
	if (ret) {
		unlinkat(parent->fd, name, AT_REMOVEDIR);
		if (error)
			*error = why;
	}
	return ret;
}

void io_folder_close(struct io_folder *folder)
{
	base_close(folder->fd);
	free(folder->path);
	*folder = (struct io_folder)IO_NO_FOLDER;
}

/* ---- Locks ----------------------------------------------------------------------------------- */

enum io_lock io_folder_lock(const struct io_folder *folder)
{
	if (!flock(folder->fd, LOCK_EX | LOCK_NB))
		return IO_LOCKED;
	return errno == EWOULDBLOCK ? IO_BUSY : IO_NO_LOCKS;
}

static int lock(int fd, bool wait)
{
	while (flock(fd, LOCK_EX | (wait ? 0 : LOCK_NB))) {
		if (errno == EWOULDBLOCK)
			return -EBUSY;
		if (errno != EINTR)
			return -errno;
	}
	return 0;
}

int io_folder_take(const struct io_folder *folder, const char *name, bool wait,
		   struct io_hold *hold, struct base_error *error)
{
	int ret;

	hold->fd = base_register_fd(
		openat(folder->fd, name, O_RDWR | O_CREAT | O_NOFOLLOW | O_CLOEXEC, 0600));
	if (hold->fd < 0)
		return base_fail(error, -errno, "cannot open \"%s/%s\"", folder->path, name);
	ret = lock(hold->fd, wait);
	if (ret)
		io_folder_let_go(hold);
	return !ret || ret == -EBUSY ?
		       ret :
		       base_fail(error, ret, "cannot lock \"%s/%s\"", folder->path, name);
}

void io_folder_let_go(struct io_hold *hold)
{
	base_close(hold->fd);
	*hold = (struct io_hold)IO_NO_HOLD;
}

int io_folder_claim(const struct io_folder *folder, const char *name, struct io_hold *hold,
		    struct base_error *error)
{
	const int flags = O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC;

	/* NFS grants exclusive locks only on writable descriptors. */
	hold->fd = base_register_fd(openat(folder->fd, name, O_RDWR | flags));
	if (hold->fd < 0 && errno != ENOENT)
		hold->fd = base_register_fd(openat(folder->fd, name, O_RDONLY | flags));
	if (hold->fd < 0)
		return errno == ENOENT ? -ENOENT :
					 base_fail(error, -errno, "cannot open \"%s/%s\"",
						   folder->path, name);
	if (!flock(hold->fd, LOCK_EX | LOCK_NB) || errno != EWOULDBLOCK)
		return 0;
	io_folder_let_go(hold);
	return -EBUSY;
}

/* ---- Entries and lists ----------------------------------------------------------------------- */

bool io_folder_is_named(const struct io_folder *folder, const struct io_folder *parent,
			const char *name)
{
	struct stat own, named;

	return !fstat(folder->fd, &own) && own.st_nlink &&
	       !fstatat(parent->fd, name, &named, AT_SYMLINK_NOFOLLOW) &&
	       own.st_dev == named.st_dev && own.st_ino == named.st_ino;
}

static void describe(const struct stat *status, struct io_entry *entry)
{
	entry->kind = S_ISREG(status->st_mode) ? IO_FILE :
		      S_ISDIR(status->st_mode) ? IO_FOLDER :
						 IO_OTHER;
	entry->bytes = (uint64_t)status->st_size;
	entry->owner = status->st_uid;
	entry->mode = status->st_mode & 07777;
	entry->modified = status->st_mtime;
	entry->modified_ns = io_modified_ns(status);
	entry->device = status->st_dev;
	entry->inode = status->st_ino;
	entry->links = status->st_nlink;
}

int io_folder_look(const struct io_folder *folder, const char *name, struct io_entry *entry,
		   struct base_error *error)
{
	struct stat status;

	if (fstatat(folder->fd, name, &status, AT_SYMLINK_NOFOLLOW)) {
		if (errno == ENOENT)
			return -ENOENT;
		return base_fail(error, -errno, "cannot look at \"%s/%s\"", folder->path, name);
	}
	describe(&status, entry);
	return 0;
}

void io_revalidate(int fd, const char *path)
{
	struct statx status;

	/*
	 * open() may trust what the NFS client caches of a file that is still open; this call asks
	 * the server.
	 */
	statx(fd, path, AT_EMPTY_PATH | AT_STATX_FORCE_SYNC, STATX_BASIC_STATS, &status);
}

int io_look(const char *path, bool follow, struct io_entry *entry)
{
	struct stat status;

	if (fstatat(AT_FDCWD, path, &status, follow ? 0 : AT_SYMLINK_NOFOLLOW))
		return -errno;
	describe(&status, entry);
	return 0;
}

bool io_is_unchanged(const struct io_entry *before, const struct io_entry *now)
{
	return before->device == now->device && before->inode == now->inode &&
	       before->modified_ns == now->modified_ns && before->bytes == now->bytes;
}

/*
 * Opens a directory for listing. Returns NULL and sets errno on failure. Uses a new open file,
 * because duplicates of a descriptor share the listing position.
 */
static DIR *open_listing(int folder_fd)
{
	const int fd =
		base_above_streams(openat(folder_fd, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC));
	DIR *listing = fd < 0 ? NULL : fdopendir(fd);

	if (!listing && fd >= 0)
		close(fd);
	return listing;
}

static bool is_dots(const char *name)
{
	return !strcmp(name, ".") || !strcmp(name, "..");
}

int io_folder_list(const struct io_folder *folder,
		   int (*found)(void *user, const char *name, struct base_error *error), void *user,
		   struct base_error *error)
{
	struct dirent *entry;
	DIR *listing;
	int ret = 0;

	listing = open_listing(folder->fd);
	if (!listing)
		return base_fail(error, -errno, "cannot list the directory \"%s\"", folder->path);
	for (unsigned seen = 0; !ret; seen++) {
		errno = 0;
		entry = readdir(listing);
		if (!entry) {
			if (errno)
				ret = base_fail(error, -errno, "cannot list the directory \"%s\"",
						folder->path);
			break;
		}
		if (seen == MOST_ENTRIES)
			ret = base_fail_reason(error, IOSHAPE_E_LIMIT,
					       "cannot list \"%s\": it has more than %u entries",
					       folder->path, MOST_ENTRIES);
		else if (!is_dots(entry->d_name))
			ret = found(user, entry->d_name, error);
	}
	closedir(listing);
	return ret;
}

/* ---- Properties of the files in a directory -------------------------------------------------- */

/* Opens any regular file of the directory, without reading it. Returns -1 if there is none. */
static int open_any_file(int directory_fd)
{
	const int flags = O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_NOCTTY | O_CLOEXEC;
	DIR *listing = open_listing(directory_fd);
	struct dirent *entry;
	struct stat status;
	int fd = -1;

	if (!listing)
		return -1;
	for (unsigned i = 0; fd < 0 && i < MOST_LOOKED_AT && (entry = readdir(listing)); i++) {
		/* Opening a device may have side effects. */
		if (!fstatat(directory_fd, entry->d_name, &status, AT_SYMLINK_NOFOLLOW) &&
		    S_ISREG(status.st_mode))
			fd = base_above_streams(openat(directory_fd, entry->d_name, flags));
	}
	closedir(listing);
	return fd;
}

int io_folder_describe_file(const struct io_folder *folder, struct fs_info *info,
			    struct base_error *error)
{
	/* An unnamed file disappears when it is closed. Network filesystems do not support them. */
	int fd = base_above_streams(openat(folder->fd, ".", O_TMPFILE | O_RDWR | O_CLOEXEC, 0600)),
	    flags, ret;

	if (fd < 0)
		fd = open_any_file(folder->fd);
	if (fd < 0)
		return fs_describe(folder->fd, folder->path, NULL, info, error);
	ret = fs_describe(fd, folder->path, NULL, info, error);
	flags = fcntl(fd, F_GETFL);
	if (!ret && !info->direct_known && flags >= 0) {
		info->direct_works = !fcntl(fd, F_SETFL, flags | O_DIRECT);
		info->direct_known = info->direct_works || errno == EINVAL;
	}
	close(fd);
	return ret;
}

/* ---- Changes --------------------------------------------------------------------------------- */

int io_folder_sync(const struct io_folder *folder, struct base_error *error)
{
	/* Such filesystems make names durable by themselves. */
	if (!fsync(folder->fd) || errno == EINVAL || errno == EOPNOTSUPP || errno == ENOSYS)
		return 0;
	return base_fail_with(error, -errno, "the storage failed or is full",
			      "cannot sync the directory \"%s\" to stable storage", folder->path);
}

int io_folder_rename(const struct io_folder *folder, const char *from, const char *to)
{
	return renameat(folder->fd, from, folder->fd, to) ? -errno : 0;
}

int io_folder_swap(const struct io_folder *folder, const char *one, const char *other)
{
	if (!renameat2(folder->fd, one, folder->fd, other, RENAME_EXCHANGE))
		return 0;
	return errno == EINVAL || errno == ENOSYS ? -EOPNOTSUPP : -errno;
}

/* ---- Removing -------------------------------------------------------------------------------- */

/* Passes over a directory, since other processes may still create files in it. */
#define MOST_ROUNDS 8
/*
 * Most nested directories; each costs a descriptor and stack. No framework nests its checkpoints
 * half as deep.
 */
#define MOST_LEVELS 8

/*
 * Prefix that an NFS client gives a file that was removed while it was open on this host. Such a
 * file disappears when it is closed, and cannot be removed before.
 */
#define HIDDEN_BY_NFS ".nfs"

/* The removal of a directory. */
struct removal {
	const struct io_folder *folder;
	/* Levels of subdirectories that are removed as well. */
	unsigned levels;
	struct base_budget *budget;
	bool hidden; /* a file HIDDEN_BY_NFS is left */
	int ret;     /* first failure */
};

static int remove_rest(struct removal *removal, const struct io_folder *parent, const char *name,
		       struct base_error *error);

static int remove_inner(const struct removal *removal, const char *name, struct base_error *error)
{
	struct io_folder inner = IO_NO_FOLDER;
	struct removal of_inner = {
		.folder = &inner,
		.levels = removal->levels - 1,
		.budget = removal->budget,
	};
	int ret;

	if (!removal->levels)
		return base_fail_reason_with(
			error, -ENOTEMPTY, "check that directory, and remove it yourself",
			"\"%s\" was not removed, because it contains an unexpected directory: %s",
			removal->folder->path, name);
	ret = io_folder_open_in(&inner, removal->folder, name, error);
	if (!ret)
		ret = remove_rest(&of_inner, removal->folder, name, error);
	io_folder_close(&inner);
	return ret == -ENOENT ? 0 : ret;
}

static int try_to_remove(struct removal *removal, const char *name, struct base_error *error)
{
	const struct io_folder *folder = removal->folder;
	struct io_entry entry;

	if (!base_budget_take(removal->budget))
		return -EAGAIN;
	if (!unlinkat(folder->fd, name, 0) || errno == ENOENT)
		return 0;
	if (errno == EBUSY && !strncmp(name, HIDDEN_BY_NFS, strlen(HIDDEN_BY_NFS))) {
		removal->hidden = true;
		return 0;
	}
	if ((errno == EISDIR || errno == EPERM) && !io_folder_look(folder, name, &entry, error) &&
	    entry.kind == IO_FOLDER)
		return remove_inner(removal, name, error);
	return base_fail(error, -errno, "cannot remove \"%s/%s\"", folder->path, name);
}

/*
 * Removes an entry for io_folder_list(). After a failure it continues with the next; it stops when
 * the budget is spent.
 */
static int remove_file(void *user, const char *name, struct base_error *error)
{
	struct removal *removal = user;
	int ret = try_to_remove(removal, name, error);

	if (!removal->ret)
		removal->ret = ret;
	return ret == -EAGAIN ? ret : 0;
}

/*
 * Removes the file `name` and syncs the directory. Some filesystems give the blocks of a removed
 * file to others at once (ext4 with data=writeback). After a power failure the file may be back,
 * with other files' bytes. So the file that declares the checkpoint valid must be gone durably
 * first.
 */
static int remove_first(struct removal *removal, const char *name, struct base_error *error)
{
	struct io_entry entry;
	int ret;

	if (io_folder_look(removal->folder, name, &entry, NULL) == -ENOENT)
		return 0;
	ret = try_to_remove(removal, name, error);
	return ret ? ret : io_folder_sync(removal->folder, error);
}

/* Removes the content of a directory, then the directory. */
static int remove_rest(struct removal *removal, const struct io_folder *parent, const char *name,
		       struct base_error *error)
{
	int ret = 0;

	for (int round = 0; !ret; round++) {
		removal->hidden = false;
		ret = io_folder_list(removal->folder, remove_file, removal, error);
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

int io_folder_remove(const struct io_folder *folder, const struct io_folder *parent,
		     const char *name, const char *first, struct io_hold *hold,
		     struct base_budget *budget, struct base_error *error)
{
	struct removal removal = {
		.folder = folder,
		.levels = first ? 0 : MOST_LEVELS,
		.budget = budget,
	};
	int ret = first ? remove_first(&removal, first, error) : 0;

	/*
	 * New readers cannot open `first` any more. An open file may keep its directory from being
	 * removed.
	 */
	if (!ret && hold)
		io_folder_let_go(hold);
	return ret ? ret : remove_rest(&removal, parent, name, error);
}

/* ---- Small files ----------------------------------------------------------------------------- */

static int write_all(int fd, const uint8_t *data, size_t bytes)
{
	ssize_t done;

	/* Beyond ulimit -f, the kernel would send a signal that ends the application. */
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

/* Creates a small file. On failure the file does not exist. */
static int put_new(int folder_fd, const char *name, const void *data, size_t bytes, bool durable,
		   mode_t mode)
{
	const int flags = O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC;
	int fd, ret;

	fd = base_register_fd(openat(folder_fd, name, flags, mode));
	if (fd < 0)
		return -errno;
	/* The lock keeps other processes from removing the file as abandoned. */
	if (durable)
		(void)flock(fd, LOCK_EX | LOCK_NB);
	ret = write_all(fd, data, bytes);
	if (!ret && durable && fsync(fd))
		ret = -errno;
	/* Some network filesystems report lost writes only at close. */
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
	size_t least;
	ssize_t got;

	if (fstat(fd, status))
		return -errno;
	if (!S_ISREG(status->st_mode))
		return -EPERM;
	if ((uint64_t)status->st_size > most_bytes)
		return -EFBIG;
	into->bytes = 0;
	/* The length that an NFS client reports may be old. */
	for (least = (size_t)status->st_size + 1;; least = 4096) {
		if (base_buffer_reserve(into, least))
			return -ENOMEM;
		got = read(fd, into->data + into->bytes, into->allocated - into->bytes);
		if (!got)
			return 0;
		if (got < 0 && errno != EINTR)
			return -errno;
		into->bytes += (size_t)MAX(got, 0);
		if (into->bytes > most_bytes)
			return -EFBIG;
	}
}

int io_folder_put(const struct io_folder *folder, const char *name, const void *data, size_t bytes,
		  struct base_error *error)
{
	const int ret = put_new(folder->fd, name, data, bytes, true, 0666);

	return !ret ? 0 :
		      base_fail_with(error, ret, io_remedy(ret), "cannot write \"%s/%s\"",
				     folder->path, name);
}

/* Takes a shared lock. Returns -ENOENT if the file is being removed or has been removed. */
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
		return base_fail_reason(error, IOSHAPE_E_FORMAT, "\"%s/%s\" is not a regular file",
					folder->path, name);
	if (ret == -EFBIG)
		return base_fail_reason(error, IOSHAPE_E_LIMIT,
					"cannot read \"%s/%s\": it is larger than %s", folder->path,
					name, BASE_SIZE(most_bytes));
	if (ret)
		return base_fail(error, ret, "cannot read \"%s/%s\"", folder->path, name);
	if ((uint64_t)status.st_size > into->bytes)
		return base_fail_reason(error, IOSHAPE_E_DAMAGED,
					"\"%s/%s\" was truncated while it was read", folder->path,
					name);
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
	taken.fd = base_register_fd(
		openat(folder->fd, name, O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC));
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
	return base_fail(error, -errno, "cannot create the symbolic link \"%s/%s\"", folder->path,
			 name);
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

/* ---- Lock domains and names ------------------------------------------------------------------ */

static char machine_tag[IO_DOMAIN_BYTES];

static void read_machine_tag(void)
{
	char text[64];
	ssize_t bytes = 0;
	int fd;

	fd = base_above_streams(open("/proc/sys/kernel/random/boot_id", O_RDONLY | O_CLOEXEC));
	if (fd >= 0) {
		bytes = read(fd, text, sizeof(text));
		close(fd);
	}
	if (bytes > 0)
		snprintf(machine_tag, sizeof(machine_tag), "%08x",
			 base_crc32(0, text, (size_t)bytes));
	else
		strcpy(machine_tag, IO_NOWHERE);
}

const char *io_machine_tag(void)
{
	static pthread_once_t once = PTHREAD_ONCE_INIT;

	pthread_once(&once, read_machine_tag);
	return machine_tag;
}

/*
 * Identifies a lock domain by boot and superblock. The kernel keeps a file's locks with its inode,
 * and each superblock has its own inodes; only some filesystems ask their server. A superblock's
 * number is not reused while a file on it is open. So a writer with the same number is alive under
 * the same locks, or dead. PID namespaces make no difference: these locks belong to open files.
 */
void io_lock_domain(int directory_fd, char *domain)
{
	const char *machine = io_machine_tag();
	struct statx status;
	char text[64];

	strcpy(domain, IO_NOWHERE);
	/* AT_STATX_DONT_SYNC: the kernel knows this without a request to the server. */
	if (!strcmp(machine, IO_NOWHERE) ||
	    statx(directory_fd, "", AT_EMPTY_PATH | AT_STATX_DONT_SYNC, 0, &status))
		return;
	snprintf(text, sizeof(text), "%s %x:%x", machine, status.stx_dev_major,
		 status.stx_dev_minor);
	snprintf(domain, IO_DOMAIN_BYTES, "%08x", base_crc32(0, text, strlen(text)));
}

bool io_is_lock_domain(const char *digits, const char domain[IO_DOMAIN_BYTES])
{
	return strcmp(domain, IO_NOWHERE) && !strncmp(digits, domain, IO_DOMAIN_BYTES - 1);
}

void io_temporary_name(int folder_fd, const char *name, char into[NAME_MAX + 1])
{
	char end[64], domain[IO_DOMAIN_BYTES];

	io_lock_domain(folder_fd, domain);
	snprintf(end, sizeof(end), IO_TEMPORARY_MARK "%s-%016llx", domain,
		 (unsigned long long)base_random());
	snprintf(into, NAME_MAX + 1, ".%.*s%s", NAME_MAX - 1 - (int)strlen(end), name, end);
}

/* ---- Clocks ---------------------------------------------------------------------------------- */

/* Age after which files of other lock domains count as abandoned. */
#define ABANDONED_AFTER_S (24 * 3600)

bool io_is_abandoned(struct io_clock *clock, int64_t touched)
{
	struct stat status;

	if (!clock->now)
		clock->now = look_at_new(clock->directory_fd, &status) ? -1 : status.st_mtime;
	return clock->now > 0 && clock->now - touched > ABANDONED_AFTER_S;
}

int io_time_in(const char *directory, int64_t *now_ns, struct base_error *error)
{
	struct io_folder folder;
	struct stat status;
	int ret;

	ret = io_folder_open(&folder, directory, error);
	if (ret)
		return ret;
	ret = look_at_new(folder.fd, &status);
	if (!ret)
		*now_ns = io_modified_ns(&status);
	io_folder_close(&folder);
	return !ret ? 0 :
		      base_fail_with(error, ret, io_remedy(ret), "cannot create a file in \"%s\"",
				     directory);
}

/* ---- Removing what dead processes left ------------------------------------------------------- */

/*
 * An empty file that is at most JUST_MADE_S old, by this machine's clock, may belong to a writer
 * that is about to lock it. The writer needs less than MOMENT_NS for that. If this is wrong, the
 * writer notices and creates another file.
 */
#define JUST_MADE_S 2
#define MOMENT_NS 20000000

/* Returns whether the first `count` characters are hexadecimal digits. */
static bool is_hex(const char *text, size_t count)
{
	return strspn(text, "0123456789abcdef") >= count;
}

/*
 * Returns whether this is a temporary name, and sets *domain to its lock domain. Such a name ends
 * in the mark, 8 digits of the lock domain, "-" and 16 random digits.
 */
static bool is_temporary_name(const char *name, const char **domain)
{
	const size_t tail = 8 + 1 + 16, mark = strlen(IO_TEMPORARY_MARK), length = strlen(name);

	if (*name != '.' || length < mark + tail)
		return false;
	*domain = name + length - tail;
	return !strncmp(*domain - mark, IO_TEMPORARY_MARK, mark) && is_hex(*domain, 8) &&
	       (*domain)[8] == '-' && is_hex(*domain + 9, 16);
}

/* The newest change of a directory. */
struct touched {
	int fd;
	int64_t at; /* seconds since 1970 */
	struct base_budget *budget;
};

/* Updates the newest change by one entry: a directory is as old as its newest file. */
static int see_touch(void *user, const char *name, struct base_error *error)
{
	struct stat status;
	struct touched *touched = user;

	(void)error;
	if (!base_budget_look(touched->budget))
		return -EAGAIN;
	if (!fstatat(touched->fd, name, &status, AT_SYMLINK_NOFOLLOW))
		touched->at = MAX(touched->at, status.st_mtime);
	return 0;
}

/* A temporary name and its lock domain. */
struct named {
	const char *name, *domain;
	bool same_domain;
};

/*
 * Returns whether the file belongs to this user. For root, also whether it belongs to the owner of
 * the file that it was to replace: root gives temporary files to that owner.
 */
static bool is_own(const struct io_clock *clock, const struct named *named, uid_t owner)
{
	const ptrdiff_t bytes =
		named->domain - named->name - 1 - (ptrdiff_t)strlen(IO_TEMPORARY_MARK);
	char replaced[NAME_MAX + 1];
	struct stat status;

	if (base_is_own_user(owner) || geteuid())
		return base_is_own_user(owner);
	snprintf(replaced, sizeof(replaced), "%.*s", (int)bytes, named->name + 1);
	return !fstatat(clock->directory_fd, replaced, &status, AT_SYMLINK_NOFOLLOW) &&
	       status.st_uid == owner;
}

/*
 * Returns whether a file is too new to be abandoned, by this machine's clock, which may be half a
 * day wrong. In a storm this spares the server many files that are opened for nothing.
 */
static bool is_recent(const struct io_folder *parent, const char *name)
{
	struct stat status;

	return !fstatat(parent->fd, name, &status, AT_SYMLINK_NOFOLLOW) &&
	       time(NULL) - status.st_mtime < ABANDONED_AFTER_S / 2;
}

/* Returns whether the file may be so new that its living writer has not locked it yet. */
static bool is_just_made(const struct stat *status)
{
	return S_ISREG(status->st_mode) && !status->st_size &&
	       llabs((long long)time(NULL) - status->st_mtime) <= JUST_MADE_S;
}

/*
 * Unlocks a file for a moment, so that its writer can lock it. Returns whether the writer did not.
 */
static bool is_still_unlocked(int fd)
{
	const struct timespec moment = { 0, MOMENT_NS };

	if (flock(fd, LOCK_UN))
		return false;
	nanosleep(&moment, NULL);
	return !flock(fd, LOCK_EX | LOCK_NB);
}

/* Returns whether the writer of a temporary file or directory is dead. If so, its lock is held. */
static bool is_abandoned(int fd, const struct named *named, struct io_clock *clock,
			 struct base_budget *budget)
{
	bool locked = !flock(fd, LOCK_EX | LOCK_NB);
	struct touched touched = { .fd = fd, .budget = budget };
	char no_path[] = ""; /* not used in messages */
	struct stat status;

	if (!locked && errno == EWOULDBLOCK)
		return false;
	if (fstat(fd, &status) || !is_own(clock, named, status.st_uid))
		return false;
	if (!S_ISREG(status.st_mode) && !S_ISDIR(status.st_mode))
		return false;
	if (locked && named->same_domain)
		return !is_just_made(&status) || is_still_unlocked(fd);
	touched.at = status.st_mtime;
	if (S_ISDIR(status.st_mode) &&
	    io_folder_list(&(struct io_folder){ fd, no_path }, see_touch, &touched, NULL))
		return false;
	return io_is_abandoned(clock, touched.at);
}

static bool remove_if_abandoned(const struct io_folder *parent, struct io_clock *clock,
				const struct named *named, struct base_budget *budget)
{
	const char *name = named->name;
	const int flags = O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC;
	struct io_folder folder = IO_NO_FOLDER;
	bool removed = false, is_folder;
	int fd;

	/* O_NONBLOCK: the entry may turn out to be a pipe. */
	fd = base_register_fd(openat(parent->fd, name, O_RDWR | flags));
	is_folder = fd < 0 && errno == EISDIR && !io_folder_open_in(&folder, parent, name, NULL);
	/*
	 * The lock is held until after the removal, so that a writer that just created the file
	 * notices. A directory may have got its final name between our opening and its unlocking.
	 */
	if (is_folder && is_abandoned(folder.fd, named, clock, budget) &&
	    io_folder_is_named(&folder, parent, name))
		removed = !io_folder_remove(&folder, parent, name, NULL, NULL, budget, NULL);
	else if (fd >= 0 && is_abandoned(fd, named, clock, budget) && base_budget_take(budget))
		removed = !unlinkat(parent->fd, name, 0);
	io_folder_close(&folder);
	base_close(fd);
	return removed;
}

int io_remove_if_stale(const struct io_folder *parent, const char *name, struct io_clock *clock,
		       struct base_budget *budget, const struct base_log *log)
{
	struct named named = { .name = name };
	char domain[IO_DOMAIN_BYTES];

	if (!is_temporary_name(name, &named.domain))
		return 0;
	if (!base_budget_look(budget))
		return -EAGAIN;
	io_lock_domain(parent->fd, domain);
	named.same_domain = io_is_lock_domain(named.domain, domain);
	if (!named.same_domain && is_recent(parent, name))
		return 0;
	if (remove_if_abandoned(parent, clock, &named, budget))
		base_log(log, IOSHAPE_LOG_WARNING,
			 "removed %s in %s, left behind by a dead process", name, parent->path);
	return 0;
}

struct tidying {
	struct io_folder parent;
	struct io_clock clock;
	struct base_budget *budget;
	const struct base_log *log;
	unsigned seen;
};

static int tidy(void *user, const char *name, struct base_error *error)
{
	struct tidying *tidying = user;

	(void)error;
	if (tidying->seen++ == MOST_TIDIED)
		return -E2BIG;
	return io_remove_if_stale(&tidying->parent, name, &tidying->clock, tidying->budget,
				  tidying->log);
}

void io_remove_stale(int directory_fd, const char *directory, struct base_budget *budget,
		     const struct base_log *log)
{
	struct tidying tidying = {
		.parent = { .fd = directory_fd, .path = strdup(directory) },
		.clock = { .directory_fd = directory_fd },
		.budget = budget,
		.log = log,
	};

	if (!tidying.parent.path)
		return;
	io_folder_list(&tidying.parent, tidy, &tidying, NULL);
	if (budget && base_budget_is_spent(budget))
		base_log(log, IOSHAPE_LOG_WARNING,
			 "removed some of the files that dead processes left behind in %s: the "
			 "next save removes more",
			 directory);
	free(tidying.parent.path);
}
