/* SPDX-License-Identifier: Apache-2.0 */
/* One copy on its way to its destination. */
#define _GNU_SOURCE
#include "tier/tier.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

/* Read and written at a time; both sides go on meanwhile. */
#define BLOCK_BYTES (4 * MIB)

/* ---- Which is newer -------------------------------------------------------------------------- */

/* The directory that a path leads to: a file that is a link is replaced where it leads. */
static char *directory_of(const char *destination)
{
	char *real = realpath(destination, NULL);
	char *directory = base_directory_of(real ? real : destination);

	free(real);
	return directory;
}

int tier_clock_there(const struct ioshape_tier *tier, const char *destination, int64_t time_ns,
		     int64_t *there_ns, struct base_error *error)
{
	char *directory = directory_of(destination);
	int64_t before_ns = 0, now_there_ns = 0, after_ns = 0;
	int ret;

	if (!directory)
		return base_no_memory(error, "a path", strlen(destination));
	ret = ring_time_in(tier->root.path, &before_ns, error);
	if (!ret)
		ret = ring_time_in(directory, &now_there_ns, error);
	if (!ret)
		ret = ring_time_in(tier->root.path, &after_ns, error);
	*there_ns = tier_time_there(time_ns, before_ns, now_there_ns, after_ns);
	free(directory);
	return ret;
}

/*
 * The time that the destination gets, and what it may replace: whatever is not newer; and what an
 * earlier drain has put there, whatever clocks have done since.
 */
static int plan(struct tier_carry *carry, const struct ring_entry *there, struct base_error *error)
{
	int64_t time_ns;
	int ret = tier_clock_there(carry->tier, carry->entry->path, carry->copy.modified_ns,
				   &time_ns, error);

	if (there && carry->before && carry->before->there_ns == there->modified_ns)
		time_ns = MAX(time_ns, there->modified_ns);
	carry->original = (struct ring_original){
		.modified_ns = time_ns,
		.newest_ns = time_ns,
		.mode = carry->copy.mode,
	};
	return ret;
}

static bool is_newer_there(const struct tier_carry *carry)
{
	struct ring_entry there;

	return !ring_look(carry->entry->path, true, &there) &&
	       there.modified_ns > carry->original.newest_ns;
}

/* Then the copy is as old there as it would have been. */
static void find_newer(struct tier_carry *carry)
{
	carry->result = IOSHAPE_DRAINED_NEWER;
	carry->there_ns = carry->original.modified_ns;
}

static int look_there(struct tier_carry *carry, struct base_error *error)
{
	const char *path = carry->entry->path;
	struct ring_entry there;
	int ret = ring_look(path, true, &there);
	const bool is_there = !ret;

	if (ret && ret != -ENOENT)
		return base_fail(error, ret, "cannot look at \"%s\"", path);
	if (is_there && there.kind != RING_FILE)
		return base_refuse(error, -EEXIST,
				   "cannot put \"%s\" in place: what is there is no file", path);
	ret = plan(carry, is_there ? &there : NULL, error);
	if (!ret && is_there && there.modified_ns > carry->original.newest_ns)
		find_newer(carry);
	return ret;
}

/* ---- The bytes ------------------------------------------------------------------------------- */

struct stream {
	struct tier_carry *carry;
	struct ioshape_reader *reader;
	struct save_checksums checksums;
	bool put; /* all of it */
};

static bool is_still_there(const struct tier_carry *carry)
{
	struct ring_entry now;

	return !ring_look(carry->place, false, &now) && ring_is_unchanged(&carry->copy, &now);
}

static bool was_written(const struct tier_carry *carry)
{
	struct ring_entry now;

	return !ring_look(carry->place, false, &now) && now.inode == carry->copy.inode &&
	       !ring_is_unchanged(&carry->copy, &now);
}

static int put_block(struct stream *stream, struct ring_writer *file, uint64_t at, void *block,
		     size_t bytes, struct base_error *error)
{
	if (ioshape_reader_read_file(stream->reader, at, block, bytes))
		return base_pass_on(error, base_last_error());
	if (stream->checksums.beside)
		return save_checksums_put(&stream->checksums, file, block, bytes, NULL, error);
	return ring_writer_put(file, block, bytes, NULL, error);
}

static int put_all(void *user, struct ring_writer *file, struct base_error *error)
{
	struct stream *stream = user;
	const uint64_t bytes = stream->carry->copy.bytes;
	void *block = malloc(BLOCK_BYTES);
	int ret = block ? 0 : base_no_memory(error, "bytes on their way", BLOCK_BYTES);
	size_t piece;

	for (uint64_t at = 0; !ret && at < bytes; at += piece) {
		piece = MIN(BLOCK_BYTES, bytes - at);
		ret = put_block(stream, file, at, block, piece, error);
	}
	free(block);
	if (!ret && stream->checksums.beside)
		ret = save_checksums_end(&stream->checksums, error);
	if (!ret)
		ret = ring_writer_finish(file, error);
	/* Whoever replaces it leaves these bytes as they are; not so whoever writes into it. */
	if (!ret && was_written(stream->carry))
		ret = -EAGAIN;
	return ret;
}

static void free_file(void *user, struct ring_writer *file)
{
	struct stream *stream = user;

	if (file)
		stream->carry->there_ns = ring_writer_modified_ns(file);
	ring_writer_free(file);
}

/* What has checksums beside it keeps them there. */
static int open_copy(struct stream *stream, struct base_error *error)
{
	struct ioshape_reader_options options = IOSHAPE_READER_OPTIONS_INIT;
	struct ioshape_reader_info info = IOSHAPE_READER_INFO_INIT;
	struct tier_carry *carry = stream->carry;

	options.any_format = 1;
	if (ioshape_reader_open(carry->tier->context, carry->place, &options, &stream->reader) ||
	    ioshape_reader_get_info(stream->reader, &info))
		return base_pass_on(error, base_last_error());
	stream->checksums.beside = info.checksums && !info.torch_zip;
	/* It is open: now that is what was looked at, or nobody knows what it is. */
	return is_still_there(carry) && info.file_bytes == carry->copy.bytes ? 0 : -EAGAIN;
}

static int write_there(struct stream *stream, struct base_error *error)
{
	struct tier_carry *carry = stream->carry;
	const uint64_t bytes = carry->copy.bytes;
	const pthread_t self = pthread_self();
	const struct save_watch watch = { .blocked = &self };
	struct ioshape_report report = IOSHAPE_REPORT_INIT;
	const struct save_file file = {
		.context = carry->tier->context,
		.path = carry->entry->path,
		.absolute = carry->entry->path,
		.options = {
			.expected_bytes = bytes,
			.exact = true,
			.umask_then = 1 + (int)(0666 & ~carry->copy.mode),
			.original = &carry->original,
			.progress = carry->options->progress,
			.progress_user = carry->options->progress_user,
			.progress_total = bytes,
		},
		.needed_bytes = bytes,
		.checksums = stream->checksums.beside ? &stream->checksums : NULL,
		.put = put_all,
		.free = free_file,
		.user = stream,
	};

	return save_write_file(&file, &watch, NULL, &report, error);
}

/* ---- All of it ------------------------------------------------------------------------------- */

static int carry_file(struct tier_carry *carry, struct base_error *error)
{
	struct stream stream = { .carry = carry };
	int ret = open_copy(&stream, error);

	if (!ret)
		ret = write_there(&stream, error);
	/* Somebody was there just before us. */
	if (ret == -EEXIST && is_newer_there(carry)) {
		base_error_begin(error);
		find_newer(carry);
		ret = 0;
	} else if (!ret) {
		carry->bytes = carry->copy.bytes;
	}
	base_buffer_free(&stream.checksums.crcs);
	ioshape_reader_free(stream.reader);
	return ret;
}

int tier_carry(struct tier_carry *carry, struct base_error *error)
{
	int ret;

	carry->result = IOSHAPE_DRAINED;
	carry->place = tier_place(carry->tier, carry->entry->path);
	if (!carry->place)
		return base_no_memory(error, "a path", strlen(carry->entry->path));
	ret = ring_look(carry->place, false, &carry->copy);
	if (ret == -ENOENT) {
		carry->result = IOSHAPE_DRAINED_GONE;
		ret = 0;
	} else if (ret) {
		base_fail(error, ret, "cannot look at \"%s\"", carry->place);
	} else if (carry->copy.kind != RING_FILE) {
		ret = base_refuse(error, -EINVAL, "\"%s\" is no file", carry->place);
	} else {
		ret = look_there(carry, error);
		if (!ret && carry->result == IOSHAPE_DRAINED)
			ret = carry_file(carry, error);
	}
	free(carry->place);
	carry->place = NULL;
	return ret;
}
