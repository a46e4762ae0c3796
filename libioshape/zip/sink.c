/* SPDX-License-Identifier: Apache-2.0 */
#include "zip/zip.h"

static uint64_t file_offset(void *to)
{
	return ring_writer_offset(to);
}

static int file_put(void *to, const void *data, size_t bytes, uint32_t *crc,
		    struct base_error *error)
{
	return ring_writer_put(to, data, bytes, crc, error);
}

static int file_finish(void *to, struct base_error *error)
{
	return ring_writer_finish(to, error);
}

static void file_free(void *to)
{
	ring_writer_free(to);
}

struct zip_sink zip_sink_of_file(struct ring_writer *file)
{
	static const struct zip_sink_ops ops = {
		.offset = file_offset,
		.put = file_put,
		.finish = file_finish,
		.free = file_free,
	};

	return (struct zip_sink){ &ops, file };
}
