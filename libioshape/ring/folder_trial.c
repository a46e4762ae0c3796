/* SPDX-License-Identifier: Apache-2.0 */
/* What files in a directory are like, where the directory itself does not tell. */
#define _GNU_SOURCE
#include "ring/folder.h"

#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

/* Of a directory so full, only so many entries are looked at. */
#define MOST_ENTRIES 1000

/* One that is there. Nothing is read of it. */
static int open_any_file(int directory_fd)
{
	const int flags = O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_NOCTTY | O_CLOEXEC;
	DIR *listing = ring_listing(directory_fd);
	struct dirent *entry;
	struct stat status;
	int fd = -1;

	if (!listing)
		return -1;
	for (unsigned i = 0; fd < 0 && i < MOST_ENTRIES && (entry = readdir(listing)); i++) {
		/* Not even opened if it is a device: that may do something. */
		if (!fstatat(directory_fd, entry->d_name, &status, AT_SYMLINK_NOFOLLOW) &&
		    S_ISREG(status.st_mode))
			fd = base_above_streams(openat(directory_fd, entry->d_name, flags));
	}
	closedir(listing);
	return fd;
}

int ring_folder_try_file(const struct ring_folder *folder, struct fs_info *info,
			 struct base_error *error)
{
	/* It has no name, and is gone when it is closed. Network filesystems have no such files. */
	int fd = base_above_streams(openat(folder->fd, ".", O_TMPFILE | O_RDWR | O_CLOEXEC, 0600)),
	    flags, ret;

	if (fd < 0)
		fd = open_any_file(folder->fd);
	if (fd < 0)
		return fs_describe(folder->fd, folder->path, NULL, info, error);
	ret = fs_describe(fd, folder->path, NULL, info, error);
	flags = fcntl(fd, F_GETFL);
	if (!ret && !info->direct_known && flags >= 0) {
		info->direct_works = !fcntl(fd, F_SETFL, flags | O_DIRECT);
		info->direct_known = info->direct_works || errno == EINVAL;
	}
	close(fd);
	return ret;
}
