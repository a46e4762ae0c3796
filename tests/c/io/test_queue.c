/* SPDX-License-Identifier: Apache-2.0 */
/* Tests how a queue handles the results of an engine. */
#define _GNU_SOURCE
#include "support/check_main.h"
#include "support/scripted_queue.h"

#include <errno.h>

/* ---- Engines and queues ---------------------------------------------------------------------- */

static struct test_case life = { .name = "life",
				 .setup = scratch_setup,
				 .teardown = scratch_teardown };

TEST(life, an_engine_is_opened_at_need_and_once)
{
	begin_with(IOSHAPE_DIRECT_PREFER, NULL);
	ck_assert_uint_eq(opened, 0);
	ck_assert_int_eq(io_queue_start(queue, &error), 0);
	ck_assert_int_eq(io_queue_start(queue, &error), 0);
	ck_assert_uint_eq(opened, 1);
	end();
}

static void listen(void *user, enum ioshape_log_level level, const char *message)
{
	unsigned *heard = user;

	(void)message;
	ck_assert_int_eq(level, IOSHAPE_LOG_INFO);
	(*heard)++;
}

TEST(life, the_next_engine_is_used_and_the_reason_is_reported_and_logged)
{
	unsigned heard = 0;
	const struct base_log log = { listen, &heard, IOSHAPE_LOG_INFO };

	begin_with(IOSHAPE_DIRECT_PREFER, &log);
	refuse_open = -EPERM;
	tried_engines[1] = &io_engine_threads;
	tried_engines[2] = NULL;
	start(false);
	ck_assert_str_eq(queue->ops->id, "threads");
	ck_assert_uint_eq(downgrades.count, 1);
	ck_assert_int_eq(downgrades.list[0].code, IOSHAPE_DOWNGRADE_ENGINE);
	ck_assert_uint_eq(heard, 1);
	io_queue_detach(queue);
	io_queue_close(queue);
	close(fd);
}

TEST(life, a_downgrade_is_recorded_for_every_file)
{
	begin_with(IOSHAPE_DIRECT_PREFER, NULL);
	open_remark = "buffers not registered";
	ck_assert_int_eq(io_queue_start(queue, &error), 0);
	for (unsigned file = 1; file <= 3; file++) {
		memset(&downgrades, 0, sizeof(downgrades));
		io_queue_attach(queue, fd, "/the/path", false, &downgrades);
		ck_assert_uint_eq(downgrades.count, 1);
		ck_assert_int_eq(downgrades.list[0].code, IOSHAPE_DOWNGRADE_ENGINE);
		io_queue_detach(queue);
	}
	end();
}

TEST(life, no_engine_at_all_is_an_error_and_can_be_tried_again)
{
	begin_with(IOSHAPE_DIRECT_PREFER, NULL);
	refuse_open = -EPERM;
	ck_assert_int_eq(io_queue_start(queue, &error), -EPERM);
	refuse_open = 0;
	memset(&error, 0, sizeof(error));
	ck_assert_int_eq(io_queue_start(queue, &error), 0);
	closed = opened;
	closed--;
	end();
}

/* ---- Results --------------------------------------------------------------------------------- */

static int64_t a_third_of_it(const struct io_op *op, unsigned nth)
{
	(void)nth;
	return op->bytes > 3 ? (int64_t)op->bytes / 3 : (int64_t)op->bytes;
}

static struct test_case results = { .name = "results",
				    .setup = scratch_setup,
				    .teardown = scratch_teardown };

TEST(results, a_short_write_goes_on_where_it_stopped)
{
	uint64_t expected = 1000;

	answer = a_third_of_it;
	begin(false);
	submit(1000, 50000);
	ck_assert_int_eq(io_queue_drain(queue, &error), 0);
	for (unsigned i = 0; i < requests; i++) {
		ck_assert_uint_eq(asked[i].offset, expected);
		ck_assert_uint_eq(asked[i].offset + asked[i].bytes, 51000);
		expected += (uint64_t)answer(&(struct io_op){ .bytes = asked[i].bytes }, i);
	}
	ck_assert_uint_eq(expected, 51000);
	ck_assert_uint_eq(downgrades.short_results, requests - 1);
	end();
}

static int64_t first_5000(const struct io_op *op, unsigned nth)
{
	return nth ? (int64_t)op->bytes : 5000;
}

TEST(results, a_short_direct_write_goes_on_at_an_aligned_place)
{
	answer = first_5000;
	begin(false);
	ck_assert_int_eq(io_queue_go_direct(queue, &fs, &error), 0);
	ck_assert(is_direct());
	submit(8192, 16384);
	ck_assert_int_eq(io_queue_drain(queue, &error), 0);
	ck_assert_uint_eq(requests, 2);
	ck_assert_uint_eq(asked[1].offset, 8192 + 4608);
	ck_assert_uint_eq(asked[1].bytes, 16384 - 4608);
	end();
}

/* Contents that a file would have, from the parts of requests that were written. */
static uint8_t image[BLOCK];

static int64_t a_third_into_the_image(const struct io_op *op, unsigned nth)
{
	const size_t bytes = op->bytes > 3 ? op->bytes / 3 : op->bytes;
	size_t at = 0;

	(void)nth;
	for (unsigned i = 0; i < op->range_count; i++) {
		const size_t piece = MIN(op->ranges[i].iov_len, bytes - at);

		memcpy(image + op->offset + at, op->ranges[i].iov_base, piece);
		at += piece;
	}
	ck_assert_uint_eq(at, bytes);
	return (int64_t)bytes;
}

/*
 * Some stretches of the block are borrowable: at its beginning, in the middle, adjacent ones, and
 * at its end. A short result may end in each of them.
 */
TEST(results, a_block_in_parts_goes_on_where_it_stopped)
{
	static const struct io_loan loans[] = {
		{ .at = 0, .bytes = 100 },
		{ .at = 5000, .bytes = 1 },
		{ .at = 5001, .bytes = 30000 },
		{ .at = BLOCK - 7, .bytes = 7 },
	};
	static uint8_t borrowable[BLOCK], wanted[BLOCK];
	struct io_buffer *buffer;
	size_t total = 0;

	answer = a_third_into_the_image;
	begin(false);
	ck_assert_msg(!io_queue_take(queue, &buffer, &error), "%s", error.text);
	buffer->bytes = BLOCK;
	for (size_t i = 0; i < BLOCK; i++) {
		wanted[i] = buffer->data[i] = (uint8_t)(i * 7);
		borrowable[i] = (uint8_t)(i * 31 + 1);
	}
	buffer->loan_count = sizeof(loans) / sizeof(*loans);
	for (unsigned i = 0; i < buffer->loan_count; i++) {
		buffer->loans[i] = loans[i];
		buffer->loans[i].from = borrowable + 1000 * i;
		memcpy(wanted + loans[i].at, borrowable + 1000 * i, loans[i].bytes);
	}
	ck_assert_msg(!io_queue_submit(queue, buffer, &error), "%s", error.text);
	ck_assert_int_eq(io_queue_drain(queue, &error), 0);
	for (unsigned i = 0; i < requests; i++) {
		ck_assert_uint_eq(asked[i].offset + asked[i].bytes, BLOCK);
		total = asked[i].offset;
	}
	ck_assert_uint_gt(total, loans[2].at);
	ck_assert(!memcmp(image, wanted, BLOCK));
	ck_assert_uint_eq(buffer->loan_count, 0);
	end();
}

static int storm_code;
static unsigned storm_length;

static int64_t storm(const struct io_op *op, unsigned nth)
{
	return nth < storm_length ? storm_code : (int64_t)op->bytes;
}

static int64_t storm_from_the_second_on(const struct io_op *op, unsigned nth)
{
	(void)op;
	return nth ? storm_code : 4096;
}

static const int passing_codes[] = { -EINTR, -EAGAIN, 0 };

LOOP_TEST(results, interruptions_are_sat_out, 0, ARRAY_LENGTH(passing_codes))
{
	storm_code = passing_codes[_i];
	storm_length = 60;
	answer = storm;
	begin(false);
	submit(0, BLOCK);
	ck_assert_msg(!io_queue_drain(queue, &error), "%s", error.text);
	ck_assert_uint_eq(requests, 61);
	ck_assert_uint_eq(downgrades.short_results, 60);
	end();
}

LOOP_TEST(results, interruptions_without_end_are_a_failure_after_a_bounded_number, 0,
	  ARRAY_LENGTH(passing_codes))
{
	storm_code = passing_codes[_i];
	storm_length = UINT32_MAX;
	answer = _i % 2 ? storm : storm_from_the_second_on;
	begin(false);
	submit(0, BLOCK);
	ck_assert_int_eq(io_queue_drain(queue, &error), storm_code ? storm_code : -EIO);
	ck_assert_uint_le(requests, 200);
	end();
}

static int64_t a_byte_and_then_interruptions(const struct io_op *op, unsigned nth)
{
	(void)op;
	return nth % 20 ? -EINTR : 512;
}

TEST(results, progress_however_slow_is_no_failure)
{
	answer = a_byte_and_then_interruptions;
	begin(false);
	submit(0, 512 * 8);
	ck_assert_msg(!io_queue_drain(queue, &error), "%s", error.text);
	ck_assert_uint_gt(requests, 100);
	end();
}

/* Fills the queue with requests that all end with this code. */
static void fill(int code)
{
	storm_code = code;
	storm_length = code ? UINT32_MAX : 0;
	answer = storm;
	begin(false);
	for (unsigned i = 0; i < DEPTH; i++)
		submit(i * BLOCK, BLOCK);
}

static int64_t too_much(const struct io_op *op, unsigned nth)
{
	(void)nth;
	return (int64_t)op->bytes + 1;
}

TEST(results, more_than_was_asked_for_is_a_failure)
{
	answer = too_much;
	begin(false);
	submit(0, BLOCK);
	ck_assert_int_eq(io_queue_drain(queue, &error), -EIO);
	end();
}

TEST(results, a_failure_names_path_offset_engine_and_remedy_wording)
{
	storm_code = -ENOSPC;
	storm_length = UINT32_MAX;
	answer = storm;
	begin(false);
	submit(123456, 4096);
	ck_assert_int_eq(io_queue_drain(queue, &error), -ENOSPC);
	ck_assert_uint_eq(requests, 1);
	ck_assert_uint_eq(error.offset, 123456);
	ck_assert_ptr_nonnull(strstr(error.sentence, "\"/the/path\" at offset 123456"));
	ck_assert_ptr_nonnull(strstr(error.sentence, "scripted engine"));
	ck_assert_str_ne(error.remedy, "");
	end();
}

static int64_t the_third_fails(const struct io_op *op, unsigned nth)
{
	return nth == 2 ? -EIO : nth == 3 ? -ENOSPC : (int64_t)op->bytes;
}

TEST(results, the_first_failure_counts_and_all_come_home)
{
	answer = the_third_fails;
	begin(false);
	for (unsigned i = 0; i < DEPTH; i++)
		submit(i * BLOCK, BLOCK);
	ck_assert_int_eq(io_queue_drain(queue, &error), -EIO);
	ck_assert_int_eq(error.code, -EIO);
	ck_assert_uint_eq(count_free(), DEPTH);
	end();
}

TEST(results, a_slot_is_waited_for_when_all_are_in_flight)
{
	answer = all_of_it;
	begin(false);
	for (unsigned i = 0; i < 5 * DEPTH; i++)
		submit(i * BLOCK, BLOCK);
	ck_assert_int_eq(io_queue_drain(queue, &error), 0);
	ck_assert_uint_eq(requests, 5 * DEPTH);
	end();
}

/*
 * A full buffer is kept back, so that the device does not wait for a copy when a request is done.
 */
TEST(results, one_slab_is_kept_back_and_leaves_when_a_request_is_done)
{
	struct io_buffer *buffer;

	fill(0);
	ck_assert_uint_eq(requests, DEPTH - 1);
	for (unsigned i = DEPTH; i < 3 * DEPTH; i++) {
		/* Before the next buffer is filled. */
		ck_assert_int_eq(io_queue_take(queue, &buffer, &error), 0);
		ck_assert_uint_eq(requests, i);
		ck_assert_uint_eq(queue->in_flight, DEPTH - 1);
		ck_assert_uint_eq(asked[i - 1].offset, (i - 1) * BLOCK);
		buffer->offset = i * BLOCK;
		buffer->bytes = BLOCK;
		ck_assert_int_eq(io_queue_submit(queue, buffer, &error), 0);
		ck_assert_uint_eq(requests, i);
	}
	ck_assert_int_eq(io_queue_drain(queue, &error), 0);
	ck_assert_uint_eq(requests, 3 * DEPTH);
	end();
}

TEST(results, the_slab_kept_back_is_not_sent_after_a_failure)
{
	fill(-ENOSPC);
	ck_assert_int_eq(io_queue_drain(queue, &error), -ENOSPC);
	ck_assert_uint_eq(requests, DEPTH - 1);
	end();
}

TEST(results, the_slab_kept_back_may_be_refused)
{
	struct io_buffer *buffer;

	fill(0);
	refuse_submit = -EPERM;
	ck_assert_int_eq(io_queue_take(queue, &buffer, &error), -EPERM);
	ck_assert_int_eq(io_queue_drain(queue, NULL), 0);
	end();
}

TEST(results, a_failure_in_flight_is_found_when_a_slot_is_waited_for)
{
	struct io_buffer *buffer;

	fill(-ENOSPC);
	ck_assert_int_eq(io_queue_take(queue, &buffer, &error), -ENOSPC);
	ck_assert_int_eq(io_queue_drain(queue, NULL), -ENOSPC);
	end();
}

TEST(results, a_request_that_was_not_taken_is_an_error_and_its_slot_is_free)
{
	struct io_buffer *buffer;

	answer = all_of_it;
	begin(false);
	ck_assert_int_eq(io_queue_take(queue, &buffer, &error), 0);
	buffer->offset = 77;
	buffer->bytes = BLOCK;
	refuse_submit = -EBUSY;
	ck_assert_int_eq(io_queue_submit(queue, buffer, &error), -EBUSY);
	ck_assert_uint_eq(error.offset, 77);
	ck_assert_uint_eq(queue->in_flight, 0);
	ck_assert_ptr_eq(io_queue_free_buffer(queue), buffer);
	io_queue_give_back(queue, buffer);
	end();
}

TEST(results, an_engine_that_refused_is_opened_anew_for_the_next_file)
{
	struct io_buffer *buffer;

	answer = all_of_it;
	begin(false);
	ck_assert_int_eq(io_queue_take(queue, &buffer, &error), 0);
	buffer->bytes = BLOCK;
	refuse_submit = -EPERM;
	ck_assert_int_eq(io_queue_submit(queue, buffer, &error), -EPERM);
	io_queue_detach(queue);
	refuse_submit = 0;
	memset(&error, 0, sizeof(error));
	ck_assert_int_eq(io_queue_start(queue, &error), 0);
	ck_assert_uint_eq(opened, 2);
	ck_assert_uint_eq(closed, 1);
	io_queue_attach(queue, fd, "/the/path", false, &downgrades);
	submit(0, BLOCK);
	ck_assert_int_eq(io_queue_drain(queue, &error), 0);
	end();
}

static int64_t short_and_then_no_more(const struct io_op *op, unsigned nth)
{
	(void)op;
	(void)nth;
	refuse_submit = -EPERM;
	return 4096;
}

TEST(results, a_rest_that_is_not_taken_is_an_error)
{
	answer = short_and_then_no_more;
	begin(false);
	submit(0, BLOCK);
	ck_assert_int_eq(io_queue_drain(queue, &error), -EPERM);
	end();
}

TEST(results, an_engine_that_loses_requests_is_found_out)
{
	answer = all_of_it;
	begin(false);
	lost = 1;
	submit(0, BLOCK);
	ck_assert_int_eq(io_queue_drain(queue, &error), -EIO);
	ck_assert_uint_eq(queue->in_flight, 0);
	lost = 0;
	io_queue_detach(queue);
	io_queue_close(queue);
	close(fd);
}

/* ---- Downgrades ------------------------------------------------------------------------------ */

TEST(life, downgrades_are_kept_in_order_with_their_codes)
{
	struct ioshape_report report = { 0 };
	struct io_downgrades some = { 0 };

	io_add_downgrade(NULL, IOSHAPE_DOWNGRADE_LOCK, "no list");
	io_add_downgrade(&some, IOSHAPE_DOWNGRADE_DIRECT, "no %s; so", "this");
	io_add_downgrade(&some, IOSHAPE_DOWNGRADE_LOCK, "no that");
	io_report_downgrades(&some, &report);
	ck_assert_uint_eq(report.downgrade_count, 2);
	ck_assert_str_eq(report.downgrades[0].sentence, "no this; so");
	ck_assert_int_eq(report.downgrades[0].code, IOSHAPE_DOWNGRADE_DIRECT);
	ck_assert_str_eq(report.downgrades[1].sentence, "no that");
	ck_assert_int_eq(report.downgrades[1].code, IOSHAPE_DOWNGRADE_LOCK);
}

TEST(life, too_many_downgrades_are_counted)
{
	struct io_downgrades some = { 0 };

	for (unsigned i = 0; i < 1000; i++)
		io_add_downgrade(&some, IOSHAPE_DOWNGRADE_LOCK, "note %u", i);
	ck_assert_uint_eq(some.count, 1000);
	ck_assert_str_eq(some.list[0].sentence, "note 0");
}
