/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Error codes.
 *
 * Every function of libioshape that can fail returns 0 (or a count) on success and a negative code
 * on failure: a negative errno (-ENOSPC, -EACCES, ...) where the operating system has a word for
 * what happened, or one of the codes below. ioshape_last_error() tells the rest.
 */
#ifndef IOSHAPE_ERRORS_H
#define IOSHAPE_ERRORS_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/** Codes of the library's own. They lie far below every errno of Linux, which end at 4095. */
enum ioshape_code {
	/** Not a torch zip, or one with a feature that is not read (compression, encryption). */
	IOSHAPE_E_FORMAT = -5001,
	/** The bytes are not those that were written: a checksum or a cross-check failed. */
	IOSHAPE_E_DAMAGED = -5002,
	/** A count, a length or a nesting in the file or the arguments is above a limit. */
	IOSHAPE_E_LIMIT = -5003,
	/** The file is sound, but has no tensor table: not written through the tensor calls. */
	IOSHAPE_E_NO_TABLE = -5004,
	/** The coordinator of slots is unreachable, or refuses us. */
	IOSHAPE_E_COORDINATOR = -5005,
	/** The save did not fit, and was not tried: IOSHAPE_FULL_SKIP was set. */
	IOSHAPE_E_SKIPPED = -5006,
	/** The save would repeat the one before it, and IOSHAPE_UNCHANGED_FAIL was set. */
	IOSHAPE_E_UNCHANGED = -5007,
	/** What was to be copied later changed before it was copied. */
	IOSHAPE_E_CHANGED = -5008,
	/** There are checkpoints, and none of them can be used: damaged, or of another kind. Where
	 * there is none at all, the code is -ENOENT: only then is it the first start. */
	IOSHAPE_E_UNUSABLE = -5009
};

/**
 * Gives a short text for a code.
 *
 * Any thread may call this.
 *
 * @param code  one that the library returned: its own or a negative errno
 * @return the text, never NULL, never to be freed; "unknown error" for an unknown code
 */
const char *ioshape_strerror(int code);

/**
 * What a call failed with.
 *
 * Programs look at the code and the numbers; sentence and remedy are for people, and may be worded
 * otherwise in any version. Texts are never NULL: "" where there is none.
 */
struct ioshape_error {
	size_t size; /**< sizeof(struct ioshape_error) of this library */
	int code;    /**< what the call returned; 0: no call of this thread has failed yet */
	const char *operation; /**< "save", "load", "verify", "probe", "acquire", ... */
	const char *path;      /**< of the file or directory that it is about */
	const char *sentence;  /**< what failed, and why */
	const char *remedy;    /**< what to do about it; "" if nothing is known to help */
	const char *record;    /**< or tensor that it is about; "" if it is about none */
	uint64_t offset;       /**< in the file; UINT64_MAX: it is about no place in it */
	uint64_t needed_bytes; /**< what the save takes; UINT64_MAX: it is not about space */
	uint64_t free_bytes;   /**< where it is to go; UINT64_MAX: not known, or not about space */
	int64_t rank;          /**< of the group, the one that failed; -1: not one of them */
};

/**
 * Tells about the last call of this thread that failed. Calls that succeed leave it alone.
 *
 * What a background save failed with is told to the thread that calls ioshape_save_wait() for it.
 *
 * @return the error, never NULL, never to be freed; it and its texts are valid until the thread's
 *         next call into the library
 */
const struct ioshape_error *ioshape_last_error(void);

#ifdef __cplusplus
}
#endif

#endif
