/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A destination is kept with its links resolved, and drained hours later. Until then another user
 * who may write to a directory above it can put a link there, which would lead the drain, with the
 * rights of the user who saved, to a file elsewhere. So a drain follows links of root and of its
 * own user only: the kernel's rule for directories where every user may put something
 * (fs.protected_symlinks), for all directories.
 */
#define _GNU_SOURCE
#include "tier/tier.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

/* The kernel follows no more. */
#define MOST_LINKS 40

/* The first link of a path, with its directory: from there `*rest` is what follows. -ENOENT: there
 * is none as far as the path exists. `path` is cut behind the link. */
static int find_link(char *path, const char **rest, struct stat *link)
{
	for (char *at = path + 1;; at++) {
		const char before = *at;

		if (before && before != '/')
			continue;
		*at = 0;
		if (lstat(path, link))
			return -errno;
		if (S_ISLNK(link->st_mode)) {
			*rest = before ? at + 1 : at;
			return 0;
		}
		*at = before;
		if (!before)
			return -ENOENT;
	}
}

/* The path that a link stands for, with what follows it; to be freed. */
static char *follow(char *link, const char *rest)
{
	char text[PATH_MAX], *path = NULL;
	const ssize_t bytes = readlink(link, text, sizeof(text) - 1);

	if (bytes < 0)
		return NULL;
	text[bytes] = 0;
	strrchr(link, '/')[1] = 0;
	if (asprintf(&path, "%s%s%s%s", *text == '/' ? "" : link, text, *rest ? "/" : "", rest) < 0)
		return NULL;
	return path;
}

static int refuse(const char *destination, const char *path, uid_t owner, struct base_error *error)
{
	return base_refuse(error, -EPERM,
			   "cannot save \"%s\": the link \"%s\" on its path belongs to user %u, "
			   "who could lead the save elsewhere by it" BASE_REMEDY
			   "remove the link, or make it yourself",
			   destination, path, (unsigned)owner);
}

int tier_check_links(const char *destination, struct base_error *error)
{
	char *path = strdup(destination), *next;
	const char *rest = NULL;
	struct stat link;
	int ret = path ? 0 : base_no_memory(error, "a path", strlen(destination));

	for (int links = 0; !ret && !find_link(path, &rest, &link); links++) {
		if (link.st_uid && !base_is_own_user(link.st_uid))
			ret = refuse(destination, path, link.st_uid, error);
		else if (links == MOST_LINKS)
			ret = base_fail(error, -ELOOP, "cannot save \"%s\"", destination);
		if (ret)
			break;
		next = follow(path, rest);
		free(path);
		path = next;
		if (!path)
			ret = base_no_memory(error, "a path", strlen(destination));
	}
	free(path);
	return ret;
}
