/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Runs acts of the library, kills them or makes their system calls fail, and judges the results.
 *
 *   harm list kills|faults|memory   prints the names of all acts
 *   harm kills SEED COUNT ACT       kills an act before its calls, each time before another one
 *   harm faults SEED COUNT ACT      makes its calls fail
 *   harm memory SEED COUNT ACT      makes each allocation fail, alone and with all later ones
 *   harm once SEED COUNT ACT RANK CALL CODE [CALL CODE]    makes exactly these calls fail
 *
 * The seed chooses the calls and what happens to them. The working directory must be empty.
 * $HARM_LUSTRE names a folder that stands for this machine's /sys/fs/lustre. Output, line by line:
 *
 *   harmed N        number of harmed calls
 *   KIND SENTENCE   a finding; KIND is torn, lost, litter or wrong
 */
#define _GNU_SOURCE
#include "harm_run.h"

#include "io/io.h"
#include "support/fail_memory.h"
#include "support/random.h"
#include "support/scratch.h"

#include <errno.h>
#include <glob.h>
#include <limits.h>
#include <sched.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <unistd.h>

/* Seconds after which an act hangs, whatever failed. */
#define PATIENCE_S 60

/* On a busy machine ranks may miss each other, so unharmed runs are repeated up to this number. */
#define BUSY_TRIES 5

/* Leaks are checked if the program is built with the sanitizer. */
extern int __lsan_do_recoverable_leak_check(void) __attribute__((weak));

const struct act *act;
struct harm harm;
struct told *told;
int statuses[HARM_RANKS];
unsigned harmed;

static const struct act *const *const families[] = { &directory_acts, &file_acts,  &group_acts,
						     &look_acts,      &slots_acts, &tier_acts,
						     &tier_group_acts };
static struct told *mine;
static bool unharmed;
static uint64_t random_state;
static char coordinator[512];

/* ---- Functions for acts ---------------------------------------------------------------------- */

int harm_heed(int ret)
{
	const struct ioshape_error *error = ioshape_last_error();

	if (!mine)
		return ret;
	if (!ret) {
		mine->opened = true;
		return 0;
	}
	mine->unnamed = error->code != ret || !*error->operation || !*error->sentence ||
			(!*error->path && act->look && mine->opened && ret != -ENOMEM);
	snprintf(mine->sentence, sizeof(mine->sentence), "%s", error->sentence);
	return ret;
}

int harm_wrong(const char *format, ...)
{
	va_list args;

	va_start(args, format);
	vsnprintf(mine->wrong, sizeof(mine->wrong), format, args);
	va_end(args);
	return -EBADMSG;
}

void harm_must(int ret, const char *what)
{
	if (!ret)
		return;
	fprintf(stderr, "harm: cannot %s (rank %u, call %lu, code %d; call %lu, code %d): %s\n",
		what, harm.rank, harm.nth, harm.code, harm.also, harm.also_code,
		ioshape_last_error()->sentence);
	exit(1);
}

void harm_alone(int (*body)(const struct act *act), const struct act *one, const char *what)
{
	const pid_t child = fork();
	int status;

	if (!child) {
		harm_must(body(one), what);
		_exit(0);
	}
	if (waitpid(child, &status, 0) != child || status)
		exit(1);
}

void harm_deny(const char *name, int code)
{
	calls_deny(name, code);
}

static glob_t find_homeless(const char *folder)
{
	char pattern[PATH_MAX];
	glob_t found = { 0 };

	snprintf(pattern, sizeof(pattern), "%s/.*-" IO_NOWHERE "-*", folder);
	if (glob(pattern, 0, NULL, &found))
		found.gl_pathc = 0;
	return found;
}

unsigned harm_homeless(const char *folder)
{
	glob_t found = find_homeless(folder);
	const unsigned count = (unsigned)found.gl_pathc;

	globfree(&found);
	return count;
}

void harm_forget_homeless(const char *folder)
{
	glob_t found = find_homeless(folder);

	for (size_t i = 0; i < found.gl_pathc; i++)
		if (unlink(found.gl_pathv[i]))
			harm_must(-errno, "remove what nobody tidies");
	globfree(&found);
}

const char *harm_coordinator(void)
{
	return coordinator;
}

/* ---- One run of an act ----------------------------------------------------------------------- */

unsigned harm_ranks(void)
{
	return act->ranks ? act->ranks : 1;
}

static void be(unsigned rank)
{
	const int descriptors = (int)scratch_descriptors();

	prctl(PR_SET_PDEATHSIG, SIGKILL);
	alarm(PATIENCE_S);
	mine = &told[rank];
	if (!unharmed && rank == harm.rank) {
		calls_begin(harm.mode, harm.nth, harm.code);
		calls_also(harm.also, harm.also_code);
	}
	mine->ret = act->run(act, rank);
	calls_end();
	mine->descriptors = (int)scratch_descriptors() - descriptors;
	/* Groups start threads. What only threads of the parent referred to would count as leaked,
	 * so acts of groups are not checked. */
	mine->leaked = !act->ranks && __lsan_do_recoverable_leak_check &&
		       __lsan_do_recoverable_leak_check();
	mine->ended = true;
	_exit(0);
}

static void play(void)
{
	pid_t children[HARM_RANKS];

	memset(told, 0, HARM_RANKS * sizeof(*told));
	fflush(NULL);
	for (unsigned rank = 0; rank < harm_ranks(); rank++) {
		children[rank] = fork();
		if (!children[rank])
			be(rank);
	}
	for (unsigned rank = 0; rank < harm_ranks(); rank++)
		waitpid(children[rank], &statuses[rank], 0);
}

void harm_run(void)
{
	if (act->begin)
		act->begin(act);
	play();
}

/* Returns a rank that failed, or -1. */
static int failed_rank(void)
{
	int rank = (int)harm_ranks() - 1;

	while (rank >= 0 && told[rank].ended && !told[rank].ret)
		rank--;
	return rank;
}

static void complain(int rank)
{
	fprintf(stderr, "harm: %s fails by itself: rank %d: %d %s %s\n", act->name, rank,
		told[rank].ret, told[rank].sentence, told[rank].wrong);
	exit(1);
}

void harm_play(void)
{
	int tries = 0;

	unharmed = true;
	do
		play();
	while (failed_rank() >= 0 && ++tries < BUSY_TRIES);
	unharmed = false;
	if (failed_rank() >= 0)
		complain(failed_rank());
}

uint64_t harm_random(uint64_t below)
{
	return test_random_below(&random_state, below);
}

unsigned long harm_count_calls(unsigned rank)
{
	int tries = 0;

	harm = (struct harm){ .mode = CALLS_COUNT, .rank = rank };
	do
		harm_run();
	while (failed_rank() >= 0 && ++tries < BUSY_TRIES);
	if (failed_rank() >= 0)
		complain(failed_rank());
	return MIN(atomic_load(&calls_record()->count), CALLS_MOST);
}

const char *harm_name_of(unsigned long nth)
{
	const char *name = nth && nth <= CALLS_MOST ? atomic_load(&calls_record()->names[nth - 1]) :
						      NULL;

	return name ? name : "?";
}

void harm_found(const char *kind, const char *what)
{
	printf("%s %s: %s, rank %u, call %lu (%s)", kind, act->name,
	       harm.mode == CALLS_KILL      ? "killed" :
	       harm.mode == CALLS_FAIL_FROM ? "failed from there on" :
					      "failed",
	       harm.rank, harm.nth, harm_name_of(harm.nth));
	if (harm.mode != CALLS_KILL)
		printf(" with %d", harm.code);
	if (harm.also)
		printf(" and call %lu (%s) with %d", harm.also, harm_name_of(harm.also),
		       harm.also_code);
	printf(": %s\n", what);
}

/* Tries for a second, because the kernel frees rings some time after their process has ended. */
void harm_check_litter(const char *kind)
{
	unsigned left = act->again ? act->again(act) : 0;

	for (int tries = 0; left && tries < 100; tries++) {
		usleep(10000);
		left = act->again(act);
	}
	if (left)
		harm_found(kind, "the next one leaves something behind");
}

/* ---- Program --------------------------------------------------------------------------------- */

/* Returns the act of this name, or NULL. */
static const struct act *act_of(const char *name)
{
	for (size_t i = 0; i < ARRAY_LENGTH(families); i++)
		for (const struct act *one = *families[i]; one->name; one++)
			if (!strcmp(one->name, name))
				return one;
	return NULL;
}

static bool can_mount(void)
{
	const pid_t child = fork();
	int status;

	if (!child)
		_exit(unshare(CLONE_NEWNS) || mount("none", "/", NULL, MS_REC | MS_PRIVATE, NULL));
	return waitpid(child, &status, 0) == child && !status;
}

/* Returns whether the act is tried in this mode. */
static bool is_for(const struct act *one, const char *mode)
{
	if (!strcmp(mode, "kills"))
		return true;
	/* Acts that wait for a deadline would take minutes to fail each allocation. */
	return !one->no_faults && (strcmp(mode, "memory") || (one->ranks <= 1 && !one->slow));
}

static void list_acts(const char *mode)
{
	const bool mounts = can_mount();

	for (size_t i = 0; i < ARRAY_LENGTH(families); i++)
		for (const struct act *one = *families[i]; one->name; one++)
			if (is_for(one, mode) && (!one->mounts || mounts))
				puts(one->name);
}

/* Makes this process see a Lustre. Does nothing where mounts are forbidden. */
static void show_lustre(const char *shown)
{
	if (!shown || !can_mount())
		return;
	if (unshare(CLONE_NEWNS) || mount("none", "/", NULL, MS_REC | MS_PRIVATE, NULL) ||
	    mount("none", "/sys/fs", "tmpfs", 0, NULL) || symlink(shown, "/sys/fs/lustre")) {
		perror("harm: cannot show a Lustre");
		exit(1);
	}
}

static void set_up(void)
{
	char *here = getcwd(NULL, 0);

	told = mmap(NULL, HARM_RANKS * sizeof(*told), PROT_READ | PROT_WRITE,
		    MAP_SHARED | MAP_ANONYMOUS, -1, 0);
	calls_record();
	show_lustre(getenv("HARM_LUSTRE"));
	fail_memory_by(calls_fail);
	snprintf(coordinator, sizeof(coordinator), "local:%s/pools", here);
	free(here);
	if (told == MAP_FAILED || mkdir("pools", 0700) || mkdir("work", 0700) || chdir("work")) {
		perror("harm");
		exit(1);
	}
}

int main(int argc, char **argv)
{
	const bool kills = argc > 1 && !strcmp(argv[1], "kills");
	unsigned count;

	if (argc == 3 && !strcmp(argv[1], "list")) {
		list_acts(argv[2]);
		return 0;
	}
	if (argc < 5)
		return 2;
	random_state = strtoull(argv[2], NULL, 10);
	act = act_of(argv[4]);
	if (!act)
		return 2;
	set_up();
	if (act->open)
		act->open(act);
	count = (unsigned)strtoul(argv[3], NULL, 10);
	if (act->ranks > 1 || act->slow)
		count = kills ? (count + 7) / 8 :
				(count +
				 2) / 3; /* survivors of a failed rank wait until their deadline */
	if (kills)
		harm_kills(count);
	else if (!strcmp(argv[1], "memory"))
		harm_memory();
	else if (!strcmp(argv[1], "once") && argc > 7)
		harm_once(argv + 5, argc - 5);
	else
		harm_faults(strtoull(argv[2], NULL, 10), count);
	printf("harmed %u\n", harmed);
	if (act->close)
		act->close(act);
	return 0;
}
