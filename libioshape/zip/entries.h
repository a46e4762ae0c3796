/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Inside the zip floor: a zip on its way into a sink, whatever its records are. It keeps what the
 * directory needs and puts what stands around the records.
 */
#ifndef ZIP_ENTRIES_H
#define ZIP_ENTRIES_H

#include "zip/zip.h"

struct zip_out {
	struct zip_sink sink; /* without ops until it is ours */
	const char *folder;   /* before the name of every record, with its slash; static */
	char *path;           /* for messages */

	struct zip_entry *entries; /* of records that have begun; the last one may be open */
	uint64_t count, room;
	struct zip_names *names; /* without the folder */
	bool open;               /* between begin and end */

	struct base_buffer scratch; /* headers and descriptors */
	int failed;                 /* the code after which nothing more is written */
	bool finished;              /* nothing may follow a directory */
};

/* Room for one more; twice as much each time, so that the cost per element stays the same. */
int zip_grow(void **array, uint64_t count, uint64_t *room, size_t element_bytes);

/* Takes the sink over; after a failure it is the caller's, and there is nothing to free. */
int zip_out_new(struct zip_out *out, struct zip_sink sink, const char *folder, const char *path,
		struct base_error *error);
void zip_out_free(struct zip_out *out);

/* First in every call: that nothing has failed, that it is not finished, and whether a record is
 * open. A refusal changes nothing. */
int zip_out_check(const struct zip_out *out, bool open, struct base_error *error);
/* That a record may have this name and alignment. A refusal changes nothing. */
int zip_out_check_record(const struct zip_out *out, const char *name, uint32_t alignment,
			 struct base_error *error);

/* The last record. */
static inline struct zip_entry *zip_out_last(const struct zip_out *out)
{
	return &out->entries[out->count - 1];
}

static inline uint64_t zip_out_offset(const struct zip_out *out)
{
	return out->sink.ops->offset(out->sink.to);
}

/* The code, after which only zip_out_free() makes sense. So it is after a failure of all below. */
int zip_out_fail(struct zip_out *out, int code);
/* Zeros up to its header, then that; the record is open then. */
int zip_out_begin(struct zip_out *out, const char *name, const struct zip_place *place,
		  uint64_t bytes, struct base_error *error);
/* To the sink, which continues `*crc` on the way; it may be NULL. */
int zip_out_put(struct zip_out *out, const void *data, size_t bytes, uint32_t *crc,
		struct base_error *error);
/* The descriptor, by what the entry of the record says by now. */
int zip_out_end(struct zip_out *out, bool zip64, struct base_error *error);
/* The directory, and the end of the sink. */
int zip_out_finish(struct zip_out *out, struct base_error *error);

#endif
