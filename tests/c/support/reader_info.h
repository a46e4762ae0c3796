/* SPDX-License-Identifier: Apache-2.0 */
#ifndef SUPPORT_READER_INFO_H
#define SUPPORT_READER_INFO_H

#include <ioshape/ioshape.h>

/* Returns what is known about a reader; all zeros if the call fails. */
static inline struct ioshape_reader_info info_of_reader(struct ioshape_reader *reader)
{
	struct ioshape_reader_info info = IOSHAPE_READER_INFO_INIT;

	ioshape_reader_get_info(reader, &info);
	return info;
}

#endif
