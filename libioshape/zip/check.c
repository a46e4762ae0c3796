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

int zip_check_name(const char *what, const char *name, struct base_error *error)
{
	size_t bytes;

	if (!name || !*name)
		return base_refuse(error, -EINVAL,
				   "cannot save a %s without a name" BASE_REMEDY "give it one",
				   what);
	bytes = strnlen(name, IOSHAPE_MAX_NAME_BYTES + 1);
	if (bytes > IOSHAPE_MAX_NAME_BYTES)
		return base_refuse(error, IOSHAPE_E_LIMIT,
				   "cannot save %s \"%s\": its name is longer than %u "
				   "bytes" BASE_REMEDY "shorten it",
				   what, ZIP_SHOWN(name), IOSHAPE_MAX_NAME_BYTES);
	if (!zip_utf8_valid(name, bytes))
		return base_refuse(error, -EINVAL,
				   "cannot save %s \"%s\": its name is not valid UTF-8" BASE_REMEDY
				   "encode it in UTF-8",
				   what, ZIP_SHOWN(name));
	return 0;
}

static int check_record_name(const char *name, const char *path, struct base_error *error)
{
	int ret = zip_check_name("record", name, error);

	if (ret)
		return ret;
	if (!parts_valid(name))
		return base_refuse(error, -EINVAL,
				   "cannot write record \"%s\" to \"%s\": names are relative paths "
				   "without \".\", \"..\" or empty parts",
				   ZIP_SHOWN(name), path);
	if (!strncmp(name, RESERVED_FOLDER, strlen(RESERVED_FOLDER)))
		return base_refuse(
			error, -EINVAL,
			"cannot write record \"%s\" to \"%s\": the folder " RESERVED_FOLDER
			" belongs to the library",
			ZIP_SHOWN(name), path);
	return 0;
}

int zip_check_record(const char *name, uint32_t alignment, const char *path,
		     struct base_error *error)
{
	int ret = check_record_name(name, path, error);

	if (!ret && (alignment & (alignment - 1) || alignment > ZIP_LARGE_ALIGNMENT))
		ret = base_refuse(error, -EINVAL,
				  "cannot align record \"%s\" of \"%s\" to %u bytes: it must be a "
				  "power of two up to %u",
				  ZIP_SHOWN(name), path, alignment, ZIP_LARGE_ALIGNMENT);
	return ret;
}
