/* SPDX-License-Identifier: Apache-2.0 */
#include "base/base.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* No option struct will ever be larger: a size above this is an uninitialised field. */
#define LARGEST_STRUCT_BYTES 4096

static int check_size(size_t size, const char *what, struct base_error *error)
{
	if (size >= sizeof(size_t) && size <= LARGEST_STRUCT_BYTES)
		return 0;
	return base_refuse(error, -EINVAL,
			   "struct %s says it has %zu bytes" BASE_REMEDY
			   "set its size field to sizeof it",
			   what, size);
}

int base_take_options(void *into, size_t known, const void *from, const char *what,
		      struct base_error *error)
{
	size_t size;
	int ret;

	memset(into, 0, known);
	memcpy(into, &known, sizeof(known));
	if (!from)
		return 0;
	memcpy(&size, from, sizeof(size));
	ret = check_size(size, what, error);
	if (ret)
		return ret;
	for (size_t i = known; i < size; i++) {
		if (((const unsigned char *)from)[i])
			return base_refuse(error, -EINVAL,
					   "struct %s sets a field that this version of the "
					   "library (%s) does not know" BASE_REMEDY
					   "use the headers that belong to it",
					   what, ioshape_version());
	}
	memcpy(into, from, MIN(size, known));
	memcpy(into, &known, sizeof(known));
	return 0;
}

int base_give_struct(void *into, const void *from, size_t known, const char *what,
		     struct base_error *error)
{
	size_t size;
	int ret;

	memcpy(&size, into, sizeof(size));
	ret = check_size(size, what, error);
	if (ret)
		return ret;
	/* The caller's size stays; fields of newer headers that we do not know become zero. */
	memset((char *)into + sizeof(size), 0, size - sizeof(size));
	if (MIN(size, known) > sizeof(size))
		memcpy((char *)into + sizeof(size), (const char *)from + sizeof(size),
		       MIN(size, known) - sizeof(size));
	return 0;
}

int base_parse_bytes(const char *text, uint64_t *value)
{
	static const char suffixes[] = "KMGT";
	const char *suffix;
	unsigned shift = 0;
	uint64_t number;
	char *end;

	/* strtoull takes signs and white space, which no size has. */
	if (*text < '0' || *text > '9')
		return -EINVAL;
	errno = 0;
	number = strtoull(text, &end, 10);
	if (errno)
		return -ERANGE;
	if (*end) {
		suffix = strchr(suffixes, *end >= 'a' ? *end - 'a' + 'A' : *end);
		if (!suffix || end[1])
			return -EINVAL;
		shift = 10 * (unsigned)(suffix - suffixes + 1);
	}
	if (number > UINT64_MAX >> shift)
		return -ERANGE;
	*value = number << shift;
	return 0;
}
