/* SPDX-License-Identifier: Apache-2.0 */
/* Records of random bytes, and a file of them in the library's format, for tests of readers. */
#ifndef TESTS_SUPPORT_READER_CASE_H
#define TESTS_SUPPORT_READER_CASE_H

#include "format/format.h"
#include "support/check_main.h"
#include "support/random.h"

#include <stdio.h>
#include <stdlib.h>

/* Allocates and fills the records. Each is to be freed. */
static inline void reader_case_fill(uint8_t **data, const size_t *sizes, size_t count)
{
	uint64_t seed = 3;

	for (size_t i = 0; i < count; i++) {
		data[i] = malloc(sizes[i] + 1);
		test_random_fill(&seed, data[i], sizes[i]);
	}
}

static inline struct io_queue *reader_case_queue(enum ioshape_engine engine, size_t block_bytes,
						 unsigned depth)
{
	const struct io_config config = {
		.engine = engine, .block_bytes = block_bytes, .depth = depth, .threads = 2
	};
	struct base_error error = { 0 };
	struct io_queue *queue;

	ck_assert_msg(!io_queue_open(&queue, &config, &error), "%s", error.sentence);
	return queue;
}

/* Writes the records "data/0", "data/1", ... and an index. */
static inline void reader_case_write(const char *path, struct io_queue *queue, uint8_t *const *data,
				     const size_t *sizes, size_t count)
{
	const struct io_file_options options = { .no_sync = true };
	struct io_downgrades downgrades = { 0 };
	struct format_writer *writer;
	struct io_writer *file;
	char name[32];

	ck_assert_int_eq(io_writer_open(&file, queue, path, &options, &downgrades, NULL), 0);
	ck_assert_int_eq(format_writer_new(&writer, format_sink_of_file(file), path, NULL), 0);
	for (size_t i = 0; i < count; i++) {
		snprintf(name, sizeof(name), "data/%zu", i);
		ck_assert_int_eq(format_writer_begin(writer, name, sizes[i], 0, NULL), 0);
		ck_assert_int_eq(format_writer_put(writer, data[i], sizes[i], NULL), 0);
		ck_assert_int_eq(format_writer_end(writer, NULL), 0);
	}
	ck_assert_int_eq(format_writer_finish(writer, NULL, NULL), 0);
	ck_assert_int_eq(io_writer_finish(file, NULL), 0);
	ck_assert_int_eq(io_writer_commit(file, NULL), 0);
	format_writer_free(writer);
	io_writer_free(file);
}

#endif
