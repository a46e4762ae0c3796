/* SPDX-License-Identifier: Apache-2.0 */
#define _GNU_SOURCE
#include "bench.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

/* Makes the tensors. Keys: kind=mixed bytes=N, or kind=equal count=N each=N. */
static void run_tensors(struct bench *bench, const struct command *command)
{
	const char *kind = command_need(command, "kind");

	workload_free(&bench->workload);
	if (!strcmp(kind, "mixed"))
		workload_make_mixed(&bench->workload, command_number(command, "bytes", 0));
	else if (!strcmp(kind, "equal"))
		workload_make_equal(&bench->workload, command_number(command, "count", 1),
				    command_number(command, "each", 0));
	else
		fail("there is no kind of tensors called %s", kind);
	answer_number("tensors", (double)bench->workload.count);
	answer_number("bytes", (double)bench->workload.bytes);
}

static const struct verb {
	const char *name;
	void (*run)(struct bench *bench, const struct command *command);
} verbs[] = {
	{ "tensors", run_tensors },     { "context", run_context },
	{ "save", run_save },           { "async", run_async },
	{ "wait", run_wait },           { "load", run_load },
	{ "memcpy", run_memcpy },       { "write", run_write },
	{ "dance", run_dance },         { "read", run_read },
	{ "cached", run_cached },       { "acquire", run_acquire },
	{ "release", run_release },     { "turns", run_turns },
	{ "pings", run_pings },         { "flocks", run_flocks },
	{ "contend", run_contend },     { "stream", run_stream },
	{ "handovers", run_handovers }, { "group", run_group },
	{ "copied", run_copied },       { "group_save", run_group_save },
	{ "group_end", run_group_end }, { "group_async", run_group_async },
};

/* Waits until at=NANOSECONDS of CLOCK_MONOTONIC, so that several processes begin at the same
 * moment. */
static void await_moment(const struct command *command)
{
	uint64_t at_ns = command_number(command, "at", 0);
	struct timespec at = { (time_t)(at_ns / 1000000000), (long)(at_ns % 1000000000) };

	while (at_ns && clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &at, NULL) == EINTR)
		;
}

static void obey(struct bench *bench, const struct command *command)
{
	for (size_t i = 0; i < sizeof(verbs) / sizeof(*verbs); i++) {
		if (!strcmp(verbs[i].name, command->verb)) {
			await_moment(command);
			verbs[i].run(bench, command);
			return;
		}
	}
	fail("there is no command called %s", command->verb);
}

int main(void)
{
	struct bench bench = { 0 };
	struct command command;
	char *line = NULL;
	size_t room = 0;

	while (getline(&line, &room, stdin) > 0) {
		parse_command(&command, line);
		obey(&bench, &command);
		answer_send();
	}
	end_ours(&bench);
	workload_free(&bench.workload);
	free(line);
	return 0;
}
