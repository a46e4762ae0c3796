/* SPDX-License-Identifier: Apache-2.0 */
/* The public handle for files in other formats: bytes as they come. */
#include "save/file/file.h"

#include <ioshape/file.h>

#include <errno.h>
#include <stdlib.h>

struct ioshape_file {
	struct save_handle handle;
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

	if (!ret)
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
	ret = ring_writer_finish(handle->output.file, &handle->error);
	return save_handle_end_commit(handle, &order, ret, NULL,
				      ring_writer_offset(handle->output.file), report);
}

IOSHAPE_EXPORT void ioshape_file_free(struct ioshape_file *file)
{
	if (!file || save_enter(file->handle.output.context, NULL))
		return;
	save_handle_close(&file->handle);
	free(file);
}
