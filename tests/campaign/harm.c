/* SPDX-License-Identifier: Apache-2.0 */
/*
 *   harm list kills|faults          the names of all acts
 *   harm kills SEED COUNT ACT       kills an act at its calls, before one after the other
 *   harm faults SEED COUNT ACT      makes its calls fail
 *   harm once SEED COUNT ACT RANK CALL CODE [CALL CODE]    makes just these calls of it fail
 *
 * The seed chooses the calls and what becomes of them. Works in the working directory,
 * which is empty. What it says, line by line:
 *
 *   harmed N        so often
 *   site ADDRESS    a call that goes on there, in this program, was made to fail
 *   KIND SENTENCE   KIND is torn, lost, litter or wrong: what was found
 */
#define _GNU_SOURCE
#include "harm.h"

#include "base/base.h"
#include "support/calls.h"
#include "support/fail_memory.h"
#include "support/random.h"
#include "support/scratch.h"

#include <errno.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

/* No act takes that long, whatever fails. */
#define PATIENCE_S 60

/* Ranks may miss each other where the machine is busy. */
#define BUSY_TRIES 5

/* Leaks are looked for where the sanitizer is there to do it. */
extern int __lsan_do_recoverable_leak_check(void) __attribute__((weak));

/* What a child has to tell, in memory that it shares with its parent. */
struct told {
	bool ended;
	int ret;
	int descriptors; /* too many */
	bool leaked;
	bool opened;  /* a context: errors of that are about no path */
	bool unnamed; /* an error without operation, path or sentence, or with another code */
	char sentence[1024];
	char wrong[256];
};

/* What becomes of one of its calls, or of two. */
struct harm {
	enum calls_mode mode;
	unsigned rank;
	unsigned long nth;
	int code;
	unsigned long also; /* 0: none */
	int also_code;
};

static const struct act *act;
static const struct act *const *const families[] = { &file_acts, &group_acts, &look_acts };
static struct told *told; /* by rank */
static struct told *mine;
static struct harm harm;
static int statuses[HARM_RANKS];
static bool unharmed;
static uint64_t random_state;
static unsigned harmed;
static char coordinator[512];

/* ---- For acts ---------------------------------------------------------------------------------
 */

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
	fprintf(stderr, "harm: cannot %s: %s\n", what, ioshape_last_error()->sentence);
	exit(1);
}

void harm_deny(const char *name, int code)
{
	calls_deny(name, code);
}

const char *harm_coordinator(void)
{
	return coordinator;
}

/* ---- One run ----------------------------------------------------------------------------------
 */

static int ranks_of(void)
{
	return act->ranks ? (int)act->ranks : 1;
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
	/* What only threads of the parent knew of would be called a leak: groups start some. */
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
	for (int rank = 0; rank < ranks_of(); rank++) {
		children[rank] = fork();
		if (!children[rank])
			be((unsigned)rank);
	}
	for (int rank = 0; rank < ranks_of(); rank++)
		waitpid(children[rank], &statuses[rank], 0);
}

static void run(void)
{
	if (act->begin)
		act->begin(act);
	play();
}

/* -1, or a rank that failed. */
static int failed_rank(void)
{
	int rank = ranks_of() - 1;

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

static unsigned some_rank(void)
{
	return (unsigned)test_random_below(&random_state, (uint64_t)ranks_of());
}

static unsigned long count_calls(unsigned rank)
{
	int tries = 0;

	harm = (struct harm){ .mode = CALLS_COUNT, .rank = rank };
	do
		run();
	while (failed_rank() >= 0 && ++tries < BUSY_TRIES);
	if (failed_rank() >= 0)
		complain(failed_rank());
	return MIN(atomic_load(&calls_record()->count), CALLS_MOST);
}

static const char *name_of(unsigned long nth)
{
	const char *name = nth && nth <= CALLS_MOST ? atomic_load(&calls_record()->names[nth - 1]) :
						      NULL;

	return name ? name : "?";
}

static void found(const char *kind, const char *what)
{
	printf("%s %s: %s, rank %u, call %lu (%s)", kind, act->name,
	       harm.mode == CALLS_KILL      ? "killed" :
	       harm.mode == CALLS_FAIL_FROM ? "failed from there on" :
					      "failed",
	       harm.rank, harm.nth, name_of(harm.nth));
	if (harm.mode != CALLS_KILL)
		printf(" with %d", harm.code);
	if (harm.also)
		printf(" and call %lu (%s) with %d", harm.also, name_of(harm.also), harm.also_code);
	printf(": %s\n", what);
}

/* The next one tidies; of rings the kernel lets go some time after their process is gone. */
static void check_litter(const char *kind)
{
	unsigned left = act->again ? act->again(act) : 0;

	for (int tries = 0; left && tries < 100; tries++) {
		usleep(10000);
		left = act->again(act);
	}
	if (left)
		found(kind, "the next one leaves something behind");
}

/* ---- Kills ------------------------------------------------------------------------------------
 */

static void judge_kill(void)
{
	for (int rank = 0; rank < ranks_of(); rank++)
		if (WIFSIGNALED(statuses[rank]) && (unsigned)rank != harm.rank)
			found("torn", WTERMSIG(statuses[rank]) == SIGALRM ? "a survivor hangs" :
									    "a survivor crashed");
	if (act->look) {
		const enum state state = act->look(act);

		if (state == STATE_GONE)
			found("lost", "what was there is gone");
		else if (state == STATE_TORN)
			found("torn", "it is neither the old one nor the new one");
		else
			for (int rank = 0; rank < ranks_of(); rank++)
				if (told[rank].ended && !told[rank].ret && state != STATE_NEW)
					found("lost", "a rank was told that it is there");
	}
	check_litter("litter");
}

static void kill_at(unsigned long nth, unsigned rank)
{
	harm = (struct harm){ .mode = CALLS_KILL, .rank = rank, .nth = nth };
	run();
	/* It may have had fewer calls this time. */
	harmed += WIFSIGNALED(statuses[rank]);
	judge_kill();
}

static void kills(unsigned count)
{
	const unsigned rank = some_rank();
	const unsigned long calls = count_calls(rank);
	/* Each stretch of calls has one. */
	const double step = calls > count ? (double)calls / count : 1;
	double at = 1 + (double)test_random_below(&random_state, 1000) / 1000 * (step - 1);

	for (; at < (double)calls + 1; at += step)
		kill_at((unsigned long)at, rank);
}

/* ---- Faults -----------------------------------------------------------------------------------
 */

/* Of what calls can fail; the first class that has the name. */
static const struct {
	const char *names; /* NULL: all others */
	int codes[10];
} classes[] = {
	{ " fsync fsync-directory close-temporary renameat renameat2 linkat fallocate64 ftruncate64"
	  " mkdir mkdirat link ",
	  { EIO, ENOSPC, EDQUOT, ESTALE, ETIMEDOUT, EINTR } },
	{ " pwrite64 pwrite64-temporary pread64 read write __io_uring_get_cqe ",
	  { EIO, ENOSPC, EDQUOT, ESTALE, ETIMEDOUT, EINTR, EAGAIN, CALLS_SHORT } },
	{ " open64 openat64 opendir fopen64 dup dup3 ",
	  { EMFILE, ENFILE, EIO, EACCES, ESTALE, ETIMEDOUT, ENOMEM, ENOENT, EINTR } },
	{ " socket eventfd memfd_create accept4 ", { EMFILE, ENFILE, ENOMEM, EPERM } },
	{ " recvmsg send sendmsg sendto connect bind listen ",
	  { ECONNRESET, ETIMEDOUT, ENOBUFS, EINTR, EACCES } },
	{ " poll ", { EINTR, ENOMEM } },
	{ " io_uring_submit io_uring_submit_and_wait ", { EAGAIN, EBUSY, EINTR, ENOMEM, EPERM } },
	{ " getaddrinfo ", { EAGAIN } },
	{ NULL, { EIO, ESTALE, EPERM, ENOMEM, EINTR } },
};

static int choose_code(const char *name)
{
	char word[64];
	unsigned most = 0;
	size_t i = 0;

	if (calls_is_memory(name))
		return ENOMEM;
	snprintf(word, sizeof(word), " %s ", name);
	for (char *c = word + 1; c[1]; c++)
		*c = *c == ' ' ? '-' : *c;
	while (classes[i].names && !strstr(classes[i].names, word))
		i++;
	while (most < ARRAY_LENGTH(classes[i].codes) && classes[i].codes[most])
		most++;
	return classes[i].codes[test_random_below(&random_state, most)];
}

/* Nobody waits for what passes if it never does. */
static bool passes(int code)
{
	return code == EINTR || code == EAGAIN || code == EBUSY || code == CALLS_SHORT;
}

/* Calls seen so far, and those that were made to fail: by where they go on. */
#define MOST_SITES (1u << 24)
static uint8_t seen[MOST_SITES / 8], reached[MOST_SITES / 8];

/* Returns whether it was there. */
static bool mark(uint8_t *sites, uint32_t site)
{
	const uint8_t bit = (uint8_t)(1 << site % 8);
	const bool there = sites[site % MOST_SITES / 8] & bit;

	sites[site % MOST_SITES / 8] |= bit;
	return there;
}

/* What is to be tried first: calls that nobody has seen before, the latest found first. */
static struct harm waiting[CALLS_MOST];
static unsigned waiting_count;

static void wait_for(struct harm one)
{
	if (waiting_count < ARRAY_LENGTH(waiting))
		waiting[waiting_count++] = one;
}

/* The calls that came only because another one had failed. */
static void discover(void)
{
	const struct calls_record *record = calls_record();
	const unsigned long count = MIN(atomic_load(&record->count), CALLS_MOST);
	struct harm next = harm;

	for (unsigned long i = 0; i < count; i++) {
		const char *name = atomic_load(&record->names[i]);

		if (!name)
			continue;
		if (record->codes[i])
			mark(reached, record->sites[i]);
		if (mark(seen, record->sites[i]) || harm.also || harm.mode == CALLS_COUNT)
			continue;
		next.also = i + 1;
		next.also_code = choose_code(name);
		wait_for(next);
	}
}

/* The calls by which the new state came, as in the record; -1 if it has not come. */
static long last_of(const char *const names[], unsigned count, long before)
{
	const struct calls_record *record = calls_record();
	const long calls = (long)MIN(atomic_load(&record->count), CALLS_MOST);

	for (long i = MIN(calls, before) - 1; i >= 0; i--) {
		const char *name = atomic_load(&record->names[i]);

		for (unsigned k = 0; name && k < count; k++)
			if (!record->codes[i] && !strcmp(name, names[k]))
				return i;
	}
	return -1;
}

static const char *const placing[] = { "renameat", "renameat2", "linkat" };
static const char *const syncing[] = { "fsync" };
static const char *const syncing_folder[] = { "fsync directory" };
static const char *const writing[] = { "pwrite64 temporary", "io_uring_submit",
				       "io_uring_submit_and_wait" };
/* What nobody gets over: bytes are lost. */
static const char *const grave[] = { "pwrite64 temporary", "fsync", "fsync directory" };

static long placed_at(void)
{
	return last_of(placing, ARRAY_LENGTH(placing), CALLS_MOST);
}

/* Synced, then in place, then the directory synced; and nothing written in between. */
static bool is_durable(void)
{
	const long placed = placed_at();
	const long synced = last_of(syncing, 1, placed);

	return placed > synced && synced >= 0 && last_of(syncing_folder, 1, CALLS_MOST) > placed &&
	       last_of(writing, ARRAY_LENGTH(writing), placed) < synced;
}

static bool was_grave(unsigned long nth, int code)
{
	if (!nth || passes(code))
		return false;
	for (size_t i = 0; i < ARRAY_LENGTH(grave); i++)
		if (!strcmp(name_of(nth), grave[i]))
			return true;
	/* Or that of a file which was given up before. */
	return !strcmp(name_of(nth), "close temporary") &&
	       (long)nth > last_of(syncing, 1, CALLS_MOST) + 1;
}

static void judge_durability(void)
{
	if (atomic_load(&calls_record()->count) > CALLS_MOST)
		return; /* it is not known what they were */
	if (!is_durable())
		found("wrong", "success, but it is not durable");
	else if (was_grave(harm.nth, harm.code) || was_grave(harm.also, harm.also_code))
		found("wrong", "success, although bytes may be lost");
}

static void judge_rank(unsigned rank)
{
	const struct told *one = &told[rank];

	if (WIFSIGNALED(statuses[rank]))
		found("wrong", WTERMSIG(statuses[rank]) == SIGALRM ? "it hangs" : "it crashed");
	else if (!one->ended)
		found("wrong", "it ended by itself");
	if (!one->ended)
		return;
	if (*one->wrong)
		found("wrong", one->wrong);
	if (one->descriptors > 0)
		found("wrong", "descriptors are left open");
	if (one->leaked)
		found("wrong", "memory was leaked");
	if (one->unnamed)
		found("wrong", *one->sentence ? one->sentence : "an error without a sentence");
}

/* Of memory or descriptors: then nothing has been looked at. */
static bool is_shortage(void)
{
	return calls_is_memory(name_of(harm.nth)) || harm.code == EMFILE || harm.code == ENFILE;
}

/* Who may not remove a file leaves it to the next one. */
static bool left_temporary(void)
{
	const unsigned long count = MIN(atomic_load(&calls_record()->count), CALLS_MOST);

	for (unsigned long i = 0; i < count; i++)
		if (calls_record()->codes[i] && !strcmp(name_of(i + 1), "unlinkat"))
			return false;
	return scratch_temporaries(".") > 0;
}

static void judge_state(void)
{
	const struct told *one = &told[harm.rank];
	const enum state state = act->look(act);
	const bool tolerated = act->passes_over && !is_shortage();

	if (state == STATE_GONE || state == STATE_TORN)
		found("wrong", "it is neither the old one nor the new one");
	else if (!one->ret && state != STATE_NEW && !tolerated)
		found("wrong", "success, but it is not there");
	else if (one->ret && state == STATE_NEW && placed_at() < 0)
		found("wrong", "a failure, but it is there");
	if (left_temporary())
		found("wrong", "a temporary file is left");
	if (!one->ret && act->durable)
		judge_durability();
}

static void fail(struct harm one)
{
	harm = one;
	run();
	harmed++;
	for (int rank = 0; rank < ranks_of(); rank++)
		judge_rank((unsigned)rank);
	if (act->look && told[harm.rank].ended)
		judge_state();
	check_litter("wrong");
	discover();
}

static struct harm harm_to(unsigned rank, unsigned long nth, const char *name)
{
	struct harm one = { .rank = rank, .nth = nth, .code = choose_code(name) };
	const bool stays = !passes(one.code) && test_random_below(&random_state, 3) == 0;

	one.mode = stays ? CALLS_FAIL_FROM : CALLS_FAIL;
	return one;
}

/* For whoever looks at a finding. */
static void once(char **numbers, int count)
{
	struct harm one = { .mode = CALLS_FAIL };

	one.rank = (unsigned)atoi(numbers[0]);
	one.nth = (unsigned long)atol(numbers[1]);
	one.code = atoi(numbers[2]);
	if (count > 4) {
		one.also = (unsigned long)atol(numbers[3]);
		one.also_code = atoi(numbers[4]);
	}
	fail(one);
}

static void shuffle(struct harm *all, unsigned count)
{
	for (unsigned i = 0; i + 1 < count; i++) {
		const unsigned other = i + (unsigned)test_random_below(&random_state, count - i);
		const struct harm kept = all[i];

		all[i] = all[other];
		all[other] = kept;
	}
}

static void faults(unsigned count)
{
	const unsigned rank = some_rank();
	const unsigned long calls = count_calls(rank);
	static const char *names[CALLS_MOST];

	for (unsigned long i = 0; i < calls; i++) {
		names[i] = name_of(i + 1);
		if (!mark(seen, calls_record()->sites[i]))
			wait_for(harm_to(rank, i + 1, names[i]));
	}
	shuffle(waiting, waiting_count);
	while (harmed < count) {
		unsigned long nth = 1 + test_random_below(&random_state, calls);

		fail(waiting_count ? waiting[--waiting_count] : harm_to(rank, nth, names[nth - 1]));
	}
	for (uint32_t site = 0; site < MOST_SITES; site++)
		if (reached[site / 8] & 1 << site % 8)
			printf("site %x\n", site);
}

/* ---- All --------------------------------------------------------------------------------------
 */

/* NULL if there is none of this name. */
static const struct act *act_of(const char *name)
{
	for (size_t i = 0; i < ARRAY_LENGTH(families); i++)
		for (const struct act *one = *families[i]; one->name; one++)
			if (!strcmp(one->name, name))
				return one;
	return NULL;
}

static void list_acts(bool faults)
{
	for (size_t i = 0; i < ARRAY_LENGTH(families); i++)
		for (const struct act *one = *families[i]; one->name; one++)
			if (!faults || !one->no_faults)
				puts(one->name);
}

static void set_up(void)
{
	char *here = getcwd(NULL, 0);

	told = mmap(NULL, HARM_RANKS * sizeof(*told), PROT_READ | PROT_WRITE,
		    MAP_SHARED | MAP_ANONYMOUS, -1, 0);
	calls_record();
	fail_memory_by(calls_fail);
	snprintf(coordinator, sizeof(coordinator), "local:%s/pools", here);
	setenv("XDG_CACHE_HOME", here, 1);
	free(here);
	if (told == MAP_FAILED || mkdir("pools", 0700) || mkdir("work", 0700) || chdir("work")) {
		perror("harm");
		exit(1);
	}
}

int main(int argc, char **argv)
{
	unsigned count;

	if (argc == 3 && !strcmp(argv[1], "list")) {
		list_acts(!strcmp(argv[2], "faults"));
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
	if (act->ranks > 1)
		count = (count + 7) / 8; /* survivors wait for who was killed */
	if (!strcmp(argv[1], "kills"))
		kills(count);
	else if (!strcmp(argv[1], "once") && argc > 7)
		once(argv + 5, argc - 5);
	else
		faults(count);
	printf("harmed %u\n", harmed);
	if (act->close)
		act->close(act);
	return 0;
}
