/* SPDX-License-Identifier: Apache-2.0 */
/* Which pools have a file in the folder. */
#include "slots/local.h"

#include <dirent.h>
#include <fcntl.h>
#include <string.h>
#include <unistd.h>

static bool is_ours(const char *name)
{
	const size_t bytes = strlen(name), tail = strlen(".slots");

	return bytes > tail && !strncmp(name, "ioshape-", strlen("ioshape-")) &&
	       !strcmp(name + bytes - tail, ".slots");
}

/* What a file of somebody's says: whole states, read without its lock. */
static bool read_name(int folder, const char *name, struct local_header *header)
{
	union local_half halves[2] = { 0 };
	char expected[LOCAL_FILE_NAME_BYTES];
	int fd = openat(folder, name, O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_NOCTTY | O_CLOEXEC);
	bool got;

	if (fd < 0)
		return false;
	got = pread(fd, halves, sizeof(halves), 0) > 0;
	close(fd);
	if (!got || !local_peek(halves, header) || header->flags & LOCAL_GONE || !header->pool[0])
		return false;
	for (const char *c = header->pool; *c; c++) {
		if (*c < ' ' || *c > '~')
			return false;
	}
	/* Otherwise it would be a name that leads somewhere else. */
	local_file_name(expected, header->pool);
	return !strcmp(name, expected);
}

static int add_name(struct base_buffer *names, int folder, const char *entry)
{
	struct local_header header;
	struct local_file *own;
	struct stat stat;
	const char *pool;
	int ret;

	if (!is_ours(entry) || fstatat(folder, entry, &stat, AT_SYMLINK_NOFOLLOW) ||
	    !S_ISREG(stat.st_mode))
		return 0;
	own = local_files_find(&stat);
	if (!own && !read_name(folder, entry, &header))
		return 0;
	pool = own ? own->pool : header.pool;
	ret = base_buffer_append(names, pool, strlen(pool));
	return ret ? ret : base_buffer_append(names, "\n", 1);
}

int local_names(void *opaque, struct base_buffer *names, struct base_error *error)
{
	struct local_pool *pool = opaque;
	const char *path = local_folder(pool);
	DIR *folder = opendir(path);
	struct dirent *entry;
	int ret = 0;

	if (!folder)
		return base_fail(error, IOSHAPE_E_COORDINATOR,
				 "the folder \"%s\", where processes take turns, cannot be read",
				 path);
	local_files_hold();
	while (!ret && (entry = readdir(folder)))
		ret = add_name(names, dirfd(folder), entry->d_name);
	local_files_go_on();
	closedir(folder);
	return ret ? base_no_memory(error, "names of pools", names->bytes) : 0;
}
