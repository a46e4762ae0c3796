/* SPDX-License-Identifier: Apache-2.0 */
/* Commands that run the library. */
#define _GNU_SOURCE
#include "bench.h"

#include "support/open_context.h"

#include <ioshape/slots.h>

#include <stdlib.h>
#include <string.h>

#define SETTING_PREFIX "IOSHAPE_"

/* Opens a context. Keys that begin with IOSHAPE_ are settings of the library; "staging" is in
 * bytes. */
struct ioshape_context *open_context(const struct command *command)
{
	struct ioshape_context_options options = IOSHAPE_CONTEXT_OPTIONS_INIT;
	struct ioshape_context *context;

	options.staging_bytes = command_number(command, "staging", 0);
	for (size_t i = 0; i < command->count; i++) {
		if (!strncmp(command->keys[i], SETTING_PREFIX, strlen(SETTING_PREFIX)))
			setenv(command->keys[i], command->values[i], 1);
	}
	if (open_context_with(&context, &options,
			      (struct test_rules){ .lease_ms = (uint32_t)command_number(
							   command, "lease_ms", 0) }))
		fail("no context: %s", ioshape_last_error()->sentence);
	/* The next context must not inherit the variables. */
	for (size_t i = 0; i < command->count; i++) {
		if (!strncmp(command->keys[i], SETTING_PREFIX, strlen(SETTING_PREFIX)))
			unsetenv(command->keys[i]);
	}
	return context;
}

void run_context(struct bench *bench, const struct command *command)
{
	end_ours(bench);
	bench->context = open_context(command);
}

static struct ioshape_context *need_context(struct bench *bench)
{
	if (!bench->context)
		fail("open a context first");
	return bench->context;
}

void answer_report(const struct bench *bench, const struct ioshape_report *report)
{
	answer_number("file_bytes", (double)report->file_bytes);
	answer_number("tensor_bytes", (double)bench->workload.bytes);
	answer_number("stage_s", report->stage_s);
	answer_number("plan_s", report->plan_s);
	answer_number("write_s", report->write_s);
	answer_number("sync_s", report->sync_s);
	answer_number("commit_s", report->commit_s);
	answer_number("total_s", report->total_s);
	answer_text("engine", report->engine);
	answer_number("direct", report->direct);
	answer_text("filesystem", report->filesystem);
	answer_number("downgrades", report->downgrade_count);
	answer_text("steps[0].sentence", report->downgrades[0].sentence);
	answer_number("slot_s", report->slot_s);
	answer_number("group_s", report->group_s);
	answer_number("checkpoint_bytes", (double)report->checkpoint_bytes);
	answer_text("layout", report->mode);
	answer_text("why", report->why);
}

void run_save(struct bench *bench, const struct command *command)
{
	struct ioshape_report report = IOSHAPE_REPORT_INIT;
	struct ioshape_save_options options = IOSHAPE_SAVE_OPTIONS_INIT;
	const char *path = command_need(command, "path");
	uint64_t memory_before;
	struct cost cost;
	int ret;

	need_context(bench);
	options.report = &report;
	memory_before = memory_reset_peak();
	cost_begin(&cost);
	ret = ioshape_save_tensors(bench->context, path, bench->workload.tensors,
				   bench->workload.count, &options, NULL);
	if (ret)
		fail("cannot save: %s", ioshape_last_error()->sentence);
	cost_end(&cost);
	memory_answer(memory_before);
	answer_report(bench, &report);
}

/* Begins a background save; key: path=FILE. Ends when the tensors may change. The command `wait`
 * ends when the file is durable. */
void run_async(struct bench *bench, const struct command *command)
{
	const char *path = command_need(command, "path");
	struct cost cost;
	int ret;

	need_context(bench);
	if (bench->save)
		fail("a save is in the background already");
	cost_begin(&cost);
	bench->save_began_ns = cost.began_ns;
	ret = ioshape_save_tensors(bench->context, path, bench->workload.tensors,
				   bench->workload.count, NULL, &bench->save);
	if (ret)
		fail("cannot save: %s", ioshape_last_error()->sentence);
	cost_end(&cost);
}

void run_wait(struct bench *bench, const struct command *command)
{
	struct ioshape_report report = IOSHAPE_REPORT_INIT;

	(void)command;
	if (!bench->save)
		fail("nothing is in the background");
	if (ioshape_save_wait(bench->save, -1))
		fail("the save in the background failed: %s", ioshape_last_error()->sentence);
	answer_number("seconds", seconds_since(bench->save_began_ns));
	answer_number("ended_s", (double)now_ns() / 1e9);
	ioshape_save_get_report(bench->save, &report);
	answer_report(bench, &report);
	ioshape_save_free(bench->save);
	bench->save = NULL;
}

static struct ioshape_load_request *make_requests(struct bench *bench,
						  struct ioshape_reader *reader)
{
	struct ioshape_load_request *requests;
	struct ioshape_tensor *tensor;

	requests = calloc(bench->workload.count, sizeof(*requests));
	if (!requests)
		fail("no memory for requests");
	for (size_t i = 0; i < bench->workload.count; i++) {
		tensor = &bench->workload.tensors[i];
		if (ioshape_reader_find_tensor(reader, tensor->name, &requests[i].tensor))
			fail("tensor %s is not in the file", tensor->name);
		requests[i].bytes = tensor_bytes(tensor);
		requests[i].into = (void *)(uintptr_t)tensor->data;
	}
	return requests;
}

/* Loads all tensors and measures everything: opening the file, finding each tensor by name, reading
 * and verifying. */
static void load(struct bench *bench, const char *path)
{
	struct ioshape_load_request *requests;
	struct ioshape_reader *reader;
	struct cost cost;

	cost_begin(&cost);
	if (ioshape_reader_open(bench->context, path, NULL, &reader))
		fail("cannot open for loading: %s", ioshape_last_error()->sentence);
	requests = make_requests(bench, reader);
	if (ioshape_reader_load(reader, requests, bench->workload.count))
		fail("cannot load: %s", ioshape_last_error()->sentence);
	free(requests);
	ioshape_reader_free(reader);
	cost_end(&cost);
}

/* Loads a file; keys: path=FILE check=0|1. With check=1 the tensors are overwritten before the
 * load, and compared by digest after it. */
void run_load(struct bench *bench, const struct command *command)
{
	const char *path = command_need(command, "path");
	bool check = command_number(command, "check", 0);
	uint64_t digest = 0;

	need_context(bench);
	if (check) {
		digest = workload_digest(&bench->workload);
		workload_spoil(&bench->workload);
	}
	load(bench, path);
	if (check && workload_digest(&bench->workload) != digest)
		fail("what was loaded from %s is not what was saved", path);
}

void end_ours(struct bench *bench)
{
	ioshape_save_free(bench->save);
	bench->save = NULL;
	ioshape_slot_free(bench->slot);
	bench->slot = NULL;
	end_group(bench);
	ioshape_context_free(bench->context);
	bench->context = NULL;
}
