/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A zip of whole files, each beginning on a boundary of the storage: with zeros before its header,
 * because an extra field, with its 64 KiB, cannot pad to a stripe.
 */
#define _GNU_SOURCE
#include "zip/entries.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

struct zip_bundle {
	struct zip_sink sink; /* without ops until the file is ours */
	char *path;
	uint64_t alignment;
	struct zip_entries entries; /* the last one may be open */
	bool open;
	struct base_buffer scratch; /* headers and descriptors */
	int failed;                 /* the code after which nothing more is written */
	bool finished;              /* nothing may follow a directory */
};

/* ---- Life ------------------------------------------------------------------------------------ */

int zip_bundle_new(struct zip_bundle **out, struct ring_writer *file, const char *path,
		   uint64_t alignment, struct base_error *error)
{
	struct zip_bundle *bundle;

	*out = NULL;
	if (!alignment || alignment % ZIP_LARGE_ALIGNMENT || alignment > ZIP_MAX_MEMBER_ALIGNMENT)
		return base_refuse(error, -EINVAL,
				   "cannot align members of %s to %llu bytes: it must be a "
				   "multiple of %u up to %llu",
				   path, (unsigned long long)alignment, ZIP_LARGE_ALIGNMENT,
				   ZIP_MAX_MEMBER_ALIGNMENT);
	bundle = calloc(1, sizeof(*bundle));
	if (!bundle)
		return base_no_memory(error, "a writer of bundles", sizeof(*bundle));
	bundle->path = strdup(path);
	if (!bundle->path) {
		zip_bundle_free(bundle);
		return base_no_memory(error, "a path", strlen(path));
	}
	bundle->alignment = alignment;
	bundle->sink = zip_sink_of_file(file);
	*out = bundle;
	return 0;
}

void zip_bundle_free(struct zip_bundle *bundle)
{
	if (!bundle)
		return;
	if (bundle->sink.ops)
		bundle->sink.ops->free(bundle->sink.to);
	base_buffer_free(&bundle->scratch);
	zip_entries_free(&bundle->entries);
	free(bundle->path);
	free(bundle);
}

/* After this only zip_bundle_free() makes sense. */
static int fail_for_good(struct zip_bundle *bundle, int code)
{
	if (!bundle->failed)
		bundle->failed = code;
	return code;
}

/* First in every call. */
static int check_usable(const struct zip_bundle *bundle, bool open, struct base_error *error)
{
	if (bundle->failed)
		return base_fail(error, bundle->failed,
				 "cannot write on to \"%s\" after an earlier failure" BASE_REMEDY
				 "begin a new file",
				 bundle->path);
	if (bundle->finished)
		return base_refuse(error, -EINVAL,
				   "\"%s\" is complete" BASE_REMEDY "begin a new file for more",
				   bundle->path);
	if (open && !bundle->open)
		return base_refuse(error, -EINVAL,
				   "no member of %s is open" BASE_REMEDY "begin one first",
				   bundle->path);
	if (!open && bundle->open)
		return base_refuse(
			error, -EINVAL,
			"member \"%s\" of \"%s\" is still open" BASE_REMEDY "end it first",
			ZIP_SHOWN(zip_entries_last(&bundle->entries)->name), bundle->path);
	return 0;
}

static int put_through(struct zip_bundle *bundle, const void *data, size_t bytes, uint32_t *crc,
		       struct base_error *error)
{
	int ret = bundle->sink.ops->put(bundle->sink.to, data, bytes, crc, error);

	return ret ? fail_for_good(bundle, ret) : 0;
}

/* ---- Members --------------------------------------------------------------------------------- */

static int check_begin(const struct zip_bundle *bundle, const char *name, struct base_error *error)
{
	int ret = zip_check_record(name, 0, bundle->path, error);

	if (ret)
		return ret;
	if (zip_entries_have(&bundle->entries, name))
		return base_refuse(error, -EEXIST,
				   "member \"%s\" is in %s already" BASE_REMEDY
				   "names must be unique",
				   ZIP_SHOWN(name), bundle->path);
	if (bundle->entries.count >= ZIP_MAX_RECORDS)
		return base_refuse(error, IOSHAPE_E_LIMIT,
				   "member \"%s\" of \"%s\" is one above %u", ZIP_SHOWN(name),
				   bundle->path, ZIP_MAX_RECORDS);
	return 0;
}

static int put_padding(struct zip_bundle *bundle, uint64_t bytes, struct base_error *error)
{
	static const uint8_t zeros[16 * KIB];
	uint64_t piece;
	int ret = 0;

	for (; !ret && bytes; bytes -= piece) {
		piece = MIN(bytes, sizeof(zeros));
		ret = put_through(bundle, zeros, piece, NULL, error);
	}
	return ret;
}

int zip_bundle_begin(struct zip_bundle *bundle, const char *name, struct base_error *error)
{
	struct zip_place place;
	uint64_t offset;
	int ret;

	ret = check_usable(bundle, false, error);
	if (!ret)
		ret = check_begin(bundle, name, error);
	if (ret)
		return ret;
	offset = bundle->sink.ops->offset(bundle->sink.to);
	ret = zip_place_member(offset, strlen(name), bundle->alignment, &place);
	bundle->scratch.bytes = 0;
	if (!ret)
		ret = zip_entries_add(&bundle->entries, "", name, &place);
	if (!ret)
		ret = zip_encode_header(&bundle->scratch, name, &place, IOSHAPE_UNKNOWN_BYTES);
	if (ret) {
		base_fail(error, ret, "cannot begin member \"%s\" of \"%s\" at offset %llu",
			  ZIP_SHOWN(name), bundle->path, (unsigned long long)offset);
		return fail_for_good(bundle, ret);
	}
	ret = put_padding(bundle, place.header_offset - offset, error);
	if (!ret)
		ret = put_through(bundle, bundle->scratch.data, bundle->scratch.bytes, NULL, error);
	bundle->open = !ret;
	return ret;
}

/* The member's checksum goes on, and `*crc`, if there is one; no byte is looked at twice but those
 * of small pieces. */
static int put_in_member(struct zip_bundle *bundle, const void *data, size_t bytes, uint32_t *crc,
			 struct base_error *error)
{
	struct zip_entry *entry = zip_entries_last(&bundle->entries);
	uint32_t part = 0;
	int ret;

	if (bytes > (uint64_t)INT64_MAX - entry->bytes)
		return base_refuse(error, IOSHAPE_E_LIMIT, "member \"%s\" of \"%s\" is too long",
				   ZIP_SHOWN(entry->name), bundle->path);
	entry->bytes += bytes;
	if (!crc)
		return put_through(bundle, data, bytes, &entry->crc32, error);
	if (bytes <= BASE_CRC32_TWICE_BYTES) {
		entry->crc32 = base_crc32(entry->crc32, data, bytes);
		return put_through(bundle, data, bytes, crc, error);
	}
	ret = put_through(bundle, data, bytes, &part, error);
	*crc = base_crc32_combine(*crc, part, bytes);
	entry->crc32 = base_crc32_combine(entry->crc32, part, bytes);
	return ret;
}

int zip_bundle_put(struct zip_bundle *bundle, const void *data, size_t bytes,
		   struct base_error *error)
{
	int ret = check_usable(bundle, true, error);

	return ret || !bytes ? ret : put_in_member(bundle, data, bytes, NULL, error);
}

int zip_bundle_end(struct zip_bundle *bundle, struct zip_member *member, struct base_error *error)
{
	const struct zip_entry *entry;
	int ret = check_usable(bundle, true, error);

	if (ret)
		return ret;
	entry = zip_entries_last(&bundle->entries);
	bundle->scratch.bytes = 0;
	if (zip_encode_descriptor(&bundle->scratch, entry->crc32, entry->bytes, true)) {
		base_no_memory(error, "a data descriptor", bundle->scratch.room);
		return fail_for_good(bundle, -ENOMEM);
	}
	ret = put_through(bundle, bundle->scratch.data, bundle->scratch.bytes, NULL, error);
	bundle->open = false;
	if (ret)
		return ret;
	member->offset = entry->data_offset;
	member->bytes = entry->bytes;
	member->crc32 = entry->crc32;
	return 0;
}

/* ---- The open member as a sink --------------------------------------------------------------- */

static uint64_t member_offset(void *to)
{
	const struct zip_bundle *bundle = to;

	return zip_entries_last(&bundle->entries)->bytes;
}

static int member_put(void *to, const void *data, size_t bytes, uint32_t *crc,
		      struct base_error *error)
{
	struct zip_bundle *bundle = to;
	int ret = check_usable(bundle, true, error);

	return ret ? ret : put_in_member(bundle, data, bytes, crc, error);
}

/* Its end is zip_bundle_end(). */
static int member_finish(void *to, struct base_error *error)
{
	return check_usable(to, true, error);
}

static void member_free(void *to)
{
	(void)to;
}

struct zip_sink zip_sink_of_member(struct zip_bundle *bundle)
{
	static const struct zip_sink_ops ops = {
		.offset = member_offset,
		.put = member_put,
		.finish = member_finish,
		.free = member_free,
	};

	return (struct zip_sink){ &ops, bundle };
}

/* ---- The end --------------------------------------------------------------------------------- */

int zip_bundle_finish(struct zip_bundle *bundle, struct base_error *error)
{
	int ret = check_usable(bundle, false, error);

	if (ret)
		return ret;
	ret = zip_put_directory(&bundle->sink, &bundle->entries, bundle->path, error);
	if (!ret)
		ret = bundle->sink.ops->finish(bundle->sink.to, error);
	bundle->finished = true;
	return ret ? fail_for_good(bundle, ret) : 0;
}
