/* SPDX-License-Identifier: Apache-2.0 */
/* New files with a layout on BeeGFS: made by their directory, by name. */
#define _GNU_SOURCE
#include "fs/ask.h"
#include "fs/family.h"

#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/stat.h>
#include <unistd.h>

#define BEEGFS_MKFILE_STRIPEHINTS 0x4018661bu
#define BEEGFS_MOST_TARGETS 0xffffu

/* Part of its client's ABI, on hosts with pointers of 64 bits. */
struct beegfs_hints {
	const char *name;
	uint32_t mode;
	uint32_t targets; /* 0: as the directory */
	uint32_t chunk;
};

static bool is_ours_and_new(int fd)
{
	struct stat status;

	return !fstat(fd, &status) && S_ISREG(status.st_mode) && !status.st_size &&
	       status.st_nlink == 1 && base_is_own_user(status.st_uid);
}

int fs_ask_beegfs(int directory_fd, const char *name, mode_t mode, const struct fs_layout *ask,
		  struct fs_answer *answer)
{
	const struct fs_part *part = &ask->parts[0];
	struct beegfs_hints hints;
	int fd, code;

	memset(&hints, 0, sizeof(hints)); /* what lies between its fields, too */
	hints.name = name;
	hints.mode = mode;
	hints.targets = MIN(part->stripe_count, BEEGFS_MOST_TARGETS);
	hints.chunk = (uint32_t)part->stripe_bytes;
	if (sizeof(hints) != 24 || ask->count != 1) {
		errno = EOPNOTSUPP;
		fs_refused(answer, "a file with hints");
		return -EOPNOTSUPP;
	}
	/* By name, under the directory, and only if there is none. */
	if (ioctl(directory_fd, BEEGFS_MKFILE_STRIPEHINTS, &hints)) {
		code = -errno;
		fs_refused(answer, "a file with hints");
		return code;
	}
	fd = base_above_streams(
		openat(directory_fd, name, O_RDWR | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC));
	if (fd < 0 || !is_ours_and_new(fd)) {
		code = fd < 0 ? -errno : -EBUSY;
		errno = -code;
		fs_refused(answer, "opening a file with hints");
		unlinkat(directory_fd, name, 0);
		if (fd >= 0)
			close(fd);
		return code;
	}
	/* It was for the case that something else had taken its place. */
	fcntl(fd, F_SETFL, fcntl(fd, F_GETFL) & ~O_NONBLOCK);
	/* Whatever its stripes, it is a file like all others. */
	answer->plain = true;
	fs_ask_for_layout(fd, FS_BEEGFS, false, &answer->got);
	return fd;
}
