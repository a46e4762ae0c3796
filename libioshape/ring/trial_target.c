/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What one storage target is like: how fast it writes on where it left off, and how long it takes
 * to go elsewhere. On spinning disks the latter is what a storm costs, and what a file's requests
 * must be long for; on flash, and behind a cache, it is next to nothing, and requests may be short.
 */
#define _GNU_SOURCE
#include "ring/calibrate.h"

#include <unistd.h>

#define ON_BYTES (1 * MIB)
#define ELSEWHERE_BYTES (64 * KIB)
#define ELSEWHERE_WRITES 2
/* Where the file is not striped, and in how many rounds over its targets where it is. */
#define FAR_BYTES (64 * MIB)
#define FAR_ROUNDS 8

/* One write, alone. UINT64_MAX if it fails. */
static uint64_t time_write(const struct ring_bench *bench, uint64_t offset, size_t bytes)
{
	const uint64_t begin = base_now_ns();

	if (pwrite(bench->direct.fd, bench->data, bytes, (off_t)offset) != (ssize_t)bytes)
		return UINT64_MAX;
	return MAX(base_now_ns() - begin, 1);
}

/* Seconds for each of some writes that go to and fro; negative after a failure. */
static double elsewhere(const struct ring_bench *bench, uint64_t far)
{
	uint64_t took, sum = 0;

	for (unsigned i = 0; i < ELSEWHERE_WRITES; i++) {
		took = time_write(bench, (i % 2 ? far : 0) + i * ELSEWHERE_BYTES, ELSEWHERE_BYTES);
		if (took == UINT64_MAX)
			return -1;
		sum += took;
	}
	return base_seconds(sum) / ELSEWHERE_WRITES;
}

uint32_t ring_bench_targets(const struct ring_bench *bench)
{
	const struct fs_part *part = ring_stripes_at(&bench->fs.layout, 0);

	return part ? MAX(part->stripe_count, 1) : 1;
}

void ring_bench_target(const struct ring_bench *bench, struct ring_calibration *calibration)
{
	const struct fs_part *part = ring_stripes_at(&bench->fs.layout, 0);
	const uint64_t round = part ? part->stripe_bytes * ring_bench_targets(bench) : ON_BYTES;
	const uint64_t far = part ? MIN(round * FAR_ROUNDS, bench->room_bytes / 2 / round * round) :
				    MIN(FAR_BYTES, bench->room_bytes / 2);
	const size_t bytes = part ? MIN(part->stripe_bytes, ON_BYTES) : ON_BYTES;
	/* Behind it on the same target. */
	const uint64_t next = part && bytes == part->stripe_bytes ? round : bytes;
	uint64_t on_ns;
	double seconds;

	/* What begins on a metadata server says nothing of targets. */
	if (!part && bench->fs.layout.count)
		return;
	if (!bench->has_direct || !far || far < bytes || base_now_ns() >= bench->end_ns ||
	    bytes % 4096 || time_write(bench, 0, bytes) == UINT64_MAX)
		return;
	on_ns = time_write(bench, next, bytes);
	seconds = elsewhere(bench, far);
	if (on_ns == UINT64_MAX || seconds < 0)
		return;
	calibration->target_bytes_per_s = (uint64_t)((double)bytes * 1e9 / (double)on_ns);
	seconds -= base_seconds(on_ns) * ELSEWHERE_BYTES / (double)bytes;
	calibration->seek_us = seconds > 0 ? (uint32_t)(MIN(seconds, 1.0) * 1e6) : 0;
}
