/* SPDX-License-Identifier: Apache-2.0 */
/* The public handle for reading records and tensors. */
#include "save/file/file.h"
#include "save/load/load.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

/*
 * Pieces of fresh memory from this size on are worth huge pages. Each costs the process one or two
 * of the 65,530 mappings it may have: some thousands are enough.
 */
#define LARGE_PIECE_BYTES (4 * MIB)
#define MOST_LARGE_PIECES 8192u

struct ioshape_reader {
	struct ioshape_context *context;
	struct zip_reader zip;
	struct ioshape_reader_options options;
	struct base_error error;    /* of the last call that failed */
	struct ring_stream *stream; /* of calls that read onward; made at the first */
	struct ring_lane *lane;     /* the stream's, while something is read ahead */
	unsigned expected;          /* pieces of fresh memory that huge pages were asked for */
	pid_t owner;
};

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
		ret = save_open_any_format(&reader->zip, path, options, direct, error);
	else
		ret = zip_reader_open(&reader->zip, path, options->file_offset, options->file_bytes,
				      direct, error);
	if (ret) {
		free(reader);
		return ret;
	}
	reader->options.checksums = NULL; /* borrowed */
	if (!options->file_offset && !options->file_bytes && !reader->zip.plain)
		save_compare_loaded(context, path, &reader->zip);
	*out = reader;
	return 0;
}

void save_reader_is_part_of(const struct ioshape_reader *reader, const char *path)
{
	save_compare_loaded(reader->context, path, &reader->zip);
}

IOSHAPE_EXPORT int ioshape_reader_open(struct ioshape_context *context, const char *path,
				       const struct ioshape_reader_options *given,
				       struct ioshape_reader **out)
{
	struct ioshape_reader_options options;
	struct base_error error = { 0 };
	int ret;

	if (!out)
		return base_missing("load");
	*out = NULL;
	ret = save_enter_path(context, path, &options, sizeof(options), given,
			      "ioshape_reader_options", &error);
	if (!ret)
		ret = open_reader(context, path, &options, out, &error);
	return base_leave(ret, "load", path, &error);
}

/* First in every call that can fail. Forgets the last failure. */
static int enter(struct ioshape_reader *reader)
{
	if (!reader)
		return -EINVAL;
	memset(&reader->error, 0, sizeof(reader->error));
	return save_enter(reader->context, &reader->error);
}

/* Last in every call that can fail. */
static int leave_as(struct ioshape_reader *reader, const char *operation, int code)
{
	return reader ? base_leave(code, operation, reader->zip.input.path, &reader->error) :
			base_missing(operation);
}

static int leave(struct ioshape_reader *reader, int code)
{
	return leave_as(reader, "load", code);
}

static int check_result(struct ioshape_reader *reader, const void *result)
{
	if (result)
		return 0;
	return base_refuse(&reader->error, -EINVAL, "nowhere to put what was asked about %s",
			   reader->zip.input.path);
}

/* ---- Records --------------------------------------------------------------------------------- */

/* The index is bookkeeping of the container, not a record of the user's; it is the last if there is
 * one. */
static uint64_t record_count(const struct ioshape_reader *reader)
{
	if (reader->zip.plain)
		return 0;
	return reader->zip.directory.count - reader->zip.has_index;
}

static bool has_table(const struct ioshape_reader *reader)
{
	return reader->zip.has_index && reader->zip.index.has_table;
}

static int check_number(struct ioshape_reader *reader, const char *kinds, uint64_t count,
			uint64_t index)
{
	if (index < count)
		return 0;
	return base_refuse(&reader->error, -ENOENT,
			   "\"%s\" has %llu %s, so there is no number %llu", reader->zip.input.path,
			   (unsigned long long)count, kinds, (unsigned long long)index);
}

static int check_record(struct ioshape_reader *reader, uint64_t index)
{
	return check_number(reader, "records", record_count(reader), index);
}

/* Puts the number of a name into *index. */
static int find_name(struct ioshape_reader *reader, const struct zip_names *names, const char *kind,
		     uint64_t count, const char *name, uint64_t *index)
{
	int ret = check_result(reader, index);

	if (ret || (name && zip_names_find(names, name, strlen(name), index) && *index < count))
		return ret;
	name = name ? name : "";
	base_refuse(&reader->error, -ENOENT, "\"%s\" has no %s \"%s\"", reader->zip.input.path,
		    kind, name);
	base_error_in_record(&reader->error, name);
	return -ENOENT;
}

/* Bytes to be read lie in the record or tensor `name`, or without a name in the file, which has
 * `size`, and there is memory for them. */
static int check_range(struct ioshape_reader *reader, const char *name, uint64_t size,
		       const struct ioshape_load_request *range)
{
	const char *path = reader->zip.input.path;
	int ret = 0;

	if (range->offset > size || range->bytes > size - range->offset)
		ret = base_refuse(&reader->error, -ERANGE,
				  "cannot read \"%s\": \"%s\" has %llu bytes, and %llu from offset "
				  "%llu are not all in it",
				  path, name ? name : path, (unsigned long long)size,
				  (unsigned long long)range->bytes,
				  (unsigned long long)range->offset);
	else if (range->bytes && !range->into)
		ret = base_refuse(&reader->error, -EINVAL,
				  "cannot read \"%s\": no memory was given", path);
	if (ret && name)
		base_error_in_record(&reader->error, name);
	return ret;
}

IOSHAPE_EXPORT int ioshape_reader_get_info(struct ioshape_reader *reader,
					   struct ioshape_reader_info *info)
{
	struct ioshape_reader_info full = { .size = sizeof(full) };
	int ret = enter(reader);

	if (!ret)
		ret = check_result(reader, info);
	if (ret)
		return leave(reader, ret);
	full.file_bytes = reader->zip.input.bytes;
	full.records = record_count(reader);
	full.has_table = has_table(reader);
	full.tensors = full.has_table ? reader->zip.index.tensor_count : 0;
	full.torch_zip = !reader->zip.plain;
	full.checksums = !reader->zip.no_checksums;
	return leave(reader, base_give_struct(info, &full, sizeof(full), "ioshape_reader_info",
					      &reader->error));
}

IOSHAPE_EXPORT int ioshape_reader_get_record(struct ioshape_reader *reader, uint64_t index,
					     struct ioshape_record_info *info)
{
	struct ioshape_record_info full = { .size = sizeof(full) };
	const struct zip_entry *entry;
	int ret = enter(reader);

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

IOSHAPE_EXPORT int ioshape_reader_find_record(struct ioshape_reader *reader, const char *name,
					      uint64_t *index)
{
	int ret = enter(reader);

	if (!ret)
		ret = find_name(reader, reader->zip.directory.names, "record", record_count(reader),
				name, index);
	return leave(reader, ret);
}

/* The nil engine drops what is written; it has nothing to read with. */
static bool needs_own_lane(const struct ioshape_reader *reader)
{
	return reader->context->config.engine == IOSHAPE_ENGINE_NIL;
}

static int take_lane(struct ioshape_reader *reader, struct ring_lane **lane)
{
	struct ring_config config = reader->context->config;

	if (!needs_own_lane(reader))
		return save_take_lane(reader->context, lane, &reader->error);
	config.engine = IOSHAPE_ENGINE_AUTO;
	return ring_lane_open(lane, &config, &reader->error);
}

static void return_lane(struct ioshape_reader *reader, struct ring_lane *lane)
{
	if (needs_own_lane(reader))
		ring_lane_close(lane);
	else
		save_return_lane(reader->context, lane);
}

/* Nothing is read ahead any more. */
static void stop_stream(struct ioshape_reader *reader)
{
	if (!reader->lane)
		return;
	ring_stream_stop(reader->stream);
	return_lane(reader, reader->lane);
	reader->lane = NULL;
}

IOSHAPE_EXPORT void ioshape_reader_free(struct ioshape_reader *reader)
{
	if (!reader)
		return;
	/* In a child the lane, and what is in flight, are the parent's. */
	if (reader->owner == base_pid()) {
		stop_stream(reader);
		ring_stream_free(reader->stream);
	}
	zip_reader_close(&reader->zip);
	free(reader);
}

static void expect_fill(struct ioshape_reader *reader, void *into, uint64_t bytes)
{
	if (!reader->options.fresh_memory || !into || bytes < LARGE_PIECE_BYTES)
		return;
	if (reader->expected < MOST_LARGE_PIECES)
		reader->expected += base_expect_fill(into, bytes);
}

static int read_ranges(struct ioshape_reader *reader, const struct zip_range *ranges, size_t count,
		       bool verify)
{
	struct ring_lane *lane;
	int ret;

	for (size_t i = 0; i < count; i++)
		expect_fill(reader, ranges[i].into, ranges[i].bytes);
	/* One reader uses one lane: what was read ahead is given up for it. */
	stop_stream(reader);
	ret = take_lane(reader, &lane);
	if (!ret)
		ret = zip_reader_read(&reader->zip, lane, ranges, count, verify,
				      reader->options.progress, reader->options.progress_user,
				      &reader->error);
	return_lane(reader, lane);
	return ret;
}

/* Bytes of the file; what follows them is read ahead. */
static int read_onward(struct ioshape_reader *reader, uint64_t offset, void *into, size_t bytes)
{
	struct zip_reader *zip = &reader->zip;
	int ret = 0;

	if (!reader->stream)
		ret = ring_stream_open(&reader->stream, &zip->input, zip_reader_data_end(zip),
				       &reader->error);
	if (!ret && !reader->lane)
		ret = take_lane(reader, &reader->lane);
	if (ret)
		return ret;
	expect_fill(reader, into, bytes);
	ret = zip_reader_read_file(zip, reader->lane, reader->stream, offset, into, bytes,
				   reader->options.verify != IOSHAPE_OFF, reader->options.progress,
				   reader->options.progress_user, &reader->error);
	if (ret || ring_stream_is_idle(reader->stream))
		stop_stream(reader);
	return ret;
}

IOSHAPE_EXPORT int ioshape_reader_read(struct ioshape_reader *reader, uint64_t record,
				       uint64_t offset, void *into, size_t bytes)
{
	const struct ioshape_load_request range = { 0, offset, bytes, into };
	const struct zip_entry *entry = NULL;
	int ret = enter(reader);

	if (!ret)
		ret = check_record(reader, record);
	if (!ret) {
		entry = &reader->zip.directory.entries[record];
		ret = check_range(reader, entry->name, entry->bytes, &range);
	}
	if (!ret)
		ret = read_onward(reader, entry->data_offset + offset, into, bytes);
	return leave(reader, ret);
}

IOSHAPE_EXPORT int ioshape_reader_read_file(struct ioshape_reader *reader, uint64_t offset,
					    void *into, size_t bytes)
{
	const struct ioshape_load_request range = { 0, offset, bytes, into };
	int ret = enter(reader);

	if (!ret)
		ret = check_range(reader, NULL, reader->zip.input.bytes, &range);
	if (!ret)
		ret = read_onward(reader, offset, into, bytes);
	return leave(reader, ret);
}

/* ---- Verifying ------------------------------------------------------------------------------- */

/* What of a file is read. */
struct sample {
	const struct ioshape_reader *reader;
	double share;
	uint64_t pieces;
};

/* Records, or the one that is all of a plain file. */
static uint64_t entry_count(const struct ioshape_reader *reader)
{
	return reader->zip.plain ? 1 : record_count(reader);
}

/*
 * What has a checksum of its own: a block or a record. If all is read, whole records are fewer. An
 * empty record is a piece, too, since its checksum can be wrong.
 */
static uint64_t piece_bytes(const struct sample *sample, uint64_t record)
{
	const struct zip_reader *zip = &sample->reader->zip;

	return zip->has_index && sample->share < 1 ? zip->index.check_bytes :
						     zip->directory.entries[record].bytes;
}

static uint64_t piece_count(const struct sample *sample, uint64_t record)
{
	const uint64_t bytes = sample->reader->zip.directory.entries[record].bytes;

	return bytes ? (bytes - 1) / piece_bytes(sample, record) + 1 : 1;
}

static struct zip_range piece(const struct sample *sample, uint64_t record, uint64_t number)
{
	const uint64_t bytes = sample->reader->zip.directory.entries[record].bytes;
	const uint64_t length = piece_bytes(sample, record), offset = number * length;

	return (struct zip_range){ record, offset, MIN(length, bytes - offset), NULL };
}

/* Evenly spread, from a random one on: whoever looks often has looked at all. */
static size_t choose(const struct sample *sample, struct zip_range *ranges, size_t room)
{
	const double step = 1 / sample->share, pieces = (double)sample->pieces;
	double next = (double)(base_random() >> 11) / (double)(1ull << 53) * MIN(step, pieces);
	uint64_t before = 0;
	size_t count = 0;

	for (uint64_t record = 0; record < entry_count(sample->reader); record++) {
		const uint64_t own = piece_count(sample, record);

		for (; count < room && next < (double)(before + own); next += step)
			ranges[count++] = piece(sample, record, (uint64_t)next - before);
		before += own;
	}
	return count;
}

static int verify_sample(struct ioshape_reader *reader, double share)
{
	struct sample sample = { .reader = reader, .share = share };
	struct zip_range *ranges;
	size_t count;
	int ret;

	for (uint64_t record = 0; record < entry_count(reader); record++)
		sample.pieces += piece_count(&sample, record);
	count = (size_t)((double)sample.pieces * share) + 1;
	ranges = calloc(count, sizeof(*ranges));
	if (!ranges)
		return base_no_memory(&reader->error, "verifying", count * sizeof(*ranges));
	count = share > 0 ? choose(&sample, ranges, count) : 0;
	ret = count ? read_ranges(reader, ranges, count, true) : 0;
	if (!ret)
		ret = zip_reader_check_headers(&reader->zip, &reader->error);
	free(ranges);
	return ret;
}

static int refuse_to_verify(struct ioshape_reader *reader)
{
	const char *path = reader->zip.input.path;

	if (reader->zip.plain)
		return base_refuse(&reader->error, -ENODATA,
				   "cannot verify \"%s\": no checksums of it are known" BASE_REMEDY
				   "write it with them (checksums of an atomic file)",
				   path);
	return base_refuse(&reader->error, -ENODATA,
			   "cannot verify \"%s\": it was written without checksums "
			   "(torch.serialization.set_crc32_options)" BASE_REMEDY
			   "save it again with them",
			   path);
}

IOSHAPE_EXPORT int ioshape_reader_verify(struct ioshape_reader *reader, double share)
{
	int ret = enter(reader);

	if (!ret && !(share >= 0 && share <= 1))
		ret = base_refuse(&reader->error, -EINVAL,
				  "cannot verify a share of %g of a file" BASE_REMEDY
				  "give one from 0 to 1",
				  share);
	if (!ret && share > 0 && reader->zip.no_checksums)
		ret = refuse_to_verify(reader);
	if (!ret)
		ret = verify_sample(reader, share);
	return leave_as(reader, "verify", ret);
}

/* ---- Tensors --------------------------------------------------------------------------------- */

static int enter_table(struct ioshape_reader *reader)
{
	const struct base_error *problem;
	int ret = enter(reader);

	if (ret || has_table(reader))
		return ret;
	problem = &reader->zip.index_problem;
	return base_refuse(&reader->error, IOSHAPE_E_NO_TABLE,
			   "\"%s\" has no table of tensors (%s)" BASE_REMEDY
			   "read its records, or open it in Python",
			   reader->zip.input.path,
			   problem->code ? problem->text :
					   "it was not saved by ioshape_save_tensors()");
}

static int check_tensor(struct ioshape_reader *reader, uint64_t index)
{
	return check_number(reader, "tensors", reader->zip.index.tensor_count, index);
}

IOSHAPE_EXPORT int ioshape_reader_get_tensor(struct ioshape_reader *reader, uint64_t index,
					     struct ioshape_tensor_info *info)
{
	struct ioshape_tensor_info full = { .size = sizeof(full) };
	const struct zip_tensor_row *row;
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
	full.dtype_name = zip_dtype_of(row->dtype)->name;
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

static int make_range(struct ioshape_reader *reader, const struct ioshape_load_request *request,
		      struct zip_range *range)
{
	const struct zip_tensor_row *row;
	int ret = check_tensor(reader, request->tensor);

	if (ret)
		return ret;
	row = &reader->zip.index.tensors[request->tensor];
	*range = (struct zip_range){ row->record, request->offset, request->bytes, request->into };
	return check_range(reader, row->name, reader->zip.directory.entries[row->record].bytes,
			   request);
}

IOSHAPE_EXPORT int ioshape_reader_load(struct ioshape_reader *reader,
				       const struct ioshape_load_request *requests, size_t count)
{
	struct zip_range *ranges;
	int ret = enter_table(reader);

	if (!ret && count && !requests)
		ret = base_refuse(&reader->error, -EINVAL,
				  "%zu requests were announced, but none given", count);
	if (ret || !count)
		return leave(reader, ret);
	ranges = calloc(count, sizeof(*ranges));
	if (!ranges)
		return leave(reader,
			     base_no_memory(&reader->error, "requests", count * sizeof(*ranges)));
	for (size_t i = 0; !ret && i < count; i++)
		ret = make_range(reader, &requests[i], &ranges[i]);
	if (!ret)
		ret = read_ranges(reader, ranges, count, reader->options.verify != IOSHAPE_OFF);
	free(ranges);
	return leave(reader, ret);
}

IOSHAPE_EXPORT int ioshape_reader_get_metadata(struct ioshape_reader *reader,
					       struct ioshape_metadata *metadata)
{
	struct ioshape_metadata full = { .size = sizeof(full) };
	int ret = enter(reader);

	if (!ret)
		ret = check_result(reader, metadata);
	if (ret)
		return leave(reader, ret);
	if (reader->zip.has_index)
		full = reader->zip.index.metadata;
	return leave(reader, base_give_struct(metadata, &full, sizeof(full), "ioshape_metadata",
					      &reader->error));
}
