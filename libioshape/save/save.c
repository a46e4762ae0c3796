/* SPDX-License-Identifier: Apache-2.0 */
/* The public calls that save, and saves that block. */
#include "save/background/background.h"
#include "save/file/file.h"

#include <errno.h>
#include <stdlib.h>

/* ---- Blocking saves -------------------------------------------------------------------------- */

static int save_blocking(struct ioshape_context *context, const char *path,
			 const struct save_payload *payload,
			 const struct ioshape_save_options *options, struct ioshape_report *report,
			 struct base_error *error)
{
	const struct ring_file_options file_options = SAVE_FILE_OPTIONS(options);
	struct save_direct direct = { 0 };
	const struct save_source source = { save_direct_next, save_direct_to_file, &direct };
	const pthread_t self = pthread_self();
	const struct save_watch watch = { .queue = options->queue,
					  .queue_user = options->queue_user,
					  .blocked = &self };
	uint64_t begin = base_now_ns();
	struct save_order order;
	struct save_plan plan;
	int ret;

	ret = save_plan_make(&plan, path, payload, options->metadata, error);
	if (ret)
		return ret;
	report->plan_s = base_seconds(base_now_ns() - begin);
	direct.plan = &plan;
	ret = save_order_begin(context, &order, path, error);
	if (!ret) {
		ret = save_write(context, path, &plan, &source, &file_options, &watch, &order,
				 report, error);
		save_order_end(context, &order);
	}
	free(direct.scratch);
	save_plan_free(&plan);
	save_report_end(report, begin, file_options.deadline_ns, ret);
	return ret;
}

static int save_here(struct ioshape_context *context, const char *path,
		     const struct save_payload *payload, const struct ioshape_save_options *options,
		     struct base_error *error)
{
	struct ioshape_report report = IOSHAPE_REPORT_INIT, ignored = IOSHAPE_REPORT_INIT;
	int ret = 0;

	/* So that a report that cannot be delivered is not found out after the work. */
	if (options->report)
		ret = base_give_struct(options->report, &ignored, sizeof(ignored), "ioshape_report",
				       error);
	if (!ret)
		ret = save_blocking(context, path, payload, options, &report, error);
	if (ret == IOSHAPE_E_SKIPPED)
		base_log(&context->log, IOSHAPE_LOG_INFO, "%s", error->text);
	if (options->report)
		base_give_struct(options->report, &report, sizeof(report), "ioshape_report", error);
	return ret;
}

/* ---- The public calls ------------------------------------------------------------------------ */

int save_take_options(struct ioshape_save_options *options,
		      const struct ioshape_save_options *given, bool formats, bool background,
		      struct base_error *error)
{
	int ret =
		base_take_options(options, sizeof(*options), given, "ioshape_save_options", error);

	if (!ret && background && options->report)
		ret = base_refuse(error, -EINVAL,
				  "a background save cannot fill options.report" BASE_REMEDY
				  "ask ioshape_save_get_report() when it has ended");
	if (!ret && ((unsigned)options->format > IOSHAPE_FORMAT_SAFETENSORS ||
		     (options->format && !formats)))
		ret = base_refuse(error, -EINVAL,
				  "options.format is %u" BASE_REMEDY
				  "set one of enum ioshape_format, for ioshape_save_tensors() only",
				  (unsigned)options->format);
	if (!ret && options->checksums &&
	    (options->checksums != IOSHAPE_CHECKSUMS_BESIDE ||
	     options->format != IOSHAPE_FORMAT_SAFETENSORS))
		ret = base_refuse(error, -EINVAL,
				  "options.checksums is %u" BASE_REMEDY
				  "set it for safetensors files only, to IOSHAPE_CHECKSUMS_BESIDE",
				  (unsigned)options->checksums);
	return ret;
}

/* In the background if `out` is given. */
static int save(struct ioshape_context *context, const char *path, struct save_payload *payload,
		const struct ioshape_save_options *given, struct ioshape_save **out)
{
	struct ioshape_save_options options;
	struct base_error error = { 0 };
	int ret;

	if (out)
		*out = NULL;
	ret = save_enter(context, &error);
	if (!ret)
		ret = save_take_options(&options, given, payload->kind == SAVE_TENSORS, out != NULL,
					&error);
	if (!ret && options.format == IOSHAPE_FORMAT_SAFETENSORS)
		payload->kind = SAVE_SAFETENSORS;
	payload->checksums = !ret && options.checksums == IOSHAPE_CHECKSUMS_BESIDE;
	if (!ret && !path)
		ret = base_refuse(&error, -EINVAL, "no path to save to was given");
	if (!ret && out)
		ret = save_begin(context, path, payload, &options, NULL, out, &error);
	else if (!ret)
		ret = save_here(context, path, payload, &options, &error);
	return base_leave(ret, "save", path, &error);
}

IOSHAPE_EXPORT int ioshape_save_tensors(struct ioshape_context *context, const char *path,
					const struct ioshape_tensor *tensors, size_t count,
					const struct ioshape_save_options *options,
					struct ioshape_save **out)
{
	struct save_payload payload = { .tensors = tensors, .count = count };

	return save(context, path, &payload, options, out);
}

IOSHAPE_EXPORT int ioshape_save_records(struct ioshape_context *context, const char *path,
					const struct ioshape_record *records, size_t count,
					const struct ioshape_save_options *options,
					struct ioshape_save **out)
{
	struct save_payload payload = { .kind = SAVE_RECORDS, .records = records, .count = count };

	return save(context, path, &payload, options, out);
}

int save_records_lazily(struct ioshape_context *context, const char *path,
			const struct ioshape_record *records, const uint8_t *later, size_t count,
			const struct ioshape_save_options *options, struct ioshape_save **out)
{
	struct save_payload payload = {
		.kind = SAVE_RECORDS,
		.records = records,
		.later = later,
		.count = count,
	};

	return save(context, path, &payload, options, out);
}
