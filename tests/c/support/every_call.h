/* SPDX-License-Identifier: Apache-2.0 */
/* Every public call that takes a context or a handle of the save layer. */
#ifndef TESTS_SUPPORT_EVERY_CALL_H
#define TESTS_SUPPORT_EVERY_CALL_H

#include <ioshape/ioshape.h>

struct handles {
	struct ioshape_context *context;
	struct ioshape_save *save;
	struct ioshape_file *file;
	struct ioshape_reader *reader;
};

/*
 * Makes all calls, none of which can succeed. Returns the number (from 1) of the first call that
 * does not return `code`; 0 if all do.
 */
static inline int first_call_without(const struct handles *with, int code)
{
	struct ioshape_save_status status = IOSHAPE_SAVE_STATUS_INIT;
	struct ioshape_reader_info info = IOSHAPE_READER_INFO_INIT;
	struct ioshape_record_info record = IOSHAPE_RECORD_INFO_INIT;
	struct ioshape_tensor_info tensor = IOSHAPE_TENSOR_INFO_INIT;
	struct ioshape_metadata metadata = IOSHAPE_METADATA_INIT;
	struct ioshape_report report = IOSHAPE_REPORT_INIT;
	struct ioshape_load_request request = { 0 };
	struct ioshape_context *context = with->context;
	struct ioshape_reader *reader = with->reader, *other_reader;
	struct ioshape_save *other_save;
	struct ioshape_file *other_file;
	uint64_t number;
	char byte;
	const int answers[] = {
		ioshape_save_tensors(context, "new", NULL, 0, NULL, NULL),
		ioshape_save_tensors(context, "new", NULL, 0, NULL, &other_save),
		ioshape_save_records(context, "new", NULL, 0, NULL, NULL),
		ioshape_save_records(context, "new", NULL, 0, NULL, &other_save),
		ioshape_file_open(context, "new", NULL, &other_file),
		ioshape_reader_open(context, "file", NULL, &other_reader),
		ioshape_save_wait(with->save, -1),
		ioshape_save_cancel(with->save),
		ioshape_save_get_report(with->save, &report),
		ioshape_save_get_status(with->save, &status, NULL),
		ioshape_file_write(with->file, "a", 1),
		ioshape_file_commit(with->file, NULL),
		ioshape_reader_get_info(reader, &info),
		ioshape_reader_get_record(reader, 0, &record),
		ioshape_reader_find_record(reader, "data.pkl", &number),
		ioshape_reader_read(reader, 0, 0, &byte, 1),
		ioshape_reader_verify(reader, 1),
		ioshape_reader_get_tensor(reader, 0, &tensor),
		ioshape_reader_find_tensor(reader, "step", &number),
		ioshape_reader_load(reader, &request, 1),
		ioshape_reader_load_records(reader, &request, 1),
		ioshape_reader_get_metadata(reader, &metadata),
	};

	for (size_t i = 0; i < sizeof(answers) / sizeof(answers[0]); i++) {
		if (answers[i] != code)
			return (int)i + 1;
	}
	return other_save || other_file || other_reader || ioshape_last_error()->code != code;
}

#endif
