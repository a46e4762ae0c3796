/* SPDX-License-Identifier: Apache-2.0 */
/* A file on its way, read and verified at one end, and written as any save at the other. */
#define _GNU_SOURCE
#include "tier/tier.h"

#include <errno.h>
#include <stdlib.h>

/* Read and written at a time; both sides go on meanwhile. */
#define BLOCK_BYTES (4 * MIB)

struct stream {
	struct tier_file *file;
	struct ioshape_reader *reader;
	struct save_checksums checksums;
};

static bool is_still_there(const struct tier_file *file)
{
	struct ring_entry now;

	return !ring_look(file->from, false, &now) && ring_is_unchanged(&file->copy, &now);
}

static bool was_written(const struct tier_file *file)
{
	struct ring_entry now;

	return !ring_look(file->from, false, &now) && now.inode == file->copy.inode &&
	       !ring_is_unchanged(&file->copy, &now);
}

static int put_block(struct stream *stream, struct ring_writer *writer, uint64_t at, void *block,
		     size_t bytes, struct base_error *error)
{
	if (ioshape_reader_read_file(stream->reader, at, block, bytes))
		return base_pass_on(error, base_last_error());
	if (stream->checksums.beside)
		return save_checksums_put(&stream->checksums, writer, block, bytes, NULL, error);
	return ring_writer_put(writer, block, bytes, NULL, error);
}

static int put_all(void *user, struct ring_writer *writer, struct base_error *error)
{
	struct stream *stream = user;
	const uint64_t bytes = stream->file->copy.bytes;
	void *block = malloc(BLOCK_BYTES);
	int ret = block ? 0 : base_no_memory(error, "bytes on their way", BLOCK_BYTES);
	size_t piece;

	for (uint64_t at = 0; !ret && at < bytes; at += piece) {
		piece = MIN(BLOCK_BYTES, bytes - at);
		ret = put_block(stream, writer, at, block, piece, error);
	}
	free(block);
	if (!ret && stream->checksums.beside)
		ret = save_checksums_end(&stream->checksums, error);
	if (!ret)
		ret = ring_writer_finish(writer, error);
	/* Whoever replaces it leaves these bytes as they are; not so whoever writes into it. */
	if (!ret && was_written(stream->file))
		ret = -EAGAIN;
	return ret;
}

static void free_file(void *user, struct ring_writer *writer)
{
	struct stream *stream = user;

	if (writer)
		stream->file->there_ns = ring_writer_modified_ns(writer);
	ring_writer_free(writer);
}

/* What has checksums beside it keeps them there. */
static int open_copy(struct stream *stream, struct base_error *error)
{
	struct ioshape_reader_options options = IOSHAPE_READER_OPTIONS_INIT;
	struct ioshape_reader_info info = IOSHAPE_READER_INFO_INIT;
	struct tier_file *file = stream->file;

	options.any_format = 1;
	if (ioshape_reader_open(file->carry->tier->context, file->from, &options,
				&stream->reader) ||
	    ioshape_reader_get_info(stream->reader, &info))
		return is_still_there(file) ? base_pass_on(error, base_last_error()) : -EAGAIN;
	stream->checksums.beside = info.checksums && !info.torch_zip;
	/* It is open: now that is what was looked at, or nobody knows what it is. */
	return is_still_there(file) && info.file_bytes == file->copy.bytes ? 0 : -EAGAIN;
}

/* Of all files of the copy. */
static int tell(void *user, enum ioshape_phase phase, uint64_t done, uint64_t total)
{
	const struct tier_file *file = user;
	const struct tier_carry *carry = file->carry;
	const struct ioshape_drain_options *options = carry->options;

	(void)total;
	/* A directory ends when it is in place, and not with one of its files. */
	if (!options->progress || (file->in_new_directory && phase >= IOSHAPE_PHASE_COMMIT))
		return 0;
	return options->progress(options->progress_user, phase,
				 MIN(carry->done + done, carry->bytes), carry->bytes);
}

static int write_there(struct stream *stream, struct base_error *error)
{
	struct tier_file *file = stream->file;
	const uint64_t bytes = file->copy.bytes;
	const pthread_t self = pthread_self();
	const struct save_watch watch = { .blocked = &self, .drains = true };
	struct ioshape_report report = IOSHAPE_REPORT_INIT;
	const struct save_file save = {
		.context = file->carry->tier->context,
		.path = file->to,
		.absolute = file->to,
		.options = {
			.expected_bytes = bytes,
			.exact = true,
			.umask_then = 1 + (int)(0666 & ~file->copy.mode),
			.original = &file->original,
			.progress = tell,
			.progress_user = file,
			.progress_total = bytes,
		},
		.needed_bytes = bytes,
		.in_new_directory = file->in_new_directory,
		.checksums = stream->checksums.beside ? &stream->checksums : NULL,
		.put = put_all,
		.free = free_file,
		.user = stream,
	};

	return save_write_file(&save, &watch, NULL, &report, error);
}

int tier_carry_file(struct tier_file *file, struct base_error *error)
{
	struct stream stream = { .file = file };
	int ret = open_copy(&stream, error);

	if (!ret)
		ret = write_there(&stream, error);
	base_buffer_free(&stream.checksums.crcs);
	ioshape_reader_free(stream.reader);
	return ret;
}
