/* SPDX-License-Identifier: Apache-2.0 */
/* The public handle for writing records. */
#include "ckpt/ckpt.h"

#include <errno.h>
#include <stdlib.h>

struct ioshape_writer {
	struct ckpt_handle handle;
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
		.no_replace = options->no_replace,
		.no_sync = options->no_sync,
		.progress = options->progress,
		.progress_user = options->progress_user,
		.progress_total = options->expected_bytes,
	};
	struct ioshape_writer *writer = calloc(1, sizeof(*writer));
	struct ckpt_handle *handle;
	int ret;

	if (!writer)
		return base_no_memory(error, "a writer", sizeof(*writer));
	handle = &writer->handle;
	handle->output.context = context;
	ret = ckpt_take_metadata(&writer->metadata, &writer->metadata_memory, options->metadata,
				 error);
	if (!ret)
		ret = ckpt_handle_open(handle, context, path, &file_options, error);
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
		return -EINVAL;
	*out = NULL;
	ret = ckpt_enter(context, &error);
	if (!ret)
		ret = base_take_options(&options, sizeof(options), given, "ioshape_writer_options",
					&error);
	if (!ret && !path)
		ret = base_fail(&error, -EINVAL, "no path to write to was given");
	if (!ret)
		ret = open_writer(context, path, &options, out, &error);
	return ckpt_leave(context, ret, &error);
}

/* First in every call on an open writer. Forgets the last failure. */
static int enter(struct ioshape_writer *writer)
{
	return writer ? ckpt_handle_enter(&writer->handle) : -EINVAL;
}

static int leave(struct ioshape_writer *writer, int ret)
{
	return writer ? ckpt_handle_leave(&writer->handle, ret) : ret;
}

IOSHAPE_EXPORT int ioshape_writer_begin(struct ioshape_writer *writer, const char *name,
					uint64_t bytes, uint32_t alignment)
{
	int ret = enter(writer);

	if (!ret && !name)
		ret = base_fail(&writer->handle.error, -EINVAL,
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
		ret = base_fail(&writer->handle.error, -EINVAL, "no data was given for %s",
				writer->handle.path);
	if (!ret)
		ret = zip_writer_put(writer->zip, data, bytes, &writer->handle.error);
	return leave(writer, ret);
}

IOSHAPE_EXPORT int ioshape_writer_end(struct ioshape_writer *writer)
{
	int ret = enter(writer);

	if (!ret)
		ret = zip_writer_end(writer->zip, &writer->handle.error);
	return leave(writer, ret);
}

IOSHAPE_EXPORT int ioshape_writer_record(struct ioshape_writer *writer, const char *name,
					 const void *data, uint64_t bytes, uint32_t alignment)
{
	int ret = enter(writer);

	if (!ret && (!name || (bytes && !data)))
		ret = base_fail(&writer->handle.error, -EINVAL,
				"no %s was given for a record of %s", name ? "data" : "name",
				writer->handle.path);
	if (!ret && bytes == IOSHAPE_UNKNOWN_BYTES)
		ret = base_fail(
			&writer->handle.error, -EINVAL,
			"a whole record of %s must have a known size; use begin, write and end",
			writer->handle.path);
	if (!ret)
		ret = zip_writer_begin(writer->zip, name, bytes, alignment, &writer->handle.error);
	if (!ret)
		ret = zip_writer_put(writer->zip, data, bytes, &writer->handle.error);
	if (!ret)
		ret = zip_writer_end(writer->zip, &writer->handle.error);
	return leave(writer, ret);
}

IOSHAPE_EXPORT int ioshape_writer_commit(struct ioshape_writer *writer,
					 struct ioshape_report *report)
{
	struct zip_index index = { .has_table = false };
	struct ckpt_turn turn;
	int ret;

	if (!writer)
		return -EINVAL;
	ret = ckpt_handle_begin_commit(&writer->handle, &turn, report);
	if (ret)
		return ret;
	index.metadata = writer->metadata;
	ret = zip_writer_finish(writer->zip, &index, &writer->handle.error);
	/* A record that is still open can be ended, and the commit tried again. */
	writer->handle.committed = ret != -EINVAL;
	return ckpt_handle_end_commit(&writer->handle, &turn, ret,
				      zip_writer_payload_bytes(writer->zip), report);
}

IOSHAPE_EXPORT const char *ioshape_writer_message(struct ioshape_writer *writer)
{
	return writer ? writer->handle.error.text : "";
}

IOSHAPE_EXPORT void ioshape_writer_free(struct ioshape_writer *writer)
{
	if (!writer || ckpt_enter(writer->handle.output.context, NULL))
		return;
	ckpt_handle_close(&writer->handle, writer->zip);
	free(writer->metadata_memory);
	free(writer);
}
