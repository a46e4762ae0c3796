/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Proof that direct writes work on a mount. Some filesystems accept them and report the failure
 * later, at fsync, when the bytes are no longer in memory. So ioshape syncs the first direct block
 * that it writes to a mount while it still has that block. If the sync is refused, the file begins
 * anew, through the page cache, and so do all later files on that mount.
 */
#include "ring/writer.h"

#include <errno.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

/* Mounts that a context remembers; of more, the one that was found first is forgotten. */
#define MOST_MOUNTS 32

struct proof {
	uint64_t mount; /* its number, or that of its device */
	enum ring_direct found;
};

struct ring_proofs {
	pthread_mutex_t lock;
	struct proof proofs[MOST_MOUNTS];
	unsigned count; /* the next one replaces number count % MOST_MOUNTS */
};

int ring_proofs_open(struct ring_proofs **out, struct base_error *error)
{
	struct ring_proofs *proofs = calloc(1, sizeof(*proofs));

	*out = proofs;
	if (!proofs)
		return base_no_memory(error, "what is known of mounts", sizeof(*proofs));
	pthread_mutex_init(&proofs->lock, NULL);
	return 0;
}

void ring_proofs_close(struct ring_proofs *proofs)
{
	if (!proofs)
		return;
	pthread_mutex_destroy(&proofs->lock);
	free(proofs);
}

/* The kernel never uses the number of a mount again, but does reuse that of a device. */
static uint64_t mount_of(const struct fs_memory *on)
{
	return on->mount ? on->mount : (uint64_t)on->device_major << 32 | on->device_minor;
}

/* Call it with the lock held. Returns NULL if nothing is known of the mount. */
static struct proof *find_proof(struct ring_proofs *proofs, uint64_t mount)
{
	for (size_t i = 0; i < MIN(proofs->count, MOST_MOUNTS); i++) {
		if (proofs->proofs[i].mount == mount)
			return &proofs->proofs[i];
	}
	return NULL;
}

enum ring_direct ring_proofs_get(struct ring_proofs *proofs, const struct fs_memory *on)
{
	enum ring_direct found = RING_DIRECT_UNPROVEN;
	const struct proof *proof;

	if (!proofs)
		return found;
	pthread_mutex_lock(&proofs->lock);
	proof = find_proof(proofs, mount_of(on));
	if (proof)
		found = proof->found;
	pthread_mutex_unlock(&proofs->lock);
	return found;
}

void ring_proofs_put(struct ring_proofs *proofs, const struct fs_memory *on, enum ring_direct found)
{
	struct proof *proof;

	if (!proofs)
		return;
	pthread_mutex_lock(&proofs->lock);
	proof = find_proof(proofs, mount_of(on));
	if (!proof)
		proof = &proofs->proofs[proofs->count++ % MOST_MOUNTS];
	*proof = (struct proof){ mount_of(on), found };
	pthread_mutex_unlock(&proofs->lock);
}

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
	       ring_proofs_get(lane->config.proofs, &lane->fs_memory) == RING_DIRECT_UNPROVEN;
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
	ring_proofs_put(lane->config.proofs, &lane->fs_memory,
			lane->direct && !ret ? RING_DIRECT_WORKS : RING_DIRECT_FAILS);
	if (!ret)
		return 0;
	ring_note(writer->notes, IOSHAPE_STEP_DIRECT,
		  "written through the page cache: %s accepts direct writes, and fsync fails after "
		  "them: %s",
		  writer->fs.type, ioshape_strerror(ret));
	return write_again(writer, first, bytes, error);
}
