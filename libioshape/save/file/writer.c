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
	const struct ring_file_options file_options = {
		.expected_bytes = options->expected_bytes,
		.no_replace = options->replace == IOSHAPE_OFF,
		.no_sync = options->sync == IOSHAPE_OFF,
		.progress = options->progress,
		.progress_user = options->progress_user,
		.progress_total = options->expected_bytes,
	};
	struct ioshape_writer *writer = calloc(1, sizeof(*writer));
	struct save_handle *handle;
	int ret;

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
	ret = save_enter(context, &error);
	if (!ret)
		ret = base_take_options(&options, sizeof(options), given, "ioshape_writer_options",
					&error);
	if (!ret && !path)
		ret = base_refuse(&error, -EINVAL, "no path to write to was given");
	if (!ret)
		ret = open_writer(context, path, &options, out, &error);
	return base_leave(ret, "save", path, &error);
}

/* First in every call on an open writer. Forgets the last failure. */
static int enter(struct ioshape_writer *writer)
{
	return writer ? save_handle_enter(&writer->handle) : -EINVAL;
}

static int leave(struct ioshape_writer *writer, int ret)
{
	return writer ? save_handle_leave(&writer->handle, ret) : base_missing("save");
}

IOSHAPE_EXPORT int ioshape_writer_begin_record(struct ioshape_writer *writer, const char *name,
					       uint64_t bytes, uint32_t alignment)
{
	int ret = enter(writer);

	if (!ret && !name)
		ret = base_refuse(&writer->handle.error, -EINVAL,
				  "no name was given for a record of %s", writer->handle.path);
	if (!ret)
		ret = zip_writer_begin(writer->zip, name, bytes, alignment, &writer->handle.error);
	return leave(writer, ret);
}

IOSHAPE_EXPORT int ioshape_writer_write(struct ioshape_writer *writer, const void *data,
					size_t bytes)
{
	int ret = enter(writer);

	if (!ret && bytes && !data)
		ret = base_refuse(&writer->handle.error, -EINVAL, "no data was given for %s",
				  writer->handle.path);
	if (!ret)
		ret = zip_writer_put(writer->zip, data, bytes, &writer->handle.error);
	return leave(writer, ret);
}

IOSHAPE_EXPORT int ioshape_writer_end_record(struct ioshape_writer *writer)
{
	int ret = enter(writer);

	if (!ret)
		ret = zip_writer_end(writer->zip, &writer->handle.error);
	return leave(writer, ret);
}

IOSHAPE_EXPORT int ioshape_writer_commit(struct ioshape_writer *writer,
					 struct ioshape_report *report)
{
	struct zip_index index = { .has_table = false };
	struct save_order order;
	int ret;

	if (!writer)
		return base_missing("save");
	ret = save_handle_begin_commit(&writer->handle, &order, report);
	if (ret)
		return ret;
	index.metadata = writer->metadata;
	ret = zip_writer_finish(writer->zip, &index, &writer->handle.error);
	/* A record that is still open can be ended, and the commit tried again. */
	writer->handle.committed = ret != -EINVAL;
	return save_handle_end_commit(&writer->handle, &order, ret,
				      zip_writer_payload_bytes(writer->zip), report);
}

IOSHAPE_EXPORT void ioshape_writer_free(struct ioshape_writer *writer)
{
	if (!writer || save_enter(writer->handle.output.context, NULL))
		return;
	if (writer->zip) {
		zip_writer_free(writer->zip);
		writer->handle.output.file = NULL;
	}
	save_handle_close(&writer->handle);
	free(writer->metadata_memory);
	free(writer);
}
