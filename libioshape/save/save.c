/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The public calls that save, saves that block, and how the bytes of a plan come to a file, in
 * either format, from wherever they are.
 */
#include "save/background.h"

#include <errno.h>
#include <stdlib.h>

/* Tensors that do not lie as they are saved are packed in pieces of this size. */
#define PACK_BYTES (256 * KIB)

/* The caller's function is asked for so much at a time: each call to a device costs its latency. */
#define FETCH_BYTES (4 * MIB)

/* ---- The bytes of a plan --------------------------------------------------------------------- */

/* All bytes of a record, in order, to wherever `put` brings them. */
static int bring_record(const struct save_plan *plan, size_t i, const struct save_source *source,
			int (*put)(void *to, const void *data, size_t bytes,
				   struct base_error *error),
			void *to, struct base_error *error)
{
	const struct save_record *record = &plan->records[i];
	const void *data = record->data;
	size_t run;
	uint64_t done;
	int ret = 0;

	for (done = 0; !ret && done < record->bytes; done += run) {
		run = record->bytes - done;
		if (i >= plan->own)
			ret = source->next(source->user, i, done, &data, &run, error);
		if (!ret)
			ret = put(to, data, run, error);
	}
	return ret;
}

/* ---- An archive ------------------------------------------------------------------------------ */

static int put_in_archive(void *zip, const void *data, size_t bytes, struct base_error *error)
{
	return format_writer_put(zip, data, bytes, error);
}

int save_write_records(struct format_writer *zip, const struct save_plan *plan,
		       const struct save_source *source, struct save_compare *compare,
		       struct base_error *error)
{
	const struct format_entry *entries;
	uint64_t count;
	int ret = 0;

	for (size_t i = 0; !ret && i < plan->count; i++) {
		const struct save_record *record = &plan->records[i];

		ret = format_writer_begin(zip, record->name, record->bytes, record->alignment,
					  error);
		if (!ret)
			ret = bring_record(plan, i, source, put_in_archive, zip, error);
		if (!ret)
			ret = format_writer_end(zip, error);
	}
	if (!ret && compare) {
		entries = format_writer_entries(zip, &count);
		ret = save_compare_records(compare, entries, count, error);
	}
	return ret ? ret : format_writer_finish(zip, &plan->index, error);
}

/* Where an archive goes: a file from `begin` on. */
struct destination {
	struct save_file *file;
	uint64_t begin;
};

static uint64_t offset_in_archive(void *to)
{
	const struct destination *destination = to;

	return io_writer_offset(destination->file->writer) - destination->begin;
}

static int put_in_file(void *to, const void *data, size_t bytes, uint32_t *crc,
		       struct base_error *error)
{
	const struct destination *destination = to;

	return save_file_put(destination->file, data, bytes, crc, error);
}

int save_put_archive(struct save_file *file, const struct save_plan *plan,
		     const struct save_source *source, struct save_compare *compare,
		     struct base_error *error)
{
	static const struct format_sink_ops ops = { .offset = offset_in_archive,
						    .put = put_in_file };
	struct destination destination = { file, io_writer_offset(file->writer) };
	struct format_writer *zip;
	int ret;

	ret = format_writer_new(&zip, (struct format_sink){ &ops, &destination }, plan->path,
				error);
	if (ret)
		return ret;
	source->to_file(source->user, file->writer);
	ret = save_write_records(zip, plan, source, compare, error);
	format_writer_free(zip);
	return ret;
}

/* ---- A safetensors file ---------------------------------------------------------------------- */

/* The file, and the checksum of the record that is on its way to it. */
struct segment {
	struct save_file *file;
	uint32_t crc32;
};

static int put_in_segment(void *to, const void *data, size_t bytes, struct base_error *error)
{
	struct segment *segment = to;

	return save_file_put(segment->file, data, bytes, &segment->crc32, error);
}

static int put_safetensors(struct save_file *file, const struct save_plan *plan,
			   const struct save_source *source, struct save_compare *compare,
			   struct base_error *error)
{
	static char no_name[] = ""; /* by its name a pickle is told from tensors, which these are */
	struct format_entry *entries = calloc(plan->count, sizeof(*entries));
	int ret = 0;

	if (!entries)
		return base_no_memory(error, "checksums", plan->count * sizeof(*entries));
	source->to_file(source->user, file->writer);
	for (size_t i = 0; !ret && i < plan->count; i++) {
		struct segment segment = { .file = file };

		ret = bring_record(plan, i, source, put_in_segment, &segment, error);
		entries[i].name = no_name;
		entries[i].bytes = plan->records[i].bytes;
		entries[i].crc32 = segment.crc32;
	}
	if (!ret)
		ret = save_compare_records(compare, entries + plan->own, plan->count - plan->own,
					   error);
	free(entries);
	return ret;
}

/* ---- Either ---------------------------------------------------------------------------------- */

struct saving {
	struct save_file file;
	const struct save_plan *plan;
	const struct save_source *source;
	struct save_compare compare;
};

static int put_plan(void *user, struct io_writer *writer, struct base_error *error)
{
	struct saving *saving = user;

	(void)writer; /* the file has it */
	if (saving->plan->safetensors)
		return put_safetensors(&saving->file, saving->plan, saving->source,
				       &saving->compare, error);
	return save_put_archive(&saving->file, saving->plan, saving->source, &saving->compare,
				error);
}

int save_write(struct ioshape_context *context, const char *given, const struct save_plan *plan,
	       const struct save_source *source, const struct io_file_options *options,
	       const struct save_watch *watch, struct save_order *order,
	       struct ioshape_report *report, struct base_error *error)
{
	struct save_checksums checksums = { .beside = true };
	struct saving saving = {
		.file = {
			.context = context,
			.path = order->path,
			.given = given,
			.options = *options,
			.checks_space = true,
			.checksums = plan->checksums ? &checksums : NULL,
			.put = put_plan,
			.user = &saving,
		},
		.plan = plan,
		.source = source,
		.compare = { .context = context, .path = order->path },
	};
	struct io_file_options *file_options = &saving.file.options;
	int ret;

	file_options->expected_bytes = file_options->progress_total = plan->expected_bytes;
	file_options->exact = true;
	ret = save_write_file(&saving.file, watch, order, report, error);
	base_buffer_free(&checksums.crcs);
	save_compare_end(&saving.compare, !ret && !order->overtaken, report);
	report->tensor_bytes = plan->payload_bytes;
	return ret;
}

/* ---- The caller's own memory ----------------------------------------------------------------- */

void save_direct_to_file(void *user, struct io_writer *file)
{
	struct save_direct *direct = user;

	direct->file = file;
}

/* Where up to *bytes can be made. */
static int find_room(struct save_direct *direct, uint8_t **to, size_t *bytes,
		     struct base_error *error)
{
	size_t room;
	int ret;

	if (direct->file) {
		ret = io_writer_room(direct->file, to, &room, error);
		*bytes = ret ? 0 : MIN(*bytes, room);
		return ret;
	}
	if (!direct->scratch)
		direct->scratch = malloc(MAX(PACK_BYTES, FETCH_BYTES));
	*to = direct->scratch;
	return *to ? 0 :
		     base_no_memory(error, "bytes on their way to a file",
				    MAX(PACK_BYTES, FETCH_BYTES));
}

int save_direct_next(void *user, size_t i, uint64_t offset, const void **data, size_t *bytes,
		     struct base_error *error)
{
	struct save_direct *direct = user;
	const struct save_record *record = &direct->plan->records[i];
	uint8_t *to;
	int ret;

	if (!record->packed && !record->fetch) {
		*data = (const char *)record->data + offset;
		return 0;
	}
	*bytes = MIN(*bytes, record->fetch ? FETCH_BYTES : PACK_BYTES);
	ret = find_room(direct, &to, bytes, error);
	*data = to;
	return ret ? ret : save_plan_copy(direct->plan, i, offset, to, *bytes, error);
}

/* ---- Blocking saves -------------------------------------------------------------------------- */

static int save_blocking(struct ioshape_context *context, const char *path,
			 const struct save_payload *payload,
			 const struct ioshape_save_options *options, struct ioshape_report *report,
			 struct base_error *error)
{
	const struct io_file_options file_options = SAVE_FILE_OPTIONS(options);
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
		ret = base_refuse_with(error, -EINVAL,
				       "ask ioshape_save_get_report() when it has ended",
				       "a background save cannot fill options.report");
	if (!ret && ((unsigned)options->format > IOSHAPE_FORMAT_SAFETENSORS ||
		     (options->format && !formats)))
		ret = base_refuse_with(
			error, -EINVAL,
			"set one of enum ioshape_format, for ioshape_save_tensors() only",
			"options.format is %u", (unsigned)options->format);
	if (!ret && options->checksums &&
	    (options->checksums != IOSHAPE_CHECKSUMS_BESIDE ||
	     options->format != IOSHAPE_FORMAT_SAFETENSORS))
		ret = base_refuse_with(
			error, -EINVAL,
			"set it for safetensors files only, to IOSHAPE_CHECKSUMS_BESIDE",
			"options.checksums is %u", (unsigned)options->checksums);
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
