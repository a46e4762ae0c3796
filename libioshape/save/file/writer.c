/* SPDX-License-Identifier: Apache-2.0 */
/* The public handle for writing records. */
#include "save/file/file.h"

#include <errno.h>
#include <stdlib.h>

struct ioshape_writer {
	struct save_handle handle;
	struct zip_writer *zip; /* owns the file */
	struct ioshape_metadata metadata;
	void *metadata_memory;
};

static int open_writer(struct ioshape_context *context, const char *path,
		       const struct ioshape_writer_options *options, struct ioshape_writer **out,
		       struct base_error *error)
{
	struct ring_file_options file_options = SAVE_FILE_OPTIONS(options);
	struct ioshape_writer *writer = calloc(1, sizeof(*writer));
	struct save_handle *handle;
	int ret;

	file_options.expected_bytes = file_options.progress_total = options->expected_bytes;
	if (!writer)
		return base_no_memory(error, "a writer", sizeof(*writer));
	handle = &writer->handle;
	handle->output.context = context;
	ret = save_take_metadata(&writer->metadata, &writer->metadata_memory, options->metadata,
				 error);
	if (!ret)
		ret = save_handle_open(handle, context, path, &file_options, error);
	if (!ret)
		ret = zip_writer_new(&writer->zip, zip_sink_of_file(handle->output.file),
				     handle->path, error);
	if (ret) {
		ioshape_writer_free(writer);
		return ret;
	}
	*out = writer;
	return 0;
}

IOSHAPE_EXPORT int ioshape_writer_open(struct ioshape_context *context, const char *path,
				       const struct ioshape_writer_options *given,
				       struct ioshape_writer **out)
{
	struct ioshape_writer_options options;
	struct base_error error = { 0 };
	int ret;

	if (!out)
		return base_missing("save");
	*out = NULL;
	ret = save_enter_path(context, path, &options, sizeof(options), given,
			      "ioshape_writer_options", &error);
	if (!ret)
		ret = open_writer(context, path, &options, out, &error);
	return base_leave(ret, "save", path, &error);
}

static struct save_handle *handle_of(struct ioshape_writer *writer)
{
	return writer ? &writer->handle : NULL;
}

IOSHAPE_EXPORT int ioshape_writer_begin_record(struct ioshape_writer *writer, const char *name,
					       uint64_t bytes, uint32_t alignment)
{
	struct save_handle *handle = handle_of(writer);
	int ret = save_handle_enter(handle);

	if (!ret && !name)
		ret = base_refuse(&handle->error, -EINVAL, "no name was given for a record of %s",
				  handle->path);
	if (!ret)
		ret = zip_writer_begin(writer->zip, name, bytes, alignment, &handle->error);
	return save_handle_leave(handle, ret);
}

IOSHAPE_EXPORT int ioshape_writer_write(struct ioshape_writer *writer, const void *data,
					size_t bytes)
{
	struct save_handle *handle = handle_of(writer);
	int ret = save_handle_enter_with(handle, data, bytes);

	if (!ret)
		ret = zip_writer_put(writer->zip, data, bytes, &handle->error);
	return save_handle_leave(handle, ret);
}

IOSHAPE_EXPORT int ioshape_writer_end_record(struct ioshape_writer *writer)
{
	struct save_handle *handle = handle_of(writer);
	int ret = save_handle_enter(handle);

	if (!ret)
		ret = zip_writer_end(writer->zip, &handle->error);
	return save_handle_leave(handle, ret);
}

IOSHAPE_EXPORT int ioshape_writer_commit(struct ioshape_writer *writer,
					 struct ioshape_report *report)
{
	struct zip_index index = { .has_table = false };
	struct save_handle *handle = handle_of(writer);
	struct save_compare compare = { 0 };
	const struct zip_entry *entries;
	struct save_order order;
	uint64_t count;
	int ret = save_handle_begin_commit(handle, &order, report);

	if (ret)
		return ret;
	compare.context = handle->output.context;
	compare.path = handle->path;
	entries = zip_writer_entries(writer->zip, &count);
	ret = save_compare_records(&compare, entries, count, &handle->error);
	index.metadata = writer->metadata;
	if (!ret)
		ret = zip_writer_finish(writer->zip, &index, &handle->error);
	if (!ret)
		ret = ring_writer_finish(handle->output.file, &handle->error);
	/* A record that is still open can be ended, and the commit tried again. */
	handle->committed = ret != -EINVAL;
	return save_handle_end_commit(handle, &order, ret, &compare,
				      zip_writer_payload_bytes(writer->zip), report);
}

IOSHAPE_EXPORT void ioshape_writer_free(struct ioshape_writer *writer)
{
	if (!writer || save_enter(writer->handle.output.context, NULL))
		return;
	zip_writer_free(writer->zip);
	save_handle_close(&writer->handle);
	free(writer->metadata_memory);
	free(writer);
}
