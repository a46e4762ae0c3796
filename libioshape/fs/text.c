/* SPDX-License-Identifier: Apache-2.0 */
/* Words and numbers of texts. */
#include "fs/text.h"

#include <string.h>

/* Not sscanf(): it measures all the rest of the text first. */
bool fs_take_number(const char **at, const char *end, char stop, unsigned *number)
{
	const char *begin = *at;
	uint64_t value = 0;

	for (; *at < end && **at >= '0' && **at <= '9' && value <= UINT32_MAX; ++*at)
		value = value * 10 + (unsigned)(**at - '0');
	if (*at == begin || *at == end || **at != stop || value > UINT32_MAX)
		return false;
	++*at;
	*number = (unsigned)value;
	return true;
}

bool fs_whole_number(const char *text, size_t bytes, uint64_t *number)
{
	uint64_t value = 0;

	if (!bytes)
		return false;
	for (size_t i = 0; i < bytes; i++) {
		unsigned digit = (unsigned)(unsigned char)text[i] - '0';

		if (digit > 9 || value > (UINT64_MAX - digit) / 10)
			return false;
		value = value * 10 + digit;
	}
	*number = value;
	return true;
}

bool fs_find_value(const char *list, size_t bytes, char separator, const char *name,
		   const char **value, size_t *value_bytes)
{
	const size_t name_bytes = strlen(name);
	const char *end = list + bytes, *next;

	for (; list < end; list = next + 1) {
		next = memchr(list, separator, (size_t)(end - list));
		if (!next)
			next = end;
		if ((size_t)(next - list) > name_bytes && !memcmp(list, name, name_bytes) &&
		    list[name_bytes] == '=') {
			*value = list + name_bytes + 1;
			*value_bytes = (size_t)(next - *value);
			return true;
		}
	}
	return false;
}

bool fs_find_number(const char *list, size_t bytes, char separator, const char *name,
		    uint64_t *number)
{
	const char *value;
	size_t value_bytes;

	return fs_find_value(list, bytes, separator, name, &value, &value_bytes) &&
	       fs_whole_number(value, value_bytes, number);
}
