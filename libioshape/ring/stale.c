/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Temporary files of writers that were killed. A living writer holds a lock on its file; a lock
 * that can be had means that it is dead - if both are on one machine. Across machines locks may not
 * be shared, so there only files that nobody has touched for a day count as abandoned.
 */
#define _GNU_SOURCE
#include "ring/destination.h"
#include "ring/folder.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#define ABANDONED_AFTER_S (24 * 3600)

/* Of a directory so full, only so much is looked at. */
#define MAX_ENTRIES 100000

/* Hex digits only, `count` of them. */
static bool is_hex(const char *text, size_t count)
{
	return strspn(text, "0123456789abcdef") >= count;
}

/* Names end in the mark, 8 digits for the machine, "-" and 16 random ones. */
static bool is_temporary_name(const char *name, const char **machine)
{
	const size_t tail = 8 + 1 + 16, mark = strlen(RING_TEMPORARY_MARK), length = strlen(name);

	if (*name != '.' || length < mark + tail)
		return false;
	*machine = name + length - tail;
	return !strncmp(*machine - mark, RING_TEMPORARY_MARK, mark) && is_hex(*machine, 8) &&
	       (*machine)[8] == '-' && is_hex(*machine + 9, 16);
}

static bool is_abandoned(int fd, bool same_machine)
{
	bool locked = !flock(fd, LOCK_EX | LOCK_NB);
	struct stat status;

	if (!locked && errno == EWOULDBLOCK)
		return false;
	if (fstat(fd, &status) || !S_ISREG(status.st_mode) || status.st_uid != geteuid())
		return false;
	if (locked && same_machine)
		return true;
	return time(NULL) - status.st_mtime > ABANDONED_AFTER_S;
}

static bool remove_if_abandoned(int directory_fd, const char *name, bool same_machine)
{
	bool removed = false;
	int fd;

	/* O_NONBLOCK: should it be a pipe after all, do not wait for it. */
	fd = openat(directory_fd, name, O_RDWR | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC);
	if (fd < 0)
		return false;
	/* The lock is held until after the unlink: a writer that just created it will notice. */
	if (is_abandoned(fd, same_machine))
		removed = !unlinkat(directory_fd, name, 0);
	close(fd);
	return removed;
}

unsigned ring_remove_stale(int directory_fd, const char *directory, const struct base_log *log)
{
	const char *tag = ring_machine_tag(), *machine;
	struct dirent *entry;
	unsigned removed = 0;
	bool same_machine;
	DIR *listing;

	listing = ring_listing(directory_fd);
	if (!listing)
		return 0;
	for (unsigned seen = 0; seen < MAX_ENTRIES && (entry = readdir(listing)); seen++) {
		if (!is_temporary_name(entry->d_name, &machine))
			continue;
		same_machine = !strncmp(machine, tag, 8) && strcmp(tag, RING_UNKNOWN_MACHINE);
		if (remove_if_abandoned(directory_fd, entry->d_name, same_machine)) {
			base_log(log, IOSHAPE_LOG_WARNING,
				 "removed %s in %s, left behind by a dead process", entry->d_name,
				 directory);
			removed++;
		}
	}
	closedir(listing);
	return removed;
}
