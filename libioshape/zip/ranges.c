/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Reading ranges of records: one pass through the file in the order of its bytes, block by block,
 * each byte once, checksums compared on the way.
 *
 * A block that is wanted only in part is read around the wanted part as well, into nowhere, for the
 * sake of its checksum. Where ranges overlap, the first of them gets the bytes and the others copy
 * from it. So no memory is needed for data, and that for bookkeeping is bounded by one batch.
 */
#define _GNU_SOURCE
#include "zip/ranges.h"

#include <errno.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

/* Pieces in a batch: 4 GiB of blocks, so that the pause between batches does not show. */
#define MOST_PIECES 4096u
/* The unit of reading where there are no checksums of blocks. */
#define PLAIN_BLOCK_BYTES (4 * MIB)

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

/* Bytes that another range has received already. */
struct copy {
	void *to;
	const void *from;
	uint64_t bytes;
};

struct job {
	const struct zip_reader *reader;
	struct ring_lane *lane;
	struct ring_stream *stream; /* NULL: nothing is read ahead of the last range */
	const struct zip_range *ranges;
	bool verify;
	struct base_error *error;

	size_t *order; /* ranges that are not empty, by where they begin in the file */
	size_t order_count;
	size_t *active; /* those that touch the current block, in that order */
	size_t active_count;

	/* The batch: what is to be read, and then copied. */
	struct ring_piece *pieces;
	struct note *notes; /* to each piece */
	struct copy *copies;
	size_t piece_count, copy_count, room;
	uint32_t crc; /* of the check that is under way, which may span batches */

	ioshape_progress_fn progress;
	void *progress_user;
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
	const struct zip_entry *entry = &job->reader->directory.entries[note->record];
	char shown[ZIP_SHOWN_NAME_BYTES];

	if (job->reader->plain) {
		base_refuse(job->error, IOSHAPE_E_DAMAGED,
			    "\"%s\" is damaged: the checksum of the %s at offset %" PRIu64
			    " is wrong" BASE_REMEDY "use another copy",
			    job->reader->input.path, BASE_SIZE(note->bytes), note->offset);
		base_error_at(job->error, note->offset);
		return IOSHAPE_E_DAMAGED;
	}
	base_refuse(job->error, IOSHAPE_E_DAMAGED,
		    "\"%s\" is damaged: the checksum of record '%s' is wrong within the %s at "
		    "offset %" PRIu64 " (offset %" PRIu64 " of the file)" BASE_REMEDY
		    "use another copy or an older checkpoint",
		    job->reader->input.path, zip_show_name(shown, entry->name, entry->name_bytes),
		    BASE_SIZE(note->bytes), note->offset, entry->data_offset + note->offset);
	base_error_in_record(job->error, shown);
	base_error_at(job->error, entry->data_offset + note->offset);
	return IOSHAPE_E_DAMAGED;
}

static int compare_checksums(struct job *job)
{
	const struct ring_piece *piece;
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
		ret = ring_read_onward(job->stream, job->lane, job->pieces, job->piece_count,
				       job->progress ? tell : NULL, job, job->error);
	else if (job->piece_count)
		ret = ring_read(job->lane, &job->reader->input, job->pieces, job->piece_count,
				job->progress ? tell : NULL, job, job->error);
	if (!ret)
		ret = compare_checksums(job);
	if (ret)
		return ret;
	for (size_t i = 0; i < job->piece_count; i++)
		job->done += job->pieces[i].bytes;
	/* In their order: a copy may take from what an earlier one brought. */
	for (size_t i = 0; i < job->copy_count; i++)
		memmove(job->copies[i].to, job->copies[i].from, job->copies[i].bytes);
	job->piece_count = 0;
	job->copy_count = 0;
	return 0;
}

/* Makes sure that there is room for one more where so many are used: in larger memory, or behind a
 * batch that has been read. */
static int make_room(struct job *job, size_t used)
{
	const size_t room = job->room ? 2 * job->room : 64;
	void *pieces, *notes, *copies;

	if (used < job->room)
		return 0;
	if (job->room == MOST_PIECES)
		return flush(job);
	pieces = reallocarray(job->pieces, room, sizeof(*job->pieces));
	job->pieces = pieces ? pieces : job->pieces;
	notes = reallocarray(job->notes, room, sizeof(*job->notes));
	job->notes = notes ? notes : job->notes;
	copies = reallocarray(job->copies, room, sizeof(*job->copies));
	job->copies = copies ? copies : job->copies;
	if (!pieces || !notes || !copies)
		return base_no_memory(
			job->error, "a batch of reads",
			room * (sizeof(*job->pieces) + sizeof(*job->notes) + sizeof(*job->copies)));
	job->room = room;
	return 0;
}

static int add_piece(struct job *job, const struct ring_piece *piece, const struct note *note)
{
	const int ret = make_room(job, job->piece_count);

	if (ret)
		return ret;
	job->pieces[job->piece_count] = *piece;
	job->notes[job->piece_count++] = *note;
	return 0;
}

static int add_copy(struct job *job, const struct copy *copy)
{
	const int ret = make_room(job, job->copy_count);

	if (!ret)
		job->copies[job->copy_count++] = *copy;
	return ret;
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
	const struct zip_reader *reader = job->reader;
	const struct zip_entry *entry = &reader->directory.entries[block->record];
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
static int walk_part(struct job *job, const struct block *block, uint64_t begin, uint64_t end,
		     void *into)
{
	const struct zip_entry *entry = &job->reader->directory.entries[block->record];
	const struct note note = note_for(job, block, begin, end);
	const struct ring_piece piece = {
		.offset = entry->data_offset + begin,
		.bytes = end - begin,
		.into = into,
		.want_crc = block->mode != MODE_PLAIN,
	};

	if (begin == end || (!into && block->mode == MODE_PLAIN))
		return 0;
	return add_piece(job, &piece, &note);
}

static void *place_in(const struct zip_range *range, uint64_t offset)
{
	return (uint8_t *)range->into + (offset - range->offset);
}

/* The parts of the active ranges that lie in this block. They are sorted by where they begin. */
static int walk_block(struct job *job, const struct block *block)
{
	const struct zip_range *range, *reach = NULL; /* the range that got the bytes before `at` */
	uint64_t at = block->begin, begin, end, shared;
	struct copy copy;
	int ret;

	for (size_t i = 0; i < job->active_count; i++) {
		range = &job->ranges[job->active[i]];
		if (!range->into)
			continue;
		begin = MAX(range->offset, block->begin);
		end = MIN(range->offset + range->bytes, block->end);
		if (begin < at) {
			/* No earlier range ends later than `reach`, and none begins later than this
			 * one. */
			shared = MIN(at, end);
			copy = (struct copy){ place_in(range, begin), place_in(reach, begin),
					      shared - begin };
			ret = add_copy(job, &copy);
			if (ret)
				return ret;
			begin = shared;
		}
		if (end <= at)
			continue;
		ret = walk_part(job, block, at, begin, NULL);
		if (!ret)
			ret = walk_part(job, block, begin, end, place_in(range, begin));
		if (ret)
			return ret;
		at = end;
		reach = range;
	}
	return walk_part(job, block, at, block->end, NULL);
}

/* ---- One record ------------------------------------------------------------------------------ */

static enum mode mode_for(const struct job *job, const size_t *order, size_t count)
{
	const struct zip_reader *reader = job->reader;
	const struct zip_range *range = &job->ranges[order[0]];

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

/* Forgets the ranges that end before or at `end`. */
static void retire(struct job *job, uint64_t end)
{
	const struct zip_range *range;
	size_t kept = 0;

	for (size_t i = 0; i < job->active_count; i++) {
		range = &job->ranges[job->active[i]];
		if (range->offset + range->bytes > end)
			job->active[kept++] = job->active[i];
	}
	job->active_count = kept;
}

/* `order` holds the ranges of one record. */
static int walk_record(struct job *job, const size_t *order, size_t count)
{
	const uint64_t record = job->ranges[order[0]].record;
	const uint64_t bytes = job->reader->directory.entries[record].bytes;
	struct block block = { .record = record, .mode = mode_for(job, order, count) };
	uint64_t unit = block.mode == MODE_BLOCKS ? job->reader->index.check_bytes :
						    PLAIN_BLOCK_BYTES;
	size_t next = 0;
	int ret;

	job->active_count = 0;
	while (job->active_count || next < count) {
		block.begin = job->active_count ? block.end :
						  job->ranges[order[next]].offset / unit * unit;
		block.end = block.begin + MIN(unit, bytes - block.begin);
		while (next < count && job->ranges[order[next]].offset < block.end)
			job->active[job->active_count++] = order[next++];
		ret = walk_block(job, &block);
		if (ret)
			return ret;
		retire(job, block.end);
	}
	return 0;
}

static int walk_between(struct job *job, const struct zip_range *range)
{
	const struct note note = { .record = ZIP_NO_RECORD };
	const struct ring_piece piece = {
		.offset = range->offset,
		.bytes = range->bytes,
		.into = range->into,
	};

	return add_piece(job, &piece, &note);
}

/* Where the ranges of the record end that begin at this place in the order. */
static size_t end_of_record(const struct job *job, size_t first)
{
	const uint64_t record = job->ranges[job->order[first]].record;
	size_t end = first + 1;

	while (record != ZIP_NO_RECORD && end < job->order_count &&
	       job->ranges[job->order[end]].record == record)
		end++;
	return end;
}

/* What walk_record() will read: of each block that is touched all where it is verified by itself.
 */
static uint64_t bytes_of_record(const struct job *job, const size_t *order, size_t count)
{
	const uint64_t bytes = job->reader->directory.entries[job->ranges[order[0]].record].bytes;
	const enum mode mode = mode_for(job, order, count);
	const uint64_t unit = mode == MODE_BLOCKS ? job->reader->index.check_bytes : 1;
	uint64_t sum = 0, reach = 0, begin, end;

	for (size_t i = 0; i < count; i++) {
		const struct zip_range *range = &job->ranges[order[i]];

		if (mode == MODE_PLAIN && !range->into)
			continue;
		begin = MAX(range->offset / unit * unit, reach);
		end = MIN(base_round_up(range->offset + range->bytes, unit), bytes);
		if (begin < end) {
			sum += end - begin;
			reach = end;
		}
	}
	return sum;
}

static uint64_t bytes_of_all(const struct job *job)
{
	uint64_t sum = 0;
	size_t end;

	for (size_t i = 0; i < job->order_count; i = end) {
		const struct zip_range *range = &job->ranges[job->order[i]];

		end = end_of_record(job, i);
		sum += range->record == ZIP_NO_RECORD ?
			       range->bytes :
			       bytes_of_record(job, job->order + i, end - i);
	}
	return sum;
}

static int read_all(struct job *job)
{
	const struct zip_range *range;
	int ret = 0;
	size_t end;

	if (job->progress)
		job->total = bytes_of_all(job);
	for (size_t i = 0; !ret && i < job->order_count; i = end) {
		range = &job->ranges[job->order[i]];
		end = end_of_record(job, i);
		if (range->record == ZIP_NO_RECORD)
			ret = walk_between(job, range);
		else
			ret = walk_record(job, job->order + i, end - i);
	}
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

static int check_range(const struct job *job, const struct zip_range *range)
{
	const struct zip_directory *directory = &job->reader->directory;
	const struct zip_entry *entry;
	char shown[ZIP_SHOWN_NAME_BYTES];

	if (range->record == ZIP_NO_RECORD)
		return 0;
	if (range->record >= directory->count)
		return base_refuse(job->error, -ENOENT,
				   "cannot read record number %" PRIu64
				   " of \"%s\": it has %" PRIu64,
				   range->record, job->reader->input.path, directory->count);
	entry = &directory->entries[range->record];
	zip_show_name(shown, entry->name, entry->name_bytes);
	if (range->offset > entry->bytes || range->bytes > entry->bytes - range->offset)
		return base_refuse(job->error, -ERANGE,
				   "cannot read %" PRIu64 " bytes at offset %" PRIu64
				   " of record '%s' of \"%s\": it has %" PRIu64 " bytes",
				   range->bytes, range->offset, shown, job->reader->input.path,
				   entry->bytes);
	if (!job->verify || entry->bytes || !entry->crc32)
		return 0;
	base_refuse(job->error, IOSHAPE_E_DAMAGED,
		    "\"%s\" is damaged: record '%s' is empty but its checksum is not" BASE_REMEDY
		    "use another copy or an older checkpoint",
		    job->reader->input.path, shown);
	base_error_in_record(job->error, shown);
	base_error_at(job->error, entry->data_offset);
	return IOSHAPE_E_DAMAGED;
}

static uint64_t place_of(const struct job *job, const struct zip_range *range)
{
	if (range->record == ZIP_NO_RECORD)
		return range->offset;
	return job->reader->directory.entries[range->record].data_offset;
}

static int compare_ranges(const void *a, const void *b, void *user)
{
	const struct job *job = user;
	const struct zip_range *left = &job->ranges[*(const size_t *)a];
	const struct zip_range *right = &job->ranges[*(const size_t *)b];

	if (left->record != right->record)
		return place_of(job, left) < place_of(job, right) ? -1 : 1;
	return left->offset < right->offset ? -1 : left->offset > right->offset;
}

static int sort_ranges(struct job *job, size_t count)
{
	int ret;

	job->order = reallocarray(NULL, count, sizeof(*job->order));
	job->active = reallocarray(NULL, count, sizeof(*job->active));
	if (!job->order || !job->active)
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
	free(job->copies);
	free(job->notes);
	free(job->pieces);
	free(job->active);
	free(job->order);
	return ret;
}

int zip_reader_read(const struct zip_reader *reader, struct ring_lane *lane,
		    struct ring_stream *stream, const struct zip_range *ranges, size_t count,
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
