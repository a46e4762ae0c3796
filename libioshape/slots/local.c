/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The coordinator for the processes of one host; local.h describes the file of a pool. The first
 * half handles the file: opening it where other users may put files, its head and records, locks on
 * its bytes, and the futex word that wakes waiters. The second half decides which request is next
 * and which slots are free.
 */
#define _GNU_SOURCE
#include "slots/local.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <limits.h>
#include <linux/futex.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

/* Pause between two checks that the name still is this file's. */
#define LOOK_AGAIN_NS UINT64_C(500000000)
/* Attempts to open a file that other processes make or remove. */
#define TRIES 100
#define PAUSE_NS 1000000
#define MOST_TIME_NS (UINT64_C(1) << 62) /* a wall clock gets there in the year 2116 */

#define LONGEST_LEASE_NS (UINT64_C(600) * 1000000000)

#define PAGE_BYTES 4096u
/* A waiter polls this often if the futex word in the file cannot be used. */
#define BLIND_MS 20u

/* Bytes that are locked, other than those of requests. */
#define PRESENT LOCAL_LOCKS
#define MAKER (LOCAL_LOCKS + 1)

/* The first waiter checks this often whether a holder has died; later waiters check less often. */
#define LOOK_MS 20u
#define SLOWEST_LOOK_MS 200u /* several times in LOCAL_LOOK_NS */

/* Offsets of locks by their meaning. Lines are so far apart that tickets never reach the next
 * one. */
#define HOLDER(number) (LOCAL_LOCKS + 16 + (off_t)(number))
#define URGENT_LINE (2 * LOCAL_LOCKS)
#define LINE (3 * LOCAL_LOCKS)
#define SMALL_LINE (4 * LOCAL_LOCKS)
#define LINE_TICKETS LOCAL_LOCKS

/* Observations of another request's record, for the decision whether its owner is alive. */
struct local_watch {
	uint64_t until_ns;  /* value of until_ns in the record */
	uint64_t since_ns;  /* time since when the record has had that value */
	uint64_t looked_ns; /* time of the latest look */
};

/* A request of this process that holds a slot or waits. */
struct local_member {
	struct local_member *next;
	struct slots_file_record record;
	int fd; /* owns the locks of the request */
	bool holding, small;
	uint32_t target_groups; /* groups of storage targets, as asked for */
	uint32_t holder;        /* number of its first holder */
	uint32_t given;         /* slots held; 0: small request beside the slots */
	uint64_t ticket;        /* ticket of a waiter */
};

struct local_pool {
	struct slots_config config;
	char folder[LOCAL_FOLDER_BYTES];
	char name[LOCAL_FILE_NAME_BYTES];
	struct slots_file_record record; /* members that all requests of this process share */

	pthread_mutex_t lock; /* protects all members below, except those used by wait() */
	int folder_fd, fd;    /* -1: not open */
	dev_t dev;
	ino_t ino;
	uint64_t now_ns;        /* when the current call began */
	uint64_t looked_ns;     /* when the name was last checked to be this file's */
	uint64_t largest_bytes; /* limit of this process for the size of a file */
	uint64_t base_ns;       /* wall clock minus monotonic clock, as in the head */
	uint64_t fence;         /* latest fence given to this process */
	uint32_t turn;          /* index of the slot at which the next request begins to look */
	/* The head when this process last saw that no request waits and that no slot above the
	 * capacity is locked: its `mark`, and the capacity (0: never). */
	uint64_t quiet_mark;
	uint32_t quiet_capacity;
	unsigned finds; /* look-ups of locks in the current call */
	struct local_member *members;
	/* Unused members whose descriptors stay open for the next requests. */
	struct local_member *spare;
	unsigned spares;
	struct local_watch watches[LOCAL_RECORDS];

	uint32_t *_Atomic word; /* the futex word in the mapped file; NULL: not mapped yet */
	atomic_uint listened;   /* wake-up bits on which the waiting thread listens */
	uint32_t seen;          /* value of the word before the latest look; used by wait() only */
};

/* ---- The file -------------------------------------------------------------------------------- */

_Static_assert(sizeof(struct slots_file_head) == 40 + SLOTS_NAME_BYTES, "heads have holes");
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

/* Fails with IOSHAPE_E_COORDINATOR and the message "cannot WHAT the pool's file ...". */
static int local_unreachable(const struct local_pool *pool, const char *what, int code,
			     struct base_error *error)
{
	return base_fail_reason_with(
		error, IOSHAPE_E_COORDINATOR,
		code == -EFBIG ? "raise this process's limit of file sizes (ulimit -f)" : "",
		"cannot %s the pool's file \"%s/%s\": %s", what, pool->folder, pool->name,
		strerror(-code));
}

/* ---- Records --------------------------------------------------------------------------------- */

/* Writes a field of the head, or a record. Returns 0 or a negative errno. */
static int local_write(const struct local_pool *pool, uint64_t at, const void *data, size_t bytes)
{
	ssize_t done;

	/* Beyond the limit for file sizes the kernel would end the process with SIGXFSZ. */
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

static int local_write_record(const struct local_pool *pool, uint32_t number,
			      const struct slots_file_record *record)
{
	return local_write(pool, offset_of(number), record,
			   offsetof(struct slots_file_record, unused));
}

static void end_text(char *text, size_t size)
{
	text[size - 1] = 0;
	for (; *text; text++) {
		if (*text < ' ' || *text > '~')
			*text = '?';
	}
}

/* Reads a record from the file, which other users may have changed. Missing bytes read as zeros.
 * Texts are terminated and made printable, and an impossible end of a lease counts as past. */
static void local_read_record(const struct local_pool *pool, uint32_t number,
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

/* Locks or unlocks a range; 0 bytes mean all bytes from `at` on. -EAGAIN: another request has a
 * lock there. */
static int local_lock(int fd, short type, off_t at, off_t bytes)
{
	struct flock lock = { .l_type = type, .l_whence = SEEK_SET, .l_start = at, .l_len = bytes };

	if (!fcntl(fd, F_OFD_SETLK, &lock))
		return 0;
	return errno == EACCES ? -EAGAIN : -errno;
}

/* Finds a lock in a range, as a rule the oldest. Returns false if there is none, or if this call
 * has made too many look-ups. */
static bool local_find_lock(struct local_pool *pool, off_t from, off_t to, struct flock *lock)
{
	*lock = (struct flock){
		.l_type = F_WRLCK, .l_whence = SEEK_SET, .l_start = from, .l_len = to - from
	};
	return from < to && pool->finds++ < LOCAL_MOST_FINDS &&
	       !fcntl(pool->fd, F_OFD_GETLK, lock) && lock->l_type != F_UNLCK;
}

/* ---- Waking waiters -------------------------------------------------------------------------- */

/* The word counts events that may have freed a slot. It is only accessed through futex() and
 * pread(), never through memory. Another user may cut the file short; then a load raises SIGBUS,
 * but futex() and pread() only fail. */

#define WORD (offsetof(struct slots_file_head, wake) / sizeof(uint32_t))

/* Uses the word in the file from now on, if the file can be mapped. The mapping replaces that of an
 * earlier file at its address, because a waiting thread may be about to use it. */
static void map_word(struct local_pool *pool)
{
	uint32_t *before = pool->word;
	uint32_t *page = mmap(before ? before - WORD : NULL, PAGE_BYTES, PROT_READ | PROT_WRITE,
			      MAP_SHARED | (before ? MAP_FIXED : 0), pool->fd, 0);

	if (page == MAP_FAILED)
		return;
	/* A child that kept the mapping would keep the file open, and with it its parent's
	 * locks. */
	madvise(page, PAGE_BYTES, MADV_DONTFORK);
	pool->word = page + WORD;
}

/* Wakes the processes that sleep in this pool and listen to one of these bits. If a process does
 * not sleep, its next sleep ends at once. */
static void local_wake(struct local_pool *pool, uint32_t bits)
{
	static uint32_t unused;

	if (!pool->word)
		return;
	/* FUTEX_WAKE_OP makes the kernel add 1 to the word. No thread waits on `unused`. */
	syscall(SYS_futex, &unused, FUTEX_WAKE_OP, 1, (void *)0, pool->word,
		FUTEX_OP(FUTEX_OP_ADD, 1, FUTEX_OP_CMP_LT, 0));
	syscall(SYS_futex, pool->word, FUTEX_WAKE_BITSET, INT_MAX, NULL, NULL, bits);
}

static uint32_t value_of(struct local_pool *pool)
{
	uint32_t value = 0;

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

/* Sleeps until one of these bits is woken, or for timeout_ms. */
static void local_sleep(struct local_pool *pool, uint32_t bits, uint32_t timeout_ms)
{
	const uint64_t until_ns = base_now_ns() + base_ms_to_ns(timeout_ms);
	const struct timespec until = { .tv_sec = (time_t)(until_ns / 1000000000),
					.tv_nsec = (long)(until_ns % 1000000000) };

	/* Without a mapping the address is NULL, and futex() fails. */
	if (syscall(SYS_futex, pool->word, FUTEX_WAIT_BITSET, pool->seen, &until, NULL, bits) &&
	    errno == EFAULT)
		nap(base_ms_to_ns(MIN(timeout_ms, BLIND_MS)));
	/* Any event from here on ends the next sleep at once. */
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

/* Writes a new head. The caller holds the MAKER lock. */
static int write_head(const struct local_pool *pool, struct slots_file_head *head)
{
	*head = (struct slots_file_head){ .magic = LOCAL_MAGIC, .version = LOCAL_VERSION };
	head->base_ns = MAX(wall_ns(), base_now_ns()) - base_now_ns();
	head->mark = base_random();
	memcpy(head->pool, pool->config.pool, sizeof(head->pool));
	return local_write(pool, 0, head, sizeof(*head));
}

/* Reads the head. Writes a new one if there is none, or if it is not valid. */
static int read_or_make_head(const struct local_pool *pool, struct slots_file_head *head,
			     struct base_error *error)
{
	struct stat stat;
	int ret = -EAGAIN;

	for (int i = 0; i < TRIES && ret == -EAGAIN; i++) {
		if (read_head(pool->fd, head) && !strcmp(head->pool, pool->config.pool))
			return 0;
		if (i)
			nap(PAUSE_NS);
		ret = local_lock(pool->fd, F_WRLCK, MAKER, 1);
	}
	if (ret)
		return local_unreachable(pool, "lock", ret, error);
	if (!read_head(pool->fd, head) || strcmp(head->pool, pool->config.pool) != 0) {
		if (!fstat(pool->fd, &stat) && stat.st_size)
			base_log(&pool->config.log, IOSHAPE_LOG_WARNING,
				 "the pool's file \"%s/%s\" was damaged; ioshape starts a new one",
				 pool->folder, pool->name);
		ret = write_head(pool, head);
	}
	local_lock(pool->fd, F_UNLCK, MAKER, 1);
	return ret ? local_unreachable(pool, "write", ret, error) : 0;
}

/* ---- Opening the file ------------------------------------------------------------------------ */

static int refuse(const struct local_pool *pool, const char *what, struct base_error *error)
{
	return base_fail_reason_with(
		error, IOSHAPE_E_COORDINATOR, "remove it, or ask its owner to remove it",
		"cannot use the pool's file \"%s/%s\": it is %s", pool->folder, pool->name, what);
}

/* Rejects anything but a regular file with one name. Where the kernel does not protect hard links,
 * another user can give a file of ours a second name. -EAGAIN: the file was removed meanwhile. */
static int check_kind(const struct local_pool *pool, const struct stat *stat,
		      struct base_error *error)
{
	if (!S_ISREG(stat->st_mode))
		return refuse(pool, "not a regular file", error);
	if (stat->st_nlink > 1)
		return refuse(pool, "a link to another file", error);
	return stat->st_nlink ? 0 : -EAGAIN;
}

/* Returns whether an opened file can be a pool's. A file with other permissions and other contents
 * belongs to another program and was moved here. It must not be changed. */
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
	return base_register_fd(
		openat(pool->folder_fd, pool->name,
		       O_RDWR | O_NOFOLLOW | O_NONBLOCK | O_NOCTTY | O_CLOEXEC | flags, 0666));
}

/* Opens the file of this name, or creates it. -EAGAIN: another process created or removed it
 * meanwhile. */
static int open_or_create(struct local_pool *pool, struct base_error *error)
{
	struct stat stat;
	bool there = !fstatat(pool->folder_fd, pool->name, &stat, AT_SYMLINK_NOFOLLOW);
	int fd, ret = there ? check_kind(pool, &stat, error) : 0;

	if (ret)
		return ret;
	/* In sticky folders the kernel refuses O_CREAT for files of other users. */
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
	/* All users get access, whatever the umask is. The file is new, or its maker died before
	 * this call. */
	if (base_is_own_user(stat.st_uid) && (stat.st_mode & 0666) != 0666 && fchmod(fd, 0666))
		errno = 0;
	/* Updating the access time would make each read slower. Only the owner may set
	 * O_NOATIME. */
	if (fcntl(fd, F_SETFL, O_NOATIME))
		errno = 0;
	pool->fd = fd;
	pool->dev = stat.st_dev;
	pool->ino = stat.st_ino;
	return 0;
}

/* Opens the file and takes the PRESENT lock. -EAGAIN: its last user is about to remove it. */
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
		pool->folder_fd =
			base_register_fd(open(pool->folder, O_PATH | O_DIRECTORY | O_CLOEXEC));
	if (pool->folder_fd < 0)
		return base_fail_reason(
			error, IOSHAPE_E_COORDINATOR,
			"cannot open the folder \"%s\", where the pools of this host "
			"are: %s",
			pool->folder, strerror(errno));
	for (int i = 0; i < TRIES && ret == -EAGAIN; i++) {
		if (i)
			nap(PAUSE_NS);
		ret = try_to_open(pool, error);
	}
	if (ret == -EAGAIN)
		return base_fail_reason_with(
			error, IOSHAPE_E_COORDINATOR,
			"find that process in /proc/locks, and end it",
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

/* Opens the file if it is not open, and reads its head. -ESTALE: the name belongs to another file
 * now, and this one is closed. IOSHAPE_E_COORDINATOR: any other failure. */
static int local_file_ready(struct local_pool *pool, struct slots_file_head *head,
			    struct base_error *error)
{
	const uint64_t now = base_now_ns();
	int ret;

	pool->now_ns = now;
	if (now - pool->looked_ns >= LOOK_AGAIN_NS) {
		pool->looked_ns = now;
		/* Reading the limit at each call would cost as much as a lock. */
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

/* Opens the file once more, so that a request owns its locks. Returns the descriptor, or a negative
 * errno. */
static int local_file_again(const struct local_pool *pool)
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

/* Closes the file. Removes it if no other process has it open. */
static void local_file_close(struct local_pool *pool)
{
	if (pool->fd >= 0 && !local_lock(pool->fd, F_WRLCK, PRESENT, 1) && has_its_name(pool))
		unlinkat(pool->folder_fd, pool->name, 0);
	base_close(pool->fd);
	base_close(pool->folder_fd);
	if (pool->word)
		munmap(pool->word - WORD, PAGE_BYTES);
}

/* ---- Finding locks --------------------------------------------------------------------------- */

/* Returns whether this call made too many look-ups, so that it may have missed locks. */
static bool found_too_many(const struct local_pool *pool)
{
	return pool->finds > LOCAL_MOST_FINDS;
}

static bool is_locked(struct local_pool *pool, off_t from, off_t to)
{
	struct flock lock;

	return local_find_lock(pool, from, to, &lock);
}

/* Finds the lock with the lowest offset in a range. */
static bool first_lock(struct local_pool *pool, off_t from, off_t to, struct flock *first)
{
	struct flock lock;
	bool found = false;

	for (; local_find_lock(pool, from, to, &lock); to = lock.l_start) {
		*first = lock;
		found = true;
	}
	return found;
}

/* Returns the offset after a lock, at most `most`. */
static off_t end_of(const struct flock *lock, off_t most)
{
	return lock->l_len ? MIN(lock->l_start + lock->l_len, most) : most;
}

static off_t begin_of(enum local_line line)
{
	return line == LOCAL_HOLDER_LINE ? HOLDER(0) :
	       line == LOCAL_URGENT_LINE ? URGENT_LINE :
	       line == LOCAL_LINE        ? LINE :
					   SMALL_LINE;
}

static uint32_t ticket_record(enum local_line line, uint64_t ticket)
{
	return LOCAL_HOLDERS + (line == LOCAL_URGENT_LINE ? 0 : LOCAL_WAITERS) +
	       (uint32_t)(ticket % LOCAL_WAITERS);
}

static bool is_idle(struct local_pool *pool)
{
	return !is_locked(pool, HOLDER(0), SMALL_LINE);
}

/* ---- Ignoring stopped requests --------------------------------------------------------------- */

/* Returns whether the owner of a record has not renewed it for so long that its locks do not count.
 * `until_ns` is the end of the lease in the record. */
static bool is_silent(struct local_pool *pool, uint32_t number, uint64_t until_ns)
{
	struct local_watch *watch = &pool->watches[number];
	const uint64_t now = base_now_ns();

	if (watch->until_ns != until_ns || now - watch->looked_ns > LOCAL_SURE_NS) {
		watch->until_ns = until_ns;
		watch->since_ns = now;
	}
	watch->looked_ns = now;
	return now > until_ns && now - watch->since_ns >= LOCAL_SURE_NS;
}

static bool is_silent_holder(struct local_pool *pool, uint32_t number)
{
	struct slots_file_record record;

	local_read_record(pool, number, &record);
	if (record.first != number && record.first >= LOCAL_FIRST_SLOT &&
	    record.first < LOCAL_HOLDERS)
		local_read_record(pool, record.first, &record);
	return is_silent(pool, number, record.until_ns);
}

static bool is_silent_waiter(struct local_pool *pool, enum local_line line, uint64_t ticket)
{
	const uint32_t number = ticket_record(line, ticket);
	struct slots_file_record record;

	local_read_record(pool, number, &record);
	return is_silent(pool, number, record.number == ticket ? record.until_ns : 0);
}

/* ---- Queue ----------------------------------------------------------------------------------- */

/* Returns whether the line has no waiter below the ticket, apart from stopped ones. */
static bool none_before(struct local_pool *pool, off_t begin, uint64_t ticket, enum local_line line)
{
	const off_t end = begin + (off_t)ticket;
	off_t at = begin;
	struct flock lock;

	for (; first_lock(pool, at, end, &lock); at = end_of(&lock, end)) {
		const off_t found = MAX(at, lock.l_start);

		if (!is_silent_waiter(pool, line, (uint64_t)(found - begin)))
			return false;
	}
	return !found_too_many(pool);
}

static bool is_first(struct local_pool *pool, const struct local_member *member)
{
	if (member->record.urgent)
		return none_before(pool, URGENT_LINE, member->ticket, LOCAL_URGENT_LINE);
	return none_before(pool, URGENT_LINE, LINE_TICKETS, LOCAL_URGENT_LINE) &&
	       none_before(pool, LINE, member->ticket, LOCAL_LINE);
}

static enum local_line line_of(const struct local_member *member)
{
	return member->record.urgent ? LOCAL_URGENT_LINE : LOCAL_LINE;
}

/* Locks the byte above all locked bytes of the line. -E2BIG: too many requests wait. */
static int take_ticket(struct local_pool *pool, struct local_member *member)
{
	const off_t begin = begin_of(line_of(member)), end = begin + LINE_TICKETS;
	unsigned waiters = 0;
	struct flock lock;
	off_t at = begin;
	int ret;

	for (;;) {
		for (; local_find_lock(pool, at, end, &lock); at = end_of(&lock, end))
			waiters++;
		if (waiters >= LOCAL_WAITERS || at == end)
			return -E2BIG;
		ret = local_lock(member->fd, F_WRLCK, at, 1);
		if (ret == -EAGAIN)
			continue;
		member->ticket = (uint64_t)(at - begin);
		/* Since the look-up a waiter may have taken this ticket and left, while another
		 * request went above it. Then this request would jump the queue. */
		if (ret || !is_locked(pool, at + 1, end))
			return ret;
		local_lock(member->fd, F_UNLCK, at, 1);
	}
}

static int queue_up(struct local_pool *pool, struct local_member *member)
{
	const uint64_t mark = base_random();
	int ret = take_ticket(pool, member);

	if (!ret && member->small)
		ret = local_lock(member->fd, F_WRLCK, SMALL_LINE + (off_t)member->ticket, 1);
	if (ret)
		return ret == -EAGAIN ? -E2BIG : ret;
	ret = local_write(pool, offsetof(struct slots_file_head, mark), &mark, sizeof(mark));
	if (ret)
		return ret;
	member->record.number = member->ticket;
	member->record.since_ns = base_now_ns();
	member->record.until_ns = member->record.since_ns + LOCAL_LOOK_NS;
	return local_write_record(pool, ticket_record(line_of(member), member->ticket),
				  &member->record);
}

static uint32_t position_of(struct local_pool *pool, const struct local_member *member,
			    uint32_t *ahead)
{
	uint32_t position = 0;
	struct flock lock;

	*ahead = LOCAL_RECORDS;
	for (enum local_line line = LOCAL_URGENT_LINE; line <= line_of(member); line++) {
		const off_t begin = begin_of(line);
		const uint64_t most = line == line_of(member) ? member->ticket : LINE_TICKETS;
		const off_t end = begin + (off_t)most;

		for (off_t at = begin; local_find_lock(pool, at, end, &lock);
		     at = end_of(&lock, end)) {
			*ahead = ticket_record(line, (uint64_t)(MAX(at, lock.l_start) - begin));
			position++;
		}
	}
	if (!position &&
	    local_find_lock(pool, HOLDER(LOCAL_FIRST_SLOT), HOLDER(LOCAL_HOLDERS), &lock))
		*ahead = (uint32_t)(MAX(lock.l_start, HOLDER(0)) - HOLDER(0));
	return position;
}

/* ---- Slots ----------------------------------------------------------------------------------- */

/*
 * A fence combines the time, in units of 256 ns, with the number of the holder. So it rises with
 * each grant. Fences are unique, because a holder stays locked for longer than one unit.
 */
#define FENCE_TIME_SHIFT 8
#define FENCE_HOLDER_BITS 10
_Static_assert(LOCAL_HOLDERS <= 1u << FENCE_HOLDER_BITS, "the holder does not fit in a fence");

static uint64_t fence_time(const struct local_pool *pool, uint64_t now)
{
	return (pool->base_ns + now) >> FENCE_TIME_SHIFT;
}

static uint64_t next_fence(struct local_pool *pool, uint64_t now, uint32_t holder)
{
	pool->fence = MAX(pool->fence + 1, (fence_time(pool, now) << FENCE_HOLDER_BITS) + holder);
	return pool->fence;
}

/* Returns the futex bit to which the waiter with this ticket listens. */
static uint32_t bit_of(uint64_t ticket)
{
	return UINT32_C(1) << ticket % 32;
}

/* Returns the futex bit of the first waiter in a line; 0: the line is empty. */
static uint32_t first_bit(struct local_pool *pool, off_t line)
{
	struct flock lock;

	if (!first_lock(pool, line, line + LINE_TICKETS, &lock))
		return 0;
	return bit_of((uint64_t)(MAX(lock.l_start, line) - line));
}

/* Wakes the waiters that may be next, after a lock was dropped. A stopped first waiter does not
 * pass the wake-up on; the others notice that by polling. */
static void wake_waiters(struct local_pool *pool)
{
	uint32_t bits;

	/* A request that takes its ticket after this check looks for slots after it, too. */
	if (!is_locked(pool, URGENT_LINE, SMALL_LINE))
		return;
	bits = first_bit(pool, URGENT_LINE);
	if (!bits)
		bits = first_bit(pool, LINE);
	bits |= first_bit(pool, SMALL_LINE);
	local_wake(pool, bits && !found_too_many(pool) ? bits : UINT32_MAX);
}

/* Drops all locks of a request: those of its slots and of its tickets. */
static void free_member(struct local_pool *pool, struct local_member *member)
{
	struct local_member **link = &pool->members;

	while (*link != member)
		link = &(*link)->next;
	*link = member->next;
	/* The range covers the whole file, because then the kernel need not allocate memory to
	 * split a lock. */
	if (local_lock(member->fd, F_UNLCK, 0, 0) || pool->spares == LOCAL_SPARE) {
		base_close(member->fd);
		free(member);
	} else {
		member->next = pool->spare;
		pool->spare = member;
		pool->spares++;
	}
	wake_waiters(pool);
}

static void drop_holders(const struct local_member *member)
{
	local_lock(member->fd, F_UNLCK, HOLDER(0), LOCAL_HOLDERS);
}

/* Makes a request the holder of the slots that it has just locked: writes their records. -EAGAIN,
 * with the locks dropped: writing took so long that other requests may have ignored them. */
static int hold(struct local_pool *pool, struct local_member *member, const uint32_t *numbers,
		uint32_t count, uint32_t given)
{
	const uint64_t now = base_now_ns();
	struct slots_file_record record = member->record;
	uint64_t written;
	int ret = 0;

	record.number = next_fence(pool, now, numbers[0]);
	record.since_ns = now;
	record.until_ns = now + base_ms_to_ns(pool->config.lease_ms);
	record.first = numbers[0];
	for (uint32_t i = 0; i < count && !ret; i++)
		ret = local_write_record(pool, numbers[i], &record);
	/* Wait for the next unit of time, so that the next request that locks this holder gets
	 * another fence. */
	do
		written = base_now_ns();
	while (fence_time(pool, written) == fence_time(pool, now));
	/* If this process was stopped before it wrote the records, other requests may have ignored
	 * its locks. */
	if (!ret && written - pool->now_ns > LOCAL_SURE_NS / 2)
		ret = -EAGAIN;
	if (ret) {
		drop_holders(member);
		return ret;
	}
	member->record = record;
	member->holding = true;
	member->holder = record.first;
	member->given = given;
	return 0;
}

static int hold_one(struct local_pool *pool, struct local_member *member, uint32_t number,
		    uint32_t given)
{
	int ret = local_lock(member->fd, F_WRLCK, HOLDER(number), 1);

	return ret ? ret : hold(pool, member, &number, 1, given);
}

/* Returns whether no request waits and no slot above the capacity is locked. Requests that lock
 * such a slot have had a ticket, so while the mark stays, one look at the locks is enough. */
static bool is_quiet(struct local_pool *pool, uint64_t mark, uint32_t capacity)
{
	if (pool->quiet_mark == mark && pool->quiet_capacity == capacity)
		return true;
	if (is_locked(pool, HOLDER(LOCAL_FIRST_SLOT + capacity), SMALL_LINE))
		return false;
	pool->quiet_mark = mark;
	pool->quiet_capacity = capacity;
	return true;
}

static int take_at_once(struct local_pool *pool, struct local_member *member, uint64_t mark,
			uint32_t capacity)
{
	const uint32_t number = LOCAL_FIRST_SLOT + pool->turn % capacity;
	int ret;

	if (member->record.weight != 1 || !is_quiet(pool, mark, capacity))
		return -EAGAIN;
	ret = hold_one(pool, member, number, 1);
	if (!ret)
		pool->turn = number - LOCAL_FIRST_SLOT + 1;
	return ret;
}

enum slot_state { SLOT_FREE, SLOT_IN_USE, SLOT_SILENT };

struct slot_states {
	uint32_t in_use;
	uint8_t of[LOCAL_HOLDERS]; /* values of enum slot_state */
};

static void record_slots(struct local_pool *pool, struct slot_states *states)
{
	const off_t end = HOLDER(LOCAL_HOLDERS);
	struct flock lock;

	for (off_t at = HOLDER(LOCAL_FIRST_SLOT); first_lock(pool, at, end, &lock);
	     at = end_of(&lock, end)) {
		/* Adjacent slots of one request form one lock. */
		for (off_t one = MAX(at, lock.l_start); one < end_of(&lock, end); one++) {
			const uint32_t number = (uint32_t)(one - HOLDER(0));
			const bool silent = is_silent_holder(pool, number);

			states->of[number] = silent ? SLOT_SILENT : SLOT_IN_USE;
			states->in_use += !silent;
		}
	}
}

/* Locks free slots for a request, among the slots that count for the capacity. -EAGAIN: there are
 * not enough. */
static int lock_free(struct local_pool *pool, const struct local_member *member, uint32_t capacity,
		     const struct slot_states *states, uint32_t *numbers, uint32_t needed)
{
	uint32_t slots[LOCAL_SLOTS], count = 0, locked = 0;
	int ret = 0;

	/* All requests must choose among the same slots; otherwise two that look at once could
	 * exceed the capacity together. */
	for (uint32_t i = LOCAL_FIRST_SLOT; i < LOCAL_URGENT && count < capacity; i++) {
		if (states->of[i] != SLOT_SILENT)
			slots[count++] = i;
	}
	for (uint32_t i = 0; i < count && locked < needed && !ret; i++) {
		const uint32_t number = slots[(pool->turn + i) % count];

		if (states->of[number] == SLOT_IN_USE)
			continue;
		ret = local_lock(member->fd, F_WRLCK, HOLDER(number), 1);
		numbers[locked] = number;
		locked += !ret;
	}
	if (!ret && locked < needed)
		ret = -EAGAIN;
	if (ret)
		drop_holders(member);
	return ret;
}

/* Takes as many slots as a request needs. -EAGAIN: it took none. */
static int take_slots(struct local_pool *pool, struct local_member *member, uint32_t capacity)
{
	const uint32_t weight = member->record.weight, needed = MIN(weight, capacity);
	const bool urgent = member->record.urgent;
	struct slot_states states = { 0 };
	uint32_t numbers[LOCAL_SLOTS];
	int ret;

	record_slots(pool, &states);
	if (states.in_use + (urgent ? 0 : needed) > capacity || found_too_many(pool))
		return -EAGAIN;
	ret = lock_free(pool, member, capacity, &states, numbers, needed);
	if (ret == -EAGAIN && urgent)
		return hold_one(pool, member, LOCAL_URGENT, weight);
	if (!ret)
		ret = hold(pool, member, numbers, needed, weight);
	if (!ret)
		pool->turn = member->holder - LOCAL_FIRST_SLOT + 1;
	return ret;
}

/* Takes the slots of a request if it is the next. -EAGAIN: it is not, or slots are missing. */
static int take_turn(struct local_pool *pool, struct local_member *member, uint32_t capacity)
{
	int ret = is_first(pool, member) ? take_slots(pool, member, capacity) : -EAGAIN;

	if (ret == -EAGAIN && member->small &&
	    none_before(pool, SMALL_LINE, member->ticket, LOCAL_LINE))
		ret = hold_one(pool, member, LOCAL_SMALL, 0);
	return ret;
}

static int look(struct local_pool *pool, struct local_member *member, uint32_t capacity)
{
	int ret = take_turn(pool, member, capacity);

	if (ret == -EAGAIN && found_too_many(pool))
		ret = -E2BIG;
	if (ret)
		return ret;
	/* This waiter leaves the line; the next one may find another free slot. */
	local_lock(member->fd, F_UNLCK, URGENT_LINE, 0);
	wake_waiters(pool);
	return 0;
}

/* ---- Opening and closing a pool -------------------------------------------------------------- */

/* Finds the folder of an address: "local" or "local:/FOLDER". */
static int find_folder(const char *address, char folder[LOCAL_FOLDER_BYTES],
		       struct base_error *error)
{
	const char *given = address + strlen("local");

	if (*given && (strncmp(given, ":/", 2) || strlen(given) > LOCAL_FOLDER_BYTES))
		return base_fail_reason_with(
			error, -EINVAL,
			"use \"local\", or \"local:/FOLDER\" with a path of at most 500 bytes",
			"the coordinator's address begins with \"local\", but is not valid");
	if (*given)
		given++;
	else
		given = access("/dev/shm", W_OK | X_OK) ? "/tmp" : "/dev/shm";
	snprintf(folder, LOCAL_FOLDER_BYTES, "%s", given);
	return 0;
}

static int local_open(void **out, const struct slots_config *config, struct base_error *error)
{
	char folder[LOCAL_FOLDER_BYTES];
	struct local_pool *pool;

	*out = NULL;
	if (find_folder(config->address, folder, error))
		return -EINVAL;
	pool = calloc(1, sizeof(*pool));
	if (!pool)
		return base_no_memory(error, "a pool", sizeof(*pool));
	pool->config = *config;
	pool->folder_fd = pool->fd = -1;
	atomic_store(&pool->listened, UINT32_MAX);
	memcpy(pool->folder, folder, sizeof(pool->folder));
	local_file_name(pool->name, config->pool);
	pthread_mutex_init(&pool->lock, NULL);
	/* A random start spreads processes that each write a single file over the slots. */
	pool->turn = (uint32_t)base_random() % LOCAL_SLOTS;
	memcpy(pool->record.job, config->identity.job, sizeof(pool->record.job));
	memcpy(pool->record.node, config->identity.node, sizeof(pool->record.node));
	pool->record.rank = config->identity.rank;
	pool->record.pid = (uint32_t)getpid();
	*out = pool;
	return 0;
}

/* Frees all requests of this process, and closes the descriptors. */
static void let_go(struct local_pool *pool)
{
	while (pool->members)
		free_member(pool, pool->members);
	while (pool->spare) {
		struct local_member *first = pool->spare;

		pool->spare = first->next;
		base_close(first->fd);
		free(first);
	}
	pool->spares = 0;
}

static void local_close(void *opaque)
{
	struct local_pool *pool = opaque;

	let_go(pool);
	local_file_close(pool);
	pthread_mutex_destroy(&pool->lock);
	free(pool);
}

/* Takes the pool's lock, opens the file, and reads its head. If another file has the name now,
 * drops all requests first. Without success the lock is not held. */
static int enter(struct local_pool *pool, struct slots_file_head *head, struct base_error *error)
{
	int ret;

	pthread_mutex_lock(&pool->lock);
	pool->finds = 0;
	ret = local_file_ready(pool, head, error);
	if (ret == -ESTALE) {
		let_go(pool);
		ret = local_file_ready(pool, head, error);
	}
	if (ret)
		pthread_mutex_unlock(&pool->lock);
	return ret;
}

static void leave(struct local_pool *pool)
{
	pthread_mutex_unlock(&pool->lock);
}

/* ---- Capacity -------------------------------------------------------------------------------- */

static uint32_t capacity_of(const struct local_pool *pool, const struct slots_file_head *head)
{
	const uint32_t capacity = head->capacity ? head->capacity : pool->config.default_capacity;

	return MAX(MIN(capacity, LOCAL_SLOTS), 1u);
}

/* Sets the capacity if this request finds the pool idle. */
static int choose_capacity(struct local_pool *pool, struct slots_file_head *head,
			   const struct slots_request *request)
{
	const uint32_t asked = pool->config.asked_capacity;
	const uint32_t rule = request->default_capacity ? request->default_capacity :
							  pool->config.default_capacity;
	const uint32_t choice[2] = { asked ? asked : rule, asked != 0 };

	if (head->capacity == choice[0] && head->by_job == choice[1])
		return 0;
	if (head->capacity && !is_idle(pool))
		return 0;
	head->capacity = choice[0];
	head->by_job = choice[1];
	return local_write(pool, offsetof(struct slots_file_head, capacity), choice,
			   sizeof(choice));
}

/* ---- Requests of this process ---------------------------------------------------------------- */

static struct local_member *find(const struct local_pool *pool, const char *id)
{
	struct local_member *member = pool->members;

	while (member && strcmp(member->record.id, id) != 0)
		member = member->next;
	return member;
}

/* Opens the file once more, for the locks of a request. Returns NULL on failure. */
static struct local_member *open_member(struct local_pool *pool, struct base_error *error)
{
	struct local_member *member = calloc(1, sizeof(*member));

	if (!member) {
		base_no_memory(error, "a request", sizeof(*member));
		return NULL;
	}
	member->fd = local_file_again(pool);
	if (member->fd >= 0)
		return member;
	local_unreachable(pool, "open", member->fd, error);
	free(member);
	return NULL;
}

static struct local_member *new_member(struct local_pool *pool, const struct slots_request *request,
				       struct base_error *error)
{
	struct local_member *member = pool->spare;
	struct slots_file_record record = pool->record;

	if (member) {
		pool->spare = member->next;
		pool->spares--;
	} else {
		member = open_member(pool, error);
		if (!member)
			return NULL;
	}
	memcpy(record.id, request->id, sizeof(record.id));
	record.bytes = request->bytes;
	record.weight = MAX(request->weight, 1u);
	record.urgent = request->urgent;
	*member = (struct local_member){
		.next = pool->members,
		.record = record,
		.fd = member->fd,
		.small = record.weight == 1 && !request->urgent && request->bytes &&
			 request->bytes <= SLOTS_SMALL_BYTES,
		.target_groups = MIN(request->default_capacity, SLOTS_MOST_TARGET_GROUPS),
	};
	pool->members = member;
	return member;
}

/* ---- Answers --------------------------------------------------------------------------------- */

/* Returns the group of storage targets for a holder, from 1; 0: any. It follows from the number of
 * the slot, so that writers have groups of their own. */
static uint32_t target_group_of(const struct local_pool *pool, const struct local_member *member)
{
	const bool beside = member->holder == LOCAL_SMALL || member->holder == LOCAL_URGENT;
	const uint32_t slot = beside ? pool->turn : member->holder - LOCAL_FIRST_SLOT;

	return member->target_groups < 2 ? 0 : slot % member->target_groups + 1;
}

static void answer_waiter(struct local_pool *pool, const struct local_member *member,
			  struct slots_answer *answer)
{
	struct slots_file_record record;
	uint32_t ahead;

	answer->state = SLOTS_WAITING;
	answer->position = position_of(pool, member, &ahead);
	answer->beat_ms =
		(uint32_t)MIN(LOOK_MS * ((uint64_t)answer->position + 1), SLOWEST_LOOK_MS);
	if (ahead == LOCAL_RECORDS)
		return;
	local_read_record(pool, ahead, &record);
	if (*record.job)
		snprintf(answer->ahead, sizeof(answer->ahead), "job %.50s, rank %u on %.50s",
			 record.job, record.rank, record.node);
}

/* Fills in the answer for a request. `member` is NULL for an unknown request. */
static void answer_for(struct local_pool *pool, const struct local_member *member,
		       uint32_t capacity, struct slots_answer *answer)
{
	*answer = (struct slots_answer){ .state = SLOTS_NONE, .capacity = capacity };
	if (member && !member->holding)
		answer_waiter(pool, member, answer);
	if (!member || !member->holding)
		return;
	answer->state = SLOTS_HOLDING;
	answer->fence = member->record.number;
	answer->weight = member->given;
	answer->target_group = target_group_of(pool, member);
	answer->beat_ms = MAX(pool->config.lease_ms / 3, 1u);
}

/* ---- Operations ------------------------------------------------------------------------------ */

/* Takes the slots that a request needs, or queues it. A request that fails is freed. */
static int ask(struct local_pool *pool, struct local_member *member,
	       const struct slots_file_head *head, struct base_error *error)
{
	const uint32_t capacity = capacity_of(pool, head);
	int ret = take_at_once(pool, member, head->mark, capacity);

	if (ret == -EAGAIN)
		ret = queue_up(pool, member);
	if (!ret && !member->holding)
		ret = look(pool, member, capacity);
	if (!ret || ret == -EAGAIN)
		return 0;
	free_member(pool, member);
	if (ret == -E2BIG)
		return base_fail_reason(
			error, IOSHAPE_E_COORDINATOR,
			"cannot queue in pool \"%s\": %u requests are already waiting",
			pool->config.pool, LOCAL_WAITERS);
	return local_unreachable(pool, "take a slot in", ret, error);
}

static int acquire(struct local_pool *pool, struct slots_file_head *head,
		   const struct slots_request *request, struct slots_answer *answer,
		   struct base_error *error)
{
	struct local_member *member = find(pool, request->id);
	int ret;

	if (!member) {
		ret = choose_capacity(pool, head, request);
		if (ret)
			return local_unreachable(pool, "write", ret, error);
		member = new_member(pool, request, error);
		if (!member)
			return error ? error->code : IOSHAPE_E_COORDINATOR;
		ret = ask(pool, member, head, error);
		if (ret)
			return ret;
	}
	answer_for(pool, member, capacity_of(pool, head), answer);
	return 0;
}

static int local_acquire(void *opaque, const struct slots_request *request,
			 struct slots_answer *answer, struct base_error *error)
{
	struct local_pool *pool = opaque;
	struct slots_file_head head;
	int ret = enter(pool, &head, error);

	if (ret)
		return ret;
	ret = acquire(pool, &head, request, answer, error);
	leave(pool);
	return ret;
}

/* Renews the record of a holder or waiter. A waiter then looks whether it gets its slots. -EAGAIN:
 * the request is no longer valid, and the caller frees it. */
static int renew(struct local_pool *pool, struct local_member *member, uint32_t capacity,
		 uint64_t passed)
{
	const uint64_t now = base_now_ns();
	struct slots_file_record *record = &member->record;
	int ret;

	if (member->holding) {
		/* Its lease is over: other requests may have ignored it. */
		if (now > record->until_ns)
			return -EAGAIN;
		record->passed = passed;
		record->until_ns = now + base_ms_to_ns(pool->config.lease_ms);
		return local_write_record(pool, member->holder, record);
	}
	record->until_ns = now + LOCAL_LOOK_NS;
	ret = local_write_record(
		pool,
		ticket_record(member->record.urgent ? LOCAL_URGENT_LINE : LOCAL_LINE,
			      member->ticket),
		record);
	if (!ret)
		ret = look(pool, member, capacity);
	return ret == -EAGAIN ? 0 : ret;
}

static int local_beat(void *opaque, const struct slots_beat *beat, struct slots_answer *answer,
		      struct base_error *error)
{
	struct local_pool *pool = opaque;
	struct local_member *member;
	struct slots_file_head head;
	uint32_t capacity;
	int ret = enter(pool, &head, error);

	if (ret)
		return ret;
	capacity = capacity_of(pool, &head);
	member = find(pool, beat->id);
	if (member)
		ret = renew(pool, member, capacity, beat->passed);
	if (ret == -EAGAIN) {
		free_member(pool, member);
		member = NULL;
		ret = 0;
	}
	if (ret)
		ret = local_unreachable(pool, "renew a request in", ret, error);
	else
		answer_for(pool, member, capacity, answer);
	leave(pool);
	return ret;
}

static int local_release(void *opaque, const char *id, uint64_t passed, struct base_error *error)
{
	struct local_pool *pool = opaque;
	struct local_member *member;

	(void)passed, (void)error;
	pthread_mutex_lock(&pool->lock);
	pool->finds = 0;
	member = find(pool, id);
	if (member)
		free_member(pool, member);
	leave(pool);
	return 0;
}

/* ---- Waiting for a wake-up ------------------------------------------------------------------- */

static void local_interrupt(void *opaque)
{
	struct local_pool *pool = opaque;

	local_wake(pool, atomic_load(&pool->listened));
}

/* Returns the futex bits of the requests of this process that wait; all bits if no request
 * waits. */
static uint32_t bits_of_waiters(struct local_pool *pool)
{
	uint32_t bits = 0;

	pthread_mutex_lock(&pool->lock);
	for (const struct local_member *member = pool->members; member; member = member->next) {
		if (!member->holding)
			bits |= bit_of(member->ticket);
	}
	pthread_mutex_unlock(&pool->lock);
	return bits ? bits : UINT32_MAX;
}

static int local_wait(void *opaque, uint32_t timeout_ms, struct base_error *error)
{
	struct local_pool *pool = opaque;
	const uint32_t bits = bits_of_waiters(pool);

	(void)error;
	atomic_store(&pool->listened, bits);
	local_sleep(pool, bits, timeout_ms);
	return 0;
}

/* ---- For the operator's commands in Python --------------------------------------------------- */

static int local_describe(const struct slots_config *config, struct slots_coordinator *found,
			  struct base_error *error)
{
	int ret = find_folder(config->address, found->folder, error);

	found->id = slots_local.id;
	local_file_name(found->file, config->pool);
	found->version = LOCAL_VERSION;
	for (int line = 0; line <= LOCAL_LINES; line++)
		found->locks[line] = (uint64_t)begin_of((enum local_line)line);
	found->holders = LOCAL_HOLDERS;
	found->small_bytes = SLOTS_SMALL_BYTES;
	found->bypass = SLOTS_BYPASS;
	return ret;
}

const struct slots_ops slots_local = {
	.id = "local",
	.open = local_open,
	.acquire = local_acquire,
	.beat = local_beat,
	.release = local_release,
	.wait = local_wait,
	.interrupt = local_interrupt,
	.close = local_close,
	.describe = local_describe,
};
