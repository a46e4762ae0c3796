/* SPDX-License-Identifier: Apache-2.0 */
/* The public handle for files in other formats: bytes as they come. */
#include "save/file/file.h"

#include <ioshape/file.h>

#include <errno.h>
#include <stdlib.h>

struct ioshape_file {
	struct save_handle handle;
	bool has_checksums;
	struct save_checksums checksums;
	bool in_place;
};

static int open_file(struct ioshape_context *context, const char *path,
		     const struct ioshape_file_options *options, struct ioshape_file **out,
		     struct base_error *error)
{
	struct ring_file_options file_options = SAVE_FILE_OPTIONS(options);
	struct ioshape_file *file = calloc(1, sizeof(*file));
	int ret;

	file_options.expected_bytes = file_options.progress_total = options->expected_bytes;
	if (!file)
		return base_no_memory(error, "a file", sizeof(*file));
	ret = save_handle_open(&file->handle, context, path, &file_options, error);
	if (ret) {
		ioshape_file_free(file);
		return ret;
	}
	file->has_checksums = options->checksums != IOSHAPE_CHECKSUMS_NONE;
	file->checksums.beside = options->checksums == IOSHAPE_CHECKSUMS_BESIDE;
	if (file->has_checksums)
		file->handle.output.checksums = &file->checksums;
	*out = file;
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
	if (!ret && (unsigned)options.checksums > IOSHAPE_CHECKSUMS_TOLD)
		ret = base_refuse(&error, -EINVAL,
				  "options.checksums is %u" BASE_REMEDY
				  "take one of enum ioshape_keep_checksums",
				  (unsigned)options.checksums);
	if (!ret)
		ret = open_file(context, path, &options, out, &error);
	return base_leave(ret, "save", path, &error);
}

static struct save_handle *handle_of(struct ioshape_file *file)
{
	return file ? &file->handle : NULL;
}

IOSHAPE_EXPORT int ioshape_file_write(struct ioshape_file *file, const void *data, size_t bytes)
{
	struct save_handle *handle = handle_of(file);
	int ret = save_handle_enter_with(handle, data, bytes);

	if (!ret && file->has_checksums)
		ret = save_checksums_put(&file->checksums, handle->output.file, data, bytes, NULL,
					 &handle->error);
	else if (!ret)
		ret = ring_writer_put(handle->output.file, data, bytes, NULL, &handle->error);
	return save_handle_leave(handle, ret);
}

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
	ret = save_handle_end_commit(handle, &order, ret, NULL,
				     ring_writer_offset(handle->output.file), report);
	file->in_place = !ret;
	return ret;
}

IOSHAPE_EXPORT int ioshape_file_get_checksums(struct ioshape_file *file,
					      struct ioshape_checksums *checksums)
{
	struct ioshape_checksums told;
	struct base_error error = { 0 };
	int ret;

	if (!file || !checksums)
		return base_missing("save");
	ret = save_enter(file->handle.output.context, &error);
	if (!ret && (!file->in_place || !file->has_checksums))
		ret = base_refuse(&error, -EINVAL, "cannot tell the checksums of \"%s\": %s",
				  file->handle.path,
				  file->in_place ? "none were asked for" :
						   "it has not been committed");
	if (!ret) {
		told = save_checksums_of(&file->checksums, file->handle.output.file);
		ret = base_give_struct(checksums, &told, sizeof(told), "ioshape_checksums", &error);
	}
	return base_leave(ret, "save", file->handle.path, &error);
}

IOSHAPE_EXPORT void ioshape_file_free(struct ioshape_file *file)
{
	if (!file || save_enter(file->handle.output.context, NULL))
		return;
	save_handle_close(&file->handle);
	base_buffer_free(&file->checksums.crcs);
	free(file);
}
