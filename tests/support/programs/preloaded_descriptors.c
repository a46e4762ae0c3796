/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Makes random calls on descriptors and prints what each one did, for
 * tests/system/test_preload_fuzz.py. The seed decides everything: two runs differ only if something
 * below this program does.
 *
 *     preloaded_descriptors SEED STEPS
 */
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/sendfile.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <sys/wait.h>
#include <unistd.h>

#define MOST_BYTES (200 << 10) /* of a write */
#define MOST_FILE_SIZE (2 << 20)
#define N_NAMES 6
#define N_DESCRIPTORS 24
#define HIGH_DESCRIPTOR 900
#define ENOUGH_DESCRIPTORS 1000
#define N_THREADS 4
#define UNTOUCHED 77 /* errno before each call; calls that succeed leave it */

extern char **environ;

static uint64_t state;
static char bytes[MOST_BYTES];

static uint32_t below(uint32_t limit)
{
	state = state * 6364136223846793005U + 1442695040888963407U;
	return (uint32_t)(state >> 33) % limit;
}

/* Draws a size. Most are large, some are small, and a few are 0. */
static size_t any_size(void)
{
	switch (below(8)) {
	case 0:
		return 0;
	case 1:
		return below(100);
	case 2:
		return 4096 * (size_t)below(8);
	default:
		return below(MOST_BYTES);
	}
}

/* Draws a descriptor, which is often open. 0 to 2 belong to the transcript. */
static int any_descriptor(void)
{
	static const int others[] = { -1, 70000, HIGH_DESCRIPTOR, HIGH_DESCRIPTOR };

	if (below(25) == 0)
		return others[below(4)];
	return 3 + (int)below(below(8) ? 6 : N_DESCRIPTORS);
}

static const char *any_name(void)
{
	static const char *const names[N_NAMES] = { "a", "b", "c", "d", "e", "folder/f" };

	return names[below(N_NAMES)];
}

static void change_bytes(void)
{
	bytes[below(MOST_BYTES)] = (char)below(256);
}

static void told(const char *call, long a, long b, long result)
{
	printf("%s(%ld, %ld) = %ld, errno %d\n", call, a, b, result, errno);
	errno = UNTOUCHED;
}

/* Limits the files, so that a run takes a second. */
static void go_back_if_far(int fd)
{
	if (lseek(fd, 0, SEEK_CUR) > MOST_FILE_SIZE)
		lseek(fd, (off_t)below(MOST_FILE_SIZE), SEEK_SET);
	errno = UNTOUCHED;
}

/* ---- Calls
 * -------------------------------------------------------------------------------------*/

static void open_file(void)
{
	static const int accesses[] = { O_WRONLY, O_WRONLY, O_RDWR, O_RDONLY };
	static const int others[] = {
		0, 0, O_APPEND, O_TRUNC, O_EXCL, O_CLOEXEC, O_SYNC, O_NONBLOCK
	};
	const int flags = accesses[below(4)] | others[below(8)] | (below(8) ? O_CREAT : 0);
	const char *name = any_name();

	switch (below(5)) {
	case 0:
		told("creat", flags, 0, creat(name, 0640));
		break;
	case 1:
		told("openat", flags, 0, openat(AT_FDCWD, name, flags, 0600));
		break;
	case 2:
		told("open64", flags, 0, open64(name, flags, 0600));
		break;
	case 3:
		told("syscall open", flags, 0, syscall(SYS_openat, AT_FDCWD, name, flags, 0600));
		break;
	default:
		told("open", flags, 0, open(name, flags, 0600));
	}
}

static void write_once(void)
{
	const int fd = any_descriptor();
	const size_t n = any_size();
	const off_t offset = (off_t)below(MOST_FILE_SIZE);
	struct iovec parts[] = { { bytes, n / 3 }, { bytes + 1, 0 }, { bytes + n / 3, n - n / 3 } };

	go_back_if_far(fd);
	change_bytes();
	switch (below(8)) {
	case 0:
		told("pwrite", fd, offset, pwrite(fd, bytes, n, offset));
		break;
	case 1:
		told("pwrite64", fd, offset, pwrite64(fd, bytes, n, offset));
		break;
	case 2:
		told("writev", fd, (long)n, writev(fd, parts, 3));
		break;
	case 3:
		told("pwritev", fd, offset, pwritev(fd, parts, 3, offset));
		break;
	case 4:
		told("pwritev2", fd, (long)n,
		     pwritev2(fd, parts, 3, below(2) ? -1 : offset, below(2) ? RWF_APPEND : 0));
		break;
	case 5:
		told("syscall write", fd, (long)n, syscall(SYS_write, fd, bytes, n));
		break;
	default:
		told("write", fd, (long)n, write(fd, bytes, n));
	}
}

/* Makes the calls of a large sequential write. */
static void write_much(void)
{
	const int fd = any_descriptor();
	const size_t n = 1 + below(64 << 10);
	ssize_t sum = 0;

	go_back_if_far(fd);
	for (int turn = 0; turn < 12; turn++) {
		change_bytes();
		sum += write(fd, bytes, n);
	}
	told("writes", fd, (long)n, sum);
}

static void write_stream(void)
{
	static const char *const modes[] = { "w", "a", "r+", "r" };
	FILE *file = below(2) ? fopen(any_name(), modes[below(4)]) :
				fdopen(dup(any_descriptor()), "a");
	size_t sum = 0;

	told("fopen", 0, 0, file != NULL);
	if (file == NULL)
		return;
	for (int turn = 0; turn < 6; turn++)
		sum += fwrite(bytes, 1, any_size(), file);
	told("fwrite", fprintf(file, "%zu\n", sum), fflush(file), (long)sum);
	told("fclose", 0, 0, fclose(file));
}

static void copy_in_kernel(void)
{
	const int from = any_descriptor();
	const int to = any_descriptor();
	const size_t n = any_size();

	go_back_if_far(to);
	switch (below(3)) {
	case 0:
		told("sendfile", from, to, sendfile(to, from, NULL, n));
		break;
	case 1:
		told("copy_file_range", from, to, copy_file_range(from, NULL, to, NULL, n, 0));
		break;
	default:
		told("splice", from, to, splice(from, NULL, to, NULL, n, SPLICE_F_NONBLOCK));
	}
}

static void move_position(void)
{
	const int fd = any_descriptor();
	const off_t offset = (off_t)below(MOST_FILE_SIZE);

	switch (below(4)) {
	case 0:
		told("lseek", fd, offset, lseek(fd, offset, SEEK_SET));
		break;
	case 1:
		told("lseek to the end", fd, 0, lseek(fd, 0, SEEK_END));
		break;
	default:
		told("read", fd, offset, read(fd, bytes, (size_t)offset % MOST_BYTES));
	}
}

static void resize(void)
{
	const int fd = any_descriptor();
	const off_t size = (off_t)below(MOST_FILE_SIZE);

	switch (below(5)) {
	case 0:
		told("posix_fallocate", fd, size, posix_fallocate(fd, size / 2, size / 2 + 1));
		break;
	case 1:
		told("fallocate", fd, size,
		     fallocate(fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, size, 70000));
		break;
	case 2:
		told("fsync", fd, 0, below(2) ? fsync(fd) : fdatasync(fd));
		break;
	default:
		told("ftruncate", fd, size, ftruncate(fd, size));
	}
}

static void use_mapping(void)
{
	const int fd = any_descriptor();
	struct stat status;
	char *memory;

	if (fstat(fd, &status) != 0 || !S_ISREG(status.st_mode) || status.st_size == 0)
		return;
	errno = UNTOUCHED;
	memory = mmap(NULL, (size_t)status.st_size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
	told("mmap", fd, status.st_size, memory != MAP_FAILED);
	if (memory != MAP_FAILED) {
		memory[below((uint32_t)status.st_size)] = 'm';
		munmap(memory, (size_t)status.st_size);
	}
}

static void close_file(void)
{
	const int fd = any_descriptor();
	int last;

	switch (below(12)) {
	case 0:
		told("syscall close", fd, 0, syscall(SYS_close, fd));
		break;
	case 1:
		last = fd + (int)below(4);
		if (fd >= 3)
			told("close_range", fd, last, close_range((unsigned)fd, (unsigned)last, 0));
		break;
	case 2:
		if (fd >= 3)
			told("CLOSE_RANGE_CLOEXEC", fd, 0,
			     close_range((unsigned)fd, ~0U, CLOSE_RANGE_CLOEXEC));
		break;
	case 3:
		if (fd >= 3 && below(4) == 0) {
			closefrom(fd);
			told("closefrom", fd, 0, 0);
		}
		break;
	default:
		told("close", fd, 0, close(fd));
	}
}

static void duplicate(void)
{
	const int from = any_descriptor();
	const int to = below(6) ? 3 + (int)below(N_DESCRIPTORS) : HIGH_DESCRIPTOR;

	switch (below(6)) {
	case 0:
		told("dup", from, 0, dup(from));
		break;
	case 1:
		told("dup3", from, to, dup3(from, to, O_CLOEXEC));
		break;
	case 2:
		told("F_DUPFD", from, to, fcntl(from, F_DUPFD, to));
		break;
	case 3:
		told("F_DUPFD_CLOEXEC", from, to, fcntl(from, F_DUPFD_CLOEXEC, to));
		break;
	case 4:
		told("syscall dup2", from, to, syscall(SYS_dup3, from, to, 0));
		break;
	default:
		told("dup2", from, to, dup2(from, to));
	}
}

static void change_names(void)
{
	const char *from = any_name();
	const char *to = any_name();

	switch (below(4)) {
	case 0:
		told("unlink", from[0], 0, unlink(from));
		break;
	case 1:
		told("link", from[0], to[0], link(from, to));
		break;
	default:
		told("rename", from[0], to[0], rename(from, to));
	}
}

/* Opens what is no file. Pipes and sockets do not block: nothing else reads them. */
static void open_no_file(void)
{
	int ends[2] = { -1, -1 };

	switch (below(5)) {
	case 0:
		told("socketpair", 0, 0, socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK, 0, ends));
		break;
	case 1:
		told("memfd_create", 0, 0, memfd_create("memory", 0));
		break;
	case 2:
		told("open /dev/null", 0, 0, open("/dev/null", O_RDWR));
		break;
	case 3:
		told("open of a folder", 0, 0, open("folder", O_RDONLY | O_DIRECTORY));
		break;
	default:
		told("pipe2", 0, 0, pipe2(ends, O_NONBLOCK));
	}
}

/* ---- Processes, threads, signals
 * ---------------------------------------------------------------*/

static void run_steps(int n_steps);

static void told_child(const char *call, pid_t child)
{
	int status = -1;

	waitpid(child, &status, 0);
	errno = UNTOUCHED;
	told(call, child > 0, 0, status);
}

static void limit_files(rlim_t n_descriptors, rlim_t n_bytes)
{
	struct rlimit limit;

	getrlimit(RLIMIT_NOFILE, &limit);
	limit.rlim_cur = n_descriptors;
	told("RLIMIT_NOFILE", (long)n_descriptors, 0, setrlimit(RLIMIT_NOFILE, &limit));
	getrlimit(RLIMIT_FSIZE, &limit);
	limit.rlim_cur = n_bytes;
	told("RLIMIT_FSIZE", (long)n_bytes, 0, setrlimit(RLIMIT_FSIZE, &limit));
}

static void fork_child(void)
{
	pid_t child;

	fflush(stdout);
	child = fork();
	if (child == 0) {
		run_steps(1 + (int)below(30));
		fflush(stdout);
		_exit((int)below(100));
	}
	told_child("fork", child);
}

/* Starts this program again. The child inherits the descriptors that are not closed on exec. */
static void execute_child(void)
{
	char seed[24];
	char program[] = "/proc/self/exe";
	char *arguments[] = { program, seed, (char[]){ "20" }, NULL };
	pid_t child;

	limit_files(ENOUGH_DESCRIPTORS, RLIM_INFINITY); /* else the loader fails, and says so */
	snprintf(seed, sizeof(seed), "%u", below(1000000));
	fflush(stdout);
	child = vfork();
	if (child == 0) {
		if (write(3, "vfork", 5) == 5)
			dup2(3, 4);
		execve(program, arguments, environ);
		_exit(99);
	}
	told_child("vfork", child);
}

static void *write_in_thread(void *argument)
{
	const int number = *(const int *)argument;
	char name[] = "thread-0";
	char block[16 << 10];
	int fd;

	name[7] = (char)('0' + number);
	memset(block, name[7], sizeof(block));
	for (int turn = 0; turn < 3; turn++) {
		fd = open(name, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
		for (int i = 0; i < 12; i++)
			if (write(fd, block, sizeof(block)) != (ssize_t)sizeof(block))
				return argument;
		if (close(fd) != 0)
			return argument;
	}
	return NULL;
}

/* Starts threads that open and close files at the same time, so that they reuse descriptors. */
static void start_threads(void)
{
	pthread_t threads[N_THREADS];
	int numbers[N_THREADS];
	void *failed;
	int n_failed = 0;

	limit_files(ENOUGH_DESCRIPTORS, RLIM_INFINITY); /* else the scheduler decides which fails */
	for (int i = 0; i < N_THREADS; i++) {
		numbers[i] = i;
		if (pthread_create(&threads[i], NULL, write_in_thread, &numbers[i]) != 0)
			exit(1);
	}
	for (int i = 0; i < N_THREADS; i++) {
		pthread_join(threads[i], &failed);
		n_failed += failed != NULL;
	}
	errno = UNTOUCHED;
	told("threads", N_THREADS, 0, n_failed);
}

static int handled_fd;
static ssize_t handled;
static int errno_in_handler;

static void on_signal(int number)
{
	const int saved = errno;

	(void)number;
	errno = UNTOUCHED;
	handled = write(handled_fd, bytes, MOST_BYTES / 2);
	errno_in_handler = errno;
	errno = saved;
}

static void handle_signal(void)
{
	handled_fd = any_descriptor();
	go_back_if_far(handled_fd);
	told("raise", handled_fd, 0, raise(SIGUSR1));
	told("write in a handler", handled_fd, errno_in_handler, handled);
}

static void change_limits(void)
{
	limit_files(5 + below(N_DESCRIPTORS), below(3) ? RLIM_INFINITY : 1 + below(MOST_FILE_SIZE));
}

/* ---- The run
 * -----------------------------------------------------------------------------------*/

static const struct {
	uint32_t weight;
	void (*make)(void);
} calls[] = {
	{ 16, open_file },     { 24, write_once },    { 16, write_much },   { 6, write_stream },
	{ 6, copy_in_kernel }, { 10, move_position }, { 8, resize },        { 3, use_mapping },
	{ 10, close_file },    { 10, duplicate },     { 8, change_names },  { 4, open_no_file },
	{ 2, fork_child },     { 1, execute_child },  { 1, start_threads }, { 3, handle_signal },
	{ 1, change_limits },
};

#define N_CALLS (sizeof(calls) / sizeof(calls[0]))

static void tell_descriptors(void)
{
	struct stat status;

	for (int fd = 3; fd < 3 + N_DESCRIPTORS + 8; fd++) {
		if (fstat(fd, &status) == 0)
			printf("%d: mode %o, %ld bytes, %lu links, position %ld, flags %x\n", fd,
			       status.st_mode, S_ISREG(status.st_mode) ? (long)status.st_size : 0,
			       (unsigned long)status.st_nlink,
			       S_ISREG(status.st_mode) ? (long)lseek(fd, 0, SEEK_CUR) : 0,
			       (unsigned)(fcntl(fd, F_GETFD) << 16 | fcntl(fd, F_GETFL)));
	}
	errno = UNTOUCHED;
}

static void run_steps(int n_steps)
{
	uint32_t total = 0;

	for (size_t i = 0; i < N_CALLS; i++)
		total += calls[i].weight;
	for (int step = 0; step < n_steps; step++) {
		uint32_t drawn = below(total);
		size_t i = 0;

		while (drawn >= calls[i].weight)
			drawn -= calls[i++].weight;
		calls[i].make();
		if (step % 10 == 0)
			tell_descriptors();
	}
}

int main(int argc, char **argv)
{
	struct sigaction action = { .sa_handler = on_signal };

	if (argc != 3)
		return 2;
	state = strtoull(argv[1], NULL, 10) * 2862933555777941757U + 1;
	signal(SIGXFSZ, SIG_IGN);
	signal(SIGPIPE, SIG_IGN);
	sigaction(SIGUSR1, &action, NULL);
	mkdir("folder", 0700);
	errno = UNTOUCHED;
	run_steps(atoi(argv[2]));
	return 0;
}
