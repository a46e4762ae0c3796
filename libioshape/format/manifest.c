/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Encodes and decodes the manifest of a group's checkpoint: JSON in one layout, literal for
 * literal. Decoding allocates only the result. Pure; the text is untrusted, and fuzzed
 * (tests/c/fuzz/fuzz_manifest.c).
 *
 * No JSON library reads it, because Debian 12 has no yyjson, and jansson builds a tree first. For a
 * manifest of a million ranks (96 MB) jansson takes five times as long as this parser with all
 * checks, and 800 MiB instead of 26.
 */
#define _GNU_SOURCE
#include "format/manifest.h"
#include "format/format.h"

#include <errno.h>
#include <inttypes.h>
#include <ioshape/group.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* ---- Consistency ----------------------------------------------------------------------------- */

/* A manifest is checked before it is written and after it is read. */

/* Checks the name of a file in the checkpoint's directory. Returns NULL if it is valid, otherwise
 * the problem. */
static const char *name_problem(const char *name)
{
	size_t bytes =
		strspn(name, "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._-");

	if (!bytes || bytes > FORMAT_MAX_FILE_NAME_BYTES || name[bytes])
		return "the name of a file is empty, too long or has other characters than "
		       "letters, digits, '.', '_' and '-'";
	if (!strcmp(name, ".") || !strcmp(name, "..") || !strcmp(name, FORMAT_MANIFEST_NAME))
		return "a file is not in the checkpoint's directory";
	return NULL;
}

static bool is_too_large(const struct format_manifest *manifest)
{
	uint64_t left = FORMAT_MAX_CHECKPOINT_BYTES;

	for (uint32_t i = 0; i < manifest->file_count; i++) {
		if (manifest->files[i].bytes > left)
			return true;
		left -= manifest->files[i].bytes;
	}
	return false;
}

static const char *attempt_problem(const char *attempt)
{
	return *attempt && !attempt[strspn(attempt, "0123456789abcdefABCDEF-")] ?
		       NULL :
		       "the attempt is not hexadecimal";
}

/* Checks a shard against its file. Returns NULL if it is valid, otherwise the problem. */
static const char *shard_problem(const struct format_manifest *manifest,
				 const struct format_manifest_shard *shard)
{
	const struct format_manifest_file *file;

	if (shard->file >= manifest->file_count)
		return "a shard is in a file that is not listed";
	/* Also because a reader takes 0 bytes for the whole file. */
	if (!shard->bytes)
		return "a shard is empty";
	file = &manifest->files[shard->file];
	if (shard->offset > file->bytes || shard->bytes > file->bytes - shard->offset)
		return "a shard extends past the end of its file";
	if (!file->bundle &&
	    (shard->offset || shard->bytes != file->bytes || shard->crc32 != file->crc32))
		return "a file with one shard differs from that shard";
	return NULL;
}

/* Checks a shard that equals another one. Returns NULL if it is valid, otherwise the problem. */
static const char *repeat_problem(const struct format_manifest *manifest, uint32_t rank)
{
	const struct format_manifest_shard *shard = &manifest->shards[rank], *same;

	if (!shard->repeats)
		return NULL;
	if (shard->same >= rank || manifest->shards[shard->same].repeats)
		return "a shard does not repeat an original shard of a lower rank";
	same = &manifest->shards[shard->same];
	return same->bytes == shard->bytes && same->crc32 == shard->crc32 ?
		       NULL :
		       "a shard differs from the shard that it repeats";
}

static uint32_t content_of(const struct format_manifest *manifest, uint32_t rank)
{
	return manifest->shards[rank].repeats ? manifest->shards[rank].same : rank;
}

static int compare_positions(const void *left, const void *right, void *user)
{
	const struct format_manifest_shard *shards = user;
	const struct format_manifest_shard *a = &shards[*(const uint32_t *)left];
	const struct format_manifest_shard *b = &shards[*(const uint32_t *)right];

	if (a->file != b->file)
		return a->file < b->file ? -1 : 1;
	if (a->offset != b->offset)
		return a->offset < b->offset ? -1 : 1;
	if (a->bytes != b->bytes)
		return a->bytes < b->bytes ? -1 : 1;
	return a < b ? -1 : a > b;
}

/* Checks that shards in one position are equal and that no others overlap, and sets their holders.
 * All shards must lie inside their files. */
static int check_positions(const struct format_manifest *manifest, const char **problem)
{
	struct format_manifest_shard *before, *shard, *shards = manifest->shards;
	uint32_t *order = reallocarray(NULL, MAX(manifest->rank_count, 1), sizeof(*order));

	if (!order)
		return -ENOMEM;
	for (uint32_t i = 0; i < manifest->rank_count; i++)
		shards[i].holder = order[i] = i;
	qsort_r(order, manifest->rank_count, sizeof(*order), compare_positions, manifest->shards);
	for (uint32_t i = 1; i < manifest->rank_count && !*problem; i++) {
		before = &shards[order[i - 1]];
		shard = &shards[order[i]];
		if (shard->file != before->file || before->offset + before->bytes <= shard->offset)
			continue;
		shard->holder = before->holder;
		if (shard->offset != before->offset || shard->bytes != before->bytes ||
		    content_of(manifest, order[i]) != content_of(manifest, order[i - 1]))
			*problem = "two shards overlap";
	}
	free(order);
	return 0;
}

static int check_names(const struct format_manifest *manifest, const char **problem)
{
	struct format_names *names;
	const char *name;
	int ret;

	ret = format_names_new(&names, manifest->file_count);
	for (uint32_t i = 0; i < manifest->file_count && !ret && !*problem; i++) {
		name = manifest->files[i].name;
		*problem = name_problem(name);
		if (!*problem)
			ret = format_names_add(names, name, strlen(name), i);
	}
	format_names_free(names);
	if (ret != -EEXIST)
		return ret;
	*problem = "two files have the same name";
	return 0;
}

/* Checks a manifest and sets the holders of its shards. Sets *problem if it is not consistent.
 * Returns 0 or -ENOMEM. */
static int check_manifest(const struct format_manifest *manifest, const char **problem)
{
	int ret;

	*problem = attempt_problem(manifest->attempt);
	if (!*problem && (!manifest->rank_count || !manifest->file_count))
		*problem = "it has no files, or no shards";
	if (!*problem && manifest->serial > FORMAT_MAX_SERIAL)
		*problem = "the serial number is too large";
	if (!*problem && is_too_large(manifest))
		*problem = "its files are larger than any filesystem";
	if (*problem)
		return 0;
	ret = check_names(manifest, problem);
	for (uint32_t i = 0; i < manifest->rank_count && !ret && !*problem; i++) {
		*problem = shard_problem(manifest, &manifest->shards[i]);
		if (!*problem)
			*problem = repeat_problem(manifest, i);
	}
	return ret || *problem ? ret : check_positions(manifest, problem);
}

/* ---- Text ------------------------------------------------------------------------------------ */

/* Start of every manifest, whatever its version, and the last line before the final bracket. */
#define HEAD "{\n  \"format\": \"" FORMAT_MANIFEST_FORMAT "\",\n  \"version\": "
#define TAIL "  \"crc32\": \"%08" PRIx32 "\"\n}\n"
#define TAIL_BYTES (sizeof("  \"crc32\": \"01234567\"\n}\n") - 1)

#define CRC_BYTES 9 /* digits, with the final 0 */

static const char *const mode_words[] = {
	[IOSHAPE_MODE_EACH] = "each",
	[IOSHAPE_MODE_NODE] = "node",
	[IOSHAPE_MODE_RANK0] = "rank0",
};

void format_shard_name(char into[FORMAT_SHARD_NAME_BYTES], uint32_t rank)
{
	snprintf(into, FORMAT_SHARD_NAME_BYTES, "rank-%05" PRIu32 ".pt", rank);
}

void format_manifest_free(struct format_manifest *manifest)
{
	for (uint32_t i = 0; i < manifest->file_count; i++)
		free(manifest->files[i].name);
	free(manifest->files);
	free(manifest->shards);
	memset(manifest, 0, sizeof(*manifest));
}

/* ---- Encoding -------------------------------------------------------------------------------- */

static int put_files(struct base_buffer *out, const struct format_manifest *manifest)
{
	int ret = format_json_put(out, "  \"files\": [");

	for (uint32_t i = 0; i < manifest->file_count && !ret; i++) {
		const struct format_manifest_file *file = &manifest->files[i];

		ret = format_json_put(out, "%s\n    {\"name\": ", i ? "," : "");
		if (!ret)
			ret = format_json_put_string(out, file->name);
		if (!ret)
			ret = format_json_put(out,
					      ", \"bytes\": %" PRIu64 ", \"crc32\": \"%08" PRIx32
					      "\", \"bundle\": %s}",
					      file->bytes, file->crc32,
					      file->bundle ? "true" : "false");
	}
	return ret ? ret : format_json_put(out, "\n  ],\n");
}

static int put_shards(struct base_buffer *out, const struct format_manifest *manifest)
{
	int ret = format_json_put(out, "  \"parts\": [");

	for (uint32_t i = 0; i < manifest->rank_count && !ret; i++) {
		const struct format_manifest_shard *shard = &manifest->shards[i];

		ret = format_json_put(out,
				      "%s\n    {\"rank\": %" PRIu32 ", \"file\": %" PRIu32
				      ", \"offset\": %" PRIu64 ", \"bytes\": %" PRIu64
				      ", \"crc32\": \"%08" PRIx32 "\"",
				      i ? "," : "", i, shard->file, shard->offset, shard->bytes,
				      shard->crc32);
		if (!ret && shard->repeats)
			ret = format_json_put(out, ", \"same\": %" PRIu32, shard->same);
		if (!ret)
			ret = format_json_put(out, "}");
	}
	return ret ? ret : format_json_put(out, "\n  ],\n");
}

/* Returns the version of the manifest. Without equal shards, earlier versions of the library can
 * read it. */
static unsigned version_of(const struct format_manifest *manifest)
{
	for (uint32_t i = 0; i < manifest->rank_count; i++)
		if (manifest->shards[i].repeats)
			return FORMAT_MANIFEST_REPEATS_VERSION;
	return FORMAT_MANIFEST_VERSION;
}

int format_manifest_encode(struct base_buffer *out, const struct format_manifest *manifest)
{
	const size_t before = out->bytes;
	const char *problem = NULL;
	int ret;

	if (manifest->mode < IOSHAPE_MODE_EACH || manifest->mode > IOSHAPE_MODE_RANK0)
		return -EINVAL;
	/* The library must not write a manifest that it could not read again. */
	if (manifest->rank_count > FORMAT_MAX_RANKS || manifest->file_count > FORMAT_MAX_RANKS)
		return IOSHAPE_E_LIMIT;
	ret = check_manifest(manifest, &problem);
	if (ret || problem)
		return ret ? ret : -EINVAL;
	ret = format_json_put(out,
			      HEAD "%u,\n  \"step\": %" PRIu64 ",\n  \"saved\": %" PRId64 ",\n",
			      version_of(manifest), manifest->step, manifest->saved);
	if (!ret)
		ret = format_json_put(out, "  \"serial\": %" PRIu64 ",\n", manifest->serial);
	if (!ret)
		ret = format_json_put(out, "  \"mode\": \"%s\",\n  \"attempt\": \"%s\",\n",
				      mode_words[manifest->mode], manifest->attempt);
	if (!ret)
		ret = put_files(out, manifest);
	if (!ret)
		ret = put_shards(out, manifest);
	if (!ret)
		ret = format_json_put(out, TAIL,
				      base_crc32(0, out->data + before, out->bytes - before));
	if (!ret && out->bytes - before > FORMAT_MAX_MANIFEST_BYTES)
		ret = IOSHAPE_E_LIMIT;
	if (ret)
		out->bytes = before;
	return ret;
}

/* ---- Parsing --------------------------------------------------------------------------------- */

struct text {
	const char *at, *end;
	const char *problem; /* after a failure: what is wrong at `at` */
};

/* The following functions return 0 or the code of fail(). After a failure nothing more can be
 * read. Those that read a value first expect the literal `before` it. */

static int fail(struct text *text, int code, const char *problem)
{
	if (!text->problem)
		text->problem = problem;
	return code;
}

static int malformed(struct text *text, const char *problem)
{
	return fail(text, IOSHAPE_E_DAMAGED, problem);
}

/* Returns the next character; 0 at the end. A 0 within the text is never valid either. */
static char peek(const struct text *text)
{
	return text->at < text->end ? *text->at : '\0';
}

static bool comes(const struct text *text, const char *literal)
{
	const size_t bytes = strlen(literal);

	return (size_t)(text->end - text->at) >= bytes && !memcmp(text->at, literal, bytes);
}

static int expect(struct text *text, const char *literal)
{
	if (!comes(text, literal))
		return malformed(text, "it is not laid out as ioshape writes it");
	text->at += strlen(literal);
	return 0;
}

static bool is_digit(char character)
{
	return character >= '0' && character <= '9';
}

/* Reads a whole number without a sign. */
static int read_u64(struct text *text, const char *before, uint64_t *value)
{
	int ret = expect(text, before);

	*value = 0;
	if (ret)
		return ret;
	if (!is_digit(peek(text)))
		return malformed(text, "a whole number was expected");
	if (*text->at == '0' && text->end - text->at > 1 && is_digit(text->at[1]))
		return malformed(text, "a number begins with 0");
	for (; is_digit(peek(text)); text->at++)
		if (__builtin_mul_overflow(*value, 10, value) ||
		    __builtin_add_overflow(*value, (uint64_t)(*text->at - '0'), value))
			return malformed(text, "a number does not fit into 64 bits");
	return 0;
}

static int read_i64(struct text *text, const char *before, int64_t *value)
{
	uint64_t digits = 0;
	bool negative;
	int ret = expect(text, before);

	if (ret)
		return ret;
	negative = comes(text, "-");
	ret = read_u64(text, negative ? "-" : "", &digits);
	if (!ret && digits > (uint64_t)INT64_MAX + negative)
		ret = malformed(text, "a number does not fit into 64 bits");
	*value = (int64_t)(negative ? -digits : digits);
	return ret;
}

/* Reads a string without escapes into `into`, in at most `size` bytes with the final 0, and its
 * closing quote. */
static int read_word(struct text *text, const char *before, char *into, size_t size)
{
	size_t bytes = 0;
	int ret = expect(text, before);

	for (; !ret && peek(text) != '"'; text->at++) {
		if ((unsigned char)peek(text) < 0x20)
			return malformed(text,
					 "a string is not terminated, or has a control character");
		if (bytes + 1 == size)
			return fail(text, IOSHAPE_E_LIMIT, "a string is too long");
		into[bytes++] = *text->at;
	}
	into[bytes] = '\0';
	return ret ? ret : expect(text, "\"");
}

static int read_crc32(struct text *text, const char *before, uint32_t *crc)
{
	char digits[CRC_BYTES];
	int ret = read_word(text, before, digits, sizeof(digits));

	if (ret)
		return ret;
	if (strlen(digits) != CRC_BYTES - 1 || digits[strspn(digits, "0123456789abcdef")])
		return malformed(text, "a checksum is not eight hexadecimal digits");
	*crc = (uint32_t)strtoul(digits, NULL, 16);
	return 0;
}

/* ---- Files and shards ------------------------------------------------------------------------ */

/* State of the decoder. */
struct decoding {
	struct format_manifest manifest;
	uint64_t version;
	struct base_buffer files, shards; /* memory of manifest.files and manifest.parts */
};

#define LIST_END "\n  ],\n"

static int read_file(struct decoding *decoding, struct text *text)
{
	struct format_manifest *manifest = &decoding->manifest;
	struct format_manifest_file file = { .name = NULL };
	char name[FORMAT_MAX_FILE_NAME_BYTES + 1];
	void *files;
	int ret;

	if (manifest->file_count == FORMAT_MAX_RANKS)
		return fail(text, IOSHAPE_E_LIMIT, "it has too many files");
	ret = expect(text, manifest->file_count ? "," : "");
	if (!ret)
		ret = read_word(text, "\n    {\"name\": \"", name, sizeof(name));
	if (!ret)
		ret = read_u64(text, ", \"bytes\": ", &file.bytes);
	if (!ret)
		ret = read_crc32(text, ", \"crc32\": \"", &file.crc32);
	if (!ret) {
		file.bundle = comes(text, ", \"bundle\": true}");
		ret = expect(text, file.bundle ? ", \"bundle\": true}" : ", \"bundle\": false}");
	}
	if (ret)
		return ret;
	file.name = strdup(name);
	if (!file.name || base_buffer_append(&decoding->files, &file, sizeof(file))) {
		free(file.name);
		return -ENOMEM;
	}
	files = decoding->files.data;
	manifest->files = files;
	manifest->file_count++;
	return 0;
}

static int read_shard(struct decoding *decoding, struct text *text)
{
	struct format_manifest *manifest = &decoding->manifest;
	struct format_manifest_shard shard = { .file = 0 };
	uint64_t rank, file, same;
	void *shards;
	int ret;

	if (manifest->rank_count == FORMAT_MAX_RANKS)
		return fail(text, IOSHAPE_E_LIMIT, "it has too many ranks");
	ret = expect(text, manifest->rank_count ? "," : "");
	if (!ret)
		ret = read_u64(text, "\n    {\"rank\": ", &rank);
	/* This order ensures that each rank occurs exactly once. */
	if (!ret && rank != manifest->rank_count)
		ret = malformed(text, "a rank is missing, duplicate or out of order");
	if (!ret)
		ret = read_u64(text, ", \"file\": ", &file);
	if (!ret)
		ret = read_u64(text, ", \"offset\": ", &shard.offset);
	if (!ret)
		ret = read_u64(text, ", \"bytes\": ", &shard.bytes);
	if (!ret)
		ret = read_crc32(text, ", \"crc32\": \"", &shard.crc32);
	if (ret)
		return ret;
	/* check_manifest() compares it with the number of files, when all files are read. */
	shard.file = (uint32_t)MIN(file, UINT32_MAX);
	shard.repeats = comes(text, ", \"same\": ");
	if (shard.repeats) {
		ret = read_u64(text, ", \"same\": ", &same);
		shard.same = (uint32_t)MIN(same, UINT32_MAX);
	}
	if (!ret)
		ret = expect(text, "}");
	if (ret)
		return ret;
	if (base_buffer_append(&decoding->shards, &shard, sizeof(shard)))
		return -ENOMEM;
	shards = decoding->shards.data;
	manifest->shards = shards;
	manifest->rank_count++;
	return 0;
}

/* ---- The whole manifest ---------------------------------------------------------------------- */

/* Sets the serial number of a manifest of version 0.1, which has none, from its time. */
static void fill_serial(struct format_manifest *manifest)
{
	if (!manifest->serial && manifest->saved > 0)
		manifest->serial = MIN((uint64_t)manifest->saved, FORMAT_MAX_SERIAL / 1000) * 1000;
}

/* Reads the numbers between the version and the mode. */
static int read_numbers(struct format_manifest *manifest, struct text *text)
{
	int ret = read_u64(text, ",\n  \"step\": ", &manifest->step);

	if (!ret)
		ret = read_i64(text, ",\n  \"saved\": ", &manifest->saved);
	/* Version 0.1 did not write it. */
	if (!ret && comes(text, ",\n  \"serial\": "))
		ret = read_u64(text, ",\n  \"serial\": ", &manifest->serial);
	fill_serial(manifest);
	return ret;
}

static int read_mode(struct format_manifest *manifest, struct text *text)
{
	char word[16];
	int ret = read_word(text, ",\n  \"mode\": \"", word, sizeof(word));

	for (uint32_t i = 0; i < ARRAY_LENGTH(mode_words) && !ret; i++)
		if (mode_words[i] && !strcmp(word, mode_words[i]))
			manifest->mode = i;
	if (!ret && !manifest->mode)
		ret = malformed(text, "the mode is unknown");
	return ret;
}

/* Reads everything behind the version, up to the checksum, which check_frame() has verified. */
static int read_rest(struct decoding *decoding, struct text *text)
{
	struct format_manifest *manifest = &decoding->manifest;
	int ret = read_numbers(manifest, text);

	if (!ret)
		ret = read_mode(manifest, text);
	if (!ret)
		ret = read_word(text, ",\n  \"attempt\": \"", manifest->attempt,
				sizeof(manifest->attempt));
	if (!ret)
		ret = expect(text, ",\n  \"files\": [");
	while (!ret && !comes(text, LIST_END))
		ret = read_file(decoding, text);
	if (!ret)
		ret = expect(text, LIST_END "  \"parts\": [");
	while (!ret && !comes(text, LIST_END))
		ret = read_shard(decoding, text);
	if (!ret)
		ret = expect(text, LIST_END);
	if (!ret && text->end - text->at != TAIL_BYTES)
		ret = malformed(text, "it has extra text at its end");
	return ret;
}

static int decode(struct decoding *decoding, struct text *text)
{
	int ret = read_u64(text, HEAD, &decoding->version);

	if (!ret && decoding->version != FORMAT_MANIFEST_VERSION &&
	    decoding->version != FORMAT_MANIFEST_REPEATS_VERSION)
		ret = fail(text, -EOPNOTSUPP, "its version is not supported");
	if (!ret)
		ret = read_rest(decoding, text);
	if (!ret && decoding->version != version_of(&decoding->manifest))
		text->problem = "its version does not match its contents";
	else if (!ret)
		ret = check_manifest(&decoding->manifest, &text->problem);
	return !ret && text->problem ? IOSHAPE_E_DAMAGED : ret;
}

/* Checks that the text is a manifest and complete, before any number in it is used. */
static int check_frame(const char *text, size_t bytes, const char *path, struct base_error *error)
{
	const size_t head_bytes = sizeof(HEAD) - 1;
	char tail[TAIL_BYTES + 1];

	if (bytes && memcmp(text, HEAD, MIN(bytes, head_bytes)) != 0)
		return base_fail_reason_with(error, IOSHAPE_E_FORMAT,
					     "give the directory of a checkpoint",
					     "\"%s\" is not the manifest of a checkpoint", path);
	if (bytes >= head_bytes + TAIL_BYTES) {
		snprintf(tail, sizeof(tail), TAIL, base_crc32(0, text, bytes - TAIL_BYTES));
		if (!memcmp(text + bytes - TAIL_BYTES, tail, TAIL_BYTES))
			return 0;
	}
	return base_fail_reason_with(
		error, IOSHAPE_E_DAMAGED, "use another checkpoint",
		"\"%s\" is damaged or truncated: its checksum does not match its %zu bytes", path,
		bytes);
}

static int tell(const struct decoding *decoding, size_t bytes, const struct text *text, int code,
		const char *path, struct base_error *error)
{
	if (code == -ENOMEM)
		return base_no_memory(error, "the manifest of a checkpoint", bytes);
	if (code == -EOPNOTSUPP)
		return base_fail_reason_with(
			error, code, "use that version",
			"\"%s\" was written by another version of this library "
			"(manifest version %" PRIu64 ", this library reads %u and %u)",
			path, decoding->version, FORMAT_MANIFEST_VERSION,
			FORMAT_MANIFEST_REPEATS_VERSION);
	return base_fail_with(error, code, "use another checkpoint",
			      "\"%s\" is not a valid manifest: %s (at offset %zu)", path,
			      text->problem, bytes - (size_t)(text->end - text->at));
}

int format_manifest_decode(struct format_manifest *manifest, const char *text, size_t bytes,
			   const char *path, struct base_error *error)
{
	struct decoding decoding = { .version = 0 };
	struct text rest;
	int ret;

	memset(manifest, 0, sizeof(*manifest));
	if (bytes > FORMAT_MAX_MANIFEST_BYTES)
		return base_fail_reason(error, IOSHAPE_E_LIMIT,
					"\"%s\" has %s; a manifest has at most %s", path,
					BASE_SIZE(bytes), BASE_SIZE(FORMAT_MAX_MANIFEST_BYTES));
	ret = check_frame(text, bytes, path, error);
	if (ret)
		return ret;
	rest = (struct text){ text, text + bytes, NULL };
	ret = decode(&decoding, &rest);
	if (!ret) {
		*manifest = decoding.manifest;
		return 0;
	}
	format_manifest_free(&decoding.manifest);
	return tell(&decoding, bytes, &rest, ret, path, error);
}

/* ---- The head of a manifest ------------------------------------------------------------------ */

uint64_t format_manifest_peek_serial(const char *text, size_t bytes)
{
	struct text rest = { text, text + bytes, NULL };
	struct format_manifest head = { .serial = 0 };
	uint64_t version;
	int ret = read_u64(&rest, HEAD, &version);

	if (!ret)
		ret = read_numbers(&head, &rest);
	return ret ? UINT64_MAX : head.serial;
}
