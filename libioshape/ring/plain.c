/* SPDX-License-Identifier: Apache-2.0 */
/* Writing without an engine. */
#define _GNU_SOURCE
#include "ring/destination.h"
#include "ring/lane.h"

#include <errno.h>
#include <unistd.h>

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

/* Without an engine: small files, pipes and devices. Offsets are only known to regular files. */
int ring_destination_write(struct ring_destination *destination, const uint8_t *data, size_t bytes,
			   uint64_t offset, struct ring_notes *notes, struct base_error *error)
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
