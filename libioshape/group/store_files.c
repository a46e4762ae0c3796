/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Stores of files: a folder with one file for each message, named <scope>.<name>.
 *
 * Ranks that share only a filesystem keep the folder in the directory of the checkpoints. There no
 * rank knows which other rank has ended. The folder of an earlier job may still be there, and its
 * messages are read until rank 0 drops their scopes.
 *
 * Ranks that share the memory of a host keep the folder there, after they have met elsewhere. Its
 * name is used once. Each rank has a file life-<rank> in it and holds a lock on it, which the
 * kernel drops when the process ends, however it ends. A folder whose life-0 is not locked belongs
 * to a dead job.
 */
#define _GNU_SOURCE
#include "group/store.h"

#include "io/io.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#define DIRECTORY_MARK ".ioshape-store-" /* prefix of folders in the directory of checkpoints */
#define MEMORY_MARK "store-"             /* prefix of folders in memory */
#define FORGOTTEN_AFTER_S (24 * 3600)

/* Follows the mark in the names of folders that are being removed. */
#define GONE "gone-"
#define MOST_TRIES 10 /* most tries if another process changes a folder at the same time */

#define LIFE "life"
#define RANK0_LIFE LIFE "-0"

/* Size of "<scope>.<name>", with the final 0. */
#define FILE_NAME_BYTES (2 * STORE_NAME_BYTES)

struct files_store {
	struct store base;
	char *path;     /* path of the folder; owned */
	uid_t owner;    /* owner of this user's files in it, as its server reports */
	int64_t opened; /* time when it was opened, by the server's clock, in seconds since 1970 */
	/* Only in memory: */
	char parent[STORE_FOLDER_BYTES]; /* directory that has the folder */
	int folder_fd;                   /* the folder, held open */
	int life_fd;                     /* this rank's life file, locked */
	int rank0_fd;                    /* rank 0's life file; -1 on rank 0 */
};

static bool is_in_memory(const struct files_store *store)
{
	return store->base.ops == &store_memory;
}

/* ---- The folder in the host's memory --------------------------------------------------------- */

/* Checks that `path` is a folder, not a symbolic link, and that only this user can use it. Another
 * user may have created it. */
static int check_parent(const char *path)
{
	struct stat stat;

	if (lstat(path, &stat))
		return -errno;
	if (!S_ISDIR(stat.st_mode))
		return -ENOTDIR;
	return base_is_own_user(stat.st_uid) && !(stat.st_mode & 077) ? 0 : -EACCES;
}

static int make_parent(char path[STORE_FOLDER_BYTES], const char *parent)
{
	const int length =
		snprintf(path, STORE_FOLDER_BYTES, "%s/ioshape-%u", parent, (unsigned)geteuid());

	if (length >= STORE_FOLDER_BYTES)
		return -ENAMETOOLONG;
	if (mkdir(path, 0700) && errno != EEXIST)
		return -errno;
	return check_parent(path);
}

int store_find_folder(char path[STORE_FOLDER_BYTES], const char *given, struct base_error *error)
{
	const char *runtime = secure_getenv("XDG_RUNTIME_DIR");
	int ret = make_parent(path, given ? given : "/dev/shm");

	if (ret && !given && runtime && *runtime == '/')
		ret = make_parent(path, runtime);
	if (!ret)
		return 0;
	*path = 0;
	return base_fail_with(
		error, ret, "mount a tmpfs at /dev/shm, or remove the folder of another user there",
		"cannot make a private folder in %s or in XDG_RUNTIME_DIR",
		given ? given : "/dev/shm");
}

void store_identify_memory(char id[STORE_MEMORY_ID_BYTES])
{
	char path[STORE_FOLDER_BYTES];
	struct stat stat;

	if (!store_find_folder(path, NULL, NULL) && !lstat(path, &stat))
		snprintf(id, STORE_MEMORY_ID_BYTES, "%s-%llx-%llx", io_machine_tag(),
			 (unsigned long long)stat.st_dev, (unsigned long long)stat.st_ino);
	else
		snprintf(id, STORE_MEMORY_ID_BYTES, "alone-%016llx",
			 (unsigned long long)base_random());
}

/* ---- Life files ------------------------------------------------------------------------------ */

/* Returns whether a file is locked. The lock belongs to the open file, not to the process, because
 * one process may be several ranks. */
static bool is_locked(int fd)
{
	struct flock lock = { .l_type = F_WRLCK, .l_whence = SEEK_SET };

	return !fcntl(fd, F_OFD_GETLK, &lock) && lock.l_type != F_UNLCK;
}

static int open_life(int folder_fd, const char *name)
{
	return base_above_streams(
		openat(folder_fd, name, O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC));
}

/* Returns whether the life file is there; *locked: whether its rank is alive. */
static bool look_at_life(int folder_fd, const char *name, bool *locked)
{
	const int fd = open_life(folder_fd, name);

	*locked = fd >= 0 && is_locked(fd);
	if (fd >= 0)
		close(fd);
	return fd >= 0;
}

/* Creates this rank's life file. It is locked before it gets its name, so that a file with that
 * name and without a lock always means a dead rank. */
static int begin_life(struct files_store *store)
{
	struct flock lock = { .l_type = F_WRLCK, .l_whence = SEEK_SET };
	char temporary[STORE_NAME_BYTES], name[STORE_NAME_BYTES];
	int fd, ret = 0;

	snprintf(temporary, sizeof(temporary), ".%016llx", (unsigned long long)base_random());
	store_name_of(name, LIFE, store->base.config.rank);
	fd = base_register_fd(openat(store->folder_fd, temporary,
				     O_RDWR | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0600));
	if (fd < 0)
		return -errno;
	if (fcntl(fd, F_OFD_SETLK, &lock) ||
	    linkat(store->folder_fd, temporary, store->folder_fd, name, 0))
		ret = -errno;
	unlinkat(store->folder_fd, temporary, 0);
	if (ret)
		base_close(fd);
	else
		store->life_fd = fd;
	return ret;
}

static bool rank0_has_ended(const struct files_store *store)
{
	return store->rank0_fd >= 0 && !is_locked(store->rank0_fd);
}

static bool files_has_ended(struct store *base, uint32_t rank)
{
	const struct files_store *store = (struct files_store *)base;
	char name[STORE_NAME_BYTES];
	bool locked;

	if (!rank)
		return rank0_has_ended(store);
	store_name_of(name, LIFE, rank);
	/* Without a life file the rank has not come yet. */
	return look_at_life(store->folder_fd, name, &locked) && !locked;
}

/* ---- Folders and their files ----------------------------------------------------------------- */

/*
 * A folder's contents are not trusted: only regular files of this user are read, and symbolic links
 * are not followed. Nothing is synced, because messages need not outlive the machine.
 */

static int open_folder(const char *path)
{
	const int fd =
		base_register_fd(open(path, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC));

	return fd < 0 ? -errno : fd;
}

/* Opens the folder. It is opened again for each call, so that NFS asks the server for changes.
 * Returns -ENOENT, without an error message, if the folder is gone. */
static int enter_folder(const char *path, uid_t owner, struct base_error *error)
{
	const int fd = open_folder(path);
	struct stat stat;
	int ret = fd < 0 ? fd : 0;

	if (!ret && fstat(fd, &stat))
		ret = -errno;
	if (!ret && stat.st_uid == owner && !(stat.st_mode & 022))
		return fd;
	if (fd >= 0)
		base_close(fd);
	if (ret == -ENOENT)
		return ret;
	if (ret)
		return base_fail(error, ret, "cannot store messages in the folder \"%s\"", path);
	return base_fail_reason(
		error, -EACCES,
		"the folder \"%s\" does not belong to this user any more, or others can "
		"write to it",
		path);
}

/* Writes a file, in place of an earlier one of its name. Returns -ENOENT, without an error message,
 * if the folder is gone. */
static int write_file(const struct files_store *store, int folder_fd, const char *name,
		      const void *data, size_t bytes, struct base_error *error)
{
	const int ret = io_put_whole(folder_fd, name, data, bytes, false, 0600);

	if (ret == -ENOENT || ret == -ESTALE)
		return -ENOENT;
	return !ret ? 0 :
		      base_fail(error, ret, "cannot write the message \"%s/%s\"", store->path,
				name);
}

/* Tries to read a file. Returns -ESTALE if it was replaced at the same time. */
static int read_once(struct files_store *store, int folder_fd, const char *name,
		     struct base_buffer *into)
{
	struct stat stat;
	int fd, ret;

	/* O_NONBLOCK: do not wait if the file is a pipe. */
	fd = base_above_streams(
		openat(folder_fd, name, O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC));
	if (fd < 0)
		return -errno;
	ret = io_read_whole(fd, STORE_MAX_MESSAGE_BYTES, into, &stat);
	if (!ret && stat.st_uid != store->owner)
		ret = -EPERM;
	close(fd);
	return ret;
}

/* Reads a file and replaces the contents of `into`. Returns -ENOENT, without an error message, if
 * there is no such file. */
static int read_file(struct files_store *store, int folder_fd, const char *name,
		     struct base_buffer *into, struct base_error *error)
{
	int ret = -ESTALE;

	for (int i = 0; i < MOST_TRIES && ret == -ESTALE; i++)
		ret = read_once(store, folder_fd, name, into);
	if (!ret || ret == -ENOENT)
		return ret;
	if (ret == -ENOMEM)
		return base_no_memory(error, "a message", STORE_MAX_MESSAGE_BYTES);
	if (ret == -EPERM || ret == -ELOOP)
		return base_fail_reason_with(
			error, -EPERM, "remove it, and find out which process put it there",
			"\"%s/%s\" is not a file of this group", store->path, name);
	return base_fail(error, ret, "cannot read the message \"%s/%s\"", store->path, name);
}

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

/* Removes all files of a folder. Returns false if some are left because the budget is spent. */
static bool empty(int folder_fd, struct base_budget *budget)
{
	const struct io_folder folder = { .fd = folder_fd };
	struct emptying emptying = { folder_fd, budget };

	return io_folder_list(&folder, remove_one, &emptying, NULL) != -EAGAIN;
}

static void remove_folder(const char *path, uid_t owner)
{
	int fd;

	/* Retry, because another process may put files there meanwhile. */
	for (int i = 0; i < MOST_TRIES; i++) {
		fd = enter_folder(path, owner, NULL);
		if (fd < 0)
			return;
		empty(fd, NULL);
		base_close(fd);
		if (!rmdir(path) || (errno != ENOTEMPTY && errno != EEXIST))
			return;
	}
}

/* ---- Removing the folders of dead jobs ------------------------------------------------------- */

struct sweeping {
	const struct files_store *store;
	const char *mark; /* prefix of the folders' names */
	struct io_folder parent;
	struct base_budget budget;
};

/* Returns whether a folder belongs to a dead job. One without a life file of rank 0 may be a new
 * one in memory, or is in a directory of checkpoints. It is dead if it has not changed for a day.
 */
static bool is_dead(const struct files_store *store, int folder_fd, const struct stat *stat)
{
	bool locked;

	if (look_at_life(folder_fd, RANK0_LIFE, &locked))
		return !locked;
	return store->opened - stat->st_mtim.tv_sec > FORGOTTEN_AFTER_S;
}

/* Renames a folder before it is emptied. If this process dies while it does that, the folder looks
 * new; the next rank 0 recognises it by the name. */
static bool rename_dead(const struct sweeping *sweeping, const char *name, char into[NAME_MAX + 1])
{
	return snprintf(into, NAME_MAX + 1, "%s" GONE "%s", sweeping->mark,
			name + strlen(sweeping->mark)) <= NAME_MAX &&
	       !renameat(sweeping->parent.fd, name, sweeping->parent.fd, into);
}

static int sweep_one(void *user, const char *name, struct base_error *error)
{
	struct sweeping *sweeping = user;
	const size_t mark = strlen(sweeping->mark);
	const struct files_store *store = sweeping->store;
	const int parent_fd = sweeping->parent.fd;
	char renamed[NAME_MAX + 1];
	struct stat stat;
	bool gone;
	int fd;

	(void)error;
	if (!base_budget_look(&sweeping->budget))
		return -EAGAIN;
	if (strncmp(name, sweeping->mark, mark) != 0)
		return 0;
	fd = base_above_streams(
		openat(parent_fd, name, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC));
	if (fd < 0)
		return 0;
	gone = !strncmp(name + mark, GONE, strlen(GONE));
	if (!fstat(fd, &stat) && stat.st_uid == store->owner &&
	    (gone || (is_dead(store, fd, &stat) && rename_dead(sweeping, name, renamed))) &&
	    empty(fd, &sweeping->budget))
		unlinkat(parent_fd, gone ? name : renamed, AT_REMOVEDIR);
	close(fd);
	return 0;
}

/* Removes the folders of dead jobs in a directory. */
static void sweep(const struct files_store *store, const char *parent, const char *mark)
{
	struct sweeping sweeping = { .store = store, .mark = mark, .budget = base_budget_begin() };

	if (io_folder_open(&sweeping.parent, parent, NULL))
		return;
	io_folder_list(&sweeping.parent, sweep_one, &sweeping, NULL);
	io_folder_close(&sweeping.parent);
}

/* ---- A folder in memory ---------------------------------------------------------------------- */

static void leave_memory(struct files_store *store)
{
	base_close(store->life_fd);
	base_close(store->rank0_fd);
	base_close(store->folder_fd);
	store->life_fd = store->rank0_fd = store->folder_fd = -1;
}

/* Creates rank 0's folder. */
static int make_folder(struct files_store *store, struct base_error *error)
{
	int ret;

	sweep(store, store->parent, MEMORY_MARK);
	if (mkdir(store->path, 0700))
		return base_fail(error, -errno, "cannot make the folder \"%s\"", store->path);
	ret = store->folder_fd = open_folder(store->path);
	if (ret >= 0)
		ret = begin_life(store);
	if (!ret)
		return 0;
	remove_folder(store->path, store->owner);
	return base_fail(error, ret, "cannot store the messages of ranks in memory, in \"%s\"",
			 store->path);
}

/* Joins rank 0's folder, which is there as long as rank 0 is alive. */
static int join_folder(struct files_store *store, struct base_error *error)
{
	int ret = store->folder_fd = open_folder(store->path);

	if (ret >= 0) {
		store->rank0_fd = base_register_fd(open_life(store->folder_fd, RANK0_LIFE));
		ret = store->rank0_fd < 0 || rank0_has_ended(store) ? -ENOENT : begin_life(store);
	}
	if (ret != -ENOENT)
		return ret ? base_fail(error, ret, "cannot join \"%s\"", store->path) : 0;
	base_fail_reason_with(error, -ETIMEDOUT, "find out why it ended",
			      "rank 0 of the group has ended: \"%s\" is gone", store->path);
	base_error_of_rank(error, 0);
	return -ETIMEDOUT;
}

/* ---- Entering the folder for a call ---------------------------------------------------------- */

/* Enters the folder. If it is gone, only rank 0 creates it again: another rank that ends late would
 * leave it behind. */
static int enter(struct files_store *store, struct base_error *error)
{
	int fd;

	if (is_in_memory(store))
		return store->folder_fd;
	fd = enter_folder(store->path, store->owner, error);
	if (fd == -ENOENT && !store->base.config.rank &&
	    (!mkdir(store->path, 0700) || errno == EEXIST))
		fd = enter_folder(store->path, store->owner, error);
	return fd;
}

static void leave(const struct files_store *store, int fd)
{
	if (!is_in_memory(store) && fd >= 0)
		base_close(fd);
}

/* Returns whether the folder is gone, so that a missing file means nothing. A folder in memory is
 * held open, so its link count tells. */
static bool is_removed(const struct files_store *store, int fd)
{
	struct stat stat;

	return fd == -ENOENT || (is_in_memory(store) && !fstat(fd, &stat) && !stat.st_nlink);
}

static int fail_removed(const struct files_store *store, struct base_error *error)
{
	if (is_in_memory(store) && !rank0_has_ended(store))
		return base_fail_reason_with(
			error, -ESTALE,
			"keep it while the job runs (RemoveIPC=no in logind.conf), and "
			"start the job again",
			"the folder %s was removed while ranks were using it", store->path);
	return base_fail_reason(
		error, IOSHAPE_E_COORDINATOR,
		"the folder %s is gone: rank 0 of the group has ended, or the folder "
		"was removed",
		store->path);
}

/* Turns failures that may pass into IOSHAPE_E_COORDINATOR, so that the caller retries. Examples are
 * an NFS server that does not answer for a moment, and memory that is full. The error message keeps
 * the cause. */
static int unless_passing(const struct files_store *store, int ret, struct base_error *error)
{
	const bool is_full = ret == -ENOSPC || ret == -EDQUOT;

	if (ret != -ESTALE && ret != -EIO && ret != -ETIMEDOUT && ret != -EINTR &&
	    !(is_full && is_in_memory(store)))
		return ret;
	return base_rephrase(error, IOSHAPE_E_COORDINATOR, "%s", error ? error->sentence : "");
}

static void file_name(char file[FILE_NAME_BYTES], const char *scope, const char *name)
{
	snprintf(file, FILE_NAME_BYTES, "%s.%s", scope, name);
}

/* ---- Putting and getting messages ------------------------------------------------------------ */

static int files_put(struct store *base, const char *scope, const char *name, const void *message,
		     size_t bytes, struct base_error *error)
{
	struct files_store *store = (struct files_store *)base;
	char file[FILE_NAME_BYTES];
	int fd, ret = -ENOENT;

	file_name(file, scope, name);
	/* Try twice: rank 0 may have created the folder again. */
	for (int i = 0; i < 2 && ret == -ENOENT; i++) {
		fd = enter(store, error);
		ret = fd < 0 ? fd : write_file(store, fd, file, message, bytes, error);
		leave(store, fd);
	}
	return ret == -ENOENT ? fail_removed(store, error) : unless_passing(store, ret, error);
}

/* Puts a message again if its file is gone: rank 0 of an earlier job may have removed it when it
 * ended. */
static int files_restore(struct store *base, const struct store_own *own)
{
	struct files_store *store = (struct files_store *)base;
	char file[FILE_NAME_BYTES];
	int ret, fd = enter(store, NULL);
	struct stat stat;

	file_name(file, own->scope, own->name);
	ret = fd < 0 ? fd : 0;
	if (!ret && fstatat(fd, file, &stat, AT_SYMLINK_NOFOLLOW) && errno == ENOENT)
		ret = write_file(store, fd, file, own->data, own->bytes, NULL);
	leave(store, fd);
	return ret;
}

static int files_get(struct store *base, const char *scope, const char *name,
		     struct base_buffer *message, struct base_error *error)
{
	struct files_store *store = (struct files_store *)base;
	char file[FILE_NAME_BYTES];
	bool removed;
	int fd, ret;

	file_name(file, scope, name);
	fd = enter(store, error);
	ret = fd < 0 ? fd : read_file(store, fd, file, message, error);
	removed = ret == -ENOENT && is_removed(store, fd);
	leave(store, fd);
	if (removed)
		return fail_removed(store, error);
	return ret == -ENOENT ? -EAGAIN : unless_passing(store, ret, error);
}

/* State of collect() while it lists the folder. */
struct collection {
	struct files_store *store;
	struct io_folder folder;
	char begin[FILE_NAME_BYTES + 2]; /* beginning of the names: "<scope>.<prefix>-" */
	const bool *have;
	store_found_fn *found;
	void *user;
	struct base_buffer message;
	int stopped; /* code that found() returned */
};

/* Parses the rank at the end of a name, as store_name_of() writes it. Returns false if it is not
 * valid. */
static bool read_rank(const char *digits, uint32_t ranks, uint32_t *rank)
{
	const size_t count = strspn(digits, "0123456789");
	unsigned long long number;

	if (!count || digits[count] || count > 10 || (*digits == '0' && count > 1))
		return false;
	number = strtoull(digits, NULL, 10);
	*rank = (uint32_t)number;
	return number < ranks;
}

static int collect_file(void *opaque, const char *name, struct base_error *error)
{
	struct collection *collection = opaque;
	struct files_store *store = collection->store;
	const size_t length = strlen(collection->begin);
	uint32_t rank;
	int ret;

	if (strncmp(name, collection->begin, length) != 0 ||
	    !read_rank(name + length, store->base.config.ranks, &rank) || collection->have[rank])
		return 0;
	ret = read_file(store, collection->folder.fd, name, &collection->message, error);
	if (ret)
		return ret == -ENOENT ? 0 : ret;
	collection->stopped = collection->found(collection->user, rank, &collection->message);
	return collection->stopped;
}

static int files_collect(struct store *base, const char *scope, const char *prefix,
			 const bool *have, store_found_fn *found, void *user,
			 struct base_error *error)
{
	struct files_store *store = (struct files_store *)base;
	struct collection collection = {
		.store = store, .have = have, .found = found, .user = user
	};
	struct base_error why = { 0 };
	bool removed;
	int ret;

	snprintf(collection.begin, sizeof(collection.begin), "%s.%s-", scope, prefix);
	ret = enter(store, &why);
	collection.folder = (struct io_folder){ .fd = ret, .path = store->path };
	removed = is_removed(store, ret);
	if (ret >= 0 && !removed)
		ret = io_folder_list(&collection.folder, collect_file, &collection, &why);
	leave(store, collection.folder.fd);
	base_buffer_free(&collection.message);
	if (collection.stopped)
		return collection.stopped;
	if (removed || ret == -ENOENT || ret == -ESTALE)
		return fail_removed(store, error);
	if (ret)
		base_propagate(error, &why);
	return unless_passing(store, ret, error);
}

/* ---- Dropping scopes and closing ------------------------------------------------------------- */

struct removal {
	struct io_folder folder;
	char begin[STORE_NAME_BYTES + 1];
};

static int remove_file(void *opaque, const char *name, struct base_error *error)
{
	const struct removal *removal = opaque;

	(void)error;
	if (!strncmp(name, removal->begin, strlen(removal->begin)))
		unlinkat(removal->folder.fd, name, 0);
	return 0;
}

static void files_drop(struct store *base, const char *scope)
{
	struct files_store *store = (struct files_store *)base;
	struct removal removal = { .folder = { .path = store->path } };

	snprintf(removal.begin, sizeof(removal.begin), "%s.", scope);
	removal.folder.fd = is_in_memory(store) ? store->folder_fd :
						  enter_folder(store->path, store->owner, NULL);
	if (removal.folder.fd >= 0)
		io_folder_list(&removal.folder, remove_file, &removal, NULL);
	leave(store, removal.folder.fd);
}

/* Closes the store; rank 0 removes its folder. In memory, it gives up its lock before, so that the
 * other ranks see the end of rank 0 and not a missing folder. */
static void files_close(struct store *base)
{
	struct files_store *store = (struct files_store *)base;
	const bool entered = is_in_memory(store) ? store->life_fd >= 0 : store->path != NULL;

	leave_memory(store);
	if (!base->config.rank && entered)
		remove_folder(store->path, store->owner);
	free(store->path);
}

/* ---- Opening a store ------------------------------------------------------------------------- */

static struct files_store *new_store(struct store **out, const struct store_ops *ops,
				     const struct store_config *config, struct base_error *error)
{
	struct files_store *store = store_new(sizeof(*store), ops, config, error);

	if (!store)
		return NULL;
	store->folder_fd = store->life_fd = store->rank0_fd = -1;
	*out = &store->base;
	return store;
}

static int open_in_directory(struct store **out, const struct store_config *config,
			     struct base_error *error)
{
	struct files_store *store = new_store(out, &store_files, config, error);
	struct stat ours;
	int ret;

	if (!store)
		return -ENOMEM;
	if (asprintf(&store->path, "%s/" DIRECTORY_MARK "%s", config->directory, config->name) <
	    0) {
		store->path = NULL;
		return base_no_memory(error, "a path", strlen(config->directory));
	}
	ret = io_folder_make_private(store->path, &ours, error);
	if (ret) {
		free(store->path);
		/* This makes files_close() remove nothing. */
		store->path = NULL;
		return ret;
	}
	store->owner = ours.st_uid;
	store->opened = ours.st_mtime;
	if (!config->rank)
		sweep(store, config->directory, DIRECTORY_MARK);
	return 0;
}

static int open_in_memory(struct store **out, const struct store_config *config,
			  struct base_error *error)
{
	struct files_store *store = new_store(out, &store_memory, config, error);
	int ret;

	if (!store)
		return -ENOMEM;
	ret = store_find_folder(store->parent, config->memory, error);
	if (ret)
		return ret;
	store->owner = geteuid();
	store->opened = time(NULL);
	if (asprintf(&store->path, "%s/" MEMORY_MARK "%s", store->parent, config->name) < 0) {
		store->path = NULL;
		return base_no_memory(error, "a path", strlen(store->parent));
	}
	return config->rank ? join_folder(store, error) : make_folder(store, error);
}

const struct store_ops store_files = {
	.id = "files",
	.wait_divisor = 1,
	.least_wait_ns = 5000000,
	.most_wait_ns = 250000000,
	.open = open_in_directory,
	.put = files_put,
	.restore = files_restore,
	.get = files_get,
	.collect = files_collect,
	.drop = files_drop,
	.close = files_close,
};

/* A look into memory takes a few microseconds, and a save of small checkpoints takes milliseconds,
 * so the waits are short. */
const struct store_ops store_memory = {
	.id = "host",
	.wait_divisor = 8,
	.least_wait_ns = 200000,
	.most_wait_ns = 50000000,
	.open = open_in_memory,
	.put = files_put,
	.restore = files_restore,
	.get = files_get,
	.collect = files_collect,
	.has_ended = files_has_ended,
	.drop = files_drop,
	.close = files_close,
};
