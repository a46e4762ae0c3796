/* SPDX-License-Identifier: Apache-2.0 */
/* What a file that is a copy has in common with its original, and what it does not replace. */
#define _GNU_SOURCE
#include "ring/folder.h"
#include "ring/writer.h"

#include <errno.h>
#include <fcntl.h>
#include <sys/stat.h>

static const struct ring_original *original_of(const struct ring_writer *writer)
{
	return writer->nil || writer->file.stream ? NULL : writer->options.original;
}

/*
 * Made under the umask of the process that saved the original. Where ours is the same, the kernel
 * has applied it, or in its place the directory's default ACL.
 */
static bool has_other_umask(const struct ring_original *original)
{
	const int umask = base_umask();

	return umask < 0 || (original->mode & 0666) != (0666 & ~(unsigned)umask);
}

static int set_time(int fd, int64_t modified_ns)
{
	const struct timespec times[2] = {
		{ .tv_nsec = UTIME_OMIT },
		{ modified_ns / 1000000000, modified_ns % 1000000000 },
	};

	return futimens(fd, times) ? -errno : 0;
}

int ring_writer_resemble(struct ring_writer *writer, struct base_error *error)
{
	const struct ring_original *original = original_of(writer);
	int ret;

	if (!original)
		return 0;
	if (!writer->file.replaces && has_other_umask(original) &&
	    fchmod(writer->file.fd, original->mode & 0777))
		ring_note(writer->notes, IOSHAPE_STEP_OWNER, "mode of the original not kept: %s",
			  ioshape_strerror(-errno));
	ret = set_time(writer->file.fd, original->modified_ns);
	return !ret ? 0 : base_fail(error, ret, "cannot set the time of \"%s\"", writer->file.path);
}

int ring_folder_resemble(const struct ring_folder *folder, const struct ring_original *original,
			 struct base_error *error)
{
	struct stat status;
	int ret = fstat(folder->fd, &status) ? -errno : 0;

	/* As the process made it that saved the original. */
	if (!ret && (status.st_mode & 0777) != (original->mode & 0777) &&
	    fchmod(folder->fd, original->mode & 07777))
		ret = -errno;
	if (!ret)
		ret = set_time(folder->fd, original->modified_ns);
	return !ret ? 0 : base_fail(error, ret, "cannot set the time of \"%s\"", folder->path);
}

int ring_writer_check_newest(const struct ring_writer *writer, struct base_error *error)
{
	const struct ring_original *original = original_of(writer);
	struct stat there;

	/* Whatever else it cannot be looked at for, the rename will say. */
	if (!original ||
	    fstatat(writer->file.directory_fd, writer->file.name, &there, AT_SYMLINK_NOFOLLOW))
		return 0;
	if (ring_modified_ns(&there) <= original->newest_ns)
		return 0;
	return base_refuse(error, -EEXIST, "\"%s\" is newer than what was to replace it",
			   writer->file.path);
}
