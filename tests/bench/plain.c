/* SPDX-License-Identifier: Apache-2.0 */
/* Baselines for the library: commands that move the same bytes by plain system calls. */
#define _GNU_SOURCE
#include "bench.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#define MIN(a, b) ((a) < (b) ? (a) : (b))

/* ---- Memory ---------------------------------------------------------------------------------- */

static void pack(struct bench *bench)
{
	uint8_t *to = bench->workload.twin;

	for (size_t i = 0; i < bench->workload.count; i++) {
		const struct ioshape_tensor *tensor = &bench->workload.tensors[i];
		uint64_t bytes = tensor_bytes(tensor);

		memcpy(to, tensor->data, bytes);
		to += bytes;
	}
}

void run_memcpy(struct bench *bench, const struct command *command)
{
	struct cost cost;

	(void)command;
	workload_need_twin(&bench->workload, bench->workload.bytes);
	cost_begin(&cost);
	pack(bench);
	cost_end(&cost);
}

/* ---- Writing --------------------------------------------------------------------------------- */

static void write_all(int fd, const uint8_t *data, uint64_t bytes, uint64_t chunk)
{
	uint64_t done = 0;
	ssize_t moved;

	while (done < bytes) {
		moved = write(fd, data + done, MIN(bytes - done, chunk));
		if (moved < 0 && errno != EINTR)
			fail("cannot write: %s", strerror(errno));
		done += moved > 0 ? (uint64_t)moved : 0;
	}
}

static void sync_file(int fd)
{
	if (fsync(fd))
		fail("cannot fsync: %s", strerror(errno));
}

static int create(const char *path)
{
	int fd = open(path, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);

	if (fd < 0)
		fail("cannot create %s: %s", path, strerror(errno));
	return fd;
}

/*
 * Writes the tensors' bytes into a new file and calls fsync. Keys: path=FILE chunk=BYTES
 * packed=0|1. With packed=1 the bytes come from one piece of memory, otherwise from each tensor's
 * memory.
 */
void run_write(struct bench *bench, const struct command *command)
{
	const struct workload *workload = &bench->workload;
	const char *path = command_need(command, "path");
	uint64_t chunk = command_number(command, "chunk", 1 << 20);
	bool packed = command_number(command, "packed", 0);
	struct cost cost;
	int fd;

	if (packed) {
		workload_need_twin(&bench->workload, workload->bytes);
		pack(bench);
	}
	cost_begin(&cost);
	fd = create(path);
	if (packed)
		write_all(fd, workload->twin, workload->bytes, chunk);
	for (size_t i = 0; !packed && i < workload->count; i++)
		write_all(fd, workload->tensors[i].data, tensor_bytes(&workload->tensors[i]),
			  chunk);
	sync_file(fd);
	close(fd);
	cost_end(&cost);
}

static char *directory_of(const char *path)
{
	const char *slash = strrchr(path, '/');
	char *directory = slash ? strndup(path, (size_t)(slash - path) + 1) : strdup(".");

	if (!directory)
		fail("no memory for a path");
	return directory;
}

/* Replaces a file as careful programs do: writes a temporary file, calls fsync, renames it and
 * calls fsync on the directory. Keys: path=FILE bytes=N. */
void run_dance(struct bench *bench, const struct command *command)
{
	const char *path = command_need(command, "path");
	uint64_t bytes = command_number(command, "bytes", 1024);
	char *directory = directory_of(path), temporary[4096];
	struct cost cost;
	int fd;

	workload_need_twin(&bench->workload, bytes);
	snprintf(temporary, sizeof(temporary), "%s.tmp", path);
	cost_begin(&cost);
	fd = create(temporary);
	write_all(fd, bench->workload.twin, bytes, bytes);
	sync_file(fd);
	close(fd);
	if (rename(temporary, path))
		fail("cannot rename %s: %s", temporary, strerror(errno));
	fd = open(directory, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
	if (fd < 0)
		fail("cannot open %s: %s", directory, strerror(errno));
	sync_file(fd);
	close(fd);
	cost_end(&cost);
	free(directory);
}

/* ---- Reading --------------------------------------------------------------------------------- */

static uint64_t size_of(int fd)
{
	struct stat status;

	if (fstat(fd, &status))
		fail("cannot stat: %s", strerror(errno));
	return (uint64_t)status.st_size;
}

static int open_to_read(const char *path)
{
	int fd = open(path, O_RDONLY | O_CLOEXEC);

	if (fd < 0)
		fail("cannot open %s: %s", path, strerror(errno));
	return fd;
}

/* Reads the whole file by read() into warm memory. Keys: path=FILE chunk=BYTES. */
void run_read(struct bench *bench, const struct command *command)
{
	const char *path = command_need(command, "path");
	uint64_t chunk = command_number(command, "chunk", 1 << 20), done = 0, bytes;
	struct cost cost;
	ssize_t moved;
	int fd;

	fd = open_to_read(path);
	bytes = size_of(fd);
	close(fd);
	workload_need_twin(&bench->workload, bytes);
	cost_begin(&cost);
	fd = open_to_read(path);
	while (done < bytes) {
		moved = read(fd, bench->workload.twin + done, MIN(bytes - done, chunk));
		if (moved < 0 && errno == EINTR)
			continue;
		if (moved <= 0)
			fail("cannot read %s: %s", path,
			     moved ? strerror(errno) : "it is shorter now");
		done += (uint64_t)moved;
	}
	close(fd);
	cost_end(&cost);
}

/* Answers the fraction of the file that is in the page cache, from 0 to 1. Key: path=FILE. */
void run_cached(struct bench *bench, const struct command *command)
{
	const char *path = command_need(command, "path");
	uint64_t page = (uint64_t)sysconf(_SC_PAGESIZE), bytes, pages, hits = 0;
	unsigned char *states;
	void *view;
	int fd;

	(void)bench;
	fd = open_to_read(path);
	bytes = size_of(fd);
	pages = (bytes + page - 1) / page;
	view = mmap(NULL, bytes, PROT_READ, MAP_SHARED, fd, 0);
	states = calloc(pages, 1);
	if (view == MAP_FAILED || !states || mincore(view, bytes, states))
		fail("cannot find out what of %s is cached: %s", path, strerror(errno));
	for (uint64_t i = 0; i < pages; i++)
		hits += states[i] & 1;
	answer_number("cached", (double)hits / (double)pages);
	free(states);
	munmap(view, bytes);
	close(fd);
}
