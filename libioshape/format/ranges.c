/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Reading ranges of records: in the order of the file's bytes, block by block, checksums compared
 * on the way.
 *
 * A block that is wanted only in part is read around the wanted part as well, into nowhere, for the
 * sake of its checksum. Ranges that overlap are read one after the other. So no memory is needed
 * for data, and that for bookkeeping is bounded by one batch.
 */
#define _GNU_SOURCE
#include "format/format.h"
#include "format/layout.h"

#include <errno.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

/* Pieces in a batch: 4 GiB of blocks, so that the pause between batches does not show. */
#define MOST_PIECES 4096u
/* The unit of reading where there are no checksums of blocks. */
#define PLAIN_BLOCK_BYTES (4 * MIB)

/* The record of a range that lies between records: its offset is the file's, and nothing is known
 * about its bytes. */
#define NO_RECORD UINT64_MAX

/* How the bytes of a record are verified. */
enum mode {
	MODE_BLOCKS, /* against the checksums of its blocks */
	MODE_WHOLE,  /* against the checksum of the record, all of which is wanted */
	MODE_PLAIN   /* not at all */
};

/* What belongs to a piece: pieces from one that begins a check to one that ends it are verified
 * together. */
struct note {
	uint64_t record;
	uint64_t offset; /* in the record, of what is verified */
	uint64_t bytes;
	uint32_t crc32; /* as it should be */
	bool begins, ends;
};

struct job {
	const struct format_reader *reader;
	struct io_lane *lane;
	struct io_stream *stream; /* NULL: nothing is read ahead of the last range */
	const struct format_range *ranges;
	bool verify;
	struct base_error *error;

	size_t *order; /* ranges that are not empty, by where they begin in the file */
	size_t order_count;
	size_t *later; /* those of a record that wait for another pass over it */

	struct io_piece *pieces; /* the batch */
	struct note *notes;      /* to each piece */
	size_t piece_count, room;
	uint32_t crc; /* of the check that is under way, which may span batches */

	ioshape_progress_fn progress;
	void *progress_user;
	bool counting;  /* nothing is read: bytes are added to `total` */
	uint64_t total; /* bytes that will be read, if there is a callback */
	uint64_t done;  /* of earlier batches */
	uint64_t told;  /* of which the callback knows */
};

/* ---- Batches --------------------------------------------------------------------------------- */

static int tell(void *user, enum ioshape_phase phase, uint64_t done_bytes, uint64_t total_bytes)
{
	struct job *job = user;

	(void)total_bytes; /* of the batch */
	job->told = job->done + done_bytes;
	return job->progress(job->progress_user, phase, job->told, job->total);
}

static int damaged(const struct job *job, const struct note *note)
{
	const struct format_entry *entry = &job->reader->directory.entries[note->record];
	char shown[FORMAT_SHOWN_NAME_BYTES];

	if (job->reader->plain) {
		base_refuse_with(job->error, IOSHAPE_E_DAMAGED, "use another copy",
				 "\"%s\" is damaged: the checksum of the %s at offset %" PRIu64
				 " is wrong",
				 job->reader->input.path, BASE_SIZE(note->bytes), note->offset);
		base_error_at(job->error, note->offset);
		return IOSHAPE_E_DAMAGED;
	}
	base_refuse_with(job->error, IOSHAPE_E_DAMAGED, "use another copy or an older checkpoint",
			 "\"%s\" is damaged: the checksum of record '%s' is wrong within the %s at "
			 "offset %" PRIu64 " (offset %" PRIu64 " of the file)",
			 job->reader->input.path,
			 format_show_name(shown, entry->name, entry->name_bytes),
			 BASE_SIZE(note->bytes), note->offset, entry->data_offset + note->offset);
	base_error_in_record(job->error, shown);
	base_error_at(job->error, entry->data_offset + note->offset);
	return IOSHAPE_E_DAMAGED;
}

static int compare_checksums(struct job *job)
{
	const struct io_piece *piece;
	const struct note *note;

	for (size_t i = 0; i < job->piece_count; i++) {
		piece = &job->pieces[i];
		note = &job->notes[i];
		if (!piece->want_crc)
			continue;
		job->crc = note->begins ? piece->crc :
					  base_crc32_combine(job->crc, piece->crc, piece->bytes);
		if (note->ends && job->crc != note->crc32)
			return damaged(job, note);
	}
	return 0;
}

static int flush(struct job *job)
{
	int ret = 0;

	if (job->piece_count && job->stream)
		ret = io_read_onward(job->stream, job->lane, job->pieces, job->piece_count,
				     job->progress ? tell : NULL, job, job->error);
	else if (job->piece_count)
		ret = io_read(job->lane, &job->reader->input, job->pieces, job->piece_count,
			      job->progress ? tell : NULL, job, job->error);
	if (!ret)
		ret = compare_checksums(job);
	if (ret)
		return ret;
	for (size_t i = 0; i < job->piece_count; i++)
		job->done += job->pieces[i].bytes;
	job->piece_count = 0;
	return 0;
}

/* Makes sure that there is room for one more: in larger memory, or behind a batch that has been
 * read. */
static int make_room(struct job *job)
{
	const size_t room = job->room ? 2 * job->room : 64;
	void *pieces, *notes;

	if (job->piece_count < job->room)
		return 0;
	if (job->room == MOST_PIECES)
		return flush(job);
	pieces = reallocarray(job->pieces, room, sizeof(*job->pieces));
	job->pieces = pieces ? pieces : job->pieces;
	notes = reallocarray(job->notes, room, sizeof(*job->notes));
	job->notes = notes ? notes : job->notes;
	if (!pieces || !notes)
		return base_no_memory(job->error, "a batch of reads",
				      room * (sizeof(*job->pieces) + sizeof(*job->notes)));
	job->room = room;
	return 0;
}

static int add_piece(struct job *job, const struct io_piece *piece, const struct note *note)
{
	int ret;

	if (job->counting) {
		job->total += piece->bytes;
		return 0;
	}
	ret = make_room(job);
	if (ret)
		return ret;
	job->pieces[job->piece_count] = *piece;
	job->notes[job->piece_count++] = *note;
	return 0;
}

/* ---- One block ------------------------------------------------------------------------------- */

/* A run of bytes of a record. */
struct block {
	uint64_t record;
	uint64_t begin, end; /* in the record */
	enum mode mode;
};

/* What the pieces up to `end`, the last of which it is when that is the end of the block, verify.
 */
static struct note note_for(const struct job *job, const struct block *block, uint64_t begin,
			    uint64_t end)
{
	const struct format_reader *reader = job->reader;
	const struct format_entry *entry = &reader->directory.entries[block->record];
	struct note note = { .record = block->record };

	switch (block->mode) {
	case MODE_BLOCKS:
		note.offset = block->begin;
		note.bytes = block->end - block->begin;
		note.crc32 = reader->index.checks[reader->index.first_check[block->record] +
						  block->begin / reader->index.check_bytes];
		break;
	case MODE_WHOLE:
		note.bytes = entry->bytes;
		note.crc32 = entry->crc32;
		break;
	case MODE_PLAIN:
		return note;
	}
	note.begins = begin == note.offset;
	note.ends = end == note.offset + note.bytes;
	return note;
}

/* Bytes [begin, end) of the record go to `into`, or nowhere. */
static int add_part(struct job *job, const struct block *block, uint64_t begin, uint64_t end,
		    void *into)
{
	const struct format_entry *entry = &job->reader->directory.entries[block->record];
	const struct note note = note_for(job, block, begin, end);
	const struct io_piece piece = {
		.offset = entry->data_offset + begin,
		.bytes = end - begin,
		.into = into,
		.want_crc = block->mode != MODE_PLAIN,
	};

	if (begin == end || (!into && block->mode == MODE_PLAIN))
		return 0;
	return add_piece(job, &piece, &note);
}

/*
 * The parts of this block that ranges want, and what is between them. `order` holds ranges that do
 * not overlap; *next is the first that may reach into the block, and afterwards into the next one.
 */
static int walk_block(struct job *job, const struct block *block, const size_t *order, size_t count,
		      size_t *next)
{
	uint64_t at = block->begin, begin, end;
	const struct format_range *range;
	int ret;

	for (; *next < count; ++*next) {
		range = &job->ranges[order[*next]];
		if (range->offset >= block->end)
			break;
		begin = MAX(range->offset, block->begin);
		end = MIN(range->offset + range->bytes, block->end);
		ret = add_part(job, block, at, begin, NULL);
		if (!ret)
			ret = add_part(job, block, begin, end,
				       range->into ?
					       (uint8_t *)range->into + (begin - range->offset) :
					       NULL);
		if (ret)
			return ret;
		at = end;
		if (range->offset + range->bytes > block->end)
			break;
	}
	return add_part(job, block, at, block->end, NULL);
}

/* ---- One record ------------------------------------------------------------------------------ */

static enum mode mode_for(const struct job *job, const size_t *order, size_t count)
{
	const struct format_reader *reader = job->reader;
	const struct format_range *range = &job->ranges[order[0]];

	if (!job->verify)
		return MODE_PLAIN;
	if (reader->has_index && range->record < reader->index.records)
		return MODE_BLOCKS;
	/* torch's skip_data() leaves 0 in the place of checksums for whoever brings the data. */
	if (!reader->directory.entries[range->record].crc32)
		return MODE_PLAIN;
	for (size_t i = 0; i < count; i++) {
		range = &job->ranges[order[i]];
		if (range->bytes == reader->directory.entries[range->record].bytes)
			return MODE_WHOLE;
	}
	return MODE_PLAIN;
}

/* Ranges that do not overlap, in the order of the record. */
static int walk_ranges(struct job *job, const size_t *order, size_t count, enum mode mode)
{
	const uint64_t record = job->ranges[order[0]].record;
	const uint64_t bytes = job->reader->directory.entries[record].bytes;
	const uint64_t unit = mode == MODE_BLOCKS ? job->reader->index.check_bytes :
						    PLAIN_BLOCK_BYTES;
	struct block block = { .record = record, .mode = mode };
	size_t next = 0;
	int ret = 0;

	while (!ret && (next < count || (mode == MODE_WHOLE && block.end < bytes))) {
		block.begin = block.end;
		/* What no range wants is read only for the checksum of all of the record. */
		if (mode != MODE_WHOLE)
			block.begin = MAX(block.end, job->ranges[order[next]].offset / unit * unit);
		block.end = block.begin + MIN(unit, bytes - block.begin);
		ret = walk_block(job, &block, order, count, &next);
	}
	return ret;
}

/* Moves those of the ranges that do not overlap to the front. Returns their number, which is not 0.
 */
static size_t take_apart(struct job *job, size_t *order, size_t count)
{
	size_t taken = 0, left = 0;
	uint64_t end = 0;

	for (size_t i = 0; i < count; i++) {
		const struct format_range *range = &job->ranges[order[i]];

		if (range->offset < end) {
			job->later[left++] = order[i];
			continue;
		}
		order[taken++] = order[i];
		end = range->offset + range->bytes;
	}
	if (left)
		memcpy(order + taken, job->later, left * sizeof(*order));
	return taken;
}

/* `order` holds the ranges of one record. Those that overlap others are read in another pass. */
static int walk_record(struct job *job, size_t *order, size_t count)
{
	const enum mode mode = mode_for(job, order, count);
	size_t taken;
	int ret = 0;

	for (size_t i = 0; !ret && i < count; i += taken) {
		/* A batch goes onward in the file. */
		if (i && !job->counting)
			ret = flush(job);
		taken = take_apart(job, order + i, count - i);
		if (!ret)
			ret = walk_ranges(job, order + i, taken, mode);
	}
	return ret;
}

static int walk_between(struct job *job, const struct format_range *range)
{
	const struct note note = { .record = NO_RECORD };
	const struct io_piece piece = {
		.offset = range->offset,
		.bytes = range->bytes,
		.into = range->into,
	};

	return add_piece(job, &piece, &note);
}

static int walk_all(struct job *job)
{
	const struct format_range *range;
	int ret = 0;
	size_t end;

	for (size_t i = 0; !ret && i < job->order_count; i = end) {
		range = &job->ranges[job->order[i]];
		end = i + 1;
		while (range->record != NO_RECORD && end < job->order_count &&
		       job->ranges[job->order[end]].record == range->record)
			end++;
		if (range->record == NO_RECORD)
			ret = walk_between(job, range);
		else
			ret = walk_record(job, job->order + i, end - i);
	}
	return ret;
}

static int read_all(struct job *job)
{
	int ret = 0;

	job->counting = job->progress;
	if (job->counting)
		walk_all(job);
	job->counting = false;
	ret = walk_all(job);
	if (!ret)
		ret = flush(job);
	/* The last blocks may have come in on a thread that does not speak to the callback. */
	if (!ret && job->progress && job->told < job->done && tell(job, IOSHAPE_PHASE_READ, 0, 0))
		ret = base_refuse(job->error, -ECANCELED,
				  "reading \"%s\" was stopped by its progress callback",
				  job->reader->input.path);
	return ret;
}

/* ---- All of it ------------------------------------------------------------------------------- */

static int check_range(const struct job *job, const struct format_range *range)
{
	const struct format_directory *directory = &job->reader->directory;
	const struct format_entry *entry;
	char shown[FORMAT_SHOWN_NAME_BYTES];

	if (range->record == NO_RECORD)
		return 0;
	if (range->record >= directory->count)
		return base_refuse(job->error, -ENOENT,
				   "cannot read record number %" PRIu64
				   " of \"%s\": it has %" PRIu64,
				   range->record, job->reader->input.path, directory->count);
	entry = &directory->entries[range->record];
	format_show_name(shown, entry->name, entry->name_bytes);
	if (range->offset > entry->bytes || range->bytes > entry->bytes - range->offset)
		return base_refuse(job->error, -ERANGE,
				   "cannot read %" PRIu64 " bytes at offset %" PRIu64
				   " of record '%s' of \"%s\": it has %" PRIu64 " bytes",
				   range->bytes, range->offset, shown, job->reader->input.path,
				   entry->bytes);
	if (!job->verify || entry->bytes || !entry->crc32)
		return 0;
	base_refuse_with(job->error, IOSHAPE_E_DAMAGED, "use another copy or an older checkpoint",
			 "\"%s\" is damaged: record '%s' is empty but its checksum is not",
			 job->reader->input.path, shown);
	base_error_in_record(job->error, shown);
	base_error_at(job->error, entry->data_offset);
	return IOSHAPE_E_DAMAGED;
}

static uint64_t place_of(const struct job *job, const struct format_range *range)
{
	if (range->record == NO_RECORD)
		return range->offset;
	return job->reader->directory.entries[range->record].data_offset;
}

static int compare_ranges(const void *a, const void *b, void *user)
{
	const struct job *job = user;
	const struct format_range *left = &job->ranges[*(const size_t *)a];
	const struct format_range *right = &job->ranges[*(const size_t *)b];

	if (left->record != right->record)
		return place_of(job, left) < place_of(job, right) ? -1 : 1;
	return left->offset < right->offset ? -1 : left->offset > right->offset;
}

static int sort_ranges(struct job *job, size_t count)
{
	int ret;

	job->order = reallocarray(NULL, count, sizeof(*job->order));
	job->later = reallocarray(NULL, count, sizeof(*job->later));
	if (!job->order || !job->later)
		return base_no_memory(job->error, "the order of ranges",
				      count * 2 * sizeof(size_t));
	for (size_t i = 0; i < count; i++) {
		ret = check_range(job, &job->ranges[i]);
		if (ret)
			return ret;
		if (job->ranges[i].bytes)
			job->order[job->order_count++] = i;
	}
	qsort_r(job->order, job->order_count, sizeof(*job->order), compare_ranges, job);
	return 0;
}

static int run(struct job *job, size_t count)
{
	struct base_error unheard = { 0 };
	int ret;

	if (!job->error)
		job->error = &unheard;
	job->verify &= !job->reader->no_checksums;
	ret = sort_ranges(job, count);
	if (!ret)
		ret = read_all(job);
	free(job->notes);
	free(job->pieces);
	free(job->later);
	free(job->order);
	return ret;
}

int format_reader_read(const struct format_reader *reader, struct io_lane *lane,
		       struct io_stream *stream, const struct format_range *ranges, size_t count,
		       bool verify, ioshape_progress_fn progress, void *progress_user,
		       struct base_error *error)
{
	struct job job = {
		.reader = reader,
		.lane = lane,
		.stream = stream,
		.ranges = ranges,
		.verify = verify,
		.error = error,
		.progress = progress,
		.progress_user = progress_user,
	};

	return count ? run(&job, count) : 0;
}

/* ---- The file as it lies -----------------------------------------------------------------------
 */

/* A stretch of the file is the records in it, and what lies between them. */
struct stretch {
	const struct format_reader *reader;
	uint64_t begin, end;
	uint8_t *into;
	struct format_range *ranges;
	uint64_t count, room;
};

/* The nth record in the order of the file. */
static uint64_t nth_record(const struct format_directory *directory, uint64_t n)
{
	return directory->order ? directory->order[n] : n;
}

static uint64_t data_end(const struct format_entry *entry)
{
	return entry->data_offset + entry->bytes;
}

/* The first record, in the order of the file, that ends at this offset or behind it. */
static uint64_t first_record(const struct format_directory *directory, uint64_t offset)
{
	uint64_t from = 0, to = directory->count, middle;

	while (from < to) {
		middle = from + (to - from) / 2;
		if (data_end(&directory->entries[nth_record(directory, middle)]) < offset)
			from = middle + 1;
		else
			to = middle;
	}
	return from;
}

/* `begin` and `end` in the file. 0 or -ENOMEM. */
static int add_range(struct stretch *stretch, uint64_t record, uint64_t begin, uint64_t end)
{
	void *ranges = stretch->ranges;
	uint64_t base = 0;
	int ret;

	if (record == NO_RECORD && begin == end)
		return 0;
	ret = format_grow(&ranges, stretch->count, &stretch->room, sizeof(*stretch->ranges));
	stretch->ranges = ranges;
	if (ret)
		return ret;
	if (record != NO_RECORD)
		base = stretch->reader->directory.entries[record].data_offset;
	stretch->ranges[stretch->count++] = (struct format_range){
		.record = record,
		.offset = begin - base,
		.bytes = end - begin,
		.into = begin < end ? stretch->into + (begin - stretch->begin) : NULL,
	};
	return 0;
}

/* Empty records count as read where they lie: they have a checksum, too. */
static int divide(struct stretch *stretch)
{
	const struct format_directory *directory = &stretch->reader->directory;
	uint64_t at = stretch->begin, record, begin, end;
	int ret = 0;

	for (uint64_t n = first_record(directory, at); !ret && n < directory->count; n++) {
		record = nth_record(directory, n);
		begin = MAX(at, directory->entries[record].data_offset);
		end = MIN(stretch->end, data_end(&directory->entries[record]));
		if (begin > end)
			break;
		ret = add_range(stretch, NO_RECORD, at, begin);
		if (!ret && (begin < end || !directory->entries[record].bytes))
			ret = add_range(stretch, record, begin, end);
		at = end;
	}
	return ret ? ret : add_range(stretch, NO_RECORD, at, stretch->end);
}

/* Headers that the stretch has all of. */
static int check_headers(const struct stretch *stretch, struct base_error *error)
{
	const struct format_directory *directory = &stretch->reader->directory;
	int ret = 0;

	for (uint64_t n = first_record(directory, stretch->begin); !ret && n < directory->count;
	     n++) {
		const struct format_entry *entry = &directory->entries[nth_record(directory, n)];

		if (entry->header_offset + FORMAT_LOCAL_BYTES > stretch->end)
			break;
		if (entry->header_offset >= stretch->begin)
			ret = format_check_header(
				stretch->reader, entry,
				stretch->into + (entry->header_offset - stretch->begin), error);
	}
	return ret;
}

uint64_t format_reader_data_end(const struct format_reader *reader)
{
	const struct format_directory *directory = &reader->directory;

	/* The index was read when the file was opened. */
	if (reader->has_index)
		return directory->entries[directory->count - 1].header_offset;
	return directory->offset;
}

int format_reader_read_file(const struct format_reader *reader, struct io_lane *lane,
			    struct io_stream *stream, uint64_t offset, void *into, uint64_t bytes,
			    bool verify, ioshape_progress_fn progress, void *progress_user,
			    struct base_error *error)
{
	struct stretch stretch = {
		.reader = reader,
		.begin = offset,
		.end = offset + bytes,
		.into = into,
	};
	int ret;

	if (divide(&stretch))
		ret = base_no_memory(error, "the ranges of a stretch",
				     stretch.count * sizeof(*stretch.ranges));
	else
		ret = format_reader_read(reader, lane, stream, stretch.ranges, stretch.count,
					 verify, progress, progress_user, error);
	free(stretch.ranges);
	return ret ? ret : check_headers(&stretch, error);
}
