/* SPDX-License-Identifier: Apache-2.0 */
/* manifest.json, which lists the files and shards of a group's checkpoint. Pure: converts text to a
 * struct and back. The text is untrusted. */
#ifndef FORMAT_MANIFEST_H
#define FORMAT_MANIFEST_H

#include "base/base.h"

#define FORMAT_MANIFEST_NAME "manifest.json"
#define FORMAT_MANIFEST_FORMAT "ioshape-generation"
#define FORMAT_MANIFEST_VERSION BASE_FORMAT(1u)
/* Version of a manifest with a shard that is stored once for several ranks. Versions before 0.2 of
 * the library refuse it. */
#define FORMAT_MANIFEST_REPEATS_VERSION BASE_FORMAT(2u)

#define FORMAT_MAX_RANKS 1048576u
/* Largest manifest. With its decoded form it takes less than 256 MiB of memory. */
#define FORMAT_MAX_MANIFEST_BYTES (112 * MIB)
/* Largest size of all files of a checkpoint together, so that sums of sizes cannot overflow. */
#define FORMAT_MAX_CHECKPOINT_BYTES (UINT64_C(1) << 60)
#define FORMAT_ATTEMPT_BYTES 40u
#define FORMAT_MAX_FILE_NAME_BYTES 255u
#define FORMAT_MAX_SERIAL ((uint64_t)INT64_MAX)

/* A file of the checkpoint. */
struct format_manifest_file {
	char *name; /* name in the checkpoint's directory: letters, digits, '.', '_' and '-' */
	uint64_t bytes;
	uint32_t crc32; /* CRC-32 of the whole file */
	/* true: a shard file, that is a zip of several shards; false: the shard of one rank */
	bool bundle;
};

/* Shard of a rank: parts[i] is that of rank i. */
struct format_manifest_shard {
	uint32_t file; /* position in `files` */
	uint32_t crc32;
	uint64_t offset; /* offset of the shard in the file */
	uint64_t bytes;
	/* The content equals that of the shard of `same`, a lower rank. That shard is stored in the
	 * same position, or on another node. */
	bool repeats;
	uint32_t same;
	/* lowest rank whose shard is stored in this position; set by the decoder */
	uint32_t holder;
};

/* A manifest. A decoded one owns all that it points to: call format_manifest_free(). */
struct format_manifest {
	uint64_t step;
	int64_t saved; /* time of the save, in seconds since 1970 */
	/* Serial number: of two saves into a directory, the later one has the larger number.
	 * Version 0.1 wrote none. The decoder then uses the time in milliseconds, which is what a
	 * first save would get. */
	uint64_t serial;
	uint32_t mode; /* enum ioshape_mode: each, node or rank0 */
	/* id of the attempt that wrote it: hexadecimal digits and '-' */
	char attempt[FORMAT_ATTEMPT_BYTES];
	uint32_t rank_count;
	struct format_manifest_shard *shards;
	uint32_t file_count;
	struct format_manifest_file *files;
};

/* Appends the text: indented JSON with one line for each file and each shard, so that people can
 * read it. The decoder accepts this layout only. The last member "crc32" is a checksum over all
 * bytes before its line. Returns 0, -ENOMEM, IOSHAPE_E_LIMIT, or -EINVAL if the manifest is not
 * consistent. */
int format_manifest_encode(struct base_buffer *out, const struct format_manifest *manifest);

/*
 * Decodes a manifest and checks every count, name, offset and length. Shards must lie inside their
 * files, must not be empty, and must not overlap unless they are equal. Each rank must occur once,
 * and names must be unique. `path` is for messages. Returns 0, IOSHAPE_E_DAMAGED, IOSHAPE_E_LIMIT,
 * -ENOMEM, IOSHAPE_E_FORMAT if the text is no manifest, or -EOPNOTSUPP if another version of the
 * library wrote it.
 */
int format_manifest_decode(struct format_manifest *manifest, const char *text, size_t bytes,
			   const char *path, struct base_error *error);
void format_manifest_free(struct format_manifest *manifest);

/* Returns the serial number in the first bytes of a manifest: FORMAT_MANIFEST_HEAD_BYTES, or the
 * whole manifest if it is shorter. No checksum covers them, so use the number only to choose which
 * manifest to read first. Returns UINT64_MAX if there is none. */
#define FORMAT_MANIFEST_HEAD_BYTES 1024
uint64_t format_manifest_peek_serial(const char *text, size_t bytes);

/* Writes the name of a rank's shard, such as "rank-00007.pt": with at least five digits. */
#define FORMAT_SHARD_NAME_BYTES 32
void format_shard_name(char into[FORMAT_SHARD_NAME_BYTES], uint32_t rank);

#endif
