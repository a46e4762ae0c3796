/* SPDX-License-Identifier: Apache-2.0 */
/* One save on one thread: from a plan and a source of bytes to a committed file and a report. */
#include "ckpt/ckpt.h"

#include <errno.h>
#include <stdlib.h>

/* Tensors that do not lie as they are saved are packed in pieces of this size. */
#define PACK_BYTES (256 * KIB)

/* The caller's function is asked for so much at a time: each call to a device costs its latency. */
#define FETCH_BYTES (4 * MIB)

/* ---- The file -------------------------------------------------------------------------------- */

static int write_record(struct zip_writer *zip, const struct ckpt_plan *plan, size_t i,
			const struct ckpt_source *source, struct base_error *error)
{
	const struct ckpt_record *record = &plan->records[i];
	const void *data = record->data;
	size_t run;
	uint64_t done;
	int ret;

	ret = zip_writer_begin(zip, record->name, record->bytes, record->alignment, error);
	for (done = 0; !ret && done < record->bytes; done += run) {
		run = record->bytes - done;
		if (i >= plan->own)
			ret = source->next(source->user, i, done, &data, &run, error);
		if (!ret)
			ret = zip_writer_put(zip, data, run, error);
	}
	return ret ? ret : zip_writer_end(zip, error);
}

int ckpt_write_records(struct zip_writer *zip, const struct ckpt_plan *plan,
		       const struct ckpt_source *source, struct base_error *error)
{
	int ret = 0;

	for (size_t i = 0; !ret && i < plan->count; i++)
		ret = write_record(zip, plan, i, source, error);
	return ret ? ret : zip_writer_finish(zip, &plan->index, error);
}

/* What one save is made of, from the slot to the report. */
struct saving {
	const char *path;
	const struct ckpt_plan *plan;
	const struct ckpt_source *source;
	struct ring_file_options options;
	const struct ckpt_watch *watch;
	struct ckpt_turn *turn;
	struct ioshape_report *report;
	struct ckpt_output output;
	struct zip_writer *zip;
};

/* With the slot: from the first byte to stable storage. */
static int write_in_slot(struct saving *saving, struct base_error *error)
{
	struct ckpt_output *output = &saving->output;
	int ret;

	ret = ckpt_output_open(output, saving->path, saving->turn->path, &saving->options, error);
	if (ret)
		return ret;
	/* Small ones are in nobody's way. */
	if (saving->plan->expected_bytes > RING_SMALL_FILE_BYTES)
		ckpt_turn_note_room(output->context, saving->turn, CKPT_ROOM_TAKEN);
	ret = zip_writer_new(&saving->zip, zip_sink_of_file(output->file), saving->path, error);
	return ret ? ret : ckpt_write_records(saving->zip, saving->plan, saving->source, error);
}

/* *wrote: it had its slot, and what failed is the file. */
static int save_once(struct saving *saving, bool *wrote, struct base_error *error)
{
	struct ckpt_slot slot;
	int ret;

	saving->options.before_block = ckpt_slot_pass;
	saving->options.before_block_user = &slot;
	saving->options.nearly_written = ckpt_slot_hand_over;
	saving->options.nearly_written_user = &slot;
	ret = ckpt_slot_take(&slot, saving->output.context, saving->turn->path, &saving->options,
			     saving->watch, error);
	*wrote = !ret;
	if (!ret)
		ret = write_in_slot(saving, error);
	/*
	 * The bytes are on stable storage (or it was handed over before). What is left may have to
	 * wait for earlier saves to the same path, which wait for slots.
	 */
	ckpt_slot_release(&slot);
	ckpt_slot_report(&slot, &saving->output.notes, saving->report);
	return ret;
}

/* It has met the end of the disk: what is written of it goes, and its time is added up. */
static void abandon(struct saving *saving)
{
	if (saving->output.file)
		ring_writer_report(saving->output.file, saving->report);
	ckpt_output_close(&saving->output, saving->zip);
	saving->zip = NULL;
	ckpt_turn_note_room(saving->output.context, saving->turn, CKPT_ROOM_UNKNOWN);
}

static int save_when_there_is_room(struct saving *saving, struct base_error *error)
{
	const struct ckpt_source *source = saving->source;
	struct ckpt_room room = {
		.context = saving->output.context,
		.path = saving->turn->path,
		.needed_bytes = saving->plan->expected_bytes,
		.options = &saving->options,
		.turn = saving->turn,
	};
	bool wrote;
	int ret;

	do {
		wrote = false;
		ret = ckpt_room_await(&room, error);
		if (!ret)
			ret = save_once(saving, &wrote, error);
		if (!wrote || !ckpt_room_again(&room, &ret, source->restart(source->user), error))
			break;
		abandon(saving);
	} while (true);
	ckpt_room_note(&room, ret, &saving->output.notes, error);
	saving->report->skipped = ret == IOSHAPE_E_SKIPPED;
	return ret;
}

int ckpt_save(struct ioshape_context *context, const char *path, const struct ckpt_plan *plan,
	      const struct ckpt_source *source, const struct ring_file_options *options,
	      const struct ckpt_watch *watch, struct ckpt_turn *turn, struct ioshape_report *report,
	      struct base_error *error)
{
	struct saving saving = {
		.path = path,
		.plan = plan,
		.source = source,
		.options = *options,
		.watch = watch,
		.turn = turn,
		.report = report,
		.output = { .context = context },
	};
	int ret;

	saving.options.expected_bytes = plan->expected_bytes;
	saving.options.progress_total = plan->expected_bytes;
	ret = save_when_there_is_room(&saving, error);
	ret = ckpt_output_commit(&saving.output, turn, ret, report, error);
	report->tensor_bytes = plan->payload_bytes;
	ckpt_output_close(&saving.output, saving.zip);
	return ret;
}

/* ---- The caller's own memory ----------------------------------------------------------------- */

int ckpt_direct_next(void *user, size_t i, uint64_t offset, const void **data, size_t *bytes,
		     struct base_error *error)
{
	struct ckpt_direct *direct = user;
	const struct ckpt_record *record = &direct->plan->records[i];

	if (!record->packed && !record->fetch) {
		*data = (const char *)record->data + offset;
		return 0;
	}
	if (!direct->scratch) {
		direct->scratch = malloc(MAX(PACK_BYTES, FETCH_BYTES));
		if (!direct->scratch)
			return base_no_memory(error, "bytes on their way to a file",
					      MAX(PACK_BYTES, FETCH_BYTES));
	}
	*bytes = MIN(*bytes, record->fetch ? FETCH_BYTES : PACK_BYTES);
	direct->fetched |= record->fetch != NULL;
	*data = direct->scratch;
	return ckpt_plan_copy(direct->plan, i, offset, direct->scratch, *bytes, error);
}

bool ckpt_direct_restart(void *user)
{
	const struct ckpt_direct *direct = user;

	return !direct->fetched;
}

/* ---- Blocking saves -------------------------------------------------------------------------- */

struct ring_file_options ckpt_file_options(const struct ioshape_save_options *options)
{
	return (struct ring_file_options){
		.progress = options->progress,
		.progress_user = options->progress_user,
		.no_replace = options->no_replace,
		.no_sync = options->no_sync,
	};
}

static int save_blocking(struct ioshape_context *context, const char *path,
			 const struct ckpt_payload *payload,
			 const struct ioshape_save_options *options, struct ioshape_report *report,
			 struct base_error *error)
{
	const struct ring_file_options file_options = ckpt_file_options(options);
	struct ckpt_direct direct = { 0 };
	const struct ckpt_source source = { ckpt_direct_next, ckpt_direct_restart, &direct };
	const pthread_t self = pthread_self();
	const struct ckpt_watch watch = { options->queue, options->queue_user, &self };
	uint64_t begin = base_now_ns();
	struct ckpt_turn turn;
	struct ckpt_plan plan;
	int ret;

	ret = ckpt_plan_make(&plan, path, payload, options->metadata, error);
	if (ret)
		return ret;
	report->plan_s = base_seconds(base_now_ns() - begin);
	direct.plan = &plan;
	ret = ckpt_turn_begin(context, &turn, path, error);
	if (!ret) {
		ret = ckpt_save(context, path, &plan, &source, &file_options, &watch, &turn, report,
				error);
		ckpt_turn_end(context, &turn);
	}
	free(direct.scratch);
	ckpt_plan_free(&plan);
	report->total_s = base_seconds(base_now_ns() - begin);
	report->started_s = base_wall_seconds() - report->total_s;
	return ret;
}

static int save(struct ioshape_context *context, const char *path,
		const struct ckpt_payload *payload, const struct ioshape_save_options *given)
{
	struct ioshape_report report = IOSHAPE_REPORT_INIT, ignored = IOSHAPE_REPORT_INIT;
	struct ioshape_save_options options = { 0 };
	struct base_error error = { 0 };
	int ret;

	ret = ckpt_enter(context, &error);
	if (ret)
		return ckpt_leave(context, ret, &error);
	ret = base_take_options(&options, sizeof(options), given, "ioshape_save_options", &error);
	if (!ret && !path)
		ret = base_fail(&error, -EINVAL, "no path to save to was given");
	/* So that a report that cannot be delivered is not found out after the work. */
	if (!ret && options.report)
		ret = base_give_struct(options.report, &ignored, sizeof(ignored), "ioshape_report",
				       &error);
	if (!ret)
		ret = save_blocking(context, path, payload, &options, &report, &error);
	if (ret == IOSHAPE_E_SKIPPED)
		base_log(&context->log, IOSHAPE_LOG_WARNING, "%s", error.text);
	if (options.report)
		base_give_struct(options.report, &report, sizeof(report), "ioshape_report", &error);
	return ckpt_leave(context, ret, &error);
}

IOSHAPE_EXPORT int ioshape_save_tensors(struct ioshape_context *context, const char *path,
					const struct ioshape_tensor *tensors, size_t count,
					const struct ioshape_save_options *options)
{
	const struct ckpt_payload payload = { .tensors = tensors, .count = count };

	return save(context, path, &payload, options);
}

IOSHAPE_EXPORT int ioshape_save_records(struct ioshape_context *context, const char *path,
					const struct ioshape_record *records, size_t count,
					const struct ioshape_save_options *options)
{
	const struct ckpt_payload payload = { .raw = true, .records = records, .count = count };

	return save(context, path, &payload, options);
}
