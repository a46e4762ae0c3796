/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The process: its id, limits and users, clock and deadlines, registered descriptors, its job by
 * the launcher's variables, and the library's threads.
 */
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

/* ---- Process id, limits and users ------------------------------------------------------------ */

/* The process id, in a page that the kernel clears in a child, whichever call makes the child.
 * NULL: the kernel refuses such pages. */
static _Atomic pid_t *known_pid;

static void make_pid_page(void)
{
	const size_t bytes = (size_t)sysconf(_SC_PAGESIZE);
	void *page = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

	if (page != MAP_FAILED && !madvise(page, bytes, MADV_WIPEONFORK))
		known_pid = page;
	else if (page != MAP_FAILED)
		munmap(page, bytes);
}

pid_t base_pid(void)
{
	static pthread_once_t once = PTHREAD_ONCE_INIT;

	pthread_once(&once, make_pid_page);
	if (!known_pid)
		return getpid();
	if (!*known_pid)
		*known_pid = getpid();
	return *known_pid;
}

uint64_t base_largest_file(void)
{
	struct rlimit limit;

	if (getrlimit(RLIMIT_FSIZE, &limit) || limit.rlim_cur == RLIM_INFINITY)
		return UINT64_MAX;
	return limit.rlim_cur;
}

/* The overflow user id, which the kernel shows for users without a number in this namespace. */
#define NOBODY 65534

bool base_is_one_user(uid_t user)
{
	unsigned first = 0, outside, count = 0;
	FILE *map;

	if (user != NOBODY)
		return true;
	map = fopen("/proc/self/uid_map", "re");
	/* In the initial namespace all users have a number. */
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

	/*
	 * Early after boot there may be no random numbers yet, and waiting for them could take
	 * long.
	 */
	if (getrandom(&number, sizeof(number), GRND_NONBLOCK) != sizeof(number))
		number = base_now_ns() * 0x9e3779b97f4a7c15 ^ (uint64_t)getpid() << 40;
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

/* ---- Deadlines and waits --------------------------------------------------------------------- */

void base_cond_init(pthread_cond_t *condition)
{
	pthread_condattr_t attributes;

	pthread_condattr_init(&attributes);
	pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC);
	pthread_cond_init(condition, &attributes);
	pthread_condattr_destroy(&attributes);
}

/* Longer timeouts are cut to this, so that the sum with the clock does not overflow. */
#define LONGEST_TIMEOUT_MS (1000ll * 3600 * 24 * 365 * 100)

uint64_t base_deadline_ns(int64_t ms)
{
	return ms ? base_now_ns() + base_ms_to_ns((uint64_t)MIN(MAX(ms, 0), LONGEST_TIMEOUT_MS)) :
		    0;
}

bool base_cond_wait_ms(pthread_cond_t *condition, pthread_mutex_t *lock, int64_t timeout_ms)
{
	struct timespec when;

	timeout_ms = MIN(timeout_ms, LONGEST_TIMEOUT_MS);
	clock_gettime(CLOCK_MONOTONIC, &when);
	when.tv_sec += (time_t)(timeout_ms / 1000);
	when.tv_nsec += (long)(timeout_ms % 1000) * 1000000;
	if (when.tv_nsec >= 1000000000) {
		when.tv_sec++;
		when.tv_nsec -= 1000000000;
	}
	return pthread_cond_timedwait(condition, lock, &when) != ETIMEDOUT;
}

struct base_budget base_budget_begin(void)
{
	return (struct base_budget){ .entries = BASE_TIDY_ENTRIES };
}

bool base_budget_look(struct base_budget *budget)
{
	if (budget && !budget->until_ns)
		budget->until_ns = base_now_ns() + BASE_TIDY_NS;
	if (budget && base_now_ns() >= budget->until_ns)
		budget->entries = 0;
	return !budget || budget->entries;
}

bool base_budget_take(struct base_budget *budget)
{
	const bool may = base_budget_look(budget);

	if (budget && may)
		budget->entries--;
	return may;
}

/* ---- The umask ------------------------------------------------------------------------------- */

int base_umask(void)
{
	FILE *status = fopen("/proc/self/status", "re");
	unsigned mask;
	char line[256];
	int found = -1;

	/* It is one of the first lines. */
	while (status && found < 0 && fgets(line, sizeof(line), status))
		if (sscanf(line, "Umask: %o", &mask) == 1)
			found = (int)(mask & 0777);
	if (status)
		fclose(status);
	return found;
}

/* ---- Descriptors and forks ------------------------------------------------------------------- */

/* Higher descriptors are not registered; no process is expected to have so many. */
#define MOST_REGISTERED 65536
#define WORD_BITS 64

/*
 * A bit for each registered descriptor. Without a lock: registering must not fail, and a child must
 * find valid data at any moment.
 */
static _Atomic uint64_t owned[MOST_REGISTERED / WORD_BITS];

/*
 * Points registered descriptors to "/" in the child. Uses only functions that are safe after fork()
 * in a process with threads.
 */
static void let_go(uint64_t bits, int first, int nowhere)
{
	for (; bits; bits &= bits - 1) {
		const int fd = first + __builtin_ctzll(bits);

		/*
		 * Inherited handles still have the number, so it must not be reused for another
		 * file.
		 */
		if (nowhere < 0 || dup3(nowhere, fd, O_CLOEXEC) < 0)
			close(fd);
	}
}

/* Drops all registered descriptors, in the child of fork(). */
static void let_go_of_all(void)
{
	const int before = errno, nowhere = base_above_streams(open("/", O_PATH | O_CLOEXEC));

	for (int i = 0; i < MOST_REGISTERED / WORD_BITS; i++)
		let_go(atomic_exchange(&owned[i], 0), i * WORD_BITS, nowhere);
	if (nowhere >= 0)
		close(nowhere);
	errno = before;
}

/* Held while a thread starts, and by a thread that forks. glibc frees the thread-local memory of an
 * earlier thread before it reuses its stack. A child forked at that moment would free it again.
 */
static pthread_mutex_t starting = PTHREAD_MUTEX_INITIALIZER;

/* Whether this thread forks. A child forked during install_handlers() has each handler twice. */
static _Thread_local bool forking;

static void before_fork(void)
{
	if (!forking)
		pthread_mutex_lock(&starting);
	forking = true;
}

static void in_parent(void)
{
	if (forking)
		pthread_mutex_unlock(&starting);
	forking = false;
}

static void in_child(void)
{
	in_parent();
	let_go_of_all();
}

static void install_handlers(void)
{
	pthread_atfork(before_fork, in_parent, in_child);
}

/* Installs the fork handlers. The library is never unloaded (-z nodelete), so they stay valid. */
static void watch_forks(void)
{
	static pthread_once_t once = PTHREAD_ONCE_INIT;

	pthread_once(&once, install_handlers);
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

int base_register_fd(int fd)
{
	watch_forks();
	fd = base_above_streams(fd);
	if (fd >= 0 && fd < MOST_REGISTERED)
		atomic_fetch_or(&owned[fd / WORD_BITS], bit_of(fd));
	return fd;
}

bool base_unregister_fd(int fd)
{
	if (fd < 0)
		return false;
	return fd >= MOST_REGISTERED ||
	       atomic_fetch_and(&owned[fd / WORD_BITS], ~bit_of(fd)) & bit_of(fd);
}

int base_close(int fd)
{
	return base_unregister_fd(fd) ? close(fd) : 0;
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

/* ---- The job, by the variables of launchers -------------------------------------------------- */

#define MOST_DIGITS 9

/*
 * The variables that each launcher sets. srun or mpirun may start torchrun in turn, so the
 * innermost launcher comes first.
 */
static const struct launcher {
	const char *name, *rank, *ranks, *local_rank;
	const char *local_ranks; /* NULL: in the list that Slurm sets */
} launchers[] = {
	{ "torchrun", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE" },
	{ "openmpi", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK",
	  "OMPI_COMM_WORLD_LOCAL_SIZE" },
	{ "slurm", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", NULL },
	{ "mpich", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS" },
	{ "pmi", "PMIX_RANK", "PMIX_SIZE", "PMIX_LOCAL_RANK", "PMIX_LOCAL_SIZE" },
};

/*
 * Parses a number at the beginning of a text. Returns the rest of the text; NULL if there is no
 * number.
 */
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

/*
 * Returns the number of tasks on this node from Slurm's list, such as "4(x2),3"; 0 if it is not
 * known.
 */
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

			/* A number that is too large covers every node. */
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
	/* Slurm's job id comes first: it holds whatever starts the ranks inside the job. */
	static const char *const variables[] = {
		"SLURM_JOB_ID",        "PBS_JOBID",      "LSB_JOBID", "FLUX_JOB_ID",
		"TORCHELASTIC_RUN_ID", "PMIX_NAMESPACE", "PMI_JOBID"
	};

	for (size_t i = 0; i < ARRAY_LENGTH(variables) && !*job->id; i++) {
		const char *text = secure_getenv(variables[i]);

		/* Torchrun uses "none" for jobs without a name. */
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
		return most; /* the machine has more cores than a cpu_set_t */
	return MIN((unsigned)CPU_COUNT(&cores), most);
}

/* ---- Starting a thread ----------------------------------------------------------------------- */

int base_start_thread(pthread_t *thread, void *(*run)(void *), void *argument)
{
	sigset_t all, before;
	int ret;

	watch_forks();
	/* The application's signals are for its own threads. */
	sigfillset(&all);
	pthread_sigmask(SIG_SETMASK, &all, &before);
	pthread_mutex_lock(&starting);
	ret = pthread_create(thread, NULL, run, argument);
	pthread_mutex_unlock(&starting);
	pthread_sigmask(SIG_SETMASK, &before, NULL);
	return -ret;
}

/* ---- Helper threads -------------------------------------------------------------------------- */

/*
 * Waits without sleeping until a number is zero or not. The caller holds the lock, which is free
 * meanwhile. Returns false if the number has not changed.
 */
static bool spin(struct base_crew *crew, const _Atomic unsigned *number, bool wanted)
{
	const uint64_t until_ns = crew->spin_ns ? base_now_ns() + crew->spin_ns : 0;
	bool changed;

	if (!crew->spin_ns)
		return false;
	pthread_mutex_unlock(&crew->lock);
	do
		changed = !!atomic_load(number) == wanted;
	while (!changed && base_now_ns() < until_ns);
	pthread_mutex_lock(&crew->lock);
	return !!atomic_load(number) == wanted;
}

/* Runs a helper thread: waits for work until the pool is dismissed. */
static void *help(void *argument)
{
	struct base_crew *crew = argument;

	pthread_mutex_lock(&crew->lock);
	for (;;) {
		while (!crew->openings && !crew->dismissed) {
			if (spin(crew, &crew->openings, true) || crew->dismissed)
				continue;
			pthread_cond_wait(&crew->begins, &crew->lock);
		}
		if (crew->dismissed)
			break;
		crew->openings--;
		crew->busy++;
		pthread_mutex_unlock(&crew->lock);
		crew->work(crew->user);
		pthread_mutex_lock(&crew->lock);
		if (!--crew->busy)
			pthread_cond_signal(&crew->ends);
	}
	pthread_mutex_unlock(&crew->lock);
	return NULL;
}

void base_crew_init(struct base_crew *crew, uint64_t spin_ns)
{
	*crew = (struct base_crew){ .owner = getpid(), .spin_ns = spin_ns };
	pthread_mutex_init(&crew->lock, NULL);
	pthread_cond_init(&crew->begins, NULL);
	pthread_cond_init(&crew->ends, NULL);
}

void base_crew_begin(struct base_crew *crew, unsigned wanted, void (*work)(void *user), void *user)
{
	wanted = MIN(wanted, BASE_MOST_HELPERS);
	while (crew->started < wanted &&
	       !base_start_thread(&crew->threads[crew->started], help, crew))
		crew->started++;
	pthread_mutex_lock(&crew->lock);
	crew->work = work;
	crew->user = user;
	crew->openings = MIN(wanted, crew->started);
	if (crew->openings)
		pthread_cond_broadcast(&crew->begins);
	pthread_mutex_unlock(&crew->lock);
}

void base_crew_finish(struct base_crew *crew)
{
	pthread_mutex_lock(&crew->lock);
	crew->openings = 0;
	while (crew->busy)
		if (!spin(crew, &crew->busy, false))
			pthread_cond_wait(&crew->ends, &crew->lock);
	pthread_mutex_unlock(&crew->lock);
}

void base_crew_dismiss(struct base_crew *crew)
{
	if (crew->owner != getpid())
		return;
	pthread_mutex_lock(&crew->lock);
	crew->dismissed = true;
	pthread_cond_broadcast(&crew->begins);
	pthread_mutex_unlock(&crew->lock);
	while (crew->started)
		pthread_join(crew->threads[--crew->started], NULL);
	pthread_cond_destroy(&crew->ends);
	pthread_cond_destroy(&crew->begins);
	pthread_mutex_destroy(&crew->lock);
}

/* ---- Copies by several threads --------------------------------------------------------------- */

#define SLICE_BYTES (256 * KIB)

/* Below this, helper threads are not woken. */
#define PARALLEL_BYTES (1 * MIB)

struct base_copier {
	struct base_crew crew;
	unsigned helpers;
	char *to;
	const char *from;
	size_t bytes;
	_Atomic size_t next; /* first byte that no thread has taken */
};

struct base_copier *base_copier_open(void)
{
	struct base_copier *copier = calloc(1, sizeof(*copier));

	if (!copier)
		return NULL;
	base_crew_init(&copier->crew, 0);
	copier->helpers = base_copy_threads() - 1;
	return copier;
}

static void copy_slices(void *user)
{
	struct base_copier *copier = user;
	size_t at;

	while ((at = atomic_fetch_add(&copier->next, SLICE_BYTES)) < copier->bytes)
		memcpy(copier->to + at, copier->from + at, MIN(copier->bytes - at, SLICE_BYTES));
}

void base_copier_copy(struct base_copier *copier, void *to, const void *from, size_t bytes)
{
	if (!copier) {
		memcpy(to, from, bytes);
		return;
	}
	copier->to = to;
	copier->from = from;
	copier->bytes = bytes;
	atomic_store(&copier->next, 0);
	base_crew_begin(&copier->crew, bytes < PARALLEL_BYTES ? 0 : copier->helpers, copy_slices,
			copier);
	copy_slices(copier);
	base_crew_finish(&copier->crew);
}

void base_copier_free(struct base_copier *copier)
{
	if (!copier)
		return;
	base_crew_dismiss(&copier->crew);
	free(copier);
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

/* ---- Ablation -------------------------------------------------------------------------------- */

#ifdef IOSHAPE_ABLATION
/* Mechanisms that are switched off to measure their worth; only in builds with -Dablation=true. */

bool base_without(const char *mechanism)
{
	const char *left_out = secure_getenv("IOSHAPE_TEST_WITHOUT");

	return left_out && !strcmp(left_out, mechanism);
}
#endif
