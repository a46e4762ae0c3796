/* SPDX-License-Identifier: Apache-2.0 */
/* Writes files through io_writer, for tests of the io layer. */
#ifndef TESTS_SUPPORT_FILE_WRITER_H
#define TESTS_SUPPORT_FILE_WRITER_H

#include "io/io.h"

#include <stdio.h>
#include <string.h>

/* Parameters and results of writing one file. */
struct file_write {
	struct io_config config;
	struct io_file_options options;
	struct io_downgrades downgrades;
	struct base_error error;
	struct ioshape_report report;
	struct io_queue *queue;
	struct io_writer *writer;
};

/* Returns settings with small blocks, so that small files have several. */
static inline struct file_write file_write_defaults(void)
{
	return (struct file_write){
		.config = { .block_bytes = 64 * KIB, .depth = 4, .threads = 2 },
		.report = IOSHAPE_REPORT_INIT,
	};
}

static inline int file_write_open(struct file_write *write, const char *path)
{
	int ret = io_queue_open(&write->queue, &write->config, &write->error);

	if (!ret)
		ret = io_writer_open(&write->writer, write->queue, path, &write->options,
				     &write->downgrades, &write->error);
	return ret;
}

/* Closes the writer. Without a commit before it, the file is abandoned. */
static inline void file_write_close(struct file_write *write)
{
	io_writer_free(write->writer);
	io_queue_close(write->queue);
	write->writer = NULL;
	write->queue = NULL;
}

static inline int file_write_end(struct file_write *write)
{
	int ret = io_writer_finish(write->writer, &write->error);

	if (!ret)
		ret = io_writer_commit(write->writer, &write->error);
	io_writer_report(write->writer, &write->report);
	return ret;
}

/* Writes a whole file, from open to close. */
static inline int file_write_all(struct file_write *write, const char *path, const void *data,
				 size_t bytes)
{
	uint32_t crc = 0;
	int ret = file_write_open(write, path);

	if (!ret)
		ret = io_writer_put(write->writer, data, bytes, &crc, &write->error);
	if (!ret)
		ret = file_write_end(write);
	file_write_close(write);
	return ret;
}

#endif
