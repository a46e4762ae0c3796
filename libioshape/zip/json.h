/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Inside the zip floor: reading JSON (RFC 8259) that nobody vouches for, front to back. Pure.
 *
 * Strict, and stricter where that costs nobody anything: no name twice in an object, no NUL in
 * strings, no unpaired surrogates. Whatever it is, it is read in time that grows with its length,
 * and without memory of its own.
 *
 * Why no library does it: Debian 12 has no yyjson; jansson builds a tree first, which for a
 * manifest of a million ranks (96 MB) takes five times as long as reading and checking it here, and
 * 800 MiB instead of 26. What is untrusted is fuzzed (tests/fuzz/fuzz_manifest.c).
 */
#ifndef ZIP_JSON_H
#define ZIP_JSON_H

#include "base/base.h"

#define ZIP_JSON_MAX_DEPTH 16u
#define ZIP_JSON_MAX_MEMBERS 64u        /* of one object */
#define ZIP_JSON_MAX_NAME_BYTES 64u     /* of a member */
#define ZIP_JSON_MAX_SKIPPED (4u << 20) /* values that the reader does not know, in all */

struct zip_json {
	const char *text; /* borrowed */
	size_t bytes;
	size_t at; /* of what is read next; after a failure, about where it was */
	unsigned depth;
	unsigned skipped;
	const char *problem; /* after a failure: what is wrong there */
};

/* Notes what is wrong, for the sentence, and returns the code: also for who reads through us. */
int zip_json_fail(struct zip_json *json, int code, const char *problem);

/*
 * Each reads one value, with the white space before it. 0, or IOSHAPE_E_DAMAGED if it is not there
 * or malformed, IOSHAPE_E_LIMIT, or what a callback answered. After a failure nothing more can be
 * read.
 */
/* member() reads the value. */
int zip_json_object(struct zip_json *json,
		    int (*member)(void *user, struct zip_json *json, const char *name), void *user);
/* element() reads it. */
int zip_json_array(struct zip_json *json, int (*element)(void *user, struct zip_json *json),
		   void *user);
/* Zero-terminated, in at most `room` bytes with the 0; longer ones are beyond a limit. */
int zip_json_string(struct zip_json *json, char *into, size_t room);
int zip_json_u64(struct zip_json *json, uint64_t *value);
int zip_json_i64(struct zip_json *json, int64_t *value);
int zip_json_bool(struct zip_json *json, bool *value);
/* Any value at all; IOSHAPE_E_LIMIT after ZIP_JSON_MAX_SKIPPED of them. */
int zip_json_skip(struct zip_json *json);
/* That there is nothing but white space any more. */
int zip_json_end(struct zip_json *json);

/* Each appends; 0 or -ENOMEM. */
/* A string of valid UTF-8 as JSON, in quotes: escaped is what must be, as shortly as JSON can. */
int zip_json_put_string(struct base_buffer *out, const char *text);
/* Anything else, of at most 255 bytes. */
__attribute__((format(printf, 2, 3))) int zip_json_put(struct base_buffer *out, const char *format,
						       ...);

#endif
