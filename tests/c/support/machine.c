/* SPDX-License-Identifier: Apache-2.0 */
#define _GNU_SOURCE
#include "support/machine.h"

#include "support/scratch.h"

#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <glob.h>
#include <limits.h>
#include <net/if.h>
#include <sched.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/reboot.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/utsname.h>
#include <sys/vfs.h>
#include <sys/wait.h>
#include <termios.h>
#include <unistd.h>

#define PROGRAM "linux.uml"
#define MODULES "/usr/lib/uml/modules"
#define INSIDE "IOSHAPE_TEST_MACHINE" /* set inside the machine: its time limit in seconds */
#define BEGINNING "# a machine of our own runs"
#define END "# it ends with "

/*
 * glibc prints this and aborts the program if futex() returns an unexpected error. User-mode Linux
 * does that now and then on a busy host. The test is then repeated, because the failure is not the
 * library's.
 */
#define BROKEN "The futex facility returned an unexpected error code."
#define MOST_TRIES 3

#define MEMORY_MIB 384
#define NOT_ALLOWED 126 /* exit status if namespaces are not allowed */

static int exit_status_of(pid_t child)
{
	int status;

	if (child < 0 || waitpid(child, &status, 0) != child)
		return 1;
	return WIFEXITED(status) ? WEXITSTATUS(status) : 1;
}

/* ---- Inside the machine ---------------------------------------------------------------------- */

/* Inserts a module. Its file name is relative to `root`. */
static bool insert(const char *root, const char *file)
{
	char path[PATH_MAX];
	bool well;
	int fd;

	snprintf(path, sizeof(path), "%s/%s", root, file);
	fd = open(path, O_RDONLY | O_CLOEXEC);
	well = fd >= 0 && (!syscall(SYS_finit_module, fd, "", 0) || errno == EEXIST);
	if (!well)
		printf("# cannot insert %s: %s\n", path, strerror(errno));
	if (fd >= 0)
		close(fd);
	return well;
}

/*
 * Inserts a module and the modules that it needs. `line` is from modules.dep:
 * "kernel/fs/nfs/nfsv3.ko: kernel/fs/nfs/nfs.ko kernel/net/...". The last module of the line needs
 * none of the others.
 */
static bool insert_with_needs(const char *root, char *line)
{
	char *needs[64], *save, *file = strtok_r(line, ": \n", &save);
	unsigned count = 0;

	while (count < 64 && (needs[count] = strtok_r(NULL, " \n", &save)))
		count++;
	while (count)
		if (!insert(root, needs[--count]))
			return false;
	return insert(root, file);
}

static bool load_module(const char *name)
{
	char root[PATH_MAX / 2], path[PATH_MAX], wanted[64], *line = NULL;
	struct utsname names;
	bool found = false;
	size_t room = 0;
	FILE *list;

	uname(&names);
	snprintf(root, sizeof(root), MODULES "/%s", names.release);
	snprintf(path, sizeof(path), "%s/modules.dep", root);
	snprintf(wanted, sizeof(wanted), "/%s.ko:", name);
	list = fopen(path, "re");
	while (list && !found && getline(&line, &room, list) > 0)
		found = strstr(line, wanted) && insert_with_needs(root, line);
	free(line);
	if (list)
		fclose(list);
	return found;
}

static void raise_loopback(void)
{
	struct ifreq request = { .ifr_name = "lo", .ifr_flags = IFF_UP | IFF_RUNNING };
	int fd = socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0);

	if (fd < 0 || ioctl(fd, SIOCSIFFLAGS, &request))
		printf("# no loopback: %s\n", strerror(errno));
	if (fd >= 0)
		close(fd);
}

static int run_inside(int (*body)(void))
{
	static const char *const in_memory[] = { "/dev/shm", "/tmp", "/var/lib/nfs", "/run" };

	setenv("PATH", "/usr/sbin:/usr/bin:/sbin:/bin", 1);
	setenv("HOME", "/run", 1);
	mount("proc", "/proc", "proc", 0, NULL);
	mount("sysfs", "/sys", "sysfs", 0, NULL);
	for (unsigned i = 0; i < sizeof(in_memory) / sizeof(*in_memory); i++)
		if (mount("none", in_memory[i], "tmpfs", 0, "mode=1777") && errno != ENOENT)
			printf("# no memory at %s: %s\n", in_memory[i], strerror(errno));
	raise_loopback();
	if (chdir("/run"))
		return 1;
	mkdir("/run/test", 0777);
	setenv("IOSHAPE_TEST_DIR", "/run/test", 1);
	return body();
}

/* Prints the contents of a file in /proc as one line. */
static void say_file(const char *folder, const char *name)
{
	char path[PATH_MAX], text[1024];
	ssize_t bytes;
	int fd;

	snprintf(path, sizeof(path), "%s/%s", folder, name);
	fd = open(path, O_RDONLY | O_CLOEXEC);
	bytes = fd < 0 ? -1 : read(fd, text, sizeof(text) - 1);
	text[bytes > 0 ? bytes : 0] = 0;
	for (ssize_t i = 0; i < bytes; i++)
		if (text[i] == '\n')
			text[i] = ' ';
	printf("# %s: %s\n", path, text);
	if (fd >= 0)
		close(fd);
}

/* Prints the kernel stacks of all threads, to find out why a test hangs. */
static void say_who_waits_for_what(void)
{
	glob_t threads;

	if (glob("/proc/[0-9]*/task/[0-9]*", 0, NULL, &threads))
		return;
	for (size_t i = 0; i < threads.gl_pathc; i++) {
		say_file(threads.gl_pathv[i], "comm");
		say_file(threads.gl_pathv[i], "stack");
	}
	globfree(&threads);
}

static volatile sig_atomic_t is_late;

static void note_late(int signal)
{
	(void)signal;
	is_late = 1;
}

/*
 * Waits for the process. Shortly before the machine's time is over, prints what all threads are
 * doing.
 */
static int await_in_time(pid_t child, unsigned seconds)
{
	const struct sigaction late = { .sa_handler = note_late }; /* interrupts the wait */
	int status;

	sigaction(SIGALRM, &late, NULL);
	alarm(seconds - seconds / 10);
	status = exit_status_of(child);
	if (is_late) {
		printf("# the time is nearly over; all threads:\n");
		say_who_waits_for_what();
	}
	return status;
}

/* Runs as the first process of User-mode Linux, whose kernel panics if that process ends. */
static void run_as_init(const char *const modules[], int (*body)(void))
{
	bool well = true;
	pid_t child;

	setvbuf(stdout, NULL, _IOLBF, 0);
	printf(BEGINNING "\n");
	for (unsigned i = 0; modules[i]; i++)
		well = load_module(modules[i]) && well;
	/* The test runs in a child, because abort() and crashes do not end the first process. */
	child = well ? fork() : -1;
	if (!child)
		_exit(run_inside(body));
	printf(END "%d\n", await_in_time(child, (unsigned)atoi(getenv(INSIDE))));
	fflush(NULL);
	tcdrain(STDOUT_FILENO);
	reboot(RB_POWER_OFF);
	for (;;)
		pause();
}

int machine_start(char *const arguments[], const char *output)
{
	pid_t child = fork();
	int fd;

	if (child)
		return child;
	fd = open(output, O_WRONLY | O_CREAT | O_APPEND, 0666);
	dup2(fd, 1);
	dup2(fd, 2);
	execvp(arguments[0], arguments);
	_exit(127);
}

bool machine_wait_for_port(unsigned port, unsigned timeout_ms)
{
	struct sockaddr_in address = {
		.sin_family = AF_INET,
		.sin_port = htons((uint16_t)port),
		.sin_addr.s_addr = htonl(INADDR_LOOPBACK),
	};

	for (unsigned waited = 0; waited < timeout_ms; waited += 10) {
		int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
		bool there = !connect(fd, (struct sockaddr *)&address, sizeof(address));

		close(fd);
		if (there)
			return true;
		usleep(10000);
	}
	return false;
}

/* ---- On the host ----------------------------------------------------------------------------- */

static bool kernel_has(const char *type)
{
	FILE *list = fopen("/proc/filesystems", "re");
	char line[256], name[64];
	bool found = false;

	while (list && !found && fgets(line, sizeof(line), list))
		found = (sscanf(line, "nodev %63s", name) == 1 ||
			 sscanf(line, "%63s", name) == 1) &&
			!strcmp(name, type);
	if (list)
		fclose(list);
	return found;
}

/*
 * Runs the test in new namespaces, in a child of a child: the first process of a PID namespace.
 * When it ends, the kernel kills all other processes there.
 */
static int run_in_namespaces(unsigned seconds, int (*body)(void))
{
	pid_t child;

	fflush(NULL);
	child = fork();
	if (child)
		return exit_status_of(child);
	if (unshare(CLONE_NEWNS | CLONE_NEWNET | CLONE_NEWPID) ||
	    mount("none", "/", NULL, MS_REC | MS_PRIVATE, NULL))
		_exit(NOT_ALLOWED);
	child = fork();
	if (child)
		_exit(exit_status_of(child));
	prctl(PR_SET_PDEATHSIG, SIGKILL);
	alarm(seconds);
	setvbuf(stdout, NULL, _IOLBF, 0);
	_exit(run_inside(body));
}

/*
 * Chooses the folder for the machine's memory, which is an unlinked file: /dev/shm if it has enough
 * space, else the working directory.
 */
static void choose_memory(void)
{
	struct statfs status;

	if (statfs("/dev/shm", &status) ||
	    (uint64_t)status.f_bavail * (uint64_t)status.f_bsize < 2 * (uint64_t)MEMORY_MIB << 20)
		setenv("TMPDIR", ".", 1);
}

static void exec_uml(unsigned seconds, const char *folder, int output)
{
	char self[PATH_MAX], init[PATH_MAX + 8], own_files[64], limit[16], memory[16], inside[48];
	const char *form = getenv("IOSHAPE_TEST_LONG");
	ssize_t bytes = readlink("/proc/self/exe", self, sizeof(self) - 1);

	self[bytes > 0 ? bytes : 0] = 0;
	snprintf(init, sizeof(init), "init=%s", self);
	snprintf(own_files, sizeof(own_files), "uml_dir=%s/", folder);
	snprintf(limit, sizeof(limit), "%u", seconds);
	snprintf(inside, sizeof(inside), INSIDE "=%u", seconds);
	snprintf(memory, sizeof(memory), "mem=%uM", MEMORY_MIB);
	dup2(open("/dev/null", O_RDONLY), STDIN_FILENO);
	dup2(output, STDOUT_FILENO);
	dup2(output, STDERR_FILENO);
	choose_memory();
	setenv("LD_PRELOAD", WIDE_REGISTERS, 1);
	/* On SIGTERM User-mode Linux ends all its host processes, hence `timeout` with -k 5. */
	execlp("timeout", "timeout", "-k", "5", limit, PROGRAM, memory, "rootfstype=hostfs",
	       "rootflags=/", "ro", init, "con=null", "con0=null,fd:1", "ssl=null", "quiet",
	       "loglevel=1", own_files, inside, form && *form ? "IOSHAPE_TEST_LONG=1" : NULL,
	       (char *)NULL);
	_exit(127);
}

/*
 * Copies what the test prints to `into`, without the output of the kernel and its console. Returns
 * the result of `body`; 1 if the test ended early; -1 if it did not start; -2 if the machine
 * failed.
 */
static int listen_to(FILE *from, FILE *into)
{
	bool running = false, broken = false;
	char line[4096];
	int result = -1;

	while (fgets(line, sizeof(line), from)) {
		line[strcspn(line, "\r\n")] = 0;
		broken = broken || !strcmp(line, BROKEN);
		if (!strcmp(line, BEGINNING)) {
			running = true;
			result = 1;
		} else if (!strncmp(line, END, strlen(END))) {
			running = false;
			result = atoi(line + strlen(END));
		} else if (running) {
			fprintf(into, "%s\n", line);
		}
	}
	return broken && result > 0 ? -2 : result;
}

static int run_uml_once(unsigned seconds, FILE *into)
{
	char folder[] = "/tmp/machine-XXXXXX";
	int ends[2], result = -1;
	FILE *from;
	pid_t child;

	fflush(NULL);
	if (!mkdtemp(folder) || pipe2(ends, O_CLOEXEC))
		return -1;
	child = fork();
	if (!child)
		exec_uml(seconds, folder, ends[1]);
	close(ends[1]);
	from = fdopen(ends[0], "r");
	if (from) {
		result = listen_to(from, into);
		fclose(from);
	}
	exit_status_of(child);
	scratch_remove(folder);
	return result;
}

static int run_uml(unsigned seconds, const char **why_not)
{
	int result = -2;

	for (int tries = 0; result == -2 && tries < MOST_TRIES; tries++) {
		char *text = NULL;
		size_t bytes;
		FILE *into = open_memstream(&text, &bytes);

		if (!into)
			return 1;
		result = run_uml_once(seconds, into);
		fclose(into);
		if (result != -2 || tries == MOST_TRIES - 1)
			fputs(text, stdout);
		/* meson shows only the stderr of a failed test. */
		if (result > 0)
			fprintf(stderr, "The machine said:\n%s", text);
		free(text);
	}
	if (result == -1)
		*why_not = "User-mode Linux does not run here";
	return result == -2 ? 1 : result;
}

int machine_run(const char *type, const char *const modules[], unsigned seconds, int (*body)(void),
		const char **why_not)
{
	int status;

	if (getpid() == 1 && getenv(INSIDE))
		run_as_init(modules, body);
	if (!geteuid() && kernel_has(type)) {
		status = run_in_namespaces(seconds, body);
		if (status != NOT_ALLOWED)
			return status;
	}
	if (access("/usr/bin/" PROGRAM, X_OK)) {
		*why_not = "this kernel does not have it, and User-mode Linux is not installed";
		return -1;
	}
	return run_uml(seconds, why_not);
}
