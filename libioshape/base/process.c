/* SPDX-License-Identifier: Apache-2.0 */
/* This process: which one it is, what it may do, its clock, the descriptors that it has open, and
 * its job. */
#define _GNU_SOURCE
#include "base/base.h"

#include <ioshape/ioshape.h>

#include <errno.h>
#include <fcntl.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/resource.h>
#include <time.h>
#include <unistd.h>

/* ---- Which process this is, without asking the kernel every time ----------------------------- */

/* In a page that is empty again in a child of fork(), however it was forked; NULL: there is none.
 */
static _Atomic pid_t *known;

static void make_page(void)
{
	const size_t bytes = (size_t)sysconf(_SC_PAGESIZE);
	void *page = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

	if (page == MAP_FAILED)
		return;
	if (madvise(page, bytes, MADV_WIPEONFORK))
		munmap(page, bytes);
	else
		known = page;
}

pid_t base_pid(void)
{
	static pthread_once_t once = PTHREAD_ONCE_INIT;
	pid_t pid;

	pthread_once(&once, make_page);
	if (!known)
		return getpid();
	pid = atomic_load_explicit(known, memory_order_relaxed);
	if (!pid) {
		pid = getpid();
		atomic_store_explicit(known, pid, memory_order_relaxed);
	}
	return pid;
}

uint64_t base_largest_file(void)
{
	struct rlimit limit;

	if (getrlimit(RLIMIT_FSIZE, &limit) || limit.rlim_cur == RLIM_INFINITY)
		return UINT64_MAX;
	return limit.rlim_cur;
}

/* What the kernel shows for users that have no number. */
#define NOBODY 65534

bool base_is_one_user(uid_t user)
{
	unsigned first = 0, outside, count = 0;
	FILE *map;

	if (user != NOBODY)
		return true;
	map = fopen("/proc/self/uid_map", "re");
	/* In the first namespace all users have one. */
	if (map && fscanf(map, "%u %u %u", &first, &outside, &count) != 3)
		count = 0;
	if (map)
		fclose(map);
	return !first && count == UINT32_MAX;
}

bool base_is_own_user(uid_t user)
{
	return user == geteuid() && base_is_one_user(user);
}

uint64_t base_random(void)
{
	uint64_t number = 0;

	/* Early in a machine's life there may be no such numbers yet: nobody waits for them. */
	if (getrandom(&number, sizeof(number), GRND_NONBLOCK) != sizeof(number))
		number = base_now_ns() * 0x9e3779b97f4a7c15 ^ (uint64_t)base_pid() << 40;
	return number ? number : 1;
}

/* ---- The clock ------------------------------------------------------------------------------- */

uint64_t base_now_ns(void)
{
	struct timespec now;

	clock_gettime(CLOCK_MONOTONIC, &now);
	return (uint64_t)now.tv_sec * 1000000000ull + (uint64_t)now.tv_nsec;
}

double base_wall_seconds(void)
{
	struct timespec now;

	clock_gettime(CLOCK_REALTIME, &now);
	return (double)now.tv_sec + (double)now.tv_nsec * 1e-9;
}

/* ---- The umask ------------------------------------------------------------------------------- */

int base_umask(void)
{
	FILE *status = fopen("/proc/self/status", "re");
	unsigned mask;
	char line[256];
	int found = -1;

	/* It stands in one of the first lines. */
	while (status && found < 0 && fgets(line, sizeof(line), status))
		if (sscanf(line, "Umask: %o", &mask) == 1)
			found = (int)(mask & 0777);
	if (status)
		fclose(status);
	return found;
}

/* ---- Descriptors ----------------------------------------------------------------------------- */

/* Higher ones are not known to be ours; nobody has so many. */
#define MOST_OWNED 65536
#define WORD_BITS 64

/* A bit for each. No lock: what fails must not, and a child must find it as it was at any moment.
 */
static _Atomic uint64_t owned[MOST_OWNED / WORD_BITS];

/* Only what may be done in a child of a process with threads. */
static void let_go(uint64_t bits, int first, int nowhere)
{
	for (; bits; bits &= bits - 1) {
		const int fd = first + __builtin_ctzll(bits);

		/* The handles that are inherited still have the number: it must not become another
		 * file's. */
		if (nowhere < 0 || dup3(nowhere, fd, O_CLOEXEC) < 0)
			close(fd);
	}
}

static void in_child(void)
{
	const int before = errno, nowhere = base_above_streams(open("/", O_PATH | O_CLOEXEC));

	for (int i = 0; i < MOST_OWNED / WORD_BITS; i++)
		let_go(atomic_exchange(&owned[i], 0), i * WORD_BITS, nowhere);
	if (nowhere >= 0)
		close(nowhere);
	errno = before;
}

/* The library is never unloaded (-z nodelete), so the handler stays valid. */
static void watch_forks(void)
{
	pthread_atfork(NULL, NULL, in_child);
}

static uint64_t bit_of(int fd)
{
	return UINT64_C(1) << fd % WORD_BITS;
}

int base_above_streams(int fd)
{
	int above, failed;

	if (fd < 0 || fd > STDERR_FILENO)
		return fd;
	above = fcntl(fd, F_DUPFD_CLOEXEC, STDERR_FILENO + 1);
	failed = errno;
	close(fd);
	errno = failed;
	return above;
}

int base_own(int fd)
{
	static pthread_once_t once = PTHREAD_ONCE_INIT;

	pthread_once(&once, watch_forks);
	fd = base_above_streams(fd);
	if (fd >= 0 && fd < MOST_OWNED)
		atomic_fetch_or(&owned[fd / WORD_BITS], bit_of(fd));
	return fd;
}

bool base_disown(int fd)
{
	if (fd < 0)
		return false;
	return fd >= MOST_OWNED ||
	       atomic_fetch_and(&owned[fd / WORD_BITS], ~bit_of(fd)) & bit_of(fd);
}

int base_close(int fd)
{
	return base_disown(fd) ? close(fd) : 0;
}

/* ---- SIGPIPE --------------------------------------------------------------------------------- */

void base_hold_sigpipe(struct base_held_sigpipe *held)
{
	const int code = errno;
	sigset_t pipe_signal, pending;

	sigemptyset(&pipe_signal);
	sigaddset(&pipe_signal, SIGPIPE);
	sigpending(&pending);
	held->was_pending = sigismember(&pending, SIGPIPE);
	pthread_sigmask(SIG_BLOCK, &pipe_signal, &held->before);
	errno = code;
}

void base_let_sigpipe(const struct base_held_sigpipe *held, bool raised)
{
	const struct timespec no_time = { 0, 0 };
	const int code = errno;
	sigset_t pipe_signal;

	sigemptyset(&pipe_signal);
	sigaddset(&pipe_signal, SIGPIPE);
	if (raised && !held->was_pending)
		sigtimedwait(&pipe_signal, NULL, &no_time);
	pthread_sigmask(SIG_SETMASK, &held->before, NULL);
	errno = code;
}

/* ---- Its job, by the variables of launchers -------------------------------------------------- */

#define MOST_DIGITS 9

/* By the variables that each sets. What srun or mpirun started may start torchrun in turn, so the
 * innermost launcher is asked first. */
static const struct launcher {
	const char *name, *rank, *ranks, *local_rank;
	const char *local_ranks; /* NULL: in Slurm's list */
} launchers[] = {
	{ "torchrun", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE" },
	{ "openmpi", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK",
	  "OMPI_COMM_WORLD_LOCAL_SIZE" },
	{ "slurm", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", NULL },
	{ "mpich", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS" },
	{ "pmi", "PMIX_RANK", "PMIX_SIZE", "PMIX_LOCAL_RANK", "PMIX_LOCAL_SIZE" },
};

/* A number at the beginning of a text; the rest of it, or NULL if there is none. */
static const char *take_number(const char *text, uint32_t *number)
{
	size_t digits = strspn(text, "0123456789");

	if (!digits || digits > MOST_DIGITS)
		return NULL;
	*number = (uint32_t)strtoul(text, NULL, 10);
	return text + digits;
}

static bool read_number(const char *variable, uint32_t *number)
{
	const char *text = secure_getenv(variable), *rest = text ? take_number(text, number) : NULL;

	return rest && !*rest;
}

/* Slurm lists the tasks of all nodes, as in "4(x2),3". 0 if it does not tell of this node. */
static uint32_t slurm_local_ranks(void)
{
	const char *at = secure_getenv("SLURM_STEP_TASKS_PER_NODE");
	uint32_t node, tasks, nodes;

	if (!read_number("SLURM_NODEID", &node))
		return 0;
	while (at && (at = take_number(at, &tasks))) {
		nodes = 1;
		if (!strncmp(at, "(x", 2)) {
			size_t digits = strspn(at + 2, "0123456789");

			/* More than a number holds are enough for every node. */
			if (!take_number(at + 2, &nodes))
				nodes = UINT32_MAX;
			at += 2 + digits + (at[2 + digits] == ')');
		}
		if (node < nodes)
			return tasks;
		node -= nodes;
		at += *at == ',';
	}
	return 0;
}

static void name_job(struct base_job *job)
{
	/* Slurm's job is the same job whoever starts the ranks inside it. */
	static const char *const variables[] = {
		"SLURM_JOB_ID",        "PBS_JOBID",      "LSB_JOBID", "FLUX_JOB_ID",
		"TORCHELASTIC_RUN_ID", "PMIX_NAMESPACE", "PMI_JOBID"
	};

	for (size_t i = 0; i < ARRAY_LENGTH(variables) && !*job->id; i++) {
		const char *text = secure_getenv(variables[i]);

		/* torchrun calls a job without a name "none". */
		if (text && strcmp(text, "none") != 0)
			snprintf(job->id, sizeof(job->id), "%s", text);
	}
}

void base_job_find(struct base_job *job)
{
	*job = (struct base_job){ .ranks = 1, .local_ranks = 1, .launcher = "alone" };
	name_job(job);
	for (size_t i = 0; i < ARRAY_LENGTH(launchers); i++) {
		const struct launcher *launcher = &launchers[i];
		uint32_t rank, ranks, local_ranks = 0;

		if (!read_number(launcher->rank, &rank) || !read_number(launcher->ranks, &ranks) ||
		    rank >= ranks)
			continue;
		job->rank = rank;
		job->ranks = ranks;
		if (!read_number(launcher->local_rank, &job->local_rank))
			job->local_rank = 0;
		if (!launcher->local_ranks)
			local_ranks = slurm_local_ranks();
		else if (!read_number(launcher->local_ranks, &local_ranks))
			local_ranks = 0;
		job->local_ranks = MAX(local_ranks, 1);
		snprintf(job->launcher, sizeof(job->launcher), "%s", launcher->name);
		return;
	}
}

unsigned base_copy_threads(void)
{
	const long online = sysconf(_SC_NPROCESSORS_ONLN);
	struct base_job job;
	unsigned share, most;
	cpu_set_t cores;

	base_job_find(&job);
	share = online > 0 ? (unsigned)online / job.local_ranks : 1;
	most = MIN(MAX(share, 1u), BASE_MOST_COPY_THREADS);
	if (sched_getaffinity(0, sizeof(cores), &cores))
		return most; /* a machine with more cores than a cpu_set_t has */
	return MIN((unsigned)CPU_COUNT(&cores), most);
}

/* ---- This library ---------------------------------------------------------------------------- */

IOSHAPE_EXPORT void ioshape_free(void *memory)
{
	free(memory);
}

IOSHAPE_EXPORT const char *ioshape_version(void)
{
	return IOSHAPE_VERSION;
}

/* ---- Mechanisms that are left out ------------------------------------------------------------ */

#ifdef IOSHAPE_ABLATION
/* Mechanisms that are left out to find out what they are worth. Only in a build with
 * -Dablation=true. */

bool base_without(const char *mechanism)
{
	const char *left_out = secure_getenv("IOSHAPE_TEST_WITHOUT");

	return left_out && !strcmp(left_out, mechanism);
}
#endif
