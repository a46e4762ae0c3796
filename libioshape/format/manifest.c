/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Encodes and decodes the manifest of a group's checkpoint: JSON of one schema. It is written in
 * one layout and read strictly, front to back. Decoding allocates only the result. Pure; the text
 * is untrusted, and fuzzed (tests/c/fuzz/fuzz_manifest.c).
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
	size_t bytes = strlen(name);

	if (!bytes || bytes > FORMAT_MAX_FILE_NAME_BYTES || !format_utf8_valid(name, bytes))
		return "the name of a file is empty, too long or not UTF-8";
	if (strchr(name, '/') || !strcmp(name, ".") || !strcmp(name, "..") ||
	    !strcmp(name, FORMAT_MANIFEST_NAME))
		return "a file is not in the checkpoint's directory";
	return NULL;
}

static bool is_too_large(const struct format_manifest *manifest)
{
	uint64_t left = FORMAT_MAX_GENERATION_BYTES;

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
static const char *part_problem(const struct format_manifest *manifest,
				const struct format_manifest_part *part)
{
	const struct format_manifest_file *file;

	if (part->file >= manifest->file_count)
		return "a shard is in a file that is not listed";
	/* Also because a reader takes 0 bytes for the whole file. */
	if (!part->bytes)
		return "a shard is empty";
	file = &manifest->files[part->file];
	if (part->offset > file->bytes || part->bytes > file->bytes - part->offset)
		return "a shard extends past the end of its file";
	if (!file->bundle &&
	    (part->offset || part->bytes != file->bytes || part->crc32 != file->crc32))
		return "a file with one shard differs from that shard";
	return NULL;
}

/* Checks a shard that equals another one. Returns NULL if it is valid, otherwise the problem. */
static const char *repeat_problem(const struct format_manifest *manifest, uint32_t rank)
{
	const struct format_manifest_part *part = &manifest->parts[rank], *same;

	if (!part->repeats)
		return NULL;
	if (part->same >= rank || manifest->parts[part->same].repeats)
		return "a shard does not repeat an original shard of a lower rank";
	same = &manifest->parts[part->same];
	return same->bytes == part->bytes && same->crc32 == part->crc32 ?
		       NULL :
		       "a shard differs from the shard that it repeats";
}

static uint32_t content_of(const struct format_manifest *manifest, uint32_t rank)
{
	return manifest->parts[rank].repeats ? manifest->parts[rank].same : rank;
}

static int compare_places(const void *left, const void *right, void *user)
{
	const struct format_manifest_part *parts = user;
	const struct format_manifest_part *a = &parts[*(const uint32_t *)left];
	const struct format_manifest_part *b = &parts[*(const uint32_t *)right];

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
static int check_apart(const struct format_manifest *manifest, const char **problem)
{
	struct format_manifest_part *before, *part, *parts = manifest->parts;
	uint32_t *order = reallocarray(NULL, MAX(manifest->rank_count, 1), sizeof(*order));

	if (!order)
		return -ENOMEM;
	for (uint32_t i = 0; i < manifest->rank_count; i++)
		parts[i].holder = order[i] = i;
	qsort_r(order, manifest->rank_count, sizeof(*order), compare_places, manifest->parts);
	for (uint32_t i = 1; i < manifest->rank_count && !*problem; i++) {
		before = &parts[order[i - 1]];
		part = &parts[order[i]];
		if (part->file != before->file || before->offset + before->bytes <= part->offset)
			continue;
		part->holder = before->holder;
		if (part->offset != before->offset || part->bytes != before->bytes ||
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
		*problem = part_problem(manifest, &manifest->parts[i]);
		if (!*problem)
			*problem = repeat_problem(manifest, i);
	}
	return ret || *problem ? ret : check_apart(manifest, problem);
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

void format_part_name(char into[FORMAT_PART_NAME_BYTES], uint32_t rank)
{
	snprintf(into, FORMAT_PART_NAME_BYTES, "rank-%05" PRIu32 ".pt", rank);
}

void format_manifest_free(struct format_manifest *manifest)
{
	for (uint32_t i = 0; i < manifest->file_count; i++)
		free(manifest->files[i].name);
	free(manifest->files);
	free(manifest->parts);
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

static int put_parts(struct base_buffer *out, const struct format_manifest *manifest)
{
	int ret = format_json_put(out, "  \"parts\": [");

	for (uint32_t i = 0; i < manifest->rank_count && !ret; i++) {
		const struct format_manifest_part *part = &manifest->parts[i];

		ret = format_json_put(out,
				      "%s\n    {\"rank\": %" PRIu32 ", \"file\": %" PRIu32
				      ", \"offset\": %" PRIu64 ", \"bytes\": %" PRIu64
				      ", \"crc32\": \"%08" PRIx32 "\"",
				      i ? "," : "", i, part->file, part->offset, part->bytes,
				      part->crc32);
		if (!ret && part->repeats)
			ret = format_json_put(out, ", \"same\": %" PRIu32, part->same);
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
		if (manifest->parts[i].repeats)
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
		ret = put_parts(out, manifest);
	if (!ret)
		ret = format_json_put(out, TAIL,
				      base_crc32(0, out->data + before, out->bytes - before));
	if (!ret && out->bytes - before > FORMAT_MAX_MANIFEST_BYTES)
		ret = IOSHAPE_E_LIMIT;
	if (ret)
		out->bytes = before;
	return ret;
}

/* ---- JSON ------------------------------------------------------------------------------------ */

#define MOST_NAME_BYTES 64u /* longest name of a member */

struct text {
	const char *at, *end;
	const char *problem; /* after a failure: what is wrong at `at` */
};

/* Each of the following functions reads one value, after optional white space. It returns 0 or the
 * code of fail(). After a failure nothing more can be read. */

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

static void skip_space(struct text *text)
{
	while (text->at < text->end && memchr(" \t\n\r", *text->at, 4))
		text->at++;
}

/* Skips white space and takes the next character if it is this one. Returns whether it was. */
static bool take(struct text *text, char character)
{
	skip_space(text);
	if (peek(text) != character)
		return false;
	text->at++;
	return true;
}

/* Reads an escape after its backslash. Accepts only what format_json_put_string() writes. */
static int read_escape(struct text *text, char *character)
{
	static const char letters[] = "\"\\bfnrt", characters[] = "\"\\\b\f\n\r\t";
	const char *letter = peek(text) ? strchr(letters, peek(text)) : NULL;
	unsigned code = 0;

	if (letter) {
		text->at++;
		*character = characters[letter - letters];
		return 0;
	}
	if (text->end - text->at < 5 || memcmp(text->at, "u00", 3))
		return malformed(text, "an unknown escape");
	for (int i = 3; i < 5; i++) {
		const char digit = text->at[i];

		if (digit >= '0' && digit <= '9')
			code = code * 16 + (unsigned)(digit - '0');
		else if (digit >= 'a' && digit <= 'f')
			code = code * 16 + (unsigned)(digit - 'a') + 10;
		else
			return malformed(text, "an unknown escape");
	}
	if (!code || code >= 0x20)
		return malformed(text, "an unknown escape");
	text->at += 5;
	*character = (char)code;
	return 0;
}

/* Reads a string into `into`, zero-terminated, in at most `room` bytes with the final 0. */
static int read_string(struct text *text, char *into, size_t room)
{
	size_t bytes = 0;
	int ret;

	if (!take(text, '"'))
		return malformed(text, "a string was expected");
	for (; peek(text) != '"'; bytes++) {
		if ((unsigned char)peek(text) < 0x20)
			return malformed(text,
					 "a string is not terminated, or has a control character");
		if (bytes + 1 == room)
			return fail(text, IOSHAPE_E_LIMIT, "a string is too long");
		into[bytes] = *text->at++;
		ret = into[bytes] == '\\' ? read_escape(text, &into[bytes]) : 0;
		if (ret)
			return ret;
	}
	text->at++;
	into[bytes] = '\0';
	return format_utf8_valid(into, bytes) ? 0 : malformed(text, "a string is not UTF-8");
}

static bool is_digit(char character)
{
	return character >= '0' && character <= '9';
}

/* Reads a whole number without a sign. */
static int read_u64(struct text *text, void *into)
{
	uint64_t value = 0;

	skip_space(text);
	if (!is_digit(peek(text)))
		return malformed(text, "a whole number was expected");
	if (*text->at == '0' && text->end - text->at > 1 && is_digit(text->at[1]))
		return malformed(text, "a number begins with 0");
	for (; is_digit(peek(text)); text->at++)
		if (__builtin_mul_overflow(value, 10, &value) ||
		    __builtin_add_overflow(value, (uint64_t)(*text->at - '0'), &value))
			return malformed(text, "a number does not fit into 64 bits");
	if (peek(text) && strchr(".eE", peek(text)))
		return malformed(text, "a whole number was expected");
	memcpy(into, &value, sizeof(value));
	return 0;
}

static int read_i64(struct text *text, void *into)
{
	const bool negative = take(text, '-');
	uint64_t digits = 0;
	int64_t value;
	int ret = read_u64(text, &digits);

	if (ret)
		return ret;
	if (digits > (uint64_t)INT64_MAX + negative)
		return malformed(text, "a number does not fit into 64 bits");
	value = (int64_t)(negative ? -digits : digits);
	memcpy(into, &value, sizeof(value));
	return 0;
}

static bool take_word(struct text *text, const char *word)
{
	const size_t bytes = strlen(word);

	skip_space(text);
	if ((size_t)(text->end - text->at) < bytes || memcmp(text->at, word, bytes) != 0)
		return false;
	text->at += bytes;
	return true;
}

static int read_bool(struct text *text, void *into)
{
	bool *value = into;

	*value = take_word(text, "true");
	return *value || take_word(text, "false") ? 0 :
						    malformed(text, "true or false was expected");
}

/* Skips any value, as for a member of a later version. It looks only at strings and brackets. */
static int skip_value(struct text *text, void *into)
{
	const char *begin;
	unsigned depth = 0;
	bool in_string = false;

	(void)into;
	skip_space(text);
	begin = text->at;
	for (; text->at < text->end; text->at++) {
		if (in_string && *text->at == '\\' && text->at + 1 < text->end)
			text->at++;
		else if (*text->at == '"')
			in_string = !in_string;
		else if (in_string)
			continue;
		else if (*text->at == '[' || *text->at == '{')
			depth++;
		else if (!depth && (*text->at == ',' || *text->at == ']' || *text->at == '}'))
			return text->at > begin ? 0 : malformed(text, "a value was expected");
		else if (*text->at == ']' || *text->at == '}')
			depth--;
	}
	return malformed(text, "a value is not terminated");
}

/* Member of an object: `read` reads its value to this offset of the object's struct. */
struct member {
	const char *name;
	int (*read)(struct text *text, void *into);
	size_t offset;
};

static int read_member(struct text *text, const struct member *members, size_t count,
		       unsigned *seen, void *into)
{
	char name[MOST_NAME_BYTES + 1];
	int ret = read_string(text, name, sizeof(name));

	if (!ret && !take(text, ':'))
		ret = malformed(text, "a colon was expected");
	for (size_t i = 0; !ret && i < count; i++) {
		if (strcmp(name, members[i].name) != 0)
			continue;
		if (*seen & 1u << i)
			return malformed(text, "an object has a member twice");
		*seen |= 1u << i;
		return members[i].read(text, (char *)into + members[i].offset);
	}
	return ret ? ret : skip_value(text, NULL);
}

/* Takes a comma or the closing bracket, and sets *more if it was a comma. */
static int go_on(struct text *text, char bracket, bool *more)
{
	*more = take(text, ',');
	return *more || take(text, bracket) ?
		       0 :
		       malformed(text, "a comma or a closing bracket was expected");
}

/* Reads an object. Of the known members, the first `needed` are required. */
static int read_object(struct text *text, const struct member *members, size_t count, size_t needed,
		       void *into)
{
	unsigned seen = 0;
	bool more;
	int ret = 0;

	if (!take(text, '{'))
		return malformed(text, "an object was expected");
	more = !take(text, '}');
	while (!ret && more) {
		ret = read_member(text, members, count, &seen, into);
		if (!ret)
			ret = go_on(text, '}', &more);
	}
	for (size_t i = 0; !ret && i < needed; i++)
		if (!(seen & 1u << i))
			ret = malformed(text, "an object lacks a member");
	return ret;
}

static int read_array(struct text *text, int (*read)(struct text *text, void *into), void *into)
{
	bool more;
	int ret = 0;

	if (!take(text, '['))
		return malformed(text, "an array was expected");
	more = !take(text, ']');
	while (!ret && more) {
		ret = read(text, into);
		if (!ret)
			ret = go_on(text, ']', &more);
	}
	return ret;
}

/* ---- Decoding -------------------------------------------------------------------------------- */

/* State of the decoder. */
struct decoding {
	struct format_manifest manifest;
	uint64_t version;
	struct base_buffer files, parts; /* memory of manifest.files and manifest.parts */
};

/* ---- Values ---------------------------------------------------------------------------------- */

static int read_crc32(struct text *text, void *into)
{
	uint32_t *crc = into;
	char digits[CRC_BYTES];
	int ret = read_string(text, digits, sizeof(digits));

	if (ret)
		return ret;
	if (strlen(digits) != CRC_BYTES - 1 || digits[strspn(digits, "0123456789abcdef")])
		return malformed(text, "a checksum is not eight hexadecimal digits");
	*crc = (uint32_t)strtoul(digits, NULL, 16);
	return 0;
}

static int read_version(struct text *text, void *into)
{
	uint64_t *version = into;
	int ret = read_u64(text, version);

	if (!ret && *version != FORMAT_MANIFEST_VERSION &&
	    *version != FORMAT_MANIFEST_REPEATS_VERSION)
		ret = fail(text, -EOPNOTSUPP, "its version is not supported");
	return ret;
}

static int read_mode(struct text *text, void *into)
{
	uint32_t *mode = into;
	char word[16];
	int ret = read_string(text, word, sizeof(word));

	for (uint32_t i = 0; i < ARRAY_LENGTH(mode_words) && !ret; i++)
		if (mode_words[i] && !strcmp(word, mode_words[i]))
			*mode = i;
	if (!ret && !*mode)
		ret = malformed(text, "the mode is unknown");
	return ret;
}

static int read_attempt(struct text *text, void *into)
{
	return read_string(text, into, sizeof(((struct format_manifest *)into)->attempt));
}

static int read_name(struct text *text, void *into)
{
	char read[FORMAT_MAX_FILE_NAME_BYTES + 1], **name = into;
	int ret = read_string(text, read, sizeof(read));

	if (ret)
		return ret;
	*name = strdup(read);
	return *name ? 0 : -ENOMEM;
}

/* ---- Files and shards ------------------------------------------------------------------------ */

static int read_file(struct text *text, void *user)
{
	static const struct member members[] = {
		{ "name", read_name, offsetof(struct format_manifest_file, name) },
		{ "bytes", read_u64, offsetof(struct format_manifest_file, bytes) },
		{ "crc32", read_crc32, offsetof(struct format_manifest_file, crc32) },
		{ "bundle", read_bool, offsetof(struct format_manifest_file, bundle) },
	};
	struct decoding *decoding = user;
	struct format_manifest *manifest = &decoding->manifest;
	const struct format_manifest_file none = { .name = NULL };
	void *files;

	if (manifest->file_count == FORMAT_MAX_RANKS)
		return fail(text, IOSHAPE_E_LIMIT, "it has too many files");
	if (base_buffer_append(&decoding->files, &none, sizeof(none)))
		return -ENOMEM;
	files = decoding->files.data;
	manifest->files = files;
	return read_object(text, members, ARRAY_LENGTH(members), ARRAY_LENGTH(members),
			   &manifest->files[manifest->file_count++]);
}

static int read_files(struct text *text, void *into)
{
	return read_array(text, read_file, into);
}

#define NO_RANK UINT64_MAX

/* A shard with the numbers as JSON has them, in 64 bits. */
struct wide_part {
	struct format_manifest_part part;
	uint64_t rank, file, same;
};

static int read_part(struct text *text, void *user)
{
	static const struct member members[] = {
		{ "rank", read_u64, offsetof(struct wide_part, rank) },
		{ "file", read_u64, offsetof(struct wide_part, file) },
		{ "offset", read_u64, offsetof(struct wide_part, part.offset) },
		{ "bytes", read_u64, offsetof(struct wide_part, part.bytes) },
		{ "crc32", read_crc32, offsetof(struct wide_part, part.crc32) },
		{ "same", read_u64, offsetof(struct wide_part, same) },
	};
	const size_t needed = ARRAY_LENGTH(members) - 1;
	struct decoding *decoding = user;
	struct format_manifest *manifest = &decoding->manifest;
	struct wide_part wide = { .same = NO_RANK };
	void *parts;
	int ret;

	if (manifest->rank_count == FORMAT_MAX_RANKS)
		return fail(text, IOSHAPE_E_LIMIT, "it has too many ranks");
	ret = read_object(text, members, ARRAY_LENGTH(members), needed, &wide);
	if (ret)
		return ret;
	/* This order ensures that each rank occurs exactly once. */
	if (wide.rank != manifest->rank_count)
		return malformed(text, "a rank is missing, duplicate or out of order");
	/* check_manifest() compares it with the number of files, when all files are read. */
	wide.part.file = (uint32_t)MIN(wide.file, UINT32_MAX);
	wide.part.repeats = wide.same != NO_RANK;
	wide.part.same = (uint32_t)MIN(wide.same, UINT32_MAX);
	if (base_buffer_append(&decoding->parts, &wide.part, sizeof(wide.part)))
		return -ENOMEM;
	parts = decoding->parts.data;
	manifest->parts = parts;
	manifest->rank_count++;
	return 0;
}

static int read_parts(struct text *text, void *into)
{
	return read_array(text, read_part, into);
}

/* ---- The whole manifest ---------------------------------------------------------------------- */

/* Sets the serial number of a manifest of version 0.1, which has none, from its time. */
static void fill_serial(struct format_manifest *manifest)
{
	if (!manifest->serial && manifest->saved > 0)
		manifest->serial = MIN((uint64_t)manifest->saved, FORMAT_MAX_SERIAL / 1000) * 1000;
}

static int decode(struct decoding *decoding, struct text *text)
{
	/* check_frame() has verified the format and the checksum. */
	static const struct member members[] = {
		{ "format", skip_value, 0 },
		{ "version", read_version, offsetof(struct decoding, version) },
		{ "step", read_u64, offsetof(struct decoding, manifest.step) },
		{ "saved", read_i64, offsetof(struct decoding, manifest.saved) },
		{ "mode", read_mode, offsetof(struct decoding, manifest.mode) },
		{ "attempt", read_attempt, offsetof(struct decoding, manifest.attempt) },
		{ "files", read_files, 0 },
		{ "parts", read_parts, 0 },
		{ "crc32", skip_value, 0 },
		{ "serial", read_u64, offsetof(struct decoding, manifest.serial) },
	};
	/* Version 0.1 did not write the last member. */
	const size_t needed = ARRAY_LENGTH(members) - 1;
	int ret = read_object(text, members, ARRAY_LENGTH(members), needed, decoding);

	skip_space(text);
	if (!ret && text->at < text->end)
		ret = malformed(text, "it has extra text at its end");
	fill_serial(&decoding->manifest);
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
		return base_refuse_with(error, IOSHAPE_E_FORMAT,
					"give the directory of a checkpoint",
					"\"%s\" is not the manifest of a checkpoint", path);
	if (bytes >= head_bytes + TAIL_BYTES) {
		snprintf(tail, sizeof(tail), TAIL, base_crc32(0, text, bytes - TAIL_BYTES));
		if (!memcmp(text + bytes - TAIL_BYTES, tail, TAIL_BYTES))
			return 0;
	}
	return base_refuse_with(
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
		return base_refuse_with(error, code, "use that version",
					"\"%s\" was written by another version of this library "
					"(manifest version %" PRIu64
					", this library reads %u and %u)",
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
		return base_refuse(error, IOSHAPE_E_LIMIT,
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

static int stop(struct text *text, void *into)
{
	(void)text;
	(void)into;
	return -ECANCELED;
}

uint64_t format_manifest_peek_serial(const char *text, size_t bytes)
{
	/* The encoder writes these numbers before the files. */
	static const struct member members[] = {
		{ "saved", read_i64, offsetof(struct format_manifest, saved) },
		{ "serial", read_u64, offsetof(struct format_manifest, serial) },
		{ "files", stop, 0 },
	};
	struct text rest = { text, text + bytes, NULL };
	struct format_manifest head = { .serial = 0 };
	int ret = read_object(&rest, members, ARRAY_LENGTH(members), 0, &head);

	fill_serial(&head);
	return ret == -ECANCELED ? head.serial : UINT64_MAX;
}
