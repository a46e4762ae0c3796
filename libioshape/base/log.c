/* SPDX-License-Identifier: Apache-2.0 */
#include "base/base.h"

#include <stdio.h>

void base_log(const struct base_log *log, enum ioshape_log_level level, const char *format, ...)
{
	char line[BASE_ERROR_TEXT_BYTES];
	va_list args;

	if (!log || !log->write || level > log->level)
		return;
	va_start(args, format);
	vsnprintf(line, sizeof(line), format, args);
	va_end(args);
	base_make_plain(line);
	log->write(log->user, level, line);
}
