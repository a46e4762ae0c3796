/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The bytes of the index record, for the encoder and the decoder. docs/format.md explains them. All
 * numbers are little-endian; every section begins on a multiple of 8.
 */
#ifndef ZIP_INDEX_H
#define ZIP_INDEX_H

#include "zip/zip.h"

#define INDEX_MAGIC "ioshape\n"
#define INDEX_MAGIC_BYTES 8u
#define INDEX_VERSION BASE_FORMAT(1u)

/* magic, u32 version, u32 sections, u32 directory_crc32, u32 zero, u64 check_bytes, u64 records */
#define INDEX_HEADER_BYTES 40u
#define INDEX_SECTIONS_AT 12u

/* u32 tag, u32 zero, u64 bytes of the payload that follows, padded with zeros to a multiple of 8 */
#define SECTION_HEADER_BYTES 16u
#define SECTION_ALIGNMENT 8u

enum index_section {
	SECTION_OFFSETS = 1,  /* u64 for each record: where in the file its data begins */
	SECTION_CHECKS = 2,   /* u32 for each block of each record: its CRC-32 */
	SECTION_TENSORS = 3,  /* optional: the table */
	SECTION_METADATA = 4, /* optional */
	SECTION_COUNT
};

/* u64 tensors, u64 dimensions of all of them; then rows, shapes, strides, names */
#define TABLE_HEADER_BYTES 16u
/* u64 record, u32 dtype, u32 dims, u32 name_bytes, u32 zero */
#define TABLE_ROW_BYTES 24u
#define TABLE_ROW_NAME_BYTES_AT 16u

/* i64 step, u64 blob_bytes, u64 attributes; then pairs of lengths, names and values, the blob */
#define METADATA_HEADER_BYTES 24u
/* u32 name_bytes, u32 value_bytes */
#define METADATA_PAIR_BYTES 8u

#endif
