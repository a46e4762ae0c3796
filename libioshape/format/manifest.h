/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What a generation consists of: manifest.json. Pure: text in, struct out, and back. The text is
 * untrusted.
 */
#ifndef FORMAT_MANIFEST_H
#define FORMAT_MANIFEST_H

#include "base/base.h"

#define FORMAT_MANIFEST_NAME "manifest.json"
#define FORMAT_MANIFEST_FORMAT "ioshape-generation"
#define FORMAT_MANIFEST_VERSION BASE_FORMAT(1u)
/* For a part that is stored for several ranks: versions before 0.2 refuse it. */
#define FORMAT_MANIFEST_REPEATS_VERSION BASE_FORMAT(2u)

#define FORMAT_MAX_RANKS 1048576u
/* With what it becomes in memory, it takes less than 256 MiB. */
#define FORMAT_MAX_MANIFEST_BYTES (112 * MIB)
/* All files of a generation together: sums of sizes do not overflow. */
#define FORMAT_MAX_GENERATION_BYTES (UINT64_C(1) << 60)
#define FORMAT_ATTEMPT_BYTES 40u
#define FORMAT_MAX_FILE_NAME_BYTES 255u
#define FORMAT_MAX_SERIAL ((uint64_t)INT64_MAX)

struct format_manifest_file {
	char *name; /* in the generation's directory: no '/', not "." or ".." */
	uint64_t bytes;
	uint32_t crc32; /* of the whole file */
	bool bundle;    /* a zip of parts; otherwise it is the part of one rank */
};

struct format_manifest_part { /* parts[i] is that of rank i */
	uint32_t file;        /* position in files */
	uint32_t crc32;
	uint64_t offset; /* of its first byte in the file */
	uint64_t bytes;
	/* Its content is that of the part of `same`, a lower rank, which is stored in the same
	 * place, or on another node. */
	bool repeats;
	uint32_t same;
	uint32_t holder; /* the lowest rank whose part is stored in this place; filled in */
};

/* Decoded, it owns all that it points to: format_manifest_free(). */
struct format_manifest {
	uint64_t step;
	int64_t saved; /* seconds since 1970 */
	/* Of two saves into a directory the later one has the larger number. Version 0.1 wrote
	 * none: decoded, it is the time in milliseconds, as it would be with nothing before it. */
	uint64_t serial;
	uint32_t mode;                      /* enum ioshape_mode: each, node or rank0 */
	char attempt[FORMAT_ATTEMPT_BYTES]; /* hexadecimal digits and '-': which attempt at this
					    step it was */
	uint32_t rank_count;
	struct format_manifest_part *parts;
	uint32_t file_count;
	struct format_manifest_file *files;
};

/*
 * Appends the text: JSON, indented so that a person can read it, a line per file and per part, with
 * a checksum of its own ("crc32" as the last member, over all bytes before its line).
 */
int format_manifest_encode(struct base_buffer *out, const struct format_manifest *manifest);

/*
 * Every count, name, offset and length is checked: parts inside their files, not empty, not
 * overlapping unless they are equal, each rank once, names unique. `path` is for messages.
 * IOSHAPE_E_DAMAGED, IOSHAPE_E_LIMIT, -ENOMEM; IOSHAPE_E_FORMAT if it is no manifest; -EOPNOTSUPP
 * if another version of the library wrote it.
 */
int format_manifest_decode(struct format_manifest *manifest, const char *text, size_t bytes,
			   const char *path, struct base_error *error);
void format_manifest_free(struct format_manifest *manifest);

/*
 * The serial number in the first bytes of a manifest, FORMAT_MANIFEST_HEAD_BYTES or all of them.
 * Nothing vouches for them: to know in which order manifests are worth reading. UINT64_MAX if it
 * is not there.
 */
#define FORMAT_MANIFEST_HEAD_BYTES 1024
uint64_t format_manifest_peek_serial(const char *text, size_t bytes);

/* "rank-00007.pt": at least five digits. */
#define FORMAT_PART_NAME_BYTES 32
void format_part_name(char into[FORMAT_PART_NAME_BYTES], uint32_t rank);

#endif
