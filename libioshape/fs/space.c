/* SPDX-License-Identifier: Apache-2.0 */
/* How much space there is for a file. */
#define _GNU_SOURCE
#include "fs/fs.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/statfs.h>
#include <sys/sysmacros.h>
#include <unistd.h>

#define EXT4_MAGIC 0xef53

/* For new bytes of this user; UINT64_MAX if the filesystem does not say it. */
static uint64_t free_bytes(const struct statfs *system)
{
	uint64_t unit = (uint64_t)(system->f_frsize ? system->f_frsize : system->f_bsize);
	uint64_t blocks = system->f_bavail, bytes;

	/* Filesystems that do not count: some of FUSE, /proc. */
	if (!system->f_blocks)
		return UINT64_MAX;
	/* ext4 keeps a twentieth for root, and statfs() tells root the same as everybody else. */
	if (system->f_type == EXT4_MAGIC && !geteuid())
		blocks = MAX(blocks, system->f_bfree);
	return __builtin_mul_overflow(blocks, unit, &bytes) ? UINT64_MAX : bytes;
}

uint64_t fs_free_bytes_behind(int fd)
{
	struct statfs system;

	return fstatfs(fd, &system) ? UINT64_MAX : free_bytes(&system);
}

static int look(const char *path, struct fs_space *space)
{
	struct statfs system;

	if (statfs(path, &system))
		return -errno;
	space->free_bytes = free_bytes(&system);
	space->no_inodes = system.f_files && !system.f_ffree;
	space->magic = fs_magic(&system);
	return 0;
}

static void note_device(struct fs_space *space, const struct stat *status)
{
	space->device_major = major(status->st_dev);
	space->device_minor = minor(status->st_dev);
}

int fs_space_of_found(const char *path, const struct fs_found *found, struct fs_space *space)
{
	char *directory;
	int ret;

	memset(space, 0, sizeof(*space));
	space->free_bytes = UINT64_MAX;
	if (found->code)
		return found->code;
	/* Where a link that leads to nothing leads to is found out when the file is made. */
	if (found->dangling)
		return -ENOENT;
	if (!found->absent && !found->regular)
		return -EINVAL;
	directory = found->absent ? base_directory_of(path) : strdup(path);
	if (!directory)
		return -ENOMEM;
	ret = look(directory, space);
	space->device_major = found->device_major;
	space->device_minor = found->device_minor;
	free(directory);
	return ret;
}

int fs_space_of_path(const char *path, struct fs_space *space)
{
	struct fs_found found;

	fs_find(path, &found);
	return fs_space_of_found(path, &found, space);
}

uint64_t fs_replaced_bytes(const char *path)
{
	struct stat status;

	return stat(path, &status) ? 0 : (uint64_t)status.st_blocks * 512;
}

int fs_space_of_directory(const char *path, struct fs_space *space)
{
	char *at = strdup(path), *above;
	struct stat status;
	int ret;

	memset(space, 0, sizeof(*space));
	space->free_bytes = UINT64_MAX;
	for (;;) {
		if (!at)
			return -ENOMEM;
		ret = stat(at, &status) ? -errno : look(at, space);
		if (ret != -ENOENT || !strcmp(at, "/") || !strcmp(at, "."))
			break;
		above = base_directory_of(at);
		free(at);
		at = above;
	}
	if (!ret)
		note_device(space, &status);
	free(at);
	return ret;
}

void fs_space_type(const struct fs_space *space, char *type, size_t type_bytes)
{
	struct fs_mount mount;

	if (fs_find_mount("", 0, space->device_major, space->device_minor, &mount))
		fs_magic_name(space->magic, type, type_bytes);
	else
		snprintf(type, type_bytes, "%s", mount.type);
}

/* ---- Storage targets ------------------------------------------------------------------------- */

#define MOST_NAMED 3u

/* The fullest of those that come after `last`: by free bytes, then by place. */
static const struct fs_target *next_full(const struct fs_storage *storage, uint64_t bytes,
					 const struct fs_target *last)
{
	const struct fs_target *found = NULL;

	for (uint32_t i = 0; i < MIN(storage->target_count, ARRAY_LENGTH(storage->target)); i++) {
		const struct fs_target *target = &storage->target[i];

		if (target->free_bytes >= bytes ||
		    (found && found->free_bytes <= target->free_bytes))
			continue;
		if (!last || target->free_bytes > last->free_bytes ||
		    (target->free_bytes == last->free_bytes && target > last))
			found = target;
	}
	return found;
}

void fs_name_full_targets(const struct fs_storage *storage, uint64_t bytes, char *into,
			  size_t into_bytes)
{
	const struct fs_target *target = NULL;
	unsigned named = 0, more = 0;
	size_t used = 0;

	*into = 0;
	while ((target = next_full(storage, bytes, target))) {
		if (named == MOST_NAMED) {
			more++;
			continue;
		}
		snprintf(into + used, into_bytes - used, "%s%s (%s free)", named++ ? ", " : "",
			 target->name, BASE_SIZE(target->free_bytes));
		used = strlen(into);
	}
	if (more)
		snprintf(into + used, into_bytes - used, " and %u more", more);
}
