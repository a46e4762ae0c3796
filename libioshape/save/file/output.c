/* SPDX-License-Identifier: Apache-2.0 */
/* A file on its way, from the lane to the commit; and handles on such files. */
#include "save/slot/pools.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* ---- One file -------------------------------------------------------------------------------- */

void save_output_find(struct save_output *output)
{
	if (output->in_new_directory)
		fs_find_directory(output->path, &output->found);
	else
		fs_find(output->path, &output->found);
}

int save_output_open(struct save_output *output, const char *path,
		     const struct ring_file_options *options, struct base_error *error)
{
	struct ioshape_context *context = output->context;
	struct ring_file_options file_options = *options;
	const struct fs_layout *layout;
	struct base_budget budget;
	bool asked;
	int ret;

	/* Of the parts of one file none takes the place of another. */
	output->urgent = options->deadline_ns > 0 && !options->part_bytes;
	file_options.unseen = output->in_new_directory;
	ret = save_take_lane(context, &output->lane, error);
	if (ret)
		return ret;
	if (!output->in_new_directory && !options->deadline_ns)
		file_options.tidying = save_begin_tidying(context, output->path, &budget);
	ret = ring_writer_open(&output->file, output->lane, path, &file_options, &output->notes,
			       error);
	save_end_tidying(context, output->path, file_options.tidying);
	if (ret)
		return ret;
	layout = ring_writer_layout(output->file, &asked);
	if (!asked)
		save_slots_note_layout(&context->slots, output->found.mount, layout);
	return 0;
}

/* Says in the log what the report says of everything that was not as preferred. */
static void log_save(const struct ioshape_context *context, const char *path,
		     const struct ioshape_report *report)
{
	/* What is skipped is a line of its own. */
	for (size_t i = 0; !report->skipped && i < MIN(report->fallbacks, IOSHAPE_REPORT_STEPS);
	     i++)
		base_log(&context->log, IOSHAPE_LOG_INFO, "saving %s: %s", path,
			 report->steps[i].sentence);
	base_log(&context->log, IOSHAPE_LOG_DEBUG,
		 "%s: %llu bytes, %s engine%s, write %.3f s, sync %.3f s, commit %.3f s", path,
		 (unsigned long long)report->file_bytes, report->engine,
		 report->direct ? ", direct I/O" : "", report->write_s, report->sync_s,
		 report->commit_s);
}

static int commit_file(struct save_output *output, struct base_error *error)
{
	const int ret = ring_writer_commit(output->file, error);

	if (!ret && output->checksums)
		save_checksums_put_beside(output->checksums, output->file, &output->notes);
	return ret;
}

int save_output_commit(struct save_output *output, struct save_order *order, int ret,
		       struct ioshape_report *report, struct base_error *error)
{
	const struct ring_notes *notes = &output->notes;
	uint64_t begin = base_now_ns();

	if (!ret && order)
		ret = save_order_wait(output->context, order, output->urgent, error);
	report->commit_s += base_seconds(base_now_ns() - begin);
	if (!ret && order && order->overtaken)
		ring_note(&output->notes, IOSHAPE_STEP_OVERTAKEN,
			  "a later save to the same file, with a deadline, is in place");
	else if (!ret)
		ret = commit_file(output, error);
	if (!ret && order)
		save_order_committed(output->context, order);
	snprintf(report->filesystem, sizeof(report->filesystem), "%s", notes->filesystem);
	if (output->file)
		ring_writer_report(output->file, report);
	ring_notes_report(notes, report);
	report->short_results = notes->short_results;
	snprintf(report->mode, sizeof(report->mode), "single");
	log_save(output->context, output->path, report);
	return ret;
}

void save_report_end(struct ioshape_report *report, uint64_t begin_ns, uint64_t deadline_ns,
		     int ret)
{
	const uint64_t now = base_now_ns();

	report->total_s = base_seconds(now - begin_ns);
	report->started_s = base_wall_seconds() - report->total_s;
	if (!deadline_ns)
		return;
	report->deadline = !ret && now <= deadline_ns ? IOSHAPE_DEADLINE_MET :
							IOSHAPE_DEADLINE_MISSED;
	report->deadline_left_s = now <= deadline_ns ? base_seconds(deadline_ns - now) :
						       -base_seconds(now - deadline_ns);
}

void save_output_close(struct save_output *output)
{
	ring_writer_free(output->file);
	output->file = NULL;
	if (output->lane)
		save_return_lane(output->context, output->lane);
	output->lane = NULL;
}

/* ---- Handles --------------------------------------------------------------------------------- */

static int open_in_slot(struct save_handle *handle, const struct ring_file_options *options,
			struct base_error *error)
{
	struct ring_file_options file_options = *options;
	int ret;

	ret = save_shared_slot_take(&handle->slot, handle->output.context, handle->path,
				    &handle->output.found, options, &handle->slot_seen, error);
	if (ret)
		return ret;
	file_options.before_block = save_shared_slot_pass;
	file_options.before_block_user = handle->slot;
	return save_output_open(&handle->output, handle->path, &file_options, error);
}

static void log_skip(const struct ioshape_context *context, int ret, const struct base_error *error)
{
	if (ret == IOSHAPE_E_SKIPPED)
		base_log(&context->log, IOSHAPE_LOG_INFO, "%s", error->text);
}

int save_handle_open(struct save_handle *handle, struct ioshape_context *context, const char *path,
		     const struct ring_file_options *options, struct base_error *error)
{
	struct save_space space = {
		.context = context,
		.found = &handle->output.found,
		.needed_bytes = options->expected_bytes,
	};
	int ret;

	handle->output.context = context;
	handle->begin_ns = base_now_ns();
	handle->deadline_ns = options->deadline_ns;
	/* The commit comes later, when the application may have changed its directory. */
	ret = save_absolute_path(path, &handle->path, error);
	if (ret)
		return ret;
	handle->output.path = space.path = handle->path;
	save_output_find(&handle->output);
	ret = save_space_check(&space, &handle->output.notes, error);
	if (!ret) {
		ret = open_in_slot(handle, options, error);
		ret = save_space_explain(&space, ret, error);
	}
	if (ret == IOSHAPE_E_SKIPPED)
		save_space_note_skip(&handle->output.notes, error);
	log_skip(context, ret, error);
	return ret;
}

int save_handle_enter(struct save_handle *handle)
{
	if (!handle)
		return base_missing("save");
	memset(&handle->error, 0, sizeof(handle->error));
	if (handle->committed)
		return base_refuse(&handle->error, -EINVAL,
				   "%s has been committed" BASE_REMEDY "open a new one",
				   handle->path);
	return save_enter(handle->output.context, &handle->error);
}

int save_handle_enter_with(struct save_handle *handle, const void *data, size_t bytes)
{
	int ret = save_handle_enter(handle);

	if (!ret && bytes && !data)
		ret = base_refuse(&handle->error, -EINVAL, "no data was given for %s",
				  handle->path);
	return ret;
}

int save_handle_leave(struct save_handle *handle, int ret)
{
	struct ioshape_context *context;
	struct fs_space seen;

	if (!handle)
		return ret;
	context = handle->output.context;
	/* Bytes that have gone to a pipe or a device are not skipped. */
	if (ret && !(ret == -ENOSPC && fs_space_of_path(handle->path, &seen) == -EINVAL)) {
		ret = save_space_verdict(context, ret, &handle->error);
		log_skip(context, ret, &handle->error);
	}
	return base_leave(ret, "save", handle->path, &handle->error);
}

int save_handle_begin_commit(struct save_handle *handle, struct save_order *order,
			     struct ioshape_report *report)
{
	struct ioshape_report ignored = IOSHAPE_REPORT_INIT;
	int ret = save_handle_enter(handle);

	/* So that a report that cannot be delivered is not found out after the work. */
	if (!ret && report)
		ret = base_give_struct(report, &ignored, sizeof(ignored), "ioshape_report",
				       &handle->error);
	if (!ret)
		ret = save_order_begin(handle->output.context, order, handle->path, &handle->error);
	return handle ? base_leave(ret, "save", handle->path, &handle->error) : ret;
}

int save_handle_end_commit(struct save_handle *handle, struct save_order *order, int ret,
			   struct save_compare *compare, uint64_t payload_bytes,
			   struct ioshape_report *report)
{
	struct ioshape_report full = IOSHAPE_REPORT_INIT;

	ret = save_handle_leave(handle, ret);
	full.skipped = ret == IOSHAPE_E_SKIPPED;
	if (full.skipped)
		save_space_note_skip(&handle->output.notes, &handle->error);
	if (ret != -EINVAL) {
		save_shared_slot_release(handle->slot, handle->output.context, &handle->slot_seen);
		handle->slot = NULL;
		save_slot_report(&handle->slot_seen, &handle->output.notes, &full);
	}
	ret = save_output_commit(&handle->output, order, ret, &full, &handle->error);
	save_order_end(handle->output.context, order);
	if (compare)
		save_compare_end(compare, !ret && !order->overtaken, &full);
	full.tensor_bytes = payload_bytes;
	save_report_end(&full, handle->begin_ns, handle->deadline_ns, ret);
	if (report)
		base_give_struct(report, &full, sizeof(full), "ioshape_report", NULL);
	return base_leave(ret, "save", handle->path, &handle->error);
}

void save_handle_close(struct save_handle *handle)
{
	save_output_close(&handle->output);
	save_shared_slot_release(handle->slot, handle->output.context, &handle->slot_seen);
	free(handle->path);
}
