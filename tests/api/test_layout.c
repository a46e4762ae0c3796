/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The binary interface: where each field of each public struct lies, and what each constant is.
 * Programs are built against these numbers. They may be added to; where one changes, soname_version
 * in libioshape/meson.build has to move with it. (LP64: what all supported machines have.)
 */
#include "support/check_main.h"

#include <ioshape/ioshape.h>
#include <ioshape/operator.h>
#include <ioshape/probe.h>

#include <stddef.h>
#include <string.h>

#define AT(type, field, offset)                                                                    \
	_Static_assert(offsetof(struct type, field) == (offset),                                   \
		       #type "." #field " has moved: programs built before would break")
#define BYTES(type, bytes)                                                                         \
	_Static_assert(sizeof(struct type) == (bytes),                                             \
		       #type " has another size: is it only longer?")

AT(ioshape_context_options, size, 0);
AT(ioshape_context_options, engine, 8);
AT(ioshape_context_options, direct, 12);
AT(ioshape_context_options, block_bytes, 16);
AT(ioshape_context_options, queue_depth, 24);
AT(ioshape_context_options, log_level, 28);
AT(ioshape_context_options, staging_bytes, 32);
AT(ioshape_context_options, log, 40);
AT(ioshape_context_options, log_user, 48);
AT(ioshape_context_options, coordinator, 56);
AT(ioshape_context_options, password_file, 64);
AT(ioshape_context_options, pool, 72);
AT(ioshape_context_options, job, 80);
AT(ioshape_context_options, share, 88);
AT(ioshape_context_options, slots, 92);
AT(ioshape_context_options, lease_ms, 96);
AT(ioshape_context_options, unreachable, 100);
AT(ioshape_context_options, rate, 104);
AT(ioshape_context_options, layout, 112);
AT(ioshape_context_options, calibrate, 120);
AT(ioshape_context_options, full, 124);
BYTES(ioshape_context_options, 128);

AT(ioshape_tensor, name, 0);
AT(ioshape_tensor, dtype, 8);
AT(ioshape_tensor, dims, 12);
AT(ioshape_tensor, shape, 16);
AT(ioshape_tensor, strides, 24);
AT(ioshape_tensor, data, 32);
/* These have no size field and come in arrays: they cannot even grow. */
BYTES(ioshape_tensor, 40);

AT(ioshape_attribute, name, 0);
AT(ioshape_attribute, value, 8);
BYTES(ioshape_attribute, 16);

AT(ioshape_metadata, size, 0);
AT(ioshape_metadata, step, 8);
AT(ioshape_metadata, blob, 16);
AT(ioshape_metadata, blob_bytes, 24);
AT(ioshape_metadata, attributes, 32);
AT(ioshape_metadata, attribute_count, 40);
BYTES(ioshape_metadata, 48);

AT(ioshape_report, size, 0);
AT(ioshape_report, file_bytes, 8);
AT(ioshape_report, tensor_bytes, 16);
AT(ioshape_report, stage_s, 24);
AT(ioshape_report, plan_s, 32);
AT(ioshape_report, write_s, 40);
AT(ioshape_report, sync_s, 48);
AT(ioshape_report, commit_s, 56);
AT(ioshape_report, total_s, 64);
AT(ioshape_report, engine, 72);
AT(ioshape_report, mode, 88);
AT(ioshape_report, direct, 104);
AT(ioshape_report, queue_depth, 108);
AT(ioshape_report, block_bytes, 112);
AT(ioshape_report, memory_alignment, 120);
AT(ioshape_report, offset_alignment, 124);
AT(ioshape_report, filesystem, 128);
AT(ioshape_report, fallbacks, 160);
AT(ioshape_report, short_results, 164);
AT(ioshape_report, steps, 168);
AT(ioshape_report, slot_s, 1704);
AT(ioshape_report, paced_s, 1712);
AT(ioshape_report, fence, 1720);
AT(ioshape_report, position, 1728);
AT(ioshape_report, slot_lost, 1732);
AT(ioshape_report, express, 1736);
AT(ioshape_report, capacity, 1740);
AT(ioshape_report, coordinator, 1744);
AT(ioshape_report, pool, 1760);
AT(ioshape_report, ahead, 1888);
AT(ioshape_report, group_s, 2016);
AT(ioshape_report, generation_bytes, 2024);
AT(ioshape_report, ranks, 2032);
AT(ioshape_report, why, 2040);
AT(ioshape_report, started_s, 2200);
AT(ioshape_report, stripe_bytes, 2208);
AT(ioshape_report, stripe_count, 2216);
AT(ioshape_report, skipped, 2220);
AT(ioshape_report, stripes, 2224);
AT(ioshape_report, stripes_asked, 2320);
AT(ioshape_report, choice, 2416);
BYTES(ioshape_report, 2576);

AT(ioshape_comm, size, 0);
AT(ioshape_comm, user, 8);
AT(ioshape_comm, send, 16);
AT(ioshape_comm, receive, 24);
AT(ioshape_comm, progress, 32);
BYTES(ioshape_comm, 40);

AT(ioshape_group_options, size, 0);
AT(ioshape_group_options, rank, 8);
AT(ioshape_group_options, ranks, 12);
AT(ioshape_group_options, local_ranks, 16);
AT(ioshape_group_options, mode, 20);
AT(ioshape_group_options, board, 24);
AT(ioshape_group_options, token, 32);
AT(ioshape_group_options, node, 40);
AT(ioshape_group_options, comm, 48);
AT(ioshape_group_options, deadline_ms, 56);
AT(ioshape_group_options, keep_last, 60);
AT(ioshape_group_options, keep_every, 64);
BYTES(ioshape_group_options, 72);

AT(ioshape_generation_info, size, 0);
AT(ioshape_generation_info, step, 8);
AT(ioshape_generation_info, ranks, 16);
AT(ioshape_generation_info, files, 20);
AT(ioshape_generation_info, bytes, 24);
AT(ioshape_generation_info, saved_s, 32);
AT(ioshape_generation_info, mode, 40);
AT(ioshape_generation_info, path, 48);
BYTES(ioshape_generation_info, 56);

AT(ioshape_part_info, size, 0);
AT(ioshape_part_info, file, 8);
AT(ioshape_part_info, name, 16);
AT(ioshape_part_info, offset, 24);
AT(ioshape_part_info, bytes, 32);
AT(ioshape_part_info, crc32, 40);
BYTES(ioshape_part_info, 48);

AT(ioshape_prune_options, size, 0);
AT(ioshape_prune_options, keep_last, 8);
AT(ioshape_prune_options, dry_run, 12);
AT(ioshape_prune_options, keep_every, 16);
AT(ioshape_prune_options, removing, 24);
AT(ioshape_prune_options, removing_user, 32);
BYTES(ioshape_prune_options, 40);

AT(ioshape_save_options, size, 0);
AT(ioshape_save_options, metadata, 8);
AT(ioshape_save_options, progress, 16);
AT(ioshape_save_options, progress_user, 24);
AT(ioshape_save_options, report, 32);
AT(ioshape_save_options, replace, 40);
AT(ioshape_save_options, sync, 44);
AT(ioshape_save_options, borrow, 48);
AT(ioshape_save_options, queue, 56);
AT(ioshape_save_options, queue_user, 64);
BYTES(ioshape_save_options, 72);

AT(ioshape_place, position, 8);
AT(ioshape_place, capacity, 12);
AT(ioshape_place, waited_s, 16);
AT(ioshape_place, ahead, 24);
AT(ioshape_place, pool, 152);
AT(ioshape_place, coordinator, 280);
BYTES(ioshape_place, 296);

AT(ioshape_slot_options, pool, 8);
AT(ioshape_slot_options, path, 16);
AT(ioshape_slot_options, weight, 24);
AT(ioshape_slot_options, expected_bytes, 32);
AT(ioshape_slot_options, timeout_ms, 40);
AT(ioshape_slot_options, waiting, 48);
AT(ioshape_slot_options, waiting_user, 56);
AT(ioshape_slot_options, lost, 64);
AT(ioshape_slot_options, lost_user, 72);
BYTES(ioshape_slot_options, 80);

AT(ioshape_slot_info, fence, 8);
AT(ioshape_slot_info, waited_s, 16);
AT(ioshape_slot_info, paced_s, 24);
AT(ioshape_slot_info, position, 32);
AT(ioshape_slot_info, capacity, 36);
AT(ioshape_slot_info, lost, 40);
AT(ioshape_slot_info, express, 44);
AT(ioshape_slot_info, ahead, 48);
AT(ioshape_slot_info, pool, 176);
AT(ioshape_slot_info, coordinator, 304);
AT(ioshape_slot_info, note, 320);
BYTES(ioshape_slot_info, 576);

AT(ioshape_pool_settings, capacity, 8);
AT(ioshape_pool_settings, pool_bytes_per_s, 16);
AT(ioshape_pool_settings, job_bytes_per_s, 24);
AT(ioshape_pool_settings, small_bytes, 32);
AT(ioshape_pool_settings, express, 40);
AT(ioshape_pool_settings, clear, 44);
BYTES(ioshape_pool_settings, 48);

AT(ioshape_writer_options, size, 0);
AT(ioshape_writer_options, expected_bytes, 8);
AT(ioshape_writer_options, progress, 16);
AT(ioshape_writer_options, progress_user, 24);
AT(ioshape_writer_options, metadata, 32);
AT(ioshape_writer_options, replace, 40);
AT(ioshape_writer_options, sync, 44);
BYTES(ioshape_writer_options, 48);

AT(ioshape_record, name, 0);
AT(ioshape_record, data, 8);
AT(ioshape_record, bytes, 16);
AT(ioshape_record, alignment, 24);
AT(ioshape_record, reserved, 28);
AT(ioshape_record, fetch, 32);
AT(ioshape_record, fetch_user, 40);
/* These cannot grow either. */
BYTES(ioshape_record, 48);

AT(ioshape_file_options, size, 0);
AT(ioshape_file_options, expected_bytes, 8);
AT(ioshape_file_options, progress, 16);
AT(ioshape_file_options, progress_user, 24);
AT(ioshape_file_options, replace, 32);
AT(ioshape_file_options, sync, 36);
BYTES(ioshape_file_options, 40);

AT(ioshape_reader_options, size, 0);
AT(ioshape_reader_options, verify, 8);
AT(ioshape_reader_options, progress, 16);
AT(ioshape_reader_options, progress_user, 24);
AT(ioshape_reader_options, file_offset, 32);
AT(ioshape_reader_options, file_bytes, 40);
BYTES(ioshape_reader_options, 48);

AT(ioshape_generation_info, size, 0);
AT(ioshape_generation_info, step, 8);
AT(ioshape_generation_info, ranks, 16);
AT(ioshape_generation_info, files, 20);
AT(ioshape_generation_info, bytes, 24);
AT(ioshape_generation_info, saved_s, 32);
AT(ioshape_generation_info, mode, 40);
AT(ioshape_generation_info, path, 48);
BYTES(ioshape_generation_info, 56);

AT(ioshape_part_info, size, 0);
AT(ioshape_part_info, file, 8);
AT(ioshape_part_info, name, 16);
AT(ioshape_part_info, offset, 24);
AT(ioshape_part_info, bytes, 32);
AT(ioshape_part_info, crc32, 40);
BYTES(ioshape_part_info, 48);

AT(ioshape_prune_options, size, 0);
AT(ioshape_prune_options, keep_last, 8);
AT(ioshape_prune_options, dry_run, 12);
AT(ioshape_prune_options, keep_every, 16);
AT(ioshape_prune_options, removing, 24);
AT(ioshape_prune_options, removing_user, 32);
BYTES(ioshape_prune_options, 40);

AT(ioshape_record_info, size, 0);
AT(ioshape_record_info, name, 8);
AT(ioshape_record_info, bytes, 16);
AT(ioshape_record_info, file_offset, 24);
AT(ioshape_record_info, crc32, 32);
AT(ioshape_record_info, reserved, 36);
BYTES(ioshape_record_info, 40);

AT(ioshape_tensor_info, size, 0);
AT(ioshape_tensor_info, name, 8);
AT(ioshape_tensor_info, dtype, 16);
AT(ioshape_tensor_info, dims, 20);
AT(ioshape_tensor_info, shape, 24);
AT(ioshape_tensor_info, strides, 32);
AT(ioshape_tensor_info, bytes, 40);
AT(ioshape_tensor_info, record, 48);
AT(ioshape_tensor_info, dtype_name, 56);
BYTES(ioshape_tensor_info, 64);

AT(ioshape_load_request, tensor, 0);
AT(ioshape_load_request, offset, 8);
AT(ioshape_load_request, bytes, 16);
AT(ioshape_load_request, into, 24);
BYTES(ioshape_load_request, 32);

AT(ioshape_probe_options, size, 0);
AT(ioshape_probe_options, bytes, 8);
AT(ioshape_probe_options, files, 16);
AT(ioshape_probe_options, calibrate, 20);
BYTES(ioshape_probe_options, 24);

#define IS(constant, value) _Static_assert((constant) == (value), #constant " has another value")

IS(IOSHAPE_E_FORMAT, -5001);
IS(IOSHAPE_E_DAMAGED, -5002);
IS(IOSHAPE_E_LIMIT, -5003);
IS(IOSHAPE_E_NO_TABLE, -5004);
IS(IOSHAPE_E_COORDINATOR, -5005);
IS(IOSHAPE_E_SKIPPED, -5006);
IS(IOSHAPE_ENGINE_AUTO, 0);
IS(IOSHAPE_ENGINE_URING, 1);
IS(IOSHAPE_ENGINE_URING_ASYNC, 2);
IS(IOSHAPE_ENGINE_THREADS, 3);
IS(IOSHAPE_ENGINE_BUFFERED, 4);
IS(IOSHAPE_ENGINE_NIL, 5);
IS(IOSHAPE_CALIBRATE_AUTO, 0);
IS(IOSHAPE_CALIBRATE_OFF, 1);
IS(IOSHAPE_CALIBRATE_AGAIN, 2);
IS(IOSHAPE_FULL_FAIL, 0);
IS(IOSHAPE_FULL_SKIP, 1);
IS(IOSHAPE_DIRECT_PREFER, 0);
IS(IOSHAPE_DIRECT_REQUIRE, 1);
IS(IOSHAPE_DIRECT_OFF, 2);
IS(IOSHAPE_LOG_ERROR, 1);
IS(IOSHAPE_LOG_WARNING, 2);
IS(IOSHAPE_LOG_INFO, 3);
IS(IOSHAPE_LOG_DEBUG, 4);
IS(IOSHAPE_PHASE_STAGE, 1);
IS(IOSHAPE_PHASE_WAIT, 2);
IS(IOSHAPE_PHASE_PLAN, 3);
IS(IOSHAPE_PHASE_WRITE, 4);
IS(IOSHAPE_PHASE_SYNC, 5);
IS(IOSHAPE_PHASE_COMMIT, 6);
IS(IOSHAPE_PHASE_READ, 7);
IS(IOSHAPE_PHASE_DONE, 8);
IS(IOSHAPE_MAX_TENSORS, 4194304);
IS(IOSHAPE_MAX_NAME_BYTES, 4096);
IS(IOSHAPE_MAX_DIMS, 64);
IS(IOSHAPE_MAX_ATTRIBUTES, 4096);
IS(IOSHAPE_MAX_METADATA_BYTES, 16 << 20);
IS(IOSHAPE_UNKNOWN_BYTES, UINT64_MAX);

START_TEST(the_library_is_of_the_version_of_the_headers)
{
	ck_assert_str_eq(ioshape_version(), IOSHAPE_VERSION);
}
END_TEST

/* A struct begun with its macro is its size and zeros, padding aside. */
START_TEST(structs_begin_with_their_size_and_zeros)
{
	struct ioshape_context_options context = IOSHAPE_CONTEXT_OPTIONS_INIT;
	struct ioshape_save_options save = IOSHAPE_SAVE_OPTIONS_INIT;
	struct ioshape_writer_options writer = IOSHAPE_WRITER_OPTIONS_INIT;
	struct ioshape_reader_options reader = IOSHAPE_READER_OPTIONS_INIT;
	struct ioshape_file_options file = IOSHAPE_FILE_OPTIONS_INIT;
	struct ioshape_report report = IOSHAPE_REPORT_INIT;
	struct ioshape_metadata metadata = IOSHAPE_METADATA_INIT;

	ck_assert_uint_eq(context.size, sizeof(context));
	ck_assert_int_eq(context.engine, IOSHAPE_ENGINE_AUTO);
	ck_assert(!context.log && !context.staging_bytes);
	ck_assert_uint_eq(save.size, sizeof(save));
	ck_assert(!save.metadata && !save.progress && !save.report && !save.sync && !save.borrow);
	ck_assert_uint_eq(writer.size, sizeof(writer));
	ck_assert(!writer.expected_bytes && !writer.metadata);
	ck_assert_uint_eq(file.size, sizeof(file));
	ck_assert(!file.expected_bytes && !file.progress && !file.replace && !file.sync);
	ck_assert_uint_eq(reader.size, sizeof(reader));
	ck_assert(!reader.verify && !reader.progress);
	ck_assert_uint_eq(report.size, sizeof(report));
	ck_assert_str_eq(report.steps[0].sentence, "");
	ck_assert_uint_eq(metadata.size, sizeof(metadata));
	ck_assert(!metadata.blob && !metadata.attribute_count);
}
END_TEST

int main(void)
{
	Suite *suite = suite_create("api/layout");
	TCase *tests = tcase_create("layout");

	tcase_add_test(tests, the_library_is_of_the_version_of_the_headers);
	tcase_add_test(tests, structs_begin_with_their_size_and_zeros);
	suite_add_tcase(suite, tests);
	return check_main(suite);
}
