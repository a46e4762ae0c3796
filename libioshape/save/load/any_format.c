/* SPDX-License-Identifier: Apache-2.0 */
/* Which way a file is read that may have any format. */
#include "save/load/load.h"

#define LEAST_ZIP_BYTES 22u

/* Those that lie beside the file; false if there are none, or they tell of an earlier one. */
static bool find_checksums(const struct ring_input *input, struct zip_checksums *checksums)
{
	struct base_buffer bytes = { 0 };
	bool known;
	int ret;

	ret = ring_input_get_beside(input, ZIP_CHECKSUMS_SUFFIX, zip_checksums_bytes(input->bytes),
				    &bytes);
	known = !ret && !zip_checksums_decode(checksums, bytes.data, bytes.bytes);
	base_buffer_free(&bytes);
	if (!known)
		return false;
	if (checksums->file_bytes == input->bytes && checksums->modified_ns &&
	    checksums->modified_ns == ring_input_modified_ns(input))
		return true;
	zip_checksums_free(checksums);
	return false;
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
			 struct base_error *error)
{
	const bool whole = !options->file_offset && !options->file_bytes;
	struct zip_checksums beside;
	int ret;

	ret = zip_reader_open_plain(reader, path, options->file_offset, options->file_bytes, direct,
				    error);
	if (ret)
		return ret;
	if (whole && find_checksums(&reader->input, &beside)) {
		ret = zip_reader_add_checksums(reader, &beside, error);
		zip_checksums_free(&beside);
	} else {
		ret = try_zip(reader, path, options, direct, error);
	}
	if (ret)
		zip_reader_close(reader);
	return ret;
}
