/* SPDX-License-Identifier: Apache-2.0 */
/* Which way a file is read that may have any format. */
#include "save/load/load.h"

#include <errno.h>

#define LEAST_ZIP_BYTES 22u

/* Nothing is there that is ours: no file, or one that another user has put there. */
static bool is_nothing(int code)
{
	return code == -ENOENT || code == -EPERM || code == -EACCES || code == -ELOOP ||
	       code == -ENAMETOOLONG || code == -ENOTDIR;
}

static int cannot_read(struct base_error *why, int code, const char *path)
{
	if (code == IOSHAPE_E_DAMAGED || code == IOSHAPE_E_FORMAT || code == -EFBIG)
		return base_refuse(why, IOSHAPE_E_DAMAGED,
				   "cannot verify \"%s\": \"%s" ZIP_CHECKSUMS_SUFFIX
				   "\", which has its checksums, is damaged, or a later version of "
				   "ioshape wrote it" BASE_REMEDY
				   "compare the file with another copy, and write it again",
				   path, path);
	return base_fail(why, code, "cannot verify \"%s\": cannot read its checksums, \"%s%s\"",
			 path, path, ZIP_CHECKSUMS_SUFFIX);
}

/* The checksums beside the file: *known if they are of this file. Otherwise *why says why there are
 * none, unless nothing lies there. */
static int find_checksums(const struct ring_input *input, struct zip_checksums *checksums,
			  bool *known, struct base_error *why, struct base_error *error)
{
	struct base_buffer bytes = { 0 };
	int ret;

	*known = false;
	ret = ring_input_get_beside(input, ZIP_CHECKSUMS_SUFFIX, ZIP_MOST_CHECKSUMS_BYTES, &bytes);
	if (!ret)
		ret = zip_checksums_decode(checksums, bytes.data, bytes.bytes);
	base_buffer_free(&bytes);
	if (ret == -ENOMEM)
		return base_no_memory(error, "the checksums of a file", ZIP_MOST_CHECKSUMS_BYTES);
	if (ret && !is_nothing(ret))
		cannot_read(why, ret, input->path);
	if (ret)
		return 0;
	/* A file of this time and another length is no longer what it was: damage. */
	*known = checksums->modified_ns && checksums->modified_ns == ring_input_modified_ns(input);
	if (*known)
		return 0;
	zip_checksums_free(checksums);
	base_refuse(why, -ENODATA,
		    "cannot verify \"%s\": it was changed or replaced after \"%s%s\", its "
		    "checksums, was written" BASE_REMEDY "write it again with checksums",
		    input->path, input->path, ZIP_CHECKSUMS_SUFFIX);
	return 0;
}

/* The file as an archive, in the place of the open one; as it is open if it is none. */
static int try_zip(struct zip_reader *reader, const char *path,
		   const struct ioshape_reader_options *options, enum ioshape_direct direct,
		   struct base_error *error)
{
	struct base_error why = { 0 };
	struct zip_reader zip;
	int ret;

	/* The end alone has so much. An empty file has nothing that could be damaged. */
	if (reader->input.bytes < LEAST_ZIP_BYTES)
		return 0;
	ret = zip_reader_open(&zip, path, options->file_offset, options->file_bytes, direct, &why);
	if (ret == IOSHAPE_E_FORMAT || ret == IOSHAPE_E_LIMIT)
		return 0;
	if (ret)
		return base_pass_on(error, &why);
	zip_reader_close(reader);
	*reader = zip;
	return 0;
}

int save_open_any_format(struct zip_reader *reader, const char *path,
			 const struct ioshape_reader_options *options, enum ioshape_direct direct,
			 struct base_error *beside, struct base_error *error)
{
	const bool whole = !options->file_offset && !options->file_bytes;
	struct zip_checksums checksums;
	bool known = false;
	int ret;

	ret = zip_reader_open_plain(reader, path, options->file_offset, options->file_bytes, direct,
				    error);
	if (ret)
		return ret;
	if (whole)
		ret = find_checksums(&reader->input, &checksums, &known, beside, error);
	if (known) {
		ret = zip_reader_add_checksums(reader, &checksums, error);
		zip_checksums_free(&checksums);
	} else if (!ret) {
		ret = try_zip(reader, path, options, direct, error);
	}
	if (ret)
		zip_reader_close(reader);
	return ret;
}
