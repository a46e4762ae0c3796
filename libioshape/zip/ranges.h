/* SPDX-License-Identifier: Apache-2.0 */
/* Inside the zip floor: ranges of records, and of what lies between them. */
#ifndef ZIP_RANGES_H
#define ZIP_RANGES_H

#include "zip/zip.h"

/* The record of a range that lies between records: its offset is the file's, and nothing is known
 * about its bytes. */
#define ZIP_NO_RECORD UINT64_MAX

/* One try to open a file, after which there is nothing to free if it fails. */
typedef int (*zip_open_fn)(struct zip_reader *reader, const char *path, uint64_t base,
			   uint64_t bytes, enum ioshape_direct direct, struct base_error *error);
/* Tries until the file is the one that the name leads to by now. */
int zip_open_latest(struct zip_reader *reader, const char *path, uint64_t base, uint64_t bytes,
		    enum ioshape_direct direct, zip_open_fn open, struct base_error *error);

/*
 * Compares the ZIP_LOCAL_BYTES of a record's local header with where its data lie. Whoever reads
 * the file as it lies finds the data by them, and they have no checksum: one wrong bit there, and
 * right bytes would be taken for the wrong ones.
 */
int zip_check_header(const struct zip_reader *reader, const struct zip_entry *entry,
		     const uint8_t *head, struct base_error *error);

#endif
