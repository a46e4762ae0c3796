/* SPDX-License-Identifier: Apache-2.0 */
/* A file on the calling thread: from the free space and the slot to the commit and the report. */
#include "save/file/file.h"

#include <errno.h>
#include <stdlib.h>

/* Tensors that do not lie as they are saved are packed in pieces of this size. */
#define PACK_BYTES (256 * KIB)

/* The caller's function is asked for so much at a time: each call to a device costs its latency. */
#define FETCH_BYTES (4 * MIB)

/* ---- Any file -------------------------------------------------------------------------------- */

/*
 * All of it, on stable storage. When little is still under way, whoever writes next may begin: the
 * storage would idle while the slowest target finishes, and while the file gets its name.
 */
static int write_now(const struct save_file *file, struct save_output *output,
		     struct save_slot *slot, const struct ring_file_options *options,
		     struct base_error *error)
{
	bool is_little = false;
	int ret = save_output_open(output, file->path, options, error);

	if (!ret)
		ret = file->put(file->user, output->file, error);
	if (!ret)
		ret = ring_writer_end(output->file, &is_little, error);
	if (!ret && is_little && slot)
		save_slot_release(slot);
	return ret ? ret : ring_writer_finish(output->file, error);
}

static int write_in_slot(const struct save_file *file, struct save_output *output,
			 struct save_slot *slot, const struct save_watch *watch,
			 struct base_error *error)
{
	struct ring_file_options options = file->options;
	int ret;

	options.before_block = save_slot_pass;
	options.before_block_user = slot;
	ret = save_slot_take(slot, file->context, file->absolute, &output->found, &options, watch,
			     error);
	if (ret)
		return ret;
	options.place = save_slot_place(slot, &options.places);
	return write_now(file, output, slot, &options, error);
}

static int write_if_it_fits(const struct save_file *file, struct save_output *output,
			    const struct save_watch *watch, struct ioshape_report *report,
			    struct base_error *error)
{
	const struct save_space space = {
		.context = file->context,
		.path = file->absolute,
		.found = &output->found,
		.needed_bytes = file->needed_bytes,
	};
	struct save_slot slot;
	int ret = 0;

	save_output_find(output);
	if (space.needed_bytes)
		ret = save_space_check(&space, &output->notes, error);
	if (!ret && file->without_slot) {
		ret = write_now(file, output, NULL, &file->options, error);
	} else if (!ret) {
		ret = write_in_slot(file, output, &slot, watch, error);
		if (space.needed_bytes)
			ret = save_space_explain(&space, ret, error);
		/*
		 * The bytes are on stable storage, or the slot was handed over before. What is left
		 * may have to wait for earlier saves to the same path, which wait for slots.
		 */
		save_slot_release(&slot);
		save_slot_report(&slot, &output->notes, report);
	}
	report->skipped = ret == IOSHAPE_E_SKIPPED;
	if (report->skipped)
		save_space_note_skip(&output->notes, error);
	return ret;
}

int save_write_file(const struct save_file *file, const struct save_watch *watch,
		    struct save_order *order, struct ioshape_report *report,
		    struct base_error *error)
{
	struct save_output output = {
		.context = file->context,
		.path = file->absolute,
		.in_new_directory = file->in_new_directory,
		.checksums = file->checksums,
	};
	int ret;

	if (file->notes)
		output.notes = *file->notes;
	ret = write_if_it_fits(file, &output, watch, report, error);
	ret = save_output_commit(&output, order, ret, report, error);
	file->free(file->user, output.file);
	output.file = NULL;
	save_output_close(&output);
	return ret;
}

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
	return zip_writer_put(zip, data, bytes, error);
}

int save_write_records(struct zip_writer *zip, const struct save_plan *plan,
		       const struct save_source *source, struct save_compare *compare,
		       struct base_error *error)
{
	const struct zip_entry *entries;
	uint64_t count;
	int ret = 0;

	for (size_t i = 0; !ret && i < plan->count; i++) {
		const struct save_record *record = &plan->records[i];

		ret = zip_writer_begin(zip, record->name, record->bytes, record->alignment, error);
		if (!ret)
			ret = bring_record(plan, i, source, put_in_archive, zip, error);
		if (!ret)
			ret = zip_writer_end(zip, error);
	}
	if (!ret && compare) {
		entries = zip_writer_entries(zip, &count);
		ret = save_compare_records(compare, entries, count, error);
	}
	return ret ? ret : zip_writer_finish(zip, &plan->index, error);
}

struct archive {
	const struct save_plan *plan;
	const struct save_source *source;
	const char *path;
	struct save_compare compare;
	struct zip_writer *zip;
	struct save_checksums checksums; /* of a safetensors file, if they are wanted */
};

static int put_archive(void *user, struct ring_writer *file, struct base_error *error)
{
	struct archive *archive = user;
	int ret = zip_writer_new(&archive->zip, zip_sink_of_file(file), archive->path, error);

	if (ret)
		return ret;
	archive->source->to_file(archive->source->user, file);
	return save_write_records(archive->zip, archive->plan, archive->source, &archive->compare,
				  error);
}

/* ---- A safetensors file ---------------------------------------------------------------------- */

/* The file, and the checksum of the record that is on its way to it. */
struct segment {
	struct ring_writer *file;
	struct save_checksums *checksums; /* of the file's blocks; NULL: none */
	uint32_t crc32;
};

static int put_in_segment(void *to, const void *data, size_t bytes, struct base_error *error)
{
	struct segment *segment = to;

	if (segment->checksums)
		return save_checksums_put(segment->checksums, segment->file, data, bytes,
					  &segment->crc32, error);
	return ring_writer_put(segment->file, data, bytes, &segment->crc32, error);
}

static int put_safetensors(void *user, struct ring_writer *file, struct base_error *error)
{
	static char no_name[] = ""; /* by its name a pickle is told from tensors, which these are */
	struct archive *archive = user;
	const struct save_plan *plan = archive->plan;
	struct zip_entry *entries = calloc(plan->count, sizeof(*entries));
	int ret = 0;

	if (!entries)
		return base_no_memory(error, "checksums", plan->count * sizeof(*entries));
	archive->source->to_file(archive->source->user, file);
	for (size_t i = 0; !ret && i < plan->count; i++) {
		struct segment segment = {
			.file = file,
			.checksums = plan->checksums ? &archive->checksums : NULL,
		};

		ret = bring_record(plan, i, archive->source, put_in_segment, &segment, error);
		entries[i].name = no_name;
		entries[i].bytes = plan->records[i].bytes;
		entries[i].crc32 = segment.crc32;
	}
	if (!ret)
		ret = save_compare_records(&archive->compare, entries + plan->own,
					   plan->count - plan->own, error);
	free(entries);
	if (!ret)
		ret = save_checksums_end(&archive->checksums, error);
	return ret;
}

/* ---- Either ---------------------------------------------------------------------------------- */

static void free_archive(void *user, struct ring_writer *file)
{
	struct archive *archive = user;

	zip_writer_free(archive->zip);
	ring_writer_free(file);
}

int save_write(struct ioshape_context *context, const char *path, const struct save_plan *plan,
	       const struct save_source *source, const struct ring_file_options *options,
	       const struct save_watch *watch, struct save_order *order,
	       struct ioshape_report *report, struct base_error *error)
{
	struct archive archive = {
		.plan = plan,
		.source = source,
		.path = path,
		.compare = { .context = context, .path = order->path },
		.checksums = { .beside = true },
	};
	struct save_file file = {
		.context = context,
		.path = path,
		.absolute = order->path,
		.options = *options,
		.needed_bytes = plan->expected_bytes,
		.checksums = plan->checksums ? &archive.checksums : NULL,
		.put = plan->safetensors ? put_safetensors : put_archive,
		.free = free_archive,
		.user = &archive,
	};
	int ret;

	file.options.expected_bytes = plan->expected_bytes;
	file.options.exact = true;
	file.options.progress_total = plan->expected_bytes;
	ret = save_write_file(&file, watch, order, report, error);
	base_buffer_free(&archive.checksums.crcs);
	save_compare_end(&archive.compare, !ret && !order->overtaken, report);
	report->tensor_bytes = plan->payload_bytes;
	return ret;
}

/* ---- The caller's own memory ----------------------------------------------------------------- */

void save_direct_to_file(void *user, struct ring_writer *file)
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
		ret = ring_writer_room(direct->file, to, &room, error);
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
