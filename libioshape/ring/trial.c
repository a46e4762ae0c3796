/* SPDX-License-Identifier: Apache-2.0 */
/*
 * One trial: so many bytes through an engine into a file of the real filesystem, and the time that
 * takes. All requests write the same memory: what counts is where they go.
 */
#define _GNU_SOURCE
#include "ring/calibrate.h"

#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

/* Of each file: more than time allows to be written on all but the fastest disks. */
#define ROOM_BYTES (256 * MIB)

/* Who has less than this part of a filesystem free has other worries. */
#define LEAST_FREE_PERCENT 2

/* ---- Files ----------------------------------------------------------------------------------- */

/* On its own, so that nobody sees it and nothing is left behind; where names of open files can go.
 */
static void hide(struct ring_destination *destination, const struct fs_info *fs)
{
	if (fs->magic == FS_FUSE_MAGIC || fs->family == FS_NFS)
		return;
	unlinkat(destination->directory_fd, destination->temporary, 0);
}

/* As a file that is saved: its space is reserved, or at least its length is set. */
static int make_room(struct ring_destination *destination, uint64_t bytes)
{
	if (!fallocate(destination->fd, 0, 0, (off_t)bytes))
		return 0;
	if (errno == ENOSPC || errno == EDQUOT || errno == EFBIG || errno == EIO)
		return -errno;
	return ftruncate(destination->fd, (off_t)bytes) ? -errno : 0;
}

static int open_one(struct ring_bench *bench, struct ring_destination *destination,
		    const struct ring_config *config, const char *path, bool direct,
		    struct base_error *error)
{
	struct ring_notes notes = { 0 };
	struct fs_memory memory = { 0 };
	struct ring_striping striping = {
		.request = &config->layout,
		.bytes = ROOM_BYTES,
		.direct = direct,
		.direct_required = config->direct == IOSHAPE_DIRECT_REQUIRE,
		.memory = &memory,
		.log = &config->log,
	};
	int ret = ring_destination_open(destination, path, false, &striping, &notes, error);

	if (ret)
		return ret;
	if (destination->stream)
		return base_refuse(error, -ENOTSUP, "\"%s\" is a pipe or a device", path);
	ret = fs_describe(destination->fd, path, &memory, &bench->fs, error);
	if (ret)
		return ret;
	if (!striping.direct_required && fs_writes_cached(bench->fs.family, bench->fs.magic))
		return base_refuse(error, -ENOTSUP, "\"%s\" is written through the page cache",
				   path);
	hide(destination, &bench->fs);
	ret = make_room(destination, bench->room_bytes);
	if (ret)
		return base_fail(error, ret == -EIO ? ret : -ENOTSUP,
				 "no space to try in at \"%s\"", path);
	return 0;
}

static int check_space(struct ring_bench *bench, const char *path, struct base_error *error)
{
	struct statvfs system;
	uint64_t free_bytes;

	if (bench->fs.family == FS_TMPFS)
		return base_refuse(error, -ENOTSUP, "\"%s\" is in memory", path);
	if (fstatvfs(bench->direct.fd, &system))
		return base_fail(error, -errno, "cannot look at the filesystem of \"%s\"", path);
	free_bytes = (uint64_t)system.f_bavail * system.f_frsize;
	if (free_bytes / LEAST_FREE_PERCENT < (uint64_t)system.f_blocks * system.f_frsize / 100 ||
	    free_bytes < 4 * ROOM_BYTES + bench->leave_bytes)
		return base_refuse(error, -ENOTSUP, "too little space is free at \"%s\"", path);
	return 0;
}

static bool set_direct(int fd)
{
	int flags = fcntl(fd, F_GETFL);

	return flags >= 0 && !fcntl(fd, F_SETFL, flags | O_DIRECT);
}

/* Neither zeros nor anything else that a filesystem could save itself. */
static void fill(uint8_t *data, size_t bytes)
{
	uint64_t state = base_random();

	for (size_t i = 0; i + 8 <= bytes; i += 8) {
		state ^= state << 13;
		state ^= state >> 7;
		state ^= state << 17;
		memcpy(data + i, &state, 8);
	}
}

int ring_bench_open(struct ring_bench *bench, const struct ring_config *config, const char *path,
		    struct base_error *error)
{
	const struct fs_part *part;
	int ret;

	bench->direct.fd = bench->direct.lock_fd = bench->direct.directory_fd = -1;
	bench->buffered = bench->direct;
	bench->room_bytes = MIN(ROOM_BYTES, base_largest_file());
	ret = open_one(bench, &bench->direct, config, path, true, error);
	if (!ret)
		ret = check_space(bench, path, error);
	if (!ret)
		ret = open_one(bench, &bench->buffered, config, path, false, error);
	if (ret)
		return ret;
	bench->has_direct = (!bench->fs.direct_known || bench->fs.direct_works) &&
			    set_direct(bench->direct.fd);
	bench->data = base_map(RING_BLOCK_BYTES);
	if (!bench->data)
		return base_no_memory(error, "a trial", RING_BLOCK_BYTES);
	fill(bench->data, RING_BLOCK_BYTES);
	part = ring_stripes_at(&bench->fs.layout, 0);
	bench->step_bytes = part ? MAX(ring_stripe_block(part->stripe_bytes), part->stripe_bytes) :
				   RING_BLOCK_BYTES;
	return 0;
}

void ring_bench_close(struct ring_bench *bench)
{
	for (unsigned i = 0; i < ARRAY_LENGTH(bench->engines); i++) {
		if (bench->engines[i])
			ring_engine_of((enum ioshape_engine)i)->close(bench->engines[i]);
	}
	ring_destination_close(&bench->direct);
	ring_destination_close(&bench->buffered);
	base_unmap(bench->data, RING_BLOCK_BYTES);
}

/* ---- Requests -------------------------------------------------------------------------------- */

/* One trial under way. */
struct run {
	const struct ring_engine_ops *ops;
	void *engine;
	int fd;
	bool direct;
	bool local; /* what leaves the page cache is on the disk */
	uint8_t *data;
	size_t block;
	uint64_t offset, end; /* of what is yet to be sent */
	uint64_t moved;
	unsigned in_flight;
	int failed;
	struct ring_op ops_of[RING_MOST_DEPTH];
	struct ring_op *free;
};

static int get_engine(struct ring_bench *bench, enum ioshape_engine which)
{
	const struct ring_engine_params params = {
		.depth = RING_MOST_DEPTH,
		.memory = bench->data,
		.memory_bytes = RING_BLOCK_BYTES,
	};
	char why[200];
	int ret;

	if (bench->engines[which])
		return 0;
	if (bench->refused[which])
		return -ENOTSUP;
	ret = ring_engine_of(which)->open(&bench->engines[which], &params, why, sizeof(why));
	if (ret) {
		bench->engines[which] = NULL;
		bench->refused[which] = true;
	}
	return ret;
}

static void send(struct run *run, struct ring_op *op)
{
	int ret;

	*op = (struct ring_op){
		.kind = RING_WRITE,
		.fd = run->fd,
		.data = run->data,
		.bytes = MIN(run->block, run->end - run->offset),
		.offset = run->offset,
	};
	ret = run->ops->submit(run->engine, op);
	if (ret) {
		run->failed = ret;
		return;
	}
	run->offset += op->bytes;
	run->in_flight++;
}

/* One completion. What is short or interrupted counts for what it moved: it is no failure. */
static void take(struct run *run)
{
	struct ring_op *op = run->ops->wait(run->engine);

	if (!op) {
		run->failed = -EIO;
		run->in_flight = 0;
		return;
	}
	run->in_flight--;
	if (op->result > 0)
		run->moved += (uint64_t)op->result;
	else if (op->result != -EINTR && op->result != -EAGAIN)
		run->failed = op->result ? (int)op->result : -EIO;
	op->next = run->free;
	run->free = op;
}

/* Buffered bytes have to be where the direct ones are, before the time is taken. */
static void settle(struct run *run, uint64_t begin)
{
	const unsigned flags = SYNC_FILE_RANGE_WAIT_BEFORE | SYNC_FILE_RANGE_WRITE |
			       SYNC_FILE_RANGE_WAIT_AFTER;

	if (run->failed || run->direct)
		return;
	/* Elsewhere it may be in a client's memory: only fsync() says that a server has it. */
	if (run->local && !sync_file_range(run->fd, (off_t)begin, (off_t)run->moved, flags))
		return;
	if (fsync(run->fd))
		run->failed = -errno;
}

static uint64_t write_all(struct run *run, unsigned depth, uint64_t give_up_ns)
{
	const uint64_t offset = run->offset, begin = base_now_ns();
	struct ring_op *op;

	run->ops->attach(run->engine, run->fd);
	for (unsigned i = 0; i < depth; i++) {
		run->ops_of[i].next = run->free;
		run->free = &run->ops_of[i];
	}
	while (run->offset < run->end && !run->failed) {
		if (give_up_ns && base_now_ns() - begin > give_up_ns)
			break;
		op = run->free;
		if (op) {
			run->free = op->next;
			send(run, op);
		} else {
			take(run);
		}
	}
	while (run->in_flight)
		take(run);
	settle(run, offset);
	run->ops->attach(run->engine, -1);
	return base_now_ns() - begin;
}

int ring_bench_try(struct ring_bench *bench, struct ring_trial *trial, uint64_t bytes,
		   uint64_t give_up_ns)
{
	const struct ring_engine_ops *ops = ring_engine_of(trial->engine);
	struct run run = { .ops = ops, .data = bench->data, .block = trial->block_bytes };
	uint64_t took;
	int ret = 0;

	trial->bytes_per_s = 0;
	if (base_now_ns() >= bench->end_ns || trial->block_bytes > RING_BLOCK_BYTES)
		return -ETIME;
	ret = get_engine(bench, trial->engine);
	if (ret)
		return ret;
	bytes = MIN(bytes, bench->room_bytes) / trial->block_bytes * trial->block_bytes;
	/* From one trial to the next: what lies on which targets is the same in the end. */
	if (bench->at + bytes > bench->room_bytes)
		bench->at = 0;
	run.engine = bench->engines[trial->engine];
	run.local = bench->fs.family == FS_EXT || bench->fs.family == FS_XFS ||
		    bench->fs.family == FS_BTRFS;
	run.direct = ops->direct && bench->has_direct;
	run.fd = run.direct ? bench->direct.fd : bench->buffered.fd;
	run.offset = bench->at;
	run.end = bench->at + bytes;
	bench->at += (bytes + bench->step_bytes - 1) / bench->step_bytes * bench->step_bytes;
	took = write_all(&run, MIN(trial->depth, RING_MOST_DEPTH), give_up_ns);
	if (run.failed)
		return run.failed;
	trial->bytes_per_s = (uint64_t)((double)run.moved * 1e9 / (double)MAX(took, 1));
	return run.moved ? 0 : -EIO;
}
