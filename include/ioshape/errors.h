/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Error codes.
 *
 * Every function of libioshape that can fail returns 0 (or a count) on success and a negative code
 * on failure: a negative errno (-ENOSPC, -EACCES, ...) where the operating system has a word for
 * what happened, or one of the codes below. Each handle also keeps a sentence about its last
 * failure that names the path, the operation and what to do about it.
 */
#ifndef IOSHAPE_ERRORS_H
#define IOSHAPE_ERRORS_H

#ifdef __cplusplus
extern "C" {
#endif

/* Codes of our own begin far below every errno of Linux, which end at 4095. */
enum ioshape_error {
	/* Not a torch zip, or one with a feature that is not read (compression, encryption). */
	IOSHAPE_E_FORMAT = -5001,
	/* The bytes are not those that were written: a checksum or a cross-check failed. */
	IOSHAPE_E_DAMAGED = -5002,
	/* A count, a length or a nesting in the file or the arguments is above a limit. */
	IOSHAPE_E_LIMIT = -5003,
	/* The file is sound, but has no tensor table: not written through the tensor calls. */
	IOSHAPE_E_NO_TABLE = -5004,
	/* The coordinator of slots is out of reach, or refuses us. */
	IOSHAPE_E_COORDINATOR = -5005,
	/* The save did not fit, and was not tried: IOSHAPE_FULL_SKIP was set. */
	IOSHAPE_E_SKIPPED = -5006
};

/*
 * A short text for any code this library returns, its own or a negative errno. Never NULL, never to
 * be freed, safe from any thread. An unknown code gets "unknown error".
 */
const char *ioshape_strerror(int code);

#ifdef __cplusplus
}
#endif

#endif
