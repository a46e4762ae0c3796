/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Writes files in ways that few programs use, for tests/support/preloaded_table.py. The way is the
 * argument. The program exits with 1 if a call fails, and says which.
 */
#include <aio.h>
#include <errno.h>
#include <fcntl.h>
#include <liburing.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <pthread.h>
#include <signal.h>
#include <spawn.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/sendfile.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <sys/uio.h>
#include <sys/wait.h>
#include <unistd.h>

#define BLOCK_BYTES (64 << 10)
#define N_BLOCKS 32
#define N_THREADS 8
#define HIGH_FD 900

extern char **environ;

static char block[BLOCK_BYTES];

static void must(int is_right, const char *what)
{
	if (!is_right) {
		printf("%s: %s\n", what, strerror(errno));
		exit(1);
	}
}

static void fill(int number)
{
	for (size_t i = 0; i < sizeof(block); i++)
		block[i] = (char)(number * 31 + (int)(i % 251));
}

static int create(const char *path)
{
	int fd = open(path, O_RDWR | O_CREAT | O_TRUNC, 0644);

	must(fd >= 0, path);
	return fd;
}

static void write_blocks(int fd)
{
	for (int number = 0; number < N_BLOCKS; number++) {
		fill(number);
		must(write(fd, block, sizeof(block)) == (ssize_t)sizeof(block), "write");
	}
}

/* ---- Calls beside write() ---------------------------------------------------------------------*/

static void use_vectors(void)
{
	int fd = create("vectors");
	void *nothing;
	struct iovec parts[] = { { block, 1000 }, { block + 1000, 0 }, { block + 1000, 60000 } };

	for (int number = 0; number < N_BLOCKS; number++) {
		fill(number);
		must(writev(fd, parts, 3) == 61000, "writev");
		must(pwritev(fd, parts, 3, (off_t)(N_BLOCKS + number) * 61000) == 61000, "pwritev");
	}
	must(pwritev2(fd, parts, 1, -1, RWF_DSYNC) == 1000, "pwritev2 at the position");
	must(pwritev2(fd, parts, 1, 0, RWF_APPEND) == 1000, "pwritev2 that appends");
	must(lseek(fd, 0, SEEK_CUR) == N_BLOCKS * 61000 + 1000, "position");
	must(pwrite(fd, block, 10, -1) == -1 && errno == EINVAL, "pwrite before the file");
	nothing = mmap(NULL, BLOCK_BYTES, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	must(nothing != MAP_FAILED, "mmap");
	must(write(fd, nothing, 10) == -1 && errno == EFAULT, "write from no memory");
	must(close(fd) == 0, "close");
	must(close(fd) == -1 && errno == EBADF, "close twice");
}

static void copy_in_kernel(void)
{
	int from = create("source");
	int to;
	int ends[2];
	off_t offset = 0;

	write_blocks(from);
	to = create("sendfile");
	must(lseek(from, 0, SEEK_SET) == 0, "lseek");
	for (ssize_t n = 1; n > 0;)
		n = sendfile(to, from, NULL, BLOCK_BYTES);
	must(close(to) == 0, "close");
	to = create("copy_file_range");
	for (ssize_t n = 1; n > 0;)
		n = copy_file_range(from, &offset, to, NULL, BLOCK_BYTES, 0);
	must(close(to) == 0, "close");
	to = create("splice");
	must(pipe(ends) == 0, "pipe");
	offset = 0;
	for (ssize_t n = 1; n > 0;) {
		n = splice(from, &offset, ends[1], NULL, BLOCK_BYTES, 0);
		if (n > 0)
			must(splice(ends[0], NULL, to, NULL, (size_t)n, SPLICE_F_MOVE) == n,
			     "splice");
	}
	must(close(ends[0]) == 0 && close(ends[1]) == 0, "close");
	must(close(to) == 0 && close(from) == 0, "close");
}

static void reserve_space(void)
{
	int fd = create("reserved");

	must(posix_fallocate(fd, 0, N_BLOCKS * BLOCK_BYTES) == 0, "posix_fallocate");
	write_blocks(fd);
	must(ftruncate(fd, BLOCK_BYTES * 3 + 1) == 0, "ftruncate");
	must(ftruncate(fd, BLOCK_BYTES * 9) == 0, "ftruncate");
	write_blocks(fd);
	must(posix_fallocate(-1, 0, 1) == EBADF, "posix_fallocate of nothing");
	must(close(fd) == 0, "close");
}

static void use_a_mapping(void)
{
	int fd = create("mapped");
	char *memory;

	must(ftruncate(fd, N_BLOCKS * BLOCK_BYTES) == 0, "ftruncate");
	memory = mmap(NULL, N_BLOCKS * BLOCK_BYTES, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
	must(memory != MAP_FAILED, "mmap");
	must(close(fd) == 0, "close");
	for (int number = 0; number < N_BLOCKS; number++) {
		fill(number);
		memcpy(memory + (size_t)number * BLOCK_BYTES, block, BLOCK_BYTES);
	}
	must(msync(memory, N_BLOCKS * BLOCK_BYTES, MS_SYNC) == 0, "msync");
	must(munmap(memory, N_BLOCKS * BLOCK_BYTES) == 0, "munmap");
}

static void use_streams(void)
{
	FILE *file = fopen("stream", "w");

	must(file != NULL, "fopen");
	for (int number = 0; number < N_BLOCKS; number++) {
		fill(number);
		must(fwrite(block, 1, sizeof(block), file) == sizeof(block), "fwrite");
		must(fprintf(file, "block %d\n", number) > 0, "fprintf");
	}
	must(fflush(file) == 0 && fsync(fileno(file)) == 0, "fflush");
	file = freopen("stream again", "a", file);
	must(file != NULL, "freopen");
	must(fwrite(block, 1, sizeof(block), file) == sizeof(block), "fwrite");
	must(fclose(file) == 0, "fclose");
}

/* ---- Calls that pass the C library by
 * ----------------------------------------------------------*/

static void use_uring(void)
{
	struct io_uring ring;
	struct io_uring_cqe *done;
	int fd = create("uring");

	if (io_uring_queue_init(8, &ring, 0) < 0) {
		puts("the kernel has no io_uring");
		return;
	}
	for (int number = 0; number < N_BLOCKS; number++) {
		fill(number);
		io_uring_prep_write(io_uring_get_sqe(&ring), fd, block, BLOCK_BYTES,
				    (unsigned long long)number * BLOCK_BYTES);
		must(io_uring_submit_and_wait(&ring, 1) == 1, "io_uring_submit_and_wait");
		must(io_uring_wait_cqe(&ring, &done) == 0 && done->res == BLOCK_BYTES, "io_uring");
		io_uring_cqe_seen(&ring, done);
	}
	io_uring_queue_exit(&ring);
	must(close(fd) == 0, "close");
}

static void use_aio(void)
{
	int fd = create("aio");

	for (int number = 0; number < N_BLOCKS; number++) {
		struct aiocb request = {
			.aio_fildes = fd,
			.aio_buf = block,
			.aio_nbytes = BLOCK_BYTES,
			.aio_offset = (off_t)number * BLOCK_BYTES,
		};
		const struct aiocb *const requests[] = { &request };

		fill(number);
		must(aio_write(&request) == 0, "aio_write");
		while (aio_error(&request) == EINPROGRESS)
			aio_suspend(requests, 1, NULL);
		must(aio_return(&request) == BLOCK_BYTES, "aio_return");
	}
	must(close(fd) == 0, "close");
}

/* ---- Descriptors
 * -------------------------------------------------------------------------------*/

static void close_everything(void)
{
	int fd = create("before");

	write_blocks(fd);
	closefrom(3);
	must(close(fd) == -1 && errno == EBADF, "close after closefrom");
	fd = create("between");
	must(fd == 3, "lowest descriptor after closefrom");
	write_blocks(fd);
	must(close_range(3, ~0U, 0) == 0, "close_range");
	must(open("after", O_RDWR | O_CREAT, 0644) == 3, "lowest descriptor after close_range");
	write_blocks(3);
	must(close(0) == 0, "close");
	fd = create("as stdin");
	must(fd == 0, "lowest descriptor after close(0)");
	write_blocks(fd);
}

static void number_descriptors(void)
{
	int first = create("one");
	int second = create("two");

	write_blocks(first);
	must(dup2(first, second) == second, "dup2");
	write_blocks(second);
	must(dup3(second, HIGH_FD, O_CLOEXEC) == HIGH_FD, "dup3");
	must(close(first) == 0, "close");
	must(dup(second) == first, "dup");
	must(fcntl(second, F_DUPFD, 100) == 100, "F_DUPFD");
	write_blocks(100);
	must(lseek(first, 0, SEEK_CUR) == 3L * N_BLOCKS * BLOCK_BYTES, "common position");
	must(rename("one", "renamed") == 0 && unlink("two") == 0, "rename");
	write_blocks(HIGH_FD);
}

static void have_few_descriptors(void)
{
	struct rlimit limit = { .rlim_cur = 5, .rlim_max = 5 };
	int fd;

	must(setrlimit(RLIMIT_NOFILE, &limit) == 0, "setrlimit");
	fd = create("few");
	write_blocks(fd);
	must(dup(fd) == 4, "dup");
	must(open("more", O_WRONLY | O_CREAT, 0644) == -1 && errno == EMFILE, "open of one more");
	write_blocks(4);
}

/* Opens files without stdin, stdout and stderr. A library must not take their numbers. */
static void have_no_standard_files(void)
{
	for (int fd = 0; fd < 3; fd++)
		close(fd);
	for (int fd = 0; fd < 3; fd++) {
		char name[] = "fd0";

		name[2] = (char)('0' + fd);
		if (open(name, O_RDWR | O_CREAT, 0644) != fd)
			_exit(1);
		write_blocks(fd);
	}
}

static void have_small_files(void)
{
	struct rlimit limit = { .rlim_cur = BLOCK_BYTES * 3 / 2, .rlim_max = BLOCK_BYTES * 3 / 2 };
	int fd;

	signal(SIGXFSZ, SIG_IGN);
	must(setrlimit(RLIMIT_FSIZE, &limit) == 0, "setrlimit");
	fd = create("small");
	must(write(fd, block, sizeof(block)) == BLOCK_BYTES, "write");
	must(write(fd, block, sizeof(block)) == BLOCK_BYTES / 2, "short write");
	must(write(fd, block, sizeof(block)) == -1 && errno == EFBIG, "write past the limit");
}

/* ---- Processes, threads, signals
 * ---------------------------------------------------------------*/

static void wait_for(pid_t child)
{
	int status;

	must(child > 0, "child");
	must(waitpid(child, &status, 0) == child, "waitpid");
	must(WIFEXITED(status) && WEXITSTATUS(status) == 0, "child");
}

static void start_processes(void)
{
	char self[] = "/proc/self/exe";
	char *arguments[] = { self, "vectors", NULL };
	int fd = create("shared");
	posix_spawn_file_actions_t actions;
	pid_t child;

	write_blocks(fd);
	child = fork();
	if (child == 0) {
		write_blocks(fd);
		_exit(0);
	}
	wait_for(child);
	must(posix_spawn_file_actions_init(&actions) == 0, "posix_spawn");
	must(posix_spawn_file_actions_addclose(&actions, fd) == 0, "posix_spawn");
	must(posix_spawn(&child, self, &actions, NULL, arguments, environ) == 0, "posix_spawn");
	wait_for(child);
	child = vfork();
	if (child == 0) {
		if (write(fd, "of a vfork child\n", 17) == 17 && dup2(fd, 1) == 1)
			execlp("sh", "sh", "-c", "seq 40000", (char *)NULL);
		_exit(1);
	}
	wait_for(child);
	must(system("head -c 300000 /dev/zero >zeros") == 0, "system");
	write_blocks(fd);
	must(waitpid(-1, NULL, WNOHANG) == -1 && errno == ECHILD, "no other child");
}

static void *write_every_eighth(void *argument)
{
	const int first = *(int *)argument;
	char *own = malloc(BLOCK_BYTES);
	int fd = open("threads", O_WRONLY);

	must(own != NULL && fd >= 0, "thread");
	for (int number = first; number < N_BLOCKS * 4; number += N_THREADS) {
		memset(own, 'a' + first, BLOCK_BYTES);
		must(pwrite(fd, own, BLOCK_BYTES, (off_t)number * BLOCK_BYTES) == BLOCK_BYTES,
		     "pwrite");
	}
	must(close(fd) == 0, "close");
	free(own);
	return NULL;
}

static void start_threads(void)
{
	pthread_t threads[N_THREADS];
	int numbers[N_THREADS];

	must(close(create("threads")) == 0, "close");
	for (int i = 0; i < N_THREADS; i++) {
		numbers[i] = i;
		must(pthread_create(&threads[i], NULL, write_every_eighth, &numbers[i]) == 0,
		     "pthread_create");
	}
	for (int i = 0; i < N_THREADS; i++)
		must(pthread_join(threads[i], NULL) == 0, "pthread_join");
}

static int interrupted_fd;
static volatile sig_atomic_t n_signals;

static void on_alarm(int number)
{
	int saved = errno;

	(void)number;
	errno = EDOM;
	if (write(interrupted_fd, "signal\n", 7) != 7 || errno != EDOM)
		_exit(1);
	n_signals++;
	errno = saved;
}

static void write_in_handlers(void)
{
	struct sigaction action = { .sa_handler = on_alarm, .sa_flags = SA_RESTART };
	struct itimerval every = { { 0, 200 }, { 0, 200 } };
	int fd = create("interrupted");

	interrupted_fd = open("/dev/null", O_WRONLY);
	must(sigaction(SIGALRM, &action, NULL) == 0, "sigaction");
	must(setitimer(ITIMER_REAL, &every, NULL) == 0, "setitimer");
	while (n_signals < 50) {
		must(lseek(fd, 0, SEEK_SET) == 0, "lseek");
		write_blocks(fd);
	}
	every.it_value.tv_usec = 0;
	must(setitimer(ITIMER_REAL, &every, NULL) == 0, "setitimer");
	must(close(fd) == 0, "close");
}

/* Forbids to start processes, as sandboxes such as qemu's do, and writes then. */
static void enter_a_sandbox(void)
{
#define FORBID(call)                                                                               \
	BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_##call, 0, 1),                                     \
		BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_KILL_PROCESS)
	struct sock_filter rules[] = {
		BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
		FORBID(clone),
		FORBID(clone3),
		FORBID(execve),
		FORBID(memfd_create),
		BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
	};
	struct sock_fprog filter = { sizeof(rules) / sizeof(rules[0]), rules };

	must(prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0, "PR_SET_NO_NEW_PRIVS");
	must(prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &filter) == 0, "PR_SET_SECCOMP");
	write_blocks(create("sandboxed"));
}

static void die_while_writing(void)
{
	write_blocks(create("killed"));
	kill(getpid(), SIGKILL);
}

static const struct {
	const char *name;
	void (*write)(void);
} ways[] = {
	{ "vectors", use_vectors },
	{ "kernel", copy_in_kernel },
	{ "reserve", reserve_space },
	{ "mapping", use_a_mapping },
	{ "streams", use_streams },
	{ "uring", use_uring },
	{ "aio", use_aio },
	{ "closefrom", close_everything },
	{ "numbers", number_descriptors },
	{ "few", have_few_descriptors },
	{ "closed", have_no_standard_files },
	{ "limit", have_small_files },
	{ "processes", start_processes },
	{ "threads", start_threads },
	{ "signals", write_in_handlers },
	{ "sandbox", enter_a_sandbox },
	{ "killed", die_while_writing },
};

int main(int argc, char **argv)
{
	must(argc == 2, "usage: preloaded_writers WAY");
	for (size_t i = 0; i < sizeof(ways) / sizeof(ways[0]); i++) {
		if (strcmp(argv[1], ways[i].name) == 0) {
			ways[i].write();
			return 0;
		}
	}
	printf("there is no way %s\n", argv[1]);
	return 1;
}
