/* SPDX-License-Identifier: Apache-2.0 */
/* Asking a filesystem for room, where counting it is not enough. */
#define _GNU_SOURCE
#include "ring/destination.h"

#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static int open_directory(const char *path, bool in_directory)
{
	char *resolved = realpath(path, NULL), *directory = resolved ? resolved : strdup(path);
	char *slash = directory ? strrchr(directory, '/') : NULL;
	const char *where = directory;
	int fd;

	if (!directory)
		return -1;
	if (!in_directory && !slash)
		where = ".";
	else if (!in_directory)
		slash[slash == directory] = 0;
	fd = open(where, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
	free(directory);
	return fd;
}

bool ring_can_reserve(const char *path, bool in_directory, uint64_t bytes)
{
	int directory = open_directory(path, in_directory), fd = -1;
	bool can;

	/* A file without a name: nothing is left of it, whatever happens. */
	if (directory >= 0)
		fd = openat(directory, ".", O_TMPFILE | O_WRONLY | O_CLOEXEC, 0600);
	/* Beyond the process's limit asking would end it. */
	can = fd >= 0 && bytes <= base_largest_file() && !ring_allocate(fd, bytes);
	if (fd >= 0)
		close(fd);
	if (directory >= 0)
		close(directory);
	return can;
}
