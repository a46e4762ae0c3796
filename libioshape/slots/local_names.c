/* SPDX-License-Identifier: Apache-2.0 */
/* Which pools have a file in the folder; and what dead processes left there. */
#include "slots/local.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#define KEPT_S (24 * 3600) /* nobody takes part, and nothing was written */

/* Others may fill the folder: more entries are not looked at. */
#define MOST_ENTRIES 100000

static bool is_ours(const char *name)
{
	char end[24];
	const int tail = snprintf(end, sizeof(end), ".v%u.slots", LOCAL_VERSION);
	const int bytes = (int)strnlen(name, LOCAL_FILE_NAME_BYTES);

	return bytes > tail && !strncmp(name, "ioshape-", strlen("ioshape-")) &&
	       !strcmp(name + bytes - tail, end);
}

/* What a file of somebody's says, read without its lock: the name in it does not change. */
static bool read_name(int folder, const char *name, struct local_head *head)
{
	char expected[LOCAL_FILE_NAME_BYTES];
	int fd = base_above_streams(
		openat(folder, name, O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_NOCTTY | O_CLOEXEC));
	bool got;

	if (fd < 0)
		return false;
	got = local_read_head(fd, head);
	close(fd);
	if (!got || head->flags & LOCAL_GONE || !head->pool[0])
		return false;
	for (const char *c = head->pool; *c; c++) {
		if (*c < ' ' || *c > '~')
			return false;
	}
	/* Otherwise it would be a name that leads somewhere else. */
	local_file_name(expected, head->pool);
	return !strcmp(name, expected);
}

/* A file of a pool that nobody in this process has open, last changed long ago. */
static void remove_old(int folder, const char *name)
{
	int fd = base_above_streams(
		openat(folder, name, O_RDWR | O_NOFOLLOW | O_NONBLOCK | O_NOCTTY | O_CLOEXEC));
	struct local_head head;

	if (fd < 0)
		return;
	/* The locks end with the descriptor. */
	if (!local_lock(fd) && !local_others(fd) && local_read_head(fd, &head) &&
	    !local_is_set(&head) && !local_write_gone(fd, &head))
		unlinkat(folder, name, 0);
	close(fd);
}

/* Those of this user, as others cannot be removed; root tries them all. */
static bool is_old(const struct stat *stat)
{
	return (base_is_own_user(stat->st_uid) || !geteuid()) &&
	       stat->st_mtim.tv_sec < time(NULL) - KEPT_S;
}

/* With the lock of this process's files. */
static int add_name(struct base_buffer *names, int folder, const char *entry)
{
	struct local_head head;
	struct local_file *own;
	struct stat stat;
	const char *pool;
	int ret;

	if (fstatat(folder, entry, &stat, AT_SYMLINK_NOFOLLOW) || !S_ISREG(stat.st_mode) ||
	    stat.st_nlink != 1)
		return 0;
	own = local_files_find(&stat);
	if (!own && is_old(&stat))
		remove_old(folder, entry);
	if (!own && !read_name(folder, entry, &head))
		return 0;
	pool = own ? own->pool : head.pool;
	ret = base_buffer_append(names, pool, strlen(pool));
	return ret ? ret : base_buffer_append(names, "\n", 1);
}

int local_names(void *opaque, struct base_buffer *names, struct base_error *error)
{
	struct local_pool *pool = opaque;
	const char *path = local_folder(pool);
	DIR *folder = opendir(path);
	struct dirent *entry = NULL;
	bool listed = false;
	int ret = 0;

	/* fork() waits for the lock: it is held for one file at a time. */
	for (long looked = 0; folder && !ret && looked < MOST_ENTRIES; looked++) {
		errno = 0;
		entry = readdir(folder);
		listed = entry || !errno;
		if (!entry)
			break;
		if (!is_ours(entry->d_name))
			continue;
		local_files_hold();
		ret = add_name(names, dirfd(folder), entry->d_name);
		local_files_go_on();
	}
	if (folder)
		closedir(folder);
	if (ret)
		return base_no_memory(error, "names of pools", names->bytes);
	return listed ? 0 :
			base_refuse(error, IOSHAPE_E_COORDINATOR,
				    "the folder \"%s\", where processes queue for slots, cannot be "
				    "read",
				    path);
}
