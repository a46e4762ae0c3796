/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A FUSE filesystem that shows another directory: passthrough DIRECTORY MOUNTPOINT [direct |
 * in-order | late | users]. For tests.
 *
 * It has no fallocate, like many filesystems. "direct": the kernel does not cache. "in-order":
 * files can only be written from front to back. "late": times of files are by a clock that is two
 * days late. "users": all users may use it, as the modes of files allow.
 */
#define _GNU_SOURCE
#define FUSE_USE_VERSION 31

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <fuse.h>
#include <stdbool.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

static int root; /* the directory that is shown */
static int uncached, in_order, late_s, for_users;

/* Returns a FUSE path, which begins with a slash, relative to the root. */
static const char *below(const char *path)
{
	return path[1] ? path + 1 : ".";
}

static int answer(int result)
{
	return result < 0 ? -errno : 0;
}

static void *pass_init(struct fuse_conn_info *connection, struct fuse_config *config)
{
	(void)connection;
	config->use_ino = 1;
	config->kernel_cache = 0;
	/* Files below are changed without passing through this filesystem. */
	if (for_users)
		config->entry_timeout = config->attr_timeout = 0;
	return NULL;
}

/* Gives a new file to the caller, because this process creates it as its own. */
static int hand_over(const char *path)
{
	const struct fuse_context *caller = fuse_get_context();

	return !for_users ? 0 :
			    answer(fchownat(root, below(path), caller->uid, caller->gid,
					    AT_SYMLINK_NOFOLLOW));
}

static int pass_getattr(const char *path, struct stat *status, struct fuse_file_info *file)
{
	const int ret = answer(file ? fstat((int)file->fh, status) :
				      fstatat(root, below(path), status, AT_SYMLINK_NOFOLLOW));

	status->st_mtime -= late_s;
	status->st_ctime -= late_s;
	return ret;
}

static int pass_open(const char *path, struct fuse_file_info *file)
{
	/* The kernel's cache handles these flags, so the filesystem below must not. */
	int fd = openat(root, below(path), file->flags & ~(O_DIRECT | O_CREAT | O_EXCL));

	if (fd < 0)
		return -errno;
	file->fh = (uint64_t)fd;
	file->direct_io = uncached & 1;
	return 0;
}

static int pass_create(const char *path, mode_t mode, struct fuse_file_info *file)
{
	int fd = openat(root, below(path), (file->flags & ~O_DIRECT) | O_CREAT, mode);

	if (fd < 0)
		return -errno;
	file->fh = (uint64_t)fd;
	file->direct_io = uncached & 1;
	return hand_over(path);
}

static int pass_read(const char *path, char *into, size_t bytes, off_t offset,
		     struct fuse_file_info *file)
{
	ssize_t got = pread((int)file->fh, into, bytes, offset);

	(void)path;
	return got < 0 ? -errno : (int)got;
}

/* Returns whether the offset is the end of the file. */
static bool is_end(int fd, off_t offset)
{
	struct stat status;

	return !fstat(fd, &status) && status.st_size == offset;
}

static int pass_write(const char *path, const char *from, size_t bytes, off_t offset,
		      struct fuse_file_info *file)
{
	ssize_t done;

	(void)path;
	if (in_order && !is_end((int)file->fh, offset))
		return -EOPNOTSUPP;
	done = pwrite((int)file->fh, from, bytes, offset);
	return done < 0 ? -errno : (int)done;
}

static int pass_release(const char *path, struct fuse_file_info *file)
{
	(void)path;
	close((int)file->fh);
	return 0;
}

static int pass_fsync(const char *path, int data_only, struct fuse_file_info *file)
{
	(void)path;
	return answer(data_only ? fdatasync((int)file->fh) : fsync((int)file->fh));
}

static int pass_truncate(const char *path, off_t bytes, struct fuse_file_info *file)
{
	int fd, ret;

	if (in_order)
		return -EOPNOTSUPP;
	if (file)
		return answer(ftruncate((int)file->fh, bytes));
	fd = openat(root, below(path), O_WRONLY);
	if (fd < 0)
		return -errno;
	ret = answer(ftruncate(fd, bytes));
	close(fd);
	return ret;
}

static int pass_rename(const char *from, const char *to, unsigned flags)
{
	return answer(renameat2(root, below(from), root, below(to), flags));
}

static int pass_mkdir(const char *path, mode_t mode)
{
	const int ret = answer(mkdirat(root, below(path), mode));

	return ret ? ret : hand_over(path);
}

static int pass_rmdir(const char *path)
{
	return answer(unlinkat(root, below(path), AT_REMOVEDIR));
}

static int pass_unlink(const char *path)
{
	return answer(unlinkat(root, below(path), 0));
}

static int pass_chmod(const char *path, mode_t mode, struct fuse_file_info *file)
{
	(void)file;
	return answer(fchmodat(root, below(path), mode, 0));
}

static int pass_chown(const char *path, uid_t user, gid_t group, struct fuse_file_info *file)
{
	(void)file;
	return answer(fchownat(root, below(path), user, group, AT_SYMLINK_NOFOLLOW));
}

static int pass_statfs(const char *path, struct statvfs *status)
{
	(void)path;
	return answer(fstatvfs(root, status));
}

static int pass_readdir(const char *path, void *buffer, fuse_fill_dir_t fill, off_t offset,
			struct fuse_file_info *file, enum fuse_readdir_flags flags)
{
	int fd = openat(root, below(path), O_RDONLY | O_DIRECTORY);
	DIR *listing = fd < 0 ? NULL : fdopendir(fd);
	struct dirent *entry;

	(void)offset;
	(void)file;
	(void)flags;
	if (!listing)
		return -errno;
	while ((entry = readdir(listing)))
		fill(buffer, entry->d_name, NULL, 0, 0);
	closedir(listing);
	return 0;
}

static const struct fuse_operations operations = {
	.init = pass_init,
	.getattr = pass_getattr,
	.open = pass_open,
	.create = pass_create,
	.read = pass_read,
	.write = pass_write,
	.release = pass_release,
	.fsync = pass_fsync,
	.truncate = pass_truncate,
	.rename = pass_rename,
	.mkdir = pass_mkdir,
	.rmdir = pass_rmdir,
	.unlink = pass_unlink,
	.chmod = pass_chmod,
	.chown = pass_chown,
	.statfs = pass_statfs,
	.readdir = pass_readdir,
};

int main(int count, char **arguments)
{
	/* Runs in the foreground until the process that started it ends it. */
	char foreground[] = "-f", options[] = "-oallow_other,default_permissions";
	char *fuse_arguments[] = { arguments[0], foreground, arguments[count > 2 ? 2 : 0], options,
				   NULL };

	if (count < 3) {
		fprintf(stderr, "Usage: passthrough DIRECTORY MOUNTPOINT [direct | in-order | late "
				"| users]\n");
		return 2;
	}
	root = open(arguments[1], O_RDONLY | O_DIRECTORY);
	if (root < 0) {
		perror(arguments[1]);
		return 1;
	}
	uncached = count > 3 && !strcmp(arguments[3], "direct");
	in_order = count > 3 && !strcmp(arguments[3], "in-order");
	late_s = count > 3 && !strcmp(arguments[3], "late") ? 2 * 24 * 3600 : 0;
	for_users = count > 3 && !strcmp(arguments[3], "users");
	umask(0);
	return fuse_main(for_users ? 4 : 3, fuse_arguments, &operations, NULL);
}
