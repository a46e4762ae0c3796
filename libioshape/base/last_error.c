/* SPDX-License-Identifier: Apache-2.0 */
/* What the last call of a thread failed with. */
#include "base/base.h"

#include <errno.h>
#include <string.h>

/* By thread, so that threads sharing a context do not read each other's errors. */
static _Thread_local struct base_error last;
static _Thread_local struct ioshape_error shown;

int base_leave(int code, const char *operation, const char *path, const struct base_error *error)
{
	if (code >= 0)
		return code;
	/* What a call inside told already is garbled once. */
	if (error == &last)
		return code;
	last = *error;
	if (!last.code)
		base_refuse(&last, code, "cannot %s: %s", operation, ioshape_strerror(code));
	base_error_about(&last, operation, path);
	base_garble(last.sentence);
	base_garble(last.remedy);
	return code;
}

int base_missing(const char *operation)
{
	struct base_error error = { 0 };

	base_refuse(&error, -EINVAL, "an argument that is needed is NULL");
	return base_leave(-EINVAL, operation, NULL, &error);
}

const struct base_error *base_last_error(void)
{
	return &last;
}

IOSHAPE_EXPORT const struct ioshape_error *ioshape_last_error(void)
{
	const bool has_space = last.known & BASE_KNOWS_SPACE;

	shown = (struct ioshape_error){
		.size = sizeof(shown),
		.code = last.code,
		.operation = last.operation ? last.operation : "",
		.path = last.path,
		.sentence = last.sentence,
		.remedy = last.remedy,
		.record = last.record,
		.offset = last.known & BASE_KNOWS_OFFSET ? last.offset : UINT64_MAX,
		.needed_bytes = has_space ? last.needed_bytes : UINT64_MAX,
		.free_bytes = has_space ? last.free_bytes : UINT64_MAX,
		.rank = last.known & BASE_KNOWS_RANK ? (int64_t)last.rank : -1,
	};
	return &shown;
}
