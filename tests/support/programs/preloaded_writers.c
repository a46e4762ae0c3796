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
#include <signal.h>
#include <spawn.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <sys/uio.h>
#include <sys/wait.h>
#include <unistd.h>

#define BLOCK_BYTES (64 << 10)
#define N_BLOCKS 32

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

/* ---- Processes, signals -----------------------------------------------------------------------*/

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
	{ "uring", use_uring },
	{ "aio", use_aio },
	{ "few", have_few_descriptors },
	{ "closed", have_no_standard_files },
	{ "processes", start_processes },
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
