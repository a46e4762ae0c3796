/* SPDX-License-Identifier: Apache-2.0 */
#define _GNU_SOURCE
#include "base/base.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>

IOSHAPE_EXPORT const char *ioshape_strerror(int code)
{
	const char *text;

	switch (code) {
	case 0:
		return "success";
	case IOSHAPE_E_FORMAT:
		return "not a torch zip that this library reads";
	case IOSHAPE_E_DAMAGED:
		return "the file is damaged";
	case IOSHAPE_E_LIMIT:
		return "above a limit";
	case IOSHAPE_E_NO_TABLE:
		return "the file has no tensor table";
	case IOSHAPE_E_COORDINATOR:
		return "the coordinator of slots cannot be used";
	case IOSHAPE_E_SKIPPED:
		return "skipped for want of space";
	}
	/* Unlike strerror() this neither translates nor shares a buffer between threads. */
	text = code < 0 && code > -4096 ? strerrordesc_np(-code) : NULL;
	return text ? text : "unknown error";
}

int base_fail(struct base_error *error, int code, const char *format, ...)
{
	const char *reason = ioshape_strerror(code);
	const size_t most = BASE_ERROR_TEXT_BYTES - strlen(reason) - sizeof(": ");
	va_list args;
	size_t used;

	if (!error || error->code)
		return code;
	error->code = code;
	va_start(args, format);
	vsnprintf(error->text, sizeof(error->text), format, args);
	va_end(args);
	used = strlen(error->text);
	/* Paths can be longer than the sentence; the reason must not be what is lost. */
	if (used > most) {
		memcpy(error->text + most - 3, "...", 3);
		used = most;
	}
	snprintf(error->text + used, sizeof(error->text) - used, ": %s", reason);
	return code;
}

int base_fail_as_told(struct base_error *error, int code, const char *format, ...)
{
	va_list args;

	if (!error || error->code)
		return code;
	error->code = code;
	va_start(args, format);
	vsnprintf(error->text, sizeof(error->text), format, args);
	va_end(args);
	return code;
}

int base_no_memory(struct base_error *error, const char *purpose, uint64_t bytes)
{
	return base_fail(
		error, -ENOMEM,
		"cannot allocate %llu bytes for %s; free memory or lower the limits in the options",
		(unsigned long long)bytes, purpose);
}
