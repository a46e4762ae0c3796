/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Temporary files and directories of writers that were killed. A living writer holds a lock on its
 * file; a lock that can be had means that it is dead, if both are of one lock domain. Locks may not
 * reach farther, so files of others count as abandoned only when nobody has touched them for a day.
 */
#define _GNU_SOURCE
#include "ring/destination.h"
#include "ring/folder.h"

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

/* Of a directory so full, only so much is looked at. */
#define MAX_ENTRIES 100000

/* So old an empty file may be, by this machine's clock, that a writer is about to lock; it takes
 * the writer less than this moment. Should we be wrong, the writer notices, and makes it again. */
#define JUST_MADE_S 2
#define MOMENT_NS 20000000

/* Hex digits only, `count` of them. */
static bool is_hex(const char *text, size_t count)
{
	return strspn(text, "0123456789abcdef") >= count;
}

/* Names end in the mark, 8 digits for the lock domain, "-" and 16 random ones. */
static bool is_temporary_name(const char *name, const char **domain)
{
	const size_t tail = 8 + 1 + 16, mark = strlen(RING_TEMPORARY_MARK), length = strlen(name);

	if (*name != '.' || length < mark + tail)
		return false;
	*domain = name + length - tail;
	return !strncmp(*domain - mark, RING_TEMPORARY_MARK, mark) && is_hex(*domain, 8) &&
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
static bool is_own(const struct ring_clock *clock, const struct named *named, uid_t owner)
{
	const ptrdiff_t bytes =
		named->domain - named->name - 1 - (ptrdiff_t)strlen(RING_TEMPORARY_MARK);
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

static bool is_abandoned(int fd, const struct named *named, struct ring_clock *clock,
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
	    ring_folder_list(&(struct ring_folder){ .fd = fd }, see_touch, &touched, NULL))
		return false;
	return ring_is_abandoned(clock, touched.at);
}

/* Another machine's gets a name of this one's: what is half removed looks new, and the next one
 * here knows by its name that nobody needs it. */
static bool take_over(const struct ring_folder *parent, const struct named *named,
		      char into[NAME_MAX + 1])
{
	char base[NAME_MAX + 1];

	if (named->same_domain) {
		snprintf(into, NAME_MAX + 1, "%s", named->name);
		return true;
	}
	snprintf(base, sizeof(base), "%.*s",
		 (int)(named->domain - named->name - 1 - (ptrdiff_t)strlen(RING_TEMPORARY_MARK)),
		 named->name + 1);
	ring_temporary_name(parent->fd, base, into);
	return !renameat(parent->fd, named->name, parent->fd, into);
}

static bool remove_if_abandoned(const struct ring_folder *parent, struct ring_clock *clock,
				const struct named *named, struct base_budget *budget)
{
	const char *name = named->name;
	const int flags = O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC;
	struct ring_folder folder = RING_NO_FOLDER;
	bool removed = false, is_folder;
	char ours[NAME_MAX + 1];
	int fd;

	/* O_NONBLOCK: should it be a pipe after all, do not wait for it. */
	fd = base_own(openat(parent->fd, name, O_RDWR | flags));
	is_folder = fd < 0 && errno == EISDIR && !ring_folder_open_in(&folder, parent, name, NULL);
	/* The lock is held until after the removal: a writer that just created it will notice. And
	 * a directory may have got its name between our open and its unlock. */
	if (is_folder && is_abandoned(folder.fd, named, clock, budget) &&
	    ring_folder_is_named(&folder, parent, name) && take_over(parent, named, ours))
		removed = !ring_folder_remove_some(&folder, parent, ours, NULL, NULL, budget, NULL);
	else if (fd >= 0 && is_abandoned(fd, named, clock, budget) && base_budget_take(budget))
		removed = !unlinkat(parent->fd, name, 0);
	ring_folder_close(&folder);
	base_close(fd);
	return removed;
}

void ring_remove_stale(int directory_fd, const char *directory, struct base_budget *budget,
		       const struct base_log *log)
{
	const struct ring_folder parent = { .fd = directory_fd, .path = strdup(directory) };
	struct ring_clock clock = { .directory_fd = directory_fd };
	char own[RING_DOMAIN_BYTES];
	struct dirent *entry;
	struct named named;
	DIR *listing;

	listing = ring_listing(directory_fd);
	if (!listing || !parent.path)
		goto out;
	ring_lock_domain(directory_fd, own);
	for (unsigned seen = 0; seen < MAX_ENTRIES && (entry = readdir(listing)); seen++) {
		named.name = entry->d_name;
		if (!is_temporary_name(named.name, &named.domain))
			continue;
		if (!base_budget_look(budget))
			break;
		named.same_domain = ring_is_lock_domain(named.domain, own);
		if (remove_if_abandoned(&parent, &clock, &named, budget))
			base_log(log, IOSHAPE_LOG_WARNING,
				 "removed %s in %s, left behind by a dead process", entry->d_name,
				 directory);
	}
	if (budget && base_budget_is_spent(budget))
		base_log(log, IOSHAPE_LOG_WARNING,
			 "removed a part of what dead processes left behind in %s: the next save "
			 "removes more",
			 directory);
out:
	if (listing)
		closedir(listing);
	free(parent.path);
}
