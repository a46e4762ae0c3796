/* SPDX-License-Identifier: Apache-2.0 */
/* The public handle for writing records. */
#include "ckpt/ckpt.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

struct ioshape_writer {
	struct ioshape_context *context;
	char *path;
	struct ring_lane *lane;
	struct zip_writer *zip; /* owns the file */
	struct ring_notes notes;
	struct ioshape_metadata metadata;
	void *metadata_memory;
	uint64_t begin_ns;
	bool committed;          /* or tried to: only the message and free() remain */
	struct base_error error; /* of the last call that failed */
};

static int open_zip(struct ioshape_writer *writer, const struct ioshape_writer_options *options,
		    struct base_error *error)
{
	const struct ring_file_options file_options = {
		.expected_bytes = options->expected_bytes,
		.no_replace = options->no_replace,
		.no_sync = options->no_sync,
		.remove_stale = ckpt_should_tidy(writer->context, writer->path),
		.progress = options->progress,
		.progress_user = options->progress_user,
		.progress_total = options->expected_bytes,
	};
	struct ring_writer *file;
	int ret;

	ret = ckpt_take_lane(writer->context, &writer->lane, error);
	if (!ret)
		ret = ring_writer_open(&file, writer->lane, writer->path, &file_options,
				       &writer->notes, error);
	if (ret)
		return ret;
	ret = zip_writer_new(&writer->zip, file, writer->path, error);
	if (ret)
		ring_writer_free(file);
	return ret;
}

static int open_writer(struct ioshape_context *context, const char *path,
		       const struct ioshape_writer_options *options, struct ioshape_writer **out,
		       struct base_error *error)
{
	struct ioshape_writer *writer = calloc(1, sizeof(*writer));
	int ret;

	if (!writer)
		return base_no_memory(error, "a writer", sizeof(*writer));
	writer->context = context;
	writer->begin_ns = base_now_ns();
	/* Its turn comes at the commit, wherever the application has changed its directory to. */
	ret = ckpt_absolute_path(path, &writer->path, error);
	if (!ret)
		ret = ckpt_take_metadata(&writer->metadata, &writer->metadata_memory,
					 options->metadata, error);
	if (!ret)
		ret = open_zip(writer, options, error);
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
	if (!writer)
		return -EINVAL;
	memset(&writer->error, 0, sizeof(writer->error));
	if (writer->committed)
		return base_fail(&writer->error, -EINVAL,
				 "the writer of %s has been committed; open a new one",
				 writer->path);
	return ckpt_enter(writer->context, &writer->error);
}

IOSHAPE_EXPORT int ioshape_writer_begin(struct ioshape_writer *writer, const char *name,
					uint64_t bytes, uint32_t alignment)
{
	int ret = enter(writer);

	if (!ret && !name)
		ret = base_fail(&writer->error, -EINVAL, "no name was given for a record of %s",
				writer->path);
	return ret ? ret : zip_writer_begin(writer->zip, name, bytes, alignment, &writer->error);
}

IOSHAPE_EXPORT int ioshape_writer_write(struct ioshape_writer *writer, const void *data,
					size_t bytes)
{
	int ret = enter(writer);

	if (!ret && bytes && !data)
		ret = base_fail(&writer->error, -EINVAL, "no data was given for %s", writer->path);
	return ret ? ret : zip_writer_put(writer->zip, data, bytes, &writer->error);
}

IOSHAPE_EXPORT int ioshape_writer_end(struct ioshape_writer *writer)
{
	int ret = enter(writer);

	return ret ? ret : zip_writer_end(writer->zip, &writer->error);
}

IOSHAPE_EXPORT int ioshape_writer_record(struct ioshape_writer *writer, const char *name,
					 const void *data, uint64_t bytes, uint32_t alignment)
{
	int ret = enter(writer);

	if (!ret && (!name || (bytes && !data)))
		ret = base_fail(&writer->error, -EINVAL, "no %s was given for a record of %s",
				name ? "data" : "name", writer->path);
	if (!ret && bytes == IOSHAPE_UNKNOWN_BYTES)
		ret = base_fail(
			&writer->error, -EINVAL,
			"a whole record of %s must have a known size; use begin, write and end",
			writer->path);
	if (!ret)
		ret = zip_writer_begin(writer->zip, name, bytes, alignment, &writer->error);
	if (!ret)
		ret = zip_writer_put(writer->zip, data, bytes, &writer->error);
	return ret ? ret : zip_writer_end(writer->zip, &writer->error);
}

IOSHAPE_EXPORT int ioshape_writer_commit(struct ioshape_writer *writer,
					 struct ioshape_report *report)
{
	const struct zip_index index = { .metadata = writer ? writer->metadata :
							      (struct ioshape_metadata){ 0 } };
	struct ioshape_report full = IOSHAPE_REPORT_INIT;
	struct ckpt_turn turn;
	int ret = enter(writer);

	if (!ret && report)
		ret = base_give_struct(report, &full, sizeof(full), "ioshape_report",
				       &writer->error);
	if (ret)
		return ret;
	ret = ckpt_turn_begin(writer->context, &turn, writer->path, &writer->error);
	if (ret)
		return ret;
	ret = zip_writer_finish(writer->zip, &index, &writer->error);
	/* A record that is still open can be ended, and the commit tried again. */
	writer->committed = ret != -EINVAL;
	ret = ckpt_commit(writer->context, &turn, zip_writer_file(writer->zip), &writer->notes, ret,
			  &full, &writer->error);
	ckpt_turn_end(writer->context, &turn);
	full.tensor_bytes = zip_writer_payload_bytes(writer->zip);
	full.total_s = base_seconds(base_now_ns() - writer->begin_ns);
	if (report)
		base_give_struct(report, &full, sizeof(full), "ioshape_report", NULL);
	return ret;
}

IOSHAPE_EXPORT const char *ioshape_writer_message(struct ioshape_writer *writer)
{
	return writer ? writer->error.text : "";
}

IOSHAPE_EXPORT void ioshape_writer_free(struct ioshape_writer *writer)
{
	if (!writer || ckpt_enter(writer->context, NULL))
		return;
	zip_writer_free(writer->zip);
	ckpt_return_lane(writer->context, writer->lane);
	free(writer->metadata_memory);
	free(writer->path);
	free(writer);
}
