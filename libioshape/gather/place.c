/* SPDX-License-Identifier: Apache-2.0 */
#define _GNU_SOURCE
#include "gather/place.h"

#include "ring/ring.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

/* Whether it is a folder, no link, and ours alone: others may have been there first. */
static int check(const char *path)
{
	struct stat stat;

	if (lstat(path, &stat))
		return -errno;
	if (!S_ISDIR(stat.st_mode))
		return -ENOTDIR;
	return base_is_own_user(stat.st_uid) && !(stat.st_mode & 077) ? 0 : -EACCES;
}

static int make(char path[PLACE_PATH_BYTES], const char *parent)
{
	const int length =
		snprintf(path, PLACE_PATH_BYTES, "%s/ioshape-%u", parent, (unsigned)geteuid());

	if (length >= PLACE_PATH_BYTES)
		return -ENAMETOOLONG;
	if (mkdir(path, 0700) && errno != EEXIST)
		return -errno;
	return check(path);
}

int place_find(char path[PLACE_PATH_BYTES], const char *given, struct base_error *error)
{
	const char *runtime = secure_getenv("XDG_RUNTIME_DIR");
	int ret = make(path, given ? given : "/dev/shm");

	if (ret && !given && runtime && *runtime == '/')
		ret = make(path, runtime);
	if (!ret)
		return 0;
	*path = 0;
	return base_fail(
		error, ret,
		"cannot make a folder of this user's alone in %s or in XDG_RUNTIME_DIR" BASE_REMEDY
		"mount a tmpfs at /dev/shm, or remove what another user put there",
		given ? given : "/dev/shm");
}

void place_identify(char id[GATHER_PLACE_BYTES], const char *path)
{
	struct stat stat;

	if (*path && !lstat(path, &stat))
		snprintf(id, GATHER_PLACE_BYTES, "%s-%llx-%llx", ring_machine_tag(),
			 (unsigned long long)stat.st_dev, (unsigned long long)stat.st_ino);
	else
		snprintf(id, GATHER_PLACE_BYTES, "alone-%016llx",
			 (unsigned long long)base_random());
}

void gather_identify_place(char id[GATHER_PLACE_BYTES])
{
	char path[PLACE_PATH_BYTES];

	place_find(path, NULL, NULL);
	place_identify(id, path);
}
