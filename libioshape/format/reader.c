/* SPDX-License-Identifier: Apache-2.0 */
/* Opens an archive: its directory, its index if it has one, and the data offset of each record.
 * Reads ranges of records in the order of the file, block by block, and verifies their checksums
 * while reading. */
#define _GNU_SOURCE
#include "format/format.h"
#include "format/layout.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

/* Retries for a file whose name leads to another file meanwhile: 5 s in all. The client of
 * GlusterFS may keep the old file under a name that another client has replaced for up to a second
 * (md-cache-timeout). */
#define MOST_TRIES 250
#define PAUSE_NS 20000000

struct opening {
	struct format_reader *reader;
	const char *path;
	struct base_error *error;
};

static int fetch(void *user, uint64_t offset, void *into, size_t bytes)
{
	const struct opening *opening = user;

	return io_input_get(&opening->reader->input, offset, into, bytes, opening->error);
}

static int locate(struct opening *opening, uint64_t position)
{
	return format_locate(&opening->reader->directory, position, fetch, opening, opening->path,
			     opening->error);
}

/* ---- The index ------------------------------------------------------------------------------- */

static bool is_index(const struct format_entry *entry)
{
	return entry->name_bytes == strlen(FORMAT_INDEX_RECORD) &&
	       !memcmp(entry->name, FORMAT_INDEX_RECORD, entry->name_bytes);
}

/* Reads the index record and verifies its checksum. The caller frees *out. */
static int read_index(struct opening *opening, const struct format_entry *entry, uint8_t **out)
{
	uint8_t *data;
	int ret;

	if (entry->bytes > FORMAT_MAX_INDEX_BYTES)
		return base_fail_reason(
			opening->error, IOSHAPE_E_LIMIT,
			"cannot load \"%s\": its index has %s, and at most %s are supported",
			opening->path, BASE_SIZE(entry->bytes), BASE_SIZE(FORMAT_MAX_INDEX_BYTES));
	data = malloc(MAX(entry->bytes, 1));
	if (!data)
		return base_no_memory(opening->error, "the index of an archive", entry->bytes);
	ret = fetch(opening, entry->data_offset, data, entry->bytes);
	if (!ret && base_crc32(0, data, entry->bytes) != entry->crc32)
		ret = base_fail_reason_with(
			opening->error, IOSHAPE_E_DAMAGED,
			"use another copy, or torch.load(), which ignores the index "
			"and verifies nothing",
			"cannot load \"%s\": its index (record '" FORMAT_INDEX_RECORD
			"' at offset %" PRIu64 ") is damaged",
			opening->path, entry->data_offset);
	if (ret)
		free(data);
	else
		*out = data;
	return ret;
}

/* Copies the data offsets from the index to the directory. Returns false if the index does not
 * belong to the directory. */
static bool index_fits(struct format_reader *reader)
{
	struct format_directory *directory = &reader->directory;
	const struct format_index *index = &reader->index;

	if (format_directory_crc32(directory->entries, index->records, 0) != index->directory_crc32)
		return false;
	for (uint64_t i = 0; i < index->records; i++) {
		if (!format_data_fits(directory, i, index->data_offsets[i]))
			return false;
		directory->entries[i].data_offset = index->data_offsets[i];
	}
	return true;
}

/* Decodes the index. An index that does not fit is not a failure: has_index then stays false. */
static int decode_index(struct opening *opening, const uint8_t *data, uint64_t bytes)
{
	struct format_reader *reader = opening->reader;
	const struct format_directory *directory = &reader->directory;
	int ret;

	ret = format_index_decode(&reader->index, data, bytes, directory->entries,
				  directory->count - 1, &reader->index_problem);
	if (ret && ret != IOSHAPE_E_DAMAGED && ret != IOSHAPE_E_FORMAT)
		return base_fail(opening->error, ret, "cannot load \"%s\": %s", opening->path,
				 reader->index_problem.text);
	if (ret)
		return 0;
	reader->has_index = index_fits(reader);
	if (!reader->has_index) {
		format_index_free(&reader->index);
		base_fail_reason(&reader->index_problem, IOSHAPE_E_DAMAGED,
				 "record '" FORMAT_INDEX_RECORD
				 "' of %s does not match the directory: "
				 "another tool has changed the archive",
				 opening->path);
	}
	return 0;
}

static int open_index(struct opening *opening)
{
	const struct format_directory *directory = &opening->reader->directory;
	const struct format_entry *last = &directory->entries[directory->count - 1];
	uint8_t *data = NULL;
	int ret;

	if (!is_index(last))
		return 0;
	ret = locate(opening, directory->count - 1);
	if (!ret)
		ret = read_index(opening, last, &data);
	if (!ret)
		ret = decode_index(opening, data, last->bytes);
	free(data);
	return ret;
}

/* ---- Local headers --------------------------------------------------------------------------- */

static int locate_all(struct opening *opening)
{
	int ret = 0;

	for (uint64_t i = 0; i < opening->reader->directory.count && !ret; i++)
		ret = locate(opening, i);
	return ret;
}

/* Checks that the first bytes of a record's local header lead to its data. Readers of the raw file
 * find the data by these bytes, and no checksum covers them. One wrong bit would make such a reader
 * take other bytes for the record. */
static int check_header(const struct format_reader *reader, const struct format_entry *entry,
			const uint8_t *head, struct base_error *error)
{
	char shown[FORMAT_SHOWN_NAME_BYTES];

	if (base_get_le(head, 4) == FORMAT_LOCAL_SIGNATURE &&
	    entry->header_offset + FORMAT_LOCAL_BYTES + base_get_le(head + FORMAT_LOCAL_NAME, 2) +
			    base_get_le(head + FORMAT_LOCAL_EXTRA, 2) ==
		    entry->data_offset)
		return 0;
	base_fail_reason_with(error, IOSHAPE_E_DAMAGED, "use another copy or an older checkpoint",
			      "\"%s\" is damaged: the header of record '%s' at offset %" PRIu64
			      " of the file does not point to its data",
			      reader->input.path,
			      format_show_name(shown, entry->name, entry->name_bytes),
			      entry->header_offset);
	base_error_in_record(error, shown);
	base_error_at(error, entry->header_offset);
	return IOSHAPE_E_DAMAGED;
}

static int look_at_header(const struct format_reader *reader, uint64_t record,
			  struct base_error *error)
{
	const struct format_entry *entry = &reader->directory.entries[record];
	uint8_t head[FORMAT_LOCAL_BYTES];
	int ret;

	ret = io_input_get(&reader->input, entry->header_offset, head, sizeof(head), error);
	return ret ? ret : check_header(reader, entry, head, error);
}

int format_reader_check_headers(const struct format_reader *reader, struct base_error *error)
{
	int ret = 0;

	/* Without an index, all headers were checked when the file was opened. */
	for (uint64_t i = 0;
	     !ret && reader->has_index && !reader->plain && i < reader->directory.count; i++)
		ret = look_at_header(reader, i, error);
	return ret;
}

/* Returns whether every checksum is 0, which means that there are none. An archive with a pickle
 * never has 0 as the true checksum of every record. */
static bool all_checksums_zero(const struct format_directory *directory)
{
	bool any_bytes = false;

	for (uint64_t i = 0; i < directory->count; i++) {
		if (directory->entries[i].crc32)
			return false;
		any_bytes |= directory->entries[i].bytes > 0;
	}
	return any_bytes;
}

static int open_zip(struct format_reader *reader, struct base_error *error)
{
	struct opening opening = { reader, reader->input.path, error };
	int ret;

	ret = format_parse(&reader->directory, reader->input.bytes, fetch, &opening, opening.path,
			   error);
	if (!ret)
		ret = open_index(&opening);
	/* Other programs recognize a zip by the first bytes of the file. */
	if (!ret)
		ret = reader->has_index ? look_at_header(reader, 0, error) : locate_all(&opening);
	if (!ret && !reader->has_index)
		reader->no_checksums = all_checksums_zero(&reader->directory);
	return ret;
}

/* ---- Files in any format: one record, which is the whole file -------------------------------- */

/* Name of the only record. It is never modified. */
static char no_name[1];

static int open_plain(struct format_reader *reader, struct base_error *error)
{
	struct format_directory *directory = &reader->directory;
	const uint64_t bytes = reader->input.bytes;

	reader->plain = true;
	reader->no_checksums = true;
	directory->entries = malloc(sizeof(*directory->entries));
	if (!directory->entries || format_names_new(&directory->names, 0))
		return base_no_memory(error, "a reader", sizeof(*reader));
	/* No header precedes the end, where a directory would begin. */
	directory->entries[0] = (struct format_entry){
		.name = no_name,
		.bytes = bytes,
		.header_offset = bytes,
	};
	directory->count = 1;
	directory->offset = bytes;
	return 0;
}

/* ---- Opening --------------------------------------------------------------------------------- */

/* Reads what an open file contains. */
typedef int (*open_fn)(struct format_reader *reader, struct base_error *error);

/* Tries to open a file once. After a failure there is nothing to free. */
static int open_once(struct format_reader *reader, const char *path, uint64_t base, uint64_t bytes,
		     enum ioshape_direct direct, open_fn open, struct base_error *error)
{
	int ret;

	memset(reader, 0, sizeof(*reader));
	ret = io_input_open(&reader->input, path, base, bytes, direct, error);
	if (ret)
		return ret;
	ret = open(reader, error);
	if (ret)
		format_reader_close(reader);
	return ret;
}

/* Opens a file again until it is the file that the name leads to. */
static int open_latest(struct format_reader *reader, const char *path, uint64_t base,
		       uint64_t bytes, enum ioshape_direct direct, open_fn open,
		       struct base_error *error)
{
	const struct timespec pause = { 0, PAUSE_NS };
	struct base_error why;
	int ret = 0;

	/* An NFS client opens the file that it remembers under a name. Only when it reads does it
	 * learn that another host has replaced the file, and then looks the name up again. Parts of
	 * files are not retried, because the part could not belong to another file. */
	for (int tries = 0; tries < MOST_TRIES; tries++) {
		memset(&why, 0, sizeof(why));
		ret = open_once(reader, path, base, bytes, direct, open, &why);
		if (ret != -ESTALE || base || bytes)
			break;
		io_revalidate(AT_FDCWD, path);
		if (tries)
			nanosleep(&pause, NULL);
	}
	if (ret && error && !error->code)
		*error = why;
	return ret;
}

int format_reader_open(struct format_reader *reader, const char *path, uint64_t base,
		       uint64_t bytes, enum ioshape_direct direct, struct base_error *error)
{
	return open_latest(reader, path, base, bytes, direct, open_zip, error);
}

int format_reader_open_plain(struct format_reader *reader, const char *path, uint64_t base,
			     uint64_t bytes, enum ioshape_direct direct, struct base_error *error)
{
	return open_latest(reader, path, base, bytes, direct, open_plain, error);
}

int format_reader_add_checksums(struct format_reader *reader, struct format_checksums *checksums,
				struct base_error *error)
{
	static const uint64_t from_first_block;

	if (checksums->file.file_bytes != reader->input.bytes)
		return base_fail_reason_with(error, IOSHAPE_E_DAMAGED, "use another copy",
					     "\"%s\" has %s, but its checksums are for %s: it was "
					     "truncated, or is another file",
					     reader->input.path, BASE_SIZE(reader->input.bytes),
					     BASE_SIZE(checksums->file.file_bytes));
	/* Index of the archive with one record: the record has all blocks. */
	reader->index = (struct format_index){
		.check_bytes = checksums->block_bytes,
		.records = 1,
		.check_count = checksums->blocks,
		.checks = checksums->crc32,
		.first_check = &from_first_block,
		.memory = (void *)(uintptr_t)checksums->crc32,
	};
	*checksums = (struct format_checksums){ 0 };
	reader->has_index = true;
	reader->no_checksums = false;
	return 0;
}

void format_reader_close(struct format_reader *reader)
{
	format_index_free(&reader->index);
	format_directory_free(&reader->directory);
	io_input_close(&reader->input);
	memset(reader, 0, sizeof(*reader));
	reader->input.fd = reader->input.direct_fd = -1;
}

/* ---- Ranges ---------------------------------------------------------------------------------- */

/* If a range covers a block only in part, the reader also reads the rest of the block to verify the
 * checksum. It drops the rest. Ranges that overlap are read one after the other. So the reader
 * needs no memory for data, and the memory for bookkeeping is that of one batch. */

/* Pieces in a batch: 4 GiB of blocks, so that the pause between batches is negligible. */
#define MOST_PIECES 4096u
/* Unit of reading if blocks have no checksums. */
#define PLAIN_BLOCK_BYTES (4 * MIB)

/* Record number of a range between records. Its offset is that in the file, and no checksum covers
 * its bytes. */
#define NO_RECORD UINT64_MAX

/* How the bytes of a record are verified. */
enum mode {
	MODE_BLOCKS, /* by the checksums of its blocks */
	MODE_WHOLE,  /* by the checksum of the record, which is read as a whole */
	MODE_PLAIN   /* not verified */
};

/* Check of a piece. The pieces from one that begins a check to one that ends it are verified
 * together. */
struct check {
	uint64_t record;
	uint64_t offset; /* first verified byte, in the record */
	uint64_t bytes;
	uint32_t crc32; /* expected checksum */
	bool begins, ends;
};

struct job {
	const struct format_reader *reader;
	struct io_queue *queue;
	struct io_stream *stream; /* NULL: nothing is prefetched behind the last range */
	const struct format_range *ranges;
	bool verify;
	struct base_error *error;

	size_t *order; /* ranges that are not empty, in the order of the file */
	size_t order_count;

	struct io_piece *pieces; /* pieces of the batch */
	struct check *checks;    /* check of each piece */
	size_t piece_count, allocated;
	uint32_t crc; /* checksum of the current check, which may span batches */

	ioshape_progress_fn progress;
	void *progress_user;
	uint64_t total; /* bytes of all ranges */
	uint64_t done;  /* bytes of earlier batches */
	uint64_t told;  /* bytes that the callback has been told */
};

/* ---- Batches --------------------------------------------------------------------------------- */

static int tell(void *user, enum ioshape_phase phase, uint64_t done_bytes, uint64_t total_bytes)
{
	struct job *job = user;

	(void)total_bytes; /* the total of the batch */
	/* The rests of blocks are read, too. */
	job->told = MIN(job->done + done_bytes, job->total);
	return job->progress(job->progress_user, phase, job->told, job->total);
}

static int damaged(const struct job *job, const struct check *check)
{
	const struct format_entry *entry = &job->reader->directory.entries[check->record];
	char shown[FORMAT_SHOWN_NAME_BYTES];

	if (job->reader->plain) {
		base_fail_reason_with(
			job->error, IOSHAPE_E_DAMAGED, "use another copy",
			"\"%s\" is damaged: the checksum of the %s at offset %" PRIu64 " is wrong",
			job->reader->input.path, BASE_SIZE(check->bytes), check->offset);
		base_error_at(job->error, check->offset);
		return IOSHAPE_E_DAMAGED;
	}
	base_fail_reason_with(
		job->error, IOSHAPE_E_DAMAGED, "use another copy or an older checkpoint",
		"\"%s\" is damaged: the checksum of record '%s' is wrong within the %s at "
		"offset %" PRIu64 " (offset %" PRIu64 " of the file)",
		job->reader->input.path, format_show_name(shown, entry->name, entry->name_bytes),
		BASE_SIZE(check->bytes), check->offset, entry->data_offset + check->offset);
	base_error_in_record(job->error, shown);
	base_error_at(job->error, entry->data_offset + check->offset);
	return IOSHAPE_E_DAMAGED;
}

static int compare_checksums(struct job *job)
{
	const struct io_piece *piece;
	const struct check *check;

	for (size_t i = 0; i < job->piece_count; i++) {
		piece = &job->pieces[i];
		check = &job->checks[i];
		if (!piece->want_crc)
			continue;
		job->crc = check->begins ? piece->crc :
					   base_crc32_combine(job->crc, piece->crc, piece->bytes);
		if (check->ends && job->crc != check->crc32)
			return damaged(job, check);
	}
	return 0;
}

static int flush(struct job *job)
{
	int ret = 0;

	if (job->piece_count && job->stream)
		ret = io_read_onward(job->stream, job->queue, job->pieces, job->piece_count,
				     job->progress ? tell : NULL, job, job->error);
	else if (job->piece_count)
		ret = io_read(job->queue, &job->reader->input, job->pieces, job->piece_count,
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

/* Ensures that one more piece fits: enlarges the arrays, or reads the batch. */
static int grow_pieces(struct job *job)
{
	const size_t allocated = job->allocated ? 2 * job->allocated : 64;
	void *pieces, *checks;

	if (job->piece_count < job->allocated)
		return 0;
	if (job->allocated == MOST_PIECES)
		return flush(job);
	pieces = reallocarray(job->pieces, allocated, sizeof(*job->pieces));
	job->pieces = pieces ? pieces : job->pieces;
	checks = reallocarray(job->checks, allocated, sizeof(*job->checks));
	job->checks = checks ? checks : job->checks;
	if (!pieces || !checks)
		return base_no_memory(job->error, "a batch of reads",
				      allocated * (sizeof(*job->pieces) + sizeof(*job->checks)));
	job->allocated = allocated;
	return 0;
}

static int add_piece(struct job *job, const struct io_piece *piece, const struct check *check)
{
	int ret = grow_pieces(job);

	if (ret)
		return ret;
	job->pieces[job->piece_count] = *piece;
	job->checks[job->piece_count++] = *check;
	return 0;
}

/* ---- One block ------------------------------------------------------------------------------- */

/* Range of bytes of a record. */
struct block {
	uint64_t record;
	uint64_t begin, end; /* offsets in the record */
	enum mode mode;
};

/* Returns the check of a piece [begin, end) of the block. */
static struct check check_of(const struct job *job, const struct block *block, uint64_t begin,
			     uint64_t end)
{
	const struct format_reader *reader = job->reader;
	const struct format_entry *entry = &reader->directory.entries[block->record];
	struct check check = { .record = block->record };

	switch (block->mode) {
	case MODE_BLOCKS:
		check.offset = block->begin;
		check.bytes = block->end - block->begin;
		check.crc32 = reader->index.checks[reader->index.first_check[block->record] +
						   block->begin / reader->index.check_bytes];
		break;
	case MODE_WHOLE:
		check.bytes = entry->bytes;
		check.crc32 = entry->crc32;
		break;
	case MODE_PLAIN:
		return check;
	}
	check.begins = begin == check.offset;
	check.ends = end == check.offset + check.bytes;
	return check;
}

/* Adds bytes [begin, end) of the record to the batch. They go to `into`, or are dropped if it is
 * NULL. */
static int add_part(struct job *job, const struct block *block, uint64_t begin, uint64_t end,
		    void *into)
{
	const struct format_entry *entry = &job->reader->directory.entries[block->record];
	const struct check check = check_of(job, block, begin, end);
	const struct io_piece piece = {
		.offset = entry->data_offset + begin,
		.bytes = end - begin,
		.into = into,
		.want_crc = block->mode != MODE_PLAIN,
	};

	if (begin == end || (!into && block->mode == MODE_PLAIN))
		return 0;
	return add_piece(job, &piece, &check);
}

/* Adds the parts of the block that ranges cover, and the gaps between them. `order` holds ranges
 * that do not overlap. *next is the first range that may reach into the block, and afterwards into
 * the next block. */
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
	/* torch's skip_data() writes 0 instead of checksums, for programs that write the data
	 * later. */
	if (!reader->directory.entries[range->record].crc32)
		return MODE_PLAIN;
	for (size_t i = 0; i < count; i++) {
		range = &job->ranges[order[i]];
		if (range->bytes == reader->directory.entries[range->record].bytes)
			return MODE_WHOLE;
	}
	return MODE_PLAIN;
}

/* Adds ranges that do not overlap, in the order of the record. */
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
		/* Bytes that no range covers are read only for the checksum of a whole record. */
		if (mode != MODE_WHOLE)
			block.begin = MAX(block.end, job->ranges[order[next]].offset / unit * unit);
		block.end = block.begin + MIN(unit, bytes - block.begin);
		ret = walk_block(job, &block, order, count, &next);
	}
	return ret;
}

/* Reads the ranges of one record, which `order` holds. A range that overlaps the one before it
 * begins another pass. */
static int walk_record(struct job *job, const size_t *order, size_t count)
{
	const enum mode mode = mode_for(job, order, count);
	const struct format_range *range;
	size_t begin = 0;
	int ret = 0;

	for (size_t i = 1; !ret && i <= count; i++) {
		range = &job->ranges[order[i - 1]];
		if (i < count && job->ranges[order[i]].offset >= range->offset + range->bytes)
			continue;
		/* Offsets within a batch must not decrease. */
		if (begin)
			ret = flush(job);
		if (!ret)
			ret = walk_ranges(job, order + begin, i - begin, mode);
		begin = i;
	}
	return ret;
}

static int walk_between(struct job *job, const struct format_range *range)
{
	const struct check check = { .record = NO_RECORD };
	const struct io_piece piece = {
		.offset = range->offset,
		.bytes = range->bytes,
		.into = range->into,
	};

	return add_piece(job, &piece, &check);
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
	int ret = walk_all(job);

	if (!ret)
		ret = flush(job);
	/* A thread that does not call the callback may have read the last blocks. */
	job->done = job->total;
	if (!ret && job->progress && job->told < job->total && tell(job, IOSHAPE_PHASE_READ, 0, 0))
		ret = base_fail_reason(job->error, -ECANCELED,
				       "reading \"%s\" was stopped by its progress callback",
				       job->reader->input.path);
	return ret;
}

/* ---- The whole job --------------------------------------------------------------------------- */

/* Checks an empty record. A range of no bytes reads nothing, but its checksum can be wrong. */
static int check_range(const struct job *job, const struct format_range *range)
{
	const struct format_entry *entry;
	char shown[FORMAT_SHOWN_NAME_BYTES];

	if (!job->verify || range->record == NO_RECORD)
		return 0;
	entry = &job->reader->directory.entries[range->record];
	if (entry->bytes || !entry->crc32)
		return 0;
	format_show_name(shown, entry->name, entry->name_bytes);
	base_fail_reason_with(job->error, IOSHAPE_E_DAMAGED,
			      "use another copy or an older checkpoint",
			      "\"%s\" is damaged: record '%s' is empty but its checksum is not",
			      job->reader->input.path, shown);
	base_error_in_record(job->error, shown);
	base_error_at(job->error, entry->data_offset);
	return IOSHAPE_E_DAMAGED;
}

static uint64_t position_of(const struct job *job, const struct format_range *range)
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
		return position_of(job, left) < position_of(job, right) ? -1 : 1;
	return left->offset < right->offset ? -1 : left->offset > right->offset;
}

static int sort_ranges(struct job *job, size_t count)
{
	int ret;

	job->order = reallocarray(NULL, count, sizeof(*job->order));
	if (!job->order)
		return base_no_memory(job->error, "the order of ranges", count * sizeof(size_t));
	for (size_t i = 0; i < count; i++) {
		ret = check_range(job, &job->ranges[i]);
		if (ret)
			return ret;
		if (job->ranges[i].bytes)
			job->order[job->order_count++] = i;
		job->total += job->ranges[i].bytes;
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
	free(job->checks);
	free(job->pieces);
	free(job->order);
	return ret;
}

int format_reader_read(const struct format_reader *reader, struct io_queue *queue,
		       struct io_stream *stream, const struct format_range *ranges, size_t count,
		       bool verify, ioshape_progress_fn progress, void *progress_user,
		       struct base_error *error)
{
	struct job job = {
		.reader = reader,
		.queue = queue,
		.stream = stream,
		.ranges = ranges,
		.verify = verify,
		.error = error,
		.progress = progress,
		.progress_user = progress_user,
	};

	return count ? run(&job, count) : 0;
}

/* ---- The raw file ---------------------------------------------------------------------------- */

/* A range of the file: the records in it, and the bytes between them. */
struct stretch {
	const struct format_reader *reader;
	uint64_t begin, end;
	uint8_t *into;
	struct base_buffer ranges; /* array of struct format_range */
};

static uint64_t data_end(const struct format_entry *entry)
{
	return entry->data_offset + entry->bytes;
}

/* Returns the first record that ends at or behind this offset. */
static uint64_t first_record(const struct format_directory *directory, uint64_t offset)
{
	uint64_t from = 0, to = directory->count, middle;

	while (from < to) {
		middle = from + (to - from) / 2;
		if (data_end(&directory->entries[middle]) < offset)
			from = middle + 1;
		else
			to = middle;
	}
	return from;
}

/* Adds bytes [begin, end) of the file. Returns 0 or -ENOMEM. */
static int add_range(struct stretch *stretch, uint64_t record, uint64_t begin, uint64_t end)
{
	const uint64_t base =
		record == NO_RECORD ? 0 : stretch->reader->directory.entries[record].data_offset;
	const struct format_range range = {
		.record = record,
		.offset = begin - base,
		.bytes = end - begin,
		.into = begin < end ? stretch->into + (begin - stretch->begin) : NULL,
	};

	if (record == NO_RECORD && begin == end)
		return 0;
	return base_buffer_append(&stretch->ranges, &range, sizeof(range));
}

/* Divides the range of the file into ranges of records and gaps. Empty records are included where
 * they are, because their checksum can be wrong. */
static int divide(struct stretch *stretch)
{
	const struct format_directory *directory = &stretch->reader->directory;
	uint64_t at = stretch->begin, begin, end;
	int ret = 0;

	for (uint64_t record = first_record(directory, at); !ret && record < directory->count;
	     record++) {
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

/* Checks the headers that lie completely in the range of the file. */
static int check_headers(const struct stretch *stretch, struct base_error *error)
{
	const struct format_directory *directory = &stretch->reader->directory;
	int ret = 0;

	for (uint64_t n = first_record(directory, stretch->begin); !ret && n < directory->count;
	     n++) {
		const struct format_entry *entry = &directory->entries[n];

		if (entry->header_offset + FORMAT_LOCAL_BYTES > stretch->end)
			break;
		if (entry->header_offset >= stretch->begin)
			ret = check_header(stretch->reader, entry,
					   stretch->into + (entry->header_offset - stretch->begin),
					   error);
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

int format_reader_read_file(const struct format_reader *reader, struct io_queue *queue,
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
		ret = base_no_memory(error, "ranges of records", stretch.ranges.bytes);
	else
		/* malloc() allocates the buffer, so it is aligned for any struct. */
		ret = format_reader_read(reader, queue, stream, (void *)stretch.ranges.data,
					 stretch.ranges.bytes / sizeof(struct format_range), verify,
					 progress, progress_user, error);
	base_buffer_free(&stretch.ranges);
	return ret ? ret : check_headers(&stretch, error);
}
