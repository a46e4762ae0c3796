/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Blocks that are written from memory that was lent: the buffer keeps what lies between, and the
 * request goes from part to part. So requests are the same as if all had been copied, stripes and
 * all. Direct I/O takes whole units of memory as of the file.
 */
#include "ring/writer.h"

#include <errno.h>
#include <string.h>
#include <unistd.h>

/* Less is copied sooner than the kernel finds its pages. */
#define LEAST_LOAN_BYTES (64 * KIB)

void ring_writer_lend(struct ring_writer *writer, const void *memory, size_t bytes)
{
	writer->lent = memory;
	writer->lent_bytes = memory ? bytes : 0;
}

/* ---- Borrowing ------------------------------------------------------------------------------- */

static size_t unit_of(const struct ring_writer *writer)
{
	return MAX(ring_lane_direct_alignment(writer->lane, &writer->fs),
		   (size_t)sysconf(_SC_PAGESIZE));
}

static bool is_lent(const struct ring_writer *writer, const uint8_t *data, size_t bytes)
{
	return writer->lent && data >= writer->lent && bytes <= writer->lent_bytes &&
	       (size_t)(data - writer->lent) <= writer->lent_bytes - bytes;
}

/* The last one of the block, if these bytes come right behind it, there and in memory. */
static struct ring_loan *loan_before(const struct ring_writer *writer, const uint8_t *data)
{
	struct ring_buffer *buffer = writer->buffer;
	struct ring_loan *last;

	if (!buffer->loan_count)
		return NULL;
	last = &buffer->loans[buffer->loan_count - 1];
	return last->at + last->bytes == writer->used && last->from + last->bytes == data ? last :
											    NULL;
}

size_t ring_writer_must_copy(const struct ring_writer *writer, const uint8_t *data, size_t bytes)
{
	const size_t unit = unit_of(writer);
	const size_t past = (size_t)(ring_writer_offset(writer) % unit);
	const size_t head = past ? unit - past : 0;
	size_t least = MAX(LEAST_LOAN_BYTES, unit);

	/* A pipe is not written from a lane. */
	if (base_without("lending") || writer->file.stream || !is_lent(writer, data, bytes) ||
	    ((uintptr_t)data + head) % unit)
		return bytes;
	if (!head && loan_before(writer, data))
		least = unit;
	else if (writer->buffer->loan_count == RING_MOST_LOANS)
		return bytes;
	return bytes < head + least ? bytes : head;
}

size_t ring_writer_borrow(struct ring_writer *writer, const uint8_t *data, size_t bytes)
{
	struct ring_buffer *buffer = writer->buffer;
	struct ring_loan *loan = loan_before(writer, data);

	bytes -= bytes % unit_of(writer);
	if (!loan) {
		loan = &buffer->loans[buffer->loan_count++];
		*loan = (struct ring_loan){ .at = writer->used, .from = data };
	}
	loan->bytes += bytes;
	return bytes;
}

void ring_writer_fill_in(struct ring_writer *writer)
{
	struct ring_buffer *buffer = writer->buffer;

	if (!buffer)
		return;
	for (unsigned i = 0; i < buffer->loan_count; i++)
		memcpy(buffer->data + buffer->loans[i].at, buffer->loans[i].from,
		       buffer->loans[i].bytes);
	buffer->loan_count = 0;
}

/* ---- Giving back ----------------------------------------------------------------------------- */

uint64_t ring_writer_settled(const struct ring_writer *writer)
{
	const struct ring_lane *lane = writer->lane;
	uint64_t settled = ring_writer_offset(writer);

	for (unsigned i = 0; i < lane->shape.depth; i++) {
		const struct ring_buffer *buffer = &lane->buffers[i];
		/* That of the one being filled is not known yet to the lane. */
		const uint64_t offset = buffer == writer->buffer ?
						writer->submitted :
						buffer->offset - writer->options.part_offset;

		if (buffer->loan_count)
			settled = MIN(settled, offset + buffer->loans[0].at);
	}
	return settled;
}

/* Something less is lent. */
static int settle_some(struct ring_writer *writer, struct base_error *error)
{
	struct ring_lane *lane = writer->lane;

	/* It is first: nothing before it is under way any more. */
	if (ring_writer_settled(writer) >= writer->submitted) {
		ring_writer_fill_in(writer);
		return 0;
	}
	if (!lane->in_flight)
		return base_refuse(error, -EIO,
				   "requests for \"%s\" are lost" BASE_REMEDY "save again",
				   writer->file.path);
	return ring_lane_settle(lane, lane->in_flight + lane->ready_count - 1, error);
}

int ring_writer_settle(struct ring_writer *writer, uint64_t offset, struct base_error *error)
{
	int ret = 0;

	offset = MIN(offset, ring_writer_offset(writer));
	while (!ret && !writer->failed && ring_writer_settled(writer) < offset)
		ret = settle_some(writer, error);
	writer->failed |= ret != 0;
	if (!writer->failed)
		return 0;
	ring_lane_drain(writer->lane, NULL);
	if (writer->buffer)
		writer->buffer->loan_count = 0;
	return ret ? ret :
		     base_refuse(error, -EIO, "\"%s\" failed before" BASE_REMEDY "save again",
				 writer->file.path);
}
