/* SPDX-License-Identifier: Apache-2.0 */
/* Commands for a group of ranks. Each rank is a process like this one. */
#define _GNU_SOURCE
#include "bench.h"

#include <ioshape/group.h>

#include <string.h>

static enum ioshape_mode mode_of(const char *name)
{
	if (!strcmp(name, "each"))
		return IOSHAPE_MODE_EACH;
	if (!strcmp(name, "node"))
		return IOSHAPE_MODE_NODE;
	if (!strcmp(name, "rank0"))
		return IOSHAPE_MODE_RANK0;
	fail("there is no mode called %s", name);
}

static enum ioshape_store store_of(const char *name)
{
	if (!strcmp(name, "redis"))
		return IOSHAPE_STORE_REDIS;
	if (!strcmp(name, "host"))
		return IOSHAPE_STORE_HOST;
	fail("there is no store called %s", name);
}

/* Opens a group. Keys: path=DIRECTORY rank=K ranks=N mode=MODE store=STORE token=TEXT; optional:
 * node=NAME comm=FD:FD (see comm.c). */
void run_group(struct bench *bench, const struct command *command)
{
	struct ioshape_group_options options = IOSHAPE_GROUP_OPTIONS_INIT;

	if (!bench->context)
		fail("open a context first");
	end_group(bench);
	options.rank = (uint32_t)command_number(command, "rank", 0);
	options.ranks = (uint32_t)command_number(command, "ranks", 1);
	options.mode = mode_of(command_need(command, "mode"));
	options.store = store_of(command_need(command, "store"));
	options.token = command_need(command, "token");
	options.node = command_text(command, "node");
	options.comm = comm_of(command_text(command, "comm"), options.rank);
	if (ioshape_group_open(bench->context, command_need(command, "path"), &options,
			       &bench->group))
		fail("no group: %s", ioshape_last_error()->sentence);
}

static struct ioshape_group *need_group(struct bench *bench)
{
	if (!bench->group)
		fail("open a group first");
	return bench->group;
}

/* Saves a checkpoint and waits for it. Key: step=N. */
void run_group_save(struct bench *bench, const struct command *command)
{
	struct ioshape_report report = IOSHAPE_REPORT_INIT;
	struct ioshape_save_options options = IOSHAPE_SAVE_OPTIONS_INIT;
	uint64_t memory_before;
	struct cost cost;

	need_group(bench);
	options.report = &report;
	memory_before = memory_reset_peak();
	cost_begin(&cost);
	if (ioshape_group_save_tensors(bench->group, command_number(command, "step", 0),
				       bench->workload.tensors, bench->workload.count, &options,
				       NULL))
		fail("cannot save: %s", ioshape_last_error()->sentence);
	cost_end(&cost);
	memory_answer(memory_before);
	answer_report(bench, &report);
}

/* Begins a background save; key: step=N. Ends when the tensors may change. The command `wait` ends
 * when the checkpoint is complete. */
void run_group_async(struct bench *bench, const struct command *command)
{
	struct cost cost;

	need_group(bench);
	if (bench->save)
		fail("a save is in the background already");
	cost_begin(&cost);
	bench->save_began_ns = cost.began_ns;
	if (ioshape_group_save_tensors(bench->group, command_number(command, "step", 0),
				       bench->workload.tensors, bench->workload.count, NULL,
				       &bench->save))
		fail("cannot save: %s", ioshape_last_error()->sentence);
	cost_end(&cost);
}

void run_group_end(struct bench *bench, const struct command *command)
{
	(void)command;
	end_group(bench);
}

void end_group(struct bench *bench)
{
	ioshape_group_free(bench->group);
	bench->group = NULL;
}
