/* SPDX-License-Identifier: Apache-2.0 */
/* The public reader. It finds and reads records, tensors, and ranges of them, and verifies files
 * without keeping the bytes. */
#include "save/file.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

struct ioshape_reader {
	struct ioshape_context *context;
	struct format_reader zip;
	struct ioshape_reader_options options;
	struct base_error error;  /* error of the last failed call */
	struct base_error beside; /* reason why checksums beside the file are unused; code 0:
				     there are none */
	struct format_statistics statistics; /* beside the file; `records` is 0 if there are none */
	struct io_stream *stream;            /* for sequential reads; made by the first one */
	struct io_queue *queue;   /* queue of the stream, while something is prefetched */
	bool is_prefetching;      /* the prefetched blocks are for records that will be loaded */
	struct base_fresh *fresh; /* memory into which the current call reads */
	/* Stretches of fresh memory for which huge pages were requested. */
	size_t expected;
	pid_t owner;
};

/* ---- Formats and checksums ------------------------------------------------------------------- */

/* Files of any format are supported. A file has checksums beside it, or is a torch zip, or has no
 * checksums. */

#define LEAST_ZIP_BYTES 22u

/* Returns whether an error means that no checksums of ours exist: there is no file, or another user
 * put one there. */
static bool is_nothing(int code)
{
	return code == -ENOENT || code == -EPERM || code == -EACCES || code == -ELOOP ||
	       code == -ENAMETOOLONG || code == -ENOTDIR;
}

static int cannot_read(struct base_error *why, int code, const char *path)
{
	if (code == IOSHAPE_E_DAMAGED || code == IOSHAPE_E_FORMAT || code == -EFBIG)
		return base_fail_reason_with(
			why, IOSHAPE_E_DAMAGED,
			"compare the file with another copy and write it again",
			"cannot verify \"%s\": its checksum file \"%s" FORMAT_CHECKSUMS_SUFFIX
			"\" is damaged, or a later version of "
			"ioshape wrote it",
			path, path);
	return base_fail(why, code, "cannot verify \"%s\": cannot read its checksum file \"%s%s\"",
			 path, path, FORMAT_CHECKSUMS_SUFFIX);
}

/* Reads the checksums beside the file. *known is set if they belong to this version of the file.
 * Otherwise *why is the reason, or stays empty if there is no such file. */
static int find_checksums(const struct io_input *input, struct format_checksums *checksums,
			  bool *known, struct base_error *why, struct base_error *error)
{
	struct base_buffer bytes = { 0 };
	int ret;

	*known = false;
	ret = io_input_get_beside(input, FORMAT_CHECKSUMS_SUFFIX, FORMAT_MOST_BESIDE_BYTES, &bytes);
	if (!ret)
		ret = format_checksums_decode(checksums, bytes.data, bytes.bytes);
	base_buffer_free(&bytes);
	if (ret == -ENOMEM)
		return base_no_memory(error, "the checksums of a file", FORMAT_MOST_BESIDE_BYTES);
	if (ret && !is_nothing(ret))
		cannot_read(why, ret, input->path);
	if (ret)
		return 0;
	/* The modification time decides alone. If the length differs at an equal time, the file is
	 * damaged. */
	*known = checksums->file.modified_ns && checksums->file.modified_ns == input->modified_ns;
	if (*known)
		return 0;
	format_checksums_free(checksums);
	base_fail_reason_with(
		why, -ENODATA, "write it again with checksums",
		"cannot verify \"%s\": it was changed or replaced after its checksum file "
		"\"%s%s\" was written",
		input->path, input->path, FORMAT_CHECKSUMS_SUFFIX);
	return 0;
}

/* Reads the statistics beside the file, if there are any of this version of the file. */
static void find_statistics(const struct io_input *input, struct format_statistics *statistics)
{
	struct base_buffer bytes = { 0 };
	int ret = io_input_get_beside(input, FORMAT_STATISTICS_SUFFIX, FORMAT_MOST_BESIDE_BYTES,
				      &bytes);

	if (!ret)
		ret = format_statistics_decode(statistics, bytes.data, bytes.bytes);
	base_buffer_free(&bytes);
	if (!ret && (statistics->file.modified_ns != input->modified_ns ||
		     statistics->file.file_bytes != input->bytes))
		format_statistics_free(statistics);
}

/* Opens the file as a torch zip, in place of the plain reader. If the file is no zip, the reader
 * stays as it is. */
static int try_zip(struct format_reader *reader, const char *path,
		   const struct ioshape_reader_options *options, enum ioshape_direct direct,
		   struct base_error *error)
{
	struct base_error why = { 0 };
	struct format_reader zip;
	int ret;

	/* A zip has at least the bytes of its end record. An empty file has nothing that could be
	 * damaged. */
	if (reader->input.bytes < LEAST_ZIP_BYTES)
		return 0;
	ret = format_reader_open(&zip, path, options->file_offset, options->file_bytes, direct,
				 &why);
	if (ret == IOSHAPE_E_FORMAT || ret == IOSHAPE_E_LIMIT)
		return 0;
	if (ret)
		return base_propagate(error, &why);
	format_reader_close(reader);
	*reader = zip;
	return 0;
}

/* Opens a file of any format, for reader_options.any_format. */
static int open_any_format(struct ioshape_reader *reader, const char *path,
			   const struct ioshape_reader_options *options, enum ioshape_direct direct,
			   struct base_error *error)
{
	const bool whole = !options->file_offset && !options->file_bytes;
	struct format_reader *zip = &reader->zip;
	struct format_checksums checksums;
	bool known = false;
	int ret;

	ret = format_reader_open_plain(zip, path, options->file_offset, options->file_bytes, direct,
				       error);
	if (ret)
		return ret;
	if (whole)
		ret = find_checksums(&zip->input, &checksums, &known, &reader->beside, error);
	if (known) {
		ret = format_reader_add_checksums(zip, &checksums, error);
		format_checksums_free(&checksums);
		find_statistics(&zip->input, &reader->statistics);
	} else if (!ret) {
		ret = try_zip(zip, path, options, direct, error);
	}
	if (ret) {
		format_reader_close(zip);
		format_statistics_free(&reader->statistics);
	}
	return ret;
}

/* ---- The reader ------------------------------------------------------------------------------ */

/* Limit for stretches of fresh memory with huge pages. A few thousand mappings suffice. */
#define MOST_STRETCHES 8192u

/* Returns the number of the user's records. The index belongs to the container; it is the last
 * record if there is one. */
static uint64_t record_count(const struct ioshape_reader *reader)
{
	if (reader->zip.plain)
		return 0;
	return reader->zip.directory.count - reader->zip.has_index;
}

/* Remembers the file of a reader as a checkpoint at this path. */
static void remember(const struct ioshape_reader *reader, const char *path)
{
	const struct format_reader *zip = &reader->zip;

	if (zip->plain)
		save_compare_loaded(reader->context, path, reader->statistics.tensors,
				    reader->statistics.index.records, &reader->statistics.index,
				    false);
	else if (!zip->no_checksums)
		save_compare_loaded(reader->context, path, zip->directory.entries,
				    record_count(reader), zip->has_index ? &zip->index : NULL,
				    false);
}

void save_reader_is_part_of(const struct ioshape_reader *reader, const char *path)
{
	remember(reader, path);
}

struct format_statistics save_reader_statistics(const struct ioshape_reader *reader)
{
	return reader->statistics;
}

const struct format_reader *save_reader_zip(const struct ioshape_reader *reader)
{
	return &reader->zip;
}

/* Returns the index that has the statistics; NULL if there is none. */
static const struct format_index *examined_in(const struct ioshape_reader *reader)
{
	if (reader->statistics.index.records)
		return &reader->statistics.index;
	return reader->zip.has_index && reader->zip.index.has_statistics ? &reader->zip.index :
									   NULL;
}

static int enter_reader(struct ioshape_reader *reader)
{
	if (!reader)
		return -EINVAL;
	memset(&reader->error, 0, sizeof(reader->error));
	return save_enter(reader->context, &reader->error);
}

static int leave_reader(struct ioshape_reader *reader, const char *operation, int code)
{
	return reader ? base_return(code, operation, reader->zip.input.path, &reader->error) :
			base_null_argument(operation);
}

static int leave(struct ioshape_reader *reader, int code)
{
	return leave_reader(reader, "load", code);
}

static int check_result(struct ioshape_reader *reader, const void *result)
{
	if (result)
		return 0;
	return base_fail_reason(&reader->error, -EINVAL,
				"no pointer for the result was given, for %s",
				reader->zip.input.path);
}

/* ---- Records --------------------------------------------------------------------------------- */

static bool has_table(const struct ioshape_reader *reader)
{
	return reader->zip.has_index && reader->zip.index.has_table;
}

static int check_number(struct ioshape_reader *reader, const char *kinds, uint64_t count,
			uint64_t index)
{
	if (index < count)
		return 0;
	return base_fail_reason(&reader->error, -ENOENT,
				"\"%s\" has %llu %s, so the index %llu is out of range",
				reader->zip.input.path, (unsigned long long)count, kinds,
				(unsigned long long)index);
}

static int check_record(struct ioshape_reader *reader, uint64_t index)
{
	return check_number(reader, "records", record_count(reader), index);
}

/* Checks the number of a record. A file that is not read as an archive is one record without a
 * name. */
static int check_readable(struct ioshape_reader *reader, uint64_t record)
{
	return check_number(reader, "records", reader->zip.plain ? 1 : record_count(reader),
			    record);
}

/* Finds a record or tensor by its name. */
static int find_name(struct ioshape_reader *reader, const struct format_names *names,
		     const char *kind, uint64_t count, const char *name, uint64_t *index)
{
	int ret = check_result(reader, index);

	if (ret || (name && format_names_find(names, name, strlen(name), index) && *index < count))
		return ret;
	name = name ? name : "";
	base_fail_reason(&reader->error, -ENOENT, "\"%s\" has no %s \"%s\"", reader->zip.input.path,
			 kind, name);
	base_error_in_record(&reader->error, name);
	return -ENOENT;
}

/* Checks that a range is within the record or tensor `name`, which has `size` bytes, and that
 * memory was given. `name` is NULL for a range of the file. */
static int check_range(struct ioshape_reader *reader, const char *name, uint64_t size,
		       const struct ioshape_load_request *range)
{
	const char *path = reader->zip.input.path;
	int ret = 0;

	if (range->offset > size || range->bytes > size - range->offset)
		ret = base_fail_reason(
			&reader->error, -ERANGE,
			"cannot read \"%s\": \"%s\" has %llu bytes, too few to read %llu "
			"from offset %llu",
			path, name ? name : path, (unsigned long long)size,
			(unsigned long long)range->bytes, (unsigned long long)range->offset);
	else if (range->bytes && !range->into)
		ret = base_fail_reason(&reader->error, -EINVAL,
				       "cannot read \"%s\": no buffer was given", path);
	if (ret && name)
		base_error_in_record(&reader->error, name);
	return ret;
}

IOSHAPE_EXPORT int ioshape_reader_get_info(struct ioshape_reader *reader,
					   struct ioshape_reader_info *info)
{
	struct ioshape_reader_info full = { .size = sizeof(full) };
	const struct format_index *index;
	int ret = enter_reader(reader);

	if (!ret)
		ret = check_result(reader, info);
	if (ret)
		return leave(reader, ret);
	index = examined_in(reader);
	full.file_bytes = reader->zip.input.bytes;
	full.records = record_count(reader);
	full.has_table = has_table(reader);
	full.tensors = full.has_table ? reader->zip.index.tensor_count : 0;
	full.block_bytes = reader->zip.has_index ? (uint32_t)reader->zip.index.check_bytes : 0;
	full.torch_zip = !reader->zip.plain;
	full.checksums = !reader->zip.no_checksums;
	full.examined = index != NULL;
	full.alarms = index ? index->alarms : 0;
	return leave(reader, base_give_struct(info, &full, sizeof(full), "ioshape_reader_info",
					      &reader->error));
}

IOSHAPE_EXPORT int ioshape_reader_get_record(struct ioshape_reader *reader, uint64_t index,
					     struct ioshape_record_info *info)
{
	struct ioshape_record_info full = { .size = sizeof(full) };
	const struct format_entry *entry;
	int ret = enter_reader(reader);

	if (!ret)
		ret = check_result(reader, info);
	if (!ret)
		ret = check_record(reader, index);
	if (ret)
		return leave(reader, ret);
	entry = &reader->zip.directory.entries[index];
	full.name = entry->name;
	full.bytes = entry->bytes;
	full.file_offset = entry->data_offset;
	full.crc32 = entry->crc32;
	return leave(reader, base_give_struct(info, &full, sizeof(full), "ioshape_record_info",
					      &reader->error));
}

IOSHAPE_EXPORT int ioshape_reader_get_statistics(struct ioshape_reader *reader, uint64_t index,
						 struct ioshape_statistics *statistics)
{
	struct ioshape_statistics full = { .size = sizeof(full) };
	const struct base_statistics *found;
	const struct format_index *all = NULL;
	int ret = enter_reader(reader);

	if (!ret)
		ret = check_result(reader, statistics);
	if (!ret)
		all = examined_in(reader);
	if (!ret && (!all || !reader->zip.plain))
		ret = check_record(reader, index);
	else if (!ret)
		ret = check_number(reader, "tensors", all->records, index);
	if (!ret && !all)
		ret = base_fail_reason(&reader->error, -ENODATA,
				       "the file has no statistics of its tensors");
	if (ret)
		return leave(reader, ret);
	found = &all->examined[index].statistics;
	if (found->dtype) {
		full.dtype = found->dtype;
		full.alarms = all->examined[index].alarms;
		full.count = found->count;
		full.nans = found->nans;
		full.infinities = found->infinities;
		full.zeros = found->zeros;
		full.minimum = found->minimum;
		full.maximum = found->maximum;
		full.sum_squares = found->sum_squares;
		full.constant = base_statistics_constant(found);
	}
	return leave(reader, base_give_struct(statistics, &full, sizeof(full), "ioshape_statistics",
					      &reader->error));
}

IOSHAPE_EXPORT int ioshape_reader_find_record(struct ioshape_reader *reader, const char *name,
					      uint64_t *index)
{
	int ret = enter_reader(reader);

	if (!ret)
		ret = find_name(reader, reader->zip.directory.names, "record", record_count(reader),
				name, index);
	return leave(reader, ret);
}

/* Stops prefetching and returns the queue. */
static void stop_stream(struct ioshape_reader *reader)
{
	if (!reader->queue)
		return;
	io_stream_stop(reader->stream);
	save_return_queue(reader->context, reader->queue);
	reader->queue = NULL;
}

IOSHAPE_EXPORT void ioshape_reader_free(struct ioshape_reader *reader)
{
	if (!reader)
		return;
	/* In a forked child, the queue and the requests in flight belong to the parent. */
	if (reader->owner == getpid()) {
		stop_stream(reader);
		io_stream_free(reader->stream);
	}
	format_reader_close(&reader->zip);
	format_statistics_free(&reader->statistics);
	free(reader);
}

/* Returns the memory into which a call reads, if the caller declared it as fresh and it is large
 * enough; NULL otherwise. */
static struct base_fresh *fresh_of(struct ioshape_reader *reader, const struct format_range *ranges,
				   size_t count)
{
	struct base_extent *extents;
	struct base_fresh *fresh;
	uint64_t bytes = 0;
	size_t used = 0;

	for (size_t i = 0; i < count; i++)
		bytes += ranges[i].into ? ranges[i].bytes : 0;
	if (!reader->options.fresh_memory || bytes < BASE_FRESH_LEAST_BYTES ||
	    reader->expected >= MOST_STRETCHES)
		return NULL;
	/* If there is no memory for them, reading is only slower. */
	extents = reallocarray(NULL, count, sizeof(*extents));
	for (size_t i = 0; extents && i < count; i++)
		if (ranges[i].into)
			extents[used++] = (struct base_extent){
				(uintptr_t)ranges[i].into,
				(uintptr_t)ranges[i].into + ranges[i].bytes,
			};
	fresh = extents ? base_fresh_open(extents, used, MOST_STRETCHES - reader->expected) : NULL;
	free(extents);
	reader->expected += base_fresh_count(fresh);
	return fresh;
}

/* Provides the reader's stream and queue until end_reading(). */
static int begin_reading(struct ioshape_reader *reader)
{
	const struct format_reader *zip = &reader->zip;
	int ret = 0;

	if (!reader->stream)
		ret = io_stream_open(&reader->stream, &zip->input, format_reader_data_end(zip),
				     &reader->error);
	if (!ret && !reader->queue)
		ret = save_take_queue(reader->context, &reader->queue, &reader->error);
	return ret;
}

static void end_reading(struct ioshape_reader *reader, int code)
{
	if (code || io_stream_is_idle(reader->stream))
		stop_stream(reader);
}

static void fill_fresh(struct ioshape_reader *reader, const struct format_range *ranges,
		       size_t count)
{
	reader->fresh = fresh_of(reader, ranges, count);
	io_queue_fills(reader->queue, reader->fresh);
}

static void end_fresh(struct ioshape_reader *reader)
{
	io_queue_fills(reader->queue, NULL);
	base_fresh_close(reader->fresh);
	reader->fresh = NULL;
}

static int read_ranges(struct ioshape_reader *reader, const struct format_range *ranges,
		       size_t count, bool verify)
{
	const bool is_under_way = reader->is_prefetching && reader->queue;
	int ret;

	reader->is_prefetching = false;
	/* Blocks that were prefetched for another purpose are dropped. */
	if (!is_under_way)
		stop_stream(reader);
	ret = begin_reading(reader);
	if (ret)
		return ret;
	fill_fresh(reader, ranges, count);
	ret = format_reader_read(&reader->zip, reader->queue, is_under_way ? reader->stream : NULL,
				 ranges, count, verify, reader->options.progress,
				 reader->options.progress_user, &reader->error);
	end_fresh(reader);
	end_reading(reader, ret);
	return ret;
}

/* Reads bytes of the file, and prefetches the bytes behind them. */
static int read_onward(struct ioshape_reader *reader, uint64_t offset, void *into, size_t bytes)
{
	const struct format_range range = { .into = into, .bytes = bytes };
	int ret = begin_reading(reader);

	if (ret)
		return ret;
	fill_fresh(reader, &range, 1);
	ret = format_reader_read_file(&reader->zip, reader->queue, reader->stream, offset, into,
				      bytes, reader->options.verify != IOSHAPE_OFF,
				      reader->options.progress, reader->options.progress_user,
				      &reader->error);
	end_fresh(reader);
	end_reading(reader, ret);
	return ret;
}

int save_reader_prefetch(struct ioshape_reader *reader, uint64_t record)
{
	int ret = enter_reader(reader);

	if (!ret)
		ret = check_record(reader, record);
	if (ret)
		return leave(reader, ret);
	stop_stream(reader);
	if (base_without("prefetching"))
		return leave(reader, 0);
	ret = begin_reading(reader);
	if (ret)
		return leave(reader, ret);
	io_stream_prefetch(reader->stream, reader->queue,
			   reader->zip.directory.entries[record].data_offset);
	reader->is_prefetching = true;
	end_reading(reader, 0);
	return leave(reader, 0);
}

IOSHAPE_EXPORT int ioshape_reader_read(struct ioshape_reader *reader, uint64_t record,
				       uint64_t offset, void *into, size_t bytes)
{
	const struct ioshape_load_request range = { 0, offset, bytes, into };
	const struct format_entry *entry = NULL;
	int ret = enter_reader(reader);

	if (!ret)
		ret = check_readable(reader, record);
	if (!ret) {
		entry = &reader->zip.directory.entries[record];
		ret = check_range(reader, reader->zip.plain ? NULL : entry->name, entry->bytes,
				  &range);
	}
	if (!ret)
		ret = read_onward(reader, entry->data_offset + offset, into, bytes);
	return leave(reader, ret);
}

int save_reader_read_file(struct ioshape_reader *reader, uint64_t offset, void *into, size_t bytes)
{
	const struct ioshape_load_request range = { 0, offset, bytes, into };
	int ret = enter_reader(reader);

	if (!ret)
		ret = check_range(reader, NULL, reader->zip.input.bytes, &range);
	if (!ret)
		ret = read_onward(reader, offset, into, bytes);
	return leave(reader, ret);
}

const uint32_t *save_reader_checks(struct ioshape_reader *reader, uint64_t record, uint64_t *count)
{
	const struct format_reader *zip = &reader->zip;
	const uint32_t *checks = NULL;
	uint64_t bytes;
	int ret = enter_reader(reader);

	*count = 0;
	if (!ret)
		ret = check_readable(reader, record);
	if (!ret && zip->has_index) {
		bytes = zip->plain ? zip->input.bytes : zip->directory.entries[record].bytes;
		checks = zip->index.checks + zip->index.first_check[record];
		*count = bytes / zip->index.check_bytes + !!(bytes % zip->index.check_bytes);
	}
	leave(reader, ret);
	return checks;
}

/* ---- Tensors --------------------------------------------------------------------------------- */

static int enter_table(struct ioshape_reader *reader)
{
	const struct base_error *problem;
	int ret = enter_reader(reader);

	if (ret || has_table(reader))
		return ret;
	problem = &reader->zip.index_problem;
	return base_fail_reason_with(
		&reader->error, IOSHAPE_E_NO_TABLE, "read its records, or open it in Python",
		"\"%s\" has no table of tensors (%s)", reader->zip.input.path,
		problem->code ? problem->text : "it was not saved by ioshape_save_tensors()");
}

static int check_tensor(struct ioshape_reader *reader, uint64_t index)
{
	return check_number(reader, "tensors", reader->zip.index.tensor_count, index);
}

IOSHAPE_EXPORT int ioshape_reader_get_tensor(struct ioshape_reader *reader, uint64_t index,
					     struct ioshape_tensor_info *info)
{
	struct ioshape_tensor_info full = { .size = sizeof(full) };
	const struct format_tensor_row *row;
	int ret = enter_table(reader);

	if (!ret)
		ret = check_result(reader, info);
	if (!ret)
		ret = check_tensor(reader, index);
	if (ret)
		return leave(reader, ret);
	row = &reader->zip.index.tensors[index];
	full.name = row->name;
	full.dtype = (enum ioshape_dtype)row->dtype;
	full.dtype_name = format_dtype_of(row->dtype)->name;
	full.dims = row->dims;
	full.shape = row->shape;
	full.strides = row->strides;
	full.record = row->record;
	full.bytes = reader->zip.directory.entries[row->record].bytes;
	return leave(reader, base_give_struct(info, &full, sizeof(full), "ioshape_tensor_info",
					      &reader->error));
}

IOSHAPE_EXPORT int ioshape_reader_find_tensor(struct ioshape_reader *reader, const char *name,
					      uint64_t *index)
{
	int ret = enter_table(reader);

	if (!ret)
		ret = find_name(reader, reader->zip.index.names, "tensor",
				reader->zip.index.tensor_count, name, index);
	return leave(reader, ret);
}

static int make_range(struct ioshape_reader *reader, bool of_tensors,
		      const struct ioshape_load_request *request, struct format_range *range)
{
	const struct format_entry *entries = reader->zip.directory.entries;
	const struct format_tensor_row *row = NULL;
	uint64_t record = request->tensor;
	const char *name;
	int ret;

	ret = of_tensors ? check_tensor(reader, record) : check_readable(reader, record);
	if (ret)
		return ret;
	if (of_tensors) {
		row = &reader->zip.index.tensors[record];
		record = row->record;
	}
	*range = (struct format_range){ record, request->offset, request->bytes, request->into };
	name = row ? row->name : entries[record].name;
	return check_range(reader, reader->zip.plain ? NULL : name, entries[record].bytes, request);
}

static int load(struct ioshape_reader *reader, bool of_tensors,
		const struct ioshape_load_request *requests, size_t count)
{
	struct format_range *ranges;
	int ret = of_tensors ? enter_table(reader) : enter_reader(reader);

	if (!ret && count && !requests)
		ret = base_fail_reason(&reader->error, -EINVAL, "the array of %zu requests is NULL",
				       count);
	if (ret || !count)
		return leave(reader, ret);
	ranges = calloc(count, sizeof(*ranges));
	if (!ranges)
		return leave(reader,
			     base_no_memory(&reader->error, "requests", count * sizeof(*ranges)));
	for (size_t i = 0; !ret && i < count; i++)
		ret = make_range(reader, of_tensors, &requests[i], &ranges[i]);
	if (!ret)
		ret = read_ranges(reader, ranges, count, reader->options.verify != IOSHAPE_OFF);
	free(ranges);
	return leave(reader, ret);
}

IOSHAPE_EXPORT int ioshape_reader_load(struct ioshape_reader *reader,
				       const struct ioshape_load_request *requests, size_t count)
{
	return load(reader, true, requests, count);
}

IOSHAPE_EXPORT int ioshape_reader_load_records(struct ioshape_reader *reader,
					       const struct ioshape_load_request *requests,
					       size_t count)
{
	return load(reader, false, requests, count);
}

IOSHAPE_EXPORT int ioshape_reader_get_metadata(struct ioshape_reader *reader,
					       struct ioshape_metadata *metadata)
{
	struct ioshape_metadata full = { .size = sizeof(full) };
	int ret = enter_reader(reader);

	if (!ret)
		ret = check_result(reader, metadata);
	if (ret)
		return leave(reader, ret);
	if (reader->zip.has_index)
		full = reader->zip.index.metadata;
	return leave(reader, base_give_struct(metadata, &full, sizeof(full), "ioshape_metadata",
					      &reader->error));
}

/* ---- Verifying ------------------------------------------------------------------------------- */

/* Compares the checksums of all records, if `data`, and checks all headers. */
static int verify(struct ioshape_reader *reader, bool data)
{
	const uint64_t count = reader->zip.plain ? 1 : record_count(reader);
	struct format_range *ranges;
	int ret = 0;

	ranges = calloc(MAX(count, 1), sizeof(*ranges));
	if (!ranges)
		return base_no_memory(&reader->error, "verifying", count * sizeof(*ranges));
	for (uint64_t i = 0; i < count; i++)
		ranges[i] = (struct format_range){
			.record = i,
			.bytes = reader->zip.directory.entries[i].bytes,
		};
	if (data && count)
		ret = read_ranges(reader, ranges, count, true);
	if (!ret)
		ret = format_reader_check_headers(&reader->zip, &reader->error);
	free(ranges);
	return ret;
}

static int refuse_to_verify(struct ioshape_reader *reader)
{
	const char *path = reader->zip.input.path;

	if (reader->beside.code)
		return base_propagate(&reader->error, &reader->beside);
	if (reader->zip.plain)
		return base_fail_reason_with(
			&reader->error, -ENODATA,
			"write it with checksums (option checksums of an atomic file)",
			"cannot verify \"%s\": it has no checksums", path);
	return base_fail_reason_with(&reader->error, -ENODATA, "save it again with checksums",
				     "cannot verify \"%s\": it was written without checksums "
				     "(torch.serialization.set_crc32_options)",
				     path);
}

IOSHAPE_EXPORT int ioshape_reader_verify(struct ioshape_reader *reader, int data)
{
	int ret = enter_reader(reader);

	/* Damaged checksums hide damage in the file, even if an archive has checksums of its
	 * own. */
	if (!ret && reader->beside.code && reader->beside.code != -ENODATA)
		ret = base_propagate(&reader->error, &reader->beside);
	if (!ret && data && reader->zip.no_checksums)
		ret = refuse_to_verify(reader);
	if (!ret)
		ret = verify(reader, data);
	return leave_reader(reader, "verify", ret);
}

/* ---- Opening --------------------------------------------------------------------------------- */

/* Decides whether reads share the page cache with other processes. These need not belong to a job
 * that a launcher describes, so the reader also tries to claim the file. */
static void share_input(const struct ioshape_context *context,
			const struct ioshape_reader_options *options, struct io_input *input)
{
	input->may_share = context->config.direct != IOSHAPE_DIRECT_REQUIRE &&
			   options->shared != IOSHAPE_OFF;
	input->shared = input->may_share && (options->shared == IOSHAPE_ON ||
					     context->has_neighbours || !io_input_claim(input));
}

static int open_reader(struct ioshape_context *context, const char *path,
		       const struct ioshape_reader_options *options, struct ioshape_reader **out,
		       struct base_error *error)
{
	struct ioshape_reader *reader = calloc(1, sizeof(*reader));
	enum ioshape_direct direct = context->config.direct;
	int ret;

	if (!reader)
		return base_no_memory(error, "a reader", sizeof(*reader));
	if (context->config.engine == IOSHAPE_ENGINE_BUFFERED)
		direct = IOSHAPE_DIRECT_OFF;
	reader->context = context;
	reader->owner = context->owner;
	reader->options = *options;
	if (options->any_format)
		ret = open_any_format(reader, path, options, direct, error);
	else
		ret = format_reader_open(&reader->zip, path, options->file_offset,
					 options->file_bytes, direct, error);
	if (ret) {
		free(reader);
		return ret;
	}
	/* The file can be read, but not verified, and the operator must know that. */
	if (reader->beside.code && reader->beside.code != -ENODATA)
		base_log(&context->log, IOSHAPE_LOG_WARNING, "%s", reader->beside.text);
	share_input(context, options, &reader->zip.input);
	if (!options->file_offset && !options->file_bytes)
		remember(reader, path);
	*out = reader;
	return 0;
}

IOSHAPE_EXPORT int ioshape_reader_open(struct ioshape_context *context, const char *path,
				       const struct ioshape_reader_options *given,
				       struct ioshape_reader **out)
{
	struct ioshape_reader_options options;
	struct base_error error = { 0 };
	int ret;

	if (!out)
		return base_null_argument("load");
	*out = NULL;
	ret = save_enter_path(context, path, &options, sizeof(options), given,
			      "ioshape_reader_options", &error);
	if (!ret)
		ret = open_reader(context, path, &options, out, &error);
	return base_return(ret, "load", path, &error);
}
