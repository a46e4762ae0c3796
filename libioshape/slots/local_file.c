/* SPDX-License-Identifier: Apache-2.0 */
/* The files of this process, each once; and having one to oneself. */
#define _GNU_SOURCE
#include "slots/local.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <time.h>
#include <unistd.h>

#define LOOK_AGAIN_NS UINT64_C(500000000) /* at the name: does it still stand for the file? */
#define FIRST_PAUSE_NS 20000
#define LONGEST_PAUSE_NS 2000000
#define PATIENCE_NS UINT64_C(1000000000) /* for who changes the state: it takes microseconds */
#define IMPATIENCE_NS UINT64_C(5000000)  /* right after somebody was waited for in vain */
#define TRIES 4                          /* to open a file that others are removing */

static pthread_mutex_t files_lock = PTHREAD_MUTEX_INITIALIZER;
static struct local_file *files;

void local_files_hold(void)
{
	pthread_mutex_lock(&files_lock);
}

void local_files_go_on(void)
{
	pthread_mutex_unlock(&files_lock);
}

/* A forked child has nothing to do with the pools of its parent. */
static void forget_files(void)
{
	files = NULL;
	local_files_go_on();
}

static void expect_forks(void)
{
	pthread_atfork(local_files_hold, local_files_go_on, forget_files);
}

struct local_file *local_files_find(const struct stat *stat)
{
	struct local_file *file = files;

	while (file && (file->fd < 0 || file->dev != stat->st_dev || file->ino != stat->st_ino))
		file = file->next;
	return file;
}

void local_file_name(char name[LOCAL_FILE_NAME_BYTES], const char *pool)
{
	char plain[81];
	size_t bytes = strnlen(pool, sizeof(plain) - 1);

	for (size_t i = 0; i < bytes; i++) {
		const char c = pool[i];
		bool fine = (c >= '0' && c <= '9') || (c >= 'a' && c <= 'z') ||
			    (c >= 'A' && c <= 'Z') || c == '.' || c == '_' || c == '-';

		plain[i] = fine ? c : '_';
	}
	plain[bytes] = 0;
	snprintf(name, LOCAL_FILE_NAME_BYTES, "ioshape-%s-%016" PRIx64 ".v%u.slots", plain,
		 base_hash_text(pool), LOCAL_VERSION);
}

/* ---- The list of files ----------------------------------------------------------------------- */

static void free_file(struct local_file *file)
{
	base_close(file->fd);
	base_close(file->folder_fd);
	pthread_mutex_destroy(&file->lock);
	free(file->table);
	free(file);
}

static struct local_file *make_file(const struct local_pool *pool, const char *folder)
{
	struct local_file *file = calloc(1, sizeof(*file));

	if (!file)
		return NULL;
	file->fd = file->folder_fd = -1;
	file->references = 1;
	file->log = pool->config.log;
	pthread_mutex_init(&file->lock, NULL);
	local_file_name(file->name, pool->config.pool);
	snprintf(file->folder, sizeof(file->folder), "%s", folder);
	snprintf(file->pool, sizeof(file->pool), "%s", pool->config.pool);
	file->table = calloc(1, sizeof(*file->table));
	if (!file->table) {
		free_file(file);
		return NULL;
	}
	return file;
}

static int open_folder(struct local_file *file, struct base_error *error)
{
	struct stat stat;

	file->folder_fd = base_own(open(file->folder, O_PATH | O_DIRECTORY | O_CLOEXEC));
	if (file->folder_fd < 0 || fstat(file->folder_fd, &stat))
		return base_refuse(
			error, IOSHAPE_E_COORDINATOR,
			"the folder \"%s\", where processes queue for slots, cannot be opened (%s)",
			file->folder, strerror(errno));
	file->folder_dev = stat.st_dev;
	file->folder_ino = stat.st_ino;
	return 0;
}

static struct local_file *find_same(const struct local_file *wanted)
{
	struct local_file *file = files;

	while (file && (file->folder_dev != wanted->folder_dev ||
			file->folder_ino != wanted->folder_ino || strcmp(file->pool, wanted->pool)))
		file = file->next;
	return file;
}

const char *local_folder(const struct local_pool *pool)
{
	if (pool->folder)
		return pool->folder;
	return access("/dev/shm", W_OK | X_OK) ? "/tmp" : "/dev/shm";
}

int local_file_get(struct local_file **out, const struct local_pool *pool, struct base_error *error)
{
	static pthread_once_t once = PTHREAD_ONCE_INIT;
	struct local_file *file, *same;
	int ret;

	*out = NULL;
	pthread_once(&once, expect_forks);
	file = make_file(pool, local_folder(pool));
	if (!file)
		return base_no_memory(error, "a pool's table", sizeof(struct local_table));
	ret = open_folder(file, error);
	if (ret) {
		free_file(file);
		return ret;
	}
	local_files_hold();
	same = find_same(file);
	if (same) {
		same->references++;
	} else {
		file->next = files;
		files = file;
	}
	local_files_go_on();
	if (same)
		free_file(file);
	*out = same ? same : file;
	return 0;
}

bool local_file_is_last(const struct local_file *file)
{
	bool last;

	local_files_hold();
	last = file->references == 1;
	local_files_go_on();
	return last;
}

void local_file_put(struct local_file *file)
{
	struct local_file **link = &files;
	bool last;

	if (!file)
		return;
	local_files_hold();
	last = !--file->references;
	while (*link && *link != file)
		link = &(*link)->next;
	if (last) {
		if (*link)
			*link = file->next;
		free_file(file);
	}
	local_files_go_on();
}

/* ---- Opening --------------------------------------------------------------------------------- */

static void close_file(struct local_file *file)
{
	local_files_hold();
	base_close(file->fd);
	file->fd = -1;
	local_files_go_on();
	memset(file->own, 0, sizeof(file->own));
}

/* Whether the name stands for the file that is open. */
static bool still_there(const struct local_file *file)
{
	struct stat stat;

	return !fstatat(file->folder_fd, file->name, &stat, AT_SYMLINK_NOFOLLOW) &&
	       stat.st_dev == file->dev && stat.st_ino == file->ino;
}

static int refuse(const struct local_file *file, const char *what, struct base_error *error)
{
	return base_refuse(
		error, IOSHAPE_E_COORDINATOR,
		"\"%s/%s\" is %s: somebody has put it in the place of the pool's file" BASE_REMEDY
		"have it removed",
		file->folder, file->name, what);
}

/*
 * Before it is opened: to close another file of this process's would drop the locks that it has
 * there. Anybody may give a file of anybody's a second name where the kernel does not protect
 * hard links.
 */
static int check_kind(const struct local_file *file, const struct stat *stat,
		      struct base_error *error)
{
	if (!S_ISREG(stat->st_mode))
		return refuse(file, "no regular file", error);
	if (stat->st_nlink > 1 || local_files_find(stat))
		return refuse(file, "a link to another file", error);
	return stat->st_nlink ? 0 : -EAGAIN;
}

/* One that is not for everybody and holds something else was moved here: it is not written to. */
static bool looks_like_a_pools(int fd, const struct stat *stat)
{
	struct local_head head;

	return (stat->st_mode & 0666) == 0666 || !stat->st_size || local_read_head(fd, &head);
}

static int check_opened(const struct local_file *file, int fd, struct stat *stat,
			struct base_error *error)
{
	int ret = fstat(fd, stat) ? -EAGAIN : check_kind(file, stat, error);

	if (!ret && !looks_like_a_pools(fd, stat))
		ret = refuse(file, "another program's file", error);
	return ret;
}

/* Opens what lies under the name, or creates it. -errno; -EAGAIN: it was there, then not. */
static int open_or_create(struct local_file *file, struct base_error *error)
{
	struct stat stat;
	bool there = !fstatat(file->folder_fd, file->name, &stat, AT_SYMLINK_NOFOLLOW);
	int fd, ret = there ? check_kind(file, &stat, error) : 0;

	if (ret)
		return ret;
	/* Never creating what is there: sticky folders refuse that for files of others. */
	fd = base_own(openat(file->folder_fd, file->name,
			     O_RDWR | O_NOFOLLOW | O_NONBLOCK | O_NOCTTY | O_CLOEXEC |
				     (there ? 0 : O_CREAT | O_EXCL),
			     0666));
	if (fd < 0 && (errno == EEXIST || errno == ENOENT) && (there || errno == EEXIST))
		return -EAGAIN;
	if (fd < 0)
		return base_refuse(error, IOSHAPE_E_COORDINATOR,
				   "the pool's file \"%s/%s\" cannot be %s (%s)", file->folder,
				   file->name, there ? "opened" : "created", strerror(errno));
	ret = check_opened(file, fd, &stat, error);
	if (ret) {
		base_close(fd);
		return ret;
	}
	/* For everybody, whatever the umask: it is new, or its maker died before it came to that.
	 */
	if (stat.st_uid == geteuid() && (stat.st_mode & 0666) != 0666 && fchmod(fd, 0666))
		errno = 0;
	/* Saves a little with every call; only owners may. */
	if (fcntl(fd, F_SETFL, O_NOATIME))
		errno = 0;
	file->fd = fd;
	file->dev = stat.st_dev;
	file->ino = stat.st_ino;
	file->opened++;
	return 0;
}

/* ---- Having it to oneself -------------------------------------------------------------------- */

/* Somebody may have been stopped in the middle, or mean it: it is not waited for without end. */
static int wait_for_lock(struct local_file *file, struct base_error *error)
{
	const uint64_t began = base_now_ns();
	const uint64_t patience = began < file->impatient_until_ns ? IMPATIENCE_NS : PATIENCE_NS;
	struct timespec pause = { .tv_nsec = FIRST_PAUSE_NS };
	int ret;

	do {
		nanosleep(&pause, NULL);
		pause.tv_nsec = MIN(pause.tv_nsec * 3 / 2, LONGEST_PAUSE_NS);
		ret = local_lock(file->fd);
		if (!ret)
			return 0;
	} while (ret == -EAGAIN && base_now_ns() - began < patience);
	if (ret != -EAGAIN)
		return base_refuse(error, IOSHAPE_E_COORDINATOR,
				   "the pool's file \"%s/%s\" cannot be locked (%s)", file->folder,
				   file->name, strerror(-ret));
	file->impatient_until_ns = base_now_ns() + PATIENCE_NS;
	return base_refuse(error, IOSHAPE_E_COORDINATOR,
			   "the pool's file \"%s/%s\" is kept locked by process %d (0: one that "
			   "cannot be seen from here)" BASE_REMEDY "continue or end it",
			   file->folder, file->name, (int)local_locker(file));
}

/* With the lock held. 0, -EAGAIN: it is another file by now, or IOSHAPE_E_COORDINATOR. */
static int read_table(struct local_file *file, struct base_error *error)
{
	const int found = local_read(file->table, file->fd, file->pool);

	if (found < 0)
		return base_refuse(error, IOSHAPE_E_COORDINATOR,
				   "the pool's file \"%s/%s\" cannot be read (%s)", file->folder,
				   file->name, strerror(-found));
	if (found == LOCAL_REMOVED && !still_there(file))
		return -EAGAIN;
	if (found == LOCAL_DAMAGED || found == LOCAL_RECORD_DAMAGED)
		base_log(&file->log, IOSHAPE_LOG_WARNING,
			 "the pool's file \"%s/%s\" was damaged; %s", file->folder, file->name,
			 found == LOCAL_DAMAGED ? "the pool begins empty" :
						  "members that made no sense were dropped");
	if (found != LOCAL_FOUND && found != LOCAL_RECORD_DAMAGED)
		local_clear(file->table, file->pool);
	return 0;
}

static int try_to_enter(struct local_file *file, struct base_error *error)
{
	const uint64_t now = base_now_ns();
	int ret = 0;

	if (file->fd >= 0 && now - file->looked_ns >= LOOK_AGAIN_NS) {
		if (!still_there(file))
			close_file(file);
		file->looked_ns = now;
	}
	if (file->fd < 0) {
		local_files_hold();
		ret = open_or_create(file, error);
		local_files_go_on();
	}
	if (ret)
		return ret;
	if (local_lock(file->fd))
		ret = wait_for_lock(file, error);
	if (ret)
		return ret;
	ret = read_table(file, error);
	if (ret == -EAGAIN)
		close_file(file); /* the lock with it */
	else if (ret)
		flock(file->fd, LOCK_UN);
	return ret;
}

int local_enter(struct local_file *file, struct base_error *error)
{
	int ret = -EAGAIN;

	pthread_mutex_lock(&file->lock);
	for (int i = 0; i < TRIES && ret == -EAGAIN; i++)
		ret = try_to_enter(file, error);
	if (ret == -EAGAIN)
		ret = base_refuse(
			error, IOSHAPE_E_COORDINATOR,
			"the pool's file \"%s/%s\" comes and goes: somebody keeps removing it",
			file->folder, file->name);
	if (ret)
		pthread_mutex_unlock(&file->lock);
	return ret;
}

int local_leave(struct local_file *file, struct base_error *error)
{
	const struct local_table *table = file->table;
	int ret = local_write(file->table, file->fd);

	flock(file->fd, LOCK_UN);
	if (!ret)
		local_wake(table->woken, table->woken_count);
	pthread_mutex_unlock(&file->lock);
	if (ret)
		return base_refuse(error, IOSHAPE_E_COORDINATOR,
				   "the pool's file \"%s/%s\" cannot be written (%s)" BASE_REMEDY
				   "%s",
				   file->folder, file->name, strerror(-ret),
				   ret == -EFBIG ? "raise this process's limit of file sizes "
						   "(ulimit -f)" :
						   "");
	return 0;
}

void local_retire(struct local_file *file)
{
	/* Those that have it open see that it goes, and look for the name again. Where it cannot be
	 * removed, being another user's, whoever opens it next begins with an empty pool in it. */
	if (!local_write_gone(file->fd, &file->table->image.head))
		unlinkat(file->folder_fd, file->name, 0);
	close_file(file);
	pthread_mutex_unlock(&file->lock);
}
