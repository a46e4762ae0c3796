/* SPDX-License-Identifier: Apache-2.0 */
/* Judges what an act did after a failure. */
#define _GNU_SOURCE
#include "harm_run.h"

#include "support/scratch.h"

#include <errno.h>

/* Returns whether the code is a passing condition. Callers retry these, so they must not fail
 * forever. */
bool harm_passes(int code)
{
	return code == EINTR || code == EAGAIN || code == EBUSY || code == CALLS_SHORT;
}

/* Returns the index of the last successful call with one of these names before `before`, or -1. */
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
static const char *const closing[] = { "close temporary" };
static const char *const writing[] = { "pwrite64 temporary", "io_uring_submit",
				       "io_uring_submit_and_wait" };
static long placed_at(void)
{
	return last_of(placing, ARRAY_LENGTH(placing), CALLS_MOST);
}

/* Returns whether the file was synced, then renamed, then the directory synced, and not written
 * after the sync. */
static bool is_durable(void)
{
	const long placed = placed_at();
	const long synced = last_of(syncing, 1, placed);

	return placed > synced && synced >= 0 && last_of(syncing_folder, 1, CALLS_MOST) > placed &&
	       last_of(writing, ARRAY_LENGTH(writing), placed) < synced;
}

/*
 * Returns whether the failure can lose bytes, so that the save must fail. After a failed fsync the
 * kernel may mark the lost pages clean, so a second fsync may succeed (Rebello et al., USENIX ATC
 * 2020).
 */
static bool was_grave(unsigned long nth, int code)
{
	const char *name = nth ? harm_name_of(nth) : "";

	if (!nth || harm_passes(code))
		return false;
	/* A directory sync after the new state was durable concerns the old state. */
	if (!strcmp(name, "fsync directory"))
		return last_of(syncing_folder, 1, (long)nth - 1) <= placed_at();
	/* The file must not have been given up before, and its first close reports all errors. */
	if (!strcmp(name, "close temporary"))
		return (long)nth > last_of(syncing, 1, CALLS_MOST) + 1 &&
		       last_of(closing, 1, (long)nth - 1) < last_of(syncing, 1, CALLS_MOST);
	return !strcmp(name, "pwrite64 temporary") || !strcmp(name, "fsync");
}

static void judge_durability(void)
{
	if (atomic_load(&calls_record()->count) > CALLS_MOST)
		return; /* the record is full, so the calls are unknown */
	if (!is_durable())
		harm_found("wrong", "success, but it is not durable");
	else if (was_grave(harm.nth, harm.code) || was_grave(harm.also, harm.also_code))
		harm_found("wrong", "success, although bytes may be lost");
}

static void judge_rank(unsigned rank)
{
	const struct told *one = &told[rank];

	if (WIFSIGNALED(statuses[rank]))
		harm_found("wrong",
			   WTERMSIG(statuses[rank]) == SIGALRM ? "it hangs" : "it crashed");
	else if (!one->ended)
		harm_found("wrong", "it ended by itself");
	if (!one->ended)
		return;
	if (*one->wrong)
		harm_found("wrong", one->wrong);
	if (one->descriptors > 0)
		harm_found("wrong", "descriptors are left open");
	if (one->ret && act->apart && rank != harm.rank)
		harm_found("wrong", one->sentence);
	if (one->leaked)
		harm_found("wrong", "memory was leaked");
	if (one->unnamed)
		harm_found("wrong", *one->sentence ? one->sentence : "an error without a sentence");
}

/* Returns whether memory or descriptors were lacking. The act has then looked at nothing. */
static bool is_shortage(unsigned long nth, int code)
{
	return calls_is_memory(harm_name_of(nth)) || code == EMFILE || code == ENFILE;
}

/* Returns whether an act may succeed without an effect: it ignores unreadable files. A shortage is
 * no such reason. */
static bool is_tolerated(void)
{
	return act->passes_over && (!is_shortage(harm.nth, harm.code) ||
				    (harm.also && !is_shortage(harm.also, harm.also_code)));
}

/* Returns whether a temporary file is left, although no removal failed. */
static bool left_temporary(void)
{
	const unsigned long count = MIN(atomic_load(&calls_record()->count), CALLS_MOST);

	for (unsigned long i = 0; i < count; i++)
		if (calls_record()->codes[i] && !strcmp(harm_name_of(i + 1), "unlinkat"))
			return false;
	return scratch_temporaries(".") > 0;
}

static void judge_state(void)
{
	const struct told *one = &told[harm.rank];
	const enum state state = act->look(act);

	if (state == STATE_GONE || state == STATE_TORN)
		harm_found("wrong", "it is neither the old one nor the new one");
	else if (!one->ret && state != STATE_NEW && !is_tolerated())
		harm_found("wrong", "success, but it is not there");
	else if (one->ret && state == STATE_NEW && placed_at() < 0)
		harm_found("wrong", "a failure, but it is there");
	if (!act->leaves && left_temporary())
		harm_found("wrong", "a temporary file is left");
	if (!one->ret && act->durable)
		judge_durability();
}

void harm_judge(void)
{
	for (unsigned rank = 0; rank < harm_ranks(); rank++)
		judge_rank(rank);
	if (act->look && told[harm.rank].ended)
		judge_state();
	harm_check_litter("wrong");
}
