/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The byte layout of a zip as far as torch uses it: signatures, lengths and field offsets, after
 * PKWARE's APPNOTE 6.3. All numbers are little-endian. Only plan.c, encode.c, end.c and parse.c
 * need it.
 */
#ifndef ZIP_LAYOUT_H
#define ZIP_LAYOUT_H

#include <stdbool.h>
#include <stdint.h>

/* Offsets are signed in the kernel: no file is larger. */
#define ZIP_MAX_FILE_BYTES ((uint64_t)INT64_MAX)

/* Local header: before each record's name, extra field and data. */
#define ZIP_LOCAL_SIGNATURE 0x04034b50u
#define ZIP_LOCAL_BYTES 30u
#define ZIP_LOCAL_NEEDED 4u
#define ZIP_LOCAL_FLAGS 6u
#define ZIP_LOCAL_METHOD 8u
#define ZIP_LOCAL_CRC 14u
#define ZIP_LOCAL_PACKED 18u
#define ZIP_LOCAL_SIZE 22u
#define ZIP_LOCAL_NAME 26u  /* length of the name, u16 */
#define ZIP_LOCAL_EXTRA 28u /* length of the extra field, u16 */

/* Data descriptor: behind the data, because the checksum was not known before it. */
#define ZIP_DESCRIPTOR_SIGNATURE 0x08074b50u
#define ZIP_DESCRIPTOR_BYTES 16u
#define ZIP64_DESCRIPTOR_BYTES 24u

static inline uint32_t zip_descriptor_bytes(bool zip64)
{
	return zip64 ? ZIP64_DESCRIPTOR_BYTES : ZIP_DESCRIPTOR_BYTES;
}

/* An entry of the central directory, before its name, extra field and comment. */
#define ZIP_CENTRAL_SIGNATURE 0x02014b50u
#define ZIP_CENTRAL_BYTES 46u
#define ZIP_CENTRAL_NEEDED 6u /* version of the format needed to read it */
#define ZIP_CENTRAL_FLAGS 8u
#define ZIP_CENTRAL_METHOD 10u
#define ZIP_CENTRAL_CRC 16u
#define ZIP_CENTRAL_PACKED 20u
#define ZIP_CENTRAL_SIZE 24u
#define ZIP_CENTRAL_NAME 28u
#define ZIP_CENTRAL_EXTRA 30u
#define ZIP_CENTRAL_COMMENT 32u
#define ZIP_CENTRAL_DISK 34u
#define ZIP_CENTRAL_ATTRIBUTES 38u /* MS-DOS attributes in the lower byte, u32 */
#define ZIP_CENTRAL_OFFSET 42u

/* Zip64 end record: the end record's numbers in full width. */
#define ZIP64_END_SIGNATURE 0x06064b50u
#define ZIP64_END_BYTES 56u
#define ZIP64_END_LENGTH 4u /* of what follows this field, u64 */
#define ZIP64_END_LENGTH_STARTS 12u
#define ZIP64_END_MADE_BY 12u
#define ZIP64_END_NEEDED 14u
#define ZIP64_END_DISK 16u
#define ZIP64_END_DIRECTORY_DISK 20u
#define ZIP64_END_DISK_COUNT 24u
#define ZIP64_END_COUNT 32u
#define ZIP64_END_SIZE 40u
#define ZIP64_END_OFFSET 48u

/* Zip64 end locator: right before the end record, says where the zip64 end record is. */
#define ZIP64_LOCATOR_SIGNATURE 0x07064b50u
#define ZIP64_LOCATOR_BYTES 20u
#define ZIP64_LOCATOR_DISK 4u
#define ZIP64_LOCATOR_OFFSET 8u
#define ZIP64_LOCATOR_DISKS 16u

/* End record: the last bytes of the file but for a comment of at most 64 KiB. */
#define ZIP_END_SIGNATURE 0x06054b50u
#define ZIP_END_BYTES 22u
#define ZIP_END_DISK 4u
#define ZIP_END_DIRECTORY_DISK 6u
#define ZIP_END_DISK_COUNT 8u
#define ZIP_END_COUNT 10u
#define ZIP_END_SIZE 12u
#define ZIP_END_OFFSET 16u
#define ZIP_END_COMMENT 20u

/* Fields inside extra fields: u16 id, u16 length, then that many bytes. */
#define ZIP_FIELD_HEAD_BYTES 4u
#define ZIP64_FIELD_ID 0x0001u
#define ZIP_PADDING_FIELD_ID 0x4246u /* "FB", torch's padding, filled with 'Z' */
#define ZIP_PADDING_FIELD_BYTES 4u   /* without the padding */
#define ZIP64_LOCAL_FIELD_BYTES 20u  /* head and both sizes */

#define ZIP_ATTRIBUTE_FOLDER 0x10u

#define ZIP_FLAG_ENCRYPTED 0x0001u
#define ZIP_FLAG_DESCRIPTOR 0x0008u
#define ZIP_FLAG_PATCH 0x0020u
#define ZIP_FLAG_STRONG 0x0040u
#define ZIP_FLAG_UTF8 0x0800u
#define ZIP_FLAG_MASKED 0x2000u
#define ZIP_METHOD_STORED 0u

/* Versions of the format, as in the fields. */
#define ZIP_VERSION_ZIP64 45u
#define ZIP_MADE_BY_UNIX_30 0x031eu /* what torch says in its zip64 end record */

/* What an old field holds when the number stands in a zip64 field. */
#define ZIP_IN_ZIP64_16 0xffffu
#define ZIP_IN_ZIP64_32 0xffffffffu

#endif
