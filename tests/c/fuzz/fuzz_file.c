/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Opens any bytes as a file, lists, reads and verifies it. Bytes that are read must match their
 * checksum.
 */
#define _GNU_SOURCE
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "base/base.h"
#include "fuzz.h"

#include <ioshape/ioshape.h>

#define MOST_READ_BYTES (1 << 20)

static struct ioshape_context *context;
static char path[64];
static int fd;

static void set_up(void)
{
	struct ioshape_context_options options = IOSHAPE_CONTEXT_OPTIONS_INIT;

	options.engine = IOSHAPE_ENGINE_BUFFERED;
	MUST(!ioshape_context_open(&context, &options));
	fd = memfd_create("file", MFD_CLOEXEC);
	MUST(fd >= 0);
	snprintf(path, sizeof(path), "/proc/self/fd/%d", fd);
}

/* Returns whether the record was read. */
static bool read_record(struct ioshape_reader *reader, uint64_t index, bool verified)
{
	struct ioshape_record_info record = IOSHAPE_RECORD_INFO_INIT;
	struct ioshape_statistics statistics = IOSHAPE_STATISTICS_INIT;
	bool read = false;
	uint8_t *data;

	if (ioshape_reader_get_record(reader, index, &record) || record.bytes > MOST_READ_BYTES)
		return !verified;
	if (!ioshape_reader_get_statistics(reader, index, &statistics))
		MUST(statistics.nans <= statistics.count);
	data = malloc(record.bytes ? record.bytes : 1);
	MUST(data);
	read = !ioshape_reader_read(reader, index, 0, data, record.bytes);
	if (read && record.crc32)
		MUST(base_crc32(0, data, record.bytes) == record.crc32);
	free(data);
	return read;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes)
{
	struct ioshape_reader_options options = IOSHAPE_READER_OPTIONS_INIT;
	struct ioshape_reader_info info = IOSHAPE_READER_INFO_INIT;
	struct ioshape_tensor_info tensor = IOSHAPE_TENSOR_INFO_INIT;
	struct ioshape_reader *reader;
	bool verified, all = true;

	if (!context)
		set_up();
	MUST(!ftruncate(fd, 0) && pwrite(fd, data, bytes, 0) == (ssize_t)bytes);
	options.verify = IOSHAPE_ON;
	if (ioshape_reader_open(context, path, &options, &reader))
		return 0;
	verified = !ioshape_reader_verify(reader, 1);
	MUST(!ioshape_reader_get_info(reader, &info) && info.file_bytes == bytes);
	for (uint64_t i = 0; i < info.records; i++)
		all &= read_record(reader, i, verified);
	MUST(all || !verified);
	for (uint64_t i = 0; i < info.tensors; i++)
		MUST(!ioshape_reader_get_tensor(reader, i, &tensor));
	ioshape_reader_free(reader);
	return 0;
}
