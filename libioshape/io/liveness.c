/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Who lives and who is dead. A living writer holds a lock on its temporary file or directory; the
 * kernel drops it when the process dies. A lock that can be had means that the writer is dead, if
 * both are of one lock domain. Locks may not reach farther, so what others left behind counts as
 * abandoned only when nobody has touched it for a day.
 */
#define _GNU_SOURCE
#include "io/atomic_file.h"
#include "io/queue.h"

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

#define ABANDONED_AFTER_S (24 * 3600)

/* Of a directory so full, only so much is looked at. */
#define MAX_ENTRIES 100000u

/* So old an empty file may be, by this machine's clock, that a writer is about to lock; it takes
 * the writer less than this moment. Should we be wrong, the writer notices, and makes it again. */
#define JUST_MADE_S 2
#define MOMENT_NS 20000000

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
 * The kernel keeps the locks of a file with its inode, which each superblock has of its own, and
 * only some filesystems ask their server. The number of a superblock is not given to another while
 * a file on it is open, so who has its number is alive under the same locks, or dead. Namespaces of
 * processes make no difference: these locks belong to open files.
 */
void io_lock_domain(int directory_fd, char *domain)
{
	const char *machine = io_machine_tag();
	struct statx status;
	char text[64];

	strcpy(domain, IO_NOWHERE);
	/* What the kernel knows by itself: no question to a server. */
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

int io_look_at_new(int folder_fd, struct stat *status)
{
	const int flags = O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC;
	char name[NAME_MAX + 1];
	int fd, ret;

	io_temporary_name(folder_fd, "new", name);
	fd = base_own(openat(folder_fd, name, flags, 0600));
	if (fd < 0)
		return -errno;
	ret = fstat(fd, status) ? -errno : 0;
	unlinkat(folder_fd, name, 0);
	base_close(fd);
	return ret;
}

bool io_is_abandoned(struct io_clock *clock, int64_t touched)
{
	struct stat status;

	if (!clock->now)
		clock->now = io_look_at_new(clock->directory_fd, &status) ? -1 : status.st_mtime;
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
	ret = io_look_at_new(folder.fd, &status);
	if (!ret)
		*now_ns = io_modified_ns(&status);
	io_folder_close(&folder);
	return !ret ? 0 :
		      base_fail_with(error, ret, io_remedy(ret), "cannot create a file in \"%s\"",
				     directory);
}

/* ---- What dead processes left behind --------------------------------------------------------- */

/* Hex digits only, `count` of them. */
static bool is_hex(const char *text, size_t count)
{
	return strspn(text, "0123456789abcdef") >= count;
}

/* Names end in the mark, 8 digits for the lock domain, "-" and 16 random ones. */
static bool is_temporary_name(const char *name, const char **domain)
{
	const size_t tail = 8 + 1 + 16, mark = strlen(IO_TEMPORARY_MARK), length = strlen(name);

	if (*name != '.' || length < mark + tail)
		return false;
	*domain = name + length - tail;
	return !strncmp(*domain - mark, IO_TEMPORARY_MARK, mark) && is_hex(*domain, 8) &&
	       (*domain)[8] == '-' && is_hex(*domain + 9, 16);
}

struct touched {
	int fd;
	int64_t at; /* seconds since 1970 */
	struct base_budget *budget;
};

/* A directory is as old as the newest file in it. */
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

/* A name of a temporary file, and what it says. */
struct named {
	const char *name, *domain;
	bool same_domain;
};

/* Of this user; or given by root, as it is now, to the owner of the file that it was to replace. */
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

/* Between making a file and locking it a living writer has nothing in it yet. */
static bool is_just_made(const struct stat *status)
{
	return S_ISREG(status->st_mode) && !status->st_size &&
	       llabs((long long)time(NULL) - status->st_mtime) <= JUST_MADE_S;
}

/* Gives the writer of a file that was locked here a moment to lock it. */
static bool is_still_unlocked(int fd)
{
	const struct timespec moment = { 0, MOMENT_NS };

	if (flock(fd, LOCK_UN))
		return false;
	nanosleep(&moment, NULL);
	return !flock(fd, LOCK_EX | LOCK_NB);
}

static bool is_abandoned(int fd, const struct named *named, struct io_clock *clock,
			 struct base_budget *budget)
{
	bool locked = !flock(fd, LOCK_EX | LOCK_NB);
	struct touched touched = { .fd = fd, .budget = budget };
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
	    io_folder_list(&(struct io_folder){ .fd = fd }, see_touch, &touched, NULL))
		return false;
	return io_is_abandoned(clock, touched.at);
}

/* Another machine's gets a name of this one's: what is half removed looks new, and the next one
 * here knows by its name that nobody needs it. */
static bool take_over(const struct io_folder *parent, const struct named *named,
		      char into[NAME_MAX + 1])
{
	char base[NAME_MAX + 1];

	if (named->same_domain) {
		snprintf(into, NAME_MAX + 1, "%s", named->name);
		return true;
	}
	snprintf(base, sizeof(base), "%.*s",
		 (int)(named->domain - named->name - 1 - (ptrdiff_t)strlen(IO_TEMPORARY_MARK)),
		 named->name + 1);
	io_temporary_name(parent->fd, base, into);
	return !renameat(parent->fd, named->name, parent->fd, into);
}

static bool remove_if_abandoned(const struct io_folder *parent, struct io_clock *clock,
				const struct named *named, struct base_budget *budget)
{
	const char *name = named->name;
	const int flags = O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC;
	struct io_folder folder = IO_NO_FOLDER;
	bool removed = false, is_folder;
	char ours[NAME_MAX + 1];
	int fd;

	/* O_NONBLOCK: should it be a pipe after all, do not wait for it. */
	fd = base_own(openat(parent->fd, name, O_RDWR | flags));
	is_folder = fd < 0 && errno == EISDIR && !io_folder_open_in(&folder, parent, name, NULL);
	/* The lock is held until after the removal: a writer that just created it will notice. And
	 * a directory may have got its name between our open and its unlock. */
	if (is_folder && is_abandoned(folder.fd, named, clock, budget) &&
	    io_folder_is_named(&folder, parent, name) && take_over(parent, named, ours))
		removed = !io_folder_remove(&folder, parent, ours, NULL, NULL, budget, NULL);
	else if (fd >= 0 && is_abandoned(fd, named, clock, budget) && base_budget_take(budget))
		removed = !unlinkat(parent->fd, name, 0);
	io_folder_close(&folder);
	base_close(fd);
	return removed;
}

struct tidying {
	struct io_folder parent;
	struct io_clock clock;
	char domain[IO_DOMAIN_BYTES];
	struct base_budget *budget;
	const struct base_log *log;
	unsigned seen;
};

static int tidy(void *user, const char *name, struct base_error *error)
{
	struct tidying *tidying = user;
	struct named named = { .name = name };

	(void)error;
	if (tidying->seen++ == MAX_ENTRIES)
		return -E2BIG;
	if (!is_temporary_name(name, &named.domain))
		return 0;
	if (!base_budget_look(tidying->budget))
		return -EAGAIN;
	named.same_domain = io_is_lock_domain(named.domain, tidying->domain);
	if (remove_if_abandoned(&tidying->parent, &tidying->clock, &named, tidying->budget))
		base_log(tidying->log, IOSHAPE_LOG_WARNING,
			 "removed %s in %s, left behind by a dead process", name,
			 tidying->parent.path);
	return 0;
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
	io_lock_domain(directory_fd, tidying.domain);
	io_folder_list(&tidying.parent, tidy, &tidying, NULL);
	if (budget && base_budget_is_spent(budget))
		base_log(log, IOSHAPE_LOG_WARNING,
			 "removed a part of what dead processes left behind in %s: the next save "
			 "removes more",
			 directory);
	free(tidying.parent.path);
}
