/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Proof that direct writes work on a mount. Some filesystems accept them and report the failure
 * later, at fsync, when the bytes are no longer in memory. So ioshape syncs the first direct block
 * that it writes to a mount while it still has that block. If the sync is refused, the file begins
 * anew, through the page cache, and so do all later files on that mount.
 */
#include "ring/writer.h"

#include <errno.h>
#include <string.h>

bool ring_refuses_direct(int code)
{
	return code == -EINVAL || code == -EOPNOTSUPP;
}

bool ring_writer_must_prove_direct(const struct ring_writer *writer)
{
	const struct ring_lane *lane = writer->lane;

	/* A filesystem that answers STATX_DIOALIGN knows what it can do. */
	return lane->direct && lane->config.direct == IOSHAPE_DIRECT_PREFER && !writer->submitted &&
	       !writer->fs.direct_known &&
	       ring_memory_direct(lane->config.memory, &lane->fs_memory) == RING_DIRECT_UNPROVEN;
}

/* Writes the first block again, to a new file, or to one that other processes write, too. */
static int write_again(struct ring_writer *writer, const struct ring_buffer *first, size_t bytes,
		       struct base_error *error)
{
	struct ring_lane *lane = writer->lane;
	struct ring_buffer *buffer = ring_lane_free_buffer(lane);
	int ret;

	/* As a rule it is the same buffer. */
	memmove(buffer->data, first->data, bytes);
	buffer->offset = first->offset;
	buffer->bytes = bytes;
	ring_lane_detach(lane);
	writer->striping.direct = writer->was_direct = false;
	ret = ring_destination_begin_again(&writer->file, &writer->striping, writer->notes, error);
	if (!ret)
		ret = ring_writer_reserve(writer, error);
	if (ret) {
		ring_lane_give_back(lane, buffer);
		return ret;
	}
	ring_lane_attach(lane, writer->file.fd, writer->file.path, false, writer->notes);
	return ring_lane_submit(lane, buffer, error);
}

int ring_writer_prove_direct(struct ring_writer *writer, const struct ring_buffer *first,
			     size_t bytes, struct base_error *error)
{
	struct ring_lane *lane = writer->lane;
	struct base_error late = { 0 };
	int ret = ring_lane_drain(lane, error);

	if (ret)
		return ret;
	if (lane->direct)
		ret = ring_destination_sync(&writer->file, &late);
	if (ret && !ring_refuses_direct(ret)) {
		if (error)
			*error = late;
		return ret;
	}
	ring_memory_keep_direct(lane->config.memory, &lane->fs_memory,
				lane->direct && !ret ? RING_DIRECT_WORKS : RING_DIRECT_FAILS);
	if (!ret)
		return 0;
	ring_note(writer->notes, IOSHAPE_STEP_DIRECT,
		  "written through the page cache: %s accepts direct writes, and fsync fails after "
		  "them: %s",
		  writer->fs.type, ioshape_strerror(ret));
	return write_again(writer, first, bytes, error);
}
