/* SPDX-License-Identifier: Apache-2.0 */
/* The file of a pool: opening it where other users may put files; its head, its records and locks
 * on its bytes; and the futex word by which waiters are woken. */
#define _GNU_SOURCE
#include "slots/local.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <limits.h>
#include <linux/futex.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#define LOOK_AGAIN_NS UINT64_C(500000000) /* at the name: is it still this file's? */
#define TRIES 100                         /* to open a file that others make or remove */
#define PAUSE_NS 1000000
#define MOST_TIME_NS (UINT64_C(1) << 62) /* the wall clock gets there in the year 2116 */

#define LONGEST_LEASE_NS (UINT64_C(600) * 1000000000)

#define PAGE_BYTES 4096u
/* Without a word that others can change, a waiter looks so often. */
#define BLIND_MS 20u

/* Bytes that are locked, beside those of requests. */
#define PRESENT LOCAL_LOCKS
#define MAKER (LOCAL_LOCKS + 1)

_Static_assert(sizeof(struct slots_file_head) == 32 + SLOTS_NAME_BYTES, "heads have holes");
_Static_assert(sizeof(struct slots_file_record) == 256, "records have holes");

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

int local_unreachable(const struct local_pool *pool, const char *what, int code,
		      struct base_error *error)
{
	return base_refuse_with(
		error, IOSHAPE_E_COORDINATOR,
		code == -EFBIG ? "raise this process's limit of file sizes (ulimit -f)" : "",
		"cannot %s the pool's file \"%s/%s\": %s", what, pool->folder, pool->name,
		strerror(-code));
}

/* ---- Records --------------------------------------------------------------------------------- */

int local_write(const struct local_pool *pool, uint64_t at, const void *data, size_t bytes)
{
	ssize_t done;

	/* Beyond the limit of file sizes the kernel would end the process, by a signal. */
	if (at + bytes > pool->largest_bytes)
		return -EFBIG;
	done = pwrite(pool->fd, data, bytes, (off_t)at);
	if (done < 0)
		return -errno;
	return (size_t)done == bytes ? 0 : -ENOSPC;
}

static uint64_t offset_of(uint32_t number)
{
	return LOCAL_HEAD_BYTES + (uint64_t)number * sizeof(struct slots_file_record);
}

int local_write_record(const struct local_pool *pool, uint32_t number,
		       const struct slots_file_record *record)
{
	return local_write(pool, offset_of(number), record,
			   offsetof(struct slots_file_record, unused));
}

static void end_text(char *text, size_t room)
{
	text[room - 1] = 0;
	for (; *text; text++) {
		if (*text < ' ' || *text > '~')
			*text = '?';
	}
}

void local_read_record(const struct local_pool *pool, uint32_t number,
		       struct slots_file_record *record)
{
	const ssize_t got = pread(pool->fd, record, sizeof(*record), (off_t)offset_of(number));
	const size_t bytes = (size_t)MAX(got, 0);

	memset((uint8_t *)record + bytes, 0, sizeof(*record) - bytes);
	end_text(record->id, sizeof(record->id));
	end_text(record->job, sizeof(record->job));
	end_text(record->node, sizeof(record->node));
	if (record->until_ns > base_now_ns() + LONGEST_LEASE_NS)
		record->until_ns = 0;
}

/* ---- Locks ----------------------------------------------------------------------------------- */

int local_lock(int fd, short type, off_t at, off_t bytes)
{
	struct flock lock = { .l_type = type, .l_whence = SEEK_SET, .l_start = at, .l_len = bytes };

	if (!fcntl(fd, F_OFD_SETLK, &lock))
		return 0;
	return errno == EACCES ? -EAGAIN : -errno;
}

bool local_find_lock(struct local_pool *pool, off_t from, off_t to, struct flock *lock)
{
	*lock = (struct flock){
		.l_type = F_WRLCK, .l_whence = SEEK_SET, .l_start = from, .l_len = to - from
	};
	return from < to && pool->finds++ < LOCAL_MOST_FINDS &&
	       !fcntl(pool->fd, F_OFD_GETLK, lock) && lock->l_type != F_UNLCK;
}

/* ---- Waking ---------------------------------------------------------------------------------- */

/* The word counts what may have freed a slot. It is never read or written through memory: another
 * user may cut the file short, and then a load raises SIGBUS, where futex() and pread() only fail.
 */

static uint32_t *map(int flags, int fd, uint32_t *at)
{
	const size_t word = offsetof(struct slots_file_head, wake) / sizeof(uint32_t);
	uint32_t *page = mmap(at ? at - word : NULL, PAGE_BYTES, PROT_READ | PROT_WRITE,
			      MAP_SHARED | flags, fd, 0);

	if (page == MAP_FAILED)
		return NULL;
	/* A child that mapped the file would keep its parent's locks. */
	madvise(page, PAGE_BYTES, MADV_DONTFORK);
	return page + word;
}

/* Uses the word in the file from now on, if the file can be mapped. */
static void map_word(struct local_pool *pool)
{
	/* In the place of the other one: a thread that waits may be about to use it. If that fails
	 * futex() fails, too, and waiters look by themselves. */
	atomic_store(&pool->mapped, true);
	if (!map(MAP_FIXED, pool->fd, pool->word))
		errno = 0;
}

void local_wake(struct local_pool *pool, uint32_t bits)
{
	static uint32_t unused;

	/* The kernel adds to the word; nobody waits for the other one. */
	syscall(SYS_futex, &unused, FUTEX_WAKE_OP, 1, (void *)0, pool->word,
		FUTEX_OP(FUTEX_OP_ADD, 1, FUTEX_OP_CMP_LT, 0));
	syscall(SYS_futex, pool->word, FUTEX_WAKE_BITSET, INT_MAX, NULL, NULL, bits);
}

static uint32_t value_of(struct local_pool *pool)
{
	uint32_t value = 0;

	if (!atomic_load(&pool->mapped))
		return __atomic_load_n(pool->word, __ATOMIC_RELAXED);
	pthread_mutex_lock(&pool->lock);
	if (pread(pool->fd, &value, sizeof(value), offsetof(struct slots_file_head, wake)) < 0)
		errno = 0;
	pthread_mutex_unlock(&pool->lock);
	return value;
}

static void nap(uint64_t ns)
{
	const struct timespec pause = { .tv_nsec = (long)MIN(ns, 999999999u) };

	nanosleep(&pause, NULL);
}

void local_sleep(struct local_pool *pool, uint32_t bits, uint32_t timeout_ms)
{
	const uint64_t until_ns = base_now_ns() + base_ms_to_ns(timeout_ms);
	const struct timespec until = { .tv_sec = (time_t)(until_ns / 1000000000),
					.tv_nsec = (long)(until_ns % 1000000000) };

	if (syscall(SYS_futex, pool->word, FUTEX_WAIT_BITSET, pool->seen, &until, NULL, bits) &&
	    errno == EFAULT)
		nap(base_ms_to_ns(MIN(timeout_ms, BLIND_MS)));
	/* All that happens from here on ends the next sleep. */
	pool->seen = value_of(pool);
}

/* ---- The head -------------------------------------------------------------------------------- */

static bool is_head(const struct slots_file_head *head)
{
	return !memcmp(head->magic, LOCAL_MAGIC, sizeof(head->magic)) &&
	       head->version == LOCAL_VERSION && head->base_ns <= MOST_TIME_NS &&
	       memchr(head->pool, 0, sizeof(head->pool));
}

static bool read_head(int fd, struct slots_file_head *head)
{
	return pread(fd, head, sizeof(*head), 0) == sizeof(*head) && is_head(head);
}

static uint64_t wall_ns(void)
{
	struct timespec now;

	clock_gettime(CLOCK_REALTIME, &now);
	return (uint64_t)MAX(now.tv_sec, 0) * UINT64_C(1000000000) + (uint64_t)now.tv_nsec;
}

/* With the lock of the maker. */
static int write_head(const struct local_pool *pool, struct slots_file_head *head)
{
	*head = (struct slots_file_head){ .magic = LOCAL_MAGIC, .version = LOCAL_VERSION };
	head->base_ns = MAX(wall_ns(), base_now_ns()) - base_now_ns();
	memcpy(head->pool, pool->config.pool, sizeof(head->pool));
	return local_write(pool, 0, head, sizeof(*head));
}

static void pause_briefly(void)
{
	const struct timespec pause = { .tv_nsec = PAUSE_NS };

	nanosleep(&pause, NULL);
}

/* Reads the head; writes one where there is none, or one that makes no sense. */
static int read_or_make_head(const struct local_pool *pool, struct slots_file_head *head,
			     struct base_error *error)
{
	struct stat stat;
	int ret = -EAGAIN;

	for (int i = 0; i < TRIES && ret == -EAGAIN; i++) {
		if (read_head(pool->fd, head) && !strcmp(head->pool, pool->config.pool))
			return 0;
		if (i)
			pause_briefly();
		ret = local_lock(pool->fd, F_WRLCK, MAKER, 1);
	}
	if (ret)
		return local_unreachable(pool, "lock", ret, error);
	if (!read_head(pool->fd, head) || strcmp(head->pool, pool->config.pool) != 0) {
		if (!fstat(pool->fd, &stat) && stat.st_size)
			base_log(&pool->config.log, IOSHAPE_LOG_WARNING,
				 "the pool's file \"%s/%s\" was damaged; it begins anew",
				 pool->folder, pool->name);
		ret = write_head(pool, head);
	}
	local_lock(pool->fd, F_UNLCK, MAKER, 1);
	return ret ? local_unreachable(pool, "write", ret, error) : 0;
}

/* ---- Opening --------------------------------------------------------------------------------- */

static int refuse(const struct local_pool *pool, const char *what, struct base_error *error)
{
	return base_refuse_with(error, IOSHAPE_E_COORDINATOR, "have it removed",
				"cannot use the pool's file \"%s/%s\": it is %s", pool->folder,
				pool->name, what);
}

/* Another user can give a file of ours a second name where the kernel does not protect hard links.
 */
static int check_kind(const struct local_pool *pool, const struct stat *stat,
		      struct base_error *error)
{
	if (!S_ISREG(stat->st_mode))
		return refuse(pool, "no regular file", error);
	if (stat->st_nlink > 1)
		return refuse(pool, "a link to another file", error);
	return stat->st_nlink ? 0 : -EAGAIN;
}

/* A file that is not for everybody and holds something else was moved here: it stays as it is. */
static bool is_a_pools(int fd, const struct stat *stat)
{
	struct slots_file_head head;

	return (stat->st_mode & 0666) == 0666 || !stat->st_size || read_head(fd, &head);
}

static int check_opened(const struct local_pool *pool, int fd, struct stat *stat,
			struct base_error *error)
{
	int ret = fstat(fd, stat) ? -EAGAIN : check_kind(pool, stat, error);

	if (!ret && !is_a_pools(fd, stat))
		ret = refuse(pool, "another program's file", error);
	return ret;
}

static bool has_its_name(const struct local_pool *pool)
{
	struct stat stat;

	return !fstatat(pool->folder_fd, pool->name, &stat, AT_SYMLINK_NOFOLLOW) &&
	       stat.st_dev == pool->dev && stat.st_ino == pool->ino;
}

static int open_name(const struct local_pool *pool, int flags)
{
	return base_own(openat(pool->folder_fd, pool->name,
			       O_RDWR | O_NOFOLLOW | O_NONBLOCK | O_NOCTTY | O_CLOEXEC | flags,
			       0666));
}

/* Opens what lies under the name, or creates it. -EAGAIN: it was there, and then it was not. */
static int open_or_create(struct local_pool *pool, struct base_error *error)
{
	struct stat stat;
	bool there = !fstatat(pool->folder_fd, pool->name, &stat, AT_SYMLINK_NOFOLLOW);
	int fd, ret = there ? check_kind(pool, &stat, error) : 0;

	if (ret)
		return ret;
	/* Sticky folders refuse O_CREAT for files of other users. */
	fd = open_name(pool, there ? 0 : O_CREAT | O_EXCL);
	if (fd < 0 && (errno == EEXIST || errno == ENOENT) && (there || errno == EEXIST))
		return -EAGAIN;
	if (fd < 0)
		return local_unreachable(pool, there ? "open" : "create", -errno, error);
	ret = check_opened(pool, fd, &stat, error);
	if (ret) {
		base_close(fd);
		return ret;
	}
	/* For all users, whatever the umask is: the file is new, or its maker died before that. */
	if (base_is_own_user(stat.st_uid) && (stat.st_mode & 0666) != 0666 && fchmod(fd, 0666))
		errno = 0;
	/* Each read would be slower otherwise. Only the owner may, and it makes no other
	 * difference. */
	if (fcntl(fd, F_SETFL, O_NOATIME))
		errno = 0;
	pool->fd = fd;
	pool->dev = stat.st_dev;
	pool->ino = stat.st_ino;
	return 0;
}

/* A file that its last user is about to remove is let go of. */
static int try_to_open(struct local_pool *pool, struct base_error *error)
{
	int ret = open_or_create(pool, error);

	if (ret)
		return ret;
	ret = local_lock(pool->fd, F_RDLCK, PRESENT, 1);
	if (ret && ret != -EAGAIN)
		local_unreachable(pool, "lock", ret, error);
	else if (!ret && !has_its_name(pool))
		ret = -EAGAIN;
	if (!ret)
		return 0;
	base_close(pool->fd);
	pool->fd = -1;
	return ret == -EAGAIN ? ret : IOSHAPE_E_COORDINATOR;
}

static int open_file(struct local_pool *pool, struct slots_file_head *head,
		     struct base_error *error)
{
	int ret = -EAGAIN;

	if (pool->folder_fd < 0)
		pool->folder_fd = base_own(open(pool->folder, O_PATH | O_DIRECTORY | O_CLOEXEC));
	if (pool->folder_fd < 0)
		return base_refuse(error, IOSHAPE_E_COORDINATOR,
				   "cannot open the folder \"%s\", where the pools of this host "
				   "are: %s",
				   pool->folder, strerror(errno));
	for (int i = 0; i < TRIES && ret == -EAGAIN; i++) {
		if (i)
			pause_briefly();
		ret = try_to_open(pool, error);
	}
	if (ret == -EAGAIN)
		return base_refuse_with(
			error, IOSHAPE_E_COORDINATOR,
			"find that process, in /proc/locks, and end it",
			"cannot use the pool's file \"%s/%s\": another process keeps it "
			"locked, or removes it again and again",
			pool->folder, pool->name);
	if (!ret)
		ret = read_or_make_head(pool, head, error);
	if (ret && pool->fd >= 0) {
		base_close(pool->fd);
		pool->fd = -1;
	}
	if (ret)
		return ret;
	pool->base_ns = head->base_ns;
	map_word(pool);
	return 0;
}

int local_file_ready(struct local_pool *pool, struct slots_file_head *head,
		     struct base_error *error)
{
	const uint64_t now = base_now_ns();
	int ret;

	pool->now_ns = now;
	if (now - pool->looked_ns >= LOOK_AGAIN_NS) {
		pool->looked_ns = now;
		/* Asking each time would cost as much as a lock. */
		pool->largest_bytes = base_largest_file();
		if (pool->fd >= 0 && !has_its_name(pool)) {
			base_close(pool->fd);
			pool->fd = -1;
			return -ESTALE;
		}
	}
	if (pool->fd < 0)
		return open_file(pool, head, error);
	ret = read_or_make_head(pool, head, error);
	pool->base_ns = head->base_ns;
	return ret;
}

int local_file_again(const struct local_pool *pool)
{
	struct stat stat;
	const int fd = open_name(pool, 0);

	if (fd < 0)
		return errno == ENOENT ? -EAGAIN : -errno;
	if (!fstat(fd, &stat) && stat.st_dev == pool->dev && stat.st_ino == pool->ino)
		return fd;
	base_close(fd);
	return -EAGAIN;
}

int local_file_init(struct local_pool *pool)
{
	pool->folder_fd = pool->fd = -1;
	pool->word = map(MAP_ANONYMOUS, -1, NULL);
	return pool->word ? 0 : -ENOMEM;
}

void local_file_close(struct local_pool *pool)
{
	const size_t word = offsetof(struct slots_file_head, wake) / sizeof(uint32_t);

	if (pool->fd >= 0 && !local_lock(pool->fd, F_WRLCK, PRESENT, 1) && has_its_name(pool))
		unlinkat(pool->folder_fd, pool->name, 0);
	base_close(pool->fd);
	base_close(pool->folder_fd);
	munmap(pool->word - word, PAGE_BYTES);
}
