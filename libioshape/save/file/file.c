/* SPDX-License-Identifier: Apache-2.0 */
/* The public handle for files in other formats: bytes as they come. */
#include "save/file/file.h"

#include <ioshape/ioshape.h>

#include <errno.h>
#include <stdlib.h>

struct ioshape_file {
	struct save_handle handle;
	bool has_checksums;
	struct save_checksums checksums;
};

static int open_file(struct ioshape_context *context, const char *path,
		     const struct ioshape_file_options *options, struct ioshape_file **out,
		     struct base_error *error)
{
	struct ring_file_options file_options = SAVE_FILE_OPTIONS(options);
	struct ioshape_file *file = calloc(1, sizeof(*file));
	int ret;

	file_options.expected_bytes = file_options.progress_total = options->expected_bytes;
	file_options.part_bytes = options->part_bytes;
	file_options.part_offset = options->part_offset;
	file_options.file_bytes = options->file_bytes;
	if (!file)
		return base_no_memory(error, "a file", sizeof(*file));
	ret = save_handle_open(&file->handle, context, path, &file_options, error);
	if (ret) {
		ioshape_file_free(file);
		return ret;
	}
	file->has_checksums = options->checksums != IOSHAPE_CHECKSUMS_NONE;
	file->checksums.beside = file->has_checksums;
	if (file->has_checksums)
		file->handle.output.checksums = &file->checksums;
	*out = file;
	return 0;
}

static int check_part(const struct ioshape_file_options *options, struct base_error *error)
{
	const uint64_t bytes = options->part_bytes, offset = options->part_offset;

	if (!bytes && !offset && !options->file_bytes)
		return 0;
	if (!bytes || bytes % IOSHAPE_PART_UNIT || offset % IOSHAPE_PART_UNIT ||
	    bytes > INT64_MAX || offset > INT64_MAX - bytes)
		return base_refuse(error, -EINVAL,
				   "options.part_offset is %llu and options.part_bytes is "
				   "%llu" BASE_REMEDY
				   "set part_bytes, and take multiples of IOSHAPE_PART_UNIT",
				   (unsigned long long)offset, (unsigned long long)bytes);
	if (options->checksums)
		return base_refuse(error, -EINVAL,
				   "options.checksums is set for a part of a file" BASE_REMEDY
				   "leave it at IOSHAPE_CHECKSUMS_NONE");
	return 0;
}

IOSHAPE_EXPORT int ioshape_file_open(struct ioshape_context *context, const char *path,
				     const struct ioshape_file_options *given,
				     struct ioshape_file **out)
{
	struct ioshape_file_options options;
	struct base_error error = { 0 };
	int ret;

	if (!out)
		return base_missing("save");
	*out = NULL;
	ret = save_enter_path(context, path, &options, sizeof(options), given,
			      "ioshape_file_options", &error);
	if (!ret && (unsigned)options.checksums > IOSHAPE_CHECKSUMS_BESIDE)
		ret = base_refuse(&error, -EINVAL,
				  "options.checksums is %u" BASE_REMEDY
				  "take one of enum ioshape_keep_checksums",
				  (unsigned)options.checksums);
	if (!ret)
		ret = check_part(&options, &error);
	if (!ret)
		ret = open_file(context, path, &options, out, &error);
	return base_leave(ret, "save", path, &error);
}

static struct save_handle *handle_of(struct ioshape_file *file)
{
	return file ? &file->handle : NULL;
}

static int put(struct ioshape_file *file, const void *data, size_t bytes, uint32_t *crc,
	       struct base_error *error)
{
	struct ring_writer *writer = file->handle.output.file;

	if (file->has_checksums)
		return save_checksums_put(&file->checksums, writer, data, bytes, crc, error);
	return ring_writer_put(writer, data, bytes, crc, error);
}

IOSHAPE_EXPORT int ioshape_file_write(struct ioshape_file *file, const void *data, size_t bytes)
{
	struct save_handle *handle = handle_of(file);
	int ret = save_handle_enter_with(handle, data, bytes);

	if (!ret)
		ret = put(file, data, bytes, NULL, &handle->error);
	return save_handle_leave(handle, ret);
}

/* ---- An archive in the file ------------------------------------------------------------------ */

struct archive {
	struct ioshape_file *file;
	uint64_t begin; /* offset in the file */
};

static uint64_t archive_offset(void *to)
{
	const struct archive *archive = to;

	return ring_writer_offset(archive->file->handle.output.file) - archive->begin;
}

static int archive_put(void *to, const void *data, size_t bytes, uint32_t *crc,
		       struct base_error *error)
{
	const struct archive *archive = to;

	return put(archive->file, data, bytes, crc, error);
}

static int write_archive(struct archive *archive, const struct save_plan *plan,
			 struct base_error *error)
{
	static const struct zip_sink_ops ops = { .offset = archive_offset, .put = archive_put };
	struct save_direct direct = { .plan = plan };
	const struct save_source source = { save_direct_next, save_direct_to_file, &direct };
	struct zip_writer *zip;
	int ret;

	ret = zip_writer_new(&zip, (struct zip_sink){ &ops, archive }, plan->path, error);
	if (ret)
		return ret;
	ret = save_write_records(zip, plan, &source, NULL, error);
	zip_writer_free(zip);
	free(direct.scratch);
	return ret;
}

int save_file_write_records(struct ioshape_file *file, const struct ioshape_record *records,
			    size_t count, uint64_t *bytes)
{
	const struct save_payload payload = {
		.kind = SAVE_RECORDS,
		.records = records,
		.count = count,
	};
	struct save_handle *handle = handle_of(file);
	struct archive archive = { .file = file };
	struct save_plan plan;
	int ret = save_handle_enter(handle);

	if (bytes)
		*bytes = 0;
	if (!ret)
		ret = save_plan_make(&plan, handle->path, &payload, NULL, &handle->error);
	if (ret)
		return save_handle_leave(handle, ret);
	archive.begin = ring_writer_offset(handle->output.file);
	ret = write_archive(&archive, &plan, &handle->error);
	if (ret) /* half an archive must not be committed */
		ring_writer_fail(handle->output.file);
	else if (bytes)
		*bytes = archive_offset(&archive);
	save_plan_free(&plan);
	return save_handle_leave(handle, ret);
}

/* ---- The end --------------------------------------------------------------------------------- */

IOSHAPE_EXPORT int ioshape_file_commit(struct ioshape_file *file, struct ioshape_report *report)
{
	struct save_handle *handle = handle_of(file);
	struct save_order order;
	int ret = save_handle_begin_commit(handle, &order, report);

	if (ret)
		return ret;
	handle->committed = true;
	ret = save_checksums_end(&file->checksums, &handle->error);
	if (!ret)
		ret = ring_writer_finish(handle->output.file, &handle->error);
	return save_handle_end_commit(handle, &order, ret, NULL,
				      ring_writer_offset(handle->output.file), report);
}

IOSHAPE_EXPORT void ioshape_file_free(struct ioshape_file *file)
{
	if (!file || save_enter(file->handle.output.context, NULL))
		return;
	save_handle_close(&file->handle);
	base_buffer_free(&file->checksums.crcs);
	free(file);
}
