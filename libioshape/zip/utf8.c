/* SPDX-License-Identifier: Apache-2.0 */
#include "zip/zip.h"

#include <string.h>

bool zip_utf8_valid(const char *text, size_t bytes)
{
	for (size_t i = 0, step; i < bytes; i += step) {
		step = base_utf8_bytes(text + i, bytes - i);
		if (!step)
			return false;
	}
	return true;
}

const char *zip_show_name(char into[ZIP_SHOWN_NAME_BYTES], const char *name, size_t bytes)
{
	static const char more[] = "...";
	size_t used = 0;

	for (size_t step; used < bytes; used += step) {
		step = MAX(base_utf8_bytes(name + used, bytes - used), 1);
		if (used + step + sizeof(more) > ZIP_SHOWN_NAME_BYTES)
			break;
		memcpy(into + used, name + used, step);
		/* It is given by its length, and the text ends at a NUL. */
		if (!into[used])
			into[used] = '?';
	}
	memcpy(into + used, used < bytes ? more : "", used < bytes ? sizeof(more) : 1);
	base_make_plain(into);
	return into;
}
