/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A FUSE filesystem with prepared answers: answering ANSWERS MOUNTPOINT SOURCE. It has three
 * directories and two files.
 *
 * The value of "lustre.lov" of /file is the file ANSWERS/_file.lustre.lov; the result of an ioctl
 * of /directory is ANSWERS/_directory.ioctl-800866a8. If the file is missing, the filesystem
 * answers like a filesystem without that attribute or ioctl. Each question is appended to
 * ANSWERS/asked as a line.
 *
 * For tests only: the filesystem checks no permissions.
 */
#define _GNU_SOURCE
#define FUSE_USE_VERSION 35

#include <errno.h>
#include <fcntl.h>
#include <fuse.h>
#include <stdio.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/stat.h>
#include <unistd.h>

static int answers;

static const char *const directories[] = { "/", "/directory", "/directory/inner" };
static const char *const files[] = { "/file", "/directory/file" };

#define LENGTH(array) (sizeof(array) / sizeof((array)[0]))

static int tell_status(const char *path, struct stat *status, struct fuse_file_info *file)
{
	(void)file;
	memset(status, 0, sizeof(*status));
	status->st_nlink = 1;
	for (size_t i = 0; i < LENGTH(directories); i++) {
		if (!strcmp(path, directories[i]))
			status->st_mode = S_IFDIR | 0755;
	}
	for (size_t i = 0; i < LENGTH(files); i++) {
		if (!strcmp(path, files[i]))
			status->st_mode = S_IFREG | 0644;
	}
	return status->st_mode ? 0 : -ENOENT;
}

static int open_any(const char *path, struct fuse_file_info *file)
{
	(void)path;
	(void)file;
	return 0;
}

/*
 * Opens the answer "_directory_inner.NAME" to a question about `path`, and logs the question.
 * Returns a descriptor, or -1 if there is no answer.
 */
static int open_answer(const char *path, const char *name)
{
	char whole[512], *at;
	int log, length;

	length = snprintf(whole, sizeof(whole), "%s.%s\n", path, name);
	log = openat(answers, "asked", O_WRONLY | O_CREAT | O_APPEND, 0644);
	if (log >= 0 && write(log, whole, (size_t)length) != length)
		perror("asked");
	if (log >= 0)
		close(log);
	whole[length - 1] = 0;
	for (at = strchr(whole, '/'); at; at = strchr(at, '/'))
		*at = '_';
	return openat(answers, whole, O_RDONLY);
}

static int tell_attribute(const char *path, const char *name, char *into, size_t room)
{
	int fd = open_answer(path, name);
	struct stat status;
	ssize_t got = 0;

	if (fd < 0)
		return -ENODATA;
	if (fstat(fd, &status) || (room && (size_t)status.st_size > room))
		got = -ERANGE;
	else if (room)
		got = read(fd, into, room);
	else
		got = status.st_size;
	close(fd);
	return (int)got;
}

static int tell_ioctl(const char *path, unsigned number, void *argument,
		      struct fuse_file_info *file, unsigned flags, void *data)
{
	char name[32];
	int fd;

	(void)argument;
	(void)file;
	(void)flags;
	snprintf(name, sizeof(name), "ioctl-%08x", number);
	fd = open_answer(path, name);
	if (fd < 0)
		return -ENOTTY;
	if (read(fd, data, _IOC_SIZE(number)) < 0)
		perror(name);
	close(fd);
	return 0;
}

static const struct fuse_operations operations = {
	.getattr = tell_status,
	.open = open_any,
	.opendir = open_any,
	.getxattr = tell_attribute,
	.ioctl = tell_ioctl,
};

int main(int count, char **arguments)
{
	/* Runs in the foreground until the process that started it ends it. */
	char foreground[] = "-f", alone[] = "-s", with[] = "-o", options[512];
	char *fuse_arguments[] = { arguments[0], foreground, alone,
				   with,         options,    arguments[count > 2 ? 2 : 0],
				   NULL };

	if (count != 4) {
		fprintf(stderr, "Usage: answering ANSWERS MOUNTPOINT SOURCE\n");
		return 2;
	}
	answers = open(arguments[1], O_RDONLY | O_DIRECTORY);
	if (answers < 0) {
		perror(arguments[1]);
		return 1;
	}
	snprintf(options, sizeof(options), "subtype=answering,fsname=%s", arguments[3]);
	return fuse_main(6, fuse_arguments, &operations, NULL);
}
