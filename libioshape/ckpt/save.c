/* SPDX-License-Identifier: Apache-2.0 */
/* One save on one thread: from a plan and a source of bytes to a committed file and a report. */
#include "ckpt/ckpt.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* Tensors that do not lie as they are saved are packed in pieces of this size. */
#define PACK_BYTES (256 * KIB)

/* torch's version of the container, and the byte order of the tensors. */
#define VERSION_TEXT "3\n"
#define BYTE_ORDER_TEXT (__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__ ? "little" : "big")

/* data.pkl, byteorder, version: tensor i is record i + 3. */
#define RECORDS_BEFORE_TENSORS 3u

/* ---- The file -------------------------------------------------------------------------------- */

static int write_record(struct zip_writer *zip, const char *name, const void *data, size_t bytes,
			struct base_error *error)
{
	int ret;

	ret = zip_writer_begin(zip, name, bytes, 0, error);
	if (!ret)
		ret = zip_writer_put(zip, data, bytes, error);
	if (!ret)
		ret = zip_writer_end(zip, error);
	return ret;
}

static int write_tensor(struct zip_writer *zip, const struct ckpt_plan *plan, size_t tensor,
			const struct ckpt_source *source, struct base_error *error)
{
	uint64_t bytes = plan->layouts[tensor].bytes, done = 0;
	const void *data;
	char name[32];
	size_t run;
	int ret;

	snprintf(name, sizeof(name), "data/%zu", tensor);
	ret = zip_writer_begin(zip, name, bytes, 0, error);
	for (; !ret && done < bytes; done += run) {
		run = bytes - done;
		ret = source->next(source->user, tensor, done, &data, &run, error);
		if (!ret)
			ret = zip_writer_put(zip, data, run, error);
	}
	if (!ret)
		ret = zip_writer_end(zip, error);
	return ret;
}

static int write_file(struct zip_writer *zip, const struct ckpt_plan *plan,
		      const struct ckpt_source *source, struct base_error *error)
{
	const struct zip_index index = {
		.has_table = true,
		.tensor_count = plan->count,
		.tensors = plan->rows,
		.metadata = plan->metadata,
	};
	int ret;

	ret = write_record(zip, "data.pkl", plan->pickle.data, plan->pickle.bytes, error);
	if (!ret)
		ret = write_record(zip, "byteorder", BYTE_ORDER_TEXT, strlen(BYTE_ORDER_TEXT),
				   error);
	if (!ret)
		ret = write_record(zip, "version", VERSION_TEXT, strlen(VERSION_TEXT), error);
	for (size_t i = 0; !ret && i < plan->count; i++) {
		plan->rows[i].record = RECORDS_BEFORE_TENSORS + i;
		ret = write_tensor(zip, plan, i, source, error);
	}
	if (!ret)
		ret = zip_writer_finish(zip, &index, error);
	return ret;
}

/* Says in the log what the report says of everything that was not as preferred. */
static void log_save(const struct ioshape_context *context, const char *path,
		     const struct ioshape_report *report)
{
	if (report->fallbacks)
		base_log(&context->log, IOSHAPE_LOG_INFO, "saving %s: %s", path,
			 report->fallback_text);
	base_log(&context->log, IOSHAPE_LOG_DEBUG,
		 "%s: %llu bytes, %s engine%s, write %.3f s, sync %.3f s, commit %.3f s", path,
		 (unsigned long long)report->file_bytes, report->engine,
		 report->direct ? ", direct I/O" : "", report->write_s, report->sync_s,
		 report->commit_s);
}

int ckpt_commit(struct ioshape_context *context, struct ckpt_turn *turn, struct ring_writer *file,
		const struct ring_notes *notes, int ret, struct ioshape_report *report,
		struct base_error *error)
{
	uint64_t begin = base_now_ns();

	if (!ret)
		ret = ckpt_turn_wait(context, turn, error);
	report->commit_s += base_seconds(base_now_ns() - begin);
	if (!ret)
		ret = ring_writer_commit(file, error);
	snprintf(report->filesystem, sizeof(report->filesystem), "%s", notes->filesystem);
	if (file)
		ring_writer_report(file, report);
	report->fallbacks = notes->count;
	report->short_results = notes->short_results;
	snprintf(report->layout, sizeof(report->layout), "single");
	snprintf(report->fallback_text, sizeof(report->fallback_text), "%s", notes->text);
	log_save(context, turn->path, report);
	return ret;
}

int ckpt_save(struct ioshape_context *context, const char *path, const struct ckpt_plan *plan,
	      const struct ckpt_source *source, const struct ckpt_file_options *options,
	      const atomic_bool *abort, struct ckpt_turn *turn, struct ioshape_report *report,
	      struct base_error *error)
{
	const struct ring_file_options file_options = {
		.expected_bytes = plan->expected_bytes,
		.no_replace = options->no_replace,
		.no_sync = options->no_sync,
		.remove_stale = ckpt_should_tidy(context, turn->path),
		.progress = options->progress,
		.progress_user = options->progress_user,
		.progress_total = plan->expected_bytes,
		.abort = abort,
	};
	struct ring_notes notes = { 0 };
	struct ring_writer *file = NULL;
	struct zip_writer *zip = NULL;
	struct ring_lane *lane = NULL;
	int ret;

	ret = ckpt_take_lane(context, &lane, error);
	if (!ret)
		ret = ring_writer_open(&file, lane, path, &file_options, &notes, error);
	if (!ret)
		ret = zip_writer_new(&zip, file, path, error);
	if (!ret)
		ret = write_file(zip, plan, source, error);
	ret = ckpt_commit(context, turn, file, &notes, ret, report, error);
	report->tensor_bytes = plan->tensor_bytes;
	/* The zip writer owns the file as soon as it exists. */
	if (zip)
		zip_writer_free(zip);
	else
		ring_writer_free(file);
	ckpt_return_lane(context, lane);
	return ret;
}

/* ---- Blocking saves -------------------------------------------------------------------------- */

/* Reads the caller's own memory. */
struct direct_source {
	const struct ckpt_plan *plan;
	uint8_t *scratch; /* for tensors that must be packed; made at need */
};

static int next_direct(void *user, size_t tensor, uint64_t offset, const void **data, size_t *bytes,
		       struct base_error *error)
{
	struct direct_source *source = user;

	if (source->plan->layouts[tensor].as_it_lies) {
		*data = (const char *)source->plan->tensors[tensor].data + offset;
		return 0;
	}
	if (!source->scratch) {
		source->scratch = malloc(PACK_BYTES);
		if (!source->scratch)
			return base_no_memory(error, "packing a tensor", PACK_BYTES);
	}
	*bytes = MIN(*bytes, PACK_BYTES);
	ckpt_plan_copy(source->plan, tensor, offset, source->scratch, *bytes);
	*data = source->scratch;
	return 0;
}

static int save_blocking(struct ioshape_context *context, const char *path,
			 const struct ioshape_tensor *tensors, size_t count,
			 const struct ioshape_save_options *options, struct ioshape_report *report,
			 struct base_error *error)
{
	const struct ckpt_file_options file_options = {
		.progress = options->progress,
		.progress_user = options->progress_user,
		.no_replace = options->no_replace,
		.no_sync = options->no_sync,
	};
	struct direct_source direct = { 0 };
	const struct ckpt_source source = { next_direct, &direct };
	uint64_t begin = base_now_ns();
	struct ckpt_turn turn;
	struct ckpt_plan plan;
	int ret;

	ret = ckpt_plan_make(&plan, tensors, count, options->metadata, error);
	if (ret)
		return ret;
	report->plan_s = base_seconds(base_now_ns() - begin);
	direct.plan = &plan;
	ret = ckpt_turn_begin(context, &turn, path, error);
	if (!ret) {
		ret = ckpt_save(context, path, &plan, &source, &file_options, NULL, &turn, report,
				error);
		ckpt_turn_end(context, &turn);
	}
	free(direct.scratch);
	ckpt_plan_free(&plan);
	report->total_s = base_seconds(base_now_ns() - begin);
	return ret;
}

IOSHAPE_EXPORT int ioshape_save_tensors(struct ioshape_context *context, const char *path,
					const struct ioshape_tensor *tensors, size_t count,
					const struct ioshape_save_options *given)
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
		ret = save_blocking(context, path, tensors, count, &options, &report, &error);
	if (options.report)
		base_give_struct(options.report, &report, sizeof(report), "ioshape_report", &error);
	return ckpt_leave(context, ret, &error);
}
