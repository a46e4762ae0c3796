/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Stores of files: a folder with a file for each message, named <scope>.<name>.
 *
 * Ranks that have nothing in common but a filesystem keep the folder in the directory of the
 * generations. None knows which rank has ended, and the folder of an earlier job may be there: its
 * messages are seen until rank 0 drops their scopes.
 *
 * Ranks that share the memory of a host keep the folder there. Each has a file life-<rank> in it,
 * which it has locked. The kernel drops the lock when the process ends, however it ends. A folder
 * whose life-0 is not locked is a dead job's.
 */
#define _GNU_SOURCE
#include "gather/store.h"

#include "io/io.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#define DIRECTORY_MARK ".ioshape-board-" /* of folders in the directory of the generations */
#define MEMORY_MARK "board-"             /* of folders in memory */
#define FORGOTTEN_AFTER_S (24 * 3600)

#define LIFE "life"
#define RANK0_LIFE LIFE "-0"

/* While a folder in memory is not there yet, or another job has it. */
#define FIRST_PAUSE_NS 1000000u
#define MOST_PAUSE_NS 100000000u

/* Room for "<scope>.<name>", with the final 0. */
#define FILE_NAME_BYTES (2 * GATHER_NAME_BYTES)

struct files_store {
	struct gather_store base;
	struct io_private_folder shelf;
	/* In memory: */
	char place[STORE_PLACE_BYTES]; /* in which the folder is */
	int folder_fd;                 /* held: nobody can put another folder in its place */
	int life_fd;                   /* this rank's, locked */
	int rank0_fd;                  /* rank 0's; rank 0: -1 */
};

static bool is_in_memory(const struct files_store *store)
{
	return store->base.ops == &gather_store_memory;
}

/* ---- The host's memory ----------------------------------------------------------------------- */

/* Whether it is a folder, no link, and this user's alone: another user may have been first. */
static int check_place(const char *path)
{
	struct stat stat;

	if (lstat(path, &stat))
		return -errno;
	if (!S_ISDIR(stat.st_mode))
		return -ENOTDIR;
	return base_is_own_user(stat.st_uid) && !(stat.st_mode & 077) ? 0 : -EACCES;
}

static int make_place(char path[STORE_PLACE_BYTES], const char *parent)
{
	const int length =
		snprintf(path, STORE_PLACE_BYTES, "%s/ioshape-%u", parent, (unsigned)geteuid());

	if (length >= STORE_PLACE_BYTES)
		return -ENAMETOOLONG;
	if (mkdir(path, 0700) && errno != EEXIST)
		return -errno;
	return check_place(path);
}

int store_find_place(char path[STORE_PLACE_BYTES], const char *given, struct base_error *error)
{
	const char *runtime = secure_getenv("XDG_RUNTIME_DIR");
	int ret = make_place(path, given ? given : "/dev/shm");

	if (ret && !given && runtime && *runtime == '/')
		ret = make_place(path, runtime);
	if (!ret)
		return 0;
	*path = 0;
	return base_fail_with(
		error, ret, "mount a tmpfs at /dev/shm, or remove what another user put there",
		"cannot make a folder of this user's alone in %s or in XDG_RUNTIME_DIR",
		given ? given : "/dev/shm");
}

void gather_identify_place(char id[GATHER_PLACE_BYTES])
{
	char path[STORE_PLACE_BYTES];
	struct stat stat;

	if (!store_find_place(path, NULL, NULL) && !lstat(path, &stat))
		snprintf(id, GATHER_PLACE_BYTES, "%s-%llx-%llx", io_machine_tag(),
			 (unsigned long long)stat.st_dev, (unsigned long long)stat.st_ino);
	else
		snprintf(id, GATHER_PLACE_BYTES, "alone-%016llx",
			 (unsigned long long)base_random());
}

/* ---- Lives ----------------------------------------------------------------------------------- */

/* Locks belong to the open file, not to the process: a process may be several ranks. */
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

/* Whether the file is there; *locked: whether its rank lives. */
static bool look_at_life(int folder_fd, const char *name, bool *locked)
{
	const int fd = open_life(folder_fd, name);

	*locked = fd >= 0 && is_locked(fd);
	if (fd >= 0)
		close(fd);
	return fd >= 0;
}

/* The file is locked before it has its name: one that has its name and is not locked is dead. */
static int begin_life(struct files_store *store)
{
	struct flock lock = { .l_type = F_WRLCK, .l_whence = SEEK_SET };
	char temporary[GATHER_NAME_BYTES], name[GATHER_NAME_BYTES];
	int fd, ret = 0;

	snprintf(temporary, sizeof(temporary), ".%016llx", (unsigned long long)base_random());
	store_name_of(name, LIFE, store->base.config.rank);
	fd = base_own(openat(store->folder_fd, temporary,
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

/* Rank 0 says that it ends, before it removes the folder. Best effort: the lock says the same, a
 * little later. */
static void say_end(const struct files_store *store)
{
	if (store->life_fd >= 0)
		(void)!ftruncate(store->life_fd, 1);
}

static bool rank0_has_ended(const struct files_store *store)
{
	struct stat stat;

	return store->rank0_fd >= 0 &&
	       (!is_locked(store->rank0_fd) || fstat(store->rank0_fd, &stat) || stat.st_size > 0);
}

static bool files_has_ended(struct gather_store *base, uint32_t rank)
{
	const struct files_store *store = (struct files_store *)base;
	char name[GATHER_NAME_BYTES];
	bool locked;

	if (!rank)
		return rank0_has_ended(store);
	store_name_of(name, LIFE, rank);
	/* Without a file the rank has not come yet. */
	return look_at_life(store->folder_fd, name, &locked) && !locked;
}

/* ---- A folder in memory ---------------------------------------------------------------------- */

static int open_folder(const char *path)
{
	const int fd = base_own(open(path, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC));

	return fd < 0 ? -errno : fd;
}

static void leave_memory(struct files_store *store)
{
	base_close(store->life_fd);
	base_close(store->rank0_fd);
	base_close(store->folder_fd);
	store->life_fd = store->rank0_fd = store->folder_fd = -1;
}

struct sweeping {
	const struct files_store *store;
	int place_fd;
};

/* Removes a dead job's folder: no rank makes one while this one holds the place's lock. */
static int sweep_one(void *opaque, const char *name)
{
	const struct sweeping *sweeping = opaque;
	struct io_private_folder shelf = { .owner = geteuid() };
	char path[STORE_PLACE_BYTES + NAME_MAX];
	bool locked;
	int fd;

	if (strncmp(name, MEMORY_MARK, strlen(MEMORY_MARK)) != 0)
		return 0;
	fd = base_above_streams(
		openat(sweeping->place_fd, name, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC));
	if (fd < 0)
		return 0;
	snprintf(path, sizeof(path), "%s/%s", sweeping->store->place, name);
	shelf.path = path;
	look_at_life(fd, RANK0_LIFE, &locked);
	if (!locked)
		io_private_destroy(&shelf);
	close(fd);
	return 0;
}

static int make_folder(struct files_store *store, int place_fd)
{
	const struct io_private_folder place = { .path = store->place, .owner = geteuid() };
	struct sweeping sweeping = { store, place_fd };
	int ret;

	io_private_list(&place, place_fd, sweep_one, &sweeping, NULL);
	if (mkdir(store->shelf.path, 0700))
		return errno == EEXIST ? -EADDRINUSE : -errno;
	ret = store->folder_fd = open_folder(store->shelf.path);
	/* Last: with it the others come. */
	if (ret >= 0)
		ret = begin_life(store);
	if (ret)
		io_private_destroy(&store->shelf);
	return ret;
}

/* Rank 0 makes the folder, and removes those of dead jobs. -EADDRINUSE: a rank 0 that lives has one
 * of this name. */
static int take_folder(struct files_store *store)
{
	const int place_fd = open_folder(store->place);
	int ret = 0;

	if (place_fd < 0)
		return place_fd;
	if (flock(place_fd, LOCK_EX | LOCK_NB))
		ret = errno == EWOULDBLOCK ? -EADDRINUSE : -errno;
	if (!ret)
		ret = make_folder(store, place_fd);
	base_close(place_fd);
	return ret;
}

/* The others come to it: -ENOENT if it is not there yet, -EEXIST if it has had a rank of this
 * number. */
static int join_folder(struct files_store *store)
{
	int ret = store->folder_fd = open_folder(store->shelf.path);

	if (ret < 0)
		return ret;
	store->rank0_fd = base_own(open_life(store->folder_fd, RANK0_LIFE));
	/* Without a rank 0, or with a dead job's: this job's is still to come. */
	if (store->rank0_fd < 0 || rank0_has_ended(store))
		return -ENOENT;
	return begin_life(store);
}

static int fail_taking(const struct files_store *store, int code, struct base_error *error)
{
	if (code == -EADDRINUSE)
		return base_fail_with(
			error, code, "end it, or give this one another token",
			"another group with the same token still runs on this host (%s is "
			"its folder)",
			store->shelf.path);
	return base_fail(error, code, "cannot keep the messages of ranks in memory, in \"%s\"",
			 store->shelf.path);
}

static int fail_joining(const struct files_store *store, int code, struct base_error *error)
{
	if (code == -EEXIST)
		return base_fail_with(
			error, code, "end it, or give this one another token",
			"in %s is another group with the same token, which has or had a "
			"rank %" PRIu32,
			store->shelf.path, store->base.config.rank);
	base_refuse_with(
		error, -ETIMEDOUT,
		"see whether it failed, runs on another host, or uses another version of this "
		"library",
		"rank 0 of the group is not in %s", store->shelf.path);
	base_error_of_rank(error, 0);
	return -ETIMEDOUT;
}

static int enter_memory(struct files_store *store, struct base_error *error)
{
	const struct gather_store_config *config = &store->base.config;
	const uint64_t end_ns = base_now_ns() + base_ms_to_ns(config->deadline_ms);
	uint64_t pause_ns = FIRST_PAUSE_NS;
	int ret;

	for (;;) {
		ret = config->rank ? join_folder(store) : take_folder(store);
		if (!ret)
			return 0;
		leave_memory(store);
		/* An earlier job may be about to end, or rank 0 about to come. */
		if ((!config->rank && ret != -EADDRINUSE) || base_now_ns() >= end_ns)
			break;
		store_sleep_ns(pause_ns);
		pause_ns = MIN(2 * pause_ns, MOST_PAUSE_NS);
	}
	return config->rank ? fail_joining(store, ret, error) : fail_taking(store, ret, error);
}

/* ---- Entering the folder --------------------------------------------------------------------- */

/* Only rank 0 makes it again: another rank that ends late would leave it behind. */
static int enter(struct files_store *store, struct base_error *error)
{
	int fd;

	if (is_in_memory(store))
		return store->folder_fd;
	fd = io_private_enter(&store->shelf, error);
	if (fd == -ENOENT && !store->base.config.rank &&
	    (!mkdir(store->shelf.path, 0700) || errno == EEXIST))
		fd = io_private_enter(&store->shelf, error);
	return fd;
}

static void leave(const struct files_store *store, int fd)
{
	if (!is_in_memory(store) && fd >= 0)
		close(fd);
}

/* A file that is not there, in a folder that is not there: one in memory is held open. */
static bool is_removed(const struct files_store *store, int fd)
{
	struct stat stat;

	return fd == -ENOENT || (is_in_memory(store) && !fstat(fd, &stat) && !stat.st_nlink);
}

static int fail_removed(const struct files_store *store, struct base_error *error)
{
	if (is_in_memory(store) && !rank0_has_ended(store))
		return base_refuse_with(
			error, -ESTALE,
			"keep it while the job runs (RemoveIPC=no in logind.conf), and "
			"start the job again",
			"the folder %s was removed while ranks were using it", store->shelf.path);
	return base_refuse(error, IOSHAPE_E_COORDINATOR,
			   "the folder %s is gone: rank 0 of the group has ended, or the folder "
			   "was removed",
			   store->shelf.path);
}

/* What may pass is out of reach now, and the caller tries anew: an NFS server that is away for a
 * moment, memory that is full. The sentence says what it was. */
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

/* ---- Messages -------------------------------------------------------------------------------- */

static int files_put(struct gather_store *base, const char *scope, const char *name,
		     const void *message, size_t bytes, struct base_error *error)
{
	struct files_store *store = (struct files_store *)base;
	char file[FILE_NAME_BYTES];
	int fd, ret = -ENOENT;

	file_name(file, scope, name);
	/* Rank 0 may have made the folder again. */
	for (int i = 0; i < 2 && ret == -ENOENT; i++) {
		fd = enter(store, error);
		ret = fd < 0 ? fd : io_private_put(&store->shelf, fd, file, message, bytes, error);
		leave(store, fd);
	}
	return ret == -ENOENT ? fail_removed(store, error) : unless_passing(store, ret, error);
}

/* Rank 0 of an earlier job may have taken it away as it ended. */
static int files_restore(struct gather_store *base, const struct store_own *own)
{
	struct files_store *store = (struct files_store *)base;
	char file[FILE_NAME_BYTES];
	int ret, fd = enter(store, NULL);
	struct stat stat;

	file_name(file, own->scope, own->name);
	ret = fd < 0 ? fd : 0;
	if (!ret && fstatat(fd, file, &stat, AT_SYMLINK_NOFOLLOW) && errno == ENOENT)
		ret = io_private_put(&store->shelf, fd, file, own->data, own->bytes, NULL);
	leave(store, fd);
	return ret;
}

static int files_get(struct gather_store *base, const char *scope, const char *name,
		     struct base_buffer *message, struct base_error *error)
{
	struct files_store *store = (struct files_store *)base;
	char file[FILE_NAME_BYTES];
	bool removed;
	uint64_t stamp;
	int fd, ret;

	file_name(file, scope, name);
	fd = enter(store, error);
	ret = fd < 0 ? fd :
		       io_private_get(&store->shelf, fd, file, GATHER_MAX_MESSAGE_BYTES, message,
				      &stamp, error);
	removed = ret == -ENOENT && is_removed(store, fd);
	leave(store, fd);
	if (!ret)
		store_saw(base, stamp);
	if (removed)
		return fail_removed(store, error);
	return ret == -ENOENT ? -EAGAIN : unless_passing(store, ret, error);
}

/* What collect() goes by while it lists the folder. */
struct collection {
	struct files_store *store;
	int folder_fd;
	char begin[FILE_NAME_BYTES + 2]; /* "<scope>.<prefix>-" */
	const bool *have;
	gather_found_fn *found;
	void *user;
	struct base_buffer message;
	struct base_error *error;
	int stopped; /* what found() returned */
};

/* The rank at the end of a name, as store_name_of() writes it. */
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

static int collect_file(void *opaque, const char *name)
{
	struct collection *collection = opaque;
	struct files_store *store = collection->store;
	const size_t length = strlen(collection->begin);
	uint64_t stamp;
	uint32_t rank;
	int ret;

	if (strncmp(name, collection->begin, length) != 0 ||
	    !read_rank(name + length, store->base.config.ranks, &rank) || collection->have[rank])
		return 0;
	ret = io_private_get(&store->shelf, collection->folder_fd, name, GATHER_MAX_MESSAGE_BYTES,
			     &collection->message, &stamp, collection->error);
	if (ret)
		return ret == -ENOENT ? 0 : ret;
	store_saw(&store->base, stamp);
	collection->stopped = collection->found(collection->user, rank, &collection->message);
	return collection->stopped;
}

static int files_collect(struct gather_store *base, const char *scope, const char *prefix,
			 const bool *have, gather_found_fn *found, void *user,
			 struct base_error *error)
{
	struct files_store *store = (struct files_store *)base;
	struct collection collection = {
		.store = store, .have = have, .found = found, .user = user, .error = error
	};
	bool removed;
	int ret;

	snprintf(collection.begin, sizeof(collection.begin), "%s.%s-", scope, prefix);
	ret = collection.folder_fd = enter(store, error);
	removed = is_removed(store, collection.folder_fd);
	if (ret >= 0 && !removed)
		ret = io_private_list(&store->shelf, collection.folder_fd, collect_file,
				      &collection, error);
	leave(store, collection.folder_fd);
	base_buffer_free(&collection.message);
	if (collection.stopped)
		return collection.stopped;
	return removed || ret == -ENOENT ? fail_removed(store, error) :
					   unless_passing(store, ret, error);
}

/* ---- Ending ---------------------------------------------------------------------------------- */

struct removal {
	int folder_fd;
	char begin[GATHER_NAME_BYTES + 1];
};

static int remove_file(void *opaque, const char *name)
{
	const struct removal *removal = opaque;

	if (!strncmp(name, removal->begin, strlen(removal->begin)))
		unlinkat(removal->folder_fd, name, 0);
	return 0;
}

static void files_drop(struct gather_store *base, const char *scope)
{
	struct files_store *store = (struct files_store *)base;
	struct removal removal;

	snprintf(removal.begin, sizeof(removal.begin), "%s.", scope);
	removal.folder_fd = is_in_memory(store) ? store->folder_fd :
						  io_private_enter(&store->shelf, NULL);
	if (removal.folder_fd >= 0)
		io_private_list(&store->shelf, removal.folder_fd, remove_file, &removal, NULL);
	leave(store, removal.folder_fd);
}

/* Rank 0 in memory: while its life is locked, no rank takes the folder for a dead job's. */
static void files_close(struct gather_store *base)
{
	struct files_store *store = (struct files_store *)base;
	const bool entered = is_in_memory(store) ? store->life_fd >= 0 : store->shelf.path != NULL;

	if (!base->config.rank && entered) {
		say_end(store);
		io_private_destroy(&store->shelf);
	}
	leave_memory(store);
	io_private_close(&store->shelf);
}

/* ---- Opening --------------------------------------------------------------------------------- */

static struct files_store *new_store(struct gather_store **out, const struct gather_store_ops *ops,
				     const struct gather_store_config *config,
				     struct base_error *error)
{
	struct files_store *store = store_new(sizeof(*store), ops, config, error);

	if (!store)
		return NULL;
	store->folder_fd = store->life_fd = store->rank0_fd = -1;
	*out = &store->base;
	return store;
}

static int open_in_directory(struct gather_store **out, const struct gather_store_config *config,
			     struct base_error *error)
{
	struct files_store *store = new_store(out, &gather_store_files, config, error);
	char *path;
	int ret;

	if (!store)
		return -ENOMEM;
	if (asprintf(&path, "%s/" DIRECTORY_MARK "%s", config->directory, config->name) < 0)
		return base_no_memory(error, "a path", strlen(config->directory));
	ret = io_private_open(&store->shelf, path, error);
	free(path);
	if (!ret && !config->rank)
		io_private_destroy_old(&store->shelf, config->directory, DIRECTORY_MARK,
				       FORGOTTEN_AFTER_S);
	return ret;
}

static int open_in_memory(struct gather_store **out, const struct gather_store_config *config,
			  struct base_error *error)
{
	struct files_store *store = new_store(out, &gather_store_memory, config, error);
	int ret;

	if (!store)
		return -ENOMEM;
	ret = store_find_place(store->place, config->memory, error);
	if (ret)
		return ret;
	store->shelf.owner = geteuid();
	if (asprintf(&store->shelf.path, "%s/" MEMORY_MARK "%s", store->place, config->name) < 0) {
		store->shelf.path = NULL;
		return base_no_memory(error, "a path", strlen(store->place));
	}
	return enter_memory(store, error);
}

const struct gather_store_ops gather_store_files = {
	.id = "files",
	.wait_part = 1,
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

/* A look costs a few microseconds there, and a save of small states takes milliseconds. */
const struct gather_store_ops gather_store_memory = {
	.id = "host",
	.wait_part = 8,
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
