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
	struct zip_out out;
	struct ring_writer *file; /* the sink's */
	uint64_t alignment;
};

/* ---- Life ------------------------------------------------------------------------------------ */

int zip_bundle_new(struct zip_bundle **out, struct ring_writer *file, const char *path,
		   uint64_t alignment, struct base_error *error)
{
	struct zip_bundle *bundle;
	int ret;

	*out = NULL;
	if (!alignment || alignment % ZIP_LARGE_ALIGNMENT || alignment > ZIP_MAX_MEMBER_ALIGNMENT)
		return base_refuse(error, -EINVAL,
				   "cannot align the records of \"%s\" to %llu bytes: it must be a "
				   "multiple of %s up to %s",
				   path, (unsigned long long)alignment,
				   BASE_SIZE(ZIP_LARGE_ALIGNMENT),
				   BASE_SIZE(ZIP_MAX_MEMBER_ALIGNMENT));
	bundle = calloc(1, sizeof(*bundle));
	if (!bundle)
		return base_no_memory(error, "a writer of bundles", sizeof(*bundle));
	ret = zip_out_new(&bundle->out, zip_sink_of_file(file), "", path, error);
	if (ret) {
		free(bundle);
		return ret;
	}
	bundle->file = file;
	bundle->alignment = alignment;
	*out = bundle;
	return 0;
}

void zip_bundle_free(struct zip_bundle *bundle)
{
	if (!bundle)
		return;
	zip_out_free(&bundle->out);
	free(bundle);
}

/* ---- Members --------------------------------------------------------------------------------- */

int zip_bundle_begin(struct zip_bundle *bundle, const char *name, struct base_error *error)
{
	struct zip_out *out = &bundle->out;
	struct zip_place place;
	int ret;

	ret = zip_out_check(out, false, error);
	if (!ret)
		ret = zip_out_check_record(out, name, 0, error);
	if (ret)
		return ret;
	ret = zip_place_member(zip_out_offset(out), strlen(name), bundle->alignment, &place);
	if (ret) {
		base_fail(error, ret, "record \"%s\" does not fit into \"%s\"", ZIP_SHOWN(name),
			  out->path);
		return zip_out_fail(out, ret);
	}
	return zip_out_begin(out, name, &place, IOSHAPE_UNKNOWN_BYTES, error);
}

static int lengthen(const struct zip_bundle *bundle, size_t bytes, struct base_error *error)
{
	struct zip_entry *entry = zip_out_last(&bundle->out);

	if (bytes > (uint64_t)INT64_MAX - entry->bytes)
		return base_refuse(error, IOSHAPE_E_LIMIT, "record \"%s\" of \"%s\" is too long",
				   ZIP_SHOWN(entry->name), bundle->out.path);
	entry->bytes += bytes;
	return 0;
}

/* The member's checksum goes on, and `*crc`, if there is one; no byte is looked at twice but those
 * of small pieces. */
static int put_in_member(struct zip_bundle *bundle, const void *data, size_t bytes, uint32_t *crc,
			 struct base_error *error)
{
	struct zip_entry *entry = zip_out_last(&bundle->out);
	uint32_t part = 0;
	int ret = lengthen(bundle, bytes, error);

	if (ret)
		return ret;
	if (!crc)
		return zip_out_put(&bundle->out, data, bytes, &entry->crc32, error);
	if (bytes <= BASE_CRC32_TWICE_BYTES) {
		entry->crc32 = base_crc32(entry->crc32, data, bytes);
		return zip_out_put(&bundle->out, data, bytes, crc, error);
	}
	ret = zip_out_put(&bundle->out, data, bytes, &part, error);
	*crc = base_crc32_combine(*crc, part, bytes);
	entry->crc32 = base_crc32_combine(entry->crc32, part, bytes);
	return ret;
}

int zip_bundle_put(struct zip_bundle *bundle, const void *data, size_t bytes,
		   struct base_error *error)
{
	int ret = zip_out_check(&bundle->out, true, error);

	return ret || !bytes ? ret : put_in_member(bundle, data, bytes, NULL, error);
}

int zip_bundle_put_summed(struct zip_bundle *bundle, const void *data, size_t bytes, uint32_t crc32,
			  struct base_error *error)
{
	struct zip_entry *entry;
	int ret = zip_out_check(&bundle->out, true, error);

	if (!ret)
		ret = lengthen(bundle, bytes, error);
	if (ret)
		return ret;
	entry = zip_out_last(&bundle->out);
	entry->crc32 = base_crc32_combine(entry->crc32, crc32, bytes);
	ret = ring_writer_put_summed(bundle->file, data, bytes, crc32, error);
	return ret ? zip_out_fail(&bundle->out, ret) : 0;
}

int zip_bundle_end(struct zip_bundle *bundle, struct zip_member *member, struct base_error *error)
{
	const struct zip_entry *entry;
	int ret = zip_out_check(&bundle->out, true, error);

	if (!ret)
		ret = zip_out_end(&bundle->out, true, error);
	if (ret)
		return ret;
	entry = zip_out_last(&bundle->out);
	member->offset = entry->data_offset;
	member->bytes = entry->bytes;
	member->crc32 = entry->crc32;
	return 0;
}

/* ---- The open member as a sink --------------------------------------------------------------- */

static uint64_t member_offset(void *to)
{
	const struct zip_bundle *bundle = to;

	return zip_out_last(&bundle->out)->bytes;
}

static int member_put(void *to, const void *data, size_t bytes, uint32_t *crc,
		      struct base_error *error)
{
	struct zip_bundle *bundle = to;
	int ret = zip_out_check(&bundle->out, true, error);

	return ret ? ret : put_in_member(bundle, data, bytes, crc, error);
}

/* Its end is zip_bundle_end(). */
static int member_finish(void *to, struct base_error *error)
{
	const struct zip_bundle *bundle = to;

	return zip_out_check(&bundle->out, true, error);
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
	int ret = zip_out_check(&bundle->out, false, error);

	return ret ? ret : zip_out_finish(&bundle->out, error);
}
