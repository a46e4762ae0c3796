/* SPDX-License-Identifier: Apache-2.0 */
/* The library matches its headers. tests/python/core/test_abi.py checks the offsets of fields. */
#include "support/check_main.h"

#include <ioshape/ioshape.h>

static struct test_case tests_case = { .name = "layout" };

TEST(tests_case, the_library_is_of_the_version_of_the_headers)
{
	ck_assert_str_eq(ioshape_version(), IOSHAPE_VERSION);
}

/* A struct that is initialized with its macro contains its size and zeros, apart from padding. */
TEST(tests_case, structs_begin_with_their_size_and_zeros)
{
	struct ioshape_context_options context = IOSHAPE_CONTEXT_OPTIONS_INIT;
	struct ioshape_save_options save = IOSHAPE_SAVE_OPTIONS_INIT;
	struct ioshape_reader_options reader = IOSHAPE_READER_OPTIONS_INIT;
	struct ioshape_file_options file = IOSHAPE_FILE_OPTIONS_INIT;
	struct ioshape_report report = IOSHAPE_REPORT_INIT;
	struct ioshape_metadata metadata = IOSHAPE_METADATA_INIT;

	ck_assert_uint_eq(context.size, sizeof(context));
	ck_assert_int_eq(context.engine, IOSHAPE_ENGINE_AUTO);
	ck_assert(!context.log && !context.staging_bytes);
	ck_assert_uint_eq(save.size, sizeof(save));
	ck_assert(!save.metadata && !save.progress && !save.report && !save.sync && !save.borrow);
	ck_assert_int_eq(save.format, IOSHAPE_FORMAT_TORCH);
	ck_assert_uint_eq(file.size, sizeof(file));
	ck_assert(!file.expected_bytes && !file.progress && !file.replace && !file.sync);
	ck_assert_uint_eq(reader.size, sizeof(reader));
	ck_assert(!reader.verify && !reader.progress);
	ck_assert_uint_eq(report.size, sizeof(report));
	ck_assert_str_eq(report.downgrades[0].sentence, "");
	ck_assert_uint_eq(metadata.size, sizeof(metadata));
	ck_assert(!metadata.blob && !metadata.attribute_count);
}
