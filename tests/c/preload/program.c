/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A program that knows nothing of ioshape: preload-program BODY FILE. Its bodies write in different
 * ways. It ends with status 0 if the system behaved as without a preloaded library.
 */
#define _GNU_SOURCE
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/sendfile.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <sys/wait.h>
#include <unistd.h>

#define KIB ((size_t)1 << 10)
#define MIB ((size_t)1 << 20)
#define BLOCK (256 * KIB)
#define BLOCKS 16 /* of a file: 4 MiB */

/* Ends the program if something is not as it must be. */
#define REQUIRE(condition)                                                                         \
	do {                                                                                       \
		if (!(condition)) {                                                                \
			fprintf(stderr, "line %d: %s (errno %d)\n", __LINE__, #condition, errno);  \
			_exit(1);                                                                  \
		}                                                                                  \
	} while (0)

static char block[BLOCK];
static const char *path;

static char *beside(const char *suffix)
{
	char *name;

	REQUIRE(asprintf(&name, "%s%s", path, suffix) > 0);
	return name;
}

static int create(const char *name)
{
	int fd = open(name, O_RDWR | O_CREAT | O_TRUNC, 0600);

	REQUIRE(fd >= 0);
	return fd;
}

static void grow(int fd, int blocks)
{
	for (int i = 0; i < blocks; i++)
		REQUIRE(write(fd, block, BLOCK) == (ssize_t)BLOCK);
}

static void must_have(const char *name, size_t bytes)
{
	struct stat found;

	REQUIRE(!stat(name, &found) && (size_t)found.st_size == bytes);
}

static void sleep_ms(int ms)
{
	poll(NULL, 0, ms);
}

/* ---- Ways to write --------------------------------------------------------------------------- */

static void by_write(void)
{
	int fd = create(path);

	grow(fd, BLOCKS);
	REQUIRE(!fsync(fd) && !fdatasync(fd) && !close(fd));
}

static void by_one_write(void)
{
	char *data = calloc(BLOCKS, BLOCK);
	int fd = create(path);

	REQUIRE(data && write(fd, data, BLOCKS * BLOCK) == (ssize_t)(BLOCKS * BLOCK));
	REQUIRE(!close(fd));
	free(data);
}

static void by_offset(void)
{
	int fd = create(path);

	for (int i = 0; i < BLOCKS; i++) {
		off_t at = (off_t)i * (off_t)BLOCK;

		REQUIRE((i % 2 ? pwrite(fd, block, BLOCK, at) : pwrite64(fd, block, BLOCK, at)) ==
			(ssize_t)BLOCK);
	}
	REQUIRE(!close(fd));
}

static void by_pieces(void)
{
	struct iovec pieces[2] = { { block, BLOCK / 2 }, { block, BLOCK / 2 } };
	int fd = create(path);

	for (int i = 0; i < BLOCKS; i++) {
		off_t at = (off_t)i * (off_t)BLOCK;
		ssize_t got;

		switch (i % 5) {
		case 0:
			got = pwritev(fd, pieces, 2, at);
			break;
		case 1:
			got = pwritev64(fd, pieces, 2, at);
			break;
		case 2:
			got = pwritev2(fd, pieces, 2, at, 0);
			break;
		case 3:
			got = pwritev64v2(fd, pieces, 2, at, 0);
			break;
		default:
			REQUIRE(lseek(fd, at, SEEK_SET) == at);
			got = writev(fd, pieces, 2);
		}
		REQUIRE(got == (ssize_t)BLOCK);
	}
	REQUIRE(!close(fd));
}

static void by_stream(void)
{
	FILE *file = fopen(path, "w");

	REQUIRE(file);
	for (int i = 0; i < BLOCKS; i++)
		REQUIRE((i % 2 ? fwrite(block, 1, BLOCK, file) :
				 fwrite_unlocked(block, 1, BLOCK, file)) == BLOCK);
	REQUIRE(!fclose(file));
}

/* Copies a file without reading it. */
static void by_transfer(ssize_t (*transfer)(int from, int to, size_t bytes))
{
	char *name = beside(".source");
	int from = create(name), to = create(path);
	ssize_t got;

	grow(from, BLOCKS);
	REQUIRE(!close(from));
	from = open(name, O_RDONLY);
	REQUIRE(from >= 0);
	do {
		got = transfer(from, to, BLOCK);
		REQUIRE(got >= 0);
	} while (got);
	REQUIRE(!close(to));
	must_have(path, BLOCKS * BLOCK);
	REQUIRE(!unlink(name) && !close(from));
	free(name);
}

static ssize_t copy(int from, int to, size_t bytes)
{
	return copy_file_range(from, NULL, to, NULL, bytes, 0);
}

static ssize_t send32(int from, int to, size_t bytes)
{
	return sendfile(to, from, NULL, bytes);
}

static ssize_t send64(int from, int to, size_t bytes)
{
	return sendfile64(to, from, NULL, bytes);
}

static ssize_t through_a_pipe(int from, int to, size_t bytes)
{
	static int ends[2];
	ssize_t got;

	if (!ends[1])
		REQUIRE(!pipe(ends));
	got = splice(from, NULL, ends[1], NULL, bytes < 64 * KIB ? bytes : 64 * KIB, 0);
	REQUIRE(got <= 0 || splice(ends[0], NULL, to, NULL, (size_t)got, 0) == got);
	return got;
}

static void by_copy(void)
{
	by_transfer(copy);
}

static void by_sendfile(void)
{
	by_transfer(send32);
}

static void by_sendfile64(void)
{
	by_transfer(send64);
}

static void by_splice(void)
{
	by_transfer(through_a_pipe);
}

/* ---- What passes ----------------------------------------------------------------------------- */

static void small(void)
{
	for (int i = 0; i < 64; i++) {
		int fd = create(path);

		grow(fd, 3);
		REQUIRE(!close(fd));
	}
}

/* Writes small pages at scattered offsets, like a database. */
static void scattered(void)
{
	int fd = create(path);

	REQUIRE(!ftruncate(fd, (off_t)(64 * MIB)));
	for (unsigned i = 0; i < 4096; i++)
		REQUIRE(pwrite(fd, block, 4 * KIB, (off_t)(i * 7919 % 16384 * 4 * KIB)) ==
			(ssize_t)(4 * KIB));
	REQUIRE(!close(fd));
}

/* Writes 4 MiB to a descriptor that a child reads. */
static void feed(int to, int from)
{
	pid_t child = fork();
	int status;

	REQUIRE(child >= 0);
	if (!child) {
		close(to);
		for (size_t left = BLOCKS * BLOCK; left;) {
			ssize_t got = read(from, block, BLOCK);

			REQUIRE(got > 0);
			left -= (size_t)got;
		}
		_exit(0);
	}
	grow(to, BLOCKS);
	REQUIRE(waitpid(child, &status, 0) == child && !status);
}

static void pipes_and_sockets(void)
{
	int ends[2];

	REQUIRE(!pipe(ends));
	feed(ends[1], ends[0]);
	REQUIRE(!socketpair(AF_UNIX, SOCK_STREAM, 0, ends));
	feed(ends[1], ends[0]);
}

/* ---- Turns ----------------------------------------------------------------------------------- */

static void with_a_pause(void)
{
	int fd = create(path);

	grow(fd, BLOCKS);
	sleep_ms(3000);
	grow(fd, BLOCKS);
	REQUIRE(!close(fd));
}

/* Writes a little now and then, for longer than the holder's patience. */
static void slowly(void)
{
	int fd = create(path);

	grow(fd, BLOCKS);
	for (int i = 0; i < 9; i++) {
		sleep_ms(1000);
		grow(fd, 1);
	}
	REQUIRE(!close(fd));
}

static void steadily(void)
{
	int fd = create(path);

	for (int i = 0; i < 200; i++) {
		grow(fd, 1);
		sleep_ms(10);
	}
	REQUIRE(!close(fd));
	by_write(); /* another turn */
}

static void two_files(void)
{
	char *name = beside(".2");
	int one = create(path), other = create(name);

	for (int i = 0; i < BLOCKS; i++) {
		grow(one, 1);
		grow(other, 1);
	}
	REQUIRE(!close(one));
	grow(other, 1);
	REQUIRE(!close(other));
	free(name);
}

static void *write_pieces(void *number)
{
	static _Atomic int shared = -1;
	const long at = (long)number;
	int fd = at % 2 ? open(path, O_WRONLY | O_CREAT, 0600) : shared;

	if (fd < 0) {
		shared = fd = open(path, O_WRONLY | O_CREAT, 0600);
		REQUIRE(fd >= 0);
	}
	for (long i = 0; i < BLOCKS; i++)
		REQUIRE(pwrite(fd, block, BLOCK, (i * 8 + at) * (long)BLOCK) == (ssize_t)BLOCK);
	if (at % 2)
		REQUIRE(!close(fd));
	return NULL;
}

static void threads(void)
{
	pthread_t all[8];

	for (long i = 0; i < 8; i++)
		REQUIRE(!pthread_create(&all[i], NULL, write_pieces, (void *)i));
	for (int i = 0; i < 8; i++)
		REQUIRE(!pthread_join(all[i], NULL));
	must_have(path, 8 * BLOCKS * BLOCK);
}

/* ---- Other processes ------------------------------------------------------------------------- */

static void forked(void)
{
	int fd = create(path), status;
	pid_t child;

	grow(fd, BLOCKS);
	child = fork();
	REQUIRE(child >= 0);
	if (!child) {
		path = beside(".child");
		by_write();
		_exit(0);
	}
	grow(fd, BLOCKS);
	REQUIRE(!close(fd));
	REQUIRE(waitpid(child, &status, 0) == child && !status);
}

static void vforked(void)
{
	int fd = create(path), status;
	pid_t child;

	grow(fd, BLOCKS);
	child = vfork();
	REQUIRE(child >= 0);
	if (!child) {
		grow(fd, BLOCKS);
		close(fd);
		_exit(0);
	}
	REQUIRE(waitpid(child, &status, 0) == child && !status);
	grow(fd, BLOCKS);
	REQUIRE(!close(fd));
	must_have(path, 3 * BLOCKS * BLOCK);
}

/* ---- Traces in the process ------------------------------------------------------------------- */

static volatile sig_atomic_t signals;

static void count_signal(int number)
{
	(void)number;
	signals++;
}

/* Returns the number of entries of a folder. */
static unsigned entries(const char *folder)
{
	DIR *open_folder = opendir(folder);
	unsigned count = 0;

	REQUIRE(open_folder);
	while (readdir(open_folder))
		count++;
	closedir(open_folder);
	return count;
}

static void unnoticed(void)
{
	const unsigned before = entries("/proc/self/fd");
	char folder[2][512];
	int fd;

	signal(SIGCHLD, count_signal);
	REQUIRE(getcwd(folder[0], sizeof(folder[0])));
	fd = create(path);
	grow(fd, BLOCKS);
	REQUIRE(entries("/proc/self/fd") == before + 1);
	REQUIRE(entries("/proc/self/task") == 3); /* and "." and ".." */
	REQUIRE(waitpid(-1, NULL, WNOHANG) == -1 && errno == ECHILD);
	REQUIRE(getcwd(folder[1], sizeof(folder[1])) && !strcmp(folder[0], folder[1]));
	REQUIRE(!signals && !close(fd));
}

static void without_descriptors(void)
{
	int fd;
	struct rlimit limit;

	REQUIRE(syscall(SYS_close_range, 3, ~0u, 0) == 0);
	fd = create(path);
	REQUIRE(!getrlimit(RLIMIT_NOFILE, &limit));
	limit.rlim_cur = (rlim_t)fd + 1;
	REQUIRE(!setrlimit(RLIMIT_NOFILE, &limit));
	grow(fd, BLOCKS);
	REQUIRE(!close(fd));
}

static void without_memory(void)
{
	const struct rlimit limit = { MIB, MIB };

	REQUIRE(!setrlimit(RLIMIT_AS, &limit));
	by_write();
}

static void with_small_files(void)
{
	const struct rlimit limit = { BLOCKS * BLOCK, RLIM_INFINITY };
	int fd = create(path);

	signal(SIGXFSZ, SIG_IGN);
	REQUIRE(!setrlimit(RLIMIT_FSIZE, &limit));
	grow(fd, BLOCKS);
	REQUIRE(write(fd, block, BLOCK) == -1 && errno == EFBIG);
	REQUIRE(!close(fd));
}

static void keeps_errno(void)
{
	int fd = create(path);

	for (int i = 0; i < BLOCKS; i++) {
		errno = 77;
		grow(fd, 1);
		REQUIRE(errno == 77);
	}
	REQUIRE(!close(fd) && errno == 77);
	REQUIRE(write(fd, block, BLOCK) == -1 && errno == EBADF);
	REQUIRE(close(fd) == -1 && errno == EBADF);
	REQUIRE(write(1000000, block, BLOCK) == -1 && errno == EBADF);
	fd = open(path, O_RDONLY);
	for (int i = 0; i < BLOCKS; i++)
		REQUIRE(write(fd, block, BLOCK) == -1 && errno == EBADF);
}

static void reused_number(void)
{
	int fd = create(path), ends[2];

	grow(fd, BLOCKS);
	REQUIRE(!syscall(SYS_close, fd)); /* not seen by a library */
	REQUIRE(!pipe(ends) && ends[0] == fd);
	ends[0] = dup(fd);
	REQUIRE(dup2(ends[1], fd) == fd && !close(ends[1]));
	feed(fd, ends[0]);
}

static void all_closed(void)
{
	int fd = create(path);

	grow(fd, BLOCKS);
	REQUIRE(syscall(SYS_close_range, 3, ~0u, 0) == 0);
	fd = create(path);
	grow(fd, BLOCKS);
	must_have(path, BLOCKS * BLOCK);
}

/* ---- Signals and threads that end ------------------------------------------------------------ */

static void alarmed(void)
{
	signal(SIGALRM, count_signal);
	alarm(1);
	by_write();
	REQUIRE(signals == 1);
}

static void write_in_handler(int number)
{
	int fd = open("/dev/null", O_WRONLY);

	(void)number;
	grow(fd, BLOCKS);
	close(fd);
	path = beside(".handler");
	by_write();
	signals++;
}

static void writes_in_a_handler(void)
{
	signal(SIGALRM, write_in_handler);
	alarm(1);
	by_write();
	REQUIRE(signals == 1);
}

static void *write_and_be_cancelled(void *unused)
{
	(void)unused;
	by_write();
	pause();
	return NULL;
}

static void cancelled(void)
{
	pthread_t thread;

	REQUIRE(!pthread_create(&thread, NULL, write_and_be_cancelled, NULL));
	sleep_ms(500);
	REQUIRE(!pthread_cancel(thread) && !pthread_join(thread, NULL));
	by_write();
	must_have(path, BLOCKS * BLOCK);
}

static const struct {
	const char *name;
	void (*run)(void);
} bodies[] = {
	{ "write", by_write },
	{ "one-write", by_one_write },
	{ "offset", by_offset },
	{ "pieces", by_pieces },
	{ "stream", by_stream },
	{ "copy", by_copy },
	{ "sendfile", by_sendfile },
	{ "sendfile64", by_sendfile64 },
	{ "splice", by_splice },
	{ "small", small },
	{ "scattered", scattered },
	{ "pipes", pipes_and_sockets },
	{ "pause", with_a_pause },
	{ "slowly", slowly },
	{ "steadily", steadily },
	{ "two-files", two_files },
	{ "threads", threads },
	{ "forked", forked },
	{ "vforked", vforked },
	{ "unnoticed", unnoticed },
	{ "without-descriptors", without_descriptors },
	{ "without-memory", without_memory },
	{ "small-files", with_small_files },
	{ "errno", keeps_errno },
	{ "reused", reused_number },
	{ "all-closed", all_closed },
	{ "alarmed", alarmed },
	{ "handler", writes_in_a_handler },
	{ "cancelled", cancelled },
};

int main(int count, char **arguments)
{
	if (count != 3)
		return 2;
	path = arguments[2];
	for (size_t i = 0; i < sizeof(bodies) / sizeof(*bodies); i++) {
		if (!strcmp(bodies[i].name, arguments[1])) {
			bodies[i].run();
			return 0;
		}
	}
	return 2;
}
