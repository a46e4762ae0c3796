/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What a generation consists of: manifest.json. Pure: text in, struct out, and back. The text is
 * untrusted.
 */
#ifndef ZIP_MANIFEST_H
#define ZIP_MANIFEST_H

#include "base/base.h"

#define ZIP_MANIFEST_NAME "manifest.json"
#define ZIP_MANIFEST_FORMAT "ioshape-generation"
#define ZIP_MANIFEST_VERSION BASE_FORMAT(1u)
/* For a part that is stored for several ranks: versions before 0.2 refuse it. */
#define ZIP_MANIFEST_REPEATS_VERSION BASE_FORMAT(2u)

#define ZIP_MAX_RANKS 1048576u
/* With what it becomes in memory, it takes less than 256 MiB. */
#define ZIP_MAX_MANIFEST_BYTES (112 * MIB)
/* All files of a generation together: sums of sizes do not overflow. */
#define ZIP_MAX_GENERATION_BYTES (UINT64_C(1) << 60)
#define ZIP_ATTEMPT_BYTES 40u
#define ZIP_MAX_FILE_NAME_BYTES 255u
#define ZIP_MAX_SERIAL ((uint64_t)INT64_MAX)

struct zip_manifest_file {
	char *name; /* in the generation's directory: no '/', not "." or ".." */
	uint64_t bytes;
	uint32_t crc32; /* of the whole file */
	bool bundle;    /* a zip of parts; otherwise it is the part of one rank */
};

struct zip_manifest_part { /* parts[i] is that of rank i */
	uint32_t file;     /* position in files */
	uint32_t crc32;
	uint64_t offset; /* of its first byte in the file */
	uint64_t bytes;
	/* Its content is that of the part of `same`, a lower rank, which is stored in the same
	 * place, or on another node. */
	bool repeats;
	uint32_t same;
	uint32_t holder; /* the lowest rank whose part is stored in this place; filled in */
};

/* Decoded, it owns all that it points to: zip_manifest_free(). */
struct zip_manifest {
	uint64_t step;
	int64_t saved; /* seconds since 1970 */
	/* Of two saves into a directory the later one has the larger number. Version 0.1 wrote
	 * none: decoded, it is the time in milliseconds, as it would be with nothing before it. */
	uint64_t serial;
	uint32_t mode;                   /* enum ioshape_mode: each, node or rank0 */
	char attempt[ZIP_ATTEMPT_BYTES]; /* hexadecimal digits and '-': which attempt at this step
					    it was */
	uint32_t rank_count;
	struct zip_manifest_part *parts;
	uint32_t file_count;
	struct zip_manifest_file *files;
};

/*
 * Appends the text: JSON, indented so that a person can read it, a line per file and per part, with
 * a checksum of its own ("crc32" as the last member, over all bytes before its line).
 */
int zip_manifest_encode(struct base_buffer *out, const struct zip_manifest *manifest);

/*
 * Every count, name, offset and length is checked: parts inside their files, not empty, not
 * overlapping unless they are equal, each rank once, names unique. `path` is for messages.
 * IOSHAPE_E_DAMAGED, IOSHAPE_E_LIMIT, -ENOMEM; IOSHAPE_E_FORMAT if it is no manifest; -EOPNOTSUPP
 * if another version of the library wrote it.
 */
int zip_manifest_decode(struct zip_manifest *manifest, const char *text, size_t bytes,
			const char *path, struct base_error *error);
void zip_manifest_free(struct zip_manifest *manifest);

/*
 * The serial number in the first bytes of a manifest, ZIP_MANIFEST_HEAD_BYTES or all of them.
 * Nothing vouches for them: to know in which order manifests are worth reading. UINT64_MAX if it
 * is not there.
 */
#define ZIP_MANIFEST_HEAD_BYTES 1024
uint64_t zip_manifest_peek_serial(const char *text, size_t bytes);

/* "rank-00007.pt": at least five digits. */
#define ZIP_PART_NAME_BYTES 32
void zip_part_name(char into[ZIP_PART_NAME_BYTES], uint32_t rank);

#endif
