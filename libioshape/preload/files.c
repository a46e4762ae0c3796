/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Files of this process, by descriptor. A descriptor's bytes are counted. After half of
 * IOSHAPE_PRELOAD_BYTES the file is looked at for the first time, after the other half for the
 * second time. If it has grown in between by about what was written, it is a large sequential
 * write.
 *
 * The table may be wrong about a descriptor, because programs close and duplicate descriptors in
 * ways that a library does not see. So a look compares the file's identity with that of the last
 * look, and nothing waits before a look.
 */
#define _GNU_SOURCE
#include "preload/preload.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/magic.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/statfs.h>

/* A large file is looked at again, and its dirty pages begin to be written, after so many bytes. */
#define BLOCK_BYTES (UINT64_C(8) << 20)

#ifndef XFS_SUPER_MAGIC /* new in Linux 4.20 */
#define XFS_SUPER_MAGIC 0x58465342
#endif

/* Mark in the temporary names of ioshape's own saves, which have slots (io/atomic_file.h). */
#define OWN_MARK ".ioshape-tmp-"

/* Page-aligned on all machines, for madvise(). */
__attribute__((aligned(65536))) struct preload_file preload_files[PRELOAD_FILES];
uint64_t preload_look_bytes, preload_large_bytes;

/* Is true while this thread looks at a file. A signal handler that writes meanwhile passes. */
static __thread bool inside __attribute__((tls_model("initial-exec")));

void preload_files_prepare(void)
{
	/* A forked child counts from zero. Where the kernel cannot do that, before Linux 4.14, it
	 * does not own the table and passes all calls. */
	madvise(preload_files, sizeof(preload_files), MADV_WIPEONFORK);
	preload_look_bytes = preload_settings.bytes / 2 + preload_settings.bytes % 2;
	preload_large_bytes = preload_settings.bytes;
}

/* Counts a descriptor's bytes from `bytes` on. A file that was large leaves its turn. */
static void count_from(struct preload_file *file, enum preload_kind kind, uint64_t bytes,
		       bool closed)
{
	if (atomic_exchange(&file->kind, kind) == PRELOAD_LARGE)
		preload_turn_leave(file->turn, closed);
	atomic_store(&file->bytes, bytes);
}

static void restart_count(struct preload_file *file)
{
	count_from(file, PRELOAD_NEW, 0, false);
}

/* ---- Looking at a file ----------------------------------------------------------------------- */

/* Returns whether the filesystem is certainly of this host only. The holder decides about others.
 */
static bool is_local(int fd)
{
	struct statfs found;

	if (fstatfs(fd, &found))
		return true;
	switch ((unsigned long)found.f_type) {
	case EXT4_SUPER_MAGIC:
	case XFS_SUPER_MAGIC:
	case BTRFS_SUPER_MAGIC:
	case TMPFS_MAGIC:
	case RAMFS_MAGIC:
	case OVERLAYFS_SUPER_MAGIC:
		return true;
	default:
		return false;
	}
}

/* Finds the path of a file that shall take a slot. Returns false if it shall not. */
static bool find_path(int fd, char *path)
{
	char name[32];
	ssize_t bytes;

	if (!preload_settings.everywhere && is_local(fd))
		return false;
	snprintf(name, sizeof(name), "/proc/self/fd/%d", fd);
	bytes = readlink(name, path, MAILBOX_PATH_BYTES - 1);
	if (bytes <= 0 || *path != '/')
		return false;
	path[bytes] = 0;
	return !strstr(path, OWN_MARK) && !preload_excludes(path);
}

static bool is_same(const struct preload_file *file, const struct stat *found)
{
	return file->device == found->st_dev && file->inode == found->st_ino;
}

/* Returns whether the file has grown by three quarters of what was written since the last look. */
static bool has_grown(const struct preload_file *file, const struct stat *found, int64_t position,
		      uint64_t written)
{
	int64_t growth = found->st_size - file->size;

	if (position - file->position > growth)
		growth = position - file->position;
	return growth > 0 && (uint64_t)growth / 3 >= written / 4;
}

/* Decides whether a file is a large sequential write. `written` bytes were written since the last
 * look, and `bytes` will be written now. */
static void decide(struct preload_file *file, int fd, uint64_t written, uint64_t bytes)
{
	char path[MAILBOX_PATH_BYTES];
	struct preload_turn *turn;
	struct stat found;
	int64_t position;
	bool large;

	if (fstat(fd, &found) || !S_ISREG(found.st_mode)) {
		restart_count(file);
		return;
	}
	position = lseek(fd, 0, SEEK_CUR);
	large = bytes >= preload_large_bytes ||
		(atomic_load(&file->kind) == PRELOAD_SEEN && is_same(file, &found) &&
		 has_grown(file, &found, position, written));
	file->device = found.st_dev;
	file->inode = found.st_ino;
	file->size = found.st_size;
	file->position = position;
	if (!large) {
		count_from(file, PRELOAD_SEEN, bytes, false);
		return;
	}
	turn = find_path(fd, path) ? preload_turn_find(found.st_dev) : NULL;
	if (!turn) {
		restart_count(file);
		return;
	}
	file->turn = turn;
	atomic_fetch_add(&turn->files, 1);
	count_from(file, PRELOAD_LARGE, 0, false);
	if (!preload_turn_ask(turn, path) && !preload_turn_is_over(turn))
		restart_count(file);
}

/* Looks at a large file again. */
static void check(struct preload_file *file, int fd)
{
	struct stat found;

	if (fstat(fd, &found) || !is_same(file, &found) || !preload_turn_check(file->turn)) {
		restart_count(file);
		return;
	}
	atomic_store(&file->bytes, 0);
	/* The storage writes while the slot is held. SYNC_FILE_RANGE_WAIT_BEFORE would swallow
	 * errors that the program's fsync() must get. */
	sync_file_range(fd, 0, 0, SYNC_FILE_RANGE_WRITE);
}

static struct mailbox *look(struct preload_file *file, int fd, uint64_t bytes)
{
	const uint64_t written = atomic_fetch_add(&file->bytes, bytes);
	const bool large = atomic_load(&file->kind) == PRELOAD_LARGE;
	struct mailbox *box;

	/* Another thread may be looking, or this one before a signal: then nothing is decided. */
	if ((!large || written >= BLOCK_BYTES) && !atomic_exchange(&file->looking, 1)) {
		if (large)
			check(file, fd);
		else
			decide(file, fd, written, bytes);
		atomic_store(&file->looking, 0);
	}
	if (atomic_load(&file->kind) != PRELOAD_LARGE || preload_turn_is_over(file->turn))
		return NULL;
	box = preload_turn_write(file->turn, bytes);
	if (!box)
		restart_count(file);
	return box;
}

/* ---- For calls.c ----------------------------------------------------------------------------- */

struct mailbox *preload_look(int fd, uint64_t bytes)
{
	const int saved = errno;
	struct mailbox *box = NULL;

	if (inside)
		return NULL;
	inside = true;
	if (preload_is_owner())
		box = look(&preload_files[fd], fd, bytes);
	inside = false;
	errno = saved;
	return box;
}

struct mailbox *preload_touch(int fd)
{
	struct preload_file *file = &preload_files[fd];

	if ((unsigned)fd >= PRELOAD_FILES || atomic_load(&file->kind) != PRELOAD_LARGE ||
	    !preload_is_owner())
		return NULL;
	return preload_turn_touch(file->turn);
}

void preload_forget(int fd)
{
	struct preload_file *file = &preload_files[fd];
	const int saved = errno;

	/* Most descriptors were not written to. Their entries stay clean, so that the kernel gives
	 * them no memory. */
	if ((unsigned)fd >= PRELOAD_FILES || !preload_look_bytes ||
	    (!atomic_load(&file->bytes) && atomic_load(&file->kind) == PRELOAD_NEW) ||
	    !preload_is_owner())
		return;
	count_from(file, PRELOAD_NEW, 0, true);
	errno = saved;
}
