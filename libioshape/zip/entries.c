/* SPDX-License-Identifier: Apache-2.0 */
#define _GNU_SOURCE
#include "zip/entries.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

int zip_grow(void **array, uint64_t count, uint64_t *room, size_t element_bytes)
{
	uint64_t more = *room ? *room * 2 : 64;
	void *larger;

	if (count < *room)
		return 0;
	larger = reallocarray(*array, more, element_bytes);
	if (!larger)
		return -ENOMEM;
	*array = larger;
	*room = more;
	return 0;
}

/* ---- Life ------------------------------------------------------------------------------------ */

int zip_out_new(struct zip_out *out, struct zip_sink sink, const char *folder, const char *path,
		struct base_error *error)
{
	*out = (struct zip_out){ .folder = folder, .path = strdup(path) };
	if (!out->path || zip_names_new(&out->names, 0)) {
		zip_out_free(out);
		return base_no_memory(error, "the directory of an archive", strlen(path));
	}
	out->sink = sink;
	return 0;
}

void zip_out_free(struct zip_out *out)
{
	if (out->sink.ops)
		out->sink.ops->free(out->sink.to);
	base_buffer_free(&out->scratch);
	zip_names_free(out->names);
	for (uint64_t i = 0; i < out->count; i++)
		free(out->entries[i].name);
	free(out->entries);
	free(out->path);
}

/* ---- Checks ---------------------------------------------------------------------------------- */

int zip_out_check(const struct zip_out *out, bool open, struct base_error *error)
{
	if (out->failed)
		return base_fail(error, out->failed,
				 "cannot write on to \"%s\" after an earlier failure" BASE_REMEDY
				 "begin a new file",
				 out->path);
	if (out->finished)
		return base_refuse(error, -EINVAL,
				   "\"%s\" is complete" BASE_REMEDY "begin a new file for more",
				   out->path);
	if (open && !out->open)
		return base_refuse(error, -EINVAL,
				   "no record of \"%s\" is open" BASE_REMEDY "begin one first",
				   out->path);
	if (!open && out->open)
		return base_refuse(
			error, -EINVAL,
			"record \"%s\" of \"%s\" is still open" BASE_REMEDY "end it first",
			ZIP_SHOWN(zip_out_last(out)->name + strlen(out->folder)), out->path);
	return 0;
}

int zip_out_check_record(const struct zip_out *out, const char *name, uint32_t alignment,
			 struct base_error *error)
{
	uint64_t position;
	int ret = zip_check_record(name, alignment, out->path, error);

	if (ret)
		return ret;
	if (zip_names_find(out->names, name, strlen(name), &position))
		return base_refuse(error, -EEXIST,
				   "record \"%s\" is in \"%s\" already" BASE_REMEDY
				   "names must be unique",
				   ZIP_SHOWN(name), out->path);
	/* One place is kept for an index, which the reader counts too. */
	if (out->count + 1 >= ZIP_MAX_RECORDS)
		return base_refuse(error, IOSHAPE_E_LIMIT,
				   "record \"%s\" of \"%s\" is one above %u", ZIP_SHOWN(name),
				   out->path, ZIP_MAX_RECORDS);
	return 0;
}

/* ---- Records --------------------------------------------------------------------------------- */

int zip_out_fail(struct zip_out *out, int code)
{
	out->failed = code;
	return code;
}

int zip_out_put(struct zip_out *out, const void *data, size_t bytes, uint32_t *crc,
		struct base_error *error)
{
	int ret = out->sink.ops->put(out->sink.to, data, bytes, crc, error);

	return ret ? zip_out_fail(out, ret) : 0;
}

static int add_entry(struct zip_out *out, const char *name, const struct zip_place *place)
{
	const size_t folder_bytes = strlen(out->folder), name_bytes = strlen(name);
	struct zip_entry *entry;
	void *entries = out->entries;
	int ret;

	ret = zip_grow(&entries, out->count, &out->room, sizeof(*out->entries));
	out->entries = entries;
	if (ret)
		return ret;
	entry = &out->entries[out->count];
	*entry = (struct zip_entry){
		.name = malloc(folder_bytes + name_bytes + 1),
		.name_bytes = (uint32_t)(folder_bytes + name_bytes),
		.header_offset = place->header_offset,
		.data_offset = place->data_offset,
	};
	if (!entry->name)
		return -ENOMEM;
	out->count++; /* the name is freed with the entries from now on */
	memcpy(entry->name, out->folder, folder_bytes);
	memcpy(entry->name + folder_bytes, name, name_bytes + 1);
	return zip_names_add(out->names, entry->name + folder_bytes, name_bytes, out->count - 1);
}

static int put_padding(struct zip_out *out, uint64_t bytes, struct base_error *error)
{
	static const uint8_t zeros[16 * KIB];
	uint64_t piece;
	int ret = 0;

	for (; !ret && bytes; bytes -= piece) {
		piece = MIN(bytes, sizeof(zeros));
		ret = zip_out_put(out, zeros, piece, NULL, error);
	}
	return ret;
}

int zip_out_begin(struct zip_out *out, const char *name, const struct zip_place *place,
		  uint64_t bytes, struct base_error *error)
{
	int ret = add_entry(out, name, place);

	out->scratch.bytes = 0;
	if (!ret)
		ret = zip_encode_header(&out->scratch, zip_out_last(out)->name, place, bytes);
	if (ret) {
		base_fail(error, ret, "cannot begin record \"%s\" of \"%s\"", ZIP_SHOWN(name),
			  out->path);
		return zip_out_fail(out, ret);
	}
	ret = put_padding(out, place->header_offset - zip_out_offset(out), error);
	if (!ret)
		ret = zip_out_put(out, out->scratch.data, out->scratch.bytes, NULL, error);
	out->open = !ret;
	return ret;
}

int zip_out_end(struct zip_out *out, bool zip64, struct base_error *error)
{
	const struct zip_entry *entry = zip_out_last(out);

	out->scratch.bytes = 0;
	if (zip_encode_descriptor(&out->scratch, entry->crc32, entry->bytes, zip64)) {
		base_no_memory(error, "a data descriptor", out->scratch.room);
		return zip_out_fail(out, -ENOMEM);
	}
	out->open = false;
	return zip_out_put(out, out->scratch.data, out->scratch.bytes, NULL, error);
}

/* ---- The end --------------------------------------------------------------------------------- */

static int put_directory(struct zip_out *out, struct base_error *error)
{
	struct base_buffer bytes = { 0 };
	int ret;

	/* A file that could not be read again must not be written. */
	if (zip_directory_bytes(out->entries, out->count) > ZIP_MAX_DIRECTORY_BYTES)
		return base_refuse(error, IOSHAPE_E_LIMIT,
				   "the directory of \"%s\" would pass %s" BASE_REMEDY
				   "use fewer or shorter names",
				   out->path, BASE_SIZE(ZIP_MAX_DIRECTORY_BYTES));
	ret = zip_encode_directory(&bytes, out->entries, out->count, zip_out_offset(out));
	if (ret)
		base_fail(error, ret, "cannot build the directory of \"%s\"", out->path);
	else
		ret = zip_out_put(out, bytes.data, bytes.bytes, NULL, error);
	base_buffer_free(&bytes);
	return ret;
}

int zip_out_finish(struct zip_out *out, struct base_error *error)
{
	int ret = put_directory(out, error);

	if (!ret)
		ret = out->sink.ops->finish(out->sink.to, error);
	out->finished = true;
	return ret ? zip_out_fail(out, ret) : 0;
}
