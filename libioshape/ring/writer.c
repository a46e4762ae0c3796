/* SPDX-License-Identifier: Apache-2.0 */
/* A file written front to back: bytes gather in buffers, full buffers leave through the lane. */
#define _GNU_SOURCE
#include "ring/writer.h"
#include "ring/destination.h"
#include "ring/lane.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

/* ---- Without an engine ----------------------------------------------------------------------- */

/* Interruptions in a row before we believe that they will not end. */
#define MAX_INTERRUPTIONS 100

static ssize_t write_without_sigpipe(int fd, const void *data, size_t bytes)
{
	struct base_held_sigpipe held;
	ssize_t moved;

	base_hold_sigpipe(&held);
	moved = write(fd, data, bytes);
	/* Also after a short result: the reader may have gone in the middle. */
	base_let_sigpipe(&held, moved < (ssize_t)bytes);
	return moved;
}

/*
 * Writes all of it, without an engine: small files, pipes and devices. Offsets are only
 * known to regular files.
 */
static int write_without_engine(struct ring_destination *destination, const uint8_t *data,
				size_t bytes, uint64_t offset, struct ring_notes *notes,
				struct base_error *error)
{
	int code, interruptions = 0;
	size_t done = 0;
	ssize_t moved;

	while (done < bytes) {
		if (destination->stream)
			moved = write_without_sigpipe(destination->fd, data + done, bytes - done);
		else
			moved = pwrite(destination->fd, data + done, bytes - done,
				       (off_t)(offset + done));
		if (moved < 0 && errno == EINTR && ++interruptions < MAX_INTERRUPTIONS) {
			notes->short_results++;
			continue;
		}
		if (moved <= 0) {
			code = moved ? -errno : -EIO;
			return base_fail(error, code,
					 "cannot write \"%s\" at offset %llu" BASE_REMEDY "%s",
					 destination->path, (unsigned long long)(offset + done),
					 ring_remedy(code));
		}
		interruptions = 0;
		done += (size_t)moved;
		if (done < bytes)
			notes->short_results++;
	}
	return 0;
}

/* Interruptions in a row before we believe that they will not end. */
#define MAX_INTERRUPTIONS 100

int ring_writer_tell(struct ring_writer *writer, enum ioshape_phase phase, struct base_error *error)
{
	const struct ring_file_options *options = &writer->options;
	uint64_t done = ring_writer_offset(writer);
	bool stop = options->abort && atomic_load_explicit(options->abort, memory_order_relaxed);

	/* The total is an estimate where the caller gave one; more than all of it is never done. */
	if (!stop && options->progress)
		stop = options->progress(
			       options->progress_user, phase,
			       options->progress_total ? MIN(done, options->progress_total) : done,
			       options->progress_total) &&
		       phase < IOSHAPE_PHASE_COMMIT;
	if (stop)
		return base_refuse(error, -ECANCELED, "saving \"%s\" was stopped",
				   writer->file.path);
	return 0;
}

int ring_writer_check_limit(const struct ring_writer *writer, uint64_t bytes,
			    struct base_error *error)
{
	const struct ring_file_options *options = &writer->options;

	if (options->part_bytes && bytes > options->part_bytes)
		return base_refuse(error, -EFBIG,
				   "cannot write \"%s\": this process has a part of %s" BASE_REMEDY
				   "give it a larger one",
				   writer->file.path, BASE_SIZE(options->part_bytes));
	if (options->part_offset + bytes <= writer->most_bytes || writer->file.stream ||
	    writer->nil)
		return 0;
	return base_refuse(error, -EFBIG,
			   "cannot write \"%s\": it would be larger than %s" BASE_REMEDY "%s",
			   writer->file.path, BASE_SIZE(writer->most_bytes), ring_remedy(-EFBIG));
}

/* Before bytes leave: the one place where a write can be held up. */
static int let_pass(struct ring_writer *writer, uint64_t bytes, struct base_error *error)
{
	const struct ring_file_options *options = &writer->options;

	if (options->before_block)
		options->before_block(options->before_block_user, bytes);
	return ring_writer_tell(writer, IOSHAPE_PHASE_WRITE, error);
}

static int fail_again(const struct ring_writer *writer, struct base_error *error)
{
	return base_refuse(error, -EIO, "\"%s\" failed before" BASE_REMEDY "save again",
			   writer->file.path);
}

uint64_t ring_writer_offset(const struct ring_writer *writer)
{
	return writer->submitted + writer->used;
}

/* Where a byte of the writer's lies in the file. */
static uint64_t in_file(const struct ring_writer *writer, uint64_t offset)
{
	return writer->options.part_offset + offset;
}

/* ---- Blocks ---------------------------------------------------------------------------------- */

static int start_engine(struct ring_writer *writer, struct base_error *error)
{
	struct ring_lane *lane = writer->lane;
	int ret = ring_lane_start(lane, error);

	if (ret)
		return ret;
	writer->first_block_ns = base_now_ns();
	ring_lane_attach(lane, writer->file.fd, writer->file.path, false, writer->notes);
	writer->through_engine = true;
	if (!writer->nil && lane->config.direct == IOSHAPE_DIRECT_PREFER &&
	    ring_proofs_get(lane->config.proofs, &lane->fs_memory) == RING_DIRECT_FAILS)
		ring_note(writer->notes, IOSHAPE_STEP_DIRECT,
			  "no direct I/O on %s: it failed on an earlier file", writer->fs.type);
	else if (!writer->nil)
		ret = ring_lane_go_direct(lane, &writer->fs, error);
	writer->was_direct = lane->direct;
	return ret;
}

/* Sends the buffer being filled, all of it or, at the end of the file, what there is. */
static int send_block(struct ring_writer *writer, struct base_error *error)
{
	struct ring_buffer *buffer = writer->buffer;
	size_t bytes = writer->used;
	bool prove;
	int ret;

	ret = ring_writer_check_limit(writer, writer->submitted + bytes, error);
	if (!ret)
		ret = let_pass(writer, bytes, error);
	if (ret)
		return ret;
	if (writer->file.stream) {
		ret = write_without_engine(&writer->file, buffer->data, bytes, writer->submitted,
					   writer->notes, error);
		if (ret)
			return ret;
		ring_lane_give_back(writer->lane, buffer);
	} else {
		ret = writer->through_engine ? 0 : start_engine(writer, error);
		if (ret)
			return ret;
		prove = ring_writer_must_prove_direct(writer);
		if (prove)
			ring_writer_fill_in(writer);
		buffer->offset = in_file(writer, writer->submitted);
		/* Direct I/O takes whole units: the tail is padded, and cut off by finish(). */
		buffer->bytes = writer->lane->direct ?
					base_round_up(bytes, writer->lane->alignment) :
					bytes;
		memset(buffer->data + bytes, 0, buffer->bytes - bytes);
		writer->buffer = NULL; /* the lane's now, also after a failure */
		ret = ring_lane_submit(writer->lane, buffer, error);
		if (!ret && prove)
			ret = ring_writer_prove_direct(writer, buffer, bytes, error);
		if (ret)
			return ret;
	}
	writer->buffer = NULL;
	writer->used = 0;
	writer->submitted += bytes;
	return 0;
}

/* On stripes a block ends where a stripe does, unless the user has said how long blocks are. */
static size_t block_at(const struct ring_writer *writer, uint64_t offset)
{
	const struct ring_lane *lane = writer->lane;
	const size_t whole = lane->shape.block_bytes,
		     unit = MAX(ring_lane_direct_alignment(lane, &writer->fs), 4096);
	size_t bytes;

	if (lane->config.block_bytes)
		return whole;
	/* Whatever the filesystem says of its stripes, what follows must be able to go direct. */
	bytes = ring_request_bytes(&writer->fs.layout, offset, whole) / unit * unit;
	return bytes ? bytes : whole;
}

/* Where the next bytes go, and how many fit. */
static int find_room(struct ring_writer *writer, uint8_t **to, size_t *room,
		     struct base_error *error)
{
	int ret;

	if (!writer->buffer) {
		ret = ring_lane_take(writer->lane, &writer->buffer, error);
		if (ret)
			return ret;
		writer->block_bytes = block_at(writer, in_file(writer, writer->submitted));
	}
	*to = writer->buffer->data + writer->used;
	*room = writer->block_bytes - writer->used;
	return 0;
}

/* Into the block: as many of the bytes as lie there in the same way. */
static size_t place_piece(struct ring_writer *writer, uint8_t *to, const uint8_t *data,
			  size_t bytes, uint32_t *crc)
{
	size_t piece = data ? ring_writer_must_copy(writer, data, bytes) : bytes;
	const uint8_t *summed = to;

	if (!piece) {
		piece = ring_writer_borrow(writer, data, bytes);
		summed = data;
	} else if (data == to) {
		/* They were made in their room. */
	} else if (data && crc) {
		*crc = base_copy_crc32(*crc, to, data, piece);
		return piece;
	} else if (data) {
		memcpy(to, data, piece);
	} else {
		memset(to, 0, piece);
	}
	if (crc)
		*crc = base_crc32(*crc, summed, piece);
	return piece;
}

static int append(struct ring_writer *writer, const uint8_t *data, size_t bytes, uint32_t *crc,
		  struct base_error *error)
{
	size_t piece, room;
	uint8_t *to;
	int ret = 0;

	while (!ret && bytes) {
		ret = find_room(writer, &to, &room, error);
		if (ret)
			break;
		piece = place_piece(writer, to, data, MIN(bytes, room), crc);
		writer->used += piece;
		bytes -= piece;
		data = data ? data + piece : NULL;
		if (piece == room)
			ret = send_block(writer, error);
	}
	return ret;
}

/* As append(), and the checksum of the whole file goes on, too. */
static int append_checked(struct ring_writer *writer, const uint8_t *data, size_t bytes,
			  uint32_t *crc, struct base_error *error)
{
	uint32_t part = 0;
	int ret;

	if (!crc)
		return append(writer, data, bytes, &writer->crc, error);
	if (bytes <= BASE_CRC32_TWICE_BYTES) {
		writer->crc = base_crc32(writer->crc, data, bytes);
		return append(writer, data, bytes, crc, error);
	}
	ret = append(writer, data, bytes, &part, error);
	*crc = base_crc32_combine(*crc, part, bytes);
	writer->crc = base_crc32_combine(writer->crc, part, bytes);
	return ret;
}

/* The checksum of these bytes is to be continued, or is known. */
static int put(struct ring_writer *writer, const void *data, size_t bytes, uint32_t *crc,
	       const uint32_t *known, struct base_error *error)
{
	uint64_t begin = base_now_ns();
	int ret;

	if (writer->failed)
		return fail_again(writer, error);
	if (known) {
		ret = append(writer, data, bytes, NULL, error);
		writer->crc = base_crc32_combine(writer->crc, *known, bytes);
	} else if (writer->options.want_crc32) {
		ret = append_checked(writer, data, bytes, crc, error);
	} else {
		ret = append(writer, data, bytes, crc, error);
	}
	writer->failed = ret != 0;
	writer->write_ns += base_now_ns() - begin;
	return ret;
}

int ring_writer_room(struct ring_writer *writer, uint8_t **to, size_t *room,
		     struct base_error *error)
{
	uint64_t begin = base_now_ns();
	int ret;

	if (writer->failed)
		return fail_again(writer, error);
	ret = find_room(writer, to, room, error);
	writer->failed = ret != 0;
	writer->write_ns += base_now_ns() - begin;
	return ret;
}

int ring_writer_put(struct ring_writer *writer, const void *data, size_t bytes, uint32_t *crc,
		    struct base_error *error)
{
	/* NULL means zeros further down, and may come with no bytes here. */
	return bytes ? put(writer, data, bytes, crc, NULL, error) : 0;
}

int ring_writer_put_summed(struct ring_writer *writer, const void *data, size_t bytes,
			   uint32_t crc32, struct base_error *error)
{
	return bytes ? put(writer, data, bytes, NULL, &crc32, error) : 0;
}

int ring_writer_put_zeros(struct ring_writer *writer, size_t bytes, struct base_error *error)
{
	return put(writer, NULL, bytes, NULL, NULL, error);
}

void ring_writer_fail(struct ring_writer *writer)
{
	writer->failed = true;
}

/* ---- The end --------------------------------------------------------------------------------- */

/*
 * Whether all there is can leave with one plain write. Not if an engine or direct I/O was asked for
 * by name: then even this much goes that way.
 */
static bool is_small(const struct ring_writer *writer)
{
	const struct ring_config *config = &writer->lane->config;

	return writer->buffer && !writer->through_engine && !writer->file.stream && !writer->nil &&
	       writer->used <= RING_SMALL_FILE_BYTES && config->direct != IOSHAPE_DIRECT_REQUIRE &&
	       (config->engine == IOSHAPE_ENGINE_AUTO || config->engine == IOSHAPE_ENGINE_BUFFERED);
}

/* Of a file in the page cache much is still unwritten: the next writer begins after the sync. */
static int hand_over(struct ring_writer *writer, struct base_error *error)
{
	const struct ring_file_options *options = &writer->options;
	const uint64_t took_ns = base_now_ns() - writer->first_block_ns;
	struct ring_lane *lane = writer->lane;
	unsigned tail;
	int ret;

	if (!options->nearly_written || !writer->through_engine || !lane->direct)
		return 0;
	tail = ring_lane_tail(lane, writer->submitted, took_ns, writer->plan_ns);
	ret = ring_lane_settle(lane, tail, error);
	writer->handed_over = !ret && lane->direct;
	if (writer->handed_over)
		options->nearly_written(options->nearly_written_user);
	return ret;
}

/* Direct I/O would pad the last block to a whole unit, beyond what this process may write. */
static bool has_no_room_for_padding(const struct ring_writer *writer)
{
	const uint64_t unit = MAX(ring_lane_direct_alignment(writer->lane, &writer->fs), 1);

	return writer->buffer && !writer->file.stream && !writer->nil &&
	       in_file(writer, writer->submitted) + base_round_up(writer->used, unit) >
		       writer->most_bytes;
}

/* What is left, without the engine: nothing is in flight. `refused`: why the file, which takes
 * bytes of any length only without direct I/O, would not leave that; or 0. */
static int put_rest(struct ring_writer *writer, int refused, struct base_error *error)
{
	int ret;

	if (refused)
		return base_fail(error, refused,
				 "cannot write the end of \"%s\" through the page cache",
				 writer->file.path);
	ret = write_without_engine(&writer->file, writer->buffer->data, writer->used,
				   in_file(writer, writer->submitted), writer->notes, error);
	if (ret)
		return ret;
	ring_lane_give_back(writer->lane, writer->buffer);
	writer->buffer = NULL;
	writer->submitted += writer->used;
	writer->used = 0;
	return 0;
}

static int write_plainly(struct ring_writer *writer, struct base_error *error)
{
	int ret = ring_writer_check_limit(writer, writer->submitted + writer->used, error);

	if (!ret)
		ret = let_pass(writer, writer->used, error);
	if (!ret)
		ret = ring_lane_drain(writer->lane, error);
	if (ret)
		return ret;
	ret = ring_lane_leave_direct(writer->lane, "ulimit -f has no room for padding");
	return put_rest(writer, ret, error);
}

/* Sends what is whole units of direct I/O, and keeps the rest, which would have to be padded. */
static int send_units(struct ring_writer *writer, struct base_error *error)
{
	const size_t unit = MAX(ring_lane_direct_alignment(writer->lane, &writer->fs), 1),
		     rest = writer->used % unit;
	uint8_t *kept;
	int ret;

	if (!rest || rest == writer->used)
		return 0;
	kept = malloc(rest);
	if (!kept)
		return base_no_memory(error, "the end of a file", rest);
	writer->used -= rest;
	memcpy(kept, writer->buffer->data + writer->used, rest);
	ret = send_block(writer, error);
	if (!ret)
		ret = append(writer, kept, rest, NULL, error);
	free(kept);
	return ret;
}

/* The end of a file that keeps its length. */
static int write_unpadded(struct ring_writer *writer, struct base_error *error)
{
	int ret = send_units(writer, error);

	if (!ret)
		ret = let_pass(writer, writer->used, error);
	if (!ret)
		ret = hand_over(writer, error);
	if (!ret)
		ret = ring_lane_drain(writer->lane, error);
	return ret ? ret : put_rest(writer, ring_leave_direct(writer->file.fd), error);
}

static int write_rest(struct ring_writer *writer, struct base_error *error)
{
	int ret = 0;

	if (is_small(writer) || has_no_room_for_padding(writer)) {
		ring_writer_fill_in(writer);
		return write_plainly(writer, error);
	}
	if (writer->buffer && writer->keeps_length) {
		ring_writer_fill_in(writer);
		ret = write_unpadded(writer, error);
	} else {
		if (writer->buffer)
			ret = send_block(writer, error);
		if (!ret)
			ret = hand_over(writer, error);
		if (!ret)
			ret = ring_lane_drain(writer->lane, error);
	}
	if (writer->through_engine)
		writer->was_direct = writer->lane->direct;
	return ret;
}

/* Takes away what the padding of the last block and too large an estimate left behind the end. */
static int cut(struct ring_writer *writer, struct base_error *error)
{
	int interruptions = 0, ret;
	struct stat status;

	/* In a file of several writers padding ends where the next part begins, at the latest. */
	if (writer->file.stream || writer->file.shared || writer->nil ||
	    (writer->keeps_length && writer->submitted == writer->options.expected_bytes))
		return 0;
	do {
		ret = ftruncate(writer->file.fd, (off_t)writer->submitted) ? -errno : 0;
	} while (ret == -EINTR && ++interruptions < MAX_INTERRUPTIONS);
	/* Some of FUSE let files only grow: then there may be nothing to cut. */
	if ((ret == -EOPNOTSUPP || ret == -ENOSYS) && !fstat(writer->file.fd, &status) &&
	    (uint64_t)status.st_size == writer->submitted)
		return 0;
	if (ret)
		return base_fail(error, ret, "cannot cut \"%s\" to its length", writer->file.path);
	return 0;
}

static int finish(struct ring_writer *writer, struct base_error *error)
{
	uint64_t begin = base_now_ns();
	int ret;

	ret = write_rest(writer, error);
	if (!ret &&
	    (writer->through_engine || writer->options.expected_bytes > RING_SMALL_FILE_BYTES))
		ret = cut(writer, error);
	writer->write_ns += base_now_ns() - begin;
	if (ret)
		return ret;
	ret = ring_writer_resemble(writer, error);
	if (!ret)
		ret = ring_writer_tell(writer, IOSHAPE_PHASE_SYNC, error);
	if (!ret && !writer->options.no_sync && !writer->nil) {
		begin = base_now_ns();
		ret = ring_destination_sync(&writer->file, error);
		if (writer->was_direct && ring_refuses_direct(ret))
			ring_proofs_put(writer->lane->config.proofs, &writer->lane->fs_memory,
					RING_DIRECT_FAILS);
		writer->sync_ns = base_now_ns() - begin;
	}
	/* The rest is the metadata server's work. */
	if (!ret && writer->options.nearly_written && !writer->handed_over)
		writer->options.nearly_written(writer->options.nearly_written_user);
	return ret;
}

int ring_writer_finish(struct ring_writer *writer, struct base_error *error)
{
	int ret;

	if (writer->failed)
		return fail_again(writer, error);
	ret = finish(writer, error);
	writer->failed = ret != 0;
	writer->finished = !ret;
	return ret;
}

int ring_writer_commit(struct ring_writer *writer, struct base_error *error)
{
	uint64_t begin = base_now_ns();
	int ret;

	if (!writer->finished)
		return base_refuse(error, -EIO, "cannot put \"%s\" in place before it is complete",
				   writer->file.path);
	ret = ring_writer_tell(writer, IOSHAPE_PHASE_COMMIT, error);
	/* From here on the file must not be used through the engine, which may keep it open. */
	if (writer->through_engine)
		ring_lane_detach(writer->lane);
	if (!ret)
		ret = ring_writer_check_newest(writer, error);
	if (!ret && !writer->nil)
		ret = ring_destination_commit(&writer->file, writer->options.no_replace,
					      writer->options.no_sync, writer->notes, error);
	writer->commit_ns = base_now_ns() - begin;
	if (!ret)
		ring_writer_tell(writer, IOSHAPE_PHASE_DONE, NULL);
	return ret;
}

uint32_t ring_writer_crc32(const struct ring_writer *writer)
{
	return writer->crc;
}

const struct fs_layout *ring_writer_layout(const struct ring_writer *writer, bool *asked)
{
	*asked = writer->striping.asked.count != 0;
	return &writer->fs.layout;
}

void ring_writer_report(const struct ring_writer *writer, struct ioshape_report *report)
{
	const struct ring_lane *lane = writer->lane;
	const struct ring_depth *depth = &lane->depth;

	report->file_bytes = ring_writer_offset(writer);
	report->plan_s += base_seconds(writer->plan_ns);
	report->write_s += base_seconds(writer->write_ns);
	report->sync_s += base_seconds(writer->sync_ns);
	report->commit_s += base_seconds(writer->commit_ns);
	/* One plain write, as the buffered engine does it. */
	snprintf(report->engine, sizeof(report->engine), "%s",
		 writer->through_engine ? lane->ops->id :
		 writer->nil            ? "nil" :
					  "buffered");
	report->direct = writer->was_direct;
	report->queue_depth = writer->through_engine ? lane->shape.depth : 1;
	report->block_bytes = lane->shape.block_bytes;
	if (writer->through_engine && !writer->nil) {
		report->request_s =
			base_seconds(depth->all_latency_ns / MAX(depth->all_answers, 1));
		report->least_request_s = base_seconds(depth->least_ns);
	}
	snprintf(report->choice, sizeof(report->choice), "%s",
		 writer->file.stream                   ? "no regular file" :
		 writer->through_engine || writer->nil ? writer->shape_why :
							 "small file: one call");
	report->memory_alignment = writer->fs.memory_alignment;
	report->offset_alignment = writer->fs.offset_alignment;
	ring_striping_report(&writer->striping, &writer->fs.layout, report);
}

void ring_writer_free(struct ring_writer *writer)
{
	if (!writer)
		return;
	ring_lane_drain(writer->lane, NULL);
	if (writer->buffer)
		ring_lane_give_back(writer->lane, writer->buffer);
	ring_lane_detach(writer->lane);
	ring_destination_close(&writer->file);
	free(writer);
}
