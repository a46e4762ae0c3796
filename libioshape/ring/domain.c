/* SPDX-License-Identifier: Apache-2.0 */
/* Where a lock is seen, and what time it is there. */
#define _GNU_SOURCE
#include "ring/destination.h"
#include "ring/folder.h"
#include "ring/lane.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#define ABANDONED_AFTER_S (24 * 3600)

static char machine_tag[RING_DOMAIN_BYTES];

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
		strcpy(machine_tag, RING_NOWHERE);
}

const char *ring_machine_tag(void)
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
void ring_lock_domain(int directory_fd, char *domain)
{
	const char *machine = ring_machine_tag();
	struct statx status;
	char text[64];

	strcpy(domain, RING_NOWHERE);
	/* What the kernel knows by itself: no question to a server. */
	if (!strcmp(machine, RING_NOWHERE) ||
	    statx(directory_fd, "", AT_EMPTY_PATH | AT_STATX_DONT_SYNC, 0, &status))
		return;
	snprintf(text, sizeof(text), "%s %x:%x", machine, status.stx_dev_major,
		 status.stx_dev_minor);
	snprintf(domain, RING_DOMAIN_BYTES, "%08x", base_crc32(0, text, strlen(text)));
}

bool ring_is_lock_domain(const char *digits, const char domain[RING_DOMAIN_BYTES])
{
	return strcmp(domain, RING_NOWHERE) && !strncmp(digits, domain, RING_DOMAIN_BYTES - 1);
}

void ring_temporary_name(int folder_fd, const char *name, char into[NAME_MAX + 1])
{
	char end[64], domain[RING_DOMAIN_BYTES];

	ring_lock_domain(folder_fd, domain);
	snprintf(end, sizeof(end), RING_TEMPORARY_MARK "%s-%016llx", domain,
		 (unsigned long long)base_random());
	snprintf(into, NAME_MAX + 1, ".%.*s%s", NAME_MAX - 1 - (int)strlen(end), name, end);
}

int ring_look_at_new(int folder_fd, struct stat *status)
{
	const int flags = O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC;
	char name[NAME_MAX + 1];
	int fd, ret;

	ring_temporary_name(folder_fd, "new", name);
	fd = base_own(openat(folder_fd, name, flags, 0600));
	if (fd < 0)
		return -errno;
	ret = fstat(fd, status) ? -errno : 0;
	unlinkat(folder_fd, name, 0);
	base_close(fd);
	return ret;
}

bool ring_is_abandoned(struct ring_clock *clock, int64_t touched)
{
	struct stat status;

	if (!clock->now)
		clock->now = ring_look_at_new(clock->directory_fd, &status) ? -1 : status.st_mtime;
	return clock->now > 0 && clock->now - touched > ABANDONED_AFTER_S;
}

int ring_time_in(const char *directory, int64_t *now_ns, struct base_error *error)
{
	struct ring_folder folder;
	struct stat status;
	int ret;

	ret = ring_folder_open(&folder, directory, error);
	if (ret)
		return ret;
	ret = ring_look_at_new(folder.fd, &status);
	if (!ret)
		*now_ns = ring_modified_ns(&status);
	ring_folder_close(&folder);
	return !ret ? 0 :
		      base_fail(error, ret, "cannot create a file in \"%s\"" BASE_REMEDY "%s",
				directory, ring_remedy(ret));
}
