/* SPDX-License-Identifier: Apache-2.0 */
#ifndef SUPPORT_WRITE_RECORD_H
#define SUPPORT_WRITE_RECORD_H

#include <ioshape/ioshape.h>

/* Saves a file of one record. */
static inline int write_record(struct ioshape_context *context, const char *path, const char *name,
			       const void *data, size_t bytes,
			       const struct ioshape_save_options *options)
{
	const struct ioshape_record record = { .name = name, .data = data, .bytes = bytes };

	return ioshape_save_records(context, path, &record, 1, options, NULL);
}

#endif
