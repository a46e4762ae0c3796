/* SPDX-License-Identifier: Apache-2.0 */
#define _GNU_SOURCE
#include "support/scratch.h"

#include "support/must.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <ftw.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#define BUFFERS 8

static char directory[PATH_MAX / 2];
static char slots[PATH_MAX / 2 + sizeof(".slots")];

static const char *base(void)
{
	const char *chosen = getenv("IOSHAPE_TEST_DIR");

	return chosen && *chosen ? chosen : ".";
}

/* Gives the test slots of its own, so that its saves do not wait for those of other tests. */
static void take_turns_alone(void)
{
	char address[sizeof("local:") + sizeof(slots)];

	snprintf(slots, sizeof(slots), "%s.slots", directory);
	MUST(!mkdir(slots, 0777), "mkdir %s", slots);
	snprintf(address, sizeof(address), "local:%s", slots);
	setenv("IOSHAPE_COORDINATOR", address, 1);
}

void scratch_setup(void)
{
	char absolute[PATH_MAX / 4];

	MUST(realpath(base(), directory), "%s", base());
	MUST(strlen(directory) < sizeof(absolute), "%s", directory);
	strcpy(absolute, directory);
	snprintf(directory, sizeof(directory), "%s/scratch-XXXXXX", absolute);
	MUST(mkdtemp(directory), "mkdtemp %s", directory);
	take_turns_alone();
}

void scratch_teardown(void)
{
	scratch_remove(directory);
	scratch_remove(slots);
	unsetenv("IOSHAPE_COORDINATOR");
}

const char *scratch_directory(void)
{
	return directory;
}

const char *scratch_path(const char *name)
{
	static char buffers[BUFFERS][PATH_MAX];
	static unsigned next;
	char *path = buffers[next++ % BUFFERS];

	snprintf(path, PATH_MAX, "%s/%s", directory, name);
	return path;
}

bool scratch_direct(void)
{
	char path[PATH_MAX];
	int fd;

	snprintf(path, sizeof(path), "%s/direct-XXXXXX", *directory ? directory : base());
	fd = mkostemp(path, O_DIRECT);
	if (fd < 0 && errno != EINVAL)
		return false;
	unlink(path); /* open() may create the file before it detects that direct I/O is unsupported
		       */
	if (fd < 0)
		return false;
	close(fd);
	return true;
}

void scratch_write(const char *path, const void *data, size_t bytes)
{
	int fd = open(path, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);

	MUST(fd >= 0, "open %s", path);
	MUST(write(fd, data, bytes) == (ssize_t)bytes, "write %s", path);
	MUST(!close(fd), "close %s", path);
}

uint8_t *scratch_read(const char *path, size_t *bytes)
{
	struct stat status;
	uint8_t *data;
	int fd = open(path, O_RDONLY | O_CLOEXEC);

	MUST(fd >= 0, "open %s", path);
	MUST(!fstat(fd, &status), "fstat %s", path);
	*bytes = (size_t)status.st_size;
	data = malloc(*bytes + 1);
	MUST(data, "memory for %s", path);
	MUST(read(fd, data, *bytes) == status.st_size, "read %s", path);
	close(fd);
	return data;
}

bool scratch_same(const char *path, const void *data, size_t bytes)
{
	size_t found;
	uint8_t *there = scratch_read(path, &found);
	bool same = found == bytes && !memcmp(there, data, bytes);

	free(there);
	return same;
}

void scratch_evict(const char *path)
{
	int fd = open(path, O_RDONLY | O_CLOEXEC);

	MUST(fd >= 0, "open %s", path);
	/* Dirty pages would stay in the cache. An fsync is not needed and would take longer. */
	MUST(!sync_file_range(fd, 0, 0,
			      SYNC_FILE_RANGE_WAIT_BEFORE | SYNC_FILE_RANGE_WRITE |
				      SYNC_FILE_RANGE_WAIT_AFTER),
	     "sync_file_range %s", path);
	MUST(!posix_fadvise(fd, 0, 0, POSIX_FADV_DONTNEED), "posix_fadvise %s", path);
	close(fd);
}

static unsigned count_names(const char *where, const char *part)
{
	struct dirent *entry;
	unsigned count = 0;
	DIR *listing = opendir(where);

	MUST(listing, "opendir %s", where);
	while ((entry = readdir(listing)))
		count += strcmp(entry->d_name, ".") && strcmp(entry->d_name, "..") &&
			 strstr(entry->d_name, part);
	closedir(listing);
	return count;
}

unsigned scratch_entries(const char *where)
{
	return count_names(where, "");
}

unsigned scratch_temporaries(const char *where)
{
	return count_names(where, ".ioshape-tmp-");
}

static int remove_one(const char *path, const struct stat *status, int kind, struct FTW *walk)
{
	(void)status;
	(void)kind;
	(void)walk;
	return remove(path);
}

void scratch_remove(const char *where)
{
	nftw(where, remove_one, 16, FTW_DEPTH | FTW_PHYS);
}

unsigned scratch_descriptors(void)
{
	/* The count always includes the descriptor of the listing itself. */
	return count_names("/proc/self/fd", "");
}

int scratch_in_child(int (*body)(void *), void *argument)
{
	int status;
	pid_t child;

	fflush(NULL);
	child = fork();
	MUST(child >= 0, "fork");
	if (!child)
		_exit(body(argument));
	MUST(waitpid(child, &status, 0) == child, "waitpid");
	return status;
}

void scratch_leave_child(int status)
{
	char command[32];

	snprintf(command, sizeof(command), "exit %d", status & 0xff);
	execl("/bin/sh", "sh", "-c", command, (char *)NULL);
	_exit(127);
}

bool scratch_under_valgrind(void)
{
	const char *preloaded = getenv("LD_PRELOAD");

	return preloaded && strstr(preloaded, "vgpreload");
}

unsigned scratch_rounds(unsigned rounds)
{
	return scratch_under_valgrind() ? (rounds + 19) / 20 : rounds;
}

bool scratch_long(void)
{
	const char *wanted = getenv("IOSHAPE_TEST_LONG");

	return wanted && *wanted && strcmp(wanted, "0") != 0;
}
