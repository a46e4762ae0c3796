/* SPDX-License-Identifier: Apache-2.0 */
/* A file on its way, from the lane to the commit; and handles on such files. */
#include "ckpt/slot.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* ---- One file -------------------------------------------------------------------------------- */

int ckpt_output_open(struct ckpt_output *output, const char *path, const char *absolute,
		     const struct ring_file_options *options, struct base_error *error)
{
	struct ioshape_context *context = output->context;
	struct ring_file_options file_options = *options;
	const struct fs_layout *layout;
	bool asked;
	int ret;

	file_options.remove_stale = !output->in_new_directory &&
				    ckpt_should_tidy(context, absolute);
	ret = ckpt_take_lane(context, &output->lane, error);
	if (ret)
		return ret;
	ret = ring_writer_open(&output->file, output->lane, path, &file_options, &output->notes,
			       error);
	if (ret)
		return ret;
	layout = ring_writer_layout(output->file, &asked);
	if (!asked)
		ckpt_slots_learn(&context->slots, absolute, layout);
	return 0;
}

/* Says in the log what the report says of everything that was not as preferred. */
static void log_save(const struct ioshape_context *context, const char *path,
		     const struct ioshape_report *report)
{
	/* What is skipped is a line of its own. */
	if (report->fallbacks && !report->skipped)
		base_log(&context->log, IOSHAPE_LOG_INFO, "saving %s: %s", path,
			 report->fallback_text);
	base_log(&context->log, IOSHAPE_LOG_DEBUG,
		 "%s: %llu bytes, %s engine%s, write %.3f s, sync %.3f s, commit %.3f s", path,
		 (unsigned long long)report->file_bytes, report->engine,
		 report->direct ? ", direct I/O" : "", report->write_s, report->sync_s,
		 report->commit_s);
}

int ckpt_output_commit(struct ckpt_output *output, struct ckpt_turn *turn, int ret,
		       struct ioshape_report *report, struct base_error *error)
{
	const struct ring_notes *notes = &output->notes;
	uint64_t begin = base_now_ns();

	if (!ret)
		ret = ckpt_turn_wait(output->context, turn, error);
	report->commit_s += base_seconds(base_now_ns() - begin);
	if (!ret)
		ret = ring_writer_commit(output->file, error);
	snprintf(report->filesystem, sizeof(report->filesystem), "%s", notes->filesystem);
	if (output->file)
		ring_writer_report(output->file, report);
	report->fallbacks = notes->count;
	report->short_results = notes->short_results;
	snprintf(report->layout, sizeof(report->layout), "single");
	snprintf(report->fallback_text, sizeof(report->fallback_text), "%s", notes->text);
	log_save(output->context, turn->path, report);
	return ret;
}

void ckpt_output_close(struct ckpt_output *output, struct zip_writer *zip)
{
	if (zip)
		zip_writer_free(zip);
	else
		ring_writer_free(output->file);
	output->file = NULL;
	if (output->lane)
		ckpt_return_lane(output->context, output->lane);
	output->lane = NULL;
}

/* ---- Handles --------------------------------------------------------------------------------- */

static int open_in_slot(struct ckpt_handle *handle, const struct ring_file_options *options,
			struct base_error *error)
{
	struct ring_file_options file_options = *options;
	int ret;

	ret = ckpt_shared_slot_take(&handle->slot, handle->output.context, handle->path, options,
				    &handle->slot_seen, error);
	if (ret)
		return ret;
	file_options.before_block = ckpt_shared_slot_pass;
	file_options.before_block_user = handle->slot;
	return ckpt_output_open(&handle->output, handle->path, handle->path, &file_options, error);
}

static void log_skip(const struct ioshape_context *context, int ret, const struct base_error *error)
{
	if (ret == IOSHAPE_E_SKIPPED)
		base_log(&context->log, IOSHAPE_LOG_WARNING, "%s", error->text);
}

int ckpt_handle_open(struct ckpt_handle *handle, struct ioshape_context *context, const char *path,
		     const struct ring_file_options *options, struct base_error *error)
{
	struct ckpt_room room = {
		.context = context,
		.needed_bytes = options->expected_bytes,
		.options = options,
	};
	int ret;

	handle->output.context = context;
	handle->begin_ns = base_now_ns();
	/* Its turn comes at the commit, wherever the application has changed its directory to. */
	ret = ckpt_absolute_path(path, &handle->path, error);
	if (ret)
		return ret;
	room.path = handle->path;
	for (;;) {
		ret = ckpt_room_await(&room, error);
		if (!ret)
			ret = open_in_slot(handle, options, error);
		if (!ckpt_room_again(&room, &ret, true, error))
			break;
		ckpt_output_close(&handle->output, NULL);
		ckpt_shared_slot_release(handle->slot, context, &handle->slot_seen);
		handle->slot = NULL;
	}
	ckpt_room_note(&room, ret, &handle->output.notes, error);
	log_skip(context, ret, error);
	return ret;
}

int ckpt_handle_enter(struct ckpt_handle *handle)
{
	memset(&handle->error, 0, sizeof(handle->error));
	if (handle->committed)
		return base_fail(&handle->error, -EINVAL, "%s has been committed; open a new one",
				 handle->path);
	return ckpt_enter(handle->output.context, &handle->error);
}

int ckpt_handle_leave(struct ckpt_handle *handle, int ret)
{
	struct ioshape_context *context = handle->output.context;
	struct fs_room seen;

	/* Bytes that have gone to a pipe or a device are not skipped. */
	if (!ret || (ret == -ENOSPC && fs_room_of_path(handle->path, &seen) == -EINVAL))
		return ret;
	ret = ckpt_room_verdict(context, ret, &handle->error);
	log_skip(context, ret, &handle->error);
	return ret;
}

int ckpt_handle_begin_commit(struct ckpt_handle *handle, struct ckpt_turn *turn,
			     struct ioshape_report *report)
{
	struct ioshape_report ignored = IOSHAPE_REPORT_INIT;
	int ret = ckpt_handle_enter(handle);

	/* So that a report that cannot be delivered is not found out after the work. */
	if (!ret && report)
		ret = base_give_struct(report, &ignored, sizeof(ignored), "ioshape_report",
				       &handle->error);
	return ret ? ret :
		     ckpt_turn_begin(handle->output.context, turn, handle->path, &handle->error);
}

int ckpt_handle_end_commit(struct ckpt_handle *handle, struct ckpt_turn *turn, int ret,
			   uint64_t payload_bytes, struct ioshape_report *report)
{
	struct ioshape_report full = IOSHAPE_REPORT_INIT;

	ret = ckpt_handle_leave(handle, ret);
	full.skipped = ret == IOSHAPE_E_SKIPPED;
	if (full.skipped)
		ckpt_room_note_skip(&handle->output.notes, &handle->error);
	if (ret != -EINVAL) {
		ckpt_shared_slot_release(handle->slot, handle->output.context, &handle->slot_seen);
		handle->slot = NULL;
		ckpt_slot_report(&handle->slot_seen, &handle->output.notes, &full);
	}
	ret = ckpt_output_commit(&handle->output, turn, ret, &full, &handle->error);
	ckpt_turn_end(handle->output.context, turn);
	full.tensor_bytes = payload_bytes;
	full.total_s = base_seconds(base_now_ns() - handle->begin_ns);
	full.started_s = base_wall_seconds() - full.total_s;
	if (report)
		base_give_struct(report, &full, sizeof(full), "ioshape_report", NULL);
	return ret;
}

void ckpt_handle_close(struct ckpt_handle *handle, struct zip_writer *zip)
{
	ckpt_output_close(&handle->output, zip);
	ckpt_shared_slot_release(handle->slot, handle->output.context, &handle->slot_seen);
	free(handle->path);
}
