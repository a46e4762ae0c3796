/* SPDX-License-Identifier: Apache-2.0 */
/* Kills ranks before one of their calls. */
#define _GNU_SOURCE
#include "harm_run.h"

static void judge_kill(void)
{
	for (unsigned rank = 0; rank < harm_ranks(); rank++)
		if (WIFSIGNALED(statuses[rank]) && rank != harm.rank)
			harm_found("torn", WTERMSIG(statuses[rank]) == SIGALRM ?
						   "a survivor hangs" :
						   "a survivor crashed");
	if (act->look) {
		const enum state state = act->look(act);

		if (state == STATE_GONE)
			harm_found("lost", "what was there is gone");
		else if (state == STATE_TORN)
			harm_found("torn", "it is neither the old one nor the new one");
		else
			for (unsigned rank = 0; rank < harm_ranks(); rank++)
				if (told[rank].ended && !told[rank].ret && state != STATE_NEW)
					harm_found("lost", "a rank was told that it is there");
	}
	harm_check_litter("litter");
}

static void kill_at(unsigned long nth, unsigned rank)
{
	harm = (struct harm){ .mode = CALLS_KILL, .rank = rank, .nth = nth };
	harm_run();
	/* The rank may have made fewer calls this time. */
	harmed += WIFSIGNALED(statuses[rank]);
	judge_kill();
}

void harm_kills(unsigned count)
{
	const unsigned rank = (unsigned)harm_random(harm_ranks());
	const unsigned long calls = harm_count_calls(rank);
	/* The kills are spread evenly over all calls. */
	const double step = calls > count ? (double)calls / count : 1;
	double at = 1 + (double)harm_random(1000) / 1000 * (step - 1);

	for (; at < (double)calls + 1; at += step)
		kill_at((unsigned long)at, rank);
}
