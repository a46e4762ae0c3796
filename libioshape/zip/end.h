/* SPDX-License-Identifier: Apache-2.0 */
/* Between end.c, which finds the end of an archive, and parse.c, which reads its directory. */
#ifndef ZIP_END_H
#define ZIP_END_H

#include "zip/zip.h"

/* The bytes to parse, and where complaints go. */
struct zip_source {
	uint64_t bytes;
	zip_fetch_fn fetch;
	void *user;
	const char *path;
	struct base_error *error;
};

/* What the records at the end say of the central directory. */
struct zip_end {
	uint64_t count; /* of entries */
	uint64_t offset;
	uint64_t bytes;
};

/* fetch() after a check that all of it lies in the file. */
int zip_source_get(const struct zip_source *source, uint64_t offset, void *into, size_t bytes);

/*
 * Finds the end record and the zip64 records and believes them if they agree with each other, with
 * the file's size and with the limits.
 */
int zip_find_end(const struct zip_source *source, struct zip_end *end);

#endif
