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

int ring_writer_resemble(struct ring_writer *writer, struct base_error *error)
{
	const struct ring_original *original = original_of(writer);
	struct timespec times[2] = { { .tv_nsec = UTIME_OMIT } };

	if (!original)
		return 0;
	if (!writer->file.replaces && has_other_umask(original) &&
	    fchmod(writer->file.fd, original->mode & 0777))
		ring_note(writer->notes, IOSHAPE_STEP_OWNER, "mode of the original not kept: %s",
			  ioshape_strerror(-errno));
	times[1].tv_sec = original->modified_ns / 1000000000;
	times[1].tv_nsec = original->modified_ns % 1000000000;
	if (futimens(writer->file.fd, times))
		return base_fail(error, -errno, "cannot set the time of \"%s\"", writer->file.path);
	return 0;
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
