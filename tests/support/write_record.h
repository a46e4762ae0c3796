/* SPDX-License-Identifier: Apache-2.0 */
#ifndef SUPPORT_WRITE_RECORD_H
#define SUPPORT_WRITE_RECORD_H

#include <ioshape/container.h>

/* A whole record. */
static inline int write_record(struct ioshape_writer *writer, const char *name, const void *data,
			       size_t bytes, uint32_t alignment)
{
	int ret = ioshape_writer_begin_record(writer, name, bytes, alignment);

	if (!ret)
		ret = ioshape_writer_write(writer, data, bytes);
	return ret ? ret : ioshape_writer_end_record(writer);
}

#endif
