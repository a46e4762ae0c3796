/* SPDX-License-Identifier: Apache-2.0 */
/* The requests in which a file is written, and queues whose shape changes from file to file. */
#define _GNU_SOURCE
#include "io/queue.h"
#include "support/check_main.h"
#include "support/fail_memory.h"
#include "support/file_writer.h"
#include "support/random.h"
#include "support/scratch.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#define LUSTRE_BYTES (64 * KIB) /* unit of stripe sizes */

static struct fs_layout striped(uint64_t stripe_bytes, uint32_t count)
{
	return (struct fs_layout){
		.count = 1,
		.mirrors = 1,
		.components[0] = { .end = UINT64_MAX,
				   .stripe_bytes = stripe_bytes,
				   .stripe_count = count },
	};
}

/*
 * Returns a progressive layout like FSx's default: later parts have more stripes. Here the first
 * ones are narrow, too.
 */
static struct fs_layout progressive(void)
{
	struct fs_layout layout = { .count = 3, .mirrors = 1 };

	layout.components[0] = (struct fs_component){
		.end = 1 * MIB, .stripe_bytes = 1 * MIB, .stripe_count = 1, .on_metadata = true
	};
	layout.components[1] = (struct fs_component){
		.begin = 1 * MIB, .end = 64 * MIB, .stripe_bytes = 1 * MIB, .stripe_count = 2
	};
	layout.components[2] = (struct fs_component){
		.begin = 64 * MIB, .end = UINT64_MAX, .stripe_bytes = 4 * MIB, .stripe_count = 8
	};
	return layout;
}

static struct io_shape shape_on(enum fs_family family, const struct io_config *config,
				const struct fs_layout *layout, uint64_t bytes)
{
	const struct fs_info fs = { .family = family, .layout = *layout };
	char why[160] = "";
	struct io_shape shape = io_shape_for(config, &fs, bytes, why, sizeof(why));

	/* The standard shape needs no explanation. */
	ck_assert_int_eq(!strchr(why, ';'), shape.block_bytes == IO_BLOCK_BYTES &&
						    shape.depth == IO_DEPTH &&
						    !config->block_bytes && !config->depth);
	return shape;
}

static struct io_shape shape_for(const struct io_config *config, const struct fs_layout *layout,
				 uint64_t bytes)
{
	return shape_on(FS_OTHER, config, layout, bytes);
}

/* ---- Rules ----------------------------------------------------------------------------------- */

static struct test_case rules = { .name = "rules" };

TEST(rules, without_stripes_the_standard_is_four_megabytes_times_fourteen)
{
	const struct io_config config = { .engine = IOSHAPE_ENGINE_AUTO };
	const struct fs_layout none = { 0 };
	struct io_shape shape = shape_for(&config, &none, GIB);

	ck_assert_uint_eq(shape.block_bytes, 4 * MIB);
	ck_assert_uint_eq(shape.depth, 14);
}

/* For the measurements see docs/performance.md ("Which engine"). */
TEST(rules, the_filesystem_decides_which_engine_writes_and_reads)
{
	static const struct {
		enum fs_family family;
		uint64_t magic;
		enum ioshape_engine engine;
	} cases[] = {
		{ FS_XFS, 0x58465342, IOSHAPE_ENGINE_URING },
		{ FS_EXT, 0xef53, IOSHAPE_ENGINE_URING },
		{ FS_TMPFS, 0x01021994, IOSHAPE_ENGINE_URING },
		{ FS_OTHER, 1, IOSHAPE_ENGINE_URING },
		{ FS_OVERLAY, 0x794c7630, IOSHAPE_ENGINE_URING },
		{ FS_OVERLAY, FS_FUSE_MAGIC, IOSHAPE_ENGINE_URING_ASYNC },
		{ FS_FUSE, FS_FUSE_MAGIC, IOSHAPE_ENGINE_URING_ASYNC },
		{ FS_NFS, 0x6969, IOSHAPE_ENGINE_URING_ASYNC },
		{ FS_LUSTRE, 0x0bd00bd0, IOSHAPE_ENGINE_URING_ASYNC },
		{ FS_CEPH, 0x00c36400, IOSHAPE_ENGINE_URING_ASYNC },
	};
	const struct io_config plain = { 0 }, asked = { .engine = IOSHAPE_ENGINE_THREADS };
	char why[160];

	for (size_t i = 0; i < ARRAY_LENGTH(cases); i++) {
		const struct fs_info fs = { .family = cases[i].family, .magic = cases[i].magic };
		const char *words = cases[i].engine == IOSHAPE_ENGINE_URING ? "local filesystem" :
									      "network filesystem";

		ck_assert_int_eq(io_shape_for(&plain, &fs, GIB, why, sizeof(why)).engine,
				 cases[i].engine);
		ck_assert_int_eq(strncmp(why, words, strlen(words)), 0);
		ck_assert_int_eq(io_shape_to_read(&plain, &fs, GIB).engine, cases[i].engine);
		ck_assert_int_eq(io_shape_for(&asked, &fs, GIB, why, sizeof(why)).engine,
				 IOSHAPE_ENGINE_THREADS);
		ck_assert_int_eq(strncmp(why, "engine as requested", 19), 0);
		ck_assert_int_eq(io_shape_to_read(&asked, &fs, GIB).engine, IOSHAPE_ENGINE_THREADS);
	}
}

TEST(rules, large_files_are_read_with_twice_as_much_under_way)
{
	const struct io_config plain = { 0 }, fixed = { .depth = 3 },
			       large = { .block_bytes = 8 * MIB },
			       largest = { .block_bytes = 64 * MIB };
	const uint64_t small = IO_DEPTH * IO_BLOCK_BYTES;
	const struct fs_info fs = { .family = FS_XFS };

	ck_assert_uint_eq(io_shape_to_read(&plain, &fs, small).depth, IO_DEPTH);
	ck_assert_uint_eq(io_shape_to_read(&plain, &fs, small + 1).depth, IO_READ_DEPTH);
	ck_assert_uint_eq(io_shape_to_read(&fixed, &fs, GIB).depth, 3);
	ck_assert_uint_eq(io_shape_to_read(&large, &fs, GIB).depth,
			  IO_MOST_QUEUE_BYTES / (8 * MIB));
	/* Of such large blocks there are as many as for saves. */
	ck_assert_uint_eq(io_shape_to_read(&largest, &fs, 4 * GIB).depth, IO_DEPTH);
}

TEST(rules, a_request_is_a_stripe)
{
	static const struct {
		uint64_t stripe, block;
	} cases[] = {
		{ 512 * KIB, 512 * KIB },
		{ 1 * MIB, 1 * MIB },
		{ 3 * MIB, 3 * MIB }, /* not a power of two */
		{ 1088 * KIB, 1088 * KIB },
		{ 64 * MIB, 64 * MIB },
		/* Small stripes are combined to at least 512 KiB. */
		{ 64 * KIB, 512 * KIB },
		{ 192 * KIB, 576 * KIB },
		{ 256 * KIB, 512 * KIB },
		/* Large stripes are divided evenly. */
		{ 128 * MIB, 64 * MIB },
		{ 192 * MIB, 64 * MIB },
		{ 65 * MIB, 65 * MIB / 2 },
		/* No stripes, or invalid ones. */
		{ 0, 0 },
		{ 4096, 0 },
		{ 1 * MIB + 512, 0 },
	};
	const struct io_config config = { 0 };

	for (size_t i = 0; i < ARRAY_LENGTH(cases); i++) {
		struct fs_layout layout = striped(cases[i].stripe, 4);

		ck_assert_uint_eq(shape_for(&config, &layout, GIB).block_bytes,
				  cases[i].block ? cases[i].block : 4 * MIB);
	}
}

TEST(rules, every_target_has_its_share_of_the_memory)
{
	static const struct {
		uint64_t stripe;
		uint32_t count;
		unsigned depth;
	} cases[] = {
		{ 1 * MIB, 1, 9 },   { 1 * MIB, 4, 33 },
		{ 4 * MIB, 4, 9 },   { 3 * MIB, 4, 9 }, /* whole stripes */
		{ 1 * MIB, 64, 64 },                    /* the number of requests is limited */
		{ 4 * MIB, 64, 32 },                    /* memory is limited */
		{ 64 * MIB, 8, 2 },  { 64 * KIB, 2, 33 },
		{ 1 * MIB, 0, 9 },   { 1 * MIB, FS_ALL_TARGETS, 64 },
	};
	const struct io_config config = { 0 };

	for (size_t i = 0; i < ARRAY_LENGTH(cases); i++) {
		struct fs_layout layout = striped(cases[i].stripe, cases[i].count);
		struct io_shape shape = shape_for(&config, &layout, GIB);

		ck_assert_msg(shape.depth == cases[i].depth, "%zu: %u", i, shape.depth);
		ck_assert(shape.depth * shape.block_bytes <= IO_MOST_QUEUE_BYTES);
	}
}

TEST(rules, requests_that_go_to_one_target_each_are_counted_for_it)
{
	struct fs_layout layout = striped(1 * MIB, 8);
	struct io_config config = { 0 };
	struct io_shape shape = shape_for(&config, &layout, GIB);

	ck_assert_uint_eq(shape.targets, 8);
	ck_assert_uint_eq(shape.stripe_bytes, MIB);
	/*
	 * Targets are not counted if a request spans several stripes, if there are too many, or if
	 * the user has set the depth.
	 */
	config.block_bytes = 4 * MIB;
	ck_assert_uint_eq(shape_for(&config, &layout, GIB).targets, 0);
	config = (struct io_config){ .depth = 9 };
	shape = shape_for(&config, &layout, GIB);
	ck_assert_uint_eq(shape.targets, 0);
	ck_assert(shape.fixed);
	config.depth = 0;
	layout = striped(1 * MIB, IO_MOST_TARGETS + 1);
	ck_assert_uint_eq(shape_for(&config, &layout, GIB).targets, 0);
}

TEST(rules, what_the_kernel_cuts_is_asked_for_as_it_cuts_it)
{
	const enum fs_family cut[] = { FS_NFS, FS_FUSE }, whole[] = { FS_XFS, FS_LUSTRE, FS_CEPH };
	const struct fs_layout none = { 0 }, stripes = striped(8 * MIB, 4);
	const struct io_config plain = { 0 }, asked = { .block_bytes = 4 * MIB };
	struct io_shape shape;

	for (size_t i = 0; i < ARRAY_LENGTH(cut); i++) {
		shape = shape_on(cut[i], &plain, &none, GIB);
		ck_assert_uint_eq(shape.block_bytes, MIB);
		ck_assert(shape.shared);
		/* The bytes in flight are as many as on other filesystems. */
		ck_assert_uint_eq((shape.depth - 1) * MIB, (IO_DEPTH - 1) * IO_BLOCK_BYTES);
		/* Known stripes and settings take precedence. */
		shape = shape_on(cut[i], &plain, &stripes, GIB);
		ck_assert_uint_eq(shape.block_bytes, 8 * MIB);
		ck_assert(!shape.shared);
		shape = shape_on(cut[i], &asked, &none, GIB);
		ck_assert_uint_eq(shape.block_bytes, 4 * MIB);
	}
	for (size_t i = 0; i < ARRAY_LENGTH(whole); i++) {
		shape = shape_on(whole[i], &plain, &none, GIB);
		ck_assert_uint_eq(shape.block_bytes, IO_BLOCK_BYTES);
	}
}

TEST(rules, what_the_user_fixed_stays_fixed)
{
	const struct fs_layout layout = striped(1 * MIB, 8);
	struct io_config config = { .block_bytes = 2 * MIB, .depth = 3 };
	struct io_shape shape = shape_for(&config, &layout, GIB);

	ck_assert_uint_eq(shape.block_bytes, 2 * MIB);
	ck_assert_uint_eq(shape.depth, 3);
	config.block_bytes = 0;
	shape = shape_for(&config, &layout, GIB);
	ck_assert_uint_eq(shape.block_bytes, 1 * MIB);
	ck_assert_uint_eq(shape.depth, 3);
	config = (struct io_config){ .block_bytes = 512 * KIB };
	shape = shape_for(&config, &layout, GIB);
	ck_assert_uint_eq(shape.block_bytes, 512 * KIB);
	ck_assert_uint_eq(shape.depth, 64);
}

/* Checks all requests of a file of this size, in order. */
static void no_request_crosses(const struct fs_layout *layout, uint64_t bytes)
{
	const struct io_config config = { 0 };
	const struct io_shape shape = shape_for(&config, layout, bytes);
	uint64_t offset = 0;

	while (offset < bytes) {
		const struct fs_component *component = NULL;
		size_t length = io_request_bytes(layout, offset, shape.block_bytes);
		uint64_t unit;

		for (uint32_t i = 0; i < layout->count; i++) {
			if (offset >= layout->components[i].begin &&
			    offset < layout->components[i].end)
				component = &layout->components[i];
		}
		REQUIRE(component && length && length <= shape.block_bytes);
		/* Small stripes are combined to at least 512 KiB. */
		unit = component->stripe_bytes *
		       ((512 * KIB + component->stripe_bytes - 1) / component->stripe_bytes);
		REQUIRE(offset + length <= component->end);
		REQUIRE(offset / unit == (offset + length - 1) / unit);
		/* Requests begin at stripes, except for divided large ones. */
		REQUIRE(component->stripe_bytes > 64 * MIB || offset % unit == 0);
		offset += length;
	}
}

TEST(rules, no_request_crosses_from_stripe_to_stripe)
{
	const struct fs_layout wider = progressive();
	uint64_t state = 5;

	no_request_crosses(&wider, 500 * MIB);
	no_request_crosses(&wider, 30 * MIB);
	for (unsigned i = 0; i < 500; i++) {
		uint64_t stripe = (1 + test_random(&state) % 2000) * LUSTRE_BYTES;
		struct fs_layout layout = striped(stripe, 1 + (uint32_t)test_random(&state) % 40);

		no_request_crosses(&layout, 3 * GIB);
	}
}

TEST(rules, buffers_hold_the_largest_request_of_the_components_that_are_reached)
{
	const struct io_config config = { 0 };
	const struct fs_layout layout = progressive();

	ck_assert_uint_eq(shape_for(&config, &layout, 30 * MIB).block_bytes, 1 * MIB);
	ck_assert_uint_eq(shape_for(&config, &layout, 65 * MIB).block_bytes, 4 * MIB);
	ck_assert_uint_eq(shape_for(&config, &layout, 0).block_bytes, 4 * MIB);
}

/* ---- Queues ---------------------------------------------------------------------------------- */

static struct io_queue *queue;
static struct base_error error;

/* Engines that AUTO tries. */
static const struct io_engine_ops *engines[] = { &io_engine_uring, &io_engine_threads,
						 &io_engine_buffered, NULL };

static void open_queue(enum ioshape_engine engine)
{
	const struct io_config config = { .engine = engine, .engines = engines, .threads = 1 };

	ck_assert_int_eq(io_queue_open(&queue, &config, &error), 0);
}

static int reshape(enum ioshape_engine engine, size_t block_bytes, unsigned depth)
{
	const struct io_shape shape = { .engine = engine,
					.block_bytes = block_bytes,
					.depth = depth };

	return io_queue_shape(queue, &shape, &error);
}

/* Takes all buffers, fills them completely and returns them, to check that they do not overlap. */
static void fill_all(size_t block_bytes, unsigned depth)
{
	struct io_buffer *buffers[IO_MOST_DEPTH];

	for (unsigned i = 0; i < depth; i++) {
		buffers[i] = io_queue_free_buffer(queue);
		ck_assert_ptr_nonnull(buffers[i]);
		ck_assert_uint_eq((uintptr_t)buffers[i]->data % 4096, 0);
		memset(buffers[i]->data, (int)i + 1, block_bytes);
	}
	ck_assert_ptr_null(io_queue_free_buffer(queue));
	for (unsigned i = 0; i < depth; i++) {
		ck_assert_uint_eq(buffers[i]->data[0], i + 1);
		ck_assert_uint_eq(buffers[i]->data[block_bytes - 1], i + 1);
		io_queue_give_back(queue, buffers[i]);
	}
}

static struct test_case queues_case = { .name = "queues",
					.setup = scratch_setup,
					.teardown = scratch_teardown };

TEST(queues_case, buffers_are_cut_anew)
{
	static const struct {
		size_t block;
		unsigned depth;
	} cases[] = { { 1 * MIB, 14 }, { 512 * KIB, 64 }, { 3 * MIB, 30 },
		      { 4 * MIB, 1 },  { 16 * MIB, 4 },   { 4 * MIB, 14 } };

	open_queue(IOSHAPE_ENGINE_AUTO);
	fill_all(4 * MIB, 14);
	for (size_t i = 0; i < ARRAY_LENGTH(cases); i++) {
		ck_assert_int_eq(reshape(0, cases[i].block, cases[i].depth), 0);
		ck_assert_uint_eq(queue->limit, MAX(cases[i].depth - 1, 1));
		fill_all(cases[i].block, cases[i].depth);
	}
	io_queue_close(queue);
}

TEST(queues_case, an_engine_is_kept_while_it_serves)
{
	void *engine;

	open_queue(IOSHAPE_ENGINE_AUTO);
	queue->config.engines = NULL;
	ck_assert_int_eq(reshape(IOSHAPE_ENGINE_URING, 4 * MIB, 14), 0);
	ck_assert_int_eq(io_queue_start(queue, &error), 0);
	ck_assert_str_eq(queue->ops->id, "uring");
	engine = queue->engine;
	/* Smaller blocks, and fewer of them. */
	ck_assert_int_eq(reshape(IOSHAPE_ENGINE_URING, 1 * MIB, 14), 0);
	ck_assert_int_eq(reshape(IOSHAPE_ENGINE_URING, 4 * MIB, 3), 0);
	ck_assert_ptr_eq(queue->engine, engine);
	/* More memory, more requests, another engine. */
	ck_assert_int_eq(reshape(IOSHAPE_ENGINE_URING, 8 * MIB, 14), 0);
	ck_assert_ptr_null(queue->ops);
	ck_assert_int_eq(io_queue_start(queue, &error), 0);
	ck_assert_int_eq(reshape(IOSHAPE_ENGINE_URING, 1 * MIB, 30), 0);
	ck_assert_ptr_null(queue->ops);
	ck_assert_int_eq(io_queue_start(queue, &error), 0);
	ck_assert_int_eq(reshape(IOSHAPE_ENGINE_URING_ASYNC, 1 * MIB, 30), 0);
	ck_assert_ptr_null(queue->ops);
	ck_assert_int_eq(io_queue_start(queue, &error), 0);
	ck_assert_str_eq(queue->ops->id, "uring-async");
	ck_assert_int_eq(reshape(IOSHAPE_ENGINE_URING, 1 * MIB, 30), 0);
	ck_assert_ptr_null(queue->ops);
	io_queue_close(queue);
}

static int refuse_open(void **engine, const struct io_engine_params *params, char *why,
		       size_t why_bytes)
{
	(void)engine;
	(void)params;
	snprintf(why, why_bytes, "scripted refusal");
	return -EPERM;
}

TEST(queues_case, an_engine_that_is_refused_is_replaced)
{
	struct io_engine_ops refusing = io_engine_uring;

	refusing.open = refuse_open;
	engines[0] = &refusing;
	open_queue(IOSHAPE_ENGINE_AUTO);
	ck_assert_int_eq(reshape(IOSHAPE_ENGINE_URING_ASYNC, 1 * MIB, 2), 0);
	ck_assert_int_eq(io_queue_start(queue, &error), 0);
	ck_assert_str_eq(queue->ops->id, "threads");
	ck_assert_str_eq(queue->downgrade, "scripted refusal");
	io_queue_close(queue);
}

TEST(queues_case, without_memory_for_it_the_former_shape_stays)
{
	int ret;

	for (unsigned long nth = 1; nth <= 2; nth++) {
		open_queue(IOSHAPE_ENGINE_AUTO);
		/* The array of buffers, and their memory. */
		fail_memory_at(nth);
		ret = reshape(IOSHAPE_ENGINE_AUTO, 4 * MIB, 30);
		fail_memory_at(0);
		ck_assert_int_eq(ret, -ENOMEM);
		fill_all(4 * MIB, 14);
		ck_assert_int_eq(reshape(IOSHAPE_ENGINE_AUTO, 4 * MIB, 30), 0);
		fill_all(4 * MIB, 30);
		io_queue_close(queue);
	}
}

TEST(queues_case, a_queue_reads_in_the_standard_shape)
{
	struct io_piece piece = { .bytes = 9 * MIB, .want_crc = true };
	uint8_t *data = malloc(9 * MIB);
	struct io_input input;
	uint64_t state = 3;
	int fd = open(scratch_path("file"), O_RDWR | O_CREAT | O_CLOEXEC, 0666);

	ck_assert_ptr_nonnull(data);
	test_random_fill(&state, data, 9 * MIB);
	ck_assert_int_eq(pwrite(fd, data, 9 * MIB, 0), 9 * MIB);
	ck_assert_int_eq(fsync(fd), 0);
	posix_fadvise(fd, 0, 0, POSIX_FADV_DONTNEED);
	open_queue(IOSHAPE_ENGINE_AUTO);
	ck_assert_int_eq(reshape(IOSHAPE_ENGINE_BUFFERED, 1088 * KIB, 5), 0);
	ck_assert_int_eq(
		io_input_open(&input, scratch_path("file"), 0, 0, IOSHAPE_DIRECT_PREFER, &error),
		0);
	ck_assert_msg(!io_read(queue, &input, &piece, 1, NULL, NULL, &error), "%s", error.text);
	ck_assert_uint_eq(piece.crc, base_crc32(0, data, 9 * MIB));
	ck_assert_uint_eq(queue->shape.block_bytes, 4 * MIB);
	ck_assert_uint_eq(queue->shape.depth, 14);
	io_input_close(&input);
	io_queue_close(queue);
	close(fd);
	free(data);
}

/* ---- Targets --------------------------------------------------------------------------------- */

/*
 * A file whose targets have pauses is written correctly, also when all targets wait and at odd
 * ends.
 */
LOOP_TEST(queues_case, files_with_pauses_arrive, IOSHAPE_ENGINE_URING, IOSHAPE_ENGINE_BUFFERED + 1)
{
	static uint8_t data[3 * MIB + 4321];
	const struct io_shape shape = { .engine = (enum ioshape_engine)_i,
					.block_bytes = LUSTRE_BYTES,
					.depth = 7,
					.targets = 3,
					.stripe_bytes = LUSTRE_BYTES };
	struct io_downgrades downgrades = { 0 };
	uint64_t seed = 5;
	int fd;

	test_random_fill(&seed, data, sizeof(data));
	open_queue(shape.engine);
	ck_assert_int_eq(io_queue_shape(queue, &shape, &error), 0);
	ck_assert_int_eq(io_queue_start(queue, &error), 0);
	fd = open(scratch_path("bursts"), O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
	io_queue_attach(queue, fd, "bursts", false, &downgrades);
	for (size_t at = 0; at < sizeof(data); at += LUSTRE_BYTES) {
		struct io_buffer *buffer;

		ck_assert_int_eq(io_queue_take(queue, &buffer, &error), 0);
		buffer->offset = at;
		buffer->bytes = MIN(LUSTRE_BYTES, sizeof(data) - at);
		memcpy(buffer->data, data + at, buffer->bytes);
		ck_assert_int_eq(io_queue_submit(queue, buffer, &error), 0);
	}
	ck_assert_int_eq(io_queue_reduce(queue, 0, &error), 0);
	io_queue_detach(queue);
	ck_assert(scratch_same(scratch_path("bursts"), data, sizeof(data)));
	close(fd);
}

/* ---- An engine that refuses requests after a while ------------------------------------------- */

static unsigned takes;
static struct io_op *taken[32];
static unsigned taken_count;

static int refusing_open(void **engine, const struct io_engine_params *params, char *why,
			 size_t why_bytes)
{
	(void)params;
	(void)why_bytes;
	*why = 0;
	*engine = taken;
	return 0;
}

static void refusing_close(void *engine)
{
	(void)engine;
}

static int refusing_submit(void *engine, struct io_op *op)
{
	(void)engine;
	if (!takes)
		return -EPERM;
	takes--;
	taken[taken_count++] = op;
	return 0;
}

/* Completes the last request first, because requests may complete out of order. */
static struct io_op *refusing_wait(void *engine)
{
	(void)engine;
	if (!taken_count)
		return NULL;
	taken_count--;
	taken[taken_count]->result = (int64_t)taken[taken_count]->bytes;
	return taken[taken_count];
}

static const struct io_engine_ops refusing = {
	.id = "refusing",
	.open = refusing_open,
	.submit = refusing_submit,
	.wait = refusing_wait,
	.close = refusing_close,
};

/* Whenever a request is refused, afterwards each buffer is free exactly once. */
LOOP_TEST(queues_case, after_a_refusal_each_slot_is_free_once, 0, 20)
{
	const struct io_shape shape = {
		.block_bytes = LUSTRE_BYTES, .depth = 7, .targets = 3, .stripe_bytes = LUSTRE_BYTES
	};
	const struct io_buffer *seen[8];
	struct io_downgrades downgrades = { 0 };
	struct io_buffer *buffer;
	unsigned count = 0;

	engines[0] = &refusing;
	takes = (unsigned)_i;
	open_queue(IOSHAPE_ENGINE_AUTO);
	ck_assert_int_eq(io_queue_shape(queue, &shape, &error), 0);
	ck_assert_int_eq(io_queue_start(queue, &error), 0);
	io_queue_attach(queue, 0, "refused", false, &downgrades);
	for (uint64_t at = 0; !error.code; at += LUSTRE_BYTES) {
		ck_assert_uint_lt(at, 32 * LUSTRE_BYTES);
		if (io_queue_take(queue, &buffer, &error))
			break;
		buffer->offset = at;
		buffer->bytes = LUSTRE_BYTES;
		io_queue_submit(queue, buffer, &error);
	}
	ck_assert_int_eq(error.code, -EPERM);
	io_queue_drain(queue, NULL);
	for (; (buffer = io_queue_free_buffer(queue)); count++) {
		ck_assert_uint_lt(count, 7);
		for (unsigned i = 0; i < count; i++)
			ck_assert_ptr_ne(seen[i], buffer);
		seen[count] = buffer;
	}
	ck_assert_uint_eq(count, 7);
	io_queue_detach(queue);
}

/* ---- Requests in flight ---------------------------------------------------------------------- */

static struct io_engine_ops timed;
static unsigned most_taken;

static int timed_submit(void *engine, struct io_op *op)
{
	int ret = refusing_submit(engine, op);

	most_taken = MAX(most_taken, taken_count);
	return ret;
}

/* Writes so many blocks. Returns the largest number in flight. */
static unsigned most_in_flight(const struct io_shape *shape, unsigned blocks)
{
	struct io_downgrades downgrades = { 0 };
	struct io_buffer *buffer;

	timed = refusing;
	timed.direct = true;
	timed.submit = timed_submit;
	engines[0] = &timed;
	takes = blocks;
	most_taken = 0;
	open_queue(IOSHAPE_ENGINE_AUTO);
	ck_assert_int_eq(io_queue_shape(queue, shape, &error), 0);
	ck_assert_int_eq(io_queue_start(queue, &error), 0);
	io_queue_attach(queue, 0, "file", false, &downgrades);
	for (uint64_t i = 0; i < blocks; i++) {
		ck_assert_int_eq(io_queue_take(queue, &buffer, &error), 0);
		buffer->offset = i * LUSTRE_BYTES;
		buffer->bytes = LUSTRE_BYTES;
		ck_assert_int_eq(io_queue_submit(queue, buffer, &error), 0);
	}
	/* Few buffers were ready at a time, so memory that is not needed stays unused. */
	if (!shape->fixed)
		ck_assert_uint_le(queue->ready_count,
				  MAX(shape->targets, 1) * queue->depth.limit + 1);
	ck_assert_int_eq(io_queue_drain(queue, &error), 0);
	ck_assert_uint_eq(queue->ready_count, 0);
	io_queue_detach(queue);
	io_queue_close(queue);
	return most_taken;
}

TEST(queues_case, no_more_is_in_flight_than_the_limit_of_each_target)
{
	struct io_shape shape = { .block_bytes = LUSTRE_BYTES, .depth = 32 };

	/* Too few answers for a round, so the limit stays. */
	ck_assert_uint_eq(most_in_flight(&shape, 2), 1);
	shape.targets = 4;
	shape.stripe_bytes = LUSTRE_BYTES;
	ck_assert_uint_eq(most_in_flight(&shape, 5), 4);
	shape = (struct io_shape){ .block_bytes = LUSTRE_BYTES, .depth = 32, .fixed = true };
	ck_assert_uint_eq(most_in_flight(&shape, 100), 31);
}
