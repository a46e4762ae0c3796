/* SPDX-License-Identifier: Apache-2.0 */
/* What a caller may ask for in a record, before there is a file. */
#include "zip/zip.h"

#include <errno.h>
#include <string.h>

/* Names that begin so are the library's own. */
#define RESERVED_FOLDER ".ioshape/"

/* Whether each part between slashes is a name that unpacks to a file below the folder, wherever
 * that is. */
static bool parts_valid(const char *name)
{
	for (;;) {
		size_t bytes = strcspn(name, "/");

		if (!bytes || (bytes == 1 && name[0] == '.') ||
		    (bytes == 2 && name[0] == '.' && name[1] == '.'))
			return false;
		if (!name[bytes])
			return true;
		name += bytes + 1;
	}
}

static int check_name(const char *name, const char *path, struct base_error *error)
{
	size_t bytes;

	if (!name || !*name)
		return base_refuse(error, -EINVAL,
				   "a record for %s has no name" BASE_REMEDY "give it one", path);
	bytes = strnlen(name, IOSHAPE_MAX_NAME_BYTES + 1);
	if (bytes > IOSHAPE_MAX_NAME_BYTES)
		return base_refuse(
			error, IOSHAPE_E_LIMIT,
			"the name of record \"%s\" for \"%s\" is longer than %u bytes" BASE_REMEDY
			"shorten it",
			ZIP_SHOWN(name), path, IOSHAPE_MAX_NAME_BYTES);
	if (!zip_utf8_valid(name, bytes))
		return base_refuse(
			error, -EINVAL,
			"the name of record \"%s\" for \"%s\" is not valid UTF-8" BASE_REMEDY
			"it must be",
			ZIP_SHOWN(name), path);
	if (!parts_valid(name))
		return base_refuse(error, -EINVAL,
				   "cannot write record \"%s\" to \"%s\": names are relative paths "
				   "without \".\", \"..\" or empty parts",
				   ZIP_SHOWN(name), path);
	if (!strncmp(name, RESERVED_FOLDER, strlen(RESERVED_FOLDER)))
		return base_refuse(error, -EINVAL,
				   "cannot write record \"%s\" to \"%s\": " RESERVED_FOLDER
				   " is the library's own",
				   ZIP_SHOWN(name), path);
	return 0;
}

int zip_check_record(const char *name, uint32_t alignment, const char *path,
		     struct base_error *error)
{
	int ret = check_name(name, path, error);

	if (!ret && (alignment & (alignment - 1) || alignment > ZIP_LARGE_ALIGNMENT))
		ret = base_refuse(error, -EINVAL,
				  "cannot align record \"%s\" of \"%s\" to %u bytes: it must be a "
				  "power of two up to %u",
				  ZIP_SHOWN(name), path, alignment, ZIP_LARGE_ALIGNMENT);
	return ret;
}
