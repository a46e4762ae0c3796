/* SPDX-License-Identifier: Apache-2.0 */
/* Byte layout of a zip as far as torch uses it: signatures, lengths and field offsets, after
 * PKWARE's APPNOTE 6.3. All numbers are little-endian. Only writer.c, parse.c and reader.c need
 * this header. */
#ifndef FORMAT_LAYOUT_H
#define FORMAT_LAYOUT_H

#include <stdbool.h>
#include <stdint.h>

/* Largest file: offsets in the kernel are signed. */
#define FORMAT_MAX_FILE_BYTES ((uint64_t)INT64_MAX)

/*
 * Local header, which precedes each record's name, extra field and data. Numbers are offsets in it.
 */
#define FORMAT_LOCAL_SIGNATURE 0x04034b50u
#define FORMAT_LOCAL_BYTES 30u
#define FORMAT_LOCAL_NEEDED 4u
#define FORMAT_LOCAL_FLAGS 6u
#define FORMAT_LOCAL_METHOD 8u
#define FORMAT_LOCAL_CRC 14u
#define FORMAT_LOCAL_PACKED 18u
#define FORMAT_LOCAL_SIZE 22u
#define FORMAT_LOCAL_NAME 26u  /* length of the name, u16 */
#define FORMAT_LOCAL_EXTRA 28u /* length of the extra field, u16 */

/* Data descriptor, which follows the data if the checksum was not known before it. */
#define FORMAT_DESCRIPTOR_SIGNATURE 0x08074b50u
#define FORMAT_DESCRIPTOR_BYTES 16u
#define ZIP64_DESCRIPTOR_BYTES 24u

static inline uint32_t format_descriptor_bytes(bool zip64)
{
	return zip64 ? ZIP64_DESCRIPTOR_BYTES : FORMAT_DESCRIPTOR_BYTES;
}

/* Entry of the central directory, which precedes its name, extra field and comment. Numbers are
 * offsets in it. */
#define FORMAT_CENTRAL_SIGNATURE 0x02014b50u
#define FORMAT_CENTRAL_BYTES 46u
#define FORMAT_CENTRAL_NEEDED 6u /* version of the format that a reader needs */
#define FORMAT_CENTRAL_FLAGS 8u
#define FORMAT_CENTRAL_METHOD 10u
#define FORMAT_CENTRAL_CRC 16u
#define FORMAT_CENTRAL_PACKED 20u
#define FORMAT_CENTRAL_SIZE 24u
#define FORMAT_CENTRAL_NAME 28u
#define FORMAT_CENTRAL_EXTRA 30u
#define FORMAT_CENTRAL_COMMENT 32u
#define FORMAT_CENTRAL_DISK 34u
#define FORMAT_CENTRAL_ATTRIBUTES 38u /* MS-DOS attributes in the low byte, u32 */
#define FORMAT_CENTRAL_OFFSET 42u

/* Zip64 end record: the numbers of the end record in full width. */
#define ZIP64_END_SIGNATURE 0x06064b50u
#define ZIP64_END_BYTES 56u
#define ZIP64_END_LENGTH 4u /* length of what follows this field, u64 */
#define ZIP64_END_LENGTH_STARTS 12u
#define ZIP64_END_MADE_BY 12u
#define ZIP64_END_NEEDED 14u
#define ZIP64_END_DISK 16u
#define ZIP64_END_DIRECTORY_DISK 20u
#define ZIP64_END_DISK_COUNT 24u
#define ZIP64_END_COUNT 32u
#define ZIP64_END_SIZE 40u
#define ZIP64_END_OFFSET 48u

/* Zip64 end locator, which directly precedes the end record and holds the offset of the zip64 end
 * record. */
#define ZIP64_LOCATOR_SIGNATURE 0x07064b50u
#define ZIP64_LOCATOR_BYTES 20u
#define ZIP64_LOCATOR_DISK 4u
#define ZIP64_LOCATOR_OFFSET 8u
#define ZIP64_LOCATOR_DISKS 16u

/* End record: the last bytes of the file, except for a comment of at most 64 KiB. */
#define FORMAT_END_SIGNATURE 0x06054b50u
#define FORMAT_END_BYTES 22u
#define FORMAT_END_DISK 4u
#define FORMAT_END_DIRECTORY_DISK 6u
#define FORMAT_END_DISK_COUNT 8u
#define FORMAT_END_COUNT 10u
#define FORMAT_END_SIZE 12u
#define FORMAT_END_OFFSET 16u
#define FORMAT_END_COMMENT 20u

/* Fields inside extra fields: u16 id, u16 length, then that many bytes. */
#define FORMAT_FIELD_HEAD_BYTES 4u
#define ZIP64_FIELD_ID 0x0001u
#define FORMAT_PADDING_FIELD_ID 0x4246u /* "FB", torch's padding, filled with 'Z' */
#define FORMAT_PADDING_FIELD_BYTES 4u   /* size without the padding */
#define ZIP64_LOCAL_FIELD_BYTES 20u     /* head and both sizes */

#define FORMAT_ATTRIBUTE_FOLDER 0x10u

#define FORMAT_FLAG_ENCRYPTED 0x0001u
#define FORMAT_FLAG_DESCRIPTOR 0x0008u
#define FORMAT_FLAG_PATCH 0x0020u
#define FORMAT_FLAG_STRONG 0x0040u
#define FORMAT_FLAG_UTF8 0x0800u
#define FORMAT_FLAG_MASKED 0x2000u
#define FORMAT_METHOD_STORED 0u

/* Versions of the format, as the fields hold them. */
#define FORMAT_VERSION_ZIP64 45u
#define FORMAT_MADE_BY_UNIX_30 0x031eu /* value that torch writes to its zip64 end record */

/* Values of an old field whose number is in a zip64 field. */
#define FORMAT_IN_ZIP64_16 0xffffu
#define FORMAT_IN_ZIP64_32 0xffffffffu

#endif
