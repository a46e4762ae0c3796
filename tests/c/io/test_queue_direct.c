/* SPDX-License-Identifier: Apache-2.0 */
/* Direct I/O of queues: when it is used, when it is given up, and how a file ends. */
#define _GNU_SOURCE
#include "support/check_main.h"
#include "support/scripted_queue.h"

#include <errno.h>

/* ---- Direct I/O ------------------------------------------------------------------------------ */

static int64_t not_when_direct(const struct io_op *op, unsigned nth)
{
	(void)nth;
	return fcntl(op->fd, F_GETFL) & O_DIRECT ? -EINVAL : (int64_t)op->bytes;
}

static struct test_case direct_case = { .name = "direct",
					.setup = scratch_setup,
					.teardown = scratch_teardown };

TEST(direct_case, direct_io_that_fails_at_use_is_left_with_one_downgrade)
{
	answer = not_when_direct;
	begin(false);
	ck_assert_int_eq(io_queue_go_direct(queue, &fs, &error), 0);
	/*
	 * All requests but the last, which is kept back, have been answered before the first answer
	 * is read.
	 */
	for (unsigned i = 0; i < DEPTH; i++)
		submit(i * BLOCK, BLOCK);
	ck_assert_msg(!io_queue_drain(queue, &error), "%s", error.text);
	ck_assert(!is_direct());
	ck_assert_uint_eq(downgrades.count, 1);
	ck_assert_int_eq(downgrades.list[0].code, IOSHAPE_DOWNGRADE_DIRECT);
	ck_assert_uint_eq(requests, 2 * DEPTH - 1);
	end();
}

TEST(direct_case, direct_io_that_is_required_and_fails_at_use_is_a_failure)
{
	answer = not_when_direct;
	begin_with(IOSHAPE_DIRECT_REQUIRE, NULL);
	start(false);
	ck_assert_int_eq(io_queue_go_direct(queue, &fs, &error), 0);
	submit(0, BLOCK);
	ck_assert_int_eq(io_queue_drain(queue, &error), -EINVAL);
	ck_assert(is_direct());
	end();
}

static int64_t invalid(const struct io_op *op, unsigned nth)
{
	(void)op;
	(void)nth;
	return -EINVAL;
}

TEST(direct_case, an_invalid_request_without_direct_io_fails_at_once)
{
	answer = invalid;
	begin(false);
	submit(0, BLOCK);
	ck_assert_int_eq(io_queue_drain(queue, &error), -EINVAL);
	ck_assert_uint_eq(requests, 1);
	end();
}

TEST(direct_case, an_invalid_request_stays_invalid_after_direct_io_was_left)
{
	answer = invalid;
	begin(false);
	ck_assert_int_eq(io_queue_go_direct(queue, &fs, &error), 0);
	submit(0, BLOCK);
	ck_assert_int_eq(io_queue_drain(queue, &error), -EINVAL);
	ck_assert_uint_le(requests, 200);
	end();
}

TEST(direct_case, a_filesystem_without_direct_io_is_recorded_or_refused)
{
	fs = (struct fs_info){ 0 };
	answer = all_of_it;
	begin(false);
	fs.direct_known = true;
	ck_assert_int_eq(io_queue_go_direct(queue, &fs, &error), 0);
	ck_assert(!queue->direct && !is_direct());
	ck_assert_uint_eq(downgrades.count, 1);
	ck_assert_int_eq(downgrades.list[0].code, IOSHAPE_DOWNGRADE_DIRECT);
	end();

	begin_with(IOSHAPE_DIRECT_REQUIRE, NULL);
	start(false);
	fs.direct_known = true;
	ck_assert_int_eq(io_queue_go_direct(queue, &fs, &error), -ENOTSUP);
	ck_assert_str_ne(error.remedy, "");
	end();
}

TEST(direct_case, direct_io_that_is_required_is_not_forgotten_by_an_engine_without_it)
{
	begin_with(IOSHAPE_DIRECT_REQUIRE, NULL);
	refuse_open = -EPERM;
	tried_engines[1] = &io_engine_buffered;
	tried_engines[2] = NULL;
	start(false);
	ck_assert_int_eq(io_queue_go_direct(queue, &fs, &error), -ENOTSUP);
	io_queue_detach(queue);
	io_queue_close(queue);
	close(fd);
}

TEST(direct_case, direct_io_that_is_not_wanted_is_not_used)
{
	begin_with(IOSHAPE_DIRECT_OFF, NULL);
	start(false);
	ck_assert_int_eq(io_queue_go_direct(queue, &fs, &error), 0);
	ck_assert(!queue->direct && !is_direct());
	ck_assert_uint_eq(downgrades.count, 0);
	end();
}

/* An invalid alignment from a filesystem must not lead to writes beyond a buffer. */
TEST(direct_case, an_alignment_that_no_block_has_is_not_used)
{
	static const uint32_t strange[] = { 2 * BLOCK, 1u << 31, 3000, UINT32_MAX };

	for (size_t i = 0; i < ARRAY_LENGTH(strange); i++) {
		answer = all_of_it;
		begin(false);
		fs.offset_alignment = strange[i];
		ck_assert_int_eq(io_queue_go_direct(queue, &fs, &error), 0);
		ck_assert(!queue->direct && !is_direct());
		ck_assert_uint_eq(downgrades.count, 1);
		end();
	}
}

/* ---- Reading --------------------------------------------------------------------------------- */

static uint64_t file_bytes;
static size_t most_at_once;

/* Answers like a file of file_bytes, with at most most_at_once bytes per request. */
static int64_t as_a_file(const struct io_op *op, unsigned nth)
{
	size_t there = op->offset < file_bytes ? file_bytes - op->offset : 0;

	(void)nth;
	ck_assert_int_eq(op->kind, IO_READ);
	return (int64_t)MIN(MIN(there, op->bytes), most_at_once);
}

static void read_direct_as(uint64_t size, size_t portion, uint64_t offset, size_t bytes,
			   size_t expected)
{
	struct io_buffer *buffer;

	file_bytes = size;
	most_at_once = portion;
	answer = as_a_file;
	requests = 0;
	begin(true);
	queue->direct = true;
	queue->alignment = 512;
	buffer = submit(offset, bytes);
	ck_assert_msg(!io_queue_finish(queue, buffer, &error), "%s", error.text);
	ck_assert(!buffer->in_flight);
	ck_assert_uint_eq(buffer->moved, expected);
	for (unsigned i = 0; i < requests; i++)
		ck_assert_uint_eq(asked[i].offset % 512, 0);
	io_queue_give_back(queue, buffer);
	end();
}

static struct test_case reading = { .name = "reading",
				    .setup = scratch_setup,
				    .teardown = scratch_teardown };

TEST(reading, a_read_goes_on_until_it_has_all)
{
	read_direct_as(1 << 20, SIZE_MAX, 4096, 32768, 32768);
	read_direct_as(1 << 20, 4096, 4096, 32768, 32768);
	read_direct_as(1 << 20, 512, 0, 8192, 8192);
}

TEST(reading, a_read_ends_with_the_file)
{
	read_direct_as(10000, SIZE_MAX, 0, 32768, 10000);
	read_direct_as(10000, SIZE_MAX, 8192, 4096, 10000 - 8192);
	read_direct_as(8192, SIZE_MAX, 0, 32768, 8192);
	read_direct_as(8192, SIZE_MAX, 8192, 512, 0);
	read_direct_as(8192, SIZE_MAX, 65536, 512, 0);
	read_direct_as(0, SIZE_MAX, 0, 512, 0);
	read_direct_as(10000, 4096, 0, 32768, 10000);
}

/*
 * FUSE daemons and network filesystems may return less than was asked for, also in the middle of a
 * file.
 */
TEST(reading, an_answer_that_ends_anywhere_is_not_taken_for_the_end_of_the_file)
{
	read_direct_as(1 << 20, 5000, 0, 32768, 32768);
	read_direct_as(1 << 20, 513, 4096, 8192, 8192);
	read_direct_as(10000, 5000, 0, 32768, 10000);
}

TEST(reading, a_read_slot_is_not_free_until_it_was_looked_at)
{
	struct io_buffer *buffer;

	answer = as_a_file;
	file_bytes = 1 << 20;
	most_at_once = SIZE_MAX;
	begin(true);
	buffer = submit(0, BLOCK);
	ck_assert_int_eq(io_queue_drain(queue, &error), 0);
	ck_assert_uint_eq(count_free(), DEPTH - 1);
	io_queue_give_back(queue, buffer);
	end();
}
